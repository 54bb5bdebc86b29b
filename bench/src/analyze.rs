//! The analysing half from end to end: a results folder in, everything a report needs out. The run itself ends with this call,
//! and the same call on the recorded files makes the same bytes at any later time.

#[cfg(test)]
mod laws;

#[doc(hidden)]
pub mod hostile;
mod lanes;
mod samples;
mod summarize;
mod told;
mod totals;
mod trial;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use zerocopy::{FromBytes, Immutable};

use crate::{
    attribute::{ledger::Ledger, story::Interval},
    plan::Trial,
    record::{
        TIME_NS_MAX,
        manifest::{Manifest, recording},
        stamps::{ConnectionStamps, RequestStamps},
        stream::{Recording, StreamKind, Written},
    },
    report::summary::{Outlier, Summary, SwimLanes},
    timeline::cpu::{Raw, head},
};

/// Names of the streams of a trial, as [`recording`] takes them.
pub mod stream_name {
    /// The load generator's stamps.
    pub const REQUESTS: &str = "requests";
    /// The embedded server's stamps.
    pub const CONNECTIONS: &str = "connections";
    /// Kernel records.
    pub const KERNEL: &str = "kernel";
}

/// Everything a report is made from.
#[derive(Clone, Debug)]
pub struct Analysis {
    /// What ran.
    pub manifest: Manifest,
    /// `summary.json`.
    pub summary: Summary,
    /// The outliers, greatest latency first.
    pub outliers: Vec<Outlier>,
    /// Lanes of the worst ones.
    pub lanes: Vec<SwimLanes>,
    /// Every request, by trial.
    pub trials: Vec<TrialRows>,
}

/// The requests of one trial.
#[derive(Clone, Debug)]
pub struct TrialRows {
    /// Which.
    pub trial: Trial,
    /// Begin of the warm-up, client clock, ns; `None` where no request was recorded.
    pub begin_ns: Option<u64>,
    /// In order of their numbers.
    pub rows: Vec<Row>,
}

pub use crate::report::export::RequestRow as Row;

/// The story of one request, as `explain` tells it.
#[derive(Clone, Debug)]
pub struct Story {
    /// Cause, culprit, evidence.
    pub outlier: Outlier,
    /// Interval by interval, each split.
    pub intervals: Vec<(Interval, Ledger)>,
    /// What happened around it.
    pub lanes: SwimLanes,
}

/// Analyses a results folder.
///
/// # Errors
/// When the folder holds no run, or one of its recordings is foreign. A cut run or recording is analysed as far as it goes.
pub fn analyze(results: &Path) -> anyhow::Result<Analysis> {
    let manifest = Manifest::read(results)?;
    let mut trials = Vec::new();
    for trial in manifest.plan.trials() {
        if let Some(recorded) = Recorded::open(results, &manifest, trial)? {
            trials.push(trial::analyze(&manifest, recorded));
        }
    }
    ensure!(
        !trials.is_empty(),
        "{} holds no recorded trial: the run ended before its first one (see manifest.json)",
        results.display()
    );
    Ok(summarize::summarize(manifest, trials))
}

/// Tells the stories of single requests of a results folder, given by trial and number, outliers or not.
///
/// # Errors
/// As [`analyze`], or when there is no such request, or it has no latency to explain.
pub fn explain(results: &Path, wanted: &[(u32, u32)]) -> anyhow::Result<Vec<Story>> {
    let manifest = Manifest::read(results)?;
    let mut by_trial: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for &(trial, request) in wanted {
        by_trial.entry(trial).or_default().push(request);
    }
    let mut stories = BTreeMap::new();
    for (number, requests) in by_trial {
        let trial = planned(&manifest, number)?;
        let recorded = Recorded::open(results, &manifest, trial)?
            .with_context(|| format!("trial {number} was not recorded: the run was cut before it"))?;
        let told = trial::explain(&manifest, recorded, &requests)?;
        stories.extend(requests.into_iter().map(|request| (number, request)).zip(told));
    }
    Ok(wanted.iter().filter_map(|each| stories.remove(each)).collect())
}

/// The trial with this number.
///
/// # Errors
/// When the plan has no such trial.
pub fn planned(manifest: &Manifest, trial: u32) -> anyhow::Result<Trial> {
    let trials = manifest.plan.trials();
    trials.get(trial as usize).copied().with_context(|| {
        format!(
            "the run has no trial {trial}: its trials are 0 to {}",
            trials.len() - 1
        )
    })
}

/// The trial in which the request of this number took longest. Numbers count from 0 in every trial, so a number alone names
/// one request per trial.
///
/// # Errors
/// As [`analyze`], or when no trial has such a request with a latency.
pub fn slowest_trial(results: &Path, request: u32) -> anyhow::Result<u32> {
    let manifest = Manifest::read(results)?;
    let mut slowest: Option<(u64, u32)> = None;
    for trial in manifest.plan.trials() {
        let folder = results.join(&manifest.client.stamps);
        let path = recording(&folder, stream_name::REQUESTS, trial.index);
        if !has_begun(&path) {
            continue;
        }
        let recorded = Recording::<RequestStamps>::open(&path, StreamKind::Requests)?;
        let found = recorded.records.iter().find(|each| each.request == request);
        let latency_ns = found.and_then(RequestStamps::latency_ns);
        slowest = slowest.max(latency_ns.map(|ns| (ns, trial.index)));
    }
    let (_, trial) = slowest.with_context(|| {
        format!("no trial has a request {request} that ended well: numbers count from 0 in each trial")
    })?;
    Ok(trial)
}

/// The recordings of one trial.
struct Recorded {
    trial: Trial,
    requests: Vec<RequestStamps>,
    connections: Vec<ConnectionStamps>,
    /// By folder; after [`Recorded::tidy`] in order of time, without duplicates.
    kernels: BTreeMap<PathBuf, Vec<Raw>>,
    /// By folder: stretches of which the file lost everything, ns on the kernel's clock.
    missing: BTreeMap<PathBuf, Vec<(u64, u64)>>,
    damaged: BTreeMap<PathBuf, u64>,
}

impl Recorded {
    /// `None` if the trial was not recorded.
    fn open(results: &Path, manifest: &Manifest, trial: Trial) -> anyhow::Result<Option<Self>> {
        let requests_path = recording(
            &results.join(&manifest.client.stamps),
            stream_name::REQUESTS,
            trial.index,
        );
        let record = manifest.trials.iter().find(|record| record.trial == trial);
        if !has_begun(&requests_path) && record.is_none() {
            return Ok(None);
        }
        let mut intake = Intake {
            results,
            damaged: BTreeMap::new(),
        };
        let written = record.map(|record| &record.requests);
        let (requests, _) = intake.read(&requests_path, StreamKind::Requests, written)?;
        let connections_path = recording(
            &results.join(&manifest.server.stamps),
            stream_name::CONNECTIONS,
            trial.index,
        );
        let written = record.map(|record| &record.connections);
        let (connections, _) = intake.read(&connections_path, StreamKind::Connections, written)?;
        let (mut kernels, mut missing) = (BTreeMap::new(), BTreeMap::new());
        for folder in [&manifest.client.kernel, &manifest.server.kernel]
            .into_iter()
            .flatten()
        {
            if kernels.contains_key(folder) {
                continue;
            }
            let path = recording(&results.join(folder), stream_name::KERNEL, trial.index);
            let kernel = record.and_then(|record| record.kernel.get(&folder.display().to_string()));
            let written = kernel.map(|kernel| &kernel.written);
            let (records, gaps) = intake.read(&path, StreamKind::Kernel, written)?;
            missing.insert(folder.clone(), stretches(&records, &gaps));
            kernels.insert(folder.clone(), records);
        }
        let recorded = Self {
            trial,
            requests,
            connections,
            kernels,
            missing,
            damaged: intake.damaged,
        };
        Ok(Some(recorded.tidy(manifest)))
    }

    /// Leaves out what no machine records, which counts as damage, and brings the rest into the order that the analysis relies on.
    fn tidy(mut self, manifest: &Manifest) -> Self {
        let mut left_out = |folder: &PathBuf, count: usize| {
            if count > 0 {
                *self.damaged.entry(folder.clone()).or_default() += count as u64;
            }
        };
        let requests = self.requests.len();
        self.requests.retain(RequestStamps::is_believable);
        let believable = self.requests.len();
        self.requests
            .sort_unstable_by_key(|each| (each.request, each.start_ns));
        self.requests.dedup();
        let distinct = self.requests.len();
        // A number names one request.
        self.requests.dedup_by_key(|each| each.request);
        left_out(
            &manifest.client.stamps,
            requests - believable + distinct - self.requests.len(),
        );
        let connections = self.connections.len();
        self.connections.retain(ConnectionStamps::is_believable);
        left_out(&manifest.server.stamps, connections - self.connections.len());
        for (folder, records) in &mut self.kernels {
            let all = records.len();
            records.retain(|raw| head(raw).at_ns < TIME_NS_MAX);
            left_out(folder, all - records.len());
            *records = in_order(std::mem::take(records));
        }
        self
    }
}

/// Reads recordings and counts what is wrong with them, by folder.
struct Intake<'a> {
    results: &'a Path,
    damaged: BTreeMap<PathBuf, u64>,
}

impl Intake<'_> {
    /// The records, and how many of them stand before each gap. A file that is missing, cut, damaged, or not the one that the
    /// manifest tells of, counts as damage.
    fn read<T: FromBytes + Immutable>(
        &mut self,
        path: &Path,
        kind: StreamKind,
        written: Option<&Written>,
    ) -> anyhow::Result<(Vec<T>, Vec<usize>)> {
        let (records, gaps, damage) = if has_begun(path) {
            let found = Recording::<T>::open(path, kind)?;
            let damage = u64::from(found.cut) + found.damaged_chunks;
            // What is cut or damaged differs anyway.
            let is_foreign = written.is_some_and(|written| written.sha256 != found.sha256);
            (found.records, found.gaps, damage.max(u64::from(is_foreign)))
        } else {
            (Vec::new(), vec![0], 1)
        };
        let folder = path
            .parent()
            .and_then(|parent| parent.strip_prefix(self.results).ok());
        *self.damaged.entry(folder.unwrap_or(path).to_owned()).or_default() += damage;
        Ok((records, gaps))
    }
}

/// From when to when records are missing, by their neighbours in the file: the ring hands them on nearly in order.
fn stretches(records: &[Raw], gaps: &[usize]) -> Vec<(u64, u64)> {
    gaps.iter()
        .map(|&gap| {
            let (before, after) = records.split_at(gap);
            let from = before.last().map_or(0, |raw| head(raw).at_ns);
            let to = after.first().map_or(u64::MAX, |raw| head(raw).at_ns);
            (from.min(to), to.max(from))
        })
        .collect()
}

/// Whether anything was ever written to a recording: a crash may leave an empty file, which is as good as none.
fn has_begun(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.len() > 0)
}

/// Records by time, without duplicates. CPUs share one ring, so records come nearly in order; equal times are ordered by
/// content, so that nothing depends on the order of the file.
fn in_order(mut records: Vec<Raw>) -> Vec<Raw> {
    records.sort_unstable_by(|a, b| head(a).at_ns.cmp(&head(b).at_ns).then_with(|| a.cmp(b)));
    records.dedup();
    records
}
