//! Scenarios end to end, as root: conditions besides the arms, runs that decide how long they are, and the collapse of a load generator
//! that has too little CPU.
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use pqtail::{
    collect::run::REPEATS_MAX,
    plan::Trial,
    record::{
        manifest::{Manifest, Status, recording},
        stamps::{Outcome, RequestStamps, request_flag},
        stream::{Recording, StreamKind},
    },
};
use serde_json::Value;

use common::{assert_success, only_folder, privileged};

fn pqtail(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .args(arguments)
        .output()
        .unwrap()
}

/// A run whose requests all end well however busy the machine is.
fn run(results: &Path, flags: &str) -> (PathBuf, Manifest, Value) {
    let results = results.to_str().unwrap();
    let flags: Vec<_> = flags.split_whitespace().collect();
    let usual = [
        "run",
        "--quiet",
        "--timeout",
        "60s",
        "--seed",
        "5",
        "--results",
        results,
    ];
    let output = pqtail(&[&usual[..], &flags].concat());
    assert_success(&output);
    let folder = only_folder(Path::new(results)).unwrap();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    let summary = serde_json::from_slice(&fs::read(folder.join("summary.json")).unwrap()).unwrap();
    (folder, manifest, summary)
}

fn requests(folder: &Path, trial: &Trial) -> Vec<RequestStamps> {
    let path = recording(&folder.join("raw/client"), "requests", trial.index);
    Recording::open(&path, StreamKind::Requests).unwrap().records
}

fn verdict<'a>(summary: &'a Value, rule: &str) -> &'a Value {
    let mut verdicts = summary["verdicts"].as_array().unwrap().iter();
    verdicts.find(|verdict| verdict["rule"] == rule).unwrap()
}

const SCENARIO: &str = r#"
about = "A little of everything"
rate = 60
trials = 1
duration = "1500ms"
warmup = "200ms"
percentile = "p95"

[[condition]]

[[condition]]
response-bytes = 200_000
requests-per-connection = 3

[[condition]]
resumed = 0.5

[[condition]]
resumed = 1.0
early-data = true

[[condition]]
certificate = "rsa-2048"
held-connections = 40
held-rate = 50

[[condition]]
mss = 600
loss = 0.05
arms = ["x25519", "x25519mlkem768", "no-crypto"]
"#;

#[test]
fn every_condition_is_run_checked_and_explained() {
    let Some(_alone) = privileged("every_condition_is_run_checked_and_explained") else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let file = results.path().join("everything.toml");
    fs::write(&file, SCENARIO).unwrap();
    let runs = results.path().join("runs");
    let (folder, manifest, summary) = run(&runs, &format!("--scenario {}", file.display()));
    assert_eq!(manifest.plan.scenario, "everything");
    assert_eq!(manifest.trials.len(), 13);
    let arms = summary["arms"].as_object().unwrap();
    for record in &manifest.trials {
        let trial = &record.trial;
        let condition = &manifest.plan.conditions[trial.condition as usize];
        let name = manifest.plan.cell_name(trial.cell());
        let arm = &arms[&name];
        assert_eq!(arm["arm"], trial.arm.name());
        // Every request with a ledger has one that sums to its latency, and most of it is explained.
        let ledger = arm["ledger_median"].as_object().unwrap();
        let line = |line: &str| ledger.get(line).and_then(Value::as_u64).unwrap_or(0);
        let total: u64 = ledger.values().filter_map(Value::as_u64).sum();
        assert!(total > 0, "{name} has no ledger");
        assert!(line("unexplained") * 2 < total, "{name}: {ledger:?}");
        for request in requests(&folder, trial) {
            assert_eq!(request.outcome(), Outcome::Ok, "{name}: {request:?}");
            let is = |flag| request.flags & flag != 0;
            if condition.resumed == 0.0 {
                assert!(!is(request_flag::RESUMED));
            }
            if condition.early_data {
                assert!(is(request_flag::RESUMED) && is(request_flag::EARLY_DATA));
            }
        }
    }
    let lines = fs::read_to_string(folder.join("outliers.jsonl")).unwrap();
    let mut outliers = 0;
    for line in lines.lines() {
        let outlier: Value = serde_json::from_str(line).unwrap();
        let ledger = outlier["ledger"].as_object().unwrap();
        let sum: u64 = ledger.values().filter_map(Value::as_u64).sum();
        assert_eq!(Some(sum), outlier["latency_ns"].as_u64(), "{outlier}");
        assert!(arms.contains_key(outlier["arm"].as_str().unwrap()));
        outliers += 1;
    }
    assert!(outliers > 0);
    // One in twenty segments in each direction: some request of the lossy cells waited for one.
    let lost = |line: &str| lines.contains(&format!("\"retransmit.{line}\""));
    assert!(lost("data") || lost("syn") || lost("syn_ack"), "{lines}");
    let page = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(page.contains("Difference at the median by condition"));
}

#[test]
fn a_drowning_load_generator_is_no_result_and_its_cause_is_named() {
    let Some(_alone) = privileged("a_drowning_load_generator_is_no_result_and_its_cause_is_named") else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    let (_, _, summary) = run(
        results.path(),
        "--rate 400 --duration 2s --warmup 200ms --trials 1 --arms x25519 --client-cpu-share 0.05",
    );
    assert_eq!(summary["valid"], false);
    let in_time = verdict(&summary, "load generator in time");
    assert_eq!(in_time["ok"], false);
    let figure = in_time["figure"].as_str().unwrap();
    assert!(figure.contains("client."), "{figure}");
    let budget = summary["arms"]["x25519"]["ledger_tail"]["client.throttled"].as_u64();
    assert!(budget.is_some_and(|ns| ns > 0), "{summary:#}");
    let cell = &summary["conditions"][0]["cells"][0];
    assert!(cell["saturated"].as_str().unwrap().contains("late"), "{cell}");
}

#[test]
fn a_run_goes_on_until_the_interval_is_narrow_or_the_cap_is_reached() {
    let Some(_alone) = privileged("a_run_goes_on_until_the_interval_is_narrow_or_the_cap_is_reached") else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    // No two trials are so alike that the interval could be a thousandth of the median wide.
    let (_, manifest, summary) = run(
        results.path(),
        "--rate 100 --duration 1s --warmup 100ms --trials 2 --until 0.001 --trials-max 3",
    );
    assert_eq!(
        (manifest.plan.first_stage, manifest.plan.trials_per_arm),
        (Some(2), 3)
    );
    assert_eq!(manifest.trials.len(), 6);
    assert_eq!(summary["differences"][0]["blocks"], 3);
}

#[test]
fn an_arm_against_itself_is_compared_200_times() {
    let Some(_alone) = privileged("an_arm_against_itself_is_compared_200_times") else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    // Far more than the median moves between trials so short, however busy the machine is.
    let (_, manifest, summary) = run(
        results.path(),
        "--rate 30 --duration 500ms --warmup 50ms --null --known-shift 10ms",
    );
    assert_eq!(manifest.plan.scenario, "fresh-handshake-null");
    assert_eq!(manifest.trials.len(), 32);
    assert_eq!(summary["null"][0]["comparisons"], 200);
    let shift = &summary["known_shifts"][0];
    assert_eq!(
        (&shift["shift_ns"], &shift["blocks"], &shift["comparisons"]),
        (&10_000_000.into(), &16.into(), &200.into())
    );
    assert!(shift["interval_ns"][0].as_i64().unwrap() > 0, "{shift}");
}

#[test]
fn trials_from_which_the_hypervisor_took_too_much_are_run_again_and_kept() {
    let Some(_alone) = privileged("trials_from_which_the_hypervisor_took_too_much_are_run_again_and_kept")
    else {
        return;
    };
    let results = tempfile::tempdir().unwrap();
    // Whether it takes any is its own affair; if it does, any is too much.
    let (folder, manifest, summary) = run(
        results.path(),
        "--rate 50 --duration 1s --warmup 100ms --trials 3 --arms x25519 --steal-max 0",
    );
    assert_eq!((manifest.trials.len(), manifest.steal_share_max), (3, Some(0.0)));
    let took = |record| manifest.steal_share(record).unwrap() > 0.0;
    assert!(manifest.set_aside.iter().all(took));
    for kept in manifest.trials.iter().filter(|record| took(record)) {
        let before = manifest.set_aside.iter().filter(|each| each.trial == kept.trial);
        assert_eq!(before.count(), REPEATS_MAX);
    }
    assert_eq!(
        summary["set_aside"]["kept"],
        manifest.trials.iter().filter(|record| took(record)).count()
    );
    for (number, record) in manifest.set_aside.iter().enumerate() {
        let name = format!("{number:03}-requests-{:03}.pqr", record.trial.index);
        let path = folder.join("raw/client/set-aside").join(name);
        let recorded = Recording::<RequestStamps>::open(&path, StreamKind::Requests).unwrap();
        assert!(!recorded.records.is_empty());
    }
}

#[test]
fn scenarios_are_listed_and_what_is_wrong_with_one_is_named_by_its_line() {
    let listed = pqtail(&["scenarios"]);
    assert_success(&listed);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    for name in ["payload-sweep", "resumption-mix", "rate-sweep", "1MB-10req"] {
        assert!(text.contains(name), "{text}");
    }
    let json: Value = serde_json::from_slice(&pqtail(&["scenarios", "--json"]).stdout).unwrap();
    assert!(json.as_array().unwrap().len() >= 7);

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    fs::write(&file, "about = \"x\"\n\n[sweep]\nresponse-byte = [3]\n").unwrap();
    let refused = pqtail(&["run", "--scenario", file.to_str().unwrap()]);
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains("line 4") && said.contains("response-byte") && said.contains("mine.toml"),
        "{said}"
    );
}
