//! Virtqueues, keys and tables against bytes typed from the documents.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_mlx5_abi::capability::{
    GeneralCapabilities, GeneralCapabilitiesOut, VirtioCapabilities, VirtioCapabilitiesOut,
    device_feature, kind, op_mod_current,
};
use martlet_mlx5_abi::memory::{
    CreateMkeyIn, CreateMkeyOut, CreateUmemIn, Klm, MkeyContext, Mtt, QuerySpecialContextsOut,
    access_mode, mkey_from_index, mkey_to_index,
};
use martlet_mlx5_abi::message::{GeneralObjectIn, ShortIn, object_type};
use martlet_mlx5_abi::rqt::RqtIn;
use martlet_mlx5_abi::virtq::{
    QueryCountersOut, QueryVirtqOut, VirtioNetQueue, VirtqIn, VirtqState,
};
use martlet_mlx5_abi::{Opcode, virtq};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

#[test]
fn a_general_object_is_named_in_its_header() {
    #[rustfmt::skip]
    let bytes = [
        0x0a, 0x01, 0x00, 0x00,  0x00, 0x00, 0x00, 0x0d,
        0x00, 0x00, 0x00, 0x21,  0x00, 0x00, 0x00, 0x00,
    ];
    let header = GeneralObjectIn::read_from_bytes(&bytes).unwrap();
    let modify = Opcode::MODIFY_GENERAL_OBJECT;
    assert_eq!(header, GeneralObjectIn::new(modify, object_type::VIRTIO_NET_Q, 0x21));
}

/// MODIFY of virtqueue 0x21 from SUSPEND to RDY with addresses, indices, key and features.
fn modify_bytes() -> [u8; 208] {
    let mut bytes = [0_u8; 208];
    #[rustfmt::skip]
    bytes[..0x10].copy_from_slice(&[
        0x0a, 0x01, 0x00, 0x00,  0x00, 0x00, 0x00, 0x0d,
        0x00, 0x00, 0x00, 0x21,  0x00, 0x00, 0x00, 0x00,
    ]);
    let object = &mut bytes[0x10..];
    // Bits 0, 6, 7, 8, 11, 12.
    object[0x06..0x08].copy_from_slice(&[0x19, 0xc1]);
    object[0x0c..0x0e].copy_from_slice(&[0x00, 0x09]);
    // Features 10 (CSUM) and 2 (MRG_RXBUF): bit 7 of the upper ten, so 0x80 << 22; logging on
    // (bit 21) in pages of 4 KiB; state RDY.
    object[0x10..0x18].copy_from_slice(&[0x20, 0x20, 0x00, 0x01, 0x04, 0x00, 0x01, 0x77]);
    object[0x18..0x20].copy_from_slice(&[0x00, 0x00, 0x12, 0x00, 0x00, 0x80, 0x00, 0x00]);
    object[0x20..0x28].copy_from_slice(&[0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00]);
    object[0x28..0x2c].copy_from_slice(&[0xff, 0xfe, 0xff, 0xfd]);
    let queue = &mut object[0x40..];
    queue[..0x10].copy_from_slice(&[
        0x00, 0x02, 0x00, 0x03, 0x40, 0x00, 0x00, 0x06, 0x00, 0x03, 0x01, 0x00, 0, 0, 0, 0,
    ]);
    queue[0x10..0x18].copy_from_slice(&[0, 0, 0, 0x01, 0x23, 0x45, 0x60, 0x00]);
    queue[0x18..0x20].copy_from_slice(&[0, 0, 0, 0x01, 0x23, 0x45, 0x80, 0x00]);
    queue[0x20..0x28].copy_from_slice(&[0, 0, 0, 0x01, 0x23, 0x45, 0x70, 0x00]);
    queue[0x28..0x2c].copy_from_slice(&[0x00, 0x01, 0x02, 0x00]);
    queue[0x30..0x40].copy_from_slice(&[0, 0, 0, 0x11, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0x80, 0]);
    queue[0x40..0x44].copy_from_slice(&[0, 0, 0, 0x12]);
    queue[0x50..0x54].copy_from_slice(&[0, 0, 0, 0x13]);
    queue[0x60..0x64].copy_from_slice(&[0, 0, 0, 0x1c]);
    queue[0x65..0x68].copy_from_slice(&[0, 0x01, 0x05]);
    queue[0x6c..0x70].copy_from_slice(&[0, 0, 0x99, 0]);
    bytes
}

#[test]
fn a_virtqueue_reads_as_the_tables_say() {
    let bytes = modify_bytes();
    let input = VirtqIn::read_from_bytes(&bytes).unwrap();
    let object = input.object;
    let fields = virtq::modify::STATE
        | virtq::modify::ADDRESSES
        | virtq::modify::AVAIL_INDEX
        | virtq::modify::USED_INDEX
        | virtq::modify::VIRTIO_Q_MKEY
        | virtq::modify::QUEUE_FEATURES;
    assert_eq!(object.modify_field_select.get(), fields);
    assert_eq!(object.vhca_id.get(), 9);
    assert_eq!(object.state(), VirtqState::RDY);
    assert_eq!(object.features(), 1 << device_feature::CSUM | 1 << device_feature::MRG_RXBUF);
    assert!(object.is_logging());
    assert_eq!(object.log_page(), 0);
    assert_eq!(object.tisn_or_qpn.get(), 0x177);
    assert_eq!(object.dirty_bitmap_mkey.get(), 0x1200);
    assert_eq!(object.dirty_bitmap_size.get(), 0x80_0000);
    assert_eq!(object.dirty_bitmap_addr.get(), 0x1_0000_0000);
    assert_eq!(object.hw_available_index.get(), 0xfffe);
    assert_eq!(object.hw_used_index.get(), 0xfffd);
    let queue = object.virtio_q;
    assert_eq!(queue.kind, virtq::SPLIT);
    assert_eq!(queue.event_mode, virtq::event_mode::MSIX);
    assert_eq!(queue.queue_index.get(), 3);
    assert_eq!(queue.flags, virtq::VirtioQueue::VIRTIO_1_0 | virtq::VirtioQueue::ETH_FRAME);
    assert_eq!(queue.event_qpn_or_msix.get(), 6);
    assert_eq!(queue.doorbell_stride_index.get(), 3);
    assert_eq!(queue.queue_size.get(), 256);
    assert_eq!(queue.desc_addr.get(), 0x1_2345_6000);
    assert_eq!(queue.used_addr.get(), 0x1_2345_8000);
    assert_eq!(queue.available_addr.get(), 0x1_2345_7000);
    assert_eq!(queue.mkey.get(), 0x10200);
    assert_eq!(queue.umem[0].id.get(), 0x11);
    assert_eq!(queue.umem[0].bytes.get(), 0x4000);
    assert_eq!(queue.umem[0].offset.get(), 0x8000);
    assert_eq!([queue.umem[1].id.get(), queue.umem[2].id.get()], [0x12, 0x13]);
    assert_eq!(queue.counter_set_id.get(), 0x1c);
    assert_eq!(queue.pd.get(), 0x105);
    assert_eq!(queue.desc_group_mkey.get(), 0x9900);
}

#[test]
fn a_virtqueue_is_written_as_the_tables_say() {
    let mut object = VirtioNetQueue::new_zeroed();
    object.set_features(1 << device_feature::CSUM | 1 << device_feature::MRG_RXBUF);
    object.set_logging(true);
    object.set_log_page(0);
    object.set_state(VirtqState::ERR);
    object.set_state(VirtqState::RDY);
    object.tisn_or_qpn = martlet_mlx5_abi::U24::new(0x177);
    assert_eq!(object.as_bytes()[0x10..0x18], modify_bytes()[0x20..0x28]);
    object.set_log_page(0x15);
    object.set_logging(false);
    assert_eq!(object.as_bytes()[0x10..0x14], [0x20, 0x15, 0x00, 0x01]);
    assert_eq!(object.log_page(), 0x15);
    object.set_features(0x1fff);
    assert_eq!(object.features(), 0x1fff);
    assert_eq!(object.as_bytes()[0x10..0x15], [0xff, 0xd5, 0x00, 0x01, 0x07]);
}

#[test]
fn a_virtqueue_that_was_queried() {
    let mut bytes = modify_bytes();
    bytes[..0x10].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x21, 0, 0, 0, 0]);
    bytes[0x10 + 0x13] = 0x03;
    bytes[0x10 + 0x40 + 0x2f] = 0x05;
    let output = QueryVirtqOut::read_from_bytes(&bytes).unwrap();
    assert_eq!(output.header.obj_id.get(), 0x21);
    assert_eq!(output.object.state(), VirtqState::ERR);
    assert_eq!(output.object.virtio_q.error_type, 5);
}

#[test]
fn counters_that_were_queried() {
    let mut bytes = [0_u8; 0x90];
    bytes[0x20..0x28].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x01, 0x00]);
    bytes[0x28..0x30].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x00, 0xff]);
    bytes[0x3c..0x40].copy_from_slice(&[0, 0, 0, 0x02]);
    let output = QueryCountersOut::read_from_bytes(&bytes).unwrap();
    assert_eq!(output.object.received_desc.get(), 256);
    assert_eq!(output.object.completed_desc.get(), 255);
    assert_eq!(output.object.invalid_buffer.get(), 2);
}

#[test]
fn a_direct_key_is_asked_for() {
    let mut bytes = [0_u8; 0x120];
    bytes[..8].copy_from_slice(&[0x02, 0x00, 0, 0, 0, 0, 0, 0]);
    let context = &mut bytes[0x10..0x50];
    // Local write and read, MTT: bits 11, 10 and 8. Any queue pair. Domain 0x105.
    context[..8].copy_from_slice(&[0x00, 0x00, 0x0d, 0x00, 0xff, 0xff, 0xff, 0x00]);
    context[0x0c..0x10].copy_from_slice(&[0x00, 0x00, 0x01, 0x05]);
    context[0x18..0x20].copy_from_slice(&[0, 0, 0, 0, 0x40, 0, 0, 0]);
    context[0x34..0x38].copy_from_slice(&[0, 0, 0x01, 0x00]);
    context[0x38..0x3c].copy_from_slice(&[0, 0, 0, 21]);
    bytes[0x60..0x64].copy_from_slice(&[0, 0, 0x01, 0x00]);
    bytes[0x110..0x118].copy_from_slice(&[0, 0, 0, 2, 0, 0x20, 0, 0]);

    let (input, list) = CreateMkeyIn::read_from_prefix(&bytes).unwrap();
    assert_eq!(input.header.opcode.get(), Opcode::CREATE_MKEY.0);
    assert_eq!(input.context.access_mode(), access_mode::MTT);
    let flags = MkeyContext::LOCAL_READ
        | MkeyContext::LOCAL_WRITE
        | MkeyContext::mode_flags(access_mode::MTT);
    assert_eq!(input.context.flags.get(), flags);
    assert_eq!(input.context.qpn.get(), MkeyContext::ANY_QP);
    assert_eq!(input.context.length64_pd.get(), 0x105);
    assert_eq!(input.context.length.get(), 1 << 30);
    assert_eq!(input.context.log_page_size.get(), 21);
    assert_eq!(input.translations_octword_actual_size.get(), 256);
    let (page, _) = Mtt::read_from_prefix(list).unwrap();
    assert_eq!(page.0.get(), 0x2_0020_0000);
}

#[test]
fn all_access_modes_have_their_bits() {
    assert_eq!(MkeyContext::mode_flags(access_mode::KLM), 0x200);
    assert_eq!(MkeyContext::mode_flags(access_mode::KSM), 0x300);
    // A mode above 3 goes on in bits 28:26.
    assert_eq!(MkeyContext::mode_flags(0b1_0101), 0x1400_0100);
}

#[test]
fn keys_and_their_indices() {
    #[rustfmt::skip]
    let output = CreateMkeyOut::read_from_bytes(&[
        0, 0, 0, 0,  0, 0, 0, 0,  0, 0x00, 0x12, 0x34,  0, 0, 0, 0,
    ]).unwrap();
    assert_eq!(output.mkey_index.get(), 0x1234);
    assert_eq!(mkey_from_index(0x1234, 0), 0x12_3400);
    assert_eq!(mkey_to_index(0x12_3456), 0x1234);
    #[rustfmt::skip]
    let destroy = [
        0x02, 0x02, 0, 0,  0, 0, 0, 0,  0, 0x00, 0x12, 0x34,  0, 0, 0, 0,
    ];
    assert_eq!(ShortIn::new(Opcode::DESTROY_MKEY, 0, 0x1234).as_bytes(), destroy);

    let mut special = [0_u8; 0x20];
    special[0x10..0x14].copy_from_slice(&[0, 0, 0x03, 0]);
    let special = QuerySpecialContextsOut::read_from_bytes(&special).unwrap();
    assert_eq!(special.null_mkey.get(), 0x300);
}

#[test]
fn a_list_of_keys() {
    #[rustfmt::skip]
    let klm = Klm::read_from_bytes(&[
        0x40, 0x00, 0x00, 0x00,  0x00, 0x12, 0x34, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x10, 0x00,
    ]).unwrap();
    assert_eq!(klm.byte_count.get(), 1 << 30);
    assert_eq!(klm.mkey.get(), 0x12_3400);
    assert_eq!(klm.address.get(), 0x1000);
}

#[test]
fn a_umem_is_asked_for() {
    let mut bytes = [0_u8; 0x38];
    bytes[..2].copy_from_slice(&[0x0a, 0x08]);
    bytes[0x23] = 0;
    bytes[0x24..0x28].copy_from_slice(&[0, 0, 0x02, 0x00]);
    bytes[0x28..0x30].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 1]);
    bytes[0x30..0x38].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0x10, 0x03]);
    let (input, list) = CreateUmemIn::read_from_prefix(&bytes).unwrap();
    assert_eq!(input.header.opcode.get(), Opcode::CREATE_UMEM.0);
    assert_eq!(input.log_page_size.get(), 0);
    assert_eq!(input.page_offset.get(), 0x200);
    assert_eq!(input.num_of_mtt.get(), 1);
    let page = Mtt::read_from_bytes(list).unwrap().0.get();
    assert_eq!(page, 0x1_0000_1000 | Mtt::READ | Mtt::WRITE);
}

#[test]
fn a_table_of_two_queues_is_changed() {
    let mut bytes = [0_u8; 0x118];
    bytes[..2].copy_from_slice(&[0x09, 0x17]);
    bytes[0x09..0x0c].copy_from_slice(&[0, 0, 7]);
    bytes[0x17] = 1;
    bytes[0x34] = 1;
    bytes[0x36..0x38].copy_from_slice(&[0, 16]);
    bytes[0x3a..0x3c].copy_from_slice(&[0, 2]);
    bytes[0x110..].copy_from_slice(&[0, 0, 0, 0x21, 0, 0, 0, 0x23]);
    let (input, list) = RqtIn::read_from_prefix(&bytes).unwrap();
    assert_eq!(input.header.opcode.get(), Opcode::MODIFY_RQT.0);
    assert_eq!(input.rqtn.get(), 7);
    assert_eq!(input.modify_bitmask.get(), 1);
    assert_eq!(input.context.list_q_type, 1);
    assert_eq!(input.context.max_size.get(), 16);
    assert_eq!(input.context.actual_size.get(), 2);
    assert_eq!(list.len(), 8);
}

#[test]
fn general_capabilities_are_found_at_their_bits() {
    let mut bytes = [0_u8; 0x1010];
    let bit = |bytes: &mut [u8; 0x1010], number: usize| {
        bytes[0x10 + number / 8] |= 0x80 >> (number % 8);
    };
    // vhca_id 0x30..0x40, log_max_mkey 0xea..0xf0, null_mkey 0x119, log_max_klm_list_size
    // 0x11a..0x120, umem_uid_0 0x252, general_obj_types 0x400..0x440, log_max_umem 0x46b..0x470.
    bit(&mut bytes, 0x3f);
    bit(&mut bytes, 0xeb);
    bit(&mut bytes, 0x119);
    bit(&mut bytes, 0x11b);
    bit(&mut bytes, 0x252);
    bit(&mut bytes, 0x43f - 13);
    bit(&mut bytes, 0x43f - 28);
    bit(&mut bytes, 0x46b);
    let (output, _) = GeneralCapabilitiesOut::read_from_prefix(&bytes).unwrap();
    let capabilities = output.capabilities;
    assert_eq!(capabilities.vhca_id.get(), 1);
    assert_eq!(capabilities.log_max_mkey & 0x3f, 16);
    assert_ne!(capabilities.null_mkey_log_max_klm_list & GeneralCapabilities::NULL_MKEY, 0);
    assert_eq!(capabilities.log_max_klm_list(), 16);
    assert_eq!(capabilities.umem_uid_0, GeneralCapabilities::UMEM_UID_0);
    assert!(capabilities.has_object_type(object_type::VIRTIO_NET_Q));
    assert!(capabilities.has_object_type(object_type::VIRTIO_Q_COUNTERS));
    assert!(!capabilities.has_object_type(0x0e));
    assert_eq!(capabilities.log_max_umem & 0x1f, 16);
}

#[test]
fn capabilities_of_virtqueues_are_found_at_their_bits() {
    assert_eq!(op_mod_current(kind::VDPA_EMULATION), 0x27);
    let mut bytes = [0_u8; 0x110];
    let bit = |bytes: &mut [u8; 0x110], number: usize| {
        bytes[0x10 + number / 8] |= 0x80 >> (number % 8);
    };
    // eth_frame_offload_type 1, virtio_version_1_0 2, device_features_bits_mask 3..0x10, event_mode
    // 0x10..0x18, virtio_queue_type 0x18..0x20, log_doorbell_stride 0x33..0x38,
    // log_doorbell_bar_size 0x3b..0x40, doorbell_bar_offset 0x40..0x80, max_num_virtio_queues
    // 0x88..0xa0, desc_group_mkey_supported 0xd3, freeze_to_rdy_supported 0xd4, umem_1_buffer_param_a
    // 0x100..0x120 and so on.
    bit(&mut bytes, 1);
    bit(&mut bytes, 2);
    bit(&mut bytes, 0x0f - 10);
    bit(&mut bytes, 0x17 - 2);
    bit(&mut bytes, 0x1f);
    bit(&mut bytes, 0x35);
    bit(&mut bytes, 0x3c);
    bit(&mut bytes, 0x7f - 20);
    bit(&mut bytes, 0x9f - 6);
    bit(&mut bytes, 0xd3);
    bit(&mut bytes, 0xd4);
    bit(&mut bytes, 0x11f - 4);
    bit(&mut bytes, 0x13f - 12);
    let (output, _) = VirtioCapabilitiesOut::read_from_prefix(&bytes).unwrap();
    let capabilities = output.capabilities;
    let offloads = VirtioCapabilities::ETH_FRAME | VirtioCapabilities::VIRTIO_1_0;
    assert_eq!(capabilities.offloads_features.get() & !0x1fff, offloads);
    assert_eq!(capabilities.features(), 1 << device_feature::CSUM);
    assert_eq!(capabilities.event_modes, 1 << virtq::event_mode::MSIX);
    assert!(!capabilities.has_event_mode(virtq::event_mode::QP));
    assert_eq!(capabilities.queue_types, VirtioCapabilities::SPLIT);
    // In units of 4 KiB, as `mlx5_ib_init_var_table` of Linux' infiniband/hw/mlx5/main.c counts.
    assert_eq!(capabilities.doorbell_bytes(), 4096 << 8);
    assert_eq!(capabilities.doorbell_bar_offset.get(), 1 << 20);
    assert_eq!(capabilities.max_num_virtio_queues.get(), 64);
    let both = VirtioCapabilities::DESC_GROUP_MKEY | VirtioCapabilities::FREEZE_TO_RDY;
    assert_eq!(capabilities.suspend_abilities, both);
    assert_eq!(capabilities.umem_1.bytes_for(256), 16 * 256 + 4096);
}
