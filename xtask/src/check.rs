//! `cargo xtask test`: what must hold before a change is worth reading.

use std::{env, process::Command, time::Instant};

use anyhow::Context as _;

use crate::{
    cargo,
    debian::{self, Needed},
    nginx, run, setup, vm,
};

/// The eBPF crate builds for its own target only; the build script of `pqtail` compiles it. The fuzz targets need C++.
const ORDINARY: [&str; 5] = [
    "--workspace",
    "--exclude",
    "pqtail-ebpf",
    "--exclude",
    "pqtail-fuzz",
];

/// Runs every step in turn and stops at the first that fails.
pub(crate) fn test() -> anyhow::Result<()> {
    step("setup", setup::setup)?;
    step("format", || {
        run("cargo fmt", cargo().args(["fmt", "--all", "--check"]))
    })?;
    step("lints", || run("cargo clippy", &mut clippy()))?;
    step("lints of the kernel side", || {
        run("cargo clippy", &mut clippy_ebpf())
    })?;
    step("documentation", || run("cargo doc", &mut documentation()))?;
    step("packages", || {
        debian::require(
            "the tests of two hosts",
            &[
                Needed {
                    program: "sshd",
                    package: "openssh-server",
                },
                Needed {
                    program: "ssh",
                    package: "openssh-client",
                },
                Needed {
                    program: "ip",
                    package: "iproute2",
                },
            ],
        )?;
        debian::require(
            "the tests of servers with OpenSSL",
            &[Needed {
                program: "openssl",
                package: "openssl",
            }],
        )?;
        // Installed on a machine that people use, it would set that up at its next boot; there the test says what it lacks.
        if env::var_os("CI").is_some() {
            debian::require(
                "the test of cloud-init's schema",
                &[Needed {
                    program: "cloud-init",
                    package: "cloud-init",
                }],
            )?;
            vm::require()?;
        }
        Ok(())
    })?;
    let mut tests = cargo();
    tests.arg("test").args(ORDINARY);
    // As root only: nobody else can make it, and the tests that need it need root themselves.
    if debian::is_root() {
        tests.env("PQTAIL_NGINX_ROOT", nginx::provide()?);
    }
    step("tests", || run("cargo test", &mut tests))
}

fn clippy() -> Command {
    let mut command = cargo();
    command.arg("clippy").args(ORDINARY);
    command.args(["--all-targets", "--", "--deny", "warnings"]);
    command
}

/// For the target and with the flags that `bench/build.rs` builds it with.
fn clippy_ebpf() -> Command {
    let mut command = cargo();
    command.args(["clippy", "--package", "pqtail-ebpf", "--release"]);
    command.args(["--target", "bpfel-unknown-none", "-Zbuild-std=core"]);
    command.args(["--", "--deny", "warnings"]);
    // -Z on the pinned stable toolchain.
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

fn documentation() -> Command {
    let mut command = cargo();
    command.args(["doc", "--no-deps"]).args(ORDINARY);
    command.env("RUSTDOCFLAGS", "-Dwarnings");
    command
}

fn step(name: &str, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    eprintln!("xtask: {name}");
    let begin = Instant::now();
    let outcome = work();
    let seconds = begin.elapsed().as_secs_f64();
    let word = if outcome.is_ok() { "passed" } else { "FAILED" };
    eprintln!("xtask: {name} {word} after {seconds:.1} s");
    outcome.with_context(|| format!("`cargo xtask test` stopped at the step '{name}'"))
}
