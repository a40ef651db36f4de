//! What the vCPUs of a KVM VM share: memory slots, interrupt controllers, timer, clock.

use super::kvm;
use super::msrs::{self, MSR_KVM_WALL_CLOCK_NEW};
use super::saved::{
    SavedClock, SavedHost, SavedIoapic, SavedNumbered, SavedPit, SavedVm, decode, encode,
};
use super::tsc::{self, Moment};
use super::vcpu::VcpuCommon;
use super::warm::WarmUp;
use crate::Accel;
use crate::clock;
use crate::vcpu::backend::{BackendError, VmBackend};
use crate::vcpu::lock;
use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    kvm_clock_data, kvm_irqchip, kvm_pic_state, kvm_pit_state2,
};
use kvm_ioctls::{VcpuFd, VmFd};
use martlet_engine::LoadFor;
use martlet_kvm_dirty::{KvmLog, KvmRing, KvmRings, KvmSlots};
use martlet_ram::{DirtySource, GuestRam, TrackError};
use martlet_units::{ClockOffset, Gpa, Instant};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The VM and the memory that its slots point to.
pub(crate) struct KvmCore {
    pub(super) fd: VmFd,
    pub(super) slots: Arc<KvmSlots>,
}

impl KvmCore {
    /// Gives the VM its memory, one slot a region, of the region's number.
    #[expect(unsafe_code, reason = "the slots point to the memory, which is kept")]
    pub(super) fn new(fd: VmFd, ram: Arc<GuestRam>) -> io::Result<KvmCore> {
        let numbers: Vec<u32> = (0..).take(ram.regions().len()).collect();
        // SAFETY: each vCPU holds the memory, too.
        let slots = unsafe { KvmSlots::new(&fd, ram, &numbers) }?;
        Ok(KvmCore { fd, slots: Arc::new(slots) })
    }
}

/// The modes in which a channel of the interval timer repeats (Intel 8254).
const PIT_RATE: u8 = 2;
const PIT_SQUARE_WAVE: u8 = 3;

/// `struct pvclock_wall_clock`.
const WALL_CLOCK_BYTES: usize = 12;

/// A reading of kvmclock that takes longer may be off by more than a clock should.
const CLOCK_READING: Duration = Duration::from_micros(20);
/// Then it is read again, up to this often.
const CLOCK_READINGS_MAX: u32 = 3;

/// kvmclock and the host's clocks at one moment.
struct ClockReading {
    clock_ns: u64,
    host_tsc: Option<u64>,
    at: Instant,
    /// `at` may be off by half of this.
    took: Duration,
}

impl ClockReading {
    fn moment(&self) -> Option<Moment> {
        self.host_tsc.map(|host_tsc| Moment { host_tsc, at: self.at })
    }
}

/// How this VM's dirty pages are found; fixed when it is made.
pub(super) enum Tracker {
    Log,
    Ring(Arc<KvmRings>),
}

pub(super) struct KvmVm {
    pub(super) core: Arc<KvmCore>,
    /// The first vCPU, for what is done by a vCPU for all; while none runs.
    pub(super) first: Arc<VcpuFd>,
    /// Behind one more slot of the VM, while there is one.
    pub(super) _warm_up: Option<Arc<WarmUp>>,
    pub(super) common: Arc<VcpuCommon>,
    pub(super) host: SavedHost,
    pub(super) tracker: Tracker,
    /// What was loaded last: a rehearsal spares the last load what is still the same and what
    /// nothing changes before the guest runs.
    pub(super) loaded: Mutex<Option<SavedVm>>,
    /// The timer of a guest that came and has not run here: it counts from when it is loaded.
    pub(super) held: Mutex<Option<SavedPit>>,
}

impl KvmVm {
    fn get_chip(&self, id: u32) -> Result<kvm_irqchip, BackendError> {
        let mut chip = kvm_irqchip { chip_id: id, ..Default::default() };
        kvm("KVM_GET_IRQCHIP", self.core.fd.get_irqchip(&mut chip))?;
        Ok(chip)
    }

    /// Reads kvmclock and when that was.
    fn get_clock(&self) -> Result<ClockReading, BackendError> {
        let mut best = self.get_clock_once()?;
        for _ in 1..CLOCK_READINGS_MAX {
            if best.took <= CLOCK_READING {
                break;
            }
            // The thread lost its processor in between.
            let next = self.get_clock_once()?;
            if next.took < best.took {
                best = next;
            }
        }
        Ok(best)
    }

    fn get_clock_once(&self) -> Result<ClockReading, BackendError> {
        let before = clock::now();
        let data = kvm("KVM_GET_CLOCK", self.core.fd.get_clock())?;
        let took = clock::now().since(before);
        let is_known = data.flags & KVM_CLOCK_HOST_TSC != 0 && !self.common.tsc_is_scaled;
        let host_tsc = is_known.then_some(data.host_tsc);
        Ok(ClockReading { clock_ns: data.clock, host_tsc, at: before.after(took / 2), took })
    }

    fn load_all(&self, state: &[u8], what_for: LoadFor) -> Result<(), BackendError> {
        let saved: SavedVm = decode(state).map_err(BackendError::state)?;
        let mut last = lock(&self.loaded);
        // Taken out: after an error nothing is known.
        let before = last.take();
        self.load_chips(&saved, before.as_ref())?;
        if let LoadFor::Start { source_clock } = what_for {
            self.set_clock(&saved.clock, source_clock)?;
            *lock(&self.held) = Some(saved.pit.clone());
        }
        *last = Some(saved);
        Ok(())
    }

    fn load_chips(&self, saved: &SavedVm, before: Option<&SavedVm>) -> Result<(), BackendError> {
        let set_chip = |chip| kvm("KVM_SET_IRQCHIP", self.core.fd.set_irqchip(&chip));
        set_chip(pic_chip(KVM_IRQCHIP_PIC_MASTER, saved.pic_master.clone().into()))?;
        set_chip(ioapic_chip(&saved.ioapic))?;
        if before.map(|vm| &vm.pic_slave) != Some(&saved.pic_slave) {
            set_chip(pic_chip(KVM_IRQCHIP_PIC_SLAVE, saved.pic_slave.clone().into()))?;
        }
        Ok(())
    }

    fn set_pit(&self, saved: &SavedPit) -> Result<(), BackendError> {
        let pit = kvm_pit_state2 {
            channels: saved.channels.clone().map(Into::into),
            flags: saved.flags,
            ..Default::default()
        };
        kvm("KVM_SET_PIT2", self.core.fd.set_pit2(&pit))
    }

    /// Forgets ticks that the timer of a guest that was here gathered while the guest stood: KVM
    /// counts those that are not served yet, without a bound, and would give it all of them at once
    /// (arch/x86/kvm/i8254.c, pit_timer_fn). Loading a timer anew does it, and begins a period.
    fn drop_ticks(&self) -> Result<(), BackendError> {
        let pit = kvm("KVM_GET_PIT2", self.core.fd.get_pit2())?;
        // One that does not repeat has one tick to give, which is due.
        let is_periodic = matches!(pit.channels[0].mode, PIT_RATE | PIT_SQUARE_WAVE);
        if is_periodic { kvm("KVM_SET_PIT2", self.core.fd.set_pit2(&pit)) } else { Ok(()) }
    }

    /// Tells KVM where the guest wanted the wall clock written, which it can ask for. KVM writes the
    /// time there once more (arch/x86/kvm/x86.c, kvm_write_wall_clock), where the guest may have
    /// something else by now: it is put back. While no vCPU runs and no device writes.
    fn restore_wall_clock(&self) {
        let at = self.common.wall_clock.swap(0, Ordering::Relaxed);
        let mut before = [0; WALL_CLOCK_BYTES];
        if at == 0 || !self.common.memory.read(Gpa(at), &mut before) {
            return;
        }
        let order = SavedNumbered { index: MSR_KVM_WALL_CLOCK_NEW, value: at };
        if let Err(error) = msrs::write(&self.first, &[order]) {
            tracing::debug!(%error, "the guest can't ask for where its wall clock is");
        }
        if !self.common.memory.write(Gpa(at), &before) {
            tracing::error!(at = format_args!("{at:#x}"), "guest memory was lost");
        }
    }

    /// kvmclock goes on by the time that the guest stood, and so will the TSCs.
    fn set_clock(
        &self,
        saved: &SavedClock,
        source: Option<ClockOffset>,
    ) -> Result<(), BackendError> {
        let here = self.get_clock()?.moment();
        let saved_at = saved.monotonic_ns.map(Instant);
        let then = saved.host_tsc.zip(saved_at).map(|(host_tsc, at)| Moment { host_tsc, at });
        self.common.tsc.plan(then, here, source, self.common.tsc_khz)?;
        let stood = tsc::stood(saved_at, source, clock::now())?;
        let clock = saved.clock_ns.wrapping_add(u64::try_from(stood.as_nanos()).unwrap_or(0));
        let data = kvm_clock_data { clock, ..Default::default() };
        kvm("KVM_SET_CLOCK", self.core.fd.set_clock(&data))
    }
}

impl VmBackend for KvmVm {
    fn accel(&self) -> Accel {
        Accel::Kvm
    }

    fn arm(&self) {
        // Ordered before the loads that follow by the orders to the vCPUs.
        self.common.is_armed.store(true, Ordering::Relaxed);
    }

    fn tracking_name(&self) -> &'static str {
        match self.tracker {
            Tracker::Log => "KVM dirty log",
            Tracker::Ring(_) => "KVM dirty ring",
        }
    }

    fn description(&self) -> Vec<u8> {
        encode(&self.host)
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        let (clock, realtime_ns) = (self.get_clock()?, clock::realtime_ns());
        let pit = match &*lock(&self.held) {
            Some(pit) => pit.clone(),
            None => pit(&kvm("KVM_GET_PIT2", self.core.fd.get_pit2())?),
        };
        let saved = SavedVm {
            pic_master: pic(&self.get_chip(KVM_IRQCHIP_PIC_MASTER)?).into(),
            pic_slave: pic(&self.get_chip(KVM_IRQCHIP_PIC_SLAVE)?).into(),
            ioapic: ioapic(&self.get_chip(KVM_IRQCHIP_IOAPIC)?),
            pit,
            clock: SavedClock {
                clock_ns: clock.clock_ns,
                realtime_ns,
                host_tsc: clock.host_tsc,
                monotonic_ns: Some(clock.at.0),
            },
        };
        Ok(encode(&saved))
    }

    fn begin_load(&self) {
        self.common.vm_loads.begin();
    }

    fn load(&self, state: &[u8], what_for: LoadFor) -> Result<(), BackendError> {
        self.common.vm_loads.during(|| self.load_all(state, what_for))
    }

    fn begin_run(&self) {
        // From here on the guest changes what was loaded.
        *lock(&self.loaded) = None;
        self.restore_wall_clock();
        let set_going = match lock(&self.held).take() {
            Some(pit) => self.set_pit(&pit),
            None => self.drop_ticks(),
        };
        // KVM takes any state of a timer that it has (arch/x86/kvm/x86.c, kvm_vm_ioctl_set_pit2).
        if let Err(error) = set_going {
            tracing::error!(%error, "the guest's interval timer stands still");
        }
    }

    fn set_irq(&self, line: u32, is_high: bool) {
        if let Err(error) = self.core.fd.set_irq_line(line, is_high) {
            tracing::warn!(line, %error, "KVM_IRQ_LINE failed");
        }
    }

    fn track(&self) -> Result<Box<dyn DirtySource>, TrackError> {
        Ok(match &self.tracker {
            Tracker::Log => Box::new(KvmLog::start(&self.core.slots)?),
            Tracker::Ring(rings) => Box::new(KvmRing::start(rings)?),
        })
    }

    fn has_gigabyte_pages(&self) -> bool {
        super::cpuid::has_gigabyte_pages(&self.host.cpuid)
    }

    fn tsc_khz(&self) -> u32 {
        self.host.tsc_khz
    }

    fn guest_base(&self) -> u64 {
        0
    }
}

/// The unions of `struct kvm_irqchip`: which member is meant follows from the number of the chip.
#[allow(unsafe_code)]
// UNSAFETY: reading a member of a C union whose members are all plain numbers.
mod chips {
    use super::{SavedIoapic, kvm_irqchip, kvm_pic_state};

    pub(super) fn pic(chip: &kvm_irqchip) -> kvm_pic_state {
        // SAFETY: all bit patterns of the union are valid for this member.
        unsafe { chip.chip.pic }
    }

    pub(super) fn ioapic(chip: &kvm_irqchip) -> SavedIoapic {
        // SAFETY: all bit patterns of the union are valid for this member.
        let ioapic = unsafe { chip.chip.ioapic };
        SavedIoapic {
            base_address: ioapic.base_address,
            ioregsel: ioapic.ioregsel,
            id: ioapic.id,
            irr: ioapic.irr,
            // SAFETY: an entry's other member is made of the same 64 bits.
            redirection: ioapic.redirtbl.map(|entry| unsafe { entry.bits }),
        }
    }
}

use chips::{ioapic, pic};

fn pit(state: &kvm_pit_state2) -> SavedPit {
    SavedPit { channels: state.channels.map(Into::into), flags: state.flags }
}

fn pic_chip(id: u32, pic: kvm_pic_state) -> kvm_irqchip {
    let mut chip = kvm_irqchip { chip_id: id, ..Default::default() };
    chip.chip.pic = pic;
    chip
}

fn ioapic_chip(saved: &SavedIoapic) -> kvm_irqchip {
    let mut ioapic = kvm_bindings::kvm_ioapic_state {
        base_address: saved.base_address,
        ioregsel: saved.ioregsel,
        id: saved.id,
        irr: saved.irr,
        ..Default::default()
    };
    for (entry, bits) in ioapic.redirtbl.iter_mut().zip(saved.redirection) {
        entry.bits = bits;
    }
    let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
    chip.chip.ioapic = ioapic;
    chip
}
