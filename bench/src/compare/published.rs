//! A run as it was published: what is read of its `summary.json` and `manifest.json`, and nothing else of its folder.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{Failed, Subject};
use crate::{
    plan::usual_quantile,
    record::manifest::MANIFEST,
    report::summary::{Percentiles, SUMMARY_SCHEMA},
};

/// ns per request by line.
pub(super) type Ledger = BTreeMap<String, i64>;

/// A run, and what it is called here.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) label: char,
    pub(super) folder: String,
    summary: Summary,
    /// The whole manifest: its facts are compared whatever their names.
    pub(super) manifest: Value,
    seed: u64,
    /// The highest that it is to be quoted by, 0 to 1.
    pub(super) highest_quantile: f64,
    /// Block by trial, of the trials that ran to their end.
    blocks: BTreeMap<u32, u32>,
}

#[derive(Debug, Deserialize)]
struct Summary {
    pqtail: String,
    begun: String,
    valid: bool,
    verdicts: Vec<Verdict>,
    arms: BTreeMap<String, Arm>,
    differences: Vec<Effect>,
    decomposition: Vec<Decomposition>,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
struct Condition {
    cells: Vec<Cell>,
}

#[derive(Debug, Deserialize)]
struct Cell {
    name: String,
    saturated: Option<String>,
    disturbed: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Verdict {
    rule: String,
    ok: bool,
    figure: String,
    text: String,
}

#[derive(Debug, Deserialize)]
struct Arm {
    trials: Vec<Trial>,
    ledger_median: Ledger,
    ledger_tail: Ledger,
}

#[derive(Debug, Deserialize)]
struct Trial {
    trial: u32,
    requests: u64,
    percentiles_ns: Percentiles,
}

#[derive(Debug, Deserialize)]
struct Effect {
    arm: String,
    baseline: String,
}

#[derive(Debug, Deserialize)]
struct Decomposition {
    arm: String,
    baseline: String,
    statistic: String,
    lines: Ledger,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    begun: String,
    plan: Planned,
    trials: Vec<Recorded>,
}

#[derive(Debug, Deserialize)]
struct Planned {
    seed: u64,
    #[serde(default = "usual_quantile")]
    highest_quantile: f64,
}

#[derive(Debug, Deserialize)]
struct Recorded {
    trial: Placed,
}

#[derive(Debug, Deserialize)]
struct Placed {
    index: u32,
    block: u32,
}

impl Run {
    /// Reads a results folder.
    ///
    /// # Errors
    /// When it lacks one of the two files, or they are not understood, of another schema version, or not of one run.
    pub(super) fn read(label: char, folder: &Path) -> anyhow::Result<Self> {
        ensure!(
            folder.is_dir(),
            "{} is no folder: name the results folders of runs",
            folder.display()
        );
        let manifest_path = folder.join(MANIFEST);
        ensure!(
            manifest_path.exists(),
            "{} has no {MANIFEST}: is it a run's results folder? A run is published with it and with summary.json",
            folder.display()
        );
        let summary_path = folder.join("summary.json");
        ensure!(
            summary_path.exists(),
            "{} has no summary.json: `pqtail analyze {0}` makes it from the recordings, on a machine that has them",
            folder.display()
        );
        let summary: Value = read(&summary_path)?;
        let schema = &summary["schema"];
        ensure!(
            *schema == SUMMARY_SCHEMA,
            "{} has schema version {schema}, this pqtail reads version {SUMMARY_SCHEMA}: `pqtail analyze {}` makes it anew from the \
             recordings, on a machine that has them",
            summary_path.display(),
            folder.display()
        );
        let summary: Summary = understood(summary, &summary_path)?;
        let manifest: Value = read(&manifest_path)?;
        let read: Manifest = understood(manifest.clone(), &manifest_path)?;
        ensure!(
            summary.begun == read.begun,
            "{} holds the summary of a run that began {} and the manifest of one that began {}: `pqtail analyze {0}` makes the \
             summary anew",
            folder.display(),
            summary.begun,
            read.begun
        );
        let ended = read.trials.iter().map(|each| &each.trial);
        Ok(Self {
            label,
            folder: folder.display().to_string(),
            summary,
            manifest,
            seed: read.plan.seed,
            highest_quantile: read.plan.highest_quantile,
            blocks: ended.map(|trial| (trial.index, trial.block)).collect(),
        })
    }

    /// Begin and seed together name a run.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        self.summary.begun == other.summary.begun && self.seed == other.seed
    }

    pub(super) fn subject(self) -> Subject {
        let (passed, failed): (Vec<_>, Vec<_>) = self.summary.verdicts.into_iter().partition(|each| each.ok);
        Subject {
            label: self.label,
            folder: self.folder,
            begun: self.summary.begun,
            pqtail: self.summary.pqtail,
            valid: self.summary.valid,
            passed: passed.len(),
            failed: failed
                .into_iter()
                .map(
                    |Verdict {
                         rule, figure, text, ..
                     }| Failed { rule, figure, text },
                )
                .collect(),
        }
    }

    /// Names of the arms: baselines, then what is compared with them, then any others.
    pub(super) fn arms(&self) -> Vec<String> {
        let differences = &self.summary.differences;
        let baselines = differences.iter().map(|each| &each.baseline);
        let arms = differences.iter().map(|each| &each.arm);
        let mut names = Vec::new();
        for name in baselines.chain(arms).chain(self.summary.arms.keys()) {
            if self.summary.arms.contains_key(name) && !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// Why an arm's figures are not to be quoted, if so: a sweep over rates may be valid and have such arms.
    pub(super) fn unquotable(&self, arm: &str) -> Option<&str> {
        let mut cells = self.summary.conditions.iter().flat_map(|each| &each.cells);
        let cell = cells.find(|cell| cell.name == arm)?;
        cell.saturated.as_deref().or(cell.disturbed.as_deref())
    }

    /// Arms with what they are compared with, in the order of the differences.
    pub(super) fn effects(&self) -> Vec<(String, String)> {
        let mut effects = Vec::new();
        for each in &self.summary.differences {
            let effect = (each.arm.clone(), each.baseline.clone());
            if !effects.contains(&effect) {
                effects.push(effect);
            }
        }
        effects
    }

    /// A statistic of each trial of an arm, ns.
    pub(super) fn figures(&self, arm: &str, of: fn(&Percentiles) -> u64) -> Vec<f64> {
        self.by_block(arm, of).into_values().collect()
    }

    /// What a statistic of an arm is above that of its baseline, block by block, ns.
    pub(super) fn costs(&self, arm: &str, baseline: &str, of: fn(&Percentiles) -> u64) -> Vec<f64> {
        let usual = self.by_block(baseline, of);
        let figures = self.by_block(arm, of).into_iter();
        figures
            .filter_map(|(block, ns)| Some(ns - usual.get(&block)?))
            .collect()
    }

    /// By block, of which each holds one trial of an arm. A trial that was cut is in no block.
    fn by_block(&self, arm: &str, of: fn(&Percentiles) -> u64) -> BTreeMap<u32, f64> {
        let trials = self.summary.arms.get(arm).map_or(&[][..], |arm| &arm.trials);
        trials
            .iter()
            .filter(|trial| trial.requests > 0)
            .filter_map(|trial| Some((*self.blocks.get(&trial.trial)?, of(&trial.percentiles_ns) as f64)))
            .collect()
    }

    /// Mean ledger of an arm's `middle` or `outliers`; `None` where there are no records to make it from.
    pub(super) fn ledger(&self, arm: &str, of: &str) -> Option<&Ledger> {
        let arm = self.summary.arms.get(arm)?;
        let ledger = if of == "middle" {
            &arm.ledger_median
        } else {
            &arm.ledger_tail
        };
        (!ledger.is_empty()).then_some(ledger)
    }

    /// A difference at `p50` or `p99` by line.
    pub(super) fn decomposition(&self, arm: &str, baseline: &str, statistic: &str) -> Option<&Ledger> {
        let mut decompositions = self.summary.decomposition.iter();
        decompositions
            .find(|each| each.arm == arm && each.baseline == baseline && each.statistic == statistic)
            .map(|each| &each.lines)
    }
}

fn read(path: &Path) -> anyhow::Result<Value> {
    let json = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_slice(&json).with_context(|| format!("{} is no JSON: it is damaged", path.display()))
}

fn understood<T: DeserializeOwned>(value: Value, path: &Path) -> anyhow::Result<T> {
    serde_json::from_value(value).with_context(|| format!("{} is not understood", path.display()))
}
