//! Stands between a source and a destination and passes on all that they say, until the attempt's
//! plan wants something else.

use crate::desk::Desk;
use crate::link::{HELLO, Link, pump};
use crate::plan::{Channel, Way};
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a hello may take. A source whose life ends meanwhile ends the connection as well.
const HELLO_MAX: Duration = Duration::from_secs(10);

/// Dropping it breaks all its connections.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    desk: Arc<Desk>,
    /// The destination's port.
    target: AtomicU16,
    stop: AtomicBool,
}

impl Proxy {
    pub(crate) fn start(target: u16, desk: &Arc<Desk>) -> Result<Proxy, String> {
        let failed = |e: io::Error| format!("cannot start the proxy: {e}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let shared = Arc::new(Shared {
            desk: Arc::clone(desk),
            target: AtomicU16::new(target),
            stop: AtomicBool::new(false),
        });
        let acceptor = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    if shared.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || serve(stream, &shared));
                }
            })
        };
        Ok(Proxy { port, shared, acceptor: Some(acceptor) })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// New connections go to another destination.
    pub(crate) fn retarget(&self, port: u16) {
        self.shared.target.store(port, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.shared.desk.close_all();
    }
}

/// Passes a connection on. Without a destination it just ends.
fn serve(source: TcpStream, shared: &Arc<Shared>) {
    let port = shared.target.load(Ordering::Relaxed);
    let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let Ok(destination) = TcpStream::connect(target) else { return };
    let mut hello = [0; HELLO];
    let _ = source.set_read_timeout(Some(HELLO_MAX));
    if (&source).read_exact(&mut hello).is_err() {
        return;
    }
    let number = |at: usize| u16::from_le_bytes([hello[at], hello[at + 1]]);
    let channel = match number(12) {
        1 => Channel::Control,
        2 => Channel::Data(number(14)),
        _ => Channel::Query,
    };
    let Ok(link) = Link::new(channel, source, destination) else { return };
    let link = Arc::new(link);
    shared.desk.register(&link);
    let back = (Arc::clone(&link), Arc::clone(&shared.desk));
    std::thread::spawn(move || pump(&back.0, Way::ToSource, &[], &back.1));
    pump(&link, Way::ToDestination, &hello, &shared.desk);
}
