//! Where models take turns and their drivers wait.

use crate::SoftClock;
use martlet_device_io::Waiter;
use martlet_units::Instant;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// A real wait sleeps until this long before what it waits for, and yields from there on: a sleep
/// may end tens of microseconds late, and firmware answers in hundreds.
const AWAKE_BEFORE: Duration = Duration::from_micros(120);

/// A real wait looks again after this long: a device may have been given something new to do by
/// someone else.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A model that has things to do at certain times.
pub trait Turn: Send + Sync {
    /// Does everything that is due at `now`, and says when something is due next.
    fn turn(&self, now: Instant) -> Option<Instant>;

    /// Whether it has interrupted its driver since the last call.
    fn take_interrupt(&self) -> bool;
}

/// Models on one clock.
pub struct Stage {
    clock: Arc<SoftClock>,
    models: RwLock<Vec<Arc<dyn Turn>>>,
}

/// One model's place on a stage: what its driver waits at.
pub struct Seat {
    stage: Arc<Stage>,
    model: Arc<dyn Turn>,
}

impl Stage {
    /// An empty stage.
    pub fn new(clock: SoftClock) -> Arc<Stage> {
        Arc::new(Stage { clock: Arc::new(clock), models: RwLock::default() })
    }

    /// Its clock.
    pub fn clock(&self) -> &Arc<SoftClock> {
        &self.clock
    }

    /// Gives a model a place.
    pub fn seat(self: &Arc<Stage>, model: Arc<dyn Turn>) -> Arc<Seat> {
        self.models.write().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&model));
        Arc::new(Seat { stage: Arc::clone(self), model })
    }

    /// Gives every model a turn, and says when something is due next.
    pub fn turn_all(&self) -> Option<Instant> {
        let now = self.clock.now();
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        models.iter().filter_map(|model| model.turn(now)).min()
    }

    /// Runs virtual time to `until`, event by event.
    pub fn run_until(&self, until: Instant) {
        assert!(self.clock.is_virtual(), "real time runs by itself");
        while let Some(next) = self.turn_all().filter(|next| *next <= until) {
            self.clock.advance_to(next);
        }
        self.clock.advance_to(until);
        self.turn_all();
    }
}

impl Waiter for Seat {
    fn now(&self) -> Instant {
        self.stage.clock.now()
    }

    fn poll(&self) -> bool {
        self.model.turn(self.now());
        self.model.take_interrupt()
    }

    fn wait(&self, until: Option<Instant>) {
        if self.stage.clock.is_virtual() {
            self.wait_virtually(until)
        } else {
            self.wait_really(until)
        }
    }
}

impl Seat {
    /// The clock jumps from event to event, of whichever model.
    fn wait_virtually(&self, until: Option<Instant>) {
        loop {
            let next = self.stage.turn_all();
            if self.model.take_interrupt() {
                return;
            }
            let now = self.now();
            let next = next.map(|next| Instant(next.0.max(now.0.saturating_add(1))));
            match (next, until) {
                (_, Some(until)) if until <= now => return,
                (Some(next), until) => {
                    self.stage.clock.advance_to(until.map_or(next, |until| until.min(next)));
                }
                (None, Some(until)) => self.stage.clock.advance_to(until),
                // Nothing will ever happen: the caller must find that out.
                (None, None) => return,
            }
        }
    }

    fn wait_really(&self, until: Option<Instant>) {
        loop {
            let now = self.now();
            let next = self.model.turn(now);
            if self.model.take_interrupt() || until.is_some_and(|until| until <= now) {
                return;
            }
            let limit = [next, until].into_iter().flatten().min().map(|at| at.since(now));
            match limit {
                Some(limit) if limit <= AWAKE_BEFORE => std::thread::yield_now(),
                Some(limit) => std::thread::sleep((limit - AWAKE_BEFORE).min(SLEEP_MAX)),
                None => std::thread::sleep(SLEEP_MAX),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Interrupts at given moments.
    struct Bell {
        due: Mutex<Vec<u64>>,
        rung: Mutex<bool>,
    }

    impl Bell {
        fn new(due: &[u64]) -> Arc<Bell> {
            Arc::new(Bell { due: Mutex::new(due.to_vec()), rung: Mutex::default() })
        }
    }

    impl Turn for Bell {
        fn turn(&self, now: Instant) -> Option<Instant> {
            let mut due = self.due.lock().unwrap();
            let before = due.len();
            due.retain(|at| *at > now.0);
            *self.rung.lock().unwrap() |= due.len() < before;
            due.iter().copied().min().map(Instant)
        }

        fn take_interrupt(&self) -> bool {
            std::mem::take(&mut *self.rung.lock().unwrap())
        }
    }

    #[test]
    fn virtual_time_jumps_to_what_happens_next() {
        let stage = Stage::new(SoftClock::virtual_from(Instant(0)));
        let (one, two) = (Bell::new(&[100, 300]), Bell::new(&[50, 200]));
        let one = stage.seat(one);
        let _two = stage.seat(two.clone());
        one.wait(None);
        assert_eq!(one.now(), Instant(100));
        one.wait(Some(Instant(250)));
        assert_eq!(one.now(), Instant(250));
        assert!(two.take_interrupt());
        one.wait(Some(Instant(1000)));
        assert_eq!(one.now(), Instant(300));
        one.wait(None);
        one.wait(Some(Instant(1000)));
        assert_eq!(one.now(), Instant(1000));
    }

    #[test]
    fn real_time_is_waited_for() {
        let stage = Stage::new(SoftClock::real());
        let begin = stage.clock().now();
        let bell = stage.seat(Bell::new(&[begin.0 + 3_000_000]));
        bell.wait(Some(begin.after(Duration::from_secs(60))));
        assert!(bell.now().since(begin) >= Duration::from_millis(3));
        assert!(!bell.poll());
    }
}
