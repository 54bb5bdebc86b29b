//! One host by SSH: the program is put there, agents are started through it, recordings are brought home, and nothing is left.
//!
//! Each host has one connection, shared by all that goes over it (`ControlMaster`). No port of our own is opened anywhere: an
//! agent speaks on its stdin and stdout. Host keys are pinned at first contact; no agent, port or display is forwarded; nothing
//! asks for a password.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{child, inventory::Reach};
use crate::record::stream::file_sha256;

/// How long a connection may take from the first packet to the accepted key.
const CONNECT_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A host that says nothing for [`ALIVE_INTERVAL_S`] x [`ALIVE_COUNT`] seconds is gone.
const ALIVE_INTERVAL_S: u32 = 5;
const ALIVE_COUNT: u32 = 3;

/// How long agents that lost their controller may take to end what they record.
const ENDING_MAX: Duration = Duration::from_secs(120);
const ENDING_POLL: Duration = Duration::from_millis(500);

/// A host and the folder that a run has on it: enough to come back to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lodging {
    /// How it is reached.
    pub reach: Reach,
    /// The run's folder there. Made by us, and removed with everything in it.
    pub folder: PathBuf,
}

/// An open connection to one host.
#[derive(Debug)]
pub struct Session {
    name: &'static str,
    lodging: Lodging,
    /// Socket that the connection's other users share.
    control: PathBuf,
    /// What ssh says, for errors.
    log: PathBuf,
    master: Child,
    sudo: bool,
}

impl Session {
    /// Connects. `name` is what errors call the host; `sockets` a folder of a short path for the connection's socket.
    ///
    /// # Errors
    /// When the host cannot be reached or does not let us in, or root is not to be had there: with what to do about it.
    pub fn connect(name: &'static str, lodging: Lodging, sockets: &Path) -> anyhow::Result<Self> {
        let (control, log) = (sockets.join(name), sockets.join(format!("{name}.log")));
        let reach = &lodging.reach;
        let mut command = ssh(reach, &control);
        command.args(["-M", "-N", "-o", "Compression=yes"]);
        command.args(["-p", &reach.port.to_string()]);
        if let Some(identity) = &reach.identity {
            command.arg("-i").arg(identity).args(["-o", "IdentitiesOnly=yes"]);
        }
        command.arg(&reach.ssh);
        let said = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(said));
        let master = command
            .spawn()
            .context("start ssh: install it (Debian and Ubuntu: apt-get install openssh-client)")?;
        let mut session = Self {
            name,
            lodging,
            control,
            log,
            master,
            sudo: false,
        };
        session.await_connection()?;
        session.find_root()?;
        Ok(session)
    }

    fn await_connection(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + CONNECT_MAX;
        while !self.control.exists() {
            if self.master.try_wait()?.is_some() {
                bail!("{}", self.refusal());
            }
            ensure!(
                Instant::now() < deadline,
                "reach the {} at {}: no connection within {} s",
                self.name,
                self.lodging.reach.ssh,
                CONNECT_MAX.as_secs()
            );
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Why there is no connection, and what to do about it.
    fn refusal(&self) -> String {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let reach = &self.lodging.reach;
        format!(
            "reach the {} at {} port {}: {}. {}",
            self.name,
            reach.ssh,
            reach.port,
            essence(&said),
            remedy(&said, reach)
        )
    }

    fn find_root(&mut self) -> anyhow::Result<()> {
        let uid = self.text("ask who we are there", "id -u")?;
        self.sudo = uid != "0";
        if self.sudo {
            self.run("become root", "sudo -n true", Stdio::null())
                .with_context(|| {
                    format!(
                        "the recorder needs root on the {}: let {} use sudo without a password, or log in as root",
                        self.name, self.lodging.reach.ssh
                    )
                })?;
        }
        Ok(())
    }

    /// `uname -m` there.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn machine(&self) -> anyhow::Result<String> {
        self.text("ask for its architecture", "uname -m")
    }

    /// What the errors call this host.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The run's folder there.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.lodging.folder
    }

    fn as_root(&self, remote: &str) -> String {
        if self.sudo {
            format!("sudo -n {remote}")
        } else {
            remote.to_owned()
        }
    }

    fn command(&self, remote: &str) -> Command {
        let mut command = ssh(&self.lodging.reach, &self.control);
        command.arg(&self.lodging.reach.ssh).arg("--").arg(remote);
        command
    }

    /// Runs a shell command there, for what it prints.
    fn run(&self, what: &str, remote: &str, input: impl Into<Stdio>) -> anyhow::Result<Vec<u8>> {
        let mut command = self.command(remote);
        let output = command.stdin(input).output().context("start ssh")?;
        ensure!(
            output.status.success(),
            "{what} on the {}: {}",
            self.name,
            match essence(&String::from_utf8_lossy(&output.stderr)) {
                "" => output.status.to_string(),
                said => said.to_owned(),
            }
        );
        Ok(output.stdout)
    }

    fn text(&self, what: &str, remote: &str) -> anyhow::Result<String> {
        let printed = self.run(what, remote, Stdio::null())?;
        Ok(String::from_utf8_lossy(&printed).trim().to_owned())
    }

    /// Puts the program there, checked by its checksum, into a folder of its own.
    ///
    /// # Errors
    /// When the disk there takes no more, the program arrives damaged, or it does not run there.
    pub fn deploy(&self, program: &Path) -> anyhow::Result<()> {
        let folder = self.folder().display();
        let file = File::open(program).with_context(|| format!("open {}", program.display()))?;
        // Nobody else may put a program there: the folder is made, never found.
        let receive = format!(
            "umask 022 && mkdir {folder} && cat > {folder}/pqtail && chmod 755 {folder}/pqtail && sha256sum {folder}/pqtail"
        );
        let arrived = self.run("copy the program", &receive, file)?;
        let arrived = String::from_utf8_lossy(&arrived);
        ensure!(
            arrived.split_ascii_whitespace().next() == Some(file_sha256(program)?.as_str()),
            "the program arrived damaged on the {}: is its disk full?",
            self.name
        );
        let version = self
            .text("start the program", &format!("{folder}/pqtail --version"))
            .with_context(|| {
                format!(
                    "{} does not run on the {}: give one built for it with --binaries (`cargo xtask run --hosts` builds them)",
                    program.display(),
                    self.name
                )
            })?;
        ensure!(
            version.ends_with(crate::VERSION),
            "the program on the {} says '{version}', this is version {}",
            self.name,
            crate::VERSION
        );
        Ok(())
    }

    /// Has the program built there from packed sources, and brings `file` of what that made home. What it says while it builds is
    /// shown as it comes.
    ///
    /// # Errors
    /// When there is no cargo there, the build fails, or `interrupted` becomes true meanwhile; what it began has then ended.
    pub fn build(
        &self,
        sources: &Path,
        file: &Path,
        home: &Path,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<()> {
        let folder = self.folder().display();
        let packed = File::open(sources).with_context(|| format!("open {}", sources.display()))?;
        let unpack = format!("umask 077 && mkdir {folder} && tar -x -f - -C {folder}");
        self.run("copy the sources", &unpack, packed)?;
        // Where rustup puts it is not on the path of a shell that nobody logged in to.
        let path = "PATH=\"$HOME/.cargo/bin:$PATH\"";
        self.run("find cargo", &format!("{path} cargo --version"), Stdio::null())
            .with_context(|| {
                format!(
                    "to build on the {}, install Rust (https://rustup.rs) and a C compiler there; without --build-on-host \
                     this machine builds for it",
                    self.name
                )
            })?;
        let build = format!(
            "cd {folder} && echo $$ > building && export {path} && exec cargo xtask deploy $(uname -m)"
        );
        let mut command = self.command(&build);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start ssh")?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if interrupted.load(Ordering::Relaxed) {
                // sshd gave the shell, and with it all that it started, a process group.
                let end = format!("kill -TERM -$(cat {folder}/building)");
                let ended = self.run("end the build", &end, Stdio::null());
                child.wait()?;
                ended?;
                bail!("interrupted");
            }
            thread::sleep(POLL);
        };
        ensure!(status.success(), "build on the {}: {status}", self.name);
        self.fetch(file, home)
    }

    /// The command that starts an agent there; it has stdin and stdout for itself.
    #[must_use]
    pub fn agent(&self) -> Command {
        let program = self.folder().join("pqtail");
        self.command(&self.as_root(&format!("{} agent", program.display())))
    }

    /// Brings a file of the run's folder home, checks it, and removes it there.
    ///
    /// # Errors
    /// When the connection is gone, the disk here takes no more, or the file did not arrive whole; then it is still there.
    pub fn fetch(&self, file: &Path, home: &Path) -> anyhow::Result<()> {
        let there = self.folder().join(file);
        let there = there.display();
        let here = home.join(file);
        if let Some(folder) = here.parent() {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let part = here.with_extension("part");
        let into = File::create(&part).with_context(|| format!("create {}", part.display()))?;
        let what = format!("fetch {there}");
        let mut command = self.command(&self.as_root(&format!("cat {there}")));
        command.stdin(Stdio::null()).stdout(into).stderr(Stdio::null());
        let status = command.status().context("start ssh")?;
        let outcome = (|| {
            ensure!(status.success(), "{what} from the {}: {status}", self.name);
            let sum = self.text(&what, &self.as_root(&format!("sha256sum {there}")))?;
            ensure!(
                sum.split_ascii_whitespace().next() == Some(file_sha256(&part)?.as_str()),
                "{there} did not arrive whole from the {}: is the disk here full?",
                self.name
            );
            fs::rename(&part, &here).with_context(|| format!("rename to {}", here.display()))?;
            self.run(&what, &self.as_root(&format!("rm {there}")), Stdio::null())?;
            Ok(())
        })();
        if outcome.is_err() {
            let _ = fs::remove_file(&part);
        }
        outcome
    }

    /// Recordings that are still there, relative to the run's folder.
    ///
    /// # Errors
    /// When the connection or the folder is gone.
    pub fn left(&self) -> anyhow::Result<Vec<PathBuf>> {
        let folder = self.folder().display();
        let find = format!("if test -d {folder}; then find {folder} -name '*.pqr' -type f; fi");
        let printed = self.text(
            &format!("look into {folder}"),
            &self.as_root(&format!("sh -c \"{find}\"")),
        )?;
        Ok(printed
            .lines()
            .filter_map(|line| Path::new(line).strip_prefix(self.folder()).ok())
            .map(Path::to_owned)
            .collect())
    }

    /// Waits until no agent of the run lives there.
    ///
    /// # Errors
    /// When one does not end.
    pub fn await_agents(&self) -> anyhow::Result<()> {
        let program = self.folder().join("pqtail");
        let find = format!(
            "ls -l /proc/[0-9]*/exe 2>/dev/null | grep -c {}",
            program.display()
        );
        let ask = self.as_root(&format!("sh -c \"{find} || true\""));
        let deadline = Instant::now() + ENDING_MAX;
        while self.text("look for agents", &ask)? != "0" {
            ensure!(
                Instant::now() < deadline,
                "an agent still runs on the {} after {} s: end it there, then fetch again",
                self.name,
                ENDING_MAX.as_secs()
            );
            thread::sleep(ENDING_POLL);
        }
        Ok(())
    }

    /// Removes the run's folder there.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn leave(&self) -> anyhow::Result<()> {
        let remove = self.as_root(&format!("rm -rf {}", self.folder().display()));
        self.run("remove the run's folder", &remove, Stdio::null())?;
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Everything that went over it has ended or is to end.
        let _ = self.master.kill();
        let _ = self.master.wait();
        let _ = fs::remove_file(&self.control);
    }
}

/// What every call has in common.
fn ssh(reach: &Reach, control: &Path) -> Command {
    let mut command = Command::new("ssh");
    child::tie_apart(&mut command);
    command.args(["-a", "-x", "-T", "-S"]).arg(control);
    for option in [
        "BatchMode=yes",
        "ClearAllForwardings=yes",
        "ConnectTimeout=20",
        "ControlPersist=no",
        "GlobalKnownHostsFile=/dev/null",
        "PermitLocalCommand=no",
        "StrictHostKeyChecking=accept-new",
        "UpdateHostKeys=no",
    ] {
        command.args(["-o", option]);
    }
    command.args(["-o", &format!("ServerAliveInterval={ALIVE_INTERVAL_S}")]);
    command.args(["-o", &format!("ServerAliveCountMax={ALIVE_COUNT}")]);
    // Quoted, as in its configuration file: the path may have spaces.
    command.args([
        "-o",
        &format!("UserKnownHostsFile=\"{}\"", reach.known_hosts.display()),
    ]);
    command
}

/// The last line that says something: ssh and shells put the reason there.
fn essence(said: &str) -> &str {
    said.lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .unwrap_or("")
}

fn remedy(said: &str, reach: &Reach) -> String {
    let has = |words: &str| said.contains(words);
    if has("Host key verification failed") || has("IDENTIFICATION HAS CHANGED") {
        format!(
            "Its host key is not the one pinned in {}: if the machine was made anew, remove its line there; if not, somebody stands between",
            reach.known_hosts.display()
        )
    } else if has("Permission denied") {
        "It takes no key of ours: name the private key as identity in the inventory, and its user in ssh = user@host".to_owned()
    } else if has("Connection refused") || has("timed out") || has("No route") {
        "Is the machine up, sshd running, and this address let in by its firewall?".to_owned()
    } else if has("Could not resolve") {
        "Its name is not known here: give its address".to_owned()
    } else {
        format!("Try `ssh -p {} {}` by hand", reach.port, reach.ssh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach() -> Reach {
        Reach {
            ssh: "a@b".to_owned(),
            port: 22,
            identity: None,
            known_hosts: PathBuf::from("/k"),
            address: "10.0.0.1".parse().unwrap(),
            nginx: None,
        }
    }

    #[test]
    fn the_reason_stands_in_the_last_line() {
        assert_eq!(
            essence("Warning: added\na@b: Permission denied (publickey).\n\n"),
            "a@b: Permission denied (publickey)."
        );
        assert_eq!(essence("\n"), "");
    }

    #[test]
    fn each_refusal_has_its_remedy() {
        for (said, word) in [
            (
                "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
                "pinned in /k",
            ),
            ("a@b: Permission denied (publickey).", "identity"),
            (
                "ssh: connect to host b port 22: Connection refused",
                "sshd running",
            ),
            (
                "ssh: Could not resolve hostname b: Name or service not known",
                "give its address",
            ),
            ("kex_exchange_identification: read: reset", "ssh -p 22 a@b"),
        ] {
            assert!(remedy(said, &reach()).contains(word), "{said}");
        }
    }
}
