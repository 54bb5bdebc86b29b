//! The findings of an audit for a terminal.

use std::collections::BTreeMap;

use super::{
    terminal::{ALARM, BOLD, DIM, GOOD, Page, RED},
    text::count,
};
use crate::audit::{Finding, Level, Recomputed, Report};

/// With more that agrees, only numbers are told; the JSON form has each.
const LISTED: usize = 20;

/// What was recomputed, then the findings, the worst first; those that agree are named only. With `colour`, ANSI escapes mark what
/// matters.
#[must_use]
pub fn render(report: &Report, colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    let impossible = report.count(Level::Impossible);
    if impossible > 0 {
        let plural = if impossible == 1 {
            "contradiction"
        } else {
            "contradictions"
        };
        page.styled(
            ALARM,
            &format!(" {impossible} {plural}: no data can have these figures. "),
        );
    } else if report.count(Level::Doubtful) > 0 {
        page.styled(RED, "Nothing is impossible, but not all of it can be relied on.");
    } else {
        page.styled(
            GOOD,
            "Nothing is impossible or doubtful among what could be checked.",
        );
    }
    for population in &report.populations {
        recomputed(&mut page, population);
    }
    for level in [Level::Impossible, Level::Doubtful, Level::Note, Level::Unchecked] {
        let found: Vec<&Finding> = report
            .findings
            .iter()
            .filter(|each| each.level == level)
            .collect();
        if found.is_empty() {
            continue;
        }
        page.line("");
        let mut heading = level.name().to_owned();
        heading[..1].make_ascii_uppercase();
        page.styled(BOLD, &heading);
        for each in found {
            finding(&mut page, each);
        }
    }
    let agreeing: Vec<&Finding> = report
        .findings
        .iter()
        .filter(|each| each.level == Level::Agrees)
        .collect();
    if !agreeing.is_empty() {
        page.line("");
        page.styled(BOLD, "Agrees");
        page.wrapped("  ", &agreed(&agreeing));
    }
    page.line("");
    page.styled(
        BOLD,
        &format!(
            "{impossible} impossible, {} doubtful, {} note, {} cannot be checked, {} agree",
            report.count(Level::Doubtful),
            report.count(Level::Note),
            report.count(Level::Unchecked),
            report.count(Level::Agrees)
        ),
    );
    page.text
}

fn recomputed(page: &mut Page, population: &Recomputed) {
    page.line("");
    page.styled(
        BOLD,
        &format!("{}: {} requests", population.arm, count(population.requests)),
    );
    page.wrapped("  source      ", &population.source);
    if population.figures.is_empty() {
        page.wrapped(
            "  recomputed  ",
            "nothing: neither latencies nor a histogram can be read",
        );
        return;
    }
    let figures: Vec<String> = population
        .figures
        .iter()
        .map(|(name, range)| format!("{name} {range}"))
        .collect();
    page.wrapped(
        "  recomputed  ",
        &format!("from its {}: {}", population.from, figures.join(", ")),
    );
}

/// What agrees, by check: each figure, or how many there are.
fn agreed(agreeing: &[&Finding]) -> String {
    let mut checks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for each in agreeing {
        checks.entry(&each.check).or_default().push(&each.claimed);
    }
    let checks = checks.into_iter().map(|(check, figures)| {
        if agreeing.len() > LISTED {
            format!("{check} ({} times)", figures.len())
        } else {
            format!("{check} ({})", figures.join("; "))
        }
    });
    let checks: Vec<String> = checks.collect();
    checks.join(", ")
}

fn finding(page: &mut Page, finding: &Finding) {
    const INDENT: &str = "              ";
    let style = match finding.level {
        Level::Impossible => ALARM,
        Level::Doubtful => RED,
        _ => DIM,
    };
    let head = if finding.subject.is_empty() {
        finding.check.clone()
    } else {
        format!("{} ({})", finding.check, finding.subject)
    };
    page.styled(style, &format!("  {head}"));
    for (lead, text) in [
        ("claimed", &finding.claimed),
        ("allowed", &finding.allowed),
        ("→", &finding.meaning),
        ("do", &finding.remedy),
    ] {
        if !text.is_empty() {
            page.wrapped(&format!("    {lead:<w$}", w = INDENT.len() - 4), text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::terminal::WIDTH, *};
    use crate::audit::{AUDIT_SCHEMA, Range};

    fn report(level: Level) -> Report {
        Report {
            schema: AUDIT_SCHEMA,
            populations: vec![Recomputed {
                arm: "an arm \u{1b}[2J".to_owned(),
                source: "a/page.html".repeat(20),
                requests: 90_000,
                from: "histogram",
                figures: vec![("p99".to_owned(), Range::new(4.0, 4.0))],
            }],
            findings: vec![Finding {
                check: "percentile".to_owned(),
                level,
                subject: "an arm \u{1b}[2J".repeat(20),
                claimed: "p99 39 ms".to_owned(),
                allowed: "4 ms".to_owned(),
                meaning: "it cannot be ".repeat(40),
                remedy: "do not quote it".to_owned(),
            }],
        }
    }

    #[test]
    fn a_finding_has_its_figures_and_no_line_is_too_wide() {
        let text = render(&report(Level::Impossible), false);
        for expected in [
            " 1 contradiction: no data",
            "90,000 requests",
            "recomputed  from its histogram: p99 4 ms",
            "claimed   p99 39 ms",
            "allowed   4 ms",
            "do        do not quote it",
            "1 impossible, 0 doubtful, 0 note, 0 cannot be checked, 0 agree",
        ] {
            assert!(text.contains(expected), "{expected} missing in\n{text}");
        }
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(!line.chars().any(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn what_agrees_is_named_only() {
        let text = render(&report(Level::Agrees), false);
        assert!(text.starts_with("Nothing is impossible or doubtful"), "{text}");
        assert!(
            text.contains("percentile (p99 39 ms)") && !text.contains("do not quote"),
            "{text}"
        );
    }
}
