//! What a published histogram allows: bounds that hold however its counts and its values were rounded.

use super::claim::Range;

/// One bar of a histogram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bin {
    /// The value it is named by, ms.
    pub label: f64,
    /// The values that it holds if its label is taken at its word, ms.
    pub word: Range,
    /// The values that it holds, ms, up to [`Histogram::shift`].
    pub values: Range,
    /// At least so many requests.
    pub count_min: u64,
    /// At most so many requests.
    pub count_max: u64,
}

/// A histogram with the doubt that its rounding leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// Requests in all.
    pub requests: u64,
    /// Bars with ascending labels.
    pub bins: Vec<Bin>,
    /// At least so many requests are in no bar. Where they lie is not told: the bars' counts allow for it.
    pub missing: u64,
    /// All values may lie this much beside their bins, ms, by one and the same amount: whether values were cut, rounded to the
    /// nearest or rounded up to a label is not told, but it was done to all alike.
    pub shift: Range,
}

/// A figure recomputed from a histogram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// If every request took what its label says.
    pub labels: Range,
    /// With the values' rounding as well: no data with this histogram lies outside.
    pub hull: Range,
}

/// Ranks that any of the usual definitions of a percentile takes samples from or interpolates between, from 1.
///
/// Hyndman and Fan's nine definitions (The American Statistician 50, 1996) interpolate between the ranks j and j + 1 where j is
/// nq + m without its fraction, and m is from -1/2 to 1.
#[must_use]
pub fn ranks(requests: u64, quantile: f64) -> (u64, u64) {
    let exact = quantile * requests as f64;
    // A decimal quantile's product may miss the integer that it stands for.
    let slack = exact * 1e-12;
    let clamp = |rank: f64| (rank.max(1.0) as u64).clamp(1, requests.max(1));
    (
        clamp((exact - 0.5 - slack).floor()),
        clamp((exact + slack).floor() + 2.0),
    )
}

/// Parts that the range of the mean is divided into for the bounds of the standard deviation. More would tighten them by less
/// than a thousandth of the mean's range.
const CELLS: usize = 400;

impl Histogram {
    /// Of percents printed with the last digit worth `unit`, of `requests` in all; bars are labels, ms, and percents. The values
    /// of a bar lie in `around` its label, up to `shift`.
    ///
    /// Percents may have been cut off, as some tools do, or rounded to the nearest.
    #[must_use]
    pub fn of_percents(requests: u64, bars: &[(f64, f64)], unit: f64, around: Range, shift: Range) -> Self {
        let share = |percent: f64| percent / 100.0 * requests as f64;
        let mut bins: Vec<Bin> = bars
            .iter()
            .map(|&(label, percent)| Bin {
                label,
                word: Range::new(label, label),
                values: Range::new(label + around.low, label + around.high),
                count_min: (share(percent - unit / 2.0) - 1e-6).ceil().max(0.0) as u64,
                count_max: ((share(percent + unit) + 1e-6).floor() as u64).min(requests),
            })
            .collect();
        bins.sort_by(|one, other| one.label.total_cmp(&other.label));
        Self {
            requests,
            bins,
            missing: 0,
            shift,
        }
    }

    /// Requests in all bars: at least and at most.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let min = self.bins.iter().map(|bin| bin.count_min).sum();
        let max = self.bins.iter().map(|bin| bin.count_max).sum();
        (min, max)
    }

    /// Whether some counts within the bounds come to the number of requests. Nothing else may be asked of one that does not.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        let (min, max) = self.counts();
        !self.bins.is_empty() && self.requests > 0 && (min..=max).contains(&self.requests)
    }

    /// Where the samples of these ranks can lie.
    fn between(&self, (low, high): (u64, u64)) -> Bounds {
        let (min, max) = self.counts();
        let (mut below_min, mut below_max) = (0, 0);
        let (mut first, mut last) = (None, None);
        for bin in &self.bins {
            below_min += bin.count_min;
            below_max += bin.count_max;
            // What the other bars must hold, or cannot, is not here.
            let most = below_max.min(self.requests - (min - below_min).min(self.requests));
            let least = below_min.max(self.requests.saturating_sub(max - below_max));
            if first.is_none() && most >= low && bin.count_max > 0 {
                first = Some(bin);
            }
            if last.is_none() && least >= high {
                last = Some(bin);
            }
        }
        let first = first.unwrap_or(&self.bins[0]);
        let last = last.unwrap_or(&self.bins[self.bins.len() - 1]);
        Bounds {
            labels: Range::new(first.word.low, last.word.high),
            hull: Range::new(
                first.values.low + self.shift.low,
                last.values.high + self.shift.high,
            ),
        }
    }

    /// A percentile by any of the usual definitions.
    ///
    /// # Panics
    /// If the histogram does not add up.
    #[must_use]
    pub fn percentile(&self, quantile: f64) -> Bounds {
        assert!(self.adds_up(), "only what adds up has percentiles");
        self.between(ranks(self.requests, quantile))
    }

    /// The slowest request.
    ///
    /// # Panics
    /// If the histogram does not add up.
    #[must_use]
    pub fn max(&self) -> Bounds {
        assert!(self.adds_up(), "only what adds up has a slowest request");
        self.between((self.requests, self.requests))
    }

    /// The fastest request.
    ///
    /// # Panics
    /// If the histogram does not add up.
    #[must_use]
    pub fn min(&self) -> Bounds {
        assert!(self.adds_up(), "only what adds up has a fastest request");
        self.between((1, 1))
    }

    /// At most so many requests can have taken `value` ms or more.
    #[must_use]
    pub fn at_least(&self, value: f64) -> u64 {
        let (mut rest, mut high) = (0, 0);
        for bin in &self.bins {
            if bin.values.high + self.shift.high >= value {
                high += bin.count_max;
            } else {
                rest += bin.count_min;
            }
        }
        high.min(self.requests.saturating_sub(rest))
    }

    /// Share of the requests at or below a label, 0 to 1: least and greatest.
    #[must_use]
    pub fn share_up_to(&self, label: f64) -> Range {
        let (mut low, mut high) = (0, 0);
        let (mut rest_low, mut rest_high) = (0, 0);
        for bin in &self.bins {
            if bin.word.low <= label {
                low += bin.count_min;
                high += bin.count_max;
            } else {
                rest_low += bin.count_min;
                rest_high += bin.count_max;
            }
        }
        let all = self.requests.max(1) as f64;
        let low = low.max(self.requests.saturating_sub(rest_high));
        let high = high.min(self.requests.saturating_sub(rest_low));
        Range::new(low as f64 / all, high as f64 / all)
    }

    /// Least mean cost a request, if the requests that the bounds leave free go where they cost least.
    fn least(&self, cost: impl Fn(&Bin) -> f64) -> f64 {
        let (min, _) = self.counts();
        let mut free = self.requests - min;
        let mut sum: f64 = self.bins.iter().map(|bin| cost(bin) * bin.count_min as f64).sum();
        if free > 0 {
            let mut order: Vec<(f64, u64)> = self
                .bins
                .iter()
                .map(|bin| (cost(bin), bin.count_max - bin.count_min))
                .collect();
            order.sort_by(|one, other| one.0.total_cmp(&other.0));
            for (each, room) in order {
                let placed = room.min(free);
                sum += each * placed as f64;
                free -= placed;
            }
        }
        sum / self.requests as f64
    }

    /// The mean.
    ///
    /// # Panics
    /// If the histogram does not add up.
    #[must_use]
    pub fn mean(&self) -> Bounds {
        assert!(self.adds_up(), "only what adds up has a mean");
        let hull = self.mean_of(|bin| bin.values);
        Bounds {
            labels: self.mean_of(|bin| bin.word),
            hull: Range::new(hull.low + self.shift.low, hull.high + self.shift.high),
        }
    }

    fn mean_of(&self, values: impl Fn(&Bin) -> Range) -> Range {
        Range::new(
            self.least(|bin| values(bin).low),
            -self.least(|bin| -values(bin).high),
        )
    }

    /// The standard deviation, whether divided by n or by n - 1.
    ///
    /// # Panics
    /// If the histogram does not add up.
    #[must_use]
    pub fn deviation(&self) -> Bounds {
        assert!(self.adds_up(), "only what adds up has a standard deviation");
        Bounds {
            labels: self.deviation_of(|bin| bin.word),
            // A shift of all values leaves it as it is.
            hull: self.deviation_of(|bin| bin.values),
        }
    }

    /// Wherever in its range the mean lies, the squares add up to at least those of the distances between its cell and the
    /// values; and about any point they add up to no less than about the mean.
    fn deviation_of(&self, values: impl Fn(&Bin) -> Range) -> Range {
        let mean = self.mean_of(&values);
        let cell = (mean.high - mean.low) / CELLS as f64;
        let (mut low, mut high) = (f64::INFINITY, f64::INFINITY);
        for index in 0..CELLS {
            let (from, to) = (
                mean.low + cell * index as f64,
                mean.low + cell * (index + 1) as f64,
            );
            let least = self.least(|bin| {
                let values = values(bin);
                (values.low - to).max(from - values.high).max(0.0).powi(2)
            });
            let most = -self.least(|bin| {
                let values = values(bin);
                -(values.high - from).abs().max((from - values.low).abs()).powi(2)
            });
            (low, high) = (low.min(least), high.min(most));
            if cell == 0.0 {
                break;
            }
        }
        let one_less = self.requests as f64 / (self.requests.max(2) - 1) as f64;
        Range::new(low.sqrt(), (high * one_less).sqrt())
    }
}
