use super::*;
use crate::rdma::{Provider, RdmaAccept};
use martlet_core::destination::Intake as _;
use martlet_ram::GuestRam;
use martlet_transport::{Address, Listener};
use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};
use martlet_wire::pages::{PagesHeader, RunEntry};
use martlet_wire::rdma::RdmaMessage;
use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;
use zerocopy::IntoBytes;

/// A page of this byte, as a frame.
fn frame(page: u64, byte: u8) -> Vec<u8> {
    let entries = [RunEntry::data(0, page, 1)];
    let mut bytes = PagesHeader::pages(0, &entries).as_bytes().to_vec();
    bytes.extend_from_slice(entries.as_bytes());
    bytes.extend_from_slice(&[byte; 4096]);
    bytes
}

fn first_byte(ram: &GuestRam, page: u64) -> u8 {
    let mut byte = [0];
    rustix::io::pread(ram.regions()[0].file().unwrap().fd, &mut byte[..], page * PAGE_SIZE)
        .unwrap();
    byte[0]
}

/// Both ends of a connection, ours and the engine's.
fn connected() -> (TcpStream, Stream) {
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&address).unwrap();
    let Address::Tcp { host, port } = listener.address().unwrap() else { panic!("by TCP") };
    let peer = TcpStream::connect((host.as_str(), port)).unwrap();
    loop {
        match listener.try_accept().unwrap() {
            Some(stream) => return (peer, stream),
            None => std::thread::yield_now(),
        }
    }
}

fn memory() -> Arc<GuestRam> {
    let range = PageRange::try_new(Gfn(0), PageCount(16)).unwrap();
    Arc::new(GuestRam::create(&[range]).unwrap())
}

fn await_round(events: &Mailbox<Event>) {
    let until = Instant::now() + Duration::from_secs(20);
    while !matches!(events.take(), Some(Event::RoundReceived { .. })) {
        assert!(Instant::now() < until, "the barrier comes");
        std::thread::yield_now();
    }
}

/// A peer that goes on sending pages behind the last barrier must not reach the memory of a guest
/// that runs.
#[test]
fn nothing_lands_after_the_close() {
    let ram = memory();
    let events = Arc::new(Mailbox::new().unwrap());
    let (mut peer, stream) = connected();
    let placer = Arc::new(Placer::new(Arc::clone(&ram)));
    let mut intake = Intake::start(vec![stream], &placer, &events).unwrap();

    peer.write_all(&frame(3, 7)).unwrap();
    peer.write_all(PagesHeader::barrier(0).as_bytes()).unwrap();
    await_round(&events);
    assert_eq!(first_byte(&ram, 3), 7);
    intake.take_over();
    intake.close();
    intake.give_back();
    peer.write_all(&frame(3, 9)).unwrap();
    // Enough for a thread that would read it; one that does not ends.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(intake.look(), Look::Idle);
    drop(intake);
    assert_eq!(first_byte(&ram, 3), 7);
    assert!(events.take().is_none(), "a channel that was closed is not lost");
}

/// The guest's start waits for the close: the thread that waits for the peer lets go at once.
#[test]
fn a_close_waits_for_no_peer() {
    let (ram, events) = (memory(), Arc::new(Mailbox::new().unwrap()));
    let (mut peer, stream) = connected();
    let accept = RdmaAccept { provider: Provider::Soft, ..RdmaAccept::default() };
    let mut intake = Intake::start_rdma(stream, &ram, &accept, [0; 16], &events).unwrap();
    // RDMA ends before it began, so pages come over the connection.
    let mut close = Vec::new();
    RdmaMessage::Close { reason: "a test wants it".to_owned() }.encode(&mut close);
    peer.write_all(&close).unwrap();
    peer.write_all(PagesHeader::barrier(0).as_bytes()).unwrap();
    await_round(&events);
    // Its thread may be about to wait.
    std::thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    intake.close();
    assert!(began.elapsed() < WAIT_INTERVAL / 2, "it took {:?}", began.elapsed());
}
