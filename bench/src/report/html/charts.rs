//! The page's charts: strings of SVG from a summary.

use std::{collections::BTreeMap, f64::consts::LOG10_2, fmt::Write as _};

use super::svg::{NsAxis, arm_colour, arm_legend, bar, escape, line_legend, ms, put};
use crate::{
    attribute::ledger::Line,
    report::{
        summary::{ArmSummary, Decomposition, Difference, Effect, Summary},
        text,
    },
};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;

/// Latency over percentile, all arms. The percentile axis counts nines: its unit is `-log10(1 - quantile)`.
pub(super) fn curves(out: &mut String, arms: &[(&str, &ArmSummary)]) {
    const HEIGHT: f64 = 380.0;
    const BOTTOM: f64 = 44.0;
    let points = || arms.iter().flat_map(|(_, arm)| &arm.curve);
    let (Some(low), Some(high)) = (
        points().map(|&(_, ns)| ns).min(),
        points().map(|&(_, ns)| ns).max(),
    ) else {
        return;
    };
    // The greatest of n samples stands for the quantile 1 - 1/n.
    let nines = |quantile: f64, requests: u64| {
        let most = (requests.max(10) as f64).log10();
        let rest = 1.0 - quantile;
        if rest <= 0.0 {
            most
        } else {
            (-rest.log10()).clamp(0.0, most)
        }
    };
    let last = arms
        .iter()
        .map(|(_, arm)| nines(1.0, arm.requests))
        .fold(1.0, f64::max);
    let x = |nines: f64| LEFT + nines / last * (WIDTH - LEFT - RIGHT);
    let y = NsAxis::new(low, high, HEIGHT - BOTTOM, 24.0);
    arm_legend(out, &arms.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    put!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Latency by percentile\">"
    );
    y_axis(out, y);
    for (percent, nines) in [
        ("0", 0.0),
        ("50", LOG10_2),
        ("90", 1.0),
        ("99", 2.0),
        ("99.9", 3.0),
        ("99.99", 4.0),
        ("99.999", 5.0),
        ("99.9999", 6.0),
    ] {
        if nines <= last {
            put!(
                out,
                "<line class=\"grid\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"24\" y2=\"{1}\"/>\
                 <text class=\"t\" x=\"{0:.1}\" y=\"{2}\" text-anchor=\"middle\">{percent}</text>",
                x(nines),
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 16.0
            );
        }
    }
    put!(
        out,
        "<text class=\"t\" x=\"{}\" y=\"{}\" text-anchor=\"end\">percentile, the last point is the maximum</text>",
        WIDTH - RIGHT,
        HEIGHT - 8.0
    );
    for (position, (name, arm)) in arms.iter().enumerate() {
        if arm.curve.is_empty() {
            continue;
        }
        let mut line = String::new();
        for &(quantile, ns) in &arm.curve {
            put!(
                line,
                "{:.1},{:.1} ",
                x(nines(quantile, arm.requests)),
                y.at(ns as f64)
            );
        }
        put!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" stroke-linejoin=\"round\"{}>\
             <title>{}</title></polyline>",
            line.trim_end(),
            arm_colour(position),
            if position > 2 {
                " stroke-dasharray=\"6 3\""
            } else {
                ""
            },
            escape(name)
        );
        let p = &arm.percentiles_ns;
        for (label, nines, ns) in [
            ("p50", LOG10_2, p.p50),
            ("p99", 2.0, p.p99),
            ("p99.9", 3.0, p.p999),
        ] {
            if nines <= last {
                put!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.2\" fill=\"{}\"><title>{} {label}: {}</title></circle>",
                    x(nines),
                    y.at(ns as f64),
                    arm_colour(position),
                    escape(name),
                    text::duration(ns)
                );
            }
        }
    }
    out.push_str("</svg></div>");
}

fn y_axis(out: &mut String, y: NsAxis) {
    for tick in y.ticks() {
        put!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>\
             <text class=\"t\" x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{4}</text>",
            WIDTH - RIGHT,
            y.at(tick),
            LEFT - 8.0,
            y.at(tick) + 4.0,
            ms(tick)
        );
    }
    put!(
        out,
        "<text class=\"t\" x=\"0\" y=\"11\">ms{}</text>",
        if y.is_log() { " (log)" } else { "" }
    );
}

/// The p99 of every trial in the order in which they ran.
pub(super) fn trials(out: &mut String, arms: &[(&str, &ArmSummary)]) {
    const HEIGHT: f64 = 240.0;
    const BOTTOM: f64 = 40.0;
    let all = || arms.iter().flat_map(|(_, arm)| &arm.trials);
    let p99s = || {
        all()
            .map(|trial| trial.percentiles_ns.p99)
            .chain(arms.iter().map(|(_, arm)| arm.percentiles_ns.p99))
    };
    let (Some(last), Some(low), Some(high)) =
        (all().map(|trial| trial.trial).max(), p99s().min(), p99s().max())
    else {
        return;
    };
    let x = |trial: u32| LEFT + (f64::from(trial) + 0.5) / (f64::from(last) + 1.0) * (WIDTH - LEFT - RIGHT);
    let y = NsAxis::new(low, high, HEIGHT - BOTTOM, 26.0);
    arm_legend(out, &arms.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    put!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"p99 by trial\">"
    );
    y_axis(out, y);
    let every = last / 24 + 1;
    for trial in (0..=last).step_by(every as usize) {
        put!(
            out,
            "<text class=\"t\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{trial}</text>",
            x(trial),
            HEIGHT - BOTTOM + 16.0
        );
    }
    put!(
        out,
        "<text class=\"t\" x=\"{}\" y=\"{}\" text-anchor=\"end\">trial, in the order of running; dashed: all trials of \
         the arm together</text>",
        WIDTH - RIGHT,
        HEIGHT - 6.0
    );
    for (position, (name, arm)) in arms.iter().enumerate() {
        let colour = arm_colour(position);
        if !arm.trials.is_empty() {
            put!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"{colour}\" stroke-opacity=\".6\" \
                 stroke-dasharray=\"3 4\"/>",
                WIDTH - RIGHT,
                y.at(arm.percentiles_ns.p99 as f64)
            );
        }
        for trial in &arm.trials {
            put!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{colour}\"><title>trial {}, {}: p99 {} of {} \
                 requests</title></circle>",
                x(trial.trial),
                y.at(trial.percentiles_ns.p99 as f64),
                trial.trial,
                escape(name),
                text::duration(trial.percentiles_ns.p99),
                text::count(trial.requests)
            );
        }
    }
    out.push_str("</svg></div>");
}

/// ns per request by line.
type MeanLedger = BTreeMap<&'static str, u64>;

type ChooseLedger = fn(&ArmSummary) -> &MeanLedger;

/// Mean ledgers of the middle requests and of the outliers; each group on its own scale.
pub(super) fn ledgers(out: &mut String, arms: &[(&str, &ArmSummary)]) {
    const NAME: f64 = 200.0;
    const TOTAL: f64 = 80.0;
    const ROW: f64 = 30.0;
    line_legend(out, |name| {
        arms.iter()
            .any(|(_, arm)| has(&arm.ledger_median, name) || has(&arm.ledger_tail, name))
    });
    let groups: [(&str, ChooseLedger); 2] = [
        ("Middle requests", |arm| &arm.ledger_median),
        ("Outliers", |arm| &arm.ledger_tail),
    ];
    for (heading, ledger) in groups {
        let total = |arm: &ArmSummary| ledger(arm).values().sum::<u64>();
        let most = arms.iter().map(|(_, arm)| total(arm)).max().unwrap_or(0);
        if most == 0 {
            continue;
        }
        let height = ROW * arms.len() as f64 + 4.0;
        put!(
            out,
            "<h3>{heading}</h3><div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
             aria-label=\"{heading}: where the time goes\">"
        );
        for (row, (name, arm)) in arms.iter().enumerate() {
            let y = ROW * row as f64 + 4.0;
            put!(out, "<text x=\"0\" y=\"{:.1}\">{}</text>", y + 15.0, escape(name));
            let scale = (WIDTH - NAME - TOTAL) / most as f64;
            let mut x = NAME;
            for line in Line::all() {
                let ns = ledger(arm).get(line.name()).copied().unwrap_or(0);
                if ns == 0 {
                    continue;
                }
                let width = ns as f64 * scale;
                let share = ns as f64 / total(arm) as f64;
                bar(
                    out,
                    line.name(),
                    [x, y, width, 22.0],
                    &format!(
                        "{}: {} ({})",
                        line.name(),
                        text::duration(ns),
                        text::percent(share)
                    ),
                );
                x += width;
            }
            put!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 8.0,
                y + 15.0,
                text::duration(total(arm))
            );
        }
        out.push_str("</svg></div>");
    }
}

fn has(ledger: &MeanLedger, name: &str) -> bool {
    ledger.get(name).is_some_and(|&ns| ns > 0)
}

/// One difference split by cause: bars left and right of zero.
pub(super) fn decomposition(out: &mut String, split: &Decomposition) {
    const NAME: f64 = 170.0;
    const VALUE: f64 = 90.0;
    const ROW: f64 = 24.0;
    let mut lines: Vec<_> = split
        .lines
        .iter()
        .map(|(&name, &ns)| (name, ns))
        .filter(|&(_, ns)| ns != 0)
        .collect();
    lines.sort_by_key(|&(name, ns)| (std::cmp::Reverse(ns), name));
    put!(
        out,
        "<h3>{} \u{2212} {} at {}: {}</h3>",
        escape(&split.arm),
        escape(&split.baseline),
        escape(split.statistic),
        text::difference(split.difference_ns)
    );
    if lines.is_empty() {
        return;
    }
    let most = lines.iter().map(|(_, ns)| ns.max(&0)).max().copied().unwrap_or(0) as f64;
    let least = lines.iter().map(|(_, ns)| ns.min(&0)).min().copied().unwrap_or(0) as f64;
    let scale = (WIDTH - NAME - 2.0 * VALUE) / (most - least);
    let zero = NAME + VALUE - least * scale;
    let height = ROW * lines.len() as f64 + 4.0;
    put!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Difference by cause\">\
         <line class=\"axis\" x1=\"{zero:.1}\" x2=\"{zero:.1}\" y1=\"0\" y2=\"{height}\"/>"
    );
    for (row, (name, ns)) in lines.into_iter().enumerate() {
        let y = ROW * row as f64 + 4.0;
        let width = ns.unsigned_abs() as f64 * scale;
        let x = if ns < 0 { zero - width } else { zero };
        let value = text::difference(ns);
        put!(out, "<text x=\"0\" y=\"{:.1}\">{name}</text>", y + 13.0);
        bar(out, name, [x, y, width, 17.0], &format!("{name}: {value}"));
        let (at, anchor) = if ns < 0 {
            (x - 6.0, "end")
        } else {
            (x + width + 6.0, "start")
        };
        put!(
            out,
            "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{value}</text>",
            y + 13.0
        );
    }
    out.push_str("</svg></div>");
}

/// What every arm adds to the median of its condition's baseline: a dot with its interval, a row each.
pub(super) fn effects(out: &mut String, summary: &Summary) {
    let rows: Vec<&Difference> = summary
        .differences
        .iter()
        .filter(|difference| difference.statistic == "p50")
        .collect();
    let ends = |effect: &Effect| {
        let ns = effect.difference_ns;
        let (low, high) = effect.interval_ns.unwrap_or((ns, ns));
        (low as f64, high as f64)
    };
    let all = || {
        let both = rows.iter();
        both.flat_map(|row| [Some(row.effect), row.without_environment])
            .flatten()
    };
    let least = all().map(|effect| ends(&effect).0).fold(0.0, f64::min);
    let most = all().map(|effect| ends(&effect).1).fold(0.0, f64::max);
    if most <= least {
        return;
    }
    const ROW: f64 = 28.0;
    // The longest name, and a difference in figures.
    let (left, right) = (330.0, 110.0);
    let scale = (WIDTH - left - right) / (most - least);
    let x = |ns: f64| left + (ns - least) * scale;
    let height = ROW * rows.len() as f64 + 4.0;
    put!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Difference at the median by \
         condition\"><line class=\"axis\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"0\" y2=\"{height}\"/>",
        x(0.0)
    );
    for (row, difference) in rows.into_iter().enumerate() {
        let y = ROW * row as f64 + 12.0;
        let right_end = [Some(difference.effect), difference.without_environment]
            .iter()
            .flatten()
            .map(|effect| ends(effect).1)
            .fold(f64::MIN, f64::max);
        let arm = summary.arms.get(&difference.arm);
        let position = summary
            .plan
            .arms
            .iter()
            .position(|each| arm.is_some_and(|arm| arm.arm == each.name()));
        let colour = arm_colour(position.unwrap_or(0));
        let value = text::difference(difference.effect.difference_ns);
        let mut interval = |effect: &Effect, y: f64, width: f64, radius: f64| {
            let (low, high) = ends(effect);
            put!(
                out,
                "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" \
                 stroke-width=\"{width}\"/><circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"/>",
                x(low),
                x(high),
                x(effect.difference_ns as f64)
            );
        };
        interval(&difference.effect, y, 3.0, 4.5);
        if let Some(effect) = &difference.without_environment {
            interval(effect, y + 8.0, 1.2, 2.5);
        }
        put!(
            out,
            "<text x=\"0\" y=\"{0:.1}\">{1}</text><text x=\"{2:.1}\" y=\"{0:.1}\">{value}</text>",
            y + 4.0,
            escape(&difference.arm),
            x(right_end) + 8.0
        );
    }
    out.push_str("</svg></div>");
}
