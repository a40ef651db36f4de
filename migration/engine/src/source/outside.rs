//! What the core of an attempt acts through in a process: sockets, lanes, threads and the VMM.

use super::driver::Start;
use super::events::{Event, lane_error};
use super::lanes::{self, Common, Lane, LastRun, PageLane, RdmaLane};
use super::shared::Shared;
use super::{MigrateOptions, connecting, query};
use crate::rdma::RdmaSender;
use crate::{Error, Fault, Progress, SourceVmm, chain, host};
use martlet_core::source::{self, Attempt, Ended, Lanes, Lost, Sending, Sent, SourceIo, Work};
use martlet_policy::Pacer;
use martlet_ram::{Chunk, GuestRam, RamBitmap, mark_touched};
use martlet_transport::{
    Address, ControlLink, ReceiveError, Stream, Target, monotonic_now, wait_any,
};
use martlet_units::{ByteCount, Instant};
use martlet_wire::control::{Control, MigrationId};
use martlet_wire::frame::Reader;
use martlet_wire::hello::{Hello, Role};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

pub(super) struct Outside<'ram> {
    shared: Arc<Shared>,
    vmm: Arc<dyn SourceVmm>,
    ram: &'ram Arc<GuestRam>,
    dirty: Arc<RamBitmap>,
    to: Address,
    /// What the address led to: the channels go there too.
    target: Target,
    migration: MigrationId,
    /// What the channels show.
    token: [u8; 16],
    options: MigrateOptions,
    pacer: Arc<Pacer>,
    sent: Arc<lanes::Sent>,
    control: ControlLink,
    waker: Waker,
    lanes: Option<OpenLanes<'ram>>,
    cpu_before: Duration,
    /// Goes with the attempt, which who digests the memory for it sees by that.
    alive: Arc<()>,
}

struct OpenLanes<'ram> {
    lanes: lanes::Lanes,
    /// Few last pages are sent by the driver's thread itself.
    run: LastRun<'ram>,
    outlive_last: bool,
}

impl<'ram> Outside<'ram> {
    pub(super) fn new(
        start: Start,
        ram: &'ram Arc<GuestRam>,
        dirty: Arc<RamBitmap>,
        migration: MigrationId,
        stream: Stream,
        target: Target,
    ) -> Outside<'ram> {
        let Start { vmm, to, options, shared, pacer } = start;
        Outside {
            waker: Waker::from(Arc::clone(&shared.bell)),
            shared,
            vmm,
            ram,
            dirty,
            to,
            target,
            migration,
            token: [0; 16],
            options,
            pacer,
            sent: Arc::default(),
            control: ControlLink::new(stream, Reader::Source),
            lanes: None,
            cpu_before: host::process_cpu(),
            alive: Arc::default(),
        }
    }

    /// Waits until a moment, an event, a message, or room for what is blocked.
    pub(super) fn wait(&self, attempt: &Attempt, until: Instant) -> io::Result<()> {
        if self.shared.bell.begin_wait() {
            return Ok(());
        }
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.control.unsent() > 0);
        let fixed = [
            PollFd::new(self.shared.events.wake(), PollFlags::IN),
            PollFd::new(&*self.shared.bell, PollFlags::IN),
            PollFd::new(&self.control, wanted),
        ];
        let mut fixed = if attempt.is_listening() { fixed.to_vec() } else { fixed[..2].to_vec() };
        if let Some(open) = self.lanes.as_ref().filter(|_| attempt.is_blocked()) {
            open.lanes.blocked(&open.run, &mut fixed);
        }
        let waited = wait_any(&mut fixed, until.since(monotonic_now()));
        self.shared.bell.end_wait();
        waited.map(drop)
    }

    /// What an event of a thread is for the core; `None` if it only wakes.
    pub(super) fn translate(&mut self, event: Event) -> Option<source::Event> {
        Some(match event {
            // Connected once, before there was a driver. The owner's wishes are looked at apart.
            Event::Connected(_) | Event::Owner => return None,
            Event::ChannelsOpened(opened) => {
                source::Event::ChannelsOpened(opened.and_then(|streams| self.start_lanes(streams)))
            }
            Event::BarrierSent { round } => source::Event::BarrierSent { round },
            Event::LaneRoom => source::Event::LaneRoom,
            Event::LaneLost(error) => source::Event::LaneLost(error),
            Event::Attempt(event) => event,
        })
    }

    fn start_lanes(&mut self, streams: Vec<Stream>) -> Result<(), Error> {
        let lanes = self
            .try_start_lanes(streams)
            .map_err(|reason| Error::new(Fault::Peer, "open the data channels", reason))?;
        let run = LastRun::new(self.ram, &lanes);
        // The marker of a last round by RDMA ends RDMA.
        let outlive_last = !matches!(self.to, Address::Rdma { .. });
        self.lanes = Some(OpenLanes { lanes, run, outlive_last });
        Ok(())
    }

    fn try_start_lanes(&self, streams: Vec<Stream>) -> Result<lanes::Lanes, String> {
        let common = Common::new(self.ram, &self.sent, &self.pacer, &self.shared);
        let finders = self.options.zero_finders.as_ref();
        let lanes = streams.into_iter().map(|stream| {
            let breaker = stream.try_clone().map_err(|error| error.to_string())?;
            let lane: Box<dyn Lane> = match self.to {
                Address::Rdma { .. } => {
                    let options = &self.options.rdma;
                    let sender = RdmaSender::new(stream, self.ram, options, self.token)?;
                    Box::new(RdmaLane::new(sender, &self.dirty))
                }
                _ => Box::new(PageLane::new(stream, 0)),
            };
            Ok::<_, String>((lane, breaker))
        });
        let lanes = lanes.collect::<Result<_, _>>()?;
        lanes::Lanes::start(lanes, common, finders).map_err(|error| error.to_string())
    }

    /// Ends the lanes' threads.
    pub(super) fn join_lanes(&mut self) {
        if let Some(open) = self.lanes.take() {
            open.lanes.join();
        }
    }

    fn open_channels(&mut self, count: u16, token: [u8; 16]) {
        self.token = token;
        let hellos = match self.to {
            Address::Rdma { .. } => {
                self.shared.note_rdma(|_| {});
                vec![Hello { role: Role::RDMA, ..Hello::data(0, token) }]
            }
            _ => (0..count).map(|channel| Hello::data(channel, token)).collect(),
        };
        if let Err(error) = connecting::channels(&self.shared, &self.to, &self.target, hellos) {
            let error = Error::caused(Fault::Host, "open the data channels", error);
            self.shared.events.post(Event::ChannelsOpened(Err(error)));
        }
    }

    /// Does something on a thread of its own, and posts what came of it.
    fn aside<T>(
        &self,
        name: &str,
        event: fn(Result<T, Error>) -> source::Event,
        body: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) where
        T: 'static,
    {
        let shared = Arc::clone(&self.shared);
        let spawned = host::spawn(name, move || {
            let done = host::guarded(body);
            let done = done.unwrap_or_else(|reason| Err(Error::new(Fault::Host, "", reason)));
            shared.events.post(Event::Attempt(event(done)));
        });
        if let Err(error) = spawned {
            let error = Error::caused(Fault::Host, "start a thread", error);
            self.shared.events.post(Event::Attempt(event(Err(error))));
        }
    }
}

impl SourceIo for Outside<'_> {
    fn now(&self) -> Instant {
        monotonic_now()
    }

    fn vmm(&self) -> &dyn SourceVmm {
        &*self.vmm
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn is_cancelled(&self) -> bool {
        self.shared.is_cancelled()
    }

    fn downtime_limit(&self) -> Duration {
        self.shared.downtime_limit()
    }

    fn begin(&mut self, work: Work) {
        let vmm = Arc::clone(&self.vmm);
        match work {
            Work::OpenChannels { count, token } => self.open_channels(count, token),
            Work::Track => self.aside("martlet-track", source::Event::Tracked, move || {
                vmm.track().map_err(Error::from)
            }),
            Work::FindTouched { into } => {
                let ram = Arc::clone(self.ram);
                self.aside("martlet-touched", source::Event::TouchedFound, move || {
                    find_touched(&ram, &into)
                });
            }
            Work::Rehearse => {
                self.aside("martlet-rehearse", source::Event::Rehearsed, move || vmm.rehearse());
            }
            Work::Digest => {
                let (ram, attempt) = (Arc::clone(self.ram), Arc::downgrade(&self.alive));
                self.aside("martlet-digest", source::Event::Digested, move || {
                    let digest = ram.digest_while(|| attempt.strong_count() > 0);
                    digest.map_err(|e| Error::caused(Fault::Host, "digest guest memory", e))
                });
            }
            Work::Ask => {
                let (to, target, migration) =
                    (self.to.clone(), self.target.clone(), self.migration);
                self.aside("martlet-query", source::Event::Asked, move || {
                    query::ask(&to, &target, migration)
                });
            }
        }
    }

    fn send(&mut self, message: &Control) {
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
            ReceiveError::Protocol(_) | ReceiveError::Refused(_) => Lost::Malformed(chain(&error)),
            _ => Lost::Gone(chain(&error)),
        })
    }

    fn break_control(&mut self) {
        self.control.stream().abort();
    }

    fn sent(&self) -> Sent {
        let pages = self.sent.pages();
        let bytes = self.sent.bytes.load(Ordering::Relaxed);
        Sent { bytes, normal: pages.normal, zero: pages.zero }
    }

    fn control_bytes(&self) -> ByteCount {
        ByteCount(self.control.sent_bytes())
    }

    fn lanes(&mut self) -> Option<&mut dyn Lanes> {
        let lanes: &mut dyn Lanes = self.lanes.as_mut()?;
        Some(lanes)
    }

    fn wall_clock_ns(&self) -> i64 {
        host::wall_clock_ns()
    }

    fn show(&mut self, progress: &Progress) {
        self.shared.show(progress);
    }

    fn finish(&mut self, ended: Ended) {
        let Ended { status, mut report } = ended;
        report.transfer.source_cpu = host::process_cpu().saturating_sub(self.cpu_before);
        report.transfer.rdma = self.shared.rdma();
        self.shared.finish(status, report);
    }

    fn unanswered(&mut self, reason: &Error) {
        self.shared.note_unanswered(reason.clone());
    }
}

fn find_touched(ram: &GuestRam, into: &RamBitmap) -> Result<u64, Error> {
    let regions = ram.regions().iter().zip(into.iter());
    regions.map(|(region, (_, bitmap))| (region, mark_touched(region, bitmap))).try_fold(
        0,
        |touched, (region, marked)| match marked {
            Ok(pages) => Ok(touched + pages),
            Err(error) => {
                let doing = format!("find the touched pages of {}", region.range());
                Err(Error::caused(Fault::Host, doing, error))
            }
        },
    )
}

impl Lanes for OpenLanes<'_> {
    fn count(&self) -> usize {
        self.lanes.count()
    }

    fn offer(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        self.lanes.offer(chunk)
    }

    fn barrier(&mut self, round: u32, last: bool) {
        self.lanes.barrier(round, last);
    }

    fn set_unpaced(&mut self, unpaced: bool) {
        self.lanes.set_unpaced(unpaced);
    }

    fn unacknowledged(&self) -> ByteCount {
        self.lanes.unacknowledged()
    }

    fn arm(&mut self) {
        self.lanes.arm();
    }

    fn disarm(&mut self) {
        self.lanes.disarm();
    }

    fn begin_last(&mut self) {
        self.run.begin();
    }

    fn send_last(&mut self, chunks: &[Chunk], round: u32) -> Result<Sending, Error> {
        self.lanes.advance(&mut self.run, chunks, round).map_err(|error| lane_error(&error))
    }

    fn outlive_last(&self) -> bool {
        self.outlive_last
    }

    fn break_all(&mut self) {
        self.lanes.break_all();
    }
}
