//! What the attribution says of the requests that were under way while a virtual machine was stopped from outside.
//!
//! Only its emulator's user can commit this fault, so it is no case of the suite: `cargo xtask vm --vcpu-away` does it and writes
//! the log.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::score::median;
use crate::{
    analyze::{analyze, explain},
    attribute::ledger::{Line, Side, ThreadLine},
};

/// Name of the log in a results folder: a line a stop.
pub const LOG: &str = "stops.jsonl";

/// Shorter than this a stop that a request overlaps is within what the log's clocks and an emulator do by themselves, ns.
const HIT_NS_MIN: u64 = 100_000_000;

/// A line of the log.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Stop {
    /// Begin, client clock, ns.
    begin_ns: u64,
    /// End, client clock, ns.
    end_ns: u64,
}

/// A request that was under way in a stop.
#[derive(Clone, Debug, Serialize)]
pub struct Hit {
    /// Trial index.
    pub trial: u32,
    /// Number within its trial.
    pub request: u32,
    /// Latency from the intended start, ns.
    pub latency_ns: u64,
    /// How much of that a machine was stopped for, by the log, ns.
    pub stopped_ns: u64,
    /// Latency above its trial's median: what a stop added, and whatever else did, ns.
    pub added_ns: u64,
    /// What both steal lines have of it, ns.
    pub charged_ns: u64,
    /// What it was laid to.
    pub cause: Line,
    /// To whom.
    pub culprit: Option<String>,
    /// The ledger's other lines with more than a tenth of what was stopped: name and ns.
    pub others: Vec<(&'static str, u64)>,
}

impl Hit {
    /// How much of what the stop can have added is on the steal lines, 0 to 1. A stop takes nothing from a request while the other
    /// machine works on it.
    #[must_use]
    pub fn share(&self) -> f64 {
        let injected_ns = self.stopped_ns.min(self.added_ns).max(1);
        (self.charged_ns as f64 / injected_ns as f64).min(1.0)
    }
}

/// Every request of a run's folder that a stop of its log hit, in the order of trials and numbers.
///
/// # Errors
/// When the recorded files or the log cannot be read.
pub fn hits(results: &Path) -> anyhow::Result<Vec<Hit>> {
    let log = results.join(LOG);
    let log = fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    let stops: Vec<Stop> = log
        .lines()
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("a stop that is not understood: {line}"))
        })
        .collect::<anyhow::Result<_>>()?;
    let analysis = analyze(results)?;
    let mut met = Vec::new();
    for trial in &analysis.trials {
        let Some(median_ns) = median(trial) else { continue };
        // The first requests of all are slow by themselves.
        for row in trial.rows.iter().filter(|row| row.stamps.is_measured()) {
            let Some(latency_ns) = row.stamps.latency_ns() else {
                continue;
            };
            let shared = |stop: &Stop| {
                let begin_ns = stop.begin_ns.max(row.stamps.intended_ns);
                stop.end_ns.min(row.stamps.done_ns).saturating_sub(begin_ns)
            };
            let stopped_ns: u64 = stops.iter().map(shared).sum();
            let added_ns = latency_ns.saturating_sub(median_ns);
            if stopped_ns.min(added_ns) >= HIT_NS_MIN {
                met.push((trial.trial.index, row.stamps.request, stopped_ns, added_ns));
            }
        }
    }
    let wanted: Vec<_> = met.iter().map(|&(trial, request, ..)| (trial, request)).collect();
    let stories = explain(results, &wanted)?;
    let hits = met.into_iter().zip(stories);
    Ok(hits
        .map(|((trial, request, stopped_ns, added_ns), story)| {
            let ledger = story.outlier.ledger;
            let steal = [Side::Client, Side::Server].map(|side| Line::Thread(side, ThreadLine::Steal));
            let others = ledger
                .lines()
                .filter(|(line, ns)| !steal.contains(line) && *ns > stopped_ns / 10);
            Hit {
                trial,
                request,
                latency_ns: story.outlier.latency_ns,
                stopped_ns,
                added_ns,
                charged_ns: steal.map(|line| ledger.ns(line)).iter().sum(),
                cause: story.outlier.cause,
                culprit: story.outlier.culprit,
                others: others.map(|(line, ns)| (line.name(), ns)).collect(),
            }
        })
        .collect())
}

/// The hits as a table.
#[must_use]
pub fn text(hits: &[Hit]) -> String {
    let mut text =
        "Requests under way while a machine was stopped, ms\n\ntrial  request   latency   stopped     added   steal   share  \
         cause, culprit; other lines\n"
            .to_owned();
    let ms = |ns: u64| ns as f64 / 1e6;
    for hit in hits {
        let others: String = hit
            .others
            .iter()
            .map(|(line, ns)| format!("; {line} {:.0}", ms(*ns)))
            .collect();
        let _ = writeln!(
            text,
            "{:>5}  {:>7}  {:>8.1}  {:>8.1}  {:>8.1}  {:>6.1}  {:>4.0} %  {}, {}{others}",
            hit.trial,
            hit.request,
            ms(hit.latency_ns),
            ms(hit.stopped_ns),
            ms(hit.added_ns),
            ms(hit.charged_ns),
            hit.share() * 100.0,
            hit.cause.name(),
            hit.culprit.as_deref().unwrap_or("nobody"),
        );
    }
    let steals = hits.iter().filter(|hit| hit.cause.name().ends_with(".steal"));
    let _ = writeln!(text, "\n{} of {} are laid to steal", steals.count(), hits.len());
    text
}
