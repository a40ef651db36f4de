//! Signs of life. A reliable connection notices a lost peer only by a request that is not
//! acknowledged; an idle one, and a destination's always is, never does.

use martlet_units::Instant;
use std::time::Duration;

/// How often each side says something.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// After this long without a word the peer counts as lost. As long as the main connection's
/// deadline halved, so that RDMA gives up first and the pages can still take another way.
pub const HEARTBEAT_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Heartbeat {
    next: Instant,
    heard: Instant,
}

impl Heartbeat {
    pub(super) fn new(now: Instant) -> Heartbeat {
        Heartbeat { next: now.after(HEARTBEAT_INTERVAL), heard: now }
    }

    pub(super) fn on_message(&mut self, now: Instant) {
        self.heard = self.heard.max(now);
    }

    /// Whether it is time to say something.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let due = self.next <= now;
        if due {
            self.next = now.after(HEARTBEAT_INTERVAL);
        }
        due
    }

    /// For how long the peer has been silent, if that is too long.
    pub(super) fn is_lost(&self, now: Instant) -> Option<Duration> {
        let silent = now.since(self.heard);
        (silent >= HEARTBEAT_DEADLINE).then_some(silent)
    }

    pub(super) fn timeout(&self) -> Instant {
        self.next.min(self.heard.after(HEARTBEAT_DEADLINE))
    }
}
