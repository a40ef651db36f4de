//! Virtqueues of a network device: a general object whose firmware state is what suspend and
//! resume are about (`mlx5_ifc_vdpa.h`, `mlx5_ifc_virtio_net_q_object_bits`,
//! `mlx5_ifc_virtio_q_bits`).

use crate::message::{GeneralObjectIn, GeneralObjectOut};
use crate::number::open_enum;
use crate::{U16, U24, U32, U64};
use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

open_enum! {
    /// The state of a virtqueue object (`MLX5_VIRTIO_NET_Q_OBJECT_STATE_*`).
    ///
    /// INIT goes to RDY, RDY to SUSPEND, and SUSPEND to RDY with
    /// [`VirtioCapabilities::FREEZE_TO_RDY`](crate::capability::VirtioCapabilities::FREEZE_TO_RDY).
    /// Nothing leaves ERR but the object's end. Other fields are modified in INIT and SUSPEND
    /// only, except for the dirty bitmap's. In one command with INIT to RDY they are ignored.
    VirtqState(u8) {
        /// Made, and not yet started.
        INIT = 0x0,
        /// It passes frames.
        RDY = 0x1,
        /// Stopped, with indices that stand still.
        SUSPEND = 0x2,
        /// Broken.
        ERR = 0x3,
    }
}

/// What a MODIFY changes: bits of [`VirtioNetQueue::modify_field_select`]
/// (`MLX5_VIRTQ_MODIFY_MASK_*`).
pub mod modify {
    /// The state.
    pub const STATE: u64 = 1 << 0;
    /// Where dirty pages are logged.
    pub const DIRTY_BITMAP_PARAMS: u64 = 1 << 3;
    /// Whether they are logged.
    pub const DIRTY_BITMAP_DUMP_ENABLE: u64 = 1 << 4;
    /// The three addresses of the rings.
    pub const ADDRESSES: u64 = 1 << 6;
    /// The available index.
    pub const AVAIL_INDEX: u64 = 1 << 7;
    /// The used index.
    pub const USED_INDEX: u64 = 1 << 8;
    /// The memory key of rings and buffers.
    pub const VIRTIO_Q_MKEY: u64 = 1 << 11;
    /// The features.
    pub const QUEUE_FEATURES: u64 = 1 << 12;
}

/// How a queue tells that it has used descriptors (`MLX5_VIRTIO_Q_EVENT_MODE_*`).
pub mod event_mode {
    /// Not at all.
    pub const NONE: u8 = 0;
    /// By a completion of a queue pair.
    pub const QP: u8 = 1;
    /// By an interrupt vector.
    pub const MSIX: u8 = 2;
}

/// In [`VirtioQueue::kind`]: a split queue.
pub const SPLIT: u8 = 0;

/// The object of a virtqueue.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtioNetQueue {
    /// What a MODIFY changes, see [`modify`].
    pub modify_field_select: U64,
    /// Zero.
    pub reserved0: U32,
    /// Another function whose queue it is; zero without one.
    pub vhca_id: U16,
    /// Zero.
    pub reserved1: U16,
    /// Bits 31:22: features 12 to 3. Bit 21: dirty pages are logged. Bits 20:16: log2 of a page
    /// of the log, less 12. Bits 3:0: the state.
    pub features_log_state: U32,
    /// Low 3 bits: features 2 to 0.
    pub features_2_0: u8,
    /// A transmit queue's TIS, a receive queue's queue pair; zero without one.
    pub tisn_or_qpn: U24,
    /// Key of the dirty bitmap.
    pub dirty_bitmap_mkey: U32,
    /// Bytes of the dirty bitmap.
    pub dirty_bitmap_size: U32,
    /// Address of the dirty bitmap under its key.
    pub dirty_bitmap_addr: U64,
    /// The next entry of the driver's ring that the device will take.
    pub hw_available_index: U16,
    /// The next entry of the device's ring that it will fill.
    pub hw_used_index: U16,
    /// Zero.
    pub reserved2: [u8; 20],
    /// The queue as virtio knows it.
    pub virtio_q: VirtioQueue,
}

/// A virtqueue as virtio knows it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtioQueue {
    /// [`SPLIT`], or 1 for packed.
    pub kind: u8,
    /// Low 3 bits: one of [`event_mode`].
    pub event_mode: u8,
    /// Its number: even for receive, odd for transmit.
    pub queue_index: U16,
    /// Bit 7: full emulation. Bit 6: virtio 1.0. Low nibble: what it carries; [`Self::ETH_FRAME`].
    pub flags: u8,
    /// With [`event_mode::QP`] a queue pair, with [`event_mode::MSIX`] a vector.
    pub event_qpn_or_msix: U24,
    /// Which of several doorbells is its own, with full emulation; zero here.
    pub doorbell_stride_index: U16,
    /// Descriptors, a power of two. Can't be modified.
    pub queue_size: U16,
    /// Zero.
    pub device_emulation_id: U32,
    /// Address of the descriptor table under the key.
    pub desc_addr: U64,
    /// Address of the device's ring.
    pub used_addr: U64,
    /// Address of the driver's ring.
    pub available_addr: U64,
    /// The memory key of rings and buffers.
    pub mkey: U32,
    /// Zero.
    pub max_tunnel_desc: U16,
    /// Zero.
    pub reserved0: u8,
    /// In a QUERY of a queue in ERR: why.
    pub error_type: u8,
    /// Memory for the device's own use.
    pub umem: [UmemRef; 3],
    /// Its counters; zero without.
    pub counter_set_id: U32,
    /// Zero.
    pub reserved1: u8,
    /// Protection domain of the keys.
    pub pd: U24,
    /// Zero.
    pub reserved2: U32,
    /// The memory key of the rings alone; zero without.
    pub desc_group_mkey: U32,
    /// Zero.
    pub reserved3: [u8; 16],
}

/// Where in a umem a queue has its memory.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct UmemRef {
    /// Which umem.
    pub id: U32,
    /// How many bytes of it.
    pub bytes: U32,
    /// From which byte on.
    pub offset: U64,
}

impl VirtioQueue {
    /// In [`Self::flags`]: virtio 1.0.
    pub const VIRTIO_1_0: u8 = 1 << 6;
    /// In the low nibble of [`Self::flags`]: Ethernet frames (`offload_type`;
    /// `MLX5_VIRTIO_Q_OFFLOAD_TYPE_ETH_FRAME`, DESC_TUNNEL is 1).
    pub const ETH_FRAME: u8 = 0;
}

impl VirtioNetQueue {
    const LOG_ENABLED: u32 = 1 << 21;
    const LOG_PAGE_SHIFT: u32 = 16;
    const FEATURES_SHIFT: u32 = 22;

    /// The state.
    pub const fn state(&self) -> VirtqState {
        let [.., low] = self.features_log_state.get().to_be_bytes();
        VirtqState(low & 0xf)
    }

    /// Sets the state.
    pub fn set_state(&mut self, state: VirtqState) {
        let word = self.features_log_state.get() & !0xf;
        self.features_log_state = U32::new(word | u32::from(state.0 & 0xf));
    }

    /// The features, by the numbers of [`device_feature`](crate::capability::device_feature).
    pub const fn features(&self) -> u16 {
        let [high, low, ..] = self.features_log_state.get().to_be_bytes();
        let upper = u16::from_be_bytes([high, low]) >> 6;
        (upper << 3) | (self.features_2_0 & 7) as u16
    }

    /// Sets the features: 13 bits.
    pub fn set_features(&mut self, features: u16) {
        let word = self.features_log_state.get() & !(0x3ff << Self::FEATURES_SHIFT);
        let upper = u32::from(features >> 3) & 0x3ff;
        self.features_log_state = U32::new(word | (upper << Self::FEATURES_SHIFT));
        self.features_2_0 = features.to_be_bytes()[1] & 7;
    }

    /// Whether dirty pages are logged.
    pub const fn is_logging(&self) -> bool {
        self.features_log_state.get() & Self::LOG_ENABLED != 0
    }

    /// Sets whether dirty pages are logged.
    pub fn set_logging(&mut self, on: bool) {
        let word = self.features_log_state.get() & !Self::LOG_ENABLED;
        self.features_log_state = U32::new(if on { word | Self::LOG_ENABLED } else { word });
    }

    /// log2 of a page of the dirty log, less 12.
    pub const fn log_page(&self) -> u8 {
        let [_, byte, ..] = self.features_log_state.get().to_be_bytes();
        byte & 0x1f
    }

    /// Sets log2 of a page of the dirty log, less 12: 5 bits.
    pub fn set_log_page(&mut self, log_page: u8) {
        let word = self.features_log_state.get() & !(0x1f << Self::LOG_PAGE_SHIFT);
        let bits = u32::from(log_page & 0x1f) << Self::LOG_PAGE_SHIFT;
        self.features_log_state = U32::new(word | bits);
    }
}

/// CREATE's and MODIFY's input for a virtqueue. The output is a [`GeneralObjectOut`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtqIn {
    /// The header.
    pub header: GeneralObjectIn,
    /// The object.
    pub object: VirtioNetQueue,
}

/// QUERY's output for a virtqueue.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryVirtqOut {
    /// The header.
    pub header: GeneralObjectOut,
    /// The object.
    pub object: VirtioNetQueue,
}

/// Counters of a virtqueue (`mlx5_ifc_virtio_q_counters_bits`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VirtqCounters {
    /// What a MODIFY changes; none is used here.
    pub modify_field_select: U64,
    /// Zero.
    pub reserved0: [u8; 8],
    /// Descriptor chains taken from the driver's ring.
    pub received_desc: U64,
    /// Descriptor chains given back in the device's ring.
    pub completed_desc: U64,
    /// Completions with an error.
    pub error_cqes: U32,
    /// Descriptors that make no sense.
    pub bad_desc_errors: U32,
    /// Chains that are too long.
    pub exceed_max_chain: U32,
    /// Buffers that the key does not cover.
    pub invalid_buffer: U32,
    /// Zero.
    pub reserved1: [u8; 0x50],
}

/// CREATE's input for counters. The output is a [`GeneralObjectOut`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CountersIn {
    /// The header.
    pub header: GeneralObjectIn,
    /// The object.
    pub object: VirtqCounters,
}

/// QUERY's output for counters.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryCountersOut {
    /// The header.
    pub header: GeneralObjectOut,
    /// The object.
    pub object: VirtqCounters,
}

const _: () = {
    assert!(offset_of!(VirtioNetQueue, vhca_id) == 0x0c);
    assert!(offset_of!(VirtioNetQueue, features_log_state) == 0x10);
    assert!(offset_of!(VirtioNetQueue, features_2_0) == 0x14);
    assert!(offset_of!(VirtioNetQueue, tisn_or_qpn) == 0x15);
    assert!(offset_of!(VirtioNetQueue, dirty_bitmap_mkey) == 0x18);
    assert!(offset_of!(VirtioNetQueue, dirty_bitmap_size) == 0x1c);
    assert!(offset_of!(VirtioNetQueue, dirty_bitmap_addr) == 0x20);
    assert!(offset_of!(VirtioNetQueue, hw_available_index) == 0x28);
    assert!(offset_of!(VirtioNetQueue, hw_used_index) == 0x2a);
    assert!(offset_of!(VirtioNetQueue, virtio_q) == 0x40);
    assert!(size_of::<VirtioNetQueue>() == 192);
    assert!(offset_of!(VirtioQueue, flags) == 0x04);
    assert!(offset_of!(VirtioQueue, doorbell_stride_index) == 0x08);
    assert!(offset_of!(VirtioQueue, queue_size) == 0x0a);
    assert!(offset_of!(VirtioQueue, desc_addr) == 0x10);
    assert!(offset_of!(VirtioQueue, used_addr) == 0x18);
    assert!(offset_of!(VirtioQueue, available_addr) == 0x20);
    assert!(offset_of!(VirtioQueue, mkey) == 0x28);
    assert!(offset_of!(VirtioQueue, error_type) == 0x2f);
    assert!(offset_of!(VirtioQueue, umem) == 0x30);
    assert!(size_of::<UmemRef>() == 16);
    assert!(offset_of!(VirtioQueue, counter_set_id) == 0x60);
    assert!(offset_of!(VirtioQueue, pd) == 0x65);
    assert!(offset_of!(VirtioQueue, desc_group_mkey) == 0x6c);
    assert!(size_of::<VirtioQueue>() == 128);
    assert!(size_of::<VirtqIn>() == 208);
    assert!(size_of::<QueryVirtqOut>() == 208);
    assert!(offset_of!(VirtqCounters, received_desc) == 0x10);
    assert!(offset_of!(VirtqCounters, error_cqes) == 0x20);
    assert!(size_of::<VirtqCounters>() == 128);
};
