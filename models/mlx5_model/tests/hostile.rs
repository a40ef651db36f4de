//! Drivers and guests that write anything: the device answers or does not, and goes on.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::ring::Guest;
use martlet_mlx5_abi::message::{InHeader, ShortIn};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U16};
use martlet_mlx5_model::{ModelConfig, Signatures};
use proptest::prelude::*;
use zerocopy::IntoBytes;

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
        let config = ModelConfig { signatures: Signatures::Ignored, ..ModelConfig::default() };
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
