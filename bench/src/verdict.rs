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
    /// Median latency of the first arm, ns.
    pub p50_ns: u64,
    /// Busiest trial of the client's and the server's worker threads: CPU time over wall time.
    pub client_busy: Option<f64>,
    /// See [`Facts::client_busy`].
    pub server_busy: Option<f64>,
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
    /// Fewest good requests of any arm.
    pub samples: u64,
    /// Trials per arm: how many differences an interval is made from.
    pub blocks: u32,
    /// Whether arms are compared.
    pub compares: bool,
    /// Difference at the median with its interval, ns, of the second arm; `None` with one arm or one trial.
    pub difference_p50: Option<(i64, (i64, i64))>,
}

const ERROR_SHARE_MAX: f64 = 0.001;
const LATENESS_NS_MAX: u64 = 1_000_000;
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
    let mut verdicts = Vec::new();
    let mut rule = |rule, ok, figure: String, text: &str| {
        verdicts.push(Verdict {
            rule,
            ok,
            figure,
            text: text.to_owned(),
        });
    };
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
    rule(
        "errors",
        share <= ERROR_SHARE_MAX && facts.attempts > 0,
        format!("{} of {} requests failed", facts.errors, facts.attempts),
        "Failed requests have no latency, and their absence flatters the tail. See the kinds of error, and lower --rate if \
         they are time-outs or refusals.",
    );
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
        format!("p99 lateness {:.3} ms", facts.lateness_p99_ns as f64 / 1e6),
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
                 environment-free percentiles leave that time out; a quieter machine is better.",
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
    verdicts.extend(samples::judge(&facts.sampled, facts.recorder.as_ref()));
    let mut rule = |rule, ok, figure: String, text: &str| {
        verdicts.push(Verdict {
            rule,
            ok,
            figure,
            text: text.to_owned(),
        });
    };
    let beyond = facts.samples / 1000;
    rule(
        "samples for p99.9",
        beyond >= SAMPLES_BEYOND,
        format!("{beyond} samples beyond it"),
        "With fewer than 10 samples beyond it, p99.9 is a matter of chance. Raise --trials, --duration or --rate.",
    );
    if facts.compares {
        rule(
            "trials",
            facts.blocks >= BLOCKS_MIN,
            format!("{} per arm", facts.blocks),
            "Trials are the independent unit. Of fewer than 5 per arm the spread is a guess, and the intervals are wide. Raise \
             --trials.",
        );
    }
    if let Some((difference, (low, high))) = facts.difference_p50 {
        rule(
            "effect above the spread",
            low > 0 || high < 0,
            format!(
                "p50 {:+.1} us, 95 % interval {:+.1} to {:+.1} us",
                difference as f64 / 1e3,
                low as f64 / 1e3,
                high as f64 / 1e3
            ),
            "When the interval contains 0, no difference is shown. Raise --trials.",
        );
    }
    verdicts
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
            difference_p50: Some((80_000, (70_000, 90_000))),
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
            (|f| f.samples = 9_000, "samples for p99.9"),
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
