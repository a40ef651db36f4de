//! KVM's dirty ring: each vCPU lists the pages it wrote (KVM_CAP_DIRTY_LOG_RING_ACQ_REL).
//!
//! Whoever harvests a ring adds its pages to a bitmap first and resets the rings afterwards; the
//! reset is what catches the next write. A vCPU whose ring is full leaves the guest, empties it
//! into a bitmap that waits for the next sync, and goes on.

use super::Logging;
use crate::kvm::KvmCore;
use crate::kvm::raw::DirtyRing;
use crate::memory::GuestMemory;
use crate::vcpu::lock;
use kvm_ioctls::VcpuFd;
use martlet_ram::{DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Pages that a vCPU may write between two harvests without leaving the guest. 16 bytes each; a
/// processor's own logging keeps up to 512 in reserve.
pub(crate) const RING_ENTRIES: u32 = 8192;

/// All rings of a VM.
pub(crate) struct Rings {
    core: Arc<KvmCore>,
    rings: Vec<Arc<Mutex<DirtyRing>>>,
    pending: RamBitmap,
    has_pending: AtomicBool,
    /// A ring was full to the last entry: KVM stops a vCPU before that, so entries may have been
    /// overwritten, and the ring can't be trusted any more. Seen where KVM, nested in software,
    /// emulates a guest's kernel for long without looking at the ring.
    has_overflowed: AtomicBool,
    /// One reset at a time, and only of entries whose pages are in a bitmap.
    resetting: Mutex<()>,
}

/// A vCPU's own part in them.
pub(crate) struct RingShare {
    ring: Arc<Mutex<DirtyRing>>,
    rings: Arc<Rings>,
}

/// Maps the rings of these vCPUs.
pub(crate) fn open_rings(
    core: &Arc<KvmCore>,
    ram: &GuestRam,
    vcpus: &[VcpuFd],
) -> io::Result<(Arc<Rings>, Vec<RingShare>)> {
    let open = |vcpu| DirtyRing::map(vcpu, RING_ENTRIES).map(|ring| Arc::new(Mutex::new(ring)));
    let rings = vcpus.iter().map(open).collect::<io::Result<Vec<_>>>()?;
    let rings = Arc::new(Rings {
        core: Arc::clone(core),
        rings,
        pending: RamBitmap::new(ram),
        has_pending: AtomicBool::new(false),
        has_overflowed: AtomicBool::new(false),
        resetting: Mutex::new(()),
    });
    let share = |ring| RingShare { ring: Arc::clone(ring), rings: Arc::clone(&rings) };
    let shares = rings.rings.iter().map(share).collect();
    Ok((rings, shares))
}

impl Rings {
    /// Takes what is in one ring; returns how many entries.
    fn harvest(&self, ring: &Mutex<DirtyRing>, into: &RamBitmap) -> u32 {
        let taken = lock(ring).harvest(marker(into));
        if taken == RING_ENTRIES {
            self.has_overflowed.store(true, Ordering::Release);
        }
        taken
    }

    fn check(&self) -> Result<(), TrackError> {
        if !self.has_overflowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let source = io::Error::other("KVM wrote more entries than a ring has");
        Err(TrackError { operation: "reading the dirty rings".into(), source })
    }
}

impl RingShare {
    /// The vCPU left the guest because its ring is full.
    pub(crate) fn on_full(&mut self) {
        let _resetting = lock(&self.rings.resetting);
        let taken = self.rings.harvest(&self.ring, &self.rings.pending);
        if taken > 0 {
            self.rings.has_pending.store(true, Ordering::Release);
        }
        if let Err(error) = self.rings.core.reset_dirty_rings() {
            // The ring stays full and the vCPU comes back here: slow, but nothing is lost.
            tracing::warn!(%error, "KVM_RESET_DIRTY_RINGS failed");
        }
    }
}

/// Adds a ring's entry to a bitmap. KVM names a slot, which has the number of its region.
fn marker(bitmap: &RamBitmap) -> impl FnMut(u32, u64) + '_ {
    |slot, page| {
        let index = RegionIndex(u16::try_from(slot & 0xffff).expect("masked"));
        let known = bitmap.iter().find(|(region, _)| *region == index);
        // Anything else is the memory that warmed the vCPUs up, which is gone.
        if let Some((_, region)) = known.filter(|(_, region)| page < region.pages()) {
            region.set(page);
        }
    }
}

pub(crate) struct KvmRing {
    rings: Arc<Rings>,
    memory: Arc<GuestMemory>,
    _logging: Logging,
}

impl KvmRing {
    pub(crate) fn start(
        rings: &Arc<Rings>,
        memory: &Arc<GuestMemory>,
    ) -> Result<KvmRing, TrackError> {
        let logging = Logging::start(&rings.core)?;
        Ok(KvmRing { rings: Arc::clone(rings), memory: Arc::clone(memory), _logging: logging })
    }
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
            rings.core.reset_dirty_rings().map_err(|source| TrackError {
                operation: "KVM_RESET_DIRTY_RINGS".into(),
                source,
            })?;
        }
        self.memory.take_written(into);
        Ok(())
    }

    /// Nothing: the reset after the harvest did it, and the caller reads pages only after a sync.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}
