//! Runs against a real nginx and a real HAProxy with OpenSSL 3.5, told by uprobes and the kernel's records alone.
//!
//! They need root and the file system with nginx that `cargo xtask test` provides and names in `PQTAIL_NGINX_ROOT`. Without them
//! they say so by name, except under CI.
#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

mod common;

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use pqtail::{
    collect::{nginx::Program, tls::expected},
    record::{
        manifest::{Manifest, Status, recording},
        stamps::{Outcome, RequestStamps, request_flag},
        stream::{Recording, StreamKind},
    },
};
use serde_json::Value;

use common::{
    BEGUN_BYTES, Running, assert_success, make_certificate, nginx_root, only_folder, privileged, wait_until,
};

/// A short run at a low rate; its duration is still to be said.
fn command(results: &Path, arms: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pqtail"));
    command.args(["run", "--quiet", "--rate", "50", "--warmup", "200ms"]);
    command.args(["--trials", "1", "--seed", "7"]);
    command.args(["--arms", arms, "--results"]).arg(results);
    command
}

fn on_nginx(root: &Path, results: &Path, arms: &str) -> Command {
    let mut command = command(results, arms);
    command.args(["--server", "nginx", "--nginx-root"]).arg(root);
    command
}

/// Two seconds, in which nothing times out however busy the machine is.
fn shortly(mut command: Command) -> Output {
    command
        .args(["--duration", "2s", "--timeout", "60s"])
        .output()
        .unwrap()
}

#[test]
fn nginx_serves_every_arm_with_tls_and_its_handshake_is_an_interval_of_its_own() {
    const TEST: &str = "nginx_serves_every_arm_with_tls_and_its_handshake_is_an_interval_of_its_own";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let arms = "x25519,x25519mlkem768,pq-offered-classical-chosen,hello-retry,secp256r1mlkem768,mlkem768";
    let output = shortly(on_nginx(&root, results.path(), arms));
    assert_success(&output);
    let folder = only_folder(results.path()).unwrap();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert!(!folder.join("raw/server/nginx/key-ecdsa-p256.pem").exists());
    require_every_request(&folder, &manifest);
    let handshake = manifest
        .server
        .probes
        .iter()
        .find(|each| each.name.starts_with("SSL_do_handshake"));
    assert!(handshake.unwrap().attached, "{:?}", manifest.server.probes);

    let story = worst_story(&folder);
    assert!(story.contains("server: SSL_do_handshake"), "{story}");
    assert!(!story.contains("server's work (no stamps)"), "{story}");
}

const SCENARIO: &str = r#"
about = "What an nginx can be configured for"
arms = ["x25519", "x25519mlkem768"]
percentile = "p95"

[[condition]]
response-bytes = 60
requests-per-connection = 2

[[condition]]
response-bytes = 300_000
requests-per-connection = 3

[[condition]]
certificate = "rsa-2048"

[[condition]]
resumed = 0.5

[[condition]]
certificate = "ml-dsa-65"
cipher-suite = "chacha20-poly1305-sha256"
"#;

#[test]
fn nginx_serves_under_every_condition_that_it_can_be_configured_for() {
    const TEST: &str = "nginx_serves_under_every_condition_that_it_can_be_configured_for";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let scenario = results.path().join("configured.toml");
    fs::write(&scenario, SCENARIO).unwrap();
    let runs = results.path().join("runs");
    let mut run = on_nginx(&root, &runs, "x25519,x25519mlkem768");
    run.arg("--scenario").arg(&scenario);
    assert_success(&shortly(run));
    let folder = only_folder(&runs).unwrap();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.trials.len(), 10);
    require_every_request(&folder, &manifest);

    fs::write(&scenario, SCENARIO.to_owned() + "loss = 0.01\n").unwrap();
    let mut run = on_nginx(&root, &runs, "x25519");
    run.arg("--scenario").arg(&scenario);
    let refused = shortly(run);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(
        said.contains("loss") && said.contains("--server embedded"),
        "{said}"
    );
}

/// Every request went well, with the group of its arm, and the server worked for it.
fn require_every_request(folder: &Path, manifest: &Manifest) {
    for trial in &manifest.trials {
        let path = recording(
            &folder.join(&manifest.client.stamps),
            "requests",
            trial.trial.index,
        );
        let requests = Recording::<RequestStamps>::open(&path, StreamKind::Requests)
            .unwrap()
            .records;
        assert!(!requests.is_empty());
        let mut resumed = 0;
        for request in &requests {
            let arm = trial.trial.arm;
            let condition = &manifest.plan.conditions[trial.trial.condition as usize];
            assert_eq!(request.outcome(), Outcome::Ok, "{arm}: {request:?}");
            let expected = expected(arm, condition);
            assert_eq!(request.group, expected.group, "{arm}");
            assert_eq!(request.cipher_suite, condition.cipher_suite.number(), "{arm}");
            let body = condition.response_bytes * condition.requests_per_connection;
            assert!(request.bytes_in > body, "{arm}: {request:?}");
            resumed += u32::from(request.flags & request_flag::RESUMED != 0);
        }
        // As drawn from the seed: half of a hundred at least is some.
        let condition = &manifest.plan.conditions[trial.trial.condition as usize];
        assert_eq!(resumed > 0, condition.resumed > 0.0, "{}", trial.trial.arm);
        assert!(trial.server_cpu_ns > 0);
    }
}

/// What is said of the worst request.
fn worst_story(folder: &Path) -> String {
    let outliers = fs::read_to_string(folder.join("outliers.jsonl")).unwrap();
    let worst: Value = serde_json::from_str(outliers.lines().next().expect("a tail")).unwrap();
    let story = Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .arg("explain")
        .arg(folder)
        .args(["--trial", &worst["trial"].to_string()])
        .args(["--request", &worst["request"].to_string()])
        .output()
        .unwrap();
    String::from_utf8(story.stdout).unwrap()
}

#[test]
fn an_nginx_that_dies_ends_the_run_and_what_was_recorded_is_kept() {
    const TEST: &str = "an_nginx_that_dies_ends_the_run_and_what_was_recorded_is_kept";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let mut command = on_nginx(&root, results.path(), "x25519");
    // Longer than anybody waits, and requests that go unanswered give up soon.
    command.args(["--duration", "300s", "--timeout", "2s"]);
    let mut run = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let manifest = || Manifest::read(&only_folder(results.path())?).ok();
    wait_until("nginx serves", || {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        manifest().is_some_and(|manifest| !manifest.server.threads.is_empty())
    });
    let folder = only_folder(results.path()).unwrap();
    let requests = folder.join("raw/client/requests-000.pqr");
    wait_until("requests are recorded", || {
        fs::metadata(&requests).is_ok_and(|file| file.len() > BEGUN_BYTES)
    });
    let nginx = manifest().unwrap().server.threads[0];
    kill(Pid::from_raw(nginx.cast_signed()), Signal::SIGKILL).unwrap();
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains(&format!("the server's process {nginx} (nginx) has ended")),
        "{said}"
    );
    let Status::Cut { reason } = manifest().unwrap().status else {
        panic!("{said}")
    };
    assert!(reason.contains("has ended"), "{reason}");
    let requests = Recording::<RequestStamps>::open(&requests, StreamKind::Requests).unwrap();
    assert!(
        requests
            .records
            .iter()
            .any(|request| request.outcome() == Outcome::Ok)
    );
}

/// Two threads behind one port that takes both groups, with a certificate and an answer of its own.
fn haproxy(root: &Path, folder: &Path, port: u16) -> Running {
    let (key, certificate) = make_certificate(folder, "somebody.test");
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    fs::write(folder.join("pair.pem"), read(&certificate) + &read(&key)).unwrap();
    let text = format!(
        "global\n  nbthread 2\ndefaults\n  mode http\n  timeout client 10s\n  timeout http-request 10s\nfrontend f\n  bind :{port} ssl \
         crt pair.pem curves X25519MLKEM768:X25519\n  http-request return status 200 content-type text/plain string \
         \"somebody's answer\"\n"
    );
    fs::write(folder.join("haproxy.cfg"), text).unwrap();
    let program = Program {
        path: PathBuf::from("/usr/sbin/haproxy"),
        root: Some(root.to_owned()),
    };
    let mut command = program.command().unwrap();
    command.args(["-db", "-f", "haproxy.cfg"]).current_dir(folder);
    Running(command.spawn().expect("haproxy is in the file system"))
}

#[test]
fn a_haproxy_that_runs_already_needs_nothing_but_its_port() {
    const TEST: &str = "a_haproxy_that_runs_already_needs_nothing_but_its_port";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    // It asks for the name of its working directory, so that must lie inside its root.
    let folder = tempfile::tempdir_in(root.join("tmp")).unwrap();
    let port = TcpListener::bind("0.0.0.0:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let adopt = |arms: &str| {
        let mut command = command(results.path(), arms);
        command.args(["--server", "adopted", "--one-port", "--port", &port.to_string()]);
        shortly(command)
    };
    let refused = adopt("x25519");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(said.contains(&format!("nobody listens on port {port}")), "{said}");
    assert_eq!(
        only_folder(results.path()),
        None,
        "a failed set-up leaves no folder"
    );

    let mut server = haproxy(&root, folder.path(), port);
    wait_until("haproxy listens", || {
        assert!(server.0.try_wait().unwrap().is_none(), "haproxy has ended");
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    let output = adopt("x25519,x25519mlkem768");
    assert_success(&output);
    let folder = only_folder(results.path()).unwrap();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert_eq!(manifest.server.software, "haproxy");
    assert!(
        manifest.server.threads.len() >= 2,
        "{:?}",
        manifest.server.threads
    );
    require_every_request(&folder, &manifest);
    let story = worst_story(&folder);
    assert!(story.contains("server: SSL_do_handshake"), "{story}");
    assert!(!Path::new("/sys/class/net/pq-server").exists());
}

#[test]
fn culprits_of_requests_to_nginx_are_named() {
    const TEST: &str = "culprits_of_requests_to_nginx_are_named";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let output = Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .args(["truth", "--json", "--server", "nginx", "--nginx-root"])
        .arg(&root)
        .args(["--duration", "2s", "--rate", "100", "--seed", "1"])
        .args(["--cases", "fifo-hog.server,stop.server,loss.server-flight"])
        .output()
        .unwrap();
    assert_success(&output);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // As for the embedded server: a shared machine adds causes of its own.
    for cause in ["server.run_queue", "server.stopped", "retransmit.data"] {
        let share = |name: &str| report["causes"][cause][name].as_f64().unwrap_or(0.0);
        assert!(
            share("recall") >= 0.6 && share("culprit_right") >= 0.8,
            "{cause}: {report:#}"
        );
    }
}

#[test]
fn an_arm_that_nginx_cannot_do_is_refused_at_set_up() {
    const TEST: &str = "an_arm_that_nginx_cannot_do_is_refused_at_set_up";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let output = shortly(on_nginx(&root, results.path(), "x25519,no-crypto"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        said.contains("no-crypto") && said.contains("--server embedded"),
        "{said}"
    );
}

#[test]
fn a_root_without_nginx_is_told_with_the_remedy() {
    const TEST: &str = "a_root_without_nginx_is_told_with_the_remedy";
    let Some(_alone) = privileged(TEST) else { return };
    let (results, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let output = shortly(on_nginx(empty.path(), results.path(), "x25519"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("--nginx-root"), "{said}");
}
