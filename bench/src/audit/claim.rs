//! Figures as they were published: each stands for all values that could have been rounded to it.

use std::fmt;

use serde::Serialize;

/// A closed range of values, ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// Least.
    pub low: f64,
    /// Greatest.
    pub high: f64,
}

impl Range {
    /// From `low` to `high`.
    #[must_use]
    pub fn new(low: f64, high: f64) -> Self {
        Self { low, high }
    }

    /// Whether both have a value in common. Values closer than a millionth of their size count as common: the bounds are sums
    /// of many roundings of ours.
    #[must_use]
    pub fn meets(self, other: Self) -> bool {
        let slack = 1e-9 + 1e-6 * self.high.abs().max(other.high.abs());
        self.low <= other.high + slack && other.low <= self.high + slack
    }

    /// Both ends moved outwards.
    #[must_use]
    pub fn widened(self, by: f64) -> Self {
        Self::new(self.low - by, self.high + by)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (number(self.low), number(self.high));
        if low == high {
            write!(formatter, "{low} ms")
        } else {
            write!(formatter, "{low} to {high} ms")
        }
    }
}

/// A number of at most four decimals.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    // What rounds to nothing has no sign.
    if text == "-0" { "0" } else { text }.replace('-', "\u{2212}")
}

/// A quantile as it is commonly called: 0.99 as `p99`.
pub(super) fn percentile_name(quantile: f64) -> String {
    format!("p{}", number(quantile * 100.0))
}

/// One published figure, ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// As printed, ms.
    pub value: f64,
    /// The last printed digit's worth, ms: what it was rounded or cut to.
    pub unit: f64,
}

impl Claim {
    /// As if its writer had rounded it to the nearest.
    #[must_use]
    pub fn rounded(self) -> Range {
        Range::new(self.value, self.value).widened(self.unit / 2.0)
    }

    /// In whatever way it was rounded: to the nearest, down or up. The ends themselves are left out.
    #[must_use]
    pub fn widest(self) -> Range {
        Range::new(self.value, self.value).widened(self.unit)
    }

    /// What can be printed of a value in this range, rounded in whatever way: multiples of the last digit's worth.
    #[must_use]
    pub fn printable(self, values: Range) -> Range {
        let Range { low, high } = values;
        if self.unit <= 0.0 {
            return values;
        }
        let digits = |value: f64| value / self.unit;
        Range::new(
            (digits(low) + SLACK).floor() * self.unit,
            (digits(high) - SLACK).ceil() * self.unit,
        )
    }

    /// Whether it can be what is printed of a value in this range, rounded in whatever way.
    #[must_use]
    pub fn could_be(self, values: Range) -> bool {
        let printable = self.printable(values);
        let slack = SLACK * self.unit.max(self.value.abs());
        (printable.low - slack..=printable.high + slack).contains(&self.value)
    }
}

/// Relative; sums and products of ours are more exact than this, and no published figure is.
const SLACK: f64 = 1e-9;

impl fmt::Display for Claim {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ms", number(self.value))
    }
}

/// One column of a table of statistics: what is claimed of one population.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Which requests: `total`, `OK`, `KO`; empty where there is but one column.
    pub column: String,
    /// How many they are.
    pub requests: u64,
    /// Fastest.
    pub min: Option<Claim>,
    /// Slowest.
    pub max: Option<Claim>,
    /// Mean.
    pub mean: Option<Claim>,
    /// Standard deviation.
    pub deviation: Option<Claim>,
    /// Percentiles: quantile from 0 to 1, and value.
    pub percentiles: Vec<(f64, Claim)>,
}

impl Table {
    /// All figures with their names.
    #[must_use]
    pub fn figures(&self) -> Vec<(String, Claim)> {
        let single = [
            ("min", self.min),
            ("max", self.max),
            ("mean", self.mean),
            ("standard deviation", self.deviation),
        ];
        let single = single
            .into_iter()
            .filter_map(|(name, claim)| claim.map(|claim| (name.to_owned(), claim)));
        let percentiles = self.percentiles.iter();
        let percentiles = percentiles.map(|&(quantile, claim)| (percentile_name(quantile), claim));
        percentiles.chain(single).collect()
    }
}
