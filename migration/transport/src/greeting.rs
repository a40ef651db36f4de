//! The first bytes on every connection, both ways.

use crate::Address;
use crate::stream::{Stream, monotonic_now};
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

/// Connects and greets; returns once the listener has accepted.
pub fn connect(to: &Address, hello: &Hello) -> Result<Stream, GreetingError> {
    let stream = Stream::connect(to, GREETING_MAX)
        .map_err(|source| GreetingError::Connect { to: to.clone(), source })?;
    stream.write_all(&hello.to_bytes()).map_err(GreetingError::Io)?;
    let mut reply = [0; REPLY_BYTES];
    read_checked(&stream, &mut reply, check_reply_prefix)?;
    HelloReply::parse(&reply)?.accepted()?;
    Ok(stream)
}

/// Reads the greeting of a connection that was accepted. The caller answers with [`reply`].
pub fn read_hello(stream: &Stream) -> Result<Hello, GreetingError> {
    let mut hello = [0; HELLO_BYTES];
    read_checked(stream, &mut hello, check_hello_prefix)?;
    Ok(Hello::parse(&hello)?)
}

/// Answers a greeting.
pub fn reply(stream: &Stream, answer: &HelloReply) -> io::Result<()> {
    stream.write_all(&answer.to_bytes())
}

/// Bytes that are enough to tell a peer that speaks something else.
const PREFIX_BYTES: usize = 8;

/// Reads a greeting, and gives up on a stranger at its first bytes instead of waiting for more.
fn read_checked(
    stream: &Stream,
    buffer: &mut [u8],
    check: impl Fn(&[u8]) -> Result<(), HelloError>,
) -> Result<(), GreetingError> {
    let deadline = monotonic_now().after(GREETING_MAX);
    let (prefix, rest) = buffer.split_at_mut(PREFIX_BYTES);
    for filled in 0..PREFIX_BYTES {
        stream
            .read_exact_until(&mut prefix[filled..=filled], deadline)
            .map_err(GreetingError::Io)?;
        check(&prefix[..=filled])?;
    }
    stream.read_exact_until(rest, deadline).map_err(GreetingError::Io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_wire::hello::{Role, Status};
    use std::os::unix::net::UnixStream;

    fn pair() -> (Stream, Stream) {
        let (one, two) = UnixStream::pair().unwrap();
        (Stream::from_unix(one).unwrap(), Stream::from_unix(two).unwrap())
    }

    #[test]
    fn a_stranger_is_told_from_its_first_byte() {
        let (stranger, here) = pair();
        stranger.write_all(b"S").unwrap();
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
        read_checked(&there, &mut bytes, check_reply_prefix).unwrap();
        assert!(HelloReply::parse(&bytes).unwrap().accepted().is_err());
    }

    #[test]
    fn a_peer_that_hangs_up_is_an_error() {
        let (there, here) = pair();
        there.write_all(&Hello::control().to_bytes()[..20]).unwrap();
        drop(there);
        assert!(matches!(read_hello(&here), Err(GreetingError::Io(_))));
    }
}
