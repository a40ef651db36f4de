//! The built-in guest: fills memory, rewrites a working set at a set rate, checks all of it all
//! the time, keeps a heartbeat.
//!
//! It is compiled by the library's build script to one block of position-independent bytes. They
//! run at privilege level 3 of a vCPU, or as a thread of a process: the same bytes. Everything
//! that the program knows is in registers and guest memory, so it can be stopped between any two
//! instructions and go on elsewhere. No instruction needs a privilege, no symbol comes from
//! outside, no panic can be reached: nobody would see it.
#![no_std]
#![no_builtins]
#![allow(unsafe_code)]
// UNSAFETY: bare memory is all there is; the VMM's parameters say which parts are this vCPU's.

use core::arch::asm;

#[allow(dead_code, reason = "the directory is for the VMM")]
mod abi;
mod nic;
mod page;

use abi::{Counters, Parameters};

/// Where guest physical address 0 lies in the program's linear address space.
#[derive(Clone, Copy)]
struct Base(u64);

impl Base {
    /// The linear address of a guest physical address.
    #[inline(always)]
    fn at<T>(self, address: u64) -> *mut T {
        self.0.wrapping_add(address) as *mut T
    }

    #[inline(always)]
    fn frame(self, frame: u64) -> *mut u64 {
        self.at(frame << 12)
    }
}

/// Adds to a counter or sets it, at once for whoever reads it from outside.
macro_rules! counter {
    ($vcpu:expr, $field:ident += $value:expr) => {
        counter!($vcpu, $field = counter!($vcpu, $field).wrapping_add($value))
    };
    ($vcpu:expr, $field:ident = $value:expr) => {
        (&raw mut (*$vcpu.counters).$field).write_volatile($value)
    };
    ($vcpu:expr, $field:ident) => {
        (&raw const (*$vcpu.counters).$field).read_volatile()
    };
}

/// A place in the filled memory of this vCPU.
struct Cursor {
    extent: u64,
    page: u64,
    index: u64,
}

struct Vcpu {
    base: Base,
    parameters: *const Parameters,
    counters: *mut Counters,
    versions: *mut u64,
    /// The next page to rewrite; runs over the working set.
    write: Cursor,
    /// The next page to check; runs over all extents.
    verify: Cursor,
    /// Pages rewritten since the start. It alone gives each page's version, so a version table
    /// that came to the destination too old is found as well.
    written: u64,
    /// Part of a page that the last ticks still owe, in 1/2^32.
    credit: u64,
    last_tsc: u64,
    next_zero_sample: u64,
    /// The next network card to have its turn.
    next_nic: u64,
}

/// `base`: linear address of guest physical address 0. `parameters`: guest physical address of
/// this vCPU's [`Parameters`].
///
/// # Safety
/// The VMM wrote the parameters and keeps its hands off the memory they name.
#[unsafe(no_mangle)]
pub unsafe extern "sysv64" fn martlet_guest_entry(base: u64, parameters: u64) -> ! {
    let base = Base(base);
    let parameters: *const Parameters = base.at(parameters);
    // SAFETY: the VMM's parameters name memory that is this vCPU's alone, here and below.
    unsafe {
        let mut vcpu = Vcpu {
            base,
            parameters,
            counters: base.at((*parameters).counters),
            versions: base.at((*parameters).versions),
            write: Cursor { extent: 0, page: 0, index: 0 },
            verify: Cursor { extent: 0, page: 0, index: 0 },
            written: 0,
            credit: 0,
            last_tsc: 0,
            next_zero_sample: 0,
            next_nic: 0,
        };
        fill(&vcpu);
        nic::set_up_all(base, parameters);
        counter!(vcpu, ready = 1);
        out_byte(abi::HEARTBEAT_PORT, abi::READY);
        run(&mut vcpu)
    }
}

/// Writes version 1 of every page and of every place in the version table.
unsafe fn fill(vcpu: &Vcpu) {
    // SAFETY: see the entry.
    unsafe {
        let parameters = vcpu.parameters;
        let mut index = 0;
        while index < (*parameters).working_set_pages {
            vcpu.versions.add(index as usize).write(1);
            index += 1;
        }
        let mut filled = 0;
        let mut extent = 0;
        while extent < (*parameters).extents_count {
            let run = extent_at(parameters, extent);
            let mut at = 0;
            while at < run.pages {
                let frame = run.frame + at;
                page::write(vcpu.base.frame(frame), frame, 1);
                filled += 1;
                counter!(vcpu, filled_pages = filled);
                at += 1;
            }
            extent += 1;
        }
    }
}

/// Ticks for ever.
unsafe fn run(vcpu: &mut Vcpu) -> ! {
    // SAFETY: see the entry.
    unsafe {
        let tick = (*vcpu.parameters).tick_cycles;
        vcpu.last_tsc = tsc();
        let mut next = vcpu.last_tsc;
        loop {
            beat(vcpu);
            rewrite(vcpu);
            nic::take_turns(vcpu.base, vcpu.parameters, &mut vcpu.next_nic);
            check_zero_sample(vcpu);
            next = next.wrapping_add(tick);
            let now = tsc();
            if later(now, next) {
                // Stopped or late for more than a tick: what was missed is not made up for.
                next = now.wrapping_add(tick);
            }
            let mut budget = (*vcpu.parameters).verify_per_tick;
            while later(next, tsc()) {
                if budget > 0 {
                    budget -= 1;
                    verify_one(vcpu);
                } else {
                    core::hint::spin_loop();
                }
            }
        }
    }
}

unsafe fn beat(vcpu: &mut Vcpu) {
    // SAFETY: see the entry.
    unsafe {
        let now = tsc();
        if later(vcpu.last_tsc, now) {
            counter!(vcpu, tsc_backwards += 1);
        } else {
            let gap = now - vcpu.last_tsc;
            if gap > counter!(vcpu, longest_gap) {
                counter!(vcpu, longest_gap = gap);
            }
        }
        vcpu.last_tsc = now;
        counter!(vcpu, tsc = now);
        counter!(vcpu, heartbeats += 1);
        out_byte(abi::HEARTBEAT_PORT, abi::BEAT);
    }
}

/// Rewrites as many pages of the working set as this tick owes.
unsafe fn rewrite(vcpu: &mut Vcpu) {
    // SAFETY: see the entry.
    unsafe {
        let parameters = vcpu.parameters;
        let pages = (*parameters).working_set_pages;
        if pages == 0 {
            return;
        }
        vcpu.credit = vcpu.credit.wrapping_add((*parameters).pages_per_tick);
        while vcpu.credit >> 32 > 0 {
            vcpu.credit -= 1 << 32;
            let frame = frame_at(parameters, &vcpu.write);
            let version = vcpu.versions.add(vcpu.write.index as usize);
            let new = version.read().wrapping_add(1);
            page::write(vcpu.base.frame(frame), frame, new);
            version.write(new);
            vcpu.written += 1;
            counter!(vcpu, written_pages = vcpu.written);
            step(parameters, &mut vcpu.write);
            if vcpu.write.index >= pages {
                vcpu.write = Cursor { extent: 0, page: 0, index: 0 };
            }
        }
    }
}

/// Checks the page at the verify cursor.
unsafe fn verify_one(vcpu: &mut Vcpu) {
    // SAFETY: see the entry.
    unsafe {
        let parameters = vcpu.parameters;
        let index = vcpu.verify.index;
        let frame = frame_at(parameters, &vcpu.verify);
        let pages = (*parameters).working_set_pages;
        let mut version = 1;
        let mut known = version;
        if index < pages {
            // The cursor of the writer is at `written % pages`: pages before it had one more.
            version += vcpu.written / pages + u64::from(index < vcpu.write.index);
            known = vcpu.versions.add(index as usize).read();
        }
        forget_memory();
        if known != version || !page::matches(vcpu.base.frame(frame), frame, version) {
            report_wrong(vcpu, frame, version);
        }
        counter!(vcpu, verified_pages += 1);
        step(parameters, &mut vcpu.verify);
        if vcpu.verify.extent >= (*parameters).extents_count {
            vcpu.verify = Cursor { extent: 0, page: 0, index: 0 };
        }
    }
}

/// Checks one of the pages that nobody writes, one in 64 ticks.
unsafe fn check_zero_sample(vcpu: &mut Vcpu) {
    // SAFETY: see the entry.
    unsafe {
        let count = (*vcpu.parameters).zero_samples_count;
        if count == 0 || !counter!(vcpu, heartbeats).is_multiple_of(64) {
            return;
        }
        let samples = (&raw const (*vcpu.parameters).zero_samples).cast::<u64>();
        let frame = samples.add(vcpu.next_zero_sample as usize).read();
        forget_memory();
        if !page::is_zero(vcpu.base.frame(frame)) {
            report_wrong(vcpu, frame, 0);
        }
        counter!(vcpu, verified_pages += 1);
        vcpu.next_zero_sample += 1;
        if vcpu.next_zero_sample >= count {
            vcpu.next_zero_sample = 0;
        }
    }
}

/// Counts a wrong page. Of the first one it keeps what is needed to understand it, and tells it.
#[inline(never)]
unsafe fn report_wrong(vcpu: &Vcpu, frame: u64, version: u64) {
    // SAFETY: see the entry.
    unsafe {
        if counter!(vcpu, wrong_pages) == 0 {
            let at = vcpu.base.frame(frame);
            let mut index = 0;
            while index < page::PAGE_WORDS - 1 {
                let expected = if version == 0 { 0 } else { page::word(frame, version, index) };
                if at.add(index).read_volatile() != expected {
                    break;
                }
                index += 1;
            }
            counter!(vcpu, first_wrong_frame = frame);
            counter!(vcpu, first_wrong_version = version);
            counter!(vcpu, first_wrong_word = index as u64);
            counter!(vcpu, first_wrong_value = at.add(index).read_volatile());
            counter!(vcpu, wrong_pages = 1);
            out_word(abi::WRONG_PAGE_PORT, frame as u32);
        } else {
            counter!(vcpu, wrong_pages += 1);
        }
    }
}

#[inline(always)]
unsafe fn extent_at(parameters: *const Parameters, extent: u64) -> abi::Extent {
    // SAFETY: the caller keeps `extent` below the count of extents.
    unsafe { (&raw const (*parameters).extents).cast::<abi::Extent>().add(extent as usize).read() }
}

#[inline(always)]
unsafe fn frame_at(parameters: *const Parameters, cursor: &Cursor) -> u64 {
    // SAFETY: a cursor's extent is below the count of extents.
    unsafe { extent_at(parameters, cursor.extent) }.frame + cursor.page
}

/// Moves to the next page; past the last one the extent is the count of extents.
#[inline(always)]
unsafe fn step(parameters: *const Parameters, cursor: &mut Cursor) {
    cursor.index += 1;
    cursor.page += 1;
    // SAFETY: a cursor's extent is below the count of extents.
    if cursor.page >= unsafe { extent_at(parameters, cursor.extent) }.pages {
        cursor.extent += 1;
        cursor.page = 0;
    }
}

/// Whether `a` is after `b` on the time stamp counter, which may wrap.
#[inline(always)]
fn later(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) > 0
}

/// The time stamp counter, not read ahead of what comes before (Intel SDM volume 2B, RDTSC).
#[inline(always)]
fn tsc() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Memory may have changed by other means than this program: that is what is being looked for.
#[inline(always)]
fn forget_memory() {
    // SAFETY: no instruction.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

#[inline(always)]
unsafe fn out_byte(port: u16, value: u8) {
    // SAFETY: the VMM listens on this port and changes nothing here.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack, preserves_flags)) };
}

#[inline(always)]
unsafe fn out_word(port: u16, value: u32) {
    // SAFETY: the VMM listens on this port and changes nothing here.
    unsafe {
        asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack, preserves_flags));
    }
}
