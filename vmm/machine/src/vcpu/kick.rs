//! The signal that calls a vCPU out of the guest.
#![allow(unsafe_code)]
// UNSAFETY: installs a handler, and sends the signal to a thread.

use super::backend::BackendError;
use martlet_raw_memory::{Handler, Previous};
use std::ffi::{c_int, c_void};
use std::io;
use std::sync::OnceLock;

/// Nothing on x86-64 ever sends this one (signal(7)), and unlike a real-time signal it can't be
/// lost for want of a place in a queue (`__send_signal_locked`, kernel/signal.c), nor come twice
/// for two kicks.
pub(crate) const KICK: c_int = libc::SIGSTKFLT;

/// What is done on a vCPU's thread beside letting the signal come, which is all that KVM needs.
static ON_KICK: OnceLock<Handler> = OnceLock::new();

extern "C" fn on_kick(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if let Some(handler) = ON_KICK.get() {
        handler(signal, info, context);
    }
}

/// Installs the handler of kicks for the whole process, once.
pub(crate) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: reads a word and calls a handler; whoever had the signal before has no use for a
        // kick.
        let previous = unsafe { Previous::replace(KICK, on_kick) };
        previous.map(drop).map_err(|error| error.raw_os_error().unwrap_or(0))
    };
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

/// As [`install`], with something to do; always the same.
///
/// # Safety
/// The handler does only what handlers may (signal-safety(7)), on whatever thread of the process.
#[cfg(feature = "threads")]
pub(crate) unsafe fn install_with(handler: Handler) -> io::Result<()> {
    let _ = ON_KICK.set(handler);
    install()
}

/// Sends a kick to a thread of this process, which must still live.
pub(crate) fn kick_thread(thread: libc::pid_t) -> Result<(), BackendError> {
    // SAFETY: plain numbers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, KICK) };
    if result == 0 { Ok(()) } else { Err(BackendError::host("tgkill")(io::Error::last_os_error())) }
}
