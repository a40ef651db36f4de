//! Connections to the destination are made on threads of their own: a name may be looked up for
//! minutes, a listener may not accept, and the driver has to hear its owner meanwhile.

use super::events::Event;
use super::shared::Shared;
use crate::{Error, Fault, host};
use martlet_protocol::limits::CHANNELS_WAIT_MAX;
use martlet_transport::{
    Address, GREETING_MAX, Stream, Target, Until, connect_all, connect_first, monotonic_now,
    wait_any,
};
use martlet_wire::hello::Hello;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Beyond the deadline of a connection, until its thread is not waited for any more: it is still
/// looking a name up, and may be left to that.
const LOOKUP_GRACE: Duration = Duration::from_millis(500);

/// Why there is no control connection.
pub(super) enum Unconnected {
    /// In one line.
    Failed(String),
    /// The owner did not want to wait.
    Cancelled,
}

/// Connects to the destination; which of the address's targets it was goes for all channels.
pub(super) fn control(shared: &Arc<Shared>, to: &Address) -> Result<(Stream, Target), Unconnected> {
    let (theirs, address) = (Arc::clone(shared), to.clone());
    let connecting = host::spawn("martlet-connect", move || {
        let until = Until::within(GREETING_MAX).or_cancelled(&theirs.over);
        let reached = host::guarded(|| connect_first(&address, &Hello::control(), &until));
        let reached = reached.and_then(|reached| reached.map_err(|error| error.to_string()));
        theirs.events.post(Event::Connected(reached));
    });
    connecting.map_err(|error| Unconnected::Failed(format!("cannot start a thread: {error}")))?;
    let deadline = monotonic_now().after(GREETING_MAX + LOOKUP_GRACE);
    loop {
        if shared.is_cancelled() {
            return Err(Unconnected::Cancelled);
        }
        while let Some(event) = shared.events.take() {
            if let Event::Connected(reached) = event {
                return reached.map_err(Unconnected::Failed);
            }
        }
        let left = deadline.since(monotonic_now());
        let mut fds = [PollFd::new(shared.events.wake(), PollFlags::IN)];
        let waited = wait_any(&mut fds, left);
        if left.is_zero() || waited.is_err() {
            let seconds = GREETING_MAX.as_secs();
            let reason = format!("cannot connect to {to}: no connection within {seconds} s");
            return Err(Unconnected::Failed(reason));
        }
    }
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
        let opened = host::guarded(|| connect_all(&to, &target, &hellos, &until));
        let opened = opened.and_then(|opened| opened.map_err(|error| error.to_string()));
        let opened =
            opened.map_err(|reason| Error::new(Fault::Peer, "open the data channels", reason));
        shared.events.post(Event::ChannelsOpened(opened));
    });
    connecting.map(drop)
}
