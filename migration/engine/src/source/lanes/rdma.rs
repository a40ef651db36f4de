//! A lane that writes by RDMA.
//!
//! One thread for all queue pairs: it posts lists and takes completions, which is little work,
//! while the devices move the bytes. Should RDMA fail, the lane becomes one of page frames on the
//! same connection, in the same round: first what is not known to have arrived, then what comes.

use super::pages::PageLane;
use super::{Common, Lane, Outgoing, Part, Sending, Step};
use crate::rdma::{RdmaSender, Sent};
use martlet_policy::Slot;
use martlet_ram::{Chunk, ChunkBits, PageBatch, Pushed, RamBitmap, Run, RunKind, Scanner};
use martlet_rdma::{Offered, PageSpan};
use martlet_transport::{Wake, monotonic_now};
use martlet_units::{ByteCount, PAGE_SIZE};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::{info, warn};

/// With nothing to do its thread looks this often whether that is so.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// While it waits for its turn under a limit, it looks this often whether that has changed.
const TURN_MAX: Duration = Duration::from_millis(20);

/// Steps of the driver with a last run before it looks at everything else.
const STEPS_MAX: usize = 64;

/// Pages of a bitmap's word.
const WORD_PAGES: u64 = 64;

pub(in crate::source) struct RdmaLane {
    sender: RdmaSender,
    dirty: Arc<RamBitmap>,
    /// Classified and not taken by the sender.
    runs: VecDeque<Run>,
    /// A round's end that waits for the runs before it.
    ending: Option<(u32, bool)>,
    /// A round's end that waits until all is in place.
    draining: Option<u32>,
    /// The round that is being sent.
    round: u32,
    ended: Option<u32>,
    /// Nothing is offered before its turn has come, for the pace.
    turn: Option<Slot>,
    /// RDMA ended. The lane's thread goes on over the connection: it may have to wait.
    fallen: Option<Fallen>,
    told_device: bool,
}

struct Fallen {
    reason: String,
    /// Rounds that have arrived.
    rounds: u32,
}

impl RdmaLane {
    /// `dirty` is what the scanner hands out from: keys are asked for ahead of it.
    pub(in crate::source) fn new(sender: RdmaSender, dirty: &Arc<RamBitmap>) -> RdmaLane {
        RdmaLane {
            sender,
            dirty: Arc::clone(dirty),
            runs: VecDeque::new(),
            ending: None,
            draining: None,
            round: 0,
            ended: None,
            turn: None,
            fallen: None,
            told_device: false,
        }
    }

    /// Brings RDMA further without waiting; whether there was anything to do.
    fn progress(&mut self, common: &Common) -> io::Result<bool> {
        let mut busy = self.sender.step().map_err(io::Error::other)?;
        if !self.told_device
            && let Some(device) = self.sender.device()
        {
            self.told_device = true;
            info!(%device, "guest memory goes by RDMA");
            common.shared.note_rdma(|rdma| rdma.device = Some(device));
        }
        while let Some(said) = self.sender.take() {
            busy = true;
            match said {
                Sent::Round { round } => self.on_round_done(round),
                Sent::FellBack { reason, rounds } => {
                    self.fallen = Some(Fallen { reason, rounds });
                    return Ok(true);
                }
            }
        }
        Ok(self.feed(common) | busy)
    }

    fn on_round_done(&mut self, round: u32) {
        self.draining = None;
        self.round = round + 1;
        self.ended = Some(round);
    }

    /// Hands runs to the sender, then the round's end. What was taken is posted at the next step.
    fn feed(&mut self, common: &Common) -> bool {
        if !self.sender.is_open() {
            return false;
        }
        let dirty = &self.dirty;
        self.sender.prefetch(|pages| is_any_dirty(dirty, pages));
        let mut busy = false;
        while let Some(run) = self.runs.front_mut() {
            if !is_turn(common, self.turn) {
                break;
            }
            let before = *run;
            let offered = self.sender.offer(run);
            let pages = u64::from(before.count - run.count);
            busy |= pages > 0;
            match before.kind {
                RunKind::Data => {
                    let bytes = ByteCount(pages * PAGE_SIZE);
                    common.sent.count(bytes, pages, 0);
                    self.turn = Some(common.pacer.reserve(monotonic_now(), bytes));
                }
                RunKind::Zero => common.sent.count(ByteCount(0), 0, pages),
            }
            match offered {
                Offered::All => self.runs.pop_front(),
                Offered::Full => break,
            };
        }
        if self.runs.is_empty()
            && let Some((round, last)) = self.ending.take()
        {
            self.sender.end_round(last);
            self.draining = Some(round);
            busy = true;
        }
        busy
    }

    fn queue(&mut self, batch: &mut PageBatch<'_>, chunk: Chunk, zero: &ChunkBits) {
        let mut rest = chunk;
        loop {
            let pushed = batch.push_chunk(&mut rest, zero);
            self.runs.extend(batch.runs());
            batch.clear();
            if pushed == Pushed::All {
                return;
            }
        }
    }

    /// Goes on over the connection: first what nobody knows to have arrived.
    fn fall_back(&mut self, out: &mut Outgoing<'_, '_>, fallen: Fallen) -> io::Result<PageLane> {
        let Fallen { reason, rounds } = fallen;
        warn!(%reason, "RDMA ended; the rest goes over the connection");
        // The destination may have all of a round although the last acknowledgements were lost.
        let arrived = self.draining.filter(|round| rounds > *round);
        let again = RamBitmap::new(&out.common.ram);
        if let Some(round) = arrived {
            self.on_round_done(round);
        } else {
            for pages in self.sender.unretired() {
                again.region(pages.region()).set_range(pages.first_page()..pages.end());
            }
        }
        for run in self.runs.drain(..) {
            let end = run.first_page + u64::from(run.count);
            again.region(run.region).set_range(run.first_page..end);
        }
        let resent = again.count();
        out.common.shared.note_rdma(|rdma| {
            rdma.fell_back = Some(reason);
            rdma.pages_again = resent;
        });
        let mut lane = PageLane::new(self.sender.finish()?, self.round);
        lane.ended = self.ended.take();
        let mut scanner = Scanner::new(Arc::new(again));
        // They were rearmed before they were taken, so what the guest writes meanwhile is dirty.
        while let Some(chunk) = scanner.next_last() {
            let zero = chunk.zero_pages(&out.common.ram, &out.common.zero_check);
            lane.add(out, chunk, &zero)?;
        }
        lane.flush(out)?;
        let ended = self.draining.take().or(self.ending.take().map(|(round, _)| round));
        if let Some(round) = ended {
            lane.end_round(out, round, false)?;
        }
        Ok(lane)
    }

    /// Whether something of a round is under way.
    fn is_sending(&self) -> bool {
        !self.runs.is_empty() || self.ending.is_some() || self.draining.is_some()
    }
}

impl Lane for RdmaLane {
    fn step(&mut self, out: &mut Outgoing<'_, '_>) -> io::Result<Step> {
        let busy = self.progress(out.common)?;
        match self.fallen.take() {
            Some(fallen) => Ok(Step::Becomes(Box::new(self.fall_back(out, fallen)?))),
            None => Ok(if busy { Step::Busy } else { Step::Idle }),
        }
    }

    fn has_room(&self) -> bool {
        self.sender.is_open() && self.ending.is_none() && self.runs.is_empty()
    }

    fn add(
        &mut self,
        out: &mut Outgoing<'_, '_>,
        chunk: Chunk,
        zero: &ChunkBits,
    ) -> io::Result<()> {
        self.queue(out.batch, chunk, zero);
        Ok(())
    }

    fn flush(&mut self, _: &mut Outgoing<'_, '_>) -> io::Result<()> {
        Ok(())
    }

    fn end_round(&mut self, _: &mut Outgoing<'_, '_>, round: u32, last: bool) -> io::Result<()> {
        self.ending = Some((round, last));
        Ok(())
    }

    fn take_ended(&mut self) -> Option<u32> {
        self.ended.take()
    }

    fn wait(&mut self, common: &Common, wake: &Wake) -> io::Result<()> {
        if common.unpaced.load(Ordering::Relaxed) && self.is_sending() {
            // The guest stands still.
            rustix::thread::sched_yield();
            return Ok(());
        }
        let is_paced = !self.runs.is_empty() && !is_turn(common, self.turn);
        self.sender.wait(wake, if is_paced { TURN_MAX } else { WAIT_MAX })
    }

    /// Done is it when all of the last pages are in place. Should RDMA end, they are the thread's.
    fn advance(
        &mut self,
        common: &Common,
        part: &mut Part<'_>,
        chunks: &mut dyn Iterator<Item = Chunk>,
        round: u32,
    ) -> io::Result<Sending> {
        if !part.is_begun {
            for chunk in chunks {
                let zero = chunk.zero_pages(&common.ram, &common.zero_check);
                self.queue(&mut part.batch, chunk, &zero);
            }
            self.ending = Some((round, true));
        }
        for _ in 0..STEPS_MAX {
            if self.ended.take().is_some() {
                return Ok(Sending::Done);
            }
            if self.fallen.is_some() {
                return Ok(Sending::Left);
            }
            if !self.progress(common)? {
                rustix::thread::sched_yield();
            }
        }
        Ok(Sending::Busy)
    }
}

/// Whether more may be offered now.
fn is_turn(common: &Common, turn: Option<Slot>) -> bool {
    common.unpaced.load(Ordering::Relaxed)
        || turn.is_none_or(|slot| common.pacer.wait(monotonic_now(), slot).is_zero())
}

fn is_any_dirty(dirty: &RamBitmap, pages: PageSpan) -> bool {
    let word = |page: u64| usize::try_from(page / WORD_PAGES).unwrap_or(usize::MAX);
    let next = dirty.region(pages.region()).next_nonzero_word(word(pages.first_page()));
    next.is_some_and(|next| next <= word(pages.end() - 1))
}
