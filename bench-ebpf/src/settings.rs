//! What user space decided before the programs were loaded.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap},
};
use pqtail_common::{ABSENT, CPU_WORDS, Offsets, PORT_WORDS, QUIET_SYSCALLS, Settings};

/// Overwritten by user space before load; the verifier then knows every value as a constant.
#[unsafe(no_mangle)]
static SETTINGS: Settings = Settings {
    delayed_ack_function: 0,
    write_timer_function: 0,
    text_start: 0,
    cpus: [0; CPU_WORDS],
    offsets: Offsets::ABSENT,
    quiet_syscalls: [ABSENT; QUIET_SYSCALLS],
    reserved: 0,
};

/// One bit per TCP port whose traffic is recorded.
#[map]
static PORTS: Array<u64> = Array::with_max_entries(PORT_WORDS, 0);

/// Threads whose wake-ups and migrations are recorded.
#[map]
static THREADS: HashMap<u32, u8> = HashMap::with_max_entries(4096, 0);

/// Reads one struct offset. Volatile, because the compiler only sees the placeholder.
macro_rules! offset {
    ($field:ident) => {
        $crate::settings::read_offset(core::mem::offset_of!(pqtail_common::Offsets, $field))
    };
}
pub(crate) use offset;

#[inline(always)]
pub(crate) fn read_offset(position: usize) -> u32 {
    let at = core::mem::offset_of!(Settings, offsets) + position;
    // SAFETY: `at` is the place of a u32 member inside SETTINGS.
    unsafe {
        (&raw const SETTINGS)
            .cast::<u8>()
            .add(at)
            .cast::<u32>()
            .read_volatile()
    }
}

/// Addresses of the delayed-ACK and retransmission timer functions; 0 if unknown.
#[inline(always)]
pub(crate) fn timer_functions() -> (u64, u64) {
    // SAFETY: both members lie inside SETTINGS.
    unsafe {
        (
            (&raw const SETTINGS.delayed_ack_function).read_volatile(),
            (&raw const SETTINGS.write_timer_function).read_volatile(),
        )
    }
}

/// Address of the kernel's `_stext`; 0 if unknown.
#[inline(always)]
pub(crate) fn text_start() -> u64 {
    // SAFETY: a member of SETTINGS.
    unsafe { (&raw const SETTINGS.text_start).read_volatile() }
}

/// Whether a sleep in this system call is a wait for something to do.
#[inline(always)]
pub(crate) fn is_quiet(syscall: u32) -> bool {
    // SAFETY: a member of SETTINGS.
    let quiet = unsafe { (&raw const SETTINGS.quiet_syscalls).read_volatile() };
    syscall != ABSENT && quiet.contains(&syscall)
}

/// Whether this CPU's scheduler and interrupt records are wanted.
#[inline(always)]
pub(crate) fn cpu_is_recorded(cpu: u32) -> bool {
    let word = (cpu as usize >> 6) & (CPU_WORDS - 1);
    // SAFETY: `word` is below CPU_WORDS.
    let bits = unsafe { (&raw const SETTINGS.cpus).cast::<u64>().add(word).read_volatile() };
    bits >> (cpu & 63) & 1 == 1
}

/// Whether traffic of this TCP port is wanted.
#[inline(always)]
pub(crate) fn port_is_recorded(port: u16) -> bool {
    match PORTS.get(u32::from(port) >> 6) {
        Some(bits) => *bits >> (port & 63) & 1 == 1,
        None => false,
    }
}

/// Whether wake-ups of this thread are wanted.
#[inline(always)]
pub(crate) fn thread_is_recorded(tid: u32) -> bool {
    THREADS.get_ptr(tid).is_some()
}
