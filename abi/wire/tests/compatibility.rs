//! Old reads new and new reads old: a field may come and go without a new version.

use martlet_wire::control::{Alive, Commit, Control, DevicesAlive, MigrationId, Unused};
use martlet_wire::frame::{FrameHeader, Kind, encode};
use martlet_wire::hello::{Hello, HelloError, HelloReply, OUR_VERSIONS, Status, Versions};
use minicbor::{Decode, Encode};

/// A [`Commit`] as a later version may send it: all of today's fields, then the next free number,
/// and one further on. Whoever gives a message that number moves it here too.
#[derive(Encode)]
#[cbor(map)]
struct NewerCommit {
    #[cbor(n(0), with = "minicbor::bytes")]
    migration: [u8; 16],
    #[n(1)]
    last_round: u32,
    #[n(2)]
    running: bool,
    #[n(3)]
    complete_within_ms: u32,
    #[n(4)]
    queues: Vec<(u16, u64)>,
    #[n(40)]
    note: Option<String>,
}

/// An [`Alive`] as a version before its first field may have sent it.
#[derive(Encode)]
#[cbor(map)]
struct OlderAlive {
    #[n(1)]
    cpu_ns: u64,
}

#[test]
fn old_reads_new() {
    let newer = NewerCommit {
        migration: [7; 16],
        last_round: 4,
        running: false,
        complete_within_ms: 250,
        queues: vec![(1, 2), (3, 4)],
        note: Some("new".to_owned()),
    };
    let body = minicbor::to_vec(&newer).unwrap();
    let read = Control::decode(Kind::COMMIT, &body).unwrap();
    let commit = Commit {
        migration: MigrationId([7; 16]),
        last_round: 4,
        running: false,
        complete_within_ms: Some(250),
    };
    assert_eq!(read, Control::Commit(commit));
}

#[test]
fn new_reads_old() {
    let body = minicbor::to_vec(&OlderAlive { cpu_ns: 9 }).unwrap();
    let read = Control::decode(Kind::ALIVE, &body).unwrap();
    assert_eq!(
        read,
        Control::Alive(Alive {
            cpu_ns: 9,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: None,
        })
    );
}

#[test]
fn a_message_without_fields_may_grow_some() {
    let read = Control::decode(Kind::CHANNELS_READY, &[0xa1, 0x00, 0x05]).unwrap();
    assert_eq!(read, Control::ChannelsReady);
}

#[test]
fn the_newest_common_version_is_taken() {
    let versions = |min, max| Versions { min, max };
    assert_eq!(versions(1, 2).highest_common(versions(2, 3)), Some(2));
    assert_eq!(versions(1, 2).highest_common(versions(1, 2)), Some(2));
    assert_eq!(versions(1, 2).highest_common(versions(3, 4)), None);
    assert_eq!(versions(3, 4).highest_common(versions(1, 2)), None);
}

#[test]
fn peers_without_a_common_version_say_so() {
    let future = Versions { min: 900, max: 901 };
    let hello = Hello { versions: future, ..Hello::control() };
    let error = hello.negotiate().unwrap_err();
    assert_eq!(error, HelloError::NoCommonVersion { ours: OUR_VERSIONS, theirs: future });
    assert_eq!(
        error.to_string(),
        "no common protocol version: here version 1, the peer versions 900 to 901"
    );
    let reply = HelloReply { versions: future, ..HelloReply::refuse(Status::VERSION) };
    assert_eq!(HelloReply::parse(&reply.to_bytes()).unwrap().accepted(), Err(error));
}

#[test]
fn a_reply_may_not_choose_what_was_not_offered() {
    assert!(matches!(
        HelloReply::accept(99).accepted(),
        Err(HelloError::VersionChosen { chosen: 99, .. })
    ));
    let stranger = HelloReply::refuse(Status(4711));
    assert!(stranger.accepted().unwrap_err().to_string().contains("4711"));
}

#[test]
fn frames_follow_each_other() {
    let mut stream = Vec::new();
    encode(&Control::ChannelsReady, &mut stream).unwrap();
    let first = stream.len();
    encode(&Control::AskDigest, &mut stream).unwrap();
    let header = FrameHeader::parse(stream[first..].first_chunk().unwrap()).unwrap();
    assert_eq!(header.kind(), Kind::ASK_DIGEST);
}

/// Devices as a build before observers wrote and read them.
#[derive(Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
struct OlderDevices {
    #[n(0)]
    resume_begin_ns: u64,
    #[n(1)]
    resume_end_ns: u64,
    #[n(2)]
    first_frames_ns: Vec<Option<u64>>,
    #[n(3)]
    trouble: Option<String>,
}

#[test]
fn devices_are_read_by_who_tells_each_cards_frame_and_the_other_way_round() {
    let (resume_begin_ns, resume_end_ns, trouble) = (5, 6, Some("card 1".to_owned()));
    let older = |first_frames_ns| OlderDevices {
        resume_begin_ns,
        resume_end_ns,
        first_frames_ns,
        trouble: trouble.clone(),
    };
    let newer =
        DevicesAlive { resume_begin_ns, resume_end_ns, unused: Unused, trouble: trouble.clone() };
    let old = minicbor::to_vec(older(vec![Some(7), None])).unwrap();
    assert_eq!(minicbor::decode::<DevicesAlive>(&old).unwrap(), newer);
    let new = minicbor::to_vec(&newer).unwrap();
    assert_eq!(minicbor::decode::<OlderDevices>(&new).unwrap(), older(Vec::new()));
}
