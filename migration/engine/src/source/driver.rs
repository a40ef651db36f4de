//! The source's thread: drives the core of an attempt, and waits for what it waits for.

use super::MigrateOptions;
use super::connecting;
use super::outside::Outside;
use super::shared::Shared;
use crate::{Error, Fault, Outcome, Report, SourceVmm, Status, host};
use martlet_core::source::{Attempt, Config, Wait};
use martlet_policy::{Pacer, default_channels};
use martlet_protocol::SourceConfig;
use martlet_ram::{GuestRam, RamBitmap};
use martlet_transport::{Address, Stream, Target, monotonic_now};
use martlet_wire::control::{BOOT_ID_UNTOLD, MigrationId, Setup, WireRange};
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};

/// An undecided attempt may panic at every step.
const PANIC_PAUSE: Duration = Duration::from_millis(250);

/// What a migration starts from.
pub(super) struct Start {
    pub(super) vmm: Arc<dyn SourceVmm>,
    pub(super) to: Address,
    pub(super) options: MigrateOptions,
    pub(super) shared: Arc<Shared>,
    pub(super) pacer: Arc<Pacer>,
}

/// The body of the migration's thread.
pub(super) fn run(start: Start) {
    let (shared, ram) = (Arc::clone(&start.shared), start.vmm.ram());
    // A driver catches its own panics; nobody would hear the end of an attempt that has none.
    let error = match host::guarded(|| connect(start, &ram)) {
        Ok(Ok(driver)) => return driver.run(),
        Ok(Err(error)) => (error.fault() != Fault::Cancelled).then_some(error),
        Err(reason) => Some(Error::new(Fault::Host, "", reason)),
    };
    info!(error = error.as_ref().map(Error::to_line), "the migration ended before it began");
    let (status, outcome) = match error {
        Some(_) => (Status::Failed, Outcome::Failed),
        None => (Status::Cancelled, Outcome::Cancelled),
    };
    let total = monotonic_now().since(shared.started);
    shared.finish(status, Report::not_begun(outcome, error, total));
}

fn connect(start: Start, ram: &Arc<GuestRam>) -> Result<Driver<'_>, Error> {
    let (stream, target) = connecting::control(&start.shared, &start.to, Target::resolve)?;
    Driver::new(start, ram, stream, target)
}

struct Driver<'ram> {
    attempt: Attempt,
    outside: Outside<'ram>,
    shared: Arc<Shared>,
}

impl<'ram> Driver<'ram> {
    /// Begins an attempt on a control connection.
    fn new(
        start: Start,
        ram: &'ram Arc<GuestRam>,
        stream: Stream,
        target: Target,
    ) -> Result<Driver<'ram>, Error> {
        let random = host::random_id();
        let random = random.map_err(|e| Error::caused(Fault::Host, "name the migration", e))?;
        let migration = MigrationId(random);
        let Start { vmm, to, options, .. } = &start;
        let channels = match to {
            // Many queue pairs, one thread.
            Address::Rdma { .. } => 1,
            _ => options.channels.unwrap_or_else(|| default_channels(host::cores())),
        };
        let regions = ram
            .regions()
            .iter()
            .map(|region| WireRange { start_gfn: region.range().start().0, pages: region.pages() });
        let setup = Setup {
            migration,
            regions: regions.collect(),
            machine: vmm.machine_description(),
            channels,
            boot_id: BOOT_ID_UNTOLD,
        };
        let dirty = Arc::new(RamBitmap::new(ram));
        let config = Config {
            started: start.shared.started,
            protocol: SourceConfig {
                setup,
                clock_key: host::clock_key(),
                verify: options.verify,
                downtime_limit: options.downtime_limit,
            },
            auto_converge: options.auto_converge,
            within: options.within,
            dirty: Arc::clone(&dirty),
            total: ram.pages(),
        };
        let attempt = Attempt::new(monotonic_now(), config);
        let shared = Arc::clone(&start.shared);
        let outside = Outside::new(start, ram, dirty, migration, stream, target);
        Ok(Driver { attempt, outside, shared })
    }

    /// Runs the attempt to its end, and an undecided one until that is settled. Afterwards the
    /// report is in `shared`.
    fn run(mut self) {
        loop {
            while !self.attempt.is_over() {
                self.turn();
            }
            self.conclude();
            if self.shared.status() != Status::Undecided {
                return;
            }
        }
    }

    fn turn(&mut self) {
        let has_panicked = !self.guarded(|driver| {
            driver.attempt.step(&mut driver.outside);
            driver.wait();
        });
        if has_panicked && self.shared.status() == Status::Undecided {
            std::thread::sleep(PANIC_PAUSE);
        }
    }

    fn wait(&mut self) {
        let waited = match self.attempt.wait(&self.outside) {
            Wait::No => Ok(()),
            Wait::Yield => {
                rustix::thread::sched_yield();
                Ok(())
            }
            Wait::Until(at) => self.outside.wait(&self.attempt, at),
        };
        if let Err(error) = waited {
            let error = Error::caused(Fault::Host, "wait for events", error);
            self.attempt.on_event(martlet_core::source::Event::HostFailed(error));
        }
        while let Some(event) = self.shared.events.take() {
            if let Some(event) = self.outside.translate(event) {
                self.attempt.on_event(event);
            }
        }
    }

    fn conclude(&mut self) {
        if !self.guarded(|driver| driver.attempt.conclude(&mut driver.outside))
            && let Some(ended) = self.attempt.bare_end(monotonic_now())
        {
            self.shared.finish(ended.status, ended.report);
        }
        self.guarded(|driver| driver.outside.join_lanes());
    }

    /// Does something that must not take the permit with it should it panic; whether it did not.
    fn guarded(&mut self, work: impl FnOnce(&mut Driver<'ram>)) -> bool {
        let Err(reason) = host::guarded(|| work(self)) else { return true };
        error!(%reason, "the migration's thread panicked");
        self.attempt.on_panic(&reason);
        false
    }
}
