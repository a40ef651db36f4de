//! Registering and deregistering on threads of their own: both take milliseconds.

use crossbeam_channel::{Receiver, Sender};
use martlet_device_io::HostMemory;
use martlet_ram::{GuestRam, RegionIndex};
use martlet_rdma::UnitIndex;
use martlet_transport::Wake;
use martlet_verbs::Region as _;
use martlet_verbs::{Access, Fabric, Lkey, RemoteAddress, Rkey};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that register. Pinning is the kernel's work on pages, so more than a few only wait for
/// each other's locks.
const THREADS_MAX: usize = 4;

/// What a unit's registration gave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys {
    pub(super) local: Lkey,
    pub(super) remote: Rkey,
    pub(super) address: RemoteAddress,
}

/// An errand that was done.
#[derive(Debug)]
pub(super) enum Done {
    Registered(UnitIndex, Result<Keys, String>),
    Deregistered(UnitIndex),
}

/// Pages that are to be there before they are registered, so that many threads fault them in side
/// by side instead of one behind the other's lock.
pub(super) struct Populate {
    pub(super) ram: Arc<GuestRam>,
    pub(super) region: RegionIndex,
    pub(super) pages: Range<u64>,
}

enum Job {
    Register { unit: UnitIndex, memory: HostMemory, access: Access, populate: Option<Populate> },
    Deregister(UnitIndex),
}

/// The threads, and the regions that they made.
pub(super) struct Errands {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    wake: Arc<Wake>,
}

impl Errands {
    pub(super) fn start<F: Fabric>(fabric: &Arc<F>) -> io::Result<Errands> {
        let (jobs, work) = crossbeam_channel::unbounded::<Job>();
        let (tell, done) = crossbeam_channel::unbounded();
        let wake = Arc::new(Wake::new()?);
        let regions = Arc::new(Mutex::new(HashMap::new()));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..cores.min(THREADS_MAX) {
            let (fabric, regions) = (Arc::clone(fabric), Arc::clone(&regions));
            let (work, tell, wake) = (work.clone(), tell.clone(), Arc::clone(&wake));
            std::thread::Builder::new().name("martlet-pin".to_owned()).spawn(move || {
                for job in work {
                    let done = perform(fabric.as_ref(), &regions, job);
                    let told = tell.send(done).is_ok();
                    wake.raise();
                    if !told {
                        return;
                    }
                }
            })?;
        }
        Ok(Errands { jobs, done, wake })
    }

    pub(super) fn register(
        &self,
        unit: UnitIndex,
        memory: HostMemory,
        access: Access,
        populate: Option<Populate>,
    ) {
        let _ = self.jobs.send(Job::Register { unit, memory, access, populate });
    }

    pub(super) fn deregister(&self, unit: UnitIndex) {
        let _ = self.jobs.send(Job::Deregister(unit));
    }

    /// An errand that is done; `None` lowers the wake.
    pub(super) fn take(&self) -> Option<Done> {
        self.done.try_recv().ok().or_else(|| {
            self.wake.lower();
            // One that came in between has raised it before it was lowered.
            self.done.try_recv().ok()
        })
    }

    /// Whether any is done, without a system call.
    pub(super) fn is_any_done(&self) -> bool {
        !self.done.is_empty()
    }

    pub(super) fn wake(&self) -> &Wake {
        &self.wake
    }
}

fn perform<F: Fabric>(
    fabric: &F,
    regions: &Mutex<HashMap<UnitIndex, F::Region>>,
    job: Job,
) -> Done {
    let lock = || regions.lock().unwrap_or_else(PoisonError::into_inner);
    match job {
        Job::Register { unit, memory, access, populate } => {
            if let Some(Populate { ram, region, pages }) = populate
                && let Some(region) = ram.region(region)
            {
                // What can't be populated is faulted in by the registration, or fails there.
                let _ = region.populate(pages);
            }
            let result = fabric.register(&memory, access).map_err(|error| crate::chain(&error));
            let keys = result.map(|region| {
                let keys = Keys {
                    local: region.local_key(),
                    remote: region.remote_key(),
                    address: region.address(),
                };
                lock().insert(unit, region);
                keys
            });
            Done::Registered(unit, keys)
        }
        Job::Deregister(unit) => {
            let region = lock().remove(&unit);
            // What can't be taken back is taken back when the device is closed.
            drop(region.map(|region| region.deregister()));
            Done::Deregistered(unit)
        }
    }
}
