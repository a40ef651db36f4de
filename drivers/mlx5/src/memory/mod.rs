//! Memory keys: how the device gets at guest memory.
//!
//! A map is cut into pieces of at most 1 GiB. Each gets a **direct key**, whose list has the bus
//! addresses of its memory in equal steps; one **indirect key** over all of them has a list of
//! direct keys, and the null key for holes. Queues name the indirect key only. (Linux does the
//! same, drivers/vdpa/mlx5/core/mr.c; the differences are below.)
//!
//! What costs time is commands, and the bytes of their lists. So:
//! * direct keys are created and destroyed with many commands at once, within a window; memory is
//!   pinned and lists are written when a command's turn comes, and no sooner;
//! * a piece that did not change keeps its key: the new map's indirect key shares it;
//! * keys that nobody uses are destroyed later, in slices, and not while a new map is built. A map
//!   that comes back until then is there already.
//!
//! [`MemoryConfig`] has a switch for each of these steps, so that each can be measured.
//!
//! | | Linux 6.12 | here |
//! |---|---|---|
//! | step of a direct key | common divisor of the lengths, as log2 | largest power of two that divides lengths and addresses |
//! | pieces begin | at the chain's begin, every 1 GiB | at multiples of 1 GiB |
//! | set_map | builds everything again | builds what changed |
//! | inputs of a batch | all staged at once | a window at a time |
//! | destruction | holds the lock that set_map needs | stops when a set_map comes |
//! | memory is unpinned | with the map, maybe before its key | when its key is gone |
//! | device has no room | set_map fails | keys that nobody uses go first |

mod build;
mod command;
mod config;
mod keys;
mod maps;
mod pins;
mod split;
#[cfg(test)]
mod testing;
mod translation;

pub(crate) use command::{KeyCommand, KeyContext};
pub(crate) use config::MemoryConfig;
pub use config::{Deletion, MemoryCounters, Update};
pub(crate) use keys::MapRef;
pub(crate) use maps::Maps;
pub(crate) use translation::Mtts;
