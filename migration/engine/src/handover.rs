//! One thing that a thread works on, and that another may take over for a while.
//!
//! ```text
//! the thread                         its owner
//! while let Some(mut it) = turn() {  take_over()   asks for it: the thread lets go after its step
//!     work a step                    try_get()     has it, once the thread has
//!     nothing to do? wait, with      give_back()   the thread goes on
//!     wake() among what ends that    poke()        there is something new to do
//! }                                  end()         turn() gives nothing more
//! ```

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, Wake};

/// See the module. The thread's side is [`Handover::turn`] and [`Handover::wake`]; the rest is the
/// owner's, who is one.
pub(crate) struct Handover<T> {
    it: Mutex<T>,
    /// Locked behind `it`, never before.
    state: Mutex<State>,
    /// It is no longer the owner's.
    changed: Condvar,
    wake: Wake,
}

struct State {
    whose: Whose,
    /// The wake is up. Raising and lowering it are system calls.
    raised: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Thread,
    Owner,
    Nobody,
}

impl<T> Handover<T> {
    /// The thread's, to begin with.
    pub(crate) fn new(it: T) -> std::io::Result<Handover<T>> {
        Ok(Handover {
            it: Mutex::new(it),
            state: Mutex::new(State { whose: Whose::Thread, raised: false }),
            changed: Condvar::new(),
            wake: Wake::new()?,
        })
    }

    /// Waits until it is the thread's; `None` once the thread is to end. Whatever the wake was
    /// raised for is to be looked at after this, and a later raise ends the next wait.
    pub(crate) fn turn(&self) -> Option<MutexGuard<'_, T>> {
        loop {
            let it = self.it.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.state();
            match state.whose {
                Whose::Thread => {
                    if std::mem::take(&mut state.raised) {
                        self.wake.lower();
                    }
                    return Some(it);
                }
                Whose::Nobody => return None,
                Whose::Owner => drop(it),
            }
            while state.whose == Whose::Owner {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// What the thread waits for, besides its own: raised when somebody wants something of it.
    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Asks for it. The thread ends its wait and lets go of it.
    pub(crate) fn take_over(&self) {
        let mut state = self.state();
        if state.whose == Whose::Thread {
            state.whose = Whose::Owner;
            self.raise(&mut state);
        }
    }

    /// It, unless the thread still has it, or panicked with it in hand.
    pub(crate) fn try_get(&self) -> Option<MutexGuard<'_, T>> {
        self.it.try_lock().ok()
    }

    /// Takes it over, and waits until the thread has let go of it.
    pub(crate) fn take(&self) -> MutexGuard<'_, T> {
        self.take_over();
        self.it.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread goes on, and looks for work first.
    pub(crate) fn give_back(&self) {
        self.pass_on(Whose::Thread);
    }

    /// The thread looks for work.
    pub(crate) fn poke(&self) {
        self.raise(&mut self.state());
    }

    /// The thread ends after its step. Nothing that it waits for keeps it, but for a call of its
    /// own that blocks.
    pub(crate) fn end(&self) {
        self.pass_on(Whose::Nobody);
    }

    fn pass_on(&self, to: Whose) {
        let mut state = self.state();
        if state.whose != Whose::Nobody {
            state.whose = to;
        }
        self.raise(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    fn raise(&self, state: &mut State) {
        if !std::mem::replace(&mut state.raised, true) {
            self.wake.raise();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
