//! `cargo xtask run`: on this machine, or between two hosts for which it then builds: those that `--hosts` names, else those that
//! `cargo xtask up` has made and `down` has not yet destroyed.

use std::{ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, bail};

use crate::{PassedOn, build, cross, cross::Architecture, nginx, output, pqtail, root};

/// Our own flag: on this machine, whatever is up.
const HERE: &str = "--here";

/// Builds what the run needs, and becomes `pqtail run`.
///
/// # Errors
/// When a build fails, or a host cannot be asked for its architecture.
pub(crate) fn run(mut passed_on: PassedOn) -> anyhow::Result<()> {
    let made = root().join("infra/state/hosts.toml");
    let here = passed_on.arguments.iter().position(|argument| argument == HERE);
    if let Some(here) = here {
        passed_on.arguments.remove(here);
    } else if value(&passed_on.arguments, "--hosts").is_none() && made.exists() {
        eprintln!(
            "xtask: between the hosts of {}, since they are up; {HERE} runs on this machine",
            made.display()
        );
        passed_on.arguments.push("--hosts".into());
        passed_on.arguments.push(made.into());
    }
    nginx::provide_if_wanted(&mut passed_on.arguments)?;
    if value(&passed_on.arguments, "--binaries").is_none()
        && let Some(inventory) = value(&passed_on.arguments, "--hosts")
    {
        let binaries = binaries(&inventory)?;
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
