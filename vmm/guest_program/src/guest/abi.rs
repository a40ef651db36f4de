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
}

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
