//! The martlet command: live migration of KVM guests. See `martlet --help`.

mod accelerator;
mod cli;
mod commands;
mod control;
mod failure;
#[cfg(test)]
mod fake;
mod guest;
mod limits;
mod log;
mod output;
mod parameters;
mod qmp;
mod report_json;
mod scratch;
mod seen;
mod signals;
mod snapshot;
mod vdpa;
mod view;
mod vm;

use clap::Parser;
use clap::error::ErrorKind;
use cli::{Cli, Command};
use failure::{ExitStatus, Failure};
use log::{Log, note};
use martlet_transport::SocketFile;
use signals::{Held, Signal};
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    signals::survive_file_size_limit();
    limits::raise_descriptors();
    let cli = Cli::try_parse();
    // Before the first thread, which is the log's.
    let held = cli.as_ref().map_or(Ok(None), |cli| hold_signals(&cli.command));
    let log = match Log::start() {
        Ok(log) => log,
        Err(error) => {
            let _ = writeln!(io::stderr(), "martlet: cannot start a thread: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = match (cli, held) {
        (Err(error), _) => return usage(&error),
        (_, Err(error)) => Err(Failure::because("cannot take signals", &error)),
        (Ok(cli), Ok(held)) => log.filter(cli.log.as_deref()).and_then(|()| run(&cli, held)),
    };
    let status = conclude(result);
    // Threads that end with the process keep what owns them.
    SocketFile::remove_all();
    status
}

/// Holds back the signals that the command takes; to all others they do what they always do. A
/// `migrate` whose terminal is gone just ends: the migration does not need it.
fn hold_signals(command: &Command) -> io::Result<Option<Held>> {
    let signals: &[Signal] = match command {
        Command::Run(_) | Command::Receive(_) | Command::Demo(_) => {
            &[Signal::Interrupt, Signal::Terminate, Signal::HangUp]
        }
        Command::Migrate(_) => &[Signal::Interrupt, Signal::Terminate],
        Command::Status(_)
        | Command::Cancel(_)
        | Command::Stop(_)
        | Command::Cont(_)
        | Command::Powerdown(_)
        | Command::Quit(_)
        | Command::Resolve(_)
        | Command::Bench(_)
        | Command::Sim(_) => return Ok(None),
    };
    Held::hold(signals).map(Some)
}

fn run(cli: &Cli, held: Option<Held>) -> Result<(), Failure> {
    let held = || held.expect("held for every command that takes signals");
    match &cli.command {
        Command::Run(args) => commands::serve::run(args, held()),
        Command::Receive(args) => commands::serve::receive(args, held()),
        Command::Migrate(args) => commands::migrate::run(args, held()),
        Command::Status(args) => commands::status::run(args),
        Command::Cancel(args) => commands::owner::cancel(args),
        Command::Stop(args) => commands::owner::stop(args),
        Command::Cont(args) => commands::owner::cont(args),
        Command::Powerdown(args) => commands::owner::powerdown(args),
        Command::Quit(args) => commands::owner::quit(args),
        Command::Resolve(args) => commands::owner::resolve(args),
        Command::Demo(args) => commands::demo::run(args, cli.log.as_deref(), held()),
        Command::Bench(command) => commands::bench::run(command),
        Command::Sim(command) => commands::sim::run(command),
    }
}

/// Help and version as clap prints them; anything else as one line.
fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A closed pipe: the reader had enough.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitStatus::Usage.into()
        }
        _ => conclude(Err(Failure::Usage(cli::one_line(error)))),
    }
}

fn conclude(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    if !failure.is_said() {
        note(format_args!("{}", failure::one_line(&failure.to_string())));
    }
    failure.exit_status().into()
}

/// Writes to standard output at once.
pub(crate) fn out(text: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_fmt(text)?;
    stdout.flush()?;
    Ok(())
}
