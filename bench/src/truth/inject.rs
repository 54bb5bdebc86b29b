//! Commits the faults, each at a time that the caller chooses, and logs what was done to whom.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Serialize;

use super::{
    case::{Case, FIFO_HOG, HOG, Loss},
    dropper::{Dropper, Segment},
};
use crate::{
    attribute::ledger::Side,
    clock::now,
    collect::{
        fault::{COLD_STRIDE_BYTES, Fault, Faults},
        link,
        worker::pin,
    },
    record::manifest::{Host, Manifest},
};

/// How long a task spins, a process is stopped, a handler computes or sleeps: far above what the machine does by itself.
const SPIN: Duration = Duration::from_millis(20);
const STOP: Duration = Duration::from_millis(20);
const HANDLER_NS: u64 = 20_000_000;
/// Enough that a disk needs some milliseconds for them.
const COLD_PAGES: u64 = 200;

/// Real-time priority of the FIFO task: the least there is, which is above every normal one.
const FIFO_PRIORITY: i32 = 1;

/// The quota: the least the kernel takes, in a period in which the thread needs more than that.
const QUOTA_US: u64 = 1_000;
const PERIOD_US: u64 = 50_000;
/// A thread that is not throttled in this many periods has nothing to do.
const PERIODS_MAX: u32 = 20;

/// How long to wait until a connection comes that takes the fault or loses its segment.
const TAKEN_MAX: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);

/// Payload of the client's and the server's first data exceeds this; all their later segments are smaller. Bytes.
const CLIENT_HELLO_BYTES_MIN: u32 = 190;
const SERVER_FLIGHT_BYTES_MIN: u32 = 500;

/// One injection as it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Window {
    /// Begin; `CLOCK_MONOTONIC` of this machine, which is both ends' clock, ns.
    pub(super) begin_ns: u64,
    /// End; the same as the begin for a lost segment.
    pub(super) end_ns: u64,
    /// The client's port of the connection that was meant, if one was.
    pub(super) victim: Option<u16>,
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
        let status = fs::read_to_string(format!("/proc/{tid}/status"))
            .with_context(|| format!("look up thread {tid}"))?;
        let pid = status
            .lines()
            .find_map(|line| line.strip_prefix("Tgid:"))
            .and_then(|number| number.trim().parse().ok())
            .with_context(|| format!("/proc/{tid}/status names no process"))?;
        Ok(Self { pid, tid, cpu })
    }
}

/// Ready to inject one kind of fault. What it set up is gone when it is dropped.
pub(super) enum Injector {
    Nothing,
    Spin {
        cpu: u32,
        realtime: bool,
    },
    Quota(Quota),
    Stop {
        pid: u32,
    },
    Handler {
        faults: Faults,
        fault: Fault,
    },
    Drop {
        dropper: Box<Dropper>,
        segment: Segment,
        payload_min: u32,
        from_client: bool,
    },
}

impl Injector {
    pub(super) fn prepare(case: Case, ends: &Ends, faults: Faults) -> anyhow::Result<Self> {
        Ok(match case {
            Case::Nothing => Self::Nothing,
            Case::Hog(side) => Self::Spin {
                cpu: ends.on(side).cpu,
                realtime: false,
            },
            Case::FifoHog(side) => Self::Spin {
                cpu: ends.on(side).cpu,
                realtime: true,
            },
            Case::Quota(side) => Self::Quota(Quota::on(ends.on(side).tid)?),
            Case::Stop(side) => Self::Stop {
                pid: ends.on(side).pid,
            },
            Case::Compute => Self::Handler {
                faults,
                fault: Fault::Compute(HANDLER_NS),
            },
            Case::Sleep => Self::Handler {
                faults,
                fault: Fault::Sleep(HANDLER_NS),
            },
            Case::ColdRead => {
                let path = faults.cold_file().to_owned();
                write_cold(&path).with_context(|| format!("write {}", path.display()))?;
                Self::Handler {
                    faults,
                    fault: Fault::Read(COLD_PAGES),
                }
            }
            Case::HeldResponse => Self::Handler {
                faults,
                fault: Fault::HeldResponse,
            },
            Case::Loss(loss) => {
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
                Self::Drop {
                    dropper: Box::new(Dropper::attach(receiver.pid, device)?),
                    segment,
                    payload_min,
                    from_client: matches!(loss, Loss::Syn | Loss::ClientHello),
                }
            }
        })
    }

    /// Commits the fault once, and returns when it is over.
    pub(super) fn inject(&mut self) -> anyhow::Result<Vec<Window>> {
        Ok(match self {
            Self::Nothing => Vec::new(),
            Self::Spin { cpu, realtime } => vec![spin(*cpu, *realtime)?],
            Self::Quota(quota) => quota.exhaust()?.into_iter().collect(),
            Self::Stop { pid } => stop(*pid)?.into_iter().collect(),
            Self::Handler { faults, fault } => {
                let before = faults.committed().len();
                faults.order(*fault);
                let is_taken = within(TAKEN_MAX, || faults.committed().len() > before);
                if !is_taken {
                    // Between two trials nobody comes.
                    faults.cancel();
                }
                let committed = faults.committed();
                committed[before..]
                    .iter()
                    .map(|each| Window {
                        begin_ns: each.begin_ns,
                        end_ns: each.end_ns,
                        victim: Some(each.port),
                    })
                    .collect()
            }
            Self::Drop {
                dropper,
                segment,
                payload_min,
                from_client,
            } => {
                let before = dropper.dropped()?.len();
                dropper.order(*segment, *payload_min, 1)?;
                let deadline = Instant::now() + TAKEN_MAX;
                while dropper.dropped()?.len() == before && Instant::now() < deadline {
                    thread::sleep(POLL);
                }
                dropper.stop()?;
                dropper.dropped()?[before..]
                    .iter()
                    .map(|each| Window {
                        begin_ns: each.at_ns,
                        end_ns: each.at_ns,
                        victim: Some(if *from_client {
                            each.source_port
                        } else {
                            each.destination_port
                        }),
                    })
                    .collect()
            }
        })
    }
}

/// Polls until the condition holds; whether it did in time.
fn within(most: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + most;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

/// A thread of a known name spins on a CPU.
fn spin(cpu: u32, realtime: bool) -> anyhow::Result<Window> {
    let name = if realtime { FIFO_HOG } else { HOG };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        pin(cpu).context(name)?;
        if realtime {
            become_fifo()?;
        }
        let begin_ns = now().0;
        while now().0 < begin_ns + SPIN.as_nanos() as u64 {
            std::hint::spin_loop();
        }
        Ok(Window {
            begin_ns,
            end_ns: now().0,
            victim: None,
        })
    });
    match thread.context("start a thread")?.join() {
        Ok(window) => window,
        Err(_) => bail!("{name} panicked"),
    }
}

/// Gives the calling thread the least real-time priority.
fn become_fifo() -> anyhow::Result<()> {
    let parameters = libc::sched_param {
        sched_priority: FIFO_PRIORITY,
    };
    // SAFETY: a valid parameter block for the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
    ensure!(
        result == 0,
        "become SCHED_FIFO: {}: needs CAP_SYS_NICE, and with RT_GROUP_SCHED a cgroup that may run real-time tasks",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// Stops a process for a while; `None` if it has ended with its run.
fn stop(pid: u32) -> anyhow::Result<Option<Window>> {
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
    thread::sleep(STOP);
    drop(continued);
    Ok(Some(Window {
        begin_ns,
        end_ns: now().0,
        victim: None,
    }))
}

/// A cgroup (version 1, whose threads move one by one) that holds one thread.
pub(super) struct Quota {
    group: PathBuf,
    home: PathBuf,
    tid: u32,
}

const CPU_CONTROLLER: &str = "/sys/fs/cgroup/cpu";

impl Quota {
    fn on(tid: u32) -> anyhow::Result<Self> {
        let root = Path::new(CPU_CONTROLLER);
        ensure!(
            root.join("tasks").exists(),
            "quota: needs the cgroup v1 cpu controller at {CPU_CONTROLLER}, where a single thread can be moved"
        );
        let cgroups = fs::read_to_string(format!("/proc/{tid}/cgroup"))?;
        let home = cgroups
            .lines()
            .filter_map(|line| line.split(':').nth(1).zip(line.split(':').nth(2)))
            .find(|(controllers, _)| controllers.split(',').any(|each| each == "cpu"))
            .map(|(_, path)| root.join(path.trim_start_matches('/')))
            .with_context(|| format!("thread {tid} is in no cpu cgroup"))?;
        let group = root.join(format!("pqtail-truth-{tid}"));
        fs::create_dir(&group).with_context(|| format!("create the cgroup {}", group.display()))?;
        let quota = Self { group, home, tid };
        quota.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
        quota.write("tasks", &tid.to_string())?;
        Ok(quota)
    }

    fn write(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.group.join(file);
        fs::write(&path, value).with_context(|| format!("write {}", path.display()))
    }

    fn throttled_ns(&self) -> anyhow::Result<u64> {
        let stat = fs::read_to_string(self.group.join("cpu.stat"))?;
        stat.lines()
            .find_map(|line| line.strip_prefix("throttled_time "))
            .and_then(|ns| ns.trim().parse().ok())
            .context("cpu.stat has no throttled_time")
    }

    /// Lets the thread run into its quota once; `None` if it had too little to do for that.
    fn exhaust(&self) -> anyhow::Result<Option<Window>> {
        let before_ns = self.throttled_ns()?;
        let begin_ns = now().0;
        self.write("cpu.cfs_quota_us", &QUOTA_US.to_string())?;
        let throttled = within(Duration::from_micros(PERIOD_US) * PERIODS_MAX, || {
            // The counter moves when the throttled group may run again.
            self.throttled_ns().is_ok_and(|ns| ns > before_ns)
        });
        self.write("cpu.cfs_quota_us", "-1")?;
        Ok(throttled.then(|| Window {
            begin_ns,
            end_ns: now().0,
            victim: None,
        }))
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        // The thread may have ended with its run.
        let _ = fs::write(self.home.join("tasks"), self.tid.to_string());
        // A group whose last thread is still on its way out is busy for a moment.
        within(TAKEN_MAX, || {
            fs::remove_dir(&self.group).is_ok() || !self.group.exists()
        });
    }
}

/// A file on the disk and not in the page cache, as far as that can be told.
fn write_cold(path: &Path) -> anyhow::Result<()> {
    let mut file = fs::File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..(COLD_PAGES * COLD_STRIDE_BYTES).div_ceil(1 << 20) {
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
