//! Uprobes on libssl: which file holds a process's functions, and attaching to each of them.
//!
//! A probe is bound to one process, so that others that map the same library pay nothing for it.

use std::{
    fs,
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use aya::{
    Ebpf,
    programs::{
        ProgramError, UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
    },
};
use pqtail_common::function;

use super::probes::explain;
use crate::record::manifest::ProbeStatus;

const BEGIN: &str = "libssl_call";
const RETURN: &str = "libssl_return";

/// What servers call for a handshake.
const FUNCTIONS: [(&str, u32); 2] = [
    ("SSL_do_handshake", function::DO_HANDSHAKE),
    ("SSL_accept", function::ACCEPT),
];
const NO_HANDSHAKE: &str = "the TLS handshake cannot be told from the server's other work";

/// Attaches to every function; one row for each.
pub(super) fn attach(ebpf: &mut Ebpf, pid: u32, library: Option<&Path>) -> Vec<ProbeStatus> {
    let file = load(ebpf).and_then(|()| file_of(pid, library));
    FUNCTIONS
        .iter()
        .map(|&(name, number)| {
            let outcome = match &file {
                Ok(file) => attach_function(ebpf, pid, file, name, number),
                Err(error) => Err(anyhow!("{error:#}")),
            };
            ProbeStatus {
                name: format!("{name} of process {pid}"),
                attached: outcome.is_ok(),
                reason: outcome
                    .err()
                    .map(|error| format!("{error:#}"))
                    .unwrap_or_default(),
                consequence: NO_HANDSHAKE.to_owned(),
            }
        })
        .collect()
}

/// Loads the two programs, once for all processes.
fn load(ebpf: &mut Ebpf) -> anyhow::Result<()> {
    for name in [BEGIN, RETURN] {
        let program = uprobe(ebpf, name)?;
        if program.fd().is_err() {
            program
                .load()
                .map_err(|error| anyhow!("load {name}: {}", explain(&error)))?;
        }
    }
    Ok(())
}

/// The return first, as everywhere: a return without its begin stores nothing.
fn attach_function(ebpf: &mut Ebpf, pid: u32, file: &Path, name: &str, number: u32) -> anyhow::Result<()> {
    let scope = UProbeScope::OneProcess(NonZeroU32::new(pid).context("process 0 has no libssl")?);
    let point = || UProbeAttachPoint {
        location: UProbeAttachLocation::Symbol(name),
        cookie: Some(u64::from(number)),
    };
    let what = || {
        format!(
            "attach to {name} in {}: without that symbol it cannot be probed (an executable with libssl linked in must not be \
             stripped)",
            file.display()
        )
    };
    let link = uprobe(ebpf, RETURN)?
        .attach(point(), file, scope)
        .with_context(what)?;
    if let Err(error) = uprobe(ebpf, BEGIN)?.attach(point(), file, scope) {
        // It was attached a moment ago; if it cannot be detached now, dropping the object does it.
        let _ = uprobe(ebpf, RETURN)?.detach(link);
        return Err(error).with_context(what);
    }
    Ok(())
}

fn uprobe<'a>(ebpf: &'a mut Ebpf, name: &str) -> anyhow::Result<&'a mut UProbe> {
    ebpf.program_mut(name)
        .with_context(|| format!("the embedded eBPF object has no program {name}: rebuild pqtail"))?
        .try_into()
        .map_err(|error: ProgramError| anyhow!("{name}: {error}"))
}

/// The file as we can open it: through the process's own root, which another mount namespace or a chroot moves.
fn file_of(pid: u32, library: Option<&Path>) -> anyhow::Result<PathBuf> {
    let seen = match library {
        Some(path) => path.to_owned(),
        None => {
            let path = format!("/proc/{pid}/maps");
            let maps = fs::read_to_string(&path)
                .with_context(|| format!("read {path}: does the server still run, and are we root?"))?;
            match mapped_libssl(&maps) {
                Some(path) => below_root(pid, path),
                None => return Ok(PathBuf::from(format!("/proc/{pid}/exe"))),
            }
        }
    };
    let inside = seen.strip_prefix("/").unwrap_or(&seen);
    Ok(Path::new("/proc").join(pid.to_string()).join("root").join(inside))
}

/// The first mapped file whose name begins with `libssl`. One that an upgrade has deleted is left out: it cannot be opened any
/// more, and its successor is another file.
fn mapped_libssl(maps: &str) -> Option<&Path> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])))
        .find(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with("libssl") && !name.ends_with(" (deleted)"))
        })
}

/// `maps` tells paths from the reader's root, so that a process in a chroot shows the folder of its root in front.
fn below_root(pid: u32, path: &Path) -> PathBuf {
    let root = fs::read_link(format!("/proc/{pid}/root")).unwrap_or_else(|_| PathBuf::from("/"));
    without_root(path, &root)
}

fn without_root(path: &Path, root: &Path) -> PathBuf {
    match path.strip_prefix(root) {
        Ok(inside) => Path::new("/").join(inside),
        // Another mount namespace: the path is told from its own root.
        Err(_) => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapped_library_is_found_by_its_name() {
        let maps = "\
            55d0c8a00000-55d0c8a2e000 r--p 00000000 fe:00 1 /usr/sbin/nginx\n\
            7f1200000000-7f1200020000 r--p 00000000 fe:00 2 /usr/lib/x86_64-linux-gnu/libcrypto.so.3\n\
            7f1200400000-7f1200420000 r--p 00000000 fe:00 3 /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)\n\
            7f1200800000-7f1200820000 rw-p 00000000 00:00 0 \n\
            7f1200a00000-7f1200a20000 r-xp 00000000 fe:00 4 /opt/libssl3/libssl.so.3\n\
            7fff00000000-7fff00021000 rw-p 00000000 00:00 0 [stack]\n";
        assert_eq!(mapped_libssl(maps), Some(Path::new("/opt/libssl3/libssl.so.3")));
        assert_eq!(
            mapped_libssl("7fff00000000-7fff00021000 rw-p 0 00:00 0 [stack]\n"),
            None
        );
    }

    #[test]
    fn a_path_is_told_from_the_root_of_the_process() {
        let library = Path::new("/srv/trixie/usr/lib/libssl.so.3");
        let inside = Path::new("/usr/lib/libssl.so.3");
        assert_eq!(without_root(library, Path::new("/srv/trixie")), inside);
        assert_eq!(without_root(inside, Path::new("/")), inside);
        assert_eq!(without_root(inside, Path::new("/srv/trixie")), inside);
    }

    #[test]
    fn a_process_without_libssl_is_probed_in_its_executable() {
        let own = std::process::id();
        // Our own TLS is not OpenSSL, and no library of that name is mapped.
        assert_eq!(
            file_of(own, None).unwrap(),
            PathBuf::from(format!("/proc/{own}/exe"))
        );
        assert_eq!(
            file_of(7, Some(Path::new("/opt/libssl.so.3"))).unwrap(),
            Path::new("/proc/7/root/opt/libssl.so.3")
        );
    }
}
