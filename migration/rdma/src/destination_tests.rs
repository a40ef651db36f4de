use super::super::work::RemoteKey;
use super::*;
use martlet_wire::rdma::{RDMA_VERSION, ZeroRange};

const NOW: Instant = Instant(1_000_000);
const PAGES: u64 = 16 * 256;
const TERMS: Terms = Terms {
    version: RDMA_VERSION,
    queues: 2,
    pinning: Pinning::Dynamic,
    unit_chunks: 2,
    chunk_bytes: 1 << 20,
    pinned_bytes_max: 4 << 20,
};
const UNIT: WireSpan = WireSpan { region: 0, first_chunk: 2, chunks: 2 };

struct Rig {
    destination: Destination,
    actions: Vec<DestinationAction>,
}

impl Rig {
    /// A destination with 16 MiB of memory that has accepted.
    fn new() -> Rig {
        let destination = Destination::new(&[PAGES], DestinationConfig::DEFAULT, NOW);
        let mut rig = Rig { destination, actions: Vec::new() };
        rig.say(&RdmaMessage::Offer(TERMS));
        assert_eq!(rig.take().len(), 2);
        rig
    }

    fn say(&mut self, message: &RdmaMessage) {
        self.destination.on_message(NOW, message);
        self.poll();
    }

    fn poll(&mut self) {
        while let Some(action) = self.destination.poll_action() {
            self.actions.push(action);
        }
    }

    fn take(&mut self) -> Vec<DestinationAction> {
        self.poll();
        std::mem::take(&mut self.actions)
    }

    fn register(&mut self, span: WireSpan) -> UnitIndex {
        self.say(&RdmaMessage::KeyRequest(vec![span]));
        let Some(DestinationAction::Register { unit, .. }) = self.take().pop() else {
            panic!("nothing to register")
        };
        let registered = Registered { address: 4096, key: RemoteKey(5) };
        self.destination.on_registered(unit, Ok(registered));
        let granted = self.take();
        assert!(matches!(granted[..], [DestinationAction::Send(RdmaMessage::KeyGrant(_))]));
        unit
    }

    fn is_ended(&mut self) -> bool {
        self.poll();
        self.actions.contains(&DestinationAction::CloseQueues)
    }
}

fn zeros(sequence: u64) -> RdmaMessage {
    let ranges = vec![ZeroRange { region: 0, first_page: 7, count: 2 }];
    RdmaMessage::ZeroList(ZeroList { sequence, ranges })
}

fn end(round: u32, last: bool, zero_lists: u64) -> RdmaMessage {
    RdmaMessage::RoundEnd(RoundEnd { round, last, zero_lists })
}

#[test]
fn a_round_has_arrived_with_its_last_marker_and_its_last_zero() {
    let mut rig = Rig::new();
    rig.say(&zeros(1));
    let zero = rig.take().pop();
    assert!(matches!(zero, Some(DestinationAction::Zero { sequence: 1, .. })));
    // Markers and messages take different ways.
    rig.destination.on_marker(QueueIndex(1), 0);
    rig.say(&end(0, false, 1));
    rig.destination.on_marker(QueueIndex(0), 0);
    let arrived = DestinationAction::RoundArrived { round: 0, last: false };
    assert!(!rig.take().contains(&arrived));
    rig.destination.on_zeroed(1);
    let actions = rig.take();
    let done = DestinationAction::Send(RdmaMessage::ZeroDone { sequence: 1 });
    assert!(actions.contains(&arrived) && actions.contains(&done), "{actions:?}");
}

#[test]
fn the_guest_runs_only_when_nobody_can_write_its_memory() {
    let mut rig = Rig::new();
    let unit = rig.register(UNIT);
    rig.say(&end(0, true, 0));
    rig.destination.on_marker(QueueIndex(0), 0);
    rig.destination.on_marker(QueueIndex(1), 0);
    let arrived = DestinationAction::RoundArrived { round: 0, last: true };
    let actions = rig.take();
    assert!(actions.contains(&DestinationAction::CloseQueues) && !actions.contains(&arrived));
    rig.destination.on_queues_closed();
    assert_eq!(
        rig.take(),
        [
            arrived,
            DestinationAction::Send(RdmaMessage::Revoked { rounds: 1 }),
            DestinationAction::Deregister { unit },
        ]
    );
    rig.destination.on_deregistered(unit);
    assert_eq!(rig.destination.pinned_bytes(), 0);
    assert!(rig.take().is_empty());
}

#[test]
fn an_early_end_waits_for_the_zeros_under_way() {
    let mut rig = Rig::new();
    rig.say(&zeros(1));
    rig.take();
    rig.say(&RdmaMessage::Close { reason: "a request failed".to_owned() });
    assert_eq!(rig.take(), [DestinationAction::CloseQueues]);
    rig.destination.on_queues_closed();
    assert!(rig.take().is_empty(), "zeros could still land");
    rig.destination.on_zeroed(1);
    let revoked = DestinationAction::Send(RdmaMessage::Revoked { rounds: 0 });
    assert_eq!(rig.take(), [DestinationAction::Closed, revoked]);
}

#[test]
fn what_can_not_be_registered_is_refused() {
    let mut rig = Rig::new();
    rig.say(&RdmaMessage::KeyRequest(vec![UNIT]));
    let Some(DestinationAction::Register { unit, .. }) = rig.take().pop() else { panic!("none") };
    rig.destination.on_registered(unit, Err("no memory may be locked".to_owned()));
    let refused = DestinationAction::Send(RdmaMessage::KeyRefusal(vec![UNIT]));
    assert_eq!(rig.take(), [refused]);
    assert_eq!(rig.destination.pinned_bytes(), 0);
    rig.say(&RdmaMessage::Close { reason: "you can't register".to_owned() });
    assert!(matches!(rig.destination.cause(), Some(Failure::Host { .. })));
}

#[test]
fn keys_come_back_and_can_be_had_again() {
    let mut rig = Rig::new();
    let unit = rig.register(UNIT);
    rig.say(&RdmaMessage::KeyDrop(vec![UNIT]));
    assert_eq!(rig.take(), [DestinationAction::Deregister { unit }]);
    rig.destination.on_deregistered(unit);
    let told = DestinationAction::Send(RdmaMessage::KeyDropped(vec![UNIT]));
    assert_eq!(rig.take(), [told]);
    assert_eq!(rig.register(UNIT), unit);
}

#[test]
fn a_source_that_asks_for_what_is_not_its_own_gets_nothing() {
    let out = WireSpan { first_chunk: 16, ..UNIT };
    let all = |first_chunk| WireSpan { first_chunk, ..UNIT };
    let range = |region, first_page, count| {
        let ranges = vec![ZeroRange { region, first_page, count }];
        RdmaMessage::ZeroList(ZeroList { sequence: 1, ranges })
    };
    let lies = [
        RdmaMessage::KeyRequest(vec![out]),
        RdmaMessage::KeyRequest(vec![WireSpan { region: 1, ..UNIT }]),
        RdmaMessage::KeyRequest(vec![WireSpan { chunks: 1, ..UNIT }]),
        RdmaMessage::KeyRequest(vec![UNIT, UNIT]),
        // Three units where two were agreed.
        RdmaMessage::KeyRequest(vec![all(0), all(2), all(4)]),
        RdmaMessage::KeyDrop(vec![UNIT]),
        range(1, 0, 1),
        range(0, PAGES - 1, 2),
        range(0, PAGES, 1),
        zeros(2),
        end(1, false, 0),
        end(0, false, 1),
        RdmaMessage::Offer(TERMS),
        RdmaMessage::ZeroDone { sequence: 0 },
        RdmaMessage::Revoked { rounds: 0 },
    ];
    for lie in lies {
        let mut rig = Rig::new();
        rig.say(&lie);
        assert!(rig.is_ended(), "{lie:?}");
        assert!(matches!(rig.destination.cause(), Some(Failure::Peer(_))), "{lie:?}");
        assert!(!rig.actions.iter().any(|action| matches!(action, DestinationAction::Zero { .. })));
    }
}

#[test]
fn markers_that_can_not_be() {
    for (queue, round) in [(2, 0), (0, 1), (0, u32::MAX)] {
        let mut rig = Rig::new();
        rig.destination.on_marker(QueueIndex(queue), round);
        assert!(rig.is_ended(), "{queue} {round}");
    }
    // Two rounds ahead of the other queue pair.
    let mut rig = Rig::new();
    rig.destination.on_marker(QueueIndex(0), 0);
    assert!(!rig.is_ended());
    rig.destination.on_marker(QueueIndex(0), 1);
    assert!(rig.is_ended());
}

#[test]
fn the_loss_of_a_queue_pair_is_told() {
    let mut rig = Rig::new();
    rig.destination.give_up("queue pair 1 was disconnected");
    let actions = rig.take();
    let told = |action: &_| matches!(action, DestinationAction::Send(RdmaMessage::Close { .. }));
    assert!(actions.iter().any(told) && actions.contains(&DestinationAction::CloseQueues));
    // Behind the last marker it is of no interest.
    let mut rig = Rig::new();
    rig.say(&end(0, true, 0));
    rig.destination.on_marker(QueueIndex(0), 0);
    rig.destination.on_marker(QueueIndex(1), 0);
    rig.destination.give_up("queue pair 0 was disconnected");
    assert_eq!(rig.destination.cause(), None);
}

#[test]
fn zero_lists_are_bounded() {
    let mut rig = Rig::new();
    for sequence in 1..=8 {
        rig.say(&zeros(sequence));
        assert!(!rig.is_ended());
    }
    rig.say(&zeros(9));
    assert!(rig.is_ended());
}

#[test]
fn pinning_all_needs_room_for_all() {
    let answer = |pinned_bytes_max| {
        let config = DestinationConfig { pinned_bytes_max, queues_max: 1 };
        let mut destination = Destination::new(&[PAGES], config, NOW);
        let offer = Terms { pinning: Pinning::All, ..TERMS };
        destination.on_message(NOW, &RdmaMessage::Offer(offer));
        match destination.poll_action() {
            Some(DestinationAction::Accepted(terms)) => terms,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(answer(16 << 20).pinning, Pinning::All);
    let lowered = answer(8 << 20);
    assert_eq!((lowered.pinning, lowered.queues), (Pinning::Dynamic, 1));
    assert_eq!(lowered.pinned_bytes_max, 4 << 20);
}

#[test]
fn a_silent_source_is_given_up() {
    let mut rig = Rig::new();
    while rig.destination.cause().is_none() {
        let at = rig.destination.poll_timeout().unwrap();
        rig.destination.on_timeout(at);
    }
    assert_eq!(rig.destination.cause(), Some(&Failure::Silent(5_000)));
    assert!(rig.is_ended());
}
