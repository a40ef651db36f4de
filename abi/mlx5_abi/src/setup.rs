//! Bring-up: the function's pages, its vport. Commands that are nothing but a header and an object
//! (ALLOC_PD, ALLOC_UAR, ...) use [`ShortIn`](crate::message::ShortIn) and
//! [`ShortOut`](crate::message::ShortOut).

use crate::message::{InHeader, OutHeader};
use crate::{Opcode, U16, U32};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// QUERY_PAGES: pages needed before anything else.
pub const QUERY_PAGES_BOOT: u16 = 1;
/// QUERY_PAGES: pages needed before INIT_HCA.
pub const QUERY_PAGES_INIT: u16 = 2;
/// MANAGE_PAGES: the pages that were asked for can't be had.
pub const MANAGE_PAGES_CANNOT_GIVE: u16 = 0;
/// MANAGE_PAGES: here are pages.
pub const MANAGE_PAGES_GIVE: u16 = 1;
/// MANAGE_PAGES: give pages back.
pub const MANAGE_PAGES_TAKE: u16 = 2;

/// Bytes of a page that firmware is given.
pub const FIRMWARE_PAGE_BYTES: u64 = 4096;

/// An input about the function and a count: ENABLE_HCA, QUERY_PAGES, and the begin of
/// MANAGE_PAGES, which is followed by an address of 8 bytes for each page that is given (PRM,
/// "MANAGE_PAGES"; `mlx5_ifc_manage_pages_in_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PagesIn {
    /// The header.
    pub header: InHeader,
    /// Zero: the pages are not those of an embedded CPU.
    pub reserved: U16,
    /// The function; 0 is the one that the command queue belongs to.
    pub function_id: U16,
    /// Pages that are given or taken.
    pub entries: U32,
}

impl PagesIn {
    /// For a function and a number of pages.
    pub const fn new(opcode: Opcode, op_mod: u16, function_id: u16, entries: u32) -> PagesIn {
        PagesIn {
            header: InHeader::new(opcode, op_mod),
            reserved: U16::new(0),
            function_id: U16::new(function_id),
            entries: U32::new(entries),
        }
    }
}

/// QUERY_PAGES' output (`mlx5_ifc_query_pages_out_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QueryPagesOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved: U16,
    /// The function.
    pub function_id: U16,
    /// How many pages; signed, negative for pages to take back.
    pub pages: U32,
}

/// The begin of MANAGE_PAGES' output; an address for each page that was taken back follows.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ManagePagesOut {
    /// The header.
    pub header: OutHeader,
    /// Pages that were taken back.
    pub entries: U32,
    /// Zero.
    pub reserved: U32,
}

/// An input about a vport: QUERY_VPORT_STATE, QUERY_NIC_VPORT_CONTEXT (PRM, "QUERY_VPORT_STATE").
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VportIn {
    /// The header; `op_mod` 0 is the function's own side of the vport.
    pub header: InHeader,
    /// Bit 15: another function's vport.
    pub other_vport: U16,
    /// Which; 0 with `other_vport` clear is the function's own.
    pub vport_number: U16,
    /// Zero; for QUERY_NIC_VPORT_CONTEXT, which list of addresses to add.
    pub reserved: U32,
}

impl VportIn {
    /// For the function's own vport.
    pub const fn own(opcode: Opcode) -> VportIn {
        VportIn {
            header: InHeader::new(opcode, 0),
            other_vport: U16::new(0),
            vport_number: U16::new(0),
            reserved: U32::new(0),
        }
    }
}

/// QUERY_VPORT_STATE's output (`mlx5_ifc_query_vport_state_out_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QueryVportStateOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved0: U32,
    /// Largest speed, where it is reported.
    pub max_tx_speed: U16,
    /// Zero.
    pub reserved1: u8,
    /// High nibble: what the administrator wants. Low nibble: [`VPORT_UP`] or [`VPORT_DOWN`].
    pub state: u8,
}

/// In the low nibble of [`QueryVportStateOut::state`]: no link.
pub const VPORT_DOWN: u8 = 0;
/// In the low nibble of [`QueryVportStateOut::state`]: the link is up.
pub const VPORT_UP: u8 = 1;

impl QueryVportStateOut {
    /// Whether the link is up.
    pub const fn is_up(&self) -> bool {
        self.state & 0xf == VPORT_UP
    }
}

/// QUERY_NIC_VPORT_CONTEXT's output without lists of addresses (PRM, "NIC_Vport Context";
/// `mlx5_ifc_nic_vport_context_bits` from byte 0x10).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryNicVportContextOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved0: [u8; 8],
    /// Fields without a use here.
    pub reserved1: [u8; 0x26],
    /// Largest frame: its payload and [`FRAME_OVERHEAD_BYTES`].
    pub mtu: U16,
    /// Fields without a use here.
    pub reserved2: [u8; 0xce],
    /// The vport's own MAC address.
    pub mac: [u8; 6],
    /// Fields without a use here.
    pub reserved3: [u8; 4],
}

/// Bytes of a frame that the vport's MTU counts besides the payload: Ethernet header 14, VLAN tag 4,
/// checksum 4 (Linux `mlx5_vdpa.h`, `MLX5V_ETH_HARD_MTU`; `mlx5_vnet.c`, `query_mtu`).
pub const FRAME_OVERHEAD_BYTES: u16 = 22;

/// INIT_HCA's input (`mlx5_ifc_init_hca_in_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct InitHcaIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: U32,
    /// Low 14 bits: a number of the software's choice for the function; zero for none.
    pub sw_vhca_id: U16,
    /// Zero.
    pub reserved1: U16,
    /// Who owns the function, for steering between functions of one owner; zero for nobody.
    pub sw_owner_id: [u8; 16],
}

/// The begin of SET_HCA_CAP's input; the capabilities follow, as long as those of a query
/// (`mlx5_ifc_set_hca_cap_in_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SetHcaCapIn {
    /// The header; `op_mod` is the kind of capabilities, shifted by one.
    pub header: InHeader,
    /// Zero.
    pub reserved: [u8; 8],
}

/// SET_ISSI's input (`mlx5_ifc_set_issi_in_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SetIssiIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: U16,
    /// The interface step sequence.
    pub issi: U16,
    /// Zero.
    pub reserved1: U32,
}

/// The interface step sequence that virtqueues need.
pub const ISSI: u16 = 1;

const _: () = {
    assert!(size_of::<PagesIn>() == 16);
    assert!(size_of::<QueryPagesOut>() == 16);
    assert!(size_of::<ManagePagesOut>() == 16);
    assert!(size_of::<VportIn>() == 16);
    assert!(size_of::<QueryVportStateOut>() == 16);
    assert!(offset_of!(QueryVportStateOut, state) == 0x0f);
    assert!(offset_of!(QueryNicVportContextOut, mtu) == 0x10 + 0x26);
    assert!(offset_of!(QueryNicVportContextOut, mac) == 0x10 + 0xf6);
    assert!(size_of::<QueryNicVportContextOut>() == 0x110);
    assert!(size_of::<SetIssiIn>() == 16);
    assert!(offset_of!(InitHcaIn, sw_vhca_id) == 0x0c);
    assert!(size_of::<InitHcaIn>() == 32);
    assert!(size_of::<SetHcaCapIn>() == 16);
};
