//! Reading and writing all MSRs of a vCPU in one call each.
//!
//! KVM stops a batch at the first MSR that it refuses, and it lists MSRs that it then refuses (a
//! host without the hardware, a KVM that is itself a guest). So which ones are refused is learned
//! once, outside of any blackout, and the batches leave them out.
//!
//! KVM's own registers are apart. Writing some of them is an order that KVM carries out in guest
//! memory, and others name memory that KVM writes by itself from then on, when it enters or leaves
//! the guest or its thread is scheduled out (Documentation/virt/kvm/x86/msr.rst;
//! arch/x86/kvm/x86.c, kvm_set_msr_common, record_steal_time, kvm_steal_time_set_preempted).

use super::saved::SavedNumbered;
use crate::vcpu::backend::BackendError;
use crate::vcpu::lock;
use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

pub(super) const MSR_IA32_TSC: u32 = 0x10;
pub(super) const MSR_IA32_TSC_DEADLINE: u32 = 0x6e0;
const MSR_KVM_WALL_CLOCK: u32 = 0x11;
const MSR_KVM_SYSTEM_TIME: u32 = 0x12;
pub(super) const MSR_KVM_WALL_CLOCK_NEW: u32 = 0x4b56_4d00;
/// Bit 0 says that the guest uses kvmclock.
pub(super) const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
const MSR_KVM_POLL_CONTROL: u32 = 0x4b56_4d05;
const MSR_KVM_ASYNC_PF_INT: u32 = 0x4b56_4d06;
const MSR_KVM_ASYNC_PF_ACK: u32 = 0x4b56_4d07;
const MSR_KVM_MIGRATION_CONTROL: u32 = 0x4b56_4d08;
/// What KVM numbers as its own: steal time, asynchronous page faults, end of interrupt, and
/// whatever comes.
const KVM_FIRST: u32 = MSR_KVM_WALL_CLOCK_NEW;
const KVM_LAST: u32 = 0x4b56_4dff;
/// Hyper-V's (Hypervisor Top Level Functional Specification, appendix F). No guest of this machine
/// is shown a Hyper-V, so none has set them; KVM writes guest memory for some of them.
const HYPERV_FIRST: u32 = 0x4000_0000;
const HYPERV_LAST: u32 = 0x4000_0fff;

/// MSRs that a vCPU may have in a saved state: more than any kernel lists.
const SAVED_MAX: usize = 2048;

/// Refused MSRs that are remembered: one batch. No guest's state has as many; of a hostile one's
/// the others are tried again each time.
const REFUSED_MAX: usize = KVM_MAX_MSR_ENTRIES;

/// How an MSR travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Saved and loaded with the others.
    Plain,
    /// Saved with the others; loaded by a vCPU right before it enters the guest for the first
    /// time, because it names guest memory that KVM writes from then on.
    Held,
    /// Saved with the others; loaded once for all vCPUs, before any of them enters the guest: KVM
    /// keeps one number for all, and writes the time there as it is loaded.
    WallClock,
    /// Not loaded with the others: the TSC and its deadline, whose order among the rest matters, and
    /// which have places of their own in a state; orders, which the guest's own write has had carried out; and what no guest of
    /// this machine has.
    Apart,
}

fn kind(index: u32) -> Kind {
    match index {
        MSR_IA32_TSC
        | MSR_IA32_TSC_DEADLINE
        | MSR_KVM_ASYNC_PF_ACK
        | HYPERV_FIRST..=HYPERV_LAST => Kind::Apart,
        MSR_KVM_WALL_CLOCK | MSR_KVM_WALL_CLOCK_NEW => Kind::WallClock,
        MSR_KVM_POLL_CONTROL | MSR_KVM_ASYNC_PF_INT | MSR_KVM_MIGRATION_CONTROL => Kind::Plain,
        MSR_KVM_SYSTEM_TIME | KVM_FIRST..=KVM_LAST => Kind::Held,
        _ => Kind::Plain,
    }
}

/// The MSRs of a state that are not loaded before the guest runs. A vCPU that was not in a guest
/// yet has zeros in them.
pub(super) fn held(saved: &[SavedNumbered]) -> Vec<SavedNumbered> {
    let is_held = |msr: &&SavedNumbered| names_memory(msr) && msr.value != 0;
    saved.iter().filter(is_held).copied().collect()
}

/// Those of them that the vCPU loads right before it enters the guest.
pub(super) fn of_the_vcpu(held: &[SavedNumbered]) -> Vec<SavedNumbered> {
    held.iter().filter(|msr| kind(msr.index) == Kind::Held).copied().collect()
}

/// The MSRs of a state that name no memory: written, KVM writes none for them any more.
pub(super) fn switched_off(saved: &[SavedNumbered]) -> Vec<SavedNumbered> {
    let is_off = |msr: &&SavedNumbered| names_memory(msr) && msr.value == 0;
    saved.iter().filter(is_off).copied().collect()
}

/// Where the guest wanted the wall clock written; 0 if it did not.
pub(super) fn wall_clock(saved: &[SavedNumbered]) -> u64 {
    let clock = saved.iter().find(|msr| kind(msr.index) == Kind::WallClock && msr.value != 0);
    clock.map_or(0, |msr| msr.value)
}

fn names_memory(msr: &SavedNumbered) -> bool {
    matches!(kind(msr.index), Kind::Held | Kind::WallClock)
}

/// What is known of a VM's MSRs; shared by its vCPUs.
pub(super) struct MsrTable {
    /// What can be read, in the kernel's order; the TSC last, so that who notes the time behind the
    /// reading notes the TSC's.
    readable: Vec<u32>,
    /// What could not be written, with the value that was refused: another value is tried again.
    refused: Mutex<Arc<BTreeMap<u32, u64>>>,
}

impl MsrTable {
    /// Learns which MSRs a vCPU of this host gives.
    pub(super) fn learn(kvm: &Kvm, vcpu: &VcpuFd) -> Result<MsrTable, BackendError> {
        let list = super::kvm("KVM_GET_MSR_INDEX_LIST", kvm.get_msr_index_list())?;
        let is_saved = |index: &&u32| kind(**index) != Kind::Apart;
        let mut wanted: Vec<_> = list.as_slice().iter().filter(is_saved).copied().collect();
        let mut readable = Vec::with_capacity(wanted.len() + 2);
        while !wanted.is_empty() {
            let batch = wanted.len().min(KVM_MAX_MSR_ENTRIES);
            let got = read(vcpu, &wanted[..batch])?.len();
            readable.extend(wanted.drain(..got));
            if got < batch {
                let refused = wanted.remove(0);
                tracing::debug!(
                    msr = format_args!("{refused:#x}"),
                    "KVM lists this and does not give it"
                );
            }
        }
        readable.extend([MSR_IA32_TSC_DEADLINE, MSR_IA32_TSC]);
        Ok(MsrTable { readable, refused: Mutex::default() })
    }

    /// All MSRs, in one call for each 256: of those that are apart the TSC and its deadline.
    pub(super) fn save(&self, vcpu: &VcpuFd) -> Result<Vec<SavedNumbered>, BackendError> {
        let mut saved = Vec::with_capacity(self.readable.len());
        for batch in self.readable.chunks(KVM_MAX_MSR_ENTRIES) {
            let mut rest = batch;
            while !rest.is_empty() {
                let values = read(vcpu, rest)?;
                saved.extend(&values);
                // Some become unreadable by what the guest does; they are left out.
                rest = rest.get((values.len() + 1)..).unwrap_or(&[]);
            }
        }
        Ok(saved)
    }

    /// Writes the plain MSRs of a peer's state. Those that KVM refuses are left as they are, logged once: either
    /// they hold that value already, or this host has no such thing and neither had the guest.
    /// What was loaded `before` and is the same is not written again.
    pub(super) fn load(
        &self,
        vcpu: &VcpuFd,
        saved: &[SavedNumbered],
        before: &[SavedNumbered],
    ) -> Result<(), BackendError> {
        if saved.len() > SAVED_MAX {
            return Err(BackendError::state(format!("{} MSRs", saved.len())));
        }
        let known = Arc::clone(&lock(&self.refused));
        if saved == before {
            return Ok(());
        }
        let is_new = |msr: &&SavedNumbered| {
            kind(msr.index) == Kind::Plain
                && known.get(&msr.index) != Some(&msr.value)
                && !before.contains(msr)
        };
        let wanted: Vec<_> = saved.iter().filter(is_new).copied().collect();
        self.write_all(vcpu, &wanted)
    }

    /// Writes these, but for those that KVM refuses.
    pub(super) fn write_all(
        &self,
        vcpu: &VcpuFd,
        wanted: &[SavedNumbered],
    ) -> Result<(), BackendError> {
        let mut refused = Vec::new();
        for batch in wanted.chunks(KVM_MAX_MSR_ENTRIES) {
            let mut rest = batch;
            while !rest.is_empty() {
                let done = write(vcpu, rest)?;
                if let Some(msr) = rest.get(done) {
                    refused.push(*msr);
                }
                rest = rest.get((done + 1)..).unwrap_or(&[]);
            }
        }
        if !refused.is_empty() {
            self.remember(vcpu, &refused);
        }
        Ok(())
    }

    fn remember(&self, vcpu: &VcpuFd, refused: &[SavedNumbered]) {
        let mut known = lock(&self.refused);
        let mut more = BTreeMap::clone(&known);
        for msr in refused {
            let is_news = note_refused(&mut more, *msr);
            let present = read(vcpu, &[msr.index]).ok().and_then(|values| values.first().copied());
            if is_news && present != Some(*msr) {
                tracing::warn!(
                    msr = format_args!("{:#x}", msr.index),
                    wanted = format_args!("{:#x}", msr.value),
                    present = ?present.map(|msr| msr.value),
                    "KVM refuses to set this MSR; it stays as it is"
                );
            }
        }
        *known = Arc::new(more);
    }
}

/// Takes an MSR that travels in a place of its own out of those that were read; 0 if KVM has none.
pub(super) fn take(read: &mut Vec<SavedNumbered>, index: u32) -> u64 {
    let place = read.iter().rposition(|msr| msr.index == index);
    place.map_or(0, |place| read.remove(place).value)
}

/// Adds a refused MSR to those that are known while there is room, and says whether it is new
/// among them.
fn note_refused(known: &mut BTreeMap<u32, u64>, msr: SavedNumbered) -> bool {
    if known.len() == REFUSED_MAX && !known.contains_key(&msr.index) {
        return false;
    }
    known.insert(msr.index, msr.value).is_none()
}

/// Reads MSRs until KVM stops; returns those before.
pub(super) fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<SavedNumbered>, BackendError> {
    let entries: Vec<_> =
        indices.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
    let mut msrs =
        Msrs::from_entries(&entries).map_err(|_| BackendError::state("too many MSRs"))?;
    let count = vcpu
        .get_msrs(&mut msrs)
        .map_err(io::Error::from)
        .map_err(BackendError::host("KVM_GET_MSRS"))?;
    let values = msrs.as_slice().iter().take(count);
    Ok(values.map(|msr| SavedNumbered { index: msr.index, value: msr.data }).collect())
}

/// Writes MSRs until KVM stops; returns how many were written.
pub(super) fn write(vcpu: &VcpuFd, values: &[SavedNumbered]) -> Result<usize, BackendError> {
    let entries: Vec<_> = values
        .iter()
        .map(|msr| kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() })
        .collect();
    let msrs = Msrs::from_entries(&entries).map_err(|_| BackendError::state("too many MSRs"))?;
    vcpu.set_msrs(&msrs).map_err(io::Error::from).map_err(BackendError::host("KVM_SET_MSRS"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_states_fill_no_memory_with_refused_msrs() {
        let mut known = BTreeMap::new();
        let msr = |index, value| SavedNumbered { index, value };
        let news = (0..100_000).filter(|index| note_refused(&mut known, msr(*index, 1))).count();
        assert_eq!((news, known.len()), (REFUSED_MAX, REFUSED_MAX));
        // Those that are known follow the state's value, and are told once.
        assert!(!note_refused(&mut known, msr(3, 2)));
        assert_eq!(known.get(&3), Some(&2));
    }

    #[test]
    fn what_makes_kvm_write_guest_memory_waits_for_the_guest() {
        let all = [0x11, 0x12, 0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d02, 0x4b56_4d03, 0x4b56_4d04];
        let more = [0x4b56_4d05, 0x4b56_4d06, 0x4b56_4d07, 0x4b56_4d08, 0x4000_0001, 0xc000_0080];
        let state: Vec<_> =
            all.iter().chain(&more).map(|&index| SavedNumbered { index, value: 1 }).collect();
        let numbers =
            |msrs: &[SavedNumbered]| -> Vec<u32> { msrs.iter().map(|m| m.index).collect() };
        assert_eq!(numbers(&held(&state)), all);
        let of_each = [0x12, 0x4b56_4d01, 0x4b56_4d02, 0x4b56_4d03, 0x4b56_4d04];
        assert_eq!(numbers(&of_the_vcpu(&held(&state))), of_each);
        let plain = more.iter().filter(|index| kind(**index) == Kind::Plain).copied();
        let plain: Vec<u32> = plain.collect();
        assert_eq!(plain, [0x4b56_4d05, 0x4b56_4d06, 0x4b56_4d08, 0xc000_0080]);
        assert_eq!([0x11, 0x4b56_4d00].map(kind), [Kind::WallClock; 2]);
        assert_eq!(kind(0x4b56_4d07), Kind::Apart);
        let off: Vec<_> = all.map(|index| SavedNumbered { index, value: 0 }).into();
        assert_eq!((held(&off), switched_off(&off).len(), wall_clock(&off)), (vec![], 7, 0));
        assert_eq!(wall_clock(&state), 1);
    }
}
