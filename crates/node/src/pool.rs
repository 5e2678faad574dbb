//! Machines that are ready before anyone asks for them.
//!
//! ```text
//!            provision, weight 1          throw-away identity, rounds         stop, weight 100
//!  wanted ────────────────────► restored ───────────────────────────► warm ───────────────────► ready ──take──► claimed
//!    ▲                             │ failed, limit, shutting down       │                         │
//!    │                             └───────────────┬────────────────────┘                         │ died, old, no longer
//!    └────────── after a while ◄───── removed ◄────┴──────────────────────────────────────────────┘ wanted, memory short
//! ```
//!
//! A ready machine stands still: it costs memory and no CPU. Its control port and its data session are open, its network,
//! group and disk are its own, and it has run what a sandbox runs first until that was quick ([`crate::warm`]). A create
//! takes one and gives it its identity; nothing is made on the way.
//!
//! Taking never waits and never fails for the pool's sake: where there is none, the create makes a machine of its own. One
//! task, the [`keeper`], decides what is made and what is given up; how many are wanted is worked out in [`sizing`].

mod config;
mod host;
mod keeper;
mod quiet;
mod refill;
mod shelf;
pub(crate) mod sizing;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use space_api::size::SizeClass;
use tokio::{sync::Notify, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

pub use config::PoolConfig;
pub(crate) use quiet::Busy;
use quiet::Quiet;
pub(crate) use refill::remove;
pub(crate) use shelf::Ready;
use shelf::Shelf;

use crate::{locked, manager::Shared, seam::PoolStatus, templates::ResolvedTemplate};

/// Templates and sizes that are remembered; those not asked for longest are forgotten.
const MOST_KEYS: usize = 64;

/// Machines being removed at the same time.
const REMOVALS: usize = 2;

/// What machines are alike in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// Of the template.
    pub(crate) digest: String,
    pub(crate) size: SizeClass,
}

#[derive(Debug)]
struct State {
    shelves: HashMap<Key, Shelf>,
    closed: bool,
    /// Making one takes this long, of late.
    refill_time: Duration,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pool {
    config: PoolConfig,
    began: Instant,
    state: Mutex<State>,
    /// Wakes the keeper.
    changed: Notify,
    /// Whether it is to look at what it otherwise looks at now and then.
    look_now: AtomicBool,
    quiet: Quiet,
    stop: CancellationToken,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Pool {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self {
            config,
            began: Instant::now(),
            state: Mutex::new(State {
                shelves: HashMap::new(),
                closed: false,
                refill_time: FIRST_GUESS,
            }),
            changed: Notify::new(),
            look_now: AtomicBool::new(false),
            quiet: Quiet::new(),
            stop: CancellationToken::new(),
            keeper: Mutex::default(),
        }
    }

    /// Begins to keep machines ready.
    pub(crate) fn begin(shared: &Arc<Shared>) {
        if shared.pool.config.max_machines > 0 {
            let keeper = tokio::spawn(keeper::run(shared.clone()));
            *locked(&shared.pool.keeper) = Some(keeper);
        }
    }

    /// A ready machine, if there is one. Also notes that one was asked for.
    pub(crate) fn take(
        &self,
        template: &ResolvedTemplate,
        size: SizeClass,
        reference: &str,
    ) -> Option<Ready> {
        if self.config.max_machines == 0 {
            return None;
        }
        let key = Key {
            digest: template.digest.clone(),
            size,
        };
        let now = self.now();
        let taken = {
            let mut state = locked(&self.state);
            if state.closed {
                return None;
            }
            if !state.shelves.contains_key(&key) {
                state.forget_one(MOST_KEYS);
            }
            let shelf = state.shelves.entry(key).or_insert_with(|| Shelf::new(template));
            shelf.asked(reference, now);
            shelf.take()
        };
        self.changed.notify_one();
        taken
    }

    /// Says that a create is under way until the answer is dropped: what is made ahead waits meanwhile.
    pub(crate) fn busy(&self) -> Busy<'_> {
        self.quiet.busy()
    }

    /// Memory that would be free again without the machines kept ready, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        locked(&self.state).shelves.values().map(Shelf::bytes).sum()
    }

    /// Has the keeper look at everything anew: a template has gone, or room is needed.
    pub(crate) fn look(&self) {
        self.look_now.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// For operators.
    pub(crate) fn statuses(&self) -> Vec<PoolStatus> {
        let state = locked(&self.state);
        let mut all: Vec<_> = state
            .shelves
            .iter()
            .map(|(key, shelf)| shelf.status(key.size))
            .collect();
        all.sort_by(|a, b| (&a.template, a.size.to_string()).cmp(&(&b.template, b.size.to_string())));
        all
    }

    /// Names of the machines that are ready.
    #[cfg(test)]
    pub(crate) fn names(&self) -> std::collections::BTreeSet<space_node_manager::ObjectName> {
        let state = locked(&self.state);
        state.shelves.values().flat_map(Shelf::names).collect()
    }

    /// Gives up all machines, also those being made, and returns when they are gone.
    pub(crate) async fn close(&self) {
        locked(&self.state).closed = true;
        self.stop.cancel();
        let keeper = locked(&self.keeper).take();
        if let Some(keeper) = keeper
            && let Err(error) = keeper.await
        {
            tracing::error!(%error, "the pool's keeper was lost; the sweep takes its machines");
        }
    }

    /// Time since the beginning.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

/// How long making one is thought to take before one was made: an emulated machine's.
const FIRST_GUESS: Duration = Duration::from_secs(2);

impl State {
    /// Makes room for one more key, if one can go.
    fn forget_one(&mut self, most: usize) {
        if self.shelves.len() < most {
            return;
        }
        let oldest = self
            .shelves
            .iter()
            .filter(|(_, shelf)| shelf.is_empty())
            .min_by_key(|(_, shelf)| shelf.last_asked())
            .map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            self.shelves.remove(&oldest);
        }
    }
}
