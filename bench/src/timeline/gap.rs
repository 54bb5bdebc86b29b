//! Where records are missing, and how far that reaches.
//!
//! Without a record nothing can be told from "nothing happened". So what overlaps a loss is *unexplained*: a request whole
//! if its packets may be missing, else only those of its intervals in which a thread or a stack had it.

use std::collections::{BTreeMap, BTreeSet};

use pqtail_common::{Loss, kind};

use super::cpu::{Raw, as_record, head};

/// All gaps of one machine over one trial: stretches in order and free of overlap, ns on its clock.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    packets: Vec<(u64, u64)>,
    timelines: Vec<(u64, u64)>,
}

impl Gaps {
    /// From the losses among a machine's records (sorted by time) and from stretches of which the file lost everything. What
    /// the measured `cpus` did after a loss is only known from their next switch on.
    #[must_use]
    pub fn build(records: &[Raw], damaged: &[(u64, u64)], cpus: &BTreeSet<u32>) -> Self {
        let (mut packets, mut timelines) = (damaged.to_vec(), damaged.to_vec());
        let mut switches: BTreeMap<u32, Vec<u64>> = cpus.iter().map(|&cpu| (cpu, Vec::new())).collect();
        for raw in records {
            let head = head(raw);
            match head.kind {
                kind::LOSS => {
                    let loss: Loss = as_record(raw);
                    let gap = (loss.start_ns.min(head.at_ns), head.at_ns);
                    if is_of_connections(loss.lost_kind as u8) {
                        packets.push(gap);
                    } else {
                        timelines.push(gap);
                    }
                }
                kind::SWITCH => {
                    if let Some(times) = switches.get_mut(&u32::from(head.cpu)) {
                        times.push(head.at_ns);
                    }
                }
                _ => {}
            }
        }
        for (_, to) in &mut timelines {
            let known_again = |times: &Vec<u64>| {
                let next = times.partition_point(|at| at <= to);
                times.get(next).copied().unwrap_or(u64::MAX)
            };
            *to = switches.values().map(known_again).max().unwrap_or(*to).max(*to);
        }
        Self {
            packets: joined(packets),
            timelines: joined(timelines),
        }
    }

    /// Whether anything may be missing between two times.
    #[must_use]
    pub fn between(&self, start_ns: u64, end_ns: u64) -> bool {
        self.of_packets(start_ns, end_ns) || self.of_timelines(start_ns, end_ns)
    }

    /// Whether a packet may be missing between two times.
    #[must_use]
    pub fn of_packets(&self, start_ns: u64, end_ns: u64) -> bool {
        any(&self.packets, start_ns, end_ns)
    }

    /// Whether something that a thread or a CPU did may be missing between two times.
    #[must_use]
    pub fn of_timelines(&self, start_ns: u64, end_ns: u64) -> bool {
        any(&self.timelines, start_ns, end_ns)
    }
}

fn any(gaps: &[(u64, u64)], start_ns: u64, end_ns: u64) -> bool {
    let first = gaps.partition_point(|&(_, to)| to <= start_ns);
    gaps.get(first).is_some_and(|&(from, _)| from < end_ns)
}

/// Windows in order, those that overlap made one, so that there is one order of begins and ends.
fn joined(mut windows: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    windows.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from, to) in windows {
        match joined.last_mut() {
            Some((_, end)) if from < *end => *end = to.max(*end),
            _ => joined.push((from, to)),
        }
    }
    joined
}

/// Whether records of this kind belong to connections, not to threads and CPUs.
const fn is_of_connections(kind: u8) -> bool {
    matches!(kind, kind::TRANSMIT..=kind::WRITE_TIMER | kind::READ)
}

#[cfg(test)]
mod tests {
    use pqtail_common::{Head, Switch};
    use zerocopy::IntoBytes as _;

    use super::*;

    fn switch(at_ns: u64, cpu: u16) -> Raw {
        let head = Head {
            at_ns,
            kind: kind::SWITCH,
            cpu,
            ..Head::default()
        };
        Switch {
            head,
            ..Switch::default()
        }
        .as_bytes()
        .try_into()
        .unwrap()
    }

    fn loss(start_ns: u64, at_ns: u64, lost_kind: u8) -> Raw {
        let head = Head {
            at_ns,
            kind: kind::LOSS,
            ..Head::default()
        };
        Loss {
            head,
            start_ns,
            count: 1,
            lost_kind: lost_kind.into(),
            ..Loss::default()
        }
        .as_bytes()
        .try_into()
        .unwrap()
    }

    #[test]
    fn a_lost_switch_leaves_the_cpus_unknown_until_the_next_ones() {
        let records = [
            loss(10, 20, kind::SWITCH),
            switch(25, 0),
            switch(40, 1),
            switch(50, 0),
        ];
        let gaps = Gaps::build(&records, &[], &BTreeSet::from([0, 1]));
        assert!(gaps.of_timelines(30, 35));
        assert!(!gaps.of_timelines(40, 60));
        assert!(!gaps.of_packets(0, 100));
    }

    #[test]
    fn a_lost_packet_says_nothing_about_cpus() {
        let gaps = Gaps::build(&[loss(10, 20, kind::RECEIVE)], &[(70, 80)], &BTreeSet::from([0]));
        assert!(gaps.of_packets(15, 16) && !gaps.of_timelines(15, 16));
        assert!(!gaps.between(30, 60));
        // Of a damaged stretch everything is gone, and without a switch behind it nothing is known again.
        assert!(gaps.of_packets(75, 76) && gaps.of_timelines(90, 95));
    }
}
