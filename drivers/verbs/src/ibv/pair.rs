//! A queue pair and its connection.
#![allow(unsafe_code)]
// UNSAFETY: hands lists of requests to libibverbs, in its structures and by its pointers.

use super::completions::Completions;
use super::device::Device;
use super::id::{Id, check};
use super::layout::{
    CM_DEVICE_REMOVAL, CM_DISCONNECTED, CM_ESTABLISHED, ConnParam, QPT_RC, Qp, QpInitAttr, RawSge,
    RecvWr, SEND_SIGNALED, SendWr, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM,
};
use crate::error::{PostError, PostFault, VerbsError};
use crate::fabric::{Link, MESSAGE_BYTES_MAX, QueuePair, Setup};
use crate::ibv::timespec;
use crate::work::{
    Completion, Lkey, Operation, QueueNumber, RemoteAddress, Rkey, Signal, Status, WorkId,
    WorkRequest,
};
use rustix::event::{PollFd, PollFlags};
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests handed over by one call.
const CHAIN: usize = 128;

/// Tries before a peer that does not acknowledge is given up: the most that the field holds.
const RETRIES: u8 = 7;

/// One end of a connection over a device.
pub struct IbvPair {
    device: Arc<Device>,
    id: Id,
    completions: Completions,
    queue: *mut Qp,
    send_slots: u32,
    link: Link,
    chain: Box<Chain>,
}

/// Room for a list in the library's form.
struct Chain {
    sends: [SendWr; CHAIN],
    pieces: [RawSge; CHAIN],
}

// SAFETY: as for `Device`; the chain's pointers lead into itself and are set anew for each post.
unsafe impl Send for IbvPair {}

/// What the connection request said of reads.
pub(super) struct ReadsAsked {
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl IbvPair {
    /// Makes the queue pair of an identifier that is bound to `device`.
    pub(super) fn new(device: &Arc<Device>, id: Id, setup: &Setup) -> Result<IbvPair, VerbsError> {
        device.limits.check(setup)?;
        let completions = Completions::new(device, setup.completion_slots)?;
        let mut attributes = QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: completions.send,
            recv_cq: completions.receive,
            srq: std::ptr::null_mut(),
            max_send_wr: setup.send_slots.max(1),
            max_recv_wr: setup.receive_slots.max(1),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            qp_type: QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the identifier is bound to the domain's device; both completion queues live.
        let result = unsafe {
            (device.library.rdma_create_qp)(id.raw(), device.domain, &raw mut attributes)
        };
        check("make a queue pair", result)?;
        // SAFETY: set by the call.
        let queue = unsafe { (*id.raw()).qp };
        Ok(IbvPair {
            device: Arc::clone(device),
            id,
            completions,
            queue,
            // More may have been granted, but only these have room in the completion queue.
            send_slots: setup.send_slots,
            link: Link::Up,
            chain: Box::new(Chain {
                sends: [SendWr::EMPTY; CHAIN],
                pieces: [RawSge::default(); CHAIN],
            }),
        })
    }

    /// Connects; what the peer answered.
    pub(super) fn connect(
        &mut self,
        setup: &Setup,
        data: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, VerbsError> {
        let mut parameters = self.parameters(setup, data);
        self.id.connect(&mut parameters)?;
        Ok(self.id.expect(CM_ESTABLISHED, "connecting", deadline)?.data)
    }

    /// Accepts the request that the identifier came from.
    pub(super) fn accept(
        &mut self,
        setup: &Setup,
        data: &[u8],
        asked: &ReadsAsked,
        deadline: Instant,
    ) -> Result<(), VerbsError> {
        let mut parameters = self.parameters(setup, data);
        // What one side starts the other must serve.
        parameters.responder_resources = parameters.responder_resources.min(asked.initiator_depth);
        parameters.initiator_depth = parameters.initiator_depth.min(asked.responder_resources);
        self.id.accept(&mut parameters)?;
        self.id.expect(CM_ESTABLISHED, "accepting the connection", deadline)?;
        Ok(())
    }

    fn parameters(&self, setup: &Setup, data: &[u8]) -> ConnParam {
        ConnParam {
            private_data: data.as_ptr().cast(),
            private_data_len: u8::try_from(data.len()).unwrap_or(u8::MAX),
            responder_resources: self.device.reads_served_max,
            initiator_depth: setup.reads_in_flight.min(self.device.reads_started_max),
            flow_control: 0,
            retry_count: RETRIES,
            rnr_retry_count: setup.rnr_retries,
            srq: 0,
            qp_num: 0,
        }
    }

    /// Takes in what the connection manager and the device have to tell.
    fn listen(&mut self) -> Result<(), VerbsError> {
        while let Some(event) = self.id.channel.try_event()? {
            match event.kind {
                CM_DISCONNECTED if self.link == Link::Up => self.end(Link::Disconnected),
                CM_DEVICE_REMOVAL => self.end(Link::Failed),
                _ => {}
            }
        }
        let [send, receive] = self.completions.objects();
        // Asked in any case: what the device tells must be taken, or its descriptor stays readable.
        let troubled = self.device.is_troubled(&[self.queue.addr(), send, receive]);
        if troubled && self.link == Link::Up {
            self.end(Link::Failed);
        }
        Ok(())
    }

    /// Notes the end; the queue pair goes to the error state, which flushes it, and the peer is
    /// told.
    fn end(&mut self, link: Link) {
        if self.link == Link::Up {
            self.link = link;
        }
        // Fails if the peer's own farewell was answered already, which is as good.
        let _ = self.id.disconnect();
    }

    fn post_chain(&mut self, list: &[WorkRequest]) -> Result<(), PostError> {
        let chain = &mut *self.chain;
        for (index, request) in list.iter().enumerate() {
            let bad = |what| PostError { posted: index, cause: PostFault::Invalid(what) };
            if request.local.bytes > MESSAGE_BYTES_MAX {
                // Those before it are posted without it.
                return match index {
                    0 => Err(bad("more than 1 GiB in one request")),
                    _ => self
                        .post_chain(&list[..index])
                        .and(Err(bad("more than 1 GiB in one request"))),
                };
            }
            fill(&mut chain.sends[index], &mut chain.pieces[index], request);
        }
        for index in 0..list.len() {
            let next = index + 1;
            chain.sends[index].next =
                if next < list.len() { &raw mut chain.sends[next] } else { std::ptr::null_mut() };
        }
        let begin = chain.sends.as_mut_ptr();
        let mut failed: *mut SendWr = std::ptr::null_mut();
        // SAFETY: the queue pair lives and so does its context; the chain is linked through
        // `list.len()` entries, each with a piece that stays in place during the call.
        let errno = unsafe {
            (*(*self.queue).context)
                .post_send
                .map_or(libc::EOPNOTSUPP, |post| post(self.queue, begin, &raw mut failed))
        };
        // Null if the provider named none; then nothing is known to be posted.
        let bytes = failed.addr().saturating_sub(begin.addr());
        posted(errno, bytes / size_of::<SendWr>(), list.len())
    }
}

/// What a post's result says: `index` is the first entry that was not taken.
fn posted(errno: c_int, index: usize, count: usize) -> Result<(), PostError> {
    let cause = match errno {
        0 => return Ok(()),
        libc::ENOMEM => PostFault::Full,
        // Some providers return -1 and set errno.
        -1 => match std::io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENOMEM) => PostFault::Full,
            error => PostFault::Device(error),
        },
        errno => PostFault::Device(std::io::Error::from_raw_os_error(errno.abs())),
    };
    Err(PostError { posted: index.min(count), cause })
}

fn fill(raw: &mut SendWr, piece: &mut RawSge, request: &WorkRequest) {
    let (opcode, RemoteAddress(remote_addr), Rkey(rkey), immediate) = match request.operation {
        Operation::Write { to, key } => (WR_RDMA_WRITE, to, key, 0),
        Operation::WriteWithImmediate { to, key, immediate } => {
            (WR_RDMA_WRITE_WITH_IMM, to, key, immediate)
        }
        Operation::Read { from, key } => (WR_RDMA_READ, from, key, 0),
    };
    let WorkId(wr_id) = request.id;
    let Lkey(lkey) = request.local.key;
    *piece = RawSge { addr: request.local.address, length: request.local.bytes, lkey };
    raw.wr_id = wr_id;
    raw.sg_list = piece;
    raw.num_sge = c_int::from(request.local.bytes > 0);
    raw.opcode = opcode;
    raw.send_flags = match request.signal {
        Signal::Completion => SEND_SIGNALED,
        Signal::None => 0,
    };
    raw.imm_data = immediate.to_be();
    raw.remote_addr = remote_addr;
    raw.rkey = rkey;
}

impl QueuePair for IbvPair {
    fn number(&self) -> QueueNumber {
        // SAFETY: the queue pair lives.
        QueueNumber(unsafe { (*self.queue).qp_num })
    }

    fn send_slots(&self) -> u32 {
        self.send_slots
    }

    fn post(&mut self, list: &[WorkRequest]) -> Result<(), PostError> {
        let mut before = 0;
        for part in list.chunks(CHAIN) {
            self.post_chain(part)
                .map_err(|error| PostError { posted: before + error.posted, cause: error.cause })?;
            before += part.len();
        }
        Ok(())
    }

    fn post_receives(&mut self, ids: &[WorkId]) -> Result<(), PostError> {
        for (index, &WorkId(wr_id)) in ids.iter().enumerate() {
            let (next, sg_list) = (std::ptr::null_mut(), std::ptr::null_mut());
            let mut raw = RecvWr { wr_id, next, sg_list, num_sge: 0 };
            let mut failed: *mut RecvWr = std::ptr::null_mut();
            // SAFETY: the queue pair lives and so does its context; the receive has no memory.
            let errno = unsafe {
                (*(*self.queue).context).post_recv.map_or(libc::EOPNOTSUPP, |post| {
                    post(self.queue, &raw mut raw, &raw mut failed)
                })
            };
            posted(errno, index, ids.len())?;
        }
        Ok(())
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let count = self.completions.poll(into)?;
        let came = into.get(..count).unwrap_or_default();
        if self.link == Link::Up && came.iter().any(|one| one.status != Status::SUCCESS) {
            // An end that was asked for also shows as flushes, and is known to the manager.
            self.listen()?;
            self.end(Link::Failed);
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        self.completions.arm()
    }

    fn wait(&mut self, limit: Duration) -> Result<bool, VerbsError> {
        // SAFETY: the descriptor is open as long as the device.
        let device = unsafe { BorrowedFd::borrow_raw(self.device.event_fd()) };
        let (completions, connection) = (self.completions.fd(), self.id.channel.fd());
        let mut fds = [&completions, &connection, &device].map(|fd| PollFd::new(fd, PollFlags::IN));
        match rustix::event::poll(&mut fds, Some(&timespec(limit))) {
            Ok(0) => return Ok(false),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(VerbsError::host("wait")(errno.into())),
        }
        let [completed, told, troubled] = fds.map(|fd| !fd.revents().is_empty());
        if completed {
            self.completions.take_events();
        }
        if told || troubled {
            self.listen()?;
        }
        Ok(true)
    }

    fn link(&mut self) -> Link {
        if self.link == Link::Up && self.listen().is_err() {
            self.end(Link::Failed);
        }
        self.link
    }

    fn disconnect(&mut self) {
        if self.link == Link::Up {
            self.end(Link::Disconnected);
        }
    }
}

impl Drop for IbvPair {
    fn drop(&mut self) {
        self.disconnect();
        let queue = self.queue.addr();
        // SAFETY: made by rdma_create_qp and destroyed once, before its identifier and its
        // completion queues.
        unsafe { (self.device.library.rdma_destroy_qp)(self.id.raw()) };
        self.device.forget(&[queue]);
        self.completions.take_events();
    }
}
