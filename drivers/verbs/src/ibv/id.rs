//! A connection identifier of librdmacm with an event channel of its own.
#![allow(unsafe_code)]
// UNSAFETY: calls librdmacm with pointers that it gave.

use super::layout::{
    CM_ADDR_RESOLVED, CM_REJECTED, CM_ROUTE_RESOLVED, CmEvent, CmId, ConnParam, Context,
    EventChannel, PS_TCP,
};
use super::library::{Library, string};
use crate::error::VerbsError;
use crate::ibv::timespec;
use rustix::event::{PollFd, PollFlags};
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// An event channel.
pub(super) struct Channel {
    library: &'static Library,
    raw: *mut EventChannel,
}

// SAFETY: librdmacm's channels and identifiers may be used by any thread; here by one at a time,
// as all calls that change something take `&mut self` or own it.
unsafe impl Send for Channel {}

/// What an event said.
pub(super) struct Event {
    pub(super) kind: c_uint,
    pub(super) status: c_int,
    /// The connection it is about; a new one for a connection request.
    pub(super) id: *mut CmId,
    pub(super) data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl Channel {
    pub(super) fn new(library: &'static Library) -> Result<Channel, VerbsError> {
        // SAFETY: no arguments.
        let raw = unsafe { (library.rdma_create_event_channel)() };
        if raw.is_null() {
            let error = std::io::Error::last_os_error();
            // Without a device the kernel has no /dev/infiniband/rdma_cm.
            return Err(match error.raw_os_error() {
                Some(libc::ENODEV | libc::ENOENT | libc::ENOSYS) => {
                    VerbsError::NoDevice { wanted: String::new() }
                }
                _ => VerbsError::host("open an event channel of the connection manager")(error),
            });
        }
        let channel = Channel { library, raw };
        rustix::io::ioctl_fionbio(channel.fd(), true)
            .map_err(|errno| VerbsError::host("set up the event channel")(errno.into()))?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    /// The next event, if one is there.
    pub(super) fn try_event(&self) -> Result<Option<Event>, VerbsError> {
        let mut raw: *mut CmEvent = std::ptr::null_mut();
        // SAFETY: the channel is open; `raw` takes the event.
        let result = unsafe { (self.library.rdma_get_cm_event)(self.raw, &raw mut raw) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return match error.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted => Ok(None),
                _ => Err(VerbsError::host("hear the connection manager")(error)),
            };
        }
        // SAFETY: the event is valid until it is acknowledged. Its private data, where there is
        // some, has the length that it says; only events of connections have it, and for all
        // others librdmacm clears these members.
        let event = unsafe {
            let ConnParam { private_data, private_data_len, .. } = (*raw).conn;
            let data = if private_data.is_null() {
                Vec::new()
            } else {
                let bytes = usize::from(private_data_len);
                std::slice::from_raw_parts(private_data.cast::<u8>(), bytes).to_vec()
            };
            Event {
                kind: (*raw).event,
                status: (*raw).status,
                id: (*raw).id,
                data,
                responder_resources: (*raw).conn.responder_resources,
                initiator_depth: (*raw).conn.initiator_depth,
            }
        };
        // SAFETY: acknowledged once; all that is needed was copied.
        unsafe { (self.library.rdma_ack_cm_event)(raw) };
        Ok(Some(event))
    }

    /// The next event; `None` if none comes before `deadline`.
    pub(super) fn event_before(&self, deadline: Instant) -> Result<Option<Event>, VerbsError> {
        loop {
            if let Some(event) = self.try_event()? {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(None);
            }
            let fd = self.fd();
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            // A signal only makes it look again.
            let _ = rustix::event::poll(&mut fds, Some(&timespec(left)));
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: whoever owns identifiers on this channel drops them first.
        unsafe { (self.library.rdma_destroy_event_channel)(self.raw) };
    }
}

/// An identifier: of a connection, one that is being made, or a listener.
pub(super) struct Id {
    pub(super) library: &'static Library,
    raw: *mut CmId,
    pub(super) channel: Channel,
}

// SAFETY: as for `Channel`.
unsafe impl Send for Id {}

impl Id {
    pub(super) fn new(library: &'static Library) -> Result<Id, VerbsError> {
        let channel = Channel::new(library)?;
        let mut raw: *mut CmId = std::ptr::null_mut();
        // SAFETY: the channel is open; `raw` takes the identifier.
        let result = unsafe {
            (library.rdma_create_id)(channel.raw, &raw mut raw, std::ptr::null_mut(), PS_TCP)
        };
        check("make a connection identifier", result)?;
        Ok(Id { library, raw, channel })
    }

    /// Takes the identifier of a connection request, and gives it a channel of its own.
    pub(super) fn adopt(library: &'static Library, raw: *mut CmId) -> Result<Id, VerbsError> {
        let channel = match Channel::new(library) {
            Ok(channel) => channel,
            Err(error) => {
                // SAFETY: the request is ours and nobody else knows it; its event was
                // acknowledged.
                unsafe { (library.rdma_destroy_id)(raw) };
                return Err(error);
            }
        };
        let id = Id { library, raw, channel };
        // SAFETY: both are open. Events of the request that are queued move along.
        let result = unsafe { (library.rdma_migrate_id)(raw, id.channel.raw) };
        check("take a connection request", result)?;
        Ok(id)
    }

    pub(super) fn raw(&self) -> *mut CmId {
        self.raw
    }

    /// The device that it is bound to; null if none is.
    pub(super) fn context(&self) -> *mut Context {
        // SAFETY: the identifier lives; librdmacm sets the member before it tells of the binding.
        unsafe { (*self.raw).verbs }
    }

    /// Binds it to a local address, which names a device unless it is a wildcard.
    pub(super) fn bind(&mut self, at: &SocketAddr) -> Result<(), VerbsError> {
        let mut at = RawAddress::new(at);
        // SAFETY: the address is complete; it is copied.
        let result = unsafe { (self.library.rdma_bind_addr)(self.raw, at.pointer()) };
        check("bind the address to an RDMA device", result)
    }

    pub(super) fn listen(&mut self, backlog: c_int) -> Result<u16, VerbsError> {
        // SAFETY: the identifier lives.
        let result = unsafe { (self.library.rdma_listen)(self.raw, backlog) };
        check("listen", result)?;
        // SAFETY: as above.
        Ok(u16::from_be(unsafe { (self.library.rdma_get_src_port)(self.raw) }))
    }

    /// Finds the device and the way to an address.
    pub(super) fn resolve(&mut self, to: &SocketAddr, limit: Duration) -> Result<(), VerbsError> {
        let deadline = Instant::now() + limit;
        let limit_ms = c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX);
        let mut address = RawAddress::new(to);
        let anywhere = std::ptr::null_mut();
        // SAFETY: the address is complete; it is copied.
        let result = unsafe {
            (self.library.rdma_resolve_addr)(self.raw, anywhere, address.pointer(), limit_ms)
        };
        check("resolve the address", result)?;
        self.expect(CM_ADDR_RESOLVED, "resolving the address", deadline)?;
        // SAFETY: the identifier lives.
        let result = unsafe { (self.library.rdma_resolve_route)(self.raw, limit_ms) };
        check("resolve the route", result)?;
        self.expect(CM_ROUTE_RESOLVED, "resolving the route", deadline)?;
        Ok(())
    }

    /// Waits for an event; any other is an error.
    pub(super) fn expect(
        &mut self,
        kind: c_uint,
        action: &'static str,
        deadline: Instant,
    ) -> Result<Event, VerbsError> {
        let started = Instant::now();
        let Some(event) = self.channel.event_before(deadline)? else {
            let waited = deadline.saturating_duration_since(started).as_millis();
            let limit_ms = u64::try_from(waited).unwrap_or(u64::MAX);
            return Err(VerbsError::Timeout { action, limit_ms });
        };
        if event.kind == kind && event.status == 0 {
            return Ok(event);
        }
        if event.kind == CM_REJECTED {
            return Err(VerbsError::Rejected { reason: event.status, private_data: event.data });
        }
        // SAFETY: gives a constant string for any number.
        let name = string(unsafe { (self.library.rdma_event_str)(event.kind) });
        Err(VerbsError::Connection { action, event: name, status: event.status })
    }

    pub(super) fn connect(&mut self, parameters: &mut ConnParam) -> Result<(), VerbsError> {
        // SAFETY: the private data lives during the call, in which it is copied.
        check("connect", unsafe { (self.library.rdma_connect)(self.raw, parameters) })
    }

    pub(super) fn accept(&mut self, parameters: &mut ConnParam) -> Result<(), VerbsError> {
        // SAFETY: as in `connect`.
        check("accept the connection", unsafe { (self.library.rdma_accept)(self.raw, parameters) })
    }

    pub(super) fn reject(&mut self, data: &[u8]) -> Result<(), VerbsError> {
        let bytes = u8::try_from(data.len()).unwrap_or(u8::MAX);
        let at = data.as_ptr().cast::<c_void>();
        // SAFETY: `data` has `bytes` bytes, as the callers have checked its length.
        let result = unsafe { (self.library.rdma_reject)(self.raw, at, bytes) };
        check("reject the connection", result)
    }

    /// Takes the queue pair to the error state and tells the peer. Fails if it is over already.
    pub(super) fn disconnect(&mut self) -> Result<(), VerbsError> {
        // SAFETY: the identifier lives.
        check("disconnect", unsafe { (self.library.rdma_disconnect)(self.raw) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: its queue pair was destroyed by its owner; every event was acknowledged as soon
        // as it was taken, so this does not wait for anyone.
        unsafe { (self.library.rdma_destroy_id)(self.raw) };
    }
}

/// The libraries return -1 and set `errno`.
pub(super) fn check(action: &'static str, result: c_int) -> Result<(), VerbsError> {
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENODEV) {
        return Err(VerbsError::NoDevice { wanted: " for this address".to_owned() });
    }
    Err(VerbsError::host(action)(error))
}

/// A socket address as C has it.
enum RawAddress {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl RawAddress {
    fn new(address: &SocketAddr) -> RawAddress {
        // The families are below 16 bits.
        let family = |family: c_int| libc::sa_family_t::try_from(family).unwrap_or_default();
        match address {
            SocketAddr::V4(address) => RawAddress::V4(libc::sockaddr_in {
                sin_family: family(libc::AF_INET),
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => RawAddress::V6(libc::sockaddr_in6 {
                sin6_family: family(libc::AF_INET6),
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }

    fn pointer(&mut self) -> *mut libc::sockaddr {
        match self {
            RawAddress::V4(address) => (&raw mut *address).cast(),
            RawAddress::V6(address) => (&raw mut *address).cast(),
        }
    }
}
