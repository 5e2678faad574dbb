//! Pausing, resuming, and waking by traffic; and how the store learns of each.
//!
//! The node is the one that acts, also unasked (an idle policy). So the store is never told what a call *wanted*, only what the node
//! *says*: [`follow`] reads the state and writes it under one lock, whoever calls it, so that the last word written is the latest.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use space_api::{id::SandboxId, lifecycle::SandboxState};
use space_node::{NodeError, SandboxStatus, WakeReason};
use space_store::StoreError;

use crate::app::{App, Route, lock};

/// How long a request waits for the sandbox to be awake. A resume takes milliseconds; the node gives up sooner than this.
const WAKE_LIMIT: Duration = Duration::from_secs(20);
/// How often traffic that shows no token may wake one sandbox. A client in a loop would otherwise work against its owner's pause.
const ANONYMOUS_EVERY: Duration = Duration::from_secs(1);
/// Most sandboxes of which the last anonymous wake is remembered; beyond it all are forgotten.
const MAX_REMEMBERED: usize = 8192;

/// Which sandboxes the store has as paused.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    /// Held while a state is read from the node and written to the store.
    order: tokio::sync::Mutex<()>,
    known: Mutex<HashSet<SandboxId>>,
    /// What is being done by a call, so that its event tells the reason, whoever writes it.
    reasons: Mutex<HashMap<SandboxId, &'static str>>,
}

type Waking = Shared<BoxFuture<'static, Result<(), Arc<NodeError>>>>;

/// Wakes under way, one for each sandbox however many requests wait for it.
#[derive(Default)]
pub(crate) struct Wakes {
    under_way: Mutex<HashMap<SandboxId, Waking>>,
    anonymous: Mutex<HashMap<SandboxId, Instant>>,
}

/// Who sends a request to a sandbox, as far as waking it is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Someone who has shown the sandbox's token, or signed with it.
    Owner,
    /// Anybody: a port, or a daemon that asks for no token.
    Anyone,
    /// A question whether it runs, which must not change the answer.
    HealthCheck,
}

/// Why a request does not reach a paused sandbox.
#[derive(Debug)]
pub(crate) enum NotWoken {
    /// This kind of traffic does not wake it.
    NotByThis,
    /// It was woken by such traffic a moment ago.
    TooOften,
    /// It took too long.
    Slow,
    /// The node could not.
    Failed(Arc<NodeError>),
}

impl std::fmt::Debug for Wakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wakes").finish_non_exhaustive()
    }
}

impl Pauses {
    /// What the store holds, learnt at the start.
    pub(crate) fn learn(&self, id: &SandboxId) {
        lock(&self.known).insert(id.clone());
    }

    pub(crate) fn forget(&self, id: &SandboxId) {
        lock(&self.known).remove(id);
    }

    /// Notes why `id` is about to change, for as long as the answer is held.
    fn because<'a>(&'a self, id: &'a SandboxId, reason: &'static str) -> Because<'a> {
        lock(&self.reasons).insert(id.clone(), reason);
        Because { pauses: self, id }
    }
}

struct Because<'a> {
    pauses: &'a Pauses,
    id: &'a SandboxId,
}

impl Drop for Because<'_> {
    fn drop(&mut self) {
        lock(&self.pauses.reasons).remove(self.id);
    }
}

/// Pauses a sandbox in memory. One that is paused stays so.
pub(crate) async fn pause(app: &App, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
    bring(app, id, Wanted::Paused).await
}

/// Lets a sandbox run on. One that runs stays so.
pub(crate) async fn resume(app: &App, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
    bring(app, id, Wanted::Running).await
}

/// Makes a sandbox usable for someone who connects to it, whatever that takes.
pub(crate) async fn connect(app: &App, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
    bring(app, id, Wanted::Awake(WakeReason::Connect)).await
}

#[derive(Debug, Clone, Copy)]
enum Wanted {
    Paused,
    Running,
    Awake(WakeReason),
}

/// A task of its own: a client that goes away must not leave a transition unrecorded.
async fn bring(app: &App, id: &SandboxId, wanted: Wanted) -> Result<SandboxStatus, NodeError> {
    let (app, id) = (app.clone(), id.clone());
    let owner = app.tasks.clone();
    let task = owner.spawn(async move {
        let because = app.pauses.because(&id, match wanted {
            Wanted::Paused | Wanted::Running => "asked for",
            Wanted::Awake(WakeReason::Connect) => "connect",
            Wanted::Awake(WakeReason::Traffic) => "traffic",
        });
        let status = match wanted {
            Wanted::Paused => app.node.pause(&id).await?,
            Wanted::Running => app.node.resume(&id).await?,
            Wanted::Awake(reason) => app.node.wake(&id, reason).await?,
        };
        // A record that could not be written does not undo what was done: the controller writes it later.
        if let Err(error) = follow(&app, &id).await {
            tracing::error!(sandbox = %id, error = %crate::error::chain(&error), "a change was not recorded; reconciliation will");
        }
        drop(because);
        Ok(status)
    });
    task.await.map_err(|error| NodeError::Internal {
        what: error.to_string(),
    })?
}

/// Makes the store say of a sandbox what the node says.
pub(crate) async fn follow(app: &App, id: &SandboxId) -> Result<(), StoreError> {
    let _order = app.pauses.order.lock().await;
    let Ok(status) = app.node.status(id).await else {
        return Ok(());
    };
    let paused = match status.state {
        SandboxState::Paused | SandboxState::Resuming => true,
        SandboxState::Running | SandboxState::Pausing => false,
        SandboxState::Creating | SandboxState::Stopping | SandboxState::Ended => return Ok(()),
    };
    if lock(&app.pauses.known).contains(id) == paused {
        return Ok(());
    }
    let asked = lock(&app.pauses.reasons).get(id).copied();
    let reason = asked.unwrap_or(if paused { "no work" } else { "by the node" });
    if app
        .store
        .set_paused(id, status.generation, paused, reason)
        .await?
    {
        tracing::info!(sandbox = %id, paused, reason, "sandbox changed");
        let mut known = lock(&app.pauses.known);
        if paused {
            known.insert(id.clone());
        } else {
            known.remove(id);
        }
    }
    Ok(())
}

/// Whether this refusal of the node means that the sandbox has to be woken.
pub(crate) fn is_asleep(error: &NodeError) -> bool {
    matches!(
        error,
        NodeError::Paused { .. }
            | NodeError::Transitioning {
                state: SandboxState::Pausing | SandboxState::Paused | SandboxState::Resuming,
                ..
            }
    )
}

/// Wakes a sandbox for a request that has met it paused, and answers when it runs. Requests at the same time share one wake, which
/// goes on when they go away.
pub(crate) async fn wake(app: &App, route: &Route, traffic: Traffic) -> Result<(), NotWoken> {
    match traffic {
        Traffic::Owner => {}
        Traffic::Anyone if route.wake_on_traffic => {
            if !anonymous_may(app, &route.id) {
                return Err(NotWoken::TooOften);
            }
        }
        Traffic::Anyone | Traffic::HealthCheck => return Err(NotWoken::NotByThis),
    }
    match tokio::time::timeout(WAKE_LIMIT, under_way(app, &route.id)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(NotWoken::Failed(error)),
        Err(_) => Err(NotWoken::Slow),
    }
}

/// The wake that is under way, or a new one.
fn under_way(app: &App, id: &SandboxId) -> Waking {
    let mut wakes = lock(&app.wakes.under_way);
    if let Some(waking) = wakes.get(id) {
        return waking.clone();
    }
    let (task_app, task_id) = (app.clone(), id.clone());
    let waking = async move {
        let outcome = bring(&task_app, &task_id, Wanted::Awake(WakeReason::Traffic)).await;
        lock(&task_app.wakes.under_way).remove(&task_id);
        outcome.map(drop).map_err(Arc::new)
    };
    // Driven by a task, so that it goes on and is taken off the list when all who wait for it have gone away.
    let waking = waking.boxed().shared();
    app.tasks.spawn(waking.clone());
    wakes.insert(id.clone(), waking.clone());
    waking
}

/// Whether traffic without a token may wake it now. Those that come while it is being woken wait with the first.
fn anonymous_may(app: &App, id: &SandboxId) -> bool {
    if lock(&app.wakes.under_way).contains_key(id) {
        return true;
    }
    let mut last = lock(&app.wakes.anonymous);
    let now = Instant::now();
    if last
        .get(id)
        .is_some_and(|at| now.duration_since(*at) < ANONYMOUS_EVERY)
    {
        return false;
    }
    if last.len() >= MAX_REMEMBERED {
        last.clear();
    }
    last.insert(id.clone(), now);
    true
}
