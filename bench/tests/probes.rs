use pqtail::collect::probes::*;
#[test]
fn loads() {
    let probes = Probes::attach(&ProbeSettings{ports: vec![4433], cpus: vec![0,1], heartbeat_ns: Some(1_000_000), ring_bytes: RING_BYTES_DEFAULT}).unwrap();
    for each in probes.status() { eprintln!("{} {} {}", each.name, each.attached, each.reason); }
}
