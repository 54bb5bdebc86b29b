//! An nginx with OpenSSL 3.5 for `run --server nginx`, where the machine's own is older: a small root file system of a Debian
//! release that has one. HAProxy is there too, for a test of servers that run already.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::{
    debian::{self, Needed},
    hosts::value,
    root, run,
};

/// The first release with OpenSSL 3.5.
const RELEASE: &str = "trixie";

/// The folder with the file system, made if it is not there yet.
///
/// # Errors
/// When it cannot be made; nothing is left of it then.
pub(crate) fn provide() -> anyhow::Result<PathBuf> {
    let folder = root().join("target/nginx");
    if folder.join("usr/sbin/nginx").is_file() {
        return Ok(folder);
    }
    debian::require(
        "a file system for nginx",
        &[Needed {
            program: "mmdebstrap",
            package: "mmdebstrap",
        }],
    )?;
    eprintln!(
        "setup: making a {RELEASE} file system with nginx in {} (minutes, 330 MB)",
        folder.display()
    );
    let beside = root().join("target/nginx.part");
    remove(&beside)?;
    let mut make = Command::new("mmdebstrap");
    make.args([
        "--quiet",
        "--variant=minbase",
        "--include=nginx-light,openssl,haproxy",
        RELEASE,
    ]);
    if let Err(error) = run("mmdebstrap", make.arg(&beside)) {
        remove(&beside)?;
        return Err(error);
    }
    remove(&folder)?;
    fs::rename(&beside, &folder)
        .with_context(|| format!("rename {} to {}", beside.display(), folder.display()))?;
    Ok(folder)
}

/// Makes it, and says where it is, if a run on this machine asks for nginx and does not say which.
///
/// # Errors
/// As [`provide`].
pub(crate) fn provide_if_wanted(arguments: &mut Vec<OsString>) -> anyhow::Result<()> {
    if is_wanted(arguments) {
        arguments.push("--nginx-root".into());
        arguments.push(provide()?.into());
    }
    Ok(())
}

fn remove(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn is_wanted(arguments: &[OsString]) -> bool {
    let is_said = |flag| value(arguments, flag).is_some();
    value(arguments, "--server").is_some_and(|server| server == "nginx")
        && !["--nginx", "--nginx-root", "--hosts"].into_iter().any(is_said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nginx_is_provided_where_it_is_asked_for_and_not_named() {
        let wanted = |line: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            is_wanted(&arguments)
        };
        assert!(wanted("--server nginx --rate 100"));
        assert!(wanted("--rate 100 --server=nginx"));
        assert!(!wanted("--server embedded"));
        assert!(!wanted("--server nginx --nginx /opt/nginx"));
        assert!(!wanted("--server nginx --nginx-root=/srv/trixie"));
        assert!(!wanted("--server nginx --hosts two.toml"));
    }
}
