//! The command queue: a page of entries, and mailboxes for what does not fit into an entry (PRM,
//! "Command queue entry" and "Command interface mailboxes"; `device.h`, `struct mlx5_cmd_layout`;
//! Linux `cmd.c`, `struct mlx5_cmd_prot_block`).

use crate::{DeliveryStatus, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The type of every command entry: the PCI command transport.
pub const ENTRY_TYPE: u8 = 7;

/// Bytes of the input, and of the output, that lie in the entry itself.
pub const INLINE_BYTES: usize = 16;

/// One entry of the command queue.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommandEntry {
    /// [`ENTRY_TYPE`].
    pub kind: u8,
    /// Zero.
    pub reserved0: [u8; 3],
    /// Length of the input in bytes, with the part in this entry.
    pub in_length: U32,
    /// Address of the first input mailbox, a multiple of 512; zero without.
    pub in_pointer: U64,
    /// The first bytes of the input.
    pub in_inline: [u8; INLINE_BYTES],
    /// The first bytes of the output.
    pub out_inline: [u8; INLINE_BYTES],
    /// Address of the first output mailbox, a multiple of 512; zero without.
    pub out_pointer: U64,
    /// Length of the output in bytes, with the part in this entry.
    pub out_length: U32,
    /// The token that all mailboxes of this command carry. Never zero.
    pub token: u8,
    /// Makes the XOR of all bytes of the entry 0xff.
    pub signature: u8,
    /// Zero.
    pub reserved1: u8,
    /// Bit 0: the device owns the entry. Bits 7:1: the delivery status.
    pub status_own: u8,
}

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = size_of::<CommandEntry>();
/// Where in an entry its token is.
pub const TOKEN_OFFSET: usize = offset_of!(CommandEntry, token);
/// Where in an entry its last byte is.
pub const STATUS_OWN_OFFSET: usize = offset_of!(CommandEntry, status_own);
/// Where in an entry the output begins.
pub const OUT_INLINE_OFFSET: usize = offset_of!(CommandEntry, out_inline);

/// In `status_own`: the device owns the entry.
pub const OWNED_BY_DEVICE: u8 = 1;

/// Takes the delivery status from `status_own`.
pub const fn delivery_status(status_own: u8) -> DeliveryStatus {
    DeliveryStatus(status_own >> 1)
}

/// The last byte of an entry that the device has done with.
pub const fn status_own(status: DeliveryStatus) -> u8 {
    status.0 << 1
}

/// Bytes of a message in one mailbox.
pub const MAILBOX_DATA_BYTES: usize = 512;

/// Mailboxes lie at multiples of this. (The device asks for 512; drivers take them from a pool of
/// 1024-byte blocks.)
pub const MAILBOX_ALIGN: usize = 1024;

/// A mailbox: a piece of a message, and where the next one is.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mailbox {
    /// The piece.
    pub data: [u8; MAILBOX_DATA_BYTES],
    /// Zero.
    pub reserved0: [u8; 48],
    /// What follows the piece.
    pub control: MailboxControl,
}

/// The end of a mailbox.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MailboxControl {
    /// Address of the next mailbox; zero in the last.
    pub next: U64,
    /// Its number in the chain, from 0.
    pub block_number: U32,
    /// Zero.
    pub reserved: u8,
    /// The token of the command.
    pub token: u8,
    /// Makes the XOR of the control part 0xff, where signatures are checked.
    pub control_signature: u8,
    /// Makes the XOR of the whole mailbox 0xff, where signatures are checked.
    pub signature: u8,
}

/// Bytes of a mailbox.
pub const MAILBOX_BYTES: usize = size_of::<Mailbox>();
/// Where in a mailbox its control part begins.
pub const MAILBOX_CONTROL_OFFSET: usize = offset_of!(Mailbox, control);

/// How many mailboxes a message of this length needs.
pub const fn mailboxes_for(message_bytes: usize) -> usize {
    message_bytes.saturating_sub(INLINE_BYTES).div_ceil(MAILBOX_DATA_BYTES)
}

/// The XOR of all bytes.
pub fn xor8(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |xor, byte| xor ^ byte)
}

/// What to put where a zero is among `bytes`, so that their XOR becomes 0xff.
pub fn signature_for(bytes: &[u8]) -> u8 {
    !xor8(bytes)
}

impl CommandEntry {
    /// Fills in the signature, over everything else as it stands (Linux `cmd.c`, `set_signature`:
    /// with the owner bit already set).
    pub fn sign(&mut self) {
        self.signature = 0;
        self.signature = signature_for(self.as_bytes());
    }
}

const _: () = {
    assert!(ENTRY_BYTES == 64);
    assert!(offset_of!(CommandEntry, in_pointer) == 0x08);
    assert!(offset_of!(CommandEntry, in_inline) == 0x10);
    assert!(OUT_INLINE_OFFSET == 0x20);
    assert!(offset_of!(CommandEntry, out_pointer) == 0x30);
    assert!(offset_of!(CommandEntry, out_length) == 0x38);
    assert!(TOKEN_OFFSET == 0x3c);
    assert!(STATUS_OWN_OFFSET == 0x3f);
    assert!(MAILBOX_BYTES == 576);
    assert!(MAILBOX_CONTROL_OFFSET == 0x230);
    assert!(size_of::<MailboxControl>() == 16);
};
