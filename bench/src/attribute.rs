//! Each interval of a request split by cause: a ledger that sums to the request's latency to the nanosecond.

pub mod ledger;

pub mod story;
mod wait;

pub mod split;

pub mod cause;
