//! One connection through the proxy: two ways, each with a thread that passes bytes on, until
//! something is done to it.

use crate::desk::Desk;
use crate::frames::{Frames, Piece};
use crate::plan::{Channel, Cut, Way};
use martlet_simulation::Chance;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of a hello, and of its answer.
pub(crate) const HELLO: usize = 64;
const REPLY: usize = 32;
/// Where the answer says whether the connection is accepted: 0 if it is.
const STATUS: std::ops::Range<usize> = 10..12;

/// Bytes taken at a time.
const BUFFER: usize = 256 << 10;
/// A way that is held up looks this often whether it is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What is done with the bytes that go one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// They are lost.
    Drop,
    /// They are not taken.
    Hold,
    /// So many of them become others.
    Garble(u8),
}

pub(crate) struct Link {
    pub(crate) channel: Channel,
    source: TcpStream,
    destination: TcpStream,
    to_source: Mutex<Mode>,
    to_destination: Mutex<Mode>,
    closed: AtomicBool,
}

/// The link is over; whoever passes bytes on ends.
struct Over;

impl Link {
    pub(crate) fn new(
        channel: Channel,
        source: TcpStream,
        destination: TcpStream,
    ) -> io::Result<Link> {
        for stream in [&source, &destination] {
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(LOOK_INTERVAL))?;
            stream.set_read_timeout(None)?;
        }
        let (to_source, to_destination) = (Mutex::new(Mode::Pass), Mutex::new(Mode::Pass));
        let closed = AtomicBool::new(false);
        Ok(Link { channel, source, destination, to_source, to_destination, closed })
    }

    /// Does to it what the plan wants.
    pub(crate) fn cut(&self, cut: Cut) {
        match cut {
            Cut::Reset => self.reset(),
            Cut::Close => self.close(),
            Cut::HalfClose(way) => {
                self.set(way, Mode::Drop);
                for one in [Way::ToSource, Way::ToDestination] {
                    if way.has(one) {
                        let _ = self.ends(one).1.shutdown(Shutdown::Write);
                    }
                }
            }
            Cut::Silence(way) => self.set(way, Mode::Drop),
            Cut::Stall(way) => self.set(way, Mode::Hold),
            Cut::Garble(way, count) => self.set(way, Mode::Garble(count)),
        }
    }

    /// Both ends see the end of the stream.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for end in [&self.source, &self.destination] {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    /// Both ends get a reset: what a close sends once it must not linger. That close comes when
    /// both threads have let go of the link, so they are woken here, which says nothing to the
    /// ends.
    fn reset(&self) {
        for end in [&self.source, &self.destination] {
            let _ = rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO));
        }
        self.closed.store(true, Ordering::Relaxed);
        for end in [&self.source, &self.destination] {
            let _ = end.shutdown(Shutdown::Read);
        }
    }

    fn set(&self, way: Way, mode: Mode) {
        for one in [Way::ToSource, Way::ToDestination] {
            if way.has(one) {
                *self.mode(one).lock().unwrap_or_else(PoisonError::into_inner) = mode;
            }
        }
    }

    fn mode(&self, way: Way) -> &Mutex<Mode> {
        if way == Way::ToSource { &self.to_source } else { &self.to_destination }
    }

    /// Where bytes that go this way come from, and where they go.
    fn ends(&self, way: Way) -> (&TcpStream, &TcpStream) {
        match way {
            Way::ToSource => (&self.destination, &self.source),
            Way::ToDestination | Way::Both => (&self.source, &self.destination),
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Passes bytes on as the mode of this moment wants it. Returns whether they went as they came.
    fn pass(&self, way: Way, bytes: &mut [u8], noise: &mut Chance) -> Result<bool, Over> {
        let mode = {
            let mut mode = self.mode(way).lock().unwrap_or_else(PoisonError::into_inner);
            let now = *mode;
            if let Mode::Garble(count) = now {
                let left = usize::from(count).saturating_sub(bytes.len());
                let left = u8::try_from(left).unwrap_or(0);
                *mode = if left == 0 { Mode::Pass } else { Mode::Garble(left) };
            }
            now
        };
        match mode {
            Mode::Pass => self.write(way, bytes).map(|()| true),
            Mode::Drop => Ok(false),
            Mode::Hold => {
                while !self.is_closed() {
                    std::thread::sleep(LOOK_INTERVAL);
                }
                Err(Over)
            }
            Mode::Garble(count) => {
                for byte in bytes.iter_mut().take(usize::from(count)) {
                    *byte ^= u8::try_from(1 + noise.below(255)).expect("a byte");
                }
                self.write(way, bytes).map(|()| false)
            }
        }
    }

    fn write(&self, way: Way, mut bytes: &[u8]) -> Result<(), Over> {
        let mut to = self.ends(way).1;
        while !bytes.is_empty() {
            if self.is_closed() {
                return Err(Over);
            }
            match to.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(e) if is_retry(&e) => {}
                Err(_) => return Err(Over),
            }
        }
        Ok(())
    }
}

fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Passes on what goes one way until that ends. `first` was read already.
pub(crate) fn pump(link: &Arc<Link>, way: Way, first: &[u8], desk: &Arc<Desk>) {
    let mut pump = Pump {
        link,
        way,
        desk,
        passed: 0,
        noise: Chance::new(desk.plan.noise),
        whole: true,
        frames: (link.channel == Channel::Control)
            .then(|| Frames::after(if way == Way::ToSource { REPLY } else { HELLO })),
    };
    if pump.run(first).is_err() && !link.is_closed() {
        // One end is gone without a farewell, so the other one gets none either.
        link.reset();
    }
}

struct Pump<'a> {
    link: &'a Arc<Link>,
    way: Way,
    desk: &'a Arc<Desk>,
    /// Bytes passed on so far.
    passed: u64,
    noise: Chance,
    frames: Option<Frames>,
    /// The current message went on as it came, so far.
    whole: bool,
}

impl Pump<'_> {
    fn run(&mut self, first: &[u8]) -> Result<(), Over> {
        self.take(first)?;
        let mut buffer = vec![0; BUFFER];
        loop {
            let (mut from, to) = self.link.ends(self.way);
            match from.read(&mut buffer) {
                Ok(0) => {
                    let mut rest = self.frames.as_mut().map(Frames::rest).unwrap_or_default();
                    self.pass(&mut rest)?;
                    let _ = to.shutdown(Shutdown::Write);
                    return Ok(());
                }
                Ok(count) => self.take(&buffer[..count])?,
                Err(e) if is_retry(&e) => {}
                Err(_) => return Err(Over),
            }
            if self.link.is_closed() {
                return Err(Over);
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Over> {
        let pieces = match &mut self.frames {
            Some(frames) => frames.push(bytes),
            None => vec![Piece { bytes: bytes.to_vec(), begins: None, ends: None }],
        };
        for mut piece in pieces {
            let is_control_reply = self.passed == 0
                && self.way == Way::ToSource
                && self.link.channel == Channel::Control;
            if is_control_reply && piece.bytes.get(STATUS) == Some(&[0, 0]) {
                self.desk.accepted();
            }
            if let Some(kind) = piece.begins {
                self.desk.on_coming(kind);
            }
            self.whole &= self.pass(&mut piece.bytes)?;
            if let Some(kind) = piece.ends {
                self.desk.on_passed(kind, self.way, self.whole);
                self.whole = true;
            }
        }
        Ok(())
    }

    /// Passes bytes on, with the fault in between if its place is there.
    fn pass(&mut self, bytes: &mut [u8]) -> Result<bool, Over> {
        let before = self.desk.bytes_before(self.link.channel, self.way, self.passed);
        let before = before.and_then(|count| usize::try_from(count).ok());
        self.passed += bytes.len() as u64;
        match before {
            Some(before) if before < bytes.len() => {
                let (before, behind) = bytes.split_at_mut(before);
                let whole = self.link.pass(self.way, before, &mut self.noise)?;
                self.desk.fire();
                Ok(self.link.pass(self.way, behind, &mut self.noise)? && whole)
            }
            _ => self.link.pass(self.way, bytes, &mut self.noise),
        }
    }
}
