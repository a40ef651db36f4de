//! Bring-up: the function, its pages, domains, doorbell pages, capabilities, vport.

use super::answer::{self, Answer, bytes, done, header, parse, refuse, short, zeroed};
use super::input::Input;
use super::{Firmware, Function, OBJECTS_MAX, VIRTQ_DOORBELL_OFFSET, events};
use crate::keys;
use martlet_mlx5_abi::capability::{
    self, GeneralCapabilities, GeneralCapabilitiesOut, QUERY_HCA_CAP_OUT_BYTES, UmemSize,
    VirtioCapabilities, VirtioCapabilitiesOut,
};
use martlet_mlx5_abi::event::EventType;
use martlet_mlx5_abi::memory::QuerySpecialContextsOut;
use martlet_mlx5_abi::message::{InHeader, object_type};
use martlet_mlx5_abi::setup::{
    FIRMWARE_PAGE_BYTES, FRAME_OVERHEAD_BYTES, InitHcaIn, MANAGE_PAGES_CANNOT_GIVE,
    MANAGE_PAGES_GIVE, MANAGE_PAGES_TAKE, ManagePagesOut, PagesIn, QUERY_PAGES_BOOT,
    QUERY_PAGES_INIT, QueryNicVportContextOut, QueryPagesOut, QueryVportStateOut, SetHcaCapIn,
    SetIssiIn, VPORT_DOWN, VPORT_UP,
};
use martlet_mlx5_abi::{CommandStatus, U16, U24, U32, U64};
use zerocopy::IntoBytes;

/// log2 of a user's part of the doorbells: a page.
const LOG_DOORBELL_STRIDE: u8 = 12;

/// log2 of the longest receive queue table.
pub(super) const LOG_RQT_MAX: u8 = 11;

/// Pages that the firmware takes: 4 GiB.
const PAGES_MAX: usize = 1 << 20;

impl Firmware {
    pub(super) fn enable(&mut self) -> Answer {
        if self.function != Function::Off {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0104_0001));
        }
        self.function = Function::Enabled;
        done()
    }

    pub(super) fn disable(&mut self) -> Answer {
        self.reset();
        self.function = Function::Off;
        done()
    }

    /// Takes the capabilities as they are: nothing but signatures of mailboxes can be chosen here.
    pub(super) fn set_capabilities(&mut self, input: &Input) -> Answer {
        let set: SetHcaCapIn = parse(&input.head)?;
        if input.length != QUERY_HCA_CAP_OUT_BYTES {
            return Err(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0109_0001));
        }
        if self.function != Function::Enabled {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0109_0002));
        }
        self.capabilities_set = true;
        if set.header.op_mod.get() >> 1 == capability::kind::GENERAL {
            let capabilities = input.head.get(size_of::<SetHcaCapIn>()..).unwrap_or_default();
            let general: GeneralCapabilities = parse(capabilities)?;
            self.signs_mailboxes =
                general.cmdif_checksum & GeneralCapabilities::CMDIF_CHECKSUM != 0;
        }
        done()
    }

    pub(super) fn init(&mut self, input: &Input) -> Answer {
        let _: InitHcaIn = parse(&input.head)?;
        if !self.capabilities_set {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0102_0002));
        }
        if self.function != Function::Enabled || self.pages_wanted() > 0 {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0102_0001));
        }
        self.function = Function::Running;
        done()
    }

    pub(super) fn teardown(&mut self) -> Answer {
        if self.function != Function::Running {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 0x0103_0001));
        }
        self.reset();
        self.function = Function::Enabled;
        done()
    }

    pub(super) fn set_issi(&mut self, input: &Input) -> Answer {
        let set: SetIssiIn = parse(&input.head)?;
        if set.issi.get() > 1 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x010b_0001));
        }
        self.issi = set.issi.get();
        done()
    }

    /// Pages that INIT_HCA waits for.
    fn pages_wanted(&self) -> usize {
        let wanted = self.config.boot_pages.saturating_add(self.config.init_pages);
        crate::num::to_usize(wanted).saturating_sub(self.pages.len())
    }

    pub(super) fn query_pages(&self, input: &Input) -> Answer {
        let query: PagesIn = parse(&input.head)?;
        let given = u32::try_from(self.pages.len()).unwrap_or(u32::MAX);
        let wanted = match query.header.op_mod.get() {
            QUERY_PAGES_BOOT => self.config.boot_pages.saturating_sub(given),
            QUERY_PAGES_INIT => {
                let all = self.config.boot_pages.saturating_add(self.config.init_pages);
                all.saturating_sub(given)
            }
            _ => 0,
        };
        bytes(&QueryPagesOut {
            header: header(CommandStatus::OK, 0),
            reserved: U16::new(0),
            function_id: query.function_id,
            pages: U32::new(wanted),
        })
    }

    pub(super) fn manage_pages(&mut self, input: &Input, out_bytes: usize) -> Answer {
        let manage: PagesIn = parse(&input.head)?;
        let count = manage.entries.get();
        let answer = |entries| ManagePagesOut {
            header: header(CommandStatus::OK, 0),
            entries: U32::new(entries),
            reserved: U32::new(0),
        };
        match manage.header.op_mod.get() {
            MANAGE_PAGES_CANNOT_GIVE => bytes(&answer(0)),
            MANAGE_PAGES_GIVE => {
                let given = input.long_words(size_of::<PagesIn>(), u64::from(count));
                let given = given.ok_or(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0108_0001))?;
                let odd = given.iter().any(|at| !at.is_multiple_of(FIRMWARE_PAGE_BYTES));
                let mut pages = self.pages.clone();
                if odd || !given.iter().all(|at| pages.insert(*at)) {
                    return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0108_0002));
                }
                if pages.len() > PAGES_MAX {
                    return Err(refuse(CommandStatus::LIMIT, 0x0108_0004));
                }
                self.pages = pages;
                bytes(&answer(0))
            }
            MANAGE_PAGES_TAKE => {
                let room = out_bytes.saturating_sub(size_of::<ManagePagesOut>()) / 8;
                let count = crate::num::to_usize(count).min(room);
                let taken: Vec<_> = self.pages.iter().rev().take(count).copied().collect();
                let entries = u32::try_from(taken.len()).unwrap_or(u32::MAX);
                let mut out = answer(entries).as_bytes().to_vec();
                for page in taken {
                    self.pages.remove(&page);
                    out.extend_from_slice(&page.to_be_bytes());
                }
                Ok(out)
            }
            _ => Err(refuse(CommandStatus::BAD_PARAMETER, 0x0108_0003)),
        }
    }

    /// The firmware asks for pages, or offers them back.
    pub(super) fn request_pages(&mut self, pages: i32) {
        let bus = self.nic.bus();
        self.interrupt_pending |= self.events.post(bus, EventType::PAGE_REQUEST, |entry| {
            entry.data1 = U32::from_bytes(pages.to_be_bytes());
        });
    }

    pub(super) fn alloc_domain(&mut self) -> Answer {
        if self.domains.len() >= OBJECTS_MAX {
            return Err(refuse(CommandStatus::NO_RESOURCES, 0x0800_0001));
        }
        let domain = self.next_object();
        self.domains.insert(domain, 0);
        short(domain)
    }

    pub(super) fn dealloc_domain(&mut self, input: &Input) -> Answer {
        match self.domains.get(&input.object()) {
            None => Err(refuse(CommandStatus::BAD_RESOURCE, 0x0801_0001)),
            Some(0) => {
                self.domains.remove(&input.object());
                done()
            }
            Some(_) => Err(refuse(CommandStatus::RESOURCE_BUSY, 0x0801_0002)),
        }
    }

    pub(super) fn alloc_uar(&mut self) -> Answer {
        // Page 0 and the begin of page 1 are the initialization segment.
        let free = (2..2 + super::UARS_MAX).find(|uar| !self.uars.contains(uar));
        let uar = free.ok_or(refuse(CommandStatus::NO_RESOURCES, 0x0802_0001))?;
        self.uars.insert(uar);
        short(uar)
    }

    pub(super) fn dealloc_uar(&mut self, input: &Input) -> Answer {
        let uar = input.object();
        if self.events.use_uar(uar) {
            return Err(refuse(CommandStatus::RESOURCE_BUSY, 0x0803_0001));
        }
        if !self.uars.remove(&uar) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0803_0002));
        }
        done()
    }

    pub(super) fn query_special_contexts(&self) -> Answer {
        let mut out: QuerySpecialContextsOut = zeroed();
        out.null_mkey = U32::new(keys::NULL_KEY);
        bytes(&out)
    }

    pub(super) fn query_vport_state(&self) -> Answer {
        let mut out: QueryVportStateOut = zeroed();
        let state = if self.nic.is_up() { VPORT_UP } else { VPORT_DOWN };
        out.state = (VPORT_UP << 4) | state;
        bytes(&out)
    }

    pub(super) fn query_vport_context(&self) -> Answer {
        let mut out: QueryNicVportContextOut = zeroed();
        out.mtu = U16::new(self.config.mtu + FRAME_OVERHEAD_BYTES);
        out.mac = self.config.mac;
        bytes(&out)
    }

    pub(super) fn query_capabilities(&self, input: &Input) -> Answer {
        let query: InHeader = parse(&input.head)?;
        let mut out = match query.op_mod.get() >> 1 {
            capability::kind::GENERAL => {
                let mut out: GeneralCapabilitiesOut = zeroed();
                self.fill_general(&mut out.capabilities);
                answer::bytes(&out)?
            }
            capability::kind::VDPA_EMULATION => {
                let mut out: VirtioCapabilitiesOut = zeroed();
                self.fill_virtio(&mut out.capabilities);
                answer::bytes(&out)?
            }
            _ => return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0100_0001)),
        };
        out.resize(QUERY_HCA_CAP_OUT_BYTES, 0);
        Ok(out)
    }

    fn fill_general(&self, caps: &mut GeneralCapabilities) {
        let keys = self.config.keys_max.max(1);
        caps.log_max_mkey = log2_floor(keys);
        caps.max_indirection = 1;
        caps.log_max_mrw_sz = self.config.log_region_max;
        caps.null_mkey_log_max_klm_list =
            GeneralCapabilities::NULL_MKEY | (self.config.log_klm_list_max & 0x3f);
        caps.umem_uid_0 = GeneralCapabilities::UMEM_UID_0;
        caps.cmdif_checksum = self.config.cmdif_checksum << 6;
        caps.log_page_size = 12;
        caps.log_max_rqt_size = LOG_RQT_MAX;
        let types = (1 << object_type::VIRTIO_NET_Q) | (1 << object_type::VIRTIO_Q_COUNTERS);
        caps.general_object_types = U64::new(types);
        caps.log_max_umem = super::LOG_UMEMS_MAX;
        caps.max_num_eqs = U16::new(u16::from(events::QUEUES_MAX));
    }

    fn fill_virtio(&self, caps: &mut VirtioCapabilities) {
        let offloads = VirtioCapabilities::ETH_FRAME | VirtioCapabilities::VIRTIO_1_0;
        caps.offloads_features = U16::new(offloads | (self.config.features & 0x1fff));
        // A bit for each event mode: none and MSI-X.
        caps.event_modes = self.config.event_modes;
        caps.queue_types = VirtioCapabilities::SPLIT;
        caps.log_doorbell_stride = LOG_DOORBELL_STRIDE;
        let queues = u32::from(self.config.queues);
        // Everything may be modified in INIT and SUSPEND. One page of doorbells.
        caps.log_doorbell_bar_size = 0xe0;
        caps.doorbell_bar_offset = U64::new(VIRTQ_DOORBELL_OFFSET);
        caps.max_num_virtio_queues = U24::new(queues);
        let resume = if self.config.resumable { VirtioCapabilities::FREEZE_TO_RDY } else { 0 };
        caps.suspend_abilities = resume;
        let [umem_1, umem_2, umem_3] = self.umem_sizes();
        (caps.umem_1, caps.umem_2, caps.umem_3) = (umem_1, umem_2, umem_3);
    }

    /// How long a queue's umems have to be.
    pub(super) fn umem_sizes(&self) -> [UmemSize; 3] {
        self.config.umems.map(|(a, b)| UmemSize { a: U32::new(a), b: U32::new(b) })
    }
}

/// log2, rounded down.
fn log2_floor(value: u32) -> u8 {
    u8::try_from(value.max(1).ilog2()).unwrap_or(0)
}
