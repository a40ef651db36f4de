//! Which units are registered on both sides, and which of them may go.

use super::failure::PeerFault;
use super::layout::{Layout, UnitIndex};
use super::queue::Message;
use super::work::{LocalKey, Registered};
use martlet_wire::rdma::WireSpan;
use std::collections::VecDeque;

/// How a unit is registered, on both sides taken together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registration {
    Absent,
    /// Both sides are at it; each that is done has its key.
    Asked,
    Ready,
    /// Both sides give it up; each that has is without its key.
    Dropping,
}

#[derive(Debug)]
struct Unit {
    registration: Registration,
    local: Option<LocalKey>,
    remote: Option<Registered>,
    /// Writes that are posted and not retired.
    in_flight: u32,
    /// Messages that wait, here or at their queue.
    waiting: u32,
    /// It waits for room in the budget.
    is_wanted: bool,
    /// Tells the newest entry of the idle list from older ones.
    idle_since: u64,
    /// Messages that wait for the keys.
    parked: Vec<Message>,
}

/// What has to be done about registrations; taken by the owner.
#[derive(Debug, Default)]
pub(super) struct Errands {
    pub(super) register: VecDeque<UnitIndex>,
    pub(super) deregister: VecDeque<UnitIndex>,
    pub(super) ask: VecDeque<UnitIndex>,
    pub(super) give_up: VecDeque<UnitIndex>,
}

/// Who wants a unit registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Pages wait for it: any idle unit may go for it.
    Now,
    /// Pages will come: units in these bounds are wanted just as soon, and stay.
    Soon(UnitIndex, UnitIndex),
}

/// All units of a guest, as the source sees them.
#[derive(Debug)]
pub(super) struct Units {
    list: Box<[Unit]>,
    budget_bytes: u64,
    /// Registered, or on the way there or back.
    pinned_bytes: u64,
    /// The part of it that is on the way back.
    dropping_bytes: u64,
    /// How many units are [`Registration::Asked`], and how many may be.
    asked: usize,
    asked_max: usize,
    ready: usize,
    /// Idle units, the longest idle first; entries can be out of date.
    idle: VecDeque<(UnitIndex, u64)>,
    clock: u64,
    wanted: VecDeque<UnitIndex>,
    pub(super) errands: Errands,
    drops: u64,
}

impl Units {
    pub(super) fn new(layout: &Layout, budget_bytes: u64, asked_max: usize) -> Units {
        let unit = |_| Unit {
            registration: Registration::Absent,
            local: None,
            remote: None,
            in_flight: 0,
            waiting: 0,
            is_wanted: false,
            idle_since: 0,
            parked: Vec::new(),
        };
        Units {
            list: (0..layout.units()).map(unit).collect(),
            budget_bytes,
            pinned_bytes: 0,
            dropping_bytes: 0,
            asked: 0,
            asked_max,
            ready: 0,
            idle: VecDeque::new(),
            clock: 0,
            wanted: VecDeque::new(),
            errands: Errands::default(),
            drops: 0,
        }
    }

    pub(super) fn is_ready(&self, unit: UnitIndex) -> bool {
        self.list[unit.place()].registration == Registration::Ready
    }

    /// The keys of a unit that is ready.
    pub(super) fn keys(&self, unit: UnitIndex) -> (LocalKey, Registered) {
        let unit = &self.list[unit.place()];
        assert_eq!(unit.registration, Registration::Ready, "posting without keys");
        (unit.local.expect("ready"), unit.remote.expect("ready"))
    }

    pub(super) fn in_flight(&self, unit: UnitIndex) -> u32 {
        self.list[unit.place()].in_flight
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    pub(super) fn drops(&self) -> u64 {
        self.drops
    }

    pub(super) fn parked_mut(&mut self, unit: UnitIndex) -> &mut Vec<Message> {
        &mut self.list[unit.place()].parked
    }

    pub(super) fn parked(&self) -> impl Iterator<Item = &Message> {
        self.list.iter().flat_map(|unit| &unit.parked)
    }

    /// A message for it waits.
    pub(super) fn on_waiting(&mut self, unit: UnitIndex) {
        self.list[unit.place()].waiting += 1;
    }

    /// A message that waited is posted.
    pub(super) fn on_posted(&mut self, unit: UnitIndex) {
        let unit = &mut self.list[unit.place()];
        unit.waiting -= 1;
        unit.in_flight += 1;
    }

    /// A posted write is retired.
    pub(super) fn on_retired(&mut self, unit: UnitIndex, layout: &Layout) {
        self.list[unit.place()].in_flight -= 1;
        self.note_idle(unit);
        self.ask_wanted(layout);
    }

    /// Asks for a unit, or remembers that it is wanted as soon as there is room.
    pub(super) fn demand(&mut self, unit: UnitIndex, layout: &Layout) {
        let registration = self.list[unit.place()].registration;
        if matches!(registration, Registration::Ready | Registration::Asked)
            || self.try_ask(unit, layout, Need::Now)
        {
            return;
        }
        let entry = &mut self.list[unit.place()];
        if !entry.is_wanted {
            entry.is_wanted = true;
            self.wanted.push_back(unit);
        }
    }

    /// Asks for a unit if it is absent and there is room, else makes room. True if the unit is
    /// asked for or ready.
    pub(super) fn try_ask(&mut self, unit: UnitIndex, layout: &Layout, need: Need) -> bool {
        match self.list[unit.place()].registration {
            Registration::Ready | Registration::Asked => return true,
            Registration::Dropping => return false,
            Registration::Absent => {}
        }
        if self.asked >= self.asked_max {
            return false;
        }
        let bytes = layout.unit_pages_of(unit).bytes();
        // What is being dropped counts until it is gone: the pages are still pinned.
        while self.pinned_bytes - self.dropping_bytes + bytes > self.budget_bytes {
            if !self.drop_one(layout, need) {
                return false;
            }
        }
        if self.pinned_bytes + bytes > self.budget_bytes {
            return false;
        }
        self.pinned_bytes += bytes;
        self.asked += 1;
        self.list[unit.place()].registration = Registration::Asked;
        self.errands.register.push_back(unit);
        self.errands.ask.push_back(unit);
        true
    }

    /// This side is registered. True if the unit is ready now.
    pub(super) fn on_local(&mut self, unit: UnitIndex, key: LocalKey) -> bool {
        let entry = &mut self.list[unit.place()];
        let expected = entry.registration == Registration::Asked && entry.local.is_none();
        assert!(expected, "registered {unit:?}, which was not asked for");
        entry.local = Some(key);
        self.become_ready(unit)
    }

    /// The destination granted a unit. True if it is ready now.
    pub(super) fn on_remote(
        &mut self,
        unit: UnitIndex,
        registered: Registered,
        span: &WireSpan,
    ) -> Result<bool, PeerFault> {
        let entry = &mut self.list[unit.place()];
        if entry.registration != Registration::Asked || entry.remote.is_some() {
            return Err(PeerFault::Key(*span, "granted, but not asked for"));
        }
        entry.remote = Some(registered);
        Ok(self.become_ready(unit))
    }

    /// Whether the destination's answer on this unit is awaited.
    pub(super) fn is_asked(&self, unit: UnitIndex) -> bool {
        let entry = &self.list[unit.place()];
        entry.registration == Registration::Asked && entry.remote.is_none()
    }

    /// This side has deregistered.
    pub(super) fn on_local_gone(&mut self, unit: UnitIndex, layout: &Layout) {
        let entry = &mut self.list[unit.place()];
        let expected = entry.registration == Registration::Dropping && entry.local.is_some();
        assert!(expected, "deregistered {unit:?}, which was not to go");
        entry.local = None;
        self.become_absent(unit, layout);
    }

    /// The destination has deregistered.
    pub(super) fn on_remote_gone(
        &mut self,
        unit: UnitIndex,
        span: &WireSpan,
        layout: &Layout,
    ) -> Result<(), PeerFault> {
        let entry = &mut self.list[unit.place()];
        if entry.registration != Registration::Dropping || entry.remote.is_none() {
            return Err(PeerFault::Key(*span, "given back, but not asked for"));
        }
        entry.remote = None;
        self.become_absent(unit, layout);
        Ok(())
    }

    fn become_ready(&mut self, unit: UnitIndex) -> bool {
        let entry = &mut self.list[unit.place()];
        if entry.local.is_none() || entry.remote.is_none() {
            return false;
        }
        entry.registration = Registration::Ready;
        self.asked -= 1;
        self.ready += 1;
        self.note_idle(unit);
        true
    }

    fn become_absent(&mut self, unit: UnitIndex, layout: &Layout) {
        let entry = &mut self.list[unit.place()];
        if entry.local.is_some() || entry.remote.is_some() {
            return;
        }
        entry.registration = Registration::Absent;
        let bytes = layout.unit_pages_of(unit).bytes();
        self.pinned_bytes -= bytes;
        self.dropping_bytes -= bytes;
        self.ask_wanted(layout);
    }

    /// Asks for the units that wait for room, in their order.
    pub(super) fn ask_wanted(&mut self, layout: &Layout) {
        while let Some(unit) = self.wanted.front().copied() {
            if !self.try_ask(unit, layout, Need::Now) {
                return;
            }
            self.list[unit.place()].is_wanted = false;
            self.wanted.pop_front();
        }
    }

    fn is_idle(&self, unit: UnitIndex) -> bool {
        let unit = &self.list[unit.place()];
        unit.registration == Registration::Ready && unit.in_flight == 0 && unit.waiting == 0
    }

    fn note_idle(&mut self, unit: UnitIndex) {
        if !self.is_idle(unit) {
            return;
        }
        self.clock += 1;
        self.list[unit.place()].idle_since = self.clock;
        self.idle.push_back((unit, self.clock));
        // Entries go out of date; without this the list would grow with every drain.
        if self.idle.len() > 2 * self.ready + 16 {
            let mut idle = std::mem::take(&mut self.idle);
            idle.retain(|entry| self.is_current(*entry));
            self.idle = idle;
        }
    }

    fn is_current(&self, (unit, since): (UnitIndex, u64)) -> bool {
        self.list[unit.place()].idle_since == since && self.is_idle(unit)
    }

    /// Gives up the unit that has been idle for the longest; false if none may go.
    fn drop_one(&mut self, layout: &Layout, need: Need) -> bool {
        let may_go = |entry: &(UnitIndex, u64)| {
            let kept = match need {
                Need::Now => false,
                Need::Soon(from, to) => from <= entry.0 && entry.0 <= to,
            };
            !kept && self.is_current(*entry)
        };
        let Some(place) = self.idle.iter().position(may_go) else { return false };
        let Some((unit, _)) = self.idle.remove(place) else { return false };
        let entry = &mut self.list[unit.place()];
        // A key goes only with nothing in flight by it and nothing that waits for it.
        assert!(entry.in_flight == 0 && entry.waiting == 0, "dropping a key in use");
        entry.registration = Registration::Dropping;
        self.ready -= 1;
        self.dropping_bytes += layout.unit_pages_of(unit).bytes();
        self.drops += 1;
        self.errands.deregister.push_back(unit);
        self.errands.give_up.push_back(unit);
        true
    }
}
