//! What holds guest memory, and what follows from it.

use crate::RamError;
use martlet_units::PAGE_SIZE;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

/// What holds memory that a VMM has already mapped. What one can't do, another way does; nothing
/// fails for it:
///
/// | memory | untouched pages | long runs that arrive | digest |
/// |---|---|---|---|
/// | shared file in memory (memfd, tmpfs) | asked of the file, a call for each run of data | through the file: one copy | through the file |
/// | shared file of huge pages (hugetlbfs, memfd) | asked of the page tables, 8 bytes read a page, if all pages that the file has are mapped there; else none | through the mapping | through the mapping |
/// | private anonymous, huge pages or not | asked of the page tables, 8 bytes read a page | through the mapping | through the mapping |
/// | any other | none: each page is read once, which may allocate it | through the mapping | through the mapping |
///
/// Of memory that was handed over no page is ever given back to the host (as a hole in its file):
/// a device may have it pinned. Zeros are written instead.
#[derive(Debug)]
#[non_exhaustive]
pub enum Backing {
    /// A shared mapping (`MAP_SHARED`) of a file.
    File {
        /// The file, of whatever kind: this crate asks the kernel.
        file: File,
        /// Its byte that the mapping begins with.
        offset: u64,
    },
    /// A private mapping of no file (`MAP_PRIVATE | MAP_ANONYMOUS`).
    PrivateAnonymous,
    /// Any other mapping, or an unknown one: private ones of files, shared ones of no file, devices.
    Other,
}

/// The file that a region's memory is, by which its pages can also be reached.
#[derive(Clone, Copy, Debug)]
pub struct RegionFile<'a> {
    /// The file.
    pub fd: BorrowedFd<'a>,
    /// Its byte that the region begins with.
    pub offset: u64,
}

/// A [`Backing`] that was looked at.
#[derive(Debug)]
pub(crate) enum Held {
    /// A file in memory, which takes and gives pages.
    Pages { file: File, offset: u64, is_own: bool },
    /// A file of huge pages, of which most calls know nothing.
    HugePages { file: File },
    /// Page tables know all of it.
    Anonymous,
    /// Nobody knows anything of it.
    Other,
}

// From linux/magic.h.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

impl Held {
    /// Looks at what a VMM names.
    pub(crate) fn of(backing: Backing) -> Result<Held, RamError> {
        let (file, offset) = match backing {
            Backing::File { file, offset } => (file, offset),
            Backing::PrivateAnonymous => return Ok(Held::Anonymous),
            Backing::Other => return Ok(Held::Other),
        };
        if !offset.is_multiple_of(PAGE_SIZE) {
            return Err(RamError::Unusable { reason: "begins within a page of its file" });
        }
        let kind = rustix::fs::fstatfs(&file).ok().and_then(|fs| u64::try_from(fs.f_type).ok());
        Ok(match kind {
            Some(TMPFS_MAGIC) => Held::Pages { file, offset, is_own: false },
            Some(HUGETLBFS_MAGIC) => Held::HugePages { file },
            // The pages of other files are on a disk or a device, which have ideas of their own
            // about holes.
            _ => Held::Other,
        })
    }

    pub(crate) fn file(&self) -> Option<RegionFile<'_>> {
        match self {
            Held::Pages { file, offset, .. } => {
                Some(RegionFile { fd: file.as_fd(), offset: *offset })
            }
            Held::HugePages { .. } | Held::Anonymous | Held::Other => None,
        }
    }
}
