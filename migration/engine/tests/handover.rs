//! The handover of a lane or an intake, in every order that its threads can run in: loom tries them
//! all. It stands here with loom's locks and a wake to match.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../src/handover.rs"]
mod handover;

/// What it is made of there, as loom has it.
mod sync {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    /// As the transport's: a level.
    pub(crate) struct Wake {
        is_up: Mutex<bool>,
        raised: Condvar,
    }

    impl Wake {
        pub(crate) fn new() -> std::io::Result<Wake> {
            Ok(Wake { is_up: Mutex::new(false), raised: Condvar::new() })
        }

        pub(crate) fn raise(&self) {
            *self.is_up.lock().unwrap() = true;
            self.raised.notify_all();
        }

        pub(crate) fn lower(&self) {
            *self.is_up.lock().unwrap() = false;
        }

        /// As `poll`, without a limit: what nobody raises is waited for in vain.
        pub(crate) fn wait(&self) {
            let mut is_up = self.is_up.lock().unwrap();
            while !*is_up {
                is_up = self.raised.wait(is_up).unwrap();
            }
        }
    }
}

use handover::Handover;
use loom::sync::{Arc, Condvar, Mutex};

/// What both sides see, apart from what is handed over: whether that is with its owner.
#[derive(Default)]
struct Seen {
    work: Mutex<u32>,
    done: Mutex<u32>,
    more_done: Condvar,
}

impl Seen {
    /// For ever, if the thread overlooks its work: loom tells.
    fn await_done(&self) {
        let mut done = self.done.lock().unwrap();
        while *done == 0 {
            done = self.more_done.wait(done).unwrap();
        }
    }
}

/// The thread: takes work, and waits with the thing in hand where there is none.
fn run(handover: &Handover<bool>, seen: &Seen) {
    while let Some(is_owners) = handover.turn() {
        assert!(!*is_owners);
        let took = std::mem::take(&mut *seen.work.lock().unwrap());
        match took {
            0 => handover.wake().wait(),
            _ => {
                *seen.done.lock().unwrap() += took;
                seen.more_done.notify_all();
            }
        }
    }
}

/// Runs `owner` beside the thread in every order; the thread ends by it.
fn in_every_order(owner: impl Fn(&Handover<bool>, &Seen) + Send + Sync + 'static) {
    loom::model(move || {
        let handover = Arc::new(Handover::new(false).unwrap());
        let seen = Arc::new(Seen::default());
        let thread = {
            let (handover, seen) = (Arc::clone(&handover), Arc::clone(&seen));
            loom::thread::spawn(move || run(&handover, &seen))
        };
        owner(&handover, &seen);
        thread.join().unwrap();
    });
}

#[test]
fn what_was_taken_over_is_the_owners_alone() {
    in_every_order(|handover, seen| {
        *handover.take() = true;
        // As between two looks: the thread must not slip in.
        *seen.work.lock().unwrap() = 1;
        handover.poke();
        let mut is_owners = loop {
            match handover.try_get() {
                Some(it) => break it,
                // It is finding out that this is not its turn.
                None => loom::thread::yield_now(),
            }
        };
        assert_eq!(*seen.done.lock().unwrap(), 0);
        *is_owners = false;
        drop(is_owners);
        handover.end();
    });
}

#[test]
fn work_is_seen_however_the_thread_waits() {
    in_every_order(|handover, seen| {
        *seen.work.lock().unwrap() = 1;
        handover.poke();
        seen.await_done();
        handover.end();
    });
}

#[test]
fn work_that_came_while_it_was_taken_over_is_seen_after_it() {
    in_every_order(|handover, seen| {
        handover.take_over();
        *seen.work.lock().unwrap() = 1;
        handover.poke();
        handover.give_back();
        seen.await_done();
        handover.end();
    });
}

#[test]
fn an_end_is_heard_whoever_has_it() {
    in_every_order(|handover, _| handover.end());
    in_every_order(|handover, _| {
        handover.take_over();
        handover.end();
    });
    in_every_order(|handover, _| {
        drop(handover.take());
        handover.end();
        // Nothing brings it back.
        handover.give_back();
    });
}
