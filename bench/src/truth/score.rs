//! What the attribution said of the requests that an injection hit, beside what it ought to have said.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use super::{
    case::{Case, Expectation, FIFO_HOG, NEIGHBOUR, Reach},
    inject::Window,
};
use crate::{
    analyze::{Analysis, Story, TrialRows, analyze, explain},
    attribute::ledger::{Line, Side, ThreadLine},
    record::stamps::RequestStamps,
    report::summary::Outlier,
    statistics::quantile,
};

/// A request is hit if the injection took this long of it, and half of what its latency is above the median, which must be as
/// much. ns.
const HIT_NS_MIN: u64 = 1_000_000;

/// What the suite aims at, as shares: precision and recall, right culprits, injected time on the right line.
const AIM: f64 = 0.98;
const AIM_CULPRIT: f64 = 0.95;
const AIM_ON_LINE: f64 = 0.9;

/// Requests that no injection touched and that are laid to its line all the same: at most this share, or this many times the
/// share without injections.
const LEFT_SHARE_MAX: f64 = 0.01;
const LEFT_TIMES_MAX: f64 = 2.0;

/// What the attribution made of one case.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CaseScore {
    /// Injections, or pieces of them.
    pub windows: u64,
    /// Requests of all kinds.
    pub requests: u64,
    /// Requests that an injection hit and of which something is expected, by expected line.
    pub expected: BTreeMap<&'static str, LineScore>,
    /// Requests that no injection touched: taking the cause away must take the outliers away.
    pub untouched: u64,
    /// Those of them that are as far above the median as a hit is, by the line they were laid to.
    pub untouched_slow: BTreeMap<&'static str, u64>,
    /// What else must hold.
    pub checks: Vec<Check>,
}

/// Something that must hold besides causes and culprits.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// In words.
    pub what: String,
    /// Whether it does.
    pub ok: bool,
    /// By which figure.
    pub figure: String,
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
    /// Time that the injections took of them, by the log, ns.
    pub injected_ns: u64,
    /// The part of it that the ledger has on the right line, ns.
    pub on_line_ns: u64,
    /// Latency above the median, ns: with what the injection led to, such as a queue behind it.
    pub added_ns: u64,
    /// The part of that on the right line, ns.
    pub added_on_line_ns: u64,
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
    /// How much of the injected time is on its line.
    pub time_on_line: Option<f64>,
    /// How much of all latency above the median is on its line.
    pub added_on_line: Option<f64>,
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

/// A request that an injection hit.
struct Hit {
    trial: u32,
    request: u32,
    expectation: Expectation,
    is_victim: bool,
    injected_ns: u64,
    /// By windows that were meant for nobody.
    overlap_ns: u64,
    added_ns: u64,
}

/// Asks the recorded files, and compares.
pub(super) fn score(case: Case, results: &Path, windows: &[Window]) -> anyhow::Result<CaseScore> {
    let analysis = analyze(results)?;
    let mut sum = CaseScore {
        windows: windows.len() as u64,
        ..CaseScore::default()
    };
    let mut hits: Vec<Hit> = Vec::new();
    let mut untouched = Vec::new();
    for trial in &analysis.trials {
        let Some(median_ns) = median(trial) else { continue };
        for row in trial.rows.iter().filter(|row| row.stamps.is_measured()) {
            let Some(latency_ns) = row.stamps.latency_ns() else {
                continue;
            };
            sum.requests += 1;
            let added_ns = latency_ns.saturating_sub(median_ns);
            let (trial, request) = (trial.trial.index, row.stamps.request);
            match meeting(case.reach(), &row.stamps, added_ns, windows) {
                Meeting::Hit {
                    is_victim,
                    injected_ns,
                    overlap_ns,
                } => {
                    // Of two causes the greater is to be named first.
                    let is_first = case != Case::HogAndLoss || overlap_ns <= added_ns / 2;
                    if let Some(expectation) = case.expects(is_victim && is_first) {
                        hits.push(Hit {
                            trial,
                            request,
                            expectation,
                            is_victim,
                            injected_ns,
                            overlap_ns,
                            added_ns,
                        });
                    }
                }
                Meeting::Touched => {}
                Meeting::None => {
                    sum.untouched += 1;
                    if added_ns >= HIT_NS_MIN {
                        untouched.push((trial, request));
                    }
                }
            }
        }
    }
    let wanted: Vec<_> = hits.iter().map(|hit| (hit.trial, hit.request)).collect();
    let stories = explain(results, &wanted)?;
    for (hit, story) in hits.iter().zip(&stories) {
        let line = sum.expected.entry(hit.expectation.line.name()).or_default();
        line.count(hit, &story.outlier, &analysis);
    }
    // Where the whole run is the injection, every request would have to be told.
    if matches!(case, Case::Overload | Case::FewPorts) {
        untouched.clear();
    }
    for story in explain(results, &untouched)? {
        *sum.untouched_slow.entry(story.outlier.cause.name()).or_default() += 1;
    }
    sum.checks = checks(case, &analysis, &hits, &stories, &sum);
    Ok(sum)
}

/// Median latency of a trial's measured requests, ns.
pub(super) fn median(trial: &TrialRows) -> Option<u64> {
    let measured = trial.rows.iter().filter(|row| row.stamps.is_measured());
    let mut latencies: Vec<u64> = measured.filter_map(|row| row.stamps.latency_ns()).collect();
    latencies.sort_unstable();
    (!latencies.is_empty()).then(|| quantile(&latencies, 0.5))
}

#[derive(Debug, PartialEq, Eq)]
enum Meeting {
    /// The injection explains its latency, or ought to.
    Hit {
        is_victim: bool,
        injected_ns: u64,
        overlap_ns: u64,
    },
    /// An injection lies in it, but too short, or it was meant for another.
    Touched,
    None,
}

/// From the log and the load generator's stamps alone.
fn meeting(reach: Reach, request: &RequestStamps, added_ns: u64, windows: &[Window]) -> Meeting {
    let mut victim = None;
    let mut is_touched = false;
    let mut begins_in = false;
    let mut overlap_ns = 0;
    for window in windows {
        let begin = window.begin_ns.max(request.intended_ns);
        let end = window.end_ns.min(request.done_ns);
        if begin > end {
            continue;
        }
        is_touched = true;
        begins_in |= window.begin_ns <= request.intended_ns;
        if window.victim == Some(request.local_port) {
            victim = Some(window);
        } else {
            let length_ns = (window.end_ns - window.begin_ns).max(1);
            overlap_ns +=
                (u128::from(end - begin) * u128::from(window.injected_ns) / u128::from(length_ns)) as u64;
        }
    }
    let injected_ns = match (reach, victim) {
        // Its effect on the one it was meant for comes later than the deed: a segment lost, a segment held back.
        (Reach::Victim | Reach::VictimAndOverlap, Some(_)) => added_ns,
        (Reach::Handler, Some(window)) => window.injected_ns.min(added_ns),
        (Reach::Begin, _) if begins_in => added_ns,
        (Reach::Overlap | Reach::Handler | Reach::VictimAndOverlap, _) => overlap_ns.min(added_ns),
        (Reach::Nobody | Reach::Victim | Reach::Begin, _) => 0,
    };
    // Where it is the smaller part, the cause is another: those that were queued before this one, for example.
    if injected_ns >= HIT_NS_MIN.max(added_ns / 2) {
        Meeting::Hit {
            is_victim: victim.is_some(),
            injected_ns,
            overlap_ns,
        }
    } else if is_touched {
        Meeting::Touched
    } else {
        Meeting::None
    }
}

impl LineScore {
    fn count(&mut self, hit: &Hit, said: &Outlier, analysis: &Analysis) {
        let expectation = hit.expectation;
        self.n += 1;
        *self.attributed.entry(said.cause.name()).or_default() += 1;
        if said.cause == expectation.line && !expectation.culprits.is_empty() {
            self.culprits += 1;
            let is_right = said
                .culprit
                .as_ref()
                .is_some_and(|culprit| expectation.culprits.iter().any(|name| culprit.contains(name)));
            self.culprits_right += u64::from(is_right);
        }
        let usual = analysis
            .summary
            .arms
            .get(&said.arm)
            .and_then(|arm| arm.ledger_median.get(expectation.line.name()))
            .copied()
            .unwrap_or(0);
        let on_line_ns = said.ledger.ns(expectation.line).saturating_sub(usual);
        self.injected_ns += hit.injected_ns;
        self.on_line_ns += on_line_ns.min(hit.injected_ns);
        self.added_ns += hit.added_ns;
        self.added_on_line_ns += on_line_ns.min(hit.added_ns);
    }

    fn add(&mut self, other: &Self) {
        self.n += other.n;
        self.culprits += other.culprits;
        self.culprits_right += other.culprits_right;
        self.injected_ns += other.injected_ns;
        self.on_line_ns += other.on_line_ns;
        self.added_ns += other.added_ns;
        self.added_on_line_ns += other.added_on_line_ns;
        for (&said, count) in &other.attributed {
            *self.attributed.entry(said).or_default() += count;
        }
    }

    fn right(&self, line: &str) -> u64 {
        self.attributed.get(line).copied().unwrap_or(0)
    }
}

/// What a case is there for besides causes and culprits.
fn checks(case: Case, analysis: &Analysis, hits: &[Hit], stories: &[Story], sum: &CaseScore) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |what: &str, ok, figure: String| {
        checks.push(Check {
            what: what.to_owned(),
            ok,
            figure,
        });
    };
    let verdict = |rule: &str| analysis.summary.verdicts.iter().find(|each| each.rule == rule);
    let names = |outlier: &Outlier, name: &str| {
        let culprit = outlier.culprit.iter().any(|culprit| culprit.contains(name));
        culprit || outlier.evidence.iter().any(|each| each.what.contains(name))
    };
    match case {
        Case::Nothing => {
            let injected_only: u64 = sum
                .untouched_slow
                .iter()
                .filter(|(line, _)| NOT_BY_ITSELF.contains(line))
                .map(|(_, count)| count)
                .sum();
            check(
                "nobody is blamed for what only an injection does",
                injected_only == 0,
                format!("{injected_only} of {}", sum.requests),
            );
        }
        Case::Overload => {
            for rule in ["load generator in time", "load generator not saturated"] {
                let failed = verdict(rule).filter(|verdict| !verdict.ok);
                check(
                    &format!("the run's verdict on \"{rule}\" is that it is not"),
                    failed.is_some(),
                    failed.map_or("not said".to_owned(), |verdict| verdict.figure.clone()),
                );
            }
            // Whichever end is the slower, the requests queue for a thread that has too much to do.
            let by_work = |outlier: &&Outlier| {
                matches!(
                    outlier.cause,
                    Line::Thread(
                        _,
                        ThreadLine::OtherWork | ThreadLine::Compute | ThreadLine::RunQueue
                    )
                )
            };
            let right = analysis.outliers.iter().filter(by_work).count();
            check(
                "outliers are laid to work, not to waiting for something else",
                right * 10 >= analysis.outliers.len() * 9,
                format!("{right} of {}", analysis.outliers.len()),
            );
        }
        Case::FewPorts => {
            let failed = verdict("ephemeral ports").filter(|verdict| !verdict.ok);
            check(
                "the run's verdict is that ports ran out",
                failed.is_some(),
                failed.map_or("not said".to_owned(), |verdict| verdict.figure.clone()),
            );
        }
        Case::HogAndLoss => {
            let victims = || {
                let both = hits.iter().zip(stories);
                both.filter(|(hit, _)| hit.is_victim && hit.overlap_ns >= HIT_NS_MIN)
            };
            let line = Line::Thread(Side::Server, ThreadLine::RunQueue);
            let right = victims().filter(|(hit, story)| {
                let found = story.outlier.ledger.ns(line);
                found * 10 >= hit.overlap_ns * 8 && names(&story.outlier, FIFO_HOG)
            });
            let (right, all) = (right.count(), victims().count());
            check(
                "the smaller cause is on the ledger too, with its culprit in the evidence",
                right * 10 >= all * 9 && all > 0,
                format!("{right} of {all}"),
            );
        }
        Case::DelayedAckDecoy => {
            let fired = stories
                .iter()
                .filter(|story| names(&story.outlier, "delayed-ACK timer fired"));
            let (fired, all) = (fired.count(), stories.len());
            check(
                "delayed-ACK timers did fire",
                fired > 0,
                format!("in {fired} of {all}"),
            );
        }
        Case::NeighbourDecoy => {
            let named = stories.iter().filter(|story| {
                let culprit = story.outlier.culprit.as_ref();
                culprit.is_some_and(|culprit| culprit.contains(NEIGHBOUR))
            });
            let (named, all) = (named.count(), stories.len());
            check(
                "the neighbour is not named",
                named == 0,
                format!("{named} of {all}"),
            );
        }
        Case::SharedCpu => {
            for (side, name) in [(Side::Client, "pq-serve"), (Side::Server, "pq-load")] {
                let line = Line::Thread(side, ThreadLine::RunQueue);
                let budget = analysis.summary.tail_budget.values().flatten();
                let culprits: Vec<_> = budget
                    .filter(|row| row.cause == line)
                    .flat_map(|row| &row.culprits)
                    .collect();
                let all_ns: u64 = culprits.iter().map(|(_, ns)| ns).sum();
                let right = culprits.iter().filter(|(who, _)| who.contains(name));
                let right_ns: u64 = right.map(|(_, ns)| ns).sum();
                check(
                    &format!("most of the outliers' {} is {name}", line.name()),
                    right_ns * 2 > all_ns,
                    format!(
                        "{:.1} of {:.1} ms with a culprit",
                        right_ns as f64 / 1e6,
                        all_ns as f64 / 1e6
                    ),
                );
            }
        }
        _ => {}
    }
    for (folder, steal) in &analysis.summary.steal {
        check(
            &format!("{folder}: the steal counter agrees with /proc/stat"),
            steal.agree,
            format!(
                "{:.1} ms by the counter, {:.0} ms in ticks of {:.0} ms",
                steal.counter_ns as f64 / 1e6,
                steal.stat_ns as f64 / 1e6,
                steal.tick_ns as f64 / 1e6
            ),
        );
    }
    checks
}

/// Lines that stay empty on a machine where nobody interferes.
const NOT_BY_ITSELF: [&str; 10] = [
    "client.throttled",
    "server.throttled",
    "client.stopped",
    "server.stopped",
    "server.blocked",
    "server.accept_queue",
    "retransmit.syn",
    "retransmit.syn_ack",
    "retransmit.data",
    "delayed_ack",
];

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Report {
    pub(super) fn new(seed: u64, mut cases: BTreeMap<String, CaseScore>) -> Self {
        let mut matrix: BTreeMap<String, BTreeMap<&'static str, u64>> = BTreeMap::new();
        let mut lines: BTreeMap<&'static str, LineScore> = BTreeMap::new();
        let mut laid: BTreeMap<&'static str, u64> = BTreeMap::new();
        for (case, score) in &cases {
            for (&line, each) in &score.expected {
                lines.entry(line).or_default().add(each);
                for (&said, count) in &each.attributed {
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
                    time_on_line: share(score.on_line_ns, score.injected_ns),
                    added_on_line: share(score.added_on_line_ns, score.added_ns),
                    n: score.n,
                };
                (line, cause)
            })
            .collect();
        let nothing = cases.get(&Case::Nothing.name());
        let baseline = nothing.map_or_else(Baseline::default, |score| Baseline {
            requests: score.requests,
            blamed: score.untouched_slow.clone(),
        });
        for score in cases.values_mut() {
            score.check_ablation(&baseline);
        }
        Self {
            seed,
            matrix,
            causes,
            baseline,
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
            "{:<24}{:<20}{:>5}{:>9}{:>9}{:>9}{:>9}  {}",
            "injected", "expected cause", "n", "right", "culprit", "on line", "of added", "otherwise laid to"
        ));
        for (case, score) in &self.cases {
            if score.expected.is_empty() {
                line(format!("{case:<24}{:<20}{:>5}", "see below", 0));
            }
            for (&expected, each) in &score.expected {
                let others = each.attributed.iter().filter(|(said, _)| **said != expected);
                line(format!(
                    "{case:<24}{expected:<20}{:>5}{:>9}{:>9}{:>9}{:>9}  {}",
                    each.n,
                    percent(share(each.right(expected), each.n)),
                    percent(share(each.culprits_right, each.culprits)),
                    percent(share(each.on_line_ns, each.injected_ns)),
                    percent(share(each.added_on_line_ns, each.added_ns)),
                    counts(others)
                ));
            }
        }
        line(String::new());
        line(format!(
            "{:<22}{:>8}{:>11}{:>9}{:>9}{:>9}{:>9}",
            "cause", "n", "precision", "recall", "culprit", "on line", "of added"
        ));
        for (cause, score) in &self.causes {
            line(format!(
                "{cause:<22}{:>8}{:>11}{:>9}{:>9}{:>9}{:>9}  {}",
                score.n,
                percent(score.precision),
                percent(score.recall),
                percent(score.culprit_right),
                percent(score.time_on_line),
                percent(score.added_on_line),
                if score.reaches(AIM, AIM_CULPRIT, AIM_ON_LINE) {
                    ""
                } else {
                    "short of the aim"
                }
            ));
        }
        line(format!(
            "aim: precision and recall {}, culprit {}, injected time on its line {}; added: all latency above the median",
            percent(Some(AIM)),
            percent(Some(AIM_CULPRIT)),
            percent(Some(AIM_ON_LINE))
        ));
        line(String::new());
        for (case, check) in self
            .cases
            .iter()
            .flat_map(|(case, score)| score.checks.iter().map(move |check| (case, check)))
        {
            let mark = if check.ok { "ok  " } else { "FAIL" };
            line(format!("{mark} {case}: {}: {}", check.what, check.figure));
        }
        line(String::new());
        let blamed: u64 = self.baseline.blamed.values().sum();
        line(format!(
            "without injections {blamed} of {} requests took 1 ms more than the median: {}",
            self.baseline.requests,
            counts(self.baseline.blamed.iter())
        ));
        line(format!("seed {}", self.seed));
        text
    }
}

fn counts<'a>(lines: impl Iterator<Item = (&'a &'static str, &'a u64)>) -> String {
    let lines: Vec<_> = lines.map(|(said, count)| format!("{said} {count}")).collect();
    lines.join(", ")
}

impl CauseScore {
    fn reaches(&self, cause: f64, culprit: f64, on_line: f64) -> bool {
        let reaches = |share: Option<f64>, least| share.is_none_or(|share| share >= least);
        reaches(self.precision, cause)
            && reaches(self.recall, cause)
            && reaches(self.culprit_right, culprit)
            && reaches(self.time_on_line, on_line)
    }
}

impl CaseScore {
    /// Where the cause is taken away the outliers must go.
    fn check_ablation(&mut self, baseline: &Baseline) {
        let mut checks = Vec::new();
        for &line in self.expected.keys() {
            let left = self.untouched_slow.get(line).copied().unwrap_or(0);
            let usual = share(baseline.blamed.get(line).copied().unwrap_or(0), baseline.requests);
            let most = LEFT_SHARE_MAX.max(usual.unwrap_or(0.0) * LEFT_TIMES_MAX);
            checks.push(Check {
                what: format!("between the injections {line} is no cause"),
                ok: share(left, self.untouched).is_none_or(|share| share <= most),
                figure: format!("{left} of {}", self.untouched),
            });
        }
        self.checks.append(&mut checks);
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
            injected_ns: end_ns - begin_ns,
            victim,
        }
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn a_hog_hits_whoever_it_lies_in_for_long_enough() {
        let windows = [window(10 * MS, 30 * MS, None)];
        let met = |request: RequestStamps| {
            let added_ns = request.done_ns - request.intended_ns;
            meeting(Reach::Overlap, &request, added_ns, &windows)
        };
        assert_eq!(
            met(request(12 * MS, 31 * MS, 1)),
            Meeting::Hit {
                is_victim: false,
                injected_ns: 18 * MS,
                overlap_ns: 18 * MS
            }
        );
        assert!(matches!(met(request(0, 10 * MS + 5, 1)), Meeting::Touched));
        assert!(matches!(met(request(28 * MS, 40 * MS, 1)), Meeting::Touched));
        assert!(matches!(met(request(31 * MS, 40 * MS, 1)), Meeting::None));
    }

    #[test]
    fn a_lost_segment_hits_its_own_connection_only() {
        let windows = [window(10 * MS, 10 * MS, Some(7))];
        let met = |port| {
            let request = request(9 * MS, 900 * MS, port);
            meeting(Reach::Victim, &request, 890 * MS, &windows)
        };
        assert_eq!(
            met(7),
            Meeting::Hit {
                is_victim: true,
                injected_ns: 890 * MS,
                overlap_ns: 0
            }
        );
        assert_eq!(met(8), Meeting::Touched);
    }

    #[test]
    fn a_task_that_came_in_pieces_hits_for_their_sum() {
        let windows = [
            window(10 * MS, 14 * MS, None),
            window(16 * MS, 20 * MS, None),
            // Half of this one was something else.
            Window {
                injected_ns: 2 * MS,
                ..window(22 * MS, 26 * MS, None)
            },
        ];
        let request = request(12 * MS, 24 * MS, 1);
        let Meeting::Hit { injected_ns, .. } = meeting(Reach::Overlap, &request, 10 * MS, &windows) else {
            panic!("it was hit");
        };
        assert_eq!(injected_ns, 7 * MS);
    }

    #[test]
    fn whoever_begins_while_nobody_is_accepted_is_hit_however_late_the_effect() {
        let windows = [window(10 * MS, 30 * MS, None)];
        let met = |intended| {
            let request = request(intended, 1_050 * MS, 1);
            meeting(Reach::Begin, &request, 1_000 * MS, &windows)
        };
        assert!(matches!(met(12 * MS), Meeting::Hit { injected_ns, .. } if injected_ns == 1_000 * MS));
        assert_eq!(met(9 * MS), Meeting::Touched);
        assert_eq!(met(31 * MS), Meeting::None);
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
