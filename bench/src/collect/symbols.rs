//! Names and addresses of the running kernel's functions, from /proc/kallsyms, and of system calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

#[cfg(not(target_arch = "x86_64"))]
use pqtail_common::ABSENT;

const KALLSYMS: &str = "/proc/kallsyms";

/// Kernel addresses that the programs compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// `_stext`, where the kernel's code begins; 0 if unknown or hidden. Not `_text`: arm64 does not list it.
    pub text: u64,
    /// `tcp_delack_timer`; 0 if unknown or hidden.
    pub delayed_ack: u64,
    /// `tcp_write_timer`; 0 if unknown or hidden.
    pub write: u64,
}

/// Looks them up in /proc/kallsyms, which shows zeros under `kernel.kptr_restrict=2` and to
/// processes without `CAP_SYSLOG`.
#[must_use]
pub fn addresses() -> Addresses {
    addresses_in(&fs::read_to_string(KALLSYMS).unwrap_or_default())
}

fn addresses_in(symbols: &str) -> Addresses {
    let mut addresses = Addresses::default();
    for line in symbols.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(address), Some(kind), Some(name)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        // A fourth word names a module, whose private function of that name would not be TCP's.
        if !matches!(kind, "t" | "T") || words.next().is_some() {
            continue;
        }
        let slot = match name {
            "tcp_delack_timer" => &mut addresses.delayed_ack,
            "tcp_write_timer" => &mut addresses.write,
            "_stext" => &mut addresses.text,
            _ => continue,
        };
        *slot = u64::from_str_radix(address, 16).unwrap_or(0);
    }
    addresses
}

/// Names of the functions that hold the given code, by its distance from `_stext`. What lies in a module, in a BPF program or
/// nowhere has no name here.
#[must_use]
pub fn functions(distances: &BTreeSet<u32>) -> BTreeMap<u32, String> {
    if distances.is_empty() {
        return BTreeMap::new();
    }
    functions_in(&fs::read_to_string(KALLSYMS).unwrap_or_default(), distances)
}

fn functions_in(symbols: &str, distances: &BTreeSet<u32>) -> BTreeMap<u32, String> {
    let mut all: Vec<(u64, &str)> = symbols
        .lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
            let is_kernel_code = matches!(kind, "t" | "T" | "w" | "W") && words.next().is_none();
            is_kernel_code.then_some((u64::from_str_radix(address, 16).ok()?, name))
        })
        .collect();
    all.sort_unstable();
    let address_of = |wanted: &str| all.iter().find(|(_, name)| *name == wanted).map(|(at, _)| *at);
    // Hidden addresses read as 0.
    let Some(text) = address_of("_stext").filter(|&text| text > 0) else {
        return BTreeMap::new();
    };
    // The end is data on arm64.
    let end = symbols
        .lines()
        .find(|line| line.ends_with(" _etext"))
        .and_then(|line| u64::from_str_radix(line.split_ascii_whitespace().next()?, 16).ok())
        .unwrap_or(u64::MAX);
    distances
        .iter()
        .filter_map(|&distance| {
            let address = text.checked_add(u64::from(distance))?;
            let next = all.partition_point(|&(at, _)| at <= address);
            let (_, name) = all.get(next.checked_sub(1)?).filter(|_| address < end)?;
            Some((distance, (*name).to_owned()))
        })
        .collect()
}

/// System calls in which a server or load generator waits for something to do; unlike all others, a sleep there is nobody's
/// fault. [`ABSENT`](pqtail_common::ABSENT) where this architecture lacks one.
pub const QUIET_SYSCALLS: [u32; pqtail_common::QUIET_SYSCALLS] = [
    #[cfg(target_arch = "x86_64")]
    {
        libc::SYS_epoll_wait as u32
    },
    #[cfg(not(target_arch = "x86_64"))]
    ABSENT,
    libc::SYS_epoll_pwait as u32,
    libc::SYS_epoll_pwait2 as u32,
    libc::SYS_io_uring_enter as u32,
];

/// Names of the system calls in which threads usually sleep, by their number on this architecture.
#[must_use]
pub fn syscalls() -> BTreeMap<u32, String> {
    macro_rules! names {
        ($($name:ident: $number:ident),* $(,)?) => {
            BTreeMap::from([$((libc::$number as u32, stringify!($name).to_owned())),*])
        };
    }
    names! {
        read: SYS_read, write: SYS_write, readv: SYS_readv, writev: SYS_writev, pread64: SYS_pread64, pwrite64: SYS_pwrite64,
        openat: SYS_openat, close: SYS_close, fsync: SYS_fsync, fdatasync: SYS_fdatasync, fallocate: SYS_fallocate,
        ftruncate: SYS_ftruncate, unlinkat: SYS_unlinkat, renameat2: SYS_renameat2, sendfile: SYS_sendfile, flock: SYS_flock,
        futex: SYS_futex, nanosleep: SYS_nanosleep, clock_nanosleep: SYS_clock_nanosleep, ppoll: SYS_ppoll,
        pselect6: SYS_pselect6, wait4: SYS_wait4, waitid: SYS_waitid, connect: SYS_connect, accept: SYS_accept,
        accept4: SYS_accept4, sendto: SYS_sendto, recvfrom: SYS_recvfrom, sendmsg: SYS_sendmsg, recvmsg: SYS_recvmsg,
        mmap: SYS_mmap, munmap: SYS_munmap, madvise: SYS_madvise, mprotect: SYS_mprotect, msync: SYS_msync, brk: SYS_brk,
        sched_yield: SYS_sched_yield, getrandom: SYS_getrandom, ioctl: SYS_ioctl, epoll_pwait: SYS_epoll_pwait,
        io_uring_enter: SYS_io_uring_enter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_functions_are_text_symbols_of_the_kernel_itself() {
        let symbols = "ffffffff81000000 T _stext\nffffffff8202e460 t tcp_delack_timer\n\
                       ffffffff8202f360 t tcp_write_timer\nffffffffc0000000 t tcp_write_timer\t[other]\n\
                       ffffffff83000000 d tcp_delack_timer\n";
        let addresses = addresses_in(symbols);
        assert_eq!(addresses.text, 0xffff_ffff_8100_0000);
        assert_eq!(addresses.delayed_ack, 0xffff_ffff_8202_e460);
        assert_eq!(addresses.write, 0xffff_ffff_8202_f360);
    }

    #[test]
    fn arm64_lists_no_text_symbol_and_its_end_is_data() {
        let symbols = "ffffc0f94de10000 t gic_handle_irq\nffffc0f94de10000 T _stext\nffffc0f94de10100 t last\n\
                       ffffc0f94e9e0000 D _etext\n";
        assert_eq!(addresses_in(symbols).text, 0xffff_c0f9_4de1_0000);
        let named = functions_in(symbols, &BTreeSet::from([0x104, 0x00bd_0001]));
        assert_eq!(named, BTreeMap::from([(0x104, "last".to_owned())]));
    }

    #[test]
    fn hidden_symbols_read_as_unknown() {
        let symbols = "0000000000000000 t tcp_delack_timer\n0000000000000000 t tcp_write_timer\n";
        assert_eq!(addresses_in(symbols), Addresses::default());
        assert_eq!(addresses_in(""), Addresses::default());
    }

    #[test]
    fn code_has_the_name_of_the_function_it_lies_in() {
        let symbols = "ffffffff81000000 T _stext\nffffffff81000100 t first\nffffffff81000200 T second\n\
                       ffffffff81000280 d data\nffffffff81000300 T _etext\nffffffffc0000000 t far\t[module]\n";
        let found = functions_in(symbols, &BTreeSet::from([0x1ff, 0x200, 0x290, 0x301]));
        let names: Vec<_> = found.iter().map(|(at, name)| (*at, name.as_str())).collect();
        assert_eq!(names, [(0x1ff, "first"), (0x200, "second"), (0x290, "second")]);
    }
}
