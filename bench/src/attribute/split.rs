//! An interval split by cause: every nanosecond charged once, by the rule steal > hard irq > softirq > throttle > run queue >
//! blocked; what no record covers stays *unexplained*.

use std::collections::BTreeMap;

use crate::{
    align::Alignment,
    attribute::{
        ledger::{Line, Segment, Side, ThreadLine},
        story::{Interval, Owner},
    },
    clock::RunNs,
    timeline::{
        connection::Resend,
        cpu::{Cpus, Doing, Stretch, clipped},
        gap::Gaps,
        thread::{Being, Nap, Threads},
    },
};

/// Who or what a charge is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Detail {
    /// Nobody.
    Nobody,
    /// The task that ran instead.
    Task(u32),
    /// The task last seen there before the thread came in; its switch-out was not recorded.
    Presumed(u32),
    /// A Linux irq.
    Irq(u32),
    /// A processor vector.
    Vector(u32),
    /// A softirq vector.
    Softirq(u32),
    /// Other requests of the same thread.
    OtherRequests,
    /// The hypervisor.
    Hypervisor,
    /// The cgroup's quota.
    Quota,
    /// The idle CPU.
    IdleCpu,
    /// A signal or a tracer stopped the thread: `TASK_*` bits.
    Stopped(u32),
    /// Asleep in the middle of its work.
    Asleep(Nap),
    /// The same, in the middle of another request's work.
    AsleepForOther(Nap),
    /// The thread reclaimed memory itself; whether its cgroup's limit asked for it.
    Reclaim(bool),
    /// The listener had no room.
    QueueFull,
    /// The server's thread did not accept.
    NotAccepted,
    /// A lost segment and what sent it again.
    Resent(Segment, Resend),
}

/// Some time on some line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Where it goes.
    pub line: Line,
    /// When it begins.
    pub start: RunNs,
    /// How long, ns.
    pub ns: u64,
    /// The host's CPU it is about, if any.
    pub cpu: Option<u32>,
    /// Who.
    pub detail: Detail,
}

/// When each thread worked on which request, so that the others' work can be told from this one's.
#[derive(Clone, Debug, Default)]
pub struct Active(BTreeMap<u32, Vec<Work>>);

/// One stretch of work of one thread on one request; its host's clock.
#[derive(Clone, Copy, Debug)]
struct Work {
    start_ns: u64,
    end_ns: u64,
    request: u32,
}

impl Active {
    /// Adds a stretch; empty or unfinished ones are passed over.
    pub fn add(&mut self, tid: u32, request: u32, start_ns: u64, end_ns: u64) {
        if start_ns > 0 && end_ns > start_ns {
            self.0.entry(tid).or_default().push(Work {
                start_ns,
                end_ns,
                request,
            });
        }
    }

    /// Orders the stretches; call once, when all are added.
    pub fn seal(&mut self) {
        for work in self.0.values_mut() {
            work.sort_by_key(|each| (each.start_ns, each.end_ns));
            let mut end = 0;
            work.retain_mut(|each| {
                each.start_ns = each.start_ns.max(end);
                end = end.max(each.end_ns);
                each.start_ns < each.end_ns
            });
        }
    }

    fn between(&self, tid: u32, start_ns: u64, end_ns: u64) -> impl Iterator<Item = Work> + '_ {
        let work = self.0.get(&tid).map_or(&[][..], Vec::as_slice);
        clipped(
            work,
            start_ns,
            end_ns,
            |w| (w.start_ns, w.end_ns),
            |w, start_ns, end_ns| Work {
                start_ns,
                end_ns,
                ..w
            },
        )
    }
}

/// What one host recorded over a trial, ready to be asked.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a> {
    /// Its CPUs.
    pub cpus: &'a Cpus,
    /// Its measured threads.
    pub threads: &'a Threads,
    /// What those worked on.
    pub active: &'a Active,
    /// Where records of it are missing.
    pub gaps: &'a Gaps,
}

/// Both hosts over one trial.
#[derive(Clone, Copy, Debug)]
pub struct Hosts<'a> {
    /// The load generator's.
    pub client: HostView<'a>,
    /// The server's.
    pub server: HostView<'a>,
    /// From one clock to the other.
    pub alignment: &'a Alignment,
}

/// Charges the pieces of one interval, in time order per thread state, and whatever is left as *unexplained*.
struct Meter<'a> {
    start: RunNs,
    host_start_ns: u64,
    left_ns: u64,
    sink: &'a mut dyn FnMut(Charge),
}

impl Meter<'_> {
    fn charge(&mut self, line: Line, start_ns: u64, end_ns: u64, cpu: Option<u32>, detail: Detail) {
        // Drift can make an interval a nanosecond longer on its own host's clock than on the run's.
        let ns = (end_ns - start_ns).min(self.left_ns);
        if ns > 0 {
            self.left_ns -= ns;
            let start = self.start + start_ns.wrapping_sub(self.host_start_ns).cast_signed();
            (self.sink)(Charge {
                line,
                start,
                ns,
                cpu,
                detail,
            });
        }
    }
}

/// Splits an interval of the request with this number; the charges sum to its length.
pub fn split(hosts: &Hosts<'_>, interval: &Interval, request: u32, sink: &mut dyn FnMut(Charge)) {
    let length_ns = (interval.end - interval.start).cast_unsigned();
    let whole = |line, detail| Charge {
        line,
        start: interval.start,
        ns: length_ns,
        cpu: None,
        detail,
    };
    let (side, view) = match interval.owner {
        Owner::Wire => return sink(whole(Line::Network, Detail::Nobody)),
        Owner::Held => return sink(whole(Line::DelayedAck, Detail::Nobody)),
        Owner::Lost(segment, resend) => {
            return sink(whole(Line::Retransmit(segment), Detail::Resent(segment, resend)));
        }
        Owner::Refused => {
            return sink(whole(
                Line::Thread(Side::Server, ThreadLine::AcceptQueue),
                Detail::QueueFull,
            ));
        }
        Owner::Unknown => return sink(whole(Line::Unexplained, Detail::Nobody)),
        Owner::Waiting { side, .. }
        | Owner::Queued { side, .. }
        | Owner::Active { side, .. }
        | Owner::Stack { side, .. } => match side {
            Side::Client => (side, hosts.client),
            Side::Server => (side, hosts.server),
        },
    };
    let on_host = |at: RunNs| match side {
        Side::Client => at.0.cast_unsigned(),
        Side::Server => hosts.alignment.to_server(at).0,
    };
    let (from, to) = (on_host(interval.start), on_host(interval.end));
    if view.gaps.of_timelines(from, to) {
        return sink(whole(Line::Unexplained, Detail::Nobody));
    }
    let mut meter = Meter {
        start: interval.start,
        host_start_ns: from,
        left_ns: length_ns,
        sink,
    };
    match interval.owner {
        Owner::Stack { cpu, .. } => {
            for stretch in view.cpus.between(cpu, from, to) {
                interrupted(side, cpu, stretch, &mut meter);
            }
        }
        Owner::Waiting { tid, cpu, .. } => {
            thread(
                side,
                view,
                tid,
                request,
                (from, to),
                Waits::Packet(cpu),
                &mut meter,
            );
        }
        Owner::Queued { tid, .. } => {
            thread(side, view, tid, request, (from, to), Waits::Queued, &mut meter);
        }
        Owner::Active { tid, .. } => thread(side, view, tid, request, (from, to), Waits::No, &mut meter),
        Owner::Wire | Owner::Held | Owner::Lost(..) | Owner::Refused | Owner::Unknown => {
            unreachable!("charged whole above")
        }
    }
    if meter.left_ns > 0 {
        let (ns, start) = (meter.left_ns, interval.start);
        (meter.sink)(Charge {
            line: Line::Unexplained,
            start,
            ns,
            cpu: None,
            detail: Detail::Nobody,
        });
    }
}

/// What a thread that sleeps is waited for.
#[derive(Clone, Copy)]
enum Waits {
    /// It has taken the request up: its sleep is in the middle of the work.
    No,
    /// To notice a packet, which came in on this CPU, or its own timer.
    Packet(Option<u32>),
    /// To accept the connection.
    Queued,
}

fn thread(
    side: Side,
    view: HostView<'_>,
    tid: u32,
    request: u32,
    (from, to): (u64, u64),
    waits: Waits,
    meter: &mut Meter<'_>,
) {
    let line = |line| Line::Thread(side, line);
    for stay in view.threads.between(tid, from, to) {
        match stay.being {
            Being::Running { cpu } => {
                for stretch in view.cpus.between(cpu, stay.start_ns, stay.end_ns) {
                    if stretch.doing == Doing::Run(tid) {
                        own_time(side, view, tid, request, cpu, stretch, meter);
                    } else {
                        interrupted(side, cpu, stretch, meter);
                    }
                }
            }
            Being::Runnable { cpu, throttled } => {
                for stretch in view.cpus.between(cpu, stay.start_ns, stay.end_ns) {
                    let (start, end) = (stretch.start_ns, stretch.end_ns);
                    match stretch.doing {
                        // Seen running while it was thought to wait: the records contradict each other.
                        Doing::Run(itself) | Doing::Presumed(itself) if itself == tid => {}
                        Doing::Run(_) | Doing::Presumed(_) | Doing::Idle if throttled => {
                            meter.charge(line(ThreadLine::Throttled), start, end, Some(cpu), Detail::Quota);
                        }
                        // Softirqs that were too much for their interrupt, in a thread of their own.
                        Doing::Run(other) if view.cpus.is_softirq_thread(other) => {
                            meter.charge(
                                line(ThreadLine::Softirq),
                                start,
                                end,
                                Some(cpu),
                                Detail::Task(other),
                            );
                        }
                        Doing::Run(other) => {
                            meter.charge(
                                line(ThreadLine::RunQueue),
                                start,
                                end,
                                Some(cpu),
                                Detail::Task(other),
                            );
                        }
                        Doing::Presumed(other) => {
                            meter.charge(
                                line(ThreadLine::RunQueue),
                                start,
                                end,
                                Some(cpu),
                                Detail::Presumed(other),
                            );
                        }
                        Doing::Idle => {
                            meter.charge(line(ThreadLine::Wakeup), start, end, Some(cpu), Detail::IdleCpu);
                        }
                        _ => interrupted(side, cpu, stretch, meter),
                    }
                }
            }
            Being::Asleep { sleep, .. } if stay.being.is_stopped() => {
                let detail = Detail::Stopped(sleep.state);
                meter.charge(
                    line(ThreadLine::Stopped),
                    stay.start_ns,
                    stay.end_ns,
                    None,
                    detail,
                );
            }
            Being::Asleep { cpu, sleep } => {
                let blocked = line(ThreadLine::Blocked);
                if matches!(waits, Waits::No) {
                    let detail = Detail::Asleep(sleep);
                    meter.charge(blocked, stay.start_ns, stay.end_ns, Some(cpu), detail);
                    continue;
                }
                let idly = |from, to, meter: &mut Meter<'_>| match waits {
                    // Its packet is in, or its timer is due, and nobody has woken it: what does that CPU do instead?
                    Waits::Packet(arrived_cpu) => {
                        unwoken(side, view, arrived_cpu.unwrap_or(cpu), (from, to), meter);
                    }
                    _ => {
                        let queue = line(ThreadLine::AcceptQueue);
                        meter.charge(queue, from, to, Some(cpu), Detail::NotAccepted);
                    }
                };
                let mut at = stay.start_ns;
                for work in view.active.between(tid, stay.start_ns, stay.end_ns) {
                    idly(at, work.start_ns, meter);
                    // It sleeps in the middle of another request's work, and this one has to wait for that.
                    let detail = Detail::AsleepForOther(sleep);
                    meter.charge(blocked, work.start_ns, work.end_ns, Some(cpu), detail);
                    at = work.end_ns;
                }
                idly(at, stay.end_ns, meter);
            }
        }
    }
}

/// The thread is due and nobody has woken it: what does the CPU do that ought to?
fn unwoken(side: Side, view: HostView<'_>, cpu: u32, (from, to): (u64, u64), meter: &mut Meter<'_>) {
    for stretch in view.cpus.between(cpu, from, to) {
        if stretch.doing == Doing::Idle {
            let line = Line::Thread(side, ThreadLine::Wakeup);
            meter.charge(line, stretch.start_ns, stretch.end_ns, Some(cpu), Detail::IdleCpu);
        } else {
            interrupted(side, cpu, stretch, meter);
        }
    }
}

/// The thread is current and not interrupted: does it work, or has it to make room in memory first?
fn own_time(
    side: Side,
    view: HostView<'_>,
    tid: u32,
    request: u32,
    cpu: u32,
    stretch: Stretch,
    meter: &mut Meter<'_>,
) {
    let mut rest = stretch;
    for reclaim in view.threads.reclaims(tid, stretch.start_ns, stretch.end_ns) {
        let before = Stretch {
            end_ns: reclaim.start_ns,
            ..rest
        };
        work(side, view, tid, request, cpu, before, meter);
        meter.charge(
            Line::Thread(side, ThreadLine::Blocked),
            reclaim.start_ns,
            reclaim.end_ns,
            Some(cpu),
            Detail::Reclaim(reclaim.for_cgroup),
        );
        rest.start_ns = reclaim.end_ns;
    }
    work(side, view, tid, request, cpu, rest, meter);
}

/// For whom does the thread work?
fn work(
    side: Side,
    view: HostView<'_>,
    tid: u32,
    request: u32,
    cpu: u32,
    stretch: Stretch,
    meter: &mut Meter<'_>,
) {
    let mut at = stretch.start_ns;
    let own = Line::Thread(side, ThreadLine::Compute);
    let others = Line::Thread(side, ThreadLine::OtherWork);
    for work in view
        .active
        .between(tid, stretch.start_ns, stretch.end_ns)
        .filter(|w| w.request != request)
    {
        meter.charge(own, at, work.start_ns, Some(cpu), Detail::Nobody);
        meter.charge(
            others,
            work.start_ns,
            work.end_ns,
            Some(cpu),
            Detail::OtherRequests,
        );
        at = work.end_ns;
    }
    meter.charge(own, at, stretch.end_ns, Some(cpu), Detail::Nobody);
}

/// Charges what takes a CPU from everyone; other stretches stay with the remainder.
fn interrupted(side: Side, cpu: u32, stretch: Stretch, meter: &mut Meter<'_>) {
    let (line, detail) = match stretch.doing {
        Doing::Steal => (ThreadLine::Steal, Detail::Hypervisor),
        Doing::Irq(number) => (ThreadLine::Irq, Detail::Irq(number)),
        Doing::Vector(number) => (ThreadLine::Irq, Detail::Vector(number)),
        Doing::Softirq(number) => (ThreadLine::Softirq, Detail::Softirq(number)),
        Doing::Run(_) | Doing::Presumed(_) | Doing::Idle => return,
    };
    meter.charge(
        Line::Thread(side, line),
        stretch.start_ns,
        stretch.end_ns,
        Some(cpu),
        detail,
    );
}
