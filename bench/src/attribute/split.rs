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
        cpu::{Cpus, Doing, Stretch},
        gap::Gaps,
        lasting::{Lasting, clipped, disjoint},
        thread::{Being, Nap, Stay, Threads},
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
    /// The CPU took no interrupts, and nobody counted it as stolen.
    Away,
    /// The cgroup's quota.
    Quota,
    /// The idle CPU.
    IdleCpu,
    /// A signal or a tracer stopped the thread: `TASK_*` bits.
    Stopped(u32),
    /// Asleep in the middle of its work.
    Asleep(Nap),
    /// The same, in the middle of another request's work, while this one waits for the thread.
    AsleepForOther(Nap),
    /// The thread reclaimed memory itself; whether its cgroup's limit asked for it.
    Reclaim(bool),
    /// SYNs were taken in and not answered: mostly the listener had no room, which no record says.
    Unanswered,
    /// The listener had no room for a first flight.
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

impl Lasting for Work {
    fn times(&mut self) -> (&mut u64, &mut u64) {
        (&mut self.start_ns, &mut self.end_ns)
    }
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
        self.0.values_mut().for_each(disjoint);
    }

    fn between(&self, tid: u32, start_ns: u64, end_ns: u64) -> impl Iterator<Item = Work> + '_ {
        clipped(self.0.get(&tid), start_ns, end_ns)
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
        Owner::Held => return sink(whole(Line::DelayedAck, Detail::Nobody)),
        Owner::Lost(segment, resend) => {
            return sink(whole(Line::Retransmit(segment), Detail::Resent(segment, resend)));
        }
        Owner::Unanswered | Owner::Refused => {
            let detail = match interval.owner {
                Owner::Unanswered => Detail::Unanswered,
                _ => Detail::QueueFull,
            };
            return sink(whole(Line::Thread(Side::Server, ThreadLine::AcceptQueue), detail));
        }
        Owner::Unknown => return sink(whole(Line::Unexplained, Detail::Nobody)),
        Owner::Wire { to: side, .. }
        | Owner::Waiting { side, .. }
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
    if !matches!(interval.owner, Owner::Wire { .. }) && view.gaps.of_timelines(from, to) {
        return sink(whole(Line::Unexplained, Detail::Nobody));
    }
    let mut meter = Meter {
        start: interval.start,
        host_start_ns: from,
        left_ns: length_ns,
        sink,
    };
    let holder = |tid| Holder {
        side,
        view,
        tid,
        request,
    };
    match interval.owner {
        Owner::Wire { cpu, .. } => {
            for stretch in view.cpus.kept_from(cpu, from, to) {
                interrupted(side, cpu, stretch, &mut meter);
            }
        }
        Owner::Stack { cpu, .. } => {
            for stretch in view.cpus.between(cpu, from, to) {
                interrupted(side, cpu, stretch, &mut meter);
            }
        }
        Owner::Waiting { tid, cpu, .. } => holder(tid).spend((from, to), Waits::Packet(cpu), &mut meter),
        Owner::Queued { tid, cpu, .. } => holder(tid).spend((from, to), Waits::Queued(cpu), &mut meter),
        Owner::Active { tid, .. } => holder(tid).spend((from, to), Waits::No, &mut meter),
        Owner::Held | Owner::Lost(..) | Owner::Unanswered | Owner::Refused | Owner::Unknown => {
            unreachable!("charged whole above")
        }
    }
    if meter.left_ns > 0 {
        let (ns, start) = (meter.left_ns, interval.start);
        let line = match interval.owner {
            Owner::Wire { .. } => Line::Network,
            _ => Line::Unexplained,
        };
        (meter.sink)(Charge {
            line,
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
    /// To accept the connection, whose first flight came in on this CPU.
    Queued(u32),
}

/// The thread that has the request in an interval.
struct Holder<'a> {
    side: Side,
    view: HostView<'a>,
    tid: u32,
    request: u32,
}

impl Holder<'_> {
    fn line(&self, line: ThreadLine) -> Line {
        Line::Thread(self.side, line)
    }

    fn spend(&self, (from, to): (u64, u64), waits: Waits, meter: &mut Meter<'_>) {
        for stay in self.view.threads.between(self.tid, from, to) {
            match stay.being {
                Being::Running { cpu } => self.running(stay, cpu, meter),
                Being::Runnable { cpu, throttled } => self.runnable(stay, cpu, throttled, meter),
                Being::Asleep { sleep, .. } if stay.being.is_stopped() => {
                    let (line, detail) = (self.line(ThreadLine::Stopped), Detail::Stopped(sleep.state));
                    meter.charge(line, stay.start_ns, stay.end_ns, None, detail);
                }
                Being::Asleep { cpu, sleep } => self.asleep(stay, cpu, sleep, waits, meter),
            }
        }
    }

    fn running(&self, stay: Stay, cpu: u32, meter: &mut Meter<'_>) {
        for stretch in self.view.cpus.between(cpu, stay.start_ns, stay.end_ns) {
            if stretch.doing == Doing::Run(self.tid) {
                self.own_time(cpu, stretch, meter);
            } else {
                interrupted(self.side, cpu, stretch, meter);
            }
        }
    }

    fn runnable(&self, stay: Stay, cpu: u32, throttled: bool, meter: &mut Meter<'_>) {
        for stretch in self.view.cpus.between(cpu, stay.start_ns, stay.end_ns) {
            let (line, detail) = match stretch.doing {
                // Seen running while it was thought to wait: the records contradict each other.
                Doing::Run(itself) | Doing::Presumed(itself) if itself == self.tid => continue,
                Doing::Run(_) | Doing::Presumed(_) | Doing::Idle if throttled => {
                    (ThreadLine::Throttled, Detail::Quota)
                }
                // Softirqs that were too much for their interrupt, in a thread of their own.
                Doing::Run(other) if self.view.cpus.is_softirq_thread(other) => {
                    (ThreadLine::Softirq, Detail::Task(other))
                }
                Doing::Run(other) => (ThreadLine::RunQueue, Detail::Task(other)),
                Doing::Presumed(other) if self.view.cpus.is_softirq_thread(other) => {
                    (ThreadLine::Softirq, Detail::Presumed(other))
                }
                Doing::Presumed(other) => (ThreadLine::RunQueue, Detail::Presumed(other)),
                Doing::Idle => (ThreadLine::Wakeup, Detail::IdleCpu),
                _ => {
                    interrupted(self.side, cpu, stretch, meter);
                    continue;
                }
            };
            meter.charge(
                self.line(line),
                stretch.start_ns,
                stretch.end_ns,
                Some(cpu),
                detail,
            );
        }
    }

    fn asleep(&self, stay: Stay, cpu: u32, sleep: Nap, waits: Waits, meter: &mut Meter<'_>) {
        let blocked = self.line(ThreadLine::Blocked);
        let idly = |from, to, meter: &mut Meter<'_>| match waits {
            Waits::No => meter.charge(blocked, from, to, Some(cpu), Detail::Asleep(sleep)),
            // Its packet is in, or its timer is due, and nobody has woken it: what does that CPU do instead?
            Waits::Packet(arrived_cpu) => self.unwoken(arrived_cpu.unwrap_or(cpu), (from, to), meter),
            Waits::Queued(arrived_cpu) => self.unaccepted(arrived_cpu, (from, to), meter),
        };
        if matches!(waits, Waits::No) {
            return idly(stay.start_ns, stay.end_ns, meter);
        }
        let mut at = stay.start_ns;
        for work in self.view.active.between(self.tid, stay.start_ns, stay.end_ns) {
            idly(at, work.start_ns, meter);
            // Mostly it sleeps in the middle of another request's work, and this one has to wait for that.
            let detail = if work.request == self.request {
                Detail::Asleep(sleep)
            } else {
                Detail::AsleepForOther(sleep)
            };
            meter.charge(blocked, work.start_ns, work.end_ns, Some(cpu), detail);
            at = work.end_ns;
        }
        idly(at, stay.end_ns, meter);
    }

    /// The thread is due and nobody has woken it: what does the CPU do that ought to?
    fn unwoken(&self, cpu: u32, (from, to): (u64, u64), meter: &mut Meter<'_>) {
        for stretch in self.view.cpus.between(cpu, from, to) {
            if stretch.doing == Doing::Idle {
                let line = self.line(ThreadLine::Wakeup);
                meter.charge(line, stretch.start_ns, stretch.end_ns, Some(cpu), Detail::IdleCpu);
            } else {
                interrupted(self.side, cpu, stretch, meter);
            }
        }
    }

    /// The connection is complete and the thread sleeps: has the CPU that took it in come to wake it?
    fn unaccepted(&self, cpu: u32, (from, to): (u64, u64), meter: &mut Meter<'_>) {
        for stretch in self.view.cpus.between(cpu, from, to) {
            if matches!(stretch.doing, Doing::Idle | Doing::Run(_) | Doing::Presumed(_)) {
                let (line, detail) = (self.line(ThreadLine::AcceptQueue), Detail::NotAccepted);
                meter.charge(line, stretch.start_ns, stretch.end_ns, Some(cpu), detail);
            } else {
                interrupted(self.side, cpu, stretch, meter);
            }
        }
    }

    /// The thread is current and not interrupted: does it work, or has it to make room in memory first?
    fn own_time(&self, cpu: u32, stretch: Stretch, meter: &mut Meter<'_>) {
        let mut at = stretch.start_ns;
        let reclaims = self.view.threads.reclaims(self.tid, at, stretch.end_ns);
        for reclaim in reclaims {
            self.work(cpu, (at, reclaim.start_ns), meter);
            let detail = Detail::Reclaim(reclaim.for_cgroup);
            let line = self.line(ThreadLine::Blocked);
            meter.charge(line, reclaim.start_ns, reclaim.end_ns, Some(cpu), detail);
            at = reclaim.end_ns;
        }
        self.work(cpu, (at, stretch.end_ns), meter);
    }

    /// For whom does the thread work?
    fn work(&self, cpu: u32, (from, to): (u64, u64), meter: &mut Meter<'_>) {
        let mut at = from;
        let own = self.line(ThreadLine::Compute);
        let others = self.line(ThreadLine::OtherWork);
        let work = self.view.active.between(self.tid, from, to);
        for work in work.filter(|work| work.request != self.request) {
            meter.charge(own, at, work.start_ns, Some(cpu), Detail::Nobody);
            let detail = Detail::OtherRequests;
            meter.charge(others, work.start_ns, work.end_ns, Some(cpu), detail);
            at = work.end_ns;
        }
        meter.charge(own, at, to, Some(cpu), Detail::Nobody);
    }
}

/// Charges what takes a CPU from everyone; other stretches stay with the remainder.
fn interrupted(side: Side, cpu: u32, stretch: Stretch, meter: &mut Meter<'_>) {
    let (line, detail) = match stretch.doing {
        Doing::Steal => (ThreadLine::Steal, Detail::Hypervisor),
        Doing::Away => (ThreadLine::Steal, Detail::Away),
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pqtail_common::{Beat, Head, Span, Switch, kind};
    use zerocopy::IntoBytes as _;

    use super::*;
    use crate::timeline::cpu::{Raw, head};

    const SERVER: u32 = 7;

    fn told(at_ns: u64, kind: u8, cpu: u16, tid: u32) -> Head {
        Head {
            at_ns,
            kind,
            flags: 0,
            cpu,
            tid,
        }
    }

    fn switch(at_ns: u64, cpu: u16, from: u32, to: u32, prev_state: u32, comm: &[u8]) -> Raw {
        let mut next_comm = [0; 16];
        next_comm[..comm.len()].copy_from_slice(comm);
        let switch = Switch {
            head: told(at_ns, kind::SWITCH, cpu, from),
            next_tid: to,
            next_comm,
            prev_state,
            ..Switch::default()
        };
        switch.as_bytes().try_into().unwrap()
    }

    fn softirq(start_ns: u64, end_ns: u64, cpu: u16, tid: u32) -> Raw {
        let span = Span {
            head: told(end_ns, kind::SOFTIRQ, cpu, tid),
            start_ns,
            number: 3,
            ..Span::default()
        };
        span.as_bytes().try_into().unwrap()
    }

    /// A beat every 10 ns until the CPU goes away at 122, one when it is back at 175, and on from 180 on.
    fn beats(tid: u32) -> Vec<Raw> {
        let regular = (0..=12).chain(18..=30).map(|count| 10 * count);
        let times = regular.clone().take(13).chain([175]).chain(regular.skip(13));
        let beat = |at_ns| Beat {
            head: told(at_ns, kind::BEAT, 0, tid),
            ..Beat::default()
        };
        times
            .map(|at_ns| beat(at_ns).as_bytes().try_into().unwrap())
            .collect()
    }

    fn by_time(mut records: Vec<Raw>) -> Vec<Raw> {
        records.sort_by_key(|record| head(record).at_ns);
        records
    }

    /// ns and detail by line of request 1, whose interval from 100 to 200 the server's thread has.
    fn spent(records: &[Raw], active: &[(u32, u64, u64)], waits: Waits) -> BTreeMap<(Line, Detail), u64> {
        let cpus = Cpus::build(records, &Gaps::default());
        let threads = Threads::build(records, &BTreeSet::from([SERVER]));
        let mut work = Active::default();
        for &(request, start_ns, end_ns) in active {
            work.add(SERVER, request, start_ns, end_ns);
        }
        work.seal();
        let gaps = Gaps::default();
        let holder = Holder {
            side: Side::Server,
            view: HostView {
                cpus: &cpus,
                threads: &threads,
                active: &work,
                gaps: &gaps,
            },
            tid: SERVER,
            request: 1,
        };
        let mut charges = BTreeMap::new();
        let mut sink =
            |charge: Charge| *charges.entry((charge.line, charge.detail)).or_default() += charge.ns;
        let mut meter = Meter {
            start: RunNs(100),
            host_start_ns: 100,
            left_ns: 100,
            sink: &mut sink,
        };
        holder.spend((100, 200), waits, &mut meter);
        charges
    }

    fn line(line: ThreadLine) -> Line {
        Line::Thread(Side::Server, line)
    }

    #[test]
    fn a_softirq_where_the_connection_came_in_is_no_wait_to_be_accepted() {
        // The thread left CPU 0; the first flight comes in on CPU 1, whose softirq lasts from 110 to 150.
        let records = [
            switch(50, 0, SERVER, 0, 1, b""),
            switch(60, 1, 9, 0, 1, b""),
            softirq(110, 150, 1, 0),
            switch(300, 0, 0, SERVER, 0, b"server"),
            switch(301, 1, 0, 9, 0, b"other"),
        ];
        assert_eq!(
            spent(&records, &[], Waits::Queued(1)),
            BTreeMap::from([
                ((line(ThreadLine::Softirq), Detail::Softirq(3)), 40),
                ((line(ThreadLine::AcceptQueue), Detail::NotAccepted), 60),
            ])
        );
    }

    #[test]
    fn a_sleep_in_its_own_work_is_not_for_another_request() {
        let records = [
            switch(50, 0, SERVER, 0, 2, b""),
            switch(300, 0, 0, SERVER, 0, b"server"),
        ];
        let nap = Nap {
            state: 2,
            ..Nap::default()
        };
        assert_eq!(
            spent(&records, &[(1, 100, 140), (2, 140, 200)], Waits::Packet(None)),
            BTreeMap::from([
                ((line(ThreadLine::Blocked), Detail::Asleep(nap)), 40),
                ((line(ThreadLine::Blocked), Detail::AsleepForOther(nap)), 60),
            ])
        );
    }

    #[test]
    fn the_softirq_thread_that_is_only_presumed_there_is_softirq_too() {
        // ksoftirqd comes in; its switch-out is lost, and the thread that comes in at 300 leaves somebody else behind.
        let records = [
            switch(90, 0, SERVER, 19, 0, b"ksoftirqd/0"),
            switch(300, 0, 9, SERVER, 0, b"server"),
        ];
        assert_eq!(
            spent(&records, &[], Waits::Packet(None)),
            BTreeMap::from([((line(ThreadLine::Softirq), Detail::Presumed(19)), 100)])
        );
    }
    #[test]
    fn a_cpu_that_was_away_computes_nothing_and_queues_nobody() {
        let away = ((line(ThreadLine::Steal), Detail::Away), 45);
        let mut runs = beats(SERVER);
        runs.push(switch(5, 0, 9, SERVER, 0, b"server"));
        assert_eq!(
            spent(&by_time(runs), &[], Waits::No),
            BTreeMap::from([((line(ThreadLine::Compute), Detail::Nobody), 55), away])
        );
        let mut queues = beats(9);
        queues.push(switch(5, 0, SERVER, 9, 0, b"hog"));
        assert_eq!(
            spent(&by_time(queues), &[], Waits::No),
            BTreeMap::from([((line(ThreadLine::RunQueue), Detail::Task(9)), 55), away])
        );
    }

    #[test]
    fn a_packet_is_under_way_until_the_cpu_that_takes_it_in_is_gone() {
        let cpus = Cpus::build(&by_time(beats(SERVER)), &Gaps::default());
        let (threads, active, gaps) = Default::default();
        let view = HostView {
            cpus: &cpus,
            threads: &threads,
            active: &active,
            gaps: &gaps,
        };
        let hosts = Hosts {
            client: view,
            server: view,
            alignment: &Alignment::identity(),
        };
        let arriving = |start, end| {
            let interval = Interval {
                label: String::new(),
                start: RunNs(start),
                end: RunNs(end),
                owner: Owner::Wire {
                    to: Side::Server,
                    cpu: 0,
                },
            };
            let mut charges = BTreeMap::new();
            split(&hosts, &interval, 1, &mut |charge| {
                *charges.entry(charge.line).or_default() += charge.ns;
            });
            charges
        };
        let steal = line(ThreadLine::Steal);
        // Sent before it left, and while it was away.
        assert_eq!(
            arriving(100, 178),
            BTreeMap::from([(steal, 45), (Line::Network, 33)])
        );
        assert_eq!(
            arriving(150, 178),
            BTreeMap::from([(steal, 25), (Line::Network, 3)])
        );
        // It was back for long: the packet was not there yet.
        assert_eq!(arriving(100, 190), BTreeMap::from([(Line::Network, 90)]));
    }
}
