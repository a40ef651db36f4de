//! A card's way to another host: what is saved of it, and how it is loaded there.

use super::backing::Backing;
use super::group::Standing;
use super::life::Setup;
use super::nic::{Nic, State};
use super::registers::status;
use super::saved::{SavedIndices, SavedNic};
use martlet_vdpa::QueueState;

impl Nic {
    /// The card as it travels: with indices if the guest leaves, without in a rehearsal.
    pub(super) fn save(&self, is_rehearsal: bool) -> Result<SavedNic, String> {
        let state = self.lock();
        let indices = match state.backing {
            _ if is_rehearsal => None,
            Backing::Idle => None,
            // Not begun yet.
            Backing::Due => Some(saved_indices(&state, &[])),
            Backing::Suspended => Some(saved_indices(&state, &self.indices(&self.setup(&state)?)?)),
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

    /// Loads a card and prepares its device for it; only what has changed since the last time
    /// costs anything. Hostile; repeatable.
    pub(super) fn load(&self, saved: &SavedNic, standing: &Standing) -> Result<(), String> {
        let mut state = self.lock();
        self.load_registers(&mut state, saved)?;
        if !saved.runs {
            self.forget(&mut state, standing);
            return Ok(());
        }
        let needed = status::FEATURES_OK | status::DRIVER_OK;
        if state.status & needed != needed || !self.accepts(&state) {
            return Err(format!("network card {}: it runs without its driver", self.number));
        }
        let setup = self.setup(&state)?;
        self.prepare(&mut state, &setup, standing)?;
        let Some(indices) = &saved.indices else { return Ok(()) };
        if indices.len() != state.data_queues() {
            let (number, came, has) = (self.number, indices.len(), state.data_queues());
            return Err(format!("network card {number}: indices of {came} queues, it has {has}"));
        }
        let queues = state.queues.iter().zip(indices).filter(|(queue, _)| queue.ready);
        let indices: Vec<_> = queues
            .map(|(_, at)| QueueState { avail_index: at.available, used_index: at.used })
            .collect();
        self.set_indices(&mut state, &setup, &indices).map_err(|error| self.failed(&error))
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

    fn prepare(&self, state: &mut State, setup: &Setup, standing: &Standing) -> Result<(), String> {
        // Taken out: after an error everything is forgotten the next time.
        let prepared = match state.prepared.take() {
            Some(before) if before == *setup => Ok(()),
            Some(Setup { features, queues, .. })
                if (features, &queues) == (setup.features, &setup.queues) =>
            {
                let paired = self.device.set_queue_pairs(setup.pairs);
                paired.and_then(|()| self.device.prepare())
            }
            Some(_) | None => {
                self.forget(state, standing);
                self.configure(state, setup, standing).and_then(|()| self.device.prepare())
            }
        };
        prepared.map_err(|error| self.failed(&error))?;
        state.prepared = Some(setup.clone());
        Ok(())
    }

    /// Whether loading this takes long.
    pub(super) fn must_build(&self, saved: &SavedNic) -> bool {
        saved.runs && self.lock().prepared.is_none()
    }
}

/// One entry for each data queue; `known` are those of the queues that are in use, the others are
/// at 0.
fn saved_indices(state: &State, known: &[QueueState]) -> Vec<SavedIndices> {
    let mut known = known.iter();
    let queues = state.queues.iter().take(state.data_queues());
    let saved = queues.map(|queue| match queue.ready.then(|| known.next()).flatten() {
        Some(at) => SavedIndices { available: at.avail_index, used: at.used_index },
        None => SavedIndices::default(),
    });
    saved.collect()
}
