//! The analysing half from end to end: a results folder in, everything a report needs out. The run itself ends with this call,
//! and the same call on the recorded files makes the same bytes at any later time.

#[cfg(test)]
mod laws;

mod lanes;
mod summarize;
mod trial;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};

use crate::{
    attribute::{ledger::Ledger, story::Interval},
    plan::Trial,
    record::{
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
    let trials = manifest.plan.trials();
    let mut by_trial: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for &(trial, request) in wanted {
        by_trial.entry(trial).or_default().push(request);
    }
    let mut stories = BTreeMap::new();
    for (number, requests) in by_trial {
        let trial = *trials.get(number as usize).with_context(|| {
            format!(
                "the run has no trial {number}: its trials are 0 to {}",
                trials.len() - 1
            )
        })?;
        let recorded = Recorded::open(results, &manifest, trial)?
            .with_context(|| format!("trial {number} was not recorded: the run was cut before it"))?;
        let told = trial::explain(&manifest, recorded, &requests)?;
        stories.extend(requests.into_iter().map(|request| (number, request)).zip(told));
    }
    Ok(wanted.iter().filter_map(|each| stories.remove(each)).collect())
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
    /// By folder: records in order of time, without duplicates.
    kernels: BTreeMap<PathBuf, Vec<Raw>>,
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
        let mut damaged = BTreeMap::new();
        // What was cut or is damaged differs anyway, and is counted as what it is.
        let mut read = |path: &Path, cut: bool, chunks: u64, sha256: &str, written: Option<&Written>| {
            let whole = !cut && chunks == 0;
            let foreign = whole && written.is_some_and(|written| written.sha256 != sha256);
            let folder = path
                .parent()
                .and_then(|p| p.strip_prefix(results).ok())
                .unwrap_or(path)
                .to_owned();
            *damaged.entry(folder).or_default() += u64::from(cut) + chunks + u64::from(foreign);
        };
        let mut requests = Vec::new();
        if has_begun(&requests_path) {
            let found = Recording::<RequestStamps>::open(&requests_path, StreamKind::Requests)?;
            let written = record.map(|record| &record.requests);
            read(
                &requests_path,
                found.cut,
                found.damaged_chunks,
                &found.sha256,
                written,
            );
            requests = found.records;
        } else {
            read(&requests_path, true, 0, "", None);
        }
        requests.sort_unstable_by_key(|each| (each.request, each.start_ns));
        requests.dedup();
        let connections_path = recording(
            &results.join(&manifest.server.stamps),
            stream_name::CONNECTIONS,
            trial.index,
        );
        let mut connections = Vec::new();
        if has_begun(&connections_path) {
            let found = Recording::<ConnectionStamps>::open(&connections_path, StreamKind::Connections)?;
            let written = record.map(|record| &record.connections);
            read(
                &connections_path,
                found.cut,
                found.damaged_chunks,
                &found.sha256,
                written,
            );
            connections = found.records;
        } else {
            read(&connections_path, true, 0, "", None);
        }
        let mut kernels = BTreeMap::new();
        for folder in [&manifest.client.kernel, &manifest.server.kernel]
            .into_iter()
            .flatten()
        {
            let path = recording(&results.join(folder), stream_name::KERNEL, trial.index);
            if kernels.contains_key(folder) {
                continue;
            }
            if !has_begun(&path) {
                read(&path, true, 0, "", None);
                kernels.insert(folder.clone(), Vec::new());
                continue;
            }
            let found = Recording::<Raw>::open(&path, StreamKind::Kernel)?;
            let kernel = record.and_then(|record| record.kernel.get(&folder.display().to_string()));
            let written = kernel.map(|kernel| &kernel.written);
            read(&path, found.cut, found.damaged_chunks, &found.sha256, written);
            kernels.insert(folder.clone(), in_order(found.records));
        }
        Ok(Some(Self {
            trial,
            requests,
            connections,
            kernels,
            damaged,
        }))
    }
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
