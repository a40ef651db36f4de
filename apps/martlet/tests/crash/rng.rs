//! Chance with a seed.

use std::time::Duration;

/// SplitMix64 (Steele, Lea and Flood, 2014): every seed is as good as any other.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to one below `end`. The bias is far below what any test here could notice.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        let index = usize::try_from(self.below(from.len() as u64)).expect("an index");
        from[index]
    }

    /// From nothing to `end`.
    pub(crate) fn time(&mut self, end: Duration) -> Duration {
        let nanos = u64::try_from(end.as_nanos()).expect("a short time");
        Duration::from_nanos(self.below(nanos.max(1)))
    }

    /// From 0 to `end`, each order of magnitude as likely as the others.
    pub(crate) fn magnitude(&mut self, end: u64) -> u64 {
        let bits = u64::from(64 - end.leading_zeros());
        let shift = self.below(bits + 1);
        self.below((1 << shift.min(62)).min(end.max(1)))
    }
}
