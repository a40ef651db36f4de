//! The memory slots of a VM that are its guest's memory.
#![allow(unsafe_code)]
// UNSAFETY: tells KVM where guest memory lies.

use crate::raw;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use martlet_ram::{GuestRam, RegionIndex, TrackError};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A VM's memory slots, one for each region of its guest's memory.
#[derive(Debug)]
pub struct KvmSlots {
    // Before the memory: the slots must not outlive it.
    vm: OwnedFd,
    ram: Arc<GuestRam>,
    /// The slot of each region.
    slots: Box<[u32]>,
}

impl KvmSlots {
    /// Gives the VM its memory: `slots[i]` is region `i`. Slots that the VMM has made already, of
    /// the same memory, stay as they are.
    ///
    /// # Errors
    /// What the kernel refuses: a slot that is other memory, or memory in two slots.
    ///
    /// # Safety
    /// `vm` is the descriptor of a KVM VM. Nobody runs a vCPU of it after `ram` is gone: whoever
    /// runs one keeps `ram`, or this value.
    ///
    /// # Panics
    /// If there is not one slot for each region.
    pub unsafe fn new(
        vm: &impl AsRawFd,
        ram: Arc<GuestRam>,
        slots: &[u32],
    ) -> io::Result<KvmSlots> {
        assert_eq!(slots.len(), ram.regions().len(), "a slot for each region");
        // SAFETY: open, by the caller's promise.
        let vm = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }.try_clone_to_owned()?;
        let slots = KvmSlots { vm, ram, slots: slots.into() };
        slots.set_flags(0)?;
        Ok(slots)
    }

    /// The memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    fn set_flags(&self, flags: u32) -> io::Result<()> {
        self.slots.iter().zip(self.ram.regions()).try_for_each(|(slot, region)| {
            // SAFETY: the promise that was made to `new`.
            unsafe { raw::set_slot(&self.vm, *slot, flags, region) }
        })
    }

    /// Lets KVM clear the log only where it is told to, whatever it was told before.
    pub(crate) fn protect_manually(&self) -> io::Result<()> {
        raw::enable_manual_protect(&self.vm)
    }

    /// Reads the dirty log of a region, a bit for each of its pages.
    pub(crate) fn get_dirty_log(&self, index: RegionIndex, words: &mut [u64]) -> io::Result<()> {
        let place = usize::from(index.0);
        let pages = self.ram.regions()[place].pages();
        // SAFETY: the slot was made of this region.
        unsafe { raw::get_dirty_log(&self.vm, self.slots[place], pages, words) }
    }

    pub(crate) fn clear_dirty_log(
        &self,
        index: RegionIndex,
        first_page: u64,
        pages: u32,
        words: &[u64],
    ) -> io::Result<()> {
        let slot = self.slots[usize::from(index.0)];
        raw::clear_dirty_log(&self.vm, slot, first_page, pages, words)
    }

    pub(crate) fn reset_dirty_rings(&self) -> io::Result<()> {
        raw::reset_dirty_rings(&self.vm)
    }

    /// The region that is this slot; `None` for memory of another kind.
    pub(crate) fn region_of(&self, slot: u32) -> Option<RegionIndex> {
        let place = self.slots.iter().position(|known| *known == slot)?;
        Some(RegionIndex(u16::try_from(place).ok()?))
    }
}

/// Logging is on for all slots; the drop switches it off.
pub(crate) struct Logging(Arc<KvmSlots>);

impl Logging {
    pub(crate) fn start(slots: &Arc<KvmSlots>) -> Result<Logging, TrackError> {
        // Made first, so that slots that were switched on are switched off at an error.
        let logging = Logging(Arc::clone(slots));
        logging.0.set_flags(KVM_MEM_LOG_DIRTY_PAGES).map_err(|source| {
            TrackError::host("KVM_SET_USER_MEMORY_REGION with dirty logging", source)
        })?;
        Ok(logging)
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        if let Err(error) = self.0.set_flags(0) {
            // The guest is correct with logging on, just slower.
            tracing::warn!(%error, "dirty logging could not be switched off");
        }
    }
}
