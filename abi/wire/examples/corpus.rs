//! Writes the seed corpora of the fuzz targets: one file for each kind of frame.
//!
//!     cargo run -p martlet-wire --example corpus -- fuzz/corpus

use martlet_wire::control::{
    Abandon, Alive, Answer, Commit, Committed, Control, Digest, Fate, InstanceId, MigrationId,
    Ping, Pong, Query, Rehearsed, RoundReceived, Setup, SetupDone, State, SwitchoverSoon,
    WireRange,
};
use martlet_wire::frame::encode;
use martlet_wire::hello::{Hello, HelloReply, Status};
use martlet_wire::pages::{PagesHeader, RunEntry};
use std::path::Path;
use zerocopy::IntoBytes;

fn messages() -> Vec<Control> {
    let state = State::new((0..32).collect());
    let migration = MigrationId([1; 16]);
    let instance = InstanceId([3; 16]);
    let regions = vec![
        WireRange { start_gfn: 0, pages: 0xc_0000 },
        WireRange { start_gfn: 0x10_0000, pages: 0x4_0000 },
    ];
    let machine = b"machine".to_vec();
    vec![
        Control::Setup(Setup { migration, regions, machine, channels: 4, boot_id: [2; 16] }),
        Control::SetupDone(SetupDone {
            instance,
            token: [4; 16],
            boot_id: [2; 16],
            clock_proof: Some([6; 32]),
            takes_call_off: Some(true),
        }),
        Control::ChannelsReady,
        Control::RoundReceived(RoundReceived { round: 7 }),
        Control::Rehearse(state.clone()),
        Control::Rehearsed(Rehearsed { load_ns: 100_000, start_ns: 5_000 }),
        Control::SwitchoverSoon(SwitchoverSoon { last_round: 8, called_off: None }),
        Control::FinalState(state),
        Control::AskDigest,
        Control::Digest(Digest { digest: [5; 32] }),
        Control::Commit(Commit {
            migration,
            last_round: 8,
            running: true,
            complete_within_ms: None,
        }),
        Control::Committed(Committed { commit_ns: 1, ready_ns: 2, started_ns: 3 }),
        Control::CommitRefused(Abandon::because("no room")),
        Control::Alive(Alive {
            cpu_ns: 9,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: Some(vec![7, 7]),
        }),
        Control::Ping(Ping { sent_ns: 1 << 40 }),
        Control::Pong(Pong { sent_ns: 1 << 40, answered_ns: 3 }),
        Control::Abandon(Abandon::because("cancelled")),
        Control::Query(Query { migration }),
        Control::Answer(Answer { instance, fate: Fate::Pending }),
    ]
}

fn main() -> std::io::Result<()> {
    let Some(root) = std::env::args_os().nth(1) else {
        return Err(std::io::Error::other("usage: corpus DIRECTORY"));
    };
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = Path::new(&root).join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(name), bytes)
    };
    for message in messages() {
        let mut bytes = Vec::new();
        encode(&message, &mut bytes).map_err(std::io::Error::other)?;
        write("control", &message.kind().to_string(), &bytes)?;
    }
    write("hello", "control", &Hello::control().to_bytes())?;
    write("hello", "data", &Hello::data(3, [9; 16]).to_bytes())?;
    write("hello", "query", &Hello::query().to_bytes())?;
    write(
        "hello",
        "http",
        b"GET / HTTP/1.1\r\nHost: example.com\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n",
    )?;
    write("hello_reply", "accept", &HelloReply::accept(1).to_bytes())?;
    for status in [Status::VERSION, Status::BUSY, Status(999)] {
        let name = format!("refuse-{}", status.0);
        write("hello_reply", &name, &HelloReply::refuse(status).to_bytes())?;
    }
    let entries = [RunEntry::data(1, 4, 1), RunEntry::zero(2, 7, 90)];
    let header = PagesHeader::pages(1, &entries);
    write("pages", "runs", &[header.as_bytes(), entries.as_bytes()].concat())?;
    let zeros = [RunEntry::zero(2, 0, 1 << 20)];
    let pages = PagesHeader::pages(2, &zeros);
    let barrier = PagesHeader::barrier(2);
    write("pages", "barrier", &[pages.as_bytes(), zeros.as_bytes(), barrier.as_bytes()].concat())
}
