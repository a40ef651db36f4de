//! What the listener, the attempts and the owner of a receiver share.

use super::events::Event;
use super::{ReceiveOptions, ReceiveStatus};
use crate::mailbox::Mailbox;
use crate::{DestinationFactory, host};
use martlet_protocol::Ledger;
use martlet_transport::{Stream, Wake};
use martlet_wire::control::{Answer, Fate, InstanceId, MigrationId};
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a second source waits for the first one's attempt to end before it is turned away.
const BUSY_GRACE: Duration = Duration::from_secs(1);

pub(super) struct Shared {
    pub(super) factory: Arc<dyn DestinationFactory>,
    pub(super) wake: Wake,
    pub(super) options: ReceiveOptions,
    /// Whether the address takes RDMA.
    pub(super) takes_rdma: bool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    phase: Phase,
    /// The owner wants no more attempts.
    stopping: bool,
    last_error: Option<String>,
    /// Attempts that failed.
    failures: u64,
    /// What became of earlier attempts.
    ledger: Ledger,
    /// The attempt under way.
    current: Option<Current>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Listening,
    Active,
    Arrived,
    Stopped,
}

struct Current {
    events: Arc<Mailbox<Event>>,
    /// Its name, and what is answered to who asks for it.
    fate: Option<(MigrationId, Fate)>,
    /// What its channels must show, while it waits for them.
    awaited: Option<Awaited>,
}

struct Awaited {
    token: [u8; 16],
    /// Whether a channel's number is taken.
    taken: Vec<bool>,
}

impl Shared {
    pub(super) fn new(
        factory: Arc<dyn DestinationFactory>,
        options: ReceiveOptions,
        takes_rdma: bool,
    ) -> std::io::Result<Shared> {
        Ok(Shared {
            factory,
            options,
            takes_rdma,
            wake: Wake::new()?,
            inner: Mutex::new(Inner {
                phase: Phase::Listening,
                stopping: false,
                last_error: None,
                failures: 0,
                ledger: Ledger::new(InstanceId(host::random_id()?)),
                current: None,
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

    pub(super) fn failures(&self) -> (u64, Option<String>) {
        let inner = self.lock();
        (inner.failures, inner.last_error.clone())
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
        let is_first = !std::mem::replace(&mut inner.stopping, true);
        if let Some(current) = inner.current.as_ref().filter(|_| is_first) {
            current.events.post(Event::Stop);
        }
        if inner.phase == Phase::Listening {
            inner.phase = Phase::Stopped;
        }
        drop(inner);
        self.wake.raise();
        self.changed.notify_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Begins an attempt, or says why not. A source that tries again at once may come before the
    /// attempt that it gave up has ended here, so that one is given a moment.
    pub(super) fn begin_attempt(&self, events: &Arc<Mailbox<Event>>) -> Result<Ledger, Status> {
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
                let events = Arc::clone(events);
                inner.current = Some(Current { events, fate: None, awaited: None });
                Ok(inner.ledger.clone())
            }
            Phase::Active => Err(Status::BUSY),
            Phase::Arrived => Err(Status::OCCUPIED),
            Phase::Stopped => Err(Status::STOPPING),
        }
    }

    /// The attempt under way has a name; nothing of it is decided. Before anything can be: who asks
    /// is never told that a migration is unknown to which a commit may still come.
    pub(super) fn name_attempt(&self, migration: MigrationId) {
        if let Some(current) = &mut self.lock().current {
            current.fate = Some((migration, Fate::Pending));
        }
    }

    /// The attempt under way is decided; what is left of it is for the record.
    pub(super) fn decide(&self, fate: Fate) {
        let mut inner = self.lock();
        if let Some(Current { fate: Some((_, told)), .. }) = &mut inner.current {
            *told = fate;
        }
        if fate == Fate::Committed {
            inner.phase = Phase::Arrived;
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Ends the attempt under way; the next one may begin. With what it left in the ledger, unless
    /// it never began.
    pub(super) fn end_attempt(&self, ledger: Option<Ledger>, end: Result<(), String>) {
        let mut inner = self.lock();
        inner.current = None;
        if let Some(ledger) = ledger {
            inner.ledger = ledger;
        }
        match end {
            Ok(()) => inner.phase = Phase::Arrived,
            Err(reason) => {
                inner.phase = if inner.stopping { Phase::Stopped } else { Phase::Listening };
                inner.last_error = Some(reason);
                inner.failures += 1;
            }
        }
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn await_channels(&self, count: u16, token: [u8; 16]) {
        if let Some(current) = &mut self.lock().current {
            current.awaited = Some(Awaited { token, taken: vec![false; usize::from(count)] });
        }
    }

    /// Lets a data channel in, or says why not. Answers on the stream either way.
    pub(super) fn admit_channel(&self, hello: &Hello, version: u16, stream: Stream) {
        let channel = hello.channel;
        let is_rdma = hello.role == Role::RDMA;
        let admitted = self.check_channel(hello);
        let answer = match &admitted {
            Ok(_) => HelloReply::accept(version),
            Err(status) => HelloReply::refuse(*status),
        };
        let answered = martlet_transport::reply(&stream, &answer);
        let Ok(events) = admitted else { return };
        events.post(match answered {
            Ok(()) if is_rdma => Event::RdmaJoined { stream },
            Ok(()) => Event::ChannelJoined { channel, stream },
            Err(error) => Event::ChannelLost {
                last_barrier: None,
                reason: format!("data channel {channel}: {error}"),
            },
        });
    }

    fn check_channel(&self, hello: &Hello) -> Result<Arc<Mailbox<Event>>, Status> {
        let mut inner = self.lock();
        let Some(Current { events, awaited: Some(awaited), .. }) = &mut inner.current else {
            return Err(Status::TOKEN);
        };
        // RDMA is the only channel of its migration.
        if hello.role == Role::RDMA && awaited.taken.len() != 1 {
            return Err(Status::CHANNEL);
        }
        if awaited.token != hello.token {
            return Err(Status::TOKEN);
        }
        match awaited.taken.get_mut(usize::from(hello.channel)) {
            Some(taken) if !*taken => {
                *taken = true;
                Ok(Arc::clone(events))
            }
            _ => Err(Status::CHANNEL),
        }
    }

    /// What became of a migration, as a promise. Never waits for the attempt under way.
    pub(super) fn answer(&self, migration: MigrationId) -> Answer {
        let inner = self.lock();
        match inner.current.as_ref().and_then(|current| current.fate) {
            Some((name, fate)) if name == migration => {
                Answer { instance: inner.ledger.instance(), fate }
            }
            _ => inner.ledger.answer(migration),
        }
    }
}
