use super::super::layout::STRIPE_BYTES_MIN;
use super::super::work::{Post, Work, WorkSequence};
use super::*;
use martlet_ram::{Run, RunKind};
use martlet_wire::rdma::{WireSpan, ZeroRange};

const NOW: Instant = Instant(1_000_000);
const MIB_PAGES: u64 = 256;

fn config() -> SourceConfig {
    SourceConfig { chunk_bytes: 1 << 20, unit_chunks: 4, queues: 1, ..SourceConfig::DEFAULT }
}

fn data(first_page: u64, count: u32) -> Run {
    Run { region: RegionIndex(0), kind: RunKind::Data, first_page, count }
}

fn zero(first_page: u64, count: u32) -> Run {
    Run { kind: RunKind::Zero, ..data(first_page, count) }
}

/// A source with 64 MiB of memory, whose peer accepts what is offered.
struct Rig {
    source: Source,
    sent: Vec<RdmaMessage>,
    said: Vec<SourceAction>,
}

impl Rig {
    fn new(config: SourceConfig) -> Rig {
        let source = Source::new(&[64 * MIB_PAGES], config, NOW).unwrap();
        let mut rig = Rig { source, sent: Vec::new(), said: Vec::new() };
        rig.take();
        let Some(RdmaMessage::Offer(terms)) = rig.sent.pop() else { panic!("no offer") };
        rig.source.on_message(NOW, &RdmaMessage::Accept(terms));
        rig.take();
        assert!(matches!(rig.said.pop(), Some(SourceAction::Connect(_))));
        rig.source.on_connected(NOW, 16);
        rig
    }

    /// Takes all actions; registers here at once.
    fn take(&mut self) {
        while let Some(action) = self.source.poll_action() {
            match action {
                SourceAction::Send(message) => self.sent.push(message),
                SourceAction::Register { unit, .. } => {
                    self.source.on_registered(NOW, unit, Ok(LocalKey(7)));
                }
                SourceAction::Deregister { unit } => self.source.on_deregistered(unit),
                other => self.said.push(other),
            }
        }
    }

    /// Grants every key that was asked for.
    fn grant(&mut self) {
        self.take();
        let grant = |span: &WireSpan| Grant {
            span: *span,
            address: 0x10_0000_0000 + span.first_chunk * (1 << 20),
            key: 9,
        };
        for message in std::mem::take(&mut self.sent) {
            match message {
                RdmaMessage::KeyRequest(spans) => {
                    let grants = spans.iter().map(grant).collect();
                    self.source.on_message(NOW, &RdmaMessage::KeyGrant(grants));
                }
                other => self.sent.push(other),
            }
        }
        self.take();
    }

    fn offer(&mut self, mut run: Run) -> u32 {
        let count = run.count;
        self.source.offer(&mut run);
        count - run.count
    }

    fn posts(&mut self) -> Vec<(QueueIndex, Post)> {
        let (mut all, mut list) = (Vec::new(), Vec::new());
        while let Some(queue) = self.source.poll_posts(&mut list) {
            assert!(list.last().is_some_and(|post| post.signalled), "the last one is signalled");
            all.extend(list.iter().map(|post| (queue, *post)));
        }
        all
    }

    fn complete(&mut self, queue: u16, sequence: u64, status: WorkStatus) {
        let completion = WorkCompletion { sequence: WorkSequence(sequence), status };
        self.source.on_completion(NOW, QueueIndex(queue), completion);
        self.take();
    }
}

/// First page and length of what is written.
fn written(posts: &[(QueueIndex, Post)]) -> Vec<(u64, u64)> {
    let pages = |(_, post): &(_, Post)| match post.work {
        Work::Write { pages, .. } => Some((pages.first_page(), pages.pages())),
        Work::Marker { .. } => None,
    };
    posts.iter().filter_map(pages).collect()
}

#[test]
fn runs_become_long_messages_across_the_borders_of_chunks() {
    let mut rig = Rig::new(config());
    // Scattered, then 64 KiB at a time from the middle of the first chunk to the third.
    assert_eq!(rig.offer(data(3, 1)), 1);
    for step in 0..32 {
        assert_eq!(rig.offer(data(128 + 16 * step, 16)), 16);
    }
    // Behind a hole, over the end of the unit.
    assert_eq!(rig.offer(data(1_000, 600)), 600);
    assert!(rig.posts().is_empty(), "no keys yet");
    rig.grant();
    let posts = rig.posts();
    let held = rig.source.counters().messages_waiting;
    assert_eq!(written(&posts), [(3, 1), (128, 512), (1_000, 24), (1_024, 512)]);
    let Work::Write { to, .. } = posts[1].1.work else { panic!("a write") };
    assert_eq!(to, 0x10_0000_0000 + 128 * 4096);
    // The tail may still grow, and the link is not idle.
    assert_eq!(held, 1);
    assert_eq!(rig.offer(data(1_600, 400)), 400);
    assert_eq!(written(&rig.posts()), [(1_536, 464)]);
}

#[test]
fn a_small_message_goes_at_once_if_the_link_is_idle() {
    let mut rig = Rig::new(config());
    rig.offer(data(0, 1));
    rig.grant();
    assert_eq!(written(&rig.posts()), [(0, 1)]);
    rig.offer(data(1, 1));
    assert!(rig.posts().is_empty());
    rig.complete(0, 0, WorkStatus::SUCCESS);
    assert_eq!(written(&rig.posts()), [(1, 1)]);
}

#[test]
fn every_version_of_a_page_takes_the_same_queue_pair() {
    let mut rig = Rig::new(SourceConfig { queues: 4, ..config() });
    let stripe = STRIPE_BYTES_MIN / 4096;
    let mut seen = Vec::new();
    for _ in 0..2 {
        for n in 0..8 {
            rig.offer(data(n * stripe + 5, 1));
        }
        rig.grant();
        rig.source.end_round(false);
        rig.take();
        let posts = rig.posts();
        let mut queues: Vec<_> =
            posts.iter().filter(|(_, post)| matches!(post.work, Work::Write { .. })).collect();
        queues.sort_by_key(|(_, post)| match post.work {
            Work::Write { pages, .. } => pages.first_page(),
            Work::Marker { .. } => unreachable!("filtered"),
        });
        seen.push(queues.iter().map(|(queue, _)| *queue).collect::<Vec<_>>());
        for (queue, post) in
            posts.iter().filter(|(_, post)| matches!(post.work, Work::Marker { .. }))
        {
            rig.complete(queue.0, post.sequence.0, WorkStatus::SUCCESS);
        }
        assert!(matches!(rig.said.pop(), Some(SourceAction::Drained(_))));
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0][..4], [0, 1, 2, 3].map(QueueIndex));
}

#[test]
fn a_round_ends_when_all_is_written_and_all_is_zeroed() {
    let mut rig = Rig::new(config());
    rig.offer(data(0, 8));
    rig.offer(zero(8, 8));
    rig.grant();
    assert!(rig.sent.iter().any(|message| matches!(message, RdmaMessage::ZeroList(_))));
    rig.source.end_round(false);
    rig.take();
    assert!(matches!(rig.sent.last(), Some(RdmaMessage::RoundEnd(end)) if end.zero_lists == 1));
    let posts = rig.posts();
    assert!(matches!(posts.last(), Some((_, post)) if post.work == Work::Marker { round: 0 }));
    let last = posts.last().unwrap().1.sequence.0;
    rig.complete(0, last, WorkStatus::SUCCESS);
    assert!(rig.said.is_empty(), "zeros are under way");
    assert!(!rig.source.is_open());
    rig.source.on_message(NOW, &RdmaMessage::ZeroDone { sequence: 1 });
    rig.take();
    assert_eq!(rig.said, [SourceAction::Drained(Drain::Round { round: 0, last: false })]);
    // The same page again, now.
    assert_eq!(rig.offer(data(0, 1)), 1);
}

#[test]
#[should_panic(expected = "behind the cursor")]
fn a_page_is_taken_once_an_epoch() {
    let mut rig = Rig::new(config());
    rig.offer(data(5, 2));
    rig.offer(data(6, 1));
}

#[test]
fn a_jump_drains_and_then_any_page_may_come() {
    let mut rig = Rig::new(config());
    rig.offer(data(500, 1));
    rig.grant();
    rig.posts();
    rig.source.jump();
    rig.take();
    assert!(rig.said.is_empty());
    rig.complete(0, 0, WorkStatus::SUCCESS);
    assert_eq!(rig.said, [SourceAction::Drained(Drain::Jump)]);
    assert!(!rig.sent.iter().any(|message| matches!(message, RdmaMessage::RoundEnd(_))));
    assert_eq!(rig.offer(data(500, 1)), 1);
}

#[test]
fn what_was_not_retired_is_reported_once() {
    let mut rig = Rig::new(config());
    rig.offer(data(0, 4));
    rig.offer(data(10, 4));
    rig.offer(zero(20, 1));
    rig.grant();
    rig.source.on_message(NOW, &RdmaMessage::ZeroDone { sequence: 1 });
    assert_eq!(rig.posts().len(), 2);
    // The next unit, which has no key; and a zero range.
    rig.offer(data(1_024, 3));
    rig.offer(zero(2_000, 5));
    rig.take();
    rig.complete(0, 0, WorkStatus::SUCCESS);
    rig.complete(0, 1, WorkStatus(11));
    let cause = rig.source.cause().unwrap();
    assert!(matches!(cause, Failure::Work { status: WorkStatus(11), pages: Some(_), .. }));
    let mut pages: Vec<_> =
        rig.source.unretired().map(|span| (span.first_page(), span.pages())).collect();
    pages.sort_unstable();
    assert_eq!(pages, [(10, 4), (1_024, 3), (2_000, 5)]);
    assert!(matches!(rig.sent.last(), Some(RdmaMessage::Close { .. })));
    assert_eq!(rig.said, [SourceAction::CloseQueues]);
    rig.source.on_queues_closed();
    rig.take();
    assert_eq!(rig.said.len(), 1, "nothing may take another way yet");
    rig.source.on_message(NOW, &RdmaMessage::Revoked { rounds: 0 });
    rig.take();
    assert_eq!(rig.said[1], SourceAction::Closed { revoked: true });
}

#[test]
fn the_first_real_error_is_the_cause() {
    let mut rig = Rig::new(SourceConfig { queues: 2, ..config() });
    rig.offer(data(0, 1));
    rig.offer(data(2_048, 1));
    rig.grant();
    assert_eq!(rig.posts().len(), 2);
    rig.complete(0, 0, WorkStatus::FLUSHED);
    assert_eq!(rig.source.cause(), Some(&Failure::Flushed(QueueIndex(0))));
    rig.complete(1, 0, WorkStatus(12));
    assert!(matches!(rig.source.cause(), Some(Failure::Work { queue: QueueIndex(1), .. })));
    rig.complete(1, 0, WorkStatus(4));
    let kept = rig.source.cause();
    assert!(matches!(kept, Some(Failure::Work { status: WorkStatus(12), .. })));
}

#[test]
fn a_lost_acknowledgement_of_the_last_marker_is_no_failure() {
    for failed_first in [false, true] {
        let mut rig = Rig::new(config());
        rig.offer(data(0, 1));
        rig.grant();
        rig.source.end_round(true);
        rig.take();
        assert_eq!(rig.posts().len(), 2);
        if failed_first {
            rig.source.give_up(NOW, "queue pair 0 was disconnected");
            rig.take();
            rig.source.on_queues_closed();
            rig.said.clear();
        }
        rig.source.on_message(NOW, &RdmaMessage::Revoked { rounds: 1 });
        rig.take();
        assert_eq!(rig.said, [SourceAction::Finished]);
        assert_eq!(rig.source.cause(), None);
    }
}

#[test]
fn units_make_room_for_others_only_when_idle() {
    let budget = 8 << 20;
    let mut rig = Rig::new(SourceConfig { pinned_bytes_max: budget, ..config() });
    for unit in 0..2 {
        rig.offer(data(unit * 1_024, 1));
    }
    // Behind something else a short message does not wait to grow.
    rig.offer(zero(1_030, 1));
    rig.grant();
    assert_eq!(rig.posts().len(), 2);
    rig.offer(data(2 * 1_024, 1));
    rig.offer(zero(2_060, 1));
    rig.grant();
    assert_eq!(rig.source.counters().units_dropped, 0, "both are in use");
    rig.complete(0, 0, WorkStatus::SUCCESS);
    let spans = rig.sent.iter().find_map(|message| match message {
        RdmaMessage::KeyDrop(spans) => Some(spans.clone()),
        _ => None,
    });
    let spans = spans.unwrap();
    assert_eq!(spans, [WireSpan { region: 0, first_chunk: 0, chunks: 4 }]);
    assert!(rig.posts().is_empty(), "still pinned at the destination");
    rig.source.on_message(NOW, &RdmaMessage::KeyDropped(spans));
    rig.grant();
    assert_eq!(written(&rig.posts()), [(2_048, 1)]);
    assert!(rig.source.counters().pinned_bytes <= budget);
}

#[test]
fn keys_are_asked_for_ahead_and_in_one_message() {
    let mut rig = Rig::new(SourceConfig { units_ahead: 3, ..config() });
    rig.source.prefetch(|pages| pages.first_page() >= 2_048);
    rig.take();
    let Some(RdmaMessage::KeyRequest(spans)) = rig.sent.pop() else { panic!("no request") };
    assert_eq!(spans.iter().map(|span| span.first_chunk).collect::<Vec<_>>(), [8, 12, 16]);
    rig.source.prefetch(|_| true);
    rig.take();
    assert!(rig.sent.is_empty(), "three are enough");
    rig.offer(data(4 * 1_024, 1));
    rig.source.prefetch(|_| true);
    rig.take();
    let Some(RdmaMessage::KeyRequest(spans)) = rig.sent.pop() else { panic!("no request") };
    assert_eq!(spans.iter().map(|span| span.first_chunk).collect::<Vec<_>>(), [20, 24]);
}

#[test]
fn a_destination_that_lies_is_found_out() {
    let span = WireSpan { region: 0, first_chunk: 0, chunks: 4 };
    let grant = |span, address| RdmaMessage::KeyGrant(vec![Grant { span, address, key: 1 }]);
    let other = WireSpan { first_chunk: 4, ..span };
    let lies = [
        grant(other, 0),
        grant(WireSpan { first_chunk: 1, ..span }, 0),
        grant(WireSpan { region: 9, ..span }, 0),
        grant(span, u64::MAX - 4095),
        RdmaMessage::KeyGrant(vec![Grant { span, address: 0, key: 1 }; 2]),
        RdmaMessage::KeyRefusal(vec![other]),
        RdmaMessage::KeyRefusal(vec![WireSpan { chunks: 5, ..span }]),
        RdmaMessage::KeyDropped(vec![span]),
        RdmaMessage::ZeroDone { sequence: 1 },
        RdmaMessage::Revoked { rounds: 0 },
        RdmaMessage::KeyRequest(vec![span]),
    ];
    for lie in lies {
        let mut rig = Rig::new(config());
        rig.offer(data(0, 1));
        rig.take();
        rig.source.on_message(NOW, &lie);
        assert!(matches!(rig.source.cause(), Some(Failure::Peer(_))), "{lie:?}");
        assert!(rig.posts().is_empty());
    }
    let mut rig = Rig::new(config());
    rig.offer(data(0, 1));
    rig.take();
    rig.source.on_message(NOW, &RdmaMessage::KeyRefusal(vec![span]));
    assert_eq!(rig.source.cause(), Some(&Failure::Refused(span)));
}

#[test]
fn terms_can_be_lowered_but_not_changed() {
    let answer = |change: &dyn Fn(&mut Terms)| {
        let mut source = Source::new(&[64 * MIB_PAGES], config(), NOW).unwrap();
        let Some(SourceAction::Send(RdmaMessage::Offer(mut terms))) = source.poll_action() else {
            panic!("no offer")
        };
        change(&mut terms);
        source.on_message(NOW, &RdmaMessage::Accept(terms));
        source.cause().is_none()
    };
    assert!(answer(&|_| {}));
    assert!(answer(&|terms| terms.pinned_bytes_max = 8 << 20));
    assert!(!answer(&|terms| terms.pinned_bytes_max = 4 << 20));
    assert!(!answer(&|terms| terms.queues = 2));
    assert!(!answer(&|terms| terms.chunk_bytes = 2 << 20));
    assert!(!answer(&|terms| terms.unit_chunks = 1));
    assert!(!answer(&|terms| terms.pinning = Pinning::All));
}

#[test]
fn a_number_of_queue_pairs_that_can_not_be() {
    for queues in [0, 65] {
        let config = SourceConfig { queues, ..config() };
        let refused = Source::new(&[MIB_PAGES], config, NOW).map(drop);
        assert_eq!(refused, Err(LayoutError::Queues(queues)));
    }
}

#[test]
fn silence_and_stalls_end_it() {
    let mut rig = Rig::new(config());
    let mut now = NOW;
    let mut beats = 0;
    while rig.source.cause().is_none() {
        now = rig.source.poll_timeout().unwrap().max(now);
        rig.source.on_timeout(now);
        rig.take();
        beats += rig.sent.drain(..).filter(|m| matches!(m, RdmaMessage::Heartbeat { .. })).count();
    }
    assert_eq!(rig.source.cause(), Some(&Failure::Silent(5_000)));
    assert_eq!(beats, 9);
    // Nobody answers the close either.
    rig.source.on_queues_closed();
    let end = rig.source.poll_timeout().unwrap();
    rig.source.on_timeout(end);
    rig.take();
    assert_eq!(rig.said.last(), Some(&SourceAction::Closed { revoked: false }));

    let mut rig = Rig::new(config());
    rig.offer(data(0, 1));
    rig.grant();
    rig.posts();
    let mut now = NOW;
    while rig.source.cause().is_none() {
        now = now.after(Duration::from_secs(1));
        rig.source.on_message(now, &RdmaMessage::Heartbeat { sent_ns: 0 });
        rig.source.on_timeout(now);
    }
    assert_eq!(rig.source.cause(), Some(&Failure::Stalled(30_000)));
}

#[test]
fn zero_ranges_wait_when_too_many_lists_are_under_way() {
    let mut rig = Rig::new(config());
    let mut taken = 0;
    for page in 0..8_000 {
        taken += rig.offer(zero(2 * page, 1));
        rig.take();
    }
    let lists = rig.sent.iter().filter_map(|message| match message {
        RdmaMessage::ZeroList(list) => Some(list.ranges.len()),
        _ => None,
    });
    let lists: Vec<usize> = lists.collect();
    assert_eq!((lists.len(), lists[0]), (8, 1));
    let sent: usize = lists.iter().sum();
    assert_eq!(taken as usize, sent + 512, "one more list is gathered");
    let first = ZeroRange { region: 0, first_page: 0, count: 1 };
    assert!(matches!(&rig.sent[0], RdmaMessage::ZeroList(list) if list.ranges == [first]));
    rig.source.on_message(NOW, &RdmaMessage::ZeroDone { sequence: 8 });
    rig.take();
    assert!(matches!(rig.sent.last(), Some(RdmaMessage::ZeroList(list)) if list.sequence == 9));
}

/// The peer is alive and lets the time pass; whether RDMA has ended after it.
fn ends_within(source: &mut Source, limit: Duration) -> bool {
    let mut now = NOW;
    while now.since(NOW) < limit {
        now = now.after(Duration::from_millis(400));
        source.on_message(now, &RdmaMessage::Heartbeat { sent_ns: now.0 });
        if source.poll_timeout().is_some_and(|at| at <= now) {
            source.on_timeout(now);
        }
    }
    source.cause().is_some()
}

#[test]
fn a_destination_that_lives_and_never_answers_is_not_waited_for_without_end() {
    let long = STALL_MAX + Duration::from_secs(2);
    let mut unaccepted = Source::new(&[64 * MIB_PAGES], config(), NOW).unwrap();
    assert!(ends_within(&mut unaccepted, long), "the terms");
    let mut rig = Rig::new(config());
    rig.offer(data(0, 8));
    rig.take();
    assert!(ends_within(&mut rig.source, long), "a key");
    let mut rig = Rig::new(config());
    rig.offer(zero(0, 8));
    rig.take();
    assert!(ends_within(&mut rig.source, long), "the execution of a zero list");
}

#[test]
fn a_source_that_had_nothing_to_send_for_long_has_not_stalled() {
    let mut rig = Rig::new(config());
    assert!(!ends_within(&mut rig.source, 3 * STALL_MAX));
    let now = NOW.after(3 * STALL_MAX);
    rig.offer(data(0, 8));
    rig.grant();
    assert_eq!(rig.posts().len(), 1);
    rig.source.on_timeout(now.after(Duration::from_millis(1)));
    assert_eq!(rig.source.cause(), None);
}
