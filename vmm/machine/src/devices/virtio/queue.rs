//! Where a queue lies, as the guest says it.

use martlet_ram::GuestRam;
use martlet_units::Gpa;
use martlet_vdpa::virtio::split::{
    DESCRIPTOR_BYTES, DEVICE_HEADER_BYTES, DRIVER_HEADER_BYTES, USED_BYTES,
};
use martlet_vdpa::{Iova, QueueConfig};

/// The registers of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    pub(super) size: u32,
    pub(super) ready: bool,
    pub(super) descriptors: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
}

/// Which half of an address register.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    Low,
    High,
}

impl Half {
    pub(super) fn set(self, address: &mut u64, value: u32) {
        let value = u64::from(value);
        match self {
            Half::Low => *address = *address & !0xffff_ffff | value,
            Half::High => *address = *address & 0xffff_ffff | value << 32,
        }
    }
}

impl Queue {
    /// The queue as a device takes it, if all of it is guest memory (2.7: sizes, alignments). The
    /// error is a reason.
    pub(super) fn check(&self, size_max: u16, ram: &GuestRam) -> Result<QueueConfig, String> {
        let size = u16::try_from(self.size).unwrap_or(0);
        if !size.is_power_of_two() || size > size_max {
            return Err(format!(
                "{} descriptors, a power of two up to {size_max} may be",
                self.size
            ));
        }
        let count = u64::from(size);
        // The rings are followed by a 16-bit word for events, which is there even if unused.
        let parts = [
            ("descriptors", self.descriptors, count * DESCRIPTOR_BYTES, 16),
            ("driver's ring", self.driver, DRIVER_HEADER_BYTES + count * 2 + 2, 2),
            ("device's ring", self.device, DEVICE_HEADER_BYTES + count * USED_BYTES + 2, 4),
        ];
        for (what, at, bytes, align) in parts {
            if !at.is_multiple_of(align) || !is_ram(ram, at, bytes) {
                return Err(format!("{what}: {bytes} bytes at {at:#x} can't be"));
            }
        }
        Ok(QueueConfig {
            size,
            descriptors: Iova(self.descriptors),
            driver: Iova(self.driver),
            device: Iova(self.device),
        })
    }
}

/// Whether all of this is guest memory without a hole; `bytes` is not 0.
fn is_ram(ram: &GuestRam, at: u64, bytes: u64) -> bool {
    let Some(last) = at.checked_add(bytes - 1) else { return false };
    let find = |address| ram.find(Gpa(address).to_gfn());
    match (find(at), find(last)) {
        (Some((first, _)), Some((last, _))) => first == last,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_units::{Gfn, PageCount, PageRange};

    #[test]
    fn only_whole_queues_in_memory_are_taken() {
        let range = |start, pages| PageRange::try_new(Gfn(start), PageCount(pages)).unwrap();
        // The third region begins right behind the second.
        let ram = GuestRam::create(&[range(0, 16), range(32, 16), range(48, 16)]).unwrap();
        let good = Queue {
            size: 256,
            ready: false,
            descriptors: 0x1000,
            driver: 0x3002,
            device: 0x2_0004,
        };
        let config = good.check(256, &ram).unwrap();
        assert_eq!((config.size, config.device), (256, Iova(0x2_0004)));
        let bad = [
            Queue { size: 0, ..good },
            Queue { size: 3, ..good },
            Queue { size: 512, ..good },
            Queue { size: 0x1_0100, ..good },
            Queue { descriptors: 0x1008, ..good },
            Queue { driver: 0x3001, ..good },
            Queue { device: 0x2_0002, ..good },
            Queue { descriptors: 0xf010, ..good },
            Queue { descriptors: 0x1_0000, ..good },
            Queue { descriptors: u64::MAX - 15, ..good },
            Queue { driver: 0xffff_ffff_ffff_fffe, ..good },
            // Two regions next to each other are not one piece of this process's memory.
            Queue { device: 0x2_fff0, ..good },
        ];
        for queue in bad {
            assert!(queue.check(256, &ram).is_err(), "{queue:?}");
        }
    }
}
