//! The findings of a preflight for a terminal.

use super::terminal::{ALARM, BOLD, DIM, GOOD, Page, RED};
use crate::collect::doctor::{Finding, Level};

/// All findings in the order they were made, and how many of each level. With `colour`, ANSI escapes mark what matters.
#[must_use]
pub fn render(findings: &[Finding], colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    page.styled(BOLD, &format!("{:<6}{:<24}{}", "", "rule", "found"));
    for finding in findings {
        let lead = format!("{:<6}{:<24}", finding.level.name(), finding.rule);
        let style = match finding.level {
            Level::Ok => GOOD,
            Level::Note => DIM,
            Level::Warn => RED,
            Level::Fail => ALARM,
        };
        page.wrapped_styled(style, finding.level.name().len(), &lead, &finding.found);
        if !finding.consequence.is_empty() {
            page.wrapped(&" ".repeat(lead.len()), &format!("→ {}", finding.consequence));
        }
        if !finding.remedy.is_empty() {
            page.wrapped(&" ".repeat(lead.len()), &format!("do: {}", finding.remedy));
        }
    }
    let of = |level: Level| findings.iter().filter(|each| each.level == level).count();
    page.line("");
    page.styled(
        BOLD,
        &format!(
            "{} fail, {} warn, {} note, {} ok",
            of(Level::Fail),
            of(Level::Warn),
            of(Level::Note),
            of(Level::Ok)
        ),
    );
    page.text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        let of = |level, rule: &str, found: &str| Finding {
            rule: rule.to_owned(),
            level,
            found: found.to_owned(),
            consequence: "it hurts".to_owned(),
            remedy: "mend it".to_owned(),
        };
        vec![
            of(Level::Warn, "clock.source", "hpet"),
            of(Level::Note, "neighbours", &"a name \u{1b}[2J ".repeat(40)),
        ]
    }

    #[test]
    fn every_finding_has_its_consequence_and_remedy_and_no_line_is_too_wide() {
        let text = render(&findings(), false);
        assert!(text.contains("warn  clock.source            hpet"), "{text}");
        assert!(
            text.contains("→ it hurts") && text.contains("do: mend it"),
            "{text}"
        );
        assert!(text.ends_with("0 fail, 1 warn, 1 note, 0 ok\n"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= super::super::terminal::WIDTH, "{line}");
            assert!(!line.chars().any(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn colour_marks_the_level_only_where_it_is_asked_for() {
        assert!(render(&findings(), true).contains("\u{1b}[31mwarn\u{1b}[0m"));
    }
}
