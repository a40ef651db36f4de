//! What a migration tells its owner: progress while it runs, a report at the end.

use crate::Error;
use martlet_policy::Prediction;
use martlet_units::{ByteCount, BytesPerSec, ClockOffset, Instant, PageCount};
use std::time::Duration;

/// Where a migration stands, in QEMU's words where QEMU has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Connecting, building the destination, opening channels.
    Setup,
    /// Pre-copy rounds; the guest runs at the source.
    Active,
    /// The switchover: the guest is stopped.
    Device,
    /// The guest runs at the destination.
    Completed,
    /// The attempt failed; the guest runs at the source as before.
    Failed,
    /// A cancel was asked for and is being carried out.
    Cancelling,
    /// Cancelled; the guest runs at the source as before.
    Cancelled,
    /// The connection broke after the commit was sent and before its acknowledgement came. The
    /// guest stays stopped here until the destination was asked.
    Undecided,
    /// It was undecided, and its operator gave the guest up: it never runs here again.
    GivenUp,
}

impl Status {
    /// Whether nothing more will happen by itself.
    pub fn is_final(self) -> bool {
        match self {
            Status::Completed
            | Status::Failed
            | Status::Cancelled
            | Status::Undecided
            | Status::GivenUp => true,
            Status::Setup | Status::Active | Status::Device | Status::Cancelling => false,
        }
    }
}

/// Pages by what was done with them, summed over all rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Sent with their content.
    pub normal: u64,
    /// Found to be zero: sent as a number.
    pub zero: u64,
    /// Never touched by the guest: neither read nor sent.
    pub untouched: u64,
}

/// A moment's view of a migration.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Where it stands.
    pub status: Status,
    /// Since its start; the whole time once it is over.
    pub elapsed: Duration,
    /// The current round, from 0.
    pub round: u32,
    /// Sent so far on all channels, headers included.
    pub bytes_sent: ByteCount,
    /// Sending rate of the current round.
    pub rate: BytesPerSec,
    /// Dirty pages not yet sent.
    pub remaining: PageCount,
    /// All of the guest's memory.
    pub total: PageCount,
    /// Pages dirtied a second, from the last round.
    pub dirty_pages_per_s: u64,
    /// The guest dirties memory faster than the link carries it, and nothing will be done about
    /// that: the migration does not end by itself.
    pub outrun: Option<Outrun>,
    /// What the blackout would be, were the guest stopped now.
    pub predicted_blackout: Option<Duration>,
    /// The guest's time taken away to let the migration converge, in per cent.
    pub throttle_percent: u8,
    /// Pages by what was done with them.
    pub pages: PageCounts,
    /// Why it did not move the guest.
    pub error: Option<Error>,
}

impl Progress {
    /// Of a guest with so much memory, before anything was done.
    pub fn begun(total: PageCount) -> Progress {
        Progress {
            status: Status::Setup,
            elapsed: Duration::ZERO,
            round: 0,
            bytes_sent: ByteCount(0),
            rate: BytesPerSec(0),
            remaining: total,
            total,
            dirty_pages_per_s: 0,
            outrun: None,
            predicted_blackout: None,
            throttle_percent: 0,
            pages: PageCounts::default(),
            error: None,
        }
    }
}

/// A guest that is faster than its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outrun {
    /// What it dirties.
    pub dirties: BytesPerSec,
    /// What the link carries.
    pub carries: BytesPerSec,
}

impl Outrun {
    /// Whether another round is no better than the last: the guest dirties 90 % or more of what
    /// the link carries. A page that is dirtied twice counts once, so it can't be much above.
    pub(crate) fn gains_nothing(&self) -> bool {
        self.dirties.0.saturating_mul(10) >= self.carries.0.saturating_mul(9)
    }
}

/// The parts of the blackout that the source waits for, one after the other. Their sum is the
/// protocol's own measure of the blackout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// From the kick until the last vCPU was out.
    pub pause: Duration,
    /// Reading the dirty log once more.
    pub final_sync: Duration,
    /// Sending the last pages.
    pub final_pages: Duration,
    /// Waiting for the rest of the vCPU and device state, and sending it.
    pub cpu_state: Duration,
    /// From the commit's sending until the destination had it and everything else.
    pub commit: Duration,
    /// From then until the vCPUs ran.
    pub start: Duration,
}

/// Which side a [`Span`] happened on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host that gives the guest away.
    Source,
    /// The host that gets it.
    Destination,
}

/// One bar of the switchover's timeline. Zero is the moment the stop was ordered; a destination's
/// times are mapped to the source's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What was done, e.g. `save vCPU state`.
    pub name: &'static str,
    /// Where.
    pub side: Side,
    /// Microseconds from zero; negative before the stop.
    pub start_us: i64,
    /// Microseconds from zero; not before the start.
    pub end_us: i64,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// The guest runs at the source, as before.
    Failed,
    /// The guest runs at the source, as before: its owner cancelled.
    Cancelled,
    /// Nobody here can know; see [`Status::Undecided`].
    Undecided,
    /// Nobody here knows, and the guest never runs here again; see [`Status::GivenUp`].
    GivenUp,
}

/// What became of the guest's devices in a switchover.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// From the order to suspend until none touched memory any more. vCPUs run meanwhile.
    pub suspend: Duration,
    /// From the order to resume until the last one had. vCPUs run already. `None` if the
    /// destination did not say.
    pub resume: Option<Duration>,
    /// Which device does not work at the destination, and why, in one line.
    pub trouble: Option<String>,
}

/// How RDMA served a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaUse {
    /// Provider and device; `None` if it did not come to that.
    pub device: Option<String>,
    /// Why the rest went over the connection, if RDMA ended early. In one line.
    pub fell_back: Option<String>,
    /// Pages that were sent again for that.
    pub pages_again: u64,
}

/// How a migration ended, and what was measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// How it ended.
    pub outcome: Outcome,
    /// Why it did not move the guest.
    pub error: Option<Error>,
    /// What was sent, by what means, and what that took.
    pub transfer: Transfer,
    /// The stop of the guest, if it came to that.
    pub switchover: Option<Switchover>,
}

impl Report {
    /// The report of an attempt that ended, after `total`, before anything was sent.
    pub fn not_begun(outcome: Outcome, error: Option<Error>, total: Duration) -> Report {
        let transfer = Transfer { total, ..Transfer::default() };
        Report { outcome, error, transfer, switchover: None }
    }
}

/// What was sent in a migration, by what means, and what that took.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Transfer {
    /// From the call until the destination's acknowledgement.
    pub total: Duration,
    /// Pre-copy rounds and the last one.
    pub rounds: u32,
    /// Pages by what was done with them.
    pub pages: PageCounts,
    /// Sent on all connections, headers included.
    pub bytes_sent: ByteCount,
    /// Data channels used.
    pub channels: u16,
    /// CPU time of the source process meanwhile, its vCPUs included.
    pub source_cpu: Duration,
    /// CPU time of the destination process meanwhile, if it said so.
    pub destination_cpu: Option<Duration>,
    /// How RDMA served it, if it was asked for.
    pub rdma: Option<RdmaUse>,
    /// Whether both sides' memory was equal before the commit, if that was asked for.
    pub memory_equal: Option<bool>,
}

/// The stop of a guest, and its start.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Switchover {
    /// From the last vCPU's way out at the source to the first one's way in at the destination.
    /// `None` if the guest did not leave, or if a check lengthened it.
    pub blackout: Option<Duration>,
    /// How the destination's clock differs from the source's, and what the times of both together
    /// may be off by: nothing on one host. `None` if the destination did not say when it started.
    pub clock: Option<ClockOffset>,
    /// The destination host's wall clock minus the source's, in nanoseconds; as uncertain as
    /// `clock` says. The guest's clocks do not follow it. `None` if the destination did not say.
    pub wall_clock_difference_ns: Option<i64>,
    /// What was predicted when the guest was stopped.
    pub predicted: Option<Prediction>,
    /// The blackout's parts.
    pub phases: Phases,
    /// What became of the devices.
    pub devices: Devices,
    /// Zero of `timeline` on the source's `CLOCK_MONOTONIC`: when the vCPUs were told to stop.
    pub stop: Instant,
    /// What happened, bar by bar.
    pub timeline: Vec<Span>,
    /// What the source's observer saw of a guest that left.
    pub source_observed: Option<Vec<u8>>,
    /// What the destination's observer saw. It comes from the peer: anything may be in it.
    pub destination_observed: Option<Vec<u8>>,
}
