//! [`NodeManager`]: opens a node, admits sandboxes, and answers for them.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures_util::future::join_all;
use jiff::Timestamp;
use space_api::{
    id::SandboxId,
    lifecycle::{EndCause, SandboxState},
};
use space_node_manager::{ObjectName, Privileges};
use space_vmm::Vmm;
use tokio::sync::{OnceCell, Semaphore, broadcast, mpsc, oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    OpenError,
    config::{MONITOR_COMMIT, NodeConfig},
    failure::{self, Failure, chain},
    host_room,
    journal::Journal,
    link::{Link, LinkError, Owner, Secrets},
    network_pool::NetworkPool,
    provision::Progress,
    registry::{Admission, Handle, Registry},
    remains::{Remains, janitor},
    sandbox::{INPUTS, Input, Sandbox, Settled, View, now_as_recorded, sample},
    seam::{
        CreateSandbox, DataStream, EndRecord, Node, NodeError, NodeInfo, SandboxEvent, SandboxStatus,
        TemplateInfo, TunnelError, TunnelStream, Usage, WakeReason,
    },
    start_up::{self, DISKS, Locks, MACHINES},
    templates::Templates,
    uids::UidSlots,
    usage::History,
    worker,
};

/// Events that a slow receiver may be behind before it misses some.
const EVENTS: usize = 1024;
/// Wait for the node's own tasks at the end.
const LAST_TASKS: Duration = Duration::from_secs(5);

/// What all sandboxes of a node share.
pub(crate) struct Shared {
    pub(crate) config: NodeConfig,
    pub(crate) privileges: Arc<dyn Privileges>,
    pub(crate) vmm: Arc<dyn Vmm>,
    pub(crate) templates: Arc<dyn Templates>,
    pub(crate) journal: Journal,
    pub(crate) networks: NetworkPool,
    pub(crate) uids: Arc<UidSlots>,
    pub(crate) registry: Registry,
    pub(crate) starts: Semaphore,
    tracker: TaskTracker,
    stop: CancellationToken,
    events: broadcast::Sender<SandboxEvent>,
    left: mpsc::UnboundedSender<Remains>,
    _locks: Locks,
}

impl Shared {
    /// Where a machine has its sockets and logs.
    pub(crate) fn machine_directory(&self, worker: &ObjectName) -> PathBuf {
        self.config.run_directory.join(MACHINES).join(worker.as_str())
    }

    /// Where a machine has its disk layers.
    pub(crate) fn disk_directory(&self, worker: &ObjectName) -> PathBuf {
        self.config.data_directory.join(DISKS).join(worker.as_str())
    }

    /// For the tasks of something that ends before the node does.
    pub(crate) fn owner(&self, stop: CancellationToken) -> Owner {
        Owner {
            tracker: self.tracker.clone(),
            stop,
        }
    }

    pub(crate) fn announce(&self, event: SandboxEvent) {
        // An error only says that nobody listens.
        drop(self.events.send(event));
    }

    pub(crate) fn leave_to_janitor(&self, remains: Remains) {
        if self.left.send(remains).is_err() {
            tracing::debug!("the janitor has gone home; the sweep takes the rest");
        }
    }
}

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
    /// Locks the directories, removes what an earlier process left behind, marks its sandboxes as ended, and begins to
    /// make networks ahead.
    pub async fn open(
        config: NodeConfig,
        privileges: Arc<dyn Privileges>,
        vmm: Arc<dyn Vmm>,
        templates: Arc<dyn Templates>,
    ) -> Result<Arc<Self>, OpenError> {
        let locks = start_up::directories(&config).await?;
        // First the machines, then the record that they have ended.
        start_up::sweep(&config, privileges.as_ref()).await?;
        let tracker = TaskTracker::new();
        let stop = CancellationToken::new();
        let path = config.data_directory.join("node.db");
        let (journal, lives) = Journal::open(&path, &tracker, config.faults.clone()).await?;
        for life in lives {
            let end = EndRecord {
                id: life.id,
                generation: life.generation,
                cause: EndCause::PlatformRestarted,
                ended_at: now_as_recorded(),
                cpu_micros: 0,
            };
            journal.end(end).await?;
        }
        let available = host_room::memory_available().unwrap_or(u64::MAX);
        let memory_budget = config.memory_budget.unwrap_or(available / 5 * 4);
        let uids = Arc::new(UidSlots::new(config.uids.clone()));
        let networks = NetworkPool::start(
            privileges.clone(),
            config.networks_ahead,
            &tracker,
            stop.child_token(),
        );
        let (left, queue) = mpsc::unbounded_channel();
        tracker.spawn(janitor(
            privileges.clone(),
            uids.clone(),
            queue,
            stop.child_token(),
        ));
        let capabilities = vmm.capabilities();
        let description = format!(
            "{} {} {}",
            capabilities.driver, capabilities.version, capabilities.accelerator
        );
        let shared = Shared {
            registry: Registry::new(&config, memory_budget),
            starts: Semaphore::new(config.concurrent_starts),
            events: broadcast::channel(EVENTS).0,
            config,
            privileges,
            vmm,
            templates,
            journal,
            networks,
            uids,
            tracker,
            stop,
            left,
            _locks: locks,
        };
        Ok(Arc::new(Self {
            shared: Arc::new(shared),
            finished: OnceCell::new(),
            description,
        }))
    }

    /// Memory a sandbox of this size is counted with, bytes.
    fn committed(&self, memory_mib: u32) -> u64 {
        (u64::from(memory_mib) << 20) / 100 * self.shared.config.memory_commit_percent + MONITOR_COMMIT
    }

    /// Lets a sandbox in and starts its task, or finds the one that is in.
    async fn admit(&self, request: CreateSandbox) -> Result<Arc<Handle>, NodeError> {
        let shared = &self.shared;
        let accepted = Instant::now();
        if shared.registry.is_closed() {
            return Err(NodeError::ShuttingDown);
        }
        if let Some(handle) = shared.registry.find(&request.id) {
            return Ok(handle);
        }
        let resolved = shared.templates.resolve(&request.template).await?;
        let size = request.size.unwrap_or(resolved.default_size);
        if let Some(what) = host_room::lacking(&shared.config) {
            return Err(failure::no_capacity(what));
        }
        let worker = worker::fresh_name().map_err(|error| NodeError::Internal { what: chain(&error) })?;
        let secrets = Secrets::random().map_err(|error| NodeError::Internal { what: chain(&error) })?;
        let accepted_at = now_as_recorded();
        let status = SandboxStatus {
            id: request.id.clone(),
            project: request.project.clone(),
            state: SandboxState::Creating,
            template: resolved.name.clone(),
            template_digest: resolved.digest.clone(),
            size,
            generation: request.generation,
            started_at: accepted_at,
            deadline: request.deadline,
            ready_ms: None,
            machine: worker.as_str().to_owned(),
            paused_at: None,
            last_active_at: accepted_at,
            idle_since: None,
        };
        let (view, viewer) = watch::channel(View {
            status,
            worker: worker.clone(),
            link: None,
            failure: None,
            end: None,
        });
        let (inputs, queue) = mpsc::channel(INPUTS);
        let history = Arc::new(History::default());
        let guest_token = Arc::from(secrets.guest_token.as_str());
        let handle = || Handle {
            id: request.id.clone(),
            inputs: inputs.clone(),
            view: viewer,
            history: history.clone(),
            guest_token,
        };
        match shared
            .registry
            .admit(&request.id, self.committed(size.memory_mib), handle)?
        {
            Admission::Existing(handle) => Ok(handle),
            Admission::New(handle) => {
                let sandbox = Sandbox {
                    shared: shared.clone(),
                    owner: shared.owner(CancellationToken::new()),
                    remains: Mutex::new(Remains::new(worker)),
                    progress: Progress::default(),
                    request,
                    resolved,
                    size,
                    accepted,
                    accepted_at,
                    secrets,
                    lease: Mutex::default(),
                    history,
                    view,
                    own_inputs: inputs,
                };
                shared.tracker.spawn(Box::pin(sandbox.run(queue)));
                Ok(handle)
            }
        }
    }

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
            Some(handle) if handle.state() != SandboxState::Running => NodeError::Transitioning {
                id: id.clone(),
                state: handle.state(),
            },
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
        }
    }

    async fn create(&self, request: CreateSandbox) -> Result<SandboxStatus, NodeError> {
        let id = request.id.clone();
        let handle = self.admit(request).await?;
        let mut watched = handle.view.clone();
        let (status, failure, end) = {
            // Asked for again it may be paused by now, and is created all the same.
            let settled =
                |view: &View| view.status.ready_ms.is_some() || view.status.state == SandboxState::Ended;
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
        if sent.is_err() || taken.await.is_err() {
            return Err(self.elsewhere(id).await);
        }
        Ok(())
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
        let (_, link) = self.link(id).await?;
        match link.data().await {
            Ok(data) => Ok(data),
            Err(error) => Err(self.link_failure(id, &error).await),
        }
    }

    async fn tunnel(&self, id: &SandboxId, port: u16) -> Result<TunnelStream, TunnelError> {
        let (_, link) = self.link(id).await?;
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
        Ok(self.shared.templates.delete(name).await?)
    }

    fn events(&self) -> broadcast::Receiver<SandboxEvent> {
        self.shared.events.subscribe()
    }

    /// Order: nobody gets in; all sandboxes end, at the same time; the background tasks stop; networks made ahead are
    /// removed; a sweep takes what is left; the journal is closed.
    async fn shutdown(&self) {
        self.finished
            .get_or_init(|| async {
                let shared = &self.shared;
                shared.registry.close();
                let all = shared.registry.all();
                let ends = join_all(all.iter().map(|handle| async {
                    drop(handle.inputs.send(Input::End(EndCause::PlatformShutdown)).await);
                    drop(ended(handle).await);
                }));
                if tokio::time::timeout(shared.config.limits.shutdown, ends).await.is_err() {
                    tracing::error!(left = shared.registry.len(), "not every sandbox ended in time; sweeping");
                }
                shared.stop.cancel();
                shared.networks.close().await;
                if let Err(error) = start_up::sweep(&shared.config, shared.privileges.as_ref()).await {
                    tracing::error!(error = %chain(&error), "the last sweep failed; the next start repeats it");
                }
                shared.journal.close().await;
                shared.tracker.close();
                if tokio::time::timeout(LAST_TASKS, shared.tracker.wait()).await.is_err() {
                    tracing::error!(tasks = shared.tracker.len(), "tasks of the node are still running");
                }
            })
            .await;
    }
}
