//! One thing that was found, and how much it matters.

use serde::{Deserialize, Serialize};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing when the figures are read, or unknown.
    Note,
    /// The figures will suffer.
    Warn,
    /// The run cannot do what it is for.
    Fail,
}

impl Level {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One thing that was found on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Stable name of what was examined, such as `clock.source`.
    pub rule: String,
    /// How much it matters.
    pub level: Level,
    /// What was found, with its figure.
    pub found: String,
    /// What it does to a run; may be empty where all is well.
    pub consequence: String,
    /// What to do about it; may be empty where all is well.
    pub remedy: String,
}

impl Finding {
    pub(super) fn ok(rule: &str, found: impl Into<String>) -> Self {
        Self::new(Level::Ok, rule, found.into(), "", "")
    }

    pub(super) fn note(rule: &str, found: impl Into<String>, consequence: &str, remedy: &str) -> Self {
        Self::new(Level::Note, rule, found.into(), consequence, remedy)
    }

    pub(super) fn warn(rule: &str, found: impl Into<String>, consequence: &str, remedy: &str) -> Self {
        Self::new(Level::Warn, rule, found.into(), consequence, remedy)
    }

    pub(super) fn fail(rule: &str, found: impl Into<String>, consequence: &str, remedy: &str) -> Self {
        Self::new(Level::Fail, rule, found.into(), consequence, remedy)
    }

    /// The host does not tell; `where_told` is where it was looked for.
    pub(super) fn unknown(rule: &str, where_told: &str) -> Self {
        let found = format!("unknown: {where_told} does not tell");
        Self::new(
            Level::Note,
            rule,
            found,
            "it cannot be judged here",
            "look at it by hand if the figures surprise",
        )
    }

    fn new(level: Level, rule: &str, found: String, consequence: &str, remedy: &str) -> Self {
        Self {
            rule: rule.to_owned(),
            level,
            found,
            consequence: consequence.to_owned(),
            remedy: remedy.to_owned(),
        }
    }
}
