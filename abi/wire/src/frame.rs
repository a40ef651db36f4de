//! Frames of the control and query connections: 16 bytes of header, then one CBOR map.
//!
//! ```text
//! offset  size  field
//!      0     4  magic     "mCTL"
//!      4     2  kind      which message
//!      6     2  flags     0
//!      8     4  length    bytes that follow
//!     12     4  reserved  0
//! ```
//!
//! A reader reads the header, has it checked by [`FrameHeader::parse`] and
//! [`FrameHeader::for_reader`], allocates the length that it then knows to be within the kind's
//! limit, reads that, and calls [`Control::decode`].

use crate::cbor;
use crate::control::{Alive, Control, MACHINE_BYTES_MAX, STATE_BYTES_MAX};
use crate::control_check::one_line;
use core::fmt;
use minicbor::decode::Decode;
use minicbor::encode::Encode;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use crate::control_check::ValueError;

/// First bytes of every control frame.
pub const FRAME_MAGIC: [u8; 4] = *b"mCTL";
/// Bytes of a frame's header.
pub const FRAME_HEADER_BYTES: usize = 16;
/// Longest body of a message that carries neither a machine nor a state: room for what a newer
/// version may add.
pub const SMALL_BYTES_MAX: usize = 4096;
/// What a message may have around its one long field.
const AROUND_BYTES: usize = 16 << 10;

/// Number of a message kind on the wire. Numbers are never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kind(pub u16);

/// Who reads a connection: what may come to one of them is nobody else's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The source, on its control connection.
    Source,
    /// The destination, on a control connection.
    Destination,
    /// Whoever asks, on a query connection.
    Asker,
    /// Whoever answers there.
    Answerer,
}

impl Kind {
    /// Whether a reader is ever sent this message.
    pub const fn goes_to(self, reader: Reader) -> bool {
        match reader {
            Reader::Source => matches!(
                self,
                Kind::SETUP_DONE
                    | Kind::CHANNELS_READY
                    | Kind::ROUND_RECEIVED
                    | Kind::REHEARSED
                    | Kind::DIGEST
                    | Kind::COMMITTED
                    | Kind::COMMIT_REFUSED
                    | Kind::ALIVE
                    | Kind::PONG
                    | Kind::ABANDON
            ),
            Reader::Destination => matches!(
                self,
                Kind::SETUP
                    | Kind::REHEARSE
                    | Kind::SWITCHOVER_SOON
                    | Kind::FINAL_STATE
                    | Kind::ASK_DIGEST
                    | Kind::COMMIT
                    | Kind::PING
                    | Kind::ABANDON
            ),
            Reader::Asker => matches!(self, Kind::ANSWER),
            Reader::Answerer => matches!(self, Kind::QUERY),
        }
    }
}

/// Declares the kinds: number, body limit and payload in one place, and from it the constants,
/// the names, the limits, the encoder and the decoder, so that none of them can miss a kind.
macro_rules! kinds {
    ($($name:ident = $number:literal, max $max:expr, $variant:ident $(($payload:ident))?;)*) => {
        impl Kind {
            $(
                #[doc = concat!("[`Control::", stringify!($variant), "`]")]
                pub const $name: Kind = Kind($number);
            )*

            /// Every kind that this version knows.
            pub const ALL: &'static [Kind] = &[$(Kind::$name),*];

            /// The message's name; `None` for a kind that this version does not know.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Kind::$name => Some(stringify!($variant)),)*
                    _ => None,
                }
            }

            /// Longest body in bytes; `None` for a kind that this version does not know.
            pub const fn body_bytes_max(self) -> Option<usize> {
                match self {
                    $(Kind::$name => Some($max),)*
                    _ => None,
                }
            }
        }

        impl Control {
            /// Which message it is.
            pub fn kind(&self) -> Kind {
                match self {
                    $(kinds!(@pattern $variant $(($payload))?) => Kind::$name,)*
                }
            }

            fn encode_body(&self, body: &mut Vec<u8>) {
                match self {
                    $(kinds!(@binding $variant $(($payload))? payload) => {
                        kinds!(@encode body $(($payload))? payload);
                    })*
                }
            }

            fn decode_body(
                kind: Kind,
                decoder: &mut minicbor::Decoder<'_>,
            ) -> Result<Control, BodyError> {
                match kind {
                    $(Kind::$name => kinds!(@decode decoder $variant $(($payload))?),)*
                    _ => Err(BodyError::Unknown),
                }
            }
        }
    };
    (@pattern $variant:ident ($payload:ident)) => { Control::$variant(_) };
    (@pattern $variant:ident) => { Control::$variant };
    (@binding $variant:ident ($payload:ident) $name:ident) => { Control::$variant($name) };
    (@binding $variant:ident $name:ident) => { Control::$variant };
    (@encode $body:ident ($payload:ident) $name:ident) => { append($name, $body) };
    (@encode $body:ident $name:ident) => { append(&Empty {}, $body) };
    (@decode $decoder:ident $variant:ident ($payload:ident)) => {
        Ok(Control::$variant(crate::control::$payload::decode($decoder, &mut ())?))
    };
    (@decode $decoder:ident $variant:ident) => {{
        Empty::decode($decoder, &mut ())?;
        Ok(Control::$variant)
    }};
}

kinds! {
    SETUP           =  1, max MACHINE_BYTES_MAX + AROUND_BYTES, Setup (Setup);
    SETUP_DONE      =  2, max SMALL_BYTES_MAX, SetupDone (SetupDone);
    CHANNELS_READY  =  3, max SMALL_BYTES_MAX, ChannelsReady;
    ROUND_RECEIVED  =  4, max SMALL_BYTES_MAX, RoundReceived (RoundReceived);
    REHEARSE        =  5, max STATE_BYTES_MAX + AROUND_BYTES, Rehearse (State);
    REHEARSED       =  6, max SMALL_BYTES_MAX, Rehearsed (Rehearsed);
    SWITCHOVER_SOON =  7, max SMALL_BYTES_MAX, SwitchoverSoon (SwitchoverSoon);
    FINAL_STATE     =  8, max STATE_BYTES_MAX + AROUND_BYTES, FinalState (State);
    ASK_DIGEST      =  9, max SMALL_BYTES_MAX, AskDigest;
    DIGEST          = 10, max SMALL_BYTES_MAX, Digest (Digest);
    COMMIT          = 11, max SMALL_BYTES_MAX, Commit (Commit);
    COMMITTED       = 12, max SMALL_BYTES_MAX, Committed (Committed);
    COMMIT_REFUSED  = 13, max SMALL_BYTES_MAX, CommitRefused (Abandon);
    ALIVE           = 14, max SMALL_BYTES_MAX, Alive (Alive);
    PING            = 15, max SMALL_BYTES_MAX, Ping (Ping);
    PONG            = 16, max SMALL_BYTES_MAX, Pong (Pong);
    ABANDON         = 17, max SMALL_BYTES_MAX, Abandon (Abandon);
    QUERY           = 18, max SMALL_BYTES_MAX, Query (Query);
    ANSWER          = 19, max SMALL_BYTES_MAX, Answer (Answer);
}

/// The body of a message that says all by its kind: an empty map, so that it can grow fields.
#[derive(minicbor::Encode, minicbor::Decode)]
#[cbor(map)]
struct Empty {}

/// Why bytes are not a control frame. The peer's fault, always: close the connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The frame does not start with [`FRAME_MAGIC`].
    #[error("control frame starts with \"{}\" instead of its magic", .found.escape_ascii())]
    Magic {
        /// What it starts with.
        found: [u8; 4],
    },
    /// A flag that this version does not know; it may change what the body means.
    #[error("control frame has unknown flags {flags:#06x} or a reserved field {reserved:#010x}")]
    Reserved {
        /// As received; expected 0.
        flags: u16,
        /// As received; expected 0.
        reserved: u32,
    },
    /// A message that this version does not have.
    #[error("unknown control message {0}")]
    Kind(Kind),
    /// A message that is for somebody else.
    #[error("{kind} is no message for a {reader:?}")]
    Direction {
        /// Which message.
        kind: Kind,
        /// Who read it.
        reader: Reader,
    },
    /// A body longer than its kind allows.
    #[error("{kind} message of {length} bytes, at most {max}")]
    Length {
        /// Which message.
        kind: Kind,
        /// Bytes announced or given.
        length: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// The body is not the CBOR that the kind wants.
    #[error("{kind} message is malformed")]
    Body {
        /// Which message.
        kind: Kind,
        /// Where and how.
        #[source]
        source: minicbor::decode::Error,
    },
    /// The body is nested too deeply, or not in the form that CBOR has here.
    #[error("{kind} message is malformed")]
    Nesting {
        /// Which message.
        kind: Kind,
        /// What.
        #[source]
        source: cbor::NestingError,
    },
    /// Bytes are left over behind the body.
    #[error("{kind} message has {bytes} bytes too many")]
    Trailing {
        /// Which message.
        kind: Kind,
        /// How many.
        bytes: usize,
    },
    /// The body says something impossible.
    #[error("{kind} message says something impossible")]
    Value {
        /// Which message.
        kind: Kind,
        /// What.
        #[source]
        source: ValueError,
    },
}

/// Why a message of our own can't be sent: the VMM gave more than a message may carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot send a {kind} message")]
pub struct EncodeError {
    kind: Kind,
    #[source]
    source: ValueError,
}

enum BodyError {
    Unknown,
    Cbor(minicbor::decode::Error),
}

impl From<minicbor::decode::Error> for BodyError {
    fn from(error: minicbor::decode::Error) -> BodyError {
        BodyError::Cbor(error)
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    kind: U16,
    flags: U16,
    length: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<RawHeader>() == FRAME_HEADER_BYTES);

/// A checked header: its kind is known and its length is within the kind's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    kind: Kind,
    body_bytes: usize,
}

impl FrameHeader {
    /// Checks a header. Nothing behind it needs to have been read.
    pub fn parse(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<FrameHeader, DecodeError> {
        let raw: RawHeader = zerocopy::transmute!(*bytes);
        if raw.magic != FRAME_MAGIC {
            return Err(DecodeError::Magic { found: raw.magic });
        }
        let (flags, reserved) = (raw.flags.get(), raw.reserved.get());
        if flags != 0 || reserved != 0 {
            return Err(DecodeError::Reserved { flags, reserved });
        }
        let kind = Kind(raw.kind.get());
        let max = kind.body_bytes_max().ok_or(DecodeError::Kind(kind))?;
        let length = usize::try_from(raw.length.get()).unwrap_or(usize::MAX);
        if length > max {
            return Err(DecodeError::Length { kind, length, max });
        }
        Ok(FrameHeader { kind, body_bytes: length })
    }

    /// The same header, if such a message comes to this reader.
    pub fn for_reader(self, reader: Reader) -> Result<FrameHeader, DecodeError> {
        let kind = self.kind;
        if kind.goes_to(reader) { Ok(self) } else { Err(DecodeError::Direction { kind, reader }) }
    }

    /// Which message follows.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Bytes that follow; at most [`Kind::body_bytes_max`].
    pub fn body_bytes(&self) -> usize {
        self.body_bytes
    }
}

impl Control {
    /// Reads the body of a frame whose header was checked.
    pub fn decode(kind: Kind, body: &[u8]) -> Result<Control, DecodeError> {
        let max = kind.body_bytes_max().ok_or(DecodeError::Kind(kind))?;
        if body.len() > max {
            return Err(DecodeError::Length { kind, length: body.len(), max });
        }
        cbor::check_nesting(body).map_err(|source| DecodeError::Nesting { kind, source })?;
        let mut decoder = minicbor::Decoder::new(body);
        let message = Control::decode_body(kind, &mut decoder).map_err(|error| match error {
            BodyError::Unknown => DecodeError::Kind(kind),
            BodyError::Cbor(source) => DecodeError::Body { kind, source },
        })?;
        let bytes = body.len().saturating_sub(decoder.position());
        if bytes != 0 {
            return Err(DecodeError::Trailing { kind, bytes });
        }
        message
            .check()
            .and_then(|()| message.check_content())
            .map_err(|source| DecodeError::Value { kind, source })?;
        Ok(message.tidied())
    }

    fn check(&self) -> Result<(), ValueError> {
        match self {
            Control::Setup(setup) => setup.check(),
            Control::Rehearse(state) | Control::FinalState(state) => state.check(),
            Control::Alive(alive) => alive.check(),
            _ => Ok(()),
        }
    }

    fn check_content(&self) -> Result<(), ValueError> {
        match self {
            Control::Rehearse(state) | Control::FinalState(state) => state.check_content(),
            _ => Ok(()),
        }
    }

    fn tidied(mut self) -> Control {
        match &mut self {
            Control::Abandon(why) | Control::CommitRefused(why) => {
                why.reason = one_line(&why.reason);
            }
            Control::Alive(Alive { devices: Some(devices), .. }) => {
                devices.trouble = devices.trouble.as_deref().map(one_line);
            }
            _ => {}
        }
        self
    }
}

/// Appends the frame of a message, header and body, to `out`. On an error nothing is appended.
pub fn encode(message: &Control, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let kind = message.kind();
    message.check().map_err(|source| EncodeError { kind, source })?;
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_HEADER_BYTES]);
    let body_start = out.len();
    match message {
        Control::Abandon(_) | Control::CommitRefused(_) | Control::Alive(_) => {
            message.clone().tidied().encode_body(out);
        }
        _ => message.encode_body(out),
    }
    let body_bytes = out.len() - body_start;
    let max = kind.body_bytes_max().expect("every message has a kind with a limit");
    assert!(body_bytes <= max, "{kind} of {body_bytes} bytes passed its check");
    let header = RawHeader {
        magic: FRAME_MAGIC,
        kind: U16::new(kind.0),
        flags: U16::ZERO,
        length: U32::new(u32::try_from(body_bytes).expect("limits are below 4 GiB")),
        reserved: U32::ZERO,
    };
    out[start..body_start].copy_from_slice(header.as_bytes());
    Ok(())
}

fn append(payload: &impl Encode<()>, out: &mut Vec<u8>) {
    minicbor::encode(payload, out).expect("writing to memory does not fail");
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "kind {}", self.0),
        }
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
