//! Known culprits injected into real runs at known times, and how often the attribution names them.
//!
//! Each [case](Case) is a run of its own. While it goes, one kind of fault is committed again and again, at seeded
//! random times, and logged with when and to whom. The scoring then asks the recorded files, as any user could, what caused
//! each request that a fault hit, and compares. What was hit is computed from the log and from the load generator's stamps
//! alone, never from what the attribution says.

pub mod away;
mod case;
pub mod dropper;
pub mod flood;
mod inject;
mod score;
pub mod shaper;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus, seq::SliceRandom as _};

pub use self::{
    case::Case,
    score::{CaseScore, CauseScore, Check, LineScore, Report},
};
use self::{
    inject::{Ends, Injector, Window},
    score::score,
};
use crate::{
    collect::{fault::Faults, host::allowed_cpus, run::ServerChoice},
    record::manifest::Manifest,
};

/// How the suite runs.
#[derive(Clone, Debug)]
pub struct TruthOptions {
    /// Which cases; their order is drawn from the seed.
    pub cases: Vec<Case>,
    /// Measured part of each trial; a case has one trial per arm.
    pub duration: Duration,
    /// Requests per second.
    pub rate_hz: f64,
    /// Seed of the order of the cases and of the times of the injections.
    pub seed: u64,
    /// Who serves.
    pub server: ServerChoice,
    /// Folder that keeps the cases' results; a temporary one if absent.
    pub keep: Option<PathBuf>,
}

/// Pauses between two injections: long enough that the queue of the one has drained before the next.
const PAUSE_MS: std::ops::Range<u64> = 150..350;

/// How long a run may take to start its ends. Only a failure waits so long.
const START_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// Runs the cases and scores them.
///
/// # Errors
/// When a run or an injection fails, or the suite is interrupted.
pub fn run(options: &TruthOptions, interrupted: &AtomicBool) -> anyhow::Result<Report> {
    check(options)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(options.seed);
    let mut cases = options.cases.clone();
    cases.shuffle(&mut random);
    let scratch = tempfile::tempdir().context("make a temporary folder")?;
    let folder = options.keep.as_deref().unwrap_or(scratch.path());
    let mut scores = BTreeMap::new();
    for (number, &case) in cases.iter().enumerate() {
        eprintln!("truth: {} ({} of {})", case.name(), number + 1, cases.len());
        let folder = folder.join(case.name());
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let (results, windows) = episode(case, options, &folder, &mut random, interrupted)
            .with_context(|| format!("case {}", case.name()))?;
        scores.insert(case.name(), score(case, &results, &windows)?);
        ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
    }
    Ok(Report::new(options.seed, scores))
}

fn check(options: &TruthOptions) -> anyhow::Result<()> {
    ensure!(
        !matches!(options.server, ServerChoice::Adopted { .. }),
        "the suite stops, starves and disturbs the server: it does so to one that it starts itself, --server embedded or nginx"
    );
    if options.server != ServerChoice::Embedded
        && let Some(case) = options.cases.iter().find(|case| case.needs_embedded())
    {
        bail!(
            "the fault of case {case} is committed by the embedded server only: leave out the case, or --server"
        );
    }
    Ok(())
}

/// One run with its injections: its results folder, and what was injected.
fn episode(
    case: Case,
    options: &TruthOptions,
    folder: &Path,
    random: &mut Xoshiro256PlusPlus,
    interrupted: &AtomicBool,
) -> anyhow::Result<(PathBuf, Vec<Window>)> {
    let faults_path = folder.join("faults");
    // Of an earlier suite into the same folder.
    let _ = fs::remove_file(&faults_path);
    let faults = Faults::create(&faults_path)?;
    Injector::before_run(case, &faults);
    let mut run = Run::start(case, options, folder, &faults_path, random.random())?;
    let ends = run.ends()?;
    let mut injector = Injector::prepare(case, &ends, faults)?;
    let mut windows = Vec::new();
    loop {
        let pause = Duration::from_millis(random.random_range(PAUSE_MS));
        let until = Instant::now() + pause;
        while Instant::now() < until {
            thread::sleep(POLL);
            if run.has_ended()? {
                drop(injector);
                inject::write_log(&folder.join("injections.jsonl"), &windows)?;
                return Ok((run.results()?, windows));
            }
            if interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
        }
        match injector.inject() {
            Ok(injected) => windows.extend(injected),
            // The ends of the connections are gone some time before the run has analysed what they recorded.
            Err(_) if !windows.is_empty() && run.is_ending()? => {}
            Err(error) => return Err(error),
        }
    }
}

/// What makes a run's server the one that was chosen.
fn server_flags(server: &ServerChoice, faults: &Path) -> Vec<OsString> {
    match server {
        ServerChoice::Nginx { path, root } => {
            let named = [("--nginx", path), ("--nginx-root", root)]
                .into_iter()
                .filter_map(|(flag, value)| Some([flag.into(), value.clone()?.into()]));
            ["--server".into(), "nginx".into()]
                .into_iter()
                .chain(named.flatten())
                .collect()
        }
        ServerChoice::Embedded | ServerChoice::Adopted { .. } => vec!["--faults".into(), faults.into()],
    }
}

/// The run under test: this very program, as a user would start it.
struct Run {
    child: Child,
    folder: PathBuf,
    stderr: PathBuf,
}

impl Run {
    fn start(
        case: Case,
        options: &TruthOptions,
        folder: &Path,
        faults: &Path,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let runs = folder.join("runs");
        let _ = fs::remove_dir_all(&runs);
        let stderr = folder.join("stderr");
        let (rate_hz, duration) = case.load(options.rate_hz, options.duration);
        let child = Command::new(std::env::current_exe().context("find this program's own file")?)
            .args(["run", "--quiet", "--json", "--trials", "1", "--warmup", "500ms"])
            .arg("--rate")
            .arg(rate_hz.to_string())
            .arg("--duration")
            .arg(humantime::format_duration(duration).to_string().replace(' ', ""))
            .arg("--seed")
            .arg((seed >> 11).to_string())
            .arg("--results")
            .arg(&runs)
            .args(server_flags(&options.server, faults))
            .args(case.run_flags(&allowed_cpus()?))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&stderr)?)
            .spawn()
            .context("start a run")?;
        Ok(Self {
            child,
            folder: runs,
            stderr,
        })
    }

    /// Whom to inject into, once the run has started its ends.
    fn ends(&mut self) -> anyhow::Result<Ends> {
        let deadline = Instant::now() + START_MAX;
        loop {
            if let Ok(results) = self.results()
                && let Ok(manifest) = Manifest::read(&results)
                && !manifest.server.threads.is_empty()
            {
                return Ends::of(&manifest);
            }
            if self.has_ended()? || Instant::now() > deadline {
                bail!("the run did not start: {}", self.complaint());
            }
            thread::sleep(POLL);
        }
    }

    /// Whether it is over; one that failed is an error.
    fn has_ended(&mut self) -> anyhow::Result<bool> {
        match self.child.try_wait()? {
            None => Ok(false),
            Some(status) if status.success() => Ok(true),
            Some(status) => bail!("the run failed ({status}): {}", self.complaint()),
        }
    }

    /// Whether one of the measured threads has gone already: the rest follows.
    fn is_ending(&self) -> anyhow::Result<bool> {
        let Ok(manifest) = Manifest::read(&self.results()?) else {
            return Ok(false);
        };
        let mut threads = manifest.client.threads.iter().chain(&manifest.server.threads);
        Ok(threads.any(|tid| !Path::new(&format!("/proc/{tid}")).exists()))
    }

    fn complaint(&self) -> String {
        fs::read_to_string(&self.stderr)
            .unwrap_or_default()
            .trim()
            .to_owned()
    }

    fn results(&self) -> anyhow::Result<PathBuf> {
        let mut folders = fs::read_dir(&self.folder)?;
        let folder = folders.next().context("no results folder yet")??;
        Ok(folder.path())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Its agents die with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
