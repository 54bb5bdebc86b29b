//! The report for a terminal: what failed first, then the numbers, at most [`WIDTH`] columns wide.

use std::fmt::Write as _;

use super::{
    summary::{BudgetRow, Effect, Outlier, Summary, SwimLanes},
    text::{self, STATISTICS, Unit},
};
use crate::{
    attribute::ledger::{Ledger, Line},
    record::manifest::Absent,
};

/// No line is wider, in characters.
pub const WIDTH: usize = 110;

/// Outliers listed one by one; the rest are in `outliers.jsonl`.
const WORST: usize = 10;

/// Lines of an outlier's ledger that are listed.
const TOP_LINES: usize = 3;

/// Lines below this share of the whole are summed up; summary.json and the page have each.
pub(super) const SMALL: f64 = 0.01;

/// The longest arm name, and a gap.
const NAME_WIDTH: usize = 28;

/// One interval between two neighbouring checkpoints of a request, for [`explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// From what to what: `SYN out -> SYN in`.
    pub label: String,
    /// Begin, ns after the intended start.
    pub start_ns: i64,
    /// End, ns after the intended start.
    pub end_ns: i64,
    /// Where its time went; sums to its length.
    pub ledger: Ledger,
}

/// The whole report. `results` is the folder to name at the end; with `colour`, ANSI escapes mark what matters.
#[must_use]
pub fn render(summary: &Summary, outliers: &[Outlier], results: &str, colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    verdicts(&mut page, summary);
    if summary.conditions.len() > 1 {
        // One table instead of many: the page and summary.json have for each condition what a single one has here.
        sweep(&mut page, summary);
        null(&mut page, summary);
        known_shifts(&mut page, summary);
        trials(&mut page, summary);
    } else {
        comparison(&mut page, summary);
        differences(&mut page, summary);
        null(&mut page, summary);
        known_shifts(&mut page, summary);
        trials(&mut page, summary);
        decomposition(&mut page, summary);
        one_way(&mut page, summary);
        tail_budget(&mut page, summary);
    }
    worst(&mut page, outliers);
    gaps(&mut page, summary);
    page.heading("Run");
    page.wrapped("plan     ", &text::plan(summary));
    for (end, host) in &summary.hosts {
        page.wrapped(&format!("{end:<9}"), &text::host(host));
    }
    page.wrapped("clock    ", &text::clock(summary));
    page.wrapped("results  ", results);
    page.text
}

/// One request's story, interval by interval and cause by cause. `lanes` adds the moments seen around it.
#[must_use]
pub fn explain(outlier: &Outlier, lanes: Option<&SwimLanes>, stretches: &[Stretch], colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    page.styled(
        BOLD,
        &format!(
            "Request {} of trial {} ({}) took {}",
            outlier.request,
            outlier.trial,
            outlier.arm,
            text::duration(outlier.latency_ns)
        ),
    );
    page.wrapped(
        "cause    ",
        &format!(
            "{}, {} above the middle requests, {} of its whole excess",
            cause(outlier),
            text::duration(outlier.excess_ns),
            text::percent(outlier.share)
        ),
    );
    if outlier.incomplete {
        page.wrapped(
            "caution  ",
            "kernel records were lost during this request: the ledger is incomplete",
        );
    }
    page.heading("Where the time went");
    let mut lines: Vec<_> = outlier.ledger.lines().collect();
    lines.sort_by_key(|&(line, ns)| (std::cmp::Reverse(ns), line));
    for (line, ns) in lines {
        let share = ns as f64 / outlier.latency_ns.max(1) as f64;
        let bar = "\u{2588}".repeat((share * 40.0).round() as usize);
        page.line(&format!(
            "  {:<22}{:>12}{:>7}  {bar}",
            line.name(),
            text::duration(ns),
            text::percent(share)
        ));
    }
    if !stretches.is_empty() {
        page.heading("Interval by interval");
        page.styled(
            DIM,
            &format!("  {:>12}{:>12}  {:<38}{}", "at", "took", "interval", "causes"),
        );
        for stretch in stretches {
            let took_ns = stretch.end_ns.saturating_sub(stretch.start_ns).max(0) as u64;
            let mut lines: Vec<_> = stretch.ledger.lines().collect();
            lines.sort_by_key(|&(line, ns)| (std::cmp::Reverse(ns), line));
            let mut lines = lines.into_iter();
            let mut next = || {
                lines
                    .next()
                    .map(|(line, ns)| format!("{} {}", line.name(), text::duration(ns)))
            };
            page.line(&format!(
                "  {:>12}{:>12}  {:<38}{}",
                text::difference(stretch.start_ns),
                text::duration(took_ns),
                short(&stretch.label, 36),
                next().unwrap_or_default()
            ));
            while let Some(more) = next() {
                page.line(&format!("{:66}{more}", ""));
            }
        }
    }
    if !outlier.evidence.is_empty() {
        page.heading("Evidence");
        for seen in &outlier.evidence {
            page.wrapped(
                &format!(
                    "  {:>12}{:>12}  {:<22}",
                    text::difference(seen.at_ns),
                    text::duration(seen.duration_ns),
                    seen.line.name()
                ),
                &seen.what,
            );
        }
    }
    let mut moments: Vec<_> = lanes
        .iter()
        .flat_map(|lanes| &lanes.lanes)
        .flat_map(|lane| {
            lane.marks
                .iter()
                .map(move |mark| (mark.at_ns, &lane.name, &mark.label))
        })
        .collect();
    moments.sort_by_key(|&(at_ns, ..)| at_ns);
    if !moments.is_empty() {
        page.heading("Moments");
        for (at_ns, lane, label) in moments {
            page.wrapped(
                &format!("  {:>12}  {:<22}", text::difference(at_ns), short(lane, 20)),
                label,
            );
        }
    }
    page.text
}

fn verdicts(page: &mut Page, summary: &Summary) {
    let failed: Vec<_> = summary.verdicts.iter().filter(|verdict| !verdict.ok).collect();
    let passed: Vec<_> = summary
        .verdicts
        .iter()
        .filter(|verdict| verdict.ok)
        .map(|verdict| verdict.rule)
        .collect();
    if !failed.is_empty() || !summary.valid {
        page.styled(
            ALARM,
            &format!(
                " INVALID RUN: {} of {} checks failed. Do not quote the numbers below. ",
                failed.len(),
                summary.verdicts.len()
            ),
        );
    } else if summary.verdicts.is_empty() {
        page.styled(BOLD, "No checks were made of this run.");
    } else {
        page.styled(GOOD, &format!("VALID: all {} checks passed.", passed.len()));
    }
    if let Some(status) = text::status(&summary.status) {
        page.wrapped("  ", &status);
    }
    for verdict in failed {
        const LEAD: &str = "  FAILED  ";
        let marked = LEAD.len() + verdict.rule.len();
        page.wrapped_styled(
            RED,
            marked,
            LEAD,
            &format!("{} ({})", verdict.rule, verdict.figure),
        );
        page.wrapped("          ", &verdict.text);
    }
    if !passed.is_empty() {
        page.wrapped("  passed  ", &passed.join(", "));
    }
    page.line("");
    page.styled(BOLD, &summary.plan.scenario);
}

fn comparison(page: &mut Page, summary: &Summary) {
    let unit = Unit::of(summary);
    page.heading(&format!("Latency from the intended start, {}", unit.name));
    let cells = |cells: &[String]| {
        cells.iter().fold(String::new(), |mut row, cell| {
            let _ = write!(row, "{cell:>10}");
            row
        })
    };
    page.styled(
        DIM,
        &format!(
            "{:<NAME_WIDTH$}{:>10}{}",
            "",
            "requests",
            cells(&STATISTICS.map(str::to_owned))
        ),
    );
    for (name, arm) in text::arms(summary) {
        if arm.requests == 0 {
            page.line(&format!(
                "{:<NAME_WIDTH$}{:>10}   no request ended well",
                short(name, 27),
                0
            ));
        } else {
            let row = |percentiles| cells(&text::row(percentiles).map(|ns| unit.plain(ns)));
            page.line(&format!(
                "{:<NAME_WIDTH$}{:>10}{}",
                short(name, 27),
                text::count(arm.requests),
                row(&arm.percentiles_ns)
            ));
            // Without records nothing is known about the environment.
            if summary.plan.probes {
                page.styled(
                    DIM,
                    &format!(
                        "{:<38}{}",
                        "  without environment causes",
                        row(&arm.counterfactual_ns)
                    ),
                );
            }
            page.styled(
                DIM,
                &format!(
                    "{:<38}{}",
                    "  from the actual start",
                    row(&arm.service_percentiles_ns)
                ),
            );
        }
        if !arm.errors.is_empty() {
            page.wrapped("  failed, not in the figures: ", &text::errors(arm));
        }
    }
}

fn differences(page: &mut Page, summary: &Summary) {
    if summary.differences.is_empty() {
        return;
    }
    let unit = Unit::of(summary);
    page.heading(&format!(
        "Difference, {}, with its 95 % interval over {} blocks of trials",
        unit.name, summary.differences[0].effect.blocks
    ));
    let line = |indent: usize, what: &str, effect: &Effect| {
        format!(
            "{:indent$}{what:<6}{:>10}  {:<21} {}",
            "",
            unit.signed(effect.difference_ns),
            text::interval(effect, unit, "\u{2013}"),
            text::shown(effect)
        )
    };
    for of_arm in summary.differences.chunk_by(|a, b| a.arm == b.arm) {
        page.line(&format!(
            "{} \u{2212} {}",
            short(&of_arm[0].arm, 40),
            short(&of_arm[0].baseline, 40)
        ));
        for difference in of_arm {
            page.line(&line(2, difference.statistic, &difference.effect));
        }
        let without = of_arm
            .iter()
            .filter_map(|each| Some((each.statistic, each.without_environment?)));
        for (number, (statistic, effect)) in without.enumerate() {
            if number == 0 {
                page.styled(DIM, "  without environment causes");
            }
            page.styled(DIM, &line(2, statistic, &effect));
        }
    }
}

/// Every condition with its arms: how they stood up to the load, and what the others add to the baseline.
fn sweep(page: &mut Page, summary: &Summary) {
    let unit = Unit::of(summary);
    page.heading(&format!(
        "Latency from the intended start under each condition, {}; differences with their 95 % intervals",
        unit.name
    ));
    // What the machine's mood adds hides most differences, and what it does at p99 is on the page.
    let last = if summary.plan.probes {
        "without environment"
    } else {
        "p99 \u{2212} baseline"
    };
    page.styled(
        DIM,
        &format!(
            "  {:<28}{:>8}{:>9}{:>9}  {:<27}{last}",
            "", "requests", "p50", "p99", "p50 \u{2212} baseline"
        ),
    );
    for condition in &summary.conditions {
        page.styled(
            BOLD,
            &format!("{}, {} requests/s", condition.name, condition.rate_hz),
        );
        for cell in &condition.cells {
            let Some(arm) = summary.arms.get(&cell.name) else {
                continue;
            };
            let difference = |statistic| text::difference_of(summary, &cell.name, statistic);
            let effect = |of: Option<Effect>| text::with_interval(of, unit);
            page.line(&format!(
                "  {:<28}{:>8}{:>9}{:>9}  {:<27}{}",
                short(&cell.arm, 27),
                text::count(arm.requests),
                unit.plain(arm.percentiles_ns.p50),
                unit.plain(arm.percentiles_ns.p99),
                effect(difference("p50").map(|each| each.effect)),
                if summary.plan.probes {
                    effect(difference("p50").and_then(|each| each.without_environment))
                } else {
                    effect(difference("p99").map(|each| each.effect))
                }
            ));
            if let Some(why) = text::not_to_be_quoted(cell) {
                page.wrapped("      ", &why);
            }
            if !arm.errors.is_empty() {
                page.wrapped("      failed, not in the figures: ", &text::errors(arm));
            }
        }
    }
    for (arm, shares) in text::shares(summary) {
        page.wrapped("", &format!("{}: {shares}", text::shares_of(arm, summary)));
    }
}

fn null(page: &mut Page, summary: &Summary) {
    if summary.null.is_empty() {
        return;
    }
    page.heading(
        "An arm against itself: comparisons of its own trials that show a difference, where there is none",
    );
    for (name, _) in text::arms(summary) {
        let of_arm = summary.null.iter().filter(|each| each.arm == name);
        let shown: Vec<String> = of_arm
            .map(|each| {
                let share = f64::from(each.false_alarms) / f64::from(each.comparisons);
                format!("{} {}", each.statistic, text::percent(share))
            })
            .collect();
        if !shown.is_empty() {
            page.wrapped(
                &format!("  {:<26}", short(name, 25)),
                &format!("{} (nominal 5 %)", shown.join(", ")),
            );
        }
    }
}

fn known_shifts(page: &mut Page, summary: &Summary) {
    let Some(first) = summary.known_shifts.first() else {
        return;
    };
    let unit = Unit::of(summary);
    page.heading(&format!(
        "Known computing added to the server, found again, {}, over {} blocks of trials",
        unit.name, first.effect.blocks
    ));
    for each in &summary.known_shifts {
        page.wrapped(
            &format!("  {:<26}", short(&each.arm, 25)),
            &format!(
                "p50 {}: {} {}; {} of {} intervals over {} blocks hold it (nominal 95 %)",
                text::difference(each.shift_ns.cast_signed()),
                unit.signed(each.effect.difference_ns),
                text::interval(&each.effect, unit, ""),
                each.covered,
                each.comparisons,
                each.blocks_each
            ),
        );
    }
}

fn trials(page: &mut Page, summary: &Summary) {
    let unit = Unit::of(summary);
    if summary.arms.values().all(|arm| arm.trials.is_empty()) {
        return;
    }
    page.heading(&format!("p99 per trial, {}", unit.name));
    let mut condition = "";
    for (name, arm) in text::arms(summary) {
        // Arms of one condition stand together, and several of them would repeat its name.
        let is_sweep = summary.conditions.len() > 1;
        if is_sweep && arm.condition != condition {
            condition = &arm.condition;
            page.styled(DIM, condition);
        }
        let name = if is_sweep { &arm.arm } else { name };
        let p99s: Vec<_> = arm
            .trials
            .iter()
            .map(|trial| format!(" {:>8}", unit.plain(trial.percentiles_ns.p99)))
            .collect();
        // Unbroken runs of digits and spaces: wrapped by count, not by word.
        for (row, chunk) in p99s.chunks(8).enumerate() {
            let name = if row == 0 { short(name, 27) } else { String::new() };
            page.line(&format!("{name:<NAME_WIDTH$}{}", chunk.concat()));
        }
    }
}

fn decomposition(page: &mut Page, summary: &Summary) {
    for split in &summary.decomposition {
        page.heading(&format!(
            "What makes {} differ at {}: {}",
            short(&split.arm, 27),
            split.statistic,
            text::difference(split.difference_ns)
        ));
        let mut lines: Vec<_> = split.lines.iter().map(|(&line, &ns)| (line, ns)).collect();
        lines.sort_by_key(|&(line, ns)| (std::cmp::Reverse(ns.unsigned_abs()), line));
        let most = lines.first().map_or(1, |&(_, ns)| ns.unsigned_abs().max(1));
        let is_small = |&(line, ns): &(&str, i64)| {
            line != Line::Unexplained.name() && ns.unsigned_abs() as f64 / (most as f64) < SMALL
        };
        let (small, shown): (Vec<_>, Vec<_>) = lines.into_iter().partition(is_small);
        for (line, ns) in shown {
            let length = (ns.unsigned_abs() as f64 / most as f64 * 30.0).round() as usize;
            let mark = if ns < 0 { "\u{2591}" } else { "\u{2588}" };
            page.line(&format!(
                "  {line:<22}{:>13}  {}",
                text::difference(ns),
                mark.repeat(length)
            ));
        }
        if !small.is_empty() {
            let sum: i64 = small.iter().map(|(_, ns)| ns).sum();
            page.line(&format!(
                "  {:<22}{:>13}",
                format!("{} smaller lines", small.len()),
                text::difference(sum)
            ));
        }
    }
}

fn one_way(page: &mut Page, summary: &Summary) {
    let arms: Vec<_> = text::arms(summary)
        .into_iter()
        .filter(|(_, arm)| !arm.one_way.is_empty())
        .collect();
    if arms.is_empty() {
        return;
    }
    page.heading(&text::one_way(summary));
    for (name, arm) in arms {
        page.styled(
            DIM,
            &format!(
                "{:<NAME_WIDTH$}{:>10}{:>12}{:>12}",
                short(name, 27),
                "packets",
                "p50",
                "p99"
            ),
        );
        for each in &arm.one_way {
            page.line(&format!(
                "  {:<26}{:>10}{:>12}{:>12}",
                short(&each.what, 25),
                text::count(each.count),
                text::one_way_time(each.p50_ns),
                text::one_way_time(each.p99_ns)
            ));
        }
    }
}

fn tail_budget(page: &mut Page, summary: &Summary) {
    let budgets: Vec<_> = text::arms(summary)
        .into_iter()
        .filter_map(|(name, _)| summary.tail_budget.get_key_value(name))
        .filter(|(_, rows)| !rows.is_empty())
        .collect();
    if budgets.is_empty() {
        return;
    }
    page.heading("Tail budget: excess of the outliers over the middle requests, by cause");
    for (name, rows) in budgets {
        page.styled(
            DIM,
            &format!(
                "{:<24}{:>8}{:>13}{:>7}  culprits",
                short(name, 23),
                "outliers",
                "excess",
                "share"
            ),
        );
        let is_small =
            |row: &&BudgetRow| row.outliers == 0 && row.share < SMALL && row.cause != Line::Unexplained;
        let (small, shown): (Vec<_>, Vec<_>) = rows.iter().partition(is_small);
        for row in shown {
            let culprits: Vec<_> = row
                .culprits
                .iter()
                .map(|(culprit, ns)| format!("{} {}", short(culprit, 34), text::duration(*ns)))
                .collect();
            page.wrapped(
                &format!(
                    "  {:<22}{:>8}{:>13}{:>7}  ",
                    row.cause.name(),
                    text::count(row.outliers),
                    text::duration(row.excess_ns),
                    text::percent(row.share)
                ),
                if culprits.is_empty() {
                    "none named".to_owned()
                } else {
                    culprits.join(", ")
                }
                .as_str(),
            );
        }
        if !small.is_empty() {
            page.line(&format!(
                "  {:<30}{:>13}{:>7}",
                format!("{} smaller lines", small.len()),
                text::duration(small.iter().map(|row| row.excess_ns).sum()),
                text::percent(small.iter().map(|row| row.share).sum())
            ));
        }
    }
}

fn worst(page: &mut Page, outliers: &[Outlier]) {
    if outliers.is_empty() {
        return;
    }
    let mut order: Vec<_> = outliers.iter().collect();
    order.sort_by_key(|outlier| {
        (
            std::cmp::Reverse(outlier.latency_ns),
            outlier.trial,
            outlier.request,
        )
    });
    page.heading(&format!(
        "Worst {} of {} outliers",
        order.len().min(WORST),
        text::count(order.len() as u64)
    ));
    for outlier in order.into_iter().take(WORST) {
        page.line(&format!(
            "{:>10}  {:<NAME_WIDTH$}trial {:<4}request {:<8}{}",
            text::duration(outlier.latency_ns),
            short(&outlier.arm, 27),
            outlier.trial,
            outlier.request,
            if outlier.incomplete { "records lost" } else { "" }
        ));
        page.wrapped(
            "            ",
            &format!(
                "{}: {} of the excess",
                cause(outlier),
                text::percent(outlier.share)
            ),
        );
        let mut lines: Vec<_> = outlier.ledger.lines().collect();
        lines.sort_by_key(|&(line, ns)| (std::cmp::Reverse(ns), line));
        let lines: Vec<_> = lines
            .into_iter()
            .take(TOP_LINES)
            .map(|(line, ns)| format!("{} {}", line.name(), text::duration(ns)))
            .collect();
        page.styled(DIM, &format!("            {}", lines.join(", ")));
    }
}

fn gaps(page: &mut Page, summary: &Summary) {
    let mut rows = Vec::new();
    for (folder, loss) in &summary.losses {
        for (kind, number) in &loss.lost {
            if *number > 0 {
                rows.push((
                    format!("  {folder}: lost "),
                    format!("{} {kind} of {}", text::count(*number), text::count(loss.records)),
                ));
            }
        }
        if loss.damaged > 0 {
            rows.push((
                format!("  {folder}: "),
                format!("{} damaged recordings or chunks", text::count(loss.damaged)),
            ));
        }
    }
    for (folder, steal) in summary.steal.iter().filter(|(_, steal)| !steal.agree) {
        rows.push((
            format!("  {folder}: "),
            format!(
                "steal is {} by the hypervisor's counter and {} by /proc/stat",
                text::duration(steal.counter_ns),
                text::duration(steal.stat_ns)
            ),
        ));
    }
    for (host, probes) in &summary.probes {
        for absent in Absent::among(probes) {
            rows.push((
                format!("  {host}: "),
                format!(
                    "no {}: {} ({})",
                    absent.names.join(", "),
                    absent.consequence,
                    absent.reason
                ),
            ));
        }
    }
    if rows.is_empty() {
        return;
    }
    page.heading("Not seen");
    for (lead, row) in rows {
        page.wrapped(&lead, &row);
    }
}

fn cause(outlier: &Outlier) -> String {
    outlier.culprit.as_ref().map_or_else(
        || outlier.cause.name().to_owned(),
        |culprit| format!("{} by {culprit}", outlier.cause.name()),
    )
}

pub(super) const BOLD: &str = "1";
pub(super) const DIM: &str = "2";
pub(super) const RED: &str = "31";
pub(super) const GOOD: &str = "32";
pub(super) const ALARM: &str = "1;97;41";

pub(super) struct Page {
    pub(super) text: String,
    pub(super) colour: bool,
}

impl Page {
    pub(super) fn line(&mut self, line: &str) {
        self.text.push_str(short(line, WIDTH).trim_end());
        self.text.push('\n');
    }

    pub(super) fn styled(&mut self, style: &str, line: &str) {
        if self.colour {
            let line = short(line, WIDTH);
            let _ = writeln!(self.text, "\u{1b}[{style}m{line}\u{1b}[0m");
        } else {
            self.line(line);
        }
    }

    pub(super) fn heading(&mut self, heading: &str) {
        self.line("");
        self.styled(BOLD, heading);
    }

    /// Breaks `text` at spaces; lines after the first are indented to the end of `lead`.
    pub(super) fn wrapped(&mut self, lead: &str, text: &str) {
        let indent = lead.chars().count().min(WIDTH / 2);
        let mut line = short(lead, WIDTH / 2);
        let mut width = indent;
        for word in text.split_whitespace() {
            let long = word.chars().count();
            if width > indent && width + 1 + long > WIDTH {
                self.line(&line);
                line = " ".repeat(indent);
                width = indent;
            }
            if width > indent {
                line.push(' ');
                width += 1;
            }
            line.push_str(word);
            width += long;
        }
        self.line(&line);
    }

    /// As [`Page::wrapped`], with the first `marked` bytes, which are ASCII and stand at the line's begin, in a style.
    pub(super) fn wrapped_styled(&mut self, style: &str, marked: usize, lead: &str, text: &str) {
        let begin = self.text.len();
        self.wrapped(lead, text);
        if self.colour {
            self.text.insert_str(begin + marked, "\u{1b}[0m");
            self.text.insert_str(begin, &format!("\u{1b}[{style}m"));
        }
    }
}

/// At most `width` characters, without any that would move the cursor: names come from other programs.
pub(super) fn short(text: &str, width: usize) -> String {
    let mut kept: String = text
        .chars()
        .map(|each| if each.is_control() { '\u{fffd}' } else { each })
        .take(width + 1)
        .collect();
    if kept.chars().count() > width {
        kept.pop();
        kept.pop();
        kept.push('\u{2026}');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        attribute::ledger::Line,
        report::fixtures::{self, Sample},
    };

    fn plain(sample: &Sample) -> String {
        render(&sample.summary, &sample.outliers, "results/2026-01-01-x", false)
    }

    #[test]
    fn an_invalid_run_says_so_before_any_number() {
        let text = plain(&fixtures::invalid());
        assert!(text.starts_with(" INVALID RUN: 1 of 4 checks failed"), "{text}");
        let remedy = text.find("dedicated cores").expect("remedy");
        assert!(remedy < text.find("p99").expect("numbers"), "{text}");
    }

    #[test]
    fn no_line_is_too_wide_and_none_moves_the_cursor() {
        let mut evil = fixtures::two_arms();
        evil.outliers[0].culprit = Some(format!("\u{1b}[2Jevil{}", "x".repeat(300)));
        for sample in [
            evil,
            fixtures::two_arms(),
            fixtures::invalid(),
            fixtures::seven_arms(),
            fixtures::empty(),
            fixtures::one_arm(),
            fixtures::sweep(),
        ] {
            let text = plain(&sample);
            for line in text.lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn the_same_run_reads_the_same() {
        assert_eq!(plain(&fixtures::two_arms()), plain(&fixtures::two_arms()));
    }

    #[test]
    fn two_arms_show_difference_split_and_budget() {
        let text = plain(&fixtures::two_arms());
        for expected in [
            "VALID: all 4 checks passed.",
            "x25519mlkem768 \u{2212} x25519",
            "+0.104  [+0.098, +0.110]",
            "shown: slower by 98.00 \u{b5}s at least",
            "not shown: beyond 754.0 \u{b5}s is excluded; 533.0 \u{b5}s is detectable",
            "mean 4 %, p50 4 %",
            "without environment causes",
            "p50 +50.00 \u{b5}s: +0.051 [+0.049, +0.053]; 188 of 200 intervals over 5 blocks hold it",
            "server.run_queue",
            "retransmit.syn by drop: NETFILTER_DROP: 100 % of the excess",
            "lost 12 sched_switch",
            "no kfree_skb",
            "results/2026-01-01-x",
        ] {
            assert!(text.contains(expected), "{expected} missing in\n{text}");
        }
    }

    #[test]
    fn a_sweep_says_where_the_difference_drowns_and_what_is_not_to_be_quoted() {
        let text = plain(&fixtures::sweep());
        for expected in [
            "1MB, 300 requests/s",
            "not to be quoted: requests start up to 2.1 ms late (p99); 71 % of what made requests late is client.steal",
            "x25519mlkem768 adds to its baseline's median, without environment causes: 3B +",
            "1MB \u{2212}1 % (not shown)",
        ] {
            let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(flat.contains(expected), "{expected} missing in\n{text}");
        }
        let plan = text::plan(&fixtures::sweep().summary);
        assert!(plan.contains("more than 7 % of a busy CPU"), "{plan}");
        assert!(
            plan.contains("(2 of x25519, 1 of x25519mlkem768), 1 of more"),
            "{plan}"
        );
    }

    #[test]
    fn an_empty_run_is_no_table_of_zeros() {
        let text = plain(&fixtures::empty());
        assert!(text.contains("no request ended well"), "{text}");
        assert!(!text.contains("Difference"), "{text}");
    }

    #[test]
    fn one_arm_has_no_difference() {
        let text = plain(&fixtures::one_arm());
        assert!(!text.contains("Difference"), "{text}");
        assert!(text.contains("p99 per trial"), "{text}");
    }

    #[test]
    fn seven_arms_stay_in_the_plans_order() {
        let text = plain(&fixtures::seven_arms());
        let at = |name: &str| text.find(&format!("\n{name} ")).expect(name);
        assert!(at("x25519") < at("x25519mlkem768"));
        assert!(at("pq-offered-classical-chosen") < at("hello-retry"));
        assert!(at("mlkem768") < at("no-crypto"));
    }

    #[test]
    fn colour_adds_escapes_only() {
        let sample = fixtures::invalid();
        let coloured = render(&sample.summary, &sample.outliers, "results", true);
        assert!(coloured.starts_with("\u{1b}[1;97;41m INVALID"));
    }

    #[test]
    fn a_request_is_told_interval_by_interval() {
        let sample = fixtures::two_arms();
        let mut ledger = Ledger::default();
        ledger.charge(Line::Network, 20_000);
        ledger.charge(Line::Unexplained, 5_000);
        let stretches = [Stretch {
            label: "SYN out -> SYN in".to_owned(),
            start_ns: 40_000,
            end_ns: 65_000,
            ledger,
        }];
        let text = explain(&sample.outliers[1], Some(&sample.lanes[1]), &stretches, false);
        for expected in [
            "took 39.03 ms",
            "server.run_queue by <script>",
            "SYN out -> SYN in",
            "network 20.00 µs",
            "unexplained 5.000 µs",
            "ClientHello written",
        ] {
            assert!(text.contains(expected), "{expected} missing in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }
}
