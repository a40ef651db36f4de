//! Structures of libibverbs and librdmacm, as far as they are touched here.
//!
//! They are the libraries' binary interface since rdma-core 1.1 and the same on all 64-bit Linux
//! targets. Sources: rdma-core, `libibverbs/verbs.h` and `librdmacm/rdma_cma.h`; where those
//! headers are installed, a test compares every offset with what the C compiler makes of them.

use std::ffi::{c_int, c_uint, c_void};

/// Only ever used behind a pointer.
#[repr(C)]
pub(super) struct Opaque {
    _private: [u8; 0],
}

/// `struct ibv_context`. `poll_cq` and its like are inline functions in C: they call through this
/// table.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Opaque,
    _ops_0: [*mut c_void; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _ops_13: [*mut c_void; 12],
    pub(super) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(super) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _ops_27: [*mut c_void; 5],
    _cmd_fd: c_int,
    pub(super) async_fd: c_int,
}

/// `struct ibv_cq`, its begin.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// `struct ibv_comp_channel`, its begin.
#[repr(C)]
pub(super) struct CompChannel {
    _context: *mut Context,
    pub(super) fd: c_int,
}

/// `struct ibv_qp`, its begin.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Opaque,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut Opaque,
    _handle: u32,
    pub(super) qp_num: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct Mr {
    _context: *mut Context,
    _pd: *mut Opaque,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawSge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut RawSge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    /// Network byte order.
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    _unused: [u32; 19],
}

impl SendWr {
    pub(super) const EMPTY: SendWr = SendWr {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        _unused: [0; 19],
    };
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut RawSge,
    pub(super) num_sge: c_int,
}

/// `enum ibv_wr_opcode`.
pub(super) const WR_RDMA_WRITE: c_uint = 0;
pub(super) const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(super) const WR_RDMA_READ: c_uint = 4;
/// `enum ibv_send_flags`.
pub(super) const SEND_SIGNALED: c_uint = 1 << 1;

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// Network byte order.
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

/// `IBV_WC_WITH_IMM`.
pub(super) const WC_WITH_IMM: c_uint = 1 << 1;

/// `struct ibv_qp_init_attr` with its `struct ibv_qp_cap`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Opaque,
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

/// `IBV_QPT_RC`.
pub(super) const QPT_RC: c_uint = 2;

/// `struct ibv_device_attr`, with room behind for what later versions add.
#[repr(C)]
pub(super) struct DeviceAttr {
    _names: [u64; 10],
    pub(super) max_mr_size: u64,
    _ids: [u64; 3],
    pub(super) max_qp_wr: c_int,
    _caps: [c_int; 4],
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    _max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    _max_ee: [c_int; 2],
    pub(super) max_qp_init_rd_atom: c_int,
    _rest: [u64; 64],
}

/// `struct ibv_async_event`.
#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) event_type: c_uint,
}

/// `enum ibv_event_type`, those that end a queue pair.
pub(super) const EVENT_CQ_ERR: c_uint = 0;
pub(super) const EVENT_QP_FATAL: c_uint = 1;
pub(super) const EVENT_QP_REQ_ERR: c_uint = 2;
pub(super) const EVENT_QP_ACCESS_ERR: c_uint = 3;
pub(super) const EVENT_DEVICE_FATAL: c_uint = 8;

/// `struct rdma_event_channel`.
#[repr(C)]
pub(super) struct EventChannel {
    pub(super) fd: c_int,
}

/// `struct rdma_cm_id`, its begin.
#[repr(C)]
pub(super) struct CmId {
    pub(super) verbs: *mut Context,
    _channel: *mut EventChannel,
    _context: *mut c_void,
    pub(super) qp: *mut Qp,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConnParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// `struct rdma_cm_event`, its begin.
#[repr(C)]
pub(super) struct CmEvent {
    pub(super) id: *mut CmId,
    _listen_id: *mut CmId,
    pub(super) event: c_uint,
    pub(super) status: c_int,
    /// The union's member for connected services.
    pub(super) conn: ConnParam,
}

/// `enum rdma_cm_event_type`.
pub(super) const CM_ADDR_RESOLVED: c_uint = 0;
pub(super) const CM_ROUTE_RESOLVED: c_uint = 2;
pub(super) const CM_CONNECT_REQUEST: c_uint = 4;
pub(super) const CM_REJECTED: c_uint = 8;
pub(super) const CM_ESTABLISHED: c_uint = 9;
pub(super) const CM_DISCONNECTED: c_uint = 10;
pub(super) const CM_DEVICE_REMOVAL: c_uint = 11;

/// `RDMA_PS_TCP`.
pub(super) const PS_TCP: c_uint = 0x0106;

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
