//! A work queue of the host, opened.
#![allow(unsafe_code)]
// UNSAFETY: a portal is mapped device memory that descriptors are stored to.

use crate::find::{Mode, QueueName, find_queue};
use crate::instructions::{self, Instructions};
use crate::{HostWait, OpenError, WorkQueue};
use martlet_device_io::{DESCRIPTOR_BYTES, Portal, Submission};
use martlet_dsa_abi::PORTAL_BYTES;
use rustix::fs::{Mode as FileMode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How descriptors get to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitter {
    /// By ENQCMD to a mapped portal.
    Enqcmd,
    /// By MOVDIR64B to a mapped portal.
    Movdir64b,
    /// By `write` to the device file: the kernel lets nobody without CAP_SYS_RAWIO map the portals
    /// of devices that are not safe for it (CVE-2024-21823: Sapphire and Emerald Rapids), or the
    /// processor lacks the instruction.
    Write,
}

/// A work queue of this host.
#[derive(Debug)]
pub struct Opened {
    /// The queue. Its memory is [`ProcessMemory`](crate::ProcessMemory).
    pub queue: Arc<WorkQueue>,
    /// How descriptors get there.
    pub submitter: Submitter,
}

/// Opens a work queue by its device file, like `/dev/dsa/wq0.0`; `devices` is
/// `/sys/bus/dsa/devices`.
///
/// The process that opens it is the one that may use it: the device gets this process's address
/// space. It may drop CAP_SYS_RAWIO afterwards. After a fork the child has no portal.
pub fn open(devices: &Path, file: &Path) -> Result<Opened, OpenError> {
    let name = QueueName::of_path(file).ok_or_else(|| OpenError::Name(file.to_owned()))?;
    let text = name.to_string();
    let Some((device, queue)) = find_queue(devices, name)? else {
        return Err(OpenError::Missing { name: text });
    };
    if let Some(reason) = device.obstacle(&queue) {
        return Err(OpenError::Unusable { name: text, reason });
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let descriptor = rustix::fs::open(file, flags, FileMode::empty())
        .map_err(|errno| OpenError::Open { path: file.to_owned(), source: errno.into() })?;
    let instructions = Instructions::detect();
    let mapped = match queue.mode {
        Some(Mode::Shared) if instructions.enqcmd => Mapped::new(&descriptor, Submitter::Enqcmd),
        Some(Mode::Dedicated) if instructions.movdir64b => {
            Mapped::new(&descriptor, Submitter::Movdir64b)
        }
        Some(Mode::Shared | Mode::Dedicated) | None => Err(Errno::OPNOTSUPP.into()),
    };
    let (portal, submitter): (Box<dyn Portal>, Submitter) = match mapped {
        Ok(mapped) => {
            let how = mapped.how;
            (Box::new(MappedPortal { mapped, _file: descriptor }), how)
        }
        Err(reason) => {
            tracing::info!(queue = %name, %reason, "no DSA portal: descriptors go through write()");
            (Box::new(WrittenPortal { file: descriptor }), Submitter::Write)
        }
    };
    let limits = device.limits(&queue, submitter == Submitter::Write);
    let wait = Arc::new(HostWait::for_process_addresses(instructions));
    let queue = WorkQueue::new(text, portal, wait, limits);
    Ok(Opened { queue, submitter })
}

/// A mapped portal.
struct Mapped {
    address: *mut u8,
    how: Submitter,
    next: AtomicUsize,
}

// SAFETY: the mapping is this value's own; descriptors are stored to it whole, from any thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &OwnedFd, how: Submitter) -> Result<Mapped, io::Error> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let hint = std::ptr::null_mut();
        // SAFETY: a new mapping that replaces no other one harms nobody.
        let address =
            unsafe { rustix::mm::mmap(hint, PORTAL_BYTES, ProtFlags::WRITE, flags, file, 0) }?;
        Ok(Mapped { address: address.cast(), how, next: AtomicUsize::new(0) })
    }

    /// The place of the next descriptor. MOVDIR64B to one place after the other would have to wait
    /// for each other.
    fn place(&self) -> *mut u8 {
        // Relaxed: any place will do.
        let next = self.next.fetch_add(DESCRIPTOR_BYTES, Ordering::Relaxed);
        self.address.wrapping_add(next % PORTAL_BYTES)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and used only through this value.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), PORTAL_BYTES) };
    }
}

/// ENQCMD or MOVDIR64B. The file stays open: its last close drains the queue.
struct MappedPortal {
    mapped: Mapped,
    _file: OwnedFd,
}

impl Portal for MappedPortal {
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        let (place, bytes) = (self.mapped.place(), descriptor.as_ptr());
        match self.mapped.how {
            Submitter::Enqcmd => {
                // SAFETY: the processor has ENQCMD and the device PASIDs, as `open` found; the
                // portal is of a shared queue, and mapped as long as this value lives.
                match unsafe { instructions::enqcmd(place, bytes) } {
                    0 => Submission::Accepted,
                    _ => Submission::Retry,
                }
            }
            Submitter::Movdir64b => {
                // SAFETY: the processor has MOVDIR64B, as `open` found; the portal is of a
                // dedicated queue, and mapped as long as this value lives.
                unsafe { instructions::movdir64b(place, bytes) };
                Submission::Accepted
            }
            Submitter::Write => unreachable!("a written portal is not mapped"),
        }
    }
}

/// The device file, written to.
struct WrittenPortal {
    file: OwnedFd,
}

impl Portal for WrittenPortal {
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        after_write(rustix::io::write(&self.file, descriptor))
    }
}

/// What the kernel's answer means. It takes whole descriptors only (`idxd_cdev_write`,
/// `drivers/dma/idxd/cdev.c`).
fn after_write(written: Result<usize, Errno>) -> Submission {
    match written {
        Ok(DESCRIPTOR_BYTES) => Submission::Accepted,
        // EAGAIN: the queue stayed full for all of the kernel's own tries.
        Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::BUSY) => Submission::Retry,
        // The queue was disabled, the device removed, or it belongs to another process.
        Err(_) => Submission::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_write() {
        assert_eq!(after_write(Ok(64)), Submission::Accepted);
        assert_eq!(after_write(Ok(0)), Submission::Retry);
        assert_eq!(after_write(Err(Errno::AGAIN)), Submission::Retry);
        for errno in [Errno::NODEV, Errno::PERM, Errno::IO, Errno::INVAL] {
            assert_eq!(after_write(Err(errno)), Submission::Gone);
        }
    }
}
