//! An arm against itself: how often its own trials are said to differ, and how often a shift that was put in on purpose is where an
//! interval says.
//!
//! Neighbouring trials of one arm make a pair, and a coin says which of the two plays the other arm. Nothing differs but the machine's
//! mood, so that every interval without 0 is a false alarm, and of many there should be as many as the confidence admits. More than
//! that means that trials here are not alike enough, or not independent enough, for what the intervals promise.
//!
//! A known shift is drawn for from blocks that hold the arm with it and without. Comparisons share blocks, so that their number makes
//! the count finer and not surer: that goes with the number of blocks.

use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus, seq::IndexedRandom as _};

use super::interval::Estimate;

/// Comparisons that are cut from one arm's trials.
pub const COMPARISONS: u32 = 200;

/// Fewer pairs can be turned round in too few ways for that many comparisons to be different ones.
const PAIRS_MIN: usize = 8;

/// How many of [`COMPARISONS`] comparisons of an arm with itself showed a difference. `figures` are one per trial, in the order in which
/// they ran; `None` with fewer than 16.
#[must_use]
pub fn false_alarms(figures: &[f64], seed: u64) -> Option<u32> {
    let pairs: Vec<f64> = figures.chunks_exact(2).map(|pair| pair[1] - pair[0]).collect();
    if pairs.len() < PAIRS_MIN {
        return None;
    }
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let shows = |_: &u32| {
        let turned: Vec<f64> = pairs
            .iter()
            .map(|difference| if random.random() { *difference } else { -difference })
            .collect();
        let interval = Estimate::of(&turned).and_then(|estimate| estimate.interval());
        interval.is_some_and(|(low, high)| low > 0.0 || high < 0.0)
    };
    Some((0..COMPARISONS).filter(shows).count() as u32)
}

/// Blocks of each comparison in which a known shift is looked for: as many as a run has unless it is told otherwise.
pub const BLOCKS_EACH: usize = 5;

/// Of fewer blocks any five drawn are nearly the same blocks.
const BLOCKS_MIN: usize = 15;

/// How many of [`COMPARISONS`] intervals hold `truth`, each made from [`BLOCKS_EACH`] of `figures`, one per block; `None` with fewer than
/// 15 of them.
#[must_use]
pub fn covered(figures: &[f64], truth: f64, seed: u64) -> Option<u32> {
    if figures.len() < BLOCKS_MIN {
        return None;
    }
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let holds = |_: &u32| {
        let drawn: [f64; BLOCKS_EACH] = figures
            .sample_array(&mut random)
            .expect("there are more than are drawn");
        let interval = Estimate::of(&drawn).and_then(|estimate| estimate.interval());
        interval.is_some_and(|(low, high)| low <= truth && truth <= high)
    };
    Some((0..COMPARISONS).filter(holds).count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trials of a machine with noise, and with whatever `trend` adds to the trial of this number.
    fn trials(seed: u64, trend: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let noise = || (0..6).map(|_| random.random::<f64>()).sum::<f64>();
        std::iter::repeat_with(noise)
            .take(40)
            .enumerate()
            .map(|(trial, noise)| noise + trend(trial))
            .collect()
    }

    fn share(trend: impl Fn(usize) -> f64) -> f64 {
        let alarms: u32 = (0..50)
            .map(|seed| false_alarms(&trials(seed, &trend), seed).unwrap())
            .sum();
        f64::from(alarms) / f64::from(50 * COMPARISONS)
    }

    #[test]
    fn trials_that_are_alike_raise_as_many_alarms_as_the_confidence_admits() {
        assert!((share(|_| 0.0) - 0.05).abs() < 0.01);
        // A drift of the machine falls on both of a pair.
        assert!((share(|trial| trial as f64 * 0.1) - 0.05).abs() < 0.01);
    }

    #[test]
    fn a_machine_that_jumps_once_raises_fewer_and_not_more() {
        assert!(share(|trial| if trial == 21 { 50.0 } else { 0.0 }) < 0.05);
    }

    #[test]
    fn a_shift_is_covered_as_often_as_the_intervals_say_and_another_is_not() {
        let share = |truth: f64| {
            let covered: u32 = (0..50)
                .map(|seed| covered(&trials(seed, |_| 50.0), truth, seed).unwrap())
                .sum();
            f64::from(covered) / f64::from(50 * COMPARISONS)
        };
        // Sums of six uniform figures: mean 3, standard deviation 0.71.
        let nominal = share(53.0);
        assert!((nominal - 0.95).abs() < 0.02, "{nominal}");
        assert!(share(55.0) < 0.3);
        assert_eq!(covered(&[50.0; 14], 50.0, 1), None);
    }

    #[test]
    fn few_trials_say_nothing() {
        assert_eq!(false_alarms(&[1.0; 15], 1), None);
        assert_eq!(false_alarms(&[1.0; 16], 1), Some(0));
    }
}
