//! What a thread sleeps for, told from the system call and the kernel functions it sleeps in.

use std::{collections::BTreeMap, fmt};

use crate::timeline::thread::Wait;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Reclaim,
    PageFault,
    Disk,
    Lock,
    KernelLock,
    Timer,
    Pipe,
    Other,
}

/// Beginnings of names of kernel functions that tell a kind, the most telling kind first: a page fault may wait for the disk,
/// and so may reclaim. The names stand in kernels 6.1 to 6.18.
const SIGNS: [(Kind, &[&str]); 7] = [
    (
        Kind::Reclaim,
        &["try_to_free_", "shrink_", "mem_cgroup_handle_over_high"],
    ),
    (
        Kind::PageFault,
        &[
            "handle_mm_fault",
            "__handle_mm_fault",
            "do_fault",
            "__do_fault",
            "filemap_fault",
        ],
    ),
    (
        Kind::Disk,
        &[
            "io_schedule",
            "folio_wait_",
            "bit_wait_io",
            "blk_",
            "submit_bio_wait",
            "iomap_dio_",
            "__iomap_dio",
            "jbd2_",
            // Who writes faster than the disk takes it is made to wait; no memory is reclaimed in there.
            "balance_dirty_pages",
        ],
    ),
    (Kind::Lock, &["futex_", "__futex_", "do_futex"]),
    (
        Kind::KernelLock,
        &[
            "rwsem_",
            "__mutex_lock",
            "mutex_lock",
            "down_",
            "__down",
            "percpu_rwsem_",
            "rt_mutex_",
        ],
    ),
    (
        Kind::Timer,
        &["do_nanosleep", "hrtimer_nanosleep", "common_nsleep"],
    ),
    (Kind::Pipe, &["pipe_", "anon_pipe_", "unix_stream_"]),
];

/// Functions that every sleep goes through: they tell nothing.
const COMMON: [&str; 8] = [
    "bpf_",
    "__bpf_",
    "__traceiter_",
    "trace_",
    "__schedule",
    "schedule",
    "preempt_",
    "perf_",
];

/// A place in the kernel, with names.
pub(super) struct Place<'a> {
    syscall: Option<&'a str>,
    number: Option<u32>,
    /// Innermost first, without those that every sleep goes through.
    pub(super) functions: Vec<&'a str>,
}

impl<'a> Place<'a> {
    /// Names what can be named.
    pub(super) fn of(
        wait: &Wait,
        functions: Option<&'a BTreeMap<u32, String>>,
        syscalls: &'a BTreeMap<u32, String>,
    ) -> Self {
        let named = |frame: &u32| functions?.get(frame).map(String::as_str);
        Self {
            syscall: wait
                .syscall
                .and_then(|number| syscalls.get(&number))
                .map(String::as_str),
            number: wait.syscall,
            functions: wait
                .frames
                .iter()
                .filter_map(named)
                .filter(|name| !COMMON.iter().any(|each| name.starts_with(each)))
                .collect(),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        let shows = |signs: &[&str]| {
            self.functions
                .iter()
                .any(|function| signs.iter().any(|sign| function.starts_with(sign)))
        };
        let by_function = SIGNS
            .iter()
            .find(|(_, signs)| shows(signs))
            .map(|(kind, _)| *kind);
        // Without names of functions the system call may still tell.
        by_function.unwrap_or(match self.syscall {
            Some("futex") => Kind::Lock,
            Some("nanosleep" | "clock_nanosleep") => Kind::Timer,
            Some("pread64" | "pwrite64" | "fsync" | "fdatasync" | "msync") => Kind::Disk,
            _ => Kind::Other,
        })
    }
}

/// For example `disk (pread64)`.
impl fmt::Display for Place<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind() {
            Kind::Reclaim => "memory reclaim",
            Kind::PageFault => "page fault",
            Kind::Disk => "disk",
            Kind::Lock => "lock",
            Kind::KernelLock => "lock in the kernel",
            Kind::Timer => "sleep",
            Kind::Pipe => "pipe or local socket",
            Kind::Other => match self.functions.first() {
                Some(function) => function,
                None => "wait",
            },
        };
        to.write_str(name)?;
        match (self.syscall, self.number) {
            (Some(syscall), _) => write!(to, " ({syscall})"),
            (None, Some(number)) => write!(to, " (system call {number})"),
            // An exception is not called by anybody.
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(syscall: Option<u32>, functions: &[&str]) -> String {
        let names: BTreeMap<u32, String> = functions
            .iter()
            .enumerate()
            .map(|(at, name)| (at as u32, (*name).to_owned()))
            .collect();
        let syscalls = BTreeMap::from([(17, "pread64".to_owned()), (202, "futex".to_owned())]);
        let wait = Wait {
            syscall,
            frames: names.keys().copied().collect(),
        };
        Place::of(&wait, Some(&names), &syscalls).to_string()
    }

    #[test]
    fn the_most_telling_function_names_the_wait() {
        let disk = ["__schedule", "schedule", "io_schedule", "folio_wait_bit_common"];
        assert_eq!(said(Some(17), &disk), "disk (pread64)");
        let fault = [&disk[..], &["filemap_fault", "__do_fault", "handle_mm_fault"]].concat();
        assert_eq!(said(None, &fault), "page fault");
        let reclaim = [&disk[..], &["shrink_folio_list", "try_to_free_pages"]].concat();
        assert_eq!(said(Some(17), &reclaim), "memory reclaim (pread64)");
        let throttle = ["schedule_timeout", "balance_dirty_pages", "generic_perform_write"];
        assert_eq!(said(Some(18), &throttle), "disk (system call 18)");
        assert_eq!(
            said(Some(202), &["schedule", "futex_wait_queue", "futex_wait"]),
            "lock (futex)"
        );
    }

    #[test]
    fn what_has_no_name_still_says_what_it_is() {
        assert_eq!(said(Some(17), &[]), "disk (pread64)");
        assert_eq!(
            said(Some(5000), &["schedule", "wait_for_vfork"]),
            "wait_for_vfork (system call 5000)"
        );
        assert_eq!(said(Some(5000), &[]), "wait (system call 5000)");
    }
}
