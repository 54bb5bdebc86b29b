//! `cargo xtask vm`: a run between two virtual machines, each with a kernel and a monotonic clock of its own, through the very
//! path that hosts in the field are reached by.

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
    time::Duration,
};

use anyhow::{Context as _, ensure};

use crate::{
    cross,
    debian::{self, Needed},
    guest::{self, End, Guest, Kernel},
    root,
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
    /// Boots them, says how to log in, and waits for Ctrl-C
    #[arg(long)]
    boot_only: bool,
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
}

/// Boots, runs, and leaves nothing.
///
/// # Errors
/// When a guest does not come up, or the run fails.
pub(crate) fn vm(options: &VmOptions) -> anyhow::Result<()> {
    let binaries = cross::binaries(&architectures(options))?;
    let pqtail = crate::build()?;
    let folder = root().join(format!("target/vm/pair-{}", std::process::id()));
    // From here on Ctrl-C ends what is under way and not this process, so that the guests outlive the run and nothing is left.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("hear Ctrl-C")?;
    }
    let outcome = Pair::boot(options.client, options.server, &folder)
        .and_then(|pair| between(&pair, options, &pqtail, &binaries, &interrupted));
    let kept = |name: &str| outcome.is_err() && name.ends_with(".log");
    let cleared = clear(&folder, &kept);
    outcome.and(cleared)
}

/// What the guests were booted for.
fn between(
    pair: &Pair,
    options: &VmOptions,
    pqtail: &Path,
    binaries: &Path,
    interrupted: &AtomicBool,
) -> anyhow::Result<()> {
    ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
    if options.boot_only {
        return wait(pair, interrupted);
    }
    let mut command = Command::new(pqtail);
    command.arg("run").arg("--hosts").arg(&pair.inventory);
    command.arg("--binaries").arg(binaries);
    if options.arguments.is_empty() {
        command.args(BEARABLE);
    } else {
        command.args(&options.arguments);
    }
    let status = command.status().context("start pqtail")?;
    ensure!(status.success(), "the run between the guests failed ({status})");
    Ok(())
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

fn architectures(options: &VmOptions) -> Vec<cross::Architecture> {
    let mut both = vec![options.client.architecture()];
    if options.server.architecture() != both[0] {
        both.push(options.server.architecture());
    }
    both
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
        env,
        process::{Output, Stdio},
    };

    use serde_json::Value;

    use super::*;
    use crate::cross::Architecture;

    /// Seconds since boot, as a guest's kernel counts them with every stop of it.
    fn uptime_s(pair: &Pair, guest: &Guest) -> f64 {
        let folder = pair.inventory.parent().unwrap();
        let mut ssh = Command::new("ssh");
        ssh.args(["-o", "BatchMode=yes", "-i"])
            .arg(folder.join("id_ed25519"))
            .arg("-o")
            .arg(format!(
                "UserKnownHostsFile={}",
                folder.join("known_hosts").display()
            ))
            .args([
                "-p",
                &guest.ssh_port.to_string(),
                "root@127.0.0.1",
                "cat /proc/uptime",
            ]);
        let printed = crate::output("ask a guest for its uptime", &mut ssh).unwrap();
        printed.split(' ').next().unwrap().parse().unwrap()
    }

    fn said(output: &Output) -> String {
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
    }

    /// An arm64 pair, since that is what the hosts in the field are.
    #[test]
    #[ignore = "builds for arm64 and emulates two machines: many minutes; cargo test -p xtask -- --ignored"]
    fn a_run_between_two_arm64_kernels_aligns_their_clocks() {
        if !debian::is_root() {
            assert!(
                env::var_os("CI").is_none(),
                "virtual machines' images need root, and CI is set: run the tests as root"
            );
            eprintln!("SKIPPED the run between two virtual machines: their images need root");
            return;
        }
        let scratch = root().join(format!("target/vm/test-{}", std::process::id()));
        let binaries = cross::binaries(&[Architecture::Aarch64]).unwrap();
        let pqtail = crate::build().unwrap();
        let pair = Pair::boot(Kernel::Arm64V6_1, Kernel::Arm64V6_1, &scratch).unwrap();

        let client_s = uptime_s(&pair, &pair.client);
        let server_s = uptime_s(&pair, &pair.server);
        let client_again_s = uptime_s(&pair, &pair.client);

        let mut run = Command::new(pqtail);
        run.arg("run").arg("--hosts").arg(&pair.inventory);
        run.arg("--binaries").arg(binaries);
        run.arg("--results").arg(scratch.join("results"));
        run.args([
            "--rate",
            "2",
            "--duration",
            "8s",
            "--warmup",
            "2s",
            "--trials",
            "1",
        ]);
        run.args(["--timeout", "60s", "--heartbeat", "10ms", "--json"]);
        let output = run.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();

        // Two readings of one clock bracket the other's. The kernels have been up for the same time since, so the run finds the
        // same, give or take what their clocks drift in a minute.
        let clock = &summary["clock"];
        assert_eq!(clock["shared_kernel"], false);
        let offset_s = clock["offset_ns"].as_f64().unwrap() / 1e9;
        let error_s = clock["error_ns_max"].as_f64().unwrap() / 1e9;
        let (least_s, most_s) = (server_s - client_again_s - 0.1, server_s - client_s + 0.1);
        assert!(offset_s < -1.0, "the server was started later: {clock}");
        assert!(
            least_s - error_s <= offset_s && offset_s <= most_s + error_s,
            "{least_s} to {most_s} s: {clock}"
        );
        for rule in ["complete", "errors", "group", "records complete"] {
            let verdicts = summary["verdicts"].as_array().unwrap();
            let verdict = verdicts.iter().find(|each| each["rule"] == rule).unwrap();
            assert_eq!(verdict["ok"], true, "{verdict}");
        }
        // What a kernel lacks is named; what the latencies are attributed by is there.
        for kernel in ["raw/client-kernel", "raw/server-kernel"] {
            let probes = summary["probes"][kernel].as_array().unwrap();
            for needed in [
                "sched_switch",
                "sched_wakeup",
                "net_dev_queue",
                "netif_receive_skb",
            ] {
                let probe = probes.iter().find(|each| each["name"] == needed).unwrap();
                assert_eq!(probe["attached"], true, "{kernel}: {probe}");
            }
        }
        drop(pair);
        fs::remove_dir_all(scratch).unwrap();
    }
}
