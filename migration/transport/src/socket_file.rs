//! A listening Unix socket and its name in the file system, as one thing with one owner.

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest path of a Unix socket, in bytes (`sun_path` of unix(7), less its NUL).
pub const UNIX_PATH_MAX: usize = 107;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// How long another process may hold the folder's lock. One of ours holds it for the moment that
/// looking, removing and binding take.
const LOCK_MAX: Duration = Duration::from_secs(1);

/// Between two tries to get the lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// Why a socket could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketFileError {
    /// No path of a Unix socket.
    #[error("the path of a socket has 1 to {UNIX_PATH_MAX} bytes, not {length}")]
    Length {
        /// Of the path, in bytes.
        length: usize,
    },
    /// It has an owner.
    #[error("it is in use by another process")]
    InUse,
    /// What stands there is no socket, and stays.
    #[error("something else is there ({kind})")]
    Foreign {
        /// What it is.
        kind: &'static str,
    },
    /// Somebody else holds a lock on the folder, so that nobody can say who owns a name in it.
    #[error("{} stays locked by another process (flock)", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// The host refused.
    #[error("{action}: {source}")]
    Host {
        /// What was being done.
        action: &'static str,
        /// What the kernel said. Part of the text: this ends as one line.
        source: io::Error,
    },
}

impl SocketFileError {
    fn host(action: &'static str, source: impl Into<io::Error>) -> SocketFileError {
        SocketFileError::Host { action, source: source.into() }
    }
}

impl From<SocketFileError> for io::Error {
    fn from(error: SocketFileError) -> io::Error {
        let kind = match &error {
            SocketFileError::Length { .. } => ErrorKind::InvalidInput,
            SocketFileError::InUse | SocketFileError::Foreign { .. } => ErrorKind::AddrInUse,
            SocketFileError::Locked { .. } => ErrorKind::ResourceBusy,
            SocketFileError::Host { source, .. } => source.kind(),
        };
        io::Error::new(kind, error)
    }
}

/// The names that this process owns, for an end that drops nothing.
static OWNED: Mutex<Vec<Name>> = Mutex::new(Vec::new());

fn owned() -> MutexGuard<'static, Vec<Name>> {
    // The list is whole between any two of its changes.
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name, and the device and inode that it had when it was bound: by now it may be another's.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    path: PathBuf,
    identity: (u64, u64),
}

impl Name {
    fn remove(&self) {
        let current = std::fs::symlink_metadata(&self.path);
        if current.is_ok_and(|m| (m.dev(), m.ino()) == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A listening socket that only its user can connect to. Dropping it removes its name, if that is
/// still this socket's.
#[derive(Debug)]
pub struct SocketFile {
    listener: UnixListener,
    name: Name,
}

impl SocketFile {
    /// Binds `path` and listens. A socket that a dead process left there is replaced; one that
    /// lives, or anything else at that path, is an error.
    ///
    /// # Errors
    /// See [`SocketFileError`]. What stands at `path` is as it was.
    pub fn bind(path: &Path) -> Result<SocketFile, SocketFileError> {
        let length = path.as_os_str().len();
        if length == 0 || length > UNIX_PATH_MAX {
            return Err(SocketFileError::Length { length });
        }
        // Two starts at once must not both take the path for a leftover: the folder's lock makes
        // look, remove and bind one step.
        let _lock = lock_folder(path)?;
        remove_leftover(path)?;
        let socket = private_socket().map_err(|e| SocketFileError::host("make a socket", e))?;
        let address = SocketAddrUnix::new(path)
            .map_err(|e| SocketFileError::host("take the path of a socket", e))?;
        rustix::net::bind(&socket, &address).map_err(|e| SocketFileError::host("bind", e))?;
        let metadata = std::fs::symlink_metadata(path)
            .map_err(|e| SocketFileError::host("look at the new socket", e))?;
        let name = Name { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) };
        owned().push(name.clone());
        let socket = SocketFile { listener: UnixListener::from(socket), name };
        rustix::net::listen(&socket.listener, BACKLOG)
            .map_err(|e| SocketFileError::host("listen", e))?;
        Ok(socket)
    }

    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.name.path
    }

    /// Removes the name now, if it is still this socket's. Any number of times.
    pub fn remove(&self) {
        // Before the socket is closed: as long as it lives nobody else takes the name.
        self.name.remove();
        owned().retain(|name| *name != self.name);
    }

    /// Removes all names that this process owns: for an end that drops nothing.
    pub fn remove_all() {
        for name in std::mem::take(&mut *owned()) {
            name.remove();
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A socket whose file will be its user's alone. The file gets the socket's mode at bind (unix(7),
/// net/unix/af_unix.c: unix_bind_bsd); the process's umask, which all threads share, stays.
fn private_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    Ok(socket)
}

fn lock_folder(path: &Path) -> Result<OwnedFd, SocketFileError> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = rustix::fs::open(folder, flags, Mode::empty())
        .map_err(|e| SocketFileError::host("open its folder", e))?;
    let deadline = Instant::now() + LOCK_MAX;
    loop {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_INTERVAL);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(SocketFileError::Locked { folder: folder.to_owned() });
            }
            Err(error) => return Err(SocketFileError::host("lock its folder", error)),
        }
    }
}

/// Removes a socket at `path` behind which nobody listens.
fn remove_leftover(path: &Path) -> Result<(), SocketFileError> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(SocketFileError::host("look at what is there", error)),
    };
    if !metadata.file_type().is_socket() {
        let kind = name_of(FileType::from_raw_mode(metadata.mode()));
        return Err(SocketFileError::Foreign { kind });
    }
    match try_connect(path) {
        Err(rustix::io::Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|e| SocketFileError::host("remove what a dead process left there", e)),
        // Also where it takes no more connections just now, or takes another kind of them.
        Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::PROTOTYPE) => {
            Err(SocketFileError::InUse)
        }
        Err(error) => Err(SocketFileError::host("find out whether it is in use", error)),
    }
}

/// Connects without waiting for room among the connections that wait to be accepted.
fn try_connect(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

fn name_of(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a file",
        FileType::Directory => "a folder",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "of unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A folder of its own for each test.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Folder {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("martlet-sockets-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Folder(path)
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_socket_is_private_whatever_the_umask_and_removed_at_the_end() {
        let folder = Folder::new();
        let path = folder.at("s");
        let socket = SocketFile::bind(&path).unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        socket.listener().accept().unwrap();
        drop(socket);
        assert!(!path.exists());
        assert!(owned().iter().all(|name| name.path != path));
    }

    #[test]
    fn a_live_socket_is_refused_and_a_dead_one_replaced() {
        let folder = Folder::new();
        let path = folder.at("s");
        let socket = SocketFile::bind(&path).unwrap();
        assert!(matches!(SocketFile::bind(&path), Err(SocketFileError::InUse)));
        // Also where it does not accept, and nobody can connect without waiting.
        while try_connect(&path).is_ok() {}
        assert!(matches!(SocketFile::bind(&path), Err(SocketFileError::InUse)));
        drop(socket);
        let datagrams = UnixDatagram::bind(&path).unwrap();
        assert!(matches!(SocketFile::bind(&path), Err(SocketFileError::InUse)));
        // std's sockets leave their path behind, as a killed process does.
        drop(datagrams);
        assert!(path.exists());
        SocketFile::bind(&path).unwrap();
    }

    #[test]
    fn other_things_are_left_alone() {
        let folder = Folder::new();
        let path = folder.at("file");
        std::fs::write(&path, b"precious").unwrap();
        let error = SocketFile::bind(&path).unwrap_err().to_string();
        assert_eq!(error, "something else is there (a file)");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = folder.at(&"x".repeat(200));
        assert!(matches!(SocketFile::bind(&long), Err(SocketFileError::Length { .. })));
        let nowhere = folder.at("no/such/folder");
        assert!(matches!(SocketFile::bind(&nowhere), Err(SocketFileError::Host { .. })));
    }

    #[test]
    fn only_its_own_inode_is_removed() {
        let folder = Folder::new();
        let path = folder.at("s");
        let first = SocketFile::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = SocketFile::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_lock_of_others_on_the_folder_is_said_and_not_waited_for() {
        let folder = Folder::new();
        let path = folder.at("s");
        let lock = lock_folder(&path).unwrap();
        let error = SocketFile::bind(&path).unwrap_err().to_string();
        assert!(error.contains("locked by another process"), "{error}");
        drop(lock);
        SocketFile::bind(&path).unwrap();
    }

    #[test]
    fn of_many_who_want_a_dead_socket_one_gets_it() {
        let folder = Folder::new();
        let path = folder.at("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || SocketFile::bind(&path))
            })
            .collect();
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 1, "{ends:?}");
    }
}
