//! The checks of one population: what its table claims against its histogram, and against itself.

use super::{
    claim::{Claim, Range, Table, number, percentile_name},
    finding::{Finding, Level},
    histogram::{Bounds, Histogram, ranks},
    population::Population,
};
use crate::report::text::count;

/// Samples that must lie beyond a percentile for it to be quoted: with fewer it is a matter of chance.
pub(super) const SAMPLES_BEYOND: u64 = 10;

/// How an inexact percentile comes about; the published page does not tell which of them it was.
const SKETCH: &str = "A percentile from a sketch (a t-digest, say) or interpolated between the buckets of a histogram can be \
                      wrong like this. That is a possible mechanism, not a proven one.";

/// All checks that need but one population.
pub(super) fn examine(population: &Population) -> Vec<Finding> {
    let mut findings = sums(population);
    for (index, table) in population.tables.iter().enumerate() {
        // A column of the same requests is examined only where it differs.
        let differing = match population.tables.first() {
            Some(first) if index > 0 && first.requests == table.requests => differing(table, first),
            _ => table.clone(),
        };
        let table = &differing;
        let subject = population.subject(&table.column);
        match population.histogram(&table.column) {
            Ok(histogram) if histogram.adds_up() => {
                findings.extend(percentiles(&subject, table, histogram));
                findings.extend(moments(&subject, table, histogram));
            }
            // Told by `sums`.
            Ok(_) => {}
            Err(reason) => findings.push(
                Finding::new(Level::Unchecked, "percentile", &subject)
                    .claimed(claims(table))
                    .meaning(format!("No histogram to hold them against: {reason}"))
                    .remedy("Publish the raw latencies, or the counts of a histogram."),
            ),
        }
        findings.extend(order(&subject, table));
        findings.extend(spread(&subject, table));
        findings.extend(few(&subject, table));
    }
    findings.extend(one_population(population));
    findings
}

fn differing(table: &Table, first: &Table) -> Table {
    let other = |one: Option<Claim>, other: Option<Claim>| if one == other { None } else { one };
    let mut percentiles = table.percentiles.clone();
    percentiles.retain(|each| !first.percentiles.contains(each));
    Table {
        column: table.column.clone(),
        requests: table.requests,
        min: other(table.min, first.min),
        max: other(table.max, first.max),
        mean: other(table.mean, first.mean),
        deviation: other(table.deviation, first.deviation),
        percentiles,
    }
}

fn claims(table: &Table) -> String {
    let named = table.figures();
    let named: Vec<String> = named
        .iter()
        .map(|(name, claim)| format!("{name} {claim}"))
        .collect();
    named.join(", ")
}

/// Counts that must come to one another, and bars that must come to all requests.
fn sums(population: &Population) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (what, whole, parts) in &population.sums {
        let finding = |level| {
            Finding::new(level, "counts", &population.subject("")).claimed(format!(
                "{what}: {} and {}",
                count(*whole),
                count(*parts)
            ))
        };
        findings.push(if whole == parts {
            finding(Level::Agrees)
        } else {
            finding(Level::Impossible)
                .allowed("the same number")
                .meaning("The parts are not the whole: some requests were lost or counted twice.")
                .remedy("Publish where they went before quoting any percentile.")
        });
    }
    for (column, histogram) in &population.histograms {
        let Ok(histogram) = histogram else { continue };
        let (min, max) = histogram.counts();
        let share = |requests: u64| number(requests as f64 * 100.0 / histogram.requests.max(1) as f64);
        let finding = |level| {
            Finding::new(level, "bars", &population.subject(column))
                .claimed(format!(
                    "{} bars of {} requests",
                    histogram.bins.len(),
                    count(histogram.requests)
                ))
                .allowed(format!(
                    "the bars hold {} to {} requests, {} to {} %, by their rounding",
                    count(min),
                    count(max),
                    share(min),
                    share(max)
                ))
        };
        findings.push(if histogram.adds_up() {
            finding(Level::Agrees)
        } else {
            finding(Level::Impossible)
                .meaning("The bars cannot come to all requests, so nothing can be recomputed from them.")
                .remedy("Publish the counts themselves.")
        });
    }
    findings
}

/// Where nothing failed, the successful requests are all requests, and have the same figures.
fn one_population(population: &Population) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some((total, rest)) = population.tables.split_first() else {
        return findings;
    };
    for part in rest.iter().filter(|part| part.requests == total.requests) {
        let others = part.figures();
        let mut agree = true;
        for (name, claim) in total.figures() {
            let Some(&(_, other)) = others.iter().find(|(each, _)| *each == name) else {
                continue;
            };
            if claim.value == other.value {
                continue;
            }
            agree = false;
            let same_value =
                claim.widest().low < other.widest().high && other.widest().low < claim.widest().high;
            let level = if same_value {
                Level::Doubtful
            } else {
                Level::Impossible
            };
            findings.push(
                Finding::new(level, "one population", &population.subject(""))
                    .claimed(format!(
                        "{name} {claim} ({}) and {other} ({})",
                        total.column, part.column
                    ))
                    .allowed(format!(
                        "one {name}: both columns are the same {} requests",
                        count(total.requests)
                    ))
                    .meaning(if name.starts_with('p') {
                        "At least one of the two is not this percentile of the data. Exact percentiles of the same data are the \
                         same; sketches fed in another order need not be."
                    } else {
                        "At least one of the two is wrong."
                    })
                    .remedy("Quote neither before it is recomputed from the data."),
            );
        }
        if agree {
            findings.push(
                Finding::new(Level::Agrees, "one population", &population.subject("")).claimed(format!(
                    "{} and {} have the same figures",
                    total.column, part.column
                )),
            );
        }
    }
    findings
}

/// What a figure is worth, given what the histogram allows: with every rounding, and with labels taken at their word.
fn judge(claim: Claim, bounds: Bounds) -> Level {
    if !claim.could_be(bounds.hull) {
        Level::Impossible
    } else if claim.rounded().meets(bounds.labels) {
        Level::Agrees
    } else {
        Level::Doubtful
    }
}

fn allowed(claim: Claim, bounds: Bounds) -> String {
    let printable = claim.printable(Range::new(bounds.hull.low.max(0.0), bounds.hull.high));
    format!(
        "{} by the histogram's own labels; {printable} at the utmost, however values, percents and the claim were rounded",
        bounds.labels
    )
}

fn percentiles(subject: &str, table: &Table, histogram: &Histogram) -> Vec<Finding> {
    let figures = table.percentiles.iter().map(|&(quantile, claim)| {
        let bounds = histogram.percentile(quantile);
        let name = percentile_name(quantile);
        let level = judge(claim, bounds);
        let finding = Finding::new(level, "percentile", subject)
            .claimed(format!("{name} {claim}"))
            .allowed(allowed(claim, bounds));
        match level {
            Level::Impossible => finding
                .meaning(format!(
                    "{} No data has both this histogram and this {name}. {SKETCH}",
                    why(quantile, claim, bounds, histogram)
                ))
                .remedy(format!(
                    "Do not quote {claim} as {name}: by the page's own histogram it is {}. Take percentiles from sorted samples \
                     or exact counts.",
                    bounds.labels
                )),
            Level::Doubtful => finding
                .meaning(
                    "Possible only if the histogram and the percentile rounded the same latencies in different ways. If both \
                     come from the same whole numbers, it is wrong, as an interpolated percentile can be.",
                )
                .remedy(format!("Read {name} as {}.", bounds.labels)),
            _ => finding,
        }
    });
    figures.collect()
}

/// The counts on which an impossible percentile founders.
fn why(quantile: f64, claim: Claim, bounds: Bounds, histogram: &Histogram) -> String {
    let all = histogram.requests;
    let (low, high) = ranks(all, quantile);
    if claim.value > bounds.labels.high {
        let needed = all - high + 1;
        let most = histogram.at_least(claim.widest().low + 1e-9);
        format!(
            "It needs at least {} of the {} requests at {claim} or more; the histogram has at most {}. At least {} % took {} ms \
             or less.",
            count(needed),
            count(all),
            count(most),
            // Cut, not rounded: "at least" must hold.
            number((histogram.share_up_to(bounds.labels.high).low * 1e4).floor() / 1e2),
            number(bounds.labels.high),
        )
    } else {
        let below = histogram.share_up_to(claim.value).high;
        format!(
            "It needs at least {} of the {} requests at {claim} or less; by the histogram at most {} % took that.",
            count(low),
            count(all),
            number((below * 1e4).ceil() / 1e2)
        )
    }
}

/// Mean, standard deviation and extremes against the histogram.
fn moments(subject: &str, table: &Table, histogram: &Histogram) -> Vec<Finding> {
    let rows = [
        ("min", table.min, histogram.min()),
        ("max", table.max, histogram.max()),
        ("mean", table.mean, histogram.mean()),
        ("standard deviation", table.deviation, histogram.deviation()),
    ];
    let mut findings = Vec::new();
    for (name, claim, bounds) in rows {
        let Some(claim) = claim else { continue };
        let level = judge(claim, bounds);
        let check = if name == "standard deviation" {
            "deviation"
        } else {
            name
        };
        let finding = Finding::new(level, check, subject)
            .claimed(format!("{name} {claim}"))
            .allowed(allowed(claim, bounds));
        findings.push(match level {
            Level::Impossible => finding
                .meaning(format!("No data has both this histogram and this {name}."))
                .remedy(format!("Do not quote it; publish the data that {name} is of.")),
            Level::Doubtful => finding
                .meaning(
                    "Possible only if the histogram and the table rounded the same latencies in different ways.",
                )
                .remedy("Ask for the figure with one more digit."),
            _ => finding,
        });
    }
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
