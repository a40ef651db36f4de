//! What the device is for a guest.

use super::guest::ConfigSpace;
use crate::firmware::Setup;
use crate::options::Options;
use martlet_mlx5_abi::capability::{VirtioCapabilities, device_feature};
use martlet_vdpa::virtio::{DEVICE_NET, feature, net_config};
use martlet_vdpa::{Capabilities, Identity};

/// Payload of a frame, if the device does not tell: Ethernet's.
const MTU: u16 = 1500;

/// Queues that are driven at most; a table of receive queues names half of them.
const QUEUES_MAX: u32 = 1024;

/// Features that the device and virtio number differently: the guest's, the device's.
const FEATURES: [(u64, u16); 7] = [
    (feature::NET_CSUM, device_feature::CSUM),
    // VIRTIO_NET_F_GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, HOST_TSO4, HOST_TSO6 (virtio 1.3, 5.1.3).
    (1 << 1, device_feature::GUEST_CSUM),
    (1 << 7, device_feature::GUEST_TSO4),
    (1 << 8, device_feature::GUEST_TSO6),
    (1 << 11, device_feature::HOST_TSO4),
    (1 << 12, device_feature::HOST_TSO6),
    (feature::NET_MRG_RXBUF, device_feature::MRG_RXBUF),
];

pub(super) fn identity(setup: &Setup, options: &Options) -> Identity {
    // A table names every receive queue.
    let most = QUEUES_MAX.min(setup.general.rqt_entries_max().saturating_mul(2));
    let queues = setup.virtio.max_num_virtio_queues.get().min(most) & !1;
    let queues = u16::try_from(queues).expect("below the limit");
    let suspend = setup.virtio.suspend_abilities & VirtioCapabilities::FREEZE_TO_RDY != 0;
    Identity {
        device_id: DEVICE_NET,
        features: offered(setup, queues),
        queues,
        queue_size_max: options.queue_size_max,
        config_bytes: net_config::BYTES,
        capabilities: Capabilities { suspend: true, resume: suspend, dirty_log: true },
    }
}

fn offered(setup: &Setup, queues: u16) -> u64 {
    let has = |bit: u16| setup.virtio.features() >> bit & 1 == 1;
    let mut features = feature::NET_MAC
        | feature::NET_MTU
        | feature::NET_STATUS
        | feature::NET_CTRL_VQ
        | feature::VERSION_1
        | feature::ACCESS_PLATFORM;
    if queues > 2 {
        features |= feature::NET_MQ;
    }
    for (guest, device) in FEATURES {
        features |= if has(device) { guest } else { 0 };
    }
    features
}

/// The features of queues for those that the guest's driver accepted.
pub(super) fn queue_features(features: u64) -> u16 {
    let bit = |(guest, device): &(u64, u16)| u16::from(features & guest != 0) << device;
    FEATURES.iter().map(bit).sum()
}

pub(super) fn config_space(setup: &Setup, options: &Options, identity: &Identity) -> ConfigSpace {
    ConfigSpace {
        mac: setup.mac.unwrap_or(options.mac),
        pairs: identity.queues / 2,
        mtu: setup.mtu.unwrap_or(MTU),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_mlx5_abi::U24;
    use martlet_mlx5_abi::capability::GeneralCapabilities;
    use zerocopy::FromZeros;

    /// `log_max_rqt_size` is the low 5 bits of byte 0x72.
    #[test]
    fn there_are_as_many_pairs_as_a_table_has_entries() {
        let general = GeneralCapabilities { log_max_rqt_size: 0xe3, ..FromZeros::new_zeroed() };
        let mut virtio = VirtioCapabilities::new_zeroed();
        virtio.max_num_virtio_queues = U24::new(256);
        let setup = Setup { general, virtio, pd: 1, null_mkey: 2, mac: None, mtu: None };
        assert_eq!(identity(&setup, &Options::MARTLET).queues, 16);
    }
}
