//! Virtqueue objects: what may be done to them in which state (`mlx5_ifc_vdpa.h`; Linux
//! `drivers/vdpa/mlx5/net/mlx5_vnet.c`).

use super::Firmware;
use super::answer::{Answer, Refusal, bytes, done, general, general_header, parse, refuse};
use super::input::Input;
use crate::latency::Class;
use crate::nic::queue::{Offloads, Queue, QueueState, Work, direction_of};
use crate::nic::ring::{Ring, RingError, RingPlace};
use crate::nic::view::{LogPlace, View};
use martlet_mlx5_abi::capability::device_feature;
use martlet_mlx5_abi::message::GeneralObjectIn;
use martlet_mlx5_abi::virtq::{
    QueryVirtqOut, SPLIT, VirtioNetQueue, VirtioQueue, VirtqIn, VirtqState, event_mode, modify,
};
use martlet_mlx5_abi::{CommandStatus, U16, U64};
use std::sync::Arc;

/// Fields that may be modified while frames pass (DPDK `mlx5_vdpa_lm.c` turns the log on and off
/// then).
const ALWAYS: u64 = modify::DIRTY_BITMAP_PARAMS | modify::DIRTY_BITMAP_DUMP_ENABLE;

/// All fields that this model lets a driver modify, but for the state.
const FIELDS: u64 = ALWAYS
    | modify::ADDRESSES
    | modify::AVAIL_INDEX
    | modify::USED_INDEX
    | modify::VIRTIO_Q_MKEY
    | modify::QUEUE_FEATURES;

/// A virtqueue as the firmware knows it.
pub(super) struct Virtq {
    pub(super) queue: Arc<Queue>,
    /// The object as it was made and modified; state and indices are the queue's.
    object: VirtioNetQueue,
}

/// What a MODIFY does to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Stay,
    Start,
    Suspend,
}

impl Firmware {
    pub(super) fn create_virtq(&mut self, input: &Input) -> Answer {
        let create: VirtqIn = parse(&input.head)?;
        let object = create.object;
        let virtio = &object.virtio_q;
        self.check_virtq(&object)?;
        let number = self.next_object();
        let view = View::new(virtio.pd.get(), virtio.mkey.get());
        let index = virtio.queue_index.get();
        let size = virtio.queue_size.get();
        let mut ring = Ring::new(size, direction_of(index), place(virtio), view);
        ring.set_taken(object.hw_available_index.get());
        ring.set_published(object.hw_used_index.get());
        let mut work = Work::new(ring, offloads(object.features()), vector(virtio));
        work.ring.view.set_log(log_place(&object));
        let queue = Arc::new(Queue::new(number, index, work));
        if !self.nic.add_queue(Arc::clone(&queue)) {
            return Err(refuse(CommandStatus::BAD_INDEX, 0x0a00_0001));
        }
        self.use_domain(virtio.pd.get(), true);
        self.use_umems(virtio, true);
        self.virtqs.insert(number, Virtq { queue, object });
        general(number)
    }

    fn check_virtq(&self, object: &VirtioNetQueue) -> Result<(), Refusal> {
        let virtio = &object.virtio_q;
        let size = virtio.queue_size.get();
        if self.issi != 1 {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0a00_0002));
        }
        if !size.is_power_of_two() || size > self.config.queue_size_max {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a00_0003));
        }
        // With full emulation only is there a doorbell for each.
        if virtio.doorbell_stride_index.get() != 0 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a00_0009));
        }
        if object.state() != VirtqState::INIT || virtio.flags & 0xf != VirtioQueue::ETH_FRAME {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a00_0004));
        }
        // Vector 0 is the driver's own.
        let vectors = 1..=u32::from(self.config.queues);
        let has_vector = vectors.contains(&virtio.event_qpn_or_msix.get());
        let tells = match virtio.event_mode & 7 {
            event_mode::NONE => true,
            event_mode::MSIX => has_vector,
            _ => false,
        };
        if virtio.kind != SPLIT || !tells {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a01_0001));
        }
        if !self.domains.contains_key(&virtio.pd.get()) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a00_0005));
        }
        let counters = virtio.counter_set_id.get();
        if counters != 0 && !self.counters.contains_key(&counters) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a00_0006));
        }
        for (place, needed) in virtio.umem.iter().zip(self.umem_sizes()) {
            let umem = self.umems.get(&place.id.get());
            let umem = umem.ok_or(refuse(CommandStatus::BAD_RESOURCE, 0x0a00_0007))?;
            let end = place.offset.get().checked_add(u64::from(place.bytes.get()));
            let short = u64::from(place.bytes.get()) < needed.bytes_for(size);
            if short || end.is_none_or(|end| end > umem.bytes) {
                return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a00_0008));
            }
        }
        self.check_fields(object, FIELDS)
    }

    /// Whether these fields of an object make sense.
    fn check_fields(&self, object: &VirtioNetQueue, fields: u64) -> Result<(), Refusal> {
        let virtio = &object.virtio_q;
        if fields & modify::QUEUE_FEATURES != 0 && object.features() & !self.config.features != 0 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a01_0002));
        }
        let keys = self.nic.keys();
        let gone = |bit, key: u32| fields & bit != 0 && key != 0 && !keys.exists(key);
        if gone(modify::VIRTIO_Q_MKEY, virtio.mkey.get())
            || gone(modify::DIRTY_BITMAP_PARAMS, object.dirty_bitmap_mkey.get())
        {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a01_0005));
        }
        Ok(())
    }

    pub(super) fn modify_virtq(&mut self, input: &Input) -> Answer {
        let modify: VirtqIn = parse(&input.head)?;
        let number = modify.header.obj_id.get();
        let selected = modify.object.modify_field_select.get();
        let missing = refuse(CommandStatus::BAD_RESOURCE, 0x0a01_0006);
        let virtq = self.virtqs.get(&number).ok_or(missing)?;
        let queue = Arc::clone(&virtq.queue);
        let state = queue.lock().state;
        let (step, fields) = self.check_step(state, selected, modify.object.state())?;
        self.check_fields(&modify.object, fields)?;
        let mut object = virtq.object;
        merge(&mut object, &modify.object, fields);
        if step == Step::Start {
            self.check_start(&object)?;
        }
        let ended = self.apply(&queue, &object, step, fields);
        if let Some(virtq) = self.virtqs.get_mut(&number) {
            virtq.object = object;
        }
        // Frames that were begun are finished; the queue could not say so to its guest.
        ended.map_err(|_| refuse(CommandStatus::BAD_RESOURCE_STATE, 0x0a01_0007))?;
        done()
    }

    /// What a MODIFY does in this state: to the state, and which fields count.
    fn check_step(
        &self,
        state: QueueState,
        selected: u64,
        wanted: VirtqState,
    ) -> Result<(Step, u64), Refusal> {
        let illegal = refuse(CommandStatus::BAD_RESOURCE_STATE, 0x0a01_0008);
        if selected == 0 || selected & !(FIELDS | modify::STATE) != 0 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a01_0009));
        }
        let fields = selected & FIELDS;
        let step = match (selected & modify::STATE != 0, state, wanted) {
            (_, QueueState::Error, _) => return Err(illegal),
            (false, _, _) => Step::Stay,
            (true, QueueState::Init, VirtqState::RDY) => Step::Start,
            (true, QueueState::Suspended, VirtqState::RDY) if self.config.resumable => Step::Start,
            (true, QueueState::Ready, VirtqState::SUSPEND) => Step::Suspend,
            (true, _, _) => return Err(illegal),
        };
        match (state, step) {
            // The fields are silently ignored (Linux `mlx5_vnet.c`, `resume_vqs`, sends them first):
            // the state is all that this firmware looks at then.
            (QueueState::Init, Step::Start) => Ok((step, 0)),
            (QueueState::Ready, _) if fields & !ALWAYS != 0 => Err(illegal),
            _ => Ok((step, fields)),
        }
    }

    /// Whether a queue could pass frames.
    fn check_start(&self, object: &VirtioNetQueue) -> Result<(), Refusal> {
        let virtio = &object.virtio_q;
        let aligned = virtio.desc_addr.get().is_multiple_of(16)
            && virtio.available_addr.get().is_multiple_of(2)
            && virtio.used_addr.get().is_multiple_of(4);
        // Frames have the 12-byte header of virtio 1.0; what came before it is not modelled.
        if !aligned || virtio.flags & VirtioQueue::VIRTIO_1_0 == 0 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0a01_000a));
        }
        let keys = self.nic.keys();
        if !keys.exists(virtio.mkey.get()) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a01_000b));
        }
        Ok(())
    }

    /// Makes the queue do what its object says. It can fail only when it suspends.
    fn apply(
        &self,
        queue: &Queue,
        object: &VirtioNetQueue,
        step: Step,
        fields: u64,
    ) -> Result<(), RingError> {
        self.nic.reach(|reach| {
            let mut work = queue.lock();
            let suspended = match step {
                Step::Suspend if work.state == QueueState::Ready => {
                    self.nic.count_running(false);
                    work.suspend(reach).inspect_err(|error| self.nic.count_error(*error))
                }
                // Between the check and now it broke.
                Step::Suspend => Err(work.error.unwrap_or(RingError::Index { taken: 0, found: 0 })),
                Step::Stay | Step::Start => Ok(()),
            };
            set_fields(&mut work, object, fields);
            if step == Step::Start && work.state != QueueState::Error {
                work.start();
                self.nic.count_running(true);
            }
            suspended
        })
    }

    pub(super) fn query_virtq(&self, input: &Input) -> Answer {
        let query: GeneralObjectIn = parse(&input.head)?;
        let number = query.obj_id.get();
        let virtq = self.virtqs.get(&number);
        let virtq = virtq.ok_or(refuse(CommandStatus::BAD_RESOURCE, 0x0a02_0001))?;
        let mut object = virtq.object;
        object.modify_field_select = U64::new(0);
        let work = virtq.queue.lock();
        object.set_state(match work.state {
            QueueState::Init => VirtqState::INIT,
            QueueState::Ready => VirtqState::RDY,
            QueueState::Suspended => VirtqState::SUSPEND,
            QueueState::Error => VirtqState::ERR,
        });
        object.hw_available_index = U16::new(work.ring.taken());
        object.hw_used_index = U16::new(work.ring.published());
        object.virtio_q.error_type = match work.error {
            None => 0,
            Some(RingError::Access(_)) => 1,
            Some(RingError::Index { .. }) => 2,
            Some(RingError::Chain { .. }) => 3,
            Some(RingError::Descriptor { .. }) => 4,
        };
        drop(work);
        bytes(&QueryVirtqOut { header: general_header(number), object })
    }

    pub(super) fn destroy_virtq(&mut self, input: &Input) -> Answer {
        let destroy: GeneralObjectIn = parse(&input.head)?;
        let number = destroy.obj_id.get();
        if self.tables.values().any(|list| list.contains(&number)) {
            return Err(refuse(CommandStatus::RESOURCE_BUSY, 0x0a03_0001));
        }
        let virtq = self.virtqs.remove(&number);
        let virtq = virtq.ok_or(refuse(CommandStatus::BAD_RESOURCE, 0x0a03_0002))?;
        self.nic.remove_queue(virtq.queue.index);
        let virtio = &virtq.object.virtio_q;
        self.use_domain(virtio.pd.get(), false);
        self.use_umems(virtio, false);
        self.keep_counts(virtio.counter_set_id.get(), virtq.queue.lock().counts);
        done()
    }

    fn use_umems(&mut self, virtio: &VirtioQueue, more: bool) {
        for place in &virtio.umem {
            if let Some(umem) = self.umems.get_mut(&place.id.get()) {
                let users = umem.users;
                umem.users = if more { users.saturating_add(1) } else { users.saturating_sub(1) };
            }
        }
    }

    /// The class of a MODIFY, by what it would do now.
    pub(super) fn modify_class(&self, input: &Input) -> Class {
        let Ok(modify) = parse::<VirtqIn>(&input.head) else { return Class::QueueFields };
        let virtq = self.virtqs.get(&modify.header.obj_id.get());
        let state = virtq.map(|virtq| virtq.queue.lock().state);
        if modify.object.modify_field_select.get() & modify::STATE == 0 {
            return Class::QueueFields;
        }
        match (state, modify.object.state()) {
            (_, VirtqState::SUSPEND) => Class::QueueSuspend,
            (Some(QueueState::Init), VirtqState::RDY) => Class::QueueStart,
            (_, VirtqState::RDY) => Class::QueueResume,
            _ => Class::QueueFields,
        }
    }
}

impl Virtq {
    /// Whose counters it counts for; zero for none.
    pub(super) fn counter_set(&self) -> u32 {
        self.object.virtio_q.counter_set_id.get()
    }
}

fn place(virtio: &VirtioQueue) -> RingPlace {
    RingPlace {
        descriptors: virtio.desc_addr.get(),
        driver: virtio.available_addr.get(),
        device: virtio.used_addr.get(),
    }
}

fn offloads(features: u16) -> Offloads {
    let has = |feature: u16| features >> feature & 1 == 1;
    Offloads {
        mergeable: has(device_feature::MRG_RXBUF),
        checksum: has(device_feature::CSUM),
        guest_checksum: has(device_feature::GUEST_CSUM),
    }
}

fn vector(virtio: &VirtioQueue) -> Option<u16> {
    let vector = virtio.event_qpn_or_msix.get().checked_sub(1);
    let vector = vector.and_then(|vector| u16::try_from(vector).ok());
    vector.filter(|_| virtio.event_mode & 7 == event_mode::MSIX)
}

fn log_place(object: &VirtioNetQueue) -> Option<LogPlace> {
    object.is_logging().then(|| LogPlace {
        key: object.dirty_bitmap_mkey.get(),
        at: object.dirty_bitmap_addr.get(),
        bytes: object.dirty_bitmap_size.get(),
        log_page: object.log_page(),
    })
}

/// Copies the selected fields from one object to another.
fn merge(to: &mut VirtioNetQueue, from: &VirtioNetQueue, fields: u64) {
    let (queue, new) = (&mut to.virtio_q, &from.virtio_q);
    if fields & modify::ADDRESSES != 0 {
        (queue.desc_addr, queue.used_addr) = (new.desc_addr, new.used_addr);
        queue.available_addr = new.available_addr;
    }
    if fields & modify::VIRTIO_Q_MKEY != 0 {
        queue.mkey = new.mkey;
    }
    if fields & modify::AVAIL_INDEX != 0 {
        to.hw_available_index = from.hw_available_index;
    }
    if fields & modify::USED_INDEX != 0 {
        to.hw_used_index = from.hw_used_index;
    }
    if fields & modify::DIRTY_BITMAP_PARAMS != 0 {
        (to.dirty_bitmap_mkey, to.dirty_bitmap_size) =
            (from.dirty_bitmap_mkey, from.dirty_bitmap_size);
        to.dirty_bitmap_addr = from.dirty_bitmap_addr;
        to.set_log_page(from.log_page());
    }
    if fields & modify::DIRTY_BITMAP_DUMP_ENABLE != 0 {
        to.set_logging(from.is_logging());
    }
    if fields & modify::QUEUE_FEATURES != 0 {
        to.set_features(from.features());
    }
}

/// Makes a queue's work as the selected fields of its object say.
fn set_fields(work: &mut Work, object: &VirtioNetQueue, fields: u64) {
    let virtio = &object.virtio_q;
    if fields & ALWAYS != 0 {
        work.ring.view.set_log(log_place(object));
    }
    if fields & modify::VIRTIO_Q_MKEY != 0 {
        work.ring.view.set_key(virtio.mkey.get());
    }
    if fields & modify::ADDRESSES != 0 {
        work.ring.place = place(virtio);
    }
    if fields & modify::AVAIL_INDEX != 0 {
        work.ring.set_taken(object.hw_available_index.get());
    }
    if fields & modify::USED_INDEX != 0 {
        work.ring.set_published(object.hw_used_index.get());
    }
    if fields & modify::QUEUE_FEATURES != 0 {
        work.offloads = offloads(object.features());
    }
}
