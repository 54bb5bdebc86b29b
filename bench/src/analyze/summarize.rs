//! Trials put together: per arm, against each other, and judged.

use std::collections::BTreeMap;

use super::{
    Analysis, TrialRows, samples,
    trial::{OneWays, TrialAnalysis, add},
};
use crate::{
    attribute::{
        cause::mean_band,
        ledger::{Ledger, Line},
    },
    plan::{Cell, Plan, condition::Condition},
    record::{
        manifest::{Host, Manifest, TrialRecord},
        stamps::Outcome,
    },
    report::summary::{
        ArmSummary, BudgetRow, CellSummary, ClockSummary, ConditionSummary, Decomposition, Difference,
        Effect, HostSummary, LossSummary, NullSummary, OneWay, Outlier, Percentiles, SUMMARY_SCHEMA,
        SetAside, ShiftSummary, StealSummary, Summary, SwimLanes, TrialSummary,
    },
    statistics::{
        STATISTICS, Statistic,
        interval::{Estimate, stein},
        null::{BLOCKS_EACH, COMPARISONS, covered, false_alarms},
        percentiles, quantile, rank,
    },
    verdict::{Facts, Load, Unquotable, judge, unquotable},
};

/// Lanes kept of the whole run.
const LANES_MAX: usize = 8;

/// Culprits named per line of the tail budget.
const CULPRITS_MAX: usize = 5;

/// Requests around a quantile whose mean ledgers are compared.
const BANDS: [(&str, (f64, f64)); 2] = [("p50", (0.45, 0.55)), ("p99", (0.985, 0.995))];

/// One cell's requests over all trials.
#[derive(Default)]
struct Pool {
    latencies: Vec<u64>,
    services: Vec<u64>,
    counterfactual: Vec<u64>,
    ledgers: Vec<(u64, Ledger)>,
    lateness: Vec<u64>,
    errors: BTreeMap<String, u64>,
    wrong_group: u64,
    bytes: (u64, u64),
    one_way_ns: OneWays,
    late: Ledger,
    trials: Vec<(u32, TrialSummary)>,
}

pub(super) fn summarize(manifest: Manifest, trials: Vec<TrialAnalysis>) -> Analysis {
    let plan = manifest.plan.clone();
    let cells = plan.cells();
    let mut pools: BTreeMap<Cell, Pool> = cells.iter().map(|&cell| (cell, Pool::default())).collect();
    for trial in &trials {
        pools
            .get_mut(&trial.trial.cell())
            .expect("a trial's cell is the plan's")
            .add(trial);
    }
    for pool in pools.values_mut() {
        for samples in [
            &mut pool.latencies,
            &mut pool.services,
            &mut pool.counterfactual,
            &mut pool.lateness,
        ] {
            samples.sort_unstable();
        }
        pool.one_way_ns
            .values_mut()
            .for_each(|took_ns| took_ns.sort_unstable());
        pool.ledgers
            .sort_unstable_by_key(|(latency, ledger)| (*latency, ledger.total_ns()));
    }
    let pairs = pairs(&plan);
    let differences: Vec<Difference> = pairs
        .iter()
        .flat_map(|&(cell, first)| differences(cell, first, &pools, &plan))
        .collect();
    let decomposition = pairs
        .iter()
        .flat_map(|&(cell, first)| decompositions(cell, first, &pools, &plan))
        .collect();
    let conditions = conditions(&manifest, &trials, &pools);
    let clock = clock(&manifest, &trials);
    let losses = losses(&manifest, &trials);
    let steal = steal(&manifest, &trials);
    let facts = facts(
        &manifest,
        &trials,
        &pools,
        &losses,
        &clock,
        &differences,
        &conditions,
    );
    let verdicts = judge(&facts);
    let summary = Summary {
        schema: SUMMARY_SCHEMA,
        pqtail: manifest.pqtail.clone(),
        begun: manifest.begun.clone(),
        hosts: BTreeMap::from([
            ("client", host(&manifest.client)),
            ("server", host(&manifest.server)),
        ]),
        status: manifest.status.clone(),
        valid: verdicts.iter().all(|verdict| verdict.ok),
        verdicts,
        arms: pools
            .iter()
            .map(|(cell, pool)| (plan.cell_name(*cell), pool.summary(*cell, &manifest)))
            .collect(),
        conditions,
        differences,
        null: pools
            .iter()
            .flat_map(|(cell, pool)| pool.against_itself(*cell, &plan))
            .collect(),
        known_shifts: known_shifts(&pools, &plan),
        decomposition,
        tail_budget: cells
            .iter()
            .map(|&cell| (plan.cell_name(cell), tail_budget(cell, &trials)))
            .collect(),
        losses,
        steal,
        probes: probes(&manifest),
        set_aside: set_aside(&manifest),
        clock,
        plan,
    };
    let mut lanes: Vec<SwimLanes> = trials
        .iter()
        .flat_map(|trial| trial.lanes.iter().cloned())
        .collect();
    lanes.sort_by_key(|lane| (std::cmp::Reverse(lane.latency_ns), lane.trial, lane.request));
    lanes.truncate(LANES_MAX);
    let mut outliers: Vec<Outlier> = trials
        .iter()
        .flat_map(|trial| trial.outliers.iter().cloned())
        .collect();
    outliers.sort_by_key(|outlier| {
        (
            std::cmp::Reverse(outlier.latency_ns),
            outlier.trial,
            outlier.request,
        )
    });
    let begins: BTreeMap<u32, u64> = manifest
        .trials
        .iter()
        .map(|t| (t.trial.index, t.begin_ns))
        .collect();
    let trials = trials
        .into_iter()
        .map(|trial| TrialRows {
            begin_ns: begins
                .get(&trial.trial.index)
                .copied()
                .or_else(|| begin_ns(&trial, &manifest.plan)),
            trial: trial.trial,
            rows: trial.rows,
        })
        .collect();
    Analysis {
        manifest,
        summary,
        outliers,
        lanes,
        trials,
    }
}

/// A trial that was cut has no entry in the manifest, but its arrivals are the plan's: any request tells its begin.
fn begin_ns(trial: &TrialAnalysis, plan: &Plan) -> Option<u64> {
    let stamps = &trial.rows.first()?.stamps;
    let arrivals_ns = trial.trial.arrivals_ns(plan);
    stamps
        .intended_ns
        .checked_sub(*arrivals_ns.get(stamps.request as usize)?)
}

impl Pool {
    fn add(&mut self, trial: &TrialAnalysis) {
        let (mut latencies, mut counterfactual) = (Vec::new(), Vec::new());
        for (row, environment_ns) in trial.rows.iter().zip(&trial.environment_ns) {
            let stamps = &row.stamps;
            if !stamps.is_measured() {
                continue;
            }
            if stamps.start_ns > 0 {
                self.lateness
                    .push(stamps.start_ns.saturating_sub(stamps.intended_ns));
            }
            let (Some(latency), Some(service)) = (stamps.latency_ns(), stamps.service_ns()) else {
                *self.errors.entry(outcome_name(stamps.outcome())).or_default() += 1;
                self.wrong_group += u64::from(stamps.outcome() == Outcome::WrongGroup);
                continue;
            };
            latencies.push(latency);
            self.services.push(service);
            counterfactual.push(latency - environment_ns);
            self.bytes.0 += u64::from(stamps.bytes_out);
            self.bytes.1 += u64::from(stamps.bytes_in);
            if let Some(ledger) = row.ledger {
                self.ledgers.push((latency, ledger));
            }
        }
        self.late += &trial.late;
        for (crossing, took_ns) in &trial.one_way_ns {
            let all = self.one_way_ns.entry(crossing.clone()).or_default();
            all.extend(took_ns);
        }
        latencies.sort_unstable();
        counterfactual.sort_unstable();
        let summary = TrialSummary {
            trial: trial.trial.index,
            requests: latencies.len() as u64,
            percentiles_ns: percentiles(&latencies),
            counterfactual_ns: percentiles(&counterfactual),
        };
        self.trials.push((trial.trial.block, summary));
        self.latencies.append(&mut latencies);
        self.counterfactual.append(&mut counterfactual);
    }

    /// How often the cell's own trials are said to differ.
    fn against_itself(&self, cell: Cell, plan: &Plan) -> Vec<NullSummary> {
        let mut trials: Vec<_> = self.trials.iter().map(|(_, trial)| trial).collect();
        trials.sort_by_key(|trial| trial.trial);
        let of = |&(statistic, _, of): &Statistic| {
            let figures = trials.iter().filter(|trial| trial.requests > 0);
            let figures: Vec<f64> = figures.map(|trial| of(&trial.percentiles_ns) as f64).collect();
            Some(NullSummary {
                arm: plan.cell_name(cell),
                statistic,
                comparisons: COMPARISONS,
                false_alarms: false_alarms(&figures, plan.seed)?,
            })
        };
        quoted(plan).filter_map(of).collect()
    }

    /// Crossings that only some requests have (a flight that came in two, say) are left to those requests' own stories.
    fn one_way(&self) -> Vec<OneWay> {
        let crossings = self.one_way_ns.iter();
        let usual = crossings.filter(|(_, took_ns)| took_ns.len() * 2 > self.latencies.len());
        usual
            .map(|((_, what), took_ns)| OneWay {
                what: what.clone(),
                count: took_ns.len() as u64,
                p50_ns: took_ns[rank(took_ns.len(), 0.5)],
                p99_ns: took_ns[rank(took_ns.len(), 0.99)],
            })
            .collect()
    }

    fn summary(&self, cell: Cell, manifest: &Manifest) -> ArmSummary {
        let requests = self.latencies.len() as u64;
        let records = || {
            let trials = manifest.trials.iter();
            trials.filter(move |trial| trial.trial.cell() == cell)
        };
        // CPU time covers the warm-up too, so it is shared among all requests of the trial.
        let sent = sum(records().map(|trial| trial.requests.records));
        let per_request = |total: u64| (sent > 0 && total > 0).then(|| total / sent);
        let named = |ledger: Option<Ledger>| {
            ledger
                .map(|ledger| ledger.lines().map(|(line, ns)| (line.name(), ns)).collect())
                .unwrap_or_default()
        };
        ArmSummary {
            arm: cell.arm.to_string(),
            condition: manifest.plan.condition_name(cell.condition),
            requests,
            errors: self.errors.clone(),
            percentiles_ns: percentiles(&self.latencies),
            service_percentiles_ns: percentiles(&self.services),
            counterfactual_ns: percentiles(&self.counterfactual),
            trials: self.trials.iter().map(|(_, summary)| summary.clone()).collect(),
            ledger_median: named(mean_band(&self.ledgers, BANDS[0].1)),
            ledger_tail: named(mean_band(&self.ledgers, (0.99, 1.0))),
            curve: curve(&self.latencies),
            client_cpu_ns_per_request: per_request(sum(records().map(|trial| trial.client_cpu_ns))),
            server_cpu_ns_per_request: per_request(sum(records().map(|trial| trial.server_cpu_ns))),
            one_way: self.one_way(),
            bytes_out: self.bytes.0.checked_div(requests).unwrap_or(0),
            bytes_in: self.bytes.1.checked_div(requests).unwrap_or(0),
        }
    }
}

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}

fn outcome_name(outcome: Outcome) -> String {
    match serde_json::to_value(outcome) {
        Ok(serde_json::Value::String(name)) => name,
        _ => unreachable!("a unit variant serialises as its name"),
    }
}

/// Points evenly spread over -log10(1 - quantile), so that each decade of the tail has as many.
fn curve(ascending: &[u64]) -> Vec<(f64, u64)> {
    const POINTS_PER_DECADE: u32 = 40;
    if ascending.is_empty() {
        return Vec::new();
    }
    let decades = (ascending.len() as f64).log10();
    let mut points = vec![(0.0, ascending[0])];
    for step in 1.. {
        let exponent = f64::from(step) / f64::from(POINTS_PER_DECADE);
        if exponent >= decades {
            break;
        }
        let q = 1.0 - 10f64.powf(-exponent);
        points.push((q, quantile(ascending, q)));
    }
    points.push((1.0, ascending[ascending.len() - 1]));
    points
}

fn differences(cell: Cell, first: Cell, pools: &BTreeMap<Cell, Pool>, plan: &Plan) -> Vec<Difference> {
    let (ours, theirs) = (&pools[&cell], &pools[&first]);
    let of = |&(statistic, _, of): &Statistic| {
        let by = |figure: fn(&TrialSummary) -> &Percentiles| {
            effect(&blockwise(ours, theirs, |trial| of(figure(trial))), plan)
        };
        Some(Difference {
            arm: plan.cell_name(cell),
            baseline: plan.cell_name(first),
            statistic,
            effect: by(|trial| &trial.percentiles_ns)?,
            without_environment: plan
                .probes
                .then(|| by(|trial| &trial.counterfactual_ns))
                .flatten(),
        })
    };
    quoted(plan).filter_map(of).collect()
}

/// Those that are to be quoted of this run.
fn quoted(plan: &Plan) -> impl Iterator<Item = &'static Statistic> {
    STATISTICS
        .iter()
        .filter(|(_, quantile, _)| *quantile <= plan.highest_quantile)
}

/// By how much one cell's figure is above another's in each block, ns. A block holds one trial of each cell, run close together, so
/// that drift of the machine cancels; one that was run again was so at once.
fn blockwise(ours: &Pool, theirs: &Pool, of: impl Fn(&TrialSummary) -> u64) -> Vec<f64> {
    let by_block = |pool: &Pool| -> BTreeMap<u32, f64> {
        let trials = pool.trials.iter().filter(|(_, trial)| trial.requests > 0);
        trials.map(|(block, trial)| (*block, of(trial) as f64)).collect()
    };
    let there = by_block(theirs);
    let both = by_block(ours)
        .into_iter()
        .filter_map(|(block, here)| Some(here - there.get(&block)?));
    both.collect()
}

/// What the blocks of a run say together. Where the first trials decided how many there are, they alone tell the spread.
fn effect(figures: &[f64], plan: &Plan) -> Option<Effect> {
    let stage = plan.first_stage.map(|stage| stage as usize);
    let estimate = match stage.filter(|stage| (2..figures.len()).contains(stage)) {
        Some(stage) => stein(figures, stage),
        None => Estimate::of(figures)?,
    };
    Some(estimate.into())
}

/// Every condition in which the server adds computing, against the one that is like it but for that. At the median, where most requests
/// meet no other: what waits behind another's added computing gains more than its own.
fn known_shifts(pools: &BTreeMap<Cell, Pool>, plan: &Plan) -> Vec<ShiftSummary> {
    let mut shifts = Vec::new();
    for (shifted, condition) in (0..).zip(&plan.conditions) {
        let without = Condition {
            server_extra_ns: 0,
            ..condition.clone()
        };
        let original = (0..).zip(&plan.conditions).find(|(_, each)| **each == without);
        let Some((original, _)) = original.filter(|_| condition.server_extra_ns > 0) else {
            continue;
        };
        for &arm in plan.arms_of(shifted) {
            let cells = [shifted, original].map(|condition| Cell { condition, arm });
            let [ours, theirs] = cells.map(|cell| &pools[&cell]);
            let figures = blockwise(ours, theirs, |trial| trial.percentiles_ns.p50);
            let covered = covered(&figures, condition.server_extra_ns as f64, plan.seed);
            if let Some((effect, covered)) = effect(&figures, plan).zip(covered) {
                shifts.push(ShiftSummary {
                    arm: plan.cell_name(cells[1]),
                    shift_ns: condition.server_extra_ns,
                    effect,
                    comparisons: COMPARISONS,
                    blocks_each: BLOCKS_EACH as u32,
                    covered,
                });
            }
        }
    }
    shifts
}

/// What is compared: every arm with the first under its condition.
fn pairs(plan: &Plan) -> Vec<(Cell, Cell)> {
    let mut pairs = Vec::new();
    for condition in 0..plan.conditions.len() as u32 {
        let cell = |arm| Cell { condition, arm };
        if let Some((&first, rest)) = plan.arms_of(condition).split_first() {
            pairs.extend(rest.iter().map(|&arm| (cell(arm), cell(first))));
        }
    }
    pairs
}

fn decompositions(cell: Cell, first: Cell, pools: &BTreeMap<Cell, Pool>, plan: &Plan) -> Vec<Decomposition> {
    BANDS
        .iter()
        .filter_map(|&(statistic, band)| {
            let ours = mean_band(&pools[&cell].ledgers, band)?;
            let theirs = mean_band(&pools[&first].ledgers, band)?;
            let lines: BTreeMap<_, _> = Line::all()
                .into_iter()
                .map(|line| {
                    (
                        line.name(),
                        ours.ns(line).cast_signed() - theirs.ns(line).cast_signed(),
                    )
                })
                .filter(|(_, ns)| *ns != 0)
                .collect();
            Some(Decomposition {
                arm: plan.cell_name(cell),
                baseline: plan.cell_name(first),
                statistic,
                difference_ns: lines.values().sum(),
                lines,
            })
        })
        .collect()
}

fn tail_budget(cell: Cell, trials: &[TrialAnalysis]) -> Vec<BudgetRow> {
    let mut excess: BTreeMap<Line, u64> = BTreeMap::new();
    let mut outliers: BTreeMap<Line, u64> = BTreeMap::new();
    let mut culprits: BTreeMap<Line, BTreeMap<&str, u64>> = BTreeMap::new();
    for trial in trials.iter().filter(|trial| trial.trial.cell() == cell) {
        for (&line, ns) in &trial.excess_ns {
            add(excess.entry(line).or_default(), *ns);
        }
        for outlier in &trial.outliers {
            *outliers.entry(outlier.cause).or_default() += 1;
        }
        for ((line, name), ns) in &trial.culprits {
            add(culprits.entry(*line).or_default().entry(name).or_default(), *ns);
        }
    }
    let whole: f64 = excess.values().map(|&ns| ns as f64).sum();
    let mut rows: Vec<BudgetRow> = excess
        .into_iter()
        .filter(|(_, ns)| *ns > 0)
        .map(|(line, ns)| {
            let mut named: Vec<(String, u64)> = culprits
                .get(&line)
                .into_iter()
                .flatten()
                .map(|(name, ns)| ((*name).to_owned(), *ns))
                .collect();
            named.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
            named.truncate(CULPRITS_MAX);
            BudgetRow {
                cause: line,
                outliers: outliers.get(&line).copied().unwrap_or(0),
                excess_ns: ns,
                share: ns as f64 / whole,
                culprits: named,
            }
        })
        .collect();
    rows.sort_by_key(|row| (std::cmp::Reverse(row.excess_ns), row.cause));
    rows
}

fn host(host: &Host) -> HostSummary {
    let facts = &host.facts;
    HostSummary {
        kernel: facts.kernel.clone(),
        machine: facts.machine.clone(),
        cpu_model: facts.cpu_model.clone(),
        cpus_online: facts.cpus_online,
        cpus: host.cpus.clone(),
        clocksource: facts.clocksource.clone(),
        governor: facts.governor.clone(),
        congestion_control: facts.sysctls.get("net.ipv4.tcp_congestion_control").cloned(),
    }
}

fn clock(manifest: &Manifest, trials: &[TrialAnalysis]) -> ClockSummary {
    let aligned: Vec<_> = trials
        .iter()
        .filter_map(|trial| trial.alignment.as_ref())
        .collect();
    let count = aligned.len() as i64;
    let all = count == trials.len() as i64;
    ClockSummary {
        handshakes: aligned.iter().map(|each| each.handshakes).sum(),
        shared_kernel: manifest.shares_kernel(),
        offset_ns: aligned
            .iter()
            .map(|each| i128::from(each.offset_ns()))
            .sum::<i128>()
            .checked_div(i128::from(count))
            .map(|mean| mean as i64),
        drift_ns_per_s: (count > 0)
            .then(|| aligned.iter().map(|each| each.drift_ns_per_s()).sum::<f64>() / count as f64),
        error_ns_max: if all {
            aligned.iter().map(|each| each.error_ns).max()
        } else {
            None
        },
    }
}

fn losses(manifest: &Manifest, trials: &[TrialAnalysis]) -> BTreeMap<String, LossSummary> {
    let mut losses: BTreeMap<String, LossSummary> = BTreeMap::new();
    for record in &manifest.trials {
        for (folder, kernel) in &record.kernel {
            let sum = losses.entry(folder.clone()).or_default();
            add(&mut sum.records, kernel.written.records);
            add(&mut sum.bytes, kernel.written.bytes);
            for (kind, count) in &kernel.lost {
                add(sum.lost.entry(kind.clone()).or_default(), *count);
            }
            add(&mut sum.drain_cpu_ns, kernel.drain_cpu_ns);
            if kernel.ring_bytes > 0 {
                let used = kernel.ring_used_bytes_max as f64 / kernel.ring_bytes as f64;
                sum.ring_used_max = sum.ring_used_max.max(used);
            }
        }
    }
    let damaged = trials.iter().flat_map(|trial| &trial.damaged);
    for (folder, damaged) in damaged.filter(|(_, damaged)| **damaged > 0) {
        losses.entry(folder.display().to_string()).or_default().damaged += damaged;
    }
    losses
}

/// Ticks by which the counter and /proc/stat may differ per CPU and trial: one at each end, and what the kernel has not yet
/// accounted for an idle CPU.
const STEAL_TICKS_MAX: u64 = 2;

fn steal(manifest: &Manifest, trials: &[TrialAnalysis]) -> BTreeMap<String, StealSummary> {
    let mut steal: BTreeMap<String, StealSummary> = BTreeMap::new();
    let mut tolerance_ns: BTreeMap<String, u64> = BTreeMap::new();
    for record in &manifest.trials {
        let Some(trial) = trials.iter().find(|each| each.trial.index == record.trial.index) else {
            continue;
        };
        for (folder, by_cpu) in &trial.steal_ns {
            let ticks = if manifest.client.kernel.as_ref() == Some(folder) {
                &record.client_stat
            } else {
                &record.server_stat
            };
            let name = folder.display().to_string();
            for (cpu, counter_ns) in by_cpu {
                let Some(row) = ticks.cpus.get(cpu) else { continue };
                let sum = steal.entry(name.clone()).or_default();
                sum.tick_ns = ticks.tick_ns;
                sum.counter_ns += counter_ns;
                sum.stat_ns += row.steal * ticks.tick_ns;
                *tolerance_ns.entry(name.clone()).or_default() += STEAL_TICKS_MAX * ticks.tick_ns;
            }
        }
    }
    for (name, sum) in &mut steal {
        sum.agree = sum.counter_ns.abs_diff(sum.stat_ns) <= tolerance_ns.get(name).copied().unwrap_or(0);
    }
    steal
}

fn set_aside(manifest: &Manifest) -> Option<SetAside> {
    let steal_share_max = manifest.steal_share_max?;
    let mut trials: BTreeMap<String, u32> = BTreeMap::new();
    for cell in manifest.plan.cells() {
        let of_cell = manifest
            .set_aside
            .iter()
            .filter(|record| record.trial.cell() == cell);
        let count = of_cell.count() as u32;
        if count > 0 {
            trials.insert(manifest.plan.cell_name(cell), count);
        }
    }
    let shares = manifest.trials.iter().map(|record| manifest.steal_share(record));
    let shares: Vec<_> = shares.collect();
    Some(SetAside {
        steal_share_max,
        trials,
        kept: shares
            .iter()
            .flatten()
            .filter(|share| **share > steal_share_max)
            .count() as u32,
        unknown: shares.iter().filter(|share| share.is_none()).count() as u32,
    })
}

fn probes(manifest: &Manifest) -> BTreeMap<String, Vec<crate::record::manifest::ProbeStatus>> {
    let mut probes = BTreeMap::new();
    for host in [&manifest.client, &manifest.server] {
        if let Some(kernel) = &host.kernel {
            probes.insert(kernel.display().to_string(), host.probes.clone());
        }
    }
    probes
}

/// Where in the order of their ends the requests of a trial are taken to be over: the few that come later wait, for a segment sent
/// again for example, and their ends say nothing of how long the trial kept its threads busy.
const LASTED_QUANTILE: f64 = 0.99;

/// How long a trial kept its threads busy, ns: as planned, or longer if it could not keep up. Takes when each request was meant to
/// start and when it was done (0: never).
fn lasted_ns(planned_ns: u64, times_ns: impl Iterator<Item = (u64, u64)>) -> u64 {
    let (intended, mut done): (Vec<u64>, Vec<u64>) = times_ns.filter(|(_, done_ns)| *done_ns > 0).unzip();
    done.sort_unstable();
    match intended.iter().min() {
        Some(begin_ns) => planned_ns.max(quantile(&done, LASTED_QUANTILE).saturating_sub(*begin_ns)),
        None => planned_ns,
    }
}

/// How each cell stood up to its load.
fn conditions(
    manifest: &Manifest,
    trials: &[TrialAnalysis],
    pools: &BTreeMap<Cell, Pool>,
) -> Vec<ConditionSummary> {
    let plan = &manifest.plan;
    let planned_ns = plan.duration_ns.saturating_add(plan.warmup_ns);
    let cell_summary = |cell: Cell| {
        let pool = &pools[&cell];
        // With how long it lasted, ns.
        let ran: Vec<(&TrialRecord, f64)> = manifest
            .trials
            .iter()
            .filter(|record| record.trial.cell() == cell)
            .map(|record| {
                let trial = trials.iter().find(|each| each.trial.index == record.trial.index);
                let rows = trial.into_iter().flat_map(|each| &each.rows);
                let times = rows.map(|row| (row.stamps.intended_ns, row.stamps.done_ns));
                (record, lasted_ns(planned_ns, times) as f64)
            })
            .collect();
        let busy = |cpu_ns: fn(&TrialRecord) -> u64, threads: usize| {
            let shares = ran
                .iter()
                .map(|(record, lasted_ns)| cpu_ns(record) as f64 / lasted_ns);
            let busiest = shares.reduce(f64::max)?;
            (threads > 0).then(|| busiest / threads as f64)
        };
        let client_busy = busy(|trial| trial.client_cpu_ns, manifest.client.threads.len());
        let server_busy = busy(|trial| trial.server_cpu_ns, manifest.server.threads.len());
        let lasted_s: f64 = ran.iter().map(|(_, lasted_ns)| lasted_ns / 1e9).sum();
        let sent = sum(ran.iter().map(|(record, _)| record.requests.records));
        let errors = pool.errors.values().sum();
        let load = Load {
            attempts: pool.latencies.len() as u64 + errors,
            errors,
            lateness_p99_ns: p99(&pool.lateness),
            client_busy,
            server_busy,
            late_by: greatest(&pool.late),
        };
        let (saturated, disturbed) = match unquotable(&load) {
            Some(Unquotable::Saturated(why)) => (Some(why), None),
            Some(Unquotable::Disturbed(why)) => (None, Some(why)),
            None => (None, None),
        };
        CellSummary {
            name: plan.cell_name(cell),
            arm: cell.arm.to_string(),
            achieved_hz: if lasted_s > 0.0 {
                sent as f64 / lasted_s
            } else {
                0.0
            },
            client_busy,
            server_busy,
            lateness_p99_ns: load.lateness_p99_ns,
            saturated,
            disturbed,
            late_by: load.late_by,
        }
    };
    (0..plan.conditions.len() as u32)
        .map(|condition| ConditionSummary {
            name: plan.condition_name(condition),
            rate_hz: plan.rate_hz(condition),
            condition: plan.conditions[condition as usize].clone(),
            cells: plan
                .arms_of(condition)
                .iter()
                .map(|&arm| cell_summary(Cell { condition, arm }))
                .collect(),
        })
        .collect()
}

/// The line with the most time, and its share; `None` if there is no time.
fn greatest(ledger: &Ledger) -> Option<(&'static str, f64)> {
    let lines = ledger.lines().filter(|(_, ns)| *ns > 0);
    let (line, ns) = lines.max_by_key(|&(line, ns)| (ns, std::cmp::Reverse(line)))?;
    Some((line.name(), ns as f64 / ledger.total_ns() as f64))
}

fn total<'a>(ledgers: impl IntoIterator<Item = &'a (u64, Ledger)>) -> Ledger {
    let mut total = Ledger::default();
    for (_, ledger) in ledgers {
        total += ledger;
    }
    total
}

fn p99(ascending: &[u64]) -> u64 {
    if ascending.is_empty() {
        0
    } else {
        quantile(ascending, 0.99)
    }
}

fn facts(
    manifest: &Manifest,
    trials: &[TrialAnalysis],
    pools: &BTreeMap<Cell, Pool>,
    losses: &BTreeMap<String, LossSummary>,
    clock: &ClockSummary,
    differences: &[Difference],
    conditions: &[ConditionSummary],
) -> Facts {
    let plan = &manifest.plan;
    // A sweep over rates goes to where it saturates on purpose, and says where: the rest must not be.
    let sweeps_rate = conditions
        .iter()
        .any(|each| each.rate_hz != conditions[0].rate_hz);
    let counts = |cell: &CellSummary| !sweeps_rate || cell.saturated.is_none();
    let cells = || conditions.iter().flat_map(|each| &each.cells);
    // Both in the order of the plan.
    let counted_cells: Vec<Cell> = plan
        .cells()
        .into_iter()
        .zip(cells())
        .filter(|(_, summary)| counts(summary))
        .map(|(cell, _)| cell)
        .collect();
    let counted: Vec<&Pool> = counted_cells.iter().map(|cell| &pools[cell]).collect();
    let errors: u64 = counted.iter().flat_map(|pool| pool.errors.values()).sum();
    let good: u64 = counted.iter().map(|pool| pool.latencies.len() as u64).sum();
    let mut lateness: Vec<u64> = counted
        .iter()
        .flat_map(|pool| pool.lateness.iter().copied())
        .collect();
    lateness.sort_unstable();
    let busiest = |of: fn(&CellSummary) -> Option<f64>| {
        let busy = cells().filter(|cell| counts(cell)).filter_map(of);
        busy.reduce(f64::max)
    };
    let capacity = sweeps_rate.then(|| capacity(conditions));
    let total = total(pools.values().flat_map(|pool| &pool.ledgers));
    let stolen = sum(total
        .lines()
        .filter(|(line, _)| line.name().ends_with(".steal"))
        .map(|(_, ns)| ns));
    let mut unexplained: Vec<f64> = trials
        .iter()
        .flat_map(|trial| &trial.outliers)
        .map(|outlier| outlier.ledger.ns(Line::Unexplained) as f64 / outlier.latency_ns.max(1) as f64)
        .collect();
    unexplained.sort_by(f64::total_cmp);
    Facts {
        status: manifest.status.clone(),
        attempts: good + errors,
        errors,
        wrong_group: pools.values().map(|pool| pool.wrong_group).sum(),
        no_port: pools
            .values()
            .filter_map(|pool| pool.errors.get(&outcome_name(Outcome::NoPort)))
            .sum(),
        lateness_p99_ns: p99(&lateness),
        lateness_cause: cells()
            .filter(|cell| counts(cell))
            .max_by_key(|cell| cell.lateness_p99_ns)
            .and_then(|cell| cell.late_by),
        p50_ns: pools
            .values()
            .map(|pool| percentiles(&pool.latencies).p50)
            .find(|&p50_ns| p50_ns > 0)
            .unwrap_or(0),
        client_busy: busiest(|cell| cell.client_busy),
        server_busy: busiest(|cell| cell.server_busy),
        capacity,
        probes: manifest.client.kernel.is_some(),
        lost: sum(losses.values().flat_map(|loss| loss.lost.values().copied())),
        damaged: losses.values().map(|loss| loss.damaged).sum(),
        clock_error_ns: clock.error_ns_max,
        steal_share: stolen as f64 / total.total_ns().max(1) as f64,
        steal_known: trials.iter().any(|trial| trial.steal_known),
        unexplained: (!unexplained.is_empty()).then(|| {
            (
                unexplained[unexplained.len() / 2],
                unexplained[unexplained.len() - 1],
            )
        }),
        highest_quantile: plan.highest_quantile,
        samples: counted
            .iter()
            .map(|pool| pool.latencies.len() as u64)
            .min()
            .unwrap_or(0),
        sampled: samples::samples(
            plan,
            trials
                .iter()
                .filter(|trial| counted_cells.contains(&trial.trial.cell())),
        ),
        recorder: samples::recorder(manifest),
        blocks: plan.trials_per_arm,
        compares: plan.cells().len() > plan.conditions.len(),
        differences_p50: differences
            .iter()
            .filter(|difference| difference.statistic == "p50")
            .filter_map(|Difference { effect, .. }| Some((effect.difference_ns, effect.interval_ns?)))
            .collect(),
    }
}

/// For each arm the highest rate, requests per second, up to which no cell of it is saturated; 0 if the lowest is. And why the next is
/// none.
fn capacity(conditions: &[ConditionSummary]) -> Vec<(String, f64, Option<String>)> {
    let mut by_arm: BTreeMap<&str, Vec<(f64, &CellSummary)>> = BTreeMap::new();
    for condition in conditions {
        for cell in &condition.cells {
            by_arm
                .entry(&cell.arm)
                .or_default()
                .push((condition.rate_hz, cell));
        }
    }
    by_arm
        .into_iter()
        .map(|(arm, mut cells)| {
            cells.sort_by(|a, b| a.0.total_cmp(&b.0));
            let bad = cells.iter().position(|(_, cell)| cell.saturated.is_some());
            let safe = match bad {
                Some(0) => 0.0,
                Some(first) => cells[first - 1].0,
                None => cells[cells.len() - 1].0,
            };
            let why = bad.map(|first| {
                let (rate, cell) = cells[first];
                format!("at {rate}/s {}", cell.saturated.as_deref().unwrap_or_default())
            });
            (arm.to_owned(), safe, why)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn one_straggler_does_not_make_a_trial_longer() {
        let mut times: Vec<_> = (0..1_000)
            .map(|i| (i * SECOND / 1_000, (i + 1) * SECOND / 1_000))
            .collect();
        times[500].1 = 4 * SECOND;
        assert_eq!(lasted_ns(SECOND, times.into_iter()), SECOND);
    }

    #[test]
    fn a_trial_that_cannot_keep_up_lasts_longer_than_planned() {
        let late = (0..1_000).map(|i| (i * SECOND / 1_000, (i + 1) * SECOND / 250));
        let lasted = lasted_ns(SECOND, late);
        assert!(lasted > 39 * SECOND / 10 && lasted <= 4 * SECOND, "{lasted}");
    }

    #[test]
    fn a_trial_without_requests_lasts_as_planned() {
        assert_eq!(lasted_ns(SECOND, [(5, 0)].into_iter()), SECOND);
    }
}
