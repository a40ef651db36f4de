//! Pages of the host that the firmware works with.
//!
//! The firmware asks for them before it starts (QUERY_PAGES), and by events later on. They are
//! given and taken by MANAGE_PAGES, for which a slot of the command queue is kept.

use crate::command::{CommandId, CommandQueue, Output, Request};
use martlet_device_io::{Dma, DmaBlock};
use martlet_mlx5_abi::message::OutHeader;
use martlet_mlx5_abi::setup::{
    FIRMWARE_PAGE_BYTES, MANAGE_PAGES_CANNOT_GIVE, MANAGE_PAGES_GIVE, MANAGE_PAGES_TAKE,
    ManagePagesOut, PagesIn,
};
use martlet_mlx5_abi::{Opcode, U64};
use martlet_units::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::mem::size_of;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Pages of one command: 4 KiB of addresses, 8 mailboxes.
const PAGES_PER_COMMAND: u32 = 512;

/// Pages that a function may have at all: 256 MiB. More is a firmware gone mad.
const PAGES_MAX: usize = 65_536;

/// Requests that are remembered; more at a time is a firmware gone mad.
const REQUESTS_MAX: usize = 64;

/// A 4 KiB page in bytes, for allocations.
const PAGE: usize = 4096;

/// The pages of a function, and what is going on about them.
#[derive(Debug, Default)]
pub(super) struct PageKeeper {
    /// By address, with the function that has it.
    pages: BTreeMap<u64, (u16, DmaBlock)>,
    requests: VecDeque<(u16, i32)>,
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    id: CommandId,
    what: What,
}

#[derive(Debug)]
enum What {
    /// These pages were given.
    Give(u16, Vec<DmaBlock>),
    /// Pages were taken back.
    Take,
    /// The firmware was told that it gets none.
    Refuse,
}

impl PageKeeper {
    /// The firmware wants pages, or gives them back if the number is negative.
    pub(super) fn request(&mut self, function: u16, pages: i32) {
        if self.requests.len() < REQUESTS_MAX && pages != 0 {
            self.requests.push_back((function, pages));
        }
    }

    /// Whether nothing is left to be done.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.current.is_none()
    }

    /// Whether the firmware has none.
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.is_idle()
    }

    /// Asks for all pages back, of each function that has some (PRM, MANAGE_PAGES: `function_id`).
    pub(super) fn take_all(&mut self) {
        let mut held: BTreeMap<u16, i32> = BTreeMap::new();
        for (function, _) in self.pages.values() {
            *held.entry(*function).or_default() += 1;
        }
        held.into_iter().for_each(|(function, pages)| self.request(function, -pages));
    }

    /// Collects the command that is out, and issues the next one.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        queue: &mut CommandQueue,
        dma: &dyn Dma,
        deadline: Duration,
    ) {
        if let Some(current) = self.current.take() {
            match queue.take_done(current.id) {
                Some(completion) => self.ended(current.what, completion.result.ok().as_ref()),
                None => {
                    self.current = Some(current);
                    return;
                }
            }
        }
        let Some((function, wanted)) = self.requests.pop_front() else { return };
        let (request, what, rest) = self.command(dma, function, wanted);
        match queue.submit(now, deadline, &request) {
            Ok(id) => {
                self.current = Some(Current { id, what });
                if rest != 0 {
                    self.requests.push_front((function, rest));
                }
            }
            // There are no mailboxes: later.
            Err(_) => self.requests.push_front((function, wanted)),
        }
    }

    /// The command for (a part of) a request, and what is left of it.
    fn command(&self, dma: &dyn Dma, function: u16, wanted: i32) -> (Request, What, i32) {
        let count = wanted.unsigned_abs().min(PAGES_PER_COMMAND);
        let part = i32::try_from(count).expect("below the limit of a command");
        if wanted < 0 {
            let input = PagesIn::new(Opcode::MANAGE_PAGES, MANAGE_PAGES_TAKE, function, count);
            let out_bytes = size_of::<ManagePagesOut>() + count as usize * size_of::<U64>();
            let request = Request::with_output(Opcode::MANAGE_PAGES, &input, out_bytes);
            return (request, What::Take, wanted + part);
        }
        match self.allocate(dma, count) {
            Some(pages) => {
                let input = PagesIn::new(Opcode::MANAGE_PAGES, MANAGE_PAGES_GIVE, function, count);
                let mut bytes = input.as_bytes().to_vec();
                for page in &pages {
                    bytes.extend(page.at().0.to_be_bytes());
                }
                let request = Request::with_output(Opcode::MANAGE_PAGES, &*bytes, 16);
                (request, What::Give(function, pages), wanted - part)
            }
            None => {
                let op_mod = MANAGE_PAGES_CANNOT_GIVE;
                let input = PagesIn::new(Opcode::MANAGE_PAGES, op_mod, function, 0);
                let request = Request::with_output(Opcode::MANAGE_PAGES, &input, 16);
                (request, What::Refuse, 0)
            }
        }
    }

    fn allocate(&self, dma: &dyn Dma, count: u32) -> Option<Vec<DmaBlock>> {
        if self.pages.len() + count as usize > PAGES_MAX {
            return None;
        }
        (0..count).map(|_| dma.alloc(PAGE, PAGE).ok()).collect()
    }

    fn ended(&mut self, what: What, output: Option<&Output>) {
        match (what, output) {
            // Whether a command that failed has given them is not known: they are kept.
            (What::Give(function, pages), _) => {
                self.pages.extend(pages.into_iter().map(|page| (page.at().0, (function, page))));
            }
            (What::Take, Some(output)) => self.taken(output),
            (What::Take, None) | (What::Refuse, _) => {}
        }
    }

    /// Frees the pages that the firmware names, if they are its own.
    fn taken(&mut self, output: &Output) {
        let Ok(header) = output.read::<ManagePagesOut>() else { return };
        let list = output.bytes().get(size_of::<ManagePagesOut>()..).unwrap_or_default();
        let count = header.entries.get() as usize;
        for address in list.chunks_exact(size_of::<U64>()).take(count) {
            let address = U64::read_from_bytes(address).expect("as long as a number").get();
            self.pages.remove(&address);
        }
    }
}

const _: () = assert!(PAGE as u64 == FIRMWARE_PAGE_BYTES && size_of::<OutHeader>() == 8);
