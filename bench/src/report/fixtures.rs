//! A small run made by hand: two arms, six trials, outliers of several causes, names that want to break the page.

use std::collections::BTreeMap;

use super::summary::{
    ArmSummary, BudgetRow, CellSummary, ClockSummary, ConditionSummary, Decomposition, Difference, Effect,
    Evidence, HostSummary, Lane, LaneMark, LaneSpan, LossSummary, NullSummary, OneWay, Outlier, Percentiles,
    SUMMARY_SCHEMA, SetAside, ShiftSummary, StealSummary, Summary, SwimLanes, TrialSummary, Verdict,
};
use crate::{
    attribute::ledger::{Ledger, Line, Segment, Side, ThreadLine},
    plan::{Arm, Arrivals, Cell, Plan, condition::Condition},
    record::manifest::{ProbeStatus, Status},
};

/// Everything a report is made from.
pub(super) struct Sample {
    /// The summary.
    pub(super) summary: Summary,
    /// Worst first.
    pub(super) outliers: Vec<Outlier>,
    /// Of some outliers.
    pub(super) lanes: Vec<SwimLanes>,
}

const SERVER_RUN_QUEUE: Line = Line::Thread(Side::Server, ThreadLine::RunQueue);
const SERVER_COMPUTE: Line = Line::Thread(Side::Server, ThreadLine::Compute);
const CLIENT_COMPUTE: Line = Line::Thread(Side::Client, ThreadLine::Compute);
const CLIENT_WAKEUP: Line = Line::Thread(Side::Client, ThreadLine::Wakeup);
const SERVER_STEAL: Line = Line::Thread(Side::Server, ThreadLine::Steal);
const CLIENT_SOFTIRQ: Line = Line::Thread(Side::Client, ThreadLine::Softirq);
const CLIENT_OTHER: Line = Line::Thread(Side::Client, ThreadLine::OtherWork);

fn plan(arms: &[Arm]) -> Plan {
    Plan {
        scenario: "loopback <script>alert(1)</script>".to_owned(),
        arms: arms.to_vec(),
        trials_per_arm: 3,
        rate_hz: 300.0,
        duration_ns: 30_000_000_000,
        warmup_ns: 2_000_000_000,
        arrivals: Arrivals::Poisson,
        seed: 42,
        timeout_ns: 5_000_000_000,
        probes: true,
        conditions: crate::plan::nothing_varied(),
        highest_quantile: crate::plan::usual_quantile(),
        first_stage: None,
    }
}

fn percentiles(shift_ns: u64, tail_ns: u64) -> Percentiles {
    Percentiles {
        min: 412_000 + shift_ns,
        mean: 831_000 + shift_ns,
        p50: 790_000 + shift_ns,
        p95: 1_240_000 + shift_ns,
        p99: 2_310_000 + shift_ns + tail_ns / 10,
        p999: 12_800_000 + tail_ns,
        max: 1_021_300_000 + tail_ns,
    }
}

fn curve(percentiles: &Percentiles) -> Vec<(f64, u64)> {
    let known = [
        (0.0, percentiles.min),
        (0.5, percentiles.p50),
        (0.9, percentiles.p50 + 260_000),
        (0.95, percentiles.p95),
        (0.99, percentiles.p99),
        (0.999, percentiles.p999),
        (0.9999, percentiles.p999 * 3),
        (1.0, percentiles.max),
    ];
    let mut curve = Vec::new();
    for pair in known.windows(2) {
        let [(q0, y0), (q1, y1)] = [pair[0], pair[1]];
        for step in 0..8 {
            let t = f64::from(step) / 8.0;
            curve.push((q0 + (q1 - q0) * t, y0 + ((y1 - y0) as f64 * t * t) as u64));
        }
    }
    curve.push(known[7]);
    curve
}

fn host(kernel: &str) -> HostSummary {
    HostSummary {
        kernel: kernel.to_owned(),
        machine: "aarch64".to_owned(),
        cpu_model: Some("Neoverse-V1".to_owned()),
        cpus_online: 2,
        cpus: vec![1],
        clocksource: Some("arch_sys_counter".to_owned()),
        governor: None,
        congestion_control: Some("cubic".to_owned()),
    }
}

fn arm(shift_ns: u64, tail_ns: u64, first_trial: u32) -> ArmSummary {
    let all = percentiles(shift_ns, tail_ns);
    let trial = |number: u32| {
        let mut each = all;
        each.p99 += u64::from(number * 37 % 5) * 110_000;
        TrialSummary {
            trial: first_trial + number * 2,
            requests: 8_990 + u64::from(number),
            percentiles_ns: each,
            counterfactual_ns: each,
        }
    };
    ArmSummary {
        arm: String::new(),
        condition: String::new(),
        requests: 26_973,
        errors: BTreeMap::from([("timeout".to_owned(), 2), ("wrong-group".to_owned(), 1)]),
        percentiles_ns: all,
        service_percentiles_ns: percentiles(shift_ns.saturating_sub(12_000), tail_ns / 2),
        counterfactual_ns: Percentiles {
            p99: 1_810_000 + shift_ns,
            p999: 2_900_000 + shift_ns,
            max: 9_100_000,
            ..all
        },
        trials: (0..3).map(trial).collect(),
        one_way: [
            ("SYN", 31_000, 58_000),
            ("SYN-ACK", 28_500, 61_200),
            ("client flight 1", 30_100 + shift_ns.cast_signed() / 50, 64_000),
        ]
        .map(|(what, p50_ns, p99_ns)| OneWay {
            what: what.to_owned(),
            count: 26_970,
            p50_ns,
            p99_ns,
        })
        .to_vec(),
        ledger_median: BTreeMap::from([
            ("client.compute", 241_000 + shift_ns / 2),
            ("client.wakeup", 61_000),
            ("client.softirq", 22_000),
            ("server.compute", 304_000 + shift_ns / 2),
            ("server.wakeup", 48_000),
            ("server.run_queue", 9_000),
            ("network", 83_000),
            ("unexplained", 22_000),
        ]),
        ledger_tail: BTreeMap::from([
            ("client.compute", 252_000 + shift_ns / 2),
            ("client.other_work", 320_000),
            ("client.wakeup", 92_000),
            ("client.softirq", 60_000),
            ("server.compute", 330_000 + shift_ns / 2),
            ("server.run_queue", 2_904_000 + tail_ns / 4),
            ("server.steal", 1_302_000),
            ("server.throttled", 604_000),
            ("network", 102_000),
            ("retransmit.syn", 2_110_000),
            ("unexplained", 88_000),
        ]),
        curve: curve(&all),
        client_cpu_ns_per_request: Some(352_000 + shift_ns / 2),
        server_cpu_ns_per_request: Some(391_000 + shift_ns / 2),
        bytes_out: 1_402 + shift_ns / 80,
        bytes_in: 2_930 + shift_ns / 80,
    }
}

fn ledger(lines: &[(Line, u64)]) -> Ledger {
    let mut ledger = Ledger::default();
    for &(line, ns) in lines {
        ledger.charge(line, ns);
    }
    ledger
}

fn outlier(request: u32, arm: Arm, trial: u32, lines: &[(Line, u64)], culprit: Option<&str>) -> Outlier {
    let ledger = ledger(lines);
    let (cause, excess_ns) = lines
        .iter()
        .copied()
        .max_by_key(|&(_, ns)| ns)
        .expect("an outlier has lines");
    Outlier {
        request,
        arm: arm.name().to_owned(),
        trial,
        latency_ns: ledger.total_ns(),
        ledger,
        cause,
        culprit: culprit.map(str::to_owned),
        excess_ns,
        share: excess_ns as f64 / ledger.total_ns() as f64,
        incomplete: request.is_multiple_of(2),
        evidence: vec![Evidence {
            at_ns: 410_000,
            duration_ns: excess_ns,
            line: cause,
            what: format!("CPU 1 ran {}", culprit.unwrap_or("nobody")),
        }],
    }
}

/// Outliers of two arms, worst first.
pub(super) fn outliers() -> Vec<Outlier> {
    let compute = [
        (CLIENT_COMPUTE, 250_000),
        (SERVER_COMPUTE, 310_000),
        (CLIENT_WAKEUP, 70_000),
    ];
    let with = |line, ns| {
        let mut lines = compute.to_vec();
        lines.push((line, ns));
        lines
    };
    let (old, new) = (Arm::X25519, Arm::X25519mlkem768);
    vec![
        outlier(
            811,
            new,
            2,
            &with(Line::Retransmit(Segment::Syn), 1_021_000_000),
            Some("drop: NETFILTER_DROP"),
        ),
        outlier(
            4_021,
            old,
            3,
            &with(SERVER_RUN_QUEUE, 38_400_000),
            Some("<script>alert('x')</script>/4711"),
        ),
        outlier(
            77,
            new,
            0,
            &with(SERVER_RUN_QUEUE, 12_100_000),
            Some("stress-ng-cpu/5120 & \"friends\""),
        ),
        outlier(2_044, old, 1, &with(SERVER_STEAL, 9_700_000), Some("hypervisor")),
        outlier(
            6_127,
            new,
            4,
            &with(CLIENT_SOFTIRQ, 6_300_000),
            Some("NET_RX (vector 3)"),
        ),
        outlier(311, new, 4, &with(CLIENT_OTHER, 5_200_000), None),
        outlier(905, old, 5, &with(Line::Unexplained, 4_100_000), None),
    ]
}

fn span(start_us: i64, end_us: i64, class: &'static str, label: &str) -> LaneSpan {
    LaneSpan {
        start_ns: start_us * 1_000,
        end_ns: end_us * 1_000,
        class,
        label: label.to_owned(),
    }
}

fn mark(at_us: i64, label: &str) -> LaneMark {
    LaneMark {
        at_ns: at_us * 1_000,
        label: label.to_owned(),
    }
}

/// The lanes of one outlier in which the server waits from 410 µs on for `wait_us`.
pub(super) fn swim_lanes(outlier: &Outlier) -> SwimLanes {
    let end = (outlier.latency_ns / 1_000) as i64;
    let resumed = end - 420;
    let culprit = outlier.culprit.as_deref().unwrap_or("other");
    let lane = |name: &str, spans: Vec<LaneSpan>, marks: Vec<LaneMark>| Lane {
        name: name.to_owned(),
        spans,
        marks,
    };
    SwimLanes {
        request: outlier.request,
        arm: outlier.arm.clone(),
        trial: outlier.trial,
        latency_ns: outlier.latency_ns,
        lanes: vec![
            lane(
                "client thread",
                vec![
                    span(0, 12, "other", "request 4020"),
                    span(12, 180, "run", "connect, ClientHello"),
                    span(180, end - 130, "sleep", ""),
                    span(end - 130, end - 118, "runnable", ""),
                    span(end - 118, end, "run", "verify, request"),
                ],
                vec![
                    mark(12, "start"),
                    mark(95, "connected"),
                    mark(180, "ClientHello written"),
                    mark(end - 110, "first server byte"),
                    mark(end - 60, "handshake done"),
                    mark(end, "done"),
                ],
            ),
            lane(
                "client CPU 0",
                vec![
                    span(0, 180, "run", "pqtail-load"),
                    span(180, end - 140, "idle", ""),
                    span(end - 140, end - 130, "softirq", "NET_RX"),
                    span(end - 130, end, "run", "pqtail-load"),
                ],
                vec![],
            ),
            lane(
                "wire",
                vec![
                    span(40, 60, "wire", "SYN"),
                    span(62, 84, "wire", "SYN-ACK"),
                    span(178, 205, "wire", "ClientHello 1,216 B"),
                    span(end - 170, end - 141, "wire", "server flight"),
                ],
                vec![
                    mark(40, "SYN"),
                    mark(62, "SYN-ACK"),
                    mark(86, "ACK"),
                    mark(178, "ClientHello"),
                    mark(end - 170, "ServerHello"),
                ],
            ),
            lane(
                "server CPU 1",
                vec![
                    span(0, 205, "idle", ""),
                    span(205, 214, "irq", "virtio0"),
                    span(214, 230, "softirq", "NET_RX"),
                    span(230, resumed, "other", culprit),
                    span(resumed, end - 160, "run", "pqtail-serve"),
                    span(end - 160, end, "idle", ""),
                ],
                vec![],
            ),
            lane(
                "server thread",
                vec![
                    span(0, 228, "sleep", ""),
                    span(228, resumed, "runnable", "waits for its CPU"),
                    span(resumed, end - 160, "run", "encapsulate, sign"),
                    span(end - 160, end, "sleep", ""),
                ],
                vec![
                    mark(228, "woken"),
                    mark(resumed, "runs"),
                    mark(end - 172, "flight written"),
                ],
            ),
        ],
    }
}

/// A valid run of two arms with three trials each.
pub(super) fn two_arms() -> Sample {
    let names = [Arm::X25519, Arm::X25519mlkem768];
    let [old, new] = names.map(|arm| arm.name().to_owned());
    let outliers = outliers();
    let lanes = outliers[..4].iter().map(swim_lanes).collect();
    let effect = |ns: i64, half: i64| Effect {
        difference_ns: ns,
        blocks: 5,
        interval_ns: Some((ns - half, ns + half)),
        detectable_ns: Some(half.unsigned_abs() * 13 / 10),
    };
    let difference = |statistic, ns: i64, half: i64| Difference {
        arm: new.clone(),
        baseline: old.clone(),
        statistic,
        effect: effect(ns, half),
        without_environment: Some(effect(ns * 9 / 10, half / 3)),
    };
    let decomposition = |statistic, lines: &[(&'static str, i64)]| Decomposition {
        arm: new.clone(),
        baseline: old.clone(),
        statistic,
        difference_ns: lines.iter().map(|(_, ns)| ns).sum(),
        lines: lines.iter().copied().collect(),
    };
    let budget = |cause, outliers, excess_ns, share, culprits: &[(&str, u64)]| BudgetRow {
        cause,
        outliers,
        excess_ns,
        share,
        culprits: culprits.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect(),
    };
    let verdict = |rule, figure: &str, text: &str| Verdict {
        rule,
        ok: true,
        figure: figure.to_owned(),
        text: text.to_owned(),
    };
    let probe = |name: &str, reason: &str, consequence: &str| ProbeStatus {
        name: name.to_owned(),
        attached: reason.is_empty(),
        reason: reason.to_owned(),
        consequence: consequence.to_owned(),
    };
    let summary = Summary {
        conditions: Vec::new(),
        schema: SUMMARY_SCHEMA,
        pqtail: "0.1.0".to_owned(),
        begun: "2026-11-30T08:00:00Z".to_owned(),
        hosts: BTreeMap::from([("client", host("6.8.0-aws")), ("server", host("6.1.0-cloud"))]),
        plan: plan(&names),
        status: Status::Complete,
        valid: true,
        verdicts: vec![
            verdict(
                "late-start",
                "p99 21 µs",
                "The load generator started requests on time.",
            ),
            verdict("lost-records", "0 of 1,204,113", "No kernel record was lost."),
            verdict("steal", "0.1 % of CPU time", "The hypervisor took little time."),
            verdict(
                "spread",
                "9 % of p99",
                "Trials of one arm agree well enough to show the difference.",
            ),
        ],
        arms: BTreeMap::from([
            (old.clone(), arm(0, 0, 0)),
            (new.clone(), arm(104_000, 2_400_000, 1)),
        ]),
        differences: vec![
            difference("mean", 104_000, 12_000),
            difference("p50", 104_000, 6_000),
            difference("p95", 109_000, 31_000),
            difference("p99", 344_000, 410_000),
            difference("p99.9", 2_400_000, 3_000_000),
        ],
        null: ["mean", "p50", "p95", "p99", "p99.9"]
            .map(|statistic| NullSummary {
                arm: Arm::X25519.name().to_owned(),
                statistic,
                comparisons: 200,
                false_alarms: 9,
            })
            .to_vec(),
        known_shifts: vec![ShiftSummary {
            arm: Arm::X25519.name().to_owned(),
            shift_ns: 50_000,
            effect: effect(51_300, 2_100),
            comparisons: 200,
            blocks_each: 5,
            covered: 188,
        }],
        decomposition: vec![
            decomposition(
                "p50",
                &[
                    ("client.compute", 41_000),
                    ("server.compute", 52_000),
                    ("network", 14_000),
                    ("client.wakeup", -3_000),
                ],
            ),
            decomposition(
                "p99",
                &[
                    ("client.compute", 50_000),
                    ("server.compute", 54_000),
                    ("server.run_queue", 300_000),
                    ("server.steal", -82_000),
                    ("network", 22_000),
                ],
            ),
        ],
        tail_budget: BTreeMap::from([
            (
                old.clone(),
                vec![
                    budget(
                        SERVER_RUN_QUEUE,
                        120,
                        912_000_000,
                        0.66,
                        &[
                            ("<script>alert('x')</script>/4711", 800_000_000),
                            ("ksoftirqd/1", 90_000_000),
                        ],
                    ),
                    budget(
                        SERVER_STEAL,
                        41,
                        402_000_000,
                        0.29,
                        &[("hypervisor", 402_000_000)],
                    ),
                    budget(Line::Unexplained, 6, 24_000_000, 0.05, &[]),
                ],
            ),
            (
                new.clone(),
                vec![
                    budget(
                        Line::Retransmit(Segment::Syn),
                        1,
                        1_021_000_000,
                        0.52,
                        &[("drop: NETFILTER_DROP", 1_021_000_000)],
                    ),
                    budget(
                        SERVER_RUN_QUEUE,
                        131,
                        930_000_000,
                        0.44,
                        &[("stress-ng-cpu/5120 & \"friends\"", 880_000_000)],
                    ),
                    budget(
                        CLIENT_SOFTIRQ,
                        9,
                        61_000_000,
                        0.04,
                        &[("NET_RX (vector 3)", 61_000_000)],
                    ),
                ],
            ),
        ]),
        losses: BTreeMap::from([(
            "raw/client".to_owned(),
            LossSummary {
                records: 1_204_113,
                bytes: 38_531_616,
                lost: BTreeMap::from([("sched_switch".to_owned(), 12)]),
                damaged: 0,
                drain_cpu_ns: 1_310_000_000,
                ring_used_max: 0.31,
            },
        )]),
        set_aside: Some(SetAside {
            steal_share_max: 0.07,
            trials: BTreeMap::from([(old, 2), (new, 1)]),
            kept: 1,
            unknown: 0,
        }),
        steal: BTreeMap::from([(
            "raw/client".to_owned(),
            StealSummary {
                counter_ns: 17_320_996,
                stat_ns: 20_000_000,
                tick_ns: 10_000_000,
                agree: true,
            },
        )]),
        probes: BTreeMap::from([(
            "client".to_owned(),
            vec![
                probe("sched_switch", "", "run queue and culprits"),
                probe(
                    "kfree_skb",
                    "tracepoint has no <reason> on this kernel",
                    "drops are seen, but not why",
                ),
            ],
        )]),
        clock: ClockSummary {
            handshakes: 51_204,
            shared_kernel: false,
            offset_ns: Some(-1_284_003),
            drift_ns_per_s: Some(-412.5),
            error_ns_max: Some(8_400),
        },
    };
    Sample {
        summary,
        outliers,
        lanes,
    }
}

/// The same run, judged unfit.
pub(super) fn invalid() -> Sample {
    let mut sample = two_arms();
    sample.summary.valid = false;
    sample.summary.verdicts[2] = Verdict {
        rule: "steal",
        ok: false,
        figure: "7.3 % of CPU time".to_owned(),
        text: "The hypervisor took the CPUs away for longer than the effect lasts: use hosts with dedicated cores, or \
               run at another hour, and compare the rows without environment causes until then."
            .to_owned(),
    };
    sample
}

/// A run that measured nothing.
pub(super) fn empty() -> Sample {
    let mut sample = two_arms();
    let none = ArmSummary {
        arm: String::new(),
        condition: String::new(),
        requests: 0,
        errors: BTreeMap::new(),
        percentiles_ns: Percentiles::default(),
        service_percentiles_ns: Percentiles::default(),
        counterfactual_ns: Percentiles::default(),
        trials: vec![],
        ledger_median: BTreeMap::new(),
        ledger_tail: BTreeMap::new(),
        curve: vec![],
        one_way: vec![],
        client_cpu_ns_per_request: None,
        server_cpu_ns_per_request: None,
        bytes_out: 0,
        bytes_in: 0,
    };
    for arm in sample.summary.arms.values_mut() {
        *arm = none.clone();
    }
    sample.summary.status = Status::Running;
    sample.summary.differences.clear();
    sample.summary.null.clear();
    sample.summary.known_shifts.clear();
    sample.summary.decomposition.clear();
    sample.summary.tail_budget.clear();
    sample.summary.losses.clear();
    sample.summary.steal.clear();
    sample.summary.probes.clear();
    sample.summary.verdicts.clear();
    sample.summary.clock = ClockSummary::default();
    sample.outliers.clear();
    sample.lanes.clear();
    sample
}

/// One arm alone: nothing to compare.
pub(super) fn one_arm() -> Sample {
    let mut sample = two_arms();
    let name = Arm::X25519.name();
    sample.summary.plan.arms = vec![Arm::X25519];
    sample.summary.arms.retain(|each, _| each == name);
    sample.summary.tail_budget.retain(|each, _| each == name);
    sample.summary.differences.clear();
    sample.summary.decomposition.clear();
    sample.outliers.retain(|outlier| outlier.arm == name);
    sample.lanes.retain(|lanes| lanes.arm == name);
    sample
}

/// Every arm there is.
pub(super) fn seven_arms() -> Sample {
    let mut sample = two_arms();
    sample.summary.plan.arms = Arm::ALL.to_vec();
    for (position, each) in Arm::ALL.into_iter().enumerate() {
        let shift_ns = position as u64 * 51_000;
        sample.summary.arms.insert(
            each.name().to_owned(),
            arm(shift_ns, shift_ns * 9, position as u32),
        );
        if position > 1 {
            let mut more = sample.summary.differences[..5].to_vec();
            for difference in &mut more {
                difference.arm = each.name().to_owned();
                difference.effect.interval_ns = None;
            }
            sample.summary.differences.extend(more);
        }
    }
    sample
}

/// Two arms under two conditions; under the second, which makes everything slower, no difference is shown and one arm is disturbed.
pub(super) fn sweep() -> Sample {
    let mut sample = two_arms();
    let summary = &mut sample.summary;
    let large = Condition {
        response_bytes: 1_000_000,
        ..Condition::default()
    };
    summary.plan.conditions.push(large);
    let plan = summary.plan.clone();
    let arms = std::mem::take(&mut summary.arms);
    let differences = std::mem::take(&mut summary.differences);
    for condition in 0..2 {
        let name = |arm| plan.cell_name(Cell { condition, arm });
        let mut cells = Vec::new();
        for arm in [Arm::X25519, Arm::X25519mlkem768] {
            let mut of_cell = arms[arm.name()].clone();
            arm.name().clone_into(&mut of_cell.arm);
            of_cell.condition = plan.condition_name(condition);
            summary.arms.insert(name(arm), of_cell);
            let is_disturbed = condition == 1 && arm == Arm::X25519mlkem768;
            cells.push(CellSummary {
                name: name(arm),
                arm: arm.name().to_owned(),
                achieved_hz: 299.0,
                client_busy: Some(0.4),
                server_busy: None,
                lateness_p99_ns: 2_100_000,
                saturated: None,
                disturbed: is_disturbed.then(|| "requests start up to 2.1 ms late (p99)".to_owned()),
                late_by: is_disturbed.then_some(("client.steal", 0.71)),
            });
        }
        for difference in &differences {
            let mut difference = difference.clone();
            difference.arm = name(Arm::X25519mlkem768);
            difference.baseline = name(Arm::X25519);
            for effect in std::iter::once(&mut difference.effect).chain(&mut difference.without_environment) {
                if condition == 1 {
                    effect.difference_ns = -9_000;
                    effect.interval_ns = Some((-40_000, 22_000));
                }
            }
            summary.differences.push(difference);
        }
        summary.conditions.push(ConditionSummary {
            name: plan.condition_name(condition),
            rate_hz: 300.0,
            condition: plan.conditions[condition as usize].clone(),
            cells,
        });
    }
    sample
}
