//! Peers that mean harm, or are broken, against real processes. Whatever they send, the process
//! lives, takes little memory, hears its owner, and serves the next one.
//!
//! [`wire`] speaks the protocol by itself. A new case goes into the file of its subject.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod attempt;
mod connections;
mod floods;
mod floods_back;
mod liars;
mod played;
mod promises;
mod rdma;
mod slow;
#[path = "../support/mod.rs"]
mod support;
mod threads;
mod turned_away;
#[allow(dead_code, reason = "it speaks more than the cases of today say")]
mod wire;

use support::Dir;
use support::process::Process;

/// A destination, and the folder that it lives in.
pub(crate) struct Destination {
    pub(crate) process: Process,
    pub(crate) port: u16,
    _dir: Dir,
}

impl Destination {
    pub(crate) fn new(more: &[&str]) -> Destination {
        Destination::at("tcp:127.0.0.1:0", more)
    }

    pub(crate) fn at(listen: &str, more: &[&str]) -> Destination {
        let dir = Dir::new().expect("a folder");
        let receive = [&["receive", "--listen", listen][..], more].concat();
        let mut process = Process::start(dir.path(), 0, &receive).expect("a destination");
        let port = process.port().expect("a port");
        Destination { process, port, _dir: dir }
    }
}
