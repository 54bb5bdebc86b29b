//! The latencies themselves: what only they, and the times of their starts, can tell.

use super::{
    claim::{Range, number},
    finding::{Finding, Level},
    histogram::{Bin, Histogram},
};
use crate::{report::text::count, statistics::quantile};

/// Latencies in the order of their file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    /// Latencies, ns.
    pub latencies_ns: Vec<u64>,
    /// When each began, ns of any epoch; empty if that is not told.
    pub starts_ns: Vec<i64>,
}

/// A request counts as slow from this multiple of the median.
const SLOW: u64 = 5;

/// Starts that must be due during slow requests before their absence means anything.
const EXPECTED: f64 = 10.0;

/// Below this share of the starts that were due, requests waited for one another.
const OMITTED: f64 = 0.5;

/// Parts of a recording whose medians are compared, and samples that each must have.
const PARTS: usize = 10;
const PART_SAMPLES: usize = 30;

/// Medians of the parts that differ by more than this share of the median are a drift.
const DRIFT: f64 = 0.25;

impl Samples {
    /// Ascending latencies, ns.
    #[must_use]
    pub fn ascending(&self) -> Vec<u64> {
        let mut ascending = self.latencies_ns.clone();
        ascending.sort_unstable();
        ascending
    }

    /// Every value with its count: no rounding but that of the file.
    #[must_use]
    pub fn histogram(&self) -> Histogram {
        let mut bins: Vec<Bin> = Vec::new();
        for ns in self.ascending() {
            let label = ns as f64 / 1e6;
            match bins.last_mut() {
                Some(bin) if bin.label == label => {
                    bin.count_min += 1;
                    bin.count_max += 1;
                }
                _ => bins.push(Bin {
                    label,
                    word: Range::new(label, label),
                    values: Range::new(label, label),
                    count_min: 1,
                    count_max: 1,
                }),
            }
        }
        Histogram {
            requests: self.latencies_ns.len() as u64,
            bins,
            missing: 0,
            shift: Range::new(0.0, 0.0),
        }
    }

    /// The greatest step that all latencies are whole multiples of, ms; `None` if all are 0.
    #[must_use]
    pub fn step_ms(&self) -> Option<f64> {
        fn common(one: u64, other: u64) -> u64 {
            if other == 0 {
                one
            } else {
                common(other, one % other)
            }
        }
        let step = self.latencies_ns.iter().fold(0, |step, &ns| common(step, ns));
        (step > 0).then_some(step as f64 / 1e6)
    }

    /// Requests by their starts.
    fn timed(&self) -> Vec<(i64, u64)> {
        let mut timed: Vec<(i64, u64)> = self
            .starts_ns
            .iter()
            .copied()
            .zip(self.latencies_ns.iter().copied())
            .collect();
        timed.sort_unstable();
        timed
    }

    /// Whether slow requests kept others from starting: then those that would have been slow as well were never sent.
    pub(super) fn omission(&self, subject: &str) -> Finding {
        const CHECK: &str = "coordinated omission";
        let unchecked = |meaning: String| {
            Finding::new(Level::Unchecked, CHECK, subject)
                .meaning(meaning)
                .remedy("Publish the start of each request (--timestamp-column).")
        };
        let timed = self.timed();
        let (Some(&(begin, _)), Some(&(last, _))) = (timed.first(), timed.last()) else {
            return unchecked("It is not told when the requests began.".to_owned());
        };
        let slow_ns = quantile(&self.ascending(), 0.5).max(1).saturating_mul(SLOW);
        // Stretches in which a slow request was under way.
        let mut stretches: Vec<(i64, i64)> = Vec::new();
        for &(start, ns) in timed.iter().filter(|(_, ns)| *ns >= slow_ns) {
            let end = start
                .saturating_add(i64::try_from(ns).unwrap_or(i64::MAX))
                .min(last);
            match stretches.last_mut() {
                Some((_, until)) if start <= *until => *until = end.max(*until),
                _ => stretches.push((start, end)),
            }
        }
        let within_ns: f64 = stretches.iter().map(|(from, to)| (to - from) as f64).sum();
        let inside = |at: i64| {
            let index = stretches.partition_point(|&(from, _)| from < at);
            // The request that makes the stretch begins it; what begins as it ends waited for it.
            index > 0 && at < stretches[index - 1].1
        };
        let seen = timed.iter().filter(|&&(start, _)| inside(start)).count();
        let outside = timed.len() - seen - stretches.len().min(timed.len() - seen);
        let outside_ns = (last - begin) as f64 - within_ns;
        let expected = if outside_ns > 0.0 {
            outside as f64 / outside_ns * within_ns
        } else {
            0.0
        };
        if expected < EXPECTED {
            return unchecked(format!(
                "Requests of {SLOW} times the median or more were under way for {} ms in all: at the pace outside of them only {} \
                 starts were due meanwhile, {EXPECTED} are needed.",
                number(within_ns / 1e6),
                number((expected * 10.0).round() / 10.0)
            ))
            .remedy("A longer recording, or one with slower requests, would tell.");
        }
        let level = if (seen as f64) < expected * OMITTED {
            Level::Doubtful
        } else {
            Level::Agrees
        };
        let finding = Finding::new(level, CHECK, subject)
            .claimed(format!(
                "{} requests began while one of {} ms or more was under way",
                count(seen as u64),
                number(slow_ns as f64 / 1e6)
            ))
            .allowed(format!(
                "about {} at the pace of the rest",
                count(expected.round() as u64)
            ));
        if level == Level::Agrees {
            return finding;
        }
        finding
            .meaning(
                "The load waited for its own slow requests (a closed loop): those that were due meanwhile, and would have been slow \
                 as well, are not in the data. Every percentile of the tail is too low.",
            )
            .remedy("Measure in an open loop, from the intended start of each request.")
    }

    /// Whether the median stayed where it was.
    pub(super) fn stationarity(&self, subject: &str) -> Option<Finding> {
        let timed = self.timed();
        if timed.len() < PARTS * PART_SAMPLES {
            return None;
        }
        let medians = (0..PARTS).map(|part| {
            let part = &timed[timed.len() * part / PARTS..timed.len() * (part + 1) / PARTS];
            let mut part: Vec<u64> = part.iter().map(|&(_, ns)| ns).collect();
            part.sort_unstable();
            quantile(&part, 0.5)
        });
        let medians: Vec<u64> = medians.collect();
        let (low, high) = (medians.iter().min()?, medians.iter().max()?);
        let whole = quantile(&self.ascending(), 0.5) as f64;
        let step_ns = self.step_ms().unwrap_or(0.0) * 1e6;
        let drifts = (high - low) as f64 > (whole * DRIFT).max(step_ns);
        let level = if drifts { Level::Doubtful } else { Level::Agrees };
        let finding = Finding::new(level, "stationarity", subject).claimed(format!(
            "medians of {PARTS} parts one after another: {}",
            Range::new(*low as f64 / 1e6, *high as f64 / 1e6)
        ));
        Some(if drifts {
            finding
                .meaning("The thing measured changed meanwhile, so one percentile of the whole describes no part of it.")
                .remedy("Leave out the warm-up, or report the parts one by one.")
        } else {
            finding
        })
    }
}
