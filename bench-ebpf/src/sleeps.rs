//! What a measured thread waits for when it waits for something else than work: the system call, the place in the kernel, and
//! the memory it has to reclaim itself.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_ktime_get_ns,
        generated::{bpf_get_stack, bpf_task_pt_regs},
    },
    macros::{btf_tracepoint, map},
    maps::HashMap,
    programs::BtfTracePointContext,
};
use pqtail_common::{ABSENT, SLEEP_FRAMES, Sleep, Span, kind};

use crate::{
    emit::{emit, head, with_steal},
    read::field,
    settings::{cpu_is_recorded, is_quiet, offset, text_start, thread_is_recorded},
};

/// The program itself and the tracepoint's own frames, at the least.
const FRAMES_SKIPPED: u64 = 2;

/// Stores where `task`, which is current and about to leave its CPU, goes to sleep. Called before the switch is stored, so that
/// its record comes first.
#[inline(always)]
pub(crate) fn note(ctx: &BtfTracePointContext, task: u64) {
    if offset!(regs_syscall) == ABSENT || text_start() == 0 {
        return;
    }
    // SAFETY: `task` came from the tracepoint as a trusted pointer.
    let regs = unsafe { bpf_task_pt_regs(task as *mut _) } as u64;
    let syscall = field::<u32>(regs, offset!(regs_syscall)).unwrap_or(ABSENT);
    if is_quiet(syscall) {
        return;
    }
    let mut record = Sleep {
        head: head(ctx, kind::SLEEP),
        syscall,
        ..Sleep::default()
    };
    let mut addresses = [0u64; SLEEP_FRAMES];
    // SAFETY: the buffer is as long as said.
    let bytes = unsafe {
        bpf_get_stack(
            ctx.as_ptr(),
            (&raw mut addresses).cast(),
            size_of_val(&addresses) as u32,
            FRAMES_SKIPPED,
        )
    };
    // An error is negative; the record then says that there is nothing.
    if bytes > 0 {
        record.frames_count = bytes as u32 / 8;
        for (frame, address) in record.frames.iter_mut().zip(addresses) {
            // An address of 0 is no frame; its distance would tell where the kernel lies.
            if address != 0 {
                *frame = address.wrapping_sub(text_start()) as u32;
            }
        }
    }
    emit(kind::SLEEP, &record);
}

/// Begin of the reclaim under way, by thread.
#[map]
static RECLAIMS: HashMap<u32, u64> = HashMap::with_max_entries(4096, 0);

#[inline(always)]
fn reclaim_begins(ctx: &BtfTracePointContext) -> i32 {
    let tid = ctx.pid();
    if thread_is_recorded(tid) {
        // SAFETY: a plain helper.
        let now = unsafe { bpf_ktime_get_ns() };
        // A full map loses the span, whose time then counts as the thread's own.
        let _ = RECLAIMS.insert(tid, now, 0);
    }
    0
}

#[inline(always)]
fn reclaim_ends(ctx: &BtfTracePointContext, number: u32) -> i32 {
    let tid = ctx.pid();
    // SAFETY: only this thread writes its entry.
    let Some(&start_ns) = (unsafe { RECLAIMS.get(tid) }) else {
        return 0;
    };
    // It was there a moment ago, and nobody else removes it.
    let _ = RECLAIMS.remove(tid);
    let mut record = Span {
        head: head(ctx, kind::RECLAIM),
        start_ns,
        number,
        ..Span::default()
    };
    if cpu_is_recorded(u32::from(record.head.cpu)) {
        with_steal(&mut record.head, &mut record.steal_ns);
        emit(kind::RECLAIM, &record);
    }
    0
}

macro_rules! reclaim_pair {
    ($number:literal, $begin:ident, $end:ident) => {
        /// `(int order, gfp_t flags)`, since 6.14 with the cgroup behind; none of it is read.
        #[btf_tracepoint]
        fn $begin(ctx: BtfTracePointContext) -> i32 {
            reclaim_begins(&ctx)
        }

        /// `(unsigned long reclaimed)`, since 6.14 with the cgroup behind; none of it is read.
        #[btf_tracepoint]
        fn $end(ctx: BtfTracePointContext) -> i32 {
            reclaim_ends(&ctx, $number)
        }
    };
}
reclaim_pair!(1, mm_vmscan_direct_reclaim_begin, mm_vmscan_direct_reclaim_end);
reclaim_pair!(2, mm_vmscan_memcg_reclaim_begin, mm_vmscan_memcg_reclaim_end);
