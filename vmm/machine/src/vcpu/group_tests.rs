//! All vCPUs of a machine, without a hypervisor.

use super::super::backend::{Exit, Kicker, Start};
use super::super::thread::REHEARSAL_MAX;
use super::*;
use crate::SerialOut;
use crate::devices::Endpoint;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

struct Nobody;

impl Kicker for Nobody {
    fn kick(&self) {}
    fn clear(&self) {}
    fn detach(&self) {}
}

/// What the vCPUs of a test note together.
#[derive(Default)]
struct Notes {
    /// How often one left.
    left: AtomicU32,
    /// How often one had all written that a save writes.
    settled: AtomicU32,
    /// How often one ran.
    ran: AtomicU32,
    /// How often one ran that had left when others had not yet, though it need not.
    ran_too_early: AtomicU32,
}

/// Takes its time to leave, or panics at whatever it is told to do.
struct Fake {
    leaves_after: Option<Duration>,
    vcpus: u32,
    /// How often it left, and when the last time.
    left: (u32, Instant),
    notes: Arc<Notes>,
}

impl Fake {
    fn leaves_after(&self) -> Duration {
        self.leaves_after.expect("a test wants this panic")
    }
}

impl VcpuBackend for Fake {
    fn attach(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::new(Nobody)
    }

    fn set_start(&mut self, _: &Start) -> Result<(), BackendError> {
        Ok(())
    }

    fn run(&mut self) -> Result<Exit<'_>, BackendError> {
        let _ = self.leaves_after();
        let (left, when) = self.left;
        let others_are_in = self.notes.left.load(Ordering::SeqCst) < left * self.vcpus;
        if others_are_in && when.elapsed() < REHEARSAL_MAX {
            self.notes.ran_too_early.fetch_add(1, Ordering::SeqCst);
        }
        self.notes.ran.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
        Ok(Exit::Interrupted)
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        std::thread::sleep(self.leaves_after());
        self.left = (self.left.0 + 1, Instant::now());
        self.notes.left.fetch_add(1, Ordering::SeqCst);
        Ok(Exit::Interrupted)
    }

    fn settle(&mut self) -> Result<(), BackendError> {
        std::thread::sleep(self.leaves_after());
        self.notes.settled.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        let _ = self.leaves_after();
        Ok(self.notes.left.load(Ordering::SeqCst).to_le_bytes().to_vec())
    }

    fn load(&mut self, _: &[u8], _: LoadFor) -> Result<(), BackendError> {
        let _ = self.leaves_after();
        Ok(())
    }

    fn enter_and_leave(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Starts vCPUs that take these times to leave.
fn group(leave_after: &[Option<Duration>]) -> (Group, Arc<Notes>) {
    let notes = Arc::new(Notes::default());
    let vcpus = leave_after.iter().map(|time| -> Box<dyn VcpuBackend> {
        Box::new(Fake {
            leaves_after: *time,
            vcpus: u32::try_from(leave_after.len()).unwrap(),
            left: (0, Instant::now()),
            notes: Arc::clone(&notes),
        })
    });
    let bus = Arc::new(Bus::new(Endpoint::open(&SerialOut::None).unwrap()));
    (Group::start(vcpus.collect(), bus, |_, _| Ok(())).unwrap(), notes)
}

const TIMES: [Option<Duration>; 3] =
    [Some(Duration::ZERO), Some(Duration::from_millis(5)), Some(Duration::from_millis(10))];

/// Whoever waits for a vCPU would wait for ever, with the machine's lock.
#[test]
fn a_panic_on_a_vcpus_thread_ends_the_guest_and_holds_up_nobody() {
    let (group, _) = group(&[None]);
    group.begin_load(vec![Vec::new()], LoadFor::Rehearsal);
    let (_, error) = group.wait_loaded().unwrap_err();
    assert!(error.to_string().contains("defect of martlet"), "{error}");
    assert_eq!(group.ended_because(), None, "no guest is there yet");
    group.run(RunPermit::for_new_guest());
    while group.ended_because().is_none() {
        std::thread::yield_now();
    }
    let Some(EndCause::Crash(reason)) = group.ended_because() else { panic!("it ran on") };
    assert!(reason.contains("vCPU 0: a defect of martlet"), "{reason}");
    group.begin_save(None);
    assert!(group.wait_out().is_some(), "the permit is still there");
    group.wait_saved().unwrap_err();
    group.end();
}

/// A vCPU that still runs may send an interrupt to one that has been saved.
#[test]
fn no_vcpu_is_saved_before_all_are_out() {
    let (group, notes) = group(&TIMES);
    for round in 1..=5u32 {
        group.begin_save(None);
        group.wait_out();
        assert_eq!(notes.settled.load(Ordering::SeqCst), 3 * round, "memory is final");
        let saved = group.wait_saved().unwrap();
        assert_eq!(saved, vec![(3 * round).to_le_bytes().to_vec(); 3]);
    }
}

/// One that ran on would keep the others from their processors. Found by guests of 64 vCPUs on two
/// processors, which were never moved.
#[test]
fn no_vcpu_runs_on_in_a_rehearsal_before_all_are_out() {
    let (group, notes) = group(&TIMES);
    group.run(RunPermit::for_new_guest());
    for _ in 0..5 {
        group.begin_rehearsal();
        group.wait_saved().unwrap();
        group.end_rehearsal();
    }
    assert_eq!(notes.ran_too_early.load(Ordering::SeqCst), 0);
    group.begin_leave();
    assert!(group.wait_out().is_some(), "it could run all the time");
}

#[test]
fn a_rehearsal_that_nobody_ends_ends_by_itself() {
    let (group, notes) = group(&TIMES);
    group.run(RunPermit::for_new_guest());
    group.begin_rehearsal();
    group.wait_saved().unwrap();
    let ran = notes.ran.load(Ordering::SeqCst);
    while notes.ran.load(Ordering::SeqCst) < ran + 10 {
        std::thread::yield_now();
    }
}
