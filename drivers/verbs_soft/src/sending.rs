//! What goes to the peer: our requests, and answers to its own.
#![allow(unsafe_code)]
// UNSAFETY: sends registered memory, which is raw memory, and is the one to know that it still is
// registered.

use super::{End, READS_MAX};
use crate::frame::{HEADER_BYTES, Header, RECORD_BYTES, RECORDS_MAX, Record, Verb};
use crate::pieces::Pieces;
use crate::queues::{Queues, Shared};
use crate::regions::{Regions, Table};
use martlet_verbs::{Access, Lkey, Operation, RemoteAddress, Rkey, Sge, Status, WorkRequest};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Bytes of writes after which a frame is long enough: the peer acknowledges whole frames.
const FRAME_BYTES: u64 = 512 << 10;

/// Frames to send before the peer is listened to again.
const FRAMES_A_TURN: u32 = 4;

/// How long to wait before what found no receive is sent again: value 14 of the IBA spec's table
/// of RNR timers (9.7.5.2.8).
const RNR_TIMER: Duration = Duration::from_micros(1280);

/// Most bytes of a frame's head: an acknowledgement, and a full list of requests.
const HEAD_BYTES_MAX: usize = 2 * HEADER_BYTES + RECORDS_MAX * RECORD_BYTES;

/// The sending half of a connection.
pub(super) struct Sending {
    /// Headers and records of the frame that is being sent, and how many bytes of it are gone.
    head: Vec<u8>,
    head_sent: usize,
    /// Its payload.
    pieces: Pieces,
    /// Where the payload comes from, and the first request's number (of our own).
    sources: Vec<Source>,
    generation: u64,
    batch: Vec<WorkRequest>,
    /// Nothing more of ours is sent: this request can't be done. Told once all before are done.
    local_failure: Option<(u64, Status)>,
    retry: Option<Retry>,
    /// All before this one of the peer's requests are in place, and told so.
    placed: u64,
    placed_told: u64,
    /// Reads of the peer to be answered.
    answers: VecDeque<Answer>,
    /// The last word.
    refusal: Option<Header>,
    refused: bool,
}

/// Memory that bytes are taken from.
#[derive(Clone, Copy)]
struct Source {
    /// Our request, or the peer's read.
    number: u64,
    key: u32,
    address: u64,
    bytes: u32,
    need: Access,
}

struct Retry {
    request: u64,
    tries: u8,
    /// When to begin again; `None` once that is done.
    at: Option<Instant>,
}

/// A read of the peer.
#[derive(Clone, Copy)]
pub(super) struct Answer {
    pub(super) number: u64,
    pub(super) record: Record,
}

impl Sending {
    pub(super) fn new() -> Sending {
        Sending {
            head: Vec::with_capacity(HEAD_BYTES_MAX),
            head_sent: 0,
            pieces: Pieces::with_capacity(RECORDS_MAX),
            sources: Vec::with_capacity(RECORDS_MAX),
            generation: 0,
            batch: Vec::with_capacity(RECORDS_MAX),
            local_failure: None,
            retry: None,
            placed: 0,
            placed_told: 0,
            answers: VecDeque::with_capacity(READS_MAX),
            refusal: None,
            refused: false,
        }
    }

    /// Sends a few frames, or until the socket takes no more (`true`) or nothing is left.
    pub(super) fn advance(
        &mut self,
        socket: BorrowedFd<'_>,
        shared: &Shared,
        regions: &Regions,
    ) -> Result<bool, End> {
        self.check_local_failure(&shared.lock())?;
        let mut frames = 0;
        loop {
            let table = regions.read();
            if self.is_frame_done() {
                frames += 1;
                if frames > FRAMES_A_TURN || !self.compose(shared, &table)? {
                    return Ok(false);
                }
            }
            if !self.send_now(socket, &table)? {
                return Ok(true);
            }
        }
    }

    pub(super) fn is_frame_done(&self) -> bool {
        self.head_sent == self.head.len() && self.pieces.is_done()
    }

    /// Whether [`Sending::advance`] has something to do beside an unfinished frame.
    pub(super) fn has_work(&self, queues: &Queues) -> bool {
        self.placed > self.placed_told
            || !self.answers.is_empty()
            || (self.refusal.is_some() && !self.refused)
            || (self.may_request() && self.retry_wait().is_none() && queues.has_untaken())
            || self.retry_wait() == Some(Duration::ZERO)
    }

    /// How long until what found no receive is sent again.
    pub(super) fn retry_wait(&self) -> Option<Duration> {
        let at = self.retry.as_ref()?.at?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    fn may_request(&self) -> bool {
        self.local_failure.is_none() && self.refusal.is_none()
    }

    /// All requests of the peer before this one are in place.
    pub(super) fn set_placed(&mut self, placed: u64) {
        self.placed = placed;
    }

    /// Takes a read of the peer; `false` if it has too many in flight.
    pub(super) fn answer(&mut self, answer: Answer) -> bool {
        let room = self.answers.len() < READS_MAX;
        if room {
            self.answers.push_back(answer);
        }
        room
    }

    /// Says that a request of the peer found no receive. The peer sends it again later.
    pub(super) fn say_not_ready(&mut self, request: u64) {
        self.refusal = Some(Header::Rnr { request });
        self.refused = false;
    }

    /// Says the last word, as soon as the frame that is being sent is done. Then nothing more of
    /// ours follows.
    pub(super) fn say_last(&mut self, word: Header) {
        self.refusal = Some(word);
        self.refused = false;
        self.batch.clear();
    }

    /// Whether the last word is gone.
    pub(super) fn is_last_said(&self) -> bool {
        self.refused && self.is_frame_done()
    }

    /// The peer had no receive for a request: this one and all later ones go again.
    pub(super) fn on_not_ready(&mut self, queues: &mut Queues, request: u64) -> Result<(), End> {
        let tries = match &self.retry {
            Some(retry) if retry.request == request => retry.tries.saturating_add(1),
            _ => 1,
        };
        if queues.rnr_retries().is_some_and(|limit| tries > limit) {
            return Err(End::Failed { request, status: Status::RNR_RETRY_EXCEEDED });
        }
        queues.untake(request);
        if self.local_failure.is_some_and(|(failed, _)| failed >= request) {
            // It is found again.
            self.local_failure = None;
        }
        self.retry = Some(Retry { request, tries, at: Some(Instant::now() + RNR_TIMER) });
        Ok(())
    }

    fn check_local_failure(&self, queues: &Queues) -> Result<(), End> {
        match self.local_failure {
            Some((request, status)) if queues.oldest() >= request => {
                Err(End::Failed { request, status })
            }
            _ => Ok(()),
        }
    }

    /// Builds the next frame; `false` if there is nothing to say.
    fn compose(&mut self, shared: &Shared, table: &Table) -> Result<bool, End> {
        self.head.clear();
        self.head_sent = 0;
        self.pieces.clear();
        self.sources.clear();
        self.generation = table.generation();
        if self.placed > self.placed_told {
            self.placed_told = self.placed;
            self.head.extend_from_slice(&Header::Ack { placed: self.placed }.to_bytes());
        }
        if let Some(answer) = self.answers.pop_front() {
            self.compose_answer(answer, table)?;
        } else if let (Some(word), false) = (self.refusal, self.refused) {
            self.head.extend_from_slice(&word.to_bytes());
            self.refused = true;
            if matches!(word, Header::Rnr { .. }) {
                self.refusal = None;
            }
        } else if self.may_request() {
            self.compose_requests(shared, table)?;
        }
        Ok(!self.head.is_empty())
    }

    fn compose_answer(&mut self, answer: Answer, table: &Table) -> Result<(), End> {
        let Record { key, address, bytes, .. } = answer.record;
        let need = Access::REMOTE_READ;
        let source = Source { number: answer.number, key, address, bytes, need };
        self.head.extend_from_slice(&Header::Data { request: answer.number }.to_bytes());
        // The key was good when the read came in, but may be gone by now.
        if bytes == 0 || self.push_source(source, table) {
            return Ok(());
        }
        self.head.truncate(self.head.len() - HEADER_BYTES);
        Err(End::Refuse { request: answer.number, status: Status::REMOTE_ACCESS })
    }

    fn compose_requests(&mut self, shared: &Shared, table: &Table) -> Result<(), End> {
        let mut again = false;
        if let Some(retry) = &mut self.retry
            && let Some(at) = retry.at
        {
            if at > Instant::now() {
                return Ok(());
            }
            retry.at = None;
            again = true;
        }
        let mut batch = std::mem::take(&mut self.batch);
        let mut queues = shared.lock();
        let first = queues.take(&mut batch, RECORDS_MAX, FRAME_BYTES);
        let header_at = self.head.len();
        let header = |count| Header::Requests { first, count, again }.to_bytes();
        self.head.extend_from_slice(&header(batch.len()));
        let mut count = 0;
        for (number, request) in (first..).zip(&batch) {
            if !self.push_request(number, request, table) {
                self.local_failure = Some((number, Status::LOCAL_PROTECTION));
                queues.untake(number);
                break;
            }
            count += 1;
        }
        self.batch = batch;
        if count == 0 {
            self.head.truncate(header_at);
        } else if let Some(place) = self.head.get_mut(header_at..header_at + HEADER_BYTES) {
            place.copy_from_slice(&header(count));
        }
        self.check_local_failure(&queues)
    }

    /// Adds a request to the frame; `false` if its local side is not registered for that.
    fn push_request(&mut self, number: u64, request: &WorkRequest, table: &Table) -> bool {
        let Sge { address, bytes, key: Lkey(key) } = request.local;
        let (verb, remote, Rkey(remote_key)) = match request.operation {
            Operation::Write { to, key } => (Verb::Write, to, key),
            Operation::WriteWithImmediate { to, key, immediate } => {
                (Verb::WriteWithImmediate(immediate), to, key)
            }
            Operation::Read { from, key } => (Verb::Read, from, key),
        };
        let fits = if verb == Verb::Read {
            bytes == 0 || table.resolve(key, address, bytes, Access::LOCAL_WRITE).is_some()
        } else {
            let need = Access::empty();
            bytes == 0 || self.push_source(Source { number, key, address, bytes, need }, table)
        };
        if fits {
            let RemoteAddress(address) = remote;
            let record = Record { verb, bytes, key: remote_key, address };
            self.head.extend_from_slice(&record.to_bytes());
        }
        fits
    }

    fn push_source(&mut self, source: Source, table: &Table) -> bool {
        let Source { key, address, bytes, need, .. } = source;
        let Some(at) = table.resolve(key, address, bytes, need) else { return false };
        self.sources.push(source);
        self.pieces.push(at, usize::try_from(bytes).unwrap_or(usize::MAX));
        true
    }

    /// Sends what the socket takes; `false` if it takes nothing.
    fn send_now(&mut self, socket: BorrowedFd<'_>, table: &Table) -> Result<bool, End> {
        if self.generation != table.generation() {
            self.check_sources(table)?;
            self.generation = table.generation();
        }
        // SAFETY: what was resolved in an older generation has just been resolved again.
        match unsafe { self.pieces.send(socket, &self.head, &mut self.head_sent, table) } {
            Ok(()) => Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => Ok(false),
                io::ErrorKind::Interrupted => Ok(true),
                _ => Err(End::Lost),
            },
        }
    }

    /// Fails if memory that the frame promised to the peer was deregistered. The frame can't be
    /// finished then, so the connection ends in the middle of it.
    fn check_sources(&self, table: &Table) -> Result<(), End> {
        let gone = self.sources.iter().find(|source| {
            table.resolve(source.key, source.address, source.bytes, source.need).is_none()
        });
        match gone {
            None => Ok(()),
            Some(source) if source.need == Access::REMOTE_READ => Err(End::Torn(None)),
            Some(source) => Err(End::Torn(Some((source.number, Status::LOCAL_PROTECTION)))),
        }
    }
}
