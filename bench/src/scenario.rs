//! Scenarios: what a run varies, as plain data in TOML. Those in `bench/scenarios` are part of the program; a user's own is a file.
//!
//! ```toml
//! about = "What it is to answer"
//! # What the flags of `run` of these names set otherwise:
//! arms = ["x25519", "x25519mlkem768"]
//! rate = 100
//! trials = 5
//! duration = "10s"
//! warmup = "2s"
//! arrivals = "poisson"
//! timeout = "5s"
//! percentile = "p99.9"
//!
//! [sweep]            # every value with every other
//! response-bytes = [3, 10_000]
//! mss = [536, 1_460]
//!
//! [[condition]]      # and each of these, if there are any
//! certificate = "rsa-2048"
//! arms = ["x25519"]
//! ```
//!
//! The settings of `[sweep]` and `[[condition]]` have the names of [`Condition`]'s members, with hyphens.

use std::{fs, path::Path, str::FromStr, time::Duration};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use toml::Spanned;

use crate::plan::{
    Arm, Arrivals,
    condition::{CertificateKind, CipherSuite, Condition},
};

/// Name of the scenario that runs if none is named.
pub const DEFAULT: &str = "fresh-handshake";

/// Scenarios that are part of the program: name and text.
const OWN: [(&str, &str); 7] = [
    (DEFAULT, include_str!("../scenarios/fresh-handshake.toml")),
    ("payload-sweep", include_str!("../scenarios/payload-sweep.toml")),
    ("resumption-mix", include_str!("../scenarios/resumption-mix.toml")),
    (
        "concurrency-sweep",
        include_str!("../scenarios/concurrency-sweep.toml"),
    ),
    (CALIBRATION, include_str!("../scenarios/rate-sweep.toml")),
    ("arms", include_str!("../scenarios/arms.toml")),
    ("path", include_str!("../scenarios/path.toml")),
];

/// The scenario that looks for the highest rate.
pub const CALIBRATION: &str = "rate-sweep";

/// More conditions than this are a slip of the finger: each needs trials of its own.
const CONDITIONS_MAX: usize = 500;

/// What a scenario asks for; `None` leaves it to the flags and their defaults.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scenario {
    /// Part of the results folder's name.
    pub name: String,
    /// What it is to answer, in a sentence.
    pub about: String,
    /// Arms, the first being the baseline.
    pub arms: Option<Vec<Arm>>,
    /// Requests per second.
    pub rate_hz: Option<f64>,
    /// Trials of each arm under each condition.
    pub trials: Option<u32>,
    /// Measured part of a trial.
    pub duration: Option<Duration>,
    /// Part before it that is not counted.
    pub warmup: Option<Duration>,
    /// Spread of the intended starts.
    pub arrivals: Option<Arrivals>,
    /// A request that takes longer is a failure.
    pub timeout: Option<Duration>,
    /// The highest quantile that is to be quoted, 0 to 1.
    pub highest_quantile: Option<f64>,
    /// At least one.
    pub conditions: Vec<Condition>,
}

/// A scenario as its file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    about: String,
    arms: Option<Vec<Arm>>,
    rate: Option<Rate>,
    trials: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    duration: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    warmup: Option<Duration>,
    arrivals: Option<Arrivals>,
    #[serde(default, deserialize_with = "duration")]
    timeout: Option<Duration>,
    percentile: Option<Percentile>,
    sweep: Option<Spanned<Sweep>>,
    #[serde(default)]
    condition: Vec<Spanned<Setting>>,
}

/// Makes the table of a condition and the table of a sweep from one list, so that neither can lack what the other has.
macro_rules! settings {
    ($($name:ident: $kind:ty => |$condition:ident, $value:ident| $set:expr;)*) => {
        /// One condition: what it sets.
        #[derive(Default, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
        struct Setting {
            $($name: Option<$kind>,)*
        }

        /// Lists of values, each to be combined with each.
        #[derive(Default, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
        struct Sweep {
            $($name: Option<Vec<$kind>>,)*
        }

        impl Setting {
            fn apply(self, condition: &mut Condition) {
                $(if let Some(value) = self.$name {
                    let ($condition, $value) = (&mut *condition, value);
                    $set;
                })*
            }
        }

        impl Sweep {
            /// Every combination, those that are named last varying fastest.
            fn expand(self, mut conditions: Vec<Condition>) -> Vec<Condition> {
                $(if let Some(values) = self.$name {
                    conditions = conditions
                        .iter()
                        .flat_map(|before| {
                            values.iter().map(|value| {
                                let mut after = before.clone();
                                let ($condition, $value) = (&mut after, value.clone());
                                $set;
                                after
                            })
                        })
                        .collect();
                })*
                conditions
            }

            /// Name of a list without values.
            fn empty(&self) -> Option<&'static str> {
                $(if self.$name.as_ref().is_some_and(Vec::is_empty) {
                    return Some(stringify!($name));
                })*
                None
            }
        }
    };
}

settings! {
    arms: Vec<Arm> => |condition, arms| condition.arms = Some(arms);
    rate: Rate => |condition, rate| condition.rate_hz = Some(rate.0);
    response_bytes: u32 => |condition, bytes| condition.response_bytes = bytes;
    requests_per_connection: u32 => |condition, requests| condition.requests_per_connection = requests;
    resumed: f64 => |condition, share| condition.resumed = share;
    early_data: bool => |condition, early| condition.early_data = early;
    held_connections: u32 => |condition, held| condition.held_connections = held;
    held_rate: f64 => |condition, rate| condition.held_rate_hz = rate;
    cipher_suite: CipherSuite => |condition, suite| condition.cipher_suite = suite;
    certificate: CertificateKind => |condition, certificate| condition.certificate = certificate;
    mss: u16 => |condition, mss| condition.mss = Some(mss);
    loss: f64 => |condition, loss| condition.loss = loss;
}

/// Requests per second, above 0.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "f64")]
struct Rate(f64);

impl TryFrom<f64> for Rate {
    type Error = String;

    fn try_from(rate: f64) -> Result<Self, String> {
        if rate.is_finite() && rate > 0.0 {
            Ok(Self(rate))
        } else {
            Err(format!(
                "a rate of {rate}: it must be above 0 requests per second"
            ))
        }
    }
}

/// A quantile, written as `p99`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Percentile(pub f64);

impl FromStr for Percentile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text
            .strip_prefix('p')
            .and_then(|number| number.parse::<f64>().ok());
        match number {
            Some(number) if (50.0..100.0).contains(&number) => Ok(Self(number / 100.0)),
            _ => Err(format!(
                "'{text}' is no percentile from p50 to below p100, such as p99.9"
            )),
        }
    }
}

impl TryFrom<String> for Percentile {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text)
        .map(Some)
        .map_err(|error| D::Error::custom(format!("'{text}' is no duration such as \"10s\": {error}")))
}

impl Scenario {
    /// The one of this name, or the one in the file of this path, which ends in `.toml`.
    ///
    /// # Errors
    /// When there is none, or it is not understood: then with the line.
    pub fn find(name: &str) -> anyhow::Result<Self> {
        if let Some((name, text)) = OWN.iter().find(|(own, _)| *own == name) {
            return Self::parse(name, text);
        }
        let path = Path::new(name);
        let is_file = path.extension().is_some_and(|extension| extension == "toml");
        let Some(stem) = path.file_stem().filter(|_| is_file) else {
            let own: Vec<_> = OWN.iter().map(|(own, _)| *own).collect();
            bail!(
                "there is no scenario '{name}': take {}, or the path of a file of your own that ends in .toml",
                own.join(", ")
            );
        };
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "read {}: --scenario names a scenario or a file of one",
                path.display()
            )
        })?;
        let stem = stem.to_string_lossy();
        ensure!(
            stem.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)),
            "{}: the file's name becomes a folder's, so use letters, digits, - and _ only",
            path.display()
        );
        Self::parse(&stem, &text).with_context(|| format!("{} is no scenario", path.display()))
    }

    /// Every scenario that is part of the program.
    ///
    /// # Panics
    /// Never: the tests read every one.
    #[must_use]
    pub fn own() -> Vec<Self> {
        OWN.iter()
            .map(|(name, text)| Self::parse(name, text).expect("our own scenarios are valid"))
            .collect()
    }

    /// Reads a scenario's text.
    ///
    /// # Errors
    /// When it is not understood, or asks for what cannot be: with line and column.
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let file: File = toml::from_str(text)?;
        let arms = file.arms.clone().unwrap_or_else(default_arms);
        let mut conditions = vec![Condition::default()];
        if !file.condition.is_empty() {
            conditions.clear();
            for setting in file.condition {
                let place = setting.span().start;
                let mut condition = Condition::default();
                setting.into_inner().apply(&mut condition);
                condition
                    .validate(condition.arms.as_ref().unwrap_or(&arms))
                    .with_context(|| at(text, place))?;
                conditions.push(condition);
            }
        }
        if let Some(sweep) = file.sweep {
            let place = at(text, sweep.span().start);
            let sweep = sweep.into_inner();
            if let Some(empty) = sweep.empty() {
                bail!("{place}: {} has no values", empty.replace('_', "-"));
            }
            conditions = sweep.expand(conditions);
            ensure!(
                conditions.len() <= CONDITIONS_MAX,
                "{place}: {} conditions are more than the {CONDITIONS_MAX} that a run holds",
                conditions.len()
            );
            for condition in &conditions {
                condition
                    .validate(condition.arms.as_ref().unwrap_or(&arms))
                    .context(place.clone())?;
            }
        }
        for (position, condition) in conditions.iter().enumerate() {
            ensure!(
                !conditions[..position].contains(condition),
                "two conditions are the same ({}): leave one out",
                condition.words(condition.rate_hz.unwrap_or(0.0)).join(" ")
            );
        }
        Ok(Self {
            name: name.to_owned(),
            about: file.about,
            arms: file.arms,
            rate_hz: file.rate.map(|rate| rate.0),
            trials: file.trials,
            duration: file.duration,
            warmup: file.warmup,
            arrivals: file.arrivals,
            timeout: file.timeout,
            highest_quantile: file.percentile.map(|percentile| percentile.0),
            conditions,
        })
    }
}

/// Arms of a run that names none.
#[must_use]
pub fn default_arms() -> Vec<Arm> {
    vec![Arm::X25519, Arm::X25519mlkem768]
}

/// `line 3`, of a byte position.
fn at(text: &str, position: usize) -> String {
    format!(
        "line {}",
        text[..position.min(text.len())].matches('\n').count() + 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_of_ours_is_valid_and_says_what_it_is_for() {
        for scenario in Scenario::own() {
            assert!(scenario.about.len() > 20, "{scenario:?}");
            assert!(!scenario.conditions.is_empty());
        }
    }

    #[test]
    fn a_sweep_combines_every_value_with_every_other_and_with_every_condition() {
        let scenario = Scenario::parse(
            "test",
            "about = \"x\"\n[sweep]\nresponse-bytes = [3, 10]\nmss = [536, 1460]\n[[condition]]\nloss = 0.0\n[[condition]]\nloss = 0.1\n",
        )
        .unwrap();
        assert_eq!(scenario.conditions.len(), 8);
        let fast: Vec<_> = scenario
            .conditions
            .iter()
            .map(|condition| condition.mss)
            .collect();
        assert_eq!(&fast[..2], [Some(536), Some(1460)]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, line, word) in [
            ("about = \"x\"\nrat = 5\n", "line 2", "rat"),
            ("about = \"x\"\nrate = -5\n", "line 2", "above 0"),
            ("about = \"x\"\nduration = \"soon\"\n", "line 2", "soon"),
            ("about = \"x\"\narms = [\"kyber\"]\n", "line 2", "kyber"),
            (
                "about = \"x\"\n[sweep]\nresponse-bytes = [1, 5]\n",
                "line 2",
                "response-bytes",
            ),
            ("about = \"x\"\n[sweep]\nmss = []\n", "line 2", "mss"),
            (
                "about = \"x\"\n\n[[condition]]\nresumed = 2\n",
                "line 3",
                "resumed",
            ),
            (
                "about = \"x\"\n[[condition]]\ncertificate = \"dsa\"\n",
                "line 3",
                "dsa",
            ),
            ("rate = 5\n", "line 1", "about"),
        ] {
            let error = format!("{:#}", Scenario::parse("test", text).unwrap_err());
            assert!(error.contains(line) && error.contains(word), "{text}: {error}");
        }
        let twice = "about = \"x\"\n[[condition]]\nloss = 0.0\n[[condition]]\nloss = 0.0\n";
        assert!(Scenario::parse("test", twice).is_err());
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_that_there_are() {
        let error = Scenario::find("nothing").unwrap_err().to_string();
        assert!(
            error.contains("payload-sweep") && error.contains(".toml"),
            "{error}"
        );
    }
}
