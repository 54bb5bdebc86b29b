//! Much of one thing. Nothing here is timed: what grows with the square of its input would not end in minutes.

use pqtail_common::{Head, Loss, Span, kind};

use super::check;
use crate::{
    analyze::told::{ACK, Fault, SYN, Story, TRIAL, manifest},
    attribute::ledger::Side,
};

const MANY: u32 = 100_000;

fn told() -> Story {
    let mut told = Story::default();
    told.request(Fault::default());
    told.ports = 1;
    told
}

fn analyze(told: &Story) {
    check(manifest(), |manifest| told.recorded(manifest, TRIAL));
}

/// A second request, over all that was told since `begin`.
fn ask(told: &mut Story, begin: u64) {
    let mut request = told.requests[0];
    request.request = 1;
    request.local_port = told.port();
    (request.intended_ns, request.start_ns, request.done_ns) = (begin, begin, told.now);
    told.requests.push(request);
}

/// The last request again, so often, each under its own number.
fn claim(told: &mut Story, times: u32) {
    let last = *told.requests.last().unwrap();
    told.requests.extend((1..times).map(|number| {
        let mut claim = last;
        claim.request = last.request + number;
        claim
    }));
}

#[test]
fn packets_of_one_connection_that_turns_with_each() {
    let mut told = told();
    let begin = told.now;
    told.cross(true, SYN, 0, 0);
    told.cross(false, SYN | ACK, 0, 0);
    for number in 0..MANY / 2 {
        told.cross(true, ACK, 1 + number * 10, 10);
        told.cross(false, ACK, 1 + number * 10, 10);
    }
    ask(&mut told, begin);
    analyze(&told);
}

#[test]
fn packets_of_one_flight_that_come_in_backwards() {
    let mut told = told();
    let begin = told.now;
    told.cross(true, SYN, 0, 0);
    told.cross(false, SYN | ACK, 0, 0);
    for number in 0..MANY {
        told.packet(Side::Client, kind::TRANSMIT, true, ACK, 1 + number * 10, 10);
    }
    for number in (0..MANY).rev() {
        told.pass(10);
        told.packet(Side::Server, kind::RECEIVE, true, ACK, 1 + number * 10, 10);
    }
    ask(&mut told, begin);
    claim(&mut told, 1_000);
    analyze(&told);
}

#[test]
fn connections_of_one_tuple_and_requests_that_all_claim_them() {
    let mut told = told();
    let begin = told.now;
    for _ in 0..MANY {
        told.sequence = told.sequence.wrapping_add(1);
        told.cross(true, SYN, 0, 0);
    }
    ask(&mut told, begin);
    claim(&mut told, MANY);
    let connection = told.connections[0];
    told.connections
        .extend(std::iter::repeat_n(connection, MANY as usize));
    analyze(&told);
}

#[test]
fn spans_that_overlap_and_losses_everywhere() {
    let mut told = told();
    let begin = told.now;
    for number in 0..MANY {
        told.pass(10);
        let head = told.head(Side::Server, kind::SOFTIRQ);
        let span = Span {
            head,
            start_ns: begin,
            number,
            ..Span::default()
        };
        told.store(Side::Server, &span);
        let loss = Loss {
            head: Head {
                kind: kind::LOSS,
                ..head
            },
            start_ns: head.at_ns - 5,
            ..Loss::default()
        };
        told.store(Side::Server, &loss);
    }
    told.request(Fault::default());
    claim(&mut told, MANY);
    analyze(&told);
}

#[test]
fn requests_to_every_port_there_is() {
    let mut told = told();
    for port in 0..=u16::MAX {
        let mut request = told.requests[0];
        request.request = 1 + u32::from(port);
        request.remote_port = port;
        told.requests.push(request);
    }
    for _ in 0..MANY / 2 {
        told.cross(true, ACK, 1, 10);
    }
    analyze(&told);
}
