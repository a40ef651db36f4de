//! Entering and leaving the guest by way of the kernel's signal frames.
//!
//! ```text
//!           rt_sigreturn of the guest's frame            guest instructions
//! host  ------------------------------------------>  ...  out / fault / kick
//!   ^                                                          | signal, on its own stack
//!   +--- return from the handler, with host registers ---------+ handler keeps the guest's frame
//! ```
//!
//! The kick is a signal that is blocked in the host and let through by the very load that enters
//! the guest. So one that comes too early stays pending and takes effect after the entry, before
//! the first instruction; none is lost and none hits the host. (KVM has the same in
//! `KVM_SET_SIGNAL_MASK`.)
//!
//! If a fault and a kick come together the kernel takes the fault first
//! (`dequeue_synchronous_signal`, kernel/signal.c).
#![allow(unsafe_code)]
// UNSAFETY: registers are taken from and given to the kernel as memory, with everything that
// this means for the code around it.

use super::frame::{FP_BYTES_MAX, FpState, Register, SignalContext, fp_bytes, sanitize_flags};
use super::signal_stack::SignalStack;
use crate::vcpu::backend::BackendError;
use crate::vcpu::kick::{self, KICK, kick_thread};
use martlet_raw_memory::Previous;
use std::arch::asm;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

/// Faults of the guest. Blocking them would turn one into the process's end.
const FAULTS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];

/// Signals that the C library keeps for itself (nptl/internal-signals.h): its calls wait until
/// every thread has handled them.
const C_LIBRARY: [c_int; 2] = [32, 33];

/// Room below a frame for a handler of the C library that comes between two instructions.
const HEADROOM_BYTES: usize = 16 << 10;
/// Flags of host code: interrupts on, direction up.
const HOST_FLAGS: u64 = 0x202;

fn mask(signals: &[c_int]) -> u64 {
    signals.iter().fold(0, |mask, signal| mask | 1 << (signal - 1))
}

/// Why the guest was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// The signal.
    pub(super) signal: c_int,
    /// For a fault, the processor's exception number.
    pub(super) trap: u64,
    /// For a page fault, its address.
    pub(super) address: u64,
}

impl Left {
    /// Whether it was a kick.
    pub(super) fn by_kick(self) -> bool {
        self.signal == KICK
    }
}

/// Who runs on a vCPU's thread. The value 0 is what a new exchange has.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Host code.
    Host = 0,
    /// Host code, and the next kick shows the kernel's frame of it.
    Learn,
    /// The guest, now or in a moment.
    Guest,
}

/// What a vCPU's thread and its signal handler share. Nobody else touches it.
#[repr(C)]
struct Exchange {
    headroom: [u8; HEADROOM_BYTES],
    /// The guest's registers while it is out.
    context: SignalContext,
    /// Its floating point and vector registers.
    fp: FpState,
    /// Those of host code that has just called a function.
    host_fp: FpState,
    host_rsp: u64,
    host_rip: u64,
    host_mask: u64,
    mode: Mode,
    left: Left,
}

thread_local! {
    /// The exchange of the vCPU that this thread is; null on all other threads. Needs neither
    /// initialising nor dropping, so the handler may read it.
    static CURRENT: Cell<*mut Exchange> = const { Cell::new(ptr::null_mut()) };
}

/// The guest's registers between two entries, and the way in.
pub(super) struct Passage {
    /// Owned. Always reached through this pointer, never by references that last, because the
    /// handler has it, too.
    exchange: NonNull<Exchange>,
    attached: Option<Attached>,
}

struct Attached {
    thread: libc::pid_t,
    stack: SignalStack,
}

// SAFETY: the exchange is owned. Once a thread's handler has it, the owner, a `VcpuBackend`, stays
// on that thread; `enter` checks it.
unsafe impl Send for Passage {}

impl Passage {
    pub(super) fn new() -> Passage {
        // SAFETY: zeroes are numbers, null pointers and `Mode::Host`, all valid.
        let exchange = unsafe { Box::new(MaybeUninit::<Exchange>::zeroed()).assume_init() };
        Passage { exchange: NonNull::from(Box::leak(exchange)), attached: None }
    }

    /// Makes the calling thread the vCPU's: gives it a stack for signals, blocks what is not for
    /// it, and learns how this kernel's frames look. Returns the thread's id.
    pub(super) fn attach(&mut self) -> Result<libc::pid_t, BackendError> {
        assert!(self.attached.is_none(), "attached twice");
        install_handlers()?;
        let stack = SignalStack::activate().map_err(BackendError::host("sigaltstack"))?;
        // SAFETY: takes no argument.
        let thread = unsafe { libc::gettid() };
        self.attached = Some(Attached { thread, stack });
        let exchange = self.exchange.as_ptr();
        CURRENT.with(|current| current.set(exchange));
        // Everything but faults is for other threads.
        let host_mask = !mask(&FAULTS) & !mask(&C_LIBRARY);
        // SAFETY: the exchange is this thread's, and no reference into it is alive.
        unsafe {
            (*exchange).host_mask = host_mask;
            set_mask(host_mask)?;
            (*exchange).mode = Mode::Learn;
            kick_thread(thread)?;
            set_mask(host_mask & !mask(&[KICK]))?;
            set_mask(host_mask)?;
            if (&raw const (*exchange).mode).read_volatile() != Mode::Host {
                let reason = "this kernel's signal frames are longer than is known".into();
                return Err(BackendError::Unsupported { reason });
            }
            // In the guest the C library's signals wait as well: their handlers use the stack
            // that they find.
            (*exchange).context.mask = !mask(&FAULTS) & !mask(&[KICK]);
            (*exchange).context.fpstate = (&raw const (*exchange).fp).expose_provenance() as u64;
            (*exchange).host_fp = (*exchange).fp.clone();
            (*exchange).host_fp.reset();
        }
        self.reset();
        Ok(thread)
    }

    /// Whether [`Passage::attach`] has been called.
    pub(super) fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Puts all of the guest's registers in their initial state.
    pub(super) fn reset(&mut self) {
        let segments = self.register(Register::SEGMENTS);
        // SAFETY: as in `register`.
        unsafe { (*self.exchange.as_ptr()).context.gregs = [0; 23] };
        self.set_register(Register::SEGMENTS, segments);
        self.set_register(Register::FLAGS, sanitize_flags(0));
        self.fp().reset();
    }

    pub(super) fn register(&self, register: Register) -> u64 {
        // SAFETY: the exchange is owned, and the handler does nothing while host code runs.
        unsafe { (*self.exchange.as_ptr()).context.gregs[register.index()] }
    }

    pub(super) fn set_register(&mut self, register: Register, value: u64) {
        // SAFETY: as in `register`.
        unsafe { (*self.exchange.as_ptr()).context.gregs[register.index()] = value };
    }

    /// The guest's floating point and vector registers.
    pub(super) fn fp(&mut self) -> &mut FpState {
        // SAFETY: as in `register`; the reference ends before the next entry.
        unsafe { &mut (*self.exchange.as_ptr()).fp }
    }

    /// Goes into the guest and out again without executing an instruction of it.
    pub(super) fn enter_and_leave(&mut self) -> Result<Left, BackendError> {
        let Some(attached) = &self.attached else {
            return Err(BackendError::Unsupported { reason: "a vCPU without a thread".into() });
        };
        // Stays pending, as the signal is blocked here, and comes before the first instruction.
        kick_thread(attached.thread)?;
        // SAFETY: no instruction of the guest is executed.
        Ok(unsafe { self.enter() })
    }

    /// Runs the guest until a signal ends it.
    ///
    /// # Safety
    /// The registers lead to code that leaves this process's own memory alone. Whether they do
    /// can't be checked: it is the guest program that promises it.
    pub(super) unsafe fn enter(&mut self) -> Left {
        let exchange = self.exchange.as_ptr();
        let current = CURRENT.with(Cell::get);
        assert_eq!(exchange, current, "a vCPU is entered by its own thread");
        // SAFETY: the exchange is this thread's and no reference into it is alive. The frame is
        // the kernel's own with checked registers. The handler comes back to the label with the
        // stack pointer that was stored; what is not declared as changed, rbx and rbp, comes from
        // the stack. Vector and control registers are then as a called function wants them.
        unsafe {
            (*exchange).mode = Mode::Guest;
            asm!(
                "push rbx",
                "push rbp",
                "lea rax, [rip + 2f]",
                "mov [rsi], rsp",
                "mov [rsi + 8], rax",
                "mov rsp, rdi",
                "mov eax, {sigreturn}",
                "syscall",
                "ud2",
                "2:",
                "pop rbp",
                "pop rbx",
                sigreturn = const libc::SYS_rt_sigreturn,
                inlateout("rdi") &raw mut (*exchange).context => _,
                inlateout("rsi") &raw mut (*exchange).host_rsp => _,
                lateout("r12") _, lateout("r13") _, lateout("r14") _, lateout("r15") _,
                clobber_abi("sysv64"),
            );
            assert_eq!((*exchange).mode, Mode::Host, "only the handler leaves the guest");
            (*exchange).left
        }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        // SAFETY: takes no argument.
        let here = unsafe { libc::gettid() };
        match self.attached.take() {
            Some(attached) if attached.thread != here => {
                // Its thread is elsewhere and may still get a signal: let it keep its stack and
                // the exchange that it knows.
                std::mem::forget(attached.stack);
                return;
            }
            Some(attached) => {
                CURRENT.with(|current| current.set(ptr::null_mut()));
                drop(attached.stack);
            }
            None => {}
        }
        // SAFETY: made by `Box::leak`, and nobody else knows it any more.
        drop(unsafe { Box::from_raw(self.exchange.as_ptr()) });
    }
}

/// The handler of kicks and faults, on the vCPU's signal stack or, on other threads, on theirs.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let exchange = CURRENT.with(Cell::get);
    // SAFETY: not null means that this thread is a vCPU's and the exchange its own. In the two
    // modes that `leave` handles the interrupted code holds no reference into it. The kernel
    // passes a frame that is ours until the return.
    let handled = unsafe {
        !exchange.is_null() && (*exchange).mode != Mode::Host && {
            leave(&mut *exchange, signal, &mut *context.cast());
            true
        }
    };
    // A kick that hits nobody was for a guest that had just left.
    if !handled && signal != KICK {
        // SAFETY: the kernel's arguments, passed on as they are.
        unsafe { Previous::pass_on(previous(signal), signal, info, context) };
    }
}

/// Takes the guest's registers out of the frame and puts the host's there.
///
/// # Safety
/// `frame` is what the kernel passed to a handler.
unsafe fn leave(exchange: &mut Exchange, signal: c_int, frame: &mut SignalContext) {
    // SAFETY: the kernel's frame points to its floating point part, as long as that says.
    unsafe {
        let fp = ptr::with_exposed_provenance::<u8>(host_address(frame.fpstate));
        let length = fp_bytes(fp);
        if length > FP_BYTES_MAX {
            // Found out in `Learn`, which stays: the frames of a process are all alike.
            return;
        }
        ptr::copy_nonoverlapping(fp, exchange.fp.as_mut_ptr(), length);
    }
    if exchange.mode == Mode::Learn {
        exchange.context = *frame;
        exchange.mode = Mode::Host;
        return;
    }
    let segments = Register::SEGMENTS.index();
    let own_segments = exchange.context.gregs[segments];
    exchange.context.gregs = frame.gregs;
    exchange.context.gregs[segments] = own_segments;
    exchange.left = Left {
        signal,
        trap: frame.gregs[Register::TRAP.index()],
        address: frame.gregs[Register::FAULT_ADDRESS.index()],
    };
    frame.gregs[Register::RIP.index()] = exchange.host_rip;
    frame.gregs[Register::RSP.index()] = exchange.host_rsp;
    frame.gregs[Register::FLAGS.index()] = HOST_FLAGS;
    frame.gregs[segments] = own_segments;
    frame.fpstate = (&raw const exchange.host_fp).expose_provenance() as u64;
    frame.mask = exchange.host_mask;
    exchange.mode = Mode::Host;
}

#[expect(clippy::cast_possible_truncation, reason = "martlet is for 64-bit hosts")]
fn host_address(value: u64) -> usize {
    value as usize
}

/// What handled each of [`FAULTS`] before.
static PREVIOUS: OnceLock<Result<[Previous; FAULTS.len()], i32>> = OnceLock::new();

fn previous(signal: c_int) -> Option<&'static Previous> {
    let index = FAULTS.iter().position(|fault| *fault == signal)?;
    PREVIOUS.get()?.as_ref().ok()?.get(index)
}

/// Installs the handler for the whole process, once. Faults that are not a guest's go on to the
/// handlers that were there.
fn install_handlers() -> Result<(), BackendError> {
    // SAFETY: the handler only does what handlers may; on a thread that is no vCPU of this kind it
    // does nothing.
    unsafe { kick::install_with(on_signal) }.map_err(BackendError::host("sigaction"))?;
    let installed = PREVIOUS.get_or_init(|| {
        // SAFETY: the handler only does what handlers may.
        let replace = |signal| unsafe { Previous::replace(signal, on_signal) };
        let install = || {
            let previous = FAULTS.map(replace);
            let [a, b, c, d, e] = previous;
            io::Result::Ok([a?, b?, c?, d?, e?])
        };
        install().map_err(|error| error.raw_os_error().unwrap_or(0))
    });
    match installed {
        Ok(_) => Ok(()),
        Err(errno) => Err(BackendError::host("sigaction")(io::Error::from_raw_os_error(*errno))),
    }
}

/// Sets which signals this thread blocks, all 64 of them; the C library would leave its own open.
fn set_mask(mask: u64) -> Result<(), BackendError> {
    // SAFETY: the kernel reads a mask of the length that is given.
    let result = unsafe {
        let none = ptr::null_mut::<u64>();
        let length = size_of::<u64>();
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, none, length)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(BackendError::host("rt_sigprocmask")(io::Error::last_os_error()))
    }
}
