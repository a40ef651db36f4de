use super::*;
use martlet_ram::GuestRam;
use martlet_transport::{Address, Listener};
use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};
use martlet_wire::pages::{PagesHeader, RunEntry};
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
    rustix::io::pread(ram.regions()[0].fd(), &mut byte[..], page * PAGE_SIZE).unwrap();
    byte[0]
}

/// A peer that goes on sending pages behind the last barrier must not reach the memory of a guest
/// that runs.
#[test]
fn nothing_lands_after_the_close() {
    let range = PageRange::try_new(Gfn(0), PageCount(16)).unwrap();
    let ram = Arc::new(GuestRam::create(&[range]).unwrap());
    let events = Arc::new(Mailbox::new().unwrap());
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&address).unwrap();
    let Address::Tcp { host, port } = listener.address().unwrap() else { panic!("by TCP") };
    let mut peer = TcpStream::connect((host.as_str(), port)).unwrap();
    let stream = loop {
        match listener.try_accept().unwrap() {
            Some(stream) => break stream,
            None => std::thread::yield_now(),
        }
    };
    let placer = Arc::new(Placer::new(Arc::clone(&ram)));
    let intake = PageIntake::start(vec![stream], &placer, &events).unwrap();

    peer.write_all(&frame(3, 7)).unwrap();
    peer.write_all(PagesHeader::barrier(0).as_bytes()).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while first_byte(&ram, 3) != 7 || !matches!(events.take(), Some(Event::RoundReceived { .. })) {
        assert!(Instant::now() < until, "the barrier comes");
        std::thread::yield_now();
    }
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
