//! How the end of a migration is shown. What became of the guest decides the exit status; that it
//! could not be shown is said on standard error and changes nothing.

use crate::failure::Failure;
use crate::log::note;
use crate::report_json::ReportJson;
use crate::view::number::millis;
use crate::view::svg;
use crate::view::timeline::Timeline;
use martlet_transport::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the reader of a picture that goes into a pipe may take for it.
const READER_MAX: Duration = Duration::from_secs(10);

/// Writes to standard output. If that does not work it is said, once. A reader that is gone had
/// enough: that is not worth a line.
pub(crate) fn show(text: std::fmt::Arguments<'_>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let Err(failure) = crate::out(text) else { return };
    // Relaxed: a flag of its own.
    if !failure.is_said() && !SAID.swap(true, Ordering::Relaxed) {
        note(format_args!("{failure}"));
    }
}

/// Writes one JSON object to standard output.
pub(crate) fn show_json(object: &impl Serialize) {
    match serde_json::to_string(object) {
        Ok(json) => show(format_args!("{json}\n")),
        Err(error) => note(format_args!("cannot write the result as JSON: {error}")),
    }
}

/// The picture that was asked for. It is opened before anything moves, so that a path that can't
/// be written to is found out in time.
#[derive(Debug)]
pub(crate) struct Picture {
    path: PathBuf,
    file: File,
    /// It was not there before and has no content yet.
    is_new: bool,
}

impl Picture {
    /// Opens it, if one was asked for. What stands at its path stays until it is drawn. A FIFO must
    /// have its reader: nobody is waited for.
    pub(crate) fn open(path: Option<&Path>) -> Result<Option<Picture>, Failure> {
        let Some(path) = path.map(Path::to_owned) else { return Ok(None) };
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let open = |is_new: bool| {
            let mut options = OpenOptions::new();
            options.write(true).create_new(is_new).custom_flags(flags).open(&path)
        };
        let opened = match open(true) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                open(false).map(|f| (f, false))
            }
            opened => opened.map(|file| (file, true)),
        };
        match opened {
            Ok((file, is_new)) => Ok(Some(Picture { path, file, is_new })),
            Err(error) => {
                Err(Failure::Usage(format!("--svg {}: cannot write it: {error}", path.display())))
            }
        }
    }

    /// Draws the switchover, if there was one.
    pub(crate) fn draw(&mut self, report: &ReportJson) {
        let Some(timeline) = Timeline::of(report) else { return };
        let title = report.blackout_ms.map_or_else(
            || "switchover".to_owned(),
            |blackout| format!("switchover: {} without the guest", millis(blackout)),
        );
        self.put(&svg::render(&timeline, &title));
    }

    /// Writes it. If that does not work, it is said.
    pub(crate) fn put(&mut self, text: &str) {
        match self.write(text, Instant::now() + READER_MAX) {
            Ok(()) => self.is_new = false,
            Err(error) => note(format_args!("cannot write {}: {error}", self.path.display())),
        }
    }

    fn write(&mut self, text: &str, deadline: Instant) -> io::Result<()> {
        // What is no file, as a pipe, has no length to set.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if !wait_any(&mut [PollFd::new(&self.file, PollFlags::OUT)], left)? {
                        return Err(io::Error::new(ErrorKind::TimedOut, "nobody reads it"));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for Picture {
    fn drop(&mut self) {
        if self.is_new {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn a_pipe_is_not_waited_for() {
        let name = format!("martlet-picture-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let unread = Picture::open(Some(&path)).unwrap_err().to_string();
        assert!(unread.contains("cannot write it"), "{unread}");
        let reader = File::options().read(true).write(true).open(&path).unwrap();
        let mut picture = Picture::open(Some(&path)).unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
        let text = "x".repeat(1 << 20);
        let error = picture.write(&text, Instant::now()).unwrap_err();
        assert_eq!(error.to_string(), "nobody reads it");
        drop(reader);
        assert_eq!(picture.write(&text, Instant::now()).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
