//! What the driver of a migration and its owner share.

use super::events::Event;
use crate::mailbox::Mailbox;
use crate::report::{PageCounts, Progress, RdmaUse, Report, Status};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(super) struct Shared {
    pub(super) events: Mailbox<Event>,
    pub(super) started: Instant,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    progress: Progress,
    report: Option<Report>,
    downtime_limit: Duration,
    rdma: Option<RdmaUse>,
}

impl Shared {
    pub(super) fn new(
        started: Instant,
        total: PageCount,
        downtime_limit: Duration,
    ) -> std::io::Result<Shared> {
        let progress = Progress {
            status: Status::Setup,
            elapsed: Duration::ZERO,
            round: 0,
            bytes_sent: ByteCount(0),
            rate: BytesPerSec(0),
            remaining: total,
            total,
            dirty_pages_per_s: 0,
            predicted_blackout: None,
            throttle_percent: 0,
            pages: PageCounts::default(),
            error: None,
        };
        Ok(Shared {
            events: Mailbox::new()?,
            started,
            inner: Mutex::new(Inner { progress, report: None, downtime_limit, rdma: None }),
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

    pub(super) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock().progress);
    }

    /// A cancel that was asked for shows until the attempt ends.
    pub(super) fn set_status(&self, status: Status) {
        let mut inner = self.lock();
        if inner.progress.status != Status::Cancelling || status.is_final() {
            inner.progress.status = status;
        }
    }

    /// Whether a cancel can still do anything; then the status says that it is under way.
    pub(super) fn begin_cancel(&self) -> bool {
        let mut inner = self.lock();
        let open = !inner.progress.status.is_final();
        if open {
            inner.progress.status = Status::Cancelling;
        }
        open
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
        let mut inner = self.lock();
        inner.progress.status = status;
        inner.progress.elapsed = report.total;
        inner.progress.error.clone_from(&report.error);
        inner.report = Some(report);
        drop(inner);
        self.changed.notify_all();
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
