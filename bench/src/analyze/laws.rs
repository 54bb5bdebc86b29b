//! The laws of the attribution, over trials that are told event by event: what happened is known, so what must be found is too.

use std::{collections::BTreeMap, path::PathBuf};

use pqtail_common::{Head, Loss, Packet, Span, Switch, Wake, flag, kind};
use proptest::prelude::*;
use zerocopy::{Immutable, IntoBytes};

use super::{Recorded, in_order, trial};
use crate::{
    attribute::ledger::{Ledger, Line, Segment, Side, ThreadLine},
    plan::{Arm, Arrivals, Plan, Trial},
    record::{
        SCHEMA,
        manifest::{Host, Manifest, Status},
        stamps::{ConnectionStamps, Outcome, RequestStamps},
    },
    timeline::cpu::Raw,
};

const CLIENT: u32 = 100;
const SERVER: u32 = 200;
const HOG: u32 = 300;
const CLIENT_NETNS: u32 = 10;
const SERVER_NETNS: u32 = 20;
const PORT: u16 = 8443;
const SYN: u8 = 2;
const ACK: u8 = 16;

/// What goes wrong in one request, ns.
#[derive(Clone, Copy, Debug, Default)]
struct Fault {
    /// The server's thread is runnable this long while the hog runs.
    server_queue_ns: u64,
    /// A softirq takes this from the server's thread while it computes.
    server_softirq_ns: u64,
    /// The hypervisor takes this from the server's CPU while it computes.
    server_steal_ns: u64,
    /// The ClientHello is lost and sent again this much later.
    lost_hello_ns: u64,
    /// The client's thread sleeps this long in the middle of the handshake.
    client_blocked_ns: u64,
    /// The server's thread is stopped this long when the ClientHello arrives.
    server_stopped_ns: u64,
}

/// Both hosts' recordings as they grow. The server's clock may be shifted.
struct Teller {
    now: u64,
    shift: u64,
    client: Vec<Raw>,
    server: Vec<Raw>,
    requests: Vec<RequestStamps>,
    connections: Vec<ConnectionStamps>,
    steal_ns: u64,
    sequence: u32,
    /// Current threads of client and server.
    current: [u32; 2],
}

fn raw(record: &(impl IntoBytes + Immutable)) -> Raw {
    record.as_bytes().try_into().expect("a record's size")
}

impl Teller {
    fn new(shift: u64) -> Self {
        Self {
            now: 1_000_000_000,
            shift,
            client: Vec::new(),
            server: Vec::new(),
            requests: Vec::new(),
            connections: Vec::new(),
            steal_ns: 5_000_000,
            sequence: 7_000,
            current: [0; 2],
        }
    }

    fn pass(&mut self, ns: u64) -> u64 {
        self.now += ns;
        self.now
    }

    fn head(&self, side: Side, kind: u8) -> Head {
        let tid = self.current[side as usize];
        let (cpu, shift) = match side {
            Side::Client => (0, 0),
            Side::Server => (1, self.shift),
        };
        Head {
            at_ns: self.now + shift,
            kind,
            flags: flag::STEAL_KNOWN,
            cpu,
            tid,
        }
    }

    fn store(&mut self, side: Side, record: Raw) {
        match side {
            Side::Client => self.client.push(record),
            Side::Server => self.server.push(record),
        }
    }

    fn steal(&self, side: Side) -> u64 {
        if side == Side::Server { self.steal_ns } else { 0 }
    }

    fn switch(&mut self, side: Side, from: u32, to: u32, prev_state: u32) {
        let mut next_comm = [0; 16];
        next_comm[..3].copy_from_slice(if to == HOG { b"hog" } else { b"pqt" });
        assert_eq!(self.current[side as usize], from, "the story contradicts itself");
        let head = self.head(side, kind::SWITCH);
        self.current[side as usize] = to;
        let steal_ns = self.steal(side);
        let record = Switch {
            head,
            steal_ns,
            next_comm,
            next_tid: to,
            prev_state,
            ..Switch::default()
        };
        self.store(side, raw(&record));
    }

    fn wake(&mut self, side: Side, tid: u32) {
        let head = self.head(side, kind::WAKING);
        let steal_ns = self.steal(side);
        let target_cpu = u32::from(head.cpu);
        self.store(
            side,
            raw(&Wake {
                head,
                steal_ns,
                target_tid: tid,
                target_cpu,
                ..Wake::default()
            }),
        );
    }

    fn packet(&mut self, side: Side, kind: u8, to_server: bool, flags: u8, offset: u32, payload_bytes: u32) {
        let client_port = self.port();
        let (source_port, destination_port) = if to_server {
            (client_port, PORT)
        } else {
            (PORT, client_port)
        };
        let (source, destination) = if to_server { (1, 2) } else { (2, 1) };
        let netns = if side == Side::Client {
            CLIENT_NETNS
        } else {
            SERVER_NETNS
        };
        let packet = Packet {
            head: self.head(side, kind),
            netns,
            source,
            destination,
            source_port,
            destination_port,
            sequence: self.sequence.wrapping_add(offset),
            // Both ends begin with the same number here.
            acknowledgement: self.sequence.wrapping_add(1),
            payload_bytes,
            tcp_flags: flags,
            ..Packet::default()
        };
        self.store(side, raw(&packet));
    }

    fn port(&self) -> u16 {
        40_000 + (self.requests.len() % 3) as u16
    }

    /// A segment crosses in 2 us.
    fn cross(&mut self, to_server: bool, flags: u8, offset: u32, bytes: u32) {
        let (from, to) = if to_server {
            (Side::Client, Side::Server)
        } else {
            (Side::Server, Side::Client)
        };
        self.packet(from, kind::TRANSMIT, to_server, flags, offset, bytes);
        self.pass(2_000);
        self.packet(to, kind::RECEIVE, to_server, flags, offset, bytes);
    }

    /// One whole request, with its fault.
    fn request(&mut self, fault: Fault) {
        let port = self.port();
        self.sequence = self.sequence.wrapping_add(100_000);
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
        let shift = self.shift;
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
        self.switch(Side::Client, 0, CLIENT, 0);
        request.start_ns = self.pass(1_000);
        self.pass(10_000);
        self.cross(true, SYN, 0, 0);
        self.pass(1_000);
        self.cross(false, SYN | ACK, 0, 0);
        request.connected_ns = self.pass(4_000);
        self.pass(50_000);
        if fault.lost_hello_ns > 0 {
            self.packet(Side::Client, kind::TRANSMIT, true, ACK, 1, 300);
            self.pass(fault.lost_hello_ns);
        }
        self.cross(true, ACK, 1, 300);
        request.client_hello_written_ns = self.now;
        self.switch(Side::Client, CLIENT, 0, 1);
        if fault.server_stopped_ns > 0 {
            // It was stopped as it woke: on its CPU for an instant, then off with the stopped state.
            self.wake(Side::Server, SERVER);
            self.switch(Side::Server, 0, SERVER, 0);
            self.pass(1);
            self.switch(Side::Server, SERVER, 0, 4);
            self.pass(fault.server_stopped_ns);
        }
        self.pass(1_000);
        self.wake(Side::Server, SERVER);
        if fault.server_queue_ns > 0 {
            self.switch(Side::Server, 0, HOG, 0);
            self.pass(fault.server_queue_ns);
            self.switch(Side::Server, HOG, SERVER, 0);
        } else {
            self.pass(1_500);
            self.switch(Side::Server, 0, SERVER, 0);
        }
        connection.accepted_ns = self.pass(2_000) + shift;
        connection.first_byte_ns = self.pass(1_000) + shift;
        self.pass(60_000);
        if fault.server_softirq_ns > 0 {
            let start_ns = self.now + shift;
            self.pass(fault.server_softirq_ns);
            let head = self.head(Side::Server, kind::SOFTIRQ);
            let steal_ns = self.steal_ns;
            self.store(
                Side::Server,
                raw(&Span {
                    head,
                    steal_ns,
                    start_ns,
                    number: 3,
                    ..Span::default()
                }),
            );
        }
        if fault.server_steal_ns > 0 {
            self.pass(fault.server_steal_ns);
            self.steal_ns += fault.server_steal_ns;
            let start_ns = self.now + shift;
            self.pass(500);
            let head = self.head(Side::Server, kind::VECTOR);
            // The counter is seen 500 ns after the return, so the stolen time ends there.
            let steal_ns = self.steal_ns;
            self.store(
                Side::Server,
                raw(&Span {
                    head,
                    steal_ns,
                    start_ns,
                    number: 236,
                    ..Span::default()
                }),
            );
        }
        self.pass(20_000);
        self.cross(false, ACK, 1, 1_000);
        connection.flight_written_ns = self.now + shift;
        self.switch(Side::Server, SERVER, 0, 1);
        self.pass(500);
        self.wake(Side::Client, CLIENT);
        self.pass(1_500);
        self.switch(Side::Client, 0, CLIENT, 0);
        request.first_server_byte_ns = self.pass(1_000);
        self.pass(30_000);
        if fault.client_blocked_ns > 0 {
            self.switch(Side::Client, CLIENT, 0, 2);
            self.pass(fault.client_blocked_ns);
            self.wake(Side::Client, CLIENT);
            self.switch(Side::Client, 0, CLIENT, 0);
        }
        request.handshake_done_ns = self.pass(60_000);
        self.pass(5_000);
        self.cross(true, ACK, 301, 120);
        request.request_written_ns = self.now;
        self.switch(Side::Client, CLIENT, 0, 1);
        self.pass(500);
        self.wake(Side::Server, SERVER);
        self.pass(1_500);
        self.switch(Side::Server, 0, SERVER, 0);
        connection.finished_read_ns = self.pass(1_000) + shift;
        connection.handshake_done_ns = self.pass(20_000) + shift;
        connection.request_read_ns = self.now + shift;
        self.pass(5_000);
        self.cross(false, ACK, 1_001, 90);
        connection.response_written_ns = self.now + shift;
        self.switch(Side::Server, SERVER, 0, 1);
        self.pass(500);
        self.wake(Side::Client, CLIENT);
        self.pass(1_500);
        self.switch(Side::Client, 0, CLIENT, 0);
        request.first_response_byte_ns = self.pass(1_000);
        request.done_ns = self.pass(2_000);
        request.closed_ns = self.pass(3_000);
        self.switch(Side::Client, CLIENT, 0, 1);
        self.pass(100_000);
        self.requests.push(request);
        self.connections.push(connection);
    }

    fn ledgers(self) -> Vec<Ledger> {
        ledgers(self.client, self.server, self.requests, self.connections)
    }
}

fn manifest() -> Manifest {
    let host = |netns, thread, cpu, name: &str| Host {
        netns,
        threads: vec![thread],
        cpus: vec![cpu],
        kernel: Some(PathBuf::from(name)),
        ..Host::default()
    };
    Manifest {
        schema: SCHEMA,
        pqtail: crate::VERSION.to_owned(),
        begun: String::new(),
        plan: Plan {
            scenario: "laws".to_owned(),
            arms: vec![Arm::X25519],
            trials_per_arm: 1,
            rate_hz: 100.0,
            duration_ns: 1_000_000_000,
            warmup_ns: 0,
            arrivals: Arrivals::Constant,
            seed: 1,
            timeout_ns: 1_000_000_000,
            probes: true,
        },
        status: Status::Complete,
        client: host(CLIENT_NETNS, CLIENT, 0, "client"),
        server: host(SERVER_NETNS, SERVER, 1, "server"),
        trials: Vec::new(),
    }
}

fn ledgers(
    client: Vec<Raw>,
    server: Vec<Raw>,
    requests: Vec<RequestStamps>,
    connections: Vec<ConnectionStamps>,
) -> Vec<Ledger> {
    let manifest = manifest();
    let kernels = BTreeMap::from([
        (PathBuf::from("client"), in_order(client)),
        (PathBuf::from("server"), in_order(server)),
    ]);
    let recorded = Recorded {
        trial: Trial {
            index: 0,
            block: 0,
            arm: Arm::X25519,
            seed: 1,
        },
        requests,
        connections,
        kernels,
        missing: BTreeMap::new(),
        damaged: BTreeMap::new(),
    };
    let analysis = trial::analyze(&manifest, recorded);
    analysis
        .rows
        .iter()
        .map(|row| {
            let ledger = row.ledger.expect("every request of the story ends well");
            assert_eq!(
                Some(ledger.total_ns()),
                row.stamps.latency_ns(),
                "the ledger sums to the latency"
            );
            ledger
        })
        .collect()
}

fn server(line: ThreadLine) -> Line {
    Line::Thread(Side::Server, line)
}

#[test]
fn a_clean_request_blames_nobody_and_leaves_little_unexplained() {
    let mut teller = Teller::new(0);
    for _ in 0..5 {
        teller.request(Fault::default());
    }
    for ledger in teller.ledgers() {
        assert_eq!(ledger.ns(server(ThreadLine::RunQueue)), 0, "{ledger:?}");
        assert_eq!(ledger.ns(Line::Retransmit(Segment::Data)), 0);
        let unexplained = ledger.ns(Line::Unexplained);
        assert!(
            unexplained * 20 < ledger.total_ns(),
            "{unexplained} of {}",
            ledger.total_ns()
        );
    }
}

#[test]
fn each_fault_lands_on_its_own_line_in_full() {
    const NS: u64 = 3_000_000;
    type Set = fn(&mut Fault);
    let faults: [(Set, Line); 6] = [
        (|f| f.server_queue_ns = NS, server(ThreadLine::RunQueue)),
        (|f| f.server_softirq_ns = NS, server(ThreadLine::Softirq)),
        (|f| f.server_steal_ns = NS, server(ThreadLine::Steal)),
        (|f| f.lost_hello_ns = NS, Line::Retransmit(Segment::Data)),
        (
            |f| f.client_blocked_ns = NS,
            Line::Thread(Side::Client, ThreadLine::Blocked),
        ),
        (|f| f.server_stopped_ns = NS, server(ThreadLine::Stopped)),
    ];
    for (set, line) in faults {
        let mut fault = Fault::default();
        set(&mut fault);
        let mut teller = Teller::new(0);
        // Before its first switch nothing is known of a CPU, so the first request is only a lead-in.
        for faulty in [false, false, true, false] {
            teller.request(if faulty { fault } else { Fault::default() });
        }
        let ledgers = teller.ledgers();
        let added = ledgers[2].ns(line) - ledgers[1].ns(line);
        assert!(
            added.abs_diff(NS) < 5_000,
            "{}: {added} of {NS} ns, {:?}",
            line.name(),
            ledgers[1]
        );
        assert_eq!(ledgers[1], ledgers[3], "the neighbours are as before");
    }
}

/// As some kernels do with threads of their own: they are seen to come in, and never again.
#[test]
fn a_thread_whose_switch_out_is_hidden_is_named_as_presumed() {
    let mut teller = Teller::new(0);
    teller.request(Fault::default());
    teller.request(Fault {
        server_queue_ns: 3_000_000,
        ..Fault::default()
    });
    let hidden = |raw: &Raw| raw[8] == kind::SWITCH && raw[12..16] == HOG.to_le_bytes();
    teller.server.retain(|raw| !hidden(raw));
    let ledger = teller.ledgers()[1];
    let queue = ledger.ns(server(ThreadLine::RunQueue));
    assert!(queue.abs_diff(3_000_000) < 10_000, "{ledger:?}");
}

fn faults() -> impl Strategy<Value = Vec<Fault>> {
    let ns = prop_oneof![3 => Just(0u64), 1 => 1_000u64..5_000_000];
    let fault = [(); 6]
        .map(|()| ns.clone())
        .prop_map(|[queue, softirq, steal, lost, blocked, stopped]| Fault {
            server_queue_ns: queue,
            server_softirq_ns: softirq,
            server_steal_ns: steal,
            lost_hello_ns: lost,
            client_blocked_ns: blocked,
            server_stopped_ns: stopped,
        });
    prop::collection::vec(fault, 1..12)
}

/// Wire times of the stories are 2 us, which bounds the clocks' error; a line has some borders.
const BORDER_NS: u64 = 8_000;

fn tell(faults: &[Fault], shift: u64) -> Teller {
    let mut teller = Teller::new(shift);
    for fault in faults {
        teller.request(*fault);
    }
    teller
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn order_and_duplicates_of_the_records_do_not_matter(faults in faults(), seed in any::<u64>()) {
        use rand::{SeedableRng as _, seq::SliceRandom as _};
        let plain = tell(&faults, 0);
        let mut random = rand::rngs::Xoshiro256PlusPlus::seed_from_u64(seed);
        let mix = |records: &[Raw], random: &mut rand::rngs::Xoshiro256PlusPlus| {
            let mut mixed = [records, &records[..records.len() / 3]].concat();
            mixed.shuffle(random);
            mixed
        };
        let mixed = ledgers(
            mix(&plain.client, &mut random),
            mix(&plain.server, &mut random),
            plain.requests.clone(),
            plain.connections.clone(),
        );
        prop_assert_eq!(plain.ledgers(), mixed);
    }

    #[test]
    fn a_shifted_server_clock_changes_nothing(faults in faults(), shift in 1u64..1 << 50) {
        prop_assert_eq!(tell(&faults, 0).ledgers(), tell(&faults, shift).ledgers());
    }

    /// The sum is asserted for every request inside `ledgers`.
    #[test]
    fn the_ledger_sums_whatever_is_missing_or_made_up(
        faults in faults(),
        keep in prop::collection::vec(any::<bool>(), 64),
        noise in prop::collection::vec((prop::array::uniform32(any::<u8>()), any::<u8>(), any::<u64>()), 0..40),
    ) {
        let told = tell(&faults, 0);
        let span = told.now;
        let thin = |records: Vec<Raw>| -> Vec<Raw> {
            records.into_iter().enumerate().filter(|(i, _)| keep[i % keep.len()]).map(|(_, raw)| raw).collect()
        };
        let (client, mut server) = (thin(told.client), thin(told.server));
        for (bytes, kind, at) in noise {
            let mut record = [0u8; pqtail_common::RECORD_BYTES];
            record[16..48].copy_from_slice(&bytes);
            record[..8].copy_from_slice(&(at % (2 * span)).to_le_bytes());
            record[8] = kind % 20;
            record[10] = bytes[0] % 3;
            server.push(record);
        }
        ledgers(client, server, told.requests, told.connections);
    }

    /// As the drain counts losses: of which kind, by which CPU, between which two polls.
    #[test]
    fn what_is_lost_only_grows_the_unexplained(
        faults in faults(),
        lost in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0u64..2_000_000, 0u64..2_000_000), 1..6),
    ) {
        let told = tell(&faults, 0);
        let whole = tell(&faults, 0).ledgers();
        let (mut client, mut server) = (told.client, told.server);
        for (which, of_client, before, after) in lost {
            let records = if of_client { &mut client } else { &mut server };
            let gone = records.remove(which.index(records.len()));
            // A loss of an earlier round is gone with its record: then nobody knows.
            if gone[8] == kind::LOSS {
                records.push(gone);
                continue;
            }
            let at_ns = u64::from_ne_bytes(gone[..8].try_into().expect("eight bytes"));
            records.push(raw(&Loss {
                head: Head { at_ns: at_ns + after, kind: kind::LOSS, cpu: u16::from(gone[10]), ..Head::default() },
                start_ns: at_ns.saturating_sub(before + 1),
                count: 1,
                lost_kind: gone[8].into(),
                ..Loss::default()
            }));
        }
        let thinned = ledgers(client, server, told.requests, told.connections);
        for (whole, thinned) in whole.iter().zip(&thinned) {
            for line in Line::all().into_iter().filter(|line| *line != Line::Unexplained) {
                // The clocks are aligned by fewer handshakes: within their error, a border may move.
                prop_assert!(
                    thinned.ns(line) <= whole.ns(line) + BORDER_NS,
                    "{} grew from {} to {}: {:?}",
                    line.name(), whole.ns(line), thinned.ns(line), thinned
                );
            }
        }
    }

    #[test]
    fn without_packets_only_the_dispatch_is_explained(faults in faults()) {
        let told = tell(&faults, 0);
        let is_packet = |raw: &Raw| matches!(raw[8], kind::TRANSMIT | kind::RECEIVE);
        let keep = |records: Vec<Raw>| records.into_iter().filter(|raw| !is_packet(raw)).collect();
        let requests = told.requests.clone();
        let found = ledgers(keep(told.client), keep(told.server), told.requests, told.connections);
        for (request, ledger) in requests.iter().zip(found) {
            let after_dispatch = request.done_ns - request.start_ns;
            prop_assert!(ledger.ns(Line::Unexplained) >= after_dispatch);
        }
    }
}
