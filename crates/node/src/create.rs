//! The steps from an admitted request to a usable sandbox.
//!
//! ```text
//!                                       ┌─► journal: durable ─┐
//!  provision: a worker that stands still ─┴─► claim: identity ───┴─► environment ─► usable
//! ```
//!
//! The journal is written while the guest takes its identity, because a life of which no record became durable was never
//! promised to anyone, and whatever it made is owned by name and swept. A step that acts on the host is never dropped half-way: when
//! the sandbox is told to end, the current one finishes (its machine is killed meanwhile) and the next does not begin.

use std::time::Instant;

use tokio_util::sync::CancellationToken;

use crate::{
    failure::Failure,
    provision::{CPU_WEIGHT, Order},
    sandbox::Sandbox,
    templates::StartingPoint,
    worker::Worker,
};

/// A sandbox that is usable.
pub(crate) struct Born {
    pub(crate) worker: Worker,
    pub(crate) timings: Timings,
}

/// Where the time went, milliseconds since the create was accepted.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timings {
    pub(crate) permitted: f64,
    pub(crate) prepared: f64,
    pub(crate) started: f64,
    pub(crate) greeted: f64,
    pub(crate) recorded: f64,
    pub(crate) ready: f64,
}

pub(crate) fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Carries out all steps. When `cancel` is cancelled it stops at the next point where that leaves nothing half-made.
pub(crate) async fn create(
    sandbox: &Sandbox,
    point: StartingPoint,
    cancel: &CancellationToken,
) -> Result<Born, Failure> {
    let mut timings = Timings::default();
    let worker = start(sandbox, point, cancel, &mut timings).await?;

    if !sandbox.request.environment.is_empty() {
        sandbox.progress.at("setting its environment");
        let body = serde_json::json!({ "envVars": sandbox.request.environment })
            .to_string()
            .into_bytes();
        interruptible(cancel, worker.link.init(body))
            .await?
            .map_err(|error| Failure::step("setting its environment", &error))?;
    }
    timings.ready = milliseconds(sandbox.accepted);
    Ok(Born { worker, timings })
}

/// Everything up to the daemon's acknowledgement.
async fn start(
    sandbox: &Sandbox,
    point: StartingPoint,
    cancel: &CancellationToken,
    timings: &mut Timings,
) -> Result<Worker, Failure> {
    let shared = &sandbox.shared;
    sandbox.progress.at("waiting for its turn");
    let _permit = interruptible(cancel, shared.starts.acquire())
        .await?
        .map_err(|error| Failure::step("waiting for its turn", &error))?;
    timings.permitted = milliseconds(sandbox.accepted);
    let order = Order {
        shared,
        size: sandbox.size,
        cpu_weight: CPU_WEIGHT,
        remains: &sandbox.remains,
        progress: &sandbox.progress,
        cancel,
    };
    let (worker, stamps) = order.provision(point).await?;
    let since = |at: Instant| at.duration_since(sandbox.accepted).as_secs_f64() * 1e3;
    timings.prepared = since(stamps.prepared);
    timings.started = since(stamps.started);

    sandbox.progress.at("greeting the daemon");
    let (id, generation) = (sandbox.request.id.as_str(), sandbox.request.generation);
    let claim = async {
        let claimed = interruptible(cancel, worker.claim(id, generation, &sandbox.secrets)).await;
        (claimed, milliseconds(sandbox.accepted))
    };
    let record = async {
        let recorded = shared.journal.begin(sandbox.beginning(&worker)).await.map_err(Failure::from);
        if recorded.is_err() {
            cancel.cancel();
        }
        (recorded, milliseconds(sandbox.accepted))
    };
    let ((recorded, recorded_ms), (claimed, greeted_ms)) = tokio::join!(record, claim);
    recorded?;
    claimed??;
    timings.recorded = recorded_ms;
    timings.greeted = greeted_ms;
    Ok(worker)
}

/// Runs what may be dropped at any point until it is done or the sandbox is to end.
async fn interruptible<T>(cancel: &CancellationToken, work: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Failure::Ended),
        done = work => Ok(done),
    }
}
