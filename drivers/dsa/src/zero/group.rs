//! Batches that were submitted under one grant.
//!
//! A gate gives leave for as many pages as keep a device busy for a while; a work queue takes as many
//! descriptors at once as its host allows, 32 unless someone raised it. So a grant may be several
//! batches, and is finished with the last of them.

use crate::gate::{Grant, Latency, Outcome};
use martlet_units::Instant;

/// One grant under way.
#[derive(Clone, Copy, Debug)]
struct Group {
    grant: Grant,
    /// When its first batch was submitted.
    since: Instant,
    /// Batches that the device has, and one more while batches are still being submitted.
    open: u32,
    worst: Option<Outcome>,
}

/// All grants of an engine. There is room for one for each slot, and one that is being submitted.
pub(super) struct Groups {
    groups: Vec<Option<Group>>,
}

impl Groups {
    pub(super) fn new(slots: usize) -> Groups {
        Groups { groups: vec![None; slots + 1] }
    }

    /// Begins with a grant. Its batches are [added](Groups::add), and then it is
    /// [ended](Groups::end) once for itself.
    pub(super) fn begin(&mut self, grant: Grant, since: Instant) -> usize {
        let free = self.groups.iter().position(Option::is_none);
        let free = free.expect("each grant but the newest has a slot of its own");
        self.groups[free] = Some(Group { grant, since, open: 1, worst: None });
        free
    }

    fn group(&mut self, group: usize) -> &mut Group {
        self.groups[group].as_mut().expect("a group that was begun and has not ended")
    }

    /// A batch was submitted.
    pub(super) fn add(&mut self, group: usize) {
        self.group(group).open += 1;
    }

    /// When its first batch was submitted.
    pub(super) fn since(&mut self, group: usize) -> Instant {
        self.group(group).since
    }

    /// A batch has ended like this, or the submission of batches has (with the outcome of one that
    /// was not taken). If it was the last, the grant and what became of it.
    pub(super) fn end(
        &mut self,
        group: usize,
        outcome: Option<Outcome>,
    ) -> Option<(Grant, Outcome)> {
        let entry = self.group(group);
        entry.worst = worse(entry.worst, outcome);
        entry.open -= 1;
        if entry.open > 0 {
            return None;
        }
        let Group { grant, worst, .. } = self.groups[group].take()?;
        // Without any batch and without a refusal there was no room for one in this engine.
        Some((grant, worst.unwrap_or(Outcome::Rejected)))
    }
}

fn worse(one: Option<Outcome>, two: Option<Outcome>) -> Option<Outcome> {
    let (one, two) = match (one, two) {
        (Some(one), Some(two)) => (one, two),
        (one, two) => return one.or(two),
    };
    Some(match (one, two) {
        (
            Outcome::Completed { latency: one, faulted },
            Outcome::Completed { latency: two, faulted: more },
        ) => {
            Outcome::Completed { latency: longer(one, two), faulted: faulted.saturating_add(more) }
        }
        _ if rank(one) >= rank(two) => one,
        _ => two,
    })
}

fn rank(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Completed { .. } => 0,
        Outcome::Rejected => 1,
        Outcome::Failed => 2,
        Outcome::TimedOut => 3,
        Outcome::Gone => 4,
    }
}

/// The latency of both, of which one at least was waited for if the result says so.
fn longer(one: Latency, two: Latency) -> Latency {
    match (one, two) {
        (Latency::AtMost(one), Latency::AtMost(two)) => Latency::AtMost(one.max(two)),
        (
            Latency::Measured(one) | Latency::AtMost(one),
            Latency::Measured(two) | Latency::AtMost(two),
        ) => Latency::Measured(one.max(two)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const GRANT: Grant = Grant { queue: 0, tries: 1, pages: 128, ahead: 0, at: Instant(5) };

    fn done(latency: Latency, faulted: u32) -> Option<Outcome> {
        Some(Outcome::Completed { latency, faulted })
    }

    #[test]
    fn a_grant_is_finished_with_its_last_batch() {
        let mut groups = Groups::new(2);
        let one = groups.begin(GRANT, Instant(9));
        assert_eq!(groups.since(one), Instant(9));
        groups.add(one);
        groups.add(one);
        let (short, long) = (Duration::from_micros(5), Duration::from_micros(6));
        assert_eq!(groups.end(one, done(Latency::Measured(short), 1)), None);
        assert_eq!(groups.end(one, None), None);
        let end = groups.end(one, done(Latency::AtMost(long), 2)).unwrap();
        let outcome = Outcome::Completed { latency: Latency::Measured(long), faulted: 3 };
        assert_eq!(end, (GRANT, outcome));
    }

    #[test]
    fn the_worst_that_happened_is_told() {
        let mut groups = Groups::new(1);
        let one = groups.begin(GRANT, Instant(0));
        groups.add(one);
        assert_eq!(groups.end(one, Some(Outcome::Rejected)), None);
        let end = groups.end(one, done(Latency::AtMost(Duration::ZERO), 0));
        assert_eq!(end, Some((GRANT, Outcome::Rejected)));
        let two = groups.begin(GRANT, Instant(0));
        assert_eq!(groups.end(two, None), Some((GRANT, Outcome::Rejected)));
    }
}
