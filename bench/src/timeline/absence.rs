//! When a CPU was away: it took no interrupts and recorded nothing.
//!
//! The heartbeat's timer goes on in idle and fires as soon as the CPU takes interrupts again (`perf_swevent_hrtimer`,
//! kernel/events/core.c). So a beat that comes late, on a CPU that left no other record meanwhile, says that the CPU did not run, or
//! ran with interrupts off: no record tells these two apart.

use std::collections::BTreeMap;

use pqtail_common::{Span, kind};

use super::{
    cpu::{Doing, Raw, Stretch, as_record, head},
    gap::Gaps,
};

/// With fewer on a machine its period is not known.
const BEATS_MIN: usize = 8;

/// A beat that comes a whole number of periods after the last, give or take this part of one, may have come in time, and those between
/// were not stored.
const IN_TIME_PART: u64 = 32;

/// All absences of one machine over one trial.
#[derive(Clone, Debug, Default)]
pub(super) struct Absences {
    /// Of the heartbeat, ns; 0 if not known.
    period_ns: u64,
    /// In order, by CPU.
    by_cpu: BTreeMap<u32, Vec<Stretch>>,
}

/// What one CPU recorded.
#[derive(Default)]
struct Signs {
    /// Times at which it certainly ran, ns.
    alive: Vec<u64>,
    /// Its beats, and whether the CPU was idle.
    beats: Vec<(u64, bool)>,
    /// Hard interrupts, Linux' and the processor's: begin and end, by end.
    interrupts: Vec<(u64, u64)>,
    /// The Linux irqs among them.
    irqs: Vec<(u64, u64)>,
}

impl Absences {
    /// From a machine's records, sorted by time. Where some are missing, silence says nothing.
    pub(super) fn find(records: &[Raw], gaps: &Gaps) -> Self {
        let mut signs: BTreeMap<u32, Signs> = BTreeMap::new();
        for raw in records {
            let head = head(raw);
            if head.kind == kind::LOSS {
                continue;
            }
            let signs = signs.entry(u32::from(head.cpu)).or_default();
            signs.alive.push(head.at_ns);
            match head.kind {
                kind::BEAT => signs.beats.push((head.at_ns, head.tid == 0)),
                kind::IRQ | kind::SOFTIRQ | kind::VECTOR | kind::RECLAIM => {
                    let span: Span = as_record(raw);
                    signs.alive.push(span.start_ns);
                    if matches!(head.kind, kind::IRQ | kind::VECTOR) {
                        signs.interrupts.push((span.start_ns, head.at_ns));
                    }
                    if head.kind == kind::IRQ {
                        signs.irqs.push((span.start_ns, head.at_ns));
                    }
                }
                _ => {}
            }
        }
        let Some(period_ns) = period(&signs) else {
            return Self::default();
        };
        for each in signs.values_mut() {
            each.alive.sort_unstable();
        }
        let by_cpu = signs
            .iter()
            .map(|(&cpu, signs)| (cpu, signs.absences(period_ns, gaps)))
            .collect();
        Self { period_ns, by_cpu }
    }

    /// A CPU's, in order.
    pub(super) fn of(&self, cpu: u32) -> &[Stretch] {
        self.by_cpu.get(&cpu).map_or(&[], Vec::as_slice)
    }

    /// A CPU's last one before a time, if it was over for a period at most by then.
    pub(super) fn before(&self, cpu: u32, at_ns: u64) -> Option<Stretch> {
        let absences = self.of(cpu);
        let next = absences.partition_point(|each| each.end_ns <= at_ns);
        let last = *absences.get(next.checked_sub(1)?)?;
        (at_ns - last.end_ns <= self.period_ns).then_some(last)
    }
}

/// The median distance of two beats, ns.
fn period(signs: &BTreeMap<u32, Signs>) -> Option<u64> {
    let pairs = signs.values().flat_map(|each| each.beats.windows(2));
    let mut distances: Vec<u64> = pairs.map(|pair| pair[1].0 - pair[0].0).collect();
    let middle = distances.len() / 2;
    if distances.len() < BEATS_MIN {
        return None;
    }
    let (_, median, _) = distances.select_nth_unstable(middle);
    (*median > 0).then_some(*median)
}

impl Signs {
    fn absences(&self, period_ns: u64, gaps: &Gaps) -> Vec<Stretch> {
        let mut absences = Vec::new();
        let mut in_idle = Vec::new();
        let mut idle_beats_in_time = 0;
        let shows_timer = self.shows_timer();
        for pair in self.beats.windows(2) {
            let ((before, was_idle), (beat, is_idle)) = (pair[0], pair[1]);
            // Without its interrupt a beat that is missing may only not have been stored.
            let is_in_time = (beat - before) % period_ns <= period_ns / IN_TIME_PART && !shows_timer;
            let absence = self.absence(before, beat, period_ns, gaps);
            let Some(absence) = absence.filter(|_| !is_in_time) else {
                idle_beats_in_time += usize::from(was_idle && is_idle && beat - before < 2 * period_ns);
                continue;
            };
            if is_idle {
                in_idle.push(absence);
            } else {
                absences.push(absence);
            }
        }
        // Where a CPU that idles takes no beats, the first one afterwards is late by itself.
        if idle_beats_in_time > in_idle.len() {
            absences.append(&mut in_idle);
            absences.sort_unstable_by_key(|each| each.start_ns);
        }
        absences
    }

    /// Whether most beats lie in an interrupt that is recorded too, which then is the timer's.
    fn shows_timer(&self) -> bool {
        let in_interrupt = |&&(beat, _): &&(u64, bool)| {
            let next = self.interrupts.partition_point(|&(_, to)| to < beat);
            self.interrupts.get(next).is_some_and(|&(from, _)| from <= beat)
        };
        self.beats.iter().filter(in_interrupt).count() * 2 > self.beats.len()
    }

    /// The absence between two neighbouring beats, if the second proves one: it is late by a whole period at least, and the CPU
    /// was last seen before it was late by so much, and was not seen again before the last period that ends with it.
    fn absence(&self, before: u64, beat: u64, period_ns: u64, gaps: &Gaps) -> Option<Stretch> {
        let due = before.saturating_add(period_ns);
        let late = due.saturating_add(period_ns);
        if beat < late {
            return None;
        }
        let next = self.alive.partition_point(|&at| at <= late);
        let last_seen = *self.alive[..next].last()?;
        let seen_again = *self.alive.get(next)?;
        if seen_again < beat - period_ns {
            return None;
        }
        // When in that silence it left is not known before the beat was due.
        let (start_ns, end_ns) = (last_seen.max(due), seen_again.min(beat));
        let is_long = end_ns > start_ns && end_ns - start_ns >= period_ns;
        // One that lasted would have kept the beat off as well; the beat's own began before it.
        let irq = self.irqs.partition_point(|&(_, to)| to < end_ns);
        let lasted = |&(from, to): &(u64, u64)| from <= start_ns && to < beat;
        let is_irq = self.irqs.get(irq).is_some_and(lasted);
        (is_long && !is_irq && !gaps.between(start_ns, end_ns)).then_some(Stretch {
            start_ns,
            end_ns,
            doing: Doing::Away,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pqtail_common::{Beat, Head, Loss};
    use zerocopy::{Immutable, IntoBytes};

    use super::*;

    /// A thread, and the idle one.
    const BUSY: u32 = 7;
    const IDLE: u32 = 0;

    fn raw(record: &(impl IntoBytes + Immutable)) -> Raw {
        record.as_bytes().try_into().unwrap()
    }

    fn head_of(kind: u8, at_ns: u64, tid: u32) -> Head {
        Head {
            at_ns,
            kind,
            tid,
            ..Head::default()
        }
    }

    /// A beat every 100 ns from 100 to 1000 and from 1500 to 2000, and these between.
    fn beats(tid: u32, between: &[u64]) -> Vec<Raw> {
        let regular = (1..=10).chain(15..=20).map(|count| 100 * count);
        let mut times: Vec<u64> = regular.chain(between.iter().copied()).collect();
        times.sort_unstable();
        let beat = |at_ns| Beat {
            head: head_of(kind::BEAT, at_ns, tid),
            ..Beat::default()
        };
        times.into_iter().map(|at_ns| raw(&beat(at_ns))).collect()
    }

    fn span(kind: u8, start_ns: u64, end_ns: u64) -> Raw {
        raw(&Span {
            head: head_of(kind, end_ns, BUSY),
            start_ns,
            ..Span::default()
        })
    }

    fn found(records: &[Vec<Raw>]) -> Vec<(u64, u64)> {
        let mut records = records.concat();
        records.sort_by_key(|record| head(record).at_ns);
        let gaps = Gaps::build(&records, &[], &BTreeSet::from([0]));
        let absences = Absences::find(&records, &gaps);
        absences
            .of(0)
            .iter()
            .map(|each| (each.start_ns, each.end_ns))
            .collect()
    }

    #[test]
    fn a_late_beat_after_silence_is_an_absence_from_when_it_was_due() {
        assert_eq!(found(&[beats(BUSY, &[1_450])]), [(1_100, 1_450)]);
        // Seen when the beat was due already, and again just before it came.
        let seen = vec![
            span(kind::SOFTIRQ, 1_120, 1_130),
            span(kind::VECTOR, 1_440, 1_460),
        ];
        assert_eq!(found(&[beats(BUSY, &[1_450]), seen]), [(1_130, 1_440)]);
    }

    #[test]
    fn who_leaves_records_is_there_however_late_the_beat() {
        let seen = vec![span(kind::SOFTIRQ, 1_250, 1_260)];
        assert_eq!(found(&[beats(BUSY, &[1_450]), seen]), []);
    }

    #[test]
    fn a_beat_that_is_missing_is_not_late_unless_its_interrupt_is_missing_too() {
        let missing = beats(BUSY, &[]);
        assert_eq!(found(std::slice::from_ref(&missing)), []);
        let timers = |records: &[Raw]| -> Vec<Raw> {
            let at = records.iter().map(|record| head(record).at_ns);
            at.map(|at_ns| span(kind::VECTOR, at_ns - 1, at_ns + 1)).collect()
        };
        assert_eq!(found(&[missing.clone(), timers(&missing)]), [(1_100, 1_499)]);
        let whole = beats(BUSY, &[1_100, 1_200, 1_300, 1_400]);
        assert_eq!(found(&[missing, timers(&whole)]), []);
    }

    #[test]
    fn a_beat_that_is_a_little_late_proves_nothing() {
        assert_eq!(found(&[beats(BUSY, &[1_190, 1_200, 1_300, 1_400])]), []);
    }

    #[test]
    fn where_records_are_lost_silence_says_nothing() {
        let loss = |lost_kind: u8| Loss {
            head: head_of(kind::LOSS, 1_480, 0),
            start_ns: 1_090,
            count: 3,
            lost_kind: lost_kind.into(),
            ..Loss::default()
        };
        for kind in [kind::BEAT, kind::SWITCH, kind::RECEIVE] {
            assert_eq!(found(&[beats(BUSY, &[1_450]), vec![raw(&loss(kind))]]), []);
        }
    }

    #[test]
    fn an_interrupt_that_lasts_keeps_the_beat_off_by_itself() {
        let irq = vec![span(kind::IRQ, 1_090, 1_449)];
        assert_eq!(found(&[beats(BUSY, &[1_450]), irq]), []);
    }

    #[test]
    fn an_idle_cpu_is_away_only_where_beats_go_on_in_idle() {
        assert_eq!(found(&[beats(IDLE, &[1_450])]), [(1_100, 1_450)]);
        // Beats while a thread runs, none in idle but the one that ends it.
        let mut tickless = beats(BUSY, &[1_450]);
        for record in &mut tickless {
            if head(record).at_ns == 1_450 {
                record[std::mem::offset_of!(Head, tid)..][..4].copy_from_slice(&IDLE.to_ne_bytes());
            }
        }
        assert_eq!(found(&[tickless]), []);
    }

    #[test]
    fn a_packet_waited_for_a_cpu_that_has_only_just_come_back() {
        let records = beats(BUSY, &[1_450]);
        let absences = Absences::find(&records, &Gaps::default());
        assert!(absences.before(0, 1_449).is_none());
        assert_eq!(absences.before(0, 1_550).unwrap().end_ns, 1_450);
        assert!(absences.before(0, 1_551).is_none());
    }
}
