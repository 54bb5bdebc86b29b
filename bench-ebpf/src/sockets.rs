//! Socket states, retransmissions, resets and the two TCP timers that make tails.

use aya_ebpf::{macros::btf_tracepoint, programs::BtfTracePointContext};
use pqtail_common::{ABSENT, Socket, kind};

use crate::{
    emit::{emit, head},
    packets::fold,
    read::{field, pointer},
    settings::{offset, port_is_recorded, timer_functions},
};

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// `(sock *sk, int oldstate, int newstate)`
#[btf_tracepoint(function = "inet_sock_set_state")]
fn inet_sock_set_state(ctx: BtfTracePointContext) -> i32 {
    if let Some(mut record) = identity(ctx.arg(0)) {
        record.old_state = ctx.arg(1);
        record.new_state = ctx.arg(2);
        store(&ctx, kind::STATE, record);
    }
    0
}

/// `(sock *sk, sk_buff *skb, ...)`
#[btf_tracepoint(function = "tcp_retransmit_skb")]
fn tcp_retransmit_skb(ctx: BtfTracePointContext) -> i32 {
    if let Some(mut record) = identity(ctx.arg(0)) {
        let skb: u64 = ctx.arg(1);
        record.sequence = field(skb, offset!(skb_tcp_sequence)).unwrap_or(0);
        record.bytes = field(skb, offset!(skb_len)).unwrap_or(0);
        store(&ctx, kind::RETRANSMIT, record);
    }
    0
}

/// `(sock *sk, request_sock *req)`: the request begins with the same `sock_common` as a socket.
#[btf_tracepoint(function = "tcp_retransmit_synack")]
fn tcp_retransmit_synack(ctx: BtfTracePointContext) -> i32 {
    if let Some(record) = identity(ctx.arg(1)) {
        store(&ctx, kind::RETRANSMIT_SYNACK, record);
    }
    0
}

/// `(sock *sk, sk_buff *skb, ...)`; no socket when the reset answers a closed port.
#[btf_tracepoint(function = "tcp_send_reset")]
fn tcp_send_reset(ctx: BtfTracePointContext) -> i32 {
    if let Some(record) = identity(ctx.arg(0)) {
        store(&ctx, kind::RESET_SENT, record);
    }
    0
}

/// `(sock *sk)`
#[btf_tracepoint(function = "tcp_receive_reset")]
fn tcp_receive_reset(ctx: BtfTracePointContext) -> i32 {
    if let Some(record) = identity(ctx.arg(0)) {
        store(&ctx, kind::RESET_RECEIVED, record);
    }
    0
}

/// `(sock *sk)`, in the thread that has just copied data out of the socket.
#[btf_tracepoint(function = "tcp_rcv_space_adjust")]
fn tcp_rcv_space_adjust(ctx: BtfTracePointContext) -> i32 {
    if let Some(record) = identity(ctx.arg(0))
        && port_is_recorded(record.local_port)
    {
        store(&ctx, kind::READ, record);
    }
    0
}

/// `(timer_list *timer, unsigned long baseclk)`: only the two TCP timers, told apart by their function.
#[btf_tracepoint(function = "timer_expire_entry")]
fn timer_expire_entry(ctx: BtfTracePointContext) -> i32 {
    let timer: u64 = ctx.arg(0);
    let (delayed_ack, write) = timer_functions();
    let Some(function) = pointer(timer, offset!(timer_function)) else {
        return 0;
    };
    let (kind, offset) = if function == delayed_ack {
        (kind::DELAYED_ACK_TIMER, offset!(sock_delayed_ack_timer))
    } else if function == write {
        (kind::WRITE_TIMER, offset!(sock_write_timer))
    } else {
        return 0;
    };
    if offset != ABSENT
        && let Some(mut record) = identity(timer.wrapping_sub(u64::from(offset)))
    {
        if kind == kind::WRITE_TIMER {
            record.pending = ABSENT;
            if offset!(sock_pending) != ABSENT
                && let Some(pending) = field::<u8>(record.socket, offset!(sock_pending))
            {
                record.pending = u32::from(pending);
            }
        }
        store(&ctx, kind, record);
    }
    0
}

#[inline(always)]
fn store(ctx: &BtfTracePointContext, kind: u8, mut record: Socket) {
    record.head = head(ctx, kind);
    emit(kind, &record);
}

/// Namespace and 4-tuple of a socket, if one of its ports is recorded.
#[inline(always)]
fn identity(socket: u64) -> Option<Socket> {
    if socket == 0 {
        return None;
    }
    let local_port: u16 = field(socket, offset!(sock_local_port))?;
    let remote_port = u16::from_be(field(socket, offset!(sock_remote_port))?);
    if !port_is_recorded(local_port) && !port_is_recorded(remote_port) {
        return None;
    }
    let mut record = Socket {
        socket,
        local_port,
        remote_port,
        ..Socket::default()
    };
    record.netns = pointer(socket, offset!(sock_net))
        .and_then(|net| field(net, offset!(net_inum)))
        .unwrap_or(0);
    match field::<u16>(socket, offset!(sock_family))? {
        AF_INET => {
            record.local = field(socket, offset!(sock_local))?;
            record.remote = field(socket, offset!(sock_remote))?;
        }
        AF_INET6 => {
            record.local = fold(field(socket, offset!(sock_local6))?);
            record.remote = fold(field(socket, offset!(sock_remote6))?);
        }
        _ => return None,
    }
    Some(record)
}
