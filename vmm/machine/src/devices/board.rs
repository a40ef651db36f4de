//! What a PC's board has besides: the fixed registers of ACPI (specification 6.5, 4.8.3), by which a
//! guest is told of its power button and turns itself off, and the clock of an MC146818, which tells
//! the host's time and has no interrupt.

use super::{Effect, bus::FLOATING};
use crate::{EndCause, clock};
use minicbor::{Decode, Encode};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Where PM1a's event registers are, status and enable, and its control register.
pub(crate) const PM1_EVENT: u16 = 0x600;
const PM1_ENABLE: u16 = 0x602;
pub(crate) const PM1_CONTROL: u16 = 0x604;
pub(super) const PM1_LAST: u16 = PM1_CONTROL + 1;
/// The line of the system control interrupt: one of a PC's that nothing else here uses.
pub(crate) const SCI_LINE: u32 = 15;
/// What stands for "off" in the control register, as the DSDT says.
pub(crate) const SLEEP_TYPE_OFF: u8 = 5;

/// In status and enable: the power button. In enable: the global lock, which nobody here contends
/// for, and of which a kernel complains if it can't wait for it.
const POWER_BUTTON: u16 = 1 << 8;
const GLOBAL_LOCK: u16 = 1 << 5;
const ENABLE: u16 = POWER_BUTTON | GLOBAL_LOCK;
/// Control: always in ACPI mode; the sleep type, and the bit that makes it so, which reads as 0.
const SCI_ENABLED: u16 = 1;
const SLEEP_TYPE_SHIFT: u32 = 10;
const SLEEP_TYPE: u16 = 7 << SLEEP_TYPE_SHIFT;
const SLEEP: u16 = 1 << 13;

/// The clock's index and data ports.
pub(super) const CLOCK_INDEX: u16 = 0x70;
pub(super) const CLOCK_DATA: u16 = 0x71;
/// The index port's highest bit masks the non-maskable interrupt.
const INDEX: u8 = 0x7f;
/// Register A: 32 kHz. B: 24 hours, binary coded decimal. D: the battery is good.
const REGISTER_A: u8 = 0x26;
const REGISTER_B: u8 = 1 << 1;
const REGISTER_D: u8 = 1 << 7;
/// In register A. Who finds it clear reads registers of one second, if that takes less than what is
/// left of one from here: on an MC146818 at 32 kHz 244 us and then an update of 1984 us, which ends
/// with the second here; a little more.
const UPDATE_IN_PROGRESS: u8 = 1 << 7;
const UPDATE_FROM: Duration = Duration::from_micros(997_700);

/// Sets a line's level.
pub(crate) type SetLine = Arc<dyn Fn(bool) + Send + Sync>;

#[derive(Default)]
pub(super) struct Board {
    registers: SavedBoard,
    sci: OnceLock<SetLine>,
}

/// The registers as they travel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedBoard {
    #[n(0)]
    pm1_status: u16,
    #[n(1)]
    pm1_enable: u16,
    #[n(2)]
    pm1_control: u16,
    #[n(3)]
    clock_index: u8,
}

impl Board {
    pub(super) fn connect(&self, sci: SetLine) {
        assert!(self.sci.set(sci).is_ok(), "the interrupt is connected once");
    }

    /// Presses the power button; `false` if the guest does not listen to it.
    pub(super) fn press_power_button(&mut self) -> bool {
        if self.registers.pm1_enable & POWER_BUTTON == 0 {
            return false;
        }
        self.registers.pm1_status |= POWER_BUTTON;
        self.set_line();
        true
    }

    pub(super) fn write(&mut self, port: u16, byte: u8) -> Effect {
        let high = port & 1 == 1;
        let value = u16::from(byte) << if high { 8 } else { 0 };
        let mask = if high { 0xff00 } else { 0x00ff };
        let registers = &mut self.registers;
        match port & !1 {
            // A one clears.
            PM1_EVENT => {
                registers.pm1_status &= !value;
                self.set_line();
            }
            PM1_ENABLE => {
                registers.pm1_enable = (registers.pm1_enable & !mask | value) & ENABLE;
                self.set_line();
            }
            PM1_CONTROL => {
                registers.pm1_control = (registers.pm1_control & !mask | value) & SLEEP_TYPE;
                let off = u16::from(SLEEP_TYPE_OFF) << SLEEP_TYPE_SHIFT;
                if value & SLEEP != 0 && registers.pm1_control == off {
                    return Effect::End(EndCause::Shutdown);
                }
            }
            CLOCK_INDEX if !high => registers.clock_index = byte & INDEX,
            // The clock goes as the host's does.
            _ => {}
        }
        Effect::None
    }

    pub(super) fn read(&self, port: u16) -> u8 {
        let registers = &self.registers;
        let value = match port & !1 {
            PM1_EVENT => registers.pm1_status,
            PM1_ENABLE => registers.pm1_enable,
            PM1_CONTROL => registers.pm1_control | SCI_ENABLED,
            CLOCK_INDEX => {
                let now = Duration::from_nanos(clock::realtime_ns());
                u16::from_le_bytes([FLOATING, clock_register(registers.clock_index, now)])
            }
            _ => u16::MAX,
        };
        value.to_le_bytes()[usize::from(port & 1)]
    }

    pub(super) fn save(&self) -> SavedBoard {
        self.registers.clone()
    }

    /// Loads the registers; repeatable. A line that is high is so in the interrupt controllers'
    /// state.
    pub(super) fn load(&mut self, saved: &SavedBoard) {
        self.registers = SavedBoard {
            pm1_status: saved.pm1_status & POWER_BUTTON,
            pm1_enable: saved.pm1_enable & ENABLE,
            pm1_control: saved.pm1_control & SLEEP_TYPE,
            clock_index: saved.clock_index & INDEX,
        };
        if !self.is_high() {
            self.set_line();
        }
    }

    fn is_high(&self) -> bool {
        self.registers.pm1_status & self.registers.pm1_enable != 0
    }

    fn set_line(&self) {
        if let Some(sci) = self.sci.get() {
            sci(self.is_high());
        }
    }
}

/// A register of the clock at this time since 1970.
fn clock_register(index: u8, time: Duration) -> u8 {
    const DAY: u64 = 24 * 60 * 60;
    let seconds = time.as_secs();
    let (days, second) = (seconds / DAY, seconds % DAY);
    let (year, month, day) = date(days);
    let value = match index {
        0 => second % 60,
        2 => second / 60 % 60,
        4 => second / 3600,
        // Sunday is 1; the first of January 1970 was a Thursday.
        6 => (days + 4) % 7 + 1,
        7 => day,
        8 => month,
        9 => year % 100,
        0x32 => year / 100,
        0xa if time.subsec_nanos() >= UPDATE_FROM.subsec_nanos() => {
            return REGISTER_A | UPDATE_IN_PROGRESS;
        }
        0xa => return REGISTER_A,
        0xb => return REGISTER_B,
        0xd => return REGISTER_D,
        _ => return 0,
    };
    u8::try_from(value / 10 % 10 * 16 + value % 10).unwrap_or(0)
}

/// Year, month and day of a day since 1970, by the Gregorian calendar. Years are counted from March
/// here, so that a leap day is the last of one, and eras of 400 of them from the year 0.
fn date(days: u64) -> (u64, u64, u64) {
    const ERA: u64 = 146_097;
    // From the first of March of the year 0 to 1970.
    let days = days + 719_468;
    let (era, of_era) = (days / ERA, days % ERA);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / (ERA - 1)) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    // Months in fives of 153 days.
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn board() -> (Board, Arc<AtomicBool>) {
        let (board, line) = (Board::default(), Arc::new(AtomicBool::new(false)));
        let high = Arc::clone(&line);
        board.connect(Arc::new(move |level| high.store(level, Ordering::Relaxed)));
        (board, line)
    }

    #[test]
    fn the_button_raises_the_line_until_the_guest_has_seen_it() {
        let (mut board, line) = board();
        assert!(!board.press_power_button(), "nobody listens");
        assert_eq!(board.write(PM1_EVENT + 3, 1), Effect::None);
        assert!(board.press_power_button() && line.load(Ordering::Relaxed));
        assert_eq!((board.read(PM1_EVENT), board.read(PM1_EVENT + 1)), (0, 1));

        // It travels so; the line's level is in the interrupt controllers.
        let (mut there, raised) = self::board();
        there.load(&board.save());
        assert!(!raised.load(Ordering::Relaxed));
        raised.store(true, Ordering::Relaxed);
        assert_eq!(there.write(PM1_EVENT + 1, 1), Effect::None);
        assert!(!raised.load(Ordering::Relaxed) && there.read(PM1_EVENT + 1) == 0);

        // As at a reset.
        board.load(&SavedBoard::default());
        assert!(!line.load(Ordering::Relaxed) && !board.press_power_button());
    }

    #[test]
    fn only_off_turns_it_off() {
        let (mut board, _) = board();
        assert_eq!((board.read(PM1_CONTROL), board.read(PM1_CONTROL + 1)), (1, 0));
        assert_eq!(board.write(PM1_CONTROL + 1, SLEEP_TYPE_OFF << 2), Effect::None);
        assert_eq!(board.read(PM1_CONTROL + 1), SLEEP_TYPE_OFF << 2);
        assert_eq!(board.write(PM1_CONTROL + 1, 3 << 2 | 1 << 5), Effect::None);
        let off = board.write(PM1_CONTROL + 1, SLEEP_TYPE_OFF << 2 | 1 << 5);
        assert_eq!(off, Effect::End(EndCause::Shutdown));
    }

    #[test]
    fn what_a_peer_sends_sets_known_bits_only() {
        let (mut board, _) = board();
        let all = SavedBoard {
            pm1_status: 0xffff,
            pm1_enable: 0xffff,
            pm1_control: 0xffff,
            clock_index: 0xff,
        };
        board.load(&all);
        let saved = board.save();
        assert_eq!((saved.pm1_status, saved.pm1_enable), (POWER_BUTTON, ENABLE));
        assert_eq!((saved.pm1_control, saved.clock_index), (SLEEP_TYPE, INDEX));
    }

    #[test]
    fn the_clock_tells_the_date() {
        // 2024-02-29 23:59:58, a Thursday, and the days around.
        let seconds = 1_709_251_198;
        let registers = |seconds| {
            let time = Duration::from_secs(seconds);
            [0x32, 9, 8, 7, 6, 4, 2, 0].map(|index| clock_register(index, time))
        };
        assert_eq!(registers(seconds), [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58]);
        assert_eq!(registers(seconds + 2), [0x20, 0x24, 0x03, 0x01, 6, 0, 0, 0]);
        assert_eq!(registers(0), [0x19, 0x70, 1, 1, 5, 0, 0, 0]);
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(47_540), (2100, 2, 28));
        assert_eq!(date(47_541), (2100, 3, 1));
        let (mut board, _) = board();
        board.write(CLOCK_INDEX, 0x8d);
        assert_eq!(board.read(CLOCK_DATA), REGISTER_D, "the battery is good");
    }

    /// Registers that are read one after the other are of one second.
    #[test]
    fn the_clock_tells_that_an_update_is_near() {
        let register_a = |micros| clock_register(0xa, Duration::from_micros(micros));
        for second in [0, 1_709_251_198_000_000] {
            assert_eq!(register_a(second), 0x26);
            assert_eq!(register_a(second + 997_000), 0x26);
            assert_eq!(register_a(second + 999_000), 0xa6);
            assert_eq!(register_a(second + 999_999), 0xa6);
        }
    }
}
