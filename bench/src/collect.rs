//! The half that touches network, kernel and wall time.

pub mod agent;
pub mod btf;
mod deadlines;
pub mod drain;
pub mod exchange;
pub mod fault;
pub mod host;
pub mod link;
pub mod load;
pub mod probes;
pub mod run;
pub mod serve;
pub mod symbols;
pub mod tls;
pub(crate) mod worker;
