//! Memory of the driver's own behind a key: the empty ring, the dirty log.

use crate::command::Keep;
use crate::firmware::Firmware;
use crate::memory::{KeyCommand, KeyContext, Mtts};
use martlet_device_io::{BusRun, DmaBlock};
use martlet_mlx5_abi::memory::{CreateMkeyOut, mkey_from_index};
use martlet_vdpa::{Access, VdpaError};
use std::sync::Arc;

const PAGE: usize = 4096;

/// A piece of DMA memory with a key that covers it from address 0 on, for as long as the function is
/// up.
#[derive(Debug)]
pub(super) struct OwnMemory {
    pub(super) block: Arc<DmaBlock>,
    pub(super) key: u32,
}

impl OwnMemory {
    /// Zeroed memory of at least `bytes` bytes.
    pub(super) fn new(
        firmware: &Firmware,
        pd: u32,
        bytes: usize,
        action: &'static str,
    ) -> Result<OwnMemory, VdpaError> {
        let bytes = bytes.next_multiple_of(PAGE).max(PAGE);
        let block = firmware.dma().alloc(bytes, PAGE);
        let block =
            Arc::new(block.map_err(|error| VdpaError::Host { action, reason: error.to_string() })?);
        let run = BusRun { at: block.at(), bytes: block.bytes() as u64 };
        let mtts = Mtts::new([run]).expect("a block has bytes");
        let context = KeyContext { pd, null_key: 0 };
        let command = KeyCommand::direct(&context, run.bytes, Access::ReadWrite, mtts);
        let request = command.into_request().keeping(Arc::clone(&block) as Keep);
        let created =
            firmware.setup_call(request).and_then(|output| output.read::<CreateMkeyOut>());
        let created = created.map_err(|error| crate::queues::vdpa_error(action, &error))?;
        let key = mkey_from_index(created.mkey_index.get(), 0);
        Ok(OwnMemory { block, key })
    }
}
