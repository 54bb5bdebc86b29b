//! Programs that only some steps need, from the distribution's packages.

use std::{env, path::PathBuf, process::Command};

use anyhow::{bail, ensure};

use crate::run;

/// What a step needs.
pub(crate) struct Needed {
    /// A program by its name, or any file by its absolute path.
    pub(crate) program: &'static str,
    /// The Debian or Ubuntu package that has it.
    pub(crate) package: &'static str,
}

/// Installs the packages of those programs that are missing. Looks at a few files and returns when none is.
///
/// # Errors
/// When one is missing and cannot be installed: no root, no apt, or the packages cannot be had. Then with what to do.
pub(crate) fn require(what_for: &str, needed: &[Needed]) -> anyhow::Result<()> {
    let missing: Vec<&Needed> = needed.iter().filter(|each| !is_there(each.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|each| each.package).collect();
    let packages = packages.join(" ");
    ensure!(
        is_there("apt-get"),
        "{what_for} needs {}, and there is no apt-get to install it with: install what your distribution has of {packages}",
        missing
            .iter()
            .map(|each| each.program)
            .collect::<Vec<_>>()
            .join(", ")
    );
    if !is_root() {
        bail!("{what_for} needs more packages, and only root may install them: apt-get install {packages}");
    }
    eprintln!("setup: installing {packages} for {what_for} (apt-get)");
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-qq", "-o", "Dpkg::Use-Pty=0"]);
        apt
    };
    run("apt-get update", apt().arg("update"))?;
    let mut install = apt();
    install.args(["install", "--yes", "--no-install-recommends"]);
    run("apt-get install", install.args(packages.split(' ')))?;
    for each in missing {
        ensure!(
            is_there(each.program),
            "the package {} is installed, and there is still no {}",
            each.package,
            each.program
        );
    }
    Ok(())
}

/// Whether this process may do everything: /proc/self belongs to the effective user.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// In PATH, or where programs of the administrator lie, which is in no ordinary user's PATH.
fn is_there(program: &str) -> bool {
    find(program).exists()
}

/// Where a program is; its bare name if it is nowhere.
pub(crate) fn find(program: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
        .unwrap_or_else(|| program.into())
}
