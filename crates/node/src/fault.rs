//! Faults on demand at named points, for tests of what a failure, a panic or a kill at exactly that point leaves.
//!
//! There is a point before and after each durable write and in each step of an adoption. Without a plan, which is how
//! every node runs that is not under test, a point is one comparison with nothing.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;

use crate::locked;

/// What happens at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAct {
    /// An error of the operating system.
    Fail,
    /// A panic.
    Panic,
    /// The process kills itself with signal 9.
    Kill,
    /// Nothing goes on from here: what a kill is to a test that shares the process.
    Halt,
}

/// Which faults are to happen where. Empty unless a test has filled it.
#[derive(Debug, Clone, Default)]
pub struct FaultPoints(Option<Arc<Plan>>);

#[derive(Debug)]
struct Plan {
    /// By point: at which hit, what, and the hits so far.
    acts: Mutex<BTreeMap<String, (u32, FaultAct, u32)>>,
    /// The point that was reached last with its act due.
    reached: watch::Sender<Option<String>>,
}

impl FaultPoints {
    /// Reads `POINT=ACT@N,…` with the acts `fail`, `panic`, `kill`, `halt`: `journal.begin.after=kill@3`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut acts = BTreeMap::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let parsed = part.split_once('=').and_then(|(point, how)| {
                let (act, nth) = how.split_once('@').unwrap_or((how, "1"));
                let act = match act {
                    "fail" => FaultAct::Fail,
                    "panic" => FaultAct::Panic,
                    "kill" => FaultAct::Kill,
                    "halt" => FaultAct::Halt,
                    _ => return None,
                };
                Some((point.to_owned(), (nth.parse().ok()?, act, 0)))
            });
            let (point, planned) = parsed
                .ok_or_else(|| format!("\"{part}\" is no fault: write POINT=fail|panic|kill|halt@N"))?;
            acts.insert(point, planned);
        }
        if acts.is_empty() {
            return Ok(Self(None));
        }
        Ok(Self(Some(Arc::new(Plan {
            acts: Mutex::new(acts),
            reached: watch::channel(None).0,
        }))))
    }

    /// The point whose act was due last. `None` for ever when nothing is planned.
    pub fn reached(&self) -> Option<String> {
        self.0.as_ref().and_then(|plan| plan.reached.borrow().clone())
    }

    /// Whether nothing is planned, so that names of points need not even be made.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Passes a point.
    pub(crate) async fn pass(&self, point: &str) -> io::Result<()> {
        let Some(plan) = &self.0 else { return Ok(()) };
        let due = {
            let mut acts = locked(&plan.acts);
            acts.get_mut(point).and_then(|(nth, act, hits)| {
                *hits += 1;
                (*hits == *nth).then_some(*act)
            })
        };
        let Some(act) = due else { return Ok(()) };
        plan.reached.send_replace(Some(point.to_owned()));
        match act {
            FaultAct::Fail => Err(io::Error::other(format!("{point} fails on demand"))),
            #[expect(clippy::panic, reason = "on demand")]
            FaultAct::Panic => panic!("{point} panics on demand"),
            FaultAct::Kill => {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
                std::future::pending().await
            }
            FaultAct::Halt => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fault_happens_at_its_point_at_its_time() {
        let faults = FaultPoints::parse("a=fail@2,b=fail").expect("parses");
        assert!(faults.pass("a").await.is_ok());
        assert!(faults.pass("a").await.is_err());
        assert!(faults.pass("a").await.is_ok());
        assert_eq!(faults.reached().as_deref(), Some("a"));
        assert!(faults.pass("b").await.is_err() && faults.pass("c").await.is_ok());
        assert!(FaultPoints::parse("").is_ok_and(|none| none.0.is_none()));
        for bad in ["a", "a=b", "a=fail@x", "a=fail@-1"] {
            assert!(FaultPoints::parse(bad).is_err(), "{bad}");
        }
    }
}
