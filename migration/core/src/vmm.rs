//! What a migration needs of a VMM. `martlet-machine` is one that provides it.

use crate::{Error, Fault};
use martlet_protocol::RunPermit;
use martlet_ram::{GuestRam, TrackError, Tracker};
use martlet_units::{ClockOffset, PageRange};
pub use martlet_wire::control::OBSERVED_BYTES_MAX;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;
use tracing::warn;

/// Whether a guest runs or is paused by its owner. A paused guest stays paused across a
/// migration, whether that succeeds or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// vCPUs run.
    Running,
    /// vCPUs are stopped until the owner continues them.
    Paused,
}

impl RunState {
    /// Running, or paused.
    pub fn of(running: bool) -> RunState {
        if running { RunState::Running } else { RunState::Paused }
    }
}

/// All vCPUs of a guest are stopped.
#[derive(Debug)]
pub struct Paused {
    /// The right to run it, given up by the VMM: it can't start a vCPU before it has this back.
    pub permit: RunPermit,
    /// What it did before.
    pub was: RunState,
}

/// What stopping and saving would have taken just now, and what it would have given.
#[derive(Clone, Debug)]
pub struct Rehearsal {
    /// From the kick until the last vCPU was out.
    pub pause: Duration,
    /// From then until the last state was saved.
    pub save: Duration,
    /// A state as [`SourceVmm::poll_state`] gives it, good for loading, not for running.
    pub state: Vec<u8>,
}

/// Looks at a guest for its owner. What it reports is carried into the migration's
/// [`Switchover`](crate::Switchover) as it is: only the owner knows what it means.
pub trait GuestObserver: Send + Sync {
    /// What was seen of the guest in this process: at the source until it left, at the destination
    /// since it arrived. At most [`OBSERVED_BYTES_MAX`]; a longer one is left out, as is one that
    /// panics.
    fn report(&self) -> Vec<u8>;

    /// At the destination, whether there is anything to wait for. The source is told that the guest
    /// lives once there is not, or after a second.
    fn has_seen_all(&self) -> bool {
        true
    }
}

/// What an observer says, if there is one and it is not too long. It is only reported: should it
/// panic, what comes behind it in the migration comes all the same.
pub(crate) fn observed(observer: Option<&dyn GuestObserver>) -> Option<Vec<u8>> {
    let observer = observer?;
    let Ok(report) = catch_unwind(AssertUnwindSafe(|| observer.report())) else {
        warn!("the guest's observer panicked; what it saw is not reported");
        return None;
    };
    (report.len() <= OBSERVED_BYTES_MAX).then_some(report)
}

/// A machine whose guest can be moved away.
///
/// Order of calls in one attempt: `machine_description`, `track`, any number of `rehearse` and
/// `set_throttle`, then `begin_suspend`, `poll_suspended`, `begin_pause`, `poll_paused`,
/// `poll_state`, and if the attempt fails in between, `resume`. All take `&self`: the owner may ask
/// for status meanwhile.
///
/// `track` and `rehearse` may take their time: they are called on a thread of their own, which an
/// attempt that is over waits for only if it tracks. All others return at once, whatever a device or
/// a vCPU does: the one who calls them has to hear the clock and the owner. A `poll_` is called again
/// until it is ready: when the waker of its `begin_` was woken, and else from time to time.
pub trait SourceVmm: Send + Sync {
    /// What a destination must build, opaque to the engine and checked by the destination's VMM.
    /// Beside the layout of its memory, which is told anyway.
    fn machine_description(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The guest's memory.
    fn ram(&self) -> Arc<GuestRam>;

    /// Starts dirty tracking. Pages written from now on are reported; the state before is
    /// whatever the first round sends.
    fn track(&self) -> Result<Tracker, TrackError>;

    /// Stops all vCPUs as for a switchover, saves their state and lets them go on, and measures
    /// that. The guest loses what the stop takes: a fraction of a millisecond, where each vCPU has
    /// a processor. Without it, what is predicted of the blackout is its pages only.
    fn rehearse(&self) -> Result<Option<Rehearsal>, Error> {
        Ok(None)
    }

    /// Takes this share of a running guest's time away, 0 to 99 per cent.
    fn set_throttle(&self, percent: u8) {
        let _ = percent;
    }

    /// Tells all devices that write guest memory by themselves to finish what they are at and stop,
    /// together; waits for nothing. The vCPUs run on: what they give to a device meanwhile, it
    /// finds when it is resumed. `wake` may be woken when `poll_suspended` has something to say;
    /// it is asked every 50 us all the same.
    fn begin_suspend(&self, wake: &Waker) {
        let _ = wake;
    }

    /// Ready when no such device touches guest memory any more, and what they wrote is known to
    /// dirty tracking. After an error all of them go on, and the guest with them.
    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    /// Tells all vCPUs to stop and then each to save its own state, at once; waits for nothing.
    /// Wakes `wake` when the last one is out, and when the last one is saved.
    fn begin_pause(&self, wake: &Waker);

    /// Ready when no vCPU runs any more: dirty tracking is final from here. The saving may
    /// still go on. After an error the guest and its devices go on as they were.
    fn poll_paused(&self) -> Poll<Result<Paused, Error>>;

    /// The state of vCPUs, VM and devices, once the vCPUs have saved theirs. Only between
    /// `poll_paused` and `resume`.
    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>>;

    /// Undoes whatever of the stop was begun; the source's way out of every failure before the
    /// commit. With what `poll_paused` gave: the guest goes on as it was, first its vCPUs, then its
    /// devices. With `None`, `begin_suspend` and perhaps `begin_pause` were not answered yet:
    /// devices and guest go on, each as soon as it has answered, however late that is; in between
    /// a new attempt may fail.
    fn resume(&self, paused: Option<Paused>);

    /// After the commit: the guest has left for good. vCPU threads may end.
    fn moved_away(&self) {}

    /// Who looks at the guest, if anybody does.
    fn observer(&self) -> Option<&dyn GuestObserver> {
        None
    }
}

/// Who is at the other end of a migration, as far as this host's kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this host and of the user that this one runs as.
    SameUser,
    /// The same, but over TCP: a proxy of that user may stand for anybody.
    SameUserByTcp,
    /// Anybody.
    Unknown,
}

/// What a source asks for. All of it may come from anybody.
#[derive(Clone, Copy, Debug)]
pub struct BuildRequest<'a> {
    /// What [`SourceVmm::machine_description`] gave.
    pub description: &'a [u8],
    /// The guest's memory.
    pub layout: &'a [PageRange],
    /// Who asks.
    pub peer: Peer,
    /// Set once nobody needs the machine any more.
    pub is_cancelled: &'a AtomicBool,
}

impl BuildRequest<'_> {
    /// An error once nobody needs the machine any more: call it between the steps of building it.
    pub fn check_wanted(&self) -> Result<(), Error> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            let reason = "the migration has ended meanwhile";
            return Err(Error::new(Fault::Cancelled, "build the machine", reason));
        }
        Ok(())
    }
}

/// Builds the machine that a source describes.
pub trait DestinationFactory: Send + Sync {
    /// Checks the description against this host and builds everything: memory of this layout,
    /// vCPUs, devices, threads. Nothing may be left for the blackout but loading the state. Called
    /// on a thread that may take its time, for one migration at a time.
    fn build(&self, request: &BuildRequest<'_>) -> Result<Arc<dyn DestinationVmm>, Error>;
}

impl<F> DestinationFactory for F
where
    F: Fn(&BuildRequest<'_>) -> Result<Arc<dyn DestinationVmm>, Error> + Send + Sync,
{
    fn build(&self, request: &BuildRequest<'_>) -> Result<Arc<dyn DestinationVmm>, Error> {
        self(request)
    }
}

/// What a state is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadFor {
    /// The guest runs at the source and its memory still arrives: nothing that counts or acts by
    /// itself may be set going, and nothing may be written to guest memory.
    Rehearsal,
    /// The guest stopped: it starts from this state as soon as its last pages have arrived, which
    /// may still be under way.
    Start {
        /// How the source's `CLOCK_MONOTONIC` differs from this process's: a VMM that notes in its
        /// state when it read a clock of the guest knows by this how long that stood. `None` if the
        /// source did not say.
        source_clock: Option<ClockOffset>,
    },
}

/// A machine that waits for a guest.
///
/// Order of calls: any number of `load_state` (rehearsals), `arm`, the last `load_state`, `start`,
/// `begin_resume`, `poll_resumed` until it is ready.
/// Dropping it before `start` frees everything.
pub trait DestinationVmm: Any + Send + Sync {
    /// The memory to receive into.
    fn ram(&self) -> Arc<GuestRam>;

    /// Loads a state into the waiting vCPUs and devices, all vCPUs at once. The state comes from
    /// the peer: anything may be in it. Guest memory is afterwards as it was before.
    fn load_state(&self, state: &[u8], what_for: LoadFor) -> Result<(), Error>;

    /// The blackout is near: the threads of the vCPUs stay awake from now on, yielding, for at
    /// most `limit`.
    fn arm(&self, limit: Duration) {
        let _ = limit;
    }

    /// Runs the guest, or leaves it paused. Its devices are not waited for.
    fn start(&self, permit: RunPermit, state: RunState);

    /// Tells all devices to go on, together; waits for nothing. Right after `start`, also for a
    /// guest that stays paused, whose devices then stay as they are. Wakes `wake` once
    /// `poll_resumed` is ready.
    fn begin_resume(&self, wake: &Waker) {
        let _ = wake;
    }

    /// Ready when they do. The guest has arrived whatever comes of this: an error says which device
    /// does not work.
    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    /// Who looks at the guest, if anybody does.
    fn observer(&self) -> Option<&dyn GuestObserver> {
        None
    }
}
