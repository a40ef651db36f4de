//! Who is connected to a control socket, and who has to make room.

use super::dispatch::QmpError;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most clients at once. One more takes the place of the one that was silent for the longest, or
/// if a command of each is being carried out, of the one that has waited for the longest: a guest's
/// owner must be heard, however many monitors were left connected, and whatever they wait for.
pub(crate) const CLIENTS_MAX: usize = 16;
/// Most of those who were asked to leave and have not left yet.
const LEAVING_MAX: usize = 16;

/// The clients of a control socket.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    seats: Mutex<Vec<Seat>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Seat {
    id: u64,
    stream: Arc<UnixStream>,
    /// When it was last heard.
    heard: Instant,
    /// A command of it is being carried out.
    is_busy: bool,
    /// It was asked to leave.
    is_leaving: bool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with(&self, id: u64, change: impl FnOnce(&mut Seat)) {
        if let Some(seat) = self.lock().iter_mut().find(|seat| seat.id == id) {
            change(seat);
        }
    }

    /// Takes a client in, in place of another if it has to be.
    pub(super) fn admit(
        self: &Arc<Self>,
        id: u64,
        stream: &Arc<UnixStream>,
    ) -> Result<Place, QmpError> {
        let mut seats = self.lock();
        let leaving = seats.iter().filter(|seat| seat.is_leaving).count();
        let is_full = seats.len() - leaving >= CLIENTS_MAX;
        if is_full && (leaving >= LEAVING_MAX || !evict_one(&mut seats)) {
            let desc = format!("there are {CLIENTS_MAX} clients, and as many have yet to leave");
            return Err(QmpError::generic(desc));
        }
        let (stream, heard) = (Arc::clone(stream), Instant::now());
        seats.push(Seat { id, stream, heard, is_busy: false, is_leaving: false });
        Ok(Place { id, clients: Arc::clone(self) })
    }

    /// Asks the client to leave that was silent for the longest.
    pub(super) fn evict_one(&self) {
        evict_one(&mut self.lock());
    }

    /// A client's command begins.
    pub(super) fn begin(&self, id: u64) {
        self.with(id, |seat| (seat.heard, seat.is_busy) = (Instant::now(), true));
    }

    /// Its reply is on its way.
    pub(super) fn end(&self, id: u64) {
        self.with(id, |seat| seat.is_busy = false);
    }

    /// Whether it was asked to leave.
    pub(super) fn is_leaving(&self, id: u64) -> bool {
        self.lock().iter().any(|seat| seat.id == id && seat.is_leaving)
    }

    /// No more commands; waits until every client has what was written for it, at most `timeout`.
    pub(crate) fn finish(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut seats = self.lock();
        for seat in seats.iter() {
            let _ = seat.stream.shutdown(Shutdown::Read);
        }
        while !seats.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            seats = match self.changed.wait_timeout(seats, left) {
                Ok((seats, _)) => seats,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

fn evict_one(seats: &mut [Seat]) -> bool {
    let staying = seats.iter_mut().filter(|seat| !seat.is_leaving);
    let Some(seat) = staying.min_by_key(|seat| (seat.is_busy, seat.heard)) else { return false };
    seat.is_leaving = true;
    // Its own thread answers what is being carried out, tells it why, and leaves.
    let _ = seat.stream.shutdown(Shutdown::Read);
    true
}

/// A client's place among [`CLIENTS_MAX`], free again when this is dropped.
pub(super) struct Place {
    id: u64,
    clients: Arc<Clients>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clients.lock().retain(|seat| seat.id != self.id);
        self.clients.changed.notify_all();
    }
}
