//! What came of a lane, for people and for programs.

use super::Lane;
use super::machine::Run;
use serde_json::{Map, Value, json};

/// How a test says that it can't run on a host.
const SKIPPED: &str = "skipped, for want of";

/// See the module's comment.
pub(super) struct Summary {
    lane: &'static str,
    kernel: String,
    passed: usize,
    /// What failed, each as one line.
    failed: Vec<String>,
    /// Guests that were moved, in all steps.
    pub(super) moves: u64,
    figures: Map<String, Value>,
}

impl Summary {
    pub(super) fn new(lane: &'static str, kernel: String) -> Summary {
        let (failed, figures) = (Vec::new(), Map::new());
        Summary { lane, kernel, passed: 0, failed, moves: 0, figures }
    }

    /// Adds one emulated PC's steps: each must have ended well, and nothing else gone wrong. What
    /// other hosts lack is there, so no test may be skipped.
    pub(super) fn judge(&mut self, lane: &Lane, run: &Run) {
        for ((step, ending), lines) in lane.steps.iter().zip(&run.endings).zip(&run.output) {
            let skipped = lines.iter().find_map(|line| line.find(SKIPPED).map(|at| &line[at..]));
            match (ending, skipped) {
                (Some(0), None) => self.passed += 1,
                (Some(0), Some(why)) => self.failed.push(format!("{}: {why}", step.name)),
                (Some(status), _) => self.failed.push(format!("{} ended with {status}", step.name)),
                (None, _) => self.failed.push(format!("{} did not end", step.name)),
            }
        }
        self.failed.extend(run.wrong.iter().cloned());
    }

    /// Adds a check that ran outside of the emulated PC and passed.
    pub(super) fn pass(&mut self) {
        self.passed += 1;
    }

    pub(super) fn figure(&mut self, name: &str, value: f64) {
        self.figures.insert(name.to_owned(), value.into());
    }

    /// What failed, in one line.
    pub(super) fn failure(&self) -> Option<String> {
        (!self.failed.is_empty()).then(|| self.failed.join("; "))
    }

    /// All of it as one line.
    pub(super) fn json(&self) -> String {
        json!({
            "lane": self.lane,
            "kernel": self.kernel,
            "passed": self.passed,
            "failed": self.failed.len(),
            "moves": self.moves,
            "figures": self.figures,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Step;
    use super::super::machine::Pinning;
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_step_must_end_well() {
        let step = |name| Step { name, line: String::new(), limit: Duration::ZERO };
        let lane = Lane {
            modules: &[],
            prepare: &[],
            verbs: false,
            programs: Vec::new(),
            steps: vec![step("one"), step("two"), step("three"), step("four")],
            memory_mib: 0,
            limit: Duration::ZERO,
            pinning: Pinning::None,
        };
        let mut summary = Summary::new("x", "6.12".to_owned());
        let wrong = vec!["kernel WARNING: here".to_owned()];
        let endings = vec![Some(0), Some(3), None, Some(0)];
        let mut output = vec![Vec::new(); 4];
        output[3].push("test a::b ... skipped, for want of kvm: none".to_owned());
        summary.judge(&lane, &Run { endings, output, wrong });
        let failure = "two ended with 3; three did not end; four: skipped, for want of kvm: none; \
                       kernel WARNING: here";
        assert_eq!(summary.failure().as_deref(), Some(failure));
        summary.figure("a", 1.5);
        let json: Value = serde_json::from_str(&summary.json()).unwrap();
        assert_eq!((&json["passed"], &json["failed"]), (&1.into(), &4.into()));
        assert_eq!((&json["lane"], &json["figures"]["a"]), (&"x".into(), &1.5.into()));
    }
}
