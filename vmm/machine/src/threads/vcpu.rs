//! A vCPU that is a host thread.
#![allow(unsafe_code)]
// UNSAFETY: enters the guest, and reads its instructions.

use super::decode::{BYTES_MAX, Direction, PortAccess, decode, decode_memory};
use super::frame::Register;
use super::saved::SavedVcpu;
use super::signals::{Left, Passage};
use crate::devices::virtio::{MMIO_END, MMIO_START};
use crate::vcpu::backend::{BackendError, Exit, Kicker, Start, VcpuBackend};
use crate::vcpu::kick::kick_thread;
use crate::vcpu::lock;
use martlet_engine::LoadFor;
use martlet_ram::GuestRam;
use martlet_units::{Gpa, PAGE_SIZE};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Exception numbers (Intel SDM volume 3A, table 6-1).
const GENERAL_PROTECTION: u64 = 13;
const PAGE_FAULT: u64 = 14;

/// See [`VcpuBackend`].
pub(super) struct ThreadVcpu {
    passage: Passage,
    kicker: Arc<ThreadKicker>,
    ram: Arc<GuestRam>,
    /// Host address of guest physical address 0.
    base: u64,
    /// A read that the caller answers, in `data`, before the guest goes on.
    reading: Option<Reading>,
    data: [u8; 4],
}

/// A read that waits for its answer, which goes to `rax`.
struct Reading {
    /// Bytes: 1, 2 or 4.
    size: u8,
    /// Length of the instruction.
    length: u64,
}

impl ThreadVcpu {
    pub(super) fn new(ram: Arc<GuestRam>, base: u64) -> ThreadVcpu {
        ThreadVcpu {
            passage: Passage::new(),
            kicker: Arc::new(ThreadKicker::default()),
            ram,
            base,
            reading: None,
            data: [0; 4],
        }
    }

    fn check_attached(&self) -> Result<(), BackendError> {
        if self.passage.is_attached() {
            return Ok(());
        }
        Err(BackendError::Unsupported { reason: "a vCPU without a thread".into() })
    }

    /// Enters the guest, unless it was kicked before.
    fn enter(&mut self) -> Option<Left> {
        // Sequentially consistent, as in `kick`: either this sees the kick or the kicker sees the
        // thread inside and sends a signal, which waits for the entry if it has to.
        self.kicker.inside.store(true, Ordering::SeqCst);
        let left = if self.kicker.kicked.load(Ordering::SeqCst) {
            None
        } else {
            // SAFETY: the registers are those of the built-in program, which keeps to the guest's
            // memory. A peer who sends other ones runs its code here: this backend takes guests
            // from its own host only, see `Description`.
            Some(unsafe { self.passage.enter() })
        };
        self.kicker.inside.store(false, Ordering::SeqCst);
        left
    }

    /// Puts what was read from a port or a device where the instruction wants it.
    fn answer(&mut self) {
        let Some(reading) = self.reading.take() else { return };
        let value = u64::from(u32::from_le_bytes(self.data));
        let old = self.passage.register(Register::RAX);
        let new = match reading.size {
            1 => old & !0xff | value & 0xff,
            2 => old & !0xffff | value & 0xffff,
            // A 32-bit result clears the upper half (Intel SDM volume 1, 3.4.1.1).
            _ => value,
        };
        self.passage.set_register(Register::RAX, new);
        self.skip(reading.length);
    }

    fn skip(&mut self, length: u64) {
        let rip = self.passage.register(Register::RIP);
        self.passage.set_register(Register::RIP, rip.wrapping_add(length));
    }

    fn port_access(&self) -> Option<PortAccess> {
        let (bytes, length) = self.instruction();
        decode(bytes.get(..length)?)
    }

    /// The bytes at the instruction pointer, as far as they are guest memory.
    fn instruction(&self) -> ([u8; BYTES_MAX], usize) {
        let rip = self.passage.register(Register::RIP);
        let mut bytes = [0; BYTES_MAX];
        let mut length = 0;
        for byte in &mut bytes {
            let Some(value) = self.code_byte(rip.wrapping_add(length as u64)) else { break };
            *byte = value;
            length += 1;
        }
        (bytes, length)
    }

    /// A device's registers that the guest accessed, if that is what the page fault was: nothing
    /// is mapped there, and the program has two instructions for it.
    fn memory_exit(&mut self, left: Left) -> Option<Exit<'_>> {
        let gpa = left.address.checked_sub(self.base)?;
        let is_there = (MMIO_START..MMIO_END).contains(&gpa)
            && self.passage.register(Register::RDX) == left.address;
        let (bytes, length) = self.instruction();
        let access = decode_memory(bytes.get(..length)?).filter(|_| is_there)?;
        match access.direction {
            Direction::Out => {
                self.data.copy_from_slice(&self.passage.register(Register::RAX).to_le_bytes()[..4]);
                self.skip(access.length);
                Some(Exit::MmioWrite { gpa, data: &self.data })
            }
            Direction::In => {
                self.data = [0; 4];
                self.reading = Some(Reading { size: 4, length: access.length });
                Some(Exit::MmioRead { gpa, data: &mut self.data })
            }
        }
    }

    fn code_byte(&self, address: u64) -> Option<u8> {
        let gpa = Gpa(address.checked_sub(self.base)?);
        let (region, page) = self.ram.find(gpa.to_gfn())?;
        let page = self.ram.region(region)?.host_ptr(page);
        let offset = usize::try_from(gpa.0 % PAGE_SIZE).ok()?;
        let mut byte = [0];
        // SAFETY: in the page.
        unsafe { martlet_raw_memory::read(page.wrapping_add(offset), &mut byte) }.ok()?;
        Some(byte[0])
    }

    fn exit_of(&mut self, left: Left) -> Exit<'_> {
        if left.by_kick() {
            return Exit::Interrupted;
        }
        let is_fault = left.signal == libc::SIGSEGV;
        let access = match left.trap {
            GENERAL_PROTECTION if is_fault => self.port_access(),
            PAGE_FAULT if is_fault => {
                let ended = self.describe(left);
                return self.memory_exit(left).unwrap_or(Exit::Ended(ended));
            }
            _ => None,
        };
        let Some(access) = access else { return Exit::Ended(self.describe(left)) };
        let port = match access.immediate_port {
            Some(port) => u16::from(port),
            None => low_16(self.passage.register(Register::RDX)),
        };
        match access.direction {
            Direction::Out => {
                self.data.copy_from_slice(&self.passage.register(Register::RAX).to_le_bytes()[..4]);
                self.skip(access.length);
                let data = &self.data[..usize::from(access.size)];
                Exit::Out { port, size: access.size, data }
            }
            Direction::In => {
                self.data = [0; 4];
                self.reading = Some(Reading { size: access.size, length: access.length });
                let data = &mut self.data[..usize::from(access.size)];
                Exit::In { port, size: access.size, data }
            }
        }
    }

    fn describe(&self, left: Left) -> String {
        let rip = self.passage.register(Register::RIP);
        match (left.signal, left.trap) {
            (libc::SIGBUS, _) => {
                let page = usize::try_from(left.address).ok().and_then(|at| self.ram.lost_at(at));
                page.map_or(format!("no memory at {:#x}", left.address), |page| page.to_string())
            }
            (_, PAGE_FAULT) => format!("page fault at {:#x}, instruction {rip:#x}", left.address),
            (signal, trap) => format!("exception {trap} (signal {signal}), instruction {rip:#x}"),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a port is the low half of edx")]
fn low_16(register: u64) -> u16 {
    register as u16
}

impl VcpuBackend for ThreadVcpu {
    fn attach(&mut self) -> Result<(), BackendError> {
        let thread = self.passage.attach()?;
        *lock(&self.kicker.thread) = Some(thread);
        Ok(())
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kicker) as Arc<dyn Kicker>
    }

    fn set_start(&mut self, start: &Start) -> Result<(), BackendError> {
        self.check_attached()?;
        let Start::Level3 { rip, rsp, rdi, rsi, tables: _ } = start else {
            let reason = "without KVM only the built-in program can run".into();
            return Err(BackendError::Unsupported { reason });
        };
        self.reading = None;
        self.passage.reset();
        self.passage.set_register(Register::RIP, *rip);
        self.passage.set_register(Register::RSP, *rsp);
        self.passage.set_register(Register::RDI, *rdi);
        self.passage.set_register(Register::RSI, *rsi);
        Ok(())
    }

    fn run(&mut self) -> Result<Exit<'_>, BackendError> {
        self.check_attached()?;
        self.answer();
        match self.enter() {
            None => Ok(Exit::Interrupted),
            Some(left) => Ok(self.exit_of(left)),
        }
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        self.answer();
        Ok(Exit::Interrupted)
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        self.check_attached()?;
        Ok(SavedVcpu::take(&mut self.passage).to_bytes())
    }

    fn load(&mut self, state: &[u8], _: LoadFor) -> Result<(), BackendError> {
        self.check_attached()?;
        SavedVcpu::from_bytes(state)?.give(&mut self.passage, &self.ram, self.base)?;
        self.reading = None;
        Ok(())
    }

    fn enter_and_leave(&mut self) -> Result<(), BackendError> {
        self.answer();
        let left = self.passage.enter_and_leave()?;
        if left.by_kick() {
            Ok(())
        } else {
            // The kernel refused to load the registers, and says so by a fault.
            Err(BackendError::state(self.describe(left)))
        }
    }
}

/// See [`Kicker`].
#[derive(Debug, Default)]
struct ThreadKicker {
    kicked: AtomicBool,
    /// Set while the thread is between deciding to enter and having left.
    inside: AtomicBool,
    /// The vCPU's thread while it lives.
    thread: Mutex<Option<libc::pid_t>>,
}

impl Kicker for ThreadKicker {
    fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        if self.inside.load(Ordering::SeqCst) {
            // The lock keeps the thread from ending, and its id from being another's, meanwhile.
            if let Some(thread) = *lock(&self.thread) {
                // Can't fail for a thread that lives, see `KICK`.
                let _ = kick_thread(thread);
            }
        }
    }

    fn clear(&self) {
        self.kicked.store(false, Ordering::SeqCst);
    }

    fn detach(&self) {
        *lock(&self.thread) = None;
    }
}
