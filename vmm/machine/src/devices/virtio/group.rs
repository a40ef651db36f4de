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
use crate::vcpu::lock;
use martlet_guest_program::NicPlace;
use martlet_ram::{GuestRam, RamBitmap, TrackError};
use martlet_units::{Gfn, Gpa, Instant};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
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
/// switchover, or the owner's pause. Orders exclude each other; registers are served meanwhile.
pub(crate) struct Nics {
    // Ends before the lease, whose drop resets the devices.
    _service: Option<Service>,
    cards: Box<[Nic]>,
    standing: Standing,
    order: Mutex<Order>,
    _lease: Lease,
}

struct Order {
    phase: Phase,
    /// Who wants the devices to stand.
    by_switchover: bool,
    by_owner: bool,
}

/// Where all devices stand together.
enum Phase {
    Going,
    /// Told to suspend, since when; and what went wrong so far.
    Suspending(Instant, Option<String>),
    Standing,
}

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
        let order = Mutex::new(Order { phase, by_switchover: stands, by_owner: false });
        Ok(Nics { _service: service, cards, standing, order, _lease: lease })
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
        let mut order = lock(&self.order);
        order.by_switchover = true;
        self.begin_standing(&mut order);
    }

    fn begin_standing(&self, order: &mut Order) {
        if !matches!(order.phase, Phase::Going) {
            return;
        }
        self.standing.stands.store(true, Ordering::SeqCst);
        let began = clock::now();
        let failed = self.cards.iter().filter_map(|card| card.begin_suspend().err());
        order.phase = Phase::Suspending(began, failed.reduce(|first, _| first));
    }

    /// Returns when no device touches guest memory any more. On an error all go on as before.
    pub(crate) fn wait_suspended(&self) -> Result<(), String> {
        let mut order = lock(&self.order);
        if matches!(order.phase, Phase::Going) && !self.cards.is_empty() {
            return Err("the devices were set going again".into());
        }
        self.wait_standing(&mut order)
    }

    /// Waits for a suspend that was begun; the error is the first of a device that does not stand.
    fn settle(&self, order: &mut Order) -> Result<(), String> {
        let Phase::Suspending(began, failed) = &mut order.phase else { return Ok(()) };
        let (began, mut failed) = (*began, failed.take());
        self.wait_for_all(&mut failed, |card| card.poll_suspended(began));
        order.phase = Phase::Standing;
        failed.map_or(Ok(()), Err)
    }

    fn wait_standing(&self, order: &mut Order) -> Result<(), String> {
        let Err(why) = self.settle(order) else { return Ok(()) };
        order.by_switchover = false;
        if let Err(error) = self.go_on(order) {
            tracing::warn!(%error, "a suspend failed, and so did the resume after it");
        }
        Err(why)
    }

    /// Looks at all cards in turn until each has answered; keeps the first failure.
    fn wait_for_all(&self, failed: &mut Option<String>, poll: impl Fn(&Nic) -> Answer) {
        let mut waiting: Vec<&Nic> = self.cards.iter().collect();
        while !waiting.is_empty() {
            waiting.retain(|card| match poll(card) {
                Answer::Pending => true,
                Answer::Done => false,
                Answer::Failed(why) => {
                    failed.get_or_insert(why);
                    false
                }
            });
            if !waiting.is_empty() {
                std::thread::sleep(LOOK_INTERVAL);
            }
        }
    }

    /// Ends a switchover: all devices go on, together, unless the owner's pause keeps them. The
    /// error is the first of a device that does not work.
    pub(crate) fn resume(&self) -> Result<(), String> {
        let mut order = lock(&self.order);
        order.by_switchover = false;
        self.go_on(&mut order)
    }

    /// Says whether the owner wants the guest, and with it its devices, to stand; the devices
    /// follow unless a switchover keeps them. Devices that can't suspend go on.
    pub(crate) fn set_paused(&self, paused: bool) {
        let mut order = lock(&self.order);
        order.by_owner = paused;
        let result = if !paused {
            self.go_on(&mut order)
        } else if self.cannot_suspend().is_some() {
            Ok(())
        } else {
            self.begin_standing(&mut order);
            self.wait_standing(&mut order)
        };
        if let Err(error) = result {
            tracing::warn!(%error, paused, "a device did not follow its guest");
        }
    }

    /// A guest arrives paused, and its devices stay as they are.
    pub(crate) fn arrive_paused(&self) {
        lock(&self.order).by_owner = true;
    }

    /// Sets all devices going, if nobody wants them to stand.
    fn go_on(&self, order: &mut Order) -> Result<(), String> {
        if order.by_owner || order.by_switchover || matches!(order.phase, Phase::Going) {
            return Ok(());
        }
        // One that does not stand goes already.
        let _ = self.settle(order);
        self.standing.stands.store(false, Ordering::SeqCst);
        let began = clock::now();
        let mut failed = None;
        for card in &self.cards {
            if let Err(why) = card.begin_resume(&self.standing) {
                failed.get_or_insert(why);
            }
        }
        self.wait_for_all(&mut failed, |card| card.poll_resumed(began));
        // Those that stood go first.
        for card in &self.cards {
            if let Err(why) = card.catch_up(&self.standing) {
                failed.get_or_insert(why);
            }
        }
        order.phase = Phase::Going;
        failed.map_or(Ok(()), Err)
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
