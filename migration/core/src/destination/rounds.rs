//! Counts barriers: a round is in when its barrier came on every channel.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What all channels of an attempt count together. A channel can't run ahead: the next round's
/// barrier is an error until the source was told that this one is in, as it waits for that.
#[derive(Debug)]
pub struct RoundCount {
    channels: u64,
    /// Barriers of all channels.
    passed: AtomicU64,
    /// Rounds of which the source was told that they are in.
    told: AtomicU32,
}

impl RoundCount {
    /// Nothing has come on these channels.
    pub fn new(channels: usize) -> RoundCount {
        let (passed, told) = (AtomicU64::new(0), AtomicU32::new(0));
        RoundCount { channels: channels as u64, passed, told }
    }

    /// The barrier of `round` came on a channel that has passed those below `next`. Returns whether
    /// the round is in; the error says what is wrong with the barrier.
    pub fn pass(&self, next: u32, round: u32) -> Result<bool, String> {
        if round != next {
            return Err(format!("the barrier of round {round} where {next}'s was expected"));
        }
        // The source's barrier answers a message that was sent after the store.
        if round > self.told.load(Ordering::Relaxed) {
            return Err(format!("the barrier of round {round} before the round below was in"));
        }
        // Pairs with itself on the other channels: whoever completes the round has seen all pages.
        let passed = self.passed.fetch_add(1, Ordering::AcqRel) + 1;
        Ok(passed == (u64::from(round) + 1) * self.channels)
    }

    /// The source is being told that a round is in.
    pub fn tell(&self, round: u32) {
        self.told.store(round.saturating_add(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_in_with_its_last_barrier() {
        let count = RoundCount::new(2);
        for round in 0..3 {
            assert_eq!(count.pass(round, round), Ok(false));
            assert_eq!(count.pass(round, round), Ok(true));
            count.tell(round);
        }
    }

    #[test]
    fn barriers_come_in_order_and_one_at_a_time() {
        let count = RoundCount::new(2);
        assert!(count.pass(0, 1).is_err() && count.pass(0, u32::MAX).is_err());
        assert_eq!(count.pass(0, 0), Ok(false));
        assert!(count.pass(1, 1).is_err(), "the other channel is not so far");
        assert_eq!(count.pass(0, 0), Ok(true));
        assert!(count.pass(1, 1).is_err(), "the source does not know yet");
        count.tell(0);
        assert_eq!(count.pass(1, 1), Ok(false));
    }
}
