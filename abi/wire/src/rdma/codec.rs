//! The messages' layouts, checked both ways.

use super::{
    CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Grant, Pinning, QUEUE_HELLO_BYTES, QUEUES_MAX, QueueAddress,
    QueueHello, RDMA_HEADER_BYTES, RDMA_MAGIC, RDMA_VERSION, RdmaError, RdmaMessage, RoundEnd,
    SPANS_MAX, Terms, UNIT_CHUNKS_MAX, WireProvider, WireSpan, ZERO_RANGES_MAX, ZeroList,
    ZeroRange,
};
use crate::control::REASON_BYTES_MAX;
use crate::control_check::one_line;
use martlet_units::PAGE_SIZE;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const QUEUE_MAGIC: [u8; 4] = *b"mRQP";

macro_rules! layout {
    ($(#[$meta:meta])* $name:ident, $bytes:literal, { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        struct $name { $($field: $type),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

layout!(RawHeader, 16, { magic: [u8; 4], kind: U16, flags: U16, length: U32, reserved: U32 });
layout!(RawTerms, 32, {
    version: U16, queues: U16, pinning: U16, reserved: U16,
    unit_chunks: U32, reserved2: U32, chunk_bytes: U64, pinned_bytes_max: U64,
});
layout!(RawSpan, 16, { region: U16, reserved: U16, chunks: U32, first_chunk: U64 });
layout!(RawGrant, 32, { span: RawSpan, address: U64, key: U32, reserved: U32 });
layout!(RawRange, 16, { region: U16, reserved: U16, count: U32, first_page: U64 });
layout!(RawRoundEnd, 16, { round: U32, last: U32, zero_lists: U64 });
layout!(RawRevoked, 8, { rounds: U32, reserved: U32 });
layout!(RawQueueAddress, 8, { provider: U16, port: U16, reserved: U32 });
layout!(RawQueueHello, 32, {
    magic: [u8; 4], version: U16, queue: U16, token: [u8; 16], reserved: U64,
});

const KIND_OFFER: u16 = 1;
const KIND_ACCEPT: u16 = 2;
const KIND_KEY_REQUEST: u16 = 3;
const KIND_KEY_GRANT: u16 = 4;
const KIND_KEY_REFUSAL: u16 = 5;
const KIND_KEY_DROP: u16 = 6;
const KIND_KEY_DROPPED: u16 = 7;
const KIND_ZERO_LIST: u16 = 8;
const KIND_ZERO_DONE: u16 = 9;
const KIND_ROUND_END: u16 = 10;
const KIND_HEARTBEAT: u16 = 11;
const KIND_CLOSE: u16 = 12;
const KIND_REVOKED: u16 = 13;
const KIND_QUEUE_ADDRESS: u16 = 14;
/// The highest kind; they are numbered from 1 without gaps.
pub const RDMA_KIND_MAX: u16 = KIND_QUEUE_ADDRESS;

/// Which bodies a kind may have: a fixed part, and entries of this size from `min` to `max`.
struct Shape {
    fixed: usize,
    entry: usize,
    min: usize,
    max: usize,
}

const fn shape(kind: u16) -> Option<Shape> {
    const fn fixed(fixed: usize) -> Option<Shape> {
        Some(Shape { fixed, entry: 1, min: 0, max: 0 })
    }
    const fn list(entry: usize) -> Option<Shape> {
        Some(Shape { fixed: 0, entry, min: 1, max: SPANS_MAX })
    }
    match kind {
        KIND_OFFER | KIND_ACCEPT => fixed(size_of::<RawTerms>()),
        KIND_KEY_REQUEST | KIND_KEY_REFUSAL | KIND_KEY_DROP | KIND_KEY_DROPPED => {
            list(size_of::<RawSpan>())
        }
        KIND_KEY_GRANT => list(size_of::<RawGrant>()),
        KIND_ZERO_LIST => {
            Some(Shape { fixed: 8, entry: size_of::<RawRange>(), min: 1, max: ZERO_RANGES_MAX })
        }
        KIND_ROUND_END => fixed(size_of::<RawRoundEnd>()),
        KIND_ZERO_DONE | KIND_HEARTBEAT | KIND_REVOKED | KIND_QUEUE_ADDRESS => fixed(8),
        KIND_CLOSE => Some(Shape { fixed: 0, entry: 1, min: 0, max: REASON_BYTES_MAX }),
        _ => None,
    }
}

/// A checked header: its kind is known, and a body of its length is one that the kind may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaHeader {
    kind: u16,
    body_bytes: usize,
}

impl RdmaHeader {
    /// Checks a header. Nothing behind it needs to have been read.
    pub fn parse(bytes: &[u8; RDMA_HEADER_BYTES]) -> Result<RdmaHeader, RdmaError> {
        let raw: RawHeader = zerocopy::transmute!(*bytes);
        if raw.magic != RDMA_MAGIC {
            return Err(RdmaError::Magic(raw.magic));
        }
        let (flags, reserved) = (raw.flags.get(), raw.reserved.get());
        if flags != 0 || reserved != 0 {
            return Err(RdmaError::Reserved { flags, reserved: u64::from(reserved) });
        }
        let kind = raw.kind.get();
        let length = usize::try_from(raw.length.get()).unwrap_or(usize::MAX);
        check_length(kind, length)?;
        Ok(RdmaHeader { kind, body_bytes: length })
    }

    /// Number of the message's kind.
    pub fn kind(&self) -> u16 {
        self.kind
    }

    /// Bytes that follow; at most 8200.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes
    }
}

fn check_length(kind: u16, length: usize) -> Result<Shape, RdmaError> {
    let shape = shape(kind).ok_or(RdmaError::Kind(kind))?;
    let wrong = RdmaError::Length { kind, length };
    let entries = length.checked_sub(shape.fixed).ok_or(wrong)?;
    let whole = entries.is_multiple_of(shape.entry);
    if !whole || !(shape.min..=shape.max).contains(&(entries / shape.entry)) {
        return Err(wrong);
    }
    Ok(shape)
}

impl Terms {
    fn parse(raw: &RawTerms) -> Result<Terms, RdmaError> {
        let wrong = |what, value| Err(RdmaError::Terms { what, value });
        let reserved = u64::from(raw.reserved.get()) | u64::from(raw.reserved2.get());
        if reserved != 0 {
            return Err(RdmaError::Reserved { flags: 0, reserved });
        }
        let pinning = match raw.pinning.get() {
            0 => Pinning::Dynamic,
            1 => Pinning::All,
            other => return wrong("the pinning", u64::from(other)),
        };
        let terms = Terms {
            version: raw.version.get(),
            queues: raw.queues.get(),
            pinning,
            unit_chunks: raw.unit_chunks.get(),
            chunk_bytes: raw.chunk_bytes.get(),
            pinned_bytes_max: raw.pinned_bytes_max.get(),
        };
        terms.check().map(|()| terms)
    }

    /// Whether anybody can work by them.
    pub fn check(&self) -> Result<(), RdmaError> {
        let wrong = |what, value| Err(RdmaError::Terms { what, value });
        let chunks = CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX;
        if self.version != RDMA_VERSION {
            return wrong("the version", u64::from(self.version));
        }
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return wrong("the number of queue pairs", u64::from(self.queues));
        }
        if !self.chunk_bytes.is_power_of_two() || !chunks.contains(&self.chunk_bytes) {
            return wrong("the chunk's length", self.chunk_bytes);
        }
        if !self.unit_chunks.is_power_of_two() || self.unit_chunks > UNIT_CHUNKS_MAX {
            return wrong("the number of chunks in a unit", u64::from(self.unit_chunks));
        }
        Ok(())
    }

    fn raw(&self) -> RawTerms {
        RawTerms {
            version: self.version.into(),
            queues: self.queues.into(),
            pinning: U16::new(u16::from(self.pinning == Pinning::All)),
            reserved: U16::ZERO,
            unit_chunks: self.unit_chunks.into(),
            reserved2: U32::ZERO,
            chunk_bytes: self.chunk_bytes.into(),
            pinned_bytes_max: self.pinned_bytes_max.into(),
        }
    }
}

impl WireSpan {
    /// `None` if it is empty, has reserved bits or its end can't be counted.
    fn parse(raw: &RawSpan) -> Option<WireSpan> {
        let span = WireSpan {
            region: raw.region.get(),
            first_chunk: raw.first_chunk.get(),
            chunks: raw.chunks.get(),
        };
        span.first_chunk.checked_add(u64::from(span.chunks))?;
        (span.chunks > 0 && raw.reserved == 0).then_some(span)
    }

    fn raw(&self) -> RawSpan {
        RawSpan {
            region: self.region.into(),
            reserved: U16::ZERO,
            chunks: self.chunks.into(),
            first_chunk: self.first_chunk.into(),
        }
    }
}

impl Grant {
    /// `None` if the span is wrong or the address is not one of a page.
    fn parse(raw: &RawGrant) -> Option<Grant> {
        let span = WireSpan::parse(&raw.span)?;
        let grant = Grant { span, address: raw.address.get(), key: raw.key.get() };
        let aligned = grant.address.is_multiple_of(PAGE_SIZE);
        (aligned && raw.reserved == 0).then_some(grant)
    }

    fn raw(&self) -> RawGrant {
        let (address, key) = (self.address.into(), self.key.into());
        RawGrant { span: self.span.raw(), address, key, reserved: U32::ZERO }
    }
}

impl ZeroRange {
    /// `None` if it is empty, has reserved bits or its end can't be counted.
    fn parse(raw: &RawRange) -> Option<ZeroRange> {
        let range = ZeroRange {
            region: raw.region.get(),
            first_page: raw.first_page.get(),
            count: raw.count.get(),
        };
        range.first_page.checked_add(u64::from(range.count))?;
        (range.count > 0 && raw.reserved == 0).then_some(range)
    }

    fn raw(&self) -> RawRange {
        RawRange {
            region: self.region.into(),
            reserved: U16::ZERO,
            count: self.count.into(),
            first_page: self.first_page.into(),
        }
    }
}

/// The body's entries, each checked.
fn entries<R: FromBytes + Immutable + KnownLayout + Unaligned, T>(
    kind: u16,
    body: &[u8],
    parse: impl Fn(&R) -> Option<T>,
) -> Result<Vec<T>, RdmaError> {
    let raw = <[R]>::ref_from_bytes(body).map_err(|_| bad_length(kind, body))?;
    let entry = |(index, raw)| parse(raw).ok_or(RdmaError::Entry { kind, index });
    raw.iter().enumerate().map(entry).collect()
}

fn bad_length(kind: u16, body: &[u8]) -> RdmaError {
    RdmaError::Length { kind, length: body.len() }
}

fn fixed<R: FromBytes + Immutable + KnownLayout>(kind: u16, body: &[u8]) -> Result<R, RdmaError> {
    R::read_from_bytes(body).map_err(|_| bad_length(kind, body))
}

impl RdmaMessage {
    /// Number of the message's kind.
    pub fn kind(&self) -> u16 {
        match self {
            RdmaMessage::Offer(_) => KIND_OFFER,
            RdmaMessage::Accept(_) => KIND_ACCEPT,
            RdmaMessage::KeyRequest(_) => KIND_KEY_REQUEST,
            RdmaMessage::KeyGrant(_) => KIND_KEY_GRANT,
            RdmaMessage::KeyRefusal(_) => KIND_KEY_REFUSAL,
            RdmaMessage::KeyDrop(_) => KIND_KEY_DROP,
            RdmaMessage::KeyDropped(_) => KIND_KEY_DROPPED,
            RdmaMessage::ZeroList(_) => KIND_ZERO_LIST,
            RdmaMessage::ZeroDone { .. } => KIND_ZERO_DONE,
            RdmaMessage::RoundEnd(_) => KIND_ROUND_END,
            RdmaMessage::Heartbeat { .. } => KIND_HEARTBEAT,
            RdmaMessage::Close { .. } => KIND_CLOSE,
            RdmaMessage::Revoked { .. } => KIND_REVOKED,
            RdmaMessage::QueueAddress(_) => KIND_QUEUE_ADDRESS,
        }
    }

    /// Reads the body of a frame whose header was checked.
    pub fn decode(kind: u16, body: &[u8]) -> Result<RdmaMessage, RdmaError> {
        let shape = check_length(kind, body.len())?;
        let spans = || entries(kind, body, WireSpan::parse);
        Ok(match kind {
            KIND_OFFER => RdmaMessage::Offer(Terms::parse(&fixed(kind, body)?)?),
            KIND_ACCEPT => RdmaMessage::Accept(Terms::parse(&fixed(kind, body)?)?),
            KIND_KEY_REQUEST => RdmaMessage::KeyRequest(spans()?),
            KIND_KEY_GRANT => RdmaMessage::KeyGrant(entries(kind, body, Grant::parse)?),
            KIND_KEY_REFUSAL => RdmaMessage::KeyRefusal(spans()?),
            KIND_KEY_DROP => RdmaMessage::KeyDrop(spans()?),
            KIND_KEY_DROPPED => RdmaMessage::KeyDropped(spans()?),
            KIND_ZERO_LIST => {
                let (sequence, ranges) =
                    body.split_at_checked(shape.fixed).ok_or(bad_length(kind, body))?;
                let sequence = fixed::<U64>(kind, sequence)?.get();
                let ranges = entries(kind, ranges, ZeroRange::parse)?;
                RdmaMessage::ZeroList(ZeroList { sequence, ranges })
            }
            KIND_ZERO_DONE => RdmaMessage::ZeroDone { sequence: fixed::<U64>(kind, body)?.get() },
            KIND_ROUND_END => {
                let raw: RawRoundEnd = fixed(kind, body)?;
                let last = match raw.last.get() {
                    0 => false,
                    1 => true,
                    _ => return Err(RdmaError::Entry { kind, index: 0 }),
                };
                let (round, zero_lists) = (raw.round.get(), raw.zero_lists.get());
                RdmaMessage::RoundEnd(RoundEnd { round, last, zero_lists })
            }
            KIND_HEARTBEAT => RdmaMessage::Heartbeat { sent_ns: fixed::<U64>(kind, body)?.get() },
            KIND_CLOSE => {
                let text = core::str::from_utf8(body).map_err(|_| RdmaError::Text)?;
                RdmaMessage::Close { reason: one_line(text) }
            }
            KIND_REVOKED => {
                let raw: RawRevoked = fixed(kind, body)?;
                let reserved = u64::from(raw.reserved.get());
                if reserved != 0 {
                    return Err(RdmaError::Reserved { flags: 0, reserved });
                }
                RdmaMessage::Revoked { rounds: raw.rounds.get() }
            }
            KIND_QUEUE_ADDRESS => {
                let raw: RawQueueAddress = fixed(kind, body)?;
                let reserved = u64::from(raw.reserved.get());
                if reserved != 0 {
                    return Err(RdmaError::Reserved { flags: 0, reserved });
                }
                let (provider, port) = (WireProvider(raw.provider.get()), raw.port.get());
                if provider.0 == 0 || port == 0 {
                    return Err(RdmaError::Entry { kind, index: 0 });
                }
                RdmaMessage::QueueAddress(QueueAddress { provider, port })
            }
            _ => return Err(RdmaError::Kind(kind)),
        })
    }

    /// Appends the frame, header and body, to `out`.
    ///
    /// # Panics
    /// If a list is empty or longer than its limit: whoever makes a message keeps to that.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; RDMA_HEADER_BYTES]);
        self.encode_body(out);
        let kind = self.kind();
        let body_bytes = out.len() - start - RDMA_HEADER_BYTES;
        let shape = check_length(kind, body_bytes);
        assert!(shape.is_ok(), "own RDMA message {kind} has a body of {body_bytes} bytes");
        let header = RawHeader {
            magic: RDMA_MAGIC,
            kind: kind.into(),
            flags: U16::ZERO,
            length: U32::new(u32::try_from(body_bytes).expect("checked against its limit")),
            reserved: U32::ZERO,
        };
        out[start..start + RDMA_HEADER_BYTES].copy_from_slice(header.as_bytes());
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            RdmaMessage::Offer(terms) | RdmaMessage::Accept(terms) => {
                out.extend_from_slice(terms.raw().as_bytes());
            }
            RdmaMessage::KeyRequest(spans)
            | RdmaMessage::KeyRefusal(spans)
            | RdmaMessage::KeyDrop(spans)
            | RdmaMessage::KeyDropped(spans) => {
                spans.iter().for_each(|span| out.extend_from_slice(span.raw().as_bytes()));
            }
            RdmaMessage::KeyGrant(grants) => {
                grants.iter().for_each(|grant| out.extend_from_slice(grant.raw().as_bytes()));
            }
            RdmaMessage::ZeroList(list) => {
                out.extend_from_slice(&list.sequence.to_le_bytes());
                list.ranges.iter().for_each(|range| out.extend_from_slice(range.raw().as_bytes()));
            }
            RdmaMessage::ZeroDone { sequence: number }
            | RdmaMessage::Heartbeat { sent_ns: number } => {
                out.extend_from_slice(&number.to_le_bytes());
            }
            RdmaMessage::RoundEnd(end) => {
                let raw = RawRoundEnd {
                    round: end.round.into(),
                    last: U32::new(u32::from(end.last)),
                    zero_lists: end.zero_lists.into(),
                };
                out.extend_from_slice(raw.as_bytes());
            }
            RdmaMessage::Close { reason } => out.extend_from_slice(one_line(reason).as_bytes()),
            RdmaMessage::Revoked { rounds } => {
                let raw = RawRevoked { rounds: (*rounds).into(), reserved: U32::ZERO };
                out.extend_from_slice(raw.as_bytes());
            }
            RdmaMessage::QueueAddress(address) => {
                let (provider, port) = (address.provider.0.into(), address.port.into());
                out.extend_from_slice(
                    RawQueueAddress { provider, port, reserved: U32::ZERO }.as_bytes(),
                );
            }
        }
    }
}

impl QueueHello {
    /// As it goes into the private data.
    pub fn to_bytes(&self) -> [u8; QUEUE_HELLO_BYTES] {
        let raw = RawQueueHello {
            magic: QUEUE_MAGIC,
            version: U16::new(RDMA_VERSION),
            queue: self.queue.into(),
            token: self.token,
            reserved: U64::ZERO,
        };
        zerocopy::transmute!(raw)
    }

    /// Reads private data, which may have anything behind the hello: the connection manager does
    /// not keep its length.
    pub fn parse(data: &[u8]) -> Result<QueueHello, RdmaError> {
        let wrong = RdmaError::Length { kind: 0, length: data.len() };
        let (raw, _) = RawQueueHello::read_from_prefix(data).map_err(|_| wrong)?;
        if raw.magic != QUEUE_MAGIC {
            return Err(RdmaError::Magic(raw.magic));
        }
        if raw.version.get() != RDMA_VERSION {
            let value = u64::from(raw.version.get());
            return Err(RdmaError::Terms { what: "a queue pair's version", value });
        }
        let (queue, reserved) = (raw.queue.get(), raw.reserved.get());
        if reserved != 0 {
            return Err(RdmaError::Reserved { flags: 0, reserved });
        }
        if queue >= QUEUES_MAX {
            return Err(RdmaError::Terms { what: "a queue pair's number", value: queue.into() });
        }
        Ok(QueueHello { queue, token: raw.token })
    }
}
