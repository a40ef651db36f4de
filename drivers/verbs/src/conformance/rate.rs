//! What it brings to have many writes in flight.

use super::bed::{Bed, REGION_AT, all_access, completions};
use super::{Site, Violation, expect};
use crate::fabric::{QueuePair, Setup};
use crate::window::{Flush, SendWindow};
use crate::work::{Completion, Status, WorkRequest};
use martlet_units::{ByteCount, BytesPerSec};
use std::time::Instant;

/// Pages that are written, over and over.
const PLACES: usize = 512;
const PAGE_BYTES: u32 = 4096;

/// Writes `pages` scattered pages, one request each, with at most `depth` in flight; how many
/// bytes a second that is, in real time.
pub fn in_flight<S: Site>(site: &S, depth: u32, pages: u32) -> Result<BytesPerSec, Violation> {
    let setup = Setup { send_slots: depth, completion_slots: depth, ..Setup::default() };
    let mut bed = Bed::with(site, &setup, all_access())?;
    let mut window = SendWindow::new(depth);
    let mut list = Vec::with_capacity(PLACES);
    let mut places = [Completion::default(); 32];
    let mut next = 0;
    let began = Instant::now();
    while next < pages || window.in_flight() > 0 {
        list.clear();
        while next < pages && window.free() > 0 {
            next += 1;
            let flush = if next == pages { Flush::Last } else { Flush::MoreComes };
            let Some((id, signal)) = window.take(flush) else { break };
            list.push(WorkRequest { signal, ..page(&bed, id.0) });
        }
        bed.source.post(&list)?;
        places[0] = completions(&mut bed.source, 1)?[0];
        let more = bed.source.poll(&mut places[1..])?;
        for completion in &places[..=more] {
            let done = completion.status == Status::SUCCESS;
            expect(done, || format!("a write failed: {completion:?}"))?;
            window.on_completion(completion);
        }
    }
    let bytes = u64::from(pages) * u64::from(PAGE_BYTES);
    Ok(BytesPerSec::measured(ByteCount(bytes), began.elapsed()))
}

/// A write to a place that no neighbour in time is next to.
fn page<S: Site>(bed: &Bed<S>, id: u64) -> WorkRequest {
    let place = usize::try_from(id).unwrap_or(0).wrapping_mul(397) % PLACES;
    let at = REGION_AT + place * 4096;
    bed.write(id, at, at, PAGE_BYTES)
}
