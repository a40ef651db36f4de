//! All vCPUs of a machine, without a hypervisor.

use super::super::backend::{Exit, Kicker, Start};
use super::*;
use crate::SerialOut;
use crate::devices::Endpoint;
use std::sync::atomic::AtomicU32;

struct Nobody;

impl Kicker for Nobody {
    fn kick(&self) {}
    fn clear(&self) {}
    fn detach(&self) {}
}

/// Takes its time to leave, and notes how many had left when it is saved.
struct Slow {
    leaves_after: Duration,
    left: Arc<AtomicU32>,
}

impl VcpuBackend for Slow {
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
        Ok(Exit::Interrupted)
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        std::thread::sleep(self.leaves_after);
        self.left.fetch_add(1, Ordering::SeqCst);
        Ok(Exit::Interrupted)
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        Ok(self.left.load(Ordering::SeqCst).to_le_bytes().to_vec())
    }

    fn load(&mut self, _: &[u8], _: LoadFor) -> Result<(), BackendError> {
        Ok(())
    }

    fn enter_and_leave(&mut self) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }
}

/// Panics at whatever it is told to do.
struct Broken;

impl VcpuBackend for Broken {
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
        panic!("while it ran")
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        panic!("while it left")
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        panic!("while it was saved")
    }

    fn load(&mut self, _: &[u8], _: LoadFor) -> Result<(), BackendError> {
        panic!("while it was loaded")
    }

    fn enter_and_leave(&mut self) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }
}

/// Whoever waits for a vCPU would wait for ever, with the machine's lock.
#[test]
fn a_panic_on_a_vcpus_thread_ends_the_guest_and_holds_up_nobody() {
    let bus = Arc::new(Bus::new(Endpoint::open(&SerialOut::None).unwrap()));
    let group = Group::start(vec![Box::new(Broken)], bus, |_, _| Ok(())).unwrap();
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
    group.begin_save();
    assert!(group.wait_out().is_some(), "the permit is still there");
    group.wait_saved().unwrap_err();
    group.end();
}

/// A vCPU that still runs may send an interrupt to one that has been saved.
#[test]
fn no_vcpu_is_saved_before_all_are_out() {
    let left = Arc::new(AtomicU32::new(0));
    let slow = |number: u64| -> Box<dyn VcpuBackend> {
        let leaves_after = Duration::from_millis(20 * number);
        Box::new(Slow { leaves_after, left: Arc::clone(&left) })
    };
    let bus = Arc::new(Bus::new(Endpoint::open(&SerialOut::None).unwrap()));
    let group = Group::start((0..3).map(slow).collect(), bus, |_, _| Ok(())).unwrap();
    for round in 1..=5u32 {
        group.begin_save();
        group.wait_out();
        let saved = group.wait_saved().unwrap();
        assert_eq!(saved, vec![(3 * round).to_le_bytes().to_vec(); 3]);
    }
}
