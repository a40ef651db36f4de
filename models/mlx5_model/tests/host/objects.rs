//! Keys, queues and tables.

use super::{Host, Reply};
use martlet_mlx5_abi::capability::device_feature;
use martlet_mlx5_abi::memory::{
    CreateMkeyIn, CreateMkeyOut, CreateUmemIn, Klm, MkeyContext, access_mode, mkey_from_index,
};
use martlet_mlx5_abi::message::{
    GeneralObjectIn, GeneralObjectOut, InHeader, ShortOut, object_type,
};
use martlet_mlx5_abi::rqt::{LIST_OF_VIRTQUEUES, MODIFY_LIST, RqtIn};
use martlet_mlx5_abi::virtq::{
    QueryVirtqOut, UmemRef, VirtioNetQueue, VirtioQueue, VirtqIn, VirtqState, event_mode,
};
use martlet_mlx5_abi::{Opcode, U16, U24, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// A key's input: its context and its list.
pub fn key_input(domain: u32, mode: u8, bytes: u64, log_page: u32, list: &[u8]) -> Vec<u8> {
    let mut create = CreateMkeyIn::new_zeroed();
    create.header = InHeader::new(Opcode::CREATE_MKEY, 0);
    let rights = MkeyContext::LOCAL_READ | MkeyContext::LOCAL_WRITE;
    create.context.flags = U32::new(MkeyContext::mode_flags(mode) | rights);
    create.context.qpn = U24::new(MkeyContext::ANY_QP);
    create.context.length64_pd = U32::new(domain);
    create.context.length = U64::new(bytes);
    create.context.log_page_size = U32::new(log_page);
    let octwords = U32::new((list.len() / 16) as u32);
    create.context.translations_octword_size = octwords;
    create.translations_octword_actual_size = octwords;
    [create.as_bytes(), list].concat()
}

/// A page list, padded.
pub fn page_list(pages: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut list: Vec<u8> = pages.into_iter().flat_map(u64::to_be_bytes).collect();
    list.resize(list.len().next_multiple_of(16), 0);
    list
}

/// A list of pieces, padded.
pub fn piece_list(pieces: &[(u32, u32)]) -> Vec<u8> {
    let mut list = Vec::new();
    for (bytes, key) in pieces {
        let klm = Klm { byte_count: U32::new(*bytes), mkey: U32::new(*key), address: U64::new(0) };
        list.extend_from_slice(klm.as_bytes());
    }
    list.resize(list.len().next_multiple_of(64), 0);
    list
}

/// What a queue is made of.
#[derive(Clone, Copy, Debug)]
pub struct QueueSpec {
    pub index: u16,
    pub size: u16,
    pub key: u32,
    pub descriptors: u64,
    pub driver: u64,
    pub device: u64,
    pub start_index: u16,
    pub features: u16,
    pub counters: u32,
}

impl Host {
    pub fn key(&mut self, mode: u8, bytes: u64, log_page: u32, list: &[u8]) -> u32 {
        let input = key_input(self.domain, mode, bytes, log_page, list);
        let made: CreateMkeyOut = self.run(&input, 16).parse();
        mkey_from_index(made.mkey_index.get(), 0)
    }

    /// A direct key of 4 KiB pages that follow each other on the bus.
    pub fn direct_key(&mut self, at: u64, bytes: u64) -> u32 {
        let pages = (0..bytes.div_ceil(4096)).map(|page| at + page * 4096);
        self.key(access_mode::MTT, bytes, 12, &page_list(pages))
    }

    pub fn indirect_key(&mut self, pieces: &[(u32, u32)]) -> u32 {
        let bytes = pieces.iter().map(|(bytes, _)| u64::from(*bytes)).sum();
        self.key(access_mode::KLM, bytes, 0, &piece_list(pieces))
    }

    pub fn destroy_key(&mut self, key: u32) -> Reply {
        self.short(Opcode::DESTROY_MKEY, key >> 8)
    }

    pub fn umem(&mut self, pages: u64) -> u32 {
        let mut create = CreateUmemIn::new_zeroed();
        create.header = InHeader::new(Opcode::CREATE_UMEM, 0);
        create.num_of_mtt = U64::new(pages);
        let mut input = create.as_bytes().to_vec();
        input.extend(page_list((0..pages).map(|page| 0x10_0000 + page * 4096)));
        let made: ShortOut = self.run(&input, 16).parse();
        made.object.get()
    }

    pub fn queue_object(&mut self, spec: &QueueSpec) -> VirtioNetQueue {
        let umem = self.umem(64);
        let mut object = VirtioNetQueue::new_zeroed();
        object.set_features(spec.features);
        object.hw_available_index = U16::new(spec.start_index);
        object.hw_used_index = U16::new(spec.start_index);
        let queue = &mut object.virtio_q;
        queue.event_mode = event_mode::MSIX;
        queue.queue_index = U16::new(spec.index);
        queue.flags = VirtioQueue::VIRTIO_1_0 | VirtioQueue::ETH_FRAME;
        queue.event_qpn_or_msix = U24::new(u32::from(spec.index) + 1);
        queue.queue_size = U16::new(spec.size);
        queue.desc_addr = U64::new(spec.descriptors);
        queue.used_addr = U64::new(spec.device);
        queue.available_addr = U64::new(spec.driver);
        queue.mkey = U32::new(spec.key);
        queue.counter_set_id = U32::new(spec.counters);
        queue.pd = U24::new(self.domain);
        for (number, place) in queue.umem.iter_mut().enumerate() {
            let offset = U64::new(number as u64 * 0x14000);
            *place = UmemRef { id: U32::new(umem), bytes: U32::new(0x14000), offset };
        }
        object.virtio_q.umem[2].bytes = U32::new(0x10000);
        object
    }

    pub fn create_queue(&mut self, spec: &QueueSpec) -> u32 {
        let object = self.queue_object(spec);
        let made: GeneralObjectOut = self.run(&create_input(object), 16).parse();
        made.obj_id.get()
    }

    pub fn modify(
        &mut self,
        id: u32,
        fields: u64,
        fill: impl FnOnce(&mut VirtioNetQueue),
    ) -> Reply {
        self.run(&modify_input(id, fields, fill), 16)
    }

    pub fn set_state(&mut self, id: u32, state: VirtqState) -> Reply {
        self.run(&state_input(id, state), 16)
    }

    pub fn query_queue(&mut self, id: u32) -> VirtioNetQueue {
        let query =
            GeneralObjectIn::new(Opcode::QUERY_GENERAL_OBJECT, object_type::VIRTIO_NET_Q, id);
        let reply: QueryVirtqOut = self.run(query.as_bytes(), 208).parse();
        reply.object
    }

    pub fn destroy_queue(&mut self, id: u32) -> Reply {
        let destroy =
            GeneralObjectIn::new(Opcode::DESTROY_GENERAL_OBJECT, object_type::VIRTIO_NET_Q, id);
        self.run(destroy.as_bytes(), 16)
    }
}

pub fn create_input(object: VirtioNetQueue) -> Vec<u8> {
    let header = GeneralObjectIn::new(Opcode::CREATE_GENERAL_OBJECT, object_type::VIRTIO_NET_Q, 0);
    VirtqIn { header, object }.as_bytes().to_vec()
}

pub fn modify_input(id: u32, fields: u64, fill: impl FnOnce(&mut VirtioNetQueue)) -> Vec<u8> {
    let header = GeneralObjectIn::new(Opcode::MODIFY_GENERAL_OBJECT, object_type::VIRTIO_NET_Q, id);
    let mut object = VirtioNetQueue::new_zeroed();
    object.modify_field_select = U64::new(fields);
    fill(&mut object);
    VirtqIn { header, object }.as_bytes().to_vec()
}

pub fn state_input(id: u32, state: VirtqState) -> Vec<u8> {
    modify_input(id, 1, |object| object.set_state(state))
}

/// A receive queue table's input.
pub fn table_input(opcode: Opcode, number: u32, max: u16, queues: &[u32]) -> Vec<u8> {
    let mut create = RqtIn::new_zeroed();
    create.header = InHeader::new(opcode, 0);
    create.rqtn = U24::new(number);
    create.modify_bitmask = U64::new(MODIFY_LIST);
    create.context.list_q_type = LIST_OF_VIRTQUEUES;
    create.context.max_size = U16::new(max);
    create.context.actual_size = U16::new(queues.len() as u16);
    let mut input = create.as_bytes().to_vec();
    input.extend(queues.iter().flat_map(|queue| queue.to_be_bytes()));
    input
}

/// Merged receive buffers.
pub const MERGEABLE: u16 = 1 << device_feature::MRG_RXBUF;
