//! Waiting for what nothing announces.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Between two looks: short beside what an injection injects.
const INSTANT: Duration = Duration::from_millis(1);

/// Polls until the condition holds; whether it did in time.
pub(crate) fn within(most: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + most;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(INSTANT);
    }
    true
}
