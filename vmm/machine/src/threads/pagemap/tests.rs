//! The tracker against a real kernel. One without the system calls makes these tests say so.
#![allow(unsafe_code)]
// UNSAFETY: writes guest memory.
#![allow(clippy::cast_possible_truncation, reason = "few pages")]

use super::*;
use martlet_test_host::Want;
use martlet_units::{Gfn, PageCount, PageRange};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

fn ram(layout: &[(u64, u64)]) -> Arc<GuestRam> {
    let range =
        |(start, pages): &(u64, u64)| PageRange::try_new(Gfn(*start), PageCount(*pages)).unwrap();
    Arc::new(GuestRam::create(&layout.iter().map(range).collect::<Vec<_>>()).unwrap())
}

fn tracker(ram: &Arc<GuestRam>) -> Option<PagemapTracker> {
    let tracker = PagemapTracker::new(Arc::clone(ram));
    Want::PagemapScan.take(tracker.map_err(|error| format!("{error:?}")))
}

fn store(ram: &GuestRam, region: usize, page: u64) {
    // SAFETY: the page is in the region.
    unsafe { ram.regions()[region].host_ptr(page).write_volatile(1) };
}

fn read(ram: &GuestRam, region: usize, page: u64) {
    // SAFETY: the page is in the region.
    unsafe { ram.regions()[region].host_ptr(page).read_volatile() };
}

fn synced(tracker: &mut PagemapTracker) -> Vec<BTreeSet<u64>> {
    let bitmap = RamBitmap::new(&tracker.ram);
    tracker.sync(&bitmap).unwrap();
    bitmap.iter().map(|(_, region)| region.runs().flatten().collect()).collect()
}

#[test]
fn written_pages_are_reported_once_and_no_others() {
    let ram = ram(&[(0, 3000), (1 << 20, 1500)]);
    for page in 0..100 {
        store(&ram, 0, page);
        read(&ram, 0, 1000 + page);
    }
    let Some(mut tracker) = tracker(&ram) else { return };
    assert_eq!(synced(&mut tracker), [BTreeSet::new(), BTreeSet::new()]);
    // Written before, never touched, only read before, alone in its page table, the last one.
    for page in [7, 500, 1003, 2000, 2999] {
        store(&ram, 0, page);
    }
    store(&ram, 1, 1499);
    for page in [8, 600, 1004, 2001] {
        read(&ram, 0, page);
    }
    let expected = [BTreeSet::from([7, 500, 1003, 2000, 2999]), BTreeSet::from([1499])];
    assert_eq!(synced(&mut tracker), expected);
    assert_eq!(synced(&mut tracker), [BTreeSet::new(), BTreeSet::new()]);
    store(&ram, 0, 500);
    assert_eq!(synced(&mut tracker)[0], BTreeSet::from([500]));
}

#[test]
fn more_ranges_than_fit_one_scan() {
    let pages = 3 * super::scan::RANGES_MAX as u64;
    let ram = ram(&[(0, pages)]);
    let Some(mut tracker) = tracker(&ram) else { return };
    let odd: BTreeSet<u64> = (0..pages).filter(|page| page % 2 == 1).collect();
    for page in &odd {
        store(&ram, 0, *page);
    }
    assert_eq!(synced(&mut tracker), [odd]);
}

/// Reads, writes and syncs in many orders, over memory of which little is touched at first: no
/// page is missed and none is reported without a write.
#[test]
fn reports_are_exact_whatever_was_touched_when() {
    const PAGES: u64 = 20_000;
    let ram = ram(&[(0, PAGES)]);
    for page in 9000..9100 {
        store(&ram, 0, page);
    }
    let Some(mut tracker) = tracker(&ram) else { return };
    let mut state = 1_u64;
    let mut random = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % limit
    };
    for round in 0..300 {
        let mut expected = BTreeSet::new();
        // At times in all of the memory, at times only where it was touched before.
        let (first, pages) = if round % 3 == 0 { (0, PAGES) } else { (9000, 100) };
        for _ in 0..random(12) {
            let page = first + random(pages);
            if random(2) == 0 {
                read(&ram, 0, page);
            } else {
                store(&ram, 0, page);
                expected.insert(page);
            }
        }
        assert_eq!(synced(&mut tracker), [expected], "round {round}");
    }
}

#[test]
fn what_the_kernel_stores_is_reported() {
    let ram = ram(&[(0, 64)]);
    let Some(mut tracker) = tracker(&ram) else { return };
    let zero = rustix::fs::open("/dev/zero", OFlags::RDONLY, Mode::empty()).unwrap();
    let to = ram.regions()[0].host_ptr(10);
    // SAFETY: two pages of guest memory that nobody else uses.
    let buffer = unsafe { std::slice::from_raw_parts_mut(to, 8192) };
    assert_eq!(rustix::io::read(zero, buffer).unwrap(), 8192);
    assert_eq!(synced(&mut tracker), [BTreeSet::from([10, 11])]);
}

#[test]
fn a_reclaimed_page_is_not_forgotten() {
    let ram = ram(&[(0, 1024)]);
    store(&ram, 0, 5);
    let Some(mut tracker) = tracker(&ram) else { return };
    store(&ram, 0, 5);
    store(&ram, 0, 600);
    for page in [5, 600] {
        let address = ram.regions()[0].host_ptr(page).cast();
        // What reclaim does to a page table entry of shared memory, at once: the page stays
        // in the file, its entry becomes empty.
        // SAFETY: shared memory keeps its content.
        unsafe {
            rustix::mm::madvise(address, 4096, rustix::mm::Advice::LinuxDontNeed).unwrap();
        }
    }
    assert_eq!(synced(&mut tracker), [BTreeSet::from([5, 600])]);
}

#[test]
fn dropping_ends_the_tracking_and_another_can_begin() {
    let ram = ram(&[(0, 64)]);
    for _ in 0..3 {
        let Some(mut tracker) = tracker(&ram) else { return };
        store(&ram, 0, 3);
        assert_eq!(synced(&mut tracker), [BTreeSet::from([3])]);
    }
}

/// What a migration does: copies what each sync reports, while writers run. At the end the
/// copy must be the memory.
#[test]
fn no_write_is_lost_while_writers_run() {
    const PAGES: u64 = 256;
    let ram = ram(&[(0, PAGES)]);
    let Some(mut tracker) = tracker(&ram) else { return };
    let end = AtomicBool::new(false);
    let counter = |page: u64| {
        let word = ram.regions()[0].host_ptr(page).cast::<std::sync::atomic::AtomicU64>();
        // SAFETY: aligned, in the region, only used as an atomic word.
        unsafe { &*word }
    };
    let mut copy = vec![0; PAGES as usize];
    let mut sync_and_copy = || {
        for page in &synced(&mut tracker)[0] {
            copy[*page as usize] = counter(*page).load(Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (end, counter) = (&end, &counter);
            scope.spawn(move || {
                let mut page = writer;
                while !end.load(Ordering::Relaxed) {
                    counter(page).fetch_add(1, Ordering::Relaxed);
                    page = (page * 5 + 3) % PAGES;
                }
            });
        }
        let mut syncs = 0;
        while syncs < 300 || counter(PAGES - 1).load(Ordering::Relaxed) < 100 {
            sync_and_copy();
            syncs += 1;
            std::thread::yield_now();
        }
        end.store(true, Ordering::Relaxed);
    });
    sync_and_copy();
    let memory: Vec<u64> = (0..PAGES).map(|p| counter(p).load(Ordering::Relaxed)).collect();
    assert_eq!(copy, memory);
}
