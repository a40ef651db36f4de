//! Making a KVM VM.

use super::cpuid;
use super::kvm;
use super::msrs::MsrTable;
use super::raw::XsaveSize;
use super::saved::{SavedHost, decode};
use super::tsc::TscPlan;
use super::vcpu::{KvmVcpu, VcpuCommon, VmLoads};
use super::vm::{KvmCore, KvmVm, Tracker};
use super::warm::{WarmUp, WarmVcpu};
use crate::Tracking;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{BackendError, Built, VcpuBackend, check_wanted};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_NESTED_STATE,
    KVM_CAP_PRE_FAULT_MEMORY, KVM_CAP_SREGS2, KVM_CAP_TSC_CONTROL, KVM_CAP_XSAVE2,
    KVM_PIT_SPEAKER_DUMMY, kvm_dirty_gfn, kvm_enable_cap, kvm_pit_config,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use martlet_kvm_dirty::KvmRings;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// Three pages below 4 GiB, in the hole, that Intel processors need for real mode (KVM_SET_TSS_ADDR)
/// and one for its page table.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;
/// KVM_MEM_MAX_NR_PAGES in virt/kvm/kvm_main.c.
const SLOT_PAGES_MAX: u64 = (1 << 31) - 1;
/// Pages that a vCPU may write between two harvests without leaving the guest. 16 bytes each.
const RING_ENTRIES: u32 = 8192;
/// How far apart the rates of two hosts' time stamp counters may be without scaling: what NTP
/// corrects in a guest without trouble, and what QEMU allows.
const TSC_TOLERANCE_PPM: u64 = 250;

/// What to make.
pub(crate) struct BuildOptions<'a> {
    pub(crate) vcpus: u16,
    pub(crate) tracking: Tracking,
    /// From the source's KVM; none for a new guest. At a destination the vCPUs will be warmed up.
    pub(crate) description: Option<&'a [u8]>,
    /// Asked between the steps.
    pub(crate) is_wanted: &'a dyn Fn() -> bool,
}

/// Whether there is a KVM that this process may use; the error says why not.
pub(crate) fn is_usable() -> Result<(), BackendError> {
    let kvm_fd = kvm("open /dev/kvm", Kvm::new())?;
    // The one number that a KVM has had since Linux 2.6.22 (api.rst, KVM_GET_API_VERSION);
    // whatever else lies at that path has another, or none.
    match kvm_fd.get_api_version() {
        KVM_API_VERSION => Ok(()),
        other => Err(BackendError::Unsupported {
            reason: format!("/dev/kvm is no KVM: its API version is {other}"),
        }),
    }
}

const KVM_API_VERSION: i32 = kvm_bindings::KVM_API_VERSION.cast_signed();

/// Makes the VM around `memory`.
#[expect(unsafe_code, reason = "the rings are those of the vCPUs that are made here")]
pub(crate) fn build(
    memory: &Arc<GuestMemory>,
    options: &BuildOptions<'_>,
) -> Result<Built, BackendError> {
    let kvm_fd = kvm("open /dev/kvm", Kvm::new())?;
    let described = options.description.map(decode::<SavedHost>).transpose();
    let described = described.map_err(|why| BackendError::state(format!("description: {why}")))?;
    let supported = cpuid::supported(&kvm_fd)?;
    if let Some(described) = &described {
        cpuid::check(&described.cpuid, &supported)?;
    }
    check_limits(&kvm_fd, memory, options.vcpus)?;

    let fd = kvm("KVM_CREATE_VM", kvm_fd.create_vm())?;
    let uses_ring = enable_tracking(&fd, options.tracking)?;
    add_chips(&fd)?;
    let core = KvmCore::new(fd, Arc::clone(memory.ram()))
        .map_err(BackendError::host("KVM_SET_USER_MEMORY_REGION"))?;
    let core = Arc::new(core);
    // The tables that KVM makes for a large memory take their time.
    check_wanted(options.is_wanted)?;

    let cpuid = described.as_ref().map_or(supported, |host| host.cpuid.clone());
    let fds = create_vcpus(&core.fd, &cpuid, options)?;
    let first = fds.first().ok_or_else(|| BackendError::state("a machine without vCPUs"))?;
    let wanted_khz = described.as_ref().map(|host| host.tsc_khz);
    let (tsc_khz, tsc_is_scaled) = set_tsc_rate(&core.fd, &fds, wanted_khz)?;
    let fd_has = |cap: u32| core.fd.check_extension_raw(cap.into()) > 0;
    let common = Arc::new(VcpuCommon {
        memory: Arc::clone(memory),
        msrs: MsrTable::learn(&kvm_fd, first)?,
        xsave: XsaveSize::from_capability(core.fd.check_extension_raw(KVM_CAP_XSAVE2.into())),
        has_sregs2: fd_has(KVM_CAP_SREGS2),
        tsc_khz,
        tsc_is_scaled,
        tsc: TscPlan::default(),
        vm_loads: VmLoads::default(),
        wall_clock: AtomicU64::new(0),
        is_armed: AtomicBool::new(false),
        has_nested_state: fd_has(KVM_CAP_NESTED_STATE),
        has_pre_fault: fd_has(KVM_CAP_PRE_FAULT_MEMORY),
    });
    let (tracker, shares) = if uses_ring {
        // SAFETY: the descriptors are those of the vCPUs.
        let (rings, shares) = unsafe { KvmRings::open(&core.slots, &fds, RING_ENTRIES) }
            .map_err(BackendError::host("map dirty rings"))?;
        (Tracker::Ring(rings), shares.into_iter().map(Some).collect())
    } else {
        (Tracker::Log, std::iter::repeat_with(|| None).take(fds.len()).collect::<Vec<_>>())
    };
    let warm_up = match described {
        Some(_) => Some(Arc::new(WarmUp::begin(&core.fd, memory.ram(), options.vcpus)?)),
        None => None,
    };
    let run_bytes = kvm("KVM_GET_VCPU_MMAP_SIZE", kvm_fd.get_vcpu_mmap_size())?;
    let fds: Vec<_> = fds.into_iter().map(Arc::new).collect();
    let first = Arc::clone(&fds[0]);
    let vcpus = (0..)
        .zip(fds.into_iter().zip(shares))
        .map(|(number, (fd, share))| {
            let warm = warm_up.as_ref().map(|warm_up| WarmVcpu::new(warm_up, number));
            let vcpu = KvmVcpu::new(fd, run_bytes, share, Arc::clone(&common), warm)?;
            Ok(Box::new(vcpu) as Box<dyn VcpuBackend>)
        })
        .collect::<Result<_, BackendError>>()?;
    let vm = KvmVm {
        core,
        first,
        _warm_up: warm_up,
        common,
        host: SavedHost { cpuid, tsc_khz },
        tracker,
        loaded: Mutex::new(None),
        held: Mutex::new(None),
    };
    Ok(Built { vm: Arc::new(vm), vcpus })
}

fn check_limits(kvm_fd: &Kvm, memory: &GuestMemory, vcpus: u16) -> Result<(), BackendError> {
    let unsupported = |reason| Err(BackendError::Unsupported { reason });
    let vcpus_max = kvm_fd.get_max_vcpus();
    if usize::from(vcpus) > vcpus_max {
        return unsupported(format!("{vcpus} vCPUs, KVM here has at most {vcpus_max}"));
    }
    let regions = memory.ram().regions();
    // One more for the warm-up.
    if regions.len() >= kvm_fd.get_nr_memslots() {
        return unsupported(format!("{} memory regions are too many for KVM", regions.len()));
    }
    match regions.iter().find(|region| region.pages() > SLOT_PAGES_MAX) {
        Some(region) => unsupported(format!("{} is too large for one KVM slot", region.range())),
        None => Ok(()),
    }
}

/// Chooses how dirty pages are found; before vCPUs exist. Returns whether by the ring.
fn enable_tracking(fd: &VmFd, tracking: Tracking) -> Result<bool, BackendError> {
    let unsupported = |reason: &str| Err(BackendError::Unsupported { reason: reason.into() });
    let enable = |cap: u32, value: u64| {
        let mut request = kvm_enable_cap { cap, ..Default::default() };
        request.args[0] = value;
        kvm("KVM_ENABLE_CAP of dirty tracking", fd.enable_cap(&request))
    };
    match tracking {
        Tracking::Ring => {
            let bytes_max = fd.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_ACQ_REL.into());
            let bytes = u64::from(RING_ENTRIES) * size_of::<kvm_dirty_gfn>() as u64;
            if u64::try_from(bytes_max).unwrap_or(0) < bytes {
                return unsupported("KVM here has no dirty ring");
            }
            enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)?;
            Ok(true)
        }
        Tracking::Log | Tracking::Auto => {
            if fd.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into()) & 1 == 0 {
                return unsupported("KVM here has no manual dirty log protection (Linux 5.1)");
            }
            Ok(false)
        }
    }
}

fn add_chips(fd: &VmFd) -> Result<(), BackendError> {
    kvm("KVM_SET_IDENTITY_MAP_ADDR", fd.set_identity_map_address(IDENTITY_MAP_ADDRESS))?;
    kvm("KVM_SET_TSS_ADDR", fd.set_tss_address(TSS_ADDRESS))?;
    kvm("KVM_CREATE_IRQCHIP", fd.create_irq_chip())?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    kvm("KVM_CREATE_PIT2", fd.create_pit2(pit))
}

fn create_vcpus(
    fd: &VmFd,
    entries: &[super::saved::SavedCpuid],
    options: &BuildOptions<'_>,
) -> Result<Vec<VcpuFd>, BackendError> {
    (0..options.vcpus)
        .map(|number| {
            check_wanted(options.is_wanted)?;
            let vcpu = kvm("KVM_CREATE_VCPU", fd.create_vcpu(u64::from(number)))?;
            let cpuid = cpuid::for_vcpu(entries, number, options.vcpus)?;
            kvm("KVM_SET_CPUID2", vcpu.set_cpuid2(&cpuid))?;
            Ok(vcpu)
        })
        .collect()
}

/// Makes the guest's time stamp counters count at the source's rate. Says at which they do, and
/// whether that is not the host's own.
fn set_tsc_rate(
    fd: &VmFd,
    vcpus: &[VcpuFd],
    wanted_khz: Option<u32>,
) -> Result<(u32, bool), BackendError> {
    let first = vcpus.first().ok_or_else(|| BackendError::state("a machine without vCPUs"))?;
    let own_khz = kvm("KVM_GET_TSC_KHZ", first.get_tsc_khz())?;
    let Some(wanted_khz) = wanted_khz else { return Ok((own_khz, false)) };
    let apart = u64::from(own_khz.abs_diff(wanted_khz)) * 1_000_000;
    if apart == 0 {
        return Ok((own_khz, false));
    }
    if wanted_khz != 0 && fd.check_extension_raw(KVM_CAP_TSC_CONTROL.into()) > 0 {
        for vcpu in vcpus {
            kvm("KVM_SET_TSC_KHZ", vcpu.set_tsc_khz(wanted_khz))?;
        }
        return Ok((wanted_khz, true));
    }
    if apart <= TSC_TOLERANCE_PPM * u64::from(own_khz) {
        return Ok((own_khz, false));
    }
    let reason = format!(
        "the guest's time stamp counter runs at {wanted_khz} kHz, this host's at {own_khz} kHz \
         and it can't scale"
    );
    Err(BackendError::Unsupported { reason })
}
