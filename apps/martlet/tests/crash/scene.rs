//! One guest after the other, moved from process to process while these are killed and cut off.
//! Whoever survives an attempt is part of the next one, so a guest that lives long enough has been
//! through all of it.

use crate::desk::Desk;
use crate::judge::{DEADLINE_MIN, Ending, judge};
use crate::log::Log;
use crate::plan::{Plan, Side};
use crate::process::{Guest, Process};
use crate::proxy::Proxy;
use crate::support::Dir;
use crate::watch::{Pair, Watched};
use martlet_qmp::ClientError;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a guest may take to check all that it filled: a few hundredths of a second, on a host
/// that has nothing else to do.
const CHECK_MAX: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Migrations to which nothing is done, until one of them must be through.
const PATIENT_ATTEMPTS: u32 = 4;

pub(crate) struct Scene {
    dir: Dir,
    log: Log,
    processes: u32,
    /// It has a guest.
    holder: Option<Process>,
    /// It waits for one, and has seen an attempt fail.
    spare: Option<Process>,
    /// What a migration takes to which nothing happens.
    clean: Duration,
    /// What survivors said of what had happened, and how often.
    words: BTreeMap<String, u32>,
}

impl Scene {
    pub(crate) fn new() -> Result<Scene, String> {
        let (dir, log) = (Dir::new()?, Log::new());
        let (clean, words) = (Duration::from_millis(60), BTreeMap::new());
        let mut scene = Scene { dir, log, processes: 0, holder: None, spare: None, clean, words };
        // For the measure.
        let source = scene.source(1)?;
        scene.move_on(source, None, &Plan::clean(false))?;
        Ok(scene)
    }

    pub(crate) fn clean(&self) -> Duration {
        self.clean
    }

    /// What survivors said of what had happened, and how often.
    pub(crate) fn words(&self) -> &BTreeMap<String, u32> {
        &self.words
    }

    fn remember(&mut self, pair: &Pair, ending: Ending) {
        for (side, error) in
            [("source", pair.source.error()), ("destination", pair.destination.error())]
        {
            if !error.is_empty() {
                *self.words.entry(format!("{ending:?}, {side}: {error}")).or_insert(0) += 1;
            }
        }
    }

    /// What happened in the last attempt.
    pub(crate) fn story(&self) -> String {
        self.log.render()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn next_number(&mut self) -> u32 {
        self.processes += 1;
        self.processes
    }

    /// The process with the guest, or a new one.
    fn source(&mut self, vcpus: u16) -> Result<Process, String> {
        let number = self.next_number();
        match self.holder.take() {
            Some(holder) => Ok(holder),
            None => Process::run(self.dir.path(), number, vcpus),
        }
    }

    fn receiver(&mut self) -> Result<Process, String> {
        let number = self.next_number();
        Process::receive(self.dir.path(), number)
    }

    /// One attempt with a fault, the judgement, and a clean migration if the guest stayed.
    pub(crate) fn attempt(&mut self, plan: &Plan) -> Result<Ending, String> {
        self.log.restart();
        self.log.note(format!("{plan:?}"));
        let mut source = self.source(plan.vcpus)?;
        let spare = self.spare.take().filter(|_| plan.same_destination);
        let fresh = spare.is_none();
        let mut destination = spare.map_or_else(|| self.receiver(), Ok)?;
        let port = destination.port()?;
        self.log.note(format!("from {} to {}, port {port}", source.name, destination.name));
        let killer = (source.killer(), source.control().to_owned());
        let desk = Desk::new(*plan, self.log.clone(), killer, destination.killer());
        let proxy = Proxy::start(port, &desk)?;
        let refused = |e| format!("an order is refused: {e}");
        if plan.paused {
            source.ask("stop").map_err(refused)?;
        }
        let to = if plan.direct { port } else { proxy.port() };
        let zero = self.log.zero();
        desk.start_clock(zero);
        // It may be killed before it has answered.
        let called = migrate(&mut source, to, plan);
        let mut pair = Pair::new(source, destination, self.log.clone());
        pair.settle(&desk)?;
        let fired = desk.disarm();
        pair.settle(&desk)?;
        if !pair.source.is_dead() {
            called.map_err(|e| format!("migrate: {e}"))?;
        }
        let slow = zero.elapsed() > DEADLINE_MIN;
        let ending = judge(&mut pair, &desk, fired, slow, fresh)?;
        self.log.note(format!("{ending:?}"));
        self.remember(&pair, ending);
        if ending == Ending::Undecided {
            self.stays_undecided(&mut pair, &proxy)?;
        }
        self.lives_on(pair, &desk, ending)?;
        Ok(ending)
    }

    /// Checks the guest where it is now, and keeps who survived.
    fn lives_on(&mut self, mut pair: Pair, desk: &Desk, ending: Ending) -> Result<(), String> {
        let Some(holder) = ending.holder() else {
            for side in [Side::Source, Side::Destination] {
                pair.stands_still(side)?;
            }
            if ending == Ending::Undecided {
                take_back(&mut pair.source.process, desk.plan.paused)?;
            }
            let Pair { destination, .. } = pair;
            self.spare = alive(destination);
            return Ok(());
        };
        if desk.plan.paused {
            pair.stands_still(Side::Source)?;
            pair.stands_still(Side::Destination)?;
            let process = &mut pair.side(holder).process;
            let state = process.run_state()?;
            if state != "paused" {
                return Err(format!("a guest that was paused is {state} at {}", process.name));
            }
            process.ask("cont").map_err(|e| format!("cont: {e}"))?;
        }
        let guest = pair.only(holder)?;
        if guest.beats < pair.beats_at_source() {
            let before = pair.beats_at_source();
            return Err(format!("the guest went back from heartbeat {before} to {}", guest.beats));
        }
        check_all(&mut pair.side(holder).process)?;
        let Pair { source, destination, .. } = pair;
        match holder {
            Side::Destination => {
                self.holder = Some(destination.process);
                Ok(())
            }
            Side::Source => {
                let destination = alive(destination).filter(|_| desk.plan.same_destination);
                let verify = desk.plan.noise.is_multiple_of(2);
                self.move_on(source.process, destination, &Plan::clean(verify))
            }
        }
    }

    /// Moves a guest to which nothing is done. Every attempt that was abandoned is followed by
    /// this one. A host that is far too busy may need several of them.
    fn move_on(
        &mut self,
        mut source: Process,
        mut destination: Option<Process>,
        plan: &Plan,
    ) -> Result<(), String> {
        for _ in 0..PATIENT_ATTEMPTS {
            match self.try_move_on(source, destination, plan)? {
                None => return Ok(()),
                Some(stayed) => (source, destination) = (stayed, None),
            }
        }
        Err("no migration ends within the protocol's deadlines".to_owned())
    }

    /// Returns the source if the guest stayed there because that took too long.
    fn try_move_on(
        &mut self,
        mut source: Process,
        destination: Option<Process>,
        plan: &Plan,
    ) -> Result<Option<Process>, String> {
        let mut destination = destination.map_or_else(|| self.receiver(), Ok)?;
        let port = destination.port()?;
        self.log.note(format!("moving on from {} to {}", source.name, destination.name));
        let killer = (source.killer(), source.control().to_owned());
        let desk = Desk::new(*plan, self.log.clone(), killer, destination.killer());
        desk.disarm();
        let zero = Instant::now();
        migrate(&mut source, port, plan).map_err(|e| format!("migrate again: {e}"))?;
        let mut pair = Pair::new(source, destination, self.log.clone());
        pair.settle(&desk)?;
        let report = pair.source.report();
        if pair.source.status() != "completed" || pair.destination.status() != "completed" {
            let (status, error) = (pair.source.status(), pair.source.error());
            if status == "failed" && zero.elapsed() > DEADLINE_MIN {
                return Ok(Some(pair.source.process));
            }
            return Err(format!("the next migration {status}: {error}"));
        }
        if plan.verify && report["memory_equal"] != true {
            return Err(format!("after the next migration memory differs: {report}"));
        }
        pair.only(Side::Destination)?;
        check_all(&mut pair.destination.process)?;
        if let Some(ms) = report["total_ms"].as_f64().filter(|_| !plan.verify) {
            self.clean = Duration::from_secs_f64(ms / 1e3);
        }
        self.holder = Some(pair.destination.process);
        Ok(None)
    }

    /// Checks that a source whose destination died with the commit stays stopped whatever is asked
    /// and whoever answers.
    fn stays_undecided(&mut self, pair: &mut Pair, proxy: &Proxy) -> Result<(), String> {
        let mut refusals = vec![refusal(pair)?];
        let mut another = self.receiver()?;
        proxy.retarget(another.port()?);
        refusals.push(refusal(pair)?);
        for words in &refusals {
            self.log.note(format!("not resolved: {words}"));
        }
        let state = pair.source.process.run_state()?;
        if state != "finish-migrate" {
            return Err(format!("an undecided source is {state} after {refusals:?}"));
        }
        pair.stands_still(Side::Source)
    }
}

/// Asks an undecided source to settle what can't be settled.
fn refusal(pair: &mut Pair) -> Result<String, String> {
    match pair.source.process.ask("x-resolve") {
        Ok(value) => match (value["status"].as_str(), value["error-desc"].as_str()) {
            (Some("x-undecided"), Some(words)) if words.len() > 10 => Ok(words.to_owned()),
            _ => Err(format!("resolved without the destination: {value}")),
        },
        Err(trouble) => Err(format!("x-resolve: {trouble}")),
    }
}

fn migrate(source: &mut Process, port: u16, plan: &Plan) -> Result<(), ClientError> {
    let parameters = json!({
        "multifd-channels": plan.channels,
        "max-bandwidth": plan.bandwidth,
        "x-verify": plan.verify,
    });
    source.execute("migrate-set-parameters", &parameters)?;
    source.execute("migrate", &json!({ "uri": format!("tcp:127.0.0.1:{port}") }))?;
    Ok(())
}

/// The destination is gone for good, so the guest is taken back by its operator's word, as whole
/// as it was; but not before that was given.
fn take_back(source: &mut Process, paused: bool) -> Result<(), String> {
    for (more, code, words) in [
        (&[][..], 4, "still undecided"),
        (&["--run-here"], 2, "say --confirmed"),
        (&["--run-here", "--confirmed"], 0, "the guest runs here again"),
    ] {
        let state = source.run_state()?;
        let output = Command::new(env!("CARGO_BIN_EXE_martlet"))
            .args(["resolve", "--control"])
            .arg(source.control())
            .args(more)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("resolve: {e}"))?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        if output.status.code() != Some(code) || !said.contains(words) || state != "finish-migrate"
        {
            return Err(format!("{state}, and resolve {more:?}: {}, {said}", output.status));
        }
    }
    if paused {
        source.ask("cont").map_err(|e| format!("cont: {e}"))?;
    }
    check_all(source)
}

/// Waits until the guest has checked all of its memory once more.
fn check_all(process: &mut Process) -> Result<(), String> {
    let lost = |guest: &Guest| guest.wrong > 0 || guest.clock_steps_back > 0;
    let missing = format!("LOST: there is no guest at {}", process.name);
    let Some(start) = process.guest()? else { return Err(missing) };
    // Its vCPUs may check different parts at different speeds.
    let enough = start.verified + 2 * start.filled_pages;
    let deadline = Instant::now() + CHECK_MAX;
    loop {
        let Some(now) = process.guest()? else { return Err(missing) };
        if lost(&now) {
            return Err(format!("LOST: the guest at {} says {now:?}", process.name));
        }
        if now.verified >= enough {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("the guest at {} checks nothing: {now:?}", process.name));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

fn alive(watched: Watched) -> Option<Process> {
    if watched.is_dead() { None } else { Some(watched.process) }
}
