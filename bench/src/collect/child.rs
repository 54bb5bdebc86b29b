//! Child processes that never outlive us.

use std::{
    io,
    os::unix::process::{CommandExt as _, parent_id},
    process::Command,
};

use nix::{
    errno::Errno,
    sys::{prctl::set_pdeathsig, signal::Signal},
};

/// Lets `command` die with the *thread* that spawns it, and do something more before it becomes its program.
///
/// `PR_SET_PDEATHSIG` follows the spawning thread, not its process: spawn from one that outlives the child.
///
/// # Safety
/// `then` runs between fork and exec: it may only make system calls, and neither allocate nor take a lock.
pub(super) unsafe fn tie(command: &mut Command, then: fn() -> io::Result<()>) {
    let parent = std::process::id();
    let before_exec = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before the signal was armed; then nobody would ever send it.
        if parent_id() != parent {
            return Err(Errno::ESRCH.into());
        }
        then()
    };
    // SAFETY: prctl and getppid are system calls, errors are built from error numbers, and `then` is as the caller promises.
    unsafe { command.pre_exec(before_exec) };
}

/// Lets `command` die with the thread that spawns it, and keeps Ctrl-C in a terminal from it: the controller decides what
/// that means.
pub(super) fn tie_apart(command: &mut Command) {
    command.process_group(0);
    // SAFETY: nothing more is done.
    unsafe { tie(command, || Ok(())) };
}
