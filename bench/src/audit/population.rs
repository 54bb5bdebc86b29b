//! What was published of one set of requests, whatever its form.

use super::{claim::Table, histogram::Histogram, samples::Samples};

/// One set of requests: one arm, or one trial of it.
#[derive(Clone, Debug, Default)]
pub struct Population {
    /// What was measured: the request's name, the tag, the value in the arm's column.
    pub arm: String,
    /// The file it is from.
    pub source: String,
    /// What is claimed of it. The first column is all requests.
    pub tables: Vec<Table>,
    /// The published histogram of each column, or why there is none.
    pub histograms: Vec<(String, Result<Histogram, String>)>,
    /// Numbers that must be the same: what they are, the whole, and the sum of its parts.
    pub sums: Vec<(String, u64, u64)>,
    /// When its requests began, ns of any epoch that all populations of a source share; empty if that is not told.
    pub spans_ns: Vec<(i64, i64)>,
    /// No two different values are closer, ms; `None` if it cannot be told.
    pub step: Option<f64>,
    /// The latencies themselves.
    pub samples: Option<Samples>,
}

impl Population {
    /// How findings call a column of it.
    pub(super) fn subject(&self, column: &str) -> String {
        if column.is_empty() {
            self.arm.clone()
        } else {
            format!("{}, {column}", self.arm)
        }
    }

    /// The histogram of a column.
    pub(super) fn histogram(&self, column: &str) -> Result<&Histogram, &str> {
        match self.histograms.iter().find(|(each, _)| each == column) {
            Some((_, histogram)) => histogram.as_ref().map_err(String::as_str),
            None => Err("it is not published for this column."),
        }
    }

    /// Requests in all.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let of_table = self.tables.first().map(|table| table.requests);
        let of_histogram = || {
            self.histograms
                .iter()
                .find_map(|(_, histogram)| histogram.as_ref().ok())
                .map(|histogram| histogram.requests)
        };
        of_table.or_else(of_histogram).unwrap_or(0)
    }
}
