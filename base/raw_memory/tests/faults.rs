//! Memory that is lost while it is mapped.
#![allow(unsafe_code)]
// UNSAFETY: maps a file and cuts it short, to touch what is behind its end.

use martlet_raw_memory::{Guarded, MemoryFault, ZeroTest, clear, guard, is_reachable, read, write};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::process::Command;

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
