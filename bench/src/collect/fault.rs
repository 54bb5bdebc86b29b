//! Faults that the embedded server commits on order, each on one connection, so that the truth suite knows exactly which
//! request met what, and when.
//!
//! Order and log lie in a file that the server and the suite both map. Without the file nothing of this runs; with it, a
//! connection pays for one load of the order.

use std::{
    fs::{File, OpenOptions},
    num::NonZeroUsize,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::clock::now;

/// What a server can do to one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Its handshake computes for so many ns more: slow cryptography for itself, a stalled event loop for all others.
    Compute(u64),
    /// Its handler sleeps in a system call for so many ns, and with it the thread.
    Sleep(u64),
    /// Its handler reads so many scattered pages of a file that is not in the page cache.
    Read(u64),
    /// Its response goes out in two small writes with Nagle's algorithm on: the second waits for the client's delayed ACK.
    HeldResponse,
}

/// When in a connection a fault is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The ClientHello is read and not yet processed.
    Hello,
    /// The request is read, the response not yet written.
    Response,
}

impl Fault {
    const fn encoded(self) -> u64 {
        const fn order(code: u64, amount: u64) -> u64 {
            code << 56 | (amount & AMOUNT)
        }
        match self {
            Self::Compute(ns) => order(1, ns),
            Self::Sleep(ns) => order(2, ns),
            Self::Read(pages) => order(3, pages),
            Self::HeldResponse => order(4, 0),
        }
    }

    fn decoded(order: u64) -> Option<Self> {
        let amount = order & AMOUNT;
        match order >> 56 {
            1 => Some(Self::Compute(amount)),
            2 => Some(Self::Sleep(amount)),
            3 => Some(Self::Read(amount)),
            4 => Some(Self::HeldResponse),
            _ => None,
        }
    }

    const fn stage(self) -> Stage {
        match self {
            Self::HeldResponse => Stage::Response,
            _ => Stage::Hello,
        }
    }
}

/// A fault that was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// When it began; server clock, ns.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The client's port of the connection.
    pub port: u16,
}

/// The bits of an order that say how much; those above say what.
const AMOUNT: u64 = (1 << 56) - 1;

/// Between two pages of [`Fault::Read`], bytes.
pub const COLD_STRIDE_BYTES: u64 = 64 << 10;

/// Faults of one run that can be logged; the suite injects far fewer.
const LOG_ENTRIES: usize = 4096;

#[repr(C)]
struct Page {
    /// 0, or a fault that the next connection at its stage takes.
    order: AtomicU64,
    committed: AtomicU64,
    log: [Entry; LOG_ENTRIES],
}

#[repr(C)]
struct Entry {
    begin_ns: AtomicU64,
    end_ns: AtomicU64,
    port: AtomicU64,
}

/// One side's view of the shared file.
#[derive(Debug)]
pub struct Faults {
    page: NonNull<Page>,
    cold_file: PathBuf,
}

// SAFETY: the page holds atomics only and stays mapped until the value is dropped.
unsafe impl Send for Faults {}
// SAFETY: see above.
unsafe impl Sync for Faults {}

impl Faults {
    /// Makes the file, with nothing ordered.
    ///
    /// # Errors
    /// When the file cannot be made or mapped.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::create_new(path).with_context(|| format!("create {}", path.display()))?;
        file.set_len(size_of::<Page>() as u64)?;
        Self::open(path)
    }

    /// Maps the file that the other side has made.
    ///
    /// # Errors
    /// When there is none, or it is not one of ours.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .with_context(|| format!("open {}", path.display()))?;
        ensure!(
            file.metadata()?.len() == size_of::<Page>() as u64,
            "{} is no file of faults",
            path.display()
        );
        let length = NonZeroUsize::new(size_of::<Page>()).expect("a page is not empty");
        // SAFETY: a fresh shared mapping of a file of at least this length; whoever else maps it uses atomics only.
        let page = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &file,
                0,
            )
        };
        Ok(Self {
            page: page.with_context(|| format!("map {}", path.display()))?.cast(),
            cold_file: path.with_extension("cold"),
        })
    }

    /// The file that [`Fault::Read`] reads, for the suite to fill.
    #[must_use]
    pub fn cold_file(&self) -> &Path {
        &self.cold_file
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped until `self` is dropped, zeroed by the file system, and valid for every bit pattern.
        unsafe { self.page.as_ref() }
    }

    /// Orders a fault of the next connection; one that nobody has taken yet is replaced.
    pub fn order(&self, fault: Fault) {
        self.page().order.store(fault.encoded(), Ordering::Release);
    }

    /// Takes an order back.
    pub fn cancel(&self) {
        self.page().order.store(0, Ordering::Release);
    }

    /// Faults committed so far, in order.
    #[must_use]
    pub fn committed(&self) -> Vec<Committed> {
        let page = self.page();
        let count = page.committed.load(Ordering::Acquire) as usize;
        page.log[..count.min(LOG_ENTRIES)]
            .iter()
            .map(|entry| Committed {
                begin_ns: entry.begin_ns.load(Ordering::Relaxed),
                end_ns: entry.end_ns.load(Ordering::Relaxed),
                port: entry.port.load(Ordering::Relaxed) as u16,
            })
            .collect()
    }

    /// The fault ordered for this stage, if any; nobody else gets it.
    pub(super) fn take(&self, stage: Stage) -> Option<Fault> {
        let order = &self.page().order;
        let waiting = order.load(Ordering::Acquire);
        let fault = Fault::decoded(waiting).filter(|fault| fault.stage() == stage)?;
        let taken = order.compare_exchange(waiting, 0, Ordering::AcqRel, Ordering::Relaxed);
        taken.ok().map(|_| fault)
    }

    /// Commits what a thread can do by itself, and logs it.
    pub(super) fn commit(&self, fault: Fault, port: u16) {
        let begin_ns = now().0;
        match fault {
            Fault::Compute(ns) => {
                while now().0 < begin_ns + ns {
                    std::hint::spin_loop();
                }
            }
            Fault::Sleep(ns) => std::thread::sleep(Duration::from_nanos(ns)),
            // A file that cannot be read makes a short fault; the log tells how short.
            Fault::Read(pages) => drop(self.read_cold(pages)),
            Fault::HeldResponse => {}
        }
        self.log(begin_ns, now().0, port);
    }

    /// Enters a fault into the log; one writer at a time, as each server of the suite has one worker.
    pub(super) fn log(&self, begin_ns: u64, end_ns: u64, port: u16) {
        let page = self.page();
        let number = page.committed.load(Ordering::Relaxed);
        if let Some(entry) = page.log.get(number as usize) {
            entry.begin_ns.store(begin_ns, Ordering::Relaxed);
            entry.end_ns.store(end_ns, Ordering::Relaxed);
            entry.port.store(port.into(), Ordering::Relaxed);
            page.committed.store(number + 1, Ordering::Release);
        }
    }

    fn read_cold(&self, pages: u64) -> std::io::Result<()> {
        let file = File::open(&self.cold_file)?;
        // Forgotten, and not read ahead: every page is a wait for the disk and next to no work.
        for advice in [libc::POSIX_FADV_DONTNEED, libc::POSIX_FADV_RANDOM] {
            // SAFETY: an open descriptor; the call takes no memory of ours.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, advice) };
        }
        let mut page = [0; 4096];
        for number in 0..pages {
            file.read_exact_at(&mut page, number * COLD_STRIDE_BYTES)?;
        }
        Ok(())
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and nobody holds a reference any more.
        let _ = unsafe { munmap(self.page.cast(), size_of::<Page>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_taken_once_at_its_stage_and_logged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faults");
        let suite = Faults::create(&path).unwrap();
        let server = Faults::open(&path).unwrap();
        assert_eq!(server.take(Stage::Hello), None);
        suite.order(Fault::Compute(1_000));
        assert_eq!(server.take(Stage::Response), None);
        let fault = server.take(Stage::Hello).unwrap();
        assert_eq!(fault, Fault::Compute(1_000));
        assert_eq!(server.take(Stage::Hello), None);
        server.commit(fault, 4711);
        let [committed] = suite.committed()[..] else {
            panic!("one fault was committed")
        };
        assert_eq!(committed.port, 4711);
        assert!(committed.end_ns - committed.begin_ns >= 1_000);
    }
}
