//! What goes on beside a sandbox that runs: asking the daemon for its health, sampling its use, noticing that it is idle.
//!
//! Nothing is asked while the machine stands still. The health question goes over the control port, is the only one that
//! an idle sandbox is asked often, and its answer also says what the agent does.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use space_api::lifecycle::{IdlePolicy, SandboxState};
use space_channel::HealthReport;
use space_node_manager::ObjectName;
use tokio::{
    sync::{Mutex, mpsc, watch},
    time::Instant,
};

use super::{Input, MOST_DETAIL, Sandbox, View, now_as_recorded};
use crate::{
    failure::{chain, tail},
    idle::{Figures, Meter},
    link::{Link, LinkError},
    manager::Shared,
    seam::{SandboxEvent, Usage},
    usage::{GuestFigures, History},
};

/// What the watching works with.
struct Watch {
    shared: Arc<Shared>,
    id: String,
    worker: ObjectName,
    link: Arc<Link>,
    view: watch::Sender<View>,
    inputs: mpsc::Sender<Input>,
    history: Arc<History>,
    on_idle: Option<IdlePolicy>,
    /// Held while the guest is asked, so that the one question is not taken for work by the other.
    turn: Mutex<()>,
}

impl Sandbox {
    /// Starts the task that watches over the machine until the sandbox stops.
    pub(super) fn watch_over(&self, worker: &ObjectName, link: &Arc<Link>) {
        let watch = Watch {
            shared: self.shared.clone(),
            id: self.request.id.as_str().to_owned(),
            worker: worker.clone(),
            link: link.clone(),
            view: self.view.clone(),
            inputs: self.own_inputs.clone(),
            history: self.history.clone(),
            on_idle: self.request.on_idle,
            turn: Mutex::default(),
        };
        let stop = self.owner.stop.clone();
        self.owner.tracker.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                _ = async { tokio::join!(watch.health(), watch.usage()) } => {}
            }
        });
    }
}

impl Watch {
    async fn health(&self) {
        let limits = &self.shared.config.limits;
        let mut misses = 0;
        let mut meter = Meter::default();
        let mut idle = Idle::default();
        let mut runs = self.view.subscribe();
        loop {
            tokio::time::sleep(limits.health_interval).await;
            if !is_running(&runs) {
                meter.reset();
                idle = Idle::default();
                misses = 0;
                if runs
                    .wait_for(|view| view.status.state == SandboxState::Running)
                    .await
                    .is_err()
                {
                    return;
                }
            }
            let answer = {
                let _turn = self.turn.lock().await;
                tokio::select! {
                    answer = self.link.report(limits.health_answer) => answer,
                    // A machine that stands still owes no answer.
                    _ = runs.wait_for(|view| view.status.state != SandboxState::Running) => continue,
                }
            };
            match answer {
                Ok(report) => {
                    misses = 0;
                    self.judge(&report, &mut meter, &mut idle).await;
                }
                Err(error) => {
                    misses += 1;
                    if self.missed(misses, &error).await {
                        return;
                    }
                }
            }
        }
    }

    /// Answers whether that was one too many.
    async fn missed(&self, misses: u32, error: &LinkError) -> bool {
        let error = chain(error);
        tracing::warn!(
            sandbox = self.id,
            misses,
            error,
            "the daemon did not say that it is well"
        );
        if misses < self.shared.config.limits.health_misses {
            return false;
        }
        let detail = format!("the space daemon has not answered {misses} times in a row: {error}");
        drop(
            self.inputs
                .send(Input::Unresponsive(tail(&detail, MOST_DETAIL)))
                .await,
        );
        true
    }

    async fn judge(&self, report: &HealthReport, meter: &mut Meter, idle: &mut Idle) {
        let host = self.shared.privileges.group_usage(&self.worker).await;
        let figures = Figures::new(report, host.ok().map(|usage| usage.cpu_micros));
        let now = now_as_recorded();
        let work = meter.work(figures);
        let since = idle.observe(work.is_some(), now);
        let changed = self.view.send_if_modified(|view| {
            let status = &mut view.status;
            if status.state != SandboxState::Running {
                return false;
            }
            if work.is_some() {
                status.last_active_at = now;
            }
            let changed = status.idle_since != since;
            status.idle_since = since;
            changed
        });
        if changed {
            tracing::debug!(sandbox = self.id, work, "its idleness has changed");
            let status = self.view.borrow().status.clone();
            self.shared.announce(SandboxEvent::Changed(status));
        }
        if let Some(policy) = &self.on_idle
            && idle.lasts(Duration::from_secs(policy.after_seconds.into()))
        {
            // Should there be work after all, the next answer says so again or no more.
            drop(self.inputs.send(Input::Idle).await);
        }
    }

    async fn usage(&self) {
        let mut runs = self.view.subscribe();
        loop {
            tokio::time::sleep(self.shared.config.limits.usage_interval).await;
            if runs
                .wait_for(|view| view.status.state == SandboxState::Running)
                .await
                .is_err()
            {
                return;
            }
            let _turn = self.turn.lock().await;
            tokio::select! {
                sampled = sample(&self.shared, &self.worker, &self.link) => match sampled {
                    Ok(sample) => self.history.add(sample),
                    Err(error) => tracing::debug!(sandbox = self.id, error, "no sample of its use"),
                },
                _ = runs.wait_for(|view| view.status.state != SandboxState::Running) => {}
            }
        }
    }
}

fn is_running(view: &watch::Receiver<View>) -> bool {
    view.borrow().status.state == SandboxState::Running
}

/// How long there has been no work.
#[derive(Debug, Default)]
struct Idle {
    /// When work was last seen.
    worked: Option<(Instant, Timestamp)>,
    idle: bool,
}

impl Idle {
    /// Answers since when it is idle.
    fn observe(&mut self, work: bool, now: Timestamp) -> Option<Timestamp> {
        if work || self.worked.is_none() {
            *self = Self {
                worked: Some((Instant::now(), now)),
                idle: false,
            };
            return None;
        }
        self.idle = true;
        self.worked.map(|(_, at)| at)
    }

    fn lasts(&self, time: Duration) -> bool {
        self.idle && self.worked.is_some_and(|(since, _)| since.elapsed() >= time)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn idleness_lasts_from_the_last_work_and_work_ends_it() {
        let mut idle = Idle::default();
        let hour = Duration::from_secs(3600);
        let at = |second| Timestamp::from_second(second).expect("in range");
        assert_eq!(idle.observe(false, at(1)), None, "the first look tells nothing");
        tokio::time::advance(hour).await;
        assert!(!idle.lasts(hour), "it has not been seen idle yet");
        assert_eq!(idle.observe(false, at(2)), Some(at(1)));
        assert!(idle.lasts(hour) && !idle.lasts(hour * 2));
        tokio::time::advance(hour).await;
        assert!(idle.lasts(hour * 2));
        assert_eq!(idle.observe(true, at(3)), None);
        assert!(!idle.lasts(Duration::ZERO));
        assert_eq!(idle.observe(false, at(4)), Some(at(3)));
    }
}
