//! `demo`: a real guest moves between two processes of this host, once or in a chain, and checks
//! its own memory all the time.

mod process;
mod result;

use super::follow::{self, Request};
use super::migrate::interrupts;
use crate::cli::{AccelArg, DemoArgs, TransportArg};
use crate::failure::Failure;
use crate::log::note;
use crate::output;
use crate::output::{Picture, show_json};
use crate::parameters::Parameters;
use crate::report_json::{GuestJson, OutcomeJson, ReportJson};
use crate::scratch::ScratchDir;
use crate::signals::Held;
use crate::view::number::{grouped, millis, plural, size};
use crate::view::progress::{Kind, MigrationProgress, Steps};
use crate::view::{BOLD, Style, summary};
use crate::vm::{self, settle_accel};
use martlet_engine::Provider;
use martlet_guest_program::ProgramParams;
use martlet_machine::THREADS_BY_TCP_VARIABLE;
use martlet_units::{ByteCount, PAGE_SIZE};
use process::{GuestView, Process};
use result::Chain;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Between two moves. The process that the guest left has just ended, and the kernel goes on with
/// its memory for a while: that is not part of the next move.
const SETTLE: Duration = Duration::from_millis(300);

/// How long a guest may take to fill a GiB of its memory. Generous: it may run in an emulator.
const FILL_MAX_PER_GIB: Duration = Duration::from_secs(120);
/// How long a guest may take to check the pages that prove it alive after a move.
const ALIVE_MAX: Duration = Duration::from_secs(30);
/// Frames that come back to it between two moves of a chain.
const FRAMES_BETWEEN_MOVES: u64 = 4096;
/// Pages that it checks between two moves of a chain.
const PAGES_BETWEEN_MOVES: u64 = 4096;
/// How long a guest may take to check all of its memory once, a GiB.
const PASS_MAX_PER_GIB: Duration = Duration::from_secs(60);
/// Between two looks at a guest that is waited for.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// A chain of up to this many runs is shown run by run.
const LINES_MAX: u32 = 20;

/// `martlet demo`. `log` is the filter for the processes that it starts.
pub(crate) fn run(args: &DemoArgs, log: Option<&str>, signals: Held) -> Result<(), Failure> {
    let mut chain = Chain::default();
    let end = run_chain(args, log, signals, &mut chain);
    if let (true, Err(failure)) = (args.output.json, &end)
        && !matches!(failure, Failure::Reported(_))
    {
        chain.end_early(failure);
        show_json(&chain.summary());
    }
    end
}

/// Moves the guest, and shows how that went if it came to an end.
fn run_chain(
    args: &DemoArgs,
    log: Option<&str>,
    signals: Held,
    chain: &mut Chain,
) -> Result<(), Failure> {
    let interrupts = interrupts(signals)?;
    let program = vm::program(args.program.as_deref(), args.memory)?;
    vm::check_program(&program, args.memory, args.vcpus)?;
    let mut picture = Picture::open(args.output.svg.as_deref())?;
    let dir = ScratchDir::create().map_err(|e| Failure::because("temporary folder", &e))?;
    let style = Style::of_stdout();
    let kind = Kind::suiting(args.output.json);
    let mut demo = Demo { args, log, program, dir, style, kind, interrupts, started: 0 };
    demo.run(chain)?;
    demo.show(chain, picture.as_mut());
    if chain.is_well() { Ok(()) } else { Err(Failure::Reported(chain.outcome())) }
}

struct Demo<'a> {
    args: &'a DemoArgs,
    log: Option<&'a str>,
    program: ProgramParams,
    dir: ScratchDir,
    style: Style,
    kind: Kind,
    interrupts: Arc<AtomicU32>,
    /// Processes started so far; they need names.
    started: u32,
}

impl Demo<'_> {
    /// Boots the guest and moves it as often as was asked for.
    fn run(&mut self, chain: &mut Chain) -> Result<(), Failure> {
        let mut here = self.boot()?;
        let machine = here.machine()?;
        self.say_header(&machine.accel);
        let filled = self.wait_filled(&mut here)?;
        self.say(format_args!(
            "  load         {} filled in {}; in {} of it {} are rewritten\n",
            size(self.program.fill),
            millis(filled.as_secs_f64() * 1e3),
            size(self.program.working_set),
            self.program.rate.to_string().replacen('/', " pages/", 1),
        ));
        self.wait_frames(&mut here)?;
        chain.moves(machine);
        let steps = (self.args.runs > 1).then(|| Steps::new(self.kind, self.args.runs.into()));
        for run in 0..self.args.runs {
            let mut there = self.receive()?;
            let report = self.move_once(&mut here, &mut there)?;
            let completed = report.outcome == OutcomeJson::Completed;
            self.say_run(run, &report);
            if let Some(steps) = &steps {
                steps.step();
                steps.say(summary::headline(&report, self.plain()));
            }
            chain.push(report);
            if completed {
                self.wait_arrived(&mut there)?;
                let pages = PAGES_BETWEEN_MOVES.min(self.program.fill.0 / PAGE_SIZE);
                let guest = self.wait_checked(&mut there, pages, ALIVE_MAX)?;
                chain.saw(&guest);
                self.wait_frames(&mut there)?;
                here.quit();
                here = there;
                std::thread::sleep(SETTLE);
            }
            if !chain.may_go_on() {
                break;
            }
        }
        drop(steps);
        if chain.is_well() {
            let pass = self.wait_pass(&mut here)?;
            chain.saw(&pass);
        }
        here.quit();
        Ok(())
    }

    fn boot(&mut self) -> Result<Process, Failure> {
        let mut process = self.process("run");
        process
            .arg("--memory", self.args.memory.0.to_string())
            .arg("--vcpus", self.args.vcpus.to_string())
            .arg("--program", self.program.to_string());
        process.start(&self.interrupts)
    }

    fn receive(&mut self) -> Result<Process, Failure> {
        let mut process = self.process("receive");
        let listen = match self.args.transport {
            TransportArg::Tcp => "tcp:127.0.0.1:0".to_owned(),
            TransportArg::Rdma => {
                let provider = match self.args.tuning.rdma.rdma_provider {
                    // No RDMA device has the loopback address.
                    None | Some(Provider::Auto) => Provider::Soft,
                    Some(provider) => provider,
                };
                process.arg("--rdma-provider", provider.to_string());
                "rdma:127.0.0.1:0".to_owned()
            }
            TransportArg::Unix => {
                format!("unix:{}", self.dir.path().join(format!("m{}", self.started)).display())
            }
        };
        process.arg("--listen", listen);
        // What it does not touch takes nothing, so it may be larger than the host. What it boots
        // from comes with it.
        process.arg("--memory-max", self.args.memory.0.saturating_mul(2).to_string());
        process.start(&self.interrupts)
    }

    fn process(&mut self, command: &str) -> process::Builder {
        self.started += 1;
        let mut builder = process::Builder::new(self.dir.path(), self.started, command, self.log);
        builder
            .env(THREADS_BY_TCP_VARIABLE, "1".to_owned())
            .arg("--accel", word(&settle_accel(self.args.accel)))
            .arg("--dirty-tracking", word(&self.args.dirty_tracking));
        if let Some(vdpa) = &self.args.vdpa {
            builder.arg("--vdpa", vdpa.to_string());
        }
        builder
    }

    fn move_once(&self, here: &mut Process, there: &mut Process) -> Result<ReportJson, Failure> {
        let to = there.address()?;
        let request = Request {
            to: &to,
            parameters: Parameters::from(&self.args.tuning),
            ask_again_at: None,
        };
        let kind = if self.args.runs > 1 { Kind::Quiet } else { self.kind };
        let mut progress = MigrationProgress::new(kind);
        let client = here.client();
        let report = follow::migrate(client, &request, &mut progress, &self.interrupts);
        let report = report.map_err(|failure| here.explain(failure))?;
        self.check_interrupt()?;
        Ok(report)
    }

    /// Waits until the guest has filled its memory; until then its checks cover only a part.
    fn wait_filled(&self, process: &mut Process) -> Result<Duration, Failure> {
        let start = Instant::now();
        let deadline = start + per_gib(FILL_MAX_PER_GIB, self.program.fill);
        let steps = Steps::new(self.kind, 0);
        let all = self.program.fill.0 / PAGE_SIZE;
        loop {
            let guest = process.guest()?;
            if guest.filled {
                return Ok(start.elapsed());
            }
            let percent = guest.filled_pages.saturating_mul(100) / all.max(1);
            steps.say(format!("the guest fills its memory: {percent} %"));
            self.pause(deadline, "the guest does not get its memory filled")?;
        }
    }

    /// Waits until frames flow on all of the guest's cards.
    fn wait_frames(&self, process: &mut Process) -> Result<(), Failure> {
        if self.args.vdpa.is_none() {
            return Ok(());
        }
        let deadline = Instant::now() + ALIVE_MAX;
        let first = process.guest()?.frames.unwrap_or_default().count.received;
        loop {
            let frames = process.guest()?.frames.unwrap_or_default();
            let all_run = frames.cards > 0 && frames.cards_running == frames.cards;
            if all_run && frames.count.received >= first.saturating_add(FRAMES_BETWEEN_MOVES) {
                return Ok(());
            }
            self.pause(deadline, "no frames come back on the guest's network cards")?;
        }
    }

    /// The source may know of the arrival before those do who answer at the destination.
    fn wait_arrived(&self, process: &mut Process) -> Result<(), Failure> {
        let deadline = Instant::now() + ALIVE_MAX;
        while !process.has_guest()? {
            self.pause(deadline, "the guest has moved, but did not arrive")?;
        }
        Ok(())
    }

    /// Waits until the guest has checked `pages` more pages than it has now.
    fn wait_checked(
        &self,
        process: &mut Process,
        pages: u64,
        limit: Duration,
    ) -> Result<GuestView, Failure> {
        let deadline = Instant::now() + limit;
        let first = process.guest()?;
        let mut guest = first;
        while guest.verified_pages < first.verified_pages.saturating_add(pages)
            && guest.wrong_pages == 0
        {
            self.pause(deadline, "the guest does not check its memory any more")?;
            guest = process.guest()?;
        }
        Ok(guest)
    }

    /// Lets the guest check all that it filled once more, where it has come to.
    fn wait_pass(&self, process: &mut Process) -> Result<GuestView, Failure> {
        let steps = Steps::new(self.kind, 0);
        steps.say("the guest checks all of its memory".to_owned());
        let limit = ALIVE_MAX + per_gib(PASS_MAX_PER_GIB, self.program.fill);
        self.wait_checked(process, self.program.fill.0 / PAGE_SIZE, limit)
    }

    fn pause(&self, deadline: Instant, complaint: &str) -> Result<(), Failure> {
        self.check_interrupt()?;
        if Instant::now() >= deadline {
            return Err(Failure::Failed(complaint.to_owned()));
        }
        std::thread::sleep(LOOK_INTERVAL);
        Ok(())
    }

    fn check_interrupt(&self) -> Result<(), Failure> {
        check_interrupt(&self.interrupts)
    }

    fn plain(&self) -> Style {
        Style { colour: crate::view::Colour::Plain, ..self.style }
    }

    // --- words ---

    /// Text for people; nothing with `--json`.
    fn say(&self, text: std::fmt::Arguments<'_>) {
        if !self.args.output.json {
            output::show(text);
        }
    }

    fn say_header(&self, accel: &str) {
        let backend = match (accel, self.args.accel) {
            ("kvm", _) => "KVM".to_owned(),
            (_, AccelArg::Auto) => match vm::kvm_usable() {
                Err(reason) => format!("host threads, as {reason}"),
                Ok(()) => "host threads".to_owned(),
            },
            _ => "host threads".to_owned(),
        };
        let (memory, vcpus) = (size(self.args.memory), plural(self.args.vcpus.into(), "vCPU"));
        let over = word(&self.args.transport);
        self.say(format_args!(
            "a guest of {memory} and {vcpus} moves from one process to another, over {over}\n  \
             runs on      {backend}\n"
        ));
    }

    fn say_run(&self, run: u32, report: &ReportJson) {
        let runs = self.args.runs;
        let shown = runs <= LINES_MAX || report.outcome != OutcomeJson::Completed;
        if runs == 1 || self.kind == Kind::Bar || !shown {
            return;
        }
        let width = runs.to_string().len();
        let line = summary::headline(report, self.style);
        self.say(format_args!("  run {:>width$}  {line}\n", run + 1));
    }

    fn show(&self, chain: &Chain, picture: Option<&mut Picture>) {
        let total = chain.summary();
        if let Some(picture) = picture {
            picture.draw(&total.report);
        }
        if self.args.output.json {
            return show_json(&total);
        }
        let mut text = String::from("\n");
        if self.args.runs > 1 && total.completed_runs > 0 {
            let _ = writeln!(
                text,
                "{} of {}; medians, and the timeline of the median run:\n",
                plural(total.completed_runs.into(), "move"),
                self.args.runs,
            );
        }
        let check = total.report.guest.as_ref().map(|guest| self.check_line(chain, guest));
        text.push_str(&summary::render(&total.report, self.style, check.as_deref()));
        if let (true, Some(line)) = (self.args.runs > 1, chain.blackout_line()) {
            let _ = writeln!(text, "  blackout     {}", self.style.paint(BOLD, &line));
        }
        if let (true, Some(line)) = (self.args.runs > 1, chain.network_line()) {
            let _ = writeln!(text, "  cards        {}", self.style.paint(BOLD, &line));
        }
        output::show(format_args!("{text}"));
        if let Some(complaint) = chain.complaint() {
            note(format_args!("{complaint}"));
        }
    }

    fn check_line(&self, chain: &Chain, guest: &GuestJson) -> String {
        let wrong = summary::wrong_pages(guest.wrong_pages, self.style);
        let beats = grouped(guest.heartbeats);
        let checked = plural(guest.verified_pages, "check");
        if chain.is_well() {
            format!(
                "checked all that it filled once more after the move: {wrong}; \
                 {checked} of pages, {beats} heartbeats"
            )
        } else {
            format!("{checked} of pages: {wrong}; {beats} heartbeats")
        }
    }
}

/// Ends the demo if a signal came. Everything is cleaned up by the owners of it.
fn check_interrupt(interrupts: &AtomicU32) -> Result<(), Failure> {
    // Relaxed: a number that only grows; nothing else hangs on it.
    if interrupts.load(Ordering::Relaxed) > 0 {
        return Err(Failure::Cancelled("interrupted".to_owned()));
    }
    Ok(())
}

fn per_gib(time: Duration, size: ByteCount) -> Duration {
    let gib = u32::try_from(size.0.div_ceil(1 << 30)).unwrap_or(u32::MAX);
    time.saturating_mul(gib.max(1))
}

/// A choice as it is written on the command line.
fn word(choice: &impl clap::ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
