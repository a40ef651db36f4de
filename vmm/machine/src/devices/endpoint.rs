//! Where the serial port's bytes go and come from.
//!
//! Output must never hold a vCPU up: a byte that can't be written at once is dropped and counted.
//! Input is read by a thread that lives as long as the endpoint and delivers to whichever machine
//! is attached, so one endpoint can outlive several attempts to receive a guest.

use super::Bus;
use crate::SerialOut;
use crate::vcpu::lock;
use martlet_transport::SocketFile;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long input waits before it looks again whether the guest has read the port's buffer.
const FULL_WAIT: Duration = Duration::from_millis(5);
/// Pause after a client could not be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes taken from outside at a time.
const INPUT_CHUNK: usize = 64;

/// See the module's comment.
pub(crate) struct Endpoint {
    sink: Sink,
    dropped: AtomicU64,
    machine: Mutex<Weak<Bus>>,
    /// Readable when the input thread is to end.
    stop: OwnedFd,
    input: Mutex<Option<JoinHandle<()>>>,
}

enum Sink {
    Nowhere,
    Stdout,
    /// Opened non-blocking.
    File(OwnedFd),
    Socket {
        socket: Arc<SocketFile>,
        client: Mutex<Option<Arc<OwnedFd>>>,
    },
}

impl Endpoint {
    /// Opens it, and starts a thread where there is input.
    pub(crate) fn open(out: &SerialOut) -> io::Result<Arc<Endpoint>> {
        let sink = match out {
            SerialOut::None => Sink::Nowhere,
            SerialOut::Stdio => Sink::Stdout,
            SerialOut::File(path) => Sink::File(open_file(path)?),
            SerialOut::Unix(path) => {
                let socket = Arc::new(SocketFile::bind(path)?);
                socket.listener().set_nonblocking(true)?;
                Sink::Socket { socket, client: Mutex::new(None) }
            }
        };
        let endpoint = Arc::new(Endpoint {
            sink,
            dropped: AtomicU64::new(0),
            machine: Mutex::new(Weak::new()),
            stop: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            input: Mutex::new(None),
        });
        if endpoint.has_input() {
            let stop = endpoint.stop.try_clone()?;
            let weak = Arc::downgrade(&endpoint);
            let thread = std::thread::Builder::new()
                .name("serial".into())
                .spawn(move || input_loop(&weak, &stop))?;
            *lock(&endpoint.input) = Some(thread);
        }
        Ok(endpoint)
    }

    fn has_input(&self) -> bool {
        match self.sink {
            Sink::Nowhere | Sink::File(_) => false,
            Sink::Stdout => io::IsTerminal::is_terminal(&io::stdin()),
            Sink::Socket { .. } => true,
        }
    }

    /// From now on input goes to this machine.
    pub(crate) fn attach(&self, bus: &Arc<Bus>) {
        *lock(&self.machine) = Arc::downgrade(bus);
    }

    /// From now on input waits.
    pub(crate) fn detach(&self) {
        *lock(&self.machine) = Weak::new();
    }

    /// Sends bytes now or never.
    pub(crate) fn send(&self, bytes: &[u8]) {
        let written = match &self.sink {
            Sink::Nowhere => return,
            Sink::Stdout => write_if_ready(io::stdout().as_fd(), bytes),
            Sink::File(file) => rustix::io::write(file, bytes),
            Sink::Socket { client, .. } => {
                let client = lock(client).clone();
                match client {
                    Some(client) => {
                        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                        rustix::net::send(&*client, bytes, flags)
                    }
                    None => Ok(0),
                }
            }
        };
        let lost = bytes.len() - written.unwrap_or(0).min(bytes.len());
        if lost > 0 {
            self.dropped.fetch_add(lost as u64, Ordering::Relaxed);
        }
    }

    /// Bytes that could not be written at once, or that nobody was there to take.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = lock(&self.input).take() {
            // The thread itself may hold the last reference for a moment.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A file to append to, or a FIFO. A FIFO is opened for reading too, so that opening does not wait
/// for a reader and writing does not fail for want of one.
///
/// A guest chooses every byte that is written, and may print secrets. So a new file is its owner's
/// alone, and a symbolic link is refused: whoever may write to the folder would choose with it
/// which of the owner's files is appended to.
fn open_file(path: &Path) -> io::Result<OwnedFd> {
    let common = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let is_fifo = rustix::fs::lstat(path)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    let flags =
        if is_fifo { OFlags::RDWR } else { OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND };
    rustix::fs::open(path, common | flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        Errno::LOOP => io::Error::other("it is a symbolic link, and none is followed"),
        errno => errno.into(),
    })
}

/// Standard output is shared with other processes, so it can't be made non-blocking. A pipe that
/// polls writable takes at least one page without blocking, see pipe(7).
fn write_if_ready(fd: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    let mut ready = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if ready[0].revents().contains(PollFlags::OUT) {
        rustix::io::write(fd, bytes)
    } else {
        Err(Errno::AGAIN)
    }
}

/// What the input thread waits for besides the order to stop.
enum Source {
    Listener(Arc<SocketFile>),
    Client(Arc<OwnedFd>),
    Stdin(OwnedFd),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Source::Listener(socket) => socket.listener().as_fd(),
            Source::Stdin(fd) => fd.as_fd(),
            Source::Client(fd) => fd.as_fd(),
        }
    }
}

fn input_loop(endpoint: &Weak<Endpoint>, stop: &OwnedFd) {
    loop {
        let Some(Ok(source)) = endpoint.upgrade().map(|endpoint| endpoint.source()) else { return };
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        let Some(endpoint) = endpoint.upgrade() else { return };
        let mut buffer = [0; INPUT_CHUNK];
        let received = match &source {
            Source::Listener(_) => {
                if !endpoint.accept() && !pause(stop, ACCEPT_PAUSE) {
                    return;
                }
                continue;
            }
            Source::Client(client) => {
                rustix::net::recv(&**client, &mut buffer, RecvFlags::DONTWAIT).map(|(n, _)| n)
            }
            Source::Stdin(stdin) => rustix::io::read(stdin, &mut buffer),
        };
        match received {
            Ok(0) => match source {
                Source::Client(_) => endpoint.hang_up(),
                Source::Stdin(_) | Source::Listener(_) => return,
            },
            Ok(count) => {
                let endpoint_weak = Arc::downgrade(&endpoint);
                drop(endpoint);
                deliver(&endpoint_weak, &buffer[..count], stop);
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => match source {
                Source::Client(_) => endpoint.hang_up(),
                Source::Stdin(_) | Source::Listener(_) => return,
            },
        }
    }
}

impl Endpoint {
    fn source(&self) -> io::Result<Source> {
        Ok(match &self.sink {
            Sink::Socket { socket, client } => match &*lock(client) {
                Some(client) => Source::Client(Arc::clone(client)),
                None => Source::Listener(Arc::clone(socket)),
            },
            Sink::Nowhere | Sink::Stdout | Sink::File(_) => {
                Source::Stdin(io::stdin().as_fd().try_clone_to_owned()?)
            }
        })
    }

    /// Takes a client. `false` where one that is there can't be taken: the host has no descriptor
    /// left, perhaps.
    fn accept(&self) -> bool {
        let Sink::Socket { socket, client } = &self.sink else { return false };
        match socket.listener().accept() {
            Ok((stream, _)) => {
                *lock(client) = Some(Arc::new(stream.into()));
                true
            }
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    fn hang_up(&self) {
        if let Sink::Socket { client, .. } = &self.sink {
            *lock(client) = None;
        }
    }
}

/// Hands bytes to the attached machine as it has room for them; waits while there is none.
fn deliver(endpoint: &Weak<Endpoint>, mut bytes: &[u8], stop: &OwnedFd) {
    while !bytes.is_empty() {
        let Some(strong) = endpoint.upgrade() else { return };
        let bus = lock(&strong.machine).upgrade();
        drop(strong);
        let taken = bus.map_or(0, |bus| bus.serial_input(bytes));
        bytes = bytes.get(taken..).unwrap_or(&[]);
        if taken == 0 && !pause(stop, FULL_WAIT) {
            return;
        }
    }
}

/// Waits; `false` if the thread is to end.
fn pause(stop: &OwnedFd, time: Duration) -> bool {
    let mut fds = [PollFd::new(stop, PollFlags::IN)];
    !poll(&mut fds, Some(&crate::clock::timespec(time))).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("martlet-endpoint-{}-{name}", std::process::id()))
    }

    #[test]
    fn a_fifo_without_reader_drops_and_counts() {
        let path = scratch("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .unwrap();
        let endpoint = Endpoint::open(&SerialOut::File(path.clone())).unwrap();
        for _ in 0..100 {
            endpoint.send(&[b'.'; 1024]);
        }
        assert!(endpoint.dropped() > 0 && endpoint.dropped() < 100 * 1024);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_gets_every_byte() {
        let path = scratch("file");
        let endpoint = Endpoint::open(&SerialOut::File(path.clone())).unwrap();
        for byte in b"one by one" {
            endpoint.send(&[*byte]);
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"one by one");
        assert_eq!(endpoint.dropped(), 0);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_is_private_and_no_link_is_followed() {
        let (path, link) = (scratch("private"), scratch("link"));
        drop(Endpoint::open(&SerialOut::File(path.clone())).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let refused = Endpoint::open(&SerialOut::File(link.clone())).err().unwrap();
        assert!(refused.to_string().contains("symbolic link"), "{refused}");
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(link).unwrap();
    }

    #[test]
    fn a_socket_has_one_client_after_the_other_both_ways() {
        let path = scratch("socket");
        let endpoint = Endpoint::open(&SerialOut::Unix(path.clone())).unwrap();
        let bus = Arc::new(Bus::new(Arc::clone(&endpoint)));
        endpoint.attach(&bus);
        for _ in 0..2 {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(&[b'x'; 100]).unwrap();
            // More than the port holds: the rest waits until the guest reads.
            let mut got = 0;
            let until = std::time::Instant::now() + Duration::from_secs(5);
            while got < 100 && std::time::Instant::now() < until {
                let mut status = [0];
                bus.read(0x3fd, 1, &mut status);
                if status[0] & 1 == 1 {
                    let mut byte = [0];
                    bus.read(0x3f8, 1, &mut byte);
                    assert_eq!(byte, [b'x']);
                    got += 1;
                }
            }
            assert_eq!(got, 100);
            endpoint.send(b"y");
            let mut byte = [0];
            client.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [b'y']);
        }
        drop(bus);
        drop(endpoint);
        assert!(!path.exists());
    }
}
