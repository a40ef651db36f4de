//! What goes wrong where it is told to.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::ring::Guest;
use martlet_fault_plan::{FaultPlan, Rule};
use martlet_mlx5_abi::event::EventType;
use martlet_mlx5_abi::message::ShortIn;
use martlet_mlx5_abi::setup::PagesIn;
use martlet_mlx5_abi::virtq::VirtqState;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use martlet_mlx5_model::{Class, Fault, Latencies, ModelConfig, Point, QueueState};
use std::time::Duration;
use zerocopy::IntoBytes;

fn pd() -> Vec<u8> {
    ShortIn::new(Opcode::ALLOC_PD, 0, 0).as_bytes().to_vec()
}

/// A device whose next command fails so.
fn failing(fault: Fault) -> Host {
    let host = Host::new(ModelConfig::default());
    host.model.with_faults(|faults| {
        faults.push(Rule { at: Point::Opcode(Opcode::ALLOC_PD), skip: 0, times: 1, fault });
    });
    host
}

#[test]
fn statuses_are_as_told_and_nothing_happens() {
    let mut host = failing(Fault::Delivery(DeliveryStatus::FIRMWARE));
    let reply = host.run(&pd(), 16);
    assert_eq!(reply.delivery, DeliveryStatus::FIRMWARE);
    let mut host =
        failing(Fault::Status { status: CommandStatus::NO_RESOURCES, syndrome: 0x1234_5678 });
    let reply = host.run(&pd(), 16);
    assert_eq!((reply.delivery, reply.status()), (DeliveryStatus::OK, CommandStatus::NO_RESOURCES));
    assert_eq!(reply.output[4..8], 0x1234_5678_u32.to_be_bytes());
    assert_eq!(reply.output[8..], [0; 8]);
    assert_eq!(host.model.stats().commands_failed, 1);
    host.run(&pd(), 16).ok();
}

#[test]
fn a_wrong_token_and_garbage() {
    let reply = failing(Fault::WrongToken).run(&pd(), 600);
    assert_ne!(reply.token, reply.token_now);
    reply.ok();
    let garbage = |seed| {
        let mut host = Host::new(ModelConfig { seed, ..ModelConfig::default() });
        host.model.with_faults(|faults| {
            *faults = FaultPlan::once(Point::Any, 0, Fault::Garbage);
        });
        host.run(&pd(), 600).ok()
    };
    assert_ne!(garbage(1)[8..], [0; 592]);
    assert_eq!(garbage(1), garbage(1));
    assert_ne!(garbage(1), garbage(2));
}

#[test]
fn lost_answers_events_and_interrupts() {
    for executed in [false, true] {
        let mut host = failing(Fault::Lost { executed });
        let sent = host.write(&pd(), 16, |_, _| {});
        host.ring(&[&sent]);
        assert!(!host.wait(&sent));
        assert_eq!(host.model.stats().commands_failed, 0);
        host.run(&pd(), 16).ok();
    }
    let mut host = failing(Fault::LostEvent);
    host.events();
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    host.stage.turn_all();
    assert!(host.is_done(&sent) && host.event().is_none());

    let mut host = failing(Fault::LostInterrupt);
    host.events();
    host.seat_poll();
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    assert!(!host.seat_poll());
    assert!(host.is_done(&sent));
    assert_eq!(host.event().unwrap().kind, EventType::COMMAND.0);
}

#[test]
fn a_late_answer_keeps_its_entry() {
    let mut host = failing(Fault::Late(Duration::from_secs(30)));
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    assert!(!host.wait(&sent));
    // Whoever uses the entry again is not heard.
    host.ring(&[&sent]);
    assert_eq!(host.model.stats().unexpected_commands, 1);
    host.run(&pd(), 16).ok();
    host.stage.run_until(host.stage.clock().now().after(Duration::from_secs(30)));
    assert!(host.is_done(&sent));
    let event = host.events();
    assert_eq!(event.last().unwrap().data0.get(), 1 << sent.slot);
    host.finish(sent).ok();
}

#[test]
fn a_slow_command_delays_all_later_ones_and_a_late_one_none() {
    let time = |fault| {
        let latencies = Latencies::connectx6dx_from_series();
        let mut host = Host::new(ModelConfig { latencies, ..ModelConfig::default() });
        host.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, 0, fault));
        let sent: Vec<_> = (0..2).map(|_| host.write(&pd(), 16, |_, _| {})).collect();
        host.ring(&[&sent[0], &sent[1]]);
        let begin = host.stage.clock().now();
        assert!(host.wait(&sent[1]));
        host.stage.clock().now().since(begin)
    };
    let delay = Duration::from_millis(20);
    let late = time(Fault::Late(delay));
    assert_eq!(late, Duration::from_micros(5 + 50 + 50 + 130));
    assert_eq!(time(Fault::Slow(delay)), late + delay);
}

#[test]
fn a_class_means_what_a_command_does() {
    let at = Point::Class(Class::QueueSuspend);
    let fault = Fault::Status { status: CommandStatus::INTERNAL, syndrome: 7 };
    let faults = FaultPlan::once(at, 1, fault);
    let mut host = Host::new(ModelConfig { faults, ..ModelConfig::default() });
    let guest = Guest::new(&mut host, 2, 16, 0);
    guest.start(&mut host);
    let failed: Vec<_> = guest
        .ids()
        .into_iter()
        .filter(|id| host.set_state(*id, VirtqState::SUSPEND).status() != CommandStatus::OK)
        .collect();
    assert_eq!(failed, [guest.pairs[0].tx_id]);
    assert_eq!(host.query_queue(failed[0]).state(), VirtqState::RDY);
    assert_eq!(host.model.stats().queues[1].state, QueueState::Ready);
}

#[test]
fn firmware_hangs_and_frames_pass() {
    let mut host = failing(Fault::Hang);
    let mut guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    let sent: Vec<_> = (0..2).map(|_| host.write(&pd(), 16, |_, _| {})).collect();
    host.ring(&[&sent[0], &sent[1]]);
    let beat = host.registers.read32(0x1010);
    assert!(!host.wait(&sent[0]) && !host.wait(&sent[1]));
    assert_eq!(host.registers.read32(0x1010), beat);
    guest.refill();
    guest.send();
    guest.kick(&host);
    assert_eq!(guest.receive(), 1);
    host.model.reset();
    host.write_queue_address();
    host.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
}

#[test]
fn the_device_disappears_in_mid_command() {
    let mut host = failing(Fault::Gone);
    let guest = Guest::new(&mut host, 1, 16, 0);
    guest.start(&mut host);
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    assert!(!host.wait(&sent));
    assert!(host.model.is_gone());
    assert_eq!(host.registers.read32(0x10), u32::MAX);
}

#[test]
fn the_link_flaps_and_pages_are_asked_for() {
    let mut host = failing(Fault::LinkFlap(Duration::from_millis(3)));
    host.events();
    host.run(&pd(), 16).ok();
    assert!(!host.model.link());
    let until = host.stage.clock().now().after(Duration::from_millis(3));
    host.stage.run_until(until);
    assert!(host.model.link());
    assert_eq!(host.events().last().unwrap().sub_type, 4);

    let mut host = failing(Fault::PageRequest(-3));
    host.events();
    let sent = host.write(&pd(), 16, |_, _| {});
    host.ring(&[&sent]);
    let event = host.event().unwrap();
    assert_eq!((event.kind, event.data1.get()), (EventType::PAGE_REQUEST.0, 3_u32.wrapping_neg()));
}
