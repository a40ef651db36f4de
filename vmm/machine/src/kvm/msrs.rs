//! Reading and writing all MSRs of a vCPU in one call each.
//!
//! KVM stops a batch at the first MSR that it refuses, and it lists MSRs that it then refuses (a
//! host without the hardware, a KVM that is itself a guest). So which ones are refused is learned
//! once, outside of any blackout, and the batches leave them out.

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

/// MSRs that a vCPU may have in a saved state: more than any kernel lists.
const SAVED_MAX: usize = 2048;

/// What is known of a VM's MSRs; shared by its vCPUs.
pub(super) struct MsrTable {
    /// What can be read, in the kernel's order.
    readable: Vec<u32>,
    /// What could not be written, with the value that was refused: another value is tried again.
    refused: Mutex<Arc<BTreeMap<u32, u64>>>,
}

impl MsrTable {
    /// Learns which MSRs a vCPU of this host gives.
    pub(super) fn learn(kvm: &Kvm, vcpu: &VcpuFd) -> Result<MsrTable, BackendError> {
        let list = kvm
            .get_msr_index_list()
            .map_err(io::Error::from)
            .map_err(BackendError::host("KVM_GET_MSR_INDEX_LIST"))?;
        // The TSC and its deadline are saved apart: their order among the rest matters.
        let apart = |index: &u32| matches!(*index, MSR_IA32_TSC | MSR_IA32_TSC_DEADLINE);
        let mut wanted: Vec<_> = list.as_slice().iter().filter(|i| !apart(i)).copied().collect();
        let mut readable = Vec::with_capacity(wanted.len());
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
        Ok(MsrTable { readable, refused: Mutex::default() })
    }

    /// All MSRs, in one call for each 256.
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

    /// Writes MSRs from a peer. Those that KVM refuses are left as they are, logged once: either
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
            known.get(&msr.index) != Some(&msr.value) && !before.contains(msr)
        };
        let wanted: Vec<_> = saved.iter().filter(is_new).copied().collect();
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
        for msr in refused {
            let present = read(vcpu, &[msr.index]).ok().and_then(|values| values.first().copied());
            let same = present == Some(*msr);
            if !same && !known.contains_key(&msr.index) {
                tracing::warn!(
                    msr = format_args!("{:#x}", msr.index),
                    wanted = format_args!("{:#x}", msr.value),
                    present = ?present.map(|msr| msr.value),
                    "KVM refuses to set this MSR; it stays as it is"
                );
            }
        }
        let mut more = BTreeMap::clone(&known);
        more.extend(refused.iter().map(|msr| (msr.index, msr.value)));
        *known = Arc::new(more);
    }
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
