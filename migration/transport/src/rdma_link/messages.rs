//! [`RdmaMessage`]s on a stream, read to the byte: page frames may follow the last one.

use crate::Stream;
use martlet_wire::rdma::{RDMA_HEADER_BYTES, RdmaError, RdmaHeader, RdmaMessage};
use std::io;

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
    input: Vec<u8>,
    filled: usize,
    header: Option<RdmaHeader>,
}

impl Messages {
    pub(super) fn new(stream: Stream) -> Messages {
        let input = vec![0; RDMA_HEADER_BYTES];
        Messages { stream, out: Vec::new(), input, filled: 0, header: None }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn into_stream(self) -> Stream {
        self.stream
    }

    /// Puts a message behind those that wait for [`Messages::flush`].
    pub(super) fn queue(&mut self, message: &RdmaMessage) {
        message.encode(&mut self.out);
    }

    /// Sends what was queued.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let sent = self.stream.write_all(&self.out);
        self.out.clear();
        sent
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
