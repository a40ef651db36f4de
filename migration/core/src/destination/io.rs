//! What an attempt needs of what is around it.

use crate::{DestinationVmm, Error};
use core::time::Duration;
use martlet_ram::GuestRam;
use martlet_units::{Instant, PageRange};
use martlet_wire::control::{Control, Fate, Setup};
use martlet_wire::frame::Kind;
use std::sync::Arc;
use std::task::Waker;

/// What other threads tell an attempt. Each kind comes a bounded number of times before the attempt
/// has acted on it: once for a build, a digest or an owner's order, once for each channel, and for a
/// round only when the source was told of the one before.
pub enum Event {
    /// The machine is built, or why it can't be.
    Built(Result<Arc<dyn DestinationVmm>, Error>),
    /// All channels that were awaited are there.
    ChannelsJoined,
    /// Everything of a round was read on every channel.
    RoundReceived {
        /// Which.
        round: u32,
    },
    /// The digest of this side's memory, or why there is none.
    Digested(Result<[u8; 32], Error>),
    /// A channel ended or broke.
    ChannelLost {
        /// The last round whose barrier came on it.
        last_barrier: Option<u32>,
        /// Why. If that is this host's fault the attempt ends with it.
        error: Error,
    },
    /// The owner takes no guest any more.
    Stop,
}

/// Why no message can be read.
#[derive(Debug)]
pub enum Unheard {
    /// What came is no message for a destination. Answers can still be sent.
    Malformed(Error),
    /// The attempt did not admit a message of this kind; it and all behind it are not read.
    Refused(Kind, Error),
    /// The connection ended or broke.
    Lost(Error),
}

/// What came of looking at the channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing was there.
    Idle,
    /// Something was read.
    Busy,
}

/// What the host says of itself at a moment.
#[derive(Clone, Copy, Debug)]
pub struct HostNow {
    /// CPU time that this process has used.
    pub cpu: Duration,
    /// The wall clock minus the clock of [`DestinationIo::now`], in nanoseconds.
    pub wall_clock_ns: i64,
}

/// What brings an attempt's pages. Threads empty the channels, until the attempt takes them over to
/// do that itself, awake. Dropping it breaks the connections.
pub trait Intake {
    /// Takes all channels from their threads. When it returns none of them reads any more.
    fn take_over(&mut self);

    /// Gives the channels back to their threads.
    fn give_back(&mut self);

    /// Reads a bounded part of what is there on every channel. Only between `take_over` and
    /// `give_back`.
    fn look(&mut self) -> Look;

    /// The source is being told that a round is in.
    fn tell_round(&mut self, round: u32);

    /// Bytes received on all channels.
    fn bytes(&self) -> u64;

    /// Ends all that could still write guest memory. When it returns nothing does any more.
    fn close(&mut self);
}

/// What an attempt needs of what is around it. None of it waits, but [`Intake::take_over`] and
/// [`Intake::close`] for a read that is under way.
pub trait DestinationIo {
    /// The present. Never goes back.
    fn now(&self) -> Instant;

    /// What this host says of itself, for the report.
    fn host(&self) -> HostNow;

    /// Ends a wait early.
    fn waker(&self) -> Waker;

    /// The next thing that another thread has said.
    fn take_event(&mut self) -> Option<Event>;

    /// The next message of the source, if all of it is there. Of one that is not admitted no more
    /// than its header is read.
    fn receive(&mut self, admits: &dyn Fn(Kind) -> bool) -> Result<Option<Control>, Unheard>;

    /// Puts a message behind those that wait to be sent.
    fn queue(&mut self, message: &Control);

    /// Sends what was queued, as far as there is room; how many bytes are left. Be waiting for room
    /// while some are.
    fn flush(&mut self) -> Result<usize, Error>;

    /// Builds the machine, aside: [`Event::Built`] says what came of it.
    fn build(&mut self, setup: Setup, layout: Vec<PageRange>);

    /// Nobody needs the machine that is being built.
    fn cancel_build(&mut self);

    /// Lets so many channels in that show the token: [`Event::ChannelsJoined`].
    fn await_channels(&mut self, count: u16, token: [u8; 16]);

    /// Receives into this memory from the channels that have joined.
    fn open_intake(&mut self, ram: &Arc<GuestRam>) -> Result<Box<dyn Intake>, Error>;

    /// Breaks the channels that have joined and were not opened; no more are let in.
    fn drop_channels(&mut self);

    /// Digests the memory, aside: [`Event::Digested`].
    fn digest(&mut self, ram: &Arc<GuestRam>);

    /// It is decided what becomes of the guest: whoever asks is told so from now on. The source was
    /// told before.
    /// The machine is that of the guest that is here.
    fn decide(&mut self, fate: Fate, vmm: Option<&Arc<dyn DestinationVmm>>);
}
