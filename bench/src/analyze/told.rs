//! Trials told event by event, as two hosts would record them: what happened is known, so what must be found is too, and what
//! is then broken was whole before.

use std::{collections::BTreeMap, path::PathBuf};

use pqtail_common::{Head, Packet, Socket, Span, Switch, Wake, flag, kind, pending};
use zerocopy::{Immutable, IntoBytes};

use super::Recorded;
use crate::{
    attribute::ledger::Side,
    plan::{Arm, Arrivals, Plan, Trial},
    record::{
        SCHEMA,
        manifest::{Host, Manifest, Status},
        stamps::{ConnectionStamps, Outcome, RequestStamps},
    },
    timeline::cpu::Raw,
};

pub(super) const CLIENT: u32 = 100;
pub(super) const SERVER: u32 = 200;
pub(super) const CLIENT_NETNS: u32 = 10;
pub(super) const SERVER_NETNS: u32 = 20;

pub(super) const HOG: u32 = 300;
pub(super) const PORT: u16 = 8443;
pub(super) const SYN: u8 = 2;
pub(super) const ACK: u8 = 16;

/// What goes wrong in one request, ns; 0 for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fault {
    /// The server's thread is runnable this long while the hog runs.
    pub(super) server_queue_ns: u64,
    /// A softirq takes this from the server's thread while it computes.
    pub(super) server_softirq_ns: u64,
    /// The hypervisor takes this from the server's CPU while it computes.
    pub(super) server_steal_ns: u64,
    /// The ClientHello is lost and sent again this much later.
    pub(super) lost_hello_ns: u64,
    /// The rest of the server's flight is held back this long, until the client's delayed ACK.
    pub(super) delayed_ack_ns: u64,
    /// The client's thread sleeps this long in the middle of the handshake.
    pub(super) client_blocked_ns: u64,
    /// The server's thread is stopped this long when the ClientHello arrives.
    pub(super) server_stopped_ns: u64,
}

impl Fault {
    const NS: u64 = 40_000_000;

    /// From seven bits.
    pub(super) fn of(bits: u8) -> Self {
        let ns = |bit: u8| if bits >> bit & 1 == 1 { Self::NS } else { 0 };
        Self {
            server_queue_ns: ns(0),
            server_softirq_ns: ns(1),
            server_steal_ns: ns(2),
            lost_hello_ns: ns(3),
            delayed_ack_ns: ns(4),
            client_blocked_ns: ns(5),
            server_stopped_ns: ns(6),
        }
    }

    /// None, then each alone.
    pub(super) fn each() -> impl Iterator<Item = Self> {
        [0, 1, 2, 4, 8, 16, 32, 64].into_iter().map(Self::of)
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
            steal_ns: 5_000_000,
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

    /// The counter of the side's CPU; only the server's is ever taken away.
    fn steal(&self, side: Side) -> u64 {
        match side {
            Side::Client => 0,
            Side::Server => self.steal_ns,
        }
    }

    fn switch(&mut self, side: Side, to: u32, prev_state: u32) {
        let head = self.head(side, kind::SWITCH);
        self.current[side as usize] = to;
        let mut next_comm = [0; 16];
        next_comm[..3].copy_from_slice(if to == HOG { b"hog" } else { b"pqt" });
        let record = Switch {
            head,
            steal_ns: self.steal(side),
            next_comm,
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
            steal_ns: self.steal(side),
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
            // Both ends begin with the same number.
            acknowledgement: self.sequence.wrapping_add(1),
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
            pending: if kind == kind::WRITE_TIMER {
                pending::RETRANSMIT
            } else {
                0
            },
            ..Socket::default()
        };
        self.store(side, &record);
    }

    /// A segment crosses in 2 us.
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
            steal_ns: self.steal(side),
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
        self.pass(1_000);
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
        if fault.server_stopped_ns > 0 {
            // It was stopped as it woke: on its CPU for an instant, then off with the stopped state.
            self.wake(Side::Server, SERVER);
            self.switch(Side::Server, SERVER, 0);
            self.pass(1);
            self.switch(Side::Server, 0, 4);
            self.pass(fault.server_stopped_ns);
        }
        self.pass(1_000);
        self.wake(Side::Server, SERVER);
        if fault.server_queue_ns > 0 {
            self.switch(Side::Server, HOG, 0);
            self.pass(fault.server_queue_ns);
            self.switch(Side::Server, SERVER, 0);
        } else {
            self.pass(1_500);
            self.switch(Side::Server, SERVER, 0);
        }
        self.pass(2_000);
        connection.accepted_ns = self.server_now();
        self.pass(1_000);
        connection.first_byte_ns = self.server_now();
        self.pass(60_000);
        if fault.server_softirq_ns > 0 {
            self.span(Side::Server, kind::SOFTIRQ, fault.server_softirq_ns, 3);
        }
        if fault.server_steal_ns > 0 {
            self.pass(fault.server_steal_ns);
            self.steal_ns = self.steal_ns.wrapping_add(fault.server_steal_ns);
            // The counter is seen 500 ns after the return, so the stolen time ends there.
            self.span(Side::Server, kind::VECTOR, 500, 236);
        }
        self.pass(20_000);
        if fault.delayed_ack_ns > 0 {
            self.cross(false, ACK, 1, 600);
            connection.flight_written_ns = self.server_now();
            self.pass(fault.delayed_ack_ns);
            self.timer(Side::Client, kind::DELAYED_ACK_TIMER);
            self.cross(true, ACK, 301, 0);
            self.cross(false, ACK, 601, 400);
        } else {
            self.cross(false, ACK, 1, 1_000);
            connection.flight_written_ns = self.server_now();
        }
        self.switch(Side::Server, 0, 1);
        self.pass(500);
        self.wake(Side::Client, CLIENT);
        self.pass(1_500);
        self.switch(Side::Client, CLIENT, 0);
        request.first_server_byte_ns = self.pass(1_000);
        self.pass(30_000);
        if fault.client_blocked_ns > 0 {
            self.switch(Side::Client, 0, 2);
            self.pass(fault.client_blocked_ns);
            self.wake(Side::Client, CLIENT);
            self.switch(Side::Client, CLIENT, 0);
        }
        request.handshake_done_ns = self.pass(60_000);
        self.pass(5_000);
        self.cross(true, ACK, 301, 120);
        request.request_written_ns = self.now;
        self.switch(Side::Client, 0, 1);
        self.pass(500);
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
        self.pass(500);
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

    /// As a trial's recordings are taken in.
    pub(super) fn recorded(&self, manifest: &Manifest, trial: Trial) -> Recorded {
        let mut kernels: BTreeMap<PathBuf, Vec<Raw>> = BTreeMap::new();
        for (host, records) in [(&manifest.client, &self.client), (&manifest.server, &self.server)] {
            if let Some(folder) = &host.kernel {
                kernels.entry(folder.clone()).or_default().extend(records);
            }
        }
        let recorded = Recorded {
            trial,
            requests: self.requests.clone(),
            connections: self.connections.clone(),
            kernels,
            missing: BTreeMap::new(),
            damaged: BTreeMap::new(),
        };
        recorded.tidy(manifest)
    }
}

/// The trial that stories tell of.
pub(super) const TRIAL: Trial = Trial {
    index: 0,
    block: 0,
    condition: 0,
    arm: Arm::X25519,
    seed: 1,
};

/// The run that stories belong to: two machines, a thread each.
pub(super) fn manifest() -> Manifest {
    let host = |netns, thread, cpu, name: &str| Host {
        netns,
        threads: vec![thread],
        cpus: vec![cpu],
        stamps: PathBuf::from("raw").join(name),
        kernel: Some(PathBuf::from("raw").join(name)),
        ..Host::default()
    };
    Manifest {
        schema: SCHEMA,
        pqtail: crate::VERSION.to_owned(),
        begun: "2026-12-02T00:00:00Z".to_owned(),
        plan: Plan {
            scenario: "told".to_owned(),
            arms: vec![Arm::X25519, Arm::X25519mlkem768],
            trials_per_arm: 1,
            rate_hz: 100.0,
            duration_ns: 1_000_000_000,
            warmup_ns: 0,
            arrivals: Arrivals::Constant,
            seed: 1,
            timeout_ns: 1_000_000_000,
            probes: true,
            conditions: crate::plan::nothing_varied(),
            highest_quantile: crate::plan::usual_quantile(),
            first_stage: None,
        },
        status: Status::Complete,
        client: host(CLIENT_NETNS, CLIENT, 0, "client"),
        server: host(SERVER_NETNS, SERVER, 1, "server"),
        trials: Vec::new(),
        steal_share_max: None,
        set_aside: Vec::new(),
    }
}
