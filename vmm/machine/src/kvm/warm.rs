//! Making a vCPU's first steps fast before it may take them.
//!
//! The first entry of a VM allocates what KVM keeps for each page of guest memory (with shadow
//! paging two megabytes for each gigabyte), the first entry of a vCPU on its thread loads and
//! allocates a lot more, and then each page that the guest touches is a fault. None of that belongs
//! into a blackout. So each vCPU of a destination first runs a few instructions of ours, from memory
//! of ours that is mapped above the guest's: at once when the machine is built, and again when a
//! rehearsal has shown where the guest will go on, to read the pages there. No permit is needed,
//! because it is not the guest that runs: nothing of its state is in the vCPU, and nothing of its
//! memory is written.
//!
//! What the reading leaves behind is there for the guest too: with two-dimensional paging the
//! second-level page tables; with shadow paging the tables behind each large page, which KVM shares
//! between all page tables that map it with the same rights and in the same mode
//! (arch/x86/kvm/mmu/mmu.c, kvm_mmu_get_child_sp). The memory stays mapped, since taking a slot away
//! makes KVM drop all that (kvm_arch_flush_shadow_memslot); a guest's memory map does not name it.

use crate::boot::tables;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{BackendError, Level3Tables, Start};
use kvm_ioctls::VmFd;
use martlet_kvm_dirty::KvmSlots;
use martlet_ram::GuestRam;
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use std::io;
use std::sync::Arc;

/// The slot's number: behind those of all regions.
const SLOT: u32 = 64;
const _: () = assert!(martlet_ram::REGIONS_MAX <= 64);

/// The port that ends a run, where a PC shows its start-up progress.
pub(super) const PORT: u16 = 0x80;
/// Reads a byte of each of `esi` pages from `rdi` on, and ends.
const CODE: [u8; 21] = [
    0x85, 0xf6, // test esi, esi
    0x74, 0x0d, // jz end
    0x8a, 0x07, // next: mov al, [rdi]
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0xff, 0xce, // dec esi
    0x75, 0xf3, // jnz next
    0xe6, 0x80, // end: out 0x80, al
    0xeb, 0xfe, // a fence
];

/// Pages of the memory: first those for all vCPUs, which are also mapped at these numbers from
/// linear address 0 on.
const PDPT: u64 = 0;
const PD: u64 = 1;
const PT: u64 = 2;
const CODE_PAGE: u64 = 3;
const GDT: u64 = 4;
const SHARED_PAGES: u64 = 5;
/// Then for each vCPU a top page table and the two tables that map blocks of guest memory.
const VCPU_PML4: u64 = 0;
const VCPU_PDPT: u64 = 1;
const VCPU_PD: u64 = 2;
const VCPU_PAGES: u64 = 3;

/// Guest memory is read in blocks of the size of a large page.
pub(super) const BLOCK_BYTES: u64 = 2 << 20;
/// Blocks that a vCPU may have mapped: the entries of one page directory, none of them ever used
/// twice, because KVM does not see that we write them.
const BLOCKS_MAX: u64 = 512;
/// Linear address of the first block: the second entry of the top table.
const BLOCKS: u64 = 1 << 39;

/// The memory of a VM's vCPUs.
pub(super) struct WarmUp {
    memory: GuestMemory,
    base: u64,
}

/// One vCPU's part in it.
pub(super) struct WarmVcpu {
    warm_up: Arc<WarmUp>,
    /// Its first page.
    first_page: u64,
    /// Blocks that are mapped, by their guest physical addresses.
    blocks: Vec<u64>,
}

impl WarmUp {
    /// Maps it above `ram`.
    #[expect(unsafe_code, reason = "the slot points to the memory, which is kept")]
    pub(super) fn begin(vm: &VmFd, ram: &GuestRam, vcpus: u16) -> Result<WarmUp, BackendError> {
        let above = ram.regions().last().map_or(0, |region| region.range().end().0);
        let pages = SHARED_PAGES + u64::from(vcpus) * VCPU_PAGES;
        let range = PageRange::try_new(Gfn(above), PageCount(pages))
            .ok_or_else(|| BackendError::state("guest memory fills the address space"))?;
        let own = GuestRam::create(&[range])
            .map_err(io::Error::other)
            .map_err(BackendError::host("make memory to warm up"))?;
        let warm_up = WarmUp { memory: GuestMemory::new(Arc::new(own)), base: above * PAGE_SIZE };
        warm_up.prepare();
        // SAFETY: the machine has the memory until its vCPUs' threads have ended.
        unsafe { KvmSlots::new(vm, Arc::clone(warm_up.memory.ram()), &[SLOT]) }
            .map_err(BackendError::host("map memory to warm up"))?;
        Ok(warm_up)
    }

    fn gpa(&self, page: u64) -> u64 {
        self.base + page * PAGE_SIZE
    }

    fn write(&self, page: u64, offset: u64, bytes: &[u8]) {
        assert!(self.memory.write(Gpa(self.gpa(page) + offset), bytes), "it was made this large");
    }

    /// A table entry that points to a page.
    fn entry(&self, page: u64) -> [u8; 8] {
        (self.gpa(page) | tables::ENTRY_FLAGS).to_le_bytes()
    }

    /// Writes the instructions and the tables that all vCPUs share.
    fn prepare(&self) {
        self.write(PDPT, 0, &self.entry(PD));
        self.write(PD, 0, &self.entry(PT));
        for page in 0..SHARED_PAGES {
            self.write(PT, page * 8, &self.entry(page));
        }
        self.write(CODE_PAGE, 0, &CODE);
        self.write(GDT, 0, &tables::level3_gdt());
    }
}

impl WarmVcpu {
    pub(super) fn new(warm_up: &Arc<WarmUp>, vcpu: u16) -> WarmVcpu {
        let first_page = SHARED_PAGES + u64::from(vcpu) * VCPU_PAGES;
        let tables = [
            (VCPU_PML4, 0, warm_up.entry(PDPT)),
            (VCPU_PML4, 8, warm_up.entry(first_page + VCPU_PDPT)),
            (VCPU_PDPT, 0, warm_up.entry(first_page + VCPU_PD)),
        ];
        for (page, offset, entry) in tables {
            warm_up.write(first_page + page, offset, &entry);
        }
        WarmVcpu { warm_up: Arc::clone(warm_up), first_page, blocks: Vec::new() }
    }

    /// Maps those of these blocks of guest memory that are not mapped yet, and says where a vCPU
    /// begins that reads them; `None` if there are none. Addresses are of the blocks' first bytes.
    pub(super) fn read_blocks(&mut self, blocks: &[u64]) -> Option<Start> {
        let first = self.blocks.len() as u64;
        for block in blocks {
            let next = self.blocks.len() as u64;
            if self.blocks.contains(block) || next == BLOCKS_MAX {
                continue;
            }
            let entry = block | tables::LARGE_FLAGS;
            self.warm_up.write(self.first_page + VCPU_PD, next * 8, &entry.to_le_bytes());
            self.blocks.push(*block);
        }
        let pages = (self.blocks.len() as u64 - first) * (BLOCK_BYTES / PAGE_SIZE);
        (pages > 0).then(|| self.start(BLOCKS + first * BLOCK_BYTES, pages))
    }

    /// Where a vCPU begins that reads this many pages from a linear address on.
    pub(super) fn start(&self, from: u64, pages: u64) -> Start {
        Start::Level3 {
            rip: CODE_PAGE * PAGE_SIZE,
            rsp: 0,
            rdi: from,
            rsi: pages,
            tables: Level3Tables {
                cr3: self.warm_up.gpa(self.first_page + VCPU_PML4),
                gdt: (GDT * PAGE_SIZE, tables::LEVEL3_GDT_LIMIT),
            },
        }
    }
}
