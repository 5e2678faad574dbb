//! One sandbox: one task with an input queue and a view that anyone may watch.
//!
//! ```text
//!            admitted
//!               │
//!               ▼   template's machine, steps of `create`
//!           creating ── daemon acknowledged, record durable ──► running
//!               │                                                  │
//!   failed step, limit, End                  End, deadline, machine exited, daemon silent
//!               └───────────────► stopping ◄───────────────────────┘
//!                                    │  machine killed, everything removed, end recorded
//!                                    ▼
//!                                  ended   (leaves the registry; its record stays)
//! ```
//!
//! Only the task takes an edge. `End` may come in any state; in `stopping` it changes nothing. Each state has a limit:
//! creating 30 s (a template's first machine has its own), stopping 10 s, after which the rest is the janitor's.
//! The task belongs to the node, so a caller that goes away leaves nothing half-made.

mod running;

use std::{
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::FutureExt as _;
use jiff::Timestamp;
use space_api::{
    lifecycle::{EndCause, SandboxState},
    size::SizeClass,
};
use space_node_manager::{GroupUsage, ObjectName};
use space_vmm::{ExitReason, Machine};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    create::{self, Born, milliseconds},
    failure::{Failure, chain, tail},
    journal::{Change, JournalError, Life, Recorded},
    link::{Link, Owner, Secrets},
    locked,
    manager::Shared,
    provision::Progress,
    remains::Remains,
    seam::{CreateSandbox, EndRecord, SandboxEvent, SandboxStatus, Usage},
    templates::{Lease, ResolvedTemplate, StartingPoint},
    usage::{GuestFigures, History},
    worker::Worker,
};

/// Inputs that may wait; senders wait when it is full.
pub(crate) const INPUTS: usize = 16;
/// Longest detail of a cause, bytes.
const MOST_DETAIL: usize = 2048;
/// Longest single sleep towards a deadline, so that a corrected wall clock is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Tries to record an end.
const RECORD_TRIES: u32 = 3;

/// Told how a transition went: the state that was reached, or why it was not.
pub(crate) type Settled = oneshot::Sender<Result<SandboxStatus, String>>;

/// What a sandbox can be told.
#[derive(Debug)]
pub(crate) enum Input {
    /// End, for this reason.
    End(EndCause),
    /// End at this time; answered when it is taken over.
    SetDeadline(Timestamp, oneshot::Sender<()>),
    /// Stop the machine; answered when it stands still.
    Pause(Settled),
    /// Let the machine run; answered when it does.
    Resume(Settled),
    /// The daemon has not answered for too long.
    Unresponsive(String),
}

/// What can be seen of a sandbox.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) status: SandboxStatus,
    /// What its objects on the host are called.
    pub(crate) worker: ObjectName,
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) failure: Option<Failure>,
    pub(crate) end: Option<EndRecord>,
}

/// What its task works with.
pub(crate) struct Sandbox {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: CreateSandbox,
    pub(crate) resolved: ResolvedTemplate,
    pub(crate) size: SizeClass,
    pub(crate) accepted: Instant,
    pub(crate) accepted_at: Timestamp,
    pub(crate) secrets: Secrets,
    pub(crate) owner: Owner,
    pub(crate) progress: Progress,
    pub(crate) remains: Mutex<Remains>,
    /// Keeps the template's files, set once they are known.
    pub(crate) lease: Mutex<Option<Lease>>,
    pub(crate) history: Arc<History>,
    pub(crate) view: watch::Sender<View>,
    /// For the tasks that watch over it.
    pub(crate) own_inputs: mpsc::Sender<Input>,
}

/// Why a sandbox ends, and what its creator is told if it was still waiting.
struct Ending {
    cause: EndCause,
    failure: Failure,
}

impl Ending {
    fn told(cause: EndCause) -> Self {
        Self {
            cause,
            failure: Failure::Ended,
        }
    }

    fn failed(failure: Failure) -> Self {
        Self {
            cause: EndCause::CreateFailed {
                detail: tail(&failure.detail(), MOST_DETAIL),
            },
            failure,
        }
    }
}

impl Sandbox {
    /// Lives the whole life. Returns when nothing is left.
    pub(crate) async fn run(self, mut inputs: mpsc::Receiver<Input>) {
        let lived = AssertUnwindSafe(self.live(&mut inputs)).catch_unwind().await;
        let ending = lived.unwrap_or_else(|_| {
            tracing::error!(sandbox = %self.request.id, step = self.progress.step(), "the sandbox's own task panicked; taking it apart");
            Ending::failed(Failure::Step(format!("a fault of the node while {}", self.progress.step())))
        });
        self.stop(ending).await;
    }

    /// What is recorded of it once it has a machine.
    pub(crate) fn beginning(&self, worker: &Worker) -> Life {
        let view = self.view.borrow();
        Life {
            id: self.request.id.clone(),
            generation: self.request.generation,
            project: self.request.project.clone(),
            template: self.resolved.name.clone(),
            template_digest: self.resolved.digest.clone(),
            size: self.size,
            started_at: self.accepted_at,
            // It may have been moved meanwhile.
            deadline: view.status.deadline,
            on_idle: self.request.on_idle,
            guest_token: self.secrets.guest_token.clone(),
            environment: self.request.environment.clone(),
            machine: worker.machine.record(),
            network: locked(&self.remains).network.clone(),
            ready_ms: None,
            state: Recorded::Creating,
        }
    }

    /// Makes a change durable.
    async fn change(&self, change: Change) -> Result<(), JournalError> {
        let (id, generation) = (self.request.id.clone(), self.request.generation);
        self.shared.journal.change(id, generation, change).await
    }

    /// Writes a change down without waiting for it.
    async fn note(&self, change: Change) {
        let (id, generation) = (self.request.id.clone(), self.request.generation);
        self.shared.journal.note(id, generation, change).await;
    }

    async fn live(&self, inputs: &mut mpsc::Receiver<Input>) -> Ending {
        match self.creating(inputs).await {
            Ok(born) => self.running(inputs, born).await,
            Err(ending) => ending,
        }
    }

    // === creating ===

    async fn creating(&self, inputs: &mut mpsc::Receiver<Input>) -> Result<Born, Ending> {
        let limits = &self.shared.config.limits;
        self.progress.at("preparing the template's machine");
        let cancel = CancellationToken::new();
        let point = async {
            let ensure = self.shared.templates.ensure_machine(&self.resolved, self.size);
            tokio::select! {
                () = cancel.cancelled() => Err(Failure::Ended),
                point = ensure => point.map_err(Failure::from),
            }
        };
        let point: StartingPoint = self.attend(inputs, limits.template, &cancel, point).await?;
        *locked(&self.lease) = Some(point.lease.clone());
        let cancel = CancellationToken::new();
        let steps = Box::pin(create::create(self, point, &cancel));
        self.attend(inputs, limits.create, &cancel, steps).await
    }

    /// Works and listens at the same time. When the sandbox is to end first, `cancel` is cancelled, its machine killed,
    /// and the work is given the time to come to a point where nothing is half-made.
    async fn attend<T>(
        &self,
        inputs: &mut mpsc::Receiver<Input>,
        limit: Duration,
        cancel: &CancellationToken,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Ending> {
        let mut work = pin!(work);
        let mut limit_reached = pin!(tokio::time::sleep(limit));
        let ending = loop {
            tokio::select! {
                biased;
                done = &mut work => return done.map_err(Ending::failed),
                input = inputs.recv() => if let Some(cause) = self.take(input) {
                    break Ending::told(cause);
                },
                () = self.deadline_passes() => break Ending::told(EndCause::Deadline),
                () = &mut limit_reached => break Ending::failed(Failure::Step(format!(
                    "it was not usable within {} s while {}", limit.as_secs(), self.progress.step()
                ))),
            }
        };
        cancel.cancel();
        let hurry = async {
            let group = {
                let remains = locked(&self.remains);
                remains.group.then(|| remains.name.clone())
            };
            if let Some(group) = group {
                // A machine that is being started would otherwise be waited for.
                drop(self.shared.privileges.kill_group(&group).await);
            }
        };
        let wait = tokio::time::timeout(self.shared.config.limits.stop, work);
        let (waited, ()) = tokio::join!(wait, hurry);
        if waited.is_err() {
            tracing::error!(sandbox = %self.request.id, step = self.progress.step(), "a step did not come to an end; what it makes is swept later");
        }
        Err(ending)
    }

    // === running ===

    async fn running(&self, inputs: &mut mpsc::Receiver<Input>, born: Born) -> Ending {
        let Born { worker, timings } = born;
        let Worker { name, machine, link } = worker;
        self.progress.at("running");
        self.shared.registry.settled(&self.request.id);
        let usable = Change::Running {
            ready_ms: Some(timings.ready),
        };
        self.note(usable).await;
        self.view.send_modify(|view| {
            view.status.state = SandboxState::Running;
            view.status.ready_ms = Some(timings.ready);
            name.as_str().clone_into(&mut view.status.machine);
            view.worker = name.clone();
            view.link = Some(link.clone());
        });
        self.shared
            .announce(SandboxEvent::Ready(self.view.borrow().status.clone()));
        tracing::info!(
            sandbox = %self.request.id,
            ready_ms = timings.ready,
            worker = %name,
            permitted_ms = timings.permitted,
            prepared_ms = timings.prepared,
            started_ms = timings.started,
            greeted_ms = timings.greeted,
            recorded_ms = timings.recorded,
            "usable"
        );
        self.watch_over(&name, &link);

        Ending::told(self.live_on(inputs, &machine, &link).await)
    }

    /// Takes over what was put in; answers the cause when that is an end.
    fn take(&self, input: Option<Input>) -> Option<EndCause> {
        match input {
            Some(Input::End(cause)) => Some(cause),
            Some(Input::Unresponsive(detail)) => Some(EndCause::GuestFailed { detail }),
            Some(Input::SetDeadline(deadline, taken)) => {
                self.view.send_modify(|view| view.status.deadline = deadline);
                // Nobody may be waiting any more.
                taken.send(()).ok();
                None
            }
            // Dropped unanswered: it is neither running nor paused.
            Some(Input::Pause(_) | Input::Resume(_)) => None,
            // The task holds a sender itself, so the queue cannot end.
            None => Some(EndCause::Deleted),
        }
    }

    /// Sleeps on the monotonic clock, looking at the wall clock now and then, for both may be changed or stand still.
    async fn deadline_passes(&self) {
        loop {
            let deadline = self.view.borrow().status.deadline;
            let Ok(left) = Duration::try_from(deadline.duration_since(Timestamp::now())) else {
                return;
            };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
        }
    }

    async fn exit_cause(&self, machine: &dyn Machine, reason: Option<ExitReason>) -> EndCause {
        let failed = |detail: &str| EndCause::VmmFailed {
            detail: tail(detail, MOST_DETAIL),
        };
        match reason {
            Some(ExitReason::GuestShutdown) => EndCause::GuestShutdown,
            Some(ExitReason::GuestPanicked { console }) => {
                let console = if console.is_empty() {
                    machine.console().await
                } else {
                    console
                };
                EndCause::GuestFailed {
                    detail: tail(&console, MOST_DETAIL),
                }
            }
            Some(ExitReason::OutOfMemory) => EndCause::OutOfMemory,
            Some(ExitReason::MonitorFailed { detail }) => {
                let worker = self.view.borrow().worker.clone();
                let usage = self
                    .shared
                    .privileges
                    .group_usage(&worker)
                    .await
                    .unwrap_or_default();
                if usage.oom_kills > 0 {
                    EndCause::OutOfMemory
                } else {
                    failed(&detail)
                }
            }
            Some(ExitReason::Killed) => failed("the monitor was killed"),
            None => failed("the monitor's driver stopped watching it"),
        }
    }

    /// Starts the task that asks the daemon for its health and samples its use, until the sandbox stops.
    fn watch_over(&self, worker: &ObjectName, link: &Arc<Link>) {
        let limits = self.shared.config.limits.clone();
        let stop = self.owner.stop.clone();
        let inputs = self.own_inputs.clone();
        let (shared, id, history) = (self.shared.clone(), self.request.id.clone(), self.history.clone());
        let healthy = link.clone();
        let health = async move {
            let mut misses = 0;
            loop {
                tokio::time::sleep(limits.health_interval).await;
                match healthy.health(limits.health_answer).await {
                    Ok(()) => misses = 0,
                    Err(error) => {
                        misses += 1;
                        let error = chain(&error);
                        tracing::warn!(sandbox = %id, misses, error, "the daemon did not say that it is well");
                        if misses >= limits.health_misses {
                            let detail =
                                format!("the space daemon has not answered {misses} times in a row: {error}");
                            drop(inputs.send(Input::Unresponsive(tail(&detail, MOST_DETAIL))).await);
                            return;
                        }
                    }
                }
            }
        };
        let (link, worker, id) = (link.clone(), worker.clone(), self.request.id.clone());
        let usage = async move {
            loop {
                tokio::time::sleep(limits.usage_interval).await;
                match sample(&shared, &worker, &link).await {
                    Ok(sample) => history.add(sample),
                    Err(error) => tracing::debug!(sandbox = %id, error, "no sample of its use"),
                }
            }
        };
        self.owner.tracker.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                _ = async { tokio::join!(health, usage) } => {}
            }
        });
    }

    // === stopping ===

    async fn stop(&self, ending: Ending) {
        let Ending { cause, failure } = ending;
        self.view.send_modify(|view| {
            view.status.state = SandboxState::Stopping;
            view.link = None;
        });
        self.shared.registry.settled(&self.request.id);
        self.owner.stop.cancel();
        let mut remains = Remains::taken_from(&mut locked(&self.remains));
        let limit = self.shared.config.limits.stop;
        let usage: GroupUsage = remains
            .remove(self.shared.privileges.as_ref(), &self.shared.uids, limit)
            .await;
        if !remains.is_empty() {
            self.shared.leave_to_janitor(remains);
        }
        let end = EndRecord {
            id: self.request.id.clone(),
            generation: self.request.generation,
            cause,
            ended_at: now_as_recorded(),
            cpu_micros: usage.cpu_micros,
        };
        if failure == Failure::Stale {
            // That life has its own record, which this attempt must not touch.
            self.shared.registry.remove(&self.request.id, None);
            self.finish(None, failure);
            return;
        }
        self.record(&end).await;
        tracing::info!(sandbox = %self.request.id, cause = ?end.cause, lived_ms = milliseconds(self.accepted), "ended");
        self.shared.registry.remove(&self.request.id, Some(end.clone()));
        self.finish(Some(end.clone()), failure);
        self.shared.announce(SandboxEvent::Ended(end));
    }

    fn finish(&self, end: Option<EndRecord>, failure: Failure) {
        self.view.send_modify(|view| {
            view.status.state = SandboxState::Ended;
            view.failure = Some(failure);
            view.end = end;
        });
    }

    /// Makes the end durable. When that is impossible the end is told all the same; the next start will call it a
    /// restart of the platform.
    async fn record(&self, end: &EndRecord) {
        for attempt in 1..=RECORD_TRIES {
            match self.shared.journal.end(end.clone()).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(sandbox = %self.request.id, attempt, error = %chain(&error), "its end could not be recorded");
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Waits for the monitor's end; `None` if its driver does not say.
async fn exited(exit: &mut watch::Receiver<Option<ExitReason>>) -> Option<ExitReason> {
    exit.wait_for(Option::is_some)
        .await
        .ok()
        .and_then(|reason| reason.clone())
}

/// One sample of use, guest and host.
pub(crate) async fn sample(shared: &Shared, name: &ObjectName, link: &Arc<Link>) -> Result<Usage, String> {
    let body = link.metrics().await.map_err(|error| chain(&error))?;
    let figures = GuestFigures::parse(&body)
        .map_err(|error| format!("the guest's metrics are not understood: {error}"))?;
    let host = shared
        .privileges
        .group_usage(name)
        .await
        .map_err(|error| chain(&error))?;
    Ok(figures.sample(Timestamp::now(), &host))
}

/// Now, in the journal's resolution, so that a record reads the same from memory and from disk.
pub(crate) fn now_as_recorded() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)
}
