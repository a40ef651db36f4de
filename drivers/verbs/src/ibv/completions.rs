//! The completion queues of one queue pair, and the channel that tells of them.
#![allow(unsafe_code)]
// UNSAFETY: calls libibverbs with pointers that it gave.

use super::device::Device;
use super::layout::{CompChannel, Cq, WC_WITH_IMM, Wc};
use crate::error::VerbsError;
use crate::work::{Completion, Side, Status, WorkId};
use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Completions taken by one call.
const BATCH: usize = 32;

/// Two completion queues, one for each side, with one channel.
pub(super) struct Completions {
    device: Arc<Device>,
    channel: *mut CompChannel,
    pub(super) send: *mut Cq,
    pub(super) receive: *mut Cq,
    batch: [Wc; BATCH],
}

// SAFETY: as for `Device`.
unsafe impl Send for Completions {}

impl Completions {
    pub(super) fn new(device: &Arc<Device>, slots: u32) -> Result<Completions, VerbsError> {
        let library = device.library;
        // Filled bit by bit, so that a failure's drop gives back what was made.
        let mut completions = Completions {
            device: Arc::clone(device),
            channel: std::ptr::null_mut(),
            send: std::ptr::null_mut(),
            receive: std::ptr::null_mut(),
            batch: [Wc::default(); BATCH],
        };
        // SAFETY: the context is open.
        completions.channel = unsafe { (library.ibv_create_comp_channel)(device.context) };
        if completions.channel.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(VerbsError::host("make a completion channel")(error));
        }
        rustix::io::ioctl_fionbio(completions.fd(), true)
            .map_err(|errno| VerbsError::host("set up the completion channel")(errno.into()))?;
        for side in [Side::Send, Side::Receive] {
            let slots = c_int::try_from(slots.max(1)).unwrap_or(c_int::MAX);
            let nothing: *mut c_void = std::ptr::null_mut();
            // SAFETY: context and channel are open; vector 0 always exists.
            let queue = unsafe {
                (library.ibv_create_cq)(device.context, slots, nothing, completions.channel, 0)
            };
            if queue.is_null() {
                let error = std::io::Error::last_os_error();
                return Err(VerbsError::host("make a completion queue")(error));
            }
            match side {
                Side::Send => completions.send = queue,
                Side::Receive => completions.receive = queue,
            }
        }
        Ok(completions)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    /// Takes what is there, sends first.
    pub(super) fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut count = self.poll_side(Side::Send, into)?;
        if let Some(rest) = into.get_mut(count..) {
            count += self.poll_side(Side::Receive, rest)?;
        }
        Ok(count)
    }

    fn poll_side(&mut self, side: Side, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let queue = match side {
            Side::Send => self.send,
            Side::Receive => self.receive,
        };
        // SAFETY: the queue lives, and so does its context.
        let poll = unsafe { (*(*queue).context).poll_cq };
        let missing = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let poll = poll.ok_or(()).map_err(|()| VerbsError::host("poll completions")(missing))?;
        let mut count = 0;
        while count < into.len() {
            let want = BATCH.min(into.len() - count);
            let room = c_int::try_from(want).unwrap_or(0);
            // SAFETY: `batch` has room for `want` completions.
            let got = unsafe { poll(queue, room, self.batch.as_mut_ptr()) };
            let Ok(got) = usize::try_from(got) else {
                return Err(VerbsError::CompletionOverrun);
            };
            for (place, raw) in into[count..].iter_mut().zip(&self.batch[..got.min(want)]) {
                *place = completion(side, raw);
            }
            count += got.min(want);
            if got < want {
                break;
            }
        }
        Ok(count)
    }

    pub(super) fn arm(&mut self) -> Result<(), VerbsError> {
        for queue in [self.send, self.receive] {
            // SAFETY: the queue lives, and so does its context.
            let errno = unsafe {
                (*(*queue).context).req_notify_cq.map_or(libc::EOPNOTSUPP, |arm| arm(queue, 0))
            };
            if errno != 0 {
                let error = std::io::Error::from_raw_os_error(errno);
                return Err(VerbsError::host("arm a completion queue")(error));
            }
        }
        Ok(())
    }

    /// Takes the channel's events, so that it is not readable until the next one.
    pub(super) fn take_events(&mut self) {
        let mut queue: *mut Cq = std::ptr::null_mut();
        let mut context: *mut c_void = std::ptr::null_mut();
        let library = self.device.library;
        // SAFETY: the channel is open and does not block; each event is acknowledged once, for the
        // queue that it names.
        unsafe {
            while (library.ibv_get_cq_event)(self.channel, &raw mut queue, &raw mut context) == 0 {
                (library.ibv_ack_cq_events)(queue, 1);
            }
        }
    }

    /// For `Device::is_troubled`.
    pub(super) fn objects(&self) -> [usize; 2] {
        [self.send.addr(), self.receive.addr()]
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let library = self.device.library;
        let objects = self.objects();
        for queue in [self.send, self.receive] {
            if !queue.is_null() {
                // SAFETY: the queue pair is gone, and all events are acknowledged.
                unsafe { (library.ibv_destroy_cq)(queue) };
            }
        }
        if !self.channel.is_null() {
            // SAFETY: its queues are gone.
            unsafe { (library.ibv_destroy_comp_channel)(self.channel) };
        }
        self.device.forget(&objects);
    }
}

fn completion(side: Side, raw: &Wc) -> Completion {
    let status = Status(raw.status);
    let told = side == Side::Receive && status == Status::SUCCESS;
    let immediate = (told && raw.wc_flags & WC_WITH_IMM != 0).then(|| u32::from_be(raw.imm_data));
    Completion { id: WorkId(raw.wr_id), side, status, immediate }
}
