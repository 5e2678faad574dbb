//! A sandbox that is usable or paused, and the ways between.
//!
//! ```text
//!           Pause, Idle                stands still, recorded
//!  running ───────────► pausing ──────────────────────────────► paused
//!   ▲   ▲                  │ work after all, refused, limit:       │ Resume
//!   │   └──────────────────┘ let run again                         ▼
//!   └──────────── runs, clock set, recorded ─────────────────── resuming
//!                                                                  │ refused, limit
//!                                                                  ▼
//!                                                               stopping
//! ```
//!
//! While a transition is under way the task goes on listening: an end, a deadline or the machine's exit breaks it off at
//! once; another pause or resume waits for its turn, in order of arrival.
//!
//! The deadline goes on counting while a sandbox is paused, as the time that was asked for does for one that does nothing.
//! Streams that are open stay open and go on after a resume; whoever wants a new way in is told that it is paused.

use std::{collections::VecDeque, pin::pin};

use jiff::Timestamp;
use space_api::lifecycle::{EndCause, SandboxState};
use space_vmm::{ExitReason, Machine};
use tokio::sync::{mpsc, watch};

use super::{INPUTS, Input, MOST_DETAIL, Parting, Sandbox, Settled, now_as_recorded};
use crate::{
    adopt::Adopted,
    create::Born,
    failure::{chain, tail},
    idle::is_waited_for,
    journal::Change,
    locked,
    seam::SandboxEvent,
    worker::Worker,
};

/// Where the inputs come from, and those that wait for the end of a transition.
struct Desk<'a> {
    inputs: &'a mut mpsc::Receiver<Input>,
    /// At most [`INPUTS`]; who comes after that is told that the sandbox is on its way.
    waiting: VecDeque<Input>,
    exit: watch::Receiver<Option<ExitReason>>,
}

/// Why it is to be paused.
enum Wish {
    /// Somebody wants it.
    Asked(Settled),
    /// There was no work for a while. Given up when there is some after all.
    Idle,
}

impl Wish {
    fn answer(self, answer: Result<(), String>, sandbox: &Sandbox) {
        if let Self::Asked(settled) = self {
            // Nobody may be waiting any more.
            settled
                .send(answer.map(|()| sandbox.view.borrow().status.clone()))
                .ok();
        }
    }
}

impl Sandbox {
    /// It has become usable.
    pub(super) async fn usable(&self, born: Born) -> Worker {
        let Born { worker, timings } = born;
        self.progress.at("running");
        self.shared.registry.settled(&self.request.id);
        let usable = Change::Running {
            ready_ms: Some(timings.ready),
        };
        // Not waited for: the next start finishes what was recorded as being created, and finds it finished.
        drop(self.note(usable).await);
        let now = now_as_recorded();
        let network = locked(&self.remains).network.clone();
        self.view.send_modify(|view| {
            view.status.state = SandboxState::Running;
            view.status.ready_ms = Some(timings.ready);
            view.status.last_active_at = now;
            worker.name.as_str().clone_into(&mut view.status.machine);
            view.worker = worker.name.clone();
            view.network.clone_from(&network);
            view.link = Some(worker.link.clone());
        });
        self.shared
            .announce(SandboxEvent::Ready(self.view.borrow().status.clone()));
        tracing::info!(
            sandbox = %self.request.id,
            ready_ms = timings.ready,
            worker = %worker.name,
            permitted_ms = timings.permitted,
            prepared_ms = timings.prepared,
            started_ms = timings.started,
            greeted_ms = timings.greeted,
            recorded_ms = timings.recorded,
            "usable"
        );
        self.watch_over(&worker.name, &worker.link);
        worker
    }

    /// It lives on with the machine of an earlier process; its view was made with the state that was found.
    pub(super) fn taken_over(&self, adopted: Adopted) -> Worker {
        let Adopted { worker, lease, .. } = adopted;
        *locked(&self.lease) = lease;
        self.progress.at("running");
        self.announce_change();
        self.watch_over(&worker.name, &worker.link);
        worker
    }

    /// From usable until it is to end, and why.
    pub(super) async fn live_on(&self, inputs: &mut mpsc::Receiver<Input>, worker: &Worker) -> Parting {
        let mut desk = Desk {
            inputs,
            waiting: VecDeque::new(),
            exit: worker.machine.exit(),
        };
        loop {
            let input = match desk.waiting.pop_front() {
                Some(input) => Some(input),
                None => tokio::select! {
                    biased;
                    input = desk.inputs.recv() => input,
                    reason = exited(&mut desk.exit) => {
                        return Parting::End(self.exit_cause(worker.machine.as_ref(), reason).await);
                    }
                    () = self.deadline_passes() => return Parting::End(EndCause::Deadline),
                },
            };
            let parting = match input {
                Some(Input::Pause(settled)) => self.pause(&mut desk, worker, Wish::Asked(settled)).await,
                Some(Input::Idle) => self.pause(&mut desk, worker, Wish::Idle).await,
                Some(Input::Resume(settled)) => self.resume(&mut desk, worker, settled).await,
                other => self.take(other).await,
            };
            if let Some(parting) = parting {
                return parting;
            }
        }
    }

    /// Stops the machine.
    async fn pause(&self, desk: &mut Desk<'_>, worker: &Worker, wish: Wish) -> Option<Parting> {
        if self.state() == SandboxState::Paused {
            wish.answer(Ok(()), self);
            return None;
        }
        let idle = matches!(wish, Wish::Idle);
        if idle && self.last_use.is_recent() {
            return None;
        }
        // From here on nobody is given a way in, so that what is open now is all there is.
        self.show(SandboxState::Pausing, None);
        let limit = self.shared.config.limits.pause;
        let steps = async {
            if idle {
                let report = worker.link.report(limit).await.map_err(|error| chain(&error))?;
                if is_waited_for(&report) {
                    return Err("there is work after all".to_owned());
                }
            }
            self.change(Change::Pausing)
                .await
                .map_err(|error| chain(&error))?;
            worker.machine.pause().await.map_err(|error| chain(&error))?;
            let at = now_as_recorded();
            let recorded = self.change(Change::Paused(at)).await;
            recorded.map(|()| at).map_err(|error| chain(&error))
        };
        let work = async {
            let within = tokio::time::timeout(limit, steps).await;
            within.unwrap_or_else(|_| {
                Err(format!(
                    "the machine did not stand still within {} s",
                    limit.as_secs()
                ))
            })
        };
        let failed = match self.attend_transition(desk, worker.machine.as_ref(), work).await {
            Err(parting) => return Some(parting),
            Ok(Ok(at)) => {
                self.show(SandboxState::Paused, Some(at));
                tracing::info!(sandbox = %self.request.id, idle, "paused");
                wish.answer(Ok(()), self);
                return None;
            }
            Ok(Err(what)) => what,
        };
        tracing::info!(sandbox = %self.request.id, idle, failed, "it is not paused and runs on");
        let again = self.let_run(worker.machine.as_ref());
        match self.attend_transition(desk, worker.machine.as_ref(), again).await {
            Err(parting) => Some(parting),
            Ok(Ok(())) => {
                // Not waited for: the next start would let it run as well.
                drop(self.note(Change::Running { ready_ms: None }).await);
                self.show(SandboxState::Running, None);
                wish.answer(Err(failed), self);
                None
            }
            Ok(Err(what)) => Some(stuck(&format!("{failed}; then: {what}"))),
        }
    }

    /// Lets the machine run.
    async fn resume(&self, desk: &mut Desk<'_>, worker: &Worker, settled: Settled) -> Option<Parting> {
        if self.state() == SandboxState::Running {
            settled.send(Ok(self.view.borrow().status.clone())).ok();
            return None;
        }
        let paused_at = self.view.borrow().status.paused_at;
        self.show(SandboxState::Resuming, paused_at);
        let limit = self.shared.config.limits.resume;
        let work = async {
            // The clock is written first, so that the daemon finds it at its first look.
            let (clock, run, recorded) = tokio::join!(
                tokio::time::timeout(limit, worker.link.thaw()),
                self.let_run(worker.machine.as_ref()),
                tokio::time::timeout(limit, self.change(Change::Running { ready_ms: None }))
            );
            run?;
            match clock {
                Ok(Ok(())) => {}
                // The health questions find out whether the daemon is well.
                Ok(Err(error)) => {
                    tracing::warn!(sandbox = %self.request.id, error = %chain(&error), "its clock could not be set");
                }
                Err(_) => tracing::warn!(sandbox = %self.request.id, "its clock could not be set in time"),
            }
            // The next start finds a machine that runs, and leaves it so.
            match recorded {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(sandbox = %self.request.id, error = %chain(&error), "its resume was not recorded");
                }
                Err(_) => tracing::warn!(sandbox = %self.request.id, "its resume was not recorded in time"),
            }
            Ok::<(), String>(())
        };
        match self.attend_transition(desk, worker.machine.as_ref(), work).await {
            Err(parting) => Some(parting),
            Ok(Ok(())) => {
                // Its time without work begins anew, whether or not anyone has looked while it stood still.
                self.last_use.note();
                self.show(SandboxState::Running, None);
                tracing::info!(sandbox = %self.request.id, "resumed");
                settled.send(Ok(self.view.borrow().status.clone())).ok();
                None
            }
            Ok(Err(what)) => Some(stuck(&what)),
        }
    }

    /// Lets the vCPUs run, within the limit.
    async fn let_run(&self, machine: &dyn Machine) -> Result<(), String> {
        let limit = self.shared.config.limits.resume;
        match tokio::time::timeout(limit, machine.resume()).await {
            Ok(run) => run.map_err(|error| chain(&error)),
            Err(_) => Err(format!("the machine did not run within {} s", limit.as_secs())),
        }
    }

    /// Works and listens at the same time. `work` has its own limit and may be dropped at any point.
    async fn attend_transition<T>(
        &self,
        desk: &mut Desk<'_>,
        machine: &dyn Machine,
        work: impl Future<Output = T>,
    ) -> Result<T, Parting> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                input = desk.inputs.recv() => match input {
                    Some(input @ (Input::Pause(_) | Input::Resume(_))) => {
                        if desk.waiting.len() < INPUTS {
                            desk.waiting.push_back(input);
                        }
                    }
                    other => if let Some(parting) = self.take(other).await {
                        return Err(parting);
                    },
                },
                reason = exited(&mut desk.exit) => return Err(Parting::End(self.exit_cause(machine, reason).await)),
                () = self.deadline_passes() => return Err(Parting::End(EndCause::Deadline)),
            }
        }
    }

    fn state(&self) -> SandboxState {
        self.view.borrow().status.state
    }

    /// Lets everyone see the state, and tells the control plane.
    fn show(&self, state: SandboxState, paused_at: Option<Timestamp>) {
        let now = now_as_recorded();
        self.view.send_modify(|view| {
            let status = &mut view.status;
            let resumed = status.paused_at.is_some() && state == SandboxState::Running;
            status.state = state;
            status.paused_at = paused_at;
            if resumed {
                // Somebody has woken it.
                status.last_active_at = now;
                status.idle_since = None;
            }
            if state == SandboxState::Paused {
                status.idle_since = status.idle_since.or(paused_at);
            }
        });
        self.announce_change();
    }
}

/// Waits for the monitor's end; `None` if its driver does not say.
async fn exited(exit: &mut watch::Receiver<Option<ExitReason>>) -> Option<ExitReason> {
    exit.wait_for(Option::is_some)
        .await
        .ok()
        .and_then(|reason| reason.clone())
}

/// The cause for a machine that its monitor does not let run.
fn stuck(what: &str) -> Parting {
    Parting::End(EndCause::VmmFailed {
        detail: tail(&format!("the machine could not be let run: {what}"), MOST_DETAIL),
    })
}
