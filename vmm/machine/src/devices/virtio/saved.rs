//! What travels of network cards: in the description what a destination must have, in the state
//! the registers. Never reuse a number; a new field is an `Option`.

use super::control::ControlIndices;
use super::queue::Queue;
use minicbor::{Decode, Encode};

/// What a destination needs for a card.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct NicKind {
    /// Features as the guest sees them offered.
    #[n(0)]
    pub(crate) features: u64,
    /// Data queues.
    #[n(1)]
    pub(crate) queues: u16,
    /// Largest size of a queue.
    #[n(2)]
    pub(crate) queue_size_max: u16,
    /// The card's address, if it has one.
    #[n(3)]
    pub(crate) mac: Option<[u8; 6]>,
}

/// A card's registers, and how far its queues have come.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedNic {
    #[n(0)]
    pub(super) status: u32,
    #[n(1)]
    pub(super) driver_features: u64,
    #[n(2)]
    pub(super) device_features_select: u32,
    #[n(3)]
    pub(super) driver_features_select: u32,
    #[n(4)]
    pub(super) queue_select: u32,
    /// Data queues in their order, and the control queue behind them.
    #[n(5)]
    pub(super) queues: Vec<SavedQueue>,
    /// Queue pairs in use.
    #[n(6)]
    pub(super) pairs: u16,
    #[n(7)]
    pub(super) control: SavedIndices,
    #[n(8)]
    pub(super) interrupt_status: u32,
    #[n(9)]
    pub(super) config_generation: u32,
    /// The guest has set it up: its device moves frames.
    #[n(10)]
    pub(super) runs: bool,
    /// How far each data queue has come, if it was suspended for good. A rehearsal has none: then
    /// the destination prepares everything else.
    #[n(11)]
    pub(super) indices: Option<Vec<SavedIndices>>,
}

/// The registers of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedQueue {
    #[n(0)]
    size: u32,
    #[n(1)]
    ready: bool,
    #[n(2)]
    descriptors: u64,
    #[n(3)]
    driver: u64,
    #[n(4)]
    device: u64,
}

/// Indices of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedIndices {
    #[n(0)]
    pub(super) available: u16,
    #[n(1)]
    pub(super) used: u16,
}

impl From<&Queue> for SavedQueue {
    fn from(queue: &Queue) -> SavedQueue {
        let Queue { size, ready, descriptors, driver, device } = *queue;
        SavedQueue { size, ready, descriptors, driver, device }
    }
}

impl From<&SavedQueue> for Queue {
    fn from(saved: &SavedQueue) -> Queue {
        let SavedQueue { size, ready, descriptors, driver, device } = *saved;
        Queue { size, ready, descriptors, driver, device }
    }
}

impl From<ControlIndices> for SavedIndices {
    fn from(indices: ControlIndices) -> SavedIndices {
        SavedIndices { available: indices.available, used: indices.used }
    }
}

impl From<SavedIndices> for ControlIndices {
    fn from(saved: SavedIndices) -> ControlIndices {
        ControlIndices { available: saved.available, used: saved.used }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> SavedNic {
        let queue = Queue {
            size: 128,
            ready: true,
            descriptors: 0x10_0000,
            driver: 0x10_0800,
            device: 0x10_0908,
        };
        SavedNic {
            status: 0xf,
            driver_features: 1 << 32 | 1 << 5,
            device_features_select: 1,
            driver_features_select: 1,
            queue_select: 2,
            queues: vec![SavedQueue::from(&queue)],
            pairs: 1,
            control: SavedIndices { available: 1, used: 1 },
            interrupt_status: 2,
            config_generation: 3,
            runs: true,
            indices: Some(vec![SavedIndices { available: 65535, used: 65534 }]),
        }
    }

    /// The bytes of this version: a change of them is a change of the format.
    #[test]
    fn golden() {
        let bytes = minicbor::to_vec(saved()).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "ac000f011b0000000100000020020103010402058185188\
             0f51a001000001a001008001a001009080601078201010802\
             09030af50b818219ffff19fffe"
        );
        assert_eq!(minicbor::decode::<SavedNic>(&bytes).unwrap(), saved());
    }

    /// A newer version has a field more, and a state without indices is one of a rehearsal.
    #[test]
    fn fields_come_and_go() {
        let mut bytes = minicbor::to_vec(SavedNic { indices: None, ..saved() }).unwrap();
        let fields = bytes[0];
        assert!((0xa0..0xb6).contains(&fields));
        bytes[0] += 1;
        bytes.extend([0x18, 99, 0x63, b'n', b'e', b'w']);
        let read: SavedNic = minicbor::decode(&bytes).unwrap();
        assert_eq!(read, SavedNic { indices: None, ..saved() });
    }
}
