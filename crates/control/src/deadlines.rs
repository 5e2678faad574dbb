//! Moving deadlines. The node keeps them; what is decided by looking at one and moving it is decided for one sandbox at a time, lest
//! two who keep it alive at once shorten what the other was promised.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use jiff::Timestamp;
use space_api::id::SandboxId;
use space_node::NodeError;
use space_store::StoreError;
use tokio::sync::{Mutex, MutexGuard};

use crate::app::App;

/// Locks for all sandboxes together; two that share one only wait for each other.
const LOCKS: usize = 64;

/// One holder at a time for each sandbox.
#[derive(Debug)]
pub(crate) struct Deadlines([Mutex<()>; LOCKS]);

impl Default for Deadlines {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Deadlines {
    async fn alone(&self, id: &SandboxId) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        let at = usize::try_from(hasher.finish() % LOCKS as u64).unwrap_or(0);
        self.0[at].lock().await
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

/// Has the store say what the node says.
pub(crate) async fn follow(app: &App, id: &SandboxId) -> Result<(), StoreError> {
    let _alone = app.deadlines.alone(id).await;
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
