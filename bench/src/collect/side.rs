//! What a trial needs besides its own connections, made before it begins and not measured: tickets to resume sessions with, and
//! connections that are held open.

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use rustls::{ClientConfig, ClientConnection};
use tokio::{net::TcpStream, time::timeout};

use super::{
    exchange::{READ_BYTES, REQUEST, REQUEST_BEFORE, Reading, drain, process, read_response, take_out},
    tls::{Tickets, server_name},
    worker::{ReadBuffer, pin, read_some, runtime, write_all},
};

/// Connections that are opened at the same time: more would fill the server's accept queue.
const AT_ONCE: usize = 32;

/// How long one of them may take.
const OPEN_MAX: Duration = Duration::from_secs(20);

/// How often a held connection looks whether it is over.
const POLL: Duration = Duration::from_millis(50);

/// What to make.
#[derive(Clone, Debug)]
pub(super) struct SideSettings {
    /// Where.
    pub(super) server: SocketAddr,
    /// With which TLS; its tickets go where the configuration keeps them.
    pub(super) config: Arc<ClientConfig>,
    /// How many tickets to get.
    pub(super) tickets: usize,
    /// Where those can be counted.
    pub(super) kept: Arc<Tickets>,
    /// Connections to hold.
    pub(super) held: u32,
    /// Requests per second over all of them.
    pub(super) held_rate_hz: f64,
    /// CPU of the thread that does it.
    pub(super) cpu: u32,
}

/// Held connections, and the thread that has them; dropped, they are closed.
#[derive(Debug)]
pub(super) struct Side {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Side {
    /// Gets the tickets, opens the connections, and returns once all is there.
    pub(super) fn open(settings: SideSettings) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("pq-side".to_owned());
        let halted = Arc::clone(&stop);
        let thread = thread
            .spawn(move || run(&settings, &halted, &ready))
            .context("start the thread of held connections")?;
        let side = Self {
            stop,
            thread: Some(thread),
        };
        is_ready
            .recv()
            .map_err(|_| anyhow!("the thread of held connections ended while it started"))??;
        Ok(side)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If it panicked it has said so on stderr; there is nothing left to end.
            let _ = thread.join();
        }
    }
}

fn run(settings: &SideSettings, stop: &AtomicBool, ready: &SyncSender<anyhow::Result<()>>) {
    let started = pin(settings.cpu).and_then(|_| runtime());
    let runtime = match started {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    runtime.block_on(async {
        let opened = async {
            get_tickets(settings).await?;
            hold(settings).await
        };
        match opened.await {
            Err(error) => {
                let _ = ready.send(Err(error));
            }
            Ok(connections) => {
                let _ = ready.send(Ok(()));
                keep(connections, settings, stop).await;
            }
        }
    });
}

async fn get_tickets(settings: &SideSettings) -> anyhow::Result<()> {
    while settings.kept.count() < settings.tickets {
        let before = settings.kept.count();
        let mut connection = open(settings).await?;
        // Tickets follow the handshake, so they are read together with a response.
        connection
            .request(REQUEST)
            .await
            .context("get tickets from the server")?;
        ensure!(
            settings.kept.count() > before,
            "the server gives no tickets: sessions cannot be resumed with it"
        );
    }
    Ok(())
}

async fn hold(settings: &SideSettings) -> anyhow::Result<Vec<Connection>> {
    let mut connections = Vec::with_capacity(settings.held as usize);
    while connections.len() < settings.held as usize {
        let more = AT_ONCE.min(settings.held as usize - connections.len());
        let opening: Vec<_> = (0..more)
            .map(|_| {
                let settings = settings.clone();
                tokio::task::spawn_local(async move { open(&settings).await })
            })
            .collect();
        for each in opening {
            let connection = each
                .await
                .map_err(|error| anyhow!("open a connection: {error}"))?;
            connections.push(connection.with_context(|| {
                format!(
                    "hold {} connections: {} are open",
                    settings.held,
                    connections.len()
                )
            })?);
        }
    }
    Ok(connections)
}

/// Sends requests in turn over the connections, at equal distances, until it is over.
async fn keep(mut connections: Vec<Connection>, settings: &SideSettings, stop: &AtomicBool) {
    let mut next = 0;
    if settings.held_rate_hz == 0.0 || connections.is_empty() {
        while !connections.is_empty() && !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(POLL).await;
        }
        return;
    }
    let mut clock = tokio::time::interval(Duration::from_secs_f64(1.0 / settings.held_rate_hz));
    // What cannot be sent in time is not sent in a burst afterwards.
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    while !stop.load(Ordering::Relaxed) && !connections.is_empty() {
        clock.tick().await;
        next = (next + 1) % connections.len();
        // One that is broken is left out; the measured ones tell what is wrong.
        if connections[next].request(REQUEST_BEFORE).await.is_err() {
            connections.swap_remove(next);
            next = 0;
        }
    }
}

struct Connection {
    stream: TcpStream,
    tls: ClientConnection,
    buffer: ReadBuffer,
    out: Vec<u8>,
}

async fn open(settings: &SideSettings) -> anyhow::Result<Connection> {
    let connect = async {
        let stream = TcpStream::connect(settings.server).await?;
        stream.set_nodelay(true)?;
        let tls =
            ClientConnection::new(Arc::clone(&settings.config), server_name()).map_err(io::Error::other)?;
        let mut connection = Connection {
            stream,
            tls,
            buffer: ReadBuffer::new(),
            out: Vec::new(),
        };
        while connection.tls.is_handshaking() {
            connection.send().await?;
            if connection.tls.is_handshaking() {
                connection.read().await?;
            }
        }
        connection.send().await?;
        Ok::<_, io::Error>(connection)
    };
    timeout(OPEN_MAX, connect)
        .await
        .context("the server does not answer")?
        .with_context(|| format!("connect to {}", settings.server))
}

impl Connection {
    async fn send(&mut self) -> io::Result<()> {
        take_out(&mut self.tls, &mut self.out)?;
        write_all(&self.stream, &self.out).await
    }

    async fn read(&mut self) -> io::Result<()> {
        let read = read_some(&mut self.stream, &self.buffer, READ_BYTES).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !process(&mut self.tls, &self.buffer.bytes(read))? {
            return Err(io::Error::other("TLS failed"));
        }
        Ok(())
    }

    async fn request(&mut self, request: &[u8]) -> io::Result<()> {
        self.tls.writer().write_all(request)?;
        self.send().await?;
        let mut response = [0; 256];
        let mut have = 0;
        loop {
            self.read().await?;
            let is_closed = drain(&mut self.tls, &mut response, &mut have)?;
            let kept = &response[..have.min(response.len())];
            match read_response(kept, have, is_closed, None) {
                Reading::Whole => return Ok(()),
                Reading::Part if !is_closed => {}
                _ => return Err(io::Error::other("another response than asked for")),
            }
        }
    }
}
