//! Small real runs with a known culprit each, as they were recorded, and what the analysis said of them: a change that makes it
//! say something else must be meant. `GOLDEN=write cargo test -p pqtail --test golden` writes it anew.

use std::{fs, path::Path};

use pqtail::analyze::{analyze, explain};
use serde_json::{Value, json};

/// Requests of each trial whose story is kept: the slowest.
const STORIES: usize = 4;

/// Everything that must stay: the ledger of every request, and the stories of the slowest.
fn told(results: &Path) -> Value {
    let analysis = analyze(results).expect("a recorded run");
    let mut ledgers = Vec::new();
    let mut slowest = Vec::new();
    for trial in &analysis.trials {
        let number = trial.trial.index;
        let mut by_latency: Vec<(u64, u32)> = Vec::new();
        for row in &trial.rows {
            let Some((latency_ns, ledger)) = row.stamps.latency_ns().zip(row.ledger) else {
                continue;
            };
            assert_eq!(ledger.total_ns(), latency_ns);
            ledgers.push(json!({"trial": number, "request": row.stamps.request, "ledger": ledger}));
            if row.stamps.is_measured() {
                by_latency.push((latency_ns, row.stamps.request));
            }
        }
        by_latency.sort_unstable();
        slowest.extend(
            by_latency
                .iter()
                .rev()
                .take(STORIES)
                .map(|&(_, request)| (number, request)),
        );
    }
    let stories = explain(results, &slowest).expect("requests of this run");
    let stories: Vec<Value> = stories
        .iter()
        .map(|story| serde_json::to_value(&story.outlier).expect("JSON"))
        .collect();
    json!({"stories": stories, "ledgers": ledgers})
}

fn stays(name: &str, cause: &str, culprit: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/recorded")
        .join(name);
    let told = told(&folder);
    let worst = &told["stories"][0];
    assert_eq!(worst["cause"], cause, "{worst:#}");
    assert!(
        worst["culprit"].as_str().is_some_and(|who| who.contains(culprit)),
        "{worst:#}"
    );
    let path = folder.join("golden.json");
    // One line a value: a change shows which requests it touches.
    let lines = |key: &str| -> String {
        let values = told[key].as_array().expect("an array");
        values.iter().map(|value| format!("{value}\n")).collect()
    };
    let text = lines("stories") + &lines("ledgers");
    if std::env::var_os("GOLDEN").is_some_and(|value| value == "write") {
        fs::write(&path, &text).expect("the fixtures' folder");
    }
    let golden = fs::read_to_string(&path).expect("run once with GOLDEN=write");
    let differing = golden.lines().zip(text.lines()).find(|(was, is)| was != is);
    assert_eq!(differing, None, "{name}: golden, then as it is now");
    assert_eq!(golden.lines().count(), text.lines().count());
}

#[test]
fn a_real_time_task_on_the_servers_cpu() {
    stays("fifo-hog.server", "server.run_queue", "pq-fifo-hog");
}

#[test]
fn a_lost_server_flight() {
    stays("loss.server-flight", "retransmit.data", "lost data segment");
}

#[test]
fn a_lock_that_another_thread_holds() {
    stays(
        "lock.server",
        "server.blocked",
        "lock (futex), released by pq-lock-holder",
    );
}
