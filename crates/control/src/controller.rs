//! Makes the store and the node agree.
//!
//! What the store says lives and the node does not know has ended: from the node's journal it learns why, and where that does not
//! say, the platform was restarted under it. What the node runs and the store does not know, or knows as ended, is deleted, unless it
//! is older than the store itself, which then cannot know it. What both know is as the node says: running or paused, and until
//! when; so sandboxes that a node has adopted live on.
//! Runs at start-up before anything is served, on every event, and every [`Limits::reconcile`](crate::Limits::reconcile).
//!
//! It also does what no request should wait for: writing the store through to the disk, and its upkeep.

use std::{collections::HashMap, time::Duration};

use jiff::{SignedDuration, Timestamp};
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};
use space_node::{NodeError, SandboxEvent, SandboxStatus};
use space_store::{End, NodeCapacity, Ready, SandboxRow, StoreError};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio_util::sync::CancellationToken;

use crate::{
    app::{App, lock},
    deadlines,
    error::chain,
    transitions,
};

/// How long after a change of the store it is on the disk: what a loss of power may take away of the records.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// How long creates that failed can be read of: everybody can make many of them, and what they hold may be large.
const FAILED_LIFETIME: SignedDuration = SignedDuration::from_hours(1);

/// Why the two could not be compared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    /// The store did not answer.
    #[error("the metadata store could not be compared with the node")]
    Store(#[from] StoreError),
    /// The node did not answer.
    #[error("the node could not be compared with the metadata store")]
    Node(#[from] NodeError),
}

/// Settles what an earlier run of the platform has left open.
pub(crate) async fn start_up(app: &App) -> Result<(), ReconcileError> {
    for row in app.store.live().await? {
        if row.state == SandboxState::Paused {
            app.pauses.learn(&row.sandbox.id);
        }
    }
    reconcile(app).await?;
    for row in app.store.live().await? {
        app.learn_route(&row);
    }
    let settled = app.store.settle_claims().await?;
    if settled > 0 {
        tracing::info!(settled, "idempotency keys of an earlier run were settled");
    }
    Ok(())
}

/// Runs until `stop`.
pub(crate) async fn run(app: App, mut events: Receiver<SandboxEvent>, stop: CancellationToken) {
    let mut tick = tokio::time::interval(app.config.limits.reconcile);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    tick.tick().await;
    let mut flush = tokio::time::interval(FLUSH_EVERY);
    flush.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut changes = app.store.changes();
    loop {
        let compare = tokio::select! {
            () = stop.cancelled() => break,
            _ = tick.tick() => true,
            _ = flush.tick() => { write_through(&app, &mut changes).await; false }
            event = events.recv() => match event {
                Ok(event) => { observe(&app, event).await; false }
                Err(RecvError::Lagged(missed)) => { tracing::warn!(missed, "node events were missed"); true }
                Err(RecvError::Closed) => break,
            },
        };
        if compare && let Err(error) = reconcile(&app).await {
            tracing::error!(error = %chain(&error), "reconciliation failed; it is tried again");
        }
    }
    write_through(&app, &mut changes).await;
}

async fn write_through(app: &App, changes: &mut tokio::sync::watch::Receiver<u64>) {
    if !changes.has_changed().unwrap_or(false) {
        return;
    }
    changes.mark_unchanged();
    if let Err(error) = app.store.flush().await {
        changes.mark_changed();
        tracing::error!(error = %chain(&error), "the store was not written through; it is tried again");
    }
}

async fn observe(app: &App, event: SandboxEvent) {
    let outcome = match event {
        // The create that waits for it marks it as running; without one, reconciliation does.
        SandboxEvent::Ready(_) => Ok(()),
        SandboxEvent::Changed(status) => transitions::follow(app, &status.id).await,
        SandboxEvent::Told(notice) => {
            let note = app.store.note(&notice.id, notice.at, notice.kind, &notice.detail);
            note.await.map(drop)
        }
        SandboxEvent::Ended(record) => app.record_end(&record).await.map(drop),
    };
    if let Err(error) = outcome {
        tracing::error!(error = %chain(&error), "what the node told was not recorded; reconciliation will");
    }
}

/// Writes down what the node has room for.
async fn register_node(app: &App) -> Result<(), StoreError> {
    let info = app.node.info().await;
    let node = NodeCapacity {
        name: app.config.node_name.clone(),
        max_sandboxes: u64::try_from(info.capacity).unwrap_or(u64::MAX),
        // Its memory the node measures itself, for paused and shared pages do not count as a sum of sizes would.
        max_memory_mib: None,
    };
    app.store.register_node(&node).await?;
    app.queue.freed();
    Ok(())
}

/// Compares once.
pub(crate) async fn reconcile(app: &App) -> Result<(), ReconcileError> {
    register_node(app).await?;
    // The store is read first: what is made after that is in neither list of things to end.
    let rows = app.store.live().await?;
    let alive: HashMap<SandboxId, SandboxStatus> = app
        .node
        .list()
        .await
        .into_iter()
        .map(|status| (status.id.clone(), status))
        .collect();

    let missing: Vec<&SandboxRow> = rows
        .iter()
        .filter(|row| !alive.contains_key(&row.sandbox.id) && !app.is_creating(&row.sandbox.id))
        .collect();
    if !missing.is_empty() {
        end_missing(app, &missing).await?;
    }
    for row in &rows {
        if row.state == SandboxState::Creating
            && !app.is_creating(&row.sandbox.id)
            && let Some(status) = alive.get(&row.sandbox.id)
            && is_up(status.state)
        {
            mark_running(app, status).await?;
        }
        if let Some(status) = alive.get(&row.sandbox.id) {
            agree(app, row, status).await?;
        }
    }
    for status in alive.values() {
        let known = rows.iter().any(|row| row.sandbox.id == status.id);
        if !known && !app.is_creating(&status.id) && unwanted(app, status).await? {
            tracing::warn!(sandbox = %status.id, "deleting a sandbox that the store does not want");
            if let Err(error) = app.node.delete(&status.id).await
                && !matches!(error, NodeError::NotFound { .. })
            {
                tracing::warn!(sandbox = %status.id, %error, "it could not be deleted; it is tried again");
            }
        }
    }
    lock(&app.elders).retain(|id| alive.contains_key(id));
    let oldest = SignedDuration::try_from(app.config.limits.record_lifetime).unwrap_or(SignedDuration::MAX);
    let before = |span: SignedDuration| Timestamp::now().checked_sub(span).unwrap_or(Timestamp::MIN);
    app.store
        .prune(before(oldest), before(oldest.min(FAILED_LIFETIME)))
        .await?;
    app.store.maintain().await?;
    Ok(())
}

/// Whether its create is over.
fn is_up(state: SandboxState) -> bool {
    matches!(
        state,
        SandboxState::Running | SandboxState::Pausing | SandboxState::Paused | SandboxState::Resuming
    )
}

/// State and deadline, as the node has them: it is the one that keeps both.
async fn agree(app: &App, row: &SandboxRow, status: &SandboxStatus) -> Result<(), StoreError> {
    if !is_up(status.state) || app.is_creating(&status.id) {
        return Ok(());
    }
    transitions::follow(app, &status.id).await?;
    if row.sandbox.deadline == status.deadline {
        return Ok(());
    }
    // Read anew: a call may have moved it since the list was made.
    deadlines::follow(app, &status.id).await
}

async fn end_missing(app: &App, missing: &[&SandboxRow]) -> Result<(), StoreError> {
    for row in missing {
        let id = &row.sandbox.id;
        // It may have been in between two lists; the node itself has the last word.
        let record = match app.node.status(id).await {
            Err(NodeError::NotFound { end, .. }) => {
                end.filter(|record| record.generation == row.sandbox.generation)
            }
            Ok(_) => continue,
            // It cannot tell now, so nothing is known of an end.
            Err(error) => {
                tracing::warn!(sandbox = %id, %error, "whether a sandbox lives is not known; it is asked again");
                continue;
            }
        };
        let end = End {
            generation: row.sandbox.generation,
            cause: record
                .as_ref()
                .map_or(EndCause::PlatformRestarted, |record| record.cause.clone()),
            ended_at: record
                .as_ref()
                .map_or_else(Timestamp::now, |record| record.ended_at),
            cpu_micros: record.map(|record| record.cpu_micros),
        };
        if app.end(id, &end, false).await? {
            tracing::info!(sandbox = %id, cause = ?end.cause, "sandbox was gone");
        }
    }
    Ok(())
}

async fn mark_running(app: &App, status: &SandboxStatus) -> Result<(), StoreError> {
    let ready = Ready {
        template: status.template.clone(),
        template_digest: status.template_digest.clone(),
        size: status.size,
        ready_ms: status.ready_ms,
    };
    app.store
        .mark_running(&status.id, status.generation, &ready)
        .await?;
    Ok(())
}

/// Whether what the node runs is to go: the store has its end, or would know it if anybody had asked for it.
async fn unwanted(app: &App, status: &SandboxStatus) -> Result<bool, StoreError> {
    if let Some(row) = app.store.sandbox(&status.id).await? {
        return Ok(row.state == SandboxState::Ended);
    }
    // A store that was made anew must not cost anybody their work.
    let elder = app
        .store
        .begun()
        .await?
        .is_none_or(|begun| status.started_at < begun);
    if elder && lock(&app.elders).insert(status.id.clone()) {
        tracing::error!(
            sandbox = %status.id, deadline = %status.deadline,
            "a sandbox is older than the metadata store, which knows nothing of it: it is left to run until its deadline, and nobody can reach it; an orderly end of the platform ends it"
        );
    }
    Ok(!elder)
}
