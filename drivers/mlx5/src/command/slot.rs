//! The states of a slot.

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nothing.
    Free,
    /// The device has a command there, and somebody waits for it.
    Posted,
    /// The device has a command there that nobody waits for any more.
    Quarantined,
}

/// What happens to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotEvent {
    /// A command is put there.
    Issue,
    /// The device has cleared the owner bit.
    Answer,
    /// The command is given up: its time is over, or the device is gone.
    GiveUp,
}

impl SlotState {
    /// All states.
    #[cfg(test)]
    pub(crate) const ALL: [SlotState; 3] =
        [SlotState::Free, SlotState::Posted, SlotState::Quarantined];

    /// What the state becomes; `None` if the event can't happen in it.
    pub(crate) const fn next(self, event: SlotEvent) -> Option<SlotState> {
        match (self, event) {
            (SlotState::Free, SlotEvent::Issue) => Some(SlotState::Posted),
            (SlotState::Posted, SlotEvent::Answer) => Some(SlotState::Free),
            (SlotState::Posted, SlotEvent::GiveUp) => Some(SlotState::Quarantined),
            // A late answer: only now the slot and its mailboxes are our own again.
            (SlotState::Quarantined, SlotEvent::Answer) => Some(SlotState::Free),
            (SlotState::Free, SlotEvent::Answer | SlotEvent::GiveUp)
            | (SlotState::Posted, SlotEvent::Issue)
            | (SlotState::Quarantined, SlotEvent::Issue | SlotEvent::GiveUp) => None,
        }
    }
}

impl SlotEvent {
    /// All events.
    #[cfg(test)]
    pub(crate) const ALL: [SlotEvent; 3] = [SlotEvent::Issue, SlotEvent::Answer, SlotEvent::GiveUp];
}
