//! A flood takes its CPU from whoever runs there, by `NET_RX` softirqs, and nothing is left of it afterwards.
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

mod common;

use std::{
    env, fs,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::{Command, Stdio},
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nameindex,
    sched::{CloneFlags, setns},
    sys::prctl::set_pdeathsig,
    sys::signal::Signal,
};
use pqtail::{
    clock::now,
    collect::{
        host,
        probes::{ProbeSettings, RING_BYTES_DEFAULT},
    },
    truth::flood::{Flood, RECEIVER_NAME, SENDER_NAME, THREAD_NAME},
};
use pqtail_common::{Head, RECORD_BYTES, Span, Switch, kind};
use zerocopy::FromBytes;

use common::{DEADLINE, Running, pin, recorded, wait_until};

const ROLE: &str = "PQTAIL_TEST_FLOOD_ROLE";
const MARK: &str = "flood: prepared";
const BURST: Duration = Duration::from_millis(100);

/// Softirq number (`include/linux/interrupt.h`).
const NET_RX: u32 = 3;
/// A loop that reads the clock does not miss this much unless somebody takes its CPU.
const GAP_NS: u64 = 5_000;

#[test]
fn a_burst_takes_its_cpu_by_receive_softirqs() {
    let Some((_alone, cpu, from_cpu)) = privileged("a_burst_takes_its_cpu_by_receive_softirqs") else {
        return;
    };
    let mut flood = Flood::prepare(cpu, from_cpu).unwrap();
    // The sender has what nobody else wants of its CPU. On a machine that builds something at the same time that may
    // be nothing, so the burst that counts is the first that took a large share.
    let deadline = Instant::now() + DEADLINE;
    loop {
        let quiet = Shares::of(cpu, || {
            let begin_ns = now().0;
            thread::sleep(BURST);
            (begin_ns, now().0)
        });
        let flooded = Shares::of(cpu, || flood.burst(BURST).unwrap());
        eprintln!("quiet {quiet:?}\nflooded {flooded:?}");
        assert!(
            flooded.lost >= 0.8 * flooded.net_rx,
            "nobody runs while a softirq does: {flooded:?}"
        );
        let takes_much = flooded.net_rx > 0.25 && flooded.lost > 0.25;
        if takes_much && flooded.net_rx > 2.0 * quiet.net_rx {
            assert!(
                flooded.net_rx > 0.8 * flooded.softirq,
                "it is receive work: {flooded:?}"
            );
            return;
        }
        assert!(
            Instant::now() < deadline,
            "no burst took much of CPU {cpu}: {flooded:?}, without it {quiet:?}"
        );
    }
}

#[test]
fn a_burst_ends_when_the_work_has() {
    let Some((_alone, cpu, from_cpu)) = privileged("a_burst_ends_when_the_work_has") else {
        return;
    };
    let mut flood = Flood::prepare(cpu, from_cpu).unwrap();
    let mut end_ns = 0;
    let spans = record(cpu, || {
        for _ in 0..5 {
            let before_ns = now().0;
            let (begin, end) = flood.burst(Duration::from_millis(5)).unwrap();
            assert!(before_ns <= begin && begin + 5_000_000 <= end && end <= now().0);
            end_ns = end;
        }
    });
    // Work that the last burst left would be found as one long softirq, or several, behind it. There may be others'.
    let after_ns: u64 = spans
        .softirqs
        .iter()
        .filter(|span| span.number == NET_RX)
        .map(|span| overlap(span.start_ns, span.head.at_ns, end_ns, u64::MAX))
        .sum();
    let during_ns: u64 = spans
        .softirqs
        .iter()
        .filter(|span| span.number == NET_RX)
        .map(|span| overlap(span.start_ns, span.head.at_ns, 0, end_ns))
        .sum();
    assert!(
        after_ns < during_ns / 5,
        "{after_ns} ns after the end, {during_ns} before"
    );
}

#[test]
fn a_dropped_flood_leaves_nothing() {
    let Some((_alone, cpu, from_cpu)) = privileged("a_dropped_flood_leaves_nothing") else {
        return;
    };
    // The first runtime of a process opens a pair of sockets for signals, for good (`tokio::signal`).
    drop(Flood::prepare(cpu, from_cpu).unwrap());
    wait_until("its thread is gone", || own_thread().is_none());
    let before = Traces::of_this_process();

    let mut flood = Flood::prepare(cpu, from_cpu).unwrap();
    flood.burst(Duration::from_millis(1)).unwrap();
    let sending = sending_namespace(std::process::id());
    assert!(devices_of(&sending).contains(&SENDER_NAME.to_owned()));
    assert!(!devices_here().contains(&SENDER_NAME.to_owned()));
    assert!(!devices_here().contains(&RECEIVER_NAME.to_owned()));
    drop(flood);
    // One namespace is held here: an end of the pair goes when the namespace of the other does.
    wait_until("the receiving namespace is gone", || {
        devices_of(&sending) == ["lo"]
    });
    drop(sending);
    // A thread that has been joined may be listed for a moment.
    wait_until("its thread is gone", || own_thread().is_none());
    assert_eq!(Traces::of_this_process(), before);
}

#[test]
fn a_killed_process_takes_its_flood_with_it() {
    let Some((_alone, cpu, from_cpu)) = privileged("a_killed_process_takes_its_flood_with_it") else {
        return;
    };
    let mut child = Running(
        Command::new(env::current_exe().unwrap())
            .args(["flood_until_killed", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, format!("{cpu} {from_cpu}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap() == MARK),
        "the child prepares a flood"
    );
    let sending = sending_namespace(child.0.id());
    assert!(devices_of(&sending).contains(&SENDER_NAME.to_owned()));
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    wait_until("the receiving namespace is gone", || {
        devices_of(&sending) == ["lo"]
    });
}

/// The body of the child process; without a role it is no test at all.
#[test]
#[ignore = "a test starts it in a child process"]
fn flood_until_killed() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    // Not even a failed test leaves a flood behind. The signal follows the thread that started this process, which
    // waits for it.
    set_pdeathsig(Signal::SIGKILL).unwrap();
    let (cpu, from_cpu) = role.split_once(' ').unwrap();
    let mut flood = Flood::prepare(cpu.parse().unwrap(), from_cpu.parse().unwrap()).unwrap();
    println!("\n{MARK}");
    std::io::stdout().flush().unwrap();
    loop {
        flood.burst(DEADLINE).unwrap();
    }
}

#[test]
fn what_is_missing_is_named() {
    let refusal = |cpu, from_cpu| format!("{:#}", Flood::prepare(cpu, from_cpu).unwrap_err());
    let message = refusal(0, 0);
    assert!(message.contains("needs a second CPU"), "{message}");
    let message = refusal(0, 100_000);
    assert!(message.contains("CPU 100000 is not online"), "{message}");
}

/// Shares of the time between begin and end on one CPU.
#[derive(Debug)]
#[expect(dead_code, reason = "those that are not asserted are printed")]
struct Shares {
    /// Taken from a thread that would have spun all the time.
    lost: f64,
    /// In softirqs.
    softirq: f64,
    /// In `NET_RX` softirqs.
    net_rx: f64,
    /// While ksoftirqd had the CPU.
    ksoftirqd: f64,
    /// The sender's, of its own CPU.
    sender: f64,
    /// Begin to end.
    duration_ms: f64,
}

impl Shares {
    fn of(cpu: u32, work: impl FnOnce() -> (u64, u64)) -> Self {
        let sender_ns = || own_thread().and_then(host::thread_cpu_ns);
        let victim = Victim::start(cpu);
        let before_ns = sender_ns();
        let mut window = (0, 0);
        let recorded = record(cpu, || window = work());
        let sender_ns = sender_ns().unwrap_or(0) - before_ns.unwrap_or(0);
        let gaps = victim.gaps();
        let (begin_ns, end_ns) = window;
        let duration_ns = end_ns - begin_ns;
        let share = |ns: u64| ns as f64 / duration_ns as f64;
        let softirqs = |number: Option<u32>| {
            let spans = recorded.softirqs.iter();
            spans
                .filter(|span| number.is_none_or(|number| number == span.number))
                .map(|span| overlap(span.start_ns, span.head.at_ns, begin_ns, end_ns))
                .sum()
        };
        let name = format!("ksoftirqd/{cpu}");
        let ksoftirqd = recorded
            .switches
            .windows(2)
            .filter(|pair| pair[0].next_comm.starts_with(name.as_bytes()))
            .map(|pair| overlap(pair[0].head.at_ns, pair[1].head.at_ns, begin_ns, end_ns));
        Self {
            lost: share(
                gaps.iter()
                    .map(|&(from, to)| overlap(from, to, begin_ns, end_ns))
                    .sum(),
            ),
            softirq: share(softirqs(None)),
            net_rx: share(softirqs(Some(NET_RX))),
            ksoftirqd: share(ksoftirqd.sum()),
            sender: share(sender_ns),
            duration_ms: duration_ns as f64 / 1e6,
        }
    }
}

/// What one CPU did, by time.
struct Recorded {
    softirqs: Vec<Span>,
    switches: Vec<Switch>,
}

/// The probes' view of one CPU while `work` runs.
fn record(cpu: u32, work: impl FnOnce()) -> Recorded {
    let settings = ProbeSettings {
        ports: Vec::new(),
        cpus: vec![cpu],
        heartbeat_ns: None,
        ring_bytes: RING_BYTES_DEFAULT,
        reads: false,
    };
    let mut records = recorded(&settings, work);
    let head = |raw: &[u8; RECORD_BYTES]| Head::read_from_prefix(raw).unwrap().0;
    records.retain(|raw| u32::from(head(raw).cpu) == cpu);
    records.sort_by_key(|raw| head(raw).at_ns);
    fn of<T: FromBytes>(records: &[[u8; RECORD_BYTES]], kind: u8) -> Vec<T> {
        let of_kind =
            |raw: &&[u8; RECORD_BYTES]| Head::read_from_prefix(raw.as_slice()).unwrap().0.kind == kind;
        let records = records.iter().filter(of_kind);
        records.map(|raw| T::read_from_bytes(raw).unwrap()).collect()
    }
    Recorded {
        softirqs: of(&records, kind::SOFTIRQ),
        switches: of(&records, kind::SWITCH),
    }
}

/// How much of the one interval lies in the other, ns.
fn overlap(from: u64, to: u64, begin: u64, end: u64) -> u64 {
    to.min(end).saturating_sub(from.max(begin))
}

/// A thread that spins on one CPU and notes when it could not. Its CPU time would not tell: without
/// `IRQ_TIME_ACCOUNTING` the kernel bills a softirq to whom it interrupts.
struct Victim {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Vec<(u64, u64)>>,
}

impl Victim {
    fn start(cpu: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let spin = move || {
            pin(cpu);
            let mut gaps = Vec::new();
            let mut last = now().0;
            while !is_over.load(Ordering::Relaxed) {
                let time = now().0;
                if time - last > GAP_NS {
                    gaps.push((last, time));
                }
                last = time;
            }
            gaps
        };
        let thread = thread::Builder::new().name("pq-victim".to_owned()).spawn(spin);
        Self {
            stop,
            thread: thread.unwrap(),
        }
    }

    /// Begin and end of each time that it did not run, ns.
    fn gaps(self) -> Vec<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// What this process has open, and what it could have left elsewhere.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    /// Files may be open for a moment in any other test.
    sockets_and_namespaces: Vec<String>,
    mounts: String,
    devices: Vec<String>,
    /// Files that would name a namespace, as `ip netns` does.
    named: usize,
}

impl Traces {
    fn of_this_process() -> Self {
        Self {
            sockets_and_namespaces: sockets_and_namespaces(),
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap(),
            devices: devices_here(),
            named: fs::read_dir("/run/netns").map_or(0, Iterator::count),
        }
    }
}

fn sockets_and_namespaces() -> Vec<String> {
    let files = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let mut targets: Vec<String> = files
        .filter_map(|file| fs::read_link(file.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| {
            ["socket:", "net:", "mnt:"]
                .iter()
                .any(|kind| target.starts_with(kind))
        })
        .collect();
    targets.sort();
    targets
}

fn own_thread() -> Option<u32> {
    thread_named(std::process::id(), THREAD_NAME)
}

fn thread_named(pid: u32, name: &str) -> Option<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.filter_map(Result::ok).find_map(|task| {
        let comm = fs::read_to_string(task.path().join("comm")).ok()?;
        (comm.trim() == name).then(|| task.file_name().to_str()?.parse().ok())?
    })
}

fn sending_namespace(pid: u32) -> File {
    let tid = thread_named(pid, THREAD_NAME).unwrap();
    File::open(format!("/proc/{pid}/task/{tid}/ns/net")).unwrap()
}

/// Names of the devices of a network namespace.
fn devices_of(namespace: &File) -> Vec<String> {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
            devices_here()
        });
        inside.join().unwrap()
    })
}

fn devices_here() -> Vec<String> {
    let mut names: Vec<String> = if_nameindex()
        .unwrap()
        .iter()
        .map(|interface| interface.name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// One test at a time, and two CPUs: one to flood and one to flood it from. `None`, with the reason on stderr, where
/// that cannot be.
fn privileged(test: &str) -> Option<(MutexGuard<'static, ()>, u32, u32)> {
    let alone = common::privileged(test)?;
    let cpus = host::allowed_cpus().unwrap();
    let &[from_cpu, cpu, ..] = cpus.as_slice() else {
        eprintln!("SKIPPED {test}: it needs two CPUs");
        return None;
    };
    Some((alone, cpu, from_cpu))
}
