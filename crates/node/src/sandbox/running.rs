//! A sandbox that is usable or paused, and the ways between.
//!
//! ```text
//!              Pause                     stands still, recorded
//!  running ───────────► pausing ──────────────────────────────► paused
//!   ▲   ▲                  │ refused, limit: let run again         │ Resume
//!   │   └──────────────────┘                                       ▼
//!   └──────────── runs, clock set, recorded ──────────────────  resuming
//!                                                                  │ refused, limit
//!                                                                  ▼
//!                                                               stopping (a machine that cannot run is of no use)
//! ```
//!
//! While a transition is under way the task goes on listening: an end, a deadline or the machine's exit breaks it off at
//! once; another pause or resume waits for its turn, in order of arrival.

use std::{collections::VecDeque, pin::pin, sync::Arc};

use jiff::Timestamp;
use space_api::lifecycle::{EndCause, SandboxState};
use space_vmm::{ExitReason, Machine};
use tokio::sync::{mpsc, watch};

use super::{INPUTS, Input, MOST_DETAIL, Sandbox, Settled, exited, now_as_recorded};
use crate::{
    failure::{chain, tail},
    journal::Change,
    link::Link,
    seam::SandboxEvent,
};

/// Where the inputs come from, and those that wait for the end of a transition.
struct Desk<'a> {
    inputs: &'a mut mpsc::Receiver<Input>,
    /// At most [`INPUTS`]; who comes after that is told that the sandbox is on its way.
    waiting: VecDeque<Input>,
    exit: watch::Receiver<Option<ExitReason>>,
}

impl Sandbox {
    /// From usable until it is to end, and why.
    pub(super) async fn live_on(
        &self,
        inputs: &mut mpsc::Receiver<Input>,
        machine: &Arc<dyn Machine>,
        link: &Arc<Link>,
    ) -> EndCause {
        let mut desk = Desk {
            inputs,
            waiting: VecDeque::new(),
            exit: machine.exit(),
        };
        loop {
            let input = match desk.waiting.pop_front() {
                Some(input) => Some(input),
                None => tokio::select! {
                    biased;
                    input = desk.inputs.recv() => input,
                    reason = exited(&mut desk.exit) => return self.exit_cause(machine.as_ref(), reason).await,
                    () = self.deadline_passes() => return EndCause::Deadline,
                },
            };
            let ended = match input {
                Some(Input::Pause(settled)) => self.pause(&mut desk, machine, settled).await,
                Some(Input::Resume(settled)) => self.resume(&mut desk, machine, link, settled).await,
                other => self.take(other),
            };
            if let Some(cause) = ended {
                return cause;
            }
        }
    }

    /// Stops the machine. Answers a cause if the sandbox is to end.
    async fn pause(
        &self,
        desk: &mut Desk<'_>,
        machine: &Arc<dyn Machine>,
        settled: Settled,
    ) -> Option<EndCause> {
        if self.state() == SandboxState::Paused {
            settled.send(Ok(self.view.borrow().status.clone())).ok();
            return None;
        }
        self.show(SandboxState::Pausing, None);
        let limits = &self.shared.config.limits;
        let work = async {
            self.change(Change::Pausing).await.map_err(|error| chain(&error))?;
            machine.pause().await.map_err(|error| chain(&error))?;
            let at = now_as_recorded();
            let recorded = self.change(Change::Paused(at)).await;
            recorded.map(|()| at).map_err(|error| chain(&error))
        };
        let work = async {
            let within = tokio::time::timeout(limits.pause, work).await;
            within.unwrap_or_else(|_| {
                let seconds = limits.pause.as_secs();
                Err(format!("the machine did not stand still within {seconds} s"))
            })
        };
        let failed = match self.attend_transition(desk, machine, work).await {
            Err(cause) => return Some(cause),
            Ok(Ok(at)) => {
                self.show(SandboxState::Paused, Some(at));
                settled.send(Ok(self.view.borrow().status.clone())).ok();
                return None;
            }
            Ok(Err(what)) => what,
        };
        tracing::warn!(sandbox = %self.request.id, failed, "it could not be paused and is let run on");
        match self.attend_transition(desk, machine, self.let_run(machine)).await {
            Err(cause) => Some(cause),
            Ok(Ok(())) => {
                // Not awaited: the next start would let it run as well.
                self.note(Change::Running { ready_ms: None }).await;
                self.show(SandboxState::Running, None);
                settled.send(Err(failed)).ok();
                None
            }
            Ok(Err(what)) => Some(stuck(&format!("{failed}; then: {what}"))),
        }
    }

    async fn resume(
        &self,
        desk: &mut Desk<'_>,
        machine: &Arc<dyn Machine>,
        link: &Arc<Link>,
        settled: Settled,
    ) -> Option<EndCause> {
        if self.state() == SandboxState::Running {
            settled.send(Ok(self.view.borrow().status.clone())).ok();
            return None;
        }
        let paused_at = self.view.borrow().status.paused_at;
        self.show(SandboxState::Resuming, paused_at);
        let work = async {
            // The clock is written first, so that the daemon finds it at its first look.
            let (clock, run, recorded) = tokio::join!(
                link.thaw(),
                self.let_run(machine),
                self.change(Change::Running { ready_ms: None })
            );
            run?;
            if let Err(error) = clock {
                // The health questions find out whether the daemon is well.
                tracing::warn!(sandbox = %self.request.id, error = %chain(&error), "its clock could not be set");
            }
            if let Err(error) = recorded {
                // The next start finds a machine that runs, and leaves it so.
                tracing::warn!(sandbox = %self.request.id, error = %chain(&error), "its resume was not recorded");
            }
            Ok::<(), String>(())
        };
        match self.attend_transition(desk, machine, work).await {
            Err(cause) => Some(cause),
            Ok(Ok(())) => {
                self.show(SandboxState::Running, None);
                settled.send(Ok(self.view.borrow().status.clone())).ok();
                None
            }
            Ok(Err(what)) => Some(stuck(&what)),
        }
    }

    /// Lets the vCPUs run, within the limit.
    async fn let_run(&self, machine: &Arc<dyn Machine>) -> Result<(), String> {
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
        machine: &Arc<dyn Machine>,
        work: impl Future<Output = T>,
    ) -> Result<T, EndCause> {
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
                    other => if let Some(cause) = self.take(other) {
                        return Err(cause);
                    },
                },
                reason = exited(&mut desk.exit) => return Err(self.exit_cause(machine.as_ref(), reason).await),
                () = self.deadline_passes() => return Err(EndCause::Deadline),
            }
        }
    }

    fn state(&self) -> SandboxState {
        self.view.borrow().status.state
    }

    /// Lets everyone see the state, and tells the control plane.
    fn show(&self, state: SandboxState, paused_at: Option<Timestamp>) {
        self.view.send_modify(|view| {
            view.status.state = state;
            view.status.paused_at = paused_at;
        });
        self.shared
            .announce(SandboxEvent::Changed(self.view.borrow().status.clone()));
    }
}

/// The cause for a machine that its monitor does not let run.
fn stuck(what: &str) -> EndCause {
    EndCause::VmmFailed {
        detail: tail(&format!("the machine could not be let run: {what}"), MOST_DETAIL),
    }
}
