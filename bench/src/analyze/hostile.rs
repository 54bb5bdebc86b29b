//! The readers and the analysis against any bytes: what fuzz targets (`bench/fuzz`) and an ordinary test call.
//!
//! Each function takes bytes that nobody vouches for and panics only where the product breaks a promise: no panic, a ledger that
//! sums to the latency, no more memory than the input can account for.

#[cfg(test)]
mod scale;
mod script;

use std::{collections::BTreeMap, path::Path};

use zerocopy::{FromBytes, Immutable};

use super::{
    Recorded, summarize,
    told::{CLIENT_NETNS, Fault, Story, TRIAL, manifest},
    trial,
};
use crate::{
    record::{
        manifest::{MANIFEST, Manifest},
        stamps::{ConnectionStamps, RequestStamps},
        stream::{self, Recording, StreamKind},
    },
    report::summary::Lane,
    timeline::cpu::Raw,
};

/// Reads the bytes as a recording of every kind: as they are, and again with every checksum set right, so that a mutation gets
/// behind them.
///
/// # Panics
/// When the reader does, or returns more than the bytes can hold.
pub fn read_any(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    stream::set_checksums(&mut mended);
    for bytes in [bytes, &mended] {
        read_as::<RequestStamps>(bytes, StreamKind::Requests);
        read_as::<ConnectionStamps>(bytes, StreamKind::Connections);
        read_as::<Raw>(bytes, StreamKind::Kernel);
    }
}

/// LZ4 makes at most this of one byte.
const LZ4_RATIO_MAX: usize = 255;

fn read_as<T: FromBytes + Immutable>(bytes: &[u8], kind: StreamKind) {
    let Ok(recording) = Recording::<T>::read(bytes, kind) else {
        return;
    };
    assert_eq!(recording.header.kind, kind);
    assert_eq!(recording.sha256.len(), 64);
    let held = recording.records.len() * size_of::<T>();
    assert!(
        held <= bytes.len() * LZ4_RATIO_MAX,
        "{held} bytes of records from {} bytes",
        bytes.len()
    );
    // Nothing may hold more chunks than fit.
    assert!(recording.damaged_chunks as usize <= bytes.len() / 16 + 1);
}

/// Reads the bytes as a manifest; if it is one, a small trial is analysed and summarised as part of that run.
///
/// # Panics
/// When any of that does.
pub fn describe_any(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes, Path::new(MANIFEST)) else {
        return;
    };
    let Some(trial) = manifest.plan.trials().first().copied() else {
        return;
    };
    let mut told = Story::default();
    told.request(Fault::default());
    told.request(Fault {
        lost_hello_ns: 200_000_000,
        ..Fault::default()
    });
    check(manifest, |manifest| told.recorded(manifest, trial));
}

/// Takes the bytes as a script of one trial's records, true to life and not, and analyses it.
///
/// # Panics
/// When the analysis does, or a ledger does not sum to its request's latency.
pub fn analyze_any(bytes: &[u8]) {
    let (manifest, told) = script::play(bytes);
    check(manifest, |manifest| told.recorded(manifest, TRIAL));
}

/// Requests whose stories are told, besides those that the analysis tells itself.
const EXPLAINED: usize = 4;

/// Analyses, summarises and explains, and checks what is promised of each.
fn check(manifest: Manifest, recorded: impl Fn(&Manifest) -> Recorded) {
    let analysis = trial::analyze(&manifest, recorded(&manifest));
    for row in &analysis.rows {
        if let Some(ledger) = row.ledger {
            let latency_ns = row.stamps.latency_ns();
            assert_eq!(Some(ledger.total_ns()), latency_ns, "the sum of {ledger:?}");
        }
    }
    for outlier in &analysis.outliers {
        assert_eq!(outlier.ledger.total_ns(), outlier.latency_ns);
        assert!((0.0..=1.0).contains(&outlier.share), "share {}", outlier.share);
    }
    for lane in analysis.lanes.iter().flat_map(|lanes| &lanes.lanes) {
        check_lane(lane);
    }
    let numbers: Vec<u32> = analysis
        .rows
        .iter()
        .filter(|row| row.ledger.is_some())
        .map(|row| row.stamps.request)
        .take(EXPLAINED)
        .collect();
    // The first of several requests of one number may have no ledger: then there is no story.
    let stories = trial::explain(&manifest, recorded(&manifest), &numbers).unwrap_or_default();
    for story in stories {
        let parts = story.intervals.iter().map(|(_, ledger)| ledger.total_ns());
        assert_eq!(parts.sum::<u64>(), story.outlier.latency_ns);
        for (interval, ledger) in &story.intervals {
            assert_eq!(interval.end - interval.start, ledger.total_ns().cast_signed());
        }
        for pair in story.intervals.windows(2) {
            assert_eq!(pair[0].0.end, pair[1].0.start, "intervals join");
        }
        story.lanes.lanes.iter().for_each(check_lane);
    }
    let summary = summarize::summarize(manifest, vec![analysis]).summary;
    serde_json::to_vec(&summary).expect("a summary is JSON");
}

fn check_lane(lane: &Lane) {
    for span in &lane.spans {
        assert!(span.start_ns <= span.end_ns, "{} in {}", span.label, lane.name);
    }
    for pair in lane.spans.windows(2) {
        assert!(pair[0].end_ns <= pair[1].start_ns, "{}: {pair:?}", lane.name);
    }
}

/// What a target's name and a seed are.
pub type Seed = (&'static str, String, Vec<u8>);

/// Inputs to begin with: by target (as in `bench/fuzz`) and name.
///
/// # Panics
/// When no temporary file can be written.
#[must_use]
pub fn seeds() -> Vec<Seed> {
    let mut seeds: Vec<Seed> = Vec::new();
    let mut told = Story::default();
    for fault in Fault::each() {
        told.request(fault);
    }
    for (name, bytes) in recordings(&told) {
        seeds.push(("recording", name, bytes));
    }
    for (name, bytes) in script::seeds() {
        seeds.push(("analysis", name, bytes));
    }
    let mut run = manifest();
    for (name, change) in MANIFESTS {
        change(&mut run);
        let json = serde_json::to_vec(&run).expect("a manifest is JSON");
        seeds.push(("manifest", name.to_owned(), json));
    }
    seeds
}

type Change = fn(&mut Manifest);

const MANIFESTS: [(&str, Change); 4] = [
    ("plain", |_| {}),
    ("shared-kernel", |run| {
        run.server.kernel.clone_from(&run.client.kernel);
        run.server.netns = CLIENT_NETNS;
    }),
    ("with-trials", |run| {
        let record = |trial| crate::record::manifest::TrialRecord {
            trial,
            begin_ns: 1,
            requests: stream::Written::default(),
            connections: stream::Written::default(),
            kernel: BTreeMap::from([("raw/client".to_owned(), Default::default())]),
            client_cpu_ns: 7,
            server_cpu_ns: 8,
            client_stat: Default::default(),
            server_stat: Default::default(),
        };
        run.trials = run.plan.trials().into_iter().map(record).collect();
    }),
    ("without-probes", |run| {
        run.client.kernel = None;
        run.server.kernel = None;
        run.plan.probes = false;
    }),
];

/// A story's recordings as files, with small chunks, whole and cut.
fn recordings(told: &Story) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![
        ("requests".to_owned(), file(&told.requests, StreamKind::Requests)),
        (
            "connections".to_owned(),
            file(&told.connections, StreamKind::Connections),
        ),
        ("kernel".to_owned(), file(&told.client, StreamKind::Kernel)),
        ("empty".to_owned(), file::<Raw>(&[], StreamKind::Kernel)),
    ];
    let (_, kernel) = &files[2];
    files.push(("cut".to_owned(), kernel[..kernel.len() * 2 / 3].to_vec()));
    files
}

fn file<T: zerocopy::IntoBytes + Immutable>(records: &[T], kind: StreamKind) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("seed.pqr");
    let write = || -> anyhow::Result<Vec<u8>> {
        let mut writer = stream::Writer::create(&path, kind, 0)?;
        for chunk in records.chunks(records.len().div_ceil(3).max(1)) {
            for record in chunk {
                writer.push(record)?;
            }
            writer.flush()?;
        }
        writer.finish()?;
        Ok(std::fs::read(&path)?)
    };
    write().expect("a temporary file")
}
