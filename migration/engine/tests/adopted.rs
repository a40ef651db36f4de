//! Memory of a VMM's own, moved between different kinds of it, while threads write it all the time.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_engine::{
    BuildRequest, DestinationVmm, Error, LoadFor, MigrateOptions, Migration, Outcome, Paused,
    ReceiveStatus, Receiver, RunPermit, RunState, SourceVmm,
};
use martlet_ram::{DirtyMarker, GuestRam, TrackError, Tracker, VmMemoryPages};
use martlet_units::{Gpa, PAGE_SIZE};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const LIMIT: Duration = Duration::from_secs(60);
/// Two regions with a hole between them.
const REGIONS: [(u64, usize); 2] = [(0, 1 << 20), (16 << 20, 2 << 20)];
/// Each writer numbers its writes, and puts the numbers into its pages in turn.
const PAGES: u64 = 100;
const AREAS: [u64; 2] = [0x1_0000, (16 << 20) + 0x1_0000];

#[derive(Clone, Copy, Debug)]
enum Kind {
    Anonymous,
    Files,
}

type Memory = GuestMemoryMmap<AtomicBitmap>;

fn memory(kind: Kind) -> Memory {
    let file = |bytes: usize| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("vmm", flags).unwrap());
        file.set_len(bytes as u64 + 5 * PAGE_SIZE).unwrap();
        FileOffset::new(file, 5 * PAGE_SIZE)
    };
    let regions = REGIONS.map(|(start, bytes)| {
        let file = matches!(kind, Kind::Files).then(|| file(bytes));
        (GuestAddress(start), bytes, file)
    });
    Memory::from_ranges_with_files(regions).unwrap()
}

/// What the devices' threads share.
struct Devices {
    memory: Memory,
    marker: DirtyMarker,
    are_on: AtomicBool,
    numbers: [AtomicU64; 2],
}

impl Devices {
    fn write(&self, device: usize, number: u64) {
        let at = AREAS[device] + number % PAGES * PAGE_SIZE;
        if device == 0 {
            self.memory.write_obj(number, GuestAddress(at)).unwrap();
        } else {
            self.marker.write(Gpa(at), &number.to_le_bytes()).unwrap();
        }
    }

    fn serve(&self, device: usize) {
        while self.are_on.load(SeqCst) {
            let number = self.numbers[device].load(SeqCst) + 1;
            self.write(device, number);
            self.numbers[device].store(number, SeqCst);
            thread::yield_now();
        }
    }

    /// All pages hold the numbers that were written there last.
    fn check(&self) -> Result<(), Error> {
        for (area, last) in AREAS.iter().zip(&self.numbers) {
            let last = last.load(SeqCst);
            for number in last.saturating_sub(PAGES - 1).max(1)..=last {
                let at = area + number % PAGES * PAGE_SIZE;
                let found: u64 = self.memory.read_obj(GuestAddress(at)).unwrap();
                if found != number {
                    let what = format!("{found} at {at:#x}, where {number} was written");
                    return Err(Error::vmm("set the devices going", what));
                }
            }
        }
        Ok(())
    }
}

/// A machine without a vCPU.
struct Vmm {
    devices: Arc<Devices>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    permit: Mutex<Option<RunPermit>>,
    /// Its devices won't go.
    is_broken: bool,
}

impl Vmm {
    fn new(kind: Kind, is_broken: bool) -> Arc<Vmm> {
        let memory = memory(kind);
        let marker = DirtyMarker::new(Arc::new(GuestRam::from_vm_memory(&memory).unwrap()));
        let numbers = [0.into(), 0.into()];
        let devices = Devices { memory, marker, are_on: false.into(), numbers };
        let devices = Arc::new(devices);
        let (threads, permit) = (Mutex::default(), Mutex::default());
        Arc::new(Vmm { devices, threads, permit, is_broken })
    }

    fn devices_go(&self) {
        self.devices.are_on.store(true, SeqCst);
        for device in 0..AREAS.len() {
            let devices = Arc::clone(&self.devices);
            self.threads.lock().unwrap().push(thread::spawn(move || devices.serve(device)));
        }
    }

    fn devices_stand(&self) {
        self.devices.are_on.store(false, SeqCst);
        self.threads.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
    }

    fn state(&self) -> Vec<u8> {
        let numbers = self.devices.numbers.each_ref().map(|number| number.load(SeqCst));
        numbers.map(u64::to_le_bytes).concat()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.devices_stand();
    }
}

impl SourceVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.devices.marker.ram())
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        let tracker = Tracker::lease(self.devices.marker.ram())?;
        let through_vm_memory = VmMemoryPages::new(&self.devices.memory);
        let marked = self.devices.marker.source();
        Ok(tracker.with(Box::new(through_vm_memory)).with(Box::new(marked)))
    }

    fn begin_suspend(&self, _: &Waker) {
        self.devices.are_on.store(false, SeqCst);
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        if self.threads.lock().unwrap().iter().all(JoinHandle::is_finished) {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    fn begin_pause(&self, _: &Waker) {}

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        let permit = self.permit.lock().unwrap().take().unwrap();
        Poll::Ready(Ok(Paused { permit, was: RunState::Running }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        Poll::Ready(Ok(self.state()))
    }

    fn resume(&self, paused: Option<Paused>) {
        if let Some(Paused { permit, was }) = paused {
            self.start(permit, was);
        }
        self.devices_stand();
        self.devices_go();
    }
}

impl DestinationVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.devices.marker.ram())
    }

    fn load_state(&self, state: &[u8], _: LoadFor) -> Result<(), Error> {
        let (numbers, _) = state.as_chunks();
        for (own, number) in self.devices.numbers.iter().zip(numbers) {
            own.store(u64::from_le_bytes(*number), SeqCst);
        }
        Ok(())
    }

    fn start(&self, permit: RunPermit, _: RunState) {
        *self.permit.lock().unwrap() = Some(permit);
    }

    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        if self.is_broken {
            let error = Error::vmm("set the devices going", "one is broken");
            return Poll::Ready(Err(error));
        }
        self.devices.check()?;
        self.devices_go();
        Poll::Ready(Ok(()))
    }
}

/// What became of the guest, and of its devices.
fn move_to(
    (kind, is_broken): (Kind, bool),
    source: Arc<Vmm>,
    verify: bool,
) -> (Arc<Vmm>, Option<String>) {
    let before = source.state();
    let factory = move |_: &BuildRequest<'_>| -> Result<Arc<dyn DestinationVmm>, Error> {
        Ok(Vmm::new(kind, is_broken))
    };
    let listen = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver = Receiver::start(&listen, Arc::new(factory), Default::default()).unwrap();
    let options = MigrateOptions { verify, ..MigrateOptions::default() };
    let migration = Migration::start(source, &receiver.address(), options).unwrap();
    let report = migration.wait(LIMIT).unwrap();
    assert_eq!(report.outcome, Outcome::Completed, "{:?}", report.error);
    assert_eq!(report.transfer.memory_equal, verify.then_some(true));
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
    receiver.stop();
    let arrived = receiver.machine::<Vmm>().unwrap();
    assert_ne!(arrived.state(), before, "the devices wrote meanwhile");
    (arrived, report.switchover.unwrap().devices.trouble)
}

fn booted() -> Arc<Vmm> {
    let vmm = Vmm::new(Kind::Anonymous, false);
    vmm.start(RunPermit::for_new_guest(), RunState::Running);
    vmm.devices_go();
    vmm
}

#[test]
fn devices_write_all_through_moves_between_kinds_of_memory() {
    let mut vmm = booted();
    for verify in [false, true, false] {
        for kind in [Kind::Files, Kind::Anonymous] {
            let (arrived, trouble) = move_to((kind, false), vmm, verify);
            assert_eq!(trouble, None, "to {kind:?}");
            vmm = arrived;
        }
    }
    vmm.devices_stand();
    vmm.devices.check().unwrap();
}

#[test]
fn a_device_that_does_not_work_there_is_in_the_report() {
    let (_arrived, trouble) = move_to((Kind::Files, true), booted(), false);
    assert_eq!(trouble.as_deref(), Some("cannot set the devices going: one is broken"));
}
