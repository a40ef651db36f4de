//! How a soft connection begins: a hello with private data, and an answer.

use super::{LIMITS, SoftPair};
use crate::queues::timespec;
use crate::regions::Regions;
use martlet_verbs::VerbsError;
use martlet_verbs::{
    ACCEPT_DATA_BYTES_MAX, CONNECT_DATA_BYTES_MAX, ConnectRequest, Endpoint, Listener,
    REJECT_DATA_BYTES_MAX, Setup, check_private_data,
};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Begins a hello: the protocol and its version.
const HELLO: [u8; 8] = *b"mvsoft/1";
/// Begins an answer that accepts.
const ACCEPTED: [u8; 8] = *b"mvsoft/a";
/// Begins an answer that rejects.
const REJECTED: [u8; 8] = *b"mvsoft/r";

const HELLO_BYTES: usize = 8 + CONNECT_DATA_BYTES_MAX;
const ANSWER_BYTES: usize = 8 + ACCEPT_DATA_BYTES_MAX;

/// How long a peer that connected may take to say hello.
const HELLO_LIMIT: Duration = Duration::from_secs(2);

/// How long a host may leave bytes unacknowledged before it counts as gone: as a device's retries
/// run out, but later, because here a process that is stopped for a while is silent too.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Connections that may be about to say hello; beyond it the oldest is dropped.
const GREETING_MAX: usize = 64;

/// The connection manager's "rejected by the program" (IBA spec 12.6.7.2).
const REASON_PROGRAM: i32 = 28;

/// Bytes that a Unix socket may hold: its default holds less than one huge page.
const UNIX_BUFFER_BYTES: usize = 4 << 20;

/// Connects and says hello; what the peer answered, with zeros behind.
pub(super) fn connect(
    to: &Endpoint,
    data: &[u8],
    limit: Duration,
) -> Result<(OwnedFd, Vec<u8>), VerbsError> {
    let deadline = Deadline::after(limit, "connecting");
    let fail = VerbsError::host("connect");
    let socket = match to {
        Endpoint::Ip(address) => {
            let stream = TcpStream::connect_timeout(address, limit).map_err(fail)?;
            prepare_tcp(stream)
        }
        Endpoint::Unix(path) => prepare_unix(UnixStream::connect(path).map_err(fail)?),
    };
    let socket = socket.map_err(VerbsError::host("set up the connection"))?;
    send_all(&socket, &message::<HELLO_BYTES>(HELLO, data), &deadline)?;
    let mut answer = [0; ANSWER_BYTES];
    let mut filled = 0;
    while filled < ANSWER_BYTES {
        receive_some(&socket, &mut answer, &mut filled)?;
        if filled < ANSWER_BYTES {
            deadline.wait(&socket, PollFlags::IN)?;
        }
    }
    parse_answer(&answer).map(|data| (socket, data))
}

fn parse_answer(answer: &[u8; ANSWER_BYTES]) -> Result<Vec<u8>, VerbsError> {
    let (verdict, data) = answer.split_at(8);
    match verdict.first_chunk() {
        Some(&ACCEPTED) => Ok(data.to_vec()),
        Some(&REJECTED) => {
            let private_data = data.get(..REJECT_DATA_BYTES_MAX).unwrap_or_default().to_vec();
            Err(VerbsError::Rejected { reason: REASON_PROGRAM, private_data })
        }
        _ => Err(VerbsError::Peer { what: "its answer is neither yes nor no" }),
    }
}

fn parse_hello(hello: &[u8; HELLO_BYTES]) -> Result<[u8; CONNECT_DATA_BYTES_MAX], VerbsError> {
    match (hello.first_chunk(), hello.last_chunk()) {
        (Some(&HELLO), Some(data)) => Ok(*data),
        _ => Err(VerbsError::Peer { what: "it says no hello of version 1" }),
    }
}

pub(super) fn fuzz(data: &[u8]) {
    if let Some(hello) = data.first_chunk() {
        let _ = parse_hello(hello).map(|data| assert_eq!(message(HELLO, &data), *hello));
    }
    if let Some(answer) = data.first_chunk() {
        let _ = parse_answer(answer).map(|data| assert_eq!(message(ACCEPTED, &data), *answer));
    }
}

/// `data` with its begin before and zeros behind.
fn message<const BYTES: usize>(begin: [u8; 8], data: &[u8]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, &byte) in bytes.iter_mut().zip(begin.iter().chain(data)) {
        *place = byte;
    }
    bytes
}

/// Waits for soft connections.
pub struct SoftListener {
    socket: OwnedFd,
    local: Endpoint,
    regions: Arc<Regions>,
    /// Connected, and their hello is not complete; the oldest first.
    greeting: Vec<Greeting>,
}

struct Greeting {
    socket: OwnedFd,
    hello: [u8; HELLO_BYTES],
    filled: usize,
    deadline: Instant,
}

impl SoftListener {
    pub(super) fn bind(at: &Endpoint, regions: &Arc<Regions>) -> Result<SoftListener, VerbsError> {
        let fail = VerbsError::host("listen");
        let (socket, local) = match at {
            Endpoint::Ip(address) => {
                let listener = TcpListener::bind(address).map_err(fail)?;
                let local = listener.local_addr().map_err(VerbsError::host("listen"))?;
                (OwnedFd::from(listener), Endpoint::Ip(local))
            }
            Endpoint::Unix(path) => (UnixListener::bind(path).map_err(fail)?.into(), at.clone()),
        };
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|errno| VerbsError::host("listen")(errno.into()))?;
        Ok(SoftListener { socket, local, regions: Arc::clone(regions), greeting: Vec::new() })
    }

    /// Takes a connection that is waiting.
    fn take_connection(&mut self) -> Result<(), VerbsError> {
        let socket = match rustix::net::accept(&self.socket) {
            Ok(socket) => socket,
            // A connection that is gone again is no trouble of the listener's.
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED,
            ) => return Ok(()),
            Err(errno) => return Err(VerbsError::host("accept a connection")(errno.into())),
        };
        let socket = match self.local {
            Endpoint::Ip(_) => prepare_tcp(socket.into()),
            Endpoint::Unix(_) => prepare_unix(socket.into()),
        };
        let socket = socket.map_err(VerbsError::host("set up the connection"))?;
        if self.greeting.len() == GREETING_MAX {
            self.greeting.remove(0);
        }
        let deadline = Instant::now() + HELLO_LIMIT;
        self.greeting.push(Greeting { socket, hello: [0; HELLO_BYTES], filled: 0, deadline });
        Ok(())
    }

    /// Reads what came of the hellos; the first that is complete.
    fn read_hellos(&mut self) -> Option<SoftRequest> {
        let now = Instant::now();
        self.greeting.retain(|greeting| greeting.deadline > now);
        let mut index = 0;
        while let Some(greeting) = self.greeting.get_mut(index) {
            let Greeting { socket, hello, filled, .. } = greeting;
            let received = receive_some(socket, hello, filled);
            if received.is_ok() && *filled < HELLO_BYTES {
                index += 1;
                continue;
            }
            let greeting = self.greeting.remove(index);
            // Whoever hangs up or speaks something else is none of the listener's trouble.
            if received.is_ok()
                && let Ok(data) = parse_hello(&greeting.hello)
            {
                let regions = Arc::clone(&self.regions);
                return Some(SoftRequest { socket: Some(greeting.socket), data, regions });
            }
        }
        None
    }

    fn wait(&self, limit: Duration) {
        let mut fds = Vec::with_capacity(1 + GREETING_MAX);
        fds.push(PollFd::new(&self.socket, PollFlags::IN));
        fds.extend(self.greeting.iter().map(|one| PollFd::new(&one.socket, PollFlags::IN)));
        // The reason does not matter: everything is looked at.
        let _ = rustix::event::poll(&mut fds, Some(&timespec(limit)));
    }
}

impl Listener for SoftListener {
    type Pair = SoftPair;
    type Request = SoftRequest;

    fn local(&self) -> Endpoint {
        self.local.clone()
    }

    fn accept(&mut self, limit: Duration) -> Result<Option<SoftRequest>, VerbsError> {
        let deadline = Instant::now() + limit;
        loop {
            self.take_connection()?;
            if let Some(request) = self.read_hellos() {
                return Ok(Some(request));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(None);
            }
            self.wait(left.min(HELLO_LIMIT));
        }
    }
}

impl Drop for SoftListener {
    fn drop(&mut self) {
        if let Endpoint::Unix(path) = &self.local {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A soft connection request.
pub struct SoftRequest {
    /// `None` once it is answered.
    socket: Option<OwnedFd>,
    data: [u8; CONNECT_DATA_BYTES_MAX],
    regions: Arc<Regions>,
}

impl SoftRequest {
    fn answer(&mut self, begin: [u8; 8], data: &[u8], limit: Duration) -> Result<(), VerbsError> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let deadline = Deadline::after(limit, "answering a connection request");
        send_all(socket, &message::<ANSWER_BYTES>(begin, data), &deadline)
    }
}

impl ConnectRequest for SoftRequest {
    type Pair = SoftPair;

    fn private_data(&self) -> &[u8] {
        &self.data
    }

    fn accept(
        mut self,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<SoftPair, VerbsError> {
        LIMITS.check(setup)?;
        check_private_data(data, ACCEPT_DATA_BYTES_MAX)?;
        self.answer(ACCEPTED, data, limit)?;
        match self.socket.take() {
            Some(socket) => SoftPair::start(socket, &self.regions, setup),
            None => Err(VerbsError::Peer { what: "the request was answered before" }),
        }
    }

    fn reject(mut self, data: &[u8]) -> Result<(), VerbsError> {
        check_private_data(data, REJECT_DATA_BYTES_MAX)?;
        let result = self.answer(REJECTED, data, HELLO_LIMIT);
        self.socket = None;
        result
    }
}

impl Drop for SoftRequest {
    fn drop(&mut self) {
        if self.socket.is_some() {
            let _ = self.answer(REJECTED, &[], Duration::ZERO);
        }
    }
}

fn prepare_tcp(stream: TcpStream) -> io::Result<OwnedFd> {
    let limit_ms = u32::try_from(SILENCE_MAX.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(&stream, limit_ms)?;
    // An acknowledgement must not wait for more (RFC 896).
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}

fn prepare_unix(stream: UnixStream) -> io::Result<OwnedFd> {
    use rustix::net::sockopt;
    stream.set_nonblocking(true)?;
    // More than the default needs CAP_NET_ADMIN; without it the kernel's limit applies.
    if sockopt::set_socket_send_buffer_size_force(&stream, UNIX_BUFFER_BYTES).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(&stream, UNIX_BUFFER_BYTES);
    }
    Ok(stream.into())
}

struct Deadline {
    at: Instant,
    limit: Duration,
    action: &'static str,
}

impl Deadline {
    fn after(limit: Duration, action: &'static str) -> Deadline {
        Deadline { at: Instant::now() + limit, limit, action }
    }

    fn wait(&self, socket: &OwnedFd, flags: PollFlags) -> Result<(), VerbsError> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            let limit_ms = u64::try_from(self.limit.as_millis()).unwrap_or(u64::MAX);
            return Err(VerbsError::Timeout { action: self.action, limit_ms });
        }
        let mut fds = [PollFd::new(socket, flags)];
        let _ = rustix::event::poll(&mut fds, Some(&timespec(left)));
        Ok(())
    }
}

fn send_all(socket: &OwnedFd, mut bytes: &[u8], deadline: &Deadline) -> Result<(), VerbsError> {
    loop {
        match rustix::net::send(socket.as_fd(), bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(VerbsError::host("greet the peer")(errno.into())),
        }
        if bytes.is_empty() {
            return Ok(());
        }
        deadline.wait(socket, PollFlags::OUT)?;
    }
}

/// Takes what is there into the rest of `buffer`, and no byte beyond.
fn receive_some(socket: &OwnedFd, buffer: &mut [u8], filled: &mut usize) -> Result<(), VerbsError> {
    while let Some(rest) = buffer.get_mut(*filled..)
        && !rest.is_empty()
    {
        match rustix::net::recv(socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(VerbsError::Peer { what: "it hung up in its greeting" }),
            Ok((_, got)) => *filled += got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(VerbsError::host("hear the peer's greeting")(errno.into())),
        }
    }
    Ok(())
}
