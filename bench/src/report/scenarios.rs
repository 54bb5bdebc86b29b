//! The list of scenarios, for a terminal.

use std::fmt::Write as _;

use crate::{
    plan::{condition::names, nothing_varied},
    scenario::Scenario,
};

/// Every scenario with what it is to answer and the conditions that it varies.
#[must_use]
pub fn render(scenarios: &[Scenario]) -> String {
    let mut text = String::new();
    for scenario in scenarios {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}\n    {}", scenario.name, scenario.about);
        if scenario.conditions != nothing_varied() {
            // Whatever rate a flag may set is the same for all.
            let names = names(&scenario.conditions, scenario.rate_hz.unwrap_or(1.0));
            let _ = writeln!(text, "    {} conditions: {}", names.len(), names.join(", "));
        }
    }
    text + "\nRun one with `run --scenario NAME`; a file of your own in the same form (TOML) with `run --scenario FILE.toml`.\n"
}
