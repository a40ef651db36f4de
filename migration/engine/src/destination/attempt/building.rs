//! Building the machine that a source describes: on a thread of its own, as it may take long.

use super::super::events::Event;
use super::Attempt;
use crate::BuildRequest;
use crate::{DestinationVmm, host};
use martlet_protocol::DestinationEvent;
use martlet_units::{ByteCount, PAGE_SIZE};
use martlet_wire::control::Setup;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The thread that builds. It posts one [`Event::Built`].
pub(super) struct Builder {
    thread: JoinHandle<()>,
    cancelled: Arc<AtomicBool>,
}

impl Builder {
    /// Nobody needs the machine any more: it ends with the step that it is at.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn join(self) {
        self.cancel();
        let _ = self.thread.join();
    }
}

impl Attempt {
    pub(super) fn build(&mut self, setup: Setup) {
        self.shared.name_attempt(setup.migration);
        if let Err(reason) = self.try_build(setup) {
            self.tell(DestinationEvent::BuildFailed { reason });
        }
    }

    fn try_build(&mut self, setup: Setup) -> Result<(), String> {
        let layout = setup.layout().map_err(|error| error.to_string())?;
        self.check_size(&setup)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let (factory, events) = (Arc::clone(&self.shared.factory), Arc::clone(&self.events));
        let (peer, is_cancelled) = (self.peer, Arc::clone(&cancelled));
        let thread = host::spawn("martlet-build", move || {
            let built = host::guarded(|| {
                let description = &setup.machine;
                let is_cancelled = &is_cancelled;
                let request = BuildRequest { description, layout: &layout, peer, is_cancelled };
                let vmm = factory.build(&request).map_err(|error| error.to_line())?;
                assert!(vmm.ram().layout() == layout, "the factory builds what it is told to");
                Ok(vmm)
            });
            events.post(Event::Built(built.and_then(|built| built)));
        });
        let thread = thread.map_err(|error| format!("cannot build the machine: {error}"))?;
        self.builder = Some(Builder { thread, cancelled });
        Ok(())
    }

    /// Before anything is made for a peer of whom nothing is known: what a guest's memory costs the
    /// host begins with tables for it.
    fn check_size(&self, setup: &Setup) -> Result<(), String> {
        let pages = setup.regions.iter().map(|region| region.pages);
        let bytes = pages.fold(0_u64, u64::saturating_add).saturating_mul(PAGE_SIZE);
        let most = self.shared.options.memory_max;
        if bytes > most.0 {
            let bytes = ByteCount(bytes);
            return Err(format!(
                "the guest has {bytes} of memory, at most {most} are taken here: what the host \
                 has, or the limit set with --memory-max"
            ));
        }
        Ok(())
    }

    pub(super) fn on_built(&mut self, built: Result<Arc<dyn DestinationVmm>, String>) {
        match built {
            Ok(vmm) => {
                self.vmm = Some(vmm);
                self.tell(DestinationEvent::Built);
            }
            Err(reason) => self.tell(DestinationEvent::BuildFailed { reason }),
        }
    }
}
