//! Sets of queue numbers that any thread may add to.

use crate::num::{low32, to_u64};
use std::sync::atomic::{AtomicU64, Ordering};

/// A set of queue numbers.
#[derive(Debug)]
pub(crate) struct Bits(Vec<AtomicU64>);

impl Bits {
    /// An empty set of numbers below `limit`.
    pub(crate) fn new(limit: u16) -> Bits {
        Bits((0..limit.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Adds one; a number beyond the limit is ignored. After everything that this thread did
    /// before.
    pub(crate) fn set(&self, number: u16) {
        if let Some(word) = self.0.get(usize::from(number / 64)) {
            word.fetch_or(1 << (number % 64), Ordering::SeqCst);
        }
    }

    /// Removes one.
    pub(crate) fn clear(&self, number: u16) {
        if let Some(word) = self.0.get(usize::from(number / 64)) {
            word.fetch_and(!(1 << (number % 64)), Ordering::SeqCst);
        }
    }

    /// Whether it is in.
    pub(crate) fn has(&self, number: u16) -> bool {
        let word = self.0.get(usize::from(number / 64));
        word.is_some_and(|word| word.load(Ordering::SeqCst) >> (number % 64) & 1 == 1)
    }

    /// Whether there is any.
    pub(crate) fn any(&self) -> bool {
        self.0.iter().any(|word| word.load(Ordering::SeqCst) != 0)
    }

    /// Moves all into another set of the same limit.
    pub(crate) fn drain_into(&self, other: &Bits) {
        for (from, to) in self.0.iter().zip(&other.0) {
            if from.load(Ordering::SeqCst) != 0 {
                to.fetch_or(from.swap(0, Ordering::SeqCst), Ordering::SeqCst);
            }
        }
    }

    /// Takes all, in order; `body` may add again.
    pub(crate) fn take(&self, mut body: impl FnMut(u16)) {
        for (index, word) in self.0.iter().enumerate() {
            if word.load(Ordering::SeqCst) == 0 {
                continue;
            }
            each(index, word.swap(0, Ordering::SeqCst), &mut body);
        }
    }

    /// Looks at all, in order.
    pub(crate) fn look(&self, mut body: impl FnMut(u16)) {
        for (index, word) in self.0.iter().enumerate() {
            each(index, word.load(Ordering::SeqCst), &mut body);
        }
    }
}

fn each(index: usize, word: u64, body: &mut impl FnMut(u16)) {
    let mut left = word;
    while left != 0 {
        let number = to_u64(index) * 64 + u64::from(left.trailing_zeros());
        body(crate::num::low16(low32(number)));
        left &= left - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_out_in_order() {
        let (bits, other) = (Bits::new(130), Bits::new(130));
        for number in [129, 0, 64, 63, 500] {
            bits.set(number);
        }
        bits.clear(64);
        bits.drain_into(&other);
        assert!(!bits.any() && other.any());
        let mut found = Vec::new();
        other.take(|number| found.push(number));
        assert_eq!(found, [0, 63, 129]);
        assert!(!other.any());
    }
}
