//! The half that touches network, kernel and wall time.

pub mod agent;
pub mod btf;
mod child;
mod control;
mod deadlines;
pub mod doctor;
pub mod drain;
pub mod ends;
pub mod exchange;
pub mod fault;
pub mod foreign;
pub mod host;
pub mod inventory;
pub(crate) mod libssl;
pub mod link;
pub mod load;
mod metadata;
pub mod nginx;
pub mod probes;
pub mod run;
pub mod serve;
pub mod ssh;
pub mod symbols;
pub mod timekeeping;
pub mod tls;
pub(crate) mod worker;
