//! Split virtqueues from the driver's side (virtio 1.3, 2.7).
//!
//! ```text
//! 0                16 * size           + 6 + 2 * size, rounded up to 4
//! | descriptors .. | driver's ring ..  | device's ring ..
//! ```

use super::registers::{QUEUE_NOTIFY, Registers};
use core::sync::atomic::{Ordering, compiler_fence, fence};

const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;
/// The card writes to this buffer.
pub const WRITE: u16 = 2;
/// The chain goes on.
pub const NEXT: u16 = 1;

/// One queue. All its memory is in one piece.
#[derive(Clone, Copy)]
pub struct Queue {
    /// Where its rings begin, in the program's linear address space.
    pub at: *mut u8,
    /// The same as a guest physical address.
    pub gpa: u64,
    /// Descriptors, a power of two.
    pub size: u64,
    /// Whether the card may interrupt. Nobody here listens.
    pub interrupts: bool,
}

impl Queue {
    /// Offset of the driver's ring.
    pub fn driver_offset(self) -> u64 {
        self.size * 16
    }

    /// Offset of the device's ring.
    pub fn device_offset(self) -> u64 {
        (self.driver_offset() + 6 + self.size * 2 + 3) & !3
    }

    /// The guest physical address of something behind the begin.
    pub fn guest_physical(self, offset: u64) -> u64 {
        self.gpa.wrapping_add(offset)
    }

    fn pointer<T>(self, offset: u64) -> *mut T {
        self.at.wrapping_add(offset as usize).cast()
    }

    fn slot(self, index: u64) -> u64 {
        index & (self.size - 1)
    }

    /// Describes a buffer.
    ///
    /// # Safety
    /// The queue is this program's, and the card does not look at this descriptor now.
    pub unsafe fn describe(self, slot: u64, address: u64, length: u32, flags: u16, next: u16) {
        let descriptor: *mut u64 = self.pointer(slot * 16);
        // SAFETY: the caller's promise; `slot` is below the size.
        unsafe {
            descriptor.write_volatile(address);
            let rest = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
            descriptor.add(1).write_volatile(rest);
        }
    }

    /// Puts a descriptor into the driver's ring; it counts from the next [`Queue::publish`] on.
    ///
    /// # Safety
    /// The queue is this program's; `slot` is below its size.
    pub unsafe fn offer(self, index: u64, slot: u64) {
        let entry: *mut u16 = self.pointer(self.driver_offset() + 4 + self.slot(index) * 2);
        // SAFETY: the caller's promise.
        unsafe { entry.write_volatile(slot as u16) };
    }

    /// Shows the card everything that was offered up to `index`.
    ///
    /// # Safety
    /// The queue is this program's.
    pub unsafe fn publish(self, index: u64) {
        let header: *mut u16 = self.pointer(self.driver_offset());
        // SAFETY: the caller's promise. The processor does not reorder stores, the compiler must
        // not either: the card that sees the index sees the entries and buffers behind it.
        unsafe {
            header.write_volatile(if self.interrupts { 0 } else { NO_INTERRUPT });
            compiler_fence(Ordering::Release);
            header.add(1).write_volatile(index as u16);
        }
    }

    /// Tells the card that there is something new, if it wants to be told. Returns whether it did.
    ///
    /// # Safety
    /// The queue is this program's, with this number, of the card with these registers.
    pub unsafe fn kick_if_asked(self, registers: Registers, number: u64) -> bool {
        let flags: *const u16 = self.pointer(self.device_offset());
        // The index must be visible before the flags are read: the card sets the flag and then
        // looks at the index once more (2.7.10).
        fence(Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe {
            if flags.read_volatile() & NO_NOTIFY != 0 {
                return false;
            }
            registers.write(QUEUE_NOTIFY, number as u32);
        }
        true
    }

    /// How many entries of the device's ring lie behind `index`, which were taken before.
    ///
    /// # Safety
    /// The queue is this program's.
    pub unsafe fn used_since(self, index: u64) -> u64 {
        let header: *const u16 = self.pointer(self.device_offset());
        // SAFETY: the caller's promise.
        let used = unsafe { header.add(1).read_volatile() };
        // What lies behind the index is read after it.
        compiler_fence(Ordering::Acquire);
        u64::from(used.wrapping_sub(index as u16))
    }

    /// An entry of the device's ring: descriptor and length.
    ///
    /// # Safety
    /// The queue is this program's and the card has shown the entry.
    pub unsafe fn used_entry(self, index: u64) -> (u64, u64) {
        let entry: *const u64 = self.pointer(self.device_offset() + 4 + self.slot(index) * 8);
        // SAFETY: the caller's promise; the ring begins at a multiple of 4 only.
        let entry = unsafe { entry.cast::<[u32; 2]>().read_volatile() };
        (u64::from(entry[0]), u64::from(entry[1]))
    }
}
