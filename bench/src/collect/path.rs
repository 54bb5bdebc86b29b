//! What a condition does to the path, by means of the sockets alone: no device, queue or rule of any host is touched, so there is
//! nothing to clean up, and two hosts can do it as well as one.

use std::{
    io, mem,
    os::fd::{AsRawFd, RawFd},
};

/// Bounds the segments of a socket that is not yet connected, in both directions: it tells the other end so, and keeps to it itself.
pub(super) fn bound_segments(socket: &impl AsRawFd, mss: u16) -> io::Result<()> {
    set(
        socket.as_raw_fd(),
        libc::IPPROTO_TCP,
        libc::TCP_MAXSEG,
        &libc::c_int::from(mss),
    )
}

/// Loses a share of the segments that arrive at a socket: of a listener's, also at all that it accepts. The kernel throws the dice and
/// drops them as a socket filter does, behind where arrivals are recorded, so that each has a `RECEIVE` and a `DROP` record.
pub(super) fn lose(socket: &impl AsRawFd, share: f64) -> io::Result<()> {
    let below = (share * f64::from(u32::MAX)) as u32;
    let step = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut program = [
        step(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            0,
            0,
            (libc::SKF_AD_OFF + libc::SKF_AD_RANDOM).cast_unsigned(),
        ),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 1, 0, below),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    set(
        socket.as_raw_fd(),
        libc::SOL_SOCKET,
        libc::SO_ATTACH_FILTER,
        &program,
    )
}

fn set<T>(socket: RawFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` is what the kernel takes for this option, and it is copied before the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket,
            level,
            option,
            std::ptr::from_ref(value).cast(),
            mem::size_of::<T>() as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
