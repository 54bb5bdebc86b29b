//! The least that a TLS 1.3 handshake with a GET costs on rustls and aws-lc-rs: blocking loops without stamps, the
//! yardstick of `bench/compare-peers.sh`.
//!
//! Both sides take their TLS configuration from pqtail itself, so that only the loops differ. Each prints one line of JSON.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Parser;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use pqtail::{
    collect::{
        exchange::{BODY, READ_BYTES, REQUEST, Reading, read_response, response},
        tls::{Identity, client_config, server_configs, server_name},
    },
    plan::{
        Arm,
        condition::{CertificateKind, Condition},
    },
};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

#[derive(Parser)]
enum Role {
    /// Makes a certificate for the others: PREFIX.json for pqtail and the bare loops, PREFIX.pem for foreign clients
    Identity { prefix: PathBuf },
    /// Makes one connection after another
    Load {
        #[command(flatten)]
        common: Common,
        /// Connections to make
        #[arg(long)]
        count: u64,
        /// Starts per second, as far as the one before has ended; without it, as fast as possible
        #[arg(long)]
        rate: Option<f64>,
    },
    /// Serves one connection after another until stdin ends
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
    /// What `identity` has made
    #[arg(long)]
    identity: PathBuf,
}

fn main() -> anyhow::Result<()> {
    match Role::parse() {
        Role::Identity { prefix } => make_identity(&prefix),
        Role::Load { common, count, rate } => load(&common, count, rate),
        Role::Serve { common } => serve(&common),
    }
}

fn make_identity(prefix: &std::path::Path) -> anyhow::Result<()> {
    let identity = Identity::generate(CertificateKind::EcdsaP256)?;
    fs::write(prefix.with_extension("json"), serde_json::to_vec(&identity)?)?;
    let pem = base64_pem(&identity.certificate);
    fs::write(prefix.with_extension("pem"), pem)?;
    Ok(())
}

/// RFC 7468: base64 in lines of 64 characters.
fn base64_pem(der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in der.chunks(48) {
        for group in line.chunks(3) {
            let bits =
                group.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
            for digit in 0..4 {
                let value = (bits >> (18 - 6 * digit)) as usize & 63;
                text.push(if digit <= group.len() {
                    DIGITS[value] as char
                } else {
                    '='
                });
            }
        }
        text.push('\n');
    }
    text.push_str("-----END CERTIFICATE-----\n");
    text
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

fn print_cost(handshakes: u64, cpu_us: i64) {
    let line = serde_json::json!({
        "handshakes": handshakes,
        "cpu_us_per_handshake": cpu_us as f64 / handshakes.max(1) as f64,
    });
    println!("{line}");
}

fn load(common: &Common, count: u64, rate: Option<f64>) -> anyhow::Result<()> {
    let identity = read_identity(&common.identity)?;
    let config = client_config(
        common.arm,
        &Condition::default(),
        Some(&identity.certificate),
        None,
    )?
    .context("this arm has no TLS")?;
    let before = cpu_us()?;
    let begin = Instant::now();
    for number in 0..count {
        if let Some(rate) = rate {
            let due = begin + Duration::from_secs_f64(number as f64 / rate);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        get(common.address, Arc::clone(&config))?;
    }
    print_cost(count, cpu_us()? - before);
    Ok(())
}

fn get(address: SocketAddr, config: Arc<ClientConfig>) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut tls = ClientConnection::new(config, server_name())?;
    // The request goes out with the Finished.
    tls.writer().write_all(REQUEST)?;
    while tls.is_handshaking() {
        while tls.wants_write() {
            tls.write_tls(&mut stream)?;
        }
        if tls.read_tls(&mut stream)? == 0 {
            bail!("the server closed during the handshake");
        }
        tls.process_new_packets()?;
    }
    while tls.wants_write() {
        tls.write_tls(&mut stream)?;
    }
    let mut response = [0; 512];
    let mut have = 0;
    while tls.read_tls(&mut stream)? > 0 {
        let state = tls.process_new_packets()?;
        let plain = state.plaintext_bytes_to_read();
        tls.reader().read_exact(&mut response[have..have + plain])?;
        have += plain;
    }
    if read_response(&response[..have], have, true, Some(BODY.len() as u32)) != Reading::Whole {
        bail!("another response than expected");
    }
    Ok(())
}

fn serve(common: &Common) -> anyhow::Result<()> {
    let identity = read_identity(&common.identity)?;
    let [config, _] =
        server_configs(common.arm, &Condition::default(), &identity)?.context("this arm has no TLS")?;
    let listener = TcpListener::bind(common.address)?;
    let handshakes = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&handshakes);
    thread::spawn(move || {
        for stream in listener.incoming() {
            // A connection that a foreign client breaks off is no handshake, and no reason to end.
            let Ok(stream) = stream else { continue };
            if answer(stream, Arc::clone(&config)).is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let before = cpu_us()?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    print_cost(handshakes.load(Ordering::Relaxed), cpu_us()? - before);
    Ok(())
}

fn answer(mut stream: TcpStream, config: Arc<ServerConfig>) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut tls = ServerConnection::new(config)?;
    let mut request = [0; READ_BYTES];
    let mut have = 0;
    while !request[..have].ends_with(b"\r\n\r\n") {
        if tls.read_tls(&mut stream)? == 0 {
            bail!("the client closed before its request");
        }
        let state = tls.process_new_packets()?;
        let plain = state.plaintext_bytes_to_read();
        tls.reader().read_exact(&mut request[have..have + plain])?;
        have += plain;
        while tls.wants_write() {
            tls.write_tls(&mut stream)?;
        }
    }
    tls.writer().write_all(&response(BODY.len() as u32, true))?;
    tls.send_close_notify();
    while tls.wants_write() {
        tls.write_tls(&mut stream)?;
    }
    Ok(())
}
