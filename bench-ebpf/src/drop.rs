//! Loses chosen TCP segments between two hosts. No probe: only the truth suite loads it.
//!
//! A veth device has one receive queue unless told otherwise (`veth_init_queues`), and a queue is polled by one CPU at
//! a time: no two runs of the program overlap, and plain reads and writes do.

use aya_ebpf::{
    bindings::{BPF_NOEXIST, xdp_action},
    helpers::{bpf_ktime_get_ns, generated::bpf_redirect},
    macros::{map, xdp},
    maps::{Array, HashMap},
    programs::XdpContext,
};
use pqtail_common::{DROPS_MAX, DropOrder, Dropped, segment};

const ETHERNET_BYTES: usize = 14;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const IPV6_HEADER_BYTES: usize = 40;
const PROTOCOL_TCP: u8 = 6;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// No device has this index.
const NOWHERE: u32 = i32::MAX as u32;

/// What to lose.
#[map]
static ORDER: Array<DropOrder> = Array::with_max_entries(1, 0);

/// How many places of [`DROPS`] are filled.
#[map]
static DROP_COUNT: Array<u32> = Array::with_max_entries(1, 0);

/// What was lost, in order.
#[map]
static DROPS: Array<Dropped> = Array::with_max_entries(DROPS_MAX, 0);

/// Round and ports of every segment lost.
#[map]
static DROPPED_PORTS: HashMap<[u32; 2], u8> = HashMap::with_max_entries(DROPS_MAX, 0);

/// Frags, so that a segment larger than a page, of before the program was attached, passes too.
#[xdp(frags)]
fn pq_drop(ctx: XdpContext) -> u32 {
    if is_lost(&ctx).is_some() {
        // A drop by XDP_DROP would be told to the kfree_skb tracepoint, and so to our probes. The wire tells nobody:
        // a redirect that fails frees the segment in silence (veth_xdp_rcv_skb, xdp_do_redirect).
        // SAFETY: the helper takes two numbers.
        return unsafe { bpf_redirect(NOWHERE, 0) } as u32;
    }
    xdp_action::XDP_PASS
}

/// Whether this segment is to be lost; if so, its record is stored.
#[inline(always)]
fn is_lost(ctx: &XdpContext) -> Option<()> {
    let order = ORDER.get_ptr(0)?;
    // SAFETY: a map's value, read member by member because user space may write it.
    let (wanted, round, payload_min, until, port) = unsafe {
        (
            (&raw const (*order).segment).read_volatile(),
            (&raw const (*order).round).read_volatile(),
            (&raw const (*order).payload_min).read_volatile(),
            (&raw const (*order).until).read_volatile(),
            (&raw const (*order).port).read_volatile(),
        )
    };
    if wanted == segment::NONE {
        return None;
    }
    let count = DROP_COUNT.get_ptr_mut(0)?;
    // SAFETY: a map's value; only this program writes it, and its runs do not overlap.
    let number = unsafe { *count };
    if number >= until {
        return None;
    }
    let mut dropped = parse(ctx)?;
    let of_port = port == 0 || port == dropped.source_port || port == dropped.destination_port;
    if dropped.segment != wanted || dropped.payload_bytes < payload_min || !of_port {
        return None;
    }
    let place = DROPS.get_ptr_mut(number)?;
    let ports = u32::from(dropped.source_port) << 16 | u32::from(dropped.destination_port);
    DROPPED_PORTS
        .insert([round, ports], 0, u64::from(BPF_NOEXIST))
        .ok()?;
    // SAFETY: a plain helper without arguments.
    dropped.at_ns = unsafe { bpf_ktime_get_ns() };
    // SAFETY: map values of these types. User space reads as many records as the count says, so it goes last.
    unsafe {
        place.write_volatile(dropped);
        count.write_volatile(number + 1);
    }
    Some(())
}

/// The segment's record but for its time, if it is TCP. IPv6 extension headers are not walked.
#[inline(always)]
fn parse(ctx: &XdpContext) -> Option<Dropped> {
    let ethernet: [u8; ETHERNET_BYTES] = read(ctx, 0)?;
    let (tcp_at, ip_payload_bytes) = match u16::from_be_bytes([ethernet[12], ethernet[13]]) {
        ETHERTYPE_IPV4 => {
            let header: [u8; 20] = read(ctx, ETHERNET_BYTES)?;
            if header[9] != PROTOCOL_TCP {
                return None;
            }
            let header_bytes = u32::from(header[0] & 0xf) * 4;
            let total = u32::from(u16::from_be_bytes([header[2], header[3]]));
            (
                ETHERNET_BYTES + header_bytes as usize,
                total.saturating_sub(header_bytes),
            )
        }
        ETHERTYPE_IPV6 => {
            let header: [u8; 8] = read(ctx, ETHERNET_BYTES)?;
            if header[6] != PROTOCOL_TCP {
                return None;
            }
            (
                ETHERNET_BYTES + IPV6_HEADER_BYTES,
                u32::from(u16::from_be_bytes([header[4], header[5]])),
            )
        }
        _ => return None,
    };
    let header: [u8; 14] = read(ctx, tcp_at)?;
    let payload_bytes = ip_payload_bytes.saturating_sub(u32::from(header[12] >> 4) * 4);
    Some(Dropped {
        at_ns: 0,
        sequence: u32::from_be_bytes([header[4], header[5], header[6], header[7]]),
        payload_bytes,
        source_port: u16::from_be_bytes([header[0], header[1]]),
        destination_port: u16::from_be_bytes([header[2], header[3]]),
        segment: segment_of(header[13], payload_bytes),
    })
}

#[inline(always)]
fn segment_of(flags: u8, payload_bytes: u32) -> u32 {
    match flags & (SYN | ACK | RST) {
        SYN => segment::SYN,
        flags if flags == SYN | ACK => segment::SYN_ACK,
        flags if flags & (SYN | RST) == 0 && payload_bytes > 0 => segment::DATA,
        _ => segment::NONE,
    }
}

/// Copies bytes of the frame; `None` where it ends before them.
#[inline(always)]
fn read<const BYTES: usize>(ctx: &XdpContext, offset: usize) -> Option<[u8; BYTES]> {
    let begin = ctx.data() + offset;
    if begin + BYTES > ctx.data_end() {
        return None;
    }
    // SAFETY: the frame holds these bytes; the verifier checks the comparison above.
    Some(unsafe { (begin as *const [u8; BYTES]).read() })
}
