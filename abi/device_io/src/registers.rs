//! Registers of one BAR.

/// A window of device registers. Offsets are in bytes from its begin and a multiple of the access
/// size; values are in the CPU's order (little-endian on the bus), so a device whose registers are
/// big-endian is read through `u32::from_be`.
///
/// A write is a release: the device sees everything that the calling thread wrote to DMA memory
/// before it. A read is an acquire. An access outside of the window reads all ones and writes
/// nothing, as PCI does, and so does every access to a device that is gone.
pub trait Registers: Send + Sync {
    /// Reads 32 bits.
    fn read32(&self, offset: u64) -> u32;

    /// Writes 32 bits.
    fn write32(&self, offset: u64, value: u32);

    /// Reads 64 bits.
    fn read64(&self, offset: u64) -> u64;

    /// Writes 64 bits.
    fn write64(&self, offset: u64, value: u64);
}
