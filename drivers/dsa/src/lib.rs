//! The driver of the Intel Data Streaming Accelerator: finds zero pages, while the CPU sends.
//!
//! ```text
//! find      what /sys/bus/dsa says: devices, work queues, their limits
//! open      a work queue's portal by mmap (ENQCMD, MOVDIR64B), or its device file by write()
//! WorkQueue descriptors in, with tries and credits
//! Gate      who may offload how much: the migration's policy, and tokens between processes
//! ZeroEngine  which of these pages are zero: one for each channel, two jobs deep
//! ```
//!
//! **Every question has one right answer, and the CPU always knows it.** A full queue, an error, a
//! page that is not mapped, a device that is late or gone: in each case the pages in question are
//! checked by the CPU, with the check that the caller gives. No result is ever missing or guessed.
//!
//! **The device may write to memory late.** There is one rule for a batch whose deadline passes: its
//! queue is given up for good, with everything that waits for it, and the CPU does the rest. So the
//! deadline is paid once. Its descriptors and records are never used again, nor freed.
//!
//! **No thread polls.** Who collects a job looks whether it is done, spins shortly, and then waits
//! where [`CompletionWait`] says: UMWAIT and short sleeps on hardware, a model's seat in tests.
//! After construction nothing allocates.
//!
//! Addresses are the process's own where the device has its address space (SVA), and whatever
//! [`Dma::pin`](martlet_device_io::Dma::pin) says otherwise.

mod cpu;
mod error;
mod find;
mod gate;
mod instructions;
mod memory;
mod open;
mod process_memory;
mod queue;
mod range;
mod slots;
mod tokens;
mod wait;
mod zero;

pub use cpu::CpuCheck;
pub use error::{FindError, OpenError};
pub use find::{Device, Mode, Queue, QueueName, find, find_queue};
pub use gate::{Ask, Gate, Grant, Latency, Outcome};
pub use instructions::Instructions;
pub use memory::{PageRun, SharedMemory};
pub use open::{Opened, Submitter, open};
pub use process_memory::ProcessMemory;
pub use queue::{QueueLimits, WorkQueue};
pub use tokens::{TokenError, Tokens};
pub(crate) use wait::HostWait;
pub use wait::{CompletionWait, SeatWait, StatusByte};
pub use zero::{EngineConfig, JOB_PAGES_MAX, JOBS, Stats, ZeroEngine, ZeroPages};
