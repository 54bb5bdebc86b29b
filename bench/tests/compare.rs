//! Runs set side by side as a reader of published results does it: real small runs, without their recordings.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

fn pqtail(arguments: &[&str], folders: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .args(arguments)
        .args(folders)
        .output()
        .expect("pqtail starts")
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A recorded run as it is published: analysed, and then without its recordings.
fn published(name: &str, home: &Path) -> PathBuf {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/recorded")
        .join(name);
    let results = home.join(name);
    for folder in ["client", "local", "server"] {
        let to = results.join("raw").join(folder);
        fs::create_dir_all(&to).expect("folder");
        for file in fs::read_dir(recorded.join("raw").join(folder)).expect("recordings") {
            let file = file.expect("recording");
            fs::copy(file.path(), to.join(file.file_name())).expect("copy");
        }
    }
    fs::copy(recorded.join("manifest.json"), results.join("manifest.json")).expect("copy");
    text(&pqtail(&["analyze"], &[&results]));
    for folder in ["raw", "requests"] {
        fs::remove_dir_all(results.join(folder)).expect("folder");
    }
    results
}

#[test]
fn published_runs_are_compared_without_their_recordings() {
    let home = tempfile::tempdir().expect("folder");
    let runs =
        ["fifo-hog.server", "lock.server", "loss.server-flight"].map(|name| published(name, home.path()));
    let [hog, lock, loss] = runs.each_ref().map(PathBuf::as_path);

    let output = pqtail(&["compare", "--json"], &[hog, lock, loss]);
    let comparison: Value = serde_json::from_str(&text(&output)).expect("JSON");
    assert_eq!(comparison["runs"].as_array().map(Vec::len), Some(3));
    assert_eq!(
        comparison["runs"][0]["valid"], false,
        "one trial per arm is too few"
    );
    let pairs = comparison["pairs"].as_array().expect("pairs");
    assert_eq!(pairs.len(), 2);
    for (pair, folder) in pairs.iter().zip([lock, loss]) {
        let of_run = |folder: &Path| -> Value {
            let json = fs::read(folder.join("summary.json")).expect("summary");
            serde_json::from_slice(&json).expect("JSON")
        };
        let p99 = |summary: &Value, arm: &str| summary["arms"][arm]["percentiles_ns"]["p99"].as_i64();
        let (first, later) = (of_run(hog), of_run(folder));
        let arms = pair["arms"].as_array().expect("arms");
        assert_eq!(arms.len(), 10, "two arms of five statistics");
        for each in arms.iter().filter(|each| each["statistic"] == "p99") {
            // With one trial, the mean over trials is the run's own figure.
            let arm = each["arm"].as_str().expect("name");
            let difference_ns = p99(&later, arm)
                .zip(p99(&first, arm))
                .map(|(later, first)| later - first);
            assert_eq!(each["difference_ns"].as_i64(), difference_ns);
            assert_eq!(each["interval_ns"], Value::Null, "one trial tells no spread");
        }
        // Every ledger sums to what its requests took, so its lines here do too.
        for ledger in pair["ledgers"].as_array().expect("ledgers") {
            if ledger["of"] != "middle" {
                continue;
            }
            let arm = ledger["arm"].as_str().expect("name");
            let sum_ns: i64 = ledger["lines"]
                .as_array()
                .expect("lines")
                .iter()
                .filter_map(|line| line["first_ns"].as_i64())
                .sum();
            let lines = first["arms"][arm]["ledger_median"].as_object().expect("ledger");
            assert_eq!(sum_ns, lines.values().filter_map(Value::as_i64).sum::<i64>());
        }
    }

    let text = text(&pqtail(&["compare"], &[hog, loss]));
    assert!(text.starts_with(" INVALID: 2 of 2 runs failed"), "{text}");
    assert!(text.contains("run begun"), "{text}");
    assert!(text.contains("B against A"), "{text}");
    assert!(
        text.contains("What x25519mlkem768 \u{2212} x25519 is made of at p99"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'), "colour is for terminals");
    assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
}

#[test]
fn a_run_that_was_never_analysed_is_an_error_with_the_remedy() {
    let home = tempfile::tempdir().expect("folder");
    let run = published("lock.server", home.path());
    fs::remove_file(run.join("summary.json")).expect("summary");
    let output = pqtail(&["compare"], &[&run, &run]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let remedy = format!("`pqtail analyze {}` makes it", run.display());
    assert!(error.contains(&remedy), "{error}");

    let alone = pqtail(&["compare"], &[&run]);
    assert!(!alone.status.success(), "one run is no comparison");
}
