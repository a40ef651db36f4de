//! Chance under a seed.

/// A small generator (xoshiro256**, Blackman and Vigna 2018, seeded by SplitMix64). Not for
/// secrets. The sequence of a seed never changes: pinned seeds rely on it.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// The generator of a seed. Seeds that differ in one bit give unrelated sequences.
    pub fn new(seed: u64) -> Rng {
        let mut mixer = seed;
        let state = core::array::from_fn(|_| {
            mixer = mixer.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = mixer;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        });
        Rng { state }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let result = s1.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= shifted;
        *s3 = s3.rotate_left(45);
        result
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

    /// True once in `times` times.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A fair coin.
    pub fn coin(&mut self) -> bool {
        self.once_in(2)
    }

    /// 16 random bytes, for names and tokens.
    pub fn name(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&self.bits().to_le_bytes());
        high.copy_from_slice(&self.bits().to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_frozen() {
        let mut rng = Rng::new(0);
        // From the authors' C code, seeded by their splitmix64.
        assert_eq!(rng.bits(), 0x99ec_5f36_cb75_f2b4);
        assert_eq!(rng.bits(), 0xbf6e_1f78_4956_452a);
    }
}
