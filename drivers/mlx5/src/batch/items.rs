//! The items of a batch.

use crate::command::{CommandError, CommandId, Input, Output, Request};
use martlet_mlx5_abi::Opcode;

/// What has become of an item.
#[derive(Clone, Debug)]
pub(crate) enum ItemState {
    /// It has not been issued.
    Waiting,
    /// The device has it.
    Issued(CommandId),
    /// It has ended.
    Ended(Result<Output, CommandError>),
}

/// One command of a batch.
#[derive(Debug)]
pub(crate) struct Item {
    request: Request,
    pub(super) predecessor: Option<usize>,
    /// Under which number it was issued.
    pub(super) id: Option<CommandId>,
    pub(super) state: ItemState,
}

impl Item {
    pub(super) fn new(request: Request, predecessor: Option<usize>) -> Item {
        Item { request, predecessor, id: None, state: ItemState::Waiting }
    }

    /// What it asks for.
    pub(crate) fn opcode(&self) -> Opcode {
        self.request.opcode
    }

    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, ItemState::Waiting)
    }

    /// It is not issued again: what its input holds on to is not needed any more. (A command that
    /// was given up keeps for itself what the device may still use.)
    pub(super) fn forget_input(&mut self) {
        self.request.input = Input::Bytes(Box::default());
        self.request.keep = None;
    }
}
