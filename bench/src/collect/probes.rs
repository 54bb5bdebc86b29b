//! The eBPF programs: loading, attaching, and what is missing when one does not attach.
//!
//! Only what everything depends on is an error here: privileges, the kernel's type information, the maps. A single
//! program that the kernel refuses becomes a [`ProbeStatus`] with its consequence, and the run goes on.

use std::{
    ffi::c_void,
    fs, io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::Path,
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context as _, anyhow, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, MapData, PerCpuArray, RingBuf, ring_buf::RingBufItem},
    programs::{
        BtfTracePoint, PerfEvent, ProgramError,
        perf_event::{PerfEventConfig, PerfEventScope, SamplePolicy, SoftwareEvent},
    },
};
use aya_log::EbpfLogger;
use pqtail_common::{ABSENT, CPU_WORDS, KINDS, Settings, kind};

use super::{btf, libssl, symbols};
use crate::record::manifest::ProbeStatus;

/// The compiled eBPF programs.
pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pqtail-ebpf"));

/// A ring that takes 233,000 records of 72 bytes each: a third of a second of two CPUs that do nothing but exchange
/// bytes on loopback, and seconds of a paced run. The drain shares CPUs at low priority, so it may be late.
pub const RING_BYTES_DEFAULT: u32 = 16 << 20;

/// Beats often enough to bound an absence to a quarter of the smallest tail that matters (1 ms).
pub const HEARTBEAT_NS_DEFAULT: u64 = 1_000_000;

/// The kernel throttles perf events that fire faster than this.
const HEARTBEAT_NS_MIN: u64 = 50_000;

/// What to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSettings {
    /// TCP ports whose segments and sockets are recorded; either end may have it.
    pub ports: Vec<u16>,
    /// CPUs whose switches, interrupts and beats are recorded. Wake-ups follow the watched threads instead, and
    /// packets and sockets the ports, on every CPU.
    pub cpus: Vec<u32>,
    /// Period of the per-CPU heartbeat, ns; `None` for none.
    pub heartbeat_ns: Option<u64>,
    /// Size of the ring buffer, bytes: a power of two of at least one page.
    pub ring_bytes: u32,
    /// Whether to record which thread reads what is for `ports`, and when: for a server that takes no stamps itself.
    pub reads: bool,
}

/// One program and why it matters.
struct Row {
    name: &'static str,
    /// Fields of [`pqtail_common::Offsets`] without which its records would be false.
    needs: &'static [&'static str],
    consequence: &'static str,
}

const fn row(name: &'static str, needs: &'static [&'static str], consequence: &'static str) -> Row {
    Row {
        name,
        needs,
        consequence,
    }
}

const TASK: &[&str] = &["task_pid", "task_tgid", "task_comm", "task_prio"];
const WAKEN: &[&str] = &["task_pid", "task_cpu"];
const TRANSMITTED: &[&str] = &[
    "skb_head",
    "skb_network_header",
    "skb_protocol",
    "skb_dev",
    "device_net",
    "net_inum",
];
const RECEIVED: &[&str] = &["skb_data", "skb_protocol", "skb_dev", "device_net", "net_inum"];
const SOCKET: &[&str] = &[
    "sock_net",
    "net_inum",
    "sock_family",
    "sock_local_port",
    "sock_remote_port",
    "sock_local",
    "sock_remote",
];
const RESENT: &[&str] = &[
    "sock_net",
    "net_inum",
    "sock_family",
    "sock_local_port",
    "sock_remote_port",
    "sock_local",
    "sock_remote",
    "skb_len",
    "skb_tcp_sequence",
];
const TIMER: &[&str] = &[
    "timer_function",
    "sock_local_port",
    "sock_remote_port",
    "sock_family",
];

const NO_IRQ: &str = "time in hard interrupt handlers counts as the interrupted thread's own";
const NO_SOFTIRQ: &str = "time in softirqs counts as the interrupted thread's own";
const NO_RECLAIM: &str = "memory that a thread has to reclaim itself counts as its own work";
const NO_RAISE: &str = "the delay between a softirq's raise and its run is not seen";
const NO_VECTOR: &str = "time in timer and inter-processor interrupts counts as the interrupted thread's own";

/// Tracepoint programs. Those that stand in one group are of use only together; the last of a group is attached
/// first, because an exit without its entry stores nothing.
const GROUPS: &[&[Row]] = &[
    &[row(
        "sched_switch",
        TASK,
        "run queue, blocked, throttled and other work cannot be told apart: thread time is unexplained",
    )],
    &[row(
        "sched_waking",
        WAKEN,
        "who woke a thread, and when, is not known",
    )],
    &[row(
        "sched_wakeup",
        WAKEN,
        "where blocking ends and the run queue begins is not known",
    )],
    &[row(
        "sched_wakeup_new",
        WAKEN,
        "a new thread's first wait in the run queue is not seen",
    )],
    &[row(
        "sched_migrate_task",
        &["task_pid"],
        "moves between run queues are not seen: the culprit of a wait may be sought on the wrong CPU",
    )],
    &[row(
        "task_rename",
        &["task_pid", "task_tgid"],
        "a culprit that got its name while it ran may be named as the program that started it",
    )],
    &[
        row("irq_handler_entry", &[], NO_IRQ),
        row("irq_handler_exit", &[], NO_IRQ),
    ],
    &[
        row("softirq_entry", &[], NO_SOFTIRQ),
        row("softirq_exit", &[], NO_SOFTIRQ),
    ],
    &[row("softirq_raise", &[], NO_RAISE)],
    &[
        row("local_timer_entry", &[], NO_VECTOR),
        row("local_timer_exit", &[], NO_VECTOR),
    ],
    &[
        row("reschedule_entry", &[], NO_VECTOR),
        row("reschedule_exit", &[], NO_VECTOR),
    ],
    &[
        row("call_function_single_entry", &[], NO_VECTOR),
        row("call_function_single_exit", &[], NO_VECTOR),
    ],
    &[
        row("mm_vmscan_direct_reclaim_begin", &[], NO_RECLAIM),
        row("mm_vmscan_direct_reclaim_end", &[], NO_RECLAIM),
    ],
    &[
        row("mm_vmscan_memcg_reclaim_begin", &[], NO_RECLAIM),
        row("mm_vmscan_memcg_reclaim_end", &[], NO_RECLAIM),
    ],
    &[row(
        "net_dev_queue",
        TRANSMITTED,
        "when segments leave is not known: the sender's time and the network's cannot be told apart",
    )],
    &[row(
        "netif_receive_skb",
        RECEIVED,
        "when segments arrive is not known: the network's time and the receiver's cannot be told apart",
    )],
    &[row(
        "kfree_skb",
        TRANSMITTED,
        "dropped segments are not seen: a retransmission has no reason",
    )],
    &[row(
        "inet_sock_set_state",
        SOCKET,
        "when a connection is established in the kernel is not known: no accept-queue time",
    )],
    &[row(
        "tcp_retransmit_skb",
        RESENT,
        "retransmissions are only seen as repeated segments on the wire",
    )],
    &[row(
        "tcp_retransmit_synack",
        SOCKET,
        "SYN-ACK retransmissions are only seen as repeated segments on the wire",
    )],
    &[row(
        "tcp_send_reset",
        SOCKET,
        "resets sent are only seen as segments on the wire",
    )],
    &[row(
        "tcp_receive_reset",
        SOCKET,
        "resets received are only seen as segments on the wire",
    )],
    &[row(
        "timer_expire_entry",
        TIMER,
        "delayed-ACK and retransmission timers are not seen: their waits count as network",
    )],
];

/// Attached only where it is asked for.
const READS: &[Row] = &[row(
    "tcp_rcv_space_adjust",
    SOCKET,
    "which thread of the server reads a connection, and when, is not known: its waiting and its work cannot be told apart",
)];

const HEARTBEAT: Row = row(
    "heartbeat",
    &[],
    "a CPU that was away without a steal counter to say so goes unnoticed",
);

/// Attached programs. Everything detaches when this is dropped.
pub struct Probes {
    ebpf: Ebpf,
    status: Vec<ProbeStatus>,
    threads: Mutex<HashMap<MapData, u32, u8>>,
    losses: Arc<Losses>,
    source: Option<Source>,
}

impl std::fmt::Debug for Probes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Probes")
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

/// What the drain reads from.
pub(crate) struct Source {
    pub(crate) ring: Ring,
    pub(crate) losses: Arc<Losses>,
    pub(crate) log: Option<EbpfLogger<&'static dyn log::Log>>,
}

impl Probes {
    /// Loads the programs into the running kernel and attaches them.
    ///
    /// # Errors
    /// Without privileges or BTF, for settings the kernel cannot hold, or when the maps cannot be made. A program
    /// that does not attach is no error: see [`Probes::status`].
    pub fn attach(settings: &ProbeSettings) -> anyhow::Result<Self> {
        check(settings)?;
        check_privileges(&fs::read_to_string("/proc/self/status").unwrap_or_default())?;
        let kernel = btf::open()?;
        let resolved = btf::resolve(&kernel);
        let addresses = symbols::addresses();
        let mut handed_in = Settings {
            delayed_ack_function: addresses.delayed_ack,
            write_timer_function: addresses.write,
            text_start: addresses.text,
            cpus: [0; CPU_WORDS],
            offsets: resolved.offsets,
            quiet_syscalls: symbols::QUIET_SYSCALLS,
            reserved: 0,
        };
        for &cpu in &settings.cpus {
            handed_in.cpus[cpu as usize / 64] |= 1 << (cpu % 64);
        }
        let handed_in = Global(handed_in);

        log_to_stderr();
        let mut ebpf = EbpfLoader::new()
            .override_global("SETTINGS", &handed_in, true)
            .map_max_entries("RECORDS", settings.ring_bytes)
            .load(OBJECT)
            .with_context(|| {
                format!(
                    "load the eBPF maps: {}",
                    refusal_hint().unwrap_or_else(|| format!(
                        "is {} bytes of kernel memory for the ring too much here?",
                        settings.ring_bytes
                    ))
                )
            })?;
        record_ports(&mut ebpf, &settings.ports)?;
        let threads = HashMap::try_from(take(&mut ebpf, "THREADS")?)?;
        let losses = Arc::new(Losses(PerCpuArray::try_from(take(&mut ebpf, "LOSSES")?)?));
        let ring = Ring::new(
            RingBuf::try_from(take(&mut ebpf, "RECORDS")?)?,
            settings.ring_bytes,
        )?;
        let log = EbpfLogger::init(&mut ebpf)
            .map_err(|error| log::warn!("no log from the kernel side: {error}"))
            .ok();

        let types = aya::Btf::from_sys_fs().context("read the kernel's type information")?;
        let mut status = Vec::new();
        for group in GROUPS {
            status.extend(attach_group(&mut ebpf, &types, group, &resolved));
        }
        if settings.reads {
            status.extend(attach_group(&mut ebpf, &types, READS, &resolved));
        }
        status.push(attach_heartbeat(&mut ebpf, settings));
        status.extend(missing_details(&resolved, addresses));
        Ok(Self {
            ebpf,
            status,
            threads: Mutex::new(threads),
            source: Some(Source {
                ring,
                losses: Arc::clone(&losses),
                log,
            }),
            losses,
        })
    }

    /// Every program, attached or not, and further rows for what the attached ones cannot see on this kernel.
    #[must_use]
    pub fn status(&self) -> &[ProbeStatus] {
        &self.status
    }

    /// Records wake-ups and migrations of a thread from now on, on every CPU.
    ///
    /// # Errors
    /// When the kernel's table of 4,096 threads is full.
    pub fn watch_thread(&self, tid: u32) -> anyhow::Result<()> {
        self.threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(tid, 0, 0)
            .with_context(|| format!("watch thread {tid}: at most 4,096 threads can be watched at a time"))
    }

    /// Ends [`Probes::watch_thread`]; no error if the thread was not watched.
    pub fn unwatch_thread(&self, tid: u32) {
        // The only failure is that the thread is not in the table.
        let _ = self
            .threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&tid);
    }

    /// Records calls of libssl by the watched threads of one process, from now until the probes are dropped. The library is
    /// `library`, a path as that process sees it, or where `None`, what it has mapped. Adds a row to [`Probes::status`] for
    /// every function, and says whether all of them are attached.
    pub fn attach_libssl(&mut self, pid: u32, library: Option<&Path>) -> bool {
        let rows = libssl::attach(&mut self.ebpf, pid, library);
        let whole = rows.iter().all(|row| row.attached);
        self.status.extend(rows);
        whole
    }

    /// Records that could not be stored since the programs were loaded, by CPU, then by [`kind`].
    ///
    /// # Errors
    /// When the kernel refuses to read the map.
    pub fn losses(&self) -> anyhow::Result<Vec<[u64; KINDS]>> {
        self.losses.read()
    }

    /// How many programs are attached.
    #[must_use]
    pub fn attached(&self) -> usize {
        self.status.iter().filter(|each| each.attached).count()
    }

    /// Programs in the kernel with the time they took, by name: count and ns. Both stay zero unless the sysctl
    /// `kernel.bpf_stats_enabled` is 1.
    #[must_use]
    pub fn run_times(&self) -> Vec<(String, u64, std::time::Duration)> {
        let mut times = Vec::new();
        for (name, program) in self.ebpf.programs() {
            if let Ok(information) = program.info() {
                times.push((name.to_owned(), information.run_count(), information.run_time()));
            }
        }
        times.sort_unstable();
        times
    }

    /// The ring, for the one drain there can be.
    pub(crate) fn take_source(&mut self) -> Option<Source> {
        self.source.take()
    }
}

/// [`Settings`] as bytes for the loader.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Global(Settings);

// SAFETY: only integers, and the record crate asserts that there is no padding.
unsafe impl Pod for Global {}

fn check(settings: &ProbeSettings) -> anyhow::Result<()> {
    let page = page_bytes();
    ensure!(
        settings.ring_bytes.is_power_of_two() && settings.ring_bytes as usize >= page,
        "a ring of {} bytes cannot be made: take a power of two of at least {page}",
        settings.ring_bytes
    );
    if let Some(cpu) = settings.cpus.iter().find(|&&cpu| cpu as usize >= CPU_WORDS * 64) {
        bail!("CPU {cpu} cannot be recorded: CPUs below {} can", CPU_WORDS * 64);
    }
    if let Some(period) = settings.heartbeat_ns {
        ensure!(
            period >= HEARTBEAT_NS_MIN,
            "a heartbeat every {period} ns would disturb what it measures: take at least {HEARTBEAT_NS_MIN} ns"
        );
    }
    Ok(())
}

/// `CAP_BPF` and `CAP_PERFMON` exist since 5.8; `CAP_SYS_ADMIN` includes both.
pub(super) fn check_privileges(status: &str) -> anyhow::Result<()> {
    const SYS_ADMIN: u64 = 1 << 21;
    const PERFMON: u64 = 1 << 38;
    const BPF: u64 = 1 << 39;
    // A process whose capabilities cannot be read is let through: the kernel has the last word anyway.
    let held = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(u64::MAX);
    let missing: Vec<_> = [(BPF, "CAP_BPF"), (PERFMON, "CAP_PERFMON")]
        .into_iter()
        .filter(|(bit, _)| held & (bit | SYS_ADMIN) == 0)
        .map(|(_, name)| name)
        .collect();
    ensure!(
        missing.is_empty(),
        "load the eBPF programs: needs {}; run as root or with `setcap cap_bpf,cap_perfmon+ep`, or record without \
         probes",
        missing.join(" and ")
    );
    Ok(())
}

/// Why a kernel that has everything may still say no.
fn refusal_hint() -> Option<String> {
    let lockdown = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    lockdown.contains("[confidentiality]").then(|| {
        "kernel lockdown is `confidentiality`, which forbids reading kernel memory: boot with \
         lockdown=integrity or none"
            .to_owned()
    })
}

pub(crate) fn take(ebpf: &mut Ebpf, name: &str) -> anyhow::Result<aya::maps::Map> {
    ebpf.take_map(name)
        .ok_or_else(|| anyhow!("the embedded eBPF object has no map {name}: rebuild pqtail"))
}

fn record_ports(ebpf: &mut Ebpf, ports: &[u16]) -> anyhow::Result<()> {
    let map = ebpf
        .map_mut("PORTS")
        .context("the embedded eBPF object has no map PORTS: rebuild pqtail")?;
    let mut words: Array<_, u64> = Array::try_from(map)?;
    for &port in ports {
        let word = u32::from(port) / 64;
        let bits = words.get(&word, 0)? | 1 << (port % 64);
        words.set(word, bits, 0)?;
    }
    Ok(())
}

/// Loads all of a group, then attaches all of it, or says of each why not.
fn attach_group(
    ebpf: &mut Ebpf,
    types: &aya::Btf,
    group: &[Row],
    resolved: &btf::Resolved,
) -> Vec<ProbeStatus> {
    let failure = load_and_attach(ebpf, types, group, resolved).err();
    group
        .iter()
        .map(|row| ProbeStatus {
            name: row.name.to_owned(),
            attached: failure.is_none(),
            reason: failure.clone().unwrap_or_default(),
            consequence: row.consequence.to_owned(),
        })
        .collect()
}

fn load_and_attach(
    ebpf: &mut Ebpf,
    types: &aya::Btf,
    group: &[Row],
    resolved: &btf::Resolved,
) -> Result<(), String> {
    for row in group {
        for need in row.needs {
            if let Some(looked_for) = resolved.missing.get(need) {
                return Err(format!("{}: this kernel has no {looked_for}", row.name));
            }
        }
        tracepoint(ebpf, row.name)?
            .load(row.name, types)
            .map_err(|error| format!("load {}: {}", row.name, explain(&error)))?;
    }
    let mut links = Vec::new();
    for row in group.iter().rev() {
        match tracepoint(ebpf, row.name)?.attach() {
            Ok(link) => links.push((row.name, link)),
            Err(error) => {
                for (name, link) in links {
                    // It was attached a moment ago; if it cannot be detached now, dropping the object does it.
                    let _ = tracepoint(ebpf, name)?.detach(link);
                }
                return Err(format!("attach {}: {}", row.name, explain(&error)));
            }
        }
    }
    Ok(())
}

fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut BtfTracePoint, String> {
    ebpf.program_mut(name)
        .ok_or_else(|| format!("the embedded eBPF object has no program {name}: rebuild pqtail"))?
        .try_into()
        .map_err(|error: ProgramError| format!("{name}: {error}"))
}

fn attach_heartbeat(ebpf: &mut Ebpf, settings: &ProbeSettings) -> ProbeStatus {
    let outcome = match settings.heartbeat_ns {
        None => Err("not asked for".to_owned()),
        Some(period) => start_heartbeat(ebpf, &settings.cpus, period),
    };
    ProbeStatus {
        name: HEARTBEAT.name.to_owned(),
        attached: outcome.is_ok(),
        reason: outcome.err().unwrap_or_default(),
        consequence: HEARTBEAT.consequence.to_owned(),
    }
}

fn start_heartbeat(ebpf: &mut Ebpf, cpus: &[u32], period_ns: u64) -> Result<(), String> {
    let program: &mut PerfEvent = ebpf
        .program_mut(HEARTBEAT.name)
        .ok_or("the embedded eBPF object has no heartbeat: rebuild pqtail")?
        .try_into()
        .map_err(|error: ProgramError| error.to_string())?;
    program
        .load()
        .map_err(|error| format!("load heartbeat: {}", explain(&error)))?;
    let mut links = Vec::new();
    for &cpu in cpus {
        let attached = program.attach(
            PerfEventConfig::Software(SoftwareEvent::CpuClock),
            PerfEventScope::AllProcessesOneCpu { cpu },
            SamplePolicy::Period(period_ns),
            false,
        );
        match attached {
            Ok(link) => links.push(link),
            Err(error) => {
                // Beats on some CPUs only would read as absences of the others.
                for link in links {
                    let _ = program.detach(link);
                }
                return Err(format!("attach heartbeat on CPU {cpu}: {}", explain(&error)));
            }
        }
    }
    Ok(())
}

/// What attached programs cannot see on this kernel.
fn missing_details(resolved: &btf::Resolved, addresses: symbols::Addresses) -> Vec<ProbeStatus> {
    let mut rows = Vec::new();
    let mut absent = |name: &str, reason: String, consequence: &str| {
        rows.push(ProbeStatus {
            name: name.to_owned(),
            attached: false,
            reason,
            consequence: consequence.to_owned(),
        });
    };
    let without = |names: &[&str]| {
        let looked_for: Vec<_> = names
            .iter()
            .filter_map(|name| resolved.missing.get(name))
            .map(String::as_str)
            .collect();
        (!looked_for.is_empty()).then(|| format!("this kernel has no {}", looked_for.join(", no ")))
    };
    if let Some(reason) = without(&[
        "task_cfs_rq",
        "cfs_rq_rq",
        "rq_cpu",
        "percpu_runqueues",
        "percpu_steal",
    ]) {
        absent(
            "steal_counter",
            reason,
            "time taken by the hypervisor is only seen as late beats and in /proc/stat ticks",
        );
    }
    if let Some(reason) = without(&["task_cfs_rq", "cfs_rq_throttle_count"]) {
        absent(
            "cfs_throttling",
            reason,
            "time without CPU quota counts as run queue",
        );
    }
    if addresses.text == 0 || resolved.offsets.regs_syscall == ABSENT {
        absent(
            "sleep_stack",
            without(&["regs_syscall"]).unwrap_or_else(|| {
                "/proc/kallsyms hides _stext: set kernel.kptr_restrict to 0 or 1 and run with CAP_SYSLOG"
                    .to_owned()
            }),
            "what a blocked thread waits for (disk, lock, page fault) is not known",
        );
    }
    for (name, address, offset, consequence) in [
        (
            "tcp_delack_timer",
            addresses.delayed_ack,
            resolved.offsets.sock_delayed_ack_timer,
            "delayed ACKs are not told from network time",
        ),
        (
            "tcp_write_timer",
            addresses.write,
            resolved.offsets.sock_write_timer,
            "retransmission timers are not seen; the retransmissions are",
        ),
    ] {
        if address == 0 {
            let reason = format!(
                "/proc/kallsyms hides {name}: set kernel.kptr_restrict to 0 or 1 and run with CAP_SYSLOG"
            );
            absent(name, reason, consequence);
        } else if offset == ABSENT {
            absent(
                name,
                "this kernel keeps the timer elsewhere".to_owned(),
                consequence,
            );
        }
    }
    rows
}

/// An error in one line: the verifier's log ends with its verdict.
pub(super) fn explain(error: &ProgramError) -> String {
    let text = match error {
        ProgramError::LoadError {
            io_error,
            verifier_log,
        } => {
            let log = verifier_log.to_string();
            let verdict: Vec<_> = log
                .lines()
                .filter(|line| !line.trim().is_empty() && !line.starts_with("processed "))
                .collect();
            let tail = verdict[verdict.len().saturating_sub(3)..].join("; ");
            format!("the kernel refuses the program: {io_error}; {tail}")
        }
        other => format!("{:#}", anyhow!(other.to_string())),
    };
    match refusal_hint() {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    }
}

/// Loss counters in the kernel.
pub(crate) struct Losses(PerCpuArray<MapData, [u64; KINDS]>);

impl Losses {
    pub(crate) fn read(&self) -> anyhow::Result<Vec<[u64; KINDS]>> {
        let values = self.0.get(&0, 0).context("read the loss counters")?;
        Ok(values.to_vec())
    }
}

/// The ring buffer with its fill level, which the library does not tell.
pub(crate) struct Ring {
    records: RingBuf<MapData>,
    consumer: Page,
    producer: Page,
    bytes: u32,
}

impl Ring {
    fn new(records: RingBuf<MapData>, bytes: u32) -> anyhow::Result<Self> {
        let fd = std::os::fd::AsFd::as_fd(&records);
        // kernel/bpf/ringbuf.c (v5.8 and on): consumer position in the first page, producer position in the second.
        let consumer = Page::map(fd, 0)?;
        let producer = Page::map(fd, page_bytes())?;
        Ok(Self {
            records,
            consumer,
            producer,
            bytes,
        })
    }

    pub(crate) fn next(&mut self) -> Option<RingBufItem<'_>> {
        self.records.next()
    }

    /// Bytes in use, headers included.
    pub(crate) fn used_bytes(&self) -> u64 {
        // The consumer first: it cannot overtake the producer in between.
        let consumed = self.consumer.position();
        let produced = self.producer.position();
        (produced.wrapping_sub(consumed) as u64).min(u64::from(self.bytes))
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.bytes)
    }
}

/// One read-only page of a map.
struct Page(*mut c_void);

// SAFETY: the mapping belongs to the process and is only read, atomically.
unsafe impl Send for Page {}

impl Page {
    fn map(fd: BorrowedFd<'_>, offset: usize) -> anyhow::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                page_bytes(),
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("map the ring buffer's positions");
        }
        Ok(Self(at))
    }

    fn position(&self) -> usize {
        // SAFETY: the page is mapped as long as `self` lives and begins with an aligned counter.
        unsafe { &*self.0.cast::<AtomicUsize>() }.load(Ordering::Acquire)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `Page::map` with this length, and nothing borrows it any more.
        unsafe { libc::munmap(self.0, page_bytes()) };
    }
}

fn page_bytes() -> usize {
    // SAFETY: sysconf takes no pointers.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Sends set-up messages and anomalies to stderr, unless the program already chose a logger.
fn log_to_stderr() {
    struct Stderr;
    impl log::Log for Stderr {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }

        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                eprintln!("{}: {}", record.level().as_str().to_lowercase(), record.args());
            }
        }

        fn flush(&self) {}
    }
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}

/// Name of a record kind, as manifests and reports print it.
#[must_use]
pub fn kind_name(kind: u8) -> String {
    let name = match kind {
        kind::SWITCH => "switch",
        kind::WAKING => "waking",
        kind::WAKEUP => "wakeup",
        kind::MIGRATE => "migrate",
        kind::IRQ => "irq",
        kind::SOFTIRQ => "softirq",
        kind::VECTOR => "vector",
        kind::TRANSMIT => "transmit",
        kind::RECEIVE => "receive",
        kind::DROP => "drop",
        kind::STATE => "state",
        kind::RETRANSMIT => "retransmit",
        kind::RETRANSMIT_SYNACK => "retransmit-synack",
        kind::RESET_SENT => "reset-sent",
        kind::RESET_RECEIVED => "reset-received",
        kind::DELAYED_ACK_TIMER => "delayed-ack-timer",
        kind::WRITE_TIMER => "write-timer",
        kind::BEAT => "beat",
        kind::RENAME => "rename",
        kind::SLEEP => "sleep",
        kind::RECLAIM => "reclaim",
        kind::READ => "read",
        kind::CALL => "call",
        kind::LOSS => "loss",
        other => return format!("kind-{other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> ProbeSettings {
        ProbeSettings {
            ports: vec![443],
            cpus: vec![0],
            heartbeat_ns: None,
            ring_bytes: RING_BYTES_DEFAULT,
            reads: false,
        }
    }

    #[test]
    fn settings_that_the_kernel_cannot_hold_are_refused_with_the_figure_that_would_do() {
        assert!(check(&settings()).is_ok());
        let odd = ProbeSettings {
            ring_bytes: 5000,
            ..settings()
        };
        assert!(check(&odd).unwrap_err().to_string().contains("power of two"));
        let far = ProbeSettings {
            cpus: vec![1024],
            ..settings()
        };
        assert!(check(&far).unwrap_err().to_string().contains("below 1024"));
        let fast = ProbeSettings {
            heartbeat_ns: Some(10),
            ..settings()
        };
        assert!(check(&fast).unwrap_err().to_string().contains("at least 50000"));
    }

    #[test]
    fn missing_privileges_are_named_with_their_remedy() {
        let error = check_privileges("Name:\tx\nCapEff:\t0000000000000000\n")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("CAP_BPF and CAP_PERFMON") && error.contains("root"),
            "{error}"
        );
        let error = check_privileges("CapEff:\t0000008000000000\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("needs CAP_PERFMON;"), "{error}");
        assert!(check_privileges("CapEff:\t000000c000000000\n").is_ok());
        assert!(check_privileges("CapEff:\t0000000000200000\n").is_ok());
    }

    #[test]
    fn every_program_has_one_row_and_a_consequence() {
        let mut names: Vec<_> = GROUPS
            .iter()
            .flat_map(|group| group.iter())
            .map(|row| row.name)
            .collect();
        names.push(HEARTBEAT.name);
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(
            GROUPS
                .iter()
                .flat_map(|group| group.iter())
                .all(|row| !row.consequence.is_empty())
        );
    }
}
