//! Frames of a data channel: a header, run entries, then the pages' bytes.
//!
//! ```text
//! header: 32 bytes                          run entry: 16 bytes
//! offset  size  field                       offset  size  field
//!      0     4  magic  "mPGS"                    0     2  region      number, from 0
//!      4     2  kind   1 pages, 2 barrier        2     2  kind        1 data, 2 zero
//!      6     2  flags  0                         4     4  count       pages, not 0
//!      8     4  round                            8     8  first_page  of the region
//!     12     4  run_count
//!     16     8  payload_len, in bytes
//!     24     8  reserved, 0
//! ```
//!
//! The payload is the content of all data runs in the order of their entries, nothing between
//! them: a receiver reads it straight into guest memory with one vectored read. A zero run has no
//! payload. A barrier has neither runs nor payload; it ends a round on its channel.
//!
//! Nothing here allocates: a sender keeps an array of [`RunEntry`], a receiver a buffer of
//! [`RUNS_BYTES_MAX`].

use martlet_units::PAGE_SIZE;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every frame of a data channel.
pub const PAGES_MAGIC: [u8; 4] = *b"mPGS";
/// Bytes of a [`PagesHeader`].
pub const PAGES_HEADER_BYTES: usize = 32;
/// Bytes of a [`RunEntry`].
pub const RUN_BYTES: usize = 16;
/// Most runs of a frame. Below the kernel's `UIO_MAXIOV` (1024, `linux/uio.h`), so that a frame
/// with its header and entries is one `writev`.
pub const RUNS_MAX: usize = 512;
/// Bytes of the run entries of the fullest frame.
pub const RUNS_BYTES_MAX: usize = RUNS_MAX * RUN_BYTES;
/// Longest payload.
pub const PAYLOAD_BYTES_MAX: u64 = 4 << 20;
/// Most pages of content in a frame.
pub const PAYLOAD_PAGES_MAX: u64 = PAYLOAD_BYTES_MAX / PAGE_SIZE;

const KIND_PAGES: u16 = 1;
const KIND_BARRIER: u16 = 2;
const RUN_DATA: u16 = 1;
const RUN_ZERO: u16 = 2;

/// The header as it goes over the wire. [`PagesHeader::as_bytes`](IntoBytes::as_bytes) sends it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PagesHeader {
    magic: [u8; 4],
    kind: U16,
    flags: U16,
    round: U32,
    run_count: U32,
    payload_len: U64,
    reserved: U64,
}

/// A run of pages as it goes over the wire. `<[RunEntry]>::as_bytes` sends many.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RunEntry {
    region: U16,
    kind: U16,
    count: U32,
    first_page: U64,
}

const _: () = assert!(size_of::<PagesHeader>() == PAGES_HEADER_BYTES);
const _: () = assert!(size_of::<RunEntry>() == RUN_BYTES);

/// Whether a run's pages have content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Their content is in the payload.
    Data,
    /// They are all zero bytes.
    Zero,
}

/// A checked run: `count` pages from `first_page` on are in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the region, as in `Setup`.
    pub region: u16,
    /// With content or zero.
    pub kind: RunKind,
    /// First page, counted from the region's start.
    pub first_page: u64,
    /// Number of pages; not zero.
    pub count: u32,
}

/// A checked header: what follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagesFrame {
    /// `runs` entries, then `payload_bytes` of pages.
    Pages {
        /// The round that the pages belong to.
        round: u32,
        /// 1 to [`RUNS_MAX`].
        runs: usize,
        /// A multiple of the page size, at most [`PAYLOAD_BYTES_MAX`].
        payload_bytes: u64,
    },
    /// The round is over on this channel.
    Barrier {
        /// Which round.
        round: u32,
    },
}

/// Why bytes are not a frame of a data channel. The peer's fault, always: drop the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// The frame does not start with [`PAGES_MAGIC`].
    #[error("data frame starts with \"{}\" instead of its magic", .0.escape_ascii())]
    Magic([u8; 4]),
    /// Neither pages nor barrier.
    #[error("data frame of unknown kind {0}")]
    Kind(u16),
    /// A flag that this version does not know; it may change what the payload means.
    #[error("data frame has unknown flags {flags:#06x} or a reserved field {reserved:#x}")]
    Reserved {
        /// As received; expected 0.
        flags: u16,
        /// As received; expected 0.
        reserved: u64,
    },
    /// No runs, or more than [`RUNS_MAX`].
    #[error("data frame with {0} runs, expected 1 to {RUNS_MAX}")]
    RunCount(u32),
    /// A payload that is too long or not whole pages.
    #[error(
        "data frame with {0} bytes of pages, expected whole pages, at most {PAYLOAD_BYTES_MAX}"
    )]
    PayloadBytes(u64),
    /// A barrier that claims to carry something.
    #[error("barrier with {runs} runs and {payload_bytes} bytes")]
    BarrierLoad {
        /// As received.
        runs: u32,
        /// As received.
        payload_bytes: u64,
    },
    /// The entries given are not as many bytes as the header announced.
    #[error("{found} bytes of run entries, the header announced {expected}")]
    EntryBytes {
        /// Bytes given.
        found: usize,
        /// Bytes announced.
        expected: usize,
    },
    /// A run of unknown kind.
    #[error("run {index} has unknown kind {kind}")]
    RunKind {
        /// Place in the frame.
        index: usize,
        /// As received.
        kind: u16,
    },
    /// A run that is empty or not in its region, or whose region does not exist.
    #[error("run {index}: {count} pages from page {first_page} of region {region} do not exist")]
    RunRange {
        /// Place in the frame.
        index: usize,
        /// As received.
        region: u16,
        /// As received.
        first_page: u64,
        /// As received.
        count: u32,
    },
    /// The data runs together are not as long as the payload.
    #[error("data runs have {runs_bytes} bytes, the header announced {payload_bytes}")]
    PayloadMismatch {
        /// What the runs add up to.
        runs_bytes: u64,
        /// What the header announced.
        payload_bytes: u64,
    },
}

impl RunEntry {
    /// A run whose pages' content follows.
    pub fn data(region: u16, first_page: u64, count: u32) -> RunEntry {
        RunEntry::new(Run { region, kind: RunKind::Data, first_page, count })
    }

    /// A run of zero pages.
    pub fn zero(region: u16, first_page: u64, count: u32) -> RunEntry {
        RunEntry::new(Run { region, kind: RunKind::Zero, first_page, count })
    }

    /// Any run.
    pub fn new(run: Run) -> RunEntry {
        let kind = match run.kind {
            RunKind::Data => RUN_DATA,
            RunKind::Zero => RUN_ZERO,
        };
        RunEntry {
            region: U16::new(run.region),
            kind: U16::new(kind),
            count: U32::new(run.count),
            first_page: U64::new(run.first_page),
        }
    }

    /// Its kind; `None` if the peer invented one.
    fn kind(&self) -> Option<RunKind> {
        match self.kind.get() {
            RUN_DATA => Some(RunKind::Data),
            RUN_ZERO => Some(RunKind::Zero),
            _ => None,
        }
    }
}

impl PagesHeader {
    /// The header of a frame with these runs.
    ///
    /// # Panics
    /// If there are no runs, more than [`RUNS_MAX`], or more than [`PAYLOAD_PAGES_MAX`] pages of
    /// content: whoever cuts frames keeps to the limits.
    pub fn pages(round: u32, runs: &[RunEntry]) -> PagesHeader {
        let pages: u64 = runs
            .iter()
            .filter(|run| run.kind.get() == RUN_DATA)
            .map(|run| u64::from(run.count.get()))
            .sum();
        assert!((1..=RUNS_MAX).contains(&runs.len()), "{} runs in a frame", runs.len());
        assert!(pages <= PAYLOAD_PAGES_MAX, "{pages} pages in a frame");
        let run_count = u32::try_from(runs.len()).expect("at most RUNS_MAX");
        PagesHeader::new(KIND_PAGES, round, run_count, pages * PAGE_SIZE)
    }

    /// The header that ends a round, with nothing behind it.
    pub fn barrier(round: u32) -> PagesHeader {
        PagesHeader::new(KIND_BARRIER, round, 0, 0)
    }

    fn new(kind: u16, round: u32, run_count: u32, payload_len: u64) -> PagesHeader {
        PagesHeader {
            magic: PAGES_MAGIC,
            kind: U16::new(kind),
            flags: U16::ZERO,
            round: U32::new(round),
            run_count: U32::new(run_count),
            payload_len: U64::new(payload_len),
            reserved: U64::ZERO,
        }
    }
}

impl PagesFrame {
    /// Checks a header. Nothing behind it needs to have been read.
    pub fn parse(bytes: &[u8; PAGES_HEADER_BYTES]) -> Result<PagesFrame, PagesError> {
        let raw: PagesHeader = zerocopy::transmute!(*bytes);
        if raw.magic != PAGES_MAGIC {
            return Err(PagesError::Magic(raw.magic));
        }
        let (flags, reserved) = (raw.flags.get(), raw.reserved.get());
        if flags != 0 || reserved != 0 {
            return Err(PagesError::Reserved { flags, reserved });
        }
        let round = raw.round.get();
        let (runs, payload_bytes) = (raw.run_count.get(), raw.payload_len.get());
        match raw.kind.get() {
            KIND_PAGES => {
                let count = usize::try_from(runs).unwrap_or(usize::MAX);
                if !(1..=RUNS_MAX).contains(&count) {
                    return Err(PagesError::RunCount(runs));
                }
                if payload_bytes > PAYLOAD_BYTES_MAX || !payload_bytes.is_multiple_of(PAGE_SIZE) {
                    return Err(PagesError::PayloadBytes(payload_bytes));
                }
                Ok(PagesFrame::Pages { round, runs: count, payload_bytes })
            }
            KIND_BARRIER if runs == 0 && payload_bytes == 0 => Ok(PagesFrame::Barrier { round }),
            KIND_BARRIER => Err(PagesError::BarrierLoad { runs, payload_bytes }),
            kind => Err(PagesError::Kind(kind)),
        }
    }

    /// Bytes of run entries that follow the header.
    pub fn entry_bytes(&self) -> usize {
        match self {
            PagesFrame::Pages { runs, .. } => runs * RUN_BYTES,
            PagesFrame::Barrier { .. } => 0,
        }
    }

    /// Checks the run entries behind this header. `region_pages` says how many pages a region
    /// has, `None` if there is no such region. Two runs of a frame may share pages: what is read
    /// last stays.
    pub fn parse_runs<'a>(
        &self,
        entries: &'a [u8],
        region_pages: impl Fn(u16) -> Option<u64>,
    ) -> Result<Runs<'a>, PagesError> {
        let expected = self.entry_bytes();
        let wrong_length = PagesError::EntryBytes { found: entries.len(), expected };
        if entries.len() != expected {
            return Err(wrong_length);
        }
        let entries = <[RunEntry]>::ref_from_bytes(entries).map_err(|_| wrong_length)?;
        let mut pages: u64 = 0;
        for (index, entry) in entries.iter().enumerate() {
            let run = check_run(index, entry, &region_pages)?;
            if run.kind == RunKind::Data {
                pages += u64::from(run.count);
            }
        }
        let runs_bytes = pages.saturating_mul(PAGE_SIZE);
        let payload_bytes = match *self {
            PagesFrame::Pages { payload_bytes, .. } => payload_bytes,
            PagesFrame::Barrier { .. } => 0,
        };
        if runs_bytes != payload_bytes {
            return Err(PagesError::PayloadMismatch { runs_bytes, payload_bytes });
        }
        Ok(Runs { entries })
    }
}

fn check_run(
    index: usize,
    entry: &RunEntry,
    region_pages: &impl Fn(u16) -> Option<u64>,
) -> Result<Run, PagesError> {
    let (region, count, first_page) =
        (entry.region.get(), entry.count.get(), entry.first_page.get());
    let kind = entry.kind().ok_or(PagesError::RunKind { index, kind: entry.kind.get() })?;
    let end = first_page.checked_add(u64::from(count));
    let exists = match (end, region_pages(region)) {
        (Some(end), Some(pages)) => count != 0 && end <= pages,
        (None, _) | (_, None) => false,
    };
    if !exists {
        return Err(PagesError::RunRange { index, region, first_page, count });
    }
    Ok(Run { region, kind, first_page, count })
}

/// The checked runs of one frame.
#[derive(Clone, Copy, Debug)]
pub struct Runs<'a> {
    entries: &'a [RunEntry],
}

impl<'a> Runs<'a> {
    /// The runs in the order of their payload.
    pub fn iter(&self) -> impl Iterator<Item = Run> + use<'a> {
        self.entries.iter().filter_map(|entry| {
            Some(Run {
                region: entry.region.get(),
                kind: entry.kind()?,
                first_page: entry.first_page.get(),
                count: entry.count.get(),
            })
        })
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none, as in a barrier.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
