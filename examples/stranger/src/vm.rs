//! The VM: memory of vm-memory, one vCPU, one device; and what the engine asks of it.
#![allow(unsafe_code)]
// UNSAFETY: gives memory to KVM.

use crate::device::Device;
use crate::vcpu::Vcpu;
use crate::{Fail, guest, lock};
use kvm_ioctls::Kvm;
use martlet_engine::kvm::{KvmLog, KvmSlots};
use martlet_engine::{
    BuildRequest, DestinationVmm, DirtyMarker, Error, GuestRam, LoadFor, PAGE_SIZE, Paused,
    RunPermit, RunState, SourceVmm, TrackError, Tracker,
};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use vm_memory::{GuestAddress, GuestMemoryMmap};

const MEMORY_BYTES: usize = 64 << 20;

pub(crate) struct Vm {
    vcpu: Arc<Vcpu>,
    device: Arc<Device>,
    /// The right to run the guest, while it is here.
    permit: Mutex<Option<RunPermit>>,
    slots: Arc<KvmSlots>,
}

impl Vm {
    /// Boots a new guest.
    pub(crate) fn boot() -> Result<Arc<Vm>, Fail> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)])?;
        let entry = guest::load(&memory)?;
        let vm = Vm::new(&memory)?;
        vm.vcpu.begin(entry)?;
        vm.start(RunPermit::for_new_guest(), RunState::Running);
        vm.device.go()?;
        Ok(Arc::new(vm))
    }

    /// Builds one for a guest that is to arrive.
    pub(crate) fn build(request: &BuildRequest<'_>) -> Result<Arc<Vm>, Fail> {
        let mut ranges = Vec::new();
        for range in request.layout {
            let start = GuestAddress(range.start().0 * PAGE_SIZE);
            ranges.push((start, usize::try_from(range.pages().to_bytes().0)?));
        }
        Ok(Arc::new(Vm::new(&GuestMemoryMmap::from_ranges(&ranges)?)?))
    }

    fn new(memory: &GuestMemoryMmap) -> Result<Vm, Fail> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        let ram = Arc::new(GuestRam::from_vm_memory(memory)?);
        let numbers: Vec<u32> = (0..).take(ram.regions().len()).collect();
        // SAFETY: the vCPU's thread has ended when this VM is dropped, and the memory with it.
        let slots = unsafe { KvmSlots::new(&vm, Arc::clone(&ram), &numbers) }?;
        let device = Device::new(DirtyMarker::new(ram));
        let vcpu = Vcpu::new(&kvm, &vm)?;
        Ok(Vm { vcpu, device, permit: Mutex::default(), slots: Arc::new(slots) })
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.vcpu.stop();
        self.device.stop();
        let _ = self.vcpu.wait();
        self.device.wait();
    }
}

/// Says what was being done.
pub(crate) fn when(doing: &'static str) -> impl Fn(Fail) -> Error {
    move |error| Error::vmm(doing, error.to_string())
}

impl SourceVmm for Vm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.slots.ram())
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        let tracker = Tracker::lease(self.slots.ram())?;
        let (vcpu, device) = (KvmLog::start(&self.slots)?, self.device.marker.source());
        Ok(tracker.with(Box::new(vcpu)).with(Box::new(device)))
    }

    fn begin_suspend(&self, _: &Waker) {
        self.device.stop();
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        if self.device.is_out() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn begin_pause(&self, _: &Waker) {
        self.vcpu.stop();
    }

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        if !self.vcpu.is_out() {
            return Poll::Pending;
        }
        self.vcpu.wait().map_err(when("stop the guest"))?;
        let permit = lock(&self.permit).take();
        let permit = permit.ok_or_else(|| Error::vmm("stop the guest", "it is not here"))?;
        Poll::Ready(Ok(Paused { permit, was: RunState::Running }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        Poll::Ready(self.vcpu.save().map_err(when("save the state")))
    }

    fn resume(&self, paused: Option<Paused>) {
        match paused {
            Some(Paused { permit, was }) => self.start(permit, was),
            // It is out in a moment. A VMM of many vCPUs waits for them on another thread.
            None => {
                self.vcpu.stop();
                if self.vcpu.wait().is_ok() {
                    self.vcpu.run();
                }
            }
        }
        self.device.wait();
        self.device.go().expect("its memory is here");
    }
}

impl DestinationVmm for Vm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.slots.ram())
    }

    fn load_state(&self, state: &[u8], _: LoadFor) -> Result<(), Error> {
        self.vcpu.load(state).map_err(when("load the state"))
    }

    fn start(&self, permit: RunPermit, state: RunState) {
        *lock(&self.permit) = Some(permit);
        if state == RunState::Running {
            self.vcpu.run();
        }
    }

    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        Poll::Ready(self.device.go().map_err(when("resume the device")))
    }
}
