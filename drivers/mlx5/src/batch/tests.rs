//! Tests of the batch executor; the command queue's own stand-in for firmware plays the device.

use super::*;
use crate::command::End;
use crate::command::tests::{Firmware, QUERY, modify, output_of};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);

fn batch_of(count: usize, window: usize) -> Batch {
    let mut batch = Batch::new(window, 5 * MS);
    for number in 0..count {
        batch.push(modify(u32::try_from(number).unwrap()));
    }
    batch
}

/// Polls until nothing moves any more; the firmware answers everything at each step. The most
/// commands that were out at a time.
fn run(batch: &mut Batch, queue: &mut CommandQueue, firmware: &mut Firmware) -> usize {
    let now = Instant(0);
    let mut most_out = 0;
    for _ in 0..1000 {
        if batch.poll(now, queue) {
            return most_out;
        }
        most_out = most_out.max(batch.outstanding.len());
        firmware.ring(queue);
        let vector = firmware.answer_all();
        queue.on_completion(now, vector);
    }
    panic!("the batch does not end");
}

#[test]
fn a_window_is_kept_and_all_results_are_there() {
    for window in [1, 3, 16, 40] {
        let (mut queue, mut firmware) = Firmware::new();
        let mut batch = batch_of(40, window);
        let most_out = run(&mut batch, &mut queue, &mut firmware);
        assert!(batch.results().all(Result::is_ok));
        assert_eq!(batch.results().count(), 40);
        // 31 ordinary slots, 16 permits.
        assert_eq!(most_out, window.min(16));
        let in_order: Vec<usize> = std::iter::from_fn(|| batch.poll_item()).collect();
        assert_eq!(in_order, (0..40).collect::<Vec<_>>());
    }
}

#[test]
fn a_follower_goes_as_soon_as_its_predecessor_is_done() {
    let (mut queue, mut firmware) = Firmware::new();
    let mut batch = Batch::new(2, 5 * MS);
    let first: Vec<usize> = (0..2).map(|n| batch.push(modify(n))).collect();
    let second: Vec<usize> = first
        .iter()
        .map(|n| batch.push_after(Request::with_output(QUERY, &[0_u8; 16], 208), *n))
        .collect();
    let now = Instant(0);
    batch.poll(now, &mut queue);
    firmware.ring(&mut queue);
    let vector = firmware.answer(0);
    queue.on_completion(now, vector);
    batch.poll(now, &mut queue);
    assert_eq!(firmware.ring(&mut queue), 1, "the follower of item 0, though 1 is not done");
    firmware.fail_next(CommandStatus::LIMIT, 7);
    let vector = firmware.answer(1);
    queue.on_completion(now, vector);
    batch.poll(now, &mut queue);
    let opcode = QUERY;
    let skipped = Err(CommandError::Skipped { opcode });
    assert_eq!(batch.result(second[1]), Some(&skipped));
    let vector = firmware.answer_all();
    queue.on_completion(now, vector);
    assert!(batch.poll(now, &mut queue));
    assert!(batch.result(second[0]).unwrap().is_ok());
}

#[test]
fn when_busy_with_others_it_waits() {
    let (mut queue, mut firmware) = Firmware::new();
    let now = Instant(0);
    let held: Vec<_> = (0..16).map(|n| queue.submit(now, 5 * MS, &modify(n)).unwrap()).collect();
    firmware.ring(&mut queue);
    let mut batch = batch_of(20, 16);
    assert!(!batch.poll(now, &mut queue));
    assert_eq!(batch.outstanding.len(), 0);
    assert!(batch.poll_timeout(now).is_some());
    // One of the others ends.
    let vector = firmware.answer(0);
    queue.on_completion(now, vector);
    assert!(queue.take_done(held[0]).is_some());
    assert!(!batch.poll(now, &mut queue));
    assert_eq!(batch.outstanding.len(), 1);
    run(&mut batch, &mut queue, &mut firmware);
    assert!(batch.results().all(Result::is_ok));
}

#[test]
fn when_others_never_end_it_gives_up_after_its_deadline() {
    let (mut queue, mut firmware) = Firmware::new();
    for n in 0..16 {
        queue.submit(Instant(0), 500 * MS, &modify(n)).unwrap();
    }
    firmware.ring(&mut queue);
    let mut batch = batch_of(2, 16);
    assert!(!batch.poll(Instant(0), &mut queue));
    let late = Instant(0).after(5 * MS);
    assert!(batch.poll(late, &mut queue));
    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
    let because = SubmitError::Busy;
    assert_eq!(batch.result(0), Some(&Err(CommandError::NotIssued { opcode, because })));
    assert_eq!(batch.result(1), Some(&Err(CommandError::Skipped { opcode })));
}

#[test]
fn what_completed_counts_though_issuing_stopped() {
    let (mut queue, mut firmware) = Firmware::new();
    let now = Instant(0);
    let mut batch = batch_of(8, 2);
    batch.poll(now, &mut queue);
    firmware.ring(&mut queue);
    let vector = firmware.answer(0);
    queue.on_completion(now, vector);
    // The device goes while item 1 is out.
    queue.on_end(now, End::Gone);
    assert!(batch.poll(now, &mut queue));
    assert!(batch.result(0).unwrap().is_ok());
    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
    assert_eq!(batch.result(1), Some(&Err(CommandError::Gone { opcode })));
    let because = SubmitError::Gone;
    assert_eq!(batch.result(2), Some(&Err(CommandError::NotIssued { opcode, because })));
}

#[test]
fn without_memory_for_all_it_goes_on_with_what_there_is() {
    // One chunk of 64 mailboxes; each command takes 20.
    let (mut queue, mut firmware) = Firmware::with_mailboxes(64 * 1024);
    let mut batch = Batch::new(16, 5 * MS);
    for _ in 0..12 {
        batch.push(Request::with_output(Opcode::CREATE_MKEY, &[1_u8; 16 + 512 * 20], 16));
    }
    assert_eq!(run(&mut batch, &mut queue, &mut firmware), 3);
    assert!(batch.results().all(Result::is_ok));
    // One that never fits is an error, not a wait.
    let mut batch = Batch::new(16, 5 * MS);
    batch.push(Request::with_output(Opcode::CREATE_MKEY, &[1_u8; 16 + 512 * 65], 16));
    assert!(batch.poll(Instant(0), &mut queue));
    let because = SubmitError::NoMailboxes { needed: 65 };
    let opcode = Opcode::CREATE_MKEY;
    assert_eq!(batch.result(0), Some(&Err(CommandError::NotIssued { opcode, because })));
}

proptest! {
    /// Whatever the device answers, and in which order: every item ends once, nothing is left in
    /// the queue, and no more than the window is ever out.
    #[test]
    fn it_always_drains(
        count in 1_usize..60,
        window in 1_usize..20,
        answers in prop::collection::vec((any::<u8>(), any::<u8>()), 1..300),
    ) {
        let (mut queue, mut firmware) = Firmware::new();
        let mut batch = batch_of(count, window);
        let mut time = 0;
        let mut answers = answers.into_iter().cycle();
        while !batch.poll(Instant(time), &mut queue) {
            prop_assert!(batch.outstanding.len() <= window);
            firmware.ring(&mut queue);
            let (pick, how) = answers.next().unwrap();
            match how % 5 {
                0 => firmware.fail_next(CommandStatus(how.max(1)), 3),
                1 => firmware.deliver_next(DeliveryStatus(how >> 1)),
                2 => firmware.spoil_token(),
                _ => {}
            }
            let vector = firmware.answer_one_of(pick.into());
            // Some answers come without an event.
            if how % 7 != 0 {
                queue.on_completion(Instant(time), vector);
            }
            time += 1_000_000;
            queue.on_timeout(Instant(time));
            prop_assert!(time < 1_000_000_000, "no end");
        }
        prop_assert_eq!(batch.results().count(), count);
        let ended: Vec<usize> = std::iter::from_fn(|| batch.poll_item()).collect();
        prop_assert_eq!(ended.len(), count);
        prop_assert!(queue.is_idle());
        for output in batch.results().flatten() {
            prop_assert_eq!(output.bytes(), &output_of(16)[..]);
        }
    }
}
