//! What a case starts from: a connection, and memory registered on both sides.

use super::arena::Arena;
use super::{Connected, Pair, Site, Violation, expect};
use crate::fabric::{Fabric, QueuePair, Region, Setup};
use crate::work::{
    Access, Completion, Operation, RemoteAddress, Rkey, Sge, Side, Signal, Status, WorkId,
    WorkRequest,
};
use std::time::Duration;

/// Bytes of each side's memory.
pub(super) const ARENA_BYTES: usize = 4 << 20;
/// Registered memory begins here: what is before is not.
pub(super) const REGION_AT: usize = 4096;
/// And ends as long before the arena's end.
pub(super) const REGION_BYTES: usize = ARENA_BYTES - 2 * REGION_AT;

/// How often a wait is repeated before something is said not to come.
const LOOKS_MAX: u32 = 300;
/// One wait.
const WAIT: Duration = Duration::from_millis(100);

pub(super) type RegionOf<S> = <<S as Site>::Fabric as Fabric>::Region;

/// What the peer may do with the target's memory, and the source itself with its own.
pub(super) fn all_access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

/// One connection with memory.
pub(super) struct Bed<S: Site> {
    pub(super) source: Pair<S>,
    pub(super) target: Pair<S>,
    pub(super) from: Arena,
    pub(super) to: Arena,
    pub(super) from_region: RegionOf<S>,
    pub(super) to_region: RegionOf<S>,
}

impl<S: Site> Bed<S> {
    pub(super) fn new(site: &S) -> Result<Bed<S>, Violation> {
        Bed::with(site, &Setup::default(), all_access())
    }

    pub(super) fn with(site: &S, setup: &Setup, access: Access) -> Result<Bed<S>, Violation> {
        let Connected { source, target, .. } = site.connect(setup, setup, &[], &[])?;
        let (from, to) = (Arena::new(ARENA_BYTES)?, Arena::new(ARENA_BYTES)?);
        let own = Access::LOCAL_WRITE;
        let from_region = site.source().register(&from.memory(REGION_AT, REGION_BYTES), own)?;
        let to_region = site.target().register(&to.memory(REGION_AT, REGION_BYTES), access)?;
        Ok(Bed { source, target, from, to, from_region, to_region })
    }

    /// A write of `bytes` bytes between two places of the arenas.
    pub(super) fn write(&self, id: u64, from: usize, to: usize, bytes: u32) -> WorkRequest {
        WorkRequest {
            id: WorkId(id),
            operation: Operation::Write { to: self.remote(to), key: self.key() },
            local: self.local(from, bytes),
            signal: Signal::Completion,
        }
    }

    pub(super) fn local(&self, offset: usize, bytes: u32) -> Sge {
        let address = self.from.address() + offset as u64;
        Sge { address, bytes, key: self.from_region.local_key() }
    }

    pub(super) fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress(self.to.address() + offset as u64)
    }

    pub(super) fn key(&self) -> Rkey {
        self.to_region.remote_key()
    }

    /// Posts and expects success of every signalled request.
    pub(super) fn execute(&mut self, list: &[WorkRequest]) -> Result<(), Violation> {
        self.source.post(list)?;
        let wanted: Vec<WorkId> = list
            .iter()
            .filter(|request| request.signal == Signal::Completion)
            .map(|request| request.id)
            .collect();
        let came = completions(&mut self.source, wanted.len())?;
        for (id, completion) in wanted.iter().zip(&came) {
            expect_status(completion, *id, Status::SUCCESS)?;
        }
        Ok(())
    }

    /// Posts one request and expects it to fail so.
    pub(super) fn expect_failure(
        &mut self,
        request: &WorkRequest,
        statuses: &[Status],
    ) -> Result<(), Violation> {
        self.source.post(std::slice::from_ref(request))?;
        let came = completions(&mut self.source, 1)?;
        let status = came[0].status;
        expect(came[0].id == request.id && statuses.contains(&status), || {
            format!("expected {statuses:?} for {:?}, got {:?}", request.id, came[0])
        })
    }

    /// Fails if anything outside of the registered region was written.
    pub(super) fn expect_margins_clean(&self) -> Result<(), Violation> {
        let clean = self.to.is_all(0, REGION_AT, 0)
            && self.to.is_all(ARENA_BYTES - REGION_AT, REGION_AT, 0);
        expect(clean, || "memory outside of the region was written".to_owned())
    }

    /// Fails if anything of the target's memory was written.
    pub(super) fn expect_untouched(&self) -> Result<(), Violation> {
        let clean = self.to.is_all(0, ARENA_BYTES, 0);
        expect(clean, || "memory was written by a request that failed".to_owned())
    }
}

/// Waits for exactly `count` completions.
pub(super) fn completions<P: QueuePair>(
    pair: &mut P,
    count: usize,
) -> Result<Vec<Completion>, Violation> {
    let mut came = Vec::new();
    let mut places = [Completion::default(); 32];
    let mut looks_left = LOOKS_MAX;
    while came.len() < count {
        let want = places.len().min(count - came.len());
        let got = pair.poll(&mut places[..want])?;
        came.extend_from_slice(&places[..got]);
        if got > 0 {
            continue;
        }
        pair.arm()?;
        let got = pair.poll(&mut places[..want])?;
        came.extend_from_slice(&places[..got]);
        if got == 0 && !pair.wait(WAIT)? {
            looks_left -= 1;
            expect(looks_left > 0, || format!("only {} of {count} completions came", came.len()))?;
        }
    }
    Ok(came)
}

/// Waits until `done` says so.
pub(super) fn eventually<P: QueuePair>(
    pair: &mut P,
    what: &str,
    mut done: impl FnMut(&mut P) -> bool,
) -> Result<(), Violation> {
    for _ in 0..LOOKS_MAX {
        if done(pair) {
            return Ok(());
        }
        pair.arm()?;
        pair.wait(Duration::from_millis(10))?;
    }
    Err(Violation(format!("{what} did not happen")))
}

pub(super) fn expect_status(
    completion: &Completion,
    id: WorkId,
    status: Status,
) -> Result<(), Violation> {
    let right = completion.id == id && completion.status == status && completion.side == Side::Send;
    expect(right, || format!("expected {status} for {id:?}, got {completion:?}"))
}
