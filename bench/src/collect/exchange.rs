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

/// What a client has read of a response, from which it knows when it has all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// More is to come.
    Part,
    /// All of it has come.
    Whole,
    /// It is not what was asked for.
    Wrong,
}

/// [`RESPONSE`] as our own servers give it, whatever stands in its header besides. `bytes` and `have` are as in [`any_response`].
#[must_use]
pub fn our_response(bytes: &[u8], have: usize) -> Reading {
    if have > bytes.len() {
        Reading::Wrong
    } else if bytes.starts_with(b"HTTP/1.1 200") && bytes.ends_with(b"\r\n\r\nOK\n") {
        Reading::Whole
    } else {
        Reading::Part
    }
}

/// A response of any server: 200, of any length. `bytes` is its begin, as far as the reader keeps it, `have` how much has come.
/// Without Content-Length it lasts until the server closes, which `is_closed` says.
#[must_use]
pub fn any_response(bytes: &[u8], have: usize, is_closed: bool) -> Reading {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut headers);
    let body = match response.parse(bytes) {
        Ok(httparse::Status::Complete(body)) => body,
        Ok(httparse::Status::Partial) if have == bytes.len() => return Reading::Part,
        // A header longer than what is kept is none of a server that is measured.
        Ok(httparse::Status::Partial) | Err(_) => return Reading::Wrong,
    };
    if response.code != Some(200) {
        return Reading::Wrong;
    }
    let length = response
        .headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.map(|header| str::from_utf8(header.value).ok()?.trim().parse::<usize>().ok());
    match length {
        Some(None) => Reading::Wrong,
        Some(Some(length)) if have - body >= length => Reading::Whole,
        None if is_closed => Reading::Whole,
        _ => Reading::Part,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_response_ends_with_its_length_or_with_the_connection() {
        let told = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc";
        let (head, whole) = (told.len() - 3, told.len());
        for (bytes, have, is_closed, reading) in [
            (&told[..10], 10, false, Reading::Part),
            (&told[..10], 10, true, Reading::Part),
            (&told[..head], head, false, Reading::Part),
            (&told[..head], head, true, Reading::Part),
            (&told[..], whole, false, Reading::Whole),
            // More has come than is kept.
            (&told[..head], whole, false, Reading::Whole),
            (b"HTTP/1.1 200 OK\r\n\r\nabc", 22, false, Reading::Part),
            (b"HTTP/1.1 200 OK\r\n\r\nabc", 22, true, Reading::Whole),
            (b"HTTP/1.1 404 Not Found\r\n\r\n", 26, true, Reading::Wrong),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
                40,
                false,
                Reading::Wrong,
            ),
            (b"220 smtp.example ESMTP\r\n", 24, false, Reading::Wrong),
        ] {
            assert_eq!(
                any_response(bytes, have, is_closed),
                reading,
                "{}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
