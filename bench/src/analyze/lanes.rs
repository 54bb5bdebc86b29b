//! What happened around one request, as five lanes: client thread, client CPU, wire, server CPU, server thread.

use super::trial::since;
use crate::{
    align::Alignment,
    attribute::{cause::softirq_name, ledger::Side, split::HostView},
    clock::{HostNs, RunNs},
    plan::Trial,
    record::stamps::{ConnectionStamps, RequestStamps},
    report::summary::{Lane, LaneMark, LaneSpan, SwimLanes},
    timeline::{
        connection::{Crossing, From, What},
        cpu::Doing,
        thread::Being,
    },
};

/// What a picture is drawn from.
pub(super) struct Scene<'a> {
    pub(super) request: &'a RequestStamps,
    pub(super) connection: Option<&'a ConnectionStamps>,
    pub(super) crossings: &'a [Crossing],
    pub(super) client: HostView<'a>,
    pub(super) server: HostView<'a>,
    pub(super) client_cpus: &'a [u32],
    pub(super) server_cpus: &'a [u32],
    pub(super) alignment: &'a Alignment,
    /// The cell's.
    pub(super) name: &'a str,
    pub(super) trial: Trial,
}

pub(super) fn draw(scene: &Scene<'_>) -> SwimLanes {
    let (client_thread, client_cpu) = scene.host(Side::Client);
    let (server_thread, server_cpu) = scene.host(Side::Server);
    SwimLanes {
        request: scene.request.request,
        arm: scene.name.to_owned(),
        trial: scene.trial.index,
        latency_ns: scene.request.latency_ns().unwrap_or(0),
        lanes: vec![client_thread, client_cpu, scene.wire(), server_cpu, server_thread],
    }
}

impl Scene<'_> {
    /// A time of one host, as the picture counts: ns after the intended start.
    fn at(&self, side: Side, host_ns: u64) -> i64 {
        let run = match side {
            Side::Client => Alignment::client(HostNs(host_ns)),
            Side::Server => self.alignment.server(HostNs(host_ns)),
        };
        since(run, self.request)
    }

    /// The thread's lane and its CPU's lane.
    fn host(&self, side: Side) -> (Lane, Lane) {
        let (from, to) = (self.request.intended_ns, self.request.done_ns);
        let run = |ns: u64| RunNs(ns.cast_signed());
        let (view, tid, cpus, name, from, to) = match side {
            Side::Client => (
                self.client,
                Some(self.request.worker_tid),
                self.client_cpus,
                "client",
                from,
                to,
            ),
            Side::Server => (
                self.server,
                self.connection.map(|connection| connection.worker_tid),
                self.server_cpus,
                "server",
                self.alignment.to_server(run(from)).0,
                self.alignment.to_server(run(to)).0,
            ),
        };
        let mut cpu = cpus.first().copied();
        let mut thread = Lane {
            name: format!("{name} thread"),
            spans: Vec::new(),
            marks: self.stamps(side),
        };
        if let Some(tid) = tid {
            let comm = view.cpus.thread_name(tid);
            // Without its number, which every row of evidence has.
            thread.name = format!("{name} {}", comm.split(" [").next().unwrap_or_default());
            for stay in view.threads.between(tid, from, to) {
                if let Being::Running { cpu: here } | Being::Runnable { cpu: here, .. } = stay.being {
                    cpu = Some(here);
                }
                let (class, label) = match stay.being {
                    Being::Running { .. } => ("run", String::new()),
                    Being::Runnable { throttled: true, .. } => ("throttled", "throttled".to_owned()),
                    Being::Runnable { .. } => ("runnable", "runnable".to_owned()),
                    Being::Asleep { .. } if stay.being.is_stopped() => ("stopped", "stopped".to_owned()),
                    Being::Asleep { .. } => ("sleep", String::new()),
                };
                thread
                    .spans
                    .push(self.span(side, stay.start_ns, stay.end_ns, class, label));
            }
        }
        let mut lane = Lane {
            name: format!("{name} CPU"),
            spans: Vec::new(),
            marks: Vec::new(),
        };
        if let Some(cpu) = cpu {
            lane.name = format!("{name} CPU {cpu}");
            for stretch in view.cpus.between(cpu, from, to) {
                let (class, label) = match stretch.doing {
                    Doing::Idle => ("idle", String::new()),
                    Doing::Run(who) if Some(who) == tid => ("run", String::new()),
                    Doing::Run(who) | Doing::Presumed(who) => ("other", view.cpus.thread_name(who)),
                    Doing::Softirq(number) => ("softirq", softirq_name(number).to_owned()),
                    Doing::Irq(number) => ("irq", format!("irq {number}")),
                    Doing::Vector(number) => ("irq", format!("vector {number:#x}")),
                    Doing::Steal => ("steal", "steal".to_owned()),
                    Doing::Away => ("steal", "away or interrupts off".to_owned()),
                };
                lane.spans
                    .push(self.span(side, stretch.start_ns, stretch.end_ns, class, label));
            }
        }
        (thread, lane)
    }

    fn span(&self, side: Side, start_ns: u64, end_ns: u64, class: &'static str, label: String) -> LaneSpan {
        LaneSpan {
            start_ns: self.at(side, start_ns),
            end_ns: self.at(side, end_ns),
            class,
            label,
        }
    }

    fn stamps(&self, side: Side) -> Vec<LaneMark> {
        let stamps: Vec<(u64, &str)> = match (side, self.connection) {
            (Side::Client, _) => vec![
                (self.request.start_ns, "start"),
                (self.request.connected_ns, "connected"),
                (self.request.client_hello_written_ns, "ClientHello written"),
                (self.request.first_server_byte_ns, "first server byte"),
                (self.request.handshake_done_ns, "handshake done"),
                (self.request.request_written_ns, "request written"),
                (self.request.first_response_byte_ns, "first response byte"),
                (self.request.done_ns, "done"),
            ],
            (Side::Server, Some(connection)) => vec![
                (connection.accepted_ns, "accepted"),
                (connection.first_byte_ns, "ClientHello read"),
                (connection.flight_written_ns, "flight written"),
                (connection.finished_read_ns, "Finished read"),
                (connection.response_written_ns, "response written"),
            ],
            (Side::Server, None) => Vec::new(),
        };
        let mut marks: Vec<LaneMark> = stamps
            .into_iter()
            .filter(|(ns, _)| *ns > 0)
            .map(|(ns, label)| LaneMark {
                at_ns: self.at(side, ns),
                label: label.to_owned(),
            })
            .collect();
        marks.sort_by_key(|mark| mark.at_ns);
        marks
    }

    fn wire(&self) -> Lane {
        let mut lane = Lane {
            name: "wire".to_owned(),
            spans: Vec::new(),
            marks: Vec::new(),
        };
        let mut cursor = 0;
        for crossing in self.crossings {
            let (sender, receiver) = match crossing.from {
                From::Client => (Side::Client, Side::Server),
                From::Server => (Side::Server, Side::Client),
            };
            let label = match (crossing.what, crossing.from) {
                (What::Syn, _) => "SYN".to_owned(),
                (What::SynAck, _) => "SYN-ACK".to_owned(),
                (What::Flight(number), From::Client) => format!("client flight {number}"),
                (What::Flight(number), From::Server) => format!("server flight {number}"),
            };
            let out = self.at(sender, crossing.out.0);
            let again = self.at(sender, crossing.out_again.0);
            let arrived = self.at(receiver, crossing.arrived.0);
            // Clock error can make neighbours overlap by less than its bound.
            if crossing.repeats > 0 && again > out.max(cursor) {
                let start_ns = out.max(cursor);
                lane.spans.push(LaneSpan {
                    start_ns,
                    end_ns: again,
                    class: "lost",
                    label: format!("{label} lost"),
                });
                cursor = again;
            }
            if arrived > again.max(cursor) {
                let start_ns = again.max(cursor);
                lane.spans.push(LaneSpan {
                    start_ns,
                    end_ns: arrived,
                    class: "wire",
                    label: label.clone(),
                });
                cursor = arrived;
            }
            lane.marks.push(LaneMark { at_ns: out, label });
        }
        lane
    }
}
