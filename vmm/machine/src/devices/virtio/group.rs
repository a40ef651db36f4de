//! All network cards of a machine, ordered about together.

use super::NICS_MAX;
use super::lease::Lease;
use super::life::Answer;
use super::nic::Nic;
use super::registers::{MMIO_START, MMIO_STRIDE};
use super::saved::{NicKind, SavedNic};
use super::service::Service;
use crate::MachineError;
use crate::clock;
use crate::devices::PulseIrq;
use crate::memory::GuestMemory;
use crate::vcpu::{lock, try_lock};
use martlet_guest_program::NicPlace;
use martlet_ram::{GuestRam, RamBitmap, TrackError};
use martlet_units::{Gfn, Gpa, Instant};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

/// Between two looks at devices that are being suspended or resumed. A device takes milliseconds,
/// and has the next commands already; whoever spins meanwhile takes the core that its guest, or
/// the device's own work, needs.
const LOOK_INTERVAL: Duration = Duration::from_micros(20);

/// What the cards must know of the whole.
#[derive(Default)]
pub(super) struct Standing {
    /// Devices stand, or are told to: none may begin to pass frames.
    stands: AtomicBool,
    /// Dirty pages are tracked.
    logs_writes: AtomicBool,
}

impl Standing {
    pub(super) fn is_so(&self) -> bool {
        self.stands.load(Ordering::SeqCst)
    }

    pub(super) fn logs_writes(&self) -> bool {
        self.logs_writes.load(Ordering::SeqCst)
    }
}

/// See the module's comment. The devices pass frames unless someone wants them to stand: a
/// switchover, or the owner's pause. Whoever waits for them lets go of the order between two looks;
/// registers are served meanwhile.
pub(crate) struct Nics {
    // Ends before the lease, whose drop resets the devices.
    _service: Option<Service>,
    cards: Box<[Nic]>,
    standing: Standing,
    /// A switchover wants the devices to stand.
    by_switchover: AtomicBool,
    order: Mutex<Order>,
    _lease: Lease,
}

struct Order {
    phase: Phase,
    /// The owner wants the devices to stand.
    by_owner: bool,
    /// The first device of the latest suspend that did not stand, and of the latest resume that
    /// does not work.
    failed_to_suspend: Option<String>,
    failed_to_resume: Option<String>,
}

/// Where all devices stand together.
enum Phase {
    Going,
    Suspending(Wave),
    Standing,
    Resuming(Wave),
}

/// All devices do the same.
struct Wave {
    began: Instant,
    /// Bit `n`: card `n` was told.
    told: u32,
    /// What went wrong first.
    failed: Option<String>,
}

impl Wave {
    fn begin() -> Wave {
        Wave { began: clock::now(), told: 0, failed: None }
    }

    fn note(&mut self, result: Result<(), String>) {
        if let Err(why) = result {
            self.failed.get_or_insert(why);
        }
    }
}

const _: () = assert!(NICS_MAX <= 32);

impl Nics {
    /// Cards for a new guest, one for each device.
    pub(crate) fn new(lease: Lease, memory: &Arc<GuestMemory>) -> Result<Nics, MachineError> {
        let count = lease.devices().len();
        if count > NICS_MAX {
            let reason = format!("{count} network cards, a machine has up to {NICS_MAX}");
            return Err(MachineError::Config { reason });
        }
        let cards = lease.devices().iter().enumerate();
        let cards = cards
            .map(|(number, device)| Nic::new(number, Arc::clone(device), Arc::clone(memory)))
            .collect::<Result<_, _>>()?;
        Nics::assemble(lease, cards, Phase::Going)
    }

    /// Cards for a guest that arrives, with the first of the devices behind them.
    pub(crate) fn waiting(
        lease: Lease,
        memory: &Arc<GuestMemory>,
        wanted: &[NicKind],
    ) -> Result<Nics, MachineError> {
        let (needed, there) = (wanted.len(), lease.devices().len());
        if needed > there {
            let reason =
                format!("the guest has {needed} network cards, there are devices for {there}");
            return Err(MachineError::Config { reason });
        }
        let cards = lease.devices().iter().zip(wanted).enumerate();
        let cards = cards
            .map(|(number, (device, wanted))| {
                Nic::waiting(number, Arc::clone(device), Arc::clone(memory), wanted)
            })
            .collect::<Result<_, _>>()?;
        Nics::assemble(lease, cards, Phase::Standing)
    }

    fn assemble(lease: Lease, cards: Box<[Nic]>, phase: Phase) -> Result<Nics, MachineError> {
        let devices: Vec<_> = cards.iter().map(|card| Arc::clone(&card.device)).collect();
        let service = if devices.is_empty() {
            None
        } else {
            let started = Service::start(devices);
            Some(started.map_err(|error| MachineError::Host {
                reason: format!("start the devices' thread: {error}"),
            })?)
        };
        let stands = matches!(phase, Phase::Standing);
        let standing = Standing { stands: AtomicBool::new(stands), ..Standing::default() };
        let (failed_to_suspend, failed_to_resume) = (None, None);
        let order = Order { phase, by_owner: false, failed_to_suspend, failed_to_resume };
        let (order, by_switchover) = (Mutex::new(order), AtomicBool::new(stands));
        Ok(Nics { _service: service, cards, standing, by_switchover, order, _lease: lease })
    }

    /// Whether there is no card.
    pub(crate) fn is_empty(&self) -> bool {
        self.cards.is_empty()
    }

    /// Connects the interrupt lines; before the guest runs, once.
    pub(crate) fn connect(&self, pulse_irq: &PulseIrq) {
        for card in &self.cards {
            card.interrupts.connect(Arc::clone(pulse_irq));
        }
    }

    #[cfg(test)]
    pub(super) fn interrupts(&self, card: usize) -> &Arc<super::interrupts::Interrupts> {
        &self.cards[card].interrupts
    }

    /// The guest is about to run here: from now on it hears the cards.
    pub(crate) fn unmute(&self) {
        self.cards.iter().for_each(|card| card.interrupts.unmute());
    }

    /// Where the guest finds its cards.
    pub(crate) fn places(&self) -> Vec<NicPlace> {
        let place = |card: &Nic| NicPlace {
            registers: Gpa(MMIO_START + card.number as u64 * MMIO_STRIDE),
            pairs: card.pairs_max(),
            queue_size_max: card.kind.queue_size_max,
        };
        self.cards.iter().map(place).collect()
    }

    /// The interrupt line of a card.
    pub(crate) fn line(card: usize) -> Option<u32> {
        super::registers::LINES.get(card).copied()
    }

    /// What a destination must have.
    pub(crate) fn kinds(&self) -> Vec<NicKind> {
        self.cards.iter().map(|card| card.kind.clone()).collect()
    }

    fn at(&self, gpa: u64) -> Option<(&Nic, u64)> {
        let offset = gpa.checked_sub(MMIO_START)?;
        let card = usize::try_from(offset / MMIO_STRIDE).ok()?;
        Some((self.cards.get(card)?, offset % MMIO_STRIDE))
    }

    /// The guest reads memory that is none; whether a card is there.
    pub(crate) fn read(&self, gpa: u64, data: &mut [u8]) -> bool {
        self.at(gpa).map(|(card, offset)| card.read(offset, data)).is_some()
    }

    /// The guest writes memory that is none.
    pub(crate) fn write(&self, gpa: u64, data: &[u8]) {
        if let Some((card, offset)) = self.at(gpa) {
            card.write(offset, data, &self.standing);
        }
    }

    /// Tells all devices to suspend for a switchover; waits for nothing.
    pub(crate) fn begin_suspend(&self) {
        self.by_switchover.store(true, Ordering::SeqCst);
        if let Some(mut order) = try_lock(&self.order) {
            self.advance(&mut order);
        }
    }

    /// Ready when no device touches guest memory any more. On an error all go on as before, as far
    /// as they can. Waits for nothing.
    pub(crate) fn poll_suspended(&self) -> Poll<Result<(), String>> {
        if self.cards.is_empty() {
            return Poll::Ready(Ok(()));
        }
        // Whoever has the lock brings it further.
        let Some(mut order) = try_lock(&self.order) else { return Poll::Pending };
        let is_wanted = self.is_switchover();
        if !self.advance(&mut order) {
            return Poll::Pending;
        }
        if is_wanted && self.is_switchover() {
            return Poll::Ready(Ok(()));
        }
        let failed = order.failed_to_suspend.take();
        Poll::Ready(Err(failed.unwrap_or_else(|| "the devices were set going again".into())))
    }

    /// As [`Nics::poll_suspended`], waiting.
    #[cfg(test)]
    pub(crate) fn wait_suspended(&self) -> Result<(), String> {
        loop {
            match self.poll_suspended() {
                Poll::Ready(done) => return done,
                Poll::Pending => std::thread::sleep(LOOK_INTERVAL),
            }
        }
    }

    /// Ends a switchover without waiting: call [`Nics::settle`] behind it, where a thread may wait.
    pub(crate) fn end_switchover(&self) {
        self.by_switchover.store(false, Ordering::SeqCst);
    }

    /// Waits until all devices stand or go, as is wanted. The error is the first of a device that
    /// does not work.
    pub(crate) fn settle(&self) -> Result<(), String> {
        loop {
            let mut order = lock(&self.order);
            if self.advance(&mut order) {
                return order.failed_to_resume.take().map_or(Ok(()), Err);
            }
            drop(order);
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Ends a switchover: all devices go on, together, unless the owner's pause keeps them. The
    /// error is the first of a device that does not work.
    pub(crate) fn resume(&self) -> Result<(), String> {
        self.end_switchover();
        self.settle()
    }

    /// Says whether the owner wants the guest, and with it its devices, to stand; the devices
    /// follow unless a switchover keeps them. Devices that can't suspend go on.
    pub(crate) fn set_paused(&self, paused: bool) {
        {
            let mut order = lock(&self.order);
            order.by_owner = paused;
            order.failed_to_suspend = None;
        }
        let resumed = self.settle();
        let suspended = lock(&self.order).failed_to_suspend.take().map_or(Ok(()), Err);
        if let Err(error) = suspended.and(resumed) {
            tracing::warn!(%error, paused, "a device did not follow its guest");
        }
    }

    /// A guest arrives paused, and its devices stay as they are.
    pub(crate) fn arrive_paused(&self) {
        lock(&self.order).by_owner = true;
    }

    fn is_switchover(&self) -> bool {
        self.by_switchover.load(Ordering::SeqCst)
    }

    /// Brings all devices as far towards what is wanted as that goes without waiting for them;
    /// whether they are there.
    fn advance(&self, order: &mut Order) -> bool {
        loop {
            match &mut order.phase {
                Phase::Going => {
                    let owner = order.by_owner && self.cannot_suspend().is_none();
                    if !(self.is_switchover() || owner) {
                        return true;
                    }
                    order.failed_to_suspend = None;
                    self.standing.stands.store(true, Ordering::SeqCst);
                    order.phase = Phase::Suspending(Wave::begin());
                }
                Phase::Suspending(_) if !(order.by_owner || self.is_switchover()) => {
                    // One that is late keeps no other from going on.
                    order.phase = Phase::Resuming(self.begin_resume());
                }
                Phase::Suspending(wave) => {
                    if !self.have_suspended(wave) {
                        return false;
                    }
                    if let Some(why) = wave.failed.take() {
                        order.failed_to_suspend = Some(why);
                        self.end_switchover();
                    }
                    order.phase = Phase::Standing;
                }
                Phase::Standing => {
                    if order.by_owner || self.is_switchover() {
                        return true;
                    }
                    order.failed_to_resume = None;
                    order.phase = Phase::Resuming(self.begin_resume());
                }
                Phase::Resuming(wave) => {
                    if !self.have_resumed(wave) {
                        return false;
                    }
                    order.failed_to_resume = wave.failed.take();
                    order.phase = Phase::Going;
                }
            }
        }
    }

    /// Tells the cards that were not told yet, and asks the others. A card that a vCPU is at is
    /// left for the next time.
    fn have_suspended(&self, wave: &mut Wave) -> bool {
        let mut all = true;
        for (number, card) in self.cards.iter().enumerate() {
            let Some(mut state) = card.try_lock() else {
                all = false;
                continue;
            };
            if wave.told & 1 << number == 0 {
                wave.told |= 1 << number;
                wave.note(card.begin_suspend(&mut state));
            }
            match card.poll_suspended(&mut state, wave.began) {
                Answer::Pending => all = false,
                Answer::Done => {}
                Answer::Failed(why) => wave.note(Err(why)),
            }
        }
        all
    }

    fn begin_resume(&self) -> Wave {
        self.standing.stands.store(false, Ordering::SeqCst);
        let mut wave = Wave::begin();
        self.cards.iter().for_each(|card| wave.note(card.begin_resume(&self.standing)));
        wave
    }

    fn have_resumed(&self, wave: &mut Wave) -> bool {
        let mut all = true;
        for card in &self.cards {
            match card.poll_late_suspend(&self.standing, wave.began) {
                Answer::Pending => {
                    all = false;
                    continue;
                }
                Answer::Done => {}
                Answer::Failed(why) => wave.note(Err(why)),
            }
            match card.poll_resumed(wave.began) {
                Answer::Pending => all = false,
                Answer::Done => {}
                Answer::Failed(why) => wave.note(Err(why)),
            }
        }
        if all {
            // Those that stood have gone first.
            self.cards.iter().for_each(|card| wave.note(card.catch_up(&self.standing)));
        }
        all
    }

    /// The first card that can't be suspended.
    fn cannot_suspend(&self) -> Option<usize> {
        self.cards.iter().position(|card| !card.device.identity().capabilities.suspend)
    }

    /// Whether a guest with these cards can be moved; the error says why not.
    pub(crate) fn check_movable(&self) -> Result<(), String> {
        for card in &self.cards {
            let can = card.device.identity().capabilities;
            let what = match (can.suspend, can.dirty_log) {
                (true, true) => continue,
                (false, _) => "be suspended",
                (true, false) => "tell which pages it writes",
            };
            return Err(format!("the device of network card {} can't {what}", card.number));
        }
        Ok(())
    }

    /// All cards as they travel. For a guest that leaves all devices must stand.
    pub(crate) fn save(&self, is_rehearsal: bool) -> Result<Vec<SavedNic>, String> {
        self.cards.iter().map(|card| card.save(is_rehearsal)).collect()
    }

    /// Loads all cards and prepares their devices, at once where that takes long. Hostile;
    /// repeatable.
    pub(crate) fn load(&self, saved: &[SavedNic]) -> Result<(), String> {
        let (has, comes) = (self.cards.len(), saved.len());
        if has != comes {
            return Err(format!("{comes} network cards for {has}"));
        }
        let load = |(card, saved): (&Nic, &SavedNic)| card.load(saved, &self.standing);
        let all = || self.cards.iter().zip(saved);
        // Threads cost more than indices, which is all that the last state brings.
        let must_build = |(card, saved): &(&Nic, &SavedNic)| card.must_build(saved);
        if all().filter(must_build).count() < 2 {
            return all().try_for_each(load);
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = all().map(|pair| scope.spawn(move || load(pair))).collect();
            let results = threads.into_iter().map(|thread| thread.join());
            let results: Vec<_> = results.collect();
            results.into_iter().try_for_each(|result| {
                result.unwrap_or_else(|_| Err("a thread that loads a network card panicked".into()))
            })
        })
    }

    /// Begins or ends logging the pages that devices write.
    pub(crate) fn set_dirty_log(&self, on: bool) -> Result<(), TrackError> {
        self.standing.logs_writes.store(on, Ordering::SeqCst);
        for card in &self.cards {
            card.set_dirty_log(on).map_err(|error| {
                let operation = format!("logging the writes of network card {}", card.number);
                TrackError::host(operation, io::Error::other(error.to_string()))
            })?;
        }
        Ok(())
    }

    /// Adds the pages that devices wrote since the last call.
    pub(crate) fn take_dirty(&self, ram: &GuestRam, into: &RamBitmap) {
        for card in &self.cards {
            card.device.take_dirty(&mut |first, word| ram.mark_word(into, Gfn(first), word));
        }
    }

    /// When each card served its first and its last frame.
    pub(crate) fn frame_times(&self) -> impl Iterator<Item = (Option<Instant>, Option<Instant>)> {
        self.cards.iter().map(|card| card.device.frame_times())
    }

    /// The machine is reset, and all cards with it.
    pub(crate) fn reset(&self) {
        self.shut_down();
    }

    /// The guest is gone: no device touches its memory any more.
    pub(crate) fn shut_down(&self) {
        let _order = lock(&self.order);
        for card in &self.cards {
            card.reset(&mut card.lock(), &self.standing);
        }
    }
}
