//! User-space stamps: one fixed-size record per request (client) and per connection (server).
//!
//! All times are `CLOCK_MONOTONIC` ns of the host that stamped them; 0 means the stage was not reached.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::TIME_NS_MAX;

/// The client's record of one request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct RequestStamps {
    /// When the arrival process wanted it to start; latency counts from here.
    pub intended_ns: u64,
    /// When the worker began with it; service time counts from here.
    pub start_ns: u64,
    /// `connect` is over: the worker noticed the SYN-ACK.
    pub connected_ns: u64,
    /// The write of the first ClientHello has returned.
    pub client_hello_written_ns: u64,
    /// The first read that returned bytes of the server.
    pub first_server_byte_ns: u64,
    /// The client's side of the handshake is complete: it holds the server's verified Finished.
    pub handshake_done_ns: u64,
    /// The write that carried the client's Finished and the first request has returned; with early data the one of the ClientHello.
    pub request_written_ns: u64,
    /// The first read that completed with bytes of the response.
    pub first_response_byte_ns: u64,
    /// The whole response is here; latency ends here.
    pub done_ns: u64,
    /// The socket is closed.
    pub closed_ns: u64,
    /// Number of the request within its trial, from 0, in order of intended starts.
    pub request: u32,
    /// Thread that did all of it.
    pub worker_tid: u32,
    /// Bytes written to the socket.
    pub bytes_out: u32,
    /// Bytes read from the socket.
    pub bytes_in: u32,
    /// Client address, as in [`pqtail_common::Packet`].
    pub local: u32,
    /// Server address, as in [`pqtail_common::Packet`].
    pub remote: u32,
    /// Client port, 0 if none was bound yet.
    pub local_port: u16,
    /// Server port.
    pub remote_port: u16,
    /// Negotiated group (IANA TLS supported groups), 0 if none.
    pub group: u16,
    /// Groups for which the first ClientHello carried a share, as parsed from the bytes that were sent; 0 fills up.
    pub offered_shares: [u16; 2],
    /// Negotiated cipher suite (IANA), 0 if none.
    pub cipher_suite: u16,
    /// Bits of [`request_flag`].
    pub flags: u8,
    /// An [`Outcome`] as a number.
    pub outcome: u8,
    /// `errno` of the failing call, 0 if none.
    pub errno: u16,
}

/// Bits of [`RequestStamps::flags`].
pub mod request_flag {
    /// Sent during the warm-up: recorded, not counted.
    pub const WARMUP: u8 = 1;
    /// The handshake resumed an earlier session.
    pub const RESUMED: u8 = 2;
    /// Early data was accepted.
    pub const EARLY_DATA: u8 = 4;
    /// The server answered with a HelloRetryRequest.
    pub const HELLO_RETRY: u8 = 8;
}

/// How a request ended.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Never finished: the recording ends before it.
    #[default]
    Unfinished = 0,
    /// The whole response arrived over the expected group.
    Ok = 1,
    /// Not done within the plan's time-out.
    Timeout = 2,
    /// The peer reset the connection.
    Reset = 3,
    /// The connection was refused.
    Refused = 4,
    /// No free local port (`EADDRNOTAVAIL`).
    NoPort = 5,
    /// The peer closed before the response was complete.
    Closed = 6,
    /// The handshake failed in TLS.
    Tls = 7,
    /// The negotiated group, HelloRetryRequest or resumption is not the arm's.
    WrongGroup = 8,
    /// The response is not the expected one.
    WrongResponse = 9,
    /// Any other error of the operating system; see `errno`.
    Os = 10,
}

impl Outcome {
    /// Every outcome, by its number.
    pub const ALL: [Self; 11] = [
        Self::Unfinished,
        Self::Ok,
        Self::Timeout,
        Self::Reset,
        Self::Refused,
        Self::NoPort,
        Self::Closed,
        Self::Tls,
        Self::WrongGroup,
        Self::WrongResponse,
        Self::Os,
    ];

    /// The outcome with this number; an unknown number (a newer writer) is [`Outcome::Os`].
    #[must_use]
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Os)
    }
}

impl RequestStamps {
    /// How the request ended.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome::from_number(self.outcome)
    }

    /// Whether every time is one that a clock can show.
    #[must_use]
    pub fn is_believable(&self) -> bool {
        let times = [
            self.intended_ns,
            self.start_ns,
            self.connected_ns,
            self.client_hello_written_ns,
            self.first_server_byte_ns,
            self.handshake_done_ns,
            self.request_written_ns,
            self.first_response_byte_ns,
            self.done_ns,
            self.closed_ns,
        ];
        times.iter().all(|&ns| ns < TIME_NS_MAX)
    }

    /// Whether the request counts: not a warm-up.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.flags & request_flag::WARMUP == 0
    }

    /// Latency from the intended start, ns; `None` unless the request is [`Outcome::Ok`].
    #[must_use]
    pub fn latency_ns(&self) -> Option<u64> {
        (self.outcome() == Outcome::Ok).then(|| self.done_ns.saturating_sub(self.intended_ns))
    }

    /// Time from the actual start, ns; `None` unless the request is [`Outcome::Ok`].
    #[must_use]
    pub fn service_ns(&self) -> Option<u64> {
        (self.outcome() == Outcome::Ok).then(|| self.done_ns.saturating_sub(self.start_ns))
    }
}

/// The embedded server's record of one connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ConnectionStamps {
    /// `accept` has returned.
    pub accepted_ns: u64,
    /// The first read that returned bytes of the client.
    pub first_byte_ns: u64,
    /// The ClientHello is processed and the write of the server's flight has returned.
    pub flight_written_ns: u64,
    /// The client's Finished is read and processed: the handshake is complete.
    pub handshake_done_ns: u64,
    /// The whole request is read.
    pub request_read_ns: u64,
    /// The write of the response has returned.
    pub response_written_ns: u64,
    /// The socket is closed.
    pub closed_ns: u64,
    /// Begin of the read that completed the client's Finished: the task is on the thread from here.
    pub finished_read_ns: u64,
    /// Thread that did all of it.
    pub worker_tid: u32,
    /// Server address, as in [`pqtail_common::Packet`].
    pub local: u32,
    /// Client address, as in [`pqtail_common::Packet`].
    pub remote: u32,
    /// Bytes written to the socket.
    pub bytes_out: u32,
    /// Bytes read from the socket.
    pub bytes_in: u32,
    /// Server port.
    pub local_port: u16,
    /// Client port.
    pub remote_port: u16,
    /// Negotiated group, 0 if none.
    pub group: u16,
    /// Negotiated cipher suite, 0 if none.
    pub cipher_suite: u16,
    /// An [`Outcome`] as a number.
    pub outcome: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

impl ConnectionStamps {
    /// Whether every time is one that a clock can show.
    #[must_use]
    pub fn is_believable(&self) -> bool {
        let times = [
            self.accepted_ns,
            self.first_byte_ns,
            self.flight_written_ns,
            self.handshake_done_ns,
            self.request_read_ns,
            self.response_written_ns,
            self.closed_ns,
            self.finished_read_ns,
        ];
        times.iter().all(|&ns| ns < TIME_NS_MAX)
    }
}

const _: () = assert!(size_of::<RequestStamps>() == 120);
const _: () = assert!(size_of::<ConnectionStamps>() == 96);
