//! How keys are made and dropped.

use martlet_units::PAGE_SIZE;
use std::time::Duration;

/// What a set_map builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Pieces that have changed. What has not keeps its key.
    Changed,
    /// Everything, as the kernel does.
    Everything,
}

/// When keys that nobody uses are destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// Later.
    Deferred {
        /// How much later, at least.
        delay: Duration,
    },
    /// By the one who let them go.
    AtOnce,
}

/// Figures of a device's keys, for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounters {
    /// Maps that somebody holds.
    pub maps_held: usize,
    /// Keys still to be destroyed.
    pub backlog_keys: usize,
    /// Keys that may exist although nobody can use or destroy them: their memory stays pinned until
    /// the function begins anew.
    pub keys_stuck: usize,
    /// Bytes pinned now.
    pub pinned_bytes: u64,
}

/// How keys are made and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryConfig {
    /// Most bytes behind a direct key: a power of two up to 1 GiB. Others than 1 GiB are for
    /// tests.
    pub(crate) piece_bytes: u64,
    /// Most entries of an indirect key (capability `log_max_klm_list_size`).
    pub(crate) entries_max: u64,
    /// CREATE_MKEY commands without an answer at a time; 1 is one after the other.
    pub(crate) create_window: usize,
    /// DESTROY_MKEY commands without an answer at a time, when somebody waits for them (a map that
    /// could not be built, a drain, deletion that is not deferred); 1 is one after the other.
    pub(crate) destroy_window: usize,
    /// The same when nobody waits: the slice that a new map or a suspend may find in its way. Not
    /// above `destroy_window`.
    pub(crate) lazy_window: usize,
    /// Most input of CREATE_MKEY with the device at a time, in bytes. A single input that is
    /// longer still goes, alone.
    pub(crate) staged_bytes_max: usize,
    /// What a set_map builds.
    pub(crate) update: Update,
    /// When keys are destroyed.
    pub(crate) deletion: Deletion,
}

impl MemoryConfig {
    /// Linux waits as long (drivers/vdpa/mlx5/core/mr.c), because set_map comes in bursts. Also
    /// long enough that a map which is replaced and comes back is mostly still there.
    pub(crate) const DELETION_DELAY: Duration = Duration::from_secs(2);

    /// Checks that the values make sense.
    ///
    /// # Panics
    /// If not.
    pub(crate) fn check(&self) {
        let piece = self.piece_bytes;
        let range = PAGE_SIZE..=crate::memory::translation::KLM_COVERS_MAX;
        assert!(piece.is_power_of_two() && range.contains(&piece), "a piece of {piece:#x} bytes");
        let windows = [self.create_window, self.destroy_window, self.lazy_window];
        assert!(windows.iter().all(|window| *window > 0), "a window of nothing");
        assert!(self.entries_max <= 1 << 20, "an input of more than 16 MiB for one indirect key");
    }
}

impl Default for MemoryConfig {
    /// Everything on. The windows are as deep as the serial part of these commands in firmware
    /// makes useful, and leave slots of the queue (31 for all) to others. With lists of 2 MiB each,
    /// the staging limit makes the window for creation 8.
    fn default() -> MemoryConfig {
        MemoryConfig {
            piece_bytes: 1 << 30,
            entries_max: 1 << 16,
            create_window: 16,
            destroy_window: 16,
            lazy_window: 8,
            staged_bytes_max: 17 << 20,
            update: Update::Changed,
            deletion: Deletion::Deferred { delay: MemoryConfig::DELETION_DELAY },
        }
    }
}
