//! How commands are delivered: everything that can be wrong with an entry or its mailboxes has its
//! delivery status, and bring-up has its order.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use martlet_device_io::{DmaBlock, Waiter};
use martlet_mlx5_abi::capability::{
    GeneralCapabilitiesOut, VirtioCapabilities, VirtioCapabilitiesOut, kind, op_mod_current,
};
use martlet_mlx5_abi::command::{
    CommandEntry, MAILBOX_BYTES, MAILBOX_CONTROL_OFFSET, signature_for,
};
use martlet_mlx5_abi::event::EventType;
use martlet_mlx5_abi::init_segment::{
    CMDIF_REV_FW_SUB, CMDQ_ADDR_LOW, CommandQueueShape, FW_REV, INITIALIZING, INITIALIZING_BIT,
    nic_interface,
};
use martlet_mlx5_abi::memory::QuerySpecialContextsOut;
use martlet_mlx5_abi::message::{InHeader, ShortIn, object_type};
use martlet_mlx5_abi::setup::{
    MANAGE_PAGES_TAKE, ManagePagesOut, PagesIn, QUERY_PAGES_BOOT, QueryNicVportContextOut,
    QueryPagesOut, QueryVportStateOut, VportIn,
};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U32, U64};
use martlet_mlx5_model::ModelConfig;
use std::time::Duration;
use zerocopy::IntoBytes;

fn pd() -> Vec<u8> {
    ShortIn::new(Opcode::ALLOC_PD, 0, 0).as_bytes().to_vec()
}

#[test]
fn a_bad_entry_has_its_delivery_status() {
    type Spoil = fn(&mut CommandEntry);
    let cases: [(Spoil, DeliveryStatus); 8] = [
        (|entry| entry.kind = 6, DeliveryStatus::DESCRIPTOR_TYPE),
        (|entry| entry.signature ^= 1, DeliveryStatus::SIGNATURE),
        (|entry| entry.reserved0[1] = 1, DeliveryStatus::RESERVED),
        (|entry| entry.token = 0, DeliveryStatus::TOKEN),
        (|entry| entry.in_length = U32::new(8), DeliveryStatus::IN_LENGTH),
        (|entry| entry.in_length = U32::new(u32::MAX), DeliveryStatus::IN_LENGTH),
        (|entry| entry.out_length = U32::new(15), DeliveryStatus::OUT_LENGTH),
        (|entry| entry.out_length = U32::new(1 << 30), DeliveryStatus::OUT_LENGTH),
    ];
    let mut host = Host::new(ModelConfig::default());
    for (spoil, expected) in cases {
        let resign = expected != DeliveryStatus::SIGNATURE;
        let reply = host.run_spoiled(&pd(), 16, |entry, _| {
            spoil(entry);
            if resign {
                entry.sign();
            }
        });
        assert_eq!(reply.delivery, expected);
    }
    host.run(&pd(), 16).ok();
}

#[test]
fn bad_mailboxes_have_their_delivery_status() {
    fn control(boxes: &[DmaBlock], number: usize, offset: usize, bytes: &[u8]) {
        boxes[number].write(MAILBOX_CONTROL_OFFSET + offset, bytes);
    }
    type Spoil = fn(&mut CommandEntry, &[DmaBlock]);
    let cases: [(Spoil, DeliveryStatus); 7] = [
        (|_, boxes| control(boxes, 1, 13, &[0]), DeliveryStatus::TOKEN),
        (|_, boxes| control(boxes, 1, 8, &2_u32.to_be_bytes()), DeliveryStatus::BLOCK_NUMBER),
        (
            |_, boxes| control(boxes, 0, 0, &0x1100_u64.to_be_bytes()),
            DeliveryStatus::IN_POINTER_ALIGN,
        ),
        (|_, boxes| control(boxes, 0, 0, &0_u64.to_be_bytes()), DeliveryStatus::FIRMWARE),
        (
            |entry, _| entry.in_pointer = U64::new(entry.in_pointer.get() + 16),
            DeliveryStatus::IN_POINTER_ALIGN,
        ),
        (
            |entry, _| entry.out_pointer = U64::new(entry.out_pointer.get() + 16),
            DeliveryStatus::OUT_POINTER_ALIGN,
        ),
        (|entry, _| entry.out_pointer = U64::new(0), DeliveryStatus::FIRMWARE),
    ];
    let mut host = Host::new(ModelConfig::default());
    let mut input = InHeader::new(Opcode::MANAGE_PAGES, 0).as_bytes().to_vec();
    input.resize(1200, 0);
    host.run(&input, 600).ok();
    for (spoil, expected) in cases {
        let reply = host.run_spoiled(&input, 600, |entry, boxes| {
            spoil(entry, boxes);
            entry.sign();
        });
        assert_eq!(reply.delivery, expected);
    }
    let stats = host.model.stats();
    assert_eq!(stats.commands_failed, 7);
}

#[test]
fn bring_up_has_an_order() {
    let config = ModelConfig { boot_time: Duration::from_millis(5), ..ModelConfig::default() };
    let mut host = Host::cold(config);
    let read = |host: &Host, at| u32::from_be(host.registers.read32(at));
    assert_eq!(read(&host, INITIALIZING) & INITIALIZING_BIT, INITIALIZING_BIT);
    host.write_queue_address();
    let early = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&early]);
    assert!(!host.wait(&early), "firmware that starts takes no commands");
    assert_eq!(read(&host, INITIALIZING), 0);
    assert_eq!(read(&host, CMDIF_REV_FW_SUB) >> 16, 5);
    assert_eq!(read(&host, FW_REV) & 0xffff, 22);
    let shape = CommandQueueShape::from_register(read(&host, CMDQ_ADDR_LOW));
    assert_eq!((shape.log_entries, shape.log_stride), (5, 6));

    let refused = CommandStatus::BAD_SYSTEM_STATE;
    assert_eq!(host.init().status(), refused);
    assert_eq!(host.set_capabilities().status(), refused);
    host.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
    assert_eq!(host.init().status(), refused, "capabilities were not set");
    host.set_capabilities().ok();
    assert_eq!(host.init().status(), refused, "pages are missing");
    assert_eq!(host.run(&pd(), 16).status(), refused);
    let query = PagesIn::new(Opcode::QUERY_PAGES, QUERY_PAGES_BOOT, 0, 0);
    let wanted: QueryPagesOut = host.run(query.as_bytes(), 16).parse();
    assert_eq!(wanted.pages.get(), 16);
    host.give_pages(80).ok();
    assert_eq!(host.model.stats().firmware_pages, 80);
    let short = host.short(Opcode::INIT_HCA, 0).status();
    assert_eq!(short, CommandStatus::BAD_INPUT_LENGTH, "32 bytes it has");
    host.init().ok();
    host.run(&pd(), 16).ok();
    host.short(Opcode::TEARDOWN_HCA, 0).ok();
    let take = PagesIn::new(Opcode::MANAGE_PAGES, MANAGE_PAGES_TAKE, 0, 100);
    let reply = host.run(take.as_bytes(), 16 + 8 * 50);
    let taken: ManagePagesOut = reply.parse();
    assert_eq!(taken.entries.get(), 50, "as many as there is room for");
    assert_eq!(host.model.stats().firmware_pages, 30);
    host.short(Opcode::DISABLE_HCA, 0).ok();
}

#[test]
fn capabilities_say_what_the_device_can() {
    for resumable in [false, true] {
        let mut host = Host::new(ModelConfig { resumable, queues: 70, ..ModelConfig::default() });
        let query = |kind| InHeader::new(Opcode::QUERY_HCA_CAP, op_mod_current(kind));
        let mut input = query(kind::VDPA_EMULATION).as_bytes().to_vec();
        input.resize(16, 0);
        let out: VirtioCapabilitiesOut = host.run(&input, 0x1010).parse();
        let caps = out.capabilities;
        let can_resume = caps.suspend_abilities & VirtioCapabilities::FREEZE_TO_RDY != 0;
        assert_eq!(can_resume, resumable);
        assert_eq!(caps.max_num_virtio_queues.get(), 70);
        assert_eq!(caps.doorbell_bytes(), 4096);
        assert_eq!(host.run(&input, 16).status(), CommandStatus::BAD_OUTPUT_LENGTH);
        input[..8].copy_from_slice(query(kind::GENERAL).as_bytes());
        let out: GeneralCapabilitiesOut = host.run(&input, 0x1010).parse();
        assert!(out.capabilities.has_object_type(object_type::VIRTIO_NET_Q));
        let special: QuerySpecialContextsOut =
            host.run(ShortIn::new(Opcode::QUERY_SPECIAL_CONTEXTS, 0, 0).as_bytes(), 32).parse();
        assert_ne!(special.null_mkey.get(), 0);
        let vport: QueryNicVportContextOut =
            host.run(VportIn::own(Opcode::QUERY_NIC_VPORT_CONTEXT).as_bytes(), 0x110).parse();
        assert_eq!(vport.mtu.get(), 1522, "with what is around a payload");
    }
}

#[test]
fn the_link_tells_of_itself() {
    let mut host = Host::new(ModelConfig::default());
    let state = |host: &mut Host| -> bool {
        let query = VportIn::own(Opcode::QUERY_VPORT_STATE);
        let out: QueryVportStateOut = host.run(query.as_bytes(), 16).parse();
        out.is_up()
    };
    assert!(state(&mut host));
    host.model.set_link(false);
    host.model.set_link(false);
    host.seat.wait(None);
    let events = host.events();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].kind, events[0].sub_type), (EventType::PORT_CHANGE.0, 1));
    assert!(!state(&mut host));
    host.model.set_link(true);
    assert_eq!(host.events()[0].sub_type, 4);
    assert!(state(&mut host));
}

#[test]
fn a_full_event_queue_loses_events_and_nothing_else() {
    let mut host = Host::new(ModelConfig::default());
    host.events();
    for _ in 0..40 {
        let up = host.model.link();
        host.model.set_link(!up);
    }
    assert_eq!(host.model.stats().events_lost, 8);
    assert_eq!(host.events().len(), 32);
    host.run(&pd(), 16).ok();
    host.events();
    host.model.set_link(false);
    assert_eq!(host.events().len(), 1, "the second walk through the ring has the other owner bit");
}

#[test]
fn a_device_that_was_pulled_out_reads_all_ones() {
    let mut host = Host::new(ModelConfig::default());
    host.model.remove();
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    assert!(!host.wait(&sent));
    assert_eq!(host.registers.read32(0), u32::MAX);
    assert_eq!(host.registers.read64(0x1010), u64::MAX);
}

/// Who sets the capabilities as they were told has to sign mailboxes.
#[test]
fn mailboxes_need_signatures_if_capabilities_say_so() {
    let mut host = Host::cold(ModelConfig::default());
    host.write_queue_address();
    host.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
    let mut query =
        InHeader::new(Opcode::QUERY_HCA_CAP, op_mod_current(kind::GENERAL)).as_bytes().to_vec();
    query.resize(16, 0);
    let told: GeneralCapabilitiesOut = host.run(&query, 0x1010).parse();
    assert_eq!(told.capabilities.cmdif_checksum >> 6, 1);
    let mut set = InHeader::new(Opcode::SET_HCA_CAP, 0).as_bytes().to_vec();
    set.resize(16, 0);
    set.extend(told.capabilities.as_bytes());
    set.resize(0x1010, 0);
    host.run(&set, 16).ok();
    assert_eq!(host.run(&query, 0x1010).delivery, DeliveryStatus::SIGNATURE, "output mailboxes");
    assert_eq!(host.run(&set, 16).delivery, DeliveryStatus::SIGNATURE, "input mailboxes");
    let reply = host.run_spoiled(&set, 16, |_, boxes| {
        for mailbox in boxes {
            let mut bytes = [0; MAILBOX_BYTES];
            mailbox.read(0, &mut bytes);
            let (control, whole) = (MAILBOX_BYTES - 2, MAILBOX_BYTES - 1);
            bytes[control] = signature_for(&bytes[MAILBOX_CONTROL_OFFSET..control]);
            bytes[whole] = signature_for(&bytes[..whole]);
            mailbox.write(0, &bytes);
        }
    });
    assert_eq!((reply.delivery, reply.status()), (DeliveryStatus::OK, CommandStatus::OK));
}

/// A function whose interface is disabled goes on until the field says that it has stopped.
#[test]
fn a_function_takes_its_time_to_stop() {
    let disable_time = Duration::from_millis(20);
    let mut host = Host::new(ModelConfig { disable_time, ..ModelConfig::default() });
    host.direct_key(0x10000, 4096);
    let read = |host: &Host| u32::from_be(host.registers.read32(CMDQ_ADDR_LOW));
    let before = read(&host);
    assert_eq!(nic_interface::from_register(before), nic_interface::FULL);
    let disabled = nic_interface::to_register(before, nic_interface::DISABLED);
    host.registers.write32(CMDQ_ADDR_LOW, disabled.to_be());
    let told = host.seat.now();
    host.seat.wait(Some(told.after(Duration::from_millis(19))));
    assert_eq!((read(&host), host.model.stats().keys), (before, 1));
    host.write_queue_address();
    assert_eq!(host.model.stats().unexpected_commands, 1, "it has not stopped");
    host.seat.wait(Some(told.after(disable_time)));
    let after = read(&host);
    assert_eq!(nic_interface::from_register(after), nic_interface::DISABLED);
    assert_eq!((after & !0xfff, host.model.stats().keys), (before & !0xfff, 0));
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    assert!(!host.wait(&sent), "there is no interface");
    host.write_queue_address();
    host.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
}

#[test]
fn a_driver_may_start_over() {
    let mut host = Host::new(ModelConfig::default());
    host.direct_key(0x10000, 4096);
    host.model.reset();
    assert_eq!(host.model.stats().keys, 0);
    host.write_queue_address();
    host.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
    assert_eq!(host.run(&pd(), 16).status(), CommandStatus::BAD_SYSTEM_STATE);
}
