//! The probes against the running kernel: real threads, real segments, real interrupts.
//!
//! They need root. Without it they say so by name, except under CI, where a test that did not run is a failure.

mod common;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::unistd::{gettid, pipe, read, write};
use pqtail::{
    clock,
    collect::{
        drain::Drain,
        host,
        probes::{ProbeSettings, Probes, RING_BYTES_DEFAULT, kind_name},
    },
    record::{
        manifest::KernelRecord,
        stream::{Recording, StreamKind},
    },
};
use pqtail_common::{Beat, Head, Loss, Packet, RECORD_BYTES, Rename, Socket, Span, Switch, Wake, flag, kind};
use zerocopy::FromBytes;

use common::{DEADLINE, pin, privileged};

const SYN: u8 = 2;
const ACK: u8 = 16;
/// Without the ECN bits.
const PLAIN_FLAGS: u8 = 0x3f;

type Raw = [u8; RECORD_BYTES];

fn settings() -> ProbeSettings {
    ProbeSettings {
        ports: Vec::new(),
        cpus: online(),
        heartbeat_ns: None,
        ring_bytes: RING_BYTES_DEFAULT,
        reads: false,
    }
}

fn online() -> Vec<u32> {
    host::cpu_ticks().cpus.into_keys().collect()
}

/// What one trial recorded.
struct Trial {
    records: Vec<Raw>,
    summary: KernelRecord,
}

impl Trial {
    fn of<T: FromBytes>(&self, kinds: &[u8]) -> Vec<T> {
        self.records
            .iter()
            .filter(|raw| kinds.contains(&head(raw).kind))
            .map(|raw| T::read_from_bytes(raw.as_slice()).expect("every record has this size"))
            .collect()
    }
}

fn head(raw: &Raw) -> Head {
    Head::read_from_prefix(raw)
        .expect("every record begins with a head")
        .0
}

/// Records while `work` runs; every record must lie inside.
fn record(settings: &ProbeSettings, watched: &[u32], work: impl FnOnce()) -> Trial {
    let mut probes = Probes::attach(settings).expect("root, and a kernel with BTF");
    for &tid in watched {
        probes.watch_thread(tid).expect("room in the table");
    }
    let drain = Drain::start(&mut probes, None).expect("first drain");
    let folder = tempfile::tempdir().expect("a writable temporary folder");
    let path = folder.path().join("kernel.pqr");
    let before = clock::now();
    drain.begin_trial(&path, 7).expect("begin");
    work();
    let summary = drain.end_trial().expect("end");
    let after = clock::now();
    let recording = open(&path);
    assert!(!recording.cut && recording.damaged_chunks == 0);
    assert_eq!(recording.header.trial, 7);
    assert_eq!(recording.records.len() as u64, summary.written.records);
    for raw in &recording.records {
        let head = head(raw);
        assert!(
            before.0 <= head.at_ns && head.at_ns <= after.0,
            "a {} record outside its trial",
            kind_name(head.kind)
        );
    }
    let mut records = recording.records;
    records.sort_by_key(|raw| head(raw).at_ns);
    Trial { records, summary }
}

fn open(path: &Path) -> Recording<Raw> {
    Recording::open(path, StreamKind::Kernel).expect("a recording")
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < DEADLINE, "waited in vain until {what}");
        thread::yield_now();
    }
}

fn own_tid() -> u32 {
    gettid().as_raw().cast_unsigned()
}

/// A thread that sleeps in a pipe until a byte wakes it, and answers each byte.
struct Sleeper {
    tid: u32,
    wake: Option<OwnedFd>,
    answers: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Sleeper {
    fn start(name: &str, cpu: u32) -> Self {
        let (inbox, wake) = pipe().expect("a pipe");
        let (answers, outbox) = pipe().expect("a pipe");
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                pin(cpu);
                tell.send(own_tid()).expect("the starter waits");
                let mut byte = [0];
                while read(&inbox, &mut byte).expect("a pipe") == 1 {
                    write(&outbox, &byte).expect("a pipe");
                }
            })
            .expect("a thread");
        Self {
            tid: told.recv().expect("the thread says its id"),
            wake: Some(wake),
            answers,
            thread: Some(thread),
        }
    }

    fn wake_once_asleep(&self) {
        let stat = format!("/proc/self/task/{}/stat", self.tid);
        wait_until("the thread sleeps", || {
            let text = fs::read_to_string(&stat).expect("the thread lives");
            text.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
        });
        self.wake();
    }

    fn wake(&self) {
        write(self.wake.as_ref().expect("open until dropped"), &[1]).expect("a pipe");
        let mut byte = [0];
        assert_eq!(read(&self.answers, &mut byte), Ok(1));
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Threads that spin on one CPU until dropped.
struct Spinners {
    tids: Vec<u32>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Spinners {
    fn start(count: usize, cpu: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, told) = mpsc::channel();
        let threads = (0..count)
            .map(|_| {
                let (stop, tell) = (Arc::clone(&stop), tell.clone());
                thread::spawn(move || {
                    pin(cpu);
                    tell.send(own_tid()).expect("the starter waits");
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        Self {
            tids: (0..count)
                .map(|_| told.recv().expect("a thread says its id"))
                .collect(),
            stop,
            threads,
        }
    }

    /// Spins on: each thread for this much CPU time of its own.
    fn spend(&self, cpu_time: Duration) {
        let goals: Vec<_> = self
            .tids
            .iter()
            .map(|&tid| {
                (
                    tid,
                    host::thread_cpu_ns(tid).expect("it spins") + cpu_time.as_nanos() as u64,
                )
            })
            .collect();
        wait_until("every spinner had its time", || {
            goals
                .iter()
                .all(|&(tid, goal)| host::thread_cpu_ns(tid).expect("it spins") >= goal)
        });
    }

    fn preempted(&self, times: u64) {
        wait_until("every spinner was preempted", || {
            self.tids.iter().all(|tid| {
                let status = fs::read_to_string(format!("/proc/self/task/{tid}/status")).expect("it spins");
                status
                    .lines()
                    .find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))
                    .is_some_and(|count| count.trim().parse::<u64>().expect("a number") >= times)
            })
        });
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// One connection: 1,000 bytes one way, 10 back, orderly end. Returns the client's port.
fn converse(listener: &TcpListener) -> u16 {
    let address = listener.local_addr().expect("bound");
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("a client comes");
            let mut request = [0; 1000];
            stream.read_exact(&mut request).expect("the whole request");
            stream.write_all(&[7; 10]).expect("the client listens");
        });
        let mut stream = TcpStream::connect(address).expect("somebody listens");
        stream.write_all(&[5; 1000]).expect("the server listens");
        let mut response = Vec::new();
        stream.read_to_end(&mut response).expect("the whole response");
        assert_eq!(response.len(), 10);
        stream.local_addr().expect("connected").port()
    })
}

fn listen(address: IpAddr) -> TcpListener {
    TcpListener::bind(SocketAddr::new(address, 0)).expect("loopback")
}

fn port(listener: &TcpListener) -> u16 {
    listener.local_addr().expect("bound").port()
}

#[test]
fn all_programs_attach_on_a_kernel_that_has_them() {
    let Some(_alone) = privileged("all_programs_attach_on_a_kernel_that_has_them") else {
        return;
    };
    let probes = Probes::attach(&ProbeSettings {
        heartbeat_ns: Some(1_000_000),
        ..settings()
    })
    .expect("root, and a kernel with BTF");
    for each in probes.status() {
        assert!(!each.consequence.is_empty());
        assert_eq!(each.attached, each.reason.is_empty(), "{each:?}");
        // The rest depends on architecture, hypervisor and version.
        let always = [
            "sched_switch",
            "sched_waking",
            "sched_wakeup",
            "net_dev_queue",
            "netif_receive_skb",
        ];
        assert!(each.attached || !always.contains(&each.name.as_str()), "{each:?}");
        if !each.attached {
            eprintln!("{}: {}", each.name, each.reason);
        }
    }
}

#[test]
fn a_sleeping_thread_is_woken_queued_and_run_in_that_order() {
    let Some(_alone) = privileged("a_sleeping_thread_is_woken_queued_and_run_in_that_order") else {
        return;
    };
    let cpu = online()[0];
    let sleeper = Sleeper::start("pq-sleeper", cpu);
    let trial = record(&settings(), &[sleeper.tid], || {
        for _ in 0..20 {
            sleeper.wake_once_asleep();
        }
    });
    let wakes: Vec<Wake> = trial.of(&[kind::WAKING, kind::WAKEUP]);
    let switches: Vec<Switch> = trial.of(&[kind::SWITCH]);
    assert!(
        wakes.iter().all(|wake| wake.target_tid == sleeper.tid),
        "only watched threads"
    );
    let mut stories = 0;
    for waking in wakes.iter().filter(|wake| wake.head.kind == kind::WAKING) {
        assert_eq!(waking.target_cpu, cpu, "where it slept");
        let Some(wakeup) = wakes
            .iter()
            .find(|wake| wake.head.kind == kind::WAKEUP && wake.head.at_ns >= waking.head.at_ns)
        else {
            continue;
        };
        assert_eq!(wakeup.target_cpu, cpu, "where it is pinned, whoever queued it");
        let Some(switch) = switches
            .iter()
            .find(|switch| switch.next_tid == sleeper.tid && switch.head.at_ns >= wakeup.head.at_ns)
        else {
            continue;
        };
        assert_eq!(u32::from(switch.head.cpu), cpu);
        assert_eq!(&switch.next_comm, b"pq-sleeper\0\0\0\0\0\0");
        assert_eq!(switch.next_tgid, std::process::id());
        assert_eq!(switch.next_prio, 120, "nice 0");
        stories += 1;
    }
    assert_eq!(stories, 20);
    let left = switches
        .iter()
        .filter(|switch| switch.head.tid == sleeper.tid && switch.prev_state & 1 == 1);
    assert!(left.count() >= 19, "it left the CPU to sleep, interruptible");
    let wakers: Vec<_> = wakes.iter().filter(|wake| wake.head.tid == own_tid()).collect();
    let name = fs::read_to_string("/proc/thread-self/comm").expect("this thread lives");
    assert!(!wakers.is_empty(), "this thread woke it");
    for waker in wakers {
        let end = waker
            .waker_comm
            .iter()
            .position(|&byte| byte == 0)
            .expect("padded");
        assert_eq!(&waker.waker_comm[..end], name.trim_end().as_bytes());
    }
    assert!(trial.summary.lost.is_empty(), "{:?}", trial.summary.lost);
}

#[test]
fn two_spinning_threads_on_one_cpu_push_each_other_off() {
    let Some(_alone) = privileged("two_spinning_threads_on_one_cpu_push_each_other_off") else {
        return;
    };
    let cpu = online()[0];
    let spinners = Spinners::start(2, cpu);
    let trial = record(&settings(), &[], || {
        spinners.spend(Duration::from_millis(50));
        spinners.preempted(3);
    });
    let switches: Vec<Switch> = trial.of(&[kind::SWITCH]);
    for tid in &spinners.tids {
        let left: Vec<_> = switches.iter().filter(|switch| switch.head.tid == *tid).collect();
        assert!(!left.is_empty());
        for switch in left {
            assert_eq!(switch.prev_state, 0, "it always wants to run");
            assert_eq!(switch.head.flags & flag::THROTTLED, 0, "nobody limits it");
            assert_eq!(u32::from(switch.head.cpu), cpu);
        }
    }
}

#[test]
fn a_thread_without_quota_leaves_its_cpu_throttled() {
    let Some(_alone) = privileged("a_thread_without_quota_leaves_its_cpu_throttled") else {
        return;
    };
    let Some(group) = LimitedGroup::create() else {
        eprintln!(
            "skipped a_thread_without_quota_leaves_its_cpu_throttled: no cpu controller can be used here"
        );
        return;
    };
    let spinners = Spinners::start(1, online()[0]);
    let trial = record(&settings(), &[], || {
        group.admit(spinners.tids[0]);
        wait_until("the group is throttled", || group.throttled() >= 3);
        group.release(spinners.tids[0]);
    });
    let throttled = trial
        .of::<Switch>(&[kind::SWITCH])
        .into_iter()
        .filter(|switch| switch.head.tid == spinners.tids[0] && switch.head.flags & flag::THROTTLED != 0);
    assert!(throttled.count() >= 3);
}

/// A cgroup (version 1, whose threads can be moved one by one) that may use a tenth of a CPU.
struct LimitedGroup(std::path::PathBuf);

impl LimitedGroup {
    fn create() -> Option<Self> {
        let parent = Path::new("/sys/fs/cgroup/cpu");
        let group = Self(parent.join(format!("pqtail-test-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        fs::write(group.0.join("cpu.cfs_quota_us"), "10000").ok()?;
        Some(group)
    }

    fn admit(&self, tid: u32) {
        fs::write(self.0.join("tasks"), tid.to_string()).expect("root may move threads");
    }

    fn release(&self, tid: u32) {
        fs::write(self.0.with_file_name("tasks"), tid.to_string()).expect("root may move threads");
    }

    fn throttled(&self) -> u64 {
        fs::read_to_string(self.0.join("cpu.stat"))
            .expect("the group exists")
            .lines()
            .find_map(|line| line.strip_prefix("nr_throttled "))
            .and_then(|count| count.parse().ok())
            .expect("every group with a quota has it")
    }
}

impl Drop for LimitedGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_connection_to_a_recorded_port_shows_every_segment_and_state() {
    let Some(_alone) = privileged("a_connection_to_a_recorded_port_shows_every_segment_and_state") else {
        return;
    };
    check_connection(
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        u32::from_ne_bytes([127, 0, 0, 1]),
    );
}

#[test]
fn a_connection_over_ipv6_shows_the_same() {
    let Some(_alone) = privileged("a_connection_over_ipv6_shows_the_same") else {
        return;
    };
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        eprintln!("skipped a_connection_over_ipv6_shows_the_same: loopback has no IPv6 address here");
        return;
    }
    check_connection(IpAddr::V6(Ipv6Addr::LOCALHOST), u32::from_ne_bytes([0, 0, 0, 1]));
}

fn check_connection(loopback: IpAddr, folded: u32) {
    let (listener, unrecorded) = (listen(loopback), listen(loopback));
    let server = port(&listener);
    let settings = ProbeSettings {
        ports: vec![server],
        ..settings()
    };
    let mut client = 0;
    let trial = record(&settings, &[], || {
        converse(&unrecorded);
        client = converse(&listener);
    });
    let netns = host::netns().expect("/proc");
    let packets: Vec<Packet> = trial.of(&[kind::TRANSMIT, kind::RECEIVE]);
    for packet in &packets {
        assert!(
            [packet.source_port, packet.destination_port].contains(&server),
            "{packet:?}"
        );
        assert_eq!((packet.source, packet.destination), (folded, folded));
        assert_eq!(packet.ip_version, if loopback.is_ipv4() { 4 } else { 6 });
        assert_eq!(packet.netns, netns);
    }
    let find = |kind: u8, what: &str, is: &dyn Fn(&Packet) -> bool| -> Packet {
        *packets
            .iter()
            .find(|packet| packet.head.kind == kind && is(packet))
            .unwrap_or_else(|| panic!("no {what} in {packets:#?}"))
    };
    let outward = |packet: &Packet| (packet.source_port, packet.destination_port) == (client, server);
    let inward = |packet: &Packet| (packet.source_port, packet.destination_port) == (server, client);
    let flags = |packet: &Packet| packet.tcp_flags & PLAIN_FLAGS;
    let is_syn = |packet: &Packet| outward(packet) && flags(packet) == SYN;
    let is_synack = |packet: &Packet| inward(packet) && flags(packet) == SYN | ACK;
    let syn = find(kind::TRANSMIT, "SYN", &is_syn);
    let syn_in = find(kind::RECEIVE, "SYN", &is_syn);
    let synack = find(kind::TRANSMIT, "SYN-ACK", &is_synack);
    let synack_in = find(kind::RECEIVE, "SYN-ACK", &is_synack);
    assert_eq!((syn.sequence, syn.payload_bytes), (syn_in.sequence, 0));
    assert_eq!(synack.acknowledgement, syn.sequence.wrapping_add(1));
    assert_eq!(synack_in.sequence, synack.sequence);
    let is_request = |packet: &Packet| {
        outward(packet) && packet.payload_bytes == 1000 && packet.sequence == syn.sequence.wrapping_add(1)
    };
    let is_ack = |packet: &Packet| {
        outward(packet) && flags(packet) == ACK && packet.acknowledgement == synack.sequence.wrapping_add(1)
    };
    let is_response = |packet: &Packet| {
        inward(packet) && packet.payload_bytes == 10 && packet.sequence == synack.sequence.wrapping_add(1)
    };
    let times = [
        syn.head.at_ns,
        syn_in.head.at_ns,
        synack.head.at_ns,
        synack_in.head.at_ns,
        find(kind::TRANSMIT, "ACK", &is_ack).head.at_ns,
        find(kind::RECEIVE, "ACK", &is_ack).head.at_ns,
        find(kind::TRANSMIT, "request", &is_request).head.at_ns,
        find(kind::RECEIVE, "request", &is_request).head.at_ns,
        find(kind::TRANSMIT, "response", &is_response).head.at_ns,
        find(kind::RECEIVE, "response", &is_response).head.at_ns,
    ];
    assert!(times.is_sorted(), "{times:?}");
    check_states(&trial, client, server, folded, netns);
}

/// TCP states, kernel numbering.
const ESTABLISHED: u32 = 1;
const SYN_SENT: u32 = 2;
const SYN_RECV: u32 = 3;
const CLOSE: u32 = 7;

fn check_states(trial: &Trial, client: u16, server: u16, folded: u32, netns: u32) {
    let states: Vec<Socket> = trial.of(&[kind::STATE]);
    let find = |old: u32, new: u32| -> Socket {
        *states
            .iter()
            .find(|socket| (socket.old_state, socket.new_state) == (old, new))
            .unwrap_or_else(|| panic!("no {old} to {new} in {states:#?}"))
    };
    let opened = find(CLOSE, SYN_SENT);
    assert_eq!(opened.remote_port, server);
    let connected = find(SYN_SENT, ESTABLISHED);
    assert_eq!(
        connected.socket, opened.socket,
        "one socket, whose port was not chosen at first"
    );
    assert_eq!((connected.local_port, connected.remote_port), (client, server));
    assert_eq!(
        (connected.local, connected.remote, connected.netns),
        (folded, folded, netns)
    );
    let accepted = find(SYN_RECV, ESTABLISHED);
    assert_eq!((accepted.local_port, accepted.remote_port), (server, client));
    assert_ne!(accepted.socket, connected.socket);
}

#[test]
fn an_acknowledgement_that_waits_shows_its_timer() {
    let Some(_alone) = privileged("an_acknowledgement_that_waits_shows_its_timer") else {
        return;
    };
    let listener = listen(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let settings = ProbeSettings {
        ports: vec![port(&listener)],
        ..settings()
    };
    let mut client = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (mut server, _) = listener.accept().expect("a client came");
    let mut byte = [0];
    // Only a conversation that goes back and forth lets the kernel delay acknowledgements.
    for _ in 0..10 {
        client.write_all(&[1]).expect("open");
        server.read_exact(&mut byte).expect("open");
        server.write_all(&[2]).expect("open");
        client.read_exact(&mut byte).expect("open");
    }
    let trial = record(&settings, &[], || {
        client.write_all(&[3]).expect("open");
        server.read_exact(&mut byte).expect("open");
        wait_until("the last byte is acknowledged", || unacknowledged(&client) == 0);
    });
    let timers: Vec<Socket> = trial.of(&[kind::DELAYED_ACK_TIMER]);
    let fired = timers
        .first()
        .expect("a delayed acknowledgement is sent by its timer");
    assert_eq!(fired.local_port, port(&listener));
    assert_eq!(fired.remote_port, client.local_addr().expect("open").port());
}

/// Bytes that the peer has not acknowledged yet (`SIOCOUTQ`, tcp(7)).
fn unacknowledged(stream: &TcpStream) -> i32 {
    use std::os::fd::AsRawFd as _;
    let mut bytes = 0;
    // SAFETY: the request writes one int.
    let outcome = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(outcome, 0);
    bytes
}

#[test]
fn a_full_accept_queue_shows_an_unanswered_syn_the_timer_and_the_second_syn() {
    let Some(_alone) = privileged("a_full_accept_queue_shows_an_unanswered_syn_the_timer_and_the_second_syn")
    else {
        return;
    };
    let listener = listen(IpAddr::V4(Ipv4Addr::LOCALHOST));
    // A backlog of 0 admits one connection that nobody has accepted.
    nix::sys::socket::listen(
        &listener,
        nix::sys::socket::Backlog::new(0).expect("not negative"),
    )
    .expect("it listens already");
    let address = listener.local_addr().expect("bound");
    let settings = ProbeSettings {
        ports: vec![address.port()],
        ..settings()
    };
    let trial = record(&settings, &[], || {
        let before = syns_sent_again();
        let first = TcpStream::connect(address).expect("the queue has one place");
        thread::scope(|scope| {
            let second = scope.spawn(|| TcpStream::connect(address));
            wait_until("a SYN is sent again", || syns_sent_again() > before);
            let accepted = [listener.accept(), listener.accept()];
            assert!(accepted.iter().all(Result::is_ok));
            second
                .join()
                .expect("no panic")
                .expect("the queue has room again");
        });
        drop(first);
    });
    let again: Vec<Socket> = trial.of(&[kind::RETRANSMIT]);
    let again = again.first().expect("it was sent again");
    assert_eq!(again.remote_port, address.port());
    let timers: Vec<Socket> = trial.of(&[kind::WRITE_TIMER]);
    let timer = timers.iter().find(|timer| timer.socket == again.socket);
    assert!(timer.expect("by its timer").head.at_ns <= again.head.at_ns);
    let packets: Vec<Packet> = trial.of(&[kind::RECEIVE]);
    let of_client = |packet: &&Packet| {
        [packet.source_port, packet.destination_port].contains(&again.local_port)
            && packet.tcp_flags & SYN != 0
    };
    let opening: Vec<u8> = packets
        .iter()
        .filter(of_client)
        .map(|packet| packet.tcp_flags & PLAIN_FLAGS)
        .collect();
    let (answer, syns) = opening.split_last().expect("the connection was made");
    assert_eq!(*answer, SYN | ACK);
    assert!(
        syns.len() >= 2 && syns.iter().all(|flags| *flags == SYN),
        "the first SYN was not answered"
    );
    let first = packets.iter().find(of_client).expect("there are several");
    assert_eq!(again.sequence, first.sequence);
}

/// `TcpExt: TCPSynRetrans` of this namespace.
fn syns_sent_again() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/netstat").expect("/proc");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    names
        .split(' ')
        .zip(values.split(' '))
        .find(|(name, _)| *name == "TCPSynRetrans")
        .and_then(|(_, value)| value.parse().ok())
        .expect("every supported kernel counts them")
}

#[test]
fn interrupt_spans_end_after_they_begin() {
    let Some(_alone) = privileged("interrupt_spans_end_after_they_begin") else {
        return;
    };
    let listener = listen(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let spinners = Spinners::start(1, online()[0]);
    let trial = record(&settings(), &[], || {
        for _ in 0..20 {
            converse(&listener);
        }
        spinners.spend(Duration::from_millis(50));
    });
    let spans: Vec<Span> = trial.of(&[kind::IRQ, kind::SOFTIRQ, kind::VECTOR]);
    for span in &spans {
        assert!(0 < span.start_ns && span.start_ns <= span.head.at_ns, "{span:?}");
        assert!(span.raised_ns <= span.start_ns, "raised before it ran: {span:?}");
        assert!(span.raised_ns == 0 || span.head.kind == kind::SOFTIRQ);
    }
    const NET_RX: u32 = 3;
    let received = spans
        .iter()
        .filter(|span| span.head.kind == kind::SOFTIRQ && span.number == NET_RX);
    assert!(
        received.clone().count() > 0,
        "loopback delivers in softirq context"
    );
    assert!(
        received.clone().any(|span| span.raised_ns > 0),
        "and somebody raised it"
    );
    if cfg!(target_arch = "x86_64") {
        let vectors = spans.iter().filter(|span| span.head.kind == kind::VECTOR);
        assert!(vectors.count() > 0, "a busy CPU has a timer interrupt");
    }
}

#[test]
fn heartbeats_arrive_and_steal_never_goes_back() {
    let Some(_alone) = privileged("heartbeats_arrive_and_steal_never_goes_back") else {
        return;
    };
    let cpu = online()[0];
    let spinners = Spinners::start(1, cpu);
    let settings = ProbeSettings {
        heartbeat_ns: Some(1_000_000),
        ..settings()
    };
    let trial = record(&settings, &[], || spinners.spend(Duration::from_millis(100)));
    let beats: Vec<Beat> = trial.of(&[kind::BEAT]);
    assert!(
        beats
            .iter()
            .any(|beat| u32::from(beat.head.cpu) == cpu && beat.head.tid == spinners.tids[0])
    );
    // Both kinds begin with head and steal counter, and neither can be interrupted by the other.
    let counters: Vec<Beat> = trial.of(&[kind::BEAT, kind::SWITCH]);
    for cpu in online() {
        let steal: Vec<u64> = counters
            .iter()
            .filter(|each| u32::from(each.head.cpu) == cpu && each.head.flags & flag::STEAL_KNOWN != 0)
            .map(|each| each.steal_ns)
            .collect();
        assert!(steal.is_sorted(), "CPU {cpu}: {steal:?}");
    }
}

#[test]
fn cpus_that_are_not_recorded_leave_no_trace() {
    let Some(_alone) = privileged("cpus_that_are_not_recorded_leave_no_trace") else {
        return;
    };
    let cpus = online();
    if cpus.len() < 2 {
        eprintln!("skipped cpus_that_are_not_recorded_leave_no_trace: it needs two CPUs");
        return;
    }
    let settings = ProbeSettings {
        cpus: vec![cpus[1]],
        heartbeat_ns: Some(1_000_000),
        ..settings()
    };
    let busy: Vec<_> = cpus.iter().map(|&cpu| Spinners::start(2, cpu)).collect();
    let trial = record(&settings, &[], || {
        for each in &busy {
            each.spend(Duration::from_millis(50));
        }
    });
    assert!(!trial.records.is_empty());
    // A thread may run here under a name that it was given elsewhere.
    let traces = trial
        .records
        .iter()
        .map(head)
        .filter(|head| head.kind != kind::RENAME);
    for head in traces {
        assert_eq!(u32::from(head.cpu), cpus[1], "{}", kind_name(head.kind));
    }
}

#[test]
fn a_ring_that_is_too_small_counts_every_record_it_could_not_take() {
    let Some(_alone) = privileged("a_ring_that_is_too_small_counts_every_record_it_could_not_take") else {
        return;
    };
    let settings = ProbeSettings {
        ring_bytes: 4096,
        ..settings()
    };
    let sleeper = Sleeper::start("pq-sleeper", online()[0]);
    let mut probes = Probes::attach(&settings).expect("root, and a kernel with BTF");
    probes.watch_thread(sleeper.tid).expect("room in the table");
    let drain = Drain::start(&mut probes, None).expect("first drain");
    let folder = tempfile::tempdir().expect("a writable temporary folder");
    let path = folder.path().join("kernel.pqr");
    let lost = |probes: &Probes| -> u64 { probes.losses().expect("readable").iter().flatten().sum() };
    let before = lost(&probes);
    drain.begin_trial(&path, 0).expect("begin");
    let begun = lost(&probes);
    let mut wakes: u64 = 0;
    wait_until("records are lost", || {
        sleeper.wake_once_asleep();
        wakes += 1;
        lost(&probes) > begun + 1000
    });
    let worked = lost(&probes);
    let summary = drain.end_trial().expect("end");
    let after = lost(&probes);

    let recording = open(&path);
    let losses: Vec<Loss> = recording
        .records
        .iter()
        .filter(|raw| head(raw).kind == kind::LOSS)
        .map(|raw| Loss::read_from_bytes(raw.as_slice()).expect("sized"))
        .collect();
    let told: u64 = losses.iter().map(|loss| loss.count).sum();
    assert!(
        worked - begun <= told && told <= after - before,
        "{told} of {begun}..{worked}"
    );
    assert_eq!(told, summary.lost.values().sum::<u64>());
    assert_eq!(summary.ring_bytes, 4096);
    assert!(summary.ring_used_bytes_max > 2048 && summary.ring_used_bytes_max <= 4096);
    for loss in &losses {
        assert!(loss.count > 0 && loss.start_ns < loss.head.at_ns, "{loss:?}");
    }
    // Each wake makes one WAKING record, which was either stored or counted.
    let waking = recording
        .records
        .iter()
        .filter(|raw| head(raw).kind == kind::WAKING)
        .count() as u64;
    let lost_waking: u64 = losses
        .iter()
        .filter(|loss| loss.lost_kind == u32::from(kind::WAKING))
        .map(|loss| loss.count)
        .sum();
    assert!(
        waking + lost_waking >= wakes,
        "{waking} + {lost_waking} of {wakes}"
    );
}

#[test]
fn a_trial_that_is_cut_stays_readable_and_says_so() {
    let Some(_alone) = privileged("a_trial_that_is_cut_stays_readable_and_says_so") else {
        return;
    };
    let mut probes = Probes::attach(&settings()).expect("root, and a kernel with BTF");
    let drain = Drain::start(&mut probes, None).expect("first drain");
    let folder = tempfile::tempdir().expect("a writable temporary folder");
    let path = folder.path().join("kernel.pqr");
    drain.begin_trial(&path, 0).expect("begin");
    wait_until("a flush", || !open(&path).records.is_empty());
    drop(drain);
    assert!(open(&path).cut);
}

#[test]
fn misuse_and_a_full_disk_are_errors_and_the_drain_lives_on() {
    let Some(_alone) = privileged("misuse_and_a_full_disk_are_errors_and_the_drain_lives_on") else {
        return;
    };
    let mut probes = Probes::attach(&settings()).expect("root, and a kernel with BTF");
    let drain = Drain::start(&mut probes, None).expect("first drain");
    assert!(Drain::start(&mut probes, None).is_err(), "one ring, one drain");
    assert!(drain.end_trial().is_err(), "none under way");
    let folder = tempfile::tempdir().expect("a writable temporary folder");
    assert!(
        drain
            .begin_trial(&folder.path().join("missing/kernel.pqr"), 0)
            .is_err()
    );
    let error = drain
        .begin_trial(Path::new("/dev/full"), 0)
        .expect_err("no space");
    assert!(format!("{error:#}").contains("/dev/full"), "{error:#}");
    let path = folder.path().join("kernel.pqr");
    drain.begin_trial(&path, 1).expect("begin");
    assert!(drain.begin_trial(&path, 2).is_err(), "one at a time");
    drain.end_trial().expect("end");
    assert!(!open(&path).cut);
}

#[test]
fn a_thread_that_names_itself_without_leaving_its_cpu_is_named() {
    let Some(_alone) = privileged("a_thread_that_names_itself_without_leaving_its_cpu_is_named") else {
        return;
    };
    let mut tid = 0;
    let trial = record(&settings(), &[], || {
        let named = thread::Builder::new().name("pq-named".to_owned());
        tid = named.spawn(own_tid).expect("a thread").join().expect("its id");
    });
    let names: Vec<_> = trial
        .of::<Rename>(&[kind::RENAME])
        .into_iter()
        .filter(|each| each.target_tid == tid)
        .collect();
    let [rename] = names[..] else {
        panic!("one name was given: {names:?}")
    };
    assert_eq!(&rename.comm, b"pq-named\0\0\0\0\0\0\0\0");
    assert_eq!(rename.target_tgid, std::process::id());
}
