//! Time-outs of one length for all tasks of a worker, with one runtime timer among them.
//!
//! A timer of the runtime for each would be the earliest of all again and again, and for that the runtime writes to its
//! own eventfd and wakes once more: two system calls in the middle of what is measured. Deadlines that all lie equally
//! far ahead expire in the order in which they were set, so the timer for the first is early enough for the rest.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::pin,
    rc::Rc,
    task::{Poll, Waker},
    time::Duration,
};

use tokio::{sync::Notify, task::AbortHandle};

use crate::clock::now;

/// Deadlines set ahead of need, so that none is allocated before so many are open at once.
const OPEN_EXPECTED: usize = 1024;

/// The deadlines of one worker, all equally far ahead.
pub(super) struct Deadlines {
    wait_ns: u64,
    /// Ascending; those that are met stay until they are at the front.
    open: RefCell<VecDeque<Rc<Deadline>>>,
    /// The sweep waits for the first of several deadlines, not for this to be told.
    is_sweeping: Cell<bool>,
    added: Notify,
}

struct Deadline {
    at_ns: u64,
    state: Cell<State>,
    task: Waker,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Met,
    Missed,
}

/// Meets the deadline however its future ends, also when the task is dropped.
struct Meeting(Option<Rc<Deadline>>);

impl Drop for Meeting {
    fn drop(&mut self) {
        if let Some(deadline) = &self.0 {
            deadline.state.set(State::Met);
        }
    }
}

/// Ends the sweep when dropped.
pub(super) struct Sweep(AbortHandle);

impl Drop for Sweep {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Deadlines {
    /// Starts the sweep on the calling thread's runtime; deadlines are missed in time for as long as it lives.
    pub(super) fn start(wait: Duration) -> (Rc<Self>, Sweep) {
        let deadlines = Rc::new(Self {
            wait_ns: wait.as_nanos() as u64,
            open: RefCell::new(VecDeque::with_capacity(OPEN_EXPECTED)),
            is_sweeping: Cell::new(false),
            added: Notify::new(),
        });
        let sweep = tokio::task::spawn_local(Rc::clone(&deadlines).sweep());
        (deadlines, Sweep(sweep.abort_handle()))
    }

    /// The future's output, or `None` if it has none in time. Time counts from the first poll.
    pub(super) async fn within<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut meeting = Meeting(None);
        poll_fn(|context| {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Some(output));
            }
            match &meeting.0 {
                Some(deadline) if deadline.state.get() == State::Missed => Poll::Ready(None),
                Some(_) => Poll::Pending,
                None => {
                    // A task is woken by the same waker all its life.
                    meeting.0 = Some(self.set(context.waker().clone()));
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn set(&self, task: Waker) -> Rc<Deadline> {
        let deadline = Rc::new(Deadline {
            at_ns: now().0 + self.wait_ns,
            state: Cell::new(State::Open),
            task,
        });
        let mut open = self.open.borrow_mut();
        while open.front().is_some_and(|first| first.state.get() == State::Met) {
            open.pop_front();
        }
        open.push_back(Rc::clone(&deadline));
        if !self.is_sweeping.replace(true) {
            self.added.notify_one();
        }
        deadline
    }

    async fn sweep(self: Rc<Self>) {
        loop {
            match self.miss_due() {
                Some(ns) => tokio::time::sleep(Duration::from_nanos(ns)).await,
                None => {
                    self.is_sweeping.set(false);
                    self.added.notified().await;
                }
            }
        }
    }

    /// Wakes the tasks whose deadlines are over; ns until the next is.
    fn miss_due(&self) -> Option<u64> {
        let mut open = self.open.borrow_mut();
        let now_ns = now().0;
        while let Some(first) = open.front() {
            if first.state.get() == State::Open {
                if first.at_ns > now_ns {
                    return Some(first.at_ns - now_ns);
                }
                first.state.set(State::Missed);
                first.task.wake_by_ref();
            }
            open.pop_front();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::worker::runtime;

    fn run(test: impl Future<Output = ()> + 'static) {
        runtime()
            .unwrap()
            .block_on(async { tokio::task::spawn_local(test).await.unwrap() });
    }

    #[test]
    fn what_never_ends_is_missed_in_time_and_what_ends_is_not() {
        run(async {
            let wait = Duration::from_millis(20);
            let (deadlines, _sweep) = Deadlines::start(wait);
            let begin = std::time::Instant::now();
            let slow = Rc::clone(&deadlines);
            let slow =
                tokio::task::spawn_local(async move { slow.within(std::future::pending::<()>()).await });
            let quick = deadlines.within(tokio::time::sleep(wait / 4)).await;
            assert_eq!((quick, slow.await.unwrap()), (Some(()), None));
            assert!(begin.elapsed() >= wait);
        });
    }

    #[test]
    fn the_sweep_goes_on_after_nothing_was_open() {
        run(async {
            let (deadlines, _sweep) = Deadlines::start(Duration::from_millis(5));
            for _ in 0..3 {
                assert_eq!(deadlines.within(std::future::pending::<()>()).await, None);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }

    #[test]
    fn a_deadline_met_long_ago_does_not_delay_the_next() {
        run(async {
            let wait = Duration::from_millis(20);
            let (deadlines, _sweep) = Deadlines::start(wait);
            assert_eq!(deadlines.within(tokio::task::yield_now()).await, Some(()));
            tokio::time::sleep(wait / 2).await;
            let begin = std::time::Instant::now();
            assert_eq!(deadlines.within(std::future::pending::<()>()).await, None);
            assert!(begin.elapsed() >= wait && begin.elapsed() < wait * 10);
        });
    }
}
