//! A guest's kernel and root file system, made from Debian's packages and kept under `target/vm`.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use super::Kernel;
use crate::{debian, output, root, run};

/// Changes with what is in an image, so that one of an older recipe is not taken for today's.
const RECIPE: &str = "1";

/// The release whose user land every guest has: nginx 1.26 with a shared OpenSSL 3.5.
const USER_LAND: &str = "trixie";

/// What a guest needs; apt adds what these need in turn.
const PACKAGES: [&str; 8] = [
    "base-files",
    "busybox-static",
    "iproute2",
    "libc-bin",
    "nginx-light",
    "openssh-server",
    "openssh-sftp-server",
    "openssl",
];

/// Parts of those packages that no guest uses. The file system is unpacked into memory at boot: every megabyte costs.
const UNNEEDED: [&str; 9] = [
    "boot",
    "etc/systemd",
    "usr/include",
    "usr/lib/systemd",
    "usr/lib/{multiarch}/gconv",
    "usr/lib/{multiarch}/perl-base",
    "usr/lib/{multiarch}/security",
    "usr/lib/{multiarch}/systemd",
    "usr/share",
];

/// Modules that a guest loads: its bus, its two interfaces, randomness, and what a run on one machine joins its ends with.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_net", "virtio-rng", "veth"];

/// Files that maintainers' scripts would have made, and how this guest starts.
const FILES: [(&str, &str, u32); 8] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\nsshd:x:100:65534::/run/sshd:/bin/false\n\
         nobody:x:65534:65534::/:/bin/false\n",
        0o644,
    ),
    (
        "etc/group",
        "root:x:0:\nadm:x:4:\ntty:x:5:\nwww-data:x:33:\nnogroup:x:65534:\n",
        0o644,
    ),
    ("etc/shadow", "root:*:20000::::::\nsshd:!:20000::::::\n", 0o600),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        0o644,
    ),
    ("etc/hosts", "127.0.0.1 localhost\n", 0o644),
    // busybox's init collects every orphan, which a shell as first process would not.
    (
        "etc/inittab",
        "::sysinit:/etc/start\n::respawn:/usr/sbin/sshd -D -e\n",
        0o644,
    ),
    (
        "etc/ssh/sshd_config",
        "HostKey /etc/ssh/host_key\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nUseDNS no\n\
         Subsystem sftp /usr/lib/openssh/sftp-server\n",
        0o644,
    ),
    ("etc/start", START, 0o755),
];

/// Says [`super::STARTED`] on the console when it is done. Interfaces are told by their hardware address, see [`super::Guest`].
const START: &str = r#"#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
busybox mkdir -p /dev/pts /dev/shm /run/sshd /root /tmp /var/tmp /var/log/nginx /var/lib/nginx /var/www
busybox mount -t devpts pts /dev/pts
busybox mount -t cgroup2 cgroup2 /sys/fs/cgroup
busybox mount -t tmpfs -o mode=1777 tmp /tmp
busybox mount -t tmpfs -o mode=1777 tmp /var/tmp
busybox mount -t tmpfs -o mode=755 run /run
busybox mkdir -p /run/sshd
busybox chmod 700 /root /root/.ssh
busybox --install -s /usr/bin 2>/dev/null
while read -r module; do busybox insmod "/modules/$module"; done </modules/order
. /etc/guest
busybox hostname "$name"
ip link set lo up
for device in /sys/class/net/*; do
    case "$(cat "$device/address")" in
    *:00:01) ip link set "${device##*/}" up && ip address add 10.0.2.15/24 dev "${device##*/}" ;;
    *:00:02) ip link set "${device##*/}" up && ip address add "$address/24" dev "${device##*/}" ;;
    esac
done
echo "pqtail guest started"
"#;

/// What QEMU boots.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    /// Kernel, as its package has it.
    pub(crate) kernel: PathBuf,
    /// Root file system, an archive that the kernel unpacks into memory; more archives may follow it.
    pub(crate) root: PathBuf,
}

/// The kernel's image, from the cache if it was made before.
///
/// # Errors
/// When packages cannot be had. Signatures and checksums of all of them are apt's to verify.
pub(crate) fn image(kernel: Kernel) -> anyhow::Result<Image> {
    let images = root().join("target/vm/images");
    let folder = images.join(format!("{}-{RECIPE}", kernel.name()));
    let image = Image {
        kernel: folder.join("vmlinuz"),
        root: folder.join("root.cpio"),
    };
    if folder.exists() {
        return Ok(image);
    }
    let making = tempfile(&images)?;
    let made = make(kernel, &making.0)?;
    // Renamed whole: a folder of that name is a finished image.
    fs::rename(&made, &folder).with_context(|| format!("rename to {}", folder.display()))?;
    Ok(image)
}

/// A folder that goes when it is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("xtask: cannot remove {}: {error}", self.0.display());
        }
    }
}

fn tempfile(below: &Path) -> anyhow::Result<Temporary> {
    let folder = below.join(format!("making-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    Ok(Temporary(folder))
}

fn make(kernel: Kernel, folder: &Path) -> anyhow::Result<PathBuf> {
    let made = folder.join("made");
    let (boot, tree) = (folder.join("kernel"), folder.join("root"));
    fs::create_dir(&made).with_context(|| format!("make {}", made.display()))?;
    eprintln!("vm: getting Debian's kernel {}", kernel.name());
    extract(kernel, kernel.release(), &[kernel.package()], &boot)?;
    eprintln!("vm: getting the user land for it (Debian {USER_LAND})");
    extract(kernel, USER_LAND, &PACKAGES, &tree)?;
    eprintln!("vm: packing the image");
    link_lib(&boot)?;
    let version = only_entry(&boot.join("lib/modules"))?;
    let vmlinuz = boot.join(format!("boot/vmlinuz-{version}"));
    fs::copy(&vmlinuz, made.join("vmlinuz")).with_context(|| format!("copy {}", vmlinuz.display()))?;
    modules(&boot, &version, &tree.join("modules"))?;
    furnish(kernel, &tree)?;
    pack(&tree, &made.join("root.cpio"))?;
    Ok(made)
}

/// Packages and what they need, unpacked. No maintainer script runs, so any architecture's can be unpacked here.
fn extract(kernel: Kernel, release: &str, packages: &[&str], folder: &Path) -> anyhow::Result<()> {
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args([
            "--quiet",
            "--mode=root",
            "--variant=extract",
            "--format=directory",
        ])
        .arg(format!("--architectures={}", kernel.debian_architecture()))
        .arg(format!("--include={}", packages.join(",")))
        .arg(release)
        .arg(folder);
    run(
        &format!("mmdebstrap of {} from Debian {release}", packages.join(", ")),
        &mut mmdebstrap,
    )
}

/// Kernels from Debian 13 on are packaged below `usr/lib` only, and no package here brings the link that depmod goes by.
fn link_lib(boot: &Path) -> anyhow::Result<()> {
    let link = boot.join("lib");
    if link.exists() {
        return Ok(());
    }
    symlink("usr/lib", &link).with_context(|| format!("link {}", link.display()))
}

fn only_entry(folder: &Path) -> anyhow::Result<String> {
    let names: Vec<String> = fs::read_dir(folder)
        .with_context(|| format!("read {}", folder.display()))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<_>>()?;
    match <[String; 1]>::try_from(names) {
        Ok([name]) => Ok(name),
        Err(names) => anyhow::bail!("{} should hold one kernel, and holds {names:?}", folder.display()),
    }
}

/// Copies the modules that a guest loads, and those they need, unpacked, with the order to load them in.
fn modules(boot: &Path, version: &str, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir(folder).with_context(|| format!("make {}", folder.display()))?;
    let mut depmod = Command::new(debian::find("depmod"));
    run("depmod", depmod.arg("-b").arg(boot).arg(version))?;
    let below = boot.join("lib/modules").join(version);
    let needs = below.join("modules.dep");
    let needs = fs::read_to_string(&needs).with_context(|| format!("read {}", needs.display()))?;
    let built_in = below.join("modules.builtin");
    let built_in = fs::read_to_string(&built_in).with_context(|| format!("read {}", built_in.display()))?;
    let mut order: Vec<String> = Vec::new();
    for wanted in MODULES {
        // 6.12 has its bus built in, 6.1 as a module.
        if built_in.lines().any(|module| bare(module) == wanted) {
            continue;
        }
        let (module, needed) = needs
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(module, _)| bare(module) == wanted)
            .with_context(|| format!("kernel {version} has no module {wanted}"))?;
        // depmod lists what is to be loaded first last.
        for path in needed.split_whitespace().rev().chain([module]) {
            let file = format!("{}.ko", bare(path));
            if order.contains(&file) {
                continue;
            }
            unpack(&below.join(path), &folder.join(&file))?;
            order.push(file);
        }
    }
    fs::write(folder.join("order"), order.join("\n") + "\n").context("write the order of modules")
}

/// A module's name without its path and its endings.
fn bare(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split('.').next().unwrap_or(name)
}

fn unpack(from: &Path, to: &Path) -> anyhow::Result<()> {
    let what = || format!("unpack {}", from.display());
    if from.extension().is_some_and(|ending| ending == "xz") {
        let file = fs::File::create(to).with_context(what)?;
        run(
            "xz",
            Command::new("xz").arg("-dc").arg(from).stdout(Stdio::from(file)),
        )
    } else {
        fs::copy(from, to).map(drop).with_context(what)
    }
}

fn furnish(kernel: Kernel, tree: &Path) -> anyhow::Result<()> {
    for path in UNNEEDED {
        let path = tree.join(path.replace("{multiarch}", kernel.multiarch()));
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    for folder in ["dev", "proc", "sys", "run", "tmp", "root", "var/tmp"] {
        let path = tree.join(folder);
        fs::create_dir_all(&path).with_context(|| format!("make {}", path.display()))?;
    }
    for (path, text, mode) in FILES {
        let path = tree.join(path);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)))
            .with_context(|| format!("write {}", path.display()))?;
    }
    for (link, to) in [("init", "/usr/bin/busybox"), ("usr/bin/sh", "busybox")] {
        let link = tree.join(link);
        symlink(to, &link).with_context(|| format!("link {}", link.display()))?;
    }
    Ok(())
}

/// Packs a tree as the archive that kernels unpack at boot. Everything in it is root's.
pub(super) fn pack(tree: &Path, archive: &Path) -> anyhow::Result<()> {
    let list = output("find", Command::new("find").arg(".").current_dir(tree))?;
    ensure!(!list.is_empty(), "{} is empty", tree.display());
    let names = archive.with_extension("list");
    fs::write(&names, list).with_context(|| format!("write {}", names.display()))?;
    let stdin = fs::File::open(&names).with_context(|| format!("read {}", names.display()))?;
    let stdout = fs::File::create(archive).with_context(|| format!("write {}", archive.display()))?;
    let mut cpio = Command::new("cpio");
    cpio.args(["--create", "--format=newc", "--quiet", "--owner=0:0"])
        .current_dir(tree)
        .stdin(stdin)
        .stdout(stdout);
    run("cpio", &mut cpio)?;
    fs::remove_file(&names).with_context(|| format!("remove {}", names.display()))
}
