//! The CPUs: who else may take them, how they sleep, and what hypervisor is under them.

use super::{Finding, Root};
use crate::collect::{btf, host};

/// Leaving an idle state that takes longer than this is a wake-up delay that a median would show, µs.
const IDLE_EXIT_US_MAX: u64 = 50;

pub(super) fn examine(root: &Root, chosen: &[u32]) -> Vec<Finding> {
    let hypervisor = hypervisor(root);
    let counter = btf::open().ok().map(|kernel| {
        !btf::resolve(&kernel)
            .missing
            .keys()
            .any(|each| each.starts_with("percpu_"))
    });
    let stolen_ticks = root
        .text("proc/stat")
        .map(|stat| host::tick_rows(&stat).values().map(|row| row.steal).sum());
    vec![
        placement(chosen),
        siblings(root, chosen),
        governor(root, chosen),
        idle_states(root, chosen),
        mitigations(root),
        virtualisation(hypervisor.as_deref()),
        steal_clock(hypervisor.is_some(), counter, stolen_ticks),
    ]
}

fn placement(chosen: &[u32]) -> Finding {
    let found = host::list(chosen);
    match chosen.len() {
        0 => Finding::unknown("cpu.chosen", "the CPU affinity"),
        1 => Finding::warn(
            "cpu.chosen",
            found,
            "what is measured and the drain of the records share one CPU, and the drain shows in the latency",
            "give this host one CPU more than the run measures on",
        ),
        _ => Finding::ok("cpu.chosen", found),
    }
}

fn siblings(root: &Root, chosen: &[u32]) -> Finding {
    let rule = "cpu.smt";
    let mut of_chosen = Vec::new();
    for &cpu in chosen {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let Some(list) = root.line(&path) else {
            return Finding::unknown(rule, "/sys/devices/system/cpu/*/topology");
        };
        of_chosen.push((cpu, host::cpus_of_list(&list)));
    }
    judge_siblings(rule, chosen, &of_chosen)
}

fn judge_siblings(rule: &str, chosen: &[u32], of_chosen: &[(u32, Vec<u32>)]) -> Finding {
    let mut shared: Vec<u32> = Vec::new();
    let mut foreign: Vec<u32> = Vec::new();
    for (cpu, siblings) in of_chosen {
        for sibling in siblings.iter().filter(|&sibling| sibling != cpu) {
            if chosen.contains(sibling) {
                shared.push(*sibling);
            } else {
                foreign.push(*sibling);
            }
        }
    }
    if !shared.is_empty() {
        shared.sort_unstable();
        return Finding::warn(
            rule,
            format!(
                "CPUs {} are threads of cores that other chosen CPUs use",
                host::list(&shared)
            ),
            "two chosen CPUs slow each other down, which counts as compute",
            "choose one thread of each core with --cpus",
        );
    }
    if !foreign.is_empty() {
        foreign.sort_unstable();
        return Finding::note(
            rule,
            format!("siblings of the chosen CPUs: {}", host::list(&foreign)),
            "whatever runs there slows the chosen CPUs down, which counts as compute",
            "keep them idle, or switch SMT off",
        );
    }
    Finding::ok(rule, "no chosen CPU has a sibling that this kernel sees")
}

fn governor(root: &Root, chosen: &[u32]) -> Finding {
    let mut governors: Vec<String> = chosen
        .iter()
        .filter_map(|cpu| {
            root.line(&format!(
                "sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"
            ))
        })
        .collect();
    governors.sort_unstable();
    governors.dedup();
    judge_governor(&governors)
}

fn judge_governor(governors: &[String]) -> Finding {
    let rule = "cpu.governor";
    let found = governors.join(", ");
    match governors {
        [] => Finding::note(
            rule,
            "unknown: this kernel does not control the frequency, as is usual for a guest",
            "whether the frequency changes during a run cannot be seen",
            "compare hosts of one type, with interleaved arms",
        ),
        [only] if only == "performance" => Finding::ok(rule, found),
        _ => Finding::warn(
            rule,
            found,
            "the frequency follows the load, so that sparse requests run on a slow clock",
            "set the governor `performance` for the time of the run",
        ),
    }
}

fn idle_states(root: &Root, chosen: &[u32]) -> Finding {
    let rule = "cpu.idle";
    let mut deepest: Option<(u64, String)> = None;
    for cpu in chosen {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle");
        for state in root.names(&folder) {
            let read = |file: &str| root.line(&format!("{folder}/{state}/{file}"));
            if read("disable").as_deref() == Some("1") {
                continue;
            }
            if let (Some(name), Some(exit_us)) = (
                read("name"),
                read("latency").and_then(|us| us.parse::<u64>().ok()),
            ) {
                deepest = deepest.max(Some((exit_us, name)));
            }
        }
    }
    match deepest {
        None => Finding::ok(
            rule,
            "no idle states: a CPU without work halts, or its host decides",
        ),
        Some((exit_us, name)) if exit_us > IDLE_EXIT_US_MAX => Finding::note(
            rule,
            format!("{name} takes {exit_us} µs to leave"),
            "the first request after a pause pays for the wake-up of its CPU",
            "disable the deep states, or boot with a lower *.max_cstate, if it shows as wake-up time",
        ),
        Some((exit_us, name)) => Finding::ok(rule, format!("deepest {name}, {exit_us} µs to leave")),
    }
}

fn mitigations(root: &Root) -> Finding {
    let folder = "sys/devices/system/cpu/vulnerabilities";
    let states: Vec<(String, String)> = root
        .names(folder)
        .into_iter()
        .filter_map(|name| {
            let state = root.line(&format!("{folder}/{name}"))?;
            Some((name, state))
        })
        .collect();
    judge_mitigations(&states)
}

fn judge_mitigations(states: &[(String, String)]) -> Finding {
    let rule = "cpu.mitigations";
    if states.is_empty() {
        return Finding::unknown(rule, "/sys/devices/system/cpu/vulnerabilities");
    }
    let mitigated = states
        .iter()
        .filter(|(_, state)| state.starts_with("Mitigation"))
        .count();
    let vulnerable: Vec<&str> = states
        .iter()
        .filter(|(_, state)| state.starts_with("Vulnerable"))
        .map(|(name, _)| name.as_str())
        .collect();
    if vulnerable.is_empty() {
        return Finding::ok(
            rule,
            format!("{mitigated} of {} mitigated, none open", states.len()),
        );
    }
    Finding::note(
        rule,
        format!(
            "{mitigated} of {} mitigated, open: {}",
            states.len(),
            vulnerable.join(", ")
        ),
        "system calls and interrupts cost less than where all are mitigated",
        "compare only hosts with the same mitigations",
    )
}

/// Who runs this kernel; `None` on bare metal, as far as can be told.
pub(super) fn hypervisor(root: &Root) -> Option<String> {
    let firmware = ["sys_vendor", "product_name"]
        .iter()
        .filter_map(|file| root.line(&format!("sys/class/dmi/id/{file}")))
        .collect::<Vec<_>>()
        .join(" ");
    if let Some(kind) = root.line("sys/hypervisor/type") {
        return Some([kind, firmware].join(" ").trim().to_owned());
    }
    if let Some(device_tree) = root.line("proc/device-tree/hypervisor/compatible") {
        return Some(device_tree.trim_end_matches('\0').to_owned());
    }
    let flagged = root
        .text("proc/cpuinfo")
        .unwrap_or_default()
        .lines()
        .find(|line| line.starts_with("flags"))
        .is_some_and(|line| line.split_ascii_whitespace().any(|flag| flag == "hypervisor"));
    // arm64 has no such flag: there the firmware's names are all there is. `.metal` instances carry the maker's name as well.
    let known = [
        "QEMU",
        "KVM",
        "VMware",
        "Xen",
        "innotek",
        "Amazon EC2",
        "Google Compute",
        "Virtual Machine",
    ];
    let named = known.iter().any(|name| firmware.contains(name)) && !firmware.contains(".metal");
    (flagged || named).then(|| match firmware.as_str() {
        "" => "a hypervisor that the firmware does not name".to_owned(),
        name => name.to_owned(),
    })
}

fn virtualisation(hypervisor: Option<&str>) -> Finding {
    match hypervisor {
        None => Finding::ok(
            "cpu.virtualisation",
            "none that can be seen: taken for bare metal",
        ),
        Some(name) => Finding::note(
            "cpu.virtualisation",
            format!("a guest of {name}"),
            "the host may take a CPU away at any time",
            "see the steal clock; take dedicated hosts where it matters",
        ),
    }
}

/// `counter`: whether the kernel has the hypervisor's counter; `None` without BTF. `stolen_ticks`: /proc/stat since boot.
fn steal_clock(guest: bool, counter: Option<bool>, stolen_ticks: Option<u64>) -> Finding {
    let rule = "cpu.steal_clock";
    match (guest, counter, stolen_ticks) {
        (false, ..) => Finding::ok(rule, "not needed: no hypervisor"),
        (true, Some(true), Some(ticks)) if ticks > 0 => {
            Finding::ok(rule, format!("offered; {ticks} ticks taken since boot"))
        }
        (true, Some(true), _) => Finding::note(
            rule,
            "the kernel has a counter, which never moved",
            "nothing was taken since boot, or the hypervisor does not tell: the two look alike",
            "read a steal of 0 as unobservable",
        ),
        (true, Some(false), _) => Finding::note(
            rule,
            "unobservable: this kernel has no counter of the hypervisor's",
            "a CPU that was away shows only as late heartbeats",
            "take a kernel with paravirtual steal time, or bare metal",
        ),
        (true, None, _) => Finding::unknown(rule, "a kernel without BTF"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::{Level, root::fixture};

    #[test]
    fn chosen_siblings_are_worse_than_unchosen_ones() {
        let of = [(0, vec![0, 2]), (1, vec![1, 3])];
        assert_eq!(judge_siblings("r", &[0, 1], &of).level, Level::Note);
        let of = [(0, vec![0, 2]), (2, vec![0, 2])];
        assert_eq!(judge_siblings("r", &[0, 2], &of).level, Level::Warn);
        let of = [(0, vec![0]), (1, vec![1])];
        assert_eq!(judge_siblings("r", &[0, 1], &of).level, Level::Ok);
    }

    #[test]
    fn only_performance_is_a_good_governor_and_none_is_unknown() {
        assert_eq!(judge_governor(&["performance".to_owned()]).level, Level::Ok);
        assert_eq!(judge_governor(&["schedutil".to_owned()]).level, Level::Warn);
        let both = ["performance".to_owned(), "powersave".to_owned()];
        assert_eq!(judge_governor(&both).level, Level::Warn);
        assert!(judge_governor(&[]).found.contains("unknown"));
    }

    #[test]
    fn the_deepest_idle_state_that_is_not_disabled_counts() {
        let state = "sys/devices/system/cpu/cpu0/cpuidle/state";
        let files = [
            (format!("{state}1/name"), "C1\n"),
            (format!("{state}1/latency"), "2\n"),
            (format!("{state}1/disable"), "0\n"),
            (format!("{state}2/name"), "C6\n"),
            (format!("{state}2/latency"), "133\n"),
            (format!("{state}2/disable"), "0\n"),
        ];
        let mut files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let (_folder, root) = fixture(&files);
        let finding = idle_states(&root, &[0]);
        assert_eq!(finding.level, Level::Note);
        assert!(finding.found.contains("C6 takes 133 µs"), "{finding:?}");
        files[5].1 = "1\n";
        let (_folder, root) = fixture(&files);
        assert_eq!(idle_states(&root, &[0]).level, Level::Ok);
    }

    #[test]
    fn open_vulnerabilities_are_named() {
        let states = |second: &str| {
            [
                ("meltdown".to_owned(), "Mitigation: PTI".to_owned()),
                ("spectre_v2".to_owned(), second.to_owned()),
            ]
        };
        assert_eq!(judge_mitigations(&states("Not affected")).level, Level::Ok);
        let open = judge_mitigations(&states("Vulnerable"));
        assert_eq!(open.level, Level::Note);
        assert!(open.found.contains("open: spectre_v2"), "{open:?}");
        assert!(judge_mitigations(&[]).found.contains("unknown"));
    }

    #[test]
    fn guests_are_known_by_flag_or_firmware_and_metal_instances_are_none() {
        let of = |files: &[(&str, &str)]| {
            let (_folder, root) = fixture(files);
            hypervisor(&root)
        };
        let vendor = "sys/class/dmi/id/sys_vendor";
        let product = "sys/class/dmi/id/product_name";
        assert!(of(&[("proc/cpuinfo", "flags\t\t: fpu hypervisor lahf\n")]).is_some());
        assert_eq!(of(&[("proc/cpuinfo", "flags\t\t: fpu lahf\n")]), None);
        assert_eq!(
            of(&[(vendor, "Amazon EC2\n"), (product, "c7g.large\n")]).as_deref(),
            Some("Amazon EC2 c7g.large")
        );
        assert_eq!(of(&[(vendor, "Amazon EC2\n"), (product, "c7g.metal\n")]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_steal_counter_that_never_moved_is_not_called_zero() {
        assert_eq!(steal_clock(true, Some(true), Some(7)).level, Level::Ok);
        assert!(
            steal_clock(true, Some(true), Some(0))
                .remedy
                .contains("unobservable")
        );
        assert!(
            steal_clock(true, Some(false), Some(0))
                .found
                .contains("unobservable")
        );
        assert!(steal_clock(true, None, None).found.contains("unknown"));
        assert_eq!(steal_clock(false, None, None).level, Level::Ok);
    }
}
