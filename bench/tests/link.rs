//! Two processes in two namespaces talk over the link, and nothing is left of it once they are gone.
//!
//! The ends are this test binary again, running [`end_of_the_link`] in the role that [`ROLE`] names. They speak to the
//! test by lines on standard output that begin with [`MARK`].
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

mod common;

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use nix::{
    net::if_::{if_nameindex, if_nametoindex},
    sys::{
        prctl::set_child_subreaper,
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use pqtail::collect::link::{self, CLIENT_ADDRESS, CLIENT_NAME, PREFIX, SERVER_ADDRESS, SERVER_NAME};

use common::is_privileged;

const ROLE: &str = "PQTAIL_TEST_LINK_ROLE";
const PEER: &str = "PQTAIL_TEST_LINK_PEER";
const MARK: &str = "link: ";
const PORT: u16 = 4433;
/// More than one segment and more than one socket buffer's first window.
const MESSAGE_BYTES: usize = 256 * 1024;
/// Generous: it is only waited for in full when something is broken.
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn bytes_cross_the_link_and_a_kill_leaves_nothing() {
    if !is_privileged("bytes_cross_the_link_and_a_kill_leaves_nothing") {
        return;
    }
    let mut server = end("server", None);
    let mut client = end("client", Some(server.child.id()));
    let namespaces = [server.namespace(), client.namespace()];
    assert_ne!(namespaces[0], namespaces[1]);
    assert!(!namespaces.contains(&own_namespace()));

    client.expect("joined");
    server.expect("listening");
    assert_eq!(
        links_here(),
        Vec::<String>::new(),
        "the link shows up outside its namespaces"
    );
    client.say("exchange");
    client.expect(&format!("echoed {MESSAGE_BYTES}"));

    // A veth end goes when the namespace of the other is destroyed: the client sees the kernel remove the server's.
    server.kill();
    client.expect("link gone");
    client.kill();
    wait_until("both namespaces are unused", || {
        namespaces.iter().all(|each| !in_use(each))
    });
    assert_eq!(links_here(), Vec::<String>::new());
}

#[test]
fn the_ends_die_with_a_killed_parent() {
    if !is_privileged("the_ends_die_with_a_killed_parent") {
        return;
    }
    // Orphans come to this process, which can then say what they died of.
    set_child_subreaper(true).unwrap();
    let mut parent = start(&mut role("parent"));
    // Parent and ends share one output and speak in any order.
    let mut said = [parent.next(), parent.next(), parent.next()];
    said.sort();
    let [ends, rest @ ..] = said;
    assert_eq!(rest, ["joined", "listening"]);
    let pids = ends.strip_prefix("ends ").unwrap().split(' ');
    let pids: Vec<u32> = pids.map(|pid| pid.parse().unwrap()).collect();
    let namespaces: Vec<PathBuf> = pids.iter().map(|&pid| namespace_of(pid)).collect();

    parent.kill();
    for pid in pids {
        wait_until("an end dies of its signal", || killed(pid));
    }
    wait_until("both namespaces are unused", || {
        namespaces.iter().all(|each| !in_use(each))
    });
    assert_eq!(links_here(), Vec::<String>::new());
}

#[test]
fn the_machines_own_network_is_refused() {
    for refused in [
        link::widen_ports(),
        link::join(std::process::id(), CLIENT_ADDRESS, PREFIX),
        link::configure(SERVER_ADDRESS, PREFIX),
    ] {
        let message = format!("{:#}", refused.unwrap_err());
        assert!(
            message.contains("network namespace") || message.contains("run as root"),
            "{message}"
        );
    }
}

/// The body of every child process; without a role it is no test at all.
#[test]
#[ignore = "the other tests start it in child processes"]
fn end_of_the_link() {
    match env::var(ROLE).as_deref() {
        Ok("server") => serve(),
        Ok("client") => request(),
        Ok("parent") => bear(),
        _ => {}
    }
}

fn serve() {
    link::configure(SERVER_ADDRESS, PREFIX).unwrap();
    let listener = TcpListener::bind((SERVER_ADDRESS, PORT)).unwrap();
    tell("listening");
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        let mut message = Vec::new();
        stream.read_to_end(&mut message).unwrap();
        stream.write_all(&message).unwrap();
    }
}

fn request() {
    let server = env::var(PEER).unwrap().parse().unwrap();
    link::join(server, CLIENT_ADDRESS, PREFIX).unwrap();
    link::widen_ports().unwrap();
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    assert_eq!(range.split_whitespace().collect::<Vec<_>>(), ["1024", "65535"]);
    tell("joined");

    let mut order = String::new();
    std::io::stdin().read_line(&mut order).unwrap();
    assert_eq!(order, "exchange\n");
    let message: Vec<u8> = (0..MESSAGE_BYTES)
        .map(|position| (position % 251) as u8)
        .collect();
    let mut stream = TcpStream::connect((SERVER_ADDRESS, PORT)).unwrap();
    stream.write_all(&message).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut echo = Vec::new();
    stream.read_to_end(&mut echo).unwrap();
    assert!(echo == message, "{} bytes came back, not those sent", echo.len());
    tell(&format!("echoed {}", echo.len()));

    wait_until("the link is gone", || if_nametoindex(CLIENT_NAME).is_err());
    tell("link gone");
    wait_for_the_end();
}

/// Starts both ends as [`request`] and [`serve`] and waits to be killed.
fn bear() {
    let mut server = link::spawn(&mut role("server")).unwrap();
    let mut client = link::spawn(role("client").env(PEER, server.id().to_string())).unwrap();
    tell(&format!("ends {} {}", server.id(), client.id()));
    // Neither ends by itself.
    client.wait().unwrap();
    server.wait().unwrap();
}

fn wait_for_the_end() {
    loop {
        thread::park();
    }
}

/// One write, so that lines of several processes on one pipe stay whole; the first byte ends the test harness's own.
fn tell(line: &str) {
    let mut stdout = std::io::stdout();
    stdout.write_all(format!("\n{MARK}{line}\n").as_bytes()).unwrap();
    stdout.flush().unwrap();
}

/// A child of the test and what it says.
struct Process {
    child: Child,
    /// Apart from `child`, whose `wait` would close it: an end must not mistake that for the reason to go.
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    fn next(&self) -> String {
        self.lines
            .recv_timeout(DEADLINE)
            .expect("the child says something before the deadline")
    }

    fn expect(&self, line: &str) {
        assert_eq!(self.next(), line);
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    fn namespace(&self) -> PathBuf {
        namespace_of(self.child.id())
    }

    /// SIGKILL, and reaps it.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A failed assertion must not leave processes behind; after `kill` both calls do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn role(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([
            "end_of_the_link",
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(ROLE, name);
    command
}

fn end(name: &str, peer: Option<u32>) -> Process {
    let mut command = role(name);
    if let Some(peer) = peer {
        command.env(PEER, peer.to_string());
    }
    link::in_new_netns(&mut command);
    start(&mut command)
}

fn start(command: &mut Command) -> Process {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdin = child.stdin.take().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if let Some(said) = line.strip_prefix(MARK)
                && sender.send(said.to_owned()).is_err()
            {
                return;
            }
        }
    });
    Process { child, stdin, lines }
}

/// Waits by condition: no sleep decides the outcome, only the deadline.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn own_namespace() -> PathBuf {
    fs::read_link("/proc/thread-self/ns/net").unwrap()
}

fn namespace_of(pid: u32) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/ns/net")).unwrap()
}

/// Whether any process is inside. The ends bind their namespace nowhere, so no process means no namespace.
fn in_use(namespace: &Path) -> bool {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(Result::ok)
        .any(|process| fs::read_link(process.path().join("ns/net")).is_ok_and(|inside| inside == namespace))
}

/// Whether the signal has killed this orphan; reaps it.
fn killed(orphan: u32) -> bool {
    let orphan = Pid::from_raw(orphan.cast_signed());
    match waitpid(orphan, Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::StillAlive) => false,
        Ok(WaitStatus::Signaled(_, Signal::SIGKILL, _)) => true,
        other => panic!("an end died of {other:?}, not of the signal"),
    }
}

/// Ends of a link that the test's own namespace shows.
fn links_here() -> Vec<String> {
    if_nameindex()
        .unwrap()
        .iter()
        .map(|interface| interface.name().to_string_lossy().into_owned())
        .filter(|name| [CLIENT_NAME, SERVER_NAME].contains(&name.as_str()))
        .collect()
}
