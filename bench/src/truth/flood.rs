//! Floods one CPU with receive work, as a network card does whose interrupts are steered there.
//!
//! The packets go between two network namespaces that nobody else sees, over a veth pair whose receiving end hands
//! them to the flooded CPU (receive packet steering, `Documentation/networking/scaling.rst`). There they run in the
//! `NET_RX` softirq: first at the end of whatever interrupt comes, soon in `ksoftirqd`, and a thread that is pinned to
//! that CPU waits for both.
//!
//! What makes a packet dear is a socket filter, which runs in the softirq, and not its sender: it sleeps most of the
//! time. The frames are no IP, so the stack does nothing else with them and the packet probes store nothing of them.
//!
//! While a flood exists, every packet of this machine asks whether its device steers (`rps_needed`): compare a faulty
//! run only with a run that had a flood prepared too. And during a burst, packets that others send to the flooded CPU
//! queue behind those of the flood, some milliseconds of work.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use netlink_packet_route::link::{InfoData, InfoVeth};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns, unshare},
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, setsockopt, socket,
            sockopt::{SendTimeout, SndBuf},
        },
        time::TimeVal,
    },
    unistd::{gettid, write},
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};

use crate::{
    clock::now,
    collect::{
        host,
        link::with_netlink,
        worker::{pin, set_scheduler},
    },
};

/// Name of the thread that sends; while it does it has the lowest priority there is, on the CPU that is not flooded.
pub const THREAD_NAME: &str = "pq-flood";
/// Name of the sending end, in a namespace of its own.
pub const SENDER_NAME: &str = "pq-flood-tx";
/// Name of the receiving end, in another.
pub const RECEIVER_NAME: &str = "pq-flood-rx";

/// IEEE 802's first number for local experiments: no protocol of the kernel takes it.
const ETHERTYPE: u16 = 0x88b5;
/// The shortest frame that Ethernet knows, without checksum: to, from (both locally administered, of no device), type,
/// and zeros.
const FRAME: [u8; 60] = {
    let mut frame = [0; 60];
    let [high, low] = ETHERTYPE.to_be_bytes();
    (frame[0], frame[5], frame[6], frame[11]) = (2, 1, 2, 2);
    (frame[12], frame[13]) = (high, low);
    frame
};

/// What is on its way at most, counted as the kernel does: 768 bytes a frame, so 85 frames. Enough that the sender
/// may be late by the half of it, some 2 ms; a small part of the 1,000 packets that a CPU's queue takes
/// (`net.core.netdev_max_backlog`), so that nobody's packets are lost to the flood; and no more than 4 ms of work, so
/// that it ends soon after its time.
const IN_FLIGHT_BYTES: usize = 64 << 10;

/// How many sockets filter each frame. Together 50 us on an AMD EPYC of 2024.
const FILTERS: usize = 2;
/// Length of a filter. The kernel takes 4,096 instructions but charges the filter to the socket, whose limit is
/// 20,480 bytes in kernels before 6.8 (`optmem_max`), at 8 bytes each.
const FILTER_DIVISIONS: usize = 2_400;

/// A burst that ends later than its packets take has a sender that does not get its CPU.
const LATE: Duration = Duration::from_millis(10);
/// A CPU that has not worked off the flood by then is broken, not slow.
const DRAIN_MAX: Duration = Duration::from_secs(10);
/// A fraction of what a packet takes at best; it is the error of a burst's end.
const DRAIN_POLL: Duration = Duration::from_micros(100);

/// Ready to flood one CPU. It has no names in the file system, and what it set up lives with its thread and sockets:
/// all is gone when this is dropped or the process dies, whichever way.
#[derive(Debug)]
pub struct Flood {
    tid: u32,
    orders: Option<Sender<Duration>>,
    outcomes: Receiver<anyhow::Result<(u64, u64)>>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Prepares to flood `cpu` from `from_cpu`, which spends a small part of its time on it, and only what nothing
    /// else there wants. Sends nothing yet.
    ///
    /// # Errors
    /// Without root, when the two CPUs are one or not online, or when the kernel lacks veth, packet sockets or
    /// receive packet steering.
    pub fn prepare(cpu: u32, from_cpu: u32) -> anyhow::Result<Self> {
        let online = host::cpu_ticks().cpus;
        ensure!(
            cpu != from_cpu,
            "flood CPU {cpu} from itself: the sender would take what the flood should, it needs a second CPU"
        );
        for each in [cpu, from_cpu] {
            ensure!(
                online.contains_key(&each),
                "flood CPU {cpu} from CPU {from_cpu}: CPU {each} is not online"
            );
        }
        let (orders, inbox) = mpsc::channel::<Duration>();
        let (tell, outcomes) = mpsc::channel();
        let (tell_ready, ready) = mpsc::channel();
        let work = move || {
            let wire = match Wire::lay(cpu, from_cpu) {
                Ok(wire) => wire,
                Err(error) => {
                    let _ = tell_ready.send(Err(error));
                    return;
                }
            };
            let _ = tell_ready.send(Ok(gettid().as_raw().cast_unsigned()));
            for duration in inbox {
                let outcome = schedule(0, libc::SCHED_IDLE).and_then(|()| wire.flood(duration));
                if tell.send(outcome).is_err() {
                    return;
                }
            }
        };
        // Namespaces, priority and CPU belong to a thread.
        let thread = thread::Builder::new()
            .name(THREAD_NAME.to_owned())
            .spawn(work)
            .context("start the flood's thread")?;
        let mut flood = Self {
            tid: 0,
            orders: Some(orders),
            outcomes,
            thread: Some(thread),
        };
        flood.tid = ready
            .recv()
            .map_err(|_| anyhow!("the flood's thread panicked"))?
            .with_context(|| format!("prepare to flood CPU {cpu} from CPU {from_cpu}"))?;
        Ok(flood)
    }

    /// Floods for `duration` and returns when the CPU has worked off the last packet. Begin and end, `CLOCK_MONOTONIC`
    /// ns of this machine: before the first packet was sent, and when none was left.
    ///
    /// How much of the CPU it takes is for the recording to tell: all of it, less what `ksoftirqd` leaves to others,
    /// if the sender gets its few percent, and little where something else wants all of the sender's CPU.
    ///
    /// # Errors
    /// When the kernel does not take the packets, or the CPU does not work them off.
    pub fn burst(&mut self, duration: Duration) -> anyhow::Result<(u64, u64)> {
        let gone = || anyhow!("the flood's thread has ended");
        let orders = self.orders.as_ref().ok_or_else(gone)?;
        orders.send(duration).map_err(|_| gone())?;
        match self.outcomes.recv_timeout(duration + LATE) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => return Err(gone()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Something else wants all of the sender's CPU. The flood has long ended, only nobody says so, and the window
        // would grow: as a thread like any other it can look.
        schedule(self.tid, libc::SCHED_OTHER)?;
        self.outcomes.recv().map_err(|_| gone())?
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The sending end, in the hands of the flood's thread.
struct Wire {
    socket: OwnedFd,
    /// They keep the receiving namespace alive.
    _filters: Vec<OwnedFd>,
}

impl Wire {
    /// Makes both namespaces and what is in them. The calling thread stays in the sending one.
    fn lay(cpu: u32, from_cpu: u32) -> anyhow::Result<Self> {
        let receiving = enter_new_netns()?;
        let sending = enter_new_netns()?;
        with_netlink(async |netlink| {
            let far_end = LinkMessageBuilder::<LinkUnspec>::new()
                .name(RECEIVER_NAME)
                .setns_by_fd(receiving.as_raw_fd())
                .build();
            let pair = LinkMessageBuilder::<LinkVeth>::new(SENDER_NAME, RECEIVER_NAME)
                .set_info_data(InfoData::Veth(InfoVeth::Peer(far_end)))
                .build();
            netlink
                .link()
                .add(pair)
                .execute()
                .await
                .context("create a veth pair: needs CAP_NET_ADMIN and veth in the kernel (modprobe veth)")
        })?;
        enter(&receiving)?;
        let index = bring_up(RECEIVER_NAME)?;
        steer(RECEIVER_NAME, cpu)?;
        let filters = (0..FILTERS)
            .map(|_| filter(index))
            .collect::<anyhow::Result<_>>()?;
        enter(&sending)?;
        let index = bring_up(SENDER_NAME)?;
        // No protocol: it receives nothing.
        let socket = packet_socket(index, 0)?;
        // The kernel doubles it. Whoever sends beyond it sleeps until half of it has been worked off.
        setsockopt(&socket, SndBuf, &(IN_FLIGHT_BYTES / 2)).context("limit what is on its way")?;
        setsockopt(
            &socket,
            SendTimeout,
            &TimeVal::new(DRAIN_MAX.as_secs().cast_signed(), 0),
        )
        .context("limit how long a packet may wait")?;
        pin(from_cpu)?;
        Ok(Self {
            socket,
            _filters: filters,
        })
    }

    fn flood(&self, duration: Duration) -> anyhow::Result<(u64, u64)> {
        let begin_ns = now().0;
        let until_ns = begin_ns + duration.as_nanos() as u64;
        while now().0 < until_ns {
            match write(&self.socket, &FRAME) {
                Ok(_) => {}
                // Others have filled the CPU's queue: the flood is there, without this packet.
                Err(Errno::ENOBUFS) => thread::sleep(DRAIN_POLL),
                Err(Errno::EAGAIN) => bail!("the flooded CPU has taken no packet in {DRAIN_MAX:?}"),
                Err(error) => return Err(error).context("send a packet of the flood"),
            }
        }
        // A packet is charged to its sender until whoever has it last frees it: here the last filter, or whoever
        // drops it on the way (`skb_scrub_packet` keeps the owner since 4.19).
        let deadline_ns = now().0 + DRAIN_MAX.as_nanos() as u64;
        while self.in_flight_bytes()? > 0 {
            ensure!(
                now().0 < deadline_ns,
                "the flooded CPU has not worked off its packets in {DRAIN_MAX:?}"
            );
            thread::sleep(DRAIN_POLL);
        }
        Ok((begin_ns, now().0))
    }

    /// `SIOCOUTQ`: what was sent and is not freed yet, overhead included.
    fn in_flight_bytes(&self) -> anyhow::Result<i32> {
        let mut bytes = 0;
        // SAFETY: the request writes one int.
        let outcome = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        ensure!(
            outcome == 0,
            "ask what is on its way: {}",
            io::Error::last_os_error()
        );
        Ok(bytes)
    }
}

/// Leaves the calling thread in a new network namespace, and returns that.
fn enter_new_netns() -> anyhow::Result<File> {
    unshare(CloneFlags::CLONE_NEWNET).context(
        "make a network namespace: needs CAP_SYS_ADMIN, run as root; a container must allow it too",
    )?;
    // A device that comes up would announce itself to its neighbours by IPv6, which is work for the flooded CPU at a
    // time that nobody chose. Where it cannot be switched off it is only that.
    let _ = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    File::open("/proc/thread-self/ns/net").context("open the new network namespace")
}

fn enter(namespace: &File) -> anyhow::Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNET).context("enter a network namespace of the flood")
}

/// Brings a device up and returns its index.
fn bring_up(name: &str) -> anyhow::Result<u32> {
    let index = if_nametoindex(name).with_context(|| format!("look up {name}"))?;
    with_netlink(async |netlink| {
        let up = LinkUnspec::new_with_index(index).up().build();
        let request = netlink.link().set(up).execute().await;
        request.with_context(|| format!("bring {name} up: needs CAP_NET_ADMIN, run as root"))
    })?;
    Ok(index)
}

/// Lets `cpu` do the receive work of a device of this network namespace.
///
/// The setting is in sysfs only, and a sysfs shows the devices of the namespace it was mounted in: the thread mounts
/// one of its own, in a mount namespace that ends with it.
fn steer(device: &str, cpu: u32) -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace: needs CAP_SYS_ADMIN, run as root")?;
    let nothing = None::<&str>;
    mount(
        nothing,
        "/",
        nothing,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        nothing,
    )
    .context("keep the mounts of the flood's thread private")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    mount(Some("sysfs"), "/sys", Some("sysfs"), flags, nothing).context(
        "mount the sysfs of a network namespace: needs CAP_SYS_ADMIN; a container must allow it too",
    )?;
    let queues = Path::new("/sys/class/net").join(device).join("queues");
    let mut steered = 0;
    for queue in fs::read_dir(&queues).with_context(|| format!("list {}", queues.display()))? {
        let path = queue?.path().join("rps_cpus");
        // Transmit queues have none.
        if path.exists() {
            fs::write(&path, cpu_mask(cpu)).with_context(|| {
                format!(
                    "write CPU {cpu} to {}: is it isolated by the command line?",
                    path.display()
                )
            })?;
            steered += 1;
        }
    }
    ensure!(
        steered > 0,
        "{device} has no rps_cpus: this kernel has no receive packet steering (CONFIG_RPS), which the flood needs"
    );
    Ok(())
}

/// A mask of one CPU as sysfs wants it: words of 32 bits in hexadecimal, the highest first.
fn cpu_mask(cpu: u32) -> String {
    let mut mask = format!("{:x}", 1_u32 << (cpu % 32));
    for _ in 0..cpu / 32 {
        mask += ",00000000";
    }
    mask
}

/// A socket that takes each frame of a device and throws it away after a long calculation.
fn filter(index: u32) -> anyhow::Result<OwnedFd> {
    let mut program = filter_program();
    let socket = packet_socket(index, ETHERTYPE)?;
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).context("the filter is too long")?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the option is a `sock_fprog` that points at as many instructions as it says; the kernel copies them.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    ensure!(
        outcome == 0,
        "attach a socket filter of {FILTER_DIVISIONS} instructions: {}: is net.core.optmem_max below 20480?",
        io::Error::last_os_error()
    );
    Ok(socket)
}

/// Divides by one, again and again: the dearest instruction that a filter has, each waits for the one before, and the
/// quotient never gets shorter. No compiler looks at it, the kernel translates word by word.
fn filter_program() -> Vec<libc::sock_filter> {
    let instruction = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut program = vec![instruction(libc::BPF_LD | libc::BPF_IMM, u32::MAX)];
    program
        .extend((0..FILTER_DIVISIONS).map(|_| instruction(libc::BPF_ALU | libc::BPF_DIV | libc::BPF_K, 1)));
    // Keeps nothing of the frame.
    program.push(instruction(libc::BPF_RET | libc::BPF_K, 0));
    program
}

/// A packet socket at one device of this network namespace; protocol 0 is one that only sends.
fn packet_socket(index: u32, ethertype: u16) -> anyhow::Result<OwnedFd> {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)
        .context("open a packet socket: needs CAP_NET_RAW and CONFIG_PACKET, run as root")?;
    // SAFETY: plain integers, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex = index.cast_signed();
    // SAFETY: a valid address of the size that is told.
    let outcome = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    ensure!(
        outcome == 0,
        "bind a packet socket to device {index}: {}",
        io::Error::last_os_error()
    );
    Ok(socket)
}

/// Gives a thread (0 is the calling one) a policy that has no priorities: `SCHED_IDLE` runs only when nothing else
/// wants the CPU, `SCHED_OTHER` is everybody's (sched(7)).
fn schedule(tid: u32, policy: libc::c_int) -> anyhow::Result<()> {
    set_scheduler(tid, policy, 0)
        .context("set the policy of the flood's thread: leaving SCHED_IDLE needs CAP_SYS_NICE or nice 0")
}

#[cfg(test)]
mod tests {
    use super::cpu_mask;

    #[test]
    fn a_mask_has_a_word_for_each_32_cpus() {
        assert_eq!(cpu_mask(0), "1");
        assert_eq!(cpu_mask(31), "80000000");
        assert_eq!(cpu_mask(32), "1,00000000");
        assert_eq!(cpu_mask(70), "40,00000000,00000000");
    }
}
