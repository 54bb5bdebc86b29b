//! What happened to each connection: its packets on both hosts, joined without any clock, then its checkpoints.
//!
//! Packets belong to a connection by namespace, 4-tuple and initial sequence number, so a port that is used again, or two
//! clocks that differ, cannot mix two connections up.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use pqtail_common::{ABSENT, Head, Packet, Socket, kind, pending};

use super::cpu::{Raw, as_record, head};
use crate::{align::Exchange, clock::HostNs};

const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
const RST: u8 = 4;
pub(super) const ACK: u8 = 16;

/// No connection of ours carries more: a sequence number farther from the initial one belongs to another.
const SEQUENCE_WINDOW: u32 = 1 << 28;

/// How many segments can have come in on a connection between one's arrival and its drop.
const DROPPED_AMONG: usize = 16;

/// The two ends of a connection, client first: address, port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tuple {
    /// Client address, as in [`Packet`].
    pub client: u32,
    /// Client port.
    pub client_port: u16,
    /// Server address.
    pub server: u32,
    /// Server port.
    pub server_port: u16,
}

impl Tuple {
    /// Of a segment that this end sent.
    pub(super) fn of_packet(packet: &Packet, from: From) -> Self {
        let source = (packet.source, packet.source_port);
        let destination = (packet.destination, packet.destination_port);
        match from {
            From::Client => Self::between(source, destination),
            From::Server => Self::between(destination, source),
        }
    }

    /// Of a socket of this end.
    pub(super) fn of_socket(socket: &Socket, of: From) -> Self {
        let local = (socket.local, socket.local_port);
        let remote = (socket.remote, socket.remote_port);
        match of {
            From::Client => Self::between(local, remote),
            From::Server => Self::between(remote, local),
        }
    }

    fn between((client, client_port): (u32, u16), (server, server_port): (u32, u16)) -> Self {
        Self {
            client,
            client_port,
            server,
            server_port,
        }
    }
}

/// Who sent a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum From {
    /// The client.
    Client,
    /// The server.
    Server,
}

/// One segment at one host's border, sequence numbers relative to the sender's initial one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When, on the clock of the host that saw it.
    pub at: HostNs,
    /// On which of its CPUs.
    pub cpu: u32,
    /// Who sent it.
    pub from: From,
    /// Whether it left this host (else it arrived).
    pub leaves: bool,
    /// First byte of payload, counted from 0 = first byte of data.
    pub start: u32,
    /// One behind its last byte.
    pub end: u32,
    /// TCP flag byte.
    pub flags: u8,
    /// Arrived, was dropped by the stack, and came again.
    pub dropped: bool,
}

impl Seen {
    fn is_syn(&self) -> bool {
        self.flags & SYN != 0
    }

    /// Whether it carries data.
    #[must_use]
    pub fn has_data(&self) -> bool {
        self.end > self.start
    }
}

/// A drop, reset or timer of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incident {
    /// When, on the clock of the host that saw it.
    pub at: HostNs,
    /// The record's kind: [`kind::DROP`], [`kind::RETRANSMIT`] and so on.
    pub kind: u8,
    /// `DROP`: value of `enum skb_drop_reason`. `STATE`: the TCP state entered. `WRITE_TIMER`: what the timer was armed for, a value of
    /// [`pqtail_common::pending`].
    pub reason: u32,
}

/// One connection as one host saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The client's initial sequence number.
    pub initial: u32,
    /// Segments in the order of their times.
    pub seen: Vec<Seen>,
    /// Everything else.
    pub incidents: Vec<Incident>,
    server_initial: Option<u32>,
    /// When this host dropped a SYN-ACK, on its clock.
    synacks_dropped: Vec<HostNs>,
}

/// All connections of one host over one trial: by tuple, in the order of their SYNs.
#[derive(Clone, Debug, Default)]
pub struct Views {
    by_tuple: HashMap<Tuple, Vec<View>>,
    /// Position in its tuple's list of the first connection with an initial sequence number: damaged records can put any number
    /// of connections on one tuple.
    by_initial: HashMap<(Tuple, u32), usize>,
}

impl Views {
    /// Sorts one host's packet and socket records (sorted by time) into connections. `server_ports`, ascending, says which end is
    /// which.
    #[must_use]
    pub fn build(records: &[Raw], netns: u32, server_ports: &[u16]) -> Self {
        let mut views = Self::default();
        for raw in records {
            let head = head(raw);
            match head.kind {
                kind::TRANSMIT | kind::RECEIVE | kind::DROP => {
                    let packet: Packet = as_record(raw);
                    if packet.netns == netns || (head.kind == kind::DROP && packet.netns == 0) {
                        views.packet(head, &packet, server_ports);
                    }
                }
                kind::RETRANSMIT..=kind::WRITE_TIMER => {
                    let socket: Socket = as_record(raw);
                    if socket.netns == netns {
                        views.socket(head, &socket, server_ports);
                    }
                }
                _ => {}
            }
        }
        views.by_tuple.values_mut().flatten().for_each(View::settle);
        views
    }

    fn packet(&mut self, head: Head, packet: &Packet, server_ports: &[u16]) {
        let from = if server_ports.binary_search(&packet.destination_port).is_ok() {
            From::Client
        } else {
            From::Server
        };
        let tuple = Tuple::of_packet(packet, from);
        let list = self.by_tuple.entry(tuple).or_default();
        let first_syn = from == From::Client && packet.tcp_flags & (SYN | ACK) == SYN;
        if first_syn
            && list.last().is_none_or(|last| last.initial != packet.sequence)
            && head.kind != kind::DROP
        {
            self.by_initial
                .entry((tuple, packet.sequence))
                .or_insert(list.len());
            list.push(View {
                initial: packet.sequence,
                ..View::default()
            });
        }
        let Some(view) = list.last_mut() else { return };
        if head.kind == kind::DROP {
            // A consumed duplicate or the ACK of a closed socket is dropped as a matter of course: only data and SYNs count.
            if packet.payload_bytes > 0 || packet.tcp_flags & SYN != 0 {
                view.incidents.push(Incident {
                    at: HostNs(head.at_ns),
                    kind: head.kind,
                    reason: packet.reason,
                });
            }
            if from == From::Server && packet.tcp_flags & SYN != 0 {
                view.synacks_dropped.push(HostNs(head.at_ns));
            }
            view.mark_dropped(from, packet);
            return;
        }
        let initial = match from {
            From::Client => view.initial,
            From::Server => {
                if packet.tcp_flags & SYN != 0 {
                    // Another connection's, whose own SYN was not recorded, on the same port again.
                    if packet.acknowledgement != view.initial.wrapping_add(1) {
                        return;
                    }
                    view.server_initial = Some(packet.sequence);
                }
                match view.server_initial {
                    Some(initial) => initial,
                    None => return,
                }
            }
        };
        let start = data_start(packet, initial);
        if start > SEQUENCE_WINDOW {
            return;
        }
        view.seen.push(Seen {
            at: HostNs(head.at_ns),
            cpu: u32::from(head.cpu),
            from,
            leaves: head.kind == kind::TRANSMIT,
            start,
            end: start + packet.payload_bytes.min(SEQUENCE_WINDOW),
            flags: packet.tcp_flags & (FIN | SYN | RST | ACK),
            dropped: false,
        });
    }

    fn socket(&mut self, head: Head, socket: &Socket, server_ports: &[u16]) {
        let of = if server_ports.binary_search(&socket.remote_port).is_ok() {
            From::Client
        } else {
            From::Server
        };
        let tuple = Tuple::of_socket(socket, of);
        if let Some(view) = self.by_tuple.get_mut(&tuple).and_then(|list| list.last_mut()) {
            view.incidents.push(Incident {
                at: HostNs(head.at_ns),
                kind: head.kind,
                reason: if head.kind == kind::STATE {
                    socket.new_state
                } else {
                    socket.pending
                },
            });
        }
    }

    /// The connection of this tuple whose first SYN lies at or after `from` and before `to` on this host's clock.
    #[must_use]
    pub fn find(&self, tuple: &Tuple, from: HostNs, to: HostNs) -> Option<&View> {
        // Every connection begins with the SYN that made it, so their begins ascend as the records do.
        let list = self.by_tuple.get(tuple)?;
        let first = list.partition_point(|view| view.begin() < Some(from));
        list.get(first)
            .filter(|view| view.begin().is_some_and(|at| at <= to))
    }

    /// The connection of this tuple with this initial sequence number: how the other host's view is found without a clock.
    #[must_use]
    pub fn same(&self, tuple: &Tuple, initial: u32) -> Option<&View> {
        let position = *self.by_initial.get(&(*tuple, initial))?;
        self.by_tuple.get(tuple)?.get(position)
    }

    /// The four packet times of every handshake in which no SYN or SYN-ACK was sent twice.
    #[must_use]
    pub fn exchanges(client: &Self, server: &Self) -> Vec<Exchange> {
        let mut exchanges: Vec<_> = client
            .by_tuple
            .iter()
            .flat_map(|(tuple, list)| list.iter().map(move |view| (tuple, view)))
            .filter_map(|(tuple, here)| {
                let there = server.same(tuple, here.initial)?;
                let once = |view: &View, from, leaves| {
                    let mut syns = view
                        .seen
                        .iter()
                        .filter(|s| s.is_syn() && s.from == from && s.leaves == leaves);
                    syns.next().filter(|_| syns.next().is_none()).map(|s| s.at)
                };
                Some(Exchange {
                    syn_out: once(here, From::Client, true)?,
                    syn_in: once(there, From::Client, false)?,
                    synack_out: once(there, From::Server, true)?,
                    synack_in: once(here, From::Server, false)?,
                })
            })
            .collect();
        // All four, so that nothing depends on the order of the map.
        exchanges.sort_by_key(|each| (each.syn_out, each.syn_in, each.synack_out, each.synack_in));
        exchanges
    }
}

/// Where in the data a segment begins. SYN takes one sequence number, so data begins at 1.
fn data_start(packet: &Packet, initial: u32) -> u32 {
    if packet.tcp_flags & SYN != 0 {
        0
    } else {
        packet.sequence.wrapping_sub(initial).wrapping_sub(1)
    }
}

impl View {
    /// The segment that was just dropped is the last of its kind that arrived.
    fn mark_dropped(&mut self, from: From, packet: &Packet) {
        let initial = match from {
            From::Client => Some(self.initial),
            From::Server => self.server_initial,
        };
        let Some(start) = initial.map(|initial| data_start(packet, initial)) else {
            return;
        };
        let is_syn = packet.tcp_flags & SYN != 0;
        // The stack drops what it does not want within a few segments.
        let last = self.seen.iter_mut().rev().take(DROPPED_AMONG);
        let mut same = last.filter(|each| {
            !each.leaves && each.from == from && each.start == start && each.is_syn() == is_syn
        });
        if let Some(each) = same.find(|each| each.end - each.start == packet.payload_bytes) {
            each.dropped = true;
        }
    }

    /// Time of the first SYN.
    #[must_use]
    pub fn begin(&self) -> Option<HostNs> {
        self.seen.first().map(|each| each.at)
    }

    fn syn(&self, from: From, leaves: bool) -> impl DoubleEndedIterator<Item = &Seen> {
        self.seen
            .iter()
            .filter(move |each| each.is_syn() && each.from == from && each.leaves == leaves && !each.dropped)
    }

    /// A segment that was dropped on arrival and did not come again was of no more use: it counts as any other.
    fn settle(&mut self) {
        let mut later: HashMap<(From, bool, u32), u32> = HashMap::new();
        for each in self.seen.iter_mut().rev().filter(|each| !each.leaves) {
            let key = (each.from, each.flags & SYN != 0, each.start);
            each.dropped &= later.get(&key).is_some_and(|&end| end >= each.end);
            if !each.dropped {
                let end = later.entry(key).or_default();
                *end = each.end.max(*end);
            }
        }
    }

    fn data(&self, from: From, leaves: bool) -> impl DoubleEndedIterator<Item = &Seen> {
        self.seen.iter().filter(move |each| {
            each.has_data() && each.from == from && each.leaves == leaves && !each.dropped
        })
    }
}

/// A stretch of data in one direction that the other end answers with data of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flight {
    from: From,
    start: u32,
    end: u32,
}

/// The crossing of a path: one SYN, SYN-ACK or flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// Who sent it.
    pub from: From,
    /// `SYN`, `SYN-ACK`, or the flight's number in its direction from 1.
    pub what: What,
    /// Its last byte leaves for the first time; sender's clock.
    pub out: HostNs,
    /// The sender had it held back until an acknowledgement that the receiver's delayed-ACK timer sent: when that came in,
    /// just before `out`; sender's clock. `None` without that proof.
    pub delayed_ack: Option<HostNs>,
    /// The last time a part of it leaves before all of it has arrived: later than `out` if something was sent again.
    pub out_again: HostNs,
    /// All of it has arrived; receiver's clock.
    pub arrived: HostNs,
    /// CPU on which the receiver took it in.
    pub arrived_cpu: u32,
    /// Times that a part of it was sent again.
    pub repeats: u32,
    /// What made the sender send it again.
    pub resend: Resend,
    /// `SYN-ACK`: the server took in several SYNs before it sent this, and this is when the last of them came; server clock. Mostly
    /// its accept queue was full, which no record says.
    pub unanswered_until: Option<HostNs>,
}

/// What makes a sender send a segment again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resend {
    /// The time-out of a SYN or SYN-ACK: 1 s, doubled each time.
    HandshakeTimeout,
    /// The retransmission time-out of data.
    Timeout,
    /// A tail-loss probe: two round trips, and 200 ms if only one segment was out.
    LossProbe,
    /// RACK's timer: acknowledgements of later segments came, and the time in which it might still have come late is over.
    Reordering,
    /// The client's time-out, but nothing was lost: the listener dropped it, since its accept queue was full and the connection
    /// could not be established on this end.
    Refused,
    /// A timer of the sender's, but the kernel does not say what it was armed for.
    UnknownTimer,
    /// No timer of the sender's was seen: acknowledgements of what came after it, or the other end's own repetition. Also what
    /// is said where the kernel's timers could not be probed.
    Acknowledgements,
}

/// What crossed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The client's SYN.
    Syn,
    /// The server's SYN-ACK.
    SynAck,
    /// Data flight, counted from 1 per direction.
    Flight(u32),
}

/// The crossings of one connection in order, up to `done` on the client's clock. Empty if the handshake's packets are not all
/// there; shorter than the exchange if later ones are not.
#[must_use]
pub fn crossings(client: &View, server: &View, done: HostNs) -> Vec<Crossing> {
    let Some(syn) = syn_crossing(client, server, From::Client) else {
        return Vec::new();
    };
    let Some(mut synack) = syn_crossing(server, client, From::Server) else {
        return Vec::new();
    };
    synack.unanswered_until = unanswered_until(server, &synack);
    let mut crossings = vec![syn, synack];
    let mut numbers = [0u32; 2];
    for flight in flights(client, done) {
        let (sender, receiver) = match flight.from {
            From::Client => (client, server),
            From::Server => (server, client),
        };
        let number = &mut numbers[flight.from as usize];
        *number += 1;
        let Some(crossing) = flight_crossing(sender, receiver, flight, *number) else {
            break;
        };
        crossings.push(crossing);
    }
    crossings
}

fn syn_crossing(sender: &View, receiver: &View, from: From) -> Option<Crossing> {
    let out = sender.syn(from, true).next()?.at;
    let arrived = receiver.syn(from, false).next()?;
    // A SYN-ACK that is sent again after its first copy arrived (a lost ACK) does not delay this crossing: what counts is how
    // many copies the sender had sent when it was last heard of, which the receiver's first copy bounds by its own order.
    let copies_in = receiver.syn(from, false).count();
    let copies_out = sender.syn(from, true).count();
    let lost = copies_out.saturating_sub(copies_in);
    let out_again = sender.syn(from, true).nth(lost).map_or(out, |s| s.at);
    Some(Crossing {
        from,
        what: if from == From::Client {
            What::Syn
        } else {
            What::SynAck
        },
        out,
        delayed_ack: None,
        out_again,
        arrived: arrived.at,
        arrived_cpu: arrived.cpu,
        repeats: lost as u32,
        // Nothing else sends these again: there is nothing behind them that could be acknowledged.
        resend: Resend::HandshakeTimeout,
        unanswered_until: None,
    })
}

/// When the last SYN came that the server took in before its first SYN-ACK, if there were several. One that it dropped with a
/// record of it does not count, and if it dropped a SYN-ACK on the way out, then it did answer.
fn unanswered_until(server: &View, synack: &Crossing) -> Option<HostNs> {
    if server.synacks_dropped.iter().any(|at| *at <= synack.out) {
        return None;
    }
    let mut before = server.syn(From::Client, false).filter(|syn| syn.at <= synack.out);
    before.next()?;
    before.next_back().map(|syn| syn.at)
}

/// Kernel number of the TCP state (include/net/tcp_states.h).
const ESTABLISHED: u32 = 1;

/// Whether the server dropped a part of the first flight while the connection was not established on its end: it had no room
/// in its accept queue for it. The reason that the kernel gives differs by version (`NO_SOCKET` in 6.18).
fn was_refused(server: &View, flight: Flight) -> bool {
    let mut established = server
        .incidents
        .iter()
        .filter(|each| each.kind == kind::STATE && each.reason == ESTABLISHED);
    let Some(established) = established.next().map(|each| each.at) else {
        return false;
    };
    server.seen.iter().any(|each| {
        each.dropped
            && each.from == From::Client
            && each.has_data()
            && each.start < flight.end
            && each.at < established
    })
}

/// What the sender's timers say of a data segment that left at this time. The timer comes first, and one that had nothing armed
/// (`icsk_pending` 0, a firing that the kernel ignores) sent nothing.
fn resend(sender: &View, again: HostNs) -> Resend {
    let fired = sender.incidents.iter().rev().find(|each| {
        each.kind == kind::WRITE_TIMER
            && each.reason != 0
            && each.at <= again
            && again.0 - each.at.0 <= AT_ONCE_NS
    });
    match fired.map(|timer| timer.reason) {
        Some(pending::LOSS_PROBE) => Resend::LossProbe,
        Some(pending::REORDER) => Resend::Reordering,
        Some(ABSENT) => Resend::UnknownTimer,
        Some(_) => Resend::Timeout,
        None => Resend::Acknowledgements,
    }
}

/// An exchange of ours has six flights with a HelloRetryRequest. A connection that changes direction more often than this is not
/// one, and what follows is left out as if it had not been recorded: each flight takes a look at the whole connection.
const FLIGHTS_MAX: usize = 64;

/// Data in the order in which the client sent and received it, cut where the direction changes.
fn flights(client: &View, done: HostNs) -> Vec<Flight> {
    let mut flights: Vec<Flight> = Vec::new();
    let mut highest = [0u32; 2];
    for seen in client.seen.iter().filter(|each| each.has_data()) {
        let border = (seen.from == From::Client) == seen.leaves;
        if !border || seen.at > done {
            continue;
        }
        let high = &mut highest[seen.from as usize];
        let (start, end) = (*high, seen.end);
        if end <= start {
            continue;
        }
        *high = end;
        let full = flights.len() == FLIGHTS_MAX;
        match flights.last_mut() {
            Some(last) if last.from == seen.from => last.end = end,
            _ if full => break,
            _ => flights.push(Flight {
                from: seen.from,
                start,
                end,
            }),
        }
    }
    flights
}

fn flight_crossing(sender: &View, receiver: &View, flight: Flight, number: u32) -> Option<Crossing> {
    let out = sender
        .data(flight.from, true)
        .find(|each| each.end >= flight.end)?
        .at;
    let mut have = flight.start;
    let mut early: BinaryHeap<Reverse<(u32, u32)>> = BinaryHeap::new();
    let mut filled_hole = false;
    let mut last = None;
    for seen in receiver.data(flight.from, false) {
        if seen.end <= have || seen.start >= flight.end {
            continue;
        }
        if seen.start > have {
            early.push(Reverse((seen.start, seen.end)));
            filled_hole = true;
            continue;
        }
        have = seen.end;
        last = Some(*seen);
        while let Some(&Reverse((start, end))) = early.peek()
            && start <= have
        {
            have = have.max(end);
            early.pop();
        }
        if have >= flight.end {
            break;
        }
    }
    let last = last.filter(|_| have >= flight.end)?;
    // Copies of the bytes that arrived last: the first that left is the original, later ones were sent again. As many were lost as
    // never came: one that was only late is followed by its copies.
    let mut copies = sender
        .data(flight.from, true)
        .filter(|each| each.start < last.end && each.end > last.start && each.end > flight.start);
    let first = copies.next()?;
    let arrivals = receiver
        .data(flight.from, false)
        .filter(|each| each.start < last.end && each.end > last.start)
        .count();
    let copies: Vec<&Seen> = std::iter::once(first)
        .chain(copies)
        .filter(|each| each.start <= last.start.max(first.start))
        .collect();
    let repeats = copies.len().saturating_sub(arrivals.max(1));
    let again = copies.get(repeats).map_or(out, |each| each.at);
    let out_again = if repeats > 0 || filled_hole {
        again.max(out)
    } else {
        out
    };
    Some(Crossing {
        from: flight.from,
        what: What::Flight(number),
        out,
        delayed_ack: delayed_ack(sender, receiver, flight, out),
        out_again,
        arrived: last.at,
        arrived_cpu: last.cpu,
        repeats: repeats as u32,
        resend: if flight.from == From::Client && number == 1 && was_refused(receiver, flight) {
            Resend::Refused
        } else {
            resend(sender, out_again)
        },
        unanswered_until: None,
    })
}

/// A segment that waited for an acknowledgement leaves at once when that comes, in the softirq that brings it, and a delayed
/// acknowledgement leaves at once when its timer fires. ns.
const AT_ONCE_NS: u64 = 1_000_000;

/// A timer that fired is no proof, nor is a late segment. It takes all of: a part of the flight was out and not acknowledged;
/// the receiver's timer fired and an acknowledgement left at once; that came in and the rest left at once.
fn delayed_ack(sender: &View, receiver: &View, flight: Flight, out: HostNs) -> Option<HostNs> {
    // Nearly no connection has one; the rest is looked for only then.
    let timers = || {
        let incidents = receiver.incidents.iter();
        incidents.filter(|each| each.kind == kind::DELAYED_ACK_TIMER)
    };
    timers().next()?;
    let other = match flight.from {
        From::Client => From::Server,
        From::Server => From::Client,
    };
    let first_out = sender
        .data(flight.from, true)
        .find(|each| each.end > flight.start)?
        .at;
    let soon = |from: HostNs, to: HostNs| to >= from && to.0 - from.0 <= AT_ONCE_NS;
    let acks = |view: &View, leaves| {
        view.seen
            .iter()
            .filter(move |each| {
                each.from == other && each.leaves == leaves && !each.has_data() && !each.is_syn()
            })
            .map(|each| each.at)
            .collect::<Vec<_>>()
    };
    let came = acks(sender, false);
    let position = came.iter().rposition(|&at| at > first_out && soon(at, out))?;
    // The same acknowledgement, counted alike on both sides.
    let left = *acks(receiver, true).get(position)?;
    timers().any(|each| soon(each.at, left)).then_some(came[position])
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    const CLIENT: (u32, u16) = (1, 40_000);
    const SERVER: (u32, u16) = (2, 443);

    /// One segment of a story told by hand.
    struct Tell(u64, u8, u32, From, u8, u32, u32);

    fn raw(&Tell(at_ns, kind, netns, from, tcp_flags, sequence, payload_bytes): &Tell) -> Raw {
        let ((source, source_port), (destination, destination_port)) = match from {
            From::Client => (CLIENT, SERVER),
            From::Server => (SERVER, CLIENT),
        };
        let head = Head {
            at_ns,
            kind,
            ..Head::default()
        };
        let packet = Packet {
            head,
            netns,
            source,
            source_port,
            destination,
            destination_port,
            sequence,
            // Only a SYN-ACK's matters, and all stories with one begin with the SYN 100.
            acknowledgement: 101,
            payload_bytes,
            tcp_flags,
            ..Packet::default()
        };
        packet.as_bytes().try_into().unwrap()
    }

    fn records(segments: &[Tell]) -> Vec<Raw> {
        segments.iter().map(raw).collect()
    }

    fn views(records: &[Raw]) -> (Views, Views) {
        (
            Views::build(records, 10, &[443]),
            Views::build(records, 20, &[443]),
        )
    }

    fn story(segments: &[Tell]) -> (Views, Views) {
        views(&records(segments))
    }

    fn told(segments: &[Tell]) -> Vec<Crossing> {
        crossed(&records(segments))
    }

    fn crossed(records: &[Raw]) -> Vec<Crossing> {
        let (client, server) = views(records);
        let tuple = Tuple::between(CLIENT, SERVER);
        let here = client.find(&tuple, HostNs(0), HostNs(u64::MAX)).unwrap();
        let there = server.same(&tuple, here.initial).unwrap();
        crossings(here, there, HostNs(u64::MAX))
    }

    use super::From::{Client as C, Server as S};
    use pqtail_common::kind::{RECEIVE as RX, TRANSMIT as TX};

    #[test]
    fn a_clean_exchange_crosses_once_each() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(13, TX, 20, S, SYN | ACK, 900, 0),
            Tell(15, RX, 10, S, SYN | ACK, 900, 0),
            Tell(20, TX, 10, C, ACK, 101, 1400),
            Tell(22, RX, 20, C, ACK, 101, 1400),
            Tell(30, TX, 20, S, ACK, 901, 1800),
            Tell(33, RX, 10, S, ACK, 901, 1800),
        ]);
        let times: Vec<_> = crossings
            .iter()
            .map(|c| (c.out.0, c.arrived.0, c.repeats))
            .collect();
        assert_eq!(times, [(10, 12, 0), (13, 15, 0), (20, 22, 0), (30, 33, 0)]);
        assert!(crossings.iter().all(|c| c.out == c.out_again));
    }

    #[test]
    fn a_lost_syn_waits_for_its_copy() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(1_010, TX, 10, C, SYN, 100, 0),
            Tell(1_012, RX, 20, C, SYN, 100, 0),
            Tell(1_013, TX, 20, S, SYN | ACK, 900, 0),
            Tell(1_015, RX, 10, S, SYN | ACK, 900, 0),
        ]);
        assert_eq!(
            (
                crossings[0].out.0,
                crossings[0].out_again.0,
                crossings[0].arrived.0
            ),
            (10, 1_010, 1_012)
        );
        assert_eq!(crossings[0].repeats, 1);
        assert_eq!(crossings[1].repeats, 0);
    }

    #[test]
    fn a_lost_flight_waits_for_its_copy() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(13, TX, 20, S, SYN | ACK, 900, 0),
            Tell(15, RX, 10, S, SYN | ACK, 900, 0),
            Tell(20, TX, 10, C, ACK, 101, 300),
            Tell(230, TX, 10, C, ACK, 101, 300),
            Tell(232, RX, 20, C, ACK, 101, 300),
        ]);
        let flight = crossings[2];
        assert_eq!(
            (flight.out.0, flight.out_again.0, flight.arrived.0, flight.repeats),
            (20, 230, 232, 1)
        );
    }

    #[test]
    fn a_flight_that_was_late_and_is_followed_by_its_copy_was_not_lost() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(13, TX, 20, S, SYN | ACK, 900, 0),
            Tell(15, RX, 10, S, SYN | ACK, 900, 0),
            Tell(20, TX, 10, C, ACK, 101, 300),
            Tell(230, TX, 10, C, ACK, 101, 300),
            Tell(500, RX, 20, C, ACK, 101, 300),
            Tell(501, RX, 20, C, ACK, 101, 300),
        ]);
        let flight = crossings[2];
        assert_eq!(
            (flight.out.0, flight.out_again.0, flight.arrived.0, flight.repeats),
            (20, 20, 500, 0)
        );
    }

    #[test]
    fn a_port_used_again_is_another_connection() {
        let (client, server) = story(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(50, TX, 10, C, SYN, 777, 0),
            Tell(52, RX, 20, C, SYN, 777, 0),
        ]);
        let tuple = Tuple {
            client: 1,
            client_port: 40_000,
            server: 2,
            server_port: 443,
        };
        let second = client.find(&tuple, HostNs(40), HostNs(60)).unwrap();
        assert_eq!(second.initial, 777);
        assert_eq!(server.same(&tuple, 777).unwrap().begin(), Some(HostNs(52)));
    }

    #[test]
    fn two_segments_cross_when_the_hole_is_filled() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(13, TX, 20, S, SYN | ACK, 900, 0),
            Tell(15, RX, 10, S, SYN | ACK, 900, 0),
            Tell(20, TX, 10, C, ACK, 101, 1000),
            Tell(21, TX, 10, C, ACK, 1101, 400),
            Tell(23, RX, 20, C, ACK, 1101, 400),
            Tell(90, TX, 10, C, ACK, 101, 1000),
            Tell(92, RX, 20, C, ACK, 101, 1000),
        ]);
        let flight = crossings[2];
        assert_eq!(
            (flight.out.0, flight.out_again.0, flight.arrived.0, flight.repeats),
            (21, 90, 92, 1)
        );
    }

    /// A retransmission timer of the client's that fires, and what it was armed for.
    fn timer(at_ns: u64, pending: u32) -> Raw {
        let socket = Socket {
            head: Head {
                at_ns,
                kind: kind::WRITE_TIMER,
                ..Head::default()
            },
            netns: 10,
            local: CLIENT.0,
            local_port: CLIENT.1,
            remote: SERVER.0,
            remote_port: SERVER.1,
            pending,
            ..Socket::default()
        };
        socket.as_bytes().try_into().unwrap()
    }

    /// What sent the first flight again, which left at 20 and at 230, with these timers.
    fn flight_sent_again(timers: &[Raw]) -> Resend {
        let mut records = records(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(13, TX, 20, S, SYN | ACK, 900, 0),
            Tell(15, RX, 10, S, SYN | ACK, 900, 0),
            Tell(20, TX, 10, C, ACK, 101, 300),
            Tell(230, TX, 10, C, ACK, 101, 300),
            Tell(232, RX, 20, C, ACK, 101, 300),
        ]);
        records.extend_from_slice(timers);
        records.sort_by_key(|record| head(record).at_ns);
        crossed(&records)[2].resend
    }

    #[test]
    fn only_an_armed_timer_before_the_copy_sent_it() {
        assert_eq!(
            flight_sent_again(&[timer(229, pending::RETRANSMIT)]),
            Resend::Timeout
        );
        assert_eq!(
            flight_sent_again(&[timer(228, pending::LOSS_PROBE), timer(229, 0)]),
            Resend::LossProbe
        );
        assert_eq!(flight_sent_again(&[timer(229, 0)]), Resend::Acknowledgements);
        assert_eq!(
            flight_sent_again(&[timer(231, pending::RETRANSMIT)]),
            Resend::Acknowledgements
        );
        assert_eq!(flight_sent_again(&[timer(229, ABSENT)]), Resend::UnknownTimer);
    }

    #[test]
    fn a_handshake_segment_is_sent_again_by_its_time_out() {
        let crossings = told(&[
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(1_010, TX, 10, C, SYN, 100, 0),
            Tell(1_012, RX, 20, C, SYN, 100, 0),
            Tell(1_013, TX, 20, S, SYN | ACK, 900, 0),
            Tell(1_015, RX, 10, S, SYN | ACK, 900, 0),
        ]);
        assert_eq!(crossings[0].resend, Resend::HandshakeTimeout);
    }

    #[test]
    fn syns_before_the_first_answer_were_not_answered_unless_the_answer_was_dropped() {
        let mut segments = vec![
            Tell(10, TX, 10, C, SYN, 100, 0),
            Tell(12, RX, 20, C, SYN, 100, 0),
            Tell(1_010, TX, 10, C, SYN, 100, 0),
            Tell(1_012, RX, 20, C, SYN, 100, 0),
            Tell(1_013, TX, 20, S, SYN | ACK, 900, 0),
            Tell(1_015, RX, 10, S, SYN | ACK, 900, 0),
        ];
        assert_eq!(told(&segments)[1].unanswered_until, Some(HostNs(1_012)));
        segments.insert(2, Tell(13, kind::DROP, 20, S, SYN | ACK, 900, 0));
        assert_eq!(told(&segments)[1].unanswered_until, None);
    }
}
