//! The layouts, frozen: byte vectors typed by hand from the documentation (and for the bodies from
//! RFC 8949), not made by the code under test. If one of these has to change, old and new builds
//! no longer understand each other: that takes a new version, not a new vector.

#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests")]

use martlet_wire::control::{
    Abandon, Alive, Answer, Commit, Control, Fate, InstanceId, MeasuredClock, MigrationId, Query,
    RoundReceived, Setup, SetupDone, State, SwitchoverSoon, WireRange,
};
use martlet_wire::frame::{FrameHeader, Kind, encode};
use martlet_wire::hello::{Hello, HelloReply, Role, Status, Versions};
use martlet_wire::pages::{PagesFrame, PagesHeader, Run, RunEntry, RunKind};
use zerocopy::IntoBytes;

const ID: [u8; 16] = [0xa0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xaf];

/// Bytes from hexadecimal text; white space is for the reader.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let value = |digit: u8| u8::try_from((digit as char).to_digit(16).unwrap()).unwrap();
    digits.chunks_exact(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect()
}

const ID_HEX: &str = "a0010203 04050607 08090a0b 0c0d0eaf";

#[test]
fn hello_of_a_data_channel() {
    let hello = Hello {
        versions: Versions { min: 1, max: 0x0203 },
        role: Role::DATA,
        channel: 0x0104,
        token: ID,
    };
    let zeros = "00".repeat(32);
    let bytes = hex(&format!("89 6d6172746c6574  0100 0302 0200 0401 {ID_HEX} {zeros}"));
    assert_eq!(hello.to_bytes()[..], bytes[..]);
    assert_eq!(Hello::parse(bytes[..].try_into().unwrap()), Ok(hello));
}

#[test]
fn hello_reply() {
    let refusal =
        HelloReply { status: Status::BUSY, version: 0, versions: Versions { min: 1, max: 1 } };
    let bytes = hex(&format!("89 4d41525 44c4554  0000 0300 0100 0100 {}", "00".repeat(16)));
    assert_eq!(refusal.to_bytes()[..], bytes[..]);
    assert_eq!(HelloReply::parse(bytes[..].try_into().unwrap()), Ok(refusal));
}

#[test]
fn data_frame() {
    let entries = [RunEntry::data(1, 0x1_0000_0002, 3), RunEntry::zero(0, 5, 0x0102_0304)];
    let header = PagesHeader::pages(9, &entries);
    let bytes = hex("6d504753 0100 0000 09000000 02000000  0030000000000000 0000000000000000
         0100 0100 03000000 0200000001000000
         0000 0200 04030201 0500000000000000");
    assert_eq!([header.as_bytes(), entries.as_bytes()].concat(), bytes);

    let (head, body) = bytes.split_first_chunk().unwrap();
    let frame = PagesFrame::parse(head).unwrap();
    assert_eq!(frame, PagesFrame::Pages { round: 9, runs: 2, payload_bytes: 0x3000 });
    let runs: Vec<Run> = frame.parse_runs(body, |_| Some(u64::MAX)).unwrap().iter().collect();
    let data = Run { region: 1, kind: RunKind::Data, first_page: 0x1_0000_0002, count: 3 };
    let zero = Run { region: 0, kind: RunKind::Zero, first_page: 5, count: 0x0102_0304 };
    assert_eq!(runs, [data, zero]);
}

#[test]
fn barrier() {
    let bytes = hex("6d504753 0200 0000 07000000 00000000  0000000000000000 0000000000000000");
    assert_eq!(PagesHeader::barrier(7).as_bytes(), bytes);
    let parsed = PagesFrame::parse(bytes[..].try_into().unwrap());
    assert_eq!(parsed, Ok(PagesFrame::Barrier { round: 7 }));
}

/// Checks one control message both ways. `body` is the CBOR after the header.
fn check(message: &Control, kind: u16, body: &str) {
    let body = hex(body);
    let kind_hex: String = kind.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let length = u32::try_from(body.len()).unwrap().to_le_bytes();
    let length_hex: String = length.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut bytes = hex(&format!("6d43544c {kind_hex} 0000 {length_hex} 00000000"));
    bytes.extend_from_slice(&body);

    let mut encoded = Vec::new();
    encode(message, &mut encoded).unwrap();
    assert_eq!(encoded, bytes, "{message:?}");
    let header = FrameHeader::parse(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!((header.kind(), header.body_bytes()), (Kind(kind), body.len()));
    assert_eq!(Control::decode(header.kind(), &body).unwrap(), *message);
}

#[test]
fn control_messages() {
    let migration = MigrationId(ID);
    let regions = vec![
        WireRange { start_gfn: 0, pages: 0x100 },
        WireRange { start_gfn: 0x10_0000, pages: 0x40 },
    ];
    check(
        &Control::Setup(Setup {
            migration,
            regions,
            machine: vec![1, 2, 3],
            channels: 2,
            boot_id: ID,
        }),
        1,
        &format!(
            "a5 00 50 {ID_HEX}
                01 82 a2 00 00 01 19 0100
                      a2 00 1a 00100000 01 18 40
                02 43 010203
                03 02
                04 50 {ID_HEX}"
        ),
    );
    check(
        &Control::SetupDone(SetupDone {
            instance: InstanceId(ID),
            token: ID,
            boot_id: ID,
            clock_proof: None,
            takes_call_off: None,
        }),
        2,
        &format!("a3 00 50 {ID_HEX} 01 50 {ID_HEX} 02 50 {ID_HEX}"),
    );
    check(
        &Control::SetupDone(SetupDone {
            instance: InstanceId(ID),
            token: ID,
            boot_id: [0; 16],
            clock_proof: Some([0xee; 32]),
            takes_call_off: Some(true),
        }),
        2,
        &format!(
            "a5 00 50 {ID_HEX} 01 50 {ID_HEX} 02 50 {} 03 58 20 {} 04 f5",
            "00".repeat(16),
            "ee".repeat(32)
        ),
    );
    check(&Control::ChannelsReady, 3, "a0");
    check(&Control::RoundReceived(RoundReceived { round: 24 }), 4, "a1 00 18 18");
    check(
        &Control::SwitchoverSoon(SwitchoverSoon { last_round: 3, called_off: None }),
        7,
        "a1 00 03",
    );
    let called_off = SwitchoverSoon { last_round: 3, called_off: Some(true) };
    check(&Control::SwitchoverSoon(called_off), 7, "a2 00 03 01 f5");
    let state = |checksum, clock| State { bytes: vec![0xff; 2], checksum, clock };
    check(&Control::FinalState(state(None, None)), 8, "a1 00 42 ffff");
    let clock = Some(MeasuredClock { offset_ns: -2, error_ns: 0x1234 });
    let clocked = "a2 00 42 ffff 02 a2 00 21 01 19 1234";
    check(&Control::FinalState(state(None, clock)), 8, clocked);
    // The BLAKE3 hash of ffff begins so, says b3sum.
    let sum = "a77c906127855183698bad218d6abe2d";
    let checksum = Some(hex(sum)[..].try_into().unwrap());
    check(&Control::FinalState(state(checksum, None)), 8, &format!("a2 00 42 ffff 01 50 {sum}"));
    check(&Control::AskDigest, 9, "a0");
    check(
        &Control::Commit(Commit {
            migration,
            last_round: 7,
            running: true,
            complete_within_ms: None,
        }),
        11,
        &format!("a3 00 50 {ID_HEX} 01 07 02 f5"),
    );
    let bound = Some(1000);
    check(
        &Control::Commit(Commit {
            migration,
            last_round: 7,
            running: true,
            complete_within_ms: bound,
        }),
        11,
        &format!("a4 00 50 {ID_HEX} 01 07 02 f5 03 19 03e8"),
    );
    check(&Control::CommitRefused(Abandon::because("no")), 13, "a1 00 62 6e6f");
    check(
        &Control::Alive(Alive {
            cpu_ns: 5,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: None,
        }),
        14,
        "a1 01 05",
    );
    check(
        &Control::Alive(Alive {
            cpu_ns: 5,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: Some(vec![7, 7]),
        }),
        14,
        "a2 01 05 06 42 0707",
    );
    check(&Control::Query(Query { migration }), 18, &format!("a1 00 50 {ID_HEX}"));
    for (fate, number) in
        [(Fate::Unknown, 0), (Fate::Committed, 1), (Fate::Abandoned, 2), (Fate::Pending, 3)]
    {
        check(
            &Control::Answer(Answer { instance: InstanceId(ID), fate }),
            19,
            &format!("a2 00 50 {ID_HEX} 01 0{number}"),
        );
    }
}

#[test]
fn kind_numbers_are_frozen() {
    let list: Vec<String> = Kind::ALL.iter().map(|kind| format!("{} {kind}", kind.0)).collect();
    let frozen = "1 Setup, 2 SetupDone, 3 ChannelsReady, 4 RoundReceived, 5 Rehearse, 6 Rehearsed, \
         7 SwitchoverSoon, 8 FinalState, 9 AskDigest, 10 Digest, 11 Commit, 12 Committed, \
         13 CommitRefused, 14 Alive, 15 Ping, 16 Pong, 17 Abandon, 18 Query, 19 Answer";
    assert_eq!(list.join(", "), frozen);
}
