//! What a rehearsal loads of a vCPU: whatever stays as it is loaded until the guest starts.
//!
//! The rest would go on by itself while the guest still runs at the source, or would act when the
//! vCPU runs the VMM's own code: the local APIC's timer, the TSC's deadline, and a guest's own guest.

use super::saved::SavedVcpu;
use super::state::is_idle;

/// Offsets of the local APIC's initial and current count (Intel SDM volume 3, table 11-1).
const APIC_INITIAL_COUNT: usize = 0x380;
const APIC_CURRENT_COUNT: usize = 0x390;

/// Takes out of a state what only the start may load.
pub(super) fn hold_back(mut saved: SavedVcpu) -> SavedVcpu {
    for register in [APIC_INITIAL_COUNT, APIC_CURRENT_COUNT] {
        // A state of another length is refused where it is loaded.
        if let Some(count) = saved.lapic.get_mut(register..register + 4) {
            count.fill(0);
        }
    }
    saved.tsc_deadline = 0;
    saved.nested = saved.nested.filter(|nested| is_idle(nested));
    saved
}

#[cfg(test)]
mod tests {
    use super::super::saved::SavedNumbered;
    use super::*;

    fn state(nested: Vec<u8>) -> SavedVcpu {
        SavedVcpu {
            regs: Default::default(),
            sregs: Default::default(),
            pdptrs: None,
            xcrs: Vec::new(),
            xsave: Vec::new(),
            debug: Default::default(),
            lapic: vec![0xff; 1024],
            msrs: vec![SavedNumbered { index: 0xc000_0080, value: 1 }],
            tsc: 1,
            tsc_offset: None,
            tsc_deadline: 5,
            mp_state: 0,
            events: Default::default(),
            nested: Some(nested),
            realtime_ns: 1,
            monotonic_ns: None,
        }
    }

    #[test]
    fn no_timer_runs_in_a_rehearsal() {
        let before = state(vec![0; 16]);
        let held = hold_back(before.clone());
        assert_eq!(held.tsc_deadline, 0);
        let changed: Vec<_> = (0..1024).filter(|at| held.lapic[*at] != before.lapic[*at]).collect();
        assert_eq!(changed, [0x380, 0x381, 0x382, 0x383, 0x390, 0x391, 0x392, 0x393]);
        // A hostile state's APIC may be shorter.
        assert_eq!(hold_back(SavedVcpu { lapic: vec![1; 0x382], ..before }).lapic, [1; 0x382]);
    }

    #[test]
    fn no_nested_guest_is_loaded_in_a_rehearsal() {
        // AMD's format (1) with the global interrupt flag alone, then with a guest inside.
        let idle = vec![0, 1, 1, 0, 0, 0, 0, 0];
        let active = vec![1, 1, 1, 0, 0, 0, 0, 0];
        assert_eq!(hold_back(state(idle.clone())).nested, Some(idle));
        assert_eq!(hold_back(state(active)).nested, None);
    }
}
