use super::*;
use crate::tests::{regions, write_page};
use crate::{CHUNK_PAGES, ChunkBits, ZeroCheck};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const LENGTHS: [u64; 2] = [CHUNK_PAGES * 3 + 70, 90];

fn chunks(ram: &GuestRam, pages: &BTreeSet<(u16, u64)>) -> Vec<Chunk> {
    let mut chunks: BTreeMap<(u16, u64), ChunkBits> = BTreeMap::new();
    for (region, page) in pages {
        let bits = chunks.entry((*region, page / CHUNK_PAGES)).or_default();
        bits.set(u32::try_from(page % CHUNK_PAGES).unwrap());
    }
    let chunk = |((region, index), bits)| Chunk::new(ram, RegionIndex(region), index, bits);
    chunks.into_iter().map(|chunk_of| chunk(chunk_of).unwrap()).collect()
}

fn check_batch(ram: &GuestRam, batch: &PageBatch<'_>) {
    let data: Vec<&Run> = batch.runs().iter().filter(|run| run.kind == RunKind::Data).collect();
    assert_eq!(data.len(), batch.slices().len());
    for (run, slice) in data.iter().zip(batch.slices()) {
        let region = ram.region(run.region).unwrap();
        assert_eq!(slice.as_ptr(), region.host_ptr(run.first_page));
        assert_eq!(slice.len(), run.count as usize * PAGE);
    }
    let bytes: usize = batch.slices().iter().map(RawSlice::len).sum();
    assert_eq!(batch.payload().0, bytes as u64);
    assert_eq!(batch.data_pages() + batch.zero_pages(), runs_pages(batch));
    assert!(batch.runs().len() <= RUNS_MAX && batch.payload().0 <= BYTES_MAX.0);
    for pair in batch.runs().windows(2) {
        let touching = pair[0].region == pair[1].region
            && pair[0].first_page + u64::from(pair[0].count) == pair[1].first_page;
        assert!(!touching || pair[0].kind != pair[1].kind, "{pair:?} is not merged");
    }
}

fn runs_pages(batch: &PageBatch<'_>) -> u64 {
    batch.runs().iter().map(|run| u64::from(run.count)).sum()
}

/// Sends all chunks and returns what was sent, page by page.
fn send(ram: &GuestRam, chunks: Vec<Chunk>, limit: ByteCount) -> Vec<(u16, u64, RunKind)> {
    let mut batch = PageBatch::new(ram);
    batch.limit_payload(limit);
    let capacity = (batch.runs.capacity(), batch.slices.capacity());
    let mut sent = Vec::new();
    let mut flush = |batch: &mut PageBatch<'_>| {
        check_batch(ram, batch);
        for run in batch.runs() {
            let pages = run.first_page..run.first_page + u64::from(run.count);
            sent.extend(pages.map(|page| (run.region.0, page, run.kind)));
        }
        batch.clear();
        assert!(batch.is_empty());
    };
    for mut chunk in chunks {
        let zero = chunk.zero_pages(ram, &ZeroCheck::detect());
        while batch.push_chunk(&mut chunk, &zero) == Pushed::Full {
            assert!(batch.is_full(), "called full too early");
            flush(&mut batch);
        }
        assert!(chunk.bits().is_empty());
    }
    flush(&mut batch);
    assert_eq!(capacity, (batch.runs.capacity(), batch.slices.capacity()), "it allocated");
    sent
}

fn pages(most: usize) -> impl Strategy<Value = BTreeSet<(u16, u64)>> {
    let page = (0..2u16).prop_flat_map(|r| (Just(r), 0..LENGTHS[usize::from(r)]));
    let stretch = (page, 1..300u64, 1..4usize).prop_map(|((region, first), count, step)| {
        let end = (first + count).min(LENGTHS[usize::from(region)]);
        (first..end).step_by(step).map(|page| (region, page)).collect::<Vec<_>>()
    });
    prop::collection::vec(stretch, 0..most).prop_map(|all| all.into_iter().flatten().collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn every_page_goes_once_with_the_right_kind(
        wanted in pages(12), full in pages(8), limit_pages in 0..1200u64,
    ) {
        let ram = regions(&LENGTHS);
        full.iter().for_each(|(region, page)| write_page(&ram, *region, *page, 1));
        let sent = send(&ram, chunks(&ram, &wanted), ByteCount(limit_pages * PAGE_SIZE + 17));
        let expected: Vec<_> = wanted
            .iter()
            .map(|(region, page)| {
                let kind =
                    if full.contains(&(*region, *page)) { RunKind::Data } else { RunKind::Zero };
                (*region, *page, kind)
            })
            .collect();
        prop_assert_eq!(sent, expected);
    }
}

#[test]
fn a_full_stretch_is_one_run_across_chunks() {
    let ram = regions(&[CHUNK_PAGES * 3]);
    (0..CHUNK_PAGES * 2).for_each(|page| write_page(&ram, 0, page, 1));
    let mut batch = PageBatch::new(&ram);
    let chunk = |index| Chunk::new(&ram, RegionIndex(0), index, ChunkBits::FULL).unwrap();
    let none = ChunkBits::EMPTY;
    assert_eq!(batch.push_chunk(&mut chunk(0), &none), Pushed::All);
    assert!(!batch.is_full());
    assert_eq!(batch.push_chunk(&mut chunk(1), &none), Pushed::All);
    let run = |kind, first_page, count| Run { region: RegionIndex(0), kind, first_page, count };
    assert_eq!(batch.runs(), [run(RunKind::Data, 0, 1024)]);
    assert_eq!(batch.payload(), BYTES_MAX);
    assert!(batch.is_full());
    let mut third = chunk(2);
    assert_eq!(batch.push_chunk(&mut third, &ChunkBits::FULL), Pushed::Full);
    assert_eq!(third, chunk(2));
    batch.clear();
    assert_eq!(batch.push_chunk(&mut third, &ChunkBits::FULL), Pushed::All);
    assert_eq!(batch.runs(), [run(RunKind::Zero, 1024, 512)]);
    assert_eq!((batch.zero_pages(), batch.data_pages()), (512, 0));
}

#[test]
fn a_run_too_many_waits_for_the_next_batch() {
    // Every other page full: a run for each page, so the third chunk is one too many by half.
    let ram = regions(&[CHUNK_PAGES * 2]);
    (0..CHUNK_PAGES * 2).step_by(2).for_each(|page| write_page(&ram, 0, page, 1));
    let all: BTreeSet<_> = (0..CHUNK_PAGES * 2).map(|page| (0, page)).collect();
    let sent = send(&ram, chunks(&ram, &all), BYTES_MAX);
    assert_eq!(sent.len() as u64, CHUNK_PAGES * 2);
}

#[test]
fn runs_end_with_their_region() {
    let ram = regions(&[10, 20]);
    let mut batch = PageBatch::new(&ram);
    for (region, page) in [(0, 9), (1, 10)] {
        let mut chunk = chunks(&ram, &BTreeSet::from([(region, page)]))[0];
        assert_eq!(batch.push_chunk(&mut chunk, &ChunkBits::FULL), Pushed::All);
    }
    let runs: Vec<_> = batch.runs().iter().map(|run| (run.region.0, run.first_page)).collect();
    assert_eq!(runs, [(0, 9), (1, 10)]);
}

#[test]
#[should_panic(expected = "is of other memory")]
fn a_chunk_of_other_memory_is_refused_whole() {
    // Its first page is here, and its last one is not.
    let (ram, larger) = (regions(&[3]), regions(&[CHUNK_PAGES]));
    let mut chunk = Chunk::new(&larger, RegionIndex(0), 0, ChunkBits::FULL).unwrap();
    PageBatch::new(&ram).push_chunk(&mut chunk, &ChunkBits::EMPTY);
}
