//! Speaks the wire by itself, as docs/protocol.md lays it out and not through martlet's own crates:
//! so it can say what they would not.

use rustix::net::sockopt::set_socket_recv_buffer_size;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

/// How long anything that must come may take, on a host that has much else to do.
pub(crate) const COMES_MAX: Duration = Duration::from_secs(60);

/// Roles of a connection.
pub(crate) const CONTROL: u16 = 1;
pub(crate) const DATA: u16 = 2;
pub(crate) const QUERY: u16 = 3;
pub(crate) const RDMA: u16 = 4;

/// Kinds of messages.
pub(crate) const SETUP: u16 = 1;
pub(crate) const SETUP_DONE: u16 = 2;
pub(crate) const CHANNELS_READY: u16 = 3;
pub(crate) const ROUND_RECEIVED: u16 = 4;
pub(crate) const REHEARSE: u16 = 5;
pub(crate) const REHEARSED: u16 = 6;
pub(crate) const SWITCHOVER_SOON: u16 = 7;
pub(crate) const FINAL_STATE: u16 = 8;
pub(crate) const DIGEST: u16 = 10;
pub(crate) const COMMIT: u16 = 11;
pub(crate) const COMMITTED: u16 = 12;
pub(crate) const COMMIT_REFUSED: u16 = 13;
pub(crate) const ALIVE: u16 = 14;
pub(crate) const PING: u16 = 15;
pub(crate) const PONG: u16 = 16;
pub(crate) const ABANDON: u16 = 17;
pub(crate) const QUERY_FATE: u16 = 18;
pub(crate) const ANSWER: u16 = 19;

/// What an `Answer` says of an attempt.
pub(crate) const UNKNOWN: u64 = 0;
pub(crate) const ABANDONED: u64 = 2;

/// What the kernel holds for a played destination that does not read.
const RECEIVE_BYTES: usize = 64 << 10;

const HELLO_BYTES: usize = 64;
const REPLY_BYTES: usize = 32;
const HEADER_BYTES: usize = 16;
const BARRIER_BYTES: usize = 32;

/// The hello of a peer that speaks version 1.
pub(crate) fn hello(role: u16, channel: u16, token: &[u8]) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..8].copy_from_slice(b"\x89martlet");
    for (at, number) in [(8, 1), (10, 1), (12, role), (14, channel)] {
        bytes[at..at + 2].copy_from_slice(&u16::to_le_bytes(number));
    }
    bytes[16..16 + token.len()].copy_from_slice(token);
    bytes
}

/// The header of a control message whose body is announced to be so long.
pub(crate) fn header(kind: u16, body_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(b"mCTL");
    bytes[4..6].copy_from_slice(&kind.to_le_bytes());
    let length = u32::try_from(body_bytes).expect("a length of 32 bits");
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// A control message.
pub(crate) fn message(kind: u16, body: &Value) -> Vec<u8> {
    let mut encoded = Vec::new();
    body.encode(&mut encoded);
    [&header(kind, encoded.len())[..], &encoded].concat()
}

/// The end of a round on a data channel.
pub(crate) fn barrier(round: u32) -> [u8; BARRIER_BYTES] {
    let mut bytes = [0; BARRIER_BYTES];
    bytes[..4].copy_from_slice(b"mPGS");
    bytes[4..6].copy_from_slice(&2_u16.to_le_bytes());
    bytes[8..12].copy_from_slice(&round.to_le_bytes());
    bytes
}

/// A frame of pages: so many at the start of the first region, which are zero.
pub(crate) fn pages_of_zeros(count: u32) -> Vec<u8> {
    let mut bytes = vec![0; 32 + 16];
    bytes[..4].copy_from_slice(b"mPGS");
    bytes[4] = 1;
    bytes[12] = 1;
    bytes[34] = 2;
    bytes[36..40].copy_from_slice(&count.to_le_bytes());
    bytes
}

/// Reads a data channel to the next end of a round, and throws the pages away.
pub(crate) fn next_barrier(channel: &mut impl Read) -> io::Result<u32> {
    loop {
        let mut header = [0; 32];
        channel.read_exact(&mut header)?;
        assert_eq!(&header[..4], b"mPGS");
        let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        let (kind, round, runs, payload) = (header[4], number(8), number(12), number(16));
        if kind == 2 {
            return Ok(round);
        }
        let rest = u64::from(runs) * 16 + u64::from(payload);
        io::copy(&mut Read::by_ref(channel).take(rest), &mut io::sink())?;
    }
}

/// CBOR (RFC 8949), as far as messages use it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Text(String),
    List(Vec<Value>),
    Map(BTreeMap<u64, Value>),
    Bool(bool),
    Null,
}

/// A map from pairs of a field's number and its value.
pub(crate) fn map(fields: impl IntoIterator<Item = (u64, Value)>) -> Value {
    Value::Map(fields.into_iter().collect())
}

impl Value {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Value::Number(number) => head(0, *number, out),
            Value::Bytes(bytes) => {
                head(2, bytes.len() as u64, out);
                out.extend_from_slice(bytes);
            }
            Value::Text(text) => {
                head(3, text.len() as u64, out);
                out.extend_from_slice(text.as_bytes());
            }
            Value::List(items) => {
                head(4, items.len() as u64, out);
                items.iter().for_each(|item| item.encode(out));
            }
            Value::Map(fields) => {
                head(5, fields.len() as u64, out);
                for (number, value) in fields {
                    head(0, *number, out);
                    value.encode(out);
                }
            }
            Value::Bool(yes) => out.push(if *yes { 0xf5 } else { 0xf4 }),
            Value::Null => out.push(0xf6),
        }
    }

    /// Reads one value; panics on what martlet never sends.
    pub(crate) fn decode(bytes: &mut &[u8]) -> Value {
        let first = take(bytes, 1)[0];
        let number = match first & 31 {
            small @ 0..=23 => u64::from(small),
            sized @ 24..=27 => {
                let digits = take(bytes, 1 << (sized - 24));
                digits.iter().fold(0, |number, digit| number << 8 | u64::from(*digit))
            }
            _ => panic!("CBOR that starts with {first:#x}"),
        };
        let count = usize::try_from(number).expect("a count");
        match first >> 5 {
            0 => Value::Number(number),
            2 => Value::Bytes(take(bytes, count).to_vec()),
            3 => Value::Text(String::from_utf8(take(bytes, count).to_vec()).expect("a text")),
            4 => Value::List((0..count).map(|_| Value::decode(bytes)).collect()),
            5 => map((0..count).map(|_| (Value::decode(bytes).number(), Value::decode(bytes)))),
            7 if first == 0xf6 => Value::Null,
            7 => Value::Bool(first == 0xf5),
            _ => panic!("CBOR that starts with {first:#x}"),
        }
    }

    pub(crate) fn number(&self) -> u64 {
        let Value::Number(number) = self else { panic!("{self:?} is no number") };
        *number
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let Value::Bytes(bytes) = self else { panic!("{self:?} is no byte string") };
        bytes
    }

    pub(crate) fn text(&self) -> &str {
        let Value::Text(text) = self else { panic!("{self:?} is no text") };
        text
    }

    /// A field of a map.
    pub(crate) fn field(&self, number: u64) -> Option<&Value> {
        let Value::Map(fields) = self else { panic!("{self:?} is no map") };
        fields.get(&number)
    }

    /// The same map with another value in a field.
    pub(crate) fn with(mut self, number: u64, value: Value) -> Value {
        let Value::Map(fields) = &mut self else { panic!("{self:?} is no map") };
        fields.insert(number, value);
        self
    }
}

fn head(major: u8, number: u64, out: &mut Vec<u8>) {
    let digits = number.to_be_bytes();
    let (code, count) = match number {
        0..=23 => (digits[7], 0),
        24..=0xff => (24, 1),
        0x100..=0xffff => (25, 2),
        0x1_0000..=0xffff_ffff => (26, 4),
        _ => (27, 8),
    };
    out.push(major << 5 | code);
    out.extend_from_slice(&digits[8 - count..]);
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

/// One end of a connection.
pub(crate) struct Peer(pub(crate) TcpStream);

impl Peer {
    /// Connects to a listener and says nothing yet.
    pub(crate) fn silent(port: u16) -> io::Result<Peer> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(COMES_MAX))?;
        stream.set_write_timeout(Some(COMES_MAX))?;
        stream.set_nodelay(true)?;
        Ok(Peer(stream))
    }

    /// Connects and greets; the status that the listener answers, 0 if it accepts.
    pub(crate) fn greet(port: u16, hello: &[u8; HELLO_BYTES]) -> io::Result<(Peer, u16)> {
        let mut peer = Peer::silent(port)?;
        let status = peer.ends_greeting(hello)?;
        Ok((peer, status))
    }

    /// Says what is left of a hello; the status that the listener answers.
    pub(crate) fn ends_greeting(&mut self, rest: &[u8]) -> io::Result<u16> {
        self.say(rest)?;
        let mut reply = [0; REPLY_BYTES];
        self.0.read_exact(&mut reply)?;
        assert_eq!(&reply[..8], b"\x89MARTLET");
        Ok(u16::from_le_bytes([reply[10], reply[11]]))
    }

    /// Connects with a role that must be accepted.
    pub(crate) fn accepted(port: u16, role: u16) -> Peer {
        let (peer, status) = Peer::greet(port, &hello(role, 0, &[])).expect("a reply");
        assert_eq!(status, 0, "the listener refuses role {role}");
        peer
    }

    pub(crate) fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    /// The next control message; an error at the end of the connection.
    pub(crate) fn hear(&mut self) -> io::Result<(u16, Value)> {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header)?;
        assert_eq!(&header[..4], b"mCTL");
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let mut body = vec![0; usize::try_from(length).expect("a length")];
        self.0.read_exact(&mut body)?;
        let kind = u16::from_le_bytes([header[4], header[5]]);
        Ok((kind, Value::decode(&mut &body[..])))
    }

    /// The next message that is no pong, which must be of this kind.
    pub(crate) fn expect(&mut self, kind: u16) -> Value {
        loop {
            match self.hear().expect("a message") {
                (PONG, _) => {}
                (got, body) => {
                    assert_eq!(got, kind, "{body:?}");
                    return body;
                }
            }
        }
    }

    /// The same connection once more.
    pub(crate) fn twin(&self) -> Peer {
        Peer(self.0.try_clone().expect("a socket"))
    }

    /// Waits until the listener closes the connection; whatever it says before is thrown away.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }

    pub(crate) fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// A listener to which a real source connects.
pub(crate) struct Listener(TcpListener);

impl Listener {
    pub(crate) fn new() -> (Listener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        // Little is on its way to who reads nothing.
        set_socket_recv_buffer_size(&listener, RECEIVE_BYTES).expect("a size");
        let port = listener.local_addr().expect("bound").port();
        (Listener(listener), port)
    }

    /// Accepts a connection of which nothing is known.
    pub(crate) fn accept_silent(&self) -> Peer {
        let (stream, _) = self.0.accept().expect("a connection");
        stream.set_read_timeout(Some(COMES_MAX)).expect("a socket");
        Peer(stream)
    }

    /// Accepts a connection and its hello, whose role and channel are returned.
    pub(crate) fn accept(&self) -> (Peer, u16, u16) {
        let Peer(mut stream) = self.accept_silent();
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        let mut reply = [0; REPLY_BYTES];
        reply[..8].copy_from_slice(b"\x89MARTLET");
        for at in [8, 12, 14] {
            reply[at] = 1;
        }
        stream.write_all(&reply).expect("a source that waits for its answer");
        let number = |at: usize| u16::from_le_bytes([hello[at], hello[at + 1]]);
        (Peer(stream), number(12), number(14))
    }
}
