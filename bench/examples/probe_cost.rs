//! What the probes cost here: ns per program run, records and bytes per second, CPU time of the drain.
//!
//! Run as root, with a number of loopback connections to make: `probe_cost 20000`.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    time::Instant,
};

use anyhow::Context as _;
use pqtail::{
    collect::{
        drain::Drain,
        host,
        probes::{HEARTBEAT_NS_DEFAULT, ProbeSettings, Probes, RING_BYTES_DEFAULT, kind_name},
    },
    record::stream::{Recording, StreamKind},
};
use pqtail_common::RECORD_BYTES;

fn main() -> anyhow::Result<()> {
    let connections: u32 = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "20000".to_owned())
        .parse()
        .context("the argument is a number of connections")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = std::thread::spawn(move || serve(&listener, connections * 2));

    let bare = converse(address, connections)?;
    let mut probes = Probes::attach(&ProbeSettings {
        ports: vec![address.port()],
        cpus: host::cpu_ticks().cpus.into_keys().collect(),
        heartbeat_ns: Some(HEARTBEAT_NS_DEFAULT),
        ring_bytes: RING_BYTES_DEFAULT,
        reads: false,
    })?;
    for entry in std::fs::read_dir("/proc/self/task")? {
        probes.watch_thread(entry?.file_name().to_string_lossy().parse()?)?;
    }
    let drain = Drain::start(&mut probes, None)?;
    let path = std::env::temp_dir().join(format!("probe_cost-{}.pqr", std::process::id()));
    let statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime).context("enable BPF statistics")?;
    drain.begin_trial(&path, 0)?;
    let probed = converse(address, connections)?;
    let summary = drain.end_trial()?;
    drop(statistics);
    server.join().ok().context("the server panicked")??;

    println!("{:<28} {:>10} {:>8}", "program", "runs", "ns/run");
    let mut total = std::time::Duration::ZERO;
    for (name, count, time) in probes.run_times() {
        total += time;
        println!(
            "{name:<28} {count:>10} {:>8}",
            time.as_nanos() / u128::from(count.max(1))
        );
    }
    let seconds = probed.as_secs_f64();
    println!(
        "programs: {:.1} ms of CPU a second",
        total.as_secs_f64() * 1e3 / seconds
    );
    println!(
        "records: {:.0}/s, {:.0} bytes/s on disk, drain {:.1} ms of CPU a second ({:.0} ns a record), ring {} of {}, \
         lost {:?}",
        summary.written.records as f64 / seconds,
        summary.written.bytes as f64 / seconds,
        summary.drain_cpu_ns as f64 / 1e6 / seconds,
        summary.drain_cpu_ns as f64 / summary.written.records as f64,
        summary.ring_used_bytes_max,
        summary.ring_bytes,
        summary.lost,
    );
    println!(
        "connections: {:.1} us each without probes, {:.1} us with, statistics included",
        bare.as_secs_f64() * 1e6 / f64::from(connections),
        seconds * 1e6 / f64::from(connections),
    );
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    for record in Recording::<[u8; RECORD_BYTES]>::open(&path, StreamKind::Kernel)?.records {
        *kinds.entry(kind_name(record[8])).or_default() += 1;
    }
    println!("kinds: {kinds:?}");
    std::fs::remove_file(path)?;
    Ok(())
}

fn converse(address: std::net::SocketAddr, connections: u32) -> anyhow::Result<std::time::Duration> {
    let begin = Instant::now();
    let mut response = [0; 100];
    for _ in 0..connections {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(&[1; 200])?;
        stream.read_exact(&mut response)?;
        // The server's side closes first and keeps the TIME_WAIT, so that ports do not run out.
        let _ = stream.read(&mut [0])?;
    }
    Ok(begin.elapsed())
}

fn serve(listener: &TcpListener, connections: u32) -> anyhow::Result<()> {
    let mut request = [0; 200];
    for _ in 0..connections {
        let (mut stream, _) = listener.accept()?;
        stream.read_exact(&mut request)?;
        stream.write_all(&[2; 100])?;
    }
    Ok(())
}
