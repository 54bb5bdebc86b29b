//! The interface towards the peer, and the settings of TCP that bound a rate.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use super::{Finding, Questions, Root, root};
use crate::collect::{host, serve};

/// `TCP_TIMEWAIT_LEN` (include/net/tcp.h, v6.12), a constant of the kernel.
const TIME_WAIT_S: f64 = 60.0;

pub(super) fn examine(root: &Root, chosen: &[u32], questions: &Questions) -> Vec<Finding> {
    let sysctl = |name: &str| root.line(&format!("proc/sys/net/{name}"));
    let mut findings = Vec::new();
    if let Some(peer) = questions.peer {
        match interface_towards(peer) {
            Some(interface) => findings.extend(of_interface(root, &interface, chosen)),
            None => findings.push(Finding::warn(
                "net.interface",
                format!("no interface leads to {peer}"),
                "the peer cannot be reached from here",
                "check the address and the routes",
            )),
        }
    }
    let processes = root.processes();
    findings.extend([
        irqbalance(processes.iter().any(|(_, name)| name == "irqbalance")),
        congestion_control(sysctl("ipv4/tcp_congestion_control").as_deref()),
        ports(
            sysctl("ipv4/ip_local_port_range").as_deref(),
            sysctl("ipv4/ip_local_reserved_ports").as_deref(),
            sysctl("ipv4/tcp_tw_reuse").as_deref(),
            sysctl("ipv4/tcp_timestamps").as_deref(),
            questions.rate_hz,
        ),
        backlog(sysctl("core/somaxconn").as_deref()),
    ]);
    findings
}

/// A datagram socket that is connected chooses its own address by the routes, and sends nothing.
fn interface_towards(peer: IpAddr) -> Option<String> {
    let any: SocketAddr = match peer {
        IpAddr::V4(_) => "0.0.0.0:0".parse().ok()?,
        IpAddr::V6(_) => "[::]:0".parse().ok()?,
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect((peer, 9)).ok()?;
    let own = socket.local_addr().ok()?.ip();
    nix::ifaddrs::getifaddrs().ok()?.find_map(|interface| {
        let address = interface.address?;
        let ip = address
            .as_sockaddr_in()
            .map(|v4| IpAddr::V4(v4.ip()))
            .or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
        (ip == own).then_some(interface.interface_name)
    })
}

fn of_interface(root: &Root, name: &str, chosen: &[u32]) -> Vec<Finding> {
    let folder = format!("sys/class/net/{name}");
    if !root.path(&folder).exists() {
        return vec![Finding::unknown(
            "net.interface",
            &format!("/{folder}, as where /sys belongs to another network namespace,"),
        )];
    }
    let read = |file: &str| root.line(&format!("{folder}/{file}"));
    let driver = std::fs::read_link(root.path(&format!("{folder}/device/driver")))
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .unwrap_or_else(|| "no device driver".to_owned());
    let mut findings = vec![Finding::ok(
        "net.interface",
        format!(
            "{name}, {driver}, MTU {}, speed {}",
            read("mtu").unwrap_or_else(|| "unknown".to_owned()),
            read("speed").map_or_else(|| "unknown".to_owned(), |mbit| format!("{mbit} Mbit/s")),
        ),
    )];
    let queues = root.names(&format!("{folder}/queues"));
    let of = |kind: &str| queues.iter().filter(|queue| queue.starts_with(kind)).count();
    findings.push(judge_queues(of("rx-"), of("tx-"), chosen.len()));
    let masks = |kind: &str, file: &str| {
        queues
            .iter()
            .filter(|queue| queue.starts_with(kind))
            .filter_map(|queue| read(&format!("queues/{queue}/{file}")))
            .any(|mask| mask.chars().any(|digit| !matches!(digit, '0' | ',')))
    };
    findings.push(steering(masks("rx-", "rps_cpus"), masks("tx-", "xps_cpus")));
    findings.push(interrupts(&interrupt_cpus(root, name), chosen));
    findings.push(offloads(
        read("gro_flush_timeout").as_deref(),
        read("napi_defer_hard_irqs").as_deref(),
        read("threaded").as_deref(),
    ));
    findings
}

fn judge_queues(receive: usize, transmit: usize, cpus: usize) -> Finding {
    let rule = "net.queues";
    let found = format!("{receive} to receive, {transmit} to transmit, for {cpus} CPUs");
    match receive {
        0 => Finding::unknown(rule, "/sys/class/net/*/queues"),
        1 if cpus > 1 => Finding::note(
            rule,
            found,
            "one CPU takes in the segments of all, and its softirqs delay what runs there",
            "keep that CPU apart from the measured ones, or take an instance with more queues",
        ),
        _ => Finding::ok(rule, found),
    }
}

fn steering(receive: bool, transmit: bool) -> Finding {
    let rule = "net.steering";
    let word = |on: bool| if on { "on" } else { "off" };
    let found = format!("RPS {}, XPS {}", word(receive), word(transmit));
    if !receive {
        return Finding::ok(rule, found);
    }
    Finding::note(
        rule,
        found,
        "segments cross from one CPU to another by an interrupt before TCP has them",
        "expect inter-processor interrupts in the ledgers, or clear rps_cpus",
    )
}

/// The interface's interrupts with the CPUs that take them.
fn interrupt_cpus(root: &Root, name: &str) -> Vec<(u32, Vec<u32>)> {
    let device = root.path(&format!("sys/class/net/{name}/device"));
    // A virtio device has its interrupts at the PCI device above it.
    let device = std::fs::canonicalize(&device).unwrap_or(device);
    let mut numbers: Vec<u32> = [Some(device.as_path()), device.parent()]
        .into_iter()
        .flatten()
        .flat_map(|folder| root::names(&folder.join("msi_irqs")))
        .filter_map(|number| number.parse().ok())
        .collect();
    let table = root.text("proc/interrupts").unwrap_or_default();
    let named = host::interrupt_names(&table).into_iter().filter(|(_, title)| {
        title
            .split(|c: char| !c.is_alphanumeric())
            .any(|word| word == name)
    });
    numbers.extend(named.map(|(number, _)| number));
    numbers.sort_unstable();
    numbers.dedup();
    numbers
        .into_iter()
        .filter_map(|number| {
            let folder = format!("proc/irq/{number}");
            let list = root
                .line(&format!("{folder}/effective_affinity_list"))
                .or_else(|| root.line(&format!("{folder}/smp_affinity_list")))?;
            Some((number, host::cpus_of_list(&list)))
        })
        .collect()
}

fn interrupts(of_interface: &[(u32, Vec<u32>)], chosen: &[u32]) -> Finding {
    let rule = "net.interrupts";
    let mut cpus: Vec<u32> = of_interface.iter().flat_map(|(_, cpus)| cpus.clone()).collect();
    cpus.sort_unstable();
    cpus.dedup();
    if of_interface.is_empty() {
        return Finding::note(
            rule,
            "unknown: no interrupt carries the interface's name",
            "which CPU takes in its segments is only seen from the records",
            "look for softirqs in the ledgers",
        );
    }
    let found = format!("{} interrupts on CPUs {}", of_interface.len(), host::list(&cpus));
    if cpus.iter().any(|cpu| chosen.contains(cpu)) {
        Finding::note(
            rule,
            found,
            "the chosen CPUs take the interface's interrupts, which delay what is measured there",
            "move them with /proc/irq/*/smp_affinity_list if there are CPUs to spare",
        )
    } else {
        Finding::ok(rule, found)
    }
}

fn offloads(flush_ns: Option<&str>, deferred: Option<&str>, threaded: Option<&str>) -> Finding {
    let rule = "net.offloads";
    let (Some(flush_ns), Some(deferred)) = (flush_ns, deferred) else {
        return Finding::unknown(rule, "/sys/class/net/*/gro_flush_timeout");
    };
    let threaded = threaded.unwrap_or("unknown");
    let found = format!(
        "GRO flush {flush_ns} ns, {deferred} interrupts deferred, NAPI in threads {threaded}; segmentation offloads are not \
         told by /sys"
    );
    if flush_ns == "0" && deferred == "0" {
        return Finding::ok(rule, found);
    }
    Finding::note(
        rule,
        found,
        "segments wait for others before TCP has them, which counts as network",
        "set gro_flush_timeout and napi_defer_hard_irqs to 0, or compare only hosts alike",
    )
}

fn irqbalance(running: bool) -> Finding {
    if running {
        return Finding::note(
            "net.irqbalance",
            "running",
            "interrupts may move to the chosen CPUs in the middle of a run",
            "stop it for the time of the run",
        );
    }
    Finding::ok("net.irqbalance", "not running")
}

fn congestion_control(name: Option<&str>) -> Finding {
    let rule = "tcp.congestion_control";
    match name {
        None => Finding::unknown(rule, "net.ipv4.tcp_congestion_control"),
        Some(name) if name.starts_with("bbr") => Finding::note(
            rule,
            name,
            "it paces: a flight of several segments leaves with pauses between them, by a timer",
            "compare only hosts with the same one; both must be named with the figures",
        ),
        Some(name) => Finding::ok(rule, name),
    }
}

/// How many connections a second the local ports allow to one port of the peer.
fn ports(
    range: Option<&str>,
    reserved: Option<&str>,
    reuse: Option<&str>,
    timestamps: Option<&str>,
    rate_hz: Option<f64>,
) -> Finding {
    let rule = "tcp.ports";
    let bounds: Vec<u32> = range
        .unwrap_or_default()
        .split_ascii_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let [first, last] = bounds[..] else {
        return Finding::unknown(rule, "net.ipv4.ip_local_port_range");
    };
    let taken = host::cpus_of_list(reserved.unwrap_or_default())
        .into_iter()
        .filter(|port| (first..=last).contains(port))
        .count();
    let count = (last + 1).saturating_sub(first) as usize - taken;
    let held_hz = count as f64 / TIME_WAIT_S;
    let timestamped = timestamps.is_none_or(|value| value != "0");
    let reused = reuse == Some("1") && timestamped;
    let asked = rate_hz.map_or_else(String::new, |hz| format!("; asked: {hz:.0}/s"));
    let found = format!(
        "{count} ports: {held_hz:.0} connections/s while each is held for {TIME_WAIT_S:.0} s, tcp_tw_reuse {}, timestamps \
         {}{asked}",
        reuse.unwrap_or("unknown"),
        timestamps.unwrap_or("unknown"),
    );
    match rate_hz {
        Some(hz) if hz > held_hz && !reused => Finding::warn(
            rule,
            found,
            "where the client closes first, ports run out in the first minute and requests fail",
            "widen net.ipv4.ip_local_port_range, and set tcp_tw_reuse and tcp_timestamps to 1",
        ),
        Some(hz) if hz > held_hz => Finding::note(
            rule,
            found,
            "above that rate a port is taken again after a second, and the search for one costs CPU time",
            "widen net.ipv4.ip_local_port_range if it shows as compute",
        ),
        _ => Finding::ok(rule, found),
    }
}

fn backlog(somaxconn: Option<&str>) -> Finding {
    let rule = "tcp.somaxconn";
    match somaxconn.and_then(|value| value.parse::<u32>().ok()) {
        None => Finding::unknown(rule, "net.core.somaxconn"),
        Some(most) if most < serve::BACKLOG => Finding::note(
            rule,
            format!("{most}, and the server asks for {}", serve::BACKLOG),
            "a burst longer than that is dropped at the listener, and its connections take a second more",
            "raise net.core.somaxconn",
        ),
        Some(most) => Finding::ok(rule, format!("{most}; the server asks for {}", serve::BACKLOG)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::doctor::{Level, root::fixture};

    #[test]
    fn ports_bound_the_rate_by_time_wait() {
        let of = |reuse, rate| ports(Some("32768\t60999"), None, Some(reuse), Some("1"), Some(rate));
        let fits = of("0", 470.0);
        assert_eq!(fits.level, Level::Ok);
        assert!(fits.found.contains("28232 ports: 471 connections/s"), "{fits:?}");
        assert_eq!(of("0", 471.0).level, Level::Warn);
        assert_eq!(of("2", 471.0).level, Level::Warn);
        assert_eq!(of("1", 471.0).level, Level::Note);
        let without_stamps = ports(Some("32768 60999"), None, Some("1"), Some("0"), Some(471.0));
        assert_eq!(without_stamps.level, Level::Warn);
        let reserved = ports(Some("1024 65535"), Some("8443-8444,80"), None, None, None);
        assert!(reserved.found.starts_with("64510 ports"), "{reserved:?}");
        assert!(ports(None, None, None, None, Some(1.0)).found.contains("unknown"));
    }

    #[test]
    fn a_short_accept_queue_is_told() {
        assert_eq!(backlog(Some("128")).level, Level::Note);
        assert_eq!(backlog(Some("4096")).level, Level::Ok);
        assert!(backlog(None).found.contains("unknown"));
    }

    #[test]
    fn an_interface_tells_queues_steering_and_interrupts() {
        let (_folder, root) = fixture(&[
            ("sys/class/net/ens5/mtu", "9001\n"),
            ("sys/class/net/ens5/queues/rx-0/rps_cpus", "00000000,00000003\n"),
            ("sys/class/net/ens5/queues/rx-1/rps_cpus", "0\n"),
            ("sys/class/net/ens5/queues/tx-0/xps_cpus", "0\n"),
            ("sys/class/net/ens5/gro_flush_timeout", "0\n"),
            ("sys/class/net/ens5/napi_defer_hard_irqs", "0\n"),
            (
                "proc/interrupts",
                "     CPU0 CPU1\n 24:   1   2   PCI-MSIX-0   0-edge   ens5-Tx-Rx-0\n 25:  3  4  PCI  1-edge  ens50\n",
            ),
            ("proc/irq/24/effective_affinity_list", "1\n"),
            ("proc/irq/25/effective_affinity_list", "0\n"),
        ]);
        let findings = of_interface(&root, "ens5", &[0, 1]);
        let of = |rule: &str| findings.iter().find(|each| each.rule == rule).expect("a finding");
        assert!(of("net.interface").found.contains("MTU 9001, speed unknown"));
        assert!(of("net.queues").found.starts_with("2 to receive, 1 to transmit"));
        assert_eq!(of("net.steering").found, "RPS on, XPS off");
        assert_eq!(of("net.interrupts").found, "1 interrupts on CPUs 1");
        assert_eq!(of("net.interrupts").level, Level::Note);
        assert_eq!(of("net.offloads").level, Level::Ok);
        assert_eq!(interrupts(&[(24, vec![3])], &[0, 1]).level, Level::Ok);
        assert!(of_interface(&root, "gone", &[0])[0].found.contains("unknown"));
    }

    #[test]
    fn the_loopback_address_is_reached_by_the_loopback_interface() {
        let peer = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
        assert_eq!(interface_towards(peer).as_deref(), Some("lo"));
    }

    #[test]
    fn pacing_and_a_balancer_are_notes() {
        assert_eq!(congestion_control(Some("bbr")).level, Level::Note);
        assert_eq!(congestion_control(Some("cubic")).level, Level::Ok);
        assert_eq!(irqbalance(true).level, Level::Note);
    }
}
