//! Numbers of the virtio specification (OASIS virtio 1.3) that VMM, device and driver share.

/// Device id of a network card (section 5.1.1).
pub const DEVICE_NET: u32 = 1;

/// Feature bits of network cards (5.1.3) and of all devices (6).
pub mod feature {
    /// Checksums of packets may be partial.
    pub const NET_CSUM: u64 = 1 << 0;
    /// The configuration space has an MTU.
    pub const NET_MTU: u64 = 1 << 3;
    /// The configuration space has a MAC address.
    pub const NET_MAC: u64 = 1 << 5;
    /// Receive buffers may be merged; every frame has a 12-byte header then, as with VERSION_1.
    pub const NET_MRG_RXBUF: u64 = 1 << 15;
    /// The configuration space has the link's state.
    pub const NET_STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const NET_CTRL_VQ: u64 = 1 << 17;
    /// There are several queue pairs.
    pub const NET_MQ: u64 = 1 << 22;
    /// The specification, not what came before it.
    pub const VERSION_1: u64 = 1 << 32;
    /// The platform translates the device's addresses.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
}

/// Bytes of `struct virtio_net_hdr_v1`, before each frame (5.1.6).
pub const NET_HEADER_BYTES: usize = 12;

/// Layout of `struct virtio_net_config` (5.1.4), little-endian.
pub mod net_config {
    /// 6 bytes of MAC address.
    pub const MAC: usize = 0;
    /// u16, link state.
    pub const STATUS: usize = 6;
    /// u16, queue pairs.
    pub const MAX_PAIRS: usize = 8;
    /// u16.
    pub const MTU: usize = 10;
    /// Length up to here.
    pub const BYTES: u32 = 12;
    /// In `STATUS`: the link is up.
    pub const LINK_UP: u16 = 1;
}

/// Split virtqueues (2.7).
pub mod split {
    /// Bytes of a descriptor: address u64, length u32, flags u16, next u16.
    pub const DESCRIPTOR_BYTES: u64 = 16;
    /// Descriptor flag: there is a next one.
    pub const NEXT: u16 = 1;
    /// Descriptor flag: the device writes there.
    pub const WRITE: u16 = 2;
    /// Driver's ring: flags u16, index u16, entries u16 each.
    pub const DRIVER_HEADER_BYTES: u64 = 4;
    /// Driver's ring flag: no interrupts, please.
    pub const NO_INTERRUPT: u16 = 1;
    /// Device's ring: flags u16, index u16, entries of id u32 and length u32 each.
    pub const DEVICE_HEADER_BYTES: u64 = 4;
    /// Bytes of an entry of the device's ring.
    pub const USED_BYTES: u64 = 8;
    /// Device's ring flag: no kicks, please.
    pub const NO_NOTIFY: u16 = 1;
    /// Largest size of a queue.
    pub const SIZE_MAX: u16 = 32768;
}
