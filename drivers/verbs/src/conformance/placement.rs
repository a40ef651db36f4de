//! Bytes go where they should, and nowhere else.

use super::bed::{Bed, REGION_AT, REGION_BYTES, all_access, completions};
use super::{Profile, Site, Violation, expect};
use crate::fabric::{Fabric, QueuePair, Region, Setup};
use crate::window::{Flush, SendWindow};
use crate::work::{Completion, Operation, Rkey, Sge, Side, Signal, Status, WorkId, WorkRequest};

pub(super) fn write_lands<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let end = REGION_AT + REGION_BYTES;
    let places = [
        (REGION_AT, 1),
        (REGION_AT + 4095, 2),
        (3 * 4096, 4096),
        (1 << 16, (1 << 20) + 1),
        (end - 1, 1),
        (2 << 20, 4097),
    ];
    for (id, (at, bytes)) in (1u8..).zip(places) {
        let from = end - bytes;
        bed.from.fill(from, bytes, id);
        let before = bed.to.read(0, at);
        let behind = bed.to.read(at + bytes, 4096);
        let request = bed.write(u64::from(id), from, at, u32::try_from(bytes).unwrap_or(0));
        bed.execute(&[request])?;
        let right = bed.to.is_all(at, bytes, id);
        expect(right, || format!("{bytes} bytes at {at} did not land"))?;
        let clean = bed.to.read(0, at) == before && bed.to.read(at + bytes, 4096) == behind;
        expect(clean, || format!("{bytes} bytes at {at} changed what is beside them"))?;
    }
    bed.expect_margins_clean()?;
    Ok(String::new())
}

pub(super) fn empty_write<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let request = WorkRequest { local: Sge::default(), ..bed.write(5, 4096, 4096, 0) };
    bed.execute(&[request])?;
    bed.expect_untouched()?;
    // As a marker it completes after what was posted before.
    bed.from.fill(4096, 1 << 20, 3);
    let silent = WorkRequest { signal: Signal::None, ..bed.write(6, 4096, 4096, 1 << 20) };
    bed.execute(&[silent, WorkRequest::marker(WorkId(7))])?;
    let landed = bed.to.is_all(4096, 1 << 20, 3);
    expect(landed, || "a marker completed before what was posted before it".to_owned())?;
    Ok(String::new())
}

/// A permutation of `0..count` that jumps around; `count` is a power of two.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| (index * 397 + 11) % count)
}

pub(super) fn many_in_flight<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let pages = 512;
    let value = |page: usize| u8::try_from(page % 251 + 1).unwrap_or(0);
    for page in 0..pages {
        bed.from.fill((page + 1) * 4096, 4096, value(page));
    }
    let mut window = SendWindow::new(64);
    let mut list = Vec::new();
    let mut places = [Completion::default(); 16];
    // Each page goes to another place, in four passes with nothing but completions in between.
    let mut todo = (0..4).flat_map(|_| scattered(pages)).peekable();
    while todo.peek().is_some() || window.in_flight() > 0 {
        list.clear();
        while window.free() > 0
            && let Some(page) = todo.next()
        {
            let flush = if todo.peek().is_none() { Flush::Last } else { Flush::MoreComes };
            let Some((id, signal)) = window.take(flush) else { break };
            let (from, to) = ((page + 1) * 4096, (pages - page) * 4096);
            list.push(WorkRequest { signal, ..bed.write(id.0, from, to, 4096) });
        }
        bed.source.post(&list)?;
        let came = completions(&mut bed.source, 1)?;
        let more = bed.source.poll(&mut places)?;
        for completion in came.iter().chain(&places[..more]) {
            let done = completion.status == Status::SUCCESS;
            expect(done, || format!("a write failed: {completion:?}"))?;
            window.on_completion(completion);
        }
    }
    for page in 0..pages {
        let landed = bed.to.is_all((pages - page) * 4096, 4096, value(page));
        expect(landed, || format!("page {page} did not land"))?;
    }
    bed.expect_margins_clean()?;
    Ok(String::new())
}

pub(super) fn two_pairs<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    let setup = Setup::default();
    let mut second = site.connect(&setup, &setup, &[], &[])?;
    bed.from.fill(4096, 4096, 0x11);
    bed.from.fill(8192, 4096, 0x22);
    let request = bed.write(2, 8192, 8192, 4096);
    second.source.post(&[request])?;
    completions(&mut second.source, 1)?;
    let request = bed.write(1, 4096, 4096, 4096);
    bed.execute(&[request])?;
    let landed = bed.to.is_all(4096, 4096, 0x11) && bed.to.is_all(8192, 4096, 0x22);
    expect(landed, || "what two queue pairs wrote did not land".to_owned())?;
    let Rkey(key) = bed.key();
    let operation = Operation::Write { to: bed.remote(4096), key: Rkey(key ^ 0x80) };
    second.source.post(&[WorkRequest { operation, ..request }])?;
    let came = completions(&mut second.source, 1)?;
    let refused = came[0].status == Status::REMOTE_ACCESS;
    expect(refused, || format!("a wrong key gives {:?}", came[0]))?;
    bed.execute(&[request])?;
    Ok(String::new())
}

pub(super) fn immediate<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    for (round, bytes) in (1u8..).zip([4096, 0, 1 << 20, 0]) {
        let value = u32::from(round) << 24 | 0x0012_3400 | u32::from(round);
        bed.target.post_receives(&[WorkId(u64::from(round) + 100)])?;
        bed.from.fill(4096, 1 << 20, round);
        let write = WorkRequest { signal: Signal::None, ..bed.write(1, 4096, 2 << 20, 4096) };
        let (to, key) = (bed.remote(4096), bed.key());
        let operation = Operation::WriteWithImmediate { to, key, immediate: value };
        let request = WorkRequest { operation, ..bed.write(2, 4096, 4096, bytes) };
        bed.source.post(&[write, request])?;
        let told = completions(&mut bed.target, 1)?;
        // The source was not waited for: that the target was told is enough.
        let bytes = usize::try_from(bytes).unwrap_or(0);
        let landed = bed.to.is_all(4096, bytes, round) && bed.to.is_all(2 << 20, 4096, round);
        expect(landed, || "the immediate came before the bytes".to_owned())?;
        let expected = Completion {
            id: WorkId(u64::from(round) + 100),
            side: Side::Receive,
            status: Status::SUCCESS,
            immediate: Some(value),
        };
        expect(told[0] == expected, || format!("expected {expected:?}, got {:?}", told[0]))?;
        completions(&mut bed.source, 1)?;
    }
    Ok(String::new())
}

pub(super) fn read_lands<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::with(site, &Setup::default(), all_access())?;
    let pages = 40;
    let mut list = Vec::new();
    for page in 1..=pages {
        bed.to.fill(page * 4096, 4096, u8::try_from(page).unwrap_or(0));
        let (from, key) = (bed.remote(page * 4096), bed.key());
        let request = bed.write(page as u64, page * 4096, 0, 4096);
        list.push(WorkRequest { operation: Operation::Read { from, key }, ..request });
    }
    // A write between reads completes in its turn.
    list.insert(20, bed.write(99, 4096 * 200, 4096 * 200, 4096));
    bed.execute(&list)?;
    for page in 1..=pages {
        let landed = bed.from.is_all(page * 4096, 4096, u8::try_from(page).unwrap_or(0));
        expect(landed, || format!("page {page} was not read"))?;
    }
    let big = 1 << 20;
    bed.to.fill(1 << 20, big, 0x77);
    let (from, key) = (bed.remote(1 << 20), bed.key());
    let request = bed.write(7, 2 << 20, 0, u32::try_from(big).unwrap_or(0));
    bed.execute(&[WorkRequest { operation: Operation::Read { from, key }, ..request }])?;
    expect(bed.from.is_all(2 << 20, big, 0x77), || "a long read did not land".to_owned())?;
    // A second region of the same memory has keys of its own.
    let again = site.target().register(&bed.to.memory(4096, 4096), all_access())?;
    let other = again.remote_key();
    expect(other != bed.key(), || "two regions have one key".to_owned())?;
    Ok(String::new())
}
