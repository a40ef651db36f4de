//! Pages over a socket pair, in whole and in pieces, and what no peer of ours sends.

use super::*;
use martlet_ram::testing::Spoiled;
use martlet_ram::{Chunk, ChunkBits, ZeroCheck};
use martlet_units::{Gfn, PageCount, PageRange};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn ram() -> Arc<GuestRam> {
    let range = PageRange::try_new(Gfn(0), PageCount(2048)).unwrap();
    Arc::new(GuestRam::create(&[range]).unwrap())
}

fn fill(ram: &GuestRam, page: u64, byte: u8) {
    let region = &ram.regions()[0];
    let file = rustix::io::pwrite(region.file().unwrap().fd, &[byte; 4096], page * PAGE_SIZE);
    assert_eq!(file, Ok(4096));
}

fn chunk(ram: &GuestRam, pages: &[u32]) -> Chunk {
    let mut bits = ChunkBits::EMPTY;
    pages.iter().for_each(|page| bits.set(*page));
    Chunk::new(ram, RegionIndex(0), 0, bits).unwrap()
}

fn pair() -> (Stream, Stream) {
    let (one, two) = UnixStream::pair().unwrap();
    (Stream::from_unix(one).unwrap(), Stream::from_unix(two).unwrap())
}

/// Reads until the barrier, and returns its round.
fn receive_round(receiver: &mut PageReceiver) -> Result<u32, PagesReceiveError> {
    loop {
        match receiver.advance()? {
            Arrival::Barrier { round } => return Ok(round),
            Arrival::Bytes(_) => {}
            Arrival::Nothing => {
                assert!(receiver.stream.wait_readable(Duration::from_secs(20)).unwrap());
            }
        }
    }
}

#[test]
fn pages_arrive_where_they_were() {
    let (source, destination) = (ram(), ram());
    [0, 1, 2, 100, 511].iter().for_each(|page| fill(&source, *page, 7));
    let (here, there) = pair();
    let mut receiver =
        PageReceiver::new(there, Arc::new(Placer::new(Arc::clone(&destination)))).unwrap();
    let mut sender = PageSender::new(here);
    let mut batch = PageBatch::new(&source);
    let mut send = |sender: &mut PageSender, pages: &[u32], round| {
        let mut chunk = chunk(&source, pages);
        let zero = chunk.zero_pages(&source, &ZeroCheck::detect());
        assert_eq!(batch.push_chunk(&mut chunk, &zero), martlet_ram::Pushed::All);
        sender.send(round, &batch, |_| {}).unwrap();
        sender.barrier(round).unwrap();
        batch.clear();
    };
    send(&mut sender, &[0, 1, 2, 3, 100, 511], 0);
    assert_eq!(receive_round(&mut receiver).unwrap(), 0);
    assert_eq!(source.digest().unwrap(), destination.digest().unwrap());
    // A page that was sent with content becomes zero again.
    fill(&source, 1, 0);
    send(&mut sender, &[1], 1);
    assert_eq!(receive_round(&mut receiver).unwrap(), 1);
    assert_eq!(source.digest().unwrap(), destination.digest().unwrap());
}

#[test]
fn a_frame_may_come_byte_by_byte() {
    let destination = ram();
    let (here, there) = pair();
    let mut receiver =
        PageReceiver::new(there, Arc::new(Placer::new(Arc::clone(&destination)))).unwrap();
    let entries = [RunEntry::zero(0, 5, 2), RunEntry::data(0, 9, 1)];
    let mut bytes = PagesHeader::pages(3, &entries).as_bytes().to_vec();
    bytes.extend_from_slice(entries.as_bytes());
    bytes.extend_from_slice(&[0xa5; 4096]);
    bytes.extend_from_slice(PagesHeader::barrier(3).as_bytes());
    let mut rounds = 0;
    for byte in bytes {
        here.write_all(&[byte]).unwrap();
        while let Arrival::Bytes(_) | Arrival::Barrier { .. } = {
            let arrival = receiver.advance().unwrap();
            rounds += u32::from(matches!(arrival, Arrival::Barrier { round: 3 }));
            arrival
        } {}
    }
    assert_eq!(rounds, 1);
    let mut page = [0; 4096];
    rustix::io::pread(destination.regions()[0].file().unwrap().fd, &mut page[..], 9 * PAGE_SIZE)
        .unwrap();
    assert_eq!(page, [0xa5; 4096]);
}

#[test]
fn nothing_outside_guest_memory_is_written() {
    for entries in
        [[RunEntry::data(0, 2047, 2)], [RunEntry::data(1, 0, 2)], [RunEntry::data(0, u64::MAX, 2)]]
    {
        let (here, there) = pair();
        let mut receiver = PageReceiver::new(there, Arc::new(Placer::new(ram()))).unwrap();
        here.write_all(PagesHeader::pages(0, &entries).as_bytes()).unwrap();
        here.write_all(entries.as_bytes()).unwrap();
        assert!(matches!(receive_round(&mut receiver), Err(PagesReceiveError::Protocol(_))));
    }
}

#[test]
fn long_runs_and_short_ones_find_their_places() {
    let (source, destination) = (ram(), ram());
    let pages: Vec<u32> = (0..20).chain(30..32).chain(100..140).chain([150]).collect();
    for page in &pages {
        fill(&source, u64::from(*page), u8::try_from(*page % 251).unwrap() + 1);
    }
    let (here, there) = pair();
    let placer = Arc::new(Placer::new(Arc::clone(&destination)));
    let mut receiver = PageReceiver::new(there, placer).unwrap();
    let mut sender = PageSender::new(here);
    let mut batch = PageBatch::new(&source);
    // The second time all pages are there already, so no run goes to the file.
    for round in 0..2 {
        let mut all = chunk(&source, &pages);
        let zero = all.zero_pages(&source, &ZeroCheck::detect());
        assert_eq!(batch.push_chunk(&mut all, &zero), martlet_ram::Pushed::All);
        sender.send(round, &batch, |_| {}).unwrap();
        sender.barrier(round).unwrap();
        batch.clear();
        assert_eq!(receive_round(&mut receiver).unwrap(), round);
        assert_eq!(source.digest().unwrap(), destination.digest().unwrap());
        fill(&source, 105, 9);
    }
}

/// More runs than are in hand at once, in and out of memory, in pieces that end anywhere.
#[test]
fn many_short_runs_find_their_places() {
    let (source, destination) = (ram(), ram());
    let pages: Vec<u32> = (0..510).step_by(2).collect();
    let (here, there) = pair();
    let placer = Arc::new(Placer::new(Arc::clone(&destination)));
    let mut receiver = PageReceiver::new(there, placer).unwrap();
    let entries: Vec<_> = pages.iter().map(|p| RunEntry::data(0, u64::from(*p), 1)).collect();
    let mut bytes = PagesHeader::pages(0, &entries).as_bytes().to_vec();
    bytes.extend_from_slice(entries.as_bytes());
    for page in &pages {
        let byte = u8::try_from(page % 251).unwrap();
        fill(&source, u64::from(*page), byte);
        bytes.extend_from_slice(&[byte; 4096]);
    }
    bytes.extend_from_slice(PagesHeader::barrier(0).as_bytes());
    let mut passed = false;
    for piece in bytes.chunks(7001) {
        here.write_all(piece).unwrap();
        loop {
            match receiver.advance().unwrap() {
                Arrival::Nothing => break,
                Arrival::Bytes(_) => {}
                Arrival::Barrier { .. } => passed = true,
            }
        }
    }
    assert!(passed);
    assert_eq!(source.digest().unwrap(), destination.digest().unwrap());
}

/// A frame that is sent without waiting, in as many pieces as the socket makes of it.
#[test]
fn a_frame_goes_on_where_it_stopped() {
    let (source, destination) = (ram(), ram());
    (0..512).for_each(|page| fill(&source, page, u8::try_from(page % 250 + 1).unwrap()));
    let (here, there) = pair();
    // Less than the frame.
    rustix::net::sockopt::set_socket_send_buffer_size(&here, 1 << 16).unwrap();
    let mut sender = PageSender::new(here);
    let placer = Arc::new(Placer::new(Arc::clone(&destination)));
    let mut receiver = PageReceiver::new(there, placer).unwrap();
    let mut batch = PageBatch::new(&source);
    let mut chunk = Chunk::new(&source, RegionIndex(0), 0, ChunkBits::FULL).unwrap();
    batch.push_chunk(&mut chunk, &ChunkBits::EMPTY);
    let (mut frame, mut barrier) = (Partly::default(), Partly::default());
    let (mut pieces, mut passed) = (0, false);
    while !passed {
        if !frame.is_all() {
            sender.try_send(0, &batch, &mut frame).unwrap();
            pieces += 1;
        } else if !barrier.is_all() {
            sender.try_barrier(0, &mut barrier).unwrap();
        }
        loop {
            match receiver.advance().unwrap() {
                Arrival::Nothing => break,
                Arrival::Bytes(_) => {}
                Arrival::Barrier { .. } => passed = true,
            }
        }
    }
    assert!(pieces > 1, "it did not fit");
    assert_eq!(source.digest().unwrap(), destination.digest().unwrap());
}

#[test]
fn another_protocol_and_a_hang_up_are_told_apart() {
    let (here, there) = pair();
    let mut receiver = PageReceiver::new(there, Arc::new(Placer::new(ram()))).unwrap();
    here.write_all(&[b'x'; PAGES_HEADER_BYTES]).unwrap();
    assert!(matches!(receive_round(&mut receiver), Err(PagesReceiveError::Protocol(_))));
    let (here, there) = pair();
    let mut receiver = PageReceiver::new(there, Arc::new(Placer::new(ram()))).unwrap();
    drop(here);
    assert!(matches!(receive_round(&mut receiver), Err(PagesReceiveError::Closed)));
}

fn send_pages(sender: &mut PageSender, ram: &GuestRam, pages: &[u32]) -> io::Result<()> {
    let mut chunk = chunk(ram, pages);
    let zero = chunk.zero_pages(ram, &ZeroCheck::detect());
    let mut batch = PageBatch::new(ram);
    assert_eq!(batch.push_chunk(&mut chunk, &zero), martlet_ram::Pushed::All);
    sender.send(0, &batch, |_| {})
}

/// A link that takes seconds for a frame was said to carry nothing.
#[test]
fn what_a_slow_link_takes_is_told_while_it_takes_it() {
    let source = ram();
    let pages: Vec<u32> = (0..400).collect();
    (0..400).for_each(|page| fill(&source, page, 7));
    let (here, there) = pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&here, 64 << 10).unwrap();
    let handed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let mut chunk = chunk(&source, &pages);
            let zero = chunk.zero_pages(&source, &ZeroCheck::detect());
            let mut batch = PageBatch::new(&source);
            let _ = batch.push_chunk(&mut chunk, &zero);
            PageSender::new(here).send(0, &batch, |bytes| {
                handed.fetch_add(bytes.0, Ordering::Relaxed);
            })
        });
        let begin = std::time::Instant::now();
        while handed.load(Ordering::Relaxed) == 0 {
            assert!(begin.elapsed().as_secs() < 60, "nobody is told");
            std::thread::yield_now();
        }
        assert!(!sending.is_finished(), "nobody has read yet");
        drop(there);
        assert!(sending.join().unwrap().is_err());
    });
}

#[test]
fn a_lost_page_that_is_to_be_sent_is_named() {
    let source = ram();
    (0..100).for_each(|page| fill(&source, page, 7));
    let pages: Vec<u32> = (0..100).collect();
    let _spoiled = Spoiled::new(&source, RegionIndex(0), 60);
    let (here, _there) = pair();
    let error = send_pages(&mut PageSender::new(here), &source, &pages).unwrap_err();
    let lost = LostPage { region: 0, page: 60, gfn: Gfn(60) };
    assert_eq!(LostPage::of(&error), Some(lost), "{error}");
    // By TCP the kernel takes what comes before it first.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut sender = PageSender::new(Stream::from_tcp(here).unwrap());
    let error = send_pages(&mut sender, &source, &pages).unwrap_err();
    assert_eq!(LostPage::of(&error), Some(lost), "{error}");
    // What does not need it goes.
    let (here, _there) = pair();
    send_pages(&mut PageSender::new(here), &source, &pages[..60]).unwrap();
}

/// Receives pages into memory that has them already, so through the mapping.
fn receive_again(
    pages: &[u32],
    byte: u8,
    spoil: impl FnOnce(&Arc<GuestRam>) -> Option<Spoiled>,
) -> Result<u32, PagesReceiveError> {
    let (source, destination) = (ram(), ram());
    let placer = Arc::new(Placer::new(Arc::clone(&destination)));
    for page in pages {
        placer.data_target(RegionIndex(0), u64::from(*page), 1).unwrap();
        fill(&source, u64::from(*page), byte);
    }
    let _spoiled = spoil(&destination);
    let (here, there) = pair();
    let mut receiver = PageReceiver::new(there, placer).unwrap();
    let mut sender = PageSender::new(here);
    send_pages(&mut sender, &source, pages).unwrap();
    sender.barrier(0).unwrap();
    receive_round(&mut receiver)
}

#[test]
fn a_lost_page_that_is_to_be_written_is_named() {
    let pages: Vec<u32> = (0..40).chain([50, 60]).collect();
    // With content, by the mapping; and as zero.
    for byte in [7, 0] {
        let spoil = |ram: &Arc<GuestRam>| Some(Spoiled::new(ram, RegionIndex(0), 50));
        let error = receive_again(&pages, byte, spoil).unwrap_err();
        let PagesReceiveError::Lost(lost) = error else { panic!("{error}") };
        assert_eq!((lost.page, lost.gfn), (50, Gfn(50)));
        assert_eq!(receive_again(&pages, byte, |_| None).unwrap(), 0);
    }
}
