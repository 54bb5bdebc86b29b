//! The laws of the attribution, over trials that are told event by event: what happened is known, so what must be found is too.

use pqtail_common::{Head, Loss, kind};
use proptest::prelude::*;

use super::{
    told::{Fault, HOG, Story, TRIAL, manifest, raw},
    trial,
};
use crate::{
    attribute::ledger::{Ledger, Line, Segment, Side, ThreadLine},
    timeline::cpu::Raw,
};

fn ledgers(story: &Story) -> Vec<Ledger> {
    let manifest = manifest();
    let analysis = trial::analyze(&manifest, story.recorded(&manifest, TRIAL));
    analysis
        .rows
        .iter()
        .map(|row| {
            let ledger = row.ledger.expect("every request of the story ends well");
            assert_eq!(
                Some(ledger.total_ns()),
                row.stamps.latency_ns(),
                "the ledger sums to the latency"
            );
            ledger
        })
        .collect()
}

fn server(line: ThreadLine) -> Line {
    Line::Thread(Side::Server, line)
}

#[test]
fn a_clean_request_blames_nobody_and_leaves_little_unexplained() {
    let mut told = Story::default();
    for _ in 0..5 {
        told.request(Fault::default());
    }
    for ledger in ledgers(&told) {
        assert_eq!(ledger.ns(server(ThreadLine::RunQueue)), 0, "{ledger:?}");
        assert_eq!(ledger.ns(Line::Retransmit(Segment::Data)), 0);
        let unexplained = ledger.ns(Line::Unexplained);
        assert!(
            unexplained * 20 < ledger.total_ns(),
            "{unexplained} of {}",
            ledger.total_ns()
        );
    }
}

#[test]
fn each_fault_lands_on_its_own_line_in_full() {
    const NS: u64 = 3_000_000;
    type Set = fn(&mut Fault);
    let faults: [(Set, Line); 6] = [
        (|f| f.server_queue_ns = NS, server(ThreadLine::RunQueue)),
        (|f| f.server_softirq_ns = NS, server(ThreadLine::Softirq)),
        (|f| f.server_steal_ns = NS, server(ThreadLine::Steal)),
        (|f| f.lost_hello_ns = NS, Line::Retransmit(Segment::Data)),
        (
            |f| f.client_blocked_ns = NS,
            Line::Thread(Side::Client, ThreadLine::Blocked),
        ),
        (|f| f.server_stopped_ns = NS, server(ThreadLine::Stopped)),
    ];
    for (set, line) in faults {
        let mut fault = Fault::default();
        set(&mut fault);
        let mut told = Story::default();
        // Before its first switch nothing is known of a CPU, so the first request is only a lead-in.
        for faulty in [false, false, true, false] {
            told.request(if faulty { fault } else { Fault::default() });
        }
        let ledgers = ledgers(&told);
        let added = ledgers[2].ns(line) - ledgers[1].ns(line);
        assert!(
            added.abs_diff(NS) < 5_000,
            "{}: {added} of {NS} ns, {:?}",
            line.name(),
            ledgers[1]
        );
        assert_eq!(ledgers[1], ledgers[3], "the neighbours are as before");
    }
}

/// As some kernels do with threads of their own: they are seen to come in, and never again.
#[test]
fn a_thread_whose_switch_out_is_hidden_is_named_as_presumed() {
    let mut told = Story::default();
    told.request(Fault::default());
    told.request(Fault {
        server_queue_ns: 3_000_000,
        ..Fault::default()
    });
    let hidden = |raw: &Raw| raw[8] == kind::SWITCH && raw[12..16] == HOG.to_le_bytes();
    told.server.retain(|raw| !hidden(raw));
    let ledger = ledgers(&told)[1];
    let queue = ledger.ns(server(ThreadLine::RunQueue));
    assert!(queue.abs_diff(3_000_000) < 10_000, "{ledger:?}");
}

fn faults() -> impl Strategy<Value = Vec<Fault>> {
    let ns = prop_oneof![3 => Just(0u64), 1 => 1_000u64..5_000_000];
    let fault = [(); 6]
        .map(|()| ns.clone())
        .prop_map(|[queue, softirq, steal, lost, blocked, stopped]| Fault {
            server_queue_ns: queue,
            server_softirq_ns: softirq,
            server_steal_ns: steal,
            lost_hello_ns: lost,
            client_blocked_ns: blocked,
            server_stopped_ns: stopped,
            ..Fault::default()
        });
    prop::collection::vec(fault, 1..12)
}

/// Wire times of the stories are 2 us, which bounds the clocks' error; a line has some borders.
const BORDER_NS: u64 = 8_000;

fn tell(faults: &[Fault], shift: u64) -> Story {
    let mut told = Story::default();
    told.shift = shift;
    for fault in faults {
        told.request(*fault);
    }
    told
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn order_and_duplicates_of_the_records_do_not_matter(faults in faults(), seed in any::<u64>()) {
        use rand::{SeedableRng as _, seq::SliceRandom as _};
        let plain = tell(&faults, 0);
        let mut random = rand::rngs::Xoshiro256PlusPlus::seed_from_u64(seed);
        let mix = |records: &[Raw], random: &mut rand::rngs::Xoshiro256PlusPlus| {
            let mut mixed = [records, &records[..records.len() / 3]].concat();
            mixed.shuffle(random);
            mixed
        };
        let mut mixed = plain.clone();
        mixed.client = mix(&plain.client, &mut random);
        mixed.server = mix(&plain.server, &mut random);
        prop_assert_eq!(ledgers(&plain), ledgers(&mixed));
    }

    #[test]
    fn a_shifted_server_clock_changes_nothing(faults in faults(), shift in 1u64..1 << 50) {
        prop_assert_eq!(ledgers(&tell(&faults, 0)), ledgers(&tell(&faults, shift)));
    }

    /// The sum is asserted for every request inside `ledgers`.
    #[test]
    fn the_ledger_sums_whatever_is_missing_or_made_up(
        faults in faults(),
        keep in prop::collection::vec(any::<bool>(), 64),
        noise in prop::collection::vec((prop::array::uniform32(any::<u8>()), any::<u8>(), any::<u64>()), 0..40),
    ) {
        let mut told = tell(&faults, 0);
        let span = told.now;
        let thin = |records: Vec<Raw>| -> Vec<Raw> {
            records.into_iter().enumerate().filter(|(i, _)| keep[i % keep.len()]).map(|(_, raw)| raw).collect()
        };
        told.client = thin(told.client);
        told.server = thin(told.server);
        for (bytes, kind, at) in noise {
            let mut record = [0u8; pqtail_common::RECORD_BYTES];
            record[16..48].copy_from_slice(&bytes);
            record[..8].copy_from_slice(&(at % (2 * span)).to_le_bytes());
            record[8] = kind % 20;
            record[10] = bytes[0] % 3;
            told.server.push(record);
        }
        ledgers(&told);
    }

    /// As the drain counts losses: of which kind, by which CPU, between which two polls.
    #[test]
    fn what_is_lost_only_grows_the_unexplained(
        faults in faults(),
        lost in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0u64..2_000_000, 0u64..2_000_000), 1..6),
    ) {
        let mut told = tell(&faults, 0);
        let whole = ledgers(&told);
        for (which, of_client, before, after) in lost {
            let records = if of_client { &mut told.client } else { &mut told.server };
            let gone = records.remove(which.index(records.len()));
            // A loss of an earlier round is gone with its record: then nobody knows.
            if gone[8] == kind::LOSS {
                records.push(gone);
                continue;
            }
            let at_ns = u64::from_ne_bytes(gone[..8].try_into().expect("eight bytes"));
            records.push(raw(&Loss {
                head: Head { at_ns: at_ns + after, kind: kind::LOSS, cpu: u16::from(gone[10]), ..Head::default() },
                start_ns: at_ns.saturating_sub(before + 1),
                count: 1,
                lost_kind: gone[8].into(),
                ..Loss::default()
            }));
        }
        let thinned = ledgers(&told);
        for (whole, thinned) in whole.iter().zip(&thinned) {
            for line in Line::all().into_iter().filter(|line| *line != Line::Unexplained) {
                // The clocks are aligned by fewer handshakes: within their error, a border may move.
                prop_assert!(
                    thinned.ns(line) <= whole.ns(line) + BORDER_NS,
                    "{} grew from {} to {}: {:?}",
                    line.name(), whole.ns(line), thinned.ns(line), thinned
                );
            }
        }
    }

    #[test]
    fn without_packets_only_the_dispatch_is_explained(faults in faults()) {
        let mut told = tell(&faults, 0);
        let is_packet = |raw: &Raw| matches!(raw[8], kind::TRANSMIT | kind::RECEIVE);
        told.client.retain(|raw| !is_packet(raw));
        told.server.retain(|raw| !is_packet(raw));
        for (request, ledger) in told.requests.iter().zip(ledgers(&told)) {
            let after_dispatch = request.done_ns - request.start_ns;
            prop_assert!(ledger.ns(Line::Unexplained) >= after_dispatch);
        }
    }
}
