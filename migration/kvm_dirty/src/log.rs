//! KVM's dirty log: one bit a page, with manual protection (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2).
//!
//! Reading the log leaves the bits set and the pages writable; clearing a bit makes the next write
//! to its page set it again. So a page that was reported and not rearmed is reported by each sync:
//! harmless, since it is dirty until it is rearmed and sent.

use crate::KvmSlots;
use crate::slots::Logging;
use martlet_bitmap::WORD_BITS;
use martlet_ram::{DirtySource, RamBitmap, RegionIndex, TrackError};
use std::fmt;
use std::sync::Arc;

/// Words of the log that are looked at together; most are zero.
const STRIDE: usize = 8;

/// KVM's log of all slots, from its start to its drop. It is the only one: whoever else reads the
/// log of these slots (`KVM_GET_DIRTY_LOG`) meanwhile may not clear it.
pub struct KvmLog {
    slots: Arc<KvmSlots>,
    regions: Vec<Region>,
    _logging: Logging,
}

struct Region {
    pages: u64,
    /// Bits that were read and not cleared since.
    read: Box<[u64]>,
}

impl KvmLog {
    /// Switches logging on, with manual protection. Only for a VM without dirty rings.
    pub fn start(slots: &Arc<KvmSlots>) -> Result<KvmLog, TrackError> {
        let regions = slots.ram().regions().iter().map(|region| {
            let pages = region.pages();
            let words = usize::try_from(pages.div_ceil(WORD_BITS)).expect("fits the host");
            Region { pages, read: vec![0; words].into_boxed_slice() }
        });
        let regions = regions.collect();
        slots.protect_manually().map_err(|source| {
            TrackError::host("KVM_ENABLE_CAP of manual dirty log protection (Linux 5.1)", source)
        })?;
        let logging = Logging::start(slots)?;
        Ok(KvmLog { slots: Arc::clone(slots), regions, _logging: logging })
    }
}

impl fmt::Debug for KvmLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvmLog of {:?}", self.slots)
    }
}

impl DirtySource for KvmLog {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (index, region) in (0..).map(RegionIndex).zip(&mut self.regions) {
            self.slots.get_dirty_log(index, &mut region.read).map_err(|source| {
                TrackError::host(format!("KVM_GET_DIRTY_LOG of region {}", index.0), source)
            })?;
            let bitmap = into.region(index);
            for (stride, words) in region.read.chunks(STRIDE).enumerate() {
                if words.iter().fold(0, |any, word| any | word) == 0 {
                    continue;
                }
                for (offset, word) in words.iter().enumerate() {
                    bitmap.or_word(stride * STRIDE + offset, *word);
                }
            }
        }
        Ok(())
    }

    fn rearm(
        &mut self,
        index: RegionIndex,
        first_page: u64,
        words: &[u64],
    ) -> Result<(), TrackError> {
        assert_eq!(first_page % WORD_BITS, 0, "rearming begins at a whole word");
        let region = &mut self.regions[usize::from(index.0)];
        let first = usize::try_from(first_page / WORD_BITS).expect("fits the host");
        // A chunk at the end of a region may have more words than the region.
        let count = words.len().min(region.read.len() - first);
        let words = &words[..count];
        let read = &mut region.read[first..first + count];
        // Never clear a bit that was not read: its page would be lost.
        let named = |place: usize| words[place] & read[place];
        let Some(begin) = (0..words.len()).find(|place| named(*place) != 0) else { return Ok(()) };
        let end = (begin..words.len()).rev().find(|place| named(*place) != 0).unwrap_or(begin) + 1;
        let mask: Vec<u64> = (begin..end).map(named).collect();
        let page = first_page + begin as u64 * WORD_BITS;
        let pages = (mask.len() as u64 * WORD_BITS).min(region.pages - page);
        let pages = u32::try_from(pages).expect("one call names part of a region");
        self.slots.clear_dirty_log(index, page, pages, &mask).map_err(|source| {
            let what = format!("KVM_CLEAR_DIRTY_LOG of region {} page {page}", index.0);
            TrackError::host(what, source)
        })?;
        for (read, cleared) in read[begin..end].iter_mut().zip(&mask) {
            *read &= !cleared;
        }
        Ok(())
    }
}
