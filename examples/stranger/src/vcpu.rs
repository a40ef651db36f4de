//! The vCPU: its thread, and its state.
#![allow(unsafe_code)]
// UNSAFETY: another thread sets a flag in the memory that a vCPU shares with KVM.

use crate::guest::TICK_PORT;
use crate::{Fail, lock};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub(crate) struct Vcpu {
    fd: Mutex<VcpuFd>,
    /// While it is not 0, KVM_RUN completes what is pending and returns.
    immediate_exit: AtomicPtr<u8>,
    msrs: Vec<u32>,
    /// The number of the guest's last tick.
    tick: Mutex<u32>,
    thread: Mutex<Option<JoinHandle<Result<(), Fail>>>>,
}

impl Vcpu {
    pub(crate) fn new(kvm: &Kvm, vm: &VmFd) -> Result<Arc<Vcpu>, Fail> {
        extern "C" fn wake(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), wake)?;
        let mut fd = vm.create_vcpu(0)?;
        fd.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        // Some are listed and not given.
        let is_given = |index: &u32| get_msrs(&fd, &[*index]).is_ok();
        let msrs = kvm.get_msr_index_list()?.as_slice().iter().copied().filter(is_given).collect();
        let immediate_exit = AtomicPtr::new(&raw mut fd.get_kvm_run().immediate_exit);
        let (fd, tick, thread) = (Mutex::new(fd), Mutex::default(), Mutex::default());
        Ok(Arc::new(Vcpu { fd, immediate_exit, msrs, tick, thread }))
    }

    /// Where a guest of PVH begins: 32-bit code in flat segments, without paging.
    pub(crate) fn begin(&self, entry: u64) -> Result<(), Fail> {
        let fd = lock(&self.fd);
        let mut sregs = fd.get_sregs()?;
        let (limit, present, db, s, g) = (u32::MAX, 1, 1, 1, 1);
        let flat = kvm_segment { limit, present, db, s, g, ..Default::default() };
        sregs.cs = kvm_segment { selector: 8, type_: 11, ..flat };
        let data = kvm_segment { selector: 16, type_: 3, ..flat };
        (sregs.ds, sregs.es, sregs.ss, sregs.cr0) = (data, data, data, 1);
        fd.set_sregs(&sregs)?;
        Ok(fd.set_regs(&kvm_regs { rip: entry, rflags: 2, ..Default::default() })?)
    }

    pub(crate) fn run(self: &Arc<Self>) {
        self.set_immediate_exit(0);
        let vcpu = Arc::clone(self);
        *lock(&self.thread) = Some(thread::spawn(move || vcpu.serve()));
    }

    pub(crate) fn is_out(&self) -> bool {
        lock(&self.thread).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Tells it to leave the guest; waits for nothing.
    pub(crate) fn stop(&self) {
        self.set_immediate_exit(1);
        if let Some(thread) = &*lock(&self.thread) {
            let _ = thread.kill(SIGRTMIN());
        }
    }

    /// Waits until it is out.
    pub(crate) fn wait(&self) -> Result<(), Fail> {
        let thread = lock(&self.thread).take();
        thread.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err("a panic".into())))
    }

    /// Everything of it; only while it is out.
    pub(crate) fn save(&self) -> Result<Vec<u8>, Fail> {
        let fd = lock(&self.fd);
        let mut state = Vec::new();
        // What is pending becomes a part of this one, so it goes first.
        put(&mut state, &fd.get_mp_state()?);
        put(&mut state, &fd.get_sregs()?);
        put(&mut state, &fd.get_regs()?);
        put(&mut state, &fd.get_xcrs()?);
        put(&mut state, &fd.get_xsave()?);
        put(&mut state, &fd.get_vcpu_events()?);
        put(&mut state, &*lock(&self.tick));
        get_msrs(&fd, &self.msrs)?.as_slice().iter().for_each(|msr| put(&mut state, msr));
        Ok(state)
    }

    /// Loads what [`Vcpu::save`] gave. The bytes come from the peer: KVM checks what they mean.
    pub(crate) fn load(&self, mut state: &[u8]) -> Result<(), Fail> {
        let fd = lock(&self.fd);
        let state = &mut state;
        let mp_state = take(state)?;
        fd.set_sregs(&take(state)?)?;
        fd.set_regs(&take(state)?)?;
        fd.set_xcrs(&take(state)?)?;
        // SAFETY: no feature whose state is longer than this is switched on in this process.
        unsafe { fd.set_xsave(&take(state)?) }?;
        let events = take(state)?;
        *lock(&self.tick) = take(state)?;
        set_msrs(&fd, state)?;
        fd.set_mp_state(mp_state)?;
        Ok(fd.set_vcpu_events(&events)?)
    }

    fn set_immediate_exit(&self, value: u8) {
        // SAFETY: of the area that the vCPU shares with KVM, which lives as long as its descriptor.
        unsafe { AtomicU8::from_ptr(self.immediate_exit.load(Ordering::Relaxed)) }
            .store(value, Ordering::SeqCst);
    }

    /// Runs the guest until KVM_RUN is interrupted, which it is only when nothing is pending.
    fn serve(&self) -> Result<(), Fail> {
        let mut fd = lock(&self.fd);
        loop {
            match fd.run() {
                Ok(VcpuExit::IoOut(TICK_PORT, number)) => self.on_tick(number)?,
                Ok(exit) => return Err(format!("the guest has left by {exit:?}").into()),
                Err(error) if error.errno() == libc::EINTR => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn on_tick(&self, number: &[u8]) -> Result<(), Fail> {
        let mut tick = lock(&self.tick);
        if number != (*tick + 1).to_le_bytes() {
            return Err(format!("tick {number:?} follows tick {tick}").into());
        }
        *tick += 1;
        Ok(())
    }
}

/// Reads MSRs, all or none of them.
fn get_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Msrs, Fail> {
    let entry = |index: &u32| kvm_msr_entry { index: *index, ..Default::default() };
    let mut msrs = Msrs::from_entries(&indices.iter().map(entry).collect::<Vec<_>>())?;
    match fd.get_msrs(&mut msrs)? {
        all if all == indices.len() => Ok(msrs),
        some => Err(format!("MSR {:#x} can't be read", indices[some]).into()),
    }
}

/// Writes MSRs up to the end of the state. KVM gives some that it lets nobody write.
fn set_msrs(fd: &VcpuFd, state: &mut &[u8]) -> Result<(), Fail> {
    let mut entries: Vec<kvm_msr_entry> = Vec::new();
    while !state.is_empty() {
        entries.push(take(state)?);
    }
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let done = fd.set_msrs(&Msrs::from_entries(rest)?)?;
        rest = rest.get(done + 1..).unwrap_or_default();
    }
    Ok(())
}

fn put<T: IntoBytes + Immutable>(state: &mut Vec<u8>, part: &T) {
    state.extend_from_slice(part.as_bytes());
}

fn take<T: FromBytes>(state: &mut &[u8]) -> Result<T, Fail> {
    let (part, rest) = T::read_from_prefix(state).map_err(|_| "the state ends early")?;
    *state = rest;
    Ok(part)
}
