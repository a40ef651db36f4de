//! How long commands take, in virtual time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{key_input, page_list, state_input};
use host::ring::Guest;
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::event::EventType;
use martlet_mlx5_abi::memory::access_mode;
use martlet_mlx5_abi::message::{GeneralObjectIn, ShortIn, object_type};
use martlet_mlx5_abi::virtq::VirtqState;
use martlet_mlx5_model::{Class, Latencies, ModelConfig};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Commands that a driver has out at a time when it throttles itself (half the slots).
const WINDOW: usize = 16;

fn in_windows(host: &mut Host, inputs: &[Vec<u8>], out_bytes: usize) -> Duration {
    let windows = inputs.chunks(WINDOW);
    windows
        .map(|window| {
            let (replies, time) = host.batch(window, out_bytes);
            replies.into_iter().for_each(|reply| drop(reply.ok()));
            time
        })
        .sum()
}

fn one_by_one(host: &mut Host, inputs: &[Vec<u8>], out_bytes: usize) -> Duration {
    inputs.iter().map(|input| in_windows(host, std::slice::from_ref(input), out_bytes)).sum()
}

fn states(ids: &[u32], state: VirtqState) -> Vec<Vec<u8>> {
    ids.iter().map(|id| state_input(*id, state)).collect()
}

fn queries(ids: &[u32]) -> Vec<Vec<u8>> {
    let query = |id: &u32| {
        let opcode = Opcode::QUERY_GENERAL_OBJECT;
        GeneralObjectIn::new(opcode, object_type::VIRTIO_NET_Q, *id).as_bytes().to_vec()
    };
    ids.iter().map(query).collect()
}

#[test]
fn a_batch_of_32_queues_takes_what_was_published() {
    let latencies = Latencies::connectx6dx_from_series();
    let mut host = Host::new(ModelConfig { latencies, ..ModelConfig::default() });
    let guest = Guest::new(&mut host, 16, 16, 0);
    let ids = guest.ids();
    guest.start(&mut host);
    let serial = one_by_one(&mut host, &states(&ids, VirtqState::SUSPEND), 16)
        + one_by_one(&mut host, &queries(&ids), 208);
    assert_eq!(serial, Duration::from_micros(26_560), "published: 26.5 ms");
    let resume = one_by_one(&mut host, &states(&ids, VirtqState::RDY), 16);
    assert_eq!(resume, Duration::from_micros(16_000), "published: 16 ms");
    // Two windows, one after the other: what is here is an upper bound for a driver that refills
    // its window.
    let suspend = in_windows(&mut host, &states(&ids, VirtqState::SUSPEND), 16)
        + in_windows(&mut host, &queries(&ids), 208);
    assert!(suspend < Duration::from_micros(3_500), "{suspend:?}");
    let resume = in_windows(&mut host, &states(&ids, VirtqState::RDY), 16);
    assert!(resume < Duration::from_micros(5_000), "{resume:?}");
}

#[test]
fn the_exclusive_section_is_shared_by_all_commands() {
    let latencies = Latencies::connectx6dx_from_series();
    let mut host = Host::new(ModelConfig { latencies, ..ModelConfig::default() });
    let pd = ShortIn::new(Opcode::ALLOC_PD, 0, 0).as_bytes().to_vec();
    let list = page_list((0..512_u64).map(|page| page << 21));
    let key = key_input(host.domain, access_mode::MTT, 1 << 30, 21, &list);
    let alone = host.batch(std::slice::from_ref(&pd), 16).1;
    let behind = host.batch(&[key, pd], 16).1;
    let latencies = Latencies::connectx6dx_from_series();
    let create = latencies.get(Class::KeyCreate);
    let whole = create.pickup
        + create.serial_for(512)
        + latencies.get(Class::Other).serial.max(create.overlap_for(512))
        + create.wake;
    assert_eq!(alone, Duration::from_micros(200));
    assert_eq!(behind, whole);
}

#[test]
fn keys_take_longer_with_longer_lists() {
    let latencies = Latencies::connectx6dx_from_series();
    let mut host = Host::new(ModelConfig { latencies, ..ModelConfig::default() });
    let list = page_list((0..262_144_u64).map(|page| page << 12));
    let large = key_input(host.domain, access_mode::MTT, 1 << 30, 12, &list);
    let (replies, time) = host.batch(&[large], 16);
    assert!(time.abs_diff(Duration::from_micros(8_000)) < Duration::from_micros(2), "{time:?}");
    let index = u32::from_be_bytes(replies[0].clone().ok()[8..12].try_into().unwrap());
    let destroy = ShortIn::new(Opcode::DESTROY_MKEY, 0, index).as_bytes().to_vec();
    let time = host.batch(&[destroy], 16).1;
    assert!(time.abs_diff(Duration::from_micros(2_300)) < Duration::from_micros(2), "{time:?}");
}

#[test]
fn commands_that_end_together_share_an_event() {
    let mut host = Host::new(ModelConfig::default());
    host.events();
    let pd = ShortIn::new(Opcode::ALLOC_PD, 0, 0).as_bytes().to_vec();
    let sent: Vec<_> = (0..5).map(|_| host.write(&pd, 16, |_, _| {})).collect();
    host.ring(&sent.iter().collect::<Vec<_>>());
    host.stage.turn_all();
    let event = host.event().unwrap();
    assert_eq!((event.kind, event.data0.get()), (EventType::COMMAND.0, 0b1_1111));
    assert!(host.event().is_none());
    sent.into_iter().for_each(|sent| drop(host.finish(sent).ok()));
}

#[test]
fn the_same_commands_take_the_same_time() {
    let trace = || {
        let latencies = Latencies::connectx6dx_from_series();
        let mut host = Host::new(ModelConfig { latencies, ..ModelConfig::default() });
        let mut guest = Guest::new(&mut host, 4, 16, 0);
        guest.start(&mut host);
        for _ in 0..20 {
            guest.refill();
            guest.send();
            guest.kick(&host);
            guest.receive();
        }
        guest.suspend(&mut host);
        (host.stage.clock().now(), host.model.stats())
    };
    assert_eq!(trace(), trace());
}
