//! A bus and a firmware that keep books about keys, for tests of the registry alone.
//!
//! The firmware reads commands as bytes, at offsets typed from the documents. It notes what no
//! driver may do: unpin memory that a key reaches, destroy a direct key under an indirect one.
#![allow(unsafe_code)]
// UNSAFETY: memory is named by addresses that nothing lies at, and nothing here looks there.

pub(crate) use crate::memory::testing::{PAGE, fake_memory};
use crate::memory::{
    Deletion, KeyAnswer, KeyCommand, KeyContext, MapRef, MemoryConfig, Refusal, Registry, Update,
};
use martlet_device_io::{BusAddress, BusRun, Dma, DmaBlock, DmaError, HostMemory, Pinned};
use martlet_units::Instant;
use martlet_vdpa::{Access, Iova, MapRun, VdpaError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const NULL_KEY: u32 = 0x0077_7700;
pub(crate) const PD: u32 = 0x1234;

/// The run of `bytes` bytes at `iova`, with the memory from `offset` on.
pub(crate) fn run(
    iova: u64,
    memory: &HostMemory,
    offset: u64,
    bytes: u64,
    access: Access,
) -> MapRun {
    MapRun { iova: Iova(iova), memory: memory.slice(offset, bytes).unwrap(), access }
}

/// A key as the firmware has it.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    indirect: bool,
    start: u64,
    bytes: u64,
    read: bool,
    write: bool,
    step_shift: u32,
    list: Vec<u8>,
}

#[derive(Default)]
pub(crate) struct Books {
    pub(crate) keys: BTreeMap<u32, Key>,
    next_key: u32,
    next_bus: u64,
    /// By bus address: bytes, and the address in this process.
    pinned: BTreeMap<u64, (u64, u64)>,
    /// Driver bugs.
    pub(crate) crimes: Vec<String>,
    /// Pins asked for.
    pub(crate) pins: usize,
    /// Fails this pin.
    pub(crate) pin_fault: Option<usize>,
    /// Lengths of runs in pages, in turn; empty for whole pieces.
    pub(crate) fragments: Vec<u64>,
    /// Keys whose fate the driver can't know.
    pub(crate) lost: Vec<u32>,
}

/// What the driver and the firmware share.
#[derive(Clone, Default)]
pub(crate) struct World(Arc<Mutex<Books>>);

struct Guard {
    world: World,
    starts: Vec<u64>,
    _owner: HostMemory,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut books = self.world.books();
        for start in &self.starts {
            let (bytes, _) = books.pinned.remove(start).unwrap();
            let reached = books.keys.values().any(|key| key.reaches(*start, bytes));
            if reached {
                books.crimes.push(format!("unpinned {start:#x} under a key"));
            }
        }
    }
}

impl World {
    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.books().pinned.values().map(|(bytes, _)| *bytes).sum()
    }

    pub(crate) fn keys(&self) -> usize {
        self.books().keys.len()
    }

    pub(crate) fn no_crimes(&self) {
        let crimes = self.books().crimes.clone();
        assert!(crimes.is_empty(), "{crimes:?}");
    }
}

impl Dma for World {
    fn alloc(&self, _: usize, _: usize) -> Result<DmaBlock, DmaError> {
        unreachable!("the registry needs no memory of its own")
    }

    fn pin(&self, memory: &HostMemory) -> Result<Pinned, DmaError> {
        let mut books = self.books();
        books.pins += 1;
        if books.pin_fault == Some(books.pins) {
            let (bytes, reason) = (memory.bytes(), "over the limit".to_owned());
            return Err(DmaError { action: "pin", bytes, reason });
        }
        let mut runs = Vec::new();
        let mut offset = 0;
        // Whole pieces are as round on the bus as they are long; fragments lie anywhere.
        let mut turn = usize::try_from(memory.address() / PAGE).unwrap();
        while offset < memory.bytes() {
            let left = memory.bytes() - offset;
            let (bytes, align) = match books.fragments.len() {
                0 => (left, 1 << 63_u32.saturating_sub(left.leading_zeros()).min(30)),
                count => ((books.fragments[turn % count] * PAGE).min(left), PAGE),
            };
            turn += 1;
            let at = (books.next_bus.max(GIB) + PAGE).next_multiple_of(align);
            books.next_bus = at + bytes;
            books.pinned.insert(at, (bytes, memory.address() + offset));
            runs.push(BusRun { at: BusAddress(at), bytes });
            offset += bytes;
        }
        drop(books);
        let starts = runs.iter().map(|run| run.at.0).collect();
        let guard = Guard { world: self.clone(), starts, _owner: memory.clone() };
        Ok(Pinned { runs, guard: Box::new(guard) })
    }
}

fn be32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn be64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

impl Key {
    /// Reads CREATE_MKEY.
    fn parse(input: &[u8]) -> Key {
        let flags = be32(input, 0x10);
        assert_eq!(be32(input, 0x14) >> 8, 0x00ff_ffff, "any queue");
        assert_eq!(be32(input, 0x1c), PD);
        let octwords = usize::try_from(be32(input, 0x44)).unwrap();
        assert_eq!(be32(input, 0x60), be32(input, 0x44));
        assert_eq!(input.len(), 0x110 + octwords * 16);
        let indirect = match (flags >> 8) & 3 {
            1 => false,
            2 => true,
            mode => panic!("access mode {mode}"),
        };
        let key = Key {
            indirect,
            start: be64(input, 0x20),
            bytes: be64(input, 0x28),
            read: flags & 1 << 10 != 0,
            write: flags & 1 << 11 != 0,
            step_shift: be32(input, 0x48) & 0x3f,
            list: input[0x110..].to_vec(),
        };
        if indirect {
            assert_eq!(octwords % 4, 0, "KLM lists come in fours");
            let covered: u64 = key.klms().map(|(bytes, _)| bytes).sum();
            assert_eq!(covered, key.bytes);
        } else {
            assert_eq!(key.start, 0, "direct keys are zero-based");
            let steps = key.bytes >> key.step_shift;
            assert_eq!(steps << key.step_shift, key.bytes, "whole steps");
            assert_eq!(octwords, usize::try_from(steps.div_ceil(2)).unwrap());
            assert!(key.bus_pages().all(|at| (at >> key.step_shift) << key.step_shift == at));
        }
        key
    }

    /// Bytes and key of each entry.
    fn klms(&self) -> impl Iterator<Item = (u64, u32)> {
        let entries = self.list.chunks(16).map(|entry| (be32(entry, 0).into(), be32(entry, 4)));
        entries.filter(|(bytes, _)| *bytes > 0)
    }

    /// Bus address of each step.
    fn bus_pages(&self) -> impl Iterator<Item = u64> {
        let steps = usize::try_from(self.bytes >> self.step_shift).unwrap();
        self.list.chunks(8).take(steps).map(|entry| be64(entry, 0))
    }

    fn reaches(&self, at: u64, bytes: u64) -> bool {
        let step = 1 << self.step_shift;
        !self.indirect && self.bus_pages().any(|page| page < at + bytes && at < page + step)
    }
}

impl Books {
    /// The address in this process that the device reaches at `address` under `key`.
    pub(crate) fn translate(&self, key: u32, address: u64, access: Access) -> Option<u64> {
        let found = self.keys.get(&(key >> 8))?;
        let offset = address.checked_sub(found.start).filter(|offset| *offset < found.bytes)?;
        let allowed = match access {
            Access::Read => found.read,
            Access::Write => found.write,
            Access::ReadWrite => found.read && found.write,
        };
        if !allowed {
            return None;
        }
        if found.indirect {
            let mut begin = 0;
            let (begin, key) = found.klms().find_map(|(bytes, key)| {
                let this = begin;
                begin += bytes;
                (offset < begin).then_some((this, key))
            })?;
            return if key == NULL_KEY {
                None
            } else {
                self.translate(key, offset - begin, access)
            };
        }
        let step = usize::try_from(offset >> found.step_shift).unwrap();
        let at = be64(&found.list, step * 8) + offset % (1 << found.step_shift);
        let (start, (bytes, host)) = self.pinned.range(..=at).next_back()?;
        (at - start < *bytes).then(|| host + (at - start))
    }

    /// Does what the command asks.
    pub(crate) fn execute(&mut self, input: &[u8]) -> KeyAnswer {
        match be32(input, 0) >> 16 {
            0x200 => {
                let key = Key::parse(input);
                for (_, other) in key.klms().filter(|_| key.indirect) {
                    let there = other == NULL_KEY || self.keys.contains_key(&(other >> 8));
                    assert!(there, "an indirect key over a direct one that does not exist");
                }
                self.next_key += 1;
                let index = self.next_key;
                self.keys.insert(index, key);
                KeyAnswer::Done { index }
            }
            0x202 => {
                assert_eq!(input.len(), 16);
                let index = be32(input, 8);
                if self.keys.remove(&index).is_none() {
                    self.crimes.push(format!("key {index} was destroyed twice"));
                    return refused(Refusal::Final);
                }
                let lost = &self.lost;
                let mut above = self.keys.iter().filter(|(above, key)| {
                    key.indirect
                        && !lost.contains(above)
                        && key.klms().any(|(_, key)| key >> 8 == index)
                });
                if let Some((above, _)) = above.next() {
                    self.crimes.push(format!("key {index} was destroyed under key {above}"));
                }
                KeyAnswer::Done { index: 0 }
            }
            opcode => panic!("opcode {opcode:#x}"),
        }
    }
}

pub(crate) fn refused(why: Refusal) -> KeyAnswer {
    let error = VdpaError::Device { action: "map memory", reason: format!("{why:?}") };
    KeyAnswer::Refused { why, error }
}

pub(crate) fn lost() -> KeyAnswer {
    KeyAnswer::Lost { error: VdpaError::Timeout { action: "map memory", waited_ms: 100 } }
}

/// What goes wrong with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Refused(Refusal),
    /// No answer, and it was not done.
    LostBefore,
    /// No answer, and it was done.
    LostAfter,
}

pub(crate) const FAULTS: [Fault; 5] = [
    Fault::Refused(Refusal::Final),
    Fault::Refused(Refusal::Busy),
    Fault::Refused(Refusal::NoRoom),
    Fault::LostBefore,
    Fault::LostAfter,
];

/// A registry with its device.
pub(crate) struct Rig {
    pub(crate) world: World,
    pub(crate) registry: Registry,
    pub(crate) now: Instant,
    /// Commands without an answer: tag and input.
    pub(crate) flying: VecDeque<(u64, Vec<u8>)>,
    /// Opcodes of all commands, in order.
    pub(crate) log: Vec<u32>,
    /// By number of command, from 0.
    pub(crate) faults: BTreeMap<usize, Fault>,
    done: usize,
    /// Answers that the driver did not get.
    late: Vec<(u64, KeyAnswer)>,
    /// Which of the flying ones is answered next.
    pub(crate) pick: usize,
}

pub(crate) fn config(piece_pages: u64) -> MemoryConfig {
    MemoryConfig { piece_bytes: piece_pages * PAGE, ..MemoryConfig::default() }
}

pub(crate) fn at_once(config: MemoryConfig) -> MemoryConfig {
    MemoryConfig { deletion: Deletion::AtOnce, ..config }
}

pub(crate) fn everything(config: MemoryConfig) -> MemoryConfig {
    MemoryConfig { update: Update::Everything, ..config }
}

impl Rig {
    pub(crate) fn new(config: MemoryConfig) -> Rig {
        let context = KeyContext { pd: PD, null_key: NULL_KEY };
        Rig {
            world: World::default(),
            registry: Registry::new(config, context),
            now: Instant(1_000_000_000),
            flying: VecDeque::new(),
            log: Vec::new(),
            faults: BTreeMap::new(),
            done: 0,
            late: Vec::new(),
            pick: 0,
        }
    }

    /// How many commands have an answer.
    pub(crate) fn answered(&self) -> usize {
        self.done
    }

    /// Issues all commands that the registry has.
    pub(crate) fn issue(&mut self) -> usize {
        let mut issued = 0;
        while let Some(command) = self.registry.poll_command(&self.world, self.now) {
            let input = input(&command);
            self.log.push(be32(&input, 0) >> 16);
            self.flying.push_back((command.tag(), input));
            issued += 1;
        }
        issued
    }

    /// Answers one command; whether there was one.
    pub(crate) fn answer(&mut self) -> bool {
        if self.flying.is_empty() {
            return false;
        }
        let place = self.pick % self.flying.len();
        let (tag, input) = self.flying.remove(place).unwrap();
        let fault = self.faults.get(&self.done).copied();
        self.done += 1;
        let mut books = self.world.books();
        let answer = match fault {
            None => books.execute(&input),
            Some(Fault::Refused(why)) => refused(why),
            Some(Fault::LostBefore) => {
                if be32(&input, 0) >> 16 == 0x202 {
                    books.lost.push(be32(&input, 8));
                }
                self.late.push((tag, refused(Refusal::Final)));
                lost()
            }
            Some(Fault::LostAfter) => {
                let answer = books.execute(&input);
                if let KeyAnswer::Done { index } = answer {
                    books.lost.push(index);
                }
                self.late.push((tag, answer));
                lost()
            }
        };
        // A destruction that was refused for good does not tell either whether the key is gone.
        if let (KeyAnswer::Refused { .. }, 0x202) = (&answer, be32(&input, 0) >> 16) {
            books.lost.push(be32(&input, 8));
        }
        drop(books);
        self.registry.on_answer(tag, answer, self.now);
        true
    }

    /// Gives all answers that the driver did not get.
    pub(crate) fn answer_late(&mut self) {
        for (tag, answer) in self.late.drain(..) {
            self.registry.on_late_answer(tag, &answer);
        }
    }

    /// Issues and answers until nothing happens any more.
    pub(crate) fn pump(&mut self) {
        loop {
            let issued = self.issue();
            if !self.answer() && issued == 0 {
                break;
            }
        }
    }

    /// Builds a map; does not install it.
    pub(crate) fn build(&mut self, runs: &[MapRun]) -> Result<Option<MapRef>, VdpaError> {
        self.registry.begin_set_map(runs)?;
        loop {
            if let Some(outcome) = self.registry.poll_set_map() {
                return outcome;
            }
            let issued = self.issue();
            if let Some(outcome) = self.registry.poll_set_map() {
                return outcome;
            }
            assert!(self.answer() || issued > 0, "a build goes on until it is over");
        }
    }

    /// Builds and installs a map.
    pub(crate) fn set_map(&mut self, runs: &[MapRun]) -> Result<(), VdpaError> {
        let map = self.build(runs)?;
        self.registry.install(map);
        Ok(())
    }

    /// Lets time pass, and the registry do what is due then.
    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now.after(time);
        while let Some(due) = self.registry.next_due(self.now).filter(|due| *due <= until) {
            self.now = Instant(due.0.max(self.now.0));
            self.pump();
            while self.registry.release_one() {}
        }
        self.now = until;
    }

    /// Drops everything that nobody holds.
    pub(crate) fn drain(&mut self) {
        self.registry.begin_drain(VdpaError::Gone { action: "map memory" });
        loop {
            let issued = self.issue();
            if self.registry.poll_drained(self.now) {
                return;
            }
            assert!(self.answer() || issued > 0, "a drain goes on until it is over");
        }
    }

    /// What the current map gives at `iova`.
    pub(crate) fn translate(&self, iova: u64, access: Access) -> Option<u64> {
        self.world.books().translate(self.registry.current()?.key(), iova, access)
    }

    /// Compares each page around the map, and each access, with what the map says.
    pub(crate) fn check(&self, runs: &[MapRun]) {
        let key = self.registry.current().map(MapRef::key);
        let books = self.world.books();
        let mut last_end = 0;
        for run in runs {
            let (begin, end) = (run.iova.0, run.iova.0 + run.memory.bytes());
            for iova in [begin.saturating_sub(1), last_end].into_iter().filter(|at| *at < begin) {
                if last_end <= iova {
                    assert_eq!(books.translate(key.unwrap(), iova, Access::Read), None);
                }
            }
            for iova in (begin..end).step_by(4096).chain([end - 1]) {
                for access in [Access::Read, Access::Write, Access::ReadWrite] {
                    let allowed = run.access == access || run.access == Access::ReadWrite;
                    let expected = allowed.then(|| run.memory.address() + (iova - begin));
                    let found = books.translate(key.unwrap(), iova, access);
                    assert_eq!(found, expected, "{iova:#x} {access:?}");
                }
            }
            last_end = end;
        }
        if let Some(key) = key {
            assert_eq!(books.translate(key, last_end, Access::Read), None);
        }
        drop(books);
        self.world.no_crimes();
    }
}

fn input(command: &KeyCommand) -> Vec<u8> {
    // As a command queue does: 16 bytes, then mailboxes of 512.
    let mut bytes = vec![0xff; command.input_bytes()];
    let (first, rest) = bytes.split_at_mut(16);
    command.fill(0, first);
    for (number, part) in rest.chunks_mut(512).enumerate() {
        command.fill(16 + 512 * number, part);
    }
    bytes
}
