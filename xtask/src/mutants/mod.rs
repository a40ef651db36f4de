//! Which check catches which fault: each mutation puts one fault into a copy of the sources, and
//! the test that is named for it must fail there.
//!
//! A mutation that nothing catches is a test that is missing. One whose text is not found any more
//! is an error too: the list stays current, or it says nothing.

mod list;
mod tree;

use list::MUTATIONS;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::Instant;
use tree::{Ended, Tree};

pub(crate) const USAGE: &str = "usage: cargo xtask mutants [--only NAME]... [--list] [--json]

Puts one fault after the other into a copy of the sources, and fails if the test that is named for
it does not. --only takes the mutations whose names contain NAME. --list names all, and builds
nothing. The copy and what is built of it are in target/mutants.";

/// A fault, and what must catch it.
pub(crate) struct Mutation {
    name: &'static str,
    file: &'static str,
    /// Text that is in the file once.
    from: &'static str,
    to: &'static str,
    test: Test,
}

/// A test of one package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Test {
    /// Of the library.
    Lib(&'static str, &'static str),
    /// Of the command.
    Bin(&'static str, &'static str),
    /// Of an integration test: package, its name, the test's.
    Of(&'static str, &'static str, &'static str),
    /// A piece of documentation that must not compile, or must: its file and item.
    Doc(&'static str, &'static str),
}

impl Test {
    fn name(self) -> &'static str {
        match self {
            Test::Lib(_, name) | Test::Bin(_, name) | Test::Of(_, _, name) | Test::Doc(_, name) => {
                name
            }
        }
    }

    /// What cargo is told to build and run.
    fn target(self) -> Vec<&'static str> {
        match self {
            Test::Lib(package, _) => vec!["--package", package, "--lib"],
            Test::Bin(package, _) => vec!["--package", package, "--bins"],
            Test::Of(package, test, _) => vec!["--package", package, "--test", test],
            Test::Doc(package, _) => vec!["--package", package, "--doc"],
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = if matches!(self, Test::Doc(..)) { "" } else { " --exact" };
        write!(f, "cargo test {} -- {}{exact}", self.target().join(" "), self.name())
    }
}

/// What became of a mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The test failed, as it should.
    Caught,
    /// The test did not end, which nobody would overlook.
    Hung,
    /// The test passed.
    Survived,
    /// The mutated sources don't compile: the fault can't be made any more, or the text is wrong.
    DoesNotBuild,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Caught => "caught",
            Outcome::Hung => "hung",
            Outcome::Survived => "SURVIVED",
            Outcome::DoesNotBuild => "DOES NOT BUILD",
        }
    }

    fn is_caught(self) -> bool {
        match self {
            Outcome::Caught | Outcome::Hung => true,
            Outcome::Survived | Outcome::DoesNotBuild => false,
        }
    }
}

struct Options {
    only: Vec<String>,
    list: bool,
    json: bool,
}

impl Options {
    fn parse(arguments: &[&str]) -> Result<Options, String> {
        let mut options = Options { only: Vec::new(), list: false, json: false };
        let mut rest = arguments.iter();
        while let Some(&name) = rest.next() {
            match name {
                "--list" => options.list = true,
                "--json" => options.json = true,
                "--only" => {
                    let value = rest.next().ok_or("--only needs a name")?;
                    options.only.push((*value).to_owned());
                }
                _ => return Err(format!("unknown option {name}\n{USAGE}")),
            }
        }
        Ok(options)
    }

    fn wants(&self, mutation: &Mutation) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| mutation.name.contains(part.as_str()))
    }
}

/// Runs the mutations and reports them.
pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    check_all(&crate::root())?;
    let chosen: Vec<&Mutation> = MUTATIONS.iter().filter(|one| options.wants(one)).collect();
    if chosen.is_empty() {
        return Err("no mutation has such a name; see --list".to_owned());
    }
    if options.list {
        for mutation in &chosen {
            println!("{:<36} {}", mutation.name, mutation.test);
        }
        return Ok(());
    }
    let tree = Tree::copy()?;
    check_tests(&tree, &chosen)?;
    let mut rows = Vec::new();
    let mut survivors = Vec::new();
    for mutation in &chosen {
        let began = Instant::now();
        let outcome = put_to_test(&tree, mutation)?;
        let seconds = began.elapsed().as_secs();
        if !options.json {
            println!("{:<36} {:<15} {seconds:>4} s", mutation.name, outcome.word());
        }
        rows.push(row(mutation, outcome, seconds));
        if !outcome.is_caught() {
            survivors.push(format!("{}: {}, by {}", mutation.name, outcome.word(), mutation.test));
        }
    }
    if options.json {
        println!("{}", json!({ "mutations": rows, "survivors": survivors.len() }));
    }
    if survivors.is_empty() {
        return Ok(());
    }
    Err(format!("{} of {} not caught\n       {}", survivors.len(), chosen.len(), {
        survivors.join("\n       ")
    }))
}

fn row(mutation: &Mutation, outcome: Outcome, seconds: u64) -> Value {
    json!({
        "name": mutation.name,
        "file": mutation.file,
        "test": mutation.test.to_string(),
        "outcome": outcome.word().to_lowercase(),
        "seconds": seconds,
    })
}

/// Every test passes as long as there is no fault; or its failure would say nothing.
fn check_tests(tree: &Tree, chosen: &[&Mutation]) -> Result<(), String> {
    let tests: BTreeSet<Test> = chosen.iter().map(|mutation| mutation.test).collect();
    for test in tests {
        if !tree.builds(test)? {
            return Err(format!("{test}: does not build"));
        }
        match tree.run(test)? {
            Ended::Passed => {}
            Ended::Failed => return Err(format!("{test}: fails without any fault")),
            Ended::NotFound => return Err(format!("{test}: there is no such test")),
            Ended::TooLate => return Err(format!("{test}: does not end without any fault")),
        }
    }
    Ok(())
}

fn put_to_test(tree: &Tree, mutation: &Mutation) -> Result<Outcome, String> {
    let text = tree.read(mutation.file)?;
    tree.write(mutation.file, &mutated(mutation, &text)?)?;
    let outcome = if matches!(mutation.test, Test::Doc(..)) || tree.builds(mutation.test)? {
        match tree.run(mutation.test)? {
            Ended::Passed => Ok(Outcome::Survived),
            Ended::Failed => Ok(Outcome::Caught),
            Ended::TooLate => Ok(Outcome::Hung),
            Ended::NotFound => Err(format!("{}: there is no such test", mutation.test)),
        }
    } else {
        Ok(Outcome::DoesNotBuild)
    };
    tree.write(mutation.file, &text)?;
    outcome
}

/// The file's text with the fault in it.
fn mutated(mutation: &Mutation, text: &str) -> Result<String, String> {
    match text.matches(mutation.from).count() {
        1 => Ok(text.replacen(mutation.from, mutation.to, 1)),
        count => Err(format!(
            "{}: its text is in {} {count} times, not once: mend the list",
            mutation.name, mutation.file
        )),
    }
}

/// Every mutation can still be made.
fn check_all(root: &Path) -> Result<(), String> {
    let mut wrong = Vec::new();
    for mutation in MUTATIONS {
        let path = root.join(mutation.file);
        let text = std::fs::read_to_string(&path);
        let made = text
            .map_err(|error| format!("{}: {}: {error}", mutation.name, mutation.file))
            .and_then(|text| mutated(mutation, &text));
        wrong.extend(made.err());
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n       ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_can_be_made_and_has_a_name_of_its_own() {
        check_all(&crate::root()).expect("the list is current");
        let names: BTreeSet<&str> = MUTATIONS.iter().map(|mutation| mutation.name).collect();
        assert_eq!(names.len(), MUTATIONS.len());
        assert!(MUTATIONS.iter().all(|mutation| mutation.from != mutation.to));
    }

    #[test]
    fn a_text_that_is_not_there_once_is_an_error() {
        let mutation = Mutation {
            name: "one",
            file: "a.rs",
            from: "yes",
            to: "no",
            test: Test::Lib("a", "b"),
        };
        assert_eq!(mutated(&mutation, "yes!").expect("it is there"), "no!");
        assert!(mutated(&mutation, "yes yes").is_err());
        assert!(mutated(&mutation, "").is_err());
    }

    #[test]
    fn tests_are_named_as_cargo_wants_them() {
        let of = Test::Of("martlet", "hostile", "floods::endless");
        assert_eq!(
            of.to_string(),
            "cargo test --package martlet --test hostile -- floods::endless --exact"
        );
    }
}
