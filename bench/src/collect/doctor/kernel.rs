//! Kernel, privileges, type information, lockdown, and which probes attach.

use super::{Finding, Root};
use crate::{
    collect::probes::{self, HEARTBEAT_NS_DEFAULT, ProbeSettings, Probes},
    record::manifest::{Absent, ProbeStatus},
};

/// The oldest kernel that the eBPF object is tried on.
const KERNEL_MIN: (u32, u32) = (6, 1);

/// Enough for programs that are detached at once.
const RING_BYTES: u32 = 1 << 20;

/// Without these most time has no cause; the others each cost one line of the ledger.
const ESSENTIAL: &[&str] = &[
    "sched_switch",
    "sched_wakeup",
    "net_dev_queue",
    "netif_receive_skb",
    "inet_sock_set_state",
];

const NO_CAUSES: &str = "nothing of the kernel can be recorded, so that no outlier gets a cause";

pub(super) fn examine(root: &Root, cpus: &[u32]) -> Vec<Finding> {
    let release = root.line("proc/sys/kernel/osrelease");
    let attached = Probes::attach(&ProbeSettings {
        ports: Vec::new(),
        cpus: cpus.to_vec(),
        heartbeat_ns: Some(HEARTBEAT_NS_DEFAULT),
        ring_bytes: RING_BYTES,
        reads: false,
    });
    let mut findings = vec![
        version(release.as_deref()),
        privileges(&root.text("proc/self/status").unwrap_or_default()),
        type_information(root),
        lockdown(root.line("sys/kernel/security/lockdown").as_deref()),
    ];
    findings.extend(match &attached {
        Ok(probes) => of_probes(probes.status()),
        Err(error) => vec![Finding::fail(
            "probes",
            format!("none attaches: {error:#}"),
            NO_CAUSES,
            "mend what the reason names, or run with --no-probes and without causes",
        )],
    });
    findings
}

fn version(release: Option<&str>) -> Finding {
    let rule = "kernel.version";
    let Some(release) = release else {
        return Finding::unknown(rule, "/proc/sys/kernel/osrelease");
    };
    let mut numbers = release
        .split(|each: char| !each.is_ascii_digit())
        .map_while(|number| number.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) < KERNEL_MIN => Finding::warn(
            rule,
            release,
            "older than 6.1: probes may not load, and their records were never checked on it",
            "run a kernel of 6.1 or later",
        ),
        (Some(_), Some(_)) => Finding::ok(rule, release),
        _ => Finding::note(
            rule,
            format!("unknown: {release}"),
            "whether the probes fit it is only told by their attaching",
            "see what is said of the probes",
        ),
    }
}

/// `status` is /proc/self/status.
fn privileges(status: &str) -> Finding {
    let rule = "privileges";
    let effective_uid = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .and_then(|ids| ids.split_ascii_whitespace().nth(1)?.parse::<u32>().ok());
    if let Err(error) = probes::check_privileges(status) {
        return Finding::fail(
            rule,
            match effective_uid {
                Some(0) => format!("root, but bounded: {error}"),
                Some(uid) => format!("user id {uid}, not root: {error}"),
                None => error.to_string(),
            },
            NO_CAUSES,
            "run it as root",
        );
    }
    match effective_uid {
        Some(0) => Finding::ok(rule, "root, with the capabilities that probes need"),
        Some(uid) => Finding::fail(
            rule,
            format!("user id {uid}, not root; the capabilities that probes need are there"),
            "a run on one machine makes network namespaces, which needs root",
            "run it as root",
        ),
        None => Finding::unknown(rule, "/proc/self/status"),
    }
}

fn type_information(root: &Root) -> Finding {
    let rule = "kernel.btf";
    match std::fs::metadata(root.path("sys/kernel/btf/vmlinux")) {
        Ok(file) => Finding::ok(rule, format!("{} KiB", file.len() >> 10)),
        Err(error) => Finding::fail(
            rule,
            format!("none: /sys/kernel/btf/vmlinux: {error}"),
            NO_CAUSES,
            "run a kernel built with CONFIG_DEBUG_INFO_BTF=y, as those of the distributions are",
        ),
    }
}

fn lockdown(mode: Option<&str>) -> Finding {
    let rule = "kernel.lockdown";
    match mode {
        None => Finding::note(
            rule,
            "unknown: securityfs is not mounted, or the kernel has no lockdown",
            "if there is one, and it is `confidentiality`, the probes do not load",
            "see what is said of the probes",
        ),
        Some(mode) if mode.contains("[confidentiality]") => Finding::fail(
            rule,
            mode,
            "the kernel forbids probes to read its memory",
            "boot with lockdown=integrity or none",
        ),
        Some(mode) => Finding::ok(rule, mode),
    }
}

/// One finding for all that attached, and one for those that did not and cost the same.
fn of_probes(status: &[ProbeStatus]) -> Vec<Finding> {
    let attached = status.iter().filter(|each| each.attached).count();
    let found = format!("{attached} of {} attach", status.len());
    let mut findings = vec![Finding::ok("probes", found)];
    for absent in Absent::among(status) {
        let rule = format!("probe.{}", absent.names[0]);
        let found = match &absent.names[1..] {
            [] => absent.reason.to_owned(),
            more => format!("{}; nor {}", absent.reason, more.join(", ")),
        };
        findings.push(if absent.names.iter().any(|name| ESSENTIAL.contains(name)) {
            let remedy = "run another kernel, or read the affected lines as unexplained";
            Finding::warn(&rule, found, absent.consequence, remedy)
        } else {
            let remedy = "read the report with this in mind; it is said there too";
            Finding::note(&rule, found, absent.consequence, remedy)
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::{Level, root::fixture};

    #[test]
    fn a_kernel_before_6_1_is_warned_of() {
        assert_eq!(version(Some("5.15.0-91-generic")).level, Level::Warn);
        assert_eq!(version(Some("6.1.0-28-cloud-arm64")).level, Level::Ok);
        assert_eq!(version(Some("7.0")).level, Level::Ok);
        assert_eq!(version(Some("strange")).level, Level::Note);
        assert_eq!(version(None).level, Level::Note);
    }

    #[test]
    fn someone_who_is_not_root_is_told_so() {
        let none = privileges("Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n");
        assert_eq!(none.level, Level::Fail);
        assert!(
            none.found.contains("user id 1000, not root") && none.found.contains("CAP_BPF and CAP_PERFMON"),
            "{none:?}"
        );
        let probes_only = privileges("Uid:\t1000\t1000\t1000\t1000\nCapEff:\t000000c000000000\n");
        assert_eq!(probes_only.level, Level::Fail);
        let bounded = privileges("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n");
        assert!(bounded.found.contains("root, but bounded"), "{bounded:?}");
        let root = privileges("Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n");
        assert_eq!(root.level, Level::Ok);
    }

    #[test]
    fn a_kernel_without_type_information_fails() {
        let (_folder, root) = fixture(&[("proc/sys/kernel/osrelease", "6.1.0\n")]);
        let finding = type_information(&root);
        assert_eq!(finding.level, Level::Fail);
        assert!(finding.remedy.contains("CONFIG_DEBUG_INFO_BTF"), "{finding:?}");
        let (_folder, root) = fixture(&[("sys/kernel/btf/vmlinux", "x")]);
        assert_eq!(type_information(&root).level, Level::Ok);
    }

    #[test]
    fn only_confidentiality_stops_the_probes() {
        assert_eq!(
            lockdown(Some("none integrity [confidentiality]")).level,
            Level::Fail
        );
        assert_eq!(
            lockdown(Some("none [integrity] confidentiality")).level,
            Level::Ok
        );
        assert_eq!(lockdown(None).level, Level::Note);
    }

    #[test]
    fn what_does_not_attach_is_a_finding_with_what_it_costs() {
        let status = |name: &str, reason: &str| ProbeStatus {
            name: name.to_owned(),
            attached: reason.is_empty(),
            reason: reason.to_owned(),
            consequence: if name.ends_with("switch") {
                "it all"
            } else {
                "it costs"
            }
            .to_owned(),
        };
        let findings = of_probes(&[
            status("kfree_skb", ""),
            status("sched_switch", "the kernel refuses"),
            status("local_timer_entry", "this kernel has none"),
            status("local_timer_exit", "nor this one"),
        ]);
        assert_eq!(findings[0], Finding::ok("probes", "1 of 4 attach"));
        assert_eq!(
            (findings[1].rule.as_str(), findings[1].level),
            ("probe.sched_switch", Level::Warn)
        );
        assert_eq!(
            (findings[2].rule.as_str(), findings[2].level),
            ("probe.local_timer_entry", Level::Note)
        );
        assert_eq!(findings[2].consequence, "it costs");
        assert_eq!(findings[2].found, "this kernel has none; nor local_timer_exit");
        assert_eq!(findings.len(), 3);
    }
}
