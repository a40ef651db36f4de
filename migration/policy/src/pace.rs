//! The bandwidth limit of the pre-copy rounds, shared by all channels.

use core::time::Duration;
use martlet_units::{ByteCount, BytesPerSec, Instant, PAGE_SIZE};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How much time's worth of bytes a channel should send in one piece, and how much unused time may
/// be made up for. Together they are the most by which the bytes of any stretch of time can exceed
/// the limit: 4 ms, so 4 % of 100 ms.
const SLICE: Duration = Duration::from_millis(2);
const CATCH_UP: Duration = Duration::from_millis(2);

/// Hands out slots on a link of a given rate, one after the other, to any number of channels.
///
/// Before a channel sends, it takes a slot by [`Pacer::reserve`] and waits until [`Pacer::wait`] says
/// that it has begun. If no piece is longer
/// than [`Pacer::slice`], the bytes sent in any 100 ms or more exceed the limit by less than 5 %;
/// and as long as channels always have something to send and wake within 2 ms, they fall short of
/// it by less than 5 %. Longer pieces keep the rate too, over stretches long enough to hold many
/// of them. A rate below 2 MB/s makes a single page longer than a slice.
///
/// Slots are kept in fractions of a byte, exactly, so no rounding adds up however small the pieces
/// are. The lock is held for a few arithmetic instructions and taken once per piece.
#[derive(Debug)]
pub struct Pacer {
    state: Mutex<State>,
}

/// Billionths of a byte: a rate in bytes a second times a time in nanoseconds.
type Work = u128;

/// A place on the link that was given to somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(Work);

#[derive(Debug)]
struct State {
    /// `None` is no limit.
    rate: Option<BytesPerSec>,
    /// When this rate began, and what the link could have carried until then.
    epoch: Instant,
    before: Work,
    /// Given out, and forgone because nobody wanted it in time.
    given: Work,
}

impl Pacer {
    /// A pacer for this rate, or without a limit. A rate of zero counts as one byte a second.
    pub fn new(now: Instant, rate: Option<BytesPerSec>) -> Pacer {
        Pacer { state: Mutex::new(State { rate, epoch: now, before: 0, given: 0 }) }
    }

    /// Changes the rate, also for those who wait already. Slots that were given out keep their
    /// length in bytes: what was promised and not yet due is worked off at the new rate.
    pub fn set_rate(&self, now: Instant, rate: Option<BytesPerSec>) {
        let mut state = self.lock();
        // Without a limit nothing is owed: neither now nor once there is one again.
        let is_limited = state.rate.is_some() && rate.is_some();
        let before = if is_limited { state.due(now) } else { state.given.max(state.due(now)) };
        *state = State { rate, epoch: now, before, given: state.given };
    }

    /// The most bytes to send in one piece: 2 ms worth, but at least a page. `None` without a
    /// limit.
    pub fn slice(&self) -> Option<ByteCount> {
        let rate = self.lock().rate?;
        let bytes = u64::try_from(work_in(rate, SLICE) / WORK_PER_BYTE).unwrap_or(u64::MAX);
        Some(ByteCount(bytes.max(PAGE_SIZE)))
    }

    /// Takes the next slot for `bytes` bytes. Each call takes a slot of its own, so of several
    /// channels each gets another moment. `now` may go back a little, as it does between threads.
    pub fn reserve(&self, now: Instant, bytes: ByteCount) -> Slot {
        let mut state = self.lock();
        let Some(rate) = state.rate else { return Slot(0) };
        let due = state.due(now);
        // What was not used in time is lost, but for a little: a channel that woke late, or a
        // pause between rounds, must not lower the rate by much, nor bring a burst.
        let begin = state.given.max(due.saturating_sub(work_in(rate, CATCH_UP)));
        state.given = begin.saturating_add(u128::from(bytes.0) * WORK_PER_BYTE);
        Slot(begin)
    }

    /// How long from `now` until a slot begins, at the rate of the moment; zero if it has.
    pub fn wait(&self, now: Instant, slot: Slot) -> Duration {
        let state = self.lock();
        let Some(rate) = state.rate else { return Duration::ZERO };
        time_for(rate, slot.0.saturating_sub(state.due(now)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held, and numbers can't be left half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// What the link could have carried until `now`.
    fn due(&self, now: Instant) -> Work {
        let since = self.rate.map_or(0, |rate| work_in(rate, now.since(self.epoch)));
        self.before.saturating_add(since)
    }
}

const WORK_PER_BYTE: Work = 1_000_000_000;

fn work_in(rate: BytesPerSec, time: Duration) -> Work {
    u128::from(rate.0.max(1)).saturating_mul(time.as_nanos())
}

/// Rounded up, so that nobody is early.
fn time_for(rate: BytesPerSec, work: Work) -> Duration {
    let nanos = work.div_ceil(u128::from(rate.0.max(1)));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
