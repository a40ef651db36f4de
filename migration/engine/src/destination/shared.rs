//! What the listener, the attempts and the owner of a receiver share.

use super::events::Event;
use super::{ReceiveOptions, ReceiveStatus};
use crate::mailbox::Mailbox;
use crate::{DestinationFactory, DestinationVmm, host};
use martlet_core::destination::{Desk, Stopping};
use martlet_protocol::Ledger;
use martlet_transport::{Stream, Wake};
use martlet_wire::control::{Answer, Fate, InstanceId, MigrationId};
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) factory: Arc<dyn DestinationFactory>,
    pub(super) options: ReceiveOptions,
    /// Whether the address takes RDMA.
    pub(super) takes_rdma: bool,
    /// Raised for the listener when the desk changes.
    pub(super) wake: Wake,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    desk: Desk,
    /// The machine whose guest has arrived, until its owner has it.
    arrived: Option<Arc<dyn DestinationVmm>>,
    /// Of the attempt under way.
    events: Option<Arc<Mailbox<Event>>>,
}

impl Shared {
    pub(super) fn new(
        factory: Arc<dyn DestinationFactory>,
        options: ReceiveOptions,
        takes_rdma: bool,
    ) -> std::io::Result<Shared> {
        let desk = Desk::new(InstanceId(host::random_id()?));
        Ok(Shared {
            factory,
            options,
            takes_rdma,
            wake: Wake::new()?,
            inner: Mutex::new(Inner { desk, arrived: None, events: None }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the desk, and tells all who wait for that.
    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let changed = change(&mut self.lock());
        self.wake.raise();
        self.changed.notify_all();
        changed
    }

    pub(super) fn status(&self) -> ReceiveStatus {
        self.lock().desk.status()
    }

    pub(super) fn failures(&self) -> (u64, Option<String>) {
        self.lock().desk.failures()
    }

    pub(super) fn wait(&self, timeout: Duration) -> ReceiveStatus {
        let deadline = Instant::now() + timeout;
        let mut inner = self.lock();
        loop {
            let status = inner.desk.status();
            let left = deadline.saturating_duration_since(Instant::now());
            let is_final = matches!(status, ReceiveStatus::Arrived | ReceiveStatus::Stopped);
            if is_final || left.is_zero() {
                return status;
            }
            let waited = self.changed.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Stops in one of the desk's ways.
    pub(super) fn stop(&self, way: fn(&mut Desk) -> Stopping) {
        self.change(|inner| {
            if way(&mut inner.desk) == Stopping::TellAttempt
                && let Some(events) = &inner.events
            {
                events.post(Event::Stop);
            }
        });
    }

    /// Whether nobody is answered any more.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().desk.is_closed()
    }

    /// Why no source can bring a guest now.
    pub(super) fn refusal(&self) -> Option<Status> {
        self.lock().desk.refusal()
    }

    /// A source came to nothing before it had said what it brings.
    pub(super) fn note_failure(&self, reason: String) {
        self.change(|inner| inner.desk.note_failure(reason));
    }

    /// Begins an attempt, or says why not.
    pub(super) fn begin_attempt(
        &self,
        migration: MigrationId,
        events: &Arc<Mailbox<Event>>,
    ) -> Result<Ledger, Status> {
        self.change(|inner| {
            let ledger = inner.desk.try_begin(migration)?;
            inner.events = Some(Arc::clone(events));
            Ok(ledger)
        })
    }

    /// The attempt under way is decided; what is left of it is for the record.
    pub(super) fn decide(&self, fate: Fate, vmm: Option<Arc<dyn DestinationVmm>>) {
        self.change(|inner| {
            inner.desk.decide(fate);
            inner.arrived = vmm;
        });
    }

    /// Gives away the machine whose guest has arrived, if it is of this type.
    pub(super) fn take_arrived<V: DestinationVmm>(&self) -> Option<Arc<V>> {
        let arrived = &mut self.lock().arrived;
        let machine: Arc<dyn Any + Send + Sync> = arrived.clone()?;
        let machine = machine.downcast().ok()?;
        *arrived = None;
        Some(machine)
    }

    /// Ends the attempt under way; the next one may begin. `error` says why no guest has arrived.
    pub(super) fn end_attempt(&self, ledger: Ledger, error: Option<String>) {
        self.change(|inner| {
            inner.events = None;
            inner.desk.end(ledger, error);
        });
    }

    pub(super) fn await_channels(&self, count: u16, token: [u8; 16]) {
        self.lock().desk.await_channels(count, token);
    }

    pub(super) fn drop_channels(&self) {
        self.lock().desk.drop_channels();
    }

    /// Lets a data channel in, or says why not. Answers on the stream either way.
    pub(super) fn admit_channel(&self, hello: &Hello, version: u16, stream: Stream) {
        let (channel, is_rdma) = (hello.channel, hello.role == Role::RDMA);
        let mut inner = self.lock();
        let admitted = inner.desk.admit_channel(hello);
        let events = inner.events.clone();
        drop(inner);
        let answer = match admitted {
            Ok(()) => HelloReply::accept(version),
            Err(status) => HelloReply::refuse(status),
        };
        let answered = martlet_transport::reply(&stream, &answer);
        let (Ok(()), Some(events)) = (admitted, events) else { return };
        events.post(match answered {
            Ok(()) if is_rdma => Event::RdmaJoined { stream },
            Ok(()) => Event::ChannelJoined { channel, stream },
            Err(error) => Event::channel_lost(None, format!("data channel {channel}: {error}")),
        });
    }

    /// What became of a migration, as a promise. Never waits for the attempt under way.
    pub(super) fn answer(&self, migration: MigrationId) -> Answer {
        self.lock().desk.answer(migration)
    }
}
