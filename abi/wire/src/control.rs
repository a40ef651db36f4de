//! Messages of the control connection: CBOR maps with numbered keys.
//!
//! A key is never used twice for different things. A field that a newer version adds is an
//! `Option`; a decoder skips keys it does not know, so version N reads N-1 and N+1 alike.

use minicbor::{Decode, Encode};

/// Names one migration attempt; random, chosen by the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct MigrationId(#[cbor(n(0), with = "minicbor::bytes")] pub [u8; 16]);

/// Names one run of a destination process; random, chosen at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[cbor(transparent)]
pub struct InstanceId(#[cbor(n(0), with = "minicbor::bytes")] pub [u8; 16]);

/// A run of guest frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WireRange {
    /// First guest frame number.
    #[n(0)]
    pub start_gfn: u64,
    /// Number of pages; not zero.
    #[n(1)]
    pub pages: u64,
}

/// What the destination must build before the first page comes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Setup {
    /// This attempt.
    #[n(0)]
    pub migration: MigrationId,
    /// Memory: 1 to [`REGIONS_MAX`] ranges, ascending, not overlapping.
    #[n(1)]
    pub regions: Vec<WireRange>,
    /// The machine's own description, opaque to the engine; at most [`MACHINE_BYTES_MAX`].
    #[cbor(n(2), with = "minicbor::bytes")]
    pub machine: Vec<u8>,
    /// How many data channels the source will open: 1 to [`CHANNELS_MAX`].
    #[n(3)]
    pub channels: u16,
    /// [`BOOT_ID_UNTOLD`]. A build before [`SetupDone::clock_proof`] named its clock here.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub boot_id: [u8; 16],
}

/// Names no clock.
pub const BOOT_ID_UNTOLD: [u8; 16] = [0; 16];

/// Most data channels of a migration.
pub const CHANNELS_MAX: u16 = 128;
/// Longest report of an observer.
pub const OBSERVED_BYTES_MAX: usize = 2048;
/// Most regions of guest memory.
pub const REGIONS_MAX: usize = 64;
/// Longest machine description.
pub const MACHINE_BYTES_MAX: usize = 1 << 20;
/// Longest reason, in bytes of UTF-8.
pub const REASON_BYTES_MAX: usize = 1024;
/// Longest saved state of all vCPUs and devices.
pub const STATE_BYTES_MAX: usize = 64 << 20;

/// The destination is ready for channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SetupDone {
    /// The destination process.
    #[n(0)]
    pub instance: InstanceId,
    /// What each data channel must show to be let in; random.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub token: [u8; 16],
    /// [`BOOT_ID_UNTOLD`], as in [`Setup`].
    #[cbor(n(2), with = "minicbor::bytes")]
    pub boot_id: [u8; 16],
    /// A keyed hash that a source with the same `CLOCK_MONOTONIC` makes as well, and that tells
    /// nothing to any other. Equal ones mean one clock, unless pings say otherwise.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub clock_proof: Option<[u8; 32]>,
    /// It takes a [`SwitchoverSoon`] that calls the stop off.
    #[n(4)]
    pub takes_call_off: Option<bool>,
}

/// Why one side ends an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Abandon {
    /// One line for people; at most [`REASON_BYTES_MAX`], and without control characters, as it
    /// ends on a terminal. Both are made so when it is sent and when it is received.
    #[n(0)]
    pub reason: String,
}

/// All channels passed the barrier of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct RoundReceived {
    /// Which round, from 0 and without gaps.
    #[n(0)]
    pub round: u32,
}

/// The saved state of vCPUs and devices, opaque to the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct State {
    /// At most [`STATE_BYTES_MAX`].
    #[cbor(n(0), with = "minicbor::bytes")]
    pub bytes: Vec<u8>,
    /// The first [`CHECKSUM_BYTES`] of their BLAKE3 hash. Whoever decodes a state compares.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub checksum: Option<[u8; CHECKSUM_BYTES]>,
    /// With a final state: how the destination's clock differs, so that the destination knows how
    /// long the guest has been standing.
    #[n(2)]
    pub clock: Option<MeasuredClock>,
}

/// Bytes of a state's checksum.
pub const CHECKSUM_BYTES: usize = 16;

impl State {
    /// A state with its checksum.
    pub fn new(bytes: Vec<u8>) -> State {
        let checksum = Some(checksum(&bytes));
        State { bytes, checksum, clock: None }
    }
}

/// The checksum of a state's bytes.
pub(crate) fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let hash = blake3::hash(bytes);
    *hash.as_bytes().first_chunk().expect("a hash of 32 bytes")
}

/// How the destination's clock differs from the source's, as the source measured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct MeasuredClock {
    /// The destination's clock minus the source's.
    #[n(0)]
    pub offset_ns: i64,
    /// What that may be off by; 0 for one clock.
    #[n(1)]
    pub error_ns: u64,
}

/// How long the destination took to load a rehearsal's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Rehearsed {
    /// Loading the state into the waiting vCPUs.
    #[n(0)]
    pub load_ns: u64,
    /// Entering a vCPU and leaving it at once.
    #[n(1)]
    pub start_ns: u64,
}

/// The guest is about to be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SwitchoverSoon {
    /// The round that will carry the last pages. Known before the stop, so that the destination
    /// can tell a channel that has done its work from one that was lost too early.
    #[n(0)]
    pub last_round: u32,
    /// The stop that was announced is called off: the guest runs on, the round goes on as one like
    /// any other, and more will follow. Only before the final state was sent, and only to a
    /// destination that said that it takes that ([`SetupDone::takes_call_off`]).
    #[n(1)]
    pub called_off: Option<bool>,
}

/// A digest of the destination's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Digest {
    /// As `martlet_ram::GuestRam::digest` makes it.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub digest: [u8; 32],
}

/// The right to run the guest moves to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Commit {
    /// This attempt.
    #[n(0)]
    pub migration: MigrationId,
    /// The round whose barrier ends the last pages, on every channel.
    #[n(1)]
    pub last_round: u32,
    /// Whether the guest ran when it was stopped; a paused guest stays paused.
    #[n(2)]
    pub running: bool,
    /// How long, from this message on, what is missing may take to arrive; then the right goes
    /// back. Without it, the reader's own limit holds.
    #[n(3)]
    pub complete_within_ms: Option<u32>,
}

/// The destination holds the right and acted on it. Times are on the destination's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Committed {
    /// When the commit was read.
    #[n(0)]
    pub commit_ns: u64,
    /// When the state was loaded and all pages were in.
    #[n(1)]
    pub ready_ns: u64,
    /// When the vCPUs were told to run.
    #[n(2)]
    pub started_ns: u64,
}

/// What the guest did at the destination, sent a moment after the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Alive {
    // 0 was the guest's first heartbeat.
    /// CPU time of the destination process during the migration.
    #[n(1)]
    pub cpu_ns: u64,
    /// When the loading of the last state began, on the destination's clock.
    #[n(2)]
    pub load_begin_ns: Option<u64>,
    /// When it ended.
    #[n(3)]
    pub load_end_ns: Option<u64>,
    /// Of the devices, if they were resumed.
    #[n(4)]
    pub devices: Option<DevicesAlive>,
    /// The destination host's wall clock (`CLOCK_REALTIME`) minus the clock of these times.
    #[n(5)]
    pub wall_clock_ns: Option<i64>,
    /// What the VMM's observer saw, opaque to the engine; at most [`OBSERVED_BYTES_MAX`].
    #[cbor(n(6), with = "minicbor::bytes")]
    pub observed: Option<Vec<u8>>,
}

/// How the devices of a guest that has arrived came back; times are on the destination's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct DevicesAlive {
    /// When they were told to resume.
    #[n(0)]
    pub resume_begin_ns: u64,
    /// When the last one had.
    #[n(1)]
    pub resume_end_ns: u64,
    /// Was when each network card served its first frame. Who wrote that wants it read.
    #[n(2)]
    pub unused: Unused,
    /// Which device does not work and why, in one line of at most [`REASON_BYTES_MAX`].
    #[n(3)]
    pub trouble: Option<String>,
}

/// An array that nobody reads any more; written empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unused;

impl<C> Encode<C> for Unused {
    fn encode<W: minicbor::encode::Write>(
        &self,
        encoder: &mut minicbor::Encoder<W>,
        _: &mut C,
    ) -> Result<(), minicbor::encode::Error<W::Error>> {
        encoder.array(0)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Unused {
    fn decode(
        decoder: &mut minicbor::Decoder<'b>,
        _: &mut C,
    ) -> Result<Unused, minicbor::decode::Error> {
        decoder.skip()?;
        Ok(Unused)
    }

    fn nil() -> Option<Unused> {
        Some(Unused)
    }
}

/// A clock probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Ping {
    /// The source's clock when it was sent.
    #[n(0)]
    pub sent_ns: u64,
}

/// The answer to a [`Ping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Pong {
    /// Copied from the ping.
    #[n(0)]
    pub sent_ns: u64,
    /// The destination's clock when it answered.
    #[n(1)]
    pub answered_ns: u64,
}

/// What became of an attempt, asked on a connection of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Query {
    /// Which attempt.
    #[n(0)]
    pub migration: MigrationId,
}

/// The destination's word on an attempt. `Abandoned` is also a promise: it will never run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Fate {
    /// This process never heard of it, or abandoned it and forgot.
    #[n(0)]
    Unknown,
    /// The guest runs, or ran, here: the source must never start it.
    #[n(1)]
    Committed,
    /// It never ran here and never will.
    #[n(2)]
    Abandoned,
    /// It is under way here and not decided: the source must not start the guest. Ask again.
    #[n(3)]
    Pending,
}

/// The answer to a [`Query`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Answer {
    /// The process that answers; another than the attempt's means that that one is gone.
    #[n(0)]
    pub instance: InstanceId,
    /// What it knows.
    #[n(1)]
    pub fate: Fate,
}

/// A message of the control connection. How it becomes bytes and back is in [`crate::frame`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is named after its payload")]
pub enum Control {
    /// Source: build this.
    Setup(Setup),
    /// Destination: built; open the channels.
    SetupDone(SetupDone),
    /// Destination: all channels are there.
    ChannelsReady,
    RoundReceived(RoundReceived),
    /// Source, guest running: load this state, to measure and to warm up; more will come.
    Rehearse(State),
    Rehearsed(Rehearsed),
    /// Source: the guest is about to be stopped; stay awake.
    SwitchoverSoon(SwitchoverSoon),
    /// Source, guest stopped: the state to run.
    FinalState(State),
    /// Source: digest your memory once the last round is in. Only before the commit.
    AskDigest,
    Digest(Digest),
    Commit(Commit),
    Committed(Committed),
    /// Destination, after a commit: the right goes back; the guest never ran here.
    CommitRefused(Abandon),
    Alive(Alive),
    Ping(Ping),
    Pong(Pong),
    Abandon(Abandon),
    Query(Query),
    Answer(Answer),
}
