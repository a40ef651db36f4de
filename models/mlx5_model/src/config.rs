//! What kind of device a model is.

use crate::faults::Faults;
use crate::latency::Latencies;
use martlet_mlx5_abi::capability::device_feature;
use martlet_mlx5_abi::virtq::event_mode;
use std::time::Duration;

/// A kind of device.
pub struct ModelConfig {
    /// Virtqueues, at most 1024; as many vectors.
    pub queues: u16,
    /// Largest size of a virtqueue, a power of two.
    pub queue_size_max: u16,
    /// A suspended queue can be made ready (`freeze_to_rdy_supported`).
    pub resumable: bool,
    /// Features of queues: bits by the numbers of `device_feature`. Segmentation is not modelled.
    pub features: u16,
    /// Bytes of each of a queue's three umems: for each entry, and on top.
    pub umems: [(u32, u32); 3],
    /// Memory keys at a time.
    pub keys_max: u32,
    /// log2 of the longest KLM list.
    pub log_klm_list_max: u8,
    /// log2 of the longest memory region.
    pub log_region_max: u8,
    /// Pages that the firmware needs to boot.
    pub boot_pages: u32,
    /// Pages that it needs on top before INIT_HCA.
    pub init_pages: u32,
    /// log2 of the number of command entries.
    pub log_command_entries: u8,
    /// From the model's making until its firmware takes commands.
    pub boot_time: Duration,
    /// From the write that disables a function's interface until it has stopped: so long it goes on
    /// as before, and the field reads as before. No document says how long; drivers give it 3 s
    /// (Linux `fw.c`, `mlx5_cmd_fast_teardown_hca`).
    pub disable_time: Duration,
    /// Whether the signatures of command entries are checked.
    pub check_signatures: bool,
    /// What the capabilities tell about signatures of mailboxes, of two bits. They are checked from
    /// the SET_HCA_CAP on that leaves it other than 0.
    pub cmdif_checksum: u8,
    /// While a queue is busy its guest is asked not to kick (NO_NOTIFY).
    pub suppress_kicks: bool,
    /// The vport's address.
    pub mac: [u8; 6],
    /// The vport's MTU.
    pub mtu: u16,
    /// How virtqueues may tell that they have used descriptors: a bit for each of
    /// [`event_mode`](martlet_mlx5_abi::virtq::event_mode).
    pub event_modes: u8,
    /// For what is random: garbage.
    pub seed: u64,
    /// How long commands take.
    pub latencies: Latencies,
    /// What goes wrong.
    pub faults: Faults,
}

impl Default for ModelConfig {
    /// A ConnectX-6 Dx function with 64 queues, resumable, whose firmware takes no time and makes no
    /// mistake.
    fn default() -> ModelConfig {
        ModelConfig {
            queues: 64,
            queue_size_max: 1024,
            resumable: true,
            features: (1 << device_feature::MRG_RXBUF)
                | (1 << device_feature::CSUM)
                | (1 << device_feature::GUEST_CSUM),
            umems: [(64, 4096), (32, 4096), (16, 4096)],
            keys_max: 1 << 16,
            log_klm_list_max: 16,
            log_region_max: 63,
            boot_pages: 16,
            init_pages: 64,
            log_command_entries: 5,
            boot_time: Duration::ZERO,
            disable_time: Duration::from_micros(100),
            check_signatures: true,
            // `MLX5_CMD_HCA_CAP_CMDIF_CHECKSUM_INITIAL_STATE`.
            cmdif_checksum: 1,
            suppress_kicks: true,
            mac: [0x52, 0x54, 0x00, 0x6d, 0x6c, 0x78],
            mtu: 1500,
            event_modes: 1 << event_mode::NONE | 1 << event_mode::MSIX,
            seed: 1,
            latencies: Latencies::zero(),
            faults: Faults::default(),
        }
    }
}
