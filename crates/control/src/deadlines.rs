//! Moving deadlines. The node keeps them; what is decided by looking at one and moving it is decided for one sandbox at a time, lest
//! two who keep it alive at once shorten what the other was promised.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use jiff::Timestamp;
use space_api::id::SandboxId;
use space_node::NodeError;
use space_store::StoreError;
use tokio::sync::OwnedMutexGuard;

use crate::app::{App, lock};

/// Locks that may be kept beyond their use; with more of them those that nobody holds or waits for go.
const KEPT: usize = 256;

/// One lock for each sandbox whose deadline is being moved: a sandbox that is slow to answer holds up no other.
#[derive(Debug, Default)]
pub(crate) struct Deadlines(Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>);

impl Deadlines {
    fn of(&self, id: &SandboxId) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = lock(&self.0);
        if locks.len() >= KEPT {
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        }
        locks.entry(id.clone()).or_default().clone()
    }

    async fn alone(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        self.of(id).lock_owned().await
    }
}

/// Why a deadline was not moved.
#[derive(Debug)]
pub(crate) enum NotMoved {
    Node(NodeError),
    Store(StoreError),
}

/// Moves it to `wanted` unless it is later already; the deadline it has then.
pub(crate) async fn at_least(app: &App, id: &SandboxId, wanted: Timestamp) -> Result<Timestamp, NotMoved> {
    let _alone = app.deadlines.alone(id).await;
    // The node is asked, because a row may be older than a change that is under way.
    let status = app.node.status(id).await.map_err(NotMoved::Node)?;
    if wanted <= status.deadline {
        return Ok(status.deadline);
    }
    write(app, id, wanted).await?;
    Ok(wanted)
}

/// Moves it, sooner or later than before.
pub(crate) async fn set(app: &App, id: &SandboxId, deadline: Timestamp) -> Result<(), NotMoved> {
    let _alone = app.deadlines.alone(id).await;
    write(app, id, deadline).await
}

/// Has the store say what the node says, unless somebody is moving it, who writes it down then.
pub(crate) async fn follow(app: &App, id: &SandboxId) -> Result<(), StoreError> {
    let Ok(_alone) = app.deadlines.of(id).try_lock_owned() else {
        return Ok(());
    };
    if let Ok(status) = app.node.status(id).await {
        app.store.set_deadline(id, status.deadline).await?;
    }
    Ok(())
}

/// The node first: it is the one that keeps it.
async fn write(app: &App, id: &SandboxId, deadline: Timestamp) -> Result<(), NotMoved> {
    app.node
        .set_deadline(id, deadline)
        .await
        .map_err(NotMoved::Node)?;
    app.store
        .set_deadline(id, deadline)
        .await
        .map_err(NotMoved::Store)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn locks_are_of_one_sandbox_and_go_when_nobody_needs_them() {
        let deadlines = Deadlines::default();
        let held = SandboxId::random();
        let guard = deadlines.alone(&held).await;
        for _ in 0..3 * KEPT {
            drop(deadlines.alone(&SandboxId::random()).await);
        }
        assert!(lock(&deadlines.0).len() <= KEPT);
        assert!(deadlines.of(&held).try_lock_owned().is_err(), "it is held still");
        drop(guard);
        assert!(deadlines.of(&held).try_lock_owned().is_ok());
    }
}
