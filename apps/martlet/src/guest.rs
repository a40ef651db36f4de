//! What the control socket needs of a guest, a migration and a receiver. `vm` implements it with
//! a real machine and the engine; the tests of the socket with a pretended one.

use martlet_engine::{
    Error, MigrateOptions, OperatorOverride, Progress, ReceiveStatus, Report, Status,
};
use martlet_guest_program::GuestCounters;
use martlet_machine::{GuestStatus, MachineInfo};
use martlet_transport::Address;
use martlet_units::BytesPerSec;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A guest in this process.
pub(crate) trait Guest: Send + Sync {
    /// How it stands.
    fn status(&self) -> GuestStatus;
    /// Pauses it. Paused already is fine. `Err` says in one line why it can't be paused now.
    fn stop(&self) -> Result<(), String>;
    /// Continues it. Running already is fine.
    fn cont(&self) -> Result<(), String>;
    /// Boots it again. `Err` says in one line why that can't be now.
    fn reset(&self) -> Result<(), String>;
    /// Presses its power button. `Err` says in one line why that can't be now, or that it does not
    /// listen.
    fn press_power_button(&self) -> Result<(), String>;
    /// How often it was booted again: by itself, and by its owner.
    fn resets(&self) -> (u64, u64);
    /// What it is made of.
    fn info(&self) -> MachineInfo;
    /// What it says of itself; `None` if it is no guest that says anything.
    fn check(&self) -> Option<GuestCounters>;
    /// Starts moving it away. Almost all errors show in the attempt's report; an error here means
    /// that this process could not even begin.
    fn migrate(&self, to: &Address, options: MigrateOptions) -> io::Result<Arc<dyn Attempt>>;
    /// Stops its vCPUs for good: the process ends.
    fn quit(&self);
}

/// One attempt to move a guest away; see `martlet_engine::Migration`.
pub(crate) trait Attempt: Send + Sync {
    fn progress(&self) -> Progress;
    fn wait(&self, timeout: Duration) -> Option<Report>;
    fn cancel(&self);
    /// The guest has ended by itself, in these words: there is nothing to move.
    fn guest_ended(&self, how: &str);
    fn set_downtime_limit(&self, limit: Duration);
    fn set_bandwidth(&self, bandwidth: Option<BytesPerSec>);
    /// What became of it; `Err` says why that is still open.
    fn resolve(&self) -> Result<Status, Error>;
    /// The same, but by the word of its operator if the destination does not answer.
    fn override_undecided(&self, by: OperatorOverride) -> Result<Status, Error>;
}

/// Waits for a guest; see `martlet_engine::Receiver`.
pub(crate) trait Incoming: Send + Sync {
    fn address(&self) -> Address;
    fn status(&self) -> ReceiveStatus;
    /// How many attempts have failed, and why the last one did.
    fn failures(&self) -> (u64, Option<String>);
    fn wait(&self, timeout: Duration) -> ReceiveStatus;
    fn stop(&self);
    /// The same, unless the guest has arrived: in one step.
    fn stop_unless_arrived(&self);
    /// The guest, once the status is `Arrived`.
    fn guest(&self) -> Option<Arc<dyn Guest>>;
}

/// Opens receivers: what a process that waits for a guest can do.
pub(crate) trait Listen: Send + Sync {
    /// Starts waiting at an address.
    fn listen(&self, address: &Address) -> io::Result<Arc<dyn Incoming>>;
}
