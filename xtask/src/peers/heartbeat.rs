//! Timestamps of the bytes that a guest writes to its serial port.

use std::fs::OpenOptions;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which side wrote a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

#[derive(Clone, Copy)]
struct Beat {
    at: Instant,
    side: Side,
    ready: bool,
}

/// Reads the two sides' FIFOs on a thread each.
#[derive(Default, Clone)]
pub(super) struct Heartbeat {
    beats: Arc<Mutex<Vec<Beat>>>,
}

impl Heartbeat {
    /// Makes the FIFO and reads it from now on.
    pub(super) fn listen(&self, side: Side, fifo: &Path) -> Result<(), String> {
        let made = Command::new("mkfifo").arg(fifo).status();
        if !made.is_ok_and(|status| status.success()) {
            return Err(format!("cannot make the FIFO {}", fifo.display()));
        }
        // Open for both, so that the reader neither waits for a writer nor sees an end.
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(fifo)
            .map_err(|error| format!("cannot open {}: {error}", fifo.display()))?;
        let beats = Arc::clone(&self.beats);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = file.read(&mut bytes) {
                let at = Instant::now();
                if bytes[..count].contains(&b'Q') {
                    return;
                }
                let ready = bytes[..count].contains(&b'R');
                beats.lock().unwrap_or_else(PoisonError::into_inner).push(Beat { at, side, ready });
            }
        });
        Ok(())
    }

    /// Ends the reader of a FIFO.
    pub(super) fn stop(fifo: &Path) {
        if let Ok(mut file) = OpenOptions::new().read(true).write(true).open(fifo) {
            let _ = std::io::Write::write_all(&mut file, b"Q");
        }
    }

    fn snapshot(&self) -> Vec<Beat> {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the guest has filled its memory.
    pub(super) fn wait_ready(&self, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        while !self.snapshot().iter().any(|beat| beat.ready) {
            if Instant::now() > deadline {
                return Err("the guest did not start".to_owned());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The gap at the change of sides, and the longest other one, since `since`.
    pub(super) fn gaps(&self, since: Instant) -> Result<(Duration, Duration), String> {
        let mut beats = self.snapshot();
        beats.retain(|beat| beat.at >= since);
        beats.sort_by_key(|beat| beat.at);
        let mut switch = None;
        let mut other = Duration::ZERO;
        for pair in beats.windows(2) {
            let gap = pair[1].at - pair[0].at;
            match (pair[0].side, pair[1].side) {
                (Side::Source, Side::Destination) => switch = Some(gap),
                (Side::Destination, Side::Source) => {
                    return Err("the source's guest ran after the destination's".to_owned());
                }
                _ => other = other.max(gap),
            }
        }
        Ok((switch.ok_or("the guest gave no sign of life at the destination")?, other))
    }
}
