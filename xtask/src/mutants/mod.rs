//! Which check catches which fault: each mutation puts one fault into a copy of the sources, and
//! the test that is named for it must fail there.
//!
//! A mutation that nothing catches is a test that is missing. One whose text is not found any more
//! is an error too: the list stays current, or it says nothing.

mod list;
mod tree;

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::time::Instant;
use tree::{Ended, Tree};

pub(crate) const USAGE: &str = "usage: cargo xtask mutants [--only NAME]... [--list] [--json]

Puts one fault after the other into a copy of the sources, and fails if the test that is named for
it does not. Each test must pass first as long as there is no fault. --only takes the mutations
whose names or tests contain NAME. --list names all, and builds nothing. --json prints one object at the end,
and what is being done on standard error. The copy and what is built of it are in target/mutants.";

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
    /// The test does not pass without the fault, so that its failure would say nothing.
    FailsAnyway,
    /// There is no test of that name.
    NoTest,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Caught => "caught",
            Outcome::Hung => "hung",
            Outcome::Survived => "SURVIVED",
            Outcome::DoesNotBuild => "DOES NOT BUILD",
            Outcome::FailsAnyway => "FAILS ANYWAY",
            Outcome::NoTest => "NO SUCH TEST",
        }
    }

    fn is_caught(self) -> bool {
        match self {
            Outcome::Caught | Outcome::Hung => true,
            Outcome::Survived | Outcome::DoesNotBuild | Outcome::FailsAnyway | Outcome::NoTest => {
                false
            }
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
        let text = format!("{} {}", mutation.name, mutation.test);
        self.only.is_empty() || self.only.iter().any(|part| text.contains(part.as_str()))
    }
}

/// Runs the mutations and reports them.
pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    check_all(&crate::root())?;
    let chosen: Vec<&Mutation> = list::all().filter(|one| options.wants(one)).collect();
    if chosen.is_empty() {
        return Err("no mutation has such a name; see --list".to_owned());
    }
    if options.list {
        for mutation in &chosen {
            println!("{:<44} {}", mutation.name, mutation.test);
        }
        return Ok(());
    }
    let began = Instant::now();
    let mut bench = Bench { tree: Tree::copy()?, sound: BTreeMap::new() };
    let mut rows = Vec::new();
    let mut missed = Vec::new();
    for (number, mutation) in (1..).zip(&chosen) {
        let began = Instant::now();
        if options.json {
            eprintln!("{number}/{}: {}", chosen.len(), mutation.name);
        }
        let outcome = bench.put_to_test(mutation)?;
        let seconds = began.elapsed().as_secs();
        if !options.json {
            println!("{:<44} {:<15} {seconds:>4} s", mutation.name, outcome.word());
        }
        rows.push(row(mutation, outcome, seconds));
        if !outcome.is_caught() {
            missed.push(format!("{}: {}, by {}", mutation.name, outcome.word(), mutation.test));
        }
    }
    let (count, seconds) = (chosen.len(), began.elapsed().as_secs());
    let caught = count - missed.len();
    if options.json {
        let object = json!({
            "mutations": rows,
            "count": count,
            "caught": caught,
            "tests": bench.sound.len(),
            "seconds": seconds,
        });
        println!("{object}");
    } else {
        println!(
            "{count} mutations of {} files, {} tests, {seconds} s: {caught} caught",
            files(&chosen),
            bench.sound.len()
        );
    }
    if missed.is_empty() {
        return Ok(());
    }
    Err(format!("{} of {count} not caught\n       {}", missed.len(), missed.join("\n       ")))
}

fn files(mutations: &[&Mutation]) -> usize {
    mutations.iter().map(|mutation| mutation.file).collect::<BTreeSet<_>>().len()
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

/// The copy, and what is known of the tests in it.
struct Bench {
    tree: Tree,
    /// Whether a test can say something: what is wrong with it, if not.
    sound: BTreeMap<Test, Option<Outcome>>,
}

impl Bench {
    /// Whether the test passes as long as there is no fault; what is wrong with it, if not.
    fn wrong_with(&mut self, test: Test) -> Result<Option<Outcome>, String> {
        if let Some(known) = self.sound.get(&test) {
            return Ok(*known);
        }
        let wrong = if self.tree.builds(test)? {
            match self.tree.run(test)? {
                Ended::Passed => None,
                Ended::Failed | Ended::TooLate => Some(Outcome::FailsAnyway),
                Ended::NotFound => Some(Outcome::NoTest),
            }
        } else {
            Some(Outcome::FailsAnyway)
        };
        self.sound.insert(test, wrong);
        Ok(wrong)
    }

    fn put_to_test(&mut self, mutation: &Mutation) -> Result<Outcome, String> {
        if let Some(wrong) = self.wrong_with(mutation.test)? {
            return Ok(wrong);
        }
        let text = self.tree.read(mutation.file)?;
        self.tree.write(mutation.file, &mutated(mutation, &text)?)?;
        let outcome = if self.tree.builds(mutation.test)? {
            match self.tree.run(mutation.test)? {
                Ended::Passed => Outcome::Survived,
                Ended::Failed => Outcome::Caught,
                Ended::TooLate => Outcome::Hung,
                Ended::NotFound => Outcome::NoTest,
            }
        } else {
            Outcome::DoesNotBuild
        };
        self.tree.write(mutation.file, &text)?;
        Ok(outcome)
    }
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
    for mutation in list::all() {
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
        let names: BTreeSet<&str> = list::all().map(|mutation| mutation.name).collect();
        assert_eq!(names.len(), list::all().count());
        assert!(list::all().all(|mutation| mutation.from != mutation.to));
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
