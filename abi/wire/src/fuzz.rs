//! One entry for each decoder: takes any bytes, and panics if the decoder panics or if what it
//! accepted does not survive being sent again. Called by the fuzz targets and, with random,
//! truncated and flipped input, by this crate's tests.

use crate::frame::{FRAME_HEADER_BYTES, FrameHeader};
use crate::hello::{HELLO_BYTES, Hello, HelloReply, REPLY_BYTES};
use crate::pages::{PAGES_HEADER_BYTES, PagesFrame, PagesHeader, RUNS_MAX, RunEntry, RunKind};
use crate::rdma::{QueueHello, RDMA_HEADER_BYTES, RdmaHeader, RdmaMessage};
use crate::{control::Control, frame, hello};

/// Pages of the regions that the fuzzed frames are checked against; region 3 does not exist.
const FUZZ_REGIONS: [u64; 3] = [1, 160, 1 << 40];

/// A hello and its negotiation.
pub fn hello(data: &[u8]) {
    let _ = hello::check_hello_prefix(data).map_err(|error| error.to_string());
    let Some(bytes) = data.first_chunk::<HELLO_BYTES>() else { return };
    if let Ok(hello) = Hello::parse(bytes) {
        assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
        if let Ok(version) = hello.negotiate() {
            assert!((hello.versions.min..=hello.versions.max).contains(&version));
            assert_eq!(HelloReply::accept(version).accepted(), Ok(version));
        }
    }
}

/// A reply to a hello.
pub fn hello_reply(data: &[u8]) {
    let _ = hello::check_reply_prefix(data).map_err(|error| error.to_string());
    let Some(bytes) = data.first_chunk::<REPLY_BYTES>() else { return };
    if let Ok(reply) = HelloReply::parse(bytes) {
        assert_eq!(HelloReply::parse(&reply.to_bytes()), Ok(reply));
        let _ = reply.accepted().map_err(|error| error.to_string());
    }
}

/// A stream of control frames.
pub fn control(data: &[u8]) {
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<FRAME_HEADER_BYTES>() {
        let Ok(header) = FrameHeader::parse(head) else { return };
        let Some((body, next)) = behind.split_at_checked(header.body_bytes()) else { return };
        control_body(header, body);
        rest = next;
    }
}

fn control_body(header: FrameHeader, body: &[u8]) {
    let message = match Control::decode(header.kind(), body) {
        Ok(message) => message,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(message.kind(), header.kind());
    let mut again = Vec::new();
    frame::encode(&message, &mut again).expect("what was decoded can be sent");
    let (head, body) = again.split_first_chunk().expect("a frame has a header");
    let header = FrameHeader::parse(head).expect("our own header");
    assert_eq!(header.body_bytes(), body.len());
    let decoded = Control::decode(header.kind(), body).expect("our own body");
    assert_eq!(decoded, message);
}

/// A stream of data frames, whose payload is skipped.
pub fn pages(data: &[u8]) {
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<PAGES_HEADER_BYTES>() {
        let Ok(frame) = PagesFrame::parse(head) else { return };
        let Some((entries, behind)) = behind.split_at_checked(frame.entry_bytes()) else { return };
        let Some(payload_bytes) = pages_body(frame, head, entries) else { return };
        rest = behind.get(payload_bytes..).unwrap_or_default();
    }
}

fn pages_body(frame: PagesFrame, head: &[u8; PAGES_HEADER_BYTES], entries: &[u8]) -> Option<usize> {
    use zerocopy::IntoBytes;
    let region_pages = |region: u16| FUZZ_REGIONS.get(usize::from(region)).copied();
    let runs = frame.parse_runs(entries, region_pages).ok()?;
    let mut data_bytes = 0;
    for run in runs.iter() {
        let end = run.first_page + u64::from(run.count);
        assert!(run.count > 0 && end <= FUZZ_REGIONS[usize::from(run.region)]);
        if run.kind == RunKind::Data {
            data_bytes += u64::from(run.count) * martlet_units::PAGE_SIZE;
        }
    }
    let header = match frame {
        PagesFrame::Barrier { round } => PagesHeader::barrier(round),
        PagesFrame::Pages { round, payload_bytes, .. } => {
            assert!(runs.len() <= RUNS_MAX && data_bytes == payload_bytes);
            let again: Vec<RunEntry> = runs.iter().map(RunEntry::new).collect();
            assert_eq!(again.as_bytes(), entries);
            PagesHeader::pages(round, &again)
        }
    };
    assert_eq!(header.as_bytes(), head);
    usize::try_from(data_bytes).ok()
}

/// A stream of messages beside RDMA queue pairs.
pub fn rdma(data: &[u8]) {
    if let Ok(hello) = QueueHello::parse(data) {
        assert_eq!(QueueHello::parse(&hello.to_bytes()), Ok(hello));
    }
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<RDMA_HEADER_BYTES>() {
        let Ok(header) = RdmaHeader::parse(head) else { return };
        let Some((body, next)) = behind.split_at_checked(header.body_bytes()) else { return };
        match RdmaMessage::decode(header.kind(), body) {
            Ok(message) => {
                assert_eq!(message.kind(), header.kind());
                let mut again = Vec::new();
                message.encode(&mut again);
                let (head, body) = again.split_first_chunk().expect("a frame has a header");
                let header = RdmaHeader::parse(head).expect("our own header");
                assert_eq!(RdmaMessage::decode(header.kind(), body), Ok(message));
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        rest = next;
    }
}
