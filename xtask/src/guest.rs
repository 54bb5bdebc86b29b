//! Virtual machines with kernels of their own, under QEMU's own emulation: no hardware support is asked for, and any architecture
//! runs on any other. Slow, and true in what matters here: another kernel, another monotonic clock.

pub(crate) mod image;

use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::sys::{prctl::set_pdeathsig, signal::Signal};

use crate::{cross::Architecture, run};

/// A kernel as its distribution builds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 12's cloud kernel for arm64: stands in for Graviton.
    #[value(name = "6.1-arm64")]
    Arm64V6_1,
    /// Debian 12's cloud kernel for amd64.
    #[value(name = "6.1-amd64")]
    Amd64V6_1,
    /// Debian 13's cloud kernel for amd64.
    #[value(name = "6.12-amd64")]
    Amd64V6_12,
}

impl Kernel {
    /// As the command line has it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Arm64V6_1 => "6.1-arm64",
            Self::Amd64V6_1 => "6.1-amd64",
            Self::Amd64V6_12 => "6.12-amd64",
        }
    }

    pub(crate) const fn architecture(self) -> Architecture {
        match self {
            Self::Arm64V6_1 => Architecture::Aarch64,
            Self::Amd64V6_1 | Self::Amd64V6_12 => Architecture::X86_64,
        }
    }

    /// The release of Debian that has it.
    const fn release(self) -> &'static str {
        match self {
            Self::Arm64V6_1 | Self::Amd64V6_1 => "bookworm",
            Self::Amd64V6_12 => "trixie",
        }
    }

    /// A package that stands for the newest one of its series.
    const fn package(self) -> &'static str {
        match self.architecture() {
            Architecture::Aarch64 => "linux-image-cloud-arm64",
            Architecture::X86_64 => "linux-image-cloud-amd64",
        }
    }

    const fn debian_architecture(self) -> &'static str {
        match self.architecture() {
            Architecture::Aarch64 => "arm64",
            Architecture::X86_64 => "amd64",
        }
    }

    const fn multiarch(self) -> &'static str {
        match self.architecture() {
            Architecture::Aarch64 => "aarch64-linux-gnu",
            Architecture::X86_64 => "x86_64-linux-gnu",
        }
    }

    /// The emulator with a machine that has what the image's modules drive.
    fn emulator(self) -> Command {
        let (program, machine, console) = match self.architecture() {
            // The design that Graviton2 has; later ones cost the emulator more.
            Architecture::Aarch64 => (
                "qemu-system-aarch64",
                ["-machine", "virt", "-cpu", "neoverse-n1"],
                "ttyAMA0",
            ),
            Architecture::X86_64 => ("qemu-system-x86_64", ["-machine", "q35", "-cpu", "max"], "ttyS0"),
        };
        let mut command = Command::new(program);
        command.args(machine);
        command
            .arg("-append")
            .arg(format!("console={console} panic=-1 quiet"));
        command
    }
}

/// What a started guest says on its console.
const STARTED: &str = "pqtail guest started";

/// Under emulation on a busy machine; usually 15 to 30 s.
const START_MAX: Duration = Duration::from_secs(240);
const START_POLL: Duration = Duration::from_millis(100);

/// Of each guest. Each has one for the worker and one for the recorder.
const CPUS: &str = "2";
const MEMORY_MIB: &str = "1024";

/// Lines of the console that an error shows.
const LINES_SHOWN: usize = 15;

/// Which end of the link between two guests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// Waits on this port of the loopback for the other emulator.
    Listens(u16),
    /// Connects there.
    Connects(u16),
}

/// A guest that is up. It ends with this value, and with the thread that made it.
#[derive(Debug)]
pub(crate) struct Guest {
    emulator: Child,
    /// Port of the loopback behind which its sshd listens.
    pub(crate) ssh_port: u16,
    /// Its address on the link.
    pub(crate) address: &'static str,
}

impl Guest {
    /// Boots a guest and waits until it is up. `folder` holds the keys of [`keys`] and gets its console's log.
    ///
    /// # Errors
    /// When it does not come up: then with what its console said last.
    pub(crate) fn boot(
        name: &str,
        kernel: Kernel,
        end: End,
        address: &'static str,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let image = image::image(kernel)?;
        eprintln!("vm: booting the {name} ({})", kernel.name());
        let root = own(name, address, folder)?;
        let initrd = folder.join(format!("{name}.initrd"));
        join(&[&image.root, &root], &initrd)?;
        let log = folder.join(format!("{name}.log"));
        let ssh_port = free_port()?;
        // Told apart by its interfaces' last octets, see the image; the other octets only differ.
        let (octet, link) = match end {
            End::Listens(port) => ("0c", format!("listen=127.0.0.1:{port}")),
            End::Connects(port) => ("05", format!("connect=127.0.0.1:{port}")),
        };
        let mut command = kernel.emulator();
        command
            .args(["-accel", "tcg,thread=multi", "-smp", CPUS, "-m", MEMORY_MIB])
            .args([
                "-display",
                "none",
                "-monitor",
                "none",
                "-nodefaults",
                "-no-reboot",
            ])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&initrd)
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(["-device", "virtio-rng-pci"])
            .args([
                "-netdev",
                &format!("user,id=control,hostfwd=tcp:127.0.0.1:{ssh_port}-:22"),
            ])
            .args([
                "-device",
                &format!("virtio-net-pci,netdev=control,mac=52:54:00:{octet}:00:01"),
            ])
            .args(["-netdev", &format!("socket,id=measured,{link}")])
            .args([
                "-device",
                &format!("virtio-net-pci,netdev=measured,mac=52:54:00:{octet}:00:02"),
            ])
            .stdin(Stdio::null());
        // Ctrl-C is for the run between the guests, which brings home what it has before they go.
        command.process_group(0);
        // SAFETY: prctl is a system call; nothing is allocated or locked.
        unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        let emulator = command
            .spawn()
            .with_context(|| format!("start {}", command.get_program().display()))?;
        let mut guest = Self {
            emulator,
            ssh_port,
            address,
        };
        guest.await_start(name, &log)?;
        // The emulator has read it.
        fs::remove_file(&initrd).with_context(|| format!("remove {}", initrd.display()))?;
        Ok(guest)
    }

    fn await_start(&mut self, name: &str, log: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_MAX;
        loop {
            let said = fs::read(log).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            if said.contains(STARTED) {
                return Ok(());
            }
            let ended = self.emulator.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let lines: Vec<&str> = said.lines().collect();
                let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n  ");
                let what = match ended {
                    Some(status) => format!("its emulator ended ({status})"),
                    None => format!("nothing for {} s", START_MAX.as_secs()),
                };
                bail!(
                    "the {name} does not come up: {what}; the end of {}:\n  {last}",
                    log.display()
                );
            }
            thread::sleep(START_POLL);
        }
    }

    /// Process id of its emulator.
    pub(crate) fn pid(&self) -> u32 {
        self.emulator.id()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.emulator.kill();
        let _ = self.emulator.wait();
    }
}

/// Makes the key that opens the guests, the one they show, and the file that pins it for both ports.
pub(crate) fn keys(folder: &Path) -> anyhow::Result<()> {
    for key in ["id_ed25519", "host_key"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "pqtail", "-f"]);
        run("ssh-keygen", keygen.arg(folder.join(key)))?;
    }
    Ok(())
}

/// What distinguishes one guest from the others of its image, as an archive that is unpacked over that.
fn own(name: &str, address: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let tree = folder.join(name);
    let made = || -> std::io::Result<()> {
        for below in ["etc/ssh", "root/.ssh"] {
            fs::create_dir_all(tree.join(below))?;
        }
        fs::set_permissions(tree.join("root"), fs::Permissions::from_mode(0o700))?;
        fs::set_permissions(tree.join("root/.ssh"), fs::Permissions::from_mode(0o700))?;
        fs::copy(
            folder.join("id_ed25519.pub"),
            tree.join("root/.ssh/authorized_keys"),
        )?;
        fs::copy(folder.join("host_key"), tree.join("etc/ssh/host_key"))?;
        fs::write(
            tree.join("etc/guest"),
            format!("name={name}\naddress={address}\n"),
        )
    };
    made().with_context(|| format!("make {}", tree.display()))?;
    let archive = folder.join(format!("{name}.cpio"));
    image::pack(&tree, &archive)?;
    fs::remove_dir_all(&tree).with_context(|| format!("remove {}", tree.display()))?;
    Ok(archive)
}

/// One file of several. Archives for the kernel begin at multiples of four bytes, and cpio fills its blocks.
fn join(parts: &[&Path], whole: &Path) -> anyhow::Result<()> {
    let mut out = File::create(whole).with_context(|| format!("create {}", whole.display()))?;
    for part in parts {
        let mut from = File::open(part).with_context(|| format!("read {}", part.display()))?;
        std::io::copy(&mut from, &mut out).with_context(|| format!("write {}", whole.display()))?;
    }
    Ok(())
}

/// A port of the loopback that nobody has at this moment.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
    let port = listener.local_addr().context("find a free port")?.port();
    ensure!(port > 0, "find a free port");
    Ok(port)
}
