//! The metadata service of a cloud instance: a client that is small enough to run beside a measurement.
//!
//! Only the link-local address is ever asked, with a session token (version 2 of the service).

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    thread,
    time::Duration,
};

/// Amazon's, on every instance.
pub(super) const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);

/// What the firmware of an instance with this service calls its vendor.
pub(super) const VENDOR: &str = "Amazon EC2";

/// It answers within some milliseconds where it is.
const PATIENCE: Duration = Duration::from_millis(500);

/// An answer is a word or a short JSON text.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// How long a session's token is good for, s. One that has run out is renewed.
const TOKEN_S: u32 = 600;

/// Between two looks for a notice, which comes two minutes ahead.
const NOTICE_POLL: Duration = Duration::from_secs(5);

/// Path of the notice that a spot instance will be taken; there is nothing while it will not.
pub(super) const INTERRUPTION: &str = "spot/instance-action";

/// A session with the service.
#[derive(Debug)]
pub(super) struct Metadata {
    service: SocketAddr,
    header: String,
}

impl Metadata {
    /// Begins a session.
    pub(super) fn open(service: SocketAddr) -> io::Result<Self> {
        let ttl = format!("X-aws-ec2-metadata-token-ttl-seconds: {TOKEN_S}");
        let (status, token) = request(service, "PUT", "/latest/api/token", &ttl)?;
        if status != 200 || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(io::Error::other(format!("status {status} instead of a token")));
        }
        Ok(Self {
            service,
            header: format!("X-aws-ec2-metadata-token: {token}"),
        })
    }

    /// Status and body of an item.
    pub(super) fn get(&self, path: &str) -> io::Result<(u16, String)> {
        request(
            self.service,
            "GET",
            &format!("/latest/meta-data/{path}"),
            &self.header,
        )
    }
}

/// Tells, once, that this instance will be taken; returns then, or at once where nobody could know.
pub(super) fn await_interruption(service: SocketAddr, tell: impl FnOnce(String)) {
    let Ok(mut session) = Metadata::open(service) else {
        return;
    };
    loop {
        match session.get(INTERRUPTION) {
            Ok((200, notice)) => {
                let words: Vec<&str> = notice.split_whitespace().collect();
                return tell(format!("this instance will be taken: {}", words.join(" ")));
            }
            // The token has run out.
            Ok((401, _)) => match Metadata::open(service) {
                Ok(renewed) => session = renewed,
                Err(_) => thread::sleep(NOTICE_POLL),
            },
            _ => thread::sleep(NOTICE_POLL),
        }
    }
}

/// One request over a connection of its own: status and body.
fn request(service: SocketAddr, method: &str, path: &str, header: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&service, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: {}\r\n{header}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        service.ip()
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    // A close without an orderly end still leaves what was read.
    if let Err(error) = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)
        && answer.is_empty()
    {
        return Err(error);
    }
    parse(&String::from_utf8_lossy(&answer))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP"))
}

fn parse(answer: &str) -> Option<(u16, String)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.trim().to_owned()))
}

#[cfg(test)]
pub(super) mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        net::TcpListener,
    };

    use super::*;

    /// A service on loopback that gives each request its answer, by method and path; it wants the token it gave.
    pub(in crate::collect) fn service(
        interrupted: bool,
        requests: usize,
    ) -> (SocketAddr, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let serve = move || {
            for _ in 0..requests {
                let (mut stream, _) = listener.accept().expect("a request");
                let mut lines = BufReader::new(stream.try_clone().expect("a second handle")).lines();
                let first = lines.next().expect("a line").expect("readable");
                let head: Vec<String> = lines
                    .map_while(Result::ok)
                    .take_while(|line| !line.is_empty())
                    .collect();
                let knows = head.iter().any(|line| line == "X-aws-ec2-metadata-token: secret");
                let (status, body) = match first.split(' ').nth(1).expect("a path") {
                    "/latest/api/token" if first.starts_with("PUT") => (200, "secret"),
                    _ if !knows => (401, ""),
                    "/latest/meta-data/instance-type" => (200, "c7g.large"),
                    "/latest/meta-data/placement/availability-zone" => (200, "eu-central-1a"),
                    "/latest/meta-data/instance-life-cycle" => (200, "spot"),
                    "/latest/meta-data/spot/instance-action" if interrupted => (
                        200,
                        "{\"action\": \"terminate\",\n \"time\": \"2026-01-01T00:00:00Z\"}",
                    ),
                    _ => (404, "none"),
                };
                write!(
                    stream,
                    "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                )
                .expect("answer");
            }
        };
        (address, thread::spawn(serve))
    }

    #[test]
    fn a_notice_is_told_once_and_absence_of_the_service_ends_the_watch() {
        let (address, server) = service(true, 2);
        let mut told = Vec::new();
        await_interruption(address, |words| told.push(words));
        server.join().expect("the service ends");
        assert_eq!(told.len(), 1);
        assert!(
            told[0].contains("terminate") && told[0].contains("2026-01-01"),
            "{told:?}"
        );
        // Nobody listens there any more.
        await_interruption(address, |words| panic!("{words}"));
    }
}
