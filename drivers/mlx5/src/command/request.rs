//! What is asked of the firmware, and what comes back.

use super::{CommandError, InputWriter};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::{GeneralObjectIn, OutHeader};
use std::any::Any;
use std::fmt;
use std::mem::size_of;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A command that was issued. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CommandId(pub u64);

/// An input that is written when its command is issued, straight into the mailboxes: a list of
/// pages is never copied twice, and not at all while its command has to wait.
pub(crate) trait Message: Send {
    /// How long it is.
    fn bytes(&self) -> usize;

    /// Writes exactly [`Self::bytes`] bytes. May be called again, if its command has to be issued
    /// again.
    fn write(&self, to: &mut InputWriter<'_>);
}

/// The input of a command.
pub(crate) enum Input {
    /// A short one.
    Bytes(Box<[u8]>),
    /// One that is written as late as can be.
    Lazy(Box<dyn Message>),
}

impl Input {
    /// How long it is.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Input::Bytes(bytes) => bytes.len(),
            Input::Lazy(message) => message.bytes(),
        }
    }
}

/// A command to be issued.
pub(crate) struct Request {
    /// What it asks for; for statistics, throttling and the choice of the slot. The input carries
    /// it as well.
    pub(crate) opcode: Opcode,
    /// The input.
    pub(crate) input: Input,
    /// How long the output is.
    pub(crate) out_bytes: usize,
    /// What the device may use while it has the command: memory that is pinned for a key, say. Kept
    /// until the answer is there, or the function has been stopped.
    pub(crate) keep: Option<Keep>,
}

/// Something that is kept alive.
pub(crate) type Keep = Arc<dyn Any + Send + Sync>;

impl Request {
    /// Keeps something alive while the device may use it.
    pub(crate) fn keeping(self, keep: Keep) -> Request {
        Request { keep: Some(keep), ..self }
    }

    /// A command whose input is a value, and whose output is at least as long as `O`.
    pub(crate) fn new<O: Sized>(
        opcode: Opcode,
        input: &(impl IntoBytes + Immutable + ?Sized),
    ) -> Request {
        Request::with_output(opcode, input, size_of::<O>())
    }

    /// A command whose input is a value, with an output of `out_bytes`.
    pub(crate) fn with_output(
        opcode: Opcode,
        input: &(impl IntoBytes + Immutable + ?Sized),
        out_bytes: usize,
    ) -> Request {
        let input = Input::Bytes(input.as_bytes().into());
        Request { opcode, input, out_bytes, keep: None }
    }

    /// A command about a general object, that says nothing but which.
    pub(crate) fn general<O: Sized>(opcode: Opcode, kind: u16, id: u32) -> Request {
        Request::new::<O>(opcode, &GeneralObjectIn::new(opcode, kind, id))
    }

    /// A command whose input is written when it is issued.
    pub(crate) fn lazy(opcode: Opcode, input: impl Message + 'static, out_bytes: usize) -> Request {
        Request { opcode, input: Input::Lazy(Box::new(input)), out_bytes, keep: None }
    }
}

/// The output of a command that went well.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Output {
    opcode: Opcode,
    bytes: Box<[u8]>,
}

impl Output {
    pub(crate) fn new(opcode: Opcode, bytes: Box<[u8]>) -> Output {
        Output { opcode, bytes }
    }

    /// All of it, with the header.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its begin as a value.
    pub(crate) fn read<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, CommandError> {
        T::read_from_prefix(&self.bytes)
            .map(|(value, _)| value)
            .map_err(|_| self.nonsense("length"))
    }

    /// The error for an output that says something impossible.
    pub(crate) fn nonsense(&self, what: &'static str) -> CommandError {
        CommandError::Nonsense { opcode: self.opcode, what }
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output({}, {} bytes)", self.opcode, self.bytes.len())
    }
}

/// What came of a command.
#[derive(Clone, Debug)]
pub(crate) struct Completion {
    /// Which.
    pub(crate) id: CommandId,
    /// How it went.
    pub(crate) result: Result<Output, CommandError>,
}

/// Bytes of the shortest message: a header, and what is padded to 16 bytes.
pub(crate) const MESSAGE_BYTES_MIN: usize = size_of::<OutHeader>();

/// Bytes of the longest message. The longest that is of use is a key for 1 GiB in pages of 4 KiB;
/// longer ones are a bug.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4 << 20;
