//! What is injected, and what the attribution ought to say of it.

use std::{fmt, str::FromStr};

use crate::attribute::ledger::{Line, Segment, Side, ThreadLine};

/// One kind of fault, on one end where it can hit either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Case {
    /// None at all: whatever is blamed here is the machine's own doing.
    Nothing,
    /// A task of normal priority that spins on the thread's CPU.
    Hog(Side),
    /// The same with a real-time priority.
    FifoHog(Side),
    /// The thread's cgroup runs out of its CPU quota.
    Quota(Side),
    /// The process is stopped by a signal and continued.
    Stop(Side),
    /// One connection's handshake computes longer.
    Compute,
    /// One connection's handler sleeps in a system call.
    Sleep,
    /// One connection's handler reads a file from the disk.
    ColdRead,
    /// One connection's response is held back by Nagle's algorithm until the client's delayed ACK.
    HeldResponse,
    /// A segment is lost on its way.
    Loss(Loss),
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

/// What the attribution ought to say of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expectation {
    /// The cause.
    pub(super) line: Line,
    /// What the culprit's name must contain; `None` if the cause has no culprit.
    pub(super) culprit: Option<&'static str>,
}

impl Case {
    /// Every case.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Nothing,
            Self::Compute,
            Self::Sleep,
            Self::ColdRead,
            Self::HeldResponse,
        ];
        for (side, _) in SIDES {
            all.extend([
                Self::Hog(side),
                Self::FifoHog(side),
                Self::Quota(side),
                Self::Stop(side),
            ]);
        }
        all.extend([Loss::Syn, Loss::SynAck, Loss::ClientHello, Loss::ServerFlight].map(Self::Loss));
        all
    }

    /// Its name, for example `hog.server`.
    #[must_use]
    pub fn name(self) -> String {
        let on = |name: &str, side: Side| {
            let end = if side == Side::Client { "client" } else { "server" };
            format!("{name}.{end}")
        };
        match self {
            Self::Nothing => "nothing".to_owned(),
            Self::Hog(side) => on("hog", side),
            Self::FifoHog(side) => on("fifo-hog", side),
            Self::Quota(side) => on("quota", side),
            Self::Stop(side) => on("stop", side),
            Self::Compute => "compute.server".to_owned(),
            Self::Sleep => "sleep.server".to_owned(),
            Self::ColdRead => "cold-read.server".to_owned(),
            Self::HeldResponse => "held-response.server".to_owned(),
            Self::Loss(Loss::Syn) => "loss.syn".to_owned(),
            Self::Loss(Loss::SynAck) => "loss.syn-ack".to_owned(),
            Self::Loss(Loss::ClientHello) => "loss.client-hello".to_owned(),
            Self::Loss(Loss::ServerFlight) => "loss.server-flight".to_owned(),
        }
    }

    /// Flags that its run needs besides the suite's own.
    pub(super) fn run_flags(self) -> &'static [&'static str] {
        &[]
    }

    /// Whether an injection is meant for one connection only, and hits the others as bystanders at most.
    pub(super) fn has_victim(self) -> bool {
        !matches!(
            self,
            Self::Nothing | Self::Hog(_) | Self::FifoHog(_) | Self::Quota(_) | Self::Stop(_)
        )
    }

    /// What ought to be said of a request that it hit: the victim, or a bystander that waited meanwhile. `None` if nothing in
    /// particular is expected.
    pub(super) fn expects(self, is_victim: bool) -> Option<Expectation> {
        let thread = |side, line, culprit| {
            Some(Expectation {
                line: Line::Thread(side, line),
                culprit,
            })
        };
        let retransmit = |segment| {
            Some(Expectation {
                line: Line::Retransmit(segment),
                culprit: None,
            })
        };
        match self {
            Self::Nothing => None,
            Self::Hog(side) => thread(side, ThreadLine::RunQueue, Some(HOG)),
            Self::FifoHog(side) => thread(side, ThreadLine::RunQueue, Some(FIFO_HOG)),
            Self::Quota(side) => thread(side, ThreadLine::Throttled, Some("quota")),
            Self::Stop(side) => thread(side, ThreadLine::Stopped, Some("stop signal")),
            Self::Compute if is_victim => thread(Side::Server, ThreadLine::Compute, None),
            Self::Compute => thread(Side::Server, ThreadLine::OtherWork, Some("other requests")),
            Self::Sleep | Self::ColdRead => thread(Side::Server, ThreadLine::Blocked, None),
            _ if !is_victim => None,
            Self::HeldResponse => Some(Expectation {
                line: Line::DelayedAck,
                culprit: None,
            }),
            Self::Loss(Loss::Syn) => retransmit(Segment::Syn),
            Self::Loss(Loss::SynAck) => retransmit(Segment::SynAck),
            Self::Loss(Loss::ClientHello | Loss::ServerFlight) => retransmit(Segment::Data),
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
