//! How long firmware takes.
//!
//! A command passes four stations: the firmware notices it after `pickup`; it then holds the
//! firmware's one exclusive section for `serial`, in the order of the doorbells; then it goes on
//! for `overlap` beside others; and when it is done, the interrupt reaches the driver after `wake`.
//! So `n` commands at once take `n * serial + overlap`, and one after the other `n` times the sum.
//!
//! No public document says how long these take. The presets are fitted to what was published with
//! two Linux patch series, "vdpa/mlx5: Parallelize device suspend/resume" and "vdpa/mlx5: Optimize
//! MKEY operations" (Dragos Tatulea, August 2024): for one device with 32 virtqueues a suspend of
//! 37 ms that became 2.5 ms, a resume of 16 ms that became 4.5 ms; creation of a map 3 to 5 times
//! and its removal 8 times as fast; downtimes of 3140 and 3630 ms that became 1200 and 2000 ms.

use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::object_type;
use std::time::Duration;

/// How long commands of one class take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// From the doorbell to the firmware's look.
    pub pickup: Duration,
    /// In the exclusive section.
    pub serial: Duration,
    /// In the exclusive section, for each entry of a key's page list: picoseconds.
    pub serial_per_page_ps: u64,
    /// Beside other commands.
    pub overlap: Duration,
    /// Beside other commands, for each entry of a key's page list: picoseconds.
    pub overlap_per_page_ps: u64,
    /// From the end to the interrupt.
    pub wake: Duration,
}

/// What commands have a latency of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// MODIFY of a virtqueue from RDY to SUSPEND.
    QueueSuspend,
    /// MODIFY of a virtqueue from SUSPEND to RDY.
    QueueResume,
    /// MODIFY of a virtqueue from INIT to RDY.
    QueueStart,
    /// MODIFY of a virtqueue that leaves its state.
    QueueFields,
    /// QUERY of a virtqueue.
    QueueQuery,
    /// CREATE of a virtqueue.
    QueueCreate,
    /// DESTROY of a virtqueue.
    QueueDestroy,
    /// Anything with queue counters.
    Counters,
    /// CREATE_MKEY.
    KeyCreate,
    /// DESTROY_MKEY.
    KeyDestroy,
    /// CREATE_UMEM and DESTROY_UMEM.
    Umem,
    /// Everything else.
    Other,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 12] = [
        Class::QueueSuspend,
        Class::QueueResume,
        Class::QueueStart,
        Class::QueueFields,
        Class::QueueQuery,
        Class::QueueCreate,
        Class::QueueDestroy,
        Class::Counters,
        Class::KeyCreate,
        Class::KeyDestroy,
        Class::Umem,
        Class::Other,
    ];

    /// The class of a command, but for MODIFY of a virtqueue, which depends on its state.
    pub(crate) fn of(opcode: Opcode, object: u16) -> Class {
        match opcode {
            Opcode::CREATE_MKEY => Class::KeyCreate,
            Opcode::DESTROY_MKEY => Class::KeyDestroy,
            Opcode::CREATE_UMEM | Opcode::DESTROY_UMEM => Class::Umem,
            Opcode::CREATE_GENERAL_OBJECT
            | Opcode::MODIFY_GENERAL_OBJECT
            | Opcode::QUERY_GENERAL_OBJECT
            | Opcode::DESTROY_GENERAL_OBJECT => match (object, opcode) {
                (object_type::VIRTIO_NET_Q, Opcode::CREATE_GENERAL_OBJECT) => Class::QueueCreate,
                (object_type::VIRTIO_NET_Q, Opcode::QUERY_GENERAL_OBJECT) => Class::QueueQuery,
                (object_type::VIRTIO_NET_Q, Opcode::DESTROY_GENERAL_OBJECT) => Class::QueueDestroy,
                (object_type::VIRTIO_NET_Q, _) => Class::QueueFields,
                _ => Class::Counters,
            },
            _ => Class::Other,
        }
    }
}

/// How long commands take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies([Latency; Class::ALL.len()]);

const PICKUP: Duration = Duration::from_micros(5);
const WAKE: Duration = Duration::from_micros(15);

fn fixed(serial_us: u64, overlap_us: u64) -> Latency {
    Latency {
        pickup: PICKUP,
        serial: Duration::from_micros(serial_us),
        overlap: Duration::from_micros(overlap_us),
        wake: WAKE,
        ..Latency::default()
    }
}

impl Latencies {
    /// Everything takes no time at all.
    pub fn zero() -> Latencies {
        Latencies([Latency::default(); Class::ALL.len()])
    }

    /// A ConnectX-6 Dx as the two series measured it.
    ///
    /// Virtqueues: 64 commands in 26.5 ms and 32 in 16 ms, one after the other, give 0.50 ms for a
    /// MODIFY and 0.33 ms for a QUERY; all at once, 2.5 ms and 4.5 ms give the exclusive parts:
    /// 33 us for a suspend, 22 us for a query, 130 us for a resume. To start a new queue is taken to
    /// cost what a resume costs, to change its fields what a suspend costs; together they stay
    /// below the 60 ms that configuring and starting 32 queues took. Creation: 310 ms for 32 queues
    /// of about 15 commands each.
    ///
    /// Keys: 8.0 ms for one of 262144 pages and 0.5 ms for a small one, of which 2.05 ms are
    /// exclusive for the large one, and removal 2.3 ms and 0.55 ms, of which 0.72 ms and 0.067 ms:
    /// with these, 258 keys for 256 GiB fit the downtimes of the second series.
    pub fn connectx6dx_from_series() -> Latencies {
        let create =
            Latency { serial_per_page_ps: 7_351, overlap_per_page_ps: 21_259, ..fixed(123, 357) };
        let destroy =
            Latency { serial_per_page_ps: 2_491, overlap_per_page_ps: 4_185, ..fixed(67, 463) };
        Latencies::zero()
            .with(Class::QueueSuspend, fixed(33, 447))
            .with(Class::QueueResume, fixed(130, 350))
            .with(Class::QueueStart, fixed(130, 350))
            .with(Class::QueueFields, fixed(33, 447))
            .with(Class::QueueQuery, fixed(22, 288))
            .with(Class::QueueCreate, fixed(165, 465))
            .with(Class::QueueDestroy, fixed(130, 350))
            .with(Class::Counters, fixed(50, 130))
            .with(Class::KeyCreate, create)
            .with(Class::KeyDestroy, destroy)
            .with(Class::Umem, fixed(50, 130))
            .with(Class::Other, fixed(50, 130))
    }

    /// As [`Latencies::connectx6dx_from_series`], with keys as the second series measured them for
    /// small maps: 0.77 ms for a creation and 0.55 ms for a removal, of which 0.19 ms and 0.067 ms
    /// are exclusive, whatever their page lists.
    pub fn mkey_small() -> Latencies {
        Latencies::connectx6dx_from_series()
            .with(Class::KeyCreate, fixed(190, 560))
            .with(Class::KeyDestroy, fixed(67, 463))
    }

    /// As [`Latencies::connectx6dx_from_series`], with every key taken to be one of 1 GiB in pages
    /// of 4 KiB, whatever its page list: so that the large tables can be measured with small lists.
    pub fn mkey_large() -> Latencies {
        Latencies::connectx6dx_from_series()
            .with(Class::KeyCreate, fixed(2_050, 5_930))
            .with(Class::KeyDestroy, fixed(720, 1_560))
    }

    /// The same but for one class.
    pub fn with(mut self, class: Class, latency: Latency) -> Latencies {
        if let Some(slot) = Class::ALL.iter().position(|each| *each == class) {
            self.0[slot] = latency;
        }
        self
    }

    /// How long a class takes.
    pub fn get(&self, class: Class) -> Latency {
        let slot = Class::ALL.iter().position(|each| *each == class);
        slot.and_then(|slot| self.0.get(slot)).copied().unwrap_or_default()
    }
}

impl Latency {
    /// The exclusive section for a page list of this length.
    pub fn serial_for(&self, pages: u64) -> Duration {
        self.serial + Duration::from_nanos(self.serial_per_page_ps.saturating_mul(pages) / 1000)
    }

    /// What overlaps, for a page list of this length.
    pub fn overlap_for(&self, pages: u64) -> Duration {
        self.overlap + Duration::from_nanos(self.overlap_per_page_ps.saturating_mul(pages) / 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One after the other, and `n` at once, in microseconds.
    fn times(latency: Latency, pages: u64, n: u32) -> (u128, u128) {
        let (serial, overlap) = (latency.serial_for(pages), latency.overlap_for(pages));
        let each = latency.pickup + serial + overlap + latency.wake;
        let batch = latency.pickup + serial * n + overlap + latency.wake;
        ((each * n).as_micros(), batch.as_micros())
    }

    #[test]
    fn presets_give_the_published_figures() {
        let series = Latencies::connectx6dx_from_series();
        let suspend = times(series.get(Class::QueueSuspend), 0, 32);
        let query = times(series.get(Class::QueueQuery), 0, 32);
        let resume = times(series.get(Class::QueueResume), 0, 32);
        assert_eq!((suspend.0 + query.0, suspend.1 + query.1), (26_560, 2_535));
        assert_eq!(resume, (16_000, 4_530));
        let create = times(series.get(Class::KeyCreate), 262_144, 258);
        let destroy = times(series.get(Class::KeyDestroy), 262_144, 258);
        assert_eq!((create.0 / 1000, create.1 / 1000), (2_063, 534));
        assert_eq!((destroy.0 / 1000, destroy.1 / 1000), (593, 187));
        let small = Latencies::mkey_small();
        assert_eq!(times(small.get(Class::KeyCreate), 512, 258), (198_660, 49_600));
        assert_eq!(times(small.get(Class::KeyDestroy), 512, 258), (141_900, 17_769));
    }
}
