//! Messages out of a byte stream, whoever brings the bytes.

use martlet_wire::rdma::{RDMA_HEADER_BYTES, RdmaError, RdmaHeader, RdmaMessage};

/// Cuts a byte stream into messages. Holds what has come and not a byte more: a header that
/// announces much makes it allocate nothing.
#[derive(Debug, Default)]
pub struct MessageReader {
    input: Vec<u8>,
    consumed: usize,
}

impl MessageReader {
    /// An empty one, for the begin of a stream.
    pub fn new() -> MessageReader {
        MessageReader::default()
    }

    /// Takes the stream's next bytes. Take all messages before the next call.
    pub fn push(&mut self, bytes: &[u8]) {
        self.input.drain(..self.consumed);
        self.consumed = 0;
        self.input.extend_from_slice(bytes);
    }

    /// The next whole message, if it is there. After an error the stream is of no use.
    pub fn try_next(&mut self) -> Result<Option<RdmaMessage>, RdmaError> {
        let pending = self.input.get(self.consumed..).unwrap_or_default();
        let Some((head, rest)) = pending.split_first_chunk::<RDMA_HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = RdmaHeader::parse(head)?;
        let Some(body) = rest.get(..header.body_bytes()) else { return Ok(None) };
        let message = RdmaMessage::decode(header.kind(), body)?;
        self.consumed += RDMA_HEADER_BYTES + header.body_bytes();
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_whole_however_the_bytes_do() {
        let messages = [
            RdmaMessage::Heartbeat { sent_ns: 1 },
            RdmaMessage::Close { reason: String::new() },
            RdmaMessage::ZeroDone { sequence: 7 },
        ];
        let mut stream = Vec::new();
        messages.iter().for_each(|message| message.encode(&mut stream));
        for piece in [1, 3, 16, 17, stream.len()] {
            let (mut reader, mut read) = (MessageReader::new(), Vec::new());
            for bytes in stream.chunks(piece) {
                reader.push(bytes);
                while let Some(message) = reader.try_next().unwrap() {
                    read.push(message);
                }
            }
            assert_eq!(read, messages);
        }
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let mut reader = MessageReader::new();
        reader.push(b"GET / HTTP/1.1\r\n\r\n");
        assert!(matches!(reader.try_next(), Err(RdmaError::Magic(_))));
    }
}
