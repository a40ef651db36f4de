//! What becomes of a fault.
//!
//! The assembly of this crate lies between a few labels. A bus error with its instruction between
//! them goes on at the end of its function, which then returns the answer for a fault: all of them
//! are leaves that leave the stack alone, so that end is the same for all.
#![allow(unsafe_code)]
// UNSAFETY: assembly, and a signal handler that changes where the interrupted code goes on.

use crate::signal::Previous;
use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

core::arch::global_asm!(include_str!("x86_64.s"), options(raw));

/// Most pieces of memory that are guarded at once in a process. Of more than these only the
/// accesses of this crate are protected, which is what matters most.
const GUARDED_MAX: usize = 1024;

struct Slot {
    /// 0 while the slot is free.
    start: AtomicUsize,
    end: AtomicUsize,
}

static SLOTS: [Slot; GUARDED_MAX] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; GUARDED_MAX];
/// Held by whoever changes a slot.
static CHANGE: Mutex<()> = Mutex::new(());
static PREVIOUS: OnceLock<Option<Previous>> = OnceLock::new();

thread_local! {
    /// Where this thread last met poisoned memory in a system call; 0 is nowhere. Needs neither
    /// initialising nor dropping, so the handler may use it.
    static POISONED: Cell<usize> = const { Cell::new(0) };
}

/// Memory is guarded until the drop. To be dropped before it is unmapped.
#[derive(Debug)]
pub struct Guarded {
    slot: Option<usize>,
}

/// Guards mapped memory, `bytes` bytes at `start`: poison in it that nobody has touched yet does no
/// harm, and poison that the kernel meets there on behalf of a system call ends that call, not the
/// process; see [`take_poisoned`]. The first call installs the process's handler of SIGBUS.
pub fn guard(start: usize, bytes: usize) -> Guarded {
    PREVIOUS.get_or_init(|| {
        // SAFETY: the handler only does what handlers may.
        unsafe { Previous::replace(libc::SIGBUS, on_bus_error) }.ok()
    });
    let change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = SLOTS.iter().position(|slot| slot.start.load(Ordering::Relaxed) == 0);
    if let Some(slot) = slot {
        SLOTS[slot].end.store(start.saturating_add(bytes), Ordering::Relaxed);
        // Release: who sees the start sees the end.
        SLOTS[slot].start.store(start, Ordering::Release);
    }
    drop(change);
    Guarded { slot }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = self.slot {
            SLOTS[slot].start.store(0, Ordering::Release);
        }
    }
}

/// The address of guarded memory at which a system call of this thread met poison since it was last
/// asked. Such a call fails or, like `KVM_RUN`, is interrupted, and would be again.
pub fn take_poisoned() -> Option<usize> {
    let address = POISONED.replace(0);
    (address != 0).then_some(address)
}

fn is_guarded(address: usize) -> bool {
    SLOTS.iter().any(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && (start..slot.end.load(Ordering::Relaxed)).contains(&address)
    })
}

/// Poison that was found but not touched, and that was touched (asm-generic/siginfo.h).
const BUS_MCEERR_AO: c_int = 5;
const BUS_MCEERR_AR: c_int = 4;

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid structure; a bus error's has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: the kernel passes the interrupted context, ours until the return.
    let leaves_access = || unsafe { leave_access(context) };
    // SAFETY: as above.
    let ends_system_call = || unsafe { is_after_system_call(context) };
    let handled = match code {
        BUS_MCEERR_AO => is_guarded(address),
        1.. if leaves_access() => true,
        BUS_MCEERR_AR if is_guarded(address) && ends_system_call() => {
            POISONED.set(address);
            true
        }
        _ => false,
    };
    if !handled {
        // SAFETY: the kernel's arguments, passed on as they are.
        unsafe {
            Previous::pass_on(PREVIOUS.get().and_then(Option::as_ref), signal, info, context)
        };
    }
}

unsafe extern "C" {
    static martlet_raw_memory_begin: u8;
    static martlet_raw_memory_wide: u8;
    static martlet_raw_memory_end: u8;
    static martlet_raw_memory_fault: u8;
    static martlet_raw_memory_wide_fault: u8;
}

#[expect(clippy::cast_sign_loss, reason = "an enumeration of register numbers")]
const RIP: usize = libc::REG_RIP as c_int as usize;

/// If an access of this crate was interrupted, has it return the answer for a fault.
///
/// # Safety
/// `context` is what the kernel passed to a handler.
unsafe fn leave_access(context: *mut c_void) -> bool {
    // SAFETY: only the labels' addresses are used; the caller's promise for the context.
    unsafe {
        let begin = (&raw const martlet_raw_memory_begin).addr();
        let wide = (&raw const martlet_raw_memory_wide).addr();
        let end = (&raw const martlet_raw_memory_end).addr();
        let rip = rip(context);
        let target = if (begin..wide).contains(&rip) {
            &raw const martlet_raw_memory_fault
        } else if (wide..end).contains(&rip) {
            &raw const martlet_raw_memory_wide_fault
        } else {
            return false;
        };
        let context = context.cast::<libc::ucontext_t>();
        (*context).uc_mcontext.gregs[RIP] = target.addr().cast_signed() as i64;
        true
    }
}

/// Whether the kernel was on its way back from a system call.
///
/// # Safety
/// As for `leave_access`.
unsafe fn is_after_system_call(context: *mut c_void) -> bool {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    // SAFETY: the caller's promise. The page of the interrupted instruction is mapped, and only
    // bytes of that page are read.
    unsafe {
        let rip = rip(context);
        rip % 4096 >= 2
            && core::ptr::with_exposed_provenance::<[u8; 2]>(rip - 2).read_volatile() == SYSCALL
    }
}

unsafe fn rip(context: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    let rip = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[RIP] };
    usize::try_from(rip).unwrap_or(0)
}
