//! The short form of the truth suite: real runs, real faults, and the cause and culprit that must be named.
//!
//! It demands less than the suite aims at: a shared machine adds causes of its own, which are not this test's to judge.

mod common;

use std::process::Command;

use serde_json::Value;

/// One case per mechanism; the whole suite is `cargo xtask truth`.
const CASES: &str = "nothing,fifo-hog.server,stop.client,sleep.server,lock.server,held-response.server,\
                     accept-pause.server,loss.syn,loss.server-flight,few-ports.client";

/// Least share of the requests that a fault hit whose cause must be right.
const RECALL_MIN: f64 = 0.6;
/// Least share of those whose culprit must be right.
const CULPRIT_MIN: f64 = 0.8;

#[test]
fn known_culprits_are_named() {
    if !common::is_privileged("known_culprits_are_named") {
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .args([
            "truth",
            "--json",
            "--duration",
            "3s",
            "--rate",
            "100",
            "--seed",
            "1",
        ])
        .args(["--cases", CASES])
        .output()
        .expect("the program starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let causes = report["causes"].as_object().expect("an object");
    for cause in [
        "server.run_queue",
        "client.stopped",
        "server.blocked",
        "server.accept_queue",
        "delayed_ack",
        "retransmit.syn",
        "retransmit.data",
    ] {
        let score = causes
            .get(cause)
            .unwrap_or_else(|| panic!("no request ought to have been laid to {cause}: {report:#}"));
        let share = |name: &str| score[name].as_f64();
        assert!(
            share("recall").expect("hits") >= RECALL_MIN,
            "{cause}: {report:#}"
        );
        assert!(
            share("culprit_right").is_none_or(|share| share >= CULPRIT_MIN),
            "{cause}: {report:#}"
        );
    }
    for case in ["nothing", "few-ports.client"] {
        for check in report["cases"][case]["checks"].as_array().expect("an array") {
            // A tick of /proc/stat more or less is the machine's affair.
            let is_steal = check["what"].as_str().is_some_and(|what| what.contains("steal"));
            assert!(is_steal || check["ok"] == true, "{case}: {check:#}");
        }
    }
    let blamed = report["baseline"]["blamed"].as_object().expect("an object");
    for injected in ["client.stopped", "delayed_ack"] {
        assert!(
            !blamed.contains_key(injected),
            "blamed without a fault: {report:#}"
        );
    }
}
