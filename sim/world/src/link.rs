//! Connections: each direction keeps its order, connections overtake each other, any may break.

use crate::world::Payload;
use core::time::Duration;
use martlet_simulation::Chance;
use martlet_units::Instant;
use std::collections::VecDeque;

/// Which side of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Where the guest was booted.
    Source,
    /// Where it is to go.
    Destination,
}

impl Side {
    /// The other one.
    pub(crate) fn peer(self) -> Side {
        match self {
            Side::Source => Side::Destination,
            Side::Destination => Side::Source,
        }
    }
}

/// Which connection of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkId {
    /// The control connection.
    Control,
    /// A data channel.
    Data(u16),
}

/// How a connection breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Both ends are told. What was under way arrives before that, or is lost.
    Reset {
        /// Which of the two.
        delivered: bool,
    },
    /// The peer of `slow` is told at once; what is under way to `slow`, and the end, arrives only
    /// later.
    ResetLate {
        /// The side that learns of it late.
        slow: Side,
        /// How much later.
        by: Duration,
    },
    /// Nothing goes towards this side any more, and nobody is told.
    SilentTowards(Side),
    /// Nothing goes any way any more, and nobody is told.
    SilentBothWays,
}

/// One direction of a connection.
#[derive(Debug)]
pub(crate) struct Pipe {
    /// When the last thing put in comes out: nothing later comes out earlier.
    last: Instant,
    /// Sent things are lost.
    silent: bool,
    /// Nothing can be sent any more.
    closed: bool,
    /// Nothing comes out before this.
    held_until: Instant,
    /// What is held back, in its order.
    held: VecDeque<Payload>,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    to_source: Pipe,
    to_destination: Pipe,
    latency: Duration,
}

impl Link {
    /// A connection that was just made.
    pub(crate) fn new(now: Instant, latency: Duration) -> Link {
        let pipe = || Pipe {
            last: now,
            silent: false,
            closed: false,
            held_until: now,
            held: VecDeque::new(),
        };
        Link { to_source: pipe(), to_destination: pipe(), latency }
    }

    fn pipe(&mut self, to: Side) -> &mut Pipe {
        match to {
            Side::Source => &mut self.to_source,
            Side::Destination => &mut self.to_destination,
        }
    }

    /// When something sent now arrives; `None` if it is lost.
    pub(crate) fn send(&mut self, now: Instant, to: Side, chance: &mut Chance) -> Option<Instant> {
        let jitter = Duration::from_nanos(chance.below(100_000));
        // Once in a while something waits in a queue for long.
        let queued = if chance.once_in(60) { chance.below(3_000_000) } else { 0 };
        let latency = self.latency + jitter + Duration::from_nanos(queued);
        let pipe = self.pipe(to);
        if pipe.closed || pipe.silent {
            return None;
        }
        pipe.last = pipe.last.max(now.after(latency));
        Some(pipe.last)
    }

    /// Whether what arrives at `side` now really does.
    pub(crate) fn delivers(&mut self, to: Side) -> bool {
        !self.pipe(to).silent
    }

    /// Holds back all that is under way to `to`, and all that is sent meanwhile. Says when to
    /// [`Link::release`] it.
    pub(crate) fn hold(&mut self, now: Instant, to: Side, time: Duration) -> Instant {
        let pipe = self.pipe(to);
        pipe.held_until = pipe.held_until.max(now.after(time));
        pipe.held_until
    }

    /// Something has come to the end of its way to `to`: gives it back, or keeps it.
    pub(crate) fn arrive(&mut self, now: Instant, to: Side, payload: Payload) -> Option<Payload> {
        let pipe = self.pipe(to);
        if pipe.held_until > now || !pipe.held.is_empty() {
            pipe.held.push_back(payload);
            return None;
        }
        Some(payload)
    }

    /// What was held back and may go on now, the oldest first.
    pub(crate) fn release(&mut self, now: Instant, to: Side) -> Option<Payload> {
        let pipe = self.pipe(to);
        if pipe.held_until > now { None } else { pipe.held.pop_front() }
    }

    /// One end closes the connection. Says when `to` notices: after all that was sent to it.
    pub(crate) fn close_towards(&mut self, now: Instant, to: Side) -> Option<Instant> {
        let latency = self.latency;
        let pipe = self.pipe(to);
        if pipe.closed || pipe.silent {
            return None;
        }
        pipe.closed = true;
        pipe.last = pipe.last.max(now.after(latency));
        Some(pipe.last)
    }

    /// Loses what is under way to `to` and all that comes later, without a word.
    pub(crate) fn silence(&mut self, to: Side) {
        self.pipe(to).silent = true;
    }
}
