//! The control socket in the file system: claimed by one process, private to its user, removed at
//! its end.

use crate::failure::Failure;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Longest path of a Unix socket (`sun_path` of unix(7), less its NUL).
const PATH_MAX: usize = 107;

/// A bound control socket. Dropping it removes the path, if that is still this socket.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: what was bound, whatever the path names later.
    identity: (u64, u64),
}

impl ControlSocket {
    /// Binds `path`. A socket that a dead process left there is replaced; one that answers, or
    /// anything else at that path, is an error.
    pub(crate) fn bind(path: &Path) -> Result<ControlSocket, Failure> {
        let fail = |reason: String| {
            Failure::Failed(format!("cannot open control socket {}: {reason}", path.display()))
        };
        let length = path.as_os_str().len();
        if length == 0 || length > PATH_MAX {
            return Err(Failure::Usage(format!(
                "the path of a control socket has 1 to {PATH_MAX} bytes, not {length}"
            )));
        }
        // Two starts at once must not both take the path for a leftover: the folder's lock makes
        // look, remove and bind one step.
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            Some(_) | None => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let lock = rustix::fs::open(folder, flags, Mode::empty())
            .map_err(|e| fail(format!("{}: {e}", folder.display())))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|e| fail(e.to_string()))?;
        remove_leftover(path).map_err(fail)?;
        // Whoever can write to the socket owns the guest.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = bound.map_err(|e| fail(e.to_string()))?;
        let metadata = std::fs::symlink_metadata(path).map_err(|e| fail(e.to_string()))?;
        let identity = (metadata.dev(), metadata.ino());
        Ok(ControlSocket { listener, path: path.to_owned(), identity })
    }

    /// Removes the path, if that is still this socket. Any number of times.
    pub(crate) fn remove(&self) {
        let current = std::fs::symlink_metadata(&self.path);
        if current.is_ok_and(|m| (m.dev(), m.ino()) == self.identity)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the control socket");
        }
    }

    /// The listening socket.
    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// Removes a socket at `path` behind which nobody listens.
fn remove_leftover(path: &Path) -> Result<(), String> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    if !metadata.file_type().is_socket() {
        let kind = FileType::from_raw_mode(metadata.mode());
        return Err(format!("something else is there ({})", name_of(kind)));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("it is in use by another process".to_owned()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing the socket of a dead process");
            std::fs::remove_file(path).map_err(|e| format!("cannot remove the old one: {e}"))
        }
        Err(error) => Err(format!("it may be in use: {error}")),
    }
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

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_socket_is_private_and_removed_at_the_end() {
        let dir = ScratchDir::create().unwrap();
        let path = dir.path().join("c.sock");
        let socket = ControlSocket::bind(&path).unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_refused_and_a_dead_one_replaced() {
        let dir = ScratchDir::create().unwrap();
        let path = dir.path().join("c.sock");
        let socket = ControlSocket::bind(&path).unwrap();
        let error = ControlSocket::bind(&path).unwrap_err().to_string();
        assert!(error.ends_with("it is in use by another process"), "{error}");
        drop(socket);
        // std's listener leaves its path behind, as a killed process does.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        ControlSocket::bind(&path).unwrap();
    }

    #[test]
    fn other_things_are_left_alone() {
        let dir = ScratchDir::create().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"precious").unwrap();
        let error = ControlSocket::bind(&path).unwrap_err().to_string();
        assert!(error.contains("something else is there (a file)"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(200));
        assert!(matches!(ControlSocket::bind(&long), Err(Failure::Usage(_))));
        let nowhere = dir.path().join("no/such/folder");
        assert!(matches!(ControlSocket::bind(&nowhere), Err(Failure::Failed(_))));
    }

    #[test]
    fn a_successor_is_not_removed() {
        let dir = ScratchDir::create().unwrap();
        let path = dir.path().join("c.sock");
        let first = ControlSocket::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = ControlSocket::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
    }
}
