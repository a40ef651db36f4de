//! A copy of the sources, in which faults are made and tests run.

use super::Test;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test may take. A fault may well make it wait for ever.
const TEST_MAX: Duration = Duration::from_secs(300);
/// Between two looks at a test that runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Passed,
    Failed,
    /// Its name is no test's.
    NotFound,
    TooLate,
}

/// The copy.
pub(super) struct Tree {
    root: PathBuf,
    target: PathBuf,
}

impl Tree {
    /// Copies what git tracks, as it is now. Files that are the same as in an earlier copy stay, so
    /// that nothing is built again for them.
    pub(super) fn copy() -> Result<Tree, String> {
        let folder = crate::root().join("target/mutants");
        let tree = Tree { root: folder.join("tree"), target: folder.join("target") };
        let names = crate::tracked()?;
        for name in names.split('\0').filter(|name| !name.is_empty()) {
            let from = crate::root().join(name);
            // One that is deleted and not committed yet.
            let Ok(content) = fs::read(&from) else { continue };
            let to = tree.root.join(name);
            if fs::read(&to).is_ok_and(|there| there == content) {
                continue;
            }
            let folder = to.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder)
                .and_then(|()| fs::write(&to, content))
                .map_err(|error| format!("cannot write {}: {error}", to.display()))?;
        }
        Ok(tree)
    }

    pub(super) fn read(&self, name: &str) -> Result<String, String> {
        fs::read_to_string(self.root.join(name)).map_err(|error| format!("{name}: {error}"))
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), String> {
        fs::write(self.root.join(name), text).map_err(|error| format!("{name}: {error}"))
    }

    /// Whether the test compiles.
    pub(super) fn builds(&self, test: Test) -> Result<bool, String> {
        if matches!(test, Test::Doc(..)) {
            return Ok(true);
        }
        let status = self
            .cargo(test)
            .arg("--no-run")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(|error| format!("cargo does not start: {error}"))?;
        Ok(status.success())
    }

    /// Runs it, and nothing else.
    pub(super) fn run(&self, test: Test) -> Result<Ended, String> {
        let mut command = self.cargo(test);
        command.args(["--", test.name()]);
        if !matches!(test, Test::Doc(..)) {
            command.arg("--exact");
        }
        // Those that it starts end with it.
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child =
            command.spawn().map_err(|error| format!("cargo does not start: {error}"))?;
        let Some(mut stdout) = child.stdout.take() else { return Err("no output".to_owned()) };
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stdout.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let ended = await_end(&mut child)?;
        let text = reader.join().unwrap_or_default();
        Ok(match ended {
            None => Ended::TooLate,
            Some(_) if !text.contains("running 1 test\n") => Ended::NotFound,
            Some(true) => Ended::Passed,
            Some(false) => Ended::Failed,
        })
    }

    fn cargo(&self, test: Test) -> Command {
        let mut command = Command::new(env!("CARGO"));
        command
            .arg("test")
            .args(test.target())
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target)
            .stdin(Stdio::null());
        command
    }
}

/// Whether it ended well; `None` if it had to be killed, with all that it started.
fn await_end(child: &mut Child) -> Result<Option<bool>, String> {
    let deadline = Instant::now() + TEST_MAX;
    loop {
        let ended = child.try_wait().map_err(|error| format!("cannot wait for cargo: {error}"))?;
        if let Some(status) = ended {
            return Ok(Some(status.success()));
        }
        if Instant::now() >= deadline {
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            let _ = child.wait();
            return Ok(None);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}
