//! Who answers at which port and at which address.

use super::board::{Board, CLOCK_DATA, CLOCK_INDEX, PM1_EVENT, PM1_LAST, SavedBoard, SetLine};
use super::endpoint::Endpoint;
use super::heartbeat::Heartbeat;
use super::serial::{SavedSerial, SerialPort};
use super::virtio::Nics;
use crate::EndCause;
use crate::vcpu::lock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// COM1.
pub(crate) const SERIAL: u16 = 0x3f8;
const SERIAL_LAST: u16 = SERIAL + 7;
/// The interrupt line of COM1.
pub(crate) const SERIAL_IRQ: u32 = 4;
/// The keyboard controller's command port.
const I8042_COMMAND: u16 = 0x64;
/// Pulse the reset line of the processor: what a guest does to reboot.
const I8042_RESET: u8 = 0xfe;
/// The reset control register of the PIIX and its successors, a byte; and its bit that resets.
pub(crate) const RESET_CONTROL: u16 = 0xcf9;
pub(crate) const RESET_CONTROL_RESET: u8 = 1 << 2;
/// A byte here is a sign of life; QEMU and Bochs print it.
const DEBUG_PORT: u16 = 0xe9;
/// The built-in program says here which page was wrong.
const WRONG_PAGE_PORT: u16 = 0xea;
/// Reports of wrong pages that are logged; a guest may send any number.
const WRONG_PAGE_LOGS_MAX: u32 = 10;
/// What an unclaimed port reads as.
pub(super) const FLOATING: u8 = 0xff;

/// What a port access means for the machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing.
    None,
    /// The guest is at its end.
    End(EndCause),
}

/// Raises an interrupt line's edge.
pub(crate) type PulseIrq = Arc<dyn Fn(u32) + Send + Sync>;

/// All ports of a machine, and what it has in memory besides RAM. Shared by the vCPU threads; each device has a lock of its own.
pub(crate) struct Bus {
    serial: Mutex<SerialPort>,
    board: Mutex<Board>,
    heartbeat: Heartbeat,
    wrong_page_reports: AtomicU32,
    pulse_irq: Arc<OnceLock<PulseIrq>>,
    nics: OnceLock<Arc<Nics>>,
}

impl Bus {
    /// Devices as after a power-on; the serial port's bytes go to `endpoint`.
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Bus {
        let pulse_irq = Arc::new(OnceLock::new());
        Bus {
            serial: Mutex::new(SerialPort::new(endpoint, line(&pulse_irq))),
            board: Mutex::default(),
            heartbeat: Heartbeat::default(),
            wrong_page_reports: AtomicU32::new(0),
            pulse_irq,
            nics: OnceLock::new(),
        }
    }

    /// Puts the network cards into the guest's address space; before the guest runs, once.
    pub(crate) fn plug(&self, nics: Arc<Nics>) {
        assert!(self.nics.set(nics).is_ok(), "cards are plugged in once");
    }

    /// The guest reads `data` at an address that is no memory. What nobody claims reads as a bus
    /// that floats.
    pub(crate) fn read_memory(&self, gpa: u64, data: &mut [u8]) {
        if !self.nics.get().is_some_and(|nics| nics.read(gpa, data)) {
            data.fill(FLOATING);
        }
    }

    /// The guest writes `data` to an address that is no memory.
    pub(crate) fn write_memory(&self, gpa: u64, data: &[u8]) {
        if let Some(nics) = self.nics.get() {
            nics.write(gpa, data);
        }
    }

    /// Connects the interrupt lines; before the guest runs, once.
    pub(crate) fn connect(&self, pulse_irq: PulseIrq, sci: SetLine) {
        assert!(self.pulse_irq.set(pulse_irq).is_ok(), "interrupts are connected once");
        lock(&self.board).connect(sci);
    }

    /// The guest wrote `data`, items of `size` bytes, to a port.
    pub(crate) fn write(&self, port: u16, size: u8, data: &[u8]) -> Effect {
        for item in data.chunks(usize::from(size.max(1))) {
            if port == WRONG_PAGE_PORT {
                self.wrong_page(item);
                continue;
            }
            // A wide one is PCI's address register, which begins a port earlier.
            if port == RESET_CONTROL && matches!(item, [byte] if byte & RESET_CONTROL_RESET != 0) {
                return Effect::End(EndCause::Reset);
            }
            // A wide access to byte-wide devices reaches the ports that follow.
            for (port, byte) in (u32::from(port)..).zip(item) {
                if let Effect::End(cause) = self.write_byte(port, *byte) {
                    return Effect::End(cause);
                }
            }
        }
        Effect::None
    }

    fn write_byte(&self, port: u32, byte: u8) -> Effect {
        match u16::try_from(port) {
            Ok(port @ SERIAL..=SERIAL_LAST) => {
                lock(&self.serial).write(port - SERIAL, byte, &self.heartbeat);
                Effect::None
            }
            Ok(DEBUG_PORT) => {
                self.heartbeat.beat();
                Effect::None
            }
            Ok(port @ (PM1_EVENT..=PM1_LAST | CLOCK_INDEX | CLOCK_DATA)) => {
                lock(&self.board).write(port, byte)
            }
            Ok(I8042_COMMAND) if byte == I8042_RESET => Effect::End(EndCause::Reset),
            Ok(_) | Err(_) => Effect::None,
        }
    }

    /// The guest reads items of `size` bytes from a port into `data`.
    pub(crate) fn read(&self, port: u16, size: u8, data: &mut [u8]) {
        for item in data.chunks_mut(usize::from(size.max(1))) {
            for (port, byte) in (u32::from(port)..).zip(item) {
                *byte = self.read_byte(port);
            }
        }
    }

    fn read_byte(&self, port: u32) -> u8 {
        match u16::try_from(port) {
            Ok(port @ SERIAL..=SERIAL_LAST) => lock(&self.serial).read(port - SERIAL),
            Ok(port @ (PM1_EVENT..=PM1_LAST | CLOCK_INDEX | CLOCK_DATA)) => {
                lock(&self.board).read(port)
            }
            // Reading the debug port tells that it exists, as on Bochs.
            Ok(DEBUG_PORT) => DEBUG_PORT.to_le_bytes()[0],
            // Neither input nor output buffer full: a guest may write its reset at once.
            Ok(I8042_COMMAND) => 0,
            Ok(_) | Err(_) => FLOATING,
        }
    }

    fn wrong_page(&self, item: &[u8]) {
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(item) {
            *to = *from;
        }
        if self.wrong_page_reports.fetch_add(1, Ordering::Relaxed) < WRONG_PAGE_LOGS_MAX {
            tracing::error!(page = u32::from_le_bytes(bytes), "the guest found a wrong page");
        }
    }

    /// Bytes from outside; returns how many the port's buffer had room for.
    pub(crate) fn serial_input(&self, bytes: &[u8]) -> usize {
        lock(&self.serial).input(bytes)
    }

    /// Presses the power button; `false` if the guest does not listen to it.
    pub(crate) fn press_power_button(&self) -> bool {
        lock(&self.board).press_power_button()
    }

    /// When the guest was heard of.
    pub(crate) fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }

    /// The serial port's registers. While no vCPU runs.
    pub(crate) fn save_serial(&self) -> SavedSerial {
        lock(&self.serial).save()
    }

    /// The board's registers. While no vCPU runs.
    pub(crate) fn save_board(&self) -> SavedBoard {
        lock(&self.board).save()
    }

    /// Loads the board's registers, as at a power-on where there are none; repeatable.
    pub(crate) fn load_board(&self, saved: Option<&SavedBoard>) {
        lock(&self.board).load(saved.unwrap_or(&SavedBoard::default()));
    }

    /// Loads the serial port's registers; repeatable. The error says what is wrong with them.
    pub(crate) fn load_serial(&self, saved: &SavedSerial) -> Result<(), String> {
        lock(&self.serial).load(saved)
    }
}

fn line(pulse_irq: &Arc<OnceLock<PulseIrq>>) -> super::serial::IrqLine {
    let pulse_irq = Arc::clone(pulse_irq);
    super::serial::IrqLine::new(move || {
        if let Some(pulse) = pulse_irq.get() {
            pulse(SERIAL_IRQ);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SerialOut;

    fn bus() -> Bus {
        Bus::new(Endpoint::open(&SerialOut::None).unwrap())
    }

    #[test]
    fn unclaimed_ports_float_and_swallow() {
        let bus = bus();
        let mut data = [0; 4];
        bus.read(0x80, 4, &mut data);
        assert_eq!(data, [0xff; 4]);
        assert_eq!(bus.write(0xffff, 4, &[0xfe; 8]), Effect::None);
        assert_eq!(bus.write(0x61, 4, &[0; 4]), Effect::None);
        assert_eq!(bus.heartbeat().last(), None);
    }

    #[test]
    fn reset_ends_the_guest_also_by_a_wide_write() {
        assert_eq!(bus().write(0x64, 1, &[0xfe]), Effect::End(EndCause::Reset));
        assert_eq!(bus().write(0x63, 2, &[0, 0xfe]), Effect::End(EndCause::Reset));
        assert_eq!(bus().write(0x64, 1, &[0xd1]), Effect::None);
        assert_eq!(bus().write(0xcf9, 1, &[0x06]), Effect::End(EndCause::Reset));
        assert_eq!(bus().write(0xcf9, 1, &[0x02]), Effect::None);
        // Linux looks for PCI devices: function 4 of device 0.
        assert_eq!(bus().write(0xcf8, 4, &[0, 4, 0, 0x80]), Effect::None);
    }

    #[test]
    fn debug_port_and_transmitted_bytes_are_signs_of_life() {
        let bus = bus();
        bus.write(DEBUG_PORT, 1, b".");
        let first = bus.heartbeat().first().unwrap();
        bus.write(SERIAL, 1, b"abc");
        assert_eq!(bus.heartbeat().first(), Some(first));
        assert!(bus.heartbeat().last().unwrap() > first);

        // Setting the baud rate goes to the same port and is none.
        let silent = self::bus();
        silent.write(SERIAL + 3, 1, &[0x80]);
        silent.write(SERIAL, 1, &[1]);
        assert_eq!(silent.heartbeat().last(), None);
    }
}
