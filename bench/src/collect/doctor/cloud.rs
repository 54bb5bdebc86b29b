//! What the instance metadata service tells, on hosts whose firmware says that there is one.
//!
//! Only the link-local address is ever asked, with a session token (version 2 of the service), and only for what a reader of
//! the figures wants to know: type, zone, spot or not, and whether the host is about to be taken.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use super::{Finding, Root};

/// Amazon's, on every instance.
const SERVICE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);

/// It answers within some milliseconds where it is.
const PATIENCE: Duration = Duration::from_millis(500);

/// An answer is a word or a short JSON text.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

pub(super) fn examine(root: &Root) -> Vec<Finding> {
    let vendor = root.line("sys/class/dmi/id/sys_vendor");
    if vendor.as_deref() != Some("Amazon EC2") {
        let found = format!(
            "not asked: the firmware names {}",
            vendor.as_deref().unwrap_or("nobody")
        );
        return vec![Finding::ok("cloud.instance", found)];
    }
    ask(SERVICE)
}

fn ask(service: SocketAddr) -> Vec<Finding> {
    let token = request(
        service,
        "PUT",
        "/latest/api/token",
        "X-aws-ec2-metadata-token-ttl-seconds: 60",
    );
    let token = match token {
        Ok((200, token)) if token.bytes().all(|byte| byte.is_ascii_graphic()) => token,
        Ok((status, _)) => return vec![unanswered(&format!("status {status} instead of a token"))],
        Err(error) => return vec![unanswered(&error.to_string())],
    };
    let header = format!("X-aws-ec2-metadata-token: {token}");
    let get = |path: &str| request(service, "GET", &format!("/latest/meta-data/{path}"), &header);
    let word = |path: &str| match get(path) {
        Ok((200, word)) => word,
        _ => "unknown".to_owned(),
    };
    let found = format!(
        "{} in {}, {}",
        word("instance-type"),
        word("placement/availability-zone"),
        word("instance-life-cycle")
    );
    vec![
        Finding::ok("cloud.instance", found),
        interruption(get("spot/instance-action").ok()),
    ]
}

fn unanswered(reason: &str) -> Finding {
    Finding::note(
        "cloud.instance",
        format!("unknown: the metadata service does not answer: {reason}"),
        "a notice that the instance will be taken cannot be seen",
        "allow the metadata service on the instance, with tokens required",
    )
}

/// `answer`: status and body; 404 is how the service says that there is none.
fn interruption(answer: Option<(u16, String)>) -> Finding {
    let rule = "cloud.interruption";
    match answer {
        Some((404, _)) => Finding::ok(rule, "no notice"),
        Some((200, notice)) => Finding::fail(
            rule,
            notice.split_whitespace().collect::<Vec<_>>().join(" "),
            "the instance will be taken within two minutes",
            "run on another one",
        ),
        _ => Finding::unknown(rule, "the metadata service"),
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
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        net::TcpListener,
        thread,
    };

    use super::*;
    use crate::collect::doctor::{Level, root::fixture};

    /// A service on loopback that gives each request its answer, by method and path; it wants the token it gave.
    fn service(interrupted: bool, requests: usize) -> (SocketAddr, thread::JoinHandle<()>) {
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
    fn an_instance_tells_type_zone_and_life_cycle_to_who_has_a_token() {
        let (address, server) = service(false, 5);
        let findings = ask(address);
        server.join().expect("the service ends");
        assert_eq!(findings[0].found, "c7g.large in eu-central-1a, spot");
        assert_eq!(findings[1], Finding::ok("cloud.interruption", "no notice"));
    }

    #[test]
    fn an_instance_about_to_be_taken_fails() {
        let (address, server) = service(true, 5);
        let findings = ask(address);
        server.join().expect("the service ends");
        assert_eq!(findings[1].level, Level::Fail);
        assert!(findings[1].found.contains("terminate"), "{findings:?}");
    }

    #[test]
    fn a_service_that_is_absent_is_said_and_elsewhere_nobody_is_asked() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        assert!(ask(address)[0].found.contains("does not answer"));
        let (_folder, root) = fixture(&[("sys/class/dmi/id/sys_vendor", "QEMU\n")]);
        assert_eq!(examine(&root)[0].found, "not asked: the firmware names QEMU");
    }
}
