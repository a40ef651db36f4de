//! Memory of the crate vm-memory, taken over in one call.
#![allow(clippy::unwrap_used, reason = "a test")]

use martlet_ram::{
    DirtySource, GuestRam, PageBitmap, RamBitmap, RamError, RegionIndex, Tracker, VmMemoryPages,
    mark_touched,
};
use martlet_units::{Gpa, PAGE_SIZE};
use std::fs::File;
use std::num::NonZeroUsize;
use std::sync::Arc;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

const MIB: usize = 1 << 20;

fn memfd(bytes: u64) -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("vmm", flags).unwrap());
    file.set_len(bytes).unwrap();
    file
}

/// Private anonymous memory, and memory in a file.
fn memory() -> GuestMemoryMmap<AtomicBitmap> {
    let file = FileOffset::new(memfd(3 << 20), 1 << 20);
    let regions = [(GuestAddress(0), MIB, None), (GuestAddress(16 << 20), 2 * MIB, Some(file))];
    GuestMemoryMmap::from_ranges_with_files(regions).unwrap()
}

#[test]
fn both_use_it() {
    let memory = memory();
    let ram = Arc::new(GuestRam::from_vm_memory(&memory).unwrap());
    assert_eq!(ram.layout().len(), 2);
    memory.write_obj(0x1234_5678_u32, GuestAddress(16 << 20)).unwrap();
    let mut read = [0; 4];
    ram.read(Gpa(16 << 20), &mut read).unwrap();
    assert_eq!(u32::from_le_bytes(read), 0x1234_5678);
    assert!(ram.regions()[0].file().is_none());
    assert_eq!(ram.regions()[1].file().unwrap().offset, 1 << 20);
    for region in ram.regions() {
        let bits = PageBitmap::new(region.pages());
        mark_touched(region, &bits).unwrap();
        assert!(bits.count() < region.pages(), "{region:?}");
    }
    // It stays mapped as long as either lives.
    drop(memory);
    ram.read(Gpa(16 << 20), &mut read).unwrap();
    assert_eq!(u32::from_le_bytes(read), 0x1234_5678);
}

#[test]
fn what_is_written_through_it_is_dirty() {
    let memory = memory();
    let ram = GuestRam::from_vm_memory(&memory).unwrap();
    memory.write_obj(1_u8, GuestAddress(0)).unwrap();
    let pages = VmMemoryPages::new(&memory);
    let mut tracker = Tracker::lease(&ram).unwrap().with(Box::new(pages));
    let mut dirty = || {
        let into = RamBitmap::new(&ram);
        tracker.sync(&into).unwrap();
        into.iter().map(|(_, bits)| bits.runs().flatten().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    assert_eq!(dirty(), [vec![0_u64; 0], vec![]], "written before the tracking");
    memory.write_slice(&[1; 5000], GuestAddress((16 << 20) + 4000)).unwrap();
    memory.write_obj(1_u8, GuestAddress(255 * PAGE_SIZE)).unwrap();
    assert_eq!(dirty(), [vec![255], vec![0, 1, 2]]);
    assert_eq!(dirty(), [vec![0_u64; 0], vec![]]);
}

#[test]
fn a_bitmap_for_pages_of_another_size_marks_all() {
    let bitmap = AtomicBitmap::new(MIB, NonZeroUsize::new(64 << 10).unwrap());
    let mapping = MmapRegionBuilder::new_with_bitmap(MIB, bitmap)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
        .build()
        .unwrap();
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).unwrap();
    let memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
    let ram = GuestRam::from_vm_memory(&memory).unwrap();
    let mut pages = VmMemoryPages::new(&memory);
    let dirty = RamBitmap::new(&ram);
    pages.sync(&dirty).unwrap();
    assert_eq!(dirty.count(), 0);
    memory.write_obj(1_u8, GuestAddress(70 << 10)).unwrap();
    pages.sync(&dirty).unwrap();
    assert_eq!(dirty.region(RegionIndex(0)).count(), 256);
}

#[test]
fn what_is_no_memory_of_a_guest_is_refused() {
    let build = |start: u64, bytes, protection| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mapping = MmapRegion::<()>::build(None, bytes, protection, flags).unwrap();
        let region = GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap();
        GuestRam::from_vm_memory(&GuestMemoryMmap::from_regions(vec![region]).unwrap())
    };
    let both = libc::PROT_READ | libc::PROT_WRITE;
    assert!(build(0, MIB, both).is_ok());
    for (start, bytes, protection) in [(0, MIB, libc::PROT_READ), (0, 5000, both), (100, MIB, both)]
    {
        let error = build(start, bytes, protection).unwrap_err();
        assert!(matches!(error, RamError::Unusable { .. }), "{error}");
    }
}
