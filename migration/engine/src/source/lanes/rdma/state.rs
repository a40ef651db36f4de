//! What an RDMA lane has in hand, and the steps that bring it further.

use super::super::Common;
use super::super::pages::{Lane as PageLane, Outgoing, Pace};
use martlet_policy::Slot;
use martlet_ram::{Chunk, ChunkBits, PageBatch, Pushed, RamBitmap, Run, RunKind, Scanner};
use martlet_transport::rdma::{Offered, PageSpan};
use martlet_transport::{RdmaSender, Sent, monotonic_now};
use martlet_units::{ByteCount, PAGE_SIZE};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::{info, warn};

/// Pages of a bitmap's word.
const WORD_PAGES: u64 = 64;

pub(super) enum Way {
    Rdma(Box<RdmaSender>),
    Pages(PageLane),
    /// Being changed, or lost.
    None,
}

pub(super) struct State {
    pub(super) way: Way,
    pub(super) dirty: Arc<RamBitmap>,
    /// Classified and not taken by the sender.
    pub(super) runs: VecDeque<Run>,
    /// A round's end that waits for the runs before it.
    pub(super) ending: Option<(u32, bool)>,
    /// A round's end that waits until all is in place.
    pub(super) draining: Option<u32>,
    /// The round that is being sent.
    pub(super) round: u32,
    /// Nothing is offered before its turn has come, for the pace.
    pub(super) turn: Option<Slot>,
    /// RDMA ended, for this reason and with so many rounds arrived; the rest is to go over the
    /// stream. The lane's thread does that: it may have to wait.
    pub(super) fallen: Option<(String, u32)>,
    pub(super) told_device: bool,
    pub(super) rounds_done: u32,
}

impl State {
    /// Takes the last chunks and the round's end, whoever sends them then.
    pub(super) fn take_last(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        chunks: &[Chunk],
        round: u32,
    ) {
        for chunk in chunks {
            let zero = chunk.zero_pages(&common.ram, &common.zero_check);
            self.queue_runs(batch, *chunk, &zero);
        }
        self.ending = Some((round, true));
    }

    /// Does what can be done now, without waiting; whether there was anything.
    pub(super) fn step(&mut self, common: &Common, pace: Pace) -> io::Result<bool> {
        let Way::Rdma(sender) = &mut self.way else { return Ok(false) };
        let mut busy = sender.step().map_err(io::Error::other)?;
        if !self.told_device
            && let Some(device) = sender.device()
        {
            self.told_device = true;
            info!(%device, "guest memory goes by RDMA");
            common.shared.note_rdma(|rdma| rdma.device = Some(device));
        }
        while let Way::Rdma(sender) = &mut self.way
            && let Some(said) = sender.take()
        {
            busy = true;
            match said {
                Sent::Round { round } => self.on_round_done(round),
                Sent::FellBack { reason, rounds } => {
                    self.fallen = Some((reason, rounds));
                    return Ok(true);
                }
            }
        }
        Ok(self.feed(common, pace) | busy)
    }

    pub(super) fn on_round_done(&mut self, round: u32) {
        self.draining = None;
        self.round = round + 1;
        self.rounds_done = round + 1;
    }

    /// Hands runs to the sender, then the round's end. What was taken is posted at the next step.
    pub(super) fn feed(&mut self, common: &Common, pace: Pace) -> bool {
        let Way::Rdma(sender) = &mut self.way else { return false };
        if !sender.is_open() {
            return false;
        }
        let dirty = &self.dirty;
        sender.prefetch(|pages| is_any_dirty(dirty, pages));
        let mut busy = false;
        while let Some(run) = self.runs.front_mut() {
            if pace == Pace::Limited && !is_turn(common, self.turn) {
                break;
            }
            let before = *run;
            let offered = sender.offer(run);
            let taken = before.count - run.count;
            busy |= taken > 0;
            count(common, before.kind, taken);
            if pace == Pace::Limited && before.kind == RunKind::Data {
                let bytes = ByteCount(u64::from(taken) * PAGE_SIZE);
                self.turn = Some(common.pacer.reserve(monotonic_now(), bytes));
            }
            match offered {
                Offered::All => self.runs.pop_front(),
                Offered::Full => break,
            };
        }
        if self.runs.is_empty()
            && let Some((round, last)) = self.ending.take()
        {
            sender.end_round(last);
            self.draining = Some(round);
            busy = true;
        }
        busy
    }

    /// Takes a chunk, by whichever way is open.
    pub(super) fn add(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        chunk: Chunk,
        zero: &ChunkBits,
        pace: Pace,
    ) -> io::Result<()> {
        if let Way::Pages(lane) = &mut self.way {
            return Outgoing { common, batch, pace }.add(lane, chunk, zero);
        }
        self.queue_runs(batch, chunk, zero);
        Ok(())
    }

    pub(super) fn queue_runs(&mut self, batch: &mut PageBatch<'_>, chunk: Chunk, zero: &ChunkBits) {
        let mut rest = chunk;
        while batch.push_chunk(&mut rest, zero) != Pushed::All {
            self.take_runs(batch);
        }
        self.take_runs(batch);
    }

    pub(super) fn take_runs(&mut self, batch: &mut PageBatch<'_>) {
        self.runs.extend(batch.runs());
        batch.clear();
    }

    pub(super) fn end_round(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        round: u32,
        last: bool,
    ) -> io::Result<()> {
        let Way::Pages(lane) = &mut self.way else {
            self.ending = Some((round, last));
            return Ok(());
        };
        let mut outgoing = Outgoing { common, batch, pace: Pace::Unlimited };
        outgoing.flush(lane)?;
        outgoing.barrier(lane, round)?;
        self.on_round_done(round);
        Ok(())
    }

    /// Goes on over the stream: first what nobody knows to have arrived.
    pub(super) fn fall_back(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        reason: String,
        rounds: u32,
        pace: Pace,
    ) -> io::Result<()> {
        let Way::Rdma(sender) = std::mem::replace(&mut self.way, Way::None) else { return Ok(()) };
        warn!(%reason, "RDMA ended; the rest goes over the connection");
        let again = RamBitmap::new(&common.ram);
        // The destination may have all of a round although the last acknowledgements were lost.
        let arrived = self.draining.filter(|round| rounds > *round);
        if arrived.is_none() {
            for pages in sender.unretired() {
                again.region(pages.region()).set_range(pages.first_page()..pages.end());
            }
        }
        for run in self.runs.drain(..) {
            let end = run.first_page + u64::from(run.count);
            again.region(run.region).set_range(run.first_page..end);
        }
        let resent = again.count();
        common.shared.note_rdma(|rdma| {
            rdma.fell_back = Some(reason);
            rdma.pages_again = resent;
        });
        let round = arrived.map_or(self.round, |round| round + 1);
        self.way = Way::Pages(PageLane::new(sender.into_stream(), round));
        let ended = self.draining.take().or(self.ending.take().map(|(round, _)| round));
        if let Some(round) = arrived {
            self.on_round_done(round);
            return Ok(());
        }
        let mut scanner = Scanner::new(Arc::new(again));
        // They were rearmed before they were taken, so what the guest writes meanwhile is dirty.
        while let Some(chunk) = scanner.next_last() {
            let zero = chunk.zero_pages(&common.ram, &common.zero_check);
            self.add(common, batch, chunk, &zero, pace)?;
        }
        if let Way::Pages(lane) = &mut self.way {
            Outgoing { common, batch, pace }.flush(lane)?;
        }
        match ended {
            Some(round) => self.end_round(common, batch, round, false),
            None => Ok(()),
        }
    }

    /// Sends what a driver left behind that had queued its last run for RDMA.
    pub(super) fn send_left(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
    ) -> io::Result<()> {
        if self.runs.is_empty() && self.ending.is_none() {
            return Ok(());
        }
        let Way::Pages(lane) = &mut self.way else { return Ok(()) };
        let again = RamBitmap::new(&common.ram);
        for run in self.runs.drain(..) {
            let end = run.first_page + u64::from(run.count);
            again.region(run.region).set_range(run.first_page..end);
        }
        let mut scanner = Scanner::new(Arc::new(again));
        let mut outgoing = Outgoing { common, batch, pace: Pace::Limited };
        while let Some(chunk) = scanner.next_last() {
            let zero = chunk.zero_pages(&common.ram, &common.zero_check);
            outgoing.add(lane, chunk, &zero)?;
        }
        match self.ending.take() {
            Some((round, last)) => self.end_round(common, batch, round, last),
            None => Ok(()),
        }
    }

    pub(super) fn flush(&mut self, common: &Common, batch: &mut PageBatch<'_>) -> io::Result<()> {
        match &mut self.way {
            Way::Pages(lane) => Outgoing { common, batch, pace: Pace::Limited }.flush(lane),
            Way::Rdma(_) | Way::None => Ok(()),
        }
    }

    /// Whether another chunk can be taken from the queue.
    pub(super) fn has_room(&self) -> bool {
        match &self.way {
            Way::Rdma(sender) => sender.is_open() && self.ending.is_none() && self.runs.is_empty(),
            Way::Pages(_) => true,
            Way::None => false,
        }
    }
}

/// Whether more may be offered now.
pub(super) fn is_turn(common: &Common, turn: Option<Slot>) -> bool {
    common.unpaced.load(Ordering::Relaxed)
        || turn.is_none_or(|slot| common.pacer.wait(monotonic_now(), slot).is_zero())
}

fn count(common: &Common, kind: RunKind, pages: u32) {
    let pages = u64::from(pages);
    match kind {
        RunKind::Data => {
            common.sent.bytes.fetch_add(pages * PAGE_SIZE, Ordering::Relaxed);
            common.sent.normal.fetch_add(pages, Ordering::Relaxed);
        }
        RunKind::Zero => {
            common.sent.zero.fetch_add(pages, Ordering::Relaxed);
        }
    }
}

fn is_any_dirty(dirty: &RamBitmap, pages: PageSpan) -> bool {
    let word = |page: u64| usize::try_from(page / WORD_PAGES).unwrap_or(usize::MAX);
    let next = dirty.region(pages.region()).next_nonzero_word(word(pages.first_page()));
    next.is_some_and(|next| next <= word(pages.end() - 1))
}
