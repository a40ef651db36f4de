//! The hardware's thread: nothing is forgotten while it sleeps, and nothing is lost while its
//! driver suspends, resumes and changes keys under it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::ring::Guest;
use martlet_mlx5_model::{Hardware, Latencies, ModelConfig};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Rounds without a frame after which a test gives up: minutes, so only a hang gets there.
const HOPELESS: u32 = 2_000_000;

fn real() -> (Arc<Stage>, Arc<SoftBus>) {
    (Stage::new(SoftClock::real()), SoftBus::new(Addressing::Iommu))
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

/// Sends frames and receives them until all have come back.
fn pass(host: &Host, guest: &mut Guest, frames: u32) {
    let (mut sent, mut missing, mut idle) = (0, 1, 0);
    while sent < frames || missing > 0 {
        if sent < frames {
            sent += guest.send();
        }
        guest.refill();
        let got = guest.receive();
        kick_politely(host, guest);
        missing = guest.missing();
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
        let mut host =
            Host::on(&stage, &bus, ModelConfig { suppress_kicks, ..ModelConfig::default() });
        let hardware = Hardware::start(&[Arc::clone(&host.model)]).unwrap();
        assert!(Hardware::start(&[Arc::clone(&host.model)]).is_err());
        host.bring_up();
        let mut guest = Guest::new(&mut host, 4, 64, 65_000);
        guest.start(&mut host);
        // Now and then a pause, in which the thread falls asleep.
        for frames in [1, 3_000, 5, 4_000, 2, 3_000] {
            pass(&host, &mut guest, frames);
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
    let mut host = Host::on(&stage, &bus, ModelConfig { latencies, ..ModelConfig::default() });
    let _hardware = Hardware::start(&[Arc::clone(&host.model)]).unwrap();
    host.bring_up();
    let mut guest = Guest::new(&mut host, 2, 64, 0);
    guest.start(&mut host);
    for _ in 0..15 {
        pass(&host, &mut guest, 500);
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
