//! Calls of libssl by watched threads. One pair of programs serves every function: the attachment's cookie says which.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_ktime_get_ns, generated::bpf_get_attach_cookie},
    macros::{map, uprobe, uretprobe},
    maps::HashMap,
    programs::{ProbeContext, RetProbeContext},
};
use pqtail_common::{Call, kind};

use crate::{
    emit::{emit, head},
    settings::thread_is_recorded,
};

/// Begin and `SSL` of the calls under way, by thread and function: a call may lie inside one of another function. libssl does
/// not call a function from within itself, unless TLS is stacked upon TLS; the outer call then leaves no record.
#[map]
static CALLS: HashMap<u64, [u64; 2]> = HashMap::with_max_entries(8192, 0);

#[inline(always)]
fn key(tid: u32, function: u32) -> u64 {
    u64::from(tid) << 32 | u64::from(function)
}

/// `(SSL *ssl, ...)`
#[uprobe]
fn libssl_call(ctx: ProbeContext) -> u32 {
    let tid = ctx.pid();
    if thread_is_recorded(tid)
        && let Some(session) = ctx.arg::<u64>(0)
    {
        // SAFETY: plain helpers; the context is this program's own.
        let (function, now) = unsafe { (bpf_get_attach_cookie(ctx.as_ptr()) as u32, bpf_ktime_get_ns()) };
        // A full map loses the call, whose time then counts as the thread's other work.
        let _ = CALLS.insert(key(tid, function), [now, session], 0);
    }
    0
}

/// Returns an `int` in all of them.
#[uretprobe]
fn libssl_return(ctx: RetProbeContext) -> u32 {
    let tid = ctx.pid();
    // SAFETY: as above.
    let function = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) } as u32;
    let key = key(tid, function);
    // SAFETY: only this thread writes its entries.
    let Some(&[start_ns, session]) = (unsafe { CALLS.get(key) }) else {
        return 0;
    };
    // It was there a moment ago, and nobody else removes it.
    let _ = CALLS.remove(key);
    let record = Call {
        head: head(&ctx, kind::CALL),
        start_ns,
        session,
        function,
        returned: ctx.ret(),
        ..Call::default()
    };
    emit(kind::CALL, &record);
    0
}
