//! A data channel: pages straight from guest memory into guest memory, and barriers.

use crate::funnel::{Funnel, FunnelError};
use crate::raw::{Outgoing, Room};
use crate::{Connection, Stream};
use martlet_ram::{
    BadRun, GuestRam, LostPage, PageBatch, PlaceError, Placer, RegionIndex, Run, RunKind, Target,
};
use martlet_units::{ByteCount, PAGE_SIZE};
use martlet_wire::pages::{
    self, PAGES_HEADER_BYTES, PagesError, PagesFrame, PagesHeader, RUNS_BYTES_MAX, RUNS_MAX,
    RunEntry,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The sending end of a channel. Allocates nothing after it was made.
#[derive(Debug)]
pub struct PageSender<C = Stream> {
    stream: C,
    entries: Vec<RunEntry>,
    room: Room,
}

impl PageSender {
    /// Sends a batch that is not empty, as one frame, straight from guest memory. A page that
    /// the guest changes meanwhile may arrive torn: it is dirty then, and comes again. Waits for
    /// room; `handed` is told of the bytes that the kernel takes as it takes them, which for a
    /// frame on a slow link is seconds before the end.
    ///
    /// # Errors
    /// A [`LostPage`] (see [`LostPage::of`]) if this host can't read a page of the batch, else what
    /// the connection said. Part of the frame may be sent: the channel is of no more use.
    pub fn send(
        &mut self,
        round: u32,
        batch: &PageBatch<'_>,
        handed: impl FnMut(ByteCount),
    ) -> io::Result<()> {
        let header = self.describe(round, batch);
        let pieces = list(&mut self.room, &header, &self.entries, batch);
        send_all(&self.stream, pieces, handed).map_err(|error| name_lost(error, batch))
    }

    /// Ends a round: whatever was sent before it is in place when the peer reads it.
    pub fn barrier(&mut self, round: u32) -> io::Result<ByteCount> {
        let header = PagesHeader::barrier(round);
        let mut pieces = self.room.outgoing();
        pieces.push_bytes(header.as_bytes());
        let mut bytes = ByteCount(0);
        send_all(&self.stream, pieces, |sent| bytes.0 += sent.0)?;
        Ok(bytes)
    }
}

impl<C: Connection> PageSender<C> {
    /// Takes a connection whose hello is done.
    pub fn new(stream: C) -> PageSender<C> {
        let room = Room::with_capacity(RUNS_MAX + 2);
        PageSender { stream, entries: Vec::with_capacity(RUNS_MAX), room }
    }

    /// As [`PageSender::send`], without waiting. Call it again with the same batch, and nothing
    /// between, until `frame` has all of it.
    pub fn try_send(
        &mut self,
        round: u32,
        batch: &PageBatch<'_>,
        frame: &mut Partly,
    ) -> io::Result<ByteCount> {
        let header = self.describe(round, batch);
        let pieces = list(&mut self.room, &header, &self.entries, batch);
        frame.send(&self.stream, pieces).map_err(|error| name_lost(error, batch))
    }

    /// As [`PageSender::barrier`], without waiting; see [`PageSender::try_send`].
    pub fn try_barrier(&mut self, round: u32, frame: &mut Partly) -> io::Result<ByteCount> {
        let header = PagesHeader::barrier(round);
        let mut pieces = self.room.outgoing();
        pieces.push_bytes(header.as_bytes());
        frame.send(&self.stream, pieces)
    }

    fn describe(&mut self, round: u32, batch: &PageBatch<'_>) -> PagesHeader {
        self.entries.clear();
        self.entries.extend(batch.runs().iter().map(|run| match run.kind {
            RunKind::Data => RunEntry::data(run.region.0, run.first_page, run.count),
            RunKind::Zero => RunEntry::zero(run.region.0, run.first_page, run.count),
        }));
        PagesHeader::pages(round, &self.entries)
    }
}

/// How far a frame has come that is sent without waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Partly {
    bytes: usize,
    is_all: bool,
}

impl Partly {
    /// Whether all of it was sent.
    pub fn is_all(&self) -> bool {
        self.is_all
    }

    fn send(
        &mut self,
        stream: &impl Connection,
        mut pieces: Outgoing<'_>,
    ) -> io::Result<ByteCount> {
        let before = self.bytes;
        pieces.skip(self.bytes);
        while !pieces.is_done() {
            match stream.send(&mut pieces) {
                Ok(sent) => self.bytes += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.is_all = pieces.is_done();
        Ok(ByteCount((self.bytes - before) as u64))
    }
}

fn list<'a>(
    room: &'a mut Room,
    header: &'a PagesHeader,
    entries: &'a [RunEntry],
    batch: &PageBatch<'a>,
) -> Outgoing<'a> {
    let mut pieces = room.outgoing();
    pieces.push_bytes(header.as_bytes());
    pieces.push_bytes(entries.as_bytes());
    for slice in batch.slices() {
        pieces.push(slice);
    }
    pieces
}

fn send_all(
    stream: &Stream,
    mut pieces: Outgoing<'_>,
    mut handed: impl FnMut(ByteCount),
) -> io::Result<()> {
    while !pieces.is_done() {
        match pieces.send(stream.as_fd()) {
            Ok(sent) => handed(ByteCount(sent as u64)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.wait_writable()?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the kernel met memory that it could not read or write (poison: `EHWPOISON`).
fn is_bad_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EHWPOISON))
}

/// Names the page that could not be read, if it was that.
fn name_lost(error: io::Error, batch: &PageBatch<'_>) -> io::Error {
    let lost = is_bad_memory(&error).then(|| first_lost(batch)).flatten();
    lost.map_or(error, io::Error::from)
}

fn first_lost(batch: &PageBatch<'_>) -> Option<LostPage> {
    let mut data = batch.runs().iter().filter(|run| run.kind == RunKind::Data);
    data.find_map(|Run { region, first_page, count, .. }| {
        batch.ram().first_lost(*region, *first_page, *count)
    })
}

/// Why a channel can't go on. `Lost` is this host's fault; all others but `Closed` and `Io` are the
/// peer's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagesReceiveError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(io::Error),
    /// Bytes that are no frame.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] PagesError),
    /// A run outside guest memory.
    #[error("the peer broke the protocol: {0}")]
    Run(#[from] BadRun),
    /// A page that this host can't write.
    #[error(transparent)]
    Lost(#[from] LostPage),
}

impl From<PlaceError> for PagesReceiveError {
    fn from(error: PlaceError) -> PagesReceiveError {
        match error {
            PlaceError::Run(run) => PagesReceiveError::Run(run),
            PlaceError::Lost(page) => PagesReceiveError::Lost(page),
        }
    }
}

/// What [`PageReceiver::advance`] met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Nothing is there now.
    Nothing,
    /// Some bytes were read, perhaps a whole frame.
    Bytes(ByteCount),
    /// All pages of the round on this channel are in place.
    Barrier {
        /// Which round.
        round: u32,
    },
}

/// Where in a frame the receiver is.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Header,
    Entries(PagesFrame),
    Payload,
    /// The channel ended or broke; it is not to be read again.
    Finished,
}

/// The receiving end of a channel: a frame may come in any number of pieces. Allocates nothing
/// after it was made.
#[derive(Debug)]
pub struct PageReceiver<C = Stream> {
    stream: C,
    stage: Stage,
    header: [u8; PAGES_HEADER_BYTES],
    entries: Box<[u8]>,
    /// Owns the memory that `payload` points into.
    placer: Arc<Placer>,
    /// Bytes of the header or of the entries that are there.
    filled: usize,
    payload: Payload,
}

/// Most runs in hand at once: what a socket holds is seldom more, and they are listed anew for each
/// call.
const RUNS_IN_HAND_MAX: usize = 128;

/// Where the rest of a frame's pages goes.
#[derive(Debug)]
struct Payload {
    /// Runs of the frame with content, in its order.
    runs: Vec<Piece>,
    /// First run that is not done, for memory, or not begun, for the file.
    next: usize,
    /// Bytes of it that are in place.
    done: usize,
    room: Room,
    /// A run in hand that is written to its region's file.
    file: Option<RegionIndex>,
    /// `None` for a connection from which the kernel moves nothing into files.
    funnel: Option<Funnel>,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    Memory { region: RegionIndex, first_page: u64, count: u32 },
    File { region: RegionIndex, offset: u64, bytes: u64 },
}

impl Payload {
    fn new(into_files: bool) -> io::Result<Payload> {
        Ok(Payload {
            runs: Vec::with_capacity(RUNS_MAX),
            next: 0,
            done: 0,
            room: Room::with_capacity(RUNS_IN_HAND_MAX),
            file: None,
            funnel: into_files.then(Funnel::new).transpose()?,
        })
    }

    fn begin(&mut self) {
        self.runs.clear();
        (self.next, self.done) = (0, 0);
    }

    fn is_done(&self) -> bool {
        self.next == self.runs.len() && self.file.is_none()
    }

    /// Reads what the socket has now.
    fn advance(
        &mut self,
        stream: &impl Connection,
        placer: &Placer,
    ) -> Result<usize, PagesReceiveError> {
        let ram = placer.ram();
        let (Some(funnel), Some(fd)) = (&mut self.funnel, stream.fd()) else {
            return self.fill_memory(stream, ram);
        };
        if self.file.is_none()
            && let Some(Piece::File { region, offset, bytes }) = self.runs.get(self.next)
        {
            funnel.begin(*offset, *bytes);
            self.file = Some(*region);
            self.next += 1;
        }
        let region = self.file.and_then(|at| Some((at, ram.region(at)?)));
        let Some((index, region, file)) =
            region.and_then(|(index, region)| Some((index, region, region.file()?)))
        else {
            return self.fill_memory(stream, ram);
        };
        let got = funnel.advance(fd, file.fd);
        if funnel.is_done() {
            self.file = None;
        }
        got.map_err(|error| match error {
            FunnelError::Socket(error) => PagesReceiveError::Io(error),
            FunnelError::File { offset } => ram.lost(index, region.page_of_file(offset)).into(),
        })
    }

    /// Fills the runs up to the next one for the file.
    fn fill_memory(
        &mut self,
        stream: &impl Connection,
        ram: &GuestRam,
    ) -> Result<usize, PagesReceiveError> {
        let mut pieces = self.room.incoming();
        let mut done = self.done;
        for piece in &self.runs[self.next..] {
            let Piece::Memory { region, first_page, count } = *piece else { break };
            if pieces.len() == RUNS_IN_HAND_MAX {
                break;
            }
            let mut memory = ram.slice(region, first_page, count)?;
            memory.advance(std::mem::take(&mut done));
            pieces.push(&memory);
        }
        let got = stream.receive(pieces).map_err(|error| {
            let lost = is_bad_memory(&error).then(|| self.first_lost(ram)).flatten();
            lost.map_or(PagesReceiveError::Io(error), PagesReceiveError::Lost)
        })?;
        self.done += got;
        while let Some(Piece::Memory { count, .. }) = self.runs.get(self.next)
            && let Some(more) = self.done.checked_sub(bytes_of(*count))
        {
            self.done = more;
            self.next += 1;
        }
        Ok(got)
    }
}

impl Payload {
    /// The first lost page of the runs that are to be filled.
    fn first_lost(&self, ram: &GuestRam) -> Option<LostPage> {
        self.runs.iter().skip(self.next).find_map(|piece| match *piece {
            Piece::Memory { region, first_page, count } => {
                ram.first_lost(region, first_page, count)
            }
            Piece::File { .. } => None,
        })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "of a run within a mapping")]
fn bytes_of(pages: u32) -> usize {
    (u64::from(pages) * PAGE_SIZE) as usize
}

impl<C: Connection> PageReceiver<C> {
    /// Takes a connection whose hello is done. Pages go where `placer` says.
    ///
    /// # Errors
    /// If the host gives no pipe.
    pub fn new(stream: C, placer: Arc<Placer>) -> io::Result<PageReceiver<C>> {
        let payload = Payload::new(stream.fd().is_some())?;
        Ok(PageReceiver {
            stream,
            placer,
            stage: Stage::Header,
            header: [0; PAGES_HEADER_BYTES],
            entries: vec![0; RUNS_BYTES_MAX].into_boxed_slice(),
            filled: 0,
            payload,
        })
    }

    /// Reads on, without waiting. Pages go straight into guest memory.
    pub fn advance(&mut self) -> Result<Arrival, PagesReceiveError> {
        match self.try_advance() {
            Err(PagesReceiveError::Io(error)) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Arrival::Nothing),
                io::ErrorKind::UnexpectedEof => Err(PagesReceiveError::Closed),
                _ => Err(PagesReceiveError::Io(error)),
            },
            other => other,
        }
    }

    /// Marks the channel as not to be read again.
    pub fn finish(&mut self) {
        self.stage = Stage::Finished;
    }

    /// Whether [`PageReceiver::finish`] was called.
    pub fn is_finished(&self) -> bool {
        matches!(self.stage, Stage::Finished)
    }

    fn try_advance(&mut self) -> Result<Arrival, PagesReceiveError> {
        match self.stage {
            Stage::Header => {
                let got = read_piece(&self.stream, &mut self.header, &mut self.filled)?;
                if self.filled == PAGES_HEADER_BYTES {
                    return self.on_header(got);
                }
                Ok(Arrival::Bytes(got))
            }
            Stage::Entries(frame) => {
                let entries = &mut self.entries[..frame.entry_bytes()];
                let got = read_piece(&self.stream, entries, &mut self.filled)?;
                if self.filled == frame.entry_bytes() {
                    self.on_entries(frame)?;
                }
                Ok(Arrival::Bytes(got))
            }
            Stage::Payload => {
                let got = self.payload.advance(&self.stream, &self.placer)?;
                if self.payload.is_done() {
                    self.stage = Stage::Header;
                }
                Ok(Arrival::Bytes(ByteCount(got as u64)))
            }
            Stage::Finished => Err(PagesReceiveError::Closed),
        }
    }

    fn on_header(&mut self, got: ByteCount) -> Result<Arrival, PagesReceiveError> {
        self.filled = 0;
        match PagesFrame::parse(&self.header)? {
            PagesFrame::Barrier { round } => Ok(Arrival::Barrier { round }),
            frame @ PagesFrame::Pages { .. } => {
                self.stage = Stage::Entries(frame);
                Ok(Arrival::Bytes(got))
            }
        }
    }

    /// Clears the frame's zero pages and aims its payload at its data pages.
    fn on_entries(&mut self, frame: PagesFrame) -> Result<(), PagesReceiveError> {
        self.filled = 0;
        self.payload.begin();
        let entries = &self.entries[..frame.entry_bytes()];
        let placer = &self.placer;
        let pages_of = |region| Some(placer.ram().region(RegionIndex(region))?.pages());
        for run in frame.parse_runs(entries, pages_of)?.iter() {
            let (region, first_page, count) = (RegionIndex(run.region), run.first_page, run.count);
            match run.kind {
                pages::RunKind::Data => {
                    let memory = Piece::Memory { region, first_page, count };
                    let takes_files = self.payload.funnel.is_some();
                    self.payload.runs.push(
                        match placer.data_target(region, first_page, count)? {
                            Target::File { region, offset, bytes } if takes_files => {
                                Piece::File { region, offset, bytes }
                            }
                            Target::File { .. } | Target::Memory(_) => memory,
                        },
                    );
                }
                pages::RunKind::Zero => {
                    placer.zero(region, first_page, count)?;
                }
            }
        }
        self.stage = if self.payload.is_done() { Stage::Header } else { Stage::Payload };
        Ok(())
    }
}

/// To wait for what comes.
impl AsFd for PageReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn read_piece(
    stream: &impl Connection,
    buffer: &mut [u8],
    filled: &mut usize,
) -> Result<ByteCount, PagesReceiveError> {
    let got = stream.read_now(&mut buffer[*filled..]).map_err(PagesReceiveError::Io)?;
    *filled += got;
    Ok(ByteCount(got as u64))
}

#[cfg(test)]
#[path = "data_tests.rs"]
mod tests;
