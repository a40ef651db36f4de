//! Every deadline of the protocol. None of them is reached by a healthy pair of hosts.

use core::time::Duration;

/// The destination, from an accepted control connection to the `Setup` on it.
pub const SETUP_WAIT_MAX: Duration = Duration::from_secs(10);
/// The source, from `Setup` to `SetupDone`: the destination maps memory and makes vCPUs, which
/// took under a second for 64 GiB; a host that swaps takes longer.
pub const SETUP_MAX: Duration = Duration::from_secs(30);
/// Both sides, until all data channels are there.
pub const CHANNELS_WAIT_MAX: Duration = Duration::from_secs(10);
/// The source, from the last byte of a round handed to the kernel to `RoundReceived`: socket
/// buffers of a few MiB on the slowest link that makes sense.
pub const ROUND_ACK_MAX: Duration = Duration::from_secs(30);
/// The source, from `Rehearse` to `Rehearsed`.
pub const REHEARSAL_MAX: Duration = Duration::from_secs(10);
/// The source, from the stopped guest to the commit, beyond twice the downtime limit. Then the
/// prediction was so wrong that going on serves nobody.
pub const SWITCHOVER_GRACE: Duration = Duration::from_secs(10);
/// The source, from `AskDigest` to `Digest`: a terabyte at two gigabytes a second.
pub const DIGEST_MAX: Duration = Duration::from_secs(600);
/// The destination, from `Commit` until the last pages and the state are in, and from `AskDigest`
/// until the last pages are. Shorter than [`COMMIT_ACK_MAX`], so that a refusal still arrives in
/// time to be one.
pub const COMMIT_COMPLETE_MAX: Duration = Duration::from_secs(8);
/// The source, from `Commit` to its acknowledgement. Then the attempt is undecided.
pub const COMMIT_ACK_MAX: Duration = Duration::from_secs(10);
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

const _: () = assert!(COMMIT_COMPLETE_MAX.as_nanos() < COMMIT_ACK_MAX.as_nanos());
const _: () = assert!(2 * PING_INTERVAL.as_nanos() < SILENCE_MAX.as_nanos());
