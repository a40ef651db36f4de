//! Making a vCPU leave KVM_RUN: a flag for the next entry, a signal for the current one.
#![allow(unsafe_code)]
// UNSAFETY: lets a signal through, and asks for a thread's id.

use super::raw::RunArea;
use crate::vcpu::backend::Kicker;
use crate::vcpu::kick::{self, KICK, kick_thread};
use crate::vcpu::lock;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

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
        kick::install()?;
        // SAFETY: a signal set on the stack, initialised by sigemptyset before its use.
        let result = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, KICK);
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
                // Can't fail for a thread that lives, see `KICK`.
                let _ = kick_thread(thread);
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
