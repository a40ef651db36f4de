//! Channels and rounds: what is handed to the lanes, and how far it has come.

use super::{Driver, FEED_BURST, Kind, Round};
use crate::Status;
use crate::rdma::RdmaSender;
use crate::source::connecting;
use crate::source::lanes::{Common, Lane, Lanes, LastRun, PageLane, RdmaLane};
use martlet_protocol::SourceEvent;
use martlet_ram::{TrackError, mark_touched};
use martlet_transport::{Address, Stream, monotonic_now};
use martlet_units::{ByteCount, BytesPerSec, PageCount};
use martlet_wire::hello::{Hello, Role};
use std::sync::atomic::Ordering;

impl Driver<'_> {
    pub(super) fn open_channels(&mut self, count: u16, token: [u8; 16]) {
        self.token = token;
        let hellos = match self.to {
            Address::Rdma { .. } => {
                self.shared.note_rdma(|_| {});
                vec![Hello { role: Role::RDMA, ..Hello::data(0, token) }]
            }
            _ => (0..count).map(|channel| Hello::data(channel, token)).collect(),
        };
        if let Err(error) = connecting::channels(&self.shared, &self.to, &self.target, hellos) {
            self.on_channels(Err(error.to_string()));
        }
    }

    pub(super) fn on_channels(&mut self, opened: Result<Vec<Stream>, String>) {
        match opened.and_then(|streams| self.start_lanes(streams)) {
            Ok(lanes) => {
                self.inline_run = Some(LastRun::new(self.ram, &lanes));
                self.lanes = Some(lanes);
                self.tell(SourceEvent::ChannelsConnected);
            }
            Err(error) => {
                let reason = format!("cannot open the data channels: {error}");
                self.tell(SourceEvent::ChannelLost { reason });
            }
        }
    }

    fn start_lanes(&self, streams: Vec<Stream>) -> Result<Lanes, String> {
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
        Lanes::start(lanes, common, finders).map_err(|error| error.to_string())
    }

    /// Starts a round. The first one begins the tracking and sends what the guest ever touched;
    /// a later one sends what the decision's sync found.
    pub(super) fn begin_round(&mut self, number: u32) {
        if number == 0
            && let Err(error) = self.begin_tracking()
        {
            return self.host_failed("cannot track dirty pages", &error);
        }
        self.open_round(number, Kind::PreCopy);
    }

    pub(super) fn open_round(&mut self, number: u32, kind: Kind) {
        self.rounds = number + 1;
        self.round = Some(Round {
            number,
            kind,
            started: monotonic_now(),
            pages: self.dirty.count(),
            bytes_before: self.sent.bytes.load(Ordering::Relaxed),
            pages_before: self.sent.pages().total(),
            handed_out: false,
            barriers_left: self.lanes.as_ref().map_or(0, Lanes::count),
            took: None,
        });
    }

    fn begin_tracking(&mut self) -> Result<(), TrackError> {
        self.shared.set_status(Status::Active);
        self.last_sync = monotonic_now();
        self.tracker = Some(self.vmm.track()?);
        let mut touched = 0;
        for (region, (_, bitmap)) in self.ram.regions().iter().zip(self.dirty.iter()) {
            touched += mark_touched(region, bitmap).map_err(|source| {
                TrackError::host(format!("finding the touched pages of {}", region.range()), source)
            })?;
        }
        self.shared.update(|progress| progress.pages.untouched = self.ram.pages().0 - touched);
        Ok(())
    }

    /// Hands out as much of the round as the lanes take, but not too much at once.
    pub(super) fn hand_out(&mut self) {
        let (Some(lanes), Some(tracker), Some(round)) =
            (&self.lanes, &mut self.tracker, &mut self.round)
        else {
            return;
        };
        if round.handed_out {
            return;
        }
        self.lanes_full = false;
        for _ in 0..FEED_BURST {
            let next = match round.kind {
                Kind::PreCopy => match self.held.take() {
                    Some(chunk) => Ok(Some(chunk)),
                    None => self.scanner.next(tracker.as_mut()),
                },
                // Kept until the commit, for a stop that is called off.
                Kind::Last => Ok(self.last_chunks.get(self.last_handed).copied().or_else(|| {
                    let chunk = self.scanner.next_last()?;
                    self.last_chunks.push(chunk);
                    Some(chunk)
                })),
            };
            match next {
                Ok(Some(chunk)) => match lanes.offer(chunk) {
                    Ok(()) => self.last_handed += 1,
                    Err(chunk) => {
                        self.lanes_full = true;
                        self.held = (round.kind == Kind::PreCopy).then_some(chunk);
                        return;
                    }
                },
                Ok(None) => return self.end_handing_out(),
                Err(error) => return self.host_failed("cannot track dirty pages", &error),
            }
        }
    }

    /// The lanes have all of the round; its barrier goes behind.
    pub(super) fn end_handing_out(&mut self) {
        let (Some(lanes), Some(round)) = (&self.lanes, &mut self.round) else { return };
        if !std::mem::replace(&mut round.handed_out, true) {
            lanes.barrier(round.number, round.kind == Kind::Last);
        }
    }

    pub(super) fn end_rest(&mut self) {
        if let Some((until, decision)) = self.rest
            && until <= monotonic_now()
        {
            self.rest = None;
            self.tell(SourceEvent::Decided(decision));
        }
    }

    pub(super) fn is_handing_out(&self) -> bool {
        self.round.is_some_and(|round| !round.handed_out)
    }

    /// Shows the owner what has been done: what a lane still has in its hands counts as remaining.
    pub(super) fn publish(&self) {
        let bytes = self.sent.bytes.load(Ordering::Relaxed);
        let (sent, round, now) = (self.sent.pages(), self.round, monotonic_now());
        let remaining = match round {
            Some(round) if round.took.is_none() => {
                PageCount(round.pages.saturating_sub(sent.total() - round.pages_before))
            }
            _ => self.measured.dirty,
        };
        self.shared.update(|progress| {
            progress.bytes_sent = ByteCount(bytes);
            (progress.pages.normal, progress.pages.zero) = (sent.normal, sent.zero);
            progress.remaining = remaining;
            let Some(round) = round else { return };
            progress.round = round.number;
            let elapsed = round.took.unwrap_or_else(|| now.since(round.started));
            let bytes = bytes - round.bytes_before;
            // A round that has just begun says nothing of the rate yet.
            if bytes > 0 {
                progress.rate = BytesPerSec::measured(ByteCount(bytes), elapsed);
            }
        });
    }
}
