//! `summary.json`, `outliers.jsonl` and the swim-lanes: what every form of the report is made from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    attribute::ledger::{Ledger, Line},
    plan::{Plan, condition::Condition},
    record::manifest::{ProbeStatus, Status},
    statistics::interval::Estimate,
};

/// Version of `summary.json`.
pub const SUMMARY_SCHEMA: u32 = 1;

/// The whole result of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// [`SUMMARY_SCHEMA`].
    pub schema: u32,
    /// Version of the program that recorded the run.
    pub pqtail: String,
    /// When the run began, RFC 3339, UTC.
    pub begun: String,
    /// What was asked for.
    pub plan: Plan,
    /// What ran on what, by end: `client`, `server`.
    pub hosts: BTreeMap<&'static str, HostSummary>,
    /// How the run ended.
    pub status: Status,
    /// Whether all verdicts are good.
    pub valid: bool,
    /// The run's judgement of itself.
    pub verdicts: Vec<Verdict>,
    /// Result per arm, by name.
    pub arms: BTreeMap<String, ArmSummary>,
    /// What was varied besides the arms, and how each arm stood up to its load under it.
    pub conditions: Vec<ConditionSummary>,
    /// Every other arm against the first, under each condition.
    pub differences: Vec<Difference>,
    /// Every arm against itself, where it has trials enough ([`crate::statistics::null`]).
    pub null: Vec<NullSummary>,
    /// Known computing that the server added ([`Condition::server_extra_ns`]) against none, where there are trials enough.
    pub known_shifts: Vec<ShiftSummary>,
    /// The differences split by cause.
    pub decomposition: Vec<Decomposition>,
    /// Excess of the outliers by cause, per arm, greatest first.
    pub tail_budget: BTreeMap<String, Vec<BudgetRow>>,
    /// Kernel records by host folder: how many, and what was lost.
    pub losses: BTreeMap<String, LossSummary>,
    /// Every probe of every host.
    pub probes: BTreeMap<String, Vec<ProbeStatus>>,
    /// How the two hosts' clocks were brought together.
    pub clock: ClockSummary,
    /// What the hypervisor took from the measured CPUs over all trials, by host folder, where it says so.
    pub steal: BTreeMap<String, StealSummary>,
    /// What was run again because of that; `None` if it was not asked for.
    pub set_aside: Option<SetAside>,
}

/// Trials that were run again because the hypervisor took too much of a measured CPU: for no other reason, and not by their latencies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SetAside {
    /// More than this was too much, 0 to 1 ([`crate::record::manifest::Manifest::steal_share`]).
    pub steal_share_max: f64,
    /// How many of each arm, by its key in [`Summary::arms`]; none are not listed.
    pub trials: BTreeMap<String, u32>,
    /// Trials of which more was taken and that were kept, because they had been run again often enough.
    pub kept: u32,
    /// Trials of which it is not known how much was taken.
    pub unknown: u32,
}

/// Two witnesses of the same steal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StealSummary {
    /// By the hypervisor's live counter, ns.
    pub counter_ns: u64,
    /// By /proc/stat, ns: whole ticks.
    pub stat_ns: u64,
    /// Length of a tick, ns.
    pub tick_ns: u64,
    /// Whether they differ by no more than ticks can.
    pub agree: bool,
}

/// One end of the connections; what its host does not tell is absent. The manifest has more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostSummary {
    /// `uname -r`.
    pub kernel: String,
    /// `uname -m`.
    pub machine: String,
    /// CPU model.
    pub cpu_model: Option<String>,
    /// CPUs online.
    pub cpus_online: u32,
    /// CPUs that the measured threads are pinned to.
    pub cpus: Vec<u32>,
    /// Current clocksource.
    pub clocksource: Option<String>,
    /// Frequency governor.
    pub governor: Option<String>,
    /// Congestion control of TCP.
    pub congestion_control: Option<String>,
}

/// One judgement.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Short name of the rule.
    pub rule: &'static str,
    /// Whether the run passes.
    pub ok: bool,
    /// The figure it was judged by, with its unit.
    pub figure: String,
    /// What it means, and what to do if it is not ok.
    pub text: String,
}

impl Verdict {
    /// What a rule says of its figure.
    #[must_use]
    pub fn new(rule: &'static str, ok: bool, figure: String, text: &str) -> Self {
        Self {
            rule,
            ok,
            figure,
            text: text.to_owned(),
        }
    }
}

/// One condition.
#[derive(Clone, Debug, Serialize)]
pub struct ConditionSummary {
    /// As in the names of its cells; empty where there is only one.
    pub name: String,
    /// Requests per second that were asked for.
    pub rate_hz: f64,
    /// What it sets.
    pub condition: Condition,
    /// Its arms, the baseline first.
    pub cells: Vec<CellSummary>,
}

/// How one arm under one condition stood up to its load.
#[derive(Clone, Debug, Serialize)]
pub struct CellSummary {
    /// Its key in [`Summary::arms`].
    pub name: String,
    /// Its arm.
    pub arm: String,
    /// Requests per second, over the time that the trials really took.
    pub achieved_hz: f64,
    /// Busiest trial of the client's worker threads: CPU time over wall time, 0 to 1; `None` where it is not known.
    pub client_busy: Option<f64>,
    /// See [`CellSummary::client_busy`].
    pub server_busy: Option<f64>,
    /// 99 in 100 requests began at most this long after their intended start, ns.
    pub lateness_p99_ns: u64,
    /// Why its figures are not to be quoted, if so: which side is saturated, by what evidence.
    pub saturated: Option<String>,
    /// Why its figures are not to be quoted although no side is saturated, if so: what the hypervisor took made requests late.
    pub disturbed: Option<String>,
    /// The line on which most of the time lies by which late requests that ended well started late, and its share, 0 to 1; `None` if
    /// none did ([`crate::verdict::LATENESS_NS_MAX`]).
    pub late_by: Option<(&'static str, f64)>,
}

/// One arm under one condition.
#[derive(Clone, Debug, Serialize)]
pub struct ArmSummary {
    /// The arm's name.
    pub arm: String,
    /// Name of the condition; empty where there is only one.
    pub condition: String,
    /// Measured requests that ended well.
    pub requests: u64,
    /// Measured requests that did not, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Latency from the intended start.
    pub percentiles_ns: Percentiles,
    /// Time from the actual start.
    pub service_percentiles_ns: Percentiles,
    /// Latency with the excess of environment causes (steal, foreign tasks, stops, throttling) taken out.
    pub counterfactual_ns: Percentiles,
    /// Per trial.
    pub trials: Vec<TrialSummary>,
    /// Mean ledger of the middle requests, ns per request.
    pub ledger_median: BTreeMap<&'static str, u64>,
    /// Mean ledger of the outliers, ns per request.
    pub ledger_tail: BTreeMap<&'static str, u64>,
    /// Points of the latency curve: quantile in 0..1 and ns, denser towards the tail.
    pub curve: Vec<(f64, u64)>,
    /// CPU time per request of the client's and the server's worker threads, ns; `None` without requests.
    pub client_cpu_ns_per_request: Option<u64>,
    /// See [`ArmSummary::client_cpu_ns_per_request`].
    pub server_cpu_ns_per_request: Option<u64>,
    /// What each crossing of the path took, in the order of an exchange; only where the hosts have two kernels.
    pub one_way: Vec<OneWay>,
    /// Mean bytes a connection, to and from the server.
    pub bytes_out: u64,
    /// See [`ArmSummary::bytes_out`].
    pub bytes_in: u64,
}

/// One SYN, SYN-ACK or flight from where it leaves one host to where the other takes its last byte in, over all measured requests
/// in which nothing of it was sent again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OneWay {
    /// Which: `SYN`, `SYN-ACK`, `client flight 1` and so on.
    pub what: String,
    /// How many.
    pub count: u64,
    /// Median, ns. As uncertain as the alignment is ([`ClockSummary::error_ns_max`]), which is why it can be below zero.
    pub p50_ns: i64,
    /// 99 in 100, ns; as uncertain.
    pub p99_ns: i64,
}

/// Exact percentiles of all samples, ns; all zero without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Least.
    pub min: u64,
    /// Arithmetic mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 95 in 100 are at most this.
    pub p95: u64,
    /// 99 in 100.
    pub p99: u64,
    /// 999 in 1,000.
    pub p999: u64,
    /// Greatest.
    pub max: u64,
}

/// One trial.
#[derive(Clone, Debug, Serialize)]
pub struct TrialSummary {
    /// Its index in the run.
    pub trial: u32,
    /// Measured requests that ended well.
    pub requests: u64,
    /// Latency from the intended start.
    pub percentiles_ns: Percentiles,
    /// See [`ArmSummary::counterfactual_ns`].
    pub counterfactual_ns: Percentiles,
}

/// How much a figure differs, over blocks of trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Effect {
    /// Difference, ns.
    pub difference_ns: i64,
    /// Blocks of trials that it is made from, each with a trial of both sides.
    pub blocks: u32,
    /// 95 % interval over blocks, ns ([`crate::statistics::interval`]); `None` with fewer than two.
    pub interval_ns: Option<(i64, i64)>,
    /// The smallest true difference, ns, that so many blocks of this spread show in 80 of 100 runs; `None` with fewer than two.
    pub detectable_ns: Option<u64>,
}

impl From<Estimate> for Effect {
    /// Of figures in ns.
    fn from(estimate: Estimate) -> Self {
        Self {
            difference_ns: estimate.mean.round() as i64,
            blocks: estimate.blocks,
            interval_ns: estimate.interval_ns(),
            detectable_ns: estimate.detectable_ns(),
        }
    }
}

/// One statistic of one arm minus the first arm's.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The arm.
    pub arm: String,
    /// What it is compared with.
    pub baseline: String,
    /// `mean`, `p50`, `p95`, `p99` or `p99.9`.
    pub statistic: &'static str,
    /// Of the latencies from the intended start.
    #[serde(flatten)]
    pub effect: Effect,
    /// The same of what is left of them without environment causes ([`ArmSummary::counterfactual_ns`]); `None` without probes.
    pub without_environment: Option<Effect>,
}

/// The median of one arm with a known shift against the same arm without ([`crate::statistics::null::covered`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShiftSummary {
    /// The arm without it, by its key in [`Summary::arms`].
    pub arm: String,
    /// Computing that the server added to each handshake, ns.
    pub shift_ns: u64,
    /// What was measured of it at the median, over all blocks.
    #[serde(flatten)]
    pub effect: Effect,
    /// Comparisons that were cut from those blocks.
    pub comparisons: u32,
    /// Blocks of each comparison.
    pub blocks_each: u32,
    /// How many comparisons' intervals held the shift: nominally 19 in 20.
    pub covered: u32,
}

/// One statistic of one arm against itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NullSummary {
    /// The arm.
    pub arm: String,
    /// `mean`, `p50`, `p95`, `p99` or `p99.9`.
    pub statistic: &'static str,
    /// Comparisons that were cut from its trials.
    pub comparisons: u32,
    /// How many of them showed a difference, where there is none: nominally one in twenty.
    pub false_alarms: u32,
}

/// A difference split by cause: mean ledgers of the requests around a quantile, subtracted.
#[derive(Clone, Debug, Serialize)]
pub struct Decomposition {
    /// The arm.
    pub arm: String,
    /// What it is compared with.
    pub baseline: String,
    /// `p50` or `p99`.
    pub statistic: &'static str,
    /// Difference of the mean latencies of the two bands, ns; the lines sum to it up to rounding.
    pub difference_ns: i64,
    /// ns by line, only lines that differ.
    pub lines: BTreeMap<&'static str, i64>,
}

/// What one cause costs the tail of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct BudgetRow {
    /// The line.
    pub cause: Line,
    /// Outliers whose cause it is.
    pub outliers: u64,
    /// Excess over the baseline on this line, over all outliers, ns.
    pub excess_ns: u64,
    /// Its share of the whole excess, 0 to 1.
    pub share: f64,
    /// Culprits by excess, greatest first, at most five: name and ns.
    pub culprits: Vec<(String, u64)>,
}

/// What a kernel recorded and lost.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LossSummary {
    /// Records stored.
    pub records: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Records lost, by kind.
    pub lost: BTreeMap<String, u64>,
    /// Recordings without an end mark, chunks that failed their checksum, files that are not those of the manifest, and records
    /// that no machine makes.
    pub damaged: u64,
    /// CPU time of the drain, ns.
    pub drain_cpu_ns: u64,
    /// Most of the ring in use, 0 to 1.
    pub ring_used_max: f64,
}

/// How the server's clock was put onto the client's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClockSummary {
    /// Handshakes that gave four clean packet times.
    pub handshakes: u64,
    /// Whether both ends in fact share one kernel, so that the true offset is 0.
    pub shared_kernel: bool,
    /// Server clock minus client clock in the middle of the run, ns (mean over trials); `None` if it could not be found.
    pub offset_ns: Option<i64>,
    /// Drift, ns per second.
    pub drift_ns_per_s: Option<f64>,
    /// Largest error bound of any trial, ns: the truth lies within offset +- bound.
    pub error_ns_max: Option<u64>,
}

/// One outlier: a line of `outliers.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct Outlier {
    /// Number within its trial.
    pub request: u32,
    /// Arm name.
    pub arm: String,
    /// Trial index.
    pub trial: u32,
    /// Latency from the intended start, ns.
    pub latency_ns: u64,
    /// Sums to `latency_ns`.
    pub ledger: Ledger,
    /// The line with the greatest excess over the baseline.
    pub cause: Line,
    /// Who, if the evidence names one.
    pub culprit: Option<String>,
    /// Excess of the cause's line over the baseline, ns.
    pub excess_ns: u64,
    /// Share of the request's whole excess that it explains, 0 to 1.
    pub share: f64,
    /// Whether records were lost in an interval of this request: then the ledger is incomplete.
    pub incomplete: bool,
    /// What was seen.
    pub evidence: Vec<Evidence>,
}

/// One observation behind a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// When it began, ns after the intended start.
    pub at_ns: i64,
    /// How long it lasted, ns.
    pub duration_ns: u64,
    /// The ledger line it supports.
    pub line: Line,
    /// What it was, in words: `CPU 1 ran stress-ng/4711`.
    pub what: String,
}

/// What happened around one request, as lanes over time.
#[derive(Clone, Debug, Serialize)]
pub struct SwimLanes {
    /// Number within its trial.
    pub request: u32,
    /// Arm name.
    pub arm: String,
    /// Trial index.
    pub trial: u32,
    /// Latency, ns: the lanes run from 0 (intended start) to this.
    pub latency_ns: u64,
    /// Client thread, client CPU, wire, server CPU, server thread, in this order.
    pub lanes: Vec<Lane>,
}

/// One lane.
#[derive(Clone, Debug, Serialize)]
pub struct Lane {
    /// Its heading.
    pub name: String,
    /// Stretches of time, not overlapping, ascending.
    pub spans: Vec<LaneSpan>,
    /// Moments: checkpoints and packets.
    pub marks: Vec<LaneMark>,
}

/// One stretch of a lane; times are ns after the intended start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LaneSpan {
    /// Begin, ns.
    pub start_ns: i64,
    /// End, ns.
    pub end_ns: i64,
    /// Which colour: a short class such as `run`, `other`, `runnable`, `sleep`, `idle`, `irq`, `softirq`, `steal`, `wire`.
    pub class: &'static str,
    /// What to show on it: a task's name, a segment.
    pub label: String,
}

/// One moment of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LaneMark {
    /// When, ns after the intended start.
    pub at_ns: i64,
    /// What.
    pub label: String,
}
