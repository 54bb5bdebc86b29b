//! The audit as a reader of published results starts it, on pages of our own in the published formats.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Bars of one arm: labels in ms, percents.
type Bars = Vec<(u32, f64)>;

/// Statistics as `stats.js` names them: total and OK.
type Figures = [(&'static str, u32, u32); 8];

/// The distribution of the blog's page.
fn blog_bars() -> Bars {
    let mut bars = vec![
        (1, 75.12),
        (2, 2.68),
        (3, 12.51),
        (4, 9.11),
        (5, 0.28),
        (6, 0.16),
        (7, 0.03),
        (8, 0.01),
        (9, 0.01),
        (10, 0.01),
    ];
    let rest = [11, 12, 13, 15, 19, 21, 23].into_iter();
    let rest = rest
        .chain(25..=31)
        .chain([33, 36])
        .chain(38..=42)
        .chain([45, 48, 49, 53]);
    bars.extend(rest.map(|label| (label, 0.0)));
    bars
}

/// What that page claims.
const BLOG: Figures = [
    ("minResponseTime", 1, 1),
    ("maxResponseTime", 53, 53),
    ("meanResponseTime", 2, 2),
    ("standardDeviation", 1, 1),
    ("percentiles1", 1, 1),
    ("percentiles2", 2, 2),
    ("percentiles3", 4, 4),
    ("percentiles4", 39, 10),
];

/// What the same page would say if its percentiles were exact.
const HONEST: Figures = [
    ("minResponseTime", 1, 1),
    ("maxResponseTime", 53, 53),
    ("meanResponseTime", 2, 2),
    ("standardDeviation", 1, 1),
    ("percentiles1", 1, 1),
    ("percentiles2", 1, 1),
    ("percentiles3", 4, 4),
    ("percentiles4", 4, 4),
];

/// A request page: a table to be filled in, the distribution, requests per second from `begin_s` for 300 s.
fn page(key: &str, bars: &Bars, begin_s: u64) -> String {
    let titles = [
        "Min",
        "50th percentile",
        "75th percentile",
        "95th percentile",
        "99th percentile",
        "Max",
        "Mean",
    ];
    let rows: String = titles
        .iter()
        .map(|title| format!("<tr><td class=\"title\">{title}</td><td class=\"total\"></td></tr>\n"))
        .collect();
    let labels: Vec<String> = bars.iter().map(|(label, _)| format!("'{label}'")).collect();
    let percents: Vec<String> = bars.iter().map(|(_, percent)| percent.to_string()).collect();
    let seconds: Vec<String> = (begin_s..begin_s + 300)
        .map(|second| format!("[{second},[300,300,0]]"))
        .collect();
    format!(
        "<!DOCTYPE html>\n<title>Gatling Stats - {key}</title>\n<table>{rows}</table>\n<script>\n\
         var pageStats = stats.contents['{key}'].stats;\n\
         var distribution = new Highcharts.Chart({{\n  xAxis: {{ categories: [{}] }},\n  \
         yAxis: {{ title: {{ text: 'Percentage of Requests' }} }},\n  \
         series: [ {{ name: 'OK', data: [\n{}\n] }}, {{ name: 'KO', data: [\n\n] }} ]\n}});\n\
         var requests = unpack([{}]);\n\
         var requestsChart = new Highcharts.StockChart({{}});\n</script>\n",
        labels.join(", "),
        percents.join(","),
        seconds.join(",")
    )
}

fn statistics(requests: u32, arms: &[(&str, &Figures)]) -> String {
    let contents: Vec<String> = arms
        .iter()
        .map(|(name, figures)| {
            let figures: String = figures
                .iter()
                .map(|(key, total, ok)| format!(", \"{key}\": {{ \"total\": \"{total}\", \"ok\": \"{ok}\", \"ko\": \"-\" }}"))
                .collect();
            format!(
                "\"req_{name}\": {{ type: \"REQUEST\", name: \"{name}\", path: \"{name}\", pathFormatted: \"req_{name}\",\n\
                 stats: {{ \"name\": \"{name}\", \
                 \"numberOfRequests\": {{ \"total\": \"{requests}\", \"ok\": \"{requests}\", \"ko\": \"0\" }}{figures} }} }}"
            )
        })
        .collect();
    format!(
        "var stats = {{ type: \"GROUP\", name: \"All Requests\", path: \"\", contents: {{\n{}\n}} }}\n\nfunction fillStats(stat){{}}\n",
        contents.join(",\n")
    )
}

/// A report with one page per arm, each beginning when the one before it has ended for a minute.
fn report(folder: &Path, arms: &[(&str, &Figures)]) {
    fs::create_dir_all(folder.join("js")).expect("folder");
    fs::write(folder.join("js/stats.js"), statistics(90_000, arms)).expect("statistics");
    for (index, (name, _)) in arms.iter().enumerate() {
        let begin_s = 1_700_000_000 + 360 * index as u64;
        let text = page(&format!("req_{name}"), &blog_bars(), begin_s);
        fs::write(folder.join(format!("req_{name}.html")), text).expect("page");
    }
}

fn audit(arguments: &[&str], paths: &[PathBuf]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .arg("audit")
        .args(arguments)
        .args(paths)
        .output()
        .expect("pqtail starts")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Check and level of every finding that is not an agreement, with the figure that it is about.
fn findings(arguments: &[&str], paths: &[PathBuf]) -> Vec<(String, String, String)> {
    let output = audit(&[arguments, &["--json"]].concat(), paths);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let of = |finding: &serde_json::Value, name: &str| finding[name].as_str().expect("text").to_owned();
    let findings = report["findings"].as_array().expect("findings");
    findings
        .iter()
        .map(|each| (of(each, "check"), of(each, "level"), of(each, "claimed")))
        .filter(|(_, level, _)| level != "agrees")
        .collect()
}

fn has(findings: &[(String, String, String)], check: &str, level: &str, claimed: &str) -> bool {
    findings
        .iter()
        .any(|each| each.0 == check && each.1 == level && each.2.contains(claimed))
}

#[test]
fn the_blogs_page_contradicts_itself() {
    let folder = tempfile::tempdir().expect("folder");
    report(folder.path(), &[("classical", &BLOG)]);
    let paths = [folder.path().to_owned()];
    let found = findings(&[], &paths);
    for (check, level, claimed) in [
        ("percentile", "impossible", "p99 39 ms"),
        ("percentile", "impossible", "p99 10 ms"),
        ("percentile", "doubtful", "p75 2 ms"),
        ("one population", "impossible", "p99 39 ms (total) and 10 ms (OK)"),
        (
            "deviation and tail",
            "impossible",
            "standard deviation 1 ms with mean 2 ms and p99 39 ms",
        ),
        ("quantisation", "note", "steps of 1 ms"),
        ("coordinated omission", "unchecked", ""),
    ] {
        assert!(
            has(&found, check, level, claimed),
            "{check} {level} {claimed} missing in {found:#?}"
        );
    }
    assert_eq!(found.len(), 7, "{found:#?}");

    let output = audit(&[], &paths);
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("p99 4 ms"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
}

#[test]
fn an_honest_page_is_blamed_for_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    report(folder.path(), &[("classical", &HONEST)]);
    let paths = [folder.path().to_owned()];
    let found = findings(&[], &paths);
    assert!(
        found.iter().all(|each| each.1 == "note" || each.1 == "unchecked"),
        "{found:#?}"
    );
    assert!(audit(&[], &paths).status.success());
}

#[test]
fn arms_one_after_another_and_equal_to_the_millisecond_are_no_comparison() {
    let folder = tempfile::tempdir().expect("folder");
    report(folder.path(), &[("classical", &HONEST), ("hybrid", &HONEST)]);
    let found = findings(&[], &[folder.path().to_owned()]);
    assert!(
        has(
            &found,
            "interleaving",
            "doubtful",
            "all of classical ended 61 s before hybrid began"
        ),
        "{found:#?}"
    );
    assert!(has(&found, "effect", "doubtful", "p50 1 and 1 ms"), "{found:#?}");
}

#[test]
fn pages_that_cannot_be_read_name_file_line_and_remedy() {
    let folder = tempfile::tempdir().expect("folder");
    let at = |name: &str| folder.path().join(name);
    report(&at("cut"), &[("classical", &BLOG)]);
    let whole = fs::read_to_string(at("cut/req_classical.html")).expect("page");
    let cut = whole.find("75.12").expect("bars");
    fs::write(at("cut/req_classical.html"), &whole[..cut + 20]).expect("page");
    report(&at("without"), &[("classical", &BLOG)]);
    fs::remove_file(at("without/js/stats.js")).expect("statistics");
    fs::create_dir(at("other")).expect("folder");
    fs::write(at("empty.csv"), "\n").expect("file");
    fs::write(at("latin.csv"), b"latency_ms\n1\n\xe9\n").expect("file");
    fs::write(at("text.csv"), "latency_ms\n1.5\nslow\n").expect("file");
    fs::write(at("two.csv"), "1,2\n3,4\n").expect("file");
    fs::write(
        at("cut.hlog"),
        "\"StartTimestamp\",\"Interval_Length\",\"Interval_Max\",\"x\"\n0.1,1.0,2.0,HISTFAAAA\n",
    )
    .expect("file");
    for (path, expected) in [
        (
            "cut",
            ["req_classical.html, line ", "break off", "save the page again"],
        ),
        (
            "without",
            [
                "req_classical.html: ",
                "no statistics",
                "copy the report's js folder",
            ],
        ),
        (
            "other",
            ["other: ", "no request page", "name a Gatling report's folder"],
        ),
        ("empty.csv", ["empty.csv: ", "empty", "copy it again"]),
        ("latin.csv", ["latin.csv, line 3", "not UTF-8", "iconv"]),
        ("text.csv", ["text.csv, line 3", "\"slow\"", "--column"]),
        (
            "two.csv",
            ["two.csv, line 1", "no column of latencies", "--column N"],
        ),
        ("cut.hlog", ["cut.hlog, line 2", "damaged", "copy the log again"]),
        ("missing", ["read ", "missing", "No such file"]),
    ] {
        let output = audit(&[], &[at(path)]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{path}");
        for each in expected {
            assert!(error.contains(each), "{path}: {each} missing in {error}");
        }
    }
}

/// Requests every 10 ms for 20 s; every 2 s one takes 500 ms.
fn open_loop() -> String {
    let mut text = "timestamp_ms,elapsed_ms\n".to_owned();
    for index in 0..2_000u32 {
        let latency = if index % 200 == 100 {
            500.0
        } else {
            1.0 + f64::from(index % 7) * 0.01
        };
        text += &format!("{},{latency}\n", index * 10);
    }
    text
}

/// The same, but each waits for the one before it.
fn closed_loop() -> String {
    let (mut text, mut at) = ("timestamp_ms,elapsed_ms\n".to_owned(), 0.0);
    for index in 0..2_000u32 {
        let latency = if index % 200 == 100 {
            500.0
        } else {
            1.0 + f64::from(index % 7) * 0.01
        };
        text += &format!("{at},{latency}\n");
        at += f64::max(latency, 10.0);
    }
    text
}

#[test]
fn a_closed_loop_shows_and_an_open_one_does_not() {
    let folder = tempfile::tempdir().expect("folder");
    let (open, closed) = (folder.path().join("open.csv"), folder.path().join("closed.csv"));
    fs::write(&open, open_loop()).expect("file");
    fs::write(&closed, closed_loop()).expect("file");
    let flags = ["--timestamp-column", "timestamp_ms"];
    assert_eq!(findings(&flags, &[open]), []);
    let found = findings(&flags, &[closed]);
    assert!(
        has(&found, "coordinated omission", "doubtful", "0 requests began"),
        "{found:#?}"
    );
}

#[test]
fn claims_of_raw_latencies_are_held_against_them() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("raw.csv");
    let latencies: String = (1..=500u32).map(|each| format!("{each}\n")).collect();
    fs::write(&path, latencies).expect("file");
    let found = findings(
        &["--claim", "p99=495", "--claim", "p50=300", "--claim", "p99.9=500"],
        &[path],
    );
    assert!(
        has(&found, "percentile", "impossible", "p50 300 ms"),
        "{found:#?}"
    );
    assert!(
        has(
            &found,
            "samples",
            "doubtful",
            "p99 495 ms of 500 requests: 5 beyond it"
        ),
        "{found:#?}"
    );
    assert!(!has(&found, "percentile", "impossible", "p99"), "{found:#?}");
}

#[test]
fn arms_in_a_column_are_compared() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("raw.csv");
    let by_turns: String = (0..400u32)
        .map(|each| {
            format!(
                "{},{},{}\n",
                each,
                if each % 2 == 0 { "a" } else { "b" },
                5 + each % 3
            )
        })
        .collect();
    fs::write(&path, format!("start,arm,latency\n{by_turns}")).expect("file");
    let flags = ["--arm-column", "arm"];
    let found = findings(&flags, std::slice::from_ref(&path));
    assert!(!found.iter().any(|each| each.0 == "interleaving"), "{found:#?}");
    assert!(has(&found, "effect", "doubtful", "p50"), "{found:#?}");
    let in_turn: String = (0..400u32)
        .map(|each| {
            format!(
                "{},{},{}\n",
                each,
                if each < 200 { "a" } else { "b" },
                5 + each % 3
            )
        })
        .collect();
    fs::write(&path, format!("start,arm,latency\n{in_turn}")).expect("file");
    let found = findings(&flags, &[path]);
    assert!(
        has(&found, "interleaving", "doubtful", "all of a ended"),
        "{found:#?}"
    );
}

#[test]
fn a_histogram_logs_tags_are_arms() {
    use hdrhistogram::{
        Histogram,
        serialization::{
            V2DeflateSerializer,
            interval_log::{IntervalLogWriterBuilder, Tag},
        },
    };
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("run.hlog");
    let mut bytes = Vec::new();
    let mut serializer = V2DeflateSerializer::new();
    let mut writer = IntervalLogWriterBuilder::new()
        .begin_log_with(&mut bytes, &mut serializer)
        .expect("log");
    for (start_s, tag) in [(1, "a"), (2, "a"), (5, "b"), (6, "b")] {
        let mut histogram = Histogram::<u64>::new(3).expect("histogram");
        for each in 1..=1_000u64 {
            histogram.record(each * 10_000).expect("recorded");
        }
        let seconds = std::time::Duration::from_secs;
        writer
            .write_histogram(&histogram, seconds(start_s), seconds(1), Tag::new(tag))
            .expect("written");
    }
    fs::write(&path, bytes).expect("file");
    let found = findings(
        &["--claim", "p99=9.9", "--claim", "p50=7.0"],
        std::slice::from_ref(&path),
    );
    assert!(has(&found, "percentile", "impossible", "p50 7 ms"), "{found:#?}");
    assert!(!has(&found, "percentile", "impossible", "p99"), "{found:#?}");
    assert!(
        has(
            &found,
            "interleaving",
            "doubtful",
            "all of a ended 2 s before b began"
        ),
        "{found:#?}"
    );
    assert!(text(&audit(&[], std::slice::from_ref(&path))).contains("a: 2,000 requests"));
    // In another unit it is another size.
    assert!(has(
        &findings(&["--unit", "us", "--claim", "p99=9900"], &[path]),
        "interleaving",
        "doubtful",
        ""
    ));
}
