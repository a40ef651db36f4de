//! What messages have in common, and messages that have nothing else.

use crate::{CommandStatus, Opcode, U16, U24, U32};
use core::mem::size_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The begin of every input.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct InHeader {
    /// [`Opcode`].
    pub opcode: U16,
    /// User context; 0 is the function's own driver.
    pub uid: U16,
    /// Zero, or a tunnel to another function.
    pub reserved: U16,
    /// Says more about the opcode; the type of a general object.
    pub op_mod: U16,
}

impl InHeader {
    /// A header of the function's own driver.
    pub const fn new(opcode: Opcode, op_mod: u16) -> InHeader {
        InHeader {
            opcode: U16::new(opcode.0),
            uid: U16::new(0),
            reserved: U16::new(0),
            op_mod: U16::new(op_mod),
        }
    }
}

/// The begin of every output.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct OutHeader {
    /// [`CommandStatus`].
    pub status: u8,
    /// Zero.
    pub reserved: [u8; 3],
    /// Which of the firmware's checks failed; its own code, for reports.
    pub syndrome: U32,
}

impl OutHeader {
    /// The status, as a type of its own.
    pub const fn status(&self) -> CommandStatus {
        CommandStatus(self.status)
    }
}

/// An input of 16 bytes that names one object by 24 bits, or none.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ShortIn {
    /// The header.
    pub header: InHeader,
    /// Zero.
    pub reserved0: u8,
    /// The object: a key's index, the number of a domain, a table, a umem; for QUERY_VPORT_STATE
    /// and page commands zero.
    pub object: U24,
    /// Zero.
    pub reserved1: U32,
}

impl ShortIn {
    /// For one object.
    pub const fn new(opcode: Opcode, op_mod: u16, object: u32) -> ShortIn {
        ShortIn {
            header: InHeader::new(opcode, op_mod),
            reserved0: 0,
            object: U24::new(object),
            reserved1: U32::new(0),
        }
    }
}

/// An output of 16 bytes that names one object by 24 bits (an event queue by the low 8), or none.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ShortOut {
    /// The header.
    pub header: OutHeader,
    /// Zero.
    pub reserved0: u8,
    /// The new object.
    pub object: U24,
    /// Zero.
    pub reserved1: U32,
}

/// The begin of an input about a general object (PRM, "General object input header";
/// `mlx5_ifc_general_obj_in_cmd_hdr_bits`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct GeneralObjectIn {
    /// [`Opcode`].
    pub opcode: U16,
    /// User context.
    pub uid: U16,
    /// Zero, or a tunnel to another function.
    pub vhca_tunnel_id: U16,
    /// One of [`object_type`].
    pub obj_type: U16,
    /// Which object; zero at its creation.
    pub obj_id: U32,
    /// Zero for the objects here.
    pub op_param: U32,
}

impl GeneralObjectIn {
    /// For one object.
    pub const fn new(opcode: Opcode, obj_type: u16, obj_id: u32) -> GeneralObjectIn {
        GeneralObjectIn {
            opcode: U16::new(opcode.0),
            uid: U16::new(0),
            vhca_tunnel_id: U16::new(0),
            obj_type: U16::new(obj_type),
            obj_id: U32::new(obj_id),
            op_param: U32::new(0),
        }
    }
}

/// The begin of an output about a general object.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct GeneralObjectOut {
    /// The header.
    pub header: OutHeader,
    /// Which object.
    pub obj_id: U32,
    /// Zero.
    pub reserved: U32,
}

/// Types of general objects.
pub mod object_type {
    /// A virtqueue of a network device.
    pub const VIRTIO_NET_Q: u16 = 0x0d;
    /// Counters of a virtqueue.
    pub const VIRTIO_Q_COUNTERS: u16 = 0x1c;
}

const _: () = {
    assert!(size_of::<InHeader>() == 8);
    assert!(size_of::<OutHeader>() == 8);
    assert!(size_of::<ShortIn>() == 16);
    assert!(size_of::<ShortOut>() == 16);
    assert!(size_of::<GeneralObjectIn>() == 16);
    assert!(size_of::<GeneralObjectOut>() == 16);
};
