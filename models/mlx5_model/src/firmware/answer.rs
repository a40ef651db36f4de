//! How a command ends: with an output, or with a status that says why not.

use martlet_mlx5_abi::CommandStatus;
use martlet_mlx5_abi::message::{GeneralObjectOut, OutHeader, ShortOut};
use martlet_mlx5_abi::{U24, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Why a command was not done. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: CommandStatus,
    /// Which check failed, for reports: the model's own numbers, as a firmware has its own.
    pub(super) syndrome: u32,
}

/// An output, or a refusal.
pub(super) type Answer = Result<Vec<u8>, Refusal>;

/// A refusal with a syndrome.
pub(super) const fn refuse(status: CommandStatus, syndrome: u32) -> Refusal {
    Refusal { status, syndrome }
}

/// The header of an output.
pub(super) fn header(status: CommandStatus, syndrome: u32) -> OutHeader {
    OutHeader { status: status.0, reserved: [0; 3], syndrome: U32::new(syndrome) }
}

/// An output without anything but a header.
pub(super) fn done() -> Answer {
    short(0)
}

/// An output that names one object by 24 bits.
pub(super) fn short(object: u32) -> Answer {
    bytes(&ShortOut {
        header: header(CommandStatus::OK, 0),
        reserved0: 0,
        object: U24::new(object),
        reserved1: U32::new(0),
    })
}

/// An output that names a general object.
pub(super) fn general(object: u32) -> Answer {
    bytes(&general_header(object))
}

/// The header of an output about a general object.
pub(super) fn general_header(object: u32) -> GeneralObjectOut {
    GeneralObjectOut {
        header: header(CommandStatus::OK, 0),
        obj_id: U32::new(object),
        reserved: U32::new(0),
    }
}

/// An output.
pub(super) fn bytes(output: &(impl IntoBytes + Immutable)) -> Answer {
    Ok(output.as_bytes().to_vec())
}

/// An output of nothing but zeros behind a good header.
pub(super) fn zeroed<T: FromBytes>() -> T {
    T::new_zeroed()
}

/// Reads an input; too short is a refusal.
pub(super) fn parse<T: FromBytes + KnownLayout + Immutable>(head: &[u8]) -> Result<T, Refusal> {
    let parsed = T::read_from_prefix(head);
    parsed.map(|(value, _)| value).map_err(|_| refuse(CommandStatus::BAD_INPUT_LENGTH, 0x100))
}
