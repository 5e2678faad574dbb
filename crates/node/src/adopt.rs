//! Taking over the machines that an earlier process of this node has left running.
//!
//! ```text
//!  live in the journal
//!   │  stopping ──────────────────────────────────────────────► lost, for the cause that is recorded
//!   ▼
//!  machine ── `Vmm::adopt`: same process, same program ── not so ► lost
//!   ▼
//!  run state ── paused and stands still ──► hello written, to be read when it is resumed ──► adopted, paused
//!   ▼ anything else
//!  daemon ── hello, thaw and clock written, vCPUs let run ── silent, of another generation ► lost
//!   ▼
//!  environment, of one that was being created ──► adopted, running
//! ```
//!
//! All at the same time, at most [`AT_ONCE`], each within `Limits::adopt`. What is lost is ended with a cause, and its machine
//! is swept with everything else that no adopted one owns, so an adoption leaves either a sandbox that is usable (or paused, as
//! it was) or nothing. Every adoption of a machine that is to run ends in a thaw, whatever the earlier process had begun:
//! nothing of an agent stands still because a manager died.
//!
//! Nothing is written until the fate of all is known, so a crash in the middle changes nothing, and the next start does the
//! same again.
//!
//! A life that was being created and has its identity is finished here: the record was durable, so somebody may have been
//! told of it, and the control plane settles what it makes of that. One without its identity was told to nobody and ends.

use std::{panic::AssertUnwindSafe, path::Path, sync::Arc};

use futures_util::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use space_api::lifecycle::EndCause;
use space_channel::HelloAck;
use space_node_manager::Privileges;
use space_vmm::{ExitReason, Machine, RunState, Vmm, VmmError};
use tokio_util::task::TaskTracker;

use crate::{
    config::NodeConfig,
    failure::{chain, tail},
    journal::{Life, Recorded},
    link::{Link, Owner},
    provision::Progress,
    remains::Remains,
    sandbox::MOST_DETAIL,
    start_up::{DISKS, MACHINES},
    templates::{Lease, Templates},
    worker::Worker,
};

/// Most adoptions at once: each is a few exchanges with a monitor and a guest.
const AT_ONCE: usize = 16;

/// A machine that has been taken over.
#[derive(Debug)]
pub(crate) struct Adopted {
    pub(crate) worker: Worker,
    pub(crate) remains: Remains,
    pub(crate) lease: Option<Lease>,
    /// Since when it stands still, if it does.
    pub(crate) paused_at: Option<Timestamp>,
}

/// A life that could not be gone on with.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) cause: EndCause,
    pub(crate) cpu_micros: u64,
}

/// What adoption works with.
pub(crate) struct Adopter<'a> {
    pub(crate) config: &'a NodeConfig,
    pub(crate) privileges: &'a dyn Privileges,
    pub(crate) vmm: &'a dyn Vmm,
    pub(crate) templates: &'a dyn Templates,
    pub(crate) tracker: &'a TaskTracker,
}

impl Adopter<'_> {
    /// Decides the fate of all lives.
    pub(crate) async fn all(&self, lives: Vec<Life>) -> Vec<(Life, Result<Adopted, Lost>)> {
        futures_util::stream::iter(lives)
            .map(|life| async {
                let fate = self.within_limit(&life).await;
                (life, fate)
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await
    }

    async fn within_limit(&self, life: &Life) -> Result<Adopted, Lost> {
        // Read first: with the machine its group is swept.
        let usage = self.privileges.group_usage(&life.machine.name).await.ok();
        let limit = self.config.limits.adopt;
        let progress = Progress::default();
        let adoption = AssertUnwindSafe(self.adopt(life, &progress)).catch_unwind();
        let cause = match tokio::time::timeout(limit, adoption).await {
            Ok(Ok(Ok(adopted))) => {
                tracing::info!(
                    sandbox = %life.id,
                    worker = %adopted.worker.name,
                    paused = adopted.paused_at.is_some(),
                    "adopted"
                );
                return Ok(adopted);
            }
            Ok(Ok(Err(cause))) => cause,
            Ok(Err(_)) => failed(&format!("a fault of the node while {}", progress.step())),
            Err(_) => failed(&format!(
                "not taken over within {} s while {}",
                limit.as_secs(),
                progress.step()
            )),
        };
        let cause = match (cause, &usage) {
            (EndCause::VmmFailed { .. }, Some(usage)) if usage.oom_kills > 0 => EndCause::OutOfMemory,
            // Not even its group is there: the host was started anew.
            (EndCause::VmmFailed { .. }, None) => EndCause::PlatformRestarted,
            (cause, _) => cause,
        };
        tracing::warn!(sandbox = %life.id, worker = %life.machine.name, ?cause, "not adopted");
        Err(Lost {
            cause,
            cpu_micros: usage.map_or(0, |usage| usage.cpu_micros),
        })
    }

    async fn adopt(&self, life: &Life, progress: &Progress) -> Result<Adopted, EndCause> {
        if let Recorded::Stopping(cause) = &life.state {
            return Err(cause.clone());
        }
        progress.at("taking over its monitor");
        self.pass("adopt.machine").await?;
        let machine = self.vmm.adopt(life.machine.clone()).await;
        let machine: Arc<dyn Machine> = machine.map_err(machine_cause)?.into();
        let guard = Guarded(Some(machine.clone()));

        progress.at("asking whether it runs");
        let stands = machine.status().await.map_err(machine_cause)? == RunState::Paused;
        let paused_at = match life.state {
            Recorded::Paused(at) if stands => Some(at),
            _ => None,
        };
        let remains = self.remains(life, machine.clone());
        let owner = Owner {
            tracker: self.tracker.clone(),
            stop: remains.stop.clone(),
        };
        progress.at("greeting its daemon");
        self.pass("adopt.link").await?;
        let link = Link::open(machine.clone(), life.generation, owner, self.config.limits.ask)
            .await
            .map_err(|error| silent(&chain(&error)))?;
        if paused_at.is_none() {
            self.let_run(life, machine.as_ref(), &link, stands).await?;
            progress.at("giving it its environment");
            if !life.environment.is_empty() {
                let body = serde_json::json!({ "envVars": life.environment });
                let given = link.init(body.to_string().into_bytes()).await;
                given.map_err(|error| silent(&chain(&error)))?;
            }
        }
        progress.at("holding its template");
        let lease = self.templates.hold(&life.template_digest, life.size).await;
        let lease = lease.unwrap_or_else(|error| {
            // It has its files open, so it needs none of them by name.
            tracing::warn!(sandbox = %life.id, error = %chain(&error), "its template is no longer there");
            None
        });
        self.pass("adopt.done").await?;
        guard.keep();
        Ok(Adopted {
            worker: Worker {
                name: life.machine.name.clone(),
                machine,
                link,
            },
            remains,
            lease,
            paused_at,
        })
    }

    /// Has the daemon thaw its agent and set its clock, and the machine run if it does not.
    async fn let_run(
        &self,
        life: &Life,
        machine: &dyn Machine,
        link: &Link,
        stands: bool,
    ) -> Result<(), EndCause> {
        let run = async { if stands { machine.resume().await } else { Ok(()) } };
        let (greeted, run) = tokio::join!(
            async {
                link.thaw().await?;
                link.greeted().await
            },
            run
        );
        run.map_err(machine_cause)?;
        let HelloAck { generation, .. } = greeted.map_err(|error| silent(&chain(&error)))?;
        if generation == life.generation {
            return Ok(());
        }
        Err(match life.state {
            Recorded::Creating => EndCause::PlatformRestarted,
            _ => silent(&format!(
                "it is of generation {generation} and not of {}",
                life.generation
            )),
        })
    }

    fn remains(&self, life: &Life, machine: Arc<dyn Machine>) -> Remains {
        let name = life.machine.name.clone();
        let below = |parent: &Path, kind: &str| parent.join(kind).join(name.as_str());
        let mut remains = Remains::new(name.clone());
        remains.machine = Some(machine);
        remains.group = true;
        remains.network.clone_from(&life.network);
        remains.directories = vec![
            below(&self.config.run_directory, MACHINES),
            below(&self.config.data_directory, DISKS),
        ];
        remains.uid = Some(life.machine.uid);
        remains
    }

    async fn pass(&self, point: &str) -> Result<(), EndCause> {
        self.config
            .faults
            .pass(point)
            .await
            .map_err(|error| failed(&error.to_string()))
    }
}

/// Lets a machine go whose adoption was broken off, so that its end is the sweep's, with its group and in order.
struct Guarded(Option<Arc<dyn Machine>>);

impl Guarded {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(machine) = &self.0 {
            machine.detach();
        }
    }
}

fn failed(what: &str) -> EndCause {
    EndCause::VmmFailed {
        detail: tail(what, MOST_DETAIL),
    }
}

fn silent(what: &str) -> EndCause {
    EndCause::GuestFailed {
        detail: tail(
            &format!("the space daemon could not be reached after the platform's restart: {what}"),
            MOST_DETAIL,
        ),
    }
}

/// The cause for a machine that its driver could not take over.
fn machine_cause(error: VmmError) -> EndCause {
    let VmmError::Exited { reason, .. } = error else {
        return failed(&chain(&error));
    };
    match reason {
        ExitReason::GuestShutdown => EndCause::GuestShutdown,
        ExitReason::GuestPanicked { console } => EndCause::GuestFailed {
            detail: tail(&console, MOST_DETAIL),
        },
        ExitReason::OutOfMemory => EndCause::OutOfMemory,
        ExitReason::MonitorFailed { detail } => {
            failed(&format!("its monitor ended while nobody watched: {detail}"))
        }
        ExitReason::Killed => failed("its monitor was killed while nobody watched"),
    }
}
