//! Runs side by side for a terminal: what they think of themselves, in what else they differ, and then the numbers.

use super::{
    terminal::{ALARM, BOLD, DIM, GOOD, Page, RED, SMALL, short},
    text::{self, Unit},
};
use crate::{
    attribute::ledger::Line,
    compare::{Comparison, Difference, Differing, LedgerLine, LedgerPair, Pair, Subject},
};

/// Said once above the numbers: what their intervals do not cover.
const CAUTION: &str = "Runs are not interleaved as the arms of one run are: an interval covers how trials scatter within each run, and \
                       not what changed on the machines in between. What an arm costs over its baseline was interleaved, and so \
                       those comparisons are the firmer ones.";

/// Width of the name of a fact.
const FACT_WIDTH: usize = 48;

/// What the runs failed and in what else they differ, then later runs against the first. With `colour`, ANSI escapes mark what
/// matters.
#[must_use]
pub fn render(comparison: &Comparison, colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    subjects(&mut page, &comparison.runs);
    facts(&mut page, comparison);
    page.line("");
    page.wrapped("", CAUTION);
    for pair in &comparison.pairs {
        against(&mut page, pair);
    }
    page.text
}

fn subjects(page: &mut Page, runs: &[Subject]) {
    let invalid = runs.iter().filter(|run| !run.valid).count();
    if invalid > 0 {
        page.styled(
            ALARM,
            &format!(
                " INVALID: {invalid} of {} runs failed their own checks. Do not quote the numbers below. ",
                runs.len()
            ),
        );
    }
    for run in runs {
        page.styled(BOLD, &format!("{}  {}", run.label, run.folder));
        let mut judged = format!("begun {}, pqtail {}, ", run.begun, run.pqtail);
        judged += &match (run.passed, run.failed.len()) {
            (0, 0) => "no checks were made".to_owned(),
            (passed, 0) => format!("all {passed} checks passed"),
            (passed, failed) => format!("{failed} of {} checks failed:", passed + failed),
        };
        page.wrapped("   ", &judged);
        for failed in &run.failed {
            page.styled(RED, &format!("   FAILED  {}  ({})", failed.rule, failed.figure));
        }
    }
}

fn facts(page: &mut Page, comparison: &Comparison) {
    let (expected, differing): (Vec<&Differing>, Vec<&Differing>) =
        comparison.differing.iter().partition(|each| each.expected);
    page.line("");
    match differing.len() {
        0 => page.styled(GOOD, "By their manifests the runs differ in nothing else."),
        1 => page.styled(
            RED,
            "WARNING: the runs differ in 1 more thing, which may be why the numbers do",
        ),
        many => page.styled(
            RED,
            &format!(
                "WARNING: the runs differ in {many} more things, each of which may be why the numbers do"
            ),
        ),
    }
    for each in differing {
        fact(page, comparison, each);
    }
    if !expected.is_empty() {
        page.styled(DIM, "As between any two runs:");
        for each in expected {
            fact(page, comparison, each);
        }
    }
}

fn fact(page: &mut Page, comparison: &Comparison, differing: &Differing) {
    let name = format!("{} {}", differing.of.name(), plain_name(&differing.fact));
    // Runs with the same value stand together.
    let mut groups: Vec<(String, &Option<String>)> = Vec::new();
    for (run, value) in comparison.runs.iter().zip(&differing.values) {
        match groups.iter_mut().find(|(_, known)| *known == value) {
            Some((labels, _)) => *labels += &format!(", {}", run.label),
            None => groups.push((run.label.to_string(), value)),
        }
    }
    let groups: Vec<String> = groups
        .iter()
        .map(|(labels, value)| format!("{labels}: {}", in_words(&differing.fact, value.as_deref())))
        .collect();
    page.wrapped(
        &format!("  {:<FACT_WIDTH$}", short(&name, FACT_WIDTH - 1)),
        &groups.join(" | "),
    );
}

/// A fact's name without the unit that its value is shown with; what names a sysctl is known by itself.
fn plain_name(fact: &str) -> &str {
    let fact = fact.strip_prefix("sysctls.").unwrap_or(fact);
    ["_ns", "_bytes", "_hz"]
        .iter()
        .find_map(|unit| fact.strip_suffix(unit))
        .unwrap_or(fact)
}

/// A fact's value, with the unit that its name ends in.
fn in_words(fact: &str, value: Option<&str>) -> String {
    let Some(value) = value else {
        return "not told".to_owned();
    };
    let number = value.parse::<u64>().ok();
    match number {
        _ if value.is_empty() => "empty".to_owned(),
        Some(ns) if fact.ends_with("_ns") => text::duration(ns),
        // The kernel counts memory in KiB.
        Some(bytes) if fact.ends_with("_bytes") => format!("{} KiB", text::count(bytes >> 10)),
        _ if fact.ends_with("_hz") => format!("{value}/s"),
        _ => value.to_owned(),
    }
}

fn against(page: &mut Page, pair: &Pair) {
    let medians = pair.arms.iter().filter(|each| each.statistic == "p50");
    let slowest_ns = medians.flat_map(|each| [each.first_ns, each.later_ns]).max();
    let unit = Unit::for_median(slowest_ns.unwrap_or(0).unsigned_abs());
    let (first, later) = (pair.first, pair.later);
    page.heading(&format!("{later} against {first}"));
    if pair.same_run {
        page.wrapped_styled(
            RED,
            "  CAUTION".len(),
            "  CAUTION ",
            "both are the same run, by its begin and seed: no difference between them is evidence of anything",
        );
    }
    for why in &pair.unquotable {
        page.wrapped_styled(RED, "  NOT TO BE QUOTED".len(), "  NOT TO BE QUOTED ", why);
    }
    for note in &pair.not_compared {
        page.wrapped("  not compared: ", note);
    }
    differences(
        page,
        pair,
        &format!("Latency from the intended start, {}", unit.name),
        &pair.arms,
        unit,
    );
    differences(
        page,
        pair,
        &format!("What an arm costs over its baseline, {}", unit.name),
        &pair.effects,
        unit,
    );
    for ledgers in &pair.ledgers {
        ledger(page, pair, ledgers);
    }
}

fn differences(page: &mut Page, pair: &Pair, heading: &str, differences: &[Difference], unit: Unit) {
    if differences.is_empty() {
        return;
    }
    let (first, later) = (pair.first, pair.later);
    page.heading(&format!(
        "{heading}: {later} \u{2212} {first} with its 95 % interval"
    ));
    let mut subject = None;
    for each in differences {
        let words = if each.baseline.is_some() {
            ["dearer", "cheaper"]
        } else {
            ["slower", "faster"]
        };
        if subject != Some((&each.arm, &each.baseline)) {
            subject = Some((&each.arm, &each.baseline));
            let (name, trials) = match &each.baseline {
                Some(baseline) => (
                    format!("{} \u{2212} {}", short(&each.arm, 36), short(baseline, 36)),
                    "blocks",
                ),
                None => (short(&each.arm, 60), "trials"),
            };
            page.line(&format!(
                "{name}, means of {} and {} {trials}",
                each.first_trials, each.later_trials
            ));
            page.styled(
                DIM,
                &format!(
                    "  {:<6}{first:>10}{later:>10}{:>10}",
                    "",
                    format!("{later} \u{2212} {first}")
                ),
            );
        }
        let figure = |ns: i64| match &each.baseline {
            Some(_) => unit.signed(ns),
            None => unit.plain(ns.unsigned_abs()),
        };
        let (interval, shown) = match each.interval_ns {
            Some((low_ns, high_ns)) => (
                format!("[{}, {}]", unit.signed(low_ns), unit.signed(high_ns)),
                text::shown_by((low_ns, high_ns), words),
            ),
            None => (
                "\u{2013}".to_owned(),
                "no interval: it takes two trials in each run".to_owned(),
            ),
        };
        page.line(&format!(
            "  {:<6}{:>10}{:>10}{:>10}  {interval:<22} {shown}",
            each.statistic,
            figure(each.first_ns),
            figure(each.later_ns),
            unit.signed(each.difference_ns)
        ));
    }
}

fn ledger(page: &mut Page, pair: &Pair, ledgers: &LedgerPair) {
    let whose = match (&ledgers.baseline, ledgers.of.as_str()) {
        (Some(baseline), of) => format!(
            "What {} \u{2212} {} is made of at {of}",
            short(&ledgers.arm, 27),
            short(baseline, 27)
        ),
        (None, "middle") => format!(
            "Where the middle requests of {} spent their time",
            short(&ledgers.arm, 40)
        ),
        (None, of) => format!("Where the {of} of {} spent their time", short(&ledgers.arm, 40)),
    };
    page.heading(&format!("{whose}, mean per request"));
    let is_signed = ledgers.baseline.is_some();
    let row = |page: &mut Page, name: &str, first_ns: i64, later_ns: i64, bar: &str| {
        let figure = |ns: i64| match u64::try_from(ns) {
            Ok(ns) if !is_signed => text::duration(ns),
            _ => text::difference(ns),
        };
        page.line(&format!(
            "  {:<26}{:>13}{:>13}{:>13}  {bar}",
            short(name, 25),
            figure(first_ns),
            figure(later_ns),
            text::difference(later_ns.saturating_sub(first_ns))
        ));
    };
    page.styled(
        DIM,
        &format!(
            "  {:<26}{:>13}{:>13}{:>13}",
            "",
            pair.first,
            pair.later,
            format!("{} \u{2212} {}", pair.later, pair.first)
        ),
    );
    let size_most_ns = ledgers.lines.iter().map(LedgerLine::size_ns).max().unwrap_or(0);
    let is_small = |line: &&LedgerLine| {
        line.line != Line::Unexplained.name() && line.size_ns() as f64 / (size_most_ns as f64) < SMALL
    };
    let (small, large): (Vec<_>, Vec<_>) = ledgers.lines.iter().partition(is_small);
    let difference_ns = |line: &LedgerLine| line.later_ns.saturating_sub(line.first_ns);
    let most_ns = ledgers
        .lines
        .iter()
        .map(|line| difference_ns(line).unsigned_abs())
        .max()
        .unwrap_or(0)
        .max(1);
    for line in large {
        let ns = difference_ns(line);
        let length = (ns.unsigned_abs() as f64 / most_ns as f64 * 30.0).round() as usize;
        let mark = if ns < 0 { "\u{2591}" } else { "\u{2588}" };
        row(
            page,
            &line.line,
            line.first_ns,
            line.later_ns,
            &mark.repeat(length),
        );
    }
    let sum = |lines: &[&LedgerLine], of: fn(&LedgerLine) -> i64| {
        lines.iter().fold(0i64, |sum, line| sum.saturating_add(of(line)))
    };
    let sums = |lines: &[&LedgerLine]| (sum(lines, |line| line.first_ns), sum(lines, |line| line.later_ns));
    if !small.is_empty() {
        let (first_ns, later_ns) = sums(&small);
        row(
            page,
            &format!("{} smaller lines", small.len()),
            first_ns,
            later_ns,
            "",
        );
    }
    let all: Vec<&LedgerLine> = ledgers.lines.iter().collect();
    let (first_ns, later_ns) = sums(&all);
    row(page, "all lines", first_ns, later_ns, "");
}

#[cfg(test)]
mod tests {
    use super::{super::terminal::WIDTH, *};
    use crate::compare::{compare, fixtures::Folders};

    /// Two runs that differ in their kernels and in one arm, the later of which thinks badly of itself.
    fn different() -> Comparison {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|summary, manifest| {
            manifest["client"]["facts"]["kernel"] = "6.18 \u{1b}[2J".into();
            manifest["server"]["facts"]["kernel"] = "6.18 \u{1b}[2J".into();
            manifest["server"]["software"] = "x".repeat(300).into();
            manifest["plan"]["duration_ns"] = 20_000_000_000u64.into();
            manifest["plan"]["seed"] = 2.into();
            summary["valid"] = false.into();
            summary["verdicts"][0]["ok"] = false.into();
            let slower = &mut summary["arms"]["x25519mlkem768"];
            for trial in slower["trials"].as_array_mut().unwrap() {
                let p99 = &mut trial["percentiles_ns"]["p99"];
                *p99 = (p99.as_u64().unwrap() + 100_000).into();
            }
            slower["ledger_median"]["network"] = 450_000.into();
            slower["ledger_median"]["client.steal"] = 12.into();
        });
        compare(&folders.paths).unwrap()
    }

    #[test]
    fn what_differs_and_what_failed_stands_above_the_numbers() {
        let text = render(&different(), false);
        let numbers = text.find("Latency from the intended start").unwrap();
        for expected in [
            " INVALID: 1 of 2 runs failed their own checks",
            "FAILED  trials  (5 per arm)",
            "all 1 checks passed",
            "WARNING: the runs differ in 3 more things",
            "both ends kernel                                A: 6.12 | B: 6.18",
            "plan duration                                   A: 10.00 s | B: 20.00 s",
            "plan seed                                       A: 1 | B: 2",
            "Runs are not interleaved",
        ] {
            let at = text.find(expected);
            assert!(
                at.is_some_and(|at| at < numbers),
                "{expected} missing above the numbers of\n{text}"
            );
        }
    }

    #[test]
    fn differences_are_told_in_words_and_ledgers_line_by_line() {
        let text = render(&different(), false);
        for expected in [
            "x25519mlkem768, means of 5 and 5 trials",
            "x25519mlkem768 \u{2212} x25519, means of 5 and 5 blocks",
            "shown: slower by ",
            "shown: dearer by 99.",
            "not shown: beyond ",
            "Where the middle requests of x25519mlkem768 spent their time",
            "  network                        400.0 \u{b5}s     450.0 \u{b5}s    +50.00 \u{b5}s  \u{2588}",
            "  1 smaller lines                    0 ns        12 ns       +12 ns",
            "  all lines                      850.0 \u{b5}s     900.0 \u{b5}s    +50.01 \u{b5}s",
            "What x25519mlkem768 \u{2212} x25519 is made of at p99",
        ] {
            assert!(text.contains(expected), "{expected} missing in\n{text}");
        }
    }

    #[test]
    fn no_line_is_too_wide_and_none_moves_the_cursor() {
        let text = render(&different(), false);
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(!line.chars().any(char::is_control), "{line:?}");
        }
        // A sentence that is cut ends in an ellipsis; the name of a thing may be.
        let sentences = text.lines().filter(|line| line.contains("shown"));
        assert!(
            sentences.into_iter().all(|line| !line.ends_with('\u{2026}')),
            "{text}"
        );
    }

    #[test]
    fn a_run_against_itself_is_no_evidence() {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|_, _| ());
        let text = render(&compare(&folders.paths).unwrap(), false);
        assert!(
            text.contains("By their manifests the runs differ in nothing else."),
            "{text}"
        );
        assert!(text.contains("CAUTION both are the same run"), "{text}");
        assert!(
            !text.contains("INVALID") && !text.contains("shown: slower"),
            "{text}"
        );
    }

    #[test]
    fn one_trial_in_a_run_has_no_interval() {
        let mut folders = Folders::new();
        folders.add(|_, manifest| manifest["trials"].as_array_mut().unwrap().truncate(2));
        folders.add(|_, _| ());
        let text = render(&compare(&folders.paths).unwrap(), false);
        assert!(
            text.contains("no interval: it takes two trials in each run"),
            "{text}"
        );
    }
}
