//! The half that touches network, kernel and wall time.

pub mod link;
