//! The guest: pages whose content is the number of the write that made it, and what tracks them.

use martlet_bitmap::PageBitmap;
use martlet_protocol::RunPermit;
use martlet_simulation::Chance;

/// Pages of a chunk: what goes to a channel together, always to the same one.
pub(crate) const CHUNK_PAGES: u64 = 4;

/// A machine with a guest in it, or waiting for one.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Content of each page: the number of the last write to it, 0 if never written.
    pub(crate) memory: Vec<u64>,
    /// The number of the guest's last write: stands for its vCPUs' whole state.
    pub(crate) state: u64,
    /// The right to run, if it is here.
    pub(crate) permit: Option<RunPermit>,
    /// Whether the owner wants it to run when it may.
    pub(crate) wanted: bool,
}

impl Machine {
    /// A machine that waits for a guest.
    pub(crate) fn waiting(pages: usize) -> Machine {
        Machine { memory: vec![0; pages], state: 0, permit: None, wanted: false }
    }

    /// A machine that just booted a guest.
    pub(crate) fn booted(pages: usize, wanted: bool) -> Machine {
        Machine { permit: Some(RunPermit::for_new_guest()), wanted, ..Machine::waiting(pages) }
    }

    /// Whether vCPUs run now.
    pub(crate) fn runs(&self) -> bool {
        self.permit.is_some() && self.wanted
    }

    /// The guest runs a little: writes some pages, most of them from a small working set.
    pub(crate) fn run(&mut self, chance: &mut Chance, tracker: Option<&mut Tracker>) {
        assert!(self.runs(), "whoever runs a guest holds its permit");
        let mut tracker = tracker;
        for _ in 0..chance.below(4) {
            let range =
                if chance.once_in(4) { self.memory.len() } else { self.memory.len().min(6) };
            let page = chance.index(range);
            self.state += 1;
            self.memory[page] = self.state;
            if let Some(tracker) = &mut tracker {
                tracker.written(page as u64);
            }
        }
    }

    /// A digest of memory: order and content both count.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut sum: u64 = 0xcbf2_9ce4_8422_2325;
        for content in &self.memory {
            sum = (sum ^ content).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&sum.to_le_bytes());
        digest
    }
}

/// Dirty tracking that write-protects pages, as KVM's log with manual protection does: a write to
/// an armed page is logged and disarms it; further writes pass unseen until it is armed again.
#[derive(Debug)]
pub(crate) struct Tracker {
    armed: PageBitmap,
    log: PageBitmap,
    /// What is known to be dirty and was not yet sent.
    pub(crate) dirty: PageBitmap,
}

impl Tracker {
    /// Tracks all pages from now on; all are to be sent.
    pub(crate) fn new(pages: u64) -> Tracker {
        let full = || {
            let bitmap = PageBitmap::new(pages);
            bitmap.set_range(0..pages);
            bitmap
        };
        Tracker { armed: full(), log: PageBitmap::new(pages), dirty: full() }
    }

    fn written(&mut self, page: u64) {
        if self.armed.get(page) {
            self.armed.clear_range(page..page + 1);
            self.log.set(page);
        }
    }

    /// Moves what was logged to what is dirty.
    pub(crate) fn sync(&mut self) {
        for word in 0..self.log.word_count() {
            self.dirty.or_word(word, self.log.take_word(word));
        }
    }

    /// Takes a chunk's dirty pages: not dirty any more, and armed. Read them only now.
    pub(crate) fn take_chunk(&mut self, chunk: u64, rearm: bool) -> Vec<u64> {
        let end = ((chunk + 1) * CHUNK_PAGES).min(self.dirty.pages());
        let taken: Vec<u64> =
            (chunk * CHUNK_PAGES..end).filter(|page| self.dirty.get(*page)).collect();
        for &page in &taken {
            self.dirty.clear_range(page..page + 1);
            if rearm {
                self.armed.set(page);
            }
        }
        taken
    }

    /// Arms a page (what [`Tracker::take_chunk`] did if it was told to).
    pub(crate) fn rearm(&mut self, page: u64) {
        self.armed.set(page);
    }
}
