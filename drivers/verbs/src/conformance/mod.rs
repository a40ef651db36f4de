//! What every provider of [`Fabric`] must do, as cases that run on any of them: the soft
//! provider, the kernel's verbs, a model in virtual time.
//!
//! A case uses the interface only, and waits by [`QueuePair::wait`](crate::QueuePair::wait), never
//! by a clock.

mod arena;
mod bed;
mod connection;
mod hazards;
mod order;
mod placement;
mod rate;
mod refusal;

pub use arena::Arena;
pub use rate::in_flight;

use crate::error::{PostError, VerbsError};
use crate::fabric::{ConnectRequest, Endpoint, Fabric, Listener, Setup};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long connecting may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// A queue pair of a site's fabric.
pub type Pair<S> = <<S as Site>::Fabric as Fabric>::Pair;

/// Two fabrics whose queue pairs can be connected. They may be the same one.
pub trait Site {
    /// The provider.
    type Fabric: Fabric;

    /// The side that posts.
    fn source(&self) -> &Self::Fabric;

    /// The side whose memory is written.
    fn target(&self) -> &Self::Fabric;

    /// Connects: `request` and `answer` are the private data of the two.
    fn connect(
        &self,
        source: &Setup,
        target: &Setup,
        request: &[u8],
        answer: &[u8],
    ) -> Result<Connected<Pair<Self>>, VerbsError>
    where
        Self: Sized;

    /// Tries to connect and is rejected with `answer`: what the source gets to hear.
    fn connect_rejected(&self, request: &[u8], answer: &[u8]) -> VerbsError;
}

/// A connection.
pub struct Connected<P> {
    /// The side that connected.
    pub source: P,
    /// The side that accepted.
    pub target: P,
    /// The private data that the target saw.
    pub request: Vec<u8>,
    /// The private data that the source saw.
    pub answer: Vec<u8>,
}

/// Two fabrics of this process, connected by an address.
pub struct Loopback<F> {
    /// The side that posts.
    pub source: F,
    /// The side whose memory is written.
    pub target: F,
    /// Where the target listens. Port 0 takes any.
    pub at: Endpoint,
}

impl<F: Fabric> Site for Loopback<F> {
    type Fabric = F;

    fn source(&self) -> &F {
        &self.source
    }

    fn target(&self) -> &F {
        &self.target
    }

    fn connect(
        &self,
        source: &Setup,
        target: &Setup,
        request: &[u8],
        answer: &[u8],
    ) -> Result<Connected<F::Pair>, VerbsError> {
        let mut listener = self.target.listen(&self.at)?;
        let at = listener.local();
        let given_up = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let accepted = scope.spawn(move || {
                let waiting = next_request(&mut listener, given_up)?;
                let seen = waiting.private_data().to_vec();
                Ok((waiting.accept(target, answer, CONNECT_LIMIT)?, seen))
            });
            let connected = self.source.connect(&at, source, request, CONNECT_LIMIT);
            // Relaxed: it carries nothing but itself.
            given_up.store(connected.is_err(), Ordering::Relaxed);
            let accepted = joined(accepted);
            let (source, answer) = connected?;
            let (target, request) = accepted?;
            Ok(Connected { source, target, request, answer })
        })
    }

    fn connect_rejected(&self, request: &[u8], answer: &[u8]) -> VerbsError {
        let rejected = || {
            let mut listener = self.target.listen(&self.at)?;
            let at = listener.local();
            let given_up = &AtomicBool::new(false);
            std::thread::scope(|scope| {
                let rejecting =
                    scope.spawn(move || next_request(&mut listener, given_up)?.reject(answer));
                let setup = Setup::default();
                let connected = self.source.connect(&at, &setup, request, CONNECT_LIMIT);
                joined(rejecting)?;
                connected.map(drop)
            })
        };
        let accepted = VerbsError::Peer { what: "it accepted what was to be rejected" };
        rejected().err().unwrap_or(accepted)
    }
}

/// The next request, unless the connecting side has given up by itself.
fn next_request<L: Listener>(
    listener: &mut L,
    given_up: &AtomicBool,
) -> Result<L::Request, VerbsError> {
    let slice = CONNECT_LIMIT / 200;
    for _ in 0..200 {
        if let Some(request) = listener.accept(slice)? {
            return Ok(request);
        }
        if given_up.load(Ordering::Relaxed) {
            break;
        }
    }
    let limit_ms = u64::try_from(CONNECT_LIMIT.as_millis()).unwrap_or(u64::MAX);
    Err(VerbsError::Timeout { action: "waiting for a connection", limit_ms })
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// What providers may differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Whether stores after the post must be seen to travel, given enough that is queued before.
    pub late_read: LateRead,
    /// Whether a request with a wrong local key must complete with its cause.
    pub local_failure: LocalFailure,
    /// Bytes that keep the device busy for a moment.
    pub backlog_bytes: usize,
    /// How often a race is tried.
    pub trials: u32,
}

/// See [`Profile::late_read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateRead {
    /// At least once in all trials.
    Expected,
    /// The device may read so early that no store gets in between (rdma_rxe before Linux 6.3
    /// transmits within the post).
    MayHide,
}

/// See [`Profile::local_failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalFailure {
    /// It does.
    Told,
    /// It may be flushed as all others are: the requester of rdma_rxe (seen with Linux 6.12)
    /// takes the queue pair to the error state, and its completer then flushes every request
    /// that it finds, this one too.
    MayBeFlushed,
}

impl Default for Profile {
    /// For a device that does all it should.
    fn default() -> Profile {
        Profile {
            late_read: LateRead::Expected,
            local_failure: LocalFailure::Told,
            backlog_bytes: 16 << 20,
            trials: 20,
        }
    }
}

impl Profile {
    /// For the kernel's rdma_rxe since Linux 6.3, which is slow, too.
    pub fn soft_roce() -> Profile {
        let local_failure = LocalFailure::MayBeFlushed;
        Profile { local_failure, backlog_bytes: 4 << 20, trials: 10, ..Profile::default() }
    }
}

/// A promise that was broken, or something that got in the way of testing it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

impl From<VerbsError> for Violation {
    fn from(error: VerbsError) -> Violation {
        Violation(chain(&error))
    }
}

impl From<PostError> for Violation {
    fn from(error: PostError) -> Violation {
        Violation(chain(&error))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn expect(truth: bool, otherwise: impl FnOnce() -> String) -> Result<(), Violation> {
    if truth { Ok(()) } else { Err(Violation(otherwise())) }
}

/// One case: what it observed, where there is something to tell.
pub type CaseFn<S> = fn(&S, &Profile) -> Result<String, Violation>;

/// All cases with their names, in the order to run them.
pub fn cases<S: Site>() -> Vec<(&'static str, CaseFn<S>)> {
    vec![
        ("private data goes both ways", connection::private_data),
        ("a rejection is told with its data", connection::rejection),
        ("a write lands, and nothing beside it", placement::write_lands),
        ("a write of no bytes names no memory", placement::empty_write),
        ("many scattered writes in flight all land", placement::many_in_flight),
        ("two queue pairs share memory, and fail alone", placement::two_pairs),
        ("an immediate comes after its bytes", placement::immediate),
        ("a read lands", placement::read_lands),
        ("the later of two writes stays", order::later_write_stays),
        ("unsignalled writes are done with the next signalled", order::unsignalled),
        ("the whole queue can be filled again and again", order::slots_come_back),
        ("after the first failure all is flushed, in order", order::flush_order),
        ("a wrong key is refused", refusal::wrong_key),
        ("no byte outside of a region is written", refusal::out_of_bounds),
        ("no write where none is allowed", refusal::wrong_access),
        ("no read where none is allowed", refusal::no_read_access),
        ("local memory needs its key", refusal::local_key),
        ("a key ends with its region", refusal::deregistered),
        ("deregistering stops writes in flight", refusal::deregistered_under_fire),
        ("without a receive an immediate fails, or waits", refusal::no_receive),
        ("a completion wakes who waits", connection::wait_for_completion),
        ("a disconnect is seen by the other side", connection::disconnect),
        ("the source is read late", hazards::late_source_read),
        ("a drain keeps an older version from landing last", hazards::stale_page),
    ]
}

/// Runs all cases whose name contains `only`; each outcome goes to `tell` as it is known. The
/// count of cases that failed.
pub fn run<S: Site>(
    site: &S,
    profile: &Profile,
    only: &str,
    mut tell: impl FnMut(&'static str, Result<String, Violation>),
) -> usize {
    let mut failed = 0;
    for (name, case) in cases::<S>().into_iter().filter(|(name, _)| name.contains(only)) {
        let outcome = case(site, profile);
        failed += usize::from(outcome.is_err());
        tell(name, outcome);
    }
    failed
}
