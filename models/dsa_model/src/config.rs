//! How a device is set up: what `accel-config` would have written before its start.

use crate::Timing;
use martlet_dsa_abi::{DEVICE_ENTRIES, OperationCapability, Version};

/// Engines, groups and work queues of a device (Sapphire Rapids: 4, 4 and 8).
pub const ENGINES_MAX: usize = 4;
/// See [`ENGINES_MAX`].
pub(crate) const QUEUES_MAX: usize = 8;
/// Largest batch of a device, in descriptors.
pub(crate) const BATCH_MAX: u32 = 1024;
/// Largest transfer of a device, in bytes.
pub(crate) const TRANSFER_BYTES_MAX: u64 = 2 << 30;

/// Who submits to a work queue, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// ENQCMD, which says when there is no room, from any number of processes.
    Shared,
    /// MOVDIR64B, which says nothing: what does not fit is lost.
    Dedicated,
}

/// One work queue. Defaults are those of the Linux driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Shared or dedicated.
    pub mode: Mode,
    /// Entries that it has.
    pub size: u32,
    /// Entries that ENQCMD of a user may fill; a shared queue's size at most.
    pub threshold: u32,
    /// 1 to 15: a queue's share of its group's engines.
    pub priority: u8,
    /// Which group's engines work for it.
    pub group: u8,
    /// Most descriptors in a batch.
    pub batch_max: u32,
    /// Most bytes of a transfer.
    pub transfer_bytes_max: u64,
}

impl QueueConfig {
    /// A shared queue of `size` entries, all of which users may fill, for group 0. Batches of 32
    /// and transfers of 2 MiB: `WQ_DEFAULT_MAX_BATCH` and `WQ_DEFAULT_MAX_XFER` of the kernel's
    /// `drivers/dma/idxd/registers.h`, which stay unless someone raises them.
    pub const fn shared(size: u32) -> QueueConfig {
        QueueConfig {
            mode: Mode::Shared,
            size,
            threshold: size,
            priority: 10,
            group: 0,
            batch_max: 32,
            transfer_bytes_max: 2 << 20,
        }
    }

    /// The same, dedicated.
    pub const fn dedicated(size: u32) -> QueueConfig {
        QueueConfig { mode: Mode::Dedicated, threshold: 0, ..QueueConfig::shared(size) }
    }
}

/// A device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The N of `dsaN`.
    pub number: u16,
    /// Its version.
    pub version: Version,
    /// The group of each engine.
    pub engines: Vec<u8>,
    /// The work queues, in order.
    pub queues: Vec<QueueConfig>,
    /// What the device can do.
    pub operations: OperationCapability,
    /// How long things take.
    pub timing: Timing,
}

/// Why a device can't be set up like this. The kernel refuses the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// No engines, or more than there are.
    Engines,
    /// No queues, or more than there are.
    Queues,
    /// This queue's size is zero, or all together are more than the device's entries.
    Entries(usize),
    /// This queue's threshold is above its size, or zero in a shared queue.
    Threshold(usize),
    /// This queue's priority is not in 1 to 15.
    Priority(usize),
    /// This queue's group has no engine.
    Group(usize),
    /// This queue's batch or transfer limit is beyond the device's.
    Limits(usize),
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ConfigError::Engines => write!(f, "a device has 1 to {ENGINES_MAX} engines"),
            ConfigError::Queues => write!(f, "a device has 1 to {QUEUES_MAX} work queues"),
            ConfigError::Entries(queue) => {
                write!(f, "work queue {queue} is empty or exceeds the {DEVICE_ENTRIES} entries")
            }
            ConfigError::Threshold(queue) => {
                write!(f, "the threshold of work queue {queue} is not in 1 to its size")
            }
            ConfigError::Priority(queue) => {
                write!(f, "the priority of work queue {queue} is not in 1 to 15")
            }
            ConfigError::Group(queue) => write!(f, "work queue {queue} has no engine"),
            ConfigError::Limits(queue) => {
                write!(f, "work queue {queue} allows larger batches or transfers than the device")
            }
        }
    }
}

impl std::error::Error for ConfigError {}

impl DeviceConfig {
    /// A version 1 device with 4 engines in group 0, one shared queue of all entries, and the
    /// times of Sapphire Rapids.
    pub fn sapphire_rapids() -> DeviceConfig {
        DeviceConfig {
            number: 0,
            version: Version::V1,
            engines: vec![0; ENGINES_MAX],
            queues: vec![QueueConfig::shared(DEVICE_ENTRIES)],
            operations: OperationCapability::of(&crate::OPERATIONS),
            timing: Timing::sapphire_rapids(),
        }
    }

    /// The same without delays: for tests of what is done, not when.
    pub fn instant() -> DeviceConfig {
        DeviceConfig { timing: Timing::instant(), ..DeviceConfig::sapphire_rapids() }
    }

    /// Everything that is wrong with it.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.engines.is_empty() || self.engines.len() > ENGINES_MAX {
            return Err(ConfigError::Engines);
        }
        if self.queues.is_empty() || self.queues.len() > QUEUES_MAX {
            return Err(ConfigError::Queues);
        }
        let mut entries = 0_u32;
        for (number, queue) in self.queues.iter().enumerate() {
            entries = entries.saturating_add(queue.size);
            self.validate_queue(number, queue, entries)?;
        }
        Ok(())
    }

    fn validate_queue(
        &self,
        number: usize,
        queue: &QueueConfig,
        entries: u32,
    ) -> Result<(), ConfigError> {
        let threshold_fits = match queue.mode {
            Mode::Shared => (1..=queue.size).contains(&queue.threshold),
            Mode::Dedicated => queue.threshold <= queue.size,
        };
        let limits_fit = (1..=BATCH_MAX).contains(&queue.batch_max)
            && (1..=TRANSFER_BYTES_MAX).contains(&queue.transfer_bytes_max);
        let checks = [
            (queue.size > 0 && entries <= DEVICE_ENTRIES, ConfigError::Entries(number)),
            (threshold_fits, ConfigError::Threshold(number)),
            ((1..=15).contains(&queue.priority), ConfigError::Priority(number)),
            (self.engines.contains(&queue.group), ConfigError::Group(number)),
            (limits_fit, ConfigError::Limits(number)),
        ];
        checks.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, error)| Err(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_configuration_is_refused_as_the_kernel_does() {
        let refuse = |change: &dyn Fn(&mut DeviceConfig)| {
            let mut config = DeviceConfig::sapphire_rapids();
            change(&mut config);
            config.validate().unwrap_err()
        };
        assert_eq!(DeviceConfig::sapphire_rapids().validate(), Ok(()));
        assert_eq!(refuse(&|c| c.engines.clear()), ConfigError::Engines);
        assert_eq!(refuse(&|c| c.queues.clear()), ConfigError::Queues);
        assert_eq!(refuse(&|c| c.queues.push(c.queues[0])), ConfigError::Entries(1));
        assert_eq!(refuse(&|c| c.queues[0].threshold = 129), ConfigError::Threshold(0));
        assert_eq!(refuse(&|c| c.queues[0].priority = 0), ConfigError::Priority(0));
        assert_eq!(refuse(&|c| c.queues[0].group = 1), ConfigError::Group(0));
        assert_eq!(refuse(&|c| c.queues[0].batch_max = 2048), ConfigError::Limits(0));
    }
}
