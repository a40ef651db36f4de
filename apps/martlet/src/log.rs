//! What this process says of itself on standard error: log lines, notes for the owner, panics.
//!
//! Standard error may be a pipe that is full, or one whose reader is gone, and a guest must not
//! notice. So whoever says something puts it into a bounded queue and goes on; a thread that does
//! nothing else writes. What does not fit is dropped, and the number of dropped lines is said in
//! its place.

use crate::failure::{Failure, one_line};
use martlet_transport::SocketFile;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that wait for standard error to take them.
const QUEUE_BYTES_MAX: usize = 256 << 10;
/// How long the end of the process waits for standard error to take the last lines.
const FINISH_MAX: Duration = Duration::from_secs(1);

static SAID: Said = Said {
    queue: Mutex::new(Queue { bytes: Vec::new(), dropped: 0, idle: false, writing: false }),
    filled: Condvar::new(),
    written: Condvar::new(),
};

struct Said {
    queue: Mutex<Queue>,
    filled: Condvar,
    written: Condvar,
}

struct Queue {
    /// Whole lines.
    bytes: Vec<u8>,
    /// Lines that did not fit behind them.
    dropped: u64,
    /// Whether the writer waits to be woken.
    idle: bool,
    /// Whether it has taken lines that are not all written yet.
    writing: bool,
}

impl Said {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Lines are added whole, so a thread that panicked left nothing half done.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut queue = self.lock();
        if !queue.push(line) {
            return;
        }
        let wake = std::mem::take(&mut queue.idle);
        drop(queue);
        if wake {
            self.filled.notify_one();
        }
    }

    /// The writer's thread.
    fn write_for_ever(&self, out: &mut (impl Write + AsFd)) {
        let mut taken = Vec::new();
        loop {
            self.take(&mut taken);
            write_or_drop(out, &taken);
            taken.clear();
            self.lock().writing = false;
            self.written.notify_all();
        }
    }

    /// Waits for lines. Both buffers are used in turn, so that neither has to grow for ever.
    fn take(&self, taken: &mut Vec<u8>) {
        let mut queue = self.lock();
        while queue.bytes.is_empty() && queue.dropped == 0 {
            queue.idle = true;
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.idle = false;
        queue.writing = true;
        std::mem::swap(taken, &mut queue.bytes);
        let dropped = std::mem::take(&mut queue.dropped);
        drop(queue);
        if dropped > 0 {
            let _ = writeln!(taken, "martlet: {dropped} lines were dropped here: nobody read them");
        }
    }

    fn finish(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut queue = self.lock();
        while queue.writing || !queue.bytes.is_empty() || queue.dropped > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.written.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Queue {
    /// Takes a line in, or counts it. Once one was dropped, all are until the writer comes by, so
    /// that the count stands where the lines are missing.
    fn push(&mut self, line: &[u8]) -> bool {
        let fits = self.dropped == 0 && self.bytes.len() + line.len() <= QUEUE_BYTES_MAX;
        if fits {
            self.bytes.extend_from_slice(line);
        } else {
            self.dropped += 1;
        }
        fits
    }
}

/// Writes all of it, for as long as that takes; what can't be written is nobody's loss.
fn write_or_drop(out: &mut (impl Write + AsFd), mut bytes: &[u8]) {
    use rustix::event::{PollFd, PollFlags, poll};
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return,
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Somebody who shares it has made it non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if poll(&mut [PollFd::new(out, PollFlags::OUT)], None).is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// The open end of the log. Dropping it waits, for a bounded time, until the last lines are
/// written.
#[derive(Debug)]
pub(crate) struct Log(());

impl Log {
    /// Starts the writer, and sends panics through it. Signals that are to be taken must be held
    /// by now: this starts a thread.
    pub(crate) fn start() -> io::Result<Log> {
        let body = || SAID.write_for_ever(&mut io::stderr());
        thread::Builder::new().name("log".to_owned()).spawn(body)?;
        std::panic::set_hook(Box::new(on_panic));
        Ok(Log(()))
    }

    /// Logs what `--log` or `RUST_LOG` says, else warnings.
    pub(crate) fn filter(&self, filter: Option<&str>) -> Result<(), Failure> {
        use tracing_subscriber::EnvFilter;
        let from_env = std::env::var("RUST_LOG").ok();
        let text = filter.or(from_env.as_deref()).filter(|text| !text.is_empty()).unwrap_or("warn");
        let filter = EnvFilter::try_new(text)
            .map_err(|e| Failure::Usage(format!("`{text}` is not a log filter: {e}")))?;
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(|| Line)
            .with_ansi(false)
            // They go to standard error past the queue.
            .log_internal_errors(false)
            .init();
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        SAID.finish(FINISH_MAX);
    }
}

/// Ends the process at once, from any thread. It leaves no socket behind, and the last lines are
/// still written.
pub(crate) fn exit(status: i32) -> ! {
    SocketFile::remove_all();
    SAID.finish(FINISH_MAX);
    std::process::exit(status)
}

/// One line on standard error, for the owner.
pub(crate) fn note(text: std::fmt::Arguments<'_>) {
    raw_line(format_args!("martlet: {text}"));
}

/// As [`note`], without the name of the command.
pub(crate) fn raw_line(text: std::fmt::Arguments<'_>) {
    SAID.push(format!("{text}\n").as_bytes());
}

/// Takes the whole lines that the subscriber writes.
struct Line;

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        SAID.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A panic is a defect of ours: one line says where, and a backtrace follows where one is asked
/// for. What becomes of the guest is up to whoever catches it.
fn on_panic(info: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let place = info.location().map_or_else(|| "?".to_owned(), ToString::to_string);
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let what = one_line(text.unwrap_or("no reason given"));
    note(format_args!("a defect of martlet: thread {thread} panicked at {place}: {what}"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        raw_line(format_args!("{backtrace}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    fn said() -> Arc<Said> {
        Arc::new(Said {
            queue: Mutex::new(Queue { bytes: Vec::new(), dropped: 0, idle: false, writing: false }),
            filled: Condvar::new(),
            written: Condvar::new(),
        })
    }

    fn writer_of(said: &Arc<Said>, mut out: UnixStream) {
        let said = Arc::clone(said);
        thread::spawn(move || said.write_for_ever(&mut out));
    }

    #[test]
    fn lines_that_nobody_reads_are_dropped_and_counted_in_their_place() {
        let said = said();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        writer_of(&said, ours);
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let more_than_the_socket_and_the_queue_hold = 4096;
        for _ in 0..more_than_the_socket_and_the_queue_hold {
            said.push(&line);
        }
        assert!(said.lock().dropped > 0);
        let reader = thread::spawn(move || {
            let mut text = String::new();
            while !text.ends_with("the last one\n") {
                let mut part = [0; 4096];
                let count = theirs.read(&mut part).unwrap();
                text.push_str(std::str::from_utf8(&part[..count]).unwrap());
            }
            text
        });
        said.finish(Duration::from_secs(60));
        said.push(b"the last one\n");
        let text = reader.join().unwrap();
        let whole = text.lines().filter(|line| line.len() == 1023).count();
        let counts = text.lines().filter_map(|line| line.strip_prefix("martlet: "));
        let missing: usize =
            counts.map(|line| line.split(' ').next().unwrap().parse::<usize>().unwrap()).sum();
        assert_eq!(whole + missing, more_than_the_socket_and_the_queue_hold);
    }

    #[test]
    fn a_reader_that_is_gone_changes_nothing() {
        let said = said();
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        writer_of(&said, ours);
        for _ in 0..10_000 {
            said.push(b"a line of a log that is read by nobody\n");
        }
        said.finish(Duration::from_secs(60));
        assert!(said.lock().bytes.is_empty());
    }
}
