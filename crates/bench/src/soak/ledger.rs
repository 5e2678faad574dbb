//! What happened in a soak: outcomes, kills, and everything that was not as it must be.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::{Value, json};
use space_api::id::SandboxId;

use crate::{processes::Role, statistics::Times};

/// Faults that are kept in words; more are only counted.
const MOST_FAULTS: usize = 200;

/// How one round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// Created, ran its command, deleted, at the first try.
    Clean,
    /// The same, though something had to be asked again.
    Recovered,
    /// The create failed with a reason, and nothing is left of it.
    CreateFailed,
    /// The sandbox ended with a cause, after its monitor was killed.
    Lost,
    /// Anything else: there is a fault that says what.
    Wrong,
}

impl Outcome {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [
        Self::Clean,
        Self::Recovered,
        Self::CreateFailed,
        Self::Lost,
        Self::Wrong,
    ];

    /// Its key.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Recovered => "recovered",
            Self::CreateFailed => "create_failed",
            Self::Lost => "lost",
            Self::Wrong => "wrong",
        }
    }
}

/// Shared by everything that takes part, in one thread.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    rounds_begun: Cell<u32>,
    closed: Cell<bool>,
    over: Cell<bool>,
    expected_ends: Cell<u32>,
    inner: RefCell<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    outcomes: BTreeMap<Outcome, u32>,
    kills: BTreeMap<Role, u32>,
    killed_machines: BTreeSet<String>,
    recoveries: Times,
    sandboxes: Vec<SandboxId>,
    causes: BTreeMap<String, u32>,
    faults: Vec<String>,
    fault_count: u32,
}

impl Ledger {
    /// Takes the next round, unless `most` are taken or it is over.
    pub(crate) fn begin_round(&self, most: u32) -> Option<u32> {
        let round = self.rounds_begun.get();
        if round >= most || self.closed.get() {
            return None;
        }
        self.rounds_begun.set(round + 1);
        Some(round)
    }

    /// Says how a round ended.
    pub(crate) fn end_round(&self, outcome: Outcome) {
        *self.inner.borrow_mut().outcomes.entry(outcome).or_default() += 1;
    }

    /// Rounds that have ended.
    pub(crate) fn rounds(&self) -> u32 {
        self.inner.borrow().outcomes.values().sum()
    }

    /// Lets no further round begin.
    pub(crate) fn no_more_rounds(&self) {
        self.closed.set(true);
    }

    /// Lets everything that takes part end.
    pub(crate) fn finish(&self) {
        self.over.set(true);
    }

    /// Whether it is over.
    pub(crate) fn is_over(&self) -> bool {
        self.over.get()
    }

    /// Keeps a sandbox for the last look at all of them.
    pub(crate) fn keep(&self, id: &SandboxId) {
        self.inner.borrow_mut().sandboxes.push(id.clone());
    }

    /// Every sandbox that was made.
    pub(crate) fn sandboxes(&self) -> Vec<SandboxId> {
        self.inner.borrow().sandboxes.clone()
    }

    /// A process was killed.
    pub(crate) fn killed(&self, role: Role, machine: Option<&str>) {
        if role == Role::Up {
            self.expected_ends.set(self.expected_ends.get() + 1);
        }
        let mut inner = self.inner.borrow_mut();
        *inner.kills.entry(role).or_default() += 1;
        inner.killed_machines.extend(machine.map(str::to_owned));
    }

    /// Whether an end of `space up` was our doing; each kill explains one.
    pub(crate) fn explain_end(&self) -> bool {
        let left = self.expected_ends.get();
        self.expected_ends.set(left.saturating_sub(1));
        left > 0
    }

    /// Kills of all kinds.
    pub(crate) fn kills(&self) -> u32 {
        self.inner.borrow().kills.values().sum()
    }

    /// Kills of monitors.
    pub(crate) fn monitor_kills(&self) -> u32 {
        self.inner
            .borrow()
            .kills
            .get(&Role::Monitor)
            .copied()
            .unwrap_or(0)
    }

    /// Whether that machine's monitor was killed by us.
    pub(crate) fn was_killed(&self, machine: &str) -> bool {
        self.inner.borrow().killed_machines.contains(machine)
    }

    /// The platform answered again after a kill.
    pub(crate) fn recovered(&self, took: Duration) {
        self.inner.borrow_mut().recoveries.push(took);
    }

    /// A sandbox ended for that reason.
    pub(crate) fn cause(&self, kind: &str) {
        *self.inner.borrow_mut().causes.entry(kind.to_owned()).or_default() += 1;
    }

    /// Something is not as it must be.
    pub(crate) fn fault(&self, what: String) {
        let mut inner = self.inner.borrow_mut();
        inner.fault_count += 1;
        if inner.faults.len() < MOST_FAULTS {
            println!("✗ {what}");
            inner.faults.push(what);
        }
    }

    /// How many faults there were.
    pub(crate) fn fault_count(&self) -> u32 {
        self.inner.borrow().fault_count
    }

    /// Everything for programs.
    pub(crate) fn json(&self) -> Value {
        let inner = self.inner.borrow();
        let outcomes: serde_json::Map<String, Value> = Outcome::ALL
            .into_iter()
            .map(|outcome| {
                let count = inner.outcomes.get(&outcome).copied().unwrap_or(0);
                (outcome.key().to_owned(), json!(count))
            })
            .collect();
        let kills: serde_json::Map<String, Value> = inner
            .kills
            .iter()
            .map(|(role, count)| (role.as_str().to_owned(), json!(count)))
            .collect();
        json!({
            "rounds": inner.outcomes.values().sum::<u32>(),
            "outcomes": outcomes,
            "kills": kills,
            "kills_total": inner.kills.values().sum::<u32>(),
            "recovery": inner.recoveries.json(),
            "end_causes": inner.causes,
            "faults": inner.faults,
            "fault_count": inner.fault_count,
        })
    }

    /// The same as lines for people.
    pub(crate) fn rows(&self) -> Vec<(String, String)> {
        let inner = self.inner.borrow();
        let mut rows: Vec<(String, String)> = Outcome::ALL
            .into_iter()
            .map(|outcome| {
                let count = inner.outcomes.get(&outcome).copied().unwrap_or(0);
                (
                    format!("rounds: {}", outcome.key().replace('_', " ")),
                    count.to_string(),
                )
            })
            .collect();
        for (role, count) in &inner.kills {
            rows.push((format!("kill -9 of {role}"), count.to_string()));
        }
        let recovery = |percent| format!("{:.0} ms", inner.recoveries.percentile(percent));
        rows.push((
            "kill to answer, p50 / p99 / max".to_owned(),
            [50, 99, 100].map(recovery).join(" / "),
        ));
        for (cause, count) in &inner.causes {
            rows.push((format!("ended: {cause}"), count.to_string()));
        }
        rows.push(("faults".to_owned(), inner.fault_count.to_string()));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_end_at_the_most_and_when_it_is_over() {
        let ledger = Ledger::default();
        assert_eq!([0, 1, 2].map(|_| ledger.begin_round(2)), [Some(0), Some(1), None]);
        ledger.end_round(Outcome::Clean);
        ledger.end_round(Outcome::Lost);
        assert_eq!(ledger.rounds(), 2);
        ledger.no_more_rounds();
        assert_eq!(ledger.begin_round(100), None);
    }

    #[test]
    fn each_kill_of_space_up_explains_one_end() {
        let ledger = Ledger::default();
        assert!(!ledger.explain_end());
        ledger.killed(Role::Up, None);
        ledger.killed(Role::Monitor, Some("m1"));
        assert!(ledger.explain_end());
        assert!(!ledger.explain_end());
        assert!(ledger.was_killed("m1") && !ledger.was_killed("m2"));
        assert_eq!((ledger.kills(), ledger.monitor_kills()), (2, 1));
    }
}
