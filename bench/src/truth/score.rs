//! What the attribution said of the requests that an injection hit, beside what it ought to have said.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use super::{
    case::{Case, Expectation},
    inject::Window,
};
use crate::{
    analyze::{Analysis, TrialRows, analyze, explain},
    record::stamps::RequestStamps,
    report::summary::Outlier,
    statistics::quantile,
};

/// A request is hit if the injection lies in it for this long, and for half of what its latency is above the median, which must
/// be as much. ns.
const HIT_NS_MIN: u64 = 1_000_000;

/// What the attribution made of one case.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CaseScore {
    /// Injections.
    pub injections: u64,
    /// Requests of all kinds.
    pub requests: u64,
    /// Requests that an injection hit and of which something is expected, by expected line.
    pub expected: BTreeMap<&'static str, LineScore>,
    /// Requests as far above the median that no injection touched, by the line they were laid to.
    pub untouched: BTreeMap<&'static str, u64>,
}

/// What the attribution made of requests whose cause ought to be one line.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LineScore {
    /// How many.
    pub n: u64,
    /// What they were laid to.
    pub attributed: BTreeMap<&'static str, u64>,
    /// Of those laid to the right line: how many had a culprit to be named.
    pub culprits: u64,
    /// And how many got its name.
    pub culprits_right: u64,
    /// Latency above the median, ns.
    pub added_ns: u64,
    /// The part of it that the ledger has on the right line, ns.
    pub on_line_ns: u64,
}

/// One cause over all cases; shares are 0 to 1, `None` without anything to share.
#[derive(Clone, Debug, Serialize)]
pub struct CauseScore {
    /// Of the requests laid to it, how many ought to be.
    pub precision: Option<f64>,
    /// Of the requests that ought to be laid to it, how many were.
    pub recall: Option<f64>,
    /// Of those, how many got the right culprit's name; `None` for a cause that has none.
    pub culprit_right: Option<f64>,
    /// How much of the latency above the median is on its line.
    pub time_on_line: Option<f64>,
    /// Requests that ought to be laid to it.
    pub n: u64,
}

/// What is blamed where nothing was injected.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Baseline {
    /// Requests of the run without injections.
    pub requests: u64,
    /// Those far above the median, by the line they were laid to.
    pub blamed: BTreeMap<&'static str, u64>,
}

/// The result of the suite.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Seed of the suite.
    pub seed: u64,
    /// Requests by what was injected and what they were laid to.
    pub matrix: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// By cause.
    pub causes: BTreeMap<&'static str, CauseScore>,
    /// The run without injections.
    pub baseline: Baseline,
    /// Case by case.
    pub cases: BTreeMap<String, CaseScore>,
}

/// Asks the recorded files, and compares.
pub(super) fn score(case: Case, results: &Path, windows: &[Window]) -> anyhow::Result<CaseScore> {
    let analysis = analyze(results)?;
    let mut sum = CaseScore {
        injections: windows.len() as u64,
        ..CaseScore::default()
    };
    let mut hit: Vec<(u32, u32, Expectation, u64)> = Vec::new();
    let mut untouched = Vec::new();
    for trial in &analysis.trials {
        let Some(median_ns) = median(trial) else { continue };
        for row in trial.rows.iter().filter(|row| row.stamps.is_measured()) {
            let Some(latency_ns) = row.stamps.latency_ns() else {
                continue;
            };
            sum.requests += 1;
            let added_ns = latency_ns.saturating_sub(median_ns);
            if added_ns < HIT_NS_MIN {
                continue;
            }
            let number = (trial.trial.index, row.stamps.request);
            match meeting(case, &row.stamps, added_ns, windows) {
                Meeting::Hit { is_victim } => {
                    if let Some(expectation) = case.expects(is_victim) {
                        hit.push((number.0, number.1, expectation, added_ns));
                    }
                }
                Meeting::Touched => {}
                Meeting::None => untouched.push(number),
            }
        }
    }
    let wanted: Vec<_> = hit.iter().map(|&(trial, request, ..)| (trial, request)).collect();
    for (&(_, _, expectation, added_ns), story) in hit.iter().zip(explain(results, &wanted)?) {
        let line = sum.expected.entry(expectation.line.name()).or_default();
        line.count(expectation, added_ns, &story.outlier, &analysis);
    }
    for story in explain(results, &untouched)? {
        *sum.untouched.entry(story.outlier.cause.name()).or_default() += 1;
    }
    Ok(sum)
}

fn median(trial: &TrialRows) -> Option<u64> {
    let measured = trial.rows.iter().filter(|row| row.stamps.is_measured());
    let mut latencies: Vec<u64> = measured.filter_map(|row| row.stamps.latency_ns()).collect();
    latencies.sort_unstable();
    (!latencies.is_empty()).then(|| quantile(&latencies, 0.5))
}

enum Meeting {
    /// The injection explains its latency, or ought to.
    Hit {
        is_victim: bool,
    },
    /// An injection lies in it, but too short, or it was meant for another.
    Touched,
    None,
}

/// From the log and the load generator's stamps alone.
fn meeting(case: Case, request: &RequestStamps, added_ns: u64, windows: &[Window]) -> Meeting {
    // Where it is the smaller part, the cause is another: those that were queued before this one, for example.
    let most_ns = HIT_NS_MIN.max(added_ns / 2);
    let mut met = Meeting::None;
    for window in windows {
        let begin = window.begin_ns.max(request.intended_ns);
        let end = window.end_ns.min(request.done_ns);
        if begin > end {
            continue;
        }
        let is_victim = window.victim == Some(request.local_port);
        // Its effect on the one it was meant for may come later than the deed: a segment lost, a segment held back.
        if is_victim {
            return Meeting::Hit { is_victim };
        }
        let meets_bystanders = end - begin >= most_ns;
        met = if meets_bystanders && (window.victim.is_none() || case.has_victim()) {
            Meeting::Hit { is_victim: false }
        } else {
            match met {
                Meeting::Hit { .. } => met,
                _ => Meeting::Touched,
            }
        };
    }
    met
}

impl LineScore {
    fn count(&mut self, expectation: Expectation, added_ns: u64, said: &Outlier, analysis: &Analysis) {
        self.n += 1;
        *self.attributed.entry(said.cause.name()).or_default() += 1;
        if said.cause == expectation.line
            && let Some(name) = expectation.culprit
        {
            self.culprits += 1;
            let is_right = said
                .culprit
                .as_ref()
                .is_some_and(|culprit| culprit.contains(name));
            self.culprits_right += u64::from(is_right);
        }
        let usual = analysis
            .summary
            .arms
            .get(&said.arm)
            .and_then(|arm| arm.ledger_median.get(expectation.line.name()))
            .copied()
            .unwrap_or(0);
        self.added_ns += added_ns;
        self.on_line_ns += said
            .ledger
            .ns(expectation.line)
            .saturating_sub(usual)
            .min(added_ns);
    }

    fn right(&self, line: &str) -> u64 {
        self.attributed.get(line).copied().unwrap_or(0)
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Report {
    pub(super) fn new(seed: u64, cases: BTreeMap<String, CaseScore>) -> Self {
        let mut matrix: BTreeMap<String, BTreeMap<&'static str, u64>> = BTreeMap::new();
        let mut lines: BTreeMap<&'static str, LineScore> = BTreeMap::new();
        let mut laid: BTreeMap<&'static str, u64> = BTreeMap::new();
        for (case, score) in &cases {
            for (&line, each) in &score.expected {
                let sum = lines.entry(line).or_default();
                sum.n += each.n;
                sum.culprits += each.culprits;
                sum.culprits_right += each.culprits_right;
                sum.added_ns += each.added_ns;
                sum.on_line_ns += each.on_line_ns;
                for (&said, count) in &each.attributed {
                    *sum.attributed.entry(said).or_default() += count;
                    *laid.entry(said).or_default() += count;
                    *matrix.entry(case.clone()).or_default().entry(said).or_default() += count;
                }
            }
        }
        let causes = lines
            .iter()
            .map(|(&line, score)| {
                let right = score.right(line);
                let cause = CauseScore {
                    precision: share(right, laid.get(line).copied().unwrap_or(0)),
                    recall: share(right, score.n),
                    culprit_right: share(score.culprits_right, score.culprits),
                    time_on_line: share(score.on_line_ns, score.added_ns),
                    n: score.n,
                };
                (line, cause)
            })
            .collect();
        let nothing = cases.get(&Case::Nothing.name());
        Self {
            seed,
            matrix,
            causes,
            baseline: nothing.map_or_else(Baseline::default, |score| Baseline {
                requests: score.requests,
                blamed: score.untouched.clone(),
            }),
            cases,
        }
    }

    /// As tables for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |line: String| {
            text += line.trim_end();
            text.push('\n');
        };
        line(format!(
            "{:<22}{:<20}{:>5}{:>8}{:>9}{:>9}  {}",
            "injected", "expected cause", "n", "right", "culprit", "on line", "otherwise laid to"
        ));
        for (case, score) in &self.cases {
            if score.expected.is_empty() {
                line(format!(
                    "{case:<22}{:<20}{:>5}",
                    "nobody",
                    score.untouched.values().sum::<u64>()
                ));
            }
            for (&expected, each) in &score.expected {
                let others: Vec<String> = each
                    .attributed
                    .iter()
                    .filter(|(said, _)| **said != expected)
                    .map(|(said, count)| format!("{said} {count}"))
                    .collect();
                line(format!(
                    "{case:<22}{expected:<20}{:>5}{:>8}{:>9}{:>9}  {}",
                    each.n,
                    percent(share(each.right(expected), each.n)),
                    percent(share(each.culprits_right, each.culprits)),
                    percent(share(each.on_line_ns, each.added_ns)),
                    others.join(", ")
                ));
            }
        }
        line(String::new());
        line(format!(
            "{:<22}{:>8}{:>11}{:>9}{:>9}{:>9}",
            "cause", "n", "precision", "recall", "culprit", "on line"
        ));
        for (cause, score) in &self.causes {
            line(format!(
                "{cause:<22}{:>8}{:>11}{:>9}{:>9}{:>9}",
                score.n,
                percent(score.precision),
                percent(score.recall),
                percent(score.culprit_right),
                percent(score.time_on_line)
            ));
        }
        line(String::new());
        let blamed: u64 = self.baseline.blamed.values().sum();
        let by: Vec<_> = self
            .baseline
            .blamed
            .iter()
            .map(|(said, count)| format!("{said} {count}"))
            .collect();
        line(format!(
            "without injections {blamed} of {} requests took 1 ms more than the median: {}",
            self.baseline.requests,
            if by.is_empty() {
                "none".to_owned()
            } else {
                by.join(", ")
            }
        ));
        line(format!("seed {}", self.seed));
        text
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

impl Report {
    /// Causes that fall short of these shares of recall and precision, with their figures.
    #[must_use]
    pub fn short_of(&self, least: f64) -> Vec<String> {
        self.causes
            .iter()
            .filter(|(_, score)| {
                score.recall.is_some_and(|share| share < least)
                    || score.precision.is_some_and(|share| share < least)
            })
            .map(|(cause, score)| {
                format!(
                    "{cause}: recall {}, precision {}",
                    percent(score.recall),
                    percent(score.precision)
                )
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::ledger::Side;

    fn request(intended_ns: u64, done_ns: u64, local_port: u16) -> RequestStamps {
        RequestStamps {
            intended_ns,
            done_ns,
            local_port,
            ..RequestStamps::default()
        }
    }

    fn window(begin_ns: u64, end_ns: u64, victim: Option<u16>) -> Window {
        Window {
            begin_ns,
            end_ns,
            victim,
        }
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn a_hog_hits_whoever_it_lies_in_for_long_enough() {
        let windows = [window(10 * MS, 30 * MS, None)];
        let met = |request: RequestStamps| {
            let added_ns = request.done_ns - request.intended_ns;
            meeting(Case::Hog(Side::Server), &request, added_ns, &windows)
        };
        assert!(matches!(
            met(request(12 * MS, 31 * MS, 1)),
            Meeting::Hit { is_victim: false }
        ));
        assert!(matches!(met(request(0, 10 * MS + 5, 1)), Meeting::Touched));
        assert!(matches!(met(request(28 * MS, 40 * MS, 1)), Meeting::Touched));
        assert!(matches!(met(request(31 * MS, 40 * MS, 1)), Meeting::None));
    }

    #[test]
    fn a_lost_segment_hits_its_own_connection_only() {
        let windows = [window(10 * MS, 10 * MS, Some(7))];
        let met = |port| {
            meeting(
                Case::Loss(super::super::case::Loss::Syn),
                &request(9 * MS, 900 * MS, port),
                890 * MS,
                &windows,
            )
        };
        assert!(matches!(met(7), Meeting::Hit { is_victim: true }));
        assert!(matches!(met(8), Meeting::Touched));
    }

    #[test]
    fn a_cause_counts_against_precision_where_it_was_wrong() {
        let mut cases = BTreeMap::new();
        for (case, expected, attributed) in [
            (
                "a",
                "server.run_queue",
                [("server.run_queue", 8), ("server.throttled", 2)],
            ),
            (
                "b",
                "server.throttled",
                [("server.throttled", 6), ("server.run_queue", 0)],
            ),
        ] {
            let line = LineScore {
                n: attributed.iter().map(|(_, n)| n).sum(),
                attributed: BTreeMap::from(attributed),
                ..LineScore::default()
            };
            let score = CaseScore {
                expected: BTreeMap::from([(expected, line)]),
                ..CaseScore::default()
            };
            cases.insert(case.to_owned(), score);
        }
        let report = Report::new(1, cases);
        let throttled = &report.causes["server.throttled"];
        assert_eq!(throttled.recall, Some(1.0));
        assert_eq!(throttled.precision, Some(0.75));
        assert_eq!(report.causes["server.run_queue"].recall, Some(0.8));
        assert_eq!(report.short_of(0.9).len(), 2);
    }
}
