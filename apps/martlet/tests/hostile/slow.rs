//! Destinations, and links, that take very little. The owner is heard, and the guest does not stand
//! for it.

use crate::Destination;
use crate::played::{Played, QUIET, read_slowly};
use crate::support::Dir;
use crate::support::process::Process;
use crate::wire::{COMES_MAX, COMMIT, Listener, SWITCHOVER_SOON};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// More than the sockets hold.
const FULL: &str = "fill=16M,ws=1M,rate=1/ms,tick=1ms";
/// All of that again in the last run.
const BUSY: &str = "fill=16M,ws=16M,rate=1000/ms,tick=1ms";

/// 1 Mbit/s.
const SLOW_LINK: u32 = 125_000;
/// Little enough for such a link.
const SMALL: &str = "fill=256K,ws=64K,rate=1/tick,tick=100ms";
/// As long as that may take on a host that has much else to do.
const ARRIVES_MAX: Duration = Duration::from_secs(180);

#[test]
fn a_greeting_that_is_read_byte_by_byte() {
    let (source, listener, dir) = Played::source(QUIET, &json!({}));
    let control = listener.accept_silent();
    read_slowly(control.twin());
    Played::of(source, listener, control, dir).cancels("in the greeting");
}

#[test]
fn a_setup_that_is_read_byte_by_byte() {
    let mut played = Played::called(QUIET, &json!({}));
    read_slowly(played.control.twin());
    played.cancels("in the setup");
}

#[test]
fn rounds_that_are_read_byte_by_byte() {
    let mut played = Played::called(FULL, &json!({}));
    read_slowly(played.set_up());
    played.cancels("in the rounds");
}

/// The stop is called off, and the guest runs through another round.
#[test]
fn a_last_run_that_is_read_byte_by_byte() {
    let mut played = Played::begin_with(BUSY, &json!({ "downtime-limit": 300 }));
    played.until(SWITCHOVER_SOON, 0);
    played.pages_slowly.store(true, Ordering::Relaxed);
    let began = Instant::now();
    // That it is called off, or the commit, where the pages were faster than this test.
    let said = played.until_one_of(&[SWITCHOVER_SOON, COMMIT], 0);
    println!("message {said} {:?} after the stop", began.elapsed());
    if said == COMMIT {
        played.settles_undecided();
    } else {
        played.runs();
        played.cancels("after the last run");
    }
}

#[test]
fn a_commit_that_is_read_byte_by_byte() {
    let mut played = Played::begin_with(QUIET, &json!({ "downtime-limit": 300 }));
    played.until(SWITCHOVER_SOON, 0);
    read_slowly(played.control.twin());
    played.settles_undecided();
}

/// The time until which a link is taken.
type Link = Arc<Mutex<Instant>>;

/// Stands between a source and a destination: all pages and messages of the source go over one link
/// of so many bytes a second.
fn relay(to: u16, bytes_per_s: u32) -> u16 {
    let (listener, port) = Listener::new();
    let link: Link = Arc::new(Mutex::new(Instant::now()));
    std::thread::spawn(move || {
        loop {
            let here = listener.accept_silent().0;
            let Ok(there) = TcpStream::connect(("127.0.0.1", to)) else { return };
            let (mut from, mut back) = (there.try_clone().unwrap(), here.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut back));
            let link = Arc::clone(&link);
            std::thread::spawn(move || forward(here, there, &link, bytes_per_s));
        }
    });
    port
}

fn forward(mut from: TcpStream, mut to: TcpStream, link: &Link, bytes_per_s: u32) {
    from.set_read_timeout(None).unwrap();
    let mut buffer = [0; 1400];
    while let Ok(got @ 1..) = from.read(&mut buffer) {
        let until = {
            let mut taken = link.lock().unwrap();
            *taken = (*taken).max(Instant::now())
                + Duration::from_secs_f64(got as f64 / f64::from(bytes_per_s));
            *taken
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        if to.write_all(&buffer[..got]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// Moves a small guest over four channels and says how long it took.
fn moves(port: u16, parameters: &serde_json::Value) {
    let dir = Dir::new().unwrap();
    let run = ["run", "--memory", "16M", "--program", SMALL];
    let mut source = Process::start(dir.path(), 1, &run).unwrap();
    let own = json!({ "multifd-channels": 4, "downtime-limit": 20_000 });
    source.execute("migrate-set-parameters", &own).unwrap();
    source.execute("migrate-set-parameters", parameters).unwrap();
    let began = Instant::now();
    source.execute("migrate", &json!({ "uri": format!("tcp:127.0.0.1:{port}") })).unwrap();
    loop {
        let now = source.migration().unwrap();
        match now.status.as_str() {
            "completed" => break,
            "failed" | "x-undecided" => panic!("{}", now.raw),
            _ => assert!(began.elapsed() < ARRIVES_MAX, "{}", now.raw),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("moved in {:?}", began.elapsed());
}

fn arrives(mut destination: Destination) {
    let began = Instant::now();
    loop {
        if let Some(guest) = destination.process.guest().unwrap()
            && guest.verified > 0
        {
            assert_eq!((guest.wrong, guest.clock_steps_back), (0, 0));
            return;
        }
        assert!(began.elapsed() < COMES_MAX);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn four_channels_share_a_limit_of_a_megabit() {
    let destination = Destination::new(&[]);
    moves(destination.port, &json!({ "max-bandwidth": SLOW_LINK }));
    arrives(destination);
}

#[test]
fn four_channels_share_a_link_of_a_megabit() {
    let destination = Destination::new(&[]);
    moves(relay(destination.port, SLOW_LINK), &json!({}));
    arrives(destination);
}
