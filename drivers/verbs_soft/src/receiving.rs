//! What comes from the peer: its requests, which are placed into registered memory straight from
//! the socket, and its answers to ours. All of it is foreign.
#![allow(unsafe_code)]
// UNSAFETY: fills registered memory, which is raw memory, and is the one to know that it still is
// registered.

use super::End;
use crate::frame::{HEADER_BYTES, Header, RECORD_BYTES, RECORDS_MAX, Record, Verb};
use crate::pieces::Pieces;
use crate::queues::{Shared, Unbelievable};
use crate::regions::{Regions, Table};
use crate::sending::{Answer, Sending};
use martlet_verbs::{Access, Lkey, Status};
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes read ahead of what they belong to: a frame's head, and a small write with it.
const INBOX_BYTES: usize = 16 << 10;

/// Bytes to take from the socket before the other direction gets its turn.
const TURN_BYTES: usize = 512 << 10;

/// The receiving half of a connection.
pub(super) struct Receiving {
    inbox: Box<[u8]>,
    /// What of the inbox is not used yet.
    start: usize,
    end: usize,
    stage: Stage,
    /// The peer's next request.
    expected: u64,
    /// After an RNR: all requests until that one comes again are dropped.
    skipping: bool,
    /// The requests of the current frame.
    records: Vec<Record>,
    /// The first of `records` that is not done, and the end of those being placed with it.
    next: usize,
    span_end: usize,
    /// Bytes of the span that are in place.
    span_placed: u64,
    pieces: Pieces,
    generation: u64,
}

#[derive(Clone, Copy)]
enum Stage {
    Header,
    Records {
        count: usize,
    },
    /// Pieces are made for the next requests.
    Plan,
    /// The pieces are being filled.
    Place,
    /// A read's bytes are being placed.
    Data {
        request: u64,
        key: u32,
        address: u64,
        bytes: u32,
    },
    /// Bytes that nobody wants.
    Skip {
        bytes: u64,
    },
}

/// Whether to go on.
enum Step {
    Again,
    /// The inbox has too few bytes.
    NeedMore,
}

/// The connection, as the steps see it.
pub(super) struct Surroundings<'a> {
    pub(super) socket: BorrowedFd<'a>,
    pub(super) shared: &'a Shared,
    pub(super) regions: &'a Regions,
    pub(super) sending: &'a mut Sending,
}

impl Receiving {
    pub(super) fn new() -> Receiving {
        Receiving {
            inbox: vec![0; INBOX_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            stage: Stage::Header,
            expected: 0,
            skipping: false,
            records: Vec::with_capacity(RECORDS_MAX),
            next: 0,
            span_end: 0,
            span_placed: 0,
            pieces: Pieces::with_capacity(RECORDS_MAX),
            generation: 0,
        }
    }

    /// Takes what the socket has, up to a turn's worth; tells whether there may be more.
    pub(super) fn advance(&mut self, around: &mut Surroundings<'_>) -> Result<bool, End> {
        let mut bytes = 0;
        while bytes < TURN_BYTES {
            match self.step(around)? {
                Step::Again => {}
                Step::NeedMore => match self.receive(around)? {
                    0 => return Ok(false),
                    got => bytes += got,
                },
            }
        }
        Ok(true)
    }

    fn step(&mut self, around: &mut Surroundings<'_>) -> Result<Step, End> {
        match self.stage {
            Stage::Header => match self.inbox[self.start..self.end].first_chunk() {
                None => Ok(Step::NeedMore),
                Some(bytes) => {
                    let header = Header::parse(bytes).map_err(End::Protocol)?;
                    self.start += HEADER_BYTES;
                    self.on_header(header, around)
                }
            },
            Stage::Records { count } => self.on_records(count),
            Stage::Plan => self.plan(around),
            Stage::Place => self.place(around),
            Stage::Data { request, .. } => {
                if !self.fill(around)? {
                    return Ok(Step::NeedMore);
                }
                let mut queues = around.shared.lock();
                queues.on_read(request);
                around.shared.tell(queues);
                self.stage = Stage::Header;
                Ok(Step::Again)
            }
            Stage::Skip { bytes } => {
                let here = (self.end - self.start) as u64;
                let skip = here.min(bytes);
                self.start += usize::try_from(skip).unwrap_or(usize::MAX);
                let rest = bytes - skip;
                self.stage = if rest == 0 { Stage::Header } else { Stage::Skip { bytes: rest } };
                Ok(if rest == 0 { Step::Again } else { Step::NeedMore })
            }
        }
    }

    fn on_header(&mut self, header: Header, around: &mut Surroundings<'_>) -> Result<Step, End> {
        match header {
            Header::Requests { first, count, again } => {
                if again && self.skipping && first == self.expected {
                    self.skipping = false;
                }
                if !self.skipping && first != self.expected {
                    return Err(End::Protocol("a request is missing"));
                }
                self.stage = Stage::Records { count };
            }
            Header::Ack { placed } => {
                let mut queues = around.shared.lock();
                queues.on_placed(placed)?;
                let overrun = queues.is_overrun();
                around.shared.tell(queues);
                if overrun {
                    return Err(End::Overrun);
                }
            }
            Header::Nak { request, status } => {
                let mut queues = around.shared.lock();
                queues.on_placed(request)?;
                around.shared.tell(queues);
                return Err(End::Failed { request, status });
            }
            Header::Rnr { request } => {
                let mut queues = around.shared.lock();
                queues.on_placed(request)?;
                around.sending.on_not_ready(&mut queues, request)?;
                around.shared.tell(queues);
            }
            Header::Data { request } => self.on_data(request, around)?,
            Header::Bye => return Err(End::Bye),
        }
        Ok(Step::Again)
    }

    /// The bytes of one of our reads follow.
    fn on_data(&mut self, request: u64, around: &Surroundings<'_>) -> Result<(), End> {
        let local = around.shared.lock().awaited_read(request)?;
        let Lkey(key) = local.key;
        self.pieces.clear();
        self.stage = Stage::Data { request, key, address: local.address, bytes: local.bytes };
        if local.bytes > 0 {
            let table = around.regions.read();
            self.generation = table.generation();
            let at = table
                .resolve(key, local.address, local.bytes, Access::LOCAL_WRITE)
                .ok_or(End::Failed { request, status: Status::LOCAL_PROTECTION })?;
            self.pieces.push(at, bytes_of(local.bytes));
        }
        Ok(())
    }

    fn on_records(&mut self, count: usize) -> Result<Step, End> {
        let here = &self.inbox[self.start..self.end];
        let Some(bytes) = here.get(..count * RECORD_BYTES) else { return Ok(Step::NeedMore) };
        self.records.clear();
        for bytes in bytes.as_chunks().0 {
            self.records.push(Record::parse(bytes).map_err(End::Protocol)?);
        }
        self.start += count * RECORD_BYTES;
        self.next = 0;
        self.stage = if self.skipping { self.skip_rest() } else { Stage::Plan };
        Ok(Step::Again)
    }

    /// The payload of all records that are not done is dropped.
    fn skip_rest(&self) -> Stage {
        let rest = self.records[self.next..].iter();
        Stage::Skip { bytes: rest.map(|record| u64::from(record.payload_bytes())).sum() }
    }

    /// Makes pieces for the next requests: writes, up to one that has more to it.
    fn plan(&mut self, around: &mut Surroundings<'_>) -> Result<Step, End> {
        self.pieces.clear();
        self.span_end = self.next;
        self.span_placed = 0;
        let table = around.regions.read();
        self.generation = table.generation();
        while let Some(record) = self.records.get(self.span_end) {
            let need = match record.verb {
                Verb::Read => Access::REMOTE_READ,
                Verb::Write | Verb::WriteWithImmediate(_) => Access::REMOTE_WRITE,
            };
            // A request of no bytes names no memory (IBA spec 9.7.4.1.5).
            if record.bytes > 0 {
                let Some(at) = table.resolve(record.key, record.address, record.bytes, need) else {
                    if self.span_end > self.next {
                        // First what came before it; then it is looked at again.
                        break;
                    }
                    let status = Status::REMOTE_ACCESS;
                    return Err(End::Refuse { request: self.expected, status });
                };
                self.pieces.push(at, bytes_of(record.payload_bytes()));
            }
            self.span_end += 1;
            if record.verb != Verb::Write {
                break;
            }
        }
        self.stage = Stage::Place;
        Ok(Step::Again)
    }

    /// Fills the pieces; when they are full, their requests are done.
    fn place(&mut self, around: &mut Surroundings<'_>) -> Result<Step, End> {
        if !self.fill(around)? {
            return Ok(Step::NeedMore);
        }
        // All but the last of a span are plain writes.
        let last = self.span_end.checked_sub(1).and_then(|last| self.records.get(last)).copied();
        let last_number = self.expected + (self.span_end - self.next) as u64 - 1;
        match last.map(|record| (record, record.verb)) {
            Some((_, Verb::WriteWithImmediate(immediate))) => {
                let mut queues = around.shared.lock();
                let ready = queues.take_receive(immediate);
                let overrun = queues.is_overrun();
                around.shared.tell(queues);
                if overrun {
                    return Err(End::Overrun);
                }
                if !ready {
                    self.expected = last_number;
                    self.next = self.span_end;
                    self.skipping = true;
                    self.stage = self.skip_rest();
                    around.sending.set_placed(self.expected);
                    around.sending.say_not_ready(last_number);
                    return Ok(Step::Again);
                }
            }
            Some((record, Verb::Read))
                if !around.sending.answer(Answer { number: last_number, record }) =>
            {
                let status = Status::REMOTE_INVALID_REQUEST;
                return Err(End::Refuse { request: last_number, status });
            }
            _ => {}
        }
        self.expected = last_number + 1;
        self.next = self.span_end;
        around.sending.set_placed(self.expected);
        self.stage = if self.next < self.records.len() { Stage::Plan } else { Stage::Header };
        Ok(Step::Again)
    }

    /// Moves what the inbox has into the pieces; whether they are full.
    fn fill(&mut self, around: &Surroundings<'_>) -> Result<bool, End> {
        if self.start < self.end && !self.pieces.is_done() {
            let table = around.regions.read();
            self.check_targets(&table)?;
            // SAFETY: what was resolved in an older generation has just been resolved again.
            let taken = unsafe { self.pieces.fill(&self.inbox[self.start..self.end], &table) };
            let taken = taken.map_err(|_| End::Lost)?;
            self.start += taken;
            self.span_placed += taken as u64;
        }
        Ok(self.pieces.is_done())
    }

    /// Takes bytes from the socket, those of pieces right to their place; 0 if there are none.
    fn receive(&mut self, around: &Surroundings<'_>) -> Result<usize, End> {
        // Pieces are waiting only if the inbox is empty.
        self.inbox.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let table = around.regions.read();
        let placing = matches!(self.stage, Stage::Place | Stage::Data { .. });
        if placing {
            self.check_targets(&table)?;
        } else {
            self.pieces.clear();
        }
        let behind = &mut self.inbox[self.end..];
        // SAFETY: there are no pieces, or they were resolved in this generation or just again.
        match unsafe { self.pieces.receive(around.socket, behind, &table) } {
            Ok(received) => {
                self.end += received.behind;
                self.span_placed += received.placed as u64;
                Ok(received.placed + received.behind)
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
                _ => Err(End::Lost),
            },
        }
    }

    /// Fails if a region that bytes are being placed into was deregistered.
    fn check_targets(&mut self, table: &Table) -> Result<(), End> {
        if self.generation == table.generation() {
            return Ok(());
        }
        self.generation = table.generation();
        if let Stage::Data { request, key, address, bytes } = self.stage {
            let there = table.resolve(key, address, bytes, Access::LOCAL_WRITE).is_some();
            let status = Status::LOCAL_PROTECTION;
            return if there { Ok(()) } else { Err(End::Failed { request, status }) };
        }
        let mut before = 0;
        let span = self.records.get(self.next..self.span_end).unwrap_or_default();
        for (request, record) in (self.expected..).zip(span) {
            before += u64::from(record.payload_bytes());
            let open = before > self.span_placed && record.payload_bytes() > 0;
            let need = Access::REMOTE_WRITE;
            if open && table.resolve(record.key, record.address, record.bytes, need).is_none() {
                return Err(End::Refuse { request, status: Status::REMOTE_ACCESS });
            }
        }
        Ok(())
    }
}

impl From<Unbelievable> for End {
    fn from(Unbelievable(what): Unbelievable) -> End {
        End::Protocol(what)
    }
}

fn bytes_of(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
