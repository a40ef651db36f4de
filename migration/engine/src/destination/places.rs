//! The places of connections that belong nowhere yet, and who makes room for whom.

use martlet_transport::{ControlLink, Greeting, Stream, reply};
use martlet_units::Instant;
use martlet_wire::hello::{HelloReply, Status};
use rustix::event::PollFlags;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;

/// A connection that belongs nowhere yet.
pub(super) struct Connection {
    pub(super) speaking: Speaking,
    /// It is closed then.
    pub(super) deadline: Instant,
    /// The host that it comes from, if that is known.
    pub(super) from: Option<IpAddr>,
}

pub(super) enum Speaking {
    /// Its hello is being read.
    Greeting(Greeting, Stream),
    /// A source waits, at this version, for the attempt of another one to end.
    Queueing(u16, Stream),
    /// A source was let in; its setup is being read.
    Introducing(ControlLink),
    /// Its query is.
    Asking(ControlLink),
}

impl Connection {
    pub(super) fn stream(&self) -> &Stream {
        match &self.speaking {
            Speaking::Greeting(_, stream) | Speaking::Queueing(_, stream) => stream,
            Speaking::Introducing(link) | Speaking::Asking(link) => link.stream(),
        }
    }

    /// What is waited for. Nobody listens to a source that queues, but its end is heard.
    pub(super) fn wanted(&self) -> PollFlags {
        match self.speaking {
            Speaking::Queueing(..) => PollFlags::empty(),
            _ => PollFlags::IN,
        }
    }

    fn standing(&self) -> Standing {
        match &self.speaking {
            Speaking::Greeting(greeting, _) if greeting.is_silent() => Standing::Silent,
            Speaking::Greeting(..) => Standing::Greeting,
            Speaking::Queueing(..) => Standing::Queueing,
            Speaking::Introducing(_) => Standing::Introducing,
            Speaking::Asking(_) => Standing::Asking,
        }
    }

    /// It has to make room, and is told so if it waits for a greeting.
    fn turn_away(self) {
        let refuse = |stream, status| drop(reply(stream, &HelloReply::refuse(status)));
        match &self.speaking {
            Speaking::Greeting(_, stream) => refuse(stream, Status::LIMIT),
            Speaking::Queueing(_, stream) => refuse(stream, Status::BUSY),
            Speaking::Introducing(_) | Speaking::Asking(_) => {}
        }
    }
}

/// How far a connection has come. Each standing has places of its own: however many come and say
/// nothing, none of those that have spoken goes for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Silent,
    Greeting,
    Queueing,
    Introducing,
    Asking,
}

impl Standing {
    const fn places(self) -> usize {
        match self {
            // Enough for a peer whose hello comes right behind its connection to be heard while
            // others connect as fast as they can.
            Standing::Silent => 512,
            Standing::Greeting => 32,
            Standing::Queueing | Standing::Introducing => 8,
            Standing::Asking => 64,
        }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Places {
    taken: Vec<Connection>,
}

impl Places {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.taken.iter()
    }

    /// Gives a connection a place, which may be that of another one.
    pub(super) fn keep(&mut self, connection: Connection) {
        let standing = connection.standing();
        if self.standing(standing).count() >= standing.places() {
            self.make_room(standing);
        }
        self.taken.push(connection);
    }

    /// Turns away one that has said nothing, if there is one: it may have what somebody else needs.
    pub(super) fn turn_away_a_silent_one(&mut self) -> bool {
        self.make_room(Standing::Silent)
    }

    /// Takes those out that are wanted. It is asked about each in the order of [`Places::iter`].
    pub(super) fn take(
        &mut self,
        mut is_wanted: impl FnMut(&Connection) -> bool,
    ) -> Vec<Connection> {
        self.taken.extract_if(.., |connection| is_wanted(connection)).collect()
    }

    fn standing(&self, standing: Standing) -> impl Iterator<Item = (usize, &Connection)> {
        self.taken.iter().enumerate().filter(move |(_, it)| it.standing() == standing)
    }

    /// Of those that stand there, of the host that has most places, the one that has it longest goes.
    fn make_room(&mut self, standing: Standing) -> bool {
        let mut places: HashMap<Option<IpAddr>, usize> = HashMap::new();
        for (_, connection) in self.standing(standing) {
            *places.entry(connection.from).or_default() += 1;
        }
        let goes = self
            .standing(standing)
            .max_by_key(|(_, it)| (places.get(&it.from), Reverse(it.deadline)))
            .map(|(at, _)| at);
        let Some(goes) = goes else { return false };
        self.taken.swap_remove(goes).turn_away();
        true
    }
}
