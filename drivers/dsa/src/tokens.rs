//! How much the other processes of this host have outstanding, in a small file that all of them map.
//!
//! Each process has a lane: a count of pages for each device, and until when the device is expected
//! to be at them, which only it changes. What others have outstanding is the sum of their lanes. So
//! nothing has to be undone when a process dies: its lane is out of the sum as soon as somebody
//! notices, and the next process may take it.
//!
//! Who owns a lane holds a lock on a byte of the file (an open file description lock, `F_OFD_SETLK`),
//! which the kernel drops with the process, however it ends. No process id is compared, so ids that
//! are used again and PID namespaces do no harm.
//!
//! The counts are advice to a policy. A process that writes nonsense makes others use the CPU more,
//! or the device; no result depends on them.
#![allow(unsafe_code)]
// UNSAFETY: the counts are atomics in a mapped file that other processes change.

use martlet_units::Instant;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Processes that may share a file.
const LANES: usize = 256;
/// Devices, by the number in `dsaN`.
const DEVICES: usize = 64;
/// First bytes of the file; the last one is the layout's version.
const MAGIC: u64 = u64::from_le_bytes(*b"mDSAtok\x01");
/// Where the counts begin, in words of 8 bytes: one cache line behind the header.
const COUNTS: usize = 8;
/// The header's word that says how many lanes were ever used.
const USED: usize = 1;
const FILE_BYTES: usize = (COUNTS + LANES * DEVICES) * 8;
/// Locks are on bytes behind the file's end: this one for its creation, then one for each lane.
const CREATION_LOCK: i64 = 1 << 20;
/// The lanes' owners are looked after this often.
const SWEEP: Duration = Duration::from_millis(100);
/// Tries, a millisecond apart, for another process to finish making the file.
const CREATION_TRIES: u32 = 200;

/// Why tokens can't be shared. Migrations work without: each process then finds out by the device's
/// latency what others do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The host refused something.
    #[error("cannot {action} {}", .path.display())]
    Host {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("{} can't hold DSA tokens: {reason}", .path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// This process's lane in a host's file of tokens.
pub struct Tokens {
    words: *mut u8,
    file: OwnedFd,
    lane: usize,
    swept: AtomicU64,
}

// SAFETY: the mapping is this value's own, and only reached through atomics.
unsafe impl Send for Tokens {}
// SAFETY: as above.
unsafe impl Sync for Tokens {}

impl Tokens {
    /// Opens the file, or makes it, and takes a lane. All processes of a host that should know of
    /// each other use the same path, on a file system in memory.
    ///
    /// The file must belong to this user or to root, and not be writable for everybody: a process
    /// that may write to it could also cut it off and so kill those who have mapped it. Blocks for
    /// some milliseconds if another process is making it right now.
    pub fn open(path: &Path) -> Result<Tokens, TokenError> {
        let host = |action| {
            move |errno: rustix::io::Errno| TokenError::Host {
                action,
                path: path.to_owned(),
                source: errno.into(),
            }
        };
        let foreign = |reason| TokenError::Foreign { path: path.to_owned(), reason };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(host("open"))?;
        let stat = rustix::fs::fstat(&file).map_err(host("look at"))?;
        let owned = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(foreign("it is no regular file"));
        }
        if !owned || stat.st_mode & 0o002 != 0 {
            return Err(foreign("others may write to it"));
        }
        lock_for_creation(&file).map_err(host("lock"))?;
        let made = make(&file);
        unlock(&file, CREATION_LOCK);
        if !made.map_err(host("make"))? {
            return Err(foreign("it has another size"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let hint = std::ptr::null_mut();
        // SAFETY: a new mapping that replaces no other one harms nobody. The file has this size.
        let words =
            unsafe { rustix::mm::mmap(hint, FILE_BYTES, protection, MapFlags::SHARED, &file, 0) };
        let words = words.map_err(host("map"))?.cast();
        let mut tokens = Tokens { words, file, lane: LANES, swept: AtomicU64::new(0) };
        if !tokens.agrees() {
            return Err(foreign("it is of another program, or of another version"));
        }
        tokens.take_lane().map_err(host("lock"))?;
        if tokens.lane == LANES {
            return Err(foreign("all lanes are taken"));
        }
        Ok(tokens)
    }

    /// Which lane this is; for people.
    pub fn lane(&self) -> usize {
        self.lane
    }

    /// Says that a device has so many pages of this process, in all, and will be at them until then.
    /// From that moment on they count no more, even if nobody has looked whether they are done: a
    /// channel that is busy sending keeps no device busy. Devices beyond the file's are not counted.
    pub fn publish(&self, device: u16, pages: u32, until: Instant) {
        if let Some(count) = self.count(device, self.lane) {
            // Relaxed, here and below: a count that others read as advice.
            count.store(Lane { pages, until: micros(until) }.to_word(), Ordering::Relaxed);
        }
    }

    /// Pages that other processes have outstanding on a device. Looks after lanes of the dead now and
    /// then.
    pub fn others(&self, now: Instant, device: u16) -> u64 {
        self.sweep_if_due(now);
        let lanes = (0..self.used()).filter(|lane| *lane != self.lane);
        let counts = lanes.filter_map(|lane| self.count(device, lane));
        let pages = counts.map(|count| Lane::of(count.load(Ordering::Relaxed)).pages_at(now));
        pages.map(u64::from).sum()
    }

    /// Takes the lanes of dead processes out of the sum.
    fn sweep(&self) {
        for lane in (0..self.used()).filter(|lane| *lane != self.lane) {
            let in_use = self.counts(lane).any(|count| count.load(Ordering::Relaxed) != 0);
            if in_use && matches!(try_lock(&self.file, lane_lock(lane)), Ok(true)) {
                self.clear(lane);
                unlock(&self.file, lane_lock(lane));
            }
        }
    }

    fn sweep_if_due(&self, now: Instant) {
        let last = self.swept.load(Ordering::Relaxed);
        if now.since(Instant(last)) < SWEEP {
            return;
        }
        let claimed =
            self.swept.compare_exchange(last, now.0, Ordering::Relaxed, Ordering::Relaxed);
        if claimed.is_ok() {
            self.sweep();
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < FILE_BYTES / 8, "inside of the file");
        // SAFETY: inside of the mapping, which lives as long as this value, and aligned.
        unsafe { AtomicU64::from_ptr(self.words.cast::<u64>().wrapping_add(index)) }
    }

    /// A lane's count for a device. Counts of a device lie together: who adds them up reads few
    /// cache lines.
    fn count(&self, device: u16, lane: usize) -> Option<&AtomicU64> {
        let device = usize::from(device);
        (device < DEVICES && lane < LANES).then(|| self.word(COUNTS + device * LANES + lane))
    }

    fn counts(&self, lane: usize) -> impl Iterator<Item = &AtomicU64> {
        (0..DEVICES).map(move |device| self.word(COUNTS + device * LANES + lane))
    }

    fn clear(&self, lane: usize) {
        self.counts(lane).for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// Lanes that were ever used.
    fn used(&self) -> usize {
        let used = usize::try_from(self.word(USED).load(Ordering::Relaxed));
        used.unwrap_or(LANES).min(LANES)
    }

    /// Whether the header is this version's.
    fn agrees(&self) -> bool {
        self.word(0).load(Ordering::Relaxed) == MAGIC
    }

    /// The first lane that is nobody's.
    fn take_lane(&mut self) -> rustix::io::Result<()> {
        for lane in 0..LANES {
            if try_lock(&self.file, lane_lock(lane))? {
                self.clear(lane);
                let used = u64::try_from(lane + 1).expect("at most 256");
                self.word(USED).fetch_max(used, Ordering::Relaxed);
                self.lane = lane;
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        if self.lane < LANES {
            self.clear(self.lane);
        }
        // SAFETY: mapped with this length, and used only through this value. The file's close, which
        // follows, drops the lock.
        let _ = unsafe { rustix::mm::munmap(self.words.cast(), FILE_BYTES) };
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens(lane {} of {})", self.lane, self.used())
    }
}

/// What a process says of a device: a word of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lane {
    pages: u32,
    /// When they stop to count, in microseconds of the host's clock.
    until: u32,
}

impl Lane {
    fn of(word: u64) -> Lane {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Lane { pages: u32::from_le_bytes([a, b, c, d]), until: u32::from_le_bytes([e, f, g, h]) }
    }

    fn to_word(self) -> u64 {
        u64::from(self.pages) | u64::from(self.until) << 32
    }

    fn pages_at(self, now: Instant) -> u32 {
        // The clock's low bits: what is less than half of their range ahead is yet to come.
        let is_over = self.until.wrapping_sub(micros(now)) > u32::MAX / 2;
        if is_over { 0 } else { self.pages }
    }
}

/// Microseconds of the host's clock, rounded up, in 32 bits: they wrap after 71 minutes.
fn micros(at: Instant) -> u32 {
    let [a, b, c, d, ..] = at.0.div_ceil(1000).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn lane_lock(lane: usize) -> i64 {
    CREATION_LOCK + 1 + i64::try_from(lane).expect("at most 256")
}

/// Gives a new file its size and its header; whether it has the right size. A process that died
/// while it did so left zeroes.
fn make(file: &OwnedFd) -> rustix::io::Result<bool> {
    let bytes = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let right = u64::try_from(FILE_BYTES).expect("128 KiB");
    if bytes == 0 {
        rustix::fs::ftruncate(file, right)?;
    } else if bytes != right {
        return Ok(false);
    }
    let mut magic = [0; 8];
    rustix::io::pread(file, &mut magic, 0)?;
    if magic == [0; 8] {
        rustix::io::pwrite(file, &MAGIC.to_le_bytes(), 0)?;
    }
    Ok(true)
}

fn lock_for_creation(file: &OwnedFd) -> rustix::io::Result<()> {
    for _ in 0..CREATION_TRIES {
        if try_lock(file, CREATION_LOCK)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(rustix::io::Errno::TIMEDOUT)
}

/// Locks a byte; false if someone else has it.
fn try_lock(file: &OwnedFd, byte: i64) -> rustix::io::Result<bool> {
    match set_lock(file, byte, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn unlock(file: &OwnedFd, byte: i64) {
    // Unlocking what is locked does not fail.
    let _ = set_lock(file, byte, libc::F_UNLCK);
}

fn set_lock(file: &OwnedFd, byte: i64, kind: libc::c_int) -> rustix::io::Result<()> {
    let kind = libc::c_short::try_from(kind).expect("a small constant");
    let whence = libc::c_short::try_from(libc::SEEK_SET).expect("a small constant");
    // The process id of these locks is 0.
    let lock = libc::flock { l_type: kind, l_whence: whence, l_start: byte, l_len: 1, l_pid: 0 };
    // SAFETY: the descriptor is open, and the structure is read during the call only.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    match result {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

fn last_errno() -> rustix::io::Errno {
    let code = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    rustix::io::Errno::from_raw_os_error(code)
}
