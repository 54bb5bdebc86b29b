//! The two ends of a run before they have roles: two network namespaces of this machine, or two hosts that SSH reaches.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::{
    agent::{Met, Order},
    cgroup::{Cgroup, Controller},
    control::Agent,
    host,
    inventory::{Inventory, Reach},
    link::{CLIENT_ADDRESS, SERVER_ADDRESS},
    run::{RunOptions, ServerChoice},
    ssh::{Lodging, Session},
};
use crate::record::manifest::MANIFEST;

/// A remote agent takes a controller that says nothing for this long for gone; the controller speaks every few seconds.
const SILENCE_MS_MAX: u64 = 60_000;

/// In which a bounded load generator gets its share: the kernel's own default, us.
const QUOTA_PERIOD_US: u64 = 100_000;

/// Name of the file in a results folder that says where more of the run lies. It goes when nothing lies there any more.
const LODGINGS: &str = "hosts.json";

/// What recorders are called; every host has another agent too, which watches it.
const RECORDER: &str = "recorder";

/// Everybody, met.
pub(super) struct Ends {
    // Dropped in this order: the load first, so that the server sees its connections end; the connections last.
    pub(super) load: Agent,
    pub(super) server: Agent,
    /// One per kernel.
    pub(super) recorders: Vec<Recorder>,
    pub(super) client_at: Place,
    pub(super) server_at: Place,
    pub(super) hosts: Option<Hosts>,
    /// What agents say unasked: that a host is to be taken away.
    pub(super) notices: Receiver<String>,
    /// What bounds the load generator; it goes after that.
    _limit: Option<Cgroup>,
}

/// Where one end is.
pub(super) struct Place {
    pub(super) address: IpAddr,
    pub(super) met: Met,
    /// One worker each.
    pub(super) cpus: Vec<u32>,
    /// The run's folder as this end's agents have it.
    pub(super) folder: PathBuf,
    /// Folder of its kernel's recordings, relative to the run's.
    pub(super) kernel: PathBuf,
    /// The nginx that the inventory names.
    pub(super) nginx: Option<PathBuf>,
}

/// Who records one kernel.
pub(super) struct Recorder {
    pub(super) agent: Agent,
    /// As [`Place::kernel`]: the ends with this folder are those it records.
    pub(super) kernel: PathBuf,
    /// CPUs for the drain; empty if none is to spare.
    pub(super) drain_cpus: Vec<u32>,
}

/// Two hosts that are reached by SSH.
pub(super) struct Hosts {
    client: Session,
    server: Session,
    _sockets: TempDir,
}

/// Where more of a run lies than its results folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Lodgings {
    client: Lodging,
    server: Lodging,
}

/// Refuses what cannot become a run before anything is made.
pub(super) fn check(options: &RunOptions) -> anyhow::Result<()> {
    if let Some(inventory) = &options.hosts {
        Inventory::read(inventory)?;
        return Ok(());
    }
    ensure!(
        host::is_root(),
        "network namespaces and eBPF need root: run it again with sudo"
    );
    place(options, &host::allowed_cpus()?).map(drop)
}

impl Ends {
    /// Makes and meets both ends. `folder` is the results folder.
    pub(super) fn meet(
        options: &RunOptions,
        folder: &Path,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<Self> {
        match &options.hosts {
            None => Self::here(options, folder),
            Some(inventory) => Self::there(options, &Inventory::read(inventory)?, folder, interrupted),
        }
    }

    fn here(options: &RunOptions, folder: &Path) -> anyhow::Result<Self> {
        let allowed = host::allowed_cpus()?;
        let placement = place(options, &allowed)?;
        let (tell, notices) = mpsc::channel();
        // A server that runs already is in the machine's own namespace.
        let shared = matches!(options.server, ServerChoice::Adopted { .. });
        let mut server = Agent::start("server", !shared, tell.clone())?;
        let mut load = Agent::start("load generator", true, tell.clone())?;
        let (at_server, mut at_client) = (server.hello(None, false)?, load.hello(None, false)?);
        let limit = match options.client_cpu_share {
            Some(share) => {
                let limit = Cgroup::create(Controller::Cpu, at_client.pid, None)
                    .context("bound the load generator (--client-cpu-share)")?;
                let quota_us = (share * QUOTA_PERIOD_US as f64) as u64;
                limit.limit_cpu(Some(quota_us), QUOTA_PERIOD_US)?;
                let told = format!("{quota_us} {QUOTA_PERIOD_US} (by --client-cpu-share)");
                at_client.facts.cgroup_limits.insert("cpu.max".to_owned(), told);
                Some(limit)
            }
            None => None,
        };
        // The server's end waits for the link that the client's end makes.
        server.order(&Order::Link {
            peer_pid: None,
            address: SERVER_ADDRESS,
            shared,
        })?;
        load.ask(&Order::Link {
            peer_pid: Some(at_server.pid),
            address: CLIENT_ADDRESS,
            shared: false,
        })?;
        server.answer()?;
        let kernel = PathBuf::from("raw/local");
        let mut recorders = Vec::new();
        if options.plan.probes {
            let mut agent = Agent::start(RECORDER, false, tell)?;
            agent.hello(None, false)?;
            recorders.push(Recorder {
                agent,
                kernel: kernel.clone(),
                drain_cpus: placement.drain,
            });
        }
        let at = |address, met, cpus| Place {
            address: IpAddr::V4(address),
            met,
            cpus,
            folder: folder.to_owned(),
            kernel: kernel.clone(),
            nginx: None,
        };
        Ok(Self {
            load,
            server,
            recorders,
            client_at: at(CLIENT_ADDRESS, at_client, placement.client),
            server_at: at(SERVER_ADDRESS, at_server, placement.server),
            hosts: None,
            notices,
            _limit: limit,
        })
    }

    fn there(
        options: &RunOptions,
        inventory: &Inventory,
        folder: &Path,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<Self> {
        ensure!(
            options.client_cpu_share.is_none(),
            "--client-cpu-share is for runs on one machine: leave out --hosts"
        );
        ensure!(
            options.faults.is_none(),
            "--faults is for runs on one machine: the file is shared memory"
        );
        let lodgings = Lodgings::of(inventory.clone(), &new_lodging());
        let hosts = Hosts::connect(&lodgings)?;
        // From here on there is something to come back for.
        lodgings.write(folder)?;
        match hosts.meet(options, inventory, interrupted) {
            Ok(ends) => Ok(Self {
                hosts: Some(hosts),
                ..ends
            }),
            Err(error) => {
                hosts.clear(folder);
                Err(error)
            }
        }
    }

    /// Brings recordings home, by their paths within the run's folder, if they are not at home anyway.
    pub(super) fn fetch(
        &self,
        from_client: &[PathBuf],
        from_server: &[PathBuf],
        home: &Path,
    ) -> anyhow::Result<()> {
        match &self.hosts {
            Some(hosts) => hosts.fetch(from_client, from_server, home),
            None => Ok(()),
        }
    }

    /// Ends all agents, brings home what is still elsewhere, and leaves the hosts as they were found.
    pub(super) fn part(self, home: &Path) {
        let Self {
            load,
            server,
            recorders,
            hosts,
            ..
        } = self;
        drop(load);
        drop(server);
        drop(recorders);
        if let Some(hosts) = hosts {
            hosts.clear(home);
        }
    }
}

impl Lodgings {
    fn of(inventory: Inventory, folder: &Path) -> Self {
        let lodging = |reach| Lodging {
            reach,
            folder: folder.to_owned(),
        };
        Self {
            client: lodging(inventory.client),
            server: lodging(inventory.server),
        }
    }

    fn read(results: &Path) -> anyhow::Result<Self> {
        let path = results.join(LODGINGS);
        let json = fs::read(&path).with_context(|| {
            format!(
                "read {}: nothing of this run lies elsewhere, or it is no results folder",
                path.display()
            )
        })?;
        let lodgings: Self =
            serde_json::from_slice(&json).with_context(|| format!("{} is damaged", path.display()))?;
        for lodging in [&lodgings.client, &lodgings.server] {
            // It is removed as root.
            ensure!(
                is_ours(&lodging.folder),
                "{} names {}, which no run of ours made",
                path.display(),
                lodging.folder.display()
            );
        }
        Ok(lodgings)
    }

    fn write(&self, results: &Path) -> anyhow::Result<()> {
        let path = results.join(LODGINGS);
        fs::write(&path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("write {}", path.display()))
    }
}

/// How the folders of runs on hosts begin; 16 hexadecimal digits follow.
const LODGING_PREFIX: &str = "/var/tmp/pqtail-";

fn new_lodging() -> PathBuf {
    PathBuf::from(format!("{LODGING_PREFIX}{:016x}", rand::random::<u64>()))
}

fn is_ours(folder: &Path) -> bool {
    let rest = folder.to_str().and_then(|path| path.strip_prefix(LODGING_PREFIX));
    rest.is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// How the folders of connections' sockets begin; the process that made it follows.
const SOCKETS_PREFIX: &str = "pqtail-ssh-";

/// Removes what processes left that were killed before they could.
fn sweep_sockets() {
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(SOCKETS_PREFIX));
        let maker = maker.and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Somebody else's stays, and that is right.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Hosts {
    fn connect(lodgings: &Lodgings) -> anyhow::Result<Self> {
        sweep_sockets();
        // A socket's path has at most 107 bytes, so it is not the results folder.
        let sockets = tempfile::Builder::new()
            .prefix(&format!("{SOCKETS_PREFIX}{}-", std::process::id()))
            .tempdir()
            .context("make a folder for the connections' sockets")?;
        Ok(Self {
            client: Session::connect("client", lodgings.client.clone(), sockets.path())?,
            server: Session::connect("server", lodgings.server.clone(), sockets.path())?,
            _sockets: sockets,
        })
    }

    /// Puts the program on both and meets the agents; the connections stay with the caller.
    fn meet(
        &self,
        options: &RunOptions,
        inventory: &Inventory,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<Ends> {
        for session in [&self.client, &self.server] {
            ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
            if !options.quiet {
                eprintln!("pqtail: copying the program to the {}", session.name());
            }
            session.deploy(&program(session, options)?)?;
        }
        let (tell, notices) = mpsc::channel();
        let (server, at_server) = start(&self.server, "server", &tell)?;
        let (load, at_client) = start(&self.client, "load generator", &tell)?;
        let (client_cpus, client_drain) = place_end(
            "--client-cpus",
            &options.client_cpus,
            &options.drain_cpus,
            &at_client.cpus,
        )?;
        let (server_cpus, server_drain) = place_end(
            "--server-cpus",
            &options.server_cpus,
            &options.drain_cpus,
            &at_server.cpus,
        )?;
        let at = |session: &Session, reach: &Reach, met, cpus, kernel: &str| Place {
            address: reach.address,
            met,
            cpus,
            folder: session.folder().to_owned(),
            kernel: PathBuf::from(kernel),
            nginx: reach.nginx.clone(),
        };
        let client_at = at(
            &self.client,
            &inventory.client,
            at_client,
            client_cpus,
            "raw/client-kernel",
        );
        let server_at = at(
            &self.server,
            &inventory.server,
            at_server,
            server_cpus,
            "raw/server-kernel",
        );
        let mut recorders = Vec::new();
        if options.plan.probes {
            for (session, place, drain_cpus) in [
                (&self.client, &client_at, client_drain),
                (&self.server, &server_at, server_drain),
            ] {
                let (agent, _) = start(session, RECORDER, &tell)?;
                recorders.push(Recorder {
                    agent,
                    kernel: place.kernel.clone(),
                    drain_cpus,
                });
            }
        }
        Ok(Ends {
            load,
            server,
            recorders,
            client_at,
            server_at,
            hosts: None,
            notices,
            _limit: None,
        })
    }

    fn fetch(&self, from_client: &[PathBuf], from_server: &[PathBuf], home: &Path) -> anyhow::Result<()> {
        for (session, files) in [(&self.client, from_client), (&self.server, from_server)] {
            for file in files {
                session.fetch(file, home)?;
            }
        }
        Ok(())
    }

    /// Fetches what is left and removes the folders; what cannot be had now is told of.
    fn clear(&self, home: &Path) {
        let mut is_clear = true;
        for session in [&self.client, &self.server] {
            if let Err(error) = clear_host(session, home) {
                is_clear = false;
                eprintln!("pqtail: {error:#}");
            }
        }
        if is_clear {
            // Its absence is what matters, and a results folder that was removed meanwhile has none either.
            let _ = fs::remove_file(home.join(LODGINGS));
        } else {
            eprintln!(
                "pqtail: not all of the run is here: `cargo xtask fetch {}` brings the rest home and cleans up there",
                home.display()
            );
        }
    }
}

fn clear_host(session: &Session, home: &Path) -> anyhow::Result<()> {
    session.await_agents()?;
    for file in session.left()? {
        session.fetch(&file, home)?;
    }
    session.leave()
}

/// Brings home what a run left on its hosts when its connection or its controller was lost, and cleans up there.
///
/// # Errors
/// When a host cannot be reached, or nothing lies there.
pub fn fetch(results: &Path) -> anyhow::Result<()> {
    if results.join(MANIFEST).exists() && !results.join(LODGINGS).exists() {
        return Ok(());
    }
    let lodgings = Lodgings::read(results)?;
    let hosts = Hosts::connect(&lodgings)?;
    let mut failed = None;
    for session in [&hosts.client, &hosts.server] {
        eprintln!("pqtail: fetching from the {}", session.name());
        if let Err(error) = clear_host(session, results) {
            failed.get_or_insert(error);
        }
    }
    match failed {
        Some(error) => Err(error),
        None => fs::remove_file(results.join(LODGINGS)).context("note that all is here"),
    }
}

/// The architectures of an inventory's hosts, client first, as `uname -m` names them.
///
/// # Errors
/// When a host cannot be reached.
pub fn machines(inventory: &Path) -> anyhow::Result<[String; 2]> {
    // Nothing is put there.
    let hosts = Hosts::connect(&Lodgings::of(Inventory::read(inventory)?, Path::new("")))?;
    Ok([hosts.client.machine()?, hosts.server.machine()?])
}

/// Has the program built on a host of each architecture among an inventory's, from packed sources, and puts what that made into
/// `home`: `target/deploy/pqtail-ARCHITECTURE` and its checksum.
///
/// # Errors
/// When a host cannot be reached, or cannot build it. Nothing is left there in any case.
pub fn build_there(
    inventory: &Path,
    sources: &Path,
    home: &Path,
    interrupted: &AtomicBool,
) -> anyhow::Result<()> {
    let folder = new_lodging();
    let hosts = Hosts::connect(&Lodgings::of(Inventory::read(inventory)?, &folder))?;
    let mut built: Option<String> = None;
    for session in [&hosts.client, &hosts.server] {
        let machine = session.machine()?;
        if built.as_ref() == Some(&machine) {
            continue;
        }
        eprintln!(
            "pqtail: building on the {} (the first time takes minutes)",
            session.name()
        );
        let program = PathBuf::from(format!("target/deploy/pqtail-{machine}"));
        let outcome = session.build(sources, &program, home, interrupted);
        let cleared = session.leave();
        outcome.and(cleared)?;
        built = Some(machine);
    }
    Ok(())
}

fn start(session: &Session, name: &'static str, tell: &Sender<String>) -> anyhow::Result<(Agent, Met)> {
    let mut agent = Agent::start_by(&mut session.agent(), name, session.name(), tell.clone())?;
    let met = agent.hello(Some(SILENCE_MS_MAX), name != RECORDER)?;
    Ok((agent, met))
}

/// The program for a host's architecture: from `--binaries`, or this very one.
fn program(session: &Session, options: &RunOptions) -> anyhow::Result<PathBuf> {
    let machine = session.machine()?;
    match &options.binaries {
        Some(folder) => {
            let program = folder.join(format!("pqtail-{machine}"));
            ensure!(
                program.is_file(),
                "the {} is {machine}, and there is no {}: build it for that architecture",
                session.name(),
                program.display()
            );
            Ok(program)
        }
        None if machine == std::env::consts::ARCH => {
            std::env::current_exe().context("find this program's own file")
        }
        None => bail!(
            "the {} is {machine}, this program is for {}: name a folder that holds pqtail-{machine} with --binaries \
             (`cargo xtask run --hosts` builds it)",
            session.name(),
            std::env::consts::ARCH
        ),
    }
}

/// Which CPU does what.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Placement {
    client: Vec<u32>,
    server: Vec<u32>,
    /// Empty if none is to spare.
    drain: Vec<u32>,
}

/// Where on one machine everything goes: with two CPUs each end has one; with more, the drain has those that are left.
fn place(options: &RunOptions, allowed: &[u32]) -> anyhow::Result<Placement> {
    let first = *allowed.first().context("no CPU may be used")?;
    let client = chosen("--client-cpus", &options.client_cpus, first, allowed)?;
    let second = allowed.get(1).copied().unwrap_or(first);
    let server = chosen("--server-cpus", &options.server_cpus, second, allowed)?;
    let busy = [client.clone(), server.clone()].concat();
    Ok(Placement {
        client,
        server,
        drain: drain(&options.drain_cpus, &busy, allowed)?,
    })
}

/// Where on a host of its own an end goes: its workers, and the drain.
fn place_end(
    flag: &str,
    given: &[u32],
    given_drain: &[u32],
    allowed: &[u32],
) -> anyhow::Result<(Vec<u32>, Vec<u32>)> {
    let first = *allowed.first().context("no CPU may be used")?;
    let workers = chosen(flag, given, first, allowed)?;
    let drain = drain(given_drain, &workers, allowed)?;
    Ok((workers, drain))
}

/// The CPUs that a flag names, or the usual one.
fn chosen(flag: &str, given: &[u32], usual: u32, allowed: &[u32]) -> anyhow::Result<Vec<u32>> {
    if let Some(cpu) = given.iter().find(|cpu| !allowed.contains(cpu)) {
        let allowed: Vec<_> = allowed.iter().map(u32::to_string).collect();
        bail!(
            "{flag} names CPU {cpu}; those that may be used are {}",
            allowed.join(", ")
        );
    }
    Ok(if given.is_empty() {
        vec![usual]
    } else {
        given.to_vec()
    })
}

/// The drain's CPUs: those given, or all that are spare.
fn drain(given: &[u32], busy: &[u32], allowed: &[u32]) -> anyhow::Result<Vec<u32>> {
    if !given.is_empty() {
        return chosen("--drain-cpus", given, 0, allowed);
    }
    Ok(allowed
        .iter()
        .copied()
        .filter(|cpu| !busy.contains(cpu))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::run::tests::options;

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
    fn on_a_host_of_its_own_an_end_has_the_first_cpu_and_the_drain_the_others() {
        assert_eq!(place_end("", &[], &[], &[0, 1]).unwrap(), (vec![0], vec![1]));
        assert_eq!(place_end("", &[1], &[], &[0, 1]).unwrap(), (vec![1], vec![0]));
        assert_eq!(place_end("", &[1], &[1], &[0, 1]).unwrap(), (vec![1], vec![1]));
        assert_eq!(place_end("", &[], &[], &[5]).unwrap(), (vec![5], vec![]));
    }

    #[test]
    fn only_a_folder_that_a_run_made_is_ever_removed() {
        assert!(is_ours(Path::new("/var/tmp/pqtail-0123456789abcdef")));
        for other in [
            "/",
            "/var/tmp",
            "/var/tmp/pqtail-",
            "/var/tmp/pqtail-0123456789abcdef/..",
            "/var/tmp/pqtail-0123456789abcde;",
            "relative/pqtail-0123456789abcdef",
        ] {
            assert!(!is_ours(Path::new(other)), "{other}");
        }
    }
}
