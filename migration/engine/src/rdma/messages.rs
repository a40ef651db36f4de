//! [`RdmaMessage`]s on a stream, read to the byte: page frames may follow the last one.

use martlet_transport::{Connection, Stream};
use martlet_wire::rdma::{RDMA_HEADER_BYTES, RdmaError, RdmaHeader, RdmaMessage};
use rustix::event::PollFlags;
use std::io;

/// Bytes that may wait to be sent. A peer that leaves more takes nothing any more.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// Messages that are taken before timers, completions and whoever waits are looked at again: a peer
/// may send without end.
pub(super) const MESSAGES_AT_ONCE: usize = 256;

/// Why no message came.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(io::Error),
    /// Bytes that are no message.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] RdmaError),
}

/// Sends and receives messages. Reads nothing behind the message that it returns, so that the
/// stream can be used for something else afterwards.
#[derive(Debug)]
pub(super) struct Messages {
    stream: Stream,
    out: Vec<u8>,
    /// Bytes of `out` that the kernel has.
    handed_over: usize,
    input: Vec<u8>,
    filled: usize,
    header: Option<RdmaHeader>,
}

impl Messages {
    pub(super) fn new(stream: Stream) -> Messages {
        let input = vec![0; RDMA_HEADER_BYTES];
        Messages { stream, out: Vec::new(), handed_over: 0, input, filled: 0, header: None }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The stream for something else, once what was queued is sent, with a bound on every wait.
    pub(super) fn finish(&mut self) -> io::Result<Stream> {
        self.stream.write_all(&self.out[self.handed_over..])?;
        self.forget_unsent();
        self.stream.try_clone()
    }

    /// What to wait for on the stream.
    pub(super) fn wanted(&self) -> PollFlags {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.is_unsent());
        wanted
    }

    /// Whether something waits for [`Messages::flush`].
    pub(super) fn is_unsent(&self) -> bool {
        self.handed_over < self.out.len()
    }

    /// Puts a message behind those that wait for [`Messages::flush`].
    pub(super) fn queue(&mut self, message: &RdmaMessage) {
        message.encode(&mut self.out);
    }

    /// Sends of what was queued as much as there is room for; never waits.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.is_unsent() {
            match self.stream.write_now(&self.out[self.handed_over..]) {
                Ok(sent) => self.handed_over += sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let unsent = self.out.len() - self.handed_over;
                    if unsent <= UNSENT_BYTES_MAX {
                        return Ok(());
                    }
                    self.forget_unsent();
                    let text = format!("the peer takes no messages: {unsent} bytes wait");
                    return Err(io::Error::other(text));
                }
                Err(error) => {
                    self.forget_unsent();
                    return Err(error);
                }
            }
        }
        self.forget_unsent();
        Ok(())
    }

    fn forget_unsent(&mut self) {
        self.handed_over = 0;
        self.out.clear();
    }

    /// The next message if it is there; never waits.
    pub(super) fn try_receive(&mut self) -> Result<Option<RdmaMessage>, MessageError> {
        loop {
            let wanted = match self.header {
                None => RDMA_HEADER_BYTES,
                Some(header) => header.body_bytes(),
            };
            self.input.resize(wanted, 0);
            if self.filled < wanted {
                match self.stream.read_now(&mut self.input[self.filled..]) {
                    Ok(got) => self.filled += got,
                    Err(error) => match error.kind() {
                        io::ErrorKind::WouldBlock => return Ok(None),
                        io::ErrorKind::Interrupted => {}
                        io::ErrorKind::UnexpectedEof => return Err(MessageError::Closed),
                        _ => return Err(MessageError::Io(error)),
                    },
                }
                continue;
            }
            self.filled = 0;
            match self.header.take() {
                None => {
                    let Some(bytes) = self.input.first_chunk() else { continue };
                    self.header = Some(RdmaHeader::parse(bytes)?);
                }
                Some(header) => return Ok(Some(RdmaMessage::decode(header.kind(), &self.input)?)),
            }
        }
    }
}
