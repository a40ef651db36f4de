//! Making a vCPU leave KVM_RUN: a flag for the next entry, a signal for the current one.
#![allow(unsafe_code)]
// UNSAFETY: signals: installing a handler and sending to a thread by its id.

use super::raw::RunArea;
use crate::vcpu::backend::Kicker;
use crate::vcpu::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// See the module's comment.
pub(super) struct KvmKicker {
    area: RunArea,
    /// Set while the thread is between deciding to enter and having left.
    inside: AtomicBool,
    /// The vCPU's thread while it lives.
    thread: Mutex<Option<libc::pid_t>>,
}

impl KvmKicker {
    /// `area` is a mapping of its own of the vCPU's run area.
    pub(super) fn new(area: RunArea) -> KvmKicker {
        KvmKicker { area, inside: AtomicBool::new(false), thread: Mutex::new(None) }
    }

    /// Learns that the calling thread is the vCPU's, and lets the signal through to it.
    pub(super) fn attach(&self) -> io::Result<()> {
        install_handler()?;
        // SAFETY: a signal set on the stack, initialised by sigemptyset before its use.
        let result = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal());
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: takes no argument.
        *lock(&self.thread) = Some(unsafe { libc::gettid() });
        Ok(())
    }

    /// Around KVM_RUN. Sequentially consistent: with `kick` either the kicker sees the thread
    /// inside, or the kernel, asked afterwards, sees the flag.
    pub(super) fn set_inside(&self, inside: bool) {
        self.inside.store(inside, Ordering::SeqCst);
    }

    /// The next KVM_RUN only completes pending I/O.
    pub(super) fn hold_back(&self) {
        self.area.immediate_exit().store(1, Ordering::SeqCst);
    }
}

impl Kicker for KvmKicker {
    fn kick(&self) {
        self.hold_back();
        if self.inside.load(Ordering::SeqCst) {
            // The lock keeps the thread from ending, and its id from being another's, meanwhile.
            if let Some(thread) = *lock(&self.thread) {
                // SAFETY: plain numbers; the handler does nothing.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal()) };
            }
        }
    }

    fn clear(&self) {
        self.area.immediate_exit().store(0, Ordering::SeqCst);
    }

    fn detach(&self) {
        *lock(&self.thread) = None;
    }
}

/// The signal that ends KVM_RUN. The first real-time signals are often taken by runtimes.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 3
}

extern "C" fn nothing(_: libc::c_int) {}

/// Installs a handler that does nothing: the signal's arrival is what matters.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: the action is zeroed but for a handler that touches nothing; no SA_RESTART, so
        // that system calls end.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(signal(), &raw const action, std::ptr::null_mut())
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}
