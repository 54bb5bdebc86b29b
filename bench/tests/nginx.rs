//! Runs against a real nginx with OpenSSL 3.5, told by uprobes and the kernel's records alone.
//!
//! They need root and the file system with nginx that `cargo xtask test` provides and names in `PQTAIL_NGINX_ROOT`. Without them
//! they say so by name, except under CI.
#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use pqtail::{
    collect::tls::expected,
    record::{
        manifest::{Manifest, Status, recording},
        stamps::{Outcome, RequestStamps},
        stream::{Recording, StreamKind},
    },
};
use serde_json::Value;

use common::privileged;

const ROOT: &str = "PQTAIL_NGINX_ROOT";

fn nginx_root(test: &str) -> Option<PathBuf> {
    let root = std::env::var_os(ROOT).map(PathBuf::from);
    assert!(
        root.is_some() || std::env::var_os("CI").is_none(),
        "{test} needs {ROOT}, and CI is set: run `cargo xtask test`"
    );
    if root.is_none() {
        eprintln!(
            "SKIPPED {test}: needs an nginx with OpenSSL 3.5: run `cargo xtask test`, or name its file system in {ROOT}"
        );
    }
    root
}

fn run(root: &Path, results: &Path, arms: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .args([
            "run",
            "--server",
            "nginx",
            "--quiet",
            "--rate",
            "50",
            "--duration",
            "2s",
        ])
        .args([
            "--warmup",
            "200ms",
            "--trials",
            "1",
            "--seed",
            "7",
            "--timeout",
            "60s",
        ])
        .args(["--arms", arms, "--results"])
        .arg(results)
        .arg("--nginx-root")
        .arg(root)
        .output()
        .unwrap()
}

fn only_folder(results: &Path) -> PathBuf {
    let mut folders = fs::read_dir(results).unwrap();
    folders.next().unwrap().unwrap().path()
}

#[test]
fn nginx_serves_every_arm_with_tls_and_its_handshake_is_an_interval_of_its_own() {
    const TEST: &str = "nginx_serves_every_arm_with_tls_and_its_handshake_is_an_interval_of_its_own";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let arms = "x25519,x25519mlkem768,pq-offered-classical-chosen,hello-retry,secp256r1mlkem768,mlkem768";
    let output = run(&root, results.path(), arms);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let folder = only_folder(results.path());
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert!(!folder.join("raw/server/nginx/key.pem").exists());
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
        for request in &requests {
            let arm = trial.trial.arm;
            assert_eq!(request.outcome(), Outcome::Ok, "{arm}: {request:?}");
            assert_eq!(request.group, expected(arm).group, "{arm}");
        }
        assert!(trial.server_cpu_ns > 0);
    }
    let handshake = manifest
        .server
        .probes
        .iter()
        .find(|each| each.name.starts_with("SSL_do_handshake"));
    assert!(handshake.unwrap().attached, "{:?}", manifest.server.probes);

    let outliers = fs::read_to_string(folder.join("outliers.jsonl")).unwrap();
    let outliers: Vec<Value> = outliers
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(!outliers.is_empty());
    let worst = &outliers[0];
    let story = Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .arg("explain")
        .arg(&folder)
        .args([
            "--trial",
            &worst["trial"].to_string(),
            "--request",
            &worst["request"].to_string(),
        ])
        .output()
        .unwrap();
    let story = String::from_utf8(story.stdout).unwrap();
    assert!(story.contains("server: SSL_do_handshake"), "{story}");
    assert!(!story.contains("server's work (no stamps)"), "{story}");
}

#[test]
fn an_arm_that_nginx_cannot_do_is_refused_at_set_up() {
    const TEST: &str = "an_arm_that_nginx_cannot_do_is_refused_at_set_up";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let output = run(&root, results.path(), "x25519,no-crypto");
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
    let output = run(empty.path(), results.path(), "x25519");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("--nginx-root"), "{said}");
}
