//! Peers over RDMA, in software: what they say beside the queue pairs, and over them.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, setup_of};
use crate::floods::{FLOOD, Flood, MEMORY_MAX, is_endured};
use crate::played::{Played, QUIET};
use crate::wire::{
    CHANNELS_READY, COMES_MAX, CONTROL, Peer, RDMA, SETUP, SETUP_DONE, hello, message,
};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpListener;

/// Kinds of messages beside the queue pairs.
const OFFER: u16 = 1;
const ACCEPT: u16 = 2;
const HEARTBEAT: u16 = 11;
const CLOSE: u16 = 12;
const QUEUE_ADDRESS: u16 = 14;

/// The provider in software, in a queue address.
const SOFT: u16 = 2;

const GARBAGE: &[u8] = b"these bytes are no message at all";

/// Of the soft provider: an answer to a connection, and a frame's header and its kinds.
const ANSWER_BYTES: usize = 8 + 196;
const ACCEPTED: &[u8] = b"mvsoft/a";
const HEADER_BYTES: usize = 16;
const NAK: u8 = 3;

/// More connections than a listener for queue pairs keeps.
const MANY: usize = 200;

/// A message beside the queue pairs.
fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    let head = [&b"mRDM"[..], &kind.to_le_bytes(), &[0; 2], &length.to_le_bytes(), &[0; 4]];
    [&head.concat()[..], body].concat()
}

/// The next message that is no heartbeat.
fn hear(messages: &mut Peer) -> (u16, Vec<u8>) {
    loop {
        let mut header = [0; 16];
        messages.0.read_exact(&mut header).expect("a message");
        assert_eq!(&header[..4], b"mRDM");
        let length = u32::from_le_bytes(header[8..12].try_into().unwrap());
        let mut body = vec![0; usize::try_from(length).unwrap()];
        messages.0.read_exact(&mut body).expect("a message");
        match u16::from_le_bytes([header[4], header[5]]) {
            HEARTBEAT => {}
            kind => return (kind, body),
        }
    }
}

/// Terms with one queue pair and chunks of 1 MiB.
fn terms() -> Vec<u8> {
    let numbers = [1_u16, 1, 0, 0].map(u16::to_le_bytes).concat();
    let lengths = [1_u64, 1 << 20, 1 << 30].map(u64::to_le_bytes).concat();
    [numbers, lengths].concat()
}

/// An attempt whose memory is to come by RDMA.
struct Begun {
    destination: Destination,
    control: Peer,
    messages: Peer,
    token: Vec<u8>,
    /// Where queue pairs are let in.
    port: u16,
}

fn begin() -> Begun {
    let destination = Destination::at("rdma:127.0.0.1:0", &["--rdma-provider", "soft"]);
    let mut control = Peer::accepted(destination.port, CONTROL);
    control.say(&message(SETUP, &setup_of(&captured_setup(&[]), 1))).unwrap();
    let token = control.expect(SETUP_DONE).field(1).expect("a token").bytes().to_vec();
    let (mut messages, status) = Peer::greet(destination.port, &hello(RDMA, 0, &token)).unwrap();
    assert_eq!(status, 0);
    control.expect(CHANNELS_READY);
    let (kind, address) = hear(&mut messages);
    assert_eq!((kind, &address[..2]), (QUEUE_ADDRESS, &SOFT.to_le_bytes()[..]));
    let port = u16::from_le_bytes([address[2], address[3]]);
    Begun { destination, control, messages, token, port }
}

impl Begun {
    fn agree(&mut self) {
        self.messages.say(&frame(OFFER, &terms())).unwrap();
        assert_eq!(hear(&mut self.messages).0, ACCEPT);
    }

    /// Connects a queue pair with this token; what came of it.
    fn queue_pair(&self, token: &[u8]) -> Option<Peer> {
        let mut pair = Peer::silent(self.port).unwrap();
        let mut data = [&b"mRQP"[..], &1_u16.to_le_bytes(), &[0; 2], token].concat();
        data.resize(56, 0);
        pair.say(&[&b"mvsoft/1"[..], &data].concat()).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        let answered = pair.0.read_exact(&mut answer).is_ok();
        (answered && answer.starts_with(ACCEPTED)).then_some(pair)
    }

    /// The next source is served, whatever this one did.
    fn serves_the_next(self) {
        let Begun { destination, control, messages, .. } = self;
        control.hang_up();
        messages.hang_up();
        Attempt::begin(destination.port, &setup_of(&captured_setup(&[]), 1)).end_round(0);
        assert!(!destination.process.said().contains("panicked"));
    }
}

#[test]
fn garbage_beside_the_queue_pairs_gets_a_reason() {
    let mut begun = begin();
    begun.messages.say(GARBAGE).unwrap();
    let reason = begun.control.expect(crate::wire::ABANDON);
    let reason = reason.field(0).unwrap().text();
    assert!(reason.contains("RDMA frame starts with \"thes\""), "{reason}");
    begun.serves_the_next();
}

#[test]
fn heartbeats_without_end_are_endured() {
    let mut begun = begin();
    begun.agree();
    let (before, _) = begun.destination.process.memory();
    let flood = Flood::new(&begun.messages.0, frame(HEARTBEAT, &[0; 8]).repeat(1000));
    is_endured(begun.destination, before, flood);
}

#[test]
fn queue_pairs_of_others_are_not_let_in() {
    let mut begun = begin();
    begun.agree();
    assert!(begun.queue_pair(&[1; 16]).is_none());
    let mut garbage = Peer::silent(begun.port).unwrap();
    garbage.say(&GARBAGE.repeat(2)).unwrap();
    assert!(garbage.is_closed());
    let _silent: Vec<Peer> = (0..MANY).map(|_| Peer::silent(begun.port).unwrap()).collect();
    assert!(begun.queue_pair(&begun.token).is_some());
    begun.serves_the_next();
}

/// A key that was never granted opens nothing, and who uses one loses RDMA.
#[test]
fn a_write_by_a_key_that_nobody_has_goes_nowhere() {
    let mut begun = begin();
    begun.agree();
    let mut pair = begun.queue_pair(&begun.token).expect("it is let in");
    let requests = [&[1, 0, 1, 0][..], &[0; 12]].concat();
    let record = [1_u32, 0, 8, 0xdead].map(u32::to_le_bytes).concat();
    let address = 0x10_0000_u64.to_le_bytes();
    pair.say(&[&requests[..], &record, &address, &[0xff; 8]].concat()).unwrap();
    let mut header = [0; HEADER_BYTES];
    pair.0.read_exact(&mut header).expect("an answer");
    assert_eq!(header[0], NAK, "{header:?}");
    assert!(pair.is_closed());
    assert_eq!(hear(&mut begun.messages).0, CLOSE);
    begun.serves_the_next();
}

#[test]
fn garbage_over_a_queue_pair_ends_rdma() {
    let mut begun = begin();
    begun.agree();
    let mut pair = begun.queue_pair(&begun.token).expect("it is let in");
    pair.say(GARBAGE).unwrap();
    assert!(pair.is_closed());
    assert_eq!(hear(&mut begun.messages).0, CLOSE);
    begun.serves_the_next();
}

/// A source whose memory is to go by RDMA, to us.
fn called() -> (Played, Peer) {
    let soft = json!({ "x-rdma-provider": "soft" });
    let (source, listener, dir) = Played::source_by("rdma", QUIET, &soft);
    let (control, role, _) = listener.accept();
    assert_eq!(role, CONTROL);
    let mut played = Played::of(source, listener, control, dir);
    let messages = played.set_up_for(RDMA);
    (played, messages)
}

/// Says where queue pairs are let in, and takes the terms.
fn agree(messages: &mut Peer, queues: &TcpListener) {
    let port = queues.local_addr().unwrap().port();
    let address = [SOFT, port, 0, 0].map(u16::to_le_bytes).concat();
    messages.say(&frame(QUEUE_ADDRESS, &address)).unwrap();
    let (kind, offered) = hear(messages);
    assert_eq!(kind, OFFER);
    messages.say(&frame(ACCEPT, &offered)).unwrap();
}

#[test]
fn a_source_that_hears_garbage_keeps_its_guest() {
    let (mut played, mut messages) = called();
    messages.say(GARBAGE).unwrap();
    played.comes_to("failed", COMES_MAX);
    played.runs();
}

#[test]
fn a_source_whose_queue_pairs_answer_garbage_keeps_its_guest() {
    let queues = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut played, mut messages) = called();
    agree(&mut messages, &queues);
    queues.accept().unwrap().0.write_all(&GARBAGE.repeat(10)).unwrap();
    assert_eq!(hear(&mut messages).0, CLOSE);
    played.cancels("while nobody says that nothing can land any more");
}

/// Its queue pairs are not answered, either: nothing of that keeps its owner from being heard.
#[test]
fn a_source_endures_heartbeats_without_end() {
    let queues = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut played, mut messages) = called();
    agree(&mut messages, &queues);
    let (before, _) = played.source.memory();
    let flood = Flood::new(&messages.0, frame(HEARTBEAT, &[0; 8]).repeat(1000));
    std::thread::sleep(FLOOD);
    let (_, most) = played.source.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
    played.cancels("in a flood of heartbeats");
    drop(flood);
}
