//! Maps, keys and what is left of them, with a firmware that keeps books.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::support::{
    FAULTS, Fault, GIB, PAGE, Rig, at_once, config, everything, fake_memory, run,
};
use crate::memory::{MapRef, MemoryConfig, Refusal};
use martlet_units::Instant;
use martlet_vdpa::{Access, HostMemory, MapRun, VdpaError};
use std::time::Duration;

const DELAY: Duration = MemoryConfig::DELETION_DELAY;

/// Three pieces of 16 pages, a hole, two more; the last is read-only.
fn small_map(memory: &HostMemory) -> Vec<MapRun> {
    vec![
        run(0, memory, 0, 48 * PAGE, Access::ReadWrite),
        run(64 * PAGE, memory, 64 * PAGE, 16 * PAGE, Access::ReadWrite),
        run(80 * PAGE, memory, 80 * PAGE, 3 * PAGE, Access::Read),
    ]
}

fn memory() -> HostMemory {
    fake_memory(1 << 32, 1024 * PAGE)
}

#[test]
fn a_map_is_direct_keys_and_one_indirect_last() {
    let mut rig = Rig::new(config(16));
    let map = small_map(&memory());
    rig.set_map(&map).unwrap();
    rig.check(&map);
    assert_eq!(rig.log, [0x200; 6]);
    assert_eq!(rig.world.pinned_bytes(), 67 * PAGE);
    let counters = rig.registry.counters();
    assert_eq!((counters.keys_live, counters.commands), (6, 6));
    assert_eq!((counters.create_depth_max, counters.pinned_bytes), (5, 67 * PAGE));
}

#[test]
fn the_empty_map_has_no_key() {
    let mut rig = Rig::new(config(16));
    rig.set_map(&[]).unwrap();
    assert_eq!((rig.registry.current().map(MapRef::key), rig.log.len()), (None, 0));
    rig.set_map(&small_map(&memory())).unwrap();
    rig.set_map(&[]).unwrap();
    assert_eq!(rig.registry.current().map(MapRef::key), None);
    rig.pass(DELAY);
    assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (0, 0));
}

#[test]
fn only_what_changed_is_built() {
    let memory = memory();
    let mut rig = Rig::new(config(16));
    let mut map = small_map(&memory);
    rig.set_map(&map).unwrap();
    // The same again, in other runs.
    let halves = [(0, 20), (20, 28)]
        .map(|(at, pages)| run(at * PAGE, &memory, at * PAGE, pages * PAGE, Access::ReadWrite));
    let same: Vec<MapRun> = halves.into_iter().chain(map[1..].iter().cloned()).collect();
    rig.set_map(&same).unwrap();
    assert_eq!(rig.log.len(), 6);
    // One piece elsewhere: its key and an indirect one.
    map[1].memory = memory.slice(200 * PAGE, 16 * PAGE).unwrap();
    rig.set_map(&map).unwrap();
    rig.check(&map);
    assert_eq!(rig.log.len(), 8);
    // The old indirect key and the old piece's go later.
    assert_eq!(rig.registry.next_due(rig.now), Some(rig.now.after(DELAY)));
    assert_eq!((rig.world.keys(), rig.registry.counters().backlog_keys), (8, 2));
    rig.pass(DELAY);
    assert_eq!(rig.world.keys(), 6);
    rig.check(&map);
    // Memory at the front: the pieces behind it keep their keys.
    map[0] = run(PAGE, &memory, PAGE, 47 * PAGE, Access::ReadWrite);
    rig.set_map(&map).unwrap();
    rig.check(&map);
}

#[test]
fn a_map_that_comes_back_in_time_is_there() {
    let memory = memory();
    let mut rig = Rig::new(config(16));
    let map = small_map(&memory);
    rig.set_map(&map).unwrap();
    rig.set_map(&map[..1]).unwrap();
    let commands = rig.log.len();
    rig.pass(DELAY / 2);
    rig.set_map(&map).unwrap();
    rig.check(&map);
    assert_eq!(rig.log.len(), commands);
    rig.pass(DELAY * 2);
    assert_eq!(rig.world.keys(), 6);
    rig.check(&map);
}

#[test]
fn without_increments_everything_is_built_again() {
    let mut rig = Rig::new(everything(config(16)));
    let map = small_map(&memory());
    rig.set_map(&map).unwrap();
    rig.set_map(&map).unwrap();
    assert_eq!(rig.log, [0x200; 12]);
    rig.check(&map);
    rig.pass(DELAY);
    assert_eq!(rig.world.keys(), 6);
    rig.check(&map);
}

#[test]
fn a_queue_keeps_its_map() {
    let memory = memory();
    let mut rig = Rig::new(config(16));
    rig.set_map(&small_map(&memory)).unwrap();
    let queue = rig.registry.current().cloned();
    rig.set_map(&small_map(&memory)[..1]).unwrap();
    rig.pass(DELAY * 10);
    assert_eq!(rig.world.keys(), 7);
    let key = queue.as_ref().unwrap().key();
    assert!(rig.world.books().translate(key, 64 * PAGE, Access::Read).is_some());
    drop(queue);
    rig.pass(DELAY - Duration::from_millis(1));
    assert_eq!(rig.world.keys(), 7);
    rig.pass(Duration::from_millis(1));
    assert_eq!(rig.world.keys(), 4);
    rig.world.no_crimes();
}

#[test]
fn deletion_is_later_in_slices_and_gives_way() {
    let memory = memory();
    let mut rig = Rig::new(MemoryConfig { lazy_window: 2, ..config(1) });
    rig.set_map(&[run(0, &memory, 0, 20 * PAGE, Access::ReadWrite)]).unwrap();
    rig.set_map(&[]).unwrap();
    assert_eq!(rig.registry.next_due(rig.now), Some(rig.now.after(DELAY)));
    assert_eq!(rig.issue(), 0);
    rig.now = rig.now.after(DELAY);
    // The indirect key alone, then a slice.
    assert_eq!((rig.issue(), rig.log.last()), (1, Some(&0x202)));
    rig.answer();
    assert_eq!((rig.issue(), rig.log.len()), (2, 24));
    // A new map: its keys go out at once, and nothing is destroyed meanwhile.
    let map = [run(0, &memory, 100 * PAGE, 30 * PAGE, Access::ReadWrite)];
    rig.set_map(&map).unwrap();
    assert_eq!(rig.log[24..], [0x200; 31]);
    rig.check(&map);
    let backlog = rig.registry.counters().backlog_keys;
    assert_eq!(backlog, 18);
    assert_eq!(rig.registry.next_due(rig.now), Some(Instant(0)));
    rig.pump();
    // Destroyed, and then unpinned one by one.
    assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (31, 50 * PAGE));
    assert!(rig.registry.release_one());
    assert_eq!(rig.world.pinned_bytes(), 49 * PAGE);
    while rig.registry.release_one() {}
    assert_eq!(rig.world.pinned_bytes(), 30 * PAGE);
    assert_eq!(rig.registry.counters().destroy_depth_max, 2);
    assert_eq!(rig.registry.next_due(rig.now), None);
}

#[test]
fn without_deferring_the_old_map_goes_at_once() {
    for window in [1, 24] {
        let windows = MemoryConfig { create_window: window, destroy_window: window, ..config(16) };
        let mut rig = Rig::new(at_once(everything(windows)));
        let map = small_map(&memory());
        rig.set_map(&map).unwrap();
        assert!(!rig.registry.must_delete(rig.now));
        rig.set_map(&map).unwrap();
        assert!(rig.registry.must_delete(rig.now));
        rig.pump();
        assert!(!rig.registry.must_delete(rig.now));
        while rig.registry.release_one() {}
        assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (6, 67 * PAGE));
        let counters = rig.registry.counters();
        assert_eq!(counters.create_depth_max, window.min(5));
        assert_eq!(counters.destroy_depth_max, window.min(5));
        assert_eq!((counters.keys_created, counters.keys_destroyed), (12, 6));
        rig.check(&map);
    }
}

/// What a set_map over an old map needs: the commands, counted.
fn second_map(memory: &HostMemory) -> Vec<MapRun> {
    let mut map = small_map(memory);
    map[0].memory = memory.slice(300 * PAGE, 48 * PAGE).unwrap();
    map
}

#[test]
fn a_failure_at_any_command_leaves_the_old_map_and_no_key() {
    let memory = memory();
    let old = small_map(&memory);
    for window in [1, 2, 24] {
        for fault in FAULTS {
            for number in 0..4 {
                let mut rig = Rig::new(MemoryConfig { create_window: window, ..config(16) });
                rig.set_map(&old).unwrap();
                let key = rig.registry.current().map(MapRef::key);
                rig.faults.insert(6 + number, fault);
                let error = rig.set_map(&second_map(&memory)).unwrap_err();
                let lost = matches!(fault, Fault::LostBefore | Fault::LostAfter);
                assert_eq!(matches!(error, VdpaError::Timeout { .. }), lost);
                assert_eq!(rig.registry.current().map(MapRef::key), key);
                rig.check(&old);
                // What may exist although nobody knows stays pinned, if it reaches memory at all.
                let direct_lost = lost && number < 3;
                let abandoned = if direct_lost { 16 * PAGE } else { 0 };
                let counters = rig.registry.counters();
                assert_eq!(counters.keys_live, 6);
                assert_eq!(counters.keys_abandoned, u64::from(lost));
                assert_eq!(counters.abandoned_bytes, abandoned);
                assert_eq!(rig.world.pinned_bytes(), 67 * PAGE + abandoned);
                assert_eq!(rig.world.keys(), 6 + usize::from(fault == Fault::LostAfter));
                // The next attempt is as good as the first.
                rig.set_map(&second_map(&memory)).unwrap();
                rig.check(&second_map(&memory));
                rig.registry.install(None);
                rig.drain();
                assert_eq!(rig.registry.counters().abandoned_bytes, abandoned);
                assert_eq!(rig.world.pinned_bytes(), abandoned);
                rig.world.books().keys.clear();
                rig.registry.forget_all();
                assert_eq!(rig.world.pinned_bytes(), 0);
            }
        }
    }
}

#[test]
fn a_failure_of_the_host_leaves_the_old_map_and_no_key() {
    let memory = memory();
    let old = small_map(&memory);
    for window in [1, 2, 24] {
        for number in 1..=3 {
            let mut rig = Rig::new(MemoryConfig { create_window: window, ..config(16) });
            rig.set_map(&old).unwrap();
            rig.world.books().pin_fault = Some(5 + number);
            let error = rig.set_map(&second_map(&memory)).unwrap_err();
            assert!(matches!(error, VdpaError::Host { .. }), "{error}");
            rig.check(&old);
            assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (6, 67 * PAGE));
        }
    }
}

#[test]
fn a_failure_of_the_rollback_is_counted_and_safe() {
    let memory = memory();
    for fault in FAULTS {
        let mut rig = Rig::new(config(16));
        rig.set_map(&small_map(&memory)).unwrap();
        rig.faults.insert(8, Fault::Refused(Refusal::Final));
        rig.faults.insert(9, fault);
        rig.set_map(&second_map(&memory)).unwrap_err();
        rig.check(&small_map(&memory));
        rig.pass(DELAY);
        let abandoned = u64::from(fault != Fault::Refused(Refusal::Busy));
        let counters = rig.registry.counters();
        assert_eq!((counters.keys_live, counters.keys_abandoned), (6, abandoned));
        assert_eq!(counters.abandoned_bytes, abandoned * 16 * PAGE);
        assert_eq!(rig.world.pinned_bytes(), (67 + abandoned * 16) * PAGE);
    }
}

#[test]
fn memory_stays_pinned_until_its_key_is_gone() {
    let memory = memory();
    for fault in FAULTS {
        // 0 is the indirect key, then direct ones.
        for number in 0..6 {
            let mut rig = Rig::new(config(16));
            rig.set_map(&small_map(&memory)).unwrap();
            rig.set_map(&[]).unwrap();
            rig.faults.insert(6 + number, fault);
            rig.pick = 1;
            rig.pass(DELAY * 2);
            let counters = rig.registry.counters();
            if fault == Fault::Refused(Refusal::Busy) {
                assert_eq!((counters.keys_destroyed, counters.keys_abandoned), (6, 0));
                assert_eq!(rig.world.pinned_bytes(), 0);
            } else {
                assert_eq!((counters.keys_destroyed, counters.keys_abandoned), (5, 1));
                assert_eq!(rig.world.pinned_bytes(), counters.abandoned_bytes);
                assert_eq!(counters.abandoned_bytes == 0, number == 0);
            }
            assert_eq!((counters.keys_live, counters.backlog_keys), (0, 0));
            rig.world.no_crimes();
        }
    }
}

#[test]
fn a_key_that_stays_busy_is_given_up() {
    let mut rig = Rig::new(config(16));
    rig.set_map(&[run(0, &memory(), 0, PAGE, Access::Read)]).unwrap();
    rig.set_map(&[]).unwrap();
    for number in 3..6 {
        rig.faults.insert(number, Fault::Refused(Refusal::Busy));
    }
    rig.pass(DELAY * 2);
    assert_eq!(rig.log, [0x200, 0x200, 0x202, 0x202, 0x202, 0x202]);
    let counters = rig.registry.counters();
    assert_eq!((counters.keys_abandoned, counters.abandoned_bytes), (1, PAGE));
    rig.world.books().keys.clear();
    rig.registry.forget_all();
    assert_eq!((rig.world.pinned_bytes(), rig.registry.counters().abandoned_bytes), (0, 0));
}

#[test]
fn a_late_answer_settles_what_was_abandoned() {
    let memory = memory();
    // CREATE_MKEY of a direct key, and of the indirect one.
    for number in [2, 5] {
        for fault in [Fault::LostBefore, Fault::LostAfter] {
            let mut rig = Rig::new(config(16));
            rig.faults.insert(number, fault);
            rig.set_map(&small_map(&memory)).unwrap_err();
            while rig.registry.release_one() {}
            let created = fault == Fault::LostAfter;
            let bytes = if number == 2 { 16 * PAGE } else { 0 };
            assert_eq!(rig.registry.counters().keys_abandoned, 1);
            assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (created.into(), bytes));
            rig.answer_late();
            rig.pass(DELAY);
            assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (0, 0));
            let counters = rig.registry.counters();
            assert_eq!((counters.keys_abandoned, counters.keys_live), (0, 0));
            assert_eq!(counters.keys_created, counters.keys_destroyed);
        }
    }
    // DESTROY_MKEY of the indirect key, and of a direct one.
    for number in [6, 8] {
        let mut rig = Rig::new(config(16));
        rig.set_map(&small_map(&memory)).unwrap();
        rig.set_map(&[]).unwrap();
        rig.faults.insert(number, Fault::LostAfter);
        rig.pass(DELAY);
        assert_eq!(rig.registry.counters().keys_abandoned, 1);
        rig.answer_late();
        rig.pass(DELAY);
        let counters = rig.registry.counters();
        assert_eq!((counters.keys_abandoned, counters.keys_destroyed), (0, 6));
        assert_eq!(rig.world.pinned_bytes(), 0);
        rig.world.no_crimes();
    }
}

/// Who waits for a drain, or for a deletion at once, waits until what is due next: a late answer
/// must not make that the past while another command is out.
#[test]
fn a_late_answer_leaves_nothing_due_at_once() {
    let memory = memory();
    for config in [config(16), at_once(config(16))] {
        let mut rig = Rig::new(config);
        rig.set_map(&small_map(&memory)).unwrap();
        rig.set_map(&[]).unwrap();
        rig.registry.begin_drain(VdpaError::Gone { action: "map memory" });
        // The indirect key goes; a direct one's answer is lost, the others' are awaited.
        rig.issue();
        assert!(rig.answer());
        rig.issue();
        rig.faults.insert(rig.answered(), Fault::LostAfter);
        assert!(rig.answer());
        let pinned = rig.world.pinned_bytes();
        rig.answer_late();
        assert!(rig.world.pinned_bytes() < pinned, "unpinned at once");
        assert!(!rig.registry.poll_drained(rig.now));
        assert_eq!(rig.registry.next_due(rig.now), None, "only answers are awaited");
        // The drain is given up: the rest goes nevertheless.
        rig.registry.end_drain();
        rig.pump();
        while rig.registry.release_one() {}
        assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (0, 0));
        rig.world.no_crimes();
    }
}

#[test]
fn a_device_without_room_gets_rid_of_old_keys_first() {
    let memory = memory();
    for number in 0..4 {
        let mut rig = Rig::new(config(16));
        rig.set_map(&small_map(&memory)).unwrap();
        rig.set_map(&[run(0, &memory, 500 * PAGE, PAGE, Access::Read)]).unwrap();
        // Six keys of the first map wait for their time.
        rig.faults.insert(8 + number, Fault::Refused(Refusal::NoRoom));
        rig.set_map(&second_map(&memory)).unwrap();
        rig.check(&second_map(&memory));
        // The two read-only ends are shared, so only what nobody has is destroyed.
        let destroyed = rig.log.iter().filter(|opcode| **opcode == 0x202).count();
        assert_eq!(destroyed, 4);
        rig.pass(DELAY);
        assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (6, 67 * PAGE));
    }
}

#[test]
fn a_drain_waits_for_nothing_and_says_what_is_held() {
    let memory = memory();
    let mut rig = Rig::new(config(16));
    rig.set_map(&small_map(&memory)).unwrap();
    let queue = rig.registry.current().cloned();
    rig.set_map(&second_map(&memory)).unwrap();
    rig.registry.install(None);
    rig.drain();
    let counters = rig.registry.counters();
    assert_eq!((counters.maps_held, counters.keys_abandoned), (1, 0));
    assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (6, 67 * PAGE));
    drop(queue);
    rig.drain();
    assert_eq!(rig.registry.counters().maps_held, 0);
    assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (0, 0));
    rig.world.no_crimes();
}

#[test]
fn a_build_can_be_cancelled_at_any_moment() {
    let memory = memory();
    for moment in 0..=4 {
        let mut rig = Rig::new(config(16));
        rig.set_map(&small_map(&memory)).unwrap();
        rig.registry.begin_set_map(&second_map(&memory)).unwrap();
        rig.issue();
        for _ in 0..moment.min(3) {
            rig.answer();
        }
        if moment > 3 {
            // The indirect key is on its way.
            assert_eq!(rig.issue(), 1);
        }
        let error = VdpaError::Gone { action: "map memory" };
        rig.registry.cancel_set_map(error.clone());
        rig.pump();
        assert_eq!(rig.registry.poll_set_map(), Some(Err(error)));
        rig.check(&small_map(&memory));
        assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (6, 67 * PAGE));
    }
}

#[test]
fn one_build_at_a_time() {
    let mut rig = Rig::new(config(16));
    let map = small_map(&memory());
    rig.registry.begin_set_map(&map).unwrap();
    assert!(matches!(rig.registry.begin_set_map(&map), Err(VdpaError::Invalid { .. })));
}

#[test]
fn what_is_let_go_with_its_keys_stays_pinned() {
    let mut rig = Rig::new(config(16));
    rig.set_map(&small_map(&memory())).unwrap();
    let world = rig.world.clone();
    drop(rig);
    assert_eq!(world.pinned_bytes(), 67 * PAGE);
    world.no_crimes();
}

#[test]
fn a_hole_of_more_than_1_gib_is_a_hole_everywhere() {
    let memory = fake_memory(1 << 40, 8 * GIB);
    let mut rig = Rig::new(MemoryConfig::default());
    // The second run begins before its second piece; the first piece's end is no multiple.
    let map = [
        run(0, &memory, 0, PAGE, Access::ReadWrite),
        run(3 * GIB + GIB / 2, &memory, GIB, GIB, Access::ReadWrite),
        run(9 * GIB, &memory, 4 * GIB, PAGE, Access::Read),
    ];
    rig.set_map(&map).unwrap();
    assert_eq!(rig.world.keys(), 5);
    for gib in 1..36 {
        let expected = match gib {
            14..18 => Some((1 << 40) + GIB + (gib - 14) * GIB / 4),
            _ => None,
        };
        assert_eq!(rig.translate(gib * GIB / 4, Access::Read), expected, "{gib}");
    }
    assert_eq!(rig.translate(9 * GIB - 1, Access::Read), None);
    assert_eq!(rig.translate(9 * GIB, Access::Read), Some((1 << 40) + 4 * GIB));
    assert_eq!(rig.translate(9 * GIB, Access::Write), None);
}

#[test]
fn a_map_with_more_holes_than_entries_is_refused() {
    let memory = memory();
    let mut rig = Rig::new(MemoryConfig::default());
    let ends = [0, 1 << 60].map(|iova| run(iova, &memory, 0, PAGE, Access::Read));
    let error = rig.set_map(&ends).unwrap_err();
    assert!(matches!(error, VdpaError::Invalid { .. }), "{error}");
    assert!(rig.log.is_empty());
}

/// 256 GiB as a q35 machine has them.
fn large_map(memory: &HostMemory) -> Vec<MapRun> {
    let low = 2 * GIB;
    vec![
        run(0, memory, 0, 640 << 10, Access::ReadWrite),
        run(1 << 20, memory, 1 << 20, low - (1 << 20), Access::ReadWrite),
        run(4 * GIB, memory, low, 254 * GIB, Access::ReadWrite),
    ]
}

#[test]
fn a_guest_of_256_gib_has_258_keys() {
    let memory = fake_memory(1 << 40, 256 * GIB);
    let mut rig = Rig::new(MemoryConfig::default());
    rig.set_map(&large_map(&memory)).unwrap();
    let counters = rig.registry.counters();
    assert_eq!((counters.keys_created, counters.commands), (258, 258));
    assert_eq!(counters.create_depth_max, MemoryConfig::default().create_window);
    // Pieces that are round: an entry each, but for the two below 1 GiB. 257 pieces and the holes
    // at 640 KiB and 2 GiB (two entries): the window's lists are short.
    assert!(counters.staged_bytes_max < 32 << 10, "{counters:?}");
    assert_eq!(rig.translate(257 * GIB + 5, Access::Write), Some((1 << 40) + 255 * GIB + 5));
    assert_eq!(rig.translate(3 * GIB, Access::Read), None);
    // 2 GiB more, hot-plugged: two keys and an indirect one.
    let more = fake_memory(1 << 41, 2 * GIB);
    let mut map = large_map(&memory);
    map.push(run(258 * GIB, &more, 0, 2 * GIB, Access::ReadWrite));
    rig.set_map(&map).unwrap();
    assert_eq!(rig.log.len(), 258 + 3);
    assert_eq!(rig.translate(259 * GIB, Access::Read), Some((1 << 41) + GIB));
    rig.world.no_crimes();
}

#[test]
fn lists_are_staged_within_a_limit() {
    let memory = fake_memory(1 << 40, 4 * GIB);
    // Pages of 4 KiB all over: 2 MiB of list for 1 GiB. Pieces of 256 MiB, to be quick.
    let staged_bytes_max = 2 << 20;
    let config = MemoryConfig { piece_bytes: GIB / 4, staged_bytes_max, ..MemoryConfig::default() };
    let mut rig = Rig::new(config);
    rig.world.books().fragments = vec![1, 2, 1, 3];
    rig.set_map(&[run(0, &memory, 0, 2 * GIB, Access::ReadWrite)]).unwrap();
    let counters = rig.registry.counters();
    assert_eq!(counters.create_depth_max, 3);
    assert_eq!(counters.staged_bytes_max, 3 * (272 + (512 << 10)));
    // One that is longer than the limit still goes, alone.
    let mut rig = Rig::new(MemoryConfig { staged_bytes_max: 4096, ..config });
    rig.world.books().fragments = vec![1];
    rig.set_map(&[run(0, &memory, 0, GIB / 2, Access::ReadWrite)]).unwrap();
    assert_eq!(rig.registry.counters().create_depth_max, 1);
}
