//! A map on its way into the device.

use crate::memory::keys::{DirectKey, unpin_last};
use crate::memory::pins::{Ledger, Pins};
use crate::memory::split::Piece;
use crate::memory::translation::Mtts;
use martlet_device_io::Dma;
use martlet_units::PAGE_SHIFT;
use martlet_vdpa::VdpaError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What errors say was being done.
pub(crate) const ACTION: &str = "map memory";

/// The error for a map that can't be: the VMM's fault.
pub(crate) fn invalid(reason: String) -> VdpaError {
    VdpaError::Invalid { action: ACTION, reason }
}

/// What a piece has so far.
#[derive(Debug)]
pub(crate) enum Slot {
    /// No key yet.
    Open(Piece),
    /// Its memory is pinned, or its key is being created.
    Taken,
    /// A key: of its own, or shared with another map.
    Ready(Arc<DirectKey>),
}

impl Slot {
    fn key(&self) -> Option<&DirectKey> {
        match self {
            Slot::Ready(key) => Some(key),
            Slot::Open(_) | Slot::Taken => None,
        }
    }

    fn into_key(self) -> Option<Arc<DirectKey>> {
        match self {
            Slot::Ready(key) => Some(key),
            Slot::Open(_) | Slot::Taken => None,
        }
    }
}

/// A piece whose memory is pinned, ready for its command.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) slot: usize,
    pub(crate) piece: Piece,
    pub(crate) pins: Pins,
    pub(crate) mtts: Mtts,
}

/// A command without an answer.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) staged_bytes: usize,
    pub(crate) what: Creates,
}

/// What a command creates.
#[derive(Debug)]
pub(crate) enum Creates {
    Direct { slot: usize, piece: Piece, pins: Pins },
    Indirect,
}

/// Whether keys are made, or room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Keys are made. If the device has no room for them, old ones go first.
    Enough,
    /// Old keys go, until none is left.
    Making,
}

/// A map on its way into the device: all direct keys that don't exist yet, then the indirect one.
#[derive(Debug)]
pub(crate) struct Build {
    slots: Vec<Slot>,
    /// No slot before this one is open.
    next: usize,
    /// The one whose turn is next.
    prepared: Option<Prepared>,
    pub(crate) flying: BTreeMap<u64, Flight>,
    pub(crate) room: Room,
    /// Why it will not be: then what flies is waited for, and what was made is destroyed.
    pub(crate) failure: Option<VdpaError>,
}

impl Build {
    pub(crate) fn new(slots: Vec<Slot>) -> Build {
        Build {
            slots,
            next: 0,
            prepared: None,
            flying: BTreeMap::new(),
            room: Room::Enough,
            failure: None,
        }
    }

    /// Pins the memory of the next open piece, unless one is prepared already.
    pub(crate) fn prepare(&mut self, dma: &dyn Dma, ledger: &Arc<Ledger>) -> Option<&Prepared> {
        if self.prepared.is_none() && self.failure.is_none() {
            let (slot, piece) = self.take_open()?;
            match pin(&piece, dma, ledger) {
                Ok((mtts, pins)) => self.prepared = Some(Prepared { slot, piece, pins, mtts }),
                Err(error) => self.fail(error),
            }
        }
        self.prepared.as_ref()
    }

    fn take_open(&mut self) -> Option<(usize, Piece)> {
        while let Some(slot) = self.slots.get_mut(self.next) {
            if let Slot::Open(_) = slot
                && let Slot::Open(piece) = std::mem::replace(slot, Slot::Taken)
            {
                return Some((self.next, piece));
            }
            self.next += 1;
        }
        None
    }

    pub(crate) fn take_prepared(&mut self) -> Option<Prepared> {
        self.prepared.take()
    }

    /// The device had no room for a piece: it is open again.
    pub(crate) fn reopen(&mut self, slot: usize, piece: Piece, pins: Pins) {
        pins.unpin();
        self.put(slot, Slot::Open(piece));
        self.next = self.next.min(slot);
    }

    /// A piece has its key.
    pub(crate) fn made(&mut self, slot: usize, key: DirectKey) {
        self.put(slot, Slot::Ready(Arc::new(key)));
    }

    fn put(&mut self, slot: usize, value: Slot) {
        let place = self.slots.get_mut(slot).expect("a slot of this build");
        assert!(matches!(place, Slot::Taken), "a piece is made once");
        *place = value;
    }

    /// Ends it, for the first reason that came up.
    pub(crate) fn fail(&mut self, error: VdpaError) {
        self.failure.get_or_insert(error);
        // The device has not heard of it yet.
        if let Some(prepared) = self.prepared.take() {
            prepared.pins.unpin();
        }
    }

    /// Input bytes of all commands without an answer.
    pub(crate) fn staged_bytes(&self) -> usize {
        self.flying.values().map(|flight| flight.staged_bytes).sum()
    }

    /// All direct keys, if each piece has one: then the indirect key can be made.
    pub(crate) fn all_ready(&self) -> Option<Vec<&DirectKey>> {
        self.slots.iter().map(Slot::key).collect()
    }

    /// Takes the keys that there are.
    pub(crate) fn take_keys(&mut self) -> Vec<Arc<DirectKey>> {
        std::mem::take(&mut self.slots).into_iter().filter_map(Slot::into_key).collect()
    }

    /// Forgets all keys and unpins their memory. Only when the device surely reaches no memory any
    /// more.
    pub(crate) fn forget_all(mut self) {
        unpin_last(self.take_keys());
        let flying = self.flying.into_values().filter_map(|flight| match flight.what {
            Creates::Direct { pins, .. } => Some(pins),
            Creates::Indirect => None,
        });
        flying.chain(self.prepared.map(|prepared| prepared.pins)).for_each(Pins::unpin);
    }
}

/// Pins a piece, and checks what the bus says of it: the device would believe it.
fn pin(piece: &Piece, dma: &dyn Dma, ledger: &Arc<Ledger>) -> Result<(Mtts, Pins), VdpaError> {
    let host = |reason: String| VdpaError::Host { action: ACTION, reason };
    let mut guards = Vec::with_capacity(piece.memory.len());
    let mut runs = Vec::new();
    for memory in &piece.memory {
        // On an error the guards drop and unpin: no device has heard of them.
        let pinned = dma.pin(memory).map_err(|error| host(error.to_string()))?;
        runs.extend(pinned.runs);
        guards.push(pinned.guard);
    }
    let fits = |mtts: &Mtts| mtts.bytes() == piece.bytes && mtts.granule_shift() >= PAGE_SHIFT;
    let mtts = Mtts::new(runs).filter(fits).ok_or_else(|| {
        let (iova, bytes) = (piece.iova, piece.bytes);
        host(format!("the bus did not give {bytes:#x} bytes at {iova:#x} in whole pages"))
    })?;
    Ok((mtts, Pins::new(guards, piece.bytes, ledger)))
}
