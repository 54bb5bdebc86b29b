//! What a build needs beyond cargo: a C compiler, three toolchain components, and bpf-linker.

use std::{
    env,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::{cargo, output, root, run};

/// The last line of versions whose default build uses the LLVM inside the Rust toolchain: no LLVM packages needed.
const BPF_LINKER_VERSION: &str = "0.10.1";

/// Components and, for each, a file below the toolchain's sysroot that shows it is there.
const COMPONENTS: [(&str, &str); 3] = [
    ("rust-src", "lib/rustlib/src/rust/library/core/Cargo.toml"),
    ("clippy", "bin/cargo-clippy"),
    ("rustfmt", "bin/cargo-fmt"),
];

/// Installs what is missing; looks at a few files and returns when nothing is.
pub(crate) fn setup() -> anyhow::Result<()> {
    require_c_compiler()?;
    install_components()?;
    install_bpf_linker()
}

/// aws-lc, the cryptography of client and server, is C.
fn require_c_compiler() -> anyhow::Result<()> {
    require_compiler("C", "CC", "cc", "gcc libc6-dev")
}

/// libFuzzer is C++.
pub(crate) fn require_cpp_compiler() -> anyhow::Result<()> {
    require_compiler("C++", "CXX", "c++", "g++")
}

fn require_compiler(language: &str, variable: &str, usual: &str, packages: &str) -> anyhow::Result<()> {
    let compiler = env::var_os(variable).unwrap_or_else(|| usual.into());
    let found = Command::new(&compiler)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    ensure!(
        found,
        "no {language} compiler: '{}' does not run. On Debian and Ubuntu: apt-get install {packages}",
        compiler.display()
    );
    Ok(())
}

fn install_components() -> anyhow::Result<()> {
    let mut rustc = Command::new("rustc");
    let sysroot = output(
        "rustc --print sysroot",
        rustc.args(["--print", "sysroot"]).current_dir(root()),
    )?;
    let sysroot = Path::new(sysroot.trim());
    for (component, witness) in COMPONENTS {
        if sysroot.join(witness).exists() {
            continue;
        }
        eprintln!(
            "setup: adding {component} to the toolchain in {}",
            sysroot.display()
        );
        // Without --toolchain rustup takes the toolchain in force: RUSTUP_TOOLCHAIN, else rust-toolchain.toml.
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", component]).current_dir(root());
        run(&format!("rustup component add {component}"), &mut rustup).with_context(|| {
            format!(
                "the toolchain in {} has no {component}; without rustup, install it there by other means",
                sysroot.display()
            )
        })?;
    }
    Ok(())
}

/// Into `target/tools`, where `bench/build.rs` looks first: nothing outside the workspace changes.
fn install_bpf_linker() -> anyhow::Result<()> {
    let tools = root().join("target/tools");
    let installed = installed_version(&tools.join("bin/bpf-linker"));
    if installed.as_deref() == Some(BPF_LINKER_VERSION) {
        return Ok(());
    }
    eprintln!(
        "setup: installing bpf-linker {BPF_LINKER_VERSION} into {} (about a minute; there: {})",
        tools.display(),
        installed.as_deref().unwrap_or("none that runs")
    );
    let mut install = cargo();
    install.args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION]);
    // --force, for a binary that is there and does not run.
    install.args(["--locked", "--force", "--root"]).arg(&tools);
    run("install bpf-linker", &mut install)
}

/// `None` if there is none or it does not run.
fn installed_version(bpf_linker: &Path) -> Option<String> {
    let mut command = Command::new(bpf_linker);
    let printed = output("bpf-linker --version", command.arg("--version")).ok()?;
    printed.trim().strip_prefix("bpf-linker ").map(str::to_owned)
}
