//! The first bytes on every connection, both ways.

use crate::stream::Stream;
use crate::{Address, Connection, Target, Until};
use martlet_wire::hello::{
    HELLO_BYTES, Hello, HelloError, HelloReply, REPLY_BYTES, check_hello_prefix, check_reply_prefix,
};
use std::io;
use std::time::Duration;

/// How long a peer may take to accept a connection and to greet.
pub const GREETING_MAX: Duration = Duration::from_secs(10);

/// Why a connection did not come to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GreetingError {
    /// Nobody there, or not in time.
    #[error("cannot connect to {to}: {source}")]
    Connect {
        /// Where to.
        to: Address,
        /// What the kernel said. Part of the text: this ends as one line.
        source: io::Error,
    },
    /// The connection broke, or the peer stayed silent.
    #[error("no greeting from the peer: {0}")]
    Io(io::Error),
    /// The peer is not martlet, speaks other versions, or refuses.
    #[error(transparent)]
    Hello(#[from] HelloError),
}

/// Connections that greet at the same time. A listener takes a few more before it calls it a flood.
const GREETINGS_AT_ONCE: usize = 16;

/// Connects to the first of an address's targets that takes the connection, greets it, and says
/// which it was. Each has its part of the time.
pub fn connect_first(
    to: &Address,
    targets: &[Target],
    hello: &Hello,
    until: &Until<'_>,
) -> Result<(Stream, Target), GreetingError> {
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for (target, left) in targets.iter().zip((1..=targets.len()).rev()) {
        let share = until.left() / u32::try_from(left).unwrap_or(u32::MAX);
        match Stream::connect(target, &until.at_most(share)) {
            Ok(stream) => {
                greet(&stream, hello)?;
                read_reply(&stream, until)?;
                return Ok((stream, target.clone()));
            }
            Err(error) => last = error,
        }
    }
    Err(GreetingError::Connect { to: to.clone(), source: last })
}

/// Connects once for each greeting, to one target, and returns when the listener has accepted all
/// of them. A listener that is slow to greet is so for several at the same time.
pub fn connect_all(
    to: &Address,
    target: &Target,
    hellos: &[Hello],
    until: &Until<'_>,
) -> Result<Vec<Stream>, GreetingError> {
    let mut streams = Vec::with_capacity(hellos.len());
    for some in hellos.chunks(GREETINGS_AT_ONCE) {
        let first = streams.len();
        for hello in some {
            let stream = Stream::connect(target, until)
                .map_err(|source| GreetingError::Connect { to: to.clone(), source })?;
            greet(&stream, hello)?;
            streams.push(stream);
        }
        for stream in &streams[first..] {
            read_reply(stream, until)?;
        }
    }
    Ok(streams)
}

fn greet(stream: &Stream, hello: &Hello) -> Result<(), GreetingError> {
    match stream.write_all(&hello.to_bytes()) {
        // It may have turned us away before it heard us. What it says of that is still to be read.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(GreetingError::Io),
    }
}

fn read_reply(stream: &Stream, until: &Until<'_>) -> Result<(), GreetingError> {
    let mut reply = [0; REPLY_BYTES];
    read_checked(stream, &mut reply, until, check_reply_prefix)?;
    HelloReply::parse(&reply)?.accepted()?;
    Ok(())
}

/// The greeting of a connection that was accepted, as far as it has come.
#[derive(Debug)]
pub struct Greeting {
    bytes: [u8; HELLO_BYTES],
    filled: usize,
}

impl Default for Greeting {
    fn default() -> Greeting {
        Greeting { bytes: [0; HELLO_BYTES], filled: 0 }
    }
}

impl Greeting {
    /// Whether nothing of it has come.
    pub fn is_silent(&self) -> bool {
        self.filled == 0
    }

    /// Reads what is there, without waiting; `None` until it is whole. Whoever speaks something
    /// else is told apart at the first wrong byte. The caller answers with [`reply`].
    pub fn advance(&mut self, stream: &impl Connection) -> Result<Option<Hello>, GreetingError> {
        while self.filled < HELLO_BYTES {
            match stream.read_now(&mut self.bytes[self.filled..]) {
                Ok(got) => self.filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(GreetingError::Io(error)),
            }
            check_hello_prefix(&self.bytes[..self.filled])?;
        }
        Ok(Some(Hello::parse(&self.bytes)?))
    }
}

/// Answers a greeting.
pub fn reply(stream: &Stream, answer: &HelloReply) -> io::Result<()> {
    stream.write_all(&answer.to_bytes())
}

/// Bytes that are enough to tell a peer that speaks something else.
const PREFIX_BYTES: usize = 8;

/// Reads a greeting, and gives up on what is no greeting at its first bytes instead of waiting for more.
fn read_checked(
    stream: &Stream,
    buffer: &mut [u8],
    until: &Until<'_>,
    check: impl Fn(&[u8]) -> Result<(), HelloError>,
) -> Result<(), GreetingError> {
    let (prefix, rest) = buffer.split_at_mut(PREFIX_BYTES);
    for filled in 0..PREFIX_BYTES {
        stream.read_exact(&mut prefix[filled..=filled], until).map_err(GreetingError::Io)?;
        check(&prefix[..=filled])?;
    }
    stream.read_exact(rest, until).map_err(GreetingError::Io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_wire::hello::{Role, Status};
    use std::os::unix::net::UnixStream;

    /// Waits for a whole greeting.
    fn read_hello(stream: &Stream) -> Result<Hello, GreetingError> {
        let mut greeting = Greeting::default();
        loop {
            if let Some(hello) = greeting.advance(stream)? {
                return Ok(hello);
            }
            assert!(stream.wait_readable(GREETING_MAX).unwrap());
        }
    }

    fn pair() -> (Stream, Stream) {
        let (one, two) = UnixStream::pair().unwrap();
        (Stream::from_unix(one).unwrap(), Stream::from_unix(two).unwrap())
    }

    #[test]
    fn another_protocol_is_told_from_its_first_byte() {
        let (other, here) = pair();
        other.write_all(b"S").unwrap();
        assert!(matches!(read_hello(&here), Err(GreetingError::Hello(HelloError::NotMartlet(_)))));
    }

    #[test]
    fn a_greeting_is_read_and_answered() {
        let (there, here) = pair();
        there.write_all(&Hello::data(3, [9; 16]).to_bytes()).unwrap();
        let hello = read_hello(&here).unwrap();
        assert_eq!((hello.role, hello.channel, hello.token), (Role::DATA, 3, [9; 16]));
        reply(&here, &HelloReply::refuse(Status::TOKEN)).unwrap();
        let mut bytes = [0; REPLY_BYTES];
        read_checked(&there, &mut bytes, &Until::within(GREETING_MAX), check_reply_prefix).unwrap();
        assert!(HelloReply::parse(&bytes).unwrap().accepted().is_err());
    }

    #[test]
    fn who_is_turned_away_before_its_greeting_hears_why() {
        let (here, there) = pair();
        reply(&there, &HelloReply::refuse(Status::LIMIT)).unwrap();
        drop(there);
        greet(&here, &Hello::data(0, [1; 16])).unwrap();
        let why = read_reply(&here, &Until::within(GREETING_MAX)).unwrap_err();
        assert!(why.to_string().contains("too many connections"), "{why}");
    }

    /// Eight channels of a listener that takes 300 ms to greet each are not eight times as long.
    #[test]
    fn slow_greetings_of_many_channels_are_awaited_together() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let to = Address::Tcp { host: "127.0.0.1".to_owned(), port: at.port() };
        let count = 40;
        std::thread::spawn(move || {
            let serve = |stream: std::net::TcpStream| {
                let stream = Stream::from_tcp(stream).unwrap();
                let hello = read_hello(&stream).unwrap();
                std::thread::sleep(Duration::from_millis(300));
                reply(&stream, &HelloReply::accept(hello.negotiate().unwrap())).unwrap();
                stream
            };
            let greeted: Vec<_> = listener
                .incoming()
                .take(count)
                .map(|stream| std::thread::spawn(move || serve(stream.unwrap())))
                .collect();
            greeted.into_iter().for_each(|thread| drop(thread.join()));
        });
        let hellos: Vec<Hello> = (0..40).map(|channel| Hello::data(channel, [1; 16])).collect();
        // A tenth of what one behind the other would take, and room for a busy host.
        let until = Until::within(Duration::from_secs(8));
        let streams = connect_all(&to, &Target::Ip(at), &hellos, &until).unwrap();
        assert_eq!(streams.len(), count);
    }

    /// A Unix socket that nobody accepts blocks a plain `connect` for ever.
    #[test]
    fn a_socket_that_nobody_accepts_is_given_up_at_once_when_cancelled() {
        let folder = std::env::temp_dir().join(format!("martlet-greet-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("full");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let to = Address::Unix(path.clone());
        let wake = std::sync::Arc::new(crate::Wake::new().unwrap());
        let mut kept = Vec::new();
        // As many as the backlog takes.
        let brief = || Until::within(Duration::from_millis(200));
        while let Ok(stream) = Stream::connect(&Target::Unix(path.clone()), &brief()) {
            kept.push(stream);
        }
        let targets = Target::resolve(&to).unwrap();
        let error = connect_first(&to, &targets, &Hello::control(), &brief()).unwrap_err();
        assert!(error.to_string().contains("timed out"), "{error}");
        let waker = std::sync::Arc::clone(&wake);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            waker.raise();
        });
        let until = Until::within(Duration::from_secs(3600)).or_cancelled(&wake);
        let error = connect_first(&to, &targets, &Hello::control(), &until).unwrap_err();
        assert!(error.to_string().contains("cancelled"), "{error}");
        drop(listener);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_peer_that_hangs_up_is_an_error() {
        let (there, here) = pair();
        there.write_all(&Hello::control().to_bytes()[..20]).unwrap();
        drop(there);
        assert!(matches!(read_hello(&here), Err(GreetingError::Io(_))));
    }
}
