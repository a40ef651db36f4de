//! The device's side of DMA.

use crate::BusAddress;

/// An access that the bus (the IOMMU) refused. Nothing, or a part, was transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for {bytes} bytes at bus address {:#x}", .at.0)]
pub struct BusFault {
    /// Where the access began.
    pub at: BusAddress,
    /// How long it was.
    pub bytes: usize,
}

/// Memory as a device reaches it. The CPU may write the same bytes at any time: each 8-byte aligned
/// word is read and written whole, nothing more is promised.
pub trait BusMemory: Send + Sync {
    /// Fills `into` from memory.
    fn read(&self, at: BusAddress, into: &mut [u8]) -> Result<(), BusFault>;

    /// Writes `from` to memory.
    fn write(&self, at: BusAddress, from: &[u8]) -> Result<(), BusFault>;

    /// Reads one byte; what the CPU wrote before it released this byte is visible afterwards.
    fn load8(&self, at: BusAddress) -> Result<u8, BusFault>;

    /// Writes one byte, after everything that this thread wrote before. How a device hands over an
    /// owner bit or a completion status.
    fn store8(&self, at: BusAddress, value: u8) -> Result<(), BusFault>;

    /// Sets bits of one byte, atomically against the CPU, after everything that this thread wrote
    /// before. How a device logs dirty pages.
    fn or8(&self, at: BusAddress, bits: u8) -> Result<(), BusFault>;
}
