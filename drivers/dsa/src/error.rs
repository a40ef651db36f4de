//! What may go wrong outside of the device.

use std::io;
use std::path::PathBuf;

/// Why the devices of a host could not be listed.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", .path.display())]
pub struct FindError {
    /// What was to be read.
    pub path: PathBuf,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// Why a work queue can't be used by this process. The host's configuration, always.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Not a path like `/dev/dsa/wq0.0`.
    #[error("{0:?} names no work queue (as /dev/dsa/wq0.0 does)")]
    Name(PathBuf),
    /// There is no such work queue.
    #[error("there is no work queue {name} here")]
    Missing {
        /// Its name.
        name: String,
    },
    /// It is there, but not for users.
    #[error("work queue {name} can't be used: {reason}")]
    Unusable {
        /// Its name.
        name: String,
        /// What is in the way.
        reason: &'static str,
    },
    /// The list of devices is unreadable.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The device file does not open: no rights, or a dedicated queue that is taken.
    #[error("cannot open {}", .path.display())]
    Open {
        /// The device file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}
