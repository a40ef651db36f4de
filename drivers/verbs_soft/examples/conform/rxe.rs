//! Makes a soft-RoCE device by the kernel's RDMA netlink.
//!
//! Numbers: the kernel's uapi/rdma/rdma_netlink.h.

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;

/// `NETLINK_RDMA`.
const NETLINK_RDMA: u32 = 20;
/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_NEWLINK)`.
const NEWLINK: u16 = (5 << 10) + 3;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST_ACK: u16 = 1 | 4;
/// `RDMA_NLDEV_ATTR_DEV_NAME`, `_NDEV_NAME` and `_LINK_TYPE`.
const DEV_NAME: u16 = 2;
const NDEV_NAME: u16 = 51;
const LINK_TYPE: u16 = 65;
/// `NLMSG_ERROR`.
const ERROR: u16 = 2;

pub(crate) fn add(name: &str, netdev: &str) -> io::Result<()> {
    let protocol = std::num::NonZeroU32::new(NETLINK_RDMA).map(rustix::net::Protocol::from_raw);
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
    let mut message = vec![0; 16];
    for (attribute, value) in [(DEV_NAME, name), (LINK_TYPE, "rxe"), (NDEV_NAME, netdev)] {
        let bytes = u16::try_from(value.len() + 5).map_err(io::Error::other)?;
        message.extend_from_slice(&bytes.to_ne_bytes());
        message.extend_from_slice(&attribute.to_ne_bytes());
        message.extend_from_slice(value.as_bytes());
        message.push(0);
        message.resize(message.len().next_multiple_of(4), 0);
    }
    let bytes = u32::try_from(message.len()).map_err(io::Error::other)?;
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..6].copy_from_slice(&NEWLINK.to_ne_bytes());
    message[6..8].copy_from_slice(&REQUEST_ACK.to_ne_bytes());
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &kernel)?;
    let mut answer = [0; 4096];
    let (_, got) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    // struct nlmsghdr, then the error of struct nlmsgerr.
    let answer = answer.get(..got).unwrap_or_default();
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(error)) => Err(io::Error::from_raw_os_error(-error)),
        _ => Err(io::Error::other("the kernel's answer makes no sense")),
    }
}
