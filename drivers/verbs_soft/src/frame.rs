//! What the soft provider's two ends say to each other.
//!
//! ```text
//! REQUESTS  header, `count` records, then the bytes of all its writes, one after the other
//! ACK       all requests before `sequence` are in place
//! NAK       request `sequence` failed with status `count`; all before are in place
//! RNR       request `sequence` found no receive: send it and all after it again, later
//! DATA      the bytes of the read `sequence` follow
//! BYE       the end was asked for
//! ```
//!
//! All little endian. Requests are numbered from 0 in the order of posting.

use martlet_verbs::Status;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 16;
/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = 24;
/// Most requests of one frame: with its records one frame's head is 6 KiB, and its pieces fit
/// into one `sendmsg`.
pub(super) const RECORDS_MAX: usize = 256;

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Requests {
        first: u64,
        count: usize,
        /// Whether this begins again after an RNR.
        again: bool,
    },
    Ack {
        placed: u64,
    },
    Nak {
        request: u64,
        status: Status,
    },
    Rnr {
        request: u64,
    },
    Data {
        request: u64,
    },
    Bye,
}

const REQUESTS: u8 = 1;
const ACK: u8 = 2;
const NAK: u8 = 3;
const RNR: u8 = 4;
const DATA: u8 = 5;
const BYE: u8 = 6;

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (kind, again, count, sequence) = match self {
            Header::Requests { first, count, again } => {
                let count = u16::try_from(count).unwrap_or(u16::MAX);
                (REQUESTS, u8::from(again), count, first)
            }
            Header::Ack { placed } => (ACK, 0, 0, placed),
            Header::Nak { request, status } => {
                (NAK, 0, u16::try_from(status.0).unwrap_or(u16::MAX), request)
            }
            Header::Rnr { request } => (RNR, 0, 0, request),
            Header::Data { request } => (DATA, 0, 0, request),
            Header::Bye => (BYE, 0, 0, 0),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = kind;
        bytes[1] = again;
        bytes[2..4].copy_from_slice(&count.to_le_bytes());
        bytes[8..].copy_from_slice(&sequence.to_le_bytes());
        bytes
    }

    /// `Err` says what is wrong with it.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, &'static str> {
        let [kind, again, count_low, count_high, reserved @ .., s0, s1, s2, s3, s4, s5, s6, s7] =
            *bytes;
        let count = u16::from_le_bytes([count_low, count_high]);
        let sequence = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        if reserved != [0; 4] || again > u8::from(kind == REQUESTS) {
            return Err("a header's reserved bits are set");
        }
        if count != 0 && kind != REQUESTS && kind != NAK {
            return Err("a header counts what does not follow");
        }
        match kind {
            REQUESTS if (1..=RECORDS_MAX).contains(&usize::from(count)) => Ok(Header::Requests {
                first: sequence,
                count: usize::from(count),
                again: again == 1,
            }),
            REQUESTS => Err("a frame has too many requests, or none"),
            ACK => Ok(Header::Ack { placed: sequence }),
            NAK if count != 0 => {
                Ok(Header::Nak { request: sequence, status: Status(u32::from(count)) })
            }
            NAK => Err("a failure says success"),
            RNR => Ok(Header::Rnr { request: sequence }),
            DATA => Ok(Header::Data { request: sequence }),
            BYE if sequence == 0 => Ok(Header::Bye),
            BYE => Err("a farewell has a number"),
            _ => Err("unknown kind of frame"),
        }
    }
}

/// One request as the peer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) verb: Verb,
    pub(super) bytes: u32,
    pub(super) key: u32,
    pub(super) address: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Write,
    WriteWithImmediate(u32),
    Read,
}

impl Record {
    /// Bytes of it that follow the records.
    pub(super) fn payload_bytes(&self) -> u32 {
        if self.verb == Verb::Read { 0 } else { self.bytes }
    }

    pub(super) fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let (verb, immediate) = match self.verb {
            Verb::Write => (1, 0),
            Verb::WriteWithImmediate(immediate) => (2, immediate),
            Verb::Read => (3, 0),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = verb;
        bytes[4..8].copy_from_slice(&immediate.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    /// `Err` says what is wrong with it.
    pub(super) fn parse(bytes: &[u8; RECORD_BYTES]) -> Result<Record, &'static str> {
        let [verb, reserved @ .., a0, a1, a2, a3, a4, a5, a6, a7] = *bytes;
        let [r0, r1, r2, i0, i1, i2, i3, b0, b1, b2, b3, k0, k1, k2, k3] = reserved;
        let immediate = u32::from_le_bytes([i0, i1, i2, i3]);
        if [r0, r1, r2] != [0; 3] || (verb != 2 && immediate != 0) {
            return Err("a request's reserved bits are set");
        }
        let verb = match verb {
            1 => Verb::Write,
            2 => Verb::WriteWithImmediate(immediate),
            3 => Verb::Read,
            _ => return Err("unknown kind of request"),
        };
        let bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        if bytes > martlet_verbs::MESSAGE_BYTES_MAX {
            return Err("a request has too many bytes");
        }
        let key = u32::from_le_bytes([k0, k1, k2, k3]);
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        Ok(Record { verb, bytes, key, address })
    }
}

/// Takes any bytes: what parses is written again as it was. For fuzzing.
pub(super) fn fuzz(data: &[u8]) {
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::parse(head) else { return };
        assert_eq!(&header.to_bytes(), head);
        rest = behind;
        let count = if let Header::Requests { count, .. } = header { count } else { 0 };
        let mut payload = 0u64;
        for _ in 0..count {
            let Some((bytes, behind)) = rest.split_first_chunk::<RECORD_BYTES>() else { return };
            let Ok(record) = Record::parse(bytes) else { return };
            assert_eq!(&record.to_bytes(), bytes);
            payload += u64::from(record.payload_bytes());
            rest = behind;
        }
        rest = usize::try_from(payload).ok().and_then(|skip| rest.get(skip..)).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_survive() {
        let status = Status::REMOTE_ACCESS;
        for header in [
            Header::Requests { first: 7, count: RECORDS_MAX, again: true },
            Header::Requests { first: u64::MAX, count: 1, again: false },
            Header::Ack { placed: 3 },
            Header::Nak { request: 9, status },
            Header::Rnr { request: 1 },
            Header::Data { request: 2 },
            Header::Bye,
        ] {
            assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        }
        assert!(Header::parse(&[0; HEADER_BYTES]).is_err());
        let none = Header::Requests { first: 0, count: 0, again: false };
        assert!(Header::parse(&none.to_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_survive(
            kind in 0u8..8, verb in 0u8..5, mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            tame in any::<bool>(),
        ) {
            // Random bytes alone hardly ever get past the first check.
            if tame && bytes.len() > 40 {
                bytes[..8].copy_from_slice(&[kind, 0, 1, 0, 0, 0, 0, 0]);
                bytes[16..20].copy_from_slice(&[verb, 0, 0, 0]);
            }
            fuzz(&bytes);
        }
    }
}
