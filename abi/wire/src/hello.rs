//! The first bytes on every connection, both ways.
//!
//! ```text
//! Hello, from whoever connects: 64 bytes      HelloReply, from whoever listens: 32 bytes
//! offset  size  field                         offset  size  field
//!      0     8  magic  89 "martlet"                0     8  magic  89 "MARTLET"
//!      8     2  version_min                        8     2  version, 0 if refused
//!     10     2  version_max                       10     2  status, 0 if accepted
//!     12     2  role                              12     2  version_min of the listener
//!     14     2  channel                           14     2  version_max of the listener
//!     16    16  token                             16    16  reserved, sent as 0
//!     32    32  reserved, sent as 0
//! ```
//!
//! Reserved bytes are not looked at: this layout must be readable by every version for ever, and
//! a later one may put something there that an earlier one can do without.
//!
//! The first byte is not ASCII, so no text protocol starts with it.

use core::fmt;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of a [`Hello`].
pub const HELLO_MAGIC: [u8; 8] = *b"\x89martlet";
/// First bytes of a [`HelloReply`].
pub const REPLY_MAGIC: [u8; 8] = *b"\x89MARTLET";
/// Bytes of a [`Hello`].
pub const HELLO_BYTES: usize = 64;
/// Bytes of a [`HelloReply`].
pub const REPLY_BYTES: usize = 32;

/// The version that this build speaks best.
pub const VERSION: u16 = 1;
/// The oldest version that this build still speaks: the one before [`VERSION`], once there is one.
pub const VERSION_MIN: u16 = 1;

const _: () = assert!(matches!(VERSION - VERSION_MIN, 0 | 1), "N and N-1, no more");

/// A range of protocol versions, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Oldest; at least 1.
    pub min: u16,
    /// Newest; at least `min`.
    pub max: u16,
}

/// What this build speaks.
pub const OUR_VERSIONS: Versions = Versions { min: VERSION_MIN, max: VERSION };

impl Versions {
    /// The newest version in both ranges, if any.
    pub fn highest_common(self, other: Versions) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            write!(f, "version {}", self.min)
        } else {
            write!(f, "versions {} to {}", self.min, self.max)
        }
    }
}

/// What a connection is for. Open: a newer peer may have more.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Role(pub u16);

impl Role {
    /// The control connection of an attempt; its first message is `Setup`.
    pub const CONTROL: Role = Role(1);
    /// A data channel of an attempt that was set up on a control connection.
    pub const DATA: Role = Role(2);
    /// One `Query`, one `Answer`.
    pub const QUERY: Role = Role(3);
}

impl fmt::Debug for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Role::CONTROL => f.write_str("control"),
            Role::DATA => f.write_str("data"),
            Role::QUERY => f.write_str("query"),
            Role(other) => write!(f, "role {other}"),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What whoever connects says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What it speaks.
    pub versions: Versions,
    /// What the connection is for.
    pub role: Role,
    /// Number of a data channel, from 0; 0 for other roles.
    pub channel: u16,
    /// What a data channel must show (from `SetupDone`); zeros for other roles.
    pub token: [u8; 16],
}

/// Why a listener refuses, on the wire. Open: a newer listener may have more reasons.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

impl Status {
    /// Accepted.
    pub const OK: Status = Status(0);
    /// No version that both sides speak.
    pub const VERSION: Status = Status(1);
    /// The listener has no such role.
    pub const ROLE: Status = Status(2);
    /// Another migration to this destination is under way.
    pub const BUSY: Status = Status(3);
    /// A guest has arrived at this destination already; it takes no other.
    pub const OCCUPIED: Status = Status(4);
    /// The token is not the attempt's, or no attempt waits for data channels.
    pub const TOKEN: Status = Status(5);
    /// The channel's number is taken or not below the number announced.
    pub const CHANNEL: Status = Status(6);
    /// Too many connections at once.
    pub const LIMIT: Status = Status(7);
    /// The listener is shutting down.
    pub const STOPPING: Status = Status(8);
    /// RDMA is for a listener at an address `rdma:`.
    pub const NO_RDMA: Status = Status(9);

    fn words(self) -> Option<&'static str> {
        Some(match self {
            Status::OK => "accepted",
            Status::VERSION => "no common protocol version",
            Status::ROLE => "unknown connection role",
            Status::BUSY => "another migration to this destination is under way",
            Status::OCCUPIED => "the destination already has a guest",
            Status::TOKEN => "the data channel belongs to no migration that waits for one",
            Status::CHANNEL => "the data channel's number is taken or out of range",
            Status::LIMIT => "the destination has too many connections",
            Status::STOPPING => "the destination is shutting down",
            Status::NO_RDMA => {
                "it takes no RDMA, for it does not listen at an address rdma:; connect to tcp:"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words() {
            Some(words) => f.write_str(words),
            None => write!(f, "refused for a reason unknown here, number {}", self.0),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({}: {self})", self.0)
    }
}

/// What the listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// [`Status::OK`], or why the connection will be closed now.
    pub status: Status,
    /// The version to speak from here on; 0 if refused.
    pub version: u16,
    /// What the listener speaks.
    pub versions: Versions,
}

/// The first bytes of something that is not martlet, kept for the error message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FirstBytes {
    bytes: [u8; FirstBytes::MAX],
    count: usize,
}

impl FirstBytes {
    const MAX: usize = 16;

    fn of(bytes: &[u8]) -> FirstBytes {
        let mut first = FirstBytes { bytes: [0; FirstBytes::MAX], count: 0 };
        for (to, from) in first.bytes.iter_mut().zip(bytes) {
            *to = *from;
            first.count += 1;
        }
        first
    }
}

impl fmt::Display for FirstBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.bytes.get(..self.count).unwrap_or_default();
        write!(f, "\"{}\"", seen.escape_ascii())
    }
}

impl fmt::Debug for FirstBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why first bytes are not a hello or a reply. The peer's fault, always: close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// Something else: a port scanner, a web browser, or the wrong port.
    #[error("the peer does not speak martlet's protocol: it sent {0}")]
    NotMartlet(FirstBytes),
    /// A version range that is empty or has a version 0.
    #[error("the peer's version range {min} to {max} makes no sense")]
    VersionRange {
        /// As received.
        min: u16,
        /// As received.
        max: u16,
    },
    /// An accepting reply with a version that we did not offer.
    #[error("the destination chose version {chosen}, which was not offered ({offered})")]
    VersionChosen {
        /// As received.
        chosen: u16,
        /// What we speak.
        offered: Versions,
    },
    /// No version that both sides speak.
    #[error("no common protocol version: here {ours}, the peer {theirs}")]
    NoCommonVersion {
        /// What we speak.
        ours: Versions,
        /// What the peer speaks.
        theirs: Versions,
    },
    /// The listener does not want this connection.
    #[error("the destination refused the connection: {0}")]
    Refused(Status),
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHello {
    magic: [u8; 8],
    version_min: U16,
    version_max: U16,
    role: U16,
    channel: U16,
    token: [u8; 16],
    reserved: [u8; 32],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawReply {
    magic: [u8; 8],
    version: U16,
    status: U16,
    version_min: U16,
    version_max: U16,
    reserved: [u8; 16],
}

const _: () = assert!(size_of::<RawHello>() == HELLO_BYTES);
const _: () = assert!(size_of::<RawReply>() == REPLY_BYTES);

/// Whether bytes, of which perhaps only the first few have come, can still become a hello.
/// Whoever sends `GET / HTTP/1.1` is told apart with its first byte, not after a timeout.
pub fn check_hello_prefix(bytes: &[u8]) -> Result<(), HelloError> {
    check_prefix(bytes, HELLO_MAGIC)
}

/// As [`check_hello_prefix`], for a reply.
pub fn check_reply_prefix(bytes: &[u8]) -> Result<(), HelloError> {
    check_prefix(bytes, REPLY_MAGIC)
}

fn check_prefix(bytes: &[u8], magic: [u8; 8]) -> Result<(), HelloError> {
    if bytes.iter().zip(magic).all(|(found, wanted)| *found == wanted) {
        Ok(())
    } else {
        Err(HelloError::NotMartlet(FirstBytes::of(bytes)))
    }
}

fn checked_versions(min: U16, max: U16) -> Result<Versions, HelloError> {
    let (min, max) = (min.get(), max.get());
    if min == 0 || min > max {
        return Err(HelloError::VersionRange { min, max });
    }
    Ok(Versions { min, max })
}

impl Hello {
    /// The hello of a control connection.
    pub fn control() -> Hello {
        Hello { versions: OUR_VERSIONS, role: Role::CONTROL, channel: 0, token: [0; 16] }
    }

    /// The hello of a connection that asks about an attempt.
    pub fn query() -> Hello {
        Hello { role: Role::QUERY, ..Hello::control() }
    }

    /// The hello of data channel `channel`.
    pub fn data(channel: u16, token: [u8; 16]) -> Hello {
        Hello { role: Role::DATA, channel, token, ..Hello::control() }
    }

    /// As it goes over the wire.
    pub fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        zerocopy::transmute!(RawHello {
            magic: HELLO_MAGIC,
            version_min: U16::new(self.versions.min),
            version_max: U16::new(self.versions.max),
            role: U16::new(self.role.0),
            channel: U16::new(self.channel),
            token: self.token,
            reserved: [0; 32],
        })
    }

    /// Reads a hello. The role may be one that this version does not know, and the versions may
    /// have none in common with ours: see [`Hello::negotiate`].
    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, HelloError> {
        check_hello_prefix(bytes)?;
        let raw: RawHello = zerocopy::transmute!(*bytes);
        Ok(Hello {
            versions: checked_versions(raw.version_min, raw.version_max)?,
            role: Role(raw.role.get()),
            channel: raw.channel.get(),
            token: raw.token,
        })
    }

    /// The version to speak with this peer.
    pub fn negotiate(&self) -> Result<u16, HelloError> {
        OUR_VERSIONS
            .highest_common(self.versions)
            .ok_or(HelloError::NoCommonVersion { ours: OUR_VERSIONS, theirs: self.versions })
    }
}

impl HelloReply {
    /// Lets the peer in.
    pub fn accept(version: u16) -> HelloReply {
        HelloReply { status: Status::OK, version, versions: OUR_VERSIONS }
    }

    /// Sends the peer away.
    pub fn refuse(status: Status) -> HelloReply {
        HelloReply { status, version: 0, versions: OUR_VERSIONS }
    }

    /// As it goes over the wire.
    pub fn to_bytes(&self) -> [u8; REPLY_BYTES] {
        zerocopy::transmute!(RawReply {
            magic: REPLY_MAGIC,
            version: U16::new(self.version),
            status: U16::new(self.status.0),
            version_min: U16::new(self.versions.min),
            version_max: U16::new(self.versions.max),
            reserved: [0; 16],
        })
    }

    /// Reads a reply, accepting or not.
    pub fn parse(bytes: &[u8; REPLY_BYTES]) -> Result<HelloReply, HelloError> {
        check_reply_prefix(bytes)?;
        let raw: RawReply = zerocopy::transmute!(*bytes);
        Ok(HelloReply {
            status: Status(raw.status.get()),
            version: raw.version.get(),
            versions: checked_versions(raw.version_min, raw.version_max)?,
        })
    }

    /// The version to speak from here on, or why there is none.
    pub fn accepted(&self) -> Result<u16, HelloError> {
        match self.status {
            Status::OK if (VERSION_MIN..=VERSION).contains(&self.version) => Ok(self.version),
            Status::OK => {
                Err(HelloError::VersionChosen { chosen: self.version, offered: OUR_VERSIONS })
            }
            Status::VERSION => {
                Err(HelloError::NoCommonVersion { ours: OUR_VERSIONS, theirs: self.versions })
            }
            status => Err(HelloError::Refused(status)),
        }
    }
}
