//! Signal handlers, one before the other.
#![allow(unsafe_code)]
// UNSAFETY: installs handlers and calls those that were there.

use core::ffi::{c_int, c_void};
use std::io;

/// A handler as the kernel calls it with `SA_SIGINFO`.
pub type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// What handled a signal before.
pub struct Previous(libc::sigaction);

impl Previous {
    /// Installs a handler that is not interrupted by other signals, on the thread's signal stack
    /// where it has one.
    ///
    /// # Safety
    /// The handler does only what handlers may (signal-safety(7)), and gives what is not for it to
    /// [`Previous::pass_on`].
    pub unsafe fn replace(signal: c_int, handler: Handler) -> io::Result<Previous> {
        // SAFETY: zeroes are an action, "default", with an empty mask; the caller's promise for the
        // handler.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigfillset(&raw mut action.sa_mask);
            let mut previous: libc::sigaction = core::mem::zeroed();
            if libc::sigaction(signal, &raw const action, &raw mut previous) == 0 {
                Ok(Previous(previous))
            } else {
                Err(io::Error::last_os_error())
            }
        }
    }

    /// Gives a signal to whoever had it before; `None` is nobody, and so the default.
    ///
    /// # Safety
    /// Called by the handler that replaced this one, with the kernel's arguments.
    pub unsafe fn pass_on(
        previous: Option<&Previous>,
        signal: c_int,
        info: *mut libc::siginfo_t,
        context: *mut c_void,
    ) {
        let (handler, flags) = previous
            .map_or((libc::SIG_DFL, 0), |Previous(action)| (action.sa_sigaction, action.sa_flags));
        // SAFETY: the handler is of the kind that its flags say; the C library kept both.
        unsafe {
            if handler == libc::SIG_IGN && (*info).si_code <= 0 {
                // Sent by somebody, and to be ignored. A fault can't be.
            } else if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
                libc::signal(signal, libc::SIG_DFL);
                if (*info).si_code <= 0 {
                    // Sent by somebody: comes again when this handler has returned, as a fault
                    // does by itself.
                    libc::raise(signal);
                }
            } else if flags & libc::SA_SIGINFO != 0 {
                let handler: Handler = core::mem::transmute(handler);
                handler(signal, info, context);
            } else {
                let handler: extern "C" fn(c_int) = core::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}

impl core::fmt::Debug for Previous {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Previous({:#x})", self.0.sa_sigaction)
    }
}
