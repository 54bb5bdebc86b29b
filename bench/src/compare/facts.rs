//! What besides the measurement differs between runs, by their manifests.
//!
//! Facts are taken as the manifests hold them, so that one that a later version adds is compared without being named here. What is
//! named are the few that mean nothing between two runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::published::Run;
use crate::plan::Plan;

/// Facts of an end that say nothing of another run's end: names and numbers that a kernel or a run draws anew, tables that only serve
/// to read the recordings, and what a clock's daemon thought at the moment.
const MEANINGLESS: &[&str] = &[
    "address",
    "boot_id",
    "drop_reasons",
    "interrupts",
    "netns",
    "stamps",
    "syscalls",
    "threads",
    "timekeeping.error_us_estimated",
    "timekeeping.error_us_max",
    "timekeeping.frequency_ppm",
];

/// Facts that differ between any two runs, and should.
const EXPECTED: &[(Of, &str)] = &[(Of::Run, "begun"), (Of::Plan, "seed")];

/// What a fact is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Of {
    /// The run as a whole.
    Run,
    /// What was asked for.
    Plan,
    /// Client and server alike.
    BothEnds,
    /// The client or its host.
    Client,
    /// The server or its host.
    Server,
}

impl Of {
    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Plan => "plan",
            Self::BothEnds => "both ends",
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// A fact that is not the same in all runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Differing {
    /// What it is about.
    pub of: Of,
    /// Its name in the manifest, with its unit: `rate_hz`, `sysctls.net.core.somaxconn`.
    pub fact: String,
    /// Its value in each run; `None` where it is not told.
    pub values: Vec<Option<String>>,
    /// Whether it differs between any two runs: the date, the seed.
    pub expected: bool,
}

/// The facts that are not the same in all runs.
pub(super) fn differing(runs: &[Run]) -> Vec<Differing> {
    let of_runs: Vec<Facts> = runs.iter().map(|run| facts(&run.manifest)).collect();
    let names: BTreeSet<&(Of, String)> = of_runs.iter().flat_map(BTreeMap::keys).collect();
    let mut differing: Vec<Differing> = names
        .into_iter()
        .map(|name| Differing {
            of: name.0,
            fact: name.1.clone(),
            values: of_runs.iter().map(|facts| facts.get(name).cloned()).collect(),
            expected: EXPECTED.contains(&(name.0, &name.1)),
        })
        .filter(|each| each.values.iter().any(|value| *value != each.values[0]))
        .collect();
    // A run that was not to record has no probes, and no reason why each of them is missing.
    if differing
        .iter()
        .any(|each| each.of == Of::Plan && each.fact == "probes")
    {
        differing.retain(|each| !each.fact.starts_with(PROBE));
    }
    ends_together(differing)
}

type Facts = BTreeMap<(Of, String), String>;

const PROBE: &str = "probe ";

fn facts(manifest: &Value) -> Facts {
    let mut facts = Facts::new();
    for name in ["begun", "pqtail", "schema", "steal_share_max"] {
        flatten(name, &manifest[name], &mut |name, value| {
            facts.insert((Of::Run, name), value);
        });
    }
    if let Some(machines) = machines(manifest) {
        facts.insert((Of::Run, "machines".to_owned()), machines.to_owned());
    }
    let trials = manifest["trials"].as_array().map_or(0, Vec::len);
    facts.insert((Of::Run, "trials that ended".to_owned()), trials.to_string());
    let set_aside = manifest["set_aside"].as_array().map_or(0, Vec::len);
    facts.insert((Of::Run, "trials set aside".to_owned()), set_aside.to_string());
    flatten("", &with_defaults(&manifest["plan"]), &mut |name, value| {
        facts.insert((Of::Plan, name), value);
    });
    for (of, end) in [
        (Of::Client, &manifest["client"]),
        (Of::Server, &manifest["server"]),
    ] {
        for (name, value) in end.as_object().into_iter().flatten() {
            let mut insert = |name: String, value| {
                if !MEANINGLESS.iter().any(|each| is_within(&name, each)) {
                    facts.insert((of, name), value);
                }
            };
            match name.as_str() {
                "facts" => flatten("", value, &mut insert),
                "probes" => probes(value, &mut insert),
                // The folder of its recordings; facts have a kernel too.
                "kernel" => (),
                _ => flatten(name, value, &mut insert),
            }
        }
    }
    facts
}

/// A plan with what older versions did not write down because they knew nothing else; one of a later version as it is.
fn with_defaults(plan: &Value) -> Value {
    let mut plan = plan.clone();
    let read: Option<Plan> = serde_json::from_value(plan.clone()).ok();
    if let Some(Ok(whole)) = read.map(serde_json::to_value) {
        complete(&mut plan, whole);
    }
    plan
}

/// Adds what is only in the other value.
fn complete(value: &mut Value, other: Value) {
    match (value, other) {
        (Value::Object(fields), Value::Object(others)) => {
            for (name, other) in others {
                match fields.get_mut(&name) {
                    Some(field) => complete(field, other),
                    None => _ = fields.insert(name, other),
                }
            }
        }
        (Value::Array(items), Value::Array(others)) => {
            for (item, other) in items.iter_mut().zip(others) {
                complete(item, other);
            }
        }
        _ => (),
    }
}

/// Whether both ends ran on one machine, by the identity of its boot; `None` where one of them does not tell.
fn machines(manifest: &Value) -> Option<&'static str> {
    let boot = |end: &str| manifest[end]["facts"]["boot_id"].as_str();
    Some(if boot("client")? == boot("server")? {
        "one for both ends"
    } else {
        "one for each end"
    })
}

fn probes(probes: &Value, insert: &mut impl FnMut(String, String)) {
    for probe in probes.as_array().into_iter().flatten() {
        let Some(name) = probe["name"].as_str() else {
            continue;
        };
        let status = if probe["attached"] == true {
            "attached".to_owned()
        } else {
            format!("not attached: {}", probe["reason"].as_str().unwrap_or_default())
        };
        insert(format!("{PROBE}{name}"), status);
    }
}

fn is_within(name: &str, folder: &str) -> bool {
    name.strip_prefix(folder)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Every leaf of a value by its path. A list of plain values is one leaf, and what is null is not told.
fn flatten(path: &str, value: &Value, insert: &mut impl FnMut(String, String)) {
    let below = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        }
    };
    match value {
        Value::Null => (),
        Value::Object(fields) => {
            for (name, value) in fields {
                flatten(&below(name), value, insert);
            }
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            for (index, item) in items.iter().enumerate() {
                flatten(&below(&index.to_string()), item, insert);
            }
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(plain).collect();
            insert(path.to_owned(), items.join(", "));
        }
        other => insert(path.to_owned(), plain(other)),
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// What differs at both ends in the same way is one fact: hosts are often of a kind.
fn ends_together(differing: Vec<Differing>) -> Vec<Differing> {
    let (mut together, mut single): (Vec<Differing>, Vec<Differing>) = differing
        .into_iter()
        .partition(|each| !matches!(each.of, Of::Client | Of::Server));
    let is_alike = |a: &Differing, b: &Differing| a.of != b.of && a.fact == b.fact && a.values == b.values;
    let alike: Vec<Differing> = single
        .iter()
        .filter(|each| each.of == Of::Client && single.iter().any(|other| is_alike(each, other)))
        .cloned()
        .collect();
    single.retain(|each| {
        alike
            .iter()
            .all(|both| both.fact != each.fact || both.values != each.values)
    });
    together.extend(alike.into_iter().map(|each| Differing {
        of: Of::BothEnds,
        ..each
    }));
    together.extend(single);
    together
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{compare, fixtures::Folders};

    /// What is said to differ after a change of the second run's manifest.
    fn after(change: impl Fn(&mut Value)) -> Vec<Differing> {
        let mut folders = Folders::new();
        folders.add(|_, _| ());
        folders.add(|summary, manifest| {
            change(manifest);
            summary["begun"] = manifest["begun"].clone();
        });
        compare(&folders.paths).unwrap().differing
    }

    #[test]
    fn each_fact_that_differs_is_told_with_both_values() {
        let changes: [(&str, Value, Of, &str, [&str; 2]); 26] = [
            ("/pqtail", "9".into(), Of::Run, "pqtail", ["0.1.0", "9"]),
            ("/schema", 9.into(), Of::Run, "schema", ["1", "9"]),
            (
                "/plan/scenario",
                "fresh-handshake-nginx".into(),
                Of::Plan,
                "scenario",
                ["fresh-handshake", "fresh-handshake-nginx"],
            ),
            (
                "/plan/arms/1",
                "hello-retry".into(),
                Of::Plan,
                "arms",
                ["x25519, x25519mlkem768", "x25519, hello-retry"],
            ),
            (
                "/plan/trials_per_arm",
                6.into(),
                Of::Plan,
                "trials_per_arm",
                ["5", "6"],
            ),
            (
                "/plan/rate_hz",
                50.5.into(),
                Of::Plan,
                "rate_hz",
                ["300.0", "50.5"],
            ),
            (
                "/plan/duration_ns",
                7.into(),
                Of::Plan,
                "duration_ns",
                ["10000000000", "7"],
            ),
            (
                "/plan/warmup_ns",
                7.into(),
                Of::Plan,
                "warmup_ns",
                ["2000000000", "7"],
            ),
            (
                "/plan/timeout_ns",
                7.into(),
                Of::Plan,
                "timeout_ns",
                ["5000000000", "7"],
            ),
            (
                "/plan/arrivals",
                "constant".into(),
                Of::Plan,
                "arrivals",
                ["poisson", "constant"],
            ),
            (
                "/plan/probes",
                false.into(),
                Of::Plan,
                "probes",
                ["true", "false"],
            ),
            (
                "/client/facts/kernel",
                "6.18".into(),
                Of::Client,
                "kernel",
                ["6.12", "6.18"],
            ),
            (
                "/server/facts/machine",
                "aarch64".into(),
                Of::Server,
                "machine",
                ["x86_64", "aarch64"],
            ),
            (
                "/client/facts/cpu_model",
                "B".into(),
                Of::Client,
                "cpu_model",
                ["AMD EPYC", "B"],
            ),
            (
                "/client/facts/cpus_online",
                4.into(),
                Of::Client,
                "cpus_online",
                ["2", "4"],
            ),
            (
                "/client/facts/memory_bytes",
                2048.into(),
                Of::Client,
                "memory_bytes",
                ["1024", "2048"],
            ),
            (
                "/client/facts/clocksource",
                "hpet".into(),
                Of::Client,
                "clocksource",
                ["tsc", "hpet"],
            ),
            (
                "/client/facts/governor",
                "powersave".into(),
                Of::Client,
                "governor",
                ["performance", "powersave"],
            ),
            (
                "/client/facts/lockdown",
                "[integrity]".into(),
                Of::Client,
                "lockdown",
                ["[none]", "[integrity]"],
            ),
            (
                "/server/facts/command_line",
                "".into(),
                Of::Server,
                "command_line",
                ["mitigations=off", ""],
            ),
            (
                "/server/facts/sysctls/net.core.somaxconn",
                "1".into(),
                Of::Server,
                "sysctls.net.core.somaxconn",
                ["4096", "1"],
            ),
            (
                "/server/facts/cgroup_limits/cpu.max",
                "1 2".into(),
                Of::Server,
                "cgroup_limits.cpu.max",
                ["max", "1 2"],
            ),
            ("/client/cpus/0", 3.into(), Of::Client, "cpus", ["0", "3"]),
            (
                "/server/software",
                "nginx 1.29".into(),
                Of::Server,
                "software",
                ["pqtail 0.1.0 with rustls", "nginx 1.29"],
            ),
            (
                "/server/probes/0/attached",
                false.into(),
                Of::Server,
                "probe sched_switch",
                ["attached", "not attached: "],
            ),
            (
                "/server/facts/boot_id",
                "another".into(),
                Of::Run,
                "machines",
                ["one for both ends", "one for each end"],
            ),
        ];
        for (pointer, value, of, fact, values) in changes {
            let differing = after(|manifest| *manifest.pointer_mut(pointer).expect(pointer) = value.clone());
            let expected = Differing {
                of,
                fact: fact.to_owned(),
                values: values.map(|value| Some(value.to_owned())).to_vec(),
                expected: false,
            };
            assert_eq!(differing, [expected], "{pointer}");
        }
    }

    #[test]
    fn date_and_seed_are_expected_to_differ() {
        let differing = after(|manifest| {
            manifest["plan"]["seed"] = 2.into();
            manifest["begun"] = "2027-01-01T00:00:00Z".into();
        });
        let names: Vec<_> = differing
            .iter()
            .map(|each| (each.of, each.fact.as_str(), each.expected))
            .collect();
        assert_eq!(names, [(Of::Run, "begun", true), (Of::Plan, "seed", true)]);
    }

    #[test]
    fn what_is_drawn_anew_by_every_run_or_boot_is_no_difference() {
        let differing = after(|manifest| {
            for end in ["client", "server"] {
                let facts = &mut manifest[end]["facts"];
                facts["boot_id"] = "the same new one".into();
                facts["interrupts"]["9"] = "nvme".into();
                facts["timekeeping"]["frequency_ppm"] = 1.5.into();
                manifest[end]["threads"] = vec![7].into();
                manifest[end]["address"] = "192.0.2.1".into();
            }
        });
        assert_eq!(differing, []);
    }

    #[test]
    fn ends_that_differ_alike_are_told_once() {
        let differing = after(|manifest| {
            manifest["client"]["facts"]["kernel"] = "6.18".into();
            manifest["server"]["facts"]["kernel"] = "6.18".into();
            manifest["server"]["facts"]["governor"] = Value::Null;
        });
        assert_eq!(differing.len(), 2, "{differing:?}");
        assert_eq!(
            (differing[0].of, differing[0].fact.as_str()),
            (Of::BothEnds, "kernel")
        );
        assert_eq!(
            (differing[1].of, differing[1].fact.as_str()),
            (Of::Server, "governor")
        );
        assert_eq!(differing[1].values, [Some("performance".to_owned()), None]);
    }

    #[test]
    fn a_run_that_was_not_to_record_lacks_no_single_probe() {
        let differing = after(|manifest| {
            manifest["plan"]["probes"] = false.into();
            manifest["server"]["probes"] = Value::Array(Vec::new());
        });
        assert_eq!(differing.len(), 1, "{differing:?}");
    }

    #[test]
    fn a_fact_that_this_version_does_not_know_is_compared_too() {
        let differing = after(|manifest| manifest["plan"]["weather"] = serde_json::json!([{"wind_ns": 30}]));
        assert_eq!(differing[0].fact, "weather.0.wind_ns");
        assert_eq!(differing[0].values, [None, Some("30".to_owned())]);
    }

    #[test]
    fn a_plan_from_before_there_were_conditions_differs_only_from_one_that_sets_something() {
        let condition = |set: Value| {
            after(move |manifest| manifest["plan"]["conditions"] = serde_json::json!([set.clone()]))
        };
        assert_eq!(condition(serde_json::json!({})), []);
        let differing = condition(serde_json::json!({"response_bytes": 10_000}));
        assert_eq!(differing.len(), 1, "{differing:?}");
        assert_eq!(differing[0].fact, "conditions.0.response_bytes");
        assert_eq!(
            differing[0].values,
            ["3", "10000"].map(|value| Some(value.to_owned()))
        );
    }
}
