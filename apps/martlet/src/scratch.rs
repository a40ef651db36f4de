//! A private folder that lives as long as its value.

use rustix::rand::GetRandomFlags;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// How often a random name may be taken already.
const TRIES_MAX: u32 = 16;

/// A folder that only this user can enter, removed with everything in it on drop.
#[derive(Debug)]
pub(crate) struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Makes a folder with a random name in the system's folder for temporary files.
    pub(crate) fn create() -> io::Result<ScratchDir> {
        let mut tries = 0;
        loop {
            let mut random = [0u8; 8];
            rustix::rand::getrandom(&mut random, GetRandomFlags::empty())?;
            let name = format!("martlet-{:016x}", u64::from_ne_bytes(random));
            let path = std::env::temp_dir().join(name);
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(ScratchDir(path)),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tries < TRIES_MAX => {
                    tries += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "cannot remove a temporary folder");
        }
    }
}
