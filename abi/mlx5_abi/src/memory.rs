//! Memory keys and umems: how the device is told which memory it may reach (PRM, "Memory key
//! context"; `mlx5_ifc_mkc_bits`, `mlx5_ifc_create_mkey_in_bits`, `mlx5_ifc_umem_bits`).
//!
//! A key's number in commands is its 24-bit index; what queues and KLM lists name is the index
//! shifted left by 8, with a variant in the low byte, see [`mkey_from_index`].

use crate::message::{InHeader, OutHeader};
use crate::{U24, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// How a key translates addresses (`MLX5_MKC_ACCESS_MODE_*`).
pub mod access_mode {
    /// Bus addresses as they are.
    pub const PA: u8 = 0;
    /// By a list of pages of one size.
    pub const MTT: u8 = 1;
    /// By a list of keys, each for its own length.
    pub const KLM: u8 = 2;
    /// By a list of keys, each for the same length.
    pub const KSM: u8 = 3;
}

/// Bytes of an "octword", the unit of translation lists.
pub const OCTWORD_BYTES: usize = 16;

/// A memory key.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct MkeyContext {
    /// Bit 30: free. Bits 28:26: high part of the access mode. Bit 11: local write. Bit 10: local
    /// read. Bits 9:8: low part of the access mode.
    pub flags: U32,
    /// The queue pair it is for; [`MkeyContext::ANY_QP`].
    pub qpn: U24,
    /// The variant: low byte of the key.
    pub variant: u8,
    /// Zero.
    pub reserved0: U32,
    /// Bit 31: it covers all addresses (`length64`). Bits 23:0: the protection domain.
    pub length64_pd: U32,
    /// Its first address.
    pub start_addr: U64,
    /// Its length in bytes.
    pub length: U64,
    /// Without a use here.
    pub bsf_octword_size: U32,
    /// Zero.
    pub reserved1: [u8; 16],
    /// Octwords that its translation list can take.
    pub translations_octword_size: U32,
    /// Low 6 bits: log2 of a page of its MTT list.
    pub log_page_size: U32,
    /// Zero.
    pub reserved2: U32,
}

impl MkeyContext {
    /// In [`Self::flags`]: the key exists, but translates nothing yet.
    pub const FREE: u32 = 1 << 30;
    /// In [`Self::flags`]: the device may write.
    pub const LOCAL_WRITE: u32 = 1 << 11;
    /// In [`Self::flags`]: the device may read.
    pub const LOCAL_READ: u32 = 1 << 10;
    /// In [`Self::length64_pd`].
    pub const LENGTH64: u32 = 1 << 31;
    /// In [`Self::qpn`]: any queue.
    pub const ANY_QP: u32 = U24::MAX;

    /// Whose access mode it has, of [`access_mode`].
    pub const fn access_mode(&self) -> u8 {
        let flags = self.flags.get();
        let mode = ((flags >> 26 & 7) << 2) | (flags >> 8 & 3);
        mode.to_be_bytes()[3]
    }

    /// The bits of [`Self::flags`] for an access mode.
    pub const fn mode_flags(mode: u8) -> u32 {
        ((mode as u32 >> 2 & 7) << 26) | ((mode as u32 & 3) << 8)
    }
}

/// CREATE_MKEY's input without the translation list, which follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreateMkeyIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: U32,
    /// Bit 31: `pg_access`. Bit 30: the list lies in a umem.
    pub flags: U32,
    /// The key.
    pub context: MkeyContext,
    /// Zero.
    pub reserved1: [u8; 16],
    /// Octwords of the list that follows.
    pub translations_octword_actual_size: U32,
    /// Zero; a umem's number and offset.
    pub reserved2: [u8; 0xac],
}

/// CREATE_MKEY's output.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CreateMkeyOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved0: u8,
    /// The index.
    pub mkey_index: U24,
    /// Zero.
    pub reserved1: U32,
}

/// In [`CreateMkeyIn::flags`]: the list's low address bits say how a page may be accessed.
pub const CREATE_MKEY_PG_ACCESS: u32 = 1 << 31;

/// The key that queues and lists name.
pub const fn mkey_from_index(index: u32, variant: u8) -> u32 {
    (index << 8) | variant as u32
}

/// The index of a key.
pub const fn mkey_to_index(mkey: u32) -> u32 {
    mkey >> 8
}

/// An entry of a KLM list: a piece of the key's range, and the key for it. Lists are padded with
/// zeros to a multiple of [`KLM_LIST_ALIGN`] entries.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Klm {
    /// Length of the piece. 32 bits: 4 GiB are too long already.
    pub byte_count: U32,
    /// The key.
    pub mkey: U32,
    /// Where under that key the piece begins.
    pub address: U64,
}

/// KLM lists have a multiple of this many entries (64 bytes; Linux `mr.c`, `klm_byte_size`).
pub const KLM_LIST_ALIGN: usize = 4;

/// An entry of an MTT list: the bus address of a page. Lists are padded to whole octwords.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(transparent)]
pub struct Mtt(pub U64);

impl Mtt {
    /// In a umem's list: the device may read the page.
    pub const READ: u64 = 1 << 0;
    /// In a umem's list: the device may write the page.
    pub const WRITE: u64 = 1 << 1;
}

/// QUERY_SPECIAL_CONTEXTS' output (`mlx5_ifc_query_special_contexts_out_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QuerySpecialContextsOut {
    /// The header.
    pub header: OutHeader,
    /// Reads zeros, takes writes.
    pub dump_fill_mkey: U32,
    /// The reserved local key.
    pub resd_lkey: U32,
    /// The null key: reads zeros, forgets writes.
    pub null_mkey: U32,
    /// Without a use here.
    pub reserved: [u8; 12],
}

/// CREATE_UMEM's input without the list of pages, [`Mtt`]s with access bits, which follows. The
/// output is a [`ShortOut`](crate::message::ShortOut).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreateUmemIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: [u8; 8],
    /// Zero.
    pub reserved1: [u8; 16],
    /// Low 5 bits: log2 of a page, less 12. Bit 31: translated by the device.
    pub log_page_size: U32,
    /// Where in the first page it begins.
    pub page_offset: U32,
    /// Pages of the list.
    pub num_of_mtt: U64,
}

const _: () = {
    assert!(size_of::<MkeyContext>() == 64);
    assert!(offset_of!(MkeyContext, qpn) == 0x04);
    assert!(offset_of!(MkeyContext, length64_pd) == 0x0c);
    assert!(offset_of!(MkeyContext, start_addr) == 0x10);
    assert!(offset_of!(MkeyContext, length) == 0x18);
    assert!(offset_of!(MkeyContext, translations_octword_size) == 0x34);
    assert!(offset_of!(MkeyContext, log_page_size) == 0x38);
    assert!(offset_of!(CreateMkeyIn, flags) == 0x0c);
    assert!(offset_of!(CreateMkeyIn, context) == 0x10);
    assert!(offset_of!(CreateMkeyIn, translations_octword_actual_size) == 0x60);
    assert!(size_of::<CreateMkeyIn>() == 0x110);
    assert!(offset_of!(CreateMkeyOut, mkey_index) == 0x09);
    assert!(size_of::<CreateMkeyOut>() == 16);
    assert!(size_of::<Klm>() == 16);
    assert!(size_of::<Mtt>() == 8);
    assert!(offset_of!(QuerySpecialContextsOut, null_mkey) == 0x10);
    assert!(size_of::<QuerySpecialContextsOut>() == 0x20);
    assert!(offset_of!(CreateUmemIn, log_page_size) == 0x20);
    assert!(offset_of!(CreateUmemIn, page_offset) == 0x24);
    assert!(offset_of!(CreateUmemIn, num_of_mtt) == 0x28);
    assert!(size_of::<CreateUmemIn>() == 0x30);
};
