//! Whether samples are what the statistics on them take for granted: starts as asked for, a trial that does not drift, requests
//! that do not hang on each other, trials that settle at one level. After Lancet (Kogias et al., USENIX ATC 2019) and Treadmill
//! (Zhang et al., ISCA 2016).
//!
//! A test that only asks whether a deviation is chance fails every long run, for nothing is exact: with 100,000 gaps it sees one of
//! a microsecond. Each figure here is therefore the size of a deviation, with a bound or an interval by which whoever judges can
//! ask that it be surely above a limit.

use std::num::NonZeroUsize;

use statrs::distribution::{Binomial, ChiSquared, ContinuousCDF as _, DiscreteCDF as _, Normal};

use super::rank;

/// Parts into which a trial is cut, equal in time. Requests inside of one may hang on each other as they like: between parts that are
/// long against such a spell, the medians hardly do.
pub const PARTS: usize = 10;

/// A trial with a part of fewer requests has no part medians.
const PART_REQUESTS_MIN: usize = 10;

/// Up to this many values the distribution of Kendall's score is counted out, beyond it is as good as normal.
const KENDALL_COUNTED_MAX: usize = 60;

/// More values than this are first brought to as many medians of neighbours, because pairs of all are compared.
const TREND_VALUES_MAX: usize = 1_000;

/// Least samples beyond a quantile for a standard error of it.
const SAMPLES_BEYOND_MIN: f64 = 5.0;

/// Largest distance between the distribution function of the gaps between starts and that of exponential gaps of this rate
/// (Kolmogorov and Smirnov; the rate is known, not fitted). `starts_ns` ascend; `None` with fewer than two.
#[must_use]
pub fn exponential_distance(starts_ns: &[u64], rate_hz: f64) -> Option<f64> {
    let mut levels: Vec<f64> = gaps_ns(starts_ns)
        .map(|gap_ns| -(-gap_ns * rate_hz / 1e9).exp_m1())
        .collect();
    levels.sort_unstable_by(f64::total_cmp);
    let count = levels.len() as f64;
    let off = |(below, level): (usize, &f64)| {
        let below = below as f64;
        (level - below / count).max((below + 1.0) / count - level)
    };
    levels.iter().enumerate().map(off).reduce(f64::max)
}

/// Share of the gaps between starts that are off by more than half of the gap that was asked for. Of equal gaps the distribution
/// function is a step, from which the least jitter is as far as can be; so a gap has to be off by so much that it counts. `starts_ns`
/// ascend; `None` with fewer than two.
#[must_use]
pub fn uneven_share(starts_ns: &[u64], rate_hz: f64) -> Option<f64> {
    let asked_ns = 1e9 / rate_hz;
    let count = NonZeroUsize::new(starts_ns.len().saturating_sub(1))?;
    let off = gaps_ns(starts_ns).filter(|gap_ns| (gap_ns - asked_ns).abs() > asked_ns / 2.0);
    Some(off.count() as f64 / count.get() as f64)
}

fn gaps_ns(starts_ns: &[u64]) -> impl Iterator<Item = f64> {
    starts_ns
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]) as f64)
}

/// How far the distribution function of so many samples strays from the true one by chance: further with a probability of at most
/// `alarm`, whatever the distribution (Dvoretzky, Kiefer and Wolfowitz with Massart's constant, Annals of Probability, 1990). A
/// distance of more than a limit and this is therefore surely one of more than the limit. It holds for a share as well.
#[must_use]
pub fn distance_by_chance(count: usize, alarm: f64) -> f64 {
    ((2.0 / alarm).ln() / (2.0 * count as f64)).sqrt()
}

/// Whether the true share behind `count` of `all` is surely above a limit: so many come of a share at the limit with a probability
/// of at most `alarm` (binomial).
///
/// # Panics
/// If the limit is no share.
#[must_use]
pub fn is_share_above(count: usize, all: usize, limit: f64, alarm: f64) -> bool {
    let at_limit = Binomial::new(limit, all as u64).expect("a limit is a share");
    count > 0 && at_limit.sf(count as u64 - 1) <= alarm
}

/// A trend in a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Change from the first value to the last along the line of Theil and Sen, whose slope is the median of those of all pairs.
    pub change: f64,
    /// How probable a score of Kendall's at least as far from 0 is where the order means nothing.
    pub p: f64,
}

impl Trend {
    /// Of values in order; `None` with fewer than three.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.len() > TREND_VALUES_MAX {
            let medians: Vec<f64> = values
                .chunks(values.len().div_ceil(TREND_VALUES_MAX))
                .map(|chunk| median(chunk.to_vec()))
                .collect();
            return Self::of(&medians);
        }
        if values.len() < 3 {
            return None;
        }
        let mut score = 0i64;
        let mut slopes = Vec::with_capacity(values.len() * (values.len() - 1) / 2);
        for (later, after) in values.iter().enumerate() {
            for (earlier, before) in values[..later].iter().enumerate() {
                slopes.push((after - before) / (later - earlier) as f64);
                score += i64::from(after > before) - i64::from(after < before);
            }
        }
        Some(Self {
            change: median(slopes) * (values.len() - 1) as f64,
            p: kendall_p(score.unsigned_abs(), values.len()),
        })
    }
}

/// Probability of a score of Kendall's at least this far from 0 among `count` values in random order. Equal values only make it
/// too large.
fn kendall_p(score: u64, count: usize) -> f64 {
    if count > KENDALL_COUNTED_MAX {
        kendall_normal_p(score, count)
    } else {
        kendall_counted_p(score, count)
    }
}

/// By inversions, of which each lowers the score by 2: the value that joins makes 0 to `joined` of them, all as probable.
fn kendall_counted_p(score: u64, count: usize) -> f64 {
    let mut probable = vec![1.0];
    for joined in 1..count {
        let mut next = vec![0.0; probable.len() + joined];
        for (inversions, probability) in probable.iter().enumerate() {
            for more in 0..=joined {
                next[inversions + more] += probability / (joined + 1) as f64;
            }
        }
        probable = next;
    }
    let inversions_max = (probable.len() as u64 - 1 - score) / 2;
    let tail: f64 = probable[..=inversions_max as usize].iter().sum();
    (2.0 * tail).min(1.0)
}

/// As if normal, each score being as wide as the step to the next one, which is 2.
fn kendall_normal_p(score: u64, count: usize) -> f64 {
    let n = count as f64;
    let deviation = (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt();
    2.0 * Normal::standard().sf(score.saturating_sub(1) as f64 / deviation)
}

/// The medians of a trial's parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// In order of time, ns.
    pub medians_ns: [f64; PARTS],
    /// Of all requests after the first part, ns.
    pub rest_ns: f64,
}

impl Parts {
    /// Of a trial's requests, given by time since its measured begin and latency, ns. `None` if a part has too few: a trial
    /// that is short or was cut.
    #[must_use]
    pub fn of(requests: &[(u64, u64)], duration_ns: u64) -> Option<Self> {
        let mut parts: [Vec<f64>; PARTS] = Default::default();
        for &(at_ns, latency_ns) in requests {
            let part = u128::from(at_ns) * PARTS as u128 / u128::from(duration_ns.max(1));
            parts[(part as usize).min(PARTS - 1)].push(latency_ns as f64);
        }
        if parts.iter().any(|part| part.len() < PART_REQUESTS_MIN) {
            return None;
        }
        let rest_ns = median(parts[1..].iter().flatten().copied().collect());
        let medians_ns = parts.map(median);
        // Shares of nothing are none; only damaged stamps make such a trial.
        (rest_ns > 0.0 && median(medians_ns.to_vec()) > 0.0).then_some(Self { medians_ns, rest_ns })
    }

    /// By how much the first part's median is above that of all others, as a share of it.
    #[must_use]
    pub fn first_above_rest(&self) -> f64 {
        self.medians_ns[0] / self.rest_ns - 1.0
    }

    /// The trend of the medians, as a share of their own median.
    ///
    /// # Panics
    /// Never: there are [`PARTS`] of them.
    #[must_use]
    pub fn trend(&self) -> Trend {
        let level_ns = median(self.medians_ns.to_vec());
        Trend::of(&self.medians_ns.map(|ns| ns / level_ns)).expect("more than two parts")
    }
}

/// Spearman's rank correlation of each value with the one before it; `None` with fewer than three, or with all equal.
#[must_use]
pub fn serial_correlation(values: &[u64]) -> Option<f64> {
    if values.len() < 3 {
        return None;
    }
    let before = ranks(&values[..values.len() - 1]);
    let after = ranks(&values[1..]);
    let middle = (before.len() + 1) as f64 / 2.0;
    let product = |a: &[f64], b: &[f64]| -> f64 {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| (a - middle) * (b - middle)).sum()
    };
    let scale = (product(&before, &before) * product(&after, &after)).sqrt();
    (scale > 0.0).then(|| product(&before, &after) / scale)
}

/// Ranks from 1; equal values share the middle of theirs.
fn ranks(values: &[u64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by_key(|&index| values[index]);
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let shared = first as f64 + (equal.len() + 1) as f64 / 2.0;
        for &index in equal {
            ranks[index] = shared;
        }
        first += equal.len();
    }
    ranks
}

/// Standard error of a quantile of ascending samples, in their unit, from the samples that a standard deviation's worth of ranks lies
/// around it (Woodruff, Journal of the American Statistical Association, 1952). `correlation` is [`serial_correlation`]'s: where
/// each request hangs on the one before, n of them are worth n (1 - r) / (1 + r), as in a series of first order. `None` with fewer
/// than five samples beyond the quantile.
#[must_use]
pub fn quantile_error(ascending: &[u64], quantile: f64, correlation: f64) -> Option<f64> {
    // What Woodruff proposes for 95 %, turned back into one standard error: steadier than one standard error's worth of ranks.
    const WIDTH: f64 = 1.96;
    let count = ascending.len() as f64;
    if count * (1.0 - quantile).min(quantile) < SAMPLES_BEYOND_MIN {
        return None;
    }
    let correlation = correlation.clamp(0.0, 0.99);
    let worth = count * (1.0 - correlation) / (1.0 + correlation);
    let width = WIDTH * (quantile * (1.0 - quantile) / worth).sqrt();
    let at = |quantile: f64| ascending[rank(ascending.len(), quantile.clamp(0.0, 1.0))] as f64;
    Some((at(quantile + width) - at(quantile - width)) / (2.0 * WIDTH))
}

/// How far the trials of one arm are apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Standard deviation of the trials' figures.
    pub seen: f64,
    /// What of it the choice of requests in each trial explains: the root of their mean square standard error.
    pub sampling: f64,
    /// The least standard deviation between the trials' true levels that would be called possible.
    pub at_least: f64,
}

impl Spread {
    /// From each trial's figure and its standard error; with a probability of `alarm` the true spread is less than what is called
    /// least (chi squared, for normal levels). `None` with fewer than two.
    ///
    /// # Panics
    /// If `alarm` is no probability.
    #[must_use]
    pub fn of(figures: &[(f64, f64)], alarm: f64) -> Option<Self> {
        if figures.len() < 2 {
            return None;
        }
        let (count, freedom) = (figures.len() as f64, (figures.len() - 1) as f64);
        let mean = figures.iter().map(|(figure, _)| figure).sum::<f64>() / count;
        let squares: f64 = figures.iter().map(|(figure, _)| (figure - mean).powi(2)).sum();
        let sampling = figures.iter().map(|(_, error)| error.powi(2)).sum::<f64>() / count;
        let most = ChiSquared::new(freedom)
            .expect("degrees of freedom are positive")
            .inverse_cdf(1.0 - alarm);
        Some(Self {
            seen: (squares / freedom).sqrt(),
            sampling: sampling.sqrt(),
            at_least: (squares / most - sampling).max(0.0).sqrt(),
        })
    }
}

/// The middle value, or the mean of the two.
///
/// # Panics
/// Without values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    let (half, is_even) = (values.len() / 2, values.len().is_multiple_of(2));
    let (below, &mut middle, _) = values.select_nth_unstable_by(half, f64::total_cmp);
    if is_even {
        let next = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        f64::midpoint(next, middle)
    } else {
        middle
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus};

    use super::*;
    use crate::statistics::interval::Estimate;

    const ROUNDS: usize = 4_000;

    /// Share of rounds in which something is said of fresh samples.
    fn share(rounds: usize, mut says: impl FnMut(&mut Xoshiro256PlusPlus) -> bool) -> f64 {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(17);
        let said = (0..rounds).filter(|_| says(&mut random)).count();
        said as f64 / rounds as f64
    }

    /// The most a share of so many rounds exceeds its nominal value by chance: four standard errors.
    fn at_most(nominal: f64, rounds: usize) -> f64 {
        nominal + 4.0 * (nominal * (1.0 - nominal) / rounds as f64).sqrt()
    }

    fn normal(random: &mut Xoshiro256PlusPlus) -> f64 {
        Normal::standard().inverse_cdf(random.random_range(1e-12..1.0))
    }

    /// Latencies with a long tail, ns, of which each hangs on the one before as much as `correlation` says.
    fn latencies(random: &mut Xoshiro256PlusPlus, count: usize, correlation: f64) -> Vec<u64> {
        let mut state = normal(random);
        std::iter::repeat_with(|| {
            state = correlation * state + (1.0 - correlation * correlation).sqrt() * normal(random);
            (1e6 * (0.2 * state).exp()) as u64
        })
        .take(count)
        .collect()
    }

    /// Poisson starts at 300/s. Of the gaps, a share of `squeezed` is nothing and the others are longer, so that the rate stays.
    fn starts(random: &mut Xoshiro256PlusPlus, count: usize, squeezed: f64) -> Vec<u64> {
        let mut at_ns = 0.0;
        std::iter::repeat_with(|| {
            if random.random::<f64>() >= squeezed {
                at_ns -= 1e9 / 300.0 / (1.0 - squeezed) * (1.0 - random.random::<f64>()).ln();
            }
            at_ns as u64
        })
        .take(count)
        .collect()
    }

    #[test]
    fn exact_starts_stray_as_often_as_the_alarm_says() {
        let strays = |count: usize| {
            share(ROUNDS, |random| {
                let starts = starts(random, count + 1, 0.0);
                exponential_distance(&starts, 300.0).unwrap() > distance_by_chance(count, 0.05)
            })
        };
        for count in [30, 500] {
            let alarms = strays(count);
            println!("{count} gaps: {:.2} % strayed, 5 % nominal", alarms * 100.0);
            assert!((0.03..at_most(0.05, ROUNDS)).contains(&alarms), "{alarms}");
        }
    }

    #[test]
    fn a_long_trial_is_not_failed_for_a_microsecond_nor_at_the_limit_but_for_bunches() {
        const LIMIT: f64 = 0.05;
        let fails = |starts: &[u64]| {
            let distance = exponential_distance(starts, 300.0).unwrap();
            distance - distance_by_chance(starts.len() - 1, 0.01) > LIMIT
        };
        let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
        let mut long = starts(&mut random, 100_001, 0.0);
        for start_ns in &mut long {
            *start_ns += random.random_range(0..1_000);
        }
        assert!(!fails(&long));
        // Where 5 % are squeezed, the distance is 5 %.
        let at_limit = share(1_000, |random| fails(&starts(random, 3_001, LIMIT)));
        let bunched = share(1_000, |random| fails(&starts(random, 3_001, 0.12)));
        println!(
            "at the limit {:.2} %, 12 % squeezed {:.1} %",
            at_limit * 100.0,
            bunched * 100.0
        );
        assert!(at_limit < at_most(0.01, 1_000), "{at_limit}");
        assert!(bunched > 0.95, "{bunched}");
    }

    #[test]
    fn gaps_are_uneven_from_half_a_gap_on() {
        let even: Vec<u64> = (0..100).map(|i| i * 1_000_000).collect();
        assert_eq!(uneven_share(&even, 1_000.0), Some(0.0));
        let mut one_late = even.clone();
        one_late[50] += 600_000;
        assert_eq!(uneven_share(&one_late, 1_000.0), Some(2.0 / 99.0));
        let mut jitter = even;
        jitter[50] += 400_000;
        assert_eq!(uneven_share(&jitter, 1_000.0), Some(0.0));
        assert_eq!(uneven_share(&[5], 1_000.0), None);
    }

    #[test]
    fn scores_are_as_probable_as_counting_orders_says() {
        let p = |values: &[f64]| Trend::of(values).unwrap().p;
        assert!((p(&[1.0, 2.0, 3.0]) - 2.0 / 6.0).abs() < 1e-12);
        assert!((p(&[1.0, 2.0, 3.0, 4.0, 5.0]) - 2.0 / 120.0).abs() < 1e-12);
        // One neighbouring pair of five turned round: four orders, and the one without, on either side.
        assert!((p(&[5.0, 4.0, 3.0, 1.0, 2.0]) - 10.0 / 120.0).abs() < 1e-12);
        assert!((p(&[1.0, 1.0, 1.0]) - 1.0).abs() < 1e-12);
        // Counted out and as normal they agree where they meet.
        for score in [0, 200, 400] {
            let (counted, normal) = (kendall_counted_p(score, 60), kendall_normal_p(score, 60));
            assert!(
                (counted / normal - 1.0).abs() < 0.05,
                "{score}: {counted} {normal}"
            );
        }
    }

    #[test]
    fn a_trend_is_seen_and_the_lack_of_one_raises_as_many_alarms_as_its_p_says() {
        for count in [5, 10, 100] {
            let values = |random: &mut Xoshiro256PlusPlus, slope: f64| -> Vec<f64> {
                (0..count)
                    .map(|i| slope * f64::from(i) + normal(random))
                    .collect()
            };
            let alarms = share(ROUNDS, |random| {
                Trend::of(&values(random, 0.0)).unwrap().p <= 0.05
            });
            let shown = share(ROUNDS, |random| {
                Trend::of(&values(random, 1.0)).unwrap().p <= 0.05
            });
            println!(
                "{count} values: {:.2} % alarms at p 0.05, {:.1} % shown",
                alarms * 100.0,
                shown * 100.0
            );
            assert!(
                (0.01..at_most(0.05, ROUNDS)).contains(&alarms),
                "{count}: {alarms}"
            );
            assert!(shown > if count == 5 { 0.2 } else { 0.99 }, "{count}: {shown}");
        }
    }

    #[test]
    fn one_wild_value_does_not_bend_the_line_and_many_values_are_no_harm() {
        let mut values: Vec<f64> = (0..11).map(f64::from).collect();
        values[3] = 1e9;
        assert!((Trend::of(&values).unwrap().change - 10.0).abs() < 1e-9);
        let many: Vec<f64> = (0..100_000).map(f64::from).collect();
        assert!((Trend::of(&many).unwrap().change / 1e5 - 1.0).abs() < 0.01);
        assert_eq!(Trend::of(&[1.0, 2.0]), None);
    }

    /// Requests of a trial of a second, as many as there are factors that slow them.
    fn trial(random: &mut Xoshiro256PlusPlus, slows: &[f64], correlation: f64) -> Parts {
        let latencies_ns = latencies(random, slows.len(), correlation);
        let slowed = latencies_ns.iter().zip(slows).enumerate();
        let requests: Vec<(u64, u64)> = slowed
            .map(|(number, (&ns, slow))| (number as u64 * 1_000, (ns as f64 * slow) as u64))
            .collect();
        Parts::of(&requests, slows.len() as u64 * 1_000).unwrap()
    }

    #[test]
    fn a_slow_first_tenth_is_seen_over_a_few_trials_and_at_the_limit_rarely() {
        const LIMIT: f64 = 0.05;
        let fails = |first: f64, correlation: f64| {
            let slows: Vec<f64> = (0..1_000)
                .map(|i| if i < 100 { 1.0 + first } else { 1.0 })
                .collect();
            share(1_000, |random| {
                let above: Vec<f64> = (0..6)
                    .map(|_| trial(random, &slows, correlation).first_above_rest())
                    .collect();
                Estimate::of(&above).unwrap().interval().unwrap().0 > LIMIT
            })
        };
        let (none, at_limit, dependent, slow) = (
            fails(0.0, 0.0),
            fails(LIMIT, 0.0),
            fails(LIMIT, 0.5),
            fails(0.15, 0.0),
        );
        println!(
            "warm-up: {:.2} % without, {:.2} % at the limit, {:.2} % there with correlation, {:.1} % of 15 %",
            none * 100.0,
            at_limit * 100.0,
            dependent * 100.0,
            slow * 100.0
        );
        assert!(none < 0.005, "{none}");
        // A ratio of medians is a little skewed, which the allowance for chance covers.
        assert!(at_limit < at_most(0.025, 1_000), "{at_limit}");
        assert!(dependent < at_most(0.025, 1_000), "{dependent}");
        assert!(slow > 0.95, "{slow}");
    }

    #[test]
    fn part_medians_show_a_trial_that_moves_and_not_one_whose_requests_hang_together() {
        let shown = |rise: f64, correlation: f64| {
            let slows: Vec<f64> = (0..1_000).map(|i| 1.0 + rise * f64::from(i) / 1_000.0).collect();
            share(1_000, |random| {
                trial(random, &slows, correlation).trend().p <= 0.01
            })
        };
        let (alone, together) = (shown(0.0, 0.0), shown(0.0, 0.5));
        let (rising, more) = (shown(0.15, 0.0), shown(0.25, 0.0));
        println!(
            "trend in a trial at p 0.01: {:.2} % alone, {:.2} % together, {:.1} % rising by 15 %, {:.1} % by 25 %",
            alone * 100.0,
            together * 100.0,
            rising * 100.0,
            more * 100.0
        );
        assert!(alone < at_most(0.01, 1_000), "{alone}");
        assert!(together < at_most(0.01, 1_000), "{together}");
        assert!(rising > 0.75 && more > 0.98, "{rising} {more}");
    }

    #[test]
    fn short_or_cut_trials_have_no_part_medians() {
        let requests: Vec<(u64, u64)> = (0..100).map(|i| (i * 10, 5)).collect();
        assert_eq!(Parts::of(&requests, 1_000).unwrap().medians_ns, [5.0; PARTS]);
        assert_eq!(Parts::of(&requests[1..], 1_000), None);
        assert_eq!(Parts::of(&requests, 2_000), None);
        assert_eq!(
            Parts::of(
                &requests.iter().map(|&(at, _)| (at, 0)).collect::<Vec<_>>(),
                1_000
            ),
            None
        );
    }

    #[test]
    fn correlation_is_that_of_the_ranks() {
        assert_eq!(ranks(&[30, 10, 30, 20]), [3.5, 1.0, 3.5, 2.0]);
        let rising: Vec<u64> = (0..50).collect();
        assert!((serial_correlation(&rising).unwrap() - 1.0).abs() < 1e-12);
        let turning: Vec<u64> = (0..50).map(|i| i % 2).collect();
        assert!(serial_correlation(&turning).unwrap() < -0.95);
        assert_eq!(serial_correlation(&[7; 50]), None);
        assert_eq!(serial_correlation(&[1, 2]), None);
    }

    #[test]
    fn independent_requests_correlate_by_chance_alone_and_others_as_they_were_made() {
        let alarms = share(ROUNDS, |random| {
            let correlation = serial_correlation(&latencies(random, 400, 0.0)).unwrap();
            correlation.abs() > 1.96 / 400f64.sqrt()
        });
        println!("correlation: {:.2} % alarms, 5 % nominal", alarms * 100.0);
        assert!((alarms - 0.05).abs() < at_most(0.05, ROUNDS) - 0.05, "{alarms}");
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let made = serial_correlation(&latencies(&mut random, 50_000, 0.6)).unwrap();
        // Ranks of two normal variables correlate a little less than they do.
        let ranked = 6.0 / std::f64::consts::PI * (0.6f64 / 2.0).asin();
        assert!((made - ranked).abs() < 0.02, "{made} {ranked}");
    }

    #[test]
    fn a_quantiles_error_is_how_much_it_varies() {
        for (q, correlation) in [(0.5, 0.0), (0.5, 0.5), (0.99, 0.0)] {
            let mut random = Xoshiro256PlusPlus::seed_from_u64(9);
            let (mut figures, mut errors) = (Vec::new(), Vec::new());
            for _ in 0..1_000 {
                let mut samples = latencies(&mut random, 1_000, correlation);
                let correlation = serial_correlation(&samples).unwrap();
                samples.sort_unstable();
                figures.push(samples[rank(1_000, q)] as f64);
                errors.push(quantile_error(&samples, q, correlation).unwrap());
            }
            let spread =
                Spread::of(&figures.iter().map(|&each| (each, 0.0)).collect::<Vec<_>>(), 0.05).unwrap();
            let ratio = median(errors) / spread.seen;
            println!("{q} at correlation {correlation}: error told {ratio:.2} of the true one");
            // The samples hang together in their values, of which above or below the median is only a part: told a little too large.
            assert!((0.85..1.35).contains(&ratio), "{q}: {ratio}");
        }
        assert_eq!(quantile_error(&[1; 499], 0.99, 0.0), None);
    }

    #[test]
    fn trials_of_one_level_are_not_called_apart_and_others_are() {
        const LIMIT: f64 = 0.1;
        let apart = |between: f64, trials: usize| {
            share(ROUNDS, |random| {
                let figures: Vec<(f64, f64)> = (0..trials)
                    .map(|_| (1.0 + between * normal(random) + 0.03 * normal(random), 0.03))
                    .collect();
                Spread::of(&figures, 0.01).unwrap().at_least > LIMIT
            })
        };
        let (same, at_limit, five, ten) = (apart(0.0, 5), apart(LIMIT, 5), apart(0.4, 5), apart(0.3, 10));
        println!(
            "apart: {:.2} % same, {:.2} % at the limit, {:.1} % of 40 % with five, {:.1} % of 30 % with ten",
            same * 100.0,
            at_limit * 100.0,
            five * 100.0,
            ten * 100.0
        );
        assert!(same < 1e-9, "{same}");
        assert!(at_limit < at_most(0.01, ROUNDS), "{at_limit}");
        assert!(five > 0.85 && ten > 0.95, "{five} {ten}");
        assert_eq!(Spread::of(&[(1.0, 0.0)], 0.01), None);
    }

    #[test]
    fn a_share_is_above_a_limit_only_if_chance_hardly_makes_it() {
        let alarms = share(ROUNDS, |random| {
            let count = (0..20).filter(|_| random.random::<f64>() < 0.25).count();
            is_share_above(count, 20, 0.25, 0.05)
        });
        assert!(alarms < at_most(0.05, ROUNDS), "{alarms}");
        assert!(
            is_share_above(6, 6, 0.25, 0.01)
                && !is_share_above(2, 4, 0.25, 0.01)
                && !is_share_above(0, 9, 0.25, 0.5)
        );
    }
}
