//! The shared access to a function's firmware.

use super::cleanup::Cleanup;
use super::events::EventQueue;
use super::pages::PageKeeper;
use crate::batch::Batch;
use crate::command::{
    CommandError, CommandId, CommandQueue, LateCompletion, Output, QueueStats, Request,
};
use crate::options::{Options, Pace};
use martlet_device_io::{Dma, Registers, Waiter};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::init_segment::{COMMAND_DOORBELL, FW_REV, GONE};
use martlet_units::Instant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a blocking call sleeps at most. Its interrupt may go to another thread that waits for
/// the same device; that thread moves our commands on, but can't wake us.
const WAIT_SLICE: Duration = Duration::from_micros(100);

/// How long it sleeps at least, unless the device interrupts. Every wait ends by a deadline on the
/// device's clock, so time has to pass even if somebody names a moment that is past again and again:
/// a clock in virtual time would stand.
const WAIT_MIN: Duration = Duration::from_micros(1);

/// How long after a command that was not answered no two are issued at a time. Firmware
/// 22.41.1000 hangs when it gets several changes of virtqueues at once (mail to "vdpa/mlx5:
/// Parallelize device suspend/resume", 2024); a driver can't tell it from others, but a second
/// attempt, one command after the other, succeeds.
const CAUTION: Duration = Duration::from_secs(10);

/// The firmware of one function. Shared.
pub(crate) struct Firmware {
    registers: Arc<dyn Registers>,
    dma: Arc<dyn Dma>,
    waiter: Arc<dyn Waiter>,
    options: Options,
    state: Mutex<State>,
    link_events: AtomicU64,
    /// Until when batches are series.
    cautious_until: AtomicU64,
}

struct State {
    /// Late answers about memory keys, for who keeps their books.
    late_keys: Vec<LateCompletion>,
    queue: CommandQueue,
    events: Option<EventQueue>,
    pages: PageKeeper,
    cleanup: Cleanup,
}

impl Firmware {
    pub(super) fn new(
        registers: Arc<dyn Registers>,
        dma: Arc<dyn Dma>,
        waiter: Arc<dyn Waiter>,
        options: Options,
        queue: CommandQueue,
    ) -> Firmware {
        let state = State {
            late_keys: Vec::new(),
            queue,
            events: None,
            pages: PageKeeper::default(),
            cleanup: Cleanup::new(options.deadlines.setup),
        };
        Firmware {
            registers,
            dma,
            waiter,
            options,
            state: Mutex::new(state),
            link_events: AtomicU64::new(0),
            cautious_until: AtomicU64::new(0),
        }
    }

    /// What the device is driven with.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The pace for commands about virtqueues: as wanted, but one after the other for a while after
    /// one was not answered.
    pub(crate) fn careful(&self, pace: Pace) -> Pace {
        let is_cautious = self.now().0 < self.cautious_until.load(Ordering::Acquire);
        if is_cautious { Pace::Serial } else { pace }
    }

    /// The device's registers.
    pub(crate) fn registers(&self) -> &dyn Registers {
        &*self.registers
    }

    /// Memory for the device.
    pub(crate) fn dma(&self) -> &dyn Dma {
        &*self.dma
    }

    pub(super) fn dma_handle(&self) -> &Arc<dyn Dma> {
        &self.dma
    }

    /// Begins with another command queue. Gives what the device had of the driver's memory.
    pub(super) fn replace_queue(&self, queue: CommandQueue) -> impl Sized + use<> {
        let mut state = self.lock();
        let old = std::mem::replace(&mut state.queue, queue);
        let past = old.stats();
        state.queue.set_past(past);
        state.events = None;
        state.late_keys.clear();
        let cleanup = Cleanup::new(self.options.deadlines.setup);
        let left = std::mem::replace(&mut state.cleanup, cleanup);
        (old, left, std::mem::take(&mut state.pages))
    }

    /// The device's clock.
    pub(crate) fn now(&self) -> Instant {
        self.waiter.now()
    }

    /// Where the device is waited for.
    pub(crate) fn waiter(&self) -> &dyn Waiter {
        &*self.waiter
    }

    /// What it has counted.
    pub(crate) fn stats(&self) -> QueueStats {
        self.lock().queue.stats()
    }

    /// Whether the device is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.lock().queue.is_gone()
    }

    /// Whether a command that was given up is still with the device: it may yet happen.
    pub(crate) fn is_out(&self, id: CommandId) -> bool {
        self.lock().queue.is_out(id)
    }

    /// Whether the function may have something of which nobody knows the number, or that could not
    /// be destroyed.
    pub(crate) fn has_hidden_objects(&self) -> bool {
        let state = self.lock();
        state.queue.lost_creations() > 0 || !state.cleanup.is_clean() || !state.late_keys.is_empty()
    }

    /// How often the device has told of a change of the link.
    pub(crate) fn link_events(&self) -> u64 {
        self.link_events.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug in this crate, and has been told; the state is whole
        // between any two steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves everything on by a step, without waiting, and the batch with it. Whether the batch is
    /// done.
    pub(crate) fn poll(&self, batch: &mut Batch) -> bool {
        self.waiter.poll();
        self.step(Some(batch)).0
    }

    /// Executes a batch.
    pub(crate) fn run(&self, batch: &mut Batch) {
        loop {
            let (done, until) = self.step(Some(batch));
            if done {
                return;
            }
            self.wait_until(until);
        }
    }

    /// Executes one command.
    pub(crate) fn call(
        &self,
        deadline: Duration,
        request: Request,
    ) -> Result<Output, CommandError> {
        let opcode = request.opcode;
        let mut batch = Batch::new(1, deadline);
        batch.push(request);
        self.run(&mut batch);
        batch.into_results().pop().unwrap_or(Err(CommandError::Skipped { opcode }))
    }

    /// Waits for the device, until a moment, or a slice. Time passes in any case.
    pub(crate) fn wait_until(&self, until: Option<Instant>) {
        let now = self.now();
        let (least, slice) = (now.after(WAIT_MIN), now.after(WAIT_SLICE));
        self.waiter.wait(Some(until.map_or(slice, |until| until.clamp(least, slice))));
    }

    /// Moves everything on by a step, without waiting: when to do that again even if the device
    /// does not interrupt.
    pub(crate) fn service(&self) -> Option<Instant> {
        self.waiter.poll();
        let (_, until) = self.step(None);
        let mut state = self.lock();
        if state.queue.is_idle() {
            state.queue.trim();
        }
        until
    }

    /// One step: what has happened is taken in, what is to be done is issued.
    fn step(&self, batch: Option<&mut Batch>) -> (bool, Option<Instant>) {
        let now = self.now();
        let mut state = self.lock();
        self.take_in(now, &mut state);
        let State { queue, pages, cleanup, .. } = &mut *state;
        pages.poll(now, queue, &*self.dma, self.options.deadlines.setup);
        cleanup.poll(now, queue);
        let mut done = true;
        let mut until = None;
        if let Some(batch) = batch {
            done = batch.poll(now, queue);
            until = batch.poll_timeout(now);
        }
        // One doorbell for everything.
        if let Some(vector) = queue.poll_doorbell() {
            self.registers.write32(COMMAND_DOORBELL, vector.to_be());
        }
        let waits = [until, queue.poll_timeout(), cleanup.poll_timeout(now)];
        (done, waits.into_iter().flatten().min())
    }

    /// Events, owner bits, deadlines.
    fn take_in(&self, now: Instant, state: &mut State) {
        let mut failed = false;
        if let Some(events) = &mut state.events {
            let news = events.drain(&*self.registers);
            state.queue.on_completion(now, news.commands);
            for (function, pages) in news.pages {
                state.pages.request(function, pages);
            }
            if news.link {
                self.link_events.fetch_add(1, Ordering::AcqRel);
            }
            failed = news.failed;
        } else {
            state.queue.on_poll(now);
        }
        let overdue = state.queue.on_timeout(now);
        if state.queue.take_given_up() {
            self.cautious_until.store(now.after(CAUTION).0, Ordering::Release);
        }
        if (overdue || failed) && !state.queue.is_gone() && self.looks_gone() {
            tracing::warn!("an mlx5 device does not answer any more: it is gone");
            state.queue.on_gone(now);
        }
        while let Some(late) = state.queue.poll_late() {
            tracing::warn!(command = %late.opcode, "an answer came after its deadline");
            // Who keeps the books of keys is asked first.
            if matches!(late.opcode, Opcode::CREATE_MKEY | Opcode::DESTROY_MKEY) {
                state.late_keys.push(late);
            } else {
                state.cleanup.add(late);
            }
        }
    }

    /// Whether the device's registers read as nothing does.
    pub(super) fn looks_gone(&self) -> bool {
        self.registers.read32(FW_REV) == GONE
    }

    /// Goes over to events, which this queue brings.
    pub(super) fn set_events(&self, events: Option<EventQueue>) {
        let mut state = self.lock();
        if let Some(events) = &events {
            events.arm(&*self.registers);
        }
        state.events = events;
    }

    /// The number of the event queue, while there is one.
    pub(super) fn event_queue(&self) -> Option<u8> {
        self.lock().events.as_ref().map(EventQueue::number)
    }

    /// Gives the firmware pages, and waits until it has them.
    pub(super) fn give_pages(&self, function: u16, pages: i32) {
        self.lock().pages.request(function, pages);
        let end = self.now().after(self.options.deadlines.setup);
        while !self.lock().pages.is_idle() && self.now() < end {
            let (_, until) = self.step(None);
            self.wait_until(until);
        }
    }

    /// The function is down: whatever was made is gone.
    pub(super) fn forget_lost_creations(&self) {
        self.lock().queue.forget_lost_creations();
    }

    /// Takes all pages back.
    pub(super) fn take_all_pages(&self) {
        let held = i32::try_from(self.lock().pages.held()).unwrap_or(i32::MAX);
        self.give_pages(0, -held);
    }

    /// Whether there were late answers to changes of virtqueues since the last call: what those are
    /// in has to be looked at again.
    pub(crate) fn take_late_changes(&self) -> bool {
        self.lock().cleanup.take_changes()
    }

    /// Moves everything on by a step, and gives the command queue to `body` with the late answers
    /// about keys, of which it leaves those that are not its own. Rings the doorbell afterwards. When to do that again even if the device does not
    /// interrupt.
    pub(crate) fn drive<T>(
        &self,
        body: impl FnOnce(Instant, &mut CommandQueue, &dyn Dma, &mut Vec<LateCompletion>) -> T,
    ) -> (T, Option<Instant>) {
        self.waiter.poll();
        let (_, until) = self.step(None);
        let now = self.now();
        let mut state = self.lock();
        let mut late = std::mem::take(&mut state.late_keys);
        let value = body(now, &mut state.queue, &*self.dma, &mut late);
        late.into_iter().for_each(|late| state.cleanup.add(late));
        if let Some(vector) = state.queue.poll_doorbell() {
            self.registers.write32(COMMAND_DOORBELL, vector.to_be());
        }
        let timeout = state.queue.poll_timeout();
        (value, until.into_iter().chain(timeout).min())
    }
}

impl std::fmt::Debug for Firmware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Firmware").finish_non_exhaustive()
    }
}

/// Whether a command counts as done: with the device, everything on it is gone as well (Linux
/// `cmd.c`, `mlx5_internal_err_ret_value`).
pub(crate) fn is_done(opcode: Opcode, result: &Result<Output, CommandError>) -> bool {
    match result {
        Ok(_) => true,
        Err(CommandError::Gone { .. }) => opcode.is_destroy(),
        Err(CommandError::NotIssued { because, .. }) => {
            opcode.is_destroy() && *because == crate::command::SubmitError::Gone
        }
        Err(_) => false,
    }
}
