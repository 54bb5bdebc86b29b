//! `cargo xtask fuzz`: builds the fuzz targets for coverage on the pinned stable toolchain, and runs them.
//!
//! No cargo-fuzz and no nightly: the coverage pass is a stable `-C` flag, only the sanitizers that cargo-fuzz adds are not, and
//! there is no unsafe code here for them to watch. The crate has cargo-fuzz's layout, so `cargo +nightly fuzz run <target>` in
//! `bench/` works too.

use std::{fs, path::Path, process::Command};

use anyhow::Context as _;

use crate::{cargo, output, root, run, setup};

/// A fuzz target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Target {
    /// A recording's bytes, as they are and behind right checksums
    Recording,
    /// A manifest's text, and a small trial analysed by it
    Manifest,
    /// A script of any records of one trial, analysed and explained
    Analysis,
}

impl Target {
    const ALL: [Self; 3] = [Self::Recording, Self::Manifest, Self::Analysis];

    /// The binary's name and its folder's.
    const fn name(self) -> &'static str {
        match self {
            Self::Recording => "recording",
            Self::Manifest => "manifest",
            Self::Analysis => "analysis",
        }
    }

    /// Longer inputs are seldom worth their time, bytes.
    const fn input_bytes_max(self) -> u32 {
        match self {
            Self::Recording => 32 * 1024,
            Self::Manifest => 8 * 1024,
            Self::Analysis => 2 * 1024,
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct FuzzOptions {
    /// How long each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Which one; all of them if not given
    target: Option<Target>,
}

/// What libFuzzer needs to see: edges, and the operands of comparisons. As cargo-fuzz sets them.
const COVERAGE: [&str; 7] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg",
    "fuzzing",
];

/// One input takes milliseconds and a few MB; these are for what is out of all proportion.
const INPUT_SECONDS_MAX: u32 = 10;
const MEMORY_MB_MAX: u32 = 1024;

/// Runs the targets one after another and stops at the first finding.
pub(crate) fn fuzz(options: &FuzzOptions) -> anyhow::Result<()> {
    setup::require_cpp_compiler()?;
    setup::setup()?;
    let host = host()?;
    let target_folder = root().join("target/fuzz");
    eprintln!("xtask: building the fuzz targets (the first time takes minutes)");
    let mut build = cargo();
    build.args([
        "build",
        "--quiet",
        "--package",
        "pqtail-fuzz",
        "--profile",
        "fuzz",
    ]);
    // With --target the flags are for the targets only: build scripts would not link with them.
    build
        .args(["--target", &host, "--target-dir"])
        .arg(&target_folder);
    build.env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\x1f"));
    run("build the fuzz targets", &mut build)?;

    let fuzz = root().join("bench/fuzz");
    let mut seeds = cargo();
    seeds.args([
        "run",
        "--quiet",
        "--package",
        "pqtail",
        "--example",
        "fuzz_seeds",
        "--",
    ]);
    run("write the seeds", seeds.arg(fuzz.join("corpus")))?;

    let one = options.target.map(|target| [target]);
    for &target in one.as_ref().map_or(&Target::ALL[..], |one| one) {
        let binary = target_folder.join(&host).join("fuzz").join(target.name());
        run_target(&fuzz, &binary, target, options.seconds)?;
    }
    Ok(())
}

fn run_target(fuzz: &Path, binary: &Path, target: Target, seconds: u32) -> anyhow::Result<()> {
    let name = target.name();
    let artifacts = fuzz.join("artifacts").join(name);
    fs::create_dir_all(&artifacts).with_context(|| format!("make {}", artifacts.display()))?;
    eprintln!("xtask: fuzzing '{name}' for {seconds} s");
    let mut command = Command::new(binary);
    command
        // New inputs go to the first folder; the others are only read.
        .arg(fuzz.join("corpus").join(name))
        .arg(fuzz.join("regressions").join(name))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={}", target.input_bytes_max()))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MB_MAX}"))
        .args(["-len_control=0", "-use_value_profile=1", "-print_final_stats=1"]);
    run(&format!("fuzz target '{name}'"), &mut command).with_context(|| {
        format!(
            "the input is in {}; `{} <input>` shows it again. Once it is mended, keep it in bench/fuzz/regressions/{name}",
            artifacts.display(),
            binary.display()
        )
    })
}

fn host() -> anyhow::Result<String> {
    let mut rustc = Command::new("rustc");
    let text = output("rustc -vV", rustc.arg("-vV").current_dir(root()))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned)
        .with_context(|| format!("rustc -vV names no host: {text}"))
}
