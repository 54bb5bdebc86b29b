//! What each trial's samples are like, and what that comes to over the trials. Nothing is pooled: a trial is compared with itself
//! and with the plan, and a level with the levels of the same arm.

use std::collections::BTreeMap;

use super::{Row, trial::TrialAnalysis};
use crate::{
    plan::{Arrivals, Cell, Plan, Trial},
    record::manifest::Manifest,
    statistics::{
        interval::Estimate,
        quantile,
        samples::{
            Parts, Spread, Trend, distance_by_chance, exponential_distance, median, quantile_error,
            serial_correlation, uneven_share,
        },
    },
    verdict::samples::{
        ALARM, ArrivalFacts, LevelFacts, RecorderFacts, RunFacts, SampleFacts, StationaryFacts,
    },
};

/// Of fewer gaps or latencies a trial says nothing.
const SAMPLES_MIN: usize = 30;

/// Fewer blocks have no order in time that could not well be chance.
const BLOCKS_MIN: usize = 5;

/// One trial on its own.
struct Settling {
    block: u32,
    p50_ns: f64,
    p50_error_ns: Option<f64>,
    p99_ns: f64,
    p99_error_ns: Option<f64>,
}

/// What the rules on samples look at.
pub(super) fn samples<'a>(plan: &Plan, trials: impl Iterator<Item = &'a TrialAnalysis>) -> SampleFacts {
    of_rows(plan, trials.map(|trial| (trial.trial, &trial.rows[..])))
}

fn of_rows<'a>(plan: &Plan, trials: impl Iterator<Item = (Trial, &'a [Row])>) -> SampleFacts {
    let mut deviations = Vec::new();
    let (mut parts, mut correlations) = (Vec::new(), Vec::new());
    let mut levels: BTreeMap<Cell, Vec<Settling>> = BTreeMap::new();
    for (trial, rows) in trials {
        deviations.extend(deviation(plan, &trial, rows));
        let requests = requests(rows);
        parts.extend(Parts::of(&requests, plan.duration_ns));
        let latencies_ns: Vec<u64> = requests.iter().map(|(_, latency_ns)| *latency_ns).collect();
        if latencies_ns.len() < SAMPLES_MIN {
            continue;
        }
        let correlation = serial_correlation(&latencies_ns);
        correlations.extend(correlation);
        levels.entry(trial.cell()).or_default().push(settling(
            trial.block,
            latencies_ns,
            correlation.unwrap_or(0.0),
        ));
    }
    SampleFacts {
        arrivals: worst_arrivals(plan.arrivals, &deviations),
        warm_up: Estimate::of(&parts.iter().map(Parts::first_above_rest).collect::<Vec<_>>()),
        stationary: stationary(&parts),
        correlation: Estimate::of(&correlations),
        correlation_max: correlations.iter().copied().reduce(f64::max),
        run: run(&levels),
        levels: levels
            .iter()
            .filter_map(|(cell, settled)| level(plan.cell_name(*cell), settled, levels.len()))
            .collect(),
    }
}

/// What the recorder took, of the trial in which that was most; `None` without probes.
pub(super) fn recorder(manifest: &Manifest) -> Option<RecorderFacts> {
    let wall_ns = (manifest.plan.duration_ns + manifest.plan.warmup_ns) as f64;
    let records = manifest.trials.iter().flat_map(|trial| trial.kernel.values());
    records
        .map(|kernel| RecorderFacts {
            drain_share: kernel.drain_cpu_ns as f64 / wall_ns,
            ring_used: kernel.ring_used_bytes_max as f64 / kernel.ring_bytes.max(1) as f64,
        })
        .reduce(|a, b| RecorderFacts {
            drain_share: a.drain_share.max(b.drain_share),
            ring_used: a.ring_used.max(b.ring_used),
        })
}

/// How far a trial's starts are from those asked for, and of how many gaps that is told.
fn deviation(plan: &Plan, trial: &Trial, rows: &[Row]) -> Option<(f64, usize)> {
    let stamps = rows.iter().map(|row| &row.stamps);
    let begun = stamps.filter(|stamps| stamps.is_measured() && stamps.start_ns > 0);
    let mut starts_ns: Vec<u64> = begun.map(|stamps| stamps.start_ns).collect();
    starts_ns.sort_unstable();
    if starts_ns.len() <= SAMPLES_MIN {
        return None;
    }
    let off = match plan.arrivals {
        Arrivals::Poisson => exponential_distance(&starts_ns, plan.rate_hz(trial.condition)),
        Arrivals::Constant => uneven_share(&starts_ns, plan.rate_hz(trial.condition)),
    };
    Some((off?, starts_ns.len() - 1))
}

/// A trial's good requests in order of their intended starts: time since the first of them, and latency, ns.
fn requests(rows: &[Row]) -> Vec<(u64, u64)> {
    let stamps = rows.iter().map(|row| &row.stamps);
    let measured = stamps.filter(|stamps| stamps.is_measured());
    let good = measured.filter_map(|stamps| Some((stamps.intended_ns, stamps.latency_ns()?)));
    let mut requests: Vec<(u64, u64)> = good.collect();
    // By number they are in this order already, unless stamps are damaged.
    requests.sort_by_key(|(intended_ns, _)| *intended_ns);
    let begin_ns = requests.first().map_or(0, |(intended_ns, _)| *intended_ns);
    for (at_ns, _) in &mut requests {
        *at_ns -= begin_ns;
    }
    requests
}

fn settling(block: u32, mut latencies_ns: Vec<u64>, correlation: f64) -> Settling {
    latencies_ns.sort_unstable();
    Settling {
        block,
        p50_ns: quantile(&latencies_ns, 0.5) as f64,
        p50_error_ns: quantile_error(&latencies_ns, 0.5, correlation),
        p99_ns: quantile(&latencies_ns, 0.99) as f64,
        // Whether one slow request foretells another is told by the ranks of all, which the middle makes.
        p99_error_ns: quantile_error(&latencies_ns, 0.99, 0.0),
    }
}

/// The trial whose starts are the furthest off beyond chance. The more trials, the further one of them strays.
fn worst_arrivals(asked: Arrivals, deviations: &[(f64, usize)]) -> Option<ArrivalFacts> {
    let alarm = ALARM / deviations.len() as f64;
    let facts = deviations.iter().map(|&(off, gaps)| ArrivalFacts {
        asked,
        off,
        by_chance: distance_by_chance(gaps, alarm),
    });
    facts.max_by(|a, b| (a.off - a.by_chance).total_cmp(&(b.off - b.by_chance)))
}

fn stationary(parts: &[Parts]) -> Option<StationaryFacts> {
    let trends: Vec<Trend> = parts.iter().map(Parts::trend).collect();
    let changes: Vec<f64> = trends.iter().map(|trend| trend.change).collect();
    Some(StationaryFacts {
        change: Estimate::of(&changes)?,
        trends,
    })
}

/// The trend over the run's blocks: in each, the middle of its arms' figures, each as a share of the arm's own level.
fn run(levels: &BTreeMap<Cell, Vec<Settling>>) -> Option<RunFacts> {
    let trend = |of: fn(&Settling) -> f64| {
        let mut blocks: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for settled in levels.values() {
            let level = median(settled.iter().map(of).collect());
            for each in settled {
                blocks.entry(each.block).or_default().push(of(each) / level);
            }
        }
        let figures: Vec<f64> = blocks.into_values().map(median).collect();
        (figures.len() >= BLOCKS_MIN).then(|| Trend::of(&figures))?
    };
    Some(RunFacts {
        p50: trend(|each| each.p50_ns)?,
        p99: trend(|each| each.p99_ns)?,
    })
}

/// How far an arm's trials are apart, as shares of their level.
fn level(name: String, settled: &[Settling], arms: usize) -> Option<LevelFacts> {
    let spread = |figures: Vec<(f64, Option<f64>)>| {
        let level = median(figures.iter().map(|(figure, _)| *figure).collect());
        let shares = figures
            .into_iter()
            .map(|(figure, error)| Some((figure / level, error? / level)));
        Spread::of(&shares.collect::<Option<Vec<_>>>()?, ALARM / arms as f64)
    };
    let p99 = settled.iter().map(|each| (each.p99_ns, each.p99_error_ns));
    Some(LevelFacts {
        name,
        p50: spread(
            settled
                .iter()
                .map(|each| (each.p50_ns, each.p50_error_ns))
                .collect(),
        )?,
        p99: spread(p99.collect()),
    })
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus};

    use super::*;
    use crate::{
        plan::{Arm, nothing_varied, usual_quantile},
        record::stamps::{Outcome, RequestStamps, request_flag},
        verdict::samples::judge,
    };

    const SECOND: u64 = 1_000_000_000;

    fn plan(arrivals: Arrivals) -> Plan {
        Plan {
            scenario: "s".to_owned(),
            arms: vec![Arm::X25519, Arm::X25519mlkem768],
            trials_per_arm: 5,
            rate_hz: 300.0,
            duration_ns: 10 * SECOND,
            warmup_ns: 2 * SECOND,
            arrivals,
            seed: 3,
            timeout_ns: SECOND,
            probes: false,
            conditions: nothing_varied(),
            highest_quantile: usual_quantile(),
            first_stage: None,
        }
    }

    /// Where in the run a request is.
    struct At {
        trial: Trial,
        /// Through the measured part, 0 to 1.
        share: f64,
    }

    /// A run whose latencies are 1 ms, with the spread and the tail of a real one, times `slows`; `starts` turns intended starts into
    /// actual ones.
    fn run(plan: &Plan, slows: impl Fn(&At) -> f64, starts: impl Fn(u64) -> u64) -> SampleFacts {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(plan.seed);
        let trials: Vec<(Trial, Vec<Row>)> = plan
            .trials()
            .into_iter()
            .map(|trial| {
                let arrivals_ns = trial.arrivals_ns(plan).into_iter().enumerate();
                let rows = arrivals_ns.map(|(number, intended_ns)| {
                    let middling: f64 = (0..6).map(|_| random.random_range(0.4..1.6)).sum::<f64>() / 6.0;
                    let tail = if random.random::<f64>() < 0.03 { 5.0 } else { 1.0 };
                    let share = intended_ns.saturating_sub(plan.warmup_ns) as f64 / plan.duration_ns as f64;
                    let latency_ns = 1e6 * middling * tail * slows(&At { trial, share });
                    let stamps = RequestStamps {
                        request: number as u32,
                        intended_ns,
                        start_ns: starts(intended_ns),
                        done_ns: intended_ns + latency_ns as u64,
                        outcome: Outcome::Ok as u8,
                        flags: if intended_ns < plan.warmup_ns {
                            request_flag::WARMUP
                        } else {
                            0
                        },
                        ..RequestStamps::default()
                    };
                    Row {
                        stamps,
                        ledger: None,
                        incomplete: false,
                    }
                });
                let rows = rows.collect();
                (trial, rows)
            })
            .collect();
        of_rows(plan, trials.iter().map(|(trial, rows)| (*trial, &rows[..])))
    }

    fn failed(samples: &SampleFacts) -> Vec<&'static str> {
        let verdicts = judge(samples, None);
        verdicts
            .iter()
            .filter(|verdict| !verdict.ok)
            .map(|verdict| verdict.rule)
            .collect()
    }

    #[test]
    fn a_run_as_planned_passes_every_rule() {
        for arrivals in [Arrivals::Poisson, Arrivals::Constant] {
            let facts = run(&plan(arrivals), |_| 1.0, |intended_ns| intended_ns + 20_000);
            assert_eq!(judge(&facts, None).len(), 6);
            assert_eq!(failed(&facts), [""; 0], "{facts:?}");
        }
    }

    #[test]
    fn a_generator_that_looks_every_ten_milliseconds_bunches_its_starts() {
        for arrivals in [Arrivals::Poisson, Arrivals::Constant] {
            let facts = run(&plan(arrivals), |_| 1.0, |ns| ns.next_multiple_of(10_000_000));
            assert_eq!(failed(&facts), ["arrivals as asked"]);
        }
    }

    #[test]
    fn each_way_not_to_be_settled_fails_its_own_rule() {
        type Slows = fn(&At) -> f64;
        let cases: [(Slows, &[&str]); 5] = [
            (|at| if at.share < 0.1 { 1.15 } else { 1.0 }, &["warm-up"]),
            (|at| 1.0 + 0.2 * at.share, &["steady within trials"]),
            (
                |at| 1.0 + 0.05 * f64::from(at.trial.block),
                &["steady over the run"],
            ),
            (
                |at| [1.5, 1.0, 1.6, 0.9, 1.2][at.trial.block as usize],
                &["trials agree"],
            ),
            // Spells of a twentieth of a trial.
            (
                |at| {
                    if ((at.share * 40.0) as u32).is_multiple_of(2) {
                        1.0
                    } else {
                        1.5
                    }
                },
                &["requests independent"],
            ),
        ];
        for (slows, rules) in cases {
            let facts = run(&plan(Arrivals::Poisson), slows, |ns| ns);
            assert_eq!(failed(&facts), rules, "{facts:?}");
        }
    }

    #[test]
    fn the_slower_arm_is_not_a_trial_that_disagrees() {
        let slower = |at: &At| if at.trial.arm == Arm::X25519 { 1.0 } else { 2.0 };
        assert_eq!(failed(&run(&plan(Arrivals::Poisson), slower, |ns| ns)), [""; 0]);
    }

    #[test]
    fn a_run_too_short_to_tell_is_not_judged() {
        let short = Plan {
            duration_ns: SECOND / 20,
            warmup_ns: 0,
            trials_per_arm: 1,
            ..plan(Arrivals::Poisson)
        };
        assert!(judge(&run(&short, |_| 1.0, |ns| ns), None).is_empty());
    }
}
