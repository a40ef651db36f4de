//! Processor sharing: jobs that all go on at one speed, which changes.

use crate::clock::{Ps, ceil, float};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Jobs that share something evenly. Each has an amount of work, in picoseconds at full speed; all
/// work at the same speed at a time, so the order of their ends is known when they begin, and a
/// change costs O(log n) however many there are.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// Work that a job which was here from the begin would have got.
    done: f64,
    speed: f64,
    now: Ps,
    /// When they end, in terms of `done`; non-negative floats sort as their bits do.
    jobs: BinaryHeap<Reverse<(u64, u64)>>,
}

/// A job's end and the rounding of time: less than this is done.
const ROUNDING: f64 = 2.0;

impl Sharing {
    pub(crate) fn new() -> Sharing {
        Sharing { done: 0.0, speed: 1.0, now: 0, jobs: BinaryHeap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    fn pass_to(&mut self, now: Ps) {
        self.done += float(now - self.now) * self.speed;
        self.now = now;
    }

    /// The speed from `now` on; above zero.
    pub(crate) fn set_speed(&mut self, now: Ps, speed: f64) {
        debug_assert!(speed > 0.0, "nothing would ever end");
        if speed.to_bits() != self.speed.to_bits() {
            self.pass_to(now);
            self.speed = speed;
        }
    }

    pub(crate) fn add(&mut self, now: Ps, work: Ps, job: u64) {
        self.pass_to(now);
        self.jobs.push(Reverse(((self.done + float(work)).to_bits(), job)));
    }

    /// When the next job ends, at this speed.
    pub(crate) fn next(&self) -> Option<Ps> {
        let Reverse((end, _)) = self.jobs.peek()?;
        let left = (f64::from_bits(*end) - self.done).max(0.0);
        Some(self.now + ceil(left / self.speed))
    }

    /// The job that has ended by `now`, one at a time.
    pub(crate) fn take_done(&mut self, now: Ps) -> Option<u64> {
        self.pass_to(now);
        let Reverse((end, job)) = self.jobs.peek()?;
        if f64::from_bits(*end) > self.done + ROUNDING {
            return None;
        }
        let job = *job;
        self.jobs.pop();
        Some(job)
    }
}

#[cfg(test)]
mod tests {
    use super::Sharing;

    #[test]
    fn two_jobs_take_as_long_as_both_alone() {
        let mut shared = Sharing::new();
        shared.add(0, 1_000_000, 1);
        shared.set_speed(0, 1.0);
        assert_eq!(shared.next(), Some(1_000_000));
        shared.add(400_000, 1_000_000, 2);
        shared.set_speed(400_000, 0.5);
        assert_eq!(shared.next(), Some(1_600_000));
        assert_eq!(shared.take_done(1_600_000), Some(1));
        assert_eq!(shared.take_done(1_600_000), None);
        shared.set_speed(1_600_000, 1.0);
        assert_eq!(shared.next(), Some(2_000_000));
        assert_eq!(shared.take_done(2_000_000), Some(2));
        assert_eq!((shared.next(), shared.len()), (None, 0));
    }
}
