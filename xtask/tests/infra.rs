//! `up`, `wait-ready` and `down` as a user runs them, against a mock cloud on loopback and a real sshd.

#![allow(clippy::unwrap_used, reason = "helpers of tests stand outside test functions")]

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// The mock cloud, from PyPI.
const MOTO: &str = "moto[server,ec2]==5.2.1";

/// For everything that is waited for here. Only a broken test gets that far.
const PATIENCE: Duration = Duration::from_secs(240);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Whether a program is there; named if not, and an error in CI.
fn has(program: &str, what_for: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let there = env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .any(|folder| folder.join(program).is_file());
    if !there {
        assert!(env::var_os("CI").is_none(), "{what_for} needs {program}");
        eprintln!("NOT RUN: {what_for} needs {program}");
    }
    there
}

fn xtask(arguments: &[&str], state: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(arguments).arg("--state").arg(state);
    // The mock cloud is here, and no proxy knows the way.
    command.env("NO_PROXY", "127.0.0.1").stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[track_caller]
fn must(mut command: Command, succeed: bool, word: &str) -> String {
    let output = command.output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.success(), succeed, "{text}");
    assert!(text.contains(word), "no '{word}' in: {text}");
    text
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn wait_for_port(port: u16) {
    let begin = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begin.elapsed() < PATIENCE, "nothing listens on port {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// moto in a virtual environment under target/, made once.
fn mock_cloud(folder: &Path) -> (Running, u16) {
    let venv = root().join("target/moto-5.2.1");
    let server = venv.join("bin/moto_server");
    let done = venv.join("done");
    static MAKING: Mutex<()> = Mutex::new(());
    let making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if !done.exists() {
        let _ = fs::remove_dir_all(&venv);
        let mut make = Command::new("python3");
        assert!(
            make.args(["-m", "venv"]).arg(&venv).status().unwrap().success(),
            "python3 -m venv: on Debian and Ubuntu, apt-get install python3-venv"
        );
        let mut pip = Command::new(venv.join("bin/pip"));
        assert!(pip.args(["--quiet", "install", MOTO]).status().unwrap().success());
        fs::write(done, "").unwrap();
    }
    drop(making);
    let port = free_port();
    let log = fs::File::create(folder.join("moto.log")).unwrap();
    let mut command = Command::new(server);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    command.stdout(log.try_clone().unwrap()).stderr(log);
    let running = Running(command.spawn().unwrap());
    wait_for_port(port);
    (running, port)
}

/// What the proxy does with a request for an instance.
#[derive(Clone, Copy)]
enum Fault {
    /// The provider has no capacity for the instance of this number, counted from 0, and later ones.
    NoCapacityFrom(usize),
    /// It takes the request and never answers; the first such is told.
    Hangs,
}

/// Between Terraform and the mock cloud. Returns its port and where it tells that an instance was asked for.
fn faulty(cloud: u16, fault: Fault) -> (u16, mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (told, asked) = mpsc::channel();
    let instances = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (told, instances) = (told.clone(), Arc::clone(&instances));
            thread::spawn(move || pass_on(client, cloud, fault, &told, &instances));
        }
    });
    (port, asked)
}

fn pass_on(
    mut client: TcpStream,
    cloud: u16,
    fault: Fault,
    told: &mpsc::Sender<()>,
    instances: &AtomicUsize,
) -> Option<()> {
    let mut reader = BufReader::new(client.try_clone().ok()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? <= 2 {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        // One request a connection: then the end of the answer needs no reading.
        if !lower.starts_with("connection:") {
            head += &line;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    if String::from_utf8_lossy(&body).contains("Action=RunInstances") {
        let _ = told.send(());
        let number = instances.fetch_add(1, Ordering::SeqCst);
        match fault {
            Fault::NoCapacityFrom(first) if number >= first => {
                let answer = "<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code><Message>There is no Spot \
                              capacity available</Message></Error></Errors><RequestID>1</RequestID></Response>";
                return write!(
                    client,
                    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/xml\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{answer}",
                    answer.len()
                )
                .ok();
            }
            Fault::Hangs => {
                // Until Terraform gives up and closes.
                let _ = reader.read(&mut [0]);
                return None;
            }
            Fault::NoCapacityFrom(_) => {}
        }
    }
    let mut upstream = TcpStream::connect(("127.0.0.1", cloud)).ok()?;
    write!(upstream, "{head}Connection: close\r\n\r\n").ok()?;
    upstream.write_all(&body).ok()?;
    std::io::copy(&mut upstream, &mut client).ok()?;
    Some(())
}

fn up(port: u16, state: &Path) -> Command {
    let endpoint = format!("http://127.0.0.1:{port}");
    xtask(
        &[
            "up",
            "--yes",
            "--no-placement-group",
            "--allow",
            "203.0.113.7/32",
            "--mock-endpoint",
            &endpoint,
        ],
        state,
    )
}

#[test]
fn hosts_come_up_and_go_down_and_nothing_is_left() {
    let what = "the test of the mock cloud";
    if !has("terraform", what) || !has("python3", what) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (_moto, cloud) = mock_cloud(folder.path());

    must(up(cloud, &state), true, "USD an hour");
    let inventory = fs::read_to_string(state.join("hosts.toml")).unwrap();
    assert!(inventory.contains("address = \"10.0.0.11\""), "{inventory}");
    use std::os::unix::fs::PermissionsExt as _;
    let key = fs::metadata(state.join("id_ed25519")).unwrap();
    assert_eq!(key.permissions().mode() & 0o777, 0o600);
    let kept = fs::read_to_string(state.join("terraform/terraform.tfstate")).unwrap();
    assert!(!kept.contains("PRIVATE KEY"));

    must(up(cloud, &state), true, "up already");
    must(xtask(&["down"], &state), true, "nothing is left");
    must(xtask(&["down"], &state), true, "down already");
    assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
}

#[test]
fn one_host_of_two_without_capacity_is_said_and_goes_down() {
    let what = "the test of missing capacity";
    if !has("terraform", what) || !has("python3", what) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (_moto, cloud) = mock_cloud(folder.path());
    let (port, _asked) = faulty(cloud, Fault::NoCapacityFrom(1));

    let text = must(up(port, &state), false, "cargo xtask down");
    assert!(text.contains("no Spot capacity"), "{text}");
    assert!(!state.join("hosts.toml").exists());
    must(up(port, &state), false, "did not come to its end");
    let text = must(xtask(&["down"], &state), true, "nothing is left");
    // The one that was made.
    assert!(text.contains("aws_instance.host"), "{text}");
}

#[test]
fn an_interrupted_up_leaves_what_down_destroys() {
    let what = "the test of an interrupted up";
    if !has("terraform", what) || !has("python3", what) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (_moto, cloud) = mock_cloud(folder.path());
    let (port, asked) = faulty(cloud, Fault::Hangs);

    let mut command = up(port, &state);
    // A group of its own, as a terminal has it: Ctrl-C reaches all of it.
    command
        .process_group(0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let group = format!("-{}", child.id());
    asked
        .recv_timeout(PATIENCE)
        .expect("Terraform asks for an instance");
    let mut kill = Command::new("kill");
    assert!(kill.args(["-INT", "--", &group]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let text = said(&output);
    assert!(!output.status.success() && text.contains("interrupted"), "{text}");
    assert!(text.contains("cargo xtask down"), "{text}");
    must(xtask(&["down"], &state), true, "nothing is left");
}

#[test]
fn nobody_to_ask_and_absurd_times_are_errors_before_anything_is_made() {
    if !has("terraform", "the test of refusals") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let allow = ["up", "--allow", "203.0.113.7/32"];
    must(xtask(&allow, &state), false, "--yes");
    let brief = [&allow[..], &["--yes", "--ttl", "1m"]].concat();
    must(xtask(&brief, &state), false, "--ttl");
    assert!(!state.exists());
}

#[test]
fn the_terraform_files_are_formatted() {
    if !has("terraform", "the check of the Terraform files") {
        return;
    }
    let mut format = Command::new("terraform");
    format.args(["fmt", "-check", "-recursive", "-diff"]);
    format.current_dir(root().join("infra"));
    must(format, true, "");
}

#[test]
fn the_cloud_init_template_fits_the_schema_and_its_scripts_parse() {
    let text = fs::read_to_string(root().join("infra/cloud-init.yaml")).unwrap();
    let filled = text.replace("${ttl_minutes}", "120");
    assert!(!filled.contains("${"), "Terraform would take it for its own");
    // The script is the block below `content: |`, six columns in.
    let script: String = filled
        .lines()
        .skip_while(|line| !line.ends_with("content: |"))
        .skip(1)
        .take_while(|line| line.is_empty() || line.starts_with("      "))
        .map(|line| format!("{}\n", line.get(6..).unwrap_or_default()))
        .collect();
    assert!(script.contains("/var/lib/pqtail/ready"));
    let folder = tempfile::tempdir().unwrap();
    let (yaml, provision) = (folder.path().join("c.yaml"), folder.path().join("provision.sh"));
    fs::write(&yaml, filled).unwrap();
    fs::write(&provision, script).unwrap();
    let mut bash = Command::new("bash");
    bash.arg("-n").arg(&provision);
    must(bash, true, "");
    if has("cloud-init", "the check of cloud-init's schema") {
        let mut schema = Command::new("cloud-init");
        schema.args(["schema", "-c"]).arg(&yaml);
        must(schema, true, "Valid");
    }
}

/// A real sshd that answers every command with `script`, and an inventory of two hosts that are both it.
fn stand_in(folder: &Path, script: &str) -> Running {
    let keygen = |name: &str| {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]);
        keygen.arg(folder.join(name)).stdin(Stdio::null());
        assert!(keygen.status().unwrap().success());
    };
    keygen("host");
    keygen("id_ed25519");
    fs::copy(folder.join("id_ed25519.pub"), folder.join("authorized")).unwrap();
    let answer = folder.join("answer");
    fs::write(&answer, script).unwrap();
    let port = free_port();
    fs::write(
        folder.join("sshd_config"),
        format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {0}/host\nAuthorizedKeysFile {0}/authorized\nStrictModes no\nUsePAM no\n\
             PidFile none\nPermitRootLogin yes\nForceCommand sh {0}/answer\n",
            folder.display()
        ),
    )
    .unwrap();
    // sshd insists on it; harmless where it is.
    let _ = fs::create_dir_all("/run/sshd");
    let sshd = if Path::new("/usr/sbin/sshd").exists() {
        "/usr/sbin/sshd"
    } else {
        "/usr/bin/sshd"
    };
    let mut command = Command::new(sshd);
    command.arg("-D").arg("-f").arg(folder.join("sshd_config"));
    let running = Running(command.stderr(Stdio::null()).spawn().unwrap());
    wait_for_port(port);
    let host = format!("ssh = 'root@127.0.0.1'\nport = {port}\n");
    fs::write(
        folder.join("hosts.toml"),
        format!("[client]\n{host}[server]\n{host}"),
    )
    .unwrap();
    running
}

#[test]
fn hosts_are_waited_for_and_their_failure_is_told() {
    if !has("sshd", "the test of wait-ready") {
        return;
    }
    for (script, arguments, succeed, word) in [
        (
            "echo openssl nginx",
            &["wait-ready"][..],
            true,
            "server is ready: openssl nginx",
        ),
        (
            "echo building nginx failed; exit 3",
            &["wait-ready"],
            false,
            "client: its set-up failed: building nginx",
        ),
        ("exit 4", &["wait-ready", "--timeout", "0s"], false, "under way"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let _sshd = stand_in(folder.path(), script);
        must(xtask(arguments, folder.path()), succeed, word);
        assert!(folder.path().join("known_hosts").exists());
    }
}

#[test]
fn another_host_key_than_the_pinned_one_is_refused() {
    if !has("sshd", "the test of pinned host keys") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let _sshd = stand_in(folder.path(), "echo ready");
    must(xtask(&["wait-ready"], folder.path()), true, "is ready");
    let known = folder.path().join("known_hosts");
    let pinned = fs::read_to_string(&known).unwrap();
    let place = pinned.split(' ').next().unwrap();
    let other = fs::read_to_string(folder.path().join("id_ed25519.pub")).unwrap();
    fs::write(known, format!("{place} {other}")).unwrap();
    must(
        xtask(&["wait-ready"], folder.path()),
        false,
        "another one than at first contact",
    );
}

#[test]
fn without_an_inventory_the_remedy_is_named() {
    let folder = tempfile::tempdir().unwrap();
    must(xtask(&["wait-ready"], folder.path()), false, "cargo xtask up");
    must(xtask(&["down"], folder.path()), true, "down already");
}
