//! The built-in program.

use super::write;
use crate::MachineError;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{Level3Tables, Start, VmBackend};
use martlet_guest_program::{NicPlace, Plan, ProgramParams};

pub(super) fn prepare(
    params: &ProgramParams,
    vcpus: u16,
    memory: &GuestMemory,
    vm: &dyn VmBackend,
    tables: Level3Tables,
    nics: &[NicPlace],
) -> Result<Vec<Start>, MachineError> {
    let layout: Vec<_> = memory.guest().iter().map(|region| region.range()).collect();
    let plan = Plan::with_nics(&layout, vcpus, params, vm.tsc_khz(), nics)
        .map_err(|error| MachineError::Config { reason: error.to_string() })?;
    for (gpa, bytes) in plan.writes() {
        write(memory, gpa, bytes, "the built-in program")?;
    }
    let start = |vcpu| {
        let registers = plan.start(vcpu, vm.guest_base());
        Start::Level3 {
            rip: registers.rip,
            rsp: registers.rsp,
            rdi: registers.rdi,
            rsi: registers.rsi,
            tables,
        }
    };
    Ok((0..vcpus).map(start).collect())
}
