//! One virtqueue: what is known of it, and the commands about it.

use super::state::{ObjectEvent, ObjectState};
use super::umem::UmemPiece;
use crate::command::{CommandError, Keep, Output, Request};
use martlet_mlx5_abi::message::{GeneralObjectIn, GeneralObjectOut, object_type};
use martlet_mlx5_abi::virtq::{
    QueryVirtqOut, SPLIT, VirtioNetQueue, VirtioQueue, VirtqIn, VirtqState, event_mode, modify,
};
use martlet_mlx5_abi::{Opcode, U16, U24, U32, U64};
use martlet_vdpa::{QueueConfig, QueueState};
use std::fmt;
use std::sync::Arc;
use zerocopy::FromZeros;

/// Where a queue's rings are, and by which key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) descriptors: u64,
    pub(crate) driver: u64,
    pub(crate) device: u64,
    pub(crate) key: u32,
}

/// Where a queue logs the pages it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogTo {
    pub(crate) key: u32,
    pub(crate) bytes: u32,
}

/// Everything about a queue that can be modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) place: Place,
    pub(crate) features: u16,
    /// `None` for what the object has by itself.
    pub(crate) at: Option<QueueState>,
    pub(crate) log: Option<LogTo>,
}

/// What never changes about the objects of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub(crate) pd: u32,
    pub(crate) vectors: u16,
}

/// A virtqueue's object in the device.
pub(crate) struct Object {
    pub(crate) id: u32,
    pub(crate) size: u16,
    pub(crate) state: ObjectState,
    /// What it was made or modified with last. Its indices are `None` while they move.
    pub(crate) fields: Fields,
    /// Its memory for the firmware.
    #[expect(dead_code, reason = "it is there to be held")]
    pub(crate) umem: Arc<UmemPiece>,
    /// What keeps its key: a map of guest memory, or memory of the driver's own.
    pub(crate) hold: Keep,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({}, {:?}, {:?})", self.id, self.state, self.fields)
    }
}

/// A virtqueue, with an object or without.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// As the VMM said.
    pub(crate) config: Option<QueueConfig>,
    /// Where it stands or will begin; `None` while it runs, and if only its rings tell.
    pub(crate) at: Option<QueueState>,
    pub(crate) object: Option<Object>,
    /// Number of its counters.
    pub(crate) counters: Option<u32>,
}

impl Object {
    /// The one place where its state changes.
    pub(crate) fn change(&mut self, event: ObjectEvent) {
        let (id, state) = (self.id, self.state);
        let next = state.next(event);
        self.state = next.unwrap_or_else(|| panic!("virtqueue {id} is {state:?} at {event:?}"));
    }

    /// Whether it does nothing, for certain.
    pub(crate) fn stands(&self) -> bool {
        match self.state {
            ObjectState::Init | ObjectState::Suspended | ObjectState::Broken => true,
            ObjectState::Ready => false,
        }
    }

    /// Which fields differ from what is wanted.
    fn differing(&self, wanted: &Fields) -> u64 {
        let (has, mut select) = (&self.fields, 0);
        let mut differ = |differs: bool, bits: u64| select |= if differs { bits } else { 0 };
        let rings = |place: &Place| (place.descriptors, place.driver, place.device);
        differ(rings(&has.place) != rings(&wanted.place), modify::ADDRESSES);
        differ(has.place.key != wanted.place.key, modify::VIRTIO_Q_MKEY);
        differ(has.features != wanted.features, modify::QUEUE_FEATURES);
        let moves = wanted.at.is_some() && has.at != wanted.at;
        differ(moves, modify::AVAIL_INDEX | modify::USED_INDEX);
        let log = modify::DIRTY_BITMAP_PARAMS | modify::DIRTY_BITMAP_DUMP_ENABLE;
        differ(has.log != wanted.log && wanted.log.is_some(), log);
        differ(has.log != wanted.log && wanted.log.is_none(), modify::DIRTY_BITMAP_DUMP_ENABLE);
        select
    }

    /// The command that changes it to what is wanted, and to RDY. From SUSPEND everything goes in
    /// one; from INIT the firmware ignores fields that come with the state (Linux `mlx5_vnet.c`,
    /// `resume_vqs`), so [`Self::fields_request`] has to come first.
    pub(crate) fn ready_request(&self, wanted: &Fields) -> Request {
        let select = match self.state {
            ObjectState::Init => 0,
            _ => self.differing(wanted),
        };
        self.modify(wanted, select | modify::STATE, VirtqState::RDY)
    }

    /// The command that changes fields alone; `None` if nothing differs.
    pub(crate) fn fields_request(&self, wanted: &Fields) -> Option<Request> {
        let select = self.differing(wanted);
        (select != 0).then(|| self.modify(wanted, select, VirtqState::INIT))
    }

    /// The command that begins or ends logging, in any state.
    pub(crate) fn log_request(&self, log: Option<LogTo>) -> Option<Request> {
        self.fields_request(&Fields { log, at: None, ..self.fields })
    }

    /// The command that stops it.
    pub(crate) fn stop_request(&self) -> Request {
        self.modify(&self.fields, modify::STATE, VirtqState::SUSPEND)
    }

    fn modify(&self, wanted: &Fields, select: u64, state: VirtqState) -> Request {
        let opcode = Opcode::MODIFY_GENERAL_OBJECT;
        let header = GeneralObjectIn::new(opcode, object_type::VIRTIO_NET_Q, self.id);
        let mut object = VirtioNetQueue::new_zeroed();
        object.modify_field_select = U64::new(select);
        fill(&mut object, wanted);
        object.set_state(state);
        Request::new::<GeneralObjectOut>(opcode, &VirtqIn { header, object })
    }

    /// The command that asks for its state and indices.
    pub(crate) fn query_request(&self) -> Request {
        let opcode = Opcode::QUERY_GENERAL_OBJECT;
        Request::general::<QueryVirtqOut>(opcode, object_type::VIRTIO_NET_Q, self.id)
    }

    /// The command that ends it.
    pub(crate) fn destroy_request(&self) -> Request {
        let opcode = Opcode::DESTROY_GENERAL_OBJECT;
        Request::general::<GeneralObjectOut>(opcode, object_type::VIRTIO_NET_Q, self.id)
    }

    /// A change of fields has succeeded: it has what was wanted.
    pub(crate) fn has_fields(&mut self, wanted: &Fields, hold: Keep) {
        let at = wanted.at.or(self.fields.at);
        self.fields = Fields { at, ..*wanted };
        self.hold = hold;
    }

    /// What a query has found. The indices, if it stands.
    ///
    /// The available index that the firmware returns is not reliable (Linux `mlx5_vnet.c`,
    /// `suspend_vq`): both are equal after a suspend, so the used index stands for both.
    pub(crate) fn found(&mut self, output: &Output) -> Result<Option<QueueState>, CommandError> {
        let found: QueryVirtqOut = output.read()?;
        if found.header.obj_id.get() != self.id {
            return Err(output.nonsense("another object"));
        }
        let used_index = found.object.hw_used_index.get();
        let at = QueueState { avail_index: used_index, used_index };
        match (found.object.state(), self.state) {
            (VirtqState::RDY, ObjectState::Ready) => Ok(None),
            (VirtqState::SUSPEND, ObjectState::Suspended) => {
                self.fields.at = Some(at);
                Ok(Some(at))
            }
            (VirtqState::ERR, _) => {
                self.change(ObjectEvent::FoundBroken);
                Ok(Some(at))
            }
            _ => Err(output.nonsense("an impossible state")),
        }
    }
}

/// The command that makes a queue's object.
pub(crate) fn create_request(
    index: u16,
    size: u16,
    wanted: &Fields,
    common: &Common,
    umem: &UmemPiece,
    counters: Option<u32>,
) -> Request {
    let opcode = Opcode::CREATE_GENERAL_OBJECT;
    let header = GeneralObjectIn::new(opcode, object_type::VIRTIO_NET_Q, 0);
    let mut object = VirtioNetQueue::new_zeroed();
    fill(&mut object, wanted);
    object.set_state(VirtqState::INIT);
    let queue = &mut object.virtio_q;
    queue.kind = SPLIT;
    match index.checked_rem(common.vectors) {
        Some(vector) => {
            queue.event_mode = event_mode::MSIX;
            // MSI-X vector 0 is the event queue's.
            queue.event_qpn_or_msix = U24::new(u32::from(vector) + 1);
        }
        None => queue.event_mode = event_mode::NONE,
    }
    queue.queue_index = U16::new(index);
    queue.queue_size = U16::new(size);
    queue.umem = umem.refs();
    queue.counter_set_id = U32::new(counters.unwrap_or(0));
    queue.pd = U24::new(common.pd);
    Request::new::<GeneralObjectOut>(opcode, &VirtqIn { header, object })
}

/// Writes the fields that can be modified into an object.
fn fill(object: &mut VirtioNetQueue, wanted: &Fields) {
    let at = wanted.at.unwrap_or_default();
    object.hw_available_index = U16::new(at.avail_index);
    object.hw_used_index = U16::new(at.used_index);
    object.set_features(wanted.features);
    if let Some(log) = wanted.log {
        object.set_logging(true);
        object.set_log_page(0);
        object.dirty_bitmap_mkey = U32::new(log.key);
        object.dirty_bitmap_size = U32::new(log.bytes);
    }
    let queue = &mut object.virtio_q;
    queue.flags = VirtioQueue::VIRTIO_1_0 | VirtioQueue::ETH_FRAME;
    queue.desc_addr = U64::new(wanted.place.descriptors);
    queue.available_addr = U64::new(wanted.place.driver);
    queue.used_addr = U64::new(wanted.place.device);
    queue.mkey = U32::new(wanted.place.key);
}

impl Place {
    /// A guest's rings, under its map's key.
    pub(crate) fn of(config: &QueueConfig, key: u32) -> Place {
        Place {
            descriptors: config.descriptors.0,
            driver: config.driver.0,
            device: config.device.0,
            key,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Input;
    use crate::options::Umems;
    use crate::queues::umem::UmemPlan;
    use martlet_mlx5_abi::capability::VirtioCapabilities;
    use martlet_soft_bus::{Addressing, SoftBus};

    /// Offsets typed from `mlx5_ifc_virtio_q_bits`, in the object from byte 0x10 of the input, there
    /// from byte 0x40.
    #[test]
    fn a_queue_is_made_as_documented() {
        let bus = SoftBus::new(Addressing::Iommu);
        let capabilities = VirtioCapabilities::new_zeroed();
        let plan = UmemPlan::new(&*bus, &capabilities, Umems::Shared, &[256]).unwrap();
        let umem = plan.pieces(&[7], &Default::default());
        let place = Place { descriptors: 0x1000, driver: 0x2000, device: 0x3000, key: 0x500 };
        let fields = Fields { place, features: 0, at: Some(QueueState::default()), log: None };
        let common = Common { pd: 0x105, vectors: 4 };
        let request = create_request(6, 256, &fields, &common, &umem[0], None);
        let Input::Bytes(input) = request.input else { unreachable!("it is short") };
        let queue = &input[0x50..];
        // Split; MSI-X mode; number 6; virtio 1.0 and offload type ETH_FRAME, which is 0; vector 3,
        // behind the event queue's vector 0.
        assert_eq!(queue[..8], [0, 2, 0, 6, 0x40, 0, 0, 3]);
        // No doorbell of its own; its size.
        assert_eq!(queue[8..12], [0, 0, 1, 0]);
    }
}
