//! One trial: its recordings joined, every request split, its outliers explained.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    rc::Rc,
};

use anyhow::Context as _;
use pqtail_common::{kind, pending};

use super::{
    Recorded, Row, Story, lanes,
    totals::{Sum, Totals},
};
use crate::{
    align::{Alignment, align},
    attribute::{
        cause::{Baseline, Names, Witness},
        ledger::{Ledger, Line, Segment, Side, ThreadLine},
        split::{Active, Charge, Detail, HostView, Hosts, split},
        story::{DISPATCH, Interval, Owner, crossing_name, intervals, one_way_ns},
    },
    clock::{HostNs, RunNs},
    plan::Trial,
    record::{
        manifest::{Host, Manifest},
        stamps::{ConnectionStamps, RequestStamps},
    },
    report::summary::{Outlier, SwimLanes},
    statistics::quantile,
    timeline::{
        connection::{Crossing, Incident, Tuple, View, Views, crossings},
        cpu::{Cpus, Raw, head, seen_running},
        gap::Gaps,
        thread::Threads,
        witness::{Served, witness},
    },
    verdict::LATENESS_NS_MAX,
};

/// Requests above this quantile of their arm and trial are outliers.
pub(super) const TAIL_QUANTILE: f64 = 0.99;

/// Lanes are drawn of this many of a trial's worst.
const LANES_PER_TRIAL: usize = 3;

/// From this length on a wait is looked up and not walked through, ns.
const LONG_WAIT_NS: u64 = 1_000_000;

/// The number of no request.
const NOBODY: u32 = u32::MAX;

/// What crossings took, by their place in the exchange and their name, ns.
pub(super) type OneWays = BTreeMap<(usize, String), Vec<i64>>;

/// What one trial comes to.
pub(super) struct TrialAnalysis {
    pub(super) trial: Trial,
    pub(super) rows: Vec<Row>,
    /// By row: time on environment causes, ns.
    pub(super) environment_ns: Vec<u64>,
    pub(super) outliers: Vec<Outlier>,
    /// Culprits of all outliers: line and name to excess-bearing time, ns.
    pub(super) culprits: BTreeMap<(Line, String), u64>,
    /// Excess of all outliers by line, ns.
    pub(super) excess_ns: BTreeMap<Line, u64>,
    pub(super) lanes: Vec<SwimLanes>,
    pub(super) alignment: Option<Alignment>,
    pub(super) one_way_ns: OneWays,
    /// Where the time lies between the intended and the actual start, of the measured requests that began too late to be in time
    /// ([`LATENESS_NS_MAX`]).
    pub(super) late: Ledger,
    pub(super) steal_known: bool,
    /// What the counters grew by, ns by kernel folder and CPU.
    pub(super) steal_ns: BTreeMap<PathBuf, BTreeMap<u32, u64>>,
    pub(super) damaged: BTreeMap<PathBuf, u64>,
}

/// A trial's requests, explained.
#[derive(Default)]
struct Explained {
    rows: Vec<Row>,
    environment_ns: Vec<u64>,
    one_way_ns: OneWays,
    late: Ledger,
}

/// A trial's records, joined.
struct Joined<'a> {
    manifest: &'a Manifest,
    trial: Trial,
    /// The cell's.
    name: String,
    requests: Vec<RequestStamps>,
    client: End,
    server: End,
    alignment: Option<Alignment>,
    measured: BTreeSet<u32>,
    steal_ns: BTreeMap<PathBuf, BTreeMap<u32, u64>>,
    connections: HashMap<Tuple, Vec<Served>>,
    /// Whose a connection of the client is, by its first SYN: the request with the lowest number that it could belong to. Stamps
    /// that are damaged could claim one connection any number of times.
    owners: HashMap<(Tuple, HostNs), u32>,
}

/// One end's timelines.
struct End {
    machine: Rc<Machine>,
    active: Active,
    views: Views,
}

/// One kernel's timelines; both ends have the same where they share it.
#[derive(Default)]
struct Machine {
    cpus: Cpus,
    threads: Threads,
    gaps: Gaps,
}

impl End {
    fn build(host: &Host, records: &[Raw], machine: Rc<Machine>, ports: &[u16]) -> Self {
        Self {
            machine,
            active: Active::default(),
            views: Views::build(records, host.netns, ports),
        }
    }

    fn view(&self) -> HostView<'_> {
        HostView {
            cpus: &self.machine.cpus,
            threads: &self.machine.threads,
            active: &self.active,
            gaps: &self.machine.gaps,
        }
    }
}

/// What belongs to one request.
struct Case<'a> {
    view: Option<&'a View>,
    /// The same connection as the server's host saw it.
    there: Option<&'a View>,
    connection: Option<&'a Served>,
    crossings: Vec<Crossing>,
}

impl<'a> Case<'a> {
    fn incidents(&self) -> impl Iterator<Item = (Side, &'a Incident)> + use<'a> {
        let of = |side: Side, view: Option<&'a View>| {
            view.into_iter()
                .flat_map(|view| &view.incidents)
                .map(move |each| (side, each))
        };
        of(Side::Client, self.view).chain(of(Side::Server, self.there))
    }
}

impl<'a> Joined<'a> {
    fn build(manifest: &'a Manifest, recorded: Recorded) -> Self {
        let ports: BTreeSet<u16> = recorded
            .requests
            .iter()
            .map(|request| request.remote_port)
            .collect();
        let ports: Vec<u16> = ports.into_iter().collect();
        let served = served(manifest, &recorded, &ports);
        let mut client_machine = Rc::default();
        let mut server_machine = Rc::default();
        let mut steal_ns = BTreeMap::new();
        for (folder, records) in &recorded.kernels {
            let machine = Rc::new(machine(manifest, folder, records, &recorded));
            steal_ns.insert(folder.clone(), machine.cpus.steal_ns.clone());
            if manifest.client.kernel.as_ref() == Some(folder) {
                client_machine = Rc::clone(&machine);
            }
            if manifest.server.kernel.as_ref() == Some(folder) {
                server_machine = machine;
            }
        }
        let records = |host: &Host| {
            let records = host
                .kernel
                .as_ref()
                .and_then(|folder| recorded.kernels.get(folder));
            records.map_or(&[][..], Vec::as_slice)
        };
        let client = End::build(
            &manifest.client,
            records(&manifest.client),
            client_machine,
            &ports,
        );
        let server = End::build(
            &manifest.server,
            records(&manifest.server),
            server_machine,
            &ports,
        );
        let alignment = align(&Views::exchanges(&client.views, &server.views));
        let mut connections: HashMap<Tuple, Vec<Served>> = HashMap::new();
        for connection in served {
            connections
                .entry(server_tuple(&connection.stamps))
                .or_default()
                .push(connection);
        }
        for list in connections.values_mut() {
            list.sort_unstable_by_key(first_act);
        }
        let measured = manifest
            .client
            .threads
            .iter()
            .chain(&manifest.server.threads)
            .copied()
            .collect();
        let mut joined = Self {
            manifest,
            name: manifest.plan.cell_name(recorded.trial.cell()),
            trial: recorded.trial,
            requests: recorded.requests,
            client,
            server,
            alignment,
            measured,
            steal_ns,
            connections,
            owners: HashMap::new(),
        };
        joined.find_owners();
        joined.note_work();
        joined
    }

    fn find_owners(&mut self) {
        for request in &self.requests {
            let tuple = client_tuple(request);
            if let Some(begin) = self.view(request, &tuple).and_then(View::begin) {
                self.owners.entry((tuple, begin)).or_insert(request.request);
            }
        }
    }

    /// The connection that began while the request was under way.
    fn view(&self, request: &RequestStamps, tuple: &Tuple) -> Option<&View> {
        let end = HostNs(request.done_ns.max(request.connected_ns).max(request.closed_ns));
        self.client.views.find(tuple, HostNs(request.start_ns), end)
    }

    /// Tells each thread's work on one request from its work on another.
    fn note_work(&mut self) {
        let (mut client, mut server) = (Active::default(), Active::default());
        for request in &self.requests {
            let case = self.case(request);
            let (tid, number) = (request.worker_tid, request.request);
            for (start_ns, end_ns) in client_work(request, &case) {
                client.add(tid, number, start_ns, end_ns);
            }
            if let Some(Served {
                stamps: connection, ..
            }) = case.connection
            {
                let tid = connection.worker_tid;
                server.add(
                    tid,
                    number,
                    connection.first_byte_ns,
                    connection.flight_written_ns,
                );
                server.add(
                    tid,
                    number,
                    connection.finished_read_ns,
                    connection.response_written_ns,
                );
            }
        }
        client.seal();
        server.seal();
        (self.client.active, self.server.active) = (client, server);
    }

    fn case(&self, request: &RequestStamps) -> Case<'_> {
        let tuple = client_tuple(request);
        let view = self.view(request, &tuple).filter(|view| {
            let owner = view.begin().and_then(|begin| self.owners.get(&(tuple, begin)));
            owner == Some(&request.request)
        });
        let there = view.and_then(|view| self.server.views.same(&tuple, view.initial));
        let connection = there.and_then(|there| {
            let begin = there.begin()?.0;
            let list = self.connections.get(&tuple)?;
            list.get(list.partition_point(|each| first_act(each) < begin))
        });
        let crossings = match (view, there) {
            (Some(here), Some(there)) => crossings(here, there, HostNs(request.done_ns)),
            _ => Vec::new(),
        };
        Case {
            view,
            there,
            connection,
            crossings,
        }
    }

    fn chain(&self, request: &RequestStamps, case: &Case<'_>) -> Vec<Interval> {
        // A crossing is told from the segments around it: with one missing, another may stand in its place.
        let crossings = if self.misses(request, Gaps::of_packets) {
            &[]
        } else {
            &case.crossings[..]
        };
        intervals(request, case.connection, crossings, self.alignment.as_ref())
    }

    /// Splits every interval of a request.
    fn charge(&self, request: &RequestStamps, chain: &[Interval], mut sink: impl FnMut(usize, Charge)) {
        let identity = Alignment::identity();
        let hosts = Hosts {
            client: self.client.view(),
            server: self.server.view(),
            alignment: self.alignment.as_ref().unwrap_or(&identity),
        };
        for (index, interval) in chain.iter().enumerate() {
            split(&hosts, interval, request.request, &mut |charge| {
                sink(index, charge);
            });
        }
    }

    /// Whether a charge is the environment's doing: the machine or the neighbours, not the exchange.
    fn is_environment(&self, charge: &Charge) -> bool {
        match (charge.line, charge.detail) {
            (Line::Thread(_, ThreadLine::Steal | ThreadLine::Throttled | ThreadLine::Stopped), _) => true,
            (Line::Thread(_, ThreadLine::RunQueue), Detail::Task(tid) | Detail::Presumed(tid)) => {
                !self.measured.contains(&tid)
            }
            _ => false,
        }
    }

    /// Whether records are missing on either host while a request lasts.
    fn misses(&self, request: &RequestStamps, what: impl Fn(&Gaps, u64, u64) -> bool) -> bool {
        let (from, to) = (request.intended_ns, request.done_ns);
        let server = |ns: u64| match &self.alignment {
            Some(alignment) => alignment.to_server(Alignment::client(HostNs(ns))).0,
            None => ns,
        };
        what(&self.client.machine.gaps, from, to) || what(&self.server.machine.gaps, server(from), server(to))
    }

    fn names(&self, side: Side) -> Names<'_> {
        let (machine, host) = match side {
            Side::Client => (&self.client.machine, &self.manifest.client),
            Side::Server => (&self.server.machine, &self.manifest.server),
        };
        let trials = &self.manifest.trials;
        let record = trials.iter().find(|each| each.trial.index == self.trial.index);
        let kernel = host.kernel.as_ref().map(|folder| folder.display().to_string());
        Names {
            cpus: &machine.cpus,
            threads: &machine.threads,
            facts: &host.facts,
            functions: record
                .zip(kernel)
                .and_then(|(record, kernel)| record.kernel.get(&kernel))
                .map(|kernel| &kernel.functions),
        }
    }

    fn witness(&self, request: &RequestStamps, case: &Case<'_>, chain: &[Interval]) -> Witness<'_> {
        let intended = Alignment::client(HostNs(request.intended_ns));
        let mut witness = Witness::new(intended, self.names(Side::Client), self.names(Side::Server));
        self.charge(request, chain, |index, charge| {
            witness.see(&chain[index].label, &charge);
        });
        let done = Alignment::client(HostNs(request.done_ns));
        for (side, incident) in case.incidents() {
            let (facts, at) = match (side, &self.alignment) {
                (Side::Client, _) => (&self.manifest.client.facts, Alignment::client(incident.at)),
                (Side::Server, Some(alignment)) => {
                    (&self.manifest.server.facts, alignment.server(incident.at))
                }
                (Side::Server, None) => continue,
            };
            let host = if side == Side::Client { "client" } else { "server" };
            let data = Line::Retransmit(Segment::Data);
            let (line, what) = match incident.kind {
                kind::DROP => {
                    let reason = facts.drop_reasons.get(&incident.reason);
                    let reason = reason.map_or("reason not named by this kernel", String::as_str);
                    (data, format!("segment dropped: {reason}"))
                }
                kind::RETRANSMIT => (data, "segment sent again".to_owned()),
                kind::RETRANSMIT_SYNACK => {
                    (Line::Retransmit(Segment::SynAck), "SYN-ACK sent again".to_owned())
                }
                // Nothing was armed any more: the kernel lets such a firing pass.
                kind::WRITE_TIMER if incident.reason == 0 => continue,
                kind::WRITE_TIMER => (
                    data,
                    match incident.reason {
                        pending::LOSS_PROBE => "timer for a tail-loss probe fired".to_owned(),
                        pending::REORDER => "timer of the reordering window fired".to_owned(),
                        _ => "retransmission timer fired".to_owned(),
                    },
                ),
                kind::DELAYED_ACK_TIMER => (Line::DelayedAck, "delayed-ACK timer fired".to_owned()),
                _ => continue,
            };
            // Timers of a connection may still fire long after the request is over.
            if at <= done {
                witness.note(at, line, format!("{host}: {what}"));
            }
        }
        witness
    }

    fn outlier(&self, row: &Row, ledger: Ledger, baseline: &Baseline, witness: Witness<'_>) -> Outlier {
        let clock_error_ns = self.alignment.as_ref().map_or(0, |alignment| alignment.error_ns);
        let (cause, excess_ns, share) = baseline.cause(&ledger, clock_error_ns);
        Outlier {
            request: row.stamps.request,
            arm: self.name.clone(),
            trial: self.trial.index,
            latency_ns: row.stamps.latency_ns().unwrap_or(0),
            ledger,
            cause,
            culprit: witness.culprit(cause),
            excess_ns,
            share,
            incomplete: row.incomplete,
            evidence: witness.evidence(cause),
        }
    }

    fn lanes(&self, request: &RequestStamps, case: &Case<'_>) -> SwimLanes {
        let identity = Alignment::identity();
        lanes::draw(&lanes::Scene {
            request,
            connection: case.connection.map(|served| &served.stamps),
            crossings: &case.crossings,
            client: self.client.view(),
            server: self.server.view(),
            client_cpus: &self.manifest.client.cpus,
            server_cpus: &self.manifest.server.cpus,
            alignment: self.alignment.as_ref().unwrap_or(&identity),
            name: &self.name,
            trial: self.trial,
        })
    }

    fn story(&self, rows: &[Row], baseline: &Baseline, number: u32) -> anyhow::Result<Story> {
        let row = rows
            .iter()
            .find(|row| row.stamps.request == number)
            .with_context(|| {
                format!(
                    "trial {} has no request {number}: {}",
                    self.trial.index,
                    match (rows.first(), rows.last()) {
                        (Some(first), Some(last)) => format!(
                            "its requests are {} to {}",
                            first.stamps.request, last.stamps.request
                        ),
                        _ => "none of its requests was recorded".to_owned(),
                    }
                )
            })?;
        let ledger = row.ledger.with_context(|| {
            if row.stamps.latency_ns().is_none() {
                format!(
                    "request {number} has no latency to explain: it ended as {:?}",
                    row.stamps.outcome()
                )
            } else {
                "the kernel was not recorded in this run (--no-probes): there is nothing to explain with"
                    .to_owned()
            }
        })?;
        let case = self.case(&row.stamps);
        let chain = self.chain(&row.stamps, &case);
        let witness = self.witness(&row.stamps, &case, &chain);
        let mut parts: Vec<Ledger> = vec![Ledger::default(); chain.len()];
        self.charge(&row.stamps, &chain, |index, charge| {
            parts[index].charge(charge.line, charge.ns);
        });
        Ok(Story {
            outlier: self.outlier(row, ledger, baseline, witness),
            lanes: self.lanes(&row.stamps, &case),
            intervals: chain.into_iter().zip(parts).collect(),
        })
    }

    /// The thread that a request waits for, and the CPU where its packet came in, if it is the client's, it is long, and the
    /// thread does nothing for this request meanwhile: then the wait is the same for all that wait.
    fn long_wait(
        &self,
        request: &RequestStamps,
        case: &Case<'_>,
        interval: &Interval,
    ) -> Option<(u32, Option<u32>)> {
        let Owner::Waiting {
            side: Side::Client,
            tid,
            cpu,
        } = interval.owner
        else {
            return None;
        };
        let (from, to) = (interval.start.0.cast_unsigned(), interval.end.0.cast_unsigned());
        let is_long = to - from >= LONG_WAIT_NS;
        let works = || {
            let mut work = client_work(request, case).into_iter();
            work.any(|(start_ns, end_ns)| start_ns < to && end_ns > from)
        };
        let is_common = is_long && !works() && !self.client.machine.gaps.of_timelines(from, to);
        is_common.then_some((tid, cpu))
    }

    /// What the client's thread did over the whole trial, as those see it that wait for it.
    fn totals(&self, (tid, cpu): (u32, Option<u32>)) -> Totals {
        let begin = self.requests.iter().map(|each| each.intended_ns).min();
        let end = self.requests.iter().map(|each| each.done_ns).max();
        let mut totals = Totals::default();
        let whole = Interval {
            label: String::new(),
            start: Alignment::client(HostNs(begin.unwrap_or(0))),
            end: Alignment::client(HostNs(end.unwrap_or(0))),
            owner: Owner::Waiting {
                side: Side::Client,
                tid,
                cpu,
            },
        };
        let hosts = Hosts {
            client: HostView {
                // Where records are missing nobody asks.
                gaps: &Gaps::default(),
                ..self.client.view()
            },
            server: self.server.view(),
            alignment: &Alignment::identity(),
        };
        split(&hosts, &whole, NOBODY, &mut |charge| {
            // The remainder is told by what the pieces leave.
            if charge.line != Line::Unexplained {
                totals.push(charge, self.is_environment(&charge));
            }
        });
        totals
    }

    /// Every request with its ledger, and what all of them tell together.
    fn explained(&self) -> Explained {
        let mut waits: HashMap<(u32, Option<u32>), Totals> = HashMap::new();
        let mut explained = Explained::default();
        let recorded = self.manifest.client.kernel.is_some();
        for request in &self.requests {
            let mut row = Row {
                stamps: *request,
                ledger: None,
                incomplete: false,
            };
            let mut whole = Sum::default();
            if request.latency_ns().is_some() && recorded {
                let case = self.case(request);
                self.one_way(request, &case.crossings, &mut explained.one_way_ns);
                for interval in &self.chain(request, &case) {
                    let part = self.part(request, &case, interval, &mut waits);
                    whole.ledger += &part.ledger;
                    whole.environment_ns += part.environment_ns;
                    let took_ns = (interval.end - interval.start).cast_unsigned();
                    if interval.label == DISPATCH && took_ns > LATENESS_NS_MAX && request.is_measured() {
                        explained.late += &part.ledger;
                    }
                }
                row.ledger = Some(whole.ledger);
                row.incomplete = self.misses(request, Gaps::between);
            }
            explained.rows.push(row);
            explained.environment_ns.push(whole.environment_ns);
        }
        explained
    }

    /// One interval of a request, split. `waits` keeps what is the same for all that wait.
    fn part(
        &self,
        request: &RequestStamps,
        case: &Case<'_>,
        interval: &Interval,
        waits: &mut HashMap<(u32, Option<u32>), Totals>,
    ) -> Sum {
        if let Some(key) = self.long_wait(request, case, interval) {
            let totals = waits.entry(key).or_insert_with(|| self.totals(key));
            let mut waited = totals.between(interval.start, interval.end);
            let left_ns = (interval.end - interval.start).cast_unsigned() - waited.ledger.total_ns();
            waited.add(Line::Unexplained, left_ns, false);
            return waited;
        }
        let mut part = Sum::default();
        self.charge(request, std::slice::from_ref(interval), |_, charge| {
            part.add(charge.line, charge.ns, self.is_environment(&charge));
        });
        part
    }

    /// What the path took in a measured request, if it is one between two kernels.
    fn one_way(&self, request: &RequestStamps, crossings: &[Crossing], into: &mut OneWays) {
        let between_two = self.alignment.as_ref().filter(|_| !self.manifest.shares_kernel());
        let Some(alignment) = between_two.filter(|_| request.is_measured()) else {
            return;
        };
        if self.misses(request, Gaps::of_packets) {
            return;
        }
        for (place, crossing) in crossings.iter().enumerate().filter(|(_, each)| each.repeats == 0) {
            let key = (place, crossing_name(crossing));
            into.entry(key).or_default().push(one_way_ns(crossing, alignment));
        }
    }
}

/// The server's connections: as it stamped them itself, else as the kernel's records tell them, which then stand in for its stamps.
fn served(manifest: &Manifest, recorded: &Recorded, ports: &[u16]) -> Vec<Served> {
    let server = &manifest.server;
    let records = server
        .kernel
        .as_ref()
        .and_then(|folder| recorded.kernels.get(folder));
    match records {
        Some(records) if recorded.connections.is_empty() => {
            witness(records, server.netns, ports, &server.threads)
        }
        _ => recorded
            .connections
            .iter()
            .map(|&stamps| Served {
                stamps,
                handshakes: Vec::new(),
            })
            .collect(),
    }
}

/// The first that is known of a connection; when a foreign server accepted it is not.
fn first_act(connection: &Served) -> u64 {
    let stamps = &connection.stamps;
    if stamps.accepted_ns > 0 {
        stamps.accepted_ns
    } else {
        stamps.first_byte_ns
    }
}

/// Timelines of the kernel with this folder, from its records and from what shows its threads running: the stamps that they took
/// themselves, and reads and calls of those that take none.
fn machine(manifest: &Manifest, folder: &PathBuf, records: &[Raw], recorded: &Recorded) -> Machine {
    let (mut tids, mut cpus) = (BTreeSet::new(), BTreeSet::new());
    let mut seen = Vec::new();
    for (host, is_client) in [(&manifest.client, true), (&manifest.server, false)] {
        if host.kernel.as_ref() != Some(folder) {
            continue;
        }
        tids.extend(host.threads.iter().copied());
        cpus.extend(host.cpus.iter().copied());
        // Only a pinned thread's stamps say on which CPU it was.
        let pinned: HashMap<u32, u16> = host
            .threads
            .iter()
            .copied()
            .zip(host.cpus.iter().map(|&cpu| cpu as u16))
            .collect();
        let mut see = |tid: u32, stamps: &[u64]| {
            if let Some(&cpu) = pinned.get(&tid) {
                seen.extend(
                    stamps
                        .iter()
                        .filter(|&&at| at > 0)
                        .map(|&at| seen_running(at, tid, cpu)),
                );
            }
        };
        if is_client {
            for request in &recorded.requests {
                see(request.worker_tid, &client_stamps(request));
            }
        } else {
            for connection in &recorded.connections {
                see(connection.worker_tid, &server_stamps(connection));
            }
        }
    }
    let calls = records.iter().map(head).filter(|head| {
        let is_made_by_its_thread = matches!(head.kind, kind::READ | kind::CALL);
        is_made_by_its_thread && tids.contains(&head.tid)
    });
    seen.extend(calls.map(|head| seen_running(head.at_ns, head.tid, head.cpu)));
    let damaged = recorded.missing.get(folder).map_or(&[][..], Vec::as_slice);
    let gaps = Gaps::build(records, damaged, &cpus);
    let records = super::in_order([records, &seen].concat());
    Machine {
        cpus: Cpus::build(&records, &gaps),
        gaps,
        threads: Threads::build(&records, &tids),
    }
}

/// When the load generator's thread worked on a request: begins and ends on its clock, ns; those that never came to be are empty
/// or turned round.
fn client_work(request: &RequestStamps, case: &Case<'_>) -> [(u64, u64); 4] {
    let connecting_ns = case.view.and_then(View::begin).map_or(0, |at| at.0);
    [
        (request.start_ns, connecting_ns),
        (request.connected_ns, request.client_hello_written_ns),
        (request.first_server_byte_ns, request.request_written_ns),
        (request.first_response_byte_ns, request.done_ns),
    ]
}

/// Times that the load generator's thread took itself.
fn client_stamps(request: &RequestStamps) -> [u64; 8] {
    [
        request.start_ns,
        request.connected_ns,
        request.client_hello_written_ns,
        request.first_server_byte_ns,
        request.handshake_done_ns,
        request.request_written_ns,
        request.first_response_byte_ns,
        request.done_ns,
    ]
}

/// Times that the server's thread took itself.
fn server_stamps(connection: &ConnectionStamps) -> [u64; 6] {
    [
        connection.accepted_ns,
        connection.first_byte_ns,
        connection.flight_written_ns,
        connection.finished_read_ns,
        connection.request_read_ns,
        connection.response_written_ns,
    ]
}

fn client_tuple(request: &RequestStamps) -> Tuple {
    Tuple {
        client: request.local,
        client_port: request.local_port,
        server: request.remote,
        server_port: request.remote_port,
    }
}

fn server_tuple(connection: &ConnectionStamps) -> Tuple {
    Tuple {
        client: connection.remote,
        client_port: connection.remote_port,
        server: connection.local,
        server_port: connection.local_port,
    }
}

/// Measured rows with a ledger, ascending by latency and number.
fn ascending(rows: &[Row]) -> Vec<(u64, &Row, Ledger)> {
    let mut ascending: Vec<_> = rows
        .iter()
        .filter(|row| row.stamps.is_measured())
        .filter_map(|row| Some((row.stamps.latency_ns()?, row, row.ledger?)))
        .collect();
    ascending.sort_unstable_by_key(|(latency, row, _)| (*latency, row.stamps.request));
    ascending
}

pub(super) fn analyze(manifest: &Manifest, mut recorded: Recorded) -> TrialAnalysis {
    let damaged = std::mem::take(&mut recorded.damaged);
    let joined = Joined::build(manifest, recorded);
    let Explained {
        rows,
        environment_ns,
        one_way_ns,
        late,
    } = joined.explained();
    let (mut outliers, mut lanes) = (Vec::new(), Vec::new());
    let (mut culprits, mut excess_ns) = (BTreeMap::new(), BTreeMap::new());
    let sorted = ascending(&rows);
    if !sorted.is_empty() {
        let latencies: Vec<u64> = sorted.iter().map(|(latency, ..)| *latency).collect();
        let border = quantile(&latencies, TAIL_QUANTILE);
        let baseline = baseline(&sorted);
        // Worst first, so that the lanes are those of the worst.
        for (_, row, ledger) in sorted.iter().rev().take_while(|(latency, ..)| *latency > border) {
            let case = joined.case(&row.stamps);
            let chain = joined.chain(&row.stamps, &case);
            let witness = joined.witness(&row.stamps, &case, &chain);
            for line in Line::all() {
                add(
                    excess_ns.entry(line).or_default(),
                    baseline.excess_ns(ledger, line),
                );
            }
            for (line, name, ns) in witness.culprits() {
                add(culprits.entry((line, name)).or_default(), ns);
            }
            outliers.push(joined.outlier(row, *ledger, &baseline, witness));
            if lanes.len() < LANES_PER_TRIAL {
                lanes.push(joined.lanes(&row.stamps, &case));
            }
        }
    }
    TrialAnalysis {
        trial: joined.trial,
        one_way_ns,
        late,
        environment_ns,
        outliers,
        culprits,
        excess_ns,
        lanes,
        alignment: joined.alignment,
        steal_ns: joined.steal_ns,
        steal_known: joined.client.machine.cpus.steal_known || joined.server.machine.cpus.steal_known,
        damaged,
        rows,
    }
}

/// Adds over many requests. Damaged stamps can make latencies whose sum is beyond 64 bits: it then stays at the greatest value.
pub(super) fn add(sum: &mut u64, ns: u64) {
    *sum = sum.saturating_add(ns);
}

fn baseline(sorted: &[(u64, &Row, Ledger)]) -> Baseline {
    let ledgers: Vec<_> = sorted
        .iter()
        .map(|(latency, _, ledger)| (*latency, *ledger))
        .collect();
    Baseline::of(&ledgers)
}

pub(super) fn explain(
    manifest: &Manifest,
    recorded: Recorded,
    numbers: &[u32],
) -> anyhow::Result<Vec<Story>> {
    let joined = Joined::build(manifest, recorded);
    let rows = joined.explained().rows;
    let baseline = baseline(&ascending(&rows));
    numbers
        .iter()
        .map(|&number| joined.story(&rows, &baseline, number))
        .collect()
}

/// A run time relative to a request's intended start, ns.
pub(super) fn since(at: RunNs, request: &RequestStamps) -> i64 {
    at - Alignment::client(HostNs(request.intended_ns))
}
