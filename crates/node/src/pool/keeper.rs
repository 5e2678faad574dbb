//! The task that keeps the pool: looks, gives up, makes.
//!
//! It wakes when a machine was taken, made or has died, and every few seconds to look at the host's memory, at the names of
//! templates and at the machines' ages. What takes long (making and removing machines) is done by tasks of its own, as
//! many at once as the configuration allows, so that it always notices the next thing.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    Key, REMOVALS, Ready, State,
    host::{self, HostMemory},
    refill,
    shelf::{GivenUp, Shelf},
    sizing,
};
use crate::{failure::Failure, locked, manager::Shared};

/// How one refill went, and how long it took.
struct Refilled {
    key: Key,
    took: Duration,
    outcome: Result<Ready, Failure>,
}

struct Keeper {
    shared: Arc<Shared>,
    memory: HostMemory,
    look_at: Instant,
    refills: JoinSet<Refilled>,
    removals: JoinSet<()>,
    to_remove: Vec<Ready>,
    cancel: CancellationToken,
}

/// Keeps the pool until it is closed; nothing of it is left then.
pub(super) async fn run(shared: Arc<Shared>) {
    let cancel = shared.pool.stop.child_token();
    let mut keeper = Keeper {
        shared,
        memory: HostMemory::Plenty,
        look_at: Instant::now(),
        refills: JoinSet::new(),
        removals: JoinSet::new(),
        to_remove: Vec::new(),
        cancel,
    };
    keeper.keep().await;
    keeper.end().await;
}

impl Keeper {
    async fn keep(&mut self) {
        let shared = self.shared.clone();
        let pool = &shared.pool;
        loop {
            if pool.look_now.swap(false, Ordering::Relaxed) || self.look_at <= Instant::now() {
                self.look().await;
            }
            self.plan();
            self.give_up();
            self.make();
            let wake_at = self.wake_at();
            tokio::select! {
                biased;
                () = pool.stop.cancelled() => return,
                Some(refilled) = self.refills.join_next() => self.refilled(refilled),
                Some(_) = self.removals.join_next() => {}
                () = pool.changed.notified() => {}
                () = sleep_until(wake_at) => {}
            }
        }
    }

    /// When to look again, whatever happens: not before the next look, or the next try after a failure.
    fn wake_at(&self) -> Instant {
        let state = locked(&self.shared.pool.state);
        let now = Instant::now();
        let retries = state.shelves.values().filter_map(Shelf::retry_at);
        retries
            .filter(|at| *at > now)
            .chain([self.look_at])
            .min()
            .unwrap_or(self.look_at)
    }

    /// Asks what changes without anyone telling: the host's memory, and where names lead.
    async fn look(&mut self) {
        let shared = self.shared.clone();
        let (pool, config) = (&shared.pool, &shared.pool.config);
        self.look_at = Instant::now() + config.look_every;
        self.memory = host::look(
            &config.proc_directory,
            shared.config.memory_reserve,
            config.pressure_percent,
        );
        for shelf in locked(&pool.state).shelves.values_mut() {
            shelf.pinned = false;
        }
        for reference in &config.pinned {
            if let Ok(template) = shared.templates.resolve(reference).await {
                let key = Key {
                    digest: template.digest.clone(),
                    size: template.default_size,
                };
                let mut state = locked(&pool.state);
                state
                    .shelves
                    .entry(key)
                    .or_insert_with(|| Shelf::new(&template))
                    .pinned = true;
            }
        }
        let asked: Vec<_> = {
            let state = locked(&pool.state);
            let shelves = state.shelves.iter();
            shelves
                .filter(|(_, shelf)| !shelf.superseded)
                .map(|(key, shelf)| (key.clone(), shelf.reference().to_owned()))
                .collect()
        };
        for (key, reference) in asked {
            let leads_there = match shared.templates.resolve(&reference).await {
                Ok(template) => template.digest == key.digest,
                Err(crate::TemplateError::NotFound { .. }) => false,
                // It cannot be told; the refill will find out.
                Err(_) => true,
            };
            if !leads_there && let Some(shelf) = locked(&pool.state).shelves.get_mut(&key) {
                tracing::info!(
                    template = reference,
                    digest = key.digest,
                    "a template was replaced or removed: its machines are given up"
                );
                shelf.superseded = true;
                shelf.pinned = false;
            }
        }
    }

    /// Works out how many of each are wanted.
    fn plan(&self) {
        let pool = &self.shared.pool;
        let config = &pool.config;
        let now = pool.now();
        let room = self.shared.registry.room().min(config.max_memory_bytes);
        let mut state = locked(&pool.state);
        let refill = state.refill_time / u32::try_from(config.concurrent_refills).unwrap_or(1).max(1);
        let mut shelves: Vec<_> = state.shelves.iter_mut().collect();
        // The one asked for last comes first where the rest is equal.
        shelves.sort_by_key(|(_, shelf)| std::cmp::Reverse(shelf.last_asked()));
        let wants: Vec<_> = shelves
            .iter_mut()
            .map(|(key, shelf)| {
                shelf.want(key.size, now, refill, config.min_per_key, config.idle_drain_after)
            })
            .collect();
        let (machines, bytes) = match self.memory {
            // What there is may stay, or half of it is given up at each look.
            HostMemory::Plenty => (config.max_machines, room),
            HostMemory::Scarce => {
                for (_, shelf) in shelves {
                    shelf.target = shelf.len();
                }
                return;
            }
            HostMemory::Short => {
                let there: usize = shelves.iter().map(|(_, shelf)| shelf.len()).sum();
                (there / 2, room)
            }
        };
        let given = sizing::share(&wants, machines.min(config.max_machines), bytes);
        for ((_, shelf), target) in shelves.into_iter().zip(given) {
            shelf.target = target;
        }
    }

    /// Takes out what is dead, old or too many.
    fn give_up(&mut self) {
        let pool = &self.shared.pool;
        let mut gone = Vec::new();
        {
            let mut state = locked(&pool.state);
            for shelf in state.shelves.values_mut() {
                gone.extend(shelf.surplus(pool.config.renew_after));
            }
            state
                .shelves
                .retain(|_, shelf| !(shelf.superseded && shelf.is_empty()));
        }
        if self.memory == HostMemory::Short && !gone.is_empty() {
            // So much at each look: what the host says then tells whether it was enough.
            self.memory = HostMemory::Scarce;
        }
        for (ready, why) in gone {
            let (worker, waited) = (&ready.worker.name, ready.since.elapsed());
            match why {
                GivenUp::Died => {
                    let reason = ready.worker.machine.exit().borrow().clone();
                    tracing::warn!(%worker, ?reason, "a machine kept ready has died");
                }
                GivenUp::Old => {
                    tracing::info!(%worker, waited_s = waited.as_secs(), "a machine kept ready is renewed");
                }
                GivenUp::Unwanted => {
                    tracing::info!(%worker, waited_s = waited.as_secs(), "a machine kept ready is no longer wanted");
                }
            }
            self.to_remove.push(ready);
        }
        while self.removals.len() < REMOVALS
            && let Some(ready) = self.to_remove.pop()
        {
            let shared = self.shared.clone();
            self.removals.spawn(async move { discard(&shared, ready).await });
        }
    }

    /// Begins to make what is missing.
    fn make(&mut self) {
        let pool = &self.shared.pool;
        if self.memory != HostMemory::Plenty {
            return;
        }
        while self.refills.len() < pool.config.concurrent_refills.max(1) {
            let Some((key, template)) = locked(&pool.state).next_to_make() else {
                return;
            };
            let (shared, cancel) = (self.shared.clone(), self.cancel.child_token());
            self.refills.spawn(async move {
                let began = Instant::now();
                let refilled = refill::refill(shared, template, key.size, cancel);
                let panicked = |_| Err(Failure::Step("a fault of the node".to_owned()));
                let outcome = AssertUnwindSafe(refilled)
                    .catch_unwind()
                    .await
                    .unwrap_or_else(panicked);
                Refilled {
                    key,
                    took: began.elapsed(),
                    outcome,
                }
            });
        }
    }

    fn refilled(&mut self, refilled: Result<Refilled, tokio::task::JoinError>) {
        let Refilled { key, took, outcome } = match refilled {
            Ok(refilled) => refilled,
            Err(error) => {
                // It catches its own panics, so this is the runtime's end.
                tracing::error!(%error, "the making of a machine was lost; the sweep takes what it made");
                return;
            }
        };
        let pool = &self.shared.pool;
        let mut state = locked(&pool.state);
        let shelf = state.shelves.get_mut(&key);
        match (outcome, shelf) {
            (Ok(ready), Some(shelf)) => {
                shelf.warming -= 1;
                let worker = ready.worker.name.clone();
                shelf.put(ready);
                tracing::info!(
                    %worker,
                    template = shelf.template().name,
                    size = %key.size,
                    ready = shelf.len(),
                    target = shelf.target,
                    took_ms = took.as_millis(),
                    "a machine is ready"
                );
                // The newest counts a quarter.
                state.refill_time = (state.refill_time * 3 + took) / 4;
            }
            (Ok(ready), None) => self.to_remove.push(ready),
            (Err(failure), shelf) => {
                let wait = shelf.map(|shelf| {
                    shelf.warming -= 1;
                    shelf.failed()
                });
                if failure != Failure::Ended {
                    tracing::warn!(
                        size = %key.size,
                        digest = key.digest,
                        again_in_s = wait.unwrap_or_default().as_secs(),
                        error = failure.detail(),
                        "no machine could be made ahead"
                    );
                }
            }
        }
    }

    /// Ends what is being made and removes everything.
    async fn end(mut self) {
        self.cancel.cancel();
        while let Some(refilled) = self.refills.join_next().await {
            self.refilled(refilled);
        }
        {
            let mut state = locked(&self.shared.pool.state);
            for shelf in state.shelves.values_mut() {
                self.to_remove.extend(shelf.drain());
                shelf.target = 0;
            }
        }
        let count = self.to_remove.len();
        while let Some(ready) = self.to_remove.pop() {
            while self.removals.len() >= 2 * REMOVALS {
                self.removals.join_next().await;
            }
            let shared = self.shared.clone();
            self.removals.spawn(async move { discard(&shared, ready).await });
        }
        while self.removals.join_next().await.is_some() {}
        if count > 0 {
            tracing::info!(machines = count, "the machines kept ready are gone");
        }
    }
}

async fn discard(shared: &Shared, ready: Ready) {
    let Ready { remains, lease, .. } = ready;
    refill::remove(shared, remains).await;
    // The template's files are needed until its machine is gone.
    drop(lease);
}

impl State {
    /// What is missing most, by share of what is wanted; counted as being made.
    fn next_to_make(&mut self) -> Option<(Key, crate::ResolvedTemplate)> {
        if self.closed {
            return None;
        }
        let share = |shelf: &Shelf| (shelf.len() + shelf.warming) * 100 / shelf.target.max(1);
        let (key, shelf) = self
            .shelves
            .iter_mut()
            .filter(|(_, shelf)| shelf.missing() > 0)
            .min_by_key(|(_, shelf)| (share(shelf), std::cmp::Reverse(shelf.last_asked())))?;
        shelf.warming += 1;
        Some((key.clone(), shelf.template().clone()))
    }
}
