//! What each CPU of one machine did, as a gapless list of stretches.

use std::{borrow::Cow, collections::BTreeMap};

use pqtail_common::{Beat, Head, Rename, Span, Switch, Wake, flag, kind};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{
    absence::Absences,
    gap::Gaps,
    lasting::{Lasting, clipped, disjoint},
};

/// One kernel record, still raw.
pub type Raw = [u8; pqtail_common::RECORD_BYTES];

/// Kind of the records that [`seen_running`] makes; the kernel side never writes it.
pub const SEEN_RUNNING: u8 = 0;

/// A stamp as a record: the thread took it itself, so it was current on its CPU then.
#[must_use]
pub fn seen_running(at_ns: u64, tid: u32, cpu: u16) -> Raw {
    let mut raw = [0; pqtail_common::RECORD_BYTES];
    let head = Head {
        at_ns,
        kind: SEEN_RUNNING,
        flags: 0,
        cpu,
        tid,
    };
    raw[..size_of::<Head>()].copy_from_slice(head.as_bytes());
    raw
}

/// Reads a raw record as one of the record types.
#[must_use]
pub fn as_record<T: zerocopy::FromBytes>(raw: &Raw) -> T {
    T::read_from_bytes(raw).expect("every record is RECORD_BYTES long")
}

/// The head of a raw record.
#[must_use]
pub fn head(raw: &Raw) -> Head {
    Head::read_from_prefix(raw)
        .expect("a record is longer than its head")
        .0
}

/// What a CPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doing {
    /// Nothing.
    Idle,
    /// Runs the thread.
    Run(u32),
    /// Ran the thread when last seen, and somebody else when seen again: the switch between was not recorded.
    Presumed(u32),
    /// Handles a softirq vector.
    Softirq(u32),
    /// Handles a Linux irq.
    Irq(u32),
    /// Handles a processor vector (timer, IPI).
    Vector(u32),
    /// Recorded nothing, and its heartbeat was late: the hypervisor had it and did not count that, or interrupts were off.
    Away,
    /// Waits for the hypervisor.
    Steal,
}

/// A stretch of one CPU's time, ns on its machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Begin.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// What it did.
    pub doing: Doing,
}

impl Lasting for Stretch {
    fn times(&mut self) -> (&mut u64, &mut u64) {
        (&mut self.start_ns, &mut self.end_ns)
    }
}

/// All CPUs of one machine over one trial.
#[derive(Clone, Debug, Default)]
pub struct Cpus {
    stretches: BTreeMap<u32, Vec<Stretch>>,
    names: BTreeMap<u32, String>,
    absences: Absences,
    /// Whether any record carried a steal counter.
    pub steal_known: bool,
    /// Steal seen over the recording, ns by CPU.
    pub steal_ns: BTreeMap<u32, u64>,
}

#[derive(Default)]
struct Layers {
    runs: Vec<Stretch>,
    softirqs: Vec<Stretch>,
    irqs: Vec<Stretch>,
    steals: Vec<Stretch>,
    last_switch: Option<(u64, u32)>,
    last_steal: Option<(u64, u64)>,
    last_ns: u64,
}

impl Cpus {
    /// Builds the stretches from a machine's records, sorted by time, and from where some of them are missing.
    #[must_use]
    pub fn build(records: &[Raw], gaps: &Gaps) -> Self {
        let mut cpus = Self {
            absences: Absences::find(records, gaps),
            ..Self::default()
        };
        let mut layers: BTreeMap<u32, Layers> = BTreeMap::new();
        for raw in records {
            let head = head(raw);
            if head.kind == kind::LOSS {
                continue;
            }
            if head.kind == kind::RENAME {
                let rename: Rename = as_record(raw);
                cpus.call(rename.target_tid, &rename.comm);
            }
            let cpu = layers.entry(u32::from(head.cpu)).or_default();
            cpu.last_ns = cpu.last_ns.max(head.at_ns);
            cpu.occupant(&head);
            let steal = match head.kind {
                kind::SWITCH => {
                    let switch: Switch = as_record(raw);
                    cpu.switch(&switch);
                    if switch.next_tid != 0 {
                        cpus.call(switch.next_tid, &switch.next_comm);
                    }
                    switch.steal_ns
                }
                kind::IRQ | kind::SOFTIRQ | kind::VECTOR => {
                    let span: Span = as_record(raw);
                    let (layer, doing) = match head.kind {
                        kind::IRQ => (&mut cpu.irqs, Doing::Irq(span.number)),
                        kind::VECTOR => (&mut cpu.irqs, Doing::Vector(span.number)),
                        _ => (&mut cpu.softirqs, Doing::Softirq(span.number)),
                    };
                    if span.start_ns < head.at_ns {
                        layer.push(Stretch {
                            start_ns: span.start_ns,
                            end_ns: head.at_ns,
                            doing,
                        });
                    }
                    span.steal_ns
                }
                kind::WAKING | kind::WAKEUP | kind::MIGRATE => as_record::<Wake>(raw).steal_ns,
                kind::BEAT => as_record::<Beat>(raw).steal_ns,
                _ => continue,
            };
            if head.flags & flag::STEAL_KNOWN != 0 {
                cpus.steal_known = true;
                // A damaged counter can jump back and forth any number of times.
                let sum = cpus.steal_ns.entry(u32::from(head.cpu)).or_default();
                *sum = sum.saturating_add(cpu.steal(head.at_ns, steal));
            }
        }
        cpus.stretches = layers
            .into_iter()
            .map(|(cpu, layers)| {
                let absences = cpus.absences.of(cpu).to_vec();
                (cpu, layers.flatten(absences))
            })
            .collect();
        cpus
    }

    /// What the CPU did between two times; nothing is said where nothing is known.
    pub fn between(&self, cpu: u32, start_ns: u64, end_ns: u64) -> impl Iterator<Item = Stretch> + '_ {
        clipped(self.stretches.get(&cpu), start_ns, end_ns)
    }

    /// What kept the CPU from a packet that it took in at `at_ns`: what it did in its last absence before that, from `from_ns` on.
    /// Nothing if it was back for longer than a beat by then: a packet that had come before would have been taken in.
    pub fn kept_from(&self, cpu: u32, from_ns: u64, at_ns: u64) -> impl Iterator<Item = Stretch> + '_ {
        let absence = self.absences.before(cpu, at_ns);
        let (from_ns, to_ns) = absence.map_or((0, 0), |each| (each.start_ns.max(from_ns), each.end_ns));
        self.between(cpu, from_ns, to_ns)
    }

    /// A thread is born with its parent's name: what it is called last is what it became.
    fn call(&mut self, tid: u32, comm: &[u8; 16]) {
        let comm = name(comm);
        let known = self.names.entry(tid).or_default();
        if *known != comm {
            known.clear();
            known.push_str(&comm);
        }
    }

    /// Whether this is one of the kernel's threads that run softirqs.
    #[must_use]
    pub fn is_softirq_thread(&self, tid: u32) -> bool {
        self.names
            .get(&tid)
            .is_some_and(|name| name.starts_with("ksoftirqd/"))
    }

    /// A thread as reports name it: `ksoftirqd/1 [19]`.
    #[must_use]
    pub fn thread_name(&self, tid: u32) -> String {
        match self.names.get(&tid) {
            Some(name) => format!("{name} [{tid}]"),
            None => format!("[{tid}]"),
        }
    }
}

impl Layers {
    /// Every record names the thread that is current. Some kernels hide the switches of some threads, so one that was never
    /// seen to come in is believed, and whoever was there before is only presumed to have stayed until then.
    fn occupant(&mut self, head: &Head) {
        if let Some((since, tid)) = self.last_switch
            && tid != head.tid
        {
            if since < head.at_ns {
                self.runs.push(Stretch {
                    start_ns: since,
                    end_ns: head.at_ns,
                    doing: Doing::Presumed(tid),
                });
            }
            self.last_switch = Some((head.at_ns, head.tid));
        }
    }

    fn switch(&mut self, switch: &Switch) {
        let at = switch.head.at_ns;
        if let Some((since, tid)) = self.last_switch
            && since < at
        {
            let doing = if tid == 0 { Doing::Idle } else { Doing::Run(tid) };
            self.runs.push(Stretch {
                start_ns: since,
                end_ns: at,
                doing,
            });
        }
        self.last_switch = Some((at, switch.next_tid));
    }

    /// Takes in the counter's value and returns the growth.
    ///
    /// The stretch is laid at the end of the gap between two records: a virtual CPU that comes back takes its pending
    /// interrupts at once, so the first record after the absence follows it closely.
    fn steal(&mut self, at_ns: u64, counter_ns: u64) -> u64 {
        let mut grown = 0;
        if let Some((since, before)) = self.last_steal
            && at_ns > since
            && counter_ns > before
        {
            grown = counter_ns - before;
            let start_ns = at_ns.saturating_sub(grown).max(since);
            self.steals.push(Stretch {
                start_ns,
                end_ns: at_ns,
                doing: Doing::Steal,
            });
        }
        self.last_steal = Some((at_ns, counter_ns));
        grown
    }

    fn flatten(mut self, absences: Vec<Stretch>) -> Vec<Stretch> {
        if let Some((since, tid)) = self.last_switch
            && since < self.last_ns
        {
            let doing = if tid == 0 { Doing::Idle } else { Doing::Run(tid) };
            self.runs.push(Stretch {
                start_ns: since,
                end_ns: self.last_ns,
                doing,
            });
        }
        // Charging rule: steal over hard irq over softirq over whoever was current. An absence that no counter counts is of the
        // first kind too.
        for layer in [&mut self.softirqs, &mut self.irqs, &mut self.steals] {
            disjoint(layer);
        }
        let flat = overlay(self.runs, self.softirqs);
        let flat = overlay(flat, self.irqs);
        let flat = overlay(flat, absences);
        overlay(flat, self.steals)
    }
}

/// Lays `top` over `base`: both sorted and free of overlap, and so is the result.
fn overlay(base: Vec<Stretch>, top: Vec<Stretch>) -> Vec<Stretch> {
    let mut flat = Vec::with_capacity(base.len() + 2 * top.len());
    let mut top = top.into_iter().peekable();
    for mut under in base {
        while let Some(&over) = top.peek() {
            if over.start_ns >= under.end_ns {
                break;
            }
            if over.start_ns > under.start_ns {
                flat.push(Stretch {
                    end_ns: over.start_ns,
                    ..under
                });
            }
            under.start_ns = under.start_ns.max(over.end_ns);
            if over.end_ns > under.end_ns {
                break;
            }
            flat.push(over);
            top.next();
        }
        if under.start_ns < under.end_ns {
            flat.push(under);
        }
    }
    flat.extend(top);
    flat
}

fn name(comm: &[u8; 16]) -> Cow<'_, str> {
    let length = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..length])
}
