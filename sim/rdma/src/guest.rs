//! A guest's memory on both sides, the pages that are dirty, and the writes that make them so.

use crate::joint::locate;
use martlet_ram::{RegionIndex, Run, RunKind};
use martlet_rdma::PageSpan;
use martlet_simulation::Chance;
use martlet_units::PAGE_SIZE;
use martlet_verbs_model::{Memory, Side};

#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const PAGE: usize = PAGE_SIZE as usize;

#[derive(Debug)]
pub(crate) struct Guest {
    regions: Vec<u64>,
    memory: [Vec<Vec<u8>>; 2],
    dirty: Vec<Vec<bool>>,
    version: u64,
    /// Pages that are written again and again.
    hot: Vec<(usize, u64)>,
}

impl Guest {
    /// Memory of which about half the pages have content, and which is all dirty.
    pub(crate) fn new(regions: &[u64], chance: &mut Chance) -> Guest {
        let zeros = || regions.iter().map(|pages| vec![0; size(*pages)]).collect::<Vec<_>>();
        let dirty = regions.iter().map(|pages| vec![true; size(*pages) / PAGE]).collect();
        let mut guest = Guest {
            regions: regions.to_vec(),
            memory: [zeros(), zeros()],
            dirty,
            version: 0,
            hot: Vec::new(),
        };
        for (region, pages) in regions.iter().enumerate() {
            let mut page = 0;
            while page < *pages {
                // In stretches, as memory is used.
                let end = (page + chance.between(1, 300)).min(*pages);
                if chance.once_in(2) {
                    (page..end).for_each(|page| guest.fill(region, page, false));
                }
                page = end;
            }
        }
        guest.hot = (0..12).map(|_| guest.any_page(chance)).collect();
        guest
    }

    fn any_page(&self, chance: &mut Chance) -> (usize, u64) {
        let region = usize::try_from(chance.below(self.regions.len() as u64)).expect("small");
        (region, chance.below(self.regions[region]))
    }

    /// A page that something waits for: most often one that is written often.
    pub(crate) fn urgent_page(&self, chance: &mut Chance) -> (u16, u64) {
        let (region, page) = if chance.once_in(4) {
            self.any_page(chance)
        } else {
            self.hot[usize::try_from(chance.below(self.hot.len() as u64)).expect("small")]
        };
        (u16::try_from(region).expect("few regions"), page)
    }

    /// The guest runs for a moment and writes some pages, its hot ones more often than others.
    pub(crate) fn run(&mut self, chance: &mut Chance) {
        for _ in 0..chance.below(5) {
            let hot = !chance.once_in(4);
            let (region, page) = if hot {
                self.hot[usize::try_from(chance.below(self.hot.len() as u64)).expect("small")]
            } else {
                self.any_page(chance)
            };
            self.fill(region, page, chance.once_in(3));
            self.dirty[region][size(page) / PAGE] = true;
        }
    }

    fn fill(&mut self, region: usize, page: u64, zero: bool) {
        self.version += 1;
        let bytes = &mut self.memory[0][region][size(page)..][..PAGE];
        if zero {
            bytes.fill(0);
        } else {
            let word = self.version.to_le_bytes();
            bytes.chunks_exact_mut(8).for_each(|at| at.copy_from_slice(&word));
        }
    }

    /// The next run of dirty pages at or after a page, of one kind and not longer than `most`;
    /// they are not dirty any more. The bits go before the content is looked at.
    pub(crate) fn take_run(&mut self, from: (u16, u64), most: u32) -> Option<Run> {
        let (mut region, mut page) = (usize::from(from.0), size(from.1) / PAGE);
        loop {
            let dirty = self.dirty.get(region)?;
            match dirty[page.min(dirty.len())..].iter().position(|dirty| *dirty) {
                Some(clean) => page += clean,
                None => {
                    (region, page) = (region + 1, 0);
                    continue;
                }
            }
            let kind = self.kind(region, page);
            let mut count = 0;
            while count < most && self.dirty[region].get(page).copied().unwrap_or(false) {
                if self.kind(region, page) != kind {
                    break;
                }
                self.dirty[region][page] = false;
                (count, page) = (count + 1, page + 1);
            }
            let first_page = page as u64 - u64::from(count);
            let region = RegionIndex(u16::try_from(region).expect("few regions"));
            return Some(Run { region, kind, first_page, count });
        }
    }

    fn kind(&self, region: usize, page: usize) -> RunKind {
        let bytes = &self.memory[0][region][page * PAGE..][..PAGE];
        if bytes.iter().all(|byte| *byte == 0) { RunKind::Zero } else { RunKind::Data }
    }

    pub(crate) fn is_dirty_within(&self, pages: PageSpan) -> bool {
        let dirty = &self.dirty[usize::from(pages.region().0)];
        let (first, end) = (size(pages.first_page()) / PAGE, size(pages.end()) / PAGE);
        dirty[first..end].contains(&true)
    }

    pub(crate) fn mark_dirty(&mut self, region: RegionIndex, first_page: u64, count: u64) {
        let first = size(first_page) / PAGE;
        let count = usize::try_from(count).expect("small");
        self.dirty[usize::from(region.0)][first..first + count].fill(true);
    }

    /// Sends a page by another way: it is there at once.
    pub(crate) fn copy_run(&mut self, run: &Run) {
        let region = usize::from(run.region.0);
        let (first, length) = (size(run.first_page), run.count as usize * PAGE);
        let [source, destination] = &mut self.memory;
        destination[region][first..first + length]
            .copy_from_slice(&source[region][first..first + length]);
    }

    pub(crate) fn is_equal(&self) -> bool {
        self.memory[0] == self.memory[1]
    }

    /// All of the destination's memory.
    pub(crate) fn arrived(&self) -> Vec<Vec<u8>> {
        self.memory[1].clone()
    }

    /// The guest changes every page at the source: no write may bring that over any more.
    pub(crate) fn scribble(&mut self) {
        self.memory[0].iter_mut().for_each(|region| region.fill(0xee));
    }
}

fn size(pages: u64) -> usize {
    usize::try_from(pages).expect("small") * PAGE
}

impl Memory for Guest {
    fn read(&mut self, side: Side, address: u64, into: &mut [u8]) {
        let (region, offset) = locate(address);
        let memory = &self.memory[usize::from(side == Side::B)][usize::from(region.0)];
        into.copy_from_slice(&memory[offset..offset + into.len()]);
    }

    fn write(&mut self, side: Side, address: u64, bytes: &[u8]) {
        let (region, offset) = locate(address);
        let memory = &mut self.memory[usize::from(side == Side::B)][usize::from(region.0)];
        memory[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}
