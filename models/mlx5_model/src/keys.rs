//! Memory keys: what of the bus a queue may reach, under which addresses.
//!
//! A key is direct (a list of pages, "MTT"), indirect (a list of pieces
//! of other keys, "KLM") or null (writes are thrown away, reads give zeros; `ibv_alloc_null_mr(3)`).
//! An access goes through one indirect key at most, then through one of the others.

use crate::num::{self, to_usize};
use crate::pages::Pages;
use martlet_device_io::BusAddress;
use std::collections::VecDeque;
use std::sync::Arc;

/// Keys that a device can have; an index has 24 bits.
pub(crate) const KEYS_MAX: u32 = 1 << 20;

/// Index 0 is never given away, so that a forgotten key is an error.
const FIRST_INDEX: u32 = 1;

/// The null key's index; it exists from the start.
const NULL_INDEX: u32 = 1;

/// The null key, as QUERY_SPECIAL_CONTEXTS tells it.
pub(crate) const NULL_KEY: u32 = NULL_INDEX << 8;

/// A freed index is not used again before this many others were freed: a stale key is found out.
const FREED_MIN: usize = 1024;

/// Why an access through a key failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessError {
    /// No such key, or not any more.
    Gone { key: u32 },
    /// The key does not cover the address.
    Outside { key: u32, at: u64 },
    /// The key does not allow it, or belongs to another protection domain.
    Forbidden { key: u32, at: u64 },
    /// An indirect key stands behind an indirect key.
    Depth { key: u32 },
    /// The bus refused it.
    Bus { at: u64 },
}

/// What stands behind a key.
#[derive(Debug)]
pub(crate) enum Target {
    /// A list of pages.
    Direct(Pages),
    /// Pieces of other keys.
    Indirect(Pieces),
    /// Nothing.
    Null,
}

/// A memory key.
#[derive(Debug)]
pub(crate) struct Key {
    /// The low byte of the key, which the driver chose.
    pub(crate) variant: u8,
    pub(crate) domain: u32,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) target: Target,
}

/// Pieces of an indirect key, in the order of their addresses.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    /// One past its last byte, from the key's begin.
    end: u64,
    key: u32,
    at: u64,
}

impl Pieces {
    /// Appends one; false if the whole becomes too long for 64 bits.
    pub(crate) fn push(&mut self, bytes: u64, key: u32, at: u64) -> bool {
        let Some(end) = self.bytes().checked_add(bytes) else { return false };
        if bytes > 0 {
            self.pieces.push(Piece { end, key, at });
        }
        true
    }

    /// Their length.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.end)
    }

    /// The piece at `offset`, and where it begins.
    fn find(&self, offset: u64) -> Option<(u64, Piece)> {
        let at = self.pieces.partition_point(|piece| piece.end <= offset);
        let begin = match at.checked_sub(1) {
            Some(before) => self.pieces.get(before)?.end,
            None => 0,
        };
        self.pieces.get(at).map(|piece| (begin, *piece))
    }
}

/// Bytes around an address that lie next to each other on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flat {
    /// How many before the address.
    pub(crate) before: u64,
    /// How many from the address on; at least 1.
    pub(crate) after: u64,
    /// Where the address is on the bus; `None` behind the null key.
    pub(crate) bus: Option<BusAddress>,
}

impl Flat {
    fn within(self, before: u64, after: u64) -> Flat {
        Flat { before: self.before.min(before), after: self.after.min(after), bus: self.bus }
    }
}

impl Key {
    fn allows(&self, key: u32, at: u64, domain: u32, write: bool) -> Result<(), AccessError> {
        let right = if write { self.write } else { self.read };
        let null = matches!(self.target, Target::Null);
        let ours = null || self.domain == domain;
        if right && ours { Ok(()) } else { Err(AccessError::Forbidden { key, at }) }
    }

    /// Offset from the key's begin, and how much of it is left.
    fn offset(&self, key: u32, at: u64) -> Result<(u64, u64), AccessError> {
        let outside = AccessError::Outside { key, at };
        let offset = at.checked_sub(self.start).ok_or(outside)?;
        let left = self.bytes.checked_sub(offset).filter(|left| *left > 0).ok_or(outside)?;
        Ok((offset, left))
    }

    /// What lies at `offset`, unless the key is indirect.
    fn flat(&self, key: u32, offset: u64) -> Result<Flat, AccessError> {
        match &self.target {
            Target::Null => Ok(Flat { before: offset, after: u64::MAX - offset, bus: None }),
            Target::Direct(pages) => {
                // The list begins with the page in which the key begins.
                let found = pages.find(offset.saturating_add(pages.inside(self.start)));
                let (before, after, bus) = found.ok_or(AccessError::Outside { key, at: offset })?;
                Ok(Flat { before, after, bus: Some(bus) })
            }
            Target::Indirect(_) => Err(AccessError::Depth { key }),
        }
    }
}

/// All keys of a device.
#[derive(Debug)]
pub(crate) struct Keys {
    slots: Vec<Option<Arc<Key>>>,
    freed: VecDeque<u32>,
    live: u32,
    limit: u32,
    revision: u64,
}

impl Keys {
    /// No keys but the null key; `limit` at a time.
    pub(crate) fn new(limit: u32) -> Keys {
        let null = Key {
            variant: 0,
            domain: 0,
            start: 0,
            bytes: u64::MAX,
            read: true,
            write: true,
            target: Target::Null,
        };
        let mut keys = Keys {
            slots: vec![None; to_usize(FIRST_INDEX)],
            freed: VecDeque::new(),
            live: 0,
            limit: limit.min(KEYS_MAX),
            revision: 0,
        };
        keys.slots.push(Some(Arc::new(null)));
        keys
    }

    /// Changes whenever an access that was allowed may not be any more.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// How many there are, the null key not counted.
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// Adds a key; its index, or `None` if there are too many.
    pub(crate) fn create(&mut self, key: Key) -> Option<u32> {
        if self.live >= self.limit {
            return None;
        }
        let fresh = u32::try_from(self.slots.len()).ok()?;
        let reuse = self.freed.len() >= FREED_MIN || fresh >= KEYS_MAX;
        let index = if reuse { self.freed.pop_front()? } else { fresh };
        if index == fresh {
            self.slots.push(None);
        }
        *self.slots.get_mut(to_usize(index))? = Some(Arc::new(key));
        self.live += 1;
        Some(index)
    }

    /// Removes a key, which is returned so that its memory is freed after the lock; `None` if there
    /// is none.
    pub(crate) fn destroy(&mut self, index: u32) -> Option<Arc<Key>> {
        if index <= NULL_INDEX {
            return None;
        }
        let key = self.slots.get_mut(to_usize(index))?.take()?;
        self.freed.push_back(index);
        self.live -= 1;
        self.revision += 1;
        Some(key)
    }

    /// Removes all but the null key, which are returned so that their memory is freed after the
    /// lock.
    pub(crate) fn clear(&mut self) -> Vec<Arc<Key>> {
        let first = NULL_INDEX + 1;
        let end = u32::try_from(self.slots.len()).unwrap_or(first);
        (first..end).filter_map(|index| self.destroy(index)).collect()
    }

    /// A key by its index.
    pub(crate) fn by_index(&self, index: u32) -> Option<&Arc<Key>> {
        self.slots.get(to_usize(index))?.as_ref()
    }

    /// Whether there is such a key.
    pub(crate) fn exists(&self, key: u32) -> bool {
        self.get(key).is_ok()
    }

    fn get(&self, key: u32) -> Result<&Key, AccessError> {
        let found = self.slots.get(to_usize(key >> 8)).and_then(Option::as_ref);
        found
            .filter(|it| it.variant == num::low8(key))
            .map(|it| &**it)
            .ok_or(AccessError::Gone { key })
    }

    /// What lies behind `at` of a key.
    pub(crate) fn find(
        &self,
        key: u32,
        domain: u32,
        at: u64,
        write: bool,
    ) -> Result<Flat, AccessError> {
        let outer = self.get(key)?;
        outer.allows(key, at, domain, write)?;
        let (offset, left) = outer.offset(key, at)?;
        let Target::Indirect(pieces) = &outer.target else {
            return Ok(outer.flat(key, offset)?.within(offset, left));
        };
        let (begin, piece) = pieces.find(offset).ok_or(AccessError::Outside { key, at })?;
        let inside = offset - begin;
        let inner = self.get(piece.key)?;
        inner.allows(piece.key, at, domain, write)?;
        let target = piece.at.checked_add(inside);
        let target = target.ok_or(AccessError::Outside { key: piece.key, at })?;
        let (inner_offset, inner_left) = inner.offset(piece.key, target)?;
        let flat = inner.flat(piece.key, inner_offset)?;
        Ok(flat.within(inner_offset.min(inside), inner_left.min(piece.end - offset).min(left)))
    }
}

/// Translations that were used last. Valid for one revision of the keys.
#[derive(Debug)]
pub(crate) struct Cache {
    entries: [Entry; Cache::ENTRIES],
    next: usize,
    revision: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    begin: u64,
    end: u64,
    bus: Option<BusAddress>,
    read: bool,
    write: bool,
}

impl Cache {
    const ENTRIES: usize = 8;

    pub(crate) fn new() -> Cache {
        Cache { entries: [Entry::default(); Cache::ENTRIES], next: 0, revision: 0 }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.entries = [Entry::default(); Cache::ENTRIES];
    }

    /// Bytes from `at` on that lie next to each other, and where: from the cache, or through the
    /// key.
    pub(crate) fn find(
        &mut self,
        keys: &Keys,
        (key, domain): (u32, u32),
        at: u64,
        write: bool,
    ) -> Result<(u64, Option<BusAddress>), AccessError> {
        if self.revision != keys.revision() {
            self.clear();
            self.revision = keys.revision();
        }
        let hit = self.entries.iter().find(|entry| {
            at >= entry.begin && at < entry.end && (if write { entry.write } else { entry.read })
        });
        if let Some(entry) = hit {
            let inside = at - entry.begin;
            return Ok((
                entry.end - at,
                entry.bus.map(|bus| BusAddress(bus.0.wrapping_add(inside))),
            ));
        }
        let flat = keys.find(key, domain, at, write)?;
        let begin = at - flat.before.min(at);
        let bus = flat.bus.map(|bus| BusAddress(bus.0.wrapping_sub(at - begin)));
        let end = at.saturating_add(flat.after);
        if let Some(entry) = self.entries.get_mut(self.next) {
            *entry = Entry { begin, end, bus, read: !write, write };
        }
        self.next = (self.next + 1) % Cache::ENTRIES;
        Ok((end - at, flat.bus))
    }
}
