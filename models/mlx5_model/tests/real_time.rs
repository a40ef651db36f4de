//! The hardware's thread: nothing is forgotten while it sleeps, and nothing is lost while its
//! driver suspends, resumes and changes keys under it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::ring::Guest;
use martlet_mlx5_model::{Hardware, Latencies, ModelConfig, Port, WireEnd};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Rounds without a frame after which a test gives up: minutes, so only a hang gets there.
const HOPELESS: u32 = 2_000_000;

fn real() -> (Arc<Stage>, Arc<SoftBus>) {
    (Stage::new(SoftClock::real()), SoftBus::new(Addressing::Iommu))
}

fn config(suppress_kicks: bool, port: Port) -> ModelConfig {
    ModelConfig { suppress_kicks, port, ..ModelConfig::default() }
}

/// Kicks where the device asks for it, as a guest does.
fn kick_politely(host: &Host, guest: &Guest) {
    fence(Ordering::SeqCst);
    for pair in &guest.pairs {
        for ring in [&pair.rx, &pair.tx] {
            if !ring.is_quiet(&guest.memory) {
                host.registers.write32(1 << 20, u32::from(ring.index));
            }
        }
    }
}

/// Sends frames from one guest and receives them at another until all have come.
fn pass(from: (&Host, &mut Guest), mut to: Option<(&Host, &mut Guest)>, frames: u32) {
    let (host, guest) = from;
    let (mut sent, mut missing, mut idle) = (0, 1, 0);
    while sent < frames || missing > 0 {
        if sent < frames {
            sent += guest.send();
        }
        let got = match &mut to {
            None => {
                guest.refill();
                guest.receive()
            }
            Some((other, at)) => {
                at.refill();
                kick_politely(other, at);
                at.receive()
            }
        };
        kick_politely(host, guest);
        missing = match &to {
            None => guest.missing(),
            Some((_, at)) => guest.missing_at(at),
        };
        idle = if got == 0 { idle + 1 } else { 0 };
        assert!(idle < HOPELESS, "{sent} sent, {missing} missing: {:?}", host.model.stats());
        if got == 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_guest_that_kicks_only_when_asked_gets_all_frames() {
    for suppress_kicks in [false, true] {
        let (stage, bus) = real();
        let mut host = Host::on(&stage, &bus, config(suppress_kicks, Port::Loopback));
        let hardware = Hardware::start(&[Arc::clone(&host.model)]).unwrap();
        assert!(Hardware::start(&[Arc::clone(&host.model)]).is_err());
        host.bring_up();
        let mut guest = Guest::new(&mut host, 4, 64, 65_000);
        guest.start(&mut host);
        // Now and then a pause, in which the thread falls asleep.
        for frames in [1, 3_000, 5, 4_000, 2, 3_000] {
            pass((&host, &mut guest), None, frames);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let stats = host.model.stats();
        assert_eq!((stats.frames_dropped, stats.access_errors, stats.ring_errors), (0, 0, 0));
        assert_eq!(stats.frames_sent, stats.frames_received);
        assert!(stats.first_frame < stats.last_frame);
        drop(hardware);
    }
}

#[test]
fn frames_survive_suspends_in_full_flight() {
    let (stage, bus) = real();
    let latencies = Latencies::connectx6dx_from_series();
    let loopback = config(true, Port::Loopback);
    let mut host = Host::on(&stage, &bus, ModelConfig { latencies, ..loopback });
    let _hardware = Hardware::start(&[Arc::clone(&host.model)]).unwrap();
    host.bring_up();
    let mut guest = Guest::new(&mut host, 2, 64, 0);
    guest.start(&mut host);
    for _ in 0..15 {
        pass((&host, &mut guest), None, 500);
        guest.refill();
        guest.send();
        guest.suspend(&mut host);
        for queue in host.model.stats().queues {
            assert_eq!(queue.available, queue.used);
        }
        guest.start(&mut host);
    }
    let mut idle = 0;
    while guest.missing() > 0 {
        guest.receive();
        idle += 1;
        assert!(idle < HOPELESS);
        std::thread::yield_now();
    }
}

#[test]
fn two_devices_on_a_cable_do_not_block_each_other() {
    let (one, other) = WireEnd::pair();
    let (stage, bus) = real();
    let mut a = Host::on(&stage, &bus, config(true, Port::Wire(one)));
    let mut b = Host::on(&stage, &bus, config(true, Port::Wire(other)));
    let threads = [&a, &b].map(|host| Hardware::start(&[Arc::clone(&host.model)]).unwrap());
    a.bring_up();
    b.bring_up();
    let (mut at_a, mut at_b) = (Guest::new(&mut a, 2, 64, 0), Guest::new(&mut b, 2, 64, 0));
    at_a.start(&mut a);
    at_b.start(&mut b);
    for _ in 0..20 {
        pass((&a, &mut at_a), Some((&b, &mut at_b)), 400);
        pass((&b, &mut at_b), Some((&a, &mut at_a)), 400);
        // Keys come and go while frames pass both ways.
        at_a.send();
        at_b.send();
        kick_politely(&a, &at_a);
        kick_politely(&b, &at_b);
        for host in [&mut a, &mut b] {
            let key = host.direct_key(1 << 40, 4096);
            host.destroy_key(key).ok();
        }
        let mut idle = 0;
        while at_a.missing_at(&at_b) + at_b.missing_at(&at_a) > 0 {
            at_a.receive();
            at_b.receive();
            idle += 1;
            assert!(idle < HOPELESS);
            std::thread::yield_now();
        }
    }
    drop(threads);
}
