//! How fast things are, each with its origin.

use core::time::Duration;

/// The network's constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Of the link, in bits a second.
    pub line_bits_per_sec: u64,
    /// Payload of a packet: the path MTU.
    pub packet_bytes: u64,
    /// What a packet takes on the wire besides. RoCE v2 over IPv4: preamble and gap 20, Ethernet
    /// 14 + 4, IP 20, UDP 8, BTH 12, ICRC 4 (IBA annex A17, IEEE 802.3).
    pub packet_overhead_bytes: u64,
    /// What a request takes once: RETH 16 (IBA 9.3).
    pub request_overhead_bytes: u64,
    /// From the one NIC's wire to the other NIC's memory, one way.
    pub latency: Duration,
    /// From a post to the NIC's first look at the request.
    pub doorbell: Duration,
    /// Between the starts of two requests of a queue pair.
    pub request_gap: Duration,
    /// A completion's way to the program that polls.
    pub completion: Duration,
    /// Each queue pair takes a way that is longer by a part of this, and each of its segments by
    /// another part: how far queue pairs drift apart.
    pub skew: Duration,
    /// Placement in memory may be late by up to this; zero is strict ordering.
    pub placement_spread: Duration,
    /// Bytes whose source is read at once and which are placed at once.
    pub segment_bytes: u64,
    /// Between two tries of a write with immediate data that found no receive.
    pub rnr_timer: Duration,
    /// How often it is tried again; 7 is for ever.
    pub rnr_retries: u8,
    /// Until a request without an acknowledgement is given up.
    pub retry_timeout: Duration,
    /// Registering memory: once, and for each MiB.
    pub register: (Duration, Duration),
    /// Deregistering: once, and for each MiB.
    pub deregister: (Duration, Duration),
    /// Whether memory has content.
    pub content: bool,
}

impl Params {
    /// A 100 Gbit/s RoCE v2 link between two hosts on one switch.
    ///
    /// * Latency: 1 µs one way, as `ib_write_lat` of perftest gives for small messages on this class
    ///   (1.0 to 1.5 µs including a switch).
    /// * Doorbell and completion 300 ns: a posted write over PCIe and a DMA back.
    /// * Request gap 100 ns: 10 million requests a second on one queue pair.
    /// * Registration 76 µs/MiB = 78 ms/GiB: libfabric issue 4738 has 256 GiB in 20 s. Mooncake's
    ///   pull request 855 has 500 GB in 49.2 s, 98 ms/GiB. Deregistration 23 µs/MiB: the same pull
    ///   request, 11.75 s.
    /// * RNR timer 10 µs; giving up 500 ms, the order of RC's timeout 14 with 7 retries.
    pub const ROCE_100G: Params = Params {
        line_bits_per_sec: 100_000_000_000,
        packet_bytes: 4096,
        packet_overhead_bytes: 82,
        request_overhead_bytes: 16,
        latency: Duration::from_nanos(1_000),
        doorbell: Duration::from_nanos(300),
        request_gap: Duration::from_nanos(100),
        completion: Duration::from_nanos(300),
        skew: Duration::ZERO,
        placement_spread: Duration::ZERO,
        segment_bytes: 2 << 20,
        rnr_timer: Duration::from_micros(10),
        rnr_retries: 7,
        retry_timeout: Duration::from_millis(500),
        register: (Duration::from_micros(20), Duration::from_nanos(76_300)),
        deregister: (Duration::from_micros(10), Duration::from_nanos(23_500)),
        content: false,
    };

    /// How long `bytes` of one request take on the wire, its first segment or another.
    pub(crate) fn wire_time(&self, bytes: u64, first: bool) -> Duration {
        let packets = bytes.div_ceil(self.packet_bytes).max(1);
        let extra = if first { self.request_overhead_bytes } else { 0 };
        let bits = u128::from(bytes + packets * self.packet_overhead_bytes + extra) * 8;
        let nanos = bits * 1_000_000_000 / u128::from(self.line_bits_per_sec.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// How long it takes a thread to register so much.
    pub fn register_time(&self, bytes: u64) -> Duration {
        scaled(self.register, bytes)
    }

    /// How long it takes a thread to deregister so much.
    pub fn deregister_time(&self, bytes: u64) -> Duration {
        scaled(self.deregister, bytes)
    }
}

fn scaled((once, each_mib): (Duration, Duration), bytes: u64) -> Duration {
    let nanos = each_mib.as_nanos() * u128::from(bytes) / (1 << 20);
    once + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
