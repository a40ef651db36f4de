//! One network card: what it is, and its state between the guest and its vDPA device.

use super::backing::{Backing, Event};
use super::control::ControlIndices;
use super::interrupts::Interrupts;
use super::life::Setup;
use super::queue::Queue;
use super::registers::{LINES, status};
use super::saved::NicKind;
use crate::MachineError;
use crate::memory::GuestMemory;
use crate::vcpu::{lock, try_lock};
use martlet_vdpa::virtio::{DEVICE_NET, feature, net_config, split};
use martlet_vdpa::{Identity, VdpaDevice};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Features that the machine passes on if a device has them. Others change what is in the queues
/// or need commands that the machine does not serve: they are not offered.
const OFFERED: u64 = feature::NET_CSUM
    | feature::NET_MTU
    | feature::NET_MAC
    | feature::NET_STATUS
    | feature::NET_MQ
    | feature::VERSION_1;
/// Problems of a card that are logged; a guest may make any number.
const COMPLAINTS_MAX: u32 = 10;

/// See the module's comment.
pub(super) struct Nic {
    /// Its place among the machine's cards.
    pub(super) number: usize,
    pub(super) device: Arc<dyn VdpaDevice>,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) kind: NicKind,
    pub(super) interrupts: Arc<Interrupts>,
    /// Kicks of the queues below this number go to the device. Read without the lock: a kick must
    /// not wait.
    pub(super) kickable: AtomicU32,
    state: Mutex<State>,
    complaints: AtomicU32,
}

/// What changes of a card.
pub(super) struct State {
    pub(super) status: u32,
    pub(super) device_features_select: u32,
    pub(super) driver_features_select: u32,
    pub(super) driver_features: u64,
    pub(super) queue_select: u32,
    /// Data queues, and the control queue behind them.
    pub(super) queues: Box<[Queue]>,
    pub(super) pairs: u16,
    pub(super) control: ControlIndices,
    pub(super) backing: Backing,
    /// What the device was prepared for, at a destination.
    pub(super) prepared: Option<Setup>,
}

impl Nic {
    /// A card for a new guest, with all that its device has.
    pub(super) fn new(
        number: usize,
        device: Arc<dyn VdpaDevice>,
        memory: Arc<GuestMemory>,
    ) -> Result<Nic, MachineError> {
        let kind = kind_of(number, &*device)?;
        Ok(Nic::of_kind(number, device, memory, kind, false))
    }

    /// A card for a guest that arrives and knows it as `wanted`.
    pub(super) fn waiting(
        number: usize,
        device: Arc<dyn VdpaDevice>,
        memory: Arc<GuestMemory>,
        wanted: &NicKind,
    ) -> Result<Nic, MachineError> {
        let has = kind_of(number, &*device)?;
        let refuse = |what: String| Err(MachineError::Config { reason: what });
        let missing = wanted.features & !has.features;
        if missing != 0 {
            return refuse(format!(
                "network card {number}: its device here lacks features {missing:#x}"
            ));
        }
        if wanted.queues == 0 || !wanted.queues.is_multiple_of(2) || wanted.queues > has.queues {
            let (needed, there) = (wanted.queues, has.queues);
            return refuse(format!(
                "network card {number} needs {needed} queues, there are {there}"
            ));
        }
        let size = wanted.queue_size_max;
        if !size.is_power_of_two() || size > has.queue_size_max {
            let there = has.queue_size_max;
            return refuse(format!(
                "network card {number} needs queues of {size} descriptors, they have {there}"
            ));
        }
        if let Some(mac) = wanted.mac
            && has.mac != Some(mac)
        {
            device.write_config(config_offset(net_config::MAC), &mac);
            if read_mac(&*device) != mac {
                let (wanted, there) = (Mac(Some(mac)), Mac(has.mac));
                return refuse(format!("network card {number} has address {wanted}, here {there}"));
            }
        }
        Ok(Nic::of_kind(number, device, memory, wanted.clone(), true))
    }

    fn of_kind(
        number: usize,
        device: Arc<dyn VdpaDevice>,
        memory: Arc<GuestMemory>,
        kind: NicKind,
        waits: bool,
    ) -> Nic {
        let line = LINES.get(number).copied().expect("cards are counted before they are made");
        let state = State::new(usize::from(kind.queues));
        Nic {
            number,
            device,
            memory,
            kind,
            interrupts: Interrupts::new(line, waits),
            kickable: AtomicU32::new(0),
            state: Mutex::new(state),
            complaints: AtomicU32::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The card's state, if nobody else is at it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        try_lock(&self.state)
    }

    /// Pairs that the card has.
    pub(super) fn pairs_max(&self) -> u16 {
        self.kind.queues / 2
    }

    /// Logs what a guest may have brought about.
    pub(super) fn complain(&self, why: &str) {
        if self.complaints.fetch_add(1, Ordering::Relaxed) < COMPLAINTS_MAX {
            tracing::warn!(card = self.number, why, "a network card has a problem");
        }
    }

    /// The card can't go on until its driver resets it (2.1.1, DEVICE_NEEDS_RESET).
    pub(super) fn break_down(&self, state: &mut State, why: &str) {
        self.complain(why);
        state.status |= status::NEEDS_RESET;
        if state.status & status::DRIVER_OK != 0 {
            self.interrupts.ring_config();
        }
    }
}

impl State {
    pub(super) fn new(data_queues: usize) -> State {
        State {
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues: vec![Queue::default(); data_queues + 1].into_boxed_slice(),
            pairs: 1,
            control: ControlIndices::default(),
            backing: Backing::Idle,
            prepared: None,
        }
    }

    /// Moves the device on. What it is told and what it answers is in this order by the machine's
    /// own doing, whatever the guest does.
    pub(super) fn step(&mut self, event: Event) {
        let next = self.backing.next(event);
        self.backing = next.unwrap_or_else(|| panic!("{event:?} while {:?}", self.backing));
    }

    pub(super) fn has_several_pairs(&self) -> bool {
        self.driver_features & feature::NET_MQ != 0
    }

    pub(super) fn is_running(&self) -> bool {
        self.status & status::DRIVER_OK != 0
    }

    /// Data queues that the driver may use: with one pair only, the control queue is number 2
    /// (5.1.2).
    pub(super) fn data_queues(&self) -> usize {
        if self.has_several_pairs() { self.queues.len() - 1 } else { 2 }
    }

    /// The place of a queue that the guest names; `None` if there is no such queue.
    pub(super) fn place(&self, number: u32) -> Option<usize> {
        let number = usize::try_from(number).ok()?;
        let data = self.data_queues();
        match number {
            _ if number < data => Some(number),
            _ if number == data && self.driver_features & feature::NET_CTRL_VQ != 0 => {
                Some(self.queues.len() - 1)
            }
            _ => None,
        }
    }
}

/// What a device can be for a guest.
fn kind_of(number: usize, device: &dyn VdpaDevice) -> Result<NicKind, MachineError> {
    let identity: &Identity = device.identity();
    let refuse = |what: String| {
        Err(MachineError::Config { reason: format!("network card {number}: {what}") })
    };
    if identity.device_id != DEVICE_NET {
        return refuse(format!("its device is of virtio's kind {}", identity.device_id));
    }
    if identity.queues == 0 || !identity.queues.is_multiple_of(2) {
        return refuse(format!("its device has {} queues", identity.queues));
    }
    let size = identity.queue_size_max;
    if !size.is_power_of_two() || size > split::SIZE_MAX {
        return refuse(format!("its device has queues of {size} descriptors"));
    }
    if identity.features & feature::VERSION_1 == 0 {
        return refuse("its device is of virtio's legacy kind".into());
    }
    let mut features = identity.features & OFFERED;
    let mut queues = identity.queues;
    if queues > 2 && features & feature::NET_MQ != 0 {
        // The machine's own, and what several pairs need (5.1.3.1).
        features |= feature::NET_CTRL_VQ;
    } else {
        features &= !feature::NET_MQ;
        queues = 2;
    }
    let mac = (features & feature::NET_MAC != 0).then(|| read_mac(device));
    Ok(NicKind { features, queues, queue_size_max: size, mac })
}

fn read_mac(device: &dyn VdpaDevice) -> [u8; 6] {
    let mut mac = [0; 6];
    device.read_config(config_offset(net_config::MAC), &mut mac);
    mac
}

pub(super) fn config_offset(offset: usize) -> u32 {
    u32::try_from(offset).expect("the configuration space is small")
}

/// A card's address for people.
struct Mac(Option<[u8; 6]>);

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            None => f.write_str("none"),
            Some([a, b, c, d, e, g]) => {
                write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
            }
        }
    }
}
