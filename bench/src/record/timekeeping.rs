//! Who steers a host's clocks, as recorded with its facts.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kernel's own account of its clock (`adjtimex(2)`), and who is there to steer it. Absent is what was not told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timekeeping {
    /// Programs that steer clocks and run, ascending.
    pub daemons: Vec<String>,
    /// Whether the kernel calls its clock synchronised.
    pub synchronised: Option<bool>,
    /// Largest error of the wall clock that the daemon claims, µs.
    pub error_us_max: Option<u64>,
    /// Error of the wall clock that the daemon estimates, µs.
    pub error_us_estimated: Option<u64>,
    /// By how much the rate of `CLOCK_MONOTONIC`, too, is corrected at the moment, parts per million.
    pub frequency_ppm: Option<f64>,
    /// PTP hardware clocks, by what their driver calls them.
    pub ptp_clocks: Vec<String>,
}

impl fmt::Display for Timekeeping {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self.synchronised {
            Some(true) => "synchronised by its own account",
            Some(false) => "not synchronised",
            None => "synchronisation unknown",
        })?;
        match self.daemons.as_slice() {
            [] => formatter.write_str(", no daemon seen")?,
            daemons => write!(formatter, ", by {}", daemons.join(" and "))?,
        }
        if self.synchronised == Some(true) {
            if let Some(us) = self.error_us_estimated {
                write!(formatter, ", {us} µs off by estimate")?;
            }
            if let Some(us) = self.error_us_max {
                write!(formatter, ", {us} µs at most")?;
            }
        }
        if let Some(ppm) = self.frequency_ppm {
            write!(formatter, ", rate corrected by {ppm:.3} ppm")?;
        }
        if !self.ptp_clocks.is_empty() {
            write!(formatter, ", PTP clocks: {}", self.ptp_clocks.join(", "))?;
        }
        Ok(())
    }
}
