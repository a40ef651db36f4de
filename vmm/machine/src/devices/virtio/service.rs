//! The thread that gives the devices their turns.

use crate::clock;
use crate::vcpu::lock;
use martlet_vdpa::VdpaDevice;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time between two turns: a device that asks for nothing may still be interrupted by its
/// hardware, and its trait has no way to say so.
const IDLE_MAX: Duration = Duration::from_millis(5);
/// Shortest time between two turns, also for a device that wants one at once: the thread shares
/// the processors with the guest.
const IDLE_MIN: Duration = Duration::from_micros(100);

/// Runs until it is dropped.
pub(super) struct Service {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Service {
    pub(super) fn start(devices: Vec<Arc<dyn VdpaDevice>>) -> io::Result<Service> {
        let stop = Arc::new(Stop::default());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("martlet-vdpa".into())
            .spawn(move || serve(&devices, &stopped))?;
        Ok(Service { stop, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        *lock(&self.stop.is_over) = true;
        self.stop.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(devices: &[Arc<dyn VdpaDevice>], stop: &Stop) {
    let mut is_over = lock(&stop.is_over);
    while !*is_over {
        drop(is_over);
        let next = devices.iter().filter_map(|device| device.service()).min();
        let wait = next.map_or(IDLE_MAX, |at| at.since(clock::now()).clamp(IDLE_MIN, IDLE_MAX));
        is_over = lock(&stop.is_over);
        if !*is_over {
            let waited = stop.changed.wait_timeout(is_over, wait);
            is_over = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard);
        }
    }
}
