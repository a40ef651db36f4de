//! Connections that are no migration's.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, setup_of};
use crate::wire::{CONTROL, Peer, hello};

#[test]
fn another_protocol_is_turned_away_and_a_source_is_let_in() {
    let mut destination = Destination::new(&[]);
    let mut browser = Peer::silent(destination.port).unwrap();
    browser.say(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(browser.is_closed());
    let (_silent, status) = Peer::greet(destination.port, &hello(CONTROL, 0, &[])).unwrap();
    assert_eq!(status, 0);
    // It has not said what it brings, so it holds nobody up.
    assert_eq!(destination.process.migration().unwrap().status, "setup");
    let _attempt = Attempt::begin(destination.port, &setup_of(&captured_setup(&[]), 1));
    assert_eq!(destination.process.migration().unwrap().status, "active");
}
