//! From the kernel's ring buffer to the disk.
//!
//! The kernel side wakes nobody, so that the measured path never pays a wake-up; the drain polls instead. It runs
//! where it disturbs least: on spare CPUs if there are any, else at the lowest priority, which it leaves while the
//! ring is filling up, because a lost record costs more than a disturbed request.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use pqtail_common::{Head, KINDS, Loss, RECORD_BYTES, Sleep, kind};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{
    probes::{Probes, Source, kind_name},
    symbols,
    worker::{own_cpu_ns, set_scheduler},
};
use crate::{
    clock::{self, HostNs},
    record::{
        manifest::KernelRecord,
        stream::{StreamKind, Writer},
    },
};

/// Waits between polls: the calm one, and the one while the ring is more than [`BUSY_SHARE`] full.
const POLL_CALM: Duration = Duration::from_millis(15);
const POLL_BUSY: Duration = Duration::from_millis(2);
/// Between trials nothing is kept, so only the next discard has to stay short.
const POLL_IDLE: Duration = Duration::from_millis(100);

/// Shares of the ring, as divisors: above the first it is polled often, above the second at normal priority, and
/// below the third the priority is given up again.
const BUSY_SHARE: u64 = 4;
const URGENT_SHARE: u64 = 2;
const RELAXED_SHARE: u64 = 8;

/// A killed run loses no more than this.
const FLUSH_EVERY: Duration = Duration::from_millis(250);

/// A record that another CPU is still writing holds up those behind it. At a trial's end it is waited for this long:
/// more than a preempted vCPU is usually away.
const STRAGGLER_WAIT: Duration = Duration::from_millis(200);

/// `nice` of the drain while it shares CPUs with what is measured.
const NICE_LOW: i32 = 19;

/// The thread that empties the ring. It ends when this is dropped; a trial under way is then cut.
#[derive(Debug)]
pub struct Drain {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    tid: u32,
}

#[derive(Debug)]
enum Command {
    Begin {
        path: PathBuf,
        trial: u32,
        reply: Sender<anyhow::Result<()>>,
    },
    End {
        reply: Sender<anyhow::Result<KernelRecord>>,
    },
}

impl Drain {
    /// Starts the thread, on `cpus` where they are spare, else on any CPU at low priority.
    ///
    /// # Errors
    /// When the probes already have a drain, or the thread cannot be started or pinned.
    pub fn start(probes: &mut Probes, cpus: Option<Vec<u32>>) -> anyhow::Result<Self> {
        let source = probes
            .take_source()
            .context("start a drain: these probes already have one")?;
        let (commands, inbox) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("pqtail-drain".to_owned())
            .spawn(move || {
                let placed = place(cpus.as_deref());
                let may_lower = cpus.is_none();
                let failed = placed.is_err();
                // The starter waits for this message; if it is gone, so is the need to drain.
                if ready.send(placed).is_err() || failed {
                    return;
                }
                Worker::new(source, may_lower).run(&inbox);
            })
            .context("start the drain thread")?;
        let tid = started.recv().context("start the drain thread")??;
        Ok(Self {
            commands: Some(commands),
            thread: Some(thread),
            tid,
        })
    }

    /// Thread id of the drain: where it shows up as a culprit, the measurement disturbed itself.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// Discards what was recorded before and begins to store into the file `path`.
    ///
    /// # Errors
    /// When the file cannot be created, a trial is already under way, or the drain is gone.
    pub fn begin_trial(&self, path: &Path, trial: u32) -> anyhow::Result<()> {
        self.ask(|reply| Command::Begin {
            path: path.to_owned(),
            trial,
            reply,
        })
    }

    /// Stores everything up to the present moment and finishes the file.
    ///
    /// # Errors
    /// When a write failed during the trial (what was stored before stays readable), no trial is under way, or the
    /// drain is gone.
    pub fn end_trial(&self) -> anyhow::Result<KernelRecord> {
        self.ask(|reply| Command::End { reply })
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<anyhow::Result<T>>) -> Command) -> anyhow::Result<T> {
        let (reply, answer) = mpsc::channel();
        let gone = || anyhow!("the drain thread has ended: the kernel's recording is cut");
        self.commands
            .as_ref()
            .ok_or_else(gone)?
            .send(command(reply))
            .map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already printed by it.
            let _ = thread.join();
        }
    }
}

/// A trial under way.
struct Trial {
    /// `None` once a write failed.
    writer: Option<Writer<[u8; RECORD_BYTES]>>,
    error: Option<anyhow::Error>,
    /// Earlier records belong to nobody.
    begin: HostNs,
    record: KernelRecord,
    cpu_ns_at_begin: u64,
    flushed: Instant,
    /// Code that sleeping threads were in, by its distance from `_stext`: to be named at the end.
    code: BTreeSet<u32>,
}

impl Trial {
    /// Keeps the first failure and gives the file up: a full disk must not stop the drain.
    fn attempt(&mut self, write: impl FnOnce(&mut Writer<[u8; RECORD_BYTES]>) -> anyhow::Result<()>) {
        if let Some(writer) = &mut self.writer
            && let Err(error) = write(writer)
        {
            self.error = Some(error);
            self.writer = None;
        }
    }

    fn store(&mut self, record: &[u8; RECORD_BYTES]) {
        /// Place of [`Head::kind`].
        const KIND: usize = 8;
        if record[KIND] == kind::SLEEP
            && let Ok(sleep) = Sleep::read_from_bytes(record)
        {
            self.code
                .extend(sleep.frames.iter().take(sleep.frames_count as usize));
        }
        self.attempt(|writer| writer.push(record));
    }
}

struct Worker {
    source: Source,
    trial: Option<Trial>,
    /// Loss counters at the last poll, and a time before they were read.
    counted: Vec<[u64; KINDS]>,
    counted_at: HostNs,
    priority: Priority,
}

impl Worker {
    fn new(source: Source, may_lower: bool) -> Self {
        let mut worker = Self {
            counted: Vec::new(),
            counted_at: clock::now(),
            source,
            trial: None,
            priority: Priority::lowest_if(may_lower),
        };
        worker.count_losses();
        worker
    }

    fn run(&mut self, inbox: &Receiver<Command>) {
        let mut wait = POLL_IDLE;
        loop {
            // A requester that has gone away needs no answer.
            match inbox.recv_timeout(wait) {
                Ok(Command::Begin { path, trial, reply }) => {
                    let _ = reply.send(self.begin(&path, trial));
                }
                Ok(Command::End { reply }) => {
                    let _ = reply.send(self.end());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let used = self.poll();
            wait = self.next_wait(used);
        }
    }

    /// Empties the ring once; returns how full it was.
    fn poll(&mut self) -> u64 {
        let used = self.source.ring.used_bytes();
        if used > self.source.ring.bytes() / URGENT_SHARE {
            self.priority.raise();
        }
        if let Some(trial) = &mut self.trial {
            trial.record.ring_used_bytes_max = trial.record.ring_used_bytes_max.max(used);
        }
        self.take(used);
        self.count_losses();
        if let Some(log) = &mut self.source.log {
            log.flush();
        }
        if let Some(trial) = &mut self.trial
            && trial.flushed.elapsed() >= FLUSH_EVERY
        {
            trial.attempt(Writer::flush);
            trial.flushed = Instant::now();
        }
        used
    }

    fn next_wait(&mut self, used: u64) -> Duration {
        let bytes = self.source.ring.bytes();
        if used < bytes / RELAXED_SHARE {
            self.priority.lower();
        }
        if used > bytes / URGENT_SHARE {
            Duration::ZERO
        } else if used > bytes / BUSY_SHARE {
            POLL_BUSY
        } else if self.trial.is_some() {
            POLL_CALM
        } else {
            POLL_IDLE
        }
    }

    /// Takes records off the ring until `bytes` are gone, or one is met that is still being written. Bounded, because
    /// what is stored here makes new records. Returns the bytes taken.
    fn take(&mut self, bytes: u64) -> u64 {
        /// Every record in the ring is preceded by `BPF_RINGBUF_HDR_SZ` bytes.
        const HEADER_BYTES: u64 = 8;
        let mut taken = 0;
        while taken < bytes {
            let Some(item) = self.source.ring.next() else {
                break;
            };
            taken += item.len() as u64 + HEADER_BYTES;
            let record: &[u8; RECORD_BYTES] = (*item)
                .try_into()
                .expect("the kernel side stores whole records only");
            if let Some(trial) = &mut self.trial
                && at_ns(record) >= trial.begin.0
            {
                trial.store(record);
            }
        }
        taken
    }

    /// Takes everything that was recorded before this call.
    fn take_all(&mut self) {
        let deadline = Instant::now() + STRAGGLER_WAIT;
        let mut left = self.source.ring.used_bytes();
        loop {
            left = left.saturating_sub(self.take(left));
            if left == 0 || Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Stores one [`Loss`] for every counter that grew since the last poll.
    fn count_losses(&mut self) {
        let before = clock::now();
        // The counters are there as long as the programs are; if a read fails, the next one has the whole growth.
        let Ok(counters) = self.source.losses.read() else {
            return;
        };
        let after = clock::now();
        self.counted.resize(counters.len(), [0; KINDS]);
        if let Some(trial) = &mut self.trial {
            for (cpu, (new, old)) in counters.iter().zip(&self.counted).enumerate() {
                for lost_kind in 0..KINDS {
                    let count = new[lost_kind] - old[lost_kind];
                    if count == 0 {
                        continue;
                    }
                    let loss = Loss {
                        head: Head {
                            at_ns: after.0,
                            kind: kind::LOSS,
                            cpu: cpu as u16,
                            ..Head::default()
                        },
                        start_ns: self.counted_at.0,
                        count,
                        lost_kind: lost_kind as u32,
                        ..Loss::default()
                    };
                    let mut bytes = [0; RECORD_BYTES];
                    bytes.copy_from_slice(loss.as_bytes());
                    trial.store(&bytes);
                    *trial.record.lost.entry(kind_name(lost_kind as u8)).or_default() += count;
                }
            }
        }
        self.counted = counters;
        self.counted_at = before;
    }

    fn begin(&mut self, path: &Path, trial: u32) -> anyhow::Result<()> {
        ensure!(
            self.trial.is_none(),
            "begin trial {trial}: end the trial under way first"
        );
        let writer = Writer::create(path, StreamKind::Kernel, trial)?;
        self.take_all();
        self.count_losses();
        self.trial = Some(Trial {
            writer: Some(writer),
            error: None,
            begin: clock::now(),
            record: KernelRecord {
                ring_bytes: self.source.ring.bytes(),
                lost: BTreeMap::new(),
                ..KernelRecord::default()
            },
            cpu_ns_at_begin: own_cpu_ns(),
            flushed: Instant::now(),
            code: BTreeSet::new(),
        });
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<KernelRecord> {
        ensure!(self.trial.is_some(), "end a trial: none is under way");
        let used = self.source.ring.used_bytes();
        self.take_all();
        self.count_losses();
        let Some(mut trial) = self.trial.take() else {
            return Err(anyhow!("end a trial: none is under way"));
        };
        if let Some(error) = trial.error {
            return Err(error);
        }
        if let Some(writer) = trial.writer {
            trial.record.written = writer.finish()?;
        }
        trial.record.ring_used_bytes_max = trial.record.ring_used_bytes_max.max(used);
        trial.record.drain_cpu_ns = own_cpu_ns() - trial.cpu_ns_at_begin;
        trial.record.functions = symbols::functions(&trial.code);
        Ok(trial.record)
    }
}

fn at_ns(record: &[u8; RECORD_BYTES]) -> u64 {
    u64::from_ne_bytes([
        record[0], record[1], record[2], record[3], record[4], record[5], record[6], record[7],
    ])
}

/// Pins the calling thread; returns its id.
fn place(cpus: Option<&[u32]>) -> anyhow::Result<u32> {
    if let Some(cpus) = cpus {
        let mut set = nix::sched::CpuSet::new();
        for &cpu in cpus {
            set.set(cpu as usize)
                .with_context(|| format!("pin the drain to CPU {cpu}"))?;
        }
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set)
            .with_context(|| format!("pin the drain to CPUs {cpus:?}: are they online and allowed?"))?;
    }
    Ok(nix::unistd::gettid().as_raw().cast_unsigned())
}

/// Scheduling priority of the drain thread.
struct Priority {
    may_lower: bool,
    is_low: bool,
}

impl Priority {
    /// Lowers the calling thread's priority, if it is allowed to raise it again.
    fn lowest_if(may_lower: bool) -> Self {
        // Without CAP_SYS_NICE or a limit that allows it, a lowered thread could never come back up.
        let may_raise = may_lower && set_nice(-1).is_ok() && set_nice(0).is_ok();
        let mut priority = Self {
            may_lower: may_raise,
            is_low: false,
        };
        priority.lower();
        priority
    }

    fn lower(&mut self) {
        if self.may_lower && !self.is_low {
            // SCHED_BATCH: it does not preempt on wake-up. Not SCHED_IDLE: beside a busy thread that would not run
            // often enough to notice that the ring fills up. Being refused only costs calm.
            let _ = set_scheduler(0, libc::SCHED_BATCH, 0);
            self.is_low = set_nice(NICE_LOW).is_ok();
        }
    }

    fn raise(&mut self) {
        if self.is_low {
            let _ = set_scheduler(0, libc::SCHED_OTHER, 0);
            self.is_low = set_nice(0).is_err();
        }
    }
}

/// On Linux, `nice` belongs to the thread, not to the process.
fn set_nice(nice: i32) -> io::Result<()> {
    // SAFETY: takes no pointers; 0 is the calling thread.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
