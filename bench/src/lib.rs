//! What does X25519MLKEM768 cost over X25519 in a TLS 1.3 handshake, and what in the kernel caused each request in
//! the tail?
//!
//! The modules stand in the order in which the data passes:
//!
//! ```text
//! plan -> collect (client host)  \
//!                                 > record -> align -> timeline -> attribute -> report
//! plan -> collect (server host)  /
//! ```
//!
//! [`collect`] is the only half that touches network, kernel and wall time. Everything after [`record`] is pure:
//! records in, values out, so the same files always make the same report.

pub mod plan;

pub mod scenario;

pub mod collect;

pub mod record;

pub mod clock;

pub mod align;

pub mod timeline;

pub mod attribute;

pub mod statistics;

pub mod verdict;

pub mod analyze;

pub mod publish;

pub mod truth;

pub mod audit;

pub mod compare;

pub mod cli;

pub mod report;

/// The running executable's version, as manifests name it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
