//! Events from many threads to one that also polls sockets.

use martlet_transport::Wake;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// A queue whose reader waits in `poll` on [`Mailbox::wake`].
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    inner: Mutex<Inner<T>>,
    wake: Wake,
}

#[derive(Debug)]
struct Inner<T> {
    queue: VecDeque<T>,
    /// Whether the wake is up, so that a reader that looks often makes no system call.
    raised: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> std::io::Result<Mailbox<T>> {
        let inner = Mutex::new(Inner { queue: VecDeque::new(), raised: false });
        Ok(Mailbox { inner, wake: Wake::new()? })
    }

    pub(crate) fn post(&self, event: T) {
        let mut inner = self.lock();
        inner.queue.push_back(event);
        if !inner.raised {
            inner.raised = true;
            self.wake.raise();
        }
    }

    /// The oldest event. `None` lowers the wake, so poll only after a `None`.
    pub(crate) fn take(&self) -> Option<T> {
        let mut inner = self.lock();
        let event = inner.queue.pop_front();
        if event.is_none() && inner.raised {
            inner.raised = false;
            self.wake.lower();
        }
        event
    }

    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner<T>> {
        // A poisoned queue is still a queue: nothing here leaves it half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
