//! Channels that bring page frames, and the threads that empty them.
//!
//! While the guest runs at the source, each channel has a thread that waits for frames. Near the
//! blackout the attempt's own thread takes all channels over and looks at them in turn, awake: the
//! last pages are few, and a thread that has to be woken costs more than they do. Should they turn
//! out to be many, the threads get their channels back.

use super::events::Event;
use super::intake::Look;
use crate::host;
use crate::mailbox::Mailbox;
use martlet_ram::Placer;
use martlet_transport::{Arrival, PageReceiver, Stream, Wake, wait_any};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A waiting thread looks this often whether it should stop.
const WAIT_INTERVAL: Duration = Duration::from_secs(1);

/// What all channels share.
struct Common {
    events: Arc<Mailbox<Event>>,
    /// Raised while the channels' threads must leave their channels alone.
    taken_over: Mutex<bool>,
    given_back: Condvar,
    /// Wakes the threads out of `poll` when the above changes.
    wake: Wake,
    stop: AtomicBool,
    bytes: AtomicU64,
}

struct Channel {
    receiver: Mutex<PageReceiver>,
    breaker: Stream,
    number: u16,
}

/// All channels of an attempt. Dropping it breaks them and ends their threads.
pub(super) struct PageIntake {
    common: Arc<Common>,
    channels: Vec<Arc<Channel>>,
    threads: Vec<JoinHandle<()>>,
}

impl PageIntake {
    pub(super) fn start(
        streams: Vec<Stream>,
        placer: &Arc<Placer>,
        events: &Arc<Mailbox<Event>>,
    ) -> io::Result<PageIntake> {
        let common = Arc::new(Common {
            events: Arc::clone(events),
            taken_over: Mutex::new(false),
            given_back: Condvar::new(),
            wake: Wake::new()?,
            stop: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
        });
        let mut intake = PageIntake { common, channels: Vec::new(), threads: Vec::new() };
        for (number, stream) in (0..).zip(streams) {
            let breaker = stream.try_clone()?;
            let receiver = Mutex::new(PageReceiver::new(stream, Arc::clone(placer))?);
            let channel = Arc::new(Channel { receiver, breaker, number });
            intake.channels.push(Arc::clone(&channel));
            let common = Arc::clone(&intake.common);
            let thread = host::spawn("martlet-recv", move || run(&channel, &common))?;
            intake.threads.push(thread);
        }
        Ok(intake)
    }

    /// Takes all channels from their threads. Returns when none of them reads any more.
    pub(super) fn take_over(&self) {
        *self.taken_over() = true;
        self.common.wake.raise();
        for channel in &self.channels {
            drop(lock(&channel.receiver));
        }
    }

    /// Gives the channels back to their threads.
    pub(super) fn give_back(&self) {
        self.common.wake.lower();
        *self.taken_over() = false;
        self.common.given_back.notify_all();
    }

    /// Reads what is there on every channel. Only between `take_over` and `give_back`.
    pub(super) fn look(&self) -> Look {
        let mut seen = Look::Idle;
        for channel in &self.channels {
            if let Some(mut receiver) = channel.receiver.try_lock().ok()
                && !receiver.is_finished()
            {
                let before = self.common.bytes.load(Ordering::Relaxed);
                let result = drain(channel, &mut receiver, &self.common);
                finish_on_error(channel, &mut receiver, &self.common, result);
                if self.common.bytes.load(Ordering::Relaxed) != before {
                    seen = Look::Busy;
                }
            }
        }
        seen
    }

    /// Reads nothing more, whoever would: returns when nobody does.
    pub(super) fn close(&self) {
        self.channels.iter().for_each(|channel| lock(&channel.receiver).finish());
    }

    /// Bytes received on all channels.
    pub(super) fn bytes(&self) -> u64 {
        self.common.bytes.load(Ordering::Relaxed)
    }

    fn taken_over(&self) -> MutexGuard<'_, bool> {
        lock(&self.common.taken_over)
    }
}

impl Drop for PageIntake {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        for channel in &self.channels {
            channel.breaker.shutdown();
        }
        self.common.wake.raise();
        *self.taken_over() = false;
        self.common.given_back.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A channel's thread.
fn run(channel: &Channel, common: &Common) {
    while !common.stop.load(Ordering::Relaxed) {
        let mut taken_over = lock(&common.taken_over);
        while *taken_over && !common.stop.load(Ordering::Relaxed) {
            taken_over = common.given_back.wait(taken_over).unwrap_or_else(PoisonError::into_inner);
        }
        // Taking the receiver before letting go of the flag: `take_over` then waits for us.
        let mut receiver = lock(&channel.receiver);
        drop(taken_over);
        if !receiver.is_finished() {
            let result = drain(channel, &mut receiver, common);
            finish_on_error(channel, &mut receiver, common, result);
        }
        if receiver.is_finished() {
            return;
        }
        drop(receiver);
        let mut fds = [
            PollFd::new(&channel.breaker, PollFlags::IN),
            PollFd::new(&common.wake, PollFlags::IN),
        ];
        if wait_any(&mut fds, WAIT_INTERVAL).is_err() {
            return;
        }
    }
}

/// Reads frames until nothing more is there.
fn drain(
    channel: &Channel,
    receiver: &mut PageReceiver,
    common: &Common,
) -> Result<(), martlet_transport::PagesReceiveError> {
    loop {
        match receiver.advance()? {
            Arrival::Nothing => return Ok(()),
            Arrival::Bytes(bytes) => {
                common.bytes.fetch_add(bytes.0, Ordering::Relaxed);
            }
            Arrival::Barrier { round } => {
                common.bytes.fetch_add(1, Ordering::Relaxed);
                common.events.post(Event::BarrierPassed { channel: channel.number, round });
            }
        }
    }
}

fn finish_on_error(
    channel: &Channel,
    receiver: &mut PageReceiver,
    common: &Common,
    result: Result<(), martlet_transport::PagesReceiveError>,
) {
    if let Err(error) = result {
        receiver.finish();
        if !common.stop.load(Ordering::Relaxed) {
            let reason = format!("data channel {}: {error}", channel.number);
            common.events.post(Event::ChannelLost { channel: channel.number, reason });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "intake_tests.rs"]
mod tests;
