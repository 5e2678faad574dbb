//! One sandbox: one task with an input queue and a view that anyone may watch.
//!
//! ```text
//!            admitted                                     live in the journal
//!               │                                                 │ `adopt.rs`
//!               ▼   a worker, its identity, `create.rs`           ▼
//!           creating ── acknowledged and durable ──► running ◄──► paused     the ways between: `running.rs`
//!               │                                       │           │
//!   failed step, limit, End        End, deadline, machine exited, daemon silent, transition stuck
//!               └───────────────► stopping ◄────────────┴───────────┘        `stopping.rs`
//!                                    │  machine killed, everything removed, end recorded
//!                                    ▼
//!                                  ended   (leaves the registry; its record stays)
//! ```
//!
//! Only the task takes an edge. `End` may come in any state; in `stopping` it changes nothing. `Detach` leaves a running or
//! paused machine to the next start and ends one that is being created. The task belongs to the node, so a caller that goes
//! away leaves nothing half-made.
//!
//! Each state that is on the way to another has a limit, and what happens when it is reached:
//!
//! | state | limit | then |
//! |---|---|---|
//! | creating | `Limits::template` for a machine that is not there yet, `Limits::create` | undone; the creator is told the step |
//! | pausing | `Limits::pause` | let run again: running; if it cannot run: stopping |
//! | resuming | `Limits::resume` | stopping: a machine that cannot run is of no use |
//! | stopping | `Limits::stop` | ended; what is left is the janitor's, and in the end the next start's |

mod creating;
mod running;
mod stopping;
mod watching;

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::FutureExt as _;
use jiff::Timestamp;
use space_api::{lifecycle::EndCause, size::SizeClass};
use space_node_manager::ObjectName;
use tokio::sync::{mpsc, oneshot, watch};

pub(crate) use self::watching::sample;
use crate::{
    adopt::Adopted,
    failure::{Failure, tail},
    idle::LastUse,
    journal::{Change, JournalError, Life, Recorded, Recording},
    link::{Link, Owner, Secrets},
    locked,
    manager::Shared,
    provision::Progress,
    remains::Remains,
    seam::{CreateSandbox, EndRecord, SandboxEvent, SandboxStatus},
    templates::{Lease, ResolvedTemplate},
    usage::History,
    worker::Worker,
};

/// Inputs that may wait; senders wait when it is full.
pub(crate) const INPUTS: usize = 16;
/// Longest detail of a cause, bytes.
pub(crate) const MOST_DETAIL: usize = 2048;
/// Longest single sleep towards a deadline, so that a corrected wall clock is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Told how a transition went: the state that was reached, or why it was not.
pub(crate) type Settled = oneshot::Sender<Result<SandboxStatus, String>>;

/// What a sandbox can be told.
#[derive(Debug)]
pub(crate) enum Input {
    /// End, for this reason.
    End(EndCause),
    /// End at this time; answered when it is taken over, with what tells when it is durable.
    SetDeadline(Timestamp, oneshot::Sender<Recording>),
    /// Stop the machine; answered when it stands still.
    Pause(Settled),
    /// Let the machine run; answered when it does.
    Resume(Settled),
    /// Stop the machine unless there is work after all.
    Idle,
    /// The daemon has not answered for too long.
    Unresponsive(String),
    /// Leave the machine as it is to another process.
    Detach,
}

/// How a sandbox's task comes to its end.
enum Parting {
    End(EndCause),
    Detach,
}

/// What can be seen of a sandbox.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) status: SandboxStatus,
    /// What its objects on the host are called.
    pub(crate) worker: ObjectName,
    /// And its network.
    pub(crate) network: Option<ObjectName>,
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) failure: Option<Failure>,
    pub(crate) end: Option<EndRecord>,
}

/// Where a sandbox's task begins.
pub(crate) enum Origin {
    /// With nothing.
    Created,
    /// With a machine of an earlier process.
    Adopted(Box<Adopted>),
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
    pub(crate) last_use: Arc<LastUse>,
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
    /// Lives the whole life. Returns when nothing is left, or when the machine has been let go.
    pub(crate) async fn run(self, origin: Origin, mut inputs: mpsc::Receiver<Input>) {
        let lived = AssertUnwindSafe(self.live(origin, &mut inputs))
            .catch_unwind()
            .await;
        let lived = lived.unwrap_or_else(|_| {
            tracing::error!(sandbox = %self.request.id, step = self.progress.step(), "the sandbox's own task panicked; taking it apart");
            Some(Ending::failed(Failure::Step(format!("a fault of the node while {}", self.progress.step()))))
        });
        match lived {
            Some(ending) => self.stop(ending).await,
            None => self.let_go(),
        }
    }

    /// `None` when the machine is to be let go.
    async fn live(&self, origin: Origin, inputs: &mut mpsc::Receiver<Input>) -> Option<Ending> {
        let worker = match origin {
            Origin::Created => match self.creating(inputs).await {
                Ok(born) => self.usable(born).await,
                Err(ending) => return Some(ending),
            },
            Origin::Adopted(adopted) => self.taken_over(*adopted),
        };
        match self.live_on(inputs, &worker).await {
            Parting::End(cause) => Some(Ending::told(cause)),
            Parting::Detach => None,
        }
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

    /// Writes a change down; the answer tells when it is durable, for whom it concerns.
    async fn note(&self, change: Change) -> Recording {
        let (id, generation) = (self.request.id.clone(), self.request.generation);
        self.shared.journal.note(id, generation, change).await
    }

    /// Takes over what was put in; answers how that ends the task, if it does.
    async fn take(&self, input: Option<Input>) -> Option<Parting> {
        match input {
            Some(Input::End(cause)) => Some(Parting::End(cause)),
            Some(Input::Unresponsive(detail)) => Some(Parting::End(EndCause::GuestFailed { detail })),
            Some(Input::Detach) => Some(Parting::Detach),
            Some(Input::SetDeadline(deadline, taken)) => {
                let deadline = as_recorded(deadline);
                self.view.send_modify(|view| view.status.deadline = deadline);
                let recording = self.note(Change::Deadline(deadline)).await;
                // Nobody may be waiting any more.
                taken.send(recording).ok();
                self.announce_change();
                None
            }
            // Dropped unanswered: it is neither running nor paused.
            Some(Input::Pause(_) | Input::Resume(_) | Input::Idle) => None,
            // The task holds a sender itself, so the queue cannot end.
            None => Some(Parting::End(EndCause::Deleted)),
        }
    }

    fn announce_change(&self) {
        let status = self.view.borrow().status.clone();
        self.shared.announce(SandboxEvent::Changed(status));
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
}

/// A time in the journal's resolution, so that a record reads the same from memory and from disk.
pub(crate) fn as_recorded(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}

pub(crate) fn now_as_recorded() -> Timestamp {
    as_recorded(Timestamp::now())
}
