//! Runs side by side: what they measured, and everything else in which they differ.
//!
//! Runs are compared as they were published, by `summary.json` and `manifest.json` alone. Trials of one run and those of another were
//! not interleaved: an interval here covers how the trials of each run scatter, and not what changed on the machines between the runs.
//! What an arm costs over its baseline was interleaved within each run, and so the difference of two such costs is the firmest thing
//! that two runs say together.
//!
//! Arms are known by the names that the files give them: another version may have others.

mod facts;
#[cfg(test)]
pub(crate) mod fixtures;
mod published;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::ensure;
use serde::Serialize;

pub use facts::{Differing, Of};
use published::Run;

use crate::{
    report::summary::Percentiles,
    statistics::{STATISTICS, interval::between},
};

/// Version of the JSON form.
pub const COMPARE_SCHEMA: u32 = 1;

/// Each run has a letter.
const RUNS_MAX: usize = 26;

/// Runs, each later one held against the first.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// [`COMPARE_SCHEMA`].
    pub schema: u32,
    /// The runs in the order in which they were named.
    pub runs: Vec<Subject>,
    /// Facts that are not the same in all runs.
    pub differing: Vec<Differing>,
    /// Each later run against the first.
    pub pairs: Vec<Pair>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Subject {
    /// What it is called here: `A`, `B`.
    pub label: char,
    /// Its folder, as it was named.
    pub folder: String,
    /// When it began, RFC 3339, UTC.
    pub begun: String,
    /// Version of the program that recorded it.
    pub pqtail: String,
    /// Whether it is valid, by its own judgement.
    pub valid: bool,
    /// How many judgements it passed.
    pub passed: usize,
    /// Those that it failed.
    pub failed: Vec<Failed>,
}

/// A verdict that is not ok.
#[derive(Clone, Debug, Serialize)]
pub struct Failed {
    /// Short name of the rule.
    pub rule: String,
    /// The figure it was judged by, with its unit.
    pub figure: String,
    /// What it means, and what to do.
    pub text: String,
}

/// A later run against the first.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// Label of the first run.
    pub first: char,
    /// Label of the later one.
    pub later: char,
    /// Whether both are recordings of the same trials, by their begin and seed: then no difference between them is evidence.
    pub same_run: bool,
    /// Each arm that both runs have.
    pub arms: Vec<Difference>,
    /// What each arm costs over the same baseline in both runs.
    pub effects: Vec<Difference>,
    /// Mean ledgers line by line. `summary.json` has no ledger per trial, and so these have no interval.
    pub ledgers: Vec<LedgerPair>,
    /// Arms whose figures are not to be quoted in one of the runs, and why, in words.
    pub unquotable: Vec<String>,
    /// What only one of the runs has, in words.
    pub not_compared: Vec<String>,
}

/// One statistic of one arm, or of what it costs over its baseline: later run minus first. Means are over trials, or over blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The arm.
    pub arm: String,
    /// What it is compared with inside each run; `None` where the arm's own latency is compared.
    pub baseline: Option<String>,
    /// `mean`, `p50`, `p95`, `p99` or `p99.9`.
    pub statistic: &'static str,
    /// In the first run, ns.
    pub first_ns: i64,
    /// In the later run, ns.
    pub later_ns: i64,
    /// Later minus first, ns.
    pub difference_ns: i64,
    /// Trials or blocks of the first run that it is made from.
    pub first_trials: usize,
    /// Trials or blocks of the later run.
    pub later_trials: usize,
    /// 95 % interval of the difference, ns ([`between`]); `None` with fewer than two trials in either run.
    pub interval_ns: Option<(i64, i64)>,
    /// The smallest true difference, ns, that so many trials of this spread show in 80 of 100 such comparisons; `None` with fewer
    /// than two in either run.
    pub detectable_ns: Option<u64>,
}

/// Two ledgers, or two differences of ledgers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LedgerPair {
    /// The arm.
    pub arm: String,
    /// What it is compared with inside each run; `None` for the arm's own ledger.
    pub baseline: Option<String>,
    /// Whose mean it is: `middle` or `outliers` requests of an arm, requests around `p50` or `p99` of a difference.
    pub of: String,
    /// All lines that either run has, the greatest first.
    pub lines: Vec<LedgerLine>,
}

/// One line of two ledgers, ns per request. A line that a run does not have is 0 there, be it that nothing happened or that its probe
/// was not attached: the probes are among the facts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LedgerLine {
    /// The line.
    pub line: String,
    /// In the first run.
    pub first_ns: i64,
    /// In the later run.
    pub later_ns: i64,
}

/// Compares published runs, given by their folders.
///
/// # Errors
/// When a folder holds no published run, or one of another schema version, or one that has no arm of the first run's.
pub fn compare(folders: &[PathBuf]) -> anyhow::Result<Comparison> {
    ensure!(
        folders.len() > 1,
        "name two results folders at least: a run is compared with another"
    );
    ensure!(
        folders.len() <= RUNS_MAX,
        "{} runs are more than the {RUNS_MAX} that have a letter: compare fewer at once",
        folders.len()
    );
    let read = |(label, folder): (char, &PathBuf)| Run::read(label, Path::new(folder));
    let runs: Vec<Run> = ('A'..).zip(folders).map(read).collect::<anyhow::Result<_>>()?;
    let later = runs[1..].iter();
    Ok(Comparison {
        schema: COMPARE_SCHEMA,
        differing: facts::differing(&runs),
        pairs: later
            .map(|later| pair(&runs[0], later))
            .collect::<anyhow::Result<_>>()?,
        runs: runs.into_iter().map(Run::subject).collect(),
    })
}

fn pair(first: &Run, later: &Run) -> anyhow::Result<Pair> {
    let mut pair = Pair {
        first: first.label,
        later: later.label,
        same_run: first.is_same_as(later),
        arms: Vec::new(),
        effects: Vec::new(),
        ledgers: Vec::new(),
        unquotable: Vec::new(),
        not_compared: Vec::new(),
    };
    let runs = [first, later];
    let highest = first.highest_quantile.min(later.highest_quantile);
    let arms = pair.in_both(runs.map(Run::arms), String::clone);
    ensure!(
        !arms.is_empty(),
        "{} and {} have no arm in common ({}; {}): there is nothing to compare",
        first.folder,
        later.folder,
        first.arms().join(", "),
        later.arms().join(", ")
    );
    for arm in &arms {
        for run in runs {
            if let Some(why) = run.unquotable(arm) {
                pair.unquotable.push(format!("{arm} in {}: {why}", run.label));
            }
        }
        pair.arms.extend(differences(arm, None, highest, |of| {
            runs.map(|run| run.figures(arm, of))
        }));
        for of in ["middle", "outliers"] {
            pair.compare_ledgers(arm, None, of, runs.map(|run| run.ledger(arm, of)));
        }
    }
    let effects = pair.in_both(runs.map(Run::effects), |(arm, baseline)| {
        format!("{arm} over {baseline}")
    });
    for (arm, baseline) in &effects {
        let of_runs = |of| runs.map(|run| run.costs(arm, baseline, of));
        pair.effects
            .extend(differences(arm, Some(baseline), highest, of_runs));
        for of in ["p50", "p99"] {
            let ledgers = runs.map(|run| run.decomposition(arm, baseline, of));
            pair.compare_ledgers(arm, Some(baseline), of, ledgers);
        }
    }
    Ok(pair)
}

impl Pair {
    /// What is in both lists, in the order of the first; the rest is noted.
    fn in_both<T: PartialEq>(&mut self, [first, later]: [Vec<T>; 2], name: impl Fn(&T) -> String) -> Vec<T> {
        let (both, only_first): (Vec<T>, Vec<T>) = first.into_iter().partition(|each| later.contains(each));
        let only_later = later.iter().filter(|each| !both.contains(each));
        for (names, label) in [
            (only_first.iter().map(&name).collect::<Vec<_>>(), self.first),
            (only_later.map(&name).collect(), self.later),
        ] {
            if !names.is_empty() {
                self.not_compared
                    .push(format!("only {label} has {}", names.join(", ")));
            }
        }
        both
    }

    fn compare_ledgers(
        &mut self,
        arm: &str,
        baseline: Option<&str>,
        of: &str,
        [first, later]: [Option<&published::Ledger>; 2],
    ) {
        let (Some(first), Some(later)) = (first, later) else {
            let without = match (first, later) {
                (None, Some(_)) => self.first.to_string(),
                (Some(_), None) => self.later.to_string(),
                _ => format!("{} and {}", self.first, self.later),
            };
            let over = baseline.map_or(String::new(), |baseline| format!(" over {baseline}"));
            let note = format!("ledgers of {arm}{over} ({of}): none in {without}");
            self.not_compared.push(note);
            return;
        };
        let names: BTreeSet<&String> = first.keys().chain(later.keys()).collect();
        let ns = |ledger: &published::Ledger, line| ledger.get(line).copied().unwrap_or(0);
        let mut lines: Vec<LedgerLine> = names
            .into_iter()
            .map(|line| LedgerLine {
                line: line.clone(),
                first_ns: ns(first, line),
                later_ns: ns(later, line),
            })
            .collect();
        lines.sort_by_key(|line| std::cmp::Reverse(line.size_ns()));
        self.ledgers.push(LedgerPair {
            arm: arm.to_owned(),
            baseline: baseline.map(str::to_owned),
            of: of.to_owned(),
            lines,
        });
    }
}

impl LedgerLine {
    /// The greater of both, whatever its sign, ns.
    #[must_use]
    pub fn size_ns(&self) -> u64 {
        self.first_ns.unsigned_abs().max(self.later_ns.unsigned_abs())
    }
}

/// Each statistic that both runs are to be quoted by and have figures for, which `of_runs` gives.
fn differences(
    arm: &str,
    baseline: Option<&str>,
    highest_quantile: f64,
    of_runs: impl Fn(fn(&Percentiles) -> u64) -> [Vec<f64>; 2],
) -> Vec<Difference> {
    let mean_ns = |figures: &[f64]| (figures.iter().sum::<f64>() / figures.len() as f64).round() as i64;
    STATISTICS
        .iter()
        .filter(|(_, quantile, _)| *quantile <= highest_quantile)
        .filter_map(|&(statistic, _, of)| {
            let [first, later] = of_runs(of);
            let estimate = between(&first, &later)?;
            Some(Difference {
                arm: arm.to_owned(),
                baseline: baseline.map(str::to_owned),
                statistic,
                first_ns: mean_ns(&first),
                later_ns: mean_ns(&later),
                difference_ns: estimate.mean.round() as i64,
                first_trials: first.len(),
                later_trials: later.len(),
                interval_ns: estimate.interval_ns(),
                detectable_ns: estimate.detectable_ns(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{fixtures::Folders, *};

    fn find<'a>(differences: &'a [Difference], arm: &str, statistic: &str) -> &'a Difference {
        let mut of_arm = differences.iter().filter(|each| each.arm == arm);
        of_arm.find(|each| each.statistic == statistic).unwrap()
    }

    fn contains(difference: &Difference, ns: i64) -> bool {
        let (low_ns, high_ns) = difference.interval_ns.unwrap();
        low_ns <= ns && ns <= high_ns
    }

    #[test]
    fn an_arm_that_is_slower_in_one_run_is_slower_by_that_and_dearer_by_that() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|summary, _| {
            for trial in summary["arms"]["x25519mlkem768"]["trials"]
                .as_array_mut()
                .unwrap()
            {
                for ns in trial["percentiles_ns"].as_object_mut().unwrap().values_mut() {
                    *ns = (ns.as_u64().unwrap() + 100_000).into();
                }
            }
        });
        let comparison = compare(&folders.paths).unwrap();
        let pair = &comparison.pairs[0];
        assert_eq!((pair.arms.len(), pair.effects.len()), (10, 5));
        for (statistic, ..) in STATISTICS {
            let slower = find(&pair.arms, "x25519mlkem768", statistic);
            let alike = find(&pair.arms, "x25519", statistic);
            let effect = find(&pair.effects, "x25519mlkem768", statistic);
            assert_eq!(
                (slower.difference_ns, alike.difference_ns, effect.difference_ns),
                (100_000, 0, 100_000)
            );
            assert!(contains(slower, 100_000) && !contains(slower, 0), "{slower:?}");
            assert!(contains(alike, 0) && !contains(alike, 100_000), "{alike:?}");
            assert!(contains(effect, 100_000) && !contains(effect, 0), "{effect:?}");
            // What drifted from block to block fell on both arms, and the effects are free of it.
            assert!(
                effect.detectable_ns < slower.detectable_ns,
                "{effect:?} {slower:?}"
            );
            assert_eq!((effect.first_ns, effect.later_ns), (50_000, 150_000));
            assert_eq!((effect.first_trials, effect.later_trials), (5, 5));
        }
        assert_eq!(pair.not_compared, [""; 0]);
    }

    #[test]
    fn ledgers_stand_line_by_line_the_greatest_first() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|summary, _| {
            summary["arms"]["x25519"]["ledger_median"] =
                json!({"network": 900_000, "client.steal": 7, "client.compute": 300_000});
        });
        let pair = compare(&folders.paths).unwrap().pairs.remove(0);
        let middle = &pair.ledgers[0];
        assert_eq!((middle.arm.as_str(), middle.of.as_str()), ("x25519", "middle"));
        let lines: Vec<_> = middle
            .lines
            .iter()
            .map(|line| (line.line.as_str(), line.first_ns, line.later_ns))
            .collect();
        assert_eq!(
            lines,
            [
                ("network", 400_000, 900_000),
                ("client.compute", 200_000, 300_000),
                ("server.compute", 200_000, 0),
                ("client.steal", 0, 7),
            ]
        );
        let split = pair.ledgers.iter().find(|each| each.of == "p99").unwrap();
        assert_eq!(split.baseline.as_deref(), Some("x25519"));
        assert_eq!(split.lines[0].line, "server.compute");
        assert_eq!(split.lines[1].later_ns, -10_000);
    }

    #[test]
    fn percentiles_beyond_what_one_of_the_runs_is_to_be_quoted_by_are_left_out() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|_, manifest| manifest["plan"]["highest_quantile"] = 0.95.into());
        let pair = compare(&folders.paths).unwrap().pairs.remove(0);
        let statistics: Vec<_> = pair.effects.iter().map(|each| each.statistic).collect();
        assert_eq!(statistics, ["mean", "p50", "p95"]);
    }

    #[test]
    fn an_arm_that_measures_a_queue_is_named() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|summary, _| {
            let cell = json!({"name": "x25519", "saturated": "the server is 97 % busy"});
            let other = json!({"name": "x25519mlkem768", "saturated": null});
            summary["conditions"] = json!([{"cells": [cell, other]}]);
        });
        let pair = compare(&folders.paths).unwrap().pairs.remove(0);
        assert_eq!(pair.unquotable, ["x25519 in B: the server is 97 % busy"]);
    }

    #[test]
    fn every_later_run_is_held_against_the_first() {
        let mut folders = Folders::new();
        for minute in 1..=3 {
            folders.add(|summary, manifest| {
                let begun = format!("2026-12-03T06:0{minute}:00Z");
                summary["begun"] = begun.clone().into();
                manifest["begun"] = begun.into();
            });
        }
        let comparison = compare(&folders.paths).unwrap();
        let labels: Vec<_> = comparison
            .pairs
            .iter()
            .map(|pair| (pair.first, pair.later))
            .collect();
        assert_eq!(labels, [('A', 'B'), ('A', 'C')]);
        assert!(comparison.pairs.iter().all(|pair| !pair.same_run));
    }

    #[test]
    fn a_run_against_itself_is_called_that() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|_, _| ());
        let comparison = compare(&folders.paths).unwrap();
        assert!(comparison.pairs[0].same_run);
        assert_eq!(comparison.differing, []);
    }

    #[test]
    fn what_only_one_run_has_is_named_and_not_compared() {
        let mut folders = Folders::new();
        folders.add(|summary, _| {
            let arm = summary["arms"]["x25519"].clone();
            summary["arms"]["rtt=30ms x25519"] = arm;
        });
        folders.add(|summary, _| {
            summary["differences"][0]["baseline"] = "mlkem768".into();
            summary["arms"]["x25519"]["ledger_tail"] = json!({});
        });
        let pair = compare(&folders.paths).unwrap().pairs.remove(0);
        assert_eq!(
            pair.not_compared,
            [
                "only A has rtt=30ms x25519",
                "ledgers of x25519 (outliers): none in B",
                "only A has x25519mlkem768 over x25519",
                "only B has x25519mlkem768 over mlkem768",
            ]
        );
        assert!(pair.effects.is_empty() && pair.arms.len() == 10);
    }

    #[test]
    fn a_cut_trial_and_one_without_requests_are_in_no_figure() {
        let mut folders = Folders::new();
        folders.add(|summary, manifest| {
            summary["arms"]["x25519"]["trials"][0]["requests"] = 0.into();
            manifest["trials"].as_array_mut().unwrap().pop();
        });
        folders.add(|_, _| ());
        let pair = compare(&folders.paths).unwrap().pairs.remove(0);
        let trials = |differences, arm| find(differences, arm, "p50").first_trials;
        assert_eq!(trials(&pair.arms, "x25519"), 4);
        assert_eq!(trials(&pair.arms, "x25519mlkem768"), 4);
        assert_eq!(trials(&pair.effects, "x25519mlkem768"), 3);
    }

    #[test]
    fn what_cannot_be_compared_is_an_error_that_says_what_to_do() {
        type Change = fn(&mut Value, &mut Value);
        let changes: [(Change, &str); 6] = [
            (|summary, _| *summary = Value::Null, "`pqtail analyze "),
            (
                |_, manifest| *manifest = Value::Null,
                "is it a run's results folder?",
            ),
            (
                |summary, _| summary["schema"] = 999.into(),
                "schema version 999, this pqtail reads version",
            ),
            (|summary, _| summary["arms"] = 1.into(), "is not understood"),
            (
                |_, manifest| manifest["begun"] = "2020".into(),
                "one that began 2020",
            ),
            (
                |summary, _| {
                    let arm = summary["arms"]["x25519"].clone();
                    summary["arms"] = json!({"other": arm});
                },
                "no arm in common",
            ),
        ];
        for (change, word) in changes {
            let mut folders = Folders::new();
            folders.add(|_, _| ());
            folders.add(change);
            let error = format!("{:#}", compare(&folders.paths).unwrap_err());
            assert!(error.contains(word), "{error}");
            assert!(error.contains(&folders.paths[1].display().to_string()), "{error}");
        }
        let error = compare(&["/nowhere".into(), "/nowhere".into()]).unwrap_err();
        assert!(error.to_string().contains("/nowhere is no folder"), "{error}");
        let error = compare(&["/".into()]).unwrap_err();
        assert!(error.to_string().contains("two results folders"), "{error}");
    }
}
