//! Opcodes (PRM, "Command opcodes"; `mlx5_ifc.h`, `MLX5_CMD_OP_*`).

use crate::number::open_enum;

open_enum! {
    /// What a command asks for.
    Opcode(u16) {
        /// Reads capabilities.
        QUERY_HCA_CAP = 0x100,
        /// Starts the function.
        INIT_HCA = 0x102,
        /// Stops the function.
        TEARDOWN_HCA = 0x103,
        /// The first command of a function.
        ENABLE_HCA = 0x104,
        /// The last command of a function.
        DISABLE_HCA = 0x105,
        /// Asks how many pages the firmware wants.
        QUERY_PAGES = 0x107,
        /// Gives pages to the firmware, or takes them back.
        MANAGE_PAGES = 0x108,
        /// Chooses capabilities.
        SET_HCA_CAP = 0x109,
        /// Chooses the interface step sequence.
        SET_ISSI = 0x10b,
        /// Makes a memory key.
        CREATE_MKEY = 0x200,
        /// Drops a memory key.
        DESTROY_MKEY = 0x202,
        /// Asks for reserved keys, of them the null key.
        QUERY_SPECIAL_CONTEXTS = 0x203,
        /// Makes an event queue.
        CREATE_EQ = 0x301,
        /// Drops an event queue.
        DESTROY_EQ = 0x302,
        /// Asks whether the link is up.
        QUERY_VPORT_STATE = 0x750,
        /// Asks for MAC address and MTU.
        QUERY_NIC_VPORT_CONTEXT = 0x754,
        /// Makes a protection domain.
        ALLOC_PD = 0x800,
        /// Drops a protection domain.
        DEALLOC_PD = 0x801,
        /// Makes a page of doorbells.
        ALLOC_UAR = 0x802,
        /// Drops a page of doorbells.
        DEALLOC_UAR = 0x803,
        /// Makes a receive queue table.
        CREATE_RQT = 0x916,
        /// Changes a receive queue table.
        MODIFY_RQT = 0x917,
        /// Drops a receive queue table.
        DESTROY_RQT = 0x918,
        /// Makes a general object: here a virtqueue or its counters.
        CREATE_GENERAL_OBJECT = 0xa00,
        /// Changes a general object.
        MODIFY_GENERAL_OBJECT = 0xa01,
        /// Reads a general object.
        QUERY_GENERAL_OBJECT = 0xa02,
        /// Drops a general object.
        DESTROY_GENERAL_OBJECT = 0xa03,
        /// Registers memory of the driver for the firmware's own use.
        CREATE_UMEM = 0xa08,
        /// Drops such memory.
        DESTROY_UMEM = 0xa0a,
    }
}

impl Opcode {
    /// Whether a driver issues only a share of all slots' worth of these at a time: they are slow
    /// in firmware, and other users of the function shall find slots (Linux `cmd.c`,
    /// `mlx5_cmd_is_throttle_opcode`).
    pub const fn is_throttled(self) -> bool {
        matches!(
            self,
            Opcode::CREATE_GENERAL_OBJECT
                | Opcode::MODIFY_GENERAL_OBJECT
                | Opcode::QUERY_GENERAL_OBJECT
                | Opcode::DESTROY_GENERAL_OBJECT
        )
    }

    /// Whether it makes something, whose number is in the output.
    pub const fn is_create(self) -> bool {
        matches!(
            self,
            Opcode::CREATE_MKEY
                | Opcode::CREATE_EQ
                | Opcode::ALLOC_PD
                | Opcode::ALLOC_UAR
                | Opcode::CREATE_RQT
                | Opcode::CREATE_GENERAL_OBJECT
                | Opcode::CREATE_UMEM
        )
    }

    /// Whether it only drops something. When the device is gone, so is what it would drop: a
    /// driver counts such a command as done (Linux `cmd.c`, `mlx5_internal_err_ret_value`).
    pub const fn is_destroy(self) -> bool {
        matches!(
            self,
            Opcode::TEARDOWN_HCA
                | Opcode::DISABLE_HCA
                | Opcode::DESTROY_MKEY
                | Opcode::DESTROY_EQ
                | Opcode::DEALLOC_PD
                | Opcode::DEALLOC_UAR
                | Opcode::DESTROY_RQT
                | Opcode::DESTROY_GENERAL_OBJECT
                | Opcode::DESTROY_UMEM
        )
    }
}
