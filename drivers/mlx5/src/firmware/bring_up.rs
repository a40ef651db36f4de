//! Bring-up and teardown of a function (PRM, "Driver start up"; Linux `main.c`,
//! `mlx5_function_enable`, `mlx5_function_open`).

use super::events::EventQueue;
use super::shared::Firmware;
use crate::command::{CommandError, CommandQueue, Output, Request};
use crate::options::Options;
use martlet_device_io::{Dma, DmaError, Registers, Waiter};
use martlet_mlx5_abi::capability::{
    GeneralCapabilities, GeneralCapabilitiesOut, QUERY_HCA_CAP_OUT_BYTES, VirtioCapabilities,
    VirtioCapabilitiesOut, kind, op_mod_current,
};
use martlet_mlx5_abi::event::CreateEqOut;
use martlet_mlx5_abi::init_segment::{
    CMDIF_REV_FW_SUB, CMDQ_ADDR_HIGH, CMDQ_ADDR_LOW, COMMAND_INTERFACE, CommandQueueShape, FW_REV,
    GONE, INITIALIZING, INITIALIZING_BIT, nic_interface,
};
use martlet_mlx5_abi::memory::QuerySpecialContextsOut;
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut, object_type};
use martlet_mlx5_abi::setup::{
    FRAME_OVERHEAD_BYTES, ISSI, InitHcaIn, PagesIn, QUERY_PAGES_BOOT, QUERY_PAGES_INIT,
    QueryNicVportContextOut, QueryPagesOut, SetHcaCapIn, SetIssiIn, VportIn,
};
use martlet_mlx5_abi::virtq::event_mode;
use martlet_mlx5_abi::{CommandStatus, Opcode, U16, U32};
use martlet_units::Instant;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Memory that the firmware may want for a part of a queue. Real devices want some hundred KiB.
const UMEM_BYTES_MAX: u64 = 8 << 20;

/// How often the firmware is looked at while it starts.
const START_POLL: Duration = Duration::from_millis(1);

/// How long a function whose interface was disabled may take to stop (Linux `fw.c`,
/// `MLX5_FAST_TEARDOWN_WAIT_MS`; rdma-core's `mlx5_vfio_teardown_hca_fast` gives it as much).
const DISABLE_TIME: Duration = Duration::from_secs(3);

/// Why a device could not be brought up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BringUpError {
    /// There is no device, or it has failed.
    #[error("the device is gone")]
    Gone,
    /// It does not speak the command interface that this driver does.
    #[error("the device has command interface {found}, not {COMMAND_INTERFACE}")]
    Interface {
        /// What it has.
        found: u16,
    },
    /// Its firmware does not come up.
    #[error("the firmware has not started in {waited_ms} ms")]
    NotStarted {
        /// How long it was given.
        waited_ms: u128,
    },
    /// It was told to stop and does not say that it has: it may reach its memory still.
    #[error("the function has not stopped in {waited_ms} ms, its memory stays with it")]
    NotStopped {
        /// How long it was given.
        waited_ms: u128,
    },
    /// Its command queue can't be of the shape that it tells.
    #[error("a command queue of 2^{} entries of 2^{} bytes can't be", .0.log_entries, .0.log_stride)]
    Shape(CommandQueueShape),
    /// It lacks something without which it is no network card for guests.
    #[error("the device has no {0}")]
    Lacks(&'static str),
    /// A command failed.
    #[error("a command of the bring-up failed")]
    Command(#[from] CommandError),
    /// The host has no memory for it.
    #[error("no memory for the device")]
    Memory(#[from] DmaError),
}

/// What a function is, after its bring-up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// General capabilities.
    pub general: GeneralCapabilities,
    /// Capabilities of virtqueues.
    pub virtio: VirtioCapabilities,
    /// Protection domain of all keys and queues.
    pub pd: u32,
    /// The key that reads zeros and forgets writes.
    pub null_mkey: u32,
    /// MAC address; `None` if the device does not tell one.
    pub mac: Option<[u8; 6]>,
    /// Largest payload of a frame; `None` if the device does not tell it.
    pub mtu: Option<u16>,
}

impl Firmware {
    /// Brings the function up. On an error it is left as it is; a later attempt starts over.
    pub(crate) fn bring_up(
        registers: Arc<dyn Registers>,
        dma: Arc<dyn Dma>,
        waiter: Arc<dyn Waiter>,
        options: Options,
    ) -> Result<(Firmware, Setup), BringUpError> {
        let queue = hand_over_queue(&*registers, &dma, &*waiter, &options)?;
        let firmware = Firmware::new(registers, dma, waiter, options, queue);
        match firmware.enable_and_start() {
            Ok(setup) => Ok((firmware, setup)),
            Err(error) => {
                if firmware.stop().is_err() {
                    // It may be written as long as the process lives.
                    std::mem::forget(firmware);
                }
                Err(error)
            }
        }
    }

    /// Brings the function up again after [`Self::stop`], with a command queue of its own.
    pub(crate) fn start_anew(&self) -> Result<Setup, BringUpError> {
        let (registers, waiter) = (self.registers(), self.waiter());
        let queue = hand_over_queue(registers, self.dma_handle(), waiter, self.options())?;
        self.replace_queue(queue);
        self.enable_and_start()
    }

    fn enable_and_start(&self) -> Result<Setup, BringUpError> {
        self.enable()?;
        self.start()
    }

    /// One command of the bring-up.
    pub(crate) fn setup_call(&self, request: Request) -> Result<Output, CommandError> {
        self.call(self.options().deadlines.setup, request)
    }

    fn short(&self, opcode: Opcode, op_mod: u16, object: u32) -> Result<ShortOut, CommandError> {
        let input = ShortIn::new(opcode, op_mod, object);
        self.setup_call(Request::new::<ShortOut>(opcode, &input))?.read()
    }

    /// From ENABLE_HCA to INIT_HCA.
    fn enable(&self) -> Result<(), BringUpError> {
        self.short(Opcode::ENABLE_HCA, 0, 0)?;
        self.set_issi()?;
        self.give_what_is_asked_for(QUERY_PAGES_BOOT)?;
        self.set_capabilities()?;
        self.give_what_is_asked_for(QUERY_PAGES_INIT)?;
        let mut input = InitHcaIn::new_zeroed();
        input.header = InHeader::new(Opcode::INIT_HCA, 0);
        self.setup_call(Request::new::<ShortOut>(Opcode::INIT_HCA, &input))?;
        Ok(())
    }

    /// Chooses the interface step sequence. Firmware that does not know the command has the first
    /// one only (Linux `main.c`, `mlx5_core_set_issi`).
    fn set_issi(&self) -> Result<(), CommandError> {
        let input = SetIssiIn {
            header: InHeader::new(Opcode::SET_ISSI, 0),
            reserved0: U16::new(0),
            issi: U16::new(ISSI),
            reserved1: U32::new(0),
        };
        match self.setup_call(Request::new::<ShortOut>(Opcode::SET_ISSI, &input)) {
            Err(CommandError::Status { status: CommandStatus::BAD_OPCODE, .. }) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Chooses the capabilities that are in force already, for the firmware wants to be told, but
    /// for signatures of mailboxes: ours carry none (Linux `main.c`, `handle_hca_cap`).
    fn set_capabilities(&self) -> Result<(), CommandError> {
        let opcode = Opcode::SET_HCA_CAP;
        let output = self.capabilities(kind::GENERAL)?;
        let capabilities = output.bytes().get(size_of::<SetHcaCapIn>()..).unwrap_or_default();
        let mut capabilities = capabilities.to_vec();
        if let Ok((general, _)) = GeneralCapabilities::mut_from_prefix(&mut capabilities) {
            general.cmdif_checksum &= !GeneralCapabilities::CMDIF_CHECKSUM;
        }
        let header = InHeader::new(opcode, kind::GENERAL << 1);
        let head = SetHcaCapIn { header, reserved: [0; 8] };
        let input = [head.as_bytes(), &capabilities].concat();
        self.setup_call(Request::new::<ShortOut>(opcode, &*input)).map(|_| ())
    }

    fn give_what_is_asked_for(&self, stage: u16) -> Result<(), CommandError> {
        let input = PagesIn::new(Opcode::QUERY_PAGES, stage, 0, 0);
        let request = Request::new::<QueryPagesOut>(Opcode::QUERY_PAGES, &input);
        let asked: QueryPagesOut = self.setup_call(request)?.read()?;
        let pages = asked.pages.get().cast_signed();
        if pages > 0 {
            self.give_pages(asked.function_id.get(), pages);
        }
        Ok(())
    }

    /// Everything after INIT_HCA.
    fn start(&self) -> Result<Setup, BringUpError> {
        let general = self.capabilities(kind::GENERAL)?.read::<GeneralCapabilitiesOut>()?;
        let general = general.capabilities;
        if !general.has_object_type(object_type::VIRTIO_NET_Q) {
            return Err(BringUpError::Lacks("virtqueues"));
        }
        let virtio = self.capabilities(kind::VDPA_EMULATION)?.read::<VirtioCapabilitiesOut>()?;
        let virtio = virtio.capabilities;
        if virtio.queue_types & VirtioCapabilities::SPLIT == 0 {
            return Err(BringUpError::Lacks("split virtqueues"));
        }
        if virtio.offloads_features.get() & VirtioCapabilities::ETH_FRAME == 0 {
            return Err(BringUpError::Lacks("virtqueues of Ethernet frames"));
        }
        if virtio.max_num_virtio_queues.get() < 2 {
            return Err(BringUpError::Lacks("pair of virtqueues"));
        }
        if !virtio.has_event_mode(event_mode::MSIX) {
            return Err(BringUpError::Lacks("interrupt vectors for virtqueues (MSI-X event mode)"));
        }
        let umems = [virtio.umem_1, virtio.umem_2, virtio.umem_3];
        let size = self.options().queue_size_max;
        if umems.iter().any(|umem| umem.bytes_for(size) > UMEM_BYTES_MAX) {
            return Err(BringUpError::Lacks("virtqueues that take a reasonable amount of memory"));
        }
        let uar = self.short(Opcode::ALLOC_UAR, 0, 0)?.object.get();
        self.create_event_queue(uar, &general)?;
        let pd = self.short(Opcode::ALLOC_PD, 0, 0)?.object.get();
        let null_mkey = self.null_mkey()?;
        let vport = self.vport_context()?;
        Ok(Setup {
            general,
            virtio,
            pd,
            null_mkey,
            mac: vport.map(|vport| vport.mac).filter(|mac| *mac != [0; 6]),
            mtu: vport.and_then(|vport| vport.mtu.get().checked_sub(FRAME_OVERHEAD_BYTES)),
        })
    }

    fn capabilities(&self, kind: u16) -> Result<Output, CommandError> {
        let input = ShortIn::new(Opcode::QUERY_HCA_CAP, op_mod_current(kind), 0);
        let out_bytes = QUERY_HCA_CAP_OUT_BYTES;
        self.setup_call(Request::with_output(Opcode::QUERY_HCA_CAP, &input, out_bytes))
    }

    fn create_event_queue(
        &self,
        uar: u32,
        general: &GeneralCapabilities,
    ) -> Result<(), BringUpError> {
        let mut events = EventQueue::new(self.dma(), uar)?;
        let input = events.create_input(general);
        let request = Request::new::<CreateEqOut>(Opcode::CREATE_EQ, &*input);
        let created: CreateEqOut = self.setup_call(request)?.read()?;
        events.set_number(created.eqn);
        self.set_events(events);
        Ok(())
    }

    fn null_mkey(&self) -> Result<u32, CommandError> {
        let input = ShortIn::new(Opcode::QUERY_SPECIAL_CONTEXTS, 0, 0);
        let opcode = Opcode::QUERY_SPECIAL_CONTEXTS;
        let output = self.setup_call(Request::new::<QuerySpecialContextsOut>(opcode, &input))?;
        Ok(output.read::<QuerySpecialContextsOut>()?.null_mkey.get())
    }

    /// MAC address and MTU; nothing if the firmware does not know the command.
    fn vport_context(&self) -> Result<Option<QueryNicVportContextOut>, CommandError> {
        let opcode = Opcode::QUERY_NIC_VPORT_CONTEXT;
        let request = Request::new::<QueryNicVportContextOut>(opcode, &VportIn::own(opcode));
        match self.setup_call(request) {
            Ok(output) => output.read().map(Some),
            Err(CommandError::Status { .. } | CommandError::Delivery { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the function down, and with it everything on it: after a success it reaches no memory
    /// any more. After an error nothing that it was ever given may be freed; another call looks
    /// whether it has stopped since.
    ///
    /// In order if it answers, which is enough (Linux `main.c`, `mlx5_function_close` and
    /// `mlx5_function_disable`). Otherwise its interface is disabled, and the function has stopped
    /// when the field says so, not before (Linux `fw.c`, `mlx5_cmd_fast_teardown_hca`): until then
    /// it may serve its queues.
    pub(crate) fn stop(&self) -> Result<(), BringUpError> {
        // Answers are looked for from here on: with the function its event queue goes, and with that
        // the event of this very command. Its memory may still be written.
        self.part_with_events();
        if self.end().is_none() {
            // Of a function that was not started yet there is nothing to tear down.
            let torn = self.short(Opcode::TEARDOWN_HCA, 0, 0).map(|_| ());
            self.take_all_pages();
            let disabled = self.short(Opcode::DISABLE_HCA, 0, 0).map(|_| ());
            tracing::debug!(?torn, ?disabled, "an mlx5 function is taken down");
            if torn.is_ok() && disabled.is_ok() && self.end().is_none() && self.has_no_pages() {
                self.taint();
                return Ok(());
            }
        }
        self.taint();
        self.disable_interface()
    }

    /// Disables the interface and waits until it is. One that was told before and did not stop is
    /// only looked at.
    fn disable_interface(&self) -> Result<(), BringUpError> {
        let (registers, waiter) = (self.registers(), self.waiter());
        let was_told = self.set_told_to_stop(true);
        let waited = if was_told { Duration::ZERO } else { DISABLE_TIME };
        let limit = waiter.now().after(waited);
        let before = read(registers, CMDQ_ADDR_LOW);
        if before != GONE && !was_told {
            let disabled = nic_interface::to_register(before, nic_interface::DISABLED);
            registers.write32(CMDQ_ADDR_LOW, disabled.to_be());
        }
        loop {
            let value = read(registers, CMDQ_ADDR_LOW);
            if value == GONE || nic_interface::from_register(value) == nic_interface::DISABLED {
                self.set_told_to_stop(false);
                return Ok(());
            }
            if waiter.now() >= limit {
                if !was_told {
                    tracing::error!("an mlx5 function does not stop: its memory stays with it");
                }
                return Err(BringUpError::NotStopped { waited_ms: DISABLE_TIME.as_millis() });
            }
            waiter.wait(Some(waiter.now().after(START_POLL)));
        }
    }
}

fn read(registers: &dyn Registers, offset: u64) -> u32 {
    u32::from_be(registers.read32(offset))
}

fn halves(address: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = address.to_be_bytes();
    [u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h])]
}

/// The handshake: the device tells what its command queue looks like, and gets one.
fn hand_over_queue(
    registers: &dyn Registers,
    dma: &Arc<dyn Dma>,
    waiter: &dyn Waiter,
    options: &Options,
) -> Result<CommandQueue, BringUpError> {
    let waited = options.deadlines.setup;
    let limit = waiter.now().after(waited);
    check_interface(registers)?;
    wait_for_start(registers, waiter, limit, waited)?;
    let shape = CommandQueueShape::from_register(read(registers, CMDQ_ADDR_LOW));
    let queue = CommandQueue::new(Arc::clone(dma), shape, options.mailbox_bytes_max)?;
    let queue = queue.ok_or(BringUpError::Shape(shape))?;
    let [high, low] = halves(queue.page_at().0);
    registers.write32(CMDQ_ADDR_HIGH, high.to_be());
    registers.write32(CMDQ_ADDR_LOW, low.to_be());
    wait_for_start(registers, waiter, limit, waited)?;
    Ok(queue)
}

fn check_interface(registers: &dyn Registers) -> Result<(), BringUpError> {
    if read(registers, FW_REV) == GONE {
        return Err(BringUpError::Gone);
    }
    let [high, low, ..] = read(registers, CMDIF_REV_FW_SUB).to_be_bytes();
    let found = u16::from_be_bytes([high, low]);
    if found == COMMAND_INTERFACE { Ok(()) } else { Err(BringUpError::Interface { found }) }
}

fn wait_for_start(
    registers: &dyn Registers,
    waiter: &dyn Waiter,
    limit: Instant,
    waited: Duration,
) -> Result<(), BringUpError> {
    loop {
        let value = read(registers, INITIALIZING);
        if value == GONE {
            return Err(BringUpError::Gone);
        }
        if value & INITIALIZING_BIT == 0 {
            return Ok(());
        }
        if waiter.now() >= limit {
            return Err(BringUpError::NotStarted { waited_ms: waited.as_millis() });
        }
        waiter.wait(Some(waiter.now().after(START_POLL)));
    }
}
