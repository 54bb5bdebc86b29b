//! `pqtail` for other machines: one static binary an architecture, built here.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::{
    cargo,
    debian::{self, Needed},
    output, root, run, setup,
};

/// An architecture that `pqtail` is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Architecture {
    /// Debian's amd64.
    #[value(name = "x86_64")]
    X86_64,
    /// Debian's arm64.
    #[value(name = "aarch64")]
    Aarch64,
}

impl Architecture {
    /// Every one.
    pub(crate) const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// The one that `uname -m` means.
    pub(crate) fn of(machine: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|each| each.name() == machine)
    }

    /// As Rust and `uname -m` call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Begin of the names of its binary tools on this machine.
    fn tools(self) -> String {
        if self.name() == env::consts::ARCH {
            String::new()
        } else {
            format!("{}-linux-gnu-", self.name())
        }
    }

    fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// C compiler and C library for the architecture, where this machine is another one; aws-lc is C, and links both.
    pub(crate) const fn cross_tools(self) -> [Needed; 2] {
        match self {
            Self::X86_64 => [
                Needed {
                    program: "x86_64-linux-gnu-gcc",
                    package: "gcc-x86-64-linux-gnu",
                },
                Needed {
                    program: "/usr/x86_64-linux-gnu/lib/libc.a",
                    package: "libc6-dev-amd64-cross",
                },
            ],
            Self::Aarch64 => [
                Needed {
                    program: "aarch64-linux-gnu-gcc",
                    package: "gcc-aarch64-linux-gnu",
                },
                Needed {
                    program: "/usr/aarch64-linux-gnu/lib/libc.a",
                    package: "libc6-dev-arm64-cross",
                },
            ],
        }
    }
}

/// How much a build is worth.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Profile {
    /// For hosts that are measured.
    Release,
    /// For guests of a test, which wait for the build more than for what it builds.
    #[cfg(test)]
    Guest,
}

impl Profile {
    /// As Cargo.toml and cargo's target folder call it.
    const fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            #[cfg(test)]
            Self::Guest => "guest",
        }
    }

    /// Where its binaries go.
    fn folder(self) -> PathBuf {
        root().join(match self {
            Self::Release => "target/deploy",
            #[cfg(test)]
            Self::Guest => "target/vm/deploy",
        })
    }
}

/// Builds `pqtail-ARCHITECTURE` and its `.sha256` for each, and returns their folder.
///
/// The binaries link glibc statically, so that they start on any distribution of their architecture.
///
/// # Errors
/// When a tool is missing and cannot be installed, or a build fails.
pub(crate) fn binaries(architectures: &[Architecture], profile: Profile) -> anyhow::Result<PathBuf> {
    setup::setup()?;
    let folder = profile.folder();
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    for &architecture in architectures {
        let built = build(architecture, profile)?;
        let name = format!("pqtail-{}", architecture.name());
        // Renamed into place: whoever copies it meanwhile gets the old one or the new one whole.
        let (fresh, kept) = (folder.join(format!("{name}.new")), folder.join(&name));
        fs::copy(&built, &fresh).with_context(|| format!("copy {}", built.display()))?;
        // What debuggers want is most of it, and it travels to every host.
        let mut strip = Command::new(format!("{}strip", architecture.tools()));
        run("strip", strip.arg("--strip-debug").arg(&fresh))?;
        fs::rename(&fresh, &kept).with_context(|| format!("rename to {}", kept.display()))?;
        let sum = output(
            "sha256sum",
            Command::new("sha256sum").arg(&name).current_dir(&folder),
        )?;
        let file = folder.join(format!("{name}.sha256"));
        fs::write(&file, sum).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(folder)
}

fn build(architecture: Architecture, profile: Profile) -> anyhow::Result<PathBuf> {
    let target = architecture.target();
    // A folder of its own: other RUSTFLAGS would make cargo build the native one again each time.
    let folder = root().join("target/cross");
    eprintln!(
        "xtask: building pqtail for {} (the first time takes minutes)",
        architecture.name()
    );
    add_target(&target)?;
    let mut build = cargo();
    build
        .args(["build", "--quiet", "--package", "pqtail", "--profile"])
        .arg(profile.name())
        .arg("--target")
        .arg(&target)
        .arg("--target-dir")
        .arg(&folder)
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    if architecture.name() != env::consts::ARCH {
        debian::require(
            &format!("building for {}", architecture.name()),
            &architecture.cross_tools(),
        )?;
        let gcc = format!("{}-linux-gnu-gcc", architecture.name());
        let name = target.replace('-', "_");
        build.env(format!("CARGO_TARGET_{}_LINKER", name.to_uppercase()), &gcc);
        build.env(format!("CC_{name}"), &gcc);
    }
    run(&format!("build pqtail for {target}"), &mut build)?;
    Ok(folder.join(target).join(profile.name()).join("pqtail"))
}

/// The standard library of the target, if the toolchain has none.
fn add_target(target: &str) -> anyhow::Result<()> {
    let mut rustc = Command::new("rustc");
    rustc
        .args(["--print", "target-libdir", "--target", target])
        .current_dir(root());
    let libraries = output("rustc --print target-libdir", &mut rustc)?;
    if Path::new(libraries.trim()).exists() {
        return Ok(());
    }
    eprintln!("setup: adding {target} to the toolchain");
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", target]).current_dir(root());
    run(&format!("rustup target add {target}"), &mut rustup)
        .with_context(|| format!("without rustup, install the standard library of {target} by other means"))
}
