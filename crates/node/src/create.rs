//! The steps from an admitted request to a usable sandbox.
//!
//! ```text
//!  taken from the pool ──────────┐          ┌─► journal: durable ─┐
//!  provision: made, stands still ─┴─► worker ─┴─► claim: identity ───┴─► environment ─► usable
//! ```
//!
//! The journal is written while the guest takes its identity, because a life of which no record became durable was never
//! promised to anyone, and whatever it made is owned by name and swept. A step that acts on the host is never dropped
//! half-way: when the sandbox is told to end, the current one finishes (its machine is killed meanwhile) and the next does
//! not begin.
//!
//! A machine from the pool that fails as it is taken is made up for by one of the sandbox's own: the pool never is why a
//! create fails.

use std::time::Instant;

use tokio_util::sync::CancellationToken;

use crate::{
    failure::{self, Failure},
    journal::Change,
    locked,
    pool::{self, Ready},
    provision::{CPU_WEIGHT, Order},
    remains::Remains,
    sandbox::Sandbox,
    templates::StartingPoint,
    worker::{self, Worker},
};

/// What a sandbox begins with.
pub(crate) enum Source {
    /// A machine that was made ahead.
    Ready(Box<Ready>),
    /// A template's machine.
    Point(Box<StartingPoint>),
}

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

/// One create under way.
struct Create<'a> {
    sandbox: &'a Sandbox,
    cancel: &'a CancellationToken,
    timings: Timings,
    /// Whether the journal knows of it, with a machine that may have been given up since.
    recorded: bool,
}

/// Carries out all steps. When `cancel` is cancelled it stops at the next point where that leaves nothing half-made.
pub(crate) async fn create(
    sandbox: &Sandbox,
    source: Source,
    cancel: &CancellationToken,
) -> Result<Born, Failure> {
    let mut create = Create {
        sandbox,
        cancel,
        timings: Timings::default(),
        recorded: false,
    };
    let worker = match source {
        Source::Ready(ready) => create.take_over(*ready).await?,
        Source::Point(point) => create.start(*point).await?,
    };
    if !sandbox.request.environment.is_empty() {
        sandbox.progress.at("setting its environment");
        let body = serde_json::json!({ "envVars": sandbox.request.environment })
            .to_string()
            .into_bytes();
        interruptible(cancel, worker.link.init(body))
            .await?
            .map_err(|error| Failure::step("setting its environment", &error))?;
    }
    create.timings.ready = milliseconds(sandbox.accepted);
    Ok(Born {
        worker,
        timings: create.timings,
    })
}

impl Create<'_> {
    /// Gives a machine of the pool its identity; if that fails for the machine's sake, makes another.
    async fn take_over(&mut self, ready: Ready) -> Result<Worker, Failure> {
        let sandbox = self.sandbox;
        let (worker, lease) = ready.claimed_by(&sandbox.remains);
        *locked(&sandbox.lease) = Some(lease);
        let failure = match self.claim(&worker).await {
            Ok(()) => return Ok(worker),
            Err(failure @ (Failure::Ended | Failure::Stale)) => return Err(failure),
            Err(failure) => failure,
        };
        if self.cancel.is_cancelled() {
            return Err(failure);
        }
        tracing::warn!(
            sandbox = %sandbox.request.id,
            worker = %worker.name,
            error = failure.detail(),
            "a machine of the pool failed as it was taken; another is made"
        );
        let name = worker::fresh_name().map_err(failure::privilege("naming a machine"))?;
        let failed = std::mem::replace(&mut *locked(&sandbox.remains), Remains::new(name));
        let shared = sandbox.shared.clone();
        sandbox
            .owner
            .tracker
            .spawn(async move { pool::remove(&shared, failed).await });
        sandbox.progress.at("preparing the template's machine");
        let ensure = sandbox
            .shared
            .templates
            .ensure_machine(&sandbox.resolved, sandbox.size);
        let point = interruptible(self.cancel, ensure).await??;
        self.start(point).await
    }

    /// Makes a machine and gives it its identity.
    async fn start(&mut self, point: StartingPoint) -> Result<Worker, Failure> {
        let (sandbox, shared) = (self.sandbox, &self.sandbox.shared);
        *locked(&sandbox.lease) = Some(point.lease.clone());
        sandbox.progress.at("waiting for its turn");
        let _permit = interruptible(self.cancel, shared.starts.acquire())
            .await?
            .map_err(|error| Failure::step("waiting for its turn", &error))?;
        self.timings.permitted = milliseconds(sandbox.accepted);
        let order = Order {
            shared,
            size: sandbox.size,
            cpu_weight: CPU_WEIGHT,
            remains: &sandbox.remains,
            progress: &sandbox.progress,
            cancel: self.cancel,
        };
        let (worker, stamps) = order.provision(point).await?;
        let since = |at: Instant| at.duration_since(sandbox.accepted).as_secs_f64() * 1e3;
        self.timings.prepared = since(stamps.prepared);
        self.timings.started = since(stamps.started);
        self.claim(&worker).await?;
        Ok(worker)
    }

    /// Gives the worker its identity while its life is being recorded.
    async fn claim(&mut self, worker: &Worker) -> Result<(), Failure> {
        let (sandbox, shared) = (self.sandbox, &self.sandbox.shared);
        sandbox.progress.at("greeting the daemon");
        let (id, generation) = (&sandbox.request.id, sandbox.request.generation);
        let claim = async {
            let claim = worker.claim(id.as_str(), generation, &sandbox.secrets);
            let claimed = interruptible(self.cancel, claim).await;
            (claimed, milliseconds(sandbox.accepted))
        };
        let record = async {
            let recorded = if self.recorded {
                let network = locked(&sandbox.remains).network.clone();
                let record = Box::new(worker.machine.record());
                let change = Change::Machine { record, network };
                shared.journal.change(id.clone(), generation, change).await
            } else {
                shared.journal.begin(sandbox.beginning(worker)).await
            };
            let recorded = recorded.map_err(Failure::from);
            if recorded.is_err() {
                self.cancel.cancel();
            }
            (recorded, milliseconds(sandbox.accepted))
        };
        let ((recorded, recorded_ms), (claimed, greeted_ms)) = tokio::join!(record, claim);
        recorded?;
        self.recorded = true;
        claimed??;
        self.timings.recorded = recorded_ms;
        self.timings.greeted = greeted_ms;
        Ok(())
    }
}

/// Runs what may be dropped at any point until it is done or the sandbox is to end.
async fn interruptible<T>(cancel: &CancellationToken, work: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Failure::Ended),
        done = work => Ok(done),
    }
}
