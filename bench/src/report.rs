//! What a run says: tables, plots, exports.

pub mod summary;

pub mod terminal;

pub mod html;

pub mod export;

pub mod preflight;
pub mod scenarios;

pub mod audit;

pub mod compare;

pub(crate) mod text;

#[cfg(test)]
mod fixtures;
