//! Memory that is lost while it is mapped.
#![allow(unsafe_code)]
// UNSAFETY: maps a file and cuts it short, to touch what is behind its end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use martlet_raw_memory::{
    Guarded, MemoryFault, ZeroTest, clear, guard, is_reachable, read, take_poisoned, write,
};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGE: usize = 4096;

/// Two mapped pages, of which the second is lost until it is healed.
struct Pages {
    start: *mut u8,
    file: OwnedFd,
    _guarded: Guarded,
}

impl Pages {
    fn new() -> Pages {
        let file = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, &file, 0)
        };
        let start = start.unwrap().cast::<u8>();
        Pages { start, file, _guarded: guard(start.addr(), 2 * PAGE) }
    }

    fn heal(&self) {
        rustix::fs::ftruncate(&self.file, 2 * PAGE as u64).unwrap();
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no pointer outlives it.
        unsafe { rustix::mm::munmap(self.start.cast(), 2 * PAGE) }.unwrap();
    }
}

fn zero_tests() -> impl Iterator<Item = ZeroTest> {
    [Some(ZeroTest::WORDS), ZeroTest::avx2(), ZeroTest::avx512()].into_iter().flatten()
}

/// All accesses to the page at `offset`.
fn all(pages: &Pages, offset: usize) -> Vec<Result<(), MemoryFault>> {
    let mut results = Vec::new();
    // SAFETY: both pages are mapped and nobody else knows them.
    unsafe {
        for bytes in [1, 2, 3, 4, 8, 9, 100, PAGE] {
            results.push(read(pages.at(offset), &mut vec![1; bytes]));
            results.push(write(pages.at(offset), &vec![0; bytes]));
        }
        results.push(clear(pages.at(offset), PAGE));
        results
            .extend(zero_tests().map(|test| test.run(pages.at(offset)).map(|zero| assert!(zero))));
    }
    results
}

#[test]
fn a_lost_page_is_an_error_and_a_healed_one_is_not() {
    let pages = Pages::new();
    assert!(all(&pages, 0).iter().all(Result::is_ok));
    assert!(all(&pages, PAGE).iter().all(Result::is_err));
    // SAFETY: as in `all`.
    unsafe {
        assert!(is_reachable(pages.at(PAGE - 1)) && !is_reachable(pages.at(PAGE)));
    }
    pages.heal();
    assert!(all(&pages, PAGE).iter().all(Result::is_ok));
}

#[test]
fn what_begins_well_and_runs_into_it_is_an_error() {
    let pages = Pages::new();
    let mut into = [9; 200];
    // SAFETY: as in `all`.
    unsafe {
        write(pages.at(PAGE - 100), &[7; 100]).unwrap();
        assert_eq!(read(pages.at(PAGE - 100), &mut into), Err(MemoryFault));
        assert_eq!(read(pages.at(PAGE - 4), &mut into[..8]), Err(MemoryFault));
        assert_eq!(write(pages.at(PAGE - 4), &[1; 8]), Err(MemoryFault));
        assert_eq!(clear(pages.at(PAGE - 100), 200), Err(MemoryFault));
    }
}

proptest! {
    #[test]
    fn what_is_copied_is_what_was_there(
        offset in 0..32_usize, bytes in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let pages = Pages::new();
        let mut all = [0; 200];
        let mut into = vec![0; bytes.len()];
        // SAFETY: as in `all`.
        unsafe {
            write(pages.at(offset), &bytes).unwrap();
            read(pages.at(offset), &mut into).unwrap();
            read(pages.at(0), &mut all).unwrap();
        }
        prop_assert_eq!(&into, &bytes);
        let end = offset + bytes.len();
        prop_assert_eq!(&all[offset..end], &bytes[..]);
        prop_assert!(all[..offset].iter().chain(&all[end..]).all(|byte| *byte == 0));
    }
}

/// Another thread writes words at every size and alignment, each with the same byte throughout.
#[test]
fn aligned_words_are_read_whole() {
    let pages = Pages::new();
    let word = pages.at(40).cast::<AtomicU64>();
    let stop = AtomicBool::new(false);
    // SAFETY: an aligned word of a page that lives as long as the test.
    let word = unsafe { &*word };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0_u8;
            while !stop.load(Ordering::Relaxed) {
                word.store(u64::from_ne_bytes([byte; 8]), Ordering::Relaxed);
                byte = byte.wrapping_add(1);
            }
        });
        for (offset, bytes) in [(40, 8), (39, 9), (38, 20), (33, 31), (40, 4), (42, 2), (44, 4)] {
            for _ in 0..2000 {
                let mut into = vec![0; bytes];
                // SAFETY: as in `all`.
                unsafe { read(pages.at(offset), &mut into) }.unwrap();
                let inside = 40_usize.saturating_sub(offset)..(48 - offset).min(bytes);
                let seen = &into[inside];
                assert!(seen.iter().all(|byte| *byte == seen[0]), "{offset} {bytes}: {into:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn every_thread_is_protected() {
    let pages = Pages::new();
    let at = pages.at(PAGE).expose_provenance();
    let hammer = move || {
        for _ in 0..1000 {
            // SAFETY: as in `all`.
            let result = unsafe { read(std::ptr::with_exposed_provenance(at), &mut [0; 16]) };
            assert_eq!(result, Err(MemoryFault));
        }
    };
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(hammer)).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Has the kernel tell this thread of poison at an address, as it does at a system call's end.
fn tell_of_poison(code: i32, address: usize) {
    #[repr(C)]
    struct Info {
        signal: i32,
        errno: i32,
        code: i32,
        padding: i32,
        address: usize,
        rest: [u64; 13],
    }
    const { assert!(size_of::<Info>() == 128) };
    let info = Info { signal: libc::SIGBUS, errno: 0, code, padding: 0, address, rest: [0; 13] };
    // SAFETY: the kernel reads a siginfo_t, which `info` is laid out as.
    let result = unsafe {
        let (process, thread) = (libc::getpid(), libc::gettid());
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

const TOUCHED: i32 = libc::BUS_MCEERR_AR;
const ONLY_FOUND: i32 = libc::BUS_MCEERR_AO;

#[test]
fn poison_that_a_system_call_met_is_told_once_by_its_thread() {
    let pages = Pages::new();
    tell_of_poison(TOUCHED, pages.at(5000).addr());
    let other = std::thread::spawn(take_poisoned).join().unwrap();
    assert_eq!((other, take_poisoned()), (None, Some(pages.at(5000).addr())));
    assert_eq!(take_poisoned(), None);
    tell_of_poison(ONLY_FOUND, pages.at(0).addr());
    assert_eq!(take_poisoned(), None);
}

#[test]
fn poison_that_is_not_in_guarded_memory_is_not_for_this_handler() {
    use std::os::unix::process::ExitStatusExt;
    for test in ["poison_of_others", "poison_after_the_end"] {
        assert_eq!(in_a_process(test).signal(), Some(libc::SIGBUS), "{test}");
    }
}

#[test]
#[ignore = "run by another test"]
fn poison_of_others() {
    let pages = Pages::new();
    tell_of_poison(TOUCHED, pages.at(2 * PAGE).addr());
    // The handler of the standard library comes back, so that the fault comes again.
    tell_of_poison(TOUCHED, pages.at(2 * PAGE).addr());
}

#[test]
#[ignore = "run by another test"]
fn poison_after_the_end() {
    let pages = Pages::new();
    let at = pages.at(0).addr();
    drop(pages);
    tell_of_poison(TOUCHED, at);
    tell_of_poison(TOUCHED, at);
}

/// Runs a test of this file in a process of its own.
fn in_a_process(test: &str) -> std::process::ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).status().unwrap()
}

#[test]
fn a_touch_by_anything_else_still_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(in_a_process("touch").signal(), Some(libc::SIGBUS));
}

#[test]
fn the_handler_before_still_gets_what_is_not_for_this_one() {
    assert_eq!(in_a_process("touch_with_a_handler").code(), Some(77));
}

#[test]
#[ignore = "run by another test"]
fn touch() {
    let pages = Pages::new();
    // SAFETY: ends the process, which is what is tested.
    unsafe { pages.at(PAGE).read_volatile() };
}

#[test]
#[ignore = "run by another test"]
fn touch_with_a_handler() {
    extern "C" fn leave(_signal: libc::c_int) {
        // SAFETY: allowed in handlers.
        unsafe { libc::_exit(77) };
    }
    // SAFETY: the handler does only what handlers may.
    unsafe { libc::signal(libc::SIGBUS, leave as *const () as libc::sighandler_t) };
    let pages = Pages::new();
    assert!(all(&pages, PAGE).iter().all(Result::is_err));
    // SAFETY: ends the process, which is what is tested.
    unsafe { pages.at(PAGE).read_volatile() };
}
