use super::*;
use crate::tests::Waited;
use crate::{Factory, FactoryConfig};
use std::task::Waker;

/// A generator whose numbers are the same in each run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % limit
    }

    /// Cuts, flips, or overwrites.
    fn damage(&mut self, good: &[u8]) -> Vec<u8> {
        let mut bytes = good.to_vec();
        match self.below(4) {
            0 => bytes.truncate(self.below(good.len())),
            1 => {
                let at = self.below(bytes.len());
                bytes[at..].fill(u8::try_from(self.below(256)).unwrap());
            }
            _ => {
                for _ in 0..=self.below(4) {
                    let at = self.below(bytes.len());
                    bytes[at] ^= 1 << self.below(8);
                }
            }
        }
        bytes
    }
}

#[test]
fn hostile_states_are_refused_or_loaded_but_never_break_the_machine() {
    if !has_kvm() {
        return;
    }
    let source = running(&program("fill=1M,ws=1M,rate=1/tick,tick=100us", 16, 2));
    wait_ready(&source);
    let good = source.rehearse().unwrap().unwrap().state;
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, &source);
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut refused = 0;
    for number in 0..600 {
        let what_for = if number % 2 == 0 { LoadFor::Rehearsal } else { START_HERE };
        refused += u32::from(target.load_state(&chance.damage(&good), what_for).is_err());
    }
    eprintln!("{refused} of 600 damaged states were refused");
    assert!(refused > 100);
    for nothing in [&[][..], &[0xff; 64], &[0x9f; 1000], &[0xbf; 1000]] {
        let error = target.load_state(nothing, LoadFor::Rehearsal).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot load the machine's state: ") && !error.contains('\n'),
            "{error}"
        );
    }
    target.load_state(&good, LoadFor::Rehearsal).expect("the machine still takes a good state");
}

#[test]
fn hostile_states_of_cards_are_refused_or_loaded() {
    if !has_kvm() {
        return;
    }
    let config = program("fill=1M,ws=1M,rate=1/tick,tick=100us,frames=4/ms", 16, 1);
    let source = nics::with_cards(&config, &nics::loopbacks(2, 2));
    source.pause_by_owner().unwrap();
    source.begin_suspend(Waker::noop());
    source.wait_suspended().unwrap();
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    let good = source.take_state().unwrap();
    let cards = nics::as_devices(&nics::loopbacks(2, 2));
    let factory = Factory::with_devices(FactoryConfig::default(), cards).unwrap();
    let target = destination(&factory, &source);
    // The cards are at the end.
    let without = crate::saved::SavedMachine::decode(&good).unwrap();
    let cards_at = crate::saved::SavedMachine { nics: None, ..without }.encode().len();
    let mut chance = Chance(0x1234_5678_9abc_def1);
    let mut refused = 0;
    for _ in 0..300 {
        let damaged = [&good[..cards_at], &chance.damage(&good[cards_at..])].concat();
        refused += u32::from(target.load_state(&damaged, LoadFor::Rehearsal).is_err());
    }
    eprintln!("{refused} of 300 damaged states were refused");
    assert!(refused > 100);
    target.load_state(&good, LoadFor::Rehearsal).expect("the cards still take a good state");
    source.resume(Some(paused));
}

#[test]
fn hostile_descriptions_are_refused_or_built() {
    if !has_kvm() {
        return;
    }
    let source = Machine::new(&program("fill=1M,ws=1M,rate=1/tick,tick=100us", 16, 1)).unwrap();
    let good = source.machine_description();
    let layout = source.memory.ram().layout();
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let mut chance = Chance(0x2545_f491_4f6c_dd1d);
    let mut refused = 0;
    for _ in 0..100 {
        refused += u32::from(factory.build(&request(&chance.damage(&good), &layout)).is_err());
    }
    eprintln!("{refused} of 100 damaged descriptions were refused");
    assert!(refused > 20);
    assert!(factory.build(&request(&good, &layout)).is_ok());
}

#[test]
fn other_machines_are_refused_by_name() {
    if !has_kvm() {
        return;
    }
    let source = Machine::new(&program("fill=1M,ws=1M,rate=1/tick,tick=100us", 16, 1)).unwrap();
    let description = source.machine_description();
    let other = Machine::new(&program("fill=1M,ws=1M,rate=1/tick,tick=100us", 32, 2)).unwrap();
    let error = |config: FactoryConfig, description: &[u8], layout: &[_]| {
        let factory = Factory::new(config).unwrap();
        factory.build(&request(description, layout)).err().expect("it is refused").to_string()
    };
    let layout = other.memory.ram().layout();
    assert_eq!(
        error(FactoryConfig::default(), &description, &layout),
        "cannot build the machine: the description's memory is not the migration's"
    );
    let threads = FactoryConfig { accel: Accel::Threads, ..FactoryConfig::default() };
    assert_eq!(
        error(threads, &description, &source.memory.ram().layout()),
        "cannot build the machine: the guest runs on kvm, this destination on threads"
    );
    // A state of two vCPUs for a machine of one.
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, &source);
    let two = other.rehearse().unwrap().unwrap().state;
    let error = target.load_state(&two, LoadFor::Rehearsal).unwrap_err().to_string();
    assert_eq!(error, "cannot load the machine's state: states of 2 vCPUs for 1");
}
