//! A guest in memory, moved within one process.
#![allow(clippy::unwrap_used, reason = "an example")]
use martlet_engine::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;

#[derive(Clone)]
struct Vmm {
    memory: DirtyMarker,
    guest: Arc<Guest>,
}

#[derive(Default)]
struct Guest {
    register: AtomicU64, // of its only vCPU, which is a thread
    is_running: AtomicBool,
    vcpu: Mutex<Option<JoinHandle<()>>>,
    permit: Mutex<Option<RunPermit>>, // who has it runs the guest, and nobody else does
}

impl Vmm {
    fn new(layout: &[PageRange]) -> Result<Vmm, Error> {
        let ram = Arc::new(GuestRam::create(layout)?);
        Ok(Vmm { memory: DirtyMarker::new(ram), guest: Arc::default() })
    }
    fn run(&self) {
        let Vmm { memory, guest } = self.clone();
        guest.is_running.store(true, SeqCst);
        *self.guest.vcpu.lock().unwrap() = Some(thread::spawn(move || {
            while guest.is_running.load(SeqCst) {
                let number = guest.register.fetch_add(1, SeqCst);
                memory.write(Gpa(number % 64 * PAGE_SIZE), &number.to_le_bytes()).unwrap();
                thread::sleep(Duration::from_micros(20));
            }
        }));
    }
    fn stop(&self) {
        self.guest.is_running.store(false, SeqCst);
        self.guest.vcpu.lock().unwrap().take().map(JoinHandle::join);
    }
}

impl SourceVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.memory.ram())
    }
    fn track(&self) -> Result<Tracker, TrackError> {
        Ok(Tracker::lease(self.memory.ram())?.with(Box::new(self.memory.source())))
    }
    fn begin_pause(&self, _: &Waker) {
        self.stop(); // the vCPU sleeps 20 us at most
    }
    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        let permit = self.guest.permit.lock().unwrap().take().expect("the guest is here");
        Poll::Ready(Ok(Paused { permit, was: RunState::Running }))
    }
    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        Poll::Ready(Ok(self.guest.register.load(SeqCst).to_le_bytes().to_vec()))
    }
    fn resume(&self, paused: Option<Paused>) {
        if let Some(Paused { permit, .. }) = paused {
            *self.guest.permit.lock().unwrap() = Some(permit);
        }
        self.stop();
        self.run();
    }
}

impl DestinationVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.memory.ram())
    }
    fn load_state(&self, state: &[u8], _: LoadFor) -> Result<(), Error> {
        let state = state.try_into().map_err(|_| Error::vmm("load the state", "not 8 bytes"))?;
        self.guest.register.store(u64::from_le_bytes(state), SeqCst);
        Ok(())
    }
    fn start(&self, permit: RunPermit, _: RunState) {
        *self.guest.permit.lock().unwrap() = Some(permit);
        self.run();
    }
}

fn main() {
    let factory = |request: &BuildRequest<'_>| -> Result<Arc<dyn DestinationVmm>, Error> {
        Ok(Arc::new(Vmm::new(request.layout)?))
    };
    let here = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver = Receiver::start(&here, Arc::new(factory), Default::default()).unwrap();
    let vmm = Vmm::new(&[PageRange::try_new(Gfn(0), PageCount(64)).unwrap()]).unwrap();
    vmm.start(RunPermit::for_new_guest(), RunState::Running);
    let options = MigrateOptions { verify: true, ..Default::default() };
    let moving = Migration::start(Arc::new(vmm), &receiver.address(), options).unwrap();
    let report = moving.wait(Duration::from_secs(60)).unwrap();
    assert_eq!((report.outcome, report.transfer.memory_equal), (Outcome::Completed, Some(true)));
}
