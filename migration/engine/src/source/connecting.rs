//! Connections to the destination are made on threads of their own: a name may be looked up for
//! minutes, a listener may not accept, and the driver has to hear its owner meanwhile.

use super::events::Event;
use super::shared::Shared;
use crate::{Error, Fault, host};
use martlet_protocol::limits::CHANNELS_WAIT_MAX;
use martlet_transport::{
    Address, GREETING_MAX, GreetingError, Stream, Target, Until, connect_all, connect_first,
    monotonic_now, wait_any,
};
use martlet_wire::hello::Hello;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Beyond the deadline of a connection, until its thread is not waited for any more: it is still
/// looking a name up, and may be left to that.
const LOOKUP_GRACE: Duration = Duration::from_millis(500);

/// Connects to the destination; which of the address's targets it was goes for all channels. An
/// error that is nobody's fault says that the owner did not want to wait.
pub(super) fn control(
    shared: &Arc<Shared>,
    to: &Address,
    resolve: impl FnOnce(&Address) -> io::Result<Vec<Target>> + Send + 'static,
) -> Result<(Stream, Target), Error> {
    let (theirs, address) = (Arc::clone(shared), to.clone());
    let connecting = host::spawn("martlet-connect", move || {
        let until = Until::within(GREETING_MAX).or_cancelled(&theirs.over);
        let reached = host::guarded(|| {
            let failed = |source| GreetingError::Connect { to: address.clone(), source };
            let targets = resolve(&address).map_err(failed)?;
            connect_first(&address, &targets, &Hello::control(), &until)
        });
        let reached = reached.map_err(|panic| Error::new(Fault::Host, "", panic));
        let reached = reached.and_then(|reached| reached.map_err(|error| unreached(&error)));
        theirs.events.post(Event::Connected(reached));
    });
    connecting.map_err(|error| Error::caused(Fault::Host, "start a thread", error))?;
    let deadline = monotonic_now().after(GREETING_MAX + LOOKUP_GRACE);
    loop {
        if shared.is_cancelled() {
            return Err(Error::new(Fault::Cancelled, "", "cancelled by its owner"));
        }
        while let Some(event) = shared.events.take() {
            if let Event::Connected(reached) = event {
                return reached;
            }
        }
        let left = deadline.since(monotonic_now());
        let mut fds = [PollFd::new(shared.events.wake(), PollFlags::IN)];
        let waited = wait_any(&mut fds, left);
        if left.is_zero() || waited.is_err() {
            let seconds = GREETING_MAX.as_secs();
            let reason = format!("cannot connect to {to}: no connection within {seconds} s");
            return Err(Error::new(Fault::Peer, "", reason));
        }
    }
}

/// The destination's fault, or that of the way to it.
pub(super) fn unreached(error: &GreetingError) -> Error {
    Error::new(Fault::Peer, "", error.to_string())
}

/// Opens the data channels in the background; [`Event::ChannelsOpened`] says what came of it.
pub(super) fn channels(
    shared: &Arc<Shared>,
    to: &Address,
    target: &Target,
    hellos: Vec<Hello>,
) -> io::Result<()> {
    let (shared, to, target) = (Arc::clone(shared), to.clone(), target.clone());
    let connecting = host::spawn("martlet-connect", move || {
        let until = Until::within(CHANNELS_WAIT_MAX).or_cancelled(&shared.over);
        let doing = "open the data channels";
        let opened = host::guarded(|| connect_all(&to, &target, &hellos, &until));
        let opened = opened.map_err(|panic| Error::new(Fault::Host, doing, panic));
        let opened = opened.and_then(|opened| {
            opened.map_err(|error| Error::new(Fault::Peer, doing, error.to_string()))
        });
        shared.events.post(Event::ChannelsOpened(opened));
    });
    connecting.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_transport::{Greeting, Listener, reply};
    use martlet_units::PageCount;
    use martlet_wire::hello::HelloReply;
    use std::sync::mpsc;
    use std::thread;

    fn shared() -> Arc<Shared> {
        Arc::new(Shared::new(monotonic_now(), PageCount(1), Duration::from_secs(1)).unwrap())
    }

    fn nowhere() -> Address {
        "tcp:nowhere.invalid:1".parse().unwrap()
    }

    /// Accepts so many connections; the streams.
    fn accept(listener: &Listener, count: usize) -> Vec<Stream> {
        let mut streams = Vec::new();
        while streams.len() < count {
            let Some(stream) = listener.try_accept().unwrap() else {
                thread::yield_now();
                continue;
            };
            let mut greeting = Greeting::default();
            let hello = loop {
                match greeting.advance(&stream).unwrap() {
                    Some(hello) => break hello,
                    None => thread::yield_now(),
                }
            };
            reply(&stream, &HelloReply::accept(hello.negotiate().unwrap())).unwrap();
            streams.push(stream);
        }
        streams
    }

    /// The name is looked up once: what took the control connection gets the channels, too.
    #[test]
    fn the_target_that_took_the_control_connection_gets_the_channels() {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let Address::Tcp { port, .. } = listener.address().unwrap() else { unreachable!() };
        let live = Target::Ip(([127, 0, 0, 1], port).into());
        let targets = vec![Target::Unix("/nonexistent".into()), live.clone()];
        let accepting = thread::spawn(move || accept(&listener, 3));
        let shared = shared();
        let (_control, reached) = control(&shared, &nowhere(), |_| Ok(targets)).unwrap();
        assert_eq!(reached, live);
        let hellos = (0..2).map(|channel| Hello::data(channel, [1; 16])).collect();
        channels(&shared, &nowhere(), &reached, hellos).unwrap();
        let opened = loop {
            if let Some(Event::ChannelsOpened(opened)) = shared.events.take() {
                break opened.unwrap();
            }
            thread::yield_now();
        };
        assert!(opened.iter().all(|stream| stream.peer().map(Target::Ip) == Some(live.clone())));
        assert_eq!(accepting.join().unwrap().len(), 3);
    }

    #[test]
    fn a_name_that_is_looked_up_for_ever_keeps_no_owner_waiting() {
        let (answer, awaited) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let shared = shared();
        let owner = Arc::clone(&shared);
        let cancelling = thread::spawn(move || {
            begins.recv().unwrap();
            owner.cancel();
        });
        let refused = control(&shared, &nowhere(), move |_| {
            begun.send(()).unwrap();
            let _ = awaited.recv();
            Err(io::Error::other("no such name"))
        });
        assert_eq!(refused.unwrap_err().fault(), Fault::Cancelled);
        cancelling.join().unwrap();
        drop(answer);
    }

    #[test]
    fn a_name_that_nobody_knows_is_said() {
        let unknown = |_: &Address| Err(io::Error::other("no such name"));
        let error = control(&shared(), &nowhere(), unknown).unwrap_err();
        assert_eq!(error.to_line(), "cannot connect to tcp:nowhere.invalid:1: no such name");
    }
}
