//! Who finds the zero pages of a chunk: the CPU, or an accelerator beside it.
#![allow(unsafe_code)]
// UNSAFETY: the zero check reads guest memory through raw pointers.

use crate::{Chunk, ChunkBits, GuestRam, ZeroCheck};
use std::io;
use std::sync::Arc;

/// Finds the zero pages of chunks, one after the other. Made for one channel and used by its one
/// worker; allocates nothing after it was made.
///
/// An accelerator works on chunks that were submitted while the worker sends those before them, so
/// a finder may hold [`depth`](ZeroFinder::depth) chunks. Whatever happens to the accelerator, the
/// answer is right: what it does not do, the CPU does.
pub trait ZeroFinder: Send {
    /// How many chunks it takes before the first must be collected; at least 1.
    fn depth(&self) -> usize;

    /// How many chunks were submitted and not collected.
    fn pending(&self) -> usize;

    /// Begins with a chunk, whose pages were touched and rearmed: checking others would allocate
    /// them.
    ///
    /// # Panics
    /// If `depth` chunks are pending, or the chunk is not of the finder's memory.
    fn submit(&mut self, chunk: Chunk);

    /// Ends with the chunk that was submitted first, and says which of its pages are zero. `None`
    /// if none is pending.
    ///
    /// The guest may write a page while it is checked. Then the answer is that of some mix of old
    /// and new, and the page is dirty again.
    fn collect(&mut self) -> Option<(Chunk, ChunkBits)>;
}

/// Makes finders: what a migration is told of who checks its pages.
pub trait ZeroFinders: Send + Sync {
    /// Who checks, for people: a method, or the names of devices.
    fn name(&self) -> String;

    /// A finder for the pages of `ram`, for this channel.
    fn open(&self, ram: &Arc<GuestRam>, channel: u16) -> io::Result<Box<dyn ZeroFinder>>;
}

/// Lets the CPU check. Also what an accelerator's finder falls back to.
#[derive(Clone, Copy, Debug)]
pub struct CpuFinders(pub ZeroCheck);

impl ZeroFinders for CpuFinders {
    fn name(&self) -> String {
        format!("cpu ({})", self.0.name())
    }

    fn open(&self, ram: &Arc<GuestRam>, _channel: u16) -> io::Result<Box<dyn ZeroFinder>> {
        Ok(Box::new(CpuFinder { ram: Arc::clone(ram), check: self.0, pending: None }))
    }
}

/// One chunk at a time, when it is collected: its content is in the caches then when it is sent.
struct CpuFinder {
    ram: Arc<GuestRam>,
    check: ZeroCheck,
    pending: Option<Chunk>,
}

impl ZeroFinder for CpuFinder {
    fn depth(&self) -> usize {
        1
    }

    fn pending(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    fn submit(&mut self, chunk: Chunk) {
        assert!(self.pending.is_none(), "a chunk is pending");
        self.pending = Some(chunk);
    }

    fn collect(&mut self) -> Option<(Chunk, ChunkBits)> {
        let chunk = self.pending.take()?;
        Some((chunk, chunk.zero_pages(&self.ram, &self.check)))
    }
}

impl Chunk {
    /// Those of its pages that are all zero, checked by the CPU. Only pages that were touched may
    /// be in it: checking another one would allocate it.
    ///
    /// # Panics
    /// If the chunk is not of this memory.
    pub fn zero_pages(&self, ram: &GuestRam, check: &ZeroCheck) -> ChunkBits {
        assert!(self.is_of(ram), "{self:?} is of other memory");
        let base = match ram.region(self.region()) {
            Some(region) if !self.bits().is_empty() => region.host_ptr(self.first_page()),
            _ => return ChunkBits::EMPTY,
        };
        // SAFETY: the pages of `bits` are in the region's mapping, as asserted, which lives as
        // long as the region, which `ram` keeps.
        unsafe { check.zero_pages(base, self.bits()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionIndex;
    use crate::tests::{one_region, write_page};

    #[test]
    fn the_cpu_finds_what_is_zero() {
        let ram = Arc::new(one_region(700));
        for (page, byte) in [(512, 0), (513, 1), (600, 0), (699, 7)] {
            write_page(&ram, 0, page, byte);
        }
        let mut finder = CpuFinders(ZeroCheck::detect()).open(&ram, 0).unwrap();
        assert_eq!((finder.depth(), finder.collect()), (1, None));
        let mut bits = ChunkBits::EMPTY;
        [0, 1, 88, 187].into_iter().for_each(|page| bits.set(page));
        let chunk = Chunk::new(&ram, RegionIndex(0), 1, bits).unwrap();
        finder.submit(chunk);
        assert_eq!(finder.pending(), 1);
        let (same, zero) = finder.collect().unwrap();
        assert_eq!(same, chunk);
        assert_eq!(zero.runs().flatten().collect::<Vec<_>>(), [0, 88]);
    }
}
