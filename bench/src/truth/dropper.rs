//! Loses chosen TCP segments on the link, as a wire would: the sender has sent them, the receiver never sees them.
//!
//! The program hangs at the receiver's end of the veth pair, in native mode: behind the sender's `net_dev_queue`
//! and before the receiver's `netif_receive_skb`. Generic mode would not do, it runs behind both tracepoints
//! (`__netif_receive_skb_core`). A lost segment has a `TRANSMIT` record and neither a `RECEIVE` nor a `DROP`.
//!
//! While it is attached, the sender's end does not offload segmentation and the receiver's end copies each segment and
//! may merge several (`veth_xdp_set`): what is one `TRANSMIT` record may arrive as one a segment, a few microseconds apart.
//! So compare a faulty run only with a run that had the dropper attached too.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, ensure};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, MapData},
    programs::{ProgramError, Xdp, XdpMode},
};
use nix::errno::Errno;
use pqtail_common::{DROPS_MAX, DropOrder, segment};

use crate::collect::{
    link,
    probes::{OBJECT, take},
};

/// Ring of the probes, which are in the same object but not loaded here; the smallest that every page size allows.
const UNUSED_RING_BYTES: u32 = 64 << 10;

const PROGRAM: &str = "pq_drop";

/// Which segments to lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A client's first segment: SYN without ACK.
    Syn,
    /// The server's answer to it.
    SynAck,
    /// Any segment with payload.
    Data,
}

impl Segment {
    fn from_kernel(value: u32) -> Option<Self> {
        match value {
            segment::SYN => Some(Self::Syn),
            segment::SYN_ACK => Some(Self::SynAck),
            segment::DATA => Some(Self::Data),
            _ => None,
        }
    }

    fn to_kernel(self) -> u32 {
        match self {
            Self::Syn => segment::SYN,
            Self::SynAck => segment::SYN_ACK,
            Self::Data => segment::DATA,
        }
    }
}

/// One segment that was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// When, `CLOCK_MONOTONIC` ns of this machine.
    pub at_ns: u64,
    /// What it was.
    pub segment: Segment,
    /// Port of the sender.
    pub source_port: u16,
    /// Port of the receiver.
    pub destination_port: u16,
    /// TCP sequence number of its first byte, or of the SYN.
    pub sequence: u32,
    /// TCP payload bytes.
    pub payload_bytes: u32,
}

/// A program at one end of the link that loses segments on order. It detaches when this is dropped or the process
/// dies, whichever way.
pub struct Dropper {
    order: Mutex<Orders>,
    count: Array<MapData, u32>,
    drops: Array<MapData, [u8; size_of::<pqtail_common::Dropped>()]>,
    /// Holds the program and its link.
    _ebpf: Ebpf,
}

/// The map of the one order in force, and what was last written to it.
struct Orders {
    map: Array<MapData, [u8; size_of::<DropOrder>()]>,
    last: DropOrder,
}

impl std::fmt::Debug for Dropper {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Dropper").finish_non_exhaustive()
    }
}

impl Dropper {
    /// Attaches to `interface`, the receiver's end of a veth pair, in the network namespace of process (or thread)
    /// `pid`. Loses nothing before the first [`Dropper::order`].
    ///
    /// Attach before the traffic begins and drop after it has ended: detaching frees what is still queued in the
    /// device (`veth_napi_del_range`), which would lose segments that nobody ordered.
    ///
    /// # Errors
    /// Without root, when the process or its interface is gone, when another XDP program is attached there already,
    /// or when the interface is no veth.
    pub fn attach(pid: u32, interface: &str) -> anyhow::Result<Self> {
        let mut ebpf = link::inside(pid, || load_and_attach(interface))
            .with_context(|| format!("lose segments on {interface} of process {pid}"))?;
        Ok(Self {
            order: Mutex::new(Orders {
                map: Array::try_from(take(&mut ebpf, "ORDER")?)?,
                last: DropOrder::default(),
            }),
            count: Array::try_from(take(&mut ebpf, "DROP_COUNT")?)?,
            drops: Array::try_from(take(&mut ebpf, "DROPS")?)?,
            _ebpf: ebpf,
        })
    }

    /// From the next order on, loses only segments whose source or destination port is this one.
    #[must_use]
    pub fn on_port(self, port: u16) -> Self {
        self.orders().last.port = port;
        self
    }

    /// Loses the next `at_most` segments of this kind with at least `payload_min` bytes of TCP payload, in place of
    /// what was ordered before. Zero `payload_min` for a SYN or SYN-ACK, which has none.
    ///
    /// Under one order a connection (a pair of ports) loses one segment: what it sends again passes, and so does all
    /// else it sends.
    ///
    /// # Errors
    /// When `at_most` would exceed the 1,024 segments that one dropper can lose, or the kernel refuses the map.
    pub fn order(&self, segment: Segment, payload_min: u32, at_most: u32) -> anyhow::Result<()> {
        let mut orders = self.orders();
        orders.end()?;
        let count = self.count()?;
        let left = DROPS_MAX - count;
        ensure!(
            at_most <= left,
            "lose {at_most} segments: this dropper has lost {count} and can lose {left} more, attach another"
        );
        let order = DropOrder {
            round: orders.last.round + 1,
            payload_min,
            until: count + at_most,
            segment: segment::NONE,
            ..orders.last
        };
        // The kind goes last, when the rest is in place: a segment may pass at any moment.
        orders.write(order)?;
        orders.write(DropOrder {
            segment: segment.to_kernel(),
            ..order
        })
    }

    /// Ends the order: from now on all segments pass.
    ///
    /// # Errors
    /// When the kernel refuses the map.
    pub fn stop(&self) -> anyhow::Result<()> {
        self.orders().end()
    }

    /// Every segment lost since this was attached, in order.
    ///
    /// # Errors
    /// When the kernel refuses the map.
    pub fn dropped(&self) -> anyhow::Result<Vec<Dropped>> {
        (0..self.count()?)
            .map(|number| self.drop_record(number))
            .collect()
    }

    fn count(&self) -> anyhow::Result<u32> {
        self.count
            .get(&0, 0)
            .context("read how many segments were lost: run as root")
    }

    fn drop_record(&self, number: u32) -> anyhow::Result<Dropped> {
        let bytes = self
            .drops
            .get(&number, 0)
            .context("read the record of a lost segment: run as root")?;
        let record: pqtail_common::Dropped = zerocopy::transmute!(bytes);
        Ok(Dropped {
            at_ns: record.at_ns,
            segment: Segment::from_kernel(record.segment)
                .with_context(|| format!("segment {}: rebuild pqtail", record.segment))?,
            source_port: record.source_port,
            destination_port: record.destination_port,
            sequence: record.sequence,
            payload_bytes: record.payload_bytes,
        })
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Orders {
    fn end(&mut self) -> anyhow::Result<()> {
        self.write(DropOrder {
            segment: segment::NONE,
            ..self.last
        })
    }

    fn write(&mut self, order: DropOrder) -> anyhow::Result<()> {
        let bytes: [u8; size_of::<DropOrder>()] = zerocopy::transmute!(order);
        self.map
            .set(0, bytes, 0)
            .context("tell the kernel which segments to lose: run as root")?;
        self.last = order;
        Ok(())
    }
}

/// In the interface's namespace: a link is made by the name that the calling thread sees.
fn load_and_attach(interface: &str) -> anyhow::Result<Ebpf> {
    let mut ebpf = EbpfLoader::new()
        .map_max_entries("RECORDS", UNUSED_RING_BYTES)
        .load(OBJECT)
        .context("load the eBPF maps: needs CAP_BPF, run as root")?;
    let program: &mut Xdp = ebpf
        .program_mut(PROGRAM)
        .with_context(|| format!("the embedded eBPF object has no program {PROGRAM}: rebuild pqtail"))?
        .try_into()?;
    program
        .load()
        .with_context(|| format!("load {PROGRAM}: needs CAP_BPF and CAP_NET_ADMIN, run as root"))?;
    program.attach(interface, XdpMode::Driver).map_err(|error| {
        let remedy = remedy(&error);
        anyhow::Error::new(error).context(remedy)
    })?;
    Ok(ebpf)
}

fn remedy(error: &ProgramError) -> &'static str {
    let errno = match error {
        ProgramError::UnknownInterface { .. } => return "no such interface there: join the link first",
        ProgramError::SyscallError(refused) => refused.io_error.raw_os_error().map(Errno::from_raw),
        _ => None,
    };
    match errno {
        Some(Errno::EBUSY | Errno::EEXIST) => {
            "another XDP program is attached there: one dropper an interface"
        }
        Some(Errno::EOPNOTSUPP) => "its driver has no native XDP: take a veth",
        Some(Errno::ERANGE) => "the other end's MTU is too large for XDP",
        _ => "needs CAP_NET_ADMIN in that namespace, run as root",
    }
}
