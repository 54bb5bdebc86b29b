//! The checks between arms: whether they can be compared at all.

use std::collections::BTreeMap;

use super::{
    claim::{number, percentile_name},
    finding::{Finding, Level},
    population::Population,
};
use crate::statistics::quantile;

/// A step of at most this share of the median hides no effect that anybody claims.
const FINE: f64 = 0.01;

/// All checks between arms.
pub(super) fn examine(populations: &[Population]) -> Vec<Finding> {
    let mut findings = quantisation(populations);
    findings.extend(effects(populations));
    findings.extend(interleaving(populations));
    findings
}

/// Figures of a population that are compared between arms, ms.
fn figures(population: &Population) -> Vec<(String, f64)> {
    if let Some(samples) = &population.samples {
        let ascending = samples.ascending();
        let quantiles =
            [0.5, 0.95, 0.99].map(|each| (percentile_name(each), quantile(&ascending, each) as f64 / 1e6));
        return quantiles.to_vec();
    }
    let Some(table) = population.tables.first() else {
        return Vec::new();
    };
    let figures = table.figures().into_iter();
    figures
        .filter(|(name, _)| name.starts_with('p') || name == "mean")
        .map(|(name, claim)| (name, claim.value))
        .collect()
}

fn quantisation(populations: &[Population]) -> Vec<Finding> {
    let of_population = populations.iter().filter_map(|population| {
        let step = population.step?;
        let median = figures(population).into_iter().find(|(name, _)| name == "p50")?.1;
        let is_fine = step <= median * FINE;
        let finding = Finding::new(
            if is_fine { Level::Agrees } else { Level::Note },
            "quantisation",
            &population.subject(""),
        )
        .claimed(format!("values in steps of {} ms, p50 {} ms", number(step), number(median)));
        Some(if is_fine {
            finding
        } else {
            finding
                .meaning(format!(
                    "An effect of less than {0} ms shows in a percentile of these data as nothing or as a whole step: the step \
                     hides its size, and whether there is one.",
                    number(step)
                ))
                .remedy("Record in microseconds or finer before claiming, or denying, a smaller effect.")
        })
    });
    of_population.collect()
}

/// Differences between neighbouring arms that are no more than a step.
fn effects(populations: &[Population]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some((first, rest)) = populations.split_first() else {
        return findings;
    };
    for other in rest.iter().filter(|other| other.arm != first.arm) {
        let (Some(step), Some(other_step)) = (first.step, other.step) else {
            continue;
        };
        let step = step.max(other_step);
        let others = figures(other);
        let within: Vec<String> = figures(first)
            .into_iter()
            .filter_map(|(name, value)| {
                let other = others.iter().find(|(each, _)| *each == name)?.1;
                ((other - value).abs() <= step * (1.0 + 1e-9))
                    .then(|| format!("{name} {} and {} ms", number(value), number(other)))
            })
            .collect();
        let subject = format!("{} against {}", other.arm, first.arm);
        findings.push(if within.is_empty() {
            Finding::new(Level::Agrees, "effect", &subject)
                .claimed(format!("all differences are more than a step of {} ms", number(step)))
        } else {
            Finding::new(Level::Doubtful, "effect", &subject)
                .claimed(within.join(", "))
                .allowed(format!("nothing can be told of a difference of {} ms or less", number(step)))
                .meaning(
                    "The step of the values is no smaller than these differences: they show neither that there is an effect nor \
                     that there is none.",
                )
                .remedy("Measure again in finer steps.")
        });
    }
    findings
}

/// Whether arms that are to be compared ran at the same time, or by turns.
fn interleaving(populations: &[Population]) -> Vec<Finding> {
    const CHECK: &str = "interleaving";
    let mut arms: BTreeMap<&str, Vec<(i64, i64)>> = BTreeMap::new();
    for population in populations {
        arms.entry(&population.arm)
            .or_default()
            .extend(&population.spans_ns);
    }
    if arms.len() < 2 {
        return Vec::new();
    }
    if arms.values().any(Vec::is_empty) {
        return vec![
            Finding::new(Level::Unchecked, CHECK, "")
                .meaning("It is not told when the requests of each arm began.")
                .remedy("Publish the times of the requests."),
        ];
    }
    let ranges: Vec<(&str, i64, i64)> = arms
        .iter()
        .map(|(&arm, spans)| {
            let from = spans.iter().map(|span| span.0).min().unwrap_or(0);
            let to = spans.iter().map(|span| span.1).max().unwrap_or(0);
            (arm, from, to)
        })
        .collect();
    let mut findings = Vec::new();
    for (index, &(one, from, to)) in ranges.iter().enumerate() {
        for &(other, other_from, other_to) in &ranges[index + 1..] {
            let (before, after, gap) = if to < other_from {
                (one, other, other_from - to)
            } else if other_to < from {
                (other, one, from - other_to)
            } else {
                continue;
            };
            findings.push(
                Finding::new(Level::Doubtful, CHECK, &format!("{before} and {after}"))
                    .claimed(format!(
                        "all of {before} ended {} s before {after} began",
                        number((gap as f64 / 1e8).round() / 10.0)
                    ))
                    .allowed("arms by turns, or at the same time")
                    .meaning(
                        "Whatever changed between the two (a neighbour on the host, temperature, caches) is in the difference, and \
                         nothing in the data tells it from the effect.",
                    )
                    .remedy("Measure again with the arms by turns, in random order."),
            );
        }
    }
    if findings.is_empty() {
        findings.push(Finding::new(Level::Agrees, CHECK, "").claimed("the arms' times overlap"));
    }
    findings
}
