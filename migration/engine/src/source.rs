//! Moving a guest away.

use crate::report::{Progress, Report};
use crate::{SourceVmm, VmmError};
use martlet_transport::Address;
use martlet_units::BytesPerSec;
use std::sync::Arc;
use std::time::Duration;

/// How a guest is to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrateOptions {
    /// Data channels, 1 to 128; `None` takes what suits this host's cores.
    pub channels: Option<u16>,
    /// The longest blackout to accept. The guest is stopped only when the predicted one fits.
    pub downtime_limit: Duration,
    /// A limit for the pre-copy rounds; the blackout has none.
    pub bandwidth: Option<BytesPerSec>,
    /// Compare both sides' memory before the commit. Lengthens the blackout a lot.
    pub verify: bool,
    /// Take time from the guest when it dirties memory faster than the link carries it.
    pub auto_converge: bool,
}

impl Default for MigrateOptions {
    fn default() -> MigrateOptions {
        MigrateOptions {
            channels: None,
            downtime_limit: Duration::from_millis(300),
            bandwidth: None,
            verify: false,
            auto_converge: true,
        }
    }
}

/// One attempt to move a guest, running on threads of its own. Dropping it does not cancel it.
#[derive(Clone)]
pub struct Migration {}

impl Migration {
    /// Starts moving `vmm`'s guest to `to`. Returns at once; errors show in the report.
    pub fn start(vmm: Arc<dyn SourceVmm>, to: &Address, options: MigrateOptions) -> Migration {
        let _ = (vmm, to, options);
        unimplemented!()
    }

    /// Asks for the guest to stay. Before the commit it stays; after it, nothing happens.
    pub fn cancel(&self) {
        unimplemented!()
    }

    /// How it stands.
    pub fn progress(&self) -> Progress {
        unimplemented!()
    }

    /// Changes the limit of a running migration.
    pub fn set_downtime_limit(&self, limit: Duration) {
        let _ = limit;
        unimplemented!()
    }

    /// Changes the bandwidth of a running migration; `None` lifts the limit.
    pub fn set_bandwidth(&self, bandwidth: Option<BytesPerSec>) {
        let _ = bandwidth;
        unimplemented!()
    }

    /// The report, once it is over; `None` if `timeout` passes first.
    pub fn wait(&self, timeout: Duration) -> Option<Report> {
        let _ = timeout;
        unimplemented!()
    }

    /// Settles an undecided migration by asking the destination. On `Ok`, [`Migration::progress`]
    /// says `Completed` or `Failed` (the guest runs here again). `Err` says why it is still open.
    pub fn resolve(&self) -> Result<(), VmmError> {
        unimplemented!()
    }
}
