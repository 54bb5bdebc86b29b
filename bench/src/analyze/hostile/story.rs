//! Two hosts' records of whole requests, so that what is then broken was whole before.

use pqtail_common::{Head, Packet, Socket, Span, Switch, Wake, flag, kind};
use zerocopy::{Immutable, IntoBytes};

use super::{CLIENT, CLIENT_NETNS, SERVER, SERVER_NETNS};
use crate::{
    attribute::ledger::Side,
    record::stamps::{ConnectionStamps, Outcome, RequestStamps},
    timeline::cpu::Raw,
};

pub(super) const HOG: u32 = 300;
pub(super) const PORT: u16 = 8443;
pub(super) const SYN: u8 = 2;
pub(super) const ACK: u8 = 16;

/// What goes wrong in one request, ns; 0 for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fault {
    pub(super) queue_ns: u64,
    pub(super) softirq_ns: u64,
    pub(super) steal_ns: u64,
    pub(super) lost_hello_ns: u64,
    pub(super) delayed_ack_ns: u64,
}

impl Fault {
    const NS: u64 = 40_000_000;

    /// From five bits.
    pub(super) fn of(bits: u8) -> Self {
        let ns = |bit: u8| if bits >> bit & 1 == 1 { Self::NS } else { 0 };
        Self {
            queue_ns: ns(0),
            softirq_ns: ns(1),
            steal_ns: ns(2),
            lost_hello_ns: ns(3),
            delayed_ack_ns: ns(4),
        }
    }

    /// None, then each alone.
    pub(super) fn each() -> impl Iterator<Item = Self> {
        [0, 1, 2, 4, 8, 16].into_iter().map(Self::of)
    }
}

/// What has been recorded so far.
#[derive(Clone, Debug)]
pub(super) struct Story {
    /// Client clock, ns.
    pub(super) now: u64,
    /// Server clock minus client clock, ns.
    pub(super) shift: u64,
    pub(super) client: Vec<Raw>,
    pub(super) server: Vec<Raw>,
    pub(super) requests: Vec<RequestStamps>,
    pub(super) connections: Vec<ConnectionStamps>,
    /// The server's initial and next sequence numbers are far above.
    pub(super) sequence: u32,
    /// How many ports the client has.
    pub(super) ports: u16,
    steal_ns: u64,
    /// Current threads of client and server.
    current: [u32; 2],
}

impl Default for Story {
    fn default() -> Self {
        Self {
            now: 1_000_000_000,
            shift: 0,
            client: Vec::new(),
            server: Vec::new(),
            requests: Vec::new(),
            connections: Vec::new(),
            sequence: 7_000,
            ports: 3,
            steal_ns: 0,
            current: [0; 2],
        }
    }
}

pub(super) fn raw(record: &(impl IntoBytes + Immutable)) -> Raw {
    record.as_bytes().try_into().expect("a record's size")
}

impl Story {
    pub(super) fn pass(&mut self, ns: u64) -> u64 {
        self.now = self.now.wrapping_add(ns);
        self.now
    }

    fn server_now(&self) -> u64 {
        self.now.wrapping_add(self.shift)
    }

    pub(super) fn head(&self, side: Side, kind: u8) -> Head {
        let (at_ns, cpu) = match side {
            Side::Client => (self.now, 0),
            Side::Server => (self.server_now(), 1),
        };
        Head {
            at_ns,
            kind,
            flags: flag::STEAL_KNOWN,
            cpu,
            tid: self.current[side as usize],
        }
    }

    pub(super) fn store(&mut self, side: Side, record: &(impl IntoBytes + Immutable)) {
        match side {
            Side::Client => self.client.push(raw(record)),
            Side::Server => self.server.push(raw(record)),
        }
    }

    fn switch(&mut self, side: Side, to: u32, prev_state: u32) {
        let head = self.head(side, kind::SWITCH);
        self.current[side as usize] = to;
        let record = Switch {
            head,
            steal_ns: self.steal_ns,
            next_comm: *b"pqtail-thread\0\0\0",
            next_tid: to,
            prev_state,
            ..Switch::default()
        };
        self.store(side, &record);
    }

    fn wake(&mut self, side: Side, tid: u32) {
        let head = self.head(side, kind::WAKING);
        let record = Wake {
            head,
            steal_ns: self.steal_ns,
            target_tid: tid,
            target_cpu: u32::from(head.cpu),
            ..Wake::default()
        };
        self.store(side, &record);
    }

    pub(super) fn port(&self) -> u16 {
        40_000 + self.requests.len() as u16 % self.ports.max(1)
    }

    pub(super) fn packet(
        &mut self,
        side: Side,
        kind: u8,
        to_server: bool,
        tcp_flags: u8,
        offset: u32,
        payload_bytes: u32,
    ) {
        let (client, server) = ((1, self.port()), (2, PORT));
        let (source, destination) = if to_server {
            (client, server)
        } else {
            (server, client)
        };
        let netns = match side {
            Side::Client => CLIENT_NETNS,
            Side::Server => SERVER_NETNS,
        };
        let record = Packet {
            head: self.head(side, kind),
            netns,
            source: source.0,
            source_port: source.1,
            destination: destination.0,
            destination_port: destination.1,
            sequence: self.sequence.wrapping_add(offset),
            payload_bytes,
            tcp_flags,
            ..Packet::default()
        };
        self.store(side, &record);
    }

    pub(super) fn timer(&mut self, side: Side, kind: u8) {
        let (client, server) = ((1, self.port()), (2, PORT));
        let (local, remote, netns) = match side {
            Side::Client => (client, server, CLIENT_NETNS),
            Side::Server => (server, client, SERVER_NETNS),
        };
        let record = Socket {
            head: self.head(side, kind),
            netns,
            local: local.0,
            local_port: local.1,
            remote: remote.0,
            remote_port: remote.1,
            ..Socket::default()
        };
        self.store(side, &record);
    }

    /// A segment crosses.
    pub(super) fn cross(&mut self, to_server: bool, flags: u8, offset: u32, bytes: u32) {
        let (from, to) = if to_server {
            (Side::Client, Side::Server)
        } else {
            (Side::Server, Side::Client)
        };
        self.packet(from, kind::TRANSMIT, to_server, flags, offset, bytes);
        self.pass(2_000);
        self.packet(to, kind::RECEIVE, to_server, flags, offset, bytes);
    }

    pub(super) fn span(&mut self, side: Side, kind: u8, ns: u64, number: u32) {
        let start_ns = self.head(side, kind).at_ns;
        self.pass(ns);
        let record = Span {
            head: self.head(side, kind),
            steal_ns: self.steal_ns,
            start_ns,
            number,
            ..Span::default()
        };
        self.store(side, &record);
    }

    /// One whole request, with its fault.
    pub(super) fn request(&mut self, fault: Fault) {
        self.sequence = self.sequence.wrapping_add(100_000);
        let port = self.port();
        let mut request = RequestStamps {
            request: self.requests.len() as u32,
            worker_tid: CLIENT,
            local: 1,
            remote: 2,
            local_port: port,
            remote_port: PORT,
            outcome: Outcome::Ok as u8,
            intended_ns: self.now,
            ..RequestStamps::default()
        };
        let mut connection = ConnectionStamps {
            worker_tid: SERVER,
            local: 2,
            remote: 1,
            local_port: PORT,
            remote_port: port,
            ..ConnectionStamps::default()
        };
        self.pass(3_000);
        self.wake(Side::Client, CLIENT);
        self.pass(2_000);
        self.switch(Side::Client, CLIENT, 0);
        request.start_ns = self.pass(1_000);
        self.pass(10_000);
        self.cross(true, SYN, 0, 0);
        self.cross(false, SYN | ACK, 0, 0);
        request.connected_ns = self.pass(4_000);
        self.pass(50_000);
        if fault.lost_hello_ns > 0 {
            self.packet(Side::Client, kind::TRANSMIT, true, ACK, 1, 300);
            self.packet(Side::Client, kind::DROP, true, ACK, 1, 300);
            self.pass(fault.lost_hello_ns);
            self.timer(Side::Client, kind::WRITE_TIMER);
            self.timer(Side::Client, kind::RETRANSMIT);
        }
        self.cross(true, ACK, 1, 300);
        request.client_hello_written_ns = self.now;
        self.switch(Side::Client, 0, 1);
        self.wake(Side::Server, SERVER);
        if fault.queue_ns > 0 {
            self.switch(Side::Server, HOG, 0);
            self.pass(fault.queue_ns);
            self.switch(Side::Server, SERVER, 0);
        } else {
            self.pass(1_500);
            self.switch(Side::Server, SERVER, 0);
        }
        self.pass(2_000);
        connection.accepted_ns = self.server_now();
        self.pass(1_000);
        connection.first_byte_ns = self.server_now();
        if fault.softirq_ns > 0 {
            self.span(Side::Server, kind::SOFTIRQ, fault.softirq_ns, 3);
        }
        if fault.steal_ns > 0 {
            self.pass(fault.steal_ns);
            self.steal_ns = self.steal_ns.wrapping_add(fault.steal_ns);
            self.span(Side::Server, kind::VECTOR, 500, 236);
        }
        self.pass(80_000);
        connection.flight_written_ns = self.server_now();
        if fault.delayed_ack_ns > 0 {
            self.cross(false, ACK, 1, 600);
            self.pass(fault.delayed_ack_ns);
            self.timer(Side::Client, kind::DELAYED_ACK_TIMER);
            self.cross(true, ACK, 301, 0);
            self.cross(false, ACK, 601, 400);
        } else {
            self.cross(false, ACK, 1, 1_000);
        }
        self.switch(Side::Server, 0, 1);
        self.wake(Side::Client, CLIENT);
        self.pass(1_500);
        self.switch(Side::Client, CLIENT, 0);
        request.first_server_byte_ns = self.pass(1_000);
        request.handshake_done_ns = self.pass(90_000);
        self.cross(true, ACK, 301, 120);
        request.request_written_ns = self.now;
        self.switch(Side::Client, 0, 1);
        self.wake(Side::Server, SERVER);
        self.pass(1_500);
        self.switch(Side::Server, SERVER, 0);
        self.pass(1_000);
        connection.finished_read_ns = self.server_now();
        self.pass(20_000);
        connection.handshake_done_ns = self.server_now();
        connection.request_read_ns = connection.handshake_done_ns;
        self.pass(5_000);
        self.cross(false, ACK, 1_001, 90);
        connection.response_written_ns = self.server_now();
        self.switch(Side::Server, 0, 1);
        self.wake(Side::Client, CLIENT);
        self.pass(1_500);
        self.switch(Side::Client, CLIENT, 0);
        request.first_response_byte_ns = self.pass(1_000);
        request.done_ns = self.pass(2_000);
        request.closed_ns = self.pass(3_000);
        self.switch(Side::Client, 0, 1);
        self.pass(100_000);
        self.requests.push(request);
        self.connections.push(connection);
    }
}
