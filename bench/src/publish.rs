//! Writes what a run comes to into its results folder.

use std::{fs, path::Path};

use anyhow::Context as _;

use crate::{
    analyze::Analysis,
    report::{
        export::{HistogramInterval, histogram_log, outliers_jsonl, page, requests_parquet, summary_json},
        html,
    },
};

/// Writes `summary.json`, `outliers.jsonl`, `report.html`, `latency.hlog` and `requests/arm=*/trial=*/requests.parquet`.
/// Earlier ones are replaced; the recordings are not touched.
///
/// # Errors
/// When the disk takes no more.
pub fn publish(results: &Path, analysis: &Analysis) -> anyhow::Result<()> {
    summary_json(&results.join("summary.json"), &analysis.summary)?;
    outliers_jsonl(&results.join("outliers.jsonl"), &analysis.outliers)?;
    let report = results.join("report.html");
    let html = html::render(&analysis.summary, &analysis.outliers, &analysis.lanes);
    page(&report, &html)?;
    let plan = &analysis.summary.plan;
    let run_begin_ns = analysis
        .trials
        .iter()
        .filter_map(|trial| trial.begin_ns)
        .min()
        .unwrap_or(0);
    let mut intervals = Vec::new();
    for trial in &analysis.trials {
        let name = plan.cell_name(trial.trial.cell());
        let folder = results.join(format!("requests/arm={name}/trial={}", trial.trial.index));
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        requests_parquet(&folder.join("requests.parquet"), &trial.rows)?;
        let measured = trial.rows.iter().filter(|row| row.stamps.is_measured());
        let latencies: Vec<u64> = measured.filter_map(|row| row.stamps.latency_ns()).collect();
        intervals.push((
            name,
            trial.begin_ns.map_or(0, |ns| ns - run_begin_ns) + plan.warmup_ns,
            latencies,
        ));
    }
    let intervals: Vec<_> = intervals
        .iter()
        .map(|(tag, begin_offset_ns, latencies_ns)| HistogramInterval {
            tag,
            begin_offset_ns: *begin_offset_ns,
            duration_ns: plan.duration_ns,
            latencies_ns,
        })
        .collect();
    histogram_log(&results.join("latency.hlog"), &intervals)
}
