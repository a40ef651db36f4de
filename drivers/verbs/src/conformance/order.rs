//! What comes before what.

use super::bed::{Bed, completions, expect_status};
use super::{Profile, Site, Violation, expect};
use crate::error::{Failure, FirstCause};
use crate::fabric::{Link, QueuePair, Setup};
use crate::work::{Operation, Rkey, Signal, Status, WorkId, WorkRequest};

pub(super) fn later_write_stays<S: Site>(site: &S, profile: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    for trial in 0..profile.trials {
        let [old, new] = [1, 2].map(|kind| u8::try_from(trial * 2 % 200 + kind).unwrap_or(0));
        bed.from.fill(4096, 8192, old);
        bed.from.fill(4096 * 3, 8192, new);
        let mut list: Vec<WorkRequest> = (0..16)
            .map(|index| bed.write(index, 1 << 20, (1 << 20) + 8192, 16 << 10))
            .chain([bed.write(20, 4096, 4096, 8192), bed.write(21, 4096 * 3, 4096, 8192)])
            .collect();
        let last = list.len() - 1;
        for request in &mut list[..last] {
            request.signal = Signal::None;
        }
        bed.execute(&list)?;
        let right = bed.to.is_all(4096, 8192, new);
        expect(right, || format!("trial {trial}: the older version is there"))?;
    }
    Ok(String::new())
}

pub(super) fn unsignalled<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    bed.from.fill(4096, 100 * 4096, 9);
    let mut list: Vec<WorkRequest> = (1..=100)
        .map(|page| bed.write(page as u64, page * 4096, page * 4096, 4096))
        .map(|request| WorkRequest { signal: Signal::None, ..request })
        .collect();
    list[99].signal = Signal::Completion;
    bed.source.post(&list)?;
    let came = completions(&mut bed.source, 1)?;
    expect_status(&came[0], WorkId(100), Status::SUCCESS)?;
    expect(bed.to.is_all(4096, 100 * 4096, 9), || "an unsignalled write is missing".to_owned())?;
    // Nothing else may come: the next completion is the next request's.
    let request = bed.write(200, 4096, 4096, 4096);
    bed.execute(&[request])?;
    Ok(String::new())
}

pub(super) fn slots_come_back<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let setup = Setup { send_slots: 32, completion_slots: 64, ..Setup::default() };
    let mut bed = Bed::with(site, &setup, super::bed::all_access())?;
    let slots = u64::from(bed.source.send_slots());
    expect(slots >= 32, || format!("asked for 32 slots, got {slots}"))?;
    for round in 0..20 {
        let mut list: Vec<WorkRequest> = (0..slots)
            .map(|slot| bed.write(round * slots + slot, 4096, 8192, 512))
            .map(|request| WorkRequest { signal: Signal::None, ..request })
            .collect();
        if let Some(last) = list.last_mut() {
            last.signal = Signal::Completion;
        }
        bed.execute(&list)?;
    }
    Ok(format!("{slots} slots"))
}

pub(super) fn flush_order<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    bed.from.fill(4096, 4096, 1);
    bed.source.post_receives(&[WorkId(50), WorkId(51)])?;
    let good = bed.write(1, 4096, 4096, 4096);
    let Rkey(key) = bed.key();
    let operation = Operation::Write { to: bed.remote(8192), key: Rkey(key ^ 0x80) };
    let bad = WorkRequest { operation, ..bed.write(2, 4096, 8192, 4096) };
    let silent = WorkRequest { signal: Signal::None, ..bed.write(3, 4096, 3 * 4096, 4096) };
    let after = bed.write(4, 4096, 4 * 4096, 4096);
    bed.source.post(&[good, bad, silent, after])?;
    let came = completions(&mut bed.source, 6)?;
    let (receives, sends): (Vec<_>, Vec<_>) =
        came.iter().partition(|completion| completion.side == crate::Side::Receive);
    let statuses = [Status::SUCCESS, Status::REMOTE_ACCESS, Status::FLUSHED, Status::FLUSHED];
    expect(sends.len() == statuses.len(), || format!("four sends end as {sends:?}"))?;
    let mut cause = FirstCause::default();
    for (id, (completion, status)) in (1..).zip(sends.into_iter().zip(statuses)) {
        expect_status(completion, WorkId(id), status)?;
        cause.on_completion(completion);
    }
    let first = Failure { id: WorkId(2), status: Status::REMOTE_ACCESS };
    expect(cause.cause() == Some(first), || format!("the cause is {:?}", cause.cause()))?;
    for (id, receive) in (50..).zip(&receives) {
        let flushed = receive.id == WorkId(id) && receive.status == Status::FLUSHED;
        expect(flushed, || format!("a receive ends as {receive:?}"))?;
    }
    // Nothing after the failure was written, and nothing that is posted later will be.
    bed.expect_failure(&after, &[Status::FLUSHED])?;
    let landed = bed.to.is_all(4096, 4096, 1) && bed.to.is_all(8192, 3 * 4096, 0);
    expect(landed, || "a request after the failure was executed".to_owned())?;
    super::bed::eventually(&mut bed.target, "the failure at the target", |pair| {
        pair.link() != Link::Up
    })?;
    Ok(format!("{:?} at the source", bed.source.link()))
}
