//! What must hold, whatever goes wrong.

use crate::source::Run;
use crate::violation::{Violation, ensure};
use crate::world::World;
use martlet_core::Status;
use martlet_units::Instant;
use std::time::Duration;

/// An owner who wants the guest to stay is heard within this.
const CANCEL_MAX: Duration = Duration::from_millis(200);

/// The guest stands no longer than this without a commit: the protocol's bound at the accepted
/// blackout, and what a look takes.
const STOPPED_MAX: Duration = Duration::from_millis(1_050);

/// Messages and events that may wait.
const UNSENT_MAX: usize = 80 << 10;
const EVENTS_MAX: usize = 64;
const QUEUED_MAX: usize = 9;

impl World {
    /// Holds after every step.
    pub(crate) fn check_step(&mut self) -> Result<(), Violation> {
        self.trace_status();
        let found = self.machine.violation();
        let found = found.or_else(|| self.destination.machine.as_ref()?.violation());
        if let Some(what) = found {
            return Err(Violation { what });
        }
        self.check_start()?;
        let here = self.stayed();
        let there = self.destination_lives && self.destination.has_permit();
        ensure(!(here && there), || "both sides hold the permit".to_owned())?;
        ensure(!(here && self.moved), || "the source holds the permit after the move".to_owned())?;
        self.check_bounds()?;
        self.lie()
    }

    fn trace_status(&mut self) {
        let status = self.run.as_ref().map(Run::status);
        if status != self.last_status {
            self.last_status = status;
            let now = self.now();
            self.trace.line(now, format_args!("source: {status:?}"));
        }
    }

    /// When the destination starts the guest, it is the source's, page by page.
    fn check_start(&mut self) -> Result<(), Violation> {
        let Some(machine) = &self.destination.machine else { return Ok(()) };
        if !machine.take_start() {
            return Ok(());
        }
        let now = self.net.now();
        self.trace.line(now, format_args!("destination: started"));
        ensure(!self.moved, || "the guest is started a second time".to_owned())?;
        ensure(!self.stayed(), || "the source still holds the permit".to_owned())?;
        let differs = self.machine.difference(machine);
        ensure(differs.is_none(), || differs.unwrap_or_default())?;
        let (left, arrived) = (self.machine.state(), machine.state());
        ensure(left == arrived, || {
            format!("state {arrived} at the destination, {left} at the source")
        })?;
        ensure(machine.wanted() == self.machine.wanted(), || {
            format!("running is {}, was {}", machine.wanted(), self.machine.wanted())
        })?;
        self.moved = true;
        Ok(())
    }

    /// Nothing waits without bound, nobody is unheard, the guest does not stand.
    fn check_bounds(&self) -> Result<(), Violation> {
        let Some(run) = self.run.as_ref().filter(|_| self.source_lives) else { return Ok(()) };
        let now = self.now();
        let frozen = self.turns[0].frozen_until;
        let late = |since: Instant, most: Duration| now > since.max(frozen).after(most);
        if let Some(since) = run.unheard_cancel() {
            ensure(!late(since, CANCEL_MAX), || {
                format!("a cancel was not heard for {:?}: {:?}", now.since(since), run.status())
            })?;
        }
        let committed = run.outside.as_ref().is_some_and(|outside| outside.has_committed);
        if let Some(since) =
            self.machine.stopped_at().filter(|_| !committed && !self.scenario.verify)
        {
            ensure(!late(since, STOPPED_MAX), || {
                format!("the guest stands for {:?} without a commit", now.since(since))
            })?;
        }
        let unsent = run.unsent().max(self.destination.unsent());
        ensure(unsent <= UNSENT_MAX, || format!("{unsent} bytes of messages wait"))?;
        let events = self.destination.waiting_events();
        ensure(events <= EVENTS_MAX, || format!("{events} events wait"))?;
        let queued = run.queued();
        ensure(queued <= QUEUED_MAX, || format!("{queued} chunks wait for a lane"))
    }

    /// What must hold when nothing more happens.
    pub(crate) fn check_end(&mut self) -> Result<(), Violation> {
        let here = self.stayed();
        let there = self.destination_lives && self.destination.has_permit();
        let status = self.run.as_ref().map(Run::status);
        if self.moved {
            ensure(there || self.died, || "the moved guest is nowhere".to_owned())?;
        } else if self.source_lives {
            // It stayed, or nobody knows because the destination's process is gone.
            let is_open = matches!(status, Some(Status::Undecided | Status::GivenUp));
            ensure(here || is_open, || format!("the guest that stayed is nowhere: {status:?}"))?;
        } else {
            // It died with the source; the destination has nothing.
            ensure(!there, || "a guest from nowhere".to_owned())?;
        }
        let machine = self.destination.machine.as_ref();
        let wanted = machine.is_none_or(|machine| machine.wanted() == self.scenario.running);
        ensure(!there || wanted, || "running has changed at the end".to_owned())
    }
}
