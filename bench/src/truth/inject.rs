//! Commits the faults, each at a time that the caller chooses, and logs what was done to whom.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Serialize;

use super::{
    case::{Case, FIFO_HOG, HOG, Loss, NEIGHBOUR},
    dropper::{Dropper, Segment},
    flood::Flood,
    shaper::Shaper,
};
use crate::{
    attribute::ledger::Side,
    clock::now,
    collect::{
        cgroup::{Cgroup, Controller},
        fault::{COLD_BLOCK_BYTES, Committed, Fault, Faults},
        host::process_of,
        link,
        within::within,
        worker::{pin, set_scheduler},
    },
    record::manifest::{Host, Manifest},
};

/// How long a task spins, a process is stopped, a handler computes or sleeps, packets flood or queue: far above what the
/// machine does by itself.
const SPIN: Duration = Duration::from_millis(20);
const STOP: Duration = Duration::from_millis(20);
const FLOOD: Duration = Duration::from_millis(20);
const SLOW: Duration = Duration::from_millis(40);
const HANDLER_NS: u64 = 20_000_000;
/// How long a flight under way needs at most, once nothing more is written.
const SETTLED: Duration = Duration::from_millis(3);
/// Longer than the least delayed-ACK time-out (40 ms), so that such timers fire.
const DECOY_SPIN: Duration = Duration::from_millis(90);
/// Long enough that more requests begin than [`PORTS`] has.
const PORTS_STOP: Duration = Duration::from_millis(100);
/// The client's ephemeral ports when they are few.
const PORTS: (u16, u16) = (40_000, 40_007);
/// Enough that a disk needs some milliseconds for them.
const COLD_BLOCKS: u64 = 8;

/// Page cache that a cgroup holds, and the limit that a handler sets for it: the rest must be reclaimed.
const CACHE_BYTES: u64 = 96 << 20;
const MEMORY_BYTES: u64 = 8 << 20;

/// What the slow path lets through: a ClientHello needs some milliseconds, and those behind it wait for it too. Bytes per s.
const SLOW_RATE: u64 = 100_000;

/// An accept queue that two connections fill.
const BACKLOG: u32 = 1;

/// A spinning task that sees its clock jump by more has not run meanwhile. ns.
const OFF_CPU_NS_MIN: u64 = 50_000;

/// Real-time priority of the FIFO task: the least there is, which is above every normal one.
const FIFO_PRIORITY: i32 = 1;

/// The quota: the least the kernel takes, in a period in which the thread needs more than that.
const QUOTA_US: u64 = 1_000;
const PERIOD_US: u64 = 50_000;
/// A thread that is not throttled in this many periods has nothing to do.
const PERIODS_MAX: u32 = 20;

/// How long to wait until a connection comes that takes the fault or loses its segment.
const TAKEN_MAX: Duration = Duration::from_secs(2);

/// Payload of the client's and the server's first data exceeds this; all their later segments are smaller. Bytes.
const CLIENT_HELLO_BYTES_MIN: u32 = 190;
const SERVER_FLIGHT_BYTES_MIN: u32 = 500;

/// One injection as it happened, or a stretch of one that came in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Window {
    /// Begin; `CLOCK_MONOTONIC` of this machine, which is both ends' clock, ns.
    pub(super) begin_ns: u64,
    /// End; the same as the begin for a lost segment.
    pub(super) end_ns: u64,
    /// How much of that time the injection really took, as far as the injector can tell; ns.
    pub(super) injected_ns: u64,
    /// The client's port of the connection that was meant, if one was.
    pub(super) victim: Option<u16>,
}

impl Window {
    fn whole(begin_ns: u64, end_ns: u64) -> Self {
        Self {
            begin_ns,
            end_ns,
            injected_ns: end_ns - begin_ns,
            victim: None,
        }
    }
}

/// The two ends of the run.
pub(super) struct Ends {
    client: End,
    server: End,
}

/// One measured thread.
#[derive(Clone, Copy)]
struct End {
    pid: u32,
    tid: u32,
    cpu: u32,
}

impl Ends {
    pub(super) fn of(manifest: &Manifest) -> anyhow::Result<Self> {
        Ok(Self {
            client: End::of(&manifest.client)?,
            server: End::of(&manifest.server)?,
        })
    }

    fn on(&self, side: Side) -> End {
        match side {
            Side::Client => self.client,
            Side::Server => self.server,
        }
    }
}

impl End {
    fn of(host: &Host) -> anyhow::Result<Self> {
        let (&tid, &cpu) = host
            .threads
            .first()
            .zip(host.cpus.first())
            .context("the run has no measured thread")?;
        let pid = process_of(tid).with_context(|| format!("look up thread {tid}: it has ended"))?;
        Ok(Self { pid, tid, cpu })
    }
}

/// Ready to inject one kind of fault. What it set up is gone when it is dropped.
pub(super) enum Injector {
    Nothing,
    Spin {
        cpu: u32,
        realtime: bool,
        length: Duration,
    },
    /// Spins at real-time priority as soon as a server flight is written: the client's answer comes while it spins.
    SpinOnBell {
        cpu: u32,
        faults: Faults,
    },
    Flood(Flood),
    /// With the neighbour that runs meanwhile, until this is dropped.
    Quota(
        Quota,
        #[expect(dead_code, reason = "held, not read")] Option<Neighbour>,
    ),
    Stop {
        pid: u32,
        length: Duration,
    },
    Handler {
        faults: Faults,
        fault: Fault,
    },
    Reclaim {
        faults: Faults,
        group: Cgroup,
        /// A hole: it fills the page cache and needs no disk.
        hole: fs::File,
    },
    Drop(Loser),
    Slow(Shaper),
    SpinAndDrop {
        cpu: u32,
        loser: Loser,
    },
}

/// Loses one kind of segment.
pub(super) struct Loser {
    dropper: Box<Dropper>,
    segment: Segment,
    payload_min: u32,
    from_client: bool,
}

impl Injector {
    /// What must be set before the run starts.
    pub(super) fn before_run(case: Case, faults: &Faults) {
        if case == Case::AcceptOverflow {
            faults.limit_backlog(BACKLOG);
        }
    }

    pub(super) fn prepare(case: Case, ends: &Ends, faults: Faults) -> anyhow::Result<Self> {
        let spin = |side: Side, realtime, length| Self::Spin {
            cpu: ends.on(side).cpu,
            realtime,
            length,
        };
        let handler = |faults, fault| Self::Handler { faults, fault };
        Ok(match case {
            Case::Nothing | Case::Overload => Self::Nothing,
            Case::Hog(side) => spin(side, false, SPIN),
            Case::FifoHog(side) => spin(side, true, SPIN),
            Case::DelayedAckDecoy => Self::SpinOnBell {
                cpu: ends.server.cpu,
                faults,
            },
            Case::SoftirqFlood(side) => {
                let other = match side {
                    Side::Client => Side::Server,
                    Side::Server => Side::Client,
                };
                Self::Flood(Flood::prepare(ends.on(side).cpu, ends.on(other).cpu)?)
            }
            Case::Quota(side) => Self::Quota(Quota::on(ends.on(side))?, None),
            Case::NeighbourDecoy => {
                Self::Quota(Quota::on(ends.server)?, Some(Neighbour::start(ends.server.cpu)?))
            }
            Case::Stop(side) => Self::Stop {
                pid: ends.on(side).pid,
                length: STOP,
            },
            Case::FewPorts => {
                limit_ports(ends.client.pid)?;
                Self::Stop {
                    pid: ends.server.pid,
                    length: PORTS_STOP,
                }
            }
            Case::Compute | Case::SharedCpu => handler(faults, Fault::Compute(HANDLER_NS)),
            Case::Sleep => handler(faults, Fault::Sleep(HANDLER_NS)),
            Case::Lock => handler(faults, Fault::Lock(HANDLER_NS)),
            Case::ColdRead => {
                let path = faults.cold_file().to_owned();
                write_cold(&path).with_context(|| format!("write {}", path.display()))?;
                handler(faults, Fault::Read(COLD_BLOCKS))
            }
            Case::Reclaim => {
                // Page cache is charged to whoever reads it first: the suite itself.
                let group = Cgroup::create(Controller::Memory, std::process::id(), None)?;
                // Of an earlier suite into the same folder.
                let _ = fs::remove_file(faults.limit_file());
                std::os::unix::fs::symlink(group.memory_limit(), faults.limit_file())?;
                let hole =
                    tempfile::tempfile_in(faults.limit_file().parent().context("a file in no folder")?)?;
                hole.set_len(CACHE_BYTES)?;
                Self::Reclaim { faults, group, hole }
            }
            Case::HeldResponse => handler(faults, Fault::HeldResponse),
            Case::AcceptPause | Case::AcceptOverflow => handler(faults, Fault::PauseAccept(HANDLER_NS)),
            Case::SlowPath(Side::Client) => Self::Slow(Shaper::attach(ends.client.pid, link::CLIENT_NAME)?),
            Case::SlowPath(Side::Server) => Self::Slow(Shaper::attach(ends.server.pid, link::SERVER_NAME)?),
            Case::Loss(loss) => Self::Drop(Loser::attach(loss, ends)?),
            Case::HogAndLoss => Self::SpinAndDrop {
                cpu: ends.server.cpu,
                loser: Loser::attach(Loss::ServerFlight, ends)?,
            },
        })
    }

    /// Commits the fault once, and returns when it is over.
    pub(super) fn inject(&mut self) -> anyhow::Result<Vec<Window>> {
        Ok(match self {
            Self::Nothing => Vec::new(),
            Self::Spin {
                cpu,
                realtime,
                length,
            } => spin(*cpu, *realtime, *length, || true)?,
            Self::SpinOnBell { cpu, faults } => {
                faults.order(Fault::Ring);
                let windows = spin(*cpu, true, DECOY_SPIN, || faults.wait_for_bell(TAKEN_MAX))?;
                faults.cancel();
                windows
            }
            Self::Flood(flood) => {
                let (begin_ns, end_ns) = flood.burst(FLOOD)?;
                vec![Window::whole(begin_ns, end_ns)]
            }
            Self::Quota(quota, _) => quota.exhaust()?.into_iter().collect(),
            Self::Stop { pid, length } => stop(*pid, *length)?.into_iter().collect(),
            Self::Handler { faults, fault } => commit(faults, *fault)
                .into_iter()
                .map(|each| Window {
                    // What ran meanwhile was no wait for the disk.
                    injected_ns: match fault {
                        Fault::Read(_) => each.off_cpu_ns,
                        _ => each.end_ns - each.begin_ns,
                    },
                    begin_ns: each.begin_ns,
                    end_ns: each.end_ns,
                    victim: (each.port > 0).then_some(each.port),
                })
                .collect(),
            Self::Reclaim { faults, group, hole } => {
                group.limit_memory(None)?;
                let mut block = vec![0; 1 << 20];
                for at in (0..CACHE_BYTES).step_by(block.len()) {
                    hole.read_exact_at(&mut block, at)?;
                }
                commit(faults, Fault::Shrink(MEMORY_BYTES))
                    .into_iter()
                    .map(|each| Window {
                        victim: Some(each.port),
                        ..Window::whole(each.begin_ns, each.end_ns)
                    })
                    .collect()
            }
            Self::Drop(loser) => loser.lose()?,
            Self::Slow(shaper) => {
                let begin_ns = now().0;
                shaper.slow(SLOW_RATE)?;
                thread::sleep(SLOW);
                shaper.fast()?;
                vec![Window::whole(begin_ns, now().0)]
            }
            Self::SpinAndDrop { cpu, loser } => thread::scope(|scope| {
                let cpu = *cpu;
                let spun = scope.spawn(move || spin(cpu, true, SPIN + SPIN, || true));
                // What the server had in hand has left by then: the flight that is lost is one that waited.
                thread::sleep(SETTLED);
                let mut windows = loser.lose()?;
                match spun.join() {
                    Ok(spun) => windows.extend(spun?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
                anyhow::Ok(windows)
            })?,
        })
    }
}

impl Loser {
    fn attach(loss: Loss, ends: &Ends) -> anyhow::Result<Self> {
        // At the receiver's device: the segment has left its sender and never arrives.
        let (segment, payload_min, receiver, device) = match loss {
            Loss::Syn => (Segment::Syn, 0, ends.server, link::SERVER_NAME),
            Loss::SynAck => (Segment::SynAck, 0, ends.client, link::CLIENT_NAME),
            Loss::ClientHello => (
                Segment::Data,
                CLIENT_HELLO_BYTES_MIN,
                ends.server,
                link::SERVER_NAME,
            ),
            Loss::ServerFlight => (
                Segment::Data,
                SERVER_FLIGHT_BYTES_MIN,
                ends.client,
                link::CLIENT_NAME,
            ),
        };
        Ok(Self {
            dropper: Box::new(Dropper::attach(receiver.pid, device)?),
            segment,
            payload_min,
            from_client: matches!(loss, Loss::Syn | Loss::ClientHello),
        })
    }

    /// Loses one segment.
    fn lose(&mut self) -> anyhow::Result<Vec<Window>> {
        let before = self.dropper.dropped()?.len();
        self.dropper.order(self.segment, self.payload_min, 1)?;
        // An error ends the wait too; it comes again below.
        within(TAKEN_MAX, || {
            self.dropper
                .dropped()
                .map_or(true, |dropped| dropped.len() > before)
        });
        self.dropper.stop()?;
        let windows = self.dropper.dropped()?[before..]
            .iter()
            .map(|each| Window {
                begin_ns: each.at_ns,
                end_ns: each.at_ns,
                injected_ns: 0,
                victim: Some(if self.from_client {
                    each.source_port
                } else {
                    each.destination_port
                }),
            })
            .collect();
        Ok(windows)
    }
}

/// Orders a fault, and waits until it is committed.
fn commit(faults: &Faults, fault: Fault) -> Vec<Committed> {
    let before = faults.committed().len();
    faults.order(fault);
    if !within(TAKEN_MAX, || faults.committed().len() > before) {
        // Between two trials nobody comes.
        faults.cancel();
    }
    faults.committed()[before..].to_vec()
}

/// A thread of a known name spins on a CPU, and notes when it really ran: beside a thread of the same priority it does not
/// always. Begins when `ready` returns, if it returns true.
fn spin(
    cpu: u32,
    realtime: bool,
    length: Duration,
    ready: impl FnOnce() -> bool + Send,
) -> anyhow::Result<Vec<Window>> {
    let name = if realtime { FIFO_HOG } else { HOG };
    let spin = || {
        pin(cpu).context(name)?;
        if realtime {
            become_fifo()?;
        }
        let mut windows = Vec::new();
        if !ready() {
            return Ok(windows);
        }
        let first_ns = now().0;
        let (mut begin_ns, mut last_ns) = (first_ns, first_ns);
        while last_ns < first_ns + length.as_nanos() as u64 {
            std::hint::spin_loop();
            let at_ns = now().0;
            if at_ns - last_ns > OFF_CPU_NS_MIN {
                windows.push(Window::whole(begin_ns, last_ns));
                begin_ns = at_ns;
            }
            last_ns = at_ns;
        }
        windows.push(Window::whole(begin_ns, last_ns));
        Ok(windows)
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn_scoped(scope, spin);
        match thread.context("start a thread")?.join() {
            Ok(windows) => windows,
            Err(_) => bail!("{name} panicked"),
        }
    })
}

/// A task of the least priority that takes what its CPU has left.
pub(super) struct Neighbour {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    fn start(cpu: u32) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (ready, is_ready) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name(NEIGHBOUR.to_owned()).spawn(move || {
            let placed = pin(cpu).and_then(|_| Ok(set_scheduler(0, libc::SCHED_IDLE, 0)?));
            let is_placed = placed.is_ok();
            let _ = ready.send(placed);
            while is_placed && !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let neighbour = Self {
            stop,
            thread: Some(thread.context("start a thread")?),
        };
        is_ready.recv().context(NEIGHBOUR)?.context(NEIGHBOUR)?;
        Ok(neighbour)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}

/// Leaves the client's network namespace with few ephemeral ports, until it is gone with its run.
fn limit_ports(pid: u32) -> anyhow::Result<()> {
    const FILE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
    link::inside(pid, || {
        fs::write(FILE, format!("{} {}", PORTS.0, PORTS.1)).with_context(|| format!("write {FILE}"))
    })
}

/// Gives the calling thread the least real-time priority.
fn become_fifo() -> anyhow::Result<()> {
    set_scheduler(0, libc::SCHED_FIFO, FIFO_PRIORITY)
        .context("become SCHED_FIFO: needs CAP_SYS_NICE, and with RT_GROUP_SCHED a cgroup that may run real-time tasks")
}

/// Stops a process for a while; `None` if it has ended with its run.
fn stop(pid: u32, length: Duration) -> anyhow::Result<Option<Window>> {
    let pid = Pid::from_raw(pid.cast_signed());
    // Continued whatever happens in between.
    struct Continued(Pid);
    impl Drop for Continued {
        fn drop(&mut self) {
            let _ = kill(self.0, Signal::SIGCONT);
        }
    }
    let begin_ns = now().0;
    match kill(pid, Signal::SIGSTOP) {
        Err(Errno::ESRCH) => return Ok(None),
        other => other.context("stop a process")?,
    }
    let continued = Continued(pid);
    thread::sleep(length);
    drop(continued);
    Ok(Some(Window::whole(begin_ns, now().0)))
}

/// A cgroup that holds one thread and can run out of CPU time.
pub(super) struct Quota(Cgroup);

impl Quota {
    fn on(end: End) -> anyhow::Result<Self> {
        let group = Cgroup::create(Controller::Cpu, end.pid, Some(end.tid))?;
        group.limit_cpu(None, PERIOD_US)?;
        Ok(Self(group))
    }

    /// Lets the thread run into its quota once; `None` if it had too little to do for that.
    fn exhaust(&self) -> anyhow::Result<Option<Window>> {
        let before_ns = self.0.throttled_ns()?;
        let begin_ns = now().0;
        self.0.limit_cpu(Some(QUOTA_US), PERIOD_US)?;
        // The counter moves when the throttled group may run again.
        let throttled = within(Duration::from_micros(PERIOD_US) * PERIODS_MAX, || {
            self.0.throttled_ns().is_ok_and(|ns| ns > before_ns)
        });
        let end_ns = now().0;
        self.0.limit_cpu(None, PERIOD_US)?;
        let injected_ns = (self.0.throttled_ns()? - before_ns).min(end_ns - begin_ns);
        // The counter is brought up to date at the end of the throttling, so that is where the time lies.
        Ok(throttled.then(|| Window::whole(end_ns - injected_ns, end_ns)))
    }
}

/// A file on the disk and not in the page cache, as far as that can be told.
fn write_cold(path: &Path) -> anyhow::Result<()> {
    let mut file = fs::File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..(COLD_BLOCKS * COLD_BLOCK_BYTES).div_ceil(1 << 20) {
        file.write_all(&block)?;
    }
    // Only clean pages can be dropped from the cache.
    file.sync_all()?;
    Ok(())
}

/// Keeps the log of a case beside its results.
pub(super) fn write_log(path: &Path, windows: &[Window]) -> anyhow::Result<()> {
    let mut text = String::new();
    for window in windows {
        text += &serde_json::to_string(window)?;
        text.push('\n');
    }
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
