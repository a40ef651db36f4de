//! Peers that send without end.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, setup_of};
use crate::wire::{COMES_MAX, PING, SWITCHOVER_SOON, Value, barrier, map, message, pages_of_zeros};
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a flood may cost beyond what an honest migration does.
pub(crate) const MEMORY_MAX: u64 = 64 << 20;
/// How long it is endured before it is looked at.
pub(crate) const FLOOD: Duration = Duration::from_secs(2);

/// Writes the same bytes for ever, until the connection breaks or it is dropped.
pub(crate) struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    pub(crate) fn new(stream: &TcpStream, bytes: Vec<u8>) -> Flood {
        let mut stream = stream.try_clone().expect("a socket");
        stream.set_write_timeout(Some(Duration::from_millis(100))).expect("a socket");
        let stop = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut at = 0;
            while !over.load(Ordering::Relaxed) {
                match stream.write(&bytes[at..]) {
                    Ok(written) => at = (at + written) % bytes.len(),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        });
        Flood { stop, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Whoever floods gets no memory, measured from `before` the flood, and does not keep the owner from
/// being heard.
pub(crate) fn is_endured(mut destination: Destination, before: u64, flood: Flood) {
    std::thread::sleep(FLOOD);
    let (_, most) = destination.process.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
    let asked = Instant::now();
    destination.process.ask("quit").expect("it hears its owner");
    destination.process.ended().expect("it ends");
    assert!(asked.elapsed() < COMES_MAX);
    drop(flood);
}

fn ping() -> Vec<u8> {
    message(PING, &map([(0, Value::Number(1))]))
}

#[test]
fn a_source_that_pings_without_end_and_reads_nothing() {
    let destination = Destination::new(&[]);
    let setup = setup_of(&captured_setup(&[]), 1);
    let attempt = Attempt::begin(destination.port, &setup);
    let (before, _) = destination.process.memory();
    let flood = Flood::new(&attempt.control.0, ping().repeat(1000));
    is_endured(destination, before, flood);
}

#[test]
fn a_channel_that_never_ends_while_the_last_pages_are_awaited() {
    let destination = Destination::new(&[]);
    let setup = setup_of(&captured_setup(&[]), 1);
    let mut attempt = Attempt::begin(destination.port, &setup);
    attempt.end_round(0);
    let soon = map([(0, Value::Number(1))]);
    attempt.control.say(&message(SWITCHOVER_SOON, &soon)).unwrap();
    let (before, _) = destination.process.memory();
    // So much that whoever reads until there is nothing more never looks at the time.
    let flood = Flood::new(&attempt.channels[0].0, pages_of_zeros(1).repeat(1000));
    let reason = attempt.reason();
    assert!(reason.contains("nothing heard from the peer"), "{reason}");
    is_endured(destination, before, flood);
}

#[test]
fn barriers_come_in_order_and_not_ahead_of_their_answer() {
    let destination = Destination::new(&[]);
    let captured = captured_setup(&[]);
    let cases: [(&[u32], &str); 3] = [
        (&[u32::MAX], "the barrier of round 4294967295 where 0's was expected"),
        (&[0, 0], "the barrier of round 0 where 1's was expected"),
        (&[0, 1], "the barrier of round 1 before the round below was in"),
    ];
    for (rounds, words) in cases {
        let mut attempt = Attempt::begin(destination.port, &setup_of(&captured, 2));
        for round in rounds {
            attempt.channels[0].say(&barrier(*round)).unwrap();
        }
        let reason = attempt.reason();
        assert!(reason.contains(words), "{reason}");
    }
}
