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
use martlet_core::destination::RoundCount;
use martlet_ram::{LostPage, Placer};
use martlet_transport::{Arrival, PageReceiver, PagesReceiveError, Stream, Wake, wait_any};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A waiting thread looks this often whether it should stop.
const WAIT_INTERVAL: Duration = Duration::from_secs(1);

/// Bytes that are taken from a channel before whoever takes them looks up: some frames.
const BYTES_AT_ONCE: u64 = 4 << 20;
/// Reads for them. A peer that sends crumbs does not get more.
const READS_AT_ONCE: usize = 512;

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
    rounds: RoundCount,
}

/// A channel as it is read.
struct Reading {
    receiver: PageReceiver,
    /// The round whose barrier comes next.
    next_round: u32,
}

/// Whether a channel has more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    Nothing,
    Perhaps,
}

struct Channel {
    reading: Mutex<Reading>,
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
            rounds: RoundCount::new(streams.len()),
        });
        let mut intake = PageIntake { common, channels: Vec::new(), threads: Vec::new() };
        for (number, stream) in (0..).zip(streams) {
            let breaker = stream.try_clone()?;
            let receiver = PageReceiver::new(stream, Arc::clone(placer))?;
            let reading = Mutex::new(Reading { receiver, next_round: 0 });
            let channel = Arc::new(Channel { reading, breaker, number });
            intake.channels.push(Arc::clone(&channel));
            let common = Arc::clone(&intake.common);
            let thread = host::spawn("martlet-recv", move || {
                if let Err(panic) = host::guarded(|| run(&channel, &common)) {
                    lose(&channel, &common, None, &panic);
                }
            })?;
            intake.threads.push(thread);
        }
        Ok(intake)
    }

    /// Takes all channels from their threads. Returns when none of them reads any more.
    pub(super) fn take_over(&self) {
        *self.taken_over() = true;
        self.common.wake.raise();
        for channel in &self.channels {
            drop(lock(&channel.reading));
        }
    }

    pub(super) fn tell_round(&self, round: u32) {
        self.common.rounds.tell(round);
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
            if let Some(mut reading) = channel.reading.try_lock().ok()
                && !reading.receiver.is_finished()
            {
                let before = self.common.bytes.load(Ordering::Relaxed);
                drain_or_finish(channel, &mut reading, &self.common);
                if self.common.bytes.load(Ordering::Relaxed) != before {
                    seen = Look::Busy;
                }
            }
        }
        seen
    }

    /// Reads nothing more, whoever would: returns when nobody does.
    pub(super) fn close(&self) {
        self.channels.iter().for_each(|channel| lock(&channel.reading).receiver.finish());
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
        // Taking the channel before letting go of the flag: `take_over` then waits for us.
        let mut reading = lock(&channel.reading);
        drop(taken_over);
        let rest = drain_or_finish(channel, &mut reading, common);
        if reading.receiver.is_finished() {
            return;
        }
        drop(reading);
        if rest == Rest::Perhaps {
            continue;
        }
        let mut fds = [
            PollFd::new(&channel.breaker, PollFlags::IN),
            PollFd::new(&common.wake, PollFlags::IN),
        ];
        if let Err(error) = wait_any(&mut fds, WAIT_INTERVAL) {
            return lose(channel, common, None, &format!("cannot wait for it: {error}"));
        }
    }
}

/// Reads what is there, but not without end. A channel that broke is told of and finished.
fn drain_or_finish(channel: &Channel, reading: &mut Reading, common: &Common) -> Rest {
    if reading.receiver.is_finished() {
        return Rest::Nothing;
    }
    match drain(reading, common) {
        Ok(rest) => rest,
        Err(why) => {
            reading.receiver.finish();
            let last_barrier = reading.next_round.checked_sub(1);
            match why {
                Why::Lost(page) => tell(common, Event::page_lost(page)),
                Why::Ended(reason) => lose(channel, common, last_barrier, &reason),
            }
            Rest::Nothing
        }
    }
}

/// Why a channel can't be read any more.
enum Why {
    /// This host can't write a page.
    Lost(LostPage),
    /// In one line.
    Ended(String),
}

impl From<PagesReceiveError> for Why {
    fn from(error: PagesReceiveError) -> Why {
        match error {
            PagesReceiveError::Lost(page) => Why::Lost(page),
            error => Why::Ended(error.to_string()),
        }
    }
}

fn drain(reading: &mut Reading, common: &Common) -> Result<Rest, Why> {
    let mut taken = 0;
    for _ in 0..READS_AT_ONCE {
        match reading.receiver.advance()? {
            Arrival::Nothing => return Ok(Rest::Nothing),
            Arrival::Bytes(bytes) => {
                common.bytes.fetch_add(bytes.0, Ordering::Relaxed);
                taken += bytes.0;
            }
            Arrival::Barrier { round } => {
                common.bytes.fetch_add(1, Ordering::Relaxed);
                let is_in = common.rounds.pass(reading.next_round, round);
                let is_in = is_in
                    .map_err(|why| Why::Ended(format!("the peer broke the protocol: {why}")))?;
                reading.next_round = round.saturating_add(1);
                if is_in {
                    common.events.post(Event::RoundReceived { round });
                }
            }
        }
        if taken >= BYTES_AT_ONCE {
            break;
        }
    }
    Ok(Rest::Perhaps)
}

fn lose(channel: &Channel, common: &Common, last_barrier: Option<u32>, why: &str) {
    let reason = format!("data channel {}: {why}", channel.number);
    tell(common, Event::channel_lost(last_barrier, reason));
}

fn tell(common: &Common, event: Event) {
    if !common.stop.load(Ordering::Relaxed) {
        common.events.post(event);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "intake_tests.rs"]
mod tests;
