//! Letting sandboxes in: new ones if there is room, and those of an earlier process whatever the bounds are now.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use jiff::Timestamp;
use space_api::{lifecycle::SandboxState, size::SizeClass};
use space_node_manager::ObjectName;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{NodeManager, Shared};
use crate::{
    adopt::Adopted,
    config::MONITOR_COMMIT,
    failure::{self, chain},
    idle::LastUse,
    journal::Life,
    link::{LinkError, Secrets},
    provision::Progress,
    registry::{Admission, Handle},
    remains::Remains,
    sandbox::{INPUTS, Input, Origin, Sandbox, View, as_recorded, now_as_recorded},
    seam::{CreateSandbox, NodeError, SandboxStatus},
    templates::ResolvedTemplate,
    usage::History,
    worker,
};

/// Everything that a sandbox's task and its handle are made of.
struct Entrant {
    request: CreateSandbox,
    resolved: ResolvedTemplate,
    size: SizeClass,
    secrets: Secrets,
    accepted: Instant,
    accepted_at: Timestamp,
    worker: ObjectName,
}

/// Both halves of one that is about to get in.
struct Entry {
    handle: Handle,
    inputs: mpsc::Sender<Input>,
    queue: mpsc::Receiver<Input>,
    view: watch::Sender<View>,
}

impl Entrant {
    fn view(&self) -> View {
        View {
            status: SandboxStatus {
                id: self.request.id.clone(),
                project: self.request.project.clone(),
                state: SandboxState::Creating,
                template: self.resolved.name.clone(),
                template_digest: self.resolved.digest.clone(),
                size: self.size,
                generation: self.request.generation,
                started_at: self.accepted_at,
                deadline: as_recorded(self.request.deadline),
                ready_ms: None,
                machine: self.worker.as_str().to_owned(),
                paused_at: None,
                last_active_at: self.accepted_at,
                idle_since: None,
            },
            worker: self.worker.clone(),
            network: None,
            link: None,
            failure: None,
            end: None,
        }
    }

    fn entry(&self, view: View) -> Entry {
        let (view, viewer) = watch::channel(view);
        let (inputs, queue) = mpsc::channel(INPUTS);
        Entry {
            handle: Handle {
                id: self.request.id.clone(),
                inputs: inputs.clone(),
                view: viewer,
                history: Arc::new(History::default()),
                guest_token: Arc::from(self.secrets.guest_token.as_str()),
                last_use: Arc::new(LastUse::new()),
            },
            inputs,
            queue,
            view,
        }
    }

    /// Starts the task of one that is in.
    fn live(
        self,
        shared: &Arc<Shared>,
        handle: &Handle,
        parts: (mpsc::Sender<Input>, mpsc::Receiver<Input>, watch::Sender<View>),
        remains: Remains,
        origin: Origin,
    ) {
        let (own_inputs, queue, view) = parts;
        let sandbox = Sandbox {
            shared: shared.clone(),
            owner: shared.owner(CancellationToken::new()),
            remains: Mutex::new(remains),
            progress: Progress::default(),
            request: self.request,
            resolved: self.resolved,
            size: self.size,
            accepted: self.accepted,
            accepted_at: self.accepted_at,
            secrets: self.secrets,
            lease: Mutex::default(),
            history: handle.history.clone(),
            last_use: handle.last_use.clone(),
            view,
            own_inputs,
        };
        shared.tracker.spawn(Box::pin(sandbox.run(origin, queue)));
    }
}

/// Memory a sandbox of this size is counted with, bytes.
fn committed(shared: &Shared, size: SizeClass) -> u64 {
    (u64::from(size.memory_mib) << 20) / 100 * shared.config.memory_commit_percent + MONITOR_COMMIT
}

impl NodeManager {
    /// Lets a sandbox in and starts its task, or finds the one that is in.
    pub(super) async fn admit(&self, request: CreateSandbox) -> Result<Arc<Handle>, NodeError> {
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
        let spare = shared.pool.bytes();
        if let Some(what) = shared.room.lacking(&shared.config, spare) {
            // What is kept ready is given up before anyone is refused for long.
            shared.pool.look();
            return Err(failure::no_capacity(what));
        }
        if spare > 0 && shared.room.lacking(&shared.config, 0).is_some() {
            // There is room only because the pool will make it.
            shared.pool.look();
        }
        let internal = |what: String| NodeError::Internal { what };
        let entrant = Entrant {
            worker: worker::fresh_name().map_err(|error| internal(chain(&error)))?,
            secrets: Secrets::random().map_err(|error| internal(chain(&error)))?,
            request,
            resolved,
            size,
            accepted,
            accepted_at: now_as_recorded(),
        };
        let Entry {
            handle,
            inputs,
            queue,
            view,
        } = entrant.entry(entrant.view());
        let admission = shared
            .registry
            .admit(&entrant.request.id, committed(shared, size), || handle)?;
        match admission {
            Admission::Existing(handle) => Ok(handle),
            Admission::New(handle) => {
                let remains = Remains::new(entrant.worker.clone());
                entrant.live(shared, &handle, (inputs, queue, view), remains, Origin::Created);
                Ok(handle)
            }
        }
    }
}

/// Lets one in whose machine was taken over, as it was found.
pub(super) fn readmit(shared: &Arc<Shared>, life: Life, mut adopted: Adopted) -> Result<(), LinkError> {
    // Drawn anew and not used again, but for the token that programs inside already know.
    let mut secrets = Secrets::random()?;
    secrets.guest_token = life.guest_token;
    let now = now_as_recorded();
    let entrant = Entrant {
        worker: adopted.worker.name.clone(),
        secrets,
        request: CreateSandbox {
            id: life.id,
            project: life.project,
            template: life.template.clone(),
            size: Some(life.size),
            generation: life.generation,
            environment: life.environment,
            deadline: life.deadline,
            on_idle: life.on_idle,
        },
        resolved: ResolvedTemplate {
            name: life.template,
            digest: life.template_digest,
            default_size: life.size,
        },
        size: life.size,
        accepted: Instant::now(),
        accepted_at: life.started_at,
    };
    let mut view = entrant.view();
    view.link = Some(adopted.worker.link.clone());
    view.network.clone_from(&adopted.remains.network);
    let since = now.duration_since(life.started_at).as_secs_f64() * 1e3;
    let status = &mut view.status;
    // One that was being created is usable now.
    status.ready_ms = Some(life.ready_ms.unwrap_or(since));
    status.paused_at = adopted.paused_at;
    status.idle_since = adopted.paused_at;
    (status.state, status.last_active_at) = match adopted.paused_at {
        Some(at) => (SandboxState::Paused, at),
        None => (SandboxState::Running, now),
    };
    let Entry {
        handle,
        inputs,
        queue,
        view,
    } = entrant.entry(view);
    shared.uids.reserve(adopted.remains.uid.unwrap_or_default());
    let handle = shared.registry.readmit(committed(shared, life.size), handle);
    let remains = Remains::taken_from(&mut adopted.remains);
    let parts = (inputs, queue, view);
    entrant.live(
        shared,
        &handle,
        parts,
        remains,
        Origin::Adopted(Box::new(adopted)),
    );
    Ok(())
}
