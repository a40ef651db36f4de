use super::*;
use crate::mark_touched;
use crate::tests::{one_region, page_is_zero, regions, write_page};
use proptest::prelude::*;

const LENGTHS: [u64; 2] = [1500, 65];

fn touched(ram: &GuestRam, region: u16) -> u64 {
    let region = &ram.regions()[usize::from(region)];
    mark_touched(region, &PageBitmap::new(region.pages())).unwrap()
}

/// Receives a data run as a channel would, whichever way the target goes.
fn receive(placer: &Placer, region: u16, first: u64, count: u32) {
    let target = placer.data_target(RegionIndex(region), first, count).unwrap();
    let bytes = u64::from(count) * PAGE_SIZE;
    match target {
        Target::Memory(slice) => assert_eq!(slice.len() as u64, bytes),
        Target::File { region: of, offset, bytes: long } => {
            assert_eq!((of, offset, long), (RegionIndex(region), first * PAGE_SIZE, bytes));
        }
    }
    for page in 0..u64::from(count) {
        write_page(&placer.ram, region, first + page, 0xab);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn hostile_runs_are_refused(region in 0..4u16, first in any::<u64>(), near in 0..1600u64,
                                count in any::<u32>(), small in 0..1600u32) {
        let placer = Placer::new(Arc::new(regions(&LENGTHS)));
        for first in [first, near] {
            for count in [count, small] {
                let fits = usize::from(region) < LENGTHS.len() && count > 0
                    && first.checked_add(u64::from(count))
                        .is_some_and(|end| end <= LENGTHS[usize::from(region)]);
                let region = RegionIndex(region);
                prop_assert_eq!(placer.zero(region, first, count).is_ok(), fits);
                prop_assert_eq!(placer.data_target(region, first, count).is_ok(), fits);
            }
        }
    }

    #[test]
    fn memory_is_what_came_last(
        runs in prop::collection::vec((any::<bool>(), 0..1500u64, 1..900u32), 0..10),
    ) {
        let ram = Arc::new(regions(&LENGTHS));
        let placer = Placer::new(Arc::clone(&ram));
        let mut full = vec![false; 1500];
        for (data, first, count) in runs {
            let count = count.min(u32::try_from(1500 - first).unwrap());
            let pages = &mut full[usize::try_from(first).unwrap()..][..count as usize];
            if data {
                receive(&placer, 0, first, count);
            } else {
                let were_full = pages.iter().filter(|page| **page).count();
                let cleared = placer.zero(RegionIndex(0), first, count).unwrap();
                prop_assert_eq!(cleared.0, were_full as u64);
            }
            pages.fill(data);
        }
        prop_assert_eq!(placer.filled.count(), full.iter().filter(|page| **page).count() as u64);
        for (page, full) in (0..).zip(full) {
            prop_assert_eq!(page_is_zero(&ram, 0, page), !full, "page {}", page);
        }
    }
}

#[test]
fn zeros_before_any_content_stay_holes() {
    let ram = Arc::new(one_region(100_000));
    let placer = Placer::new(Arc::clone(&ram));
    assert_eq!(placer.zero(RegionIndex(0), 0, 100_000).unwrap(), PageCount(0));
    receive(&placer, 0, 500, 3);
    assert_eq!(placer.zero(RegionIndex(0), 0, 501).unwrap(), PageCount(1));
    assert_eq!(touched(&ram, 0), 3);
}

#[test]
fn long_runs_give_their_memory_back() {
    let ram = Arc::new(one_region(2000));
    let placer = Placer::new(Arc::clone(&ram));
    receive(&placer, 0, 100, 1000);
    assert_eq!(touched(&ram, 0), 1000);
    assert_eq!(placer.zero(RegionIndex(0), 0, 2000).unwrap(), PageCount(1000));
    assert_eq!(touched(&ram, 0), 0);
    assert_eq!(placer.filled.count(), 0);
}

#[test]
fn errors_name_what_the_peer_said() {
    let placer = Placer::new(Arc::new(regions(&LENGTHS)));
    let error = |region, first, count| {
        placer.data_target(RegionIndex(region), first, count).unwrap_err().to_string()
    };
    assert_eq!(error(0, 3, 0), "0 pages from page 3 of region 0, which has 1500 pages");
    assert_eq!(error(7, 0, 1), "pages of region 7, but the guest has 2 regions");
    assert_eq!(error(1, 65, 1), "1 pages from page 65 of region 1, which has 65 pages");
    assert_eq!(
        error(0, u64::MAX, u32::MAX),
        "4294967295 pages from page 18446744073709551615 of region 0, which has 1500 pages"
    );
}
