//! A map on its way into the device: all direct keys that don't exist yet, then the indirect one.

use crate::batch::Batch;
use crate::command::{CommandError, Output};
use crate::firmware::Firmware;
use crate::memory::keys::DirectKey;
use crate::memory::pins::{Ledger, Pins};
use crate::memory::split::Piece;
use crate::memory::translation::{Covered, Mtts, klms};
use crate::memory::{KeyCommand, Maps};
use martlet_device_io::Dma;
use martlet_mlx5_abi::CommandStatus;
use martlet_mlx5_abi::memory::{CreateMkeyOut, mkey_from_index};
use martlet_units::PAGE_SHIFT;
use martlet_vdpa::VdpaError;
use std::sync::Arc;

/// What errors say was being done.
const ACTION: &str = "map memory";

/// The error for a map that can't be: the VMM's fault.
pub(crate) fn invalid(reason: String) -> VdpaError {
    VdpaError::Invalid { action: ACTION, reason }
}

/// How a build went.
pub(super) enum Built {
    /// The indirect key has this number.
    Done { index: u32 },
    /// The device has no room for another key.
    NoRoom(VdpaError),
    /// It won't be.
    Failed(VdpaError),
}

impl From<&CommandError> for Built {
    fn from(error: &CommandError) -> Built {
        let told = crate::queues::vdpa_error(ACTION, error);
        let no_room = [CommandStatus::LIMIT, CommandStatus::NO_RESOURCES];
        match error {
            CommandError::Status { status, .. } if no_room.contains(status) => Built::NoRoom(told),
            _ => Built::Failed(told),
        }
    }
}

impl Maps {
    /// Makes the keys that are missing, and the indirect one over all. Those that were made stay in
    /// `keys`, also when others failed.
    pub(super) fn make(
        &mut self,
        firmware: &Firmware,
        pieces: &[Piece],
        keys: &mut [Option<Arc<DirectKey>>],
    ) -> Built {
        if let Err(failed) = self.make_direct(firmware, pieces, keys) {
            return failed;
        }
        let made: Vec<&DirectKey> = keys.iter().flatten().map(|key| &**key).collect();
        let (Some(first), Some(last)) = (made.first(), made.last()) else {
            return Built::Failed(invalid("it is empty".to_owned()));
        };
        let span = (first.piece.iova, last.piece.end() - first.piece.iova);
        let covered = made.iter().map(|key| Covered {
            iova: key.piece.iova,
            bytes: key.piece.bytes,
            key: mkey_from_index(key.index, 0),
        });
        let list = klms(covered, self.context.null_key);
        let request = KeyCommand::indirect(&self.context, span, list).into_request();
        let result = firmware.call(firmware.options().deadlines.memory, request);
        match result.as_ref().map_err(CommandError::clone).and_then(index_of) {
            Ok(index) => Built::Done { index },
            Err(error) => Built::from(&error),
        }
    }

    fn make_direct(
        &mut self,
        firmware: &Firmware,
        pieces: &[Piece],
        keys: &mut [Option<Arc<DirectKey>>],
    ) -> Result<(), Built> {
        let (window, staged_max) = (self.config.create_window, self.config.staged_bytes_max);
        let mut batch = Batch::new(window, firmware.options().deadlines.memory);
        let mut outcome = Ok(());
        let mut made: Vec<(usize, Pins)> = Vec::new();
        for (place, piece) in pieces.iter().enumerate() {
            if keys[place].is_some() {
                continue;
            }
            if window == 1 {
                // A serial create does nothing while the device works; else the host's work on the
                // next piece overlaps the device's on those before.
                firmware.run(&mut batch);
            }
            let (mtts, pins) = match pin(piece, firmware.dma(), &self.ledger) {
                Ok(pinned) => pinned,
                Err(error) => {
                    outcome = Err(Built::Failed(error));
                    break;
                }
            };
            let bytes = KeyCommand::direct_bytes(&mtts);
            firmware.run_while(&mut batch, |batch| {
                let pending = batch.pending();
                pending >= window || pending > 0 && batch.pending_bytes() + bytes > staged_max
            });
            if batch.has_failed() {
                // The device has not heard of it.
                pins.unpin();
                break;
            }
            let command = KeyCommand::direct(&self.context, piece.bytes, piece.access, mtts);
            batch.push(command.into_request());
            made.push((place, pins));
            firmware.poll(&mut batch);
        }
        firmware.run(&mut batch);
        for ((place, pins), result) in made.into_iter().zip(batch.into_results()) {
            match result.and_then(|output| index_of(&output)) {
                Ok(index) => {
                    let piece = pieces[place].clone();
                    keys[place] = Some(Arc::new(DirectKey { index, piece, pins }));
                }
                Err(error) => {
                    let is_known =
                        outcome.is_err() || matches!(error, CommandError::Skipped { .. });
                    outcome = if is_known { outcome } else { Err(Built::from(&error)) };
                    if error.may_be_done() { self.stuck.push(pins) } else { pins.unpin() }
                }
            }
        }
        outcome
    }
}

fn index_of(output: &Output) -> Result<u32, CommandError> {
    Ok(output.read::<CreateMkeyOut>()?.mkey_index.get())
}

/// Pins a piece, and checks what the bus says of it: the device would believe it.
fn pin(piece: &Piece, dma: &dyn Dma, ledger: &Arc<Ledger>) -> Result<(Mtts, Pins), VdpaError> {
    let host = |reason: String| VdpaError::Host { action: ACTION, reason };
    let mut guards = Vec::with_capacity(piece.memory.len());
    let mut runs = Vec::new();
    for memory in &piece.memory {
        // On an error the guards drop and unpin: no device has heard of them.
        let pinned = dma.pin(memory).map_err(|error| host(error.to_string()))?;
        runs.extend(pinned.runs);
        guards.push(pinned.guard);
    }
    let fits = |mtts: &Mtts| mtts.bytes() == piece.bytes && mtts.granule_shift() >= PAGE_SHIFT;
    let mtts = Mtts::new(runs).filter(fits).ok_or_else(|| {
        let (iova, bytes) = (piece.iova, piece.bytes);
        host(format!("the bus did not give {bytes:#x} bytes at {iova:#x} in whole pages"))
    })?;
    Ok((mtts, Pins::new(guards, piece.bytes, ledger)))
}
