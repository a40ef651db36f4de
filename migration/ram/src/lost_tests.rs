use super::*;
use crate::testing::Spoiled;
use crate::tests::{one_region, regions, write_page};
use crate::{Chunk, ChunkBits, PageBitmap, PlaceError, Placer, RamRegion, ZeroCheck, mark_touched};
use martlet_units::{PAGE_SIZE, PageCount, PageRange};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::sync::Arc;

const REGION: RegionIndex = RegionIndex(0);

#[test]
fn a_lost_page_is_named_as_the_guest_sees_it() {
    let ram = Arc::new(regions(&[10, 20]));
    let _spoiled = Spoiled::new(&ram, RegionIndex(1), 3);
    assert_eq!(ram.first_lost(REGION, 0, 10), None);
    let lost = ram.first_lost(RegionIndex(1), 1, u32::MAX).unwrap();
    assert_eq!(lost, LostPage { region: 1, page: 3, gfn: Gfn(20) });
    let address = ram.regions()[1].host_ptr(3).addr();
    assert_eq!(ram.lost_at(address + 4095), Some(lost));
    assert_eq!(ram.lost_at(8), None);
    let text = lost.to_string();
    assert!(text.contains("guest page 0x14 (page 3 of memory region 1)"), "{text}");
    assert_eq!(LostPage::of(&lost.into()), Some(lost));
}

#[test]
fn the_zero_check_passes_a_lost_page_on_and_finds_all_others() {
    let ram = Arc::new(one_region(512));
    (0..512).for_each(|page| write_page(&ram, 0, page, u8::from(page % 3 == 0)));
    let spoiled = Spoiled::new(&ram, REGION, 100);
    let chunk = Chunk::new(&ram, REGION, 0, ChunkBits::FULL).unwrap();
    for check in ZeroCheck::supported() {
        let zero = chunk.zero_pages(&ram, &check);
        for page in 0..512 {
            assert_eq!(zero.get(page), page % 3 != 0 && page != 100, "{check:?} page {page}");
        }
    }
    drop(spoiled);
    assert!(chunk.zero_pages(&ram, &ZeroCheck::detect()).get(100));
}

#[test]
fn a_lost_page_cannot_be_made_zero() {
    let ram = Arc::new(one_region(20));
    let placer = Placer::new(Arc::clone(&ram));
    placer.data_target(REGION, 0, 20).unwrap();
    let spoiled = Spoiled::new(&ram, REGION, 7);
    assert_eq!(placer.zero(REGION, 0, 20), Err(PlaceError::Lost(ram.lost(REGION, 7))));
    drop(spoiled);
    assert_eq!(placer.zero(REGION, 0, 20), Ok(PageCount(20)));
}

/// Memory whose file is not sealed.
fn on_a_file(pages: u64) -> (GuestRam, File) {
    let file = File::from(rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(pages * PAGE_SIZE).unwrap();
    let range = PageRange::try_new(Gfn(0), PageCount(pages)).unwrap();
    let region = RamRegion::map_file(range, file.try_clone().unwrap(), None).unwrap();
    (GuestRam::from_regions(vec![region]).unwrap(), file)
}

#[test]
fn what_a_file_cut_short_held_is_not_taken_for_untouched() {
    let (ram, file) = on_a_file(10);
    (0..10).for_each(|page| write_page(&ram, 0, page, 1));
    let touched = || {
        let touched = PageBitmap::new(10);
        mark_touched(&ram.regions()[0], &touched).unwrap();
        touched.count()
    };
    assert_eq!(touched(), 10);
    file.set_len(6 * PAGE_SIZE).unwrap();
    assert_eq!(touched(), 10);
    assert_eq!(ram.first_lost(REGION, 0, 10), Some(ram.lost(REGION, 6)));
}

#[test]
fn a_digest_names_the_page_that_it_could_not_read() {
    let (ram, file) = on_a_file(10);
    (0..10).for_each(|page| write_page(&ram, 0, page, 1));
    let before = ram.digest().unwrap();
    file.set_len(6 * PAGE_SIZE).unwrap();
    let error = ram.digest().unwrap_err();
    assert_eq!(LostPage::of(&error), Some(ram.lost(REGION, 6)), "{error}");
    file.set_len(10 * PAGE_SIZE).unwrap();
    (6..10).for_each(|page| write_page(&ram, 0, page, 1));
    assert_eq!(ram.digest().unwrap(), before);
}

/// As the processor's machine check would: `MADV_HWPOISON` (CONFIG_MEMORY_FAILURE). `cargo xtask
/// metal kvm` runs it; elsewhere a page is lost by a file that is cut short, as in the tests above.
#[test]
#[ignore = "takes a page of the host's memory away until it boots again, as root: in an emulated PC"]
fn a_poisoned_page_is_a_lost_page() {
    let ram = Arc::new(one_region(20));
    (0..20).for_each(|page| write_page(&ram, 0, page, 1));
    let placer = Placer::new(Arc::clone(&ram));
    placer.data_target(REGION, 0, 20).unwrap();
    ram.regions()[0].poison(7).expect("a kernel that poisons memory, for this user");
    let lost = ram.lost(REGION, 7);
    assert_eq!(ram.first_lost(REGION, 0, 20), Some(lost));
    let chunk = Chunk::new(&ram, REGION, 0, ChunkBits([0xfffff, 0, 0, 0, 0, 0, 0, 0])).unwrap();
    for check in ZeroCheck::supported() {
        assert!(chunk.zero_pages(&ram, &check).is_empty());
    }
    assert_eq!(LostPage::of(&ram.digest().unwrap_err()), Some(lost));
    assert_eq!(placer.zero(REGION, 0, 20), Err(PlaceError::Lost(lost)));
}
