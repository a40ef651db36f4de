//! The way of a card's vDPA device: set up, suspended, resumed, taken over, reset.
//!
//! ```text
//!            DRIVER_OK            begin_suspend          answer
//! Idle ----------------> Running ---------------> Suspending ----> Suspended
//!  |   devices stand        ^  ^--------------------- error           |  ^
//!  +--------------> Due ----+  |                                      |  | load with indices
//!                   resume     +------ answer --- Resuming <----------+  Prepared <--- load
//! ```
//! A reset leads back to `Idle` from everywhere.

use super::group::Standing;
use super::nic::{Nic, State};
use super::queue::Queue;
use super::registers::status;
use super::saved::{SavedIndices, SavedNic};
use crate::clock;
use martlet_vdpa::virtio::feature;
use martlet_vdpa::{QueueConfig, QueueIndex, QueueState, VdpaError};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a device may take to suspend or to resume. Drivers have shorter limits of their own;
/// this one keeps a device that answers nothing from holding up everything.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Where a card's device stands; see the module's comment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Not set up.
    Idle,
    /// The guest has set it up while all devices stand: it begins with their resume.
    Due,
    /// It passes frames.
    Running,
    /// It was told to stop.
    Suspending,
    /// It stands where its indices say.
    Suspended,
    /// At a destination: everything is there but the indices.
    Prepared,
    /// It was told to go on.
    Resuming,
}

/// What a device was prepared for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prepared {
    features: u64,
    queues: Vec<(QueueIndex, QueueConfig)>,
    pairs: u16,
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
    fn failed(&self, error: &VdpaError) -> String {
        format!("network card {}: {error}", self.number)
    }

    /// What the guest has set up, checked once more: it may come from a peer.
    fn wanted(&self, state: &State) -> Result<Prepared, String> {
        let check = |(number, queue): (u16, &Queue)| {
            let config = queue.check(self.kind.queue_size_max, self.memory.ram());
            config
                .map(|config| (QueueIndex(number), config))
                .map_err(|why| format!("network card {}: queue {number}: {why}", self.number))
        };
        let queues = (0..).zip(state.queues.iter().take(state.data_queues()));
        let queues =
            queues.filter(|(_, queue)| queue.ready).map(check).collect::<Result<_, _>>()?;
        Ok(Prepared { features: self.device_features(state), queues, pairs: state.pairs })
    }

    /// The driver's features as the device gets them. That the guest's addresses are translated,
    /// by the map, is between the machine and the device: the guest sees its own memory.
    fn device_features(&self, state: &State) -> u64 {
        let has = self.device.identity().features;
        state.driver_features & has | feature::ACCESS_PLATFORM & has
    }

    /// Tells the device everything but the indices.
    fn configure(&self, wanted: &Prepared, standing: &Standing) -> Result<(), VdpaError> {
        let device = &*self.device;
        device.on_config_change(self.interrupts.notify_config());
        device.set_features(wanted.features)?;
        device.set_map(&self.memory.device_map())?;
        for (index, config) in &wanted.queues {
            device.set_queue(*index, *config)?;
            device.on_queue_used(*index, self.interrupts.notify_queue());
        }
        device.set_queue_pairs(wanted.pairs)?;
        if standing.logs_writes() {
            device.set_dirty_log(true)?;
        }
        Ok(())
    }

    /// DRIVER_OK: frames flow from now on, or from the next resume on.
    pub(super) fn driver_is_ready(&self, state: &mut State, standing: &Standing) {
        if standing.is_so() {
            state.backing = Backing::Due;
        } else if let Err(why) = self.activate(state, standing) {
            self.break_down(state, &why);
        }
    }

    fn activate(&self, state: &mut State, standing: &Standing) -> Result<(), String> {
        let wanted = self.wanted(state)?;
        let started = self.configure(&wanted, standing).and_then(|()| self.device.start());
        if let Err(error) = started {
            self.forget(state, standing);
            return Err(self.failed(&error));
        }
        state.backing = Backing::Running;
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
        *state = State { backing: state.backing, ..State::new(state.queues.len() - 1) };
        self.interrupts.acknowledge(u32::MAX);
    }

    /// Makes the device forget everything. Pages that it wrote stay known to dirty tracking.
    fn forget(&self, state: &mut State, standing: &Standing) {
        self.kickable.store(0, Ordering::Release);
        let deadline = clock::now().after(ANSWER_MAX);
        let wait = |poll: &dyn Fn() -> Option<Result<(), VdpaError>>| {
            while poll().is_none() && clock::now() < deadline {
                rustix::thread::sched_yield();
            }
        };
        if state.backing == Backing::Resuming {
            wait(&|| self.device.poll_resume());
        }
        // While writes are logged the device stops first: its log is complete only then.
        let passes = matches!(state.backing, Backing::Running | Backing::Resuming);
        let stops = passes && standing.logs_writes() && self.device.begin_suspend().is_ok();
        if stops || state.backing == Backing::Suspending {
            wait(&|| self.device.poll_suspend());
        }
        if standing.logs_writes() {
            self.device.take_dirty(&mut |first, word| self.memory.mark_written(first, word));
        }
        if state.backing != Backing::Idle
            && let Err(error) = self.device.reset()
        {
            tracing::warn!(card = self.number, %error, "a network card's device was not reset");
        }
        state.backing = Backing::Idle;
        state.prepared = None;
    }

    /// Tells the device to stop, if it passes frames.
    pub(super) fn begin_suspend(&self) -> Result<(), String> {
        let mut state = self.lock();
        if state.backing != Backing::Running {
            return Ok(());
        }
        self.device.begin_suspend().map_err(|error| self.failed(&error))?;
        state.backing = Backing::Suspending;
        Ok(())
    }

    /// Whether it has stopped. After an error it passes frames as before.
    pub(super) fn poll_suspended(&self, began: martlet_units::Instant) -> Answer {
        let mut state = self.lock();
        if state.backing != Backing::Suspending {
            return Answer::Done;
        }
        match self.device.poll_suspend() {
            Some(Ok(())) => {
                state.backing = Backing::Suspended;
                Answer::Done
            }
            Some(Err(error)) => {
                state.backing = Backing::Running;
                Answer::Failed(self.failed(&error))
            }
            None => self.still_pending(&mut state, began, "suspend"),
        }
    }

    fn still_pending(
        &self,
        state: &mut State,
        began: martlet_units::Instant,
        what: &str,
    ) -> Answer {
        let waited = clock::now().since(began);
        if waited < ANSWER_MAX {
            return Answer::Pending;
        }
        // Its state is unknown; its driver in the guest has to begin anew.
        state.backing = Backing::Running;
        let why = format!("no answer to {what} in {} ms", waited.as_millis());
        self.break_down(state, &why);
        Answer::Failed(format!("network card {}: {why}", self.number))
    }

    /// Tells the device to go on; what could not be done while it stood is done now.
    pub(super) fn begin_resume(&self, standing: &Standing) -> Result<(), String> {
        let mut state = self.lock();
        let begun = match state.backing {
            Backing::Suspended => self.begin_suspended(&mut state, standing),
            Backing::Due => self.activate(&mut state, standing),
            Backing::Prepared => {
                self.forget(&mut state, standing);
                Err(format!("network card {}: its indices did not come", self.number))
            }
            Backing::Idle | Backing::Running | Backing::Suspending | Backing::Resuming => Ok(()),
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
        state.backing = Backing::Resuming;
        Ok(())
    }

    /// A device that can't resume is set up again where it stands.
    fn build_again(&self, state: &mut State, standing: &Standing) -> Result<(), String> {
        let wanted = self.wanted(state)?;
        let indices = self.indices(&wanted)?;
        self.forget(state, standing);
        self.configure(&wanted, standing)
            .and_then(|()| self.device.prepare())
            .and_then(|()| self.set_indices(&wanted, &indices))
            .map_err(|error| self.failed(&error))
    }

    /// Whether it goes on. After an error it does as far as it can, and the guest is told.
    pub(super) fn poll_resumed(
        &self,
        standing: &Standing,
        began: martlet_units::Instant,
    ) -> Answer {
        let mut state = self.lock();
        if state.backing != Backing::Resuming {
            self.serve_control(&mut state, standing);
            return Answer::Done;
        }
        match self.device.poll_resume() {
            Some(Ok(())) => {
                state.backing = Backing::Running;
                // A command that came meanwhile.
                self.serve_control(&mut state, standing);
                Answer::Done
            }
            Some(Err(error)) => {
                state.backing = Backing::Running;
                let why = self.failed(&error);
                self.break_down(&mut state, &why);
                Answer::Failed(why)
            }
            None => self.still_pending(&mut state, began, "resume"),
        }
    }

    /// Begins or ends logging of what the device writes. One that is not set up learns it when it
    /// is.
    pub(super) fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError> {
        if self.lock().backing == Backing::Idle {
            return Ok(());
        }
        self.device.set_dirty_log(on)
    }

    /// Whether loading this takes long.
    pub(super) fn must_build(&self, saved: &SavedNic) -> bool {
        saved.runs && self.lock().prepared.is_none()
    }

    fn indices(&self, wanted: &Prepared) -> Result<Vec<QueueState>, String> {
        let state = |(index, _): &(QueueIndex, _)| self.device.queue_state(*index);
        wanted.queues.iter().map(state).collect::<Result<_, _>>().map_err(|e| self.failed(&e))
    }

    fn set_indices(&self, wanted: &Prepared, indices: &[QueueState]) -> Result<(), VdpaError> {
        let queues = wanted.queues.iter().zip(indices);
        queues.into_iter().try_for_each(|((index, _), at)| self.device.set_queue_state(*index, *at))
    }

    /// The card as it travels: with indices if the guest leaves, without in a rehearsal.
    pub(super) fn save(&self, is_rehearsal: bool) -> Result<SavedNic, String> {
        let state = self.lock();
        let indices = match state.backing {
            _ if is_rehearsal => None,
            Backing::Idle => None,
            Backing::Due => Some(self.saved_indices(&state, None)),
            Backing::Suspended => {
                let indices = self.indices(&self.wanted(&state)?)?;
                Some(self.saved_indices(&state, Some(&indices)))
            }
            Backing::Running | Backing::Suspending | Backing::Prepared | Backing::Resuming => {
                return Err(format!("network card {} does not stand", self.number));
            }
        };
        Ok(SavedNic {
            status: state.status,
            driver_features: state.driver_features,
            device_features_select: state.device_features_select,
            driver_features_select: state.driver_features_select,
            queue_select: state.queue_select,
            queues: state.queues.iter().map(Into::into).collect(),
            pairs: state.pairs,
            control: state.control.into(),
            interrupt_status: self.interrupts.status(),
            config_generation: self.interrupts.generation(),
            runs: state.backing != Backing::Idle,
            indices,
        })
    }

    /// One entry for each data queue; those that are not in use, or have not begun, are at 0.
    fn saved_indices(&self, state: &State, known: Option<&[QueueState]>) -> Vec<SavedIndices> {
        let mut known = known.unwrap_or(&[]).iter();
        let queues = state.queues.iter().take(state.data_queues());
        let saved = queues.map(|queue| match queue.ready.then(|| known.next()).flatten() {
            Some(at) => SavedIndices { available: at.avail_index, used: at.used_index },
            None => SavedIndices::default(),
        });
        saved.collect()
    }

    /// Loads a card and prepares its device for it; only what has changed since the last time
    /// costs anything. Hostile; repeatable.
    pub(super) fn load(&self, saved: &SavedNic, standing: &Standing) -> Result<(), String> {
        let mut state = self.lock();
        self.load_registers(&mut state, saved)?;
        if !saved.runs {
            self.forget(&mut state, standing);
            return Ok(());
        }
        let wanted = self.wanted(&state)?;
        self.prepare(&mut state, &wanted, standing)?;
        let Some(indices) = &saved.indices else { return Ok(()) };
        if indices.len() != state.data_queues() {
            let (came, has) = (indices.len(), state.data_queues());
            return Err(format!(
                "network card {}: indices of {came} queues, it has {has}",
                self.number
            ));
        }
        let queues = state.queues.iter().zip(indices).filter(|(queue, _)| queue.ready);
        let indices: Vec<_> = queues
            .map(|(_, at)| QueueState { avail_index: at.available, used_index: at.used })
            .collect();
        self.set_indices(&wanted, &indices).map_err(|error| self.failed(&error))?;
        state.backing = Backing::Suspended;
        Ok(())
    }

    fn load_registers(&self, state: &mut State, saved: &SavedNic) -> Result<(), String> {
        let refuse = |what: String| Err(format!("network card {}: {what}", self.number));
        let alien = saved.driver_features & !self.kind.features;
        if saved.status & status::FEATURES_OK != 0 && alien != 0 {
            return refuse(format!("features {alien:#x} that it does not offer"));
        }
        if saved.queues.len() != state.queues.len() {
            return refuse(format!("{} queues, it has {}", saved.queues.len(), state.queues.len()));
        }
        if saved.pairs == 0 || saved.pairs > self.pairs_max() {
            return refuse(format!("{} queue pairs in use", saved.pairs));
        }
        state.status = saved.status & (status::OF_DRIVER | status::NEEDS_RESET);
        state.driver_features = saved.driver_features;
        state.device_features_select = saved.device_features_select;
        state.driver_features_select = saved.driver_features_select;
        state.queue_select = saved.queue_select;
        for (queue, saved) in state.queues.iter_mut().zip(&saved.queues) {
            *queue = saved.into();
        }
        state.pairs = saved.pairs;
        state.control = saved.control.into();
        self.interrupts.load(saved.interrupt_status, saved.config_generation);
        Ok(())
    }

    fn prepare(
        &self,
        state: &mut State,
        wanted: &Prepared,
        standing: &Standing,
    ) -> Result<(), String> {
        let result = match state.prepared.take() {
            Some(before) if before == *wanted => Ok(()),
            Some(Prepared { features, queues, .. })
                if (features, &queues) == (wanted.features, &wanted.queues) =>
            {
                let paired = self.device.set_queue_pairs(wanted.pairs);
                paired.and_then(|()| self.device.prepare())
            }
            Some(_) | None => {
                self.forget(state, standing);
                self.configure(wanted, standing).and_then(|()| self.device.prepare())
            }
        };
        // Also after an error: then everything is forgotten the next time.
        state.backing = Backing::Prepared;
        result.map_err(|error| self.failed(&error))?;
        state.prepared = Some(wanted.clone());
        Ok(())
    }
}
