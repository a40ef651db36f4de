//! The command queue itself.

use super::pool::Chain;
use super::request::{MESSAGE_BYTES_MAX, MESSAGE_BYTES_MIN};
use super::{
    CommandError, CommandId, Completion, Input, InputWriter, Keep, LateCompletion, MailboxPool,
    Output, QueueStats, Request, SlotEvent, SlotState, SubmitError,
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
/// [`Self::take_done`] and [`Self::poll_late`] after every `on_*`,
/// [`Self::poll_timeout`] when there is nothing else to do; the rest looks.
pub(crate) struct CommandQueue {
    page: DmaBlock,
    log_stride: u8,
    slots: Vec<Slot>,
    pool: MailboxPool,
    /// Commands in ordinary slots, all but the last, of which somebody waits for the answer; and how
    /// many of them are throttled.
    ordinary: usize,
    throttled: usize,
    doorbell: u32,
    last_token: u8,
    last_id: u64,
    done: VecDeque<Completion>,
    late: VecDeque<LateCompletion>,
    stats: QueueStats,
    is_gone: bool,
    /// Creations of which nobody knows whether they have made something, or under which number.
    lost_creations: u64,
    /// A command was not answered in time.
    has_given_up: bool,
}

struct Slot {
    state: SlotState,
    command: Option<Posted>,
}

/// A command that the device has.
struct Posted {
    id: CommandId,
    opcode: Opcode,
    op_mod: u16,
    token: u8,
    issued: Instant,
    deadline: Instant,
    /// When the owner bit is looked at even without an event.
    probe: Instant,
    input: Chain,
    output: Chain,
    out_bytes: usize,
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
        let slots = (0..entries).map(|_| Slot { state: SlotState::Free, command: None }).collect();
        Ok(Some(CommandQueue {
            page,
            log_stride: shape.log_stride,
            slots,
            pool: MailboxPool::new(dma, mailbox_bytes_max),
            ordinary: 0,
            throttled: 0,
            doorbell: 0,
            last_token: 0,
            last_id: 0,
            done: VecDeque::new(),
            late: VecDeque::new(),
            stats: QueueStats::default(),
            is_gone: false,
            lost_creations: 0,
            has_given_up: false,
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

    /// Whether the device has a command of which somebody waits for the answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.state != SlotState::Posted)
    }

    /// Whether a command that was given up is still with the device: it may yet happen.
    pub(crate) fn is_out(&self, id: CommandId) -> bool {
        let is_it = |slot: &Slot| slot.command.as_ref().is_some_and(|posted| posted.id == id);
        self.slots.iter().any(is_it)
    }

    /// Whether the device is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Creations of which nobody knows whether they have made something, or under which number: it
    /// lives until the function is taken down. A late answer tells.
    pub(crate) fn lost_creations(&self) -> u64 {
        self.lost_creations
    }

    /// The function is down: whatever was made is gone.
    pub(crate) fn forget_lost_creations(&mut self) {
        self.lost_creations = 0;
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
        if self.is_gone {
            return Err(SubmitError::Gone);
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
            op_mod: 0,
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
        let is_free = |slot: &Slot| slot.state == SlotState::Free;
        if is_for_pages(opcode) {
            return is_free(&self.slots[last]).then_some(last);
        }
        if opcode.is_throttled() && self.throttled >= last.div_ceil(2) {
            return None;
        }
        self.slots[..last].iter().position(is_free)
    }

    /// Counts a command that was put into a slot, or has ended for who asked. Its slot may be in
    /// quarantine then; the permit is given back all the same, as Linux gives it back: slots are what
    /// is short then.
    fn count_shares(&mut self, opcode: Opcode, change: isize) {
        let count = |counter: &mut usize| {
            *counter = counter.checked_add_signed(change).expect("what ends has begun");
        };
        if !is_for_pages(opcode) {
            count(&mut self.ordinary);
        }
        if opcode.is_throttled() {
            count(&mut self.throttled);
        }
        let stats = self.stats.opcodes.entry(opcode).or_default();
        stats.count(change > 0);
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
    fn post(&mut self, index: usize, mut posted: Posted, input: &Input) -> CommandId {
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
        posted.op_mod = u16::from_be_bytes([inline[6], inline[7]]);

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
        self.change(index, SlotEvent::Issue);
        self.slots[index].command = Some(posted);
        id
    }

    /// The one place where a slot's state changes.
    fn change(&mut self, index: usize, event: SlotEvent) {
        let state = self.slots[index].state;
        let next = state.next(event);
        self.slots[index].state =
            next.unwrap_or_else(|| panic!("slot {index} is {state:?} at {event:?}"));
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

    /// Time has passed: looks where an answer is overdue, and gives up where it is over. To be
    /// called at [`Self::poll_timeout`], or more often. Whether an answer was overdue: then it is
    /// worth a look whether the device is still there.
    pub(crate) fn on_timeout(&mut self, now: Instant) -> bool {
        let mut overdue = false;
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            let due = match (&slot.command, slot.state) {
                (_, SlotState::Free) | (None, _) => continue,
                (Some(_), SlotState::Quarantined) => true,
                (Some(posted), SlotState::Posted) => posted.probe <= now,
            };
            if due && !self.answer(now, index) {
                overdue |= self.give_up_or_probe_again(now, index);
            }
        }
        overdue
    }

    /// Whether somebody waited for it.
    fn give_up_or_probe_again(&mut self, now: Instant, index: usize) -> bool {
        let slot = &mut self.slots[index];
        let Some(posted) = &mut slot.command else { return false };
        if slot.state != SlotState::Posted {
            return false;
        }
        if posted.deadline <= now {
            let waited = now.since(posted.issued);
            let error = CommandError::Timeout { opcode: posted.opcode, waited };
            self.give_up(now, index, error);
        } else {
            posted.probe = posted.deadline;
        }
        true
    }

    /// Whether a command was given up since the last call.
    pub(crate) fn take_given_up(&mut self) -> bool {
        std::mem::take(&mut self.has_given_up)
    }

    /// The device is gone: every command ends, and no more are taken. Slots stay in quarantine,
    /// since nobody knows what still writes to them.
    pub(crate) fn on_gone(&mut self, now: Instant) {
        self.is_gone = true;
        for index in 0..self.slots.len() {
            if self.slots[index].state == SlotState::Posted && !self.answer(now, index) {
                let opcode = self.slots[index].command.as_ref().map_or(Opcode(0), |c| c.opcode);
                self.give_up(now, index, CommandError::Gone { opcode });
            }
        }
    }

    fn give_up(&mut self, now: Instant, index: usize, error: CommandError) {
        self.change(index, SlotEvent::GiveUp);
        let posted = self.slots[index].command.as_ref().expect("a posted slot has a command");
        let (id, opcode) = (posted.id, posted.opcode);
        self.has_given_up = true;
        self.lost_creations += u64::from(opcode.is_create());
        self.count_shares(opcode, -1);
        self.done.push_back(Completion { id, result: Err(error), at: now });
    }

    /// Takes the answer from a slot, if the device has given the slot back. Whether it had.
    fn answer(&mut self, now: Instant, index: usize) -> bool {
        let Some(slot) = self.slots.get(index) else { return false };
        if slot.command.is_none() {
            return false;
        }
        // Pairs with the device's release of the owner bit: the output is there.
        let status_own = self.page.load8(self.entry_offset(index) + STATUS_OWN_OFFSET);
        if status_own & OWNED_BY_DEVICE != 0 {
            return false;
        }
        let was = self.slots[index].state;
        self.change(index, SlotEvent::Answer);
        let posted = self.slots[index].command.take().expect("checked above");
        let result = self.read_answer(index, &posted, status_own);
        self.pool.give(&posted.input);
        self.pool.give(&posted.output);
        let creates = u64::from(posted.opcode.is_create());
        if was == SlotState::Posted {
            let is_lost = result.as_ref().is_err_and(CommandError::may_be_done);
            self.lost_creations += if is_lost { creates } else { 0 };
            self.count_shares(posted.opcode, -1);
            self.done.push_back(Completion { id: posted.id, result, at: now });
        } else {
            let is_clear = !result.as_ref().is_err_and(CommandError::may_be_done);
            let found = if is_clear { creates } else { 0 };
            self.lost_creations = self.lost_creations.saturating_sub(found);
            let Posted { id, opcode, op_mod, keep, .. } = posted;
            self.late.push_back(LateCompletion { id, opcode, op_mod, result, keep });
        }
        true
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

    /// The next late answer.
    pub(crate) fn poll_late(&mut self) -> Option<LateCompletion> {
        self.late.pop_front()
    }

    /// When [`Self::on_timeout`] is to be called at the latest; `None` while nobody waits.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let posted = self.slots.iter().filter(|slot| slot.state == SlotState::Posted);
        posted.filter_map(|slot| slot.command.as_ref()).map(|c| c.probe.min(c.deadline)).min()
    }
}
