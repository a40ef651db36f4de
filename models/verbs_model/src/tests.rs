use super::*;
use martlet_fault_plan::FaultPlan;
use martlet_units::Instant;
use proptest::prelude::*;
use std::time::Duration;

const BYTES: usize = 1 << 16;
const LATE: Instant = Instant(10_000_000_000);

/// 64 KiB at address 0 on each side.
struct Bytes([Vec<u8>; 2]);

impl Bytes {
    fn new() -> Bytes {
        Bytes([vec![0; BYTES], vec![0; BYTES]])
    }

    fn part(&mut self, side: Side, address: u64, length: usize) -> &mut [u8] {
        let address = usize::try_from(address).unwrap();
        &mut self.0[side.place()][address..address + length]
    }
}

impl Memory for Bytes {
    fn read(&mut self, side: Side, address: u64, into: &mut [u8]) {
        let length = into.len();
        into.copy_from_slice(self.part(side, address, length));
    }

    fn write(&mut self, side: Side, address: u64, bytes: &[u8]) {
        self.part(side, address, bytes.len()).copy_from_slice(bytes);
    }
}

const PARAMS: Params =
    Params { content: true, segment_bytes: 4096, rnr_retries: 2, ..Params::ROCE_100G };

struct Rig {
    net: Network,
    memory: Bytes,
    local: Key,
    remote: Key,
}

impl Rig {
    fn new(params: Params, seed: u64, faults: FaultPlan<Point, Fault>) -> Rig {
        let mut net = Network::new(params, seed, faults);
        let local = net.register(Side::A, 0, BYTES as u64, Access::SOURCE);
        let remote = net.register(Side::B, 0, BYTES as u64, Access::TARGET);
        Rig { net, memory: Bytes::new(), local, remote }
    }

    fn write(&self, id: u64, from: u64, to: u64, bytes: u64) -> Request {
        let operation = Operation::Write { to, key: self.remote };
        Request { id, operation, local_at: from, bytes, local: self.local, signalled: true }
    }

    fn marker(&self, id: u64, number: u32) -> Request {
        let operation = Operation::WriteWithImmediate { to: 0, key: Key(0), immediate: number };
        Request { id, operation, local_at: 0, bytes: 0, local: Key(0), signalled: true }
    }

    fn post(&mut self, pair: PairId, list: &[Request]) {
        self.net.post(Side::A, pair, Instant(0), list).unwrap();
    }

    fn advance(&mut self, ns: u64) {
        self.net.advance(Instant(ns), &mut self.memory);
    }

    fn finish(&mut self, pair: PairId) -> Vec<(u64, u32)> {
        self.net.advance(LATE, &mut self.memory);
        self.completions(pair)
    }

    fn completions(&mut self, pair: PairId) -> Vec<(u64, u32)> {
        let poll = || self.net.poll(Side::A, pair);
        std::iter::from_fn(poll).map(|c| (c.id, c.status.0)).collect()
    }
}

#[test]
fn the_source_is_read_when_the_request_has_its_turn() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let pair = rig.net.connect(8);
    rig.memory.part(Side::A, 0, 4096).fill(1);
    let list = [rig.write(0, 8192, 8192, 32_768), rig.write(1, 0, 0, 4096)];
    rig.post(pair, &list);
    rig.advance(500);
    // The first request is on the wire, the second waits: a store now travels.
    rig.memory.part(Side::A, 0, 4096).fill(2);
    assert_eq!(rig.finish(pair), [(0, 0), (1, 0)]);
    assert!(rig.memory.part(Side::B, 0, 4096).iter().all(|byte| *byte == 2));
}

#[test]
fn a_link_gives_what_its_headers_leave() {
    let params = Params { content: false, segment_bytes: 2 << 20, ..Params::ROCE_100G };
    let mut net = Network::new(params, 0, FaultPlan::default());
    let (bytes, count) = (2 << 20, 64);
    let local = net.register(Side::A, 0, bytes, Access::SOURCE);
    let remote = net.register(Side::B, 0, bytes, Access::TARGET);
    let pair = net.connect(count);
    let operation = Operation::Write { to: 0, key: remote };
    let request = Request { id: 0, operation, local_at: 0, bytes, local, signalled: true };
    net.post(Side::A, pair, Instant(0), &vec![request; count]).unwrap();
    let mut last = Instant(0);
    while let Some(at) = net.next_event() {
        net.advance(at, &mut NoMemory);
        last = at;
    }
    let expected = params.wire_time(bytes, true) * u32::try_from(count).unwrap();
    let took = last.since(Instant(0));
    assert!(took > expected && took < expected + Duration::from_micros(4), "{took:?}");
}

#[test]
fn a_failure_is_told_first_and_the_rest_is_flushed() {
    let fault = Fault::Fail(Status::REMOTE_OPERATION);
    let plan = FaultPlan::once(Point::Execute(Side::A), 2, fault);
    let mut rig = Rig::new(PARAMS, 0, plan);
    let pair = rig.net.connect(8);
    let mut list: Vec<_> = (0..5).map(|id| rig.write(id, 0, 4096 * id, 4096)).collect();
    (list[1].signalled, list[4].signalled) = (false, false);
    rig.memory.part(Side::A, 0, 4096).fill(7);
    rig.post(pair, &list);
    assert_eq!(rig.finish(pair), [(0, 0), (2, 11), (3, 5), (4, 5)]);
    let placed = (0..5).map(|page| rig.memory.part(Side::B, 4096 * page, 1)[0]);
    assert_eq!(placed.collect::<Vec<_>>(), [7, 7, 0, 0, 0]);
    rig.post(pair, &list[..1]);
    assert_eq!(rig.completions(pair), [(0, 5)], "flushed without being tried");
}

#[test]
fn a_lost_acknowledgement_fails_what_was_placed() {
    let fault = Fault::Fail(Status::RETRY_EXCEEDED);
    let plan = FaultPlan::once(Point::Acknowledge(Side::A), 1, fault);
    let mut rig = Rig::new(PARAMS, 0, plan);
    let pair = rig.net.connect(8);
    rig.memory.part(Side::A, 0, 4096).fill(7);
    let list: Vec<_> = (0..3).map(|id| rig.write(id, 0, 4096 * id, 4096)).collect();
    rig.post(pair, &list);
    assert_eq!(rig.finish(pair), [(0, 0), (1, 12), (2, 5)]);
    assert_eq!(rig.memory.part(Side::B, 8192, 1)[0], 7);
}

#[test]
fn keys_are_checked_when_bytes_move() {
    let status = |change: fn(&mut Rig, &mut Request)| {
        let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
        let pair = rig.net.connect(8);
        let mut request = rig.write(0, 0, 0, 4096);
        change(&mut rig, &mut request);
        rig.memory.part(Side::A, 0, BYTES).fill(9);
        rig.post(pair, &[request]);
        let status = rig.finish(pair)[0].1;
        let touched = rig.memory.part(Side::B, 0, BYTES).contains(&9);
        assert_eq!(touched, status == 0);
        status
    };
    assert_eq!(status(|_, _| {}), 0);
    assert_eq!(status(|_, request| request.local_at = BYTES as u64 - 1), 4);
    assert_eq!(status(|_, request| request.local = Key(1)), 4);
    assert_eq!(
        status(|rig, request| request.operation =
            Operation::Write { to: BYTES as u64 - 4095, key: rig.remote }),
        10
    );
    assert_eq!(status(|rig, _| assert!(rig.net.deregister(Side::B, rig.remote))), 10);
    // A key for local use is none for the peer.
    let local_only = |rig: &mut Rig, request: &mut Request| {
        let key = rig.net.register(Side::B, 0, 4096, Access::SOURCE);
        request.operation = Operation::Write { to: 0, key };
    };
    assert_eq!(status(local_only), 10);
}

#[test]
fn immediate_data_waits_for_a_receive() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let pair = rig.net.connect(8);
    rig.post(pair, &[rig.marker(1, 77)]);
    rig.advance(12_000);
    assert_eq!(rig.net.poll(Side::B, pair), None);
    rig.net.post_receive(Side::B, pair, 0);
    assert_eq!(rig.finish(pair), [(1, 0)]);
    assert_eq!(rig.net.poll(Side::B, pair).unwrap().immediate, Some(77));
    rig.post(pair, &[rig.marker(2, 78)]);
    rig.advance(2 * LATE.0);
    assert_eq!(rig.completions(pair), [(2, 13)], "after two more tries");
}

#[test]
fn what_is_behind_an_immediate_waits_with_it() {
    let mut rig = Rig::new(Params { rnr_retries: 7, ..PARAMS }, 0, FaultPlan::default());
    let pair = rig.net.connect(8);
    rig.memory.part(Side::A, 0, 4096).fill(5);
    let (to, key) = (0, rig.remote);
    let operation = Operation::WriteWithImmediate { to, key, immediate: 1 };
    let told = Request { operation, ..rig.write(1, 0, 0, 4096) };
    let behind = rig.write(2, 0, 8192, 4096);
    rig.post(pair, &[told, behind]);
    rig.advance(1_000_000);
    assert_eq!(rig.memory.part(Side::B, 8192, 1)[0], 0);
    rig.net.post_receive(Side::B, pair, 40);
    assert_eq!(rig.finish(pair), [(1, 0), (2, 0)]);
    let (status, immediate) = (Status::SUCCESS, Some(1));
    let told = Completion { id: 40, is_receive: true, status, immediate };
    assert_eq!(rig.net.poll(Side::B, pair), Some(told));
    assert_eq!((rig.memory.part(Side::B, 0, 1)[0], rig.memory.part(Side::B, 8192, 1)[0]), (5, 5));
}

#[test]
fn reads_need_their_access_on_both_sides() {
    let status = |remote_read, local_write| {
        let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
        let pair = rig.net.connect(8);
        let key = rig.net.register(Side::B, 0, 8192, Access { remote_read, ..Access::SOURCE });
        let local = rig.net.register(Side::A, 0, 8192, Access { local_write, ..Access::SOURCE });
        rig.memory.part(Side::B, 4096, 4096).fill(6);
        let operation = Operation::Read { at: 4096, key };
        let read = Request { operation, local, ..rig.write(1, 0, 0, 4096) };
        rig.post(pair, &[read]);
        let status = rig.finish(pair)[0].1;
        assert_eq!(rig.memory.part(Side::A, 0, 4096).contains(&6), status == 0);
        status
    };
    assert_eq!(status(true, true), 0);
    assert_eq!(status(false, true), 10);
    assert_eq!(status(true, false), 4);
}

#[test]
fn a_disconnect_is_told_and_flushes_both_sides() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let pair = rig.net.connect(8);
    rig.net.post_receive(Side::A, pair, 3);
    rig.net.disconnect(Side::B, pair, Instant(0));
    assert_eq!(
        (rig.net.link(Side::A, pair), rig.net.link(Side::B, pair)),
        (Link::Up, Link::Disconnected)
    );
    assert_eq!(rig.finish(pair), [(3, 5)]);
    assert_eq!(rig.net.link(Side::A, pair), Link::Disconnected);
}

#[test]
fn slots_come_back_when_completions_are_polled() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let pair = rig.net.connect(2);
    let silent = Request { signalled: false, ..rig.write(0, 0, 0, 4096) };
    let list = [silent, silent, silent];
    assert_eq!(rig.net.post(Side::A, pair, Instant(0), &list), Err(PostError::Full(2)));
    assert!(rig.finish(pair).is_empty());
    // Both are done, and both slots are lost for good: nothing will ever be polled.
    assert_eq!(rig.net.post(Side::A, pair, LATE, &list), Err(PostError::Full(0)));
}

#[test]
fn an_idle_connection_notices_nothing() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let (idle, busy) = (rig.net.connect(2), rig.net.connect(2));
    rig.net.cut();
    rig.post(busy, &[rig.write(0, 0, 0, 4096)]);
    assert_eq!(rig.finish(busy), [(0, 12)]);
    assert!(rig.completions(idle).is_empty());
}

#[test]
fn a_closed_end_takes_nothing_more() {
    let mut rig = Rig::new(PARAMS, 0, FaultPlan::default());
    let pair = rig.net.connect(4);
    rig.memory.part(Side::A, 0, 4096).fill(3);
    rig.post(pair, &[rig.write(0, 0, 0, 4096)]);
    assert_eq!(rig.net.writable_by_peer(Side::B), 1);
    rig.net.close(Side::B, pair);
    assert_eq!(rig.net.writable_by_peer(Side::B), 0);
    assert_eq!(rig.finish(pair), [(0, 12)]);
    assert_eq!(rig.memory.part(Side::B, 0, 1)[0], 0);
}

/// Two versions of a page, from two places, one posted right after the other.
fn stale(params: Params, seed: u64, one_pair: bool) -> bool {
    let mut rig = Rig::new(params, seed, FaultPlan::default());
    let first = rig.net.connect(8);
    let second = if one_pair { first } else { rig.net.connect(8) };
    rig.memory.part(Side::A, 0, 4096).fill(1);
    rig.memory.part(Side::A, 4096, 4096).fill(2);
    let (ahead, old, new) = (
        rig.write(0, 16_384, 16_384, 32_768),
        rig.write(1, 0, 0, 4096),
        rig.write(2, 4096, 0, 4096),
    );
    rig.post(first, &[ahead, old]);
    rig.post(second, &[new]);
    rig.finish(first);
    rig.memory.part(Side::B, 0, 1)[0] == 1
}

#[test]
fn versions_of_a_page_overtake_each_other_where_the_documents_allow_it() {
    let strict = Params { placement_spread: Duration::ZERO, ..PARAMS };
    let relaxed = Params { placement_spread: Duration::from_micros(5), ..PARAMS };
    let seen = |params, one_pair| (0..100).filter(|seed| stale(params, *seed, one_pair)).count();
    assert_eq!(seen(strict, true), 0);
    assert_eq!(seen(strict, false), 100, "nothing orders two queue pairs");
    assert!((20..80).contains(&seen(relaxed, true)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn equal_seeds_give_equal_runs_and_all_requests_end(
        seed: u64,
        faults in 0_u32..20_000,
        lengths in prop::collection::vec((1_u64..20_000, 0_usize..3), 1..40),
    ) {
        let run = || {
            let kinds = vec![
                (Point::Execute(Side::A), Fault::Fail(Status::REMOTE_OPERATION)),
                (Point::Execute(Side::A), Fault::Pause { ns: 5_000 }),
                (Point::Acknowledge(Side::A), Fault::Fail(Status::RETRY_EXCEEDED)),
            ];
            let params = Params { skew: Duration::from_micros(3), placement_spread: Duration::from_micros(9), ..PARAMS };
            let mut rig = Rig::new(params, seed, FaultPlan::random(seed, faults, kinds));
            let pairs = [0; 3].map(|_| rig.net.connect(64));
            for (id, (length, pair)) in (0_u64..).zip(&lengths) {
                rig.post(pairs[*pair], &[rig.write(id, 0, 0, *length)]);
            }
            pairs.map(|pair| rig.finish(pair))
        };
        let runs = run();
        prop_assert_eq!(&runs, &run());
        let mut ids: Vec<u64> = runs.iter().flatten().map(|(id, _)| *id).collect();
        for list in &runs {
            prop_assert!(list.windows(2).all(|pair| pair[0].0 < pair[1].0), "in order of posting");
            let cause = list.iter().position(|(_, status)| *status != 0).unwrap_or(list.len());
            prop_assert!(list[cause..].iter().skip(1).all(|(_, status)| *status == 5));
        }
        ids.sort_unstable();
        prop_assert_eq!(ids, (0..lengths.len() as u64).collect::<Vec<_>>());
    }
}
