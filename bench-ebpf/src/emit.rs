//! The one place where a record is stored or its loss is counted.

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_RB_NO_WAKEUP,
    helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns},
    macros::map,
    maps::{PerCpuArray, RingBuf},
};
use pqtail_common::{Head, KINDS, RECORD_BYTES, flag};

/// Records on their way to the drain. User space sets the size before load.
#[map]
static RECORDS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// Records that found the ring full, per CPU, indexed by kind. One entry, so that the drain reads all in one call.
#[map]
pub(crate) static LOSSES: PerCpuArray<[u64; KINDS]> = PerCpuArray::with_max_entries(1, 0);

/// Begins a record of `kind`, now, on this CPU, with the current thread.
#[inline(always)]
pub(crate) fn head<C: EbpfContext>(ctx: &C, kind: u8) -> Head {
    Head {
        // SAFETY: plain helpers without arguments.
        at_ns: unsafe { bpf_ktime_get_ns() },
        kind,
        flags: 0,
        // SAFETY: as above.
        cpu: unsafe { bpf_get_smp_processor_id() } as u16,
        tid: ctx.pid(),
    }
}

/// Adds the steal counter to a record, where the hypervisor offers one.
#[inline(always)]
pub(crate) fn with_steal(head: &mut Head, steal_ns: &mut u64) {
    if let Some(ns) = crate::steal::counter_ns(u32::from(head.cpu)) {
        *steal_ns = ns;
        head.flags |= flag::STEAL_KNOWN;
    }
}

/// Stores one record. Nobody is woken: the drain polls, so that the measured path never pays a wake-up.
#[inline(always)]
pub(crate) fn emit<T>(kind: u8, record: &T) {
    const { assert!(size_of::<T>() == RECORD_BYTES) };
    if RECORDS.output::<T>(record, u64::from(BPF_RB_NO_WAKEUP)).is_err()
        && let Some(lost) = LOSSES.get_ptr_mut(0)
    {
        // SAFETY: a per-CPU slot, indexed below KINDS. An interrupt of this CPU may come between read and write, and
        // then one of the two losses goes uncounted; that there was a loss is still known.
        unsafe { (*lost)[kind as usize & (KINDS - 1)] += 1 };
    }
}
