//! The form of the tables that both machines obey.

/// What a machine does with a kind of event in one of its phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reaction<Phase: 'static> {
    /// It acts, and is then in one of these phases, or has failed (see the phase's fallback).
    Act(&'static [Phase]),
    /// Nothing: it came too late, or says nothing new.
    Ignore,
    /// The attempt fails, and to blame is the peer.
    PeerFault,
    /// The attempt fails, and to blame is whoever drives the machine.
    Misuse,
}

/// Prints a machine's table: one block for each phase, one line for each kind of event.
#[cfg(test)]
pub(crate) fn print_table<
    Phase: Copy + PartialEq + core::fmt::Debug,
    Kind: Copy + core::fmt::Debug,
>(
    phases: &[Phase],
    kinds: &[Kind],
    reaction: impl Fn(Phase, Kind) -> Reaction<Phase>,
    fallback: impl Fn(Phase) -> Phase,
) -> String {
    use core::fmt::Write;
    let mut text = String::new();
    for &phase in phases {
        let end = fallback(phase);
        let on_failure = if end == phase {
            "nothing fails it".to_owned()
        } else {
            format!("on failure {end:?}")
        };
        writeln!(text, "{phase:?} ({on_failure})").expect("memory");
        for &kind in kinds {
            let does = match reaction(phase, kind) {
                Reaction::Act(next) => {
                    let names: Vec<String> = next.iter().map(|to| format!("{to:?}")).collect();
                    names.join(" | ")
                }
                Reaction::Ignore => continue,
                Reaction::PeerFault => "peer's fault".to_owned(),
                Reaction::Misuse => "misuse".to_owned(),
            };
            writeln!(text, "    {:<24} {does}", format!("{kind:?}")).expect("memory");
        }
    }
    text
}
