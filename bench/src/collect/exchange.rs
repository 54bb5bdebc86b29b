//! What both ends agree on beyond TLS: the request, the response, and the byte counts of the control without cryptography.

use std::io::{self, Read as _};

use rustls::{ClientConnection, ConnectionCommon, SideData};

/// The last request of every connection, and the only one if it has one.
pub const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: pqtail.test\r\nConnection: close\r\n\r\n";

/// Any request before it.
pub const REQUEST_BEFORE: &[u8] = b"GET / HTTP/1.1\r\nHost: pqtail.test\r\nConnection: keep-alive\r\n\r\n";

/// The response to a request with so many bytes of body, of which the last three are `OK` and a line feed.
#[must_use]
pub fn response(body_bytes: u32, is_last: bool) -> Vec<u8> {
    let connection = if is_last { "close" } else { "keep-alive" };
    let mut response = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {body_bytes}\r\nConnection: {connection}\r\n\r\n"
    );
    response += &body(body_bytes);
    response.into_bytes()
}

/// The shortest body.
pub const BODY: &str = "OK\n";

/// A body of so many bytes, which ends in the shortest.
#[must_use]
pub fn body(bytes: u32) -> String {
    ".".repeat((bytes as usize).saturating_sub(BODY.len())) + BODY
}

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

/// A response of any server: 200, of any length. `bytes` is its begin, as far as the reader keeps it, `have` how much has come.
/// Without Content-Length it lasts until the server closes, which `is_closed` says. A server of ours has a body of `body_bytes`.
#[must_use]
pub fn read_response(bytes: &[u8], have: usize, is_closed: bool, body_bytes: Option<u32>) -> Reading {
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
        length if body_bytes.is_some_and(|bytes| length != Some(Some(bytes as usize))) => Reading::Wrong,
        Some(Some(length)) if have - body >= length => Reading::Whole,
        None if is_closed => Reading::Whole,
        _ => Reading::Part,
    }
}

/// Takes all plain bytes out of TLS, keeps the first of them, and counts them all; whether the server has said that these are all.
pub(super) fn drain(tls: &mut ClientConnection, kept: &mut [u8], have: &mut usize) -> io::Result<bool> {
    let mut rest = [0; 4096];
    loop {
        let free = kept.get_mut(*have..).unwrap_or_default();
        let into = if free.is_empty() { &mut rest[..] } else { free };
        match tls.reader().read(into) {
            Ok(0) => return Ok(true),
            Ok(plain) => *have += plain,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // Closed without saying so, as many servers do.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(true),
            Err(error) => return Err(error),
        }
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
    fn a_response_of_ours_has_the_body_that_was_asked_for() {
        for bytes in [3, 1_000] {
            let response = response(bytes, true);
            let read = |body| read_response(&response, response.len(), false, Some(body));
            assert_eq!(read(bytes), Reading::Whole);
            assert_eq!(read(bytes + 1), Reading::Wrong);
        }
    }

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
                read_response(bytes, have, is_closed, None),
                reading,
                "{}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
