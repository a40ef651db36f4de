//! The shared access to a function's firmware.

use super::events::EventQueue;
use super::pages::PageKeeper;
use crate::batch::Batch;
use crate::command::{CommandError, CommandQueue, End, Output, QueueStats, Request};
use crate::options::{Options, Pace};
use martlet_device_io::{Dma, Registers, Waiter};
use martlet_mlx5_abi::init_segment::{COMMAND_DOORBELL, FW_REV, GONE};
use martlet_units::Instant;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    /// The interface was disabled, and has not said yet that it is.
    told_to_stop: AtomicBool,
}

struct State {
    queue: CommandQueue,
    events: Option<EventQueue>,
    /// One that is not read any more, and is written until the function has stopped.
    old_events: Option<EventQueue>,
    pages: PageKeeper,
}

impl State {
    fn new(queue: CommandQueue) -> State {
        State { queue, events: None, old_events: None, pages: PageKeeper::default() }
    }
}

impl Firmware {
    pub(super) fn new(
        registers: Arc<dyn Registers>,
        dma: Arc<dyn Dma>,
        waiter: Arc<dyn Waiter>,
        options: Options,
        queue: CommandQueue,
    ) -> Firmware {
        let state = State::new(queue);
        Firmware {
            registers,
            dma,
            waiter,
            options,
            state: Mutex::new(state),
            link_events: AtomicU64::new(0),
            cautious_until: AtomicU64::new(0),
            told_to_stop: AtomicBool::new(false),
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

    /// Begins with another command queue, after the function was stopped: what it had of the
    /// driver's memory is free.
    pub(super) fn replace_queue(&self, mut queue: CommandQueue) {
        let mut state = self.lock();
        queue.set_past(state.queue.stats());
        *state = State::new(queue);
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
        self.end() == Some(End::Gone)
    }

    /// Why nothing is sent to the function any more; `None` as long as it answers.
    pub(crate) fn end(&self) -> Option<End> {
        self.lock().queue.end()
    }

    /// What the function has said, or refused, leaves nobody knowing what it does: nothing more is
    /// sent to it.
    pub(crate) fn taint(&self) {
        self.lock().queue.on_end(self.now(), End::Tainted);
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
        self.run_while(batch, |batch| !batch.is_done());
    }

    /// Executes a batch for as long as something is so.
    pub(crate) fn run_while(&self, batch: &mut Batch, is_so: impl Fn(&Batch) -> bool) {
        loop {
            let (_, until) = self.step(Some(batch));
            if !is_so(batch) {
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

    /// When the next answer is looked for, even if the device does not interrupt.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.lock().queue.poll_timeout()
    }

    /// One step: what has happened is taken in, what is to be done is issued.
    fn step(&self, batch: Option<&mut Batch>) -> (bool, Option<Instant>) {
        let now = self.now();
        let mut state = self.lock();
        self.take_in(now, &mut state);
        let State { queue, pages, .. } = &mut *state;
        pages.poll(now, queue, &*self.dma, self.options.deadlines.setup);
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
        let waits = [until, queue.poll_timeout()];
        (done, waits.into_iter().flatten().min())
    }

    /// Events, owner bits, deadlines.
    fn take_in(&self, now: Instant, state: &mut State) {
        if let Some(events) = &mut state.events {
            let news = events.drain(&*self.registers);
            state.queue.on_completion(now, news.commands);
            for (function, pages) in news.pages {
                state.pages.request(function, pages);
            }
            if news.link {
                self.link_events.fetch_add(1, Ordering::AcqRel);
            }
        } else {
            state.queue.on_poll(now);
        }
        let before = state.queue.end();
        let overdue = state.queue.on_timeout(now);
        if overdue && before != Some(End::Gone) && self.looks_gone() {
            tracing::warn!("an mlx5 device does not answer any more: it is gone");
            state.queue.on_end(now, End::Gone);
        } else if before.is_none() && state.queue.end().is_some() {
            tracing::warn!(
                "a command to an mlx5 device was not answered: its function begins anew"
            );
            self.cautious_until.store(now.after(CAUTION).0, Ordering::Release);
        }
    }

    /// Whether the device's registers read as nothing does.
    pub(super) fn looks_gone(&self) -> bool {
        self.registers.read32(FW_REV) == GONE
    }

    /// Goes over to events, which this queue brings.
    pub(super) fn set_events(&self, events: EventQueue) {
        events.arm(&*self.registers);
        self.lock().events = Some(events);
    }

    /// Goes over to looking for answers. The queue's memory stays: the device may still write it.
    pub(super) fn part_with_events(&self) {
        let mut state = self.lock();
        if let Some(events) = state.events.take() {
            state.old_events = Some(events);
        }
    }

    /// Notes whether the function was told to stop and has not said that it has; whether it was so
    /// before.
    pub(super) fn set_told_to_stop(&self, told: bool) -> bool {
        // Calls that stop and start come one after the other: nothing is published by this.
        self.told_to_stop.swap(told, Ordering::Relaxed)
    }

    /// Gives the firmware pages, and waits until it has them.
    pub(super) fn give_pages(&self, function: u16, pages: i32) {
        self.lock().pages.request(function, pages);
        self.manage_pages();
    }

    fn manage_pages(&self) {
        while self.end().is_none() && !self.lock().pages.is_idle() {
            let (_, until) = self.step(None);
            self.wait_until(until);
        }
    }

    /// Whether the firmware has none.
    pub(super) fn has_no_pages(&self) -> bool {
        self.lock().pages.is_empty()
    }

    /// Takes all pages back.
    pub(super) fn take_all_pages(&self) {
        self.lock().pages.take_all();
        self.manage_pages();
    }
}

impl std::fmt::Debug for Firmware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Firmware").finish_non_exhaustive()
    }
}
