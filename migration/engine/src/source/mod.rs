//! Moving a guest away.

mod bell;
mod connecting;
mod driver;
mod events;
mod lanes;
mod news;
mod outside;
mod query;
mod shared;

use crate::rdma::RdmaOptions;
use crate::{Error, Fault, Progress, Report, SourceVmm, Status, host};
use driver::Start;
use events::Event;
use martlet_core::source;
pub use martlet_core::source::{Then, Within};
use martlet_policy::Pacer;
use martlet_protocol::OperatorOverride;
use martlet_ram::{CpuFinders, ZeroCheck, ZeroFinders};
use martlet_transport::{Address, monotonic_now};
use martlet_units::BytesPerSec;
pub use news::Subscription;
use shared::Shared;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How a guest is to be moved.
#[derive(Clone)]
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
    /// A bound on the time until the guest is stopped, and what is done once it has passed.
    pub within: Option<Within>,
    /// How guest memory goes by RDMA, to an address `rdma:`.
    pub rdma: RdmaOptions,
    /// Who finds zero pages in the pre-copy rounds. The last pages are the CPU's.
    pub zero_finders: Arc<dyn ZeroFinders>,
}

impl fmt::Debug for MigrateOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MigrateOptions")
            .field("channels", &self.channels)
            .field("downtime_limit", &self.downtime_limit)
            .field("bandwidth", &self.bandwidth)
            .field("verify", &self.verify)
            .field("auto_converge", &self.auto_converge)
            .field("within", &self.within)
            .field("rdma", &self.rdma)
            .field("zero_finders", &self.zero_finders.name())
            .finish()
    }
}

impl Default for MigrateOptions {
    fn default() -> MigrateOptions {
        MigrateOptions {
            channels: None,
            downtime_limit: Duration::from_millis(300),
            bandwidth: None,
            verify: false,
            auto_converge: true,
            within: None,
            rdma: RdmaOptions::default(),
            zero_finders: Arc::new(CpuFinders(ZeroCheck::detect())),
        }
    }
}

/// One attempt to move a guest, running on threads of its own. Dropping it does not cancel it.
/// All clones are the same attempt.
#[derive(Clone)]
pub struct Migration {
    shared: Arc<Shared>,
    pacer: Arc<Pacer>,
}

/// How long [`Migration::resolve`] waits for the driver, which asks the destination.
const RESOLVE_MAX: Duration = Duration::from_secs(60);

impl Migration {
    /// Starts moving `vmm`'s guest to `to`. Returns at once; what goes wrong later shows in the
    /// report.
    ///
    /// # Errors
    /// If the host gives no thread or file descriptor; the guest is unharmed.
    pub fn start(
        vmm: Arc<dyn SourceVmm>,
        to: &Address,
        options: MigrateOptions,
    ) -> std::io::Result<Migration> {
        let now = monotonic_now();
        let total = vmm.ram().pages();
        let shared = Arc::new(Shared::new(now, total, options.downtime_limit)?);
        let pacer = Arc::new(Pacer::new(now, options.bandwidth));
        let start = Start {
            vmm,
            to: to.clone(),
            options,
            shared: Arc::clone(&shared),
            pacer: Arc::clone(&pacer),
        };
        host::spawn("martlet-migrate", move || driver::run(start))?;
        Ok(Migration { shared, pacer })
    }

    /// Asks for the guest to stay. Before the commit it stays; after it, nothing happens.
    pub fn cancel(&self) {
        self.shared.cancel();
    }

    /// The guest has ended by itself, in these words: there is nothing to move. The migration fails
    /// and says so on both sides, unless the guest has left.
    pub fn guest_ended(&self, how: &str) {
        let error = Error::new(Fault::Vmm, "", format!("the guest has ended: {how}"));
        self.tell(source::Event::HostFailed(error));
    }

    fn tell(&self, event: source::Event) {
        self.shared.events.post(Event::Attempt(event));
    }

    /// How it stands.
    pub fn progress(&self) -> Progress {
        self.shared.progress(monotonic_now())
    }

    /// Tells how it stands from now on, through a queue and a descriptor to poll.
    ///
    /// # Errors
    /// If the host gives no file descriptor.
    pub fn subscribe(&self) -> std::io::Result<Subscription> {
        self.shared.subscribe()
    }

    /// Changes the limit of a running migration.
    pub fn set_downtime_limit(&self, limit: Duration) {
        self.shared.set_downtime_limit(limit);
    }

    /// Changes the bandwidth of a running migration; `None` lifts the limit.
    pub fn set_bandwidth(&self, bandwidth: Option<BytesPerSec>) {
        self.pacer.set_rate(monotonic_now(), bandwidth);
    }

    /// The report, once it is over; `None` if `timeout` passes first.
    pub fn wait(&self, timeout: Duration) -> Option<Report> {
        self.shared.wait(timeout)
    }

    /// Says what became of a migration that is over; if that is undecided, asks the destination
    /// first. `Ok` is `Completed` (the guest has left), `Failed` or `Cancelled` (it is here). `Err`
    /// says why it is still open. Several at once get the same answer.
    pub fn resolve(&self) -> Result<Status, Error> {
        self.shared.wait_settled(RESOLVE_MAX, || self.tell(source::Event::Resolve))
    }

    /// Ends an undecided migration by the word of its operator, for a destination that is gone for
    /// good: `Failed` (the guest runs here again) or `GivenUp`. The destination is asked first, and
    /// if the process that got the commit answers, that counts: then as [`Migration::resolve`].
    pub fn override_undecided(&self, by: OperatorOverride) -> Result<Status, Error> {
        self.shared.wait_settled(RESOLVE_MAX, || self.tell(source::Event::Override(by)))
    }
}
