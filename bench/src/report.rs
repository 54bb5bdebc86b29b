//! What a run says: tables, plots, exports.

pub mod summary;

pub mod terminal;

pub mod html;

pub mod export;

mod text;

#[cfg(test)]
mod fixtures;
