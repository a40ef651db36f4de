//! Why a device did not do what it was asked.

/// Why a device did not do what it was asked; one line. What state it is in then stands at each
/// call of [`VdpaDevice`](crate::VdpaDevice).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VdpaError {
    /// The device does not do this at all.
    #[error("cannot {action}: the device does not support it")]
    Unsupported {
        /// What was asked.
        action: &'static str,
    },
    /// The VMM asked for something impossible: a bug there, or a guest that misbehaves.
    #[error("cannot {action}: {reason}")]
    Invalid {
        /// What was asked.
        action: &'static str,
        /// What is wrong with it, with the values concerned.
        reason: String,
    },
    /// The device answered with an error.
    #[error("cannot {action}: {reason}")]
    Device {
        /// What was asked.
        action: &'static str,
        /// What the device said, with its own codes.
        reason: String,
    },
    /// The device did not answer in time.
    #[error("cannot {action}: no answer from the device in {waited_ms} ms")]
    Timeout {
        /// What was asked.
        action: &'static str,
        /// How long it was given.
        waited_ms: u64,
    },
    /// The device has been removed or has failed for good.
    #[error("cannot {action}: the device is gone")]
    Gone {
        /// What was asked.
        action: &'static str,
    },
    /// The host has no memory or no other means for it.
    #[error("cannot {action}: {reason}")]
    Host {
        /// What was asked.
        action: &'static str,
        /// What is missing.
        reason: String,
    },
}
