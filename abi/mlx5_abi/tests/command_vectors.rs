//! Entries, mailboxes and events against bytes typed from the documents.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_mlx5_abi::command::{self, CommandEntry, Mailbox};
use martlet_mlx5_abi::event::{self, CreateEqIn, CreateEqOut, EventEntry, EventType};
use martlet_mlx5_abi::init_segment::{self, CommandQueueShape};
use martlet_mlx5_abi::setup::{PagesIn, QueryPagesOut, QueryVportStateOut};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use zerocopy::FromBytes;

/// A QUERY of virtqueue 0x1234 that is with the device: 16 bytes in, 208 out, one output mailbox
/// at 0x1_0000_2400, token 0x5a. The signature is computed by hand: all other bytes XOR to 0x9a.
#[rustfmt::skip]
const ENTRY: [u8; 64] = [
    0x07, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x10,
    0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
    0x0a, 0x02, 0x00, 0x00,  0x00, 0x00, 0x00, 0x0d,
    0x00, 0x00, 0x12, 0x34,  0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x01,  0x00, 0x00, 0x24, 0x00,
    0x00, 0x00, 0x00, 0xd0,  0x5a, 0x65, 0x00, 0x01,
];

#[test]
fn a_command_entry_reads_as_the_manual_says() {
    let entry = CommandEntry::read_from_bytes(&ENTRY).unwrap();
    assert_eq!(entry.kind, command::ENTRY_TYPE);
    assert_eq!(entry.in_length.get(), 16);
    assert_eq!(entry.in_pointer.get(), 0);
    assert_eq!(entry.in_inline[..2], Opcode::QUERY_GENERAL_OBJECT.0.to_be_bytes());
    assert_eq!(entry.out_pointer.get(), 0x1_0000_2400);
    assert_eq!(entry.out_length.get(), 208);
    assert_eq!(entry.token, 0x5a);
    assert_eq!(ENTRY[command::TOKEN_OFFSET], 0x5a);
    assert_eq!(entry.status_own & command::OWNED_BY_DEVICE, 1);
    assert_eq!(ENTRY[command::STATUS_OWN_OFFSET], 1);
}

#[test]
fn a_signature_makes_the_xor_of_an_entry_all_ones() {
    let mut entry = CommandEntry::read_from_bytes(&ENTRY).unwrap();
    assert_eq!(command::xor8(&ENTRY), 0xff, "the vector's own signature");
    entry.signature = 0x77;
    entry.sign();
    assert_eq!(entry.signature, ENTRY[0x3d]);
}

#[test]
fn the_last_byte_has_owner_and_delivery_status() {
    assert_eq!(command::delivery_status(0x00), DeliveryStatus::OK);
    assert_eq!(command::delivery_status(0x04), DeliveryStatus::TOKEN);
    assert_eq!(command::delivery_status(0x20), DeliveryStatus::DESCRIPTOR_TYPE);
    assert_eq!(command::status_own(DeliveryStatus::IN_LENGTH), 0x0e);
}

#[test]
fn a_mailbox_ends_with_its_control_part() {
    let mut bytes = [0_u8; 576];
    bytes[0x1ff] = 0xee;
    #[rustfmt::skip]
    bytes[0x230..].copy_from_slice(&[
        0x00, 0x00, 0x00, 0x02,  0x00, 0x00, 0x08, 0x00,
        0x00, 0x00, 0x00, 0x07,  0x00, 0x5a, 0x11, 0x22,
    ]);
    let mailbox = Mailbox::read_from_bytes(&bytes).unwrap();
    assert_eq!(mailbox.data[511], 0xee);
    assert_eq!(mailbox.control.next.get(), 0x2_0000_0800);
    assert_eq!(mailbox.control.block_number.get(), 7);
    assert_eq!(mailbox.control.token, 0x5a);
    assert_eq!(mailbox.control.control_signature, 0x11);
    assert_eq!(mailbox.control.signature, 0x22);
}

#[test]
fn messages_take_as_many_mailboxes_as_they_need() {
    for (bytes, mailboxes) in [(0, 0), (16, 0), (17, 1), (208, 1), (528, 1), (529, 2)] {
        assert_eq!(command::mailboxes_for(bytes), mailboxes, "{bytes} bytes");
    }
    // A 1 GiB key of 4 KiB pages: 272 bytes and 262144 addresses of 8.
    assert_eq!(command::mailboxes_for(272 + 262_144 * 8), 4097);
}

#[test]
fn the_command_queue_says_its_shape() {
    // 32 entries of 64 bytes, the usual.
    let shape = CommandQueueShape::from_register(0xabcd_e056);
    assert_eq!(shape, CommandQueueShape { log_entries: 5, log_stride: 6 });
    assert_eq!(shape.to_register(), 0x56);
    assert_eq!(init_segment::COMMAND_DOORBELL, 0x18);
    assert_eq!(init_segment::INITIALIZING, 0x1fc);
}

#[test]
fn an_event_that_commands_are_done() {
    let mut bytes = [0_u8; 64];
    bytes[1] = 0x0a;
    bytes[0x20..0x24].copy_from_slice(&[0x80, 0x00, 0x00, 0x05]);
    bytes[0x3f] = 1;
    let event = EventEntry::read_from_bytes(&bytes).unwrap();
    assert_eq!(EventType(event.kind), EventType::COMMAND);
    assert_eq!(event.data0.get(), 1 << 31 | 1 << 2 | 1);
    // The second walk through a ring of 128.
    assert!(event::is_for_software(event.owner, 128, 7));
    assert!(!event::is_for_software(event.owner, 0, 7));
    assert!(!event::is_for_software(event.owner, 256, 7));
    assert_eq!(event::owner_at(127, 7), 0);
    assert_eq!(event::owner_at(128, 7), 1);
}

#[test]
fn an_event_that_the_firmware_gives_pages_back() {
    let mut bytes = [0_u8; 64];
    bytes[1] = 0x0b;
    bytes[0x20..0x28].copy_from_slice(&[0x00, 0x00, 0x00, 0x03, 0xff, 0xff, 0xff, 0xfe]);
    let event = EventEntry::read_from_bytes(&bytes).unwrap();
    assert_eq!(event.data0.get() & 0xffff, 3);
    assert_eq!(event.data1.get().cast_signed(), -2);
}

#[test]
fn an_event_queue_is_asked_for() {
    let mut bytes = [0_u8; 0x110];
    bytes[..2].copy_from_slice(&[0x03, 0x01]);
    bytes[0x1c] = 7; // 128 entries
    bytes[0x1d..0x20].copy_from_slice(&[0x00, 0x01, 0x02]);
    bytes[0x26..0x28].copy_from_slice(&[0x00, 0x05]);
    bytes[0x28] = 1; // pages of 8 KiB
    // Bits 0x0a and 0x0b: commands and page requests.
    bytes[0x58..0x60].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x0c, 0x00]);
    let input = CreateEqIn::read_from_bytes(&bytes).unwrap();
    assert_eq!(input.header.opcode.get(), Opcode::CREATE_EQ.0);
    assert_eq!(input.context.log_size, 7);
    assert_eq!(input.context.uar_page.get(), 0x102);
    assert_eq!(input.context.interrupt.get(), 5);
    assert_eq!(input.context.log_page_size, 1);
    let mask = EventType::COMMAND.mask() | EventType::PAGE_REQUEST.mask();
    assert_eq!(input.event_bitmask[0].get(), mask);

    #[rustfmt::skip]
    let output = CreateEqOut::read_from_bytes(&[
        0, 0, 0, 0,  0, 0, 0, 0,  0, 0, 0, 0x2a,  0, 0, 0, 0,
    ]).unwrap();
    assert_eq!(output.eqn, 0x2a);
    assert_eq!(init_segment::eq_doorbell(0x2a, 0x0100_0003), 0x2a00_0003);
}

#[test]
fn pages_are_asked_for_and_given() {
    #[rustfmt::skip]
    let output = QueryPagesOut::read_from_bytes(&[
        0, 0, 0, 0,  0, 0, 0, 0,  0, 0, 0, 4,  0, 0, 0x10, 0x01,
    ]).unwrap();
    assert_eq!(output.function_id.get(), 4);
    assert_eq!(output.pages.get(), 0x1001);
    #[rustfmt::skip]
    let input = PagesIn::read_from_bytes(&[
        0x01, 0x08, 0, 0,  0, 0, 0, 1,  0, 0, 0, 4,  0, 0, 0, 0x40,
    ]).unwrap();
    assert_eq!(input, PagesIn::new(Opcode::MANAGE_PAGES, 1, 4, 64));
}

#[test]
fn a_vport_is_up() {
    #[rustfmt::skip]
    let mut bytes = [
        0, 0, 0, 0,  0, 0, 0, 0,  0, 0, 0, 0,  0, 0, 0, 0x11,
    ];
    assert!(QueryVportStateOut::read_from_bytes(&bytes).unwrap().is_up());
    bytes[0x0f] = 0x10;
    assert!(!QueryVportStateOut::read_from_bytes(&bytes).unwrap().is_up());
}

#[test]
fn numbers_have_names_and_unknown_ones_pass_through() {
    assert_eq!(Opcode(0x200).to_string(), "CREATE_MKEY");
    assert_eq!(Opcode(0xabc).to_string(), "Opcode(0xabc)");
    assert_eq!(CommandStatus(0x0f), CommandStatus::NO_RESOURCES);
    assert_eq!(DeliveryStatus(0x77).name(), None);
    let throttled: Vec<Opcode> =
        Opcode::KNOWN.iter().copied().filter(|opcode| opcode.is_throttled()).collect();
    assert_eq!(throttled, [0xa00, 0xa01, 0xa02, 0xa03].map(Opcode), "general objects");
}

/// `cmdq_addr_l_sz` as Linux' `mlx5_get_nic_state` and `mlx5_set_nic_state` have it.
#[test]
fn the_interface_is_bits_10_to_8() {
    use martlet_mlx5_abi::init_segment::nic_interface::{
        DISABLED, FULL, SW_RESET, from_register, to_register,
    };
    assert_eq!(
        [0x1234_5056, 0x1234_5156, 0x1234_5756, 0x1234_5856].map(from_register),
        [FULL, DISABLED, SW_RESET, FULL]
    );
    assert_eq!(to_register(0x1234_5756, DISABLED), 0x1234_5100);
    assert_eq!(to_register(0x1234_5056, SW_RESET), 0x1234_5700);
}
