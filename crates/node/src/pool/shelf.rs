//! The machines of one key: those that are ready, and what is known of its demand.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use space_api::size::SizeClass;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::sizing::{Demand, Want};
use crate::{
    locked,
    remains::Remains,
    seam::PoolStatus,
    templates::{Lease, ResolvedTemplate},
    worker::Worker,
};

/// Wait after a failure, doubled up to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// What a machine is thought to take before one was measured, beside an eighth of its guest's memory, bytes.
const GUESS: u64 = 64 << 20;

/// A machine that waits to be somebody's.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) worker: Worker,
    pub(crate) remains: Remains,
    pub(crate) lease: Lease,
    /// Memory that the host counts for it, bytes.
    pub(super) bytes: u64,
    pub(super) since: Instant,
    /// Tells the keeper if it dies.
    pub(super) _watch: AbortOnDropHandle<()>,
}

impl Ready {
    fn is_dead(&self) -> bool {
        self.worker.machine.exit().borrow().is_some()
    }

    /// Notes all it has as another's and hands over what works.
    pub(crate) fn claimed_by(self, remains: &Mutex<Remains>) -> (Worker, Lease) {
        *locked(remains) = self.remains;
        (self.worker, self.lease)
    }
}

/// Why a machine is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GivenUp {
    Died,
    Old,
    Unwanted,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shelf {
    /// `name:tag`.
    template: ResolvedTemplate,
    /// As it was asked for last; while this leads elsewhere, none are wanted.
    reference: String,
    ready: VecDeque<Ready>,
    pub(super) warming: usize,
    pub(super) target: usize,
    demand: Demand,
    last_asked: Duration,
    pub(super) pinned: bool,
    /// The reference leads to another template by now, or nowhere.
    pub(super) superseded: bool,
    /// Memory of the one measured last, bytes.
    bytes: Option<u64>,
    failures: u32,
    retry_at: Option<Instant>,
    hits: u64,
    misses: u64,
}

impl Shelf {
    pub(super) fn new(template: &ResolvedTemplate) -> Self {
        Self {
            template: template.clone(),
            reference: template.name.clone(),
            ready: VecDeque::new(),
            warming: 0,
            target: 0,
            demand: Demand::default(),
            last_asked: Duration::ZERO,
            pinned: false,
            superseded: false,
            bytes: None,
            failures: 0,
            retry_at: None,
            hits: 0,
            misses: 0,
        }
    }

    // === demand ===

    pub(super) fn asked(&mut self, reference: &str, now: Duration) {
        reference.clone_into(&mut self.reference);
        self.superseded = false;
        self.last_asked = now;
        self.demand.note(now);
    }

    pub(super) fn reference(&self) -> &str {
        &self.reference
    }

    pub(super) fn template(&self) -> &ResolvedTemplate {
        &self.template
    }

    pub(super) fn last_asked(&self) -> Duration {
        self.last_asked
    }

    /// What it wants if making one takes `refill`.
    pub(super) fn want(
        &mut self,
        size: SizeClass,
        now: Duration,
        refill: Duration,
        least: usize,
        idle: Duration,
    ) -> Want {
        self.demand.forget(now);
        let asked_for = self.demand.recent() > 0 || self.last_asked > Duration::ZERO;
        let in_use = self.pinned || (asked_for && self.last_asked + idle > now);
        let machines = if self.superseded || !in_use {
            0
        } else {
            self.demand.backlog(refill).max(least)
        };
        Want {
            machines,
            takes: self.demand.recent(),
            bytes: self.one(size),
        }
    }

    /// Memory that one takes.
    fn one(&self, size: SizeClass) -> u64 {
        self.bytes
            .unwrap_or_else(|| GUESS + (u64::from(size.memory_mib) << 20) / 8)
    }

    // === machines ===

    /// The one that has waited longest, and lives.
    pub(super) fn take(&mut self) -> Option<Ready> {
        let at = self.ready.iter().position(|ready| !ready.is_dead());
        let taken = at.and_then(|at| self.ready.remove(at));
        match taken {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        taken
    }

    pub(super) fn put(&mut self, ready: Ready) {
        self.bytes = Some(ready.bytes);
        self.failures = 0;
        self.retry_at = None;
        self.ready.push_back(ready);
    }

    /// One could not be made.
    pub(super) fn failed(&mut self) -> Duration {
        let wait = FIRST_RETRY * 2_u32.saturating_pow(self.failures.min(10));
        let wait = wait.min(LONGEST_RETRY);
        self.failures += 1;
        self.retry_at = Some(Instant::now() + wait);
        wait
    }

    /// When one may be made again after a failure.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// How many are to be made now.
    pub(super) fn missing(&self) -> usize {
        if self.retry_at.is_some_and(|at| at > Instant::now()) {
            return 0;
        }
        self.target.saturating_sub(self.ready.len() + self.warming)
    }

    /// Those that are of no use, or too many; the oldest go first.
    pub(super) fn surplus(&mut self, renew_after: Duration) -> Vec<(Ready, GivenUp)> {
        let mut gone = Vec::new();
        let mut kept = VecDeque::new();
        for ready in self.ready.drain(..) {
            if ready.is_dead() {
                gone.push((ready, GivenUp::Died));
            } else if ready.since.elapsed() >= renew_after {
                gone.push((ready, GivenUp::Old));
            } else {
                kept.push_back(ready);
            }
        }
        while kept.len() > self.target {
            gone.extend(kept.pop_front().map(|ready| (ready, GivenUp::Unwanted)));
        }
        self.ready = kept;
        gone
    }

    /// All of them.
    pub(super) fn drain(&mut self) -> Vec<Ready> {
        self.ready.drain(..).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.warming == 0 && !self.pinned
    }

    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<space_node_manager::ObjectName> {
        self.ready.iter().map(|ready| ready.worker.name.clone()).collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.ready.iter().map(|ready| ready.bytes).sum()
    }

    pub(super) fn status(&self, size: SizeClass) -> PoolStatus {
        PoolStatus {
            template: self.template.name.clone(),
            size,
            ready: self.ready.len(),
            warming: self.warming,
            target: self.target,
            hits: self.hits,
            misses: self.misses,
        }
    }
}
