//! One request as a chain of intervals, each owned by a thread, by a host's stack or by the wire.

use crate::{
    align::Alignment,
    attribute::ledger::{Segment, Side},
    clock::{HostNs, RunNs},
    record::stamps::{ConnectionStamps, RequestStamps},
    timeline::{
        connection::{Crossing, From, Resend, What},
        witness::Served,
    },
};

/// Who had the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A thread that has not taken it up yet: asleep, busy, or on its way.
    Waiting {
        /// Whose.
        side: Side,
        /// The thread.
        tid: u32,
        /// Where the packet that it waits for was taken in; `None` if it waits for its own timer.
        cpu: Option<u32>,
    },
    /// A connection that is complete, and that the thread has not accepted yet.
    Queued {
        /// Whose.
        side: Side,
        /// The thread.
        tid: u32,
        /// Where its first flight was taken in.
        cpu: u32,
    },
    /// A thread that works on it.
    Active {
        /// Whose.
        side: Side,
        /// The thread.
        tid: u32,
    },
    /// A host's network stack, without any thread.
    Stack {
        /// Whose.
        side: Side,
        /// The CPU it ran on.
        cpu: u32,
    },
    /// Under way.
    Wire {
        /// Where to.
        to: Side,
        /// The CPU that took it in there.
        cpu: u32,
    },
    /// Written, and held back by the sender until the other end's delayed acknowledgement.
    Held,
    /// Lost under way, waiting to be sent again.
    Lost(Segment, Resend),
    /// SYNs that the server's host took in and did not answer, until the client sent the last of them.
    Unanswered,
    /// A first flight that the listener had no room for, until the client sent it again.
    Refused,
    /// The records do not say.
    Unknown,
}

/// A stretch of a request between two checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// What happens in it.
    pub label: String,
    /// Begin.
    pub start: RunNs,
    /// End.
    pub end: RunNs,
    /// Who has the request.
    pub owner: Owner,
}

struct Chain {
    intervals: Vec<Interval>,
    cursor: RunNs,
    done: RunNs,
}

impl Chain {
    /// Goes on to a checkpoint. One that lies before the last (by clock error or by work that overlaps) adds nothing, so the
    /// chain never runs backwards and always sums to the latency.
    fn to(&mut self, at: RunNs, label: impl Into<String>, owner: Owner) {
        let end = at.min(self.done);
        if end > self.cursor {
            self.intervals.push(Interval {
                label: label.into(),
                start: self.cursor,
                end,
                owner,
            });
            self.cursor = end;
        }
    }
}

/// Label of the interval from the intended start to the actual one.
pub const DISPATCH: &str = "dispatch";

/// The chain of one finished request, from its intended start to its last byte. The intervals join without gap or overlap.
#[must_use]
pub fn intervals(
    request: &RequestStamps,
    served: Option<&Served>,
    crossings: &[Crossing],
    alignment: Option<&Alignment>,
) -> Vec<Interval> {
    let client = |ns: u64| Alignment::client(HostNs(ns));
    let connection = served.map(|served| &served.stamps);
    let tid = request.worker_tid;
    let mut chain = Chain {
        intervals: Vec::new(),
        cursor: client(request.intended_ns),
        done: client(request.done_ns),
    };
    chain.to(
        client(request.start_ns),
        DISPATCH,
        Owner::Waiting {
            side: Side::Client,
            tid,
            cpu: None,
        },
    );
    let Some(alignment) = alignment.filter(|_| !crossings.is_empty()) else {
        chain.to(chain.done, "no packets recorded", Owner::Unknown);
        return chain.intervals;
    };
    let sent = |crossing: &Crossing, at: HostNs| match crossing.from {
        From::Client => Alignment::client(at),
        From::Server => alignment.server(at),
    };
    let received = |crossing: &Crossing| match crossing.from {
        From::Client => alignment.server(crossing.arrived),
        From::Server => Alignment::client(crossing.arrived),
    };
    let mut before: Option<&Crossing> = None;
    for crossing in crossings {
        let out = sent(crossing, crossing.out);
        match (crossing.what, before) {
            (What::Syn, _) => chain.to(
                out,
                "connect",
                Owner::Active {
                    side: Side::Client,
                    tid,
                },
            ),
            (What::SynAck, _) => {
                let cpu = before.map_or(crossing.arrived_cpu, |syn| syn.arrived_cpu);
                if let Some(again) = crossing.unanswered_until {
                    chain.to(alignment.server(again), "SYN not answered", Owner::Unanswered);
                }
                chain.to(
                    out,
                    "answer the SYN",
                    Owner::Stack {
                        side: Side::Server,
                        cpu,
                    },
                );
            }
            (What::Flight(number), Some(before)) if before.from != crossing.from => {
                // What was written before the acknowledgement came was nobody's work any more.
                let written = written(request, connection, crossing.from, number);
                let held = crossing
                    .delayed_ack
                    .filter(|came| written.is_some_and(|at| at <= *came));
                let worked = match (held, written) {
                    (Some(_), Some(at)) => sent(crossing, at),
                    _ => out,
                };
                turn(&mut chain, request, served, alignment, before, worked, number);
                chain.to(out, "held back until the delayed ACK", Owner::Held);
            }
            // A flight of the server that no flight of the client called for: who held it is not known.
            _ => chain.to(out, "unprompted flight", Owner::Unknown),
        }
        let name = crossing_name(crossing);
        if crossing.repeats > 0 {
            let again = sent(crossing, crossing.out_again);
            let lost = match crossing.resend {
                Resend::Refused => Owner::Refused,
                resend => Owner::Lost(segment(crossing.what), resend),
            };
            chain.to(again, format!("{name} lost"), lost);
        }
        let wire = Owner::Wire {
            to: match crossing.from {
                From::Client => Side::Server,
                From::Server => Side::Client,
            },
            cpu: crossing.arrived_cpu,
        };
        chain.to(received(crossing), name, wire);
        before = Some(crossing);
    }
    // Only an answer that came after the request went out is the response: an earlier one means that records are missing.
    let response = before.filter(|last| {
        last.from == From::Server
            && request.request_written_ns > 0
            && last.arrived.0 >= request.request_written_ns
            || last.from == From::Server && request.first_response_byte_ns >= last.arrived.0 && {
                last.arrived.0 > request.handshake_done_ns
            }
    });
    match response {
        Some(last) => {
            let cpu = Some(last.arrived_cpu);
            if request.first_response_byte_ns >= last.arrived.0 {
                let noticed = client(request.first_response_byte_ns);
                chain.to(
                    noticed,
                    "notice the response",
                    Owner::Waiting {
                        side: Side::Client,
                        tid,
                        cpu,
                    },
                );
            }
            chain.to(
                chain.done,
                "read the response",
                Owner::Active {
                    side: Side::Client,
                    tid,
                },
            );
        }
        None => chain.to(chain.done, "packets missing", Owner::Unknown),
    }
    chain.intervals
}

/// The time between a flight's arrival and the answer's departure: noticing it, then working on it.
fn turn(
    chain: &mut Chain,
    request: &RequestStamps,
    served: Option<&Served>,
    alignment: &Alignment,
    before: &Crossing,
    out: RunNs,
    number: u32,
) {
    let cpu = Some(before.arrived_cpu);
    let (side, tid, noticed, names) = match before.from {
        From::Server => {
            let stamps = [request.connected_ns, request.first_server_byte_ns];
            let noticed = first_after(&stamps, before.arrived).map(Alignment::client);
            let names = match before.what {
                What::SynAck => ("notice the connection", "make the ClientHello"),
                _ => (
                    "notice the server's flight",
                    "finish the handshake, write the request",
                ),
            };
            (Side::Client, request.worker_tid, noticed, names)
        }
        From::Client => {
            let Some(Served {
                stamps: connection, ..
            }) = served
            else {
                chain.to(out, "server's work (no stamps)", Owner::Unknown);
                return;
            };
            // A foreign server's is not known, and then nothing is laid to the accept queue.
            if number == 1 && connection.accepted_ns > 0 {
                let queued = Owner::Queued {
                    side: Side::Server,
                    tid: connection.worker_tid,
                    cpu: before.arrived_cpu,
                };
                let accepted = alignment.server(HostNs(connection.accepted_ns));
                chain.to(accepted.min(out), "wait to be accepted", queued);
            }
            let stamps = [connection.first_byte_ns, connection.finished_read_ns];
            let noticed = first_after(&stamps, before.arrived).map(|at| alignment.server(at));
            let names = if number == 1 {
                ("notice the ClientHello", "make the server's flight")
            } else {
                ("notice the request", "verify Finished, write the response")
            };
            (Side::Server, connection.worker_tid, noticed, names)
        }
    };
    match noticed {
        Some(noticed) if noticed <= out => {
            chain.to(noticed, names.0, Owner::Waiting { side, tid, cpu });
            if let Some(served) = served.filter(|_| side == Side::Server) {
                for &(start_ns, end_ns) in &served.handshakes {
                    let (start, end) = (
                        alignment.server(HostNs(start_ns)),
                        alignment.server(HostNs(end_ns)),
                    );
                    if end > noticed && start < out {
                        chain.to(start, names.1, Owner::Active { side, tid });
                        chain.to(
                            end.min(out),
                            "server: SSL_do_handshake",
                            Owner::Active { side, tid },
                        );
                    }
                }
            }
            chain.to(out, names.1, Owner::Active { side, tid });
        }
        // Read before all of it had arrived: the rest was taken up inside, and a sleep there is a wait for it.
        _ => chain.to(out, names.1, Owner::Waiting { side, tid, cpu }),
    }
}

/// When the write of this flight returned, on its writer's clock.
fn written(
    request: &RequestStamps,
    connection: Option<&ConnectionStamps>,
    from: From,
    number: u32,
) -> Option<HostNs> {
    let ns = match (from, number) {
        (From::Client, 1) => request.client_hello_written_ns,
        (From::Client, _) => request.request_written_ns,
        (From::Server, 1) => connection?.flight_written_ns,
        (From::Server, _) => connection?.response_written_ns,
    };
    (ns > 0).then_some(HostNs(ns))
}

fn first_after(stamps: &[u64], at: HostNs) -> Option<HostNs> {
    stamps
        .iter()
        .copied()
        .filter(|&stamp| stamp >= at.0 && stamp > 0)
        .min()
        .map(HostNs)
}

/// What a crossing took from where it last left one host to where the other had all of it, ns; below zero where the clocks' error is
/// greater.
#[must_use]
pub fn one_way_ns(crossing: &Crossing, alignment: &Alignment) -> i64 {
    match crossing.from {
        From::Client => alignment.server(crossing.arrived) - Alignment::client(crossing.out_again),
        From::Server => Alignment::client(crossing.arrived) - alignment.server(crossing.out_again),
    }
}

const fn segment(what: What) -> Segment {
    match what {
        What::Syn => Segment::Syn,
        What::SynAck => Segment::SynAck,
        What::Flight(_) => Segment::Data,
    }
}

/// What a crossing is called.
#[must_use]
pub fn crossing_name(crossing: &Crossing) -> String {
    match (crossing.what, crossing.from) {
        (What::Syn, _) => "SYN".to_owned(),
        (What::SynAck, _) => "SYN-ACK".to_owned(),
        (What::Flight(number), From::Client) => format!("client flight {number}"),
        (What::Flight(number), From::Server) => format!("server flight {number}"),
    }
}
