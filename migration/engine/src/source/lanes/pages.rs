//! A lane that sends pages over its connection.

use super::{Common, Lane, Outgoing, Part, Sending, Step};
use martlet_ram::{Chunk, ChunkBits, Pushed};
use martlet_transport::{PageSender, Partly, Stream, Wake, wait_any};
use martlet_units::ByteCount;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::time::Duration;

/// With nothing to do its thread looks this often whether that is so.
const WAIT_MAX: Duration = Duration::from_secs(1);

pub(in crate::source) struct PageLane {
    sender: PageSender,
    /// The round that is being sent.
    round: u32,
    pub(super) ended: Option<u32>,
}

/// How far a lane's part of a last run is.
#[derive(Default)]
pub(super) struct Stage {
    /// Chunks of this lane that were taken.
    taken: usize,
    /// What of the newest of them is not in a batch yet.
    rest: Option<(Chunk, ChunkBits)>,
    step: LastStep,
    /// How far the frame is that is being sent.
    frame: Partly,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LastStep {
    #[default]
    Fill,
    Pages,
    Barrier,
}

impl PageLane {
    /// Goes on with a round over a connection that is ready for page frames.
    pub(in crate::source) fn new(stream: Stream, round: u32) -> PageLane {
        PageLane { sender: PageSender::new(stream), round, ended: None }
    }
}

impl Lane for PageLane {
    fn step(&mut self, _: &mut Outgoing<'_, '_>) -> io::Result<Step> {
        Ok(Step::Idle)
    }

    fn has_room(&self) -> bool {
        true
    }

    fn add(
        &mut self,
        out: &mut Outgoing<'_, '_>,
        chunk: Chunk,
        zero: &ChunkBits,
    ) -> io::Result<()> {
        let mut rest = chunk;
        while out.batch.push_chunk(&mut rest, zero) != Pushed::All {
            self.flush(out)?;
        }
        Ok(())
    }

    fn flush(&mut self, out: &mut Outgoing<'_, '_>) -> io::Result<()> {
        let Outgoing { common, batch } = out;
        if batch.is_empty() {
            return Ok(());
        }
        common.await_turn(batch.payload());
        self.sender.send(self.round, batch, |bytes| common.sent.count(bytes, 0, 0))?;
        common.sent.count(ByteCount(0), batch.data_pages(), batch.zero_pages());
        batch.clear();
        Ok(())
    }

    fn end_round(&mut self, out: &mut Outgoing<'_, '_>, round: u32, _: bool) -> io::Result<()> {
        self.flush(out)?;
        let bytes = self.sender.barrier(round)?;
        out.common.sent.count(bytes, 0, 0);
        self.round = round + 1;
        self.ended = Some(round);
        Ok(())
    }

    fn take_ended(&mut self) -> Option<u32> {
        self.ended.take()
    }

    fn wait(&mut self, _: &Common, wake: &Wake) -> io::Result<()> {
        wait_any(&mut [PollFd::new(wake, PollFlags::IN)], WAIT_MAX).map(drop)
    }

    fn advance(
        &mut self,
        common: &Common,
        part: &mut Part<'_>,
        chunks: &mut dyn Iterator<Item = Chunk>,
        round: u32,
    ) -> io::Result<Sending> {
        // Those that were taken before.
        let mut chunks = chunks.skip(part.stage.taken);
        loop {
            match part.stage.step {
                LastStep::Fill => {
                    fill(part, common, &mut chunks);
                    let is_all = part.batch.is_empty();
                    part.stage.frame = Partly::default();
                    part.stage.step = if is_all { LastStep::Barrier } else { LastStep::Pages };
                }
                LastStep::Pages => {
                    let Part { batch, stage, .. } = part;
                    let bytes = self.sender.try_send(self.round, batch, &mut stage.frame)?;
                    common.sent.count(bytes, 0, 0);
                    if !stage.frame.is_all() {
                        return Ok(Sending::Blocked);
                    }
                    common.sent.count(ByteCount(0), batch.data_pages(), batch.zero_pages());
                    batch.clear();
                    stage.step = LastStep::Fill;
                }
                LastStep::Barrier => {
                    let bytes = self.sender.try_barrier(round, &mut part.stage.frame)?;
                    common.sent.count(bytes, 0, 0);
                    if !part.stage.frame.is_all() {
                        return Ok(Sending::Blocked);
                    }
                    self.round = round + 1;
                    return Ok(Sending::Done);
                }
            }
        }
    }
}

/// Fills the part's batch with what comes next.
fn fill(part: &mut Part<'_>, common: &Common, chunks: &mut impl Iterator<Item = Chunk>) {
    let Part { batch, stage, .. } = part;
    loop {
        if let Some((chunk, zero)) = &mut stage.rest
            && batch.push_chunk(chunk, zero) != Pushed::All
        {
            return;
        }
        stage.rest = chunks.next().map(|chunk| {
            stage.taken += 1;
            (chunk, chunk.zero_pages(&common.ram, &common.zero_check))
        });
        if stage.rest.is_none() {
            return;
        }
    }
}
