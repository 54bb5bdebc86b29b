//! Reports of Gatling 3: a folder with a page per request, `req_*.html`, and statistics in `js/stats.json` or `js/stats.js`.
//!
//! A page's chart of the distribution has labels in whole ms and a series of percents each for what went well (`OK`) and what
//! failed (`KO`), of all requests and cut, not rounded, to two decimals. Up to a range of about 100 ms its labels are the values
//! that occur; beyond, they are the middles of a hundred bars of equal width. Newer pages have their statistics in the table
//! itself, older ones have them filled in from `stats.js`.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::{
    claim::{Claim, Range, Table},
    histogram::Histogram,
    page::{self, Page},
    population::Population,
    read,
};

/// Response times and all statistics of them are whole ms.
const STEP_MS: f64 = 1.0;

/// What the percents are cut to.
const PERCENT_UNIT: f64 = 0.01;

/// Bars that a chart divides a wide range into; with fewer, and no more ms than that, a label is a value.
const BARS: usize = 100;

/// Columns of a table of statistics: as findings call them, and as `stats.json` does.
const COLUMNS: [(&str, &str); 3] = [("total", "total"), ("OK", "ok"), ("KO", "ko")];

/// Whether a folder is such a report.
#[must_use]
pub(super) fn is_report(folder: &Path) -> bool {
    pages(folder).is_ok_and(|pages| !pages.is_empty())
}

fn pages(folder: &Path) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("read the folder {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("req_") && name.ends_with(".html") {
            pages.push(path);
        }
    }
    pages.sort();
    Ok(pages)
}

/// Every request page of a folder.
///
/// # Errors
/// If there is none, or one of them, or the statistics, are not what Gatling writes.
pub(super) fn folder(folder: &Path) -> anyhow::Result<Vec<Population>> {
    let statistics = statistics(folder)?;
    let pages = pages(folder)?;
    if pages.is_empty() {
        bail!(
            "{}: no request page (req_*.html): name the folder that holds a Gatling report's index.html",
            folder.display()
        );
    }
    pages.iter().map(|path| request(path, &statistics)).collect()
}

/// One request page.
///
/// # Errors
/// If it, or the statistics beside it, are not what Gatling writes.
pub(super) fn page(path: &Path) -> anyhow::Result<Vec<Population>> {
    let beside = path.parent().unwrap_or(Path::new("."));
    Ok(vec![request(path, &statistics(beside)?)?])
}

/// Name and statistics by the name of the page, from whichever file there is; none in a report of which only pages are left.
fn statistics(folder: &Path) -> anyhow::Result<BTreeMap<String, (String, Value)>> {
    let mut found = BTreeMap::new();
    for name in ["js/stats.json", "js/stats.js"] {
        let path = folder.join(name);
        if !path.is_file() {
            continue;
        }
        let text = read(&path)?;
        // `var stats = {`: newer reports have a script of that name without it.
        let Some(begin) = text
            .find("stats = {")
            .map(|at| at + "stats = ".len())
            .or_else(|| {
                text.trim_start()
                    .starts_with('{')
                    .then(|| text.len() - text.trim_start().len())
            })
        else {
            continue;
        };
        let tree = super::script::literal(&text[begin..]).map_err(|at| {
            let line = super::line_of(&text, begin + at);
            anyhow::anyhow!(
                "{}, line {line}: the statistics break off or are damaged: copy the report's js folder again",
                path.display()
            )
        })?;
        flatten(&tree, &mut found, 0);
        break;
    }
    Ok(found)
}

/// Groups hold requests and groups.
fn flatten(tree: &Value, found: &mut BTreeMap<String, (String, Value)>, depth: usize) {
    let Some(contents) = tree.get("contents").and_then(Value::as_object) else {
        return;
    };
    for (key, entry) in contents {
        let name = entry.get("name").and_then(Value::as_str).unwrap_or(key);
        if let Some(stats) = entry.get("stats") {
            found.insert(key.clone(), (name.to_owned(), stats.clone()));
        }
        if depth < 32 {
            flatten(entry, found, depth + 1);
        }
    }
}

fn request(path: &Path, statistics: &BTreeMap<String, (String, Value)>) -> anyhow::Result<Population> {
    let text = read(path)?;
    let key = path
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let page = page::parse(&text).map_err(|(line, what)| {
        anyhow::anyhow!(
            "{}, line {line}: {what}: save the page again, whole",
            path.display()
        )
    })?;
    let stats = statistics.get(&key);
    let mut tables = stats.map_or_else(Vec::new, |(_, stats)| tables_of(stats, &page));
    if tables.is_empty() {
        tables = tables_on(&page);
    }
    if tables.is_empty() {
        bail!(
            "{}: no statistics, neither in the page nor in js/stats.json or js/stats.js beside it: copy the report's js folder \
             as well",
            path.display()
        );
    }
    let name = stats.map(|(name, _)| name.clone()).or_else(|| page.title.clone());
    let sums = stats.map_or_else(Vec::new, |(_, stats)| ranges(stats));
    Ok(Population {
        arm: name.unwrap_or(key),
        source: path.display().to_string(),
        histograms: histograms(&page, &tables),
        sums: sums.into_iter().chain(columns(&tables)).collect(),
        tables,
        spans_ns: page
            .active_s
            .iter()
            .map(|&(from, to)| (from * 1_000_000_000, to * 1_000_000_000))
            .collect(),
        step: Some(STEP_MS),
        samples: None,
    })
}

/// A figure of a table: a number, or a number in quotes; `-` where there is none.
fn figure(value: &Value) -> Option<f64> {
    value
        .as_f64()
        .or_else(|| value.as_str()?.replace(',', "").trim().parse().ok())
        .filter(|value| (0.0..1e15).contains(value))
}

fn tables_of(stats: &Value, page: &Page) -> Vec<Table> {
    let columns = COLUMNS.iter().filter_map(|&(column, key)| {
        let of = |name: &str| stats.get(name).and_then(|row| row.get(key)).and_then(figure);
        let requests = of("numberOfRequests")? as u64;
        let claim = |name: &str| of(name).map(|value| Claim { value, unit: STEP_MS });
        let percentiles = (1..)
            .zip(page.quantiles())
            .filter_map(|(number, quantile)| Some((quantile, claim(&format!("percentiles{number}"))?)));
        (requests > 0).then(|| Table {
            column: column.to_owned(),
            requests,
            min: claim("minResponseTime"),
            max: claim("maxResponseTime"),
            mean: claim("meanResponseTime"),
            deviation: claim("standardDeviation"),
            percentiles: percentiles.collect(),
        })
    });
    columns.collect()
}

fn tables_on(page: &Page) -> Vec<Table> {
    let columns = COLUMNS.iter().enumerate().filter_map(|(index, &(column, _))| {
        let of = |title: &str| {
            let row = page.rows.iter().find(|(each, _)| each == title);
            row.and_then(|(_, cells)| cells.get(index).copied().flatten())
        };
        let requests = of("Total count")? as u64;
        let claim = |title: &str| of(title).map(|value| Claim { value, unit: STEP_MS });
        let percentiles = page
            .percentile_titles()
            .filter_map(|(title, quantile)| Some((quantile, claim(title)?)));
        (requests > 0).then(|| Table {
            column: column.to_owned(),
            requests,
            min: claim("Min"),
            max: claim("Max"),
            mean: claim("Mean"),
            deviation: claim("Standard Deviation").or_else(|| claim("Std Deviation")),
            percentiles: percentiles.collect(),
        })
    });
    columns.collect()
}

/// The four ranges of the first chart come to all requests.
fn ranges(stats: &Value) -> Vec<(String, u64, u64)> {
    let of = |name: &str, key: &str| {
        stats
            .get(name)?
            .get(key)
            .and_then(figure)
            .map(|value| value as u64)
    };
    let parts: Option<u64> = ["group1", "group2", "group3", "group4"]
        .iter()
        .map(|group| of(group, "count"))
        .sum();
    match (of("numberOfRequests", "total"), parts) {
        (Some(total), Some(parts)) => {
            vec![("all requests, and those of its ranges".to_owned(), total, parts)]
        }
        _ => Vec::new(),
    }
}

/// What went well and what failed come to all requests.
fn columns(tables: &[Table]) -> Option<(String, u64, u64)> {
    let (total, parts) = tables.split_first()?;
    (total.column == "total" && !parts.is_empty()).then(|| {
        let sum = parts.iter().map(|part| part.requests).sum();
        ("all requests, and OK with KO".to_owned(), total.requests, sum)
    })
}

fn histograms(page: &Page, tables: &[Table]) -> Vec<(String, Result<Histogram, String>)> {
    let requests = tables.first().map_or(0, |table| table.requests);
    let columns = tables.iter().map(|table| {
        let histogram = match table.column.as_str() {
            _ if page.labels.is_empty() => Err("the page has no chart of the distribution.".to_owned()),
            // Nothing failed: what went well is all.
            "total" | "OK" if is_all_ok(tables) => bars(requests, requests, &page.labels, &page.ok),
            "OK" => bars(requests, table.requests, &page.labels, &page.ok),
            _ => Err(
                "where requests failed, the page's chart does not tell at which label the failures stand."
                    .to_owned(),
            ),
        };
        (table.column.clone(), histogram)
    });
    columns.collect()
}

fn is_all_ok(tables: &[Table]) -> bool {
    let of = |column: &str| {
        tables
            .iter()
            .find(|table| table.column == column)
            .map(|table| table.requests)
    };
    of("KO").is_none() && of("OK") == of("total")
}

/// The bars of `part` requests, in percents of `whole`.
pub(super) fn bars(whole: u64, part: u64, labels: &[f64], percents: &[f64]) -> Result<Histogram, String> {
    if labels.len() != percents.len() {
        return Err(format!(
            "the chart has {} labels and {} bars.",
            labels.len(),
            percents.len()
        ));
    }
    let bars: Vec<(f64, f64)> = labels.iter().copied().zip(percents.iter().copied()).collect();
    let (first, last) = (labels[0], labels[labels.len() - 1]);
    let shift = Range::new(-STEP_MS, 0.0);
    if labels.len() < BARS && last - first <= BARS as f64 {
        let around = Range::new(0.0, STEP_MS);
        let mut histogram = Histogram::of_percents(whole, &bars, PERCENT_UNIT, around, shift);
        histogram.requests = part;
        return Ok(histogram);
    }
    // A label is its bar's middle, rounded; some versions move the bars by half their width.
    let widest = labels
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .fold(0.0, f64::max);
    let around = Range::new(-widest - 0.5, widest + 0.5 + STEP_MS);
    let mut histogram = Histogram::of_percents(whole, &bars, PERCENT_UNIT, around, shift);
    histogram.requests = part;
    // Gatling names these bars twice, once for the axis and once for each request, and a rounding error can make the two names
    // differ: such requests are in no bar. So a bar has at least what it shows, and any bar may lack what all lack.
    let (min, max) = histogram.counts();
    histogram.missing = part.saturating_sub(max);
    for bin in &mut histogram.bins {
        bin.word = Range::new(bin.label, bin.label).widened(widest / 2.0 + 0.5);
        bin.count_max = bin.count_min + part.saturating_sub(min);
    }
    Ok(histogram)
}
