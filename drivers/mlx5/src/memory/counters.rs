//! What was done, for reports.

/// Counts of a device's keys. Those that say "most" never go down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounters {
    /// Keys that the device created, direct and indirect.
    pub keys_created: u64,
    /// Keys that it destroyed.
    pub keys_destroyed: u64,
    /// Keys that may exist although nobody will ever use or destroy them: CREATE_MKEY without an
    /// answer, DESTROY_MKEY that failed for good.
    pub keys_abandoned: u64,
    /// Keys that exist and are known: created, neither destroyed nor abandoned.
    pub keys_live: u64,
    /// Commands issued, CREATE_MKEY and DESTROY_MKEY.
    pub commands: u64,
    /// Most CREATE_MKEY commands without an answer at a time.
    pub create_depth_max: usize,
    /// Most DESTROY_MKEY commands without an answer at a time.
    pub destroy_depth_max: usize,
    /// Most bytes of CREATE_MKEY input with the device at a time.
    pub staged_bytes_max: usize,
    /// Bytes pinned now.
    pub pinned_bytes: u64,
    /// Bytes of keys that were abandoned: pinned until the device is torn down.
    pub abandoned_bytes: u64,
    /// Maps that somebody holds.
    pub maps_held: usize,
    /// Keys still to be destroyed, with those of the maps.
    pub backlog_keys: usize,
}
