//! Making one machine ahead, from a template's machine to one that stands still, warm.
//!
//! It is noted like a sandbox's before it is made, and whether it fails, is cancelled or panics, it is taken apart again.

use std::{
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::FutureExt as _;
use space_api::size::SizeClass;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::Ready;
use crate::{
    failure::{self, Failure},
    manager::Shared,
    provision::{CPU_WEIGHT, Order, Progress, wind_up},
    remains::Remains,
    templates::{Lease, ResolvedTemplate},
    warm,
    worker::{self, Worker},
};

/// Share of the CPU while it is made: a tenth of a sandbox's, so that what a sandbox does goes before, and yet it comes to
/// an end on a host that is always busy.
const WEIGHT_AHEAD: u64 = CPU_WEIGHT / 10;
/// A frozen machine may run at most so long without an identity. Its daemon would thaw it by itself in the end, which is to
/// happen to nobody's machine: what it then does it would do in each of its copies.
const FROZEN_LIMIT: Duration = Duration::from_secs(10);

/// One machine to make.
struct Refill {
    shared: Arc<Shared>,
    template: ResolvedTemplate,
    size: SizeClass,
    remains: Mutex<Remains>,
    progress: Progress,
    cancel: CancellationToken,
}

/// Makes one. Must not be dropped; `cancel` ends it.
pub(super) async fn refill(
    shared: Arc<Shared>,
    template: ResolvedTemplate,
    size: SizeClass,
    cancel: CancellationToken,
) -> Result<Ready, Failure> {
    let name = worker::fresh_name().map_err(failure::privilege("naming a machine"))?;
    let refill = Refill {
        shared,
        template,
        size,
        remains: Mutex::new(Remains::new(name)),
        progress: Progress::default(),
        cancel,
    };
    let made = refill.attended().await;
    let Refill { shared, remains, .. } = refill;
    let remains = remains.into_inner().unwrap_or_else(PoisonError::into_inner);
    match made {
        Ok((worker, lease, bytes)) => {
            let (watching, mut exit) = (shared.clone(), worker.machine.exit());
            let watch = tokio::spawn(async move {
                drop(exit.wait_for(Option::is_some).await);
                watching.pool.changed.notify_one();
            });
            Ok(Ready {
                worker,
                remains,
                lease,
                bytes,
                since: Instant::now(),
                _watch: AbortOnDropHandle::new(watch),
            })
        }
        Err(failure) => {
            remove(&shared, remains).await;
            Err(failure)
        }
    }
}

/// Takes a machine apart that is nobody's.
pub(crate) async fn remove(shared: &Shared, mut remains: Remains) {
    let limit = shared.config.limits.stop;
    remains
        .remove(shared.privileges.as_ref(), &shared.uids, limit)
        .await;
    if !remains.is_empty() {
        shared.leave_to_janitor(remains);
    }
}

impl Refill {
    /// Makes it within the limit. One that is to end first is given the time to come to a point where nothing is
    /// half-made, and its machine is killed meanwhile.
    async fn attended(&self) -> Result<(Worker, Lease, u64), Failure> {
        let mut work = pin!(AssertUnwindSafe(self.make()).catch_unwind());
        let panicked = |_| {
            Err(Failure::Step(format!(
                "a fault of the node while {}",
                self.progress.step()
            )))
        };
        let limit = self.shared.pool.config.refill_limit;
        let failure = tokio::select! {
            biased;
            done = &mut work => return done.unwrap_or_else(panicked),
            () = self.cancel.cancelled() => Failure::Ended,
            () = tokio::time::sleep(limit) => Failure::Step(format!(
                "it was not ready within {} s while {}", limit.as_secs(), self.progress.step()
            )),
        };
        if !wind_up(&self.shared, &self.remains, &self.cancel, work).await {
            tracing::error!(
                step = self.progress.step(),
                "a step of a machine made ahead did not come to an end; what it makes is swept later"
            );
        }
        Err(failure)
    }

    async fn make(&self) -> Result<(Worker, Lease, u64), Failure> {
        let (shared, pool) = (&self.shared, &self.shared.pool);
        self.progress.at("preparing the template's machine");
        let point = tokio::select! {
            () = self.cancel.cancelled() => return Err(Failure::Ended),
            point = shared.templates.ensure_machine(&self.template, self.size) => point?,
        };
        let lease = point.lease.clone();
        self.quiet().await;
        let order = Order {
            shared,
            size: self.size,
            cpu_weight: WEIGHT_AHEAD,
            remains: &self.remains,
            progress: &self.progress,
            cancel: &self.cancel,
        };
        let (worker, _) = order.provision(point).await?;
        self.progress.at("warming it");
        let began = Instant::now();
        let warmed = tokio::select! {
            biased;
            () = self.cancel.cancelled() => return Err(Failure::Ended),
            warmed = warm::warm(&worker, || pool.quiet.wait(warm::HOLD_BACK)) => warmed,
        };
        let report = match warmed {
            Ok(report) => report,
            Err(error) => return Err(worker.failure("warming it", &error).await),
        };
        self.progress.at("stopping it");
        worker.machine.pause().await?;
        if report.frozen && began.elapsed() > FROZEN_LIMIT {
            return Err(Failure::Step(format!(
                "it has run frozen for more than {} s",
                FROZEN_LIMIT.as_secs()
            )));
        }
        let group = &worker.name;
        shared
            .privileges
            .set_group_weight(group, CPU_WEIGHT)
            .await
            .map_err(failure::privilege("giving it its share of the CPU"))?;
        let usage = shared
            .privileges
            .group_usage(group)
            .await
            .map_err(failure::privilege("measuring it"))?;
        tracing::debug!(
            worker = %group,
            first_ms = report.first.as_secs_f64() * 1e3,
            again_ms = report.again.as_secs_f64() * 1e3,
            cpu_ms = usage.cpu_micros / 1000,
            mib = usage.memory_bytes >> 20,
            "a machine is warm"
        );
        Ok((worker, lease, usage.memory_bytes))
    }

    async fn quiet(&self) {
        self.shared.pool.quiet.wait(warm::HOLD_BACK).await;
    }
}
