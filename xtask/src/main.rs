//! `cargo xtask`: set-up, run and test from a fresh clone, with cargo and a C compiler as the only needs.

mod check;
mod cross;
mod debian;
mod fuzz;
mod guest;
mod hosts;
mod infra;
mod nginx;
mod setup;
mod vm;

use std::{
    env,
    ffi::OsString,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, Subcommand};

/// Project tasks. Every one sets up what it needs first.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Installs the toolchain's components and the pinned bpf-linker, if missing
    Setup,
    /// Builds, then benchmarks: everything after `run` goes to `pqtail run` (needs root on the machines that it runs on). With
    /// --hosts it builds for these too
    #[command(disable_help_flag = true)]
    Run(PassedOn),
    /// Builds, then lists the scenarios that `run --scenario` knows
    #[command(disable_help_flag = true)]
    Scenarios(PassedOn),
    /// Builds, then analyses a recorded run: everything after `analyze` goes to `pqtail analyze`
    #[command(disable_help_flag = true)]
    Analyze(PassedOn),
    /// Builds, then explains one request: everything after `explain` goes to `pqtail explain`
    #[command(disable_help_flag = true)]
    Explain(PassedOn),
    /// Builds, then audits published results: everything after `audit` goes to `pqtail audit`
    #[command(disable_help_flag = true)]
    Audit(PassedOn),
    /// Builds, then sets runs side by side: everything after `compare` goes to `pqtail compare`
    #[command(disable_help_flag = true)]
    Compare(PassedOn),
    /// Builds, then injects known culprits: everything after `truth` goes to `pqtail truth` (needs root)
    #[command(disable_help_flag = true)]
    Truth(PassedOn),
    /// Builds, then brings home what a run left on its hosts: everything after `fetch` goes to `pqtail fetch`
    #[command(disable_help_flag = true)]
    Fetch(PassedOn),
    /// Builds, then examines this host: everything after `doctor` goes to `pqtail doctor` (root: it tries the probes)
    #[command(disable_help_flag = true)]
    Doctor(PassedOn),
    /// Formatting, lints, documentation and tests (the tests of probes and links need root)
    Test,
    /// Builds static binaries for the hosts of a run into target/deploy
    Deploy(DeployOptions),
    /// Boots two virtual machines with kernels of their own, and runs between them (needs root for packages only)
    Vm(vm::VmOptions),
    /// Feeds hostile input to what reads recordings, until something breaks or the time is up (needs a C++ compiler)
    Fuzz(fuzz::FuzzOptions),
    /// Makes two hosts at a cloud provider: shows what they cost and asks first (needs Terraform and an account)
    Up(infra::UpOptions),
    /// Waits until both hosts are set up, and pins their host keys
    WaitReady(infra::WaitReadyOptions),
    /// Destroys the two hosts and asks the provider whether anything is left
    Down(infra::DownOptions),
}

#[derive(clap::Args)]
struct PassedOn {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(clap::Args)]
struct DeployOptions {
    /// For which [default: all]
    #[arg(value_enum)]
    architectures: Vec<cross::Architecture>,
}

impl DeployOptions {
    fn build(&self) -> anyhow::Result<()> {
        let architectures = match self.architectures.as_slice() {
            [] => &cross::Architecture::ALL[..],
            named => named,
        };
        let folder = cross::binaries(architectures, cross::Profile::Release)?;
        eprintln!("xtask: the binaries are in {}", folder.display());
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    match Options::parse().task {
        Task::Setup => setup::setup(),
        Task::Run(passed_on) => hosts::run(passed_on),
        Task::Scenarios(passed_on) => pqtail("scenarios", &passed_on),
        Task::Analyze(passed_on) => pqtail("analyze", &passed_on),
        Task::Explain(passed_on) => pqtail("explain", &passed_on),
        Task::Audit(passed_on) => pqtail("audit", &passed_on),
        Task::Compare(passed_on) => pqtail("compare", &passed_on),
        Task::Truth(mut passed_on) => {
            nginx::provide_if_wanted(&mut passed_on.arguments)?;
            pqtail("truth", &passed_on)
        }
        Task::Fetch(passed_on) => pqtail("fetch", &passed_on),
        Task::Doctor(passed_on) => pqtail("doctor", &passed_on),
        Task::Test => check::test(),
        Task::Deploy(options) => options.build(),
        Task::Vm(options) => vm::vm(&options),
        Task::Fuzz(options) => fuzz::fuzz(&options),
        Task::Up(options) => infra::up(&options),
        Task::WaitReady(options) => infra::wait_ready(&options),
        Task::Down(options) => infra::down(&options),
    }
}

/// Builds `pqtail` and becomes it, so that Ctrl-C and the exit status are its own.
fn pqtail(subcommand: &str, passed_on: &PassedOn) -> anyhow::Result<()> {
    let binary = build()?;
    let mut command = Command::new(&binary);
    let failure = command.arg(subcommand).args(&passed_on.arguments).exec();
    Err(failure).with_context(|| format!("start {}", binary.display()))
}

/// Builds `pqtail` for this machine, and says where it is.
fn build() -> anyhow::Result<PathBuf> {
    setup::setup()?;
    // With its own target folder, whatever CARGO_TARGET_DIR says: the build script looks for the tools there too.
    let target = root().join("target");
    eprintln!("xtask: building pqtail (the first time takes minutes)");
    let mut build = cargo();
    build.args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "pqtail",
        "--target-dir",
    ]);
    run("build pqtail", build.arg(&target))?;
    Ok(target.join("release/pqtail"))
}

/// The workspace's root, whatever folder the task was called from.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// The cargo that runs this task, in the workspace's root. The toolchain in force travels in `RUSTUP_TOOLCHAIN`.
fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    if env::var_os("CI").is_some() {
        command.env("CARGO_TERM_COLOR", "never");
    }
    command
}

/// Runs a command to its end; any other end than success is an error that names what was attempted.
fn run(what: &str, command: &mut Command) -> anyhow::Result<()> {
    let program = PathBuf::from(command.get_program());
    let status = command
        .status()
        .with_context(|| format!("{what}: start {}", program.display()))?;
    ensure!(status.success(), "{what} failed ({status})");
    Ok(())
}

/// Runs a command for what it prints.
fn output(what: &str, command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| what.to_owned())?;
    if !output.status.success() {
        bail!(
            "{what} failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{what}: output"))
}
