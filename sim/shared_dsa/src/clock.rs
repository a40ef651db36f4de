//! Virtual time in picoseconds, chance, and what happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A moment in picoseconds: fine enough that no rounding adds up to anything.
pub(crate) type Ps = u64;

/// A duration in picoseconds.
pub(crate) fn ps(time: Duration) -> Ps {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

/// `count` times a duration, in picoseconds.
pub(crate) fn times(time: Duration, count: u32) -> Ps {
    ps(time) * u64::from(count)
}

/// As a floating-point number, for rates.
#[expect(clippy::cast_precision_loss, reason = "rates need no more than 52 bits")]
pub(crate) fn float(value: u64) -> f64 {
    value as f64
}

/// A non-negative number, rounded up.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
pub(crate) fn ceil(value: f64) -> u64 {
    value.ceil() as u64
}

/// SplitMix64 (Steele, Lea, Flood 2014). A seed gives the same sequence for ever.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not zero.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }
}

/// Events in the order of their time; at the same time in the order in which they were put in.
#[derive(Debug)]
pub(crate) struct Queue<Event> {
    count: u64,
    heap: BinaryHeap<Reverse<Entry<Event>>>,
}

#[derive(Debug)]
struct Entry<Event> {
    at: Ps,
    number: u64,
    event: Event,
}

impl<Event> PartialEq for Entry<Event> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<Event> Eq for Entry<Event> {}

impl<Event> PartialOrd for Entry<Event> {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<Event> Ord for Entry<Event> {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<Event> Queue<Event> {
    pub(crate) fn new() -> Queue<Event> {
        Queue { count: 0, heap: BinaryHeap::new() }
    }

    pub(crate) fn put(&mut self, at: Ps, event: Event) {
        self.count += 1;
        self.heap.push(Reverse(Entry { at, number: self.count, event }));
    }

    /// When the next event is.
    pub(crate) fn next(&self) -> Option<Ps> {
        self.heap.peek().map(|entry| entry.0.at)
    }

    pub(crate) fn take(&mut self) -> Option<(Ps, Event)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}
