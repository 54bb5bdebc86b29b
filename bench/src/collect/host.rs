//! What this host is and how its CPUs spent their time, from /proc and /sys.
//!
//! Facts never fail: what the kernel does not tell is absent, and no default stands in for it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use procfs::Current as _;

use super::{btf, symbols, timekeeping};
use crate::record::manifest::{CpuTickRow, CpuTicks, HostFacts};

/// Settings that shape TCP's or the scheduler's behaviour, by sysctl name.
const SYSCTLS: &[&str] = &[
    "kernel.bpf_stats_enabled",
    "kernel.kptr_restrict",
    "kernel.numa_balancing",
    "kernel.perf_event_max_sample_rate",
    "kernel.sched_autogroup_enabled",
    "kernel.sched_cfs_bandwidth_slice_us",
    "kernel.sched_rt_runtime_us",
    "kernel.timer_migration",
    "net.core.busy_poll",
    "net.core.busy_read",
    "net.core.default_qdisc",
    "net.core.dev_weight",
    "net.core.netdev_budget",
    "net.core.netdev_budget_usecs",
    "net.core.netdev_max_backlog",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_abort_on_overflow",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_fastopen",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_max_tw_buckets",
    "net.ipv4.tcp_no_metrics_save",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_sack",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_syn_retries",
    "net.ipv4.tcp_synack_retries",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_timestamps",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_window_scaling",
    "net.ipv4.tcp_wmem",
];

/// Files that limit a cgroup, in version 2 and version 1.
const LIMITS_V2: &[&str] = &[
    "cpu.max",
    "cpu.weight",
    "cpuset.cpus.effective",
    "memory.high",
    "memory.max",
    "pids.max",
];
const LIMITS_V1: &[(&str, &[&str])] = &[
    ("cpu", &["cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares"]),
    ("cpuset", &["cpuset.cpus"]),
    ("memory", &["memory.limit_in_bytes"]),
    ("pids", &["pids.max"]),
];

/// Collects what can be known of this host.
#[must_use]
pub fn facts() -> HostFacts {
    let name = nix::sys::utsname::uname().ok();
    let text =
        |part: Option<&std::ffi::OsStr>| part.map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    HostFacts {
        kernel: text(name.as_ref().map(nix::sys::utsname::UtsName::release)),
        machine: text(name.as_ref().map(nix::sys::utsname::UtsName::machine)),
        command_line: line("/proc/cmdline").map(|line| timing_parameters(&line)),
        cpu_model: cpu_model(),
        cpus_online: cpus_online(),
        memory_bytes: procfs::Meminfo::current().ok().map(|memory| memory.mem_total),
        clocksource: line("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        lockdown: line("/sys/kernel/security/lockdown"),
        boot_id: line("/proc/sys/kernel/random/boot_id"),
        cgroup_limits: cgroup_limits(),
        sysctls: SYSCTLS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), sysctl(name)?)))
            .collect(),
        interrupts: fs::read_to_string("/proc/interrupts")
            .map(|table| interrupt_names(&table))
            .unwrap_or_default(),
        syscalls: symbols::syscalls(),
        timekeeping: timekeeping::read(),
        drop_reasons: btf::open().map(|btf| btf::drop_reasons(&btf)).unwrap_or_default(),
    }
}

/// Kernel parameters that change how long things take (Documentation/admin-guide/kernel-parameters.txt): by whole name, or by
/// prefix where they end in a dot.
const TIMING_PARAMETERS: &[&str] = &[
    "audit",
    "clocksource",
    "cpufreq.",
    "cpuidle.",
    "idle",
    "init_on_alloc",
    "init_on_free",
    "intel_idle.",
    "intel_pstate",
    "irqaffinity",
    "isolcpus",
    "kvm",
    "mem_sleep_default",
    "mitigations",
    "nohz",
    "nohz_full",
    "no-steal-acc",
    "nopti",
    "nosmt",
    "nospectre_v1",
    "nospectre_v2",
    "numa_balancing",
    "page_poison",
    "preempt",
    "processor.",
    "pti",
    "rcu_nocbs",
    "skew_tick",
    "spectre_v2",
    "threadirqs",
    "transparent_hugepage",
    "tsc",
];

/// A command line can hold keys, paths and names of machines, and results are made to be published.
fn timing_parameters(line: &str) -> String {
    let kept: Vec<&str> = line
        .split_ascii_whitespace()
        .filter(|word| {
            let name = word.split('=').next().unwrap_or(word);
            TIMING_PARAMETERS
                .iter()
                .any(|each| name == *each || each.ends_with('.') && name.starts_with(each))
        })
        .collect();
    kept.join(" ")
}

/// CPUs that this process may run on, ascending.
///
/// # Errors
/// When the kernel does not say.
pub fn allowed_cpus() -> anyhow::Result<Vec<u32>> {
    use nix::sched::{CpuSet, sched_getaffinity};
    let set = sched_getaffinity(nix::unistd::Pid::from_raw(0)).context("read the CPU affinity")?;
    Ok((0..CpuSet::count())
        .filter(|&cpu| set.is_set(cpu).unwrap_or(false))
        .map(|cpu| cpu as u32)
        .collect())
}

/// A run ends while its disk has this left, so that it can still write how it ended, and the report.
pub const DISK_RESERVE_BYTES: u64 = 64 << 20;

/// Room on the disk of a folder, bytes; `None` where the file system does not say: there the first write that fails does.
#[must_use]
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = nix::sys::statvfs::statvfs(folder).ok()?;
    (disk.blocks() > 0).then(|| disk.blocks_available() * disk.fragment_size())
}

/// Refuses to begin what the disk of a folder would soon end.
///
/// # Errors
/// When less than [`DISK_RESERVE_BYTES`] are left.
pub fn require_room(folder: &Path) -> anyhow::Result<()> {
    if let Some(free) = free_bytes(folder) {
        ensure!(
            free >= DISK_RESERVE_BYTES,
            "the disk of {} is nearly full ({} MiB left, {} are kept in reserve): free some",
            folder.display(),
            free >> 20,
            DISK_RESERVE_BYTES >> 20
        );
    }
    Ok(())
}

/// /proc/stat since boot, by CPU. Empty where it cannot be read.
#[must_use]
pub fn cpu_ticks() -> CpuTicks {
    let tick_ns = 1_000_000_000 / procfs::ticks_per_second().max(1);
    let Ok(stat) = fs::read_to_string("/proc/stat") else {
        return CpuTicks::default();
    };
    CpuTicks {
        tick_ns,
        cpus: tick_rows(&stat),
    }
}

/// Ticks between two readings of [`cpu_ticks`]. A CPU that went off- or online between them is left out: its counters
/// begin anew. A column that went backwards, as `iowait` may (proc(5)), counts as 0.
#[must_use]
pub fn difference(before: &CpuTicks, after: &CpuTicks) -> CpuTicks {
    let cpus = after
        .cpus
        .iter()
        .filter_map(|(cpu, new)| {
            let old = before.cpus.get(cpu)?;
            Some((
                *cpu,
                CpuTickRow {
                    user: new.user.saturating_sub(old.user),
                    system: new.system.saturating_sub(old.system),
                    idle: new.idle.saturating_sub(old.idle),
                    interrupts: new.interrupts.saturating_sub(old.interrupts),
                    steal: new.steal.saturating_sub(old.steal),
                },
            ))
        })
        .collect();
    CpuTicks {
        tick_ns: after.tick_ns,
        cpus,
    }
}

/// The procfs crate lists CPUs by position, but an offline CPU has no row: the number is read from the row itself.
pub(super) fn tick_rows(stat: &str) -> BTreeMap<u32, CpuTickRow> {
    let mut rows = BTreeMap::new();
    for line in stat.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(cpu) = words
            .next()
            .and_then(|word| word.strip_prefix("cpu"))
            .and_then(|number| number.parse().ok())
        else {
            continue;
        };
        // user nice system idle iowait irq softirq steal guest guest_nice; guest time is inside user and nice.
        let columns: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        let column = |at: usize| columns.get(at).copied().unwrap_or(0);
        rows.insert(
            cpu,
            CpuTickRow {
                user: column(0) + column(1),
                system: column(2),
                idle: column(3) + column(4),
                interrupts: column(5) + column(6),
                steal: column(7),
            },
        );
    }
    rows
}

/// CPU time of one thread of this process, ns; `None` once it has ended. Exact, not in ticks.
#[must_use]
pub fn thread_cpu_ns(tid: u32) -> Option<u64> {
    // include/linux/posix-timers_types.h (v6.12): a CPU clock is the inverted id, shifted, with "per thread" (4) and
    // "scheduler time" (2). The C library offers it for its own handles only, but recorded threads are known by tid.
    clock_ns((!tid.cast_signed() << 3) | 4 | 2)
}

fn clock_ns(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec; an unknown clock is an error, not undefined.
    let outcome = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (outcome == 0).then(|| time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned())
}

/// CPU time of all threads of a process, which may be another than this one, ns; `None` once it has ended.
#[must_use]
pub fn process_cpu_ns(pid: u32) -> Option<u64> {
    // As in `thread_cpu_ns`, without "per thread": only such a clock may be another process's.
    clock_ns((!pid.cast_signed() << 3) | 2)
}

/// The process of a thread, which may be itself; `None` once it has ended.
#[must_use]
pub fn process_of(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok()
}

/// Inode number of this thread's network namespace, as kernel records name it; `None` without /proc.
#[must_use]
pub fn netns() -> Option<u32> {
    let metadata = fs::metadata("/proc/thread-self/ns/net").ok()?;
    u32::try_from(metadata.ino()).ok()
}

/// Who the firmware says made the machine; `None` where it does not say.
pub(super) fn vendor() -> Option<String> {
    line("/sys/class/dmi/id/sys_vendor")
}

/// Lets this process have as many files open as it may.
pub(super) fn open_many_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Where it fails, a connection that finds no descriptor says so.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Whether this process runs with user id 0.
#[must_use]
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn line(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn sysctl(name: &str) -> Option<String> {
    line(Path::new("/proc/sys").join(name.replace('.', "/"))).map(|value| value.replace('\t', " "))
}

fn cpus_online() -> u32 {
    let counted = line("/sys/devices/system/cpu/online").map_or(0, |list| cpus_of_list(&list).len() as u32);
    if counted > 0 {
        return counted;
    }
    std::thread::available_parallelism().map_or(0, |count| count.get() as u32)
}

/// What a kernel list such as `0-3,8` names: CPUs, or ports, so that no number of it is beyond 65,535.
pub(super) fn cpus_of_list(list: &str) -> Vec<u32> {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            Some(u32::from(first)..=u32::from(last))
        })
        .flatten()
        .collect()
}

/// Numbers as a reader takes them: `0, 1, 4`.
pub(super) fn list(numbers: &[u32]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    numbers.join(", ")
}

/// x86 says it in words; arm64 only by numbers, which name the design (`0x41 0xd40` is Arm's Neoverse V1).
fn cpu_model() -> Option<String> {
    let cpus = procfs::CpuInfo::current().ok()?;
    if let Some(name) = cpus.model_name(0) {
        return Some(name.to_owned());
    }
    let first = cpus.get_info(0)?;
    let implementer = first.get("CPU implementer")?;
    let part = first.get("CPU part")?;
    Some(format!("implementer {implementer} part {part}"))
}

/// Linux irq numbers and what is attached to them. Rows without a number (`LOC`, `RES`) are no Linux irqs.
pub(super) fn interrupt_names(table: &str) -> BTreeMap<u32, String> {
    let mut lines = table.lines();
    let cpus = lines
        .next()
        .map_or(0, |header| header.split_ascii_whitespace().count());
    lines
        .filter_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let number = number.trim().parse().ok()?;
            let name = rest
                .split_ascii_whitespace()
                .skip(cpus)
                .collect::<Vec<_>>()
                .join(" ");
            Some((number, name))
        })
        .collect()
}

/// Limits of this process's cgroup and, where it sets none itself, of the nearest one above that does.
pub(super) fn cgroup_limits() -> BTreeMap<String, String> {
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut limits = BTreeMap::new();
    for entry in membership.lines() {
        // hierarchy-id:controllers:path (cgroups(7)); version 2 has id 0 and no controllers.
        let mut parts = entry.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        if controllers.is_empty() {
            if let Some(mount) = cgroup_mount(&mounts, None) {
                read_limits(&mount, path, LIMITS_V2, &mut limits);
            }
            continue;
        }
        for (controller, files) in LIMITS_V1 {
            if controllers.split(',').any(|each| each == *controller)
                && let Some(mount) = cgroup_mount(&mounts, Some(controller))
            {
                read_limits(&mount, path, files, &mut limits);
            }
        }
    }
    limits
}

/// Where a hierarchy is mounted: version 2, or the version 1 hierarchy of `controller`.
fn cgroup_mount(mountinfo: &str, controller: Option<&str>) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        let fits = match controller {
            None => kind == "cgroup2",
            Some(name) => kind == "cgroup" && options.split(',').any(|option| option == name),
        };
        fits.then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    })
}

fn read_limits(mount: &Path, path: &str, files: &[&str], limits: &mut BTreeMap<String, String>) {
    let own = mount.join(path.trim_start_matches('/'));
    for file in files {
        // A limit above binds as well; the nearest file that exists is the one that describes this process best.
        let found = own
            .ancestors()
            .take_while(|folder| folder.starts_with(mount))
            .find_map(|folder| line(folder.join(file)));
        if let Some(value) = found {
            limits.insert((*file).to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_bears_on_timing_is_kept_of_the_command_line() {
        let line = "root=/dev/vda secret=1 mitigations=off isolcpus=1 intel_idle.max_cstate=1 initrd=x";
        assert_eq!(
            timing_parameters(line),
            "mitigations=off isolcpus=1 intel_idle.max_cstate=1"
        );
    }

    #[test]
    fn facts_of_this_host_are_found() {
        let facts = facts();
        assert!(!facts.kernel.is_empty() && !facts.machine.is_empty());
        assert!(facts.cpus_online > 0);
        assert!(facts.memory_bytes.is_some_and(|bytes| bytes > 0));
        assert!(facts.boot_id.is_some());
    }

    #[test]
    fn rows_keep_their_cpu_number_when_a_cpu_is_offline() {
        let stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 8 1 1\ncpu2 10 0 0 0 0 0 0 0\nintr 5\n";
        let rows = tick_rows(stat);
        assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [0, 2]);
        let expected = CpuTickRow {
            user: 3,
            system: 3,
            idle: 9,
            interrupts: 13,
            steal: 8,
        };
        assert_eq!(rows[&0], expected);
        assert_eq!(rows[&2].user, 10);
    }

    #[test]
    fn a_difference_leaves_out_new_cpus_and_never_goes_below_zero() {
        let row = |user, idle| CpuTickRow {
            user,
            idle,
            ..CpuTickRow::default()
        };
        let before = CpuTicks {
            tick_ns: 10,
            cpus: BTreeMap::from([(0, row(5, 100))]),
        };
        let after = CpuTicks {
            tick_ns: 10,
            cpus: BTreeMap::from([(0, row(8, 99)), (1, row(1, 1))]),
        };
        assert_eq!(difference(&before, &after).cpus, BTreeMap::from([(0, row(3, 0))]));
    }

    #[test]
    fn a_threads_cpu_time_is_its_own_and_ends_with_it() {
        let own = nix::unistd::gettid().as_raw().cast_unsigned();
        let before = thread_cpu_ns(own).expect("this thread lives");
        while thread_cpu_ns(own).expect("this thread lives") == before {
            std::hint::spin_loop();
        }
        // Thread ids stay below PID_MAX_LIMIT, 2^22.
        assert_eq!(thread_cpu_ns((1 << 22) + 1), None);
    }

    #[test]
    fn interrupts_keep_number_and_names() {
        let table = "           CPU0       CPU1       \n  1:          0          9   IO-APIC   1-edge      \
                     i8042\n 24:   1   2   PCI-MSIX-0000:00:03.0   0-edge      virtio1-input.0\nLOC:  5  6   Local timer interrupts\n";
        let names = interrupt_names(table);
        assert_eq!(names.len(), 2);
        assert_eq!(names[&24], "PCI-MSIX-0000:00:03.0 0-edge virtio1-input.0");
    }

    #[test]
    fn a_process_is_found_by_its_threads() {
        let own = std::process::id();
        let thread = std::thread::spawn(|| process_of(nix::unistd::gettid().as_raw().cast_unsigned()));
        assert_eq!(process_of(own), Some(own));
        assert_eq!(thread.join().unwrap(), Some(own));
    }

    #[test]
    fn lists_of_the_kernel_name_each_of_a_range() {
        assert_eq!(cpus_of_list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(cpus_of_list("0"), [0]);
        assert!(cpus_of_list("x").is_empty() && cpus_of_list("3-1").is_empty());
    }

    #[test]
    fn cgroup_mounts_of_both_versions_are_told_apart() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n\
                      31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
        assert_eq!(
            cgroup_mount(mounts, None),
            Some(PathBuf::from("/sys/fs/cgroup/unified"))
        );
        assert_eq!(
            cgroup_mount(mounts, Some("cpu")),
            Some(PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"))
        );
        assert_eq!(cgroup_mount(mounts, Some("memory")), None);
    }
}
