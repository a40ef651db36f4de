//! The command queue itself.

use super::pool::Chain;
use super::request::{MESSAGE_BYTES_MAX, MESSAGE_BYTES_MIN};
use super::{
    CommandError, CommandId, Completion, Input, InputWriter, Keep, MailboxPool, Output, QueueStats,
    Request, SubmitError,
};
use martlet_device_io::{BusAddress, Dma, DmaBlock, DmaError};
use martlet_mlx5_abi::command::{
    self, CommandEntry, ENTRY_TYPE, INLINE_BYTES, MAILBOX_DATA_BYTES, OUT_INLINE_OFFSET,
    OWNED_BY_DEVICE, STATUS_OWN_OFFSET, TOKEN_OFFSET, mailboxes_for,
};
use martlet_mlx5_abi::init_segment::{COMMAND_ENTRIES_MAX, CommandQueueShape, LOG_COMMAND_PAGE};
use martlet_mlx5_abi::message::OutHeader;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U32, U64};
use martlet_units::Instant;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const PAGE_BYTES: usize = 1 << LOG_COMMAND_PAGE;

/// The command queue of one function.
///
/// Four kinds of methods: [`Self::submit`] takes a command; `on_*` tell what has happened;
/// `poll_*` say what is to be done: [`Self::poll_doorbell`] after every `submit`,
/// [`Self::take_done`] after every `on_*`, [`Self::poll_timeout`] when there is nothing else to do;
/// the rest looks.
pub(crate) struct CommandQueue {
    page: DmaBlock,
    log_stride: u8,
    /// The commands that the device has. Those that were out at the queue's end stay: the device
    /// may still use their mailboxes, and what they keep alive.
    slots: Vec<Option<Posted>>,
    pool: MailboxPool,
    /// How many of them are throttled.
    throttled: usize,
    doorbell: u32,
    last_token: u8,
    last_id: u64,
    done: VecDeque<Completion>,
    stats: QueueStats,
    end: Option<End>,
}

/// Why a queue takes no more commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// A command was not answered, or in a way that does not tell what was done. Whatever is asked
    /// of the firmware from now on might build on what is not there.
    Tainted,
    /// The device is gone.
    Gone,
}

/// A command that the device has.
struct Posted {
    id: CommandId,
    opcode: Opcode,
    token: u8,
    issued: Instant,
    deadline: Instant,
    /// When the owner bit is looked at even without an event.
    probe: Instant,
    input: Chain,
    output: Chain,
    out_bytes: usize,
    #[expect(dead_code, reason = "it is there to be held")]
    keep: Option<Keep>,
}

/// Whether a command goes into the slot that is kept for it.
fn is_for_pages(opcode: Opcode) -> bool {
    opcode == Opcode::MANAGE_PAGES
}

impl CommandQueue {
    /// Makes the command page for a queue of the shape that the device told, with this much DMA memory
    /// for mailboxes at most.
    ///
    /// A shape that can't be is an error of kind `None`: the device is broken.
    pub(crate) fn new(
        dma: Arc<dyn Dma>,
        shape: CommandQueueShape,
        mailbox_bytes_max: usize,
    ) -> Result<Option<CommandQueue>, DmaError> {
        let entries = 1_u32.checked_shl(u32::from(shape.log_entries)).unwrap_or(0);
        let fits = u32::from(shape.log_entries) + u32::from(shape.log_stride) <= LOG_COMMAND_PAGE;
        // At least one ordinary entry, and room for an entry in each stride.
        if !(2..=COMMAND_ENTRIES_MAX).contains(&entries) || !fits || shape.log_stride < 6 {
            return Ok(None);
        }
        let page = dma.alloc(PAGE_BYTES, PAGE_BYTES)?;
        let slots = (0..entries).map(|_| None).collect();
        Ok(Some(CommandQueue {
            page,
            log_stride: shape.log_stride,
            slots,
            pool: MailboxPool::new(dma, mailbox_bytes_max),
            throttled: 0,
            doorbell: 0,
            last_token: 0,
            last_id: 0,
            done: VecDeque::new(),
            stats: QueueStats::default(),
            end: None,
        }))
    }

    /// Where the device finds the command page.
    pub(crate) fn page_at(&self) -> BusAddress {
        self.page.at()
    }

    /// What it has counted.
    pub(crate) fn stats(&self) -> QueueStats {
        self.stats.clone()
    }

    /// Goes on counting where another queue has ended.
    pub(crate) fn set_past(&mut self, past: QueueStats) {
        self.stats = past;
        for stats in self.stats.opcodes.values_mut() {
            stats.in_flight = 0;
        }
    }

    /// Whether nobody waits for an answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.end.is_some() || self.slots.iter().all(Option::is_none)
    }

    /// Why it takes no more commands; `None` as long as it does.
    pub(crate) fn end(&self) -> Option<End> {
        self.end
    }

    /// Gives mailboxes back to the host that nothing has needed lately.
    pub(crate) fn trim(&mut self) {
        self.pool.trim();
    }

    /// Puts a command into a slot; it starts with the next doorbell. It is answered or given up
    /// `deadline` later at the latest. On an error nothing has been done.
    pub(crate) fn submit(
        &mut self,
        now: Instant,
        deadline: Duration,
        request: &Request,
    ) -> Result<CommandId, SubmitError> {
        match self.end {
            None => {}
            Some(End::Gone) => return Err(SubmitError::Gone),
            Some(End::Tainted) => return Err(SubmitError::Tainted),
        }
        let (opcode, in_bytes, out_bytes) =
            (request.opcode, request.input.bytes(), request.out_bytes);
        let lengths = MESSAGE_BYTES_MIN..=MESSAGE_BYTES_MAX;
        if !lengths.contains(&in_bytes) || !lengths.contains(&out_bytes) {
            return Err(SubmitError::BadLength { opcode, in_bytes, out_bytes });
        }
        let index = self.free_slot(opcode).ok_or(SubmitError::Busy)?;
        let (input_boxes, output_boxes) = (mailboxes_for(in_bytes), mailboxes_for(out_bytes));
        let no_mailboxes = SubmitError::NoMailboxes { needed: input_boxes + output_boxes };
        let input = self.pool.take(input_boxes).ok_or(no_mailboxes)?;
        let Some(output) = self.pool.take(output_boxes) else {
            self.pool.give(&input);
            return Err(no_mailboxes);
        };
        self.count_shares(opcode, 1);
        self.last_id += 1;
        let posted = Posted {
            id: CommandId(self.last_id),
            opcode,
            token: self.next_token(),
            issued: now,
            deadline: now.after(deadline),
            probe: now.after(deadline / 2),
            input,
            output,
            out_bytes,
            keep: request.keep.clone(),
        };
        Ok(self.post(index, posted, &request.input))
    }

    /// The slot for a command: the last for MANAGE_PAGES, the lowest free one for others, if there is
    /// a permit.
    fn free_slot(&self, opcode: Opcode) -> Option<usize> {
        let last = self.slots.len() - 1;
        if is_for_pages(opcode) {
            return self.slots[last].is_none().then_some(last);
        }
        if opcode.is_throttled() && self.throttled >= last.div_ceil(2) {
            return None;
        }
        self.slots[..last].iter().position(Option::is_none)
    }

    /// Counts a command that was put into a slot, or has ended.
    fn count_shares(&mut self, opcode: Opcode, change: isize) {
        if opcode.is_throttled() {
            let throttled = self.throttled.checked_add_signed(change);
            self.throttled = throttled.expect("what ends has begun");
        }
        self.stats.opcodes.entry(opcode).or_default().count(change > 0);
    }

    /// A token for the next command. Never zero: mailboxes fresh from the host carry that.
    fn next_token(&mut self) -> u8 {
        self.last_token = self.last_token.checked_add(1).unwrap_or(1);
        self.last_token
    }

    fn entry_offset(&self, index: usize) -> usize {
        index << self.log_stride
    }

    /// Writes the message and the entry, and hands the slot to the device.
    fn post(&mut self, index: usize, posted: Posted, input: &Input) -> CommandId {
        let in_bytes = input.bytes();
        let mut writer = InputWriter::new(&self.pool, &posted.input, in_bytes);
        match input {
            Input::Bytes(bytes) => writer.write(bytes),
            Input::Lazy(message) => message.write(&mut writer),
        }
        let inline = writer.finish();
        self.pool.link(&posted.input, posted.token);
        self.pool.clear(&posted.output);
        self.pool.link(&posted.output, posted.token);

        let length = |bytes: usize| U32::new(u32::try_from(bytes).expect("messages have a limit"));
        let mut entry = CommandEntry::new_zeroed();
        entry.kind = ENTRY_TYPE;
        entry.in_length = length(in_bytes);
        entry.in_pointer = U64::new(self.pool.first(&posted.input));
        entry.in_inline = inline;
        entry.out_pointer = U64::new(self.pool.first(&posted.output));
        entry.out_length = length(posted.out_bytes);
        entry.token = posted.token;
        entry.status_own = OWNED_BY_DEVICE;
        entry.sign();
        let offset = self.entry_offset(index);
        self.page.write(offset, &entry.as_bytes()[..STATUS_OWN_OFFSET]);
        // The owner bit last, for a device that looks at entries before its doorbell rings. The
        // doorbell is a release of its own.
        self.page.store8(offset + STATUS_OWN_OFFSET, entry.status_own);
        self.doorbell |= 1 << index;

        let id = posted.id;
        self.slots[index] = Some(posted);
        id
    }

    /// What to write to the doorbell register (before it is swapped to big-endian): one bit for
    /// each slot that was filled since the last call. `None` for nothing.
    pub(crate) fn poll_doorbell(&mut self) -> Option<u32> {
        let vector = std::mem::take(&mut self.doorbell);
        (vector != 0).then_some(vector)
    }

    /// An event tells of answers: one bit for each slot.
    pub(crate) fn on_completion(&mut self, now: Instant, vector: u32) {
        for index in 0..COMMAND_ENTRIES_MAX as usize {
            if vector >> index & 1 == 0 {
                continue;
            }
            // Whatever the event says: while the owner bit stands, the device may write.
            self.answer(now, index);
        }
    }

    /// Looks at all owner bits.
    pub(crate) fn on_poll(&mut self, now: Instant) {
        for index in 0..self.slots.len() {
            self.answer(now, index);
        }
    }

    /// Time has passed: looks where an answer is overdue. If one does not come, the queue ends. To be
    /// called at [`Self::poll_timeout`], or more often. Whether an answer was overdue: then it is
    /// worth a look whether the device is still there.
    pub(crate) fn on_timeout(&mut self, now: Instant) -> bool {
        let (mut overdue, mut over) = (false, false);
        for index in 0..self.slots.len() {
            if self.slots[index].as_ref().is_none_or(|posted| posted.probe > now)
                || self.answer(now, index)
            {
                continue;
            }
            let Some(posted) = &mut self.slots[index] else { continue };
            posted.probe = posted.deadline;
            overdue = true;
            over |= posted.deadline <= now;
        }
        if over && self.end.is_none() {
            self.on_end(now, End::Tainted);
        }
        overdue
    }

    /// Every command ends that is not answered, and no more are taken.
    pub(crate) fn on_end(&mut self, now: Instant, end: End) {
        if self.end.is_some() {
            self.end = self.end.max(Some(end));
            return;
        }
        for index in 0..self.slots.len() {
            self.take_answer(index);
        }
        self.end = Some(end);
        self.doorbell = 0;
        for index in 0..self.slots.len() {
            let Some(Posted { id, opcode, issued, deadline, .. }) = self.slots[index] else {
                continue;
            };
            let error = match end {
                End::Gone => CommandError::Gone { opcode },
                End::Tainted if deadline <= now => {
                    CommandError::Timeout { opcode, waited: now.since(issued) }
                }
                End::Tainted => CommandError::Tainted { opcode },
            };
            self.count_shares(opcode, -1);
            self.done.push_back(Completion { id, result: Err(error) });
        }
    }

    /// Takes the answer from a slot, if the device has given the slot back. Whether it had.
    fn answer(&mut self, now: Instant, index: usize) -> bool {
        let taints = self.end.is_none().then(|| self.take_answer(index)).flatten();
        if taints == Some(true) {
            self.on_end(now, End::Tainted);
        }
        taints.is_some()
    }

    /// As above; whether it is one after which nothing more can be asked.
    fn take_answer(&mut self, index: usize) -> Option<bool> {
        self.slots.get(index)?.as_ref()?;
        // Pairs with the device's release of the owner bit: the output is there.
        let status_own = self.page.load8(self.entry_offset(index) + STATUS_OWN_OFFSET);
        if status_own & OWNED_BY_DEVICE != 0 {
            return None;
        }
        let posted = self.slots[index].take()?;
        let result = self.read_answer(index, &posted, status_own);
        self.pool.give(&posted.input);
        self.pool.give(&posted.output);
        self.count_shares(posted.opcode, -1);
        let taints = result.as_ref().is_err_and(CommandError::taints);
        self.done.push_back(Completion { id: posted.id, result });
        Some(taints)
    }

    fn read_answer(
        &self,
        index: usize,
        posted: &Posted,
        status_own: u8,
    ) -> Result<Output, CommandError> {
        let opcode = posted.opcode;
        let status = command::delivery_status(status_own);
        if status != DeliveryStatus::OK {
            return Err(CommandError::Delivery { opcode, status });
        }
        let offset = self.entry_offset(index);
        let found = self.page.load8(offset + TOKEN_OFFSET);
        if found != posted.token {
            return Err(CommandError::Token { opcode, expected: posted.token, found });
        }
        let mut bytes = vec![0; posted.out_bytes].into_boxed_slice();
        let (inline, rest) = bytes.split_at_mut(posted.out_bytes.min(INLINE_BYTES));
        self.page.read(offset + OUT_INLINE_OFFSET, inline);
        let header = OutHeader::read_from_prefix(inline);
        let (header, _) = header.expect("an output is as long as its header");
        if header.status() != CommandStatus::OK {
            let (status, syndrome) = (header.status(), header.syndrome.get());
            return Err(CommandError::Status { opcode, status, syndrome });
        }
        for (number, piece) in rest.chunks_mut(MAILBOX_DATA_BYTES).enumerate() {
            self.pool.read_data(&posted.output, number, piece);
        }
        Ok(Output::new(opcode, bytes))
    }

    /// The next command that has ended, whichever it is.
    #[cfg(test)]
    pub(crate) fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// The end of one command, if it has ended. Each is given out once.
    pub(crate) fn take_done(&mut self, id: CommandId) -> Option<Completion> {
        let index = self.done.iter().position(|completion| completion.id == id)?;
        self.done.remove(index)
    }

    /// When [`Self::on_timeout`] is to be called at the latest; `None` while nobody waits.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let posted = self.slots.iter().flatten().filter(|_| self.end.is_none());
        posted.map(|posted| posted.probe.min(posted.deadline)).min()
    }
}
