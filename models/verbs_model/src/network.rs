//! Two NICs and the link, moved by events.

use crate::pair::{End, State};
use crate::params::Params;
use crate::region::{Access, Key, Regions, Use};
use crate::work::{
    Completion, Fault, Link, Memory, Operation, PairId, Point, PostError, Request, Side, Status,
};
use martlet_fault_plan::FaultPlan;
use martlet_simulation::{Agenda, Chance};
use martlet_units::Instant;
use std::time::Duration;

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A side's port looks for something to send.
    Port(Side),
    /// A segment comes to the peer's memory.
    Arrive(Segment),
    /// What was read comes back to this side's memory.
    Return(Segment),
    /// This side hears that the other one ended the connection.
    Disconnect(Side, PairId),
    /// A request of this side is acknowledged.
    Acknowledge(Side, PairId, u64),
    /// A write with immediate data is tried again.
    Retry(Side, PairId),
    /// A request of this side fails; all before it are done by then.
    Fail(Side, PairId, u64, u32),
}

/// Bytes of a request on their way, or a read's request.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Segment {
    from: Side,
    pair: PairId,
    number: u64,
    /// In the peer's memory.
    at: u64,
    key: u32,
    length: u64,
    bytes: Vec<u8>,
    /// Where a read's bytes go at home, and by which key.
    home: Option<(u64, u32)>,
}

#[derive(Debug, Default)]
struct Nic {
    regions: Regions,
    /// The wire is busy until then.
    busy: Instant,
    /// Its next look is scheduled for then.
    looks: Option<Instant>,
    next_pair: usize,
}

#[derive(Debug)]
struct Pair {
    ends: [End; 2],
    skew: Duration,
}

/// Two NICs, A and B, joined by a link.
#[derive(Debug)]
pub struct Network {
    params: Params,
    now: Instant,
    nics: [Nic; 2],
    pairs: Vec<Pair>,
    events: Agenda<Instant, Event>,
    chance: Chance,
    faults: FaultPlan<Point, Fault>,
    is_cut: bool,
}

impl Network {
    /// A network at time 0. `seed` decides everything that is left to chance.
    pub fn new(params: Params, seed: u64, faults: FaultPlan<Point, Fault>) -> Network {
        Network {
            params,
            now: Instant(0),
            nics: [Nic::default(), Nic::default()],
            pairs: Vec::new(),
            events: Agenda::default(),
            chance: Chance::new(seed),
            faults,
            is_cut: false,
        }
    }

    /// Its constants.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Connects two queue pairs with so many send slots each.
    pub fn connect(&mut self, slots: usize) -> PairId {
        let skew = self.up_to(self.params.skew);
        let end = || End::new(slots, self.params.rnr_retries);
        self.pairs.push(Pair { ends: [end(), end()], skew });
        PairId(self.pairs.len() - 1)
    }

    /// Sets how often this side's writes with immediate data are tried again; 7 is for ever.
    pub fn set_rnr_retries(&mut self, side: Side, pair: PairId, retries: u8) {
        self.pairs[pair.0].ends[side.place()].rnr_retries = retries;
    }

    /// Registers memory. Takes no time here: whoever calls spends [`Params::register_time`] first.
    pub fn register(&mut self, side: Side, address: u64, bytes: u64, access: Access) -> Key {
        self.nics[side.place()].regions.register(address, bytes, access)
    }

    /// Takes a key back; false if there is none such. Nothing is written or read by it any more.
    pub fn deregister(&mut self, side: Side, key: Key) -> bool {
        self.nics[side.place()].regions.deregister(key)
    }

    /// How many regions of this side its peer could write now: none if every queue pair of this
    /// side is down.
    pub fn writable_by_peer(&self, side: Side) -> usize {
        let any_up = self.pairs.iter().any(|pair| pair.ends[side.place()].state == State::Up);
        if any_up { self.nics[side.place()].regions.remote_writable() } else { 0 }
    }

    /// Posts requests of one side, in order.
    pub fn post(
        &mut self,
        side: Side,
        pair: PairId,
        now: Instant,
        list: &[Request],
    ) -> Result<(), PostError> {
        let end = &mut self.pairs[pair.0].ends[side.place()];
        for (posted, request) in list.iter().enumerate() {
            if end.state == State::Closed {
                return Err(PostError::Closed);
            }
            if !end.has_slot() {
                return Err(PostError::Full(posted));
            }
            end.post(*request, now);
        }
        self.look(side, now.after(self.params.doorbell));
        Ok(())
    }

    /// Posts a receive for one of the peer's writes with immediate data.
    pub fn post_receive(&mut self, side: Side, pair: PairId, id: u64) {
        self.pairs[pair.0].ends[side.place()].post_receive(id);
    }

    /// How a connection stands, as one side knows it.
    pub fn link(&self, side: Side, pair: PairId) -> Link {
        match self.pairs[pair.0].ends[side.place()].state {
            State::Up => Link::Up,
            State::Error => Link::Failed,
            State::Disconnected | State::Closed => Link::Disconnected,
        }
    }

    /// Ends a connection; the peer is told, if the link lets it.
    pub fn disconnect(&mut self, side: Side, pair: PairId, now: Instant) {
        self.pairs[pair.0].ends[side.place()].disconnect();
        if !self.is_cut {
            let at = now.after(self.params.latency);
            self.schedule(at, Event::Disconnect(side.other(), pair));
        }
    }

    /// Takes a completion of one side.
    pub fn poll(&mut self, side: Side, pair: PairId) -> Option<Completion> {
        self.pairs[pair.0].ends[side.place()].poll()
    }

    /// Whether there is a completion to take.
    pub fn has_completion(&self, side: Side, pair: PairId) -> bool {
        self.pairs[pair.0].ends[side.place()].has_completion()
    }

    /// Closes one end: what it posted is flushed, what comes is dropped. The peer is not told.
    pub fn close(&mut self, side: Side, pair: PairId) {
        self.pairs[pair.0].ends[side.place()].close();
    }

    /// The link breaks, for ever. Nobody is told.
    pub fn cut(&mut self) {
        self.is_cut = true;
    }

    /// When something happens next.
    pub fn next_event(&self) -> Option<Instant> {
        self.events.next_at()
    }

    /// Lets everything happen that is due.
    pub fn advance(&mut self, now: Instant, memory: &mut dyn Memory) {
        while let Some((at, event)) = self.events.take_due(now) {
            self.now = self.now.max(at);
            match event {
                Event::Port(side) => self.on_port(side, memory),
                Event::Arrive(segment) => self.on_arrival(segment, memory),
                Event::Return(segment) => self.on_return(&segment, memory),
                Event::Disconnect(side, pair) => {
                    self.pairs[pair.0].ends[side.place()].disconnect();
                }
                Event::Acknowledge(side, pair, number) => {
                    let end = &mut self.pairs[pair.0].ends[side.place()];
                    while end.state == State::Up && end.oldest <= number {
                        end.complete_oldest();
                    }
                }
                Event::Retry(side, pair) => {
                    self.pairs[pair.0].ends[side.place()].is_stalled = false;
                    self.process(side, pair);
                }
                Event::Fail(side, pair, number, status) => {
                    let end = &mut self.pairs[pair.0].ends[side.place()];
                    while end.state == State::Up && end.oldest < number {
                        end.complete_oldest();
                    }
                    if end.state == State::Up {
                        end.fail_oldest(Status(status));
                    }
                }
            }
        }
        self.now = self.now.max(now);
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.events.put(at, event);
    }

    /// Has a port look at its queue pairs at `at`, if it does not so earlier.
    fn look(&mut self, side: Side, at: Instant) {
        let nic = &mut self.nics[side.place()];
        if nic.looks.is_none_or(|earlier| at < earlier) {
            nic.looks = Some(at);
            self.schedule(at, Event::Port(side));
        }
    }

    /// The port sends one segment, of the next queue pair in turn that has one.
    fn on_port(&mut self, side: Side, memory: &mut dyn Memory) {
        let now = self.now;
        let nic = &mut self.nics[side.place()];
        if nic.looks.is_some_and(|at| at > now) {
            return;
        }
        nic.looks = None;
        if nic.busy > now {
            let busy = nic.busy;
            return self.look(side, busy);
        }
        let count = self.pairs.len();
        let first = nic.next_pair;
        let mut soonest: Option<Instant> = None;
        for step in 0..count {
            let pair = PairId((first + step) % count);
            match self.starts_at(side, pair) {
                Some(at) if at <= now => {
                    self.nics[side.place()].next_pair = (pair.0 + 1) % count;
                    self.send_segment(side, pair, memory);
                    let busy = self.nics[side.place()].busy;
                    return self.look(side, busy.max(Instant(now.0 + 1)));
                }
                Some(at) => soonest = Some(soonest.map_or(at, |other| other.min(at))),
                None => {}
            }
        }
        if let Some(at) = soonest {
            self.look(side, at);
        }
    }

    /// When the next segment of a queue pair may be sent; `None` if it has none.
    fn starts_at(&mut self, side: Side, pair: PairId) -> Option<Instant> {
        let (doorbell, gap) = (self.params.doorbell, self.params.request_gap);
        let end = &mut self.pairs[pair.0].ends[side.place()];
        let last = end.last_start;
        let (state, number) = (end.state, end.next_sent);
        let wqe = end.wqe(number).filter(|_| state == State::Up)?;
        if wqe.failed.is_some() {
            return None;
        }
        if wqe.sent > 0 {
            return Some(self.now);
        }
        let posted = wqe.posted.after(doorbell);
        Some(last.map_or(posted, |last| posted.max(last.after(gap))))
    }

    fn send_segment(&mut self, side: Side, pair: PairId, memory: &mut dyn Memory) {
        let now = self.now;
        let number = self.pairs[pair.0].ends[side.place()].next_sent;
        let wqe = self.pairs[pair.0].ends[side.place()].wqe(number).expect("has a segment");
        let (request, sent) = (wqe.request, wqe.sent);
        let is_first = sent == 0;
        if is_first {
            self.pairs[pair.0].ends[side.place()].last_start = Some(now);
            match self.faults.strike(&Point::Execute(side)) {
                Some(Fault::Fail(status)) => return self.give_up(side, pair, number, status),
                Some(Fault::Pause { ns }) => {
                    let nic = &mut self.nics[side.place()];
                    nic.busy = Instant(now.0 + ns);
                }
                None => {}
            }
        }
        let is_read = request.operation.is_read();
        let most = if is_read { u64::MAX } else { self.params.segment_bytes };
        let length = (request.bytes - sent).min(most);
        let local_at = request.local_at.wrapping_add(sent);
        let regions = &self.nics[side.place()].regions;
        let purpose = if is_read { Use::LocalWrite } else { Use::LocalRead };
        if length > 0 && !regions.covers(request.local, local_at, length, purpose) {
            return self.give_up(side, pair, number, Status::LOCAL_PROTECTION);
        }
        let mut bytes = Vec::new();
        if self.params.content && !is_read {
            // The moment at which the source is read.
            bytes.resize(usize::try_from(length).expect("a segment"), 0);
            memory.read(side, local_at, &mut bytes);
        }
        let wire = self.params.wire_time(if is_read { 0 } else { length }, is_first);
        let nic = &mut self.nics[side.place()];
        nic.busy = nic.busy.max(now).after(wire);
        let left = nic.busy;
        let is_last = sent + length == request.bytes;
        let jitter = self.up_to(self.params.skew);
        let spread = self.up_to(self.params.placement_spread);
        let latency = self.params.latency;
        let target = &mut self.pairs[pair.0];
        let skew = target.skew;
        let end = &mut target.ends[side.place()];
        // Packets of a queue pair come in order; what the memory sees of them may not.
        end.last_arrival = end.last_arrival.max(left.after(latency + skew + jitter));
        let arrival = end.last_arrival.after(spread);
        let wqe = end.wqe(number).expect("as before");
        wqe.sent += length;
        wqe.is_sent = is_last;
        wqe.on_the_way += 1;
        if is_last {
            end.next_sent += 1;
        }
        let (at, Key(key)) = request.operation.remote();
        let at = at.wrapping_add(sent);
        let home = is_read.then_some((local_at, request.local.0));
        let segment = Segment { from: side, pair, number, at, key, length, bytes, home };
        self.schedule(arrival, Event::Arrive(segment));
    }

    fn on_arrival(&mut self, mut segment: Segment, memory: &mut dyn Memory) {
        let (from, pair, number) = (segment.from, segment.pair, segment.number);
        let peer = from.other();
        if self.is_cut || self.pairs[pair.0].ends[peer.place()].state != State::Up {
            // Nobody answers: the oldest request is missed after a while.
            return self.miss(from, pair);
        }
        let end = &mut self.pairs[pair.0].ends[from.place()];
        if end.waiting.is_some_and(|waiting| waiting < number) {
            // Dropped and sent again later, as the one before it is (IBA 9.7.5.2).
            return end.held.push(segment);
        }
        let (key, at, length) = (Key(segment.key), segment.at, segment.length);
        let purpose = if segment.home.is_some() { Use::RemoteRead } else { Use::RemoteWrite };
        if length > 0 && !self.nics[peer.place()].regions.covers(key, at, length, purpose) {
            // The peer's queue pair is taken down too (IBA 9.7.5.2).
            self.pairs[pair.0].ends[peer.place()].fail_oldest(Status::FLUSHED);
            return self.give_up(from, pair, number, Status::REMOTE_ACCESS);
        }
        if segment.home.is_some() {
            if self.params.content {
                segment.bytes.resize(usize::try_from(length).expect("fits the host"), 0);
                memory.read(peer, at, &mut segment.bytes);
            }
            let nic = &mut self.nics[peer.place()];
            nic.busy = nic.busy.max(self.now).after(self.params.wire_time(length, false));
            let back = nic.busy.after(self.params.latency);
            return self.schedule(back, Event::Return(segment));
        }
        if self.params.content && length > 0 {
            memory.write(peer, at, &segment.bytes);
        }
        self.on_placed(from, pair, number);
    }

    /// What was read is placed at home, if the key still covers it.
    fn on_return(&mut self, segment: &Segment, memory: &mut dyn Memory) {
        let (side, pair, number) = (segment.from, segment.pair, segment.number);
        let Some((at, key)) = segment.home else { return };
        if self.pairs[pair.0].ends[side.place()].wqe(number).is_none() {
            return;
        }
        let regions = &self.nics[side.place()].regions;
        if segment.length > 0 && !regions.covers(Key(key), at, segment.length, Use::LocalWrite) {
            return self.give_up(side, pair, number, Status::LOCAL_PROTECTION);
        }
        if self.params.content && segment.length > 0 {
            memory.write(side, at, &segment.bytes);
        }
        self.on_placed(side, pair, number);
    }

    fn on_placed(&mut self, side: Side, pair: PairId, number: u64) {
        if let Some(wqe) = self.pairs[pair.0].ends[side.place()].wqe(number) {
            wqe.on_the_way -= 1;
            self.process(side, pair);
        }
    }

    /// Marks a request as failed; it is told of when all before it are done.
    fn give_up(&mut self, side: Side, pair: PairId, number: u64, status: Status) {
        let end = &mut self.pairs[pair.0].ends[side.place()];
        if let Some(wqe) = end.wqe(number) {
            wqe.failed = wqe.failed.or(Some(status));
        }
        self.process(side, pair);
    }

    fn miss(&mut self, side: Side, pair: PairId) {
        let timeout = self.params.retry_timeout;
        let end = &mut self.pairs[pair.0].ends[side.place()];
        if end.state == State::Up && !end.is_stalled {
            end.is_stalled = true;
            let at = self.now.after(timeout);
            // Whatever is the oldest by then.
            self.schedule(at, Event::Fail(side, pair, 0, Status::RETRY_EXCEEDED.0));
        }
    }

    /// The peer processes, in order, what is placed: immediate data, acknowledgements.
    fn process(&mut self, side: Side, pair: PairId) {
        let back = self.params.latency + self.params.completion;
        loop {
            let [a, b] = &mut self.pairs[pair.0].ends;
            let (end, peer) = if side == Side::A { (a, b) } else { (b, a) };
            let number = end.next_done;
            if end.state != State::Up || end.is_stalled {
                return;
            }
            let Some(wqe) = end.wqe(number) else { return };
            if let Some(status) = wqe.failed {
                end.is_stalled = true;
                let at = self.now.after(back);
                return self.schedule(at, Event::Fail(side, pair, number, status.0));
            }
            if !wqe.is_sent || wqe.on_the_way > 0 {
                return;
            }
            if let Operation::WriteWithImmediate { immediate, .. } = wqe.request.operation {
                if !peer.take_receive(immediate) {
                    end.is_stalled = true;
                    end.waiting = Some(number);
                    end.rnr_tries = end.rnr_tries.saturating_add(1);
                    let event = if end.rnr_retries < 7 && end.rnr_tries > end.rnr_retries {
                        Event::Fail(side, pair, number, Status::RNR_RETRY_EXCEEDED.0)
                    } else {
                        Event::Retry(side, pair)
                    };
                    let at = self.now.after(self.params.rnr_timer);
                    return self.schedule(at, event);
                }
                (end.rnr_tries, end.waiting) = (0, None);
                end.next_done += 1;
                let held = std::mem::take(&mut end.held);
                for segment in held {
                    self.schedule(self.now, Event::Arrive(segment));
                }
            } else {
                end.next_done += 1;
            }
            match self.faults.strike(&Point::Acknowledge(side)) {
                Some(Fault::Fail(_)) => return self.miss(side, pair),
                Some(Fault::Pause { ns }) => {
                    let at = Instant(self.now.0 + ns).after(back);
                    self.schedule(at, Event::Acknowledge(side, pair, number));
                }
                None => {
                    let at = self.now.after(back);
                    self.schedule(at, Event::Acknowledge(side, pair, number));
                }
            }
        }
    }

    /// A random part of `most`.
    fn up_to(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX - 1);
        if most == 0 {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.chance.below(most + 1))
    }
}
