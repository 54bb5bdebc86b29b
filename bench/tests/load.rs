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
        service::Service,
        tls::{Identities, Identity, expected},
    },
    plan::{
        Arm, Arrivals, Plan,
        condition::{CertificateKind, CipherSuite, Condition},
        nothing_varied, usual_quantile,
    },
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
        conditions: nothing_varied(),
        highest_quantile: usual_quantile(),
        first_stage: None,
    }
}

/// The plan's services on free ports of the moment.
fn services(plan: &Plan) -> Vec<Service> {
    let mut services = Service::of_plan(plan, 1, false).unwrap();
    let free = || std::net::TcpListener::bind((LOOPBACK, 0)).unwrap();
    let listeners: Vec<_> = services.iter().map(|_| (free(), free())).collect();
    for (service, (main, side)) in services.iter_mut().zip(&listeners) {
        service.port = main.local_addr().unwrap().port();
        service.side_port = service.side_port.map(|_| side.local_addr().unwrap().port());
    }
    services
}

struct Ran {
    outcome: TrialOutcome,
    requests: Vec<RequestStamps>,
    connections: Vec<ConnectionStamps>,
}

/// Runs the first trial of the plan; the server serves `served`, on the ports that the client uses for the plan's cells.
fn run(plan: &Plan, services: &[Service], served: Option<Vec<Service>>) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let kinds = services.iter().map(|service| service.condition.certificate);
    let identities: Identities = kinds
        .map(|kind| (kind, Identity::generate(kind).unwrap()))
        .collect();
    let certificates = identities
        .iter()
        .map(|(kind, identity)| (*kind, identity.certificate.clone()))
        .collect();
    let mut server = served.map(|services| {
        Server::start(&ServeSettings {
            address: LOOPBACK,
            services,
            cpus: vec![0],
            identities,
            faults: None,
        })
        .unwrap()
    });
    let settings = LoadSettings {
        server: LOOPBACK,
        services: services.to_vec(),
        cpus: vec![0],
        plan: plan.clone(),
        certificates: Some(certificates),
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
        let services = services(&plan);
        let ran = run(&plan, &services, Some(services.clone()));
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
            assert_eq!(request.group, expected(arm, &Condition::default()).group, "{arm}");
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
        let x25519 = expected(Arm::X25519, &Condition::default()).group;
        let hybrid = expected(Arm::X25519mlkem768, &Condition::default()).group;
        match arm {
            Arm::X25519 | Arm::HelloRetry => assert_eq!(shares, [x25519, 0], "{arm}"),
            Arm::X25519mlkem768 => assert_eq!(shares, [hybrid, 0], "{arm}"),
            Arm::PqOfferedClassicalChosen => assert_eq!(shares, [hybrid, x25519], "{arm}"),
            Arm::NoCrypto => assert_eq!(shares, [0, 0], "{arm}"),
            _ => assert_eq!(shares, [expected(arm, &Condition::default()).group, 0], "{arm}"),
        }
    }
}

/// The control must carry what the arm it stands for carries; only the signature's length varies.
#[test]
fn the_control_without_cryptography_has_the_byte_counts_of_x25519() {
    let mean = |arm: Arm| {
        let plan = plan(vec![arm]);
        let services = services(&plan);
        let requests = run(&plan, &services, Some(services.clone())).requests;
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
    let ran = run(&plan, &services(&plan), None);
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
    let services = services(&plan);
    let mut served = services.clone();
    served[0].cell.arm = Arm::X25519mlkem768;
    let ran = run(&plan, &services, Some(served));
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
    let kind = CertificateKind::EcdsaP256;
    let mut services = services(&plan(vec![Arm::X25519]));
    services[0].port = port;
    let settings = ServeSettings {
        address: LOOPBACK,
        services,
        cpus: vec![0],
        identities: [(kind, Identity::generate(kind).unwrap())].into(),
        faults: None,
    };
    let error = format!("{:#}", Server::start(&settings).unwrap_err());
    assert!(
        error.contains(&port.to_string()) && error.contains("--port"),
        "{error}"
    );
}

/// All outcomes and all requests of a trial under one condition.
fn under(condition: Condition) -> Ran {
    let mut plan = plan(vec![Arm::X25519mlkem768]);
    plan.conditions = vec![condition];
    plan.validate().unwrap();
    let services = services(&plan);
    run(&plan, &services, Some(services.clone()))
}

fn assert_all_well(ran: &Ran) {
    assert!(
        ran.outcome.outcomes.keys().eq([&Outcome::Ok]),
        "{:?}",
        ran.outcome.outcomes
    );
}

#[test]
fn responses_have_the_length_and_the_number_that_were_asked_for() {
    for (response_bytes, requests_per_connection) in [(10_000, 1), (1_000_000, 1), (3, 10), (100_000, 3)] {
        let ran = under(Condition {
            response_bytes,
            requests_per_connection,
            ..Condition::default()
        });
        assert_all_well(&ran);
        let least = response_bytes * requests_per_connection;
        assert!(ran.requests.iter().all(|request| request.bytes_in > least));
    }
}

#[test]
fn a_mix_resumes_the_share_that_was_asked_for_and_early_data_saves_a_write() {
    for (resumed, early_data) in [(0.5, false), (1.0, false), (1.0, true), (0.5, true)] {
        let ran = under(Condition {
            resumed,
            early_data,
            ..Condition::default()
        });
        assert_all_well(&ran);
        let count = |flag| {
            let with = ran.requests.iter().filter(|request| request.flags & flag != 0);
            with.count() as f64 / ran.requests.len() as f64
        };
        assert!((count(request_flag::RESUMED) - resumed).abs() < 0.25, "{resumed}");
        let early = if early_data {
            count(request_flag::RESUMED)
        } else {
            0.0
        };
        assert_eq!(count(request_flag::EARLY_DATA).to_bits(), early.to_bits());
        for request in &ran.requests {
            let is_early = request.flags & request_flag::EARLY_DATA != 0;
            assert_eq!(
                request.request_written_ns < request.handshake_done_ns,
                is_early,
                "{request:?}"
            );
        }
    }
}

#[test]
fn the_suite_and_the_certificate_are_those_of_the_condition() {
    for (cipher_suite, certificate) in [
        (CipherSuite::Chacha20Poly1305Sha256, CertificateKind::EcdsaP256),
        (CipherSuite::Aes256GcmSha384, CertificateKind::Rsa2048),
        (CipherSuite::Aes256GcmSha384, CertificateKind::MlDsa65),
    ] {
        let ran = under(Condition {
            cipher_suite,
            certificate,
            ..Condition::default()
        });
        assert_all_well(&ran);
        for request in &ran.requests {
            assert_eq!(request.cipher_suite, cipher_suite.number());
            // A certificate with its signature: ECDSA takes less than a kilobyte, RSA less than two, ML-DSA-65 more than five.
            let kilobytes = request.bytes_in / 1_000;
            match certificate {
                CertificateKind::EcdsaP256 => assert!(kilobytes < 2),
                CertificateKind::Rsa2048 => assert!((2..4).contains(&kilobytes), "{kilobytes}"),
                CertificateKind::MlDsa65 => assert!(kilobytes > 6, "{kilobytes}"),
            }
        }
    }
}

#[test]
fn connections_are_held_and_used_and_leave_no_stamps() {
    let ran = under(Condition {
        held_connections: 50,
        held_rate_hz: 200.0,
        ..Condition::default()
    });
    assert_all_well(&ran);
    assert_eq!(ran.connections.len(), ran.requests.len());
}

#[test]
fn segments_are_bounded_and_lost_as_asked() {
    let ran = under(Condition {
        mss: Some(536),
        loss: 0.2,
        ..Condition::default()
    });
    // One in five in each direction: hardly an exchange is spared a time-out.
    let slow = ran
        .requests
        .iter()
        .filter(|request| request.latency_ns() > Some(150_000_000));
    assert!(
        slow.count() * 4 > ran.requests.len(),
        "{:?}",
        ran.outcome.outcomes
    );
}

#[test]
fn what_the_server_is_told_to_compute_besides_is_found() {
    let median = |server_extra_ns| {
        let ran = under(Condition {
            server_extra_ns,
            ..Condition::default()
        });
        let mut latencies: Vec<_> = ran
            .requests
            .iter()
            .filter_map(RequestStamps::latency_ns)
            .collect();
        latencies.sort_unstable();
        latencies[latencies.len() / 2]
    };
    // So much that no machine's mood hides it.
    let extra_ns = 20_000_000;
    assert!(median(extra_ns) > median(0) + extra_ns / 2);
}
