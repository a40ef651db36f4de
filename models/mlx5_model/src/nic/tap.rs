//! A port that is a network interface of the host (Linux TUN/TAP, `Documentation/networking/
//! tuntap.rst`).
#![allow(unsafe_code)]
// UNSAFETY: two ioctls that the system call wrappers in use don't have.

use super::frame::HEADER_BYTES;
use crate::num::to_u64;
use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, Setter, ioctl};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR` (`linux/if_tun.h`): Ethernet frames, each with a virtio
/// header.
const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;
/// `TUNSETIFF`.
const SET_INTERFACE: Opcode = 0x4004_54ca;
/// `TUNSETVNETHDRSZ`.
const SET_HEADER_BYTES: Opcode = 0x4004_54d8;
/// `IFNAMSIZ`.
const NAME_BYTES: usize = 16;

/// The largest frame that is read.
const FRAME_BYTES_MAX: usize = 65_536 + 64;

/// A network interface of the host.
#[derive(Debug)]
pub struct Tap {
    file: OwnedFd,
    /// A frame that found no receive buffer, and its flow.
    waiting: Mutex<Option<(Vec<u8>, u16)>>,
}

/// The interface takes no frame at the moment.
#[derive(Debug)]
pub(crate) struct TapFull;

/// `struct ifreq`, as TUNSETIFF uses it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_BYTES],
    flags: u16,
    rest: [u8; 22],
}

impl Tap {
    /// Opens the interface with this name; it is made if there is none and the caller may.
    pub fn open(name: &str) -> io::Result<Tap> {
        let mut request = InterfaceRequest { name: [0; NAME_BYTES], flags: FLAGS, rest: [0; 22] };
        let field = request.name.get_mut(..name.len()).filter(|field| field.len() < NAME_BYTES);
        let field = field.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "an interface's name has 15 bytes at most")
        })?;
        field.copy_from_slice(name.as_bytes());
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open("/dev/net/tun", flags, Mode::empty())?;
        // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, 40 bytes, which the request is.
        unsafe { ioctl(&file, Setter::<SET_INTERFACE, InterfaceRequest>::new(request)) }?;
        let bytes = i32::try_from(HEADER_BYTES).unwrap_or(0);
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        unsafe { ioctl(&file, Setter::<SET_HEADER_BYTES, i32>::new(bytes)) }?;
        Ok(Tap::from_file(file))
    }

    /// Takes a file that is an open interface: non-blocking, frames with a 12-byte virtio header.
    pub fn from_file(file: OwnedFd) -> Tap {
        Tap { file, waiting: Mutex::default() }
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether a frame is kept back: then the interface is not worth waiting for.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Sends a frame with its header; what the interface refuses for good counts as sent, as on a
    /// cable.
    pub(super) fn send(&self, frame: &mut [u8]) -> Result<(), TapFull> {
        if let Some(header) = frame.get_mut(..HEADER_BYTES) {
            header.fill(0);
        }
        match rustix::io::write(&self.file, frame) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Err(TapFull),
            Err(error) => {
                tracing::debug!(%error, "the tap refused a frame");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Reads a frame, and tells its flow.
    pub(super) fn receive(&self, frame: &mut Vec<u8>) -> Option<u16> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((kept, flow)) = waiting {
            *frame = kept;
            return Some(flow);
        }
        frame.resize(FRAME_BYTES_MAX, 0);
        let bytes = rustix::io::read(&self.file, frame.as_mut_slice()).ok()?;
        frame.truncate(bytes);
        (bytes > HEADER_BYTES).then(|| flow_of(frame))
    }

    /// Keeps a frame that found no buffer, for the next [`Tap::receive`].
    pub(super) fn put_back(&self, frame: &[u8], flow: u16) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = Some((frame.to_vec(), flow));
    }
}

/// A hash over the addresses and ports (the first 38 bytes of Ethernet, IPv4 and TCP or UDP less
/// what changes from packet to packet), so that a connection stays on one queue.
fn flow_of(frame: &[u8]) -> u16 {
    let addresses = frame.iter().skip(HEADER_BYTES).take(12);
    let ip = frame.iter().skip(HEADER_BYTES + 26).take(12);
    // FNV-1a.
    let hash = addresses.chain(ip).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(to_u64(0x0100_0000_01b3))
    });
    crate::num::low16(crate::num::high32(hash))
}
