//! The form of the tables that both machines obey.

/// Declares an enum each of whose values has words for a sentence.
macro_rules! labelled {
    ($(#[$of:meta])* $vis:vis enum $name:ident {
        $($(#[$doc:meta])* $variant:ident = $label:literal,)*
    }) => {
        $(#[$of])*
        $vis enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            #[cfg(test)]
            pub(crate) const ALL: &'static [$name] = &[$($name::$variant),*];

            /// For a sentence.
            $vis fn label(self) -> &'static str {
                match self {
                    $($name::$variant => $label,)*
                }
            }
        }
    };
}
pub(crate) use labelled;

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

/// Prints a machine's table: one block for each phase, in it what each kind of event leads to.
/// Kinds that are ignored are left out.
#[cfg(test)]
pub(crate) fn print_table<Phase, Kind>(
    phases: &[Phase],
    kinds: &[Kind],
    reaction: impl Fn(Phase, Kind) -> Reaction<Phase>,
    fallback: impl Fn(Phase) -> Phase,
) -> String
where
    Phase: Copy + PartialEq + core::fmt::Debug + 'static,
    Kind: Copy + core::fmt::Debug,
{
    let mut text = String::new();
    for &phase in phases {
        let end = fallback(phase);
        text += &format!("{phase:?}\n");
        let (mut by_peer, mut by_driver) = (Vec::new(), Vec::new());
        for &kind in kinds {
            let name = format!("{kind:?}");
            match reaction(phase, kind) {
                Reaction::Act(next) => {
                    let next: Vec<String> = next.iter().map(|to| format!("{to:?}")).collect();
                    text += &format!("    {name:<24} {}\n", next.join(" | "));
                }
                Reaction::Ignore => {}
                Reaction::PeerFault => by_peer.push(name),
                Reaction::Misuse => by_driver.push(name),
            }
        }
        for (whose, names) in [("peer's fault", by_peer), ("misuse", by_driver)] {
            if !names.is_empty() {
                text += &format!("    {whose} -> {end:?}: {}\n", names.join(", "));
            }
        }
    }
    text
}
