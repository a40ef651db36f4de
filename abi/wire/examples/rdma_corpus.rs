//! Writes the seed corpus of the fuzz target `rdma`: one file for each message.
//!
//!     cargo run -p martlet-wire --example rdma_corpus -- fuzz/corpus

use martlet_wire::rdma::{
    Grant, Pinning, QueueAddress, QueueHello, RDMA_VERSION, RdmaMessage, RoundEnd, Terms,
    WireProvider, WireSpan, ZeroList, ZeroRange,
};
use std::path::Path;

fn messages() -> Vec<RdmaMessage> {
    let span = WireSpan { region: 1, first_chunk: 4, chunks: 2 };
    let terms = Terms {
        version: RDMA_VERSION,
        queues: 4,
        pinning: Pinning::Dynamic,
        unit_chunks: 1,
        chunk_bytes: 32 << 20,
        pinned_bytes_max: 4 << 30,
    };
    let range = ZeroRange { region: 0, first_page: 512, count: 1024 };
    vec![
        RdmaMessage::Offer(terms),
        RdmaMessage::Accept(Terms { pinning: Pinning::All, ..terms }),
        RdmaMessage::KeyRequest(vec![span, WireSpan { region: 0, ..span }]),
        RdmaMessage::KeyGrant(vec![Grant { span, address: 0x7f00_0000_0000, key: 0x1234 }]),
        RdmaMessage::KeyRefusal(vec![span]),
        RdmaMessage::KeyDrop(vec![span]),
        RdmaMessage::KeyDropped(vec![span]),
        RdmaMessage::ZeroList(ZeroList { sequence: 1, ranges: vec![range; 3] }),
        RdmaMessage::ZeroDone { sequence: 1 },
        RdmaMessage::RoundEnd(RoundEnd { round: 3, last: true, zero_lists: 1 }),
        RdmaMessage::Heartbeat { sent_ns: 1 << 40 },
        RdmaMessage::Close { reason: "the link broke".to_owned() },
        RdmaMessage::Revoked { rounds: 4 },
        RdmaMessage::QueueAddress(QueueAddress { provider: WireProvider::IBV, port: 4791 }),
    ]
}

fn main() -> std::io::Result<()> {
    let root = std::env::args_os().nth(1).unwrap_or_else(|| "fuzz/corpus".into());
    let folder = Path::new(&root).join("rdma");
    std::fs::create_dir_all(&folder)?;
    let mut all = Vec::new();
    for message in messages() {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        std::fs::write(folder.join(format!("message-{:02}", message.kind())), &bytes)?;
        all.extend(bytes);
    }
    std::fs::write(folder.join("stream"), &all)?;
    std::fs::write(folder.join("hello"), QueueHello { queue: 3, token: [9; 16] }.to_bytes())
}
