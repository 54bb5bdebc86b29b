//! Raw latencies as CSV: one request a line, with or without a header.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, bail};

use super::{Options, Population, Samples, TimeUnit, claimed};

/// Names of columns of latencies, the surest first: exactly so, or with a unit after an underscore.
const LATENCY_NAMES: [&str; 6] = [
    "latency",
    "elapsed",
    "duration",
    "response_time",
    "response time",
    "time",
];

/// Names of columns of starts.
const START_NAMES: [&str; 4] = ["timestamp", "start", "start_time", "start time"];

/// Reads a file.
///
/// # Errors
/// If it has no such column, or a line has no number in it.
pub(super) fn file(path: &Path, text: &str, options: &Options) -> anyhow::Result<Vec<Population>> {
    let first = text.lines().next().unwrap_or_default();
    let delimiter = [b',', b';', b'\t']
        .into_iter()
        .max_by_key(|&each| (first.bytes().filter(|&byte| byte == each).count(), each == b','))
        .unwrap_or(b',');
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .delimiter(delimiter)
        .trim(csv::Trim::All)
        .flexible(true)
        .from_reader(text.as_bytes());
    let mut records = reader.records().peekable();
    let Some(Ok(head)) = records.peek() else {
        bail!("{}: not CSV: one request a line is expected", path.display());
    };
    let head: Vec<String> = head.iter().map(str::to_owned).collect();
    // A header is a line without a number.
    let is_header = !head.iter().any(|cell| cell.parse::<f64>().is_ok());
    let columns = Columns::find(path, &head, is_header, options)?;
    let unit = columns.unit(&head, is_header, options);
    if is_header {
        records.next();
    }
    let mut arms: BTreeMap<String, (Vec<u64>, Vec<f64>)> = BTreeMap::new();
    for record in records {
        let record =
            record.with_context(|| format!("{}: not CSV: mend the line or leave it out", path.display()))?;
        let line = record.position().map_or(0, csv::Position::line);
        let cell = |column: usize| {
            record.get(column).with_context(|| {
                format!(
                    "{}, line {line}: no column {}: the line breaks off, leave it out or mend it",
                    path.display(),
                    column + 1
                )
            })
        };
        let number = |column: usize| -> anyhow::Result<f64> {
            let cell = cell(column)?;
            let number = cell
                .parse::<f64>()
                .ok()
                .filter(|number| number.is_finite() && *number >= 0.0);
            number.with_context(|| {
                format!(
                    "{}, line {line}: {cell:?} in column {} is no number of 0 or more: leave the line out, or choose the column \
                     with --column",
                    path.display(),
                    column + 1
                )
            })
        };
        let arm = match columns.arm {
            Some(column) => cell(column)?.to_owned(),
            None => path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
        };
        let (latencies, starts) = arms.entry(arm).or_default();
        latencies.push((number(columns.latency)? * unit.ns()).round() as u64);
        if let Some(column) = columns.start {
            starts.push(number(column)?);
        }
    }
    if arms.is_empty() {
        bail!("{}: a header and no requests: nothing to audit", path.display());
    }
    let populations = arms.into_iter().map(|(arm, (latencies_ns, starts))| {
        let start_unit = options
            .timestamp_unit
            .unwrap_or_else(|| since_1970(&starts).unwrap_or(unit));
        let starts_ns: Vec<i64> = starts
            .iter()
            .map(|start| (start * start_unit.ns()) as i64)
            .collect();
        let samples = Samples {
            latencies_ns,
            starts_ns,
        };
        let requests = samples.latencies_ns.len() as u64;
        let begin = samples.starts_ns.iter().min();
        let spans_ns = begin
            .zip(samples.starts_ns.iter().max())
            .map(|(&from, &to)| (from, to));
        Ok(Population {
            arm,
            source: format!("{}, in {}", path.display(), unit.name()),
            tables: claimed(requests, &options.claims)?,
            histograms: vec![(String::new(), Ok(samples.histogram()))],
            sums: Vec::new(),
            spans_ns: spans_ns.into_iter().collect(),
            step: samples.step_ms(),
            samples: Some(samples),
        })
    });
    populations.collect()
}

/// Which column is what, from 0.
struct Columns {
    latency: usize,
    arm: Option<usize>,
    start: Option<usize>,
}

impl Columns {
    fn find(path: &Path, head: &[String], is_header: bool, options: &Options) -> anyhow::Result<Self> {
        let named = |wanted: &str, flag: &str| -> anyhow::Result<usize> {
            let by_name = head
                .iter()
                .position(|name| is_header && name.eq_ignore_ascii_case(wanted));
            let by_number = || {
                wanted
                    .parse::<usize>()
                    .ok()?
                    .checked_sub(1)
                    .filter(|&column| column < head.len())
            };
            by_name.or_else(by_number).with_context(|| {
                format!(
                    "{}, line 1: no column {wanted:?}: {flag} takes a number from 1 to {}{}",
                    path.display(),
                    head.len(),
                    if is_header {
                        format!(", or one of {}", head.join(", "))
                    } else {
                        String::new()
                    }
                )
            })
        };
        let guessed = |names: &[&str]| {
            names.iter().find_map(|&wanted| {
                head.iter().position(|name| {
                    let name = name.to_lowercase();
                    is_header && (name == wanted || unit_of(&name).is_some_and(|(stem, _)| stem == wanted))
                })
            })
        };
        let latency = match &options.column {
            Some(wanted) => named(wanted, "--column")?,
            None if !is_header && head.len() == 1 => 0,
            None => guessed(&LATENCY_NAMES).with_context(|| {
                format!(
                    "{}, line 1: no column of latencies is known by its name: choose one of {} with --column NAME or --column N",
                    path.display(),
                    if is_header { head.join(", ") } else { format!("the {} columns", head.len()) }
                )
            })?,
        };
        let wanted =
            |option: &Option<String>, flag| option.as_deref().map(|wanted| named(wanted, flag)).transpose();
        let start = wanted(&options.timestamp_column, "--timestamp-column")?;
        Ok(Self {
            latency,
            arm: wanted(&options.arm_column, "--arm-column")?,
            start: start
                .or_else(|| guessed(&START_NAMES))
                .filter(|&column| column != latency),
        })
    }

    fn unit(&self, head: &[String], is_header: bool, options: &Options) -> TimeUnit {
        let name = head[self.latency].to_lowercase();
        let told = unit_of(&name).filter(|_| is_header).map(|(_, unit)| unit);
        options.unit.or(told).unwrap_or(TimeUnit::Ms)
    }
}

/// A name in small letters without its unit, and the unit.
fn unit_of(name: &str) -> Option<(&str, TimeUnit)> {
    [
        ("_ns", TimeUnit::Ns),
        ("_us", TimeUnit::Us),
        ("_ms", TimeUnit::Ms),
        ("_s", TimeUnit::S),
    ]
    .into_iter()
    .find_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, unit)))
}

/// The unit of times that count from 1970, if their size is that of years since 2001.
fn since_1970(starts: &[f64]) -> Option<TimeUnit> {
    let least = starts.iter().copied().fold(f64::INFINITY, f64::min);
    [
        (1e18, TimeUnit::Ns),
        (1e15, TimeUnit::Us),
        (1e12, TimeUnit::Ms),
        (1e9, TimeUnit::S),
    ]
    .into_iter()
    .find_map(|(least_of_unit, unit)| (least.is_finite() && least >= least_of_unit).then_some(unit))
}
