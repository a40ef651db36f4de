//! What the tests with real processes share: processes, their control sockets, a folder for both.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod accel;
pub(crate) mod process;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder for sockets and logs. It stays after a failure, for whoever looks for its reason.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Result<Dir, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("martlet-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Dir(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
