//! What is known of one device, and how much it may be given.

use super::{DeviceProfile, Grant, Latency, Outcome, Request, picoseconds};
use core::time::Duration;
use martlet_units::Instant;

/// Pages that may be outstanding on a device at first: two batches of 128.
const LIMIT_START_PAGES: u64 = 256;
/// The least limit. A device with nothing outstanding may always be given one batch.
const LIMIT_MIN_PAGES: u64 = 32;
/// The largest limit: 128 batches of 128, all entries of a device.
const LIMIT_MAX_PAGES: u64 = 128 * 128;
/// The limit grows by this for each window (as many pages as the limit) without a bad sign.
const LIMIT_STEP_PAGES: u64 = 128;
/// A page's time on a device is an average over about this many batches; a quarter of that if it
/// gets better, so that a bad time is forgotten fast.
const SMOOTHING: u64 = 8;
/// A device with only its past against it is asked again after this many batches that it did not
/// get; after twice as many each time that it is still slow. One slow batch in 128 leaves the 99th
/// percentile of a channel's batches alone.
const PROBE_BATCHES: u32 = 128;
/// The most such batches.
const PROBE_BATCHES_MAX: u32 = 1024;
/// A full device gets nothing for this long; twice as long each time in a row.
const FULL_PAUSE: Duration = Duration::from_millis(1);
/// The longest such time.
const FULL_PAUSE_MAX: Duration = Duration::from_millis(50);
/// A device that failed gets nothing for this long; twice as long each time in a row.
const FAILED_PAUSE: Duration = Duration::from_millis(100);
/// The longest such time.
const FAILED_PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    /// Gets nothing until then.
    Paused(Instant),
    /// Owes an answer that did not come in time, or does not exist any more: gets nothing.
    Gone,
}

/// One device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    state: State,
    failed_pause: Duration,
    latency_ps: u64,
    /// A page's time as the profile says.
    profile_page_ps: u64,
    /// A page's time as measured.
    page_ps: u64,
    pub(super) outstanding: u64,
    /// When it is expected to be done with them.
    busy_until: Instant,
    limit: u64,
    /// Pages done since the limit changed.
    good: u64,
    /// When the limit was last halved: what was granted before says nothing about the new limit.
    halved_at: Option<Instant>,
    full_until: Instant,
    full_pause: Duration,
    /// Batches that it did not get for its past alone, since the last probe.
    refused: u32,
    /// After how many of them it is probed.
    probe_after: u32,
}

impl Device {
    pub(super) fn new(profile: &DeviceProfile) -> Device {
        let page_ps = picoseconds(profile.page_time).max(1);
        Device {
            state: State::Up,
            failed_pause: FAILED_PAUSE,
            latency_ps: picoseconds(profile.latency),
            profile_page_ps: page_ps,
            page_ps,
            outstanding: 0,
            busy_until: Instant(0),
            limit: LIMIT_START_PAGES,
            good: 0,
            halved_at: None,
            full_until: Instant(0),
            full_pause: FULL_PAUSE,
            refused: 0,
            probe_after: PROBE_BATCHES,
        }
    }

    pub(super) fn is_usable(&self, now: Instant) -> bool {
        match self.state {
            State::Up => true,
            State::Paused(until) => until <= now,
            State::Gone => false,
        }
    }

    /// Pages outstanding that are not expected to be done yet.
    pub(super) fn backlog(&self, now: Instant) -> u64 {
        let left = picoseconds(self.busy_until.since(now));
        self.outstanding.min(left / self.page_ps.max(1))
    }

    /// When this batch would be done, in picoseconds from now.
    pub(super) fn expected_ps(&self, now: Instant, request: Request, others: u64) -> u64 {
        let ahead = self.backlog(now).saturating_add(others);
        self.expected_at_ps(self.page_ps, request, ahead)
    }

    fn expected_at_ps(&self, page_ps: u64, request: Request, ahead: u64) -> u64 {
        let pages = ahead.saturating_add(request.pages.into());
        page_ps.saturating_mul(pages).saturating_add(self.latency_ps)
    }

    /// How many pages of this batch it may be given, `least` or more, if they are to be done within
    /// `limit_ps` picoseconds. The limit counts batches that wait for each other: it is `times` as
    /// high if waiting is allowed.
    pub(super) fn allows(
        &mut self,
        now: Instant,
        request: Request,
        least: u32,
        others: u64,
        limit_ps: u64,
        times: u64,
    ) -> Option<u32> {
        if self.full_until > now {
            return None;
        }
        let limit = self.limit.saturating_mul(times);
        let room = match self.outstanding {
            0 => request.pages.into(),
            outstanding => limit.saturating_sub(outstanding),
        };
        let ahead = self.backlog(now).saturating_add(others);
        let in_all = self.pages_within(limit_ps);
        let pages = room.min(in_all.saturating_sub(ahead)).min(request.pages.into());
        // Batches share a device evenly, so many small parts would hold up a large one. With parts of
        // three quarters of what it does in time, one begins when the one before is nearly done.
        let least = u64::from(least).max(in_all / 4 * 3).clamp(1, request.pages.into());
        if let (true, Ok(pages)) = (pages >= least, u32::try_from(pages)) {
            return Some(pages);
        }
        let page_ps = self.profile_page_ps;
        let only_its_past = room >= request.pages.into()
            && self.expected_at_ps(page_ps, request, ahead) <= limit_ps;
        self.refused = self.refused.saturating_add(u32::from(only_its_past));
        if !only_its_past || self.outstanding > 0 || self.refused < self.probe_after {
            return None;
        }
        self.refused = 0;
        self.probe_after = (self.probe_after * 2).min(PROBE_BATCHES_MAX);
        Some(request.pages)
    }

    /// How many pages, of everybody, it has done after this time.
    fn pages_within(&self, limit_ps: u64) -> u64 {
        limit_ps.saturating_sub(self.latency_ps) / self.page_ps.max(1)
    }

    /// Counts pages as given to it, behind those of `others`.
    pub(super) fn admit(&mut self, now: Instant, pages: u32, others: u64) {
        let time = |pages: u64| Duration::from_nanos(self.page_ps.saturating_mul(pages) / 1000);
        // It gets there a latency later: the device stands idle until then.
        let begin = now.after(Duration::from_nanos(self.latency_ps / 1000));
        let free = self.busy_until.max(begin.after(time(others)));
        self.busy_until = free.after(time(pages.into()));
        self.outstanding = self.outstanding.saturating_add(pages.into());
    }

    pub(super) fn finish(&mut self, now: Instant, grant: Grant, outcome: Outcome) {
        self.outstanding = self.outstanding.saturating_sub(grant.pages.into());
        match outcome {
            Outcome::Completed { latency, faulted } => {
                self.full_pause = FULL_PAUSE;
                self.failed_pause = FAILED_PAUSE;
                if self.is_usable(now) {
                    self.state = State::Up;
                }
                // A batch with faults measures the faults, not the device.
                if faulted == 0 {
                    self.learn(now, grant, latency);
                }
            }
            Outcome::Rejected => {
                self.halve(now, grant);
                if self.full_until <= now {
                    self.full_until = now.after(self.full_pause);
                    self.full_pause = (self.full_pause * 2).min(FULL_PAUSE_MAX);
                }
            }
            Outcome::Failed => self.pause(now),
            Outcome::TimedOut | Outcome::Gone => self.state = State::Gone,
        }
    }

    /// Batches that fail together pause the device once.
    fn pause(&mut self, now: Instant) {
        let paused = matches!(self.state, State::Paused(until) if until > now);
        if paused || self.state == State::Gone {
            return;
        }
        self.state = State::Paused(now.after(self.failed_pause));
        self.failed_pause = (self.failed_pause * 2).min(FAILED_PAUSE_MAX);
    }

    fn learn(&mut self, now: Instant, grant: Grant, latency: Latency) {
        let pages = grant.ahead.saturating_add(grant.pages.into()).max(1);
        let sample = |took: Duration| picoseconds(took).saturating_sub(self.latency_ps) / pages;
        match latency {
            Latency::Measured(took) if sample(took) > self.page_ps.saturating_mul(2) => {
                let sample = sample(took);
                self.page_ps = average(self.page_ps, sample, SMOOTHING);
                self.halve(now, grant);
                return;
            }
            Latency::Measured(took) => {
                let sample = sample(took).max(1);
                let better = sample < self.page_ps;
                let over = if better { SMOOTHING / 4 } else { SMOOTHING };
                self.page_ps = average(self.page_ps, sample, over);
                if better {
                    self.probe_after = PROBE_BATCHES;
                }
            }
            // An upper bound is news only if it is below what was believed.
            Latency::AtMost(took) => {
                let sample = sample(took).max(1);
                if sample < self.page_ps {
                    self.page_ps = average(self.page_ps, sample, SMOOTHING / 4);
                }
            }
        }
        self.good = self.good.saturating_add(grant.pages.into());
        if self.good >= self.limit {
            self.limit = (self.limit + LIMIT_STEP_PAGES).min(LIMIT_MAX_PAGES);
            self.good = 0;
        }
    }

    /// Halves the limit, once for everything that was granted under the old one.
    fn halve(&mut self, now: Instant, grant: Grant) {
        if self.halved_at.is_some_and(|at| grant.at <= at) {
            return;
        }
        self.limit = (self.limit / 2).max(LIMIT_MIN_PAGES);
        self.good = 0;
        self.halved_at = Some(now);
    }
}

fn average(old: u64, sample: u64, over: u64) -> u64 {
    (old - old / over).saturating_add(sample / over).max(1)
}
