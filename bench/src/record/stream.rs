//! The container of a recording: a self-describing header, then checksummed chunks of fixed-size records.
//!
//! ```text
//! "PQTAIL\r\n"  header_bytes:u32  crc32:u32  header (JSON)
//! "CHNK"  raw_bytes:u32  stored_bytes:u32  crc32:u32  LZ4 block      (repeated)
//! "END."  records:u64  crc32 of that count:u32                        (absent if the writer was cut off)
//! ```
//!
//! Integers are little-endian. A cut recording is readable up to its last whole chunk, a chunk whose checksum fails
//! is skipped and counted; neither is silent: [`Recording`] says what is missing.

use std::{
    fmt,
    fs::File,
    io::{self, BufReader, Read, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::SCHEMA;

const MAGIC: &[u8; 8] = b"PQTAIL\r\n";
const CHUNK: &[u8; 4] = b"CHNK";
const END: &[u8; 4] = b"END.";

/// Raw bytes after which a chunk is closed. Also the most that a killed writer can lose besides its last flush.
pub const CHUNK_BYTES: usize = 256 * 1024;

/// No honest header or chunk is larger; a reader allocates no more on a file's word.
const HEADER_BYTES_MAX: usize = 64 * 1024;
const CHUNK_BYTES_MAX: usize = 4 * CHUNK_BYTES;

/// What a recording holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// [`pqtail_common`] records of one machine's kernel.
    Kernel,
    /// [`RequestStamps`](super::stamps::RequestStamps) of the load generator.
    Requests,
    /// [`ConnectionStamps`](super::stamps::ConnectionStamps) of the embedded server.
    Connections,
}

/// First block of every recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// Must be [`SCHEMA`].
    pub schema: u32,
    /// What the records are.
    pub kind: StreamKind,
    /// Bytes of one record.
    pub record_bytes: u32,
    /// Trial the recording belongs to.
    pub trial: u32,
    /// Which boot of which kernel: times of different boots must never be mixed.
    pub boot_id: String,
}

/// Writes one recording.
#[derive(Debug)]
pub struct Writer<T> {
    file: File,
    path: PathBuf,
    buffer: Vec<u8>,
    records: u64,
    stored_bytes: u64,
    digest: Sha256,
    record: PhantomData<T>,
}

impl<T: IntoBytes + Immutable> Writer<T> {
    /// Creates the file and writes its header.
    ///
    /// # Errors
    /// When the file cannot be created or written.
    pub fn create(path: &Path, kind: StreamKind, trial: u32) -> anyhow::Result<Self> {
        let header = StreamHeader {
            schema: SCHEMA,
            kind,
            record_bytes: size_of::<T>() as u32,
            trial,
            boot_id: boot_id(),
        };
        let file = File::create(path).with_context(|| format!("create the recording {}", path.display()))?;
        let json = serde_json::to_vec(&header)?;
        let mut writer = Self {
            file,
            path: path.to_owned(),
            buffer: Vec::with_capacity(CHUNK_BYTES + size_of::<T>()),
            records: 0,
            stored_bytes: 0,
            digest: Sha256::new(),
            record: PhantomData,
        };
        let mut block = Vec::with_capacity(json.len() + 16);
        block.extend_from_slice(MAGIC);
        block.extend_from_slice(&(json.len() as u32).to_le_bytes());
        block.extend_from_slice(&crc32fast::hash(&json).to_le_bytes());
        block.extend_from_slice(&json);
        writer.store(&block)?;
        Ok(writer)
    }

    /// Appends one record; a full chunk goes to the file.
    ///
    /// # Errors
    /// When the disk takes no more.
    pub fn push(&mut self, record: &T) -> anyhow::Result<()> {
        self.buffer.extend_from_slice(record.as_bytes());
        self.records += 1;
        if self.buffer.len() >= CHUNK_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Appends many records that are already bytes of whole `T`s.
    ///
    /// # Errors
    /// When the disk takes no more.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of records.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        assert!(bytes.len().is_multiple_of(size_of::<T>()), "whole records only");
        self.buffer.extend_from_slice(bytes);
        self.records += (bytes.len() / size_of::<T>()) as u64;
        if self.buffer.len() >= CHUNK_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Closes the chunk under way, so that a reader of the file sees all records so far.
    ///
    /// # Errors
    /// When the disk takes no more.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let compressed = lz4_flex::block::compress(&self.buffer);
        let mut block = Vec::with_capacity(compressed.len() + 16);
        block.extend_from_slice(CHUNK);
        block.extend_from_slice(&(self.buffer.len() as u32).to_le_bytes());
        block.extend_from_slice(&(compressed.len() as u32).to_le_bytes());
        block.extend_from_slice(&crc32fast::hash(&compressed).to_le_bytes());
        block.extend_from_slice(&compressed);
        self.buffer.clear();
        self.store(&block)
    }

    /// Closes the recording with its end mark. Without this call it reads as cut.
    ///
    /// # Errors
    /// When the disk takes no more.
    pub fn finish(mut self) -> anyhow::Result<Written> {
        self.flush()?;
        let count = self.records.to_le_bytes();
        let mut block = END.to_vec();
        block.extend_from_slice(&count);
        block.extend_from_slice(&crc32fast::hash(&count).to_le_bytes());
        self.store(&block)?;
        Ok(Written {
            records: self.records,
            bytes: self.stored_bytes,
            sha256: self.digest.hex(),
        })
    }

    fn store(&mut self, block: &[u8]) -> anyhow::Result<()> {
        if let Err(error) = self.file.write_all(block) {
            // A torn block is of no use to a reader, and on a full disk its room is to the others.
            let _ = self.file.set_len(self.stored_bytes);
            return Err(error).with_context(|| {
                format!(
                    "write the recording {}: what was stored before stays readable",
                    self.path.display()
                )
            });
        }
        self.stored_bytes += block.len() as u64;
        self.digest.0.update(block);
        Ok(())
    }
}

/// Size and checksum of a finished recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Records stored.
    pub records: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
}

/// A recording in memory, with what is known to be missing.
#[derive(Clone, Debug)]
pub struct Recording<T> {
    /// What the file says of itself.
    pub header: StreamHeader,
    /// The records, in the order in which they were stored.
    pub records: Vec<T>,
    /// Whether the end mark is missing: the writer was cut off.
    pub cut: bool,
    /// Chunks whose checksum failed; at least 1 if the records are not as many as the end mark says.
    pub damaged_chunks: u64,
    /// How many records stand before each place where some are missing.
    pub gaps: Vec<usize>,
    /// SHA-256 of the whole source, in hex.
    pub sha256: String,
}

impl<T: FromBytes + Immutable> Recording<T> {
    /// Reads a recording file.
    ///
    /// # Errors
    /// When the file cannot be read, is no recording, has another schema version, or holds other records. A cut or
    /// damaged recording is no error: see [`Recording::cut`] and [`Recording::damaged_chunks`].
    pub fn open(path: &Path, kind: StreamKind) -> anyhow::Result<Self> {
        let file = File::open(path).with_context(|| format!("open the recording {}", path.display()))?;
        Self::read(BufReader::with_capacity(CHUNK_BYTES, file), kind)
            .with_context(|| format!("read the recording {}", path.display()))
    }

    /// Reads a recording from any source. Memory is bounded by the source's length times LZ4's largest ratio, and each
    /// chunk by a constant.
    ///
    /// # Errors
    /// As [`Recording::open`].
    pub fn read(mut source: impl Read, kind: StreamKind) -> anyhow::Result<Self> {
        let mut source = Hashing {
            source: &mut source,
            digest: Sha256::new(),
        };
        let header = read_header(&mut source)?;
        ensure!(
            header.kind == kind && header.record_bytes as usize == size_of::<T>(),
            "it holds {:?} records of {} bytes where {kind:?} records of {} bytes are expected",
            header.kind,
            header.record_bytes,
            size_of::<T>()
        );
        let mut recording = Self {
            header,
            records: Vec::new(),
            cut: true,
            damaged_chunks: 0,
            gaps: Vec::new(),
            sha256: String::new(),
        };
        while let Some(block) = read_block(&mut source)? {
            match block {
                Block::End(stored) => {
                    recording.cut = false;
                    // A chunk that is missing whole, or there twice, has no checksum that could fail.
                    let miscounted = stored != recording.records.len() as u64;
                    recording.damaged_chunks = recording.damaged_chunks.max(u64::from(miscounted));
                    break;
                }
                Block::Damaged => {
                    recording.damaged_chunks += 1;
                    recording.gaps.push(recording.records.len());
                }
                Block::Records(bytes) => {
                    let whole = bytes.len() - bytes.len() % size_of::<T>();
                    let records = bytes[..whole].chunks_exact(size_of::<T>());
                    recording
                        .records
                        .extend(records.map(|each| T::read_from_bytes(each).expect("sized")));
                    recording.damaged_chunks += u64::from(whole != bytes.len());
                }
            }
        }
        if recording.cut {
            recording.gaps.push(recording.records.len());
        }
        // What follows the end mark belongs to the file's checksum all the same.
        io::copy(&mut source, &mut io::sink())?;
        recording.sha256 = source.digest.hex();
        Ok(recording)
    }
}

/// Hashes what is read through it.
struct Hashing<'a, R> {
    source: &'a mut R,
    digest: Sha256,
}

impl<R: Read> Read for Hashing<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.digest.0.update(&buffer[..read]);
        Ok(read)
    }
}

/// SHA-256 of a file, in hex, as [`Written`] has it.
///
/// # Errors
/// When it cannot be read.
pub fn file_sha256(path: &Path) -> anyhow::Result<String> {
    let sum = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let mut source = Hashing {
            source: &mut file,
            digest: Sha256::new(),
        };
        io::copy(&mut source, &mut io::sink())?;
        Ok(source.digest.hex())
    };
    sum().with_context(|| format!("read {}", path.display()))
}

/// A checksum under way.
struct Sha256(digest::Context);

impl Sha256 {
    fn new() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }

    fn hex(self) -> String {
        use std::fmt::Write as _;
        let digest = self.0.finish();
        digest.as_ref().iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Sha256")
    }
}

enum Block {
    Records(Vec<u8>),
    Damaged,
    /// How many records were stored.
    End(u64),
}

fn read_header(source: &mut impl Read) -> anyhow::Result<StreamHeader> {
    let mut fixed = [0; 16];
    if !fill(source, &mut fixed)? || &fixed[..8] != MAGIC {
        bail!("it is not a recording of this program: it does not begin with its mark");
    }
    let length = u32_at(&fixed, 8) as usize;
    ensure!(
        length <= HEADER_BYTES_MAX,
        "its header claims {length} bytes: the file is damaged"
    );
    let mut json = vec![0; length];
    ensure!(
        fill(source, &mut json)?,
        "it ends inside its header: nothing was recorded"
    );
    ensure!(
        crc32fast::hash(&json) == u32_at(&fixed, 12),
        "its header's checksum fails: the file is damaged"
    );
    // The version is read alone first: the rest of a foreign header may have any shape.
    #[derive(Deserialize)]
    struct Version {
        schema: u32,
    }
    let version: Version = serde_json::from_slice(&json).context("its header has no schema version")?;
    ensure!(
        version.schema == SCHEMA,
        "it has schema version {}, this pqtail reads version {SCHEMA}: analyse it with the pqtail that recorded it \
         (manifest.json names its version)",
        version.schema
    );
    serde_json::from_slice(&json).context("its header is not understood")
}

/// The next block; `None` where the recording was cut.
fn read_block(source: &mut impl Read) -> anyhow::Result<Option<Block>> {
    let mut fixed = [0; 16];
    if !fill(source, &mut fixed)? {
        return Ok(None);
    }
    if &fixed[..4] == END {
        let whole = crc32fast::hash(&fixed[4..12]) == u32_at(&fixed, 12);
        let stored = u64::from(u32_at(&fixed, 4)) | u64::from(u32_at(&fixed, 8)) << 32;
        return Ok(whole.then_some(Block::End(stored)));
    }
    let (raw, stored) = (u32_at(&fixed, 4) as usize, u32_at(&fixed, 8) as usize);
    // Without a believable mark and length the next chunk cannot be found: the rest is lost, and reads as cut.
    if &fixed[..4] != CHUNK || raw > CHUNK_BYTES_MAX || stored > CHUNK_BYTES_MAX {
        return Ok(None);
    }
    let mut compressed = vec![0; stored];
    if !fill(source, &mut compressed)? {
        return Ok(None);
    }
    if crc32fast::hash(&compressed) != u32_at(&fixed, 12) {
        return Ok(Some(Block::Damaged));
    }
    Ok(Some(match lz4_flex::block::decompress(&compressed, raw) {
        Ok(bytes) if bytes.len() == raw => Block::Records(bytes),
        _ => Block::Damaged,
    }))
}

/// Fills the buffer; `false` if the source ends first.
fn fill(source: &mut impl Read, buffer: &mut [u8]) -> anyhow::Result<bool> {
    match source.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(anyhow!(error)),
    }
}

/// Sets right every checksum that is where its block's lengths say, as far as they make sense: a changed file is then read, not
/// refused. For tests of the reader.
pub(crate) fn set_checksums(bytes: &mut [u8]) {
    if bytes.len() < 16 {
        return;
    }
    let set = |bytes: &mut [u8], at: usize, content: std::ops::Range<usize>| {
        if let Some(content) = bytes.get(content) {
            let checksum = crc32fast::hash(content).to_le_bytes();
            bytes[at..at + 4].copy_from_slice(&checksum);
        }
    };
    let mut at = 16 + u32_at(bytes, 8) as usize;
    set(bytes, 12, 16..at);
    while at + 16 <= bytes.len() {
        let block = at + 16;
        if &bytes[at..at + 4] == END {
            set(bytes, at + 12, at + 4..at + 12);
            return;
        }
        let end = block + u32_at(bytes, at + 8) as usize;
        set(bytes, at + 12, block..end);
        at = end;
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Raw = [u8; 64];

    /// A finished recording of so many records in several chunks, as bytes.
    fn recorded(records: u32, flush_every: u32) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel-000.pqr");
        let mut writer = Writer::<Raw>::create(&path, StreamKind::Kernel, 0).unwrap();
        for number in 0..records {
            writer.push(&[number as u8; 64]).unwrap();
            if number % flush_every == 0 {
                writer.flush().unwrap();
            }
        }
        let written = writer.finish().unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(written.records, u64::from(records));
        assert_eq!(written.bytes, bytes.len() as u64);
        assert_eq!(written.sha256, read(&bytes).unwrap().sha256);
        bytes
    }

    fn read(bytes: &[u8]) -> anyhow::Result<Recording<Raw>> {
        Recording::read(bytes, StreamKind::Kernel)
    }

    #[test]
    fn what_was_stored_is_read() {
        let recording = read(&recorded(1000, 300)).unwrap();
        assert_eq!(recording.records.len(), 1000);
        assert_eq!(recording.records[999], [999u32 as u8; 64]);
        assert!(!recording.cut);
        assert_eq!(recording.damaged_chunks, 0);
    }

    #[test]
    fn cut_anywhere_it_reads_up_to_the_last_whole_chunk_and_says_so() {
        let whole = recorded(40, 10);
        let header = whole.windows(4).position(|four| four == CHUNK).unwrap();
        for length in header..whole.len() {
            let recording = read(&whole[..length]).unwrap();
            assert!(recording.cut, "at {length} of {}", whole.len());
            assert!(recording.records.len() <= 40);
        }
        assert_eq!(read(&whole[..whole.len() - 1]).unwrap().records.len(), 40);
    }

    #[test]
    fn what_follows_the_end_mark_changes_the_checksum() {
        let whole = recorded(40, 10);
        let longer = [&whole[..], b"more"].concat();
        let (one, other) = (read(&whole).unwrap(), read(&longer).unwrap());
        assert_eq!(one.records, other.records);
        assert_ne!(one.sha256, other.sha256);
    }

    #[test]
    fn a_damaged_chunk_is_skipped_and_counted() {
        let mut bytes = recorded(40, 10);
        let chunk = bytes.windows(4).position(|four| four == CHUNK).unwrap();
        bytes[chunk + 16] ^= 0x40;
        let recording = read(&bytes).unwrap();
        assert_eq!(
            (recording.records.len(), recording.damaged_chunks, recording.cut),
            (39, 1, false)
        );
    }

    #[test]
    fn a_chunk_that_is_gone_or_there_twice_is_counted() {
        let bytes = recorded(40, 10);
        let chunks: Vec<usize> = (0..bytes.len())
            .filter(|&at| bytes[at..].starts_with(CHUNK))
            .collect();
        let second = &bytes[chunks[1]..chunks[2]];
        let gone = [&bytes[..chunks[1]], &bytes[chunks[2]..]].concat();
        let twice = [&bytes[..chunks[2]], second, &bytes[chunks[2]..]].concat();
        for (bytes, records) in [(gone, 30), (twice, 50)] {
            let recording = read(&bytes).unwrap();
            assert_eq!(
                (recording.records.len(), recording.damaged_chunks, recording.cut),
                (records, 1, false)
            );
        }
    }

    #[test]
    fn a_foreign_file_and_another_version_are_named() {
        let error = |bytes: &[u8]| format!("{:#}", read(bytes).unwrap_err());
        assert!(error(b"\x7fELF and so on, long enough").contains("not a recording of this program"));
        assert!(error(b"").contains("not a recording of this program"));
        let json = br#"{"schema":999,"shape":"unknown"}"#;
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&crc32fast::hash(json).to_le_bytes());
        bytes.extend_from_slice(json);
        assert!(error(&bytes).contains("schema version 999, this pqtail reads version"));
        let other = Recording::<Raw>::read(&recorded(1, 1)[..], StreamKind::Requests).unwrap_err();
        assert!(format!("{other:#}").contains("Kernel records"), "{other:#}");
    }

    #[test]
    fn a_full_disk_is_an_error_that_says_what_is_safe() {
        if !Path::new("/dev/full").exists() {
            println!("skipped: needs /dev/full");
            return;
        }
        let error = Writer::<Raw>::create(Path::new("/dev/full"), StreamKind::Kernel, 0).unwrap_err();
        assert!(format!("{error:#}").contains("No space left"), "{error:#}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2000), after_mark in any::<bool>()) {
            let mut input = if after_mark { recorded(3, 2) } else { Vec::new() };
            let keep = input.len().saturating_sub(usize::from(bytes.first().copied().unwrap_or(0)));
            input.truncate(keep);
            input.extend(bytes);
            // Neither may panic, whatever it says.
            let _ = read(&input);
        }
    }
}
