//! Chance under a seed.

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Not for
/// secrets. The sequence of a seed never changes: pinned seeds rely on it, which no crate of random
/// numbers promises for numbers below a limit.
#[derive(Clone, Debug)]
pub struct Chance(u64);

/// What the state grows by at each number: 2^64 divided by the golden ratio, made odd.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Chance {
    /// The generator of a seed. Seeds that differ in one bit give unrelated sequences.
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        scatter(self.0)
    }

    /// A random byte.
    pub fn byte(&mut self) -> u8 {
        let [byte, ..] = self.bits().to_le_bytes();
        byte
    }

    /// 16 random bytes, for names and tokens.
    pub fn name(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&self.bits().to_le_bytes());
        high.copy_from_slice(&self.bits().to_le_bytes());
        bytes
    }

    /// A number below `limit`, which is not zero. The bias is below one in 2^32 for the small
    /// limits of a simulation.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "nothing is below zero");
        self.bits() % limit
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// An index into a slice of this length.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).expect("below a length")
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// True once in `times` times.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A fair coin.
    pub fn coin(&mut self) -> bool {
        self.once_in(2)
    }
}

/// A number whose every bit depends on all bits of `value`: the output function of [`Chance`], for
/// seeds that are made of other seeds.
pub fn scatter(value: u64) -> u64 {
    let mixed = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of two seeds, as the authors' C code gives them.
    #[test]
    fn sequences_are_frozen() {
        let mut chance = Chance::new(0);
        assert_eq!(chance.bits(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(chance.bits(), 0x6e78_9e6a_a1b9_65f4);
        let mut chance = Chance::new(1_234_567);
        assert_eq!(chance.bits(), 6_457_827_717_110_365_317);
        assert_eq!(chance.bits(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn numbers_keep_to_their_limits() {
        let mut chance = Chance::new(7);
        let mut seen = [false; 5];
        for _ in 0..200 {
            seen[chance.index(5)] = true;
            assert!((3..=4).contains(&chance.between(3, 4)));
            assert!(chance.once_in(1));
        }
        assert_eq!(seen, [true; 5]);
    }
}
