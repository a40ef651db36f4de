//! The device's own log of pages that it writes: a bitmap in the driver's memory.
//!
//! The log is turned on and off while frames flow, as DPDK does (`mlx5_vdpa_lm.c`): those fields
//! of a queue may be modified in any state.

use super::own_memory::OwnMemory;
use super::{Control, Mlx5Device};
use crate::queues::{Faults, LogTo, batch};
use martlet_units::PAGE_SHIFT;
use martlet_vdpa::{MapRun, VdpaError};

const ACTION: &str = "log dirty pages";

/// Bytes of the bitmap that are looked at together: most of it is zero.
const BLOCK_BYTES: usize = 4096;
const WORD_BYTES: usize = 8;

/// Logs of a device.
#[derive(Default)]
pub(super) struct DirtyLogs {
    /// The one that is written, or was the last time.
    current: Option<OwnMemory>,
    pub(super) is_on: bool,
    /// Those that were too short: with bits that have not been taken yet.
    old: Vec<OwnMemory>,
    /// Any page may have been written: a log went with its function.
    everything: bool,
    /// Where the current map ends.
    map_end: u64,
}

impl DirtyLogs {
    /// The function is stopped. Gives the logs' memory, which is free when the function has
    /// stopped.
    pub(super) fn take_memory(&mut self) -> Vec<OwnMemory> {
        self.everything |= self.is_on;
        if !self.is_on {
            self.map_end = 0;
        }
        self.current.take().into_iter().chain(self.old.drain(..)).collect()
    }

    fn is_enough(&self, end: u64) -> bool {
        let fits = |log: &OwnMemory| bitmap_bytes(end).is_some_and(|b| b <= log.block.bytes());
        self.current.as_ref().is_some_and(fits)
    }
}

/// Bytes of a bitmap up to an address.
fn bitmap_bytes(end: u64) -> Option<usize> {
    let pages = end.div_ceil(1 << PAGE_SHIFT);
    let bytes = pages.div_ceil(64).checked_mul(8)?;
    // The field for it has 32 bits: 32 GiB of bitmap would be a petabyte of memory.
    u32::try_from(bytes).ok()?;
    usize::try_from(bytes).ok()
}

impl Mlx5Device {
    pub(super) fn set_log(&self, control: &mut Control, on: bool) -> Result<(), VdpaError> {
        control.check_settled(ACTION)?;
        match (on, control.logs.is_on) {
            (true, false) => self.begin_log(control),
            (false, true) => {
                // What is logged until now can still be taken.
                control.logs.is_on = false;
                none_or_error(self.log_to(control, None))
            }
            (true, true) | (false, false) => Ok(()),
        }
    }

    fn begin_log(&self, control: &mut Control) -> Result<(), VdpaError> {
        self.ensure_log(control)?;
        let to = control.logs.current.as_ref().map(log_to);
        let faults = self.log_to(control, to);
        control.logs.is_on = faults.is_empty();
        if !faults.is_empty() {
            // All or none: those that log already stop it.
            self.log_to(control, None);
        }
        none_or_error(faults)
    }

    /// A log that covers the whole map.
    fn ensure_log(&self, control: &mut Control) -> Result<(), VdpaError> {
        if !control.logs.is_enough(control.logs.map_end) {
            let log = self.new_log(control.setup.pd, control.logs.map_end)?;
            let old = control.logs.current.replace(log);
            control.logs.old.extend(old);
        }
        Ok(())
    }

    /// A log that was on is on for a function that has begun anew, before its queues run. What the old
    /// one had written and not logged yet nobody knows.
    pub(super) fn log_again(&self, control: &mut Control) -> Result<(), VdpaError> {
        if control.logs.is_on {
            self.ensure_log(control)?;
            control.queues.log = control.logs.current.as_ref().map(log_to);
        }
        Ok(())
    }

    fn new_log(&self, pd: u32, end: u64) -> Result<OwnMemory, VdpaError> {
        let bytes = bitmap_bytes(end).ok_or_else(|| VdpaError::Invalid {
            action: ACTION,
            reason: format!("the map ends at {end:#x}"),
        })?;
        OwnMemory::new(&self.firmware, pd, bytes, ACTION)
    }

    /// A map is coming that ends there: a log that is on becomes long enough first.
    pub(super) fn grow_log(&self, control: &mut Control, end: u64) -> Result<(), VdpaError> {
        if control.logs.is_on && !control.logs.is_enough(end) {
            let log = self.new_log(control.setup.pd, end)?;
            let faults = self.log_to(control, Some(log_to(&log)));
            let old = control.logs.current.replace(log);
            control.logs.old.extend(old);
            none_or_error(faults)?;
        }
        control.logs.map_end = end;
        Ok(())
    }

    /// Tells all queues where to log.
    fn log_to(&self, control: &mut Control, to: Option<LogTo>) -> Faults {
        control.queues.log = to;
        let mut batch = batch(&self.firmware, self.firmware.options().queues);
        let mut which = Vec::new();
        for (index, queue) in control.queues.list.iter().enumerate() {
            let request = queue.object.as_ref().and_then(|object| object.log_request(to));
            if let Some(request) = request {
                batch.push(request);
                which.push(index);
            }
        }
        self.firmware.run(&mut batch);
        let mut faults = Faults::default();
        for (index, result) in which.into_iter().zip(batch.into_results()) {
            match (result, control.queues.object_mut(index)) {
                (Ok(_), Some(object)) => object.fields.log = to,
                (Err(error), _) => faults.add(index, error),
                (Ok(_), None) => {}
            }
        }
        faults
    }

    pub(super) fn take_log(&self, control: &mut Control, mark: &mut dyn FnMut(u64, u64)) {
        if std::mem::take(&mut control.logs.everything) {
            control.queues.runs.iter().for_each(|run| mark_all(run, mark));
        }
        control.logs.current.iter().chain(&control.logs.old).for_each(|log| take(log, mark));
    }
}

fn none_or_error(faults: Faults) -> Result<(), VdpaError> {
    if faults.is_empty() { Ok(()) } else { Err(faults.into_error(ACTION)) }
}

/// Marks all pages of a piece of the map.
fn mark_all(run: &MapRun, mark: &mut dyn FnMut(u64, u64)) {
    let first = run.iova.0 >> PAGE_SHIFT;
    let end = first + (run.memory.bytes() >> PAGE_SHIFT);
    let mut page = first;
    while page < end {
        let (word, bit) = (page & !63, page & 63);
        let count = (end - page).min(64 - bit);
        mark(word, (u64::MAX >> (64 - count)) << bit);
        page += count;
    }
}

fn log_to(log: &OwnMemory) -> LogTo {
    LogTo { key: log.key, bytes: u32::try_from(log.block.bytes()).unwrap_or(u32::MAX) }
}

/// Takes all bits of a log. Bit `n % 8` of byte `n / 8` is page `n`.
fn take(log: &OwnMemory, mark: &mut dyn FnMut(u64, u64)) {
    let mut bytes = [0; BLOCK_BYTES];
    for block in (0..log.block.bytes()).step_by(BLOCK_BYTES) {
        log.block.read(block, &mut bytes);
        // A bit that is set meanwhile may be seen or not; it is not lost.
        for (number, word) in bytes.chunks_exact(WORD_BYTES).enumerate() {
            if word.iter().all(|byte| *byte == 0) {
                continue;
            }
            let offset = block + number * WORD_BYTES;
            // Little-endian: the byte order of the bitmap is its page order.
            let word = u64::from_le(log.block.take64(offset));
            if word != 0 {
                mark(offset as u64 * 8, word);
            }
        }
    }
}
