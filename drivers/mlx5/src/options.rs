//! What a device is driven with, and the switches for what the driver does better than its
//! predecessors: each can be turned back, so that before and after can be measured.

use crate::memory::{Deletion, MemoryConfig, Update};
use std::time::Duration;

/// How many commands are with the firmware at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One: each is waited for before the next.
    Serial,
    /// As many as this, and as the command queue admits.
    Batched {
        /// The window.
        window: usize,
    },
}

impl Pace {
    /// The window of a batch.
    pub fn window(self) -> usize {
        match self {
            Pace::Serial => 1,
            Pace::Batched { window } => window.max(1),
        }
    }
}

/// When the queries of a suspend are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// When all queues have stopped, as Linux does.
    AllStopped,
    /// Each when its own queue has stopped.
    EachStopped,
}

/// Where a suspended queue's indices come from when they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexReads {
    /// From the suspend, which has read them.
    Cached,
    /// From a query of their own each time, as in Linux.
    Fresh,
}

/// What becomes of the link's notifications during a suspend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkNotifier {
    /// They go on, and are swallowed.
    Kept,
    /// They are unregistered, as in Linux before 6.12; that waits for an RCU grace period and for
    /// a work queue: [`UNREGISTER_WAIT`] passes here in the device's time.
    Unregistered,
}

/// How long it takes to unregister the link's notifier: 13 ms less 2.5 ms, as measured by Dragos
/// Tatulea ("vdpa/mlx5: Keep notifiers during suspend but ignore", August 2024; one device with 32
/// virtqueues, 32 cores).
pub const UNREGISTER_WAIT: Duration = Duration::from_micros(10_500);

/// What `prepare` builds ahead of a switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepare {
    /// The queues, in state INIT: two commands each are left.
    Created,
    /// The queues, run and suspended once on an empty ring of the driver's own: one command each
    /// is left. Where the firmware can't resume, the same as [`Prepare::Created`].
    Suspended,
}

/// The memory that the firmware wants for each queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Umems {
    /// One piece for all queues of a batch, of which each gets a part: one command.
    Shared,
    /// Three pieces for each queue, as in Linux: three commands each.
    PerQueue,
}

/// How long a command may take from its issue to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Commands about virtqueues: they happen in the blackout. Linux waits for 60 s.
    pub queues: Duration,
    /// Commands about memory keys: with a window of 31 and the largest keys in small pages, one
    /// takes 70 ms.
    pub memory: Duration,
    /// Bring-up and teardown.
    pub setup: Duration,
}

impl Deadlines {
    /// As Linux has them.
    pub const LINUX: Deadlines = Deadlines {
        queues: Duration::from_secs(60),
        memory: Duration::from_secs(60),
        setup: Duration::from_secs(60),
    };
}

/// All switches and limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Suspend and resume.
    pub queues: Pace,
    /// Creation and destruction of queues, their umems and counters.
    pub lifecycle: Pace,
    /// Creation and destruction of memory keys.
    pub memory: Pace,
    /// When a suspend reads the indices.
    pub barrier: Barrier,
    /// Where `queue_state` takes them from.
    pub index_reads: IndexReads,
    /// The link during a suspend.
    pub link_notifier: LinkNotifier,
    /// What `prepare` builds.
    pub prepare: Prepare,
    /// Memory for the firmware.
    pub umems: Umems,
    /// When keys are destroyed.
    pub deletion: Deletion,
    /// What a new map builds.
    pub update: Update,
    /// How long commands may take.
    pub deadlines: Deadlines,
    /// DMA memory for command mailboxes at most, in bytes.
    pub mailbox_bytes_max: usize,
    /// Largest size of a queue that is offered. No capability tells it; Linux offers this much.
    pub queue_size_max: u16,
    /// MAC address, if the device does not tell one.
    pub mac: [u8; 6],
}

impl Options {
    /// Everything on.
    pub const MARTLET: Options = Options {
        queues: Pace::Batched { window: 31 },
        lifecycle: Pace::Batched { window: 31 },
        memory: Pace::Batched { window: 31 },
        barrier: Barrier::EachStopped,
        index_reads: IndexReads::Cached,
        link_notifier: LinkNotifier::Kept,
        prepare: Prepare::Suspended,
        umems: Umems::Shared,
        deletion: Deletion::Deferred { delay: MemoryConfig::DELETION_DELAY },
        update: Update::Changed,
        deadlines: Deadlines {
            queues: Duration::from_millis(20),
            memory: Duration::from_secs(2),
            setup: Duration::from_secs(10),
        },
        mailbox_bytes_max: 32 << 20,
        queue_size_max: 256,
        mac: [0x02, 0, 0, 0, 0, 0x01],
    };

    /// Linux before the two series: everything in a row.
    pub const LINUX_6_11: Options = Options {
        queues: Pace::Serial,
        lifecycle: Pace::Serial,
        memory: Pace::Serial,
        barrier: Barrier::EachStopped,
        index_reads: IndexReads::Fresh,
        link_notifier: LinkNotifier::Unregistered,
        prepare: Prepare::Created,
        umems: Umems::PerQueue,
        deletion: Deletion::AtOnce,
        update: Update::Everything,
        deadlines: Deadlines::LINUX,
        mailbox_bytes_max: 2 << 30,
        queue_size_max: 256,
        mac: [0x02, 0, 0, 0, 0, 0x01],
    };

    /// Linux with both series: suspend, resume and keys in batches, keys destroyed later.
    pub const LINUX_6_12: Options = Options {
        queues: Pace::Batched { window: 16 },
        memory: Pace::Batched { window: 31 },
        barrier: Barrier::AllStopped,
        link_notifier: LinkNotifier::Kept,
        deletion: Deletion::Deferred { delay: MemoryConfig::DELETION_DELAY },
        ..Options::LINUX_6_11
    };
}

impl Default for Options {
    fn default() -> Options {
        Options::MARTLET
    }
}
