//! Files for other tools: Parquet, HdrHistogram logs, JSON. The only part of the report that touches the disk.
//!
//! Every file is a function of its input alone: no wall clock, no host name, no hash order.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use hdrhistogram::{
    Histogram,
    serialization::{
        V2DeflateSerializer,
        interval_log::{IntervalLogWriterBuilder, Tag},
    },
};
use parquet::{
    basic::{Compression, ConvertedType, Repetition, Type as Physical, ZstdLevel},
    data_type::{BoolType, ByteArray, ByteArrayType, Int32Type, Int64Type},
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::types::{Type, TypePtr},
};
use serde::Serialize;

use super::summary::{Outlier, Summary};
use crate::{
    attribute::ledger::{Ledger, Line},
    record::stamps::{Outcome, RequestStamps},
};

/// Rows in one Parquet row group: bounds the memory that the columns need.
const ROW_GROUP_ROWS: usize = 1 << 18;

/// Significant digits of an exported histogram: a bucket is at most 0.1 % wide.
const HISTOGRAM_DIGITS: u8 = 3;

/// The column of maxima in an interval log is in this many ns, as `HistogramLogProcessor` expects (ms).
const HISTOGRAM_MAX_DIVISOR: f64 = 1e6;

/// One request as a row of Parquet.
#[derive(Clone, Copy, Debug)]
pub struct RequestRow {
    /// What the load generator stamped.
    pub stamps: RequestStamps,
    /// Where its latency went; `None` for a request that did not end well or a run without probes.
    pub ledger: Option<Ledger>,
    /// Whether kernel records were lost in an interval of it.
    pub incomplete: bool,
}

/// The latencies of one stretch of time, for [`histogram_log`].
#[derive(Clone, Copy, Debug)]
pub struct HistogramInterval<'a> {
    /// Arm name; characters the format forbids become `_`.
    pub tag: &'a str,
    /// Begin, ns after the begin of the run.
    pub begin_offset_ns: u64,
    /// Length, ns.
    pub duration_ns: u64,
    /// One value per request that ended well, ns, in any order.
    pub latencies_ns: &'a [u64],
}

/// Writes one row per request: every stamp by its field name, `latency_ns` and `service_ns` (null unless the request
/// ended well), `outcome` as a string, one column of ns per ledger line (null without a ledger), and `complete`
/// (there is a ledger, and no record was lost in it).
///
/// # Errors
/// When the file cannot be written.
pub fn requests_parquet(path: &Path, rows: &[RequestRow]) -> anyhow::Result<()> {
    write_file(path, |file| {
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by(format!("pqtail {}", crate::VERSION))
            .build();
        let mut writer = SerializedFileWriter::new(file, schema(&columns(&[]))?, Arc::new(properties))?;
        for rows in rows.chunks(ROW_GROUP_ROWS) {
            let mut group = writer.next_row_group()?;
            for column in columns(rows) {
                let mut out = group.next_column()?.expect("a writer per column of the schema");
                match &column.values {
                    Values::I64(values) => out.typed::<Int64Type>().write_batch(values, None, None)?,
                    Values::I32(values) => out.typed::<Int32Type>().write_batch(values, None, None)?,
                    Values::Bool(values) => out.typed::<BoolType>().write_batch(values, None, None)?,
                    Values::Text(values) => out.typed::<ByteArrayType>().write_batch(values, None, None)?,
                    Values::Nullable(values) => {
                        let present: Vec<i64> = values.iter().flatten().copied().collect();
                        let levels: Vec<i16> = values.iter().map(|each| i16::from(each.is_some())).collect();
                        out.typed::<Int64Type>()
                            .write_batch(&present, Some(&levels), None)?
                    }
                };
                out.close()?;
            }
            group.close()?;
        }
        writer.close()?;
        Ok(())
    })
}

/// Writes an HdrHistogram interval log (V2, compressed), one interval per trial; times count from the run's begin.
///
/// # Errors
/// When the file cannot be written.
pub fn histogram_log(path: &Path, intervals: &[HistogramInterval<'_>]) -> anyhow::Result<()> {
    write_file(path, |file| {
        let mut serializer = V2DeflateSerializer::new();
        let mut log = IntervalLogWriterBuilder::new()
            .add_comment("Latency from the intended start, ns; times in s after the begin of the run")
            .with_max_value_divisor(HISTOGRAM_MAX_DIVISOR)
            .begin_log_with(file, &mut serializer)?;
        for interval in intervals {
            let mut histogram = Histogram::<u64>::new(HISTOGRAM_DIGITS)?;
            for &ns in interval.latencies_ns {
                histogram.record(ns)?;
            }
            let tag = interval.tag.replace([',', ' ', '\r', '\n'], "_");
            log.write_histogram(
                &histogram,
                Duration::from_nanos(interval.begin_offset_ns),
                Duration::from_nanos(interval.duration_ns),
                Tag::new(&tag),
            )
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        }
        Ok(())
    })
}

/// Writes one line of JSON per outlier.
///
/// # Errors
/// When the file cannot be written.
pub fn outliers_jsonl(path: &Path, outliers: &[Outlier]) -> anyhow::Result<()> {
    write_file(path, |file| {
        for outlier in outliers {
            json_line(file, outlier)?;
        }
        Ok(())
    })
}

/// Writes the summary as indented JSON.
///
/// # Errors
/// When the file cannot be written.
pub fn summary_json(path: &Path, summary: &Summary) -> anyhow::Result<()> {
    write_file(path, |file| {
        serde_json::to_writer_pretty(&mut *file, summary)?;
        file.write_all(b"\n")?;
        Ok(())
    })
}

/// Writes the report's page, whole or not at all.
///
/// # Errors
/// When the disk takes no more.
pub fn page(path: &Path, html: &str) -> anyhow::Result<()> {
    write_file(path, |file| Ok(file.write_all(html.as_bytes())?))
}

fn json_line(file: &mut impl Write, value: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *file, value)?;
    file.write_all(b"\n")?;
    Ok(())
}

fn write_file(
    path: &Path,
    body: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // Beside it first: a full disk then leaves the earlier file whole.
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = Path::new(&part);
    let write = || -> anyhow::Result<()> {
        let mut file = BufWriter::new(File::create(part)?);
        body(&mut file)?;
        file.flush()?;
        Ok(fs::rename(part, path)?)
    };
    write()
        .inspect_err(|_| drop(fs::remove_file(part)))
        .with_context(|| {
            format!(
                "write {}: the folder must exist and be writable, and the disk must have room",
                path.display()
            )
        })
}

struct Column {
    name: &'static str,
    kind: ConvertedType,
    values: Values,
}

enum Values {
    I64(Vec<i64>),
    I32(Vec<i32>),
    Nullable(Vec<Option<i64>>),
    Bool(Vec<bool>),
    Text(Vec<ByteArray>),
}

fn columns(rows: &[RequestRow]) -> Vec<Column> {
    // Monotonic ns and ledger lines stay far below 2^63.
    let long = |name, get: fn(&RequestStamps) -> u64| Column {
        name,
        kind: ConvertedType::NONE,
        values: Values::I64(rows.iter().map(|row| get(&row.stamps) as i64).collect()),
    };
    // Parquet keeps unsigned 32-bit values as the same bits with a note.
    let short = |name, kind, get: fn(&RequestStamps) -> u32| Column {
        name,
        kind,
        values: Values::I32(rows.iter().map(|row| get(&row.stamps) as i32).collect()),
    };
    let nullable = |name, get: &dyn Fn(&RequestRow) -> Option<u64>| Column {
        name,
        kind: ConvertedType::NONE,
        values: Values::Nullable(rows.iter().map(|row| get(row).map(|ns| ns as i64)).collect()),
    };
    let (u8s, u16s, u32s) = (
        ConvertedType::UINT_8,
        ConvertedType::UINT_16,
        ConvertedType::UINT_32,
    );
    let outcome = |stamps: &RequestStamps| outcome_name(stamps.outcome());
    let mut columns = vec![
        short("request", u32s, |stamps| stamps.request),
        long("intended_ns", |stamps| stamps.intended_ns),
        long("start_ns", |stamps| stamps.start_ns),
        long("connected_ns", |stamps| stamps.connected_ns),
        long("client_hello_written_ns", |stamps| stamps.client_hello_written_ns),
        long("first_server_byte_ns", |stamps| stamps.first_server_byte_ns),
        long("handshake_done_ns", |stamps| stamps.handshake_done_ns),
        long("request_written_ns", |stamps| stamps.request_written_ns),
        long("first_response_byte_ns", |stamps| stamps.first_response_byte_ns),
        long("done_ns", |stamps| stamps.done_ns),
        long("closed_ns", |stamps| stamps.closed_ns),
        nullable("latency_ns", &|row| row.stamps.latency_ns()),
        nullable("service_ns", &|row| row.stamps.service_ns()),
        Column {
            name: "outcome",
            kind: ConvertedType::UTF8,
            values: Values::Text(rows.iter().map(|row| outcome(&row.stamps).into()).collect()),
        },
        short("errno", u16s, |stamps| stamps.errno.into()),
        short("worker_tid", u32s, |stamps| stamps.worker_tid),
        short("bytes_out", u32s, |stamps| stamps.bytes_out),
        short("bytes_in", u32s, |stamps| stamps.bytes_in),
        short("local", u32s, |stamps| stamps.local),
        short("remote", u32s, |stamps| stamps.remote),
        short("local_port", u16s, |stamps| stamps.local_port.into()),
        short("remote_port", u16s, |stamps| stamps.remote_port.into()),
        short("group", u16s, |stamps| stamps.group.into()),
        short("offered_share_0", u16s, |stamps| stamps.offered_shares[0].into()),
        short("offered_share_1", u16s, |stamps| stamps.offered_shares[1].into()),
        short("cipher_suite", u16s, |stamps| stamps.cipher_suite.into()),
        short("flags", u8s, |stamps| stamps.flags.into()),
    ];
    columns.extend(
        Line::all()
            .into_iter()
            .map(|line| nullable(line.name(), &|row| row.ledger.map(|ledger| ledger.ns(line)))),
    );
    columns.push(Column {
        name: "complete",
        kind: ConvertedType::NONE,
        values: Values::Bool(
            rows.iter()
                .map(|row| row.ledger.is_some() && !row.incomplete)
                .collect(),
        ),
    });
    columns
}

fn schema(columns: &[Column]) -> anyhow::Result<TypePtr> {
    let fields = columns
        .iter()
        .map(|column| {
            let (physical, repetition) = match column.values {
                Values::I64(_) => (Physical::INT64, Repetition::REQUIRED),
                Values::I32(_) => (Physical::INT32, Repetition::REQUIRED),
                Values::Nullable(_) => (Physical::INT64, Repetition::OPTIONAL),
                Values::Bool(_) => (Physical::BOOLEAN, Repetition::REQUIRED),
                Values::Text(_) => (Physical::BYTE_ARRAY, Repetition::REQUIRED),
            };
            let field = Type::primitive_type_builder(column.name, physical)
                .with_repetition(repetition)
                .with_converted_type(column.kind)
                .build()?;
            Ok(Arc::new(field))
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(Arc::new(
        Type::group_type_builder("request").with_fields(fields).build()?,
    ))
}

/// The name that serde gives the outcome, so that Parquet and JSON agree.
fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Unfinished => "unfinished",
        Outcome::Ok => "ok",
        Outcome::Timeout => "timeout",
        Outcome::Reset => "reset",
        Outcome::Refused => "refused",
        Outcome::NoPort => "no-port",
        Outcome::Closed => "closed",
        Outcome::Tls => "tls",
        Outcome::WrongGroup => "wrong-group",
        Outcome::WrongResponse => "wrong-response",
        Outcome::Os => "os",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hdrhistogram::serialization::{
        Deserializer,
        interval_log::{IntervalLogIterator, LogEntry},
    };
    use parquet::{
        file::reader::{FileReader as _, SerializedFileReader},
        record::Field,
    };

    use super::*;
    use crate::{
        attribute::ledger::{Side, ThreadLine},
        report::fixtures,
    };

    fn row(request: u32, outcome: Outcome) -> RequestRow {
        let mut ledger = Ledger::default();
        ledger.charge(Line::Network, 400);
        ledger.charge(Line::Thread(Side::Server, ThreadLine::RunQueue), 600);
        RequestRow {
            stamps: RequestStamps {
                request,
                intended_ns: 1_000,
                start_ns: 1_100,
                done_ns: 2_000,
                outcome: outcome as u8,
                local: u32::MAX,
                ..RequestStamps::default()
            },
            ledger: (outcome == Outcome::Ok).then_some(ledger),
            incomplete: false,
        }
    }

    #[test]
    fn parquet_reads_back_row_by_row() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("requests.parquet");
        requests_parquet(&path, &[row(0, Outcome::Ok), row(1, Outcome::Timeout)]).expect("written");

        let reader = SerializedFileReader::new(File::open(&path).expect("open")).expect("parquet");
        let rows: Vec<Vec<(String, Field)>> = reader
            .get_row_iter(None)
            .expect("rows")
            .map(|row| {
                row.expect("row")
                    .get_column_iter()
                    .map(|(name, field)| (name.clone(), field.clone()))
                    .collect()
            })
            .collect();
        let field = |row: usize, name: &str| {
            let (_, field) = rows[row].iter().find(|(each, _)| each == name).expect(name);
            field.clone()
        };
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].len(), 27 + Line::COUNT + 1);
        assert_eq!(field(0, "latency_ns"), Field::Long(1_000));
        assert_eq!(field(0, "service_ns"), Field::Long(900));
        assert_eq!(field(0, "local"), Field::UInt(u32::MAX));
        assert_eq!(field(0, "server.run_queue"), Field::Long(600));
        assert_eq!(field(0, "client.run_queue"), Field::Long(0));
        assert_eq!(field(0, "complete"), Field::Bool(true));
        assert_eq!(field(1, "latency_ns"), Field::Null);
        assert_eq!(field(1, "network"), Field::Null);
        assert_eq!(field(1, "outcome"), Field::Str("timeout".to_owned()));
        assert_eq!(field(1, "complete"), Field::Bool(false));
    }

    #[test]
    fn parquet_of_no_requests_is_a_valid_file() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("empty.parquet");
        requests_parquet(&path, &[]).expect("written");
        let reader = SerializedFileReader::new(File::open(&path).expect("open")).expect("parquet");
        assert_eq!(reader.metadata().file_metadata().num_rows(), 0);
    }

    #[test]
    fn outcome_names_are_those_of_json() {
        for outcome in Outcome::ALL {
            let json = serde_json::to_string(&outcome).expect("json");
            assert_eq!(json.trim_matches('"'), outcome_name(outcome));
        }
    }

    #[test]
    fn histogram_log_reads_back() {
        let folder = tempfile::tempdir().expect("temp folder");
        let (one, two) = (folder.path().join("one.hlog"), folder.path().join("two.hlog"));
        let intervals = [
            HistogramInterval {
                tag: "x25519",
                begin_offset_ns: 2_000_000_000,
                duration_ns: 30_000_000_000,
                latencies_ns: &[900_000, 1_000_000, 1_000_000, 39_000_000],
            },
            HistogramInterval {
                tag: "an arm, odd",
                begin_offset_ns: 40_000_000_000,
                duration_ns: 30_000_000_000,
                latencies_ns: &[],
            },
        ];
        histogram_log(&one, &intervals).expect("written");
        histogram_log(&two, &intervals).expect("written");
        let log = fs::read(&one).expect("read");
        assert_eq!(log, fs::read(&two).expect("read"));

        let entries: Vec<_> = IntervalLogIterator::new(&log)
            .map(|entry| entry.expect("an entry"))
            .filter_map(|entry| match entry {
                LogEntry::Interval(interval) => Some(interval),
                _ => None,
            })
            .collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].tag().expect("tag").as_str(), "x25519");
        assert_eq!(entries[1].tag().expect("tag").as_str(), "an_arm__odd");
        assert_eq!(entries[0].start_timestamp(), Duration::from_secs(2));
        let bytes = base64(entries[0].encoded_histogram());
        let histogram: Histogram<u64> = Deserializer::new()
            .deserialize(&mut bytes.as_slice())
            .expect("a histogram");
        assert_eq!(histogram.len(), 4);
        assert!(histogram.equivalent(histogram.max(), 39_000_000));
        assert!(histogram.equivalent(histogram.value_at_quantile(0.5), 1_000_000));
    }

    /// Standard alphabet, padding ignored.
    fn base64(text: &str) -> Vec<u8> {
        let (mut bytes, mut bits, mut held) = (Vec::new(), 0u32, 0);
        for each in text.bytes().filter(|&each| each != b'=') {
            let six = match each {
                b'A'..=b'Z' => each - b'A',
                b'a'..=b'z' => each - b'a' + 26,
                b'0'..=b'9' => each - b'0' + 52,
                b'+' => 62,
                _ => 63,
            };
            bits = bits << 6 | u32::from(six);
            held += 6;
            if held >= 8 {
                held -= 8;
                bytes.push((bits >> held) as u8);
            }
        }
        bytes
    }

    #[test]
    fn json_files_hold_the_promised_names() {
        let folder = tempfile::tempdir().expect("temp folder");
        let sample = fixtures::two_arms();
        let (lines, whole) = (
            folder.path().join("outliers.jsonl"),
            folder.path().join("summary.json"),
        );
        outliers_jsonl(&lines, &sample.outliers).expect("written");
        summary_json(&whole, &sample.summary).expect("written");
        let text = fs::read_to_string(&lines).expect("read");
        assert_eq!(text.lines().count(), sample.outliers.len());
        for line in text.lines() {
            let outlier: serde_json::Value = serde_json::from_str(line).expect("json");
            let ledger = outlier["ledger"].as_object().expect("ledger");
            let sum: u64 = ledger.values().filter_map(serde_json::Value::as_u64).sum();
            assert_eq!(Some(sum), outlier["latency_ns"].as_u64());
        }
        let summary: serde_json::Value =
            serde_json::from_slice(&fs::read(&whole).expect("read")).expect("json");
        for name in [
            "schema",
            "verdicts",
            "arms",
            "differences",
            "losses",
            "probes",
            "clock",
        ] {
            assert!(!summary[name].is_null(), "{name}");
        }
    }

    #[test]
    fn an_error_names_the_path_and_the_remedy() {
        let error = outliers_jsonl(Path::new("/no-such-folder/outliers.jsonl"), &[]).expect_err("no folder");
        let text = format!("{error:#}");
        assert!(
            text.contains("/no-such-folder/outliers.jsonl") && text.contains("must exist"),
            "{text}"
        );
    }
}
