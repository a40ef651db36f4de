//! What the program and its VMM agree on: three structures in guest memory, all of 64-bit words
//! in the processor's order, and two ports.
//!
//! This file is compiled twice: into the program and into the library. The structures are also
//! read by later versions of the library, since a guest outlives the process that started it: new
//! words go to the end, and [`VERSION`] counts changes that a reader must know of.

/// The first word of [`Directory`] and [`Parameters`]: `martletG`, so that other memory is told.
pub const MAGIC: u64 = u64::from_le_bytes(*b"martletG");
/// Version of these structures.
pub const VERSION: u64 = 1;

/// Each write of a byte here is a heartbeat, except [`READY`].
pub const HEARTBEAT_PORT: u16 = 0xe9;
/// A vCPU writes the frame number (32 bits) of the first wrong page that it finds here.
pub const WRONG_PAGE_PORT: u16 = 0xea;
/// A vCPU has filled its share of the memory.
pub const READY: u8 = b'R';
/// A vCPU's tick.
pub const BEAT: u8 = b'.';

/// Most runs of memory that one vCPU's share may consist of.
pub const EXTENTS_MAX: usize = 64;
/// Pages per vCPU that are never written and now and then checked to be zero.
pub const ZERO_SAMPLES_MAX: usize = 16;

/// Most network cards of a guest.
pub const NICS_MAX: usize = 8;
/// Most queue pairs of a card that the program uses; their states fill a page.
pub const NIC_PAIRS_MAX: usize = 64;

/// At the fixed address `PROGRAM_GPA`: where a VMM that did not start the guest finds the rest.
#[repr(C)]
pub struct Directory {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u64,
    /// How many vCPUs, each with its [`Counters`].
    pub vcpus: u64,
    /// Guest physical address of the first vCPU's counters.
    pub counters: u64,
    /// Bytes from one vCPU's counters to the next one's.
    pub counters_stride: u64,
    /// How many network cards, each with its [`NicCounters`]. This and what follows is 0 in the
    /// memory of a guest that an older version started.
    pub nics: u64,
    /// Guest physical address of the first card's counters.
    pub nic_counters: u64,
    /// Bytes from one card's counters to the next one's.
    pub nic_counters_stride: u64,
}

/// A run of guest memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    /// First frame.
    pub frame: u64,
    /// How many.
    pub pages: u64,
}

/// What one vCPU has to do. Written by the VMM before the start, never after.
#[repr(C)]
pub struct Parameters {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u64,
    /// Guest physical address of this vCPU's [`Counters`].
    pub counters: u64,
    /// Guest physical address of its version table: 64 bits for each page of the working set.
    pub versions: u64,
    /// Pages of the working set; the first ones of the extents.
    pub working_set_pages: u64,
    /// Pages to rewrite in each tick, in 1/2^32 of a page.
    pub pages_per_tick: u64,
    /// Length of a tick in cycles of the time stamp counter.
    pub tick_cycles: u64,
    /// Pages that may be verified in each tick.
    pub verify_per_tick: u64,
    /// Frames that nobody ever writes.
    pub zero_samples: [u64; ZERO_SAMPLES_MAX],
    /// How many of them are in use.
    pub zero_samples_count: u64,
    /// This vCPU's share of the filled memory, in order.
    pub extents: [Extent; EXTENTS_MAX],
    /// How many of them are in use; at least one.
    pub extents_count: u64,
    /// Guest physical addresses of the [`NicParameters`] of the cards that this vCPU drives.
    pub nics: [u64; NICS_MAX],
    /// How many of them are in use.
    pub nics_count: u64,
    /// Cards that have their turn in one tick, at most.
    pub nic_turns_per_tick: u64,
}

/// What the vCPU that drives a network card has to know of it. Written by the VMM before the
/// start, never after. Addresses are guest physical.
#[repr(C)]
pub struct NicParameters {
    /// The card's registers (virtio 1.3, 4.2.2).
    pub registers: u64,
    /// The card's [`NicCounters`].
    pub counters: u64,
    /// A page for the [`NicWork`].
    pub work: u64,
    /// A page of a [`NicPair`] for each queue pair.
    pub pair_states: u64,
    /// A page for the control queue and its commands.
    pub control: u64,
    /// The first queue's rings: receive and transmit queue of the first pair, then of the next.
    pub rings: u64,
    /// Bytes from one queue's rings to the next one's.
    pub ring_stride: u64,
    /// The first queue's buffers, queues in the same order.
    pub buffers: u64,
    /// Bytes of a buffer.
    pub buffer_bytes: u64,
    /// The card's number, for its frames.
    pub number: u64,
    /// Queue pairs to use; 1 to [`NIC_PAIRS_MAX`].
    pub pairs: u64,
    /// Descriptors of each queue, a power of two.
    pub queue_size: u64,
    /// Bytes of each frame, from its destination address on; a multiple of 8.
    pub frame_bytes: u64,
    /// Frames of a pair that may be under way at once.
    pub window: u64,
    /// Least cycles between two turns of the card.
    pub turn_cycles: u64,
    /// Frames to send on the first pair, in 1/2^32 of a frame for each cycle.
    pub hot_rate: u64,
    /// The same for all other pairs together.
    pub cold_rate: u64,
}

/// How far the vCPU has come with a card. Its own memory, in words so that it is read and written
/// whole.
#[repr(C)]
pub struct NicWork {
    /// Turns so far.
    pub turns: u64,
    /// When the last turn began.
    pub last_turn: u64,
    /// Frames that the first pair still owes, in 1/2^32.
    pub hot_credit: u64,
    /// The same for all other pairs together.
    pub cold_credit: u64,
    /// The next other pair to send on.
    pub cold_send: u64,
    /// The next other pair to look at.
    pub cold_poll: u64,
    /// The card's address, in the low 48 bits as it lies in a frame.
    pub mac: u64,
}

/// How far a queue pair has come. Indices are free-running.
#[repr(C)]
pub struct NicPair {
    /// The number of the next frame to send.
    pub next_sequence: u64,
    /// The number of the next frame to receive.
    pub expected: u64,
    /// Frames given to the transmit queue.
    pub tx_available: u64,
    /// Frames taken back from it.
    pub tx_used: u64,
    /// Buffers given to the receive queue.
    pub rx_available: u64,
    /// Buffers taken back from it.
    pub rx_used: u64,
    /// What of `rx_available` the card was shown.
    pub rx_shown: u64,
    /// The card's turn in which a frame was last received, or the first one sent after that.
    pub progress_turn: u64,
}

/// What a vCPU says of a network card. It alone writes it; the VMM may read it at any moment.
#[repr(C)]
pub struct NicCounters {
    /// 0 until the card was set up, then one of the `NIC_` states.
    pub state: u64,
    /// Queue pairs in use.
    pub pairs: u64,
    /// Frames sent.
    pub sent: u64,
    /// Frames that came back whole and in their turn.
    pub received: u64,
    /// Numbers that were left out, or that did not come for too long.
    pub lost: u64,
    /// Numbers that came again.
    pub repeated: u64,
    /// Frames whose content was wrong, and answers of the card that can't be.
    pub damaged: u64,
    /// How often a transmit queue's index went past 65535.
    pub index_wraps: u64,
    /// How often all frames of a pair that were under way were given up.
    pub stalls: u64,
    /// How often the card was told of something.
    pub kicks: u64,
}

/// Frames go out.
pub const NIC_RUNS: u64 = 1;
/// The card refused to be set up.
pub const NIC_REFUSED: u64 = 2;

/// What one vCPU did so far. It alone writes it; the VMM may read it at any moment, as each word
/// is written at once.
#[repr(C)]
pub struct Counters {
    /// Pages filled at the start.
    pub filled_pages: u64,
    /// 1 when the filling is over.
    pub ready: u64,
    /// Ticks, and with them heartbeats, so far.
    pub heartbeats: u64,
    /// The time stamp counter at the last tick.
    pub tsc: u64,
    /// How often the time stamp counter was less than before.
    pub tsc_backwards: u64,
    /// The longest time between two ticks, in cycles: the stops, as the guest sees them.
    pub longest_gap: u64,
    /// Pages of the working set that were rewritten.
    pub written_pages: u64,
    /// Pages that were checked, wrong ones included.
    pub verified_pages: u64,
    /// How often a page was found wrong. A page that stays wrong counts at each visit.
    pub wrong_pages: u64,
    /// Frame of the first of them.
    pub first_wrong_frame: u64,
    /// The version that should have been there.
    pub first_wrong_version: u64,
    /// First word of that page that differed.
    pub first_wrong_word: u64,
    /// What it held.
    pub first_wrong_value: u64,
}
