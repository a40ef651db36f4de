//! Stands between a source and a destination, and breaks what it is told to.
#![allow(dead_code, unreachable_pub, missing_docs)]

use martlet_transport::Address;
use martlet_wire::control::Control;
use martlet_wire::frame::{FRAME_HEADER_BYTES, FrameHeader};
use martlet_wire::hello::{HELLO_BYTES, Hello, REPLY_BYTES, Role};
use martlet_wire::rdma::{
    Grant, RDMA_HEADER_BYTES, RdmaMessage, RoundEnd, WireSpan, ZeroList, ZeroRange,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All queue pairs' connections are cut when so many bytes went over them.
    Cut { after: u64 },
    /// The same from the moment on when the source says that it will stop the guest.
    CutInBlackout,
    /// Queue pairs are sent to a port where nobody listens.
    WrongPort,
    /// Bytes that are no message, to the source, before all others.
    GarbageToSource,
    /// The same to the destination.
    GarbageToDestination,
    /// Something that is not true, behind the acceptance of the terms.
    Lie(Lie),
}

/// What a lying peer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// To the source: a key for memory that was not asked for.
    KeyNobodyAskedFor,
    /// To the source: no registration of what was not asked for.
    RefusalNobodyAskedFor,
    /// To the source: a zero list is executed that was never sent.
    ZerosNobodySent,
    /// To the source: nothing can land any more, and rounds have arrived that were never sent.
    RoundsThatNeverWere,
    /// To the source: other terms, while its pages are on their way.
    TermsAgain,
    /// To the destination: memory that the guest does not have.
    KeyBeyondTheGuest,
    /// To the destination: zeros where the guest has no memory.
    ZerosBeyondTheGuest,
    /// To the destination: the last round is over before it began.
    EndBeforeTheBegin,
    /// To the destination: a key is given back that was never granted.
    KeyNobodyHas,
}

impl Lie {
    pub const ALL: [Lie; 9] = [
        Lie::KeyNobodyAskedFor,
        Lie::RefusalNobodyAskedFor,
        Lie::ZerosNobodySent,
        Lie::RoundsThatNeverWere,
        Lie::TermsAgain,
        Lie::KeyBeyondTheGuest,
        Lie::ZerosBeyondTheGuest,
        Lie::EndBeforeTheBegin,
        Lie::KeyNobodyHas,
    ];

    /// What it says, behind this acceptance of the terms; whether to the source.
    fn bytes(self, accept: &[u8]) -> (bool, Vec<u8>) {
        let span = WireSpan { region: 1, first_chunk: 3, chunks: 1 };
        let beyond = WireSpan { region: 9, first_chunk: u64::MAX, chunks: 1 };
        let zeros = ZeroRange { region: 0, first_page: u64::MAX - 1, count: 7 };
        let (to_source, message) = match self {
            Lie::TermsAgain => return (true, accept.to_vec()),
            Lie::KeyNobodyAskedFor => {
                (true, RdmaMessage::KeyGrant(vec![Grant { span, address: 0x1000, key: 1 }]))
            }
            Lie::RefusalNobodyAskedFor => (true, RdmaMessage::KeyRefusal(vec![span])),
            Lie::ZerosNobodySent => (true, RdmaMessage::ZeroDone { sequence: 5 }),
            Lie::RoundsThatNeverWere => (true, RdmaMessage::Revoked { rounds: u32::MAX }),
            Lie::KeyBeyondTheGuest => (false, RdmaMessage::KeyRequest(vec![beyond])),
            Lie::ZerosBeyondTheGuest => {
                (false, RdmaMessage::ZeroList(ZeroList { sequence: 1, ranges: vec![zeros] }))
            }
            Lie::EndBeforeTheBegin => {
                let end = RoundEnd { round: 0, last: true, zero_lists: 3 };
                (false, RdmaMessage::RoundEnd(end))
            }
            Lie::KeyNobodyHas => (false, RdmaMessage::KeyDrop(vec![span])),
        };
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        (to_source, bytes)
    }
}

/// Of a `QueueAddress`: header, provider, then the port.
const ADDRESS_BYTES: usize = RDMA_HEADER_BYTES + 8;
const PORT_AT: usize = RDMA_HEADER_BYTES + 2;

pub struct Proxy {
    port: u16,
}

struct Shared {
    to: (String, u16),
    fault: Fault,
    passed: AtomicU64,
    cut: AtomicBool,
}

impl Proxy {
    pub fn start(to: &Address, fault: Fault) -> Proxy {
        let Address::Rdma { host, port } = to.clone() else { panic!("{to}") };
        let (passed, cut) = (AtomicU64::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { to: (host, port), fault, passed, cut });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.serve(client));
            }
        });
        Proxy { port }
    }

    pub fn address(&self) -> Address {
        Address::Rdma { host: "127.0.0.1".to_owned(), port: self.port }
    }
}

impl Shared {
    fn serve(self: Arc<Shared>, mut client: TcpStream) {
        let mut hello = [0; HELLO_BYTES];
        if client.read_exact(&mut hello).is_err() {
            return;
        }
        let mut server = TcpStream::connect((self.to.0.as_str(), self.to.1)).unwrap();
        server.write_all(&hello).unwrap();
        let role = Hello::parse(&hello).map(|hello| hello.role);
        if role == Ok(Role::RDMA) && self.disturb(&mut client, &mut server).is_err() {
            return;
        }
        if role == Ok(Role::CONTROL) && self.fault == Fault::CutInBlackout {
            let watched = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || self.watch(watched.0, watched.1));
            return forward(server, client, |_| true);
        }
        couple(client, server, |_| true);
    }

    /// Passes the source's messages on, and looks for the one that announces the stop.
    fn watch(&self, mut client: TcpStream, mut server: TcpStream) {
        let mut frame = vec![0; FRAME_HEADER_BYTES];
        while client.read_exact(&mut frame[..FRAME_HEADER_BYTES]).is_ok() {
            let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
            frame.resize(FRAME_HEADER_BYTES + header.body_bytes(), 0);
            let body = &mut frame[FRAME_HEADER_BYTES..];
            if client.read_exact(body).is_err() {
                break;
            }
            if matches!(Control::decode(header.kind(), body), Ok(Control::SwitchoverSoon(_))) {
                self.cut.store(true, Ordering::SeqCst);
            }
            if server.write_all(&frame).is_err() {
                break;
            }
            frame.resize(FRAME_HEADER_BYTES, 0);
        }
        let _ = server.shutdown(Shutdown::Both);
        let _ = client.shutdown(Shutdown::Both);
    }

    /// Changes the first bytes of the connection beside the queue pairs.
    fn disturb(
        self: &Arc<Shared>,
        client: &mut TcpStream,
        server: &mut TcpStream,
    ) -> std::io::Result<()> {
        let mut reply = [0; REPLY_BYTES];
        server.read_exact(&mut reply)?;
        client.write_all(&reply)?;
        let mut address = [0; ADDRESS_BYTES];
        server.read_exact(&mut address)?;
        let port = u16::from_le_bytes([address[PORT_AT], address[PORT_AT + 1]]);
        let elsewhere = match self.fault {
            Fault::Cut { .. } | Fault::CutInBlackout => self.queue_pairs(port),
            // A port that was free a moment ago.
            Fault::WrongPort => TcpListener::bind("127.0.0.1:0")?.local_addr()?.port(),
            _ => port,
        };
        address[PORT_AT..PORT_AT + 2].copy_from_slice(&elsewhere.to_le_bytes());
        client.write_all(&address)?;
        match self.fault {
            Fault::GarbageToSource => client.write_all(b"this is no message at all"),
            Fault::GarbageToDestination => server.write_all(b"this is no message at all"),
            Fault::Lie(lie) => {
                let mut accept = [0; RDMA_HEADER_BYTES + 32];
                let mut offer = accept;
                client.read_exact(&mut offer)?;
                server.write_all(&offer)?;
                server.read_exact(&mut accept)?;
                client.write_all(&accept)?;
                let (to_source, bytes) = lie.bytes(&accept);
                if to_source { client } else { server }.write_all(&bytes)
            }
            Fault::Cut { .. } | Fault::CutInBlackout | Fault::WrongPort => Ok(()),
        }
    }

    /// Lets queue pairs through until enough went over them; returns where they are let in.
    fn queue_pairs(self: &Arc<Shared>, port: u16) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap().port();
        let shared = Arc::clone(self);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || couple(client, server, |bytes| shared.pass(bytes)));
            }
        });
        here
    }

    fn pass(&self, bytes: u64) -> bool {
        let passed = self.passed.fetch_add(bytes, Ordering::SeqCst) + bytes;
        // The hello of a connection is let through.
        if matches!(self.fault, Fault::Cut { after } if passed >= after + 4096) {
            self.cut.store(true, Ordering::SeqCst);
        }
        !self.cut.load(Ordering::SeqCst)
    }
}

/// Copies both ways until an end or until `pass` says no.
fn couple(client: TcpStream, server: TcpStream, pass: impl Fn(u64) -> bool + Sync) {
    std::thread::scope(|scope| {
        let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        scope.spawn(|| forward(from, to, &pass));
        scope.spawn(|| forward(server, client, &pass));
    });
}

fn forward(mut from: TcpStream, mut to: TcpStream, pass: impl Fn(u64) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(got) = from.read(&mut buffer) {
        if got == 0 || !pass(got as u64) || to.write_all(&buffer[..got]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
