//! A vCPU and a VM as they travel: types of their own with numbered fields, so that a newer
//! martlet can add to them and an older one still reads the rest. Never reuse a number.

pub(super) use crate::saved::decode;
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_dtable, kvm_pic_state, kvm_pit_channel_state, kvm_regs,
    kvm_segment, kvm_sregs, kvm_vcpu_events,
};
use minicbor::{Decode, Encode};

/// Declares a saved type whose fields are those of the kernel's structure, of the same names or at
/// the places that are told, and the two conversions. What the kernel's structure has beyond them is
/// 0. Saved types within are converted as well.
macro_rules! mirror {
    (@$of:ident $field:ident) => { $of.$field };
    (@$of:ident $field:ident $($place:ident)+) => { $of$(.$place)+ };
    ($(#[$meta:meta])* $saved:ident of $kernel:ident {
        $($number:literal $field:ident $(at $($place:ident).+)?: $type:ty,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
        pub(super) struct $saved {
            $(#[n($number)] pub(super) $field: $type,)+
        }

        impl From<$kernel> for $saved {
            fn from(from: $kernel) -> $saved {
                $saved { $($field: mirrored(mirror!(@from $field $($($place)+)?)),)+ }
            }
        }

        impl From<$saved> for $kernel {
            fn from(from: $saved) -> $kernel {
                let mut to = $kernel::default();
                $((mirror!(@to $field $($($place)+)?)) = mirrored(from.$field);)+
                to
            }
        }
    };
}

/// Most fields are of one type in both.
fn mirrored<T: Into<U>, U>(from: T) -> U {
    from.into()
}

mirror!(
    /// General registers.
    SavedRegs of kvm_regs {
        0 rax: u64, 1 rbx: u64, 2 rcx: u64, 3 rdx: u64, 4 rsi: u64, 5 rdi: u64, 6 rsp: u64,
        7 rbp: u64, 8 r8: u64, 9 r9: u64, 10 r10: u64, 11 r11: u64, 12 r12: u64, 13 r13: u64,
        14 r14: u64, 15 r15: u64, 16 rip: u64, 17 rflags: u64,
    }
);

mirror!(
    /// A segment register with its hidden part.
    SavedSegment of kvm_segment {
        0 base: u64, 1 limit: u32, 2 selector: u16, 3 type_: u8, 4 present: u8, 5 dpl: u8,
        6 db: u8, 7 s: u8, 8 l: u8, 9 g: u8, 10 avl: u8, 11 unusable: u8,
    }
);

mirror!(
    /// A descriptor table register.
    SavedTable of kvm_dtable { 0 base: u64, 1 limit: u16, }
);

mirror!(
    /// Special registers.
    SavedSregs of kvm_sregs {
        0 cs: SavedSegment, 1 ds: SavedSegment, 2 es: SavedSegment, 3 fs: SavedSegment,
        4 gs: SavedSegment, 5 ss: SavedSegment, 6 tr: SavedSegment, 7 ldt: SavedSegment,
        8 gdt: SavedTable, 9 idt: SavedTable, 10 cr0: u64, 11 cr2: u64, 12 cr3: u64, 13 cr4: u64,
        14 cr8: u64, 15 efer: u64, 16 apic_base: u64, 17 interrupt_bitmap: [u64; 4],
    }
);

mirror!(
    /// Debug registers.
    SavedDebug of kvm_debugregs { 0 db: [u64; 4], 1 dr6: u64, 2 dr7: u64, 3 flags: u64, }
);

mirror!(
    /// What was about to happen to a vCPU when it stopped.
    SavedEvents of kvm_vcpu_events {
        0 exception_injected at exception.injected: u8,
        1 exception_nr at exception.nr: u8,
        2 exception_has_error_code at exception.has_error_code: u8,
        3 exception_pending at exception.pending: u8,
        4 exception_error_code at exception.error_code: u32,
        5 interrupt_injected at interrupt.injected: u8,
        6 interrupt_nr at interrupt.nr: u8,
        7 interrupt_soft at interrupt.soft: u8,
        8 interrupt_shadow at interrupt.shadow: u8,
        9 nmi_injected at nmi.injected: u8,
        10 nmi_pending at nmi.pending: u8,
        11 nmi_masked at nmi.masked: u8,
        12 sipi_vector: u32,
        13 flags: u32,
        14 smi_smm at smi.smm: u8,
        15 smi_pending at smi.pending: u8,
        16 smi_inside_nmi at smi.smm_inside_nmi: u8,
        17 smi_latched_init at smi.latched_init: u8,
        18 triple_fault_pending at triple_fault.pending: u8,
        19 exception_has_payload: u8,
        20 exception_payload: u64,
    }
);

/// A register that is named by a number: an MSR or an extended control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedNumbered {
    #[n(0)]
    pub(super) index: u32,
    #[n(1)]
    pub(super) value: u64,
}

/// Everything about a vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct SavedVcpu {
    #[n(0)]
    pub(super) regs: SavedRegs,
    #[n(1)]
    pub(super) sregs: SavedSregs,
    /// Page directory pointers of a guest that pages with PAE, where KVM tells them apart from
    /// what is in memory.
    #[n(2)]
    pub(super) pdptrs: Option<[u64; 4]>,
    #[n(3)]
    pub(super) xcrs: Vec<SavedNumbered>,
    /// The XSAVE area in its architectural layout, without the zeros at its end.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub(super) xsave: Vec<u8>,
    #[n(5)]
    pub(super) debug: SavedDebug,
    /// The local APIC's register page.
    #[cbor(n(6), with = "minicbor::bytes")]
    pub(super) lapic: Vec<u8>,
    /// All MSRs that KVM lists and gives, but for the two below.
    #[n(7)]
    pub(super) msrs: Vec<SavedNumbered>,
    /// IA32_TSC.
    #[n(8)]
    pub(super) tsc: u64,
    /// The guest's TSC minus the host's, where KVM tells it.
    #[n(9)]
    pub(super) tsc_offset: Option<u64>,
    /// IA32_TSC_DEADLINE; 0 if it is not armed.
    #[n(10)]
    pub(super) tsc_deadline: u64,
    #[n(11)]
    pub(super) mp_state: u32,
    #[n(12)]
    pub(super) events: SavedEvents,
    /// State of a hypervisor inside of the guest, where KVM gives it.
    #[cbor(n(13), with = "minicbor::bytes")]
    pub(super) nested: Option<Vec<u8>>,
    /// `CLOCK_REALTIME` when `tsc` was read, in nanoseconds. Only an older destination looks at it.
    #[n(14)]
    pub(super) realtime_ns: u64,
    /// `CLOCK_MONOTONIC` at the same moment.
    #[n(15)]
    pub(super) monotonic_ns: Option<u64>,
}

mirror!(
    /// One of the two interrupt controllers of the AT.
    SavedPic of kvm_pic_state {
        0 last_irr: u8, 1 irr: u8, 2 imr: u8, 3 isr: u8, 4 priority_add: u8, 5 irq_base: u8,
        6 read_reg_select: u8, 7 poll: u8, 8 special_mask: u8, 9 init_state: u8, 10 auto_eoi: u8,
        11 rotate_on_auto_eoi: u8, 12 special_fully_nested_mode: u8, 13 init4: u8, 14 elcr: u8,
        15 elcr_mask: u8,
    }
);

/// The I/O APIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedIoapic {
    #[n(0)]
    pub(super) base_address: u64,
    #[n(1)]
    pub(super) ioregsel: u32,
    #[n(2)]
    pub(super) id: u32,
    #[n(3)]
    pub(super) irr: u32,
    #[n(4)]
    pub(super) redirection: [u64; 24],
}

mirror!(
    /// A counter of the interval timer.
    SavedPitChannel of kvm_pit_channel_state {
        0 count: u32, 1 latched_count: u16, 2 count_latched: u8, 3 status_latched: u8,
        4 status: u8, 5 read_state: u8, 6 write_state: u8, 7 write_latch: u8, 8 rw_mode: u8,
        9 mode: u8, 10 bcd: u8, 11 gate: u8, 12 count_load_time: i64,
    }
);

/// The interval timer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedPit {
    #[n(0)]
    pub(super) channels: [SavedPitChannel; 3],
    #[n(1)]
    pub(super) flags: u32,
}

/// kvmclock, and what is needed to let it and the TSC go on by the time that the guest stood.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(super) struct SavedClock {
    /// Nanoseconds of kvmclock.
    #[n(0)]
    pub(super) clock_ns: u64,
    /// `CLOCK_REALTIME` at the same moment. Only an older destination looks at it.
    #[n(1)]
    pub(super) realtime_ns: u64,
    /// The host's TSC at the same moment, where KVM read all three together.
    #[n(2)]
    pub(super) host_tsc: Option<u64>,
    /// `CLOCK_MONOTONIC` at the same moment.
    #[n(3)]
    pub(super) monotonic_ns: Option<u64>,
}

/// What vCPUs share.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct SavedVm {
    #[n(0)]
    pub(super) pic_master: SavedPic,
    #[n(1)]
    pub(super) pic_slave: SavedPic,
    #[n(2)]
    pub(super) ioapic: SavedIoapic,
    #[n(3)]
    pub(super) pit: SavedPit,
    #[n(4)]
    pub(super) clock: SavedClock,
}

mirror!(
    /// One CPUID entry.
    #[derive(Copy)]
    SavedCpuid of kvm_cpuid_entry2 {
        0 function: u32, 1 index: u32, 2 flags: u32, 3 eax: u32, 4 ebx: u32, 5 ecx: u32, 6 edx: u32,
    }
);

/// What the destination's KVM must be able to do.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct SavedHost {
    /// What all vCPUs see, but for their own numbers in it.
    #[n(0)]
    pub(super) cpuid: Vec<SavedCpuid>,
    /// Rate of the guest's TSC.
    #[n(1)]
    pub(super) tsc_khz: u32,
}

/// Writes a saved value.
pub(super) fn encode<T: Encode<()>>(value: &T) -> Vec<u8> {
    minicbor::to_vec(value).expect("a vector takes everything")
}
