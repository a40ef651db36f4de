//! The queue of a lane: a few chunks, and a place for the end of their round.

use super::super::events::Event;
use super::super::shared::Shared;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use martlet_ram::Chunk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Chunks that may wait for one lane. Few, so that a page is read soon after it was rearmed: what
/// the guest writes in between would only be sent again.
const CHUNKS_MAX: usize = 8;

/// A lane tells that it has room when no more than these wait: waking the driver for each chunk
/// would cost more than the chunk's place is worth.
const CHUNKS_LOW: usize = CHUNKS_MAX / 2;

/// What a lane does next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Chunk(Chunk),
    /// All of a round was handed out.
    Barrier {
        round: u32,
        last: bool,
    },
}

/// The driver's end.
pub(super) struct Queue {
    work: Sender<Work>,
    /// The driver has a chunk that there was no room for.
    is_awaited: Arc<AtomicBool>,
}

/// The lane's end.
pub(super) struct Inbox {
    work: Receiver<Work>,
    is_awaited: Arc<AtomicBool>,
}

/// An empty queue.
pub(super) fn queue() -> (Queue, Inbox) {
    let (sender, receiver) = crossbeam_channel::bounded(CHUNKS_MAX + 1);
    let is_awaited = Arc::new(AtomicBool::new(false));
    let queue = Queue { work: sender, is_awaited: Arc::clone(&is_awaited) };
    (queue, Inbox { work: receiver, is_awaited })
}

impl Queue {
    /// Hands a chunk over, or gives it back if the lane has enough to do: [`Event::LaneRoom`] says
    /// when it has room again.
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        if self.is_full() {
            // Relaxed: the fence orders it before the second look. Its partner is in `try_take`:
            // either the lane sees that it is awaited, or this side sees what the lane took.
            self.is_awaited.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.is_full() {
                return Err(chunk);
            }
        }
        match self.work.try_send(Work::Chunk(chunk)) {
            Ok(()) => Ok(()),
            // A lane whose thread ended has posted why; the driver will come to that.
            Err(
                TrySendError::Full(Work::Chunk(chunk))
                | TrySendError::Disconnected(Work::Chunk(chunk)),
            ) => Err(chunk),
            Err(_) => unreachable!("a chunk was offered"),
        }
    }

    /// Ends a round. Once for each, and only when the one before has ended.
    pub(super) fn barrier(&self, round: u32, last: bool) {
        match self.work.try_send(Work::Barrier { round, last }) {
            // A lane whose thread ended has posted why.
            Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            Err(TrySendError::Full(_)) => unreachable!("a round ends once"),
        }
    }

    fn is_full(&self) -> bool {
        self.work.len() >= CHUNKS_MAX
    }
}

impl Inbox {
    /// The next work if there is any.
    pub(super) fn try_take(&self, shared: &Shared) -> Option<Work> {
        let work = self.work.try_recv().ok()?;
        // See `offer`.
        fence(Ordering::SeqCst);
        if self.is_awaited.load(Ordering::Relaxed) && self.work.len() <= CHUNKS_LOW {
            self.is_awaited.store(false, Ordering::Relaxed);
            shared.events.post(Event::LaneRoom);
        }
        Some(work)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_ram::{GuestRam, RamBitmap, Scanner};
    use martlet_units::{Gfn, Instant, PageCount, PageRange};
    use std::time::Duration;

    fn chunk() -> Chunk {
        let range = PageRange::try_new(Gfn(0), PageCount(16)).unwrap();
        let ram = GuestRam::create(&[range]).unwrap();
        let dirty = Arc::new(RamBitmap::new(&ram));
        dirty.region(martlet_ram::RegionIndex(0)).set_range(0..1);
        Scanner::new(dirty).next_last().unwrap()
    }

    #[test]
    fn a_lane_that_was_full_tells_once_when_half_of_it_is_done() {
        let shared = Shared::new(Instant(0), PageCount(16), Duration::from_millis(300)).unwrap();
        let (queue, inbox) = queue();
        let told = || std::iter::from_fn(|| shared.events.take()).count();
        for _ in 0..CHUNKS_MAX {
            queue.offer(chunk()).unwrap();
        }
        inbox.try_take(&shared).unwrap();
        assert_eq!(told(), 0, "nobody waits for it");
        queue.offer(chunk()).unwrap();
        queue.offer(chunk()).unwrap_err();
        queue.barrier(0, false);
        while inbox.try_take(&shared).is_some() {}
        assert_eq!(told(), 1);
    }

    #[test]
    fn a_driver_that_waits_for_room_is_always_told() {
        const CHUNKS: usize = 20_000;
        let shared = Shared::new(Instant(0), PageCount(16), Duration::from_millis(300)).unwrap();
        let (queue, inbox) = queue();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..CHUNKS {
                    while inbox.try_take(&shared).is_none() {
                        std::thread::yield_now();
                    }
                }
            });
            let chunk = chunk();
            for _ in 0..CHUNKS {
                while queue.offer(chunk).is_err() {
                    // For ever, were it not told.
                    while shared.events.take().is_none() {
                        std::thread::yield_now();
                    }
                }
            }
        });
    }
}
