//! Recorded events turned into intervals: what each CPU did, what each measured thread did, and what happened to each
//! connection on its way.

mod absence;
pub mod connection;
pub mod cpu;
pub mod gap;
pub(crate) mod lasting;
pub mod thread;
pub mod witness;
