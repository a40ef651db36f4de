//! Guest memory that comes by RDMA.
//!
//! The devices place the pages; a thread answers the source, registers memory and counts markers.
//! Near the blackout the attempt's own thread does that, awake.

use super::events::Event;
use super::intake::Look;
use crate::host;
use crate::mailbox::Mailbox;
use martlet_core::destination::RoundCount;
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{RdmaAccept, RdmaReceiver, Received, Stream, Wake};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::warn;

/// A waiting thread looks this often whether it should stop. Nobody may have to wait for that.
pub(super) const WAIT_INTERVAL: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

struct Common {
    events: Arc<Mailbox<Event>>,
    /// Raised while the thread must leave the receiver alone.
    taken_over: Mutex<bool>,
    given_back: Condvar,
    /// Wakes the thread out of its wait when the above changes.
    wake: Wake,
    stop: AtomicBool,
    bytes: AtomicU64,
    rounds: RoundCount,
    /// The round that comes next.
    next_round: AtomicU32,
    receiver: Mutex<RdmaReceiver>,
    breaker: Stream,
}

/// The RDMA of an attempt. Dropping it closes the queue pairs and ends the thread.
pub(super) struct RdmaIntake {
    common: Arc<Common>,
    thread: Option<JoinHandle<()>>,
}

impl RdmaIntake {
    pub(super) fn start(
        stream: Stream,
        ram: &Arc<GuestRam>,
        accept: &RdmaAccept,
        token: [u8; 16],
        events: &Arc<Mailbox<Event>>,
    ) -> Result<RdmaIntake, String> {
        let breaker = stream.try_clone().map_err(|error| error.to_string())?;
        let placer = Arc::new(Placer::new(Arc::clone(ram)));
        let receiver = RdmaReceiver::new(stream, ram, placer, accept, token)?;
        let common = Arc::new(Common {
            events: Arc::clone(events),
            taken_over: Mutex::new(false),
            given_back: Condvar::new(),
            wake: Wake::new().map_err(|error| error.to_string())?,
            stop: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            rounds: RoundCount::new(1),
            next_round: AtomicU32::new(0),
            receiver: Mutex::new(receiver),
            breaker,
        });
        let body = Arc::clone(&common);
        let thread = host::spawn("martlet-rdma", move || {
            if let Err(panic) = host::guarded(|| run(&body)) {
                lose(&body, &panic);
            }
        });
        let thread = Some(thread.map_err(|error| error.to_string())?);
        Ok(RdmaIntake { common, thread })
    }

    pub(super) fn take_over(&self) {
        *lock(&self.common.taken_over) = true;
        self.common.wake.raise();
        drop(lock(&self.common.receiver));
    }

    pub(super) fn tell_round(&self, round: u32) {
        self.common.rounds.tell(round);
    }

    pub(super) fn give_back(&self) {
        self.common.wake.lower();
        *lock(&self.common.taken_over) = false;
        self.common.given_back.notify_all();
    }

    pub(super) fn look(&self) -> Look {
        let Ok(mut receiver) = self.common.receiver.try_lock() else { return Look::Idle };
        if step(&self.common, &mut receiver) { Look::Busy } else { Look::Idle }
    }

    pub(super) fn close(&self) {
        // The thread may be waiting with the receiver in hand.
        self.take_over();
        lock(&self.common.receiver).close();
    }

    pub(super) fn bytes(&self) -> u64 {
        self.common.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for RdmaIntake {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        self.common.breaker.shutdown();
        self.common.wake.raise();
        *lock(&self.common.taken_over) = false;
        self.common.given_back.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Does what there is to do; whether there was anything.
fn step(common: &Common, receiver: &mut RdmaReceiver) -> bool {
    let mut stepped = receiver.step();
    while let Some(said) = receiver.take() {
        match said {
            Received::Round { round } => {
                let next = common.next_round.load(Ordering::Relaxed);
                match common.rounds.pass(next, round) {
                    Ok(_) => {
                        common.next_round.store(next + 1, Ordering::Relaxed);
                        common.events.post(Event::RoundReceived { round });
                    }
                    Err(why) => stepped = Err(format!("the peer broke the protocol: {why}")),
                }
            }
            Received::FellBack { reason } => {
                warn!(%reason, "RDMA ended; the rest comes over the connection");
            }
        }
    }
    common.bytes.store(receiver.bytes(), Ordering::Relaxed);
    match stepped {
        Ok(busy) => busy,
        Err(reason) => {
            lose(common, &reason);
            true
        }
    }
}

fn lose(common: &Common, why: &str) {
    // Once: nothing behind it is of interest, and the thread ends.
    if !common.stop.swap(true, Ordering::Relaxed) {
        let last_barrier = common.next_round.load(Ordering::Relaxed).checked_sub(1);
        let reason = format!("RDMA: {why}");
        common.events.post(Event::channel_lost(last_barrier, reason));
    }
}

fn run(common: &Common) {
    while !common.stop.load(Ordering::Relaxed) {
        let mut taken_over = lock(&common.taken_over);
        while *taken_over && !common.stop.load(Ordering::Relaxed) {
            taken_over = common.given_back.wait(taken_over).unwrap_or_else(PoisonError::into_inner);
        }
        // Taking the receiver before letting go of the flag: `take_over` then waits for us.
        let mut receiver = lock(&common.receiver);
        drop(taken_over);
        let busy = step(common, &mut receiver);
        if receiver.is_finished() {
            return;
        }
        if !busy && receiver.wait(&common.breaker, &common.wake, WAIT_INTERVAL).is_err() {
            return;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
