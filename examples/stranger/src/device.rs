//! A device of this VMM: a thread that writes guest memory all the time, by the marker.

use crate::{Fail, lock};
use martlet_engine::{DirtyMarker, Gpa};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Where the number of its last write stands: below the guest's own memory, which leaves it alone.
const NUMBER: Gpa = Gpa(0x10_0000);
/// The pages behind that, which get the numbers in turn.
const PAGE_COUNT: u64 = 16;

pub(crate) struct Device {
    pub(crate) marker: DirtyMarker,
    is_on: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Device {
    pub(crate) fn new(marker: DirtyMarker) -> Arc<Device> {
        Arc::new(Device { marker, is_on: false.into(), thread: Mutex::default() })
    }

    /// Sets it going, if its memory is as it left it.
    pub(crate) fn go(self: &Arc<Self>) -> Result<(), Fail> {
        let number = self.read(NUMBER)?;
        let found = self.read(place(number))?;
        if found != number {
            return Err(format!("the device wrote {number}, and its page holds {found}").into());
        }
        self.is_on.store(true, Ordering::SeqCst);
        let device = Arc::clone(self);
        *lock(&self.thread) = Some(thread::spawn(move || device.serve(number)));
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.is_on.store(false, Ordering::SeqCst);
    }

    /// Whether it writes no more.
    pub(crate) fn is_out(&self) -> bool {
        lock(&self.thread).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// When this returns it writes no more, and all that it wrote is marked.
    pub(crate) fn wait(&self) {
        if let Some(thread) = lock(&self.thread).take() {
            thread.join().expect("the device has not panicked");
        }
    }

    fn serve(&self, mut number: u64) {
        while self.is_on.load(Ordering::SeqCst) {
            number += 1;
            for at in [place(number), NUMBER] {
                self.marker.write(at, &number.to_le_bytes()).expect("the guest has this memory");
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    fn read(&self, at: Gpa) -> Result<u64, Fail> {
        let mut bytes = [0; 8];
        self.marker.ram().read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

fn place(number: u64) -> Gpa {
    Gpa(NUMBER.0 + (1 + number % PAGE_COUNT) * 4096)
}
