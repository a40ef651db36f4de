//! What a migration tells those who would rather be told than ask.

use crate::Progress;
use martlet_transport::{Wake, wait_any};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Progress without a new status or round is told this often.
const NEWS_INTERVAL: Duration = Duration::from_millis(100);

/// News of a migration: its progress, whenever its status or its round has changed, and some ten
/// times a second meanwhile. Only the newest waits to be taken. Its descriptor (see [`AsFd`]) is
/// readable while there is one.
#[derive(Debug)]
pub struct Subscription(Arc<News>);

#[derive(Debug)]
struct News {
    newest: Mutex<Option<Progress>>,
    wake: Wake,
}

impl Subscription {
    /// The newest progress that was not taken; waits for one at most `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<Progress> {
        // A wait that fails is as one that took too long.
        let _ = wait_any(&mut [PollFd::new(self, PollFlags::IN)], timeout);
        let mut newest = self.0.lock();
        let taken = newest.take();
        if taken.is_some() {
            self.0.wake.lower();
        }
        taken
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

impl News {
    fn lock(&self) -> MutexGuard<'_, Option<Progress>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, progress: &Progress) {
        // Under the lock: the descriptor is readable exactly while there is news.
        if self.lock().replace(progress.clone()).is_none() {
            self.wake.raise();
        }
    }
}

/// Who has subscribed to a migration.
#[derive(Debug, Default)]
pub(super) struct Subscribers {
    all: Vec<Weak<News>>,
    told: Option<Progress>,
}

impl Subscribers {
    /// One more, who is told how it stands.
    pub(super) fn add(&mut self, progress: &Progress) -> std::io::Result<Subscription> {
        let news = Arc::new(News { newest: Mutex::new(None), wake: Wake::new()? });
        news.put(progress);
        self.all.push(Arc::downgrade(&news));
        Ok(Subscription(news))
    }

    /// Tells all who are still there, if there is something to tell. Often called.
    pub(super) fn tell(&mut self, progress: &Progress) {
        let is_new = self.told.as_ref().is_none_or(|told| {
            (told.status, told.round) != (progress.status, progress.round)
                || progress.elapsed.saturating_sub(told.elapsed) >= NEWS_INTERVAL
        });
        if self.all.is_empty() || !is_new {
            return;
        }
        self.told = Some(progress.clone());
        self.all.retain(|news| {
            let news = news.upgrade();
            news.iter().for_each(|news| news.put(progress));
            news.is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;
    use martlet_units::PageCount;

    fn is_readable(subscription: &Subscription) -> bool {
        let mut fds = [PollFd::new(subscription, PollFlags::IN)];
        wait_any(&mut fds, Duration::ZERO).unwrap();
        !fds[0].revents().is_empty()
    }

    #[test]
    fn who_has_subscribed_is_told_what_is_new_and_the_newest_only() {
        let mut progress = Progress::begun(PageCount(1));
        let mut subscribers = Subscribers::default();
        let subscription = subscribers.add(&progress).unwrap();
        assert!(is_readable(&subscription));
        assert_eq!(subscription.next(Duration::ZERO).map(|it| it.status), Some(Status::Setup));
        assert!(!is_readable(&subscription) && subscription.next(Duration::ZERO).is_none());
        for round in 0..3 {
            (progress.status, progress.round) = (Status::Active, round);
            subscribers.tell(&progress);
        }
        assert!(is_readable(&subscription));
        assert_eq!(subscription.next(Duration::ZERO).map(|it| it.round), Some(2));
        subscribers.tell(&progress);
        assert!(!is_readable(&subscription), "nothing is new");
        progress.elapsed += NEWS_INTERVAL;
        subscribers.tell(&progress);
        assert!(is_readable(&subscription), "but some time has passed");
        drop(subscription);
        progress.round = 3;
        subscribers.tell(&progress);
        assert!(subscribers.all.is_empty());
    }
}
