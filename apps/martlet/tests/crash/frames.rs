//! Where the messages of a control connection begin and end, as docs/protocol.md has it.

/// Bytes of the header that says how long a message is.
const HEADER: usize = 16;

/// A stretch of the stream in one piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) bytes: Vec<u8>,
    /// A message of this kind begins with it.
    pub(crate) begins: Option<u16>,
    /// A message of this kind ends with it.
    pub(crate) ends: Option<u16>,
}

/// Cuts what goes one way into pieces that end where messages end.
#[derive(Debug)]
pub(crate) struct Frames {
    held: Vec<u8>,
    /// Bytes until the current message ends, and its kind; the hello has none.
    current: (usize, Option<u16>),
}

impl Frames {
    /// For a stream that begins with a hello of so many bytes.
    pub(crate) fn after(hello: usize) -> Frames {
        Frames { held: Vec::new(), current: (hello, None) }
    }

    /// The pieces that are there. A header that has not come whole yet is held back.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Piece> {
        self.held.extend_from_slice(bytes);
        let mut pieces = Vec::new();
        loop {
            let mut begins = None;
            if self.current.0 == 0 {
                let Some(header) = self.held.first_chunk::<HEADER>() else { break };
                let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
                let body = usize::from(number(8)) | usize::from(number(10)) << 16;
                begins = Some(number(4));
                self.current = (HEADER + body, begins);
            }
            let (left, kind) = self.current;
            let now = left.min(self.held.len());
            if now == 0 {
                break;
            }
            self.current.0 = left - now;
            let ends = kind.filter(|_| left == now);
            let bytes = self.held.drain(..now).collect();
            pieces.push(Piece { bytes, begins, ends });
        }
        pieces
    }

    /// What was held back when the stream ended.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

#[test]
fn pieces_end_where_messages_do() {
    let message = |kind: u8, body: &[u8]| {
        let mut bytes = b"mCTL".to_vec();
        bytes.extend_from_slice(&[kind, 0, 0, 0]);
        bytes.extend_from_slice(&u32::try_from(body.len()).expect("short").to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(body);
        bytes
    };
    let stream = [&b"hello"[..], &message(11, b"abc"), &message(3, b"")].concat();
    for cut in 0..stream.len() {
        let mut frames = Frames::after(5);
        let mut pieces = frames.push(&stream[..cut]);
        pieces.extend(frames.push(&stream[cut..]));
        let begins: Vec<u16> = pieces.iter().filter_map(|piece| piece.begins).collect();
        let ends: Vec<u16> = pieces.iter().filter_map(|piece| piece.ends).collect();
        assert_eq!((begins, ends), (vec![11, 3], vec![11, 3]), "cut at {cut}");
        let all: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.bytes).collect();
        assert_eq!(all, stream);
        assert!(frames.rest().is_empty());
    }
}
