//! An opened device: its protection domain, its limits, and its asynchronous events.
#![allow(unsafe_code)]
// UNSAFETY: calls libibverbs and librdmacm with pointers that they gave.

use super::id::Id;
use super::layout::{
    AsyncEvent, Context, DeviceAttr, EVENT_CQ_ERR, EVENT_DEVICE_FATAL, EVENT_QP_ACCESS_ERR,
    EVENT_QP_FATAL, EVENT_QP_REQ_ERR, Mr, Opaque,
};
use super::library::{Library, library, string};
use crate::error::VerbsError;
use crate::fabric::{Limits, Region};
use crate::work::{Access, Lkey, RemoteAddress, Rkey};
use martlet_device_io::HostMemory;
use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Which device to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Select {
    /// The first.
    Any,
    /// By its name, as `rdma link` or `ibv_devices` prints it.
    Named(String),
    /// The one whose network interface owns this address.
    Local(IpAddr),
    /// The one that leads to this address.
    Route(SocketAddr),
}

/// How long finding the way to an address may take.
const RESOLVE_LIMIT: Duration = Duration::from_secs(5);

/// An opened device.
pub(super) struct Device {
    pub(super) library: &'static Library,
    /// All devices that librdmacm has open, and thereby this one.
    list: *mut *mut Context,
    pub(super) context: *mut Context,
    pub(super) domain: *mut Opaque,
    pub(super) name: String,
    pub(super) limits: Limits,
    /// Reads and atomics in flight that a queue pair can serve, and start.
    pub(super) reads_served_max: u8,
    pub(super) reads_started_max: u8,
    troubled: Mutex<Troubled>,
}

/// What asynchronous events said, by the address of the object.
#[derive(Default)]
struct Troubled {
    objects: HashSet<usize>,
    device: bool,
}

// SAFETY: verbs objects may be used by any thread at any time (rdma-core,
// Documentation/libibverbs.md: the API is thread safe).
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn open(select: &Select) -> Result<Arc<Device>, VerbsError> {
        let library = library()?;
        // Keeps the device that an address leads to while it is looked up.
        let guide = guide(library, select)?;
        let mut count = 0;
        // SAFETY: `count` takes the length of the list.
        let list = unsafe { (library.rdma_get_devices)(&raw mut count) };
        let none = || VerbsError::NoDevice { wanted: wanted(select) };
        if list.is_null() {
            return Err(none());
        }
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the list has `count` entries until it is freed.
        let contexts = unsafe { std::slice::from_raw_parts(list, count) }.to_vec();
        let chosen = contexts.into_iter().find(|&context| match select {
            Select::Any => true,
            Select::Named(name) => *name == device_name(library, context),
            Select::Local(_) | Select::Route(_) => {
                guide.as_ref().is_some_and(|id| id.context() == context)
            }
        });
        // From here on a failure's drop gives back what was taken.
        let mut device = Device::unopened(library, list);
        device.context = chosen.ok_or_else(none)?;
        device.name = device_name(library, device.context);
        device.query()?;
        // SAFETY: the context is open as long as the list.
        device.domain = unsafe { (library.ibv_alloc_pd)(device.context) };
        if device.domain.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(VerbsError::host("make a protection domain")(error));
        }
        rustix::io::ioctl_fionbio(device.async_fd(), true)
            .map_err(|errno| VerbsError::host("set up the device's events")(errno.into()))?;
        let device = Arc::new(device);
        Device::try_on_demand(device)
    }

    fn unopened(library: &'static Library, list: *mut *mut Context) -> Device {
        Device {
            library,
            list,
            context: std::ptr::null_mut(),
            domain: std::ptr::null_mut(),
            name: String::new(),
            limits: Limits {
                queue_slots_max: 0,
                completion_slots_max: 0,
                regions_max: 0,
                region_bytes_max: 0,
                on_demand: false,
            },
            reads_served_max: 0,
            reads_started_max: 0,
            troubled: Mutex::default(),
        }
    }

    fn query(&mut self) -> Result<(), VerbsError> {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut attributes: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; there is room for the whole structure.
        let errno = unsafe { (self.library.ibv_query_device)(self.context, &raw mut attributes) };
        if errno != 0 {
            let error = std::io::Error::from_raw_os_error(errno);
            return Err(VerbsError::host("query the device")(error));
        }
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        let reads = |value: c_int| u8::try_from(value.clamp(0, 16)).unwrap_or(0);
        self.limits = Limits {
            queue_slots_max: count(attributes.max_qp_wr),
            completion_slots_max: count(attributes.max_cqe),
            regions_max: u64::from(count(attributes.max_mr)),
            region_bytes_max: attributes.max_mr_size,
            on_demand: false,
        };
        self.reads_served_max = reads(attributes.max_qp_rd_atom);
        self.reads_started_max = reads(attributes.max_qp_init_rd_atom);
        Ok(())
    }

    /// Learns whether regions can be faulted in by trying it: the capability bits are behind an
    /// interface that older libraries lack.
    fn try_on_demand(device: Arc<Device>) -> Result<Arc<Device>, VerbsError> {
        let memory = page_of_its_own();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ON_DEMAND;
        let works = Device::register(&device, &memory, access).map(drop).is_ok();
        let Some(mut device) = Arc::into_inner(device) else {
            return Err(VerbsError::host("open the device")(std::io::ErrorKind::Other.into()));
        };
        device.limits.on_demand = works;
        Ok(Arc::new(device))
    }

    pub(super) fn register(
        self: &Arc<Device>,
        memory: &HostMemory,
        access: Access,
    ) -> Result<IbvRegion, VerbsError> {
        let (address, bytes) = (memory.address(), memory.bytes());
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let at: *mut c_void =
            std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the memory's owner, whom the region holds, keeps it mapped. The device writes it
        // as only raw pointers do.
        let raw = unsafe {
            (self.library.ibv_reg_mr_iova2)(self.domain, at, length, address, access.bits())
        };
        if raw.is_null() {
            let source = std::io::Error::last_os_error();
            let hint = match source.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                    ": see `ulimit -l` (RLIMIT_MEMLOCK), and the memory that is free to be pinned"
                }
                Some(libc::EOPNOTSUPP) => ": memory of this kind can't be pinned",
                _ => "",
            };
            return Err(VerbsError::Register { bytes, address, hint, source });
        }
        Ok(IbvRegion { device: Arc::clone(self), raw, memory: memory.clone() })
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.context).async_fd) }
    }

    /// Takes in what the device has to tell; whether one of these objects is in trouble.
    pub(super) fn is_troubled(&self, objects: &[usize]) -> bool {
        let mut troubled = self.troubled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut event = AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the context is open and its descriptor does not block; each event is
        // acknowledged once, and what it names is used as a number only.
        while unsafe { (self.library.ibv_get_async_event)(self.context, &raw mut event) } == 0 {
            match event.event_type {
                EVENT_CQ_ERR | EVENT_QP_FATAL | EVENT_QP_REQ_ERR | EVENT_QP_ACCESS_ERR => {
                    troubled.objects.insert(event.element.addr());
                }
                EVENT_DEVICE_FATAL => troubled.device = true,
                _ => {}
            }
            // SAFETY: as above.
            unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        }
        troubled.device || objects.iter().any(|object| troubled.objects.contains(object))
    }

    /// Their addresses may be used again.
    pub(super) fn forget(&self, objects: &[usize]) {
        // Else an event that is still queued would be taken for one of the next object's.
        self.is_troubled(&[]);
        let mut troubled = self.troubled.lock().unwrap_or_else(PoisonError::into_inner);
        troubled.objects.retain(|object| !objects.contains(object));
    }

    /// For `poll`: readable when the device has something to tell.
    pub(super) fn event_fd(&self) -> c_int {
        self.async_fd().as_fd().as_raw_fd()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.domain.is_null() {
            // SAFETY: regions and queue pairs hold the device, so none is left.
            unsafe { (self.library.ibv_dealloc_pd)(self.domain) };
        }
        // SAFETY: the list was given by rdma_get_devices and not freed.
        unsafe { (self.library.rdma_free_devices)(self.list) };
    }
}

/// A page that belongs to whoever has the memory: should a device keep it, it is never freed.
fn page_of_its_own() -> HostMemory {
    let page: Arc<Page> = Arc::new(Page([const { AtomicU64::new(0) }; PAGE_WORDS]));
    let at = page.0.as_ptr().expose_provenance() as u64;
    // SAFETY: the page lives as long as its owner, and can be written through a shared reference.
    unsafe { HostMemory::new(at, size_of::<Page>() as u64, page) }
}

const PAGE_WORDS: usize = 512;

#[repr(align(4096))]
struct Page([AtomicU64; PAGE_WORDS]);

/// An identifier bound to the device that an address leads to.
fn guide(library: &'static Library, select: &Select) -> Result<Option<Id>, VerbsError> {
    let bound = |error| match error {
        VerbsError::Host { .. } => VerbsError::NoDevice { wanted: wanted(select) },
        other => other,
    };
    match select {
        Select::Any | Select::Named(_) => Ok(None),
        Select::Local(address) => {
            let mut id = Id::new(library)?;
            id.bind(&SocketAddr::new(*address, 0)).map_err(bound)?;
            Ok(Some(id))
        }
        Select::Route(address) => {
            let mut id = Id::new(library)?;
            id.resolve(address, RESOLVE_LIMIT)?;
            Ok(Some(id))
        }
    }
}

fn wanted(select: &Select) -> String {
    match select {
        Select::Any => String::new(),
        Select::Named(name) => format!(" called {name}"),
        Select::Local(address) => format!(" that owns {address}"),
        Select::Route(address) => format!(" that leads to {address}"),
    }
}

fn device_name(library: &'static Library, context: *mut Context) -> String {
    // SAFETY: the context is open, so its device is there.
    string(unsafe { (library.ibv_get_device_name)((*context).device) })
}

/// Memory registered with a device.
pub struct IbvRegion {
    device: Arc<Device>,
    /// Null once it is deregistered.
    raw: *mut Mr,
    memory: HostMemory,
}

// SAFETY: as for `Device`.
unsafe impl Send for IbvRegion {}
// SAFETY: as for `Device`.
unsafe impl Sync for IbvRegion {}

impl IbvRegion {
    fn take_back(&mut self) -> Result<(), VerbsError> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: registered, and deregistered once.
        let errno = unsafe { (self.device.library.ibv_dereg_mr)(raw) };
        if errno == 0 {
            return Ok(());
        }
        // The device can still reach the memory, so it must never be unmapped.
        std::mem::forget(self.memory.clone());
        let error = std::io::Error::from_raw_os_error(errno);
        Err(VerbsError::host("deregister memory")(error))
    }
}

impl Region for IbvRegion {
    fn local_key(&self) -> Lkey {
        // SAFETY: registered as long as it can be asked: `deregister` takes the region.
        Lkey(unsafe { (*self.raw).lkey })
    }

    fn remote_key(&self) -> Rkey {
        // SAFETY: as above.
        Rkey(unsafe { (*self.raw).rkey })
    }

    fn address(&self) -> RemoteAddress {
        RemoteAddress(self.memory.address())
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn deregister(mut self) -> Result<(), VerbsError> {
        self.take_back()
    }
}

impl Drop for IbvRegion {
    fn drop(&mut self) {
        if let Err(error) = self.take_back() {
            tracing::error!(%error, "memory stays registered");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static REGISTERED_AT: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn register(
        _domain: *mut Opaque,
        at: *mut c_void,
        _length: usize,
        _iova: u64,
        _access: std::ffi::c_uint,
    ) -> *mut Mr {
        REGISTERED_AT.store(at.addr(), Ordering::Relaxed);
        std::ptr::dangling_mut()
    }

    unsafe extern "C" fn refuse(_region: *mut Mr) -> c_int {
        libc::EBUSY
    }

    unsafe extern "C" fn free(_list: *mut *mut Context) {}

    fn device_that_keeps_memory() -> Arc<Device> {
        let mut library = Library::of_nothing();
        library.ibv_reg_mr_iova2 = register;
        library.ibv_dereg_mr = refuse;
        library.rdma_free_devices = free;
        Arc::new(Device::unopened(Box::leak(Box::new(library)), std::ptr::null_mut()))
    }

    #[test]
    fn a_page_that_the_device_keeps_is_never_freed() {
        let _device = Device::try_on_demand(device_that_keeps_memory()).unwrap();
        let kept = REGISTERED_AT.load(Ordering::Relaxed);
        let kept = kept..kept + 4096;
        let others: Vec<Box<[u64; 512]>> = (0..64).map(|_| Box::new([0; 512])).collect();
        for other in &others {
            let at = other.as_ptr().addr();
            assert!(at + 4096 <= kept.start || kept.end <= at, "its page is used again");
        }
    }

    #[test]
    fn memory_that_the_device_keeps_stays_mapped() {
        let owner = Arc::new([0_u64; 512]);
        let at = owner.as_ptr().expose_provenance() as u64;
        // SAFETY: never touched.
        let memory = unsafe { HostMemory::new(at, 4096, Arc::clone(&owner) as _) };
        let region = device_that_keeps_memory().register(&memory, Access::LOCAL_WRITE).unwrap();
        drop(memory);
        assert!(region.deregister().is_err());
        assert_eq!(Arc::strong_count(&owner), 2, "the device's reference is never given back");
    }
}
