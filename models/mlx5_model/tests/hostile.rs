//! Drivers and guests that write anything: the device answers or does not, and goes on.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{key_input, page_list};
use host::ring::Guest;
use martlet_mlx5_abi::memory::{CreateMkeyIn, access_mode};
use martlet_mlx5_abi::message::{InHeader, ShortIn};
use martlet_mlx5_abi::virtq::modify;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U16, U32, U64};
use martlet_mlx5_model::ModelConfig;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

fn any_opcode() -> impl Strategy<Value = Opcode> {
    prop_oneof![
        8 => proptest::sample::select(Opcode::KNOWN.to_vec()),
        1 => any::<u16>().prop_map(Opcode),
    ]
}

/// A command whose body is anything: mostly small numbers, which are likely to name something.
fn any_command() -> impl Strategy<Value = (Opcode, Vec<u8>, usize)> {
    let byte = prop_oneof![4 => Just(0_u8), 3 => 0_u8..8, 1 => any::<u8>()];
    let body = proptest::collection::vec(byte, 8..700);
    (any_opcode(), body, 16_usize..600).prop_map(|(opcode, body, out_bytes)| {
        let mut header = InHeader::new(opcode, 0);
        header.op_mod = U16::new(u16::from(body[7]));
        let mut input = header.as_bytes().to_vec();
        // The type of general object lies in the header.
        input[6..8].copy_from_slice(&[0, if body[0] & 1 == 0 { 0x0d } else { 0x1c }]);
        input.extend(body);
        (opcode, input, out_bytes)
    })
}

/// Numbers near those where something begins or ends.
fn edge() -> impl Strategy<Value = u64> {
    let base = prop_oneof![Just(0_u64), Just(1 << 32), Just(u64::MAX), any::<u64>()];
    (base, 0_u64..0x3000, any::<bool>()).prop_map(|(base, offset, down)| {
        if down { base.wrapping_sub(offset) } else { base.wrapping_add(offset) }
    })
}

/// Whether the function is still as it was.
fn is_alive(host: &mut Host) {
    let reply = host.run(ShortIn::new(Opcode::ALLOC_PD, 0, 0).as_bytes(), 16);
    assert_eq!(reply.delivery, DeliveryStatus::OK);
    let status = reply.status();
    assert!(status == CommandStatus::OK || status == CommandStatus::BAD_SYSTEM_STATE);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_command_is_answered(commands in proptest::collection::vec(any_command(), 1..40)) {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 2, 16, 0);
        guest.start(&mut host);
        for (_, input, out_bytes) in &commands {
            host.run(input, *out_bytes);
            guest.send();
            guest.kick(&host);
        }
        is_alive(&mut host);
    }

    #[test]
    fn any_entry_is_survived(
        entries in proptest::collection::vec(any::<[u8; 32]>(), 32),
        bells in proptest::collection::vec(any::<u32>(), 1..8),
    ) {
        let config = ModelConfig { check_signatures: false, ..ModelConfig::default() };
        let mut host = Host::new(config);
        for entry in entries {
            host.write(&entry, 16, |it, _| {
                // The second half is the rest of the entry.
                it.as_mut_bytes()[48..].copy_from_slice(&entry[16..]);
                it.kind = 7;
                it.status_own |= 1;
            });
        }
        for bell in bells {
            host.registers.write32(0x18, bell);
            host.stage.turn_all();
        }
    }

    #[test]
    fn any_ring_is_survived(
        places in proptest::collection::vec((0_usize..0x20000, any::<[u8; 8]>()), 1..200),
        size in proptest::sample::select(vec![1_u16, 2, 16, 256]),
    ) {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 1, 16, 0);
        let mut spec = guest.pairs[0].tx.spec(guest.key, 0);
        (spec.index, spec.size) = (3, size);
        let id = host.create_queue(&spec);
        guest.start(&mut host);
        host.set_state(id, martlet_mlx5_abi::virtq::VirtqState::RDY).ok();
        for (at, bytes) in places {
            // The descriptors and rings of the receiver or the sender.
            let at = (at % 0xb000) + (at / 0xb000 % 2) * 0x80000;
            guest.memory.write(at, &bytes);
            guest.kick(&host);
            host.kick(3);
            guest.refill();
        }
        is_alive(&mut host);
    }

    #[test]
    fn any_key_is_survived(
        pages in proptest::collection::vec(edge(), 1..6),
        pieces in proptest::collection::vec((any::<u32>(), edge()), 0..4),
        (start, bytes, log) in (edge(), edge(), 12_u32..64),
        at in edge(),
    ) {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 1, 16, 0);
        let mut input = key_input(host.domain, access_mode::MTT, bytes, log, &page_list(pages));
        let (create, _) = CreateMkeyIn::mut_from_prefix(&mut input).unwrap();
        create.context.start_addr = U64::new(start);
        let made = host.run(&input, 16);
        let mut key = guest.direct;
        if made.status() == CommandStatus::OK {
            key = u32::from_be_bytes(made.ok()[8..12].try_into().unwrap()) << 8;
        }
        let mut list = Vec::new();
        for (length, address) in &pieces {
            list.extend(length.to_be_bytes());
            list.extend(key.to_be_bytes());
            list.extend(address.to_be_bytes());
        }
        let all = pieces.iter().map(|(length, _)| u64::from(*length)).sum();
        let mut input = key_input(host.domain, access_mode::KLM, all, 0, &list);
        let (create, _) = CreateMkeyIn::mut_from_prefix(&mut input).unwrap();
        create.context.start_addr = U64::new(start);
        let made = host.run(&input, 16);
        if made.status() == CommandStatus::OK {
            key = u32::from_be_bytes(made.ok()[8..12].try_into().unwrap()) << 8;
        }
        let own = guest.pairs[0].tx_id;
        let fields = modify::VIRTIO_Q_MKEY | modify::ADDRESSES | modify::DIRTY_BITMAP_PARAMS
            | modify::DIRTY_BITMAP_DUMP_ENABLE;
        host.modify(own, fields, |object| {
            object.virtio_q.mkey = U32::new(key);
            object.virtio_q.desc_addr = U64::new(at & !15);
            object.virtio_q.used_addr = U64::new(at & !15);
            object.virtio_q.available_addr = U64::new(at & !15);
            object.dirty_bitmap_mkey = U32::new(key);
            object.dirty_bitmap_addr = U64::new(at);
            object.dirty_bitmap_size = U32::new(u32::MAX);
            object.set_logging(true);
        }).ok();
        guest.start(&mut host);
        guest.refill();
        guest.kick(&host);
        is_alive(&mut host);
    }

    #[test]
    fn any_register_is_survived(
        writes in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..100),
    ) {
        let host = Host::new(ModelConfig::default());
        for (offset, value) in writes {
            for at in [offset, offset % 0x20_0000, offset % 0x2000, offset % 0x40 * 4] {
                host.registers.write32(at, value as u32);
                host.registers.write64(at, value);
                host.registers.read32(at);
                host.registers.read64(at);
            }
            host.stage.turn_all();
        }
    }
}
