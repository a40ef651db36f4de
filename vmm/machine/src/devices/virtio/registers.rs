//! Numbers of the register file (virtio 1.3, 4.2.2) and where the machine puts it.

/// Where the registers of the first card lie: in the hole below 4 GiB, where other small machines
/// have theirs, too. A page for each card.
pub(crate) const MMIO_START: u64 = 0xd000_0000;
pub(crate) const MMIO_STRIDE: u64 = 0x1000;
/// One past the registers of the last card that there may be.
pub(crate) const MMIO_END: u64 = MMIO_START + MMIO_STRIDE * super::NICS_MAX as u64;

/// The cards' interrupt lines: those of a PC that nothing else here uses.
pub(super) const LINES: [u32; 8] = [5, 6, 7, 9, 10, 11, 12, 14];

pub(super) const MAGIC_VALUE: u64 = 0x000;
pub(super) const VERSION: u64 = 0x004;
pub(super) const DEVICE_ID: u64 = 0x008;
pub(super) const VENDOR_ID: u64 = 0x00c;
pub(super) const DEVICE_FEATURES: u64 = 0x010;
pub(super) const DEVICE_FEATURES_SELECT: u64 = 0x014;
pub(super) const DRIVER_FEATURES: u64 = 0x020;
pub(super) const DRIVER_FEATURES_SELECT: u64 = 0x024;
pub(super) const QUEUE_SELECT: u64 = 0x030;
pub(super) const QUEUE_SIZE_MAX: u64 = 0x034;
pub(super) const QUEUE_SIZE: u64 = 0x038;
pub(super) const QUEUE_READY: u64 = 0x044;
pub(super) const QUEUE_NOTIFY: u64 = 0x050;
pub(super) const INTERRUPT_STATUS: u64 = 0x060;
pub(super) const INTERRUPT_ACK: u64 = 0x064;
pub(super) const STATUS: u64 = 0x070;
pub(super) const QUEUE_DESCRIPTORS_LOW: u64 = 0x080;
pub(super) const QUEUE_DESCRIPTORS_HIGH: u64 = 0x084;
pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
/// Length and place of a shared memory region: all ones where there is none (4.2.2).
pub(super) const SHARED_MEMORY: std::ops::RangeInclusive<u64> = 0x0b0..=0x0bc;
pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
/// The configuration space, to the end of the page.
pub(super) const CONFIG: u64 = 0x100;

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"virt");
pub(super) const NOT_LEGACY: u32 = 2;
/// Nobody's number; drivers look at it for quirks only.
pub(super) const VENDOR: u32 = u32::from_le_bytes(*b"mrtl");

/// Bits of the device status (2.1).
pub(super) mod status {
    pub(in super::super) const DRIVER_OK: u32 = 4;
    pub(in super::super) const FEATURES_OK: u32 = 8;
    pub(in super::super) const NEEDS_RESET: u32 = 64;
    pub(in super::super) const FAILED: u32 = 128;
    /// All that a driver may set.
    pub(in super::super) const OF_DRIVER: u32 = 1 | 2 | DRIVER_OK | FEATURES_OK | FAILED;
}

/// Bits of the interrupt status (4.2.2).
pub(super) const INTERRUPT_QUEUE: u32 = 1;
pub(super) const INTERRUPT_CONFIG: u32 = 2;
