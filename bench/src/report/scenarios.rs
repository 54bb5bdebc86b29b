//! The list of scenarios, for a terminal.

use std::fmt::Write as _;

use crate::{
    plan::{Arrivals, Plan, nothing_varied},
    scenario::{Scenario, default_arms},
};

/// Every scenario with what it is to answer and the conditions that it varies.
#[must_use]
pub fn render(scenarios: &[Scenario]) -> String {
    let mut text = String::new();
    for scenario in scenarios {
        let plan = Plan {
            scenario: scenario.name.clone(),
            arms: scenario.arms.clone().unwrap_or_else(default_arms),
            trials_per_arm: 1,
            rate_hz: scenario.rate_hz.unwrap_or(1.0),
            duration_ns: 0,
            warmup_ns: 0,
            arrivals: Arrivals::Poisson,
            seed: 0,
            timeout_ns: 0,
            probes: false,
            conditions: scenario.conditions.clone(),
            highest_quantile: 0.5,
            first_stage: None,
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}\n    {}", scenario.name, scenario.about);
        if scenario.conditions != nothing_varied() {
            let names = (0..plan.conditions.len() as u32).map(|condition| plan.condition_name(condition));
            let names: Vec<_> = names.collect();
            let _ = writeln!(text, "    {} conditions: {}", names.len(), names.join(", "));
        }
    }
    text + "\nRun one with `run --scenario NAME`; a file of your own in the same form (TOML) with `run --scenario FILE.toml`.\n"
}
