//! The checks of one population: what its table claims against its histogram, and its columns against one another.

use super::{
    claim::{Claim, Range, Table, number, percentile_name},
    finding::{Finding, Level},
    histogram::{Bounds, Histogram, ranks},
    population::Population,
    table,
};
use crate::report::text::count;

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
        findings.extend(table::examine(&subject, table));
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
        let is_told = |(other, earlier): &&(String, Result<Histogram, String>)| {
            other != column && earlier.as_ref() == Ok(histogram)
        };
        let earlier = population
            .histograms
            .iter()
            .take_while(|(other, _)| other != column);
        if earlier.filter(is_told).count() > 0 {
            continue;
        }
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
        findings.push(if histogram.adds_up() && histogram.missing == 0 {
            finding(Level::Agrees)
        } else if histogram.adds_up() {
            finding(Level::Doubtful)
                .allowed(format!(
                    "the bars leave out at least {} of them",
                    count(histogram.missing)
                ))
                .meaning(
                    "Gatling's charts of a range of more than 100 ms can lose requests to a rounding error. Where those lie is \
                     not told; the bounds here allow for any place.",
                )
                .remedy("Publish the counts themselves.")
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
