//! One role on one host, told what to do over stdin and stdout: JSON lines, a request and its answer in turn.
//!
//! The controller starts an agent as a child, here or on another host through SSH; nothing here but [`Order::Link`] assumes that it
//! runs on the same machine. When its stdin ends, or a remote controller says nothing for too long, the controller is gone: the
//! agent finishes what it records, and ends.

use std::{
    collections::BTreeSet,
    io::{self, BufRead as _, Write as _},
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{
    doctor,
    drain::Drain,
    foreign::Foreign,
    host, link,
    load::{Load, LoadSettings, Progress, TrialOutcome},
    metadata,
    nginx::{Nginx, NginxSettings, Program},
    probes::{ProbeSettings, Probes},
    serve::{ServeSettings, Server},
    service::Service,
    tls::{Certificates, Identities},
};
use crate::{
    analyze::stream_name,
    plan::{Plan, Trial},
    record::{
        manifest::{CpuTicks, HostFacts, KernelRecord, ProbeStatus, recording},
        stream::Written,
    },
};

/// Version of the protocol; both sides must have the same.
pub const PROTOCOL: u32 = 5;

/// What the controller asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// First of all.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// A controller that says nothing for so many ms is gone; `None` where its end closes our stdin for certain.
        silence_ms_max: Option<u64>,
        /// Whether to tell unasked when the host is about to be taken away. One agent of a host does.
        watch_host: bool,
    },
    /// The controller lives. Has no answer.
    Ping,
    /// Examine the host.
    Doctor(doctor::Questions),
    /// Local ends only: make this end's link.
    Link {
        /// The client's end makes the link to the server's process; the server's end has none and waits for it.
        peer_pid: Option<u32>,
        /// This end's address.
        address: Ipv4Addr,
        /// Whether this end is the machine's own namespace.
        shared: bool,
    },
    /// Become the embedded server.
    Serve {
        /// Address to listen on.
        address: IpAddr,
        /// What is served where.
        services: Vec<Service>,
        /// One worker per CPU.
        cpus: Vec<u32>,
        /// Certificates and keys.
        identities: Identities,
        /// File of faults to commit on order, for the truth suite.
        faults: Option<PathBuf>,
        /// Folder for recordings.
        folder: PathBuf,
    },
    /// Start nginx as the server, and answer for it.
    ServeNginx {
        /// Which nginx, on this host.
        program: Program,
        /// Address to listen on.
        address: IpAddr,
        /// What is served where.
        services: Vec<Service>,
        /// One process per CPU.
        cpus: Vec<u32>,
        /// Certificates and keys.
        identities: Identities,
        /// Folder for recordings, and for the configuration.
        folder: PathBuf,
    },
    /// Answer for a server that runs already.
    Adopt {
        /// Where it listens.
        ports: Vec<u16>,
        /// Folder for recordings.
        folder: PathBuf,
    },
    /// Become the load generator.
    Load {
        /// The server's address.
        server: IpAddr,
        /// What is served where.
        services: Vec<Service>,
        /// One worker per CPU.
        cpus: Vec<u32>,
        /// What is run.
        plan: Box<Plan>,
        /// The server's certificates; `None` for a server of somebody else's.
        certificates: Option<Certificates>,
        /// Folder for recordings.
        folder: PathBuf,
    },
    /// Become the kernel's recorder.
    Probe {
        /// Ports whose traffic is recorded.
        ports: Vec<u16>,
        /// CPUs whose scheduler is recorded.
        cpus: Vec<u32>,
        /// Threads whose wake-ups are recorded.
        threads: Vec<u32>,
        /// The server, if it takes no stamps itself.
        foreign: Option<ForeignServer>,
        /// CPUs for the drain; none are to spare if empty.
        drain_cpus: Vec<u32>,
        /// Period of the heartbeat, ns; 0 for none.
        heartbeat_ns: u64,
        /// Size of the ring, bytes.
        ring_bytes: u32,
        /// Folder for recordings.
        folder: PathBuf,
    },
    /// Begin to record a trial (server, recorder).
    Begin {
        /// Which.
        trial: u32,
    },
    /// End it.
    End,
    /// Run a trial (load generator). Answered by progress, then by the outcome.
    Run {
        /// Which.
        trial: Trial,
    },
    /// End the trial under way early. Has no answer of its own.
    Stop,
}

/// What an agent answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To `Hello`.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Who answers.
        met: Box<Met>,
    },
    /// Comes unasked, at any time: the host will be taken away. The words say when and by whom.
    Notice(String),
    /// To `Doctor`.
    Findings(Vec<doctor::Finding>),
    /// Done, nothing to say.
    Done,
    /// The load generator's workers' thread ids.
    Threads(Vec<u32>),
    /// A server is ready.
    Serves {
        /// Its threads.
        threads: Vec<u32>,
        /// Its name and version, and its TLS library's, as far as they are known.
        software: String,
    },
    /// Every probe.
    Probes(Vec<ProbeStatus>),
    /// A server's trial: what it recorded, and the workers' CPU time, ns.
    Served(Written, u64),
    /// A recorder's trial, with the machine's /proc/stat over it.
    Recorded(KernelRecord, CpuTicks),
    /// A load generator's trial under way.
    Progress(Progress),
    /// A load generator's trial, with the machine's /proc/stat over it.
    Ran(TrialOutcome, CpuTicks),
    /// It did not work: the whole chain of reasons.
    Failed(String),
}

/// An agent and where it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Met {
    /// Its process id.
    pub pid: u32,
    /// Inode number of its network namespace.
    pub netns: u32,
    /// CPUs that it may use, ascending.
    pub cpus: Vec<u32>,
    /// What its host is.
    pub facts: HostFacts,
}

/// What a recorder must know of a server that takes no stamps itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForeignServer {
    /// Its threads; calls of libssl are recorded in their processes.
    pub threads: Vec<u32>,
    /// Where its libssl is, as it sees that; `None` for what it has mapped.
    pub libssl: Option<PathBuf>,
}

/// What an agent has become.
enum Role {
    None,
    Serve(Server, PathBuf),
    Foreign {
        /// Dropped before the nginx, so that its end is no news.
        server: Foreign,
        /// What was started for it.
        _nginx: Option<Nginx>,
        folder: PathBuf,
    },
    Load(Load, PathBuf),
    Probe(Box<(Probes, Drain)>, PathBuf, CpuTicks),
}

/// Runs an agent until its stdin ends.
///
/// # Errors
/// When stdout is gone.
pub fn run() -> anyhow::Result<()> {
    ignore_interrupts();
    let stop = Arc::new(AtomicBool::new(false));
    let (orders, heard) = mpsc::channel();
    let ear = Arc::new(Ear {
        heard_ms: AtomicU64::new(0),
        begin: Instant::now(),
        stop: Arc::clone(&stop),
        orders,
    });
    thread::spawn({
        let ear = Arc::clone(&ear);
        move || ear.listen()
    });
    let mut role = Role::None;
    while let Ok(Some(order)) = heard.recv() {
        stop.store(false, Ordering::Relaxed);
        if let Order::Hello {
            silence_ms_max: Some(silence_ms_max),
            ..
        } = order
        {
            let ear = Arc::clone(&ear);
            thread::spawn(move || ear.mind_silence(silence_ms_max));
        }
        if let Order::Hello { watch_host: true, .. } = order
            && host::vendor().as_deref() == Some(metadata::VENDOR)
        {
            thread::spawn(|| metadata::await_interruption(metadata::SERVICE, tell));
        }
        let answer =
            obey(order, &mut role, &stop).unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
        say(&answer)?;
    }
    // The controller is gone. A recording under way is finished as far as it goes; there is nobody to tell.
    match &mut role {
        Role::Serve(server, _) => drop(server.end_trial()),
        Role::Probe(probe, ..) => drop(probe.1.end_trial()),
        Role::None | Role::Load(..) | Role::Foreign { .. } => {}
    }
    Ok(())
}

/// Ctrl-C, and whoever stops a whole group or service, reaches every process; only the controller decides what it means.
fn ignore_interrupts() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for each in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: ignoring installs no handler that could run at a bad moment.
        let _ = unsafe { signal(each, SigHandler::SigIgn) };
    }
}

/// Hears the controller on a thread of its own, so that a stop is heard while a trial runs.
struct Ear {
    /// When it was last heard, ms since `begin`.
    heard_ms: AtomicU64,
    begin: Instant,
    stop: Arc<AtomicBool>,
    /// `None` says that the controller is gone.
    orders: Sender<Option<Order>>,
}

impl Ear {
    fn now_ms(&self) -> u64 {
        self.begin.elapsed().as_millis() as u64
    }

    fn listen(&self) {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            self.heard_ms.store(self.now_ms(), Ordering::Relaxed);
            match serde_json::from_str::<Order>(&line) {
                Ok(Order::Ping) => {}
                Ok(Order::Stop) => self.stop.store(true, Ordering::Relaxed),
                Ok(order) => {
                    if self.orders.send(Some(order)).is_err() {
                        break;
                    }
                }
                Err(error) => {
                    eprintln!("pqtail agent: an order that is not understood: {error}");
                    break;
                }
            }
        }
        self.lose();
    }

    /// A link that broke without a word leaves stdin open for as long as sshd believes in it.
    fn mind_silence(&self, silence_ms_max: u64) {
        loop {
            let silence_ms = self
                .now_ms()
                .saturating_sub(self.heard_ms.load(Ordering::Relaxed));
            if silence_ms >= silence_ms_max {
                return self.lose();
            }
            thread::sleep(Duration::from_millis(silence_ms_max - silence_ms));
        }
    }

    /// Without a controller a trial has nobody to run for.
    fn lose(&self) {
        let _ = self.orders.send(None);
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn say(answer: &Answer) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)
        .and_then(|()| out.flush())
        .context("answer the controller")
}

/// Says something unasked. If nobody hears it, the controller is gone, and that is found out anyway.
fn tell(notice: String) {
    let _ = say(&Answer::Notice(notice));
}

fn folder(path: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}

fn obey(order: Order, role: &mut Role, stop: &Arc<AtomicBool>) -> anyhow::Result<Answer> {
    Ok(match (order, &mut *role) {
        (Order::Hello { protocol, .. }, _) => {
            ensure!(
                protocol == PROTOCOL,
                "the controller speaks protocol {protocol}, this agent {PROTOCOL}: deploy the same version on both hosts"
            );
            Answer::Hello {
                protocol: PROTOCOL,
                met: Box::new(Met {
                    pid: std::process::id(),
                    netns: host::netns().unwrap_or(0),
                    cpus: host::allowed_cpus()?,
                    facts: host::facts(),
                }),
            }
        }
        (Order::Doctor(questions), _) => Answer::Findings(doctor::examine(&questions)),
        (
            Order::Link {
                peer_pid,
                address,
                shared,
            },
            _,
        ) => {
            match peer_pid {
                Some(peer) => {
                    link::join(peer, address, link::PREFIX)?;
                    link::widen_ports()?;
                }
                None if shared => link::configure_shared(address, link::PREFIX)?,
                None => link::configure(address, link::PREFIX)?,
            }
            Answer::Done
        }
        (
            Order::Serve {
                address,
                services,
                cpus,
                identities,
                faults,
                folder: path,
            },
            _,
        ) => {
            folder(&path)?;
            host::open_many_files();
            let server = Server::start(&ServeSettings {
                address,
                services,
                cpus,
                identities,
                faults,
            })?;
            let serves = Answer::Serves {
                threads: server.worker_tids(),
                software: format!("pqtail {} with rustls", crate::VERSION),
            };
            *role = Role::Serve(server, path);
            serves
        }
        (
            Order::ServeNginx {
                program,
                address,
                services,
                cpus,
                identities,
                folder: path,
            },
            _,
        ) => {
            folder(&path)?;
            let nginx = Nginx::start(&NginxSettings {
                program,
                address,
                services,
                cpus,
                identities,
                folder: path.clone(),
            })?;
            let foreign = Foreign::new(nginx.pids(), tell)?;
            let serves = Answer::Serves {
                threads: foreign.tids()?,
                software: nginx.version().to_owned(),
            };
            *role = Role::Foreign {
                server: foreign,
                _nginx: Some(nginx),
                folder: path,
            };
            serves
        }
        (Order::Adopt { ports, folder: path }, _) => {
            folder(&path)?;
            let foreign = Foreign::listening(&ports, tell)?;
            let serves = Answer::Serves {
                threads: foreign.tids()?,
                software: foreign.name(),
            };
            *role = Role::Foreign {
                server: foreign,
                _nginx: None,
                folder: path,
            };
            serves
        }
        (
            Order::Load {
                server,
                services,
                cpus,
                plan,
                certificates,
                folder: path,
            },
            _,
        ) => {
            folder(&path)?;
            host::open_many_files();
            let load = Load::start(LoadSettings {
                server,
                services,
                cpus,
                plan: *plan,
                certificates,
            })?;
            let tids = load.worker_tids();
            *role = Role::Load(load, path);
            Answer::Threads(tids)
        }
        (
            Order::Probe {
                ports,
                cpus,
                threads,
                foreign,
                drain_cpus,
                heartbeat_ns,
                ring_bytes,
                folder: path,
            },
            _,
        ) => {
            folder(&path)?;
            let heartbeat_ns = (heartbeat_ns > 0).then_some(heartbeat_ns);
            let mut probes = Probes::attach(&ProbeSettings {
                ports,
                cpus,
                heartbeat_ns,
                ring_bytes,
                reads: foreign.is_some(),
            })?;
            for tid in threads {
                probes.watch_thread(tid)?;
            }
            if let Some(foreign) = foreign {
                let processes: BTreeSet<u32> = foreign
                    .threads
                    .iter()
                    .filter_map(|&tid| host::process_of(tid))
                    .collect();
                for pid in processes {
                    // What is not attached is in the status, with its consequence.
                    let _ = probes.attach_libssl(pid, foreign.libssl.as_deref());
                }
            }
            let drain = Drain::start(&mut probes, (!drain_cpus.is_empty()).then_some(drain_cpus))?;
            let status = probes.status().to_vec();
            *role = Role::Probe(Box::new((probes, drain)), path, CpuTicks::default());
            Answer::Probes(status)
        }
        (Order::Begin { trial }, Role::Serve(server, path)) => {
            host::require_room(path)?;
            server.begin_trial(&recording(path, stream_name::CONNECTIONS, trial), trial)?;
            Answer::Done
        }
        (Order::Begin { trial }, Role::Foreign { server, folder, .. }) => {
            host::require_room(folder)?;
            server.begin_trial(&recording(folder, stream_name::CONNECTIONS, trial), trial)?;
            Answer::Done
        }
        (Order::Begin { trial }, Role::Probe(probe, path, ticks)) => {
            host::require_room(path)?;
            probe
                .1
                .begin_trial(&recording(path, stream_name::KERNEL, trial), trial)?;
            *ticks = host::cpu_ticks();
            Answer::Done
        }
        (Order::End, Role::Serve(server, _)) => {
            let (written, cpu_ns) = server.end_trial()?;
            Answer::Served(written, cpu_ns)
        }
        (Order::End, Role::Foreign { server, .. }) => {
            let (written, cpu_ns) = server.end_trial()?;
            Answer::Served(written, cpu_ns)
        }
        (Order::End, Role::Probe(probe, _, before)) => {
            let ticks = host::difference(before, &host::cpu_ticks());
            Answer::Recorded(probe.1.end_trial()?, ticks)
        }
        (Order::Run { trial }, Role::Load(load, path)) => {
            let before = host::cpu_ticks();
            let path = recording(path, stream_name::REQUESTS, trial.index);
            let mut lost_controller = None;
            let outcome = load.run_trial(&trial, &path, stop, &mut |progress| {
                if let Err(error) = say(&Answer::Progress(progress)) {
                    lost_controller = Some(error);
                    stop.store(true, Ordering::Relaxed);
                }
            })?;
            if let Some(error) = lost_controller {
                return Err(error);
            }
            Answer::Ran(outcome, host::difference(&before, &host::cpu_ticks()))
        }
        (order, _) => bail!(anyhow!("this agent has no role for the order {order:?}")),
    })
}
