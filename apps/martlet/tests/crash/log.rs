//! What happened in a run, for whoever has to understand a failure.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Moments with a few words each. All clones are the same log.
#[derive(Clone, Debug)]
pub(crate) struct Log(Arc<Mutex<Lines>>);

#[derive(Debug)]
struct Lines {
    zero: Instant,
    lines: Vec<(Instant, String)>,
}

impl Log {
    pub(crate) fn new() -> Log {
        Log(Arc::new(Mutex::new(Lines { zero: Instant::now(), lines: Vec::new() })))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the last run.
    pub(crate) fn restart(&self) {
        let mut log = self.lock();
        log.zero = Instant::now();
        log.lines.clear();
    }

    /// From now on times count from here.
    pub(crate) fn zero(&self) -> Instant {
        let mut log = self.lock();
        log.zero = Instant::now();
        log.zero
    }

    pub(crate) fn note(&self, text: impl Into<String>) {
        let now = Instant::now();
        self.lock().lines.push((now, text.into()));
    }

    /// One line for each moment, in their order, in milliseconds from zero.
    pub(crate) fn render(&self) -> String {
        let log = self.lock();
        let mut lines: Vec<_> = log.lines.iter().collect();
        lines.sort_by_key(|(at, _)| *at);
        let mut text = String::new();
        for (at, what) in lines {
            let ms = at.saturating_duration_since(log.zero).as_secs_f64() * 1e3
                - log.zero.saturating_duration_since(*at).as_secs_f64() * 1e3;
            let _ = writeln!(text, "{ms:>12.3} ms  {what}");
        }
        text
    }
}
