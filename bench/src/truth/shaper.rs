//! Slows one direction of the link down, as a narrow line would: a token bucket before the device, changed in place.
//!
//! The qdisc is the kernel's `tbf` (net/sched/sch_tbf.c, read at v6.12), told by netlink. A segment that waits in it
//! has passed `net_dev_queue` already: its `TRANSMIT` record is from before the wait, and the time
//! between that record and its `RECEIVE` is the qdisc's, as it would be the line's.
//!
//! The bucket holds one full segment, slow or fast. After each change it is full, so the first segment passes at
//! once, and so does one after a pause: what waits is what follows. A larger bucket while fast would let segments of
//! many KB into the queue that a small one can never pay for. So, while it is attached, the sender offloads no
//! segmentation: compare a faulty run only with a run that had the shaper attached too.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
    tc::{TcAttribute, TcHandle, TcMessage, TcOption, TcStats2},
};
use nix::{
    errno::Errno,
    net::if_::if_nametoindex,
    sys::{
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
            sockopt::ReceiveTimeout,
        },
        time::TimeVal,
    },
};
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};
use zerocopy::{Immutable, IntoBytes};

use crate::collect::link;

const KIND: &str = "tbf";
/// Any that no other qdisc of the device has; the default one has none.
const HANDLE: TcHandle = TcHandle {
    major: 0x7071,
    minor: 0,
};

/// Attributes of the qdisc and what its headers count (linux/pkt_sched.h).
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
/// Bytes on the wire are bytes of the frame: no table of the cost of ATM cells, which the kernel would ask for.
const TC_LINKLAYER_ETHERNET: u8 = 1;

/// So fast that the kernel's fixed point makes every packet's price 0 ns: nothing waits.
const FAST_BYTES_PER_S: u64 = 1_000_000_000_000_000;
/// More than the sockets of a run can hold, so nothing is dropped.
const LIMIT_BYTES: u32 = 1 << 30;
/// A frame is the device's MTU and this.
const ETHERNET_HEADER_BYTES: u32 = 14;

/// The kernel answers before `send` returns.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// A part of a dump of a few devices; the kernel cuts a dump at 32 KB.
const ANSWER_BYTES: usize = 32 << 10;
/// More than a frame takes at the least rate.
const DRAIN_MAX: Duration = Duration::from_secs(5);
const DRAIN_POLL: Duration = Duration::from_micros(200);

/// Of linux/pkt_sched.h, as is the next.
#[repr(C)]
#[derive(Default, IntoBytes, Immutable)]
struct TcRatespec {
    cell_log: u8,
    linklayer: u8,
    overhead: u16,
    cell_align: i16,
    mpu: u16,
    /// Bytes per second.
    rate: u32,
}

#[repr(C)]
#[derive(Default, IntoBytes, Immutable)]
struct TcTbfQopt {
    rate: TcRatespec,
    peakrate: TcRatespec,
    limit: u32,
    buffer: u32,
    mtu: u32,
}

/// A token bucket at one end of the link. It goes when this is dropped, but not when the process dies: then it stays,
/// at the rate it had, until its network namespace goes.
///
/// It keeps the network namespace alive, and the link in it.
#[derive(Debug)]
pub struct Shaper {
    netlink: Netlink,
    device: Device,
}

#[derive(Debug)]
struct Device {
    name: String,
    index: u32,
    /// Size of the bucket: one full frame.
    burst_bytes: u32,
}

impl Shaper {
    /// Attaches before `device`, an end of the link, in the network namespace of process (or thread) `pid`. It shapes
    /// what this end sends, and delays nothing before the first [`Shaper::slow`].
    ///
    /// Attach before the traffic begins and drop after it has ended: while a qdisc is exchanged for another, what the
    /// device is asked to send is lost (`dev_deactivate`).
    ///
    /// # Errors
    /// Without root, when the process or its device is gone, when another qdisc is attached there already, or when the
    /// kernel has no `sch_tbf`.
    pub fn attach(pid: u32, device: &str) -> anyhow::Result<Self> {
        // Its socket stays in there.
        link::inside(pid, || Self::attach_here(device))
            .with_context(|| format!("shape {device} of process {pid}"))
    }

    fn attach_here(name: &str) -> anyhow::Result<Self> {
        let index = if_nametoindex(name).context("no such device there: join the link first")?;
        let mut netlink = Netlink::open()?;
        let device = Device {
            name: name.to_owned(),
            index,
            burst_bytes: netlink.mtu(index)? + ETHERNET_HEADER_BYTES,
        };
        let added = netlink.ask(
            RouteNetlinkMessage::NewQueueDiscipline(device.bucket(FAST_BYTES_PER_S)),
            NLM_F_CREATE | NLM_F_EXCL,
        );
        added.map_err(|refusal| {
            let remedy = match refusal.downcast_ref::<Errno>() {
                Some(Errno::ENOENT) => "this kernel has no sch_tbf: modprobe sch_tbf (CONFIG_NET_SCH_TBF)",
                Some(Errno::EEXIST) => "another qdisc is attached there: one shaper a device",
                Some(Errno::EPERM) => "needs CAP_NET_ADMIN in that namespace, run as root",
                _ => "the kernel refuses a token bucket",
            };
            refusal.context(remedy)
        })?;
        Ok(Self { netlink, device })
    }

    /// From now on the device sends at most this many bytes per second, Ethernet headers included, and one full frame
    /// at once. Nothing that is queued is lost.
    ///
    /// # Errors
    /// For a rate at which one frame takes more than a second, or when the namespace's device is gone.
    pub fn slow(&mut self, rate_bytes_per_s: u64) -> anyhow::Result<()> {
        let least = u64::from(self.device.burst_bytes);
        ensure!(
            rate_bytes_per_s >= least,
            "slow {} down to {rate_bytes_per_s} bytes/s: a frame would take more than a second, take {least} at least",
            self.device.name
        );
        self.change(rate_bytes_per_s)
    }

    /// Delays nothing any more. Returns when what was queued has been sent, in order: after the time of one frame at
    /// the old rate at most, or with the next segment if that is sooner.
    ///
    /// # Errors
    /// When the namespace's device is gone, or the queue does not drain.
    pub fn fast(&mut self) -> anyhow::Result<()> {
        self.change(FAST_BYTES_PER_S)?;
        // A queue that waits for its tokens waits on: the change leaves its timer, and a frame of ours that would get
        // it going would do that on our CPU. Segments then reach the receiver by two CPUs' queues, and the later ones
        // may be first. The timer fires on the CPU that sent last, so nothing overtakes.
        let deadline = Instant::now() + DRAIN_MAX;
        while self.queued_packets()? > 0 {
            ensure!(
                Instant::now() < deadline,
                "the queue of {} has not drained in {DRAIN_MAX:?}",
                self.device.name
            );
            thread::sleep(DRAIN_POLL);
        }
        Ok(())
    }

    /// Packets that wait in the bucket's queue.
    ///
    /// # Errors
    /// When the bucket is gone.
    pub fn queued_packets(&mut self) -> anyhow::Result<u32> {
        self.statistics().map(|queue| queue.qlen)
    }

    /// Packets that the bucket has dropped since it was attached; they were too many or too long.
    ///
    /// # Errors
    /// When the bucket is gone.
    pub fn dropped_packets(&mut self) -> anyhow::Result<u32> {
        self.statistics().map(|queue| queue.drops)
    }

    fn change(&mut self, rate_bytes_per_s: u64) -> anyhow::Result<()> {
        let bucket = self.device.bucket(rate_bytes_per_s);
        // Without NLM_F_CREATE this changes the qdisc in place.
        self.netlink
            .ask(RouteNetlinkMessage::NewQueueDiscipline(bucket), 0)
            .with_context(|| format!("set the rate of {}: is its link gone?", self.device.name))?;
        Ok(())
    }

    fn statistics(&mut self) -> anyhow::Result<netlink_packet_route::tc::TcStatsQueue> {
        let every = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
        let answers = self.netlink.ask(every, NLM_F_DUMP)?;
        answers
            .into_iter()
            .filter_map(|answer| match answer {
                RouteNetlinkMessage::NewQueueDiscipline(qdisc) => Some(qdisc),
                _ => None,
            })
            .filter(|qdisc| {
                qdisc.header.index == self.device.index.cast_signed() && qdisc.header.handle == HANDLE
            })
            .flat_map(|qdisc| qdisc.attributes)
            .filter_map(|attribute| match attribute {
                TcAttribute::Stats2(statistics) => Some(statistics),
                _ => None,
            })
            .flatten()
            .find_map(|statistics| match statistics {
                TcStats2::Queue(queue) => Some(queue),
                _ => None,
            })
            .with_context(|| format!("{} has no token bucket any more", self.device.name))
    }
}

impl Drop for Shaper {
    fn drop(&mut self) {
        // What is queued goes with the qdisc, so it is sent first. The link may be gone, and the qdisc with it.
        if self.fast().is_ok() {
            let mut qdisc = TcMessage::with_index(self.device.index.cast_signed());
            qdisc.header.parent = TcHandle::ROOT;
            qdisc.header.handle = HANDLE;
            let _ = self
                .netlink
                .ask(RouteNetlinkMessage::DelQueueDiscipline(qdisc), 0);
        }
    }
}

impl Device {
    /// A token bucket of this rate as the root qdisc of the device.
    fn bucket(&self, rate_bytes_per_s: u64) -> TcMessage {
        let parameters = TcTbfQopt {
            rate: TcRatespec {
                linklayer: TC_LINKLAYER_ETHERNET,
                // The kernel takes the larger of this and TCA_TBF_RATE64.
                rate: u32::try_from(rate_bytes_per_s).unwrap_or(u32::MAX),
                ..TcRatespec::default()
            },
            limit: LIMIT_BYTES,
            ..TcTbfQopt::default()
        };
        let option = |kind, value: &[u8]| TcOption::Other(DefaultNla::new(kind, value.to_vec()));
        let mut qdisc = TcMessage::with_index(self.index.cast_signed());
        qdisc.header.parent = TcHandle::ROOT;
        qdisc.header.handle = HANDLE;
        qdisc.attributes = vec![
            TcAttribute::Kind(KIND.to_owned()),
            TcAttribute::Options(vec![
                option(TCA_TBF_PARMS, parameters.as_bytes()),
                option(TCA_TBF_RATE64, &rate_bytes_per_s.to_ne_bytes()),
                // In bytes, in place of `buffer`, which is in ticks and rounded.
                option(TCA_TBF_BURST, &self.burst_bytes.to_ne_bytes()),
            ]),
        ];
        qdisc
    }
}

/// A blocking netlink socket. It stays in the network namespace it was opened in, so that a rate can be changed from
/// any thread and at once; `rtnetlink` would need a runtime and a thread in there.
#[derive(Debug)]
struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    fn open() -> anyhow::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )
        .context("open a netlink socket")?;
        setsockopt(
            &socket,
            ReceiveTimeout,
            &TimeVal::new(ANSWER_MAX.as_secs().cast_signed(), 0),
        )
        .context("limit how long netlink may take")?;
        Ok(Self { socket, sequence: 0 })
    }

    fn mtu(&mut self, index: u32) -> anyhow::Result<u32> {
        let mut device = LinkMessage::default();
        device.header.index = index;
        let answers = self.ask(RouteNetlinkMessage::GetLink(device), 0)?;
        answers
            .into_iter()
            .filter_map(|answer| match answer {
                RouteNetlinkMessage::NewLink(link) => Some(link.attributes),
                _ => None,
            })
            .flatten()
            .find_map(|attribute| match attribute {
                LinkAttribute::Mtu(bytes) => Some(bytes),
                _ => None,
            })
            .context("the kernel does not tell the device's MTU")
    }

    /// Asks the kernel and returns what it answers. A refusal is an [`Errno`].
    fn ask(&mut self, question: RouteNetlinkMessage, flags: u16) -> anyhow::Result<Vec<RouteNetlinkMessage>> {
        self.sequence += 1;
        let mut message = NetlinkMessage::from(question);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).context("ask netlink")?;
        let mut answers = Vec::new();
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC)
                .context("wait for netlink's answer")?;
            ensure!(
                length <= buffer.len(),
                "netlink's answer of {length} bytes is too long"
            );
            let mut rest = &buffer[..length];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|error| anyhow!("netlink's answer makes no sense: {error}"))?;
                let header = message.header;
                // Messages begin at multiples of four bytes.
                let taken = (header.length as usize).next_multiple_of(4).min(rest.len());
                rest = &rest[taken..];
                // The answer to an earlier question, which was not waited for.
                if header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) => match error.raw_code() {
                        0 => return Ok(answers),
                        code => bail!(Errno::from_raw(-code)),
                    },
                    _ => {}
                }
            }
        }
    }
}
