//! The controller: makes the two hosts, runs the plan's trials one by one, and keeps the manifest true at every step.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, bail, ensure};

use super::{
    agent::{Answer, ForeignServer, Order},
    doctor::{Level, Questions},
    ends::{self, Ends, Place},
    host::{DISK_RESERVE_BYTES, free_bytes},
    load::{Progress, TrialOutcome},
    nginx::Program,
    service::Service,
    tls::{self, Certificates, Identities, Identity},
};
use crate::{
    analyze::stream_name,
    plan::{Arm, Cell, Plan, Trial, condition::Condition},
    record::{
        SCHEMA,
        manifest::{
            Absent, CpuTicks, Host, MANIFEST, Manifest, ProbeStatus, SET_ASIDE, Status, TrialRecord,
            recording,
        },
        stamps::RequestStamps,
        stream::{Recording, StreamKind},
    },
    statistics::{interval::blocks_needed, quantile},
};

/// How to run a plan.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// What.
    pub plan: Plan,
    /// Whether to go on until the interval is narrow.
    pub until: Option<Until>,
    /// A trial is run again, a few times at most, if the hypervisor took a larger share of a measured CPU, 0 to 1.
    pub steal_share_max: Option<f64>,
    /// Folder of results folders.
    pub results: PathBuf,
    /// Who serves.
    pub server: ServerChoice,
    /// Inventory of the two hosts; `None` for two network namespaces of this machine.
    pub hosts: Option<PathBuf>,
    /// Folder with `pqtail-<architecture>` for the hosts; `None` for this very program.
    pub binaries: Option<PathBuf>,
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
    /// The load generator gets this share of one CPU, enforced by a cgroup; `None` for as much as there is.
    pub client_cpu_share: Option<f64>,
    /// File of faults for the server to commit on order; `None` outside the truth suite.
    pub faults: Option<PathBuf>,
    /// Whether to be silent on stderr while it goes.
    pub quiet: bool,
}

/// When a run has trials enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Until {
    /// Half the interval of the difference at the median, over the baseline's median.
    pub relative_width: f64,
    /// Trials per arm at most.
    pub trials_max: u32,
}

/// Who serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerChoice {
    /// The embedded server, which takes stamps of its own.
    Embedded,
    /// An nginx that is started for the run, told by the kernel's records alone.
    Nginx {
        /// The executable; `None` for what the inventory names, else the usual one.
        path: Option<PathBuf>,
        /// As [`Program::root`].
        root: Option<PathBuf>,
    },
    /// A server that runs already, told by the kernel's records alone.
    Adopted {
        /// Where its libssl is, as it sees that; `None` for what it has mapped.
        libssl: Option<PathBuf>,
        /// Whether all arms have one port, so that what the client offers decides; else each has its own, from the first on.
        one_port: bool,
    },
}

/// The nginx of a host of which nothing is known.
const USUAL_NGINX: &str = "/usr/sbin/nginx";

/// Runs the plan. The results folder holds a manifest from the first moment; the run's status says how it ended.
///
/// # Errors
/// When nothing could be run at all. A run that was cut is no error here: its manifest says so.
pub fn run(options: &RunOptions, interrupted: &AtomicBool) -> anyhow::Result<PathBuf> {
    options.plan.validate()?;
    ensure!(
        options.until.is_none() || options.plan.trials_per_arm > 1,
        "--until judges the spread from --trials, of which it needs 2 at least"
    );
    ensure!(
        options.until.is_none() || options.plan.cells().len() > options.plan.conditions.len(),
        "--until is about a difference: name two arms"
    );
    ensure!(
        options.steal_share_max.is_none() || options.hosts.is_none() || options.plan.probes,
        "--steal-max on two hosts needs the recorder, which reads the server's /proc/stat: leave out --no-probes"
    );
    ensure!(
        options.faults.is_none() || options.server == ServerChoice::Embedded,
        "--faults are committed by the embedded server only: leave out --server"
    );
    let services = services(options)?;
    if options.server != ServerChoice::Embedded
        && services.iter().any(|service| service.arm() == Arm::NoCrypto)
    {
        return Err(tls::no_tls(Arm::NoCrypto));
    }
    for service in &services {
        require_able(&options.server, &service.condition)?;
    }
    if let ServerChoice::Nginx { root: Some(root), .. } = &options.server {
        ensure!(
            root.is_absolute(),
            "--nginx-root {}: name it with its whole path, which the server's end finds from any folder",
            root.display()
        );
    }
    ends::check(options)?;
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
        steal_share_max: options.steal_share_max,
        set_aside: Vec::new(),
    };
    manifest.write(&folder)?;
    let set_up = Ends::meet(options, &folder, interrupted)
        .and_then(|ends| Run::set_up(options, ends, &folder, &mut manifest));
    let mut run = match set_up {
        Ok(run) => run,
        Err(error) => {
            manifest.status = Status::Cut {
                reason: format!("{error:#}"),
            };
            manifest.write(&folder)?;
            forget(&folder);
            return Err(error.context("set up the run"));
        }
    };
    if interrupted.load(Ordering::Relaxed) {
        let reason = "interrupted before the first trial: nothing was recorded";
        manifest.status = Status::Cut {
            reason: reason.to_owned(),
        };
        manifest.write(&folder)?;
        run.ends.part(&folder);
        forget(&folder);
        bail!(reason);
    }
    manifest.write(&folder)?;
    let mut trials = options.plan.trials();
    manifest.status = Status::Complete;
    let mut next = 0;
    while let Some(trial) = trials.get(next) {
        let result = run.trial(trial, trials.len(), interrupted);
        let stop = run.reason_to_stop(interrupted);
        let result = result.and_then(|record| {
            let again = stop.is_none() && is_to_be_repeated(&manifest, &record);
            if again {
                run.tell_of_repetition(&manifest, &record);
                set_aside(&folder, manifest.set_aside.len(), &record)?;
            }
            Ok((record, again))
        });
        match result {
            Ok((record, true)) => manifest.set_aside.push(record),
            Ok((record, false)) => {
                manifest.trials.push(record);
                next += 1;
            }
            Err(error) => {
                eprintln!("pqtail: {error:#}");
                manifest.status = Status::Cut {
                    reason: format!("trial {}: {error:#}", trial.index),
                };
            }
        }
        if let Some(reason) = stop {
            if !interrupted.load(Ordering::Relaxed) {
                eprintln!("pqtail: {reason}");
            }
            manifest.status = Status::Cut {
                reason: format!("trial {}: {reason}", trial.index),
            };
        }
        if let Some(until) = options.until.filter(|_| next == trials.len())
            && manifest.status == Status::Complete
            && manifest.plan.first_stage.is_none()
        {
            second_stage(&mut manifest, until, &folder, options.quiet)?;
            // The trials that have run are the first of them.
            trials = manifest.plan.trials();
            run.plan = manifest.plan.clone();
        }
        let ended = manifest.status.clone();
        let more = ended == Status::Complete && next < trials.len();
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
    run.ends.part(&folder);
    Ok(folder)
}

/// Judges from the trials so far, which are a first stage, how many there must be, and plans them.
fn second_stage(manifest: &mut Manifest, until: Until, folder: &Path, quiet: bool) -> anyhow::Result<()> {
    let mut medians: BTreeMap<(Cell, u32), f64> = BTreeMap::new();
    for TrialRecord { trial, .. } in &manifest.trials {
        let path = recording(&folder.join(CLIENT_STAMPS), stream_name::REQUESTS, trial.index);
        let recorded = Recording::<RequestStamps>::open(&path, StreamKind::Requests)?;
        let measured = recorded.records.iter().filter(|request| request.is_measured());
        let mut latencies: Vec<u64> = measured.filter_map(RequestStamps::latency_ns).collect();
        latencies.sort_unstable();
        if !latencies.is_empty() {
            medians.insert((trial.cell(), trial.block), quantile(&latencies, 0.5) as f64);
        }
    }
    let plan = &mut manifest.plan;
    let stage = plan.trials_per_arm;
    let mut needed = stage;
    for condition in 0..plan.conditions.len() as u32 {
        let (first, rest) = plan
            .arms_of(condition)
            .split_first()
            .context("a condition has an arm")?;
        let of = |arm: Arm, block| medians.get(&(Cell { condition, arm }, block)).copied();
        let blocks: Vec<u32> = (0..stage).filter(|&block| of(*first, block).is_some()).collect();
        let baseline =
            blocks.iter().filter_map(|&block| of(*first, block)).sum::<f64>() / blocks.len() as f64;
        for &arm in rest {
            let differences: Vec<f64> = blocks
                .iter()
                .filter_map(|&block| Some(of(arm, block)? - of(*first, block)?))
                .collect();
            if differences.len() > 1 {
                needed = needed.max(blocks_needed(&differences, until.relative_width * baseline));
            }
        }
    }
    plan.first_stage = Some(stage);
    plan.trials_per_arm = needed.min(until.trials_max).max(stage);
    if !quiet {
        let capped = if needed > plan.trials_per_arm {
            format!("; {needed} would be needed, --trials-max allows no more")
        } else {
            String::new()
        };
        eprintln!(
            "pqtail: after {stage} trials per arm: {} in all{capped}",
            plan.trials_per_arm
        );
    }
    Ok(())
}

/// So often a trial is run again at most: where steal is the rule, a run still ends, and its blocks stay close together.
pub const REPEATS_MAX: usize = 3;

/// Whether the hypervisor took too much of a trial's CPUs. Nothing of its latencies is looked at, or trials would be chosen by their
/// result.
fn is_to_be_repeated(manifest: &Manifest, record: &TrialRecord) -> bool {
    let share = manifest.steal_share(record);
    let is_too_much = manifest
        .steal_share_max
        .zip(share)
        .is_some_and(|(most, share)| share > most);
    let same = manifest
        .set_aside
        .iter()
        .filter(|each| each.trial == record.trial);
    is_too_much && same.count() < REPEATS_MAX
}

/// Moves a trial's recordings out of the way of those of its repetition. `number` tells those of a run apart.
fn set_aside(folder: &Path, number: usize, record: &TrialRecord) -> anyhow::Result<()> {
    let streams = [
        (Path::new(CLIENT_STAMPS), stream_name::REQUESTS),
        (Path::new(SERVER_STAMPS), stream_name::CONNECTIONS),
    ];
    let kernels = record
        .kernel
        .keys()
        .map(|folder| (Path::new(folder), stream_name::KERNEL));
    for (recorded, stream) in streams.into_iter().chain(kernels) {
        let recorded = folder.join(recorded);
        let from = recording(&recorded, stream, record.trial.index);
        if !from.exists() {
            continue;
        }
        let aside = recorded.join(SET_ASIDE);
        let name = from.file_name().unwrap_or_default();
        let to = aside.join(format!("{number:03}-{}", name.display()));
        fs::create_dir_all(&aside)
            .and_then(|()| fs::rename(&from, &to))
            .with_context(|| format!("set aside {}: move it to {}", from.display(), to.display()))?;
    }
    Ok(())
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

/// Removes the folder of a run that recorded nothing, unless there is something to come back for.
fn forget(folder: &Path) {
    if is_empty_but_for_manifest(folder) {
        // What cannot be removed says itself that the run was cut.
        let _ = fs::remove_dir_all(folder);
    }
}

fn is_empty_but_for_manifest(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_nothing = |entry: fs::DirEntry| {
        entry.file_name() == MANIFEST || entry.path().is_dir() && is_empty_but_for_manifest(&entry.path())
    };
    entries.into_iter().all(is_nothing)
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

/// A run that is set up.
struct Run {
    ends: Ends,
    plan: Plan,
    folder: PathBuf,
    /// Why a host is to be taken away, once that is known.
    notice: Option<String>,
    quiet: bool,
}

impl Run {
    fn set_up(
        options: &RunOptions,
        mut ends: Ends,
        folder: &Path,
        manifest: &mut Manifest,
    ) -> anyhow::Result<Self> {
        if ends.hosts.is_some() && !options.quiet {
            preflight(options, &mut ends);
        }
        if let Err(error) = assign(options, &mut ends, manifest) {
            ends.part(folder);
            return Err(error);
        }
        if !options.quiet {
            tell_of_probes(options, manifest);
        }
        Ok(Self {
            ends,
            plan: options.plan.clone(),
            folder: folder.to_owned(),
            notice: None,
            quiet: options.quiet,
        })
    }

    fn trial(&mut self, trial: &Trial, of: usize, interrupted: &AtomicBool) -> anyhow::Result<TrialRecord> {
        let begin = Order::Begin { trial: trial.index };
        for recorder in &mut self.ends.recorders {
            recorder.agent.ask(&begin)?;
        }
        self.ends.server.ask(&begin)?;
        let ran = self.load(trial, of, interrupted);
        // Whatever became of the load, the others' recordings are ended in order.
        let served = self.ends.server.ask(&Order::End);
        let mut recorded = Vec::new();
        for recorder in &mut self.ends.recorders {
            recorded.push((recorder.kernel.clone(), recorder.agent.ask(&Order::End)));
        }
        let (outcome, client_stat) = ran?;
        let (connections, server_cpu_ns) = match served? {
            Answer::Served(written, cpu_ns) => (written, cpu_ns),
            other => return Err(self.ends.server.surprise(&other)),
        };
        let mut kernel = BTreeMap::new();
        // Without a recorder only the client's machine tells, which is the server's too unless that is a host of its own.
        let mut server_stat = if self.ends.hosts.is_none() {
            client_stat.clone()
        } else {
            CpuTicks::default()
        };
        for (folder, answer) in recorded {
            if let Answer::Recorded(record, ticks) = answer? {
                if folder == self.ends.server_at.kernel {
                    server_stat = ticks;
                }
                kernel.insert(folder.display().to_string(), record);
            }
        }
        self.fetch(trial.index, !connections.sha256.is_empty())?;
        Ok(TrialRecord {
            trial: *trial,
            begin_ns: outcome.begin_ns,
            requests: outcome.written,
            connections,
            kernel,
            client_cpu_ns: outcome.cpu_ns,
            server_cpu_ns,
            client_stat,
            server_stat,
        })
    }

    /// Brings home what hosts recorded of a trial, before the next begins: nothing is under way that it could disturb, and what is
    /// here no longer depends on the connection.
    fn fetch(&mut self, trial: u32, has_connections: bool) -> anyhow::Result<()> {
        let kernel = |place: &Place| recording(&place.kernel, stream_name::KERNEL, trial);
        let has_kernel = !self.ends.recorders.is_empty();
        let mut from_client = vec![recording(Path::new(CLIENT_STAMPS), stream_name::REQUESTS, trial)];
        from_client.extend(has_kernel.then(|| kernel(&self.ends.client_at)));
        let connections = recording(Path::new(SERVER_STAMPS), stream_name::CONNECTIONS, trial);
        let mut from_server: Vec<PathBuf> = has_connections.then_some(connections).into_iter().collect();
        from_server.extend(has_kernel.then(|| kernel(&self.ends.server_at)));
        self.ends.fetch(&from_client, &from_server, &self.folder)
    }

    fn tell_of_repetition(&self, manifest: &Manifest, record: &TrialRecord) {
        if let Some(share) = manifest.steal_share(record).filter(|_| !self.quiet) {
            eprintln!(
                "pqtail: the hypervisor took {:.1} % of a CPU in trial {}: it is set aside and run again",
                share * 100.0,
                record.trial.index
            );
        }
    }

    /// Why a run that goes well must end before its plan does.
    fn reason_to_stop(&mut self, interrupted: &AtomicBool) -> Option<String> {
        if interrupted.load(Ordering::Relaxed) {
            return Some("interrupted".to_owned());
        }
        self.notice = self.notice.take().or_else(|| self.ends.notices.try_recv().ok());
        if let Some(notice) = &self.notice {
            return Some(notice.clone());
        }
        let free = free_bytes(&self.folder)?;
        (free < DISK_RESERVE_BYTES).then(|| {
            format!(
                "the disk of {} is nearly full ({} MiB left): free some, or name another with --results",
                self.folder.display(),
                free >> 20
            )
        })
    }

    /// The load generator's part, with its progress.
    fn load(
        &mut self,
        trial: &Trial,
        of: usize,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<(TrialOutcome, CpuTicks)> {
        self.ends.load.order(&Order::Run { trial: *trial })?;
        let mut stopped = false;
        let result = loop {
            match self.ends.load.answer()? {
                Answer::Progress(progress) => {
                    if !self.quiet {
                        show(&self.plan, trial, of, &progress);
                    }
                    // Without the server every further request fails, without a recorder none has a cause: nothing is
                    // left to measure.
                    if let Some(fate) = self.lost()? {
                        self.ends.load.order(&Order::Stop)?;
                        bail!("mid-trial: {fate}");
                    }
                    if !stopped && self.reason_to_stop(interrupted).is_some() {
                        self.ends.load.order(&Order::Stop)?;
                        stopped = true;
                    }
                }
                Answer::Ran(outcome, ticks) => break (outcome, ticks),
                other => return Err(self.ends.load.surprise(&other)),
            }
        };
        if !self.quiet {
            eprintln!();
        }
        Ok(result)
    }

    /// What became of the first agent, beside the load, that has ended.
    fn lost(&mut self) -> anyhow::Result<Option<String>> {
        let recorders = self.ends.recorders.iter_mut().map(|each| &mut each.agent);
        for agent in std::iter::once(&mut self.ends.server).chain(recorders) {
            if let Some(fate) = agent.has_ended()? {
                return Ok(Some(fate));
            }
        }
        Ok(None)
    }
}

/// Folders of the ends' own stamps, relative to the run's.
const CLIENT_STAMPS: &str = "raw/client";
const SERVER_STAMPS: &str = "raw/server";

/// Tells what is doubtful about each host before it is measured on. What cannot work at all ends the run where it is tried.
fn preflight(options: &RunOptions, ends: &mut Ends) {
    let Ends {
        load,
        server,
        client_at,
        server_at,
        ..
    } = ends;
    for (name, agent, place, peer) in [
        ("client", load, &*client_at, server_at.address),
        ("server", server, &*server_at, client_at.address),
    ] {
        let questions = Questions {
            rate_hz: (0..options.plan.conditions.len() as u32)
                .map(|condition| options.plan.rate_hz(condition))
                .reduce(f64::max),
            cpus: place.cpus.clone(),
            peer: Some(peer),
            folder: place.folder.clone(),
        };
        // An agent that fails here fails again where it matters.
        let Ok(Answer::Findings(findings)) = agent.ask(&Order::Doctor(questions)) else {
            continue;
        };
        for each in findings.iter().filter(|each| each.level >= Level::Warn) {
            eprintln!(
                "pqtail: {name}: {} {}: {}",
                each.rule, each.found, each.consequence
            );
        }
    }
}

/// Gives every agent its role, and the manifest what is known of the ends.
fn assign(options: &RunOptions, ends: &mut Ends, manifest: &mut Manifest) -> anyhow::Result<()> {
    let plan = &options.plan;
    let services = services(options)?;
    let mut identities = Identities::new();
    for service in &services {
        let kind = service.condition.certificate;
        if let Entry::Vacant(entry) = identities.entry(kind) {
            entry.insert(Identity::generate(kind)?);
        }
    }
    let certificates = identities
        .iter()
        .map(|(kind, identity)| (*kind, identity.certificate.clone()));
    let certificates: Certificates = certificates.collect();
    let order = serve(options, &ends.server_at, &services, identities);
    let (server_threads, software) = match ends.server.ask(&order)? {
        Answer::Serves { threads, software } => (threads, software),
        other => return Err(ends.server.surprise(&other)),
    };
    let is_ours = !matches!(options.server, ServerChoice::Adopted { .. });
    let client_threads = ends.load.threads(&Order::Load {
        server: ends.server_at.address,
        services: services.clone(),
        cpus: ends.client_at.cpus.clone(),
        plan: Box::new(plan.clone()),
        certificates: is_ours.then_some(certificates),
        folder: ends.client_at.folder.join(CLIENT_STAMPS),
    })?;
    let mut probes: BTreeMap<PathBuf, Vec<ProbeStatus>> = BTreeMap::new();
    let of_ends = [
        (&ends.client_at, &client_threads),
        (&ends.server_at, &server_threads),
    ];
    for recorder in &mut ends.recorders {
        let (mut cpus, mut threads) = (Vec::new(), Vec::new());
        let mut folder = PathBuf::new();
        let foreign = foreign(options, &server_threads).filter(|_| ends.server_at.kernel == recorder.kernel);
        for (place, tids) in of_ends {
            if place.kernel == recorder.kernel {
                cpus.extend(&place.cpus);
                threads.extend(tids);
                folder = place.folder.join(&recorder.kernel);
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        let order = Order::Probe {
            ports: services.iter().map(|service| service.port).collect(),
            cpus,
            threads,
            foreign,
            drain_cpus: recorder.drain_cpus.clone(),
            heartbeat_ns: options.heartbeat_ns,
            ring_bytes: options.ring_bytes,
            folder,
        };
        match recorder.agent.ask(&order)? {
            Answer::Probes(found) => probes.insert(recorder.kernel.clone(), found),
            other => return Err(recorder.agent.surprise(&other)),
        };
    }
    let end = |place: &Place, threads, stamps: &str| Host {
        address: Some(place.address),
        netns: place.met.netns,
        threads,
        software: String::new(),
        cpus: place.cpus.clone(),
        stamps: PathBuf::from(stamps),
        kernel: plan.probes.then(|| place.kernel.clone()),
        facts: place.met.facts.clone(),
        probes: probes.get(&place.kernel).cloned().unwrap_or_default(),
    };
    manifest.client = end(&ends.client_at, client_threads, CLIENT_STAMPS);
    manifest.server = Host {
        software,
        ..end(&ends.server_at, server_threads, SERVER_STAMPS)
    };
    Ok(())
}

/// Where each cell is served.
fn services(options: &RunOptions) -> anyhow::Result<Vec<Service>> {
    let one_port = matches!(options.server, ServerChoice::Adopted { one_port: true, .. });
    let services = Service::of_plan(&options.plan, options.port, one_port);
    services
        .filter(|_| options.port > 0)
        .with_context(|| format!("--port {} leaves no room for the arms' ports", options.port))
}

/// Refuses what a server that is not ours cannot be made to do.
fn require_able(server: &ServerChoice, condition: &Condition) -> anyhow::Result<()> {
    let plain = Condition::default();
    let of_server = [
        ("loss", condition.loss != plain.loss),
        ("early-data", condition.early_data),
        ("resumed", condition.resumed > 0.0),
        ("held-connections", condition.held_connections > 0),
        ("response-bytes", condition.response_bytes != plain.response_bytes),
        (
            "requests-per-connection",
            condition.requests_per_connection != plain.requests_per_connection,
        ),
        ("certificate", condition.certificate != plain.certificate),
        ("cipher-suite", condition.cipher_suite != plain.cipher_suite),
        ("known-shift", condition.server_extra_ns > 0),
    ];
    // What nginx is configured for; of an adopted server nothing is known.
    let able: &[&str] = match server {
        ServerChoice::Embedded => return Ok(()),
        ServerChoice::Nginx { .. } => &[
            "resumed",
            "response-bytes",
            "requests-per-connection",
            "certificate",
            "cipher-suite",
        ],
        ServerChoice::Adopted { .. } => &[],
    };
    match of_server
        .iter()
        .find(|(name, asked)| *asked && !able.contains(name))
    {
        Some((name, _)) => bail!(
            "{name} is set, which takes a server of our own: take --server embedded, or a scenario without it"
        ),
        None => Ok(()),
    }
}

fn foreign(options: &RunOptions, threads: &[u32]) -> Option<ForeignServer> {
    let libssl = match &options.server {
        ServerChoice::Embedded => return None,
        ServerChoice::Nginx { .. } => None,
        ServerChoice::Adopted { libssl, .. } => libssl.clone(),
    };
    Some(ForeignServer {
        threads: threads.to_vec(),
        libssl,
    })
}

/// What makes the server's end a server.
fn serve(options: &RunOptions, at: &Place, services: &[Service], identities: Identities) -> Order {
    let (address, services, cpus) = (at.address, services.to_vec(), at.cpus.clone());
    let folder = at.folder.join(SERVER_STAMPS);
    match &options.server {
        ServerChoice::Embedded => Order::Serve {
            address,
            services,
            cpus,
            identities,
            faults: options.faults.clone(),
            folder,
        },
        ServerChoice::Nginx { path, root } => Order::ServeNginx {
            program: Program {
                path: path
                    .clone()
                    .or_else(|| at.nginx.clone())
                    .unwrap_or_else(|| PathBuf::from(USUAL_NGINX)),
                root: root.clone(),
            },
            address,
            services,
            cpus,
            identities,
            folder,
        },
        ServerChoice::Adopted { .. } => Order::Adopt {
            ports: services.into_iter().map(|service| service.port).collect(),
            folder,
        },
    }
}

/// What is not seen in this run, and so not in its report.
fn tell_of_probes(options: &RunOptions, manifest: &Manifest) {
    if !options.plan.probes {
        eprintln!(
            "pqtail: --no-probes: latencies only. No ledger, no causes, no clock alignment, no steal, no record of losses."
        );
    }
    let (client, server) = (&manifest.client, &manifest.server);
    let mut lists = vec![("", &client.probes)];
    if client.kernel != server.kernel {
        lists = vec![
            (" on the client", &client.probes),
            (" on the server", &server.probes),
        ];
    }
    for (place, probes) in lists {
        for absent in Absent::among(probes) {
            eprintln!(
                "pqtail: no {}{place}: {} ({})",
                absent.names.join(", "),
                absent.consequence,
                absent.reason
            );
        }
    }
}

/// One line that is renewed on a terminal.
fn show(plan: &Plan, trial: &Trial, of: usize, progress: &Progress) {
    let ms = |ns: u64| ns as f64 / 1e6;
    let latency = if progress.p50_ns > 0 {
        format!(
            "p50 {:.3}  p99 {:.3}  p99.9 {:.3} ms",
            ms(progress.p50_ns),
            ms(progress.p99_ns),
            ms(progress.p999_ns)
        )
    } else {
        "warm-up".to_owned()
    };
    // The number is the one by which reports and `explain` know it.
    let line = format!(
        "trial {} ({} of {of})  {:<16} {:>5.1} s  {:>7} done  {} failed  {latency}",
        trial.index,
        trial.index + 1,
        plan.cell_name(trial.cell()),
        progress.elapsed_ns as f64 / 1e9,
        progress.done,
        progress.errors,
    );
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{line}");
    } else if progress.elapsed_ns % 5_000_000_000 < 500_000_000 {
        eprintln!("{line}");
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        plan::Arrivals,
        record::{
            manifest::{CpuTickRow, KernelRecord},
            stream::Written,
        },
    };

    pub(in crate::collect) fn options() -> RunOptions {
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
                conditions: crate::plan::nothing_varied(),
                highest_quantile: crate::plan::usual_quantile(),
                first_stage: None,
            },
            until: None,
            steal_share_max: None,
            results: PathBuf::new(),
            server: ServerChoice::Embedded,
            hosts: None,
            binaries: None,
            client_cpus: Vec::new(),
            server_cpus: Vec::new(),
            drain_cpus: Vec::new(),
            port: 8443,
            heartbeat_ns: 0,
            ring_bytes: 1 << 20,
            client_cpu_share: None,
            faults: None,
            quiet: true,
        }
    }

    fn record(index: u32) -> TrialRecord {
        serde_json::from_value(serde_json::json!({
            "trial": { "index": index, "block": 0, "arm": "x25519", "seed": 1 }, "begin_ns": 0,
            "requests": Written::default(), "connections": Written::default(),
            "kernel": { "raw/host": KernelRecord::default() }, "client_cpu_ns": 0, "server_cpu_ns": 0,
            "client_stat": CpuTicks::default(), "server_stat": CpuTicks::default()
        }))
        .unwrap()
    }

    #[test]
    fn a_trial_is_run_again_for_its_steal_alone_and_not_for_ever() {
        let end = |cpu| Host {
            cpus: vec![cpu],
            ..Host::default()
        };
        let mut manifest = Manifest {
            schema: SCHEMA,
            pqtail: String::new(),
            begun: String::new(),
            plan: options().plan,
            status: Status::Running,
            client: end(0),
            server: end(1),
            trials: Vec::new(),
            steal_share_max: None,
            set_aside: Vec::new(),
        };
        let stolen = |steal| {
            let row = CpuTickRow {
                user: 95,
                steal,
                ..CpuTickRow::default()
            };
            let stat = CpuTicks {
                tick_ns: 10_000_000,
                cpus: BTreeMap::from([(0, row), (1, row)]),
            };
            TrialRecord {
                client_stat: stat.clone(),
                server_stat: stat,
                ..record(7)
            }
        };
        assert!(!is_to_be_repeated(&manifest, &stolen(5)), "nobody asked for it");
        manifest.steal_share_max = Some(0.04);
        assert!(is_to_be_repeated(&manifest, &stolen(5)));
        assert!(!is_to_be_repeated(&manifest, &stolen(3)));
        assert!(
            !is_to_be_repeated(&manifest, &record(7)),
            "its steal is not known"
        );
        manifest.set_aside = vec![record(6), stolen(5), stolen(5)];
        assert!(is_to_be_repeated(&manifest, &stolen(5)));
        manifest.set_aside.push(stolen(5));
        assert!(!is_to_be_repeated(&manifest, &stolen(5)));
    }

    #[test]
    fn recordings_that_are_set_aside_make_room_and_stay_readable() {
        let folder = tempfile::tempdir().unwrap();
        let client = folder.path().join(CLIENT_STAMPS);
        let host = folder.path().join("raw/host");
        for (number, text) in ["first", "second"].into_iter().enumerate() {
            for (of, stream) in [(&client, stream_name::REQUESTS), (&host, stream_name::KERNEL)] {
                fs::create_dir_all(of).unwrap();
                fs::write(recording(of, stream, 7), text).unwrap();
            }
            // No server of ours: it has no recording to move.
            set_aside(folder.path(), number, &record(7)).unwrap();
            for of in [&client, &host] {
                let mut names = fs::read_dir(of.join(SET_ASIDE)).unwrap();
                assert!(names.any(|entry| fs::read_to_string(entry.unwrap().path()).unwrap() == text));
                assert_eq!(fs::read_dir(of).unwrap().count(), 1, "only the folder is left");
            }
        }
        assert_eq!(fs::read_dir(host.join(SET_ASIDE)).unwrap().count(), 2);
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
