//! Who else uses the CPUs.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use super::{Finding, Root};

/// How long the others are watched: 50 ticks of 10 ms, so that one tick is 2 % of a CPU.
const WATCH: Duration = Duration::from_millis(500);

/// Share of one CPU from which a process is named.
const NAMED_SHARE: f64 = 0.05;

/// Share of one CPU, over all others, from which the tail is theirs.
const BUSY_SHARE: f64 = 0.20;

pub(super) fn examine(root: &Root) -> Vec<Finding> {
    let before = cpu_ticks(root);
    let begin = Instant::now();
    thread::sleep(WATCH);
    let after = cpu_ticks(root);
    let ticks = begin.elapsed().as_secs_f64() * procfs::ticks_per_second() as f64;
    let own = std::process::id();
    let processes = root.processes();
    vec![
        busy(&shares(&before, &after, own, ticks)),
        memory_scanners(
            root.line("sys/kernel/mm/ksm/run").as_deref(),
            root.line("sys/kernel/mm/transparent_hugepage/enabled").as_deref(),
            processes.iter().any(|(_, name)| name.starts_with("kdamond")),
        ),
    ]
}

/// Ticks of CPU time of each process, by id.
fn cpu_ticks(root: &Root) -> BTreeMap<u32, (String, u64)> {
    root.names("proc")
        .into_iter()
        .filter_map(|name| {
            let pid = name.parse().ok()?;
            Some((pid, name_and_ticks(&root.text(&format!("proc/{name}/stat"))?)?))
        })
        .collect()
}

/// A name may hold spaces and parentheses; it ends at the last one (proc_pid_stat(5)).
fn name_and_ticks(stat: &str) -> Option<(String, u64)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let columns: Vec<&str> = tail.split_ascii_whitespace().collect();
    let ticks = |at: usize| columns.get(at)?.parse::<u64>().ok();
    // Columns 14 and 15 of the line, of which two stand before the tail.
    Some((name.to_owned(), ticks(11)? + ticks(12)?))
}

/// Shares of one CPU by process, the greatest first; ours is left out.
fn shares(
    before: &BTreeMap<u32, (String, u64)>,
    after: &BTreeMap<u32, (String, u64)>,
    own: u32,
    ticks: f64,
) -> Vec<(String, f64)> {
    let mut shares: Vec<(String, f64)> = after
        .iter()
        .filter(|(pid, _)| **pid != own)
        .filter_map(|(pid, (name, used))| {
            // One that began meanwhile used all of its time meanwhile.
            let earlier = before.get(pid).map_or(0, |(_, used)| *used);
            let used = used.saturating_sub(earlier);
            (used > 0).then(|| (name.clone(), used as f64 / ticks.max(1.0)))
        })
        .collect();
    shares.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    shares
}

fn busy(shares: &[(String, f64)]) -> Finding {
    let rule = "neighbours";
    let total: f64 = shares.iter().map(|(_, share)| share).sum();
    let named: Vec<String> = shares
        .iter()
        .filter(|(_, share)| *share >= NAMED_SHARE)
        .take(8)
        .map(|(name, share)| format!("{name} {:.0} %", share * 100.0))
        .collect();
    let mut found = format!("other processes take {:.0} % of one CPU", total * 100.0);
    if !named.is_empty() {
        found += &format!(": {}", named.join(", "));
    }
    if total < BUSY_SHARE {
        return Finding::ok(rule, found);
    }
    Finding::warn(
        rule,
        found,
        "requests queue behind them, and the tail tells of them instead of the arms",
        "stop them, or give the run CPUs of its own",
    )
}

fn memory_scanners(merging: Option<&str>, huge_pages: Option<&str>, damon: bool) -> Finding {
    let rule = "neighbours.kernel";
    let mut found = Vec::new();
    if merging == Some("1") {
        found.push("ksmd merges pages");
    }
    if huge_pages.is_some_and(|mode| mode.contains("[always]")) {
        found.push("khugepaged collapses pages of all processes");
    }
    if damon {
        found.push("kdamond samples memory accesses");
    }
    if found.is_empty() {
        return Finding::ok(rule, "no kernel thread scans memory, as far as can be told");
    }
    Finding::note(
        rule,
        found.join(", "),
        "a kernel thread takes a CPU now and then, and is then named as a culprit",
        "switch it off in /sys/kernel/mm or /sys/module/damon* for the time of the run",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::Level;

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_ticks() {
        let stat = "77 (a) b (c) S 1 77 77 0 -1 4194560 1 2 3 4 30 12 0 0 20 0 1 0 5";
        assert_eq!(name_and_ticks(stat), Some(("a) b (c".to_owned(), 42)));
        assert_eq!(name_and_ticks("77"), None);
    }

    #[test]
    fn shares_leave_out_ourselves_and_count_the_new_in_full() {
        let of = |rows: &[(u32, &str, u64)]| {
            rows.iter()
                .map(|&(pid, name, ticks)| (pid, (name.to_owned(), ticks)))
                .collect()
        };
        let before = of(&[(1, "init", 100), (2, "us", 5), (3, "hog", 10)]);
        let after = of(&[(1, "init", 100), (2, "us", 50), (3, "hog", 35), (4, "new", 5)]);
        let shares = shares(&before, &after, 2, 50.0);
        assert_eq!(shares, [("hog".to_owned(), 0.5), ("new".to_owned(), 0.1)]);
        let finding = busy(&shares);
        assert_eq!(finding.level, Level::Warn);
        assert!(
            finding.found.ends_with("60 % of one CPU: hog 50 %, new 10 %"),
            "{finding:?}"
        );
        assert_eq!(busy(&[("quiet".to_owned(), 0.02)]).level, Level::Ok);
    }

    #[test]
    fn scanners_of_the_kernel_are_named() {
        assert_eq!(
            memory_scanners(Some("0"), Some("always [madvise] never"), false).level,
            Level::Ok
        );
        let finding = memory_scanners(Some("1"), Some("[always] madvise never"), true);
        assert_eq!(finding.level, Level::Note);
        assert!(
            finding.found.contains("ksmd") && finding.found.contains("kdamond"),
            "{finding:?}"
        );
    }
}
