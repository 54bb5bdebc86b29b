//! Whole runs of the real program on this machine: how they end, and what is left of them.
//!
//! They need root. Without it they say so by name, except under CI, where a test that did not run is a failure.
#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

mod common;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    net::if_::if_nameindex,
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use pqtail::{
    collect::{
        host,
        link::{CLIENT_NAME, SERVER_NAME},
        tls::expected,
    },
    plan::condition::Condition,
    record::{
        manifest::{Manifest, Status},
        stamps::{Outcome, RequestStamps},
        stream::{Recording, StreamKind},
    },
};
use serde_json::Value;
use tempfile::TempDir;

use common::{BEGUN_BYTES, DEADLINE, is_privileged, only_folder, wait_until};

/// Set for a run and so for all its descendants, whoever their parent is by now.
const MARK: &str = "PQTAIL_TEST_RUN";

/// A run that is over soon, and whose requests all end well however busy the machine is.
const SHORT: [&str; 12] = [
    "--timeout",
    "60s",
    "--rate",
    "100",
    "--duration",
    "1200ms",
    "--warmup",
    "200ms",
    "--trials",
    "1",
    "--seed",
    "7",
];

/// A run that goes on until something ends it.
const LONG: [&str; 10] = [
    "--rate",
    "100",
    "--duration",
    "10m",
    "--warmup",
    "0s",
    "--trials",
    "1",
    "--seed",
    "7",
];

/// One run at a time: every run pins its threads to the same CPUs.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_short_run_is_complete_and_its_files_agree() {
    if !is_privileged("a_short_run_is_complete_and_its_files_agree") {
        return;
    }
    let sample = sample();
    let manifest = Manifest::read(&sample.folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert_eq!(manifest.trials.len(), 2);
    for file in published(&manifest) {
        assert!(sample.folder.join(&file).metadata().unwrap().len() > 0, "{file}");
    }

    let mut latencies_ns = BTreeMap::new();
    for record in &manifest.trials {
        let (trial, arm) = (record.trial.index, record.trial.arm);
        let kernel = &record.kernel["raw/local"];
        assert!(kernel.lost.is_empty(), "{:?}", kernel.lost);
        assert!(kernel.written.records > 0 && record.connections.records > 0);
        let requests = requests(&sample.folder, trial);
        let measured = requests.iter().filter(|request| request.is_measured());
        assert!(measured.clone().count() > 0, "trial {trial} measured nothing");
        for request in measured {
            assert_eq!(request.outcome(), Outcome::Ok, "{arm}: {request:?}");
            assert_eq!(request.group, expected(arm, &Condition::default()).group, "{arm}");
            latencies_ns.insert((trial, request.request), request.latency_ns().unwrap());
        }
    }

    let summary = summary(&sample.folder);
    for key in [
        "schema",
        "verdicts",
        "arms",
        "differences",
        "losses",
        "probes",
        "clock",
    ] {
        assert!(!summary[key].is_null(), "no {key}");
    }
    for rule in ["complete", "errors", "group", "records complete"] {
        assert!(verdict(&summary, rule).is_ok(), "{summary:#}");
    }
    let outliers = outliers(&sample.folder);
    assert!(!outliers.is_empty());
    for outlier in &outliers {
        assert_eq!(
            outlier.latency_ns,
            latencies_ns[&(outlier.trial, outlier.request)]
        );
        assert_eq!(
            outlier.ledger.values().sum::<u64>(),
            outlier.latency_ns,
            "{outlier:?}"
        );
    }

    let folder = sample.folder.display().to_string();
    for said in ["x25519", "x25519mlkem768", "p99.9", "Tail budget", &folder] {
        assert!(sample.stdout.contains(said), "no '{said}' in:\n{}", sample.stdout);
    }
}

#[test]
fn the_recorded_files_make_the_same_bytes_at_any_place() {
    if !is_privileged("the_recorded_files_make_the_same_bytes_at_any_place") {
        return;
    }
    let manifest = Manifest::read(&sample().folder).unwrap();
    let copy = Copied::of_sample();
    let elsewhere = copy.scratch.path().join("moved/elsewhere");
    fs::create_dir(elsewhere.parent().unwrap()).unwrap();
    fs::rename(&copy.folder, &elsewhere).unwrap();
    for file in published(&manifest) {
        fs::remove_file(elsewhere.join(file)).unwrap();
    }
    let analyzed = pqtail(["analyze".as_ref(), elsewhere.as_os_str()]);
    assert!(analyzed.status.success(), "{}", analyzed.stderr);
    for file in published(&manifest) {
        let (first, again) = (sample().folder.join(&file), elsewhere.join(&file));
        assert!(
            fs::read(first).unwrap() == fs::read(again).unwrap(),
            "{file} differs"
        );
    }

    let json = pqtail(["analyze".as_ref(), elsewhere.as_os_str(), "--json".as_ref()]);
    let printed: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(printed, summary(&elsewhere));
}

#[test]
fn stories_are_told_and_unknown_requests_answered_with_those_there_are() {
    if !is_privileged("stories_are_told_and_unknown_requests_answered_with_those_there_are") {
        return;
    }
    let folder = &sample().folder;
    let explain = |arguments: &[&str]| {
        let mut all = vec!["explain", folder.to_str().unwrap()];
        all.extend(arguments);
        pqtail(all)
    };
    let outliers = outliers(folder);
    let heading = |trial: u32, request: u32| format!("Request {request} of trial {trial} ");

    let worst = explain(&["--top", "3"]);
    assert_eq!(worst.stdout.matches(" of trial ").count(), outliers.len().min(3));
    for outlier in outliers.iter().take(3) {
        let heading = heading(outlier.trial, outlier.request);
        assert!(
            worst.stdout.contains(&heading),
            "no '{heading}' in:\n{}",
            worst.stdout
        );
    }
    let one = explain(&["--trial", "1"]);
    assert!(
        one.stdout.contains(" of trial 1 ") && !one.stdout.contains(" of trial 0 "),
        "{}",
        one.stdout
    );
    let any = explain(&["--trial", "0", "--request", "110"]);
    for said in [
        &heading(0, 110),
        "Where the time went",
        "Interval by interval",
        "read the response",
    ] {
        assert!(any.stdout.contains(said), "no '{said}' in:\n{}", any.stdout);
    }
    let json = explain(&["--trial", "0", "--request", "110", "--json"]);
    let line: Outlier = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((line.trial, line.request), (0, 110));
    assert_eq!(line.ledger.values().sum::<u64>(), line.latency_ns);

    let last = requests(folder, 0)
        .iter()
        .map(|request| request.request)
        .max()
        .unwrap();
    let range = format!("0 to {last}");
    for (arguments, said) in [
        (
            &["--trial", "0", "--request", "1000000"][..],
            ["1000000", range.as_str()],
        ),
        (&["--trial", "2", "--request", "0"], ["trial 2", "0 to 1"]),
        (&["--request", "1000000"], ["1000000", "from 0"]),
        (&["--trial", "2"], ["trial 2", "0 to 1"]),
    ] {
        explain(arguments).refused(&said);
    }
}

#[test]
fn a_cut_recording_is_analysed_as_far_as_it_goes_and_the_verdict_says_so() {
    if !is_privileged("a_cut_recording_is_analysed_as_far_as_it_goes_and_the_verdict_says_so") {
        return;
    }
    let whole = requests(&sample().folder, 0).len();
    for file in ["raw/local/kernel-000.pqr", "raw/client/requests-000.pqr"] {
        let copy = Copied::of_sample();
        let path = copy.folder.join(file);
        cut_in_the_middle(&path);
        let analyzed = pqtail(["analyze".as_ref(), copy.folder.as_os_str()]);
        assert!(analyzed.status.success(), "{file}: {}", analyzed.stderr);
        let figure = verdict(&summary(&copy.folder), "records complete").unwrap_err();
        assert!(figure.contains("1 recordings damaged, cut"), "{file}: {figure}");
        assert!(
            analyzed.stdout.contains("FAILED  records complete"),
            "{file}:\n{}",
            analyzed.stdout
        );
        if file.contains("requests") {
            let left = requests(&copy.folder, 0).len();
            assert!(0 < left && left < whole, "{left} of {whole}");
        }
        for outlier in outliers(&copy.folder) {
            assert_eq!(outlier.ledger.values().sum::<u64>(), outlier.latency_ns);
        }
    }
}

#[test]
fn a_recording_that_is_missing_or_empty_counts_as_damage() {
    if !is_privileged("a_recording_that_is_missing_or_empty_counts_as_damage") {
        return;
    }
    type Take = fn(&Path) -> io::Result<()>;
    let remove: Take = |path| fs::remove_file(path);
    let empty: Take = |path| File::create(path).map(drop);
    for (file, take) in [
        ("raw/local/kernel-001.pqr", remove),
        ("raw/client/requests-001.pqr", empty),
        ("raw/server/connections-001.pqr", empty),
    ] {
        let copy = Copied::of_sample();
        take(&copy.folder.join(file)).unwrap();
        let analyzed = pqtail(["analyze".as_ref(), copy.folder.as_os_str()]);
        assert!(analyzed.status.success(), "{file}: {}", analyzed.stderr);
        let figure = verdict(&summary(&copy.folder), "records complete").unwrap_err();
        assert!(figure.contains("1 recordings"), "{file}: {figure}");
    }
}

#[test]
fn what_is_no_results_folder_is_named() {
    if !is_privileged("what_is_no_results_folder_is_named") {
        return;
    }
    let copy = Copied::of_sample();
    let analyze = || pqtail(["analyze".as_ref(), copy.folder.as_os_str()]);

    let foreign = copy.folder.join("raw/local/kernel-000.pqr");
    let recording = fs::read(&foreign).unwrap();
    fs::write(&foreign, b"\x7fELF: some other program's file").unwrap();
    analyze().refused(&["kernel-000.pqr", "not a recording of this program"]);
    fs::copy(copy.folder.join("raw/client/requests-000.pqr"), &foreign).unwrap();
    analyze().refused(&["kernel-000.pqr", "Requests records"]);
    fs::write(&foreign, recording).unwrap();

    let path = copy.folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["schema"] = 999.into();
    fs::write(&path, manifest.to_string()).unwrap();
    analyze().refused(&["manifest.json", "schema version 999", "analyse it with pqtail"]);
    fs::write(&path, "{").unwrap();
    analyze().refused(&["manifest.json is no manifest"]);
    fs::remove_file(&path).unwrap();
    analyze().refused(&["manifest.json", "results folder"]);
}

#[test]
fn an_interrupt_ends_the_run_in_order() {
    if !is_privileged("an_interrupt_ends_the_run_in_order") {
        return;
    }
    // From `kill`, from a terminal, and from whoever stops a service.
    let interrupts: [fn(Pid) -> nix::Result<()>; 3] = [
        |controller| kill(controller, Signal::SIGINT),
        |controller| killpg(controller, Signal::SIGINT),
        |controller| killpg(controller, Signal::SIGTERM),
    ];
    for interrupt in interrupts {
        let mut run = Run::start(&LONG);
        run.wait_for_records();
        let namespaces = run.namespaces();
        assert_eq!(namespaces.len(), 2, "each end has one");
        interrupt(run.controller()).unwrap();
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
        run.assert_nothing_left(&namespaces);
        let folder = run.folder();
        assert_cut(&folder, "interrupted");
        assert_has_requests(&summary(&folder));
        let kernel =
            Recording::<[u8; 64]>::open(&folder.join("raw/local/kernel-000.pqr"), StreamKind::Kernel);
        assert!(!kernel.unwrap().cut, "an orderly end closes its recordings");
        assert!(ended.stdout.contains("interrupted"), "{}", ended.stdout);
    }
}

#[test]
fn an_interrupt_during_the_set_up_is_heard() {
    if !is_privileged("an_interrupt_during_the_set_up_is_heard") {
        return;
    }
    let mut run = Run::start(&LONG);
    wait_until("an agent has started", || run.processes().len() > 1);
    kill(run.controller(), Signal::SIGINT).unwrap();
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
    run.assert_nothing_left(&[]);
    // Heard in time, it leaves nothing that looks like a result; else the trial that it reached is cut.
    if let Some(folder) = only_folder(&run.results()) {
        assert_cut(&folder, "interrupted");
    }
}

#[test]
fn a_killed_run_leaves_records_and_nothing_else() {
    if !is_privileged("a_killed_run_leaves_records_and_nothing_else") {
        return;
    }
    let mut run = Run::start(&LONG);
    run.wait_for_records();
    let namespaces = run.namespaces();
    kill(run.controller(), Signal::SIGKILL).unwrap();
    run.end();
    wait_until("the agents have ended", || run.processes().is_empty());
    run.assert_nothing_left(&namespaces);
    let folder = run.folder();
    assert_eq!(Manifest::read(&folder).unwrap().status, Status::Running);
    let summary = analyzed(&folder);
    let figure = verdict(&summary, "complete").unwrap_err();
    assert!(figure.contains("killed"), "{figure}");
    // The manifest has no entry of the trial; its place in the log comes from the plan.
    let log = fs::read_to_string(folder.join("latency.hlog")).unwrap();
    assert!(log.contains(",0.000,600.000,"), "{log}");
}

#[test]
fn an_agent_that_is_killed_ends_the_run_by_name() {
    if !is_privileged("an_agent_that_is_killed_ends_the_run_by_name") {
        return;
    }
    for (thread, name) in [
        ("pq-serve-", "the server"),
        ("pq-load-", "the load generator"),
        ("pqtail-drain", "the recorder"),
    ] {
        let mut run = Run::start(&LONG);
        run.wait_for_records();
        let namespaces = run.namespaces();
        kill(run.agent(thread), Signal::SIGKILL).unwrap();
        let ended = run.end();
        assert_eq!(ended.status.code(), Some(1), "{name}: {}", ended.stderr);
        for said in [name, "died", "SIGKILL"] {
            assert!(
                ended.stderr.contains(said),
                "{name}: no '{said}' in:\n{}",
                ended.stderr
            );
        }
        run.assert_nothing_left(&namespaces);
        assert_cut(&run.folder(), name);
        assert_has_requests(&summary(&run.folder()));
    }
}

#[test]
fn without_probes_there_are_latencies_and_nobody_is_blamed() {
    if !is_privileged("without_probes_there_are_latencies_and_nobody_is_blamed") {
        return;
    }
    let mut run = Run::start(&[&SHORT[..], &["--no-probes"]].concat());
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    run.assert_nothing_left(&[]);
    for missing in ["no causes", "no clock alignment", "no steal"] {
        assert!(
            ended.stderr.contains(missing),
            "no '{missing}' in:\n{}",
            ended.stderr
        );
    }
    let folder = run.folder();
    let first = summary(&folder);
    assert!(verdict(&first, "complete").is_ok());
    for arm in ["x25519", "x25519mlkem768"] {
        assert!(first["arms"][arm]["percentiles_ns"]["p50"].as_u64().unwrap() > 0);
        let budget = first["tail_budget"][arm].as_array().unwrap();
        assert!(budget.is_empty(), "{budget:?}");
    }
    assert!(outliers(&folder).is_empty());
    pqtail([
        "explain".as_ref(),
        folder.as_os_str(),
        "--trial".as_ref(),
        "0".as_ref(),
        "--request".as_ref(),
        "110".as_ref(),
    ])
    .refused(&["--no-probes"]);

    // The stamps are all there is, and their damage is no less damage.
    cut_in_the_middle(&folder.join("raw/client/requests-000.pqr"));
    let figure = verdict(&analyzed(&folder), "records complete").unwrap_err();
    assert!(figure.contains("1 recordings"), "{figure}");
}

#[test]
fn what_makes_no_run_is_refused_by_its_flag() {
    let scratch = tempfile::tempdir().unwrap();
    for (flags, said) in [
        (
            &["--arms", "kyber"][..],
            &["--arms", "kyber", "x25519mlkem768"][..],
        ),
        (&["--arms", "x25519,x25519"], &["--arms", "twice"]),
        (&["--rate", "0"], &["--rate"]),
        (&["--rate", "NaN"], &["--rate"]),
        (
            &["--duration", "1s", "--warmup", "1s"],
            &["--duration", "--warmup"],
        ),
        (&["--duration", "soon"], &["--duration"]),
        (&["--trials", "0"], &["--trials"]),
        (&["--ring-mib", "3"], &["--ring-mib", "power of two"]),
    ] {
        refused_run(scratch.path(), flags, said);
    }
}

#[test]
fn what_this_machine_cannot_run_is_refused_with_a_remedy() {
    if !is_privileged("what_this_machine_cannot_run_is_refused_with_a_remedy") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let below = file.join("results");
    for (flags, said) in [
        (
            &["--client-cpus", "999"][..],
            &["--client-cpus", "999", "may be used are"][..],
        ),
        (&["--server-cpus", "0,999"], &["--server-cpus", "999"]),
        (&["--drain-cpus", "999"], &["--drain-cpus", "999"]),
        (&["--port", "65535"], &["--port 65535"]),
        (&["--port", "0"], &["--port 0"]),
        (&["--results", file.to_str().unwrap()], &["--results"]),
        (&["--results", below.to_str().unwrap()], &["--results"]),
        (&["--results", "/proc"], &["--results"]),
    ] {
        refused_run(scratch.path(), flags, said);
    }
}

#[test]
fn without_root_the_error_says_what_is_needed() {
    const NOBODY: u32 = 65_534;
    let scratch = tempfile::tempdir().unwrap();
    let results = scratch.path().join("results");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pqtail"));
    if host::is_root() {
        // Another user may not be allowed into the folder that the program was built in.
        let program = scratch.path().join("pqtail");
        fs::copy(env!("CARGO_BIN_EXE_pqtail"), &program).unwrap();
        for path in [scratch.path(), &program] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        command = Command::new(program);
        command.uid(NOBODY).gid(NOBODY);
    }
    command.arg("run").args(SHORT).arg("--results").arg(&results);
    said(&mut command).refused(&["root", "sudo"]);
    assert!(!results.exists());
}

#[test]
fn a_disk_without_room_is_refused_before_anything_starts() {
    if !is_privileged("a_disk_without_room_is_refused_before_anything_starts") {
        return;
    }
    let mut run = Run::start_on_disk(2, &SHORT);
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1));
    for said in ["disk", "2 MiB left", "--results"] {
        assert!(ended.stderr.contains(said), "no '{said}' in:\n{}", ended.stderr);
    }
    run.assert_nothing_left(&[]);
}

#[test]
fn a_disk_that_fills_up_ends_the_run_while_the_report_still_fits() {
    if !is_privileged("a_disk_that_fills_up_ends_the_run_while_the_report_still_fits") {
        return;
    }
    let mut run = Run::start_on_disk(65, &LONG);
    run.wait_for_records();
    let namespaces = run.namespaces();
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("nearly full"), "{}", ended.stderr);
    assert!(ended.stdout.contains("nearly full"), "{}", ended.stdout);
    run.assert_nothing_left(&namespaces);
    let folder = run.folder();
    assert_cut(&folder, "nearly full");
    let figure = verdict(&summary(&folder), "complete").unwrap_err();
    assert!(figure.contains("nearly full"), "{figure}");
    assert!(verdict(&summary(&folder), "records complete").is_ok());
    assert!(folder.join("report.html").exists());
}

#[test]
fn a_disk_that_others_fill_at_once_leaves_what_was_recorded() {
    if !is_privileged("a_disk_that_others_fill_at_once_leaves_what_was_recorded") {
        return;
    }
    let mut run = Run::start_on_disk(80, &LONG);
    run.wait_for_records();
    let namespaces = run.namespaces();
    let filler = run.results().join("filler");
    fill(&filler);
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("No space left on device"),
        "{}",
        ended.stderr
    );
    run.assert_nothing_left(&namespaces);
    assert!(!run.folder().join("manifest.json.part").exists());
    assert_ne!(Manifest::read(&run.folder()).unwrap().status, Status::Complete);

    fs::remove_file(filler).unwrap();
    let summary = analyzed(&run.folder());
    assert!(verdict(&summary, "complete").is_err());
}

/// A run, under way or ended.
struct Run {
    child: Child,
    scratch: TempDir,
    mark: String,
    /// Keeps the disk of its own, if it has one, beyond the end of the mount namespace.
    disk: Option<File>,
    _alone: MutexGuard<'static, ()>,
}

/// How a program ended.
struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Run {
    fn start(flags: &[&str]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let results = scratch.path().join("results");
        Self::spawn(scratch, &results, flags, |_| {})
    }

    /// With a file system of this size for the results, which nobody else sees.
    fn start_on_disk(mib: u64, flags: &[&str]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let results = scratch.path().join("disk");
        fs::create_dir(&results).unwrap();
        let (place, size) = (results.clone(), format!("size={mib}m"));
        let mount_disk = move || {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(
                Some("tmpfs"),
                &place,
                Some("tmpfs"),
                MsFlags::empty(),
                Some(size.as_str()),
            )?;
            Ok(())
        };
        let mut run = Self::spawn(scratch, &results, flags, |command| {
            // SAFETY: between fork and exec the closure only makes three system calls, whose arguments are copied to the
            // stack or were allocated before.
            unsafe { command.pre_exec(mount_disk) };
        });
        let inside = format!("/proc/{}/root{}", run.child.id(), results.display());
        run.disk = File::open(inside).ok();
        run
    }

    fn spawn(scratch: TempDir, results: &Path, flags: &[&str], prepare: impl FnOnce(&mut Command)) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
        let mut command = Command::new(env!("CARGO_BIN_EXE_pqtail"));
        command.arg("run").args(flags).arg("--results").arg(results);
        // Files, not pipes: a descendant that outlives the run must not keep the test from seeing its end.
        command
            .env(MARK, &mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(File::create(scratch.path().join("stdout")).unwrap())
            .stderr(File::create(scratch.path().join("stderr")).unwrap());
        prepare(&mut command);
        Self {
            child: command.spawn().unwrap(),
            scratch,
            mark,
            disk: None,
            _alone: alone,
        }
    }

    fn controller(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// The folder of results folders, as the test reaches it.
    fn results(&self) -> PathBuf {
        match &self.disk {
            Some(disk) => format!("/proc/{}/fd/{}", std::process::id(), disk.as_raw_fd()).into(),
            None => self.scratch.path().join("results"),
        }
    }

    /// Its one results folder.
    fn folder(&self) -> PathBuf {
        only_folder(&self.results()).expect("the run made a results folder")
    }

    fn said(&self, stream: &str) -> String {
        fs::read_to_string(self.scratch.path().join(stream)).unwrap()
    }

    /// Waits until it is in the middle of its first trial, with records of every kind on disk.
    fn wait_for_records(&mut self) {
        let results = self.results();
        let begin = Instant::now();
        let stored = |folder: &Path, file: &str| {
            folder
                .join(file)
                .metadata()
                .is_ok_and(|file| file.len() > BEGUN_BYTES)
        };
        while !only_folder(&results).is_some_and(|folder| {
            stored(&folder, "raw/client/requests-000.pqr")
                && stored(&folder, "raw/server/connections-000.pqr")
                && stored(&folder, "raw/local/kernel-000.pqr")
        }) {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && begin.elapsed() < DEADLINE,
                "no records: {ended:?}\n{}",
                self.said("stderr")
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(&mut self) -> Ended {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(
                begin.elapsed() < DEADLINE,
                "the run does not end:\n{}",
                self.said("stderr")
            );
            thread::sleep(Duration::from_millis(5));
        };
        Ended {
            status,
            stdout: self.said("stdout"),
            stderr: self.said("stderr"),
        }
    }

    /// The controller and its agents, as far as they live.
    fn processes(&self) -> Vec<Pid> {
        let mark = format!("{MARK}={}", self.mark);
        processes()
            .filter(|pid| {
                let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environment
                    .split(|&byte| byte == 0)
                    .any(|each| each == mark.as_bytes())
            })
            .collect()
    }

    /// The agent that has a thread of this name.
    fn agent(&self, thread: &str) -> Pid {
        let has_thread = |pid: &Pid| {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
            tasks
                .filter_map(Result::ok)
                .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
                .any(|name| name.starts_with(thread))
        };
        let found: Vec<Pid> = self.processes().into_iter().filter(has_thread).collect();
        assert_eq!(found.len(), 1, "agents with a thread {thread}");
        found[0]
    }

    /// The network namespaces of its own.
    fn namespaces(&self) -> Vec<u64> {
        let here = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let mut found: Vec<u64> = self
            .processes()
            .into_iter()
            .filter_map(namespace)
            .filter(|&each| each != here)
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// No process of the run lives, no process is in its namespaces, nothing holds them by name, and no link is left.
    fn assert_nothing_left(&self, namespaces: &[u64]) {
        assert_eq!(self.processes(), []);
        let inside = processes().filter(|&pid| namespace(pid).is_some_and(|each| namespaces.contains(&each)));
        assert_eq!(inside.collect::<Vec<_>>(), []);
        let named = fs::read_dir("/run/netns").into_iter().flatten();
        let left = named
            .filter_map(|entry| entry.ok()?.path().metadata().ok())
            .filter(|each| namespaces.contains(&each.ino()));
        assert_eq!(left.count(), 0, "a named namespace is left");
        let links = if_nameindex().unwrap();
        let left = links
            .iter()
            .filter(|link| [CLIENT_NAME, SERVER_NAME].contains(&link.name().to_str().unwrap_or_default()));
        assert_eq!(left.count(), 0, "a link is left");
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed assertion must not leave processes behind; after the run's end both calls do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// A failure whose message has these words.
    fn refused(&self, words: &[&str]) {
        assert!(!self.status.success(), "it succeeded:\n{}", self.stdout);
        assert!(self.status.code().is_some(), "{}:\n{}", self.status, self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no '{word}' in:\n{}", self.stderr);
        }
    }
}

/// The complete run that several tests look at.
struct Sample {
    folder: PathBuf,
    stdout: String,
}

fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        // No temporary folder: nothing drops what is static.
        let results = Path::new(env!("CARGO_TARGET_TMPDIR")).join("run-sample");
        if results.exists() {
            fs::remove_dir_all(&results).unwrap();
        }
        let scratch = tempfile::tempdir().unwrap();
        let mut run = Run::spawn(scratch, &results, &SHORT, |_| {});
        let ended = run.end();
        assert!(ended.status.success(), "{}", ended.stderr);
        run.assert_nothing_left(&[]);
        Sample {
            folder: only_folder(&results).unwrap(),
            stdout: ended.stdout,
        }
    })
}

/// A copy of the sample, to be spoilt.
struct Copied {
    scratch: TempDir,
    folder: PathBuf,
}

impl Copied {
    fn of_sample() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("copy");
        copy_folder(&sample().folder, &folder);
        Self { scratch, folder }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (from, to) = (
            entry.as_ref().unwrap().path(),
            to.join(entry.as_ref().unwrap().file_name()),
        );
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            fs::copy(from, to).unwrap();
        }
    }
}

fn cut_in_the_middle(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

/// Takes all the room there is.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    let full = loop {
        if let Err(error) = file.write(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::StorageFull, "{full}");
}

/// A line of `outliers.jsonl`, as a foreign reader takes it.
#[derive(Debug, serde::Deserialize)]
struct Outlier {
    request: u32,
    trial: u32,
    latency_ns: u64,
    ledger: BTreeMap<String, u64>,
}

fn outliers(folder: &Path) -> Vec<Outlier> {
    let lines = fs::read_to_string(folder.join("outliers.jsonl")).unwrap();
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn summary(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("summary.json")).unwrap()).unwrap()
}

/// Whether this rule's verdict is good, with its figure.
fn verdict(summary: &Value, rule: &str) -> Result<String, String> {
    let verdicts = summary["verdicts"].as_array().unwrap();
    let found = verdicts.iter().find(|verdict| verdict["rule"] == rule);
    let found = found.unwrap_or_else(|| panic!("no rule '{rule}' in {summary:#}"));
    let figure = found["figure"].as_str().unwrap().to_owned();
    if found["ok"].as_bool().unwrap() {
        Ok(figure)
    } else {
        Err(figure)
    }
}

fn requests(folder: &Path, trial: u32) -> Vec<RequestStamps> {
    let path = folder.join(format!("raw/client/requests-{trial:03}.pqr"));
    Recording::open(&path, StreamKind::Requests).unwrap().records
}

/// The files that `analyze` makes of a complete run.
fn published(manifest: &Manifest) -> Vec<String> {
    let tables = manifest.trials.iter().map(|record| {
        let trial = record.trial;
        format!(
            "requests/arm={}/trial={}/requests.parquet",
            trial.arm, trial.index
        )
    });
    ["summary.json", "outliers.jsonl", "report.html", "latency.hlog"]
        .map(str::to_owned)
        .into_iter()
        .chain(tables)
        .collect()
}

fn assert_cut(folder: &Path, why: &str) {
    let Status::Cut { reason } = Manifest::read(folder).unwrap().status else {
        panic!("the manifest does not say that the run was cut");
    };
    assert!(reason.contains(why), "'{reason}' does not say '{why}'");
}

/// Analyses what is there; returns the summary.
fn analyzed(folder: &Path) -> Value {
    let analyzed = pqtail(["analyze".as_ref(), folder.as_os_str()]);
    assert!(analyzed.status.success(), "{}", analyzed.stderr);
    let summary = summary(folder);
    assert_has_requests(&summary);
    summary
}

fn assert_has_requests(summary: &Value) {
    let arms = summary["arms"].as_object().unwrap();
    let good = arms.values().map(|arm| arm["requests"].as_u64().unwrap());
    assert!(good.sum::<u64>() > 0, "{summary:#}");
}

/// A run that must not start: its error has these words, and it leaves no results folder.
fn refused_run(scratch: &Path, flags: &[&str], words: &[&str]) {
    let results = scratch.join("results");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pqtail"));
    command.arg("run").args(flags);
    if !flags.contains(&"--results") {
        command.arg("--results").arg(&results);
    }
    said(&mut command).refused(words);
    assert_eq!(only_folder(&results), None, "{flags:?}");
}

fn pqtail(arguments: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>) -> Ended {
    said(Command::new(env!("CARGO_BIN_EXE_pqtail")).args(arguments))
}

fn said(command: &mut Command) -> Ended {
    let output = command.stdin(Stdio::null()).output().unwrap();
    Ended {
        status: output.status,
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| Some(Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?)))
}

fn namespace(pid: Pid) -> Option<u64> {
    Some(fs::metadata(format!("/proc/{pid}/ns/net")).ok()?.ino())
}
