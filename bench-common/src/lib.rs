//! Records that cross from the kernel to user space.
//!
//! Every record is one cache line ([`RECORD_BYTES`]) and begins with a [`Head`], so a recording is a plain
//! array and a reader can step over kinds it does not know. All times are `CLOCK_MONOTONIC` nanoseconds of the
//! machine that recorded them (`bpf_ktime_get_ns`). Fields are fixed-width integers; zero in an address, port or
//! pointer means "the kernel did not say".
#![no_std]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of every kernel record in bytes.
pub const RECORD_BYTES: usize = 64;

/// Number of loss counters per CPU: one per record kind.
pub const KINDS: usize = 32;

/// Values of [`Head::kind`].
pub mod kind {
    /// [`Switch`](super::Switch) from `sched_switch`.
    pub const SWITCH: u8 = 1;
    /// [`Wake`](super::Wake) from `sched_waking`, in the waker's context.
    pub const WAKING: u8 = 2;
    /// [`Wake`](super::Wake) from `sched_wakeup` or `sched_wakeup_new`: the task is on a run queue now.
    pub const WAKEUP: u8 = 3;
    /// [`Wake`](super::Wake) from `sched_migrate_task`: `target_cpu` is the destination.
    pub const MIGRATE: u8 = 4;
    /// [`Span`](super::Span) of one hard interrupt handler; `number` is the Linux irq.
    pub const IRQ: u8 = 5;
    /// [`Span`](super::Span) of one softirq; `number` is the vector (`NET_RX` is 3).
    pub const SOFTIRQ: u8 = 6;
    /// [`Span`](super::Span) of one interrupt that bypasses `irq_handler_entry` (x86 local timer, IPIs);
    /// `number` is the vector.
    pub const VECTOR: u8 = 7;
    /// [`Packet`](super::Packet) leaves the stack for a device's queue (`net_dev_queue`): a slow queue is the path's, not the
    /// sender's.
    pub const TRANSMIT: u8 = 8;
    /// [`Packet`](super::Packet) enters the stack from a device (`netif_receive_skb`).
    pub const RECEIVE: u8 = 9;
    /// [`Packet`](super::Packet) dropped by the stack (`kfree_skb`); `reason` is the kernel's enum value. Not every
    /// drop is a loss: `QUEUE_PURGE` is a closing socket that throws away its own copy, once per connection.
    /// Not every loss is a drop either: a SYN that finds the accept queue full is consumed in silence
    /// (`tcp_conn_request`, `tcp_rcv_state_process`), and only a `RECEIVE` without a SYN-ACK after it tells.
    pub const DROP: u8 = 10;
    /// [`Socket`](super::Socket) changes state (`inet_sock_set_state`).
    pub const STATE: u8 = 11;
    /// [`Socket`](super::Socket) sends a segment again (`tcp_retransmit_skb`).
    pub const RETRANSMIT: u8 = 12;
    /// [`Socket`](super::Socket) (a request socket) sends its SYN-ACK again (`tcp_retransmit_synack`).
    pub const RETRANSMIT_SYNACK: u8 = 13;
    /// [`Socket`](super::Socket) sends a reset (`tcp_send_reset`).
    pub const RESET_SENT: u8 = 14;
    /// [`Socket`](super::Socket) received a reset (`tcp_receive_reset`).
    pub const RESET_RECEIVED: u8 = 15;
    /// [`Socket`](super::Socket) whose delayed-ACK timer fired; states, sequence and bytes are zero.
    pub const DELAYED_ACK_TIMER: u8 = 16;
    /// [`Socket`](super::Socket) whose retransmission timer fired. The kernel re-arms it lazily, so it also fires
    /// with nothing to send again: only a `RETRANSMIT` behind it proves one.
    pub const WRITE_TIMER: u8 = 17;
    /// [`Beat`](super::Beat) of the per-CPU perf cpu-clock.
    pub const BEAT: u8 = 18;
    /// [`Rename`](super::Rename): a thread gets another name, by itself or by an exec (`task_rename`).
    pub const RENAME: u8 = 19;
    /// [`Sleep`](super::Sleep): where in the kernel a measured thread goes to sleep, just before its `SWITCH`. Not of sleeps
    /// in [`Settings::quiet_syscalls`](super::Settings::quiet_syscalls), which are waits for something to do.
    pub const SLEEP: u8 = 20;
    /// [`Span`](super::Span) of memory reclaim by a measured thread itself; `number` is 1 for the machine's memory
    /// (`mm_vmscan_direct_reclaim_*`), 2 for its cgroup's limit (`mm_vmscan_memcg_reclaim_*`). The thread may have slept or
    /// been preempted inside.
    pub const RECLAIM: u8 = 21;
    /// [`Socket`](super::Socket) out of which a thread takes data (`tcp_rcv_space_adjust`): `head.tid` is that thread, not a
    /// bystander. On the server's end of a connection only. Once per segment copied, so one read may leave several; states,
    /// sequence and bytes are zero.
    pub const READ: u8 = 22;
    /// [`Call`](super::Call) of a libssl function by a watched thread, from uprobes.
    pub const CALL: u8 = 23;
    /// [`Loss`](super::Loss): records of one kind that could not be stored. Written by the drain.
    pub const LOSS: u8 = 31;
}

/// Bits of [`Head::flags`].
pub mod flag {
    /// `SWITCH`: the kernel called the switch a preemption.
    pub const PREEMPT: u8 = 1;
    /// `SWITCH`: the outgoing task's cgroup was out of CPU quota (`cfs_rq.throttle_count` not zero).
    pub const THROTTLED: u8 = 2;
    /// The record carries a live steal counter; without it `steal_ns` says nothing.
    pub const STEAL_KNOWN: u8 = 4;
}

/// What every record begins with.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Head {
    /// When, `CLOCK_MONOTONIC` ns. For spans this is the end.
    pub at_ns: u64,
    /// Which record: a value of [`kind`].
    pub kind: u8,
    /// Bits of [`flag`].
    pub flags: u8,
    /// CPU that stored the record.
    pub cpu: u16,
    /// Thread id that was current on `cpu`: in packet and interrupt records a bystander, not the cause.
    pub tid: u32,
}

/// One context switch. `head.tid` is the thread that leaves the CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Switch {
    /// Time, CPU and outgoing thread.
    pub head: Head,
    /// The hypervisor's steal counter of this CPU, ns since boot.
    pub steal_ns: u64,
    /// Name of the incoming thread, NUL padded.
    pub next_comm: [u8; 16],
    /// Incoming thread id; 0 is the idle task.
    pub next_tid: u32,
    /// Process of the incoming thread.
    pub next_tgid: u32,
    /// Kernel priority of the incoming thread: below 100 is real-time, 120 is nice 0.
    pub next_prio: u32,
    /// State of the outgoing thread (`TASK_*` bits); 0 means it still wants to run.
    pub prev_state: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// A thread becomes runnable or moves between run queues.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Wake {
    /// Time and place of the waker.
    pub head: Head,
    /// The hypervisor's steal counter of this CPU, ns since boot.
    pub steal_ns: u64,
    /// The thread that is woken or moved.
    pub target_tid: u32,
    /// `WAKEUP` and `MIGRATE`: the CPU whose queue it joins. `WAKING`: the CPU it last ran on.
    pub target_cpu: u32,
    /// Name of the thread that wakes it, NUL padded.
    pub waker_comm: [u8; 16],
    /// Zero.
    pub reserved: [u64; 2],
}

/// Time an interrupt took from whatever ran there. `head.at_ns` is its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Span {
    /// End of the span, and where it ran.
    pub head: Head,
    /// The hypervisor's steal counter of this CPU at the end, ns since boot.
    pub steal_ns: u64,
    /// Begin of the span, ns.
    pub start_ns: u64,
    /// Softirq only: when the vector was first raised since it last ran, ns; 0 if not seen.
    pub raised_ns: u64,
    /// Linux irq number, softirq vector, or processor vector, by kind.
    pub number: u32,
    /// Zero.
    pub reserved: [u32; 5],
}

/// One TCP segment at the border between stack and device, or its drop.
///
/// Addresses are IPv4 in network order as a native `u32`; an IPv6 address is folded by XOR of its four words.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Packet {
    /// When and on which CPU.
    pub head: Head,
    /// Inode number of the device's network namespace.
    pub netns: u32,
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
    /// Source port, host order.
    pub source_port: u16,
    /// Destination port, host order.
    pub destination_port: u16,
    /// TCP sequence number.
    pub sequence: u32,
    /// TCP acknowledgement number.
    pub acknowledgement: u32,
    /// TCP payload bytes in this skb: more than one segment's worth under GSO or GRO.
    pub payload_bytes: u32,
    /// TCP flag byte: FIN 1, SYN 2, RST 4, PSH 8, ACK 16.
    pub tcp_flags: u8,
    /// 4 or 6.
    pub ip_version: u8,
    /// TCP window field, unscaled.
    pub window: u16,
    /// `DROP`: value of the kernel's `enum skb_drop_reason`.
    pub reason: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// An event of one socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Socket {
    /// When and on which CPU.
    pub head: Head,
    /// Kernel address of the socket: an identity within one boot, never followed.
    pub socket: u64,
    /// Inode number of the socket's network namespace.
    pub netns: u32,
    /// Local address, as in [`Packet`].
    pub local: u32,
    /// Remote address, as in [`Packet`].
    pub remote: u32,
    /// Local port, host order; 0 before the kernel has chosen one.
    pub local_port: u16,
    /// Remote port, host order.
    pub remote_port: u16,
    /// `STATE`: TCP state left (kernel numbering: ESTABLISHED 1, `SYN_SENT` 2, ... `LISTEN` 10, `NEW_SYN_RECV` 12).
    pub old_state: u32,
    /// `STATE`: TCP state entered.
    pub new_state: u32,
    /// `RETRANSMIT`: first sequence number sent again.
    pub sequence: u32,
    /// `RETRANSMIT`: bytes sent again.
    pub bytes: u32,
    /// `WRITE_TIMER`: what the timer was armed for, a value of [`pending`]; 0 for nothing any more, and [`ABSENT`] where the kernel
    /// does not say.
    pub pending: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where a thread goes to sleep. `head.tid` is the thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sleep {
    /// When, on which CPU, and who.
    pub head: Head,
    /// Number of the system call it is in, by its architecture; [`ABSENT`] in an exception such as a page fault.
    pub syscall: u32,
    /// How many of `frames` hold something.
    pub frames_count: u32,
    /// Return addresses, innermost first, in bytes from the kernel's `_stext`.
    pub frames: [u32; SLEEP_FRAMES],
}

/// Frames of a [`Sleep`]: what fits.
pub const SLEEP_FRAMES: usize = 10;

/// Values of [`Socket::pending`] (`ICSK_TIME_*`, include/net/inet_connection_sock.h, the same from v6.1 to v6.18).
pub mod pending {
    /// Retransmission time-out.
    pub const RETRANSMIT: u32 = 1;
    /// Tail-loss probe.
    pub const LOSS_PROBE: u32 = 5;
    /// The reordering window of RACK is over.
    pub const REORDER: u32 = 6;
}

/// One call of a libssl function. `head.at_ns` is its return, `head.tid` the caller. The thread may have slept or been preempted
/// inside; a call that was under way when the probes were attached leaves none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Call {
    /// Return of the call, and who called.
    pub head: Head,
    /// Begin of the call, ns.
    pub start_ns: u64,
    /// The `SSL` it was called with: an address in that process, and an identity only until that is freed.
    pub session: u64,
    /// Which function: a value of [`function`].
    pub function: u32,
    /// What it returned.
    pub returned: i32,
    /// Zero.
    pub reserved: [u64; 3],
}

/// Values of [`Call::function`]. A call may lie inside another: `SSL_accept` calls `SSL_do_handshake`. Reading and writing is not
/// recorded: each call that is costs the server some 10 µs, and no more is told by it.
pub mod function {
    /// `SSL_do_handshake`
    pub const DO_HANDSHAKE: u32 = 1;
    /// `SSL_accept`
    pub const ACCEPT: u32 = 2;
}

/// One beat of the per-CPU perf cpu-clock. A beat that is late by much says the CPU was away.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Beat {
    /// When, on which CPU, and which thread it interrupted (0: idle).
    pub head: Head,
    /// The hypervisor's steal counter of this CPU, ns since boot.
    pub steal_ns: u64,
    /// Zero.
    pub reserved: [u64; 5],
}

/// A thread gets another name. A name in a [`Switch`] is the one at that time; a thread that stays on its CPU is only named
/// here.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Rename {
    /// When, on which CPU, and which thread did it.
    pub head: Head,
    /// The new name, NUL padded.
    pub comm: [u8; 16],
    /// The thread that gets it.
    pub target_tid: u32,
    /// Its process.
    pub target_tgid: u32,
    /// Zero.
    pub reserved: [u64; 3],
}

/// Records of one kind that one CPU could not store. `head.cpu` lost them; `head.at_ns` ends the window.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Loss {
    /// End of the window in which the losses happened, and the CPU that lost.
    pub head: Head,
    /// Begin of that window, ns.
    pub start_ns: u64,
    /// How many.
    pub count: u64,
    /// Kind of the lost records.
    pub lost_kind: u32,
    /// Zero.
    pub reserved: [u32; 7],
}

macro_rules! assert_record {
    ($($name:ident),*) => { $(
        const _: () = assert!(size_of::<$name>() == RECORD_BYTES && align_of::<$name>() == 8);
    )* };
}
assert_record!(
    Switch, Wake, Span, Packet, Socket, Sleep, Call, Beat, Rename, Loss
);

/// Where members lie in the running kernel's structs, in bytes; resolved by name from its BTF.
///
/// [`ABSENT`] means the kernel has no such member; the program that needs it is then not loaded, or leaves the
/// field zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// `task_struct.pid`.
    pub task_pid: u32,
    /// `task_struct.tgid`.
    pub task_tgid: u32,
    /// `task_struct.comm`.
    pub task_comm: u32,
    /// `task_struct.prio`.
    pub task_prio: u32,
    /// `task_struct.thread_info.cpu`: the CPU on whose queue the task is, or last was.
    pub task_cpu: u32,
    /// `task_struct.se.cfs_rq`.
    pub task_cfs_rq: u32,
    /// `cfs_rq.rq`.
    pub cfs_rq_rq: u32,
    /// `cfs_rq.throttle_count`.
    pub cfs_rq_throttle_count: u32,
    /// `rq.cpu`.
    pub rq_cpu: u32,
    /// Per-CPU offset of `runqueues`.
    pub percpu_runqueues: u32,
    /// Per-CPU offset of the hypervisor's counter (x86 `steal_time`, arm64 `stolen_time_region`).
    pub percpu_steal: u32,
    /// x86: `kvm_steal_time.steal`. arm64: offset of `stolen_time` in the shared page.
    pub steal_field: u32,
    /// Where the per-CPU variable is the shared page (x86), `kvm_steal_time.version`: 0 there as long as no hypervisor has written to
    /// it. `ABSENT` where the variable points to the page (arm64).
    pub steal_version: u32,
    /// `sk_buff.head`.
    pub skb_head: u32,
    /// `sk_buff.data`.
    pub skb_data: u32,
    /// `sk_buff.len`.
    pub skb_len: u32,
    /// `sk_buff.network_header`.
    pub skb_network_header: u32,
    /// `sk_buff.protocol`.
    pub skb_protocol: u32,
    /// `sk_buff.dev`.
    pub skb_dev: u32,
    /// `net_device.nd_net.net`.
    pub device_net: u32,
    /// `net.ns.inum`.
    pub net_inum: u32,
    /// `sock_common.skc_net.net`.
    pub sock_net: u32,
    /// `sock_common.skc_family`.
    pub sock_family: u32,
    /// `sock_common.skc_num` (local port, host order).
    pub sock_local_port: u32,
    /// `sock_common.skc_dport` (remote port, network order).
    pub sock_remote_port: u32,
    /// `sock_common.skc_rcv_saddr`.
    pub sock_local: u32,
    /// `sock_common.skc_daddr`.
    pub sock_remote: u32,
    /// `sock_common.skc_v6_rcv_saddr`.
    pub sock_local6: u32,
    /// `sock_common.skc_v6_daddr`.
    pub sock_remote6: u32,
    /// `tcp_skb_cb.seq` from the begin of an `sk_buff`: `sk_buff.cb` plus the member.
    pub skb_tcp_sequence: u32,
    /// `timer_list.function`.
    pub timer_function: u32,
    /// From a socket to its delayed-ACK timer.
    pub sock_delayed_ack_timer: u32,
    /// From a socket to its retransmission timer.
    pub sock_write_timer: u32,
    /// From a socket to what that timer is armed for (`icsk_pending`, one byte).
    pub sock_pending: u32,
    /// `pt_regs.orig_ax` (x86) or `pt_regs.syscallno` (arm64).
    pub regs_syscall: u32,
}

impl Offsets {
    /// Nothing resolved.
    pub const ABSENT: Self = {
        // SAFETY: every member is a u32, for which all bit patterns are valid; all ones is `ABSENT`.
        unsafe { core::mem::transmute::<[u8; size_of::<Self>()], Self>([0xff; size_of::<Self>()]) }
    };
}

/// A member the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

/// What user space asks of the programs, fixed at load.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Address of `tcp_delack_timer`, 0 if unknown.
    pub delayed_ack_function: u64,
    /// Address of `tcp_write_timer`, 0 if unknown.
    pub write_timer_function: u64,
    /// Address of the kernel's `_stext`, 0 if unknown.
    pub text_start: u64,
    /// Bitmap of the CPUs whose scheduler and interrupt records are stored.
    pub cpus: [u64; CPU_WORDS],
    /// Struct offsets of the running kernel.
    pub offsets: Offsets,
    /// System calls in which a measured thread sleeps because it has nothing to do; [`ABSENT`] where the architecture lacks
    /// one.
    pub quiet_syscalls: [u32; QUIET_SYSCALLS],
    /// Zero; keeps the struct free of padding, since it crosses the border as bytes.
    pub reserved: u32,
}

const _: () =
    assert!(size_of::<Settings>() == 24 + 8 * CPU_WORDS + size_of::<Offsets>() + 4 * QUIET_SYSCALLS + 4);

/// How many system calls [`Settings::quiet_syscalls`] names.
pub const QUIET_SYSCALLS: usize = 4;

/// Words in [`Settings::cpus`]: room for 1,024 CPUs.
pub const CPU_WORDS: usize = 16;

/// Words in the port filter map: one bit a port.
pub const PORT_WORDS: u32 = 1024;

/// Values of [`DropOrder::segment`] and [`Dropped::segment`].
pub mod segment {
    /// No segment.
    pub const NONE: u32 = 0;
    /// SYN without ACK.
    pub const SYN: u32 = 1;
    /// SYN with ACK.
    pub const SYN_ACK: u32 = 2;
    /// Payload, and neither SYN nor RST.
    pub const DATA: u32 = 3;
}

/// How many segments one dropper can lose in its life: each has a place in a table of this size.
pub const DROPS_MAX: u32 = 1024;

/// Which segments the dropper loses. User space writes it, the program only reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DropOrder {
    /// Number of the order. Under one order each pair of ports loses one segment, so that what is sent again passes.
    pub round: u32,
    /// Only segments of at least so many bytes of TCP payload.
    pub payload_min: u32,
    /// Ends when the dropper has lost so many segments since it was loaded.
    pub until: u32,
    /// Source or destination port, host order; 0 for any.
    pub port: u16,
    /// Zero.
    pub reserved: u16,
    /// A value of [`segment`]. The last member: the program reads it first, user space writes it last.
    pub segment: u32,
}

/// One segment that the dropper has lost.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Dropped {
    /// When, `CLOCK_MONOTONIC` ns.
    pub at_ns: u64,
    /// TCP sequence number.
    pub sequence: u32,
    /// TCP payload bytes.
    pub payload_bytes: u32,
    /// Source port, host order.
    pub source_port: u16,
    /// Destination port, host order.
    pub destination_port: u16,
    /// A value of [`segment`].
    pub segment: u32,
}

const _: () = assert!(size_of::<DropOrder>() == 20 && size_of::<Dropped>() == 24);
