//! What the model costs its host. Measured, not asserted:
//! `cargo test --release -p martlet-mlx5-model --test speed -- --ignored --nocapture`
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::objects::{key_input, page_list, state_input};
use host::ring::Guest;
use martlet_mlx5_abi::memory::access_mode;
use martlet_mlx5_abi::virtq::VirtqState;
use martlet_mlx5_model::{Hardware, Latencies, ModelConfig};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
#[ignore = "a measurement"]
fn a_key_of_262144_pages() {
    for scattered in [false, true] {
        let mut host = Host::new(ModelConfig::default());
        let step = if scattered { 8192 } else { 4096 };
        let pages = (0..262_144_u64).map(|page| (1 << 32) + page * step);
        let input = key_input(host.domain, access_mode::MTT, 1 << 30, 12, &page_list(pages));
        for _ in 0..3 {
            let sent = host.write(&input, 16, |_, _| {});
            let begin = thread_time();
            host.ring(&[&sent]);
            let taken = thread_time() - begin;
            host.stage.turn_all();
            let done = thread_time() - begin;
            println!("scattered {scattered}: taken in {taken:?}, done after {done:?} of CPU");
            host.finish(sent).ok();
        }
    }
}

/// CPU time of this thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// CPU time of this process's threads with a name, in clock ticks of 10 ms.
fn hardware_ticks() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
    let ours = stats.filter(|stat| stat.contains("mlx5-hardware"));
    ours.map(|stat| {
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    })
    .sum()
}

#[test]
#[ignore = "a measurement"]
fn four_devices_with_32_queues_each() {
    let (stage, bus) = (Stage::new(SoftClock::real()), SoftBus::new(Addressing::Iommu));
    let mut hosts: Vec<_> =
        (0..4).map(|_| Host::on(&stage, &bus, ModelConfig::default())).collect();
    let models: Vec<_> = hosts.iter().map(|host| Arc::clone(&host.model)).collect();
    let _hardware = Hardware::start(&models).unwrap();
    let mut guests: Vec<_> = hosts
        .iter_mut()
        .map(|host| {
            host.bring_up();
            let guest = Guest::new(host, 16, 128, 0);
            guest.start(host);
            guest
        })
        .collect();
    let time = Duration::from_secs(3);
    for per_second in [20_000, 200_000, 1_000_000_u64] {
        let (begin, ticks) = (Instant::now(), hardware_ticks());
        let mut sent = 0;
        while begin.elapsed() < time {
            let due = per_second * u64::try_from(begin.elapsed().as_micros()).unwrap() / 1_000_000;
            if sent >= due {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            for (host, guest) in hosts.iter().zip(&mut guests) {
                guest.refill();
                sent += u64::from(guest.send());
                for pair in &guest.pairs {
                    for ring in [&pair.rx, &pair.tx] {
                        if !ring.is_quiet(&guest.memory) {
                            host.registers.write32(1 << 20, u32::from(ring.index));
                        }
                    }
                }
                guest.receive();
            }
        }
        let busy = (hardware_ticks() - ticks) * 10;
        let kicks: u64 = hosts.iter().map(|host| host.model.stats().kicks).sum();
        let rate = u128::from(sent) * 1000 / begin.elapsed().as_millis();
        println!("{rate} frames/s: {busy} ms of CPU in {time:?}; {kicks} kicks so far");
    }
}

#[test]
#[ignore = "a measurement"]
fn a_suspend_and_a_resume_in_real_time() {
    let (stage, bus) = (Stage::new(SoftClock::real()), SoftBus::new(Addressing::Iommu));
    let latencies = Latencies::connectx6dx_from_series();
    let mut host = Host::on(&stage, &bus, ModelConfig { latencies, ..ModelConfig::default() });
    let _hardware = Hardware::start(&[Arc::clone(&host.model)]).unwrap();
    host.bring_up();
    let guest = Guest::new(&mut host, 15, 16, 0);
    guest.start(&mut host);
    for _ in 0..5 {
        for (state, modelled_us) in
            [(VirtqState::SUSPEND, 5 + 30 * 33 + 447), (VirtqState::RDY, 5 + 30 * 130 + 350)]
        {
            let inputs: Vec<_> = guest.ids().iter().map(|id| state_input(*id, state)).collect();
            let (_, time) = host.batch(&inputs, 16);
            println!("{state} of 30 queues at once: {time:?}, modelled {modelled_us} us");
        }
    }
}
