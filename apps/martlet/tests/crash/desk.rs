//! Where the fault of an attempt waits for its moment, and what was seen of the attempt until then
//! and after.

use crate::link::Link;
use crate::log::Log;
use crate::plan::{Channel, Fault, Plan, Side, Trigger, Way};
use crate::process::Killer;
use martlet_qmp::Client;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Shorter waits are spun: the switchover is over before a thread sleeps and wakes.
const SPIN: Duration = Duration::from_micros(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Armed,
    Fired,
    /// It is too late: the attempt is being judged.
    Disarmed,
}

pub(crate) struct Desk {
    pub(crate) plan: Plan,
    pub(crate) log: Log,
    source: Killer,
    destination: Killer,
    source_control: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    links: Mutex<Vec<Weak<Link>>>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Kinds of the control messages that came.
    came: Vec<u16>,
    /// Of those that were passed on whole.
    passed: Vec<u16>,
    /// The destination has begun an attempt.
    accepted: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Desk {
    pub(crate) fn new(
        plan: Plan,
        log: Log,
        source: (Killer, PathBuf),
        destination: Killer,
    ) -> Arc<Desk> {
        Arc::new(Desk {
            plan,
            log,
            source: source.0,
            source_control: source.1,
            destination,
            state: Mutex::new(State::Armed),
            changed: Condvar::new(),
            links: Mutex::default(),
            seen: Mutex::default(),
        })
    }

    /// A plan that goes by the clock fires so long after `zero`.
    pub(crate) fn start_clock(self: &Arc<Desk>, zero: Instant) {
        if let Trigger::Time(delay) = self.plan.trigger {
            self.fire_at(zero + delay);
        }
    }

    fn fire_at(self: &Arc<Desk>, at: Instant) {
        let desk = Arc::clone(self);
        std::thread::spawn(move || {
            let mut state = lock(&desk.state);
            while *state == State::Armed {
                let left = at.saturating_duration_since(Instant::now());
                if left <= SPIN {
                    break;
                }
                let waited = desk.changed.wait_timeout(state, left - SPIN);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(state);
            while Instant::now() < at {
                std::hint::spin_loop();
            }
            desk.fire();
        });
    }

    /// From now on nothing happens. Returns whether it had.
    pub(crate) fn disarm(&self) -> bool {
        let mut state = lock(&self.state);
        if *state == State::Armed {
            *state = State::Disarmed;
        }
        self.changed.notify_all();
        *state == State::Fired
    }

    /// Does it, once.
    pub(crate) fn fire(&self) {
        let mut state = lock(&self.state);
        if *state != State::Armed {
            return;
        }
        *state = State::Fired;
        self.log.note(format!("NOW: {:?}", self.plan.fault));
        match self.plan.fault {
            Fault::Kill(Side::Source) => self.source.kill(),
            Fault::Kill(Side::Destination) => self.destination.kill(),
            Fault::Cut(..) => self.cut_all(),
            Fault::Cancel => {
                let asked = Client::connect(&self.source_control)
                    .and_then(|mut qmp| qmp.ask("migrate_cancel"));
                if let Err(trouble) = asked {
                    self.log.note(format!("cannot cancel: {trouble}"));
                }
            }
        }
    }

    fn cut_all(&self) {
        for link in lock(&self.links).iter().filter_map(Weak::upgrade) {
            self.cut_if_meant(&link);
        }
    }

    fn cut_if_meant(&self, link: &Link) {
        if let Fault::Cut(channel, cut) = self.plan.fault
            && channel == link.channel
        {
            self.log.note(format!("cut {channel:?}: {cut:?}"));
            link.cut(cut);
        }
    }

    /// A connection is made. If its time had come before it was there, it is now.
    pub(crate) fn register(&self, link: &Arc<Link>) {
        self.log.note(format!("{:?} connects", link.channel));
        lock(&self.links).push(Arc::downgrade(link));
        if *lock(&self.state) == State::Fired {
            self.cut_if_meant(link);
        }
    }

    /// A control message is about to be passed on.
    pub(crate) fn on_coming(self: &Arc<Desk>, kind: u16) {
        lock(&self.seen).came.push(kind);
        self.on_message(kind, false);
    }

    /// A control message was passed on; `whole` if nothing of it was lost or changed.
    pub(crate) fn on_passed(self: &Arc<Desk>, kind: u16, way: Way, whole: bool) {
        let fate = if whole { "" } else { ", but not whole" };
        self.log.note(format!("message {kind} passed {way:?}{fate}"));
        if whole {
            lock(&self.seen).passed.push(kind);
        }
        self.on_message(kind, true);
    }

    fn on_message(self: &Arc<Desk>, kind: u16, is_passed: bool) {
        match self.plan.trigger {
            Trigger::Message { kind: awaited, passed, linger }
                if awaited == kind && passed == is_passed =>
            {
                if linger.is_zero() {
                    self.fire();
                } else {
                    self.fire_at(Instant::now() + linger);
                }
            }
            _ => {}
        }
    }

    /// How many of the next bytes come before the moment, if that is among them.
    pub(crate) fn bytes_before(&self, channel: Channel, way: Way, passed: u64) -> Option<u64> {
        match self.plan.trigger {
            Trigger::Bytes { channel: on, way: going, count }
                if on == channel && going == way && count >= passed =>
            {
                Some(count - passed)
            }
            _ => None,
        }
    }

    /// The destination has begun an attempt.
    pub(crate) fn accepted(&self) {
        lock(&self.seen).accepted = true;
    }

    pub(crate) fn is_accepted(&self) -> bool {
        lock(&self.seen).accepted
    }

    /// Whether a message of this kind was passed on whole.
    pub(crate) fn has_passed(&self, kind: u16) -> bool {
        lock(&self.seen).passed.contains(&kind)
    }

    /// Whether a message of this kind came, whatever became of it.
    pub(crate) fn has_come(&self, kind: u16) -> bool {
        lock(&self.seen).came.contains(&kind)
    }

    /// Breaks what is left.
    pub(crate) fn close_all(&self) {
        for link in lock(&self.links).drain(..).filter_map(|link| link.upgrade()) {
            link.close();
        }
    }
}
