//! All keys of a device.

use crate::batch::Batch;
use crate::firmware::Firmware;
use crate::memory::build::{Built, invalid};
use crate::memory::keys::{DirectKey, KeyMap, MapRef, unpin_last};
use crate::memory::pins::{Ledger, Pins};
use crate::memory::split::{Piece, split};
use crate::memory::translation::klm_count;
use crate::memory::{Deletion, KeyCommand, KeyContext, MemoryConfig, MemoryCounters, Update};
use martlet_units::Instant;
use martlet_vdpa::{MapRun, VdpaError};
use std::collections::VecDeque;
use std::sync::Arc;

/// The memory keys of one device: the maps it has, and those that go.
///
/// A map is in the device until the last [`MapRef`] of it is dropped, and some time after. Then its
/// indirect key is destroyed, and after that those direct keys that no other map shares. A direct
/// key's memory is unpinned when the device has said that the key is gone. One that it refuses to
/// destroy, or of which nobody knows whether it exists, keeps its memory until
/// [`Maps::forget_all`].
pub(crate) struct Maps {
    pub(super) config: MemoryConfig,
    pub(super) context: KeyContext,
    pub(super) ledger: Arc<Ledger>,
    held: Vec<KeyMap>,
    /// Maps that nobody holds, and from when on they are destroyed.
    retired: Vec<(Instant, KeyMap)>,
    dying: Option<Dying>,
    /// Memory of destroyed keys. Unpinning 1 GiB takes its time, and is therefore not done where an
    /// answer comes in.
    released: VecDeque<Pins>,
    /// Memory that keys may reach which nobody can name or destroy.
    pub(super) stuck: Vec<Pins>,
}

/// Keys that are being destroyed.
struct Dying {
    batch: Batch,
    /// By item; `None` for an indirect key.
    keys: Vec<Option<DirectKey>>,
}

impl Maps {
    /// No keys.
    ///
    /// # Panics
    /// If the configuration makes no sense: a window of nothing, pieces that are no power of two.
    pub(crate) fn new(config: MemoryConfig, context: KeyContext) -> Maps {
        config.check();
        Maps {
            config,
            context,
            ledger: Arc::default(),
            held: Vec::new(),
            retired: Vec::new(),
            dying: None,
            released: VecDeque::new(),
            stuck: Vec::new(),
        }
    }

    /// Builds a map and waits for it; `None` for the empty one, which has no key. On an error
    /// nothing of it is used, and what was made goes with the next service.
    ///
    /// Pieces that the device has a key for, in a map that is held or has not been destroyed yet,
    /// are shared. A whole map that is there already is used again, without any command: so
    /// setting the same map twice costs nothing. Memory is known by its address and owner: an
    /// owner that puts other pages behind the same addresses must take them out of the map first.
    pub(crate) fn build(
        &mut self,
        firmware: &Firmware,
        runs: &[MapRun],
    ) -> Result<Option<MapRef>, VdpaError> {
        let pieces = self.split(runs)?;
        if pieces.is_empty() {
            return Ok(None);
        }
        self.collect(firmware.now());
        if let Some(map) = self.find(&pieces) {
            return Ok(Some(map));
        }
        let mut keys: Vec<_> = pieces.iter().map(|piece| self.share(piece)).collect();
        let mut built = self.make(firmware, &pieces, &mut keys);
        if matches!(built, Built::NoRoom(_)) && self.backlog() > 0 {
            self.destroy_unused(firmware);
            built = self.make(firmware, &pieces, &mut keys);
        }
        let direct = keys.into_iter().flatten().collect();
        match built {
            Built::Done { index } => {
                let map = KeyMap::new(Some(index), direct);
                let name = map.name.clone();
                self.held.push(map);
                Ok(Some(name))
            }
            Built::NoRoom(error) | Built::Failed(error) => {
                self.retired.push((firmware.now(), KeyMap::new(None, direct)));
                Err(error)
            }
        }
    }

    fn split(&self, runs: &[MapRun]) -> Result<Vec<Piece>, VdpaError> {
        let pieces = split(runs, self.config.piece_bytes)?;
        let entries = klm_count(pieces.iter().map(|piece| (piece.iova, piece.bytes)));
        let entries_max = self.config.entries_max;
        if entries > entries_max {
            return Err(invalid(format!(
                "the map needs {entries} entries in the indirect key, the device takes {entries_max}"
            )));
        }
        Ok(pieces)
    }

    /// A map of exactly these pieces that is in the device already.
    fn find(&mut self, pieces: &[Piece]) -> Option<MapRef> {
        if self.config.update == Update::Everything {
            return None;
        }
        if let Some(place) = self.retired.iter().position(|(_, map)| map.is_of(pieces)) {
            self.held.push(self.retired.remove(place).1);
        }
        self.held.iter().find(|map| map.is_of(pieces)).map(|map| map.name.clone())
    }

    fn share(&self, piece: &Piece) -> Option<Arc<DirectKey>> {
        let maps = self.held.iter().chain(self.retired.iter().map(|(_, map)| map));
        let mut maps = maps.filter(|_| self.config.update == Update::Changed);
        maps.find_map(|map| map.find(piece)).cloned()
    }

    /// Maps that nobody holds begin to wait for their end.
    fn collect(&mut self, now: Instant) {
        let due = match self.config.deletion {
            Deletion::Deferred { delay } => now.after(delay),
            Deletion::AtOnce => now,
        };
        let unused = self.held.extract_if(.., |map| map.name.is_last());
        self.retired.extend(unused.map(|map| (due, map)));
    }

    /// A slice of destruction and unpinning, without waiting: when to go on, apart from answers,
    /// which come by themselves.
    pub(crate) fn service(&mut self, firmware: &Firmware) -> Option<Instant> {
        let now = firmware.now();
        self.collect(now);
        if let Some(pins) = self.released.pop_front() {
            pins.unpin();
        }
        let due = |(at, _): &(Instant, KeyMap)| *at <= now;
        if self.dying.is_none()
            && let Some(place) = self.retired.iter().position(due)
        {
            let map = self.retired.remove(place).1;
            self.dying = Some(self.begin(firmware, map, self.config.lazy_window));
        }
        if let Some(dying) = &mut self.dying {
            firmware.poll(&mut dying.batch);
        }
        self.settle();
        let next = self.retired.iter().map(|(at, _)| *at).min();
        let wait = self.dying.as_ref().map(|dying| dying.batch.poll_timeout(now));
        match wait {
            _ if !self.released.is_empty() => Some(now),
            Some(wait) => wait.or(firmware.poll_timeout()),
            None => next,
        }
    }

    /// Destroys everything that nobody holds, and waits for it.
    pub(crate) fn destroy_unused(&mut self, firmware: &Firmware) {
        self.collect(firmware.now());
        loop {
            if let Some(dying) = &mut self.dying {
                firmware.run(&mut dying.batch);
            }
            self.settle();
            self.released.drain(..).for_each(Pins::unpin);
            let Some((_, map)) = self.retired.pop() else { return };
            self.dying = Some(self.begin(firmware, map, self.config.destroy_window));
        }
    }

    /// Whether whoever lets a map go has to see its end.
    pub(crate) fn deletes_at_once(&self) -> bool {
        self.config.deletion == Deletion::AtOnce
    }

    fn begin(&self, firmware: &Firmware, map: KeyMap, window: usize) -> Dying {
        let mut batch = Batch::new(window, firmware.options().deadlines.memory);
        let mut keys = Vec::new();
        let indirect = map.index.map(|index| {
            keys.push(None);
            batch.push(KeyCommand::destroy(index))
        });
        for key in map.direct.into_iter().filter_map(Arc::into_inner) {
            let request = KeyCommand::destroy(key.index);
            match indirect {
                Some(indirect) => batch.push_after(request, indirect),
                None => batch.push(request),
            };
            keys.push(Some(key));
        }
        Dying { batch, keys }
    }

    /// Takes the answers to what is being destroyed.
    fn settle(&mut self) {
        let Some(dying) = &mut self.dying else { return };
        while let Some(item) = dying.batch.poll_item() {
            let key = dying.keys.get_mut(item).and_then(Option::take);
            match dying.batch.result(item) {
                Some(Ok(_)) => self.released.extend(key.map(|key| key.pins)),
                _ => {
                    tracing::warn!("a memory key was not destroyed: its memory stays pinned");
                    self.stuck.extend(key.map(|key| key.pins));
                }
            }
        }
        if dying.batch.is_done() {
            self.dying = None;
        }
    }

    /// Forgets all keys and unpins everything: **only** when the function has been stopped, and
    /// reaches no memory any more.
    pub(crate) fn forget_all(&mut self) {
        let retired = self.retired.drain(..).map(|(_, map)| map);
        self.held.drain(..).chain(retired).for_each(|map| unpin_last(map.direct));
        let dying = self.dying.take().into_iter().flat_map(|dying| dying.keys);
        let dying = dying.flatten().map(|key| key.pins);
        let rest = self.released.drain(..).chain(self.stuck.drain(..)).chain(dying);
        rest.for_each(Pins::unpin);
    }

    fn backlog(&self) -> usize {
        let retired = self.retired.iter().map(|(_, map)| map.own_keys()).sum::<usize>();
        retired + self.dying.as_ref().map_or(0, |dying| dying.batch.pending())
    }

    /// What there is.
    pub(crate) fn counters(&self) -> MemoryCounters {
        MemoryCounters {
            maps_held: self.held.len(),
            backlog_keys: self.backlog(),
            keys_stuck: self.stuck.len(),
            pinned_bytes: self.ledger.pinned_bytes(),
        }
    }
}
