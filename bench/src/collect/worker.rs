//! What load generator and server workers have in common: a pinned thread with a runtime of its own.

use std::{io, net::IpAddr};

use anyhow::Context as _;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, gettid},
};

/// Stamps that may wait for the recording thread, per worker: several seconds at full speed.
pub(super) const STAMPS_WAITING_MAX: usize = 1 << 16;

/// How often the recording threads look for stamps and flush. They poll, so that no worker ever pays for a wake-up.
pub(super) const POLL: std::time::Duration = std::time::Duration::from_millis(20);

/// Polls between two flushes of a recording: what a kill can lose.
pub(super) const POLLS_PER_FLUSH: u32 = 12;

/// Pins the calling thread and returns its id.
pub(super) fn pin(cpu: u32) -> anyhow::Result<u32> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)
        .with_context(|| format!("CPU {cpu} is beyond what an affinity mask holds"))?;
    sched_setaffinity(Pid::from_raw(0), &set)
        .with_context(|| format!("pin a worker to CPU {cpu}: is it online, and in this process's cpuset?"))?;
    Ok(gettid().as_raw().cast_unsigned())
}

/// A runtime whose tasks all live on the calling thread.
pub(super) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .context("start a runtime")
}

/// CPU time of the calling thread, ns.
pub(super) fn own_cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec, and every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// An address as records hold it: see [`pqtail_common::Packet`].
pub(super) fn folded(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(address) => u32::from_ne_bytes(address.octets()),
        IpAddr::V6(address) => {
            let octets = address.octets();
            let words = octets
                .chunks_exact(4)
                .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
            words.fold(0, |folded, word| folded ^ word)
        }
    }
}

/// Writes all of the bytes, waiting where the socket's buffer is full.
pub(super) async fn write_all(stream: &tokio::net::TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads what is there, waiting for at least one byte; 0 at the end of the stream.
pub(super) async fn read_some(stream: &tokio::net::TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}
