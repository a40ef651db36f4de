//! The stop of the guest, from its announcement until the permit is here, and the way back from it.
//! Whatever is told to stop is asked whether it has; nobody waits for it.

use super::last_run::LastRun;
use super::moments::Moments;
use super::{Attempt, SourceIo, Wait};
use crate::{Error, Fault, Paused, RunState, Status};
use martlet_protocol::{RunPermit, SourceEvent, SourcePhase, limits};
use martlet_ram::{Chunk, Scanner};
use martlet_units::Instant;
use std::task::Poll;
use std::time::Duration;

/// Last pages up to this many are sent right here; more are worth the lanes' wake-up.
pub(super) const LAST_PAGES_INLINE_MAX: u64 = 1024;

/// From the announcement of the stop to the stop. The destination gets awake meanwhile, and on a
/// host with few cores the vCPUs get theirs back from the threads of the round before: a vCPU that
/// waits for a core when it is told to stop has been standing still already.
const SETTLE: Duration = Duration::from_micros(300);

/// Whoever waits for vCPUs to leave the guest stays awake so long: one is out after some 20 to
/// 100 us, and being woken costs about as much again.
const AWAKE_FOR_EXIT: Duration = Duration::from_micros(200);

/// Whoever waits for their state stays awake so long. It takes 10 us, or on a nested KVM 60; where
/// a processor is wanted by others, it is the vCPUs' that save.
const AWAKE_FOR_STATE: Duration = Duration::from_micros(30);

/// Devices take milliseconds. They are asked this often whether they stand, and seldomer once they
/// have taken long.
const DEVICES_INTERVAL: Duration = Duration::from_micros(50);
const DEVICES_INTERVAL_LONG: Duration = Duration::from_millis(1);
const DEVICES_LONG: Duration = Duration::from_millis(50);

/// Somebody says when vCPUs are out or saved; it is looked after all the same.
const VCPUS_INTERVAL: Duration = Duration::from_millis(10);

/// Everything about the stop that is under way, or was.
#[derive(Debug)]
pub(super) struct Switchover {
    stop: Stop,
    /// When the stop has taken too long, whatever it waits for, and what it had.
    deadline: Instant,
    limit: Duration,
    pub(super) moments: Option<Moments>,
    /// Between the stop and the commit.
    pub(super) last_run: Option<LastRun>,
    /// The last pages, for as long as the stop may be called off.
    pub(super) last_chunks: Vec<Chunk>,
    /// How many of them the lanes have.
    pub(super) last_handed: usize,
    pub(super) call_offs: u32,
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Nothing.
    No,
    /// It was announced.
    Settling { until: Instant },
    /// All devices were told to stop.
    Suspending { since: Instant },
    /// All vCPUs were.
    Pausing { since: Instant },
    /// None runs; they save their state.
    Saving { since: Instant },
}

impl Switchover {
    pub(super) fn new() -> Switchover {
        Switchover {
            stop: Stop::No,
            deadline: Instant::default(),
            limit: Duration::ZERO,
            moments: None,
            last_run: None,
            // The blackout allocates nothing for them.
            last_chunks: Vec::with_capacity(usize::try_from(LAST_PAGES_INLINE_MAX).unwrap_or(0)),
            last_handed: 0,
            call_offs: 0,
        }
    }

    /// Whether the guest is being stopped, or was and has not gone on.
    pub(super) fn is_stopping(&self) -> bool {
        self.stop != Stop::No || self.moments.is_some()
    }

    pub(super) fn await_state(&mut self, now: Instant) {
        self.stop = Stop::Saving { since: now };
    }

    /// The next of the last chunks for the lanes; kept for a stop that is called off.
    pub(super) fn next_last(&mut self, scanner: &mut Scanner) -> Option<Chunk> {
        if let Some(chunk) = self.last_chunks.get(self.last_handed) {
            return Some(*chunk);
        }
        let chunk = scanner.next_last()?;
        self.last_chunks.push(chunk);
        Some(chunk)
    }

    /// How to wait for what is under way; `None` if nothing is.
    pub(super) fn wait(&self, io: &dyn SourceIo) -> Option<Wait> {
        let now = io.now();
        let for_run = self.last_run.as_ref().and_then(|last| last.wait(io));
        if for_run == Some(Wait::No) {
            return for_run;
        }
        let for_stop = match self.stop {
            Stop::No => return for_run,
            Stop::Settling { until } => until,
            Stop::Suspending { since } => {
                let is_long = now.since(since) > DEVICES_LONG;
                now.after(if is_long { DEVICES_INTERVAL_LONG } else { DEVICES_INTERVAL })
            }
            Stop::Pausing { since } if now.since(since) < AWAKE_FOR_EXIT => {
                return Some(Wait::Yield);
            }
            Stop::Saving { since } if now.since(since) < AWAKE_FOR_STATE => {
                return Some(Wait::Yield);
            }
            Stop::Pausing { .. } | Stop::Saving { .. } => now.after(VCPUS_INTERVAL),
        };
        let run_at = if let Some(Wait::Until(at)) = for_run { at } else { for_stop };
        Some(Wait::Until(for_stop.min(run_at).min(self.deadline.max(now))))
    }
}

impl Attempt {
    /// The destination has been told; what was announced is on its way before the guest stops.
    pub(super) fn begin_stop(&mut self, io: &mut dyn SourceIo) {
        self.flush(io);
        if let Some(lanes) = io.lanes() {
            lanes.arm();
        }
        let now = io.now();
        let accepted = self.accepted_blackout(io.downtime_limit());
        self.switchover.limit = limits::blackout_max(accepted);
        self.switchover.deadline = now.after(self.switchover.limit);
        self.switchover.stop = Stop::Settling { until: now.after(SETTLE) };
    }

    /// Brings the stop as far as it goes.
    pub(super) fn advance_stop(&mut self, io: &mut dyn SourceIo) {
        let now = io.now();
        match self.switchover.stop {
            Stop::No => {}
            Stop::Settling { until } if now < until => {}
            Stop::Settling { .. } => {
                self.progress.status = Status::Device;
                let waker = io.waker();
                io.vmm().begin_suspend(&waker);
                self.switchover.stop = Stop::Suspending { since: now };
                self.await_devices(now, io);
            }
            Stop::Suspending { since } => self.await_devices(since, io),
            Stop::Pausing { .. } => self.await_vcpus(io),
            Stop::Saving { .. } => self.await_state(io),
        }
    }

    fn await_devices(&mut self, since: Instant, io: &mut dyn SourceIo) {
        match io.vmm().poll_suspended() {
            Poll::Pending => self.check_stop(Fault::Device, "suspend the devices", io),
            Poll::Ready(Err(error)) => {
                self.switchover.stop = Stop::No;
                self.host_failed(error);
            }
            Poll::Ready(Ok(())) => {
                // The vCPUs ran until here: devices take longer to stop.
                let stop = io.now();
                let waker = io.waker();
                io.vmm().begin_pause(&waker);
                self.switchover.moments = Some(Moments::starting(since, stop));
                self.switchover.stop = Stop::Pausing { since: stop };
                self.await_vcpus(io);
            }
        }
    }

    fn await_vcpus(&mut self, io: &mut dyn SourceIo) {
        match io.vmm().poll_paused() {
            Poll::Pending => self.check_stop(Fault::Vmm, "stop the guest", io),
            Poll::Ready(Err(error)) => {
                self.switchover.stop = Stop::No;
                self.switchover.moments = None;
                self.host_failed(error);
            }
            Poll::Ready(Ok(paused)) => {
                // First of all: whatever goes wrong from here on, the machine has the permit.
                let running = paused.was == RunState::Running;
                self.tell(SourceEvent::Paused { permit: paused.permit, running });
                self.switchover.stop = Stop::No;
                if let Some(moments) = &mut self.switchover.moments {
                    moments.paused = io.now();
                }
            }
        }
    }

    fn await_state(&mut self, io: &mut dyn SourceIo) {
        match io.vmm().poll_state() {
            Poll::Pending => self.check_stop(Fault::Vmm, "save the state", io),
            Poll::Ready(Err(error)) => {
                self.switchover.stop = Stop::No;
                self.host_failed(error);
            }
            Poll::Ready(Ok(bytes)) => {
                self.switchover.stop = Stop::No;
                self.on_state(bytes, io);
            }
        }
    }

    /// The guest does not stand for ever, whatever is waited for.
    fn check_stop(&mut self, fault: Fault, doing: &'static str, io: &mut dyn SourceIo) {
        let now = io.now();
        if now < self.switchover.deadline {
            return;
        }
        self.undo_stop(io);
        let reason = format!("it took longer than {:?}", self.switchover.limit);
        self.host_failed(Error::new(fault, doing, reason));
    }

    /// The attempt ended by something else while the guest was being stopped: it goes on.
    pub(super) fn withdraw_stop(&mut self, io: &mut dyn SourceIo) {
        let stops = matches!(self.switchover.stop, Stop::Settling { .. })
            || self.switchover.is_unanswered();
        if !stops || self.phase() == SourcePhase::Pausing {
            return;
        }
        self.undo_stop(io);
        if self.phase() == SourcePhase::Withdrawing {
            // No permit will come.
            let reason = "the stop was withdrawn".to_owned();
            self.tell(SourceEvent::HostFailed { reason });
        }
    }

    /// Devices and vCPUs go on, whenever they answer.
    fn undo_stop(&mut self, io: &mut dyn SourceIo) {
        if self.switchover.is_unanswered() {
            io.vmm().resume(None);
            self.switchover.moments = None;
        }
        self.switchover.stop = Stop::No;
        if let Some(lanes) = io.lanes() {
            lanes.disarm();
        }
    }

    /// The guest goes on here.
    pub(super) fn resume(&mut self, permit: RunPermit, running: bool, io: &mut dyn SourceIo) {
        // First of all: nothing that goes wrong here takes the permit with it.
        self.switchover.stop = Stop::No;
        io.vmm().resume(Some(Paused { permit, was: RunState::of(running) }));
        let is_over = self.phase().is_over();
        if is_over {
            io.vmm().set_throttle(0);
        }
        if let Some(lanes) = io.lanes() {
            lanes.disarm();
        }
        if is_over {
            self.switchover.last_run = None;
            // Takes milliseconds, so the guest does not wait for it.
            self.precopy.tracker = None;
        }
    }
}

impl Switchover {
    /// Whether devices or vCPUs were told to stop and the permit is still with the machine.
    fn is_unanswered(&self) -> bool {
        matches!(self.stop, Stop::Suspending { .. } | Stop::Pausing { .. })
    }
}
