//! Scenario x arms x trials, expanded into an explicit, seeded, interleaved list of trials.

pub mod condition;

use std::{fmt, str::FromStr};

use anyhow::{bail, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus, seq::SliceRandom as _};
use serde::{Deserialize, Serialize};

use self::condition::Condition;
use crate::record::TIME_NS_MAX;

/// What one side of the comparison does: which key exchange is offered, and what the server must choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// X25519 offered alone.
    X25519,
    /// X25519MLKEM768 offered alone.
    X25519mlkem768,
    /// Control: shares for X25519MLKEM768 and X25519 are sent, the server takes X25519.
    PqOfferedClassicalChosen,
    /// Control: only an X25519 share is sent, the server insists on X25519MLKEM768: one more round trip.
    HelloRetry,
    /// SecP256r1MLKEM768 offered alone.
    Secp256r1mlkem768,
    /// MLKEM768 without a classical half.
    Mlkem768,
    /// Control: a plain TCP exchange of the byte counts of `x25519`, without any cryptography.
    NoCrypto,
}

impl Arm {
    /// Every arm, in the order of [`Arm`]'s declaration.
    pub const ALL: [Self; 7] = [
        Self::X25519,
        Self::X25519mlkem768,
        Self::PqOfferedClassicalChosen,
        Self::HelloRetry,
        Self::Secp256r1mlkem768,
        Self::Mlkem768,
        Self::NoCrypto,
    ];

    /// The arm's name as flags, files and reports use it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X25519 => "x25519",
            Self::X25519mlkem768 => "x25519mlkem768",
            Self::PqOfferedClassicalChosen => "pq-offered-classical-chosen",
            Self::HelloRetry => "hello-retry",
            Self::Secp256r1mlkem768 => "secp256r1mlkem768",
            Self::Mlkem768 => "mlkem768",
            Self::NoCrypto => "no-crypto",
        }
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Arm {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        let Some(arm) = Self::ALL.into_iter().find(|arm| arm.name() == name) else {
            bail!(
                "unknown arm '{name}'; the arms are: {}",
                Self::ALL.map(Self::name).join(", ")
            );
        };
        Ok(arm)
    }
}

/// How the intended starts are spread over a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// Exponential gaps: independent users.
    Poisson,
    /// Equal gaps.
    Constant,
}

/// All that decides what a run does; together with the program's version it reproduces the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of the scenario, part of the results folder's name.
    pub scenario: String,
    /// Arms, the first being the baseline of every comparison.
    pub arms: Vec<Arm>,
    /// Trials of each arm.
    pub trials_per_arm: u32,
    /// Requests per second, over all workers.
    pub rate_hz: f64,
    /// Measured part of a trial, ns.
    pub duration_ns: u64,
    /// Part of a trial before it that is sent and recorded but not counted, ns.
    pub warmup_ns: u64,
    /// Spread of the intended starts.
    pub arrivals: Arrivals,
    /// Seed of trial order and arrivals.
    pub seed: u64,
    /// A request that is not done this long after its start is a failure, ns.
    pub timeout_ns: u64,
    /// Whether the kernel is recorded.
    pub probes: bool,
    /// What is varied besides the arms: every arm runs under each. One that asks for nothing, in older recordings too, where nothing
    /// is.
    #[serde(default = "nothing_varied")]
    pub conditions: Vec<Condition>,
    /// The highest quantile that is to be quoted, 0 to 1: what needs enough samples.
    #[serde(default = "usual_quantile")]
    pub highest_quantile: f64,
    /// How many of the trials of each cell decided how many there are, if they did ([`crate::statistics::interval::stein`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_stage: Option<u32>,
}

/// p99.9.
#[must_use]
pub const fn usual_quantile() -> f64 {
    0.999
}

/// Conditions of a plan that varies only its arms.
#[must_use]
pub fn nothing_varied() -> Vec<Condition> {
    vec![Condition::default()]
}

/// An arm under a condition: what trials are repetitions of. Ordered by condition, so that what is compared stands together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// Position in [`Plan::conditions`].
    pub condition: u32,
    /// The arm.
    pub arm: Arm,
}

/// One trial: one arm, one stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// Position in the run, from 0.
    pub index: u32,
    /// Block of trials that holds each cell once, from 0.
    pub block: u32,
    /// What is measured.
    pub arm: Arm,
    /// Under which of [`Plan::conditions`].
    #[serde(default)]
    pub condition: u32,
    /// Seed of this trial's arrivals.
    pub seed: u64,
}

/// More arrivals than this in one trial do not fit the record of a request, nor any machine's ports.
const ARRIVALS_MAX: f64 = 50_000_000.0;

/// More trials than this are a slip of the finger, or a damaged manifest: each costs memory before anything is known of it.
const TRIALS_MAX: u64 = 100_000;

impl Plan {
    /// Checks what a user may have typed.
    ///
    /// # Errors
    /// Names the first value that makes no run, and what would.
    pub fn validate(&self) -> anyhow::Result<()> {
        ensure!(
            !self.arms.is_empty(),
            "--arms is empty: name at least one arm, for example x25519"
        );
        let lists = self
            .conditions
            .iter()
            .filter_map(|condition| condition.arms.as_ref());
        for arms in std::iter::once(&self.arms).chain(lists) {
            for (position, arm) in arms.iter().enumerate() {
                ensure!(
                    !arms[..position].contains(arm),
                    "--arms names {arm} twice: each arm once, for example x25519,x25519mlkem768"
                );
            }
        }
        ensure!(!self.conditions.is_empty(), "the plan has no condition");
        ensure!(
            (0.5..1.0).contains(&self.highest_quantile),
            "the highest percentile is {}: it must be from p50 to below p100",
            self.highest_quantile
        );
        ensure!(
            self.trials_per_arm > 0,
            "--trials is 0: at least one trial per arm is needed"
        );
        let trials = u64::from(self.trials_per_arm) * self.cells().len() as u64;
        ensure!(
            trials <= TRIALS_MAX,
            "--trials {} makes {trials} trials: a run holds at most {TRIALS_MAX}",
            self.trials_per_arm
        );
        ensure!(
            self.duration_ns > self.warmup_ns,
            "--duration ({}) must be longer than --warmup ({}): the warm-up comes on top and is not counted, and a \
             trial shorter than its own warm-up measures a machine that has not settled",
            human_seconds(self.duration_ns),
            human_seconds(self.warmup_ns)
        );
        ensure!(
            self.duration_ns < TIME_NS_MAX,
            "--duration ({}) is longer than any clock runs",
            human_seconds(self.duration_ns)
        );
        ensure!(self.timeout_ns > 0, "--timeout is 0: a request needs some time");
        for (index, condition) in self.conditions.iter().enumerate() {
            let rate_hz = self.rate_hz(index as u32);
            ensure!(
                rate_hz.is_finite() && rate_hz > 0.0,
                "--rate is {rate_hz}: it must be above 0 requests per second"
            );
            let arrivals = rate_hz * (self.duration_ns + self.warmup_ns) as f64 / 1e9;
            ensure!(
                arrivals < ARRIVALS_MAX,
                "a trial of {arrivals:.0} requests is more than the {ARRIVALS_MAX:.0} one trial can hold: lower --rate or \
                 --duration"
            );
            ensure!(
                rate_hz * (self.duration_ns as f64) >= 1e9,
                "--rate {rate_hz} for {} makes no request: raise one of them",
                human_seconds(self.duration_ns)
            );
            condition.validate(self.arms_of(index as u32))?;
        }
        Ok(())
    }

    /// Arms that run under a condition, the first being the baseline.
    ///
    /// # Panics
    /// Without such a condition.
    #[must_use]
    pub fn arms_of(&self, condition: u32) -> &[Arm] {
        self.conditions[condition as usize]
            .arms
            .as_ref()
            .unwrap_or(&self.arms)
    }

    /// Requests per second under a condition.
    ///
    /// # Panics
    /// Without such a condition.
    #[must_use]
    pub fn rate_hz(&self, condition: u32) -> f64 {
        self.conditions[condition as usize]
            .rate_hz
            .unwrap_or(self.rate_hz)
    }

    /// Every arm under each of its conditions, conditions in their order and arms in theirs.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        (0..self.conditions.len() as u32)
            .flat_map(|condition| {
                self.arms_of(condition)
                    .iter()
                    .map(move |&arm| Cell { condition, arm })
            })
            .collect()
    }

    /// What a condition is called; empty where it is the only one ([`condition::names`]).
    ///
    /// # Panics
    /// Without such a condition.
    #[must_use]
    pub fn condition_name(&self, condition: u32) -> String {
        condition::names(&self.conditions, self.rate_hz).swap_remove(condition as usize)
    }

    /// What files and reports call a cell: the arm's name, and the condition's behind an `@` if there are several.
    #[must_use]
    pub fn cell_name(&self, cell: Cell) -> String {
        match self.condition_name(cell.condition).as_str() {
            "" => cell.arm.to_string(),
            condition => format!("{}@{condition}", cell.arm),
        }
    }

    /// The trials in the order in which they run: blocks that hold every cell once, so that drift of the machine falls on all alike.
    /// Conditions come in an order drawn from the seed, and the arms of each next to one another, in an order drawn as well.
    #[must_use]
    pub fn trials(&self) -> Vec<Trial> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let mut trials = Vec::new();
        let mut conditions: Vec<u32> = (0..self.conditions.len() as u32).collect();
        let mut orders: Vec<Vec<Arm>> = conditions
            .iter()
            .map(|&each| self.arms_of(each).to_vec())
            .collect();
        for block in 0..self.trials_per_arm {
            // Every second block mirrors the one before (ABBA), which cancels a linear drift within the pair.
            if block % 2 == 1 {
                conditions.reverse();
            } else if conditions.len() > 1 {
                conditions.shuffle(&mut random);
            }
            for &condition in &conditions {
                let order = &mut orders[condition as usize];
                if block % 2 == 0 {
                    order.shuffle(&mut random);
                } else {
                    order.reverse();
                }
                for &arm in &*order {
                    trials.push(Trial {
                        index: trials.len() as u32,
                        block,
                        arm,
                        condition,
                        seed: random.random(),
                    });
                }
            }
        }
        trials
    }

    /// How long the whole run measures, ns, without set-up and analysis.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        u64::from(self.trials_per_arm) * self.cells().len() as u64 * (self.duration_ns + self.warmup_ns)
    }
}

impl Trial {
    /// What it repeats.
    #[must_use]
    pub const fn cell(&self) -> Cell {
        Cell {
            condition: self.condition,
            arm: self.arm,
        }
    }

    /// Which of so many requests resume an earlier session, drawn from the seed with the condition's share.
    #[must_use]
    pub fn resumed(&self, plan: &Plan, requests: usize) -> Vec<bool> {
        let share = plan.conditions[self.condition as usize].resumed;
        // Another stream than that of the arrivals.
        let mut random = Xoshiro256PlusPlus::seed_from_u64(!self.seed);
        (0..requests).map(|_| random.random::<f64>() < share).collect()
    }

    /// Intended starts in ns after the trial's begin, ascending, over warm-up and measured part.
    ///
    /// Drawn in advance, so that a slow system cannot slow down the arrivals that measure it.
    #[must_use]
    pub fn arrivals_ns(&self, plan: &Plan) -> Vec<u64> {
        let end_ns = plan.warmup_ns + plan.duration_ns;
        let gap_ns = 1e9 / plan.rate_hz(self.condition);
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let mut arrivals = Vec::with_capacity((end_ns as f64 / gap_ns * 1.1) as usize + 16);
        let mut at_ns = 0.0;
        loop {
            at_ns += match plan.arrivals {
                Arrivals::Constant => gap_ns,
                // 1 - u lies in (0, 1], where the logarithm is finite.
                Arrivals::Poisson => -gap_ns * (1.0 - random.random::<f64>()).ln(),
            };
            if at_ns >= end_ns as f64 {
                return arrivals;
            }
            arrivals.push(at_ns as u64);
        }
    }
}

fn human_seconds(ns: u64) -> String {
    format!("{} s", ns as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan() -> Plan {
        Plan {
            scenario: "fresh-handshake".to_owned(),
            arms: vec![Arm::X25519, Arm::X25519mlkem768],
            trials_per_arm: 6,
            rate_hz: 300.0,
            duration_ns: 10_000_000_000,
            warmup_ns: 2_000_000_000,
            arrivals: Arrivals::Poisson,
            seed: 7,
            timeout_ns: 5_000_000_000,
            probes: true,
            conditions: nothing_varied(),
            highest_quantile: usual_quantile(),
            first_stage: None,
        }
    }

    #[test]
    fn names_and_arms_are_one_to_one() {
        for arm in Arm::ALL {
            assert_eq!(arm.name().parse::<Arm>().unwrap(), arm);
            assert_eq!(serde_json::to_value(arm).unwrap(), arm.name());
        }
        let error = "kyber".parse::<Arm>().unwrap_err().to_string();
        assert!(
            error.contains("kyber") && error.contains("x25519mlkem768"),
            "{error}"
        );
    }

    #[test]
    fn cells_are_named_by_what_tells_them_apart() {
        let mut plan = plan();
        assert_eq!(plan.cell_name(plan.cells()[1]), "x25519mlkem768");
        plan.conditions = vec![
            Condition::default(),
            Condition {
                response_bytes: 10_000,
                resumed: 0.5,
                rate_hz: Some(50.0),
                arms: Some(vec![Arm::Mlkem768]),
                ..Condition::default()
            },
        ];
        let names: Vec<_> = plan
            .cells()
            .into_iter()
            .map(|cell| plan.cell_name(cell))
            .collect();
        assert_eq!(
            names,
            [
                "x25519@300ps-3B-resumed0",
                "x25519mlkem768@300ps-3B-resumed0",
                "mlkem768@50ps-10KB-resumed50"
            ]
        );
    }

    #[test]
    fn what_makes_no_run_is_refused_by_name() {
        type Break = fn(&mut Plan);
        let broken: [(Break, &str); 9] = [
            (|p| p.rate_hz = 0.0, "--rate"),
            (|p| p.rate_hz = f64::NAN, "--rate"),
            (|p| p.duration_ns = 1_000_000_000, "--duration"),
            (|p| p.trials_per_arm = 0, "--trials"),
            (|p| p.trials_per_arm = u32::MAX, "at most"),
            (|p| p.duration_ns = u64::MAX, "longer than any clock"),
            (|p| p.arms.clear(), "--arms"),
            (|p| p.arms.push(Arm::X25519), "twice"),
            (|p| p.rate_hz = 1e9, "lower --rate"),
        ];
        assert!(plan().validate().is_ok());
        for (breaks, word) in broken {
            let mut plan = plan();
            breaks(&mut plan);
            let error = plan.validate().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_spread_of_an_exponential() {
        let plan = Plan {
            rate_hz: 5_000.0,
            ..plan()
        };
        let arrivals = plan.trials()[0].arrivals_ns(&plan);
        let gaps: Vec<f64> = arrivals
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64)
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        // 60,000 gaps: the standard error of both is below half a percent.
        assert!((mean / 200_000.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((deviation / mean - 1.0).abs() < 0.03, "{deviation}");
    }

    proptest! {
        #[test]
        fn every_block_holds_every_arm_once(seed in any::<u64>(), trials in 1u32..12, arms in 1usize..=7) {
            let plan = Plan { seed, trials_per_arm: trials, arms: Arm::ALL[..arms].to_vec(), ..plan() };
            let list = plan.trials();
            prop_assert_eq!(&list, &plan.trials(), "the same seed gives the same list");
            for (block, chunk) in list.chunks(arms).enumerate() {
                let mut found: Vec<Arm> = chunk.iter().map(|trial| trial.arm).collect();
                found.sort();
                prop_assert_eq!(&found, &plan.arms);
                prop_assert!(chunk.iter().all(|trial| trial.block as usize == block));
            }
        }

        #[test]
        fn every_block_holds_every_cell_once_and_more_trials_only_come_behind(seed in any::<u64>(), trials in 1u32..9) {
            let conditions = [3, 10, 100].map(|response_bytes| Condition { response_bytes, ..Condition::default() });
            let plan = Plan { seed, trials_per_arm: trials, conditions: conditions.to_vec(), ..plan() };
            let list = plan.trials();
            for (block, chunk) in list.chunks(6).enumerate() {
                let mut found: Vec<Cell> = chunk.iter().map(Trial::cell).collect();
                found.sort();
                prop_assert_eq!(found, plan.cells());
                prop_assert!(chunk.iter().all(|trial| trial.block as usize == block));
            }
            let more = Plan { trials_per_arm: trials + 2, ..plan };
            prop_assert_eq!(&more.trials()[..list.len()], &list[..]);
        }

        #[test]
        fn arrivals_ascend_within_the_trial(seed in any::<u64>(), constant in any::<bool>()) {
            let arrivals = if constant { Arrivals::Constant } else { Arrivals::Poisson };
            let plan = Plan { seed, arrivals, ..plan() };
            let times = plan.trials()[0].arrivals_ns(&plan);
            prop_assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
            prop_assert!(times.last().is_some_and(|&last| last < plan.warmup_ns + plan.duration_ns));
        }
    }
}
