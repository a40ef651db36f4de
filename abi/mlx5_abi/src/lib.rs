//! The firmware command interface of mlx5 devices, byte for byte. No behaviour.
//!
//! Sources, cited where a layout stands: the "Ethernet Adapters Programming Manual" that NVIDIA
//! publishes for ConnectX devices (called PRM here), with the names of its tables, and the field
//! tables of Linux (`include/linux/mlx5/device.h`, `mlx5_ifc.h` and `mlx5_ifc_vdpa.h`), which are
//! the public description of what the manual leaves out. All multi-byte fields are big-endian.
//!
//! | module | what |
//! |---|---|
//! | [`init_segment`] | the registers at the begin of BAR 0, and doorbells |
//! | [`command`] | the command queue: entries, mailboxes, tokens, signatures |
//! | [`opcode`], [`status`] | what is asked, and how it went |
//! | [`message`] | headers that messages share, and messages that are nothing but a header |
//! | [`setup`] | bring-up: pages, protection domain, vport |
//! | [`capability`] | QUERY_HCA_CAP |
//! | [`event`] | event queues |
//! | [`virtq`] | virtqueue objects and their counters |
//! | [`memory`] | memory keys, KLM and MTT lists, umems |
//! | [`rqt`] | receive queue tables |
//!
//! A layout that is wrong here is wrong in the driver and in the model alike and no test of theirs
//! would tell. So `tests/` holds byte vectors that were typed from the documents.
#![forbid(unsafe_code)]

pub mod capability;
pub mod command;
pub mod event;
pub mod init_segment;
pub mod memory;
pub mod message;
mod number;
pub mod opcode;
pub mod rqt;
pub mod setup;
pub mod status;
pub mod virtq;

pub use number::U24;
pub use opcode::Opcode;
pub use status::{CommandStatus, DeliveryStatus};
/// Big-endian numbers, as all fields here are.
pub use zerocopy::byteorder::big_endian::{U16, U32, U64};
