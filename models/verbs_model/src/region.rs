//! Registered memory and its keys.

use std::collections::BTreeMap;

/// A key of registered memory, local or remote: this model makes them one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u32);

/// What a region may be used for, beside being the source of this side's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The target of this side's reads.
    pub local_write: bool,
    /// The target of the peer's writes.
    pub remote_write: bool,
    /// The source of the peer's reads.
    pub remote_read: bool,
}

impl Access {
    /// Nothing more.
    pub const SOURCE: Access =
        Access { local_write: false, remote_write: false, remote_read: false };
    /// The peer writes it.
    pub const TARGET: Access = Access { local_write: true, remote_write: true, remote_read: false };
}

/// What a key is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    LocalRead,
    LocalWrite,
    RemoteWrite,
    RemoteRead,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    address: u64,
    bytes: u64,
    access: Access,
}

/// The registered regions of one NIC.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    list: BTreeMap<Key, Region>,
    last: u32,
}

impl Regions {
    pub(crate) fn register(&mut self, address: u64, bytes: u64, access: Access) -> Key {
        // As NICs do: an index, and a byte that changes with each use of it.
        self.last = self.last.wrapping_add(0x101);
        let key = Key(self.last);
        assert!(bytes > 0 && address.checked_add(bytes).is_some(), "registering what can't be");
        self.list.insert(key, Region { address, bytes, access });
        key
    }

    pub(crate) fn deregister(&mut self, key: Key) -> bool {
        self.list.remove(&key).is_some()
    }

    /// Whether a key covers these bytes for this use.
    pub(crate) fn covers(&self, key: Key, address: u64, bytes: u64, purpose: Use) -> bool {
        let Some(region) = self.list.get(&key) else { return false };
        let Some(offset) = address.checked_sub(region.address) else { return false };
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= region.bytes);
        inside
            && match purpose {
                Use::LocalRead => true,
                Use::LocalWrite => region.access.local_write,
                Use::RemoteWrite => region.access.remote_write,
                Use::RemoteRead => region.access.remote_read,
            }
    }

    pub(crate) fn remote_writable(&self) -> usize {
        self.list.values().filter(|region| region.access.remote_write).count()
    }
}
