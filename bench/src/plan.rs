//! Scenario x arms x trials, expanded into an explicit, seeded, interleaved list of trials.

use std::{fmt, str::FromStr};

use anyhow::{bail, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus, seq::SliceRandom as _};
use serde::{Deserialize, Serialize};

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
}

/// One trial: one arm, one stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// Position in the run, from 0.
    pub index: u32,
    /// Block of trials that holds each arm once, from 0.
    pub block: u32,
    /// What is measured.
    pub arm: Arm,
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
        for (position, arm) in self.arms.iter().enumerate() {
            ensure!(
                !self.arms[..position].contains(arm),
                "--arms names {arm} twice: each arm once, for example x25519,x25519mlkem768"
            );
        }
        ensure!(
            self.trials_per_arm > 0,
            "--trials is 0: at least one trial per arm is needed"
        );
        let trials = u64::from(self.trials_per_arm) * self.arms.len() as u64;
        ensure!(
            trials <= TRIALS_MAX,
            "--trials {} makes {trials} trials: a run holds at most {TRIALS_MAX}",
            self.trials_per_arm
        );
        ensure!(
            self.rate_hz.is_finite() && self.rate_hz > 0.0,
            "--rate is {}: it must be above 0 requests per second",
            self.rate_hz
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
        let arrivals = self.rate_hz * (self.duration_ns + self.warmup_ns) as f64 / 1e9;
        ensure!(
            arrivals < ARRIVALS_MAX,
            "a trial of {arrivals:.0} requests is more than the {ARRIVALS_MAX:.0} one trial can hold: lower --rate or \
             --duration"
        );
        ensure!(
            self.rate_hz * (self.duration_ns as f64) >= 1e9,
            "--rate {} for {} makes no request: raise one of them",
            self.rate_hz,
            human_seconds(self.duration_ns)
        );
        Ok(())
    }

    /// The trials in the order in which they run: blocks that hold every arm once, each block in an order drawn from
    /// the seed, so that drift of the machine falls on all arms alike.
    #[must_use]
    pub fn trials(&self) -> Vec<Trial> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let mut trials = Vec::new();
        let mut order = self.arms.clone();
        for block in 0..self.trials_per_arm {
            // Every second block mirrors the one before (ABBA), which cancels a linear drift within the pair.
            if block % 2 == 0 {
                order.shuffle(&mut random);
            } else {
                order.reverse();
            }
            for &arm in &order {
                trials.push(Trial {
                    index: trials.len() as u32,
                    block,
                    arm,
                    seed: random.random(),
                });
            }
        }
        trials
    }

    /// Port of each arm on the server: one listener per arm, so that trials alternate without a restart.
    #[must_use]
    pub fn port(&self, base: u16, arm: Arm) -> u16 {
        base + self
            .arms
            .iter()
            .position(|&each| each == arm)
            .expect("an arm of this plan") as u16
    }

    /// How long the whole run measures, ns, without set-up and analysis.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        u64::from(self.trials_per_arm) * self.arms.len() as u64 * (self.duration_ns + self.warmup_ns)
    }
}

impl Trial {
    /// Intended starts in ns after the trial's begin, ascending, over warm-up and measured part.
    ///
    /// Drawn in advance, so that a slow system cannot slow down the arrivals that measure it.
    #[must_use]
    pub fn arrivals_ns(&self, plan: &Plan) -> Vec<u64> {
        let end_ns = plan.warmup_ns + plan.duration_ns;
        let gap_ns = 1e9 / plan.rate_hz;
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
        fn arrivals_ascend_within_the_trial(seed in any::<u64>(), constant in any::<bool>()) {
            let arrivals = if constant { Arrivals::Constant } else { Arrivals::Poisson };
            let plan = Plan { seed, arrivals, ..plan() };
            let times = plan.trials()[0].arrivals_ns(&plan);
            prop_assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
            prop_assert!(times.last().is_some_and(|&last| last < plan.warmup_ns + plan.duration_ns));
        }
    }
}
