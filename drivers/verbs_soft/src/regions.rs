//! Registered memory and its keys.

use martlet_device_io::HostMemory;
use martlet_verbs::Region;
use martlet_verbs::VerbsError;
use martlet_verbs::{Access, Lkey, RemoteAddress, Rkey};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// Regions of one fabric: a key has 16 bits of index and 16 of tag.
pub(super) const REGIONS_MAX: usize = 1 << 16;

/// All regions of a fabric.
///
/// Who copies to or from a region holds the read lock meanwhile, and has looked the key up since
/// the generation last changed. So when a deregistration has had the write lock, nobody is at it
/// any more.
pub(super) struct Regions {
    table: RwLock<Table>,
}

pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Counts deregistrations: what was looked up in an older generation may be gone.
    generation: u64,
}

struct Slot {
    /// Changes with each region of this slot, so that an old key does not fit the next one.
    tag: u16,
    region: Option<(Access, HostMemory)>,
}

impl Regions {
    pub(super) fn new() -> Arc<Regions> {
        let table = Table { slots: Vec::new(), free: Vec::new(), generation: 0 };
        Arc::new(Regions { table: RwLock::new(table) })
    }

    /// The table, with all regions held in place.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn register(
        self: &Arc<Regions>,
        memory: &HostMemory,
        access: Access,
    ) -> Result<SoftRegion, VerbsError> {
        let fail = |hint| VerbsError::Register {
            bytes: memory.bytes(),
            address: memory.address(),
            hint,
            source: std::io::ErrorKind::InvalidInput.into(),
        };
        if memory.bytes() == 0 {
            return Err(fail(": a region has bytes"));
        }
        if access.contains(Access::REMOTE_WRITE) && !access.contains(Access::LOCAL_WRITE) {
            return Err(fail(": REMOTE_WRITE needs LOCAL_WRITE"));
        }
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let index =
            match table.free.pop() {
                Some(index) => index,
                None => {
                    let limit = REGIONS_MAX as u64;
                    let asked = table.slots.len() as u64 + 1;
                    let index = u16::try_from(table.slots.len()).map_err(|_| {
                        VerbsError::Limit { what: "the regions' count", asked, limit }
                    })?;
                    table.slots.push(Slot { tag: random_tag(), region: None });
                    index
                }
            };
        let slot = &mut table.slots[usize::from(index)];
        slot.tag = slot.tag.wrapping_add(1);
        slot.region = Some((access, memory.clone()));
        let key = u32::from(slot.tag) << 16 | u32::from(index);
        drop(table);
        let (address, bytes) = (RemoteAddress(memory.address()), memory.bytes());
        Ok(SoftRegion { regions: Arc::clone(self), key, address, bytes })
    }

    fn deregister(&self, key: u32) {
        let index = key_index(key);
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let memory = table.slots[usize::from(index)].region.take();
        table.generation += 1;
        table.free.push(index);
        drop(table);
        // The owner may unmap now; not under the lock.
        drop(memory);
    }
}

impl Table {
    /// See [`Table::resolve`]: valid as long as this stays the same.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// The address of `bytes` bytes, if `key` covers them and allows `need`. They are mapped at
    /// least until the read lock is given back.
    pub(super) fn resolve(
        &self,
        key: u32,
        address: u64,
        bytes: u32,
        need: Access,
    ) -> Option<*mut u8> {
        let slot = self.slots.get(usize::from(key_index(key)))?;
        let (access, memory) = slot.region.as_ref()?;
        let offset = address.checked_sub(memory.address())?;
        let inside = offset.checked_add(u64::from(bytes))? <= memory.bytes();
        if u32::from(slot.tag) != key >> 16 || !access.contains(need) || !inside {
            return None;
        }
        let address = usize::try_from(address).ok()?;
        Some(std::ptr::with_exposed_provenance_mut(address))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the index is the low half")]
const fn key_index(key: u32) -> u16 {
    key as u16
}

/// Where a slot's tags begin: so that nobody finds a key by counting.
fn random_tag() -> u16 {
    let mut bytes = [0; 2];
    // Without randomness the keys are easier to guess and work all the same.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    u16::from_le_bytes(bytes)
}

/// Memory registered with the soft provider.
pub struct SoftRegion {
    regions: Arc<Regions>,
    key: u32,
    address: RemoteAddress,
    bytes: u64,
}

impl Region for SoftRegion {
    fn local_key(&self) -> Lkey {
        Lkey(self.key)
    }

    fn remote_key(&self) -> Rkey {
        Rkey(self.key)
    }

    fn address(&self) -> RemoteAddress {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn deregister(self) -> Result<(), VerbsError> {
        drop(self);
        Ok(())
    }
}

impl Drop for SoftRegion {
    fn drop(&mut self) {
        self.regions.deregister(self.key);
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]
    // UNSAFETY: names memory that is never touched here.
    use super::*;

    fn memory(bytes: u64) -> HostMemory {
        // SAFETY: nothing in these tests reads or writes it.
        unsafe { HostMemory::new(0x10_0000, bytes, Arc::new(())) }
    }

    #[test]
    fn a_key_covers_its_bytes_and_no_others() {
        let regions = Regions::new();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = regions.register(&memory(4096), access).unwrap();
        let Rkey(key) = region.remote_key();
        let ok = |address, bytes, need| regions.read().resolve(key, address, bytes, need).is_some();
        assert!(ok(0x10_0000, 4096, Access::REMOTE_WRITE));
        assert!(ok(0x10_0fff, 1, Access::REMOTE_WRITE));
        assert!(!ok(0x10_0fff, 2, Access::REMOTE_WRITE));
        assert!(!ok(0x0f_ffff, 2, Access::REMOTE_WRITE));
        assert!(!ok(u64::MAX, u32::MAX, Access::REMOTE_WRITE));
        assert!(!ok(0x10_0000, 1, Access::REMOTE_READ));
        assert!(regions.read().resolve(key ^ 1, 0x10_0000, 1, access).is_none());
    }

    #[test]
    fn an_old_key_does_not_fit_the_next_region() {
        let regions = Regions::new();
        let first = regions.register(&memory(4096), Access::LOCAL_WRITE).unwrap();
        let Rkey(old) = first.remote_key();
        let before = regions.read().generation();
        first.deregister().unwrap();
        let second = regions.register(&memory(4096), Access::LOCAL_WRITE).unwrap();
        assert_eq!(old & 0xffff, second.remote_key().0 & 0xffff, "the slot is used again");
        let table = regions.read();
        assert!(table.resolve(old, 0x10_0000, 1, Access::empty()).is_none());
        assert!(table.resolve(second.key, 0x10_0000, 1, Access::empty()).is_some());
        assert_ne!(table.generation(), before);
    }

    #[test]
    fn remote_writes_need_local_writes() {
        let regions = Regions::new();
        assert!(regions.register(&memory(1), Access::REMOTE_WRITE).is_err());
        assert!(regions.register(&memory(0), Access::empty()).is_err());
    }
}
