//! What load generator and server workers have in common: a pinned thread with a runtime of its own.

use std::{cell::RefCell, future::poll_fn, io, net::IpAddr, pin::Pin, task::ready};

use anyhow::Context as _;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, gettid},
};
use tokio::{
    io::{AsyncRead as _, ReadBuf},
    net::TcpStream,
    runtime::{Builder, LocalOptions, LocalRuntime},
};

use super::exchange::READ_BYTES;

/// Stamps that may wait for the recording thread, per worker: several seconds at full speed.
pub(super) const STAMPS_WAITING_MAX: usize = 1 << 16;

/// How often the recording threads look for stamps and flush. They poll, so that no worker ever pays for a wake-up.
pub(super) const POLL: std::time::Duration = std::time::Duration::from_millis(20);

/// Polls between two flushes of a recording: what a kill can lose.
pub(super) const POLLS_PER_FLUSH: u32 = 12;

/// Pins the calling thread and returns its id.
pub(crate) fn pin(cpu: u32) -> anyhow::Result<u32> {
    pin_thread(0, cpu)?;
    Ok(gettid().as_raw().cast_unsigned())
}

/// Pins a thread, 0 being the calling one.
pub(super) fn pin_thread(tid: u32, cpu: u32) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)
        .with_context(|| format!("CPU {cpu} is beyond what an affinity mask holds"))?;
    sched_setaffinity(Pid::from_raw(tid.cast_signed()), &set)
        .with_context(|| format!("pin a worker to CPU {cpu}: is it online, and in this process's cpuset?"))
}

/// Sets the scheduling policy (`libc::SCHED_*`) of a thread, 0 being the calling one, and its real-time priority, which is 0 for
/// policies that have none.
pub(crate) fn set_scheduler(tid: u32, policy: libc::c_int, sched_priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: a valid parameter block.
    match unsafe { libc::sched_setscheduler(tid.cast_signed(), policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A runtime whose tasks all live on the calling thread.
pub(super) fn runtime() -> anyhow::Result<LocalRuntime> {
    Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(LocalOptions::default())
        .context("start a runtime")
}

/// What a worker reads into, one for all its connections: each is done with it before it waits again.
pub(super) struct ReadBuffer(RefCell<Box<[u8]>>);

impl ReadBuffer {
    pub(super) fn new() -> Self {
        Self(RefCell::new(vec![0; READ_BYTES].into()))
    }

    /// What the last read brought.
    pub(super) fn bytes(&self, read: usize) -> std::cell::Ref<'_, [u8]> {
        std::cell::Ref::map(self.0.borrow(), |buffer| &buffer[..read])
    }
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
pub(super) async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
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

/// Reads what is there, at most `bytes_max`, waiting for at least one byte; 0 at the end of the stream.
pub(super) async fn read_some(
    stream: &mut TcpStream,
    buffer: &ReadBuffer,
    bytes_max: usize,
) -> io::Result<usize> {
    // Unlike `try_read`, `poll_read` knows a short read for the last, and saves the call that would find nothing.
    poll_fn(|context| {
        let mut buffer = buffer.0.borrow_mut();
        let mut read = ReadBuf::new(&mut buffer[..bytes_max]);
        ready!(Pin::new(&mut *stream).poll_read(context, &mut read))?;
        Ok(read.filled().len()).into()
    })
    .await
}
