//! Hostile bytes: every decoder against random input, every truncation and every bit flip of valid
//! input, and each limit by name.

use martlet_simulation::Chance;
use martlet_wire::control::{
    Abandon, Alive, Answer, CHANNELS_MAX, Commit, Committed, Control, Digest, Fate, InstanceId,
    MACHINE_BYTES_MAX, MigrationId, Ping, Pong, Query, REASON_BYTES_MAX, Rehearsed, RoundReceived,
    STATE_BYTES_MAX, Setup, SetupDone, State, SwitchoverSoon, WireRange,
};
use martlet_wire::frame::{
    DecodeError, FRAME_MAGIC, FrameHeader, Kind, Reader, ValueError, encode,
};
use martlet_wire::hello::{Hello, HelloError, HelloReply, Status, check_hello_prefix};
use martlet_wire::pages::{PAYLOAD_PAGES_MAX, PagesError, PagesFrame, PagesHeader, RunEntry};
use martlet_wire::{fuzz, hello};
use zerocopy::IntoBytes;

type Decoder = fn(&[u8]);

fn setup() -> Setup {
    Setup {
        migration: MigrationId([1; 16]),
        regions: vec![
            WireRange { start_gfn: 0, pages: 160 },
            WireRange { start_gfn: 0x10_0000, pages: 1 << 20 },
        ],
        machine: b"machine".to_vec(),
        channels: 4,
        boot_id: [2; 16],
    }
}

/// One message of every kind.
fn messages() -> Vec<Control> {
    let state = State::new((0..100).collect());
    let migration = MigrationId([1; 16]);
    let instance = InstanceId([3; 16]);
    vec![
        Control::Setup(setup()),
        Control::SetupDone(SetupDone {
            instance,
            token: [4; 16],
            boot_id: [2; 16],
            clock_proof: Some([6; 32]),
            takes_call_off: Some(true),
        }),
        Control::ChannelsReady,
        Control::RoundReceived(RoundReceived { round: 70_000 }),
        Control::Rehearse(state.clone()),
        Control::Rehearsed(Rehearsed { load_ns: 100_000, start_ns: 5_000 }),
        Control::SwitchoverSoon(SwitchoverSoon { last_round: 70_001, called_off: None }),
        Control::FinalState(state),
        Control::AskDigest,
        Control::Digest(Digest { digest: [5; 32] }),
        Control::Commit(Commit {
            migration,
            last_round: 70_001,
            running: true,
            complete_within_ms: None,
        }),
        Control::Committed(Committed { commit_ns: 1, ready_ns: 2, started_ns: u64::MAX }),
        Control::CommitRefused(Abandon::because("no room")),
        Control::Alive(Alive {
            cpu_ns: 1 << 40,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: Some(vec![7, 7]),
        }),
        Control::Ping(Ping { sent_ns: 1 << 50 }),
        Control::Pong(Pong { sent_ns: 1 << 50, answered_ns: 3 }),
        Control::Abandon(Abandon::because("cancelled")),
        Control::Query(Query { migration }),
        Control::Answer(Answer { instance, fate: Fate::Pending }),
    ]
}

fn framed(message: &Control) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, &mut bytes).expect("within the limits");
    bytes
}

fn pages_frame(entries: &[RunEntry]) -> Vec<u8> {
    [PagesHeader::pages(1, entries).as_bytes(), entries.as_bytes()].concat()
}

/// Valid input for each decoder.
fn valid() -> Vec<(Decoder, Vec<u8>)> {
    let mut list: Vec<(Decoder, Vec<u8>)> = vec![
        (fuzz::hello, Hello::control().to_bytes().to_vec()),
        (fuzz::hello, Hello::data(3, [9; 16]).to_bytes().to_vec()),
        (fuzz::hello_reply, HelloReply::accept(1).to_bytes().to_vec()),
        (fuzz::hello_reply, HelloReply::refuse(Status::TOKEN).to_bytes().to_vec()),
        (fuzz::pages, pages_frame(&[RunEntry::data(1, 4, 2), RunEntry::zero(2, 7, 90)])),
        (fuzz::pages, PagesHeader::barrier(3).as_bytes().to_vec()),
    ];
    list.extend(messages().iter().map(|message| (fuzz::control as Decoder, framed(message))));
    list
}

#[test]
fn every_kind_is_tried() {
    let tried: Vec<Kind> = messages().iter().map(Control::kind).collect();
    assert_eq!(tried, Kind::ALL);
    for message in messages() {
        let bytes = framed(&message);
        let header = FrameHeader::parse(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(Control::decode(header.kind(), &bytes[16..]).unwrap(), message);
    }
}

/// A query connection takes no state of 64 MiB, nor does a destination take what it would send.
#[test]
fn every_kind_goes_where_it_belongs() {
    let readers = [Reader::Source, Reader::Destination, Reader::Asker, Reader::Answerer];
    for kind in Kind::ALL {
        let takers: Vec<Reader> = readers.into_iter().filter(|r| kind.goes_to(*r)).collect();
        let both = [Reader::Source, Reader::Destination];
        assert!(
            takers.len() == 1 || (*kind == Kind::ABANDON && takers == both),
            "{kind} {takers:?}"
        );
        let header = FrameHeader::parse(&header(kind.0, 0, 0, 0)).unwrap();
        for reader in readers {
            assert_eq!(header.for_reader(reader).is_ok(), takers.contains(&reader), "{kind}");
        }
    }
}

/// An old decoder skipped them, with 16 bytes of memory for each.
#[test]
fn nested_bytes_of_an_unknown_field_are_refused() {
    let nested = [&[0xa1, 0x18, 99][..], &[0x81; 1000], &[0]].concat();
    let error = Control::decode(Kind::PING, &nested).unwrap_err();
    assert!(matches!(error, DecodeError::Nesting { .. }), "{error}");
    assert!(chain(&error).contains("nested deeper than 8"), "{}", chain(&error));
}

#[test]
fn a_state_that_was_damaged_on_the_way_is_refused() {
    let mut bytes = framed(&Control::FinalState(State::new(vec![7; 100])));
    assert!(Control::decode(Kind::FINAL_STATE, &bytes[16..]).is_ok());
    bytes[60] ^= 1;
    let error = Control::decode(Kind::FINAL_STATE, &bytes[16..]).unwrap_err();
    assert!(chain(&error).contains("damaged on the way"), "{}", chain(&error));
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn every_truncation_and_bit_flip() {
    for (decode, bytes) in valid() {
        for end in 0..=bytes.len() {
            decode(&bytes[..end]);
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            decode(&flipped);
        }
    }
}

#[test]
fn a_truncated_body_is_an_error() {
    for message in messages() {
        let bytes = framed(&message);
        let body = &bytes[16..];
        for end in 0..body.len() {
            assert!(Control::decode(message.kind(), &body[..end]).is_err(), "{message:?} {end}");
        }
        let longer = [body, &[0]].concat();
        let trailing = Control::decode(message.kind(), &longer).unwrap_err();
        assert!(matches!(trailing, DecodeError::Trailing { bytes: 1, .. }), "{trailing}");
    }
}

#[test]
fn random_and_mutated_bytes() {
    let mut chance = Chance::new(1);
    let valid = valid();
    for _ in 0..20_000 {
        let (decode, template) = &valid[chance.index(valid.len())];
        let mut bytes = template.clone();
        for _ in 0..=chance.below(6) {
            let at = chance.index(bytes.len());
            match chance.below(3) {
                0 => bytes[at] = chance.byte(),
                1 => bytes.insert(at, chance.byte()),
                _ => bytes[at] = [0, 0x7f, 0x80, 0xff, 0x9f, 0xbf, 0x5f][chance.index(7)],
            }
        }
        decode(&bytes);
        let noise: Vec<u8> = (0..chance.below(80)).map(|_| chance.byte()).collect();
        for decode in [fuzz::hello, fuzz::hello_reply, fuzz::control, fuzz::pages] {
            decode(&noise);
        }
        // Noise behind a valid header reaches the decoders of the bodies.
        let kind = Kind::ALL[chance.index(Kind::ALL.len())];
        let _ = Control::decode(kind, &noise);
    }
}

#[test]
fn scanners_are_recognised_by_their_first_byte() {
    assert!(check_hello_prefix(b"").is_ok());
    assert!(check_hello_prefix(b"\x89mart").is_ok());
    let error = check_hello_prefix(b"GET / HTTP/1.1\r\nHost: x\r\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"the peer does not speak martlet's protocol: it sent "GET / HTTP/1.1\r\n""#
    );
    let error = check_hello_prefix(b"\x16\x03\x01").unwrap_err();
    assert!(matches!(error, HelloError::NotMartlet(_)));
    assert!(error.to_string().ends_with(r#""\x16\x03\x01""#));
    // Connected to oneself or to a peer that believes to be the source as well.
    assert!(hello::check_reply_prefix(&Hello::control().to_bytes()).is_err());
    assert!(check_hello_prefix(&HelloReply::accept(1).to_bytes()).is_err());
}

#[test]
fn version_ranges_must_make_sense() {
    for (min, max) in [(0, 1), (2, 1), (0, 0)] {
        let mut bytes = Hello::control().to_bytes();
        bytes[8..12].copy_from_slice(&[min, 0, max, 0]);
        assert!(matches!(Hello::parse(&bytes), Err(HelloError::VersionRange { .. })));
    }
}

fn header(kind: u16, flags: u16, length: u32, reserved: u32) -> [u8; 16] {
    let mut bytes = Vec::from(FRAME_MAGIC);
    bytes.extend(kind.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(reserved.to_le_bytes());
    bytes.try_into().expect("sixteen bytes")
}

#[test]
fn headers_are_refused_before_anything_is_allocated() {
    for kind in Kind::ALL {
        let max = u32::try_from(kind.body_bytes_max().unwrap()).unwrap();
        assert!(FrameHeader::parse(&header(kind.0, 0, max, 0)).is_ok());
        let error = FrameHeader::parse(&header(kind.0, 0, max + 1, 0)).unwrap_err();
        assert!(matches!(error, DecodeError::Length { .. }), "{error}");
    }
    let parse = |bytes| FrameHeader::parse(&bytes).unwrap_err();
    assert!(matches!(parse(header(0, 0, 0, 0)), DecodeError::Kind(Kind(0))));
    assert!(matches!(parse(header(20, 0, 0, 0)), DecodeError::Kind(Kind(20))));
    assert!(matches!(parse(header(3, 1, 0, 0)), DecodeError::Reserved { flags: 1, .. }));
    assert!(matches!(parse(header(3, 0, 0, 9)), DecodeError::Reserved { reserved: 9, .. }));
    assert!(matches!(parse(*b"POST / HTTP/1.1 "), DecodeError::Magic { .. }));
}

#[test]
fn setups_that_no_source_would_send() {
    let refused = |change: &dyn Fn(&mut Setup)| {
        let mut changed = setup();
        change(&mut changed);
        // Our own encoder refuses it, so it is made without the encoder's check.
        let body = minicbor::to_vec(&changed).unwrap();
        assert!(encode(&Control::Setup(changed), &mut Vec::new()).is_err());
        match Control::decode(Kind::SETUP, &body).unwrap_err() {
            DecodeError::Value { source, .. } => source,
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(&|s| s.regions.clear()), ValueError::RegionCount(0));
    let many = (0..65).map(|start_gfn| WireRange { start_gfn, pages: 1 });
    assert_eq!(refused(&|s| s.regions = many.clone().collect()), ValueError::RegionCount(65));
    assert!(matches!(refused(&|s| s.regions[1].pages = 0), ValueError::Region { index: 1, .. }));
    assert!(matches!(
        refused(&|s| s.regions[1].pages = u64::MAX),
        ValueError::Region { index: 1, .. }
    ));
    assert_eq!(refused(&|s| s.regions[1].start_gfn = 159), ValueError::RegionOrder(1));
    assert_eq!(refused(&|s| s.regions.swap(0, 1)), ValueError::RegionOrder(1));
    assert_eq!(refused(&|s| s.channels = 0), ValueError::Channels(0));
    assert_eq!(refused(&|s| s.channels = CHANNELS_MAX + 1), ValueError::Channels(CHANNELS_MAX + 1));
    let machine = MACHINE_BYTES_MAX + 1;
    assert_eq!(refused(&|s| s.machine = vec![0; machine]), ValueError::Machine(machine));
}

#[test]
fn the_largest_messages_fit_their_limit() {
    let full = Setup {
        regions: (0..64).map(|n| WireRange { start_gfn: n << 30, pages: 1 << 30 }).collect(),
        machine: vec![0xaa; MACHINE_BYTES_MAX],
        channels: CHANNELS_MAX,
        ..setup()
    };
    let bytes = framed(&Control::Setup(full.clone()));
    assert_eq!(Control::decode(Kind::SETUP, &bytes[16..]).unwrap(), Control::Setup(full));

    let state = Control::FinalState(State { bytes: vec![1; STATE_BYTES_MAX], ..State::default() });
    let bytes = framed(&state);
    assert!(FrameHeader::parse(bytes.first_chunk().unwrap()).is_ok());
    let too_long =
        Control::FinalState(State { bytes: vec![1; STATE_BYTES_MAX + 1], ..State::default() });
    let mut out = vec![7];
    let error = encode(&too_long, &mut out).unwrap_err();
    assert_eq!((error.to_string().as_str(), out.len()), ("cannot send a FinalState message", 1));
}

#[test]
fn reasons_are_cut_and_cleaned_on_both_sides() {
    let long = "x\x1b[31m".repeat(1000);
    let bytes = framed(&Control::Abandon(Abandon { reason: long.clone() }));
    assert!(bytes.len() < REASON_BYTES_MAX + 32);
    let hostile = minicbor::to_vec(Abandon { reason: long[..2000].to_owned() }).unwrap();
    let Control::Abandon(read) = Control::decode(Kind::ABANDON, &hostile).unwrap() else {
        panic!("kind and message differ");
    };
    assert!(read.reason.len() <= REASON_BYTES_MAX && !read.reason.contains('\x1b'));
}

#[test]
fn an_unknown_fate_is_an_error_and_not_a_guess() {
    let known =
        framed(&Control::Answer(Answer { instance: InstanceId([0; 16]), fate: Fate::Abandoned }));
    let mut body = known[16..].to_vec();
    *body.last_mut().unwrap() = 4;
    assert!(Control::decode(Kind::ANSWER, &body).is_err());
}

#[test]
fn data_frames_that_lie() {
    let regions = |region: u16| [10_u64, 1 << 40].get(usize::from(region)).copied();
    let check = |entries: &[RunEntry]| {
        let bytes = pages_frame(entries);
        let (head, body) = bytes.split_first_chunk().unwrap();
        PagesFrame::parse(head)?.parse_runs(body, regions).map(|runs| runs.len())
    };
    assert_eq!(check(&[RunEntry::data(0, 0, 10)]), Ok(1));
    assert_eq!(check(&[RunEntry::zero(1, 0, u32::MAX)]), Ok(1));
    for lie in [
        RunEntry::zero(0, 0, 0),
        RunEntry::zero(0, 0, 11),
        RunEntry::zero(0, 10, 1),
        RunEntry::zero(2, 0, 1),
        RunEntry::zero(1, u64::MAX, 2),
        RunEntry::data(0, 9, 2),
    ] {
        assert!(matches!(check(&[lie]), Err(PagesError::RunRange { index: 0, .. })), "{lie:?}");
    }

    let honest = pages_frame(&[RunEntry::data(1, 0, 3)]);
    let with = |at: usize, byte: u8| {
        let mut bytes = honest.clone();
        bytes[at] = byte;
        let (head, body) = bytes.split_first_chunk().unwrap();
        PagesFrame::parse(head)?.parse_runs(body, regions).map(|runs| runs.len())
    };
    assert!(matches!(with(0, b'x'), Err(PagesError::Magic(_))));
    assert_eq!(with(4, 3), Err(PagesError::Kind(3)));
    assert!(matches!(with(4, 2), Err(PagesError::BarrierLoad { runs: 1, .. })));
    assert!(matches!(with(6, 1), Err(PagesError::Reserved { flags: 1, .. })));
    assert_eq!(with(12, 0), Err(PagesError::RunCount(0)));
    assert_eq!(with(13, 2), Err(PagesError::RunCount(513)));
    assert!(matches!(with(12, 2), Err(PagesError::EntryBytes { found: 16, expected: 32 })));
    assert_eq!(with(16, 1), Err(PagesError::PayloadBytes(0x3001)));
    assert_eq!(with(19, 1), Err(PagesError::PayloadBytes(0x100_3000)));
    assert!(matches!(with(17, 0x20), Err(PagesError::PayloadMismatch { .. })));
    assert!(matches!(with(24, 1), Err(PagesError::Reserved { reserved: 1, .. })));
    assert_eq!(with(34, 9), Err(PagesError::RunKind { index: 0, kind: 9 }));
}

#[test]
fn the_fullest_data_frame_is_legal() {
    let pages = u32::try_from(PAYLOAD_PAGES_MAX).unwrap();
    let mut entries = vec![RunEntry::zero(1, 0, 1); 511];
    entries.push(RunEntry::data(1, 5, pages));
    let bytes = pages_frame(&entries);
    let (head, body) = bytes.split_first_chunk().unwrap();
    let frame = PagesFrame::parse(head).unwrap();
    assert_eq!(frame.parse_runs(body, |_| Some(u64::MAX)).unwrap().len(), 512);
}
