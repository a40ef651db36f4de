//! A VMM without a hypervisor: a thread that writes pages is the guest.
#![allow(unsafe_code, dead_code, unreachable_pub, missing_docs)]
// UNSAFETY: the fake guest writes its memory through the region's pointers, as vCPUs do.

pub mod relay;

use martlet_engine::{
    BuildRequest, DestinationFactory, DestinationVmm, Error, GuestObserver, LoadFor, Paused,
    Rehearsal, Report, RunState, SourceVmm,
};
use martlet_protocol::RunPermit;
use martlet_ram::testing::Spoiled;
use martlet_ram::{DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError, Tracker};
use martlet_transport::monotonic_now;
use martlet_units::{Gfn, Instant, PAGE_SIZE, PageCount, PageRange};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

/// Pages of the fake guest; only the first half is ever touched.
pub const PAGES: u64 = 8192;

pub fn layout() -> Vec<PageRange> {
    let half = PageCount(PAGES / 2);
    vec![PageRange::try_new(Gfn(0), half).unwrap(), PageRange::try_new(Gfn(1 << 20), half).unwrap()]
}

#[derive(Default)]
struct Core {
    permit: Option<RunPermit>,
    paused_by_owner: bool,
    /// The guest's thread is outside the guest.
    out: bool,
}

/// One machine, good for both sides.
pub struct FakeVmm {
    ram: Arc<GuestRam>,
    core: Mutex<Core>,
    changed: Condvar,
    stop_request: AtomicBool,
    quit: AtomicBool,
    tracking: AtomicBool,
    dirty: Arc<RamBitmap>,
    heartbeat: AtomicU64,
    first_heartbeat: AtomicU64,
    /// The guest's registers: the number of its next write.
    counter: AtomicU64,
    /// Writes between two looks at the stop request.
    pub burst: AtomicU64,
    pub fail_load: AtomicBool,
    pub panic_load: AtomicBool,
    pub panic_resume: AtomicBool,
    /// The devices take as long to resume.
    pub hold_resume: AtomicBool,
    pub fail_save: AtomicBool,
    pub panic_in_state: AtomicBool,
    pub panic_in_description: AtomicBool,
    /// Writes all its pages in the moment before it stops.
    pub dirty_at_stop: AtomicBool,
    /// Set by the stop.
    pub at_stop: Mutex<Option<Arc<AtomicBool>>>,
    /// Takes longer to save than a destination may be unheard.
    pub slow_state: AtomicBool,
    /// Its final state is as long as many a guest's.
    pub long_state: AtomicBool,
    /// Its vCPU is never out of the guest.
    pub never_out: AtomicBool,
    stopped_at: Mutex<Option<Instant>>,
    /// How often it was set running again.
    pub resumed: AtomicU64,
    /// Takes longer to clean up than the protocol waits for a sign of life.
    pub slow_farewell: AtomicBool,
    /// So many of the next rehearsals measure a host that had something else to do.
    pub slow_rehearsals: AtomicU64,
    pub rehearsals: AtomicU64,
    pub rehearses_not: AtomicBool,
    pub device: FakeDevice,
}

/// A network card of the fake machine: writes pages by itself until it is suspended.
#[derive(Default)]
pub struct FakeDevice {
    /// There is one.
    pub present: AtomicBool,
    suspend_request: AtomicBool,
    suspended: AtomicBool,
    /// The number of its next write; part of the saved state.
    pub writes: AtomicU64,
    pub fail_suspend: AtomicBool,
    /// Never says that it is suspended.
    pub is_silent: AtomicBool,
    pub fail_resume: AtomicBool,
    /// It was told to suspend after the vCPUs had stopped.
    pub suspended_late: AtomicBool,
}

impl FakeVmm {
    pub fn new() -> Arc<FakeVmm> {
        let ram = Arc::new(GuestRam::create(&layout()).unwrap());
        let vmm = Arc::new(FakeVmm {
            dirty: Arc::new(RamBitmap::new(&ram)),
            ram,
            core: Mutex::new(Core { out: true, ..Core::default() }),
            changed: Condvar::new(),
            stop_request: AtomicBool::new(false),
            quit: AtomicBool::new(false),
            tracking: AtomicBool::new(false),
            heartbeat: AtomicU64::new(0),
            first_heartbeat: AtomicU64::new(0),
            counter: AtomicU64::new(0),
            burst: AtomicU64::new(4),
            fail_load: AtomicBool::new(false),
            panic_load: AtomicBool::new(false),
            panic_resume: AtomicBool::new(false),
            hold_resume: AtomicBool::new(false),
            fail_save: AtomicBool::new(false),
            panic_in_state: AtomicBool::new(false),
            panic_in_description: AtomicBool::new(false),
            dirty_at_stop: AtomicBool::new(false),
            at_stop: Mutex::new(None),
            slow_state: AtomicBool::new(false),
            long_state: AtomicBool::new(false),
            never_out: AtomicBool::new(false),
            stopped_at: Mutex::new(None),
            resumed: AtomicU64::new(0),
            slow_farewell: AtomicBool::new(false),
            slow_rehearsals: AtomicU64::new(0),
            rehearsals: AtomicU64::new(0),
            rehearses_not: AtomicBool::new(false),
            device: FakeDevice::default(),
        });
        let guest = Arc::clone(&vmm);
        std::thread::spawn(move || guest.guest_thread());
        vmm
    }

    /// Gives the machine its card. A waiting machine's is suspended.
    pub fn plug(self: &Arc<FakeVmm>, suspended: bool) {
        self.device.present.store(true, Ordering::SeqCst);
        self.device.suspend_request.store(suspended, Ordering::SeqCst);
        let vmm = Arc::clone(self);
        std::thread::spawn(move || vmm.device_thread());
    }

    fn device_thread(&self) {
        let device = &self.device;
        while !self.quit.load(Ordering::SeqCst) {
            let suspend = device.suspend_request.load(Ordering::SeqCst);
            device.suspended.store(suspend, Ordering::SeqCst);
            if !suspend {
                self.device_write();
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The card's pages are none of the guest's.
    fn device_write(&self) {
        let number = self.device.writes.fetch_add(1, Ordering::SeqCst);
        let page = PAGES / 4 + number % 64;
        let word = self.ram.region(RegionIndex(0)).unwrap().host_ptr(page).cast::<u64>();
        // SAFETY: an aligned word of a page of the region, which the machine keeps.
        unsafe { AtomicU64::from_ptr(word) }.fetch_add(1, Ordering::SeqCst);
        self.dirty.region(RegionIndex(0)).set(page);
    }

    fn resume_device(&self) {
        self.device.suspend_request.store(false, Ordering::SeqCst);
    }

    fn has_device(&self) -> bool {
        self.device.present.load(Ordering::SeqCst)
    }

    fn state(&self) -> Vec<u8> {
        let counters = [&self.counter, &self.device.writes];
        counters.iter().flat_map(|count| count.load(Ordering::SeqCst).to_le_bytes()).collect()
    }

    /// A guest that runs here from the start.
    pub fn booted() -> Arc<FakeVmm> {
        let vmm = FakeVmm::new();
        vmm.let_run(RunPermit::for_new_guest(), RunState::Running);
        vmm
    }

    pub fn pause_by_owner(&self) {
        self.core.lock().unwrap().paused_by_owner = true;
        self.stop_request.store(true, Ordering::SeqCst);
    }

    /// Stops the guest and checks that every write it ever made, and its card's, is in its memory.
    pub fn check_memory(&self) {
        self.pause_by_owner();
        let core = self.core.lock().unwrap();
        drop(self.changed.wait_while(core, |core| !core.out).unwrap());
        let device = self.device.writes.load(Ordering::SeqCst);
        assert_eq!(self.writes_in_memory(), self.writes() + device, "no write was lost");
    }

    /// Waits until the guest has made so many writes.
    pub fn await_writes(&self, count: u64) {
        while self.writes() < count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn is_running(&self) -> bool {
        let core = self.core.lock().unwrap();
        core.permit.is_some() && !core.paused_by_owner
    }

    pub fn holds_permit(&self) -> bool {
        self.core.lock().unwrap().permit.is_some()
    }

    pub fn writes(&self) -> u64 {
        self.counter.load(Ordering::SeqCst)
    }

    pub fn quit(&self) {
        self.quit.store(true, Ordering::SeqCst);
        self.stop_request.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn let_run(&self, permit: RunPermit, state: RunState) {
        let mut core = self.core.lock().unwrap();
        core.permit = Some(permit);
        core.paused_by_owner = state == RunState::Paused;
        self.stop_request.store(core.paused_by_owner, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn guest_thread(&self) {
        while !self.quit.load(Ordering::SeqCst) {
            let mut core = self.core.lock().unwrap();
            core.out = true;
            self.changed.notify_all();
            while core.permit.is_none()
                || core.paused_by_owner
                || self.stop_request.load(Ordering::SeqCst)
            {
                if self.quit.load(Ordering::SeqCst) {
                    return;
                }
                core = self.changed.wait_timeout(core, Duration::from_millis(20)).unwrap().0;
            }
            core.out = false;
            drop(core);
            while !self.stop_request.load(Ordering::SeqCst) {
                for _ in 0..self.burst.load(Ordering::Relaxed) {
                    self.guest_write();
                }
                let now = monotonic_now().0;
                self.heartbeat.store(now, Ordering::SeqCst);
                let _ = self.first_heartbeat.compare_exchange(
                    0,
                    now,
                    Ordering::SeqCst,
                    Ordering::SeqCst,
                );
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// The guest's program: word 0 of a page counts its writes, word 1 is the write's number.
    fn guest_write(&self) {
        let number = self.counter.fetch_add(1, Ordering::SeqCst);
        let page = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (PAGES / 4);
        let region = RegionIndex(u16::try_from(number % 2).unwrap());
        let words = self.ram.region(region).unwrap().host_ptr(page).cast::<u64>();
        // SAFETY: two aligned words of a page of the region, which the machine keeps.
        unsafe {
            AtomicU64::from_ptr(words).fetch_add(1, Ordering::SeqCst);
            AtomicU64::from_ptr(words.add(1)).store(number, Ordering::SeqCst);
        }
        if self.tracking.load(Ordering::SeqCst) {
            self.dirty.region(region).set(page);
        }
    }

    /// The sum of all pages' write counts, which must be the guest's own counter.
    pub fn writes_in_memory(&self) -> u64 {
        let mut sum = 0;
        for region in self.ram.regions() {
            for page in 0..region.pages() {
                let mut word = [0; 8];
                rustix::io::pread(region.file().unwrap().fd, &mut word[..], page * PAGE_SIZE)
                    .unwrap();
                sum += u64::from_ne_bytes(word);
            }
        }
        sum
    }
}

/// Why it did not move the guest, as people read it.
pub fn line(report: &Report) -> Option<String> {
    report.error.as_ref().map(Error::to_line)
}

/// What the guest stood, if that was measured.
pub fn blackout(report: &Report) -> Option<Duration> {
    report.switchover.as_ref()?.blackout
}

fn error(action: &'static str) -> Error {
    Error::vmm(action, "asked to fail")
}

struct Written(Arc<RamBitmap>);

impl DirtySource for Written {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (region, bitmap) in self.0.iter() {
            for word in 0..bitmap.word_count() {
                into.region(region).or_word(word, bitmap.take_word(word));
            }
        }
        Ok(())
    }

    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

impl SourceVmm for FakeVmm {
    fn machine_description(&self) -> Vec<u8> {
        assert!(!self.panic_in_description.load(Ordering::SeqCst), "asked to panic");
        b"fake".to_vec()
    }

    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        let tracker = Tracker::lease(&self.ram)?;
        for (_, bitmap) in self.dirty.iter() {
            bitmap.clear_range(0..bitmap.pages());
        }
        self.tracking.store(true, Ordering::SeqCst);
        Ok(tracker.with(Box::new(Written(Arc::clone(&self.dirty)))))
    }

    fn rehearse(&self) -> Result<Option<Rehearsal>, Error> {
        if self.rehearses_not.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let number = self.rehearsals.fetch_add(1, Ordering::SeqCst);
        let slow = number < self.slow_rehearsals.load(Ordering::SeqCst);
        Ok(Some(Rehearsal {
            pause: if slow { Duration::from_secs(10) } else { Duration::from_micros(100) },
            save: Duration::from_micros(10),
            state: self.state(),
        }))
    }

    fn set_throttle(&self, _: u8) {}

    fn begin_suspend(&self, _: &Waker) {
        let late = self.stop_request.load(Ordering::SeqCst);
        self.device.suspended_late.fetch_or(late, Ordering::SeqCst);
        self.device.suspend_request.store(true, Ordering::SeqCst);
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        if self.device.fail_suspend.load(Ordering::SeqCst) {
            self.resume_device();
            return Poll::Ready(Err(error("suspend card 0")));
        }
        if self.device.is_silent.load(Ordering::SeqCst)
            || self.has_device() && !self.device.suspended.load(Ordering::SeqCst)
        {
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn begin_pause(&self, _: &Waker) {
        self.stop_request.store(true, Ordering::SeqCst);
    }

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        if self.never_out.load(Ordering::SeqCst) || !self.core.lock().unwrap().out {
            return Poll::Pending;
        }
        if let Some(stopped) = &*self.at_stop.lock().unwrap() {
            stopped.store(true, Ordering::SeqCst);
        }
        if self.dirty_at_stop.load(Ordering::SeqCst) {
            for (region, bitmap) in self.dirty.iter() {
                bitmap.set_range(0..PAGES / 4);
                let memory = self.ram.region(region).unwrap();
                for page in 0..PAGES / 4 {
                    // Not zero, however few of them the guest has come to: word 2 is nobody's.
                    // SAFETY: an aligned word of a page of the region, which the machine keeps.
                    let word = unsafe { memory.host_ptr(page).cast::<u64>().add(2) };
                    // SAFETY: the same.
                    unsafe { AtomicU64::from_ptr(word).store(1, Ordering::SeqCst) };
                }
            }
        }
        let mut core = self.core.lock().unwrap();
        let permit = core.permit.take().expect("paused once");
        let was = if core.paused_by_owner { RunState::Paused } else { RunState::Running };
        *self.stopped_at.lock().unwrap() = Some(monotonic_now());
        Poll::Ready(Ok(Paused { permit, was }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        if self.fail_save.load(Ordering::SeqCst) {
            return Poll::Ready(Err(error("save")));
        }
        assert!(!self.panic_in_state.load(Ordering::SeqCst), "asked to panic");
        let stopped = self.stopped_at.lock().unwrap().expect("it is stopped");
        let is_slow = self.slow_state.load(Ordering::SeqCst);
        if is_slow && monotonic_now().since(stopped) < Duration::from_millis(400) {
            return Poll::Pending;
        }
        let mut state = self.state();
        if self.long_state.load(Ordering::SeqCst) {
            state.resize(512 << 10, 0);
        }
        Poll::Ready(Ok(state))
    }

    fn resume(&self, paused: Option<Paused>) {
        if let Some(Paused { permit, was }) = paused {
            self.resumed.fetch_add(1, Ordering::SeqCst);
            self.let_run(permit, was);
        } else {
            let paused_by_owner = self.core.lock().unwrap().paused_by_owner;
            self.stop_request.store(paused_by_owner, Ordering::SeqCst);
            self.changed.notify_all();
        }
        self.resume_device();
    }

    fn moved_away(&self) {
        if self.slow_farewell.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_secs(3));
        }
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(self)
    }
}

/// The moments of the first and of the last heartbeat in this process.
impl GuestObserver for FakeVmm {
    fn report(&self) -> Vec<u8> {
        let moments = [&self.first_heartbeat, &self.heartbeat];
        moments.iter().flat_map(|moment| moment.load(Ordering::SeqCst).to_le_bytes()).collect()
    }

    fn has_seen_all(&self) -> bool {
        self.first_heartbeat.load(Ordering::SeqCst) > 0
    }
}

impl DestinationVmm for FakeVmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn load_state(&self, state: &[u8], _: LoadFor) -> Result<(), Error> {
        let (counters, []) = state.as_chunks::<8>() else { return Err(error("load")) };
        let &[guest, device] = counters else { return Err(error("load")) };
        if self.fail_load.load(Ordering::SeqCst) {
            return Err(error("load"));
        }
        assert!(!self.panic_load.load(Ordering::SeqCst), "a test wants it");
        self.counter.store(u64::from_le_bytes(guest), Ordering::SeqCst);
        self.device.writes.store(u64::from_le_bytes(device), Ordering::SeqCst);
        Ok(())
    }

    fn arm(&self, _: Duration) {}

    fn start(&self, permit: RunPermit, state: RunState) {
        self.let_run(permit, state);
    }

    fn begin_resume(&self, _: &Waker) {
        assert!(self.holds_permit(), "vCPUs are first");
    }

    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        if self.hold_resume.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        assert!(!self.panic_resume.load(Ordering::SeqCst), "a test wants it");
        if self.device.fail_resume.load(Ordering::SeqCst) {
            return Poll::Ready(Err(error("resume card 0")));
        }
        self.resume_device();
        Poll::Ready(Ok(()))
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(self)
    }
}

/// Builds fake machines and keeps the last one.
#[derive(Default)]
pub struct FakeFactory {
    pub last: Mutex<Option<Arc<FakeVmm>>>,
    pub fail_load: AtomicBool,
    pub refuse: AtomicBool,
    /// Machines get a card.
    pub plug: AtomicBool,
    pub fail_resume: AtomicBool,
    /// This page of region 0 is lost in the next machine.
    pub lose: Mutex<Option<u64>>,
    pub lost: Mutex<Option<Spoiled>>,
    pub panic_build: AtomicBool,
    pub panic_load: AtomicBool,
    pub panic_resume: AtomicBool,
    /// It takes as long as somebody wants the machine.
    pub hold_build: AtomicBool,
    /// Builds that have begun.
    pub builds: AtomicU64,
    pub hold_resume: AtomicBool,
    /// What was built takes as long to be dropped.
    pub hold_drop: Arc<AtomicBool>,
}

/// A machine whose end takes its time, as that of a large memory does.
pub struct Large {
    vmm: Arc<FakeVmm>,
    hold_drop: Arc<AtomicBool>,
}

impl Drop for Large {
    fn drop(&mut self) {
        while self.hold_drop.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
}

impl DestinationVmm for Large {
    fn ram(&self) -> Arc<GuestRam> {
        DestinationVmm::ram(&*self.vmm)
    }

    fn load_state(&self, state: &[u8], what_for: LoadFor) -> Result<(), Error> {
        self.vmm.load_state(state, what_for)
    }

    fn arm(&self, limit: Duration) {
        self.vmm.arm(limit);
    }

    fn start(&self, permit: RunPermit, state: RunState) {
        self.vmm.start(permit, state);
    }

    fn begin_resume(&self, wake: &Waker) {
        self.vmm.begin_resume(wake);
    }

    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        self.vmm.poll_resumed()
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        DestinationVmm::observer(&*self.vmm)
    }
}

impl DestinationFactory for FakeFactory {
    fn build(&self, request: &BuildRequest<'_>) -> Result<Arc<dyn DestinationVmm>, Error> {
        assert_eq!((request.description, request.layout), (&b"fake"[..], &layout()[..]));
        if self.refuse.load(Ordering::SeqCst) {
            return Err(error("build"));
        }
        self.builds.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panic_build.load(Ordering::SeqCst), "a test wants it");
        while self.hold_build.load(Ordering::SeqCst) {
            request.check_wanted()?;
            std::thread::yield_now();
        }
        let vmm = FakeVmm::new();
        let copy = |to: &AtomicBool, from: &AtomicBool| {
            to.store(from.load(Ordering::SeqCst), Ordering::SeqCst);
        };
        copy(&vmm.panic_load, &self.panic_load);
        copy(&vmm.panic_resume, &self.panic_resume);
        copy(&vmm.hold_resume, &self.hold_resume);
        vmm.fail_load.store(self.fail_load.load(Ordering::SeqCst), Ordering::SeqCst);
        if self.plug.load(Ordering::SeqCst) {
            vmm.plug(true);
            let fails = self.fail_resume.load(Ordering::SeqCst);
            vmm.device.fail_resume.store(fails, Ordering::SeqCst);
        }
        let lose = self.lose.lock().unwrap().take();
        *self.lost.lock().unwrap() = lose.map(|page| Spoiled::new(&vmm.ram, RegionIndex(0), page));
        *self.last.lock().unwrap() = Some(Arc::clone(&vmm));
        Ok(Arc::new(Large { vmm, hold_drop: Arc::clone(&self.hold_drop) }))
    }
}
