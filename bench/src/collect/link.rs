//! Two hosts on one machine: each end is a process in a network namespace of its own, joined by one veth pair.
//!
//! The namespaces have no name. The kernel removes them, and the link with them, when the last process inside has
//! gone, however it went: there is nothing to clean up, not even after a SIGKILL of everything.
//!
//! The order: [`spawn`] the server end and the client end; the client end calls [`join`] with the server end's pid,
//! the server end calls [`configure`], which waits for that. The client may connect once `configure` has returned.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    os::unix::process::parent_id,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use netlink_packet_route::link::{InfoData, InfoVeth};
use nix::{
    errno::Errno,
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns, unshare},
};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth};

use super::child;

/// Address of the client's end.
pub const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// Address of the server's end.
pub const SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// Length of the link's network prefix: two hosts.
pub const PREFIX: u8 = 30;
/// Name of the client's end, seen only in the client's namespace.
pub const CLIENT_NAME: &str = "pq-client";
/// Name of the server's end, seen only in the server's namespace.
pub const SERVER_NAME: &str = "pq-server";

/// How long [`configure`] waits for the other end to make the link. The other end only has to start.
const LINK_WAIT_MAX: Duration = Duration::from_secs(10);
const LINK_POLL: Duration = Duration::from_millis(2);
/// Every namespace is born with its loopback device at this index.
const LOOPBACK_INDEX: u32 = 1;

/// Lets `command` start in a fresh network namespace and die with the *thread* that spawns it: spawn from one that outlives the
/// run.
pub fn in_new_netns(command: &mut Command) {
    let before_exec = || Ok(unshare(CloneFlags::CLONE_NEWNET)?);
    // SAFETY: one system call, and an error built from its number.
    unsafe { child::tie(command, before_exec) };
}

/// Starts `command` as one end: [`in_new_netns`], with an error that says what is missing.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`, without network namespaces in the kernel, or if the program cannot start.
pub fn spawn(command: &mut Command) -> anyhow::Result<Child> {
    in_new_netns(command);
    command.spawn().with_context(|| {
        format!(
            "start {} in a new network namespace: needs CAP_SYS_ADMIN, run as root; a container must allow it too",
            command.get_program().display()
        )
    })
}

/// Does something inside the network namespace of a process, in a thread that is left behind there and ends.
///
/// # Errors
/// When the process is gone, without `CAP_SYS_ADMIN`, or what it does fails.
pub fn inside<T: Send>(pid: u32, action: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    let namespace = format!("/proc/{pid}/ns/net");
    let namespace = fs::File::open(&namespace)
        .with_context(|| format!("open {namespace}: does the process live? run as root"))?;
    thread::scope(|scope| {
        let inside = || {
            setns(&namespace, CloneFlags::CLONE_NEWNET).with_context(|| {
                format!("enter the network namespace of process {pid}: needs CAP_SYS_ADMIN, run as root")
            })?;
            action()
        };
        match scope.spawn(inside).join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// In the client end's process: makes the link to the namespace of `peer_pid` and brings this end up as `local`.
///
/// One request creates both ends where they belong, so no other namespace ever sees them.
///
/// # Errors
/// In the parent's namespace (see [`in_new_netns`]), without `CAP_NET_ADMIN` or veth, or if `peer_pid` is gone.
pub fn join(peer_pid: u32, local: Ipv4Addr, prefix: u8) -> anyhow::Result<()> {
    require_own_netns()?;
    with_netlink(async |netlink| {
        let far_end = LinkMessageBuilder::<LinkUnspec>::new()
            .name(SERVER_NAME)
            .setns_by_pid(peer_pid)
            .build();
        let pair = LinkMessageBuilder::<LinkVeth>::new(CLIENT_NAME, SERVER_NAME)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(far_end)))
            .build();
        netlink.link().add(pair).execute().await.map_err(|error| {
            let remedy = match errno(&error) {
                Some(Errno::EPERM | Errno::EACCES) => "needs CAP_NET_ADMIN in both ends' namespaces, run as root",
                Some(Errno::EOPNOTSUPP) => "this kernel has no veth: modprobe veth",
                Some(Errno::ESRCH | Errno::EINVAL) => "the other end's process is gone, its output says why",
                Some(Errno::EEXIST) => "the link is there already: join once",
                _ => "run as root, with veth in the kernel (modprobe veth)",
            };
            anyhow::Error::new(error).context(format!(
                "create the link {CLIENT_NAME} to {SERVER_NAME} in the namespace of process {peer_pid}: {remedy}"
            ))
        })?;
        bring_up(&netlink, CLIENT_NAME, local, prefix).await
    })
}

/// In the server end's process: waits until the other end has made the link, then brings this end up as `local`.
///
/// # Errors
/// In the parent's namespace (see [`in_new_netns`]), without `CAP_NET_ADMIN`, or if no link appears in time.
pub fn configure(local: Ipv4Addr, prefix: u8) -> anyhow::Result<()> {
    require_own_netns()?;
    configure_shared(local, prefix)
}

/// The same in the machine's own namespace, where a server runs that is not ours. All that is done to it is this one device, which
/// goes with the client's end.
///
/// # Errors
/// Without `CAP_NET_ADMIN`, or if no link appears in time.
pub fn configure_shared(local: Ipv4Addr, prefix: u8) -> anyhow::Result<()> {
    let deadline = Instant::now() + LINK_WAIT_MAX;
    while if_nametoindex(SERVER_NAME).is_err() {
        ensure!(
            Instant::now() < deadline,
            "no link {SERVER_NAME} within {} s: the client's end did not make it, its output says why",
            LINK_WAIT_MAX.as_secs()
        );
        thread::sleep(LINK_POLL);
    }
    with_netlink(async |netlink| bring_up(&netlink, SERVER_NAME, local, prefix).await)
}

/// Gives this namespace the ports that thousands of connections a minute need.
///
/// A closed connection holds its port for 60 s of TIME-WAIT (`TCP_TIMEWAIT_LEN`, a constant of the kernel; the
/// FIN timeout does not change it). The default range of 28,232 ports then ends at 470 connections/s. The wide range
/// ends at 1,075; beyond, `tcp_tw_reuse` lets a new connection take such a port after one second, which timestamps
/// make safe (RFC 6191).
///
/// # Errors
/// In the parent's namespace, whose settings are not ours to change, and where `/proc/sys` is read-only.
pub fn widen_ports() -> anyhow::Result<()> {
    require_own_netns()?;
    for (name, value) in [
        ("ip_local_port_range", "1024 65535"),
        ("tcp_timestamps", "1"),
        ("tcp_tw_reuse", "1"),
    ] {
        let path = format!("/proc/sys/net/ipv4/{name}");
        fs::write(&path, value)
            .with_context(|| format!("write '{value}' to {path}: needs root and a writable /proc"))?;
    }
    Ok(())
}

/// Guards the machine's own network: everything here changes the namespace it runs in.
fn require_own_netns() -> anyhow::Result<()> {
    let netns = |process: &str| {
        let path = format!("/proc/{process}/ns/net");
        fs::read_link(&path).with_context(|| format!("read {path}: run as root"))
    };
    if netns("thread-self")? == netns(&parent_id().to_string())? {
        bail!("this process shares its parent's network namespace: start it by `link::in_new_netns`");
    }
    Ok(())
}

async fn bring_up(netlink: &Handle, name: &str, local: Ipv4Addr, prefix: u8) -> anyhow::Result<()> {
    let index = if_nametoindex(name).with_context(|| format!("look up {name}"))?;
    netlink
        .address()
        .add(index, IpAddr::V4(local), prefix)
        .execute()
        .await
        .with_context(|| {
            format!("give {name} the address {local}/{prefix}: needs CAP_NET_ADMIN, run as root")
        })?;
    for (name, index) in [("lo", LOOPBACK_INDEX), (name, index)] {
        let up = LinkUnspec::new_with_index(index).up().build();
        netlink
            .link()
            .set(up)
            .execute()
            .await
            .with_context(|| format!("bring {name} up: needs CAP_NET_ADMIN, run as root"))?;
    }
    Ok(())
}

/// Runs `work` with a netlink socket of the calling thread's namespace.
pub(crate) fn with_netlink(work: impl AsyncFnOnce(Handle) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("start a runtime for netlink")?;
    runtime.block_on(async {
        let (connection, netlink, _) = rtnetlink::new_connection().context("open a netlink socket")?;
        tokio::spawn(connection);
        work(netlink).await
    })
}

fn errno(error: &rtnetlink::Error) -> Option<Errno> {
    let rtnetlink::Error::NetlinkError(message) = error else {
        return None;
    };
    Some(Errno::from_raw(-message.raw_code()))
}
