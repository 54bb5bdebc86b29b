//! Time that interrupts took from whatever was running.
//!
//! Entry is remembered per CPU and one span is stored at the exit, which halves the records of the busiest events.

use aya_ebpf::{
    helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns},
    macros::{btf_tracepoint, map},
    maps::PerCpuArray,
    programs::BtfTracePointContext,
};
use pqtail_common::{Span, kind};

use crate::{
    emit::{emit, head, with_steal},
    settings::cpu_is_recorded,
};

/// `NR_SOFTIRQS`, rounded up to a power of two so that a masked index is always inside.
const VECTORS: u32 = 16;

/// Begins of what is under way on this CPU. Softirqs do not nest; a hard irq may interrupt a softirq.
const IRQ: u32 = 0;
const SOFTIRQ: u32 = 1;
const VECTOR: u32 = 2;
/// When the softirq under way was raised. Taken at its entry: a vector that is raised again while it runs (NET_RX
/// out of budget does so to itself) must keep that raise for its next run, or ksoftirqd's delay would vanish.
const SOFTIRQ_RAISED: u32 = 3;

#[map]
static BEGINS: PerCpuArray<u64> = PerCpuArray::with_max_entries(4, 0);

/// First raise of each softirq vector since it last ran.
#[map]
static RAISES: PerCpuArray<u64> = PerCpuArray::with_max_entries(VECTORS, 0);

#[inline(always)]
fn begin(which: u32) -> i32 {
    if let Some(begin) = BEGINS.get_ptr_mut(which) {
        // SAFETY: a per-CPU slot used by one context at a time; the helper takes no arguments.
        unsafe { *begin = bpf_ktime_get_ns() };
    }
    0
}

#[inline(always)]
fn take(slot: Option<*mut u64>) -> u64 {
    match slot {
        // SAFETY: a per-CPU slot used by one context at a time.
        Some(slot) => unsafe { core::mem::replace(&mut *slot, 0) },
        None => 0,
    }
}

#[inline(always)]
fn end(ctx: &BtfTracePointContext, which: u32, kind: u8, number: u32, raised_ns: u64) -> i32 {
    let start_ns = take(BEGINS.get_ptr_mut(which));
    // The begin was before the programs were attached.
    if start_ns == 0 {
        return 0;
    }
    let mut record = Span {
        head: head(ctx, kind),
        start_ns,
        raised_ns,
        number,
        ..Span::default()
    };
    if !cpu_is_recorded(u32::from(record.head.cpu)) {
        return 0;
    }
    with_steal(&mut record.head, &mut record.steal_ns);
    emit(kind, &record);
    0
}

/// `(int irq, irqaction *action)`
#[btf_tracepoint(function = "irq_handler_entry")]
fn irq_handler_entry(_ctx: BtfTracePointContext) -> i32 {
    begin(IRQ)
}

/// `(int irq, irqaction *action, int ret)`
#[btf_tracepoint(function = "irq_handler_exit")]
fn irq_handler_exit(ctx: BtfTracePointContext) -> i32 {
    end(&ctx, IRQ, kind::IRQ, ctx.arg(0), 0)
}

/// `(unsigned int vector)`
#[btf_tracepoint(function = "softirq_raise")]
fn softirq_raise(ctx: BtfTracePointContext) -> i32 {
    let vector: u32 = ctx.arg(0);
    // SAFETY: a plain helper.
    if !cpu_is_recorded(unsafe { bpf_get_smp_processor_id() }) {
        return 0;
    }
    if let Some(raise) = RAISES.get_ptr_mut(vector & (VECTORS - 1)) {
        // SAFETY: a per-CPU slot; the first raise wins.
        unsafe {
            if *raise == 0 {
                *raise = bpf_ktime_get_ns();
            }
        }
    }
    0
}

/// `(unsigned int vector)`
#[btf_tracepoint(function = "softirq_entry")]
fn softirq_entry(ctx: BtfTracePointContext) -> i32 {
    let vector: u32 = ctx.arg(0);
    let raised_ns = take(RAISES.get_ptr_mut(vector & (VECTORS - 1)));
    if let Some(raised) = BEGINS.get_ptr_mut(SOFTIRQ_RAISED) {
        // SAFETY: a per-CPU slot; softirqs do not nest.
        unsafe { *raised = raised_ns };
    }
    begin(SOFTIRQ)
}

/// `(unsigned int vector)`
#[btf_tracepoint(function = "softirq_exit")]
fn softirq_exit(ctx: BtfTracePointContext) -> i32 {
    let raised_ns = take(BEGINS.get_ptr_mut(SOFTIRQ_RAISED));
    end(&ctx, SOFTIRQ, kind::SOFTIRQ, ctx.arg(0), raised_ns)
}

macro_rules! vector_pair {
    ($entry:ident, $exit:ident) => {
        /// `(int vector)`: x86 only, and unseen by `irq_handler_entry`.
        #[btf_tracepoint]
        fn $entry(_ctx: BtfTracePointContext) -> i32 {
            begin(VECTOR)
        }

        /// `(int vector)`
        #[btf_tracepoint]
        fn $exit(ctx: BtfTracePointContext) -> i32 {
            end(&ctx, VECTOR, kind::VECTOR, ctx.arg(0), 0)
        }
    };
}
vector_pair!(local_timer_entry, local_timer_exit);
vector_pair!(reschedule_entry, reschedule_exit);
vector_pair!(call_function_single_entry, call_function_single_exit);
