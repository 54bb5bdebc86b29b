//! What a run says: tables, plots, exports.

pub mod summary;
