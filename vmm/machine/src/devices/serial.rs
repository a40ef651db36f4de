//! The 16550, by vm-superio, and its saved state.

use super::endpoint::Endpoint;
use super::heartbeat::Heartbeat;
use minicbor::{Decode, Encode};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

/// Bits of the line control and modem control registers, see the 16550's data sheet.
const LCR_DLAB: u8 = 0x80;
const MCR_LOOP: u8 = 0x10;
const DATA: u8 = 0;
const LCR: u8 = 3;
const MCR: u8 = 4;

/// Raises the port's interrupt, unless muted.
#[derive(Clone)]
pub(super) struct IrqLine {
    pulse: Arc<dyn Fn() + Send + Sync>,
    muted: Arc<AtomicBool>,
}

impl IrqLine {
    pub(super) fn new(pulse: impl Fn() + Send + Sync + 'static) -> IrqLine {
        IrqLine { pulse: Arc::new(pulse), muted: Arc::default() }
    }

    fn mute(&self, muted: bool) {
        // Only read and written under the port's lock.
        self.muted.store(muted, Ordering::Relaxed);
    }
}

impl Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        if !self.muted.load(Ordering::Relaxed) {
            (self.pulse)();
        }
        Ok(())
    }
}

/// Output goes out byte by byte, at once, and is lost rather than waited for.
struct Output(Arc<Endpoint>);

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) struct SerialPort {
    uart: Serial<IrqLine, NoEvents, Output>,
    endpoint: Arc<Endpoint>,
    irq: IrqLine,
    /// Whether a write to the data register is sent: neither divisor access nor loop mode.
    transmits: bool,
}

impl SerialPort {
    pub(super) fn new(endpoint: Arc<Endpoint>, irq: IrqLine) -> SerialPort {
        let uart = Serial::new(irq.clone(), Output(Arc::clone(&endpoint)));
        SerialPort { uart, endpoint, irq, transmits: true }
    }

    pub(super) fn write(&mut self, register: u16, byte: u8, heartbeat: &Heartbeat) {
        let Ok(register) = u8::try_from(register) else { return };
        if register == DATA && self.transmits {
            heartbeat.beat();
        }
        // The only error left is that of an interrupt line, which has none.
        let _ = self.uart.write(register, byte);
        if register == LCR || register == MCR {
            self.transmits = transmits(self.uart.read(LCR), self.uart.read(MCR));
        }
    }

    pub(super) fn read(&mut self, register: u16) -> u8 {
        u8::try_from(register).map_or(0, |register| self.uart.read(register))
    }

    pub(super) fn input(&mut self, bytes: &[u8]) -> usize {
        if self.uart.fifo_capacity() == 0 {
            return 0;
        }
        self.uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    pub(super) fn save(&self) -> SavedSerial {
        let state = self.uart.state();
        SavedSerial {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer,
        }
    }

    pub(super) fn load(&mut self, saved: &SavedSerial) -> Result<(), String> {
        let state = SerialState {
            baud_divisor_low: saved.baud_divisor_low,
            baud_divisor_high: saved.baud_divisor_high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.in_buffer.clone(),
        };
        // An interrupt that was raised and not yet taken is in the interrupt controllers' state;
        // raising it again at each rehearsal would invent interrupts.
        self.irq.mute(true);
        let output = Output(Arc::clone(&self.endpoint));
        let uart = Serial::from_state(&state, self.irq.clone(), NoEvents, output);
        self.irq.mute(false);
        self.uart =
            uart.map_err(|_| format!("serial port: {} bytes of input", saved.in_buffer.len()))?;
        self.transmits = transmits(saved.line_control, saved.modem_control);
        Ok(())
    }
}

fn transmits(line_control: u8, modem_control: u8) -> bool {
    line_control & LCR_DLAB == 0 && modem_control & MCR_LOOP == 0
}

/// The registers as they travel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedSerial {
    #[n(0)]
    baud_divisor_low: u8,
    #[n(1)]
    baud_divisor_high: u8,
    #[n(2)]
    interrupt_enable: u8,
    #[n(3)]
    interrupt_identification: u8,
    #[n(4)]
    line_control: u8,
    #[n(5)]
    line_status: u8,
    #[n(6)]
    modem_control: u8,
    #[n(7)]
    modem_status: u8,
    #[n(8)]
    scratch: u8,
    #[cbor(n(9), with = "minicbor::bytes")]
    in_buffer: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SerialOut;
    use std::sync::atomic::AtomicU32;

    fn port(pulses: &Arc<AtomicU32>) -> SerialPort {
        let pulses = Arc::clone(pulses);
        let irq = IrqLine::new(move || {
            pulses.fetch_add(1, Ordering::Relaxed);
        });
        SerialPort::new(Endpoint::open(&SerialOut::None).unwrap(), irq)
    }

    #[test]
    fn loading_keeps_input_and_raises_nothing() {
        let (from_pulses, to_pulses) = (Arc::default(), Arc::default());
        let (mut from, mut to) = (port(&from_pulses), port(&to_pulses));
        let heartbeat = Heartbeat::default();
        from.write(1, 1, &heartbeat);
        assert_eq!(from.input(b"hello"), 5);
        assert_eq!(from_pulses.load(Ordering::Relaxed), 1);

        let saved = from.save();
        to.load(&saved).unwrap();
        to.load(&saved).unwrap();
        assert_eq!(to_pulses.load(Ordering::Relaxed), 0);
        assert_eq!(to.save(), saved);
        let read: Vec<u8> = (0..5).map(|_| to.read(0)).collect();
        assert_eq!(read, b"hello");

        // The line works afterwards.
        to.input(b"!");
        assert_eq!(to_pulses.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn too_much_input_is_refused() {
        let mut port = port(&Arc::default());
        let saved = SavedSerial { in_buffer: vec![0; 65], ..port.save() };
        assert!(port.load(&saved).is_err());
        assert_eq!(port.input(&[0; 100]), 64);
        assert_eq!(port.input(&[0; 100]), 0);
    }
}
