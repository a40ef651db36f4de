//! A host's clock, which began at another moment than the world's and runs faster or slower.

use martlet_simulation::Chance;
use martlet_units::Instant;

/// Up to ten days since its boot.
const AHEAD_NS_MAX: u64 = 864_000 * 1_000_000_000;
/// A little less than what the protocol expects of two clocks at most.
const DRIFT_PER_MILLION_MAX: u64 = 990;

#[derive(Clone, Copy, Debug)]
pub(crate) struct HostClock {
    ahead_ns: u64,
    per_million: i128,
}

impl HostClock {
    pub(crate) fn new(seed: u64) -> HostClock {
        // Chance of its own: a seed's faults are as they were.
        let mut chance = Chance::new(seed ^ 0x0063_6c6f_636b);
        let drift = i128::from(chance.between(0, 2 * DRIFT_PER_MILLION_MAX));
        HostClock {
            ahead_ns: chance.between(0, AHEAD_NS_MAX),
            per_million: 1_000_000 + drift - i128::from(DRIFT_PER_MILLION_MAX),
        }
    }

    /// What it shows at a moment of the world.
    pub(crate) fn at(self, world: Instant) -> Instant {
        let passed = i128::from(world.0) * self.per_million / 1_000_000;
        Instant(u64::try_from(passed).unwrap_or(u64::MAX).saturating_add(self.ahead_ns))
    }

    /// When it shows this or a little more.
    pub(crate) fn when(self, shows: Instant) -> Instant {
        let passed = i128::from(shows.0.saturating_sub(self.ahead_ns));
        let world = passed * 1_000_000 / self.per_million + 2;
        Instant(u64::try_from(world).unwrap_or(u64::MAX))
    }
}
