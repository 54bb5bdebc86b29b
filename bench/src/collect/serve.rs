//! The embedded server: TLS 1.3 on rustls and aws-lc-rs, one port per arm, one stamp per stage of every connection.

use std::{
    io::{self, Write as _},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use rustls::{ServerConfig, ServerConnection};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
};

use super::{
    deadlines::Deadlines,
    exchange::{READ_BYTES, plain_bytes, process, response, take_out},
    fault::{Committed, Fault, Faults, Stage},
    host::thread_cpu_ns,
    path,
    service::Service,
    tls::{Identities, server_configs},
    worker::{
        POLL, POLLS_PER_FLUSH, ReadBuffer, STAMPS_WAITING_MAX, folded, own_cpu_ns, pin, read_some, runtime,
        write_all,
    },
};
use crate::{
    clock::now,
    record::{
        stamps::{ConnectionStamps, Outcome},
        stream::{StreamKind, Writer, Written},
    },
};

/// Connections that the kernel completes ahead of `accept`.
pub(super) const BACKLOG: u32 = 4096;

/// How long a connection waits for the client's end before it is closed all the same.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// How long a held response waits before its FIN: longer than any delayed ACK (`TCP_DELACK_MAX`).
const HOLD: Duration = Duration::from_millis(250);

/// Where and how to serve.
#[derive(Clone, Debug)]
pub struct ServeSettings {
    /// Address to listen on.
    pub address: IpAddr,
    /// What is served where.
    pub services: Vec<Service>,
    /// One worker per CPU, pinned to it.
    pub cpus: Vec<u32>,
    /// Certificates and keys.
    pub identities: Identities,
    /// File of faults to commit on order; `None` outside the truth suite.
    pub faults: Option<PathBuf>,
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    tids: Vec<u32>,
    cpu_ns_before: u64,
    stop: watch::Sender<bool>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What workers and the recording thread share; nothing of it is touched between accept and close but the two counters.
#[derive(Debug, Default)]
struct Shared {
    recording: Mutex<Option<Writer<ConnectionStamps>>>,
    failure: Mutex<Option<anyhow::Error>>,
    open: AtomicU64,
    overflown: AtomicU64,
    done: AtomicBool,
}

impl Server {
    /// Binds every port on every worker and returns once all listen.
    ///
    /// # Errors
    /// When a port is taken, or a worker cannot be pinned.
    pub fn start(settings: &ServeSettings) -> anyhow::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let configs = configs(settings)?;
        let shared = Arc::new(Shared::default());
        let (stamps, waiting) = mpsc::sync_channel(STAMPS_WAITING_MAX * settings.cpus.len().max(1));
        let mut threads = Vec::new();
        let mut tids = Vec::new();
        for &cpu in &settings.cpus {
            let (ready, is_ready) = mpsc::sync_channel(1);
            let worker = Worker {
                settings: settings.clone(),
                configs: configs.clone(),
                stamps: stamps.clone(),
                shared: Arc::clone(&shared),
                stopped: stopped.clone(),
            };
            let thread = thread::Builder::new().name(format!("pq-serve-{cpu}"));
            threads.push(
                thread
                    .spawn(move || worker.run(cpu, &ready))
                    .context("start a server worker")?,
            );
            tids.push(
                is_ready
                    .recv()
                    .map_err(|_| anyhow!("a server worker ended while it started"))??,
            );
        }
        if tids.is_empty() {
            bail!("the server has no CPU: name at least one with --server-cpus");
        }
        let recorder = Arc::clone(&shared);
        let thread = thread::Builder::new().name("pq-serve-rec".to_owned());
        threads.push(
            thread
                .spawn(move || record(&waiting, &recorder))
                .context("start the recording thread")?,
        );
        Ok(Self {
            tids,
            cpu_ns_before: 0,
            stop,
            shared,
            threads,
        })
    }

    /// Thread ids of the workers.
    #[must_use]
    pub fn worker_tids(&self) -> Vec<u32> {
        self.tids.clone()
    }

    /// Records connections that end from now on.
    ///
    /// # Errors
    /// When the recording cannot be created.
    pub fn begin_trial(&mut self, recording: &Path, trial: u32) -> anyhow::Result<()> {
        let writer = Writer::create(recording, StreamKind::Connections, trial)?;
        *lock(&self.shared.recording) = Some(writer);
        self.cpu_ns_before = self.cpu_ns();
        Ok(())
    }

    /// Waits until no connection is open, finishes the recording, and returns its size and the workers' CPU time since the
    /// trial began, ns.
    ///
    /// # Errors
    /// When the disk took no more, or stamps were dropped because the recording thread could not follow.
    pub fn end_trial(&mut self) -> anyhow::Result<(Written, u64)> {
        let deadline = Instant::now() + CLOSE_WAIT + CLOSE_WAIT;
        while self.shared.open.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let cpu_ns = self.cpu_ns().saturating_sub(self.cpu_ns_before);
        // The recording thread takes what waits before it looks at the mark again.
        thread::sleep(POLL + POLL);
        let writer = lock(&self.shared.recording).take();
        if let Some(failure) = lock(&self.shared.failure).take() {
            return Err(failure);
        }
        let overflown = self.shared.overflown.swap(0, Ordering::Relaxed);
        if overflown > 0 {
            bail!("{overflown} stamps were dropped: the recording thread got no CPU; lower --rate");
        }
        Ok((writer.context("no trial has begun")?.finish()?, cpu_ns))
    }

    fn cpu_ns(&self) -> u64 {
        self.tids.iter().filter_map(|&tid| thread_cpu_ns(tid)).sum()
    }

    /// Closes the listeners and ends the workers.
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.stop.send_replace(true);
        self.shared.done.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A worker that panicked has said so on stderr; there is nothing left to end.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.halt();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves stamps from the workers to the recording under way; without one they are dropped.
fn record(waiting: &Receiver<ConnectionStamps>, shared: &Shared) {
    let mut polls = 0u32;
    while !shared.done.load(Ordering::Acquire) {
        thread::sleep(POLL);
        polls = polls.wrapping_add(1);
        let mut recording = lock(&shared.recording);
        let mut result = Ok(());
        for stamps in waiting.try_iter() {
            if let Some(writer) = recording.as_mut()
                && result.is_ok()
            {
                result = writer.push(&stamps);
            }
        }
        if let Some(writer) = recording.as_mut()
            && polls.is_multiple_of(POLLS_PER_FLUSH)
            && result.is_ok()
        {
            result = writer.flush();
        }
        if let Err(error) = result {
            *recording = None;
            *lock(&shared.failure) = Some(error);
        }
    }
}

/// The TLS of each service, in their order: of the measured port and of the port beside it. Workers share them, since a ticket may come
/// back to another worker than the one that gave it.
type Configs = Vec<Option<[Arc<ServerConfig>; 2]>>;

fn configs(settings: &ServeSettings) -> anyhow::Result<Configs> {
    let of = |service: &Service| {
        let kind = service.condition.certificate;
        let identity = settings.identities.get(&kind);
        let identity = identity.with_context(|| format!("no {} certificate was made", kind.name()))?;
        server_configs(service.arm(), &service.condition, identity)
    };
    settings.services.iter().map(of).collect()
}

struct Worker {
    settings: ServeSettings,
    configs: Configs,
    stamps: SyncSender<ConnectionStamps>,
    shared: Arc<Shared>,
    stopped: watch::Receiver<bool>,
}

/// What all connections of a worker share.
struct OfWorker {
    buffer: ReadBuffer,
    closings: Rc<Deadlines>,
    faults: Option<Faults>,
}

impl OfWorker {
    /// Commits the fault that is ordered for this stage, if there is one.
    fn commit_at(&self, stage: Stage, port: u16) {
        if let Some(faults) = &self.faults
            && let Some(fault) = faults.take(stage)
        {
            faults.commit(fault, port);
        }
    }
}

impl Worker {
    /// `ready` hears the worker's thread id once it listens, or why it does not.
    fn run(&self, cpu: u32, ready: &SyncSender<anyhow::Result<u32>>) {
        let started = pin(cpu).and_then(|tid| Ok((tid, runtime()?)));
        let (tid, runtime) = match started {
            Ok(started) => started,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        runtime.block_on(async {
            let (closings, _sweep) = Deadlines::start(CLOSE_WAIT);
            let faults = self.settings.faults.as_deref().map(Faults::open).transpose();
            let listening = faults.and_then(|faults| {
                self.listen(&Rc::new(OfWorker {
                    buffer: ReadBuffer::new(),
                    closings,
                    faults,
                }))
            });
            let is_listening = listening.is_ok();
            let _ = ready.send(listening.map(|()| tid));
            if is_listening {
                let mut stopped = self.stopped.clone();
                // An error means that the server itself is gone, which is a stop too.
                let _ = stopped.wait_for(|stop| *stop).await;
            }
        });
    }

    fn listen(&self, of_worker: &Rc<OfWorker>) -> anyhow::Result<()> {
        let backlog = of_worker.faults.as_ref().and_then(Faults::backlog);
        let on = |port| {
            listen(
                SocketAddr::new(self.settings.address, port),
                backlog.unwrap_or(BACKLOG),
            )
        };
        for (service, configs) in self.settings.services.iter().zip(&self.configs) {
            let listener = on(service.port)?;
            let condition = &service.condition;
            if condition.loss > 0.0 {
                path::lose(&listener, condition.loss).context("lose segments at the server")?;
            }
            let [measured, generous] = match configs {
                Some([measured, generous]) => [measured, generous].map(|config| Some(Arc::clone(config))),
                None => [None, None],
            };
            let port = |config| OnPort {
                config,
                response: response(condition.response_bytes, false),
                last_response: response(condition.response_bytes, true),
                extra: Duration::from_nanos(condition.server_extra_ns),
            };
            tokio::task::spawn_local(accept(
                listener,
                Rc::new(port(measured)),
                Some(self.stamps.clone()),
                Arc::clone(&self.shared),
                Rc::clone(of_worker),
            ));
            if let Some(side_port) = service.side_port {
                tokio::task::spawn_local(accept(
                    on(side_port)?,
                    Rc::new(port(generous)),
                    None,
                    Arc::clone(&self.shared),
                    Rc::clone(of_worker),
                ));
            }
        }
        Ok(())
    }
}

/// What all connections of a port share.
struct OnPort {
    config: Option<Arc<ServerConfig>>,
    response: Vec<u8>,
    last_response: Vec<u8>,
    /// To be computed in every handshake besides what it needs.
    extra: Duration,
}

fn listen(address: SocketAddr, backlog: u32) -> anyhow::Result<TcpListener> {
    let make = || -> io::Result<TcpListener> {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()?
        } else {
            TcpSocket::new_v6()?
        };
        socket.set_reuseaddr(true)?;
        // Each worker has listeners of its own; the kernel spreads the connections.
        socket.set_reuseport(true)?;
        socket.bind(address)?;
        socket.listen(backlog)
    };
    make().map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::AddrNotAvailable => {
                "this host does not have that address: correct `address` of the server in the inventory"
            }
            _ => "if another program has the port, name a free one with --port",
        };
        anyhow::Error::from(error).context(format!("listen on {address}: {remedy}"))
    })
}

/// Serves a port. Without a sink its connections leave no stamps, and no trial waits for their end.
async fn accept(
    listener: TcpListener,
    on_port: Rc<OnPort>,
    sink: Option<SyncSender<ConnectionStamps>>,
    shared: Arc<Shared>,
    of_worker: Rc<OfWorker>,
) {
    let tid = nix::unistd::gettid().as_raw().cast_unsigned();
    let local = listener.local_addr().map_or(0, |address| folded(address.ip()));
    let local_port = listener.local_addr().map_or(0, |address| address.port());
    loop {
        // Out of file descriptors or a connection that was reset meanwhile: neither ends the service.
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        let mut stamps = ConnectionStamps {
            accepted_ns: now().0,
            worker_tid: tid,
            local,
            remote: folded(peer.ip()),
            local_port,
            remote_port: peer.port(),
            ..ConnectionStamps::default()
        };
        if sink.is_some() {
            shared.open.fetch_add(1, Ordering::AcqRel);
        }
        let fault = of_worker
            .faults
            .as_ref()
            .and_then(|faults| faults.take(Stage::Accept));
        let (on_port, sink, shared) = (Rc::clone(&on_port), sink.clone(), Arc::clone(&shared));
        let its = Rc::clone(&of_worker);
        tokio::task::spawn_local(async move {
            let result = match &on_port.config {
                Some(config) => serve_tls(stream, Arc::clone(config), &on_port, &its, &mut stamps).await,
                None => serve_plain(stream, &its, &mut stamps).await,
            };
            let Some(sink) = sink else { return };
            stamps.outcome = result.unwrap_or_else(|error| outcome_of(&error)) as u8;
            stamps.closed_ns = now().0;
            if sink.try_send(stamps).is_err() {
                shared.overflown.fetch_add(1, Ordering::Relaxed);
            }
            shared.open.fetch_sub(1, Ordering::AcqRel);
        });
        if let (Some(Fault::PauseAccept(ns)), Some(faults)) = (fault, &of_worker.faults) {
            let begin_ns = now().0;
            tokio::time::sleep(Duration::from_nanos(ns)).await;
            faults.log(Committed {
                begin_ns,
                end_ns: now().0,
                off_cpu_ns: 0,
                port: 0,
            });
        }
    }
}

fn outcome_of(error: &io::Error) -> Outcome {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Outcome::Reset,
        _ => Outcome::Os,
    }
}

async fn serve_tls(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
    on_port: &OnPort,
    of_worker: &OfWorker,
    stamps: &mut ConnectionStamps,
) -> io::Result<Outcome> {
    stream.set_nodelay(true)?;
    let Ok(mut tls) = ServerConnection::new(config) else {
        return Ok(Outcome::Tls);
    };
    let mut out = Vec::with_capacity(READ_BYTES / 4);
    let mut request = Vec::with_capacity(512);
    // Until the client says that the request is the last.
    while !request.ends_with(b"Connection: close\r\n\r\n") {
        request.clear();
        while !request.ends_with(b"\r\n\r\n") {
            let read = read_some(&mut stream, &of_worker.buffer, READ_BYTES).await?;
            let read_ns = now().0;
            if read == 0 {
                return Ok(Outcome::Closed);
            }
            let is_first = stamps.first_byte_ns == 0;
            if is_first {
                stamps.first_byte_ns = read_ns;
                of_worker.commit_at(Stage::Hello, stamps.remote_port);
            }
            stamps.bytes_in += read as u32;
            let is_accepted = process(&mut tls, &of_worker.buffer.bytes(read))?;
            if is_first && !on_port.extra.is_zero() {
                compute(on_port.extra);
            }
            if let Some(mut early) = tls.early_data() {
                read_plain(&mut early, &mut request, read)?;
                if request.ends_with(b"\r\n\r\n") {
                    // The response goes out behind the handshake's flight, in the same write.
                    stamps.group = group(&tls);
                    break;
                }
            }
            // An alert of ours must still go out, so that the client learns why.
            send(&stream, &mut tls, &mut out, stamps).await?;
            if !is_accepted {
                return Ok(Outcome::Tls);
            }
            if tls.is_handshaking() {
                stamps.flight_written_ns = now().0;
                of_worker.commit_at(Stage::Flight, stamps.remote_port);
                continue;
            }
            if stamps.handshake_done_ns == 0 {
                stamps.finished_read_ns = read_ns;
                stamps.handshake_done_ns = now().0;
                stamps.group = group(&tls);
                stamps.cipher_suite = tls
                    .negotiated_cipher_suite()
                    .map_or(0, |suite| u16::from(suite.suite()));
            }
            read_plain(&mut tls.reader(), &mut request, read)?;
        }
        if stamps.request_read_ns == 0 {
            stamps.request_read_ns = now().0;
        }
        if !request.ends_with(b"Connection: close\r\n\r\n") {
            respond(&stream, &mut tls, &mut out, stamps, &on_port.response, false).await?;
        }
    }
    match of_worker
        .faults
        .as_ref()
        .filter(|faults| faults.take(Stage::Response).is_some())
    {
        None => respond(&stream, &mut tls, &mut out, stamps, &on_port.last_response, true).await?,
        Some(faults) => {
            tls.writer().write_all(&on_port.last_response)?;
            tls.send_close_notify();
            let begin_ns = now().0;
            send_held(&stream, &mut tls, &mut out, stamps).await?;
            stamps.response_written_ns = now().0;
            faults.log(Committed {
                begin_ns,
                end_ns: stamps.response_written_ns,
                off_cpu_ns: 0,
                port: stamps.remote_port,
            });
            // A FIN would push the held segment out.
            tokio::time::sleep(HOLD).await;
            close(stream, of_worker).await;
            return Ok(Outcome::Ok);
        }
    }
    stamps.response_written_ns = now().0;
    if stamps.flight_written_ns == 0 {
        stamps.flight_written_ns = stamps.response_written_ns;
    }
    close(stream, of_worker).await;
    Ok(Outcome::Ok)
}

fn group(tls: &ServerConnection) -> u16 {
    tls.negotiated_key_exchange_group()
        .map_or(0, |group| u16::from(group.name()))
}

/// Appends what there is of a request; at most as much as the bytes that brought it.
fn read_plain(reader: &mut impl io::Read, request: &mut Vec<u8>, bytes_max: usize) -> io::Result<()> {
    let from = request.len();
    request.resize(from + bytes_max, 0);
    let plain = match reader.read(&mut request[from..]) {
        Ok(plain) => plain,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => return Err(error),
    };
    request.truncate(from + plain);
    Ok(())
}

/// Keeps the thread busy: time on the CPU, which a preemption does not shorten.
fn compute(extra: Duration) {
    let end_ns = own_cpu_ns() + extra.as_nanos() as u64;
    while own_cpu_ns() < end_ns {
        std::hint::spin_loop();
    }
}

/// So much of a response is encrypted before it is written: less than rustls holds back.
const RESPONSE_PART: usize = 32 << 10;

async fn respond(
    stream: &TcpStream,
    tls: &mut ServerConnection,
    out: &mut Vec<u8>,
    stamps: &mut ConnectionStamps,
    response: &[u8],
    is_last: bool,
) -> io::Result<()> {
    let mut parts = response.chunks(RESPONSE_PART).peekable();
    while let Some(part) = parts.next() {
        tls.writer().write_all(part)?;
        if is_last && parts.peek().is_none() {
            tls.send_close_notify();
        }
        send(stream, tls, out, stamps).await?;
    }
    Ok(())
}

async fn send(
    stream: &TcpStream,
    tls: &mut ServerConnection,
    out: &mut Vec<u8>,
    stamps: &mut ConnectionStamps,
) -> io::Result<()> {
    take_out(tls, out)?;
    stamps.bytes_out += out.len() as u32;
    write_all(stream, out).await
}

/// A fault: with Nagle's algorithm on, what follows the first small segment waits until the client has acknowledged that one,
/// which has nothing to say and delays its acknowledgement.
async fn send_held(
    stream: &TcpStream,
    tls: &mut ServerConnection,
    out: &mut Vec<u8>,
    stamps: &mut ConnectionStamps,
) -> io::Result<()> {
    stream.set_nodelay(false)?;
    take_out(tls, out)?;
    stamps.bytes_out += out.len() as u32;
    let (first, rest) = out.split_at(out.len() / 2);
    write_all(stream, first).await?;
    write_all(stream, rest).await
}

/// Sends FIN first, so that TIME_WAIT falls on this side and the client's port is free at once, then waits for the client's.
async fn close(mut stream: TcpStream, of_worker: &OfWorker) {
    if stream.shutdown().await.is_ok() {
        let end = async {
            while matches!(read_some(&mut stream, &of_worker.buffer, READ_BYTES).await, Ok(read) if read > 0)
            {
            }
        };
        of_worker.closings.within(end).await;
    }
}

/// The control without cryptography: the same flights in bytes, nothing computed.
async fn serve_plain(
    mut stream: TcpStream,
    of_worker: &OfWorker,
    stamps: &mut ConnectionStamps,
) -> io::Result<Outcome> {
    stream.set_nodelay(true)?;
    stamps.first_byte_ns =
        read_flight(&mut stream, &of_worker.buffer, plain_bytes::CLIENT_HELLO, stamps).await?;
    write_all(&stream, &[0; plain_bytes::SERVER_FLIGHT]).await?;
    stamps.flight_written_ns = now().0;
    stamps.finished_read_ns = read_flight(
        &mut stream,
        &of_worker.buffer,
        plain_bytes::FINISHED_AND_REQUEST,
        stamps,
    )
    .await?;
    stamps.handshake_done_ns = stamps.finished_read_ns;
    stamps.request_read_ns = stamps.finished_read_ns;
    write_all(&stream, &[0; plain_bytes::RESPONSE]).await?;
    stamps.response_written_ns = now().0;
    stamps.bytes_out = (plain_bytes::SERVER_FLIGHT + plain_bytes::RESPONSE) as u32;
    close(stream, of_worker).await;
    Ok(Outcome::Ok)
}

/// Reads so many bytes; returns when the first came.
async fn read_flight(
    stream: &mut TcpStream,
    buffer: &ReadBuffer,
    bytes: usize,
    stamps: &mut ConnectionStamps,
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
