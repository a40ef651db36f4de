//! The martlet command: live migration of KVM guests. See `martlet --help`.

mod accelerator;
mod cli;
mod commands;
mod control;
mod control_socket;
mod failure;
#[cfg(test)]
mod fake;
mod guest;
mod qmp;
mod report_json;
mod scratch;
mod signals;
mod snapshot;
mod vdpa;
mod view;
mod vm;

use clap::Parser;
use clap::error::ErrorKind;
use cli::{Cli, Command};
use failure::{EXIT_FAILURE, EXIT_UNDECIDED, EXIT_USAGE, Failure};
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    if let Err(error) = init_log(cli.log.as_deref()) {
        return conclude(Err(error));
    }
    conclude(match &cli.command {
        Command::Run(args) => commands::serve::run(args),
        Command::Receive(args) => commands::serve::receive(args),
        Command::Migrate(args) => commands::migrate::run(args),
        Command::Status(args) => commands::status::run(args),
        Command::Cancel(args) => commands::owner::cancel(args),
        Command::Stop(args) => commands::owner::stop(args),
        Command::Cont(args) => commands::owner::cont(args),
        Command::Quit(args) => commands::owner::quit(args),
        Command::Resolve(args) => commands::owner::resolve(args),
        Command::Demo(args) => commands::demo::run(args, cli.log.as_deref()),
        Command::Bench(command) => commands::bench::run(command),
        Command::Sim(command) => commands::sim::run(command),
    })
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
            ExitCode::from(EXIT_USAGE)
        }
        _ => conclude(Err(Failure::Usage(cli::one_line(error)))),
    }
}

fn conclude(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    match &failure {
        Failure::Reported => return ExitCode::from(EXIT_FAILURE),
        Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            return ExitCode::SUCCESS;
        }
        Failure::Usage(_) | Failure::Failed(_) | Failure::Undecided(_) | Failure::Output(_) => {}
    }
    note(format_args!("{}", failure::one_line(&failure.to_string())));
    match failure {
        Failure::Usage(_) => ExitCode::from(EXIT_USAGE),
        Failure::Undecided(_) => ExitCode::from(EXIT_UNDECIDED),
        Failure::Failed(_) | Failure::Reported | Failure::Output(_) => ExitCode::from(EXIT_FAILURE),
    }
}

/// One line on standard error, for the owner. A closed standard error is no reason to end.
pub(crate) fn note(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "martlet: {text}");
}

/// Writes to standard output at once.
pub(crate) fn out(text: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_fmt(text)?;
    stdout.flush()?;
    Ok(())
}

/// Logs on standard error: what `--log` or `RUST_LOG` says, else warnings.
fn init_log(filter: Option<&str>) -> Result<(), Failure> {
    use tracing_subscriber::EnvFilter;
    let from_env = std::env::var("RUST_LOG").ok();
    let text = filter.or(from_env.as_deref()).filter(|text| !text.is_empty()).unwrap_or("warn");
    let filter = EnvFilter::try_new(text)
        .map_err(|e| Failure::Usage(format!("`{text}` is not a log filter: {e}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    Ok(())
}
