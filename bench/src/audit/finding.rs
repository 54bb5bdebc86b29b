//! One thing that the audit came to, with the figures that anyone can check.

use serde::{Deserialize, Serialize};

/// How sure the audit is that a published figure is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// The figures agree, as far as their rounding lets one see.
    Agrees,
    /// The published data do not hold what the check needs.
    Unchecked,
    /// Right, perhaps, but to be known when the figures are read.
    Note,
    /// It can be so, but needs an explanation that is not published.
    Doubtful,
    /// No data whatever, rounded in whatever way, can have all the published figures.
    Impossible,
}

impl Level {
    /// The words for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Unchecked => "cannot be checked",
            Self::Note => "note",
            Self::Doubtful => "doubtful",
            Self::Impossible => "impossible",
        }
    }
}

/// One check of one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Stable name of the check, such as `percentile`.
    pub check: String,
    /// How sure the audit is.
    pub level: Level,
    /// Whose figure it is: the arm, and the column of its table. Empty for a check between all arms.
    pub subject: String,
    /// The figure that was published.
    pub claimed: String,
    /// What the published data allow; may be empty where nothing bounds it.
    pub allowed: String,
    /// What follows.
    pub meaning: String,
    /// What to do about it; may be empty where the figures agree.
    pub remedy: String,
}

impl Finding {
    pub(super) fn new(level: Level, check: &str, subject: &str) -> Self {
        Self {
            check: check.to_owned(),
            level,
            subject: subject.to_owned(),
            claimed: String::new(),
            allowed: String::new(),
            meaning: String::new(),
            remedy: String::new(),
        }
    }

    pub(super) fn claimed(mut self, claimed: impl Into<String>) -> Self {
        self.claimed = claimed.into();
        self
    }

    pub(super) fn allowed(mut self, allowed: impl Into<String>) -> Self {
        self.allowed = allowed.into();
        self
    }

    pub(super) fn meaning(mut self, meaning: impl Into<String>) -> Self {
        self.meaning = meaning.into();
        self
    }

    pub(super) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}
