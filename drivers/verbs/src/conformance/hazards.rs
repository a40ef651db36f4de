//! Why a page must not be posted again before a drain, shown on the device itself.

use super::bed::{Bed, completions};
use super::{LateRead, Profile, Site, Violation, expect};
use crate::fabric::{QueuePair, Setup};
use crate::work::{Signal, Status, WorkRequest};

/// Where pages that only keep the device busy come from and go to.
const BUSY_AT: usize = 1 << 20;
/// Bytes of one such write.
const BUSY_BYTES: u32 = 64 << 10;

/// Unsignalled writes that keep the device busy.
fn backlog<S: Site>(bed: &Bed<S>, profile: &Profile) -> Vec<WorkRequest> {
    let count = profile.backlog_bytes / usize::try_from(BUSY_BYTES).unwrap_or(1);
    (0..count)
        .map(|id| bed.write(id as u64, BUSY_AT, BUSY_AT, BUSY_BYTES))
        .map(|request| WorkRequest { signal: Signal::None, ..request })
        .collect()
}

pub(super) fn late_source_read<S: Site>(site: &S, profile: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let mut late = 0;
    for trial in 0..profile.trials {
        bed.from.fill(4096, 4096, 1);
        let mut list = backlog(&bed, profile);
        list.push(bed.write(1000, 4096, 4096, 4096));
        bed.source.post(&list)?;
        bed.from.fill(4096, 4096, 2);
        let came = completions(&mut bed.source, 1)?;
        let done = came[0].status == Status::SUCCESS;
        expect(done, || format!("trial {trial}: {:?}", came[0]))?;
        let seen = bed.to.read(4096, 4096);
        let known = seen.iter().all(|&byte| byte == 1 || byte == 2);
        expect(known, || "bytes landed that the source never held".to_owned())?;
        late += u32::from(seen.contains(&2));
    }
    let trials = profile.trials;
    let shown = late > 0 || profile.late_read == LateRead::MayHide;
    expect(shown, || format!("in {trials} trials no store after the post was seen to travel"))?;
    Ok(format!("a store after the post travelled in {late} of {trials}"))
}

pub(super) fn stale_page<S: Site>(site: &S, profile: &Profile) -> Result<String, Violation> {
    let without = count_stale(site, profile, Drain::No)?;
    let with = count_stale(site, profile, Drain::Yes)?;
    let trials = profile.trials;
    expect(with == 0, || format!("with the drain {with} of {trials} pages are stale"))?;
    // Else this shows nothing.
    expect(without > 0, || format!("without the drain none of {trials} pages is stale"))?;
    Ok(format!("stale without the drain {without} of {trials}, with it {with}"))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Drain {
    Yes,
    No,
}

/// An older version of a page goes by one queue pair, behind a backlog; the newer one by another.
/// How often the older one is there at last.
fn count_stale<S: Site>(site: &S, profile: &Profile, drain: Drain) -> Result<u32, Violation> {
    let mut bed = Bed::new(site)?;
    let setup = Setup::default();
    let mut second = site.connect(&setup, &setup, &[], &[])?;
    let mut stale = 0;
    for trial in 0..profile.trials {
        let [old, new] = [1, 2].map(|kind| u8::try_from(trial * 2 % 200 + kind).unwrap_or(0));
        bed.from.fill(4096, 4096, old);
        bed.from.fill(8192, 4096, new);
        let mut list = backlog(&bed, profile);
        list.push(bed.write(1000, 4096, 4096, 4096));
        bed.source.post(&list)?;
        if drain == Drain::Yes {
            completions(&mut bed.source, 1)?;
        }
        second.source.post(&[bed.write(1001, 8192, 4096, 4096)])?;
        completions(&mut second.source, 1)?;
        if drain == Drain::No {
            completions(&mut bed.source, 1)?;
        }
        stale += u32::from(bed.to.is_all(4096, 4096, old));
    }
    Ok(stale)
}
