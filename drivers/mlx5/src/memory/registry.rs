//! All keys of a device.

use crate::memory::build::{ACTION, Build, Creates, Flight, Prepared, Room, Slot, invalid};
use crate::memory::command::{KeyAnswer, KeyCommand, KeyContext, Refusal};
use crate::memory::counters::MemoryCounters;
use crate::memory::keys::{DirectKey, KeyMap, MapRef, unpin_last};
use crate::memory::pins::Ledger;
use crate::memory::reaper::{Fate, Late, Reaper};
use crate::memory::split::{Piece, split};
use crate::memory::translation::{Covered, klm_count, klms};
use crate::memory::{Deletion, MemoryConfig, Update};
use martlet_device_io::Dma;
use martlet_mlx5_abi::memory::mkey_from_index;
use martlet_units::Instant;
use martlet_vdpa::{MapRun, VdpaError};
use std::sync::Arc;

/// Which commands have their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No map is built; keys that nobody uses go when they are due.
    Idle,
    Creating,
    /// The device has no room for a key: all that nobody uses go.
    MakingRoom,
    /// A build has failed; what it made goes.
    RollingBack,
}

/// The memory keys of one device: the maps it has, the one that is being built, those that go.
///
/// It does no I/O. Whoever drives the device's command queue does three things, in any order and
/// as often as they like: asks [`poll_command`](Registry::poll_command) for commands while the
/// queue has room, hands each one's outcome to [`on_answer`](Registry::on_answer), and calls
/// [`release_one`](Registry::release_one) when there is nothing better to do.
///
/// A new map:
/// 1. [`begin_set_map`](Registry::begin_set_map); the current map stays in force.
/// 2. Commands and answers, until [`poll_set_map`](Registry::poll_set_map) gives the new map, or
///    an error; then nothing is left of it.
/// 3. Queues that run get the new key (and their holders clones of the new [`MapRef`]). If they
///    can't, the new map is simply dropped.
/// 4. [`install`](Registry::install) makes it the current one. The old one goes when its last
///    holder does.
///
/// While a map is being built, no other key is destroyed: what a set_map waits for is at most the
/// commands that were issued before it came.
///
/// When it is dropped, memory whose keys exist stays pinned for the life of the process: see
/// [`begin_drain`](Registry::begin_drain).
#[derive(Debug)]
pub(crate) struct Registry {
    config: MemoryConfig,
    context: KeyContext,
    ledger: Arc<Ledger>,
    current: Option<MapRef>,
    held: Vec<KeyMap>,
    build: Option<Build>,
    outcome: Option<Result<Option<MapRef>, VdpaError>>,
    reaper: Reaper,
    draining: bool,
    last_tag: u64,
    counted: MemoryCounters,
}

impl Registry {
    /// No keys and no map.
    ///
    /// # Panics
    /// If the configuration makes no sense: a window of nothing, pieces that are no power of two.
    pub(crate) fn new(config: MemoryConfig, context: KeyContext) -> Registry {
        config.check();
        Registry {
            config,
            context,
            ledger: Arc::default(),
            current: None,
            held: Vec::new(),
            build: None,
            outcome: None,
            reaper: Reaper::default(),
            draining: false,
            last_tag: 0,
            counted: MemoryCounters::default(),
        }
    }

    /// Begins to build a map. Costs a step for each run and each piece, and neither pins nor
    /// touches memory; that is done piece by piece, as commands are asked for.
    ///
    /// Pieces that the device has a key for, in a map that is held or has not been destroyed yet,
    /// are shared. A whole map that is there already is used again, without any command: so
    /// setting the same map twice costs nothing. Memory is known by its address and owner: an
    /// owner that puts other pages behind the same addresses must take them out of the map first.
    pub(crate) fn begin_set_map(&mut self, runs: &[MapRun]) -> Result<(), VdpaError> {
        if self.build.is_some() || self.outcome.is_some() {
            return Err(invalid("another map is being built".to_owned()));
        }
        let pieces = self.split(runs)?;
        if pieces.is_empty() {
            self.outcome = Some(Ok(None));
        } else if let Some(map) = self.find_map(&pieces) {
            self.outcome = Some(Ok(Some(map)));
        } else {
            let slots: Vec<Slot> = pieces.into_iter().map(|piece| self.slot(piece)).collect();
            self.build = Some(Build::new(slots));
        }
        Ok(())
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
    fn find_map(&mut self, pieces: &[Piece]) -> Option<MapRef> {
        if self.config.update == Update::Everything {
            return None;
        }
        if !self.held.iter().any(|map| map.is_of(pieces)) {
            let map = self.reaper.take_back(|map| map.is_of(pieces))?;
            self.held.push(map);
        }
        self.held.iter().find(|map| map.is_of(pieces)).map(|map| map.name.clone())
    }

    fn slot(&self, piece: Piece) -> Slot {
        if self.config.update == Update::Changed {
            let mut maps = self.held.iter().chain(self.reaper.waiting_maps());
            if let Some(key) = maps.find_map(|map| map.find(&piece)) {
                return Slot::Ready(Arc::clone(key));
            }
        }
        Slot::Open(piece)
    }

    /// How the build went, once; `None` while it goes on or if there is none. `Ok(None)` is the
    /// empty map, which has no key. On an error everything that was made for the map is gone,
    /// but for keys that are counted as abandoned.
    pub(crate) fn poll_set_map(&mut self) -> Option<Result<Option<MapRef>, VdpaError>> {
        self.outcome.take()
    }

    /// Ends the build, if there is one, with this error: [`poll_set_map`](Registry::poll_set_map)
    /// gives it when nothing is left of it.
    pub(crate) fn cancel_set_map(&mut self, error: VdpaError) {
        if let Some(build) = &mut self.build {
            build.fail(error);
            self.settle();
        }
    }

    /// Makes `map` the current one; with `None` there is none. What was current is let go.
    pub(crate) fn install(&mut self, map: Option<MapRef>) {
        self.current = map;
    }

    /// The current map.
    #[cfg(test)]
    pub(super) fn current(&self) -> Option<&MapRef> {
        self.current.as_ref()
    }

    /// The next command to issue at `now`, or `None`: then more come after an answer, after a call
    /// that changes something, or when [`next_due`](Registry::next_due) says. Pins the memory of
    /// the command's piece, so it may take as long as that.
    ///
    /// The command must be issued, or answered at once with what is in the way.
    pub(crate) fn poll_command(&mut self, dma: &dyn Dma, now: Instant) -> Option<KeyCommand> {
        self.collect(now);
        loop {
            let phase = self.phase();
            let command = match phase {
                Phase::Idle => {
                    self.reaper.wake((!self.deletes_at_once()).then_some(now));
                    self.next_destroy(false)
                }
                Phase::Creating => self.next_create(dma),
                Phase::MakingRoom => {
                    self.reaper.wake(None);
                    self.next_destroy(false)
                }
                Phase::RollingBack => self.next_destroy(true),
            };
            self.settle();
            // Without a command it may have come to something else to do: an error, for example.
            if command.is_some() || phase == self.phase() {
                self.counted.commands += u64::from(command.is_some());
                return command;
            }
        }
    }

    fn phase(&self) -> Phase {
        match &self.build {
            None => Phase::Idle,
            Some(build) if build.failure.is_some() => Phase::RollingBack,
            Some(build) if build.room == Room::Making => Phase::MakingRoom,
            Some(_) => Phase::Creating,
        }
    }

    fn deletes_at_once(&self) -> bool {
        self.draining || self.config.deletion == Deletion::AtOnce
    }

    /// Maps that nobody holds begin to wait for their end.
    fn collect(&mut self, now: Instant) {
        let due = match self.config.deletion {
            Deletion::Deferred { delay } => now.after(delay),
            Deletion::AtOnce => now,
        };
        for map in self.held.extract_if(.., |map| map.name.is_last()) {
            self.reaper.retire(map, due);
        }
    }

    fn next_tag(&mut self) -> u64 {
        self.last_tag += 1;
        self.last_tag
    }

    /// How many keys are destroyed at a time.
    fn destroy_window(&self) -> usize {
        let waited_for = self.phase() != Phase::Idle || self.deletes_at_once();
        let lazy = if waited_for { usize::MAX } else { self.config.lazy_window };
        self.config.destroy_window.min(lazy)
    }

    fn next_destroy(&mut self, rollback_only: bool) -> Option<KeyCommand> {
        if self.reaper.flying() >= self.destroy_window() {
            return None;
        }
        let tag = self.next_tag();
        let index = self.reaper.next(tag, rollback_only)?;
        let depth = &mut self.counted.destroy_depth_max;
        *depth = self.reaper.flying().max(*depth);
        Some(KeyCommand::destroy(tag, index))
    }

    fn next_create(&mut self, dma: &dyn Dma) -> Option<KeyCommand> {
        let tag = self.next_tag();
        let build = self.build.as_mut()?;
        let (flying, window) = (build.flying.len(), self.config.create_window);
        // A serial create does nothing while the device works; else the host's work on the next
        // piece overlaps the device's on those before.
        if flying >= window && window == 1 {
            return None;
        }
        let Some(prepared) = build.prepare(dma, &self.ledger) else {
            return if flying == 0 { self.create_indirect(tag) } else { None };
        };
        let bytes = KeyCommand::direct_bytes(&prepared.mtts);
        let fits = flying == 0 || build.staged_bytes() + bytes <= self.config.staged_bytes_max;
        if flying >= window || !fits {
            return None;
        }
        let Prepared { slot, piece, pins, mtts } = build.take_prepared()?;
        let command = KeyCommand::direct(tag, &self.context, piece.bytes, piece.access, mtts);
        self.take_off(&command, Creates::Direct { slot, piece, pins });
        Some(command)
    }

    fn create_indirect(&mut self, tag: u64) -> Option<KeyCommand> {
        let keys = self.build.as_ref()?.all_ready()?;
        let (first, last) = (&keys.first()?.piece, &keys.last()?.piece);
        let span = (first.iova, last.end() - first.iova);
        let covered = keys.iter().map(|key| Covered {
            iova: key.piece.iova,
            bytes: key.piece.bytes,
            key: mkey_from_index(key.index, 0),
        });
        let list = klms(covered, self.context.null_key);
        let command = KeyCommand::indirect(tag, &self.context, span, list);
        self.take_off(&command, Creates::Indirect);
        Some(command)
    }

    fn take_off(&mut self, command: &KeyCommand, what: Creates) {
        let Some(build) = &mut self.build else { return };
        let flight = Flight { staged_bytes: command.input_bytes(), what };
        build.flying.insert(command.tag(), flight);
        let counted = &mut self.counted;
        counted.create_depth_max = counted.create_depth_max.max(build.flying.len());
        counted.staged_bytes_max = counted.staged_bytes_max.max(build.staged_bytes());
    }

    /// Takes the outcome of the command with this tag. Each command has one outcome; a tag that is
    /// not known (any more) is ignored.
    pub(crate) fn on_answer(&mut self, tag: u64, answer: KeyAnswer, now: Instant) {
        let flight = self.build.as_mut().and_then(|build| build.flying.remove(&tag));
        if let Some(flight) = flight {
            self.on_created(tag, flight.what, answer);
        } else if let Some(fate) = self.reaper.on_answer(tag, &answer, now) {
            self.counted.keys_destroyed += u64::from(fate == Fate::Destroyed);
            self.counted.keys_abandoned += u64::from(fate == Fate::Abandoned);
            if fate == Fate::Abandoned {
                tracing::warn!(?answer, "a memory key was not destroyed: its memory stays pinned");
            }
            self.counted.keys_live -= u64::from(fate != Fate::Again);
            if self.deletes_at_once() {
                while self.release_one() {}
            }
        }
        self.settle();
    }

    /// Takes the answer to a command whose outcome was [`KeyAnswer::Lost`]: what it did after all
    /// is undone, or no more abandoned.
    pub(crate) fn on_late_answer(&mut self, tag: u64, answer: &KeyAnswer) {
        let Some(late) = self.reaper.on_late_answer(tag, answer) else { return };
        self.counted.keys_abandoned -= 1;
        match late {
            Late::NeverCreated => {}
            Late::Created => {
                self.counted.keys_created += 1;
                self.counted.keys_live += 1;
            }
            Late::Destroyed => self.counted.keys_destroyed += 1,
        }
        // Else what is to be unpinned would be due at once for as long as the drain goes on, which
        // nobody could wait for.
        if self.deletes_at_once() {
            while self.release_one() {}
        }
        self.settle();
    }

    fn on_created(&mut self, tag: u64, what: Creates, answer: KeyAnswer) {
        let Some(build) = &mut self.build else { return };
        match (what, answer) {
            (Creates::Direct { slot, piece, pins }, KeyAnswer::Done { index }) => {
                build.made(slot, DirectKey { index, piece, pins });
                self.counted.keys_created += 1;
                self.counted.keys_live += 1;
            }
            (Creates::Indirect, KeyAnswer::Done { index }) => self.built(index),
            (what, KeyAnswer::Refused { why, error }) => {
                let may_retry = why == Refusal::NoRoom
                    && build.failure.is_none()
                    && (build.room == Room::Making || !self.reaper.is_idle());
                if may_retry {
                    build.room = Room::Making;
                } else {
                    build.fail(error);
                }
                if let Creates::Direct { slot, piece, pins } = what {
                    build.reopen(slot, piece, pins);
                }
            }
            (what, KeyAnswer::Lost { error }) => {
                tracing::warn!(%error, "a memory key may exist: its memory stays pinned");
                build.fail(error);
                self.counted.keys_abandoned += 1;
                let direct = match what {
                    Creates::Direct { piece, pins, .. } => Some((piece, pins)),
                    Creates::Indirect => None,
                };
                self.reaper.abandon(tag, direct);
            }
        }
    }

    /// The indirect key exists, and with it the map.
    fn built(&mut self, index: u32) {
        self.counted.keys_created += 1;
        self.counted.keys_live += 1;
        let Some(build) = &mut self.build else { return };
        let map = KeyMap::new(index, build.take_keys());
        if build.failure.is_some() {
            // Cancelled while it was made.
            self.reaper.roll_back_map(map);
        } else {
            self.outcome = Some(Ok(Some(map.name.clone())));
            self.held.push(map);
            self.build = None;
        }
    }

    /// What follows from what has happened.
    fn settle(&mut self) {
        let Some(build) = &mut self.build else { return };
        if !build.flying.is_empty() {
            return;
        }
        if build.room == Room::Making && build.failure.is_none() && self.reaper.is_idle() {
            build.room = Room::Enough;
        }
        if let Some(error) = build.failure.clone() {
            let keys = build.take_keys();
            self.reaper.roll_back(keys);
            if !self.reaper.rolls_back() {
                self.build = None;
                self.outcome = Some(Err(error));
                while self.reaper.release_one() {}
            }
        }
    }

    /// Unpins the memory of one key that was destroyed; whether there was one. Not while a map is
    /// being built, which would wait for it.
    pub(crate) fn release_one(&mut self) -> bool {
        self.build.is_none() && self.reaper.release_one()
    }

    /// When the registry wants to be asked for commands again, or has memory to unpin; a moment
    /// in the past for at once. Answers that are awaited come by themselves.
    pub(crate) fn next_due(&mut self, now: Instant) -> Option<Instant> {
        self.collect(now);
        if self.build.is_some() {
            return None;
        }
        let due = self.reaper.due(self.destroy_window())?;
        Some(if self.deletes_at_once() { Instant(0) } else { due })
    }

    /// Whether the one who lets a map go has to see its end: deletion is not deferred, and
    /// something is left to delete. Memory of destroyed keys is unpinned by then. For measuring
    /// what deferring is worth.
    pub(crate) fn must_delete(&mut self, now: Instant) -> bool {
        self.collect(now);
        if self.config.deletion != Deletion::AtOnce {
            return false;
        }
        while self.release_one() {}
        !self.reaper.is_idle()
    }

    /// Begins to destroy everything that nobody holds, without delay; a build is cancelled with
    /// `error`. At shutdown: `install(None)`, drop all other holds, then this, then commands and
    /// answers until [`poll_drained`](Registry::poll_drained).
    pub(crate) fn begin_drain(&mut self, error: VdpaError) {
        self.cancel_set_map(error);
        self.draining = true;
        while self.release_one() {}
    }

    /// Whether the drain is over. Memory of destroyed keys is unpinned by then.
    pub(crate) fn poll_drained(&mut self, now: Instant) -> bool {
        self.collect(now);
        while self.release_one() {}
        let is_over = self.build.is_none() && self.reaper.is_idle();
        self.draining &= !is_over;
        is_over
    }

    /// Gives a drain up that takes too long. What it has not destroyed stays in the backlog, and
    /// goes when the device lets it.
    pub(crate) fn end_drain(&mut self) {
        self.draining = false;
    }

    /// Forgets all keys, abandoned ones too, and unpins everything: **only** when the device surely reaches no memory
    /// any more, because it was torn down (TEARDOWN_HCA was answered), was reset, or its bus
    /// refuses it.
    pub(crate) fn forget_all(&mut self) {
        if let Some(build) = self.build.take() {
            build.forget_all();
            self.outcome = Some(Err(VdpaError::Gone { action: ACTION }));
        }
        for map in self.held.drain(..) {
            unpin_last(map.direct);
        }
        self.reaper.forget_all();
        self.current = None;
        self.draining = false;
        self.counted.keys_live = 0;
        self.counted.keys_abandoned = 0;
    }

    /// What was done so far.
    pub(crate) fn counters(&self) -> MemoryCounters {
        MemoryCounters {
            pinned_bytes: self.ledger.pinned_bytes(),
            abandoned_bytes: self.reaper.abandoned_bytes() + self.ledger.abandoned_bytes(),
            maps_held: self.held.len(),
            backlog_keys: self.reaper.backlog(),
            ..self.counted
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let counters = self.counters();
        if counters.pinned_bytes > 0 {
            tracing::warn!(
                keys = counters.keys_live,
                bytes = counters.pinned_bytes,
                "memory stays pinned: the device was let go with keys that still exist"
            );
        }
    }
}
