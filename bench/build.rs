//! Builds the eBPF object with the same pinned toolchain and embeds it into the library.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use aya_build::{Package, Toolchain};

/// Where `cargo xtask setup` installs the pinned bpf-linker, from the workspace's root.
const TOOLS: &str = "target/tools/bin";

fn main() -> anyhow::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("run by cargo")?).join("..");
    let tools = root.join(TOOLS);
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(std::iter::once(tools.clone()).chain(env::split_paths(&path)))?;
    ensure!(
        env::split_paths(&path).any(|folder| folder.join("bpf-linker").exists()),
        "bpf-linker is neither in {} nor on PATH: run `cargo xtask setup` once",
        tools.display()
    );
    // SAFETY: a build script has one thread, and none was started before.
    unsafe {
        env::set_var("PATH", path);
        // The eBPF target has no prebuilt core; building it is the one unstable feature used, in this build only.
        env::set_var("RUSTC_BOOTSTRAP", "1");
    }
    println!("cargo:rerun-if-changed=../bench-common/src");
    aya_build::build_ebpf(
        [Package {
            name: "pqtail-ebpf",
            root_dir: "../bench-ebpf",
            no_default_features: false,
            features: &[],
        }],
        Toolchain::Custom(&env::var("RUSTUP_TOOLCHAIN").unwrap_or_else(|_| "1.95.0".to_owned())),
    )?;
    let object = PathBuf::from(env::var_os("OUT_DIR").context("run by cargo")?).join("pqtail-ebpf");
    rename_unions(&object).with_context(|| format!("rename unions in {}", object.display()))
}

/// bpf-linker 0.10 gives structs names that the kernel accepts, but not unions, and the kernel then refuses all of
/// the object's type information. The logging macros bring in one such union.
fn rename_unions(object: &Path) -> anyhow::Result<()> {
    const REFUSED: &[u8] = b"MaybeUninit<u8>\0";
    const ACCEPTED: &[u8] = b"MaybeUninit_u8_\0";
    let mut bytes = fs::read(object)?;
    let places: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at..].starts_with(REFUSED))
        .collect();
    for at in places {
        bytes[at..at + ACCEPTED.len()].copy_from_slice(ACCEPTED);
    }
    fs::write(object, bytes)?;
    Ok(())
}
