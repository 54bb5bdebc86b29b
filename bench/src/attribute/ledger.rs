//! The ledger: one line per cause, nothing negative, the sum exactly the latency.

use std::{collections::BTreeMap, ops::AddAssign};

use serde::{Serialize, Serializer};

/// Which end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The load generator's host.
    Client,
    /// The server's host.
    Server,
}

/// Where time can go. The order is the order of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Line {
    /// Time of a thread that owned the request then.
    Thread(Side, ThreadLine),
    /// On the wire, or in a device queue between the two stacks.
    Network,
    /// Waiting for a lost segment to be sent again.
    Retransmit(Segment),
    /// A held-back segment waited for the peer's delayed ACK.
    DelayedAck,
    /// Whatever the evidence does not cover. Never spread over the others.
    Unexplained,
}

/// What a thread that owned the request was doing or waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadLine {
    /// Running, for this request.
    Compute,
    /// Running, for other requests of the same thread.
    OtherWork,
    /// Runnable while its CPU ran another task.
    RunQueue,
    /// Woken or due, while its CPU was idle or still switching.
    Wakeup,
    /// Runnable, but its cgroup had no CPU quota left.
    Throttled,
    /// Stolen by a hard interrupt.
    Irq,
    /// Stolen by, or spent waiting behind, a softirq.
    Softirq,
    /// Its virtual CPU was not running: by the hypervisor's counter, or by a heartbeat that came late on a CPU that recorded nothing
    /// meanwhile, which interrupts that are off for long look like too.
    Steal,
    /// Stopped by a signal or a tracer.
    Stopped,
    /// Asleep in the middle of its own work: I/O, page fault, reclaim, lock.
    Blocked,
    /// The connection was complete and waited to be accepted, or the listener had no room for it.
    AcceptQueue,
}

/// Which segment was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    /// The client's SYN.
    Syn,
    /// The server's SYN-ACK.
    SynAck,
    /// Any segment with data.
    Data,
}

const THREAD_LINES: [(ThreadLine, &str, &str); 11] = [
    (ThreadLine::Compute, "client.compute", "server.compute"),
    (ThreadLine::OtherWork, "client.other_work", "server.other_work"),
    (ThreadLine::RunQueue, "client.run_queue", "server.run_queue"),
    (ThreadLine::Wakeup, "client.wakeup", "server.wakeup"),
    (ThreadLine::Throttled, "client.throttled", "server.throttled"),
    (ThreadLine::Irq, "client.irq", "server.irq"),
    (ThreadLine::Softirq, "client.softirq", "server.softirq"),
    (ThreadLine::Steal, "client.steal", "server.steal"),
    (ThreadLine::Stopped, "client.stopped", "server.stopped"),
    (ThreadLine::Blocked, "client.blocked", "server.blocked"),
    (
        ThreadLine::AcceptQueue,
        "client.accept_queue",
        "server.accept_queue",
    ),
];

impl Line {
    /// Number of lines.
    pub const COUNT: usize = 2 * THREAD_LINES.len() + 6;

    /// Every line in report order.
    #[must_use]
    pub fn all() -> [Self; Self::COUNT] {
        std::array::from_fn(|index| match index {
            0..=10 => Self::Thread(Side::Client, THREAD_LINES[index].0),
            11..=21 => Self::Thread(Side::Server, THREAD_LINES[index - 11].0),
            22 => Self::Network,
            23 => Self::Retransmit(Segment::Syn),
            24 => Self::Retransmit(Segment::SynAck),
            25 => Self::Retransmit(Segment::Data),
            26 => Self::DelayedAck,
            _ => Self::Unexplained,
        })
    }

    /// Position in [`Line::all`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Thread(side, line) => side as usize * THREAD_LINES.len() + line as usize,
            Self::Network => 22,
            Self::Retransmit(segment) => 23 + segment as usize,
            Self::DelayedAck => 26,
            Self::Unexplained => 27,
        }
    }

    /// The name that files use, for example `server.run_queue`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thread(Side::Client, line) => THREAD_LINES[line as usize].1,
            Self::Thread(Side::Server, line) => THREAD_LINES[line as usize].2,
            Self::Network => "network",
            Self::Retransmit(Segment::Syn) => "retransmit.syn",
            Self::Retransmit(Segment::SynAck) => "retransmit.syn_ack",
            Self::Retransmit(Segment::Data) => "retransmit.data",
            Self::DelayedAck => "delayed_ack",
            Self::Unexplained => "unexplained",
        }
    }
}

impl Serialize for Line {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Nanoseconds per line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ledger([u64; Line::COUNT]);

impl Default for Ledger {
    fn default() -> Self {
        Self([0; Line::COUNT])
    }
}

impl Ledger {
    /// Adds `ns` to a line.
    pub fn charge(&mut self, line: Line, ns: u64) {
        self.0[line.index()] += ns;
    }

    /// ns on a line.
    #[must_use]
    pub fn ns(&self, line: Line) -> u64 {
        self.0[line.index()]
    }

    /// Sum of all lines, ns.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.0.iter().fold(0, |sum, ns| sum.saturating_add(*ns))
    }

    /// The lines that are not zero, in report order.
    pub fn lines(&self) -> impl Iterator<Item = (Line, u64)> + '_ {
        Line::all()
            .into_iter()
            .map(|line| (line, self.ns(line)))
            .filter(|&(_, ns)| ns > 0)
    }
}

/// The sum of many requests stays at its greatest value where damaged stamps would take it beyond.
impl AddAssign<&Ledger> for Ledger {
    fn add_assign(&mut self, other: &Ledger) {
        for (sum, ns) in self.0.iter_mut().zip(other.0) {
            *sum = sum.saturating_add(ns);
        }
    }
}

impl Serialize for Ledger {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.lines()
            .map(|(line, ns)| (line.name(), ns))
            .collect::<BTreeMap<_, _>>()
            .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_its_own_place_and_name() {
        let all = Line::all();
        for (index, line) in all.into_iter().enumerate() {
            assert_eq!(line.index(), index, "{}", line.name());
        }
        let names: std::collections::BTreeSet<_> = all.iter().map(|line| line.name()).collect();
        assert_eq!(names.len(), Line::COUNT);
    }
}
