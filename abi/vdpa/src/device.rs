//! The device itself.

use crate::{Counters, Identity, MapRun, QueueConfig, QueueIndex, QueueState, VdpaError};
use martlet_device_io::Notify;
use martlet_units::Instant;

/// One vDPA device. Shared by the vCPU threads (kicks), the VMM's device thread (service) and the
/// one who migrates; each call locks what it needs.
///
/// Order of calls for a new guest: `set_features`, `set_map` and a `set_queue` for each queue, then
/// `start`; frames flow from then on. For a guest that arrives: the same calls, then `prepare`
/// instead of `start`, while the guest still runs elsewhere; at the switchover a
/// `set_queue_state` for each queue, then `begin_resume` and `poll_resume`.
///
/// Suspend and resume come in two halves, so that many devices do it together: `begin` on each,
/// then `poll` on each in turn until all have answered. Both may do their work anywhere between
/// the two, also on a thread of their own.
pub trait VdpaDevice: Send + Sync {
    /// What the device is. The same for its life.
    fn identity(&self) -> &Identity;

    /// Copies from the configuration space; beyond its end zeros.
    fn read_config(&self, offset: u32, into: &mut [u8]);

    /// Writes to the configuration space; read-only fields ignore it.
    fn write_config(&self, offset: u32, from: &[u8]);

    /// Calls `notify` whenever the configuration space has changed (the link went up or down).
    fn on_config_change(&self, notify: Notify);

    /// Takes the features that the guest's driver accepted. Before `start` or `prepare`.
    fn set_features(&self, features: u64) -> Result<(), VdpaError>;

    /// Replaces the whole map: only pieces that changed cost anything. On an error the old map is
    /// in force. May be called while frames flow. Memory that leaves the map may still be pinned
    /// for a while afterwards, but the device does not reach it any more.
    fn set_map(&self, runs: &[MapRun]) -> Result<(), VdpaError>;

    /// Says where a queue lies. Before `start` or `prepare`.
    fn set_queue(&self, queue: QueueIndex, config: QueueConfig) -> Result<(), VdpaError>;

    /// Calls `notify` whenever the queue's guest is to be interrupted.
    fn on_queue_used(&self, queue: QueueIndex, notify: Notify);

    /// Says how far a queue has come. Before `start`, or before `begin_resume` after a `prepare`.
    fn set_queue_state(&self, queue: QueueIndex, state: QueueState) -> Result<(), VdpaError>;

    /// How far a queue has come. After a suspend it costs nothing: the indices were read with it.
    /// While the device runs it is an error.
    fn queue_state(&self, queue: QueueIndex) -> Result<QueueState, VdpaError>;

    /// Uses this many queue pairs from now on, from the first; more than there are is an error.
    /// While frames flow, frames for pairs that remain are not disturbed.
    fn set_queue_pairs(&self, pairs: u16) -> Result<(), VdpaError>;

    /// Builds everything that a resume needs, as far as the features, the map and the queues are
    /// known: so that the resume of a guest that arrives is as cheap as that of one that stayed.
    /// Does not touch guest memory. Repeatable; builds again only what has changed.
    fn prepare(&self) -> Result<(), VdpaError>;

    /// Sets all queues running from the states that were set, as after DRIVER_OK.
    fn start(&self) -> Result<(), VdpaError>;

    /// The guest has put something into a queue. Never blocks and never fails; a kick for a queue
    /// that does not run is forgotten, for its resume makes up for it.
    fn kick(&self, queue: QueueIndex);

    /// Begins to stop all queues. Frames that were begun are finished.
    fn begin_suspend(&self) -> Result<(), VdpaError>;

    /// Whether the suspend that was begun is over: `None` while it goes on. On success the device
    /// touches no guest memory any more, its dirty log is complete and the queues' states are
    /// known. On an error the device passes frames again as before, at once or after its next
    /// `service`.
    fn poll_suspend(&self) -> Option<Result<(), VdpaError>>;

    /// Begins to set all queues running: from where they were suspended, or from the states that
    /// were set after `prepare`. As soon as a queue runs it is kicked, and its guest notified,
    /// once: kicks and notifications may have been lost in between. The link's state is published
    /// once at the end.
    fn begin_resume(&self) -> Result<(), VdpaError>;

    /// Whether the resume that was begun is over: `None` while it goes on. On an error the queues that
    /// it does not name run, the others after the device's next `service`, or another resume.
    fn poll_resume(&self) -> Option<Result<(), VdpaError>>;

    /// Begins or ends logging the pages that the device writes. May be called while frames flow.
    fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError>;

    /// Takes the log: calls `mark` with the number of the first page (an IOVA in pages, a multiple
    /// of 64) and a word, whose bit `b` stands for page `first + b`, for words that are not zero. A
    /// page that is written meanwhile is in this log or in the next.
    fn take_dirty(&self, mark: &mut dyn FnMut(u64, u64));

    /// Forgets queues, features and map; as after it was opened. What was in flight is finished or
    /// forgotten, and no guest memory is touched afterwards.
    fn reset(&self) -> Result<(), VdpaError>;

    /// Lets the device's events, deadlines and lazy work have a turn. Blocks for long only while a
    /// device that does not answer is brought up again. To be called when the device interrupts, and
    /// at the moment that the last call returned.
    fn service(&self) -> Option<Instant>;

    /// What it has done so far. May ask the device, which takes its time.
    fn counters(&self) -> Counters;

    /// When the first frame was served since the last resume or start, and when the last one was,
    /// on the device's clock: as in the counters, and at no cost. To be asked for in a switchover.
    fn frame_times(&self) -> (Option<Instant>, Option<Instant>) {
        let counters = self.counters();
        (counters.first_frame_ns.map(Instant), counters.last_frame_ns.map(Instant))
    }
}
