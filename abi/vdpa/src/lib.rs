//! What a VMM sees of a vDPA device, whoever drives it: martlet's own mlx5 driver in this process,
//! or the kernel's behind `/dev/vhost-vdpa-N`. Virtio's own numbers are in [`virtio`].

#![forbid(unsafe_code)]

mod device;
mod error;
mod types;
pub mod virtio;

pub use device::VdpaDevice;
pub use error::VdpaError;
pub use martlet_device_io::{HostMemory, Notify};
pub use types::{
    Access, Capabilities, Counters, Identity, Iova, MapRun, QueueConfig, QueueIndex, QueueState,
};
