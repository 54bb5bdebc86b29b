//! The half that touches network, kernel and wall time.

pub mod btf;
pub mod drain;
pub mod host;
pub mod link;
pub mod probes;
