//! The controller: makes the two hosts, runs the plan's trials one by one, and keeps the manifest true at every step.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, IsTerminal as _, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, anyhow, bail, ensure};

use super::{
    agent::{Answer, Order, PROTOCOL},
    host,
    link::{self, CLIENT_ADDRESS, SERVER_ADDRESS},
    load::{Progress, TrialOutcome},
    tls::Identity,
};
use crate::{
    plan::{Arm, Plan, Trial},
    record::{
        SCHEMA,
        manifest::{CpuTicks, Host, HostFacts, Manifest, Status, TrialRecord},
    },
};

/// How to run a plan on this machine.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// What.
    pub plan: Plan,
    /// Folder of results folders.
    pub results: PathBuf,
    /// CPUs of the load generator; chosen if empty.
    pub client_cpus: Vec<u32>,
    /// CPUs of the server; chosen if empty.
    pub server_cpus: Vec<u32>,
    /// CPUs of the drain; the spare ones, if any, if empty.
    pub drain_cpus: Vec<u32>,
    /// First port of the arms.
    pub port: u16,
    /// Period of the heartbeat, ns; 0 for none.
    pub heartbeat_ns: u64,
    /// Size of the kernel's ring, bytes.
    pub ring_bytes: u32,
    /// File of faults for the server to commit on order; `None` outside the truth suite.
    pub faults: Option<PathBuf>,
    /// Whether to be silent on stderr while it goes.
    pub quiet: bool,
}

/// A run ends while its disk has this left, so that it can still write how it ended, and the report.
const DISK_RESERVE_BYTES: u64 = 64 << 20;

/// Which CPU does what.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Placement {
    client: Vec<u32>,
    server: Vec<u32>,
    /// Empty if none is to spare.
    drain: Vec<u32>,
}

/// Runs the plan. The results folder holds a manifest from the first moment; the run's status says how it ended.
///
/// # Errors
/// When nothing could be run at all. A run that was cut is no error here: its manifest says so.
pub fn run(options: &RunOptions, interrupted: &AtomicBool) -> anyhow::Result<PathBuf> {
    options.plan.validate()?;
    ensure!(
        host::is_root(),
        "network namespaces and eBPF need root: run it again with sudo"
    );
    let last = u32::from(options.port) + options.plan.arms.len() as u32 - 1;
    ensure!(
        options.port > 0 && last <= 65_535,
        "--port {} leaves no room for the arms' ports",
        options.port
    );
    let placement = place(options, &host::allowed_cpus()?)?;
    // Agents get their folders as they are; theirs may be another working directory.
    let folder = std::path::absolute(results_folder(options)?)?;
    let mut manifest = Manifest {
        schema: SCHEMA,
        pqtail: crate::VERSION.to_owned(),
        begun: utc("+%Y-%m-%dT%H:%M:%SZ"),
        plan: options.plan.clone(),
        status: Status::Running,
        client: Host::default(),
        server: Host::default(),
        trials: Vec::new(),
    };
    manifest.write(&folder)?;
    let mut run = match Run::set_up(options, &placement, &folder, &mut manifest) {
        Ok(run) => run,
        Err(error) => {
            manifest.status = Status::Cut {
                reason: format!("{error:#}"),
            };
            manifest.write(&folder)?;
            return Err(error.context("set up the run"));
        }
    };
    manifest.write(&folder)?;
    let trials = options.plan.trials();
    manifest.status = Status::Complete;
    for trial in &trials {
        let result = run.trial(trial, trials.len(), interrupted);
        match result {
            Ok(record) => manifest.trials.push(record),
            Err(error) => {
                eprintln!("pqtail: {error:#}");
                manifest.status = Status::Cut {
                    reason: format!("trial {}: {error:#}", trial.index),
                };
            }
        }
        if let Some(reason) = reason_to_stop(&folder, interrupted) {
            if !interrupted.load(Ordering::Relaxed) {
                eprintln!("pqtail: {reason}");
            }
            manifest.status = Status::Cut {
                reason: format!("trial {}: {reason}", trial.index),
            };
        }
        let ended = manifest.status.clone();
        let more = ended == Status::Complete && trial.index as usize + 1 < trials.len();
        let shown = if more { Status::Running } else { ended };
        Manifest {
            status: shown,
            ..manifest.clone()
        }
        .write(&folder)?;
        if manifest.status != Status::Complete {
            break;
        }
    }
    Ok(folder)
}

/// Why a run that goes well must end before its plan does.
fn reason_to_stop(folder: &Path, interrupted: &AtomicBool) -> Option<String> {
    if interrupted.load(Ordering::Relaxed) {
        return Some("interrupted".to_owned());
    }
    let free = free_bytes(folder)?;
    (free < DISK_RESERVE_BYTES).then(|| {
        format!(
            "the disk of {} is nearly full ({} MiB left): free some, or name another with --results",
            folder.display(),
            free >> 20
        )
    })
}

/// Room on the disk of a folder; `None` where the file system does not say: there the first write that fails does.
fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = nix::sys::statvfs::statvfs(folder).ok()?;
    (disk.blocks() > 0).then(|| disk.blocks_available() * disk.fragment_size())
}

/// With two CPUs each end has one; with more, the drain has those that are left.
fn place(options: &RunOptions, allowed: &[u32]) -> anyhow::Result<Placement> {
    let chosen = |given: &[u32], default: u32| {
        if given.is_empty() {
            vec![default]
        } else {
            given.to_vec()
        }
    };
    let first = *allowed.first().context("no CPU may be used")?;
    let client = chosen(&options.client_cpus, first);
    let server = chosen(&options.server_cpus, allowed.get(1).copied().unwrap_or(first));
    for (flag, cpus) in [
        ("--client-cpus", &client),
        ("--server-cpus", &server),
        ("--drain-cpus", &options.drain_cpus),
    ] {
        if let Some(cpu) = cpus.iter().find(|cpu| !allowed.contains(cpu)) {
            let allowed: Vec<_> = allowed.iter().map(u32::to_string).collect();
            bail!(
                "{flag} names CPU {cpu}; those that may be used here are {}",
                allowed.join(", ")
            );
        }
    }
    let drain = if options.drain_cpus.is_empty() {
        allowed
            .iter()
            .copied()
            .filter(|cpu| !client.contains(cpu) && !server.contains(cpu))
            .collect()
    } else {
        options.drain_cpus.clone()
    };
    Ok(Placement {
        client,
        server,
        drain,
    })
}

/// Makes a folder of its own for the run; an earlier run of the same day is never touched.
fn results_folder(options: &RunOptions) -> anyhow::Result<PathBuf> {
    let remedy = || {
        format!(
            "make a results folder in {}: name another with --results",
            options.results.display()
        )
    };
    fs::create_dir_all(&options.results).with_context(remedy)?;
    if let Some(free) = free_bytes(&options.results) {
        ensure!(
            free >= DISK_RESERVE_BYTES,
            "the disk of {} has {} MiB left, a run needs more than {}: free some, or name another with --results",
            options.results.display(),
            free >> 20,
            DISK_RESERVE_BYTES >> 20
        );
    }
    let name = format!("{}-{}", utc("+%Y-%m-%d"), options.plan.scenario);
    for number in 1..10_000 {
        let path = options.results.join(if number == 1 {
            name.clone()
        } else {
            format!("{name}-{number}")
        });
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(remedy),
        }
    }
    bail!(
        "{} holds 10,000 runs of today: name another folder with --results",
        options.results.display()
    )
}

/// The present in UTC, in a format of `strftime` (given as `date` takes it).
fn utc(format: &str) -> String {
    let now = std::time::SystemTime::now();
    let seconds = now
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let time = jiff::Timestamp::from_second(seconds.cast_signed()).unwrap_or_default();
    time.strftime(format.trim_start_matches('+')).to_string()
}

/// A child that plays one role. It dies with this value, whatever happens.
struct Agent {
    name: &'static str,
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Agent {
    /// Starts this very program as an agent, in a network namespace of its own or in ours.
    fn start(name: &'static str, own_netns: bool) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(program);
        command.arg("agent").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = if own_netns {
            link::spawn(&mut command)?
        } else {
            command.spawn().context("start an agent")?
        };
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("an agent's stdout")?);
        Ok(Self {
            name,
            child,
            orders,
            answers,
        })
    }

    fn order(&mut self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        let orders = self.orders.as_mut().context("an agent's stdin")?;
        let sent = orders.write_all(&line).and_then(|()| orders.flush());
        sent.map_err(|error| anyhow!(error)).with_context(|| self.death())
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        let mut line = String::new();
        let read = self
            .answers
            .read_line(&mut line)
            .with_context(|| format!("hear the {}", self.name))?;
        if read == 0 {
            bail!(self.death());
        }
        match serde_json::from_str(&line)
            .with_context(|| format!("the {} said '{}'", self.name, line.trim()))?
        {
            Answer::Failed(reason) => bail!("{}: {reason}", self.name),
            answer => Ok(answer),
        }
    }

    fn ask(&mut self, order: &Order) -> anyhow::Result<Answer> {
        self.order(order)?;
        self.answer()
    }

    /// What became of an agent that no longer answers.
    fn death(&mut self) -> String {
        // It closed its end, so it is ending; waiting tells how.
        match self.child.wait() {
            Ok(status) => format!(
                "the {} died ({status}); what it recorded before is kept",
                self.name
            ),
            Err(error) => format!("the {} does not answer ({error})", self.name),
        }
    }

    fn hello(&mut self) -> anyhow::Result<(u32, u32, HostFacts)> {
        match self.ask(&Order::Hello { protocol: PROTOCOL })? {
            Answer::Hello {
                pid, netns, facts, ..
            } => Ok((pid, netns, *facts)),
            other => Err(self.surprise(&other)),
        }
    }

    fn threads(&mut self, order: &Order) -> anyhow::Result<Vec<u32>> {
        match self.ask(order)? {
            Answer::Threads(threads) => Ok(threads),
            other => Err(self.surprise(&other)),
        }
    }

    fn surprise(&self, answer: &Answer) -> anyhow::Error {
        anyhow!("the {} answered {answer:?}, which was not asked", self.name)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The end of its orders lets it finish its recording; only one that does not end is killed.
        drop(self.orders.take());
        for _ in 0..100 {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(std::time::Duration::from_millis(20)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A run that is set up.
struct Run {
    // Dropped in this order: the load first, so that the server sees its connections end.
    load: Agent,
    server: Agent,
    probe: Option<Agent>,
    folder: PathBuf,
    kernel_folder: String,
    quiet: bool,
}

impl Run {
    fn set_up(
        options: &RunOptions,
        placement: &Placement,
        folder: &Path,
        manifest: &mut Manifest,
    ) -> anyhow::Result<Self> {
        let plan = &options.plan;
        let ports: Vec<(Arm, u16)> = plan
            .arms
            .iter()
            .map(|&arm| (arm, plan.port(options.port, arm)))
            .collect();
        let identity = Identity::generate()?;
        let mut server = Agent::start("server", true)?;
        let mut load = Agent::start("load generator", true)?;
        let (server_pid, server_netns, server_facts) = server.hello()?;
        let (_, client_netns, client_facts) = load.hello()?;
        // The server's end waits for the link that the client's end makes.
        server.order(&Order::Link {
            peer_pid: None,
            address: SERVER_ADDRESS,
        })?;
        load.ask(&Order::Link {
            peer_pid: Some(server_pid),
            address: CLIENT_ADDRESS,
        })?;
        server.answer()?;
        let address = IpAddr::V4(SERVER_ADDRESS);
        let server_threads = server.threads(&Order::Serve {
            address,
            ports: ports.clone(),
            cpus: placement.server.clone(),
            identity: identity.clone(),
            faults: options.faults.clone(),
            folder: folder.join("raw/server"),
        })?;
        let client_threads = load.threads(&Order::Load {
            server: address,
            ports: ports.clone(),
            cpus: placement.client.clone(),
            plan: Box::new(plan.clone()),
            certificate: identity.certificate,
            folder: folder.join("raw/client"),
        })?;
        let kernel = PathBuf::from("raw/local");
        let mut probe = None;
        let mut probes = Vec::new();
        if plan.probes {
            let mut agent = Agent::start("recorder", false)?;
            agent.hello()?;
            let mut cpus = [placement.client.clone(), placement.server.clone()].concat();
            cpus.sort_unstable();
            cpus.dedup();
            let order = Order::Probe {
                ports: ports.iter().map(|(_, port)| *port).collect(),
                cpus,
                threads: [client_threads.clone(), server_threads.clone()].concat(),
                drain_cpus: placement.drain.clone(),
                heartbeat_ns: options.heartbeat_ns,
                ring_bytes: options.ring_bytes,
                folder: folder.join(&kernel),
            };
            match agent.ask(&order)? {
                Answer::Probes(found) => probes = found,
                other => return Err(agent.surprise(&other)),
            }
            probe = Some(agent);
        } else if !options.quiet {
            eprintln!(
                "pqtail: --no-probes: latencies only. No ledger, no causes, no clock alignment, no steal, no record of losses."
            );
        }
        let end = |address, netns, threads, cpus: &[u32], stamps: &str, facts| Host {
            address: Some(IpAddr::V4(address)),
            netns,
            threads,
            cpus: cpus.to_vec(),
            stamps: PathBuf::from(stamps),
            kernel: plan.probes.then(|| kernel.clone()),
            facts,
            probes: probes.clone(),
        };
        manifest.client = end(
            CLIENT_ADDRESS,
            client_netns,
            client_threads,
            &placement.client,
            "raw/client",
            client_facts,
        );
        manifest.server = end(
            SERVER_ADDRESS,
            server_netns,
            server_threads,
            &placement.server,
            "raw/server",
            server_facts,
        );
        for missing in probes.iter().filter(|probe| !probe.attached) {
            if !options.quiet {
                eprintln!(
                    "pqtail: no {}: {} ({})",
                    missing.name, missing.consequence, missing.reason
                );
            }
        }
        Ok(Self {
            load,
            server,
            probe,
            folder: folder.to_owned(),
            kernel_folder: kernel.display().to_string(),
            quiet: options.quiet,
        })
    }

    fn trial(&mut self, trial: &Trial, of: usize, interrupted: &AtomicBool) -> anyhow::Result<TrialRecord> {
        let begin = Order::Begin { trial: trial.index };
        if let Some(probe) = &mut self.probe {
            probe.ask(&begin)?;
        }
        self.server.ask(&begin)?;
        let ran = self.load(trial, of, interrupted);
        // Whatever became of the load, the others' recordings are ended in order.
        let served = self.server.ask(&Order::End);
        let recorded = self.probe.as_mut().map(|probe| probe.ask(&Order::End));
        let (outcome, stat) = ran?;
        let (connections, server_cpu_ns) = match served? {
            Answer::Served(written, cpu_ns) => (written, cpu_ns),
            other => return Err(self.server.surprise(&other)),
        };
        let mut kernel = BTreeMap::new();
        if let Some(Answer::Recorded(record, _)) = recorded.transpose()? {
            kernel.insert(self.kernel_folder.clone(), record);
        }
        Ok(TrialRecord {
            trial: *trial,
            begin_ns: outcome.begin_ns,
            requests: outcome.written,
            connections,
            kernel,
            client_cpu_ns: outcome.cpu_ns,
            server_cpu_ns,
            client_stat: stat.clone(),
            server_stat: stat,
        })
    }

    /// The load generator's part, with its progress.
    fn load(
        &mut self,
        trial: &Trial,
        of: usize,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<(TrialOutcome, CpuTicks)> {
        self.load.order(&Order::Run { trial: *trial })?;
        let mut stopped = false;
        let result = loop {
            match self.load.answer()? {
                Answer::Progress(progress) => {
                    if !self.quiet {
                        show(trial, of, &progress);
                    }
                    // Without the server every further request fails, without the recorder none has a cause: nothing is
                    // left to measure.
                    for agent in [Some(&mut self.server), self.probe.as_mut()]
                        .into_iter()
                        .flatten()
                    {
                        if let Some(status) = agent.child.try_wait()? {
                            self.load.order(&Order::Stop)?;
                            bail!(
                                "the {} died mid-trial ({status}): what was recorded before is kept",
                                agent.name
                            );
                        }
                    }
                    if !stopped && reason_to_stop(&self.folder, interrupted).is_some() {
                        self.load.order(&Order::Stop)?;
                        stopped = true;
                    }
                }
                Answer::Ran(outcome, ticks) => break (outcome, ticks),
                other => return Err(self.load.surprise(&other)),
            }
        };
        if !self.quiet {
            eprintln!();
        }
        Ok(result)
    }
}

/// One line that is renewed on a terminal.
fn show(trial: &Trial, of: usize, progress: &Progress) {
    let ms = |ns: u64| ns as f64 / 1e6;
    let line = format!(
        "trial {}/{of} {:<16} {:>5.1} s  {:>7} done  {} failed  p50 {:.3}  p99 {:.3}  p99.9 {:.3} ms",
        trial.index + 1,
        trial.arm,
        progress.elapsed_ns as f64 / 1e9,
        progress.done,
        progress.errors,
        ms(progress.p50_ns),
        ms(progress.p99_ns),
        ms(progress.p999_ns),
    );
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{line}");
    } else if progress.elapsed_ns % 5_000_000_000 < 500_000_000 {
        eprintln!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Arrivals;

    fn options() -> RunOptions {
        RunOptions {
            plan: Plan {
                scenario: "test".to_owned(),
                arms: vec![Arm::X25519],
                trials_per_arm: 1,
                rate_hz: 10.0,
                duration_ns: 1_000_000_000,
                warmup_ns: 0,
                arrivals: Arrivals::Constant,
                seed: 1,
                timeout_ns: 1_000_000_000,
                probes: true,
            },
            results: PathBuf::new(),
            client_cpus: Vec::new(),
            server_cpus: Vec::new(),
            drain_cpus: Vec::new(),
            port: 8443,
            heartbeat_ns: 0,
            ring_bytes: 1 << 20,
            faults: None,
            quiet: true,
        }
    }

    #[test]
    fn the_drain_gets_what_is_spare_and_nothing_on_two_cpus() {
        let on = |online: u32| place(&options(), &(0..online).collect::<Vec<_>>()).unwrap();
        assert_eq!(
            on(1),
            Placement {
                client: vec![0],
                server: vec![0],
                drain: vec![]
            }
        );
        assert_eq!(
            on(2),
            Placement {
                client: vec![0],
                server: vec![1],
                drain: vec![]
            }
        );
        assert_eq!(
            on(4),
            Placement {
                client: vec![0],
                server: vec![1],
                drain: vec![2, 3]
            }
        );
    }

    #[test]
    fn a_cpu_that_is_not_there_is_named_with_its_flag() {
        let error = place(
            &RunOptions {
                server_cpus: vec![9],
                ..options()
            },
            &[0, 1],
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("--server-cpus") && error.contains("CPU 9"),
            "{error}"
        );
    }

    #[test]
    fn a_second_run_of_a_day_gets_a_folder_of_its_own() {
        let results = tempfile::tempdir().unwrap();
        let options = RunOptions {
            results: results.path().to_owned(),
            ..options()
        };
        let (first, second) = (
            results_folder(&options).unwrap(),
            results_folder(&options).unwrap(),
        );
        assert_ne!(first, second);
        assert!(second.to_string_lossy().ends_with("-test-2"));
    }
}
