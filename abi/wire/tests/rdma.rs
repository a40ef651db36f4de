//! Messages beside RDMA queue pairs: frozen bytes, hostile bytes, and the limits by name.

#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_wire::fuzz;
use martlet_wire::rdma::{
    Grant, Pinning, QueueAddress, QueueHello, RDMA_HEADER_BYTES, RDMA_KIND_MAX, RdmaError,
    RdmaHeader, RdmaMessage, RoundEnd, SPANS_MAX, Terms, WireProvider, WireSpan, ZERO_RANGES_MAX,
    ZeroList, ZeroRange,
};
use proptest::prelude::*;

/// Bytes from hexadecimal text; white space is for the reader.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let value = |digit: u8| u8::try_from((digit as char).to_digit(16).unwrap()).unwrap();
    digits.chunks_exact(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect()
}

const TERMS: Terms = Terms {
    version: 1,
    queues: 4,
    pinning: Pinning::All,
    unit_chunks: 2,
    chunk_bytes: 32 << 20,
    pinned_bytes_max: 0x1_0000_0000,
};
const SPAN: WireSpan = WireSpan { region: 1, first_chunk: 0x0203_0405, chunks: 6 };
const RANGE: ZeroRange = ZeroRange { region: 2, first_page: 0x1_0000_0000, count: 0x0102 };

/// Each message with its bytes, typed by hand from the table in `rdma.rs`.
fn vectors() -> Vec<(RdmaMessage, String)> {
    let head = |kind: &str, length: &str| format!("6d52444d {kind} 0000 {length} 00000000");
    let terms = "0100 0400 0100 0000 02000000 00000000 0000000200000000 0000000001000000";
    let span = "0100 0000 06000000 0504030200000000";
    let range = "0200 0000 02010000 0000000001000000";
    let grant = Grant { span: SPAN, address: 0x7fff_0000_1000, key: 0xa1b2_c3d4 };
    let list = ZeroList { sequence: 7, ranges: vec![RANGE, RANGE] };
    let end = RoundEnd { round: 9, last: true, zero_lists: 0x0a };
    vec![
        (RdmaMessage::Offer(TERMS), head("0100", "20000000") + terms),
        (RdmaMessage::Accept(TERMS), head("0200", "20000000") + terms),
        (RdmaMessage::KeyRequest(vec![SPAN; 2]), head("0300", "20000000") + span + span),
        (
            RdmaMessage::KeyGrant(vec![grant]),
            head("0400", "20000000") + span + "001000 00ff7f 0000 d4c3b2a1 00000000",
        ),
        (RdmaMessage::KeyRefusal(vec![SPAN]), head("0500", "10000000") + span),
        (RdmaMessage::KeyDrop(vec![SPAN]), head("0600", "10000000") + span),
        (RdmaMessage::KeyDropped(vec![SPAN]), head("0700", "10000000") + span),
        (
            RdmaMessage::ZeroList(list),
            head("0800", "28000000") + "0700000000000000" + range + range,
        ),
        (RdmaMessage::ZeroDone { sequence: 7 }, head("0900", "08000000") + "0700000000000000"),
        (
            RdmaMessage::RoundEnd(end),
            head("0a00", "10000000") + "09000000 01000000 0a00000000000000",
        ),
        (RdmaMessage::Heartbeat { sent_ns: 1 }, head("0b00", "08000000") + "0100000000000000"),
        (RdmaMessage::Close { reason: "no".to_owned() }, head("0c00", "02000000") + "6e6f"),
        (RdmaMessage::Revoked { rounds: 3 }, head("0d00", "08000000") + "03000000 00000000"),
        (
            RdmaMessage::QueueAddress(QueueAddress { provider: WireProvider::SOFT, port: 0x4321 }),
            head("0e00", "08000000") + "0200 2143 00000000",
        ),
    ]
}

fn decode(bytes: &[u8]) -> Result<RdmaMessage, RdmaError> {
    let header = RdmaHeader::parse(bytes.first_chunk().unwrap())?;
    RdmaMessage::decode(header.kind(), &bytes[RDMA_HEADER_BYTES..])
}

#[test]
fn layouts_are_frozen() {
    let vectors = vectors();
    let kinds: Vec<u16> = vectors.iter().map(|(message, _)| message.kind()).collect();
    assert_eq!(kinds, (1..=RDMA_KIND_MAX).collect::<Vec<_>>());
    for (message, bytes) in vectors {
        let bytes = hex(&bytes);
        let mut encoded = Vec::new();
        message.encode(&mut encoded);
        assert_eq!(encoded, bytes, "{message:?}");
        assert_eq!(decode(&bytes), Ok(message));
    }
    let hello = QueueHello { queue: 0x0003, token: [0xab; 16] };
    let bytes = hex(&format!("6d525150 0100 0300 {} 0000000000000000", "ab".repeat(16)));
    assert_eq!(hello.to_bytes()[..], bytes);
    assert_eq!(QueueHello::parse(&[&bytes[..], &[0xff; 24]].concat()), Ok(hello));
}

#[test]
fn every_truncation_and_bit_flip() {
    for (_, bytes) in vectors() {
        let bytes = hex(&bytes);
        for end in 0..=bytes.len() {
            fuzz::rdma(&bytes[..end]);
            if (RDMA_HEADER_BYTES..bytes.len()).contains(&end) {
                let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
                let cut = RdmaMessage::decode(kind, &bytes[RDMA_HEADER_BYTES..end]);
                // A list may lose whole entries, and a reason letters, and still be one.
                assert!(cut.is_err() || [3, 4, 5, 6, 7, 8, 12].contains(&kind), "{kind} {end}");
            }
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fuzz::rdma(&flipped);
        }
    }
}

#[test]
fn headers_are_refused_before_anything_is_allocated() {
    let head = |kind: u16, length: u32| {
        let mut bytes = hex("6d52444d 0000 0000 00000000 00000000");
        bytes[4..6].copy_from_slice(&kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        RdmaHeader::parse(bytes.first_chunk().unwrap())
    };
    assert_eq!(head(0, 0), Err(RdmaError::Kind(0)));
    assert_eq!(head(RDMA_KIND_MAX + 1, 0), Err(RdmaError::Kind(RDMA_KIND_MAX + 1)));
    assert!(matches!(head(3, 0), Err(RdmaError::Length { .. })));
    assert!(matches!(head(3, 17), Err(RdmaError::Length { .. })));
    let most = u32::try_from(SPANS_MAX * 16).unwrap();
    assert!(head(3, most).is_ok());
    assert!(matches!(head(3, most + 16), Err(RdmaError::Length { .. })));
    let most = u32::try_from(8 + ZERO_RANGES_MAX * 16).unwrap();
    assert!(head(8, most).is_ok());
    assert!(matches!(head(8, most + 16), Err(RdmaError::Length { .. })));
    assert!(matches!(head(12, 1025), Err(RdmaError::Length { .. })));
}

#[test]
fn values_that_no_peer_would_send() {
    let terms = |change: fn(&mut Terms)| {
        let mut terms = TERMS;
        change(&mut terms);
        let mut bytes = Vec::new();
        RdmaMessage::Offer(terms).encode(&mut bytes);
        decode(&bytes)
    };
    assert!(terms(|_| {}).is_ok());
    for wrong in [
        (|terms| terms.version = 2) as fn(&mut Terms),
        |terms| terms.queues = 0,
        |terms| terms.queues = 65,
        |terms| terms.chunk_bytes = 1 << 19,
        |terms| terms.chunk_bytes = 1 << 31,
        |terms| terms.chunk_bytes = 3 << 20,
        |terms| terms.unit_chunks = 0,
        |terms| terms.unit_chunks = 2048,
    ] {
        assert!(matches!(terms(wrong), Err(RdmaError::Terms { .. })));
    }
    let refused = |message: &RdmaMessage| {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        assert!(matches!(decode(&bytes), Err(RdmaError::Entry { index: 0, .. })), "{message:?}");
    };
    for span in [WireSpan { chunks: 0, ..SPAN }, WireSpan { first_chunk: u64::MAX, ..SPAN }] {
        refused(&RdmaMessage::KeyRequest(vec![span]));
        refused(&RdmaMessage::KeyGrant(vec![Grant { span, address: 0, key: 0 }]));
    }
    refused(&RdmaMessage::KeyGrant(vec![Grant { span: SPAN, address: 4095, key: 0 }]));
    for range in [ZeroRange { count: 0, ..RANGE }, ZeroRange { first_page: u64::MAX - 1, ..RANGE }]
    {
        refused(&RdmaMessage::ZeroList(ZeroList { sequence: 1, ranges: vec![range] }));
    }
}

#[test]
fn logs_hold_no_keys() {
    let grant = Grant { span: SPAN, address: 4096, key: 0x00be_ef42 };
    let shown = format!("{:?} {:x?}", grant, QueueHello { queue: 1, token: [0xcd; 16] });
    assert!(!shown.contains(&0x00be_ef42.to_string()) && !shown.contains("beef"), "{shown}");
    assert!(!shown.contains("cd, cd"), "{shown}");
}

proptest! {
    #[test]
    fn noise_is_an_error_or_a_message(kind in 0..=RDMA_KIND_MAX + 1, noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = RdmaMessage::decode(kind, &noise);
        fuzz::rdma(&noise);
        let mut framed = hex("6d52444d 0000 0000 00000000 00000000");
        framed[4..6].copy_from_slice(&kind.to_le_bytes());
        framed[8..12].copy_from_slice(&u32::try_from(noise.len()).unwrap().to_le_bytes());
        framed.extend(noise);
        fuzz::rdma(&framed);
    }
}
