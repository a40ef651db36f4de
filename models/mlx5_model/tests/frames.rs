//! The network card: frames through split rings in guest memory, reached by keys.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{MERGEABLE, table_input};
use host::ring::Guest;
use martlet_device_io::Dma;
use martlet_mlx5_abi::virtq::{VirtqState, modify};
use martlet_mlx5_abi::{Opcode, U32};
use martlet_mlx5_model::{ModelConfig, QueueState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn frames_come_back_in_order_over_the_wrap_of_the_index() {
    for start in [0, 65_400] {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 3, 64, start);
        guest.start(&mut host);
        let mut sent = 0;
        for _ in 0..200 {
            guest.refill();
            sent += guest.send();
            guest.kick(&host);
            guest.receive();
        }
        assert_eq!((sent, guest.missing()), (600, 0));
        let stats = host.model.stats();
        assert_eq!((stats.frames_sent, stats.frames_received), (600, 600));
        assert_eq!((stats.frames_dropped, stats.access_errors, stats.ring_errors), (0, 0, 0));
        assert!(stats.queues.iter().all(|queue| queue.state == QueueState::Ready));
        let object = host.query_queue(guest.pairs[0].tx_id);
        assert_eq!(object.state(), VirtqState::RDY);
        assert_eq!(object.hw_used_index.get(), start.wrapping_add(200));
    }
}

/// Lets frames pass for some rounds.
fn pass(host: &Host, guest: &mut Guest, rounds: u32) {
    for _ in 0..rounds {
        guest.refill();
        guest.send();
        guest.kick(host);
        guest.receive();
    }
}

#[test]
fn a_suspend_loses_and_repeats_nothing() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 4, 32, 65_500);
    guest.start(&mut host);
    for order in [[0, 1], [1, 0]].into_iter().cycle().take(10) {
        pass(&host, &mut guest, 7);
        // Receivers first or senders first, with frames on their way in both cases.
        guest.refill();
        guest.send();
        for half in order {
            for id in guest.ids().into_iter().skip(half).step_by(2) {
                host.set_state(id, VirtqState::SUSPEND).ok();
                guest.send();
                guest.kick(&host);
            }
        }
        for queue in host.model.stats().queues {
            assert_eq!(queue.available, queue.used, "queue {}", queue.index);
            assert_eq!(queue.state, QueueState::Suspended);
        }
        assert!(guest.missing() > 0);
        guest.kick(&host);
        guest.receive();
        assert!(guest.missing() > 0, "a suspended queue hears no kick");
        guest.start(&mut host);
        pass(&host, &mut guest, 1);
        assert_eq!(guest.missing(), 0);
    }
    assert_eq!(host.model.stats().frames_dropped, 0);
}

#[test]
fn another_device_goes_on_where_one_was_suspended() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 2, 32, 0);
    guest.start(&mut host);
    pass(&host, &mut guest, 40);
    guest.send();
    guest.suspend(&mut host);
    let stats = host.model.stats();
    let mut next = Host::on(&host.stage, &host.bus, ModelConfig::default());
    next.bring_up();
    let bytes = 2 * host::ring::PAIR_BYTES;
    let direct = next.direct_key(guest.memory.at().0, bytes);
    let key = next.indirect_key(&[(bytes as u32, direct)]);
    for (pair, queues) in guest.pairs.iter_mut().zip(stats.queues.chunks(2)) {
        let id = |ring: &host::ring::GuestRing, used: u16, next: &mut Host| {
            let spec = host::objects::QueueSpec { start_index: used, ..ring.spec(key, 0) };
            next.create_queue(&spec)
        };
        pair.rx_id = id(&pair.rx, queues[0].used, &mut next);
        pair.tx_id = id(&pair.tx, queues[1].used, &mut next);
    }
    guest.start(&mut next);
    pass(&next, &mut guest, 40);
    assert_eq!(guest.missing(), 0);
    assert_eq!(host.model.stats().frames_sent, stats.frames_sent);
}

#[test]
fn a_frame_waits_for_a_buffer() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    for _ in 0..5 {
        guest.send();
    }
    host.kick(1);
    let stats = host.model.stats();
    assert_eq!((stats.frames_sent, stats.frames_dropped), (0, 0));
    assert_eq!(stats.queues[1].available, 0, "not taken, not completed");
    assert!(!guest.pairs[0].rx.is_quiet(&guest.memory), "the device wants to hear of buffers");
    guest.pairs[0].rx.offer_buffer(&guest.memory);
    host.kick(0);
    assert_eq!((guest.receive(), guest.missing()), (1, 4));
    guest.refill();
    host.kick(0);
    assert_eq!((guest.receive(), guest.missing()), (4, 0));
}

#[test]
fn the_link_holds_frames_back() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    guest.refill();
    host.model.set_link(false);
    guest.send();
    guest.kick(&host);
    assert_eq!(guest.receive(), 0);
    host.model.set_link(true);
    host.stage.turn_all();
    assert_eq!((guest.receive(), guest.missing()), (1, 0));
}

#[test]
fn large_frames_fill_several_buffers_where_that_was_agreed() {
    for features in [0, MERGEABLE] {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::with_features(&mut host, 1, 16, 0, features);
        guest.start(&mut host);
        guest.refill();
        let payload: Vec<u8> = (0..5000_u32).map(|byte| byte as u8).collect();
        let (memory, pair) = (&guest.memory, &mut guest.pairs[0]);
        // Its buffers lie over those of three other descriptors, which are not in use.
        pair.tx.offer_frame(memory, &payload);
        guest.kick(&host);
        let stats = host.model.stats();
        if features == 0 {
            assert_eq!((stats.frames_sent, stats.frames_dropped), (0, 1));
            continue;
        }
        assert_eq!((stats.frames_sent, stats.frames_dropped), (1, 0));
        let (memory, rx) = (&guest.memory, &mut guest.pairs[0].rx);
        let mut frame = Vec::new();
        for _ in 0..3 {
            let (head, bytes) = rx.take(memory).unwrap();
            let mut piece = vec![0; bytes as usize];
            memory.read(rx.buffer(head) as usize, &mut piece);
            frame.extend(piece);
        }
        assert_eq!(frame[10..12], [3, 0], "three buffers");
        assert_eq!(frame[12..], payload);
        assert!(rx.take(memory).is_none());
    }
}

#[test]
fn interrupts_are_for_those_who_want_them() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let fired: Vec<_> = (0..2).map(|_| Arc::new(AtomicU32::new(0))).collect();
    for (vector, count) in (0_u16..).zip(&fired) {
        let count = Arc::clone(count);
        let notify = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        host.model.vectors().connect(vector, Some(notify));
    }
    let counts = || fired.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
    guest.start(&mut host);
    pass(&host, &mut guest, 1);
    assert_eq!(counts(), [1, 1]);
    guest.pairs[0].rx.set_no_interrupt(&guest.memory, true);
    pass(&host, &mut guest, 1);
    assert_eq!(counts(), [1, 2]);
    assert_eq!(host.model.stats().interrupts, 3);
}

#[test]
fn rings_that_make_no_sense_end_their_queue() {
    type Spoil = fn(&mut host::ring::GuestRing, &martlet_device_io::DmaBlock);
    let spoils: [Spoil; 6] = [
        |ring, memory| ring.set_available(memory, 17),
        |ring, memory| ring.offer(memory, 16),
        |ring, memory| {
            ring.describe(memory, 0, ring.buffer(0), 100, 1, 200);
            ring.offer(memory, 0);
        },
        |ring, memory| {
            ring.describe(memory, 0, ring.buffer(0), 100, 1, 0);
            ring.offer(memory, 0);
        },
        |ring, memory| {
            ring.describe(memory, 0, ring.buffer(0), 100, 4, 0);
            ring.offer(memory, 0);
        },
        |ring, memory| {
            ring.describe(memory, 0, ring.buffer(0), 100, 2, 0);
            ring.offer(memory, 0);
        },
    ];
    for spoil in spoils {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 1, 16, 0);
        guest.start(&mut host);
        guest.refill();
        spoil(&mut guest.pairs[0].tx, &guest.memory);
        guest.kick(&host);
        let stats = host.model.stats();
        assert_eq!(stats.queues[1].state, QueueState::Error);
        assert_eq!((stats.ring_errors, stats.access_errors, stats.frames_sent), (1, 0, 0));
    }
}

#[test]
fn a_receiver_that_breaks_has_what_came_before() {
    for features in [0, MERGEABLE] {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::with_features(&mut host, 1, 16, 0, features);
        guest.start(&mut host);
        let (memory, pair) = (&guest.memory, &mut guest.pairs[0]);
        for _ in 0..3 {
            pair.rx.offer_buffer(memory);
        }
        // A good piece, then one that the key does not cover.
        pair.rx.describe(memory, 3, pair.rx.buffer(3), 20, 3, 4);
        pair.rx.describe(memory, 4, 1 << 50, 2000, 2, 0);
        pair.rx.offer(memory, 3);
        for _ in 0..5 {
            guest.send();
        }
        guest.kick(&host);
        assert_eq!((guest.receive(), guest.missing()), (3, 2));
        let stats = host.model.stats();
        assert_eq!((stats.frames_sent, stats.frames_received, stats.access_errors), (3, 3, 1));
        let [rx, tx] = [stats.queues[0], stats.queues[1]];
        assert_eq!((rx.state, rx.available, rx.used), (QueueState::Error, 3, 3));
        assert_eq!((tx.state, tx.available, tx.used), (QueueState::Ready, 3, 3));
    }
}

#[test]
fn no_frame_at_all_is_dropped() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    guest.refill();
    let ring = &mut guest.pairs[0].tx;
    ring.describe(&guest.memory, 0, ring.buffer(0), 11, 0, 0);
    ring.offer(&guest.memory, 0);
    guest.kick(&host);
    assert_eq!(guest.pairs[0].tx.published(&guest.memory), 1);
    assert_eq!(host.model.stats().frames_dropped, 1);
}

#[test]
fn written_pages_are_logged() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let log = host.bus.alloc(4096, 4096).unwrap();
    let log_key = host.direct_key(log.at().0, 4096);
    guest.start(&mut host);
    pass(&host, &mut guest, 1);
    assert_eq!(log.take64(0), 0);
    for id in guest.ids() {
        let fields = modify::DIRTY_BITMAP_PARAMS | modify::DIRTY_BITMAP_DUMP_ENABLE;
        host.modify(id, fields, |object| {
            object.dirty_bitmap_mkey = U32::new(log_key);
            object.dirty_bitmap_size = U32::new(4096);
            object.set_logging(true);
        })
        .ok();
    }
    let before = snapshot(&guest);
    pass(&host, &mut guest, 9);
    let after = snapshot(&guest);
    let logged: Vec<u64> = (0..4).map(|word| log.take64(word * 8)).collect();
    let is_logged = |page: usize| logged[page / 64] >> (page % 64) & 1 == 1;
    let device_wrote = [0x0a, 0x10, 0x11, 0x12, 0x13, 0x14, 0x80 + 0x0a];
    for page in 0..256 {
        let changed = before[page * 4096..][..4096] != after[page * 4096..][..4096];
        if device_wrote.contains(&page) {
            assert!(is_logged(page), "page {page:#x}");
        } else {
            assert!(!is_logged(page), "page {page:#x} is the guest's, changed: {changed}");
        }
    }
    guest.suspend(&mut host);
    let flags: Vec<u64> = (0..4).map(|word| log.take64(word * 8)).collect();
    assert_eq!(flags.iter().map(|word| word.count_ones()).sum::<u32>(), 1, "NO_NOTIFY of one ring");
    assert!(!guest.pairs[0].rx.is_quiet(&guest.memory));
}

fn snapshot(guest: &Guest) -> Vec<u8> {
    let mut bytes = vec![0; guest.memory.bytes()];
    guest.memory.read(0, &mut bytes);
    bytes
}

#[test]
fn a_page_that_can_not_be_logged_ends_its_queue() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    let log = host.bus.alloc(4096, 4096).unwrap();
    let log_key = host.direct_key(log.at().0, 4096);
    let fields = modify::DIRTY_BITMAP_PARAMS | modify::DIRTY_BITMAP_DUMP_ENABLE;
    host.modify(guest.pairs[0].rx_id, fields, |object| {
        object.dirty_bitmap_mkey = U32::new(log_key);
        object.dirty_bitmap_size = U32::new(4096);
        object.set_logging(true);
    })
    .ok();
    host.destroy_key(log_key).ok();
    guest.start(&mut host);
    guest.refill();
    guest.send();
    guest.kick(&host);
    let stats = host.model.stats();
    assert_eq!((stats.access_errors, stats.queues[0].state), (1, QueueState::Error));
}

#[test]
fn a_table_says_where_frames_go() {
    let mut host = Host::new(ModelConfig::default());
    let mut guest = Guest::new(&mut host, 4, 16, 0);
    let (first, second) = (guest.pairs[0].rx_id, guest.pairs[1].rx_id);
    host.run(&table_input(Opcode::CREATE_RQT, 0, 4, &[second, first]), 16).ok();
    guest.start(&mut host);
    guest.refill();
    guest.send();
    guest.kick(&host);
    let memory = &guest.memory;
    let published: Vec<_> = guest.pairs.iter().map(|pair| pair.rx.published(memory)).collect();
    assert_eq!(published, [2, 2, 0, 0]);
    let frame = guest.pairs[1].rx.take_frame(memory).unwrap();
    assert_eq!(frame[0], 0, "pair 0 goes to the first of the table");
}
