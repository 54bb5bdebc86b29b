//! Load generator against embedded server over loopback: every arm negotiates what it must, every stage is stamped.
#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
    sync::atomic::AtomicBool,
};

use pqtail::{
    collect::{
        load::{Load, LoadSettings, TrialOutcome},
        serve::{ServeSettings, Server},
        tls::{Identity, expected},
    },
    plan::{Arm, Arrivals, Plan},
    record::{
        stamps::{ConnectionStamps, Outcome, RequestStamps, request_flag},
        stream::{Recording, StreamKind},
    },
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn plan(arms: Vec<Arm>) -> Plan {
    Plan {
        scenario: "test".to_owned(),
        arms,
        trials_per_arm: 1,
        rate_hz: 100.0,
        duration_ns: 400_000_000,
        warmup_ns: 50_000_000,
        arrivals: Arrivals::Poisson,
        seed: 3,
        timeout_ns: 5_000_000_000,
        probes: false,
    }
}

/// Free ports of the moment, one per arm.
fn free_ports(arms: &[Arm]) -> Vec<(Arm, u16)> {
    let listeners: Vec<_> = arms
        .iter()
        .map(|_| std::net::TcpListener::bind((LOOPBACK, 0)).unwrap())
        .collect();
    arms.iter()
        .zip(&listeners)
        .map(|(&arm, listener)| (arm, listener.local_addr().unwrap().port()))
        .collect()
}

struct Ran {
    outcome: TrialOutcome,
    requests: Vec<RequestStamps>,
    connections: Vec<ConnectionStamps>,
}

/// Runs the first trial of the plan; the server serves `served`, on the ports that the client uses for `plan.arms`.
fn run(plan: &Plan, ports: &[(Arm, u16)], served: Option<Vec<(Arm, u16)>>) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::generate().unwrap();
    let certificate = identity.certificate.clone();
    let mut server = served.map(|ports| {
        Server::start(&ServeSettings {
            address: LOOPBACK,
            ports,
            cpus: vec![0],
            identity,
            faults: None,
        })
        .unwrap()
    });
    let settings = LoadSettings {
        server: LOOPBACK,
        ports: ports.to_vec(),
        cpus: vec![0],
        plan: plan.clone(),
        certificate: Some(certificate),
    };
    let mut load = Load::start(settings).unwrap();
    let (requests, connections) = (folder.path().join("r.pqr"), folder.path().join("c.pqr"));
    if let Some(server) = &mut server {
        server.begin_trial(&connections, 0).unwrap();
    }
    let trial = plan.trials()[0];
    let outcome = load
        .run_trial(&trial, &requests, &AtomicBool::new(false), &mut |_| {})
        .unwrap();
    let connections = server.map_or(Vec::new(), |mut server| {
        server.end_trial().unwrap();
        Recording::open(&connections, StreamKind::Connections)
            .unwrap()
            .records
    });
    Ran {
        outcome,
        requests: Recording::open(&requests, StreamKind::Requests).unwrap().records,
        connections,
    }
}

#[test]
fn every_arm_negotiates_what_it_must_and_stamps_every_stage() {
    for arm in Arm::ALL {
        let plan = plan(vec![arm]);
        let ports = free_ports(&plan.arms);
        let ran = run(&plan, &ports, Some(ports.clone()));
        let planned = plan.trials()[0].arrivals_ns(&plan).len() as u64;
        assert_eq!(ran.outcome.outcomes, [(Outcome::Ok, planned)].into(), "{arm}");
        let by_port: HashMap<u16, &ConnectionStamps> = ran
            .connections
            .iter()
            .map(|connection| (connection.remote_port, connection))
            .collect();
        for request in &ran.requests {
            let order = [
                request.intended_ns,
                request.start_ns,
                request.connected_ns,
                request.client_hello_written_ns,
                request.first_server_byte_ns,
                request.handshake_done_ns,
                request.request_written_ns,
                request.first_response_byte_ns,
                request.done_ns,
                request.closed_ns,
            ];
            assert!(order[0] > 0 && order.is_sorted(), "{arm}: {request:?}");
            assert_eq!(request.group, expected(arm).group, "{arm}");
            assert_eq!(
                request.flags & request_flag::HELLO_RETRY != 0,
                arm == Arm::HelloRetry,
                "{arm}"
            );
            let connection = by_port[&request.local_port];
            assert_eq!(
                (connection.bytes_in, connection.bytes_out),
                (request.bytes_out, request.bytes_in),
                "{arm}"
            );
            let order = [
                connection.accepted_ns,
                connection.first_byte_ns,
                connection.flight_written_ns,
                connection.finished_read_ns,
                connection.request_read_ns,
                connection.response_written_ns,
                connection.closed_ns,
            ];
            assert!(order[0] > 0 && order.is_sorted(), "{arm}: {connection:?}");
        }
        let shares = ran.requests[0].offered_shares;
        let x25519 = expected(Arm::X25519).group;
        let hybrid = expected(Arm::X25519mlkem768).group;
        match arm {
            Arm::X25519 | Arm::HelloRetry => assert_eq!(shares, [x25519, 0], "{arm}"),
            Arm::X25519mlkem768 => assert_eq!(shares, [hybrid, 0], "{arm}"),
            Arm::PqOfferedClassicalChosen => assert_eq!(shares, [hybrid, x25519], "{arm}"),
            Arm::NoCrypto => assert_eq!(shares, [0, 0], "{arm}"),
            _ => assert_eq!(shares, [expected(arm).group, 0], "{arm}"),
        }
    }
}

/// The control must carry what the arm it stands for carries; only the signature's length varies.
#[test]
fn the_control_without_cryptography_has_the_byte_counts_of_x25519() {
    let mean = |arm: Arm| {
        let plan = plan(vec![arm]);
        let ports = free_ports(&plan.arms);
        let requests = run(&plan, &ports, Some(ports.clone())).requests;
        let sum = |of: fn(&RequestStamps) -> u32| requests.iter().map(|r| f64::from(of(r))).sum::<f64>();
        let count = requests.len() as f64;
        (sum(|r| r.bytes_out) / count, sum(|r| r.bytes_in) / count)
    };
    let (tls, plain) = (mean(Arm::X25519), mean(Arm::NoCrypto));
    assert!(
        (tls.0 - plain.0).abs() < 1.0 && (tls.1 - plain.1).abs() < 4.0,
        "{tls:?} against {plain:?}"
    );
}

#[test]
fn without_a_server_every_request_is_refused() {
    let plan = plan(vec![Arm::X25519]);
    let ran = run(&plan, &free_ports(&plan.arms), None);
    assert_eq!(
        ran.outcome.outcomes.into_keys().collect::<Vec<_>>(),
        [Outcome::Refused]
    );
    assert!(
        ran.requests
            .iter()
            .all(|request| request.errno == nix::errno::Errno::ECONNREFUSED as u16)
    );
}

#[test]
fn another_group_than_the_arms_is_never_a_sample() {
    // The client offers both shares and expects X25519; a server of the hybrid arm takes the hybrid one.
    let plan = plan(vec![Arm::PqOfferedClassicalChosen]);
    let ports = free_ports(&plan.arms);
    let ran = run(&plan, &ports, Some(vec![(Arm::X25519mlkem768, ports[0].1)]));
    assert_eq!(
        ran.outcome.outcomes.into_keys().collect::<Vec<_>>(),
        [Outcome::WrongGroup]
    );
    assert!(ran.requests.iter().all(|request| request.latency_ns().is_none()));
}

#[test]
fn a_taken_port_is_named_with_a_remedy() {
    let taken = std::net::TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let identity = Identity::generate().unwrap();
    let settings = ServeSettings {
        address: LOOPBACK,
        ports: vec![(Arm::X25519, port)],
        cpus: vec![0],
        identity,
        faults: None,
    };
    let error = format!("{:#}", Server::start(&settings).unwrap_err());
    assert!(
        error.contains(&port.to_string()) && error.contains("--port"),
        "{error}"
    );
}
