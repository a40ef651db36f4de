//! Keys on their way out.
//!
//! A map that nobody holds any more waits for its delay, then its indirect key is destroyed, then
//! in any order those direct keys that no other map shares. A direct key's memory is unpinned when
//! the device has said that the key is gone, and not before:
//!
//! | DESTROY_MKEY | the key | its memory |
//! |---|---|---|
//! | done | is gone | unpinned, when there is time |
//! | refused, busy | is tried again, `ATTEMPTS_MAX` times in all | stays pinned |
//! | refused for another reason, or too often | is abandoned | stays pinned |
//! | no answer | is abandoned: asking again could hit a newer key with its number | stays pinned |
//! | an answer after all | as if it had come in time, but is not tried again | |
//!
//! | CREATE_MKEY | the key | its memory |
//! |---|---|---|
//! | refused | never was | unpinned |
//! | no answer | is abandoned | stays pinned |
//! | done after all | is destroyed | as above |
//!
//! An indirect key that is abandoned doesn't keep its direct keys: no queue names it, for it was
//! held by nobody. But for a late answer, abandoned memory is unpinned by [`Reaper::forget_all`]
//! only.

use crate::memory::command::{KeyAnswer, Refusal};
use crate::memory::keys::{DirectKey, KeyMap, unpin_last};
use crate::memory::pins::Pins;
use crate::memory::split::Piece;
use martlet_units::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How often DESTROY_MKEY is tried while the device says that the key is in use.
pub(crate) const ATTEMPTS_MAX: u32 = 3;

/// Time between two such attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(10);

/// Something to destroy.
#[derive(Debug)]
enum Unused {
    /// An indirect key, and the direct ones that it lets go of.
    Map(KeyMap),
    Direct(DirectKey),
}

#[derive(Debug)]
struct Entry {
    what: Unused,
    attempts: u32,
    /// Belongs to a map whose build failed, and which waits for it.
    rollback: bool,
}

impl Entry {
    fn keys(&self) -> usize {
        match &self.what {
            Unused::Direct(_) => 1,
            Unused::Map(map) => {
                1 + map.direct.iter().filter(|key| Arc::strong_count(key) == 1).count()
            }
        }
    }
}

/// What became of a key, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Destroyed,
    Again,
    Abandoned,
}

/// A key that may exist, and that nobody can use or destroy.
#[derive(Debug)]
enum Abandoned {
    /// It exists if CREATE_MKEY was done; with its piece, if it is a direct one.
    Created(Option<(Piece, Pins)>),
    /// It exists unless DESTROY_MKEY was done; with its memory, if it is a direct one.
    Kept(Option<Pins>),
}

impl Abandoned {
    fn pins(self) -> Option<Pins> {
        match self {
            Abandoned::Created(direct) => direct.map(|(_, pins)| pins),
            Abandoned::Kept(pins) => pins,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Abandoned::Created(direct) => direct.as_ref().map_or(0, |(_, pins)| pins.bytes()),
            Abandoned::Kept(pins) => pins.as_ref().map_or(0, Pins::bytes),
        }
    }
}

/// What a late answer settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Late {
    /// A key exists after all, and will be destroyed.
    Created,
    /// A key never was.
    NeverCreated,
    /// A key is gone.
    Destroyed,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    waiting: Vec<(Instant, Entry)>,
    ready: VecDeque<Entry>,
    flying: BTreeMap<u64, Entry>,
    released: VecDeque<Pins>,
    /// By the command that had no answer, or a bad one.
    abandoned: BTreeMap<u64, Abandoned>,
}

impl Reaper {
    /// Takes a map that nobody holds; nothing happens to it before `due`.
    pub(crate) fn retire(&mut self, map: KeyMap, due: Instant) {
        self.waiting.push((due, Entry { what: Unused::Map(map), attempts: 0, rollback: false }));
    }

    /// A map of exactly what `is_it` looks for comes back, if its turn has not come yet.
    pub(crate) fn take_back(&mut self, is_it: impl Fn(&KeyMap) -> bool) -> Option<KeyMap> {
        let fits = |entry: &Entry| match &entry.what {
            Unused::Map(map) => entry.attempts == 0 && is_it(map),
            Unused::Direct(_) => false,
        };
        let place = self.waiting.iter().position(|(_, entry)| fits(entry))?;
        match self.waiting.remove(place).1.what {
            Unused::Map(map) => Some(map),
            Unused::Direct(_) => None,
        }
    }

    /// The maps that wait, and whose direct keys can be shared therefore.
    pub(crate) fn waiting_maps(&self) -> impl Iterator<Item = &KeyMap> {
        self.waiting.iter().filter_map(|(_, entry)| match &entry.what {
            Unused::Map(map) => Some(map),
            Unused::Direct(_) => None,
        })
    }

    /// Takes the keys of a map that could not be built, to be destroyed before everything else.
    /// Those that another map has are only let go.
    pub(crate) fn roll_back(&mut self, keys: Vec<Arc<DirectKey>>) {
        self.let_go(keys, true);
    }

    /// The same with a whole map.
    pub(crate) fn roll_back_map(&mut self, map: KeyMap) {
        self.ready.push_front(Entry { what: Unused::Map(map), attempts: 0, rollback: true });
    }

    fn let_go(&mut self, keys: Vec<Arc<DirectKey>>, rollback: bool) {
        for key in keys.into_iter().filter_map(Arc::into_inner) {
            let entry = Entry { what: Unused::Direct(key), attempts: 0, rollback };
            if rollback { self.ready.push_front(entry) } else { self.ready.push_back(entry) }
        }
    }

    /// Makes ready what is due at `now`; with `None` everything.
    pub(crate) fn wake(&mut self, now: Option<Instant>) {
        let due = |at: &Instant| now.is_none_or(|now| *at <= now);
        for (at, entry) in std::mem::take(&mut self.waiting) {
            if due(&at) { self.ready.push_back(entry) } else { self.waiting.push((at, entry)) }
        }
    }

    /// When there is something to do next, if up to `window` commands may be without an answer:
    /// the past, if at once.
    pub(crate) fn due(&self, window: usize) -> Option<Instant> {
        if !self.released.is_empty() {
            return Some(Instant(0));
        }
        if self.flying.len() >= window {
            return None;
        }
        if !self.ready.is_empty() {
            return Some(Instant(0));
        }
        self.waiting.iter().map(|(at, _)| *at).min()
    }

    /// The next key to destroy of those that are ready; its answer comes with `tag`.
    pub(crate) fn next(&mut self, tag: u64, rollback_only: bool) -> Option<u32> {
        let first = self.ready.front()?;
        if rollback_only && !first.rollback {
            return None;
        }
        let entry = self.ready.pop_front()?;
        let index = match &entry.what {
            Unused::Map(map) => map.index,
            Unused::Direct(key) => key.index,
        };
        self.flying.insert(tag, entry);
        Some(index)
    }

    /// Commands without an answer.
    pub(crate) fn flying(&self) -> usize {
        self.flying.len()
    }

    /// Whether a failed build still has keys.
    pub(crate) fn rolls_back(&self) -> bool {
        self.ready.iter().chain(self.flying.values()).any(|entry| entry.rollback)
    }

    /// Whether nothing is left to destroy, at once or later.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.ready.is_empty() && self.flying.is_empty()
    }

    /// The answer to a command; `None` if it is not one from here.
    pub(crate) fn on_answer(&mut self, tag: u64, answer: &KeyAnswer, now: Instant) -> Option<Fate> {
        let mut entry = self.flying.remove(&tag)?;
        entry.attempts += 1;
        let again = match answer {
            KeyAnswer::Done { .. } => {
                self.destroyed(entry);
                return Some(Fate::Destroyed);
            }
            KeyAnswer::Refused { why: Refusal::Busy, .. } => entry.attempts < ATTEMPTS_MAX,
            KeyAnswer::Refused { why: Refusal::NoRoom | Refusal::Final, .. }
            | KeyAnswer::Lost { .. } => false,
        };
        if again {
            // A build that failed is not kept waiting for it.
            entry.rollback = false;
            self.waiting.push((now.after(ATTEMPT_PAUSE), entry));
            return Some(Fate::Again);
        }
        let pins = match entry.what {
            Unused::Map(map) => {
                self.let_go(map.direct, entry.rollback);
                None
            }
            Unused::Direct(key) => Some(key.pins),
        };
        self.abandoned.insert(tag, Abandoned::Kept(pins));
        Some(Fate::Abandoned)
    }

    fn destroyed(&mut self, entry: Entry) {
        match entry.what {
            Unused::Map(map) => self.let_go(map.direct, entry.rollback),
            Unused::Direct(key) => self.released.push_back(key.pins),
        }
    }

    /// Unpins the memory of one destroyed key; whether there was one. Unpinning 1 GiB takes its
    /// time, and is therefore not done where an answer comes in.
    pub(crate) fn release_one(&mut self) -> bool {
        self.released.pop_front().map(Pins::unpin).is_some()
    }

    /// CREATE_MKEY had no answer: a key may exist, although nobody knows its number. Its memory
    /// stays pinned, if it is a direct one.
    pub(crate) fn abandon(&mut self, tag: u64, direct: Option<(Piece, Pins)>) {
        self.abandoned.insert(tag, Abandoned::Created(direct));
    }

    /// An answer that came too late; what it settles, if anything.
    pub(crate) fn on_late_answer(&mut self, tag: u64, answer: &KeyAnswer) -> Option<Late> {
        let abandoned = self.abandoned.remove(&tag)?;
        match (abandoned, answer) {
            (Abandoned::Created(direct), KeyAnswer::Done { index }) => {
                let index = *index;
                let what = match direct {
                    Some((piece, pins)) => Unused::Direct(DirectKey { index, piece, pins }),
                    None => Unused::Map(KeyMap::new(index, Vec::new())),
                };
                self.ready.push_back(Entry { what, attempts: 0, rollback: false });
                Some(Late::Created)
            }
            (Abandoned::Created(direct), KeyAnswer::Refused { .. }) => {
                self.released.extend(direct.map(|(_, pins)| pins));
                Some(Late::NeverCreated)
            }
            (Abandoned::Kept(pins), KeyAnswer::Done { .. }) => {
                self.released.extend(pins);
                Some(Late::Destroyed)
            }
            (abandoned, KeyAnswer::Refused { .. } | KeyAnswer::Lost { .. }) => {
                self.abandoned.insert(tag, abandoned);
                None
            }
        }
    }

    /// Bytes of abandoned keys.
    pub(crate) fn abandoned_bytes(&self) -> u64 {
        self.abandoned.values().map(Abandoned::bytes).sum()
    }

    /// Forgets all keys and unpins their memory, that of abandoned ones too. Only when the device
    /// surely reaches no memory any more.
    pub(crate) fn forget_all(&mut self) {
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(_, entry)| entry);
        let ready = std::mem::take(&mut self.ready).into_iter();
        let flying = std::mem::take(&mut self.flying).into_values();
        for entry in waiting.chain(ready).chain(flying) {
            match entry.what {
                Unused::Map(map) => unpin_last(map.direct),
                Unused::Direct(key) => key.pins.unpin(),
            }
        }
        let abandoned = std::mem::take(&mut self.abandoned).into_values();
        let pins = self.released.drain(..).chain(abandoned.filter_map(Abandoned::pins));
        pins.for_each(Pins::unpin);
    }

    /// Keys that are to be destroyed.
    pub(crate) fn backlog(&self) -> usize {
        let waiting = self.waiting.iter().map(|(_, entry)| entry);
        waiting.chain(&self.ready).chain(self.flying.values()).map(Entry::keys).sum()
    }
}
