//! What a guest boots from, kept with it.
//!
//! Whatever was put into a guest's memory before its first instruction, and the state of its
//! machine at that moment, lies in a region of its own behind the guest's memory. It is moved like
//! any other, so a guest can be reset wherever it has arrived; neither the files that it came from
//! nor their host are asked again. No memory map tells the guest of it. One that writes there all
//! the same changes what itself is booted from, so all of it is read as a peer's bytes are.
//!
//! The region begins with the length of its head, 8 bytes; the head follows, and from the next page
//! on the pages that it names, in order. What is zero is left out.

use crate::config::{Boot, HIGH_MEMORY_START, MachineConfig};
use crate::memory::{GuestMemory, PAGE_BYTES};
use crate::saved::{SavedMachine, SavedRange, decode};
use martlet_ram::{RamBitmap, mark_touched};
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use minicbor::{Decode, Encode};

/// What a state and its tables take at most, beside a vCPU's and beside what grows with memory:
/// page tables, 4 KiB for each GiB.
const BASE_BYTES: u64 = 4 << 20;
const VCPU_BYTES: u64 = 32 << 10;
const MEMORY_PART: u64 = 1 << 17;
/// The longest head; most of it is the vCPUs' state.
const HEAD_BYTES_MAX: u64 = 16 << 20;
/// The head's length.
const LENGTH_BYTES: u64 = 8;

/// Never reuse a number; a new field is an `Option`.
#[derive(Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
struct Head {
    /// Before the first instruction.
    #[n(0)]
    state: SavedMachine,
    /// Where the pages go.
    #[n(1)]
    runs: Vec<SavedRange>,
}

/// What was read of a head.
pub(crate) struct PowerOn {
    pub(crate) state: SavedMachine,
    runs: Vec<PageRange>,
    /// The first page.
    pages: Gfn,
}

/// The region for a guest of this configuration. What is not used of it takes no memory.
pub(crate) fn image_range(config: &MachineConfig, guest: &[PageRange]) -> Option<PageRange> {
    // One that can't be read is not loaded either.
    let length = |path: &std::path::Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let files = match &config.boot {
        Boot::Program(_) => 0,
        Boot::Kernel(kernel) => {
            length(&kernel.kernel).saturating_add(kernel.initrd.as_deref().map_or(0, length))
        }
    };
    let bytes = files
        .saturating_add(BASE_BYTES + u64::from(config.vcpus) * VCPU_BYTES)
        .saturating_add(config.memory.0 / MEMORY_PART);
    let behind = guest.last()?.end().0.max(HIGH_MEMORY_START / PAGE_SIZE);
    PageRange::try_new(Gfn(behind), PageCount(bytes.div_ceil(PAGE_SIZE)))
}

/// Keeps what is in the guest's memory, with this state. Before the guest's first instruction.
pub(crate) fn keep(memory: &GuestMemory, state: SavedMachine) -> Result<(), String> {
    let image = memory.image().ok_or("it has no place")?.range();
    let runs = written(memory)?;
    let saved = |run: &PageRange| SavedRange { start: run.start().0, pages: run.pages().0 };
    let head = Head { state, runs: runs.iter().map(saved).collect() };
    let head = minicbor::to_vec(&head).expect("a vector takes everything");
    let length = head.len() as u64;
    let pages: u64 = runs.iter().map(|run| run.pages().0).sum();
    if length > HEAD_BYTES_MAX || head_pages(length) + pages > image.pages().0 {
        return Err(format!("{pages} pages and {length} bytes of state do not fit"));
    }
    let begin = gpa(image.start());
    let kept = memory.write(begin, &length.to_le_bytes())
        && memory.write(Gpa(begin.0 + LENGTH_BYTES), &head)
        && copy(memory, &runs, Gfn(image.start().0 + head_pages(length)), Way::Keep);
    kept.then_some(()).ok_or_else(|| "a page can't be written".to_owned())
}

/// Reads what was kept. The guest may have changed it.
pub(crate) fn read(memory: &GuestMemory) -> Result<PowerOn, String> {
    let image = memory.image().ok_or("what it boots from is not here")?.range();
    let lost = || "what it boots from can't be read".to_owned();
    let mut length = [0; 8];
    let begin = gpa(image.start());
    memory.read(begin, &mut length).then_some(()).ok_or_else(lost)?;
    let length = u64::from_le_bytes(length);
    if length > HEAD_BYTES_MAX || head_pages(length) > image.pages().0 {
        return Err(format!("what it boots from has a head of {length} bytes"));
    }
    let mut head = vec![0; usize::try_from(length).map_err(|error| error.to_string())?];
    memory.read(Gpa(begin.0 + LENGTH_BYTES), &mut head).then_some(()).ok_or_else(lost)?;
    let head: Head = decode(&head).map_err(|why| format!("what it boots from: {why}"))?;
    let mut left = image.pages().0 - head_pages(length);
    let is_guests = |run: &PageRange| {
        let has = |range: PageRange| range.start() <= run.start() && run.end() <= range.end();
        memory.guest().iter().any(|region| has(region.range()))
    };
    let mut runs = Vec::new();
    for SavedRange { start, pages } in head.runs {
        let run = PageRange::try_new(Gfn(start), PageCount(pages)).filter(is_guests);
        let run = run.ok_or_else(|| format!("no memory for {pages} pages at {start:#x}"))?;
        left = left.checked_sub(pages).ok_or_else(|| format!("{pages} pages are not there"))?;
        runs.push(run);
    }
    let pages = Gfn(image.start().0 + head_pages(length));
    Ok(PowerOn { state: head.state, runs, pages })
}

impl PowerOn {
    /// Puts the pages where they were at the power-on; `false` if one can't be read or written.
    /// The guest's memory is zero.
    #[must_use]
    pub(crate) fn put(&self, memory: &GuestMemory) -> bool {
        copy(memory, &self.runs, self.pages, Way::Put)
    }
}

fn gpa(frame: Gfn) -> Gpa {
    Gpa(frame.0 * PAGE_SIZE)
}

fn head_pages(length: u64) -> u64 {
    (LENGTH_BYTES + length).div_ceil(PAGE_SIZE)
}

/// Runs of the guest's memory that are not zero.
fn written(memory: &GuestMemory) -> Result<Vec<PageRange>, String> {
    let touched = RamBitmap::new(memory.ram());
    let mut runs: Vec<PageRange> = Vec::new();
    let mut page = [0; PAGE_BYTES];
    for (region, (_, bitmap)) in memory.guest().iter().zip(touched.iter()) {
        mark_touched(region, bitmap).map_err(|error| error.to_string())?;
        for number in bitmap.runs().flatten() {
            let frame = Gfn(region.range().start().0 + number);
            if !memory.read(gpa(frame), &mut page) {
                return Err(format!("no memory at {:#x}", gpa(frame).0));
            }
            if page == [0; PAGE_BYTES] {
                continue;
            }
            let (start, pages) = match runs.last() {
                Some(run) if run.end() == frame => (run.start(), run.pages().0),
                _ => (frame, 0),
            };
            if pages > 0 {
                runs.pop();
            }
            runs.extend(PageRange::try_new(start, PageCount(pages + 1)));
        }
    }
    Ok(runs)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Keep,
    Put,
}

/// Copies pages between the guest's runs and where they are kept.
fn copy(memory: &GuestMemory, runs: &[PageRange], kept: Gfn, way: Way) -> bool {
    let frames = runs.iter().flat_map(|run| run.start().0..run.end().0);
    let mut page = [0; PAGE_BYTES];
    frames.zip(kept.0..).all(|(guest, kept)| {
        let (guest, kept) = (gpa(Gfn(guest)), gpa(Gfn(kept)));
        let (from, to) = match way {
            Way::Keep => (guest, kept),
            Way::Put => (kept, guest),
        };
        memory.read(from, &mut page) && memory.write(to, &page)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_ram::GuestRam;
    use std::sync::Arc;

    const IMAGE: u64 = 1 << 20;

    fn memory(image_pages: u64) -> GuestMemory {
        let range = |start, pages| PageRange::try_new(Gfn(start), PageCount(pages)).unwrap();
        let layout = [range(0, 64), range(100, 16), range(IMAGE, image_pages)];
        GuestMemory::with_image(Arc::new(GuestRam::create(&layout).unwrap()))
    }

    fn state() -> SavedMachine {
        let serial = Default::default();
        let vcpus = vec![vec![7; 5000].into()];
        SavedMachine { vcpus, vm: vec![1, 2], serial, nics: None, board: None }
    }

    fn page(memory: &GuestMemory, frame: u64) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        assert!(memory.read(gpa(Gfn(frame)), &mut page));
        page
    }

    #[test]
    fn what_was_kept_is_put_back() {
        let memory = memory(32);
        for frame in [0u64, 1, 5, 63, 100, 115] {
            assert!(memory.write(gpa(Gfn(frame)), &[frame.to_le_bytes()[0] + 1; PAGE_BYTES]));
        }
        assert!(memory.write(Gpa(40 * PAGE_SIZE), &[0; 100]), "touched and zero");
        keep(&memory, state()).unwrap();
        for frame in [0, 3, 63, 110] {
            assert!(memory.write(gpa(Gfn(frame)), &[0xee; PAGE_BYTES]));
        }
        assert!(memory.clear());
        let power_on = read(&memory).unwrap();
        assert_eq!(power_on.state, state());
        let runs: Vec<_> = power_on.runs.iter().map(|r| (r.start().0, r.pages().0)).collect();
        assert_eq!(runs, [(0, 2), (5, 1), (63, 1), (100, 1), (115, 1)]);
        assert!(power_on.put(&memory));
        for frame in (0u64..64).chain(100..116) {
            let is_kept = [0, 1, 5, 63, 100, 115].contains(&frame);
            let expected = if is_kept { frame.to_le_bytes()[0] + 1 } else { 0 };
            assert_eq!(page(&memory, frame), [expected; PAGE_BYTES], "{frame}");
        }
    }

    #[test]
    fn what_has_no_room_is_not_kept() {
        let memory = memory(4);
        assert!(memory.write(Gpa(0), &[1; 3 * PAGE_BYTES]));
        assert!(keep(&memory, state()).is_err());
        assert!(read(&memory).is_err(), "nothing was kept");
    }

    #[test]
    fn a_guest_that_changes_what_it_boots_from_harms_nobody() {
        let with = |length: u64, runs: &[(u64, u64)]| {
            let memory = memory(8);
            let runs = runs.iter().map(|&(start, pages)| SavedRange { start, pages }).collect();
            let head = minicbor::to_vec(&Head { state: state(), runs }).unwrap();
            let told = if length == 0 { head.len() as u64 } else { length };
            assert!(memory.write(Gpa(IMAGE * PAGE_SIZE), &told.to_le_bytes()));
            assert!(memory.write(Gpa(IMAGE * PAGE_SIZE + 8), &head));
            read(&memory).map(|power_on| power_on.put(&memory))
        };
        assert_eq!(with(0, &[(0, 2), (62, 2), (115, 1)]), Ok(true));
        for length in [u64::MAX, HEAD_BYTES_MAX, 9 * PAGE_SIZE, 100] {
            assert!(with(length, &[]).is_err(), "{length}");
        }
        for runs in [
            &[(0, 0)][..],
            &[(64, 1)],
            &[(63, 2)],
            &[(IMAGE, 1)],
            &[(u64::MAX, 1)],
            &[(0, u64::MAX)],
            &[(0, 6), (6, 1)],
        ] {
            assert!(with(0, runs).is_err(), "{runs:?}");
        }
    }
}
