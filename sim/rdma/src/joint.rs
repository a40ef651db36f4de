//! Both machines, the modelled NICs, the connection of the messages and the threads that register
//! memory, under one virtual clock. What a driver does over real verbs, this does over the model.

use crate::checker::Checker;
use martlet_ram::RegionIndex;
use martlet_rdma::{
    Destination, DestinationAction, DestinationConfig, Drain, LayoutError, LocalKey,
    MARKER_RECEIVES, PageSpan, Post, QueueIndex, Registered, RemoteKey, Source, SourceAction,
    SourceConfig, UnitIndex, Work, WorkCompletion, WorkSequence, WorkStatus,
};
use martlet_simulation::Agenda;
use martlet_units::{Instant, PAGE_SIZE};
use martlet_verbs_model::{
    Access, Key, Memory, Network, Operation, PairId, PostError, Request, Side, Status,
};
use martlet_wire::rdma::{RDMA_HEADER_BYTES, RdmaHeader, RdmaMessage};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What is around the NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JointConfig {
    /// A message's way to the other program, one way.
    pub message: Duration,
    /// From a zero list's arrival until its pages are zero.
    pub zeroing: Duration,
    /// Threads that register memory, on each side.
    pub registering_threads: usize,
    /// Slots of a send queue.
    pub slots: u32,
    /// From the closing of the queue pairs to the knowledge of it.
    pub closing: Duration,
}

/// What came of a step, for whoever drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// The source takes runs again.
    Drained(Drain),
    /// The source may commit.
    Finished,
    /// The source ended early.
    SourceClosed {
        /// Pages may take another way.
        revoked: bool,
    },
    /// The destination has all of a round.
    RoundArrived {
        /// Which.
        round: u32,
        /// The guest may run.
        last: bool,
    },
    /// The destination ended early.
    DestinationClosed,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Message(Side, Vec<u8>),
    Registered(Side, UnitIndex),
    Deregistered(Side, UnitIndex),
    Zeroed(u64),
    Closed(Side),
    Wake,
}

/// The source is on side A, the destination on side B.
#[derive(Debug)]
pub(crate) struct Joint<M: Memory> {
    /// The source's machine: offer runs to it.
    pub source: Source,
    destination: Destination,
    net: Network,
    /// Guest memory of both sides.
    pub memory: M,
    config: JointConfig,
    pairs: Vec<PairId>,
    now: Instant,
    events: Agenda<Instant, Event>,
    threads: [Vec<Instant>; 2],
    keys: [BTreeMap<UnitIndex, Key>; 2],
    zero_lists: VecDeque<(u64, Vec<PageSpan>)>,
    last_zeroed: Instant,
    last_message: [Instant; 2],
    is_control_cut: bool,
    notes: VecDeque<Note>,
    posts: Vec<Post>,
    checker: Option<Checker>,
}

impl<M: Memory> Joint<M> {
    /// Both machines at the network's time `now`; nothing is sent yet.
    pub(crate) fn new(
        regions: &[u64],
        source: SourceConfig,
        destination: DestinationConfig,
        config: JointConfig,
        net: Network,
        memory: M,
        now: Instant,
    ) -> Result<Joint<M>, LayoutError> {
        assert!(config.registering_threads > 0 && config.slots > 0, "{config:?}");
        Ok(Joint {
            source: Source::new(regions, source, now)?,
            destination: Destination::new(regions, destination, now),
            net,
            memory,
            config,
            pairs: Vec::new(),
            now,
            events: Agenda::default(),
            threads: [(); 2].map(|()| vec![now; config.registering_threads]),
            keys: [BTreeMap::new(), BTreeMap::new()],
            zero_lists: VecDeque::new(),
            last_zeroed: now,
            last_message: [now; 2],
            is_control_cut: false,
            notes: VecDeque::new(),
            posts: Vec::new(),
            checker: None,
        })
    }

    /// Has every post and completion looked at.
    pub(crate) fn check_with(&mut self, checker: Checker) {
        self.checker = Some(checker);
    }

    pub(crate) fn checker(&mut self) -> Option<&mut Checker> {
        self.checker.as_mut()
    }

    /// The time.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// What happened, oldest first.
    pub(crate) fn take_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    /// The destination's machine, to look at.
    pub(crate) fn destination(&self) -> &Destination {
        &self.destination
    }

    /// The network and the memory, for the next attempt.
    pub(crate) fn into_parts(self) -> (Network, M) {
        (self.net, self.memory)
    }

    /// How many regions of the destination the source's NIC could write now.
    pub(crate) fn writable(&self) -> usize {
        self.net.writable_by_peer(Side::B)
    }

    /// Both the link and the connection of the messages break. Nobody is told.
    pub(crate) fn cut(&mut self) {
        self.net.cut();
        self.is_control_cut = true;
    }

    /// A write by every key that was ever granted and every queue pair, as a source that does not
    /// keep to the rules would post it.
    pub(crate) fn attack(&mut self) {
        let keys: Vec<_> = self.keys[1].iter().map(|(unit, key)| (*unit, *key)).collect();
        let layout = self.source.layout().clone();
        for pair in &self.pairs {
            for (unit, key) in &keys {
                let local = self.keys[0].get(unit).copied().unwrap_or_default();
                let pages = layout.unit_pages_of(*unit);
                let operation = Operation::Write { to: address(Side::B, pages), key: *key };
                let from = address(Side::A, pages);
                let request = Request {
                    id: u64::MAX,
                    operation,
                    local_at: from,
                    bytes: PAGE_SIZE,
                    local,
                    signalled: false,
                };
                // A full queue is no protection, but then it has writes of its own.
                let _ = self.net.post(Side::A, *pair, self.now, &[request]);
            }
        }
    }

    /// Carries out everything that is due now.
    pub(crate) fn pump(&mut self) {
        loop {
            if let Some(action) = self.source.poll_action() {
                self.on_source(action);
            } else if let Some(action) = self.destination.poll_action() {
                self.on_destination(action);
            } else if !self.post() {
                return;
            }
        }
    }

    /// When something happens next, the machines' deadlines included.
    pub(crate) fn next_event(&self) -> Option<Instant> {
        let own = self.events.next_at();
        let timeouts = [self.source.poll_timeout(), self.destination.poll_timeout()];
        [own, self.net.next_event()].into_iter().chain(timeouts).flatten().min()
    }

    /// Has [`Joint::next_event`] come at `at` too.
    pub(crate) fn wake_at(&mut self, at: Instant) {
        self.schedule(at, Event::Wake);
    }

    /// Moves the clock and takes in what happened until then.
    pub(crate) fn advance(&mut self, to: Instant) {
        self.now = self.now.max(to);
        self.net.advance(self.now, &mut self.memory);
        self.take_completions();
        while let Some((_, event)) = self.events.take_due(self.now) {
            self.on_event(event);
        }
        if self.source.poll_timeout().is_some_and(|at| at <= self.now) {
            self.source.on_timeout(self.now);
        }
        if self.destination.poll_timeout().is_some_and(|at| at <= self.now) {
            self.destination.on_timeout(self.now);
        }
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.events.put(at, event);
    }

    /// Polls all queues of both sides.
    fn take_completions(&mut self) {
        for (index, pair) in (0..).map(QueueIndex).zip(self.pairs.clone()) {
            while let Some(completion) = self.net.poll(Side::A, pair) {
                if completion.id == u64::MAX {
                    continue;
                }
                let status = WorkStatus(completion.status.0);
                let sequence = WorkSequence(completion.id);
                if let Some(checker) = self.checker.as_mut()
                    && completion.status == Status::SUCCESS
                {
                    checker.on_retired(index, sequence);
                }
                let completion = WorkCompletion { sequence, status };
                self.source.on_completion(self.now, index, completion);
            }
            while let Some(completion) = self.net.poll(Side::B, pair) {
                if let Some(round) = completion.immediate {
                    self.destination.on_marker(index, round);
                }
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Message(to, bytes) => {
                let (head, body) = bytes.split_first_chunk::<RDMA_HEADER_BYTES>().expect("framed");
                let header = RdmaHeader::parse(head).expect("own header");
                let message = RdmaMessage::decode(header.kind(), body).expect("own message");
                match to {
                    Side::A => self.source.on_message(self.now, &message),
                    Side::B => self.destination.on_message(self.now, &message),
                }
            }
            Event::Registered(side, unit) => self.on_registered(side, unit),
            Event::Deregistered(side, unit) => {
                let key = self.keys[place(side)].remove(&unit).expect("was registered");
                assert!(self.net.deregister(side, key), "deregistered twice");
                match side {
                    Side::A => self.source.on_deregistered(unit),
                    Side::B => self.destination.on_deregistered(unit),
                }
            }
            Event::Zeroed(sequence) => {
                let (next, spans) = self.zero_lists.pop_front().expect("a list");
                assert_eq!(next, sequence, "lists are executed in order");
                for span in &spans {
                    let length = usize::try_from(span.bytes()).expect("small");
                    self.memory.write(Side::B, address(Side::B, *span), &vec![0; length]);
                }
                if let Some(checker) = self.checker.as_mut() {
                    spans.iter().for_each(|span| checker.on_zeroed(*span));
                }
                self.destination.on_zeroed(sequence);
            }
            Event::Closed(Side::A) => {
                self.take_completions();
                self.source.on_queues_closed();
            }
            Event::Closed(Side::B) => self.destination.on_queues_closed(),
            Event::Wake => {}
        }
    }

    fn on_registered(&mut self, side: Side, unit: UnitIndex) {
        let pages = self.source.layout().unit_pages_of(unit);
        let at = address(side, pages);
        let access = match side {
            Side::A => Access::SOURCE,
            Side::B => Access::TARGET,
        };
        let key = self.net.register(side, at, pages.bytes(), access);
        let before = self.keys[place(side)].insert(unit, key);
        assert!(before.is_none(), "registered twice");
        match side {
            Side::A => self.source.on_registered(self.now, unit, Ok(LocalKey(key.0))),
            Side::B => {
                let registered = Registered { address: at, key: RemoteKey(key.0) };
                self.destination.on_registered(unit, Ok(registered));
            }
        }
    }

    fn on_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::Send(message) => self.send(Side::B, &message),
            SourceAction::Connect(terms) => {
                // The destination let them in when it accepted.
                assert_eq!(self.pairs.len(), usize::from(terms.queues), "queue pairs");
                self.source.on_connected(self.now, self.config.slots);
            }
            SourceAction::Register { unit, pages } => self.register(Side::A, unit, pages),
            SourceAction::Deregister { unit } => self.deregister(Side::A, unit),
            SourceAction::Drained(why) => self.notes.push_back(Note::Drained(why)),
            SourceAction::Finished => self.notes.push_back(Note::Finished),
            SourceAction::CloseQueues => self.close(Side::A),
            SourceAction::Closed { revoked } => {
                self.notes.push_back(Note::SourceClosed { revoked });
            }
        }
    }

    fn on_destination(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Send(message) => self.send(Side::A, &message),
            DestinationAction::Accepted(terms) => {
                for _ in 0..terms.queues {
                    let slots = usize::try_from(self.config.slots).expect("small");
                    let pair = self.net.connect(slots);
                    for receive in 0..MARKER_RECEIVES {
                        self.net.post_receive(Side::B, pair, u64::from(receive));
                    }
                    self.pairs.push(pair);
                }
            }
            DestinationAction::Register { unit, pages } => self.register(Side::B, unit, pages),
            DestinationAction::Deregister { unit } => self.deregister(Side::B, unit),
            DestinationAction::Zero { sequence, ranges } => {
                self.zero_lists.push_back((sequence, ranges));
                let at = self.last_zeroed.max(self.now).after(self.config.zeroing);
                self.last_zeroed = at;
                self.schedule(at, Event::Zeroed(sequence));
            }
            DestinationAction::PostReceive(queue) => {
                self.net.post_receive(Side::B, self.pairs[usize::from(queue.0)], 0);
            }
            DestinationAction::RoundArrived { round, last } => {
                self.notes.push_back(Note::RoundArrived { round, last });
            }
            DestinationAction::CloseQueues => self.close(Side::B),
            DestinationAction::Closed => self.notes.push_back(Note::DestinationClosed),
        }
    }

    fn send(&mut self, to: Side, message: &RdmaMessage) {
        if self.is_control_cut {
            return;
        }
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let at = self.now.after(self.config.message).max(self.last_message[place(to)]);
        self.last_message[place(to)] = at;
        self.schedule(at, Event::Message(to, bytes));
    }

    /// Gives registering to the thread that is free first.
    fn register(&mut self, side: Side, unit: UnitIndex, pages: PageSpan) {
        let takes = self.net.params().register_time(pages.bytes());
        let at = self.on_thread(side, takes);
        self.schedule(at, Event::Registered(side, unit));
    }

    fn deregister(&mut self, side: Side, unit: UnitIndex) {
        let bytes = self.source.layout().unit_pages_of(unit).bytes();
        let takes = self.net.params().deregister_time(bytes);
        let at = self.on_thread(side, takes);
        self.schedule(at, Event::Deregistered(side, unit));
    }

    fn on_thread(&mut self, side: Side, takes: Duration) -> Instant {
        let free = self.threads[place(side)].iter_mut().min().expect("a thread");
        *free = (*free).max(self.now).after(takes);
        *free
    }

    fn close(&mut self, side: Side) {
        for pair in &self.pairs {
            self.net.close(side, *pair);
        }
        let at = self.now.after(self.config.closing);
        self.schedule(at, Event::Closed(side));
    }

    /// Posts the next list; false if there is none.
    fn post(&mut self) -> bool {
        let Some(queue) = self.source.poll_posts(&mut self.posts) else { return false };
        let request = |post: &Post| {
            let (operation, from, bytes, local) = match post.work {
                Work::Write { pages, local, to, remote } => {
                    let operation = Operation::Write { to, key: Key(remote.0) };
                    (operation, address(Side::A, pages), pages.bytes(), Key(local.0))
                }
                Work::Marker { round } => {
                    let key = Key(0);
                    (Operation::WriteWithImmediate { to: 0, key, immediate: round }, 0, 0, key)
                }
            };
            Request {
                id: post.sequence.0,
                operation,
                local_at: from,
                bytes,
                local,
                signalled: post.signalled,
            }
        };
        let list: Vec<Request> = self.posts.iter().map(request).collect();
        if let Some(checker) = self.checker.as_mut() {
            self.posts.iter().for_each(|post| checker.on_posted(queue, post));
        }
        let posted = self.net.post(Side::A, self.pairs[usize::from(queue.0)], self.now, &list);
        match posted {
            // A closed queue pair completes nothing; the source knows by now or will soon.
            Ok(()) | Err(PostError::Closed) => true,
            Err(PostError::Full(posted)) => {
                panic!("the source counted its slots wrong: {posted} of {} fit", list.len())
            }
        }
    }
}

fn place(side: Side) -> usize {
    match side {
        Side::A => 0,
        Side::B => 1,
    }
}

/// Regions lie this far apart, and the sides further, so that a wrong address is in no region.
const REGION_SHIFT: u32 = 42;
const SIDE_SHIFT: u32 = 52;

/// Where pages are on a side.
pub(crate) fn address(side: Side, pages: PageSpan) -> u64 {
    let side = (place(side) as u64 + 1) << SIDE_SHIFT;
    let region = u64::from(pages.region().0) << REGION_SHIFT;
    side + region + pages.first_page() * PAGE_SIZE
}

/// Region and offset of an address.
pub(crate) fn locate(address: u64) -> (RegionIndex, usize) {
    let region = (address >> REGION_SHIFT) & ((1 << (SIDE_SHIFT - REGION_SHIFT)) - 1);
    let offset = address & ((1 << REGION_SHIFT) - 1);
    let region = RegionIndex(u16::try_from(region).expect("ten bits"));
    (region, usize::try_from(offset).expect("fits the host"))
}
