//! What the suite can't ask of every provider: peers that lie, and strict limits.

use crate::frame::{HEADER_BYTES, Header, RECORD_BYTES, Record, Verb};
use crate::{Soft, SoftPair, SoftRegion};
use martlet_verbs::conformance::Arena;
use martlet_verbs::{
    Access, Completion, Operation, RemoteAddress, Rkey, Sge, Signal, Status, WorkId, WorkRequest,
};
use martlet_verbs::{ConnectRequest, Endpoint, Fabric, Link, Listener, QueuePair, Region, Setup};
use martlet_verbs::{PostFault, VerbsError};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);
const PAGE: usize = 4096;

fn any_port() -> Endpoint {
    Endpoint::Ip("127.0.0.1:0".parse().unwrap())
}

/// A soft queue pair whose peer is a bare socket that said hello.
fn against_bare_socket(soft: &Soft) -> (SoftPair, TcpStream) {
    let mut listener = soft.listen(&any_port()).unwrap();
    let Endpoint::Ip(at) = listener.local() else { panic!("an IP address") };
    let mut bare = TcpStream::connect(at).unwrap();
    bare.set_read_timeout(Some(LIMIT)).unwrap();
    let mut hello = [0; 64];
    hello[..8].copy_from_slice(b"mvsoft/1");
    bare.write_all(&hello).unwrap();
    let request = listener.accept(LIMIT).unwrap().unwrap();
    let pair = request.accept(&Setup::default(), &[], LIMIT).unwrap();
    bare.read_exact(&mut [0; 204]).unwrap();
    (pair, bare)
}

/// As above, with the soft side connecting.
fn to_bare_socket(soft: &Soft, setup: &Setup) -> (SoftPair, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Endpoint::Ip(listener.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        let (mut bare, _) = listener.accept().unwrap();
        bare.set_read_timeout(Some(LIMIT)).unwrap();
        bare.read_exact(&mut [0; 64]).unwrap();
        let mut answer = [0; 204];
        answer[..8].copy_from_slice(b"mvsoft/a");
        bare.write_all(&answer).unwrap();
        bare
    });
    let (pair, _) = soft.connect(&at, setup, &[], LIMIT).unwrap();
    (pair, answering.join().unwrap())
}

fn until<T>(mut get: impl FnMut() -> Option<T>) -> T {
    for _ in 0..10_000 {
        if let Some(value) = get() {
            return value;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it never happened");
}

fn ended(pair: &mut SoftPair) -> Link {
    until(|| Some(pair.link()).filter(|&link| link != Link::Up))
}

fn completions(pair: &mut SoftPair, count: usize) -> Vec<Completion> {
    let mut all = Vec::new();
    until(|| {
        let mut places = [Completion::default(); 8];
        let got = pair.poll(&mut places).unwrap();
        all.extend_from_slice(&places[..got]);
        (all.len() >= count).then_some(())
    });
    all
}

fn write(region: &SoftRegion, id: u64, offset: u64, bytes: u32) -> WorkRequest {
    let address = region.address().0 + offset;
    let local = Sge { address, bytes, key: region.local_key() };
    let operation = Operation::Write { to: RemoteAddress(0x5000), key: Rkey(1) };
    WorkRequest { id: WorkId(id), operation, local, signal: Signal::Completion }
}

/// A target with one region in the middle of three pages.
struct Target {
    arena: Arena,
    region: SoftRegion,
    pair: SoftPair,
    bare: TcpStream,
}

impl Target {
    fn new() -> Target {
        let soft = Soft::new();
        let arena = Arena::new(3 * PAGE).unwrap();
        arena.fill(0, 3 * PAGE, 0xaa);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = soft.register(&arena.memory(PAGE, PAGE), access).unwrap();
        let (pair, bare) = against_bare_socket(&soft);
        Target { arena, region, pair, bare }
    }

    fn record(&self, verb: Verb, offset: u64, bytes: u32) -> Record {
        let address = self.region.address().0.wrapping_add(offset);
        Record { verb, bytes, key: self.region.remote_key().0, address }
    }

    fn margins_are_clean(&self) -> bool {
        self.arena.is_all(0, PAGE, 0xaa) && self.arena.is_all(2 * PAGE, PAGE, 0xaa)
    }
}

fn requests(first: u64, records: &[Record]) -> Vec<u8> {
    let count = records.len();
    let mut bytes = Header::Requests { first, count, again: false }.to_bytes().to_vec();
    bytes.extend(records.iter().flat_map(|record| record.to_bytes()));
    bytes
}

#[test]
fn a_bare_peer_can_write_what_it_may_and_hears_of_it() {
    let mut target = Target::new();
    let record = target.record(Verb::Write, 8, 4);
    target.bare.write_all(&requests(0, &[record])).unwrap();
    target.bare.write_all(b"page").unwrap();
    let mut answer = [0; HEADER_BYTES];
    target.bare.read_exact(&mut answer).unwrap();
    assert_eq!(Header::parse(&answer), Ok(Header::Ack { placed: 1 }));
    assert_eq!(target.arena.read(PAGE + 8, 4), b"page");
    assert_eq!(target.pair.link(), Link::Up);
}

#[test]
fn what_says_no_hello_costs_a_listener_nothing() {
    let mut listener = Soft::new().listen(&any_port()).unwrap();
    let Endpoint::Ip(at) = listener.local() else { panic!("an IP address") };
    let mut other = TcpStream::connect(at).unwrap();
    other.write_all(&[b'G'; 64]).unwrap();
    let mut bare = TcpStream::connect(at).unwrap();
    let mut hello = [0; 64];
    hello[..8].copy_from_slice(b"mvsoft/1");
    bare.write_all(&hello).unwrap();
    assert!(listener.accept(LIMIT).unwrap().is_some());
    assert_eq!(other.read(&mut [0]).unwrap_or(0), 0, "it is turned away");
}

#[test]
fn a_request_outside_of_a_region_is_refused_after_those_before_it() {
    for offset in [PAGE as u64 - 3, u64::MAX, PAGE as u64, 1 << 40] {
        let mut target = Target::new();
        let good = target.record(Verb::Write, 0, 4);
        let bad = target.record(Verb::Write, offset, 4);
        target.bare.write_all(&requests(0, &[good, bad, good])).unwrap();
        target.bare.write_all(b"goodevilgood").unwrap();
        assert_eq!(ended(&mut target.pair), Link::Failed);
        let mut heard = Vec::new();
        target.bare.read_to_end(&mut heard).unwrap();
        let last = heard.last_chunk::<HEADER_BYTES>().unwrap();
        let nak = Header::Nak { request: 1, status: Status::REMOTE_ACCESS };
        assert_eq!(Header::parse(last), Ok(nak));
        assert_eq!(target.arena.read(PAGE, 4), b"good");
        assert!(target.margins_are_clean());
    }
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_the_connection() {
    let ack = |placed| Header::Ack { placed }.to_bytes().to_vec();
    let mut unknown = requests(0, &[Target::new().record(Verb::Write, 0, 4)]);
    unknown[HEADER_BYTES] = 9;
    let mut long = requests(0, &[Target::new().record(Verb::Write, 0, 4)]);
    long[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    let status = Status::REMOTE_ACCESS;
    for (what, bytes) in [
        ("zeros", vec![0; 64]),
        ("noise", vec![0xff; 64]),
        ("an unknown request", unknown),
        ("too long a request", long),
        ("a request out of turn", requests(1, &[Target::new().record(Verb::Write, 0, 4)])),
        ("an acknowledgement of nothing", ack(1)),
        ("an acknowledgement of everything", ack(u64::MAX)),
        ("a failure of nothing", Header::Nak { request: 5, status }.to_bytes().to_vec()),
        ("an RNR of nothing", Header::Rnr { request: 7 }.to_bytes().to_vec()),
        ("an answer to no read", Header::Data { request: 0 }.to_bytes().to_vec()),
    ] {
        let mut target = Target::new();
        target.bare.write_all(&bytes).unwrap();
        assert_eq!(ended(&mut target.pair), Link::Failed, "{what}");
        assert!(target.margins_are_clean() && target.arena.is_all(PAGE, PAGE, 0xaa), "{what}");
    }
}

#[test]
fn reads_need_access_and_are_bounded() {
    let mut target = Target::new();
    let read = target.record(Verb::Read, 0, 64);
    target.bare.write_all(&requests(0, &[read])).unwrap();
    assert_eq!(ended(&mut target.pair), Link::Failed);
    let mut heard = Vec::new();
    target.bare.read_to_end(&mut heard).unwrap();
    let nak = Header::Nak { request: 0, status: Status::REMOTE_ACCESS };
    assert_eq!(heard, nak.to_bytes());
}

#[test]
fn a_peer_that_hangs_up_in_a_request_is_a_failure() {
    let mut target = Target::new();
    let record = target.record(Verb::Write, 0, 4096);
    target.bare.write_all(&requests(0, &[record])).unwrap();
    target.bare.write_all(b"half").unwrap();
    drop(target.bare);
    assert_eq!(ended(&mut target.pair), Link::Failed);
    assert!(target.arena.is_all(0, PAGE, 0xaa) && target.arena.is_all(2 * PAGE, PAGE, 0xaa));
}

#[test]
fn a_peer_that_vanishes_is_a_peer_that_does_not_answer() {
    let soft = Soft::new();
    let arena = Arena::new(PAGE).unwrap();
    let region = soft.register(&arena.memory(0, PAGE), Access::empty()).unwrap();
    let (mut pair, bare) = to_bare_socket(&soft, &Setup::default());
    pair.post_receives(&[WorkId(9)]).unwrap();
    let silent = WorkRequest { signal: Signal::None, ..write(&region, 2, 0, 64) };
    pair.post(&[write(&region, 1, 0, 64), silent, write(&region, 3, 0, 64)]).unwrap();
    // It takes the first request, says nothing, and is gone.
    (&bare).read_exact(&mut [0; HEADER_BYTES + RECORD_BYTES]).unwrap();
    drop(bare);
    let came = completions(&mut pair, 4);
    let ends: Vec<(u64, Status)> = came.iter().map(|one| (one.id.0, one.status)).collect();
    let flushed = Status::FLUSHED;
    assert_eq!(ends, [(1, Status::RETRY_EXCEEDED), (2, flushed), (3, flushed), (9, flushed)]);
    assert_eq!(pair.link(), Link::Failed);
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_completes_nothing() {
    let soft = Soft::new();
    let arena = Arena::new(PAGE).unwrap();
    let region = soft.register(&arena.memory(0, PAGE), Access::empty()).unwrap();
    let (mut pair, mut bare) = to_bare_socket(&soft, &Setup::default());
    pair.post(&[write(&region, 1, 0, 64)]).unwrap();
    bare.read_exact(&mut [0; HEADER_BYTES + RECORD_BYTES + 64]).unwrap();
    bare.write_all(&Header::Ack { placed: 2 }.to_bytes()).unwrap();
    let came = completions(&mut pair, 1);
    assert_eq!(came[0].status, Status::REMOTE_OPERATION);
}

#[test]
fn the_send_queue_has_exactly_its_slots() {
    let soft = Soft::new();
    let arena = Arena::new(PAGE).unwrap();
    let region = soft.register(&arena.memory(0, PAGE), Access::empty()).unwrap();
    let setup = Setup { send_slots: 4, receive_slots: 2, ..Setup::default() };
    let (mut pair, mut bare) = to_bare_socket(&soft, &setup);
    let list: Vec<WorkRequest> = (0..6)
        .map(|id| write(&region, id, 0, 8))
        .map(|request| WorkRequest { signal: Signal::None, ..request })
        .collect();
    let mut last = list[3];
    last.signal = Signal::Completion;
    let error = pair.post(&[list[0], list[1], list[2], last, list[4], list[5]]).unwrap_err();
    assert!(matches!((error.posted, error.cause), (4, PostFault::Full)));
    // Done is not enough: the completion must be polled.
    bare.write_all(&Header::Ack { placed: 0 }.to_bytes()).unwrap();
    bare.read_exact(&mut [0; HEADER_BYTES + 4 * (RECORD_BYTES + 8)]).unwrap();
    pair.arm().unwrap();
    bare.write_all(&Header::Ack { placed: 4 }.to_bytes()).unwrap();
    until(|| pair.wait(Duration::from_millis(1)).unwrap().then_some(()));
    assert_eq!(pair.post(&[list[4]]).unwrap_err().posted, 0);
    assert_eq!(completions(&mut pair, 1)[0].id, WorkId(3));
    pair.post(&list[..4]).unwrap();
    let error = pair.post_receives(&[WorkId(1), WorkId(2), WorkId(3)]).unwrap_err();
    assert_eq!(error.posted, 2);
}

#[test]
fn completions_that_nobody_takes_end_the_queue_pair() {
    let soft = Soft::new();
    let arena = Arena::new(PAGE).unwrap();
    let region = soft.register(&arena.memory(0, PAGE), Access::empty()).unwrap();
    let setup = Setup { completion_slots: 2, ..Setup::default() };
    let (mut pair, mut bare) = to_bare_socket(&soft, &setup);
    let list: Vec<WorkRequest> = (0..3).map(|id| write(&region, id, 0, 8)).collect();
    pair.post(&list).unwrap();
    bare.read_exact(&mut [0; HEADER_BYTES + 3 * (RECORD_BYTES + 8)]).unwrap();
    bare.write_all(&Header::Ack { placed: 3 }.to_bytes()).unwrap();
    assert_eq!(ended(&mut pair), Link::Failed);
    let mut places = [Completion::default(); 8];
    assert_eq!(pair.poll(&mut places).unwrap(), 2);
    assert!(matches!(pair.poll(&mut places), Err(VerbsError::CompletionOverrun)));
}

#[test]
fn a_source_that_is_deregistered_while_it_is_sent_is_left_alone() {
    let soft = Soft::new();
    let bytes = 32 << 20;
    let arena = Arena::new(bytes).unwrap();
    let region = soft.register(&arena.memory(0, bytes), Access::empty()).unwrap();
    let (mut pair, bare) = to_bare_socket(&soft, &Setup::default());
    // More than the sockets hold, so that the peer, who reads nothing, keeps it unfinished.
    pair.post(&[write(&region, 1, 0, u32::try_from(bytes).unwrap())]).unwrap();
    (&bare).read_exact(&mut [0; HEADER_BYTES]).unwrap();
    drop((region, arena));
    // The memory is unmapped now. Reading on makes the sender go on.
    let drained = std::thread::spawn(move || (&bare).read_to_end(&mut Vec::new()).unwrap());
    let came = completions(&mut pair, 1);
    assert_eq!(came[0].status, Status::LOCAL_PROTECTION);
    assert!(drained.join().unwrap() < bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Frames that are almost right.
    #[test]
    fn nothing_outside_of_a_region_is_ever_written(
        records in prop::collection::vec(
            (0u8..3, 0u64..8200, 0u32..5000, any::<bool>()),
            1..12,
        ),
        flip in prop::option::of((0usize..200, 1u8..=255)),
        payload in 0usize..20_000,
    ) {
        let mut target = Target::new();
        let records: Vec<Record> = records
            .iter()
            .map(|&(verb, offset, bytes, right)| {
                let verb = [Verb::Write, Verb::WriteWithImmediate(1), Verb::Read][usize::from(verb)];
                let record = target.record(verb, offset.wrapping_sub(4100), bytes);
                Record { key: record.key ^ u32::from(!right), ..record }
            })
            .collect();
        let mut bytes = requests(0, &records);
        if let Some((at, value)) = flip
            && let Some(byte) = bytes.get_mut(at)
        {
            *byte ^= value;
        }
        bytes.resize(bytes.len() + payload, 0x55);
        let _ = target.bare.write_all(&bytes);
        let _ = target.bare.shutdown(std::net::Shutdown::Write);
        ended(&mut target.pair);
        prop_assert!(target.margins_are_clean());
    }
}
