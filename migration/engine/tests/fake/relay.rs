//! What stands between a source and a destination: takes the source's connections, and lets the
//! test decide what becomes of each and of its messages.

use martlet_transport::Address;
use martlet_wire::frame::{FRAME_HEADER_BYTES, FrameHeader, Kind};
use martlet_wire::hello::{HELLO_BYTES, Hello, Role};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// A connection of the source's that has greeted and gone no further.
pub struct Caller {
    to: (String, u16),
    hello: [u8; HELLO_BYTES],
    client: TcpStream,
    /// What it is for.
    pub role: Role,
}

impl Caller {
    /// Connects to the destination with the same greeting: the source's end and the destination's.
    pub fn connect(self) -> (TcpStream, TcpStream) {
        let mut server = TcpStream::connect((self.to.0.as_str(), self.to.1)).unwrap();
        for end in [&self.client, &server] {
            end.set_nodelay(true).unwrap();
        }
        server.write_all(&self.hello).unwrap();
        (self.client, server)
    }
}

/// Serves each connection that is meant for `to`, on a thread of its own; where it listens.
pub fn start(to: &Address, serve: impl Fn(Caller) + Send + Sync + 'static) -> Address {
    let Address::Tcp { host, port } = to.clone() else { panic!("{to}") };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A way, not a store.
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
    let here = listener.local_addr().unwrap().port();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let (serve, to) = (Arc::clone(&serve), (host.clone(), port));
            thread::spawn(move || {
                let mut hello = [0; HELLO_BYTES];
                if client.read_exact(&mut hello).is_ok() {
                    let role = Hello::parse(&hello).unwrap().role;
                    serve(Caller { to, hello, client, role });
                }
            });
        }
    });
    Address::Tcp { host: "127.0.0.1".to_owned(), port: here }
}

/// Hands over the messages of a control connection one by one, until that ends or `each` says
/// `false`.
pub fn messages(mut from: &TcpStream, mut each: impl FnMut(Kind, &[u8]) -> bool) {
    let mut frame = vec![0; FRAME_HEADER_BYTES];
    while from.read_exact(&mut frame[..FRAME_HEADER_BYTES]).is_ok() {
        let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
        frame.resize(FRAME_HEADER_BYTES + header.body_bytes(), 0);
        let is_whole = from.read_exact(&mut frame[FRAME_HEADER_BYTES..]).is_ok();
        if !is_whole || !each(header.kind(), &frame) {
            return;
        }
        frame.resize(FRAME_HEADER_BYTES, 0);
    }
}
