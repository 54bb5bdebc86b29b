//! A run judges itself: each rule has a figure and a sentence that says what to do.

pub mod samples;

use self::samples::{RecorderFacts, SampleFacts};
use crate::{record::manifest::Status, report::summary::Verdict};

/// What the rules look at; shares are 0 to 1.
#[derive(Clone, Debug)]
pub struct Facts {
    /// How the run ended.
    pub status: Status,
    /// Measured requests, good or not.
    pub attempts: u64,
    /// Those that failed.
    pub errors: u64,
    /// Those among them that negotiated something else than their arm.
    pub wrong_group: u64,
    /// Requests that found no ephemeral port.
    pub no_port: u64,
    /// 99 in 100 requests began at most this long after their intended start, ns.
    pub lateness_p99_ns: u64,
    /// Where most of the time lies by which late requests of the latest cell were late, of those that ended well, and its share, 0 to 1.
    pub lateness_cause: Option<(&'static str, f64)>,
    /// Median latency of the first arm, ns.
    pub p50_ns: u64,
    /// Busiest trial of the client's and the server's worker threads: CPU time over wall time.
    pub client_busy: Option<f64>,
    /// See [`Facts::client_busy`].
    pub server_busy: Option<f64>,
    /// Of a sweep over rates, for each arm: the highest rate that is safe to quote, and why the next is not.
    pub capacity: Option<Vec<(String, f64, Option<String>)>>,
    /// Whether the kernel was recorded.
    pub probes: bool,
    /// Kernel records lost, and damaged or cut recordings.
    pub lost: u64,
    /// See [`Facts::lost`].
    pub damaged: u64,
    /// Largest clock error of any trial, ns; `None` if a trial has no alignment.
    pub clock_error_ns: Option<u64>,
    /// Share of all latency that the hypervisor stole, or that looks like it.
    pub steal_share: f64,
    /// Whether any host has a steal counter.
    pub steal_known: bool,
    /// Share of an outlier's latency that stays unexplained: median and worst over the outliers.
    pub unexplained: Option<(f64, f64)>,
    /// What the samples are like.
    pub sampled: SampleFacts,
    /// What recording took; `None` without probes.
    pub recorder: Option<RecorderFacts>,
    /// The highest quantile that is to be quoted.
    pub highest_quantile: f64,
    /// Fewest good requests of any arm.
    pub samples: u64,
    /// Trials per arm: how many differences an interval is made from.
    pub blocks: u32,
    /// Whether arms are compared.
    pub compares: bool,
    /// Differences at the median with their intervals, ns; none with one arm or one trial.
    pub differences_p50: Vec<(i64, (i64, i64))>,
}

impl Facts {
    /// Whether it is a sweep over rates of which none can be quoted: then there are no requests to judge.
    fn only_capacity(&self) -> bool {
        self.capacity.is_some() && self.attempts == 0
    }
}

/// What a cell's load did to both sides; shares are 0 to 1.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Measured requests, good or not.
    pub attempts: u64,
    /// Those that failed.
    pub errors: u64,
    /// See [`Facts::lateness_p99_ns`].
    pub lateness_p99_ns: u64,
    /// See [`Facts::client_busy`].
    pub client_busy: Option<f64>,
    /// See [`Facts::client_busy`].
    pub server_busy: Option<f64>,
    /// See [`Facts::lateness_cause`].
    pub late_by: Option<(&'static str, f64)>,
}

/// Why a cell's figures are not to be quoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unquotable {
    /// A side is saturated: by what evidence.
    Saturated(String),
    /// Requests started late, but mostly because the hypervisor took the load generator's CPU: that says nothing of the rate.
    Disturbed(String),
}

/// Why a cell's figures are not to be quoted; `None` if they are.
#[must_use]
pub fn unquotable(load: &Load) -> Option<Unquotable> {
    let mut why = Vec::new();
    for (side, busy) in [
        ("the load generator", load.client_busy),
        ("the server", load.server_busy),
    ] {
        if let Some(busy) = busy.filter(|busy| *busy > BUSY_MAX) {
            why.push((busy, format!("{side} is {:.0} % busy", busy * 100.0)));
        }
    }
    // The busier side first: it is the one that saturates.
    why.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut why: Vec<String> = why.into_iter().map(|(_, text)| text).collect();
    let is_late = load.lateness_p99_ns > LATENESS_NS_MAX;
    if is_late {
        why.push(format!(
            "requests start up to {:.1} ms late (p99)",
            load.lateness_p99_ns as f64 / 1e6
        ));
    }
    if load.errors as f64 > ERROR_SHARE_MAX * load.attempts as f64 {
        why.push(format!("{} of {} requests fail", load.errors, load.attempts));
    }
    let by_hypervisor = load.late_by.is_some_and(|(line, _)| line == CLIENT_STEAL);
    let text = why.join(", ");
    match why.len() {
        0 => None,
        1 if is_late && by_hypervisor => Some(Unquotable::Disturbed(text)),
        _ => Some(Unquotable::Saturated(text)),
    }
}

/// Name of the line for what the hypervisor took from the load generator.
const CLIENT_STEAL: &str = "client.steal";

const ERROR_SHARE_MAX: f64 = 0.001;
/// A request that starts later than this after its intended start is late, ns.
pub const LATENESS_NS_MAX: u64 = 1_000_000;
const BUSY_MAX: f64 = 0.8;
const CLOCK_ERROR_SHARE_MAX: f64 = 0.1;
const STEAL_SHARE_MAX: f64 = 0.01;
const UNEXPLAINED_MEDIAN_MAX: f64 = 0.05;

/// Of fewer blocks the spread is hardly known: with three, Student's t makes the interval 4.3 standard errors wide on each side, with
/// five 2.8, with very many 2.0.
const BLOCKS_MIN: u32 = 5;

/// Samples that must lie beyond p99.9 for it to be quoted.
const SAMPLES_BEYOND: u64 = 10;

/// Applies every rule, in the order in which a reader should learn of them.
#[must_use]
pub fn judge(facts: &Facts) -> Vec<Verdict> {
    let mut verdicts = of_the_run(facts);
    verdicts.extend(samples::judge(&facts.sampled, facts.recorder.as_ref()));
    verdicts.extend(of_the_figures(facts));
    verdicts
}

/// Whether it ran and was recorded as it should be.
fn of_the_run(facts: &Facts) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let mut rule = |rule, ok, figure, text: &str| verdicts.push(Verdict::new(rule, ok, figure, text));
    match &facts.status {
        Status::Complete => rule(
            "complete",
            true,
            "all trials".to_owned(),
            "The run ended as planned.",
        ),
        Status::Running => rule(
            "complete",
            false,
            "killed".to_owned(),
            "The run was killed: these are the trials it had recorded. Run it again for a result.",
        ),
        Status::Cut { reason } => rule(
            "complete",
            false,
            reason.clone(),
            "The run was cut short: these are the trials it had recorded. Run it again for a result.",
        ),
    }
    let share = if facts.attempts == 0 {
        1.0
    } else {
        facts.errors as f64 / facts.attempts as f64
    };
    if !facts.only_capacity() {
        rule(
            "errors",
            share <= ERROR_SHARE_MAX && facts.attempts > 0,
            format!("{} of {} requests failed", facts.errors, facts.attempts),
            "Failed requests have no latency, and their absence flatters the tail. See the kinds of error, and lower --rate if \
             they are time-outs or refusals.",
        );
    }
    rule(
        "group",
        facts.wrong_group == 0,
        format!("{} wrong", facts.wrong_group),
        "A connection over another group than its arm's measures something else. Check the server's groups.",
    );
    if facts.no_port > 0 {
        rule(
            "ephemeral ports",
            false,
            format!("{} requests found no port", facts.no_port),
            "The client ran out of ephemeral ports, so requests failed before they began. Widen net.ipv4.ip_local_port_range, \
             or lower --rate.",
        );
    }
    rule(
        "load generator in time",
        facts.lateness_p99_ns <= LATENESS_NS_MAX,
        match facts.lateness_cause {
            Some((line, share)) if facts.lateness_p99_ns > LATENESS_NS_MAX => format!(
                "p99 lateness {:.3} ms; {:.0} % of what made requests late is {line}",
                facts.lateness_p99_ns as f64 / 1e6,
                share * 100.0
            ),
            _ => format!("p99 lateness {:.3} ms", facts.lateness_p99_ns as f64 / 1e6),
        },
        "Requests that start late measure the load generator. Lower --rate, or give it more CPUs (--client-cpus).",
    );
    for (name, busy, text) in [
        (
            "load generator not saturated",
            facts.client_busy,
            "Near saturation requests queue in the load generator. Lower --rate, or give it more CPUs (--client-cpus).",
        ),
        (
            "server not saturated",
            facts.server_busy,
            "Near saturation requests queue in the server, and the arm that costs more CPU looks worse than it is. Lower \
             --rate, or give the server more CPUs (--server-cpus).",
        ),
    ] {
        if let Some(busy) = busy {
            rule(
                name,
                busy <= BUSY_MAX,
                format!("{:.1} % busy", busy * 100.0),
                text,
            );
        }
    }
    if let Some(capacity) = &facts.capacity {
        let each = |(arm, safe, why): &(String, f64, Option<String>)| {
            let why = why.as_deref().unwrap_or("the highest rate was not too much");
            match safe {
                0.0 => format!("{arm}: no rate ({why})"),
                _ => format!("{arm}: {safe}/s ({why})"),
            }
        };
        rule(
            "rates to quote",
            capacity.iter().all(|(_, safe, _)| *safe > 0.0),
            capacity.iter().map(each).collect::<Vec<_>>().join("; "),
            "Up to these rates neither side is saturated. Cells of higher rates measure a queue: do not quote them. Where none is \
             safe, sweep lower rates.",
        );
    }
    let damaged = format!("{} recordings damaged, cut or missing", facts.damaged);
    rule(
        "records complete",
        facts.lost == 0 && facts.damaged == 0,
        if facts.probes {
            format!("{} lost, {damaged}", facts.lost)
        } else {
            damaged
        },
        "Requests that overlap a loss are marked incomplete. Raise --ring-mib, or lower --rate.",
    );
    if facts.probes {
        let error = facts.clock_error_ns;
        rule(
            "clocks aligned",
            error.is_some_and(|ns| ns as f64 <= facts.p50_ns as f64 * CLOCK_ERROR_SHARE_MAX),
            error.map_or("no alignment".to_owned(), |ns| {
                format!("error at most {:.1} us", ns as f64 / 1e3)
            }),
            "Times between the hosts cannot be split more finely than this. Without alignment they stay unexplained.",
        );
        // Without a counter a late heartbeat still tells.
        if facts.steal_known || facts.steal_share > 0.0 {
            rule(
                "steal",
                facts.steal_share <= STEAL_SHARE_MAX,
                format!("{:.2} % of all latency", facts.steal_share * 100.0),
                "The hypervisor took CPUs away, or (where a heartbeat was late and no counter moved) interrupts were off. The \
                 environment-free percentiles leave that time out; --steal-max runs such trials again; a quieter machine is better.",
            );
        }
        if let Some((median, worst)) = facts.unexplained {
            rule(
                "outliers explained",
                median <= UNEXPLAINED_MEDIAN_MAX,
                format!(
                    "unexplained: median {:.1} %, worst {:.1} %",
                    median * 100.0,
                    worst * 100.0
                ),
                "What no record covers is not blamed on anybody. See which probes are missing.",
            );
        }
    }
    verdicts
}

/// Whether there is enough of it for the figures that it is to be quoted by.
fn of_the_figures(facts: &Facts) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let mut rule = |rule, ok, figure, text: &str| verdicts.push(Verdict::new(rule, ok, figure, text));
    let beyond = (facts.samples as f64 * (1.0 - facts.highest_quantile) + 1e-9) as u64;
    if !facts.only_capacity() {
        rule(
            "samples for the tail",
            beyond >= SAMPLES_BEYOND,
            format!("{beyond} samples beyond p{}", percentile(facts.highest_quantile)),
            "With fewer than 10 samples beyond it, a percentile is a matter of chance. Raise --trials, --duration or --rate, or ask \
             for a lower one (--percentile).",
        );
    }
    if facts.compares {
        rule(
            "trials",
            facts.blocks >= BLOCKS_MIN,
            format!("{} per arm", facts.blocks),
            "Trials are the independent unit. Of fewer than 5 per arm the spread is a guess, and the intervals are wide. Raise \
             --trials.",
        );
    }
    let is_shown = |&&(_, (low, high)): &&(i64, (i64, i64))| low > 0 || high < 0;
    match facts.differences_p50.as_slice() {
        [] => {}
        [one @ (difference, (low, high))] => rule(
            "effect above the spread",
            is_shown(&one),
            format!(
                "p50 {:+.1} us, 95 % interval {:+.1} to {:+.1} us",
                *difference as f64 / 1e3,
                *low as f64 / 1e3,
                *high as f64 / 1e3
            ),
            "When the interval contains 0, no difference is shown. Raise --trials.",
        ),
        many => {
            let shown = many.iter().filter(is_shown).count();
            rule(
                "effect above the spread",
                shown > 0,
                format!(
                    "p50: a difference is shown in {shown} of {} comparisons",
                    many.len()
                ),
                "When an interval contains 0, no difference is shown there: see what it excludes. Raise --trials for narrower ones.",
            );
        }
    }
    verdicts
}

/// `99.9` for 0.999, without the noise of a binary fraction.
fn percentile(quantile: f64) -> f64 {
    (quantile * 1e8).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            status: Status::Complete,
            attempts: 20_000,
            errors: 0,
            wrong_group: 0,
            no_port: 0,
            lateness_p99_ns: 50_000,
            lateness_cause: None,
            capacity: None,
            highest_quantile: 0.999,
            p50_ns: 800_000,
            client_busy: Some(0.2),
            server_busy: Some(0.1),
            probes: true,
            lost: 0,
            damaged: 0,
            clock_error_ns: Some(2_000),
            steal_share: 0.0,
            steal_known: true,
            unexplained: Some((0.01, 0.05)),
            sampled: SampleFacts::default(),
            recorder: None,
            samples: 10_000,
            blocks: 5,
            compares: true,
            differences_p50: vec![(80_000, (70_000, 90_000))],
        }
    }

    fn failed(facts: &Facts) -> Vec<&'static str> {
        judge(facts)
            .into_iter()
            .filter(|verdict| !verdict.ok)
            .map(|verdict| verdict.rule)
            .collect()
    }

    #[test]
    fn what_the_hypervisor_delays_is_disturbed_and_what_the_rate_does_is_saturated() {
        let late = |line| Load {
            attempts: 1_000,
            errors: 0,
            lateness_p99_ns: 2_000_000,
            client_busy: Some(0.3),
            server_busy: Some(0.2),
            late_by: Some((line, 0.6)),
        };
        assert!(matches!(
            unquotable(&late(CLIENT_STEAL)),
            Some(Unquotable::Disturbed(_))
        ));
        assert!(matches!(
            unquotable(&late("client.other_work")),
            Some(Unquotable::Saturated(_))
        ));
        let both = Load {
            client_busy: Some(0.9),
            ..late(CLIENT_STEAL)
        };
        let Some(Unquotable::Saturated(why)) = unquotable(&both) else {
            panic!("a busy load generator is saturated, whatever the hypervisor does");
        };
        assert!(why.contains("90 % busy") && why.contains("2.0 ms late"), "{why}");
        let in_time = Load {
            lateness_p99_ns: 0,
            late_by: None,
            ..both
        };
        assert_eq!(
            unquotable(&Load {
                client_busy: Some(0.3),
                ..in_time
            }),
            None
        );
    }

    #[test]
    fn a_sweep_without_a_rate_to_quote_fails_for_that_alone() {
        let facts = Facts {
            attempts: 0,
            samples: 0,
            capacity: Some(vec![("x25519".to_owned(), 0.0, None)]),
            ..good()
        };
        assert_eq!(failed(&facts), ["rates to quote"]);
    }

    #[test]
    fn a_good_run_passes_and_each_fault_fails_its_own_rule() {
        assert_eq!(failed(&good()), [""; 0]);
        type Break = fn(&mut Facts);
        let broken: [(Break, &str); 12] = [
            (|f| f.status = Status::Running, "complete"),
            (|f| f.errors = 100, "errors"),
            (|f| f.wrong_group = 1, "group"),
            (|f| f.lateness_p99_ns = 5_000_000, "load generator in time"),
            (|f| f.client_busy = Some(0.95), "load generator not saturated"),
            (|f| f.server_busy = Some(0.95), "server not saturated"),
            (|f| f.lost = 1, "records complete"),
            (|f| f.clock_error_ns = None, "clocks aligned"),
            (|f| f.steal_share = 0.2, "steal"),
            (|f| f.unexplained = Some((0.2, 0.9)), "outliers explained"),
            (|f| f.samples = 9_000, "samples for the tail"),
            (|f| f.blocks = 3, "trials"),
        ];
        for (breaks, rule) in broken {
            let mut facts = good();
            breaks(&mut facts);
            assert_eq!(failed(&facts), [rule]);
        }
    }

    #[test]
    fn a_run_without_requests_is_no_result() {
        assert!(
            failed(&Facts {
                attempts: 0,
                samples: 0,
                ..good()
            })
            .contains(&"errors")
        );
    }
}
