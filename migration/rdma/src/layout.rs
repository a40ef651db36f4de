//! Guest memory in chunks and units, and the types that only a checked number can have.

use super::failure::PeerFault;
use super::work::QueueIndex;
use martlet_ram::{REGIONS_MAX, RegionIndex};
use martlet_units::PAGE_SIZE;
use martlet_wire::rdma::{
    CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, QUEUES_MAX, UNIT_CHUNKS_MAX, WireSpan, ZeroRange,
};

/// Most units of a guest. Larger guests take larger chunks: 4 TiB by the MiB, 4 PiB by the GiB.
pub const UNITS_MAX: u64 = 1 << 22;

/// Neighbouring chunks share a queue pair up to this much memory, so that messages can go across
/// the borders of small chunks although every version of a page takes the same queue pair.
pub const STRIPE_BYTES_MIN: u64 = 8 << 20;

/// A unit of this layout: chunks that are registered together. Only a [`Layout`] makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitIndex(u32);

impl UnitIndex {
    pub(super) fn place(self) -> usize {
        self.0 as usize
    }
}

/// Pages of one region, inside of it and not empty. Only a [`Layout`] makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSpan {
    region: RegionIndex,
    first_page: u64,
    pages: u64,
}

impl PageSpan {
    /// The region.
    pub fn region(&self) -> RegionIndex {
        self.region
    }

    /// The first page, counted from the region's start.
    pub fn first_page(&self) -> u64 {
        self.first_page
    }

    /// How many pages; at least one.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// One past the last page.
    pub fn end(&self) -> u64 {
        self.first_page + self.pages
    }

    /// Their length.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    /// Takes `more` on, if it goes on where this one ends.
    pub(super) fn try_extend(&mut self, more: PageSpan) -> bool {
        let follows = more.region == self.region && more.first_page == self.end();
        if follows {
            self.pages += more.pages;
        }
        follows
    }

    /// The part before `end`, if there is one; what is left stays in `self`, which becomes `None`
    /// if nothing is.
    pub(super) fn split_before(self, end: u64) -> (PageSpan, Option<PageSpan>) {
        assert!(end > self.first_page, "would cut an empty part off {self:?}");
        if end >= self.end() {
            return (self, None);
        }
        let front = PageSpan { pages: end - self.first_page, ..self };
        let back = PageSpan { first_page: end, pages: self.end() - end, ..self };
        (front, Some(back))
    }
}

/// Why memory can't be cut like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No region, too many, an empty one, or more than can be counted.
    #[error("guest memory regions are none, too many, empty or too large")]
    Regions,
    /// Not a power of two, too small or too large.
    #[error(
        "RDMA chunks of {0} bytes, expected a power of two from {CHUNK_BYTES_MIN} to \
         {CHUNK_BYTES_MAX}"
    )]
    Chunk(u64),
    /// Not a power of two, or too large.
    #[error("{0} chunks registered together, expected a power of two up to {UNIT_CHUNKS_MAX}")]
    Unit(u32),
    /// No queue pair, or more than the protocol knows.
    #[error("{0} RDMA queue pairs, expected 1 to {QUEUES_MAX}")]
    Queues(u16),
    /// Too many units.
    #[error("{0} RDMA units, at most {UNITS_MAX}: take larger chunks")]
    Units(u64),
}

#[derive(Clone, Copy, Debug)]
struct Region {
    pages: u64,
    first_unit: u32,
    units: u32,
}

/// How guest memory is cut. Both sides make the same one from `Setup` and the agreed terms.
#[derive(Clone, Debug)]
pub struct Layout {
    regions: Box<[Region]>,
    chunk_pages: u64,
    unit_chunks: u32,
    units: u32,
}

impl Layout {
    /// Cuts regions of these lengths, in pages.
    pub fn new(regions: &[u64], chunk_bytes: u64, unit_chunks: u32) -> Result<Layout, LayoutError> {
        let chunks = CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX;
        if !chunk_bytes.is_power_of_two() || !chunks.contains(&chunk_bytes) {
            return Err(LayoutError::Chunk(chunk_bytes));
        }
        if !unit_chunks.is_power_of_two() || unit_chunks > UNIT_CHUNKS_MAX {
            return Err(LayoutError::Unit(unit_chunks));
        }
        if !(1..=REGIONS_MAX).contains(&regions.len()) {
            return Err(LayoutError::Regions);
        }
        let chunk_pages = chunk_bytes / PAGE_SIZE;
        let unit_pages = chunk_pages * u64::from(unit_chunks);
        let mut cut = Vec::with_capacity(regions.len());
        let mut units = 0_u64;
        for pages in regions {
            if *pages == 0 || pages.checked_mul(PAGE_SIZE).is_none() {
                return Err(LayoutError::Regions);
            }
            let count = pages.div_ceil(unit_pages);
            units = units.saturating_add(count);
            if units > UNITS_MAX {
                return Err(LayoutError::Units(units));
            }
            let (first_unit, count) = (small(units - count), small(count));
            cut.push(Region { pages: *pages, first_unit, units: count });
        }
        Ok(Layout { regions: cut.into(), chunk_pages, unit_chunks, units: small(units) })
    }

    /// How many units there are.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Bytes of a full unit; the last one of a region may be shorter.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_pages() * PAGE_SIZE
    }

    /// Bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.pages * PAGE_SIZE).sum()
    }

    /// Lengths of the regions in pages.
    pub fn regions(&self) -> impl Iterator<Item = u64> {
        self.regions.iter().map(|region| region.pages)
    }

    /// Pages of this guest as a checked type; `None` if they are none, or not in the region.
    pub fn pages(&self, region: RegionIndex, first_page: u64, pages: u64) -> Option<PageSpan> {
        let length = self.regions.get(usize::from(region.0))?.pages;
        let end = first_page.checked_add(pages)?;
        (pages > 0 && end <= length).then_some(PageSpan { region, first_page, pages })
    }

    /// The unit that holds the first page of a span.
    pub fn unit_of(&self, span: PageSpan) -> UnitIndex {
        let region = &self.regions[usize::from(span.region.0)];
        UnitIndex(region.first_unit + small(span.first_page / self.unit_pages()))
    }

    /// The pages of a unit.
    pub fn unit_pages_of(&self, unit: UnitIndex) -> PageSpan {
        let place = self.regions.partition_point(|region| region.first_unit <= unit.0) - 1;
        let region = &self.regions[place];
        let first_page = u64::from(unit.0 - region.first_unit) * self.unit_pages();
        let pages = self.unit_pages().min(region.pages - first_page);
        let index = RegionIndex(u16::try_from(place).expect("at most 64 regions"));
        PageSpan { region: index, first_page, pages }
    }

    /// The unit after this one, in the scanner's order.
    pub fn next_unit(&self, unit: UnitIndex) -> Option<UnitIndex> {
        (unit.0 + 1 < self.units).then_some(UnitIndex(unit.0 + 1))
    }

    /// All units, in the scanner's order.
    pub fn all_units(&self) -> impl Iterator<Item = UnitIndex> + use<> {
        (0..self.units).map(UnitIndex)
    }

    /// The first unit.
    pub fn first_unit(&self) -> UnitIndex {
        UnitIndex(0)
    }

    /// The queue pair that carries a page, the same in every round.
    pub fn queue_of(&self, span: PageSpan, queues: u16) -> QueueIndex {
        let stripe = span.first_page / self.stripe_pages() + u64::from(span.region.0);
        QueueIndex(u16::try_from(stripe % u64::from(queues)).expect("below a u16"))
    }

    /// The first page behind the start of `span` that another unit or queue pair carries.
    pub(super) fn message_end(&self, span: PageSpan, queues: u16) -> u64 {
        let behind = |pages: u64| (span.first_page / pages + 1) * pages;
        let unit = behind(self.unit_pages());
        if queues == 1 { unit } else { unit.min(behind(self.stripe_pages())) }
    }

    /// A unit as the wire names it.
    pub fn to_wire(&self, unit: UnitIndex) -> WireSpan {
        let span = self.unit_pages_of(unit);
        WireSpan {
            region: span.region.0,
            first_chunk: span.first_page / self.chunk_pages,
            chunks: small(span.pages.div_ceil(self.chunk_pages)),
        }
    }

    /// The unit that a peer names; anything but a whole unit of this guest is its fault.
    pub fn from_wire(&self, span: &WireSpan) -> Result<UnitIndex, PeerFault> {
        let wrong = PeerFault::Span(*span);
        let region = self.regions.get(usize::from(span.region)).ok_or(wrong.clone())?;
        let unit = span.first_chunk / u64::from(self.unit_chunks);
        if unit >= u64::from(region.units) {
            return Err(wrong);
        }
        let unit = UnitIndex(region.first_unit + small(unit));
        if self.to_wire(unit) == *span { Ok(unit) } else { Err(wrong) }
    }

    /// The pages that a peer names.
    pub fn range_from_wire(&self, range: &ZeroRange) -> Result<PageSpan, PeerFault> {
        self.pages(RegionIndex(range.region), range.first_page, u64::from(range.count))
            .ok_or(PeerFault::Range(*range))
    }

    fn unit_pages(&self) -> u64 {
        self.chunk_pages * u64::from(self.unit_chunks)
    }

    fn stripe_pages(&self) -> u64 {
        self.chunk_pages.max(STRIPE_BYTES_MIN / PAGE_SIZE)
    }
}

/// A count that [`UNITS_MAX`] or a unit's length bounds.
fn small(count: u64) -> u32 {
    u32::try_from(count).expect("bounded by the number of units")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB_PAGES: u64 = 256;

    #[test]
    fn units_cover_every_page_once() {
        let regions = [5 * MIB_PAGES + 3, 2 * MIB_PAGES, 1];
        let layout = Layout::new(&regions, 1 << 20, 2).unwrap();
        assert_eq!(layout.units(), 3 + 1 + 1);
        let mut next = Some(layout.first_unit());
        let mut covered = Vec::new();
        while let Some(unit) = next {
            let span = layout.unit_pages_of(unit);
            assert_eq!(layout.unit_of(span), unit);
            assert_eq!(layout.from_wire(&layout.to_wire(unit)), Ok(unit));
            covered.push((span.region().0, span.first_page(), span.pages()));
            next = layout.next_unit(unit);
        }
        let expected = [(0, 0, 512), (0, 512, 512), (0, 1024, 259), (1, 0, 512), (2, 0, 1)];
        assert_eq!(covered, expected);
    }

    #[test]
    fn a_peer_can_name_whole_units_and_pages_of_the_guest_only() {
        let layout = Layout::new(&[5 * MIB_PAGES, MIB_PAGES], 1 << 20, 2).unwrap();
        let span = |region, first_chunk, chunks| WireSpan { region, first_chunk, chunks };
        for good in [span(0, 0, 2), span(0, 4, 1), span(1, 0, 1)] {
            assert!(layout.from_wire(&good).is_ok());
        }
        for bad in [
            span(0, 0, 1),
            span(0, 1, 2),
            span(0, 4, 2),
            span(0, 6, 2),
            span(0, u64::MAX, 1),
            span(1, 0, 2),
            span(2, 0, 1),
        ] {
            assert_eq!(layout.from_wire(&bad), Err(PeerFault::Span(bad)));
        }
        let range = |region, first_page, count| ZeroRange { region, first_page, count };
        assert!(layout.range_from_wire(&range(1, 0, 256)).is_ok());
        for bad in [range(1, 0, 257), range(1, 256, 1), range(2, 0, 1), range(0, u64::MAX, 1)] {
            assert_eq!(layout.range_from_wire(&bad), Err(PeerFault::Range(bad)));
        }
    }

    #[test]
    fn small_chunks_share_a_queue_so_that_messages_cross_their_borders() {
        let layout = Layout::new(&[64 * MIB_PAGES], 1 << 20, 16).unwrap();
        let at = |mib: u64| layout.pages(RegionIndex(0), mib * MIB_PAGES, 1).unwrap();
        assert_eq!(layout.queue_of(at(0), 4), layout.queue_of(at(7), 4));
        assert_ne!(layout.queue_of(at(7), 4), layout.queue_of(at(8), 4));
        assert_eq!(layout.message_end(at(3), 4), 8 * MIB_PAGES);
        assert_eq!(layout.message_end(at(3), 1), 16 * MIB_PAGES);
    }

    #[test]
    fn layouts_that_make_no_sense() {
        let new = |regions: &[u64], chunk, unit| Layout::new(regions, chunk, unit).unwrap_err();
        assert_eq!(new(&[1], 3 << 20, 1), LayoutError::Chunk(3 << 20));
        assert_eq!(new(&[1], 1 << 31, 1), LayoutError::Chunk(1 << 31));
        assert_eq!(new(&[1], 1 << 20, 3), LayoutError::Unit(3));
        assert_eq!(new(&[], 1 << 20, 1), LayoutError::Regions);
        assert_eq!(new(&[0], 1 << 20, 1), LayoutError::Regions);
        assert_eq!(new(&[u64::MAX], 1 << 20, 1), LayoutError::Regions);
        assert!(matches!(new(&[1 << 40], 1 << 20, 1), LayoutError::Units(_)));
    }
}
