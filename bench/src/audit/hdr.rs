//! Interval logs of HdrHistogram, with histograms of version 2, compressed or not.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, anyhow, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use hdrhistogram::serialization::{
    Deserializer,
    interval_log::{IntervalLogIterator, LogEntry},
};

use super::{Bin, Histogram, Options, Population, Range, TimeUnit, claimed};

/// Whether a text is such a log.
pub(super) fn is_log(text: &str) -> bool {
    let first = text
        .lines()
        .find(|line| !line.starts_with('#'))
        .unwrap_or_default();
    text.starts_with("#[")
        || ["\"StartTimestamp\"", "Tag="]
            .iter()
            .any(|mark| first.starts_with(mark))
        || first.contains(",HISTF")
        || first.contains(",HISTE")
}

/// Intervals of one tag, put together.
struct Tagged {
    histogram: hdrhistogram::Histogram<u64>,
    spans_ns: Vec<(i64, i64)>,
}

/// Reads a log: each tag is an arm.
///
/// # Errors
/// If a line breaks off or its histogram is damaged.
pub(super) fn log(path: &Path, text: &str, options: &Options) -> anyhow::Result<Vec<Population>> {
    let unit = options.unit.unwrap_or(TimeUnit::Ns);
    // The reader asks for the end of the last line, which some writers leave out.
    let text = if text.ends_with('\n') {
        text.to_owned()
    } else {
        format!("{text}\n")
    };
    let line_of = |at: usize| super::line_of(&text, at);
    let mut tags: BTreeMap<String, Tagged> = BTreeMap::new();
    let mut base_ns = 0i64;
    for entry in IntervalLogIterator::new(text.as_bytes()) {
        let interval = match entry {
            Ok(LogEntry::BaseTime(base)) => {
                base_ns = i64::try_from(base.as_nanos()).unwrap_or(0);
                continue;
            }
            Ok(LogEntry::StartTime(_)) => continue,
            Ok(LogEntry::Interval(interval)) => interval,
            Err(hdrhistogram::serialization::interval_log::LogIteratorError::ParseError { offset }) => {
                bail!(
                    "{}, line {}: not a line of a histogram log: it breaks off or is damaged, copy the log again or leave the \
                     line out",
                    path.display(),
                    line_of(offset)
                )
            }
        };
        let encoded = interval.encoded_histogram();
        let damaged = |what: String| {
            let line = text.find(encoded).map_or(0, line_of);
            anyhow!(
                "{}, line {line}: the histogram is damaged ({what}): it breaks off, copy the log again or leave the line out",
                path.display()
            )
        };
        let bytes = STANDARD
            .decode(encoded)
            .map_err(|error| damaged(error.to_string()))?;
        let mut histogram: hdrhistogram::Histogram<u64> = Deserializer::new()
            .deserialize(&mut bytes.as_slice())
            .map_err(|error| damaged(error.to_string()))?;
        histogram.auto(true);
        let from =
            base_ns.saturating_add(i64::try_from(interval.start_timestamp().as_nanos()).unwrap_or(i64::MAX));
        let to = from.saturating_add(i64::try_from(interval.duration().as_nanos()).unwrap_or(0));
        let name = interval.tag().map_or("untagged", |tag| tag.as_str()).to_owned();
        match tags.get_mut(&name) {
            Some(tagged) => {
                tagged
                    .histogram
                    .add(&histogram)
                    .map_err(|error| damaged(format!("{error:?}")))
                    .context("put the intervals of a tag together")?;
                tagged.spans_ns.push((from, to));
            }
            None => {
                tags.insert(
                    name,
                    Tagged {
                        histogram,
                        spans_ns: vec![(from, to)],
                    },
                );
            }
        }
    }
    tags.retain(|_, tagged| !tagged.histogram.is_empty());
    if tags.is_empty() {
        bail!(
            "{}: a histogram log without a request: nothing to audit",
            path.display()
        );
    }
    let populations = tags.into_iter().map(|(arm, tagged)| {
        let histogram = bounded(&tagged.histogram, unit);
        let median = tagged.histogram.value_at_quantile(0.5);
        let width = tagged.histogram.equivalent_range(median) as f64 * unit.ns() / 1e6;
        Ok(Population {
            arm,
            source: format!("{}, in {}", path.display(), unit.name()),
            tables: claimed(histogram.requests, &options.claims)?,
            histograms: vec![(String::new(), Ok(histogram))],
            sums: Vec::new(),
            spans_ns: tagged.spans_ns,
            step: Some(width),
            samples: None,
        })
    });
    populations.collect()
}

/// Its buckets as bars: counts are exact, a value is known to its bucket.
fn bounded(histogram: &hdrhistogram::Histogram<u64>, unit: TimeUnit) -> Histogram {
    let ms = |value: u64| value as f64 * unit.ns() / 1e6;
    let bins = histogram.iter_recorded().map(|step| {
        let value = step.value_iterated_to();
        let values = Range::new(
            ms(histogram.lowest_equivalent(value)),
            ms(histogram.highest_equivalent(value)),
        );
        Bin {
            label: ms(histogram.median_equivalent(value)),
            word: values,
            values,
            count_min: step.count_at_value(),
            count_max: step.count_at_value(),
        }
    });
    Histogram {
        requests: histogram.len(),
        bins: bins.collect(),
        missing: 0,
        shift: Range::new(0.0, 0.0),
    }
}
