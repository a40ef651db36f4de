//! What a channel sends at once: runs of pages, merged, and where their content lies.

use crate::{Chunk, ChunkBits, GuestRam, RawSlice, RegionIndex};
use martlet_units::{ByteCount, PAGE_SIZE};

/// Most runs in a batch. With two more parts for headers it stays below the kernel's 1024 parts
/// in one `writev` (`UIO_MAXIOV`).
pub const RUNS_MAX: usize = 512;
/// Most bytes of page content in a batch: some hundred microseconds of a 100 Gbit/s link, so
/// enough to make the syscall's cost vanish, and the chunks of two huge pages.
pub const BYTES_MAX: ByteCount = ByteCount(4 << 20);

const PAGE: usize = crate::PAGE_BYTES;

/// What a run's pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Content, which is sent.
    Data,
    /// Only zeros, which are not sent.
    Zero,
}

/// Consecutive pages of one region and of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The region.
    pub region: RegionIndex,
    /// What the pages hold.
    pub kind: RunKind,
    /// Page number in the region of the first.
    pub first_page: u64,
    /// How many; not zero.
    pub count: u32,
}

/// Whether a chunk went into a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// All of it; the chunk is empty now.
    All,
    /// The batch is full; what did not fit is still in the chunk.
    Full,
}

/// Collects pages for one send. Filled from chunks, sent, cleared and filled again, by the one
/// worker of a channel. Allocates nothing after it was made.
///
/// Pages stand in the order in which they were pushed; neighbours of one kind are one run. The
/// content is the guest's memory itself: if the guest writes a page after it was pushed, the new
/// content may be sent in place of the old one. That page is dirty then and is sent once more. A
/// page that was zero when it was checked is sent as zero whatever becomes of it, for the same
/// reason.
#[derive(Debug)]
pub struct PageBatch<'ram> {
    ram: &'ram GuestRam,
    runs: Vec<Run>,
    slices: Vec<RawSlice<'ram>>,
    payload: usize,
    payload_max: usize,
    zero_pages: u64,
}

impl<'ram> PageBatch<'ram> {
    /// An empty batch for pages of `ram`.
    #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
    pub fn new(ram: &'ram GuestRam) -> PageBatch<'ram> {
        PageBatch {
            ram,
            runs: Vec::with_capacity(RUNS_MAX),
            slices: Vec::with_capacity(RUNS_MAX),
            payload: 0,
            payload_max: BYTES_MAX.0 as usize,
            zero_pages: 0,
        }
    }

    /// The memory whose pages it collects.
    pub fn ram(&self) -> &'ram GuestRam {
        self.ram
    }

    /// Limits the content of a batch, so that a channel with a bandwidth limit sends small pieces.
    /// Rounded down to whole pages, and to between one page and [`BYTES_MAX`]. What is already in
    /// stays.
    #[expect(clippy::cast_possible_truncation, reason = "clamped to a small constant")]
    pub fn limit_payload(&mut self, limit: ByteCount) {
        let limit = limit.0.clamp(PAGE_SIZE, BYTES_MAX.0);
        self.payload_max = (limit - limit % PAGE_SIZE) as usize;
    }

    /// Moves as many of the chunk's pages into the batch as fit, in ascending order. `zero` are
    /// those that were found to be zero.
    ///
    /// # Panics
    /// If the chunk is not of this batch's memory.
    pub fn push_chunk(&mut self, chunk: &mut Chunk, zero: &ChunkBits) -> Pushed {
        assert!(chunk.is_of(self.ram), "{chunk:?} is of other memory");
        let mut from = 0;
        while let Some(bit) = chunk.bits().next_set(from) {
            if self.payload + PAGE > self.payload_max {
                return Pushed::Full;
            }
            let page = chunk.first_page() + u64::from(bit);
            let kind = if zero.get(bit) { RunKind::Zero } else { RunKind::Data };
            if !self.append(chunk.region(), page, kind) {
                return Pushed::Full;
            }
            chunk.clear(bit);
            from = bit + 1;
        }
        Pushed::All
    }

    /// The runs, in the order of their content.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The content of the data runs: one slice for each, in the same order.
    pub fn slices(&self) -> &[RawSlice<'ram>] {
        &self.slices
    }

    /// Bytes of content: the sum of the slices.
    pub fn payload(&self) -> ByteCount {
        ByteCount(self.payload as u64)
    }

    /// Pages that go with their content.
    pub fn data_pages(&self) -> u64 {
        self.payload as u64 / PAGE_SIZE
    }

    /// Pages that go as a number only.
    pub fn zero_pages(&self) -> u64 {
        self.zero_pages
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether it is time to send: another page may not fit.
    pub fn is_full(&self) -> bool {
        self.runs.len() == RUNS_MAX || self.payload + PAGE > self.payload_max
    }

    /// Empties it for the next pages.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.slices.clear();
        self.payload = 0;
        self.zero_pages = 0;
    }

    /// Adds a page to the last run or as a new one; false if there is no room for a new one.
    fn append(&mut self, region: RegionIndex, page: u64, kind: RunKind) -> bool {
        let has_room = self.runs.len() < RUNS_MAX;
        let last = self.runs.last_mut().filter(|run| {
            run.region == region
                && run.kind == kind
                && run.first_page + u64::from(run.count) == page
                && run.count < u32::MAX
        });
        let (run, merged) = match last {
            Some(run) => {
                run.count += 1;
                (*run, true)
            }
            None if has_room => {
                let run = Run { region, kind, first_page: page, count: 1 };
                self.runs.push(run);
                (run, false)
            }
            None => return false,
        };
        match kind {
            RunKind::Zero => self.zero_pages += 1,
            RunKind::Data => {
                self.payload += PAGE;
                let memory = self.ram.slice(region, run.first_page, run.count);
                let memory = memory.expect("the chunk is of this memory");
                match self.slices.last_mut() {
                    Some(slice) if merged => *slice = memory,
                    _ => self.slices.push(memory),
                }
            }
        }
        true
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
