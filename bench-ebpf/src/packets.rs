//! TCP segments at the border between stack and device, and drops.

use aya_ebpf::{macros::btf_tracepoint, programs::BtfTracePointContext};
use pqtail_common::{Packet, kind};

use crate::{
    emit::{emit, head},
    read::{field, pointer},
    settings::{offset, port_is_recorded},
};

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const PROTOCOL_TCP: u8 = 6;
const IPV6_HEADER_BYTES: u32 = 40;

/// `(sk_buff *skb)`: the segment is handed to the device's queueing discipline. Not `net_dev_start_xmit`, which comes when it
/// leaves that queue: the wait there would count as the sender's work.
#[btf_tracepoint(function = "net_dev_queue")]
fn net_dev_queue(ctx: BtfTracePointContext) -> i32 {
    let skb = ctx.arg(0);
    store(&ctx, kind::TRANSMIT, skb, network_header(skb), 0)
}

/// `(sk_buff *skb)`: `data` already points behind the link header, and `network_header` may not be set yet.
#[btf_tracepoint(function = "netif_receive_skb")]
fn netif_receive_skb(ctx: BtfTracePointContext) -> i32 {
    let skb = ctx.arg(0);
    store(&ctx, kind::RECEIVE, skb, pointer(skb, offset!(skb_data)), 0)
}

/// `(sk_buff *skb, void *location, enum skb_drop_reason reason, ...)`
#[btf_tracepoint(function = "kfree_skb")]
fn kfree_skb(ctx: BtfTracePointContext) -> i32 {
    let skb = ctx.arg(0);
    store(&ctx, kind::DROP, skb, network_header(skb), ctx.arg(2))
}

#[inline(always)]
fn network_header(skb: u64) -> Option<u64> {
    let head = pointer(skb, offset!(skb_head))?;
    Some(head + u64::from(field::<u16>(skb, offset!(skb_network_header))?))
}

#[inline(always)]
fn store(ctx: &BtfTracePointContext, kind: u8, skb: u64, ip: Option<u64>, reason: u32) -> i32 {
    if let Some(ip) = ip
        && let Some(mut packet) = parse(skb, ip)
    {
        packet.head = head(ctx, kind);
        packet.netns = device_netns(skb).unwrap_or(0);
        packet.reason = reason;
        emit(kind, &packet);
    }
    0
}

/// Addresses and TCP header, if this is a TCP segment of a recorded port. IPv6 extension headers are not walked.
#[inline(always)]
fn parse(skb: u64, ip: u64) -> Option<Packet> {
    let mut packet = Packet::default();
    let (tcp, ip_payload_bytes) = match u16::from_be(field(skb, offset!(skb_protocol))?) {
        ETHERTYPE_IPV4 => {
            let header: [u8; 20] = field(ip, 0)?;
            if header[0] >> 4 != 4 || header[9] != PROTOCOL_TCP {
                return None;
            }
            let header_bytes = u32::from(header[0] & 0xf) * 4;
            packet.ip_version = 4;
            packet.source = u32::from_ne_bytes([header[12], header[13], header[14], header[15]]);
            packet.destination = u32::from_ne_bytes([header[16], header[17], header[18], header[19]]);
            let total = u32::from(u16::from_be_bytes([header[2], header[3]]));
            (ip + u64::from(header_bytes), total.wrapping_sub(header_bytes))
        }
        ETHERTYPE_IPV6 => {
            let header: [u8; 8] = field(ip, 0)?;
            if header[0] >> 4 != 6 || header[6] != PROTOCOL_TCP {
                return None;
            }
            packet.ip_version = 6;
            packet.source = fold(field(ip, 8)?);
            packet.destination = fold(field(ip, 24)?);
            (
                ip + u64::from(IPV6_HEADER_BYTES),
                u32::from(u16::from_be_bytes([header[4], header[5]])),
            )
        }
        _ => return None,
    };
    let header: [u8; 16] = field(tcp, 0)?;
    packet.source_port = u16::from_be_bytes([header[0], header[1]]);
    packet.destination_port = u16::from_be_bytes([header[2], header[3]]);
    if !port_is_recorded(packet.source_port) && !port_is_recorded(packet.destination_port) {
        return None;
    }
    packet.sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    packet.acknowledgement = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
    packet.tcp_flags = header[13];
    packet.window = u16::from_be_bytes([header[14], header[15]]);
    packet.payload_bytes = ip_payload_bytes.saturating_sub(u32::from(header[12] >> 4) * 4);
    Some(packet)
}

/// An IPv6 address in the 32 bits that a record has for one.
#[inline(always)]
pub(crate) fn fold(words: [u32; 4]) -> u32 {
    words[0] ^ words[1] ^ words[2] ^ words[3]
}

#[inline(always)]
fn device_netns(skb: u64) -> Option<u32> {
    let device = pointer(skb, offset!(skb_dev))?;
    let net = pointer(device, offset!(device_net))?;
    field(net, offset!(net_inum))
}
