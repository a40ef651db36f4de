//! Memory keys and umems.

use super::answer::{self, Answer, Refusal, done, header, parse, refuse, short};
use super::input::Input;
use super::{Firmware, LOG_UMEMS_MAX};
use crate::keys::{Key, Pieces, Target};
use crate::num::{to_u64, to_usize};
use crate::pages::Pages;
use martlet_mlx5_abi::memory::{
    CREATE_MKEY_PG_ACCESS, CreateMkeyIn, CreateMkeyOut, CreateUmemIn, Klm, MkeyContext,
    OCTWORD_BYTES, access_mode,
};
use martlet_mlx5_abi::{CommandStatus, U24, U32};
use zerocopy::FromBytes;

/// In CREATE_MKEY's flags: the list lies in a umem.
const UMEM_VALID: u32 = 1 << 30;

/// log2 of the smallest page.
const LOG_PAGE_MIN: u32 = 12;

/// Memory that the driver lent to the firmware.
#[derive(Clone, Copy, Debug)]
pub(super) struct Umem {
    pub(super) bytes: u64,
    /// Queues that use it.
    pub(super) users: u32,
}

impl Firmware {
    pub(super) fn create_key(&mut self, input: Input) -> Answer {
        let create: CreateMkeyIn = parse(&input.head)?;
        let context = &create.context;
        let domain = context.length64_pd.get() & 0x00ff_ffff;
        self.check_key(&create, &input)?;
        if !self.domains.contains_key(&domain) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0200_0001));
        }
        let bytes = context.length.get();
        let flags = context.flags.get();
        let start = context.start_addr.get();
        let target = match context.access_mode() {
            access_mode::MTT => Target::Direct(page_list(&create, input.pages)?),
            access_mode::KLM => self.pieces(&create, &input)?,
            _ => return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0200_0002)),
        };
        if start.checked_add(bytes).is_none() {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0200_0003));
        }
        let key = Key {
            variant: context.variant,
            domain,
            start,
            bytes,
            read: flags & MkeyContext::LOCAL_READ != 0,
            write: flags & MkeyContext::LOCAL_WRITE != 0,
            target,
        };
        let index = self.nic.create_key(key);
        let index = index.ok_or(refuse(CommandStatus::LIMIT, 0x0200_0004))?;
        self.use_domain(domain, true);
        answer::bytes(&CreateMkeyOut {
            header: header(CommandStatus::OK, 0),
            reserved0: 0,
            mkey_index: U24::new(index),
            reserved1: U32::new(0),
        })
    }

    /// What does not depend on the access mode.
    fn check_key(&self, create: &CreateMkeyIn, input: &Input) -> Result<(), Refusal> {
        let list = input.length.saturating_sub(size_of::<CreateMkeyIn>());
        let octwords = to_usize(create.translations_octword_actual_size.get());
        if !list.is_multiple_of(OCTWORD_BYTES) || list / OCTWORD_BYTES != octwords {
            return Err(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0200_0005));
        }
        if create.context.translations_octword_size.get()
            < create.translations_octword_actual_size.get()
        {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0200_0006));
        }
        let free = create.context.flags.get() & MkeyContext::FREE != 0;
        let all_addresses = create.context.length64_pd.get() & MkeyContext::LENGTH64 != 0;
        let flags = create.flags.get() & (UMEM_VALID | CREATE_MKEY_PG_ACCESS);
        if free || all_addresses || flags != 0 || create.context.qpn.get() != MkeyContext::ANY_QP {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0200_0007));
        }
        let length = create.context.length.get();
        let limit = 1_u64.checked_shl(u32::from(self.config.log_region_max));
        if limit.is_some_and(|limit| length > limit) {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0200_0008));
        }
        Ok(())
    }

    /// The list of an indirect key: pieces that say how long they are. Padding is pieces of no
    /// length.
    fn pieces(&self, create: &CreateMkeyIn, input: &Input) -> Result<Target, Refusal> {
        let wrong = refuse(CommandStatus::BAD_PARAMETER, 0x0200_000a);
        let bytes = create.context.length.get();
        let entries = create.translations_octword_actual_size.get();
        if entries > 1 << u32::from(self.config.log_klm_list_max).min(31) {
            return Err(refuse(CommandStatus::LIMIT, 0x0200_000b));
        }
        let mut pieces = Pieces::default();
        let list = input.head.get(size_of::<CreateMkeyIn>()..).unwrap_or_default();
        for raw in list.chunks_exact(OCTWORD_BYTES) {
            let klm = Klm::read_from_bytes(raw).map_err(|_| wrong)?;
            if !pieces.push(klm.byte_count.get().into(), klm.mkey.get(), klm.address.get()) {
                return Err(wrong);
            }
        }
        if bytes == 0 || bytes > pieces.bytes() {
            return Err(wrong);
        }
        Ok(Target::Indirect(pieces))
    }

    pub(super) fn destroy_key(&mut self, input: &Input) -> Answer {
        let index = input.object();
        let domain = self.nic.keys().by_index(index).map(|key| key.domain);
        if !self.nic.destroy_key(index) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0202_0001));
        }
        if let Some(domain) = domain {
            self.use_domain(domain, false);
        }
        done()
    }

    /// Entries of a key's page list.
    pub(super) fn key_pages(&self, index: u32) -> u64 {
        match self.nic.keys().by_index(index).map(|key| &key.target) {
            Some(Target::Direct(pages)) => u64::from(pages.count()),
            _ => 0,
        }
    }

    /// Something of a domain was made or dropped.
    pub(super) fn use_domain(&mut self, domain: u32, more: bool) {
        if let Some(users) = self.domains.get_mut(&domain) {
            *users = if more { users.saturating_add(1) } else { users.saturating_sub(1) };
        }
    }

    pub(super) fn create_umem(&mut self, input: &Input) -> Answer {
        let create: CreateUmemIn = parse(&input.head)?;
        let count = create.num_of_mtt.get();
        let pages = input.long_words(size_of::<CreateUmemIn>(), count);
        let pages = pages.ok_or(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0a08_0001))?;
        let log = LOG_PAGE_MIN + (create.log_page_size.get() & 0x1f);
        let offset = u64::from(create.page_offset.get());
        let bytes = to_u64(pages.len()).checked_shl(log).filter(|all| all >> log == count);
        let bytes = bytes.and_then(|bytes| bytes.checked_sub(offset)).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or(refuse(CommandStatus::BAD_PARAMETER, 0x0a08_0002))?;
        if self.umems.len() >= 1 << LOG_UMEMS_MAX {
            return Err(refuse(CommandStatus::NO_RESOURCES, 0x0a08_0003));
        }
        let number = self.next_object();
        self.umems.insert(number, Umem { bytes, users: 0 });
        short(number)
    }

    pub(super) fn destroy_umem(&mut self, input: &Input) -> Answer {
        match self.umems.get(&input.object()) {
            None => Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a0a_0001)),
            Some(Umem { users: 0, .. }) => {
                self.umems.remove(&input.object());
                done()
            }
            Some(_) => Err(refuse(CommandStatus::RESOURCE_BUSY, 0x0a0a_0002)),
        }
    }
}

/// The pages of a direct key.
fn page_list(create: &CreateMkeyIn, pages: Option<Pages>) -> Result<Pages, Refusal> {
    let wrong = refuse(CommandStatus::BAD_PARAMETER, 0x0200_0009);
    let (mut pages, bytes) = (pages.ok_or(wrong)?, create.context.length.get());
    let log = create.context.log_page_size.get() & 0x3f;
    let inside = pages.inside(create.context.start_addr.get());
    let needed = inside.checked_add(bytes).ok_or(wrong)?;
    if log < LOG_PAGE_MIN || bytes == 0 || needed > pages.bytes() {
        return Err(wrong);
    }
    let count = u32::try_from(needed.div_ceil(1 << log)).map_err(|_| wrong)?;
    pages.truncate(count);
    Ok(pages)
}
