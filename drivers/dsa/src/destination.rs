//! What a device does at the destination: it clears pages, and applies deltas.
#![allow(unsafe_code)]
// UNSAFETY: a record is put where the device reads it.

use crate::buffer::Buffer;
use crate::cpu;
use crate::delta::{RECORD_BYTES_MAX, entries, is_record};
use crate::error::Unsettled;
use crate::gate::Gate;
use crate::operate::{Operator, Ran};
use crate::{PageRun, SharedMemory, WorkQueue};
use martlet_device_io::{Dma, DmaError};
use martlet_dsa_abi::{Descriptor, Status};
use martlet_units::PAGE_SIZE;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why a delta was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// It is no delta record of a page. The peer's fault; the page is as it was.
    #[error("{bytes} bytes that are no delta record of a page")]
    Record {
        /// How many there were.
        bytes: usize,
    },
    /// The device is late.
    #[error(transparent)]
    Unsettled(#[from] Unsettled),
}

/// Writes to guest memory at the destination, before the guest runs.
///
/// A device that is late may write at any later moment, even over what comes after. So there is one
/// error that the CPU can't mend: [`Unsettled`]. From then on every call fails until
/// [`Destination::is_settled`]; what failed is to be repeated then. A guest must not be started
/// before. (Closing the work queue settles it as well: the kernel drains it.)
pub struct Destination {
    operator: Operator,
    memory: Arc<SharedMemory>,
    /// The record that the device reads.
    record: Buffer,
}

impl Destination {
    /// By the queues and with the gate as for [`ZeroEngine`](crate::ZeroEngine::new).
    pub fn new(
        queues: Vec<Arc<WorkQueue>>,
        gate: Arc<dyn Gate>,
        memory: Arc<SharedMemory>,
        dma: &dyn Dma,
        deadline: Duration,
    ) -> Result<Destination, DmaError> {
        let operator = Operator::new(queues, gate, dma, deadline, 0)?;
        Ok(Destination { operator, memory, record: Buffer::new(dma, RECORD_BYTES_MAX)? })
    }

    /// Whether no device may still write.
    pub fn is_settled(&mut self) -> bool {
        self.operator.is_settled()
    }

    /// Fills pages with zeroes.
    pub fn clear(&mut self, run: PageRun) -> Result<(), Unsettled> {
        let mut done = 0;
        while done < run.pages() {
            let rest = part(run, done, run.pages() - done);
            done += self.clear_some(rest)?;
        }
        Ok(())
    }

    /// Clears as much as goes in one operation, at least a page; how much it was.
    fn clear_some(&mut self, run: PageRun) -> Result<u32, Unsettled> {
        if !self.operator.is_settled() {
            return Err(Unsettled);
        }
        let max = self.operator.transfer_bytes_max() / PAGE_SIZE;
        let (to, left) = match self.memory.on_bus(run.address()) {
            Some((to, left)) if left >= PAGE_SIZE && max > 0 => (to, left / PAGE_SIZE),
            _ => {
                cpu::clear(part(run, 0, 1));
                return Ok(1);
            }
        };
        let pages = u64::from(run.pages()).min(left).min(max).min(FILL_PAGES_MAX);
        let pages = u32::try_from(pages).expect("at most as many as the run has");
        let bytes = pages * u32::try_from(PAGE_SIZE).expect("4096");
        let ran = self.operator.run(pages, |record| Descriptor::fill(to.0, 0, bytes, record));
        let by_device = match ran {
            Ran::Late => return Err(Unsettled),
            Ran::Not => 0,
            Ran::Done(record) if record.status() == Status::PAGE_FAULT => {
                (u64::from(record.completed()) / PAGE_SIZE).min(u64::from(pages))
            }
            Ran::Done(_) => u64::from(pages),
        };
        let by_device = u32::try_from(by_device).expect("at most as many as the run has");
        cpu::clear(part(run, by_device, pages - by_device));
        Ok(pages)
    }

    /// Changes a page by a delta record of the source's. The record comes from a peer: it is
    /// checked before anything is written.
    ///
    /// # Panics
    /// For a run of more than one page.
    pub fn apply(&mut self, page: PageRun, record: &[u8]) -> Result<(), ApplyError> {
        assert!(page.pages() == 1, "a record is of one page");
        if !is_record(record) || record.is_empty() {
            return Err(ApplyError::Record { bytes: record.len() });
        }
        if !self.operator.is_settled() {
            return Err(Unsettled.into());
        }
        // SAFETY: the operator is settled, so no device reads the buffer.
        let place = unsafe { self.record.bytes_mut() };
        place.iter_mut().zip(record).for_each(|(to, from)| *to = *from);
        let ran = match self.memory.on_bus(page.address()) {
            None => Ran::Not,
            Some((to, _)) => {
                let length = u32::try_from(record.len()).expect("at most 5120");
                let (at, bytes) = (self.record.at(0), u32::try_from(PAGE_SIZE).expect("4096"));
                self.operator.run(1, |done| Descriptor::apply_delta(at, length, to.0, bytes, done))
            }
        };
        match ran {
            Ran::Late => Err(Unsettled.into()),
            Ran::Done(answer) if answer.status() == Status::SUCCESS => Ok(()),
            // Applying all of it again does no harm.
            Ran::Done(_) | Ran::Not => {
                entries(record).for_each(|(word, data)| cpu::write_word(page, word, data));
                Ok(())
            }
        }
    }
}

/// The most pages that are cleared by one operation: 2 MiB keep a device busy for 70 us.
const FILL_PAGES_MAX: u64 = 512;

/// A part of a run, which may be empty.
fn part(run: PageRun, first: u32, pages: u32) -> PageRun {
    assert!(first + pages <= run.pages(), "a part of the run");
    // SAFETY: pages of a run are what its maker promised of them.
    unsafe { PageRun::new(run.address() + u64::from(first) * PAGE_SIZE, pages) }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if !self.operator.is_settled() {
            self.record.leak();
        }
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination").field("memory", &self.memory).finish_non_exhaustive()
    }
}
