//! A cgroup for one thread or process, of version 1 or 2. It is gone, and its member back home, when this is dropped.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};

use super::within::within;

/// What the cgroup limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Cpu,
    Memory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

#[derive(Debug)]
pub(crate) struct Cgroup {
    version: Version,
    group: PathBuf,
    /// File through which its member came in, and the same of where it was before.
    member_file: &'static str,
    home: PathBuf,
    member: u32,
}

const ROOT: &str = "/sys/fs/cgroup";

/// A group whose last member is still on its way out is busy for a moment.
const REMOVE_MAX: Duration = Duration::from_secs(2);

impl Controller {
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

impl Cgroup {
    /// Moves one thread of a process, or the whole process: version 2 moves whole processes only.
    ///
    /// # Errors
    /// Where neither version offers the controller, or without the rights to make a group.
    pub(crate) fn create(controller: Controller, pid: u32, tid: Option<u32>) -> anyhow::Result<Self> {
        let name = controller.name();
        let one = Path::new(ROOT).join(name);
        let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers")).unwrap_or_default();
        let (version, root, member_file, member) = if one.join("cgroup.procs").exists() {
            match tid {
                Some(tid) => (Version::One, one, "tasks", tid),
                None => (Version::One, one, "cgroup.procs", pid),
            }
        } else if controllers.split_ascii_whitespace().any(|each| each == name) {
            (Version::Two, PathBuf::from(ROOT), "cgroup.procs", pid)
        } else {
            bail!(
                "needs the cgroup controller `{name}` below {ROOT}, of version 1 or 2: mount it, or run on the host itself"
            );
        };
        let home = home(&root, controller, version, member)?;
        if version == Version::Two {
            let file = root.join("cgroup.subtree_control");
            fs::write(&file, format!("+{name}")).with_context(|| format!("write {}", file.display()))?;
        }
        let group = root.join(format!("pqtail-{member}"));
        fs::create_dir(&group).with_context(|| format!("create the cgroup {}", group.display()))?;
        let cgroup = Self {
            version,
            group,
            member_file,
            home,
            member,
        };
        cgroup.write(member_file, &member.to_string())?;
        Ok(cgroup)
    }

    fn write(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.group.join(file);
        fs::write(&path, value).with_context(|| format!("write {}", path.display()))
    }

    /// CPU time in each period; `None` for as much as there is.
    pub(crate) fn limit_cpu(&self, quota_us: Option<u64>, period_us: u64) -> anyhow::Result<()> {
        match self.version {
            Version::One => {
                let quota = quota_us.map_or("-1".to_owned(), |us| us.to_string());
                self.write("cpu.cfs_period_us", &period_us.to_string())?;
                self.write("cpu.cfs_quota_us", &quota)
            }
            Version::Two => {
                let quota = quota_us.map_or("max".to_owned(), |us| us.to_string());
                self.write("cpu.max", &format!("{quota} {period_us}"))
            }
        }
    }

    /// The file that limits its memory, bytes.
    pub(crate) fn memory_limit(&self) -> PathBuf {
        self.group.join(match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        })
    }

    /// `None` for as much as there is.
    pub(crate) fn limit_memory(&self, bytes: Option<u64>) -> anyhow::Result<()> {
        let path = self.memory_limit();
        let unlimited = match self.version {
            Version::One => "-1",
            Version::Two => "max",
        };
        let value = bytes.map_or(unlimited.to_owned(), |bytes| bytes.to_string());
        fs::write(&path, value).with_context(|| format!("write {}", path.display()))
    }

    /// Time for which its member was out of CPU time, ns.
    pub(crate) fn throttled_ns(&self) -> anyhow::Result<u64> {
        let (name, unit_ns) = match self.version {
            Version::One => ("throttled_time ", 1),
            Version::Two => ("throttled_usec ", 1_000),
        };
        let stat = fs::read_to_string(self.group.join("cpu.stat"))?;
        stat.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|value| value.trim().parse::<u64>().ok())
            .map(|value| value * unit_ns)
            .with_context(|| format!("cpu.stat has no {}", name.trim()))
    }
}

/// Where the member is now.
fn home(root: &Path, controller: Controller, version: Version, member: u32) -> anyhow::Result<PathBuf> {
    let cgroups = fs::read_to_string(format!("/proc/{member}/cgroup"))
        .with_context(|| format!("look up the cgroups of {member}"))?;
    cgroups
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let is_it = match version {
                Version::One => controllers.split(',').any(|each| each == controller.name()),
                Version::Two => controllers.is_empty(),
            };
            is_it.then(|| root.join(path.trim_start_matches('/')))
        })
        .next()
        .with_context(|| format!("{member} is in no {} cgroup", controller.name()))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The member may have ended with its run.
        let _ = fs::write(self.home.join(self.member_file), self.member.to_string());
        within(REMOVE_MAX, || {
            fs::remove_dir(&self.group).is_ok() || !self.group.exists()
        });
    }
}
