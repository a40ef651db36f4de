//! Every fault at every command of suspend, resume, set_map, a change of the number of queue pairs,
//! start and prepare: each ends in a stated condition, and from it frames flow again.
//!
//! | outcome | condition |
//! |---|---|
//! | suspend: success | every queue stands; indices are the rings'; no frame moves |
//! | suspend: error | running; frames flow on all queues, or on all but those that the error names |
//! | resume: success | running; frames flow on all queues |
//! | resume: error | running; frames flow on all queues but those named; another resume starts them |
//! | set_map: error | running with the old map; as after a failed suspend |
//! | change of pairs: error | as many pairs as before, and frames flow; or all the same with the new number |
//! | start, prepare: error | as before: they can be tried again |
//! | creation of a queue, answered with nonsense | the firmware has an object of which nobody knows the number: the queue is out of order until a reset, which restarts the function |
//! | device gone | every call says so; the end of the device does not hang |
#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use martlet_fault_plan::FaultPlan;
use martlet_mlx5::DeviceState;
use martlet_mlx5::Options;
use martlet_mlx5::options::Deadlines;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus};
use martlet_mlx5_model::{Fault, Latencies, ModelConfig, Point};
use martlet_vdpa::{QueueIndex, VdpaDevice, VdpaError};
use rig::Rig;
use std::time::Duration;

const PAIRS: usize = 2;

fn status(status: CommandStatus) -> Fault {
    Fault::Status { status, syndrome: 0x1234 }
}

fn faults() -> Vec<Fault> {
    let ms = Duration::from_millis;
    vec![
        Fault::Delivery(DeliveryStatus::SIGNATURE),
        Fault::Delivery(DeliveryStatus::FIRMWARE),
        status(CommandStatus::INTERNAL),
        status(CommandStatus::LIMIT),
        status(CommandStatus::NO_RESOURCES),
        status(CommandStatus::RESOURCE_BUSY),
        status(CommandStatus::BAD_RESOURCE_STATE),
        Fault::WrongToken,
        Fault::Lost { executed: false },
        Fault::Lost { executed: true },
        Fault::LostEvent,
        Fault::LostInterrupt,
        Fault::Late(ms(12)),
        Fault::Late(ms(70)),
        Fault::Slow(ms(3)),
        Fault::Slow(ms(70)),
        Fault::Garbage,
        Fault::Gone,
        Fault::LinkFlap(ms(1)),
        Fault::PageRequest(40),
        Fault::PageRequest(-3),
    ]
}

/// How long the firmware takes.
#[derive(Clone, Copy, Debug)]
enum Time {
    /// No time at all: answers come before anything else happens.
    None,
    /// As long as the series measured: many commands are out at a time.
    Series,
}

/// A device that is about to do what is tested.
fn begin(name: &str, resumable: bool, time: Time) -> Rig {
    let latencies = match time {
        Time::None => Latencies::zero(),
        Time::Series => Latencies::connectx6dx_from_series(),
    };
    let config = ModelConfig { queues: 8, resumable, latencies, ..ModelConfig::default() };
    // Deadlines that are short in the test's own time as well.
    let ms = Duration::from_millis;
    let deadlines = Deadlines { queues: ms(20), memory: ms(100), setup: ms(150) };
    let options = Options { deadlines, ..Options::MARTLET };
    let mut rig = Rig::new(config, options, PAIRS, 65_530);
    match name {
        "start" | "prepare" => {}
        "arrive" => rig.device.prepare().unwrap(),
        "grow" => {
            rig.device.set_queue_pairs(1).unwrap();
            rig.device.start().unwrap();
            rig.pairs = 1;
            rig.assert_frames_flow();
        }
        _ => {
            rig.device.start().unwrap();
            rig.assert_frames_flow();
        }
    }
    if name == "resume" {
        rig.guest.offer(PAIRS);
        rig.suspend().unwrap();
    }
    rig
}

fn act(name: &str, rig: &mut Rig) -> Result<(), VdpaError> {
    match name {
        "start" => rig.device.start(),
        "prepare" => rig.device.prepare(),
        "arrive" | "resume" => rig.resume(),
        "suspend" => {
            rig.guest.offer(PAIRS);
            rig.suspend()
        }
        "set_map" => {
            // The same memory once more, further up: every queue gets another key.
            let mut map = rig.map();
            let mut above = map[0].clone();
            above.iova.0 = 1 << 31;
            map.push(above);
            rig.device.set_map(&map)
        }
        "shrink" => rig.device.set_queue_pairs(1).inspect(|()| rig.pairs = 1),
        "grow" => rig.device.set_queue_pairs(2).inspect(|()| rig.pairs = 2),
        "log" => rig.device.set_dirty_log(true),
        other => unreachable!("{other}"),
    }
}

/// Gets the device to pass frames, the way that the condition allows.
fn recover(name: &str, rig: &mut Rig, outcome: &Result<(), VdpaError>) {
    match (rig.device.state(), name) {
        (DeviceState::Suspended, "suspend") => {
            assert!(outcome.is_ok());
            for (queue, state) in (0..4).zip(rig.states()) {
                assert_eq!(state, rig.guest.at(queue), "queue {queue}");
            }
            let before = rig.model.stats().frames_sent;
            rig.exchange(2);
            assert_eq!(rig.model.stats().frames_sent, before, "it stands");
            rig.resume().unwrap();
        }
        (DeviceState::Running, _) => {
            if outcome.is_err() {
                // Queues that could not be started are tried again.
                rig.resume().unwrap_or_else(|error| panic!("{error} after {outcome:?}"));
            }
        }
        (DeviceState::Idle | DeviceState::Prepared, "start") => {
            assert!(outcome.is_err());
            rig.device.start().unwrap();
        }
        (DeviceState::Idle, "prepare") => {
            assert!(outcome.is_err());
            let again = rig.device.prepare();
            again.unwrap_or_else(|error| panic!("{error} after {outcome:?}"));
            rig.resume().unwrap();
        }
        (DeviceState::Prepared, "prepare") => rig.resume().unwrap(),
        (state, name) => panic!("{name} left the device {state:?}: {outcome:?}"),
    }
}

/// Whether the firmware may have made something of which the driver does not know the number.
fn hides_objects(fault: &Fault) -> bool {
    matches!(fault, Fault::Garbage | Fault::WrongToken | Fault::Lost { executed: true })
}

/// Whether a second attempt helps. If not, a hidden object is in the way.
fn is_stuck(rig: &Rig) -> bool {
    let again = match rig.device.state() {
        DeviceState::Idle | DeviceState::Prepared => rig.device.prepare(),
        DeviceState::Running => rig.resume(),
        DeviceState::Suspending | DeviceState::Suspended | DeviceState::Resuming => Ok(()),
    };
    again.is_err()
}

fn gone(rig: Rig) {
    // Noticed or not: at the latest when it is asked for something.
    let suspended = rig.suspend();
    assert!(suspended.is_err(), "a device that is gone says so");
    let _ = rig.device.reset();
    rig.device.service();
    rig.device.kick(QueueIndex(0));
    drop(rig.device);
}

fn one(name: &str, fault: Fault, command: u64, resumable: bool, time: Time) -> bool {
    let mut rig = begin(name, resumable, time);
    rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, command, fault));
    let outcome = act(name, &mut rig);
    let struck = rig.model.with_faults(|faults| {
        let struck = faults.struck();
        faults.clear();
        struck
    });
    if rig.model.is_gone() {
        gone(rig);
        return struck > 0;
    }
    // The firmware comes to itself, and the link; late answers come.
    rig.pass(Duration::from_millis(150));
    let may_hide = hides_objects(&fault);
    if !(may_hide && outcome.is_err() && is_stuck(&rig)) {
        recover(name, &mut rig, &outcome);
        rig.assert_frames_flow();
        // A hidden table would not let go of queues that have to be made anew.
        if !may_hide || (resumable && outcome.is_ok()) {
            check_all_works(&mut rig, matches!(fault, Fault::Lost { .. }));
        }
    }
    // Whatever has happened: after a reset the device is as new.
    rig.device.reset().unwrap();
    rig.set_up();
    rig.device.start().unwrap();
    check_all_works(&mut rig, false);
    let Rig { device, model, bus, .. } = rig;
    drop(device);
    assert_eq!(model.stats().queues.len(), 0);
    assert_eq!(bus.entries(), 0, "nothing stays pinned or allocated");
    struck > 0
}

/// Frames flow, and it can be suspended: unless a start is lost, which may come yet.
fn check_all_works(rig: &mut Rig, is_lost: bool) {
    rig.assert_frames_flow();
    rig.pass(Duration::from_millis(200));
    rig.assert_frames_flow();
    match rig.suspend() {
        Ok(()) => rig.resume().unwrap(),
        Err(error) => assert!(is_lost && error.to_string().contains("may come yet"), "{error}"),
    }
    rig.assert_frames_flow();
}

/// Every fault at every command, as long as the command is reached.
fn exhaust(name: &'static str, resumable: bool, time: Time) {
    let mut cases = 0;
    for fault in faults() {
        for command in 0.. {
            let what = format!("{name}: {fault:?} at {command}, {time:?}, resumable: {resumable}");
            let run = std::panic::AssertUnwindSafe(|| one(name, fault, command, resumable, time));
            match std::panic::catch_unwind(run) {
                Ok(true) => cases += 1,
                Ok(false) => break,
                Err(_) => {
                    eprintln!("CASE {what}");
                    panic!("{what}")
                }
            }
        }
    }
    assert!(cases > 20, "{name}: {cases} cases");
}

macro_rules! operations {
    ($($test:ident: $name:literal, $resumable:literal, $time:ident;)*) => {
        $(
            #[test]
            fn $test() {
                exhaust($name, $resumable, Time::$time);
            }
        )*
    };
}

operations! {
    suspend: "suspend", true, None;
    suspend_without_resume: "suspend", false, None;
    resume: "resume", true, None;
    resume_without_resume: "resume", false, None;
    arrive: "arrive", true, None;
    arrive_without_resume: "arrive", false, None;
    set_map: "set_map", true, None;
    set_map_without_resume: "set_map", false, None;
    shrink: "shrink", true, None;
    grow: "grow", true, None;
    start: "start", true, None;
    prepare: "prepare", true, None;
    log: "log", true, None;
    suspend_in_time: "suspend", true, Series;
    suspend_without_resume_in_time: "suspend", false, Series;
    resume_in_time: "resume", true, Series;
    resume_without_resume_in_time: "resume", false, Series;
    arrive_in_time: "arrive", true, Series;
    set_map_in_time: "set_map", true, Series;
    grow_in_time: "grow", true, Series;
    start_in_time: "start", true, Series;
}
