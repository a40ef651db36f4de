//! The source's process: the core that ships, and what it acts through in the world.

use crate::lanes::PageLanes;
use crate::machine::Machine;
use crate::net::{End, Net, Side, WireId};
use crate::world::{Event, Name};
use martlet_core::source::{
    Attempt, Config, Ended, Event as CoreEvent, Lanes, Lost, Sent, SourceIo, Wait, Work,
};
use martlet_core::{Error, Fault, Progress, SourceVmm, Status};
use martlet_protocol::SourceConfig;
use martlet_ram::{RamBitmap, mark_touched};
use martlet_transport::{Connection, ControlLink, ReceiveError};
use martlet_units::{ByteCount, Instant};
use martlet_wire::control::{BOOT_ID_UNTOLD, Control, MigrationId, Setup, WireRange};
use martlet_wire::frame::Reader;
use martlet_wire::hello::{Hello, HelloReply, REPLY_BYTES};
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// The blackout that the owner accepts.
pub(crate) const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);

/// How long a connection may take to be accepted.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// An end whose hello was said.
pub(crate) struct Greeted {
    end: End<Event>,
    reply: [u8; REPLY_BYTES],
    filled: usize,
}

/// What became of connections.
enum Greeting {
    Pending,
    Accepted,
    Failed(String),
}

impl Greeted {
    fn new(end: End<Event>, hello: &Hello) -> Greeted {
        let said = end.write_now(&hello.to_bytes());
        debug_assert!(said.is_ok(), "a new connection has room for a hello");
        Greeted { end, reply: [0; REPLY_BYTES], filled: 0 }
    }

    fn advance(&mut self) -> Greeting {
        while self.filled < REPLY_BYTES {
            match self.end.read_now(&mut self.reply[self.filled..]) {
                Ok(got) => self.filled += got,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Greeting::Pending,
                Err(error) => return Greeting::Failed(error.to_string()),
            }
        }
        match HelloReply::parse(&self.reply).and_then(|reply| reply.accepted()) {
            Ok(_) => Greeting::Accepted,
            Err(error) => Greeting::Failed(error.to_string()),
        }
    }
}

/// Connections that are being made, together.
struct Opening {
    ends: Vec<Greeted>,
    until: Instant,
}

impl Opening {
    /// All of them, or why not; `None` while they are waited for.
    fn advance(&mut self, now: Instant) -> Option<Result<(), String>> {
        let mut all = true;
        for greeted in &mut self.ends {
            match greeted.advance() {
                Greeting::Pending => all = false,
                Greeting::Accepted => {}
                Greeting::Failed(reason) => return Some(Err(reason)),
            }
        }
        match all {
            true => Some(Ok(())),
            false if now >= self.until => Some(Err("no greeting in time".to_owned())),
            false => None,
        }
    }

    fn into_ends(self) -> Vec<End<Event>> {
        self.ends.into_iter().map(|greeted| greeted.end).collect()
    }
}

/// What an attempt acts through.
pub(crate) struct Outside {
    net: Rc<Net<Event>>,
    vmm: Arc<Machine>,
    name: Name,
    control: ControlLink<End<Event>>,
    lanes: Option<PageLanes<Event>>,
    opening: Option<Opening>,
    pub(crate) cancelled_at: Option<Instant>,
    /// The commit was given to the connection.
    pub(crate) has_committed: bool,
    pub(crate) status: Status,
    pub(crate) ended: Option<Ended>,
    pub(crate) unanswered: u32,
    /// Of the data channels.
    pub(crate) wires: Vec<WireId>,
}

/// An attempt of the source's process.
pub(crate) struct Run {
    pub(crate) attempt: Option<Attempt>,
    pub(crate) outside: Option<Outside>,
    connecting: Option<Opening>,
    config: Option<Config>,
    cancelled_at: Option<Instant>,
    /// It ended before it began.
    not_begun: Option<Status>,
    pub(crate) migration: MigrationId,
    pub(crate) control_wire: WireId,
}

impl Run {
    /// Connects. The destination's end of the connection is given back.
    pub(crate) fn begin(
        net: &Rc<Net<Event>>,
        vmm: &Arc<Machine>,
        channels: u16,
        verify: bool,
    ) -> (Run, End<Event>) {
        let (wire, near, far) = net.connect();
        let migration = MigrationId(net.chance(martlet_simulation::Chance::name));
        let ram = SourceVmm::ram(&**vmm);
        let regions = ram
            .layout()
            .iter()
            .map(|range| WireRange { start_gfn: range.start().0, pages: range.pages().0 })
            .collect();
        let (machine, boot_id) = (vmm.machine_description(), BOOT_ID_UNTOLD);
        let setup = Setup { migration, regions, machine, channels, boot_id };
        let protocol =
            SourceConfig { setup, clock_key: None, verify, downtime_limit: DOWNTIME_LIMIT };
        let config = Config {
            started: net.now(),
            protocol,
            auto_converge: false,
            within: None,
            dirty: Arc::new(RamBitmap::new(&ram)),
            total: ram.pages(),
        };
        let ends = vec![Greeted::new(near, &Hello::control())];
        let until = net.now().after(GREETING_MAX);
        let run = Run {
            attempt: None,
            outside: None,
            connecting: Some(Opening { ends, until }),
            config: Some(config),
            cancelled_at: None,
            not_begun: None,
            migration,
            control_wire: wire,
        };
        (run, far)
    }

    pub(crate) fn status(&self) -> Status {
        match (&self.outside, self.not_begun) {
            (_, Some(status)) => status,
            (Some(outside), None) => outside.status,
            (None, None) => Status::Setup,
        }
    }

    /// Whether the owner was told how it ended; an undecided attempt has so far.
    pub(crate) fn has_ended(&self) -> bool {
        self.not_begun.is_some()
            || self.outside.as_ref().is_some_and(|outside| outside.ended.is_some())
    }

    pub(crate) fn cancel(&mut self, now: Instant) {
        self.cancelled_at.get_or_insert(now);
        if let Some(outside) = &mut self.outside {
            outside.cancelled_at.get_or_insert(now);
        }
    }

    /// When the owner wanted the guest to stay, while nothing has come of that.
    pub(crate) fn unheard_cancel(&self) -> Option<Instant> {
        let committed = self.outside.as_ref().is_some_and(|outside| outside.has_committed);
        self.cancelled_at.filter(|_| !committed && !self.has_ended())
    }

    pub(crate) fn tell(&mut self, event: CoreEvent) {
        if let Some(attempt) = &mut self.attempt {
            attempt.on_event(event);
        }
    }

    /// Takes in what came; when to step again at the latest.
    pub(crate) fn step(
        &mut self,
        net: &Rc<Net<Event>>,
        vmm: &Arc<Machine>,
        name: Name,
    ) -> Option<Instant> {
        if let Some(until) = self.connect(net, vmm, name) {
            return Some(until);
        }
        let (Some(attempt), Some(outside)) = (&mut self.attempt, &mut self.outside) else {
            return None;
        };
        if outside.ended.is_some() && outside.status != Status::Undecided {
            return None;
        }
        outside.advance_opening(attempt);
        attempt.step(outside);
        if attempt.is_over() {
            attempt.conclude(outside);
            if outside.status != Status::Undecided {
                outside.lanes = None;
                return None;
            }
        }
        let now = net.now();
        let at = match attempt.wait(outside) {
            Wait::No => now.after(Duration::from_micros(1)),
            Wait::Yield => now.after(Duration::from_micros(15)),
            Wait::Until(at) => at,
        };
        Some(outside.opening.as_ref().map_or(at, |opening| at.min(opening.until)))
    }

    /// While the control connection is being made: until when it is waited for.
    fn connect(&mut self, net: &Rc<Net<Event>>, vmm: &Arc<Machine>, name: Name) -> Option<Instant> {
        let connecting = self.connecting.as_mut()?;
        let advanced = connecting.advance(net.now());
        if self.cancelled_at.is_some() {
            self.not_begun = Some(Status::Cancelled);
            self.connecting = None;
            return None;
        }
        match advanced {
            None => return Some(connecting.until),
            Some(Err(_)) => {
                self.not_begun = Some(Status::Failed);
                self.connecting = None;
            }
            Some(Ok(())) => {
                let end = self.connecting.take()?.into_ends().pop()?;
                let config = self.config.take()?;
                self.attempt = Some(Attempt::new(net.now(), config));
                self.outside = Some(Outside {
                    net: Rc::clone(net),
                    vmm: Arc::clone(vmm),
                    name,
                    control: ControlLink::new(end, Reader::Source),
                    lanes: None,
                    opening: None,
                    cancelled_at: None,
                    has_committed: false,
                    status: Status::Setup,
                    ended: None,
                    unanswered: 0,
                    wires: Vec::new(),
                });
            }
        }
        None
    }

    /// Something that takes long is done.
    pub(crate) fn finish_work(&mut self, vmm: &Machine, work: Work) {
        let caused = |doing: &'static str| {
            move |error: std::io::Error| Error::caused(Fault::Host, doing, error)
        };
        self.tell(match work {
            Work::Track => {
                let tracked = vmm.track();
                CoreEvent::Tracked(
                    tracked.map_err(|e| Error::caused(Fault::Host, "track dirty pages", e)),
                )
            }
            Work::FindTouched { into } => {
                let ram = SourceVmm::ram(vmm);
                let regions = ram.regions().iter().zip(into.iter());
                let touched = regions.map(|(region, (_, bitmap))| mark_touched(region, bitmap));
                let touched = touched.sum::<std::io::Result<u64>>();
                CoreEvent::TouchedFound(touched.map_err(caused("find the touched pages")))
            }
            Work::Rehearse => CoreEvent::Rehearsed(vmm.rehearse()),
            Work::Digest => {
                let digest = SourceVmm::ram(vmm).digest();
                CoreEvent::Digested(digest.map_err(caused("digest guest memory")))
            }
            Work::OpenChannels { .. } | Work::Ask => return,
        });
    }

    /// What the lane of a wire does next, if it is one.
    pub(crate) fn pump(&mut self, net: &Net<Event>, wire: WireId) {
        let (Some(attempt), Some(outside)) = (&mut self.attempt, &mut self.outside) else { return };
        let Some(lanes) = &mut outside.lanes else { return };
        let Some(lane) = lanes.find(wire).filter(|lane| lanes.has_work(*lane)) else { return };
        // The driver's own last run goes by the lane while it has nothing to do.
        let (told, more) = lanes.pump(lane);
        told.into_iter().for_each(|event| attempt.on_event(event));
        if more {
            net.put_after_about(3, Event::Room { wire, from: Side::Source });
        }
    }

    pub(crate) fn unsent(&self) -> usize {
        self.outside.as_ref().map_or(0, |outside| outside.control.unsent())
    }

    pub(crate) fn queued(&self) -> usize {
        let lanes = self.outside.as_ref().and_then(|outside| outside.lanes.as_ref());
        lanes.map_or(0, PageLanes::queued)
    }
}

impl Outside {
    fn advance_opening(&mut self, attempt: &mut Attempt) {
        let Some(opening) = &mut self.opening else { return };
        let Some(opened) = opening.advance(self.net.now()) else { return };
        let opening = self.opening.take().expect("it was there");
        attempt.on_event(CoreEvent::ChannelsOpened(match opened {
            Ok(()) => {
                let ram = SourceVmm::ram(&*self.vmm);
                self.lanes = Some(PageLanes::new(&self.net, ram, opening.into_ends()));
                Ok(())
            }
            Err(reason) => Err(Error::new(Fault::Peer, "open the data channels", reason)),
        }));
    }

    fn open_channels(&mut self, count: u16, token: [u8; 16]) {
        let mut ends = Vec::new();
        for channel in 0..count {
            let (wire, near, far) = self.net.connect();
            self.wires.push(wire);
            ends.push(Greeted::new(near, &Hello::data(channel, token)));
            self.net.put_at(self.net.now(), Event::Connected { end: far });
        }
        self.opening = Some(Opening { ends, until: self.net.now().after(GREETING_MAX) });
    }
}

impl SourceIo for Outside {
    fn now(&self) -> Instant {
        self.net.now()
    }

    fn vmm(&self) -> &dyn SourceVmm {
        &*self.vmm
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled_at.is_some()
    }

    fn downtime_limit(&self) -> Duration {
        DOWNTIME_LIMIT
    }

    fn begin(&mut self, work: Work) {
        let micros = match &work {
            Work::OpenChannels { count, token } => return self.open_channels(*count, *token),
            Work::Track | Work::FindTouched { .. } => 20,
            Work::Rehearse => 150,
            Work::Digest => 300,
            Work::Ask => 2_000,
        };
        self.net.put_after_about(micros, Event::SourceWork { name: self.name, work });
    }

    fn send(&mut self, message: &Control) {
        self.has_committed |= matches!(message, Control::Commit(_));
        self.control.queue(message);
    }

    fn flush(&mut self) -> Result<(), String> {
        self.control.flush().map_err(|error| error.to_string())
    }

    fn unsent(&self) -> usize {
        self.control.unsent()
    }

    fn receive(&mut self) -> Result<Option<Control>, Lost> {
        self.control.try_receive().map_err(|error| match &error {
            ReceiveError::Protocol(_) | ReceiveError::Refused(_) => {
                Lost::Malformed(error.to_string())
            }
            _ => Lost::Gone(error.to_string()),
        })
    }

    fn break_control(&mut self) {
        self.control.stream().reset();
    }

    fn sent(&self) -> Sent {
        self.lanes.as_ref().map_or(Sent::default(), PageLanes::sent)
    }

    fn control_bytes(&self) -> ByteCount {
        ByteCount(self.control.sent_bytes())
    }

    fn lanes(&mut self) -> Option<&mut dyn Lanes> {
        let lanes: &mut dyn Lanes = self.lanes.as_mut()?;
        Some(lanes)
    }

    fn wall_clock_ns(&self) -> i64 {
        0
    }

    fn show(&mut self, progress: &Progress) {
        if !self.status.is_final() {
            self.status = progress.status;
        }
    }

    fn finish(&mut self, ended: Ended) {
        self.status = ended.status;
        self.ended = Some(ended);
    }

    fn unanswered(&mut self, _: &Error) {
        self.unanswered += 1;
    }
}
