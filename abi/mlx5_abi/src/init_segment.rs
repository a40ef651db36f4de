//! The initialization segment at the begin of BAR 0, and the doorbells (PRM, "Initialization
//! segment"; `device.h`, `struct mlx5_init_seg`).
//!
//! Registers are big-endian: what a little-endian CPU reads is the swapped value.

/// Bytes of the segment's part that has a meaning here.
pub const BYTES: u64 = 0x1020;

/// u32: minor revision of the firmware in the high half, major in the low half.
pub const FW_REV: u64 = 0x00;
/// u32: revision of the command interface in the high half, sub-minor of the firmware in the low.
pub const CMDIF_REV_FW_SUB: u64 = 0x04;
/// u32: high half of the command page's address. Written first.
pub const CMDQ_ADDR_HIGH: u64 = 0x10;
/// u32: low half of the command page's address, a multiple of 4096. On reads the low byte says
/// what the queue looks like, see [`CommandQueueShape`]; bits 10:8 are the interface, one of
/// [`nic_interface`].
pub const CMDQ_ADDR_LOW: u64 = 0x14;
/// u32: the command doorbell, one bit for each entry.
pub const COMMAND_DOORBELL: u64 = 0x18;
/// u32: bit 31 is set while the firmware starts; no command before it is clear.
pub const INITIALIZING: u64 = 0x1fc;

/// In [`INITIALIZING`]: the firmware still starts.
pub const INITIALIZING_BIT: u32 = 1 << 31;

/// The command interface that these layouts describe.
pub const COMMAND_INTERFACE: u16 = 5;

/// What a register of a device that is gone reads, as any PCI read then.
pub const GONE: u32 = u32::MAX;

/// Largest number of command entries: the doorbell has 32 bits.
pub const COMMAND_ENTRIES_MAX: u32 = 32;

/// log2 of the command page's bytes.
pub const LOG_COMMAND_PAGE: u32 = 12;

/// Interfaces of a function (Linux `mlx5_core.h`, `MLX5_NIC_IFC_*`).
pub mod nic_interface {
    /// Of the full driver.
    pub const FULL: u32 = 0;
    /// None: the function is stopped. It is once the field **reads** so, which takes some time
    /// after it was written (Linux `fw.c`, `mlx5_cmd_fast_teardown_hca`).
    pub const DISABLED: u32 = 1;
    /// The device is reset by its software.
    pub const SW_RESET: u32 = 7;

    /// The field in [`CMDQ_ADDR_LOW`](super::CMDQ_ADDR_LOW) (Linux `health.c`,
    /// `mlx5_get_nic_state`).
    pub const fn from_register(value: u32) -> u32 {
        value >> 8 & 7
    }

    /// What to write so that a register which reads `value` has another interface, and the same
    /// address (Linux `health.c`, `mlx5_set_nic_state`).
    pub const fn to_register(value: u32, interface: u32) -> u32 {
        value & 0xffff_f000 | (interface & 7) << 8
    }
}

/// What the command queue looks like: the low byte of [`CMDQ_ADDR_LOW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandQueueShape {
    /// log2 of the number of entries.
    pub log_entries: u8,
    /// log2 of the bytes from one entry to the next.
    pub log_stride: u8,
}

impl CommandQueueShape {
    /// Takes it from the register's value.
    pub const fn from_register(value: u32) -> CommandQueueShape {
        let [.., low] = value.to_be_bytes();
        CommandQueueShape { log_entries: low >> 4, log_stride: low & 0xf }
    }

    /// As it stands in the register's low byte.
    pub const fn to_register(self) -> u32 {
        ((self.log_entries as u32 & 0xf) << 4) | (self.log_stride as u32 & 0xf)
    }
}

/// From the begin of a UAR page to the doorbell of event queues that arms as well; see
/// [`eq_doorbell`].
pub const UAR_EQ_ARM: u64 = 0x40;
/// From the begin of a UAR page to the doorbell of event queues that only tells the index.
pub const UAR_EQ_UPDATE: u64 = 0x48;
/// Bytes of a UAR page, and so from the begin of BAR 0 to page 1.
pub const UAR_PAGE_BYTES: u64 = 4096;

/// The value (before it is swapped to big-endian) that tells how far the driver has read an event
/// queue: its number, and the low 24 bits of the free-running index.
pub const fn eq_doorbell(eqn: u8, consumer_index: u32) -> u32 {
    ((eqn as u32) << 24) | (consumer_index & 0x00ff_ffff)
}
