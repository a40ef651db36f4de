//! Peers that say anything: each machine alone, against messages that are well-formed and wrong.

#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_ram::{RegionIndex, Run, RunKind};
use martlet_rdma::{
    Destination, DestinationAction, DestinationConfig, LocalKey, PageSpan, QueueIndex, Registered,
    RemoteKey, Source, SourceAction, SourceConfig, UnitIndex, Work, WorkCompletion, WorkSequence,
    WorkStatus,
};
use martlet_units::Instant;
use martlet_wire::rdma::{
    Grant, Pinning, RDMA_VERSION, RdmaMessage, RoundEnd, Terms, WireSpan, ZeroList, ZeroRange,
};
use proptest::prelude::*;

const REGIONS: [u64; 2] = [1_300, 40];
const NOW: Instant = Instant(1);

/// Numbers that are often nearly right.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..6, 1_024_u64..1_310, Just(u64::MAX >> 1), Just(u64::from(u32::MAX))]
}

fn span() -> impl Strategy<Value = WireSpan> {
    let honest = (0_u64..3).prop_map(|unit| match unit {
        2 => WireSpan { region: 0, first_chunk: 4, chunks: 2 },
        unit => WireSpan { region: 0, first_chunk: 2 * unit, chunks: 2 },
    });
    let any = (0_u16..3, number(), 1_u32..4).prop_map(|(region, first_chunk, chunks)| WireSpan {
        region,
        first_chunk,
        chunks,
    });
    prop_oneof![4 => honest, 1 => any]
}

fn spans() -> impl Strategy<Value = Vec<WireSpan>> {
    prop::collection::vec(span(), 1..3)
}

fn terms() -> impl Strategy<Value = Terms> {
    let honest = Terms {
        version: RDMA_VERSION,
        queues: 2,
        pinning: Pinning::Dynamic,
        unit_chunks: 2,
        chunk_bytes: 1 << 20,
        pinned_bytes_max: 6 << 20,
    };
    let any = (1_u16..4, any::<bool>(), 0_u32..11, 20_u32..31, number()).prop_map(
        |(queues, all, unit, chunk, pinned_bytes_max)| Terms {
            version: RDMA_VERSION,
            queues,
            pinning: if all { Pinning::All } else { Pinning::Dynamic },
            unit_chunks: 1 << unit,
            chunk_bytes: 1 << chunk,
            pinned_bytes_max,
        },
    );
    prop_oneof![3 => Just(honest), 1 => any]
}

fn message() -> impl Strategy<Value = RdmaMessage> {
    let grant = (span(), number(), any::<u32>()).prop_map(|(span, page, key)| Grant {
        span,
        address: page.wrapping_mul(4096),
        key,
    });
    let range = (0_u16..3, number(), 1_u32..50).prop_map(|(region, first_page, count)| ZeroRange {
        region,
        first_page,
        count,
    });
    prop_oneof![
        terms().prop_map(RdmaMessage::Offer),
        terms().prop_map(RdmaMessage::Accept),
        spans().prop_map(RdmaMessage::KeyRequest),
        prop::collection::vec(grant, 1..3).prop_map(RdmaMessage::KeyGrant),
        spans().prop_map(RdmaMessage::KeyRefusal),
        spans().prop_map(RdmaMessage::KeyDrop),
        spans().prop_map(RdmaMessage::KeyDropped),
        (0_u64..4, prop::collection::vec(range, 1..3))
            .prop_map(|(sequence, ranges)| RdmaMessage::ZeroList(ZeroList { sequence, ranges })),
        (0_u64..4).prop_map(|sequence| RdmaMessage::ZeroDone { sequence }),
        (0_u32..3, any::<bool>(), 0_u64..3).prop_map(|(round, last, zero_lists)| {
            RdmaMessage::RoundEnd(RoundEnd { round, last, zero_lists })
        }),
        Just(RdmaMessage::Heartbeat { sent_ns: 0 }),
        Just(RdmaMessage::Close { reason: "because".to_owned() }),
        (0_u32..3).prop_map(|rounds| RdmaMessage::Revoked { rounds }),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Message(RdmaMessage),
    Marker(u16, u32),
    Time(u64),
    Own(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => message().prop_map(Step::Message),
        1 => (0_u16..3, 0_u32..3).prop_map(|(queue, round)| Step::Marker(queue, round)),
        1 => (0_u64..3_000_000_000).prop_map(Step::Time),
        4 => any::<u8>().prop_map(Step::Own),
    ];
    prop::collection::vec(step, 0..60)
}

fn is_inside(pages: PageSpan) -> bool {
    let length = REGIONS.get(usize::from(pages.region().0));
    pages.pages() > 0 && length.is_some_and(|length| pages.end() <= *length)
}

/// A destination's program, which does what it is told, at moments that `own` decides.
#[derive(Default)]
struct Receiver {
    registering: Vec<UnitIndex>,
    deregistering: Vec<UnitIndex>,
    zeroing: std::collections::VecDeque<u64>,
    closing: bool,
    closed: bool,
    started: bool,
}

impl Receiver {
    fn take(&mut self, destination: &mut Destination, config: DestinationConfig) {
        while let Some(action) = destination.poll_action() {
            match action {
                DestinationAction::Register { unit, pages } => {
                    assert!(is_inside(pages) && !self.closed);
                    self.registering.push(unit);
                }
                DestinationAction::Deregister { unit } => self.deregistering.push(unit),
                DestinationAction::Zero { sequence, ranges } => {
                    assert!(ranges.iter().all(|pages| is_inside(*pages)));
                    self.zeroing.push_back(sequence);
                }
                DestinationAction::CloseQueues => {
                    assert!(!self.closing, "closed twice");
                    self.closing = true;
                }
                DestinationAction::RoundArrived { last, .. } => {
                    assert!(!self.started && (!last || self.closed));
                    assert!(!last || self.zeroing.is_empty());
                    self.started = last;
                }
                DestinationAction::Closed => assert!(self.closed && !self.started),
                DestinationAction::Send(_)
                | DestinationAction::Accepted(_)
                | DestinationAction::PostReceive(_) => {}
            }
        }
        let most = config.pinned_bytes_max.max(2 << 30);
        assert!(destination.pinned_bytes() <= most);
    }

    fn own(&mut self, destination: &mut Destination, choice: u8) {
        match choice % 5 {
            0 | 1 => {
                let Some(unit) = self.registering.pop() else { return };
                let registered = Registered { address: 4096, key: RemoteKey(1) };
                let result = if choice < 200 { Ok(registered) } else { Err("no".to_owned()) };
                destination.on_registered(unit, result);
            }
            2 => {
                if let Some(unit) = self.deregistering.pop() {
                    destination.on_deregistered(unit);
                }
            }
            3 => {
                if let Some(sequence) = self.zeroing.pop_front() {
                    destination.on_zeroed(sequence);
                }
            }
            _ => {
                if self.closing && !self.closed {
                    self.closed = true;
                    destination.on_queues_closed();
                }
            }
        }
    }
}

/// A source's program, with pages to send and queue pairs that complete what is posted.
#[derive(Default)]
struct Sender {
    registering: Vec<UnitIndex>,
    deregistering: Vec<UnitIndex>,
    posted: Vec<(QueueIndex, WorkSequence)>,
    connect: bool,
    next_page: u64,
    ended: bool,
}

impl Sender {
    fn take(&mut self, source: &mut Source) {
        while let Some(action) = source.poll_action() {
            match action {
                SourceAction::Register { unit, pages } => {
                    assert!(is_inside(pages));
                    self.registering.push(unit);
                }
                SourceAction::Deregister { unit } => self.deregistering.push(unit),
                SourceAction::Connect(_) => self.connect = true,
                SourceAction::Drained(_) => self.next_page = 0,
                SourceAction::Closed { .. } | SourceAction::Finished => {
                    assert!(!self.ended, "ended twice");
                    self.ended = true;
                }
                SourceAction::Send(_) | SourceAction::CloseQueues => {}
            }
        }
        let mut list = Vec::new();
        while let Some(queue) = source.poll_posts(&mut list) {
            for post in &list {
                if let Work::Write { pages, .. } = post.work {
                    assert!(is_inside(pages));
                }
                if post.signalled {
                    self.posted.push((queue, post.sequence));
                }
            }
        }
    }

    fn own(&mut self, source: &mut Source, choice: u8) {
        match choice % 8 {
            0 if self.connect => {
                self.connect = false;
                source.on_connected(NOW, 8);
            }
            0 => source.on_queues_closed(),
            1 => {
                if let Some(unit) = self.registering.pop() {
                    let result = if choice < 200 { Ok(LocalKey(1)) } else { Err("no".to_owned()) };
                    source.on_registered(NOW, unit, result);
                }
            }
            2 => {
                if let Some(unit) = self.deregistering.pop() {
                    source.on_deregistered(unit);
                }
            }
            3 | 4 if !self.posted.is_empty() => {
                let (queue, sequence) = self.posted.remove(0);
                let status = WorkStatus(if choice > 220 { 12 } else { 0 });
                source.on_completion(NOW, queue, WorkCompletion { sequence, status });
            }
            5 if source.is_open() => source.end_round(choice > 200),
            6 if source.is_open() => source.jump(),
            _ if source.is_open() && self.next_page < 1_300 => {
                let count = u32::from(choice) % 40 + 1;
                let count = count.min(u32::try_from(1_300 - self.next_page).unwrap());
                let kind = if choice.is_multiple_of(3) { RunKind::Zero } else { RunKind::Data };
                let first_page = self.next_page;
                let mut run = Run { region: RegionIndex(0), kind, first_page, count };
                source.offer(&mut run);
                self.next_page = run.first_page + 5;
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn a_destination_takes_anything(offer in terms(), steps in steps()) {
        let config = DestinationConfig { queues_max: 2, pinned_bytes_max: 6 << 20 };
        let mut destination = Destination::new(&REGIONS, config, NOW);
        let (mut receiver, mut now) = (Receiver::default(), NOW);
        destination.on_message(now, &RdmaMessage::Offer(offer));
        for step in steps {
            receiver.take(&mut destination, config);
            match step {
                Step::Message(message) => destination.on_message(now, &message),
                Step::Marker(queue, round) => destination.on_marker(QueueIndex(queue), round),
                Step::Time(ns) => {
                    now = Instant(now.0 + ns);
                    destination.on_timeout(now);
                }
                Step::Own(choice) => receiver.own(&mut destination, choice),
            }
        }
        receiver.take(&mut destination, config);
    }

    #[test]
    fn a_source_takes_anything(steps in steps()) {
        let config = SourceConfig {
            chunk_bytes: 1 << 20,
            unit_chunks: 2,
            queues: 2,
            pinned_bytes_max: 6 << 20,
            ..SourceConfig::DEFAULT
        };
        let mut source = Source::new(&REGIONS, config, NOW).unwrap();
        let (mut sender, mut now) = (Sender::default(), NOW);
        for step in steps {
            sender.take(&mut source);
            match step {
                Step::Message(message) => source.on_message(now, &message),
                Step::Marker(..) => source.prefetch(|_| true),
                Step::Time(ns) => {
                    now = Instant(now.0 + ns);
                    source.on_timeout(now);
                }
                Step::Own(choice) => sender.own(&mut source, choice),
            }
        }
        sender.take(&mut source);
        // Whatever was said, what was taken and not retired can be told.
        prop_assert!(source.unretired().all(is_inside));
    }
}
