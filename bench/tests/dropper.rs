//! Segments lost between two namespaces: the sender sent them, the receiver never saw them, TCP sends them again.
//!
//! Each host is a thread in a network namespace of its own; a socket keeps the namespace it was made in, so only
//! making one is done there.
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

mod common;

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use pqtail::{
    collect::{
        link::{self, CLIENT_ADDRESS, CLIENT_NAME, PREFIX, SERVER_ADDRESS, SERVER_NAME},
        probes::{ProbeSettings, RING_BYTES_DEFAULT},
    },
    truth::dropper::{Dropped, Dropper, Segment},
};
use pqtail_common::{Head, Packet, kind};
use zerocopy::FromBytes as _;

use common::{Host, privileged, recorded};

const PORT: u16 = 4433;
/// How long a SYN and a SYN-ACK wait for their answer at first (`TCP_TIMEOUT_INIT`; RFC 6298, 2.1).
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// What one full segment of the link carries: an MTU of 1,500 less 20 of IPv4 and 32 of TCP with timestamps.
const SEGMENT_BYTES: usize = 1448;

const SYN: u8 = 2;
const ACK: u8 = 16;
/// Without the ECN bits.
const PLAIN_FLAGS: u8 = 0x3f;

#[test]
fn a_lost_syn_costs_its_first_timeout() {
    let Some(_alone) = privileged("a_lost_syn_costs_its_first_timeout") else {
        return;
    };
    let network = Network::new();
    let dropper = network.before_server();
    let story = network.record(|| {
        dropper.order(Segment::Syn, 0, 1).unwrap();
        let (client, took) = network.connect();
        assert!(took >= FIRST_TIMEOUT, "{took:?}");
        local_port(&client)
    });
    let lost = only(&dropper.dropped().unwrap());
    assert_eq!((lost.segment, lost.payload_bytes), (Segment::Syn, 0));
    assert_eq!(
        (lost.source_port, lost.destination_port),
        (story.client_port, PORT)
    );
    story.expect_lost(&lost, |packet| packet.tcp_flags & PLAIN_FLAGS == SYN);
}

#[test]
fn a_lost_syn_ack_costs_the_same() {
    let Some(_alone) = privileged("a_lost_syn_ack_costs_the_same") else {
        return;
    };
    let network = Network::new();
    let dropper = network.before_client();
    let story = network.record(|| {
        dropper.order(Segment::SynAck, 0, 1).unwrap();
        let (client, took) = network.connect();
        assert!(took >= FIRST_TIMEOUT, "{took:?}");
        local_port(&client)
    });
    let lost = only(&dropper.dropped().unwrap());
    assert_eq!((lost.segment, lost.payload_bytes), (Segment::SynAck, 0));
    assert_eq!(
        (lost.source_port, lost.destination_port),
        (PORT, story.client_port)
    );
    story.expect_lost(&lost, |packet| packet.tcp_flags & PLAIN_FLAGS == SYN | ACK);
}

#[test]
fn lost_data_arrives_all_the_same() {
    let Some(_alone) = privileged("lost_data_arrives_all_the_same") else {
        return;
    };
    let network = Network::new();
    let dropper = network.before_server();
    let story = network.record(|| {
        let (mut client, _) = network.connect();
        let mut server = network.accept();
        dropper.order(Segment::Data, 1000, 1).unwrap();
        // Too small for the order.
        client.write_all(&[1; 999]).unwrap();
        server.read_exact(&mut [0; 999]).unwrap();
        client.write_all(&[2; 1000]).unwrap();
        let mut got = [0; 1000];
        server.read_exact(&mut got).unwrap();
        assert_eq!(got, [2; 1000]);
        local_port(&client)
    });
    let lost = only(&dropper.dropped().unwrap());
    assert_eq!((lost.segment, lost.payload_bytes), (Segment::Data, 1000));
    assert_eq!(
        (lost.source_port, lost.destination_port),
        (story.client_port, PORT)
    );
    story.expect_lost(&lost, |packet| packet.payload_bytes > 0);
}

#[test]
fn each_connection_loses_one_segment_until_the_order_is_filled_or_stopped() {
    let Some(_alone) = privileged("each_connection_loses_one_segment_until_the_order_is_filled_or_stopped")
    else {
        return;
    };
    let network = Network::new();
    let dropper = network.before_server();
    let mut pairs: Vec<_> = (0..3).map(|_| (network.connect().0, network.accept())).collect();
    let ports: Vec<u16> = pairs.iter().map(|(client, _)| local_port(client)).collect();
    let mut converse = || {
        for (client, server) in &mut pairs {
            for _ in 0..2 {
                client.write_all(&[3; 10]).unwrap();
                server.read_exact(&mut [0; 10]).unwrap();
            }
        }
    };
    let losers = || -> Vec<u16> {
        dropper
            .dropped()
            .unwrap()
            .iter()
            .map(|lost| lost.source_port)
            .collect()
    };
    converse();
    assert!(losers().is_empty(), "nothing was ordered");
    dropper.order(Segment::Data, 1, 2).unwrap();
    converse();
    assert_eq!(losers(), ports[..2], "two were ordered");
    dropper.order(Segment::Data, 1, 1).unwrap();
    dropper.stop().unwrap();
    converse();
    assert_eq!(losers(), ports[..2], "the order was stopped");
    dropper.order(Segment::Data, 1, 1).unwrap();
    converse();
    assert_eq!(
        losers(),
        [ports[0], ports[1], ports[0]],
        "a new order counts anew"
    );
    let times: Vec<u64> = dropper.dropped().unwrap().iter().map(|lost| lost.at_ns).collect();
    assert!(times.is_sorted(), "{times:?}");

    let other = network.before_client().on_port(PORT + 1);
    other.order(Segment::Data, 1, 1).unwrap();
    for (client, server) in &mut pairs {
        server.write_all(&[4; 10]).unwrap();
        client.read_exact(&mut [0; 10]).unwrap();
    }
    assert_eq!(other.dropped().unwrap(), [], "nothing of that port passed");
}

#[test]
fn a_dropper_without_an_order_changes_sizes_but_loses_nothing() {
    let Some(_alone) = privileged("a_dropper_without_an_order_changes_sizes_but_loses_nothing") else {
        return;
    };
    let network = Network::new();
    let (mut client, _) = network.connect();
    let mut server = network.accept();
    let message: Vec<u8> = (0..256 * 1024).map(|position| (position % 251) as u8).collect();
    let mut largest = || {
        let story = network.record(|| {
            thread::scope(|scope| {
                scope.spawn(|| client.write_all(&message).unwrap());
                let mut got = vec![0; message.len()];
                server.read_exact(&mut got).unwrap();
                assert!(got == message);
            });
            local_port(&client)
        });
        let drops = story
            .packets
            .iter()
            .filter(|packet| packet.head.kind == kind::DROP);
        assert_eq!(drops.count(), 0);
        let of = |kind| {
            let sizes = story.packets.iter().filter(|packet| packet.head.kind == kind);
            sizes.map(|packet| packet.payload_bytes as usize).max().unwrap()
        };
        (of(kind::TRANSMIT), of(kind::RECEIVE))
    };
    let before = largest();
    let dropper = network.before_server();
    let during = largest();
    assert_eq!(dropper.dropped().unwrap(), []);
    drop(dropper);
    let after = largest();
    assert!(before.0 > SEGMENT_BYTES && before.0 == before.1, "{before:?}");
    // How much the receiver's end merges is a matter of time.
    // The record is taken before the sender's end cuts it into segments, which it does itself while the dropper is there.
    assert!(during.0 > SEGMENT_BYTES, "{during:?}");
    assert!(after.0 > SEGMENT_BYTES, "{after:?}");
}

#[test]
fn misuse_is_an_error_and_a_dropper_leaves_nothing() {
    let Some(_alone) = privileged("misuse_is_an_error_and_a_dropper_leaves_nothing") else {
        return;
    };
    let network = Network::new();
    let dropper = network.before_server();
    let refusal = |tid, interface| format!("{:#}", Dropper::attach(tid, interface).unwrap_err());
    let message = refusal(network.server.tid, SERVER_NAME);
    assert!(message.contains("one dropper an interface"), "{message}");
    drop(dropper);
    drop(network.before_server());
    let message = refusal(network.server.tid, CLIENT_NAME);
    assert!(message.contains("join the link first"), "{message}");
    let message = refusal(network.server.tid, "lo");
    assert!(message.contains("take a veth"), "{message}");
    let message = refusal(u32::MAX, SERVER_NAME);
    assert!(message.contains("does the process live"), "{message}");
    let dropper = network.before_server();
    let message = format!("{:#}", dropper.order(Segment::Data, 1, 1025).unwrap_err());
    assert!(message.contains("can lose 1024 more"), "{message}");
    drop(network);
    assert_eq!(dropper.dropped().unwrap(), [], "it outlives the link");
}

/// Two hosts, a link, and a server that listens.
struct Network {
    client: Host,
    server: Host,
    listener: TcpListener,
}

impl Network {
    fn new() -> Self {
        let (client, server) = (Host::start("pq-client"), Host::start("pq-server"));
        let peer = server.tid;
        client.run(move || link::join(peer, CLIENT_ADDRESS, PREFIX).unwrap());
        server.run(|| link::configure(SERVER_ADDRESS, PREFIX).unwrap());
        let listener = server.run(|| TcpListener::bind((SERVER_ADDRESS, PORT)).unwrap());
        Self {
            client,
            server,
            listener,
        }
    }

    fn before_server(&self) -> Dropper {
        Dropper::attach(self.server.tid, SERVER_NAME).unwrap()
    }

    fn before_client(&self) -> Dropper {
        Dropper::attach(self.client.tid, CLIENT_NAME).unwrap()
    }

    /// A connection that the kernel has made, and how long the client waited for it.
    fn connect(&self) -> (TcpStream, Duration) {
        self.client.run(|| {
            let begin = Instant::now();
            let stream = TcpStream::connect((SERVER_ADDRESS, PORT)).unwrap();
            stream.set_nodelay(true).unwrap();
            (stream, begin.elapsed())
        })
    }

    fn accept(&self) -> TcpStream {
        self.listener.accept().unwrap().0
    }

    /// The probes' view while `work` runs; it returns the client's port.
    fn record(&self, work: impl FnOnce() -> u16) -> Story {
        let settings = ProbeSettings {
            ports: vec![PORT],
            cpus: Vec::new(),
            heartbeat_ns: None,
            ring_bytes: RING_BYTES_DEFAULT,
            reads: false,
        };
        let mut client_port = 0;
        let records = recorded(&settings, || client_port = work());
        let mut packets: Vec<Packet> = records
            .iter()
            .filter(|raw| {
                let (head, _) = Head::read_from_prefix(raw.as_slice()).unwrap();
                [kind::TRANSMIT, kind::RECEIVE, kind::DROP].contains(&head.kind)
            })
            .map(|raw| Packet::read_from_bytes(raw.as_slice()).unwrap())
            .filter(|packet| [packet.source_port, packet.destination_port].contains(&client_port))
            .collect();
        packets.sort_by_key(|packet| packet.head.at_ns);
        Story {
            client_port,
            packets,
            namespaces: [self.client.namespace, self.server.namespace],
        }
    }
}

/// What the probes saw of one connection, by time.
struct Story {
    client_port: u16,
    packets: Vec<Packet>,
    /// Client's and server's.
    namespaces: [u32; 2],
}

impl Story {
    /// The sender sent it, nobody received or dropped it; sent again, it arrived.
    fn expect_lost(&self, lost: &Dropped, is_of_kind: impl Fn(&Packet) -> bool) {
        let mut ends = self.namespaces;
        if lost.source_port == PORT {
            ends.reverse();
        }
        let [sender, receiver] = ends;
        let of = |kind: u8, netns: u32| -> Vec<u64> {
            self.packets
                .iter()
                .filter(|packet| packet.head.kind == kind && packet.netns == netns)
                .filter(|packet| packet.source_port == lost.source_port && packet.sequence == lost.sequence)
                .filter(|packet| is_of_kind(packet))
                .map(|packet| packet.head.at_ns)
                .collect()
        };
        let (sent, received) = (of(kind::TRANSMIT, sender), of(kind::RECEIVE, receiver));
        assert!(
            sent.len() >= 2,
            "{lost:?}: sent once and again, {:#?}",
            self.packets
        );
        assert_eq!(received.len(), sent.len() - 1, "{lost:?}: {:#?}", self.packets);
        assert!(
            sent[0] <= lost.at_ns && lost.at_ns < sent[1],
            "{lost:?}: {sent:?}"
        );
        assert!(sent[1] <= received[0], "{sent:?} {received:?}");
        let dropped: Vec<_> = self
            .packets
            .iter()
            .filter(|packet| packet.head.kind == kind::DROP && packet.head.at_ns < sent[1])
            .filter(|packet| packet.sequence == lost.sequence)
            .collect();
        assert!(dropped.is_empty(), "the wire tells nobody: {dropped:#?}");
    }
}

fn only(dropped: &[Dropped]) -> Dropped {
    let [one] = dropped else {
        panic!("one segment was to be lost, not {dropped:#?}");
    };
    *one
}

fn local_port(stream: &TcpStream) -> u16 {
    stream.local_addr().unwrap().port()
}
