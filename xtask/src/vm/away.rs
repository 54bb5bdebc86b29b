//! `--vcpu-away`: a guest's emulator is stopped now and then while a run goes on. The guest's clock goes on too, and nothing in the
//! guest is told: so a hypervisor takes CPUs away.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{Pair, folders};
use crate::guest::Guest;

/// Name of the log in a results folder, as `pqtail stops` reads it.
const LOG: &str = "stops.jsonl";

/// How long a stop lasts. Far above what an emulator is late by itself, and below the time-out after which a SYN is sent again (1 s),
/// so that the stop is the only thing that happens.
const STOP_MS: Range<u64> = 450..850;

/// Between two stops: long enough that the requests of the one are over before the next.
const PAUSE_MS: Range<u64> = 1_500..3_000;

const POLL: Duration = Duration::from_millis(20);

/// Readings of a guest's clock; the one that took the least counts.
const READINGS: u32 = 12;

/// Which guest is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Side {
    /// The load generator's.
    Client,
    /// The server's.
    Server,
}

impl Side {
    pub(super) fn of(self, pair: &Pair) -> &Guest {
        match self {
            Self::Client => &pair.client,
            Self::Server => &pair.server,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// `CLOCK_MONOTONIC` of this machine, ns.
fn now_ns() -> anyhow::Result<i64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("read the clock")?;
    Ok(now.tv_sec() * 1_000_000_000 + now.tv_nsec())
}

/// A guest's monotonic clock against this machine's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offset {
    /// Guest minus machine, ns.
    pub(crate) ns: i64,
    /// The truth lies within this of it, ns.
    pub(crate) error_ns: i64,
}

impl Offset {
    /// Reads the guest's clock between two readings of this machine's, some times over one SSH session.
    ///
    /// # Errors
    /// When the guest cannot be reached or its kernel does not tell.
    pub(crate) fn read(pair: &Pair, guest: &Guest) -> anyhow::Result<Self> {
        // The kernel prints `now at 150819248256 nsecs` (kernel/time/timer_list.c), which is its monotonic clock.
        let loops = "while read -r again; do sed -n 's/^now at \\([0-9]*\\) nsecs/\\1/p; /^now/q' /proc/timer_list; done";
        let mut session = pair
            .ssh(guest)
            .arg(loops)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start ssh")?;
        let mut ask = session.stdin.take().context("a pipe")?;
        let mut answers = BufReader::new(session.stdout.take().context("a pipe")?).lines();
        let mut best: Option<Self> = None;
        for _ in 0..READINGS {
            let before_ns = now_ns()?;
            ask.write_all(b"\n").context("ask a guest for its time")?;
            let answer = answers
                .next()
                .context("the guest does not tell its time")?
                .context("ask a guest for its time")?;
            let after_ns = now_ns()?;
            let told_ns: i64 = answer
                .parse()
                .with_context(|| format!("a guest's time: {answer:?}"))?;
            let read = Self {
                ns: told_ns - before_ns.midpoint(after_ns),
                error_ns: (after_ns - before_ns) / 2 + 1,
            };
            best = best.filter(|best| best.error_ns <= read.error_ns).or(Some(read));
        }
        drop(ask);
        session.wait().context("end ssh")?;
        best.context("no reading")
    }
}

/// One stop, on this machine's clock, ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    begin_ns: i64,
    end_ns: i64,
}

/// Goes on when this is dropped, whatever happens.
struct Stopped(Pid);

impl Stopped {
    fn begin(guest: &Guest) -> anyhow::Result<Self> {
        let pid = Pid::from_raw(guest.pid().cast_signed());
        kill(pid, Signal::SIGSTOP).context("stop an emulator")?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// What was done to a run.
#[derive(Debug)]
pub(crate) struct Stops {
    /// The run's own folder.
    pub(crate) folder: PathBuf,
    stops: Vec<Stop>,
}

impl Stops {
    /// Stops a guest again and again, from when the run's first trial is due to when the run ends. `results` is where the run makes
    /// its folder.
    ///
    /// # Errors
    /// When the run makes no folder, or the emulator is gone.
    pub(crate) fn commit(run: &mut Child, guest: &Guest, results: &Path, seed: u64) -> anyhow::Result<Self> {
        let before = folders(results);
        let mut random = Random(seed);
        let folder = loop {
            let new = folders(results).into_iter().find(|each| !before.contains(each));
            if let Some(folder) = new.filter(|folder| is_set_up(folder)) {
                break folder;
            }
            ensure!(run.try_wait()?.is_none(), "the run ended before it began");
            thread::sleep(POLL);
        };
        let mut stops = Vec::new();
        loop {
            let until = Instant::now() + Duration::from_millis(random.within(PAUSE_MS));
            while Instant::now() < until {
                if run.try_wait()?.is_some() {
                    return Ok(Self { folder, stops });
                }
                thread::sleep(POLL);
            }
            let lasting = Duration::from_millis(random.within(STOP_MS));
            let begin_ns = now_ns()?;
            let stopped = Stopped::begin(guest)?;
            thread::sleep(lasting);
            drop(stopped);
            stops.push(Stop {
                begin_ns,
                end_ns: now_ns()?,
            });
        }
    }

    /// Writes the log beside the results, on the client's clock.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn log(&self, side: Side, client: Offset) -> anyhow::Result<()> {
        let line = |stop: &Stop| {
            let line = json!({
                "begin_ns": stop.begin_ns + client.ns,
                "end_ns": stop.end_ns + client.ns,
                "clock_error_ns": client.error_ns,
                "stopped": side.name(),
            });
            format!("{line}\n")
        };
        let text: String = self.stops.iter().map(line).collect();
        let log = self.folder.join(LOG);
        fs::write(&log, text).with_context(|| format!("write {}", log.display()))
    }
}

/// Whether the run has its threads and probes, so that trials come next.
fn is_set_up(folder: &Path) -> bool {
    let manifest = fs::read(folder.join("manifest.json")).unwrap_or_default();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
    let threads = manifest["server"]["threads"].as_array();
    threads.is_some_and(|threads| !threads.is_empty())
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): enough to draw a few times from a seed.
struct Random(u64);

impl Random {
    fn within(&mut self, range: Range<u64>) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        range.start + (mixed ^ (mixed >> 31)) % (range.end - range.start)
    }
}
