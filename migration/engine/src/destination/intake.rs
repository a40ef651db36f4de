//! What brings an attempt's pages: the receiving ends of its channels, and the threads that empty
//! them.
//!
//! While the guest runs at the source, each channel has a thread that waits for what comes. Near
//! the blackout the attempt's own thread takes all of them over and looks at them in turn, awake:
//! the last pages are few, and a thread that has to be woken costs more than they do. Should they
//! turn out to be many, the threads get their channels back. By RDMA there is one channel: the
//! devices place the pages, and whoever drives it answers the source and counts its markers.

use super::events::Event;
use crate::handover::Handover;
use crate::host;
use crate::mailbox::Mailbox;
use crate::rdma::{RdmaAccept, RdmaReceiver, Unreceived};
use martlet_core::destination::{self, Look, RoundCount};
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{Arrival, PageReceiver, Stream, Wake, wait_any};
use martlet_units::ByteCount;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A waiting thread looks this often whether there is nothing. Nobody may have to wait for that.
pub(super) const WAIT_INTERVAL: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

/// Bytes that are taken from a channel before whoever takes them looks up: some frames.
const BYTES_AT_ONCE: u64 = 4 << 20;
/// Reads for them. A peer that sends crumbs does not get more.
const READS_AT_ONCE: usize = 512;

/// The receiving end of a channel.
trait Receiver: Send {
    /// Does what can be done now, without waiting.
    fn advance(&mut self) -> Result<Arrival, Unreceived>;

    /// Waits until `wake` is raised, something is to be done, or `limit` passes; may return early.
    fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()>;

    /// Takes nothing more. When this returns, nothing of the channel reaches guest memory.
    fn finish(&mut self);

    /// Whether nothing more comes.
    fn is_finished(&self) -> bool;
}

impl Receiver for PageReceiver {
    fn advance(&mut self) -> Result<Arrival, Unreceived> {
        Ok(PageReceiver::advance(self)?)
    }

    fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()> {
        let mut fds = [PollFd::new(self, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        wait_any(&mut fds, limit).map(drop)
    }

    fn finish(&mut self) {
        PageReceiver::finish(self);
    }

    fn is_finished(&self) -> bool {
        PageReceiver::is_finished(self)
    }
}

impl Receiver for RdmaReceiver {
    fn advance(&mut self) -> Result<Arrival, Unreceived> {
        RdmaReceiver::advance(self)
    }

    fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()> {
        RdmaReceiver::wait(self, wake, limit)
    }

    fn finish(&mut self) {
        RdmaReceiver::finish(self);
    }

    fn is_finished(&self) -> bool {
        RdmaReceiver::is_finished(self)
    }
}

/// What all channels share.
struct Common {
    events: Arc<Mailbox<Event>>,
    stop: AtomicBool,
    bytes: AtomicU64,
    rounds: RoundCount,
}

/// A channel, for whoever has it in hand.
struct Channel {
    receiver: Box<dyn Receiver>,
    /// The round whose barrier comes next.
    next_round: u32,
    /// What to call it.
    name: String,
}

impl Channel {
    /// Takes what is there, but not without end. A channel that broke is told of and finished.
    fn look(&mut self, common: &Common) -> Look {
        match self.drain(common) {
            Ok(look) => look,
            Err(why) => {
                self.receiver.finish();
                self.lose(common, why);
                Look::Busy
            }
        }
    }

    fn drain(&mut self, common: &Common) -> Result<Look, Unreceived> {
        if self.receiver.is_finished() {
            return Ok(Look::Idle);
        }
        let (mut taken, mut look) = (0, Look::Idle);
        for _ in 0..READS_AT_ONCE {
            let arrival = self.receiver.advance()?;
            if arrival != Arrival::Nothing {
                look = Look::Busy;
            }
            match arrival {
                // A step of RDMA that met no page frame may have been long.
                Arrival::Nothing | Arrival::Bytes(ByteCount(0)) => break,
                Arrival::Bytes(bytes) => {
                    common.bytes.fetch_add(bytes.0, Ordering::Relaxed);
                    taken += bytes.0;
                }
                Arrival::Barrier { round } => {
                    // It shows that the channel moves.
                    common.bytes.fetch_add(1, Ordering::Relaxed);
                    self.pass(common, round)?;
                }
            }
            if taken >= BYTES_AT_ONCE || self.receiver.is_finished() {
                break;
            }
        }
        Ok(look)
    }

    fn pass(&mut self, common: &Common, round: u32) -> Result<(), Unreceived> {
        let broke = |why| Unreceived::Ended(format!("the peer broke the protocol: {why}"));
        let is_in = common.rounds.pass(self.next_round, round).map_err(broke)?;
        self.next_round = round.saturating_add(1);
        if is_in {
            common.events.post(Event::RoundReceived { round });
        }
        Ok(())
    }

    fn lose(&self, common: &Common, why: Unreceived) {
        if common.stop.load(Ordering::Relaxed) {
            return;
        }
        common.events.post(match why {
            Unreceived::Lost(page) => Event::page_lost(page),
            Unreceived::Ended(reason) => {
                let last_barrier = self.next_round.checked_sub(1);
                Event::channel_lost(last_barrier, format!("{}: {reason}", self.name))
            }
        });
    }
}

/// All channels of an attempt. Dropping it breaks them and ends their threads.
pub(super) struct Intake {
    common: Arc<Common>,
    channels: Vec<Arc<Handover<Channel>>>,
    breakers: Vec<Stream>,
    threads: Vec<JoinHandle<()>>,
}

impl Intake {
    /// Guest memory comes over connections.
    pub(super) fn start(
        streams: Vec<Stream>,
        placer: &Arc<Placer>,
        events: &Arc<Mailbox<Event>>,
    ) -> io::Result<Intake> {
        let mut intake = Intake::new(streams.len(), events);
        for (number, stream) in streams.into_iter().enumerate() {
            let breaker = stream.try_clone()?;
            let receiver = Box::new(PageReceiver::new(stream, Arc::clone(placer))?);
            intake.add(receiver, format!("data channel {number}"), breaker)?;
        }
        Ok(intake)
    }

    /// Guest memory comes by RDMA; `stream` is the connection beside it. The error is one line.
    pub(super) fn start_rdma(
        stream: Stream,
        ram: &Arc<GuestRam>,
        accept: &RdmaAccept,
        token: [u8; 16],
        events: &Arc<Mailbox<Event>>,
    ) -> Result<Intake, String> {
        let mut intake = Intake::new(1, events);
        let breaker = stream.try_clone().map_err(|error| error.to_string())?;
        let placer = Arc::new(Placer::new(Arc::clone(ram)));
        let receiver = Box::new(RdmaReceiver::new(stream, ram, placer, accept, token)?);
        let added = intake.add(receiver, "RDMA".to_owned(), breaker);
        added.map_err(|error| error.to_string())?;
        Ok(intake)
    }

    fn new(channels: usize, events: &Arc<Mailbox<Event>>) -> Intake {
        let common = Arc::new(Common {
            events: Arc::clone(events),
            stop: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            rounds: RoundCount::new(channels),
        });
        Intake { common, channels: Vec::new(), breakers: Vec::new(), threads: Vec::new() }
    }

    fn add(
        &mut self,
        receiver: Box<dyn Receiver>,
        name: String,
        breaker: Stream,
    ) -> io::Result<()> {
        let channel = Arc::new(Handover::new(Channel { receiver, next_round: 0, name })?);
        self.channels.push(Arc::clone(&channel));
        self.breakers.push(breaker);
        let common = Arc::clone(&self.common);
        self.threads.push(host::spawn("martlet-recv", move || run(&channel, &common))?);
        Ok(())
    }
}

impl destination::Intake for Intake {
    fn take_over(&mut self) {
        self.channels.iter().for_each(|channel| channel.take_over());
        self.channels.iter().for_each(|channel| drop(channel.take()));
    }

    fn give_back(&mut self) {
        self.channels.iter().for_each(|channel| channel.give_back());
    }

    fn look(&mut self) -> Look {
        let mut seen = Look::Idle;
        for channel in &self.channels {
            if let Some(mut channel) = channel.try_get()
                && channel.look(&self.common) == Look::Busy
            {
                seen = Look::Busy;
            }
        }
        seen
    }

    fn tell_round(&mut self, round: u32) {
        self.common.rounds.tell(round);
    }

    fn bytes(&self) -> u64 {
        self.common.bytes.load(Ordering::Relaxed)
    }

    fn close(&mut self) {
        self.channels.iter().for_each(|channel| channel.take().receiver.finish());
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        self.breakers.iter().for_each(Stream::shutdown);
        self.channels.iter().for_each(|channel| channel.end());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A channel's thread: ends with the channel, or when it is told to.
fn run(handover: &Handover<Channel>, common: &Common) {
    let serve = || {
        while let Some(mut channel) = handover.turn() {
            let look = channel.look(common);
            if channel.receiver.is_finished() {
                return;
            }
            if look == Look::Idle
                && let Err(error) = channel.receiver.wait(handover.wake(), WAIT_INTERVAL)
            {
                let reason = format!("cannot wait for it: {error}");
                return channel.lose(common, Unreceived::Ended(reason));
            }
        }
    };
    if let Err(panic) = host::guarded(serve) {
        handover.take().lose(common, Unreceived::Ended(panic));
    }
}

#[cfg(test)]
#[path = "intake_tests.rs"]
mod tests;
