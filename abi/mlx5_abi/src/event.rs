//! Event queues: rings in the driver's memory that the device fills (PRM, "Event queues";
//! `device.h`, `struct mlx5_eqe`; `mlx5_ifc_eqc_bits`).

use crate::message::{InHeader, OutHeader};
use crate::number::open_enum;
use crate::{U16, U24, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

open_enum! {
    /// What an event is about (`enum mlx5_event`); also its bit in an event queue's mask.
    EventType(u8) {
        /// A completion queue has completions.
        COMPLETION = 0x00,
        /// The device has failed.
        INTERNAL_ERROR = 0x08,
        /// The port's link went up or down.
        PORT_CHANGE = 0x09,
        /// Commands are done.
        COMMAND = 0x0a,
        /// The firmware wants pages, or gives some back.
        PAGE_REQUEST = 0x0b,
        /// The vport has changed.
        NIC_VPORT_CHANGE = 0x0d,
    }
}

impl EventType {
    /// Its bit in the first word of [`CreateEqIn::event_bitmask`].
    pub const fn mask(self) -> u64 {
        if self.0 < 64 { 1 << self.0 } else { 0 }
    }
}

/// Sub-types of PORT_CHANGE (`MLX5_PORT_CHANGE_SUBTYPE_*`).
pub mod port_change {
    /// The link went down.
    pub const DOWN: u8 = 1;
    /// The link went up.
    pub const ACTIVE: u8 = 4;
}

/// One entry of an event queue.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct EventEntry {
    /// Zero.
    pub reserved0: u8,
    /// [`EventType`].
    pub kind: u8,
    /// Zero.
    pub reserved1: u8,
    /// Says more about the type.
    pub sub_type: u8,
    /// Zero.
    pub reserved2: [u8; 28],
    /// COMMAND: one bit for each entry that is done. PAGE_REQUEST: the function in the low half.
    /// NIC_VPORT_CHANGE: the vport in the low half.
    pub data0: U32,
    /// PAGE_REQUEST: how many pages; signed, negative for pages that go back.
    pub data1: U32,
    /// PORT_CHANGE: the port in the high nibble of the first byte.
    pub data2: U32,
    /// Without a use here.
    pub data3: [u8; 16],
    /// Zero.
    pub reserved3: U16,
    /// Makes the XOR of the entry 0xff, where signatures are checked.
    pub signature: u8,
    /// Bit 0: who owns it, see [`is_for_software`].
    pub owner: u8,
}

/// Bytes of an entry.
pub const EVENT_BYTES: usize = size_of::<EventEntry>();
/// Where in an entry the owner is.
pub const OWNER_OFFSET: usize = offset_of!(EventEntry, owner);
/// What the driver puts into every owner byte before it makes the queue: none is for it yet.
pub const OWNER_INITIAL: u8 = 1;

/// Whether the entry at a free-running index of a queue of `1 << log_size` entries is the
/// driver's. The device writes bit 0 as 0 in its first walk through the ring, as 1 in the second,
/// and so on.
pub const fn is_for_software(owner: u8, index: u32, log_size: u8) -> bool {
    (owner & 1) as u32 == (index >> log_size) & 1
}

/// What the device writes as owner at a free-running index; see [`is_for_software`].
pub const fn owner_at(index: u32, log_size: u8) -> u8 {
    if (index >> log_size) & 1 == 1 { 1 } else { 0 }
}

/// CREATE_EQ's input; the addresses of the ring's pages follow, 8 bytes each.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreateEqIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: [u8; 8],
    /// What the queue shall be.
    pub context: EqContext,
    /// Zero.
    pub reserved1: [u8; 8],
    /// Which events go there: bit [`EventType`] of the first word, types from 64 in the others.
    pub event_bitmask: [U64; 4],
    /// Zero.
    pub reserved2: [u8; 0x98],
}

/// An event queue.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EqContext {
    /// Bits 31:28: status. Bits 11:8: whether it is armed.
    pub status: U32,
    /// Zero.
    pub reserved0: [u8; 8],
    /// Low 5 bits: log2 of the number of entries.
    pub log_size: u8,
    /// The UAR page whose doorbell it uses.
    pub uar_page: U24,
    /// Zero.
    pub reserved1: [u8; 6],
    /// Low 12 bits: its interrupt vector.
    pub interrupt: U16,
    /// Low 5 bits: log2 of a page of the ring, less 12.
    pub log_page_size: u8,
    /// Zero.
    pub reserved2: [u8; 0x10],
    /// How far the driver has read.
    pub consumer: U24,
    /// Zero.
    pub reserved3: u8,
    /// How far the device has written.
    pub producer: U24,
    /// Zero.
    pub reserved4: [u8; 0x10],
}

/// CREATE_EQ's output.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CreateEqOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved0: [u8; 3],
    /// The queue's number.
    pub eqn: u8,
    /// Zero.
    pub reserved1: U32,
}

const _: () = {
    assert!(EVENT_BYTES == 64);
    assert!(offset_of!(EventEntry, data0) == 0x20);
    assert!(OWNER_OFFSET == 0x3f);
    assert!(size_of::<EqContext>() == 0x40);
    assert!(offset_of!(EqContext, log_size) == 0x60 / 8);
    assert!(offset_of!(EqContext, interrupt) == 0xb0 / 8);
    assert!(offset_of!(EqContext, log_page_size) == 0xc0 / 8);
    assert!(offset_of!(EqContext, consumer) == 0x148 / 8);
    assert!(offset_of!(EqContext, producer) == 0x168 / 8);
    assert!(offset_of!(CreateEqIn, context) == 0x10);
    assert!(offset_of!(CreateEqIn, event_bitmask) == 0x2c0 / 8);
    assert!(size_of::<CreateEqIn>() == 0x110);
    assert!(offset_of!(CreateEqOut, eqn) == 0x0b);
    assert!(size_of::<CreateEqOut>() == 16);
};
