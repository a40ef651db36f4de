//! SIGINT, SIGTERM and SIGHUP, taken by one thread, so that nothing else is interrupted by them.
#![allow(unsafe_code)]
// UNSAFETY: blocking signals for all threads, waiting for them and asking what becomes of one has
// no safe wrapper in std or rustix. The sets are plain local values; nothing here runs in a signal
// handler.

use crate::control::guarded;
use std::io;
use std::mem::MaybeUninit;
use std::thread;

/// A signal that asks a process to end, or says that its terminal is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// What `kill` and service managers send.
    Terminate,
    /// The terminal is gone.
    HangUp,
}

impl Signal {
    const ALL: [Signal; 3] = [Signal::Interrupt, Signal::Terminate, Signal::HangUp];

    fn number(self) -> libc::c_int {
        match self {
            Signal::Interrupt => libc::SIGINT,
            Signal::Terminate => libc::SIGTERM,
            Signal::HangUp => libc::SIGHUP,
        }
    }

    /// Exit status of a process that is ended by it, as shells count it.
    pub(crate) fn exit_status(self) -> i32 {
        128 + self.number()
    }
}

/// Signals that are held back until somebody takes them.
pub(crate) struct Held(libc::sigset_t);

impl Held {
    /// Holds these back from now on. Call it before any other thread exists: threads inherit it.
    /// A SIGHUP that the process was started to ignore (nohup) stays ignored.
    pub(crate) fn hold(signals: &[Signal]) -> io::Result<Held> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the whole set; the numbers are of valid signals.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals.iter().filter(|signal| !is_ignored(**signal)) {
                libc::sigaddset(set.as_mut_ptr(), signal.number());
            }
            set.assume_init()
        };
        // SAFETY: `set` is initialised; the old mask is not asked for.
        let status = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, core::ptr::null_mut())
        };
        if status == 0 { Ok(Held(set)) } else { Err(io::Error::from_raw_os_error(status)) }
    }

    /// From now on each of them calls `on_signal`, on a thread of its own; those that came since
    /// they were held, too.
    pub(crate) fn deliver(
        self,
        mut on_signal: impl FnMut(Signal) + Send + 'static,
    ) -> io::Result<()> {
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            loop {
                let mut number = 0;
                // SAFETY: both pointers are to live values; the set's signals are blocked.
                let status = unsafe { libc::sigwait(&raw const self.0, &raw mut number) };
                let signal = Signal::ALL.into_iter().find(|signal| signal.number() == number);
                if let (0, Some(signal)) = (status, signal) {
                    guarded("signals", || on_signal(signal));
                }
            }
        })?;
        Ok(())
    }
}

/// Whether the process was started to ignore it.
fn is_ignored(signal: Signal) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: no new action is given; the old one is written whole before it is read.
    unsafe {
        libc::sigaction(signal.number(), core::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// From now on a file that may not grow further gives an error (EFBIG) where it is written; by
/// default the kernel ends the process, and its guest with it.
pub(crate) fn survive_file_size_limit() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
