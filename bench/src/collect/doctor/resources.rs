//! Memory, disk, and what our control group may use of the host.

use std::{collections::BTreeMap, path::Path};

use super::{Finding, Root};
use crate::collect::host;

/// A run needs the kernel's ring (64 MiB unless told otherwise), recordings in the page cache, and room to analyse them.
const MEMORY_BYTES_MIN: u64 = 512 << 20;

/// Recordings of some minutes.
const DISK_BYTES_MIN: u64 = 1 << 30;

pub(super) fn examine(root: &Root, folder: &Path) -> Vec<Finding> {
    let memory = root
        .text("proc/meminfo")
        .and_then(|table| available_bytes(&table));
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    // The results folder need not exist yet.
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let disk = folder.ancestors().find_map(host::free_bytes);
    vec![
        judge_memory(memory),
        judge_disk(&folder, disk),
        quota(&host::cgroup_limits()),
        limits(&host::cgroup_limits()),
    ]
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let kib: u64 = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?
        .split_ascii_whitespace()
        .next()?
        .parse()
        .ok()?;
    Some(kib << 10)
}

fn judge_memory(available: Option<u64>) -> Finding {
    let rule = "memory";
    let Some(bytes) = available else {
        return Finding::unknown(rule, "/proc/meminfo");
    };
    let found = format!("{} MiB available", bytes >> 20);
    if bytes < MEMORY_BYTES_MIN {
        return Finding::warn(
            rule,
            found,
            "threads may have to reclaim memory themselves, or the run is killed for want of it",
            "free memory, or take a smaller --ring-mib",
        );
    }
    Finding::ok(rule, found)
}

fn judge_disk(folder: &Path, free: Option<u64>) -> Finding {
    let rule = "disk";
    let Some(bytes) = free else {
        return Finding::unknown(rule, &format!("the file system of {}", folder.display()));
    };
    let found = format!("{} MiB left for {}", bytes >> 20, folder.display());
    let remedy = "free some, or name another folder with --results";
    if bytes < host::DISK_RESERVE_BYTES {
        Finding::fail(rule, found, "a run does not start with so little", remedy)
    } else if bytes < DISK_BYTES_MIN {
        Finding::warn(rule, found, "a long run may end before its plan does", remedy)
    } else {
        Finding::ok(rule, found)
    }
}

fn quota(limits: &BTreeMap<String, String>) -> Finding {
    let rule = "cgroup.quota";
    let v2 = limits.get("cpu.max").filter(|value| !value.starts_with("max"));
    let v1 = limits
        .get("cpu.cfs_quota_us")
        .filter(|value| !value.starts_with('-'));
    match v2.or(v1) {
        Some(value) => Finding::warn(
            rule,
            format!("a CPU quota: {value} µs"),
            "the group is throttled for the rest of each period in which it used its quota up",
            "run outside of it, or lift the quota",
        ),
        None => Finding::ok(rule, "no CPU quota on our group, as far as it can see"),
    }
}

fn limits(limits: &BTreeMap<String, String>) -> Finding {
    let rule = "cgroup.limits";
    let told: Vec<String> = limits
        .iter()
        .filter(|(name, value)| {
            !(name.starts_with("cpu.max") || name.starts_with("cpu.cfs") || value.starts_with("max"))
        })
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    if told.is_empty() {
        return Finding::ok(rule, "none that bind");
    }
    Finding::ok(rule, told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::Level;

    #[test]
    fn little_memory_and_little_disk_are_told_with_their_figures() {
        let table = "MemTotal:  4000000 kB\nMemAvailable:  300000 kB\n";
        assert_eq!(judge_memory(available_bytes(table)).level, Level::Warn);
        assert_eq!(judge_memory(Some(1 << 30)).level, Level::Ok);
        assert!(judge_memory(None).found.contains("unknown"));
        let disk = |bytes| judge_disk(Path::new("/r"), Some(bytes)).level;
        assert_eq!(disk(10 << 20), Level::Fail);
        assert_eq!(disk(500 << 20), Level::Warn);
        assert_eq!(disk(5 << 30), Level::Ok);
    }

    #[test]
    fn a_quota_of_either_version_is_warned_of() {
        let of = |name: &str, value: &str| quota(&BTreeMap::from([(name.to_owned(), value.to_owned())]));
        assert_eq!(of("cpu.max", "50000 100000").level, Level::Warn);
        assert_eq!(of("cpu.max", "max 100000").level, Level::Ok);
        assert_eq!(of("cpu.cfs_quota_us", "50000").level, Level::Warn);
        assert_eq!(of("cpu.cfs_quota_us", "-1").level, Level::Ok);
    }
}
