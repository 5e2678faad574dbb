//! Taking a sandbox apart, or letting it go.

use std::time::Duration;

use space_api::lifecycle::{EndCause, SandboxState};
use space_node_manager::GroupUsage;
use space_vmm::{ExitReason, Machine};
use tokio::time::timeout;

use super::{Ending, MOST_DETAIL, Sandbox, now_as_recorded};
use crate::{
    create::milliseconds,
    failure::{Failure, chain, tail},
    journal::Change,
    locked,
    remains::Remains,
    seam::{EndRecord, SandboxEvent},
};

/// Tries to record an end.
const RECORD_TRIES: u32 = 3;
/// Wait between two of them.
const RECORD_RETRY: Duration = Duration::from_millis(100);

impl Sandbox {
    pub(super) async fn stop(&self, ending: Ending) {
        let Ending { cause, failure } = ending;
        self.view.send_modify(|view| {
            view.status.state = SandboxState::Stopping;
            view.link = None;
        });
        self.shared.registry.settled(&self.request.id);
        self.owner.stop.cancel();
        let mut remains = Remains::taken_from(&mut locked(&self.remains));
        let limit = self.shared.config.limits.stop;
        let begun = async {
            // Beside the removal: should the machine be gone before this is durable, the next start sees a machine that
            // is gone.
            if failure == Failure::Stale {
                return;
            }
            match timeout(limit, self.change(Change::Stopping(cause.clone()))).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(sandbox = %self.request.id, error = %chain(&error), "that it is to end was not recorded");
                }
                Err(_) => {
                    tracing::warn!(sandbox = %self.request.id, "that it is to end was not recorded in time");
                }
            }
        };
        let removal = remains.remove(self.shared.privileges.as_ref(), &self.shared.uids, limit);
        let ((), usage): ((), GroupUsage) = tokio::join!(begun, removal);
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

    /// Leaves the machine as it is to the next start, which finds it by the journal.
    pub(super) fn let_go(&self) {
        self.owner.stop.cancel();
        let remains = Remains::taken_from(&mut locked(&self.remains));
        remains.stop.cancel();
        if let Some(machine) = &remains.machine {
            machine.detach();
        }
        // It stays in the registry: whoever still asks is told that the node shuts down, not that the sandbox is gone.
        tracing::info!(sandbox = %self.request.id, worker = %remains.name, "let go");
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
            match timeout(
                self.shared.config.limits.stop,
                self.shared.journal.end(end.clone()),
            )
            .await
            {
                Ok(Ok(())) => return,
                Ok(Err(error)) => {
                    tracing::error!(sandbox = %self.request.id, attempt, error = %chain(&error), "its end could not be recorded");
                }
                // It is in the journal's queue: once is enough.
                Err(_) => {
                    tracing::error!(sandbox = %self.request.id, "its end was not recorded in time");
                    return;
                }
            }
            tokio::time::sleep(RECORD_RETRY).await;
        }
    }

    /// The cause for a machine that has ended.
    pub(super) async fn exit_cause(&self, machine: &dyn Machine, reason: Option<ExitReason>) -> EndCause {
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
}
