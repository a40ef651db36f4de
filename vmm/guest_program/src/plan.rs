//! Where the program lies in guest memory and how its vCPUs start.
//!
//! ```text
//! 0        1 MiB
//! | VMM's | directory | image | per vCPU: parameters, counters, stack | version tables | cards | fill .. | free
//! ```
//! What a network card takes is in `nic_plan.rs`.
//! The fill goes on above a hole. The free rest is never written; some of its pages are checked.

use crate::abi::{
    self, Counters, Directory, EXTENTS_MAX, Extent, MAGIC, NICS_MAX, Parameters, VERSION,
    ZERO_SAMPLES_MAX,
};
use crate::nic_plan::NicsShape;
use crate::params::ProgramParams;
use crate::{built, image};
use martlet_units::{ByteCount, Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use std::mem::size_of;

/// The VMM's own memory, from guest physical address 0 on: page tables, descriptor tables.
pub const MACHINE_RESERVED: ByteCount = ByteCount(1 << 20);
/// Where the program begins, with its directory; never another place, so that any process finds it.
pub(crate) const PROGRAM_GPA: Gpa = Gpa(MACHINE_RESERVED.0);
/// Most vCPUs of a guest that runs the program.
pub const VCPUS_MAX: u16 = 1024;
/// The deepest use is a few hundred bytes.
const STACK_PAGES: u64 = 4;
/// Parameters, counters, stack: each page of a vCPU is written by that vCPU only.
const VCPU_PAGES: u64 = 2 + STACK_PAGES;
const VERSION_BYTES: u64 = 8;

const _: () = assert!(size_of::<Parameters>() as u64 <= PAGE_SIZE);
const _: () = assert!(size_of::<Counters>() as u64 <= PAGE_SIZE);

/// Why the program can't run on a machine. One line, for the machine's owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The parameters contradict themselves.
    #[error(transparent)]
    Params(#[from] crate::ParamsError),
    /// It does not fit.
    #[error("fill={fill} needs {needed} of guest memory, there are {memory}")]
    TooBig {
        /// What is to be filled.
        fill: ByteCount,
        /// With the program and its tables.
        needed: ByteCount,
        /// What there is.
        memory: ByteCount,
    },
    /// No vCPU, or too many.
    #[error("{vcpus} vCPUs: the built-in program runs on 1 to 1024")]
    Vcpus {
        /// How many were asked for.
        vcpus: u16,
    },
    /// A vCPU would have nothing to do.
    #[error("{key}={size} is less than one page for each of {vcpus} vCPUs")]
    TooSmall {
        /// `fill` or `ws`.
        key: &'static str,
        /// As it was given.
        size: ByteCount,
        /// How many share it.
        vcpus: u16,
    },
    /// There is no memory at address 0, it is in more than 64 pieces, or not in order.
    #[error("the guest's memory does not begin at address 0 or is out of order")]
    Layout,
    /// More network cards than the program drives, or one without queues.
    #[error(
        "{cards} network cards: the built-in program drives up to {NICS_MAX}, each with queues"
    )]
    Nics {
        /// How many were asked for.
        cards: usize,
    },
    /// The rate of the time stamp counter is unknown.
    #[error("the rate of the time stamp counter is unknown")]
    Clock,
}

/// The registers with which a vCPU enters the program. All others may hold anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuStart {
    /// Linear address of the first instruction.
    pub rip: u64,
    /// Linear address of the stack, as right after a call.
    pub rsp: u64,
    /// First argument.
    pub rdi: u64,
    /// Second argument.
    pub rsi: u64,
}

/// A network card as the program finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicPlace {
    /// Guest physical address of its registers.
    pub registers: Gpa,
    /// Queue pairs that it has; the program uses up to 64.
    pub pairs: u16,
    /// Largest size of its queues, a power of two.
    pub queue_size_max: u16,
}

/// What to write into the memory of a new guest and where to start its vCPUs. Memory that it does
/// not name is zero and stays so until the program writes it.
#[derive(Clone, Debug)]
pub struct Plan {
    writes: Vec<(Gpa, Vec<u8>)>,
    vcpus: u16,
    entry: Gpa,
    vcpu_blocks: Gpa,
}

impl Plan {
    /// Plans the program for a guest with this memory, which must begin at address 0. The rate is
    /// that of the time stamp counter as the guest sees it.
    pub fn new(
        layout: &[PageRange],
        vcpus: u16,
        params: &ProgramParams,
        tsc_khz: u32,
    ) -> Result<Plan, PlanError> {
        Plan::with_nics(layout, vcpus, params, tsc_khz, &[])
    }

    /// As [`Plan::new`], for a guest with these network cards. They are divided among the vCPUs.
    pub fn with_nics(
        layout: &[PageRange],
        vcpus: u16,
        params: &ProgramParams,
        tsc_khz: u32,
        nics: &[NicPlace],
    ) -> Result<Plan, PlanError> {
        check(layout, vcpus, params)?;
        if tsc_khz == 0 {
            return Err(PlanError::Clock);
        }
        let usable = |nic: &NicPlace| nic.pairs > 0 && nic.queue_size_max.is_power_of_two();
        if nics.len() > NICS_MAX || !nics.iter().all(usable) {
            return Err(PlanError::Nics { cards: nics.len() });
        }
        let shape = Shape::new(vcpus, params, nics);
        let low_pages = layout.first().map_or(0, |range| range.pages().0);
        let pages: u64 = layout.iter().map(|range| range.pages().0).sum();
        if shape.fill_start > low_pages || shape.end_pages > pages {
            return Err(PlanError::TooBig {
                fill: params.fill,
                needed: PageCount(shape.end_pages).to_bytes(),
                memory: PageCount(pages).to_bytes(),
            });
        }
        let mut writes =
            vec![(PROGRAM_GPA, shape.directory(vcpus)), (address(shape.image), image().to_vec())];
        for vcpu in 0..u64::from(vcpus) {
            let parameters = shape.parameters(layout, vcpu, params, tsc_khz);
            writes.push((address(shape.block(vcpu)), bytes_of(&parameters)));
        }
        writes.extend(shape.nics.writes(params, tsc_khz));
        let entry = Gpa(address(shape.image).0 + built::ENTRY_OFFSET);
        Ok(Plan { writes, vcpus, entry, vcpu_blocks: address(shape.blocks) })
    }

    /// Whether the program fits a machine whose memory and vCPUs are these, however the memory is
    /// laid out around a hole below 4 GiB.
    pub fn validate(
        memory: ByteCount,
        vcpus: u16,
        params: &ProgramParams,
    ) -> Result<(), PlanError> {
        let pages = PageCount(memory.0 / PAGE_SIZE);
        let all = PageRange::try_new(Gfn(0), pages).ok_or(PlanError::Layout)?;
        Plan::new(&[all], vcpus, params, 1).map(drop)
    }

    /// What to write where: bytes from a guest physical address on, all in the first range.
    pub fn writes(&self) -> impl Iterator<Item = (Gpa, &[u8])> {
        self.writes.iter().map(|(gpa, bytes)| (*gpa, bytes.as_slice()))
    }

    /// The start of a vCPU in a linear address space where guest physical address 0 is at
    /// `linear_base`; a multiple of the page size.
    ///
    /// # Panics
    /// If there is no such vCPU in the plan.
    pub fn start(&self, vcpu: u16, linear_base: u64) -> VcpuStart {
        assert!(vcpu < self.vcpus, "vCPU {vcpu} of {}", self.vcpus);
        let parameters = self.vcpu_blocks.0 + u64::from(vcpu) * VCPU_PAGES * PAGE_SIZE;
        let stack_end = parameters + VCPU_PAGES * PAGE_SIZE;
        VcpuStart {
            rip: linear_base + self.entry.0,
            // As a call leaves it (System V ABI for x86-64, 3.2.2): 8 below a multiple of 16.
            rsp: linear_base + stack_end - 8,
            rdi: linear_base,
            rsi: parameters,
        }
    }
}

fn check(layout: &[PageRange], vcpus: u16, params: &ProgramParams) -> Result<(), PlanError> {
    params.validate()?;
    let from_zero = layout.first().is_some_and(|range| range.start() == Gfn(0));
    let ascending = layout.windows(2).all(|pair| pair[0].end() <= pair[1].start());
    if !from_zero || !ascending || layout.len() > EXTENTS_MAX {
        return Err(PlanError::Layout);
    }
    if vcpus == 0 || vcpus > VCPUS_MAX {
        return Err(PlanError::Vcpus { vcpus });
    }
    let too_small = |size: ByteCount| size.0 > 0 && size.0 / PAGE_SIZE < u64::from(vcpus);
    if too_small(params.fill) {
        return Err(PlanError::TooSmall { key: "fill", size: params.fill, vcpus });
    }
    if too_small(params.working_set) {
        return Err(PlanError::TooSmall { key: "ws", size: params.working_set, vcpus });
    }
    Ok(())
}

/// Page numbers of the parts, counted over the memory that there is, without holes.
struct Shape {
    vcpus: u64,
    image: u64,
    blocks: u64,
    version_tables: u64,
    version_table_pages: u64,
    nics: NicsShape,
    fill_start: u64,
    fill_pages: u64,
    working_set_pages: u64,
    end_pages: u64,
}

impl Shape {
    fn new(vcpus: u16, params: &ProgramParams, nics: &[NicPlace]) -> Shape {
        let vcpus = u64::from(vcpus);
        let fill_pages = params.fill.0 / PAGE_SIZE;
        let working_set_pages = params.working_set.0 / PAGE_SIZE;
        let image = PROGRAM_GPA.to_gfn().0 + 1;
        let blocks = image + (crate::image().len() as u64).div_ceil(PAGE_SIZE);
        let version_tables = blocks + vcpus * VCPU_PAGES;
        // The shares differ by a page at most; the first one is the largest.
        let version_table_pages =
            (share(working_set_pages, vcpus, 0).1 * VERSION_BYTES).div_ceil(PAGE_SIZE);
        let nics = NicsShape::new(version_tables + vcpus * version_table_pages, nics, params);
        let fill_start = nics.end();
        Shape {
            vcpus,
            image,
            blocks,
            version_tables,
            version_table_pages,
            nics,
            fill_start,
            fill_pages,
            working_set_pages,
            end_pages: fill_start + fill_pages,
        }
    }

    fn block(&self, vcpu: u64) -> u64 {
        self.blocks + vcpu * VCPU_PAGES
    }

    fn directory(&self, vcpus: u16) -> Vec<u8> {
        bytes_of(&Directory {
            magic: MAGIC,
            version: VERSION,
            vcpus: u64::from(vcpus),
            counters: address(self.block(0) + 1).0,
            counters_stride: VCPU_PAGES * PAGE_SIZE,
            nics: self.nics.count(),
            nic_counters: address(self.nics.counters()).0,
            nic_counters_stride: PAGE_SIZE,
        })
    }

    fn parameters(
        &self,
        layout: &[PageRange],
        vcpu: u64,
        params: &ProgramParams,
        tsc_khz: u32,
    ) -> Parameters {
        let (fill_first, fill_pages) = share(self.fill_pages, self.vcpus, vcpu);
        let extents = extents(layout, self.fill_start + fill_first, fill_pages);
        let mut parameters = Parameters {
            magic: MAGIC,
            version: VERSION,
            counters: address(self.block(vcpu) + 1).0,
            versions: address(self.version_tables + vcpu * self.version_table_pages).0,
            working_set_pages: share(self.working_set_pages, self.vcpus, vcpu).1,
            pages_per_tick: narrow(params.pages_per_tick() / u128::from(self.vcpus)),
            tick_cycles: narrow(params.tick.as_nanos() * u128::from(tsc_khz) / 1_000_000).max(1),
            verify_per_tick: u64::from(params.verify_per_tick),
            zero_samples: [0; ZERO_SAMPLES_MAX],
            zero_samples_count: 0,
            extents: [Extent { frame: 0, pages: 0 }; EXTENTS_MAX],
            extents_count: extents.len() as u64,
            nics: [0; NICS_MAX],
            nics_count: 0,
            nic_turns_per_tick: 0,
        };
        let mine = self.nics.of_vcpu(vcpu, self.vcpus);
        parameters.nic_turns_per_tick = NicsShape::turns_per_tick(mine.len(), params.tick);
        for (slot, page) in parameters.nics.iter_mut().zip(mine) {
            *slot = address(page).0;
            parameters.nics_count += 1;
        }
        for (slot, extent) in parameters.extents.iter_mut().zip(extents) {
            *slot = extent;
        }
        for (slot, frame) in parameters.zero_samples.iter_mut().zip(self.samples(layout, vcpu)) {
            *slot = frame;
            parameters.zero_samples_count += 1;
        }
        parameters
    }

    /// Frames of the free memory, the same number for each vCPU and spread over all of it.
    fn samples(&self, layout: &[PageRange], vcpu: u64) -> Vec<u64> {
        let pages: u64 = layout.iter().map(|range| range.pages().0).sum();
        let free = pages - self.end_pages;
        let each = (free / self.vcpus).min(ZERO_SAMPLES_MAX as u64);
        (0..each)
            .map(|sample| {
                let nth = u128::from(sample * self.vcpus + vcpu);
                let offset = nth * u128::from(free) / u128::from(each * self.vcpus);
                extents(layout, self.end_pages + narrow(offset), 1)[0].frame
            })
            .collect()
    }
}

/// First page and number of pages that vCPU `vcpu` gets of `pages`.
fn share(pages: u64, vcpus: u64, vcpu: u64) -> (u64, u64) {
    let (each, more) = (pages / vcpus, pages % vcpus);
    (each * vcpu + vcpu.min(more), each + u64::from(vcpu < more))
}

/// The runs of frames behind pages `first .. first + pages`, counted without holes.
fn extents(layout: &[PageRange], first: u64, pages: u64) -> Vec<Extent> {
    let mut found = Vec::new();
    let mut base = 0;
    let end = first + pages;
    for range in layout {
        let range_end = base + range.pages().0;
        let (from, to) = (first.max(base), end.min(range_end));
        if from < to {
            found.push(Extent { frame: range.start().0 + (from - base), pages: to - from });
        }
        base = range_end;
    }
    found
}

/// Address of a page in the first range, which begins at 0.
pub(crate) fn address(page: u64) -> Gpa {
    Gpa(page * PAGE_SIZE)
}

/// The limits of [`ProgramParams`] keep these numbers small.
pub(crate) fn narrow(value: u128) -> u64 {
    u64::try_from(value).expect("limited by the parameters' checks")
}

/// A structure that consists of 64-bit words only.
pub(crate) trait Words {
    fn words(&self) -> Vec<u64>;
}

pub(crate) fn bytes_of(words: &impl Words) -> Vec<u8> {
    words.words().into_iter().flat_map(u64::to_le_bytes).collect()
}

impl Words for Directory {
    fn words(&self) -> Vec<u64> {
        let words = vec![
            self.magic,
            self.version,
            self.vcpus,
            self.counters,
            self.counters_stride,
            self.nics,
            self.nic_counters,
            self.nic_counters_stride,
        ];
        assert_eq!(words.len() * 8, size_of::<Directory>(), "every field is listed");
        words
    }
}

impl Words for Parameters {
    fn words(&self) -> Vec<u64> {
        let mut words = vec![
            self.magic,
            self.version,
            self.counters,
            self.versions,
            self.working_set_pages,
            self.pages_per_tick,
            self.tick_cycles,
            self.verify_per_tick,
        ];
        words.extend(self.zero_samples);
        words.push(self.zero_samples_count);
        words.extend(self.extents.iter().flat_map(|extent| [extent.frame, extent.pages]));
        words.push(self.extents_count);
        words.extend(self.nics);
        words.extend([self.nics_count, self.nic_turns_per_tick]);
        assert_eq!(words.len() * 8, size_of::<abi::Parameters>(), "every field is listed");
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, pages: u64) -> PageRange {
        PageRange::try_new(Gfn(start), PageCount(pages)).unwrap()
    }

    #[test]
    fn too_little_memory_is_one_clear_line() {
        let error = Plan::validate(ByteCount(512 << 20), 1, &ProgramParams::default());
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("fill=512.0 MiB needs 513."), "{text}");
        assert!(text.ends_with("of guest memory, there are 512.0 MiB"), "{text}");
        assert_eq!(Plan::validate(ByteCount(1 << 30), 64, &ProgramParams::default()), Ok(()));
    }

    #[test]
    fn shares_must_not_be_empty() {
        let params: ProgramParams = "fill=64K,ws=4K".parse().unwrap();
        let error = Plan::validate(ByteCount(1 << 30), 2, &params).unwrap_err();
        assert_eq!(error.to_string(), "ws=4.0 KiB is less than one page for each of 2 vCPUs");
        assert_eq!(
            Plan::validate(ByteCount(1 << 30), 0, &params),
            Err(PlanError::Vcpus { vcpus: 0 })
        );
    }

    #[test]
    fn the_program_and_its_tables_must_fit_below_the_hole() {
        let params: ProgramParams = "fill=4M,ws=4M".parse().unwrap();
        let layout = [range(0, 257), range(1 << 20, 1 << 20)];
        assert!(matches!(Plan::new(&layout, 1, &params, 1), Err(PlanError::TooBig { .. })));
        assert_eq!(Plan::new(&[range(1, 4096)], 1, &params, 1).err(), Some(PlanError::Layout));
    }

    proptest! {
            /// Shares are disjoint, cover the fill exactly, stay in memory and off everything else.
            #[test]
            fn shares_tile_the_fill(
                vcpus in 1u16..20, fill in 64u64..4000, ws in 64u64..4000,
                low in 800u64..6000, hole in 0u64..100, high in 1u64..6000,
                cards in 0usize..4, pairs in 1u16..20,
            ) {
                let card = NicPlace { registers: Gpa(1 << 40), pairs, queue_size_max: 256 };
                let cards = vec![card; cards];
                let ws = ws.min(fill);
                let params = ProgramParams {
                    fill: ByteCount(fill * PAGE_SIZE),
                    working_set: ByteCount(ws * PAGE_SIZE),
                    ..ProgramParams::default()
                };
                let layout = [range(0, low), range(low + hole, high)];
                let Ok(plan) = Plan::with_nics(&layout, vcpus, &params, 1_000_000, &cards) else {
                    let for_cards = cards.len() as u64 * (5 + u64::from(pairs) * 18);
    let needed = 700 + for_cards;
                    prop_assert!(low < needed || low + high < fill + needed);
                    return Ok(());
                };
                let shape = Shape::new(vcpus, &params, &cards);
                let mut filled = vec![];
                let mut samples = vec![];
                let mut working_set = 0;
                let mut driven = 0;
                for vcpu in 0..u64::from(vcpus) {
                    let mine = shape.parameters(&layout, vcpu, &params, 1_000_000);
                    let extents = &mine.extents[..usize::try_from(mine.extents_count).unwrap()];
                    let frames: Vec<u64> =
                        extents.iter().flat_map(|e| e.frame..e.frame + e.pages).collect();
                    prop_assert!(mine.working_set_pages <= frames.len() as u64);
                    working_set += mine.working_set_pages;
                    driven += mine.nics_count;
                    filled.extend(frames);
                    samples.extend(&mine.zero_samples[..usize::try_from(mine.zero_samples_count).unwrap()]);
                }
                prop_assert_eq!(working_set, ws);
                prop_assert_eq!(driven, cards.len() as u64);
                prop_assert_eq!(filled.len() as u64, fill);
                prop_assert!(filled.is_sorted_by(|a, b| a < b));
                let in_memory = |f: &u64| *f < low || (low + hole..low + hole + high).contains(f);
                prop_assert!(filled.iter().chain(&samples).all(in_memory));
                prop_assert!(samples.iter().all(|frame| !filled.contains(frame)));
                samples.sort_unstable();
                prop_assert!(samples.is_sorted_by(|a, b| a < b));
                // What is written at the start lies between the VMM's memory and the fill.
                let mut end = MACHINE_RESERVED.0;
                for (gpa, bytes) in plan.writes() {
                    prop_assert!(gpa.0 >= end);
                    end = gpa.0 + bytes.len() as u64;
                }
                prop_assert!(shape.nics.end() <= filled[0]);
                prop_assert!(end <= filled[0] * PAGE_SIZE);
                let last = plan.start(vcpus - 1, 0);
                prop_assert!(last.rsp < filled[0] * PAGE_SIZE && last.rsp % 16 == 8);
            }
        }
}
