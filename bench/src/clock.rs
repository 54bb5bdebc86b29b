//! Times of one host, and times of the run: two types, so that two hosts' clocks cannot be compared by mistake.

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// `CLOCK_MONOTONIC` nanoseconds of one host. Comparable only with times of the same host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostNs(pub u64);

/// Nanoseconds on the run's common clock, which is the client host's monotonic clock. Only alignment makes one from
/// another host's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunNs(pub i64);

impl Sub for HostNs {
    type Output = i64;

    fn sub(self, earlier: Self) -> i64 {
        self.0.wrapping_sub(earlier.0).cast_signed()
    }
}

impl Sub for RunNs {
    type Output = i64;

    fn sub(self, earlier: Self) -> i64 {
        self.0 - earlier.0
    }
}

impl Add<i64> for RunNs {
    type Output = Self;

    fn add(self, ns: i64) -> Self {
        Self(self.0 + ns)
    }
}

/// Reads this host's monotonic clock.
///
/// The same clock as `bpf_ktime_get_ns`, so user-space stamps and kernel records of one host need no alignment.
#[must_use]
pub fn now() -> HostNs {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec; CLOCK_MONOTONIC exists on every Linux and the call cannot fail on it.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    HostNs(time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned())
}
