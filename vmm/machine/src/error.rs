//! Why a machine could not be made.

use crate::vcpu::backend::BackendError;
use martlet_ram::RamError;
use std::io;
use std::path::PathBuf;

/// Why a machine could not be made. Each is one line for the owner.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// What was asked for is impossible; the owner's fault.
    #[error("{reason}")]
    Config {
        /// What and why, with the values concerned.
        reason: String,
    },
    /// A file that the owner named could not be used.
    #[error("{what} {path}: {source}", path = path.display())]
    File {
        /// `kernel`, `initrd` or `serial port`.
        what: &'static str,
        /// Which one.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The host gave no memory.
    #[error("{0}{because}", because = io_cause(.0))]
    Memory(RamError),
    /// The host can't run it.
    #[error("{reason}")]
    Host {
        /// What was refused.
        reason: String,
    },
}

/// The kernel's own words, since this error ends as one line.
fn io_cause(error: &RamError) -> String {
    std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"))
}

impl From<BackendError> for MachineError {
    fn from(error: BackendError) -> MachineError {
        MachineError::Host { reason: error.to_string() }
    }
}
