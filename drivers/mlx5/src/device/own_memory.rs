//! Memory of the driver's own behind a key: the empty ring, the dirty log.

use crate::command::{Keep, Request};
use crate::firmware::Firmware;
use martlet_device_io::DmaBlock;
use martlet_mlx5_abi::memory::{
    CreateMkeyIn, CreateMkeyOut, MkeyContext, OCTWORD_BYTES, access_mode, mkey_from_index,
    mkey_to_index,
};
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::{Opcode, U24, U32, U64};
use martlet_vdpa::VdpaError;
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

const LOG_PAGE: u32 = 12;
const PAGE: usize = 1 << LOG_PAGE;

/// A piece of DMA memory with a key that covers it from address 0 on.
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
        let request = create(&block, pd).keeping(Arc::clone(&block) as Keep);
        let created =
            firmware.setup_call(request).and_then(|output| output.read::<CreateMkeyOut>());
        let created = created.map_err(|error| crate::queues::vdpa_error(action, &error))?;
        let key = mkey_from_index(created.mkey_index.get(), 0);
        Ok(OwnMemory { block, key })
    }

    /// Destroys the key. If that fails, gives the memory back, which the device may use yet.
    pub(super) fn destroy(self, firmware: &Firmware) -> Option<Arc<DmaBlock>> {
        let input = ShortIn::new(Opcode::DESTROY_MKEY, 0, mkey_to_index(self.key));
        let request = Request::new::<ShortOut>(Opcode::DESTROY_MKEY, &input);
        let result = firmware.setup_call(request.keeping(Arc::clone(&self.block) as Keep));
        if crate::firmware::is_done(Opcode::DESTROY_MKEY, &result) {
            return None;
        }
        tracing::warn!(key = self.key, "a memory key of the driver's own could not be destroyed");
        Some(self.block)
    }
}

fn create(block: &DmaBlock, pd: u32) -> Request {
    let pages = block.bytes() / PAGE;
    let list_bytes = (pages * size_of::<u64>()).next_multiple_of(OCTWORD_BYTES);
    let octwords = U32::new(u32::try_from(list_bytes / OCTWORD_BYTES).unwrap_or(u32::MAX));
    let mut input = CreateMkeyIn::new_zeroed();
    input.header = InHeader::new(Opcode::CREATE_MKEY, 0);
    let mode = MkeyContext::mode_flags(access_mode::MTT);
    let access = MkeyContext::LOCAL_READ | MkeyContext::LOCAL_WRITE;
    input.context.flags = U32::new(mode | access);
    input.context.qpn = U24::new(MkeyContext::ANY_QP);
    input.context.length64_pd = U32::new(pd & U24::MAX);
    input.context.length = U64::new(block.bytes() as u64);
    input.context.translations_octword_size = octwords;
    input.context.log_page_size = U32::new(LOG_PAGE);
    input.translations_octword_actual_size = octwords;
    let mut bytes = input.as_bytes().to_vec();
    for page in 0..pages {
        bytes.extend((block.at().0 + (page * PAGE) as u64).to_be_bytes());
    }
    bytes.resize(size_of::<CreateMkeyIn>() + list_bytes, 0);
    Request::new::<CreateMkeyOut>(Opcode::CREATE_MKEY, &*bytes)
}
