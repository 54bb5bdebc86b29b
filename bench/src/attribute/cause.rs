//! From a ledger to a cause: what exceeds the baseline, by whom, and what was seen.

use std::collections::BTreeMap;

use crate::{
    attribute::{
        ledger::{Ledger, Line, Segment, Side, ThreadLine},
        split::{Charge, Detail},
        wait::{Kind, Place},
    },
    clock::RunNs,
    record::manifest::HostFacts,
    report::summary::Evidence,
    statistics::rank,
    timeline::{
        connection::Resend,
        cpu::Cpus,
        thread::{Nap, Threads},
    },
};

/// The middle of the latencies whose mean ledger is the baseline: from and to, as quantiles.
const BASELINE_BAND: (f64, f64) = (0.4, 0.6);

/// What took less time in all is not worth a line of evidence, ns.
const EVIDENCE_NS_MIN: u64 = 1_000;

/// Most lines of evidence kept of one outlier, the longest first.
const EVIDENCE_MAX: usize = 12;

/// What is usual: the mean ledger of the middle requests.
#[derive(Clone, Debug, Default)]
pub struct Baseline {
    ledger: Ledger,
}

impl Baseline {
    /// Means over the band of the middle of one arm's and trial's requests, given as latency and ledger in ascending order of
    /// latency.
    #[must_use]
    pub fn of(ascending: &[(u64, Ledger)]) -> Self {
        Self {
            ledger: mean_band(ascending, BASELINE_BAND).unwrap_or_default(),
        }
    }

    /// ns of a line above what is usual.
    #[must_use]
    pub fn excess_ns(&self, ledger: &Ledger, line: Line) -> u64 {
        ledger.ns(line).saturating_sub(self.ledger.ns(line))
    }

    /// The line with the greatest excess, that excess, and its share of all excess. *Unexplained* can be it: then nothing is
    /// known better. Time between two hosts counts only if it is more than their clocks' error; all other lines lie between two
    /// times of one clock.
    #[must_use]
    pub fn cause(&self, ledger: &Ledger, clock_error_ns: u64) -> (Line, u64, f64) {
        let excesses = Line::all().map(|line| (self.excess_ns(ledger, line), line));
        let whole: u64 = excesses.iter().map(|(ns, _)| ns).sum();
        // The first of equals in report order, so that the result does not depend on anything else.
        let (ns, line) = excesses
            .into_iter()
            .filter(|&(ns, line)| line != Line::Network || ns > clock_error_ns)
            .reduce(|best, each| if each.0 > best.0 { each } else { best })
            .expect("lines");
        (line, ns, if whole == 0 { 0.0 } else { ns as f64 / whole as f64 })
    }
}

/// Mean ledger of the requests between two quantiles of latency; `None` without requests.
#[must_use]
pub fn mean_band(ascending: &[(u64, Ledger)], (from, to): (f64, f64)) -> Option<Ledger> {
    if ascending.is_empty() {
        return None;
    }
    let band = &ascending[rank(ascending.len(), from)..=rank(ascending.len(), to)];
    let mut mean = Ledger::default();
    for line in Line::all() {
        // Damaged stamps can make latencies whose sum is beyond 64 bits.
        let sum: u128 = band.iter().map(|(_, ledger)| u128::from(ledger.ns(line))).sum();
        mean.charge(line, (sum / band.len() as u128) as u64);
    }
    Some(mean)
}

/// Names behind numbers, of one host.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// Its CPUs, which know thread names.
    pub cpus: &'a Cpus,
    /// Its measured threads, which know where they slept.
    pub threads: &'a Threads,
    /// Its interrupts, drop reasons and system calls.
    pub facts: &'a HostFacts,
    /// Kernel functions by distance from `_stext`, if they were named.
    pub functions: Option<&'a BTreeMap<u32, String>>,
}

/// Softirq vectors by number (include/linux/interrupt.h).
const SOFTIRQS: [&str; 10] = [
    "HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU",
];

impl Names<'_> {
    /// Who it is, if it is anybody.
    #[must_use]
    pub fn culprit(&self, detail: Detail) -> Option<String> {
        Some(match detail {
            Detail::Task(tid) => self.cpus.thread_name(tid),
            Detail::Presumed(tid) => {
                format!("{} (its switch-out was not recorded)", self.cpus.thread_name(tid))
            }
            Detail::Irq(number) => match self.facts.interrupts.get(&number) {
                Some(name) => format!("irq {number} {name}"),
                None => format!("irq {number}"),
            },
            Detail::Vector(number) => format!("vector {number}{}", vector_name(number, &self.facts.machine)),
            Detail::Softirq(number) => {
                format!("softirq {}", softirq_name(number))
            }
            Detail::OtherRequests => "other requests of the same thread".to_owned(),
            Detail::Hypervisor => "hypervisor".to_owned(),
            Detail::Away => "vCPU away or interrupts off".to_owned(),
            Detail::Quota => "cgroup CPU quota".to_owned(),
            Detail::Stopped(_) => "stop signal".to_owned(),
            Detail::Asleep(nap) => return self.asleep(nap),
            Detail::AsleepForOther(nap) => match self.asleep(nap) {
                Some(what) => format!("{what}, for another request"),
                None => "other requests of the same thread".to_owned(),
            },
            Detail::Reclaim(false) => "memory reclaim".to_owned(),
            Detail::Reclaim(true) => "memory reclaim for a cgroup's limit".to_owned(),
            Detail::Unanswered => {
                "SYN not answered (accept queue full, or the answer dropped unseen)".to_owned()
            }
            Detail::QueueFull => "accept queue full".to_owned(),
            Detail::NotAccepted => "not accepted yet".to_owned(),
            Detail::Resent(segment, resend) => {
                format!("lost {}: {}", segment_name(segment), resend_name(resend))
            }
            Detail::IdleCpu | Detail::Nobody => return None,
        })
    }
}

impl<'a> Names<'a> {
    fn place(&self, nap: Nap) -> Option<Place<'a>> {
        let wait = self.threads.wait(nap.wait?)?;
        Some(Place::of(wait, self.functions, &self.facts.syscalls))
    }

    /// What a thread waits for in its sleep, if that was recorded.
    fn asleep(&self, nap: Nap) -> Option<String> {
        let place = self.place(nap)?;
        // Only a task can let go of a lock or fill a pipe; a disk or a timer wakes from an interrupt.
        let by_task = place.kind() == Kind::Lock && nap.waker != 0;
        let waker = by_task.then(|| format!(", released by {}", self.cpus.thread_name(nap.waker)));
        Some(format!("{place}{}", waker.unwrap_or_default()))
    }

    /// The functions it sleeps in, innermost first.
    fn functions(&self, nap: Nap) -> String {
        let functions = self.place(nap).map(|place| place.functions.join(" < "));
        match functions.filter(|text| !text.is_empty()) {
            Some(text) => format!(" in {text}"),
            None => String::new(),
        }
    }
}

fn segment_name(segment: Segment) -> &'static str {
    match segment {
        Segment::Syn => "SYN",
        Segment::SynAck => "SYN-ACK",
        Segment::Data => "data segment",
    }
}

fn resend_name(resend: Resend) -> &'static str {
    match resend {
        Resend::HandshakeTimeout => "handshake time-out (1 s, doubled each time)",
        Resend::Timeout => "retransmission time-out",
        Resend::LossProbe => "tail-loss probe",
        Resend::Reordering => "reordering window over",
        Resend::UnknownTimer => "a timer, the kernel does not say which",
        Resend::Refused => "the listener had no room for its connection",
        Resend::Acknowledgements => "fast retransmission",
    }
}

/// Name of a softirq vector.
#[must_use]
pub fn softirq_name(number: u32) -> &'static str {
    SOFTIRQS.get(number as usize).copied().unwrap_or("unknown")
}

/// Linux's fixed vectors on x86 (arch/x86/include/asm/irq_vectors.h).
fn vector_name(number: u32, machine: &str) -> &'static str {
    match number {
        0xec if machine == "x86_64" => " local timer",
        0xfd if machine == "x86_64" => " reschedule IPI",
        0xfb if machine == "x86_64" => " function-call IPI",
        _ => "",
    }
}

/// Culprits and evidence of one request, gathered charge by charge.
#[derive(Debug)]
pub struct Witness<'a> {
    intended: RunNs,
    client: Names<'a>,
    server: Names<'a>,
    culprits: BTreeMap<(Line, Detail), u64>,
    /// By what was seen, where: an interrupt every millisecond cuts a long stretch into many pieces that tell the same.
    seen: BTreeMap<(Line, String), Seen>,
    notes: Vec<Evidence>,
}

/// The pieces of what was seen.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at_ns: i64,
    duration_ns: u64,
    pieces: u32,
}

impl<'a> Witness<'a> {
    /// Begins with nothing seen.
    #[must_use]
    pub fn new(intended: RunNs, client: Names<'a>, server: Names<'a>) -> Self {
        Self {
            intended,
            client,
            server,
            culprits: BTreeMap::new(),
            seen: BTreeMap::new(),
            notes: Vec::new(),
        }
    }

    fn names(&self, line: Line) -> Names<'a> {
        if matches!(line, Line::Thread(Side::Server, _)) {
            self.server
        } else {
            self.client
        }
    }

    /// Takes in one charge of the interval with this label.
    pub fn see(&mut self, label: &str, charge: &Charge) {
        *self.culprits.entry((charge.line, charge.detail)).or_default() += charge.ns;
        let cpu = charge.cpu.map(|cpu| format!("CPU {cpu} ")).unwrap_or_default();
        let who = self.names(charge.line).culprit(charge.detail);
        let what = match (charge.line, charge.detail, who) {
            (Line::Thread(_, ThreadLine::RunQueue), _, Some(who)) => format!("{cpu}ran {who} instead"),
            (Line::Thread(_, ThreadLine::Compute), ..) => format!("{cpu}ran this request"),
            (Line::Thread(_, ThreadLine::OtherWork), _, Some(who)) => format!("{cpu}ran {who}"),
            (
                Line::Thread(_, ThreadLine::Blocked),
                Detail::Asleep(nap) | Detail::AsleepForOther(nap),
                who,
            ) => format!(
                "thread asleep (state {:#x}) in the middle of {} work: {}{}",
                nap.state,
                if matches!(charge.detail, Detail::Asleep(_)) {
                    "its"
                } else {
                    "another request's"
                },
                who.as_deref().unwrap_or("where is not known"),
                self.names(charge.line).functions(nap)
            ),
            (Line::Thread(_, ThreadLine::AcceptQueue), Detail::Unanswered, _) => {
                "SYN taken in and not answered: the accept queue was full, or the answer was dropped unseen"
                    .to_owned()
            }
            (Line::Thread(_, ThreadLine::AcceptQueue), Detail::QueueFull, _) => {
                "first flight dropped: the accept queue was full".to_owned()
            }
            (Line::Thread(_, ThreadLine::AcceptQueue), ..) => {
                "the connection was complete, and the thread slept and did not accept it".to_owned()
            }
            (Line::Thread(_, ThreadLine::Stopped), ..) => "thread stopped by a signal".to_owned(),
            (Line::Thread(_, ThreadLine::Wakeup), ..) => format!("{cpu}idle while the thread was due"),
            (Line::Thread(_, ThreadLine::Steal), Detail::Away, Some(who)) => {
                format!("{cpu}recorded nothing and its heartbeat came late: {who}")
            }
            (Line::DelayedAck, ..) => "the rest waited in the socket; the timer's ACK released it".to_owned(),
            (Line::Retransmit(_), _, Some(who)) => format!("sent again after this wait: {who}"),
            (Line::Network, ..) => "under way".to_owned(),
            (Line::Unexplained, ..) => "no record covers this".to_owned(),
            (_, _, Some(who)) => format!("{cpu}taken by {who}"),
            (..) => cpu,
        };
        let at_ns = charge.start - self.intended;
        let seen = self
            .seen
            .entry((charge.line, format!("{label}: {what}")))
            .or_insert(Seen {
                at_ns,
                duration_ns: 0,
                pieces: 0,
            });
        seen.at_ns = seen.at_ns.min(at_ns);
        seen.duration_ns += charge.ns;
        seen.pieces += 1;
    }

    /// Adds what is known besides the charges.
    pub fn note(&mut self, at: RunNs, line: Line, what: String) {
        self.notes.push(Evidence {
            at_ns: at - self.intended,
            duration_ns: 0,
            line,
            what,
        });
    }

    /// Every named culprit with its line and time, ns.
    pub fn culprits(&self) -> impl Iterator<Item = (Line, String, u64)> + '_ {
        self.culprits
            .iter()
            .filter_map(|(&(line, detail), &ns)| Some((line, self.names(line).culprit(detail)?, ns)))
    }

    /// The culprit with most of the time on a line. Sleeps differ in place and waker and may still have one name, so what
    /// counts is the time by name; the first by name of equals.
    #[must_use]
    pub fn culprit(&self, cause: Line) -> Option<String> {
        let mut named: BTreeMap<String, u64> = BTreeMap::new();
        for (_, name, ns) in self.culprits().filter(|(line, ..)| *line == cause) {
            *named.entry(name).or_default() += ns;
        }
        named
            .into_iter()
            .reduce(|best, each| if each.1 > best.1 { each } else { best })
            .map(|(name, _)| name)
    }

    /// What was seen of the cause first, then the rest, longest first, in a list of bounded length.
    #[must_use]
    pub fn evidence(self, cause: Line) -> Vec<Evidence> {
        let seen = self.seen.into_iter();
        let told =
            seen.filter(|(_, seen)| seen.duration_ns >= EVIDENCE_NS_MIN)
                .map(|((line, what), seen)| Evidence {
                    at_ns: seen.at_ns,
                    duration_ns: seen.duration_ns,
                    line,
                    what: match seen.pieces {
                        1 => what,
                        pieces => format!("{what}, in {pieces} pieces"),
                    },
                });
        let mut evidence: Vec<Evidence> = told.chain(self.notes).collect();
        evidence.sort_by(|a, b| {
            let key = |e: &Evidence| {
                (
                    e.line != cause,
                    e.duration_ns > 0,
                    std::cmp::Reverse(e.duration_ns),
                    e.at_ns,
                )
            };
            key(a).cmp(&key(b))
        });
        evidence.truncate(EVIDENCE_MAX);
        evidence
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pqtail_common::{ABSENT, Head, SLEEP_FRAMES, Sleep, Switch, kind};
    use zerocopy::IntoBytes as _;

    use super::*;
    use crate::timeline::cpu::Raw;

    fn ledger(lines: &[(Line, u64)]) -> Ledger {
        let mut ledger = Ledger::default();
        for &(line, ns) in lines {
            ledger.charge(line, ns);
        }
        ledger
    }

    #[test]
    fn the_cause_is_what_exceeds_the_baseline_not_what_is_largest() {
        let compute = Line::Thread(Side::Server, ThreadLine::Compute);
        let queue = Line::Thread(Side::Server, ThreadLine::RunQueue);
        let usual: Vec<_> = (0..100)
            .map(|i| (i, ledger(&[(compute, 500), (queue, 10)])))
            .collect();
        let (cause, excess, share) = Baseline::of(&usual).cause(&ledger(&[(compute, 520), (queue, 400)]), 0);
        assert_eq!((cause, excess), (queue, 390));
        assert!((share - 390.0 / 410.0).abs() < 1e-9);
    }

    #[test]
    fn sleeps_of_one_name_count_together() {
        let blocked = Line::Thread(Side::Server, ThreadLine::Blocked);
        let (cpus, facts) = (Cpus::default(), HostFacts::default());
        let sleep = |at_ns, frame| Sleep {
            head: Head {
                at_ns,
                kind: kind::SLEEP,
                tid: 7,
                ..Head::default()
            },
            syscall: ABSENT,
            frames_count: 1,
            frames: {
                let mut frames = [0; SLEEP_FRAMES];
                frames[0] = frame;
                frames
            },
        };
        let switch = |at_ns| Switch {
            head: Head {
                at_ns,
                kind: kind::SWITCH,
                tid: 7,
                ..Head::default()
            },
            prev_state: 2,
            ..Switch::default()
        };
        let mut records: Vec<Raw> = Vec::new();
        for (at_ns, frame) in [(10, 1), (20, 2)] {
            records.push(sleep(at_ns, frame).as_bytes().try_into().unwrap());
            records.push(switch(at_ns + 1).as_bytes().try_into().unwrap());
        }
        let threads = Threads::build(&records, &BTreeSet::from([7]));
        let functions = BTreeMap::from([(1, "io_schedule".to_owned()), (2, "folio_wait_bit".to_owned())]);
        let names = Names {
            cpus: &cpus,
            threads: &threads,
            facts: &facts,
            functions: Some(&functions),
        };
        let mut witness = Witness::new(RunNs(0), names, names);
        let mut see = |ns, detail| {
            witness.see(
                "work",
                &Charge {
                    line: blocked,
                    start: RunNs(0),
                    ns,
                    cpu: None,
                    detail,
                },
            );
        };
        let nap = |wait| Nap {
            state: 2,
            wait: Some(wait),
            waker: 0,
        };
        see(400, Detail::Asleep(nap(0)));
        see(400, Detail::Asleep(nap(1)));
        see(500, Detail::Reclaim(false));
        assert_eq!(witness.culprit(blocked).as_deref(), Some("disk"));
    }

    #[test]
    fn what_two_clocks_cannot_tell_is_not_claimed() {
        let compute = Line::Thread(Side::Server, ThreadLine::Compute);
        let usual: Vec<_> = (0..100)
            .map(|i| (i, ledger(&[(compute, 500), (Line::Network, 100)])))
            .collect();
        let slow = ledger(&[(compute, 510), (Line::Network, 400)]);
        let cause = |clock_error_ns| Baseline::of(&usual).cause(&slow, clock_error_ns).0;
        assert_eq!((cause(299), cause(300)), (Line::Network, compute));
    }
}
