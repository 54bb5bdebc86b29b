//! How figures read, the same in the terminal and on the page.

use super::summary::{
    ArmSummary, CellSummary, Difference, Effect, HostSummary, Percentiles, SetAside, Summary,
};
use crate::record::manifest::Status;

/// A duration with four significant digits and its unit: `812.4 µs`, `39.10 ms`.
pub(super) fn duration(ns: u64) -> String {
    scaled(ns as f64, "")
}

/// A difference: as [`duration`], always with its sign.
pub(super) fn difference(ns: i64) -> String {
    let sign = match ns {
        0 => "",
        1.. => "+",
        _ => "\u{2212}",
    };
    scaled(ns.unsigned_abs() as f64, sign)
}

fn scaled(ns: f64, sign: &str) -> String {
    let (value, unit) = if ns < 1e3 {
        return format!("{sign}{ns:.0} ns");
    } else if ns < 999_950.0 {
        (ns / 1e3, "µs")
    } else if ns < 999_950_000.0 {
        (ns / 1e6, "ms")
    } else {
        (ns / 1e9, "s")
    };
    let decimals = match value {
        ..10.0 => 3,
        10.0..100.0 => 2,
        _ => 1,
    };
    format!("{sign}{value:.decimals$} {unit}")
}

/// 1234567 as `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share of 1 as `42 %`.
pub(super) fn percent(share: f64) -> String {
    if share > 0.0 && share < 0.01 {
        "<1 %".to_owned()
    } else {
        format!("{:.0} %", share * 100.0)
    }
}

/// One unit for a whole table, so that its columns can be compared by eye.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Its symbol.
    pub(super) name: &'static str,
    ns: f64,
    decimals: usize,
}

impl Unit {
    /// Milliseconds to the microsecond, unless the typical request takes only some microseconds, or every arm takes seconds.
    pub(super) fn of(summary: &Summary) -> Self {
        let medians_ns = || {
            let medians_ns = summary.arms.values().map(|arm| arm.percentiles_ns.p50);
            medians_ns.filter(|&ns| ns > 0)
        };
        if medians_ns()
            .min()
            .is_some_and(|least_ns| least_ns >= 1_000_000_000)
        {
            return Self {
                name: "s",
                ns: 1e9,
                decimals: 3,
            };
        }
        Self::for_median(medians_ns().max().unwrap_or(0))
    }

    /// As [`Unit::of`], by the slowest median of what is in the table, ns.
    pub(super) fn for_median(slowest_median_ns: u64) -> Self {
        if (1..50_000).contains(&slowest_median_ns) {
            Self {
                name: "µs",
                ns: 1e3,
                decimals: 2,
            }
        } else {
            Self {
                name: "ms",
                ns: 1e6,
                decimals: 3,
            }
        }
    }

    /// The number without its unit.
    pub(super) fn plain(self, ns: u64) -> String {
        format!("{:.*}", self.decimals, ns as f64 / self.ns)
    }

    /// A difference without its unit, always with its sign.
    pub(super) fn signed(self, ns: i64) -> String {
        let text = self.plain(ns.unsigned_abs());
        if text.bytes().all(|each| matches!(each, b'0' | b'.')) {
            return text;
        }
        format!("{}{text}", if ns < 0 { '\u{2212}' } else { '+' })
    }
}

/// Column headings of a table of [`Percentiles`], in the order of [`row`].
pub(super) const STATISTICS: [&str; 7] = ["min", "mean", "p50", "p95", "p99", "p99.9", "max"];

/// The values of [`STATISTICS`].
pub(super) fn row(percentiles: &Percentiles) -> [u64; 7] {
    let Percentiles {
        min,
        mean,
        p50,
        p95,
        p99,
        p999,
        max,
    } = *percentiles;
    [min, mean, p50, p95, p99, p999, max]
}

/// Arms in the plan's order (the baseline first), then any the plan does not name.
pub(super) fn arms(summary: &Summary) -> Vec<(&str, &ArmSummary)> {
    let cells = summary.plan.cells();
    let names: Vec<_> = cells
        .into_iter()
        .map(|cell| summary.plan.cell_name(cell))
        .collect();
    let planned = |name: &str| names.iter().position(|each| each == name).unwrap_or(usize::MAX);
    let mut arms: Vec<_> = summary
        .arms
        .iter()
        .map(|(name, arm)| (name.as_str(), arm))
        .collect();
    arms.sort_by_key(|(name, _)| planned(name));
    arms
}

/// One line on how the run ended, if it did not simply complete.
pub(super) fn status(status: &Status) -> Option<String> {
    match status {
        Status::Complete => None,
        Status::Running => Some(
            "The run was still going on, or was killed: the trials up to then are shown. Run it again for all of \
             them."
                .to_owned(),
        ),
        Status::Cut { reason } => Some(format!(
            "The run ended early ({reason}): the trials up to then are shown."
        )),
    }
}

/// A cell's difference from its baseline; `None` for a baseline.
pub(super) fn difference_of<'a>(summary: &'a Summary, cell: &str, statistic: &str) -> Option<&'a Difference> {
    let mut differences = summary.differences.iter();
    differences.find(|each| each.arm == cell && each.statistic == statistic)
}

/// An effect with its interval; empty if there is none.
pub(super) fn with_interval(effect: Option<Effect>, unit: Unit) -> String {
    effect.map_or(String::new(), |effect| {
        let figure = unit.signed(effect.difference_ns);
        match interval(&effect, unit, "") {
            none if none.is_empty() => figure,
            interval => format!("{figure} {interval}"),
        }
    })
}

/// An effect's interval, or `none` of it.
pub(super) fn interval(effect: &Effect, unit: Unit, none: &str) -> String {
    effect.interval_ns.map_or(none.to_owned(), |(low_ns, high_ns)| {
        format!("[{}, {}]", unit.signed(low_ns), unit.signed(high_ns))
    })
}

/// What the arms that run under several conditions add to the median of their baseline, as shares of it: where an effect drowns in the
/// rest. Without environment causes, where those are known. By arm.
pub(super) fn shares(summary: &Summary) -> Vec<(&str, String)> {
    let mut by_arm: Vec<(&str, Vec<String>)> = Vec::new();
    for difference in summary.differences.iter().filter(|each| each.statistic == "p50") {
        let cells = (
            summary.arms.get(&difference.arm),
            summary.arms.get(&difference.baseline),
        );
        let (Some(arm), Some(baseline)) = cells else {
            continue;
        };
        let (effect, level_ns) = match difference.without_environment {
            Some(effect) => (effect, baseline.counterfactual_ns.p50),
            None => (difference.effect, baseline.percentiles_ns.p50),
        };
        if level_ns == 0 {
            continue;
        }
        let share = effect.difference_ns as f64 / level_ns as f64 * 100.0;
        let unsure = if effect.interval_ns.is_some_and(is_shown) {
            ""
        } else {
            " (not shown)"
        };
        let sign = if effect.difference_ns < 0 { '\u{2212}' } else { '+' };
        let text = format!("{} {sign}{:.0} %{unsure}", arm.condition, share.abs());
        match by_arm.iter_mut().find(|(name, _)| *name == arm.arm) {
            Some((_, texts)) => texts.push(text),
            None => by_arm.push((&arm.arm, vec![text])),
        }
    }
    let several = by_arm.into_iter().filter(|(_, texts)| texts.len() > 1);
    several.map(|(name, texts)| (name, texts.join(", "))).collect()
}

/// What [`shares`] are, of one arm.
pub(super) fn shares_of(arm: &str, summary: &Summary) -> String {
    let without = if summary.plan.probes {
        ", without environment causes"
    } else {
        ""
    };
    format!("{arm} adds to its baseline's median{without}")
}

/// Why a cell is not to be quoted, with what made its requests late; `None` if it is.
pub(super) fn not_to_be_quoted(cell: &CellSummary) -> Option<String> {
    let why = cell.saturated.as_ref().or(cell.disturbed.as_ref())?;
    let late_by = cell.late_by.map_or(String::new(), |(line, share)| {
        format!("; {} of what made requests late is {line}", percent(share))
    });
    Some(format!("not to be quoted: {why}{late_by}"))
}

/// Failed requests by kind.
pub(super) fn errors(arm: &ArmSummary) -> String {
    let kinds = arm.errors.iter();
    let kinds = kinds.map(|(kind, number)| format!("{} {kind}", count(*number)));
    kinds.collect::<Vec<_>>().join(", ")
}

/// What a difference comes to, in words.
pub(super) fn shown(effect: &Effect) -> String {
    let (Some(interval_ns), Some(detectable_ns)) = (effect.interval_ns, effect.detectable_ns) else {
        return "one block has no interval: raise --trials".to_owned();
    };
    let shown = shown_by(interval_ns, ["slower", "faster"]);
    if is_shown(interval_ns) {
        shown
    } else {
        format!("{shown}; {} is detectable", duration(detectable_ns))
    }
}

/// What an interval shows, with the words for above 0 and below.
pub(super) fn shown_by(interval_ns: (i64, i64), [above, below]: [&str; 2]) -> String {
    let (low_ns, high_ns) = interval_ns;
    if is_shown(interval_ns) {
        let least_ns = low_ns.unsigned_abs().min(high_ns.unsigned_abs());
        let direction = if low_ns > 0 { above } else { below };
        format!("shown: {direction} by {} at least", duration(least_ns))
    } else {
        let most_ns = low_ns.unsigned_abs().max(high_ns.unsigned_abs());
        format!("not shown: beyond {} is excluded", duration(most_ns))
    }
}

/// Whether an interval leaves no room for there being no difference.
fn is_shown((low_ns, high_ns): (i64, i64)) -> bool {
    low_ns > 0 || high_ns < 0
}

/// The clock in one sentence.
pub(super) fn clock(summary: &Summary) -> String {
    let clock = &summary.clock;
    if clock.shared_kernel {
        let bound = clock.error_ns_max.map_or(String::new(), |ns| {
            format!("; alignment would add at most {}", duration(ns))
        });
        return format!("both ends share one kernel and one clock{bound}");
    }
    let Some(offset_ns) = clock.offset_ns else {
        return format!(
            "the two hosts' clocks could not be aligned ({} usable handshakes): nothing splits wire from server",
            count(clock.handshakes)
        );
    };
    let drift = clock.drift_ns_per_s.map_or(String::new(), |drift| {
        format!(", drift {drift:+.1} ns/s").replace('-', "\u{2212}")
    });
    let bound = clock.error_ns_max.map_or("error bound unknown".to_owned(), |ns| {
        format!("error at most {}", duration(ns))
    });
    format!(
        "server {} against client{drift}, {bound}, from {} handshakes",
        difference(offset_ns),
        count(clock.handshakes)
    )
}

/// What the table of one-way times is called: they are never shown without their bound.
pub(super) fn one_way(summary: &Summary) -> String {
    let bound = summary.clock.error_ns_max.map_or(
        "by clocks whose error is not known in every trial".to_owned(),
        |ns| format!("each \u{b1} {} by the clocks' error", duration(ns)),
    );
    format!("One way, from where it leaves one host to where the other has all of it, {bound}")
}

/// A one-way time: a length, but for the clocks' error.
pub(super) fn one_way_time(ns: i64) -> String {
    match u64::try_from(ns) {
        Ok(ns) => duration(ns),
        Err(_) => difference(ns),
    }
}

/// One end in a line.
pub(super) fn host(host: &HostSummary) -> String {
    let cpus: Vec<String> = host.cpus.iter().map(u32::to_string).collect();
    let mut text = format!(
        "Linux {} {}, {} CPUs, {}; threads on CPU {}",
        host.kernel,
        host.machine,
        host.cpus_online,
        host.cpu_model.as_deref().unwrap_or("model not told"),
        cpus.join(", ")
    );
    for (what, value) in [
        ("clocksource", &host.clocksource),
        ("governor", &host.governor),
        ("TCP", &host.congestion_control),
    ] {
        if let Some(value) = value {
            text += &format!(", {what} {value}");
        }
    }
    text
}

/// What was run again, as the end of a sentence.
fn set_aside(aside: &SetAside) -> String {
    let by_arm: Vec<String> = aside
        .trials
        .iter()
        .map(|(name, trials)| format!("{trials} of {name}"))
        .collect();
    let mut text = format!(
        "; trials in which the hypervisor took more than {} % of a busy CPU were set aside and run again ({})",
        // A share such as 0.07 times 100 is no whole number.
        (aside.steal_share_max * 1e6).round() / 1e4,
        if by_arm.is_empty() {
            "none".to_owned()
        } else {
            by_arm.join(", ")
        }
    );
    for (count, what) in [
        (aside.kept, "of more were kept after several attempts"),
        (aside.unknown, "are without a figure for it"),
    ] {
        if count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    text
}

/// What was asked for, in one sentence.
pub(super) fn plan(summary: &Summary) -> String {
    let plan = &summary.plan;
    let set_aside = summary.set_aside.as_ref().map_or(String::new(), set_aside);
    format!(
        "{} trials per arm of {} s (warm-up {} s before each), {} requests/s, {} arrivals, seed {}{set_aside}",
        plan.trials_per_arm,
        plan.duration_ns as f64 / 1e9,
        plan.warmup_ns as f64 / 1e9,
        plan.rate_hz,
        match plan.arrivals {
            crate::plan::Arrivals::Poisson => "Poisson",
            crate::plan::Arrivals::Constant => "evenly spaced",
        },
        plan.seed
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_keep_four_digits() {
        assert_eq!(duration(0), "0 ns");
        assert_eq!(duration(999), "999 ns");
        assert_eq!(duration(1_234), "1.234 µs");
        assert_eq!(duration(812_400), "812.4 µs");
        assert_eq!(duration(999_999), "1.000 ms");
        assert_eq!(duration(39_100_000), "39.10 ms");
        assert_eq!(duration(1_012_345_678), "1.012 s");
        assert_eq!(difference(-310_000), "\u{2212}310.0 µs");
    }

    #[test]
    fn counts_and_shares() {
        assert_eq!(count(90_000), "90,000");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(12), "12");
        assert_eq!(percent(0.004), "<1 %");
        assert_eq!(percent(0.424), "42 %");
    }
}
