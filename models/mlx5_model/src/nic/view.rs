//! Guest memory as one queue sees it: through its key, with what it writes logged as dirty.

use crate::keys::{AccessError, Cache, Keys};
use crate::num::{low8, low32, to_u64};
use martlet_device_io::BusMemory;

/// Pages that were written and are not in the log yet. Beyond this many they go there early.
const UNLOGGED_MAX: usize = 32;

/// log2 of the smallest page of a dirty log; `vhost_log_page` counts from here.
const LOG_PAGE_MIN: u32 = 12;

/// The bus and the keys of a device, for as long as no key is taken away.
#[derive(Clone, Copy)]
pub(crate) struct Reach<'a> {
    pub(crate) bus: &'a dyn BusMemory,
    pub(crate) keys: &'a Keys,
}

/// Where a queue's dirty pages are logged: the `dirty_bitmap` fields of its object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogPlace {
    pub(crate) key: u32,
    pub(crate) at: u64,
    pub(crate) bytes: u32,
    pub(crate) log_page: u8,
}

/// A queue's way to memory.
#[derive(Debug)]
pub(crate) struct View {
    domain: u32,
    memory: Way,
    log: Option<(LogPlace, Way)>,
    unlogged: Vec<u64>,
    /// Accesses that ended at the null key.
    pub(crate) null_accesses: u64,
    /// Pages that lie beyond the end of the log.
    pub(crate) beyond_log: u64,
}

#[derive(Debug)]
struct Way {
    key: u32,
    cache: Cache,
}

impl Way {
    fn new(key: u32) -> Way {
        Way { key, cache: Cache::new() }
    }
}

impl View {
    /// A view through a key.
    pub(crate) fn new(domain: u32, key: u32) -> View {
        View {
            domain,
            memory: Way::new(key),
            log: None,
            unlogged: Vec::with_capacity(UNLOGGED_MAX),
            null_accesses: 0,
            beyond_log: 0,
        }
    }

    /// Goes through another key from now on.
    pub(crate) fn set_key(&mut self, key: u32) {
        self.memory = Way::new(key);
    }

    /// Logs to another place from now on, or not at all. What was written before is logged already.
    pub(crate) fn set_log(&mut self, log: Option<LogPlace>) {
        self.log = log.map(|place| (place, Way::new(place.key)));
    }

    /// Fills `into` from memory.
    pub(crate) fn read(
        &mut self,
        reach: Reach<'_>,
        at: u64,
        into: &mut [u8],
    ) -> Result<(), AccessError> {
        let (mut at, mut rest) = (at, into);
        while !rest.is_empty() {
            let domain = self.domain;
            let way = &mut self.memory;
            let (bytes, bus) = way.cache.find(reach.keys, (way.key, domain), at, false)?;
            let (now, later) = split(rest, bytes);
            match bus {
                Some(bus) => {
                    reach.bus.read(bus, now).map_err(|_| AccessError::Bus { at: bus.0 })?;
                }
                None => {
                    now.fill(0);
                    self.null_accesses += 1;
                }
            }
            at = at.wrapping_add(to_u64(now.len()));
            rest = later;
        }
        Ok(())
    }

    /// Writes `from` to memory, and remembers the pages for the log.
    pub(crate) fn write(
        &mut self,
        reach: Reach<'_>,
        at: u64,
        from: &[u8],
    ) -> Result<(), AccessError> {
        let (mut at, mut rest) = (at, from);
        while !rest.is_empty() {
            let domain = self.domain;
            let way = &mut self.memory;
            let (bytes, bus) = way.cache.find(reach.keys, (way.key, domain), at, true)?;
            let length = usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at(length);
            match bus {
                Some(bus) => {
                    // Noted whether or not all of it was written: what was is in memory.
                    let written = reach.bus.write(bus, now);
                    self.note(reach, at, to_u64(length))?;
                    written.map_err(|_| AccessError::Bus { at: bus.0 })?;
                }
                None => self.null_accesses += 1,
            }
            at = at.wrapping_add(to_u64(length));
            rest = later;
        }
        Ok(())
    }

    fn note(&mut self, reach: Reach<'_>, at: u64, bytes: u64) -> Result<(), AccessError> {
        let Some((log, _)) = &self.log else { return Ok(()) };
        let shift = LOG_PAGE_MIN + u32::from(log.log_page);
        let (first, last) = (at >> shift, at.saturating_add(bytes - 1) >> shift);
        for page in first..=last {
            if self.unlogged.contains(&page) {
                continue;
            }
            if self.unlogged.len() == UNLOGGED_MAX {
                self.flush_log(reach)?;
            }
            self.unlogged.push(page);
        }
        Ok(())
    }

    /// Sets the bits of the pages that were written: after the writes, so that who finds a bit finds
    /// the bytes. To be called before the queue is left alone.
    pub(crate) fn flush_log(&mut self, reach: Reach<'_>) -> Result<(), AccessError> {
        let Some((log, way)) = &mut self.log else { return Ok(()) };
        // The driver's side clears bits at any moment, so a page that was written again since is
        // set again: pages are only put together between two flushes.
        while let Some(page) = self.unlogged.pop() {
            let byte = page / 8;
            if byte >= u64::from(log.bytes) {
                self.beyond_log += 1;
                continue;
            }
            let at = log.at.wrapping_add(byte);
            let bits = 1 << (low8(low32(page)) % 8);
            let (_, bus) = way.cache.find(reach.keys, (way.key, self.domain), at, true)?;
            // A log that throws away what it is told would lose a page.
            let bus = bus.ok_or(AccessError::Forbidden { key: way.key, at })?;
            reach.bus.or8(bus, bits).map_err(|_| AccessError::Bus { at: bus.0 })?;
        }
        Ok(())
    }
}

fn split(bytes: &mut [u8], at: u64) -> (&mut [u8], &mut [u8]) {
    let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    bytes.split_at_mut(at)
}
