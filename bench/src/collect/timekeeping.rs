//! Who steers this host's clocks, and how well by their own account: a fact to print, never an input of the alignment.

use std::fs;

use crate::record::timekeeping::Timekeeping;

/// Programs that steer a clock, by command name (15 characters at most, as the kernel keeps them).
const DAEMONS: &[&str] = &[
    "chronyd",
    "ntpd",
    "ntpsec",
    "openntpd",
    "phc2sys",
    "ptp4l",
    "systemd-timesyn",
    "systemd-timesyncd",
];

/// Reads the state of this host's clocks.
#[must_use]
pub fn read() -> Timekeeping {
    let mut daemons: Vec<String> = procfs::process::all_processes()
        .into_iter()
        .flatten()
        .filter_map(|process| Some(process.ok()?.stat().ok()?.comm))
        .filter(|name| DAEMONS.contains(&name.as_str()))
        .collect();
    daemons.sort_unstable();
    daemons.dedup();
    let mut ptp_clocks: Vec<String> = fs::read_dir("/sys/class/ptp")
        .into_iter()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("clock_name")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    ptp_clocks.sort_unstable();
    let mut state = Timekeeping {
        daemons,
        ptp_clocks,
        ..Timekeeping::default()
    };
    // SAFETY: all zero is a valid timex, whose mode 0 only asks.
    let mut kernel: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `kernel` is a valid timex.
    if unsafe { libc::adjtimex(&raw mut kernel) } >= 0 {
        state.synchronised = Some(kernel.status & libc::STA_UNSYNC == 0);
        state.error_us_max = u64::try_from(kernel.maxerror).ok();
        state.error_us_estimated = u64::try_from(kernel.esterror).ok();
        // Parts per million with 16 bits behind the point (adjtimex(2)).
        state.frequency_ppm = Some(kernel.freq as f64 / 65_536.0);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_says_who_steers_and_how_well() {
        let state = Timekeeping {
            daemons: vec!["chronyd".to_owned()],
            synchronised: Some(true),
            error_us_max: Some(950),
            error_us_estimated: Some(12),
            frequency_ppm: Some(-3.25),
            ptp_clocks: vec!["ena".to_owned()],
        };
        assert_eq!(
            state.to_string(),
            "synchronised by its own account, by chronyd, 12 µs off by estimate, 950 µs at most, rate corrected by -3.250 \
             ppm, PTP clocks: ena"
        );
        assert_eq!(
            Timekeeping::default().to_string(),
            "synchronisation unknown, no daemon seen"
        );
    }

    #[test]
    fn every_kernel_tells_its_own_account() {
        assert!(read().frequency_ppm.is_some());
    }
}
