//! Stamps of a server that takes none itself: made from the kernel's records of what its threads read and sent, and from calls of
//! libssl.
//!
//! A read is a proof of who works on which connection; a segment that leaves counts for the thread that read last, since softirqs
//! send in anybody's name. When a connection was accepted no record tells, so [`ConnectionStamps::accepted_ns`] stays 0.

use std::collections::HashMap;

use pqtail_common::{Call, Packet, Socket, function, kind};

use super::{
    connection::{ACK, From, SYN, Tuple},
    cpu::{Raw, as_record, head},
};
use crate::record::stamps::{ConnectionStamps, Outcome};

/// One connection as its server had it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// What the server stamped, or would have. Of a foreign one `flight_written_ns` and `response_written_ns` are when the last segment left, not when
    /// the write returned; `handshake_done_ns` is known from libssl alone.
    pub stamps: ConnectionStamps,
    /// Calls of `SSL_do_handshake` (or `SSL_accept`) for it, begin and end in ns, in order and disjoint; none where libssl was not
    /// probed.
    pub handshakes: Vec<(u64, u64)>,
}

/// More turns than this are no exchange of ours; what follows is left out.
const TURNS_MAX: usize = 64;

/// Reads, then the segments that answer them.
#[derive(Clone, Copy, Debug)]
struct Turn {
    read_ns: u64,
    sent_ns: u64,
}

/// A connection under way.
#[derive(Debug, Default)]
struct Open {
    tid: u32,
    /// Another thread read from it too: then one thread's stamps would be wrong.
    is_shared: bool,
    turns: Vec<Turn>,
    handshakes: Vec<(u64, u64)>,
    handshake_done_ns: u64,
}

/// Makes the stamps of all connections that `threads` read from, out of records that are sorted by time, in the order in which the
/// connections ended. Those whose reader changed are left out. `ports`, ascending, are the server's.
#[must_use]
pub fn witness(records: &[Raw], netns: u32, ports: &[u16], threads: &[u32]) -> Vec<Served> {
    let mut open: HashMap<Tuple, Open> = HashMap::new();
    let mut ended = Vec::new();
    // By thread: the connection that it touched last, and when.
    let mut touched: HashMap<u32, (Tuple, u64)> = HashMap::new();
    // By thread and address: whose an `SSL` is while it lives. A new connection's first call replaces what was there.
    let mut sessions: HashMap<(u32, u64), Tuple> = HashMap::new();
    for raw in records {
        let head = head(raw);
        match head.kind {
            kind::RECEIVE => {
                let packet: Packet = as_record(raw);
                if packet.netns == netns && packet.tcp_flags & (SYN | ACK) == SYN {
                    // A port that is used again.
                    let tuple = Tuple::of_packet(&packet, From::Client);
                    end(&mut ended, open.remove_entry(&tuple));
                }
            }
            kind::READ if threads.contains(&head.tid) => {
                let socket: Socket = as_record(raw);
                if socket.netns != netns || ports.binary_search(&socket.local_port).is_err() {
                    continue;
                }
                let tuple = Tuple::of_socket(&socket, From::Server);
                open.entry(tuple).or_default().read(head.tid, head.at_ns);
                touched.insert(head.tid, (tuple, head.at_ns));
            }
            kind::TRANSMIT => {
                let packet: Packet = as_record(raw);
                if packet.netns != netns || packet.payload_bytes == 0 {
                    continue;
                }
                let tuple = Tuple::of_packet(&packet, From::Server);
                if let Some(open) = open.get_mut(&tuple)
                    && open.tid == head.tid
                    && let Some(turn) = open.turns.last_mut()
                {
                    turn.sent_ns = head.at_ns;
                    touched.insert(head.tid, (tuple, head.at_ns));
                }
            }
            kind::CALL if threads.contains(&head.tid) => {
                let call: Call = as_record(raw);
                let key = (head.tid, call.session);
                let inside = touched
                    .get(&head.tid)
                    .filter(|(_, at_ns)| *at_ns >= call.start_ns);
                let tuple = match inside {
                    Some((tuple, _)) => {
                        sessions.insert(key, *tuple);
                        *tuple
                    }
                    None => match sessions.get(&key) {
                        Some(tuple) => *tuple,
                        None => continue,
                    },
                };
                if let Some(open) = open.get_mut(&tuple) {
                    open.call(&call);
                }
            }
            _ => {}
        }
    }
    // Records are all there is: what is open at their end has ended as far as anybody knows. In order, whatever the map's order.
    let mut left: Vec<_> = open.into_iter().collect();
    left.sort_unstable_by_key(|(tuple, _)| *tuple);
    for each in left {
        end(&mut ended, Some(each));
    }
    ended
}

impl Open {
    fn read(&mut self, tid: u32, at_ns: u64) {
        if self.turns.is_empty() {
            self.tid = tid;
        }
        self.is_shared |= self.tid != tid;
        // Several reads take in one flight.
        let is_answered = self.turns.last().is_none_or(|turn| turn.sent_ns > 0);
        if is_answered && self.turns.len() < TURNS_MAX {
            self.turns.push(Turn {
                read_ns: at_ns,
                sent_ns: 0,
            });
        }
    }

    fn call(&mut self, call: &Call) {
        if !matches!(call.function, function::DO_HANDSHAKE | function::ACCEPT)
            || call.start_ns >= call.head.at_ns
        {
            return;
        }
        // SSL_accept ends after the SSL_do_handshake inside it, and that one says enough.
        let is_told = self
            .handshakes
            .last()
            .is_some_and(|(_, end_ns)| *end_ns > call.start_ns);
        if !is_told && self.handshakes.len() < TURNS_MAX {
            self.handshakes.push((call.start_ns, call.head.at_ns));
        }
        if call.returned == 1 && self.handshake_done_ns == 0 {
            self.handshake_done_ns = call.head.at_ns;
        }
    }
}

/// The last turn that was answered is the request's, the one before it the last of the handshake.
fn end(ended: &mut Vec<Served>, closing: Option<(Tuple, Open)>) {
    let Some((tuple, open)) = closing else { return };
    let Some(first) = open.turns.first().filter(|_| !open.is_shared) else {
        return;
    };
    let mut answered = open.turns.iter().filter(|turn| turn.sent_ns > 0);
    let last = answered.next_back();
    let (flight, response) = match (answered.next_back(), last) {
        (Some(flight), Some(response)) => (flight.sent_ns, Some(response)),
        (None, Some(flight)) => (flight.sent_ns, None),
        _ => (0, None),
    };
    ended.push(Served {
        stamps: ConnectionStamps {
            first_byte_ns: first.read_ns,
            flight_written_ns: flight,
            handshake_done_ns: open.handshake_done_ns,
            finished_read_ns: response.map_or(0, |turn| turn.read_ns),
            response_written_ns: response.map_or(0, |turn| turn.sent_ns),
            worker_tid: open.tid,
            local: tuple.server,
            remote: tuple.client,
            local_port: tuple.server_port,
            remote_port: tuple.client_port,
            outcome: if response.is_some() {
                Outcome::Ok
            } else {
                Outcome::Unfinished
            } as u8,
            ..ConnectionStamps::default()
        },
        handshakes: open.handshakes,
    });
}

#[cfg(test)]
mod tests {
    use pqtail_common::Head;
    use zerocopy::IntoBytes as _;

    use super::*;

    const NETNS: u32 = 20;
    const CLIENT: (u32, u16) = (1, 40_000);
    const SERVER: (u32, u16) = (2, 443);
    const WORKER: u32 = 7;
    const OTHER: u32 = 8;

    fn at(at_ns: u64, kind: u8, tid: u32) -> Head {
        Head {
            at_ns,
            kind,
            tid,
            ..Head::default()
        }
    }

    fn read(at_ns: u64, tid: u32, client_port: u16) -> Raw {
        let socket = Socket {
            head: at(at_ns, kind::READ, tid),
            netns: NETNS,
            local: SERVER.0,
            local_port: SERVER.1,
            remote: CLIENT.0,
            remote_port: client_port,
            ..Socket::default()
        };
        socket.as_bytes().try_into().unwrap()
    }

    fn sent(at_ns: u64, tid: u32, client_port: u16) -> Raw {
        let packet = Packet {
            head: at(at_ns, kind::TRANSMIT, tid),
            netns: NETNS,
            source: SERVER.0,
            source_port: SERVER.1,
            destination: CLIENT.0,
            destination_port: client_port,
            payload_bytes: 100,
            ..Packet::default()
        };
        packet.as_bytes().try_into().unwrap()
    }

    fn syn(at_ns: u64, client_port: u16) -> Raw {
        let packet = Packet {
            head: at(at_ns, kind::RECEIVE, 0),
            netns: NETNS,
            source: CLIENT.0,
            source_port: client_port,
            destination: SERVER.0,
            destination_port: SERVER.1,
            tcp_flags: SYN,
            ..Packet::default()
        };
        packet.as_bytes().try_into().unwrap()
    }

    fn call(start_ns: u64, end_ns: u64, function: u32, session: u64, returned: i32) -> Raw {
        let call = Call {
            head: at(end_ns, kind::CALL, WORKER),
            start_ns,
            session,
            function,
            returned,
            ..Call::default()
        };
        call.as_bytes().try_into().unwrap()
    }

    fn told(records: &[Raw]) -> Vec<Served> {
        witness(records, NETNS, &[443], &[WORKER, OTHER])
    }

    #[test]
    fn reads_and_what_answers_them_are_the_stamps() {
        let seen = told(&[
            syn(5, 40_000),
            read(10, WORKER, 40_000),
            read(12, WORKER, 40_000),
            sent(90, WORKER, 40_000),
            call(11, 95, function::DO_HANDSHAKE, 0xa, -1),
            read(130, WORKER, 40_000),
            call(125, 150, function::DO_HANDSHAKE, 0xa, 1),
            read(160, WORKER, 40_000),
            sent(180, WORKER, 40_000),
        ]);
        let [seen] = &seen[..] else { panic!("{seen:?}") };
        let stamps = seen.stamps;
        assert_eq!((stamps.accepted_ns, stamps.worker_tid), (0, WORKER));
        assert_eq!((stamps.first_byte_ns, stamps.flight_written_ns), (10, 90));
        assert_eq!((stamps.finished_read_ns, stamps.response_written_ns), (130, 180));
        assert_eq!(stamps.handshake_done_ns, 150);
        assert_eq!(seen.handshakes, [(11, 95), (125, 150)]);
    }

    #[test]
    fn two_connections_of_a_thread_keep_their_calls_apart() {
        let seen = told(&[
            read(10, WORKER, 40_000),
            sent(20, WORKER, 40_000),
            call(9, 25, function::DO_HANDSHAKE, 0xa, -1),
            read(30, WORKER, 40_001),
            sent(40, WORKER, 40_001),
            call(29, 45, function::DO_HANDSHAKE, 0xb, -1),
            // Touches no socket: it is known by its SSL.
            call(50, 55, function::DO_HANDSHAKE, 0xa, -1),
        ]);
        let of = |port| seen.iter().find(|each| each.stamps.remote_port == port).unwrap();
        assert_eq!(of(40_000).handshakes, [(9, 25), (50, 55)]);
        assert_eq!(of(40_001).handshakes, [(29, 45)]);
    }

    #[test]
    fn a_handshake_inside_an_accept_is_told_once() {
        let seen = told(&[
            read(10, WORKER, 40_000),
            call(8, 25, function::DO_HANDSHAKE, 0xa, 1),
            call(7, 26, function::ACCEPT, 0xa, 1),
        ]);
        assert_eq!(seen[0].handshakes, [(8, 25)]);
        assert_eq!(seen[0].stamps.outcome, Outcome::Unfinished as u8);
    }

    #[test]
    fn a_connection_that_changes_its_thread_has_no_stamps() {
        let seen = told(&[
            read(10, WORKER, 40_000),
            sent(20, WORKER, 40_000),
            read(30, OTHER, 40_000),
            sent(40, OTHER, 40_000),
        ]);
        assert_eq!(seen, []);
    }

    #[test]
    fn a_segment_that_a_bystander_sends_is_not_the_servers_work() {
        let seen = told(&[
            read(10, WORKER, 40_000),
            sent(20, WORKER, 40_000),
            sent(220, 99, 40_000),
        ]);
        assert_eq!(seen[0].stamps.flight_written_ns, 20);
    }

    #[test]
    fn a_port_used_again_is_another_connection() {
        let seen = told(&[
            syn(5, 40_000),
            read(10, WORKER, 40_000),
            sent(20, WORKER, 40_000),
            syn(100, 40_000),
            read(110, WORKER, 40_000),
            sent(120, WORKER, 40_000),
        ]);
        let firsts: Vec<_> = seen.iter().map(|each| each.stamps.first_byte_ns).collect();
        assert_eq!(firsts, [10, 110]);
    }
}
