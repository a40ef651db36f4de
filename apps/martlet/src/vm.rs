//! Where the control socket's idea of a guest meets the machine and the engine.

use crate::cli::{AccelArg, ReceiveArgs, RunArgs, SerialArg, TrackingArg};
use crate::failure::Failure;
use crate::guest::{Guest, Listen};
use martlet_guest_program::ProgramParams;
use martlet_machine::{Accel, KernelConfig, SerialOut, Tracking};
use std::fs::OpenOptions;
use std::sync::Arc;

/// Whether KVM can be used here; `Err` says why not, in a few words.
pub(crate) fn kvm_usable() -> Result<(), String> {
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("/dev/kvm can't be used ({error})")),
    }
}

pub(crate) struct RunConfig {}

/// What `run` is asked to build, checked as far as that goes without building it.
pub(crate) fn run_config(args: &RunArgs) -> Result<RunConfig, Failure> {
    let _ = (
        args,
        AccelArg::Auto,
        SerialArg::Stdio,
        TrackingArg::Auto,
        Accel::Kvm,
        SerialOut::Stdio,
        Tracking::Auto,
    );
    let _: Option<KernelConfig> = None;
    if let Some(text) = &args.program {
        let _: ProgramParams =
            text.parse().map_err(|e| Failure::Usage(format!("--program {text}: {e}")))?;
    }
    Ok(RunConfig {})
}

pub(crate) fn boot(config: &RunConfig, paused: bool) -> Result<Arc<dyn Guest>, Failure> {
    let _ = (config, paused);
    Err(Failure::Failed("the machine is not there yet".to_owned()))
}

pub(crate) fn listener(args: &ReceiveArgs) -> Result<Arc<dyn Listen>, Failure> {
    let _ = args;
    Err(Failure::Failed("the machine is not there yet".to_owned()))
}
