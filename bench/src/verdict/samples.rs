//! Rules on the samples themselves, before any figure of them is believed, and on what recording them cost.
//!
//! A rule fails when its figure is surely beyond the limit: when the near end of its interval is. A run within the limits then fails
//! by chance less often than the interval says, however long it is, and a short one is not failed for what it cannot know.

use crate::{
    plan::Arrivals,
    report::summary::Verdict,
    statistics::{
        interval::Estimate,
        samples::{Spread, Trend, is_share_above},
    },
};

/// How often a rule that has no interval of [`crate::statistics::interval`] may fail where its figure is at the limit, over all
/// trials or arms.
pub const ALARM: f64 = 0.01;

/// What the rules look at; a figure is `None` where trials are too few or too short for it.
#[derive(Clone, Debug, Default)]
pub struct SampleFacts {
    /// Of the trial whose starts are the furthest off.
    pub arrivals: Option<ArrivalFacts>,
    /// By how much the median of a trial's first tenth is above the rest's, as a share of it, over trials.
    pub warm_up: Option<Estimate>,
    /// How medians move within trials.
    pub stationary: Option<StationaryFacts>,
    /// Rank correlation of each latency with the one before, over trials.
    pub correlation: Option<Estimate>,
    /// The same of the trial in which it is highest.
    pub correlation_max: Option<f64>,
    /// How levels move over the run.
    pub run: Option<RunFacts>,
    /// How far each arm's trials are apart.
    pub levels: Vec<LevelFacts>,
}

/// A trial's starts against those that were asked for.
#[derive(Clone, Copy, Debug)]
pub struct ArrivalFacts {
    /// What was asked for.
    pub asked: Arrivals,
    /// Poisson: distance from exponential gaps. Constant: share of gaps that are off by half. 0 to 1.
    pub off: f64,
    /// As far as exact starts would hardly be by chance.
    pub by_chance: f64,
}

/// Medians of a trial's tenths.
#[derive(Clone, Debug)]
pub struct StationaryFacts {
    /// Change over a trial as a share of its level, over trials.
    pub change: Estimate,
    /// By trial.
    pub trends: Vec<Trend>,
}

/// Levels over the blocks of a run, as shares.
#[derive(Clone, Copy, Debug)]
pub struct RunFacts {
    /// Of the medians.
    pub p50: Trend,
    /// Of the 99 in 100.
    pub p99: Trend,
}

/// One arm's trials, as shares of their level.
#[derive(Clone, Debug)]
pub struct LevelFacts {
    /// The arm.
    pub name: String,
    /// Of the medians.
    pub p50: Spread,
    /// Of the 99 in 100; `None` where a trial has too few requests for a standard error.
    pub p99: Option<Spread>,
}

/// The recorder's own load, each the most of any trial and kernel.
#[derive(Clone, Copy, Debug)]
pub struct RecorderFacts {
    /// CPU time of the drain over the planned time of a trial.
    pub drain_share: f64,
    /// Share of the ring that was in use.
    pub ring_used: f64,
}

/// If all of this distance is gaps squeezed to nothing, the gaps' squared coefficient of variation is 1.05 / 0.95 instead of 1, and
/// the mean wait in a queue behind them at most 11 % longer (Kingman: it goes with the sum of that of gaps and that of service).
const ARRIVALS_OFF_MAX: f64 = 0.05;

/// What a hybrid key exchange adds to a handshake's median is 5 to 20 %: what moves by itself has to stay below.
const MOVES_MAX: f64 = 0.05;

/// A trial moves by itself if its trend is above this share and less probable by chance than that.
const TREND_MAX: f64 = 0.1;
const TREND_P_MAX: f64 = 0.01;

/// A few trials may meet a neighbour that comes or goes: the intervals over trials have that in them.
const TRENDING_SHARE_MAX: f64 = 0.25;

/// From here on n requests are worth less than n / 3, and the 10 samples beyond p99.9 that are asked for less than 4.
const CORRELATION_MAX: f64 = 0.5;

/// With five blocks, the only orders less probable than this rise or fall throughout.
const RUN_P_MAX: f64 = 0.02;

/// A block's drift falls on all its arms, so that differences bear it; levels do not.
const RUN_MOVES_MAX: f64 = 0.1;

/// See [`RUN_MOVES_MAX`].
const SPREAD_MAX: f64 = 0.1;

/// What [`super::BUSY_MAX`] leaves of a CPU that the drain has to share with a measured thread.
const DRAIN_SHARE_MAX: f64 = 1.0 - super::BUSY_MAX;

/// From here on the drain leaves its low priority (`collect::drain`).
const RING_USED_MAX: f64 = 0.5;

/// Applies the rules for which there are figures.
#[must_use]
pub fn judge(samples: &SampleFacts, recorder: Option<&RecorderFacts>) -> Vec<Verdict> {
    let verdicts = [
        samples.arrivals.map(arrivals),
        samples.warm_up.and_then(warm_up),
        samples.stationary.as_ref().and_then(stationary),
        samples
            .correlation
            .zip(samples.correlation_max)
            .and_then(|(over_trials, max)| independent(over_trials, max)),
        samples.run.map(run),
        agree(&samples.levels),
        recorder.copied().map(probe_cost),
    ];
    verdicts.into_iter().flatten().collect()
}

fn arrivals(facts: ArrivalFacts) -> Verdict {
    let (off, by_chance) = (facts.off * 100.0, facts.by_chance * 100.0);
    Verdict::new(
        "arrivals as asked",
        facts.off - facts.by_chance <= ARRIVALS_OFF_MAX,
        match facts.asked {
            Arrivals::Poisson => {
                format!(
                    "worst trial's starts {off:.1} % from exponential gaps, chance makes up to {by_chance:.1} %"
                )
            }
            Arrivals::Constant => {
                format!("{off:.1} % of the worst trial's gaps are off by half, give or take {by_chance:.1} %")
            }
        },
        "The actual starts, not the intended ones, are what the server's queue sees. More than 5 % off means that the load \
         generator bunches or delays them. Lower --rate, or give it more CPUs (--client-cpus).",
    )
}

fn warm_up(over_trials: Estimate) -> Option<Verdict> {
    let (low, high) = over_trials.interval()?;
    Some(Verdict::new(
        "warm-up",
        low <= MOVES_MAX,
        format!(
            "first tenth {:+.1} % against the rest, 95 % interval {:+.1} to {:+.1} %",
            over_trials.mean * 100.0,
            low * 100.0,
            high * 100.0
        ),
        "The first tenth of the measured time is slower in trial after trial (p50, more than 5 %): caches, clocks or the server \
         were still settling when measuring began. Raise --warmup.",
    ))
}

fn stationary(facts: &StationaryFacts) -> Option<Verdict> {
    let (low, high) = facts.change.interval()?;
    let trending = facts
        .trends
        .iter()
        .filter(|trend| trend.change.abs() > TREND_MAX && trend.p <= TREND_P_MAX)
        .count();
    let many = is_share_above(trending, facts.trends.len(), TRENDING_SHARE_MAX, ALARM);
    Some(Verdict::new(
        "steady within trials",
        low <= MOVES_MAX && high >= -MOVES_MAX && !many,
        format!(
            "p50 moves {:+.1} % in a trial, 95 % interval {:+.1} to {:+.1} %; {trending} of {} trials by more than 10 % on their own",
            facts.change.mean * 100.0,
            low * 100.0,
            high * 100.0,
            facts.trends.len()
        ),
        "Latency rises or falls while a trial lasts, so that its percentiles depend on its length: a queue that grows, a clock \
         that is throttled, or a neighbour that comes and goes. Raise --warmup if it falls; lower --rate if it rises.",
    ))
}

fn independent(over_trials: Estimate, max: f64) -> Option<Verdict> {
    let (low, _) = over_trials.interval()?;
    Some(Verdict::new(
        "requests independent",
        low <= CORRELATION_MAX,
        format!(
            "rank correlation with the request before: {:+.2}, {max:+.2} in the worst trial",
            over_trials.mean
        ),
        "Intervals are over trials and bear this. But above 0.5 a trial's samples are worth less than a third of their number, and \
         its p99 and p99.9 hang on a few spells: requests queue, or a disturbance outlasts many. Lower --rate, or raise \
         --duration.",
    ))
}

fn run(facts: RunFacts) -> Verdict {
    let Trend { change, p } = facts.p50;
    Verdict::new(
        "steady over the run",
        change.abs() <= RUN_MOVES_MAX || p > RUN_P_MAX,
        format!(
            "p50 {:+.1} % from first to last block (p {p:.3}), p99 {:+.1} % (p {:.3})",
            change * 100.0,
            facts.p99.change * 100.0,
            facts.p99.p
        ),
        "The machine got slower or faster from block to block. Differences are taken within blocks and bear it, each arm's own \
         percentiles do not: they depend on when it ran. Look for heat, a filling disk or a neighbour, and run again.",
    )
}

/// The arm whose trials are the furthest apart.
fn agree(levels: &[LevelFacts]) -> Option<Verdict> {
    let worst = levels.iter().max_by(|a, b| {
        let by_least = a.p50.at_least.total_cmp(&b.p50.at_least);
        by_least.then(a.p50.seen.total_cmp(&b.p50.seen))
    })?;
    let said = |spread: &Spread| {
        format!(
            "{:.1} % (sampling alone {:.1} %)",
            spread.seen * 100.0,
            spread.sampling * 100.0
        )
    };
    let p99 = worst.p99.as_ref().map_or("too few requests".to_owned(), said);
    Some(Verdict::new(
        "trials agree",
        worst.p50.at_least <= SPREAD_MAX,
        format!(
            "standard deviation between trials of {}: p50 {}, p99 {p99}",
            worst.name,
            said(&worst.p50)
        ),
        "Trials settle at levels of their own, more than 10 % apart and more than the choice of requests explains, so that one \
         trial's percentiles are not another's. Longer trials do not help: raise --trials, or find what differs between them.",
    ))
}

fn probe_cost(facts: RecorderFacts) -> Verdict {
    Verdict::new(
        "probe cost",
        facts.drain_share <= DRAIN_SHARE_MAX && facts.ring_used <= RING_USED_MAX,
        format!(
            "drain at most {:.1} % of one CPU, ring {:.1} % full",
            facts.drain_share * 100.0,
            facts.ring_used * 100.0
        ),
        "What emptying the ring took, in the worst trial: above 20 % of a CPU it no longer fits beside a measured thread, and with \
         the ring half full it leaves its low priority. What the probes cost inside measured threads no single run tells: \
         bench/probe-cost.sh compares runs with and without. Lower --rate, or give the drain a CPU (--drain-cpus).",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sure(mean: f64) -> Option<Estimate> {
        Some(Estimate {
            blocks: 10,
            mean,
            half_width: Some(0.01),
            detectable: None,
        })
    }

    fn spread(seen: f64, at_least: f64) -> Spread {
        Spread {
            seen,
            sampling: 0.01,
            at_least,
        }
    }

    fn good() -> (SampleFacts, RecorderFacts) {
        let steady = Trend { change: 0.01, p: 0.5 };
        let samples = SampleFacts {
            arrivals: Some(ArrivalFacts {
                asked: Arrivals::Poisson,
                off: 0.04,
                by_chance: 0.03,
            }),
            warm_up: sure(0.01),
            stationary: Some(StationaryFacts {
                change: sure(-0.01).unwrap(),
                trends: vec![steady; 10],
            }),
            correlation: sure(0.1),
            correlation_max: Some(0.3),
            run: Some(RunFacts {
                p50: steady,
                p99: steady,
            }),
            levels: vec![LevelFacts {
                name: "x25519".to_owned(),
                p50: spread(0.02, 0.0),
                p99: None,
            }],
        };
        let recorder = RecorderFacts {
            drain_share: 0.05,
            ring_used: 0.01,
        };
        (samples, recorder)
    }

    fn failed((samples, recorder): &(SampleFacts, RecorderFacts)) -> Vec<&'static str> {
        let verdicts = judge(samples, Some(recorder));
        assert_eq!(verdicts.len(), 7);
        verdicts
            .iter()
            .filter(|verdict| !verdict.ok)
            .map(|verdict| verdict.rule)
            .collect()
    }

    #[test]
    fn good_samples_pass_and_each_fault_fails_its_own_rule() {
        assert_eq!(failed(&good()), [""; 0]);
        const MOVING: Trend = Trend {
            change: 0.3,
            p: 0.005,
        };
        type Break = fn(&mut (SampleFacts, RecorderFacts));
        let broken: [(Break, &str); 9] = [
            (|f| f.0.arrivals.as_mut().unwrap().off = 0.2, "arrivals as asked"),
            (|f| f.0.warm_up = sure(0.2), "warm-up"),
            (
                |f| f.0.stationary.as_mut().unwrap().change = sure(-0.2).unwrap(),
                "steady within trials",
            ),
            (
                |f| f.0.stationary.as_mut().unwrap().trends[..8].fill(MOVING),
                "steady within trials",
            ),
            (|f| f.0.correlation = sure(0.7), "requests independent"),
            (|f| f.0.run.as_mut().unwrap().p50 = MOVING, "steady over the run"),
            (|f| f.0.levels[0].p50 = spread(0.4, 0.2), "trials agree"),
            (|f| f.1.drain_share = 0.3, "probe cost"),
            (|f| f.1.ring_used = 0.6, "probe cost"),
        ];
        for (breaks, rule) in broken {
            let mut facts = good();
            breaks(&mut facts);
            assert_eq!(failed(&facts), [rule]);
        }
    }

    #[test]
    fn what_is_beyond_a_limit_by_chance_is_not_failed() {
        let unsure = |mean| Estimate {
            half_width: Some(0.5),
            ..sure(mean).unwrap()
        };
        let mut facts = good();
        facts.0.warm_up = Some(unsure(0.2));
        facts.0.correlation = Some(unsure(0.7));
        facts.0.stationary.as_mut().unwrap().change = unsure(0.2);
        facts.0.stationary.as_mut().unwrap().trends[0] = Trend {
            change: 0.3,
            p: 0.005,
        };
        facts.0.run.as_mut().unwrap().p50 = Trend { change: 0.3, p: 0.2 };
        facts.0.levels[0].p50 = spread(0.4, 0.05);
        assert_eq!(failed(&facts), [""; 0]);
    }

    #[test]
    fn without_figures_there_are_no_verdicts() {
        assert!(judge(&SampleFacts::default(), None).is_empty());
    }
}
