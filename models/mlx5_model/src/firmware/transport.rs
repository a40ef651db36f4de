//! Commands as they lie in memory: entries, mailboxes, tokens, signatures (PRM, "Command
//! interface"). What the driver wrote is checked before anything is done; what is wrong becomes a
//! delivery status.

use super::input::Input;
use crate::num::to_usize;
use martlet_device_io::{BusAddress, BusFault, BusMemory};
use martlet_mlx5_abi::command::{
    self, CommandEntry, ENTRY_BYTES, ENTRY_TYPE, INLINE_BYTES, MAILBOX_BYTES,
    MAILBOX_CONTROL_OFFSET, MAILBOX_DATA_BYTES, Mailbox, MailboxControl, OUT_INLINE_OFFSET,
    OWNED_BY_DEVICE, STATUS_OWN_OFFSET, TOKEN_OFFSET, mailboxes_for, xor8,
};
use martlet_mlx5_abi::message::InHeader;
use martlet_mlx5_abi::{DeliveryStatus, Opcode};
use std::mem::offset_of;
use zerocopy::{FromBytes, IntoBytes};

/// The longest input: a key with a list of 512 Ki pages.
const INPUT_BYTES_MAX: usize = 0x110 + (4 << 20);

/// The longest input of other commands.
const SHORT_INPUT_BYTES_MAX: usize = 64 << 10;

/// The longest output.
const OUTPUT_BYTES_MAX: usize = 64 << 10;

/// Where in a mailbox's control part its token is.
const MAILBOX_TOKEN_OFFSET: usize = offset_of!(MailboxControl, token);

/// Mailboxes lie at multiples of this.
const POINTER_ALIGN: u64 = 512;

/// Where the answer goes.
#[derive(Debug)]
pub(super) struct ReplyTo {
    entry: BusAddress,
    token: u8,
    length: usize,
    boxes: Vec<BusAddress>,
}

/// A command as it was taken.
pub(super) struct Delivered {
    /// What it is, as far as that could be read.
    pub(super) opcode: Opcode,
    /// The input, or why it can't be had.
    pub(super) input: Result<Input, DeliveryStatus>,
    pub(super) reply: ReplyTo,
}

/// What is checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checks {
    pub(super) entry_signatures: bool,
    pub(super) mailbox_signatures: bool,
}

/// Reads a command. `None` if there is none: the entry can't be read, or the driver owns it.
pub(super) fn take(bus: &dyn BusMemory, at: BusAddress, checks: Checks) -> Option<Delivered> {
    let mut raw = [0; ENTRY_BYTES];
    // The doorbell's release made the entry visible; the owner byte is read with it.
    let owner = bus.load8(at.checked_add(to_u64(STATUS_OWN_OFFSET))?).ok()?;
    bus.read(at, &mut raw).ok()?;
    if owner & OWNED_BY_DEVICE == 0 {
        return None;
    }
    let entry = CommandEntry::read_from_bytes(&raw).ok()?;
    // Beyond the limit there is no answer to be made room for, only a delivery status.
    let length = to_usize(entry.out_length.get()).min(OUTPUT_BYTES_MAX);
    let mut reply = ReplyTo { entry: at, token: entry.token, length, boxes: Vec::new() };
    let header = InHeader::read_from_prefix(&entry.in_inline).ok()?.0;
    let opcode = Opcode(header.opcode.get());
    let input = check_entry(&entry, &raw, checks.entry_signatures)
        .and_then(|()| {
            reply.boxes = out_boxes(bus, &entry, checks)?;
            read_input(bus, &entry, opcode, checks)
        })
        .inspect_err(|_| reply.boxes.clear());
    Some(Delivered { opcode, input, reply })
}

fn to_u64(value: usize) -> u64 {
    crate::num::to_u64(value)
}

fn check_entry(
    entry: &CommandEntry,
    raw: &[u8],
    check_signatures: bool,
) -> Result<(), DeliveryStatus> {
    if entry.kind != ENTRY_TYPE {
        return Err(DeliveryStatus::DESCRIPTOR_TYPE);
    }
    if check_signatures && xor8(raw) != 0xff {
        return Err(DeliveryStatus::SIGNATURE);
    }
    if entry.reserved0 != [0; 3] || entry.reserved1 != 0 {
        return Err(DeliveryStatus::RESERVED);
    }
    if entry.token == 0 {
        return Err(DeliveryStatus::TOKEN);
    }
    let (input, output) = (to_usize(entry.in_length.get()), to_usize(entry.out_length.get()));
    if !(INLINE_BYTES..=INPUT_BYTES_MAX).contains(&input) {
        return Err(DeliveryStatus::IN_LENGTH);
    }
    if !(INLINE_BYTES..=OUTPUT_BYTES_MAX).contains(&output) {
        return Err(DeliveryStatus::OUT_LENGTH);
    }
    if mailboxes_for(input) > 0 && !entry.in_pointer.get().is_multiple_of(POINTER_ALIGN) {
        return Err(DeliveryStatus::IN_POINTER_ALIGN);
    }
    if mailboxes_for(output) > 0 && !entry.out_pointer.get().is_multiple_of(POINTER_ALIGN) {
        return Err(DeliveryStatus::OUT_POINTER_ALIGN);
    }
    Ok(())
}

/// What the firmware makes of memory that it can't read.
fn unreadable(_: BusFault) -> DeliveryStatus {
    DeliveryStatus::FIRMWARE
}

fn check_control(
    control: &MailboxControl,
    token: u8,
    number: usize,
    checks: Checks,
) -> Result<(), DeliveryStatus> {
    // The signature of the whole mailbox is not part of the control part's (Linux `cmd.c`,
    // `calc_block_sig`).
    let signed = xor8(control.as_bytes()) ^ control.signature;
    if checks.mailbox_signatures && signed != 0xff {
        return Err(DeliveryStatus::SIGNATURE);
    }
    if control.token != token {
        return Err(DeliveryStatus::TOKEN);
    }
    if to_usize(control.block_number.get()) != number {
        return Err(DeliveryStatus::BLOCK_NUMBER);
    }
    Ok(())
}

/// Finds the mailboxes of the output.
fn out_boxes(
    bus: &dyn BusMemory,
    entry: &CommandEntry,
    checks: Checks,
) -> Result<Vec<BusAddress>, DeliveryStatus> {
    let count = mailboxes_for(to_usize(entry.out_length.get()));
    let (mut boxes, mut next) = (Vec::with_capacity(count), entry.out_pointer.get());
    for number in 0..count {
        if !next.is_multiple_of(POINTER_ALIGN) {
            return Err(DeliveryStatus::OUT_POINTER_ALIGN);
        }
        let at = next.checked_add(to_u64(MAILBOX_CONTROL_OFFSET));
        let at = BusAddress(at.ok_or(DeliveryStatus::FIRMWARE)?);
        let mut raw = [0; size_of::<MailboxControl>()];
        bus.read(at, &mut raw).map_err(unreadable)?;
        let control = MailboxControl::read_from_bytes(&raw);
        let control = control.map_err(|_| DeliveryStatus::FIRMWARE)?;
        check_control(&control, entry.token, number, checks)?;
        boxes.push(BusAddress(next));
        next = control.next.get();
    }
    Ok(boxes)
}

/// Reads the whole input: the part in the entry, then mailbox after mailbox.
fn read_input(
    bus: &dyn BusMemory,
    entry: &CommandEntry,
    opcode: Opcode,
    checks: Checks,
) -> Result<Input, DeliveryStatus> {
    let length = to_usize(entry.in_length.get());
    if opcode != Opcode::CREATE_MKEY && length > SHORT_INPUT_BYTES_MAX {
        return Err(DeliveryStatus::IN_LENGTH);
    }
    let mut input = Input::new(opcode, length);
    input.extend(&entry.in_inline);
    let (mut left, mut next) = (length - INLINE_BYTES, entry.in_pointer.get());
    for number in 0..mailboxes_for(length) {
        if !next.is_multiple_of(POINTER_ALIGN) {
            return Err(DeliveryStatus::IN_POINTER_ALIGN);
        }
        let mut raw = [0; MAILBOX_BYTES];
        bus.read(BusAddress(next), &mut raw).map_err(unreadable)?;
        let mailbox = Mailbox::ref_from_bytes(&raw).map_err(|_| DeliveryStatus::FIRMWARE)?;
        check_control(&mailbox.control, entry.token, number, checks)?;
        if checks.mailbox_signatures && xor8(&raw) != 0xff {
            return Err(DeliveryStatus::SIGNATURE);
        }
        let piece = left.min(MAILBOX_DATA_BYTES);
        input.extend(mailbox.data.get(..piece).unwrap_or_default());
        left -= piece;
        next = mailbox.control.next.get();
    }
    Ok(input)
}

impl ReplyTo {
    /// How long an output may be.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Writes the output, if the command was delivered, and hands the entry back. With
    /// `wrong_token` the answer carries another token than the command. Memory that is gone by now
    /// is nobody's any more: it is left alone.
    pub(super) fn write(
        &self,
        bus: &dyn BusMemory,
        delivery: DeliveryStatus,
        output: Option<&[u8]>,
        wrong_token: bool,
    ) {
        let token = if wrong_token { self.token.wrapping_add(1).max(1) } else { self.token };
        let write = |offset, bytes: &[u8]| {
            let at = self.entry.checked_add(to_u64(offset));
            let _ = at.map(|at| bus.write(at, bytes));
        };
        if let Some(output) = output {
            self.write_boxes(bus, output, wrong_token.then_some(token));
            let mut inline = [0; INLINE_BYTES];
            let first = output.len().min(INLINE_BYTES);
            inline[..first].copy_from_slice(&output[..first]);
            write(OUT_INLINE_OFFSET, &inline);
        }
        if wrong_token {
            write(TOKEN_OFFSET, &[token]);
        }
        if let Some(at) = self.entry.checked_add(to_u64(STATUS_OWN_OFFSET)) {
            let _ = bus.store8(at, command::status_own(delivery));
        }
    }

    fn write_boxes(&self, bus: &dyn BusMemory, output: &[u8], token: Option<u8>) {
        let mut rest = output.get(INLINE_BYTES..).unwrap_or_default();
        for at in &self.boxes {
            let (piece, later) = rest.split_at(rest.len().min(MAILBOX_DATA_BYTES));
            let mut data = [0; MAILBOX_DATA_BYTES];
            data[..piece.len()].copy_from_slice(piece);
            let _ = bus.write(*at, &data);
            if let Some(token) = token {
                let at = at.checked_add(to_u64(MAILBOX_CONTROL_OFFSET + MAILBOX_TOKEN_OFFSET));
                let _ = at.map(|at| bus.write(at, &[token]));
            }
            rest = later;
        }
    }
}
