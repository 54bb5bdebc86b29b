//! nginx as the server: one process per CPU, with a configuration of ours that asks of it what the embedded server does.
//!
//! Every process is a whole nginx without a master (`master_process off`): it is a child of ours that dies with us, its one thread
//! is known from the start, and the kernel spreads the connections over them as over the embedded server's workers
//! (`SO_REUSEPORT`). What it does with a connection is the same code.

use std::{
    collections::BTreeSet,
    ffi::CString,
    fmt::Write as _,
    fs, io,
    net::{IpAddr, SocketAddr},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

use super::{
    child,
    exchange::body,
    service::Service,
    tls::{self, Identities, TICKETS},
    worker::pin_thread,
};
use crate::plan::{
    Arm,
    condition::{CertificateKind, RESPONSE_BYTES_MIN},
};

/// How long nginx may take until it listens.
const START_MAX: Duration = Duration::from_secs(20);
const START_POLL: Duration = Duration::from_millis(5);

/// Lines of the error log that an error shows.
const LOG_LINES: usize = 8;

const ERROR_LOG: &str = "error.log";

fn certificate_file(kind: CertificateKind) -> String {
    format!("certificate-{}.pem", kind.name())
}

fn key_file(kind: CertificateKind) -> String {
    format!("key-{}.pem", kind.name())
}

fn body_file(bytes: u32) -> String {
    format!("body-{bytes}.txt")
}

/// Which nginx.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The executable, as it is called inside `root`.
    pub path: PathBuf,
    /// Folder with the file system that it lives in; `None` for the host's own.
    pub root: Option<PathBuf>,
}

impl Program {
    /// A call of it, in its root.
    ///
    /// # Errors
    /// When the root's path is none.
    pub fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.path);
        if let Some(root) = &self.root {
            let path = CString::new(root.as_os_str().as_bytes()).context("--nginx-root holds a zero byte")?;
            let enter = move || {
                // SAFETY: a valid path.
                match unsafe { libc::chroot(path.as_ptr()) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            };
            // SAFETY: one system call, and an error built from its number.
            unsafe { command.pre_exec(enter) };
        }
        Ok(command)
    }

    /// As `nginx -V` tells it: its own version, and that of the OpenSSL it runs with.
    fn version(&self) -> String {
        let Ok(said) = self
            .command()
            .and_then(|mut command| Ok(command.arg("-V").output()?))
        else {
            return String::new();
        };
        version_of(&String::from_utf8_lossy(&said.stderr))
    }
}

/// Where and how to serve.
#[derive(Clone, Debug)]
pub struct NginxSettings {
    /// Which nginx.
    pub program: Program,
    /// Address to listen on.
    pub address: IpAddr,
    /// What is served where.
    pub services: Vec<Service>,
    /// One process per CPU, pinned to it.
    pub cpus: Vec<u32>,
    /// Certificates and keys.
    pub identities: Identities,
    /// Where the configuration and the error log go.
    pub folder: PathBuf,
}

/// Running nginx processes. They end with this value, and with the thread that started them.
#[derive(Debug)]
pub struct Nginx {
    folder: PathBuf,
    /// Files of private keys, and of that of the tickets.
    keys: Vec<String>,
    children: Vec<Child>,
    version: String,
}

impl Nginx {
    /// Writes the configuration, starts the processes and returns once all listen. Call it from a thread that outlives them.
    ///
    /// # Errors
    /// When there is no such nginx, it cannot do an arm, or it does not start; then with the end of its error log.
    pub fn start(settings: &NginxSettings) -> anyhow::Result<Self> {
        let text = configuration(settings)?;
        ensure!(
            !settings.cpus.is_empty(),
            "the server has no CPU: name at least one with --server-cpus"
        );
        let folder = settings.folder.join("nginx");
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let write = |name: &str, mode: u32, bytes: &[u8]| {
            let path = folder.join(name);
            let file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(mode)
                .open(&path);
            file.and_then(|mut file| io::Write::write_all(&mut file, bytes))
                .with_context(|| format!("write {}", path.display()))
        };
        write("nginx.conf", 0o644, text.as_bytes())?;
        for (kind, identity) in &settings.identities {
            write(
                &certificate_file(*kind),
                0o644,
                pem("CERTIFICATE", &identity.certificate).as_bytes(),
            )?;
            write(
                &key_file(*kind),
                0o600,
                pem("PRIVATE KEY", &identity.key).as_bytes(),
            )?;
        }
        let mut keys: Vec<String> = settings.identities.keys().map(|kind| key_file(*kind)).collect();
        if settings
            .services
            .iter()
            .any(|service| service.side_port.is_some())
        {
            let mut key = [0; TICKET_KEY_BYTES];
            rand::rng().fill(&mut key);
            write(TICKET_KEY, 0o600, &key)?;
            keys.push(TICKET_KEY.to_owned());
        }
        let lengths = settings
            .services
            .iter()
            .map(|service| service.condition.response_bytes);
        let files: BTreeSet<u32> = lengths.filter(|bytes| *bytes > RESPONSE_BYTES_MIN).collect();
        for bytes in files {
            write(&body_file(bytes), 0o644, body(bytes).as_bytes())?;
        }
        let mut nginx = Self {
            keys,
            folder,
            children: Vec::new(),
            version: settings.program.version(),
        };
        for &cpu in &settings.cpus {
            let child = nginx.spawn(&settings.program, cpu)?;
            nginx.children.push(child);
            nginx.await_listening(cpu)?;
        }
        // It is in their memory now, and nobody else's business.
        nginx.forget_keys();
        Ok(nginx)
    }

    /// The processes, in the order of the CPUs. Each has one thread.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// What its processes call themselves, such as `nginx/1.26.3 with OpenSSL 3.5.4`; empty if it does not say.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    fn forget_keys(&self) {
        for key in &self.keys {
            // The second time it is gone.
            let _ = fs::remove_file(self.folder.join(key));
        }
    }

    fn spawn(&self, program: &Program, cpu: u32) -> anyhow::Result<Child> {
        let mut command = program.command()?;
        // All paths are relative to the folder, which stays the working directory also where the root is another.
        command
            .args(["-p", "./", "-c", "nginx.conf", "-e", ERROR_LOG, "-g"])
            .arg(format!("pid {};", pid_file(cpu)))
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        child::tie_apart(&mut command);
        let mut child = command.spawn().with_context(|| {
            let root = program.root.as_deref().unwrap_or_else(|| Path::new("/"));
            format!(
                "start {} in {}: name an nginx of that host with --nginx or as `nginx` in the inventory, or the file system it lives \
                 in with --nginx-root (`cargo xtask run --server nginx` provides one on this machine)",
                program.path.display(),
                root.display()
            )
        })?;
        if let Err(error) = pin_thread(child.id(), cpu) {
            end(&mut child);
            return Err(error.context("place nginx"));
        }
        Ok(child)
    }

    /// nginx writes its process id once its sockets listen.
    fn await_listening(&mut self, cpu: u32) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_MAX;
        let path = self.folder.join(pid_file(cpu));
        while fs::read_to_string(&path).map_or(0, |text| text.trim().len()) == 0 {
            self.require_alive()?;
            ensure!(
                Instant::now() < deadline,
                "nginx does not listen after {} s{}",
                START_MAX.as_secs(),
                self.last_words()
            );
            thread::sleep(START_POLL);
        }
        Ok(())
    }

    /// An error with the end of its log if a process has ended.
    ///
    /// # Errors
    /// When one has.
    fn require_alive(&mut self) -> anyhow::Result<()> {
        for index in 0..self.children.len() {
            if let Some(status) = self.children[index].try_wait()? {
                bail!("nginx has ended ({status}){}", self.last_words());
            }
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(self.folder.join(ERROR_LOG)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        if last.is_empty() {
            "; it said nothing".to_owned()
        } else {
            format!("; it said:\n{}", last.join("\n"))
        }
    }
}

/// `nginx version: nginx/1.26.3`, then `built with OpenSSL 3.5.1 ... (running with OpenSSL 3.5.4 ...)` among other lines.
fn version_of(said: &str) -> String {
    let after = |mark: &str| said.split_once(mark).map(|(_, rest)| rest);
    let name = after("nginx version: ")
        .and_then(|rest| rest.lines().next())
        .unwrap_or_default();
    let library = after("running with ").or_else(|| after("built with "));
    let words: Vec<&str> = library.unwrap_or_default().split_whitespace().take(2).collect();
    format!("{} {}", name.trim(), words.join(" ")).trim().to_owned()
}

/// As nginx reads certificates and keys.
fn pem(label: &str, der: &[u8]) -> String {
    pem::encode(&pem::Pem::new(label, der))
}

impl Drop for Nginx {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(end);
        self.forget_keys();
        // Empty, as no request had a body, and there only if it got so far.
        let _ = fs::remove_dir(self.folder.join(SPOOL));
    }
}

/// It holds nothing that an orderly end would save.
fn end(child: &mut Child) {
    // Both fail only if it has ended before.
    let _ = child.kill();
    let _ = child.wait();
}

const SPOOL: &str = "spool";

fn pid_file(cpu: u32) -> String {
    format!("nginx-{cpu}.pid")
}

/// The group that OpenSSL 3.5 has under this name. Which share the client sends decides the rest.
fn group(arm: Arm) -> anyhow::Result<&'static str> {
    Ok(match arm {
        Arm::X25519 | Arm::PqOfferedClassicalChosen => "X25519",
        Arm::X25519mlkem768 | Arm::HelloRetry => "X25519MLKEM768",
        Arm::Secp256r1mlkem768 => "SecP256r1MLKEM768",
        Arm::Mlkem768 => "MLKEM768",
        Arm::NoCrypto => return Err(tls::no_tls(arm)),
    })
}

const CIPHER_SUITES: &str = "TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

/// File of the key of session tickets, which all processes share, and its length.
const TICKET_KEY: &str = "tickets.key";
const TICKET_KEY_BYTES: usize = 80;

/// Everything that costs time on one side alone is off: access log, keep-alive, and tickets and resumption where nothing is resumed.
fn configuration(settings: &NginxSettings) -> anyhow::Result<String> {
    let mut servers = String::new();
    for service in &settings.services {
        let group = group(service.arm())?;
        let condition = &service.condition;
        let (certificate, key) = (
            certificate_file(condition.certificate),
            key_file(condition.certificate),
        );
        let answer = match condition.response_bytes {
            RESPONSE_BYTES_MIN => "return 200 \"OK\\n\";".to_owned(),
            bytes => format!("rewrite ^ /{} break;", body_file(bytes)),
        };
        // Closed as soon as the client asks for it, which is after its last request.
        let keep = if condition.requests_per_connection > 1 {
            "keepalive_timeout 60; keepalive_requests 100000;"
        } else {
            "keepalive_timeout 0;"
        };
        let mut server = |port: u16, tickets: &str| {
            let listen = SocketAddr::new(settings.address, port);
            write!(
                servers,
                "    server {{\n        listen {listen} ssl reuseport backlog=4096;\n        ssl_ecdh_curve {group};\n        \
                 ssl_certificate {certificate};\n        ssl_certificate_key {key};\n        {tickets}{keep}\n        \
                 location / {{ {answer} }}\n    }}\n"
            )
        };
        if let Some(side_port) = service.side_port {
            // Tickets are got before a trial and must outlast it. Commands replace those of the level above, all of them.
            let taking = |tickets: usize| {
                format!(
                    "ssl_session_tickets on;\n        ssl_session_timeout 1d;\n        ssl_session_ticket_key {TICKET_KEY};\n        ssl_conf_command Ciphersuites \
                     {CIPHER_SUITES};\n        ssl_conf_command NumTickets {tickets};\n        "
                )
            };
            server(service.port, &taking(0))?;
            server(side_port, &taking(TICKETS))?;
        } else {
            server(service.port, "")?;
        }
    }
    Ok(format!(
        "# Written by pqtail {version}.\n\
         daemon off;\nmaster_process off;\nworker_processes 1;\nerror_log {ERROR_LOG} warn;\n\
         events {{\n    worker_connections 8192;\n}}\n\
         http {{\n    access_log off;\n    server_tokens off;\n    default_type text/plain;\n    root .;\n    \
         tcp_nodelay on;\n    \
         client_body_temp_path {SPOOL};\n    proxy_temp_path {SPOOL};\n    fastcgi_temp_path {SPOOL};\n    \
         uwsgi_temp_path {SPOOL};\n    scgi_temp_path {SPOOL};\n    \
         ssl_protocols TLSv1.3;\n    ssl_conf_command Ciphersuites {CIPHER_SUITES};\n    \
         ssl_conf_command NumTickets 0;\n    ssl_session_tickets off;\n    ssl_session_cache off;\n    ssl_early_data off;\n\
         {servers}}}\n",
        version = crate::VERSION,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Cell, condition::Condition};

    fn settings(ports: Vec<(Arm, u16)>) -> NginxSettings {
        let service = |(arm, port)| Service {
            cell: Cell { condition: 0, arm },
            condition: Condition::default(),
            port,
            side_port: None,
        };
        NginxSettings {
            program: Program {
                path: PathBuf::from("/usr/sbin/nginx"),
                root: None,
            },
            address: IpAddr::from([10, 77, 0, 2]),
            services: ports.into_iter().map(service).collect(),
            cpus: vec![1],
            identities: Identities::new(),
            folder: PathBuf::new(),
        }
    }

    #[test]
    fn every_arm_has_its_port_and_its_group() {
        let text = configuration(&settings(vec![(Arm::X25519, 8443), (Arm::HelloRetry, 8444)])).unwrap();
        let (first, second) = text.split_once("10.77.0.2:8444 ssl reuseport").unwrap();
        assert!(first.contains("10.77.0.2:8443 ssl reuseport") && first.contains("ssl_ecdh_curve X25519;"));
        assert!(second.contains("ssl_ecdh_curve X25519MLKEM768;"));
    }

    #[test]
    fn versions_are_what_runs_not_what_it_was_built_with() {
        let said = "nginx version: nginx/1.26.3\nbuilt with OpenSSL 3.5.0 8 Apr 2025 (running with OpenSSL 3.5.4 30 Sep 2025)\nTLS SNI \
                    support enabled\n";
        assert_eq!(version_of(said), "nginx/1.26.3 OpenSSL 3.5.4");
        assert_eq!(
            version_of("nginx version: nginx/1.26.3\nbuilt with OpenSSL 3.5.0 8 Apr 2025\n"),
            "nginx/1.26.3 OpenSSL 3.5.0"
        );
        assert_eq!(version_of("command not found"), "");
    }

    #[test]
    fn an_arm_without_tls_is_refused_with_the_remedy() {
        let error = configuration(&settings(vec![(Arm::NoCrypto, 8443)])).unwrap_err();
        assert!(error.to_string().contains("no-crypto") && error.to_string().contains("--server embedded"));
    }
}
