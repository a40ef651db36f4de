//! KVM's dirty ring: each vCPU lists the pages it wrote (KVM_CAP_DIRTY_LOG_RING_ACQ_REL).
//!
//! Whoever harvests a ring adds its pages to a bitmap first and resets the rings afterwards; the
//! reset is what catches the next write. A vCPU whose ring is full leaves the guest, empties it
//! into a bitmap that waits for the next sync, and goes on.
#![allow(unsafe_code)]
// UNSAFETY: borrows the descriptors of vCPUs, which the caller says are such.

use crate::KvmSlots;
use crate::raw::DirtyRing;
use crate::slots::Logging;
use martlet_ram::{DirtySource, RamBitmap, RegionIndex, TrackError};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Fewest entries of a ring that leave a vCPU time to run: a processor's own logging keeps up to
/// 512 in reserve.
pub const RING_ENTRIES_MIN: u32 = 1024;

/// All dirty rings of a VM.
pub struct KvmRings {
    slots: Arc<KvmSlots>,
    rings: Vec<Arc<Mutex<DirtyRing>>>,
    entries: u32,
    pending: RamBitmap,
    has_pending: AtomicBool,
    /// A ring was full to the last entry: KVM stops a vCPU before that, so entries may have been
    /// overwritten, and the ring can't be trusted any more. Seen where KVM, nested in software,
    /// emulates a guest's kernel for long without looking at the ring.
    has_overflowed: AtomicBool,
    /// One reset at a time, and only of entries whose pages are in a bitmap.
    resetting: Mutex<()>,
}

/// A vCPU's own part in them, for its thread.
pub struct RingShare {
    ring: Arc<Mutex<DirtyRing>>,
    rings: Arc<KvmRings>,
}

impl KvmRings {
    /// Maps the rings of all vCPUs of the VM, and gives each its share. `entries` is what the VMM
    /// asked for when it enabled `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`, divided by an entry's 16 bytes.
    ///
    /// # Safety
    /// These are descriptors of vCPUs.
    ///
    /// # Panics
    /// If `entries` is not a power of two of at least [`RING_ENTRIES_MIN`].
    pub unsafe fn open<'a, V: AsRawFd + 'a>(
        slots: &Arc<KvmSlots>,
        vcpus: impl IntoIterator<Item = &'a V>,
        entries: u32,
    ) -> io::Result<(Arc<KvmRings>, Vec<RingShare>)> {
        assert!(entries >= RING_ENTRIES_MIN, "a ring of {entries} entries");
        let open = |vcpu: &V| {
            // SAFETY: open, by the caller's promise.
            let vcpu = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
            DirtyRing::map(vcpu, entries).map(|ring| Arc::new(Mutex::new(ring)))
        };
        let rings = vcpus.into_iter().map(open).collect::<io::Result<Vec<_>>>()?;
        let rings = Arc::new(KvmRings {
            slots: Arc::clone(slots),
            rings,
            entries,
            pending: RamBitmap::new(slots.ram()),
            has_pending: AtomicBool::new(false),
            has_overflowed: AtomicBool::new(false),
            resetting: Mutex::new(()),
        });
        let share = |ring| RingShare { ring: Arc::clone(ring), rings: Arc::clone(&rings) };
        let shares = rings.rings.iter().map(share).collect();
        Ok((rings, shares))
    }

    /// Takes what is in one ring; returns how many entries.
    fn harvest(&self, ring: &Mutex<DirtyRing>, into: &RamBitmap) -> u32 {
        let taken = lock(ring).harvest(|slot, page| self.mark(into, slot, page));
        if taken == self.entries {
            self.has_overflowed.store(true, Ordering::Release);
        }
        taken
    }

    fn check(&self) -> Result<(), TrackError> {
        if !self.has_overflowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let source = io::Error::other("KVM wrote more entries than a ring has");
        Err(TrackError::host("reading the dirty rings", source))
    }

    /// Adds a ring's entry to a bitmap.
    fn mark(&self, into: &RamBitmap, slot: u32, page: u64) {
        // The upper half is the number of an address space (system management mode).
        let region = self.slots.region_of(slot & 0xffff).map(|index| into.region(index));
        if let Some(region) = region.filter(|region| page < region.pages()) {
            region.set(page);
        }
    }
}

impl RingShare {
    /// To be called by the vCPU's thread when `KVM_RUN` returns with `KVM_EXIT_DIRTY_RING_FULL`;
    /// then the vCPU can run again.
    pub fn on_full(&mut self) {
        let _resetting = lock(&self.rings.resetting);
        let taken = self.rings.harvest(&self.ring, &self.rings.pending);
        if taken > 0 {
            self.rings.has_pending.store(true, Ordering::Release);
        }
        if let Err(error) = self.rings.slots.reset_dirty_rings() {
            // The ring stays full and the vCPU comes back here: slow, but nothing is lost.
            tracing::warn!(%error, "KVM_RESET_DIRTY_RINGS failed");
        }
    }
}

/// The rings of all vCPUs, from its start to its drop.
pub struct KvmRing {
    rings: Arc<KvmRings>,
    _logging: Logging,
}

impl KvmRing {
    /// Switches logging on.
    pub fn start(rings: &Arc<KvmRings>) -> Result<KvmRing, TrackError> {
        let logging = Logging::start(&rings.slots)?;
        Ok(KvmRing { rings: Arc::clone(rings), _logging: logging })
    }
}

impl fmt::Debug for KvmRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvmRings({} rings of {} entries)", self.rings.len(), self.entries)
    }
}

impl fmt::Debug for RingShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RingShare")
    }
}

impl fmt::Debug for KvmRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rings.fmt(f)
    }
}

/// Whoever panicked with it left the ring as it was: what it holds is a place in memory.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DirtySource for KvmRing {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        let rings = &*self.rings;
        let _resetting = lock(&rings.resetting);
        let mut taken = 0;
        for ring in &rings.rings {
            taken += rings.harvest(ring, into);
        }
        rings.check()?;
        if rings.has_pending.swap(false, Ordering::AcqRel) {
            for (region, bitmap) in rings.pending.iter() {
                for word in 0..bitmap.word_count() {
                    into.region(region).or_word(word, bitmap.take_word(word));
                }
            }
        }
        if taken > 0 {
            rings
                .slots
                .reset_dirty_rings()
                .map_err(|source| TrackError::host("KVM_RESET_DIRTY_RINGS", source))?;
        }
        Ok(())
    }

    /// Nothing: the reset after the harvest did it, and the caller reads pages only after a sync.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}
