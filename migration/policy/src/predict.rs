//! The predicted blackout: everything that will happen in it, from what this migration measured.

use core::time::Duration;
use martlet_units::{ByteCount, BytesPerSec, PageCount};

/// What was measured in this migration so far. A part not measured yet is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurements {
    /// Kick to last vCPU out, from rehearsals.
    pub pause: Duration,
    /// Saving all state once stopped, from rehearsals.
    pub save: Duration,
    /// Reading the dirty log.
    pub sync: Duration,
    /// Pages that would be dirty at the stop.
    pub dirty: PageCount,
    /// What the channels carried to the destination's memory.
    pub bandwidth: BytesPerSec,
    /// Saved state, from rehearsals.
    pub state: ByteCount,
    /// A round trip on the control connection.
    pub round_trip: Duration,
    /// Loading the state at the destination, from rehearsals.
    pub load: Duration,
    /// Entering the vCPUs at the destination, from rehearsals.
    pub start: Duration,
}

/// The blackout to expect, part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Stopping the vCPUs.
    pub pause: Duration,
    /// The last dirty sync.
    pub final_sync: Duration,
    /// The last pages.
    pub final_pages: Duration,
    /// What saving and sending the state adds beyond the pages, which go at the same time.
    pub cpu_state: Duration,
    /// The way of the commit, and loading the state.
    pub commit: Duration,
    /// Entering the vCPUs.
    pub start: Duration,
}

impl Prediction {
    /// The whole blackout.
    pub fn total(&self) -> Duration {
        self.pause
            + self.final_sync
            + self.final_pages
            + self.cpu_state
            + self.commit
            + self.start
    }
}

/// Predicts the blackout if the guest were stopped now.
pub fn predict(_measured: &Measurements) -> Prediction {
    Prediction::default()
}
