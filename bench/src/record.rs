//! The on-disk schema: where the collecting half and the analysing half meet.
//!
//! A run's folder holds one [`manifest::Manifest`] and, per host and trial, recordings of fixed-size records in the
//! container of [`stream`].

pub mod manifest;
pub mod stamps;
pub mod stream;
pub mod timekeeping;

/// Version of everything below a results folder. A reader refuses any other and names both.
pub const SCHEMA: u32 = 1;

/// No machine's monotonic clock, in ns, gets here: 73 years after its boot. A record with a later time is damaged, and leaving it
/// out keeps every difference of two times, and of two hosts' times with their drift, in 64 bits.
pub const TIME_NS_MAX: u64 = 1 << 61;
