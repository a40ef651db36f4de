//! A host on which many guests migrate at once.

use crate::channel::{Channel, Packet, Phase};
use crate::clock::{Ps, float, ps};
use crate::constants::{
    CPU_DATA_PAGE, CPU_ZERO_PAGE, DATA_PAGE_READ_BYTES, ENQCMD, HOST_THREADS, MEMORY_BYTES_PER_SEC,
    PACKET_PAGES, PAGE_BYTES,
};
use crate::device::{DeviceTimes, SharedDevice};
use crate::sharing::Sharing;
use martlet_policy::admission::{Admission, AdmissionConfig, DeviceProfile, OffloadPolicy};
use martlet_simulation::{Agenda, Chance};
use martlet_units::Instant;
use std::collections::VecDeque;

/// One cell of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Guests that migrate, each in a process of its own.
    pub vms: u32,
    /// Channels of each.
    pub channels: u32,
    /// Devices, which all share.
    pub devices: u32,
    /// How many of a hundred pages are zero.
    pub zero_percent: u32,
    /// Who decides.
    pub policy: OffloadPolicy,
    /// Chance.
    pub seed: u64,
}

/// What came of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Bytes of guest memory checked a second, all guests together.
    pub scan_bytes_per_sec: f64,
    /// Median time from a batch's begin to its last answer, in picoseconds.
    pub p50_ps: u64,
    /// The 99th percentile.
    pub p99_ps: u64,
    /// Processors that finding zero pages keeps busy; sending is not in it.
    pub cpu_cores: f64,
    /// Submissions that a device answered with "retry", a second.
    pub rejects_per_sec: f64,
    /// Share of the devices' time in which they read memory.
    pub device_busy: f64,
}

/// Batches before the measurement begins and within it: at least so many, and so many for each
/// channel.
const WARM_UP: (u64, u64) = (4_000, 12);
const MEASURED: (u64, u64) = (8_000, 16);
/// Channels begin at random within this time.
const START_SPREAD_PS: u64 = 1_000_000_000;

pub(crate) enum Event {
    /// A channel goes on: at its begin, or after a sleep.
    Awake(usize),
    /// The network has taken a channel's last packet.
    Drained(usize),
    /// A device's completion record is written: the channel's index and its packet's number.
    Landed(usize, u32),
}

/// One guest's process.
pub(crate) struct Vm {
    pub(crate) admission: Admission,
    /// The series' one list of batches under way, which its polling thread looks at in order.
    pub(crate) polled: VecDeque<(usize, u32)>,
}

pub(crate) struct Host {
    pub(crate) cell: Cell,
    pub(crate) now: Ps,
    pub(crate) events: Agenda<Ps, Event>,
    /// Threads that compute, and threads that check pages: the latter wait for memory as well.
    pub(crate) compute: Sharing,
    pub(crate) scan: Sharing,
    pub(crate) devices: Vec<SharedDevice>,
    pub(crate) times: DeviceTimes,
    /// Threads that try a full device again and again, by device.
    pub(crate) spinning: Vec<Vec<usize>>,
    /// Polling threads that have something to poll.
    pub(crate) pollers: usize,
    pub(crate) nic_free: Ps,
    pub(crate) channels: Vec<Channel>,
    pub(crate) vms: Vec<Vm>,
    pub(crate) others: Vec<u64>,
    pub(crate) chance: Chance,
    pub(crate) tally: Tally,
    /// How much of a processor a thread gets.
    core: f64,
}

/// What is counted.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) batches: u64,
    pub(crate) cpu_ps: f64,
    pub(crate) rejects: f64,
    pub(crate) latencies: Vec<Ps>,
    device_busy_ps: f64,
    begin: Ps,
}

/// Runs a cell until enough was seen. The same cell gives the same figures.
pub fn simulate(cell: &Cell) -> Measured {
    let mut host = Host::new(*cell);
    let channels = u64::try_from(host.channels.len()).unwrap_or(u64::MAX);
    host.run(WARM_UP.0.max(WARM_UP.1 * channels));
    let latencies = Vec::with_capacity(40_000);
    host.tally = Tally { begin: host.now, latencies, ..Tally::default() };
    host.run(MEASURED.0.max(MEASURED.1 * channels));
    host.measured()
}

impl Host {
    fn new(cell: Cell) -> Host {
        let devices = usize::try_from(cell.devices).unwrap_or(0);
        let profiles = vec![DeviceProfile::default(); devices];
        let config = AdmissionConfig::new(cell.policy);
        let vm = || Vm { admission: Admission::new(config, &profiles), polled: VecDeque::new() };
        let vms: Vec<Vm> = (0..cell.vms).map(|_| vm()).collect();
        let channel = |vm: usize, n: u32| Channel::new(vm, n, cell.policy);
        let channels: Vec<Channel> =
            (0..vms.len()).flat_map(|vm| (0..cell.channels).map(move |n| channel(vm, n))).collect();
        let mut chance = Chance::new(cell.seed);
        let mut events = Agenda::default();
        for index in 0..channels.len() {
            events.put(chance.below(START_SPREAD_PS), Event::Awake(index));
        }
        Host {
            cell,
            now: 0,
            events,
            compute: Sharing::new(),
            scan: Sharing::new(),
            devices: (0..devices).map(|_| SharedDevice::new()).collect(),
            times: DeviceTimes::sapphire_rapids(),
            spinning: vec![Vec::new(); devices],
            pollers: 0,
            nic_free: 0,
            channels,
            vms,
            others: vec![0; devices],
            chance,
            tally: Tally::default(),
            core: 1.0,
        }
    }

    pub(crate) fn instant(&self) -> Instant {
        Instant(self.now / 1000)
    }

    /// Until so many batches were checked.
    fn run(&mut self, batches: u64) {
        while self.tally.batches < batches {
            let next = [self.events.next_at(), self.compute.next(), self.scan.next()];
            let devices = self.devices.iter().map(SharedDevice::next);
            let next = next.into_iter().chain(devices).flatten().min();
            self.pass_to(next.expect("channels never end"));
            self.happen();
            self.set_speeds();
        }
    }

    /// Lets time go by and counts what it costs.
    fn pass_to(&mut self, to: Ps) {
        let passed = float(to - self.now);
        self.now = to;
        let spinning: usize = self.spinning.iter().map(Vec::len).sum();
        let busy = self.scan.len() + spinning + self.pollers;
        self.tally.cpu_ps += passed * self.core * float(u64::try_from(busy).unwrap_or(0));
        let tries = passed * self.core / float(ps(ENQCMD));
        self.tally.rejects += tries * float(u64::try_from(spinning).unwrap_or(0));
        let working = self.devices.iter().filter(|device| device.is_busy()).count();
        self.tally.device_busy_ps += passed * float(u64::try_from(working).unwrap_or(0));
    }

    /// Everything that is due now.
    fn happen(&mut self) {
        while self.events.next_at().is_some_and(|at| at <= self.now) {
            let Some((_, event)) = self.events.take() else { break };
            match event {
                Event::Awake(channel) => self.awake(channel),
                Event::Drained(channel) => self.drained(channel),
                Event::Landed(channel, packet) => self.landed(channel, packet),
            }
        }
        while let Some(channel) = self.compute.take_done(self.now) {
            self.computed(index(channel));
        }
        while let Some(channel) = self.scan.take_done(self.now) {
            self.scanned(index(channel));
        }
        for device in 0..self.devices.len() {
            while let Some(batch) = self.devices[device].take_done(self.now) {
                let (channel, packet) = unpack(batch);
                let at = self.now + self.times.latency;
                self.events.put(at, Event::Landed(channel, packet));
                self.let_a_spinner_in(device);
            }
        }
    }

    /// Threads share processors, and checks and devices share memory.
    fn set_speeds(&mut self) {
        let spinning: usize = self.spinning.iter().map(Vec::len).sum();
        let threads = self.compute.len() + self.scan.len() + spinning + self.pollers;
        let threads = float(u64::try_from(threads).unwrap_or(u64::MAX)).max(1.0);
        self.core = (f64::from(HOST_THREADS) / threads).min(1.0);
        let working = self.devices.iter().filter(|device| device.is_busy()).count();
        let by_devices = float(u64::try_from(working).unwrap_or(0)) * self.times.bytes_per_sec;
        let left = float(MEMORY_BYTES_PER_SEC) - by_devices;
        let scanning = float(u64::try_from(self.scan.len()).unwrap_or(u64::MAX)).max(1.0);
        let memory = left / (scanning * self.scan_bytes_per_sec());
        self.compute.set_speed(self.now, self.core);
        self.scan.set_speed(self.now, self.core.min(memory));
    }

    /// What a thread that checks pages reads when nothing is in its way.
    fn scan_bytes_per_sec(&self) -> f64 {
        let zero = f64::from(self.cell.zero_percent) / 100.0;
        let bytes = zero * float(PAGE_BYTES) + (1.0 - zero) * float(DATA_PAGE_READ_BYTES);
        let time = zero * CPU_ZERO_PAGE.as_secs_f64() + (1.0 - zero) * CPU_DATA_PAGE.as_secs_f64();
        bytes / time
    }

    /// A place in a device's queue is free: one of those who try gets it, whichever is first.
    fn let_a_spinner_in(&mut self, device: usize) {
        let count = u64::try_from(self.spinning[device].len()).unwrap_or(0);
        if count == 0 {
            return;
        }
        let chosen = index(self.chance.below(count));
        let channel = self.spinning[device].swap_remove(chosen);
        self.accepted_after_spin(channel, device);
    }

    /// A batch's last answer is there.
    pub(crate) fn count(&mut self, packet: &Packet) {
        self.tally.batches += 1;
        self.tally.latencies.push(self.now - packet.begin);
    }

    fn measured(mut self) -> Measured {
        let seconds = float(self.now - self.tally.begin) / 1e12;
        let tally = &mut self.tally;
        tally.latencies.sort_unstable();
        let at = |percent: usize| {
            let rank = tally.latencies.len() * percent / 100;
            tally.latencies.get(rank).copied().unwrap_or(0)
        };
        let pages = float(tally.batches) * f64::from(PACKET_PAGES);
        let devices = f64::from(self.cell.devices).max(1.0);
        Measured {
            scan_bytes_per_sec: pages * float(PAGE_BYTES) / seconds,
            p50_ps: at(50),
            p99_ps: at(99),
            // Short spins are counted, but do not slow the other threads of a full host down.
            cpu_cores: (tally.cpu_ps / 1e12 / seconds).min(f64::from(HOST_THREADS)),
            rejects_per_sec: tally.rejects / seconds,
            device_busy: tally.device_busy_ps / 1e12 / seconds / devices,
        }
    }

    /// A thread computes for so long; `finding` says whether it is for finding zero pages.
    pub(crate) fn compute(&mut self, channel: usize, work: Ps, finding: bool, phase: Phase) {
        if finding {
            self.tally.cpu_ps += float(work);
        }
        self.channels[channel].phase = phase;
        self.compute.add(self.now, work, u64::try_from(channel).unwrap_or(u64::MAX));
    }
}

/// A channel's packet as a device's batch.
pub(crate) fn pack(channel: usize, packet: u32) -> u64 {
    u64::try_from(channel).unwrap_or(u64::MAX) << 32 | u64::from(packet)
}

fn unpack(batch: u64) -> (usize, u32) {
    (index(batch >> 32), u32::try_from(batch & 0xffff_ffff).unwrap_or(0))
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
