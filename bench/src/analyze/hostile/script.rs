//! A script: bytes as orders to a teller. Whole requests first, then anything at all, and changes of what was told, so that a
//! mutated byte means a changed story and seldom only noise.

use pqtail_common::{Head, Loss, Packet, RECORD_BYTES, Rename, Span, Switch, Wake, kind};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{
    analyze::told::{
        ACK, CLIENT, CLIENT_NETNS, Fault, HOG, PORT, SERVER, SERVER_NETNS, SYN, Story, manifest, raw,
    },
    attribute::ledger::Side,
    record::{
        manifest::Manifest,
        stamps::{ConnectionStamps, RequestStamps},
    },
    timeline::cpu::Raw,
};

/// A script tells no more than this, so that the time for one is bounded whatever it says. The tests of what takes how long with
/// the size are the ordinary ones.
const RECORDS_MAX: usize = 4_096;
const REQUESTS_MAX: usize = 128;

/// Orders, by the order byte modulo their number.
mod order {
    pub(super) const PASS: u8 = 0;
    pub(super) const REQUEST: u8 = 1;
    pub(super) const JUMP: u8 = 2;
    pub(super) const KERNEL: u8 = 3;
    pub(super) const KERNEL_RAW: u8 = 4;
    pub(super) const PACKET: u8 = 5;
    pub(super) const CROSS: u8 = 6;
    pub(super) const TIMER: u8 = 7;
    pub(super) const SPANS: u8 = 8;
    pub(super) const REQUEST_RAW: u8 = 9;
    pub(super) const CONNECTION_RAW: u8 = 10;
    pub(super) const CHANGE: u8 = 11;
    pub(super) const FORGET: u8 = 12;
    pub(super) const REPEAT: u8 = 13;
    pub(super) const PORTS: u8 = 14;
    pub(super) const SEQUENCE: u8 = 15;
    pub(super) const SHIFT: u8 = 16;
    pub(super) const COUNT: u8 = 17;
}

/// Times at which something may break.
const EDGES: [u64; 10] = [
    0,
    1,
    u64::MAX,
    u64::MAX - 1,
    1 << 63,
    (1 << 63) - 1,
    1 << 62,
    (1 << 62) - 1,
    1 << 53,
    1_000_000_000,
];

/// What is left of the bytes; behind their end there are zeros.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = N.min(self.0.len());
        let (now, rest) = self.0.split_at(taken);
        bytes[..taken].copy_from_slice(now);
        self.0 = rest;
        bytes
    }

    fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// Some ns: a byte for the magnitude, one for the value.
    fn ns(&mut self) -> u64 {
        let [shift, value] = self.bytes();
        u64::from(value) << (shift % 56)
    }

    fn side(&mut self) -> Side {
        if self.u8().is_multiple_of(2) {
            Side::Client
        } else {
            Side::Server
        }
    }

    /// A time, most often near the given one.
    fn time(&mut self, now: u64) -> u64 {
        match self.u8() % 8 {
            0..=3 => now.wrapping_add(self.ns()),
            4 | 5 => now.wrapping_sub(self.ns()),
            6 => EDGES[usize::from(self.u8()) % EDGES.len()],
            _ => self.u64(),
        }
    }

    fn tid(&mut self) -> u32 {
        match self.u8() % 6 {
            0 => 0,
            1 => CLIENT,
            2 => SERVER,
            3 => HOG,
            4 => CLIENT + 1,
            _ => self.u32(),
        }
    }

    fn cpu(&mut self) -> u16 {
        match self.u8() % 8 {
            7 => self.u16(),
            few => u16::from(few / 2),
        }
    }

    fn port(&mut self, story: &Story) -> u16 {
        match self.u8() % 6 {
            0 | 1 => PORT,
            2 | 3 => story.port(),
            4 => 0,
            _ => self.u16(),
        }
    }

    fn netns(&mut self) -> u32 {
        match self.u8() % 8 {
            0..=2 => CLIENT_NETNS,
            3..=5 => SERVER_NETNS,
            6 => 0,
            _ => self.u32(),
        }
    }

    fn offset(&mut self) -> u32 {
        match self.u8() % 4 {
            0 => u32::from(self.u8()),
            1 => u32::from(self.u16()),
            2 => u32::MAX - u32::from(self.u8()),
            _ => self.u32(),
        }
    }
}

/// Does what the bytes say.
pub(super) fn play(bytes: &[u8]) -> (Manifest, Story) {
    let mut source = Source(bytes);
    let mut run = manifest();
    let facts = source.u8();
    if facts & 1 != 0 {
        run.server.kernel.clone_from(&run.client.kernel);
    }
    if facts & 2 != 0 {
        run.server.kernel = None;
    }
    if facts & 4 != 0 {
        run.client.kernel = None;
    }
    if facts & 8 != 0 {
        run.client.threads.extend([CLIENT + 1, SERVER, 0]);
        run.client.cpus.extend([0, u32::MAX]);
    }
    if facts & 16 != 0 {
        run.server.netns = run.client.netns;
    }
    if facts & 32 != 0 {
        run.client.cpus.clear();
        run.server.threads.clear();
    }
    let mut story = Story::default();
    while !source.0.is_empty()
        && story.client.len() + story.server.len() < RECORDS_MAX
        && story.requests.len() < REQUESTS_MAX
    {
        obey(&mut source, &mut story);
    }
    (run, story)
}

fn obey(source: &mut Source<'_>, story: &mut Story) {
    match source.u8() % order::COUNT {
        order::PASS => {
            let ns = source.ns();
            story.pass(ns);
        }
        order::REQUEST => story.request(Fault::of(source.u8())),
        order::JUMP => story.now = source.time(story.now),
        order::KERNEL => kernel(source, story),
        order::KERNEL_RAW => {
            let (side, record) = (source.side(), source.bytes::<RECORD_BYTES>());
            story.store(side, &record);
        }
        order::PACKET => packet(source, story),
        order::CROSS => {
            let (direction, flags) = (source.u8().is_multiple_of(2), flags(source));
            let (offset, bytes) = (source.offset(), u32::from(source.u16()));
            story.cross(direction, flags, offset, bytes);
        }
        order::TIMER => {
            let (side, kind) = (source.side(), kind::STATE + source.u8() % 7);
            story.timer(side, kind);
        }
        order::SPANS => {
            let (side, kind, count) = (source.side(), kind::IRQ + source.u8() % 3, source.u8());
            let (ns, back) = (source.ns(), source.ns());
            for number in 0..count {
                story.span(side, kind, ns, u32::from(number));
                story.now = story.now.wrapping_sub(back);
            }
        }
        order::REQUEST_RAW => request(source, story),
        order::CONNECTION_RAW => connection(source, story),
        order::CHANGE => change(source, story),
        order::FORGET => forget(source, story),
        order::REPEAT => repeat(source, story),
        order::PORTS => story.ports = 1 + source.u16() % 5,
        order::SEQUENCE => story.sequence = source.offset(),
        order::SHIFT => story.shift = source.time(0),
        _ => unreachable!("every order is there"),
    }
}

fn flags(source: &mut Source<'_>) -> u8 {
    match source.u8() % 4 {
        0 => SYN,
        1 => SYN | ACK,
        2 => ACK,
        _ => source.u8(),
    }
}

/// A scheduler, interrupt, loss or naming record of any content.
fn kernel(source: &mut Source<'_>, story: &mut Story) {
    let side = source.side();
    let now = story.head(side, 0).at_ns;
    let head = Head {
        at_ns: source.time(now),
        kind: source.u8() % 21,
        flags: source.u8(),
        cpu: source.cpu(),
        tid: source.tid(),
    };
    let steal_ns = source.time(0);
    let record: Raw = match head.kind {
        kind::SWITCH => raw(&Switch {
            head,
            steal_ns,
            next_tid: source.tid(),
            prev_state: u32::from(source.u8()),
            ..Switch::default()
        }),
        kind::WAKING | kind::WAKEUP | kind::MIGRATE => raw(&Wake {
            head,
            steal_ns,
            target_tid: source.tid(),
            target_cpu: u32::from(source.cpu()),
            ..Wake::default()
        }),
        kind::RENAME => raw(&Rename {
            head,
            comm: source.bytes(),
            target_tid: source.tid(),
            ..Rename::default()
        }),
        // LOSS is far from the others.
        20 => raw(&Loss {
            head: Head {
                kind: kind::LOSS,
                ..head
            },
            start_ns: source.time(now),
            count: source.u64(),
            ..Loss::default()
        }),
        _ => raw(&Span {
            head,
            steal_ns,
            start_ns: source.time(now),
            number: source.u32(),
            ..Span::default()
        }),
    };
    story.store(side, &record);
}

fn packet(source: &mut Source<'_>, story: &mut Story) {
    let side = source.side();
    let kind = kind::TRANSMIT + source.u8() % 3;
    let record = Packet {
        head: Head {
            cpu: source.cpu(),
            ..story.head(side, kind)
        },
        netns: source.netns(),
        source: 1 + u32::from(source.u8() % 3),
        destination: 1 + u32::from(source.u8() % 3),
        source_port: source.port(story),
        destination_port: source.port(story),
        sequence: story.sequence.wrapping_add(source.offset()),
        payload_bytes: source.offset(),
        tcp_flags: flags(source),
        reason: u32::from(source.u8()),
        ..Packet::default()
    };
    story.store(side, &record);
}

fn request(source: &mut Source<'_>, story: &mut Story) {
    let mut stamps = match (story.requests.last(), source.u8() % 4) {
        (Some(last), 0..=2) => *last,
        (None, 0..=2) => RequestStamps::default(),
        _ => RequestStamps::read_from_bytes(&source.bytes::<120>()).unwrap_or_default(),
    };
    let now = story.now;
    let fields = source.u16();
    let mut at = now;
    for (bit, field) in [
        &mut stamps.intended_ns,
        &mut stamps.start_ns,
        &mut stamps.connected_ns,
        &mut stamps.client_hello_written_ns,
        &mut stamps.first_server_byte_ns,
        &mut stamps.handshake_done_ns,
        &mut stamps.request_written_ns,
        &mut stamps.first_response_byte_ns,
        &mut stamps.done_ns,
        &mut stamps.closed_ns,
    ]
    .into_iter()
    .enumerate()
    {
        if fields >> bit & 1 == 1 {
            at = source.time(at);
            *field = at;
        }
    }
    if fields >> 10 & 1 == 1 {
        stamps.request = u32::from(source.u8());
    }
    if fields >> 11 & 1 == 1 {
        stamps.worker_tid = source.tid();
    }
    if fields >> 12 & 1 == 1 {
        stamps.local_port = source.port(story);
        stamps.remote_port = source.port(story);
    }
    if fields >> 13 & 1 == 1 {
        stamps.outcome = source.u8() % 12;
    }
    story.requests.push(stamps);
}

fn connection(source: &mut Source<'_>, story: &mut Story) {
    let mut stamps = match (story.connections.last(), source.u8() % 4) {
        (Some(last), 0..=2) => *last,
        (None, 0..=2) => ConnectionStamps::default(),
        _ => ConnectionStamps::read_from_bytes(&source.bytes::<96>()).unwrap_or_default(),
    };
    let fields = source.u16();
    let mut at = story.head(Side::Server, 0).at_ns;
    for (bit, field) in [
        &mut stamps.accepted_ns,
        &mut stamps.first_byte_ns,
        &mut stamps.flight_written_ns,
        &mut stamps.finished_read_ns,
        &mut stamps.response_written_ns,
    ]
    .into_iter()
    .enumerate()
    {
        if fields >> bit & 1 == 1 {
            at = source.time(at);
            *field = at;
        }
    }
    if fields >> 5 & 1 == 1 {
        stamps.worker_tid = source.tid();
    }
    if fields >> 6 & 1 == 1 {
        stamps.remote_port = source.port(story);
    }
    story.connections.push(stamps);
}

/// Overwrites a part of one record.
fn change(source: &mut Source<'_>, story: &mut Story) {
    let (list, index, place) = (source.u8() % 4, usize::from(source.u16()), source.u8());
    fn nth<T>(list: &mut [T], index: usize) -> Option<&mut T> {
        let length = list.len();
        list.get_mut(index.checked_rem(length)?)
    }
    let bytes = match list {
        0 => nth(&mut story.client, index).map(|each| &mut each[..]),
        1 => nth(&mut story.server, index).map(|each| &mut each[..]),
        2 => nth(&mut story.requests, index).map(RequestStamps::as_mut_bytes),
        _ => nth(&mut story.connections, index).map(ConnectionStamps::as_mut_bytes),
    };
    let Some(bytes) = bytes else { return };
    // A whole word, aligned, or one byte.
    if place < 128 {
        let word = usize::from(place) % (bytes.len() / 8) * 8;
        let word = &mut bytes[word..word + 8];
        let now = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        word.copy_from_slice(&source.time(now).to_le_bytes());
    } else {
        let place = usize::from(place) % bytes.len();
        bytes[place] = source.u8();
    }
}

fn forget(source: &mut Source<'_>, story: &mut Story) {
    let (list, index, count) = (
        source.u8() % 4,
        usize::from(source.u16()),
        1 + usize::from(source.u8() % 8),
    );
    fn cut<T>(list: &mut Vec<T>, index: usize, count: usize) {
        let begin = index.checked_rem(list.len()).unwrap_or(0);
        list.drain(begin..list.len().min(begin + count));
    }
    match list {
        0 => cut(&mut story.client, index, count),
        1 => cut(&mut story.server, index, count),
        2 => cut(&mut story.requests, index, count),
        _ => cut(&mut story.connections, index, count),
    }
}

/// Kernel records once more, at other times, perhaps on the other machine.
fn repeat(source: &mut Source<'_>, story: &mut Story) {
    let (from, to) = (source.side(), source.side());
    let (index, count, ns) = (usize::from(source.u16()), usize::from(source.u8()), source.ns());
    let list = match from {
        Side::Client => &story.client,
        Side::Server => &story.server,
    };
    let begin = index.checked_rem(list.len()).unwrap_or(0);
    let copies = list[begin..list.len().min(begin + count)].to_vec();
    for mut record in copies {
        let at = u64::from_le_bytes(record[..8].try_into().expect("8 bytes"));
        record[..8].copy_from_slice(&at.wrapping_add(ns).to_le_bytes());
        story.store(to, &record);
    }
}

/// Scripts to begin with.
pub(super) fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for facts in [0, 1, 2, 4, 8, 16, 32] {
        let mut script = vec![facts];
        for bits in [0, 1, 2, 4, 8, 16, 31] {
            script.extend([order::REQUEST, bits]);
        }
        seeds.push((format!("requests-{facts}"), script));
    }
    let two = [0, order::REQUEST, 0, order::REQUEST, 8];
    // Each order once behind two requests, with operands that differ.
    for order in 0..order::COUNT {
        for operands in [0u8, 0x29, 0x5e] {
            let mut script = two.to_vec();
            script.push(order);
            script.extend((0..24).map(|place| operands.wrapping_mul(place).wrapping_add(place)));
            script.extend([order::REQUEST, 16]);
            seeds.push((format!("order-{order}-{operands}"), script));
        }
    }
    seeds
}
