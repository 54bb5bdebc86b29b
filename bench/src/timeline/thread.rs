//! What each measured thread did: running, wanting to run, or asleep.

use std::collections::{BTreeMap, BTreeSet};

use pqtail_common::{ABSENT, SLEEP_FRAMES, Sleep, Span, Switch, Wake, flag, kind};

use super::{
    cpu::{Raw, as_record, head},
    lasting::{Lasting, clipped, disjoint},
};

/// State bits of a stopped or traced task (`__TASK_STOPPED | __TASK_TRACED`, include/linux/sched.h).
const STOPPED_BITS: u32 = 0x4 | 0x8;

/// Value of [`Span::number`] in a `RECLAIM` record.
const RECLAIM_FOR_CGROUP: u32 = 2;

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Being {
    /// Current on this CPU (an interrupt may have it).
    Running {
        /// Which.
        cpu: u32,
    },
    /// Woken or preempted, not yet current.
    Runnable {
        /// The CPU on which it will run next.
        cpu: u32,
        /// It left its CPU with its cgroup out of quota.
        throttled: bool,
    },
    /// Waiting for something else.
    Asleep {
        /// The CPU it left.
        cpu: u32,
        /// What is known of it.
        sleep: Nap,
    },
}

/// What is known of one sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nap {
    /// `TASK_*` bits.
    pub state: u32,
    /// Where in the kernel it sleeps: a place in [`Threads::wait`]. `None` in a wait for something to do, and where nothing was
    /// recorded.
    pub wait: Option<u32>,
    /// The thread that was current where it was woken: who woke it, or whom the interrupt that woke it had stopped, which the
    /// records do not tell apart. 0 if not seen, and if that CPU was idle.
    pub waker: u32,
}

/// A place in the kernel where threads sleep.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wait {
    /// Number of the system call; `None` in an exception such as a page fault.
    pub syscall: Option<u32>,
    /// Code from the innermost function outwards, by distance from `_stext`, bytes.
    pub frames: Vec<u32>,
}

impl Being {
    /// Whether the state is one of a stopped task.
    #[must_use]
    pub const fn is_stopped(self) -> bool {
        matches!(self, Self::Asleep { sleep, .. } if sleep.state & STOPPED_BITS != 0)
    }
}

/// A stretch of one thread's time, ns on its machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    /// Begin.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// What it was.
    pub being: Being,
}

impl Lasting for Stay {
    fn times(&mut self) -> (&mut u64, &mut u64) {
        (&mut self.start_ns, &mut self.end_ns)
    }
}

/// The measured threads of one machine over one trial.
#[derive(Clone, Debug, Default)]
pub struct Threads {
    stays: BTreeMap<u32, Vec<Stay>>,
    reclaims: BTreeMap<u32, Vec<Reclaim>>,
    waits: Vec<Wait>,
}

/// A stretch in which a thread reclaims memory itself, ns on its machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// Begin.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Whether its cgroup's limit asked for it, not the machine's memory.
    pub for_cgroup: bool,
}

impl Lasting for Reclaim {
    fn times(&mut self) -> (&mut u64, &mut u64) {
        (&mut self.start_ns, &mut self.end_ns)
    }
}

#[derive(Default)]
struct Track {
    stays: Vec<Stay>,
    now: Option<(u64, Being)>,
    /// Where it is about to fall asleep.
    wait: Option<u32>,
}

impl Track {
    fn enter(&mut self, at_ns: u64, being: Being) {
        if let Some((since, before)) = self.now.take()
            && since < at_ns
        {
            // Where it will run is known only when it does.
            let before = match (before, being) {
                (Being::Runnable { throttled, .. }, Being::Running { cpu }) => {
                    Being::Runnable { cpu, throttled }
                }
                _ => before,
            };
            self.stays.push(Stay {
                start_ns: since,
                end_ns: at_ns,
                being: before,
            });
        }
        self.now = Some((at_ns, being));
    }
}

impl Threads {
    /// Follows the given threads through a machine's records, sorted by time.
    #[must_use]
    pub fn build(records: &[Raw], tids: &BTreeSet<u32>) -> Self {
        let mut waits: BTreeMap<Wait, u32> = BTreeMap::new();
        let mut reclaims: BTreeMap<u32, Vec<Reclaim>> = BTreeMap::new();
        let mut tracks: BTreeMap<u32, Track> = tids.iter().map(|&tid| (tid, Track::default())).collect();
        let mut last_ns = 0;
        for raw in records {
            let head = head(raw);
            // Whatever a thread is thought to be, a record of its own says that it runs.
            if head.kind != kind::SWITCH
                && head.kind != kind::LOSS
                && let Some(track) = tracks.get_mut(&head.tid)
                && !matches!(track.now, Some((_, Being::Running { .. })))
            {
                track.enter(
                    head.at_ns,
                    Being::Running {
                        cpu: u32::from(head.cpu),
                    },
                );
            }
            // A place of sleep comes just before its switch: with anything of the thread's own between, that switch was lost.
            if !matches!(head.kind, kind::SWITCH | kind::SLEEP | kind::LOSS)
                && let Some(track) = tracks.get_mut(&head.tid)
            {
                track.wait = None;
            }
            match head.kind {
                kind::SWITCH => {
                    let switch: Switch = as_record(raw);
                    let cpu = u32::from(head.cpu);
                    if let Some(track) = tracks.get_mut(&head.tid) {
                        let wait = track.wait.take();
                        track.enter(head.at_ns, left(&switch, cpu, wait));
                    }
                    if let Some(track) = tracks.get_mut(&switch.next_tid) {
                        // The switch that this belonged to was lost.
                        track.wait = None;
                        track.enter(head.at_ns, Being::Running { cpu });
                    }
                }
                kind::WAKING | kind::WAKEUP => {
                    let wake: Wake = as_record(raw);
                    if let Some(track) = tracks.get_mut(&wake.target_tid)
                        // A running thread that is woken has nothing to wait for.
                        && let Some((_, Being::Asleep { sleep, .. })) = &mut track.now
                    {
                        sleep.waker = head.tid;
                        track.enter(
                            head.at_ns,
                            Being::Runnable {
                                cpu: wake.target_cpu,
                                throttled: false,
                            },
                        );
                    }
                }
                kind::SLEEP => {
                    if let Some(track) = tracks.get_mut(&head.tid) {
                        let next = waits.len() as u32;
                        track.wait = Some(*waits.entry(place(&as_record(raw))).or_insert(next));
                    }
                }
                kind::RECLAIM if tids.contains(&head.tid) => {
                    let span: Span = as_record(raw);
                    reclaims.entry(head.tid).or_default().push(Reclaim {
                        start_ns: span.start_ns,
                        end_ns: head.at_ns,
                        for_cgroup: span.number == RECLAIM_FOR_CGROUP,
                    });
                }
                _ => {}
            }
            last_ns = last_ns.max(head.at_ns);
        }
        // They cannot nest, but records can be made up.
        reclaims.values_mut().for_each(disjoint);
        let mut places: Vec<_> = waits.into_iter().collect();
        places.sort_unstable_by_key(|(_, number)| *number);
        Self {
            reclaims,
            waits: places.into_iter().map(|(wait, _)| wait).collect(),
            stays: tracks
                .into_iter()
                .map(|(tid, mut track)| {
                    if let Some((since, being)) = track.now
                        && since < last_ns
                    {
                        track.stays.push(Stay {
                            start_ns: since,
                            end_ns: last_ns,
                            being,
                        });
                    }
                    (tid, track.stays)
                })
                .collect(),
        }
    }

    /// A place where threads sleep.
    #[must_use]
    pub fn wait(&self, number: u32) -> Option<&Wait> {
        self.waits.get(number as usize)
    }

    /// When the thread reclaimed memory between two times.
    pub fn reclaims(&self, tid: u32, start_ns: u64, end_ns: u64) -> impl Iterator<Item = Reclaim> + '_ {
        clipped(self.reclaims.get(&tid), start_ns, end_ns)
    }

    /// What the thread did between two times; nothing is said where nothing is known.
    pub fn between(&self, tid: u32, start_ns: u64, end_ns: u64) -> impl Iterator<Item = Stay> + '_ {
        clipped(self.stays.get(&tid), start_ns, end_ns)
    }
}

/// What a thread is that has just left its CPU.
fn left(switch: &Switch, cpu: u32, wait: Option<u32>) -> Being {
    // prev_state 0 is an involuntary switch, whatever the preempt argument says. And who is preempted between setting its state
    // and calling the scheduler stays on the queue, whatever its state says (`__schedule`, kernel/sched/core.c).
    if switch.prev_state == 0 || switch.head.flags & flag::PREEMPT != 0 {
        Being::Runnable {
            cpu,
            throttled: switch.head.flags & flag::THROTTLED != 0,
        }
    } else {
        Being::Asleep {
            cpu,
            sleep: Nap {
                state: switch.prev_state,
                wait,
                waker: 0,
            },
        }
    }
}

fn place(sleep: &Sleep) -> Wait {
    let count = (sleep.frames_count as usize).min(SLEEP_FRAMES);
    Wait {
        syscall: (sleep.syscall != ABSENT).then_some(sleep.syscall),
        frames: sleep.frames[..count].to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use pqtail_common::Head;
    use zerocopy::IntoBytes as _;

    use super::*;

    fn switch(at_ns: u64, from: u32, to: u32, prev_state: u32) -> Raw {
        let head = Head {
            at_ns,
            kind: kind::SWITCH,
            flags: 0,
            cpu: 1,
            tid: from,
        };
        let switch = Switch {
            head,
            next_tid: to,
            prev_state,
            ..Switch::default()
        };
        switch.as_bytes().try_into().unwrap()
    }

    fn waking(at_ns: u64, tid: u32) -> Raw {
        let head = Head {
            at_ns,
            kind: kind::WAKING,
            flags: 0,
            cpu: 0,
            tid: 99,
        };
        Wake {
            head,
            target_tid: tid,
            ..Wake::default()
        }
        .as_bytes()
        .try_into()
        .unwrap()
    }

    #[test]
    fn a_thread_that_wakes_at_10_and_runs_at_35_waited_25() {
        let records = [
            switch(5, 7, 0, 1),
            waking(10, 7),
            switch(35, 8, 7, 0),
            switch(50, 7, 8, 0),
        ];
        let threads = Threads::build(&records, &BTreeSet::from([7]));
        let stays: Vec<_> = threads
            .between(7, 0, 100)
            .map(|s| (s.start_ns, s.end_ns, s.being))
            .collect();
        assert_eq!(
            stays,
            [
                (
                    5,
                    10,
                    Being::Asleep {
                        cpu: 1,
                        sleep: Nap {
                            state: 1,
                            wait: None,
                            waker: 99
                        }
                    }
                ),
                (
                    10,
                    35,
                    Being::Runnable {
                        cpu: 1,
                        throttled: false
                    }
                ),
                (35, 50, Being::Running { cpu: 1 }),
            ]
        );
    }

    fn sleep(at_ns: u64, tid: u32) -> Raw {
        let head = Head {
            at_ns,
            kind: kind::SLEEP,
            flags: 0,
            cpu: 1,
            tid,
        };
        let sleep = Sleep {
            head,
            syscall: 202,
            ..Sleep::default()
        };
        sleep.as_bytes().try_into().unwrap()
    }

    #[test]
    fn who_is_preempted_on_the_way_to_sleep_still_wants_to_run() {
        let mut preempted = switch(5, 7, 8, 1);
        preempted[std::mem::offset_of!(Head, flags)] = flag::PREEMPT;
        let threads = Threads::build(&[preempted, switch(35, 8, 7, 0)], &BTreeSet::from([7]));
        let stay = threads.between(7, 0, 100).next().unwrap();
        let runnable = Being::Runnable {
            cpu: 1,
            throttled: false,
        };
        assert_eq!((stay.start_ns, stay.end_ns, stay.being), (5, 35, runnable));
    }

    #[test]
    fn a_place_of_sleep_whose_switch_was_lost_is_not_the_next_ones() {
        let next = [switch(20, 8, 7, 0), switch(30, 7, 8, 1), waking(40, 7)];
        let told = |before: &[Raw]| {
            let records = [before, &next].concat();
            let threads = Threads::build(&records, &BTreeSet::from([7]));
            threads.between(7, 30, 40).next().unwrap().being
        };
        assert_eq!(told(&[sleep(10, 7)]), told(&[]));
    }
}
