//! What the driver of a migration and its owner share.

use super::bell::Bell;
use super::events::Event;
use super::news::{Subscribers, Subscription};
use crate::mailbox::Mailbox;
use crate::{Error, Fault, Progress, RdmaUse, Report, Status};
use martlet_transport::Wake;
use martlet_units::{Instant, PageCount};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(super) struct Shared {
    pub(super) events: Mailbox<Event>,
    /// Rung by those who have no event.
    pub(super) bell: Arc<Bell>,
    pub(super) started: Instant,
    /// Raised once nothing is to be connected for the attempt any more.
    pub(super) over: Wake,
    /// The owner wants the guest to stay. Apart from the events, so that none of them is before it.
    cancelled: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    progress: Progress,
    subscribers: Subscribers,
    report: Option<Report>,
    /// How often an undecided migration's question was answered, in whatever way.
    answers: u64,
    /// Why the last of them settled nothing, if the destination was not even heard.
    unanswered: Option<Error>,
    downtime_limit: Duration,
    rdma: Option<RdmaUse>,
}

impl Inner {
    fn tell(&mut self) {
        self.subscribers.tell(&self.progress);
    }
}

impl Shared {
    pub(super) fn new(
        started: Instant,
        total: PageCount,
        downtime_limit: Duration,
    ) -> std::io::Result<Shared> {
        Ok(Shared {
            events: Mailbox::new()?,
            bell: Arc::new(Bell::new()?),
            started,
            over: Wake::new()?,
            cancelled: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                progress: Progress::begun(total),
                subscribers: Subscribers::default(),
                report: None,
                answers: 0,
                unanswered: None,
                downtime_limit,
                rdma: None,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self, now: Instant) -> Progress {
        let inner = self.lock();
        let mut progress = inner.progress.clone();
        if inner.report.is_none() {
            progress.elapsed = now.since(self.started);
        }
        progress
    }

    /// How it stands now. A cancel that was asked for shows until the attempt ends.
    pub(super) fn show(&self, progress: &Progress) {
        let mut inner = self.lock();
        let shown = &mut inner.progress;
        let (status, elapsed) = (shown.status, shown.elapsed);
        shown.clone_from(progress);
        if status.is_final() {
            // What is known since then changes nothing of that.
            (shown.status, shown.elapsed) = (status, elapsed);
        } else if status == Status::Cancelling {
            shown.status = status;
        }
        inner.tell();
    }

    pub(super) fn subscribe(&self) -> std::io::Result<Subscription> {
        let Inner { progress, subscribers, .. } = &mut *self.lock();
        subscribers.add(progress)
    }

    /// Asks for the guest to stay. If that can still do anything the status says that it is under
    /// way.
    pub(super) fn cancel(&self) {
        let mut inner = self.lock();
        if inner.progress.status.is_final() {
            return;
        }
        inner.progress.status = Status::Cancelling;
        inner.tell();
        drop(inner);
        // Release: pairs with the driver's acquire, which then says so in its report.
        self.cancelled.store(true, Ordering::Release);
        self.over.raise();
        self.events.post(Event::Owner);
    }

    /// Whether the owner wants the guest to stay.
    pub(super) fn is_cancelled(&self) -> bool {
        // Acquire: see `cancel`.
        self.cancelled.load(Ordering::Acquire)
    }

    pub(super) fn status(&self) -> Status {
        self.lock().progress.status
    }

    pub(super) fn downtime_limit(&self) -> Duration {
        self.lock().downtime_limit
    }

    pub(super) fn set_downtime_limit(&self, limit: Duration) {
        self.lock().downtime_limit = limit;
    }

    /// Remembers how RDMA serves.
    pub(super) fn note_rdma(&self, change: impl FnOnce(&mut RdmaUse)) {
        change(self.lock().rdma.get_or_insert_default());
    }

    pub(super) fn rdma(&self) -> Option<RdmaUse> {
        self.lock().rdma.clone()
    }

    /// Ends the migration, or an undecided one anew.
    pub(super) fn finish(&self, status: Status, report: Report) {
        self.over.raise();
        let mut inner = self.lock();
        inner.progress.status = status;
        inner.progress.elapsed = report.transfer.total;
        inner.progress.error.clone_from(&report.error);
        inner.report = Some(report);
        inner.tell();
        inner.answers += 1;
        inner.unanswered = None;
        drop(inner);
        self.changed.notify_all();
    }

    /// The destination of an undecided migration could not be asked.
    pub(super) fn note_unanswered(&self, reason: Error) {
        let mut inner = self.lock();
        inner.answers += 1;
        inner.unanswered = Some(reason);
        drop(inner);
        self.changed.notify_all();
    }

    /// Waits until the migration is settled, or the question that `ask` poses is answered. Any
    /// number may wait at once, and get the same answer. The error says why it is still open.
    pub(super) fn wait_settled(
        &self,
        timeout: Duration,
        ask: impl FnOnce(),
    ) -> Result<Status, Error> {
        let deadline = std::time::Instant::now() + timeout;
        let mut inner = self.lock();
        let before = inner.answers;
        if inner.progress.status == Status::Undecided {
            drop(inner);
            ask();
            inner = self.lock();
        }
        loop {
            match inner.progress.status {
                Status::Undecided if inner.answers == before => {}
                Status::Undecided => {
                    let reason = inner.unanswered.clone().or(inner.progress.error.clone());
                    let unsaid = || Error::new(Fault::Peer, "", "no reason given");
                    return Err(reason.unwrap_or_else(unsaid));
                }
                status if status.is_final() => return Ok(status),
                _ => {
                    let reason = "the migration is still under way";
                    return Err(Error::new(Fault::Request, "", reason));
                }
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                let reason = "the destination did not answer in time";
                return Err(Error::new(Fault::Peer, "", reason));
            }
            let waited = self.changed.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn wait(&self, timeout: Duration) -> Option<Report> {
        let deadline = std::time::Instant::now() + timeout;
        let mut inner = self.lock();
        while inner.report.is_none() {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.report.clone()
    }
}
