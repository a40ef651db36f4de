//! The thread of one vCPU.

use super::backend::{BackendError, Exit, VcpuBackend};
use super::orders::{Order, Task, Then};
use super::shared::{Exchange, Shared, lock};
use crate::EndCause;
use crate::clock;
use crate::devices::Effect;
use martlet_engine::LoadFor;
use martlet_units::Instant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a throttled vCPU runs between two sleeps, at least.
pub(super) const THROTTLE_RUN: Duration = Duration::from_millis(10);

/// How long a vCPU stands at a rehearsal, at most: a host that does not get all of them out by then
/// does not in a blackout either.
pub(super) const REHEARSAL_MAX: Duration = Duration::from_millis(30);

/// Parts of one instruction that are served while its vCPU is on its way out.
const PARTS_MAX: u32 = 1024;

pub(super) struct VcpuThread {
    pub(super) number: u32,
    pub(super) backend: Box<dyn VcpuBackend>,
    pub(super) shared: Arc<Shared>,
    /// The order that was last carried out, or is being.
    pub(super) order: Order,
    /// While throttled: since when the guest runs.
    pub(super) running_since: Option<Instant>,
}

impl VcpuThread {
    /// Carries out orders until it is told to end.
    pub(super) fn main(mut self) {
        loop {
            self.order = self.shared.orders.wait(self.order, self.number);
            // Orders that come while the guest runs end `run_guest`.
            loop {
                match self.order.task() {
                    Task::None => {}
                    Task::Leave => self.leave(),
                    Task::Save => self.leave_and_save(),
                    Task::Load => self.load(),
                    Task::Exit => {
                        self.shared.seats[self.number as usize].kicker.detach();
                        return;
                    }
                }
                if self.order.then() == Then::Stay || self.shared.has_ended() {
                    break;
                }
                self.run_guest();
                let latest = self.shared.orders.current();
                if latest == self.order {
                    break;
                }
                self.order = latest;
            }
        }
    }

    /// Runs the guest until another order is given or the guest ends.
    fn run_guest(&mut self) {
        let kicker = Arc::clone(&self.shared.seats[self.number as usize].kicker);
        loop {
            // First clear, then look: a kick that follows an order given after the look stays.
            kicker.clear();
            if self.shared.orders.current() != self.order || self.shared.has_ended() {
                return;
            }
            if self.throttle_is_due() {
                continue;
            }
            let ran = guarded(|| Ok(serve(&self.shared, self.backend.run()?)));
            let effect = match ran {
                Ok(effect) => effect,
                Err(error) => Effect::End(self.crash(&error)),
            };
            match effect {
                Effect::None => {}
                Effect::End(cause) => self.shared.end(cause),
            }
        }
    }

    fn crash(&self, error: &BackendError) -> EndCause {
        EndCause::Crash(format!("vCPU {}: {error}", self.number))
    }

    fn leave(&mut self) {
        let finished = guarded(|| self.finish_io());
        self.shared.arrive(&self.shared.out);
        if let Err(error) = finished {
            self.shared.end(self.crash(&error));
        }
    }

    fn leave_and_save(&mut self) {
        let finished = guarded(|| self.finish_io().and_then(|()| self.backend.settle()));
        let is_rehearsal = self.order.then() == Then::Run;
        let go_on = is_rehearsal.then(|| clock::now().after(REHEARSAL_MAX));
        self.shared.arrive(&self.shared.out);
        // Until all are out, one may send another an interrupt, which that one's state must have.
        // In a rehearsal they wait because one that ran on would take its processor from those that
        // have yet to leave, and more than the stop would be measured.
        self.shared.out.wait_until(go_on);
        let saved = finished.and_then(|()| guarded(|| self.backend.save()));
        self.exchange(|exchange| exchange.saved = Some(saved));
        self.shared.arrive(&self.shared.done);
        if let Some(go_on) = go_on {
            self.shared.orders.wait_until(self.order, go_on);
        }
    }

    /// Completes the instruction that the guest left in. It has few parts: the emulator goes back
    /// to the guest between the iterations of a repeated one.
    fn finish_io(&mut self) -> Result<(), BackendError> {
        for _ in 0..PARTS_MAX {
            let effect = match self.backend.finish_io()? {
                Exit::Interrupted => return Ok(()),
                exit => serve(&self.shared, exit),
            };
            if let Effect::End(cause) = effect {
                self.shared.end(cause);
            }
        }
        Err(BackendError::state(format!("an instruction of more than {PARTS_MAX} parts")))
    }

    fn load(&mut self) {
        let mut input = None;
        self.exchange(|exchange| input = exchange.input.take());
        let (state, what_for) = input.expect("a state lies there before the order to load it");
        let loaded = guarded(|| self.load_and_try(&state, what_for));
        self.exchange(|exchange| exchange.loaded = Some(loaded));
        self.shared.arrive(&self.shared.done);
    }

    fn load_and_try(&mut self, state: &[u8], what_for: LoadFor) -> Result<(), BackendError> {
        self.backend.load(state, what_for)?;
        self.backend.enter_and_leave()
    }

    fn exchange(&self, with: impl FnOnce(&mut Exchange)) {
        with(&mut lock(&self.shared.seats[self.number as usize].exchange));
    }

    /// Sleeps if the guest is throttled and has run for its time, and says whether it did. An
    /// order ends the sleep at once. A vCPU that was woken late still gets its time.
    fn throttle_is_due(&mut self) -> bool {
        let percent = u32::from(self.shared.throttle_percent.load(Ordering::Relaxed));
        if percent == 0 {
            self.running_since = None;
            return false;
        }
        let now = clock::now();
        let ran = now.since(*self.running_since.get_or_insert(now));
        if ran < THROTTLE_RUN {
            return false;
        }
        self.shared.orders.sleep(self.order, Some(throttle_sleep(percent, ran)));
        self.running_since = None;
        true
    }
}

/// Makes a panic an error: whoever gave the order waits for this thread, with the machine's lock.
fn guarded<T>(work: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(BackendError::Defect { what: text.unwrap_or("a panic without words").to_owned() })
    })
}

/// How long to sleep after running for `ran`, so that the guest loses `percent` of its time. A
/// vCPU whose thread did not get a processor meanwhile has not run for all of that time.
fn throttle_sleep(percent: u32, ran: Duration) -> Duration {
    ran.min(2 * THROTTLE_RUN) * percent / (100 - percent.min(99))
}

/// Gives the guest what it left for.
fn serve(shared: &Shared, exit: Exit<'_>) -> Effect {
    match exit {
        Exit::Out { port, size, data } => shared.bus.write(port, size, data),
        Exit::In { port, size, data } => {
            shared.bus.read(port, size, data);
            Effect::None
        }
        Exit::MmioRead { gpa, data } => {
            shared.bus.read_memory(gpa, data);
            Effect::None
        }
        Exit::MmioWrite { gpa, data } => {
            shared.bus.write_memory(gpa, data);
            Effect::None
        }
        Exit::Interrupted => Effect::None,
        Exit::Reset => Effect::End(EndCause::Reset),
        Exit::TripleFault if shared.resets_at_triple_fault.load(Ordering::Relaxed) => {
            Effect::End(EndCause::Reset)
        }
        Exit::TripleFault => Effect::End(EndCause::Crash("triple fault".into())),
        Exit::Shutdown => Effect::End(EndCause::Shutdown),
        Exit::Ended(reason) => Effect::End(EndCause::Crash(reason)),
    }
}
