//! The values that go between a VMM and a device.

use martlet_device_io::HostMemory;

/// An address as the guest gives it to the device. Without a virtual IOMMU it is the guest
/// physical address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

/// A virtqueue's number: 0 is the first receive queue, 1 the first transmit queue, and so on in
/// pairs. The control queue is the VMM's own and has no number here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueIndex(pub u16);

/// What a device is, fixed for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Virtio device id; 1 is a network card.
    pub device_id: u32,
    /// Features that the device can offer.
    pub features: u64,
    /// Data queues; a network card has an even number.
    pub queues: u16,
    /// Largest size of a queue, a power of two.
    pub queue_size_max: u16,
    /// Length of the configuration space in bytes.
    pub config_bytes: u32,
    /// What it can beyond passing frames.
    pub capabilities: Capabilities,
}

/// What a device can beyond passing frames. A device without `suspend` can't be migrated: the VMM
/// says so before it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// It can be suspended, and tells its queues' indices then.
    pub suspend: bool,
    /// A suspended device can be resumed. Without it, going on means building the queues again.
    pub resume: bool,
    /// It logs the pages it writes.
    pub dirty_log: bool,
}

/// Where a split virtqueue lies. Fixed from the start of the device to its reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Descriptors, a power of two.
    pub size: u16,
    /// The descriptor table, 16 bytes an entry.
    pub descriptors: Iova,
    /// The driver's ring ("avail").
    pub driver: Iova,
    /// The device's ring ("used").
    pub device: Iova,
}

/// How far a split virtqueue has come: free-running indices, of which the rings hold the low bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// The next entry of the driver's ring that the device will take.
    pub avail_index: u16,
    /// The next entry of the device's ring that it will fill.
    pub used_index: u16,
}

/// What a device may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Write only.
    Write,
    /// Both.
    ReadWrite,
}

/// A piece of the map from the guest's addresses to this process's memory. Whole pages, not empty;
/// the pieces of a map are in the order of their addresses and don't overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapRun {
    /// Where the guest's addresses begin.
    pub iova: Iova,
    /// The memory behind them.
    pub memory: HostMemory,
    /// What the device may do there.
    pub access: Access,
}

/// What a device has done since it was opened; for reports, and for proofs that no frame is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames taken from transmit queues.
    pub frames_sent: u64,
    /// Frames put into receive queues.
    pub frames_received: u64,
    /// Frames that found no receive buffer and were dropped.
    pub frames_dropped: u64,
    /// Accesses to memory that the map did not allow.
    pub access_errors: u64,
    /// When the first frame was served since the last resume or start, on the device's clock.
    pub first_frame_ns: Option<u64>,
    /// When the last frame was served.
    pub last_frame_ns: Option<u64>,
}
