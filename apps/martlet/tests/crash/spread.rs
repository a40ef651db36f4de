//! Times and sizes by chance.

use martlet_simulation::Chance;
use std::time::Duration;

/// More that is left to chance here.
pub(crate) trait Spread {
    /// From nothing to `end`.
    fn time(&mut self, end: Duration) -> Duration;

    /// From 0 to `end`, each order of magnitude as likely as the others.
    fn magnitude(&mut self, end: u64) -> u64;
}

impl Spread for Chance {
    fn time(&mut self, end: Duration) -> Duration {
        let nanos = u64::try_from(end.as_nanos()).expect("a short time");
        Duration::from_nanos(self.below(nanos.max(1)))
    }

    fn magnitude(&mut self, end: u64) -> u64 {
        let bits = u64::from(64 - end.leading_zeros());
        let shift = self.below(bits + 1);
        self.below((1 << shift.min(62)).min(end.max(1)))
    }
}
