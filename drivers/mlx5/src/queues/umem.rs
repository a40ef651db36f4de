//! Memory that the firmware wants for each queue: three umems, or parts of one.

use crate::command::Request;
use crate::options::Umems;
use martlet_device_io::{Dma, DmaBlock, DmaError};
use martlet_mlx5_abi::capability::VirtioCapabilities;
use martlet_mlx5_abi::memory::{CreateUmemIn, Mtt};
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::virtq::UmemRef;
use martlet_mlx5_abi::{Opcode, U32, U64};
use std::sync::{Arc, Mutex, PoisonError};
use zerocopy::{FromZeros, IntoBytes};

const PAGE: usize = 4096;

/// Umems whose last queue is gone, by number, and the memory behind them: to be destroyed, and only
/// then freed.
pub(crate) type Retired = Arc<Mutex<Vec<(u32, Arc<DmaBlock>)>>>;

/// A registered piece of memory.
#[derive(Debug)]
struct Umem {
    id: u32,
    memory: Arc<DmaBlock>,
    retired: Retired,
}

impl Drop for Umem {
    /// Its last queue is gone; the memory stays until the firmware has let go of it.
    fn drop(&mut self) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.push((self.id, Arc::clone(&self.memory)));
    }
}

/// One queue's three parts.
#[derive(Debug)]
pub(crate) struct UmemPiece {
    parts: [Part; 3],
}

#[derive(Debug)]
struct Part {
    umem: Arc<Umem>,
    offset: u64,
    bytes: u32,
}

impl UmemPiece {
    /// As the queue's object names them.
    pub(crate) fn refs(&self) -> [UmemRef; 3] {
        let name = |part: &Part| UmemRef {
            id: U32::new(part.umem.id),
            bytes: U32::new(part.bytes),
            offset: U64::new(part.offset),
        };
        [name(&self.parts[0]), name(&self.parts[1]), name(&self.parts[2])]
    }
}

/// Umems that are to be registered for queues of given sizes.
#[derive(Debug)]
pub(crate) struct UmemPlan {
    memory: Vec<Arc<DmaBlock>>,
    /// For each queue, for each part: which memory, from where, how long.
    places: Vec<[(usize, u64, u32); 3]>,
}

impl UmemPlan {
    /// Allocates memory for queues of these sizes.
    pub(crate) fn new(
        dma: &dyn Dma,
        capabilities: &VirtioCapabilities,
        style: Umems,
        sizes: &[u16],
    ) -> Result<UmemPlan, DmaError> {
        let mut lengths = Vec::new();
        let mut places = Vec::new();
        for size in sizes {
            let mut parts = [(0, 0, 0); 3];
            let umems = [capabilities.umem_1, capabilities.umem_2, capabilities.umem_3];
            for (part, umem) in parts.iter_mut().zip(umems) {
                let bytes = umem.bytes_for(*size);
                let whole = bytes.next_multiple_of(PAGE as u64).max(PAGE as u64);
                if style == Umems::PerQueue || lengths.is_empty() {
                    lengths.push(0);
                }
                let memory = lengths.len() - 1;
                *part = (memory, lengths[memory], u32::try_from(bytes).unwrap_or(u32::MAX));
                lengths[memory] += whole;
            }
            places.push(parts);
        }
        let allocate = |bytes: &u64| {
            let bytes = usize::try_from(*bytes).unwrap_or(usize::MAX);
            dma.alloc(bytes, PAGE).map(Arc::new)
        };
        let memory = lengths.iter().map(allocate).collect::<Result<_, _>>()?;
        Ok(UmemPlan { memory, places })
    }

    /// A command for each.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.memory.iter().map(create).collect()
    }

    /// Some of the commands have failed: those umems that exist are not needed.
    pub(crate) fn retire(self, ids: impl Iterator<Item = Option<u32>>, retired: &Retired) {
        for (id, memory) in ids.zip(self.memory) {
            if let Some(id) = id {
                drop(Umem { id, memory, retired: Arc::clone(retired) });
            }
        }
    }

    /// The pieces of the queues, after the commands have succeeded with these numbers.
    pub(crate) fn pieces(self, ids: &[u32], retired: &Retired) -> Vec<Arc<UmemPiece>> {
        let umems: Vec<Arc<Umem>> = ids
            .iter()
            .zip(self.memory)
            .map(|(id, memory)| Umem { id: *id, memory, retired: Arc::clone(retired) })
            .map(Arc::new)
            .collect();
        let part = |(memory, offset, bytes): &(usize, u64, u32)| Part {
            umem: Arc::clone(&umems[*memory]),
            offset: *offset,
            bytes: *bytes,
        };
        let piece =
            |places: &[(usize, u64, u32); 3]| UmemPiece { parts: places.each_ref().map(part) };
        self.places.iter().map(piece).map(Arc::new).collect()
    }
}

/// Registers memory, contiguous on the bus, in pages of 4 KiB.
fn create(memory: &Arc<DmaBlock>) -> Request {
    let pages = memory.bytes().div_ceil(PAGE);
    let mut input = CreateUmemIn::new_zeroed();
    input.header = InHeader::new(Opcode::CREATE_UMEM, 0);
    input.num_of_mtt = U64::new(pages as u64);
    let mut bytes = input.as_bytes().to_vec();
    for page in 0..pages {
        let at = memory.at().0 + (page * PAGE) as u64;
        bytes.extend((at | Mtt::READ | Mtt::WRITE).to_be_bytes());
    }
    Request::new::<ShortOut>(Opcode::CREATE_UMEM, &*bytes).keeping(Arc::clone(memory) as _)
}

/// Unregisters memory.
pub(crate) fn destroy(id: u32, memory: &Arc<DmaBlock>) -> Request {
    let input = ShortIn::new(Opcode::DESTROY_UMEM, 0, id);
    Request::new::<ShortOut>(Opcode::DESTROY_UMEM, &input).keeping(Arc::clone(memory) as _)
}
