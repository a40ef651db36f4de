//! Memory that a VMM has already, of each kind that it may be.
#![allow(unsafe_code)]
// UNSAFETY: stands in for the VMM, which maps memory and hands it over.
#![allow(clippy::unwrap_used, reason = "a test")]

use martlet_ram::{
    Backing, Chunk, ChunkBits, DirtyMarker, GuestRam, PageBatch, PageBitmap, Placer, Pushed,
    RamRegion, RegionIndex, Target, ZeroCheck, mark_touched,
};
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// A mapping of the VMM's.
struct Mapped {
    start: usize,
    length: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: its own mapping, which nobody uses any more.
        unsafe { rustix::mm::munmap(start, self.length) }.unwrap();
    }
}

fn map(bytes: u64, file: Option<(&File, u64)>, flags: MapFlags) -> io::Result<Arc<Mapped>> {
    let length = usize::try_from(bytes).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let any = std::ptr::null_mut();
    // SAFETY: a new mapping harms nobody.
    let start = unsafe {
        match file {
            Some((file, offset)) => rustix::mm::mmap(any, length, protection, flags, file, offset),
            None => rustix::mm::mmap_anonymous(any, length, protection, flags),
        }
    }?;
    Ok(Arc::new(Mapped { start: start.expose_provenance(), length }))
}

fn adopt(range: PageRange, mapped: Arc<Mapped>, backing: Backing) -> RamRegion {
    let host = std::ptr::with_exposed_provenance_mut(mapped.start);
    // SAFETY: mapped until the owner goes; nobody has a reference.
    unsafe { RamRegion::adopt(range, host, backing, mapped) }.unwrap()
}

/// 4 MiB: two huge pages.
const PAGES: u64 = 1024;

fn range(pages: u64) -> PageRange {
    PageRange::try_new(Gfn(16), PageCount(pages)).unwrap()
}

fn memfd(bytes: u64, flags: MemfdFlags) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create("vmm", flags | MemfdFlags::CLOEXEC)?);
    file.set_len(bytes)?;
    Ok(file)
}

fn shared_file(file: File, offset: u64, pages: u64) -> io::Result<GuestRam> {
    let mapped = map(pages * PAGE_SIZE, Some((&file, offset)), MapFlags::SHARED)?;
    let region = adopt(range(pages), mapped, Backing::File { file, offset });
    Ok(GuestRam::from_regions(vec![region]).unwrap())
}

fn memfd_at_an_offset() -> GuestRam {
    let offset = 3 * PAGE_SIZE;
    let file = memfd(offset + (PAGES + 5) * PAGE_SIZE, MemfdFlags::empty()).unwrap();
    shared_file(file, offset, PAGES).unwrap()
}

fn anonymous() -> GuestRam {
    let mapped = map(PAGES * PAGE_SIZE, None, MapFlags::PRIVATE).unwrap();
    let region = adopt(range(PAGES), mapped, Backing::PrivateAnonymous);
    GuestRam::from_regions(vec![region]).unwrap()
}

fn file_on_a_disk() -> GuestRam {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/guest-memory");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.unwrap();
    fs::remove_file(path).unwrap();
    file.set_len(PAGES * PAGE_SIZE).unwrap();
    shared_file(file, 0, PAGES).unwrap()
}

fn unknown() -> GuestRam {
    let mapped = map(PAGES * PAGE_SIZE, None, MapFlags::SHARED).unwrap();
    GuestRam::from_regions(vec![adopt(range(PAGES), mapped, Backing::Other)]).unwrap()
}

fn touched(ram: &GuestRam) -> BTreeSet<u64> {
    let region = &ram.regions()[0];
    let bits = PageBitmap::new(region.pages());
    assert_eq!(mark_touched(region, &bits).unwrap(), bits.count());
    bits.runs().flatten().collect()
}

const REGION: RegionIndex = RegionIndex(0);
/// Content, and zeros that were written.
const WRITTEN: [(u64, u8); 6] = [(0, 1), (1, 2), (511, 0), (600, 3), (601, 4), (1023, 5)];

fn write(ram: &Arc<GuestRam>, pages: &[(u64, u8)]) {
    let marker = DirtyMarker::new(Arc::clone(ram));
    for (page, byte) in pages {
        marker.write(Gpa((16 + page) * PAGE_SIZE), &[*byte; 4096]).unwrap();
    }
}

/// What all kinds of memory have in common.
fn behaves(ram: GuestRam) -> Arc<GuestRam> {
    let ram = Arc::new(ram);
    write(&ram, &WRITTEN);
    let mut page = [0; 4096];
    ram.read(Gpa((16 + 600) * PAGE_SIZE), &mut page).unwrap();
    assert_eq!(page, [3; 4096]);
    assert!(ram.read(Gpa(15 * PAGE_SIZE), &mut page).is_err());

    let found = touched(&ram);
    assert!(WRITTEN.iter().all(|(page, _)| found.contains(page)), "{found:?}");
    let own = Arc::new(GuestRam::create(&ram.layout()).unwrap());
    write(&own, &WRITTEN);
    assert_eq!(ram.digest().unwrap(), own.digest().unwrap());
    write(&own, &[(2, 1)]);
    assert_ne!(ram.digest().unwrap(), own.digest().unwrap());

    // What is sent.
    let mut bits = ChunkBits::EMPTY;
    [88, 89, 511].into_iter().for_each(|page| bits.set(page));
    let mut chunk = Chunk::new(&ram, REGION, 1, bits).unwrap();
    let zero = chunk.zero_pages(&ram, &ZeroCheck::detect());
    assert!(zero.is_empty());
    let mut batch = PageBatch::new(&ram);
    assert_eq!(batch.push_chunk(&mut chunk, &zero), Pushed::All);
    assert_eq!(batch.slices()[0].as_ptr(), ram.regions()[0].host_ptr(600));
    assert_eq!((batch.slices()[0].len(), batch.slices().len()), (8192, 2));
    ram
}

/// Memory that a guest arrives in: content, then zeros over it.
fn receives(ram: GuestRam) -> Arc<GuestRam> {
    let ram = Arc::new(ram);
    let placer = Placer::new(Arc::clone(&ram));
    match placer.data_target(REGION, 0, 1000).unwrap() {
        Target::Memory(memory) => assert_eq!(memory.as_ptr(), ram.regions()[0].host_ptr(0)),
        Target::File { offset, bytes, .. } => {
            let file = ram.regions()[0].file().unwrap();
            assert_eq!((offset, bytes), (file.offset, 1000 * PAGE_SIZE));
            assert_eq!(rustix::io::pwrite(file.fd, &[7; 4096], offset), Ok(4096));
        }
    }
    write(&ram, &[(0, 7), (1, 8), (999, 9)]);
    assert_eq!(placer.zero(REGION, 1, 999), Ok(PageCount(999)));
    let own = Arc::new(GuestRam::create(&ram.layout()).unwrap());
    write(&own, &[(0, 7)]);
    assert_eq!(ram.digest().unwrap(), own.digest().unwrap());
    ram
}

fn written() -> BTreeSet<u64> {
    WRITTEN.iter().map(|(page, _)| *page).collect()
}

#[test]
fn a_memfd_from_an_offset_on() {
    let ram = behaves(memfd_at_an_offset());
    assert_eq!(touched(&ram), written());
    let region = &ram.regions()[0];
    assert_eq!(region.file().unwrap().offset, 3 * PAGE_SIZE);
    assert_eq!(region.page_of_file(3 * PAGE_SIZE + 8192), 2);
    // Its file is not this region's alone.
    assert_eq!(rustix::io::pwrite(region.file().unwrap().fd, &[1], 0), Ok(1));
    assert_eq!(touched(&ram), written());
}

#[test]
fn a_memfd_that_receives_keeps_its_pages() {
    let ram = memfd_at_an_offset();
    ram.regions()[0].populate(0..PAGES).unwrap();
    // Somebody may have them pinned.
    assert_eq!(touched(&receives(ram)).len() as u64, PAGES);
}

#[test]
fn two_regions_in_one_file() {
    let file = memfd(20 * PAGE_SIZE, MemfdFlags::empty()).unwrap();
    let part = |first: u64, offset: u64| {
        let range = PageRange::try_new(Gfn(first), PageCount(8)).unwrap();
        let mapped = map(8 * PAGE_SIZE, Some((&file, offset)), MapFlags::SHARED).unwrap();
        adopt(range, mapped, Backing::File { file: file.try_clone().unwrap(), offset })
    };
    let regions = vec![part(0, 0), part(100, 10 * PAGE_SIZE)];
    let ram = Arc::new(GuestRam::from_regions(regions).unwrap());
    let marker = DirtyMarker::new(Arc::clone(&ram));
    marker.write(Gpa(7 * PAGE_SIZE), &[1]).unwrap();
    marker.write(Gpa(101 * PAGE_SIZE), &[1]).unwrap();
    let found = ram.regions().iter().map(|region| {
        let bits = PageBitmap::new(8);
        mark_touched(region, &bits).unwrap();
        bits.runs().flatten().collect::<Vec<_>>()
    });
    assert_eq!(found.collect::<Vec<_>>(), [[7], [1]]);
}

#[test]
fn private_anonymous_memory() {
    let ram = behaves(anonymous());
    // Where the host gives huge pages unasked, neighbours are there too.
    let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !thp.contains("[always]") {
        assert_eq!(touched(&ram), written());
    }
    assert!(ram.regions()[0].file().is_none());
    receives(anonymous());
}

#[test]
fn of_other_memory_each_page_counts() {
    for make in [file_on_a_disk, unknown] {
        let ram = behaves(make());
        assert_eq!(touched(&ram).len() as u64, PAGES);
        receives(make());
    }
}

#[test]
fn what_is_no_memory_of_a_guest_is_refused() {
    let mapped = map(PAGE_SIZE * 2, None, MapFlags::PRIVATE).unwrap();
    let host = std::ptr::with_exposed_provenance_mut::<u8>(mapped.start).wrapping_add(8);
    // SAFETY: within a mapping that lives.
    let error = unsafe { RamRegion::adopt(range(1), host, Backing::PrivateAnonymous, mapped) };
    let error = error.unwrap_err().to_string();
    assert!(error.contains("does not begin with a page"), "{error}");
    let two = || RamRegion::create(range(10)).unwrap();
    assert!(GuestRam::from_regions(vec![two(), two()]).is_err(), "they overlap");
    assert!(GuestRam::from_regions(Vec::new()).is_err());
}

/// Huge pages of the host for the length of a test, if it has some to give.
struct HugePages {
    setting: String,
    before: u64,
}

static RESERVING: Mutex<()> = Mutex::new(());

impl HugePages {
    fn reserve(kib: u64, count: u64) -> Option<HugePages> {
        let setting = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
        let read = || fs::read_to_string(&setting).ok()?.trim().parse::<u64>().ok();
        let before = read()?;
        let pages = HugePages { setting: setting.clone(), before };
        fs::write(&setting, (before + count).to_string()).ok()?;
        (read()? >= before + count).then_some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(&self.setting, self.before.to_string());
    }
}

fn huge_pages(kib: u64, flags: MemfdFlags) {
    let _one_at_a_time = RESERVING.lock().unwrap_or_else(PoisonError::into_inner);
    let pages_of_one = kib / 4;
    let count = PAGES.div_ceil(pages_of_one);
    let Some(_reserved) = HugePages::reserve(kib, count) else {
        return skipped(&format!("hugetlb-{kib}"));
    };
    let pages = count * pages_of_one;
    let make = || {
        let file = memfd(pages * PAGE_SIZE, flags | MemfdFlags::HUGETLB)?;
        shared_file(file, 0, pages)
    };
    let untouched = make().unwrap();
    assert!(touched(&untouched).is_empty());
    let ram = behaves(untouched);
    let of_a_huge_page = |page: &u64| page / pages_of_one * pages_of_one;
    let huge: BTreeSet<u64> = written().iter().map(of_a_huge_page).collect();
    assert_eq!(touched(&ram).len() as u64, huge.len() as u64 * pages_of_one);
    assert!(ram.regions()[0].file().is_none());
    drop(ram);
    receives(make().unwrap());
}

/// What this host can't give is missed aloud, or not at all: `MARTLET_REQUIRE` lists what it must.
fn skipped(what: &str) {
    let required = std::env::var("MARTLET_REQUIRE").unwrap_or_default();
    assert!(required.split(',').all(|one| one != what), "{what} is required, and not to be had");
    // Past the test's own capture.
    let _ = writeln!(io::stderr(), "SKIPPED: this host gives no {what}");
}

#[test]
fn huge_pages_of_2_mib() {
    huge_pages(2048, MemfdFlags::HUGE_2MB);
}

#[test]
fn huge_pages_of_1_gib() {
    huge_pages(1 << 20, MemfdFlags::HUGE_1GB);
}
