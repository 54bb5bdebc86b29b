//! What several tests of the kernel's side need: root, patience, hosts that are threads, and the probes' view of some work.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(
    clippy::unwrap_used,
    reason = "in a test's helper, too, a panic is the report"
)]

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sched::{CloneFlags, CpuSet, sched_setaffinity, unshare},
    unistd::{Pid, gettid},
};
use pqtail::{
    collect::{
        drain::Drain,
        host,
        probes::{ProbeSettings, Probes},
    },
    record::stream::{Recording, StreamKind},
};
use pqtail_common::RECORD_BYTES;

/// Generous: it is only waited for in full when something is broken.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// More than the header of any recording: a file as large as this holds records.
pub(crate) const BEGUN_BYTES: u64 = 1024;

/// Whether the kernel allows the test; if not, stderr has the reason. In CI a skip would be a lie.
pub(crate) fn is_privileged(test: &str) -> bool {
    if host::is_root() {
        return true;
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "{test} needs root, and CI is set: run the tests as root"
    );
    eprintln!("SKIPPED {test}: network namespaces and eBPF need root");
    false
}

/// The same for tests that share CPUs or probes: one at a time.
pub(crate) fn privileged(test: &str) -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    is_privileged(test).then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The file system with nginx that `cargo xtask test` provides; without it stderr says what is missing, and under CI it must be there.
pub(crate) fn nginx_root(test: &str) -> Option<PathBuf> {
    const ROOT: &str = "PQTAIL_NGINX_ROOT";
    let root = std::env::var_os(ROOT).map(PathBuf::from);
    assert!(
        root.is_some() || std::env::var_os("CI").is_none(),
        "{test} needs {ROOT}, and CI is set: run `cargo xtask test`"
    );
    if root.is_none() {
        eprintln!(
            "SKIPPED {test}: needs an nginx with OpenSSL 3.5: run `cargo xtask test`, or name its file system in {ROOT}"
        );
    }
    root
}

/// Ends its process when it goes, also when the test fails.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes a P-256 key and a certificate for this name with the `openssl` program; returns where they are.
pub(crate) fn make_certificate(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let (key, certificate) = (folder.join("key.pem"), folder.join("certificate.pem"));
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj"])
        .arg(format!("/CN={name}"))
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .expect("the program openssl");
    assert_success(&output);
    (key, certificate)
}

/// What a program says on stderr is the test's complaint if it failed.
pub(crate) fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The folder of the one run in a folder of results; `None` while there is none yet.
pub(crate) fn only_folder(results: &Path) -> Option<PathBuf> {
    let mut folders = fs::read_dir(results)
        .ok()?
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir());
    let first = folders.next()?;
    assert_eq!(folders.next(), None, "one run has one folder");
    Some(first)
}

/// Waits by condition: no sleep decides the outcome, only the deadline.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn pin(cpu: u32) {
    let mut set = CpuSet::new();
    set.set(cpu as usize).unwrap();
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

/// The probes' view while `work` runs, in the order of the ring; nothing may be lost.
pub(crate) fn recorded(settings: &ProbeSettings, work: impl FnOnce()) -> Vec<[u8; RECORD_BYTES]> {
    let mut probes = Probes::attach(settings).unwrap();
    let drain = Drain::start(&mut probes, None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel.pqr");
    drain.begin_trial(&path, 0).unwrap();
    work();
    let summary = drain.end_trial().unwrap();
    assert!(summary.lost.values().all(|&count| count == 0));
    Recording::open(&path, StreamKind::Kernel).unwrap().records
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace of its own.
pub(crate) struct Host {
    pub(crate) tid: u32,
    /// Inode number of its network namespace.
    pub(crate) namespace: u32,
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    pub(crate) fn start(name: &str) -> Self {
        let (tasks, inbox) = mpsc::channel::<Task>();
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                let namespace = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
                tell.send((gettid().as_raw().cast_unsigned(), namespace as u32))
                    .unwrap();
                for task in inbox {
                    task();
                }
            })
            .unwrap();
        let (tid, namespace) = told.recv().expect("root may make a namespace");
        Self {
            tid,
            namespace,
            tasks: Some(tasks),
            thread: Some(thread),
        }
    }

    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        let task = Box::new(move || tell.send(work()).unwrap());
        self.tasks.as_ref().unwrap().send(task).unwrap();
        told.recv().expect("the host's thread says why it failed")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
