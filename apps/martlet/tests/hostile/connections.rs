//! Connections that cost something, or that keep others out.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, refusal, setup_of, setup_of_size};
use crate::wire::{
    ABANDON, ANSWER, CONTROL, DATA, FINAL_STATE, Peer, QUERY, QUERY_FATE, RDMA, REHEARSE, SETUP,
    UNKNOWN, Value, header, hello, map, message,
};
use rustix::net::{AddressFamily, SocketType};
use std::collections::VecDeque;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// More than a destination keeps.
const MANY: usize = 600;
/// What bytes of a peer may cost that are thrown away.
const MEMORY_MAX: u64 = 16 << 20;

fn fate(port: u16, name: u8) -> u64 {
    ask(Peer::accepted(port, QUERY), name)
}

fn ask(mut asker: Peer, name: u8) -> u64 {
    asker.say(&message(QUERY_FATE, &map([(0, Value::Bytes(vec![name; 16]))]))).unwrap();
    asker.expect(ANSWER).field(1).expect("a fate").number()
}

#[test]
fn silent_connections_keep_nobody_out() {
    let destination = Destination::new(&[]);
    let captured = captured_setup(&[]);
    let _silent: Vec<Peer> = (0..MANY).map(|_| Peer::silent(destination.port).unwrap()).collect();
    assert_eq!(fate(destination.port, 9), UNKNOWN);
    let mut attempt = Attempt::begin(destination.port, &setup_of(&captured, 4));
    let _more: Vec<Peer> = (0..MANY).map(|_| Peer::silent(destination.port).unwrap()).collect();
    attempt.end_round(0);
    assert_eq!(fate(destination.port, 9), UNKNOWN);
}

/// Connects without end and says nothing, while `body` runs; that is given what waits until as many
/// more as a destination may keep were turned away.
fn with_a_stream_of_silent_connections(port: u16, body: impl FnOnce(&dyn Fn())) {
    let (turned_away, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut silent = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                silent.extend(Peer::silent(port));
                if silent.len() > MANY && silent.pop_front().is_some_and(|mut it| it.is_closed()) {
                    turned_away.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let ends = Ends(&is_over);
        body(&|| {
            let enough = turned_away.load(Ordering::Relaxed) + MANY;
            while turned_away.load(Ordering::Relaxed) < enough {
                thread::yield_now();
            }
        });
        drop(ends);
    });
}

/// Also if the body panics: the scope waits for its threads.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whoever has begun to speak loses no place to those that say nothing, however slow the way is.
#[test]
fn a_stream_of_silent_connections_keeps_nobody_out() {
    let destination = Destination::new(&[]);
    let setup = setup_of(&captured_setup(&[]), 4);
    with_a_stream_of_silent_connections(destination.port, |wait| {
        wait();
        let asker = Peer::accepted(destination.port, QUERY);
        let mut greeting = Peer::silent(destination.port).unwrap();
        let hello = hello(QUERY, 0, &[]);
        greeting.say(&hello[..20]).unwrap();
        let mut attempt = Attempt::begin(destination.port, &setup);
        wait();
        assert_eq!(ask(asker, 9), UNKNOWN);
        assert_eq!(greeting.ends_greeting(&hello[20..]).unwrap(), 0);
        assert_eq!(ask(greeting, 9), UNKNOWN);
        attempt.end_round(0);
    });
}

/// Whoever has most of the places is the one who loses them.
#[test]
fn many_askers_of_one_host_do_not_keep_another_host_out() {
    let destination = Destination::new(&[]);
    let other = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&other, &SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 2), 0)).unwrap();
    let there = SocketAddrV4::new(Ipv4Addr::LOCALHOST, destination.port);
    rustix::net::connect(&other, &there).unwrap();
    let mut other = Peer(TcpStream::from(other));
    assert_eq!(other.ends_greeting(&hello(QUERY, 0, &[])).unwrap(), 0);
    let _asking: Vec<Peer> = (0..MANY).map(|_| Peer::accepted(destination.port, QUERY)).collect();
    assert_eq!(ask(other, 9), UNKNOWN);
}

#[test]
fn queries_that_ask_nothing_cost_no_thread() {
    let destination = Destination::new(&[]);
    let before = destination.process.threads();
    let _asking: Vec<Peer> = (0..MANY).map(|_| Peer::accepted(destination.port, QUERY)).collect();
    let after = destination.process.threads();
    assert!(after <= before + 2, "{before} threads became {after}");
    assert_eq!(fate(destination.port, 9), UNKNOWN);
}

#[test]
fn data_connections_that_belong_nowhere_leave_the_attempt_alone() {
    let destination = Destination::new(&[]);
    let mut attempt = Attempt::begin(destination.port, &setup_of(&captured_setup(&[]), 2));
    for number in 0..MANY {
        let channel = u16::try_from(number).unwrap();
        let (_, status) = Peer::greet(destination.port, &hello(DATA, channel, &[1; 16])).unwrap();
        assert_eq!(status, 5);
    }
    attempt.end_round(0);
}

/// Of a body that has no place nothing is kept.
#[test]
fn long_messages_out_of_their_place_are_not_read() {
    let destination = Destination::new(&[]);
    let (before, _) = destination.process.memory();
    for (role, kind) in [(QUERY, FINAL_STATE), (CONTROL, REHEARSE), (CONTROL, FINAL_STATE)] {
        let mut peer = Peer::accepted(destination.port, role);
        peer.say(&header(kind, 64 << 20)).unwrap();
        let body = vec![0; 1 << 20];
        while peer.0.write_all(&body).is_ok() {}
    }
    let (_, most) = destination.process.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
}

#[test]
fn nested_bytes_cost_no_memory_and_get_a_reason() {
    let destination = Destination::new(&[]);
    let (before, _) = destination.process.memory();
    let mut control = Peer::accepted(destination.port, CONTROL);
    let body = [&[0xa1, 0x18, 99][..], &vec![0x81; (1 << 20) - 4], &[0]].concat();
    control.say(&[&header(SETUP, body.len())[..], &body].concat()).unwrap();
    let reason = control.expect(ABANDON);
    let reason = reason.field(0).unwrap().text();
    assert!(reason.contains("nested deeper than 8"), "{reason}");
    let (_, most) = destination.process.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
}

/// A byte of the state would become an object of 24 or more.
#[test]
fn a_state_of_very_many_parts_costs_no_more_than_its_bytes() {
    const STATE: usize = 16 << 20;
    let destination = Destination::new(&[]);
    let mut attempt = Attempt::begin(destination.port, &setup_of(&captured_setup(&[]), 1));
    attempt.end_round(0);
    let (before, _) = destination.process.memory();
    // So many vCPUs, whose states are empty.
    let count = u32::try_from(STATE).unwrap().to_be_bytes();
    let state = [&[0xa1, 0, 0x9a][..], &count, &vec![0x40; STATE]].concat();
    attempt.control.say(&message(REHEARSE, &map([(0, Value::Bytes(state))]))).unwrap();
    let reason = attempt.reason();
    assert!(reason.contains("more than 262144 items"), "{reason}");
    // It is in a buffer that doubles as it grows, in the message, and in both for a moment.
    let (_, most) = destination.process.memory();
    assert!(most < before + 5 * STATE as u64, "{} MiB", (most - before) >> 20);
}

#[test]
fn what_is_no_message_gets_a_reason() {
    let mut destination = Destination::new(&[]);
    let mut control = Peer::accepted(destination.port, CONTROL);
    control.say(&header(99, 0)).unwrap();
    let reason = control.expect(ABANDON);
    assert!(reason.field(0).unwrap().text().contains("unknown control message kind 99"));
    assert!(control.is_closed());
    let here = destination.process.migration().unwrap().error;
    assert!(here.contains("unknown control message kind 99"), "{here}");
}

#[test]
fn a_guest_larger_than_the_host_is_refused_before_anything_is_built() {
    let destination = Destination::new(&[]);
    let (before, _) = destination.process.memory();
    for (name, pages) in [(1, 1 << 28), (2, 1 << 31), (3, (1 << 40) - 1)] {
        let reason = refusal(destination.port, &setup_of_size(name, pages));
        assert!(reason.contains("of memory, at most"), "{reason}");
    }
    let (_, most) = destination.process.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
    let limited = Destination::new(&["--memory-max", "8M"]);
    let reason = refusal(limited.port, &setup_of(&captured_setup(&[]), 1));
    // With what it boots from.
    assert!(reason.contains("20.0 MiB of memory, at most 8.0 MiB are taken here"), "{reason}");
}

#[test]
fn rdma_for_an_address_without_it_is_refused_by_name() {
    let destination = Destination::new(&[]);
    let (_, status) = Peer::greet(destination.port, &hello(RDMA, 0, &[])).unwrap();
    assert_eq!(status, 9);
}
