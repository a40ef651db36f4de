//! The series' two measurements, run again in virtual time: one guest of 100 GB, 8 channels, one
//! device, as QEMU does it by the CPU, as the series does it, and with each of martlet's changes.
//!
//! An eighth of the guest is run and the times are taken eightfold: after a few packets nothing
//! changes any more.

use crate::clock::{Ps, ps, times};
use crate::constants::{
    BLACKOUT_FIXED, BLACKOUT_PAGES, CPU_ZERO_PAGE, DESCRIPTOR_PAGE, ENQCMD, MARTLET_WALK_PAGE,
    PACKET_PAGES, PATH_PAGE, RANGE_PAGE, SEND_AFTER_CHECK_PAGE, SEND_PAGE, SERIES_CHANNELS,
    SERIES_PAGES, SLEEP_CPU, SLEEP_LATE, SPIN, WALK_BESIDE_CPU_PAGE, WALK_BESIDE_DSA_PAGE,
    WALK_SENT_PAGE,
};
use crate::device::{DeviceTimes, SharedDevice};
use crate::lane::{Lane, Step};
use martlet_policy::admission::{
    Admission, AdmissionConfig, Decision, DeviceProfile, Grant, Latency, OffloadPolicy, Outcome,
    Part, Request,
};
use martlet_simulation::Agenda;
use martlet_units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Half of the pages are sent. The series marks them so by a test hook: their content is zero
    /// all the same, and every check goes to a page's end.
    Half,
    /// All pages are zero.
    Zero,
}

impl Scenario {
    fn sent_pages(self) -> u32 {
        match self {
            Scenario::Half => PACKET_PAGES / 2,
            Scenario::Zero => 0,
        }
    }
}

/// Who looks at a page first, and how; from the series to martlet change by change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether pages are checked by the CPU, by the device always, or by whom the policy says.
    pub policy: OffloadPolicy,
    /// A thread that polls for all channels, or channels that wait for themselves.
    pub polling_thread: bool,
    /// Batches that a channel may have with the device.
    pub depth: usize,
    /// One thread that walks the pages for all channels, or channels that take chunks themselves.
    pub channels_walk: bool,
    /// Descriptors for runs of pages, where a run is expected to be zero.
    pub ranges: bool,
    /// How many of a hundred zero pages were never touched and are never looked at.
    pub untouched_percent: u32,
}

impl Plan {
    /// QEMU without a device.
    pub const CPU_ONLY: Plan = Plan { policy: OffloadPolicy::CpuOnly, ..Plan::SERIES };
    /// The series.
    pub const SERIES: Plan = Plan {
        policy: OffloadPolicy::Block,
        polling_thread: true,
        depth: 1,
        channels_walk: false,
        ranges: false,
        untouched_percent: 0,
    };
    /// martlet, to save CPU. Nothing counts as untouched: the series' guest was in memory, or its
    /// device would have faulted on every page.
    pub const MARTLET: Plan = Plan {
        policy: OffloadPolicy::AdaptiveSaving,
        polling_thread: false,
        depth: 2,
        channels_walk: true,
        ranges: true,
        untouched_percent: 0,
    };
}

/// What a run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// CPU time of the thread that walks, in milliseconds.
    pub walker_ms: u64,
    /// CPU time of all channels.
    pub channels_ms: u64,
    /// What of it went into sending pages: it stays, whoever finds the zero pages.
    pub sends_ms: u64,
    /// CPU time of the polling thread.
    pub poller_ms: u64,
    /// From the begin to the end.
    pub total_ms: u64,
    /// How long the guest was stopped.
    pub blackout_ms: u64,
}

impl Run {
    /// All CPU time, in milliseconds.
    pub fn cpu_ms(&self) -> u64 {
        self.walker_ms + self.channels_ms + self.poller_ms
    }
}

/// Of the guest, so much is run.
const SHARE: u64 = 8;

#[derive(Clone, Copy)]
pub(crate) enum Event {
    Walked,
    Next(usize),
    Landed(usize, u32),
}

pub(crate) struct Batch {
    number: u32,
    grant: Grant,
    submitted: Ps,
    landed: Option<Ps>,
    /// Whether its channel knows, or will when it looks.
    noticed: bool,
}

struct World {
    plan: Plan,
    sent_pages: u32,
    use_ranges: bool,
    now: Ps,
    events: Agenda<Ps, Event>,
    device: SharedDevice,
    times: DeviceTimes,
    admission: Admission,
    lanes: Vec<Lane>,
    /// Packets that nobody has begun with.
    left: u64,
    /// The walker has a packet that no channel is free for.
    walker_waits: bool,
    next_lane: usize,
    polled: VecDeque<(usize, u32)>,
    polled_since: Ps,
    numbers: u32,
    walker: Ps,
    channels: Ps,
    sends: Ps,
    poller: Ps,
}

/// Runs a scenario.
pub fn run(scenario: Scenario, plan: &Plan) -> Run {
    let mut world = World::new(scenario, plan);
    world.begin();
    while let Some((at, event)) = world.next_event() {
        world.now = at;
        world.on_event(event);
    }
    let ms = |time: Ps| time * SHARE / 1_000_000_000;
    let total = world.now * SHARE;
    let left = if scenario == Scenario::Half { BLACKOUT_PAGES } else { 0 };
    let blackout = ps(BLACKOUT_FIXED) + total / SERIES_PAGES * left;
    Run {
        walker_ms: ms(world.walker),
        channels_ms: ms(world.channels),
        sends_ms: ms(world.sends),
        poller_ms: ms(world.poller),
        total_ms: ms(world.now),
        blackout_ms: blackout / 1_000_000_000,
    }
}

impl World {
    fn new(scenario: Scenario, plan: &Plan) -> World {
        let sent_pages = scenario.sent_pages();
        let packets = SERIES_PAGES / SHARE / u64::from(PACKET_PAGES);
        let zero = u64::from(PACKET_PAGES - sent_pages);
        let untouched = zero * u64::from(plan.untouched_percent) / 100;
        let config = AdmissionConfig::new(plan.policy);
        World {
            plan: *plan,
            sent_pages: sent_pages * PACKET_PAGES / (PACKET_PAGES - index32(untouched)),
            use_ranges: plan.ranges && sent_pages == 0,
            now: 0,
            events: Agenda::default(),
            device: SharedDevice::new(),
            times: DeviceTimes::sapphire_rapids(),
            admission: Admission::new(config, &[DeviceProfile::default()]),
            lanes: (0..SERIES_CHANNELS).map(|_| Lane::default()).collect(),
            left: packets * (u64::from(PACKET_PAGES) - untouched) / u64::from(PACKET_PAGES),
            walker_waits: false,
            next_lane: 0,
            polled: VecDeque::new(),
            polled_since: 0,
            numbers: 0,
            walker: 0,
            channels: 0,
            sends: 0,
            poller: 0,
        }
    }

    fn begin(&mut self) {
        if !self.plan.channels_walk {
            self.walk();
        }
        (0..self.lanes.len()).for_each(|lane| self.free(lane));
    }

    fn next_event(&mut self) -> Option<(Ps, Event)> {
        loop {
            match (self.events.next_at(), self.device.next()) {
                (event, Some(device)) if event.is_none_or(|event| device < event) => {
                    while let Some(batch) = self.device.take_done(device) {
                        let lane = usize::try_from(batch >> 32).unwrap_or(0);
                        let number = u32::try_from(batch & 0xffff_ffff).unwrap_or(0);
                        self.events.put(device + self.times.latency, Event::Landed(lane, number));
                    }
                }
                (Some(_), _) => return self.events.take(),
                (None, _) => return None,
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Walked => self.walked(),
            Event::Landed(lane, number) => self.landed(lane, number),
            Event::Next(lane) => match self.lanes[lane].step {
                Step::Got => self.decide(lane),
                Step::Filled(grant) => self.filled(lane, grant),
                Step::Checked => self.send(lane, true),
                Step::Woken => self.collect(lane),
                Step::Collected => {
                    self.lanes[lane].pending.pop_front();
                    self.send(lane, false);
                }
                Step::Sent if self.lanes[lane].asks_again => self.decide(lane),
                Step::Sent => self.free(lane),
                Step::Idle | Step::Waits(_) => unreachable!("it does nothing that ends"),
            },
        }
    }

    /// The walker assembles a packet.
    fn walk(&mut self) {
        if self.left == 0 {
            // Nothing more comes: who is free finishes what it has.
            let idle = (0..self.lanes.len()).filter(|lane| self.lanes[*lane].step == Step::Idle);
            let idle: Vec<usize> = idle.collect();
            return idle.into_iter().for_each(|lane| self.free(lane));
        }
        self.left -= 1;
        let page = match self.plan.policy {
            OffloadPolicy::CpuOnly => WALK_BESIDE_CPU_PAGE,
            OffloadPolicy::Block
            | OffloadPolicy::CpuWhenFull
            | OffloadPolicy::Adaptive
            | OffloadPolicy::AdaptiveSaving => WALK_BESIDE_DSA_PAGE,
        };
        let work = times(page, PACKET_PAGES) + times(WALK_SENT_PAGE, self.sent_pages);
        self.walker += work;
        self.events.put(self.now + work, Event::Walked);
    }

    fn walked(&mut self) {
        let count = self.lanes.len();
        let from = self.next_lane;
        let is_idle = |lane: &usize| self.lanes[*lane].step == Step::Idle;
        let Some(lane) = (0..count).map(|n| (from + n) % count).find(is_idle) else {
            self.walker_waits = true;
            return;
        };
        self.next_lane = (lane + 1) % count;
        self.decide(lane);
        self.walk();
    }

    /// A channel has nothing to do but its pending batches.
    fn free(&mut self, lane: usize) {
        if self.plan.channels_walk && self.left > 0 {
            self.left -= 1;
            self.work(lane, times(MARTLET_WALK_PAGE, PACKET_PAGES), Step::Got);
        } else if self.walker_waits {
            self.walker_waits = false;
            self.decide(lane);
            self.walk();
        } else if self.left == 0 && !self.lanes[lane].pending.is_empty() {
            self.oldest(lane);
        } else {
            self.lanes[lane].step = Step::Idle;
        }
    }

    /// The channel's thread computes.
    fn work(&mut self, lane: usize, work: Ps, step: Step) {
        self.channels += work;
        self.lanes[lane].step = step;
        self.events.put(self.now + work, Event::Next(lane));
    }

    fn instant(&self) -> Instant {
        Instant(self.now / 1000)
    }

    fn decide(&mut self, lane: usize) {
        let has_pending = !self.lanes[lane].pending.is_empty();
        let waits = has_pending && !self.admission.cpu_is_due();
        let request = Request { pages: PACKET_PAGES, channel: 0 };
        let part = Part { pages_min: PACKET_PAGES, has_pending };
        self.lanes[lane].asks_again = false;
        match self.admission.decide_part(self.instant(), request, part, &[]) {
            Decision::Offload(grant) => {
                self.work(lane, self.page_work() / 2, Step::Filled(grant));
            }
            Decision::Cpu if waits => {
                self.lanes[lane].asks_again = true;
                self.oldest(lane);
            }
            Decision::Cpu => {
                let work = times(CPU_ZERO_PAGE, PACKET_PAGES);
                let took = Duration::from_nanos(work / 1000);
                self.admission.on_cpu(PACKET_PAGES, took);
                self.work(lane, work, Step::Checked);
            }
        }
    }

    /// CPU time of a batch before its submission and after its completion.
    fn page_work(&self) -> Ps {
        if self.use_ranges {
            ps(DESCRIPTOR_PAGE) + times(RANGE_PAGE, PACKET_PAGES)
        } else {
            times(DESCRIPTOR_PAGE, PACKET_PAGES)
        }
    }

    fn filled(&mut self, lane: usize, grant: Grant) {
        // ENQCMD is waited for, but short: it is counted and not stepped through.
        self.channels += ps(ENQCMD);
        self.numbers = self.numbers.wrapping_add(1);
        let number = self.numbers;
        let batch = u64::try_from(lane).unwrap_or(0) << 32 | u64::from(number);
        let taken = self.device.submit(self.now, batch, self.times.work(PACKET_PAGES));
        assert!(taken, "eight channels never fill a device");
        let submitted = self.now;
        let batch = Batch { number, grant, submitted, landed: None, noticed: false };
        self.lanes[lane].pending.push_back(batch);
        if self.plan.polling_thread {
            if self.polled.is_empty() {
                self.polled_since = self.now;
            }
            self.polled.push_back((lane, number));
        }
        if self.lanes[lane].pending.len() < self.plan.depth {
            self.free(lane);
        } else {
            self.oldest(lane);
        }
    }

    /// Finishes the oldest batch, or waits for it.
    fn oldest(&mut self, lane: usize) {
        let noticed = self.lanes[lane].pending.front().is_some_and(|batch| batch.noticed);
        if noticed {
            self.collect(lane);
        } else {
            self.lanes[lane].step = Step::Waits(self.now);
        }
    }

    fn landed(&mut self, lane: usize, number: u32) {
        let pending = &mut self.lanes[lane].pending;
        if let Some(batch) = pending.iter_mut().find(|batch| batch.number == number) {
            batch.landed = Some(self.now);
        }
        if !self.plan.polling_thread {
            return self.notice(lane, number);
        }
        // The polling thread looks at the head of its list only.
        while let Some((head, number)) = self.polled.front().copied() {
            let is_done = |batch: &Batch| batch.number == number && batch.landed.is_some();
            if !self.lanes[head].pending.iter().any(is_done) {
                return;
            }
            self.polled.pop_front();
            if self.polled.is_empty() {
                self.poller += self.now - self.polled_since;
            }
            self.notice(head, number);
        }
    }

    fn notice(&mut self, lane: usize, number: u32) {
        let pending = &mut self.lanes[lane].pending;
        let is_first = pending.front().is_some_and(|batch| batch.number == number);
        if let Some(batch) = pending.iter_mut().find(|batch| batch.number == number) {
            batch.noticed = true;
        }
        let (true, Step::Waits(since)) = (is_first, self.lanes[lane].step) else { return };
        let spins = if self.plan.polling_thread { 0 } else { ps(SPIN) };
        let waited = self.now - since;
        self.channels += waited.min(spins);
        self.lanes[lane].step = Step::Woken;
        let mut at = self.now;
        if waited > spins {
            self.channels += ps(SLEEP_CPU);
            at += ps(SLEEP_LATE);
        }
        self.events.put(at, Event::Next(lane));
    }

    fn collect(&mut self, lane: usize) {
        let now = self.instant();
        if let Some(batch) = self.lanes[lane].pending.front() {
            let waited = self.lanes[lane].step == Step::Woken;
            let until = if waited { batch.landed.unwrap_or(self.now) } else { self.now };
            let took = Duration::from_nanos((until - batch.submitted) / 1000);
            let latency = if waited { Latency::Measured(took) } else { Latency::AtMost(took) };
            let outcome = Outcome::Completed { latency, faulted: 0 };
            self.admission.finish(now, batch.grant, outcome);
        }
        self.work(lane, self.page_work() / 2, Step::Collected);
    }

    /// The channel's connection is busy for longer than its thread.
    fn send(&mut self, lane: usize, after_check: bool) {
        let pages = self.sent_pages;
        let more = if after_check { SEND_AFTER_CHECK_PAGE } else { Duration::ZERO };
        let work = times(SEND_PAGE + more, pages);
        self.channels += work;
        self.sends += work;
        self.lanes[lane].step = Step::Sent;
        self.events.put(self.now + times(PATH_PAGE, pages), Event::Next(lane));
    }
}

fn index32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(0)
}
