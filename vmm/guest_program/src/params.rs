//! What the program is to do, as people write it: `fill=512M,ws=64M,rate=4/ms`.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use martlet_units::{ByteCount, PAGE_SIZE, ParseUnitError, parse_duration};

/// The shortest tick. A port write in each tick must be small beside it.
const TICK_MIN: Duration = Duration::from_micros(10);
/// The longest tick.
const TICK_MAX: Duration = Duration::from_secs(1);
/// Most pages that may be rewritten, and most that may be verified, in one tick.
const PAGES_PER_TICK_MAX: u32 = 1 << 20;

/// How much the guest writes and checks. For the whole guest: its vCPUs share it evenly.
///
/// Written as `fill=SIZE,ws=SIZE,rate=N/ms,tick=TIME,verify=N`, and for machines with network cards
/// `frames=N/ms,frame=BYTES,window=N`, in any order; what is left out is as in the default. `ws` is
/// by default not more than `fill`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramParams {
    /// `fill`: memory that is filled at the start and verified from then on.
    pub fill: ByteCount,
    /// `ws`: the part of it that is rewritten, over and over. May be 0.
    pub working_set: ByteCount,
    /// `rate`: how fast.
    pub rate: Rate,
    /// `tick`: time between two heartbeats of a vCPU.
    pub tick: Duration,
    /// `verify`: most pages that each vCPU checks in one tick. It does so while it waits for the
    /// next one, so a busy host means fewer, not later ticks.
    pub verify_per_tick: u32,
    /// What it does with its network cards. Without cards it means nothing.
    pub nic: NicParams,
}

/// What the guest does with its network cards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicParams {
    /// `frames`: frames sent on all cards together, nearly all of them on each card's first pair.
    /// May be 0.
    pub frames: Rate,
    /// `frame`: bytes of each, from its destination address on.
    pub frame: ByteCount,
    /// `window`: frames of a queue pair that may be under way at once; not more than half of the
    /// queue's size, whatever is said.
    pub window: u16,
}

/// Frames of the shortest and the longest kind: what Ethernet allows, in whole words.
const FRAME_MIN: ByteCount = ByteCount(64);
const FRAME_MAX: ByteCount = ByteCount(1512);
/// Most frames that may be sent in a millisecond.
const FRAMES_PER_MS_MAX: u64 = 1 << 16;

impl Default for NicParams {
    /// At one card, its first pair's 16-bit indices wrap after a second and a half.
    fn default() -> NicParams {
        NicParams {
            frames: Rate { pages: 48, per: RatePer::Millisecond },
            frame: ByteCount(128),
            window: 64,
        }
    }
}

/// Pages rewritten, or frames sent, in a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How many.
    pub pages: u32,
    /// In which time.
    pub per: RatePer,
}

/// The time that a [`Rate`] refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RatePer {
    /// `N/s`
    Second,
    /// `N/ms`
    Millisecond,
    /// `N/tick`
    Tick,
}

/// Why a text is no [`ProgramParams`]. One line that says which part and what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParamsError(String);

impl Default for ProgramParams {
    fn default() -> ProgramParams {
        ProgramParams {
            fill: ByteCount(512 << 20),
            working_set: ByteCount(64 << 20),
            rate: Rate { pages: 4, per: RatePer::Millisecond },
            tick: Duration::from_micros(200),
            verify_per_tick: 64,
            nic: NicParams::default(),
        }
    }
}

impl ProgramParams {
    /// Checks what does not depend on the machine. `from_str` has done so.
    pub fn validate(&self) -> Result<(), ParamsError> {
        let refuse = |reason: String| Err(ParamsError(reason));
        let (fill, working_set) = (self.fill, self.working_set);
        for (key, bytes, least) in [("fill", fill.0, 1), ("ws", working_set.0, 0)] {
            if bytes < least || !bytes.is_multiple_of(PAGE_SIZE) {
                return refuse(format!("{key}: {bytes} bytes are not a multiple of 4096 above 0"));
            }
        }
        if working_set > fill {
            return refuse(format!("ws: a working set of {working_set} is more than fill, {fill}"));
        }
        if working_set.0 == 0 && self.rate.pages > 0 {
            return refuse("ws: a rate above 0 needs a working set".into());
        }
        if !(TICK_MIN..=TICK_MAX).contains(&self.tick) {
            return refuse(format!("tick: {:?} is not from 10us to 1s", self.tick));
        }
        for (key, pages) in
            [("rate", self.pages_per_tick()), ("verify", u128::from(self.verify_per_tick) << 32)]
        {
            if pages > u128::from(PAGES_PER_TICK_MAX) << 32 {
                return refuse(format!("{key}: more than {PAGES_PER_TICK_MAX} pages a tick"));
            }
        }
        self.nic.validate(self.tick)
    }

    /// Pages that the whole guest rewrites in a tick, in 1/2^32 of a page.
    pub(crate) fn pages_per_tick(&self) -> u128 {
        let pages = u128::from(self.rate.pages) << 32;
        pages * self.tick.as_nanos() / self.rate.per.nanos(self.tick)
    }
}

impl RatePer {
    fn nanos(self, tick: Duration) -> u128 {
        match self {
            RatePer::Tick => tick.as_nanos(),
            RatePer::Millisecond => 1_000_000,
            RatePer::Second => 1_000_000_000,
        }
    }
}

impl NicParams {
    fn validate(&self, tick: Duration) -> Result<(), ParamsError> {
        let bytes = self.frame.0;
        let reason = if !(FRAME_MIN..=FRAME_MAX).contains(&self.frame) || !bytes.is_multiple_of(8) {
            format!("frame: {bytes} bytes are not a multiple of 8 from 64 to 1512")
        } else if self.window == 0 {
            "window: `0` is not a number of frames above 0".into()
        } else if self.frames_per_ms(tick) > u128::from(FRAMES_PER_MS_MAX) << 32 {
            format!("frames: more than {FRAMES_PER_MS_MAX} frames a millisecond")
        } else {
            return Ok(());
        };
        Err(ParamsError(reason))
    }

    /// Frames that the whole guest sends in a millisecond, in 1/2^32 of a frame.
    pub(crate) fn frames_per_ms(&self, tick: Duration) -> u128 {
        (u128::from(self.frames.pages) << 32) * 1_000_000 / self.frames.per.nanos(tick)
    }
}

impl FromStr for ProgramParams {
    type Err = ParamsError;

    fn from_str(text: &str) -> Result<ProgramParams, ParamsError> {
        let mut params = ProgramParams::default();
        let mut seen = Vec::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let key = params.set(item)?;
            if seen.contains(&key) {
                return Err(ParamsError(format!("`{key}` is given twice")));
            }
            seen.push(key);
        }
        if !seen.contains(&"ws") {
            params.working_set = params.working_set.min(params.fill);
        }
        params.validate()?;
        Ok(params)
    }
}

impl ProgramParams {
    /// Takes over one `key=value` and says which key it was.
    fn set(&mut self, item: &str) -> Result<&'static str, ParamsError> {
        let (key, value) = item.split_once('=').unwrap_or_default();
        let key = KEYS.into_iter().find(|(known, _)| *known == key.trim());
        let Some((key, _)) = key else {
            let forms = KEYS.map(|(key, value)| format!("{key}={value}")).join(", ");
            return Err(ParamsError(format!("`{item}` is none of {forms}")));
        };
        let value = value.trim();
        let unit = |reason: ParseUnitError| ParamsError(format!("{key}: {reason}"));
        let no_number = |of: &str| ParamsError(format!("{key}: `{value}` is not a number of {of}"));
        match key {
            "fill" => self.fill = value.parse().map_err(unit)?,
            "ws" => self.working_set = value.parse().map_err(unit)?,
            "rate" => self.rate = Rate::parse(key, value)?,
            "tick" => self.tick = parse_duration(value).map_err(unit)?,
            "verify" => self.verify_per_tick = value.parse().map_err(|_| no_number("pages"))?,
            "frames" => self.nic.frames = Rate::parse(key, value)?,
            "frame" => self.nic.frame = value.parse().map_err(unit)?,
            _ => self.nic.window = value.parse().map_err(|_| no_number("frames above 0"))?,
        }
        Ok(key)
    }
}

/// What may be said, and how.
const KEYS: [(&str, &str); 8] = [
    ("fill", "SIZE"),
    ("ws", "SIZE"),
    ("rate", "N/ms"),
    ("tick", "TIME"),
    ("verify", "N"),
    ("frames", "N/ms"),
    ("frame", "BYTES"),
    ("window", "N"),
];

impl Rate {
    fn parse(key: &str, text: &str) -> Result<Rate, ParamsError> {
        let wrong =
            || ParamsError(format!("{key}: `{text}` is not a rate such as 4/ms, 4000/s or 1/tick"));
        let (pages, per) = match text.split_once('/') {
            Some((pages, "s")) => (pages, RatePer::Second),
            Some((pages, "ms")) => (pages, RatePer::Millisecond),
            Some((pages, "tick")) => (pages, RatePer::Tick),
            Some(_) => return Err(wrong()),
            // Nothing at all needs no unit.
            None if text == "0" => ("0", RatePer::Millisecond),
            None => return Err(wrong()),
        };
        Ok(Rate { pages: pages.parse().map_err(|_| wrong())?, per })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = match self.per {
            RatePer::Second => "s",
            RatePer::Millisecond => "ms",
            RatePer::Tick => "tick",
        };
        write!(f, "{}/{per}", self.pages)
    }
}

/// A size in the largest unit that it is a whole number of.
struct Exact(ByteCount);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0;
        match [(30, "G"), (20, "M"), (10, "K")]
            .into_iter()
            .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        {
            Some((shift, unit)) => write!(f, "{}{unit}", bytes >> shift),
            None => write!(f, "{bytes}"),
        }
    }
}

impl fmt::Display for ProgramParams {
    /// As it is read: parsing gives the same again, as long as the tick is whole nanoseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fill={},ws={},", Exact(self.fill), Exact(self.working_set))?;
        write!(f, "rate={},tick=", self.rate)?;
        let nanos = self.tick.as_nanos();
        if nanos.is_multiple_of(1_000_000) {
            write!(f, "{}ms", nanos / 1_000_000)?;
        } else if nanos.is_multiple_of(1_000) {
            write!(f, "{}us", nanos / 1_000)?;
        } else {
            write!(f, "{nanos}ns")?;
        }
        write!(f, ",verify={}", self.verify_per_tick)?;
        if self.nic != NicParams::default() {
            let NicParams { frames, frame, window } = &self.nic;
            write!(f, ",frames={frames},frame={},window={window}", Exact(*frame))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_issues_example_is_the_default() {
        assert_eq!("fill=512M,ws=64M,rate=4/ms".parse(), Ok(ProgramParams::default()));
        assert_eq!("".parse(), Ok(ProgramParams::default()));
        let shown = ProgramParams::default().to_string();
        assert_eq!(shown, "fill=512M,ws=64M,rate=4/ms,tick=200us,verify=64");
    }

    #[test]
    fn a_small_fill_takes_the_working_set_along() {
        let params: ProgramParams = "fill=32M".parse().unwrap();
        assert_eq!(params.working_set, ByteCount(32 << 20));
        assert!("fill=32M,ws=64M".parse::<ProgramParams>().is_err());
    }

    #[test]
    fn rates_become_fractions_of_a_page() {
        let params: ProgramParams = "rate=4/ms,tick=200us".parse().unwrap();
        assert_eq!(params.pages_per_tick(), (4 << 32) / 5);
        let params: ProgramParams = "rate=3/tick,tick=1ms".parse().unwrap();
        assert_eq!(params.pages_per_tick(), 3 << 32);
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        for (text, expected) in [
            (
                "fil=1G",
                "`fil=1G` is none of fill=SIZE, ws=SIZE, rate=N/ms, tick=TIME, verify=N, \
                 frames=N/ms, frame=BYTES, window=N",
            ),
            ("fill=1G,fill=1G", "`fill` is given twice"),
            ("fill=much", "fill: `much` is not a size such as 4096, 512M or 1.5G"),
            ("fill=5000", "fill: 5000 bytes are not a multiple of 4096 above 0"),
            ("fill=0", "fill: 0 bytes are not a multiple of 4096 above 0"),
            ("ws=1G", "ws: a working set of 1.0 GiB is more than fill, 512.0 MiB"),
            ("ws=0", "ws: a rate above 0 needs a working set"),
            ("rate=4", "rate: `4` is not a rate such as 4/ms, 4000/s or 1/tick"),
            ("rate=-1/ms", "rate: `-1/ms` is not a rate such as 4/ms, 4000/s or 1/tick"),
            ("rate=4294967295/tick", "rate: more than 1048576 pages a tick"),
            ("tick=1us", "tick: 1µs is not from 10us to 1s"),
            ("tick=5", "tick: `5` is not a time with its unit, such as 300ms or 2s"),
            ("verify=all", "verify: `all` is not a number of pages"),
            ("frames=4", "frames: `4` is not a rate such as 4/ms, 4000/s or 1/tick"),
            ("frames=65537/ms", "frames: more than 65536 frames a millisecond"),
            ("frame=100", "frame: 100 bytes are not a multiple of 8 from 64 to 1512"),
            ("frame=2K", "frame: 2048 bytes are not a multiple of 8 from 64 to 1512"),
            ("window=0", "window: `0` is not a number of frames above 0"),
            ("window=-1", "window: `-1` is not a number of frames above 0"),
        ] {
            let error = text.parse::<ProgramParams>().unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
        assert!("ws=0,rate=0".parse::<ProgramParams>().is_ok());
    }

    proptest! {
        #[test]
        fn display_and_parse_agree(
            fill in 1u64..1 << 30, ws in 0u64..1 << 30, pages in 0u32..1000, per in 0usize..3,
            tick_ns in 10_000u64..1_000_000_000, verify in 0u32..1 << 20,
            frames in 0u32..100, frame in 8u64..=189, window in 1u16..,
        ) {
            let ws = ws.min(fill);
            let per = [RatePer::Second, RatePer::Millisecond, RatePer::Tick][per];
            let params = ProgramParams {
                fill: ByteCount(fill * PAGE_SIZE),
                working_set: ByteCount(ws * PAGE_SIZE),
                rate: Rate { pages: if ws == 0 { 0 } else { pages }, per },
                tick: Duration::from_nanos(tick_ns),
                verify_per_tick: verify,
                nic: NicParams {
                    frames: Rate { pages: frames, per },
                    frame: ByteCount(frame * 8),
                    window,
                },
            };
            prop_assert_eq!(params.to_string().parse(), Ok(params));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<ProgramParams>();
        }
    }
}
