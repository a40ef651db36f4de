//! A machine of the world: real guest memory of a few pages, a guest that writes it, and dirty
//! tracking as a hypervisor does it. Good for both sides.

use crate::net::Clock;
use martlet_core::{DestinationVmm, Error, LoadFor, Paused, Rehearsal, RunState, SourceVmm};
use martlet_protocol::RunPermit;
use martlet_ram::{
    DirtyMarker, DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError, Tracker,
};
use martlet_simulation::Chance;
use martlet_units::{Gfn, Gpa, Instant, PAGE_SIZE, PageCount, PageRange};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

/// Between the first frames of two regions.
const REGION_FRAMES: u64 = 1 << 12;

/// What is built wrongly into a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Pages are rearmed after they were read.
    pub(crate) late_rearm: bool,
    /// The last state is not loaded, having loaded a rehearsal's.
    pub(crate) keep_rehearsed: bool,
    /// Whether the owner had paused it is forgotten.
    pub(crate) forget_paused: bool,
}

/// A machine with a guest, or waiting for one.
pub(crate) struct Machine {
    clock: Clock,
    ram: Arc<GuestRam>,
    /// Writes of vCPUs, which their own tracking sees; the marks are nobody's.
    vcpu: DirtyMarker,
    /// Writes of the hypervisor and of devices.
    device: DirtyMarker,
    wrong: Wrong,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    permit: Option<RunPermit>,
    /// Whether its owner wants it to run.
    wanted: bool,
    /// The number of the guest's last write: its registers.
    state: u64,
    stop: Stop,
    /// A device never answers its suspend.
    device_is_silent: bool,
    /// The next thing asked for fails.
    fails: bool,
    stopped_at: Option<Instant>,
    started_at: Option<Instant>,
    /// By region and page.
    log: Vec<Vec<Tracked>>,
    is_tracking: bool,
    /// What the machine met that must never be.
    violation: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stop {
    #[default]
    No,
    Suspending {
        until: Instant,
    },
    Pausing {
        until: Instant,
    },
    Paused {
        saved: Instant,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Tracked {
    is_armed: bool,
    is_written: bool,
    /// Armed late, by sabotage.
    is_pending: bool,
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A layout with so many pages in each region.
pub(crate) fn layout(regions: &[u64]) -> Vec<PageRange> {
    let range = |(index, pages): (u64, &u64)| {
        PageRange::try_new(Gfn(index * REGION_FRAMES), PageCount(*pages)).expect("few pages")
    };
    (0..).zip(regions).map(range).collect()
}

impl Machine {
    /// A machine without a guest.
    pub(crate) fn waiting(clock: Clock, layout: &[PageRange], wrong: Wrong) -> Machine {
        let ram = Arc::new(GuestRam::create(layout).expect("the host has some pages"));
        let pages = |range: &PageRange| usize::try_from(range.pages().0).expect("few");
        let log = layout.iter().map(|range| vec![Tracked::default(); pages(range)]).collect();
        Machine {
            clock,
            vcpu: DirtyMarker::new(Arc::clone(&ram)),
            device: DirtyMarker::new(Arc::clone(&ram)),
            ram,
            wrong,
            inner: Arc::new(Mutex::new(Inner { log, ..Inner::default() })),
        }
    }

    /// A machine with a guest that has just booted.
    pub(crate) fn booted(
        clock: Clock,
        layout: &[PageRange],
        wrong: Wrong,
        wanted: bool,
    ) -> Machine {
        let machine = Machine::waiting(clock, layout, wrong);
        let mut inner = machine.lock();
        inner.permit = Some(RunPermit::for_new_guest());
        inner.wanted = wanted;
        drop(inner);
        machine
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(crate) fn has_permit(&self) -> bool {
        self.lock().permit.is_some()
    }

    /// Dies, with the guest.
    pub(crate) fn die(&self) {
        self.lock().permit = None;
    }

    pub(crate) fn wanted(&self) -> bool {
        self.lock().wanted
    }

    /// Whether nothing of an attempt is left: devices and vCPUs go on, at full speed.
    pub(crate) fn goes_on(&self) -> bool {
        let inner = self.lock();
        inner.stop == Stop::No && !inner.is_tracking
    }

    pub(crate) fn state(&self) -> u64 {
        self.lock().state
    }

    pub(crate) fn fail_next(&self) {
        self.lock().fails = true;
    }

    /// Whether what was to fail has not yet.
    pub(crate) fn take_failure(&self) -> bool {
        std::mem::take(&mut self.lock().fails)
    }

    pub(crate) fn silence_device(&self) {
        self.lock().device_is_silent = true;
    }

    pub(crate) fn heal(&self) {
        let mut inner = self.lock();
        (inner.device_is_silent, inner.fails) = (false, false);
    }

    pub(crate) fn stopped_at(&self) -> Option<Instant> {
        self.lock().stopped_at
    }

    pub(crate) fn take_start(&self) -> bool {
        self.lock().started_at.take().is_some()
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.lock().violation.take()
    }

    /// Gives the guest a right that nobody made for it.
    pub(crate) fn forge_permit(&self) {
        self.lock().permit = Some(RunPermit::for_new_guest());
    }

    /// The guest runs for a moment.
    pub(crate) fn run(&self, chance: &mut Chance) {
        let mut inner = self.lock();
        let runs =
            inner.permit.is_some() && inner.wanted && !matches!(inner.stop, Stop::Paused { .. });
        if !runs {
            return;
        }
        for _ in 0..chance.between(1, 3) {
            inner.state += 1;
            let region = chance.index(inner.log.len());
            let page = chance.index(inner.log[region].len());
            // Some pages become zero again.
            let value = if chance.once_in(8) { 0 } else { inner.state };
            write(&self.vcpu, self.address(region, page), value);
            let is_tracking = inner.is_tracking;
            let tracked = &mut inner.log[region][page];
            if is_tracking && tracked.is_armed {
                (tracked.is_armed, tracked.is_written) = (false, true);
            }
        }
    }

    /// The hypervisor writes pages by itself, unless the guest is stopped.
    pub(crate) fn hypervisor_writes(&self, chance: &mut Chance) {
        let mut inner = self.lock();
        if inner.permit.is_none() || matches!(inner.stop, Stop::Paused { .. }) {
            return;
        }
        for _ in 0..4 {
            inner.state += 1;
            let region = chance.index(inner.log.len());
            let page = chance.index(inner.log[region].len());
            write(&self.device, self.address(region, page), inner.state);
        }
    }

    fn address(&self, region: usize, page: usize) -> Gpa {
        let start = self.ram.regions()[region].range().start();
        Gpa((start.0 + page as u64) * PAGE_SIZE)
    }

    /// The first page that differs from another machine's, as text.
    pub(crate) fn difference(&self, other: &Machine) -> Option<String> {
        let inner = self.lock();
        for (region, pages) in inner.log.iter().enumerate() {
            for page in 0..pages.len() {
                let at = self.address(region, page);
                let read = |machine: &Machine| {
                    let mut bytes = [0; 8];
                    machine.ram.read(at, &mut bytes).expect("guest memory");
                    u64::from_le_bytes(bytes)
                };
                let (here, there) = (read(self), read(other));
                if here != there {
                    return Some(format!(
                        "page {page} of region {region} has write {there} at the destination, {here} \
                         at the source"
                    ));
                }
            }
        }
        None
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn violate(inner: &mut Inner, what: &str) {
        inner.violation.get_or_insert_with(|| what.to_owned());
    }
}

fn write(by: &DirtyMarker, at: Gpa, value: u64) {
    by.write(at, &value.to_le_bytes()).expect("guest memory");
}

/// The vCPUs' own dirty tracking, as KVM's log does it.
struct VcpuLog {
    inner: Arc<Mutex<Inner>>,
    late: bool,
}

impl DirtySource for VcpuLog {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        let mut inner = lock(&self.inner);
        if std::mem::take(&mut inner.fails) {
            return Err(TrackError::host("a sync", std::io::Error::other("a test wants it")));
        }
        for (region, pages) in (0..).zip(&mut inner.log) {
            for (page, tracked) in (0..).zip(pages) {
                if std::mem::take(&mut tracked.is_written) {
                    into.region(RegionIndex(region)).set(page);
                }
                tracked.is_armed |= std::mem::take(&mut tracked.is_pending);
            }
        }
        Ok(())
    }

    fn rearm(&mut self, region: RegionIndex, first: u64, words: &[u64]) -> Result<(), TrackError> {
        let mut inner = lock(&self.inner);
        let pages = &mut inner.log[usize::from(region.0)];
        for (page, tracked) in (0..).zip(pages) {
            let page: u64 = page;
            let Some(bit) = page.checked_sub(first) else { continue };
            let word = usize::try_from(bit / 64).ok().and_then(|index| words.get(index));
            if word.is_some_and(|word| word >> (bit % 64) & 1 == 1) {
                if self.late {
                    tracked.is_pending = true;
                } else {
                    tracked.is_armed = true;
                }
            }
        }
        Ok(())
    }
}

impl Drop for VcpuLog {
    fn drop(&mut self) {
        lock(&self.inner).is_tracking = false;
    }
}

impl SourceVmm for Machine {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        let tracker = Tracker::lease(&self.ram)?;
        let mut inner = self.lock();
        inner.is_tracking = true;
        for tracked in inner.log.iter_mut().flatten() {
            *tracked = Tracked { is_armed: true, ..Tracked::default() };
        }
        let log = VcpuLog { inner: Arc::clone(&self.inner), late: self.wrong.late_rearm };
        Ok(tracker.with(Box::new(log)).with(Box::new(self.device.source())))
    }

    fn rehearse(&self) -> Result<Option<Rehearsal>, Error> {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.fails) {
            return Err(Error::vmm("rehearse the stop", "a test wants it"));
        }
        let state = inner.state.to_le_bytes().to_vec();
        let (pause, save) = (Duration::from_micros(50), Duration::from_micros(100));
        Ok(Some(Rehearsal { pause, save, state }))
    }

    fn begin_suspend(&self, _: &Waker) {
        self.lock().stop = Stop::Suspending { until: self.now().after(Duration::from_micros(120)) };
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        let inner = self.lock();
        match inner.stop {
            Stop::Suspending { until } if until <= self.now() && !inner.device_is_silent => {
                Poll::Ready(Ok(()))
            }
            _ => Poll::Pending,
        }
    }

    fn begin_pause(&self, _: &Waker) {
        self.lock().stop = Stop::Pausing { until: self.now().after(Duration::from_micros(60)) };
    }

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        let mut inner = self.lock();
        let Stop::Pausing { until } = inner.stop else { return Poll::Pending };
        if self.now() < until {
            return Poll::Pending;
        }
        if std::mem::take(&mut inner.fails) {
            inner.stop = Stop::No;
            return Poll::Ready(Err(Error::vmm("stop the guest", "a vCPU does not stop")));
        }
        let Some(permit) = inner.permit.take() else {
            Machine::violate(&mut inner, "a guest is paused that is not here");
            return Poll::Pending;
        };
        inner.stop = Stop::Paused { saved: self.now().after(Duration::from_micros(90)) };
        inner.stopped_at = Some(self.now());
        Poll::Ready(Ok(Paused { permit, was: RunState::of(inner.wanted) }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        let mut inner = self.lock();
        match inner.stop {
            Stop::Paused { saved } if saved <= self.now() => {
                if std::mem::take(&mut inner.fails) {
                    return Poll::Ready(Err(Error::vmm("save the state", "a test wants it")));
                }
                Poll::Ready(Ok(inner.state.to_le_bytes().to_vec()))
            }
            _ => Poll::Pending,
        }
    }

    fn resume(&self, paused: Option<Paused>) {
        let mut inner = self.lock();
        if let Some(Paused { permit, was }) = paused {
            if inner.permit.replace(permit).is_some() {
                Machine::violate(&mut inner, "resumed with a second permit");
            }
            inner.stopped_at = None;
            inner.wanted = was == RunState::Running || self.wrong.forget_paused;
        } else if matches!(inner.stop, Stop::Paused { .. }) {
            Machine::violate(&mut inner, "a stop is cancelled that was answered");
        }
        inner.stop = Stop::No;
    }
}

impl DestinationVmm for Machine {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn load_state(&self, state: &[u8], what_for: LoadFor) -> Result<(), Error> {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.fails) {
            return Err(Error::vmm("load the state", "this CPU lacks a feature"));
        }
        let keeps = self.wrong.keep_rehearsed && what_for != LoadFor::Rehearsal;
        if !keeps || inner.state == 0 {
            let state = state.try_into().map(u64::from_le_bytes);
            inner.state = state.map_err(|_| Error::vmm("load the state", "it is damaged"))?;
        }
        Ok(())
    }

    fn start(&self, permit: RunPermit, state: RunState) {
        let mut inner = self.lock();
        if inner.permit.replace(permit).is_some() {
            Machine::violate(&mut inner, "started a second time");
        }
        inner.wanted = state == RunState::Running;
        inner.started_at = Some(self.now());
    }
}
