//! A token bucket on one end of a link between two namespaces: bytes wait for their tokens, in order, and none is lost.
//!
//! Each host is a thread in a network namespace of its own; a socket keeps the namespace it was made in, so only
//! making one is done there.
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

mod common;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
};
use nix::{
    net::if_::if_nametoindex,
    sys::socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt::RcvBufForce,
    },
    unistd::{read, write},
};
use pqtail::{
    clock::now,
    collect::{
        host,
        link::{self, CLIENT_ADDRESS, CLIENT_NAME, PREFIX, SERVER_ADDRESS, SERVER_NAME},
    },
    truth::shaper::Shaper,
};
use rtnetlink::packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};

use common::{DEADLINE, Host, pin, privileged, wait_until};

const PORT: u16 = 4433;

/// Payload of a datagram that fills the link's MTU of 1,500, and its frame.
const PAYLOAD_BYTES: usize = 1472;
const FRAME_BYTES: u64 = 1514;
/// Enough for all that a test sends.
const RECEIVE_BYTES: usize = 64 << 20;

#[test]
fn a_slow_link_takes_at_least_the_time_of_its_bytes() {
    let Some(_alone) = privileged("a_slow_link_takes_at_least_the_time_of_its_bytes") else {
        return;
    };
    let network = Network::new();
    let mut shaper = network.at_client();
    // Twice: the rate is changed in place, and the bucket is full after each change.
    for rate_bytes_per_s in [1_000_000, 4_000_000] {
        shaper.slow(rate_bytes_per_s).unwrap();
        let begin_ns = now().0;
        let datagrams = 60;
        network.send(0..datagrams);
        network.receive(0..datagrams);
        let took_ns = now().0 - begin_ns;
        // One frame is in the bucket.
        let least_ns = (datagrams as u64 - 1) * FRAME_BYTES * 1_000_000_000 / rate_bytes_per_s;
        assert!(
            took_ns >= least_ns,
            "{took_ns} ns, and {least_ns} at {rate_bytes_per_s} bytes/s"
        );
    }
    assert_eq!(shaper.dropped_packets().unwrap(), 0);
}

#[test]
fn fast_lets_the_whole_queue_go_at_once_and_in_order() {
    let Some(_alone) = privileged("fast_lets_the_whole_queue_go_at_once_and_in_order") else {
        return;
    };
    let network = Network::new();
    let mut shaper = network.at_client();
    // A frame a second: whoever waits for the old rate fails.
    shaper.slow(FRAME_BYTES).unwrap();
    network.send(0..50);
    network.receive(0..1);
    assert!(shaper.queued_packets().unwrap() > 40);
    shaper.fast().unwrap();
    assert_eq!(shaper.queued_packets().unwrap(), 0);
    network.receive(1..50);
    network.send(50..100);
    network.receive(50..100);
    assert_eq!(shaper.dropped_packets().unwrap(), 0);
}

/// Datagrams that fit into a receiver's buffer of the usual size.
const UNDER_WAY: usize = 48;

#[test]
fn changes_under_traffic_lose_nothing_and_keep_the_order() {
    let Some(_alone) = privileged("changes_under_traffic_lose_nothing_and_keep_the_order") else {
        return;
    };
    let network = Network::new();
    let mut shaper = network.at_client();
    let (changes, datagrams_each) = (20, 100);
    let total = changes * datagrams_each;
    let received = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..total {
                // More than a receiver that gets no CPU can hold would be lost at its end, not on the way.
                wait_until("few are under way", || {
                    received.load(Ordering::Relaxed) + UNDER_WAY > number
                });
                network.send(number..number + 1);
            }
        });
        scope.spawn(|| {
            for number in 0..total {
                network.receive(number..number + 1);
                received.store(number + 1, Ordering::Relaxed);
            }
        });
        for change in 0..changes {
            if change % 2 == 0 {
                shaper.slow(10_000_000).unwrap();
            } else {
                shaper.fast().unwrap();
            }
            wait_until("a part has arrived", || {
                received.load(Ordering::Relaxed) >= change * datagrams_each
            });
        }
        shaper.fast().unwrap();
    });
    assert_eq!(received.into_inner(), total);
    assert_eq!(shaper.dropped_packets().unwrap(), 0);
}

#[test]
fn a_stream_of_large_segments_is_cut_and_none_is_too_long_for_the_bucket() {
    let Some(_alone) = privileged("a_stream_of_large_segments_is_cut_and_none_is_too_long_for_the_bucket")
    else {
        return;
    };
    let network = Network::new();
    let mut shaper = network.at_client();
    let listener = network
        .server
        .run(|| TcpListener::bind((SERVER_ADDRESS, PORT)).unwrap());
    let mut client = network
        .client
        .run(|| TcpStream::connect((SERVER_ADDRESS, PORT)).unwrap());
    let (mut server, _) = listener.accept().unwrap();
    let message: Vec<u8> = (0..512 * 1024).map(|position| (position % 251) as u8).collect();
    let rate_bytes_per_s = 10_000_000;
    let mut exchange = || {
        let begin_ns = now().0;
        thread::scope(|scope| {
            scope.spawn(|| client.write_all(&message).unwrap());
            let mut got = vec![0; message.len()];
            server.read_exact(&mut got).unwrap();
            assert!(got == message);
        });
        now().0 - begin_ns
    };
    // What is in the queue when the rate changes has the length that the bucket allows at any rate.
    exchange();
    shaper.slow(rate_bytes_per_s).unwrap();
    let took_ns = exchange();
    shaper.fast().unwrap();
    exchange();
    let least_ns = (message.len() as u64 - FRAME_BYTES) * 1_000_000_000 / rate_bytes_per_s;
    assert!(took_ns >= least_ns, "{took_ns} ns, and {least_ns} at least");
    assert_eq!(shaper.dropped_packets().unwrap(), 0);
}

#[test]
fn a_dropped_shaper_sends_what_is_queued_and_leaves_no_qdisc() {
    let Some(_alone) = privileged("a_dropped_shaper_sends_what_is_queued_and_leaves_no_qdisc") else {
        return;
    };
    let network = Network::new();
    assert_eq!(network.client_qdisc(), "noqueue");
    let mut shaper = network.at_client();
    assert_eq!(network.client_qdisc(), "tbf");
    shaper.slow(FRAME_BYTES).unwrap();
    network.send(0..10);
    drop(shaper);
    assert_eq!(network.client_qdisc(), "noqueue");
    network.receive(0..10);
    network.send(10..20);
    network.receive(10..20);
}

#[test]
fn misuse_is_an_error() {
    let Some(_alone) = privileged("misuse_is_an_error") else {
        return;
    };
    let network = Network::new();
    let (client, server) = (network.client.tid, network.server.tid);
    let mut shaper = network.at_client();
    let refusal = |tid, device| format!("{:#}", Shaper::attach(tid, device).unwrap_err());
    let message = refusal(client, CLIENT_NAME);
    assert!(message.contains("one shaper a device"), "{message}");
    let message = refusal(client, SERVER_NAME);
    assert!(message.contains("join the link first"), "{message}");
    let message = refusal(u32::MAX, SERVER_NAME);
    assert!(message.contains("does the process live"), "{message}");
    // Each end has its own.
    let other = Shaper::attach(server, SERVER_NAME).unwrap();
    let message = format!("{:#}", shaper.slow(FRAME_BYTES - 1).unwrap_err());
    assert!(message.contains("take 1514 at least"), "{message}");
    drop((shaper, other));
    // It may outlive the run, and keeps the namespace but not the link: the other end's is gone.
    let mut shaper = network.at_client();
    drop(network);
    wait_until("the link is gone", || shaper.slow(FRAME_BYTES).is_err());
}

/// Two hosts, a link, and a socket at each end.
struct Network {
    client: Host,
    server: Host,
    sender: UdpSocket,
    receiver: UdpSocket,
}

impl Network {
    fn new() -> Self {
        let (client, server) = (Host::start("pq-client"), Host::start("pq-server"));
        for host in [&client, &server] {
            // Its announcements would be shaped and counted.
            let _ = host.run(|| fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        }
        let peer = server.tid;
        client.run(move || link::join(peer, CLIENT_ADDRESS, PREFIX).unwrap());
        server.run(|| link::configure(SERVER_ADDRESS, PREFIX).unwrap());
        let receiver = server.run(|| UdpSocket::bind((SERVER_ADDRESS, PORT)).unwrap());
        setsockopt(&receiver, RcvBufForce, &RECEIVE_BYTES).unwrap();
        receiver.set_read_timeout(Some(DEADLINE)).unwrap();
        let sender = client.run(|| UdpSocket::bind((CLIENT_ADDRESS, 0)).unwrap());
        sender.connect((SERVER_ADDRESS, PORT)).unwrap();
        // The neighbour is known before anything is counted: its question would be shaped too.
        sender.send(&[]).unwrap();
        receiver.recv(&mut []).unwrap();
        Self {
            client,
            server,
            sender,
            receiver,
        }
    }

    fn at_client(&self) -> Shaper {
        Shaper::attach(self.client.tid, CLIENT_NAME).unwrap()
    }

    /// Datagrams that carry their numbers. Waits where the socket has too many on their way.
    fn send(&self, numbers: std::ops::Range<usize>) {
        // A veth hands its packets to the CPU that sends: a sender that moves overtakes itself.
        pin(host::allowed_cpus().unwrap()[0]);
        for number in numbers {
            let mut payload = [0; PAYLOAD_BYTES];
            payload[..8].copy_from_slice(&(number as u64).to_le_bytes());
            self.sender.send(&payload).unwrap();
        }
    }

    /// These come next, and no others between them.
    fn receive(&self, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let mut payload = [0; PAYLOAD_BYTES];
            assert_eq!(self.receiver.recv(&mut payload).unwrap(), PAYLOAD_BYTES);
            let got = u64::from_le_bytes(payload[..8].try_into().unwrap());
            assert_eq!(got, number as u64, "all arrive in order");
        }
    }

    fn client_qdisc(&self) -> String {
        self.client.run(client_qdisc_here)
    }
}

/// The name of the client's root qdisc as its device tells it (`IFLA_QDISC`): another way than the shaper's own.
fn client_qdisc_here() -> String {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )
    .unwrap();
    let mut device = LinkMessage::default();
    device.header.index = if_nametoindex(CLIENT_NAME).unwrap();
    let mut question = NetlinkMessage::from(RouteNetlinkMessage::GetLink(device));
    question.header.flags = NLM_F_REQUEST;
    question.finalize();
    let mut bytes = vec![0; question.buffer_len()];
    question.serialize(&mut bytes);
    write(&socket, &bytes).unwrap();
    let mut answer = vec![0; 1 << 16];
    let length = read(&socket, &mut answer).unwrap();
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer[..length]).unwrap();
    let NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(device)) = answer.payload else {
        panic!("the device is there: {answer:?}");
    };
    let qdisc = device
        .attributes
        .into_iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::Qdisc(name) => Some(name),
            _ => None,
        });
    qdisc.expect("every device has one")
}
