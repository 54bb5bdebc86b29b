//! The open-loop load generator: requests start when the plan says, whatever became of those before.

use std::{
    cell::Cell,
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
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
use tokio::{io::unix::AsyncFd, net::TcpStream, sync::Notify};

use super::{
    deadlines::Deadlines,
    exchange::{READ_BYTES, REQUEST, Reading, any_response, our_response, plain_bytes, process, take_out},
    tls::{Expected, client_config, expected, server_name},
    worker::{
        POLL, POLLS_PER_FLUSH, ReadBuffer, STAMPS_WAITING_MAX, folded, own_cpu_ns, pin, read_some, runtime,
        write_all,
    },
};
use crate::{
    clock::{HostNs, now},
    plan::{Arm, Plan, Trial},
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
    /// One port per arm.
    pub ports: Vec<(Arm, u16)>,
    /// One worker per CPU, pinned to it.
    pub cpus: Vec<u32>,
    /// What is run.
    pub plan: Plan,
    /// DER certificate of the server; `None` for a server of somebody else's, whose certificate and response may be any.
    pub certificate: Option<Vec<u8>>,
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
    config: Option<Arc<ClientConfig>>,
    any_response: bool,
    server: SocketAddr,
    timeout: Duration,
    begin_ns: u64,
    warmup_ns: u64,
    /// Numbers and intended starts (ns after the begin), ascending.
    arrivals: Vec<(u32, u64)>,
    stamps: SyncSender<RequestStamps>,
    dropped: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Hears the worker's CPU time, ns.
    ended: SyncSender<u64>,
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
        let port = settings
            .ports
            .iter()
            .find(|(arm, _)| *arm == trial.arm)
            .map(|(_, port)| *port);
        let port = port.with_context(|| format!("no port is known for the arm {}", trial.arm))?;
        let config = client_config(trial.arm, settings.certificate.as_deref())?;
        let mut writer = Writer::create(recording, StreamKind::Requests, trial.index)?;
        let mut shares: Vec<Vec<(u32, u64)>> = vec![Vec::new(); self.workers.len()];
        for (number, at) in trial.arrivals_ns(&settings.plan).into_iter().enumerate() {
            let worker = number % shares.len();
            shares[worker].push((number as u32, at));
        }
        let (stamps, arriving) = mpsc::sync_channel(STAMPS_WAITING_MAX * self.workers.len());
        let (ended, ends) = mpsc::sync_channel(self.workers.len());
        let (dropped, halt) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let begin_ns = now().0 + LEAD_NS;
        for (worker, arrivals) in self.workers.iter().zip(shares) {
            let job = Job {
                arm: trial.arm,
                config: config.clone(),
                any_response: settings.certificate.is_none(),
                server: SocketAddr::new(settings.server, port),
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
        expected: expected(job.arm),
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
    while let Some(&(_, at_ns)) = arrivals.peek() {
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
        while let Some((number, at_ns)) = arrivals.next_if(|&(_, at_ns)| at_ns <= due_ns) {
            context.under_way.set(context.under_way.get() + 1);
            tokio::task::spawn_local(one(Rc::clone(&context), number, at_ns));
        }
    }
    while context.under_way.get() > 0 {
        context.idle.notified().await;
    }
    Ok(())
}

/// One request from its start to its closed socket.
async fn one(context: Rc<Context>, number: u32, at_ns: u64) {
    let job = &context.job;
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
    let result = context.requests.within(exchange(&context, &mut stamps)).await;
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

async fn exchange(context: &Context, stamps: &mut RequestStamps) -> io::Result<Outcome> {
    let mut stream = TcpStream::connect(context.job.server).await?;
    stamps.connected_ns = now().0;
    let local = stream.local_addr()?;
    if context.local.get() == 0 {
        context.local.set(folded(local.ip()));
    }
    (stamps.local, stamps.local_port) = (context.local.get(), local.port());
    stream.set_nodelay(true)?;
    let outcome = match &context.job.config {
        Some(config) => over_tls(context, &mut stream, Arc::clone(config), stamps).await,
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

async fn over_tls(
    context: &Context,
    stream: &mut TcpStream,
    config: Arc<ClientConfig>,
    stamps: &mut RequestStamps,
) -> io::Result<Outcome> {
    let Ok(mut tls) = ClientConnection::new(config, server_name()) else {
        return Ok(Outcome::Tls);
    };
    let mut out = Vec::with_capacity(READ_BYTES / 4);
    send(stream, &mut tls, &mut out, stamps).await?;
    stamps.client_hello_written_ns = now().0;
    // Parsed while the server works.
    stamps.offered_shares = offered_shares(&out);
    while tls.is_handshaking() {
        let read = read_some(stream, &context.buffer, READ_BYTES).await?;
        if stamps.first_server_byte_ns == 0 {
            stamps.first_server_byte_ns = now().0;
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
    tls.writer().write_all(REQUEST)?;
    send(stream, &mut tls, &mut out, stamps).await?;
    stamps.request_written_ns = now().0;
    stamps.group = tls
        .negotiated_key_exchange_group()
        .map_or(0, |group| u16::from(group.name()));
    stamps.cipher_suite = tls
        .negotiated_cipher_suite()
        .map_or(0, |suite| u16::from(suite.suite()));
    stamps.flags |= match tls.handshake_kind() {
        Some(HandshakeKind::FullWithHelloRetryRequest) => request_flag::HELLO_RETRY,
        Some(HandshakeKind::Resumed) => request_flag::RESUMED,
        _ => 0,
    };
    let hello_retry = stamps.flags & request_flag::HELLO_RETRY != 0;
    let resumed = stamps.flags & request_flag::RESUMED != 0;
    if stamps.group != context.expected.group || hello_retry != context.expected.hello_retry || resumed {
        return Ok(Outcome::WrongGroup);
    }
    let mut response = [0; RESPONSE_KEPT];
    let mut have = 0;
    loop {
        let read = read_some(stream, &context.buffer, READ_BYTES).await?;
        let read_ns = now().0;
        stamps.bytes_in += read as u32;
        if !process(&mut tls, &context.buffer.bytes(read))? {
            return Ok(Outcome::Tls);
        }
        let is_closed = drain(&mut tls, &mut response, &mut have)? || read == 0;
        if have > 0 && stamps.first_response_byte_ns == 0 {
            stamps.first_response_byte_ns = read_ns;
        }
        let kept = &response[..have.min(RESPONSE_KEPT)];
        let reading = if context.job.any_response {
            any_response(kept, have, is_closed)
        } else {
            our_response(kept, have)
        };
        match reading {
            Reading::Whole => {
                stamps.done_ns = now().0;
                return Ok(Outcome::Ok);
            }
            Reading::Wrong => return Ok(Outcome::WrongResponse),
            Reading::Part if is_closed => return Ok(Outcome::Closed),
            Reading::Part => {}
        }
    }
}

/// More than the header of any response that is measured.
const RESPONSE_KEPT: usize = 1024;

/// Takes all plain bytes out of TLS, keeps the first of them, and counts them all; whether the server has said that these are all.
fn drain(tls: &mut ClientConnection, kept: &mut [u8], have: &mut usize) -> io::Result<bool> {
    let mut rest = [0; 4096];
    loop {
        let free = kept.get_mut(*have..).unwrap_or_default();
        let into = if free.is_empty() { &mut rest[..] } else { free };
        match tls.reader().read(into) {
            Ok(0) => return Ok(true),
            Ok(plain) => *have += plain,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // Closed without saying so, as many servers do.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(true),
            Err(error) => return Err(error),
        }
    }
}

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
