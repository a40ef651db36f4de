use super::*;
use martlet_test_host::Want;
use std::mem::{offset_of, size_of};
use std::process::Command;

/// What Rust makes of a structure: its C name, member and offset.
fn offsets() -> Vec<(&'static str, &'static str, usize)> {
    let ops = |index: usize| offset_of!(Context, poll_cq) + (index - 11) * size_of::<usize>();
    vec![
        ("ibv_context", "ops.poll_cq", offset_of!(Context, poll_cq)),
        ("ibv_context", "ops.req_notify_cq", offset_of!(Context, req_notify_cq)),
        ("ibv_context", "ops.post_send", offset_of!(Context, post_send)),
        ("ibv_context", "ops.post_recv", offset_of!(Context, post_recv)),
        ("ibv_context", "ops._compat_async_event", ops(31)),
        ("ibv_context", "async_fd", offset_of!(Context, async_fd)),
        ("ibv_cq", "context", offset_of!(Cq, context)),
        ("ibv_comp_channel", "fd", offset_of!(CompChannel, fd)),
        ("ibv_qp", "context", offset_of!(Qp, context)),
        ("ibv_qp", "qp_num", offset_of!(Qp, qp_num)),
        ("ibv_mr", "lkey", offset_of!(Mr, lkey)),
        ("ibv_mr", "rkey", offset_of!(Mr, rkey)),
        ("ibv_sge", "addr", offset_of!(RawSge, addr)),
        ("ibv_sge", "length", offset_of!(RawSge, length)),
        ("ibv_sge", "lkey", offset_of!(RawSge, lkey)),
        ("ibv_send_wr", "wr_id", offset_of!(SendWr, wr_id)),
        ("ibv_send_wr", "next", offset_of!(SendWr, next)),
        ("ibv_send_wr", "sg_list", offset_of!(SendWr, sg_list)),
        ("ibv_send_wr", "num_sge", offset_of!(SendWr, num_sge)),
        ("ibv_send_wr", "opcode", offset_of!(SendWr, opcode)),
        ("ibv_send_wr", "send_flags", offset_of!(SendWr, send_flags)),
        ("ibv_send_wr", "imm_data", offset_of!(SendWr, imm_data)),
        ("ibv_send_wr", "wr.rdma.remote_addr", offset_of!(SendWr, remote_addr)),
        ("ibv_send_wr", "wr.rdma.rkey", offset_of!(SendWr, rkey)),
        ("ibv_recv_wr", "next", offset_of!(RecvWr, next)),
        ("ibv_recv_wr", "sg_list", offset_of!(RecvWr, sg_list)),
        ("ibv_recv_wr", "num_sge", offset_of!(RecvWr, num_sge)),
        ("ibv_wc", "wr_id", offset_of!(Wc, wr_id)),
        ("ibv_wc", "status", offset_of!(Wc, status)),
        ("ibv_wc", "opcode", offset_of!(Wc, opcode)),
        ("ibv_wc", "imm_data", offset_of!(Wc, imm_data)),
        ("ibv_wc", "wc_flags", offset_of!(Wc, wc_flags)),
        ("ibv_qp_init_attr", "send_cq", offset_of!(QpInitAttr, send_cq)),
        ("ibv_qp_init_attr", "recv_cq", offset_of!(QpInitAttr, recv_cq)),
        ("ibv_qp_init_attr", "cap.max_send_wr", offset_of!(QpInitAttr, max_send_wr)),
        ("ibv_qp_init_attr", "cap.max_recv_wr", offset_of!(QpInitAttr, max_recv_wr)),
        ("ibv_qp_init_attr", "cap.max_inline_data", offset_of!(QpInitAttr, max_inline_data)),
        ("ibv_qp_init_attr", "qp_type", offset_of!(QpInitAttr, qp_type)),
        ("ibv_qp_init_attr", "sq_sig_all", offset_of!(QpInitAttr, sq_sig_all)),
        ("ibv_device_attr", "max_mr_size", offset_of!(DeviceAttr, max_mr_size)),
        ("ibv_device_attr", "max_qp_wr", offset_of!(DeviceAttr, max_qp_wr)),
        ("ibv_device_attr", "max_cqe", offset_of!(DeviceAttr, max_cqe)),
        ("ibv_device_attr", "max_mr", offset_of!(DeviceAttr, max_mr)),
        ("ibv_device_attr", "max_qp_rd_atom", offset_of!(DeviceAttr, max_qp_rd_atom)),
        ("ibv_device_attr", "max_qp_init_rd_atom", offset_of!(DeviceAttr, max_qp_init_rd_atom)),
        ("ibv_async_event", "element", offset_of!(AsyncEvent, element)),
        ("ibv_async_event", "event_type", offset_of!(AsyncEvent, event_type)),
        ("rdma_event_channel", "fd", offset_of!(EventChannel, fd)),
        ("rdma_cm_id", "verbs", offset_of!(CmId, verbs)),
        ("rdma_cm_id", "qp", offset_of!(CmId, qp)),
        ("rdma_conn_param", "private_data_len", offset_of!(ConnParam, private_data_len)),
        ("rdma_conn_param", "responder_resources", offset_of!(ConnParam, responder_resources)),
        ("rdma_conn_param", "initiator_depth", offset_of!(ConnParam, initiator_depth)),
        ("rdma_conn_param", "flow_control", offset_of!(ConnParam, flow_control)),
        ("rdma_conn_param", "retry_count", offset_of!(ConnParam, retry_count)),
        ("rdma_conn_param", "rnr_retry_count", offset_of!(ConnParam, rnr_retry_count)),
        ("rdma_conn_param", "qp_num", offset_of!(ConnParam, qp_num)),
        ("rdma_cm_event", "id", offset_of!(CmEvent, id)),
        ("rdma_cm_event", "event", offset_of!(CmEvent, event)),
        ("rdma_cm_event", "status", offset_of!(CmEvent, status)),
        ("rdma_cm_event", "param.conn", offset_of!(CmEvent, conn)),
    ]
}

/// Structures whose arrays cross the interface, or that we allocate, and their sizes.
fn sizes() -> Vec<(&'static str, usize)> {
    vec![
        ("ibv_sge", size_of::<RawSge>()),
        ("ibv_send_wr", size_of::<SendWr>()),
        ("ibv_recv_wr", size_of::<RecvWr>()),
        ("ibv_wc", size_of::<Wc>()),
        ("ibv_mr", size_of::<Mr>()),
        ("ibv_qp_init_attr", size_of::<QpInitAttr>()),
        ("ibv_async_event", size_of::<AsyncEvent>()),
        ("rdma_conn_param", size_of::<ConnParam>()),
    ]
}

fn constants() -> Vec<(&'static str, c_uint)> {
    vec![
        ("IBV_WR_RDMA_WRITE", WR_RDMA_WRITE),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
        ("IBV_WR_RDMA_READ", WR_RDMA_READ),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED),
        ("IBV_WC_WITH_IMM", WC_WITH_IMM),
        ("IBV_QPT_RC", QPT_RC),
        ("IBV_EVENT_CQ_ERR", EVENT_CQ_ERR),
        ("IBV_EVENT_QP_FATAL", EVENT_QP_FATAL),
        ("IBV_EVENT_QP_REQ_ERR", EVENT_QP_REQ_ERR),
        ("IBV_EVENT_QP_ACCESS_ERR", EVENT_QP_ACCESS_ERR),
        ("IBV_EVENT_DEVICE_FATAL", EVENT_DEVICE_FATAL),
        ("RDMA_CM_EVENT_ADDR_RESOLVED", CM_ADDR_RESOLVED),
        ("RDMA_CM_EVENT_ROUTE_RESOLVED", CM_ROUTE_RESOLVED),
        ("RDMA_CM_EVENT_CONNECT_REQUEST", CM_CONNECT_REQUEST),
        ("RDMA_CM_EVENT_REJECTED", CM_REJECTED),
        ("RDMA_CM_EVENT_ESTABLISHED", CM_ESTABLISHED),
        ("RDMA_CM_EVENT_DISCONNECTED", CM_DISCONNECTED),
        ("RDMA_CM_EVENT_DEVICE_REMOVAL", CM_DEVICE_REMOVAL),
        ("RDMA_PS_TCP", PS_TCP),
        ("IBV_ACCESS_LOCAL_WRITE", crate::Access::LOCAL_WRITE.bits()),
        ("IBV_ACCESS_REMOTE_WRITE", crate::Access::REMOTE_WRITE.bits()),
        ("IBV_ACCESS_REMOTE_READ", crate::Access::REMOTE_READ.bits()),
        ("IBV_ACCESS_ON_DEMAND", crate::Access::ON_DEMAND.bits()),
        ("IBV_ACCESS_RELAXED_ORDERING", crate::Access::RELAXED_ORDERING.bits()),
        ("IBV_WC_WR_FLUSH_ERR", crate::Status::FLUSHED.0),
        ("IBV_WC_LOC_PROT_ERR", crate::Status::LOCAL_PROTECTION.0),
        ("IBV_WC_REM_INV_REQ_ERR", crate::Status::REMOTE_INVALID_REQUEST.0),
        ("IBV_WC_REM_ACCESS_ERR", crate::Status::REMOTE_ACCESS.0),
        ("IBV_WC_REM_OP_ERR", crate::Status::REMOTE_OPERATION.0),
        ("IBV_WC_RETRY_EXC_ERR", crate::Status::RETRY_EXCEEDED.0),
        ("IBV_WC_RNR_RETRY_EXC_ERR", crate::Status::RNR_RETRY_EXCEEDED.0),
    ]
}

/// Typed from the headers of rdma-core 44, for 64-bit targets.
#[test]
fn layouts_are_pinned() {
    let at = |name, member| {
        let all = offsets();
        all.iter().find(|one| (one.0, one.1) == (name, member)).unwrap().2
    };
    assert_eq!(at("ibv_context", "ops.poll_cq"), 96);
    assert_eq!(at("ibv_context", "ops.req_notify_cq"), 104);
    assert_eq!(at("ibv_context", "ops.post_send"), 208);
    assert_eq!(at("ibv_context", "ops.post_recv"), 216);
    assert_eq!(at("ibv_context", "async_fd"), 268);
    assert_eq!(at("ibv_qp", "qp_num"), 52);
    assert_eq!((at("ibv_mr", "lkey"), at("ibv_mr", "rkey")), (36, 40));
    assert_eq!(at("ibv_send_wr", "wr.rdma.remote_addr"), 40);
    assert_eq!(at("ibv_wc", "imm_data"), 24);
    assert_eq!(at("ibv_qp_init_attr", "qp_type"), 52);
    assert_eq!(at("ibv_device_attr", "max_qp_wr"), 112);
    assert_eq!(at("ibv_device_attr", "max_qp_init_rd_atom"), 156);
    assert_eq!(at("rdma_cm_event", "param.conn"), 24);
    let sizes: Vec<usize> = sizes().into_iter().map(|(_, size)| size).collect();
    assert_eq!(sizes, [16, 128, 32, 48, 48, 64, 16, 24]);
    assert!(size_of::<DeviceAttr>() >= 232);
}

/// Asks the C compiler, where rdma-core's headers are (Debian: libibverbs-dev, librdmacm-dev).
#[test]
fn layouts_are_those_of_the_installed_headers() {
    let mut lines: Vec<String> = offsets()
        .iter()
        .map(|(name, member, at)| format!("offsetof(struct {name}, {member}) == {at}"))
        .collect();
    lines.extend(sizes().iter().map(|(name, size)| format!("sizeof(struct {name}) == {size}")));
    lines.extend(constants().iter().map(|(name, value)| format!("{name} == {value}")));
    let room = size_of::<DeviceAttr>();
    lines.push(format!("sizeof(struct ibv_device_attr) <= {room}"));
    let asserts: Vec<String> =
        lines.iter().map(|line| format!("_Static_assert({line}, \"{line}\");")).collect();
    let probe = format!(
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n{}\n",
        asserts.join("\n")
    );
    let headers = compile("#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n");
    if !Want::VerbsHeaders.found(&headers) {
        return;
    }
    if let Err(wrong) = compile(&probe) {
        panic!("{wrong}");
    }
}

fn compile(program: &str) -> Result<(), String> {
    use std::io::Write;
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-fsyntax-only", "-"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let mut stdin = compiler.stdin.take().unwrap();
    stdin.write_all(program.as_bytes()).map_err(|error| error.to_string())?;
    drop(stdin);
    let output = compiler.wait_with_output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(text) }
}
