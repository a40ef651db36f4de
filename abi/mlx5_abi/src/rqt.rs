//! Receive queue tables: over which queues received frames are spread (PRM, "RQT Context";
//! `mlx5_ifc_rqtc_bits`).

use crate::message::InHeader;
use crate::{U16, U24, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// CREATE_RQT's and MODIFY_RQT's input; the list of queues follows, a u32 each: ids of virtqueue
/// objects. CREATE_RQT's output is a [`ShortOut`](crate::message::ShortOut).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RqtIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: u8,
    /// Which table; zero at its creation.
    pub rqtn: U24,
    /// Zero.
    pub reserved1: U32,
    /// What MODIFY_RQT changes: [`MODIFY_LIST`].
    pub modify_bitmask: U64,
    /// Zero.
    pub reserved2: [u8; 8],
    /// The table.
    pub context: RqtContext,
}

/// In [`RqtIn::modify_bitmask`]: the list and its length.
pub const MODIFY_LIST: u64 = 1;

/// A receive queue table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RqtContext {
    /// Zero.
    pub reserved0: [u8; 0x14],
    /// Low 3 bits: what the list names; [`LIST_OF_VIRTQUEUES`].
    pub list_q_type: u8,
    /// Zero.
    pub reserved1: u8,
    /// The most entries it can ever have, a power of two.
    pub max_size: U16,
    /// Zero.
    pub reserved2: U16,
    /// Entries of the list, a power of two.
    pub actual_size: U16,
    /// Zero.
    pub reserved3: [u8; 0xd4],
}

/// In [`RqtContext::list_q_type`]: the list names virtqueue objects.
pub const LIST_OF_VIRTQUEUES: u8 = 1;

const _: () = {
    assert!(offset_of!(RqtIn, rqtn) == 0x09);
    assert!(offset_of!(RqtIn, modify_bitmask) == 0x10);
    assert!(offset_of!(RqtIn, context) == 0x20);
    assert!(offset_of!(RqtContext, list_q_type) == 0xa0 / 8);
    assert!(offset_of!(RqtContext, max_size) == 0xb0 / 8);
    assert!(offset_of!(RqtContext, actual_size) == 0xd0 / 8);
    assert!(size_of::<RqtContext>() == 0x780 / 8);
    assert!(size_of::<RqtIn>() == 0x110);
};
