//! What a few trials say of a difference.
//!
//! Requests of one trial share its machine, its minute and its warm-up, so that only trials are independent. A block holds one trial
//! of each arm, run close together, and gives one figure for each statistic: the arm's minus the baseline's. From those alone the
//! interval is made, by Student's t. A bootstrap over blocks cannot reach beyond the least and the greatest of them: with five, a
//! nominal 95 % covers the truth some 85 times in 100 (the tests measure both). Requests are not drawn again inside a trial: a block's
//! figure has their noise in it already (Davison and Hinkley, Bootstrap Methods and Their Application, 1997, section 3.8).
//!
//! Two runs have no blocks in common. Their figures differ by [`between`], in which each run's figures scatter by themselves.

use statrs::distribution::{ContinuousCDF as _, StudentsT};

/// Of all intervals.
pub const CONFIDENCE: f64 = 0.95;

/// How often a difference of the size that is called detectable would be shown.
pub const POWER: f64 = 0.8;

/// The mean of one figure per block, and how sure it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Blocks; of two runs, those of both together.
    pub blocks: u32,
    /// Arithmetic mean of their figures.
    pub mean: f64,
    /// What half the interval of [`CONFIDENCE`] is; `None` with fewer than two blocks.
    pub half_width: Option<f64>,
    /// The smallest true difference from 0 that so many blocks of this spread would show with [`POWER`]; `None` with fewer than two.
    pub detectable: Option<f64>,
}

impl Estimate {
    /// From one figure per block; `None` without any.
    #[must_use]
    pub fn of(figures: &[f64]) -> Option<Self> {
        match figures {
            [] => None,
            [figure] => Some(Self {
                blocks: 1,
                mean: *figure,
                half_width: None,
                detectable: None,
            }),
            _ => Some(stein(figures, figures.len())),
        }
    }

    /// Ends of the interval.
    #[must_use]
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half_width.map(|half| (self.mean - half, self.mean + half))
    }

    /// Ends of the interval of figures in ns, as reports hold them.
    #[must_use]
    pub fn interval_ns(&self) -> Option<(i64, i64)> {
        self.interval()
            .map(|(low, high)| (low.round() as i64, high.round() as i64))
    }

    /// What is detectable of figures in ns, as reports hold it.
    #[must_use]
    pub fn detectable_ns(&self) -> Option<u64> {
        self.detectable.map(|ns| ns.round() as u64)
    }
}

/// Quantile of Student's t.
///
/// # Panics
/// With no degrees of freedom, or a probability that is none.
fn t_quantile(freedom: f64, probability: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom)
        .expect("degrees of freedom are positive")
        .inverse_cdf(probability)
}

/// How many blocks make the interval's half width `half_width` at most, judged from these figures of a first stage.
///
/// This is Stein's procedure in two stages (Annals of Mathematical Statistics, 1945): the first stage alone tells the spread, and how
/// many blocks are run depends on nothing else. Whoever instead looks after each block and stops when the interval happens to be
/// narrow stops more often where the spread came out too small, and the interval then covers less often than it says. The final
/// interval is [`stein`]'s: the mean is of all blocks, the spread and its degrees of freedom are the first stage's, and the
/// coverage is exact for normal figures whatever their spread.
///
/// # Panics
/// With fewer than two figures.
#[must_use]
pub fn blocks_needed(first: &[f64], half_width: f64) -> u32 {
    let (deviation, freedom) = deviation(first);
    let factor = t_quantile(freedom, f64::midpoint(1.0, CONFIDENCE));
    let needed = (factor * deviation / half_width).powi(2).ceil();
    (needed.min(f64::from(u32::MAX)) as u32).max(first.len() as u32)
}

/// The estimate from all figures, of which the first `stage` alone tell the spread: those that decided how many there are, or all.
///
/// # Panics
/// If the first stage is fewer than two, or more than all.
#[must_use]
pub fn stein(figures: &[f64], stage: usize) -> Estimate {
    let (deviation, freedom) = deviation(&figures[..stage]);
    let error = deviation / (figures.len() as f64).sqrt();
    let half = t_quantile(freedom, f64::midpoint(1.0, CONFIDENCE)) * error;
    Estimate {
        blocks: figures.len() as u32,
        mean: figures.iter().sum::<f64>() / figures.len() as f64,
        half_width: Some(half),
        detectable: Some(half + t_quantile(freedom, POWER) * error),
    }
}

/// Mean of the later figures minus mean of the earlier ones, which are of two runs and not paired; `None` without any in either. With
/// fewer than two in either there is no interval.
///
/// This is Welch's interval (Biometrika, 1938, by his degrees of freedom of 1947): each run has a spread of its own. The degrees of
/// freedom are themselves estimated, and so the coverage is close to what it says and not exact: within two in a hundred from three
/// figures in each run on, but only some ninety in a hundred for two figures against ten (the tests measure both).
#[must_use]
pub fn between(earlier: &[f64], later: &[f64]) -> Option<Estimate> {
    let (before, after) = (Estimate::of(earlier)?, Estimate::of(later)?);
    let mut estimate = Estimate {
        blocks: before.blocks + after.blocks,
        mean: after.mean - before.mean,
        half_width: None,
        detectable: None,
    };
    if earlier.len() > 1 && later.len() > 1 {
        let squares = [earlier, later].map(|figures| {
            let (deviation, freedom) = deviation(figures);
            (deviation.powi(2) / figures.len() as f64, freedom)
        });
        let square: f64 = squares.iter().map(|(square, _)| square).sum();
        let (half, detectable) = if square > 0.0 {
            let shares = squares
                .iter()
                .map(|(part, freedom)| (part / square).powi(2) / freedom);
            let freedom = 1.0 / shares.sum::<f64>();
            let half = t_quantile(freedom, f64::midpoint(1.0, CONFIDENCE)) * square.sqrt();
            (half, half + t_quantile(freedom, POWER) * square.sqrt())
        } else {
            // Figures that are all alike have no spread to estimate from, and no degrees of freedom either.
            (0.0, 0.0)
        };
        estimate.half_width = Some(half);
        estimate.detectable = Some(detectable);
    }
    Some(estimate)
}

/// Standard deviation of a sample, and its degrees of freedom.
fn deviation(figures: &[f64]) -> (f64, f64) {
    assert!(figures.len() > 1, "a spread needs two figures");
    let freedom = (figures.len() - 1) as f64;
    let mean = figures.iter().sum::<f64>() / figures.len() as f64;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    ((squares / freedom).sqrt(), freedom)
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus};
    use statrs::distribution::Normal;

    use super::*;

    const ROUNDS: usize = 4_000;

    /// How often, of [`ROUNDS`], the share may miss its nominal value by chance: four standard errors.
    fn by_chance(nominal: f64) -> f64 {
        4.0 * (nominal * (1.0 - nominal) / ROUNDS as f64).sqrt()
    }

    fn normal(random: &mut Xoshiro256PlusPlus) -> f64 {
        let uniform: f64 = random.random_range(1e-12..1.0);
        Normal::standard().inverse_cdf(uniform)
    }

    /// Share of rounds in which what `covers` says of fresh figures is true.
    fn share(mut covers: impl FnMut(&mut Xoshiro256PlusPlus) -> bool) -> f64 {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(11);
        let hits = (0..ROUNDS).filter(|_| covers(&mut random)).count();
        hits as f64 / ROUNDS as f64
    }

    fn is_in(interval: Option<(f64, f64)>, truth: f64) -> bool {
        interval.is_some_and(|(low, high)| low <= truth && truth <= high)
    }

    #[test]
    fn an_interval_covers_the_truth_as_often_as_it_says() {
        for blocks in [2, 3, 5, 10] {
            let covered = share(|random| {
                let figures: Vec<f64> = (0..blocks).map(|_| 50.0 + 7.0 * normal(random)).collect();
                is_in(Estimate::of(&figures).unwrap().interval(), 50.0)
            });
            assert!(
                (covered - CONFIDENCE).abs() < by_chance(CONFIDENCE),
                "{blocks} blocks: {covered}"
            );
        }
    }

    /// Differences of two arms with heavy tails: skewed each, alike skewed, so that the difference is symmetric.
    #[test]
    fn heavy_tails_make_it_cover_more_and_not_less() {
        for blocks in [3, 5, 10] {
            let covered = share(|random| {
                let figures: Vec<f64> = (0..blocks)
                    .map(|_| normal(random).exp().powi(2) - normal(random).exp().powi(2))
                    .collect();
                is_in(Estimate::of(&figures).unwrap().interval(), 0.0)
            });
            assert!(
                covered > CONFIDENCE - by_chance(CONFIDENCE),
                "{blocks} blocks: {covered}"
            );
        }
    }

    #[test]
    fn a_bootstrap_over_five_blocks_covers_far_less_than_it_says() {
        const DRAWS: usize = 200;
        let covered = share(|random| {
            let figures: Vec<f64> = (0..5).map(|_| normal(random)).collect();
            let mut means: Vec<f64> = (0..DRAWS)
                .map(|_| (0..5).map(|_| figures[random.random_range(0..5)]).sum::<f64>() / 5.0)
                .collect();
            means.sort_by(f64::total_cmp);
            is_in(Some((means[DRAWS / 40], means[DRAWS - DRAWS / 40 - 1])), 0.0)
        });
        assert!((0.78..0.9).contains(&covered), "{covered}");
    }

    #[test]
    fn what_is_called_detectable_is_shown_with_the_power_that_is_named() {
        // The spread of the figures is not known but estimated, and the detectable difference with it: on average over that.
        let shown = share(|random| {
            let noise: Vec<f64> = (0..8).map(|_| normal(random)).collect();
            let detectable = (t_quantile(7.0, 0.975) + t_quantile(7.0, POWER)) / 8f64.sqrt();
            let figures: Vec<f64> = noise.iter().map(|each| each + detectable).collect();
            !is_in(Estimate::of(&figures).unwrap().interval(), 0.0)
        });
        assert!((shown - POWER).abs() < 0.04, "{shown}");
    }

    #[test]
    fn two_stages_cover_as_often_as_they_say_and_looking_each_time_does_not() {
        const HALF_WIDTH: f64 = 1.0;
        let two_stages = share(|random| {
            let mut figures: Vec<f64> = (0..5).map(|_| 2.0 * normal(random)).collect();
            let needed = blocks_needed(&figures, HALF_WIDTH) as usize;
            figures.extend((5..needed).map(|_| 2.0 * normal(random)));
            let estimate = stein(&figures, 5);
            assert!(estimate.half_width.unwrap() <= HALF_WIDTH + 1e-9);
            is_in(estimate.interval(), 0.0)
        });
        assert!(two_stages > CONFIDENCE - by_chance(CONFIDENCE), "{two_stages}");
        let looking = share(|random| {
            let mut figures: Vec<f64> = (0..3).map(|_| 2.0 * normal(random)).collect();
            loop {
                let estimate = Estimate::of(&figures).unwrap();
                if estimate.half_width.unwrap() <= HALF_WIDTH {
                    return is_in(estimate.interval(), 0.0);
                }
                figures.push(2.0 * normal(random));
            }
        });
        assert!(looking < CONFIDENCE - by_chance(CONFIDENCE), "{looking}");
    }

    /// Coverage of the interval between two runs, of so many trials each, the first with the given spread and the second with 1.
    fn covered_between(trials: [usize; 2], spread: f64) -> f64 {
        share(|random| {
            let earlier: Vec<f64> = (0..trials[0]).map(|_| 10.0 + spread * normal(random)).collect();
            let later: Vec<f64> = (0..trials[1]).map(|_| 13.0 + normal(random)).collect();
            is_in(between(&earlier, &later).unwrap().interval(), 3.0)
        })
    }

    #[test]
    fn between_runs_of_three_trials_or_more_it_covers_about_as_often_as_it_says() {
        for (trials, spread) in [
            ([3, 3], 1.0),
            ([3, 3], 5.0),
            ([3, 10], 5.0),
            ([5, 5], 1.0),
            ([5, 5], 3.0),
            ([5, 10], 3.0),
            ([5, 10], 0.3),
            ([10, 10], 1.0),
        ] {
            let covered = covered_between(trials, spread);
            assert!(
                (covered - CONFIDENCE).abs() < 0.02 + by_chance(CONFIDENCE),
                "{trials:?} trials, spread {spread}: {covered}"
            );
        }
    }

    #[test]
    fn two_trials_against_many_cover_less_than_they_say() {
        let covered = covered_between([2, 10], 1.0);
        assert!((0.88..0.93).contains(&covered), "{covered}");
        let alike = covered_between([2, 2], 1.0);
        assert!(alike > CONFIDENCE - by_chance(CONFIDENCE), "{alike}");
    }

    #[test]
    fn between_runs_known_figures_give_the_known_interval() {
        // Means 2 and 12, squares of the errors 1/3 and 4/3: 2.941 degrees of freedom, of which t at 97.5 % is 3.2197.
        let estimate = between(&[1.0, 2.0, 3.0], &[10.0, 12.0, 14.0]).unwrap();
        assert_eq!((estimate.blocks, estimate.mean), (6, 10.0));
        let freedom = (5.0f64 / 3.0).powi(2) / ((1.0f64 / 3.0).powi(2) / 2.0 + (4.0f64 / 3.0).powi(2) / 2.0);
        let half = t_quantile(freedom, 0.975) * (5.0f64 / 3.0).sqrt();
        assert!((freedom - 2.941).abs() < 1e-3, "{freedom}");
        assert!((estimate.half_width.unwrap() - half).abs() < 1e-9);
        assert!(estimate.detectable.unwrap() > half);
    }

    #[test]
    fn between_runs_of_one_trial_there_is_no_interval_and_of_none_no_estimate() {
        let lone = between(&[1.0], &[4.0, 6.0]).unwrap();
        assert_eq!((lone.mean, lone.half_width, lone.detectable), (4.0, None, None));
        assert_eq!(between(&[], &[1.0]), None);
        assert_eq!(between(&[1.0], &[]), None);
        let still = between(&[1.0, 1.0], &[4.0, 4.0]).unwrap();
        assert_eq!(still.interval(), Some((3.0, 3.0)));
    }

    #[test]
    fn one_block_has_no_interval() {
        let estimate = Estimate::of(&[5.0]).unwrap();
        assert_eq!(
            (estimate.mean, estimate.half_width, estimate.detectable),
            (5.0, None, None)
        );
        assert_eq!(Estimate::of(&[]), None);
    }
}
