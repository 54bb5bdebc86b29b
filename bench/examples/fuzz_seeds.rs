//! Writes the inputs that the fuzz targets begin with: `fuzz_seeds <folder>` makes a folder per target. `cargo xtask fuzz` calls it.

use std::{env, fs, path::PathBuf};

use anyhow::Context as _;

fn main() -> anyhow::Result<()> {
    let folder = env::args_os()
        .nth(1)
        .map(PathBuf::from)
        .context("usage: fuzz_seeds <folder>")?;
    for (target, name, bytes) in pqtail::analyze::hostile::seeds() {
        let folder = folder.join(target);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let path = folder.join(format!("seed-{name}"));
        fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
