//! The checks that need a table alone: figures that no data can have together.

use super::{
    claim::{Claim, Table, number, percentile_name},
    finding::{Finding, Level},
    histogram::ranks,
};
use crate::report::text::count;

/// Samples that must lie beyond a percentile for it to be quoted: with fewer it is a matter of chance.
const SAMPLES_BEYOND: u64 = 10;

/// All of them.
pub(super) fn examine(subject: &str, table: &Table) -> Vec<Finding> {
    let mut findings = order(subject, table);
    findings.extend(spread(subject, table));
    findings.extend(few(subject, table));
    findings
}

/// Figures that must stand in order whatever the data.
fn order(subject: &str, table: &Table) -> Vec<Finding> {
    let mut ascending: Vec<(String, Claim)> = Vec::new();
    ascending.extend(table.min.map(|claim| ("min".to_owned(), claim)));
    let mut sorted = table.percentiles.clone();
    sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
    ascending.extend(
        sorted
            .iter()
            .map(|&(quantile, claim)| (percentile_name(quantile), claim)),
    );
    ascending.extend(table.max.map(|claim| ("max".to_owned(), claim)));
    let mut pairs: Vec<_> = ascending
        .windows(2)
        .map(|pair| (pair[0].clone(), pair[1].clone()))
        .collect();
    if let Some(mean) = table.mean {
        let mean = ("mean".to_owned(), mean);
        pairs.extend(table.min.map(|claim| (("min".to_owned(), claim), mean.clone())));
        pairs.extend(table.max.map(|claim| (mean.clone(), ("max".to_owned(), claim))));
    }
    let wrong = pairs
        .into_iter()
        .filter(|(lesser, greater)| lesser.1.value > greater.1.value);
    wrong
        .map(|((name, lesser), (other, greater))| {
            let level = if lesser.widest().low >= greater.widest().high {
                Level::Impossible
            } else {
                Level::Doubtful
            };
            Finding::new(level, "order", subject)
                .claimed(format!("{name} {lesser}, {other} {greater}"))
                .allowed(format!("{name} is at most {other}"))
                .meaning("No data whatever has both.")
                .remedy("Quote neither.")
        })
        .collect()
}

/// One figure far from the mean forces a standard deviation, whatever the rest does: if a share f of the requests lies d or more
/// beyond the mean, it is at least d times the root of f / (1 - f) (Cantelli's inequality).
fn spread(subject: &str, table: &Table) -> Vec<Finding> {
    let (Some(mean), Some(deviation)) = (table.mean, table.deviation) else {
        return Vec::new();
    };
    let all = table.requests;
    if all < 2 {
        return Vec::new();
    }
    let share = |requests: u64| requests.min(all - 1) as f64 / all as f64;
    let forced = |share: f64, distance: f64| distance.max(0.0) * (share / (1.0 - share)).sqrt();
    let mut worst: Option<(String, f64, f64)> = None;
    let mut consider = |name: String, share: f64, least: f64, likely: f64| {
        let (least, likely) = (forced(share, least), forced(share, likely));
        if worst.as_ref().is_none_or(|&(_, _, most)| likely > most) {
            worst = Some((name, least, likely));
        }
    };
    let ends = [("max", table.max, 1.0), ("min", table.min, -1.0)];
    for (name, claim, sign) in ends {
        let Some(claim) = claim else { continue };
        let distance = (claim.value - mean.value) * sign;
        consider(
            format!("{name} {claim}"),
            share(1),
            distance - claim.unit - mean.unit,
            distance - claim.unit / 2.0 - mean.unit / 2.0,
        );
    }
    for &(quantile, claim) in &table.percentiles {
        let (low, high) = ranks(all, quantile);
        let distance = claim.value - mean.value;
        // At or above it are the samples from the greater rank on, at or below it those up to the lesser.
        let beyond = if distance > 0.0 { all - high + 1 } else { low };
        consider(
            format!("{} {claim}", percentile_name(quantile)),
            share(beyond),
            distance.abs() - claim.unit - mean.unit,
            distance.abs() - claim.unit / 2.0 - mean.unit / 2.0,
        );
    }
    let Some((name, least, likely)) = worst else {
        return Vec::new();
    };
    let claimed = format!("standard deviation {deviation} with mean {mean} and {name}");
    let level = if deviation.widest().high <= least {
        Level::Impossible
    } else if deviation.rounded().high < likely {
        Level::Doubtful
    } else {
        Level::Agrees
    };
    let finding = Finding::new(level, "deviation and tail", subject)
        .claimed(claimed)
        .allowed(format!("a standard deviation of at least {} ms", number(least)));
    vec![if level == Level::Agrees {
        finding
    } else {
        finding
            .meaning(format!(
                "{name} alone forces it, whatever the other requests took and however the figures were rounded (Cantelli's \
                 inequality): the three figures are not of the same data."
            ))
            .remedy("Quote none of the three before the data are published.")
    }]
}

fn few(subject: &str, table: &Table) -> Vec<Finding> {
    let figures = table.percentiles.iter().map(|&(quantile, claim)| {
        let beyond = ((1.0 - quantile) * table.requests as f64 + 1e-6).floor() as u64;
        let finding = |level| {
            Finding::new(level, "samples", subject).claimed(format!(
                "{} {claim} of {} requests: {} beyond it",
                percentile_name(quantile),
                count(table.requests),
                count(beyond)
            ))
        };
        if beyond >= SAMPLES_BEYOND {
            finding(Level::Agrees)
        } else {
            finding(Level::Doubtful)
                .allowed(format!("{SAMPLES_BEYOND} or more"))
                .meaning(
                    "With fewer beyond it a percentile is a matter of chance: another run gives another.",
                )
                .remedy("Measure longer, or quote a lower percentile.")
        }
    });
    figures.collect()
}
