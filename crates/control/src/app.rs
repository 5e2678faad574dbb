//! What all parts of the control plane share.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use space_api::{id::SandboxId, lifecycle::SandboxState};
use space_node::{EndRecord, Node, NodeError, TemplateInfo};
use space_store::{End, SandboxRow, Store, StoreError};
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    callers::Callers,
    config::ControlConfig,
    deadlines::Deadlines,
    queue::Queue,
    transitions::{Pauses, Wakes},
};

/// Most sandboxes whose routing facts are kept in memory; beyond it all are forgotten and read again.
const MAX_ROUTES: usize = 8192;
/// Streams of events at once: each reads the store when something happens.
const MAX_FOLLOWERS: usize = 128;
/// How long the node's list of templates is taken as true.
const TEMPLATES_FRESH: Duration = Duration::from_secs(2);

/// Cheap to clone.
pub(crate) type App = Arc<Shared>;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: ControlConfig,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) node: Arc<dyn Node>,
    /// Owns creates, upgraded connections and the drivers of tunnelled ones.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the server is told to stop: what would go on for ever ends.
    pub(crate) closing: CancellationToken,
    /// Ends what `tasks` owns, where waiting is no use.
    pub(crate) stop: CancellationToken,
    pub(crate) callers: Callers,
    pub(crate) queue: Queue,
    pub(crate) deadlines: Deadlines,
    pub(crate) pauses: Pauses,
    pub(crate) wakes: Wakes,
    /// Streams of events at once.
    pub(crate) followers: Arc<Semaphore>,
    /// Sandboxes on the node that are older than the store, and of which it has been said.
    pub(crate) elders: Mutex<HashSet<SandboxId>>,
    routes: Mutex<HashMap<SandboxId, Arc<Route>>>,
    creating: Mutex<HashSet<SandboxId>>,
    templates: Mutex<Option<(Instant, Arc<Vec<TemplateInfo>>)>>,
}

/// What the edge must know of a sandbox; none of it changes within a life.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) id: SandboxId,
    pub(crate) access_token: Option<Token>,
    pub(crate) traffic_token: Option<Token>,
    pub(crate) mask_request_host: Option<String>,
    /// Whether traffic to its ports wakes it.
    pub(crate) wake_on_traffic: bool,
}

/// A secret that is not printed.
pub(crate) struct Token(pub(crate) String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Marks a create as under way for as long as it is held, so that the controller lets it be.
#[derive(Debug)]
pub(crate) struct CreateInFlight {
    app: App,
    id: SandboxId,
}

impl Drop for CreateInFlight {
    fn drop(&mut self) {
        lock(&self.app.creating).remove(&self.id);
    }
}

impl Shared {
    pub(crate) fn new(config: ControlConfig, store: Arc<dyn Store>, node: Arc<dyn Node>) -> Self {
        Self {
            config,
            store,
            node,
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            stop: CancellationToken::new(),
            callers: Callers::default(),
            queue: Queue::default(),
            deadlines: Deadlines::default(),
            pauses: Pauses::default(),
            wakes: Wakes::default(),
            followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)),
            elders: Mutex::default(),
            routes: Mutex::default(),
            creating: Mutex::default(),
            templates: Mutex::default(),
        }
    }

    /// Where to send requests for `id`; `None` if there is no such sandbox or it has ended.
    pub(crate) async fn route(&self, id: &SandboxId) -> Result<Option<Arc<Route>>, StoreError> {
        if let Some(known) = lock(&self.routes).get(id) {
            return Ok(Some(known.clone()));
        }
        let Some(row) = self.store.sandbox(id).await? else {
            return Ok(None);
        };
        if row.state == SandboxState::Ended {
            return Ok(None);
        }
        Ok(Some(self.learn_route(&row)))
    }

    /// Keeps the routing facts of a sandbox that was just read or made.
    pub(crate) fn learn_route(&self, row: &SandboxRow) -> Arc<Route> {
        let sandbox = &row.sandbox;
        let route = Arc::new(Route {
            id: sandbox.id.clone(),
            access_token: sandbox.access_token.clone().map(Token),
            traffic_token: sandbox.traffic_token.clone().map(Token),
            mask_request_host: sandbox.mask_request_host.clone(),
            wake_on_traffic: sandbox.wake_on_traffic,
        });
        let mut routes = lock(&self.routes);
        if routes.len() >= MAX_ROUTES {
            routes.clear();
        }
        routes.insert(sandbox.id.clone(), route.clone());
        route
    }

    /// The known sandbox of which `is_it` holds.
    pub(crate) fn find_route(&self, mut is_it: impl FnMut(&Route) -> bool) -> Option<Arc<Route>> {
        lock(&self.routes).values().find(|route| is_it(route)).cloned()
    }

    pub(crate) fn forget_route(&self, id: &SandboxId) {
        lock(&self.routes).remove(id);
    }

    /// Records an end that the node told of.
    pub(crate) async fn record_end(&self, record: &EndRecord) -> Result<bool, StoreError> {
        let end = End {
            generation: record.generation,
            cause: record.cause.clone(),
            ended_at: record.ended_at,
            cpu_micros: Some(record.cpu_micros),
        };
        let recorded = self.end(&record.id, &end, false).await?;
        if recorded {
            tracing::info!(sandbox = %record.id, cause = ?record.cause, "sandbox ended");
        }
        Ok(recorded)
    }

    /// Records an end, with everything that follows from it: all ends go through here.
    pub(crate) async fn end(
        &self,
        id: &SandboxId,
        end: &End,
        release_claim: bool,
    ) -> Result<bool, StoreError> {
        let recorded = self.store.end(id, end, release_claim).await?;
        self.forget_route(id);
        self.pauses.forget(id);
        if recorded {
            self.queue.freed();
        }
        Ok(recorded)
    }

    pub(crate) fn is_creating(&self, id: &SandboxId) -> bool {
        lock(&self.creating).contains(id)
    }

    /// The node's templates, a moment old at most.
    pub(crate) async fn templates(&self) -> Result<Arc<Vec<TemplateInfo>>, NodeError> {
        if let Some((at, known)) = &*lock(&self.templates)
            && at.elapsed() < TEMPLATES_FRESH
        {
            return Ok(known.clone());
        }
        let fresh = Arc::new(self.node.templates().await?);
        *lock(&self.templates) = Some((Instant::now(), fresh.clone()));
        Ok(fresh)
    }

    pub(crate) fn forget_templates(&self) {
        *lock(&self.templates) = None;
    }
}

/// Marks a create as under way.
pub(crate) fn begin_create(app: &App, id: &SandboxId) -> CreateInFlight {
    lock(&app.creating).insert(id.clone());
    CreateInFlight {
        app: app.clone(),
        id: id.clone(),
    }
}

/// Locks data that is whole at every point, so that another thread's panic does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
