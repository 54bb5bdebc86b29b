//! The `pqtail` command.

use std::{
    cmp::Reverse,
    io::{IsTerminal as _, Write as _},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::Context as _;
use clap::Parser as _;
use pqtail::{
    analyze::{Analysis, Story, analyze, explain, planned, slowest_trial},
    audit::{self, audit},
    cli::{
        AnalyzeArgs, AuditArgs, Cli, CompareArgs, DoctorArgs, ExplainArgs, RunArgs, ScenariosArgs, TruthArgs,
        Verb,
    },
    collect::{
        agent,
        doctor::{self, Level},
        ends,
        run::{self, RunOptions},
    },
    compare::compare,
    publish::publish,
    record::manifest::{Manifest, Status},
    report::{
        audit as audit_text, compare as compare_text, preflight, scenarios,
        summary::Outlier,
        terminal::{self, Stretch},
    },
    scenario::Scenario,
    truth::{self, away},
};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

/// What a shell reports for a command that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Run(args) => run_and_report(*args),
        Verb::Scenarios(args) => list_scenarios(&args),
        Verb::Analyze(args) => analyze_again(&args),
        Verb::Explain(args) => tell(&args),
        Verb::Truth(args) => try_truth(&args),
        Verb::Fetch(args) => fetch(&args),
        Verb::Doctor(args) => examine(&args),
        Verb::Audit(args) => audit_again(&args),
        Verb::Compare(args) => set_side_by_side(&args),
        Verb::Machines { hosts } => ends::machines(&hosts)
            .and_then(|machines| print(&format!("{}\n", machines.join("\n"))).map(|()| ExitCode::SUCCESS)),
        Verb::BuildThere { hosts, sources, home } => interruptible()
            .and_then(|interrupted| ends::build_there(&hosts, &sources, &home, &interrupted))
            .map(|()| ExitCode::SUCCESS),
        Verb::Stops(args) => tell_of_stops(&args),
        Verb::Agent => agent::run().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("pqtail: {error:#}");
        ExitCode::FAILURE
    })
}

fn run_and_report(args: RunArgs) -> anyhow::Result<ExitCode> {
    let interrupted = interruptible()?;
    let (json, quiet) = (args.json, args.quiet);
    let options = args.options()?;
    if !quiet {
        let plan = &options.plan;
        eprintln!(
            "pqtail: {}: {} trials, about {:.0} s{}, seed {}",
            plan.scenario,
            plan.trials().len(),
            plan.total_ns() as f64 / 1e9,
            if options.steal_share_max.is_some() {
                " and what is run again"
            } else {
                ""
            },
            plan.seed
        );
    }
    let ended = run_to_end(&options, json, &interrupted);
    if interrupted.load(Ordering::Relaxed) && !matches!(ended, Ok(Status::Complete)) {
        // Interrupted early enough, a run has nothing to report; the caller must still learn that it was interrupted.
        if let Err(error) = ended {
            eprintln!("pqtail: {error:#}");
        }
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(match ended? {
        Status::Complete => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Becomes true at the first Ctrl-C; a second ends the program at once, and the kernel takes the children along.
fn interruptible() -> anyhow::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("hear Ctrl-C")?;
    let heard = Arc::clone(&interrupted);
    thread::spawn(move || {
        for _ in signals.forever() {
            if heard.swap(true, Ordering::Relaxed) {
                eprintln!(
                    "pqtail: ended at once. If other hosts were in it, `cargo xtask fetch` with its results folder clears them."
                );
                std::process::exit(INTERRUPTED.into());
            }
            eprintln!(
                "\npqtail: interrupted: ending what is under way and cleaning up; once more ends it at once"
            );
        }
    });
    Ok(interrupted)
}

fn try_truth(args: &TruthArgs) -> anyhow::Result<ExitCode> {
    let interrupted = interruptible()?;
    let report = truth::run(&args.options(), &interrupted)?;
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        report.text()
    };
    print(&text)?;
    let short = args
        .demand
        .map(|least| report.short_of(least))
        .unwrap_or_default();
    for each in &short {
        eprintln!("pqtail: short of what is demanded: {each}");
    }
    Ok(if short.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn run_to_end(options: &RunOptions, json: bool, interrupted: &AtomicBool) -> anyhow::Result<Status> {
    let results = run::run(options, interrupted)?;
    if !options.quiet {
        eprintln!("pqtail: analysing {}", results.display());
    }
    report(&results, json)?;
    Ok(Manifest::read(&results)?.status)
}

fn analyze_again(args: &AnalyzeArgs) -> anyhow::Result<ExitCode> {
    report(&args.results, args.json)?;
    Ok(ExitCode::SUCCESS)
}

fn fetch(args: &AnalyzeArgs) -> anyhow::Result<ExitCode> {
    ends::fetch(&args.results)?;
    eprintln!("pqtail: all of the run is here, and the hosts are as they were found");
    // A run that ended before its first trial has nothing to report, and yet it was fetched.
    if let Err(error) = report(&args.results, args.json) {
        eprintln!("pqtail: {error:#}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Analyses the recorded files, publishes what they come to, and prints it.
fn report(results: &Path, json: bool) -> anyhow::Result<()> {
    let analysis: Analysis = analyze(results)?;
    // On a full disk, or in a folder of somebody else's, the result can still be read here.
    let published = publish(results, &analysis);
    let text = if json {
        serde_json::to_string_pretty(&analysis.summary)? + "\n"
    } else {
        let colour = std::io::stdout().is_terminal();
        terminal::render(
            &analysis.summary,
            &analysis.outliers,
            &results.display().to_string(),
            colour,
        )
    };
    print(&text)?;
    published
}

fn tell(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let wanted: Vec<(u32, u32)> = match (args.trial, args.request) {
        (Some(trial), Some(request)) => vec![(trial, request)],
        (None, Some(request)) => vec![(slowest_trial(&args.results, request)?, request)],
        (_, None) => {
            let analysis = analyze(&args.results)?;
            if let Some(trial) = args.trial {
                planned(&analysis.manifest, trial)?;
            }
            let of_trial = |outlier: &&Outlier| args.trial.is_none_or(|trial| trial == outlier.trial);
            let worst = analysis.outliers.iter().filter(of_trial).take(args.top);
            let worst: Vec<_> = worst.map(|outlier| (outlier.trial, outlier.request)).collect();
            if worst.is_empty() {
                slowest(&analysis, args)
            } else {
                worst
            }
        }
    };
    let stories = explain(&args.results, &wanted)?;
    let mut text = String::new();
    for story in &stories {
        text += &if args.json {
            json_line(&story.outlier)?
        } else {
            story_text(story)
        };
    }
    if stories.is_empty() {
        eprintln!("pqtail: nothing to explain: the run has no request with a ledger (see its verdicts)");
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Trials of fewer than a hundred requests have no outliers, but they have slowest requests.
fn slowest(analysis: &Analysis, args: &ExplainArgs) -> Vec<(u32, u32)> {
    let trials = analysis.trials.iter();
    let wanted = trials.filter(|trial| args.trial.is_none_or(|index| index == trial.trial.index));
    let mut rows: Vec<_> = wanted
        .flat_map(|trial| trial.rows.iter().map(|row| (trial.trial.index, row)))
        .filter(|(_, row)| row.ledger.is_some() && row.stamps.is_measured())
        .collect();
    rows.sort_by_key(|(trial, row)| (Reverse(row.stamps.latency_ns()), *trial, row.stamps.request));
    let rows = rows.into_iter().take(args.top);
    rows.map(|(trial, row)| (trial, row.stamps.request)).collect()
}

fn examine(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let findings = doctor::examine(&args.questions());
    let text = if args.json {
        serde_json::to_string_pretty(&findings)? + "\n"
    } else {
        preflight::render(&findings, std::io::stdout().is_terminal())
    };
    print(&text)?;
    Ok(if findings.iter().any(|each| each.level == Level::Fail) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn audit_again(args: &AuditArgs) -> anyhow::Result<ExitCode> {
    let report = audit(&args.paths, &args.options())?;
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        audit_text::render(&report, std::io::stdout().is_terminal())
    };
    print(&text)?;
    Ok(if report.count(audit::Level::Impossible) > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn list_scenarios(args: &ScenariosArgs) -> anyhow::Result<ExitCode> {
    let own = Scenario::own();
    print(&if args.json {
        serde_json::to_string_pretty(&own)? + "\n"
    } else {
        scenarios::render(&own)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn set_side_by_side(args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let comparison = compare(&args.results)?;
    let text = if args.json {
        serde_json::to_string_pretty(&comparison)? + "\n"
    } else {
        compare_text::render(&comparison, std::io::stdout().is_terminal())
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn tell_of_stops(args: &AnalyzeArgs) -> anyhow::Result<ExitCode> {
    let hits = away::hits(&args.results)?;
    let text = if args.json {
        hits.iter().map(json_line).collect::<anyhow::Result<String>>()?
    } else {
        away::text(&hits)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn json_line(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

fn story_text(story: &Story) -> String {
    let begin = story
        .intervals
        .first()
        .map(|(interval, _)| interval.start)
        .unwrap_or_default();
    let stretches: Vec<Stretch> = story
        .intervals
        .iter()
        .map(|(interval, ledger)| Stretch {
            label: interval.label.clone(),
            start_ns: interval.start - begin,
            end_ns: interval.end - begin,
            ledger: *ledger,
        })
        .collect();
    terminal::explain(
        &story.outlier,
        Some(&story.lanes),
        &stretches,
        std::io::stdout().is_terminal(),
    )
}

fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // A reader that has seen enough, such as `head`, is no failure.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("print the report"),
    }
}
