//! The card's registers (virtio 1.3, 4.2.2). Each access leaves the guest.

use core::arch::asm;

pub const MAGIC_VALUE: u64 = 0x000;
pub const VERSION: u64 = 0x004;
pub const DEVICE_ID: u64 = 0x008;
pub const DEVICE_FEATURES: u64 = 0x010;
pub const DEVICE_FEATURES_SELECT: u64 = 0x014;
pub const DRIVER_FEATURES: u64 = 0x020;
pub const DRIVER_FEATURES_SELECT: u64 = 0x024;
pub const QUEUE_SELECT: u64 = 0x030;
pub const QUEUE_SIZE_MAX: u64 = 0x034;
pub const QUEUE_SIZE: u64 = 0x038;
pub const QUEUE_READY: u64 = 0x044;
pub const QUEUE_NOTIFY: u64 = 0x050;
pub const STATUS: u64 = 0x070;
pub const QUEUE_DESCRIPTORS: u64 = 0x080;
pub const QUEUE_DRIVER: u64 = 0x090;
pub const QUEUE_DEVICE: u64 = 0x0a0;
pub const CONFIG: u64 = 0x100;

pub const MAGIC: u32 = u32::from_le_bytes(*b"virt");
pub const VERSION_NOT_LEGACY: u32 = 2;
pub const NETWORK_CARD: u32 = 1;

/// Bits of the status (2.1).
pub const ACKNOWLEDGE: u32 = 1;
pub const DRIVER: u32 = 2;
pub const DRIVER_OK: u32 = 4;
pub const FEATURES_OK: u32 = 8;
pub const NEEDS_RESET: u32 = 64;

/// Where a card's registers lie in the program's linear address space.
#[derive(Clone, Copy)]
pub struct Registers(pub *mut u8);

impl Registers {
    /// # Safety
    /// The card's registers are here. The form of the instruction is part of what the program and
    /// its VMM agree on: a VMM without KVM decodes it itself.
    #[inline(never)]
    pub unsafe fn read(self, offset: u64) -> u32 {
        let value: u32;
        let at = self.0.wrapping_add(offset as usize);
        // SAFETY: the caller's promise.
        unsafe {
            asm!("mov eax, dword ptr [rdx]", out("eax") value, in("rdx") at,
                options(nostack, preserves_flags));
        }
        value
    }

    /// # Safety
    /// As for [`Registers::read`].
    #[inline(never)]
    pub unsafe fn write(self, offset: u64, value: u32) {
        let at = self.0.wrapping_add(offset as usize);
        // SAFETY: the caller's promise.
        unsafe {
            asm!("mov dword ptr [rdx], eax", in("eax") value, in("rdx") at,
                options(nostack, preserves_flags));
        }
    }

    /// Writes an address to the two registers at `offset`.
    ///
    /// # Safety
    /// As for [`Registers::read`].
    pub unsafe fn write_address(self, offset: u64, address: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            self.write(offset, address as u32);
            self.write(offset + 4, (address >> 32) as u32);
        }
    }
}
