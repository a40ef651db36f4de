//! The figures that the simulation is made of, and where each one comes from.
//!
//! *Tables* are those of the cover letter of QEMU's series "Use Intel DSA accelerator to offload
//! zero page checking in multifd live migration" (Xiang and Wang, 2023 and 2024; the same in all
//! revisions): one 100 GB guest, 8 channels, one device, two Xeon Platinum 8457C. 25.6 million
//! pages of 4 KiB, so a second of CPU is 39 ns a page. *Derived* is what follows from them.

use std::time::Duration;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Pages of a packet and of a batch: 512 KiB, the series' default.
pub(crate) const PACKET_PAGES: u32 = 128;

/// Pages of the series' guest.
pub(crate) const SERIES_PAGES: u64 = 25_600_000;
/// Its channels.
pub(crate) const SERIES_CHANNELS: usize = 8;

/// Checking a page by the CPU, to its end: all zero. Tables, second scenario: eight senders with
/// nothing else to do took 6299 ms.
pub(crate) const CPU_ZERO_PAGE: Duration = Duration::from_nanos(246);
/// Looking at a page that is not zero: one miss of the caches, 80 to 100 ns.
pub(crate) const CPU_DATA_PAGE: Duration = Duration::from_nanos(90);

/// One ENQCMD that succeeds or is refused: measured by others, see the device model's times.
pub(crate) const ENQCMD: Duration = Duration::from_nanos(220);
/// CPU time of one sleep and its end: assumed. It is a part of the series' 56 ns, 16 ns a page.
pub(crate) const SLEEP_CPU: Duration = Duration::from_nanos(2_000);
/// How long after its cause a sleep ends: assumed.
pub(crate) const SLEEP_LATE: Duration = Duration::from_nanos(3_000);
/// Derived: the rest of the 56 ns, by page: filling a descriptor, reading a record, sorting the
/// page's number. Half before the submission, half after the completion.
pub(crate) const DESCRIPTOR_PAGE: Duration = Duration::from_nanos(38);
/// A page in a range: reading its bit and sorting its number; assumed. The range's one descriptor
/// and record cost [`DESCRIPTOR_PAGE`] once.
pub(crate) const RANGE_PAGE: Duration = Duration::from_nanos(3);
/// How long a martlet channel spins before it sleeps.
pub(crate) const SPIN: Duration = Duration::from_nanos(2_000);

/// QEMU's walker beside senders that check on the CPU. Tables, second scenario: `live_migration`
/// ran for 4861 ms of 4867, so it was what everything waited for.
pub(crate) const WALK_BESIDE_CPU_PAGE: Duration = Duration::from_nanos(190);
/// The same beside the device: 3847 ms of 3888. The tables do not say why it is faster; caches that
/// the check does not sweep are likely.
pub(crate) const WALK_BESIDE_DSA_PAGE: Duration = Duration::from_nanos(150);
/// What the walker does besides for a page that is sent. Derived: in the first scenario it took 31
/// and 89 ns more for every page of which half were sent; this is the mean, doubled.
pub(crate) const WALK_SENT_PAGE: Duration = Duration::from_nanos(120);
/// martlet's walk, done by the channel itself: chunks of 512 bits out of the bitmap, and runs and
/// addresses for the send. Assumed; `ram::Scanner` itself takes less than 1 ns.
pub(crate) const MARTLET_WALK_PAGE: Duration = Duration::from_nanos(10);

/// CPU time of sending a page by TCP. Derived: in the first scenario with DSA the senders took 22832
/// ms, of which 1434 ms are 56 ns for each page that is checked; the rest is 13.5 million pages that
/// were sent.
pub(crate) const SEND_PAGE: Duration = Duration::from_nanos(1_590);
/// How much more it costs right after a check on the same CPU. Derived the same way: 36271 ms, less
/// 6299 ms of checks, for 12.9 million pages are 2324 ns each. No source says why. Without a cost
/// of this kind no model gives both columns of the first scenario: the senders' difference is 13.4
/// s, and all checks together take 6.3 s.
pub(crate) const SEND_AFTER_CHECK_PAGE: Duration = Duration::from_nanos(730);
/// How long a channel's connection is busy with a page. Derived: 200 000 packets on 8 channels in
/// 10343 and 9535 ms are 414 and 381 us a packet, which differ by what a check takes. So a channel
/// checks and sends in turns, and of both numbers 369 us (the mean) are left for 64 pages. What
/// limits it (the connection, the destination) is not known.
pub(crate) const PATH_PAGE: Duration = Duration::from_nanos(5_760);

/// The part of the blackout that does not depend on the check. Tables, second scenario, where
/// nothing was left to send: 20 and 18 ms.
pub(crate) const BLACKOUT_FIXED: Duration = Duration::from_millis(19);
/// Pages that were left when the guest was stopped in the first scenario. Derived: what makes 161
/// and 135 ms of the rates of the two runs. QEMU stops when it expects to need 300 ms or less, which
/// is up to 375 000 pages at 41 Gbit/s.
pub(crate) const BLACKOUT_PAGES: u64 = 330_000;

/// Processors of the simulated host: two sockets of 48 cores with two threads each.
pub(crate) const HOST_THREADS: u32 = 192;
/// What its processors and devices can read from memory together, in bytes a second: the low end
/// of what two such sockets reach (400 to 600 GB/s).
pub(crate) const MEMORY_BYTES_PER_SEC: u64 = 400_000_000_000;
/// Bytes that looking at a page that is not zero reads: the missed line and its neighbours.
pub(crate) const DATA_PAGE_READ_BYTES: u64 = 256;
/// The host's network: 100 Gbit/s.
pub(crate) const NIC_BYTES_PER_SEC: u64 = 12_500_000_000;
/// Pages that are alike in a row, where some are zero and some are not: assumed.
pub(crate) const RUN_PAGES: u32 = 16;
