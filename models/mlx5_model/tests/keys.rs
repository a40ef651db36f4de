//! Memory keys, and what a queue can reach through them.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{key_input, page_list, piece_list};
use host::ring::{Guest, PAIR_BYTES};
use martlet_mlx5_abi::memory::{CreateMkeyIn, QuerySpecialContextsOut, access_mode};
use martlet_mlx5_abi::message::ShortIn;
use martlet_mlx5_abi::virtq::VirtqState;
use martlet_mlx5_abi::{CommandStatus, Opcode, U32};
use martlet_mlx5_model::{ModelConfig, QueueState};
use zerocopy::{FromBytes, IntoBytes};

/// Sends a frame, and tells how the transmit queue fared.
fn send_one(host: &mut Host, guest: &mut Guest) -> QueueState {
    guest.refill();
    guest.send();
    guest.kick(host);
    host.model.stats().queues[1].state
}

#[test]
fn a_key_that_is_gone_ends_its_queue() {
    for indirect in [true, false] {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 1, 16, 0);
        guest.start(&mut host);
        assert_eq!(send_one(&mut host, &mut guest), QueueState::Ready);
        let key = if indirect { guest.key } else { guest.direct };
        host.destroy_key(key).ok();
        assert_eq!(host.destroy_key(key).status(), CommandStatus::BAD_RESOURCE);
        assert_eq!(send_one(&mut host, &mut guest), QueueState::Error);
        let stats = host.model.stats();
        assert_eq!((stats.frames_sent, stats.access_errors), (1, 1));
        let id = guest.pairs[0].tx_id;
        assert_eq!(host.query_queue(id).state(), VirtqState::ERR);
        assert_eq!(host.query_queue(id).virtio_q.error_type, 1);
        for state in VirtqState::KNOWN {
            assert_eq!(host.set_state(id, *state).status(), CommandStatus::BAD_RESOURCE_STATE);
        }
        host.destroy_queue(id).ok();
    }
}

#[test]
fn an_address_that_is_not_covered_ends_its_queue() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    let ring = &mut guest.pairs[0].tx;
    ring.describe(&guest.memory, 0, PAIR_BYTES - 10, 100, 0, 0);
    ring.offer(&guest.memory, 0);
    guest.refill();
    guest.kick(&host);
    let stats = host.model.stats();
    assert_eq!((stats.frames_sent, stats.access_errors), (0, 1));
    assert_eq!(stats.queues[1].state, QueueState::Error);
    assert_eq!(stats.queues[0].state, QueueState::Ready);
}

#[test]
fn rights_count() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let mut input =
        key_input(host.domain, access_mode::MTT, PAIR_BYTES, 20, &page_list([guest.memory.at().0]));
    let (create, _) = CreateMkeyIn::mut_from_prefix(&mut input).unwrap();
    create.context.flags = U32::new(0x500);
    let reply = host.run(&input, 16);
    let read_only = u32::from_be_bytes(reply.ok()[8..12].try_into().unwrap()) << 8;
    let id = guest.pairs[0].tx_id;
    let key = host.indirect_key(&[(PAIR_BYTES as u32, read_only)]);
    host.modify(id, 1 << 11, |object| object.virtio_q.mkey = U32::new(key)).ok();
    guest.start(&mut host);
    assert_eq!(send_one(&mut host, &mut guest), QueueState::Error, "the used ring is written");
    assert_eq!(host.model.stats().access_errors, 1);
}

#[test]
fn keys_of_other_domains_are_others() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let ours = std::mem::replace(&mut host.domain, 0);
    let made = host.short(Opcode::ALLOC_PD, 0).ok();
    host.domain = u32::from_be_bytes(made[8..12].try_into().unwrap());
    let direct = host.direct_key(guest.memory.at().0, PAIR_BYTES);
    host.domain = ours;
    let key = host.indirect_key(&[(PAIR_BYTES as u32, direct)]);
    let id = guest.pairs[0].tx_id;
    host.modify(id, 1 << 11, |object| object.virtio_q.mkey = U32::new(key)).ok();
    guest.start(&mut host);
    assert_eq!(send_one(&mut host, &mut guest), QueueState::Error);
    assert_eq!(host.short(Opcode::DEALLOC_PD, ours).status(), CommandStatus::RESOURCE_BUSY);
}

#[test]
fn a_hole_reads_zeros_and_forgets_writes() {
    let mut host = Host::new(ModelConfig::default());
    let special = ShortIn::new(Opcode::QUERY_SPECIAL_CONTEXTS, 0, 0);
    let special: QuerySpecialContextsOut = host.run(special.as_bytes(), 32).parse();
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let pieces = [(PAIR_BYTES as u32, guest.direct), (1 << 30, special.null_mkey.get())];
    let key = host.indirect_key(&pieces);
    for id in guest.ids() {
        host.modify(id, 1 << 11, |object| object.virtio_q.mkey = U32::new(key)).ok();
    }
    guest.start(&mut host);
    guest.refill();
    let ring = &mut guest.pairs[0].tx;
    ring.describe(&guest.memory, 0, PAIR_BYTES + 5, 60, 0, 0);
    ring.offer(&guest.memory, 0);
    guest.kick(&host);
    let frame = guest.pairs[0].rx.take_frame(&guest.memory).unwrap();
    assert_eq!(frame, [0; 48]);
    let stats = host.model.stats();
    assert_eq!((stats.null_accesses, stats.access_errors), (1, 0));
}

#[test]
fn scattered_pages_of_any_size_are_found() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 64, 0);
    // The guest's memory again, by another list: its halves exchanged and exchanged back by the
    // indirect key, the second half in single pages.
    let (at, half) = (guest.memory.at().0, PAIR_BYTES / 2);
    let low = host.key(access_mode::MTT, half, 19, &page_list([at]));
    let high = host.direct_key(at + half, half);
    let swapped = host.indirect_key(&[(half as u32, low), (half as u32, high)]);
    for id in guest.ids() {
        host.modify(id, 1 << 11, |object| object.virtio_q.mkey = U32::new(swapped)).ok();
    }
    host.destroy_key(guest.key).ok();
    host.destroy_key(guest.direct).ok();
    guest.start(&mut host);
    for _ in 0..100 {
        guest.refill();
        guest.send();
        guest.kick(&host);
        guest.receive();
    }
    assert_eq!((guest.missing(), host.model.stats().access_errors), (0, 0));
}

#[test]
fn a_key_is_checked_when_it_is_made() {
    let mut host = Host::new(ModelConfig { keys_max: 4, ..ModelConfig::default() });
    let domain = host.domain;
    let pages = page_list([0x10000, 0x11000]);
    let mtt = |bytes, log| key_input(domain, access_mode::MTT, bytes, log, &pages);
    let run = |host: &mut Host, input: &[u8]| host.run(input, 16).status();
    assert_eq!(run(&mut host, &mtt(0x2001, 12)), CommandStatus::BAD_PARAMETER);
    assert_eq!(run(&mut host, &mtt(0, 12)), CommandStatus::BAD_PARAMETER);
    assert_eq!(run(&mut host, &mtt(0x1000, 3)), CommandStatus::BAD_PARAMETER);
    let unpadded = key_input(domain, access_mode::MTT, 0x1000, 12, &pages[..8]);
    assert_eq!(run(&mut host, &unpadded), CommandStatus::BAD_INPUT_LENGTH);
    let foreign = key_input(domain + 1, access_mode::MTT, 0x1000, 12, &pages);
    assert_eq!(run(&mut host, &foreign), CommandStatus::BAD_RESOURCE);
    let short = key_input(domain, access_mode::KLM, 0x2000, 0, &piece_list(&[(0x1000, 1)]));
    assert_eq!(run(&mut host, &short), CommandStatus::BAD_PARAMETER);
    for _ in 0..4 {
        assert_eq!(run(&mut host, &mtt(0x2000, 12)), CommandStatus::OK);
    }
    assert_eq!(run(&mut host, &mtt(0x2000, 12)), CommandStatus::LIMIT);
    assert_eq!(host.model.stats().keys, 4);
}

/// The list of a 1 GiB key in pages of 4 KiB: 4097 mailboxes.
#[test]
fn the_largest_list_is_taken() {
    let mut host = Host::new(ModelConfig::default());
    let pages = (0..262_144_u64).map(|page| (1 << 32) + page * 4096);
    let key = host.key(access_mode::MTT, 1 << 30, 12, &page_list(pages));
    assert_eq!(host.model.stats().keys, 1);
    host.destroy_key(key).ok();
}
