//! What can go wrong, and which of many failures was the first.

use crate::work::{Completion, Status, WorkId};
use std::io;

/// Why something other than a posted request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The host has no RDMA user space. Names the packages.
    #[error(
        "cannot open {library}: {reason}; RDMA needs the packages libibverbs1, librdmacm1 and \
         ibverbs-providers (rdma-core)"
    )]
    LibraryMissing {
        /// The file that was looked for.
        library: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// The library is there but too old.
    #[error("{library} has no {symbol}: rdma-core is too old")]
    SymbolMissing {
        /// The library.
        library: &'static str,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The libraries are there, but no device is.
    #[error(
        "this host has no RDMA device{wanted}; see `rdma link` (iproute2), and \
         ibverbs-providers for the device's user space"
    )]
    NoDevice {
        /// Which one was asked for: empty, or " called NAME" or " that owns ADDRESS".
        wanted: String,
    },
    /// A call of the host failed.
    #[error("cannot {action}")]
    Host {
        /// What was being done.
        action: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Memory could not be registered.
    #[error("cannot register {bytes} bytes at {address:#x}{hint}")]
    Register {
        /// How many.
        bytes: u64,
        /// Where.
        address: u64,
        /// What usually helps; empty if nothing is known.
        hint: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A request of the caller is outside of what the provider can do.
    #[error("{what} is {asked}, at most {limit} here")]
    Limit {
        /// What has a limit.
        what: &'static str,
        /// What was asked for.
        asked: u64,
        /// What is possible.
        limit: u64,
    },
    /// This provider does not know such addresses.
    #[error("{provider} cannot use the address {address}")]
    Address {
        /// `ibv` or `soft`.
        provider: &'static str,
        /// What was given.
        address: String,
    },
    /// The peer said no; `private_data` says why, in the peer's own words.
    #[error("the peer rejected the connection (reason {reason})")]
    Rejected {
        /// The connection manager's number; 28 is "by the program" (IBA spec 12.6.7.2).
        reason: i32,
        /// What the peer's program added, perhaps with zeros behind.
        private_data: Vec<u8>,
    },
    /// Nothing came in time.
    #[error("{action} took longer than {limit_ms} ms")]
    Timeout {
        /// What was being done.
        action: &'static str,
        /// The limit.
        limit_ms: u64,
    },
    /// The connection manager said something else than was waited for.
    #[error("{action}: the connection manager says {event} (status {status})")]
    Connection {
        /// What was being done.
        action: &'static str,
        /// Its event.
        event: String,
        /// And status.
        status: i32,
    },
    /// The peer does not speak the provider's language.
    #[error("the peer is no martlet: {what}")]
    Peer {
        /// What is wrong.
        what: &'static str,
    },
    /// More completions were not polled than there is room for; some are lost. The queue pair is
    /// of no use any more.
    #[error("the completion queue ran over")]
    CompletionOverrun,
}

impl VerbsError {
    /// What to do with what the kernel said to `action`. For providers.
    pub fn host(action: &'static str) -> impl FnOnce(io::Error) -> VerbsError {
        move |source| VerbsError::Host { action, source }
    }
}

/// Why a list was not posted to its end. The requests before are posted.
#[derive(Debug, thiserror::Error)]
#[error("only the first {posted} requests of the list were posted")]
pub struct PostError {
    /// How many are.
    pub posted: usize,
    /// What stopped it.
    #[source]
    pub cause: PostFault,
}

/// What stopped a list.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostFault {
    /// No slot of the queue is free. The poster should have counted: see `SendWindow`.
    #[error("the queue is full")]
    Full,
    /// A request is not one that this provider can do.
    #[error("the request is invalid: {0}")]
    Invalid(&'static str),
    /// The device refused.
    #[error("the device refused the request")]
    Device(#[source] io::Error),
}

/// The request that failed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {id:?} failed: {status}")]
pub struct Failure {
    /// Which.
    pub id: WorkId,
    /// How.
    pub status: Status,
}

/// Keeps the cause among many completions: the first that failed on its own account. Flushes
/// only say that something else failed.
#[derive(Clone, Copy, Debug, Default)]
pub struct FirstCause {
    cause: Option<Failure>,
    flushed: u64,
}

impl FirstCause {
    /// Takes every completion, in the order of polling.
    pub fn on_completion(&mut self, completion: &Completion) {
        if completion.status.is_flush() {
            self.flushed += 1;
        } else if completion.status != Status::SUCCESS && self.cause.is_none() {
            self.cause = Some(Failure { id: completion.id, status: completion.status });
        }
    }

    /// The failure that all flushes came from, if one of this queue pair's requests failed.
    /// `None` with [`FirstCause::flushed`] above 0 means that the connection ended for a reason
    /// of its own: see `QueuePair::link`.
    pub fn cause(&self) -> Option<Failure> {
        self.cause
    }

    /// How many requests were flushed.
    pub fn flushed(&self) -> u64 {
        self.flushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_the_cause_whatever_follows() {
        let mut cause = FirstCause::default();
        let statuses =
            [Status::SUCCESS, Status::FLUSHED, Status::REMOTE_ACCESS, Status::RETRY_EXCEEDED];
        for (id, status) in (0..).map(WorkId).zip(statuses) {
            cause.on_completion(&Completion { id, status, ..Completion::default() });
        }
        let expected = Failure { id: WorkId(2), status: Status::REMOTE_ACCESS };
        assert_eq!((cause.cause(), cause.flushed()), (Some(expected), 1));
    }
}
