//! What is injected, and what the attribution ought to say of it.

use std::{fmt, str::FromStr, time::Duration};

use crate::{
    attribute::ledger::{Line, Segment, Side, ThreadLine},
    collect::fault::LOCK_HOLDER,
};

/// One kind of fault, on one end where it can hit either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Case {
    /// None at all: whatever is blamed here is the machine's own doing.
    Nothing,
    /// A task of normal priority that spins on the thread's CPU.
    Hog(Side),
    /// The same with a real-time priority.
    FifoHog(Side),
    /// Packets between two other namespaces whose reception takes the thread's CPU.
    SoftirqFlood(Side),
    /// The thread's cgroup runs out of its CPU quota.
    Quota(Side),
    /// The process is stopped by a signal and continued.
    Stop(Side),
    /// One connection's handshake computes longer.
    Compute,
    /// One connection's handler sleeps in a system call.
    Sleep,
    /// One connection's handler waits for a lock that another thread holds.
    Lock,
    /// One connection's handler reads a file from the disk.
    ColdRead,
    /// One connection's handler lowers a cgroup's memory limit, and must reclaim what is too much.
    Reclaim,
    /// One connection's response is held back by Nagle's algorithm until the client's delayed ACK.
    HeldResponse,
    /// The server stops to accept, and its queue has room.
    AcceptPause,
    /// The same, and the queue has no room.
    AcceptOverflow,
    /// A segment is lost on its way.
    Loss(Loss),
    /// What this end sends waits in its device's queue.
    SlowPath(Side),
    /// A real-time task on the server's CPU, and one of those that wait for it loses its server flight too.
    HogAndLoss,
    /// A real-time task for so long that delayed-ACK timers fire, which are not the cause.
    DelayedAckDecoy,
    /// The server runs out of its quota while another task of least priority runs on its CPU, which is not the cause.
    NeighbourDecoy,
    /// Both ends share one CPU: each is the other's culprit.
    SharedCpu,
    /// More requests than the load generator can send.
    Overload,
    /// The client has too few ephemeral ports.
    FewPorts,
}

/// Which segment is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// The client's SYN.
    Syn,
    /// The server's SYN-ACK.
    SynAck,
    /// The client's first data.
    ClientHello,
    /// The server's first data.
    ServerFlight,
}

const SIDES: [(Side, &str); 2] = [(Side::Client, "client"), (Side::Server, "server")];

/// Names of the tasks that the suite itself runs, as the kernel has them.
pub(super) const HOG: &str = "pq-hog";
pub(super) const FIFO_HOG: &str = "pq-fifo-hog";

/// The task of the neighbour decoy.
pub(super) const NEIGHBOUR: &str = "pq-neighbour";

/// What the attribution ought to say of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expectation {
    /// The cause.
    pub(super) line: Line,
    /// The culprit's name must contain one of these; none if the cause has no culprit.
    pub(super) culprits: &'static [&'static str],
}

/// Whom an injection reaches, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Nobody in particular: the whole run is the injection, or there is none.
    Nobody,
    /// Every request, for as long as both last together.
    Overlap,
    /// Its victim for as long as it lasts, and bystanders for as long as they last together.
    Handler,
    /// Its victim alone, for all of its added latency: the effect comes after the deed.
    Victim,
    /// Its victim as before, and every other request that it overlaps.
    VictimAndOverlap,
    /// Every request that begins in it, for all of its added latency.
    Begin,
}

impl Case {
    /// Every case.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Nothing,
            Self::Compute,
            Self::Sleep,
            Self::Lock,
            Self::ColdRead,
            Self::Reclaim,
            Self::HeldResponse,
            Self::AcceptPause,
            Self::AcceptOverflow,
            Self::HogAndLoss,
            Self::DelayedAckDecoy,
            Self::NeighbourDecoy,
            Self::SharedCpu,
            Self::Overload,
            Self::FewPorts,
        ];
        for (side, _) in SIDES {
            all.extend([
                Self::Hog(side),
                Self::FifoHog(side),
                Self::SoftirqFlood(side),
                Self::Quota(side),
                Self::Stop(side),
                Self::SlowPath(side),
            ]);
        }
        all.extend([Loss::Syn, Loss::SynAck, Loss::ClientHello, Loss::ServerFlight].map(Self::Loss));
        all
    }

    /// Whether its fault is committed by the embedded server itself, in its own code or settings.
    #[must_use]
    pub fn needs_embedded(self) -> bool {
        match self {
            Self::Compute
            | Self::Sleep
            | Self::Lock
            | Self::ColdRead
            | Self::Reclaim
            | Self::HeldResponse
            | Self::AcceptPause
            | Self::AcceptOverflow
            | Self::DelayedAckDecoy
            | Self::SharedCpu => true,
            Self::Nothing
            | Self::Hog(_)
            | Self::FifoHog(_)
            | Self::SoftirqFlood(_)
            | Self::Quota(_)
            | Self::Stop(_)
            | Self::Loss(_)
            | Self::SlowPath(_)
            | Self::HogAndLoss
            | Self::NeighbourDecoy
            | Self::Overload
            | Self::FewPorts => false,
        }
    }

    /// Its name, for example `hog.server`.
    #[must_use]
    pub fn name(self) -> String {
        let on = |name: &str, side: Side| {
            let end = if side == Side::Client { "client" } else { "server" };
            format!("{name}.{end}")
        };
        let name = match self {
            Self::Hog(side) => return on("hog", side),
            Self::FifoHog(side) => return on("fifo-hog", side),
            Self::SoftirqFlood(side) => return on("softirq-flood", side),
            Self::Quota(side) => return on("quota", side),
            Self::Stop(side) => return on("stop", side),
            Self::SlowPath(side) => return on("slow-path", side),
            Self::Nothing => "nothing",
            Self::Compute => "compute.server",
            Self::Sleep => "sleep.server",
            Self::Lock => "lock.server",
            Self::ColdRead => "cold-read.server",
            Self::Reclaim => "reclaim.server",
            Self::HeldResponse => "held-response.server",
            Self::AcceptPause => "accept-pause.server",
            Self::AcceptOverflow => "accept-overflow.server",
            Self::Loss(Loss::Syn) => "loss.syn",
            Self::Loss(Loss::SynAck) => "loss.syn-ack",
            Self::Loss(Loss::ClientHello) => "loss.client-hello",
            Self::Loss(Loss::ServerFlight) => "loss.server-flight",
            Self::HogAndLoss => "hog-and-loss.server",
            Self::DelayedAckDecoy => "decoy.delayed-ack",
            Self::NeighbourDecoy => "decoy.neighbour",
            Self::SharedCpu => "shared-cpu",
            Self::Overload => "overload.client",
            Self::FewPorts => "few-ports.client",
        };
        name.to_owned()
    }

    /// Requests per second and length of its run, where the suite's are these.
    pub(super) fn load(self, rate_hz: f64, duration: Duration) -> (f64, Duration) {
        match self {
            // Beyond what one CPU does on the machines that were tried, and short, since all of it waits in the end.
            Self::Overload => (6_000.0, duration.min(Duration::from_secs(1))),
            _ => (rate_hz, duration),
        }
    }

    /// Flags that its run needs besides the suite's own.
    pub(super) fn run_flags(self, cpus: &[u32]) -> Vec<String> {
        match (self, cpus.first()) {
            (Self::SharedCpu, Some(cpu)) => ["--client-cpus", "--server-cpus"]
                .into_iter()
                .flat_map(|flag| [flag.to_owned(), cpu.to_string()])
                .collect(),
            _ => Vec::new(),
        }
    }

    /// How the injected time of a request is known.
    pub(super) fn reach(self) -> Reach {
        match self {
            Self::Nothing | Self::Overload | Self::FewPorts => Reach::Nobody,
            Self::Hog(_)
            | Self::FifoHog(_)
            | Self::SoftirqFlood(_)
            | Self::Quota(_)
            | Self::Stop(_)
            | Self::AcceptPause
            | Self::SlowPath(_)
            | Self::DelayedAckDecoy
            | Self::NeighbourDecoy => Reach::Overlap,
            Self::Compute | Self::Sleep | Self::Lock | Self::ColdRead | Self::Reclaim | Self::SharedCpu => {
                Reach::Handler
            }
            Self::HeldResponse | Self::Loss(_) => Reach::Victim,
            Self::HogAndLoss => Reach::VictimAndOverlap,
            Self::AcceptOverflow => Reach::Begin,
        }
    }

    /// What ought to be said of a request that it hit: the victim, or a bystander that waited meanwhile. `None` if nothing in
    /// particular is expected.
    pub(super) fn expects(self, is_victim: bool) -> Option<Expectation> {
        let thread = |side, line, culprit| {
            Some(Expectation {
                line: Line::Thread(side, line),
                culprits: culprit,
            })
        };
        let retransmit = |segment, culprit| {
            Some(Expectation {
                line: Line::Retransmit(segment),
                culprits: culprit,
            })
        };
        match self {
            Self::Nothing | Self::Overload | Self::FewPorts => None,
            Self::Hog(side) => thread(side, ThreadLine::RunQueue, &[HOG]),
            Self::FifoHog(side) => thread(side, ThreadLine::RunQueue, &[FIFO_HOG]),
            Self::DelayedAckDecoy => thread(Side::Server, ThreadLine::RunQueue, &[FIFO_HOG]),
            Self::SoftirqFlood(side) => thread(side, ThreadLine::Softirq, &["NET_RX", "ksoftirqd"]),
            Self::Quota(side) => thread(side, ThreadLine::Throttled, &["quota"]),
            Self::NeighbourDecoy => thread(Side::Server, ThreadLine::Throttled, &["quota"]),
            Self::Stop(side) => thread(side, ThreadLine::Stopped, &["stop signal"]),
            Self::Compute | Self::SharedCpu if is_victim => thread(Side::Server, ThreadLine::Compute, &[]),
            Self::Compute => thread(Side::Server, ThreadLine::OtherWork, &["other requests"]),
            // Whether the client waits for the CPU or the server for its own thread depends on who woke first.
            Self::SharedCpu => None,
            Self::Sleep => thread(Side::Server, ThreadLine::Blocked, &["sleep ("]),
            Self::Lock => thread(Side::Server, ThreadLine::Blocked, &[LOCK_HOLDER]),
            Self::ColdRead => thread(Side::Server, ThreadLine::Blocked, &["disk ("]),
            Self::Reclaim => thread(
                Side::Server,
                ThreadLine::Blocked,
                &["memory reclaim for a cgroup"],
            ),
            Self::AcceptPause => thread(Side::Server, ThreadLine::AcceptQueue, &["not accepted yet"]),
            Self::AcceptOverflow => thread(
                Side::Server,
                ThreadLine::AcceptQueue,
                &["accept queue full", "not accepted yet"],
            ),
            Self::SlowPath(_) => Some(Expectation {
                line: Line::Network,
                culprits: &[],
            }),
            Self::HogAndLoss if !is_victim => thread(Side::Server, ThreadLine::RunQueue, &[FIFO_HOG]),
            _ if !is_victim => None,
            Self::HeldResponse => Some(Expectation {
                line: Line::DelayedAck,
                culprits: &[],
            }),
            Self::Loss(Loss::Syn) => retransmit(Segment::Syn, &["lost SYN: handshake time-out"]),
            Self::Loss(Loss::SynAck) => retransmit(Segment::SynAck, &["lost SYN-ACK: handshake time-out"]),
            // One segment and a tail-loss probe, or several and RACK.
            Self::Loss(Loss::ClientHello | Loss::ServerFlight) | Self::HogAndLoss => retransmit(
                Segment::Data,
                &[
                    "lost data segment: tail-loss probe",
                    "lost data segment: retransmission time-out",
                    "lost data segment: reordering window",
                    "lost data segment: fast retransmission",
                ],
            ),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.name())
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::all();
        all.iter()
            .copied()
            .find(|case| case.name() == text)
            .ok_or_else(|| {
                let names: Vec<_> = all.iter().map(|case| case.name()).collect();
                format!("no such case; there are {}", names.join(", "))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_found_by_its_name_alone() {
        for case in Case::all() {
            assert_eq!(case.name().parse(), Ok(case));
        }
        assert!("hog".parse::<Case>().unwrap_err().contains("hog.server"));
    }
}
