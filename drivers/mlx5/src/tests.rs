//! The device beside another user of its function, whom no public interface lets in yet.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use crate::Options;
use crate::batch::{Batch, BatchOptions, OnFailure};
use crate::command::{Request, UserId};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::{GeneralObjectIn, object_type};
use martlet_mlx5_abi::virtq::QueryVirtqOut;
use martlet_mlx5_model::{Latencies, ModelConfig};
use martlet_vdpa::VdpaDevice;
use rig::Rig;
use std::time::Duration;

const QUERY: Opcode = Opcode::QUERY_GENERAL_OBJECT;

fn series(queues: u16) -> ModelConfig {
    let latencies = Latencies::connectx6dx_from_series();
    ModelConfig { queues, latencies, ..ModelConfig::default() }
}

/// Another user of the function, crypto offload say, who takes what it can get.
fn storm(rig: &Rig, commands: usize) -> Batch {
    let user = UserId(77);
    let deadline = Duration::from_millis(50);
    let options = BatchOptions { user, window: 31, deadline, on_failure: OnFailure::GoOn };
    let mut batch = Batch::new(options);
    for _ in 0..commands {
        let input = GeneralObjectIn::new(QUERY, object_type::VIRTIO_NET_Q, 0xffff);
        batch.push(Request::new::<QueryVirtqOut>(QUERY, &input));
    }
    rig.device.firmware.poll(&mut batch);
    batch
}

#[test]
fn a_storm_of_another_user_does_not_keep_the_device_from_its_turn() {
    let rig = Rig::running(series(32), Options::MARTLET, 16, 0);
    let alone = rig.time(|rig| rig.suspend().unwrap()).1;
    rig.resume().unwrap();
    let mut other = storm(&rig, 2000);
    let out = |batch: &Batch| (0..2000).filter(|item| batch.command(*item).is_some()).count();
    assert_eq!(out(&other), 16, "all permits are taken");
    let begin = rig.now();
    rig.device.begin_suspend().unwrap();
    let outcome = loop {
        if let Some(outcome) = rig.device.poll_suspend() {
            break outcome;
        }
        // As often as we do, the other asks as well.
        rig.device.firmware.poll(&mut other);
        rig.stage.clock().advance(Duration::from_micros(10));
        rig.stage.turn_all();
    };
    outcome.unwrap();
    let stormy = rig.now().since(begin);
    assert!(!other.is_done());
    assert!(stormy < 3 * alone, "{stormy:?} instead of {alone:?}: half of the permits");
    rig.device.firmware.run(&mut other);
    assert_eq!(other.results().count(), 2000, "the other had its turn as well");
}
