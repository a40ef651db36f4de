//! What a queue pair's owner and its progress thread share: what is posted, what is done.

use martlet_verbs::{Completion, Operation, Sge, Side, Signal, Status, WorkId, WorkRequest};
use martlet_verbs::{Link, MESSAGE_BYTES_MAX, Setup};
use martlet_verbs::{PostError, PostFault, VerbsError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Shared by one queue pair and its thread.
pub(super) struct Shared {
    queues: Mutex<Queues>,
    /// Whether there is something to poll: so that an owner who polls all the time does not keep
    /// the lock from the thread. Written under the lock.
    news: AtomicBool,
    /// Told when [`Queues::quiet`] becomes true.
    quiet: Condvar,
    /// Wakes the thread.
    pub(super) wake: OwnedFd,
    /// Wakes the owner, who waits for a completion.
    event: OwnedFd,
}

/// The queues themselves.
pub(super) struct Queues {
    setup: Setup,
    /// Posted and not done, in order. Never longer than `setup.send_slots`.
    sends: VecDeque<WorkRequest>,
    /// Number of `sends[0]`.
    first: u64,
    /// How many of `sends`, from the front, the thread has taken to send them.
    taken: usize,
    /// All writes before this number are in place at the peer.
    placed: u64,
    /// All reads before this number are done.
    read: u64,
    /// Numbers of the reads that are taken and not done, in order.
    reads: VecDeque<u64>,
    slots_used: u32,
    /// Requests done whose slots no completion has given back yet.
    unsignalled: u32,
    receives: VecDeque<WorkId>,
    /// With each: how many slots it gives back.
    send_done: VecDeque<(Completion, u32)>,
    receive_done: VecDeque<Completion>,
    overrun: bool,
    link: Link,
    armed: bool,
    /// The thread waits, or is about to: it must be woken for new work.
    pub(super) sleeping: bool,
    /// The owner wants the end.
    pub(super) leave: bool,
    /// The thread writes no registered memory any more.
    pub(super) quiet: bool,
}

/// The peer's claims about requests that don't exist.
pub(super) struct Unbelievable(pub(super) &'static str);

impl Shared {
    pub(super) fn new(setup: Setup) -> Result<Shared, VerbsError> {
        let events = || {
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|errno| VerbsError::host("make an eventfd")(errno.into()))
        };
        let slots = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
        let queues = Queues {
            setup,
            sends: VecDeque::with_capacity(slots(setup.send_slots)),
            first: 0,
            taken: 0,
            placed: 0,
            read: 0,
            reads: VecDeque::with_capacity(usize::from(setup.reads_in_flight)),
            slots_used: 0,
            unsignalled: 0,
            receives: VecDeque::with_capacity(slots(setup.receive_slots)),
            send_done: VecDeque::with_capacity(slots(setup.completion_slots)),
            receive_done: VecDeque::with_capacity(slots(setup.completion_slots)),
            overrun: false,
            link: Link::Up,
            armed: false,
            sleeping: false,
            leave: false,
            quiet: false,
        };
        let queues = Mutex::new(queues);
        let (news, quiet) = (AtomicBool::new(false), Condvar::new());
        Ok(Shared { queues, news, quiet, wake: events()?, event: events()? })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread look at the queues, if it does not do so by itself.
    fn nudge(&self, mut queues: MutexGuard<'_, Queues>) {
        let sleeping = std::mem::take(&mut queues.sleeping);
        drop(queues);
        if sleeping {
            raise(&self.wake);
        }
    }

    /// Tells the owner, if it asked for it, that there is something to poll.
    pub(super) fn tell(&self, mut queues: MutexGuard<'_, Queues>) {
        let news = queues.has_news();
        // Release: with the load in `poll`, though the lock orders all that matters.
        self.news.store(news, Ordering::Release);
        let tell = (news || queues.link != Link::Up) && std::mem::take(&mut queues.armed);
        drop(queues);
        if tell {
            raise(&self.event);
        }
    }

    pub(super) fn post(&self, list: &[WorkRequest]) -> Result<(), PostError> {
        let mut queues = self.lock();
        let result = queues.post(list);
        if queues.link == Link::Up {
            self.nudge(queues);
        } else {
            self.tell(queues);
        }
        result
    }

    pub(super) fn post_receives(&self, ids: &[WorkId]) -> Result<(), PostError> {
        let mut queues = self.lock();
        let result = queues.post_receives(ids);
        self.tell(queues);
        result
    }

    pub(super) fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        if !self.news.load(Ordering::Acquire) {
            return Ok(0);
        }
        let mut queues = self.lock();
        let result = queues.poll(into);
        self.news.store(queues.has_news(), Ordering::Release);
        result
    }

    pub(super) fn arm(&self) {
        let mut queues = self.lock();
        queues.armed = true;
        // The link's end is told at once, as it comes only once.
        if queues.link == Link::Up { drop(queues) } else { self.tell(queues) }
    }

    pub(super) fn wait(&self, limit: Duration) -> Result<bool, VerbsError> {
        let came = wait_readable(&self.event, Some(limit))?;
        if came {
            lower(&self.event);
        }
        Ok(came)
    }

    pub(super) fn link(&self) -> Link {
        self.lock().link
    }

    pub(super) fn leave(&self) {
        let mut queues = self.lock();
        queues.leave = true;
        self.nudge(queues);
    }

    /// Returns when the thread writes no registered memory any more.
    pub(super) fn wait_quiet(&self) {
        let mut queues = self.lock();
        while !queues.quiet {
            queues = self.quiet.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends everything that is posted: the request `cause` with its status, all others flushed.
    pub(super) fn end(&self, link: Link, cause: Option<(u64, Status)>) {
        let mut queues = self.lock();
        queues.end(link, cause);
        self.tell(queues);
    }

    pub(super) fn set_quiet(&self) {
        self.lock().quiet = true;
        self.quiet.notify_all();
    }
}

impl Queues {
    fn post(&mut self, list: &[WorkRequest]) -> Result<(), PostError> {
        for (posted, request) in list.iter().enumerate() {
            let stop = |cause| Err(PostError { posted, cause });
            if self.slots_used == self.setup.send_slots {
                return stop(PostFault::Full);
            }
            if request.local.bytes > MESSAGE_BYTES_MAX {
                return stop(PostFault::Invalid("more than 1 GiB in one request"));
            }
            let read = matches!(request.operation, Operation::Read { .. });
            if read && self.setup.reads_in_flight == 0 {
                return stop(PostFault::Invalid("the queue pair was made for no reads"));
            }
            self.slots_used += 1;
            if self.link == Link::Up {
                self.sends.push_back(*request);
            } else {
                self.complete_send(request.id, Status::FLUSHED);
            }
        }
        Ok(())
    }

    fn post_receives(&mut self, ids: &[WorkId]) -> Result<(), PostError> {
        let slots = usize::try_from(self.setup.receive_slots).unwrap_or(usize::MAX);
        for (posted, &id) in ids.iter().enumerate() {
            if self.receives.len() + self.receive_done.len() >= slots {
                return Err(PostError { posted, cause: PostFault::Full });
            }
            if self.link == Link::Up {
                self.receives.push_back(id);
            } else {
                self.complete_receive(id, Status::FLUSHED, None);
            }
        }
        Ok(())
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut count = 0;
        for place in into.iter_mut() {
            if let Some((completion, slots)) = self.send_done.pop_front() {
                self.slots_used -= slots;
                *place = completion;
            } else if let Some(completion) = self.receive_done.pop_front() {
                *place = completion;
            } else {
                break;
            }
            count += 1;
        }
        if count == 0 && self.overrun && !into.is_empty() {
            return Err(VerbsError::CompletionOverrun);
        }
        Ok(count)
    }

    fn complete_send(&mut self, id: WorkId, status: Status) {
        let slots = std::mem::take(&mut self.unsignalled) + 1;
        if self.send_done.len() >= self.completion_slots() {
            self.overrun = true;
            return;
        }
        let completion = Completion { id, side: Side::Send, status, immediate: None };
        self.send_done.push_back((completion, slots));
    }

    fn complete_receive(&mut self, id: WorkId, status: Status, immediate: Option<u32>) {
        if self.receive_done.len() >= self.completion_slots() {
            self.overrun = true;
            return;
        }
        self.receive_done.push_back(Completion { id, side: Side::Receive, status, immediate });
    }

    fn completion_slots(&self) -> usize {
        usize::try_from(self.setup.completion_slots).unwrap_or(usize::MAX)
    }

    /// Whether a poll has something to say.
    fn has_news(&self) -> bool {
        !self.send_done.is_empty() || !self.receive_done.is_empty() || self.overrun
    }

    /// Whether completions were lost.
    pub(super) fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Takes requests to send, at most `RECORDS_MAX` and about `bytes_max` bytes of writes, and
    /// no more reads than may be in flight. The number of the first is returned.
    pub(super) fn take(
        &mut self,
        into: &mut Vec<WorkRequest>,
        requests_max: usize,
        bytes_max: u64,
    ) -> u64 {
        into.clear();
        let first = self.first + self.taken as u64;
        let mut bytes = 0;
        for request in self.sends.range(self.taken..).take(requests_max) {
            if matches!(request.operation, Operation::Read { .. }) {
                if self.reads.len() >= usize::from(self.setup.reads_in_flight) {
                    break;
                }
                self.reads.push_back(first + into.len() as u64);
            } else {
                bytes += u64::from(request.local.bytes);
            }
            into.push(*request);
            if bytes >= bytes_max {
                break;
            }
        }
        self.taken += into.len();
        first
    }

    /// Whether [`Queues::take`] would give something.
    pub(super) fn has_untaken(&self) -> bool {
        self.sends.get(self.taken).is_some_and(|request| {
            !matches!(request.operation, Operation::Read { .. })
                || self.reads.len() < usize::from(self.setup.reads_in_flight)
        })
    }

    /// Gives back what was taken, from the request `from` on: it will be taken again.
    pub(super) fn untake(&mut self, from: u64) {
        let keep = usize::try_from(from.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.taken = self.taken.min(keep);
        while self.reads.back().is_some_and(|&read| read >= from) {
            self.reads.pop_back();
        }
    }

    /// The peer says that all requests before `placed` are done.
    pub(super) fn on_placed(&mut self, placed: u64) -> Result<(), Unbelievable> {
        if placed < self.placed || placed > self.first + self.taken as u64 {
            return Err(Unbelievable("it acknowledges what was not sent"));
        }
        self.placed = placed;
        self.retire();
        Ok(())
    }

    /// The read whose bytes come next.
    pub(super) fn awaited_read(&self, number: u64) -> Result<Sge, Unbelievable> {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        match (self.reads.front(), index.and_then(|index| self.sends.get(index))) {
            (Some(&awaited), Some(request)) if awaited == number => Ok(request.local),
            _ => Err(Unbelievable("it answers a read that was not sent")),
        }
    }

    /// The bytes of the read `number` are in place.
    pub(super) fn on_read(&mut self, number: u64) {
        let awaited = self.reads.pop_front();
        assert_eq!(awaited, Some(number), "reads are done in order");
        self.read = number + 1;
        self.retire();
    }

    /// A request of the peer takes a receive; `false` if none is posted.
    pub(super) fn take_receive(&mut self, immediate: u32) -> bool {
        let Some(id) = self.receives.pop_front() else { return false };
        self.complete_receive(id, Status::SUCCESS, Some(immediate));
        true
    }

    /// How often to try again when the peer has no receive; `None` is for ever.
    pub(super) fn rnr_retries(&self) -> Option<u8> {
        let retries = self.setup.rnr_retries;
        (retries != Setup::RNR_FOREVER).then_some(retries)
    }

    /// Number of the oldest request that is not done.
    pub(super) fn oldest(&self) -> u64 {
        self.first
    }

    /// Whether a request that was sent is not done.
    pub(super) fn is_waiting(&self) -> bool {
        self.taken > 0
    }

    /// Completes what is done, in order.
    fn retire(&mut self) {
        while let Some(request) = self.sends.front() {
            let done = match request.operation {
                Operation::Read { .. } => self.read,
                Operation::Write { .. } | Operation::WriteWithImmediate { .. } => self.placed,
            };
            if self.first >= done {
                break;
            }
            let (id, signal) = (request.id, request.signal);
            self.sends.pop_front();
            self.first += 1;
            self.taken -= 1;
            match signal {
                Signal::Completion => self.complete_send(id, Status::SUCCESS),
                Signal::None => self.unsignalled += 1,
            }
        }
    }

    fn end(&mut self, link: Link, cause: Option<(u64, Status)>) {
        if self.link != Link::Up {
            return;
        }
        self.link = link;
        while let Some(request) = self.sends.pop_front() {
            let status = match cause {
                Some((number, status)) if number == self.first => status,
                _ => Status::FLUSHED,
            };
            self.first += 1;
            self.complete_send(request.id, status);
        }
        self.taken = 0;
        self.reads.clear();
        while let Some(id) = self.receives.pop_front() {
            self.complete_receive(id, Status::FLUSHED, None);
        }
    }
}

/// Makes an eventfd readable.
fn raise(event: &OwnedFd) {
    // It can only fail if the counter is full, and then it is readable.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes an eventfd unreadable.
pub(super) fn lower(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// Waits until `fd` is readable; `false` if `limit` passed or a signal came.
pub(super) fn wait_readable(fd: &OwnedFd, limit: Option<Duration>) -> Result<bool, VerbsError> {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    match rustix::event::poll(&mut fds, limit.map(timespec).as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(VerbsError::host("wait")(errno.into())),
    }
}

/// As a system call takes it; saturates.
pub(crate) fn timespec(limit: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    }
}
