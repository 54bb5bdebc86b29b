//! Who ran where, who was woken, and the cpu-clock heartbeat.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_get_current_comm, bpf_get_smp_processor_id, bpf_probe_read_kernel_str_bytes},
    macros::{btf_tracepoint, perf_event},
    programs::{BtfTracePointContext, PerfEventContext},
};
use pqtail_common::{ABSENT, Beat, Head, Rename, Switch, Wake, flag, kind};

use crate::{
    emit::{emit, head, with_steal},
    read::{field, pointer, typed},
    settings::{cpu_is_recorded, offset, thread_is_recorded},
    sleeps, steal,
};

/// `(bool preempt, task_struct *prev, task_struct *next, unsigned int prev_state)`
#[btf_tracepoint(function = "sched_switch")]
fn sched_switch(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: a plain helper.
    if !cpu_is_recorded(unsafe { bpf_get_smp_processor_id() }) {
        return 0;
    }
    let preempt: u32 = ctx.arg(0);
    let prev: u64 = ctx.arg(1);
    let next: u64 = ctx.arg(2);
    let prev_state: u32 = ctx.arg(3);
    // Preempted on its way to sleep, a thread is still runnable, whatever its state says (__schedule in kernel/sched/core.c).
    if prev_state != 0 && preempt == 0 && thread_is_recorded(typed(prev, offset!(task_pid))) {
        sleeps::note(&ctx, prev);
    }
    let mut record = Switch {
        head: head(&ctx, kind::SWITCH),
        prev_state,
        ..zeroed()
    };
    if preempt & 0xff != 0 {
        record.head.flags |= flag::PREEMPT;
    }
    // Only a task that still wants to run can be off its CPU because its cgroup has no quota left.
    if record.prev_state == 0 && offset!(cfs_rq_throttle_count) != ABSENT && is_throttled(prev) {
        record.head.flags |= flag::THROTTLED;
    }
    record.next_tid = typed(next, offset!(task_pid));
    record.next_tgid = typed(next, offset!(task_tgid));
    record.next_prio = typed(next, offset!(task_prio));
    let comm: [u64; 2] = [
        typed(next, offset!(task_comm)),
        typed(next, offset!(task_comm).wrapping_add(8)),
    ];
    // SAFETY: both are sixteen plain bytes.
    record.next_comm = unsafe { core::mem::transmute::<[u64; 2], [u8; 16]>(comm) };
    with_steal(&mut record.head, &mut record.steal_ns);
    report_missing_steal(&ctx, &record.head);
    emit(kind::SWITCH, &record);
    0
}

/// Says once per CPU that the hypervisor shares no page here: its steal stays unknown, which no record can tell from
/// "not looked for yet".
#[inline(always)]
fn report_missing_steal(ctx: &BtfTracePointContext, head: &Head) {
    if head.flags & flag::STEAL_KNOWN == 0 && steal::absence_is_news() {
        aya_log_ebpf::warn!(ctx, "CPU {}: the hypervisor offers no steal counter", head.cpu);
    }
}

#[inline(always)]
fn is_throttled(task: u64) -> bool {
    let Some(cfs_rq) = pointer(task, offset!(task_cfs_rq)) else {
        return false;
    };
    field::<u32>(cfs_rq, offset!(cfs_rq_throttle_count)).unwrap_or(0) != 0
}

/// `(task_struct *p)`, in the waker's context, before the target is on any queue.
#[btf_tracepoint(function = "sched_waking")]
fn sched_waking(ctx: BtfTracePointContext) -> i32 {
    wake(&ctx, kind::WAKING, None)
}

/// `(task_struct *p)`, with the target on a queue now.
#[btf_tracepoint(function = "sched_wakeup")]
fn sched_wakeup(ctx: BtfTracePointContext) -> i32 {
    wake(&ctx, kind::WAKEUP, None)
}

/// `(task_struct *p)`, for a thread's first wake-up.
#[btf_tracepoint(function = "sched_wakeup_new")]
fn sched_wakeup_new(ctx: BtfTracePointContext) -> i32 {
    wake(&ctx, kind::WAKEUP, None)
}

/// `(task_struct *p, int dest_cpu)`
#[btf_tracepoint(function = "sched_migrate_task")]
fn sched_migrate_task(ctx: BtfTracePointContext) -> i32 {
    wake(&ctx, kind::MIGRATE, Some(ctx.arg(1)))
}

#[inline(always)]
fn wake(ctx: &BtfTracePointContext, kind: u8, destination: Option<u32>) -> i32 {
    let target: u64 = ctx.arg(0);
    let target_tid: u32 = typed(target, offset!(task_pid));
    if !thread_is_recorded(target_tid) {
        return 0;
    }
    let mut record = Wake {
        head: head(ctx, kind),
        target_tid,
        ..zeroed()
    };
    // Not the CPU that stores the record: a waker that shares a cache with the target's CPU queues it there itself.
    record.target_cpu = match destination {
        Some(cpu) => cpu,
        None => typed(target, offset!(task_cpu)),
    };
    record.waker_comm = bpf_get_current_comm().unwrap_or([0; 16]);
    with_steal(&mut record.head, &mut record.steal_ns);
    emit(kind, &record);
    0
}

/// `(task_struct *task, const char *comm)`, with the old name still in the task. On every CPU: whoever gets a name here may
/// run on a recorded one next.
#[btf_tracepoint(function = "task_rename")]
fn task_rename(ctx: BtfTracePointContext) -> i32 {
    let task: u64 = ctx.arg(0);
    let comm: u64 = ctx.arg(1);
    let mut record = Rename {
        head: head(&ctx, kind::RENAME),
        target_tid: typed(task, offset!(task_pid)),
        target_tgid: typed(task, offset!(task_tgid)),
        ..zeroed()
    };
    // SAFETY: the helper checks the address itself, and writes no more than the array holds.
    if unsafe { bpf_probe_read_kernel_str_bytes(comm as *const u8, &mut record.comm) }.is_err() {
        return 0;
    }
    emit(kind::RENAME, &record);
    0
}

/// One beat of this CPU's cpu-clock.
#[perf_event]
fn heartbeat(ctx: PerfEventContext) -> i32 {
    // SAFETY: a plain helper.
    if !cpu_is_recorded(unsafe { bpf_get_smp_processor_id() }) {
        return 0;
    }
    let mut record = Beat {
        head: head(&ctx, kind::BEAT),
        ..zeroed()
    };
    record.head.tid = ctx.pid();
    with_steal(&mut record.head, &mut record.steal_ns);
    emit(kind::BEAT, &record);
    0
}

#[inline(always)]
fn zeroed<T: Default>() -> T {
    T::default()
}
