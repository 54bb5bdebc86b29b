//! The report as one self-contained page: inline style, drawings made here, no script, nothing fetched.

mod charts;
mod lanes;
mod svg;

use std::{cmp::Reverse, fmt::Write as _};

use self::svg::{escape, put};
use super::{
    summary::{ArmSummary, Effect, Outlier, Summary, SwimLanes},
    text::{self, STATISTICS, Unit},
};

/// Rows of the outlier table; the rest are in `outliers.jsonl`.
const OUTLIERS: usize = 200;

/// Timelines that are unfolded when the page opens.
const OPEN_LANES: usize = 3;

const STYLE: &str = include_str!("html/style.css");

/// The whole page. Deterministic: the same values make the same bytes.
#[must_use]
pub fn render(summary: &Summary, outliers: &[Outlier], swim_lanes: &[SwimLanes]) -> String {
    let arms = text::arms(summary);
    let mut order: Vec<_> = outliers.iter().collect();
    order.sort_by_key(|outlier| (Reverse(outlier.latency_ns), outlier.trial, outlier.request));
    let mut page = String::new();
    let out = &mut page;
    let title = escape(&summary.plan.scenario);
    put!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>pqtail: {title}</title>\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <style>\n{STYLE}</style></head><body><main>"
    );
    out.push_str(svg::HATCH);
    put!(out, "<h1>{title}</h1>");
    put!(out, "<p class=\"dim\">{}</p>", escape(&text::plan(summary)));
    verdicts(out, summary);

    if summary.conditions.len() > 1 {
        section(
            out,
            "Conditions",
            if summary.differences.is_empty() {
                "Each condition by itself."
            } else if summary.plan.probes {
                "What each arm adds to the baseline, the first of its condition, at the median, with the 95 % interval over trials; \
                 thin: the same without environment causes."
            } else {
                "What each arm adds to the baseline, the first of its condition, at the median, with the 95 % interval over trials."
            },
        );
        charts::effects(out, summary);
        sweep(out, summary);
    }
    section(out, "Latency", "");
    comparison(out, summary, &arms);
    differences(out, summary);
    null(out, summary);
    known_shifts(out, summary);

    // More lines than there are colours tell nothing apart.
    let is_sweep = arms.len() > ARMS_MAX;
    if !is_sweep && arms.iter().any(|(_, arm)| !arm.curve.is_empty()) {
        section(
            out,
            "Latency by percentile",
            "From the intended start, all measured requests, exact.",
        );
        charts::curves(out, &arms);
    }
    if arms.iter().any(|(_, arm)| !arm.trials.is_empty()) {
        section(
            out,
            "p99 of every trial",
            "Trials are the independent unit: a difference smaller than their spread is not established.",
        );
        charts::trials(out, &arms);
    }
    if !is_sweep
        && arms
            .iter()
            .any(|(_, arm)| !arm.ledger_median.is_empty() || !arm.ledger_tail.is_empty())
    {
        section(
            out,
            "Where the time goes",
            "Mean ledger per request. Plain colours: client and wire; hatched: server. The two groups have different \
             scales.",
        );
        charts::ledgers(out, &arms);
    }
    if !summary.decomposition.is_empty() {
        section(
            out,
            "What makes the difference",
            "Mean ledgers of the requests around the percentile, subtracted. Right of the line: the arm takes longer.",
        );
        for split in &summary.decomposition {
            charts::decomposition(out, split);
        }
    }
    one_way(out, summary, &arms);
    tail_budget(out, summary, &arms);
    outlier_table(out, &order);
    timelines(out, &order, swim_lanes);
    facts(out, summary, &arms);
    out.push_str("</main></body></html>\n");
    page
}

fn section(out: &mut String, heading: &str, note: &str) {
    put!(out, "\n<h2>{heading}</h2>");
    if !note.is_empty() {
        put!(out, "<p class=\"note\">{note}</p>");
    }
}

fn verdicts(out: &mut String, summary: &Summary) {
    let failed: Vec<_> = summary.verdicts.iter().filter(|verdict| !verdict.ok).collect();
    let is_bad = !failed.is_empty() || !summary.valid;
    put!(out, "<div class=\"verdict{}\">", if is_bad { " bad" } else { "" });
    if is_bad {
        put!(
            out,
            "<strong>Invalid run: {} of {} checks failed. Do not quote the numbers below.</strong>",
            failed.len(),
            summary.verdicts.len()
        );
    } else if summary.verdicts.is_empty() {
        out.push_str("<strong>No checks were made of this run.</strong>");
    } else {
        put!(
            out,
            "<strong>Valid: all {} checks passed.</strong>",
            summary.verdicts.len()
        );
    }
    if let Some(status) = text::status(&summary.status) {
        put!(out, "<p>{}</p>", escape(&status));
    }
    if !failed.is_empty() {
        out.push_str("<dl>");
        for verdict in failed {
            put!(
                out,
                "<dt>{}: {}</dt><dd>{}</dd>",
                escape(verdict.rule),
                escape(&verdict.figure),
                escape(&verdict.text)
            );
        }
        out.push_str("</dl>");
    }
    if summary.verdicts.iter().any(|verdict| verdict.ok) {
        out.push_str("<details><summary>Checks that passed</summary><div class=\"scroll\"><table>");
        for verdict in summary.verdicts.iter().filter(|verdict| verdict.ok) {
            put!(
                out,
                "<tr><td class=\"name\">{}</td><td class=\"keep\">{}</td><td class=\"wide\">{}</td></tr>",
                escape(verdict.rule),
                escape(&verdict.figure),
                escape(&verdict.text)
            );
        }
        out.push_str("</table></div></details>");
    }
    out.push_str("</div>");
}

fn comparison(out: &mut String, summary: &Summary, arms: &[(&str, &ArmSummary)]) {
    let unit = Unit::of(summary);
    put!(
        out,
        "<div class=\"scroll\"><table><tr><th>{}, from the intended start</th><th class=\"n\">requests</th>",
        unit.name
    );
    for statistic in STATISTICS {
        put!(out, "<th class=\"n\">{statistic}</th>");
    }
    out.push_str("</tr>");
    for (name, arm) in arms {
        if arm.requests == 0 {
            put!(
                out,
                "<tr><td class=\"name\">{}</td><td class=\"n\">0</td><td colspan=\"7\">no request ended well</td></tr>",
                escape(name)
            );
        } else {
            let rows = [
                ("", *name, text::count(arm.requests), arm.percentiles_ns),
                (
                    " class=\"sub\"",
                    "\u{2003}without environment causes",
                    String::new(),
                    arm.counterfactual_ns,
                ),
                (
                    " class=\"sub\"",
                    "\u{2003}from the actual start",
                    String::new(),
                    arm.service_percentiles_ns,
                ),
            ];
            // Without records nothing is known about the environment: the row would only repeat the one above.
            let shown = |row: usize| row != 1 || summary.plan.probes;
            for (row, (class, name, requests, percentiles)) in rows.into_iter().enumerate() {
                if !shown(row) {
                    continue;
                }
                put!(
                    out,
                    "<tr{class}><td class=\"name\">{}</td><td class=\"n\">{requests}</td>",
                    escape(name)
                );
                for ns in text::row(&percentiles) {
                    put!(out, "<td class=\"n\">{}</td>", unit.plain(ns));
                }
                out.push_str("</tr>");
            }
        }
        if !arm.errors.is_empty() {
            put!(
                out,
                "<tr class=\"sub\"><td colspan=\"9\">\u{2003}failed, not in the figures: {}</td></tr>",
                escape(&text::errors(arm))
            );
        }
    }
    out.push_str("</table></div>");
}

/// Headings of the differences in the table of conditions.
const EFFECTS: [&str; 2] = [
    "<th class=\"n\">p50 \u{2212} baseline</th>",
    "<th class=\"n\">p99 \u{2212} baseline</th>",
];

/// Cells that one chart can show.
const ARMS_MAX: usize = 7;

fn sweep(out: &mut String, summary: &Summary) {
    let unit = Unit::of(summary);
    // With one arm under each condition nothing is compared.
    let (p50_and_p99, without) = match (summary.differences.is_empty(), summary.plan.probes) {
        (true, _) => (["", ""], ""),
        (false, true) => (EFFECTS, "<th class=\"n\">without environment causes</th>"),
        (false, false) => (EFFECTS, ""),
    };
    put!(
        out,
        "<div class=\"scroll\"><table><tr><th>condition</th><th>arm</th><th class=\"n\">requests</th><th class=\"n\">p50, {}</th>\
         <th class=\"n\">p99</th>{}{without}{}{without}<th class=\"n\">requests/s</th><th class=\"n\">client busy</th>\
         <th class=\"n\">server busy</th><th></th></tr>",
        unit.name,
        p50_and_p99[0],
        p50_and_p99[1]
    );
    let busy = |share: Option<f64>| share.map_or("\u{2013}".to_owned(), text::percent);
    for condition in &summary.conditions {
        for cell in &condition.cells {
            let Some(arm) = summary.arms.get(&cell.name) else {
                continue;
            };
            let effects = |statistic| {
                if summary.differences.is_empty() {
                    return String::new();
                }
                let difference = text::difference_of(summary, &cell.name, statistic);
                let effect = text::with_interval(difference.map(|each| each.effect), unit);
                let mut cells = format!("<td class=\"n\">{effect}</td>");
                if summary.plan.probes {
                    let without = difference.and_then(|each| each.without_environment);
                    let effect = text::with_interval(without, unit);
                    put!(cells, "<td class=\"n dim\">{effect}</td>");
                }
                cells
            };
            put!(
                out,
                "<tr><td class=\"name\">{}</td><td class=\"name\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td>{}{}<td class=\"n\">{:.0} of {}</td>\
                 <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"keep dim\">{}</td></tr>",
                escape(&condition.name),
                escape(&cell.arm),
                text::count(arm.requests),
                unit.plain(arm.percentiles_ns.p50),
                unit.plain(arm.percentiles_ns.p99),
                effects("p50"),
                effects("p99"),
                cell.achieved_hz,
                condition.rate_hz,
                busy(cell.client_busy),
                busy(cell.server_busy),
                escape(&text::not_to_be_quoted(cell).unwrap_or_default())
            );
        }
    }
    out.push_str("</table></div>");
    for (arm, shares) in text::shares(summary) {
        let what = text::shares_of(arm, summary);
        put!(out, "<p><b>{}</b>: {}</p>", escape(&what), escape(&shares));
    }
}

fn differences(out: &mut String, summary: &Summary) {
    if summary.differences.is_empty() {
        return;
    }
    let unit = Unit::of(summary);
    put!(
        out,
        "<h3>Difference, {}</h3><div class=\"scroll\"><table><tr><th>arms</th><th>statistic</th>\
         <th class=\"n\">difference</th><th class=\"n\">95 % interval over trials</th><th></th></tr>",
        unit.name
    );
    let mut row = |class: &str, what: &str, statistic: &str, effect: &Effect| {
        put!(
            out,
            "<tr{class}><td class=\"name\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"keep dim\">{}</td></tr>",
            escape(what),
            escape(statistic),
            unit.signed(effect.difference_ns),
            text::interval(effect, unit, "\u{2013}"),
            escape(&text::shown(effect))
        );
    };
    for difference in &summary.differences {
        let arms = format!("{} \u{2212} {}", difference.arm, difference.baseline);
        row("", &arms, difference.statistic, &difference.effect);
        if let Some(effect) = &difference.without_environment {
            row(" class=\"sub\"", "\u{2003}without environment causes", "", effect);
        }
    }
    out.push_str("</table></div>");
}

fn null(out: &mut String, summary: &Summary) {
    if summary.null.is_empty() {
        return;
    }
    out.push_str(
        "<h3>An arm against itself</h3><p class=\"note\">Comparisons of its own trials that show a difference, where there is none; \
         nominally 5 %.</p><div class=\"scroll\"><table><tr><th>arm</th><th>statistic</th><th class=\"n\">comparisons</th>\
         <th class=\"n\">false alarms</th></tr>",
    );
    for each in &summary.null {
        put!(
            out,
            "<tr><td class=\"name\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            escape(&each.arm),
            escape(each.statistic),
            each.comparisons,
            each.false_alarms
        );
    }
    out.push_str("</table></div>");
}

fn known_shifts(out: &mut String, summary: &Summary) {
    if summary.known_shifts.is_empty() {
        return;
    }
    let unit = Unit::of(summary);
    put!(
        out,
        "<h3>Known computing added to the server, found again</h3><p class=\"note\">At the median: intervals over a few of the blocks, \
         drawn again and again; nominally 95 % hold what was added.</p><div class=\"scroll\"><table><tr><th>arm</th>\
         <th class=\"n\">added, {0}</th><th class=\"n\">found</th><th class=\"n\">95 % interval over all blocks</th>\
         <th class=\"n\">comparisons</th><th class=\"n\">blocks each</th><th class=\"n\">hold it</th></tr>",
        unit.name
    );
    for each in &summary.known_shifts {
        put!(
            out,
            "<tr><td class=\"name\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            escape(&each.arm),
            unit.signed(each.shift_ns.cast_signed()),
            unit.signed(each.effect.difference_ns),
            text::interval(&each.effect, unit, "\u{2013}"),
            each.comparisons,
            each.blocks_each,
            each.covered
        );
    }
    out.push_str("</table></div>");
}

fn tail_budget(out: &mut String, summary: &Summary, arms: &[(&str, &ArmSummary)]) {
    let budgets: Vec<_> = arms
        .iter()
        .filter_map(|(name, _)| summary.tail_budget.get_key_value(*name))
        .filter(|(_, rows)| !rows.is_empty())
        .collect();
    if budgets.is_empty() {
        return;
    }
    section(
        out,
        "Tail budget",
        "Excess of all outliers over the middle requests of their arm and trial, by cause.",
    );
    for (name, rows) in budgets {
        put!(
            out,
            "<h3>{}</h3><div class=\"scroll\"><table><tr><th>cause</th><th class=\"n\">outliers</th>\
             <th class=\"n\">excess</th><th class=\"n\">share</th><th>culprits</th></tr>",
            escape(name)
        );
        for row in rows {
            let culprits: Vec<_> = row
                .culprits
                .iter()
                .map(|(culprit, ns)| format!("{}\u{a0}({})", escape(culprit), text::duration(*ns)))
                .collect();
            put!(
                out,
                "<tr><td class=\"name mono\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td><td class=\"wide\">{}</td></tr>",
                row.cause.name(),
                text::count(row.outliers),
                text::duration(row.excess_ns),
                text::percent(row.share),
                if culprits.is_empty() {
                    "<span class=\"dim\">none named</span>".to_owned()
                } else {
                    culprits.join(", ")
                }
            );
        }
        out.push_str("</table></div>");
    }
}

fn one_way(out: &mut String, summary: &Summary, arms: &[(&str, &ArmSummary)]) {
    if arms.iter().all(|(_, arm)| arm.one_way.is_empty()) {
        return;
    }
    section(out, "One way", &format!("{}.", escape(&text::one_way(summary))));
    out.push_str(
        "<div class=\"scroll\"><table><tr><th>arm</th><th>what</th><th class=\"n\">packets</th><th class=\"n\">p50</th>\
         <th class=\"n\">p99</th></tr>",
    );
    for (name, arm) in arms {
        for each in &arm.one_way {
            put!(
                out,
                "<tr><td class=\"name\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td></tr>",
                escape(name),
                escape(&each.what),
                text::count(each.count),
                text::one_way_time(each.p50_ns),
                text::one_way_time(each.p99_ns)
            );
        }
    }
    out.push_str("</table></div>");
}

fn outlier_table(out: &mut String, outliers: &[&Outlier]) {
    if outliers.is_empty() {
        return;
    }
    let shown = outliers.len().min(OUTLIERS);
    section(out, "Outliers", "");
    put!(
        out,
        "<p class=\"note\">The worst {shown} of {}; all are in <code>outliers.jsonl</code>.</p>\
         <div class=\"scroll\"><table><tr><th class=\"n\">latency</th><th>arm</th><th class=\"n\">trial</th>\
         <th class=\"n\">request</th><th>cause</th><th>culprit</th><th class=\"n\">excess</th><th class=\"n\">share</th>\
         <th>ledger and evidence</th></tr>",
        text::count(outliers.len() as u64)
    );
    for outlier in &outliers[..shown] {
        put!(
            out,
            "<tr><td class=\"n\">{}</td><td class=\"name\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"name mono\">{}</td><td class=\"wide\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"wide\"><details><summary>{} lines, {} observations{}</summary><table>",
            text::duration(outlier.latency_ns),
            escape(&outlier.arm),
            outlier.trial,
            outlier.request,
            outlier.cause.name(),
            outlier
                .culprit
                .as_deref()
                .map_or("<span class=\"dim\">none named</span>".to_owned(), escape),
            text::duration(outlier.excess_ns),
            text::percent(outlier.share),
            outlier.ledger.lines().count(),
            outlier.evidence.len(),
            if outlier.incomplete { ", records lost" } else { "" }
        );
        for (line, ns) in outlier.ledger.lines() {
            put!(
                out,
                "<tr><td class=\"mono\">{}</td><td class=\"n\">{}</td></tr>",
                line.name(),
                text::duration(ns)
            );
        }
        out.push_str("</table>");
        for seen in &outlier.evidence {
            put!(
                out,
                "<div>{} for {}, <span class=\"mono\">{}</span>: {}</div>",
                text::difference(seen.at_ns),
                text::duration(seen.duration_ns),
                seen.line.name(),
                escape(&seen.what)
            );
        }
        out.push_str("</details></td></tr>");
    }
    out.push_str("</table></div>");
}

fn timelines(out: &mut String, outliers: &[&Outlier], swim_lanes: &[SwimLanes]) {
    if swim_lanes.is_empty() {
        return;
    }
    section(
        out,
        "Timelines",
        "From the intended start to the end of the response. Point at a span or tick for its name and times.",
    );
    lanes::legend(out);
    let mut order: Vec<_> = swim_lanes.iter().collect();
    order.sort_by_key(|lanes| (Reverse(lanes.latency_ns), lanes.trial, lanes.request));
    for (position, lanes) in order.into_iter().enumerate() {
        let story = outliers
            .iter()
            .find(|outlier| {
                (outlier.request, outlier.trial, &outlier.arm) == (lanes.request, lanes.trial, &lanes.arm)
            })
            .map_or(String::new(), |outlier| {
                let culprit = outlier
                    .culprit
                    .as_deref()
                    .map_or(String::new(), |culprit| format!(" by {}", escape(culprit)));
                format!(
                    ": <span class=\"mono\">{}</span>{culprit}, {} of the excess",
                    outlier.cause.name(),
                    text::percent(outlier.share)
                )
            });
        put!(
            out,
            "<details class=\"lane\"{}><summary><b>{}</b>, {}, trial {}, request {}{story}</summary>",
            if position < OPEN_LANES { " open" } else { "" },
            text::duration(lanes.latency_ns),
            escape(&lanes.arm),
            lanes.trial,
            lanes.request
        );
        lanes::draw(out, lanes);
        out.push_str("</details>");
    }
}

fn facts(out: &mut String, summary: &Summary, arms: &[(&str, &ArmSummary)]) {
    section(out, "Facts of the run", "");
    out.push_str("<dl class=\"facts\">");
    let mut fact = |name: &str, value: &str| {
        put!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    };
    fact("begun", &summary.begun);
    fact("plan", &text::plan(summary));
    fact(
        "time-out",
        &format!("{} per request", text::duration(summary.plan.timeout_ns)),
    );
    fact("clock", &text::clock(summary));
    fact(
        "program",
        &format!("pqtail {}, summary schema {}", summary.pqtail, summary.schema),
    );
    for (end, host) in &summary.hosts {
        fact(end, &text::host(host));
    }
    for (name, arm) in arms {
        let cpu = |ns: Option<u64>| ns.map_or("unknown".to_owned(), text::duration);
        fact(
            name,
            &format!(
                "CPU per request: client {}, server {}; mean bytes: {} out, {} in",
                cpu(arm.client_cpu_ns_per_request),
                cpu(arm.server_cpu_ns_per_request),
                text::count(arm.bytes_out),
                text::count(arm.bytes_in)
            ),
        );
    }
    for (folder, steal) in &summary.steal {
        put!(
            out,
            "<dt>Steal, {}</dt><dd>{} by the hypervisor's counter, {} by /proc/stat: {}</dd>",
            escape(folder),
            text::duration(steal.counter_ns),
            text::duration(steal.stat_ns),
            if steal.agree {
                "they agree"
            } else {
                "they disagree by more than ticks can"
            }
        );
    }
    out.push_str("</dl>");
    if !summary.losses.is_empty() {
        out.push_str(
            "<h3>Kernel records</h3><div class=\"scroll\"><table><tr><th>recording</th><th class=\"n\">records</th>\
             <th class=\"n\">bytes</th><th class=\"n\">drain CPU</th><th class=\"n\">ring used, most</th>\
             <th class=\"n\">damaged</th><th>lost</th></tr>",
        );
        for (folder, loss) in &summary.losses {
            let lost: Vec<_> = loss
                .lost
                .iter()
                .filter(|(_, number)| **number > 0)
                .map(|(kind, number)| format!("{} {kind}", text::count(*number)))
                .collect();
            put!(
                out,
                "<tr><td class=\"name\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"wide\">{}</td></tr>",
                escape(folder),
                text::count(loss.records),
                text::count(loss.bytes),
                text::duration(loss.drain_cpu_ns),
                text::percent(loss.ring_used_max),
                text::count(loss.damaged),
                if lost.is_empty() {
                    "none".to_owned()
                } else {
                    escape(&lost.join(", "))
                }
            );
        }
        out.push_str("</table></div>");
    }
    for (host, probes) in &summary.probes {
        let missing = probes.iter().filter(|probe| !probe.attached).count();
        put!(
            out,
            "<details{}><summary>Probes of {}: {} attached, {missing} missing</summary>\
             <div class=\"scroll\"><table><tr><th>probe</th><th>state</th><th>what it shows, or hides by its absence</th></tr>",
            if missing > 0 { " open" } else { "" },
            escape(host),
            probes.len() - missing
        );
        let mut order: Vec<_> = probes.iter().collect();
        order.sort_by_key(|probe| probe.attached);
        for probe in order {
            put!(
                out,
                "<tr><td class=\"name mono\">{}</td><td class=\"wide\">{}</td><td class=\"wide\">{}</td></tr>",
                escape(&probe.name),
                if probe.attached {
                    "attached".to_owned()
                } else {
                    format!("missing: {}", escape(&probe.reason))
                },
                escape(&probe.consequence)
            );
        }
        out.push_str("</table></div></details>");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures::{self, Sample};

    fn page(sample: &Sample) -> String {
        render(&sample.summary, &sample.outliers, &sample.lanes)
    }

    fn samples() -> [Sample; 6] {
        [
            fixtures::two_arms(),
            fixtures::invalid(),
            fixtures::empty(),
            fixtures::one_arm(),
            fixtures::seven_arms(),
            fixtures::sweep(),
        ]
    }

    #[test]
    fn the_same_run_makes_the_same_bytes() {
        for (one, two) in samples().iter().zip(&samples()) {
            assert_eq!(page(one), page(two));
        }
    }

    #[test]
    fn names_cannot_become_markup_and_nothing_is_fetched() {
        for sample in samples() {
            let page = page(&sample);
            assert!(!page.contains("<script"), "a name became a script");
            for fetched in ["http:", "https:", "src=", "href=", "@import"] {
                assert!(!page.contains(fetched), "{fetched}");
            }
        }
        assert!(page(&fixtures::two_arms()).contains("&lt;script&gt;"));
    }

    #[test]
    fn drawings_hold_numbers_only_and_tags_balance() {
        for sample in samples() {
            let page = page(&sample);
            assert!(
                !page.contains("NaN") && !page.contains("=\"inf"),
                "a figure is not a number"
            );
            for tag in [
                "svg", "g", "table", "tr", "td", "details", "div", "ul", "li", "text", "title",
            ] {
                let opened =
                    page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
                assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
            }
        }
    }

    #[test]
    fn an_invalid_run_shows_its_verdict_before_any_number() {
        let page = page(&fixtures::invalid());
        let verdict = page.find("Invalid run: 1 of 4").expect("verdict");
        assert!(page.find("dedicated cores").expect("remedy") < page.find("<table").expect("numbers"));
        assert!(verdict < page.find("requests</th>").expect("numbers"));
    }

    #[test]
    fn an_empty_run_has_no_charts() {
        let page = page(&fixtures::empty());
        assert!(page.contains("no request ended well"));
        assert!(!page.contains("Latency by percentile") && !page.contains("Tail budget"));
    }

    #[test]
    fn without_probes_nothing_is_said_about_the_environment() {
        let mut sample = fixtures::two_arms();
        assert!(page(&sample).contains("without environment causes"));
        sample.summary.plan.probes = false;
        for difference in &mut sample.summary.differences {
            difference.without_environment = None;
        }
        assert!(!page(&sample).contains("without environment causes"));
    }

    #[test]
    fn one_arm_has_no_difference() {
        assert!(!page(&fixtures::one_arm()).contains("What makes the difference"));
    }

    /// For a look by eye: `cargo test sample_pages -- --ignored` names the folder.
    #[test]
    #[ignore = "writes pages to look at"]
    fn sample_pages() {
        let folder = std::env::temp_dir().join("pqtail-sample-pages");
        std::fs::create_dir_all(&folder).expect("a folder");
        for (name, sample) in ["two-arms", "invalid", "empty", "one-arm", "seven-arms"]
            .into_iter()
            .zip(samples())
        {
            std::fs::write(folder.join(format!("{name}.html")), page(&sample)).expect("written");
            let text =
                crate::report::terminal::render(&sample.summary, &sample.outliers, "results/sample", false);
            std::fs::write(folder.join(format!("{name}.txt")), text).expect("written");
        }
        println!("{}", folder.display());
    }
}
