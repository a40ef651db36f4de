//! libibverbs and librdmacm, opened at run time.
#![allow(unsafe_code)]
// UNSAFETY: looks symbols up by name and gives them their C signatures, which are part of the
// libraries' binary interface.

use super::layout::{
    AsyncEvent, CmEvent, CmId, CompChannel, ConnParam, Context, Cq, DeviceAttr, EventChannel, Mr,
    Opaque, QpInitAttr,
};
use crate::error::VerbsError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";

/// Declares the table of functions, and how each is looked up.
macro_rules! functions {
    ($($library:ident $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions used, as rdma-core's headers declare them.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        #[cfg(test)]
        impl Library {
            /// Functions that nobody may call, for a test to put its own in.
            pub(super) fn of_nothing() -> Library {
                Library {
                    $($name: {
                        extern "C" fn absent($(_: $argument),*) $(-> $result)? {
                            unreachable!(stringify!($name))
                        }
                        absent
                    },)*
                }
            }
        }

        fn load() -> Result<Library, VerbsError> {
            let opened = Both { verbs: open(VERBS)?, cm: open(CM)? };
            Ok(Library {
                $($name: {
                    let symbol = find(&opened.$library, stringify!($name))?;
                    // SAFETY: the symbol is the function of that name, whose signature rdma-core
                    // keeps as long as the library's major version.
                    unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(symbol)
                    }
                },)*
            })
        }
    };
}

functions! {
    verbs ibv_get_device_name(*mut Opaque) -> *const c_char;
    verbs ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
    verbs ibv_alloc_pd(*mut Context) -> *mut Opaque;
    verbs ibv_dealloc_pd(*mut Opaque) -> c_int;
    verbs ibv_reg_mr_iova2(*mut Opaque, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    verbs ibv_dereg_mr(*mut Mr) -> c_int;
    verbs ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
    verbs ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
    verbs ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    verbs ibv_destroy_cq(*mut Cq) -> c_int;
    verbs ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    verbs ibv_ack_cq_events(*mut Cq, c_uint);
    verbs ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
    verbs ibv_ack_async_event(*mut AsyncEvent);
    cm rdma_get_devices(*mut c_int) -> *mut *mut Context;
    cm rdma_free_devices(*mut *mut Context);
    cm rdma_create_event_channel() -> *mut EventChannel;
    cm rdma_destroy_event_channel(*mut EventChannel);
    cm rdma_create_id(*mut EventChannel, *mut *mut CmId, *mut c_void, c_uint) -> c_int;
    cm rdma_destroy_id(*mut CmId) -> c_int;
    cm rdma_migrate_id(*mut CmId, *mut EventChannel) -> c_int;
    cm rdma_bind_addr(*mut CmId, *mut libc::sockaddr) -> c_int;
    cm rdma_resolve_addr(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    cm rdma_resolve_route(*mut CmId, c_int) -> c_int;
    cm rdma_create_qp(*mut CmId, *mut Opaque, *mut QpInitAttr) -> c_int;
    cm rdma_destroy_qp(*mut CmId);
    cm rdma_connect(*mut CmId, *mut ConnParam) -> c_int;
    cm rdma_listen(*mut CmId, c_int) -> c_int;
    cm rdma_accept(*mut CmId, *mut ConnParam) -> c_int;
    cm rdma_reject(*mut CmId, *const c_void, u8) -> c_int;
    cm rdma_disconnect(*mut CmId) -> c_int;
    cm rdma_get_cm_event(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    cm rdma_ack_cm_event(*mut CmEvent) -> c_int;
    cm rdma_event_str(c_uint) -> *const c_char;
    cm rdma_get_src_port(*mut CmId) -> u16;
}

/// The two libraries, opened by the first who asks. A failure is not remembered: the packages may
/// be installed meanwhile.
pub(super) fn library() -> Result<&'static Library, VerbsError> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let loaded = load()?;
    Ok(LIBRARY.get_or_init(|| loaded))
}

struct Both {
    verbs: Opened,
    cm: Opened,
}

struct Opened {
    name: &'static str,
    /// Never closed: its functions are called until the process ends.
    handle: *mut c_void,
}

fn open(name: &'static str) -> Result<Opened, VerbsError> {
    let missing = |reason| VerbsError::LibraryMissing { library: name, reason };
    let file = CString::new(name).map_err(|error| missing(error.to_string()))?;
    // SAFETY: loads a library of the system, whose constructors are trusted as those of any
    // library that a program links.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(Opened { name, handle });
    }
    // The loader begins with the name, which the error says already.
    let reason = loader_error();
    let reason =
        reason.strip_prefix(name).map_or(reason.as_str(), |rest| rest.trim_matches([':', ' ']));
    Err(missing(reason.to_owned()))
}

fn find(library: &Opened, symbol: &'static str) -> Result<*mut c_void, VerbsError> {
    let missing = VerbsError::SymbolMissing { library: library.name, symbol };
    let Ok(name) = CString::new(symbol) else { return Err(missing) };
    // SAFETY: the handle is open, the name ends with 0.
    let found = unsafe { libc::dlsym(library.handle, name.as_ptr()) };
    if found.is_null() { Err(missing) } else { Ok(found) }
}

fn loader_error() -> String {
    // SAFETY: dlerror gives a string that stays until this thread's next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() { "unknown".to_owned() } else { string(text) }
}

/// A string of the libraries, which are trusted to end it.
pub(super) fn string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null; the callers pass what a library calls a string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
