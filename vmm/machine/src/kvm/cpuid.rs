//! What the guest's processors say they are.

use super::saved::SavedCpuid;
use crate::vcpu::backend::BackendError;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

/// Entries that KVM takes, and that are taken from a source.
const ENTRIES_MAX: usize = kvm_bindings::KVM_MAX_CPUID_ENTRIES;

const LEAF_HIGHEST: u32 = 0x0;
const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHE: u32 = 0x4;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// Leaf 1, ECX: not features but state, set by KVM from CR4 (bit 27), or provided by our own
/// interrupt controllers (21 x2APIC, 24 TSC deadline), or by being a guest (31).
const FEATURES_ECX_OURS: u32 = 1 << 21 | 1 << 24 | 1 << 27 | 1 << 31;
const FEATURES_ECX_TSC_DEADLINE: u32 = 1 << 24;
const FEATURES_ECX_HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: 9 APIC is state, 28 says that there is more than one processor in the package.
const FEATURES_EDX_OURS: u32 = 1 << 9 | 1 << 28;
const FEATURES_EDX_HTT: u32 = 1 << 28;

/// What this host's KVM can show to a guest.
pub(super) fn supported(kvm: &Kvm) -> Result<Vec<SavedCpuid>, BackendError> {
    let cpuid = super::kvm("KVM_GET_SUPPORTED_CPUID", kvm.get_supported_cpuid(ENTRIES_MAX))?;
    let mut entries: Vec<_> = cpuid.as_slice().iter().copied().map(SavedCpuid::from).collect();
    complete(&mut entries, kvm.check_extension(Cap::TscDeadlineTimer));
    Ok(entries)
}

/// Adds what KVM leaves to whoever makes the machine.
fn complete(entries: &mut Vec<SavedCpuid>, has_tsc_deadline: bool) {
    for entry in entries.iter_mut().filter(|entry| entry.function == LEAF_FEATURES) {
        // Before Linux 6.14 it does not say that a guest is one: without it there is no kvmclock.
        entry.ecx |= FEATURES_ECX_HYPERVISOR;
        if has_tsc_deadline {
            entry.ecx |= FEATURES_ECX_TSC_DEADLINE;
        }
    }
    let highest = entries.iter().find(|entry| entry.function == LEAF_HIGHEST);
    let highest = highest.map_or(0, |entry| entry.eax);
    let has_v2 = entries.iter().any(|entry| entry.function == LEAF_TOPOLOGY_V2);
    entries.retain(|entry| !matches!(entry.function, LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2));
    for function in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
        if function <= highest && (function == LEAF_TOPOLOGY || has_v2) {
            entries.extend(TOPOLOGY_LEVELS.map(|index| SavedCpuid {
                function,
                index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                ..SavedCpuid::default()
            }));
        }
    }
}

/// The same for vCPU number `vcpu` of `vcpus`, each a core of its own in one package.
pub(super) fn for_vcpu(
    entries: &[SavedCpuid],
    vcpu: u16,
    vcpus: u16,
) -> Result<CpuId, BackendError> {
    let (vcpu, vcpus) = (u32::from(vcpu), u32::from(vcpus));
    // Bits of an APIC id that number the cores.
    let id_bits = u32::BITS - (vcpus - 1).leading_zeros();
    let entries: Vec<kvm_cpuid_entry2> = entries
        .iter()
        .map(|entry| {
            let mut entry = *entry;
            match (entry.function, entry.index) {
                (LEAF_FEATURES, _) => {
                    entry.ebx = entry.ebx & 0xffff | (vcpus & 0xff) << 16 | (vcpu & 0xff) << 24;
                    let many = if vcpus > 1 { FEATURES_EDX_HTT } else { 0 };
                    entry.edx = entry.edx & !FEATURES_EDX_HTT | many;
                }
                // Bits 31:26 of EAX: most cores in the package, minus one.
                (LEAF_CACHE, _) if entry.eax & 0x1f != 0 => {
                    entry.eax = entry.eax & 0x0000_3fff | (((1 << id_bits) - 1) & 0x3f) << 26;
                }
                (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, index) => {
                    topology(&mut entry, index, id_bits, vcpus, vcpu)
                }
                (LEAF_AMD_SIZES, _) => {
                    entry.ecx = entry.ecx & !0xf0ff | id_bits << 12 | (vcpus - 1) & 0xff;
                }
                (LEAF_AMD_TOPOLOGY, _) => {
                    entry.eax = vcpu;
                    entry.ebx = vcpu & 0xff;
                    entry.ecx = 0;
                }
                _ => {}
            }
            entry.into()
        })
        .collect();
    CpuId::from_entries(&entries)
        .map_err(|_| BackendError::state(format!("{} CPUID entries", entries.len())))
}

/// KVM tells the first of these only, so that each vCPU would be a package of its own.
const TOPOLOGY_LEVELS: [u32; 3] = [0, 1, 2];

/// Leaf 0xb: level 0 is the one thread of a core, level 1 the cores of the package, level 2
/// the end.
fn topology(entry: &mut SavedCpuid, index: u32, id_bits: u32, vcpus: u32, vcpu: u32) {
    let (shift, count, kind) = match index {
        0 => (0, 1, 1),
        1 => (id_bits, vcpus, 2),
        _ => (0, 0, 0),
    };
    entry.eax = shift;
    entry.ebx = count;
    entry.ecx = index & 0xff | kind << 8;
    entry.edx = vcpu;
}

/// Whether a host that supports `host` can run a guest that was shown `guest`.
pub(super) fn check(guest: &[SavedCpuid], host: &[SavedCpuid]) -> Result<(), BackendError> {
    if guest.len() > ENTRIES_MAX {
        return Err(BackendError::state(format!("{} CPUID entries", guest.len())));
    }
    let mut lacking = Vec::new();
    for wanted in guest {
        let Some(masks) = feature_masks(wanted.function, wanted.index) else { continue };
        let found = host
            .iter()
            .find(|entry| entry.function == wanted.function && entry.index == wanted.index)
            .copied()
            .unwrap_or_default();
        for (register, mask) in (0..).zip(masks) {
            let missing = register_of(wanted, register) & !register_of(&found, register) & mask;
            let bits = (0..u32::BITS).filter(|bit| missing >> bit & 1 == 1);
            lacking.extend(bits.map(|bit| name(wanted.function, wanted.index, register, bit)));
        }
    }
    if lacking.is_empty() {
        return Ok(());
    }
    let reason = format!("destination CPU lacks: {}", lacking.join(", "));
    Err(BackendError::Unsupported { reason })
}

/// Leaf 0x80000001, EDX bit 26.
pub(super) fn has_gigabyte_pages(entries: &[SavedCpuid]) -> bool {
    entries.iter().any(|entry| entry.function == 0x8000_0001 && entry.edx >> 26 & 1 == 1)
}

/// Which bits of EAX, EBX, ECX, EDX of a leaf each stand for a feature that a guest may use.
fn feature_masks(function: u32, index: u32) -> Option<[u32; 4]> {
    const ALL: u32 = u32::MAX;
    Some(match (function, index) {
        (LEAF_FEATURES, _) => [0, 0, !FEATURES_ECX_OURS, !FEATURES_EDX_OURS],
        (0x7, 0) => [0, ALL, ALL, ALL],
        (0x7, _) => [ALL, ALL, ALL, ALL],
        // XCR0 bits in EAX and EDX; sizes in EBX and ECX.
        (0xd, 0) => [ALL, 0, 0, ALL],
        (0xd, 1) => [ALL, 0, ALL, ALL],
        // KVM's own features, without which its clock, for one, is not there.
        (0x4000_0001, _) => [ALL, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, ALL, ALL],
        (0x8000_0007, _) => [0, 0, 0, ALL],
        (0x8000_0008, _) => [0, ALL, 0, 0],
        (0x8000_000a, _) => [0, 0, 0, ALL],
        (0x8000_0021, _) => [ALL, 0, 0, 0],
        _ => return None,
    })
}

fn register_of(entry: &SavedCpuid, register: u8) -> u32 {
    match register {
        0 => entry.eax,
        1 => entry.ebx,
        2 => entry.ecx,
        _ => entry.edx,
    }
}

/// The names that /proc/cpuinfo uses, for features that differ between today's hosts; others by
/// their place.
fn name(function: u32, index: u32, register: u8, bit: u32) -> String {
    const NAMES: &[(u32, u32, u8, u32, &str)] = &[
        (1, 0, 2, 0, "sse3"),
        (1, 0, 2, 9, "ssse3"),
        (1, 0, 2, 12, "fma"),
        (1, 0, 2, 19, "sse4_1"),
        (1, 0, 2, 20, "sse4_2"),
        (1, 0, 2, 22, "movbe"),
        (1, 0, 2, 23, "popcnt"),
        (1, 0, 2, 25, "aes"),
        (1, 0, 2, 26, "xsave"),
        (1, 0, 2, 28, "avx"),
        (1, 0, 2, 29, "f16c"),
        (1, 0, 2, 30, "rdrand"),
        (7, 0, 1, 0, "fsgsbase"),
        (7, 0, 1, 3, "bmi1"),
        (7, 0, 1, 4, "hle"),
        (7, 0, 1, 5, "avx2"),
        (7, 0, 1, 7, "smep"),
        (7, 0, 1, 8, "bmi2"),
        (7, 0, 1, 9, "erms"),
        (7, 0, 1, 10, "invpcid"),
        (7, 0, 1, 11, "rtm"),
        (7, 0, 1, 14, "mpx"),
        (7, 0, 1, 16, "avx512f"),
        (7, 0, 1, 17, "avx512dq"),
        (7, 0, 1, 18, "rdseed"),
        (7, 0, 1, 19, "adx"),
        (7, 0, 1, 20, "smap"),
        (7, 0, 1, 21, "avx512ifma"),
        (7, 0, 1, 23, "clflushopt"),
        (7, 0, 1, 24, "clwb"),
        (7, 0, 1, 28, "avx512cd"),
        (7, 0, 1, 29, "sha_ni"),
        (7, 0, 1, 30, "avx512bw"),
        (7, 0, 1, 31, "avx512vl"),
        (7, 0, 2, 1, "avx512vbmi"),
        (7, 0, 2, 2, "umip"),
        (7, 0, 2, 3, "pku"),
        (7, 0, 2, 5, "waitpkg"),
        (7, 0, 2, 6, "avx512_vbmi2"),
        (7, 0, 2, 7, "user_shstk"),
        (7, 0, 2, 8, "gfni"),
        (7, 0, 2, 9, "vaes"),
        (7, 0, 2, 10, "vpclmulqdq"),
        (7, 0, 2, 11, "avx512_vnni"),
        (7, 0, 2, 12, "avx512_bitalg"),
        (7, 0, 2, 14, "avx512_vpopcntdq"),
        (7, 0, 2, 16, "la57"),
        (7, 0, 2, 22, "rdpid"),
        (7, 0, 3, 4, "fsrm"),
        (7, 0, 3, 14, "serialize"),
        (7, 0, 3, 22, "amx_bf16"),
        (7, 0, 3, 23, "avx512_fp16"),
        (7, 0, 3, 24, "amx_tile"),
        (7, 0, 3, 25, "amx_int8"),
        (7, 1, 0, 4, "avx_vnni"),
        (7, 1, 0, 5, "avx512_bf16"),
        (0xd, 1, 0, 0, "xsaveopt"),
        (0xd, 1, 0, 1, "xsavec"),
        (0xd, 1, 0, 3, "xsaves"),
        (0x8000_0001, 0, 2, 2, "svm"),
        (0x8000_0001, 0, 2, 5, "abm"),
        (0x8000_0001, 0, 2, 6, "sse4a"),
        (0x8000_0001, 0, 2, 22, "topoext"),
        (0x8000_0001, 0, 3, 26, "pdpe1gb"),
        (0x8000_0001, 0, 3, 27, "rdtscp"),
        (0x8000_0007, 0, 3, 8, "constant_tsc"),
    ];
    NAMES
        .iter()
        .find(|(f, i, r, b, _)| (*f, *i, *r, *b) == (function, index, register, bit))
        .map_or_else(
            || {
                let register = ["eax", "ebx", "ecx", "edx"][usize::from(register.min(3))];
                format!("cpuid {function:#x}.{index} {register} bit {bit}")
            },
            |(.., name)| (*name).to_owned(),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32, registers: [u32; 4]) -> SavedCpuid {
        let [eax, ebx, ecx, edx] = registers;
        SavedCpuid { function, index, flags: 0, eax, ebx, ecx, edx }
    }

    #[test]
    fn missing_features_are_named() {
        let guest = [leaf(1, 0, [9, 9, 1 << 27 | 1 << 25, 0]), leaf(7, 0, [0, 1 << 16 | 2, 0, 0])];
        let host = [leaf(1, 0, [0; 4])];
        let error = check(&guest, &host).unwrap_err().to_string();
        assert_eq!(error, "destination CPU lacks: aes, cpuid 0x7.0 ebx bit 1, avx512f");
        assert!(check(&guest, &guest).is_ok());
        assert!(check(&host, &guest).is_ok());
    }

    #[test]
    fn what_kvm_leaves_out_is_added() {
        let mut entries =
            vec![leaf(0, 0, [0xd, 0, 0, 0]), leaf(1, 0, [0; 4]), leaf(0xb, 0, [9; 4])];
        complete(&mut entries, true);
        let places: Vec<_> = entries.iter().map(|e| (e.function, e.index, e.flags)).collect();
        assert_eq!(places, [(0, 0, 0), (1, 0, 0), (0xb, 0, 1), (0xb, 1, 1), (0xb, 2, 1)]);
        assert_eq!(entries[1].ecx, 1 << 31 | 1 << 24);
        let cpuid = for_vcpu(&entries, 1, 2).unwrap();
        let levels = cpuid.as_slice()[2..].iter().map(|e| (e.eax, e.ebx, e.ecx, e.edx));
        assert_eq!(levels.collect::<Vec<_>>(), [(0, 1, 0x100, 1), (1, 2, 0x201, 1), (0, 0, 2, 1)]);

        // A processor that has none of it; and one with both.
        let mut old = vec![leaf(0, 0, [0xa, 0, 0, 0]), leaf(1, 0, [0; 4])];
        complete(&mut old, false);
        assert_eq!((old.len(), old[1].ecx), (2, 1 << 31));
        let mut new = vec![leaf(0, 0, [0x1f, 0, 0, 0]), leaf(0x1f, 0, [0; 4])];
        complete(&mut new, false);
        assert_eq!(new.iter().filter(|entry| entry.function == 0x1f).count(), 3);
        assert_eq!(new.len(), 7);
    }

    #[test]
    fn each_vcpu_has_its_number() {
        let entries = [leaf(1, 0, [0; 4]), leaf(0xb, 0, [0; 4]), leaf(0xb, 1, [0; 4])];
        let cpuid = for_vcpu(&entries, 5, 6).unwrap();
        let [features, threads, cores] = cpuid.as_slice() else { panic!("three entries") };
        assert_eq!(features.ebx, 5 << 24 | 6 << 16);
        assert_eq!(features.edx, FEATURES_EDX_HTT);
        assert_eq!((threads.eax, threads.ebx, threads.edx), (0, 1, 5));
        assert_eq!((cores.eax, cores.ebx, cores.edx), (3, 6, 5));
        let single = for_vcpu(&entries, 0, 1).unwrap();
        assert_eq!(single.as_slice()[0].edx, 0);
    }
}
