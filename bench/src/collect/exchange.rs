//! What both ends agree on beyond TLS: the request, the response, and the byte counts of the control without cryptography.

use std::io;

use rustls::{ConnectionCommon, SideData};

/// The request of every connection.
pub const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: pqtail.test\r\nConnection: close\r\n\r\n";

/// The response to it, with its 3-byte body.
pub const RESPONSE: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nOK\n";

/// Most that one read takes in: more than the largest flight.
pub const READ_BYTES: usize = 16 * 1024;

/// Flights of the arm `x25519` in bytes, which the arm `no-crypto` imitates. A certificate is DER, so its signature's length
/// varies by a byte or two; these are the common lengths.
pub mod plain_bytes {
    /// ClientHello.
    pub const CLIENT_HELLO: usize = 220;
    /// ServerHello to Finished.
    pub const SERVER_FLIGHT: usize = 665;
    /// Finished and request.
    pub const FINISHED_AND_REQUEST: usize = 158;
    /// Response and close_notify.
    pub const RESPONSE: usize = 132;
}

/// Whether this is the whole of the expected response.
#[must_use]
pub fn is_whole_response(bytes: &[u8]) -> bool {
    bytes.starts_with(b"HTTP/1.1 200") && bytes.ends_with(b"\r\n\r\nOK\n")
}

/// Hands received bytes to TLS; whether it took them.
pub(super) fn process<Side: SideData>(
    tls: &mut ConnectionCommon<Side>,
    mut bytes: &[u8],
) -> io::Result<bool> {
    while !bytes.is_empty() {
        tls.read_tls(&mut bytes)?;
        if tls.process_new_packets().is_err() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Puts all that TLS has to send into `out`, in place of what was there.
pub(super) fn take_out<Side: SideData>(
    tls: &mut ConnectionCommon<Side>,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    out.clear();
    while tls.wants_write() {
        tls.write_tls(out)?;
    }
    Ok(())
}
