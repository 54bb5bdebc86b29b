//! Two hosts that SSH reaches: three network namespaces, with the controller in one and a real sshd in each of the others, and
//! runs of the real program between them.
//!
//! They need root, sshd, ssh and ip. Without root they say so by name, except under CI, where a test that did not run is a
//! failure. The namespaces have no name: they end with the processes inside.
#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

mod common;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use pqtail::record::{
    manifest::{Manifest, Status},
    stamps::{Outcome, RequestStamps},
    stream::{Recording, StreamKind},
};
use serde_json::Value;
use tempfile::TempDir;

use common::{Host, nginx_root, privileged, wait_until};

const SHORT: [&str; 12] = [
    "--rate",
    "50",
    "--duration",
    "2500ms",
    "--warmup",
    "200ms",
    "--trials",
    "1",
    "--timeout",
    "60s",
    "--seed",
    "7",
];
const LONG: [&str; 12] = [
    "--rate",
    "50",
    "--duration",
    "10m",
    "--warmup",
    "0s",
    "--trials",
    "1",
    "--timeout",
    "60s",
    "--seed",
    "7",
];

/// One sshd, in its host's namespace.
struct Sshd {
    child: Child,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A controller and two hosts, wired, with keys.
struct World {
    controller: Host,
    client: Host,
    server: Host,
    sshds: Vec<Option<Sshd>>,
    folder: TempDir,
}

/// Addresses: the controller's link to the client, to the server, and the measured path.
const TO_CLIENT: (&str, &str) = ("10.79.1.1", "10.79.1.2");
const TO_SERVER: (&str, &str) = ("10.79.2.1", "10.79.2.2");
const MEASURED: (&str, &str) = ("10.79.0.1", "10.79.0.2");

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [controller, client, server] = ["controller", "client", "server"].map(Host::start);
        for (here, there, name, (near, far)) in [
            (&controller, &client, "to-client", TO_CLIENT),
            (&controller, &server, "to-server", TO_SERVER),
            (&client, &server, "measured", MEASURED),
        ] {
            let pid = there.tid;
            here.run(move || {
                ip(&format!("link add {name} type veth peer name {name} netns {pid}"));
                ip(&format!("address add {near}/30 dev {name}"));
                ip(&format!("link set {name} up"));
                ip("link set lo up");
            });
            there.run(move || {
                ip(&format!("address add {far}/30 dev {name}"));
                ip(&format!("link set {name} up"));
                ip("link set lo up");
            });
        }
        for key in ["user", "host", "other-host"] {
            let path = folder.path().join(key);
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path);
            assert!(keygen.status().unwrap().success());
        }
        let mut world = Self {
            controller,
            client,
            server,
            sshds: vec![None, None],
            folder,
        };
        world.start_sshd(0, "host", "");
        world.start_sshd(1, "host", "");
        world.write_inventory("user");
        world
    }

    /// `which`: 0 the client's, 1 the server's.
    fn start_sshd(&mut self, which: usize, host_key: &str, more: &str) {
        self.sshds[which] = None;
        let folder = self.folder.path();
        let config = folder.join(format!("sshd-{which}"));
        let text = format!(
            "Port 22\nHostKey {0}/{host_key}\nAuthorizedKeysFile {0}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PasswordAuthentication no\nPermitRootLogin prohibit-password\n{more}\n",
            folder.display()
        );
        fs::write(&config, text).unwrap();
        // Where sshd separates privileges; distributions make it at boot.
        fs::create_dir_all("/run/sshd").unwrap();
        let log = folder.join(format!("sshd-{which}.log"));
        let host = if which == 0 { &self.client } else { &self.server };
        let child = host.run(move || {
            let mut sshd = Command::new("unshare");
            // A disk of its own for what a run leaves in /var/tmp, of a size that a test may change.
            sshd.args(["--mount", "--propagation", "private", "sh", "-c"]);
            sshd.arg("mount -t tmpfs none /var/tmp && exec $(command -v sshd || echo /usr/sbin/sshd) -D -e -f \"$0\"");
            let log = fs::File::create(log).unwrap();
            sshd.arg(config).stdin(Stdio::null()).stderr(log).spawn().unwrap()
        });
        self.sshds[which] = Some(Sshd { child });
        let address = [TO_CLIENT, TO_SERVER][which].1;
        self.controller.run(move || {
            wait_until("sshd listens", || {
                std::net::TcpStream::connect((address, 22)).is_ok()
            });
        });
    }

    fn write_inventory(&self, identity: &str) {
        let text = format!(
            "[client]\nssh = 'root@{}'\nidentity = '{identity}'\naddress = '{}'\n[server]\nssh = 'root@{}'\nidentity = '{identity}'\naddress \
             = '{}'\n",
            TO_CLIENT.1, MEASURED.0, TO_SERVER.1, MEASURED.1
        );
        fs::write(self.inventory(), text).unwrap();
    }

    fn inventory(&self) -> PathBuf {
        self.folder.path().join("hosts.toml")
    }

    fn results(&self) -> PathBuf {
        self.folder.path().join("results")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pqtail"));
        command.args(arguments).stdin(Stdio::null());
        command
    }

    fn run_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&["run", "--server-cpus", "1"]);
        command.arg("--hosts").arg(self.inventory());
        command.arg("--results").arg(self.results()).args(arguments);
        command
    }

    fn pqtail(&self, mut command: Command) -> Output {
        self.controller.run(move || command.output().unwrap())
    }

    fn only_run(&self) -> PathBuf {
        let mut runs = fs::read_dir(self.results()).unwrap();
        let run = runs.next().unwrap().unwrap().path();
        assert!(runs.next().is_none());
        run
    }

    /// A run that goes on, with records at both ends.
    fn start_long(&self) -> Child {
        let mut command = self.run_command(&LONG);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let run = self.controller.run(move || command.spawn().unwrap());
        wait_until("both ends record", || {
            ["client/requests-000.pqr", "server/connections-000.pqr"]
                .iter()
                .all(|file| self.size_there(file) > 1024)
        });
        run
    }

    /// Bytes of a recording where the agents write it; 0 if it is not there.
    fn size_there(&self, file: &str) -> u64 {
        let mut sizes = self.lodgings().into_iter().map(|lodging| {
            let file = lodging.join("raw").join(file);
            fs::metadata(file).map_or(0, |file| file.len())
        });
        sizes.find(|&size| size > 0).unwrap_or(0)
    }

    /// The runs' folders on both hosts, as seen from here.
    fn lodgings(&self) -> Vec<PathBuf> {
        let roots = self.sshds.iter().flatten();
        let roots = roots.map(|sshd| format!("/proc/{}/root/var/tmp", sshd.child.id()));
        roots
            .filter_map(|root| fs::read_dir(root).ok())
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("pqtail-"))
            })
            .collect()
    }

    /// Processes of the program on a host.
    fn agents(&self, host: &Host) -> Vec<Pid> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.starts_with(b"/var/tmp/pqtail-") && netns_of(*pid) == Some(host.namespace)
            })
            .map(Pid::from_raw)
            .collect()
    }

    fn assert_nothing_left(&self) {
        wait_until("the agents have ended", || {
            self.agents(&self.client).is_empty() && self.agents(&self.server).is_empty()
        });
        assert_eq!(
            self.lodgings(),
            Vec::<PathBuf>::new(),
            "a run leaves a host as it was"
        );
    }
}

fn netns_of(pid: i32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    Some(fs::metadata(format!("/proc/{pid}/ns/net")).ok()?.ino() as u32)
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.unwrap().success(), "ip {arguments}");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

fn requests(folder: &Path) -> Vec<RequestStamps> {
    let path = folder.join("raw/client/requests-000.pqr");
    Recording::open(&path, StreamKind::Requests).unwrap().records
}

fn summary(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("summary.json")).unwrap()).unwrap()
}

fn assert_refused(output: &Output, words: &[&str]) {
    let said = said(output);
    assert!(!output.status.success(), "{said}");
    for word in words {
        assert!(said.contains(word), "no '{word}' in:\n{said}");
    }
}

#[test]
fn a_run_between_two_hosts_is_complete_and_leaves_them_as_they_were() {
    let Some(_alone) = privileged("a_run_between_two_hosts_is_complete_and_leaves_them_as_they_were") else {
        return;
    };
    let world = World::new();
    let output = world.pqtail(world.run_command(&SHORT));
    assert!(output.status.success(), "{}", said(&output));
    let folder = world.only_run();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert_eq!(manifest.trials.len(), 2);
    assert_ne!(
        manifest.client.kernel, manifest.server.kernel,
        "each host has a recorder"
    );
    assert_ne!(manifest.client.netns, manifest.server.netns);
    for request in requests(&folder).iter().filter(|each| each.is_measured()) {
        assert_eq!(request.outcome(), Outcome::Ok, "{request:?}");
    }
    let summary = summary(&folder);
    let verdict = |rule: &str| {
        let verdicts = summary["verdicts"].as_array().unwrap();
        verdicts.iter().find(|each| each["rule"] == rule).unwrap()["ok"].clone()
    };
    for rule in ["complete", "errors", "group", "records complete"] {
        assert_eq!(verdict(rule), true, "{rule}: {summary:#}");
    }
    // Both kernels are one, which the analysis is not told of: the truth lies within its bound.
    let clock = &summary["clock"];
    assert_eq!(clock["shared_kernel"], false);
    let (offset_ns, bound_ns) = (clock["offset_ns"].as_i64(), clock["error_ns_max"].as_u64());
    assert!(offset_ns.unwrap().unsigned_abs() <= bound_ns.unwrap(), "{clock}");
    for arm in summary["arms"].as_object().unwrap().values() {
        let one_way = arm["one_way"].as_array().unwrap();
        let names: Vec<_> = one_way
            .iter()
            .map(|each| each["what"].as_str().unwrap())
            .collect();
        assert_eq!(names[..3], ["SYN", "SYN-ACK", "client flight 1"]);
        for each in one_way {
            let p50_ns = each["p50_ns"].as_i64().unwrap();
            assert!(
                p50_ns >= -bound_ns.unwrap().cast_signed(),
                "before it left: {each}"
            );
        }
    }
    let outliers = fs::read_to_string(folder.join("outliers.jsonl")).unwrap();
    assert!(!outliers.is_empty());
    for line in outliers.lines() {
        let outlier: Value = serde_json::from_str(line).unwrap();
        let ledger = outlier["ledger"].as_object().unwrap();
        let sum: u64 = ledger.values().map(|ns| ns.as_u64().unwrap()).sum();
        assert_eq!(Some(sum), outlier["latency_ns"].as_u64());
    }
    assert!(!folder.join("hosts.json").exists(), "nothing lies elsewhere");
    world.assert_nothing_left();
}

#[test]
fn nginx_on_another_host_is_told_by_that_hosts_kernel() {
    const TEST: &str = "nginx_on_another_host_is_told_by_that_hosts_kernel";
    let (Some(_alone), Some(root)) = (privileged(TEST), nginx_root(TEST)) else {
        return;
    };
    let world = World::new();
    let mut command = world.run_command(&SHORT);
    command.args(["--server", "nginx", "--nginx-root"]).arg(root);
    let output = world.pqtail(command);
    assert!(output.status.success(), "{}", said(&output));
    let folder = world.only_run();
    let manifest = Manifest::read(&folder).unwrap();
    assert_eq!(manifest.status, Status::Complete);
    assert!(
        manifest.server.software.starts_with("nginx/"),
        "{:?}",
        manifest.server
    );
    let reads = |host: &pqtail::record::manifest::Host| {
        host.probes
            .iter()
            .any(|probe| probe.name == "tcp_rcv_space_adjust" && probe.attached)
    };
    assert!(reads(&manifest.server) && !reads(&manifest.client));
    for request in requests(&folder).iter().filter(|each| each.is_measured()) {
        assert_eq!(request.outcome(), Outcome::Ok, "{request:?}");
    }
    let story = Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .arg("explain")
        .arg(&folder)
        .output()
        .unwrap();
    let story = String::from_utf8_lossy(&story.stdout);
    assert!(
        story.contains("server: SSL_do_handshake"),
        "{story}\n{:#}",
        summary(&folder)["verdicts"]
    );
    assert!(!folder.join("hosts.json").exists(), "nothing lies elsewhere");
    world.assert_nothing_left();
}

#[test]
fn hosts_that_do_not_let_us_in_are_told_with_the_remedy() {
    let Some(_alone) = privileged("hosts_that_do_not_let_us_in_are_told_with_the_remedy") else {
        return;
    };
    let mut world = World::new();
    world.write_inventory("other-host");
    let wrong_key = world.pqtail(world.run_command(&SHORT));
    assert_refused(&wrong_key, &["reach the client", "Permission denied", "identity"]);

    // First contact pins the keys; then the server has another.
    world.write_inventory("user");
    fs::write(world.folder.path().join("hosts.known"), "").unwrap();
    let mut bad_program = world.run_command(&SHORT);
    bad_program.arg("--binaries").arg(world.folder.path());
    let no_program = world.pqtail(bad_program);
    assert_refused(&no_program, &["there is no", "pqtail-"]);
    world.start_sshd(1, "other-host", "");
    let other_key = world.pqtail(world.run_command(&SHORT));
    assert_refused(&other_key, &["reach the server", "pinned in", "hosts.known"]);

    world.start_sshd(1, "host", "");
    world.sshds[0] = None;
    let nobody = world.pqtail(world.run_command(&SHORT));
    assert_refused(
        &nobody,
        &["reach the client", "Connection refused", "sshd running"],
    );

    // Whoever logs in is an ordinary user, and sudo asks for a password or is not there.
    world.start_sshd(
        0,
        "host",
        "ForceCommand exec setpriv --reuid 65534 --clear-groups sh -c \"$SSH_ORIGINAL_COMMAND\"",
    );
    let no_root = world.pqtail(world.run_command(&SHORT));
    assert_refused(&no_root, &["needs root on the client", "without a password"]);
    world.assert_nothing_left();
}

#[test]
fn a_program_that_does_not_run_there_and_a_full_disk_end_the_set_up() {
    let Some(_alone) = privileged("a_program_that_does_not_run_there_and_a_full_disk_end_the_set_up") else {
        return;
    };
    let mut world = World::new();
    let program = world
        .folder
        .path()
        .join(format!("pqtail-{}", std::env::consts::ARCH));
    fs::write(&program, "\x7fELF of no machine").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut foreign = world.run_command(&SHORT);
    foreign.arg("--binaries").arg(world.folder.path());
    let foreign = world.pqtail(foreign);
    assert_refused(&foreign, &["does not run on the client", "--binaries"]);
    world.assert_nothing_left();

    // Room for half a program.
    let size = fs::metadata(env!("CARGO_BIN_EXE_pqtail")).unwrap().len();
    for (sizes, word) in [(size / 2, "No space left"), (size + (32 << 20), "nearly full")] {
        world.start_sshd(1, "host", "");
        let pid = world.sshds[1].as_ref().unwrap().child.id().to_string();
        let mut remount = Command::new("nsenter");
        remount.args(["--mount", "--target", &pid, "mount", "-o"]);
        remount.arg(format!("remount,size={sizes}")).arg("/var/tmp");
        assert!(remount.status().unwrap().success());
        let full = world.pqtail(world.run_command(&SHORT));
        assert_refused(&full, &["server", word]);
        world.assert_nothing_left();
    }
}

/// A project whose `cargo xtask deploy` does what `main` says.
fn pack_project(folder: &Path, main: &str) -> PathBuf {
    let project = folder.join("project");
    for (file, text) in [
        (
            "Cargo.toml",
            "[package]\nname = \"there\"\nedition = \"2024\"\n[workspace]\n",
        ),
        (".cargo/config.toml", "[alias]\nxtask = \"run --quiet --\"\n"),
        ("src/main.rs", main),
    ] {
        let file = project.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    let packed = folder.join("sources.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(project).arg("-cf").arg(&packed).arg(".");
    assert!(tar.status().unwrap().success());
    packed
}

#[test]
fn what_a_host_builds_comes_home_and_nothing_of_it_stays_there() {
    let Some(_alone) = privileged("what_a_host_builds_comes_home_and_nothing_of_it_stays_there") else {
        return;
    };
    let world = World::new();
    let home = tempfile::tempdir().unwrap();
    let build = |main: &str| {
        let packed = pack_project(world.folder.path(), main);
        let mut command = world.command(&["build-there"]);
        command.arg(world.inventory()).arg("--sources").arg(packed);
        command.arg("--home").arg(home.path());
        command
    };
    let output = world.pqtail(build(
        "fn main() {
            let asked: Vec<String> = std::env::args().skip(1).collect();
            std::fs::create_dir_all(\"target/deploy\").unwrap();
            std::fs::write(format!(\"target/deploy/pqtail-{}\", asked[1]), asked.join(\" \")).unwrap();
        }",
    ));
    assert!(output.status.success(), "{}", said(&output));
    let program = format!("target/deploy/pqtail-{}", std::env::consts::ARCH);
    let built = fs::read_to_string(home.path().join(program)).unwrap();
    assert_eq!(built, format!("deploy {}", std::env::consts::ARCH));
    world.assert_nothing_left();

    let output = world.pqtail(build("fn main() { compile_error!(\"no such luck\") }"));
    assert_refused(&output, &["no such luck", "build on the client"]);
    world.assert_nothing_left();

    let mut endless =
        build("fn main() { std::fs::write(\"begun\", []).unwrap(); loop { std::thread::park(); } }");
    endless.stderr(Stdio::piped());
    let running = world.controller.run(move || endless.spawn().unwrap());
    wait_until("the build has begun", || {
        world
            .lodgings()
            .iter()
            .any(|lodging| lodging.join("begun").exists())
    });
    kill(Pid::from_raw(running.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_refused(&running.wait_with_output().unwrap(), &["interrupted"]);
    world.assert_nothing_left();
    wait_until("what it began has ended", || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut lines = processes.map(|entry| fs::read(entry.path().join("cmdline")).unwrap_or_default());
        !lines.any(|line| line.starts_with(b"target/debug/there"))
    });
}

/// What is done to a run, and what is done before the rest of it is fetched.
type Act = fn(&mut World, &Child);

/// Whether a run ended with something left to fetch, and lost nothing of what was recorded when it was struck.
fn assert_nothing_is_lost(name: &str, strike: Act, mend: Option<Act>) {
    let mut world = World::new();
    let mut run = world.start_long();
    let before = world.size_there("client/requests-000.pqr");
    strike(&mut world, &run);
    run.wait().unwrap();
    if let Some(mend) = mend {
        mend(&mut world, &run);
    }
    let output = run.wait_with_output().unwrap();
    let folder = world.only_run();
    assert!(!output.status.success(), "{name}: {}", said(&output));
    if mend.is_some() {
        assert!(folder.join("hosts.json").exists(), "{name}: {}", said(&output));
        let mut fetch = world.command(&["fetch"]);
        fetch.arg(&folder);
        let fetched = world.pqtail(fetch);
        assert!(fetched.status.success(), "{name}: {}", said(&fetched));
    }
    assert!(!folder.join("hosts.json").exists(), "{name}: all is here");
    let after = fs::metadata(folder.join("raw/client/requests-000.pqr"))
        .unwrap()
        .len();
    assert!(after >= before, "{name}");
    let requests = requests(&folder);
    assert!(
        requests.iter().any(|each| each.outcome() == Outcome::Ok),
        "{name}"
    );
    assert!(summary(&folder)["arms"].is_object(), "{name}");
    world.assert_nothing_left();
}

const NOTHING: Act = |_, _| {};

#[test]
fn whatever_is_killed_mid_trial_no_recorded_sample_is_lost() {
    let Some(_alone) = privileged("whatever_is_killed_mid_trial_no_recorded_sample_is_lost") else {
        return;
    };
    let controller: Act = |_, run| kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGKILL).unwrap();
    assert_nothing_is_lost("controller", controller, Some(NOTHING));
    // The connection's processes on the client; its sshd listens on.
    let link: Act = |world, _| {
        let listener = world.sshds[0].as_ref().unwrap().child.id();
        for pid in sshd_sessions(&world.client, listener) {
            let _ = kill(pid, Signal::SIGKILL);
        }
    };
    assert_nothing_is_lost("link", link, Some(NOTHING));
    let agents: Act = |world, _| {
        for pid in world.agents(&world.server) {
            kill(pid, Signal::SIGKILL).unwrap();
        }
    };
    assert_nothing_is_lost("the server's agents", agents, None);
}

#[test]
#[ignore = "an agent takes its controller for gone after a minute of silence, and a test cannot hurry it: cargo test -- --ignored"]
fn a_link_that_falls_silent_loses_no_recorded_sample() {
    let Some(_alone) = privileged("a_link_that_falls_silent_loses_no_recorded_sample") else {
        return;
    };
    assert_nothing_is_lost(
        "silence",
        |world, _| world.controller.run(|| ip("link set to-client down")),
        Some(|world, _| world.controller.run(|| ip("link set to-client up"))),
    );
}

/// The processes of open connections: all of sshd's on this host but the listener.
fn sshd_sessions(host: &Host, listener: u32) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|&pid| {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            comm.starts_with("sshd")
                && pid.cast_unsigned() != listener
                && netns_of(pid) == Some(host.namespace)
        })
        .map(Pid::from_raw)
        .collect()
}
