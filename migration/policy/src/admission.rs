//! Which pages an accelerator checks, and which the CPU does.
//!
//! A device (or work queue) that finds zero pages is shared by all channels of all migrations of a
//! host, in first-in first-out order and without any guarantee: a full one makes everybody wait.
//! [`Admission`] hands it only what it will finish sooner than the CPU would (or, to save CPU, within
//! a multiple of that), so that a full device costs nobody time.
//!
//! It knows the queue by what it is told: how many pages are outstanding here and in the host's other
//! processes, how long a page takes a device (an average of what was measured), and how long it
//! takes the CPU. Besides, the pages outstanding are limited device by device: more by a batch for
//! each good window, half after each bad sign, so that processes which know nothing of each other
//! share a device all the same. The figures behind the constants are those of the queueing model in
//! `docs/dsa.md`.

mod device;

use core::time::Duration;
use device::Device;
use martlet_units::Instant;

/// How work is split between the accelerator and the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OffloadPolicy {
    /// Everything by the CPU.
    CpuOnly,
    /// Everything by the device, tried until it takes it: QEMU's series. To compare with.
    Block,
    /// Everything by the device unless it is full.
    CpuWhenFull,
    /// By whichever is expected to be done first.
    Adaptive,
    /// By the device as long as it is expected to be done within a multiple of the CPU's time.
    AdaptiveSaving,
}

impl OffloadPolicy {
    /// All of them, in the order of tables.
    pub const ALL: [OffloadPolicy; 5] = [
        OffloadPolicy::CpuOnly,
        OffloadPolicy::Block,
        OffloadPolicy::CpuWhenFull,
        OffloadPolicy::Adaptive,
        OffloadPolicy::AdaptiveSaving,
    ];

    /// Its name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            OffloadPolicy::CpuOnly => "cpu-only",
            OffloadPolicy::Block => "block",
            OffloadPolicy::CpuWhenFull => "cpu-when-full",
            OffloadPolicy::Adaptive => "adaptive",
            OffloadPolicy::AdaptiveSaving => "adaptive-saving",
        }
    }

    /// The policy of that name.
    pub fn from_name(name: &str) -> Option<OffloadPolicy> {
        OffloadPolicy::ALL.into_iter().find(|policy| policy.name() == name)
    }
}

/// What is known of a device before anything was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceProfile {
    /// How long a page takes it when it is busy.
    pub page_time: Duration,
    /// How long an answer takes in addition when it is idle.
    pub latency: Duration,
}

impl Default for DeviceProfile {
    /// Sapphire Rapids: 31.7 GB/s of reads, which one engine reaches already, and 1 us.
    fn default() -> DeviceProfile {
        DeviceProfile { page_time: Duration::from_nanos(129), latency: Duration::from_micros(1) }
    }
}

/// The numbers that decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// How work is split.
    pub policy: OffloadPolicy,
    /// How long a page takes the CPU, until it was measured.
    pub cpu_page_time: Duration,
    /// [`OffloadPolicy::AdaptiveSaving`] waits for up to this many times the CPU's time.
    pub saving_multiple: u32,
    /// How often a full device is asked before the CPU does it. One ask costs some 0.2 us.
    pub tries: u32,
    /// Above this share of pages that fault, in percent, the CPU does everything for a while: the
    /// memory was never touched, and the CPU would only repeat what the device began.
    pub fault_percent_max: u32,
}

impl AdmissionConfig {
    /// The numbers of the queueing model, for this policy.
    pub const fn new(policy: OffloadPolicy) -> AdmissionConfig {
        AdmissionConfig {
            policy,
            cpu_page_time: Duration::from_nanos(240),
            saving_multiple: 4,
            tries: 5,
            fault_percent_max: 5,
        }
    }
}

/// A batch that somebody would like to have checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its length.
    pub pages: u32,
    /// Which channel asks. [`OffloadPolicy::Block`] binds a channel to a device by this number.
    pub channel: u16,
}

/// What a caller can do with less than it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Fewer pages than these are not worth a submission.
    pub pages_min: u32,
    /// Whether the channel has a batch with a device already. Its next one hides the device's
    /// latency from the channel, and so gets what a device that is nearly idle does in time; it is
    /// not to wait in a queue, where it would only keep others waiting.
    pub has_pending: bool,
}

/// Leave to give a batch to a device. Each is answered by one [`Admission::finish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a grant counts as outstanding until it is finished"]
pub struct Grant {
    /// Which device, by its place in the list given to [`Admission::new`].
    pub device: usize,
    /// The batch's length.
    pub pages: u32,
    /// Pages that were outstanding on that device before it, of all processes.
    pub ahead: u64,
    /// When it was granted.
    pub at: Instant,
    /// How often a full device may be asked, at least once.
    pub tries: u32,
}

/// Who checks a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The CPU.
    Cpu,
    /// A device.
    Offload(Grant),
}

/// How long a batch took a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// It was waited for.
    Measured(Duration),
    /// It was done already when somebody looked, this long after it was submitted.
    AtMost(Duration),
}

/// What became of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The device did it, but for pages that faulted.
    Completed {
        /// How long it took.
        latency: Latency,
        /// Pages that faulted, which the CPU did.
        faulted: u32,
    },
    /// The device was full at every try.
    Rejected,
    /// No answer by the deadline. The device gets nothing more.
    TimedOut,
    /// The device answered with an error. It gets nothing for a while.
    Failed,
    /// There is no device any more.
    Gone,
}

/// How long the CPU does everything after too many faults; twice as long each time in a row.
const FAULT_PAUSE: Duration = Duration::from_millis(100);
/// The longest such pause.
const FAULT_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Faults are counted over this many pages.
const FAULT_WINDOW_PAGES: u32 = 1024;
/// A page's time on the CPU is an average over about this many batches.
const CPU_SMOOTHING: u64 = 8;
/// One batch in so many is the CPU's if it had none for so long: how long it takes must be known,
/// and depends on the guest. Pages that are not zero take it a third of the time.
const CPU_PROBE_BATCHES: u32 = 64;
/// The first time it is after so many, and then after twice as many each time.
const CPU_PROBE_FIRST: u32 = 8;
/// The longest sleep before a check that would only wait for memory: about what one takes.
const CPU_PAUSE_MAX: Duration = Duration::from_micros(37);
/// That the CPU was slow is believed for so many batches.
const CPU_FRESH_BATCHES: u32 = 8;
/// To be done no later than the CPU, a device is expected to be done earlier by so many eighths of
/// the time that an undisturbed CPU takes, and by a fifth of what it takes longer: batches that
/// come later share the device, and filling descriptors, reading records and waking up take time
/// as well.
const EARLIER_EIGHTHS: u64 = 3;
/// Tries that go on until the caller's deadline.
const TRIES_UNLIMITED: u32 = u32::MAX;

/// Splits work between accelerators and the CPU.
///
/// One for all channels of a process; call [`Admission::decide`], then [`Admission::finish`] for
/// each grant, in any order. After work that the CPU did, [`Admission::on_cpu`] says how long it
/// took.
#[derive(Clone, Debug)]
pub struct Admission {
    config: AdmissionConfig,
    devices: Vec<Device>,
    cpu_page_ps: u64,
    /// Whether that was measured.
    cpu_is_measured: bool,
    /// Batches granted since then.
    unmeasured: u32,
    /// After how many of them the CPU is measured.
    probe_after: u32,
    faults: Faults,
}

/// The share of pages that fault, in windows.
#[derive(Clone, Copy, Debug)]
struct Faults {
    pages: u32,
    faulted: u32,
    paused_until: Instant,
    pause: Duration,
}

impl Admission {
    /// Nothing outstanding, nothing measured. Without devices the CPU does everything.
    pub fn new(config: AdmissionConfig, devices: &[DeviceProfile]) -> Admission {
        let faults = Faults { pages: 0, faulted: 0, paused_until: Instant(0), pause: FAULT_PAUSE };
        Admission {
            config,
            devices: devices.iter().map(Device::new).collect(),
            cpu_page_ps: picoseconds(config.cpu_page_time),
            cpu_is_measured: false,
            unmeasured: 0,
            probe_after: CPU_PROBE_FIRST,
            faults,
        }
    }

    /// How work is split.
    pub fn policy(&self) -> OffloadPolicy {
        self.config.policy
    }

    /// Says who checks a batch. `others` are the pages outstanding in other processes, device by
    /// device; devices beyond its end have none.
    pub fn decide(&mut self, now: Instant, request: Request, others: &[u64]) -> Decision {
        let all = Part { pages_min: request.pages, has_pending: false };
        self.decide_part(now, request, all, others)
    }

    /// As [`Admission::decide`], but a grant may be for fewer pages than were asked for: as many as
    /// the device will have done when the CPU alone would have done all. The caller gives the device
    /// that many and checks the others itself meanwhile, so that the batch is done no later than
    /// by the CPU alone, and the CPU does as little of it as possible.
    ///
    /// A channel that has a batch pending and gets no grant does best to wait for that batch and
    /// to ask again: what it keeps busy itself is no reason to use the CPU.
    pub fn decide_part(
        &mut self,
        now: Instant,
        request: Request,
        part: Part,
        others: &[u64],
    ) -> Decision {
        let block = self.config.policy == OffloadPolicy::Block;
        if request.pages == 0 || (!block && self.faults.paused_until > now) {
            return Decision::Cpu;
        }
        let others = |device: usize| others.get(device).copied().unwrap_or(0);
        let chosen = match self.config.policy {
            OffloadPolicy::CpuOnly => None,
            OffloadPolicy::Block => {
                self.bound(now, request.channel).map(|d| (d, request.pages, TRIES_UNLIMITED))
            }
            OffloadPolicy::CpuWhenFull => self
                .least_loaded(now, request, others)
                .map(|d| (d, request.pages, self.config.tries)),
            OffloadPolicy::Adaptive | OffloadPolicy::AdaptiveSaving => self
                .fast_enough(now, request, part, others)
                .map(|(d, pages)| (d, pages, self.config.tries)),
        };
        let Some((device, pages, tries)) = chosen else { return Decision::Cpu };
        let waiting = others(device);
        let ahead = self.devices[device].backlog(now).saturating_add(waiting);
        self.devices[device].admit(now, pages, waiting);
        self.unmeasured = self.unmeasured.saturating_add(1);
        Decision::Offload(Grant { device, pages, ahead, at: now, tries: tries.max(1) })
    }

    /// Takes back what [`Admission::decide`] granted and learns from it.
    pub fn finish(&mut self, now: Instant, grant: Grant, outcome: Outcome) {
        if let Outcome::Completed { faulted, .. } = outcome {
            self.faults.count(now, grant.pages, faulted, self.config.fault_percent_max);
        }
        if let Some(device) = self.devices.get_mut(grant.device) {
            device.finish(now, grant, outcome);
        }
    }

    /// The CPU checked pages itself.
    pub fn on_cpu(&mut self, pages: u32, time: Duration) {
        let Some(sample) = picoseconds(time).checked_div(u64::from(pages)) else { return };
        self.unmeasured = 0;
        // Half of a disturbed time says that the disturbance is over.
        let was_disturbed = self.cpu_page_ps > picoseconds(self.config.cpu_page_time);
        let over = match (self.cpu_is_measured, was_disturbed && sample < self.cpu_page_ps / 2) {
            (false, _) => 1,
            (true, true) => CPU_SMOOTHING / 4,
            (true, false) => CPU_SMOOTHING,
        };
        let kept = self.cpu_page_ps - self.cpu_page_ps / over;
        self.cpu_page_ps = kept.saturating_add(sample / over).max(1);
        self.cpu_is_measured = true;
    }

    /// Whether the CPU is to do the next batch so that its time is known: then a channel that would
    /// rather wait for its own batch does not.
    pub fn cpu_is_due(&self) -> bool {
        self.unmeasured >= self.probe_after
    }

    /// How long a channel that got no grant had better sleep, and ask once more, before it lets the
    /// CPU do the batch. Not at all, unless the CPU takes a quarter longer than undisturbed: then
    /// more threads check than memory can feed, and they only slow each other down.
    pub fn pause(&self, pages: u32) -> Duration {
        let undisturbed = self.config.cpu_page_time.saturating_mul(pages);
        let a_quarter_more = undisturbed.saturating_add(undisturbed / 4);
        self.cpu_time(pages).saturating_sub(a_quarter_more).min(CPU_PAUSE_MAX)
    }

    /// Pages outstanding on a device, of this process, that it is expected to be still at: a batch
    /// that nobody has looked at keeps nobody waiting once it is done. What to tell other processes.
    pub fn backlog(&self, now: Instant, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |device| device.backlog(now))
    }

    /// How long the CPU is expected to take for this many pages.
    pub fn cpu_time(&self, pages: u32) -> Duration {
        duration(self.cpu_page_ps.saturating_mul(u64::from(pages)))
    }

    /// The series' choice: a channel's device is fixed.
    fn bound(&self, now: Instant, channel: u16) -> Option<usize> {
        let usable = |device: &usize| self.devices[*device].is_usable(now);
        let count = self.devices.len();
        (0..count).map(|n| (usize::from(channel) + n) % count).find(usable)
    }

    fn least_loaded(
        &self,
        now: Instant,
        request: Request,
        others: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let usable = self.devices.iter().enumerate().filter(|(_, device)| device.is_usable(now));
        usable
            .min_by_key(|(index, device)| {
                (device.expected_ps(now, request, others(*index)), *index)
            })
            .map(|(index, _)| index)
    }

    /// The device that is expected to be done first, if that is early enough and its limit allows
    /// it, and how many pages it may get. If only the memory of a bad time speaks against every
    /// device, one is asked now and then.
    fn fast_enough(
        &mut self,
        now: Instant,
        request: Request,
        part: Part,
        others: impl Fn(usize) -> u64,
    ) -> Option<(usize, u32)> {
        if self.cpu_is_due() {
            self.unmeasured = 0;
            self.probe_after = (self.probe_after * 2).min(CPU_PROBE_BATCHES);
            return None;
        }
        let pages = u64::from(request.pages);
        let measured_ps = self.cpu_page_ps.saturating_mul(pages);
        let undisturbed_ps = picoseconds(self.config.cpu_page_time).saturating_mul(pages);
        let undisturbed_ps = undisturbed_ps.min(measured_ps);
        // A CPU that waits for memory because too many scan at once takes longer, and so may the
        // device, if that is still so.
        let is_fresh = self.unmeasured <= CPU_FRESH_BATCHES;
        let cpu_ps = if part.has_pending || !is_fresh { undisturbed_ps } else { measured_ps };
        let disturbed_ps = cpu_ps - undisturbed_ps;
        let earlier_ps = undisturbed_ps / 8 * EARLIER_EIGHTHS + disturbed_ps / 5;
        let (times, limit_ps) = match self.config.policy {
            OffloadPolicy::AdaptiveSaving => {
                let times = u64::from(self.config.saving_multiple.max(1));
                (times, cpu_ps.saturating_mul(times))
            }
            OffloadPolicy::Adaptive
            | OffloadPolicy::CpuOnly
            | OffloadPolicy::Block
            | OffloadPolicy::CpuWhenFull => (1, cpu_ps - earlier_ps),
        };
        let best = self.least_loaded(now, request, &others)?;
        let device = &mut self.devices[best];
        let pages = device.allows(now, request, part.pages_min, others(best), limit_ps, times)?;
        Some((best, pages))
    }
}

impl Faults {
    fn count(&mut self, now: Instant, pages: u32, faulted: u32, percent_max: u32) {
        self.pages = self.pages.saturating_add(pages);
        self.faulted = self.faulted.saturating_add(faulted);
        if self.pages < FAULT_WINDOW_PAGES {
            return;
        }
        let share = u64::from(self.faulted) * 100;
        if share > u64::from(self.pages) * u64::from(percent_max) {
            self.paused_until = now.after(self.pause);
            self.pause = (self.pause * 2).min(FAULT_PAUSE_MAX);
        } else {
            self.pause = FAULT_PAUSE;
        }
        (self.pages, self.faulted) = (0, 0);
    }
}

fn picoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

fn duration(picoseconds: u64) -> Duration {
    Duration::from_nanos(picoseconds / 1000)
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
