//! `manifest.json`: what ran, where, and what is missing. Written when a run begins and replaced at every step, so a
//! run that is killed leaves one that says so.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::{SCHEMA, stream::Written, timekeeping::Timekeeping};
use crate::plan::{Plan, Trial};

/// Name of the manifest in a results folder.
pub const MANIFEST: &str = "manifest.json";

/// Everything about a run that is not a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Must be [`SCHEMA`].
    pub schema: u32,
    /// Version of the program that recorded it.
    pub pqtail: String,
    /// When it began, RFC 3339, UTC.
    pub begun: String,
    /// What was asked for.
    pub plan: Plan,
    /// How it ended.
    pub status: Status,
    /// The two ends of every connection.
    pub client: Host,
    /// See [`Manifest::client`].
    pub server: Host,
    /// Trials that ran to their end, in order, with what was recorded of each.
    pub trials: Vec<TrialRecord>,
    /// A trial was set aside and run again if [`Manifest::steal_share`] was more than this, 0 to 1; `None` if that was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steal_share_max: Option<f64>,
    /// Those trials, in order. Their recordings are kept in folders called [`SET_ASIDE`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub set_aside: Vec<TrialRecord>,
}

/// Folder beside recordings for those of trials that were run again.
pub const SET_ASIDE: &str = "set-aside";

impl Manifest {
    /// The share, 0 to 1, of the time in which a measured CPU had work that went to the hypervisor instead, over a trial, of the CPU
    /// that lost most, by /proc/stat. Of that time and not of all, because a CPU is only missed while it has work, and the arm that
    /// computes more would otherwise be found to lose more. `None` where /proc/stat of a measured CPU is not known.
    #[must_use]
    pub fn steal_share(&self, record: &TrialRecord) -> Option<f64> {
        let ends = [
            (&self.client, &record.client_stat),
            (&self.server, &record.server_stat),
        ];
        let mut most = 0.0_f64;
        for (host, ticks) in ends {
            for cpu in &host.cpus {
                let row = ticks.cpus.get(cpu)?;
                most = most.max(row.steal as f64 / row.wanted().max(1) as f64);
            }
        }
        Some(most)
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Status {
    /// Still running, or killed without a chance to say so.
    Running,
    /// All trials ran.
    Complete,
    /// Ended early; what is recorded is whole as far as it goes.
    Cut {
        /// Why, in words.
        reason: String,
    },
}

/// One end of the connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    /// Address the connections use.
    pub address: Option<IpAddr>,
    /// Inode number of its network namespace: tells the two ends apart where they share a kernel.
    pub netns: u32,
    /// Threads whose time is the requests' time (load generator or server workers).
    pub threads: Vec<u32>,
    /// What they belong to: the server's name and version. Empty for the load generator, and in older recordings.
    #[serde(default)]
    pub software: String,
    /// CPUs those threads are pinned to; of a server that is not ours, CPUs it may use.
    pub cpus: Vec<u32>,
    /// Folder of this end's stamps, relative to the results folder.
    pub stamps: PathBuf,
    /// Folder of the recordings of its kernel, relative to the results folder; both ends name the same folder where they
    /// share a kernel. `None` without probes.
    pub kernel: Option<PathBuf>,
    /// Kernel, CPU, clock, limits.
    pub facts: HostFacts,
    /// Every probe, attached or not.
    pub probes: Vec<ProbeStatus>,
}

/// What a host is, read from /proc and /sys; `None` or absent where the file is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// `uname -r`.
    pub kernel: String,
    /// `uname -m`.
    pub machine: String,
    /// Those parameters of the kernel command line that bear on timing; the others are nobody's business.
    pub command_line: Option<String>,
    /// CPU model.
    pub cpu_model: Option<String>,
    /// CPUs online.
    pub cpus_online: u32,
    /// Memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Current clocksource.
    pub clocksource: Option<String>,
    /// Frequency governor of CPU 0.
    pub governor: Option<String>,
    /// Kernel lockdown mode, as the kernel prints it.
    pub lockdown: Option<String>,
    /// Boot identity.
    pub boot_id: Option<String>,
    /// This process's cgroup limits, by file name.
    pub cgroup_limits: BTreeMap<String, String>,
    /// Settings that matter to TCP and the scheduler, by sysctl name.
    pub sysctls: BTreeMap<String, String>,
    /// Interrupt names by Linux irq number, from /proc/interrupts.
    pub interrupts: BTreeMap<u32, String>,
    /// Names of `enum skb_drop_reason` in the running kernel.
    pub drop_reasons: BTreeMap<u32, String>,
    /// Names of system calls in which threads usually sleep, by number on this architecture.
    #[serde(default)]
    pub syscalls: BTreeMap<u32, String>,
    /// Who steers its clocks, and how well by their own account: never an input of the alignment.
    #[serde(default)]
    pub timekeeping: Timekeeping,
}

/// One probe and what its absence costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeStatus {
    /// Program name, which is the tracepoint's.
    pub name: String,
    /// Whether it is attached.
    pub attached: bool,
    /// Why not; empty if attached.
    pub reason: String,
    /// What the attribution cannot see without it.
    pub consequence: String,
}

/// Probes that are not attached and whose absence costs the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent<'a> {
    /// Their names, in the order of the probes.
    pub names: Vec<&'a str>,
    /// Why the first of them is not.
    pub reason: &'a str,
    /// What the attribution cannot see without them.
    pub consequence: &'a str,
}

impl<'a> Absent<'a> {
    /// Those among the probes, in their order.
    #[must_use]
    pub fn among(probes: &'a [ProbeStatus]) -> Vec<Self> {
        let mut absent: Vec<Self> = Vec::new();
        for probe in probes.iter().filter(|probe| !probe.attached) {
            match absent
                .iter_mut()
                .find(|each| each.consequence == probe.consequence)
            {
                Some(known) => known.names.push(&probe.name),
                None => absent.push(Self {
                    names: vec![&probe.name],
                    reason: &probe.reason,
                    consequence: &probe.consequence,
                }),
            }
        }
        absent
    }
}

/// One trial that ran.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrialRecord {
    /// The plan's entry.
    pub trial: Trial,
    /// Begin of the warm-up on the client's clock, ns.
    pub begin_ns: u64,
    /// Requests recorded.
    pub requests: Written,
    /// Connections recorded by the embedded server.
    pub connections: Written,
    /// What each kernel recorded, by folder.
    pub kernel: BTreeMap<String, KernelRecord>,
    /// CPU time of client worker threads in the trial, ns.
    pub client_cpu_ns: u64,
    /// CPU time of server worker threads in the trial, ns.
    pub server_cpu_ns: u64,
    /// /proc/stat of the client's machine over the trial, ticks by CPU and column.
    pub client_stat: CpuTicks,
    /// /proc/stat of the server's machine.
    pub server_stat: CpuTicks,
}

/// Differences of /proc/stat columns over a trial, in `USER_HZ` ticks, one row per CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTicks {
    /// Length of a tick, ns.
    pub tick_ns: u64,
    /// Rows by CPU number.
    pub cpus: BTreeMap<u32, CpuTickRow>,
}

/// One CPU's share of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTickRow {
    /// user + nice.
    pub user: u64,
    /// system.
    pub system: u64,
    /// idle + iowait.
    pub idle: u64,
    /// irq + softirq.
    pub interrupts: u64,
    /// steal.
    pub steal: u64,
}

impl CpuTickRow {
    /// All but idle.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        let columns = [self.user, self.system, self.interrupts, self.steal];
        columns.into_iter().fold(0, u64::saturating_add)
    }
}

/// What one kernel's recording of one trial holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    /// Records and bytes on disk.
    pub written: Written,
    /// Records that could not be stored, by kind; empty is the good case.
    pub lost: BTreeMap<String, u64>,
    /// CPU time of the drain thread, ns.
    pub drain_cpu_ns: u64,
    /// Most of the ring buffer that was in use at a poll, bytes.
    pub ring_used_bytes_max: u64,
    /// Size of the ring buffer, bytes.
    pub ring_bytes: u64,
    /// Kernel functions in which measured threads went to sleep, by distance from `_stext` in bytes; empty for a trial that was
    /// cut.
    #[serde(default)]
    pub functions: BTreeMap<u32, String>,
}

impl Manifest {
    /// Whether one kernel recorded both ends, so that they have one clock.
    #[must_use]
    pub fn shares_kernel(&self) -> bool {
        self.client.kernel.is_some() && self.client.kernel == self.server.kernel
    }

    /// Reads the manifest of a results folder.
    ///
    /// # Errors
    /// When there is none, it is no manifest, or of another schema version.
    pub fn read(results: &Path) -> anyhow::Result<Self> {
        let path = results.join(MANIFEST);
        let json = fs::read(&path).with_context(|| {
            format!(
                "read {}: is {} a results folder?",
                path.display(),
                results.display()
            )
        })?;
        Self::parse(&json, &path)
    }

    /// Reads a manifest from its text; the path is only named.
    ///
    /// # Errors
    /// When it is no manifest, of another schema version, or not one that a run wrote.
    pub fn parse(json: &[u8], path: &Path) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
            pqtail: String,
        }
        let version: Version =
            serde_json::from_slice(json).with_context(|| format!("{} is no manifest", path.display()))?;
        ensure!(
            version.schema == SCHEMA,
            "{} has schema version {}, this pqtail reads version {SCHEMA}: analyse it with pqtail {}",
            path.display(),
            version.schema,
            version.pqtail
        );
        let manifest: Self =
            serde_json::from_slice(json).with_context(|| format!("{} is not understood", path.display()))?;
        // A run began with a valid plan, so any other is damage, and what it asks for may have no bounds.
        manifest
            .plan
            .validate()
            .with_context(|| format!("{} holds no plan of a run", path.display()))?;
        for host in [&manifest.client, &manifest.server] {
            for folder in std::iter::once(&host.stamps).chain(&host.kernel) {
                ensure!(
                    folder
                        .components()
                        .all(|part| matches!(part, Component::Normal(_))),
                    "{} names {}, which is outside of its folder: it is damaged, or not to be trusted",
                    path.display(),
                    folder.display()
                );
            }
        }
        Ok(manifest)
    }

    /// Writes the manifest, whole or not at all.
    ///
    /// # Errors
    /// When the disk takes no more.
    pub fn write(&self, results: &Path) -> anyhow::Result<()> {
        let path = results.join(MANIFEST);
        let beside = results.join("manifest.json.part");
        let mut json = serde_json::to_vec_pretty(self)?;
        json.push(b'\n');
        let written = fs::write(&beside, json)
            .with_context(|| format!("write {}", beside.display()))
            .and_then(|()| {
                fs::rename(&beside, &path)
                    .with_context(|| format!("rename {} to {}", beside.display(), path.display()))
            });
        if written.is_err() {
            // Half a manifest is of use to nobody; the one before stays.
            let _ = fs::remove_file(&beside);
        }
        written
    }
}

/// Path of a recording below its folder.
#[must_use]
pub fn recording(folder: &Path, stream: &str, trial: u32) -> PathBuf {
    folder.join(format!("{stream}-{trial:03}.pqr"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_steal_is_that_of_the_measured_cpu_that_lost_most_and_may_be_unknown() {
        let manifest = parse(|json| {
            json["client"]["cpus"] = serde_json::json!([0]);
            json["server"]["cpus"] = serde_json::json!([1]);
        });
        let manifest = manifest.unwrap();
        let row = |idle, steal| CpuTickRow {
            user: 10,
            idle,
            steal,
            ..CpuTickRow::default()
        };
        let stat = CpuTicks {
            tick_ns: 10_000_000,
            // CPU 2 is nobody's.
            cpus: BTreeMap::from([(0, row(89, 1)), (1, row(88, 2)), (2, row(0, 90))]),
        };
        let record = TrialRecord {
            client_stat: stat.clone(),
            server_stat: stat,
            ..serde_json::from_value(serde_json::json!({
                "trial": { "index": 0, "block": 0, "arm": "x25519", "seed": 1 }, "begin_ns": 0,
                "requests": Written::default(), "connections": Written::default(), "kernel": {},
                "client_cpu_ns": 0, "server_cpu_ns": 0,
                "client_stat": CpuTicks::default(), "server_stat": CpuTicks::default()
            }))
            .unwrap()
        };
        let share = manifest.steal_share(&record).unwrap();
        assert!((share - 2.0 / 12.0).abs() < 1e-9, "{share}");
        let nothing = TrialRecord {
            client_stat: CpuTicks::default(),
            server_stat: CpuTicks::default(),
            ..record
        };
        assert_eq!(manifest.steal_share(&nothing), None);
    }

    fn parse(change: impl Fn(&mut serde_json::Value)) -> anyhow::Result<Manifest> {
        let host = serde_json::json!({
            "address": null, "netns": 0, "threads": [], "cpus": [], "stamps": "raw/client", "kernel": null,
            "facts": HostFacts::default(), "probes": []
        });
        let mut json = serde_json::json!({
            "schema": SCHEMA, "pqtail": "0", "begun": "", "status": { "state": "complete" }, "trials": [],
            "client": host, "server": host,
            "plan": {
                "scenario": "s", "arms": ["x25519"], "trials_per_arm": 1, "rate_hz": 100.0, "duration_ns": 1_000_000_000,
                "warmup_ns": 0, "arrivals": "constant", "seed": 1, "timeout_ns": 1, "probes": true
            }
        });
        change(&mut json);
        Manifest::parse(&serde_json::to_vec(&json).unwrap(), Path::new(MANIFEST))
    }

    #[test]
    fn a_manifest_that_no_run_wrote_is_refused_before_anything_is_allocated_for_it() {
        parse(|_| ()).unwrap();
        type Change = fn(&mut serde_json::Value);
        let changes: [(Change, &str); 4] = [
            (|json| json["plan"]["trials_per_arm"] = u32::MAX.into(), "at most"),
            (
                |json| json["plan"]["arms"] = serde_json::json!([]),
                "no plan of a run",
            ),
            (
                |json| json["client"]["stamps"] = "../elsewhere".into(),
                "outside of its folder",
            ),
            (
                |json| json["server"]["kernel"] = "/proc".into(),
                "outside of its folder",
            ),
        ];
        for (change, word) in changes {
            let error = format!("{:#}", parse(change).unwrap_err());
            assert!(error.contains(word), "{error}");
        }
    }
}
