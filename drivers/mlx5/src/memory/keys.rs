//! Keys that exist in the device.

use crate::memory::pins::Pins;
use crate::memory::split::Piece;
use martlet_mlx5_abi::memory::mkey_from_index;
use std::fmt;
use std::sync::Arc;

/// A direct key: one piece of the map. Indirect keys share it.
#[derive(Debug)]
pub(crate) struct DirectKey {
    /// Its number for DESTROY_MKEY.
    pub(crate) index: u32,
    pub(crate) piece: Piece,
    pub(crate) pins: Pins,
}

/// Unpins the memory of those keys that nobody else has. Only when the device surely reaches no
/// memory any more.
pub(crate) fn unpin_last(keys: Vec<Arc<DirectKey>>) {
    for key in keys.into_iter().filter_map(Arc::into_inner) {
        key.pins.unpin();
    }
}

/// Holds a map: its keys exist in the device until the last of these is dropped, and some time
/// after. The address space holds its current one; whoever programs a queue with the key holds one
/// of its own **for as long as the device may use the key for that queue**: until a command that
/// gave the queue another key, or destroyed it, has succeeded, or the function was stopped.
#[derive(Clone)]
pub(crate) struct MapRef(Arc<MapName>);

#[derive(Debug)]
struct MapName {
    key: u32,
}

impl MapRef {
    /// The key to program queues with.
    pub(crate) fn key(&self) -> u32 {
        self.0.key
    }

    /// Whether this is the last one.
    pub(crate) fn is_last(&mut self) -> bool {
        // Acquires what those who dropped theirs did before; `Arc::strong_count` would not.
        Arc::get_mut(&mut self.0).is_some()
    }
}

impl PartialEq for MapRef {
    /// Whether it is the same map, not only the same key: the device gives keys out again.
    fn eq(&self, other: &MapRef) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for MapRef {}

impl fmt::Debug for MapRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MapRef(key {:#x})", self.0.key)
    }
}

/// A map in the device: an indirect key and the direct keys behind it, in the order of their
/// addresses.
#[derive(Debug)]
pub(crate) struct KeyMap {
    /// Their keeper's own hold.
    pub(crate) name: MapRef,
    /// The indirect key's number; `None` for one that was not made.
    pub(crate) index: Option<u32>,
    pub(crate) direct: Vec<Arc<DirectKey>>,
}

impl KeyMap {
    /// A map that nobody else holds.
    pub(crate) fn new(index: Option<u32>, direct: Vec<Arc<DirectKey>>) -> KeyMap {
        let key = mkey_from_index(index.unwrap_or(0), 0);
        let name = MapRef(Arc::new(MapName { key }));
        KeyMap { name, index, direct }
    }

    /// How many keys go with it.
    pub(crate) fn own_keys(&self) -> usize {
        let own = self.direct.iter().filter(|key| Arc::strong_count(key) == 1);
        usize::from(self.index.is_some()) + own.count()
    }

    /// The direct key of exactly this piece.
    pub(crate) fn find(&self, piece: &Piece) -> Option<&Arc<DirectKey>> {
        let place = self.direct.binary_search_by_key(&piece.iova, |key| key.piece.iova).ok()?;
        self.direct.get(place).filter(|key| key.piece.same(piece))
    }

    /// Whether it is a map of exactly these pieces.
    pub(crate) fn is_of(&self, pieces: &[Piece]) -> bool {
        self.index.is_some()
            && self.direct.len() == pieces.len()
            && self.direct.iter().zip(pieces).all(|(key, piece)| key.piece.same(piece))
    }
}
