//! The control connection: whole messages both ways.

use crate::{Connection, Stream};
use martlet_wire::control::{Control, STATE_BYTES_MAX};
use martlet_wire::frame::{self, DecodeError, FRAME_HEADER_BYTES, FrameHeader, Kind, Reader};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes asked of the socket at a time. Most messages are far smaller.
const READ_BYTES: usize = 16 << 10;

/// A receive buffer larger than this is given back once it is empty: states come seldom.
const KEEP_BYTES: usize = 256 << 10;

/// Reads in one look, so that a peer that never stops sending can't hold whoever looks.
const READS_MAX: usize = 16;

/// Bytes that may wait to be sent: one state, and room for what goes with it. A peer that leaves
/// more than that takes nothing any more.
const UNSENT_BYTES_MAX: usize = STATE_BYTES_MAX + (1 << 20);

/// Why no message came.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The connection broke.
    #[error("the connection broke")]
    Io(#[source] io::Error),
    /// The peer sent something that is no message.
    #[error("the peer broke the protocol")]
    Protocol(#[from] DecodeError),
    /// The reader lets no such message in where it stands. The connection can't be read any more.
    #[error("the peer sent {0} out of its place")]
    Refused(Kind),
}

/// Sends and receives [`Control`] messages on one connection.
#[derive(Debug)]
pub struct ControlLink<C = Stream> {
    stream: C,
    reader: Reader,
    out: Vec<u8>,
    /// Bytes of `out` that the kernel has.
    handed_over: usize,
    input: Vec<u8>,
    /// Bytes of `input` that were decoded already.
    consumed: usize,
    /// Where bytes are read to: made once, for most looks find nothing.
    landing: Box<[u8]>,
    sent_bytes: u64,
}

impl<C: Connection> ControlLink<C> {
    /// Takes a connection whose hello is done; who reads it decides what may come.
    pub fn new(stream: C, reader: Reader) -> ControlLink<C> {
        ControlLink {
            stream,
            reader,
            out: Vec::new(),
            handed_over: 0,
            input: Vec::new(),
            consumed: 0,
            landing: vec![0; READ_BYTES].into_boxed_slice(),
            sent_bytes: 0,
        }
    }

    /// Puts a message behind those that wait for [`ControlLink::flush`].
    ///
    /// # Panics
    /// If the message breaks a limit of the protocol: whoever made it has to keep them.
    pub fn queue(&mut self, message: &Control) {
        frame::encode(message, &mut self.out).expect("own messages keep the protocol's limits");
    }

    /// Sends of what was queued as much as there is room for, in one piece if all of it; never
    /// waits. Call it again when the connection is writable and [`ControlLink::unsent`] is not 0.
    ///
    /// # Errors
    /// If the connection broke, or the peer takes nothing and more waits than it may.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.handed_over < self.out.len() {
            match self.stream.write_now(&self.out[self.handed_over..]) {
                Ok(sent) => {
                    self.handed_over += sent;
                    self.sent_bytes += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return self.check_unsent();
                }
                Err(error) => {
                    self.drop_unsent();
                    return Err(error);
                }
            }
        }
        self.drop_unsent();
        Ok(())
    }

    /// Bytes that were queued and that the kernel does not have yet.
    pub fn unsent(&self) -> usize {
        self.out.len() - self.handed_over
    }

    fn check_unsent(&mut self) -> io::Result<()> {
        let unsent = self.unsent();
        if unsent <= UNSENT_BYTES_MAX {
            return Ok(());
        }
        self.drop_unsent();
        let text = format!("the peer takes no messages: {unsent} bytes wait");
        Err(io::Error::other(text))
    }

    fn drop_unsent(&mut self) {
        self.handed_over = 0;
        self.out.clear();
        if self.out.capacity() > KEEP_BYTES {
            self.out = Vec::new();
        }
    }

    /// The next message if it is there; never waits, and reads a bounded part of a longer one: the
    /// connection is readable then, so look again.
    pub fn try_receive(&mut self) -> Result<Option<Control>, ReceiveError> {
        self.try_receive_if(|_| true)
    }

    /// As [`ControlLink::try_receive`]; of a message that is not to be let in no more than the
    /// header is taken.
    pub fn try_receive_if(
        &mut self,
        admits: impl Fn(Kind) -> bool,
    ) -> Result<Option<Control>, ReceiveError> {
        for _ in 0..READS_MAX {
            if let Some(message) = self.decode_next(&admits)? {
                return Ok(Some(message));
            }
            match self.fill() {
                Ok(()) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::UnexpectedEof => return Err(ReceiveError::Closed),
                    _ => return Err(ReceiveError::Io(error)),
                },
            }
        }
        self.decode_next(&admits)
    }

    /// Bytes that were sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// The connection, to wait on or to break.
    pub fn stream(&self) -> &C {
        &self.stream
    }

    fn fill(&mut self) -> io::Result<()> {
        self.input.drain(..self.consumed);
        self.consumed = 0;
        if self.input.is_empty() && self.input.capacity() > KEEP_BYTES {
            self.input = Vec::new();
        }
        // Grows with what really came, never with what a header only claims.
        let got = self.stream.read_now(&mut self.landing)?;
        self.input.extend_from_slice(&self.landing[..got]);
        Ok(())
    }

    fn decode_next(
        &mut self,
        admits: &impl Fn(Kind) -> bool,
    ) -> Result<Option<Control>, ReceiveError> {
        let pending = &self.input[self.consumed..];
        let Some((header, rest)) = pending.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = FrameHeader::parse(header)?.for_reader(self.reader)?;
        if !admits(header.kind()) {
            return Err(ReceiveError::Refused(header.kind()));
        }
        let Some(body) = rest.get(..header.body_bytes()) else {
            return Ok(None);
        };
        let message = Control::decode(header.kind(), body)?;
        self.consumed += FRAME_HEADER_BYTES + header.body_bytes();
        Ok(Some(message))
    }
}

impl AsFd for ControlLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_wire::control::{Ping, State};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    fn pair() -> (ControlLink, ControlLink) {
        let (one, two) = UnixStream::pair().unwrap();
        let link = |stream, reader| ControlLink::new(Stream::from_unix(stream).unwrap(), reader);
        (link(one, Reader::Source), link(two, Reader::Destination))
    }

    fn receive(link: &mut ControlLink) -> Result<Control, ReceiveError> {
        loop {
            if let Some(message) = link.try_receive()? {
                return Ok(message);
            }
            assert!(link.stream().wait_readable(Duration::from_secs(20)).unwrap());
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut one, mut two) = pair();
        let big = Control::FinalState(State::new(vec![7; 3 << 20]));
        let reader = std::thread::spawn(move || {
            let messages: Vec<Control> = (0..3).map(|_| receive(&mut two).unwrap()).collect();
            let end = receive(&mut two);
            (messages, end.unwrap_err())
        });
        one.queue(&Control::Ping(Ping { sent_ns: 1 }));
        one.queue(&big);
        one.flush().unwrap();
        one.queue(&Control::AskDigest);
        while one.unsent() > 0 {
            one.flush().unwrap();
            std::thread::yield_now();
        }
        drop(one);
        let (messages, end) = reader.join().unwrap();
        assert_eq!(messages, [Control::Ping(Ping { sent_ns: 1 }), big, Control::AskDigest]);
        assert!(matches!(end, ReceiveError::Closed));
    }

    #[test]
    fn a_peer_that_reads_nothing_holds_nobody_up() {
        let (mut one, two) = pair();
        let big = Control::Rehearse(State::new(vec![7; 40 << 20]));
        one.queue(&big);
        one.flush().unwrap();
        assert!(one.unsent() > 0, "more than the kernel holds");
        one.queue(&big);
        let full = one.flush().unwrap_err();
        assert!(full.to_string().contains("takes no messages"), "{full}");
        drop(two);
    }

    #[test]
    fn a_long_message_is_read_in_several_looks() {
        let (mut one, mut two) = pair();
        one.queue(&Control::Rehearse(State::new(vec![7; 1 << 20])));
        one.flush().unwrap();
        let mut looks = 1;
        while two.try_receive().unwrap().is_none() {
            looks += 1;
        }
        assert_eq!((looks, one.unsent()), (5, 0), "256 KiB each, and a little more than 1 MiB");
    }

    #[test]
    fn garbage_is_the_peers_fault() {
        let (one, mut two) = pair();
        one.stream().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(matches!(receive(&mut two), Err(ReceiveError::Protocol(_))));
    }
}
