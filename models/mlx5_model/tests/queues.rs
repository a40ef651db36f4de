//! Virtqueue objects: states, fields, and what refers to them.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{create_input, modify_input, state_input, table_input};
use host::ring::Guest;
use martlet_mlx5_abi::message::{GeneralObjectIn, GeneralObjectOut, ShortOut, object_type};
use martlet_mlx5_abi::virtq::{QueryCountersOut, VirtqState, modify};
use martlet_mlx5_abi::{CommandStatus, Opcode, U16, U32, U64};
use martlet_mlx5_model::ModelConfig;
use std::fmt::Write;
use zerocopy::IntoBytes;

/// Brings a queue into a state, as far as there is a way.
fn bring_to(host: &mut Host, id: u32, state: VirtqState) {
    if state != VirtqState::INIT {
        host.set_state(id, VirtqState::RDY).ok();
    }
    if state == VirtqState::SUSPEND {
        host.set_state(id, VirtqState::SUSPEND).ok();
    }
}

#[test]
fn states_change_by_a_table() {
    let mut table = String::new();
    for resumable in [true, false] {
        for from in [VirtqState::INIT, VirtqState::RDY, VirtqState::SUSPEND] {
            for to in VirtqState::KNOWN {
                let mut host = Host::new(ModelConfig { resumable, ..ModelConfig::default() });
                let guest = Guest::new(&mut host, 1, 16, 0);
                let id = guest.pairs[0].rx_id;
                bring_to(&mut host, id, from);
                let status = host.set_state(id, *to).status();
                let now = host.query_queue(id).state();
                assert_eq!(now, if status == CommandStatus::OK { *to } else { from });
                if status == CommandStatus::OK {
                    writeln!(table, "resumable {resumable}: {from} to {to}").unwrap();
                }
            }
        }
    }
    let expected = "resumable true: INIT to RDY\n\
                    resumable true: RDY to SUSPEND\n\
                    resumable true: SUSPEND to RDY\n\
                    resumable false: INIT to RDY\n\
                    resumable false: RDY to SUSPEND\n";
    assert_eq!(table, expected);
}

#[test]
fn fields_change_while_no_frame_passes_but_for_the_dirty_log() {
    let fields = [
        modify::ADDRESSES,
        modify::AVAIL_INDEX,
        modify::USED_INDEX,
        modify::VIRTIO_Q_MKEY,
        modify::QUEUE_FEATURES,
        modify::DIRTY_BITMAP_PARAMS,
        modify::DIRTY_BITMAP_DUMP_ENABLE,
    ];
    let log = modify::DIRTY_BITMAP_PARAMS | modify::DIRTY_BITMAP_DUMP_ENABLE;
    for state in [VirtqState::INIT, VirtqState::RDY, VirtqState::SUSPEND] {
        let mut host = Host::new(ModelConfig::default());
        let guest = Guest::new(&mut host, 1, 16, 0);
        let id = guest.pairs[0].rx_id;
        bring_to(&mut host, id, state);
        for field in fields {
            let good = state != VirtqState::RDY || field & log != 0;
            let expected = if good { CommandStatus::OK } else { CommandStatus::BAD_RESOURCE_STATE };
            assert_eq!(host.modify(id, field, |_| ()).status(), expected, "{state} {field:#x}");
        }
        let unknown = host.modify(id, 1 << 20, |_| ()).status();
        assert_eq!(unknown, CommandStatus::BAD_PARAMETER);
    }
}

#[test]
fn init_to_ready_leaves_fields_alone_and_resume_takes_them() {
    let mut host = Host::new(ModelConfig::default());
    let guest = Guest::new(&mut host, 1, 16, 0);
    let id = guest.pairs[0].rx_id;
    let fields = modify::STATE | modify::AVAIL_INDEX | modify::USED_INDEX;
    let to = |index: u16| {
        move |object: &mut martlet_mlx5_abi::virtq::VirtioNetQueue| {
            object.set_state(VirtqState::RDY);
            object.hw_available_index = U16::new(index);
            object.hw_used_index = U16::new(index);
        }
    };
    host.modify(id, fields, to(7)).ok();
    assert_eq!(host.query_queue(id).hw_used_index.get(), 0);
    host.set_state(id, VirtqState::SUSPEND).ok();
    host.modify(id, fields, to(9)).ok();
    let object = host.query_queue(id);
    assert_eq!((object.state(), object.hw_used_index.get()), (VirtqState::RDY, 9));
    assert_eq!(object.hw_available_index.get(), 9);
}

#[test]
fn a_queue_is_checked_when_it_is_made() {
    let mut host = Host::new(ModelConfig::default());
    let guest = Guest::new(&mut host, 1, 16, 0);
    let spec = guest.pairs[0].rx.spec(guest.key, 0);
    let spec = host::objects::QueueSpec { index: 2, ..spec };
    type Spoil = fn(&mut martlet_mlx5_abi::virtq::VirtioNetQueue);
    let cases: [(Spoil, CommandStatus); 10] = [
        (|it| it.virtio_q.queue_size = U16::new(24), CommandStatus::BAD_PARAMETER),
        (|it| it.virtio_q.queue_size = U16::new(4096), CommandStatus::BAD_PARAMETER),
        (|it| it.virtio_q.queue_index = U16::new(64), CommandStatus::BAD_INDEX),
        (|it| it.virtio_q.queue_index = U16::new(1), CommandStatus::BAD_INDEX),
        (|it| it.virtio_q.kind = 1, CommandStatus::BAD_PARAMETER),
        (|it| it.virtio_q.event_mode = 1, CommandStatus::BAD_PARAMETER),
        (|it| it.virtio_q.mkey = U32::new(0x4200), CommandStatus::BAD_RESOURCE),
        (|it| it.virtio_q.counter_set_id = U32::new(99), CommandStatus::BAD_RESOURCE),
        (|it| it.virtio_q.umem[1].bytes = U32::new(16), CommandStatus::BAD_PARAMETER),
        (|it| it.set_state(VirtqState::RDY), CommandStatus::BAD_PARAMETER),
    ];
    for (spoil, expected) in cases {
        let mut object = host.queue_object(&spec);
        spoil(&mut object);
        assert_eq!(host.run(&create_input(object), 16).status(), expected);
    }
    let id = host.create_queue(&spec);
    host.destroy_queue(id).ok();
    assert_eq!(host.destroy_queue(id).status(), CommandStatus::BAD_RESOURCE);
    assert_eq!(host.set_state(id, VirtqState::RDY).status(), CommandStatus::BAD_RESOURCE);
}

#[test]
fn tables_and_counters_hold_on_to_their_queues() {
    let mut host = Host::new(ModelConfig::default());
    let guest = Guest::new(&mut host, 2, 16, 0);
    let (first, second) = (guest.pairs[0].rx_id, guest.pairs[1].rx_id);
    let create = |queues: &[u32]| table_input(Opcode::CREATE_RQT, 0, 4, queues);
    let wrong = host.run(&create(&[first, guest.pairs[0].tx_id]), 16).status();
    assert_eq!(wrong, CommandStatus::BAD_RESOURCE);
    assert_eq!(host.run(&create(&[first; 3]), 16).status(), CommandStatus::BAD_PARAMETER);
    let table: ShortOut = host.run(&create(&[first, second]), 16).parse();
    assert_eq!(host.destroy_queue(second).status(), CommandStatus::RESOURCE_BUSY);
    let modify = table_input(Opcode::MODIFY_RQT, table.object.get(), 4, &[first]);
    host.run(&modify, 16).ok();
    host.destroy_queue(second).ok();
    host.short(Opcode::DESTROY_RQT, table.object.get()).ok();

    let general = |opcode, id| {
        let header = GeneralObjectIn::new(opcode, object_type::VIRTIO_Q_COUNTERS, id);
        let mut input = header.as_bytes().to_vec();
        input.resize(144, 0);
        input
    };
    let made: GeneralObjectOut = host.run(&general(Opcode::CREATE_GENERAL_OBJECT, 0), 16).parse();
    let counters = made.obj_id.get();
    let mut spec = guest.pairs[1].rx.spec(guest.key, 0);
    (spec.index, spec.counters) = (4, counters);
    let queue = host.create_queue(&spec);
    let destroy = general(Opcode::DESTROY_GENERAL_OBJECT, counters);
    assert_eq!(host.run(&destroy, 16).status(), CommandStatus::RESOURCE_BUSY);
    host.destroy_queue(queue).ok();
    let query = general(Opcode::QUERY_GENERAL_OBJECT, counters);
    let out: QueryCountersOut = host.run(&query, 144).parse();
    assert_eq!(out.object.received_desc, U64::new(0));
    host.run(&destroy, 16).ok();
}

#[test]
fn an_input_that_is_cut_short_is_refused() {
    let mut host = Host::new(ModelConfig::default());
    let guest = Guest::new(&mut host, 1, 16, 0);
    let id = guest.pairs[0].rx_id;
    for input in [state_input(id, VirtqState::RDY), modify_input(id, modify::ADDRESSES, |_| ())] {
        let reply = host.run(&input[..100], 16);
        assert_eq!(reply.status(), CommandStatus::BAD_INPUT_LENGTH);
    }
}
