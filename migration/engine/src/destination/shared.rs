//! What the listener, the attempts and the owner of a receiver share.

use super::ReceiveStatus;
use super::events::Event;
use crate::mailbox::Mailbox;
use crate::{DestinationFactory, host};
use martlet_protocol::Ledger;
use martlet_transport::{RdmaAccept, Stream, Wake};
use martlet_wire::control::{Answer, InstanceId, MigrationId};
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a second source waits for the first one's attempt to end before it is turned away.
const BUSY_GRACE: Duration = Duration::from_secs(1);

/// How long a query may wait for a running attempt, which may be building a machine.
const QUERY_PATIENCE: Duration = Duration::from_secs(10);

/// After this long the question is put again, to whoever can answer it then.
const QUERY_INTERVAL: Duration = Duration::from_millis(100);

pub(super) struct Shared {
    pub(super) factory: Arc<dyn DestinationFactory>,
    pub(super) wake: Wake,
    /// What a source may do by RDMA; `None` where nothing.
    pub(super) rdma: Option<RdmaAccept>,
    /// Connections that have not greeted yet.
    pub(super) strangers: AtomicUsize,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    phase: Phase,
    /// The owner wants no more attempts.
    stopping: bool,
    last_error: Option<String>,
    /// What became of earlier attempts; with the attempt under way while there is one.
    ledger: Option<Ledger>,
    /// The attempt under way.
    events: Option<Arc<Mailbox<Event>>>,
    /// What the attempt's channels must show, while it waits for them.
    awaited: Option<Awaited>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Listening,
    Active,
    Arrived,
    Stopped,
}

struct Awaited {
    token: [u8; 16],
    /// Whether a channel's number is taken.
    taken: Vec<bool>,
}

impl Shared {
    pub(super) fn new(
        factory: Arc<dyn DestinationFactory>,
        rdma: Option<RdmaAccept>,
    ) -> std::io::Result<Shared> {
        Ok(Shared {
            factory,
            rdma,
            wake: Wake::new()?,
            strangers: AtomicUsize::new(0),
            inner: Mutex::new(Inner {
                phase: Phase::Listening,
                stopping: false,
                last_error: None,
                ledger: Some(Ledger::new(InstanceId(host::random_id()?))),
                events: None,
                awaited: None,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> ReceiveStatus {
        let inner = self.lock();
        match inner.phase {
            Phase::Listening => ReceiveStatus::Listening { last_error: inner.last_error.clone() },
            Phase::Active => ReceiveStatus::Active,
            Phase::Arrived => ReceiveStatus::Arrived,
            Phase::Stopped => ReceiveStatus::Stopped,
        }
    }

    pub(super) fn wait(&self, timeout: Duration) -> ReceiveStatus {
        let deadline = Instant::now() + timeout;
        let mut inner = self.lock();
        while matches!(inner.phase, Phase::Listening | Phase::Active) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inner =
                self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(inner);
        self.status()
    }

    pub(super) fn stop(&self) {
        let mut inner = self.lock();
        inner.stopping = true;
        if let Some(events) = &inner.events {
            events.post(Event::Stop);
        }
        if inner.phase == Phase::Listening {
            inner.phase = Phase::Stopped;
        }
        drop(inner);
        self.wake.raise();
        self.changed.notify_all();
    }

    /// Begins an attempt, or says why not. A source that tries again at once may come before the
    /// attempt that it gave up has ended here, so that one is given a moment.
    pub(super) fn begin_attempt(&self, events: &Arc<Mailbox<Event>>) -> Result<(), Status> {
        let deadline = Instant::now() + BUSY_GRACE;
        let mut inner = self.lock();
        while inner.phase == Phase::Active {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match inner.phase {
            Phase::Listening if inner.stopping => Err(Status::STOPPING),
            Phase::Listening => {
                inner.phase = Phase::Active;
                inner.events = Some(Arc::clone(events));
                Ok(())
            }
            Phase::Active => Err(Status::BUSY),
            Phase::Arrived => Err(Status::OCCUPIED),
            Phase::Stopped => Err(Status::STOPPING),
        }
    }

    pub(super) fn take_ledger(&self) -> Ledger {
        self.lock().ledger.take().expect("one attempt at a time")
    }

    pub(super) fn put_ledger(&self, ledger: Ledger) {
        self.lock().ledger = Some(ledger);
    }

    /// Ends the attempt under way; the next one may begin.
    pub(super) fn end_attempt(&self, end: Result<(), String>) {
        let mut inner = self.lock();
        inner.events = None;
        inner.awaited = None;
        match end {
            Ok(()) => inner.phase = Phase::Arrived,
            Err(reason) => {
                inner.phase = if inner.stopping { Phase::Stopped } else { Phase::Listening };
                inner.last_error = Some(reason);
            }
        }
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    pub(super) fn await_channels(&self, count: u16, token: [u8; 16]) {
        self.lock().awaited = Some(Awaited { token, taken: vec![false; usize::from(count)] });
    }

    /// Lets a data channel in, or says why not. Answers on the stream either way.
    pub(super) fn admit_channel(&self, hello: &Hello, version: u16, stream: Stream) {
        let Hello { channel, token, .. } = *hello;
        let is_rdma = hello.role == Role::RDMA;
        let mut inner = self.lock();
        let admitted = match &mut inner.awaited {
            // RDMA is the only channel of its migration.
            Some(awaited) if is_rdma && awaited.taken.len() != 1 => Err(Status::CHANNEL),
            Some(awaited) if awaited.token == token => {
                match awaited.taken.get_mut(usize::from(channel)) {
                    Some(taken) if !*taken => {
                        *taken = true;
                        Ok(())
                    }
                    _ => Err(Status::CHANNEL),
                }
            }
            _ => Err(Status::TOKEN),
        };
        let events = inner.events.clone();
        drop(inner);
        let answer = match admitted {
            Ok(()) => HelloReply::accept(version),
            Err(status) => HelloReply::refuse(status),
        };
        let answered = martlet_transport::reply(&stream, &answer);
        if admitted.is_ok()
            && let Some(events) = events
        {
            events.post(match answered {
                Ok(()) if is_rdma => Event::RdmaJoined { stream },
                Ok(()) => Event::ChannelJoined { channel, stream },
                Err(error) => Event::ChannelLost {
                    channel,
                    reason: format!("data channel {channel}: {error}"),
                },
            });
        }
    }

    /// What became of a migration, as a promise; `None` if nobody could say in time.
    pub(super) fn answer(&self, migration: MigrationId) -> Option<Answer> {
        let deadline = Instant::now() + QUERY_PATIENCE;
        while Instant::now() < deadline {
            let inner = self.lock();
            if let Some(ledger) = &inner.ledger {
                return Some(ledger.answer(migration));
            }
            let events = inner.events.clone();
            drop(inner);
            // Without a mailbox the attempt is just beginning or ending: look again.
            let Some(events) = events else { continue };
            let (answer, answered) = crossbeam_channel::bounded(1);
            events.post(Event::Query { migration, answer });
            // An attempt that ends drops the question with its mailbox; then the ledger answers.
            if let Ok(answer) = answered.recv_timeout(QUERY_INTERVAL) {
                return Some(answer);
            }
        }
        None
    }

    pub(super) fn stranger_leaves(&self) {
        self.strangers.fetch_sub(1, Ordering::Relaxed);
    }
}
