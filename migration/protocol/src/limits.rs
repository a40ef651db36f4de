//! Every deadline of the protocol. None of them is reached by a healthy pair of hosts.

use core::time::Duration;

/// The destination, from an accepted control connection to the `Setup` on it.
pub const SETUP_WAIT_MAX: Duration = Duration::from_secs(10);
/// The source, from `Setup` to `SetupDone`: the destination maps memory and makes vCPUs, which
/// took under a second for 64 GiB; a host that swaps takes longer.
pub const SETUP_MAX: Duration = Duration::from_secs(30);
/// Both sides, until all data channels are there.
pub const CHANNELS_WAIT_MAX: Duration = Duration::from_secs(10);
/// The source, from the last byte of a round that left its kernel to `RoundReceived`.
pub const ROUND_ACK_MAX: Duration = Duration::from_secs(30);
/// The source, from `Rehearse` to `Rehearsed`.
pub const REHEARSAL_MAX: Duration = Duration::from_secs(10);
/// The bound of a blackout is so many downtime limits ...
const BLACKOUT_LIMITS: u32 = 3;
/// ... and at least this: less is within what a busy host makes of a thread that wants to run.
const BLACKOUT_MIN: Duration = Duration::from_secs(1);
/// Behind the commit the destination has at least this part of the bound, and the source waits for
/// its answer this part longer than that.
const AFTER_COMMIT_PART: u32 = 2;
/// But the latter not more than this, however long a blackout is accepted: the state is loaded and
/// the vCPUs are started within it.
const ANSWER_SPARE_MAX: Duration = Duration::from_secs(10);
/// While the guest is stopped the destination is asked this often whether it is there ...
pub(crate) const STOPPED_PING_INTERVAL: Duration = Duration::from_millis(50);
/// ... and one that was not heard for this long, or several round trips, gets no commit.
pub(crate) const UNHEARD_MAX: Duration = Duration::from_millis(250);
/// Round trips for the same.
pub(crate) const UNHEARD_ROUND_TRIPS: u32 = 4;

/// The source, from the stopped guest to the commit: then the prediction was so wrong that going on
/// serves nobody.
pub fn blackout_max(downtime_limit: Duration) -> Duration {
    downtime_limit.saturating_mul(BLACKOUT_LIMITS).max(BLACKOUT_MIN)
}

/// What the destination is given behind the commit until the last pages and the state are in, when
/// the guest has been standing for `stopped`.
pub(crate) fn complete_max(downtime_limit: Duration, stopped: Duration) -> Duration {
    let bound = blackout_max(downtime_limit);
    bound.saturating_sub(stopped).max(bound / AFTER_COMMIT_PART).min(COMPLETE_MAX)
}

/// How long the source waits for an answer to its commit. Then the attempt is undecided.
pub(crate) fn answer_max(
    downtime_limit: Duration,
    complete: Duration,
    round_trip: Duration,
) -> Duration {
    let spare = (blackout_max(downtime_limit) / AFTER_COMMIT_PART).min(ANSWER_SPARE_MAX);
    complete.saturating_add(spare).saturating_add(round_trip * 2)
}

/// The most that a source may give its destination behind the commit.
pub const COMPLETE_MAX: Duration = Duration::from_secs(60);
/// The source, from `AskDigest` to `Digest`: a terabyte at two gigabytes a second.
pub const DIGEST_MAX: Duration = Duration::from_secs(600);
/// The destination, from `Commit` until the last pages and the state are in, if the source does not
/// say; and from `AskDigest` until the last pages are.
pub const COMMIT_COMPLETE_MAX: Duration = Duration::from_secs(8);
/// Both sides, from the start at the destination to `Alive`, which is a courtesy.
pub const ALIVE_MAX: Duration = Duration::from_secs(2);
/// Both sides: longest silence on a control connection that carries pings.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// The source pings this often.
pub const PING_INTERVAL: Duration = Duration::from_secs(1);
/// The destination: how long a data channel may be gone before the message comes that tells
/// whether it was still needed. That message is already in the control connection's buffer.
pub const LOST_CHANNEL_GRACE: Duration = Duration::from_secs(1);

/// Attempts that a destination remembers as abandoned before their commit. Arrived guests are
/// never forgotten.
pub const LEDGER_ABANDONED_MAX: usize = 64;
/// Attempts that a destination remembers as refused after their commit. Each took a whole
/// migration; with so many, the oldest is forgotten and its source told so, which proves the same.
pub const LEDGER_REFUSED_MAX: usize = 1 << 16;

const _: () = assert!(2 * PING_INTERVAL.as_nanos() < SILENCE_MAX.as_nanos());
