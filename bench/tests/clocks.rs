//! Recorded runs of one machine, told again as if the server had a kernel and a clock of its own: the analysis must find the offset
//! and the drift that it was given, and say of every request what it said before, but for what the clocks' error bound allows.

use std::{fs, path::Path};

use pqtail::{
    analyze::{Analysis, analyze},
    attribute::ledger::Line,
    record::{
        manifest::{Manifest, recording},
        stamps::ConnectionStamps,
        stream::{Recording, StreamKind, Writer, Written},
    },
};
use pqtail_common::{RECORD_BYTES, kind};

type Raw = [u8; RECORD_BYTES];

/// The server's clock: ahead by so much when the run began, and faster.
#[derive(Clone, Copy, Debug)]
struct Clock {
    begin_ns: u64,
    offset_ns: i64,
    drift_ppm: f64,
}

impl Clock {
    fn ahead_ns(self, at_ns: u64) -> i64 {
        let elapsed_ns = at_ns.wrapping_sub(self.begin_ns).cast_signed();
        self.offset_ns + (self.drift_ppm * 1e-6 * elapsed_ns as f64).round() as i64
    }

    /// What it shows at a time of the client's clock. 0 means no time, and stays.
    fn shows(self, at_ns: u64) -> u64 {
        if at_ns == 0 {
            return 0;
        }
        at_ns.wrapping_add_signed(self.ahead_ns(at_ns))
    }

    fn tell(self, raw: &Raw) -> Raw {
        let mut told = *raw;
        let mut shift = |at: usize| {
            let bytes: [u8; 8] = told[at..at + 8].try_into().expect("eight bytes");
            let shown = self.shows(u64::from_le_bytes(bytes));
            told[at..at + 8].copy_from_slice(&shown.to_le_bytes());
        };
        shift(0);
        // Where spans and losses keep the times beside that of their head.
        match raw[8] {
            kind::IRQ | kind::VECTOR | kind::RECLAIM => shift(24),
            kind::SOFTIRQ => [24, 32].into_iter().for_each(shift),
            kind::LOSS => shift(16),
            _ => {}
        }
        told
    }
}

/// Tells a recorded run again with two kernels, the server's after this clock.
fn two_kernels(recorded: &Path, clock: Clock, told: &Path) {
    let mut manifest = Manifest::read(recorded).expect("a recorded run");
    let one = manifest.client.kernel.clone().expect("a recorded kernel");
    let (client, server) = (Path::new("raw/client-kernel"), Path::new("raw/server-kernel"));
    let stamps = [&manifest.client.stamps, &manifest.server.stamps].map(|folder| told.join(folder));
    for folder in stamps.iter().chain(&[told.join(client), told.join(server)]) {
        fs::create_dir_all(folder).expect("a scratch folder");
    }
    for record in &mut manifest.trials {
        let trial = record.trial.index;
        let requests = |folder: &Path| recording(&folder.join(&manifest.client.stamps), "requests", trial);
        fs::copy(requests(recorded), requests(told)).expect("copy requests");
        let kernel = recording(&recorded.join(&one), "kernel", trial);
        let kernel = Recording::<Raw>::open(&kernel, StreamKind::Kernel).expect("a recording");
        let write = |folder: &Path, change: &dyn Fn(&Raw) -> Raw| -> Written {
            let path = recording(&told.join(folder), "kernel", trial);
            let mut writer = Writer::create(&path, StreamKind::Kernel, trial).expect("a recording");
            for raw in &kernel.records {
                writer.push(&change(raw)).expect("room on the disk");
            }
            writer.finish().expect("room on the disk")
        };
        let here = write(client, &|raw| *raw);
        let there = write(server, &|raw| clock.tell(raw));
        let both = record
            .kernel
            .remove(&one.display().to_string())
            .expect("its record");
        for (folder, written) in [(client, here), (server, there)] {
            let mut its = both.clone();
            its.written = written;
            record.kernel.insert(folder.display().to_string(), its);
        }
        let stamps = |folder: &Path| recording(&folder.join(&manifest.server.stamps), "connections", trial);
        let was = Recording::<ConnectionStamps>::open(&stamps(recorded), StreamKind::Connections)
            .expect("a recording");
        let mut writer = Writer::create(&stamps(told), StreamKind::Connections, trial).expect("a recording");
        for each in &was.records {
            let mut each = *each;
            for at in [
                &mut each.accepted_ns,
                &mut each.first_byte_ns,
                &mut each.flight_written_ns,
                &mut each.handshake_done_ns,
                &mut each.request_read_ns,
                &mut each.response_written_ns,
                &mut each.closed_ns,
                &mut each.finished_read_ns,
            ] {
                *at = clock.shows(*at);
            }
            writer.push(&each).expect("room on the disk");
        }
        record.connections = writer.finish().expect("room on the disk");
    }
    manifest.client.kernel = Some(client.to_owned());
    manifest.server.kernel = Some(server.to_owned());
    manifest.write(told).expect("room on the disk");
}

/// Borders between the hosts that one request crosses: SYN, SYN-ACK, three flights each way at most.
const CROSSINGS: u64 = 8;

fn agrees(name: &str, offset_ns: i64, drift_ppm: f64) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/recorded")
        .join(name);
    let one: Analysis = analyze(&recorded).expect("a recorded run");
    let begins = one.trials.iter().filter_map(|trial| trial.begin_ns);
    let clock = Clock {
        begin_ns: begins.min().expect("a trial"),
        offset_ns,
        drift_ppm,
    };
    let scratch = tempfile::tempdir().expect("a scratch folder");
    two_kernels(&recorded, clock, scratch.path());
    let two = analyze(scratch.path()).expect("the run told again");

    let found = &two.summary.clock;
    assert!(!found.shared_kernel);
    let bound_ns = found.error_ns_max.expect("an alignment");
    // The middle of the run is what the offset is given for; the drift moves it by less than that over half of the run.
    let end = one
        .trials
        .iter()
        .flat_map(|trial| &trial.rows)
        .map(|row| row.stamps.done_ns);
    let half_ns = (end.max().expect("a request") - clock.begin_ns) / 2;
    let middle_ns = clock.ahead_ns(clock.begin_ns + half_ns);
    let slack_ns = bound_ns + (drift_ppm.abs() * 1e-6 * half_ns as f64) as u64 + 1;
    let off_ns = (found.offset_ns.expect("an alignment") - middle_ns).unsigned_abs();
    assert!(
        off_ns <= slack_ns,
        "{name}: off by {off_ns} ns, bound {slack_ns} ns"
    );

    let (mut compared, mut alike) = (0, 0);
    for (before, after) in one.trials.iter().zip(&two.trials) {
        for (before, after) in before.rows.iter().zip(&after.rows) {
            assert_eq!(before.stamps, after.stamps);
            let (Some(was), Some(is)) = (before.ledger, after.ledger) else {
                assert_eq!(before.ledger.is_some(), after.ledger.is_some());
                continue;
            };
            assert_eq!(was.total_ns(), is.total_ns());
            let moved_ns = Line::all()
                .into_iter()
                .map(|line| was.ns(line).abs_diff(is.ns(line)))
                .max()
                .unwrap_or(0);
            compared += 1;
            if moved_ns <= CROSSINGS * 2 * bound_ns {
                alike += 1;
            }
        }
    }
    assert!(compared > 50, "{name}: {compared} requests");
    assert_eq!(alike, compared, "{name}: bound {bound_ns} ns");
    for (before, after) in one.outliers.iter().zip(&two.outliers).take(3) {
        assert_eq!((before.trial, before.request), (after.trial, after.request));
        assert_eq!(
            (before.cause, &before.culprit),
            (after.cause, &after.culprit),
            "{name}"
        );
    }
}

#[test]
fn a_server_that_booted_an_hour_earlier() {
    agrees("fifo-hog.server", 3_600_000_000_000, 0.0);
}

#[test]
fn a_server_that_booted_later_with_a_fast_clock() {
    agrees("loss.server-flight", -7_000_000_000, 40.0);
}

#[test]
fn a_server_with_a_slow_clock() {
    agrees("lock.server", 123_456_789, -60.0);
}
