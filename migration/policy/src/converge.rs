//! When to switch over, and what to do until then.

use crate::Prediction;
use core::time::Duration;
use martlet_units::PageCount;

/// The last pages may take this part of the rest of the blackout before another round is worth it.
const PAGES_SHARE: u32 = 10;
/// ... or this long, however short the rest is.
const PAGES_FLOOR: Duration = Duration::from_micros(50);
/// A dirty set this small can't be made smaller: a guest's timer and its stack dirty as much.
const DIRTY_FLOOR: PageCount = PageCount(8);
/// Rounds in a row that did not make the dirty set smaller, after which the guest is taken to have
/// no quieter moment.
const STAGNANT_ROUNDS: u32 = 2;
/// The same, if the dirty set is larger just now than it was before: wait for it to shrink again.
const STAGNANT_ROUNDS_IN_A_BURST: u32 = 6;
/// Rounds after which nothing but the limit counts.
pub const POLISH_ROUNDS_MAX: u32 = 50;
/// Shortest round while no round can help: the dirty set is as small as it gets and the blackout
/// would still be too long. Without it a tiny guest would go round thousands of times a second.
const IDLE_ROUND_MIN: Duration = Duration::from_millis(10);

/// Rounds in a row that the guest dirtied memory faster than the link carries it, before time is
/// taken from it.
const FAST_ROUNDS: u32 = 2;
const THROTTLE_FIRST_PERCENT: u8 = 20;
const THROTTLE_STEP_PERCENT: u8 = 10;
/// Most of a guest's time that is taken away.
pub const THROTTLE_PERCENT_MAX: u8 = 99;

/// Whether time may be taken from a guest that dirties memory faster than the link carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoConverge {
    /// The guest keeps its speed, and the migration may never end.
    Off,
    /// The guest is slowed down step by step.
    On,
}

/// What a round brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundResult {
    /// Pages that the round handed out: with content or zero.
    pub sent: PageCount,
    /// Pages that are dirty now, after a sync at its end.
    pub dirty: PageCount,
    /// From the first page handed out until the barrier was passed.
    pub duration: Duration,
    /// The blackout, were the guest stopped now with these dirty pages.
    pub prediction: Prediction,
}

/// What to do after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send the dirty pages while the guest runs.
    NextRound {
        /// Share of the guest's time to take away from now on; 0 to 99. It never falls during an
        /// attempt. Whoever ends the attempt, in success or failure, sets it to zero.
        throttle_percent: u8,
        /// Wait this long first: the round would have next to nothing to do.
        rest: Duration,
    },
    /// Stop the guest now: the predicted blackout fits the limit and would not become noticeably
    /// shorter.
    Switchover,
}

/// Decides after each round. One for each attempt.
///
/// The guest is stopped only if the predicted blackout fits the limit: there is no round after
/// which that is given up. If it fits, further rounds go on as long as they make the blackout
/// noticeably shorter, because a user's limit is what he can bear, not what he wants. They end when
/// the last pages are a small part of the blackout, or when rounds no longer make the dirty set
/// smaller. That takes [`POLISH_ROUNDS_MAX`] rounds at most.
#[derive(Clone, Debug)]
pub struct Convergence {
    auto_converge: AutoConverge,
    rounds: u32,
    /// The dirty set that rounds have to beat by a fifth.
    dirty_to_beat: Option<PageCount>,
    /// Rounds since then that did not.
    stagnant_rounds: u32,
    fast_rounds: u32,
    throttle_percent: u8,
}

impl Convergence {
    /// For a new attempt.
    pub fn new(auto_converge: AutoConverge) -> Convergence {
        Convergence {
            auto_converge,
            rounds: 0,
            dirty_to_beat: None,
            stagnant_rounds: 0,
            fast_rounds: 0,
            throttle_percent: 0,
        }
    }

    /// Takes in what a round brought and decides. The limit may change from call to call.
    pub fn after_round(&mut self, result: &RoundResult, downtime_limit: Duration) -> Decision {
        self.rounds = self.rounds.saturating_add(1);
        let near_best = self.note_dirty(result.dirty);
        let fits = result.prediction.total() <= downtime_limit;
        let polished = self.is_polished(result, near_best);
        if fits && polished {
            return Decision::Switchover;
        }
        // Slowing the guest down helps only if its pages are what makes the blackout too long.
        let pages_are_to_blame = !fits && result.prediction.fixed() < downtime_limit;
        self.throttle(result, pages_are_to_blame);
        let rest = if !fits && is_small(result) {
            IDLE_ROUND_MIN.saturating_sub(result.duration)
        } else {
            Duration::ZERO
        };
        Decision::NextRound { throttle_percent: self.throttle_percent, rest }
    }

    /// Whether the guest dirties memory faster than the link carries it and nothing more will be
    /// done about that: the migration does not end by itself.
    pub fn is_outrun(&self) -> bool {
        let can_throttle =
            self.auto_converge == AutoConverge::On && self.throttle_percent < THROTTLE_PERCENT_MAX;
        self.fast_rounds >= FAST_ROUNDS && !can_throttle
    }

    /// Changes whether time may be taken from the guest from now on.
    pub fn set_auto_converge(&mut self, auto_converge: AutoConverge) {
        self.auto_converge = auto_converge;
    }

    /// What is taken from the guest now, in per cent.
    pub fn throttle_percent(&self) -> u8 {
        self.throttle_percent
    }

    /// Counts rounds in which the dirty set did not get smaller by a fifth; it may take two of
    /// them for that, as a guest almost as fast as the link still gains by each. Returns whether
    /// this dirty set is about as small as the one to beat.
    fn note_dirty(&mut self, dirty: PageCount) -> bool {
        let scaled = |count: PageCount, factor: u64| count.0.saturating_mul(factor);
        match self.dirty_to_beat {
            Some(to_beat) if scaled(dirty, 5) > scaled(to_beat, 4) => {
                self.stagnant_rounds = self.stagnant_rounds.saturating_add(1);
                scaled(dirty, 4) <= scaled(to_beat, 5)
            }
            Some(_) | None => {
                self.dirty_to_beat = Some(dirty);
                self.stagnant_rounds = 0;
                true
            }
        }
    }

    /// Whether another round would not make the blackout noticeably shorter. Does not depend on
    /// the limit, so that a lower limit never makes a migration switch over earlier.
    fn is_polished(&self, result: &RoundResult, near_best: bool) -> bool {
        let rounds_max = if near_best { STAGNANT_ROUNDS } else { STAGNANT_ROUNDS_IN_A_BURST };
        is_small(result) || self.stagnant_rounds >= rounds_max || self.rounds >= POLISH_ROUNDS_MAX
    }

    /// Raises the throttle if the guest keeps dirtying memory faster than the link carries it.
    fn throttle(&mut self, result: &RoundResult, pages_are_to_blame: bool) {
        let fast = result.dirty.0.saturating_mul(2) >= result.sent.0 && !is_small(result);
        if !pages_are_to_blame || !fast {
            self.fast_rounds = 0;
            return;
        }
        self.fast_rounds = self.fast_rounds.saturating_add(1);
        if self.auto_converge == AutoConverge::Off {
            return;
        }
        if self.throttle_percent > 0 {
            let more = self.throttle_percent.saturating_add(THROTTLE_STEP_PERCENT);
            self.throttle_percent = more.min(THROTTLE_PERCENT_MAX);
        } else if self.fast_rounds >= FAST_ROUNDS {
            self.throttle_percent = THROTTLE_FIRST_PERCENT;
        }
    }
}

/// Whether sending the dirty pages takes so little of the blackout that fewer would not matter.
fn is_small(result: &RoundResult) -> bool {
    let enough = (result.prediction.fixed() / PAGES_SHARE).max(PAGES_FLOOR);
    result.dirty <= DIRTY_FLOOR || result.prediction.final_pages <= enough
}

#[cfg(test)]
#[path = "converge_tests.rs"]
mod tests;
