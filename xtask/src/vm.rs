//! `cargo xtask vm`: a run between two virtual machines, each with a kernel and a monotonic clock of its own, through the very
//! path that hosts in the field are reached by.

mod away;

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use self::away::{Offset, Stops};
use crate::{
    cross::{self, Architecture, Profile},
    debian::{self, Needed},
    guest::{self, End, Guest, Kernel},
    hosts, root,
};

/// Flags of `cargo xtask vm`.
#[derive(clap::Args)]
pub(crate) struct VmOptions {
    /// Kernel of the load generator's machine
    #[arg(long, value_enum, default_value_t = Kernel::Arm64V6_1)]
    client: Kernel,
    /// Kernel of the server's machine
    #[arg(long, value_enum, default_value_t = Kernel::Arm64V6_1)]
    server: Kernel,
    /// Runs between several pairs of kernels, one after the other, and prints what came of each
    #[arg(long, conflicts_with_all = ["client", "server", "boot_only"])]
    all: bool,
    /// Boots them, says how to log in, and waits for Ctrl-C
    #[arg(long)]
    boot_only: bool,
    /// Stops this guest's emulator now and then while the run goes on, logs when, and says what the requests under way were laid to
    #[arg(long, value_enum, conflicts_with = "boot_only")]
    vcpu_away: Option<away::Side>,
    /// Seed of when and for how long it is stopped
    #[arg(long, default_value_t = 1, requires = "vcpu_away")]
    away_seed: u64,
    /// What `pqtail run` is to do [default: what emulated machines can bear]
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Emulated machines handshake some tens of times slower than real ones.
const BEARABLE: [&str; 12] = [
    "--rate",
    "2",
    "--duration",
    "20s",
    "--warmup",
    "4s",
    "--trials",
    "2",
    "--timeout",
    "30s",
    "--heartbeat",
    "10ms",
];

const POLL: Duration = Duration::from_millis(200);

const NEEDED: [Needed; 9] = [
    Needed {
        program: "qemu-system-aarch64",
        package: "qemu-system-arm",
    },
    Needed {
        program: "qemu-system-x86_64",
        package: "qemu-system-x86",
    },
    Needed {
        program: "mmdebstrap",
        package: "mmdebstrap",
    },
    // For the release that the user land comes from, on a machine of another distribution.
    Needed {
        program: "/usr/share/keyrings/debian-archive-keyring.gpg",
        package: "debian-archive-keyring",
    },
    Needed {
        program: "depmod",
        package: "kmod",
    },
    Needed {
        program: "xz",
        package: "xz-utils",
    },
    Needed {
        program: "cpio",
        package: "cpio",
    },
    Needed {
        program: "ssh",
        package: "openssh-client",
    },
    // The network of the emulator's own, which SSH comes in by.
    Needed {
        program: "ip",
        package: "iproute2",
    },
];

/// Installs what the test of two guests needs, before tests run beside each other.
///
/// # Errors
/// When something is missing and cannot be installed.
pub(crate) fn require() -> anyhow::Result<()> {
    debian::require("virtual machines", &NEEDED)?;
    debian::require("building for them", &Architecture::Aarch64.cross_tools())
}

/// Two guests, their inventory, and the folder that both lie in while they live.
pub(crate) struct Pair {
    pub(crate) client: Guest,
    pub(crate) server: Guest,
    pub(crate) inventory: PathBuf,
}

impl Pair {
    /// Boots one after the other, so that their clocks begin seconds apart.
    ///
    /// # Errors
    /// When packages or an image cannot be had, or a guest does not come up.
    pub(crate) fn boot(client: Kernel, server: Kernel, folder: &Path) -> anyhow::Result<Self> {
        debian::require("virtual machines", &NEEDED)?;
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        guest::keys(folder)?;
        let port = guest::free_port()?;
        let client = Guest::boot("client", client, End::Listens(port), "10.78.0.1", folder)?;
        let server = Guest::boot("server", server, End::Connects(port), "10.78.0.2", folder)?;
        let inventory = folder.join("hosts.toml");
        let host = |name: &str, guest: &Guest| {
            format!(
                "[{name}]\nssh = \"root@127.0.0.1\"\nport = {}\nidentity = \"id_ed25519\"\nknown_hosts = \"known_hosts\"\naddress = \
                 \"{}\"\n",
                guest.ssh_port, guest.address
            )
        };
        let text = host("client", &client) + &host("server", &server) + "nginx = \"/usr/sbin/nginx\"\n";
        fs::write(&inventory, text).with_context(|| format!("write {}", inventory.display()))?;
        let key = folder.join("host_key.pub");
        let key = fs::read_to_string(&key).with_context(|| format!("read {}", key.display()))?;
        let pinned: String = [&client, &server]
            .map(|guest| format!("[127.0.0.1]:{} {key}", guest.ssh_port))
            .concat();
        fs::write(folder.join("known_hosts"), pinned).context("pin the host keys")?;
        Ok(Self {
            client,
            server,
            inventory,
        })
    }

    /// A session on a guest; the command to run there is to be added.
    fn ssh(&self, guest: &Guest) -> Command {
        let file = |name| self.inventory.with_file_name(name);
        let mut ssh = Command::new("ssh");
        ssh.args(["-o", "BatchMode=yes", "-i"])
            .arg(file("id_ed25519"))
            .arg("-o")
            .arg(format!("UserKnownHostsFile={}", file("known_hosts").display()))
            .args(["-p", &guest.ssh_port.to_string(), "root@127.0.0.1"]);
        ssh
    }
}

/// Pairs that `--all` runs: what the hosts in the field are, two kernels of one architecture, two architectures.
const ALL: [(Kernel, Kernel); 3] = [
    (Kernel::Arm64V6_1, Kernel::Arm64V6_1),
    (Kernel::Amd64V6_1, Kernel::Amd64V6_12),
    (Kernel::Arm64V6_1, Kernel::Amd64V6_12),
];

/// Boots, runs, and leaves nothing.
///
/// # Errors
/// When a guest does not come up, or a run fails.
pub(crate) fn vm(options: &VmOptions) -> anyhow::Result<()> {
    let pairs: &[(Kernel, Kernel)] = if options.all {
        &ALL
    } else {
        &[(options.client, options.server)]
    };
    // Guests that are only booted need no program.
    let built = if options.boot_only {
        None
    } else {
        Some((
            crate::build()?,
            cross::binaries(&architectures(pairs), Profile::Release)?,
        ))
    };
    // From here on Ctrl-C ends what is under way and not this process, so that the guests outlive the run and nothing is left.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("hear Ctrl-C")?;
    }
    let mut rows = Vec::new();
    for &(client, server) in pairs {
        let folder = root().join(format!("target/vm/pair-{}", std::process::id()));
        let begin = Instant::now();
        let outcome = Pair::boot(client, server, &folder).and_then(|pair| {
            let booted = begin.elapsed();
            let results = between(&pair, options, built.as_ref(), &interrupted)?;
            Ok(results.map(|results| (booted, results)))
        });
        let kept = |name: &str| outcome.is_err() && name.ends_with(".log");
        let cleared = clear(&folder, &kept);
        if let Some((booted, results)) = outcome? {
            rows.push(row((client, server), &results, booted, begin.elapsed())?);
        }
        cleared?;
    }
    if options.all {
        println!(
            "\nClient, server             booted      all  clocks: server against client        probes missing"
        );
        rows.iter().for_each(|row| println!("{row}"));
    }
    Ok(())
}

/// What a run between two guests came to, in a line.
fn row(
    (client, server): (Kernel, Kernel),
    results: &Path,
    booted: Duration,
    whole: Duration,
) -> anyhow::Result<String> {
    let read = |name: &str| -> anyhow::Result<Value> {
        let file = results.join(name);
        let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("read {}", file.display()))
    };
    let clock = &read("summary.json")?["clock"];
    let clock = match (clock["offset_ns"].as_f64(), clock["error_ns_max"].as_f64()) {
        (Some(offset_ns), Some(error_ns)) => {
            format!(
                "{:+.6} s, error at most {:.3} ms",
                offset_ns / 1e9,
                error_ns / 1e6
            )
        }
        _ => "no alignment".to_owned(),
    };
    let manifest = read("manifest.json")?;
    let missing = ["client", "server"].map(|side| {
        let probes = manifest[side]["probes"].as_array().into_iter().flatten();
        let missing = probes.filter(|probe| probe["attached"] == false);
        let names: Vec<&str> = missing.filter_map(|probe| probe["name"].as_str()).collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(" ")
        }
    });
    Ok(format!(
        "{:<24}  {:>5.0} s  {:>5.0} s  {clock:<36}  {}; {}",
        format!("{}, {}", client.name(), server.name()),
        booted.as_secs_f64(),
        whole.as_secs_f64(),
        missing[0],
        missing[1]
    ))
}

/// What the guests were booted for; where the results are, if that was a run.
fn between(
    pair: &Pair,
    options: &VmOptions,
    built: Option<&(PathBuf, PathBuf)>,
    interrupted: &AtomicBool,
) -> anyhow::Result<Option<PathBuf>> {
    ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
    let Some((pqtail, binaries)) = built else {
        wait(pair, interrupted)?;
        return Ok(None);
    };
    let mut command = Command::new(pqtail);
    command.arg("run").arg("--hosts").arg(&pair.inventory);
    command.arg("--binaries").arg(binaries);
    if options.arguments.is_empty() {
        command.args(BEARABLE);
    } else {
        command.args(&options.arguments);
    }
    let results =
        hosts::value(&options.arguments, "--results").map_or_else(|| "results".into(), PathBuf::from);
    let before = folders(&results);
    let mut run = command.spawn().context("start pqtail")?;
    let stops = options
        .vcpu_away
        .map(|side| Stops::commit(&mut run, side.of(pair), &results, options.away_seed));
    let status = run.wait().context("wait for pqtail")?;
    let stops = stops.transpose()?;
    ensure!(status.success(), "the run between the guests failed ({status})");
    if let Some((stops, side)) = stops.zip(options.vcpu_away) {
        stops.log(side, Offset::read(pair, &pair.client)?)?;
        let mut told = Command::new(pqtail);
        crate::run("pqtail stops", told.arg("stops").arg(&stops.folder))?;
    }
    let new = folders(&results).into_iter().find(|each| !before.contains(each));
    new.map(Some)
        .with_context(|| format!("the run left nothing in {}", results.display()))
}

fn folders(below: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(below).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Removes a folder with keys, but for what is to be kept.
fn clear(folder: &Path, is_kept: &dyn Fn(&str) -> bool) -> anyhow::Result<()> {
    let what = || format!("remove what lies in {}", folder.display());
    let mut is_empty = true;
    for entry in fs::read_dir(folder).with_context(what)? {
        let entry = entry.with_context(what)?;
        if is_kept(&entry.file_name().to_string_lossy()) {
            is_empty = false;
        } else if entry.path().is_dir() {
            fs::remove_dir_all(entry.path()).with_context(what)?;
        } else {
            fs::remove_file(entry.path()).with_context(what)?;
        }
    }
    if is_empty {
        fs::remove_dir(folder).with_context(what)?;
    }
    Ok(())
}

fn architectures(pairs: &[(Kernel, Kernel)]) -> Vec<Architecture> {
    let mut all = Vec::new();
    for kernel in pairs.iter().flat_map(|&(client, server)| [client, server]) {
        if !all.contains(&kernel.architecture()) {
            all.push(kernel.architecture());
        }
    }
    all
}

fn wait(pair: &Pair, interrupted: &AtomicBool) -> anyhow::Result<()> {
    let folder = pair
        .inventory
        .parent()
        .context("the inventory lies in a folder")?;
    for (name, guest) in [("client", &pair.client), ("server", &pair.server)] {
        eprintln!(
            "vm: the {name} (emulator {}): ssh -i {}/id_ed25519 -o UserKnownHostsFile={}/known_hosts -p {} root@127.0.0.1",
            guest.pid(),
            folder.display(),
            folder.display(),
            guest.ssh_port
        );
    }
    eprintln!("vm: inventory {}; Ctrl-C ends both", pair.inventory.display());
    while !interrupted.load(Ordering::Relaxed) {
        thread::sleep(POLL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        env,
        process::{Output, Stdio},
    };

    use super::*;

    /// Tracepoints of x86 only.
    const NOT_ON_ARM64: [&str; 6] = [
        "call_function_single_entry",
        "call_function_single_exit",
        "local_timer_entry",
        "local_timer_exit",
        "reschedule_entry",
        "reschedule_exit",
    ];

    /// How much of the stops their requests must have on their steal lines, of those that were stopped for this long: shorter, and what an emulator on a
    /// busy machine does by itself weighs as much.
    const CHARGED_SHARE_MIN: f64 = 0.7;
    const STOPPED_NS_MIN: f64 = 250e6;

    fn on_guest(pair: &Pair, guest: &Guest, command: &str) -> String {
        crate::output("ask a guest", pair.ssh(guest).arg(command)).unwrap()
    }

    /// What `cargo test` has built beside this test.
    fn pqtail() -> PathBuf {
        let own = env::current_exe().unwrap();
        let built = own.ancestors().nth(2).unwrap().join("pqtail");
        assert!(
            built.exists(),
            "no {}: cargo build --package pqtail",
            built.display()
        );
        built
    }

    /// The least and the most that the server's clock is ahead of the client's, ns.
    fn truth(pair: &Pair) -> (i64, i64) {
        let client = Offset::read(pair, &pair.client).unwrap();
        let server = Offset::read(pair, &pair.server).unwrap();
        let (ns, error_ns) = (server.ns - client.ns, server.error_ns + client.error_ns);
        eprintln!(
            "vm: by the guests' own clocks the server is {:.3} ms ahead, give or take {:.3} ms",
            ns as f64 / 1e6,
            error_ns as f64 / 1e6
        );
        (ns - error_ns, ns + error_ns)
    }

    /// Command lines of the processes that have this text in theirs.
    fn processes_with(text: &str) -> Vec<String> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.filter_map(|each| fs::read(each.path().join("cmdline")).ok());
        lines
            .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
            .filter(|line| line.contains(text))
            .collect()
    }

    /// The kernels are those asked for; what they lack is named; what latencies are attributed by is there.
    fn check_manifest(results: &Path) {
        let manifest = fs::read(results.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        assert_ne!(
            manifest["client"]["facts"]["boot_id"],
            manifest["server"]["facts"]["boot_id"]
        );
        for side in ["client", "server"] {
            let host = &manifest[side];
            let facts = &host["facts"];
            assert_eq!(facts["machine"], "aarch64", "{facts}");
            let kernel = facts["kernel"].as_str().unwrap();
            assert!(
                kernel.starts_with("6.1.") && kernel.ends_with("-cloud-arm64"),
                "{kernel}"
            );
            let probes = host["probes"].as_array().unwrap();
            let missing = probes.iter().filter(|probe| probe["attached"] == false);
            let names: BTreeSet<&str> = missing
                .clone()
                .map(|probe| probe["name"].as_str().unwrap())
                .collect();
            assert_eq!(names, BTreeSet::from(NOT_ON_ARM64), "{side}");
            for probe in missing {
                assert!(!probe["reason"].as_str().unwrap().is_empty(), "{probe}");
                assert!(!probe["consequence"].as_str().unwrap().is_empty(), "{probe}");
            }
        }
    }

    /// The offset that the run found lies within its bound of what the guests' clocks said before and after.
    fn check_clock(clock: &Value, truths: [(i64, i64); 2]) {
        assert_eq!(clock["shared_kernel"], false);
        let offset_ns = clock["offset_ns"].as_i64().unwrap();
        let error_ns = clock["error_ns_max"].as_i64().unwrap();
        assert!(
            offset_ns < -1_000_000_000,
            "the server was started later: {clock}"
        );
        let least_ns = truths.map(|(least, _)| least).into_iter().min().unwrap();
        let most_ns = truths.map(|(_, most)| most).into_iter().max().unwrap();
        assert!(
            (least_ns - error_ns..=most_ns + error_ns).contains(&offset_ns),
            "{least_ns} to {most_ns} ns: {clock}"
        );
    }

    fn check_stops(stops: &Output) {
        let complaint = String::from_utf8_lossy(&stops.stderr);
        assert!(stops.status.success(), "{complaint}");
        let told = String::from_utf8(stops.stdout.clone()).unwrap();
        let hits: Vec<Value> = told
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let ns = |hit: &Value, key: &str| hit[key].as_f64().unwrap();
        let stopped_ns = |hit: &Value| ns(hit, "stopped_ns").min(ns(hit, "added_ns"));
        let long: Vec<&Value> = hits
            .iter()
            .filter(|hit| stopped_ns(hit) >= STOPPED_NS_MIN)
            .collect();
        assert!(!long.is_empty(), "no stop hit a request: {told}");
        // All together: the client may be at work while one begins, and that much of it costs the request nothing.
        let sum = |of: &dyn Fn(&Value) -> f64| long.iter().map(|hit| of(hit)).sum::<f64>();
        let share = sum(&|hit| ns(hit, "charged_ns")) / sum(&|hit| stopped_ns(hit));
        assert!(share >= CHARGED_SHARE_MIN, "{share}: {long:?}");
        for hit in long {
            // The emulator adds time of its own, and not always less.
            if 2.0 * ns(hit, "charged_ns") > ns(hit, "added_ns") {
                assert_eq!(hit["cause"], "server.steal", "{hit}");
            }
        }
    }

    /// An arm64 pair, since that is what the hosts in the field are.
    #[test]
    fn a_run_between_two_arm64_kernels_aligns_their_clocks_and_finds_the_cpu_that_was_away() {
        let in_ci = env::var_os("CI").is_some();
        if !in_ci || !debian::is_root() {
            assert!(
                !in_ci,
                "virtual machines' images need root, and CI is set: run the tests as root"
            );
            eprintln!(
                "SKIPPED the run between two arm64 kernels: it builds for arm64 and emulates two machines for minutes; set CI=1 and be \
                 root for it"
            );
            return;
        }
        let scratch = root().join(format!("target/vm/test-{}", std::process::id()));
        let results = scratch.join("results");
        // Packages are fetched while the compiler works.
        let image = thread::spawn(|| guest::image::image(Kernel::Arm64V6_1).map(drop));
        let binaries = cross::binaries(&[Architecture::Aarch64], Profile::Guest).unwrap();
        image.join().unwrap().unwrap();
        let pair = Pair::boot(Kernel::Arm64V6_1, Kernel::Arm64V6_1, &scratch).unwrap();
        let before = truth(&pair);

        let mut run = Command::new(pqtail());
        run.args(["run", "--hosts"]).arg(&pair.inventory);
        run.arg("--binaries").arg(binaries);
        run.arg("--results").arg(&results);
        run.args(["--arms", "x25519mlkem768", "--trials", "1", "--seed", "7"]);
        run.args(["--rate", "2", "--arrivals", "constant"]);
        run.args(["--duration", "12s", "--warmup", "1s"]);
        run.args(["--timeout", "60s", "--heartbeat", "10ms"]);
        let mut run = run.stdin(Stdio::null()).spawn().unwrap();
        let stops = Stops::commit(&mut run, &pair.server, &results, 1).unwrap();
        assert!(run.wait().unwrap().success());
        let after = truth(&pair);
        stops
            .log(away::Side::Server, Offset::read(&pair, &pair.client).unwrap())
            .unwrap();

        let summary = fs::read(stops.folder.join("summary.json")).unwrap();
        let summary: Value = serde_json::from_slice(&summary).unwrap();
        for rule in ["complete", "errors", "group", "records complete"] {
            let verdicts = summary["verdicts"].as_array().unwrap();
            let verdict = verdicts.iter().find(|each| each["rule"] == rule).unwrap();
            assert_eq!(verdict["ok"], true, "{verdict}");
        }
        check_manifest(&stops.folder);
        check_clock(&summary["clock"], [before, after]);
        let mut asked = Command::new(pqtail());
        let hits = asked.args(["stops", "--json"]).arg(&stops.folder).output();
        check_stops(&hits.unwrap());

        for guest in [&pair.client, &pair.server] {
            assert_eq!(on_guest(&pair, guest, "ls /var/tmp"), "");
            let agents = "for each in /proc/[0-9]*; do readlink $each/exe; done | grep pqtail || true";
            assert_eq!(on_guest(&pair, guest, agents), "");
        }
        drop(pair);
        clear(&scratch, &|_| false).unwrap();
        assert!(!scratch.exists());
        assert_eq!(
            processes_with(&scratch.display().to_string()),
            Vec::<String>::new()
        );
    }
}
