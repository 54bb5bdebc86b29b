//! pqtail's own load generator or server alone, without probes, for `bench/compare-peers.sh`.
//!
//! Each prints one line of JSON: what a handshake with its GET cost the whole process.

use std::{fs, io::Read as _, net::SocketAddr, path::PathBuf, sync::atomic::AtomicBool};

use anyhow::Context as _;
use clap::Parser;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use pqtail::{
    collect::{
        load::{Load, LoadSettings},
        serve::{ServeSettings, Server},
        service::Service,
        tls::Identity,
    },
    plan::{
        Arm, Arrivals, Cell, Plan,
        condition::{CertificateKind, Condition},
        nothing_varied, usual_quantile,
    },
    record::{
        stamps::{ConnectionStamps, Outcome},
        stream::{Recording, StreamKind},
    },
};

/// Of a request, ns.
const TIMEOUT_NS: u64 = 5_000_000_000;

#[derive(Parser)]
enum Role {
    /// Runs one trial against any server that answers as pqtail's does
    Load {
        #[command(flatten)]
        common: Common,
        /// Requests to plan; Poisson arrivals make it a few more or less
        #[arg(long)]
        count: u64,
        /// Intended starts per second
        #[arg(long, default_value_t = 1000.0)]
        rate: f64,
    },
    /// Serves until stdin ends
    Serve {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(clap::Args)]
struct Common {
    #[arg(long)]
    arm: Arm,
    /// Address of the server
    #[arg(long)]
    address: SocketAddr,
    /// What `bare_rustls identity` has made
    #[arg(long)]
    identity: PathBuf,
    /// CPU of the worker
    #[arg(long)]
    cpu: u32,
}

fn main() -> anyhow::Result<()> {
    match Role::parse() {
        Role::Load { common, count, rate } => load(&common, count, rate),
        Role::Serve { common } => serve(&common),
    }
}

fn read_identity(path: &std::path::Path) -> anyhow::Result<Identity> {
    let bytes = fs::read(path).with_context(|| {
        format!(
            "read the identity {}: `bare_rustls identity` makes one",
            path.display()
        )
    })?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// CPU time of this process, user and system, us.
fn cpu_us() -> anyhow::Result<i64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    Ok(usage.user_time().num_microseconds() + usage.system_time().num_microseconds())
}

fn print_cost(handshakes: u64, others: u64, cpu_us: i64, worker_ns: u64) {
    let per_handshake = |us: f64| us / handshakes.max(1) as f64;
    let line = serde_json::json!({
        "handshakes": handshakes,
        "failed": others,
        "cpu_us_per_handshake": per_handshake(cpu_us as f64),
        "worker_us_per_handshake": per_handshake(worker_ns as f64 / 1e3),
    });
    println!("{line}");
}

fn load(common: &Common, count: u64, rate: f64) -> anyhow::Result<()> {
    let identity = read_identity(&common.identity)?;
    let plan = Plan {
        scenario: "load-once".to_owned(),
        arms: vec![common.arm],
        trials_per_arm: 1,
        rate_hz: rate,
        duration_ns: (count as f64 / rate * 1e9) as u64,
        warmup_ns: 0,
        arrivals: Arrivals::Poisson,
        seed: 1,
        timeout_ns: TIMEOUT_NS,
        probes: false,
        conditions: nothing_varied(),
        highest_quantile: usual_quantile(),
        first_stage: None,
    };
    plan.validate()?;
    let trial = plan.trials()[0];
    let mut load = Load::start(LoadSettings {
        server: common.address.ip(),
        services: vec![service(common)],
        cpus: vec![common.cpu],
        plan,
        certificates: Some([(CertificateKind::EcdsaP256, identity.certificate)].into()),
    })?;
    let recording = recording_path("load");
    let before = cpu_us()?;
    let outcome = load.run_trial(&trial, &recording, &AtomicBool::new(false), &mut |_| {})?;
    let spent = cpu_us()? - before;
    fs::remove_file(recording)?;
    let ended: u64 = outcome.outcomes.values().sum();
    let good = outcome.outcomes.get(&Outcome::Ok).copied().unwrap_or(0);
    print_cost(good, ended - good, spent, outcome.cpu_ns);
    Ok(())
}

fn service(common: &Common) -> Service {
    Service {
        cell: Cell {
            condition: 0,
            arm: common.arm,
        },
        condition: Condition::default(),
        port: common.address.port(),
        side_port: None,
    }
}

fn serve(common: &Common) -> anyhow::Result<()> {
    let mut server = Server::start(&ServeSettings {
        address: common.address.ip(),
        services: vec![service(common)],
        cpus: vec![common.cpu],
        identities: [(CertificateKind::EcdsaP256, read_identity(&common.identity)?)].into(),
        faults: None,
    })?;
    let recording = recording_path("serve");
    let before = cpu_us()?;
    server.begin_trial(&recording, 0)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let (_, worker_ns) = server.end_trial()?;
    let spent = cpu_us()? - before;
    let connections = Recording::<ConnectionStamps>::open(&recording, StreamKind::Connections)?.records;
    fs::remove_file(recording)?;
    let good = connections
        .iter()
        .filter(|connection| connection.response_written_ns > 0)
        .count() as u64;
    print_cost(good, connections.len() as u64 - good, spent, worker_ns);
    Ok(())
}

fn recording_path(role: &str) -> PathBuf {
    std::env::temp_dir().join(format!("load_once-{role}-{}.pqr", std::process::id()))
}
