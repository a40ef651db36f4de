//! What must not be possible.

use super::bed::{
    ARENA_BYTES, Bed, REGION_AT, REGION_BYTES, all_access, completions, expect_status,
};
use super::{LocalFailure, Profile, Site, Violation, expect};
use crate::fabric::{Fabric, Link, QueuePair, Region, Setup};
use crate::work::{
    Access, Lkey, Operation, RemoteAddress, Rkey, Sge, Signal, Status, WorkId, WorkRequest,
};

const LOCAL: &[Status] = &[Status::LOCAL_PROTECTION, Status::LOCAL_OPERATION];

pub(super) fn wrong_key<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    for flip in [0x80, 0x4000_0000, 0xffff_ffff] {
        let mut bed = Bed::new(site)?;
        bed.from.fill(4096, 4096, 1);
        let Rkey(key) = bed.key();
        let operation = Operation::Write { to: bed.remote(4096), key: Rkey(key ^ flip) };
        let request = WorkRequest { operation, ..bed.write(1, 4096, 4096, 4096) };
        bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
        bed.expect_untouched()?;
    }
    Ok(String::new())
}

pub(super) fn out_of_bounds<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let end = REGION_AT + REGION_BYTES;
    for (at, bytes) in [(end - 4095, 4096), (REGION_AT - 1, 2), (end, 1), (0, 4096)] {
        let mut bed = Bed::new(site)?;
        bed.from.fill(4096, 4096, 1);
        let request = bed.write(1, 4096, at, bytes);
        bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
        bed.expect_margins_clean()?;
    }
    let mut bed = Bed::new(site)?;
    let operation = Operation::Write { to: RemoteAddress(u64::MAX - 100), key: bed.key() };
    let request = WorkRequest { operation, ..bed.write(1, 4096, 0, 4096) };
    bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
    bed.expect_untouched()?;
    Ok(String::new())
}

pub(super) fn wrong_access<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    for access in [Access::LOCAL_WRITE, Access::REMOTE_READ, Access::empty()] {
        let mut bed = Bed::with(site, &Setup::default(), access)?;
        bed.from.fill(4096, 4096, 1);
        let request = bed.write(1, 4096, 4096, 4096);
        bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
        bed.expect_untouched()?;
    }
    Ok(String::new())
}

pub(super) fn no_read_access<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mut bed = Bed::with(site, &Setup::default(), access)?;
    bed.to.fill(4096, 4096, 1);
    let operation = Operation::Read { from: bed.remote(4096), key: bed.key() };
    let request = WorkRequest { operation, ..bed.write(1, 4096, 4096, 4096) };
    bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
    expect(bed.from.is_all(4096, 4096, 0), || "bytes were read all the same".to_owned())?;
    Ok(String::new())
}

pub(super) fn local_key<S: Site>(site: &S, profile: &Profile) -> Result<String, Violation> {
    let lost = profile.local_failure == LocalFailure::MayBeFlushed;
    let mut seen = Vec::new();
    for beyond in [false, true] {
        let mut bed = Bed::new(site)?;
        bed.from.fill(0, ARENA_BYTES, 1);
        let good = bed.write(1, 4096, 4096, 4096);
        bed.execute(&[good])?;
        let bad = bed.write(2, 4096, 8192, 4096);
        let Lkey(key) = bad.local.key;
        let local = if beyond {
            bed.local(REGION_AT + REGION_BYTES - 4095, 4096)
        } else {
            Sge { key: Lkey(key ^ 0x80), ..bad.local }
        };
        bed.source.post(&[WorkRequest { local, ..bad }, bed.write(3, 4096, 8192, 4096)])?;
        let came = completions(&mut bed.source, 2)?;
        let status = came[0].status;
        let told = LOCAL.contains(&status) || (lost && status.is_flush());
        expect(told && came[0].id == WorkId(2), || {
            format!("a wrong local key gives {:?}", came[0])
        })?;
        expect_status(&came[1], WorkId(3), Status::FLUSHED)?;
        let clean = bed.to.is_all(8192, 4096, 0);
        expect(clean, || "bytes that no key covers were sent".to_owned())?;
        let link = bed.source.link();
        expect(link == Link::Failed, || format!("the link is {link:?}"))?;
        seen.push(status.to_string());
    }
    seen.dedup();
    Ok(seen.join("; "))
}

pub(super) fn deregistered<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let short = site.target().register(&bed.to.memory(4096, 8192), all_access())?;
    bed.from.fill(4096, 4096, 1);
    let operation = Operation::Write { to: bed.remote(4096), key: short.remote_key() };
    let request = WorkRequest { operation, ..bed.write(1, 4096, 4096, 4096) };
    bed.execute(&[request])?;
    short.deregister()?;
    bed.from.fill(4096, 4096, 2);
    bed.expect_failure(&request, &[Status::REMOTE_ACCESS])?;
    expect(bed.to.is_all(4096, 4096, 1), || "a key without a region still works".to_owned())?;
    Ok(String::new())
}

pub(super) fn deregistered_under_fire<S: Site>(
    site: &S,
    profile: &Profile,
) -> Result<String, Violation> {
    let mut interrupted = 0;
    for trial in 0..profile.trials.min(8) {
        let mut bed = Bed::new(site)?;
        let bytes = 1 << 20;
        let prey = site.target().register(&bed.to.memory(1 << 20, bytes), all_access())?;
        let operation = Operation::Write { to: bed.remote(1 << 20), key: prey.remote_key() };
        bed.from.fill(1 << 20, bytes, 1);
        let list: Vec<WorkRequest> = (0..8)
            .map(|id| bed.write(id, 1 << 20, 0, u32::try_from(bytes).unwrap_or(0)))
            .map(|request| WorkRequest { operation, ..request })
            .collect();
        bed.source.post(&list)?;
        if trial % 2 == 1 {
            completions(&mut bed.source, 1)?;
        }
        prey.deregister()?;
        // From here on nothing may change, whatever was in flight.
        bed.to.fill(1 << 20, bytes, 0xee);
        let left = 8 - usize::from(trial % 2 == 1);
        let came = completions(&mut bed.source, left)?;
        let clean = bed.to.is_all(1 << 20, bytes, 0xee);
        expect(clean, || "memory was written after it was deregistered".to_owned())?;
        let mut failed = came.iter().filter(|one| one.status != Status::SUCCESS);
        if let Some(first) = failed.next() {
            interrupted += 1;
            let right = first.status == Status::REMOTE_ACCESS;
            expect(right, || format!("the first to fail says {first:?}"))?;
            let flushed = failed.all(|one| one.status == Status::FLUSHED);
            expect(flushed, || format!("not all others are flushed: {came:?}"))?;
        }
        bed.expect_margins_clean()?;
    }
    Ok(format!("{interrupted} of {} caught writes in flight", profile.trials.min(8)))
}

pub(super) fn no_receive<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let write = |bed: &Bed<S>, id, signal| {
        let (to, key) = (bed.remote(4096), bed.key());
        let operation = Operation::WriteWithImmediate { to, key, immediate: 3 };
        WorkRequest { operation, signal, ..bed.write(id, 4096, 4096, 4096) }
    };
    let setup = Setup { rnr_retries: 0, ..Setup::default() };
    let mut bed = Bed::with(site, &setup, all_access())?;
    bed.source.post(&[write(&bed, 1, Signal::None), write(&bed, 2, Signal::Completion)])?;
    let came = completions(&mut bed.source, 2)?;
    expect_status(&came[0], WorkId(1), Status::RNR_RETRY_EXCEEDED)?;
    expect_status(&came[1], WorkId(2), Status::FLUSHED)?;

    let mut bed = Bed::new(site)?;
    bed.from.fill(4096, 3 * 4096, 1);
    let behind = bed.write(3, 4096, 8192, 4096);
    bed.source.post(&[write(&bed, 1, Signal::Completion), behind])?;
    let mut place = [crate::Completion::default()];
    bed.source.wait(std::time::Duration::from_millis(30))?;
    let early = bed.source.poll(&mut place)?;
    expect(early == 0, || format!("done without a receive: {:?}", place[0]))?;
    let early = !bed.to.is_all(8192, 4096, 0);
    expect(!early, || "a later write overtook one that waits".to_owned())?;
    // A write the other way is not held up by it.
    bed.target.post_receives(&[WorkId(9)])?;
    let came = completions(&mut bed.source, 2)?;
    expect_status(&came[0], WorkId(1), Status::SUCCESS)?;
    expect_status(&came[1], WorkId(3), Status::SUCCESS)?;
    let told = completions(&mut bed.target, 1)?;
    expect(told[0].immediate == Some(3), || format!("the receive says {:?}", told[0]))?;
    expect(bed.to.is_all(4096, 8192, 1), || "a write that waited did not land".to_owned())?;
    Ok(String::new())
}
