//! `wait-ready`: until both hosts let us in and say that they are set up.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use super::Place;

/// Between two questions to the same host.
const PAUSE: Duration = Duration::from_secs(5);

/// Prints what the markers of `infra/cloud-init.yaml` say; its exit status tells which one there was.
const QUESTION: &str =
    "cat /var/lib/pqtail/failed 2>/dev/null && exit 3; cat /var/lib/pqtail/ready 2>/dev/null || exit 4";

#[derive(clap::Args)]
pub(crate) struct WaitReadyOptions {
    /// Gives up after that long
    #[arg(long, default_value = "20m", value_parser = humantime::parse_duration)]
    timeout: Duration,
    #[command(flatten)]
    place: Place,
}

enum Answer {
    /// With what is installed there.
    Ready(String),
    /// With what is known of why.
    NotYet(String),
}

/// Waits for the hosts of the inventory.
///
/// # Errors
/// When there is none, a host's set-up failed, its key is not the pinned one, or the time is up.
pub(crate) fn wait_ready(options: &WaitReadyOptions) -> anyhow::Result<()> {
    let folder = options.place.folder()?;
    let path = folder.join("hosts.toml");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("read {}: `cargo xtask up` writes it", path.display()))?;
    let hosts: toml::Table = text
        .parse()
        .with_context(|| format!("{} is no inventory", path.display()))?;
    println!(
        "host keys are pinned in {} at first contact; nothing vouches for that first one",
        folder.join("known_hosts").display()
    );
    let begin = Instant::now();
    for name in ["client", "server"] {
        let host = hosts
            .get(name)
            .with_context(|| format!("{} has no [{name}]", path.display()))?;
        let installed = wait_for(name, host, &folder, begin, options.timeout)?;
        println!("{name} is ready: {}", installed.trim());
    }
    println!("next: cargo xtask run, between the hosts of {}", path.display());
    Ok(())
}

fn wait_for(
    name: &str,
    host: &toml::Value,
    folder: &Path,
    begin: Instant,
    timeout: Duration,
) -> anyhow::Result<String> {
    let mut said = String::new();
    loop {
        match ask(name, host, folder)? {
            Answer::Ready(installed) => return Ok(installed),
            Answer::NotYet(why) => {
                if why != said {
                    println!("{name} is not ready yet: {why}");
                }
                said = why;
            }
        }
        let left = timeout.saturating_sub(begin.elapsed());
        ensure!(
            !left.is_zero(),
            "{name} is not ready after {}: {said}. Wait longer with --timeout, look into /var/lib/pqtail/provision.log there, or \
             end it with `cargo xtask down`",
            humantime::format_duration(timeout)
        );
        thread::sleep(left.min(PAUSE));
    }
}

fn ask(name: &str, host: &toml::Value, folder: &Path) -> anyhow::Result<Answer> {
    let destination = host
        .get("ssh")
        .and_then(toml::Value::as_str)
        .with_context(|| format!("hosts.toml: [{name}] has no ssh"))?;
    let mut ssh = Command::new("ssh");
    // The user's own settings are for other hosts; no question, as nobody may be there.
    ssh.args(["-F", "/dev/null", "-a", "-x", "-o", "BatchMode=yes"]);
    ssh.args(["-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=5"]);
    ssh.args(["-o", "StrictHostKeyChecking=accept-new"]);
    ssh.arg("-o").arg(format!(
        "UserKnownHostsFile=\"{}\"",
        folder.join("known_hosts").display()
    ));
    ssh.arg("-i").arg(folder.join("id_ed25519"));
    if let Some(port) = host.get("port").and_then(toml::Value::as_integer) {
        ssh.args(["-p", &port.to_string()]);
    }
    ssh.args(["--", destination, QUESTION]);
    let output = ssh
        .stdin(Stdio::null())
        .output()
        .context("start ssh: install it (Debian and Ubuntu: apt-get install openssh-client)")?;
    let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(Answer::Ready(printed)),
        Some(3) => bail!(
            "{name}: its set-up failed: {printed}. The whole log is /var/lib/pqtail/provision.log there; `cargo xtask down` ends it"
        ),
        Some(4) => Ok(Answer::NotYet("its set-up is under way".to_owned())),
        _ if complaint.contains("IDENTIFICATION HAS CHANGED") => bail!(
            "{name}: its host key is another one than at first contact: somebody may be in between. Nothing was sent there"
        ),
        _ => Ok(Answer::NotYet(
            complaint.lines().last().unwrap_or("ssh says nothing").to_owned(),
        )),
    }
}
