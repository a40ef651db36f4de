//! QUERY_HCA_CAP: what the device can (PRM, "QUERY_HCA_CAP"; `mlx5_ifc_cmd_hca_cap_bits`,
//! `mlx5_ifc_virtio_emulation_cap_bits`).
//!
//! Capability bits are numbered from the most significant one in those tables: bit 0x252 of the
//! general capabilities is bit 5 of byte 0x4a.

use crate::message::OutHeader;
use crate::{U16, U24, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kinds of capabilities, in bits 15:1 of `op_mod`.
pub mod kind {
    /// Of the device in general.
    pub const GENERAL: u16 = 0x00;
    /// Of virtqueues.
    pub const VDPA_EMULATION: u16 = 0x13;
}

/// `op_mod` for what is in force.
pub const fn op_mod_current(kind: u16) -> u16 {
    (kind << 1) | 1
}

/// Bytes of the capabilities in the output, whatever their kind.
const CAPABILITY_BYTES: usize = 0x1000;

/// Bytes of the whole output.
pub const QUERY_HCA_CAP_OUT_BYTES: usize = CAPABILITY_BYTES_OFFSET + CAPABILITY_BYTES;

/// Where in the output the capabilities begin.
const CAPABILITY_BYTES_OFFSET: usize = 0x10;

/// The begin of QUERY_HCA_CAP's output with general capabilities, as far as they are used here.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GeneralCapabilitiesOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved: [u8; 8],
    /// The capabilities.
    pub capabilities: GeneralCapabilities,
}

/// The general capabilities.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GeneralCapabilities {
    /// Not used here.
    pub reserved_00: [u8; 0x06],
    /// The function's number among all of the device.
    pub vhca_id: U16,
    /// Not used here.
    pub reserved_08: [u8; 0x15],
    /// Low 6 bits: log2 of the largest number of memory keys.
    pub log_max_mkey: u8,
    /// Not used here.
    pub reserved_1e: [u8; 0x02],
    /// How deep keys may refer to keys.
    pub max_indirection: u8,
    /// Low 7 bits: log2 of the largest memory region.
    pub log_max_mrw_sz: u8,
    /// Not used here.
    pub reserved_22: u8,
    /// Bit 6: there is a null key. Bits 5:0: log2 of the most entries of a KLM list.
    pub null_mkey_log_max_klm_list: u8,
    /// Not used here.
    pub reserved_24: [u8; 0x10],
    /// Bit 7: the function manages vports.
    pub vport_group_manager: u8,
    /// Not used here.
    pub reserved_35: [u8; 0x0d],
    /// Bits 7:6: whether mailboxes carry signatures. 0: none; 1: as at the begin, none as long as
    /// nothing was set (`MLX5_CMD_HCA_CAP_CMDIF_CHECKSUM_*`).
    pub cmdif_checksum: u8,
    /// Not used here.
    pub reserved_43: [u8; 0x07],
    /// Bit 5: umems and keys may belong to user context 0.
    pub umem_uid_0: u8,
    /// log2 of the adapter's page.
    pub log_page_size: u8,
    /// Not used here.
    pub reserved_4c: [u8; 0x26],
    /// Low 5 bits: log2 of the longest receive queue table.
    pub log_max_rqt_size: u8,
    /// Not used here.
    pub reserved_73: [u8; 0x0d],
    /// One bit for each type of general object.
    pub general_object_types: U64,
    /// Not used here.
    pub reserved_88: [u8; 0x05],
    /// Low 5 bits: log2 of the largest number of umems.
    pub log_max_umem: u8,
    /// Event queues of the function.
    pub max_num_eqs: U16,
    /// Not used here.
    pub reserved_90: [u8; 0x70],
}

impl GeneralCapabilities {
    /// In [`Self::umem_uid_0`].
    pub const UMEM_UID_0: u8 = 1 << 5;
    /// In [`Self::cmdif_checksum`]: the field.
    pub const CMDIF_CHECKSUM: u8 = 0b11 << 6;
    /// In [`Self::null_mkey_log_max_klm_list`].
    pub const NULL_MKEY: u8 = 1 << 6;

    /// Whether general objects of this type exist.
    pub const fn has_object_type(&self, object_type: u16) -> bool {
        object_type < 64 && self.general_object_types.get() >> object_type & 1 == 1
    }

    /// Entries of a receive queue table, at most.
    pub const fn rqt_entries_max(&self) -> u32 {
        1 << (self.log_max_rqt_size & 0x1f)
    }

    /// Whether the function manages vports, and hears of their changes.
    pub const fn manages_vports(&self) -> bool {
        self.vport_group_manager & 0x80 != 0
    }

    /// log2 of the most entries of a KLM list.
    pub const fn log_max_klm_list(&self) -> u8 {
        self.null_mkey_log_max_klm_list & 0x3f
    }
}

/// The begin of QUERY_HCA_CAP's output with the capabilities of virtqueues.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtioCapabilitiesOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved: [u8; 8],
    /// The capabilities.
    pub capabilities: VirtioCapabilities,
}

/// Capabilities of virtqueues.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtioCapabilities {
    /// Bits 15:13: descriptor tunnelling, Ethernet frames, virtio 1.0. Bits 12:0: features, by the
    /// numbers of [`device_feature`].
    pub offloads_features: U16,
    /// A bit for each event mode of [`virtq::event_mode`](crate::virtq::event_mode).
    pub event_modes: u8,
    /// Bit 0: split queues. Bit 1: packed queues.
    pub queue_types: u8,
    /// Not used here.
    pub max_tunnel_desc: U16,
    /// Low 5 bits: log2 of the bytes of a user's part of the doorbells.
    pub log_doorbell_stride: u8,
    /// Low 5 bits: log2 of all doorbells, in units of 4 KiB (Linux `infiniband/hw/mlx5/main.c`,
    /// `mlx5_ib_init_var_table`). Bits 7:5: whether the remaining fields, the addresses and the
    /// indices of a virtqueue may be modified.
    pub log_doorbell_bar_size: u8,
    /// Where in BAR 0 the doorbell of all virtqueues is; what is written there is the number of the
    /// queue, little-endian as virtio's notifications are (Linux `mlx5_vnet.c`,
    /// `mlx5_vdpa_kick_vq`: one address for all; DPDK `mlx5_vdpa_virtq.c` writes 32 bits).
    pub doorbell_bar_offset: U64,
    /// Not used here.
    pub max_emulated_devices: u8,
    /// Virtqueues of the function.
    pub max_num_virtio_queues: U24,
    /// Not used here.
    pub reserved_14: [u8; 6],
    /// Bit 4: descriptors may have a key of their own. Bit 3: a suspended queue may be made ready.
    pub suspend_abilities: u8,
    /// Not used here.
    pub reserved_1b: [u8; 5],
    /// A queue's umem 1 is at least `a * size + b` bytes long.
    pub umem_1: UmemSize,
    /// And its umem 2.
    pub umem_2: UmemSize,
    /// And its umem 3.
    pub umem_3: UmemSize,
    /// Not used here.
    pub reserved_38: [u8; 0xc8],
}

/// How long a umem of a virtqueue has to be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct UmemSize {
    /// Bytes for each entry of the queue.
    pub a: U32,
    /// Bytes on top.
    pub b: U32,
}

impl UmemSize {
    /// Bytes for a queue of this size.
    pub fn bytes_for(self, queue_size: u16) -> u64 {
        u64::from(self.a.get()) * u64::from(queue_size) + u64::from(self.b.get())
    }
}

impl VirtioCapabilities {
    /// In [`Self::offloads_features`]: queues carry Ethernet frames.
    pub const ETH_FRAME: u16 = 1 << 14;
    /// In [`Self::offloads_features`]: virtio 1.0 and later.
    pub const VIRTIO_1_0: u16 = 1 << 13;
    /// In [`Self::queue_types`].
    pub const SPLIT: u8 = 1 << 0;
    /// In [`Self::suspend_abilities`] (`desc_group_mkey_supported`, bit 0xd3).
    pub const DESC_GROUP_MKEY: u8 = 1 << 4;
    /// In [`Self::suspend_abilities`] (`freeze_to_rdy_supported`, bit 0xd4).
    pub const FREEZE_TO_RDY: u8 = 1 << 3;

    /// Bytes of all doorbells.
    pub const fn doorbell_bytes(&self) -> u64 {
        4096 << (self.log_doorbell_bar_size & 0x1f)
    }

    /// Whether queues can tell in this way, one of [`virtq::event_mode`](crate::virtq::event_mode).
    pub const fn has_event_mode(&self, mode: u8) -> bool {
        self.event_modes >> mode & 1 == 1
    }

    /// The features that queues can offer, by the numbers of [`device_feature`].
    pub const fn features(&self) -> u16 {
        self.offloads_features.get() & 0x1fff
    }
}

/// Numbers of the features in a capability's mask and in a queue's (`MLX5_VIRTIO_NET_F_*`).
pub mod device_feature {
    /// Receive buffers may be merged.
    pub const MRG_RXBUF: u16 = 2;
    /// The guest takes TSO frames, IPv6.
    pub const GUEST_TSO6: u16 = 7;
    /// The guest takes TSO frames, IPv4.
    pub const GUEST_TSO4: u16 = 8;
    /// The guest takes frames with partial checksums.
    pub const GUEST_CSUM: u16 = 9;
    /// The device takes frames with partial checksums.
    pub const CSUM: u16 = 10;
    /// The device takes TSO frames, IPv6.
    pub const HOST_TSO6: u16 = 11;
    /// The device takes TSO frames, IPv4.
    pub const HOST_TSO4: u16 = 12;
}

const _: () = {
    assert!(QUERY_HCA_CAP_OUT_BYTES == 0x1010);
    assert!(offset_of!(GeneralCapabilities, vhca_id) == 0x30 / 8);
    assert!(offset_of!(GeneralCapabilities, log_max_mkey) == 0xe8 / 8);
    assert!(offset_of!(GeneralCapabilities, max_indirection) == 0x100 / 8);
    assert!(offset_of!(GeneralCapabilities, null_mkey_log_max_klm_list) == 0x118 / 8);
    assert!(offset_of!(GeneralCapabilities, cmdif_checksum) == 0x210 / 8);
    assert!(offset_of!(GeneralCapabilities, umem_uid_0) == 0x250 / 8);
    assert!(offset_of!(GeneralCapabilities, log_page_size) == 0x258 / 8);
    assert!(offset_of!(GeneralCapabilities, vport_group_manager) == 0x1a0 / 8);
    assert!(offset_of!(GeneralCapabilities, log_max_rqt_size) == 0x390 / 8);
    assert!(offset_of!(GeneralCapabilities, general_object_types) == 0x400 / 8);
    assert!(offset_of!(GeneralCapabilities, log_max_umem) == 0x468 / 8);
    assert!(offset_of!(GeneralCapabilities, max_num_eqs) == 0x470 / 8);
    assert!(size_of::<GeneralCapabilities>() == 0x100);
    assert!(offset_of!(VirtioCapabilities, log_doorbell_stride) == 0x30 / 8);
    assert!(offset_of!(VirtioCapabilities, doorbell_bar_offset) == 0x40 / 8);
    assert!(offset_of!(VirtioCapabilities, max_num_virtio_queues) == 0x88 / 8);
    assert!(offset_of!(VirtioCapabilities, suspend_abilities) == 0xd0 / 8);
    assert!(offset_of!(VirtioCapabilities, umem_1) == 0x100 / 8);
    assert!(offset_of!(VirtioCapabilities, umem_3) == 0x180 / 8);
    assert!(size_of::<VirtioCapabilities>() == 0x100);
};
