//! The thread that is the hardware, in real time.

use super::Nic;
use crate::Model;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread sleeps between two looks at queues whose guests were asked not to kick.
/// Frames that come meanwhile are served together.
const NAP: Duration = Duration::from_micros(50);

/// Looks in vain after which a queue's guest has to kick again.
const VAIN_LOOKS_MAX: u32 = 20;

/// Wakes the thread.
#[derive(Debug)]
pub(crate) struct Wake {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl Wake {
    fn new() -> io::Result<Wake> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Wake { event, asleep: AtomicBool::new(false) })
    }

    /// Wakes the thread if it sleeps. What the caller has noted before is seen.
    pub(crate) fn wake(&self) {
        // The thread says that it sleeps, then looks once more; the caller notes what there is,
        // then looks whether it sleeps. One of the two sees the other.
        fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Sleeps until woken, unless `is_idle` says no at the last moment.
    fn sleep(&self, is_idle: impl Fn() -> bool) {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if is_idle() {
            let _ = poll(&mut [PollFd::new(&self.event, PollFlags::IN)], None);
            let mut count = [0; 8];
            let _ = rustix::io::read(self.event.as_fd(), &mut count);
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// A thread that moves the frames of one or more models in real time. It sleeps while there is
/// nothing to do; under load it looks at busy queues by itself, so that their guests need not
/// kick. Its drop ends it.
pub struct Hardware {
    stop: Arc<AtomicBool>,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

impl Hardware {
    /// Starts it. A model has one thread for its life: giving it to a second one is an error.
    pub fn start(models: &[Arc<Model>]) -> io::Result<Hardware> {
        let wake = Arc::new(Wake::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let taken = models.iter().any(|model| model.nic().has_thread());
        if taken || !models.iter().all(|model| model.nic().adopt(&wake, VAIN_LOOKS_MAX)) {
            return Err(io::Error::other("the model has a thread already"));
        }
        let worker = Worker {
            nics: models.iter().map(|model| Arc::clone(model.nic())).collect(),
            models: models.to_vec(),
            stop: Arc::clone(&stop),
            wake: Arc::clone(&wake),
        };
        let thread = std::thread::Builder::new()
            .name("mlx5-hardware".to_owned())
            .spawn(move || worker.run())?;
        Ok(Hardware { stop, wake, thread: Some(thread) })
    }
}

impl Drop for Hardware {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.wake();
        if let Some(thread) = self.thread.take() {
            // It holds nothing that a panic could have left half done.
            let _ = thread.join();
        }
    }
}

struct Worker {
    models: Vec<Arc<Model>>,
    nics: Vec<Arc<Nic>>,
    stop: Arc<AtomicBool>,
    wake: Arc<Wake>,
}

impl Worker {
    fn run(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            let mut worked = false;
            for model in &self.models {
                worked |= model.nic().step();
                model.turn_if_due();
            }
            if worked || self.nics.iter().any(|nic| nic.has_pending()) {
                continue;
            }
            if self.nics.iter().any(|nic| nic.has_hot()) {
                std::thread::sleep(NAP);
                for nic in &self.nics {
                    nic.look_at_hot();
                }
                continue;
            }
            self.wake.sleep(|| {
                let idle = !self.nics.iter().any(|nic| nic.has_pending());
                idle && !self.stop.load(Ordering::SeqCst)
            });
        }
    }
}
