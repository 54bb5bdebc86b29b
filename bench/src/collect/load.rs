//! The open-loop load generator: requests start when the plan says, whatever became of those before.

use std::{
    cell::Cell,
    collections::BTreeMap,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use hdrhistogram::Histogram;
use rustls::{ClientConfig, ClientConnection, HandshakeKind};
use serde::{Deserialize, Serialize};
use tokio::{
    io::unix::AsyncFd,
    net::{TcpSocket, TcpStream},
    sync::Notify,
};

use super::{
    deadlines::Deadlines,
    exchange::{
        READ_BYTES, REQUEST, REQUEST_BEFORE, Reading, drain, plain_bytes, process, read_response, take_out,
    },
    path,
    service::Service,
    side::{Side, SideSettings},
    tls::{Certificates, Expected, Tickets, client_config, expected, server_name},
    worker::{
        POLL, POLLS_PER_FLUSH, ReadBuffer, STAMPS_WAITING_MAX, folded, own_cpu_ns, pin, read_some, runtime,
        write_all,
    },
};
use crate::{
    clock::{HostNs, now},
    plan::{Arm, Plan, Trial, condition::Condition},
    record::{
        stamps::{Outcome, RequestStamps, request_flag},
        stream::{StreamKind, Writer, Written},
    },
};

/// Between the call and the first intended start, so that every worker is ready in time.
const LEAD_NS: u64 = 20_000_000;

/// How long a client waits for the server's FIN after the response.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Polls between two progress reports.
const POLLS_PER_PROGRESS: u32 = 25;

/// Latencies above this are counted as this in the progress line; the recording has them exactly. ns.
const PROGRESS_NS_MAX: u64 = 3_600_000_000_000;

/// Whom to load, and from where.
#[derive(Clone, Debug)]
pub struct LoadSettings {
    /// The server.
    pub server: IpAddr,
    /// What is served where.
    pub services: Vec<Service>,
    /// One worker per CPU, pinned to it.
    pub cpus: Vec<u32>,
    /// What is run.
    pub plan: Plan,
    /// The server's certificates; `None` for a server of somebody else's, whose certificate and response may be any.
    pub certificates: Option<Certificates>,
}

/// How a trial stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Since the first intended start, ns.
    pub elapsed_ns: u64,
    /// Requests that ended, well or not.
    pub done: u64,
    /// Those that did not end well.
    pub errors: u64,
    /// Median latency so far, ns.
    pub p50_ns: u64,
    /// p99 so far, ns.
    pub p99_ns: u64,
    /// p99.9 so far, ns.
    pub p999_ns: u64,
}

/// What a trial came to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialOutcome {
    /// Requests recorded.
    pub written: Written,
    /// The trial's begin: arrivals count from here; client clock, ns.
    pub begin_ns: u64,
    /// CPU time of the workers, ns.
    pub cpu_ns: u64,
    /// Requests by how they ended.
    pub outcomes: BTreeMap<Outcome, u64>,
}

/// The load generator's workers, waiting for trials.
#[derive(Debug)]
pub struct Load {
    settings: LoadSettings,
    workers: Vec<Worker>,
}

#[derive(Debug)]
struct Worker {
    tid: u32,
    jobs: SyncSender<Job>,
    thread: Option<JoinHandle<()>>,
}

/// One worker's part of a trial.
struct Job {
    arm: Arm,
    condition: Condition,
    config: Option<Arc<ClientConfig>>,
    /// For those that resume a session.
    resuming: Option<Arc<ClientConfig>>,
    /// Whether the server is ours, so that its response and cipher suite are known.
    is_ours: bool,
    server: SocketAddr,
    timeout: Duration,
    begin_ns: u64,
    warmup_ns: u64,
    /// By their starts, ascending.
    arrivals: Vec<Arrival>,
    stamps: SyncSender<RequestStamps>,
    dropped: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Hears the worker's CPU time, ns.
    ended: SyncSender<u64>,
}

/// A request to come.
#[derive(Clone, Copy)]
struct Arrival {
    number: u32,
    /// Intended start, ns after the begin.
    at_ns: u64,
    /// Whether it is to resume a session.
    resumes: bool,
}

impl Load {
    /// Starts one pinned worker per CPU.
    ///
    /// # Errors
    /// When a worker cannot be pinned.
    pub fn start(settings: LoadSettings) -> anyhow::Result<Self> {
        let mut workers = Vec::new();
        for &cpu in &settings.cpus {
            let (jobs, waiting) = mpsc::sync_channel(1);
            let (ready, is_ready) = mpsc::sync_channel(1);
            let thread = thread::Builder::new()
                .name(format!("pq-load-{cpu}"))
                .spawn(move || work(cpu, &ready, &waiting))
                .context("start a load worker")?;
            let tid = is_ready
                .recv()
                .map_err(|_| anyhow!("a load worker ended while it started"))??;
            workers.push(Worker {
                tid,
                jobs,
                thread: Some(thread),
            });
        }
        if workers.is_empty() {
            bail!("the load generator has no CPU: name at least one with --client-cpus");
        }
        Ok(Self { settings, workers })
    }

    /// Thread ids of the workers.
    #[must_use]
    pub fn worker_tids(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.tid).collect()
    }

    /// Runs a trial to its end, or to `stop`, which ends the arrivals and waits for requests under way.
    ///
    /// # Errors
    /// When the recording cannot be written; the trial is then stopped, and what was stored stays readable.
    pub fn run_trial(
        &mut self,
        trial: &Trial,
        recording: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(Progress),
    ) -> anyhow::Result<TrialOutcome> {
        let settings = &self.settings;
        let service = settings.services.iter().find(|each| each.cell == trial.cell());
        let service = service.with_context(|| format!("no port is known for the arm {}", trial.arm))?;
        let condition = &service.condition;
        let certificate = settings.certificates.as_ref().map(|of_kind| {
            let certificate = of_kind.get(&condition.certificate);
            certificate.context("the server's certificate is not known")
        });
        let certificate = certificate.transpose()?.map(Vec::as_slice);
        let config = client_config(trial.arm, condition, certificate, None)?;
        let tickets = Arc::new(Tickets::default());
        let resuming = match service.side_port {
            Some(_) => client_config(trial.arm, condition, certificate, Some(&tickets))?,
            None => None,
        };
        let at_ns = trial.arrivals_ns(&settings.plan);
        let resumed = trial.resumed(&settings.plan, at_ns.len());
        // Held until the trial is over.
        let _side = match (service.side_port, &resuming) {
            (Some(port), Some(resuming)) => Some(Side::open(SideSettings {
                server: SocketAddr::new(settings.server, port),
                config: Arc::clone(resuming),
                tickets: resumed.iter().filter(|resumes| **resumes).count(),
                kept: Arc::clone(&tickets),
                held: condition.held_connections,
                held_rate_hz: condition.held_rate_hz,
                cpu: settings.cpus[0],
            })?),
            _ => None,
        };
        let mut writer = Writer::create(recording, StreamKind::Requests, trial.index)?;
        let mut shares: Vec<Vec<Arrival>> = vec![Vec::new(); self.workers.len()];
        for (number, (at_ns, resumes)) in at_ns.into_iter().zip(resumed).enumerate() {
            let worker = number % shares.len();
            shares[worker].push(Arrival {
                number: number as u32,
                at_ns,
                resumes,
            });
        }
        let (stamps, arriving) = mpsc::sync_channel(STAMPS_WAITING_MAX * self.workers.len());
        let (ended, ends) = mpsc::sync_channel(self.workers.len());
        let (dropped, halt) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let begin_ns = now().0 + LEAD_NS;
        for (worker, arrivals) in self.workers.iter().zip(shares) {
            let job = Job {
                arm: trial.arm,
                condition: condition.clone(),
                config: config.clone(),
                resuming: resuming.clone(),
                is_ours: settings.certificates.is_some(),
                server: SocketAddr::new(settings.server, service.port),
                timeout: Duration::from_nanos(settings.plan.timeout_ns),
                begin_ns,
                warmup_ns: settings.plan.warmup_ns,
                arrivals,
                stamps: stamps.clone(),
                dropped: Arc::clone(&dropped),
                stop: Arc::clone(&halt),
                ended: ended.clone(),
            };
            worker
                .jobs
                .send(job)
                .map_err(|_| anyhow!("a load worker has died: see above"))?;
        }
        drop((stamps, ended));
        let mut outcome = TrialOutcome {
            begin_ns,
            ..TrialOutcome::default()
        };
        let mut tally = Tally::new()?;
        let mut failure = None;
        let mut running = self.workers.len();
        let mut polls = 0u32;
        // Polled, so that a worker never pays for waking this thread.
        loop {
            match ends.recv_timeout(POLL) {
                Ok(cpu_ns) => {
                    outcome.cpu_ns += cpu_ns;
                    running -= 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if running > 0 => {
                    bail!("a load worker has died: see above")
                }
                Err(RecvTimeoutError::Disconnected) => {}
            }
            for each in arriving.try_iter() {
                *outcome.outcomes.entry(each.outcome()).or_default() += 1;
                tally.count(&each);
                if failure.is_none() {
                    failure = writer.push(&each).err();
                }
            }
            polls += 1;
            if failure.is_none() && polls.is_multiple_of(POLLS_PER_FLUSH) {
                failure = writer.flush().err();
            }
            if stop.load(Ordering::Relaxed) || failure.is_some() {
                halt.store(true, Ordering::Relaxed);
            }
            if polls.is_multiple_of(POLLS_PER_PROGRESS) || running == 0 {
                progress(tally.progress(begin_ns));
            }
            if running == 0 {
                break;
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        outcome.written = writer.finish()?;
        let dropped = dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            bail!("{dropped} stamps were dropped: the recording thread got no CPU; lower --rate");
        }
        Ok(outcome)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for mut worker in self.workers.drain(..) {
            let thread = worker.thread.take();
            // Without jobs the worker ends.
            drop(worker);
            if let Some(thread) = thread {
                // A worker that panicked has said so on stderr; there is nothing left to end.
                let _ = thread.join();
            }
        }
    }
}

/// Running figures for the progress line.
struct Tally {
    histogram: Histogram<u64>,
    done: u64,
    errors: u64,
}

impl Tally {
    fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new_with_bounds(1_000, PROGRESS_NS_MAX, 3)?;
        Ok(Self {
            histogram,
            done: 0,
            errors: 0,
        })
    }

    fn count(&mut self, stamps: &RequestStamps) {
        self.done += 1;
        match stamps.latency_ns() {
            Some(ns) if stamps.is_measured() => self.histogram.saturating_record(ns),
            Some(_) => {}
            None => self.errors += 1,
        }
    }

    fn progress(&self, begin_ns: u64) -> Progress {
        let at = |quantile| self.histogram.value_at_quantile(quantile);
        Progress {
            elapsed_ns: now().0.saturating_sub(begin_ns),
            done: self.done,
            errors: self.errors,
            p50_ns: at(0.5),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
        }
    }
}

fn work(cpu: u32, ready: &SyncSender<anyhow::Result<u32>>, jobs: &Receiver<Job>) {
    let started = pin(cpu).and_then(|tid| Ok((tid, runtime()?)));
    let (tid, runtime) = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let _ = ready.send(Ok(tid));
    while let Ok(job) = jobs.recv() {
        let ended = job.ended.clone();
        let before = own_cpu_ns();
        // Spawned, because the future that `block_on` itself drives is woken through an eventfd.
        let result = runtime.block_on(async { tokio::task::spawn_local(run_job(job, tid)).await });
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("pqtail: load worker on CPU {cpu}: {error:#}"),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
        // The controller may have given up meanwhile.
        let _ = ended.send(own_cpu_ns() - before);
    }
}

/// What all requests of a job share.
struct Context {
    job: Job,
    tid: u32,
    local: Cell<u32>,
    expected: Expected,
    buffer: ReadBuffer,
    requests: Rc<Deadlines>,
    closings: Rc<Deadlines>,
    under_way: Cell<u64>,
    idle: Notify,
}

async fn run_job(mut job: Job, tid: u32) -> anyhow::Result<()> {
    let arrivals = std::mem::take(&mut job.arrivals);
    let timer = Timer::new()?;
    let (requests, _sweep) = Deadlines::start(job.timeout);
    let (closings, _sweep_closings) = Deadlines::start(CLOSE_WAIT);
    let context = Rc::new(Context {
        expected: expected(job.arm, &job.condition),
        job,
        tid,
        local: Cell::new(0),
        buffer: ReadBuffer::new(),
        requests,
        closings,
        under_way: Cell::new(0),
        idle: Notify::new(),
    });
    let mut arrivals = arrivals.into_iter().peekable();
    while let Some(&Arrival { at_ns, .. }) = arrivals.peek() {
        if context.job.stop.load(Ordering::Relaxed) {
            break;
        }
        if context.job.begin_ns + at_ns > now().0 {
            timer.until(HostNs(context.job.begin_ns + at_ns)).await?;
        } else {
            // Behind the plan: let those under way go on between two starts.
            tokio::task::yield_now().await;
        }
        let due_ns = now().0 - context.job.begin_ns;
        while let Some(arrival) = arrivals.next_if(|arrival| arrival.at_ns <= due_ns) {
            context.under_way.set(context.under_way.get() + 1);
            tokio::task::spawn_local(one(Rc::clone(&context), arrival));
        }
    }
    while context.under_way.get() > 0 {
        context.idle.notified().await;
    }
    Ok(())
}

/// One request from its start to its closed socket.
async fn one(context: Rc<Context>, arrival: Arrival) {
    let job = &context.job;
    let Arrival {
        number,
        at_ns,
        resumes,
    } = arrival;
    let mut stamps = RequestStamps {
        start_ns: now().0,
        intended_ns: job.begin_ns + at_ns,
        request: number,
        worker_tid: context.tid,
        remote: folded(job.server.ip()),
        remote_port: job.server.port(),
        flags: if at_ns < job.warmup_ns {
            request_flag::WARMUP
        } else {
            0
        },
        ..RequestStamps::default()
    };
    let result = context
        .requests
        .within(exchange(&context, resumes, &mut stamps))
        .await;
    stamps.outcome = match result {
        Some(Ok(outcome)) => outcome,
        Some(Err(error)) => {
            stamps.errno = error.raw_os_error().unwrap_or(0) as u16;
            outcome_of(&error)
        }
        None => Outcome::Timeout,
    } as u8;
    stamps.closed_ns = now().0;
    if job.stamps.try_send(stamps).is_err() {
        job.dropped.fetch_add(1, Ordering::Relaxed);
    }
    context.under_way.set(context.under_way.get() - 1);
    if context.under_way.get() == 0 {
        context.idle.notify_one();
    }
}

fn outcome_of(error: &io::Error) -> Outcome {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Outcome::Reset,
        io::ErrorKind::ConnectionRefused => Outcome::Refused,
        io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse => Outcome::NoPort,
        io::ErrorKind::UnexpectedEof => Outcome::Closed,
        io::ErrorKind::TimedOut => Outcome::Timeout,
        _ => Outcome::Os,
    }
}

async fn exchange(context: &Context, resumes: bool, stamps: &mut RequestStamps) -> io::Result<Outcome> {
    let mut stream = connect(&context.job).await?;
    stamps.connected_ns = now().0;
    let local = stream.local_addr()?;
    if context.local.get() == 0 {
        context.local.set(folded(local.ip()));
    }
    (stamps.local, stamps.local_port) = (context.local.get(), local.port());
    stream.set_nodelay(true)?;
    let outcome = match &context.job.config {
        Some(_) => over_tls(context, &mut stream, resumes, stamps).await,
        None => over_plain(context, &mut stream, stamps).await,
    }?;
    // The server closes first, so that TIME_WAIT falls on its side; a reset takes its place if it does not.
    let end = async {
        while matches!(read_some(&mut stream, &context.buffer, READ_BYTES).await, Ok(read) if read > 0) {}
    };
    if context.closings.within(end).await.is_none() {
        stream.set_zero_linger()?;
    }
    Ok(outcome)
}

async fn connect(job: &Job) -> io::Result<TcpStream> {
    let (mss, loss) = (job.condition.mss, job.condition.loss);
    if mss.is_none() && loss == 0.0 {
        return TcpStream::connect(job.server).await;
    }
    let socket = if job.server.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    if let Some(mss) = mss {
        path::bound_segments(&socket, mss)?;
    }
    if loss > 0.0 {
        path::lose(&socket, loss)?;
    }
    socket.connect(job.server).await
}

async fn over_tls(
    context: &Context,
    stream: &mut TcpStream,
    resumes: bool,
    stamps: &mut RequestStamps,
) -> io::Result<Outcome> {
    let Job {
        condition,
        config,
        resuming,
        is_ours,
        ..
    } = &context.job;
    let config = if resumes { resuming } else { config };
    let Some(Ok(mut tls)) = config
        .as_ref()
        .map(|config| ClientConnection::new(Arc::clone(config), server_name()))
    else {
        return Ok(Outcome::Tls);
    };
    let early = condition.early_data && resumes;
    // Without a ticket that allows it there is none, and the comparison below says so.
    if early && let Some(mut data) = tls.early_data() {
        data.write_all(REQUEST)?;
    }
    let mut out = Vec::with_capacity(READ_BYTES / 4);
    send(stream, &mut tls, &mut out, stamps).await?;
    stamps.client_hello_written_ns = now().0;
    // Parsed while the server works.
    stamps.offered_shares = offered_shares(&out);
    let mut read_ns = 0;
    while tls.is_handshaking() {
        let read = read_some(stream, &context.buffer, READ_BYTES).await?;
        read_ns = now().0;
        if stamps.first_server_byte_ns == 0 {
            stamps.first_server_byte_ns = read_ns;
        }
        if read == 0 {
            return Ok(Outcome::Closed);
        }
        stamps.bytes_in += read as u32;
        if !process(&mut tls, &context.buffer.bytes(read))? {
            // The alert tells the server why; whether it arrives makes no difference here.
            let _ = send(stream, &mut tls, &mut out, stamps).await;
            return Ok(Outcome::Tls);
        }
        // A second ClientHello after a HelloRetryRequest. The Finished waits for the request, to go out in one write.
        if tls.is_handshaking() && tls.wants_write() {
            send(stream, &mut tls, &mut out, stamps).await?;
        }
    }
    stamps.handshake_done_ns = now().0;
    let mut left = condition.requests_per_connection;
    if early {
        stamps.request_written_ns = stamps.client_hello_written_ns;
    } else {
        tls.writer().write_all(request(left))?;
        send(stream, &mut tls, &mut out, stamps).await?;
        stamps.request_written_ns = now().0;
    }
    if !is_as_expected(context, &tls, resumes, stamps) {
        return Ok(Outcome::WrongGroup);
    }
    let body_bytes = is_ours.then_some(condition.response_bytes);
    let mut response = [0; RESPONSE_KEPT];
    let mut have = 0;
    let mut is_ended = false;
    loop {
        // With early data the response may have come in the handshake's last read.
        let is_closed = drain(&mut tls, &mut response, &mut have)? || is_ended;
        if have > 0 && stamps.first_response_byte_ns == 0 {
            stamps.first_response_byte_ns = read_ns;
        }
        let kept = &response[..have.min(RESPONSE_KEPT)];
        match read_response(kept, have, is_closed, body_bytes) {
            Reading::Whole => {
                left -= 1;
                if left == 0 {
                    stamps.done_ns = now().0;
                    // With early data the Finished has waited, since the response did not wait for it.
                    let _ = send(stream, &mut tls, &mut out, stamps).await;
                    return Ok(Outcome::Ok);
                }
                have = 0;
                tls.writer().write_all(request(left))?;
            }
            Reading::Wrong => return Ok(Outcome::WrongResponse),
            Reading::Part if is_closed => return Ok(Outcome::Closed),
            Reading::Part => {}
        }
        if tls.wants_write() {
            send(stream, &mut tls, &mut out, stamps).await?;
        }
        let read = read_some(stream, &context.buffer, READ_BYTES).await?;
        read_ns = now().0;
        stamps.bytes_in += read as u32;
        if !process(&mut tls, &context.buffer.bytes(read))? {
            return Ok(Outcome::Tls);
        }
        is_ended = read == 0;
    }
}

/// The request to send when so many are left, that one among them.
const fn request(left: u32) -> &'static [u8] {
    if left == 1 { REQUEST } else { REQUEST_BEFORE }
}

/// Notes what was negotiated; whether that is what the arm and its condition are about.
fn is_as_expected(
    context: &Context,
    tls: &ClientConnection,
    resumes: bool,
    stamps: &mut RequestStamps,
) -> bool {
    let (job, expected) = (&context.job, &context.expected);
    stamps.group = tls
        .negotiated_key_exchange_group()
        .map_or(0, |group| u16::from(group.name()));
    stamps.cipher_suite = tls
        .negotiated_cipher_suite()
        .map_or(0, |suite| u16::from(suite.suite()));
    let (resumed, hello_retry) = match tls.handshake_kind() {
        Some(HandshakeKind::FullWithHelloRetryRequest) => (false, true),
        Some(HandshakeKind::Resumed) => (true, false),
        _ => (false, false),
    };
    let early = tls.is_early_data_accepted();
    for (is_so, flag) in [
        (resumed, request_flag::RESUMED),
        (hello_retry, request_flag::HELLO_RETRY),
        (early, request_flag::EARLY_DATA),
    ] {
        if is_so {
            stamps.flags |= flag;
        }
    }
    stamps.group == expected.group
        && hello_retry == expected.hello_retry
        && resumed == resumes
        && early == (resumes && job.condition.early_data)
        // A server of somebody else's may have an order of its own.
        && (!job.is_ours || stamps.cipher_suite == expected.cipher_suite)
}

/// More than the header of any response that is measured.
const RESPONSE_KEPT: usize = 1024;

async fn send(
    stream: &TcpStream,
    tls: &mut ClientConnection,
    out: &mut Vec<u8>,
    stamps: &mut RequestStamps,
) -> io::Result<()> {
    take_out(tls, out)?;
    stamps.bytes_out += out.len() as u32;
    write_all(stream, out).await
}

/// The control without cryptography: the same flights in bytes, nothing computed.
async fn over_plain(
    context: &Context,
    stream: &mut TcpStream,
    stamps: &mut RequestStamps,
) -> io::Result<Outcome> {
    write_all(stream, &[0; plain_bytes::CLIENT_HELLO]).await?;
    stamps.client_hello_written_ns = now().0;
    stamps.first_server_byte_ns =
        read_flight(stream, &context.buffer, plain_bytes::SERVER_FLIGHT, stamps).await?;
    stamps.handshake_done_ns = now().0;
    write_all(stream, &[0; plain_bytes::FINISHED_AND_REQUEST]).await?;
    stamps.request_written_ns = now().0;
    stamps.bytes_out = (plain_bytes::CLIENT_HELLO + plain_bytes::FINISHED_AND_REQUEST) as u32;
    stamps.first_response_byte_ns =
        read_flight(stream, &context.buffer, plain_bytes::RESPONSE, stamps).await?;
    stamps.done_ns = now().0;
    Ok(Outcome::Ok)
}

/// Reads so many bytes; returns when the first came.
async fn read_flight(
    stream: &mut TcpStream,
    buffer: &ReadBuffer,
    bytes: usize,
    stamps: &mut RequestStamps,
) -> io::Result<u64> {
    let (mut have, mut first_ns) = (0, 0);
    while have < bytes {
        let read = read_some(stream, buffer, bytes - have).await?;
        if first_ns == 0 {
            first_ns = now().0;
        }
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        have += read;
        stamps.bytes_in += read as u32;
    }
    Ok(first_ns)
}

/// Groups of the key_share extension (RFC 8446, 4.2.8) of a ClientHello record; zeros where there is none.
fn offered_shares(record: &[u8]) -> [u16; 2] {
    let mut shares = [0; 2];
    // Whatever does not parse offers nothing, and the comparison with the arm says so.
    let _ = parse_shares(record, &mut shares);
    shares
}

fn parse_shares(record: &[u8], shares: &mut [u16; 2]) -> Option<()> {
    const KEY_SHARE: u16 = 51;
    let u16_at = |bytes: &[u8], at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    // Record header 5, handshake header 4, version 2, random 32.
    let mut rest = record.get(5 + 4 + 2 + 32..)?;
    let session = usize::from(*rest.first()?);
    rest = rest.get(1 + session..)?;
    let suites = usize::from(u16_at(rest, 0)?);
    rest = rest.get(2 + suites..)?;
    let compressions = usize::from(*rest.first()?);
    rest = rest.get(1 + compressions + 2..)?;
    loop {
        let (kind, length) = (u16_at(rest, 0)?, usize::from(u16_at(rest, 2)?));
        if kind == KEY_SHARE {
            let mut list = rest.get(4 + 2..4 + length)?;
            for share in shares {
                *share = u16_at(list, 0)?;
                list = list.get(4 + usize::from(u16_at(list, 2)?)..)?;
            }
            return Some(());
        }
        rest = rest.get(4 + length..)?;
    }
}

/// Wakes at an absolute time to the nanosecond; tokio's own timers are as coarse as a millisecond.
struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    fn new() -> anyhow::Result<Self> {
        // SAFETY: plain flags; the result is checked.
        let fd =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("create a timer");
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the descriptor is owned by the `AsyncFd` from here on, so it outlives its registration.
        Ok(Self(unsafe { AsyncFd::register(fd) }.context("watch a timer")?))
    }

    async fn until(&self, at: HostNs) -> anyhow::Result<()> {
        let setting = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: (at.0 / 1_000_000_000).cast_signed(),
                tv_nsec: (at.0 % 1_000_000_000).cast_signed(),
            },
        };
        // SAFETY: an open timer descriptor and a valid setting; no old setting is asked for.
        let result = unsafe {
            libc::timerfd_settime(
                self.0.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const setting,
                std::ptr::null_mut(),
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error()).context("set a timer");
        }
        // Each setting makes a new edge, so the count of expirations need not be read.
        while now() < at {
            self.0.readable().await?.clear_ready();
        }
        Ok(())
    }
}
