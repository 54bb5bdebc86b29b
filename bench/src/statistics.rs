//! Statistics of the tail: exact, from all samples, with trials as the unit of repetition.

pub mod interval;
pub mod null;
pub mod samples;

use crate::report::summary::Percentiles;

/// A statistic by name, the quantile it is, and where it stands among the percentiles.
pub type Statistic = (&'static str, f64, fn(&Percentiles) -> u64);

/// Statistics that are compared, between arms and between runs.
pub const STATISTICS: [Statistic; 5] = [
    ("mean", 0.5, |p| p.mean),
    ("p50", 0.5, |p| p.p50),
    ("p95", 0.95, |p| p.p95),
    ("p99", 0.99, |p| p.p99),
    ("p99.9", 0.999, |p| p.p999),
];

/// Value at a quantile of ascending samples, by nearest rank: the least sample that at least that share does not exceed.
///
/// # Panics
/// Without samples.
#[must_use]
pub fn quantile(ascending: &[u64], quantile: f64) -> u64 {
    ascending[rank(ascending.len(), quantile)]
}

/// Index of the nearest rank.
///
/// # Panics
/// If `count` is 0.
#[must_use]
pub fn rank(count: usize, quantile: f64) -> usize {
    assert!(count > 0, "a quantile needs a sample");
    // The product of a decimal quantile and a count may miss the integer it stands for by a rounding error.
    let exact = quantile * count as f64;
    ((exact - exact * 1e-12).ceil() as usize).clamp(1, count) - 1
}

/// The table's statistics of ascending samples; all zero without samples.
#[must_use]
pub fn percentiles(ascending: &[u64]) -> Percentiles {
    if ascending.is_empty() {
        return Percentiles::default();
    }
    let sum: u128 = ascending.iter().map(|&each| u128::from(each)).sum();
    Percentiles {
        min: ascending[0],
        mean: (sum / ascending.len() as u128) as u64,
        p50: quantile(ascending, 0.5),
        p95: quantile(ascending, 0.95),
        p99: quantile(ascending, 0.99),
        p999: quantile(ascending, 0.999),
        max: ascending[ascending.len() - 1],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranks_are_those_of_the_definition() {
        let samples: Vec<u64> = (1..=1000).collect();
        assert_eq!(quantile(&samples, 0.5), 500);
        assert_eq!(quantile(&samples, 0.99), 990);
        assert_eq!(quantile(&samples, 0.999), 999);
        assert_eq!(quantile(&[7], 0.999), 7);
    }

    proptest! {
        #[test]
        fn a_quantile_splits_the_samples(mut samples in prop::collection::vec(0u64..1_000, 1..300), q in 0.0f64..=1.0) {
            samples.sort_unstable();
            let value = quantile(&samples, q);
            let at_most = samples.iter().filter(|&&each| each <= value).count() as f64;
            let below = samples.iter().filter(|&&each| each < value).count() as f64;
            prop_assert!(at_most >= q * samples.len() as f64 - 1e-6);
            prop_assert!(below <= q * samples.len() as f64 + 1e-6);
        }
    }
}
