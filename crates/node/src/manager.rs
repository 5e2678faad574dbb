//! [`NodeManager`]: answers for all sandboxes of a node.

mod admit;
mod open;
mod shared;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use jiff::Timestamp;
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};
use tokio::sync::{OnceCell, broadcast, oneshot};

pub(crate) use self::shared::Shared;
use crate::{
    failure::{Failure, chain},
    link::{Link, LinkError},
    registry::Handle,
    sandbox::{Input, Settled, View, sample},
    seam::{
        CreateSandbox, DataStream, EndRecord, Node, NodeError, NodeInfo, SandboxEvent, SandboxStatus,
        TemplateInfo, TunnelError, TunnelStream, Usage, WakeReason,
    },
};

/// A node in this process. Give it up with [`Node::shutdown`]; a process that dies without is cleaned up after by the
/// next [`NodeManager::open`].
pub struct NodeManager {
    pub(crate) shared: Arc<Shared>,
    finished: OnceCell<()>,
    /// Driver, version and accelerator.
    description: String,
}

impl fmt::Debug for NodeManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeManager")
            .field("data_directory", &self.shared.config.data_directory)
            .field("sandboxes", &self.shared.registry.len())
            .finish_non_exhaustive()
    }
}

impl NodeManager {
    fn find(&self, id: &SandboxId) -> Option<Arc<Handle>> {
        self.shared.registry.find(id)
    }

    /// The error for an id that does not live here.
    async fn not_found(&self, id: &SandboxId) -> NodeError {
        let end = match self.shared.registry.recent_end(id) {
            Some(end) => Some(end),
            None => self
                .shared
                .journal
                .end_of(id.clone())
                .await
                .unwrap_or_else(|error| {
                    tracing::warn!(error = %chain(&error), "an end could not be looked up");
                    None
                }),
        };
        if end.is_none() && self.shared.registry.is_closed() {
            // It may live on without this process.
            return NodeError::ShuttingDown;
        }
        NodeError::NotFound {
            id: id.clone(),
            end: end.map(Box::new),
        }
    }

    /// The link of a running sandbox.
    async fn link(&self, id: &SandboxId) -> Result<(Arc<Handle>, Arc<Link>), NodeError> {
        let Some(handle) = self.find(id) else {
            return Err(self.not_found(id).await);
        };
        let (link, state) = {
            let mut watched = handle.view.clone();
            // On its way to running it is nearly there, and its task bounds the wait.
            let view = watched
                .wait_for(|view| view.status.state != SandboxState::Resuming)
                .await;
            let Ok(view) = view else {
                return Err(lost());
            };
            (view.link.clone(), view.status.state)
        };
        match (state, link) {
            (SandboxState::Running, Some(link)) => Ok((handle, link)),
            (SandboxState::Pausing | SandboxState::Paused, _) => Err(NodeError::Paused { id: id.clone() }),
            _ => Err(NodeError::Transitioning {
                id: id.clone(),
                state,
            }),
        }
    }

    /// Has the sandbox's task go to another state; the task bounds how long that takes.
    async fn transition(
        &self,
        id: &SandboxId,
        wanted: SandboxState,
        input: impl FnOnce(Settled) -> Input + Send,
    ) -> Result<SandboxStatus, NodeError> {
        let Some(handle) = self.find(id) else {
            return Err(self.not_found(id).await);
        };
        let (reply, done) = oneshot::channel();
        if handle.inputs.send(input(reply)).await.is_ok() {
            match done.await {
                Ok(Ok(status)) => return Ok(status),
                Ok(Err(what)) => {
                    return Err(NodeError::TransitionFailed {
                        id: id.clone(),
                        wanted,
                        what,
                    });
                }
                Err(_) => {}
            }
        }
        Err(self.elsewhere(id).await)
    }

    /// What to say when a sandbox's task does not take an input: that it is on its way, or gone.
    async fn elsewhere(&self, id: &SandboxId) -> NodeError {
        match self.find(id) {
            Some(handle) => NodeError::Transitioning {
                id: id.clone(),
                state: handle.state(),
            },
            None => self.not_found(id).await,
        }
    }

    /// What to say when the daemon could not be asked: that the sandbox is gone, if it is.
    async fn link_failure(&self, id: &SandboxId, error: &LinkError) -> NodeError {
        match self.find(id) {
            None => self.not_found(id).await,
            Some(handle) if matches!(handle.state(), SandboxState::Pausing | SandboxState::Paused) => {
                NodeError::Paused { id: id.clone() }
            }
            Some(handle) if handle.state() != SandboxState::Running => NodeError::Transitioning {
                id: id.clone(),
                state: handle.state(),
            },
            Some(_) if self.shared.registry.is_closed() => NodeError::ShuttingDown,
            Some(_) => NodeError::GuestUnresponsive {
                id: id.clone(),
                what: chain(error),
            },
        }
    }
}

fn lost() -> NodeError {
    NodeError::Internal {
        what: "the sandbox's task was lost".to_owned(),
    }
}

/// Waits for the end of a sandbox.
async fn ended(handle: &Handle) -> Result<EndRecord, NodeError> {
    let mut view = handle.view.clone();
    let view = view
        .wait_for(|view| view.status.state == SandboxState::Ended)
        .await
        .map_err(|_| lost())?;
    // Without a record only when its generation was refused.
    view.end.clone().ok_or_else(|| NodeError::NotFound {
        id: handle.id.clone(),
        end: None,
    })
}

#[async_trait]
impl Node for NodeManager {
    async fn info(&self) -> NodeInfo {
        let shared = &self.shared;
        NodeInfo {
            vmm: self.description.clone(),
            isolates_hostile_code: shared.vmm.capabilities().isolates_hostile_code,
            sandboxes: shared.registry.len(),
            capacity: shared.config.capacity,
            data_directory: shared.config.data_directory.clone(),
            pool: shared.pool.statuses(),
        }
    }

    async fn create(&self, request: CreateSandbox) -> Result<SandboxStatus, NodeError> {
        let id = request.id.clone();
        let handle = self.admit(request).await?;
        let mut watched = handle.view.clone();
        let (status, failure, end) = {
            // Asked for again it may be paused by now, and is created all the same; one that is being ended is not.
            let settled =
                |view: &View| !matches!(view.status.state, SandboxState::Creating | SandboxState::Stopping);
            let view = watched.wait_for(settled).await.map_err(|_| lost())?;
            (view.status.clone(), view.failure.clone(), view.end.clone())
        };
        match failure {
            None => Ok(status),
            Some(Failure::Stale) => Err(self.not_found(&id).await),
            Some(failure) => Err(failure.answer(&id, end)),
        }
    }

    async fn delete(&self, id: &SandboxId) -> Result<EndRecord, NodeError> {
        let Some(handle) = self.find(id) else {
            return Err(self.not_found(id).await);
        };
        // An error says that it is past taking inputs: then its end is near.
        drop(handle.inputs.send(Input::End(EndCause::Deleted)).await);
        ended(&handle).await
    }

    async fn status(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        match self.find(id) {
            Some(handle) => Ok(handle.view.borrow().status.clone()),
            None => Err(self.not_found(id).await),
        }
    }

    async fn list(&self) -> Vec<SandboxStatus> {
        let handles = self.shared.registry.all();
        let mut all: Vec<_> = handles
            .iter()
            .map(|handle| handle.view.borrow().status.clone())
            .collect();
        all.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
        all
    }

    async fn set_deadline(&self, id: &SandboxId, deadline: Timestamp) -> Result<(), NodeError> {
        let Some(handle) = self.find(id) else {
            return Err(self.not_found(id).await);
        };
        let (reply, taken) = oneshot::channel();
        let sent = handle.inputs.send(Input::SetDeadline(deadline, reply)).await;
        let (Ok(()), Ok(recording)) = (sent, taken.await) else {
            return Err(self.elsewhere(id).await);
        };
        Ok(recording.durable().await?)
    }

    async fn pause(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        self.transition(id, SandboxState::Paused, Input::Pause).await
    }

    async fn resume(&self, id: &SandboxId) -> Result<SandboxStatus, NodeError> {
        self.transition(id, SandboxState::Running, Input::Resume).await
    }

    async fn wake(&self, id: &SandboxId, reason: WakeReason) -> Result<SandboxStatus, NodeError> {
        tracing::debug!(sandbox = %id, ?reason, "is to be awake");
        self.resume(id).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Vec<Usage>, NodeError> {
        let (handle, link) = match self.link(id).await {
            Err(NodeError::Paused { .. }) => {
                // It uses nothing but memory; what was sampled before stays true.
                let history = self.find(id).map(|handle| handle.history.all());
                return history.ok_or_else(lost);
            }
            found => found?,
        };
        let worker = handle.view.borrow().worker.clone();
        match sample(&self.shared, &worker, &link).await {
            Ok(sample) => {
                handle.history.add(sample);
                Ok(handle.history.all())
            }
            Err(what) => Err(match self.find(id) {
                None => self.not_found(id).await,
                Some(_) => NodeError::GuestUnresponsive { id: id.clone(), what },
            }),
        }
    }

    async fn data(&self, id: &SandboxId) -> Result<DataStream, NodeError> {
        let (handle, link) = self.link(id).await?;
        handle.last_use.note();
        match link.data().await {
            Ok(data) => Ok(data),
            Err(error) => Err(self.link_failure(id, &error).await),
        }
    }

    async fn tunnel(&self, id: &SandboxId, port: u16) -> Result<TunnelStream, TunnelError> {
        let (handle, link) = self.link(id).await?;
        handle.last_use.note();
        match link.tunnel(port).await {
            Ok(stream) => Ok(stream),
            Err(LinkError::PortClosed) => Err(TunnelError::PortClosed { port }),
            Err(error) => Err(TunnelError::Node(self.link_failure(id, &error).await)),
        }
    }

    async fn guest_token(&self, id: &SandboxId) -> Result<String, NodeError> {
        match self.find(id) {
            Some(handle) => Ok(handle.guest_token.to_string()),
            None => Err(self.not_found(id).await),
        }
    }

    async fn ends_since(&self, since: Timestamp) -> Result<Vec<EndRecord>, NodeError> {
        Ok(self.shared.journal.ends_since(since).await?)
    }

    async fn templates(&self) -> Result<Vec<TemplateInfo>, NodeError> {
        Ok(self.shared.templates.list().await?)
    }

    async fn delete_template(&self, name: &str) -> Result<(), NodeError> {
        self.shared.templates.delete(name).await?;
        self.shared.pool.look();
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<SandboxEvent> {
        self.shared.events.subscribe()
    }

    async fn shutdown(&self) {
        self.close().await;
    }
}
