//! Probes on a server that is not ours: a TLS handshake through OpenSSL's own server, told by uprobes and by reads.
//!
//! Needs root and the `openssl` program with a shared libssl. Without them it says so by name, except under CI.

mod common;

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
};

use pqtail::{
    collect::{
        drain::Drain,
        host,
        probes::{ProbeSettings, Probes, RING_BYTES_DEFAULT},
    },
    record::stream::{Recording, StreamKind},
};
use pqtail_common::{Call, Head, RECORD_BYTES, Socket, function, kind};
use zerocopy::FromBytes;

use common::{Running, make_certificate, privileged, wait_until};

fn openssl(arguments: &[&str]) -> Running {
    let child = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl was there a moment ago");
    Running(child)
}

fn say(to: &mut Running, line: &str) {
    let input = to.0.stdin.as_mut().expect("a pipe");
    writeln!(input, "{line}").expect("it reads");
}

fn hear(from: &mut Running) -> String {
    let mut line = String::new();
    BufReader::new(from.0.stdout.as_mut().expect("a pipe"))
        .read_line(&mut line)
        .expect("it writes");
    line.trim_end().to_owned()
}

fn has_openssl(test: &str) -> bool {
    if Command::new("openssl").arg("version").output().is_ok() {
        return true;
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "{test} needs openssl, and CI is set: install the package openssl"
    );
    eprintln!("SKIPPED {test}: needs the program openssl (package openssl)");
    false
}

fn listens(pid: u32, port: u16) -> bool {
    let wanted = format!(":{port:04X} ");
    ["tcp", "tcp6"].iter().any(|table| {
        fs::read_to_string(format!("/proc/{pid}/net/{table}"))
            .unwrap_or_default()
            .lines()
            // State 0A is LISTEN.
            .any(|line| line.contains(&wanted) && line.contains(" 0A "))
    })
}

fn of<T: FromBytes>(records: &[[u8; RECORD_BYTES]], wanted: u8) -> Vec<T> {
    records
        .iter()
        .filter(|raw| {
            Head::read_from_prefix(raw.as_slice())
                .expect("a head first")
                .0
                .kind
                == wanted
        })
        .map(|raw| T::read_from_bytes(raw.as_slice()).expect("every record has this size"))
        .collect()
}

#[test]
fn a_handshake_in_libssl_is_a_call_and_its_connection_is_read_inside() {
    const TEST: &str = "a_handshake_in_libssl_is_a_call_and_its_connection_is_read_inside";
    let Some(_alone) = privileged(TEST) else { return };
    if !has_openssl(TEST) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (key, certificate) = make_certificate(folder.path(), "pqtail.test");
    let text = |path: &Path| path.to_str().expect("a temporary folder's name").to_owned();
    let (key, certificate) = (text(&key), text(&certificate));
    let port = {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let address = format!("127.0.0.1:{port}");
    let mut server = openssl(&[
        "s_server",
        "-quiet",
        "-tls1_3",
        "-accept",
        &address,
        "-key",
        &key,
        "-cert",
        &certificate,
    ]);
    let pid = server.0.id();
    wait_until("the server listens", || listens(pid, port));

    let mut probes = Probes::attach(&ProbeSettings {
        ports: vec![port],
        cpus: host::cpu_ticks().cpus.into_keys().collect(),
        heartbeat_ns: None,
        ring_bytes: RING_BYTES_DEFAULT,
        reads: true,
    })
    .unwrap();
    let whole = probes.attach_libssl(pid, None);
    assert!(whole, "{:#?}", probes.status());
    probes.watch_thread(pid).unwrap();
    let drain = Drain::start(&mut probes, None).unwrap();
    let path = folder.path().join("kernel.pqr");
    drain.begin_trial(&path, 0).unwrap();

    let mut client = openssl(&["s_client", "-quiet", "-tls1_3", "-connect", &address]);
    say(&mut client, "question");
    assert_eq!(hear(&mut server), "question");
    say(&mut server, "answer");
    assert_eq!(hear(&mut client), "answer");
    drop(client);
    let summary = drain.end_trial().unwrap();
    assert!(summary.lost.values().all(|&count| count == 0));

    let records = Recording::<[u8; RECORD_BYTES]>::open(&path, StreamKind::Kernel)
        .unwrap()
        .records;
    let calls: Vec<Call> = of(&records, kind::CALL);
    assert!(
        calls
            .iter()
            .all(|call| call.head.tid == pid && call.start_ns < call.head.at_ns),
        "{calls:#?}"
    );
    let handshakes: Vec<_> = calls
        .iter()
        .filter(|call| call.function == function::DO_HANDSHAKE && call.returned == 1)
        .collect();
    let [handshake] = handshakes[..] else {
        panic!("one handshake succeeded: {calls:#?}")
    };
    // The ClientHello and the client's last flight are taken out of the socket by the same thread, inside.
    let reads: Vec<Socket> = of(&records, kind::READ);
    let inside: Vec<_> = reads
        .iter()
        .filter(|read| read.head.tid == pid)
        .filter(|read| handshake.start_ns < read.head.at_ns && read.head.at_ns < handshake.head.at_ns)
        .collect();
    assert!(inside.len() >= 2, "{reads:#?}");
    assert!(inside.iter().all(|read| read.local_port == port));
    assert!(
        inside
            .iter()
            .all(|read| read.remote_port == inside[0].remote_port && read.socket == inside[0].socket)
    );
    assert!(
        reads.iter().all(|read| read.local_port == port),
        "the client's reads are nobody's business: {reads:#?}"
    );
}

#[test]
fn a_process_without_libssl_is_told_with_the_consequence() {
    let Some(_alone) = privileged("a_process_without_libssl_is_told_with_the_consequence") else {
        return;
    };
    let mut probes = Probes::attach(&ProbeSettings {
        ports: Vec::new(),
        cpus: vec![0],
        heartbeat_ns: None,
        ring_bytes: RING_BYTES_DEFAULT,
        reads: true,
    })
    .unwrap();
    assert!(!probes.attach_libssl(std::process::id(), None));
    let row = probes
        .status()
        .iter()
        .find(|row| row.name.starts_with("SSL_do_handshake "))
        .unwrap();
    assert!(!row.attached && !row.consequence.is_empty());
    assert!(
        row.reason.contains("SSL_do_handshake") && row.reason.contains("stripped"),
        "{}",
        row.reason
    );
}
