//! What the instance metadata service tells, on hosts whose firmware says that there is one.
//!
//! It is asked only for what a reader of the figures wants to know: type, zone, spot or not, and whether the host is about to be
//! taken.

use std::net::SocketAddr;

use super::{Finding, Root};
use crate::collect::metadata::{INTERRUPTION, Metadata, SERVICE, VENDOR};

pub(super) fn examine(root: &Root) -> Vec<Finding> {
    let vendor = root.line("sys/class/dmi/id/sys_vendor");
    if vendor.as_deref() != Some(VENDOR) {
        let found = format!(
            "not asked: the firmware names {}",
            vendor.as_deref().unwrap_or("nobody")
        );
        return vec![Finding::ok("cloud.instance", found)];
    }
    ask(SERVICE)
}

fn ask(service: SocketAddr) -> Vec<Finding> {
    let session = match Metadata::open(service) {
        Ok(session) => session,
        Err(error) => return vec![unanswered(&error.to_string())],
    };
    let word = |path: &str| match session.get(path) {
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
        interruption(session.get(INTERRUPTION).ok()),
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::collect::{
        doctor::{Level, root::fixture},
        metadata::tests::service,
    };

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
