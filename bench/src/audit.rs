//! Published results looked at again: what they claim against what their own data allow.
//!
//! Every bound here is meant to hold for all data that could have been rounded to what was published, so that a figure outside
//! of it is *impossible* and not merely odd. What the data do not tell is said to be unchecked; nothing is assumed in its place.

mod check;
mod claim;
mod compare;
mod csv;
mod finding;
mod gatling;
mod hdr;
mod histogram;
#[cfg(test)]
mod laws;
mod page;
mod population;
mod samples;
mod script;
mod table;

use std::{collections::BTreeSet, fs, path::Path, path::PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;

use self::claim::percentile_name;
pub use self::{
    claim::{Claim, Range, Table},
    finding::{Finding, Level},
    histogram::{Bin, Bounds, Histogram, ranks},
    population::Population,
    samples::Samples,
};
use crate::statistics::quantile;

/// Version of the JSON form of a report.
pub const AUDIT_SCHEMA: u32 = 1;

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TimeUnit {
    /// Nanoseconds.
    Ns,
    /// Microseconds.
    Us,
    /// Milliseconds.
    Ms,
    /// Seconds.
    S,
}

impl TimeUnit {
    /// One of it, ns.
    #[must_use]
    pub fn ns(self) -> f64 {
        match self {
            Self::Ns => 1.0,
            Self::Us => 1e3,
            Self::Ms => 1e6,
            Self::S => 1e9,
        }
    }

    /// Its symbol.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ns => "ns",
            Self::Us => "us",
            Self::Ms => "ms",
            Self::S => "s",
        }
    }
}

/// How files are to be read that do not say so themselves.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Unit of latencies. If absent: what a column's name ends in, else ms in a CSV file and ns in a histogram log.
    pub unit: Option<TimeUnit>,
    /// Column of latencies in a CSV file: its name, or its number from 1.
    pub column: Option<String>,
    /// Column of arms.
    pub arm_column: Option<String>,
    /// Column of the requests' starts.
    pub timestamp_column: Option<String>,
    /// Unit of the starts. If absent: by their size if they count from 1970, else that of the latencies.
    pub timestamp_unit: Option<TimeUnit>,
    /// Figures that were published of raw latencies or a histogram log, such as `p99=39`, ms.
    pub claims: Vec<(String, Claim)>,
}

/// What an audit came to.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`AUDIT_SCHEMA`].
    pub schema: u32,
    /// What was looked at.
    pub populations: Vec<Recomputed>,
    /// Everything found, the worst of each population first.
    pub findings: Vec<Finding>,
}

/// One population's figures, from its data.
#[derive(Clone, Debug, Serialize)]
pub struct Recomputed {
    /// The arm.
    pub arm: String,
    /// The file.
    pub source: String,
    /// Requests in all.
    pub requests: u64,
    /// What they are made from: `samples`, `histogram`, or `nothing`.
    pub from: &'static str,
    /// Name, and the range that the data allow at their word, ms.
    pub figures: Vec<(String, Range)>,
}

impl Report {
    /// How many findings are of a level.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    }
}

/// Reads and examines.
///
/// # Errors
/// If a path is neither a Gatling report, nor a histogram log, nor CSV, or is damaged: with the file, the line and the remedy.
pub fn audit(paths: &[PathBuf], options: &Options) -> anyhow::Result<Report> {
    let mut sources = Vec::new();
    for path in paths {
        sources.push((path.as_path(), load(path, options)?));
    }
    let populations = named(sources);
    let mut findings: Vec<Finding> = Vec::new();
    for population in &populations {
        let mut of_population = check::examine(population);
        of_population.extend(of_samples(population));
        of_population.sort_by_key(|finding| std::cmp::Reverse(finding.level));
        findings.extend(of_population);
    }
    let mut between = compare::examine(&populations);
    between.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings.extend(between);
    Ok(Report {
        schema: AUDIT_SCHEMA,
        populations: populations.iter().map(recomputed).collect(),
        findings,
    })
}

fn load(path: &Path, options: &Options) -> anyhow::Result<Vec<Population>> {
    if path.is_dir() {
        if gatling::is_report(path) {
            return gatling::folder(path);
        }
        // A folder of reports, one per arm or trial.
        let mut reports: Vec<PathBuf> = fs::read_dir(path)
            .with_context(|| format!("read the folder {}", path.display()))?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.is_dir() && gatling::is_report(path))
            .collect();
        reports.sort();
        if reports.is_empty() {
            bail!(
                "{}: no request page (req_*.html) in it or in a folder of it: name a Gatling report's folder, a histogram log or \
                 a CSV file",
                path.display()
            );
        }
        let mut populations = Vec::new();
        for report in reports {
            populations.extend(gatling::folder(&report)?);
        }
        return Ok(populations);
    }
    if path.extension().is_some_and(|extension| extension == "html") {
        return gatling::page(path);
    }
    let text = read(path)?;
    if hdr::is_log(&text) {
        hdr::log(path, &text, options)
    } else {
        csv::file(path, &text, options)
    }
}

/// A file's text.
///
/// # Errors
/// If it cannot be read, is empty, or is no text.
fn read(path: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count()
            + 1;
        anyhow::anyhow!(
            "{}, line {line}: not UTF-8: unpack it if it is compressed, or convert it (iconv -t UTF-8)",
            path.display()
        )
    })?;
    if text.trim().is_empty() {
        bail!("{}: empty: nothing to audit, copy it again", path.display());
    }
    Ok(text)
}

/// The line, from 1, of a byte.
fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at]
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count()
        + 1
}

/// Arms of one name in several sources are trials of one arm, unless there is no other name: then each source is an arm.
fn named(sources: Vec<(&Path, Vec<Population>)>) -> Vec<Population> {
    let names: BTreeSet<String> = sources
        .iter()
        .flat_map(|(_, populations)| populations.iter().map(|population| population.arm.clone()))
        .collect();
    let of_sources = sources.len() > 1 && names.len() == 1;
    let mut all = Vec::new();
    for (path, populations) in sources {
        for mut population in populations {
            if of_sources {
                let folder = if path.is_dir() {
                    path.file_name()
                } else {
                    path.file_stem()
                };
                if let Some(name) = folder {
                    population.arm = name.to_string_lossy().into_owned();
                }
            }
            all.push(population);
        }
    }
    all
}

/// The checks that need the latencies one by one, or say that they are not there.
fn of_samples(population: &Population) -> Vec<Finding> {
    let subject = population.subject("");
    match &population.samples {
        Some(samples) => {
            let mut findings = vec![samples.omission(&subject)];
            findings.extend(samples.stationarity(&subject));
            findings
        }
        None => vec![
            Finding::new(Level::Unchecked, "coordinated omission", &subject)
                .meaning("A histogram has no starts of requests: whether slow requests kept others from being sent is not in it.")
                .remedy("Publish raw latencies with the start of each request."),
        ],
    }
}

fn recomputed(population: &Population) -> Recomputed {
    const QUANTILES: [f64; 5] = [0.5, 0.75, 0.95, 0.99, 0.999];
    let mut figures = Vec::new();
    let mut from = "nothing";
    let histogram = population
        .histograms
        .iter()
        .find_map(|(_, histogram)| histogram.as_ref().ok())
        .filter(|histogram| histogram.adds_up());
    if let Some(samples) = &population.samples {
        from = "samples";
        let ascending = samples.ascending();
        let mean = ascending.iter().map(|&ns| ns as f64).sum::<f64>() / ascending.len() as f64 / 1e6;
        figures.push(("mean".to_owned(), Range::new(mean, mean)));
        for each in QUANTILES {
            let value = quantile(&ascending, each) as f64 / 1e6;
            figures.push((percentile_name(each), Range::new(value, value)));
        }
        let max = ascending[ascending.len() - 1] as f64 / 1e6;
        figures.push(("max".to_owned(), Range::new(max, max)));
    } else if let Some(histogram) = histogram {
        from = "histogram";
        figures.push(("mean".to_owned(), histogram.mean().labels));
        for each in QUANTILES {
            figures.push((percentile_name(each), histogram.percentile(each).labels));
        }
        figures.push(("max".to_owned(), histogram.max().labels));
        figures.push(("sd".to_owned(), histogram.deviation().labels));
    }
    Recomputed {
        arm: population.arm.clone(),
        source: population.source.clone(),
        requests: population.requests(),
        from,
        figures,
    }
}

/// A table of the claims that were made of data that have none themselves.
fn claimed(requests: u64, claims: &[(String, Claim)]) -> anyhow::Result<Vec<Table>> {
    if claims.is_empty() {
        return Ok(Vec::new());
    }
    let mut table = Table {
        column: String::new(),
        requests,
        ..Table::default()
    };
    for (name, claim) in claims {
        match name.as_str() {
            "min" => table.min = Some(*claim),
            "max" => table.max = Some(*claim),
            "mean" => table.mean = Some(*claim),
            "sd" => table.deviation = Some(*claim),
            other => {
                let percent = other
                    .strip_prefix('p')
                    .and_then(|percent| percent.parse::<f64>().ok());
                let Some(percent) = percent.filter(|percent| (0.0..=100.0).contains(percent)) else {
                    bail!("--claim {name}: not a figure: name p50, p99.9, mean, sd, min or max");
                };
                table.percentiles.push((percent / 100.0, *claim));
            }
        }
    }
    Ok(vec![table])
}
