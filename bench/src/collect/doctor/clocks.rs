//! What the clocks tick by, and who steers them.

use super::{Finding, Root};
use crate::{collect::timekeeping, record::timekeeping::Timekeeping};

pub(super) fn examine(root: &Root) -> Vec<Finding> {
    vec![
        source(
            root.line("sys/devices/system/clocksource/clocksource0/current_clocksource")
                .as_deref(),
        ),
        synchronised(&timekeeping::read()),
    ]
}

fn source(name: Option<&str>) -> Finding {
    let rule = "clock.source";
    match name {
        None => Finding::unknown(rule, "/sys/devices/system/clocksource"),
        Some(name @ ("tsc" | "arch_sys_counter")) => Finding::ok(rule, name),
        Some(name @ ("kvm-clock" | "hyperv_clocksource_tsc_page" | "riscv_clocksource")) => {
            Finding::ok(rule, format!("{name}, read without a system call"))
        }
        Some(name @ ("hpet" | "acpi_pm" | "jiffies" | "pit")) => Finding::warn(
            rule,
            name,
            "each stamp costs a slow device access, or is coarse, and the kernel distrusts the fast counter here",
            "look in the kernel log for why, and boot with tsc=reliable only if the reason is known to be harmless",
        ),
        Some(name) => Finding::note(
            rule,
            name,
            "each stamp may be a system call",
            "take tsc where /sys/devices/system/clocksource offers it and the hypervisor keeps it stable",
        ),
    }
}

/// A fact for whoever reads the alignment; the alignment itself never trusts it.
fn synchronised(state: &Timekeeping) -> Finding {
    let rule = "clock.synchronised";
    let found = state.to_string();
    if state.synchronised == Some(true) {
        return Finding::ok(rule, found);
    }
    Finding::note(
        rule,
        found,
        "the two hosts' clocks drift apart as their crystals do; the alignment measures that and trusts neither",
        "none is needed; a daemon such as chrony makes drifts smaller",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::Level;

    #[test]
    fn slow_clocksources_are_warned_of() {
        for (name, level) in [
            ("tsc", Level::Ok),
            ("arch_sys_counter", Level::Ok),
            ("kvm-clock", Level::Ok),
            ("xen", Level::Note),
            ("hpet", Level::Warn),
            ("acpi_pm", Level::Warn),
        ] {
            assert_eq!(source(Some(name)).level, level, "{name}");
        }
        assert!(source(None).found.contains("unknown"));
    }

    #[test]
    fn a_clock_that_nobody_steers_is_a_note() {
        let steered = Timekeeping {
            daemons: vec!["chronyd".to_owned()],
            synchronised: Some(true),
            error_us_max: Some(120),
            ..Timekeeping::default()
        };
        assert_eq!(synchronised(&steered).level, Level::Ok);
        assert_eq!(synchronised(&Timekeeping::default()).level, Level::Note);
    }
}
