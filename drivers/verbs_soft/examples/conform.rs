//! The conformance suite on a provider of this host, and what many writes in flight bring there.
//!
//! ```text
//! conform soft|ibv ADDRESS [--soft-roce] [--may-hide-late-reads] [--only TEXT] [--backlog-mib N]
//!                          [--trials N]
//! conform bench soft|ibv ADDRESS [--pages N]
//! conform devices ADDRESS            opens the device of an address in every way there is
//! conform add-rxe NAME NETDEV        a soft-RoCE device, as `rdma link add NAME type rxe` does
//! ```
//!
//! Ends with 1 if a case fails.

use martlet_verbs::conformance::{LateRead, Loopback, Profile, Violation, in_flight, run};
use martlet_verbs::ibv::{Ibv, Select};
use martlet_verbs::{Endpoint, Fabric};
use martlet_verbs_soft::Soft;
use std::process::ExitCode;

#[path = "conform/rxe.rs"]
mod rxe;

const USAGE: &str = "usage: conform soft|ibv ADDRESS [--soft-roce] [--may-hide-late-reads] \
[--only TEXT] [--backlog-mib N] [--trials N]
       conform bench soft|ibv ADDRESS [--pages N]
       conform devices ADDRESS
       conform add-rxe NAME NETDEV";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        ["add-rxe", name, netdev] => rxe::add(name, netdev).map_err(|error| error.to_string()),
        ["devices", address] => devices(address),
        ["bench", provider, address, options @ ..] => {
            Options::parse(options).and_then(|options| on(provider, address, &options, Task::Bench))
        }
        [provider, address, options @ ..] => Options::parse(options)
            .and_then(|options| on(provider, address, &options, Task::Conform)),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("conform: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    only: String,
    profile: Profile,
    pages: u32,
}

impl Options {
    fn parse(arguments: &[&str]) -> Result<Options, String> {
        let mut options =
            Options { only: String::new(), profile: Profile::default(), pages: 20_000 };
        let mut rest = arguments.iter();
        while let Some(&name) = rest.next() {
            match name {
                "--soft-roce" => {
                    options.profile = Profile::soft_roce();
                    continue;
                }
                "--may-hide-late-reads" => {
                    options.profile.late_read = LateRead::MayHide;
                    continue;
                }
                _ => {}
            }
            let value = *rest.next().ok_or_else(|| format!("{name} needs a value\n{USAGE}"))?;
            let number = || value.parse::<u32>().map_err(|_| format!("{name} {value}: no number"));
            match name {
                "--only" => value.clone_into(&mut options.only),
                "--backlog-mib" => {
                    options.profile.backlog_bytes =
                        usize::try_from(number()?).unwrap_or(usize::MAX) << 20;
                }
                "--trials" => options.profile.trials = number()?,
                "--pages" => options.pages = number()?,
                _ => return Err(format!("unknown option {name}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

/// Opens the device that owns `address` by that, by its name, by the way there, and as any.
fn devices(address: &str) -> Result<(), String> {
    let ip: std::net::IpAddr =
        address.parse().map_err(|_| format!("{address} is no IP address"))?;
    let open = |select: &Select| Ibv::open(select).map_err(|error| error.to_string());
    let name = open(&Select::Local(ip))?.name();
    let by_name = Select::Named(name.trim_start_matches("ibv ").to_owned());
    for select in [by_name, Select::Route((ip, 1).into()), Select::Any] {
        let found = open(&select)?.name();
        println!("{select:?}: {found}");
        if found != name && select != Select::Any {
            return Err(format!("{select:?} opens {found} instead of {name}"));
        }
    }
    for select in [Select::Named("none".to_owned()), Select::Local([192, 0, 2, 1].into())] {
        match Ibv::open(&select) {
            Ok(found) => return Err(format!("{select:?} opens {}", found.name())),
            Err(error) => println!("{select:?}: {error}"),
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Task {
    Conform,
    Bench,
}

fn on(provider: &str, address: &str, options: &Options, task: Task) -> Result<(), String> {
    let ip: std::net::IpAddr =
        address.parse().map_err(|_| format!("{address} is no IP address"))?;
    let at = Endpoint::Ip((ip, 0).into());
    match provider {
        "soft" => {
            perform(&Loopback { source: Soft::new(), target: Soft::new(), at }, options, task)
        }
        "ibv" => {
            let device = Ibv::open(&Select::Local(ip)).map_err(|error| error.to_string())?;
            perform(&Loopback { source: device.clone(), target: device, at }, options, task)
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn perform<F: Fabric>(site: &Loopback<F>, options: &Options, task: Task) -> Result<(), String> {
    println!("{}: {:?}", site.source.name(), site.source.limits());
    match task {
        Task::Conform => {
            let failed =
                run(site, &options.profile, &options.only, |name, outcome| match outcome {
                    Ok(note) if note.is_empty() => println!("ok    {name}"),
                    Ok(note) => println!("ok    {name}: {note}"),
                    Err(Violation(what)) => println!("WRONG {name}: {what}"),
                });
            if failed == 0 { Ok(()) } else { Err(format!("{failed} cases failed")) }
        }
        Task::Bench => {
            for depth in [1, 128] {
                let rate = in_flight(site, depth, options.pages).map_err(|wrong| wrong.0)?;
                println!("{depth} in flight: {:.1} MiB/s", rate.0 as f64 / f64::from(1 << 20));
            }
            Ok(())
        }
    }
}
