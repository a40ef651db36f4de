//! Waking the driver by those who have no message for it, at next to no cost while it is awake: a
//! vCPU that rings does so in a blackout.

use martlet_transport::Wake;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub(super) struct Bell {
    has_rung: AtomicBool,
    is_awaited: AtomicBool,
    wake: Wake,
}

impl Bell {
    pub(super) fn new() -> std::io::Result<Bell> {
        let (has_rung, is_awaited) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Bell { has_rung, is_awaited, wake: Wake::new()? })
    }

    /// Whether it has rung since the last wait. If not, it is readable as soon as it does, and
    /// [`Bell::end_wait`] is to be called.
    pub(super) fn begin_wait(&self) -> bool {
        // Sequentially consistent, as in `wake`: of the two stores one is seen by the other side.
        self.is_awaited.store(true, Ordering::SeqCst);
        let has_rung = self.has_rung.swap(false, Ordering::SeqCst);
        if has_rung {
            self.end_wait();
        }
        has_rung
    }

    pub(super) fn end_wait(&self) {
        self.is_awaited.store(false, Ordering::SeqCst);
        if self.has_rung.swap(false, Ordering::SeqCst) {
            self.wake.lower();
        }
    }
}

impl std::task::Wake for Bell {
    fn wake(self: Arc<Bell>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Bell>) {
        self.has_rung.store(true, Ordering::SeqCst);
        if self.is_awaited.load(Ordering::SeqCst) {
            self.wake.raise();
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_transport::wait_any;
    use rustix::event::{PollFd, PollFlags};
    use std::task::Waker;
    use std::time::Duration;

    #[test]
    fn it_is_heard_whether_it_rings_before_or_during_the_wait() {
        let bell = Arc::new(Bell::new().unwrap());
        let waker = Waker::from(Arc::clone(&bell));
        waker.wake_by_ref();
        assert!(bell.begin_wait());
        assert!(!bell.begin_wait(), "heard once");
        std::thread::spawn(move || waker.wake());
        let mut fds = [PollFd::new(&*bell, PollFlags::IN)];
        wait_any(&mut fds, Duration::from_secs(60)).unwrap();
        assert!(fds[0].revents().contains(PollFlags::IN));
        bell.end_wait();
        assert!(!bell.begin_wait());
    }
}
