//! A server that is not ours and takes no stamps: who it is, what CPU time it takes, and whether it lives. What it does is told by
//! the kernel's records and by probes on its libssl.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context as _, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use procfs::{
    net::{TcpNetEntry, TcpState, tcp, tcp6},
    process::{FDTarget, all_processes},
};

use super::host::process_cpu_ns;
use crate::record::{
    stamps::ConnectionStamps,
    stream::{StreamKind, Writer, Written},
};

/// The processes of a server.
#[derive(Debug)]
pub struct Foreign {
    pids: Vec<u32>,
    recording: Option<Writer<ConnectionStamps>>,
    cpu_ns_before: u64,
    is_ending: Arc<AtomicBool>,
}

impl Foreign {
    /// A server of these processes. `tell` hears of the first of them that ends, unless this value has gone before.
    ///
    /// # Errors
    /// When one of them has ended already.
    pub fn new(pids: Vec<u32>, tell: fn(String)) -> anyhow::Result<Self> {
        let is_ending = Arc::new(AtomicBool::new(false));
        for &pid in &pids {
            let process = pidfd(pid).with_context(|| format!("the server's process {pid} has ended"))?;
            let (is_ending, name) = (Arc::clone(&is_ending), name(pid));
            thread::spawn(move || {
                // It fails only for lack of memory, and then the requests' failures tell.
                let ended = poll(
                    &mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)],
                    PollTimeout::NONE,
                );
                if ended.is_ok() && !is_ending.swap(true, Ordering::Relaxed) {
                    tell(format!("the server's process {pid} ({name}) has ended"));
                }
            });
        }
        Ok(Self {
            pids,
            recording: None,
            cpu_ns_before: 0,
            is_ending,
        })
    }

    /// The processes that listen on any of these TCP ports in this network namespace.
    ///
    /// # Errors
    /// When nobody listens on one of them, or /proc does not tell who: only root sees that.
    pub fn listening(ports: &[u16], tell: fn(String)) -> anyhow::Result<Self> {
        let mut listening: Vec<TcpNetEntry> = tcp().context("read /proc/net/tcp")?;
        // Absent without IPv6.
        listening.extend(tcp6().unwrap_or_default());
        listening.retain(|entry| entry.state == TcpState::Listen);
        for port in ports {
            ensure!(
                listening.iter().any(|entry| entry.local_address.port() == *port),
                "nobody listens on port {port} here: start the server first, and name its first port with --port"
            );
        }
        let inodes: BTreeSet<u64> = listening
            .iter()
            .filter(|entry| ports.contains(&entry.local_address.port()))
            .map(|entry| entry.inode)
            .collect();
        let pids = holders(&inodes)?;
        ensure!(
            !pids.is_empty(),
            "somebody listens on port {}, but no process that can be seen here holds the socket: run as root, in the server's own PID \
             namespace or above",
            ports[0]
        );
        Self::new(pids, tell)
    }

    /// All threads that there are now; one that begins later is not watched.
    ///
    /// # Errors
    /// When a process has ended.
    pub fn tids(&self) -> anyhow::Result<Vec<u32>> {
        let mut tids = Vec::new();
        for pid in &self.pids {
            let path = format!("/proc/{pid}/task");
            let threads = fs::read_dir(&path)
                .with_context(|| format!("read {path}: the server's process {pid} has ended"))?;
            tids.extend(threads.filter_map(|each| each.ok()?.file_name().to_str()?.parse::<u32>().ok()));
        }
        tids.sort_unstable();
        Ok(tids)
    }

    /// What the processes call themselves.
    #[must_use]
    pub fn name(&self) -> String {
        self.pids.first().map_or_else(String::new, |&pid| name(pid))
    }

    /// Begins a trial. The recording of connections stays empty: what the server did is told by the kernel's records.
    ///
    /// # Errors
    /// When the recording cannot be created.
    pub fn begin_trial(&mut self, recording: &Path, trial: u32) -> anyhow::Result<()> {
        self.recording = Some(Writer::create(recording, StreamKind::Connections, trial)?);
        self.cpu_ns_before = self.cpu_ns();
        Ok(())
    }

    /// Ends a trial and returns the size of the empty recording and the CPU time of the processes in it, ns.
    ///
    /// # Errors
    /// When no trial has begun, or the disk took no more.
    pub fn end_trial(&mut self) -> anyhow::Result<(Written, u64)> {
        let cpu_ns = self.cpu_ns().saturating_sub(self.cpu_ns_before);
        let written = self.recording.take().context("no trial has begun")?.finish()?;
        Ok((written, cpu_ns))
    }

    fn cpu_ns(&self) -> u64 {
        self.pids.iter().filter_map(|&pid| process_cpu_ns(pid)).sum()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }
}

/// Who has one of these sockets open.
fn holders(inodes: &BTreeSet<u64>) -> anyhow::Result<Vec<u32>> {
    let mut pids = Vec::new();
    // Processes come and go while we look; whatever cannot be read has gone, or is none that we may see.
    for process in all_processes().context("read /proc")?.flatten() {
        let Ok(files) = process.fd() else { continue };
        let holds = files
            .flatten()
            .any(|file| matches!(file.target, FDTarget::Socket(inode) if inodes.contains(&inode)));
        if holds {
            pids.push(process.pid().cast_unsigned());
        }
    }
    pids.sort_unstable();
    Ok(pids)
}

fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned())
}

/// A handle that stays with this process and no later one of the same number (Linux 5.3).
fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a system call with two integers, which returns a descriptor of our own or an error.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if handle < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(handle as RawFd) })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn nobody_hears(_: String) {}

    #[test]
    fn whoever_listens_is_found_with_all_its_threads() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Foreign::listening(&[port], nobody_hears).unwrap();
        let own = std::process::id();
        assert!(server.pids.contains(&own), "{server:?}");
        assert!(server.tids().unwrap().contains(&own));
        drop(listener);
        let error = Foreign::listening(&[port], nobody_hears).unwrap_err().to_string();
        assert!(
            error.contains(&port.to_string()) && error.contains("start the server"),
            "{error}"
        );
    }
}
