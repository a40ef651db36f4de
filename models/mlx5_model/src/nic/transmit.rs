//! Frames on their way from transmit queues to receive queues.

use super::Nic;
use super::frame::{self, Gathered, Placed, Scratch};
use super::queue::{Queue, QueueState, Work, direction_of};
use super::ring::{Direction, RingError};
use super::view::Reach;
use crate::stats;
use std::sync::atomic::Ordering;

/// Frames of one queue before the next one has its turn.
const BUDGET: u32 = 64;

/// What ended a turn of a transmit queue.
#[derive(Clone, Copy)]
enum End {
    /// No frame is left.
    Empty,
    /// More frames, but it is others' turn.
    Budget,
    /// There is no room for them at the moment.
    Blocked,
    /// The queue itself is broken.
    Broken(RingError),
}

/// Frames that passed in one turn.
#[derive(Default)]
struct Passed {
    sent: u64,
    dropped: u64,
    /// Vectors that the guests want fired; they are, when no lock is held.
    sender: Option<u16>,
    receiver: Option<u16>,
}

impl Nic {
    /// Looks at every queue that has something to be looked at; whether a frame passed. Does
    /// nothing if another thread is at it.
    pub(crate) fn step(&self) -> bool {
        let Ok(mut scratch) = self.scratch.try_lock() else { return false };
        let mut worked = false;
        self.pending.take(|index| {
            if !self.is_gone() {
                worked |= match direction_of(index) {
                    Direction::Transmit => self.transmit(index, &mut scratch),
                    Direction::Receive => false,
                };
            }
        });
        worked
    }

    /// Looks at the queues whose guest was asked not to kick; whether a frame passed.
    pub(crate) fn look_at_hot(&self) -> bool {
        let Ok(mut scratch) = self.scratch.try_lock() else { return false };
        let mut worked = false;
        self.hot.look(|index| {
            if !self.is_gone() {
                worked |= self.transmit(index, &mut scratch);
            }
        });
        worked
    }

    fn transmit(&self, index: u16, scratch: &mut Scratch) -> bool {
        let Some(tx) = self.queue(index) else {
            self.hot.clear(index);
            return false;
        };
        // First blocked, then looked: who makes room afterwards finds it here.
        self.blocked.set(index);
        let Some(rx) = self.receiver(index / 2).filter(|_| self.is_up()) else {
            // Frames stay in the ring.
            self.hot.clear(index);
            return false;
        };
        self.reach(|reach| self.run(&tx, &rx, reach, scratch))
    }

    fn run(&self, tx: &Queue, rx: &Queue, reach: Reach<'_>, scratch: &mut Scratch) -> bool {
        let mut tx_work = tx.lock();
        if tx_work.state != QueueState::Ready {
            self.blocked.clear(tx.index);
            self.hot.clear(tx.index);
            return false;
        }
        let mut rx_work = rx.lock();
        let mut passed = Passed::default();
        let mut end =
            self.move_frames(&mut tx_work, (rx, &mut rx_work), reach, &mut passed, scratch);
        // Buffers are given to the receiver before the sender gets its own back: the frame is its
        // then.
        self.finish(rx, &mut rx_work, reach, &mut passed.receiver);
        if passed.sent > 0 {
            self.ask_for_no_kicks(rx, &mut rx_work, reach);
        }
        drop(rx_work);
        self.finish(tx, &mut tx_work, reach, &mut passed.sender);
        if tx_work.state == QueueState::Error {
            end = End::Empty;
        }
        self.settle(tx, &mut tx_work, reach, end, passed.sent > 0);
        drop(tx_work);
        self.count(&passed);
        self.interrupt(passed.sender);
        self.interrupt(passed.receiver);
        passed.sent + passed.dropped > 0
    }

    fn move_frames(
        &self,
        tx: &mut Work,
        (rx_queue, rx): (&Queue, &mut Work),
        reach: Reach<'_>,
        passed: &mut Passed,
        scratch: &mut Scratch,
    ) -> End {
        for _ in 0..BUDGET {
            match tx.ring.waiting(reach) {
                Ok(0) => return End::Empty,
                Ok(_) => {}
                Err(error) => return End::Broken(error),
            }
            if rx.state != QueueState::Ready {
                return End::Blocked;
            }
            let head = match frame::gather(tx, reach, scratch) {
                Ok(Gathered::Frame { head }) => head,
                Ok(Gathered::Rubbish { head }) => {
                    tx.counts.invalid_buffers += 1;
                    take(tx, head, passed);
                    continue;
                }
                Err(error) => return End::Broken(error),
            };
            match self.place(rx, reach, scratch) {
                Ok(Placed::Done) => {
                    tx.ring.use_chain(head, 0);
                    tx.counts.received_descriptors += 1;
                    passed.sent += 1;
                }
                Ok(Placed::TooSmall) => {
                    rx.counts.invalid_buffers += 1;
                    take(tx, head, passed);
                }
                Ok(Placed::NoBuffers) => return End::Blocked,
                Err(error) => {
                    // Frames before this one have come.
                    self.finish(rx_queue, rx, reach, &mut passed.receiver);
                    self.fail(rx_queue, rx, error);
                    return End::Blocked;
                }
            }
            if tx.ring.is_full_of_used() || rx.ring.is_full_of_used() {
                self.finish(rx_queue, rx, reach, &mut passed.receiver);
                if let Err(error) = tx.publish(reach, &mut passed.sender) {
                    return End::Broken(error);
                }
            }
        }
        End::Budget
    }

    /// Places a frame; when buffers are missing, asks the guest to kick for new ones and looks once
    /// more.
    fn place(
        &self,
        rx: &mut Work,
        reach: Reach<'_>,
        scratch: &mut Scratch,
    ) -> Result<Placed, RingError> {
        let placed = frame::place(rx, reach, scratch)?;
        if placed != Placed::NoBuffers {
            return Ok(placed);
        }
        rx.ring.set_quiet(reach, false)?;
        rx.ring.look(reach)?;
        frame::place(rx, reach, scratch)
    }

    /// A receive queue that has buffers needs no kick for more.
    fn ask_for_no_kicks(&self, rx: &Queue, work: &mut Work, reach: Reach<'_>) {
        if self.suppress_kicks
            && work.state == QueueState::Ready
            && work.ring.has_waiting()
            && let Err(error) = work.ring.set_quiet(reach, true)
        {
            self.fail(rx, work, error);
        }
    }

    /// Publishes what a queue has used; if the guest wants to be interrupted, the vector is noted.
    fn finish(&self, queue: &Queue, work: &mut Work, reach: Reach<'_>, fire: &mut Option<u16>) {
        if work.state != QueueState::Ready {
            // What it wrote before it broke is dirty all the same.
            let _ = work.ring.view.flush_log(reach);
        } else if let Err(error) = work.publish(reach, fire) {
            self.fail(queue, work, error);
        }
    }

    /// Decides when a transmit queue is looked at again.
    fn settle(&self, tx: &Queue, work: &mut Work, reach: Reach<'_>, end: End, worked: bool) {
        let settled = match end {
            End::Blocked => {
                // It is in `blocked` already, and may have been taken out since: then it is
                // pending.
                self.hot.clear(tx.index);
                Ok(())
            }
            End::Budget => {
                self.blocked.clear(tx.index);
                self.pending.set(tx.index);
                Ok(())
            }
            End::Empty => {
                self.blocked.clear(tx.index);
                self.idle(tx, work, reach, worked)
            }
            End::Broken(error) => Err(error),
        };
        if let Err(error) = settled {
            self.blocked.clear(tx.index);
            self.fail(tx, work, error);
        }
        if work.state != QueueState::Ready {
            self.hot.clear(tx.index);
        }
    }

    /// An empty queue is looked at some more times without kicks, then its guest has to kick.
    fn idle(
        &self,
        tx: &Queue,
        work: &mut Work,
        reach: Reach<'_>,
        worked: bool,
    ) -> Result<(), RingError> {
        if work.state != QueueState::Ready {
            return Ok(());
        }
        let limit =
            if self.suppress_kicks { self.vain_looks_max.load(Ordering::Relaxed) } else { 0 };
        work.idle_looks = if worked { 0 } else { work.idle_looks.saturating_add(1) };
        if limit > 0 && (worked || (self.hot.has(tx.index) && work.idle_looks <= limit)) {
            work.ring.set_quiet(reach, true)?;
            self.hot.set(tx.index);
            return Ok(());
        }
        self.hot.clear(tx.index);
        if work.ring.may_be_quiet() {
            work.ring.set_quiet(reach, false)?;
            if work.ring.look(reach)? > 0 {
                self.pending.set(tx.index);
            }
        }
        Ok(())
    }

    fn count(&self, passed: &Passed) {
        if passed.dropped > 0 {
            stats::add(&self.counters.dropped, passed.dropped);
        }
        if passed.sent > 0 {
            stats::add(&self.counters.sent, passed.sent);
            stats::add(&self.counters.received, passed.sent);
            self.counters.served(self.clock.now());
        }
    }

    fn interrupt(&self, vector: Option<u16>) {
        if let Some(vector) = vector {
            self.vectors.fire(vector, &self.counters.interrupts);
        }
    }
}

/// Takes something that goes nowhere.
fn take(tx: &mut Work, head: u16, passed: &mut Passed) {
    tx.ring.use_chain(head, 0);
    tx.counts.received_descriptors += 1;
    passed.dropped += 1;
}

impl Work {
    /// Publishes what was used; if the guest wants to be interrupted, the vector is noted.
    fn publish(&mut self, reach: Reach<'_>, fire: &mut Option<u16>) -> Result<(), RingError> {
        let before = self.ring.published();
        if self.ring.publish(reach)? {
            *fire = self.vector;
        }
        let published = self.ring.published().wrapping_sub(before);
        self.counts.completed_descriptors += u64::from(published);
        Ok(())
    }
}
