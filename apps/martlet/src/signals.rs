//! SIGINT and SIGTERM, taken by one thread, so that nothing else is interrupted by them.
#![allow(unsafe_code)]
// UNSAFETY: blocking signals for all threads and waiting for them has no safe wrapper in std or
// rustix. The sets are plain local values; nothing here runs in a signal handler.

use std::io;
use std::mem::MaybeUninit;
use std::thread;

/// The signals that ask this process to end.
fn termination_set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set; both signals are valid numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        set.assume_init()
    }
}

/// From now on every SIGINT and SIGTERM calls `on_signal`, on a thread of its own, with how many
/// came before. Call it before any other thread exists: threads inherit the block.
pub(crate) fn on_termination(
    mut on_signal: impl FnMut(u32) + Send + 'static,
) -> Result<(), io::Error> {
    let set = termination_set();
    // SAFETY: `set` is initialised; the old mask is not asked for.
    let status =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, core::ptr::null_mut()) };
    if status != 0 {
        return Err(io::Error::from_raw_os_error(status));
    }
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let mut before = 0;
        loop {
            let mut signal = 0;
            // SAFETY: both pointers are to live locals; the set's signals are blocked above.
            if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
                on_signal(before);
                before += 1;
            }
        }
    })?;
    Ok(())
}
