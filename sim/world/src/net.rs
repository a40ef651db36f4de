//! Time, what happens next, and the byte streams between the two hosts.

use martlet_simulation::{Agenda, Chance};
use martlet_transport::{Connection, Incoming, Outgoing};
use martlet_units::Instant;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A way that trickles carries one byte in this time.
const TRICKLE: Duration = Duration::from_secs(1);

/// What a flood brings: far more than anybody takes.
const FLOOD_BYTES: usize = 4 << 20;

/// A host, or the direction towards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Gives the guest away.
    Source,
    /// Takes it in.
    Destination,
}

impl Side {
    /// The other one.
    pub fn peer(self) -> Side {
        match self {
            Side::Source => Side::Destination,
            Side::Destination => Side::Source,
        }
    }

    fn index(self) -> usize {
        match self {
            Side::Source => 0,
            Side::Destination => 1,
        }
    }
}

/// One connection of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireId(usize);

/// The moment of the world, for those who may only look.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    pub(crate) fn now(&self) -> Instant {
        // Relaxed: one thread.
        Instant(self.0.load(Ordering::Relaxed))
    }
}

/// All that both hosts share: handed out as clones of one.
pub(crate) struct Net<Event> {
    clock: Clock,
    inner: RefCell<Inner<Event>>,
}

struct Inner<Event> {
    agenda: Agenda<Instant, Event>,
    chance: Chance,
    wires: Vec<Wire>,
    latency: Duration,
    capacity: usize,
}

/// What wires tell the world.
pub(crate) trait FromWire {
    /// Something may be read on `wire` at `to`, or its end.
    fn arrival(wire: WireId, to: Side) -> Self;

    /// There is room again for `from` to write.
    fn room(wire: WireId, from: Side) -> Self;
}

#[derive(Debug)]
struct Wire {
    /// Towards each side.
    ways: [Way; 2],
}

/// One direction of a connection, with what it holds.
#[derive(Debug, Default)]
struct Way {
    flying: VecDeque<(Instant, Vec<u8>)>,
    ready: VecDeque<u8>,
    /// Bytes of both.
    held: usize,
    /// When the last of it arrives.
    last: Instant,
    /// The writer's end, and when it is seen.
    closed: Option<Instant>,
    /// The reader does not read any more, or the connection was cut.
    is_broken: bool,
    is_reset: bool,
    is_silent: bool,
    held_until: Instant,
    /// One byte at a time; the next one at this moment.
    trickles: Option<Instant>,
    /// A peer that says this over and over, as fast as it is read, until it has said enough.
    flood: Vec<u8>,
    flood_left: usize,
    writer_waits: bool,
}

impl Way {
    /// Bytes that can be read now.
    fn available(&mut self, now: Instant, capacity: usize) -> usize {
        if self.is_silent || now < self.held_until {
            return 0;
        }
        while self.flying.front().is_some_and(|(at, _)| *at <= now) {
            let (_, bytes) = self.flying.pop_front().expect("there is one");
            self.ready.extend(bytes);
        }
        if !self.flood.is_empty() && self.flying.is_empty() {
            while self.ready.len() < capacity && self.flood_left > 0 {
                self.ready.extend(self.flood.iter());
                self.held += self.flood.len();
                self.flood_left = self.flood_left.saturating_sub(self.flood.len());
            }
        }
        match self.trickles {
            Some(next) if now < next => 0,
            Some(_) => self.ready.len().min(1),
            None => self.ready.len(),
        }
    }
}

/// What a way can do to its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// Both ends learn it at once; what was under way is lost.
    Reset,
    /// Both ends learn it behind what was under way.
    Close,
    /// Nothing arrives at this side any more, without a word.
    Silence(Side),
    /// Nothing arrives at this side before that.
    Hold(Side, Instant),
    /// One byte a second arrives at this side.
    Trickle(Side),
}

impl<Event: FromWire> Net<Event> {
    pub(crate) fn new(start: Instant, chance: Chance, latency: Duration, capacity: usize) -> Self {
        let clock = Clock(Arc::new(AtomicU64::new(start.0)));
        let (agenda, wires) = (Agenda::default(), Vec::new());
        let inner = RefCell::new(Inner { agenda, chance, wires, latency, capacity });
        Net { clock, inner }
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock.clone()
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn chance<T>(&self, take: impl FnOnce(&mut Chance) -> T) -> T {
        take(&mut self.inner.borrow_mut().chance)
    }

    pub(crate) fn put_at(&self, at: Instant, event: Event) {
        let at = at.max(self.now());
        self.inner.borrow_mut().agenda.put(at, event);
    }

    /// After about this many microseconds.
    pub(crate) fn put_after_about(&self, micros: u64, event: Event) {
        let nanos = self.chance(|chance| chance.between(micros * 200, micros * 2_000));
        self.put_at(self.now().after(Duration::from_nanos(nanos)), event);
    }

    /// The next event; its time is the present from now on.
    pub(crate) fn take(&self) -> Option<Event> {
        let (at, event) = self.inner.borrow_mut().agenda.take()?;
        self.clock.0.store(at.0, Ordering::Relaxed);
        Some(event)
    }

    /// A new connection; the source's end and the destination's.
    pub(crate) fn connect(self: &Rc<Self>) -> (WireId, End<Event>, End<Event>) {
        let mut inner = self.inner.borrow_mut();
        let wire = WireId(inner.wires.len());
        inner.wires.push(Wire { ways: [Way::default(), Way::default()] });
        let end = |side| End { net: Rc::clone(self), wire, side };
        (wire, end(Side::Source), end(Side::Destination))
    }

    /// Bytes that `from` wrote and its peer has not read.
    pub(crate) fn unread(&self, wire: WireId, from: Side) -> u64 {
        self.inner.borrow().wires[wire.0].ways[from.peer().index()].held as u64
    }

    pub(crate) fn harm(&self, wire: WireId, harm: Harm) {
        let now = self.now();
        let mut inner = self.inner.borrow_mut();
        let latency = inner.latency;
        let ways = &mut inner.wires[wire.0].ways;
        let mut told = Vec::new();
        match harm {
            Harm::Reset | Harm::Close => {
                for (way, to) in ways.iter_mut().zip([Side::Source, Side::Destination]) {
                    way.is_broken = true;
                    way.closed.get_or_insert(way.last.max(now.after(latency)));
                    if harm == Harm::Reset {
                        (way.is_reset, way.held) = (true, 0);
                        way.flying.clear();
                        way.ready.clear();
                    }
                    told.push((way.last.max(now.after(latency)), to));
                }
            }
            Harm::Silence(to) => ways[to.index()].is_silent = true,
            Harm::Hold(to, until) => {
                let way = &mut ways[to.index()];
                way.held_until = way.held_until.max(until);
                told.push((way.held_until, to));
            }
            Harm::Trickle(to) => ways[to.index()].trickles = Some(now),
        }
        for (at, to) in told {
            inner.agenda.put(at, Event::arrival(wire, to));
        }
        // Whoever waits for room learns of the end too.
        for from in [Side::Source, Side::Destination] {
            inner.agenda.put(now, Event::room(wire, from));
        }
    }

    /// From now on the peer of `to` says this, and nothing else.
    pub(crate) fn flood(&self, wire: WireId, to: Side, message: Vec<u8>) {
        let now = self.now();
        let mut inner = self.inner.borrow_mut();
        let way = &mut inner.wires[wire.0].ways[to.index()];
        (way.flood, way.flood_left) = (message, FLOOD_BYTES);
        inner.agenda.put(now, Event::arrival(wire, to));
    }
}

/// One end of a connection. Dropping it closes it.
pub(crate) struct End<Event: FromWire> {
    net: Rc<Net<Event>>,
    wire: WireId,
    side: Side,
}

impl<Event: FromWire> End<Event> {
    /// Breaks the connection, with all that is on its way and unread.
    pub(crate) fn reset(&self) {
        self.net.harm(self.wire, Harm::Reset);
    }

    pub(crate) fn wire(&self) -> WireId {
        self.wire
    }

    fn room(&self) -> io::Result<usize> {
        let mut inner = self.net.inner.borrow_mut();
        let capacity = inner.capacity;
        let way = &mut inner.wires[self.wire.0].ways[self.side.peer().index()];
        if way.is_broken {
            return Err(ErrorKind::BrokenPipe.into());
        }
        match capacity.saturating_sub(way.held) {
            0 => {
                way.writer_waits = true;
                Err(ErrorKind::WouldBlock.into())
            }
            room => Ok(room),
        }
    }

    fn put(&self, bytes: Vec<u8>) {
        let now = self.net.now();
        let mut inner = self.net.inner.borrow_mut();
        // Once in a while something waits in a queue for long.
        let queued = if inner.chance.once_in(60) { inner.chance.below(3_000_000) } else { 0 };
        let jitter = Duration::from_nanos(inner.chance.below(20_000) + queued);
        // About 1.3 GB/s.
        let width = Duration::from_nanos(bytes.len() as u64 * 3 / 4);
        let at = now.after(inner.latency + jitter);
        let way = &mut inner.wires[self.wire.0].ways[self.side.peer().index()];
        if !way.flood.is_empty() {
            return;
        }
        way.last = way.last.max(at).after(width);
        way.held += bytes.len();
        let at = way.last;
        way.flying.push_back((at, bytes));
        let to = self.side.peer();
        inner.agenda.put(at, Event::arrival(self.wire, to));
    }

    /// Gives what can be read now to `take`, which says how much of it was used.
    fn get(&self, take: impl FnOnce(&[u8]) -> io::Result<usize>) -> io::Result<usize> {
        let now = self.net.now();
        let mut inner = self.net.inner.borrow_mut();
        let (latency, capacity) = (inner.latency, inner.capacity);
        let way = &mut inner.wires[self.wire.0].ways[self.side.index()];
        let available = way.available(now, capacity);
        if available == 0 {
            let is_over = way.flying.is_empty() && way.ready.is_empty();
            let seen = way.closed.is_some_and(|at| at <= now) && now >= way.held_until;
            return Err(match () {
                () if way.is_silent => ErrorKind::WouldBlock,
                () if way.is_reset && seen => ErrorKind::ConnectionReset,
                () if is_over && seen => ErrorKind::UnexpectedEof,
                () => ErrorKind::WouldBlock,
            }
            .into());
        }
        let used = take(&way.ready.make_contiguous()[..available])?;
        way.ready.drain(..used);
        way.held -= used;
        let mut wakes = Vec::new();
        if let Some(next) = way.trickles.as_mut().filter(|_| used > 0) {
            *next = now.after(TRICKLE);
            wakes.push((*next, Event::arrival(self.wire, self.side)));
        }
        if way.writer_waits && used > 0 {
            way.writer_waits = false;
            wakes.push((now.after(latency), Event::room(self.wire, self.side.peer())));
        }
        for (at, event) in wakes {
            inner.agenda.put(at, event);
        }
        Ok(used)
    }
}

impl<Event: FromWire> Connection for End<Event> {
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.get(|bytes| {
            let used = bytes.len().min(buffer.len());
            buffer[..used].copy_from_slice(&bytes[..used]);
            Ok(used)
        })
    }

    fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.room()?.min(bytes.len());
        self.put(bytes[..taken].to_vec());
        Ok(taken)
    }

    fn send(&self, pieces: &mut Outgoing<'_>) -> io::Result<usize> {
        let mut bytes = vec![0; self.room()?];
        let taken = pieces.copy_to(&mut bytes)?;
        bytes.truncate(taken);
        self.put(bytes);
        Ok(taken)
    }

    fn receive(&self, pieces: Incoming<'_>) -> io::Result<usize> {
        self.get(|bytes| pieces.copy_from(bytes))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<Event: FromWire> Drop for End<Event> {
    fn drop(&mut self) {
        let now = self.net.now();
        let mut inner = self.net.inner.borrow_mut();
        let latency = inner.latency;
        let ways = &mut inner.wires[self.wire.0].ways;
        ways[self.side.index()].is_broken = true;
        let way = &mut ways[self.side.peer().index()];
        if way.closed.is_none() {
            let at = way.last.max(now.after(latency));
            way.closed = Some(at);
            let to = self.side.peer();
            inner.agenda.put(at, Event::arrival(self.wire, to));
            inner.agenda.put(now, Event::room(self.wire, to));
        }
    }
}
