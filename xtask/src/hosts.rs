//! `cargo xtask run`: on this machine, or between two hosts for which it then builds: those that `--hosts` names, else those that
//! `cargo xtask up` has made and `down` has not yet destroyed.

use std::{ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, bail, ensure};

use crate::{PassedOn, build, cross, cross::Architecture, nginx, output, pqtail, root};

/// Our own flag: on this machine, whatever is up.
const HERE: &str = "--here";

/// Our own flag: the hosts build the program themselves, and this machine needs no compiler for them.
const BUILD_ON_HOST: &str = "--build-on-host";

/// Builds what the run needs, and becomes `pqtail run`.
///
/// # Errors
/// When a build fails, or a host cannot be asked for its architecture.
pub(crate) fn run(mut passed_on: PassedOn) -> anyhow::Result<()> {
    let made = root().join("infra/state/hosts.toml");
    let build_on_host = taken(&mut passed_on.arguments, BUILD_ON_HOST);
    if taken(&mut passed_on.arguments, HERE) {
        // As if nothing were up.
    } else if value(&passed_on.arguments, "--hosts").is_none() && made.exists() {
        eprintln!(
            "xtask: between the hosts of {}, since they are up; {HERE} runs on this machine",
            made.display()
        );
        passed_on.arguments.push("--hosts".into());
        passed_on.arguments.push(made.into());
    }
    ensure!(
        !build_on_host || value(&passed_on.arguments, "--hosts").is_some(),
        "{BUILD_ON_HOST} is for a run with --hosts"
    );
    nginx::provide_if_wanted(&mut passed_on.arguments)?;
    if value(&passed_on.arguments, "--binaries").is_none()
        && let Some(inventory) = value(&passed_on.arguments, "--hosts")
    {
        let binaries = if build_on_host {
            built_there(&inventory)?
        } else {
            binaries(&inventory)?
        };
        passed_on.arguments.push("--binaries".into());
        passed_on.arguments.push(binaries.into());
    }
    pqtail("run", &passed_on)
}

/// A folder with a program for each of the inventory's hosts.
fn binaries(inventory: &OsString) -> anyhow::Result<PathBuf> {
    let mut ask = Command::new(build()?);
    let machines = output(
        "ask the hosts for their architectures",
        ask.arg("machines").arg(inventory),
    )?;
    let mut architectures: Vec<Architecture> = Vec::new();
    for machine in machines.split_ascii_whitespace() {
        let Some(architecture) = Architecture::of(machine) else {
            bail!("a host is {machine}: there are builds for x86_64 and aarch64");
        };
        if !architectures.contains(&architecture) {
            architectures.push(architecture);
        }
    }
    cross::binaries(&architectures, cross::Profile::Release).context("build for the hosts")
}

/// The same, built by the hosts from this checkout's files: those that git knows, and those that it does not ignore.
fn built_there(inventory: &OsString) -> anyhow::Result<PathBuf> {
    let sources = root().join("target/sources.tar");
    let mut pack = Command::new("sh");
    pack.current_dir(root()).arg("-c").arg(
        "set -e; git ls-files -z --cached --others --exclude-standard >target/sources; \
         tar --null --ignore-failed-read -T target/sources -cf target/sources.tar 2>/dev/null",
    );
    crate::run("pack the sources (needs git and tar, and a checkout)", &mut pack)?;
    let mut there = Command::new(build()?);
    there
        .arg("build-there")
        .arg(inventory)
        .arg("--sources")
        .arg(sources);
    crate::run("build on the hosts", there.arg("--home").arg(root()))?;
    Ok(root().join("target/deploy"))
}

/// Whether a flag was among the arguments; it is not any more.
fn taken(arguments: &mut Vec<OsString>, flag: &str) -> bool {
    let before = arguments.len();
    arguments.retain(|argument| argument != flag);
    arguments.len() < before
}

/// The value of a flag among arguments, as `--flag value` or `--flag=value`.
pub(crate) fn value(arguments: &[OsString], flag: &str) -> Option<OsString> {
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == flag {
            return arguments.next().cloned();
        }
        if let Some(rest) = argument.to_str().and_then(|text| text.strip_prefix(flag))
            && let Some(value) = rest.strip_prefix('=')
        {
            return Some(value.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_found_in_either_form() {
        let arguments = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let hosts = |text| value(&arguments(text), "--hosts");
        assert_eq!(hosts("--rate 5 --hosts a.toml"), Some("a.toml".into()));
        assert_eq!(hosts("--hosts=a.toml --rate 5"), Some("a.toml".into()));
        assert_eq!(hosts("--hostsx=a --rate 5"), None);
    }
}
