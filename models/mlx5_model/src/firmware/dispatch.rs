//! From opcodes to what they do.

use super::answer::{Answer, refuse};
use super::input::Input;
use super::{Firmware, Function};
use martlet_mlx5_abi::message::{GeneralObjectIn, object_type};
use martlet_mlx5_abi::{CommandStatus, Opcode};
use zerocopy::FromBytes;

/// The type of general object that an input is about.
pub(super) fn object_type_of(input: &Input) -> u16 {
    GeneralObjectIn::read_from_prefix(&input.head).map_or(0, |(header, _)| header.obj_type.get())
}

/// Commands that a function takes before INIT_HCA.
fn is_setup(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::ENABLE_HCA
            | Opcode::DISABLE_HCA
            | Opcode::INIT_HCA
            | Opcode::TEARDOWN_HCA
            | Opcode::QUERY_HCA_CAP
            | Opcode::SET_HCA_CAP
            | Opcode::SET_ISSI
            | Opcode::QUERY_PAGES
            | Opcode::MANAGE_PAGES
    )
}

impl Firmware {
    /// Does what a command asks for. `out_bytes` are what the driver has room for.
    pub(super) fn dispatch(&mut self, opcode: Opcode, input: Input, out_bytes: usize) -> Answer {
        let early = self.function == Function::Off && opcode != Opcode::ENABLE_HCA;
        if early || (self.function != Function::Running && !is_setup(opcode)) {
            return Err(refuse(CommandStatus::BAD_SYSTEM_STATE, 1));
        }
        if let Some(needed) = output_bytes(opcode, &input).filter(|needed| *needed > out_bytes) {
            tracing::debug!(%opcode, needed, out_bytes, "no room for the output");
            return Err(refuse(CommandStatus::BAD_OUTPUT_LENGTH, 2));
        }
        match opcode {
            Opcode::ENABLE_HCA => self.enable(),
            Opcode::DISABLE_HCA => self.disable(),
            Opcode::INIT_HCA => self.init(&input),
            Opcode::SET_HCA_CAP => self.set_capabilities(&input),
            Opcode::TEARDOWN_HCA => self.teardown(),
            Opcode::QUERY_HCA_CAP => self.query_capabilities(&input),
            Opcode::SET_ISSI => self.set_issi(&input),
            Opcode::QUERY_PAGES => self.query_pages(&input),
            Opcode::MANAGE_PAGES => self.manage_pages(&input, out_bytes),
            Opcode::QUERY_SPECIAL_CONTEXTS => self.query_special_contexts(),
            Opcode::ALLOC_PD => self.alloc_domain(),
            Opcode::DEALLOC_PD => self.dealloc_domain(&input),
            Opcode::ALLOC_UAR => self.alloc_uar(),
            Opcode::DEALLOC_UAR => self.dealloc_uar(&input),
            Opcode::CREATE_EQ => {
                let uars = &self.uars;
                self.events.create(&input, |uar| uars.contains(&uar))
            }
            Opcode::DESTROY_EQ => self.events.destroy(&input),
            Opcode::QUERY_VPORT_STATE => self.query_vport_state(),
            Opcode::QUERY_NIC_VPORT_CONTEXT => self.query_vport_context(),
            Opcode::CREATE_MKEY => self.create_key(input),
            Opcode::DESTROY_MKEY => self.destroy_key(&input),
            Opcode::CREATE_UMEM => self.create_umem(&input),
            Opcode::DESTROY_UMEM => self.destroy_umem(&input),
            Opcode::CREATE_RQT => self.create_table(&input),
            Opcode::MODIFY_RQT => self.modify_table(&input),
            Opcode::DESTROY_RQT => self.destroy_table(&input),
            Opcode::CREATE_GENERAL_OBJECT
            | Opcode::MODIFY_GENERAL_OBJECT
            | Opcode::QUERY_GENERAL_OBJECT
            | Opcode::DESTROY_GENERAL_OBJECT => self.dispatch_general(opcode, &input),
            _ => Err(refuse(CommandStatus::BAD_OPCODE, 3)),
        }
    }

    fn dispatch_general(&mut self, opcode: Opcode, input: &Input) -> Answer {
        match (object_type_of(input), opcode) {
            (object_type::VIRTIO_NET_Q, Opcode::CREATE_GENERAL_OBJECT) => self.create_virtq(input),
            (object_type::VIRTIO_NET_Q, Opcode::MODIFY_GENERAL_OBJECT) => self.modify_virtq(input),
            (object_type::VIRTIO_NET_Q, Opcode::QUERY_GENERAL_OBJECT) => self.query_virtq(input),
            (object_type::VIRTIO_NET_Q, Opcode::DESTROY_GENERAL_OBJECT) => {
                self.destroy_virtq(input)
            }
            (object_type::VIRTIO_Q_COUNTERS, Opcode::CREATE_GENERAL_OBJECT) => {
                self.create_counters()
            }
            (object_type::VIRTIO_Q_COUNTERS, Opcode::QUERY_GENERAL_OBJECT) => {
                self.query_counters(input)
            }
            (object_type::VIRTIO_Q_COUNTERS, Opcode::DESTROY_GENERAL_OBJECT) => {
                self.destroy_counters(input)
            }
            _ => Err(refuse(CommandStatus::BAD_OPCODE, 4)),
        }
    }
}

/// How long the output is, where that is more than 16 bytes: a command whose output has no room
/// changes nothing.
fn output_bytes(opcode: Opcode, input: &Input) -> Option<usize> {
    use martlet_mlx5_abi::capability::QUERY_HCA_CAP_OUT_BYTES;
    use martlet_mlx5_abi::memory::QuerySpecialContextsOut;
    use martlet_mlx5_abi::setup::QueryNicVportContextOut;
    use martlet_mlx5_abi::virtq::{QueryCountersOut, QueryVirtqOut};
    match (opcode, object_type_of(input)) {
        (Opcode::QUERY_HCA_CAP, _) => Some(QUERY_HCA_CAP_OUT_BYTES),
        (Opcode::QUERY_SPECIAL_CONTEXTS, _) => Some(size_of::<QuerySpecialContextsOut>()),
        (Opcode::QUERY_NIC_VPORT_CONTEXT, _) => Some(size_of::<QueryNicVportContextOut>()),
        (Opcode::QUERY_GENERAL_OBJECT, object_type::VIRTIO_NET_Q) => {
            Some(size_of::<QueryVirtqOut>())
        }
        (Opcode::QUERY_GENERAL_OBJECT, object_type::VIRTIO_Q_COUNTERS) => {
            Some(size_of::<QueryCountersOut>())
        }
        _ => None,
    }
}
