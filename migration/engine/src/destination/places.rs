//! The places of connections that belong nowhere yet, and who makes room for whom.

use martlet_transport::{ControlLink, Greeting, Stream, reply};
use martlet_units::Instant;
use martlet_wire::hello::{HelloReply, Status};
use rustix::event::PollFlags;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

/// A connection that belongs nowhere yet.
pub(super) struct Connection {
    pub(super) speaking: Speaking,
    /// It is closed then.
    pub(super) deadline: Instant,
    /// The host that it comes from, by [`host_of`], if that is known.
    pub(super) from: Option<IpAddr>,
}

/// What stands for the host at an address. By IPv6 a host commonly has all addresses of a /64 for
/// the asking, and would be as many hosts as it makes connections.
pub(super) fn host_of(address: IpAddr) -> IpAddr {
    const INTERFACE_BITS: u32 = 64;
    match address.to_canonical() {
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() >> INTERFACE_BITS << INTERFACE_BITS).into()
        }
        address @ IpAddr::V4(_) => address,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_wire::frame::Reader;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_host_with_many_addresses_takes_no_place_of_another() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let asking = |from: &str, deadline| {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            drop(listener.accept().unwrap());
            let link = ControlLink::new(Stream::from_tcp(stream).unwrap(), Reader::Answerer);
            let from = Some(host_of(from.parse().unwrap()));
            Connection { speaking: Speaking::Asking(link), deadline: Instant(deadline), from }
        };
        for other in ["2001:db8:0:2::1", "192.0.2.1", "::ffff:192.0.2.1"] {
            let mut places = Places::default();
            places.keep(asking(other, 0));
            for i in 1..=Standing::Asking.places() {
                places.keep(asking(&format!("2001:db8:0:1:{i:x}::{i:x}"), 1));
            }
            let host = host_of(other.parse().unwrap());
            assert!(places.iter().any(|it| it.from == Some(host)), "{other}");
            assert_eq!(places.iter().count(), Standing::Asking.places());
        }
    }

    #[test]
    fn hosts_by_ipv4_are_told_apart_however_they_are_written() {
        let [one, mapped, two] = ["192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"]
            .map(|address| host_of(address.parse().unwrap()));
        assert!(one == mapped && one != two);
    }
}
