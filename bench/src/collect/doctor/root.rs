//! /proc and /sys under a root that a test can choose.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where `/` is.
#[derive(Clone, Debug)]
pub(super) struct Root(PathBuf);

impl Root {
    pub(super) fn of_this_host() -> Self {
        Self(PathBuf::from("/"))
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    pub(super) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok()
    }

    /// A file's only line; `None` if it is empty, too.
    pub(super) fn line(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Names in a folder, ascending; empty where there is none.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        names(&self.path(path))
    }

    /// Command names of the processes, by process id.
    pub(super) fn processes(&self) -> Vec<(u32, String)> {
        self.names("proc")
            .into_iter()
            .filter_map(|name| {
                let pid = name.parse().ok()?;
                Some((pid, self.line(&format!("proc/{name}/comm"))?))
            })
            .collect()
    }
}

pub(super) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

/// A host that consists of these files.
#[cfg(test)]
pub(super) fn fixture(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().expect("a file lies in a folder")).expect("make its folder");
        fs::write(path, text).expect("write a fixture");
    }
    let root = Root(folder.path().to_owned());
    (folder, root)
}
