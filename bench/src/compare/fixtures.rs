//! Published runs made by hand: two arms in five blocks that drift, and one of them costs 50 µs more in each.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    record::{
        SCHEMA,
        manifest::{HostFacts, MANIFEST, ProbeStatus},
    },
    report::summary::{Percentiles, SUMMARY_SCHEMA},
};

/// What each block adds to both of its trials, ns.
const DRIFT_NS: [u64; 5] = [10_000, 2_000, 7_000, 0, 14_000];

/// What a trial has by itself, ns; sums to 0 over the blocks.
const NOISE_NS: [i64; 5] = [200, -300, 100, -100, 100];

/// Results folders, removed at the end.
pub(crate) struct Folders {
    home: tempfile::TempDir,
    pub(crate) paths: Vec<PathBuf>,
}

impl Folders {
    pub(crate) fn new() -> Self {
        Self {
            home: tempfile::tempdir().expect("a folder"),
            paths: Vec::new(),
        }
    }

    /// One more run with a change to its summary and manifest; what is made null is not written.
    pub(crate) fn add(&mut self, change: impl FnOnce(&mut Value, &mut Value)) {
        let path = self.home.path().join(format!("run-{}", self.paths.len()));
        let (mut summary, mut manifest) = (summary(), manifest());
        change(&mut summary, &mut manifest);
        fs::create_dir(&path).expect("a folder");
        write(&path.join("summary.json"), &summary);
        write(&path.join(MANIFEST), &manifest);
        self.paths.push(path);
    }
}

fn write(path: &Path, value: &Value) {
    if !value.is_null() {
        fs::write(path, value.to_string()).expect("a file");
    }
}

fn summary() -> Value {
    let arm = |cost_ns: u64, position: usize| {
        let trials: Vec<Value> = (0..5)
            .map(|block| {
                let ns = 800_000 + cost_ns + DRIFT_NS[block];
                let noise_ns = if cost_ns > 0 { NOISE_NS[block] } else { 0 };
                let ns = ns.strict_add_signed(noise_ns);
                json!({"trial": 2 * block + position, "requests": 3000, "percentiles_ns": all(ns)})
            })
            .collect();
        let ledger =
            json!({"client.compute": 200_000, "network": 400_000, "server.compute": 200_000 + cost_ns});
        json!({"trials": trials, "ledger_median": ledger, "ledger_tail": ledger})
    };
    let difference = json!({"arm": "x25519mlkem768", "baseline": "x25519"});
    let split = |statistic: &str| {
        json!({
            "arm": "x25519mlkem768", "baseline": "x25519", "statistic": statistic,
            "lines": {"network": -10_000, "server.compute": 60_000}
        })
    };
    json!({
        "schema": SUMMARY_SCHEMA, "pqtail": "0.1.0", "begun": "2026-12-03T06:00:00Z", "valid": true,
        "verdicts": [{"rule": "trials", "ok": true, "figure": "5 per arm", "text": "Raise --trials."}],
        "arms": {"x25519": arm(0, 0), "x25519mlkem768": arm(50_000, 1)},
        "differences": [difference],
        "decomposition": [split("p50"), split("p99")],
    })
}

/// All statistics alike.
fn all(ns: u64) -> Percentiles {
    Percentiles {
        min: ns,
        mean: ns,
        p50: ns,
        p95: ns,
        p99: ns,
        p999: ns,
        max: ns,
    }
}

fn manifest() -> Value {
    let facts = HostFacts {
        kernel: "6.12".to_owned(),
        machine: "x86_64".to_owned(),
        command_line: Some("mitigations=off".to_owned()),
        cpu_model: Some("AMD EPYC".to_owned()),
        cpus_online: 2,
        memory_bytes: Some(1024),
        clocksource: Some("tsc".to_owned()),
        governor: Some("performance".to_owned()),
        lockdown: Some("[none]".to_owned()),
        boot_id: Some("a boot".to_owned()),
        cgroup_limits: [("cpu.max".to_owned(), "max".to_owned())].into(),
        sysctls: [("net.core.somaxconn".to_owned(), "4096".to_owned())].into(),
        interrupts: [(1, "virtio".to_owned())].into(),
        ..HostFacts::default()
    };
    let probe = ProbeStatus {
        name: "sched_switch".to_owned(),
        attached: true,
        reason: String::new(),
        consequence: "blind".to_owned(),
    };
    let host = |software: &str| {
        json!({
            "address": "10.77.0.1", "netns": 1, "threads": [1], "software": software, "cpus": [0], "stamps": "raw/client",
            "kernel": "raw/local", "facts": facts, "probes": [probe]
        })
    };
    let trials: Vec<Value> = (0..10)
        .map(|index| json!({"trial": {"index": index, "block": index / 2}}))
        .collect();
    json!({
        "schema": SCHEMA, "pqtail": "0.1.0", "begun": "2026-12-03T06:00:00Z", "status": {"state": "complete"},
        "plan": {
            "scenario": "fresh-handshake", "arms": ["x25519", "x25519mlkem768"], "trials_per_arm": 5, "rate_hz": 300.0,
            "duration_ns": 10_000_000_000u64, "warmup_ns": 2_000_000_000, "arrivals": "poisson", "seed": 1,
            "timeout_ns": 5_000_000_000u64, "probes": true
        },
        "client": host(""), "server": host("pqtail 0.1.0 with rustls"), "trials": trials,
    })
}
