//! The source's lanes: what its threads do in a process, step by step. Pages go by the sender that
//! ships, straight from guest memory, in as many pieces as there is room for.

use crate::net::{End, FromWire, Net, Side, WireId};
use martlet_core::source::{Event as SourceEvent, Lanes, Sending, Sent};
use martlet_core::{Error, Fault};
use martlet_ram::{Chunk, ChunkBits, GuestRam, PageBatch, Pushed, ZeroCheck};
use martlet_transport::{PageSender, Partly};
use martlet_units::ByteCount;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// Chunks that may wait for one lane.
const QUEUE_CHUNKS: usize = 8;

#[derive(Clone, Copy, Debug)]
enum Work {
    Chunk(Chunk),
    Barrier(u32),
}

/// What is being sent, and how far it has come.
struct Current {
    work: Work,
    zero: ChunkBits,
    frame: Partly,
}

struct Lane<E: FromWire> {
    /// `None` once it was broken.
    sender: Option<PageSender<End<E>>>,
    wire: WireId,
    queue: VecDeque<Work>,
    current: Option<Current>,
    round: u32,
    /// A chunk was given back for want of room.
    owes_room: bool,
    /// Chunks of the last run that were taken, and whether its barrier was.
    last: (usize, bool),
}

/// All lanes of an attempt.
pub(crate) struct PageLanes<E: FromWire> {
    net: Rc<Net<E>>,
    ram: Arc<GuestRam>,
    zero_check: ZeroCheck,
    lanes: Vec<Lane<E>>,
    sent: Sent,
}

impl<E: FromWire> PageLanes<E> {
    pub(crate) fn new(net: &Rc<Net<E>>, ram: Arc<GuestRam>, ends: Vec<End<E>>) -> PageLanes<E> {
        let lane = |end: End<E>| Lane {
            wire: end.wire(),
            sender: Some(PageSender::new(end)),
            queue: VecDeque::new(),
            current: None,
            round: 0,
            owes_room: false,
            last: (0, false),
        };
        let (net, lanes) = (Rc::clone(net), ends.into_iter().map(lane).collect());
        PageLanes { net, ram, zero_check: ZeroCheck::detect(), lanes, sent: Sent::default() }
    }

    pub(crate) fn sent(&self) -> Sent {
        self.sent
    }

    /// The lane of a wire.
    pub(crate) fn find(&self, wire: WireId) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.wire == wire)
    }

    /// Whether a lane has something to do by itself.
    pub(crate) fn has_work(&self, lane: usize) -> bool {
        self.lanes.get(lane).is_some_and(|it| it.current.is_some() || !it.queue.is_empty())
    }

    /// The longest queue.
    pub(crate) fn queued(&self) -> usize {
        self.lanes.iter().map(|lane| lane.queue.len()).max().unwrap_or(0)
    }

    /// What a lane's thread does in one go: sends one piece of its work, as far as there is room.
    /// What the attempt is to be told, and whether there is more to do at once.
    pub(crate) fn pump(&mut self, index: usize) -> (Vec<SourceEvent>, bool) {
        let mut told = Vec::new();
        let Some(lane) = self.lanes.get_mut(index) else { return (told, false) };
        if lane.current.is_none() {
            let Some(work) = lane.queue.pop_front() else { return (told, false) };
            if std::mem::take(&mut lane.owes_room) {
                told.push(SourceEvent::LaneRoom);
            }
            let zero = match &work {
                Work::Chunk(chunk) => chunk.zero_pages(&self.ram, &self.zero_check),
                Work::Barrier(_) => ChunkBits::EMPTY,
            };
            lane.current = Some(Current { work, zero, frame: Partly::default() });
        }
        match self.send_current(index) {
            Ok(None) => (told, false),
            Ok(Some(Work::Barrier(round))) => {
                told.push(SourceEvent::BarrierSent { round });
                (told, true)
            }
            Ok(Some(Work::Chunk(_))) => (told, true),
            Err(error) => {
                self.lanes[index].current = None;
                self.lanes[index].queue.clear();
                if self.lanes[index].sender.take().is_some() {
                    told.push(SourceEvent::LaneLost(broken(&error)));
                }
                (told, false)
            }
        }
    }

    /// What is done, if it is.
    fn send_current(&mut self, index: usize) -> io::Result<Option<Work>> {
        let lane = &mut self.lanes[index];
        let Some(current) = &mut lane.current else { return Ok(None) };
        let Some(sender) = &mut lane.sender else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        match current.work {
            Work::Chunk(chunk) => {
                let mut batch = PageBatch::new(&self.ram);
                let mut rest = chunk;
                let pushed = batch.push_chunk(&mut rest, &current.zero);
                assert_eq!(pushed, Pushed::All, "a chunk of few pages");
                let bytes = sender.try_send(lane.round, &batch, &mut current.frame)?;
                self.sent.bytes += bytes.0;
                if !current.frame.is_all() {
                    return Ok(None);
                }
                self.sent.normal += batch.data_pages();
                self.sent.zero += batch.zero_pages();
            }
            Work::Barrier(round) => {
                let bytes = sender.try_barrier(round, &mut current.frame)?;
                self.sent.bytes += bytes.0;
                if !current.frame.is_all() {
                    return Ok(None);
                }
                lane.round = round + 1;
            }
        }
        Ok(lane.current.take().map(|current| current.work))
    }

    fn advance_last(&mut self, index: usize, chunks: &[Chunk], round: u32) -> io::Result<bool> {
        let channels = u16::try_from(self.lanes.len()).expect("few");
        loop {
            if self.lanes[index].current.is_some() && self.send_current(index)?.is_none() {
                return Ok(false);
            }
            let (taken, has_barrier) = self.lanes[index].last;
            let mine = |chunk: &&Chunk| usize::from(chunk.channel(channels)) == index;
            let (work, last) = match chunks.iter().filter(mine).nth(taken) {
                Some(chunk) => (Work::Chunk(*chunk), (taken + 1, false)),
                None if has_barrier => return Ok(true),
                None => (Work::Barrier(round), (taken, true)),
            };
            let zero = match &work {
                Work::Chunk(chunk) => chunk.zero_pages(&self.ram, &self.zero_check),
                Work::Barrier(_) => ChunkBits::EMPTY,
            };
            let lane = &mut self.lanes[index];
            (lane.last, lane.current) =
                (last, Some(Current { work, zero, frame: Partly::default() }));
        }
    }
}

fn broken(error: &io::Error) -> Error {
    Error::new(Fault::Peer, "", format!("a data channel broke: {error}"))
}

impl<E: FromWire> Lanes for PageLanes<E> {
    fn count(&self) -> usize {
        self.lanes.len()
    }

    fn offer(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        let channels = u16::try_from(self.lanes.len()).expect("few");
        let lane = &mut self.lanes[usize::from(chunk.channel(channels))];
        if lane.queue.len() >= QUEUE_CHUNKS || lane.sender.is_none() {
            lane.owes_room = true;
            return Err(chunk);
        }
        lane.queue.push_back(Work::Chunk(chunk));
        self.net.put_after_about(2, E::room(lane.wire, Side::Source));
        Ok(())
    }

    fn barrier(&mut self, round: u32, _: bool) {
        for lane in &mut self.lanes {
            lane.queue.push_back(Work::Barrier(round));
            self.net.put_after_about(2, E::room(lane.wire, Side::Source));
        }
    }

    fn set_unpaced(&mut self, _: bool) {}

    fn unacknowledged(&self) -> ByteCount {
        let unread = |lane: &Lane<E>| self.net.unread(lane.wire, Side::Source);
        ByteCount(self.lanes.iter().map(unread).sum())
    }

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn begin_last(&mut self) {
        for lane in &mut self.lanes {
            lane.last = (0, false);
        }
    }

    fn send_last(&mut self, chunks: &[Chunk], round: u32) -> Result<Sending, Error> {
        let mut sending = Sending::Done;
        for index in 0..self.lanes.len() {
            if !self.advance_last(index, chunks, round).map_err(|error| broken(&error))? {
                sending = Sending::Blocked;
            }
        }
        Ok(sending)
    }

    fn outlive_last(&self) -> bool {
        true
    }

    fn break_all(&mut self) {
        for lane in &mut self.lanes {
            lane.sender = None;
        }
    }
}
