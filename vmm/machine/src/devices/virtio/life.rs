//! The life of a card's vDPA device on one host: set up, suspended, resumed, reset.

use super::backing::{Backing, Event};
use super::group::Standing;
use super::nic::{Nic, State};
use super::queue::Queue;
use crate::clock;
use martlet_units::Instant;
use martlet_vdpa::virtio::feature;
use martlet_vdpa::{QueueConfig, QueueIndex, QueueState, VdpaError};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a device may take to suspend or to resume. Drivers have shorter limits of their own;
/// this one keeps a device that answers nothing from holding up everything.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What a device is told before it may pass frames, besides the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setup {
    pub(super) features: u64,
    pub(super) queues: Vec<(QueueIndex, QueueConfig)>,
    pub(super) pairs: u16,
}

/// What became of a card's device while it was waited for.
pub(super) enum Answer {
    /// It still goes on.
    Pending,
    /// There is nothing to wait for any more.
    Done,
    /// It failed; the text names the card.
    Failed(String),
}

impl Nic {
    /// An error for people: whose, and what.
    pub(super) fn failed(&self, error: &VdpaError) -> String {
        format!("network card {}: {error}", self.number)
    }

    /// What the guest has set up, checked once more: it may come from a peer.
    pub(super) fn setup(&self, state: &State) -> Result<Setup, String> {
        let check = |(number, queue): (u16, &Queue)| {
            let config = queue.check(self.kind.queue_size_max, self.memory.ram());
            config
                .map(|config| (QueueIndex(number), config))
                .map_err(|why| format!("network card {}: queue {number}: {why}", self.number))
        };
        let queues = (0..).zip(state.queues.iter().take(state.data_queues()));
        let queues =
            queues.filter(|(_, queue)| queue.ready).map(check).collect::<Result<_, _>>()?;
        Ok(Setup { features: self.device_features(state), queues, pairs: state.pairs })
    }

    /// The driver's features as the device gets them. That the guest's addresses are translated,
    /// by the map, is between the machine and the device: the guest sees its own memory.
    fn device_features(&self, state: &State) -> u64 {
        let has = self.device.identity().features;
        state.driver_features & has | feature::ACCESS_PLATFORM & has
    }

    /// Tells the device everything but its indices.
    pub(super) fn configure(
        &self,
        state: &mut State,
        setup: &Setup,
        standing: &Standing,
    ) -> Result<(), VdpaError> {
        // Also if it fails half way: then there is something to forget.
        state.step(Event::Configure);
        let device = &*self.device;
        device.on_config_change(self.interrupts.notify_config());
        device.set_features(setup.features)?;
        device.set_map(&self.memory.device_map())?;
        for (index, config) in &setup.queues {
            device.set_queue(*index, *config)?;
            device.on_queue_used(*index, self.interrupts.notify_queue());
        }
        device.set_queue_pairs(setup.pairs)?;
        if standing.logs_writes() {
            device.set_dirty_log(true)?;
        }
        Ok(())
    }

    /// DRIVER_OK: frames flow from now on, or from the next resume on.
    pub(super) fn driver_is_ready(&self, state: &mut State, standing: &Standing) {
        if standing.is_so() {
            state.step(Event::Postpone);
        } else if let Err(why) = self.start(state, standing) {
            self.break_down(state, &why);
        }
    }

    fn start(&self, state: &mut State, standing: &Standing) -> Result<(), String> {
        let setup = self.setup(state)?;
        let started = self.configure(state, &setup, standing).and_then(|()| self.device.start());
        if let Err(error) = started {
            self.forget(state, standing);
            return Err(self.failed(&error));
        }
        state.step(Event::Start);
        self.take_kicks(state);
        Ok(())
    }

    fn take_kicks(&self, state: &State) {
        let queues = u32::try_from(state.data_queues()).unwrap_or(0);
        self.kickable.store(queues, Ordering::Release);
    }

    /// The guest resets the card (2.4), or its machine is done with it.
    pub(super) fn reset(&self, state: &mut State, standing: &Standing) {
        self.forget(state, standing);
        *state = State::new(state.queues.len() - 1);
        self.interrupts.acknowledge(u32::MAX);
    }

    /// Makes the device forget everything. Pages that it wrote stay known to dirty tracking.
    pub(super) fn forget(&self, state: &mut State, standing: &Standing) {
        self.kickable.store(0, Ordering::Release);
        if state.backing == Backing::Resuming {
            wait_for(&|| self.device.poll_resume());
        }
        // While writes are logged the device stops first: its log is complete only then.
        let passes = matches!(state.backing, Backing::Running | Backing::Resuming);
        let stops = passes && standing.logs_writes() && self.device.begin_suspend().is_ok();
        if stops || state.backing == Backing::Suspending {
            wait_for(&|| self.device.poll_suspend());
        }
        if standing.logs_writes() {
            self.device.take_dirty(&mut |first, word| self.memory.mark_written(first, word));
        }
        if !matches!(state.backing, Backing::Idle | Backing::Due)
            && let Err(error) = self.device.reset()
        {
            self.complain(&format!("its device was not reset: {error}"));
        }
        state.step(Event::Forget);
        state.prepared = None;
    }

    /// Tells the device to stop, if it passes frames.
    pub(super) fn begin_suspend(&self, state: &mut State) -> Result<(), String> {
        if state.backing != Backing::Running {
            return Ok(());
        }
        self.device.begin_suspend().map_err(|error| self.failed(&error))?;
        state.step(Event::BeginSuspend);
        Ok(())
    }

    /// Whether it has stopped. After an error it passes frames as before.
    pub(super) fn poll_suspended(&self, state: &mut State, began: Instant) -> Answer {
        if state.backing != Backing::Suspending {
            return Answer::Done;
        }
        match self.device.poll_suspend() {
            Some(Ok(())) => {
                state.step(Event::Stopped);
                Answer::Done
            }
            Some(Err(error)) => {
                state.step(Event::NotStopped);
                Answer::Failed(self.failed(&error))
            }
            None if is_late(began) => {
                state.step(Event::NotStopped);
                self.no_answer(state, "suspend")
            }
            None => Answer::Pending,
        }
    }

    /// Sets a device going that is to go and was told to suspend before; pending until it has
    /// answered that.
    pub(super) fn poll_late_suspend(&self, standing: &Standing, began: Instant) -> Answer {
        let Some(mut state) = self.try_lock() else { return Answer::Pending };
        if state.backing != Backing::Suspending {
            return Answer::Done;
        }
        let answer = self.poll_suspended(&mut state, began);
        drop(state);
        match answer {
            Answer::Done => self.begin_resume(standing).map_or_else(Answer::Failed, |()| answer),
            Answer::Pending | Answer::Failed(_) => answer,
        }
    }

    /// The device's state is unknown; its driver in the guest has to begin anew.
    fn no_answer(&self, state: &mut State, what: &str) -> Answer {
        let why = format!("no answer to {what} in {} s", ANSWER_MAX.as_secs());
        self.break_down(state, &why);
        Answer::Failed(format!("network card {}: {why}", self.number))
    }

    /// Tells a device that stands to go on.
    pub(super) fn begin_resume(&self, standing: &Standing) -> Result<(), String> {
        let mut state = self.lock();
        let begun = match state.backing {
            Backing::Suspended => self.begin_suspended(&mut state, standing),
            Backing::Prepared => {
                self.forget(&mut state, standing);
                Err(format!("network card {}: its indices did not come", self.number))
            }
            Backing::Idle
            | Backing::Due
            | Backing::Running
            | Backing::Suspending
            | Backing::Resuming => Ok(()),
        };
        if let Err(why) = &begun {
            self.break_down(&mut state, why);
        }
        begun
    }

    fn begin_suspended(&self, state: &mut State, standing: &Standing) -> Result<(), String> {
        if state.prepared.take().is_none() && !self.device.identity().capabilities.resume {
            self.build_again(state, standing)?;
        }
        self.take_kicks(state);
        self.device.begin_resume().map_err(|error| self.failed(&error))?;
        state.step(Event::BeginResume);
        Ok(())
    }

    /// A device that can't resume is set up again where it stands.
    fn build_again(&self, state: &mut State, standing: &Standing) -> Result<(), String> {
        let setup = self.setup(state)?;
        let indices = self.indices(&setup)?;
        self.forget(state, standing);
        self.configure(state, &setup, standing)
            .and_then(|()| self.device.prepare())
            .and_then(|()| self.set_indices(state, &setup, &indices))
            .map_err(|error| self.failed(&error))
    }

    /// Whether it goes on. After an error it does as far as it can, and the guest is told.
    pub(super) fn poll_resumed(&self, began: Instant) -> Answer {
        let mut state = self.lock();
        if state.backing != Backing::Resuming {
            return Answer::Done;
        }
        match self.device.poll_resume() {
            Some(Ok(())) => {
                state.step(Event::Going);
                Answer::Done
            }
            Some(Err(error)) => {
                state.step(Event::Going);
                let why = self.failed(&error);
                self.break_down(&mut state, &why);
                Answer::Failed(why)
            }
            None if is_late(began) => {
                state.step(Event::Going);
                self.no_answer(&mut state, "resume")
            }
            None => Answer::Pending,
        }
    }

    /// What the guest's driver did while the device stood: it was set up, it got a command.
    pub(super) fn catch_up(&self, standing: &Standing) -> Result<(), String> {
        let mut state = self.lock();
        if state.backing == Backing::Due
            && let Err(why) = self.start(&mut state, standing)
        {
            self.break_down(&mut state, &why);
            return Err(why);
        }
        self.serve_control(&mut state, standing);
        Ok(())
    }

    /// How far the queues of a device that stands have come.
    pub(super) fn indices(&self, setup: &Setup) -> Result<Vec<QueueState>, String> {
        let at = |(index, _): &(QueueIndex, _)| self.device.queue_state(*index);
        setup.queues.iter().map(at).collect::<Result<_, _>>().map_err(|error| self.failed(&error))
    }

    pub(super) fn set_indices(
        &self,
        state: &mut State,
        setup: &Setup,
        indices: &[QueueState],
    ) -> Result<(), VdpaError> {
        for ((queue, _), at) in setup.queues.iter().zip(indices) {
            self.device.set_queue_state(*queue, *at)?;
        }
        state.step(Event::SetIndices);
        Ok(())
    }

    /// Begins or ends logging of what the device writes. One that is not set up learns it when it
    /// is.
    pub(super) fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError> {
        match self.lock().backing {
            Backing::Idle | Backing::Due => Ok(()),
            Backing::Running
            | Backing::Suspending
            | Backing::Suspended
            | Backing::Prepared
            | Backing::Resuming => self.device.set_dirty_log(on),
        }
    }
}

fn is_late(began: Instant) -> bool {
    clock::now().since(began) >= ANSWER_MAX
}

fn wait_for(poll: &dyn Fn() -> Option<Result<(), VdpaError>>) {
    let began = clock::now();
    while poll().is_none() && !is_late(began) {
        rustix::thread::sched_yield();
    }
}
