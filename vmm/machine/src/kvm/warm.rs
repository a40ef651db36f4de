//! Running a vCPU before there is a guest, so that its first real run is fast.
//!
//! The first entry of a VM allocates what KVM keeps for each page of guest memory (with shadow
//! paging two megabytes for each gigabyte), and the first entry of a vCPU on its thread loads and
//! allocates a lot more. None of that belongs into a blackout. So each vCPU of a destination first
//! runs a few instructions from memory that is the VMM's own, mapped for a moment above the
//! guest's; no permit is needed, because no guest is there.

use super::raw;
use super::start::{SELECTOR_CODE64_USER, SELECTOR_DATA_USER, SELECTOR_TSS};
use crate::boot::tables;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{BackendError, Level3Tables, Start};
use kvm_ioctls::VmFd;
use martlet_ram::GuestRam;
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use std::io;
use std::sync::Arc;

/// The slot's number: behind those of all regions.
const SLOT: u32 = 64;
const _: () = assert!(martlet_ram::REGIONS_MAX <= 64);
/// The port that the instructions write to, where a PC shows its start-up progress.
pub(super) const PORT: u16 = 0x80;
/// `out 0x80, al` and a jump to itself, as a fence.
const CODE: [u8; 4] = [0xe6, 0x80, 0xeb, 0xfe];

/// Pages of the memory, in this order.
const PML4: u64 = 0;
const PDPT: u64 = 1;
const PD: u64 = 2;
const PT: u64 = 3;
const CODE_PAGE: u64 = 4;
const GDT: u64 = 5;
const TSS: u64 = 6;
const TSS_PAGES: u64 = 3;
const PAGES: u64 = TSS + TSS_PAGES;

/// The memory while it is mapped.
pub(super) struct WarmUp {
    _memory: GuestMemory,
    start: Start,
}

impl WarmUp {
    /// Maps it above `ram`.
    pub(super) fn begin(vm: &VmFd, ram: &GuestRam) -> Result<WarmUp, BackendError> {
        let above = ram.regions().last().map_or(0, |region| region.range().end().0);
        let range = PageRange::try_new(Gfn(above), PageCount(PAGES))
            .ok_or_else(|| BackendError::state("guest memory fills the address space"))?;
        let own = GuestRam::create(&[range])
            .map_err(io::Error::other)
            .map_err(BackendError::host("make memory to warm up"))?;
        let memory = GuestMemory::new(Arc::new(own));
        let start = prepare(&memory, above * PAGE_SIZE);
        raw::set_slot(vm, SLOT, 0, &memory.ram().regions()[0])
            .map_err(BackendError::host("map memory to warm up"))?;
        Ok(WarmUp { _memory: memory, start })
    }

    /// Where a vCPU begins.
    pub(super) fn start(&self) -> &Start {
        &self.start
    }

    /// Unmaps it; no vCPU runs there any more.
    pub(super) fn finish(&self, vm: &VmFd) -> Result<(), BackendError> {
        raw::remove_slot(vm, SLOT).map_err(BackendError::host("unmap memory to warm up"))
    }
}

/// Writes instructions and tables. They are mapped at linear address 0 and on.
fn prepare(memory: &GuestMemory, base: u64) -> Start {
    let gpa = |page: u64| base + page * PAGE_SIZE;
    let entry = |page: u64| gpa(page) | tables::ENTRY_FLAGS;
    let mut writes: Vec<(u64, Vec<u8>)> = vec![
        (PML4, entry(PDPT).to_le_bytes().to_vec()),
        (PDPT, entry(PD).to_le_bytes().to_vec()),
        (PD, entry(PT).to_le_bytes().to_vec()),
        (PT, (0..PAGES).flat_map(|page| entry(page).to_le_bytes()).collect()),
        (CODE_PAGE, CODE.to_vec()),
        (TSS, tables::tss()),
    ];
    let tss = TSS * PAGE_SIZE;
    writes.push((GDT, tables::level3_gdt(tss)));
    for (page, bytes) in &writes {
        assert!(memory.write(Gpa(gpa(*page)), bytes), "it was made this large");
    }
    // The selectors of the start are places in that table.
    const { assert!(SELECTOR_CODE64_USER == 0x33 && SELECTOR_DATA_USER == 0x2b) };
    const { assert!(SELECTOR_TSS == 0x38) };
    Start::Level3 {
        rip: CODE_PAGE * PAGE_SIZE,
        rsp: 0,
        rdi: 0,
        rsi: 0,
        tables: Level3Tables {
            cr3: gpa(PML4),
            gdt: (GDT * PAGE_SIZE, tables::LEVEL3_GDT_LIMIT),
            tss: (tss, tables::TSS_LIMIT),
        },
    }
}
