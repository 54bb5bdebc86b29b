//! Kernel side of pqtail: filter first, store one fixed-size record, interpret nothing.
//!
//! Everything that needs thought (which segment answers which, who delayed whom) happens in user space, from the
//! records. A record that does not fit is counted in [`emit::LOSSES`], never dropped in silence.
#![no_std]
#![no_main]
// The program macros hand the context over by value.
#![allow(clippy::needless_pass_by_value)]

mod drop;
mod emit;
mod interrupts;
mod libssl;
mod packets;
mod read;
mod scheduler;
mod settings;
mod sleeps;
mod sockets;
mod steal;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
