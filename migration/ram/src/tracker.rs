//! One tracker at a time for a guest's memory, of as many sources as there are writers.

use crate::{DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody tracks the pages of a guest.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    is_taken: AtomicBool,
}

/// Gives the lease back.
struct Held(Arc<Lease>);

impl Drop for Held {
    fn drop(&mut self) {
        // Release: pairs with the acquire of who takes it next.
        self.0.is_taken.store(false, Ordering::Release);
    }
}

/// All who write a guest's memory, tracked together: KVM's log or ring for the vCPUs, and a source
/// for each device or thread that writes by itself. The only tracker of this memory until its drop,
/// which ends the tracking: two would take each other's pages.
pub struct Tracker {
    // Before the lease: the next tracker finds them ended.
    sources: Vec<Box<dyn DirtySource>>,
    _lease: Held,
}

impl Tracker {
    /// Takes the lease on the memory, then the sources are added.
    ///
    /// # Errors
    /// [`TrackError::AlreadyTracked`] while there is another tracker of this memory.
    pub fn lease(ram: &GuestRam) -> Result<Tracker, TrackError> {
        let lease = ram.tracking_lease();
        // Acquire: what the last holder ended, has ended.
        if lease.is_taken.swap(true, Ordering::Acquire) {
            return Err(TrackError::AlreadyTracked);
        }
        Ok(Tracker { sources: Vec::new(), _lease: Held(Arc::clone(lease)) })
    }

    /// Adds a source, whose tracking has begun.
    #[must_use]
    pub fn with(mut self, source: Box<dyn DirtySource>) -> Tracker {
        self.sources.push(source);
        self
    }
}

impl DirtySource for Tracker {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        self.sources.iter_mut().try_for_each(|source| source.sync(into))
    }

    fn rearm(
        &mut self,
        region: RegionIndex,
        first_page: u64,
        words: &[u64],
    ) -> Result<(), TrackError> {
        self.sources.iter_mut().try_for_each(|source| source.rearm(region, first_page, words))
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tracker of {} sources", self.sources.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DirtyMarker;
    use crate::tests::one_region;
    use martlet_units::{Gpa, PAGE_SIZE};

    #[test]
    fn there_is_one_tracker_at_a_time() {
        let ram = one_region(10);
        let first = Tracker::lease(&ram).unwrap();
        assert!(matches!(Tracker::lease(&ram), Err(TrackError::AlreadyTracked)));
        assert!(Tracker::lease(&one_region(10)).is_ok(), "another guest's memory");
        drop(first);
        assert!(Tracker::lease(&ram).is_ok());
    }

    #[test]
    fn all_sources_are_heard() {
        let ram = Arc::new(one_region(10));
        let markers = [0, 1].map(|_| DirtyMarker::new(Arc::clone(&ram)));
        let mut tracker = Tracker::lease(&ram)
            .unwrap()
            .with(Box::new(markers[0].source()))
            .with(Box::new(markers[1].source()));
        markers[0].mark(Gpa(0), 1);
        markers[1].mark(Gpa(9 * PAGE_SIZE), 1);
        let dirty = RamBitmap::new(&ram);
        tracker.sync(&dirty).unwrap();
        assert_eq!(dirty.region(RegionIndex(0)).runs().collect::<Vec<_>>(), [0..1, 9..10]);
    }
}
