//! Where records are missing, and how far that reaches.
//!
//! Without a record nothing can be told from "nothing happened". So what overlaps a loss is *unexplained*: a request whole
//! if its packets may be missing, else only those of its intervals in which a thread or a stack had it.

use std::collections::{BTreeMap, BTreeSet};

use pqtail_common::{Loss, kind};

use super::cpu::{Raw, as_record, head};

/// A stretch in which records of one machine may be missing, ns on its clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gap {
    start_ns: u64,
    end_ns: u64,
    /// Those of packets and sockets.
    packets: bool,
    /// Those of threads and CPUs.
    timelines: bool,
}

/// All gaps of one machine over one trial.
#[derive(Clone, Debug, Default)]
pub struct Gaps(Vec<Gap>);

impl Gaps {
    /// From the losses among a machine's records (sorted by time) and from stretches of which the file lost everything. What
    /// the measured `cpus` did after a loss is only known from their next switch on.
    #[must_use]
    pub fn build(records: &[Raw], damaged: &[(u64, u64)], cpus: &BTreeSet<u32>) -> Self {
        let mut gaps: Vec<Gap> = damaged
            .iter()
            .map(|&(start_ns, end_ns)| Gap {
                start_ns,
                end_ns,
                packets: true,
                timelines: true,
            })
            .collect();
        let mut switches: BTreeMap<u32, Vec<u64>> = cpus.iter().map(|&cpu| (cpu, Vec::new())).collect();
        for raw in records {
            let head = head(raw);
            match head.kind {
                kind::LOSS => {
                    let loss: Loss = as_record(raw);
                    let packets = is_of_connections(loss.lost_kind as u8);
                    gaps.push(Gap {
                        start_ns: loss.start_ns,
                        end_ns: head.at_ns,
                        packets,
                        timelines: !packets,
                    });
                }
                kind::SWITCH => {
                    if let Some(times) = switches.get_mut(&u32::from(head.cpu)) {
                        times.push(head.at_ns);
                    }
                }
                _ => {}
            }
        }
        for gap in gaps.iter_mut().filter(|gap| gap.timelines) {
            let known_again = |times: &Vec<u64>| {
                let next = times.partition_point(|&at| at <= gap.end_ns);
                times.get(next).copied().unwrap_or(u64::MAX)
            };
            gap.end_ns = switches
                .values()
                .map(known_again)
                .max()
                .unwrap_or(gap.end_ns)
                .max(gap.end_ns);
        }
        Self(gaps)
    }

    fn any(&self, start_ns: u64, end_ns: u64, which: impl Fn(&Gap) -> bool) -> bool {
        self.0
            .iter()
            .any(|gap| which(gap) && gap.start_ns < end_ns && gap.end_ns > start_ns)
    }

    /// Whether anything may be missing between two times.
    #[must_use]
    pub fn between(&self, start_ns: u64, end_ns: u64) -> bool {
        self.any(start_ns, end_ns, |_| true)
    }

    /// Whether a packet may be missing between two times.
    #[must_use]
    pub fn of_packets(&self, start_ns: u64, end_ns: u64) -> bool {
        self.any(start_ns, end_ns, |gap| gap.packets)
    }

    /// Whether something that a thread or a CPU did may be missing between two times.
    #[must_use]
    pub fn of_timelines(&self, start_ns: u64, end_ns: u64) -> bool {
        self.any(start_ns, end_ns, |gap| gap.timelines)
    }
}

/// Whether records of this kind belong to connections, not to threads and CPUs.
const fn is_of_connections(kind: u8) -> bool {
    matches!(kind, kind::TRANSMIT..=kind::WRITE_TIMER)
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
