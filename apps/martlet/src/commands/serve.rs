//! `run` and `receive`: a process with a guest, or one that waits for it, behind a control
//! socket, until somebody ends it.

use crate::cli::{ReceiveArgs, RunArgs};
use crate::control::{Control, QuitCause};
use crate::failure::Failure;
use crate::log::{self, note};
use crate::qmp::server;
use crate::signals::{Held, Signal};
use crate::vm;
use martlet_transport::{Address, SocketFile, SocketFileError};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// How long clients get at the end to read what was written for them.
const FAREWELL_MAX: Duration = Duration::from_millis(500);
/// How long the control socket waits to be served for the address that a guest is to come to.
const LISTEN_FIRST_MAX: Duration = Duration::from_secs(1);

/// `martlet run`.
pub(crate) fn run(args: &RunArgs, signals: Held) -> Result<(), Failure> {
    die_with_parent(args.host.parent)?;
    let signals = SignalDesk::open(signals)?;
    let config = vm::run_config(args)?;
    // Before the machine: a socket in use must be noticed before memory is filled.
    let socket = open_control(&args.control.path)?;
    let guest = vm::boot(&config, &args.host)?;
    if !args.paused {
        guest.cont().map_err(Failure::Failed)?;
    }
    let info = guest.info();
    let stands = if args.paused { "is paused" } else { "runs" };
    note(format_args!(
        "the guest {stands} on {}; control socket {}",
        info.accel,
        args.control.path.display()
    ));
    let control = Control::with_guest(guest);
    serve(&socket, &control, &signals)
}

/// `martlet receive`.
pub(crate) fn receive(args: &ReceiveArgs, signals: Held) -> Result<(), Failure> {
    die_with_parent(args.host.parent)?;
    let signals = SignalDesk::open(signals)?;
    let listen = vm::listener(args)?;
    let socket = open_control(&args.control.path)?;
    let control = Control::waiting(listen);
    match &args.listen {
        Some(address) => listen_soon(&control, address, &args.control.path)?,
        None => {
            note(format_args!("waiting for migrate-incoming at {}", args.control.path.display()));
        }
    }
    serve(&socket, &control, &signals)
}

/// Opens the address, and asks the process to end if that fails. Returns when either is done, so
/// that whoever is answered on the control socket finds the address open; but a name may take long
/// to resolve, and its owner is heard meanwhile.
fn listen_soon(control: &Arc<Control>, address: &Address, path: &Path) -> Result<(), Failure> {
    let (done, opened) = mpsc::channel::<()>();
    let (control, address, path) = (Arc::clone(control), address.clone(), path.to_owned());
    let open = move || {
        match control.receive(&address) {
            Ok(()) => {
                let address = control.incoming_address().unwrap_or(address);
                let path = path.display();
                note(format_args!("waiting for a guest at {address}; control socket {path}"));
            }
            Err(reason) => control.cannot_listen(reason),
        }
        drop(done);
    };
    thread::Builder::new()
        .name("listen".to_owned())
        .spawn(open)
        .map_err(|e| Failure::because("cannot start a thread", &e))?;
    let _ = opened.recv_timeout(LISTEN_FIRST_MAX);
    Ok(())
}

/// Opens the control socket. Whoever can write to it owns the guest.
fn open_control(path: &Path) -> Result<SocketFile, Failure> {
    SocketFile::bind(path).map_err(|error| {
        let text = format!("cannot open control socket {}: {error}", path.display());
        match error {
            SocketFileError::Length { .. } => Failure::Usage(text),
            _ => Failure::Failed(text),
        }
    })
}

/// Serves clients until the process is to end, and ends it in order. Afterwards the control
/// socket is gone from the file system.
fn serve(socket: &SocketFile, control: &Arc<Control>, signals: &SignalDesk) -> Result<(), Failure> {
    signals.set(Desk::Serving(Arc::clone(control)));
    let listener = socket.listener().try_clone();
    let listener = listener.map_err(|e| Failure::because("control socket", &e))?;
    let clients = server::serve(listener, Arc::clone(control));
    let end = control.wait_for_quit();
    // Gone from the file system first: whoever sees this process end may start the next one.
    socket.remove();
    clients.finish(FAREWELL_MAX);
    match end? {
        QuitCause::CannotListen(reason) => Err(Failure::Failed(reason)),
        QuitCause::Command | QuitCause::Signal | QuitCause::Guest(_) => Ok(()),
    }
}

/// What a signal does: it depends on how far the process is.
struct SignalDesk(Arc<Mutex<Desk>>);

enum Desk {
    /// Nothing is there to be ended in order: a signal ends the process.
    Starting,
    /// A signal asks this one to quit.
    Serving(Arc<Control>),
}

impl SignalDesk {
    fn open(signals: Held) -> Result<SignalDesk, Failure> {
        let desk = SignalDesk(Arc::new(Mutex::new(Desk::Starting)));
        let shared = Arc::clone(&desk.0);
        signals
            .deliver(move |signal| {
                if signal == Signal::HangUp {
                    // A guest outlives the terminal that it was started from, as it does with
                    // every other daemon.
                    return note(format_args!("SIGHUP is ignored; SIGTERM ends this process"));
                }
                match &*shared.lock().unwrap_or_else(PoisonError::into_inner) {
                    Desk::Serving(control) if control.quit_by_signal() => return,
                    Desk::Serving(_) | Desk::Starting => {}
                }
                log::exit(signal.exit_status());
            })
            .map_err(|e| Failure::because("cannot take signals", &e))?;
        Ok(desk)
    }

    /// From now on a signal does this.
    fn set(&self, desk: Desk) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = desk;
    }
}

/// Asks the kernel to end this process when its parent has died. `expected` is who that should
/// be: if it died before we asked, we have another parent by now.
fn die_with_parent(expected: Option<u32>) -> Result<(), Failure> {
    let Some(expected) = expected else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|e| Failure::because("cannot follow the parent process", &e))?;
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent.and_then(|pid| u32::try_from(pid).ok()) == Some(expected) {
        Ok(())
    } else {
        Err(Failure::Failed("the parent process is gone".to_owned()))
    }
}
